"""Unfinished rollouts: kept token by token, and continued later, elsewhere, by other weights.

A **draft** is a leased group while it is sampled. Each member has its tokens so far, with the
log-probability and the version that each was sampled with, so nothing is ever sampled twice and
nothing of it is a guess: a continued rollout is exact token by token, whoever continues it.

    empty --sampled--> unfinished <--continued--> ... --> finished          one member
    all members finished --> the group is scored and delivered              the draft

What old tokens are worth is decided whenever a draft goes (back) into an engine (`freshen`):

* Tokens of a lineage that was left are of no use: the member begins anew.
* Tokens older than the age cap (at most S, the bound on staleness) are never trained on. They are
  masked and stay as context; with stale_tokens = "drop" the member begins anew.
* Tokens of older versions within the cap: "keep" trains on them with their own log-probabilities;
  "mask" masks them once the rollout is finished, so that only what its newest version sampled is
  trained on; "drop" has every unfinished member begin anew under the present weights.
* A finished member without one token to train on begins anew: a group must not lose a member.
* Where a lease wants an exact version, what another one has sampled for it begins anew.

Each segment has a seed of its own: with the old one the random choices would repeat themselves.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from echo.core.rollout import Lineage, PartialRollout, PolicyVersion, StaleTokens, is_surviving
from echo.wire.messages import Lease


@dataclass(slots=True, eq=False)
class Draft:
    """A leased group while it is sampled; it keeps its lease, whoever else has held it before."""

    lease: Lease
    members: list[PartialRollout]
    num_progress: int = 0
    """Signs of life, tokens and rewards, since it came here: what renews the lease."""
    shipped_at: float = -1e18
    """When the learner was last sent what is here."""
    num_shipped: int = 0
    """Tokens that it was sent then."""
    began_at: float | None = None
    """When the engine took it."""
    is_continued: bool = False
    """Whether it was begun before that, here or elsewhere."""

    def seconds(self, now: float) -> float:
        """Return how long all of it took; 0 where that is not known."""
        return 0.0 if self.began_at is None or self.is_continued else now - self.began_at

    @property
    def key(self) -> tuple[int, int]:
        """(group id, attempt)."""
        return self.lease.group_id, self.lease.attempt

    @property
    def num_tokens(self) -> int:
        """Tokens of all members so far."""
        return sum(member.num_tokens for member in self.members)

    @property
    def num_unfinished(self) -> int:
        """Members that have not come to their end."""
        return sum(not member.is_finished for member in self.members)

    @property
    def is_whole(self) -> bool:
        """Whether all members have come to their end."""
        return not self.num_unfinished

    @property
    def oldest_step(self) -> int | None:
        """Step of the oldest version that has sampled for it; None without a token."""
        steps = [int(m.policy_versions[:, 1].min()) for m in self.members if m.num_tokens]
        return min(steps, default=None)

    def seed_of(self, member: int) -> int:
        """Return the seed of a member's next segment."""
        num_segments = self.members[member].num_segments
        if not num_segments:
            return self.lease.seed + member
        text = f"{self.lease.seed}/{member}/{num_segments}"
        return random.Random(text).getrandbits(48)


@dataclass(frozen=True, slots=True)
class Freshened:
    """What became of the tokens of members that are continued."""

    members: list[PartialRollout]
    num_masked: int
    """Tokens that will not be trained on and stay as context."""
    num_dropped: int
    """Tokens that were thrown away."""


def freshen(
    members: Iterable[PartialRollout],
    *,
    stale_tokens: StaleTokens,
    max_age: int,
    step: int,
    installed: PolicyVersion,
    lineages: Sequence[Lineage],
    exact_version: PolicyVersion | None = None,
) -> Freshened:
    """Return members as they may be continued now; see the rules above.

    Args:
        members: of one group.
        exact_version: the only one that may have sampled any of it; None for any.
        stale_tokens: what becomes of old tokens.
        max_age: steps that a token may be old; at most the bound on staleness.
        step: optimizer steps that the learner has done, as far as is known here.
        installed: the version that will continue them.
        lineages: the learner's histories so far, oldest first.
    """
    kept: list[PartialRollout] = []
    num_masked = num_dropped = 0
    for member in members:
        fresh = member
        if exact_version is not None and set(member.versions) - {exact_version}:
            fresh = member.anew()
        fresh = _freshen_one(fresh, stale_tokens, max_age, step, installed, lineages)
        if fresh.num_tokens < member.num_tokens:
            num_dropped += member.num_tokens
        else:
            num_masked += int(member.completion_mask.sum() - fresh.completion_mask.sum())
        kept.append(fresh)
    return Freshened(kept, num_masked, num_dropped)


def _freshen_one(
    member: PartialRollout,
    stale_tokens: StaleTokens,
    max_age: int,
    step: int,
    installed: PolicyVersion,
    lineages: Sequence[Lineage],
) -> PartialRollout:
    if not member.num_tokens:
        return member
    versions = member.versions
    if not all(is_surviving(version, lineages) for version in versions):
        return member.anew()
    is_too_old = member.policy_versions[:, 1] < step - max_age
    if stale_tokens == "drop":
        is_behind = not member.is_finished and versions[0] < installed
        return member.anew() if is_behind or is_too_old.any() else member
    fresh = member.without(is_too_old)
    return fresh if not member.is_finished or fresh.completion_mask.any() else member.anew()
