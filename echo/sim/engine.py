"""Engine model: a rate in place of a language model.

An engine makes `tokens_per_s` completion tokens per second, shared equally among the groups in it.
A sequence on its own is faster than one of many, by `alone_speedup` at most, so a group never takes
less than its longest completion at that pace. New weights are taken in flight: what is sampled from
then on is theirs. A pausing engine makes nothing until it goes on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from echo.core.rollout import PolicyVersion
from echo.sim.lengths import GroupLength
from echo.wire.messages import Lease


@dataclass(slots=True, eq=False)
class Running:
    """A group in the engine."""

    lease: Lease
    length: GroupLength
    least_s: float
    """Seconds that it takes if nothing holds it up."""
    num_tokens: float = 0.0
    """Made so far."""
    segments: list[tuple[PolicyVersion, float]] = field(default_factory=list)
    """Each version that sampled it, and how many tokens were there when it began."""

    def shares(self) -> list[tuple[PolicyVersion, float]]:
        """Return how many tokens each version sampled."""
        ends = [start for _, start in self.segments[1:]] + [float(self.length.num_tokens)]
        return [
            (version, end - start)
            for (version, start), end in zip(self.segments, ends, strict=True)
            if end > start
        ]


class EngineModel:
    """The groups that one worker samples."""

    def __init__(
        self, *, tokens_per_s: float, concurrency: int, group_size: int, alone_speedup: float
    ) -> None:
        """Start empty.

        Args:
            tokens_per_s: completion tokens per second of a full engine.
            concurrency: rollouts that it samples side by side.
            group_size: rollouts of a group.
            alone_speedup: how much faster one sequence is on its own than in a full engine.
        """
        self.tokens_per_s = tokens_per_s
        self.groups_per_batch = max(1, concurrency // group_size)
        self._concurrency = concurrency
        self._alone_speedup = alone_speedup
        self.groups: list[Running] = []
        self.version: PolicyVersion | None = None
        self.tokens_made = 0.0
        self.is_paused = False
        self._at = 0.0

    @property
    def space(self) -> int:
        """How many groups more may begin."""
        return self.groups_per_batch - len(self.groups)

    def begin(self, lease: Lease, length: GroupLength, *, now: float) -> None:
        """Take a group in."""
        assert self.version is not None
        self.advance(now)
        pace = self.tokens_per_s / self._concurrency * self._alone_speedup
        running = Running(lease, length, length.longest / pace)
        running.segments.append((self.version, 0.0))
        self.groups.append(running)

    def install(self, version: PolicyVersion, *, now: float) -> None:
        """Sample from another version from now on."""
        self.advance(now)
        self.version = version
        for group in self.groups:
            group.segments.append((version, group.num_tokens))

    def pause(self, is_paused: bool, *, now: float) -> None:
        """Make nothing, or go on."""
        self.advance(now)
        self.is_paused = is_paused

    def set_rate(self, tokens_per_s: float, *, now: float) -> None:
        """Become faster or slower."""
        self.advance(now)
        for group in self.groups:
            group.least_s *= self.tokens_per_s / tokens_per_s
        self.tokens_per_s = tokens_per_s

    def advance(self, now: float) -> None:
        """Make what there was time for."""
        elapsed_s, self._at = now - self._at, now
        if self.is_paused or elapsed_s <= 0:
            return
        for group in self.groups:
            made = min(self._rate(group) * elapsed_s, group.length.num_tokens - group.num_tokens)
            group.num_tokens += made
            self.tokens_made += made

    def stop(self, lease: Lease, *, now: float) -> float:
        """Take a group out that is not complete; return how many tokens it has."""
        self.advance(now)
        [stopped] = [group for group in self.groups if group.lease is lease]
        self.groups.remove(stopped)
        return stopped.num_tokens

    def finished(self, *, now: float) -> list[Running]:
        """Take out what is complete."""
        self.advance(now)
        # A tenth of a token is no work for an event of its own.
        done = [g for g in self.groups if g.num_tokens >= g.length.num_tokens - 0.1]
        self.groups = [group for group in self.groups if group not in done]
        return done

    @property
    def next_at(self) -> float:
        """When the next group is complete if nothing changes; infinite if none will be."""
        if self.is_paused:
            return math.inf
        return self._at + min(
            ((g.length.num_tokens - g.num_tokens) / self._rate(g) for g in self.groups),
            default=math.inf,
        )

    def _rate(self, group: Running) -> float:
        return min(self.tokens_per_s / len(self.groups), group.length.num_tokens / group.least_s)
