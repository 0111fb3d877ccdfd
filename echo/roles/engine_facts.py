"""Facts of a worker's engine and task that the decisions of its role need."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from echo.leases.partials import PartialRules

Sampler = Literal["engine", "episodes", "agents"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """Facts of a worker's engine and task that its decisions need."""

    group_size: int
    groups_per_batch: int
    """Groups that the engine holds at once."""
    is_continuous: bool = False
    """Whether groups may join those that it samples."""
    num_versions: int = 1
    """Versions that it samples from side by side; 1 where a new one takes over in flight."""
    sampler: Sampler = "engine"
    """The sampler: the engine alone, which can be stopped and continue; episodes of several turns,
    which are played to their end, because no other worker has their environment; or agents, to whom
    all leases are offered at once, as many as they ask for."""
    max_prompt_tokens: int = 1 << 30
    """Longest prompt that leaves room for a completion."""
    prompt_bound: str = "the model's window"
    """The reason for that limit, in words."""
    max_completion_tokens: int = 1 << 30
    rules: PartialRules = field(default_factory=PartialRules)
    """The settings for unfinished rollouts."""
    takes_patches: bool = False
    """Whether it takes a version as the words that change, in place."""
    name: str = ""
    """Its kind and data type."""
    queue_share: float = 1.0
    """Groups that wait here for each that the engine holds: so it never waits for the network."""

    @property
    def num_places(self) -> int:
        """Groups that the engine has at once, if each has all of its rollouts to sample."""
        return self._num_over if self.is_continuous else self.groups_per_batch

    @property
    def max_groups(self) -> int:
        """Groups to hold at once; agents ask for theirs."""
        if self.sampler == "agents":
            return 0
        return max(1, round(self._num_over + self.queue_share * self.groups_per_batch))

    @property
    def _num_over(self) -> int:
        return math.ceil(self.groups_per_batch * self.rules.over_submission)
