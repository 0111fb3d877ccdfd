"""Tool use: the policy calls functions by name, and gets what they return.

    class Calculator(ToolEnvironment):
        def functions(self) -> list[Callable[..., object]]:
            return [add]

        def judge(self, example: Example, texts: list[str]) -> float:
            return float(example.answer in texts[-1])

        def example(...) -> Example: ...

    def add(a: int, b: int) -> int:
        "Add two numbers."
        return a + b

A call stands in the policy's text as `tool_calls.py` shows. The chat template is told of the
functions, with a JSON schema made from signature and docstring. A turn without a call is the last
one. What the policy does wrong (an unknown name, wrong arguments) is answered with an error
message, and so is what a function raises; connection errors are tried again, as everywhere.
"""

from __future__ import annotations

import abc
import inspect
import json
import types
import typing
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from echo.tasks.environment import Environment, Message
from echo.tasks.imports import nearest
from echo.tasks.task import Example, RetryCall
from echo.tasks.tool_calls import ToolCall, find_calls

_JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array"}


@dataclass(slots=True)
class ToolState:
    """An episode: the example, and what the policy has said."""

    example: Example
    texts: list[str] = field(default_factory=list)


class ToolEnvironment(Environment):
    """An environment whose replies are the results of the policy's calls."""

    @abc.abstractmethod
    def functions(self) -> list[Callable[..., object]]:
        """Return what the policy may call; annotated, with a docstring."""

    @abc.abstractmethod
    def judge(self, example: Example, texts: list[str]) -> float:
        """Return what an episode was worth.

        Args:
            example: what it began with.
            texts: the policy's turns, calls included; the last is its answer.
        """

    def tools(self, example: Example) -> list[dict[str, Any]]:
        """Return the schemas of the functions."""
        return [schema_of(function) for function in self.functions()]

    def begin(self, example: Example) -> ToolState:
        """Return an episode in which nothing has been said."""
        return ToolState(example)

    def reply(self, state: ToolState, text: str) -> list[Message] | None:
        """Carry out the calls of a turn; None if there are none."""
        state.texts.append(text)
        functions = {function.__name__: function for function in self.functions()}
        results = [
            {"role": "tool", "name": call.name, "content": _carry_out(call, functions)}
            for call in find_calls(text)
        ]
        return results or None

    def outcome(self, state: ToolState) -> float:
        """Ask the judge."""
        return self.judge(state.example, state.texts)


def schema_of(function: Callable[..., object]) -> dict[str, Any]:
    """Return the JSON schema of a function, as chat templates expect it."""
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


def _carry_out(call: ToolCall, functions: dict[str, Callable[..., object]]) -> str:
    if call.fault:
        return f"error: {call.fault}"
    function = functions.get(call.name)
    if function is None:
        known = ", ".join(functions)
        return f"error: no tool {call.name!r}{nearest(call.name, functions)}; there are {known}"
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
    return result if isinstance(result, str) else json.dumps(result, default=str)
