"""Rewards that consist of named parts.

A task may return the parts of a reward, such as {"correct": 1.0, "format": 0.2}, in place of a
number. The policy is trained on their sum. The parts are only shown. Between task and rollout, the
reward is a `PartedReward`: a number with an attribute for the parts. A `Rollout` has a field for
the reward and a field for the parts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Annotated

import msgspec

MAX_PARTS = 32
"""The largest number of parts of a reward."""

_NAME = r"[A-Za-z0-9_.-]{1,64}"
"""Pattern for the name of a part, which becomes a part of a metric's name."""

PartName = Annotated[str, msgspec.Meta(max_length=64)]
"""A name on the wire. `find_name_fault` checks its characters."""


class PartedReward(float):
    """A reward that is the sum of its parts. The parts are an attribute."""

    parts: Mapping[str, float]

    def __new__(cls, parts: Mapping[str, float]) -> PartedReward:
        """Return the sum of the parts, with the attribute `parts`."""
        made = super().__new__(cls, math.fsum(parts.values()))
        made.parts = dict(parts)
        return made


def parts_of(reward: float) -> Mapping[str, float]:
    """Return the parts of a reward, empty for a plain number."""
    return reward.parts if isinstance(reward, PartedReward) else {}


def find_name_fault(names: Iterable[object]) -> str:
    """Return what is wrong with the names of a reward's parts, or ""."""
    names = list(names)
    if not 0 < len(names) <= MAX_PARTS:
        return f"a reward has 1 to {MAX_PARTS} parts, not {len(names)}"
    for name in names:
        if not isinstance(name, str) or re.fullmatch(_NAME, name) is None:
            return f"a part is named {name!r}: use letters, digits, `_`, `-` and `.`, at most 64"
    return ""


def part_means(rewards: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each part over the rewards that have it.

    If there are more than MAX_PARTS names, the first MAX_PARTS in alphabetical order are used.
    """
    values: dict[str, list[float]] = {}
    for parts in rewards:
        for name, value in parts.items():
            values.setdefault(name, []).append(value)
    names = sorted(values)[:MAX_PARTS]
    return {name: math.fsum(values[name]) / len(values[name]) for name in names}
