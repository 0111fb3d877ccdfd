"""Any dataset with any reward function: a task that needs no class.

    [task]
    kind = "dataset"
    options = { path = "train.parquet", reward = "rewards.py:correct" }

`reward` names a plain function of the user's,

    def correct(prompt, completion, answer, **row):
        return float(answer in completion)

which is called with the prompt (text or messages), the completion's text, and the row's columns by
name; it gets those that it asks for. A function whose parameters are `prompts` and `completions`
is called as TRL does: with lists, here of one element, and chat completions as messages. "exact"
and "math" are rewards that need no function.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from echo.errors import ConfigError
from echo.tasks.imports import load_function
from echo.tasks.math_answer import extract_answer, is_equal, normalise, require_math_verify
from echo.tasks.rows import RowsTask
from echo.tasks.task import Example

OPTION = "task.options.reward"


class DatasetTask(RowsTask):
    """Serve a dataset's rows and judge answers by a function.

    Args:
        path: the training rows; see formats.py.
        heldout_path: the held-out rows; without it, one row in ten of `path`.
        columns: where the dataset's names differ, such as { prompt = "question" }.
        skip_bad: leave malformed rows out and say how many there were, and which was the first.
        reward: "exact" (the text is `answer`), "math" (math-verify finds the last number or
            boxed expression equal to `answer`), or a function: "package.module:function" or
            "path/to/file.py:function".
    """

    def __init__(
        self,
        *,
        path: str = "",
        heldout_path: str = "",
        columns: Mapping[str, str] | None = None,
        skip_bad: bool = False,
        reward: str = "exact",
    ) -> None:
        super().__init__(path=path, heldout_path=heldout_path, columns=columns, skip_bad=skip_bad)
        self._reward = _RewardFunction(reward)

    def read_row(self, row: Mapping[str, Any]) -> Example:
        """Read a row, and check that it has what the reward function asks for."""
        example = super().read_row(row)
        self._reward.check(example, row)
        return example

    def reward(self, example: Example, completion: str) -> float:
        """Return what the function says."""
        value: float = self._reward(example, completion)
        return value

    def source_files(self) -> list[Path]:
        """Return the file of the function."""
        path = inspect.getsourcefile(self._reward.function)
        return [] if path is None else [Path(path)]


class _RewardFunction:
    """A user's function, called with what its signature asks for."""

    def __init__(self, spec: str) -> None:
        self._where = f"{OPTION} = {spec!r}"
        self._needs_answer = spec in BUILT_IN
        if spec == "math":
            require_math_verify(self._where)
        self.function: Callable[..., Any] = BUILT_IN.get(spec) or load_function(self._where, spec)
        parameters = inspect.signature(self.function).parameters
        self._is_plural = {"prompts", "completions"} <= parameters.keys()
        own = {"prompts", "completions"} if self._is_plural else {"prompt", "completion"}
        if not own & parameters.keys():
            raise ConfigError(
                f"{self._where}: it takes {', '.join(parameters) or 'nothing'}; a reward function "
                "is reward(prompt, completion, **row)"
            )
        named = {
            name: parameter
            for name, parameter in parameters.items()
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        }
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self._names = named.keys() - own
        self._own = own if self._takes_all else own & named.keys()
        self._required = [
            name for name in self._names if named[name].default is inspect.Parameter.empty
        ]

    def check(self, example: Example, row: Mapping[str, Any]) -> None:
        """Refuse a row without a column that the function needs."""
        if self._needs_answer and example.answer is None:
            raise ValueError(
                f"{self._where} needs the column `answer`; it has {', '.join(row)}; where it is "
                'called otherwise set task.options.columns = { answer = "ITS NAME" }'
            )
        known = _arguments(example)
        missing = [name for name in self._required if name not in known]
        if missing:
            raise ValueError(
                f"{self._where} needs the columns {', '.join(missing)}; it has {', '.join(row)}"
            )

    def __call__(self, example: Example, completion: str) -> Any:
        arguments = _arguments(example)
        if not self._takes_all:
            arguments = {name: arguments[name] for name in self._names & arguments.keys()}
        if self._is_plural:
            is_chat = not isinstance(example.prompt, str)
            answer = [{"role": "assistant", "content": completion}] if is_chat else completion
            arguments = {name: [value] for name, value in arguments.items()}
            arguments |= {"prompts": [example.prompt], "completions": [answer]}
        else:
            own = {"prompt": example.prompt, "completion": completion}
            arguments |= {name: own[name] for name in self._own}
        value = self.function(**arguments)
        if inspect.isawaitable(value):
            value = asyncio.run(_await(value))
        return value[0] if self._is_plural else value


def _arguments(example: Example) -> dict[str, Any]:
    return {**example.columns, "answer": example.answer, "info": example.info}


async def _await(value: Any) -> Any:
    return await value


def _exact(completion: str, answer: object) -> float:
    return float(completion.strip() == str(answer).strip())


def _math(completion: str, answer: object) -> float:
    found = extract_answer(completion)
    return float(found is not None and is_equal(normalise(str(answer)), found))


BUILT_IN: dict[str, Callable[..., float]] = {"exact": _exact, "math": _math}
"""Rewards that need no function of the user's."""
