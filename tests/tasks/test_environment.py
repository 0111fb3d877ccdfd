"""Tools: their schemas, their calls in a text, their results."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any, Literal

import pytest

from echo.tasks.environment import ToolCall, ToolEnvironment, find_calls, schema_of, without_calls
from echo.tasks.processes.main import Performer, TaskCall
from echo.tasks.task import Example


def add(a: int, b: int = 1) -> int:
    """Add two numbers."""
    return a + b


def divide(a: float, b: float) -> float:
    """Divide a by b."""
    return a / b


def connect(host: str) -> str:
    """Reach a host."""
    raise ConnectionRefusedError(host)


async def fetch(page: str) -> list[str]:
    """Fetch a page."""
    await asyncio.sleep(0)
    if page == "judge":
        raise ConnectionRefusedError(page)
    return [{"1": "one"}[page]]


class Calculator(ToolEnvironment):
    def functions(self) -> list[Callable[..., object]]:
        return [add, divide, connect, fetch]

    def example(self, index: int, *, split: str) -> Example:
        return Example(index=index, split=split, prompt="1+2?", answer="3")

    def score(self, example: Example, texts: list[str]) -> float:
        return float(example.answer in texts[-1])


def block(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


def call(name: str, arguments: str) -> str:
    return block(f'{{"name": "{name}", "arguments": {arguments}}}')


def replies(text: str) -> list[str]:
    task = Calculator()
    messages = task.reply(task.begin(task.example(0, split="train")), text)
    assert not isinstance(messages, Awaitable)
    return [message["content"] for message in messages or ()]


def test_an_episode_with_tools() -> None:
    task = Calculator()
    example = task.example(0, split="train")
    state = task.begin(example)
    said = task.reply(state, "Let me see. " + call("add", '{"a": 1, "b": 2}'))
    assert said == [{"role": "tool", "name": "add", "content": "3"}]
    assert task.reply(state, "It is 3.") is None
    assert task.outcome(state) == 1.0
    # A lost connection is the environment's fault, and its turn has not happened.
    with pytest.raises(ConnectionRefusedError):
        task.reply(state, call("connect", '{"host": "judge"}'))
    assert state.texts[1:] == ["It is 3."]


def test_asynchronous_tools_are_awaited() -> None:
    task = Calculator()
    state = task.begin(task.example(0, split="train"))

    def reply(*calls: str) -> list[str]:
        async def main() -> Any:
            said = task.reply(state, "".join(calls))
            assert isinstance(said, Awaitable)
            return await said

        return [message["content"] for message in asyncio.run(main())]

    one, two, judge = (call("fetch", f'{{"page": "{page}"}}') for page in ("1", "2", "judge"))
    assert reply(one, call("add", '{"a": 1}'), two) == ['["one"]', "2", "error: KeyError: '2'"]
    with pytest.raises(ConnectionRefusedError):
        reply(judge)
    assert len(state.texts) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (call("add", '{"a": 4}') + call("divide", '{"a": 1, "b": 2}'), ["5", "0.5"]),
        (
            call("ad", "{}"),
            ["error: no tool 'ad' (did you mean 'add'?); there are add, divide, connect, fetch"],
        ),
        (call("add", '{"c": 4}'), ["error: add: missing a required argument: 'a'"]),
        (call("divide", '{"a": 1, "b": 0}'), ["error: ZeroDivisionError: division by zero"]),
        ("<tool_call>{oops</tool_call>", ["error: a call is a JSON object with"]),
    ],
)
def test_what_the_policy_does_wrong_is_answered(text: str, expected: list[str]) -> None:
    assert [f[: len(e)] for f, e in zip(replies(text), expected, strict=True)] == expected


def test_the_schema_follows_the_signature() -> None:
    def search(
        query: str, tags: list[str], depth: int | None = None, order: Literal["up", "down"] = "up"
    ) -> str:
        """Search the archive."""
        return query

    properties = {
        "query": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "depth": {"type": "integer"},
        "order": {"enum": ["up", "down"]},
    }
    parameters = {"type": "object", "properties": properties, "required": ["query", "tags"]}
    function = {"name": "search", "description": "Search the archive.", "parameters": parameters}
    assert schema_of(search) == {"type": "function", "function": function}


# --- calls in a text ------------------------------------------------------------------------------


def test_calls_are_found_in_order_and_taken_out() -> None:
    first = block('{"name": "add", "arguments": {"a": 1, "b": {"c": "é"}}}')
    second = block('{"name": "now"}')
    text = f"\n\nLet me see.\n{first}\n{second}"
    add, now = ToolCall("add", {"a": 1, "b": {"c": "é"}}), ToolCall("now", {})
    assert find_calls(text) == [add, now]
    assert without_calls(text) == "\n\nLet me see."
    assert without_calls(f"So {first} then") == "So  then"
    # One that is cut off after its JSON counts.
    assert find_calls('<tool_call>{"name": "now"}') == [now]
    assert find_calls("no call") == []
    assert without_calls(" no call ") == " no call"


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


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        ({"role": "tool", "content": [{"type": "text", "text": "5"}]}, ""),
        ([{"role": "user", "content": "5"}], ""),
        (
            {"role": "user", "content": [{"type": "image"}]},
            "has a part of the type 'image'; a model",
        ),
        ({"role": "user"}, "has neither `content` nor `tool_calls`"),
        ({"from": "human", "value": "5"}, "has `from` and `value`; write them as `role`"),
        ([3], "is int and no object with `role` and `content`"),
    ],
)
def test_a_reply_is_text_or_chat_messages(said: Any, fault: str) -> None:
    class Says(Calculator):
        def reply(self, state: Any, text: str) -> Any:
            return said

    performer = Performer(Says())
    example = asdict(Says().example(0, split="train"))
    performer.answer(TaskCall("begin", example=example, episode="1"))
    answer = performer.answer(TaskCall("reply", text="?", episode="1"))
    if not fault:
        assert answer.value == (said if isinstance(said, list) else [said])
        return
    assert answer.fault is not None
    assert f"which {fault}" in answer.fault.text
