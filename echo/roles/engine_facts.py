"""Facts of a worker's engine and task that the decisions of its role need."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from echo.leases.partials import PartialRules

Sampler = Literal["engine", "episodes", "agents"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """A worker's engine and task, as the decisions of its role see them."""

    group_size: int
    groups_per_batch: int
    """Groups that the engine's memory holds at once."""
    is_continuous: bool = False
    """Whether the engine takes a new group while it samples others."""
    num_versions: int = 1
    """Versions that the engine samples from side by side; 1 if a new version replaces the old
    one.
    """
    sampler: Sampler = "engine"
    """The source of rollouts. "engine": the engine alone, which can be stopped and continued.
    "episodes": episodes of several turns, which are played to their end because no other worker has
    their environment. "agents": outside agents, which are offered every lease at once and which
    request a number of leases.
    """
    max_prompt_tokens: int = 1 << 30
    """Tokens of the longest prompt that leaves space for a completion."""
    prompt_bound: str = "the model's window"
    """The cause of `max_prompt_tokens`, for messages."""
    max_completion_tokens: int = 1 << 30
    rules: PartialRules = field(default_factory=PartialRules)
    """The settings for unfinished rollouts."""
    takes_patches: bool = False
    """Whether the engine applies a delta in place, to the words that change."""
    name: str = ""
    """Kind and data type of the engine."""
    queue_share: float = 1.0
    """Queued groups per group in the engine, so that the engine never waits for the network."""

    @property
    def num_places(self) -> int:
        """Groups that are in the engine at once, if none of their rollouts is finished."""
        return self._num_over if self.is_continuous else self.groups_per_batch

    @property
    def max_groups(self) -> int:
        """Groups that this worker holds at once; 0 with agents, which request a number later."""
        if self.sampler == "agents":
            return 0
        return max(1, round(self._num_over + self.queue_share * self.groups_per_batch))

    @property
    def _num_over(self) -> int:
        return math.ceil(self.groups_per_batch * self.rules.over_submission)
