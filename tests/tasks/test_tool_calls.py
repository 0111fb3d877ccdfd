"""What a model writes as calls of tools, and what is only text."""

from __future__ import annotations

import pytest

from echo.tasks.environment import ToolCall, find_calls, without_calls


def block(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


def test_calls_are_found_in_order_and_taken_out() -> None:
    first = block('{"name": "add", "arguments": {"a": 1, "b": {"c": "é"}}}')
    second = block('{"name": "now"}')
    text = f"\n\nLet me see.\n{first}\n{second}"
    assert find_calls(text) == [
        ToolCall("add", {"a": 1, "b": {"c": "é"}}),
        ToolCall("now", {}),
    ]
    assert without_calls(text) == "\n\nLet me see."
    assert without_calls(f"So {first} then") == "So  then"


def test_a_call_that_is_cut_off_after_its_json_counts() -> None:
    assert find_calls('<tool_call>{"name": "now"}') == [ToolCall("now", {})]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("<tool_call>", "a call is a JSON object"),
        (block("{not json}"), "a call is a JSON object"),
        (block("[1]"), "a call is a JSON object"),
        (block('{"arguments": {}}'), "a call is a JSON object"),
        # Of a policy that repeats itself.
        pytest.param(block("[" * 100_000), "a call is a JSON object", id="deep"),
        pytest.param(block(f"x{' ' * 200_000}y"), "a call is a JSON object", id="wide"),
        (block('{"name": 3}'), '"name" must be a text'),
        (block('{"name": "add", "arguments": "1"}'), '"arguments" an object'),
    ],
)
def test_what_cannot_be_read_says_why(text: str, fault: str) -> None:
    [call] = find_calls(text)
    assert fault in call.fault


def test_a_text_without_calls() -> None:
    assert find_calls("no call") == []
    assert without_calls(" no call ") == " no call"
