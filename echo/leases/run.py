"""Inputs of the lease scheduler: settings, the run's state, prompts, accepted groups."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from echo.core.errors import DataError, EchoError
from echo.core.rollout import Lineage
from echo.leases.book import LeaseBook
from echo.wire.messages import Lease


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseSettings:
    """Settings of the scheduler: the requirements on groups, and the bounds on their number."""

    max_staleness: int
    groups_per_step: int
    group_size: int
    max_completion_tokens: int
    """Largest number of completion tokens in a chain of a rollout, masked tokens included."""
    vocab_size: int
    heartbeat_s: float
    max_zero_signal_groups: int
    """The run ends when nothing can be learned from this number of groups in a row."""
    prompts_are_free: bool = False
    """Whether a rollout's prompt may differ from its lease's prompt, as with agents."""
    max_tree_tokens: int | None = None
    """Largest number of completion tokens in all chains of a rollout together; None if rollouts
    have one chain.
    """
    trims_stale: bool = False
    """Whether tokens beyond the staleness bound are masked; if not, a group with such tokens is
    refused.
    """
    hedge_factor: float | None = None
    """A group is copied if the lease should take at least this number of times as long as the copy
    (`leases/grants/dispatch.py`). If None, groups are copied only because of their age.
    """
    is_eager: bool = False
    """Whether groups are granted as early as admission allows, instead of just in time."""
    exact_version: bool = False
    """Whether a single version must have sampled each group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The state of a run when its learner starts."""

    leases: LeaseBook
    """The leases that workers hold according to the ledger, after a restart."""
    lineages: tuple[Lineage, ...]
    """The run's lineages so far, the present one last; each resume begins a lineage."""
    step: int = 0
    """Number of optimizer steps done."""
    next_group_id: int = 0
    """The lowest group id that was never granted."""
    finished: Iterable[int] = ()
    """Ids below `next_group_id` of groups that are accepted or ended."""


class AcceptedGroups(Protocol):
    """The scheduler's view of the groups that are accepted and not yet trained on."""

    num_trimmed_tokens: int
    """Number of tokens that the buffer has masked because of their age."""

    admission_staleness: int
    """Bound on staleness for new leases, in steps; at most the bound on groups to train on."""

    def __len__(self) -> int:
        """Return the number of groups that wait to be trained on."""

    def num_unspent(self, *, step: int) -> int:
        """Return how many accepted groups the first `step` steps have not used."""


class PromptPendingError(EchoError):
    """The prompt is still being made. When the prompt is ready, a round of grants starts."""


class Prompts(Protocol):
    """The prompts of a run, in the form of leases."""

    def lease(self, group_id: int, attempt: int) -> Lease:
        """Return the lease of an attempt at a group.

        A group id always has the same prompt.

        Raises:
            DataError: if there is no prompt for this group.
            PromptPendingError: if the prompt is still being made. Once a prompt was made, it is
                never pending again.
        """


def find_prompt_fault(prompts: Prompts, group_id: int) -> DataError | PromptPendingError | None:
    """Return the error that makes a group's prompt unavailable, or None.

    The prompt of an open group may be missing, for example after a restart.
    """
    try:
        prompts.lease(group_id, 0)
    except (DataError, PromptPendingError) as error:
        return error
    return None
