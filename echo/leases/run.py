"""Inputs of the scheduler of leases: settings, state of the run, prompts, accepted groups."""

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
    """The requirements on groups, and the bounds on their number."""

    max_staleness: int
    groups_per_step: int
    group_size: int
    max_completion_tokens: int
    """Most tokens that a rollout may have, masked ones included."""
    vocab_size: int
    heartbeat_s: float
    max_zero_signal_groups: int
    """Groups in a row from which nothing can be learned, after which the run ends."""
    prompts_are_free: bool = False
    """Whether rollouts may have other prompts than their leases, as those of agents do."""
    trims_stale: bool = False
    """Whether tokens beyond the bound are masked; if not, a group with such tokens is refused."""
    hedge_factor: float | None = None
    """How many times sooner a copy must be expected (`leases/grants/dispatch.py`); None copies for
    age alone."""
    is_eager: bool = False
    """Whether groups are granted as early as admission allows, in place of just in time."""
    exact_version: bool = False
    """Whether one version alone must have sampled each group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """Where a run stands when its learner starts."""

    leases: LeaseBook
    """Leases that workers hold, as far as is known after a restart."""
    lineages: tuple[Lineage, ...]
    """Histories so far, the present one last."""
    step: int = 0
    """Optimizer steps done."""
    next_group_id: int = 0
    """First id never granted."""
    finished: Iterable[int] = ()
    """Ids below `next_group_id` of groups that are accepted or ended."""


class AcceptedGroups(Protocol):
    """The groups that are accepted and not yet trained on, as the scheduler sees them."""

    num_trimmed_tokens: int
    """Tokens that the buffer masked because they had grown too old."""

    admission_staleness: int
    """Bound on staleness that new leases are granted for; at most the bound on trained groups."""

    def __len__(self) -> int:
        """Return how many groups wait to be trained."""

    def num_unspent(self, *, step: int) -> int:
        """Return how many accepted groups no finished step has used."""


class PromptPendingError(EchoError):
    """The prompt is still being made; its maker starts a round of grants once it is ready."""


class Prompts(Protocol):
    """The prompts of a run, as leases."""

    def lease(self, group_id: int, attempt: int) -> Lease:
        """Return the lease of a group; the same id always has the same prompt.

        Raises:
            DataError: if there is no prompt for this group.
            PromptPendingError: if the prompt is still being made. Once a prompt was made, it is
                never pending again.
        """


def find_prompt_fault(prompts: Prompts, group_id: int) -> DataError | PromptPendingError | None:
    """Return why the prompt of a group is not available, or None.

    A group that is open may lack its prompt, such as after a restart.
    """
    try:
        prompts.lease(group_id, 0)
    except (DataError, PromptPendingError) as error:
        return error
    return None
