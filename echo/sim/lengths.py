"""Lengths of groups, drawn by group id, and the versions that sampled each group.

In a simulation, a group on the wire has one token for each version that sampled it. The true
number of tokens of each group is kept here.
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
"""Groups whose lengths are kept; other lengths are drawn again when they are needed."""


@dataclass(frozen=True, slots=True)
class GroupLength:
    """Completion tokens of one group."""

    num_tokens: int
    """Tokens of all rollouts."""
    longest: int
    """Tokens of the longest rollout."""
    is_useful: bool = True
    """Whether its rewards differ, so that something can be learned from it."""


class LogNormalLengths:
    """Independent completions of log-normal length, cut off at a limit."""

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
        """Set the distribution: `mean` before the cut and `limit` in tokens, `spread` over mean."""
        self._sigma = math.sqrt(math.log1p(spread**2))
        self._mu = math.log(mean) - self._sigma**2 / 2
        self._limit = max(1, round(limit))
        self._group_size = group_size
        self._useful_share = useful_share
        self._seed = seed
        self.of = lru_cache(maxsize=REMEMBERED)(self._draw)
        """Return the length of a group by its id; the same id always gives the same length."""

    def _draw(self, group_id: int) -> GroupLength:
        chance = random.Random(f"{self._seed}/group/{group_id}")
        drawn = [
            min(self._limit, max(1, round(chance.lognormvariate(self._mu, self._sigma))))
            for _ in range(self._group_size)
        ]
        return GroupLength(sum(drawn), max(drawn), chance.random() < self._useful_share)


# --- groups ---------------------------------------------------------------------------------------


Shares = list[tuple[PolicyVersion, float]]
"""(version, tokens that it sampled), oldest first."""


class _Named(msgspec.Struct):
    """The fields of a group's header (`codec.GroupHeader`) that the simulation reads."""

    group_id: int


_decoder = msgspec.msgpack.Decoder(_Named)


class Groups:
    """All groups, by id."""

    def __init__(self, lengths: LogNormalLengths, *, upload_bytes_per_token: float) -> None:
        self._lengths = lengths
        self._bytes_per_token = upload_bytes_per_token
        self._shares: dict[int, dict[int, Shares]] = {}
        self.tokens_sampled = 0.0
        """Tokens of all finished groups."""

    def length(self, group_id: int) -> GroupLength:
        return self._lengths.of(group_id)

    def num_bytes(self, header: Frame) -> float:
        """Return the true bytes on the wire of the group with this header."""
        group_id = _decoder.decode(header).group_id
        return self._lengths.of(group_id).num_tokens * self._bytes_per_token

    def sampled(self, lease: Lease, shares: Shares) -> None:
        """Record the tokens that each version sampled of a finished attempt."""
        self.tokens_sampled += sum(share for _, share in shares)
        self._shares.setdefault(lease.group_id, {})[lease.attempt] = shares

    def shares(self, group: Group) -> Shares:
        return self._shares[group.group_id][group.attempt]

    def waiting(self, group_id: int) -> float:
        """Return the tokens of one finished attempt of a group; 0 if the group has ended."""
        attempts = self._shares.get(group_id)
        return sum(share for _, share in next(iter(attempts.values()))) if attempts else 0.0

    def forget(self, group_id: int) -> None:
        self._shares.pop(group_id, None)
