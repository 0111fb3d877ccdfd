"""Defines the inputs of the lease scheduler: settings, run state, prompts, accepted groups."""

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
    """The settings of the scheduler: what groups must satisfy, and how many there may be."""

    max_staleness: int
    groups_per_step: int
    group_size: int
    max_completion_tokens: int
    """Largest number of completion tokens in a chain of a rollout. Masked tokens count, too."""
    vocab_size: int
    heartbeat_s: float
    max_zero_signal_groups: int
    """If the learner can learn nothing from this many groups in a row, the run ends."""
    prompts_are_free: bool = False
    """Whether a rollout's prompt may differ from the prompt in its lease, as with agents."""
    max_tree_tokens: int | None = None
    """Largest number of completion tokens that all chains of a rollout have together; None if
    rollouts have one chain."""
    trims_stale: bool = False
    """Whether tokens beyond the staleness bound are masked. If not, groups with such tokens are
    refused."""
    hedge_factor: float | None = None
    """A group is copied if its lease is expected to need at least this many times as long as the
    copy (`leases/grants/dispatch.py`). If None, groups are copied only because their leases are
    old."""
    is_eager: bool = False
    """Whether groups are granted as early as admission allows. Otherwise they are granted just in
    time."""
    exact_version: bool = False
    """Whether each group must have been sampled by a single version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The state that a run has when its learner starts."""

    leases: LeaseBook
    """After a restart, the leases that workers hold according to the ledger."""
    lineages: tuple[Lineage, ...]
    """The run's lineages so far. The last is the present lineage. Each resume begins a lineage."""
    step: int = 0
    """Number of optimizer steps that the run has made."""
    next_group_id: int = 0
    """The lowest group id that was never granted."""
    finished: Iterable[int] = ()
    """Ids of groups that were accepted or have ended. All are below `next_group_id`."""


class AcceptedGroups(Protocol):
    """The groups that are accepted but not yet trained on, as the scheduler sees them."""

    num_trimmed_tokens: int
    """Number of tokens that the buffer has masked because they were too old."""

    admission_staleness: int
    """The staleness bound for new leases, in steps. It is at most the bound for groups to train
    on."""

    def __len__(self) -> int:
        """Return the number of groups that wait to be trained on."""

    def num_unspent(self, *, step: int) -> int:
        """Return how many accepted groups were not used by the first `step` steps."""


class PromptPendingError(EchoError):
    """The prompt is still being made. Once it is ready, a round of grants starts."""


class Prompts(Protocol):
    """Returns the prompts of a run in the form of leases."""

    def lease(self, group_id: int, attempt: int) -> Lease:
        """Return the lease for an attempt at a group.

        A group id always has the same prompt.

        Raises:
            DataError: if there is no prompt for this group.
            PromptPendingError: if the prompt is still being made. Once a prompt was made, it is
                never pending again.
        """


def find_prompt_fault(prompts: Prompts, group_id: int) -> DataError | PromptPendingError | None:
    """Return the error because of which a group's prompt is unavailable.

    Return None if the prompt is available. The prompt of an open group may be missing, for example
    after a restart.
    """
    try:
        prompts.lease(group_id, 0)
    except (DataError, PromptPendingError) as error:
        return error
    return None
