"""Lengths of groups, drawn by their number, whoever samples them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

REMEMBERED = 1 << 17
"""Groups whose lengths are kept; those of others are drawn again."""


@dataclass(frozen=True, slots=True)
class GroupLength:
    """Completion tokens of one group."""

    num_tokens: int
    """Of all rollouts."""
    longest: int
    """Of the longest one."""
    is_useful: bool = True
    """Whether its rewards differ, so that something can be learned from it."""


class Lengths(Protocol):
    """Where lengths come from."""

    def of(self, group_id: int) -> GroupLength:
        """Return the length of a group; the same for the same id."""


class LogNormalLengths:
    """Completions of log-normal length, independent of each other, cut off at a limit."""

    def __init__(
        self,
        *,
        mean: float,
        spread: float,
        limit: float,
        group_size: int,
        useful_share: float,
        seed: int,
    ) -> None:
        """Take the law.

        Args:
            mean: tokens, before the limit.
            spread: standard deviation over mean.
            limit: tokens of the longest completion.
            group_size: completions of a group.
            useful_share: share of the groups whose rewards differ.
            seed: of the draws.
        """
        self._sigma = math.sqrt(math.log1p(spread**2))
        self._mu = math.log(mean) - self._sigma**2 / 2
        self._limit = max(1, round(limit))
        self._group_size = group_size
        self._useful_share = useful_share
        self._seed = seed
        self.of = lru_cache(maxsize=REMEMBERED)(self._draw)

    def _draw(self, group_id: int) -> GroupLength:
        chance = random.Random(f"{self._seed}/group/{group_id}")
        drawn = [
            min(self._limit, max(1, round(chance.lognormvariate(self._mu, self._sigma))))
            for _ in range(self._group_size)
        ]
        return GroupLength(sum(drawn), max(drawn), chance.random() < self._useful_share)


class RecordedLengths:
    """Groups as a run recorded them, drawn again and again."""

    def __init__(
        self, groups: Sequence[int], *, group_size: int, useful_share: float, seed: int
    ) -> None:
        """Take the recorded totals of groups, tokens."""
        self._groups = sorted(groups)
        self._group_size = group_size
        self._useful_share = useful_share
        self._seed = seed
        self.of = lru_cache(maxsize=REMEMBERED)(self._draw)

    def _draw(self, group_id: int) -> GroupLength:
        chance = random.Random(f"{self._seed}/group/{group_id}")
        total = chance.choice(self._groups)
        # Nothing is known of the longest: the recorded pace of groups contains what it costs.
        longest = max(1, total // self._group_size)
        return GroupLength(total, longest, chance.random() < self._useful_share)
