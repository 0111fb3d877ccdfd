"""Defines the counters that a node keeps, and the learning curve that a resumed run shows.

Metric names follow the field: `reward/mean`, `staleness/{mean,max}`, `time/{step,train,...}`,
`learner/idle_ratio`, `perf/tokens_per_s`, `broadcast/{bytes,seconds,goodput}` and so on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


class Counters:
    """A node's counters, each with a name. A counter never decreases.

    A counter exists after its first `add`.
    """

    def __init__(self) -> None:
        self._counts: dict[str, float] = {}

    def add(self, name: str, amount: float = 1) -> None:
        self._counts[name] = self._counts.get(name, 0) + amount

    def __getitem__(self, name: str) -> float:
        return self._counts.get(name, 0)

    def as_dict(self) -> dict[str, float]:
        """Return a copy of all counts, sorted by the counters' names."""
        return dict(sorted(self._counts.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """Facts about a worker that the worker's status line shows."""

    version: str
    """Installed policy version, as text."""
    num_tokens: int
    """Completion tokens sampled since the process started, including unfinished rollouts."""
    num_groups: int
    """Number of this worker's groups that the learner has accepted."""
    activity: str


def held_out(is_rate: bool) -> str:
    """Return the name under which views show the mean reward of held-out prompts.

    Args:
        is_rate: whether every reward is 0 or 1.
    """
    return "held-out pass rate" if is_rate else "held-out reward"


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningCurve:
    """The learning curve of a resumed run, up to the step of the resume."""

    rewards: Mapping[int, float]
    """The mean reward of each step."""
    evaluations: tuple[tuple[int, float, float], ...]
    """One tuple per evaluation: step, mean reward of sampled answers, mean reward of greedy
    answers."""
    is_rate: bool = True
    """Whether every reward of an evaluation was 0 or 1."""
