"""Read calls in OpenAI's format, and write the answers in this format."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from itertools import accumulate
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from echo.core.bounds import MAX_TOKENS, TokenId
from echo.core.errors import EchoError
from echo.core.rollout import PolicyVersion
from echo.engine.engine import MIN_TEMPERATURE
from echo.runtime.agents.agents import CallOptions, Prompt
from echo.runtime.agents.dialogue import Dialogue
from echo.runtime.agents.turns import Turn
from echo.tasks.environment import find_calls, without_calls
from echo.wire.codec import DECODE_ERRORS

MAX_TEMPERATURE = 1e3
"""Highest permitted temperature. Above this value, all logits are practically equal."""

StopText = Annotated[str, Meta(max_length=256)]
Int = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class BodyError(EchoError):
    """A request's body cannot be served."""


_MODEL_DECIDES = "the model decides; ask for it in a message"
TEMPLATE = "the template and its arguments are the run's: set model.chat_template_kwargs"
_UNABLE: dict[str, tuple[tuple[Any, ...], str]] = {
    "n": ((1,), "ask as often as you want answers"),
    "best_of": ((1,), "ask as often as you want answers, and choose yourself"),
    "stop_token_ids": (([],), "answers end with the model's own stop tokens"),
    "ignore_eos": ((False,), "answers end with the model's own stop tokens"),
    "repetition_penalty": ((1,), "remove it"),
    "presence_penalty": ((0,), "remove it"),
    "frequency_penalty": ((0,), "remove it"),
    "logit_bias": (({},), "remove it"),
    "bad_words": (([],), "remove it"),
    "allowed_token_ids": (([],), "remove it"),
    "use_beam_search": ((False,), "remove it"),
    "truncate_prompt_tokens": ((), "shorten the prompt yourself"),
    "tool_choice": (("auto", "none"), _MODEL_DECIDES),
    "functions": (([],), "send them as `tools`"),
    "function_call": (("auto", "none"), _MODEL_DECIDES),
    "guided_json": ((), _MODEL_DECIDES),
    "guided_regex": ((), _MODEL_DECIDES),
    "guided_choice": ((), _MODEL_DECIDES),
    "guided_grammar": ((), _MODEL_DECIDES),
    "structured_outputs": ((), _MODEL_DECIDES),
    "response_format": (({"type": "text"},), "ask for the format in a message"),
    "chat_template": ((), TEMPLATE),
    "documents": (([],), TEMPLATE),
    "reasoning_effort": ((), TEMPLATE),
    "top_logprobs": ((0,), "only sampled tokens have log-probabilities here"),
    "prompt_logprobs": ((), "only sampled tokens have log-probabilities here"),
    "return_tokens_as_token_ids": ((False,), "take return_token_ids, which adds the ids"),
    "echo": ((False,), "put prompt and answer together yourself"),
    "suffix": (("",), "write it into the prompt"),
    "prompt_embeds": ((), "send text or token ids"),
}
"""For each unsupported field: the harmless values, and a remedy for other values."""


