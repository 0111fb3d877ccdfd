"""Defines the facts about a worker's engine and task on which the role's decisions depend."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from echo.leases.partials import PartialRules

Sampler = Literal["engine", "episodes", "agents"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """The facts about a worker's engine and task on which the role's decisions depend."""

    group_size: int
    groups_per_batch: int
    """Number of groups that the engine samples at the same time. Settings and memory limit the
    number."""
    num_fit: int = 0
    """Number of groups that would fit into memory if no setting limited it; 0 if unknown."""
    is_continuous: bool = False
    """Whether the engine accepts a new group while it samples other groups."""
    num_versions: int = 1
    """Number of versions with which the engine can sample at the same time. 1 if a new version
    replaces the old version."""
    sampler: Sampler = "engine"
    """The source of rollouts. "engine": the engine alone, whose rollouts can be stopped and
    continued. "episodes": episodes of several turns, which run to their end because no other worker
    has their environment. "agents": outside agents, which get an offer of every lease at once and
    request a number of leases."""
    max_prompt_tokens: int = 1 << 30
    """Largest number of prompt tokens that still leaves space for a completion of the largest
    length."""
    prompt_bound: str = "the model's window"
    """What limits `max_prompt_tokens`, as text for messages."""
    max_completion_tokens: int = 1 << 30
    rules: PartialRules = field(default_factory=PartialRules)
    """The rules for unfinished rollouts."""
    takes_patches: bool = False
    """Whether the engine can apply a delta in place, which means that it writes only the words that
    change."""
    name: str = ""
    """Kind and data type of the engine. Comparisons between workers use it."""

    @property
    def num_places(self) -> int:
        """Number of groups that the engine can hold at the same time."""
        return self._num_over if self.is_continuous else self.groups_per_batch

    @property
    def max_groups(self) -> int:
        """Number of groups that the worker can hold.

        Groups in the engine and queued groups both count. The queue holds the same number of groups
        as the engine, so that the engine does not wait for the network. With agents the number is 0
        at first, because agents request groups later.
        """
        if self.sampler == "agents":
            return 0
        return self._num_over + self.groups_per_batch

    @property
    def _num_over(self) -> int:
        return math.ceil(self.groups_per_batch * self.rules.over_submission)
