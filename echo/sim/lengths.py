"""Draws the length of each group from the group's id, and records which versions sampled it.

In a simulation, the message of a group has one token per version that sampled the group. This
module stores the true number of tokens.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from functools import lru_cache

import msgspec

from echo.core.rollout import Group, PolicyVersion
from echo.wire.codec import Frame
from echo.wire.messages import Lease

REMEMBERED = 1 << 17
"""Number of groups whose lengths are cached. Other lengths are drawn again when they are needed."""


@dataclass(frozen=True, slots=True)
class GroupLength:
    """How many completion tokens a group has."""

    num_tokens: int
    """Number of completion tokens in all rollouts of the group."""
    longest: int
    """Number of completion tokens in the longest rollout of the group."""
    is_useful: bool = True
    """Whether the group's rewards differ, so that the group can be trained on."""


class LogNormalLengths:
    """Draws independent completion lengths from a log-normal distribution.

    Lengths above the limit are reduced to the limit.
    """

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
        """Set the parameters of the distribution from which lengths are drawn.

        Args:
            mean: mean number of tokens of a completion, before the limit applies.
            spread: standard deviation of the length, divided by the mean length.
            limit: largest number of tokens of a completion.
            group_size: number of completions of a group.
            useful_share: share of the groups whose rewards differ.
            seed: seed of all draws.
        """
        self._sigma = math.sqrt(math.log1p(spread**2))
        self._mu = math.log(mean) - self._sigma**2 / 2
        self._limit = max(1, round(limit))
        self._group_size = group_size
        self._useful_share = useful_share
        self._seed = seed
        self.of = lru_cache(maxsize=REMEMBERED)(self._draw)
        """Returns the length of the group with a given id. The same id always gives the same
        length."""

    def _draw(self, group_id: int) -> GroupLength:
        chance = random.Random(f"{self._seed}/group/{group_id}")
        drawn = [
            min(self._limit, max(1, round(chance.lognormvariate(self._mu, self._sigma))))
            for _ in range(self._group_size)
        ]
        return GroupLength(sum(drawn), max(drawn), chance.random() < self._useful_share)


# --- groups ---------------------------------------------------------------------------------------


Shares = list[tuple[PolicyVersion, float]]
"""How many tokens each version has sampled: (version, number of tokens), oldest version first."""


class _Named(msgspec.Struct):
    """Those fields of a group's header (`codec.GroupHeader`) that the simulation reads."""

    group_id: int


_decoder = msgspec.msgpack.Decoder(_Named)


class Groups:
    """Stores the length of every group, and how many of its tokens each version sampled."""

    def __init__(self, lengths: LogNormalLengths, *, upload_bytes_per_token: float) -> None:
        self._lengths = lengths
        self._bytes_per_token = upload_bytes_per_token
        self._shares: dict[int, dict[int, Shares]] = {}
        self.tokens_sampled = 0.0
        """Number of tokens that all finished attempts at groups have sampled."""

    def length(self, group_id: int) -> GroupLength:
        return self._lengths.of(group_id)

    def num_bytes(self, header: Frame) -> float:
        """Read a group's header. Return how many bytes the group would have in a real run."""
        group_id = _decoder.decode(header).group_id
        return self._lengths.of(group_id).num_tokens * self._bytes_per_token

    def sampled(self, lease: Lease, shares: Shares) -> None:
        """Record how many tokens each version sampled in a finished attempt at a group."""
        self.tokens_sampled += sum(share for _, share in shares)
        self._shares.setdefault(lease.group_id, {})[lease.attempt] = shares

    def shares(self, group: Group) -> Shares:
        return self._shares[group.group_id][group.attempt]

    def waiting(self, group_id: int) -> float:
        """Return the number of tokens that a finished attempt at a group has sampled.

        The number is 0 if no attempt has finished, or if the group was trained or discarded.
        """
        attempts = self._shares.get(group_id)
        return sum(share for _, share in next(iter(attempts.values()))) if attempts else 0.0

    def forget(self, group_id: int) -> None:
        self._shares.pop(group_id, None)
