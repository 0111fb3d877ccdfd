"""Environments and tools: tasks whose episodes have several turns.

    class Guess(Environment):
        def example(self, index: int, *, split: str) -> Example:
            secret = random.Random(f"{split}:{index}").randrange(100)
            return Example(index=index, split=split, prompt="Guess my number.", answer=secret)

        def begin(self, example: Example) -> dict[str, Any]:
            return {"secret": example.answer, "is_found": False}

        def reply(self, state: dict[str, Any], text: str) -> str | None:
            guess = int(text) if text.strip().isdigit() else -1
            state["is_found"] = guess == state["secret"]
            if state["is_found"]:
                return None
            return "higher" if guess < state["secret"] else "lower"

        def outcome(self, state: dict[str, Any]) -> float:
            return float(state["is_found"])

The environment's replies become tokens of the rollout that are never trained on. The tokens of the
policy's turns are kept as sampled, and never decoded and encoded again. An episode ends when
`reply` returns None, or when no turns or tokens remain. `outcome` is called in all of these cases.

**Tools** are functions that the policy calls by name. The policy gets the result of the call in a
message.

    class Calculator(ToolEnvironment):
        def functions(self) -> list[Callable[..., object]]:
            return [add]

        def score(self, example: Example, texts: list[str]) -> float:
            return float(example.answer in texts[-1])

        def example(...) -> Example: ...

    def add(a: int, b: int) -> int:
        "Add two numbers."
        return a + b

The policy writes a call as the Qwen and Hermes families do:

    <tool_call>
    {"name": "add", "arguments": {"a": 1, "b": 2}}
    </tool_call>

The chat template gets a JSON schema of each function, made from its signature and docstring. A
function may be `async`. A turn without a call is the last turn. A wrong call (an unknown name,
wrong arguments) and an exception of a function are answered with an error message. Connection
errors are retried, as in every task.
"""

from __future__ import annotations

import abc
import inspect
import json
import re
import types
import typing
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from echo.tasks.messages import Message
from echo.tasks.task import Example, RetryCall, Reward, Task, did_you_mean

Reply: TypeAlias = str | Message | list[Message] | None
"""An environment's reply to one turn of the policy; None ends the episode."""


class Environment(Task):
    """A task whose episodes have several turns."""

    has_turns = True
    max_turns: int | None = None
    """Largest number of the policy's turns in an episode; if None, `task.max_turns` applies."""

    @abc.abstractmethod
    def begin(self, example: Example) -> Any:
        """Return the state of a new episode: any object. The other methods receive this object."""

    @abc.abstractmethod
    def reply(self, state: Any, text: str) -> Reply | Awaitable[Reply]:
        """Return the reply to a turn of the policy. None ends the episode.

        A reply that is text becomes one user message. `reply` is also called after the last
        permitted turn. This last reply is dropped.
        """

    @abc.abstractmethod
    def outcome(self, state: Any) -> Reward:
        """Return the reward of the episode, a finite number.

        This method is called at the end of every episode. Return None if the task cannot score the
        episode. The group then continues without this episode.
        """

    def end(self, state: Any) -> Awaitable[None] | None:
        """Release the resources that the state of an episode holds."""

    def turn_limit(self, example: Example) -> int | None:
        """Return the largest number of the policy's turns in an episode of an example.

        If the result is None, `task.max_turns` applies.
        """
        return self.max_turns

    def compares_answers(self, example: Example) -> bool:
        """Return False, since an episode's reward does not depend on other episodes."""
        return False

    def reward(self, example: Example, completion: str) -> Reward:
        """Return the reward of an episode with the completion as its only turn."""
        state = self.begin(example)
        try:
            self.reply(state, completion)
            return self.outcome(state)
        finally:
            self.end(state)


# --- calls of tools -------------------------------------------------------------------------------


