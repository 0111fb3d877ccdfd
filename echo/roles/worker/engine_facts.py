"""Facts about a worker's engine and task, for the decisions of its role."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from echo.leases.partials import PartialRules

Sampler = Literal["engine", "episodes", "agents"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """The facts about a worker's engine and task, for the decisions of its role."""

    group_size: int
    groups_per_batch: int
    """Number of groups that the engine samples at the same time, as settings and memory allow."""
    num_fit: int = 0
    """Number of groups that memory could hold at the same time if the settings set no limit; 0 if
    unknown."""
    is_continuous: bool = False
    """Whether the engine takes a new group while it samples others."""
    num_versions: int = 1
    """Number of versions that the engine holds at the same time and can sample from; 1 if a new
    version replaces the old one.
    """
    sampler: Sampler = "engine"
    """The source of rollouts. "engine": the engine alone, which can be stopped and continued.
    "episodes": episodes of several turns, which are played to their end because no other worker has
    their environment. "agents": outside agents, which are offered every lease at once and which
    request a number of leases.
    """
    max_prompt_tokens: int = 1 << 30
    """Tokens of the longest prompt that leaves space for a completion of the largest length."""
    prompt_bound: str = "the model's window"
    """The cause of `max_prompt_tokens`, for messages."""
    max_completion_tokens: int = 1 << 30
    rules: PartialRules = field(default_factory=PartialRules)
    """The rules for unfinished rollouts."""
    takes_patches: bool = False
    """Whether the engine can apply a delta in place: write only the words that change."""
    name: str = ""
    """Kind and data type of the engine, to compare workers by."""

    @property
    def num_places(self) -> int:
        """Number of groups that are in the engine at the same time."""
        return self._num_over if self.is_continuous else self.groups_per_batch

    @property
    def max_groups(self) -> int:
        """Number of groups that the worker holds at the same time, in the engine or queued.

        As many groups wait as the engine takes, so that it does not wait for the network.
        With agents it is 0 at first, because agents ask for groups later.
        """
        if self.sampler == "agents":
            return 0
        return self._num_over + self.groups_per_batch

    @property
    def _num_over(self) -> int:
        return math.ceil(self.groups_per_batch * self.rules.over_submission)