class _Body(msgspec.Struct):
    """The fields that chat calls and text calls have in common.

    A call with a field in `_UNABLE` is refused if the field would change the answer. Other unknown
    fields are ignored.
    """

    max_tokens: Int | None = None
    max_completion_tokens: Int | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None
    stop: StopText | Annotated[list[StopText], Meta(max_length=16)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Int | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


_Unable = msgspec.defstruct("_Unable", [(name, Any, None) for name in _UNABLE])


class ChatBody(_Body, kw_only=True):
    """The body of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    logprobs: bool | None = None


class TextBody(_Body, kw_only=True):
    """The body of /v1/completions."""

    prompt: str | Annotated[list[TokenId], Meta(max_length=MAX_TOKENS)]
    logprobs: int | None = None


Body = ChatBody | TextBody


def read_body(data: bytes, kind: type[ChatBody] | type[TextBody]) -> Body:
    """Return the parsed body of a call.

    Raises:
        BodyError: if the body is malformed or requests something unsupported.
    """
    try:
        body, unable = msgspec.json.decode(data, type=kind), msgspec.json.decode(data, type=_Unable)
    except DECODE_ERRORS as error:
        raise BodyError(f"the body cannot be read: {error}") from error
    for name, (neutral, advice) in _UNABLE.items():
        value = getattr(unable, name)
        if value is not None and value not in neutral:
            raise BodyError(f"{name} is not supported: {advice}")
    if body.add_generation_prompt is False and not body.continue_final_message:
        raise BodyError("add_generation_prompt = false is not supported: an answer needs a turn")
    _check_numbers(body)
    if isinstance(body, ChatBody) and not body.messages:
        raise BodyError("messages is empty; send at least one")
    if isinstance(body, TextBody) and not body.prompt:
        raise BodyError("prompt is empty; send text or token ids")
    return body


def _check_numbers(body: Body) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        value = getattr(body, name)
        if value is not None and value < 1:
            raise BodyError(f"{name} = {value}: at least 1")
    if (body.temperature or 0) < 0 or not 0 < (1 if body.top_p is None else body.top_p) <= 1:
        raise BodyError("temperature must be at least 0, top_p above 0 and at most 1")
    if body.temperature and not MIN_TEMPERATURE <= body.temperature <= MAX_TEMPERATURE:
        raise BodyError(
            f"temperature = {body.temperature:g}: 0 for the likeliest, or {MIN_TEMPERATURE:g} to "
            f"{MAX_TEMPERATURE:g}"
        )


def prompt_of(body: Body) -> Prompt:
    """Return the context of a call: messages, text or token ids."""
    return body.messages if isinstance(body, ChatBody) else body.prompt


def options_of(body: Body) -> CallOptions:
    """Return the options of a call."""
    return CallOptions(
        max_tokens=body.max_completion_tokens or body.max_tokens,
        min_tokens=body.min_tokens,
        stop=list(filter(None, [body.stop] if isinstance(body.stop, str) else body.stop or [])),
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        min_p=body.min_p,
        seed=body.seed,
        tools=[] if body.tool_choice == "none" else body.tools or [],
    )


class ChatAnswer:
    """Makes the JSON of the answer to a call, as one object or as events."""

    def __init__(self, body: Body, dialogue: Dialogue, *, model: str, call_id: str) -> None:
        self._body = body
        self._is_chat = isinstance(body, ChatBody)
        self._has_tools = self._is_chat and bool(options_of(body).tools)
        self._dialogue = dialogue
        self._head: dict[str, Any] = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{call_id}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, turn: Turn) -> dict[str, Any]:
        """Return the answer as one object, for a call whose `stream` is false."""
        completion = turn.completion
        choice: dict[str, Any] = {"index": 0, "finish_reason": self._reason(turn)}
        if self._is_chat:
            choice["message"] = {**self._message(turn), "refusal": None}
        else:
            choice["text"] = self._answer(turn)
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

    def events(self, turn: Turn) -> list[dict[str, Any]]:
        """Return the answer as events, for a call whose `stream` is true.

        The events are the text, the end and, if requested, the usage. As in OpenAI's answers, text
        and end are separate events, because some clients ignore text in the last event.
        """
        text: dict[str, Any] = {"delta": self._message(turn)}
        end: dict[str, Any] = {"delta": {}}
        if not self._is_chat:
            text = {"text": self._answer(turn)}
            end = {"text": ""}
        end["logprobs"] = self._logprobs(turn)
        chunks = [self._chunk(text, None), self._chunk(end, self._reason(turn))]
        if (self._body.stream_options or {}).get("include_usage"):
            chunks.append({**self._chunk({}, None), "choices": [], "usage": usage_of(turn)})
        return [{**chunk, "system_fingerprint": fingerprint_of(turn)} for chunk in chunks]

    def _answer(self, turn: Turn) -> str:
        text = self._dialogue.answer_of(turn.completion.token_ids)
        return text[: len(text) - turn.num_hidden]

    def _message(self, turn: Turn) -> dict[str, Any]:
        """Return the assistant's message, with its tool calls if the call has tools.

        If a tool call cannot be parsed, the whole message stays text.
        """
        text = self._answer(turn)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        calls = find_calls(text) if self._has_tools else []
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
        if self._has_tools and "tool_calls" in self._message(turn):
            return "tool_calls"
        return turn.completion.finish_reason

    def _chunk(self, fields: Mapping[str, Any], reason: str | None) -> dict[str, Any]:
        name = "chat.completion.chunk" if self._is_chat else "text_completion"
        choice = {"index": 0, "finish_reason": reason, **fields}
        return {**self._head, "object": name, "choices": [choice]}

    def _logprobs(self, turn: Turn) -> dict[str, Any] | None:
        if self._body.logprobs is None or self._body.logprobs is False:  # 0 requests them too
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
        *offsets, _ = accumulate(map(len, tokens), initial=0)
        return {
            "tokens": tokens,
            "token_logprobs": logprobs,
            "top_logprobs": None,
            "text_offset": offsets,
        }


def usage_of(turn: Turn) -> dict[str, int]:
    """Return the token counts of a call in OpenAI's form."""
    num_prompt, num_sampled = len(turn.context_ids), len(turn.completion.token_ids)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
    }


def fingerprint_of(turn: Turn) -> str:
    """Return the policy version that sampled a call's last token, as text."""
    return str(PolicyVersion(*turn.completion.policy_versions[-1].tolist()))
