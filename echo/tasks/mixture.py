"""Mixtures: a run trains on several tasks in proportion to their weights.

    [task]
    kind = "mixture"

    [[task.options.tasks]]
    kind = "gsm8k"
    weight = 3
    options = { path = "gsm8k.jsonl" }

    [[task.options.tasks]]
    kind = "my_task:Reverse"

Every thousand examples contain each task in proportion to its weight. The examples of a task are
spread evenly, so a batch of any size has nearly these proportions. When all examples of a finite
dataset have been used, the examples repeat in a new order. Each example has the name of the task
that it comes from. This task rewards the answers to the example. If one of the tasks is an
environment of several turns, the examples of other tasks become episodes of one turn.
"""

from __future__ import annotations

import functools
import inspect
import math
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from echo.core.errors import ConfigError
from echo.tasks.environment import Environment, Reply
from echo.tasks.task import Example, Reward, Rewards, Task, did_you_mean, load_task

CYCLE = 1000
"""Number of examples after which the schedule repeats. Weights are therefore rounded to
thousandths."""

_TABLE_KEYS = ("kind", "weight", "options", "name")


class MixtureTask(Environment):
    """Takes its examples from several tasks, in proportion to weights.

    Args:
        tasks: one table for each task, with `kind`, and optionally `options`, `weight` (default 1)
            and `name` (the name of the task in metrics; default: the last part of the kind).
    """

    def __init__(self, *, tasks: Sequence[Mapping[str, Any]] = ()) -> None:
        if not tasks:
            raise ConfigError("task.kind = mixture needs tables [[task.options.tasks]] with a kind")
        self._parts: dict[str, Task] = {}
        weights = []
        for number, table in enumerate(tasks):
            where = f"task.options.tasks[{number}]"
            name, weight = _check_table(where, table)
            if name in self._parts:
                raise ConfigError(f"{where}: two tasks are called {name!r}; give them a `name`")
            self._parts[name] = load_task(table["kind"], table.get("options", {}))
            if isinstance(self._parts[name], MixtureTask):
                raise ConfigError(f"{where}: a mixture in a mixture; list its tasks here")
            weights.append(weight)
        self._names = list(self._parts)
        self._schedule = spread([weight / sum(weights) for weight in weights])
        if 0 in self._shares:
            number = self._shares.index(0)
            raise ConfigError(
                f"task.options.tasks[{number}].weight = {weights[number]:g}: fewer than one "
                f"example in {CYCLE}, so none would be drawn; raise it, or leave the task out"
            )
        self.is_bounded = all(task.is_bounded for task in self._parts.values())
        self.has_turns = any(task.has_turns for task in self._parts.values())

    def prepare(self) -> None:
        for task in self._parts.values():
            task.prepare()

    def example(self, index: int, *, split: str) -> Example:
        """Return an example of the task that the schedule assigns to this index."""
        cycle, position = divmod(index, CYCLE)
        part, rank = self._schedule[position]
        name = self._names[part]
        count = cycle * self._shares[part] + rank
        own = self._parts[name].example(self._own_index(name, count, split), split=split)
        return replace(own, index=index, task=name)

    def reward(self, example: Example, completion: str) -> Reward:
        return self.part_of(example).reward(example, completion)

    def right_completion(self, example: Example) -> str | None:
        return self.part_of(example).right_completion(example)

    def compares_answers(self, example: Example) -> bool:
        return self.part_of(example).compares_answers(example)

    def rewards(self, example: Example, completions: list[str]) -> Rewards:
        return self.part_of(example).rewards(example, completions)

    def turn_limit(self, example: Example) -> int | None:
        task = self.part_of(example)
        return task.turn_limit(example) if isinstance(task, Environment) else None

    def begin(self, example: Example) -> Any:
        """Start an episode of the example's task, and return the episode's state."""
        task = self.part_of(example)
        own = task.begin(example) if isinstance(task, Environment) else [example, ""]
        return _when_begun(task, own) if inspect.isawaitable(own) else (task, own)

    def reply(self, state: Any, text: str) -> Reply | Awaitable[Reply]:
        """Return the task's reply to a turn; None for a task with a single turn."""
        task, own = state
        if isinstance(task, Environment):
            return task.reply(own, text)
        own[1] = text
        return None

    def outcome(self, state: Any) -> Reward:
        """Return the reward that the episode's task gives."""
        task, own = state
        if isinstance(task, Environment):
            return task.outcome(own)
        reward: Reward = task.reward(*own)
        return reward

    def end(self, state: Any) -> Awaitable[None] | None:
        """Let the episode's task release the state of the episode."""
        task, own = state
        return task.end(own) if isinstance(task, Environment) else None

    def tools(self, example: Example) -> list[dict[str, Any]]:
        """Return the tools of the example's task."""
        task = self.part_of(example)
        return task.tools(example)

    def part_of(self, example: Example) -> Task:
        return self._parts[example.task]

    def examine(self, fault_of: Callable[[Example], str]) -> None:
        for task in self._parts.values():
            task.examine(fault_of)

    def dataset_files(self) -> list[Path]:
        return [file for task in self._parts.values() for file in task.dataset_files()]

    def parts(self) -> list[Task]:
        """Return the tasks of the mixture, in the order of the settings."""
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
        return _order_of(name, epoch, size)[position]


async def _when_begun(task: Task, own: Awaitable[Any]) -> tuple[Task, Any]:
    return task, await own


def spread(shares: Sequence[float]) -> list[tuple[int, int]]:
    """Divide CYCLE places between parts, so that the places of each part are spread evenly.

    Among the first n places, a part with the share s has s*n places, plus or minus one.

    Args:
        shares: the share of each part in the places.

    Returns:
        For each place: the index of its part, and the number of earlier places of this part.
    """
    counts = [0] * len(shares)
    schedule = []
    for place in range(1, CYCLE + 1):
        part = max(range(len(shares)), key=lambda part: shares[part] * place - counts[part])
        schedule.append((part, counts[part]))
        counts[part] += 1
    return schedule


@functools.lru_cache(maxsize=8)
def _order_of(name: str, epoch: int, size: int) -> list[int]:
    order = list(range(size))
    random.Random(f"{name}/epoch {epoch}").shuffle(order)
    return order


def _check_table(where: str, table: Mapping[str, Any]) -> tuple[str, float]:
    """Check the settings of one task. Return the task's name and weight."""
    for key in table:
        if key not in _TABLE_KEYS:
            raise ConfigError(
                f"{where}.{key}: no such key{did_you_mean(key, _TABLE_KEYS)}; it takes "
                f"{', '.join(_TABLE_KEYS)}"
            )
    kind, weight = table.get("kind"), table.get("weight", 1)
    if not isinstance(kind, str):
        raise ConfigError(f"{where}: needs a `kind`, as task.kind")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
        raise ConfigError(f"{where}.weight = {weight!r}: must be a finite number above 0")
    return str(table.get("name", kind.rpartition(":")[2])), float(weight)
