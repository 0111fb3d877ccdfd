"""Defines rewards that consist of named parts.

A task may return a reward's parts, such as {"correct": 1.0, "format": 0.2}, instead of a number.
The policy is trained on the sum; the parts are only shown. A task's reward is a `PartedReward`: a
number with an attribute for the parts. A `Rollout` has separate fields for the reward and the
parts.
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
"""Pattern that a part's name must match, because names of metrics contain it."""

PartName = Annotated[str, msgspec.Meta(max_length=64)]
"""A part's name in a message. `find_name_fault` checks the characters."""


class PartedReward(float):
    """A reward that equals the sum of its parts, with the parts as an attribute."""

    parts: Mapping[str, float]

    def __new__(cls, parts: Mapping[str, float]) -> PartedReward:
        """Make a number that equals the sum of the parts. Its attribute `parts` keeps them."""
        made = super().__new__(cls, math.fsum(parts.values()))
        made.parts = dict(parts)
        return made


def parts_of(reward: float) -> Mapping[str, float]:
    """Return a reward's parts; a plain number has none."""
    return reward.parts if isinstance(reward, PartedReward) else {}


def find_name_fault(names: Iterable[object]) -> str:
    """Return the error in the names of a reward's parts; "" if there is no error."""
    names = list(names)
    if not 0 < len(names) <= MAX_PARTS:
        return f"a reward has 1 to {MAX_PARTS} parts, not {len(names)}"
    for name in names:
        if not isinstance(name, str) or re.fullmatch(_NAME, name) is None:
            return f"a part is named {name!r}: use letters, digits, `_`, `-` and `.`, at most 64"
    return ""


def part_means(rewards: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each part, taken over the rewards that have this part.

    If there are more than MAX_PARTS names, only the first MAX_PARTS in alphabetical order are used.
    """
    values: dict[str, list[float]] = {}
    for parts in rewards:
        for name, value in parts.items():
            values.setdefault(name, []).append(value)
    names = sorted(values)[:MAX_PARTS]
    return {name: math.fsum(values[name]) / len(values[name]) for name in names}
