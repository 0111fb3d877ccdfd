"""Chat messages: the forms that Echo accepts, and the form that chat templates expect.

Rows, environments and agents write messages in several forms, but chat templates expect a single
form. As in inference servers, text parts are joined, and a missing content becomes the empty text.
Tool arguments that are JSON text become objects.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

Message = dict[str, Any]
"""A chat message: the text `role`, the `content`, and other keys that the chat template reads."""

_OTHER_CONTENT = ("tool_calls", "reasoning_content")

_TEXT_PARTS = ("text", "input_text", "output_text")
"""The types of text parts in OpenAI's two interfaces."""

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
"""The roles that chat templates support."""
_OTHER_NAMES = {"human": "user", "prompter": "user"} | dict.fromkeys(
    ("ai", "bot", "chatbot", "gpt", "model"), "assistant"
)
"""Unusual name of a role in a dataset -> the usual name. A chat template would write the unusual
name unchanged.
"""


def fault_of_message(part: object) -> str:
    """Return the reason why an object cannot be tokenised as a chat message, or ""."""
    if not isinstance(part, Mapping):
        return f"is {type(part).__name__} and no object with `role` and `content`"
    if not isinstance(part.get("role"), str):
        if "from" in part and "value" in part:
            return "has `from` and `value`; write them as `role` and `content`"
        return "has no text `role`"
    role = part["role"].strip().lower()
    meant = role if role in ROLES else _OTHER_NAMES.get(role, "")
    if not role:
        return "has an empty `role`"
    if meant and part["role"] != meant:
        return f"has the role {part['role']!r}: write {meant!r}, which chat templates know"
    content = part.get("content")
    if content is None:
        has_content = any(part.get(key) for key in _OTHER_CONTENT)
        return "" if has_content else "has neither `content` nor `tool_calls`"
    if isinstance(content, list):
        return next(filter(None, map(_fault_of_part, content)), "")
    return "" if isinstance(content, str) else f"has a `content` of {type(content).__name__}"


def fault_of_messages(messages: Iterable[object]) -> str:
    """Describe the fault of the first message that cannot be tokenised; "" if there is none."""
    found = ((number, fault_of_message(part)) for number, part in enumerate(messages, 1))
    return next((f"message {number} {fault}" for number, fault in found if fault), "")


def plain_message(message: Mapping[str, Any]) -> Message:
    """Convert a message to the form that chat templates expect."""
    plain = {key: value for key, value in message.items() if value is not None}
    content = plain.get("content", "")
    if isinstance(content, list):
        content = "".join(part if isinstance(part, str) else part["text"] for part in content)
    plain["content"] = content
    if isinstance(plain.get("tool_calls"), list):
        plain["tool_calls"] = [_plain_call(call) for call in plain["tool_calls"]]
    return plain


def _fault_of_part(part: object) -> str:
    if isinstance(part, str):
        return ""
    if not isinstance(part, Mapping):
        return f"has a part of {type(part).__name__}"
    kind = part.get("type", "text")
    if kind in _TEXT_PARTS:
        return "" if isinstance(part.get("text"), str) else "has a part without `text`"
    return f"has a part of the type {kind!r}; a model is trained on text alone here"


def _plain_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}