# The JSON parser skips white space around a call: a pattern for it would take quadratic time.
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call that the policy has written in a turn."""

    name: str
    arguments: dict[str, Any]
    fault: str = ""
    """Message to the policy that says why the call cannot be parsed; empty if the call is valid."""


def find_calls(text: str) -> list[ToolCall]:
    """Return the tool calls in a turn, in order.

    The last call is included even if the turn ends before the call is complete.
    """
    return [_parse_call(found) for found in _CALL.findall(text)]


def without_calls(text: str) -> str:
    """Return the text of a turn without tool calls and final white space."""
    return _CALL.sub("", text).rstrip()


def _parse_call(found: str) -> ToolCall:
    try:
        call = json.loads(found)
        name, arguments = call["name"], call.get("arguments", {})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return ToolCall("", {}, 'a call is a JSON object with "name" and "arguments"')
    if not isinstance(name, str) or not isinstance(arguments, dict):
        return ToolCall("", {}, '"name" must be a text and "arguments" an object')
    try:
        json.dumps(call, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # "\ud800" is valid JSON, but cannot be encoded
        return ToolCall("", {}, "a text holds half of a surrogate pair")
    return ToolCall(name, arguments)


# --- tools ----------------------------------------------------------------------------------------


_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array"}


@dataclass(slots=True)
class ToolState:
    """The state of an episode with tools: its example and the turns so far."""

    example: Example
    texts: list[str] = field(default_factory=list)


class ToolEnvironment(Environment):
    """An environment that replies with the results of a turn's tool calls."""

    @abc.abstractmethod
    def functions(self) -> list[Callable[..., object]]:
        """Return the functions that the policy may call.

        Each function needs annotations and a docstring.
        """

    @abc.abstractmethod
    def score(self, example: Example, texts: list[str]) -> Reward:
        """Return the reward of an episode; the method may be `async`.

        Args:
            example: the example of the episode.
            texts: the policy's turns, with the tool calls in them; the last turn is the answer.
        """

    def tools(self, example: Example) -> list[dict[str, Any]]:
        return [schema_of(function) for function in self.functions()]

    def begin(self, example: Example) -> ToolState:
        return ToolState(example)

    def reply(
        self, state: ToolState, text: str
    ) -> list[Message] | Awaitable[list[Message] | None] | None:
        """Make the tool calls of a turn, and return their results; None if there are no calls.

        If a function is async, the result is awaitable.
        """
        functions = {function.__name__: function for function in self.functions()}
        results = [(call, _carry_out(call, functions)) for call in find_calls(text)]
        if any(inspect.isawaitable(result) for _, result in results):
            return _when_known(state, text, results)
        return _results_of(state, text, results)

    def outcome(self, state: ToolState) -> Reward:
        return self.score(state.example, state.texts)


def _results_of(
    state: ToolState, text: str, results: Sequence[tuple[ToolCall, object]]
) -> list[Message] | None:
    # The text is added only now, since after a lost connection `reply` is called again.
    state.texts.append(text)
    return [
        {"role": "tool", "name": call.name, "content": result} for call, result in results
    ] or None


async def _when_known(
    state: ToolState, text: str, results: Sequence[tuple[ToolCall, str | Awaitable[str]]]
) -> list[Message] | None:
    known = [(call, each if isinstance(each, str) else await each) for call, each in results]
    return _results_of(state, text, known)


def schema_of(function: Callable[..., object]) -> dict[str, Any]:
    """Return the JSON schema of a function in the form that chat templates expect."""
    hints = typing.get_type_hints(function)
    parameters = inspect.signature(function).parameters
    required = [n for n, p in parameters.items() if p.default is inspect.Parameter.empty]
    return {
        "type": "function",
        "function": {
            "name": function.__name__,
            "description": inspect.getdoc(function) or "",
            "parameters": {
                "type": "object",
                "properties": {name: _schema_of_type(hints.get(name)) for name in parameters},
                "required": required,
            },
        },
    }


def _schema_of_type(hint: Any) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        kinds = [each for each in arguments if each is not type(None)]
        return _schema_of_type(kinds[0]) if len(kinds) == 1 else {}
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin is list and arguments:
        return {"type": "array", "items": _schema_of_type(arguments[0])}
    kind = _JSON_TYPES.get(origin or hint)
    if kind is not None:
        return {"type": kind}
    return {"type": "object"} if (origin or hint) is dict else {}


def _carry_out(call: ToolCall, functions: dict[str, Callable[..., object]]) -> str | Awaitable[str]:
    if call.fault:
        return f"error: {call.fault}"
    function = functions.get(call.name)
    if function is None:
        known = ", ".join(functions)
        return (
            f"error: no tool {call.name!r}{did_you_mean(call.name, functions)}; there are {known}"
        )
    try:
        inspect.signature(function).bind(**call.arguments)
    except TypeError as error:
        return f"error: {call.name}: {error}"
    try:
        result = function(**call.arguments)
    except (RetryCall, ConnectionError, TimeoutError):
        raise
    except Exception as error:  # noqa: BLE001 -- the policy learns what its call has led to
        return f"error: {type(error).__name__}: {error}"
    return _when_done(result) if inspect.isawaitable(result) else _as_text(result)


async def _when_done(result: Awaitable[object]) -> str:
    try:
        return _as_text(await result)
    except (RetryCall, ConnectionError, TimeoutError):
        raise
    except Exception as error:  # noqa: BLE001 -- the policy learns what its call has led to
        return f"error: {type(error).__name__}: {error}"


def _as_text(result: object) -> str:
    return result if isinstance(result, str) else json.dumps(result, default=str)
