"""Several tasks in one run, mixed by weight.

    [task]
    kind = "mixture"

    [[task.options.tasks]]
    kind = "gsm8k"
    weight = 3
    options = { path = "gsm8k.jsonl" }

    [[task.options.tasks]]
    kind = "my_task:Reverse"

Of every thousand examples each task has its share, spread evenly, so a batch of any size is mixed
as the weights say. A finite dataset is visited whole, in a new order, before it is visited again.
Each example carries the name of its task; answers go to that one. Where an environment of several
turns is among the tasks, the others are played as episodes of one turn.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from echo.errors import ConfigError
from echo.tasks.environment import Environment, Message
from echo.tasks.imports import nearest
from echo.tasks.loading import load_task
from echo.tasks.task import Example, Task

CYCLE = 1000
"""Examples in which every task has its exact share, to a thousandth."""

_KEYS = ("kind", "weight", "options", "name")


class MixtureTask(Environment):
    """Draw from several tasks.

    Args:
        tasks: tables with `kind`, and perhaps `options`, `weight` (1) and `name` (what metrics
            call it; the kind's last part).
    """

    def __init__(self, *, tasks: Sequence[Mapping[str, Any]] = ()) -> None:
        if not tasks:
            raise ConfigError("task.kind = mixture needs tables [[task.options.tasks]] with a kind")
        self._parts: dict[str, Task] = {}
        weights = []
        for number, table in enumerate(tasks):
            where = f"task.options.tasks[{number}]"
            name, weight = _check(where, table)
            if name in self._parts:
                raise ConfigError(f"{where}: two tasks are called {name!r}; give them a `name`")
            self._parts[name] = load_task(table["kind"], table.get("options", {}))
            weights.append(weight)
        self._names = list(self._parts)
        self._schedule = spread([weight / sum(weights) for weight in weights])
        self.is_bounded = all(task.is_bounded for task in self._parts.values())
        self.has_turns = any(task.has_turns for task in self._parts.values())

    def prepare(self) -> None:
        """Prepare every task."""
        for task in self._parts.values():
            task.prepare()

    def example(self, index: int, *, split: str) -> Example:
        """Return an example of the task whose turn it is."""
        cycle, position = divmod(index, CYCLE)
        part, rank = self._schedule[position]
        name = self._names[part]
        count = cycle * self._shares[part] + rank
        own = self._parts[name].example(self._own_index(name, count, split), split=split)
        return replace(own, index=index, task=name)

    def reward(self, example: Example, completion: str) -> float:
        """Ask the example's task."""
        return self.part_of(example).reward(example, completion)

    def begin(self, example: Example) -> Any:
        """Begin an episode of the example's task."""
        task = self.part_of(example)
        own = task.begin(example) if isinstance(task, Environment) else [example, ""]
        return task, own

    def reply(self, state: Any, text: str) -> str | Message | list[Message] | None:
        """Pass the turn on; a task of one turn says nothing."""
        task, own = state
        if isinstance(task, Environment):
            return task.reply(own, text)
        own[1] = text
        return None

    def outcome(self, state: Any) -> float:
        """Ask the example's task."""
        task, own = state
        if isinstance(task, Environment):
            return task.outcome(own)
        reward: float = task.reward(*own)
        return reward

    def end(self, state: Any) -> None:
        """End the episode."""
        task, own = state
        if isinstance(task, Environment):
            task.end(own)

    def tools(self, example: Example) -> list[dict[str, Any]]:
        """Return the tools of the example's task."""
        task = self.part_of(example)
        return task.tools(example) if isinstance(task, Environment) else []

    def part_of(self, example: Example) -> Task:
        """Return the task that an example comes from."""
        return self._parts[example.task]

    def dataset_files(self) -> list[Path]:
        """Return the files of all tasks."""
        return [file for task in self._parts.values() for file in task.dataset_files()]

    def parts(self) -> list[Task]:
        """Return the tasks, in their order."""
        return list(self._parts.values())

    @functools.cached_property
    def _shares(self) -> list[int]:
        parts = [part for part, _ in self._schedule]
        return [parts.count(part) for part in range(len(self._names))]

    def _own_index(self, name: str, count: int, split: str) -> int:
        size = self._parts[name].num_examples(split=split)
        if size is None or split != "train" or not size:
            return count
        epoch, position = divmod(count, size)
        return _order(name, epoch, size)[position]


def spread(shares: Sequence[float]) -> list[tuple[int, int]]:
    """Return which part's turn it is at each place of a cycle, and how often it was before.

    Every prefix of the cycle has each part's share of it to within one.
    """
    counts = [0] * len(shares)
    schedule = []
    for place in range(1, CYCLE + 1):
        part = max(range(len(shares)), key=lambda part: shares[part] * place - counts[part])
        schedule.append((part, counts[part]))
        counts[part] += 1
    return schedule


@functools.lru_cache(maxsize=8)
def _order(name: str, epoch: int, size: int) -> list[int]:
    order = list(range(size))
    random.Random(f"{name}/epoch {epoch}").shuffle(order)
    return order


def _check(where: str, table: Mapping[str, Any]) -> tuple[str, float]:
    """Return the name and the weight of one table."""
    for key in table:
        if key not in _KEYS:
            raise ConfigError(
                f"{where}.{key}: no such key{nearest(key, _KEYS)}; it takes {', '.join(_KEYS)}"
            )
    kind, weight = table.get("kind"), table.get("weight", 1)
    if not isinstance(kind, str):
        raise ConfigError(f"{where}: needs a `kind`, as task.kind")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not weight > 0:
        raise ConfigError(f"{where}.weight = {weight!r}: must be a number above 0")
    return str(table.get("name", kind.rpartition(":")[2])), float(weight)
