"""OpenAI's JSON, in and out: what a call may ask for, and what it is answered."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from echo.core.bounds import MAX_TOKENS, TokenId
from echo.core.errors import EchoError
from echo.core.rollout import PolicyVersion
from echo.runtime.agent_sampling import Bounds
from echo.runtime.agent_sessions import Turn
from echo.runtime.agents import CallOptions, Prompt
from echo.tasks.dialogue import Dialogue
from echo.tasks.environment import find_calls, without_calls
from echo.wire.codec import DECODE_ERRORS

MAX_VERSION_WAIT_S = 60.0
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-3, 1e3
"""Beyond, logits divided by it are no numbers any more, or all the same."""

Int = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]

VERSION = re.compile(r"v(?P<step>\d{1,9})(?:/L(?P<lineage>\d{1,9}))?")
"""How `PolicyVersion` is written."""


class BodyError(EchoError):
    """A request's body cannot be served."""


class _Body(msgspec.Struct):
    """What both kinds of calls have; what is not listed is ignored."""

    max_tokens: Int | None = None
    max_completion_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)] | None = None
    seed: Int | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    top_logprobs: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    response_format: dict[str, Any] | None = None
    min_version: str | None = None
    """As in `system_fingerprint`: only this version or newer ones may sample."""
    exact_version: str | None = None
    """Only this one may."""
    version_wait_s: float = 0.0
    """How long to wait for a version that is not installed yet."""


