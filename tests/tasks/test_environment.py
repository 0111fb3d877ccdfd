"""Tools: their schemas, their calls in a text, their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import pytest

from echo.tasks.environment import ToolCall, ToolEnvironment, find_calls, schema_of, without_calls
from echo.tasks.task import Example

# --- tools ----------------------------------------------------------------------------------------


def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


def divide(a: float, b: float) -> float:
    """Divide a by b."""
    return a / b


def connect(host: str) -> str:
    """Reach a host."""
    raise ConnectionRefusedError(host)


class Calculator(ToolEnvironment):
    def functions(self) -> list[Callable[..., object]]:
        return [add, divide, connect]

    def example(self, index: int, *, split: str) -> Example:
        return Example(index=index, split=split, prompt="1+2?", answer="3")

    def score(self, example: Example, texts: list[str]) -> float:
        return float(example.answer in texts[-1])


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def replies(text: str) -> list[str] | None:
    task = Calculator()
    messages = task.reply(task.begin(task.example(0, split="train")), text)
    return None if messages is None else [message["content"] for message in messages]


def test_an_episode_with_tools() -> None:
    task = Calculator()
    example = task.example(0, split="train")
    state = task.begin(example)
    said = task.reply(state, "Let me see. " + call("add", '{"a": 1, "b": 2}'))
    assert said == [{"role": "tool", "name": "add", "content": "3"}]
    assert task.reply(state, "It is 3.") is None
    assert task.outcome(state) == 1.0
    assert state.texts[1] == "It is 3."


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (call("add", '{"a": 4}') + call("divide", '{"a": 1, "b": 2}'), ["5", "0.5"]),
        (
            call("ad", "{}"),
            ["error: no tool 'ad' (did you mean 'add'?); there are add, divide, con"],
        ),
        (call("add", '{"c": 4}'), ["error: add: missing a required argument: 'a'"]),
        (call("divide", '{"a": 1, "b": 0}'), ["error: ZeroDivisionError: division by zero"]),
        ("<tool_call>{oops</tool_call>", ["error: a call is a JSON object with"]),
        ('<tool_call>{"name": "add", "arguments": [1]}', ['error: "name" must be a text and "arg']),
        ("no call at all", None),
    ],
)
def test_what_the_policy_does_wrong_is_answered(text: str, expected: list[str] | None) -> None:
    found = replies(text)
    if expected is None:
        assert found is None
    else:
        assert found is not None
        assert [f[: len(e)] for f, e in zip(found, expected, strict=True)] == expected


def test_a_lost_connection_is_the_environments_fault() -> None:
    with pytest.raises(ConnectionRefusedError):
        replies(call("connect", '{"host": "judge"}'))


def test_the_schema_follows_the_signature() -> None:
    def search(
        query: str, tags: list[str], depth: int | None = None, order: Literal["up", "down"] = "up"
    ) -> str:
        """Search the archive."""
        return query

    assert schema_of(search) == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the archive.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string"},
                    "tags": {"type": "array", "items": {"type": "string"}},
                    "depth": {"type": "integer"},
                    "order": {"enum": ["up", "down"]},
                },
                "required": ["query", "tags"],
            },
        },
    }


# --- calls in a text ------------------------------------------------------------------------------


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
        (block(r'{"name": "add", "arguments": {"a": "\ud800"}}'), "half of a surrogate pair"),
    ],
)
def test_what_cannot_be_read_says_why(text: str, fault: str) -> None:
    [call] = find_calls(text)
    assert fault in call.fault


def test_a_text_without_calls() -> None:
    assert find_calls("no call") == []
    assert without_calls(" no call ") == " no call"
