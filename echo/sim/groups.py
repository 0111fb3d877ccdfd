"""Simulated groups: lengths, sizes on the wire, tokens by worker.

The sessions carry groups with one token for each version that sampled them; what such a token
stands for is noted here.
"""

from __future__ import annotations

import msgspec

from echo.core.rollout import Group, PolicyVersion
from echo.sim.lengths import GroupLength, Lengths
from echo.wire.codec import Frame
from echo.wire.messages import Lease

Shares = list[tuple[PolicyVersion, float]]
"""(version, tokens that it sampled), oldest first."""


class _Named(msgspec.Struct):
    """What is read of a group's header (`codec.GroupHeader`)."""

    group_id: int


_decoder = msgspec.msgpack.Decoder(_Named)


class Groups:
    """All groups, by id."""

    def __init__(self, lengths: Lengths, *, upload_bytes_per_token: float) -> None:
        """Start without results."""
        self._lengths = lengths
        self._bytes_per_token = upload_bytes_per_token
        self._shares: dict[int, dict[int, Shares]] = {}
        self.tokens_sampled = 0.0
        """Of groups that were finished."""

    def length(self, group_id: int) -> GroupLength:
        """Return how long a group is."""
        return self._lengths.of(group_id)

    def num_bytes(self, header: Frame) -> float:
        """Return the true size of a group on the wire, by its header."""
        group_id = _decoder.decode(header).group_id
        return self._lengths.of(group_id).num_tokens * self._bytes_per_token

    def sampled(self, lease: Lease, shares: Shares) -> None:
        """Note what a finished attempt consists of."""
        self.tokens_sampled += sum(share for _, share in shares)
        self._shares.setdefault(lease.group_id, {})[lease.attempt] = shares

    def shares(self, group: Group) -> Shares:
        """Return what a group consists of."""
        return self._shares[group.group_id][group.attempt]

    def waiting(self, group_id: int) -> float:
        """Return how many tokens one finished attempt of a group has; 0 if it came to an end."""
        attempts = self._shares.get(group_id)
        return sum(share for _, share in next(iter(attempts.values()))) if attempts else 0.0

    def forget(self, group_id: int) -> None:
        """Let go of a group that has come to its end."""
        self._shares.pop(group_id, None)
