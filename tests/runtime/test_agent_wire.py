"""OpenAI's JSON for one call's answer, where a model calls tools."""

from __future__ import annotations

import json

import numpy as np
import pytest

from echo.core.rollout import PolicyVersion
from echo.engine.engine import Completion
from echo.runtime.agents.endpoint import (
    Body,
    BodyError,
    ChatAnswer,
    ChatBody,
    TextBody,
    options_of,
    read_body,
)
from echo.runtime.agents.sessions import Dialogue, Turn

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "add"}}]


class Letters:
    """A tokenizer with one token per character."""

    chat_template = "{{ tools }}"

    def decode(self, ids: list[int], **_: object) -> str:
        return "".join(map(chr, ids))


def turn_of(text: str) -> Turn:
    ids = np.array([ord(letter) for letter in text], np.int32)
    versions = np.tile(np.array([[1, 3]], np.int32), (len(ids), 1))
    completion = Completion("r", ids, np.zeros(len(ids), np.float32), "stop", versions)
    return Turn(np.array([1], np.int32), completion, "", None)


def answer_of(**fields: object) -> ChatAnswer:
    body = read({"messages": [{"role": "user", "content": "?"}], **fields})
    dialogue = Dialogue(Letters(), stop_ids=[], chat_template_kwargs={})
    return ChatAnswer(body, dialogue, model="m", call_id="1")


def read(fields: dict[str, object], kind: type[ChatBody] | type[TextBody] = ChatBody) -> Body:
    return read_body(json.dumps(fields).encode(), kind)


def test_calls_of_tools_come_back_as_openai_writes_them() -> None:
    [choice] = answer_of(tools=TOOLS).whole(turn_of(f"So: {CALL}"))["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "So:"
    [call] = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "add", "arguments": '{"a": 1}'}
    [last] = answer_of(tools=TOOLS).last(turn_of(CALL))
    assert last["choices"][0]["delta"]["tool_calls"][0]["function"]["name"] == "add"
    assert last["system_fingerprint"] == "v3"


def test_a_call_that_cannot_be_read_leaves_all_of_it_text() -> None:
    text = f"{CALL}<tool_call>{{oops</tool_call>"
    [choice] = answer_of(tools=TOOLS).whole(turn_of(text))["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == text
    assert "tool_calls" not in choice["message"]


@pytest.mark.parametrize("fields", [{}, {"tools": TOOLS, "tool_choice": "none"}])
def test_without_tools_the_same_is_text(fields: dict[str, object]) -> None:
    [choice] = answer_of(**fields).whole(turn_of(CALL))["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["message"]["content"] == CALL
    assert "tool_calls" not in choice["message"]


def test_logprobs_of_text_have_offsets() -> None:
    body = read({"prompt": "1", "logprobs": 0}, TextBody)
    dialogue = Dialogue(Letters(), stop_ids=[], chat_template_kwargs={})
    [choice] = ChatAnswer(body, dialogue, model="m", call_id="1").whole(turn_of("abc"))["choices"]
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": "1", "max_tokens": 0}, "max_tokens = 0: at least 1"),
        ({"prompt": "1", "top_p": 0}, "top_p above 0"),
        ({"prompt": "1", "logit_bias": {"3": 1}}, "logit_bias is not supported: remove it"),
        ({"prompt": 3}, "cannot be read: Expected"),
    ],
)
def test_bad_bodies(fields: dict[str, object], complaint: str) -> None:
    with pytest.raises(BodyError, match=complaint):
        read(fields, TextBody)


def test_versions_are_read_as_they_are_told() -> None:
    asked = {"prompt": "1", "min_version": "v12", "exact_version": "v7/L2", "version_wait_s": 3}
    options = options_of(read(asked, TextBody))
    assert options.bounds.min_version == PolicyVersion(1, 12)
    assert options.bounds.exact_version == PolicyVersion(2, 7)
    assert str(options.bounds.exact_version) == "v7/L2"
    assert options.version_wait_s == 3


@pytest.mark.parametrize("text", ["12", "v", "v1.5", "v12 ", "v1/L", "v1/2", "v99999999999"])
def test_other_texts_are_no_versions(text: str) -> None:
    with pytest.raises(BodyError, match=r"exact_version = .* is no version; write it as"):
        options_of(read({"prompt": "1", "exact_version": text}, TextBody))


@pytest.mark.parametrize("wait_s", [-0.1, 60.1])
def test_nobody_waits_for_a_version_for_ever(wait_s: float) -> None:
    with pytest.raises(BodyError, match=r"version_wait_s = .*: 0 to 60"):
        read({"prompt": "1", "version_wait_s": wait_s}, TextBody)
