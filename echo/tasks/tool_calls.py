"""Calls of tools in a policy's text, as the Qwen and Hermes families write them.

<tool_call>
{"name": "add", "arguments": {"a": 1, "b": 2}}
</tool_call>
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

# White space around a call is left to the JSON: a pattern that skips it takes time quadratic in it.
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call in the policy's text."""

    name: str
    arguments: dict[str, Any]
    fault: str = ""
    """Why it cannot be carried out, for the policy to read; empty if it can be read."""


def find_calls(text: str) -> list[ToolCall]:
    """Return the calls in a turn, in their order; one cut off at the end counts, too."""
    return [_parse_call(found) for found in _CALL.findall(text)]


def without_calls(text: str) -> str:
    """Return the rest of a turn, up to the white space at its end."""
    return _CALL.sub("", text).rstrip()


def _parse_call(found: str) -> ToolCall:
    try:
        call = json.loads(found)
        name, arguments = call["name"], call.get("arguments", {})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return ToolCall("", {}, 'a call is a JSON object with "name" and "arguments"')
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return ToolCall("", {}, '"name" must be a text and "arguments" an object')
    return ToolCall(name, arguments)
