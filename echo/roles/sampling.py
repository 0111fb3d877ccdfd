"""The calls of a worker's engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from echo.core.rollout import PolicyVersion
from echo.leases.held import PartialGroup
from echo.roles.engine_facts import EngineFacts
from echo.wire.actions import Action
from echo.wire.messages import Lease


@dataclass(slots=True, eq=False)
class EngineCall:
    """Groups that are sampled together, and how far they are.

    The sampler's thread counts at any time and is the only one that writes `seen_tokens` and
    `seen_signs`; all else belongs to the role, to which the shell reports both (`counted`).
    """

    groups: list[PartialGroup]
    """At least one of each one's members is unfinished."""
    num_awaited: int
    """Whole groups after which it is recalled if others wait for the room."""
    ends_at: float
    version: PolicyVersion | None
    """The only version that samples them; None for whichever is installed."""
    num_whole: int = 0
    num_tokens: int = 0
    """Sampled so far."""
    num_signs: int = 0
    """Signs of life of every group in it, tokens among them."""
    is_recalled: bool = False
    """Whether it is to end soon, with what it has."""
    seen_tokens: int = 0
    seen_signs: int = 0

    def on_tokens(self, number: int) -> None:
        """Count tokens."""
        self.seen_tokens += number
        self.on_progress(number)

    def on_progress(self, number: int) -> None:
        """Note a sign of life of every group in the call."""
        self.seen_signs += number


@dataclass(frozen=True, slots=True)
class Sample(Action):
    """Sample these groups, unfinished members from where they stopped."""

    call: EngineCall


@dataclass(frozen=True, slots=True)
class Recall(Action):
    """Stop this call of the engine; it returns all the same."""

    call: EngineCall


@dataclass(frozen=True, slots=True)
class OfferEpisodes(Action):
    """Offer the episodes of these leases to agents."""

    leases: Sequence[Lease]


@dataclass(frozen=True, slots=True)
class Withdraw(Action):
    """Offer nothing more to agents; leases that none of them works on are `dropped`."""


@dataclass(frozen=True, slots=True)
class Score(Action):
    """Reward every member of a whole group; stop if it becomes unwanted meanwhile."""

    group: PartialGroup


def make_call(
    groups: list[PartialGroup],
    engine: EngineFacts,
    now: float,
    version: PolicyVersion | None,
) -> EngineCall:
    """Return the call that samples these groups."""
    max_s = engine.rules.ship_s
    is_continuable = version is None or engine.num_versions > 1
    if max_s is None or not is_continuable or engine.sampler != "engine":
        max_s = math.inf
    return EngineCall(
        groups,
        num_awaited=math.ceil(len(groups) / engine.rules.over_submission),
        ends_at=now + max_s,
        version=version,
    )
