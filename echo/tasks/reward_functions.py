"""Calls a user's reward function with the arguments for its parameters.

    def correct(completion, answer, **row):              one answer -> a number
        return float(answer in completion)

    def shortest(completions, answer, **columns):        a group's answers -> a list of numbers
        best = min(map(len, completions))
        return [float(len(text) == best) for text in completions]

The second form is TRL's. One call gets all answers to a prompt, and every argument is a list with
one element for each answer. The possible arguments are `prompt` or `prompts`, `answer`, `info` and
the row's columns. The function gets every argument that has the name of one of its parameters. With
a `**` parameter, the function gets all arguments. In the second form a completion of a chat prompt
is a list of one message.

The function may be any callable with such parameters: a function, an instance with `__call__`, a
bound method, a `functools.partial`. Both forms may be `async`. Both may return None for an answer
without a score.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import reprlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from echo.core.errors import ConfigError
from echo.core.reward_parts import find_name_fault
from echo.tasks.answers import check_reference, equal_in_mathematics, exact, require_math_verify
from echo.tasks.task import Example, did_you_mean, import_module, load_function

OPTION = "task.options.reward"

BUILT_IN_REWARDS: dict[str, Callable[..., float]] = {"exact": exact, "math": equal_in_mathematics}
"""The built-in rewards by name."""

NEVER_GIVEN = ("completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
"""Parameters that TRL passes to reward functions, but Echo does not."""

_FORMS = (
    "a reward is f(completion, **row), called for each answer, or as in TRL f(prompts, "
    "completions, **columns), called with lists of a group's answers"
)

_ONE, _MANY = ("prompt", "completion"), ("prompts", "completions")
_REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def _is_plain(value: object) -> bool:
    return not isinstance(value, list | dict)


def _bound_names(function: Callable[..., Any]) -> frozenset[str]:
    """Return the names of the parameters that a functools.partial sets.

    The partial may be wrapped in other callables.
    """
    inner = inspect.unwrap(function)
    if not isinstance(inner, functools.partial):
        return frozenset()
    try:
        by_place = inspect.signature(inner.func).bind_partial(*inner.args).arguments
    except (TypeError, ValueError):  # too many arguments; the call will raise
        by_place = {}
    return frozenset({*inner.keywords, *by_place})


Value = Any
"""What a function returns for one answer: a number, None, or an awaitable of one of these."""


class RewardSum:
    """Computes the rewards of answers, by one function or as a weighted sum of several."""

    def __init__(self, spec: object, columns: Mapping[str, str]) -> None:
        """Import the functions that `spec` names.

        Args:
            spec: the value of task.options.reward: a function's name, a list of names, or a table
                of names and weights.
            columns: as for `RewardFunction`.

        Raises:
            ConfigError: if `spec` names no function or two functions of the same name, if a
                function cannot be called as a reward, or if a weight is not a number.
        """
        where = f"{OPTION} = {spec!r}"
        weights = dict(spec) if isinstance(spec, Mapping) else {}
        if isinstance(spec, list | tuple) and all(isinstance(each, str) for each in spec):
            weights = dict.fromkeys(spec, 1.0)
        for name, weight in weights.items():
            if isinstance(weight, bool) or not isinstance(weight, int | float):
                raise ConfigError(f"{where}: the weight of {name!r} is {weight!r}, no number")
        self._names = [name.rpartition(":")[2] for name in weights]
        if len({*self._names}) < len(self._names):
            raise ConfigError(f"{where}: two functions have one name; give each a name of its own")
        if weights and (fault := find_name_fault(self._names)):
            raise ConfigError(f"{where}: {fault}")
        self._alone = None if weights else RewardFunction(spec, columns)  # type: ignore[arg-type]
        self._functions = [RewardFunction(name, columns) for name in weights]
        self._weights = [float(weight) for weight in weights.values()]
        every = [self._alone] if self._alone is not None else self._functions
        self.is_of_groups = any(function.is_of_groups for function in every)
        self.files = list(
            dict.fromkeys(function.file for function in every if function.file is not None)
        )

    def check(self, example: Example, row: Mapping[str, Any]) -> None:
        """Check that a row has the columns of every function.

        Raises:
            ValueError: if columns are missing. The message names them.
        """
        for function in [self._alone] if self._alone is not None else self._functions:
            function.check(example, row)

    def one(self, example: Example, completion: str) -> Any:
        """Return the reward of one answer.

        With several functions, the result is a dict with the part of each function. If a function
        is async, the result is awaitable.
        """
        if self._alone is not None:
            return self._alone.one(example, completion)
        return self._combined([each.one(example, completion) for each in self._functions])

    def all(self, example: Example, completions: Sequence[str]) -> Any:
        """Return the rewards of all answers to a prompt, each as `one` would return it.

        If a function is async, the result is awaitable.
        """
        if self._alone is not None:
            return self._alone.all(example, completions)
        columns = [
            each.all(example, completions)
            if each.is_of_groups
            else [each.one(example, text) for text in completions]
            for each in self._functions
        ]
        if not any(map(inspect.isawaitable, itertools.chain(columns, *filter(_is_list, columns)))):
            return [self._parts(row) for row in zip(*columns, strict=True)]
        return self._combined_rows(columns)

    def _combined(self, values: Sequence[Value]) -> Any:
        if any(map(inspect.isawaitable, values)):
            return self._awaited_parts(values)
        return self._parts(values)

    async def _awaited_parts(self, values: Sequence[Value]) -> dict[str, float] | None:
        return self._parts([await each if inspect.isawaitable(each) else each for each in values])

    async def _combined_rows(self, columns: Sequence[Any]) -> list[dict[str, float] | None]:
        lists = [await each if inspect.isawaitable(each) else each for each in columns]
        return [await self._awaited_parts(row) for row in zip(*lists, strict=True)]

    def _parts(self, values: Sequence[Value]) -> dict[str, float] | None:
        """Return each function's weighted value. Functions that returned None are left out.

        If all functions returned None, return None.
        """
        parts = {
            name: weight * value
            for name, weight, value in zip(self._names, self._weights, values, strict=True)
            if value is not None
        }
        return parts or None


def _is_list(value: object) -> bool:
    return isinstance(value, list)


async def _when_known(values: Awaitable[Any]) -> Any:
    return _only(await values)


def _only(values: Any) -> Any:
    try:
        [value] = values
    except (TypeError, ValueError):
        text = f"returned {reprlib.repr(values)}, and not a list of one number, for one answer"
        raise ValueError(text) from None
    return value


class RewardFunction:
    """A built-in reward or a user's function, ready to be called for examples."""

    def __init__(self, spec: str, columns: Mapping[str, str]) -> None:
        """Import a function, and check that Echo has values for its parameters.

        Args:
            spec: the value of task.options.reward.
            columns: the dataset's own column names, from task.options.columns. A parameter of the
                function may have the dataset's name or Echo's name of a column.

        Raises:
            ConfigError: if `spec` names no function that can be called as a reward.
        """
        self.where = f"{OPTION} = {spec!r}"
        self._columns = columns
        if not isinstance(spec, str):
            raise ConfigError(
                f"{self.where}: name a function, or several with weights: "
                '{ "file.py:function" = 1.0, "file.py:other" = 0.2 }'
            )
        if spec == "math":
            require_math_verify(self.where)
        if ":" not in spec and spec not in BUILT_IN_REWARDS:
            raise ConfigError(
                f"{self.where}: no such reward{did_you_mean(spec, BUILT_IN_REWARDS)}; there are "
                f"{', '.join(BUILT_IN_REWARDS)}, or a function of yours: "
                "'package.module:function' or 'path/to/file.py:function'"
            )
        self._built_in = spec if spec in BUILT_IN_REWARDS else ""
        if self._built_in:
            self._function, self.file = BUILT_IN_REWARDS[spec], None
        else:
            self._function = load_function(self.where, spec)
            self.file = self._find_file(spec)
        parameters = self._parameters()
        is_named = {name for name, p in parameters.items() if p.kind not in _REST}
        self.is_of_groups = not is_named.isdisjoint(_MANY)
        self._own = _MANY if self.is_of_groups else _ONE
        if is_named.isdisjoint(self._own):
            raise ConfigError(f"{self.where}: {self._refusal(parameters)}")
        named = {
            name: parameter
            for name, parameter in parameters.items()
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        }
        self._is_cached = hasattr(self._function, "cache_parameters")
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self._bound = _bound_names(self._function)
        self._names = named.keys() - self._bound
        required = {n for n in self._names if named[n].default is inspect.Parameter.empty}
        self._required = sorted(required.difference(self._own))
        self._check_parameters(parameters)

    def _find_file(self, spec: str) -> Path:
        name = spec.rpartition(":")[0]
        file = getattr(import_module(self.where, name), "__file__", None)
        if file is None or not file.endswith(".py"):
            raise ConfigError(
                f"{self.where}: {name} is no Python file, so learner and workers cannot compare "
                "its code; call it from a function in a file of your own"
            )
        return Path(file)

    def _parameters(self) -> Mapping[str, inspect.Parameter]:
        if inspect.isclass(self._function):
            raise ConfigError(
                f"{self.where}: is a class; name an instance with a method __call__, or a method "
                f"of one: reward = {self._function.__name__}()"
            )
        try:
            return inspect.signature(self._function).parameters
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"{self.where}: its parameters cannot be read ({error}); call it from a function "
                "of your own"
            ) from error

    def _refusal(self, parameters: Mapping[str, inspect.Parameter]) -> str:
        names = list(parameters)
        text = f"it takes {', '.join(names) or 'nothing'}; {_FORMS}"
        if {"solution_str", "ground_truth"} & set(names):
            return f"{text}; verl's solution_str is completion here, and its ground_truth is answer"
        if all(p.kind in _REST for p in parameters.values()):
            return f"{text}: name one of them (a decorator keeps names with functools.wraps)"
        return text

    def _check_parameters(self, parameters: Mapping[str, inspect.Parameter]) -> None:
        by_place = [name for name, p in parameters.items() if p.kind is p.POSITIONAL_ONLY]
        if by_place:
            raise ConfigError(
                f"{self.where}: takes {', '.join(by_place)} by position only, and everything is "
                "given by name; remove the `/`"
            )
        if "self" in self._required and next(iter(parameters)) == "self":
            raise ConfigError(
                f"{self.where}: is a method without its instance; name a method of an instance: "
                f"reward = TheClass().{getattr(self._function, '__name__', 'method')}"
            )
        absent = [name for name in self._required if name in NEVER_GIVEN]
        if absent:
            raise ConfigError(
                f"{self.where}: needs {', '.join(absent)}, which Echo never gives: a reward gets "
                "texts and columns; give the parameter a default, or remove it"
            )
        if self._is_cached and (self._takes_all or self.is_of_groups):
            what = "the lists of a group" if self.is_of_groups else "all columns of a row"
            raise ConfigError(
                f"{self.where}: functools.lru_cache cannot hash {what}; cache a function of one "
                "text that this one calls, or name columns that are texts or numbers in place of **"
            )

    def check(self, example: Example, row: Mapping[str, Any]) -> None:
        """Check that a row has the columns for the function's parameters.

        Args:
            example: the example of the row.
            row: the values of the row, by column.

        Raises:
            ValueError: if columns are missing. The message names them.
        """
        known, answer_column = self._arguments(example), self._columns.get("answer", "answer")
        answers = {"answer", answer_column} if example.answer is None else set()
        missing = [name for name in self._required if name not in known or name in answers]
        if answers & {*missing} and answer_column in row:
            raise ValueError(
                f"{self.where} needs `{answer_column}`, whose value is null in this row"
            )
        if mixed := [name for name in missing if name in (*_ONE, *_MANY)]:
            raise ValueError(
                f"{self.where} takes {' and '.join(self._own)}, one of which it calls {mixed[0]}: "
                f"{_FORMS}"
            )
        if missing:
            remedy = (
                '; where it is called otherwise set task.options.columns = { answer = "ITS NAME" }'
            )
            raise ValueError(
                f"{self.where} needs the columns {', '.join(missing)}; it has {', '.join(row)}"
                f"{remedy if 'answer' in missing else ''}"
            )
        if self._is_cached:
            given = {**known, "prompt": example.prompt}
            unable = [n for n in sorted(self._names & given.keys()) if not _is_plain(given[n])]
            if unable:
                raise ValueError(
                    f"{self.where}: functools.lru_cache cannot hash `{unable[0]}`, a "
                    f"{type(given[unable[0]]).__name__} in this row; cache a function of texts "
                    "that this one calls"
                )
        if self._built_in:
            check_reference(self._built_in, answer_column, example.answer)

    def one(self, example: Example, completion: str) -> Any:
        """Return the function's result for one answer.

        A function of groups gets lists of one element. The result of an async function is
        awaitable.
        """
        if self.is_of_groups:
            values = self.all(example, [completion])
            return _when_known(values) if inspect.isawaitable(values) else _only(values)
        return self._call(
            self._arguments(example), {"prompt": example.prompt, "completion": completion}
        )

    def all(self, example: Example, completions: Sequence[str]) -> Any:
        """Return the function's result for all answers.

        The result of an async function is awaitable.
        """
        number = len(completions)
        answers: list[Any] = list(completions)
        if not isinstance(example.prompt, str):
            answers = [[{"role": "assistant", "content": text}] for text in completions]
        columns = {name: [value] * number for name, value in self._arguments(example).items()}
        return self._call(columns, {"prompts": [example.prompt] * number, "completions": answers})

    def _call(self, columns: Mapping[str, Any], own: Mapping[str, Any]) -> Any:
        arguments = {**columns, **own}
        return self._function(
            **{
                name: value
                for name, value in arguments.items()
                if name in self._names or (self._takes_all and name not in self._bound)
            }
        )

    def _arguments(self, example: Example) -> dict[str, Any]:
        """Return an example's values that the function may take as arguments.

        The keys are the dataset's column names. If the function has a parameter with Echo's name of
        a column, Echo's name is a key, too.
        """
        own = {"answer": example.answer, "info": example.info}
        read = {**own, "prompt": example.prompt}
        if not isinstance(example.prompt, str):
            read["messages"] = example.prompt
        if (tools := self._columns.get("tools")) in example.columns:
            read["tools"] = example.columns[tools]
        renamed = {self._columns[name]: read[name] for name in self._columns.keys() & read}
        named = {**read, **renamed}
        also = {name: value for name, value in named.items() if name in self._names}
        return {**also, **example.columns, **own}