class ChatBody(_Body, kw_only=True):
    """Of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    logprobs: bool | None = None


class TextBody(_Body, kw_only=True):
    """Of /v1/completions."""

    prompt: str | Annotated[list[TokenId], Meta(max_length=MAX_TOKENS)]
    logprobs: int | None = None


Body = ChatBody | TextBody


def read_body(data: bytes, kind: type[ChatBody] | type[TextBody]) -> Body:
    """Read a call, and refuse what cannot be done: ignoring it would give other samples.

    Raises:
        BodyError: naming the field and what to do.
    """
    try:
        body = msgspec.json.decode(data, type=kind)
    except DECODE_ERRORS as error:
        raise BodyError(f"the body cannot be read: {error}") from error
    refused = {
        "n": (body.n or 1) != 1 and "ask as often as you want answers",
        "stop": body.stop and "answers end with the model's own stop tokens; cut them yourself",
        "tool_choice": body.tool_choice not in (None, "auto", "none")
        and "the model decides; ask for the tool in a message",
        "top_logprobs": body.top_logprobs and "only sampled tokens have log-probabilities here",
        "presence_penalty": body.presence_penalty and "remove it",
        "frequency_penalty": body.frequency_penalty and "remove it",
        "logit_bias": body.logit_bias and "remove it",
        "response_format": (body.response_format or {}).get("type", "text") != "text"
        and "ask for the format in a message",
    }
    for name, advice in refused.items():
        if advice:
            raise BodyError(f"{name} is not supported: {advice}")
    _check_numbers(body)
    if isinstance(body, ChatBody) and not body.messages:
        raise BodyError("messages is empty; send at least one")
    if isinstance(body, TextBody) and not body.prompt:
        raise BodyError("prompt is empty; send text or token ids")
    return body


def _check_numbers(body: Body) -> None:
    """Refuse numbers that nothing can be sampled with.

    Raises:
        BodyError: naming the field and its range.
    """
    for name in ("max_tokens", "max_completion_tokens"):
        value = getattr(body, name)
        if value is not None and value < 1:
            raise BodyError(f"{name} = {value}: at least 1")
    if not 0 <= body.version_wait_s <= MAX_VERSION_WAIT_S:
        raise BodyError(f"version_wait_s = {body.version_wait_s:g}: 0 to {MAX_VERSION_WAIT_S:g}")
    if (body.temperature or 0) < 0 or not 0 < (1 if body.top_p is None else body.top_p) <= 1:
        raise BodyError("temperature must be at least 0, top_p above 0 and at most 1")
    if body.temperature and not MIN_TEMPERATURE <= body.temperature <= MAX_TEMPERATURE:
        raise BodyError(
            f"temperature = {body.temperature:g}: 0 for the likeliest, or {MIN_TEMPERATURE:g} to "
            f"{MAX_TEMPERATURE:g}"
        )


def prompt_of(body: Body) -> Prompt:
    """Return the context of a call."""
    return body.messages if isinstance(body, ChatBody) else body.prompt


def options_of(body: Body) -> CallOptions:
    """Return what a call asks for."""
    return CallOptions(
        max_tokens=body.max_completion_tokens or body.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        seed=body.seed,
        tools=[] if body.tool_choice == "none" else body.tools or [],
        bounds=Bounds(
            _version_of("min_version", body.min_version),
            _version_of("exact_version", body.exact_version),
        ),
        version_wait_s=body.version_wait_s,
    )


def _version_of(name: str, text: str | None) -> PolicyVersion | None:
    """Read a version as it stands in `system_fingerprint`."""
    if text is None:
        return None
    found = VERSION.fullmatch(text)
    if found is None:
        raise BodyError(
            f'{name} = "{text}" is no version; write it as system_fingerprint does, such as "v12", '
            'or "v12/L2" after the learner was resumed once'
        )
    return PolicyVersion(int(found["lineage"] or 1), int(found["step"]))


class Answer:
    """The JSON of one call's answer, whole or in pieces."""

    def __init__(self, body: Body, dialogue: Dialogue, *, model: str, call_id: str) -> None:
        """Take the call."""
        self._body = body
        self._is_chat = isinstance(body, ChatBody)
        self.has_tools = self._is_chat and bool(options_of(body).tools)
        """Whether the answer may hold calls of tools, so that no part of it is told before."""
        self._dialogue = dialogue
        self._head: dict[str, Any] = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{call_id}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, turn: Turn) -> dict[str, Any]:
        """Return the answer to a call that is not streamed."""
        completion = turn.completion
        choice: dict[str, Any] = {"index": 0, "finish_reason": self._reason(turn)}
        if self._is_chat:
            choice["message"] = {**self._message(turn), "refusal": None}
        else:
            choice["text"] = self._dialogue.answer_of(completion.token_ids)
        choice["logprobs"] = self._logprobs(turn)
        if self._body.return_token_ids:
            choice["token_ids"] = completion.token_ids.tolist()
            choice["prompt_token_ids"] = turn.context_ids.tolist()
        name = "chat.completion" if self._is_chat else "text_completion"
        return {
            **self._head,
            "object": name,
            "choices": [choice],
            "usage": usage_of(turn),
            "system_fingerprint": fingerprint_of(turn),
        }

    def piece(self, text: str, *, is_first: bool = False) -> dict[str, Any]:
        """Return a piece of a streamed answer."""
        if not self._is_chat:
            return self._chunk({"text": text}, None)
        role = {"role": "assistant"} if is_first else {}
        return self._chunk({"delta": {**role, "content": text}}, None)

    def last(self, turn: Turn) -> list[dict[str, Any]]:
        """Return what ends a streamed answer."""
        fields: dict[str, Any] = {"delta": {}} if self._is_chat else {"text": ""}
        if self.has_tools:
            fields["delta"] = self._message(turn)
        fields["logprobs"] = self._logprobs(turn)
        chunk = self._chunk(fields, self._reason(turn))
        chunk["system_fingerprint"] = fingerprint_of(turn)
        if not (self._body.stream_options or {}).get("include_usage"):
            return [chunk]
        return [chunk, {**self._chunk({}, None), "choices": [], "usage": usage_of(turn)}]

    def _message(self, turn: Turn) -> dict[str, Any]:
        """Return the assistant's message, with the tools that it calls where there are tools.

        An agent is not told of calls that cannot be read: where there is one, all stays text.
        """
        text = self._dialogue.answer_of(turn.completion.token_ids)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        calls = find_calls(text) if self.has_tools else []
        if calls and not any(call.fault for call in calls):
            message["content"] = without_calls(text) or None
            message["tool_calls"] = [
                {
                    "index": index,
                    "id": f"{self._head['id']}-{index}",
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": json.dumps(call.arguments, ensure_ascii=False),
                    },
                }
                for index, call in enumerate(calls)
            ]
        return message

    def _reason(self, turn: Turn) -> str:
        if self.has_tools and "tool_calls" in self._message(turn):
            return "tool_calls"
        return turn.completion.finish_reason

    def _chunk(self, fields: Mapping[str, Any], reason: str | None) -> dict[str, Any]:
        name = "chat.completion.chunk" if self._is_chat else "text_completion"
        choice = {"index": 0, "finish_reason": reason, **fields}
        return {**self._head, "object": name, "choices": [choice]}

    def _logprobs(self, turn: Turn) -> dict[str, Any] | None:
        if self._body.logprobs is None or self._body.logprobs is False:  # 0 asks for them
            return None
        ids = turn.completion.token_ids.tolist()
        tokens = [self._dialogue.text_of([token]) for token in ids]
        logprobs = [float(value) for value in turn.completion.logprobs]
        if self._is_chat:
            rows = [
                {
                    "token": token,
                    "logprob": logprob,
                    "bytes": list(token.encode()),
                    "top_logprobs": [],
                }
                for token, logprob in zip(tokens, logprobs, strict=True)
            ]
            return {"content": rows, "refusal": None}
        offsets = [sum(map(len, tokens[:index])) for index in range(len(tokens))]
        return {
            "tokens": tokens,
            "token_logprobs": logprobs,
            "top_logprobs": None,
            "text_offset": offsets,
        }


def usage_of(turn: Turn) -> dict[str, int]:
    """Return OpenAI's count of tokens."""
    num_prompt, num_sampled = len(turn.context_ids), len(turn.completion.token_ids)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
    }


def fingerprint_of(turn: Turn) -> str:
    """Return which policy version sampled the last token."""
    return str(PolicyVersion(*turn.completion.policy_versions[-1].tolist()))
