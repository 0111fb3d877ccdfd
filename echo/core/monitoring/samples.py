"""Converts rollouts to text for logs and trackers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

Ranked = TypeVar("Ranked")


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSample:
    """The decoded text of a rollout from a step or an evaluation."""

    kind: Literal["train", "eval"]
    prompt: str
    completion: str
    reward: float
    """The reward; NaN if the reward failed or the task could not score the rollout."""
    source: str
    """The worker that sampled the completion, or the version that was evaluated."""


MAX_SAMPLES = 16
"""Largest number of samples of one step or evaluation."""
COLUMNS = ("kind", "reward", "source", "prompt", "completion")
"""The columns of a table of samples, in this order. Each is a field of TextSample."""


def table_of(samples: Sequence[TextSample]) -> list[list[str | float]]:
    """Return a table that has a row for each sample, and the columns COLUMNS."""
    return [[getattr(sample, column) for column in COLUMNS] for sample in samples]


def spread_over(ranked: Sequence[Ranked], number: int) -> list[Ranked]:
    """Return `number` evenly spaced elements of `ranked`, including the first and the last.

    If there are fewer elements, return all of them.
    """
    if len(ranked) <= number:
        return list(ranked)
    if number <= 1:
        return list(ranked[:number])
    last = len(ranked) - 1
    return [ranked[round(last * place / (number - 1))] for place in range(number)]
