"""The open groups of a run are granted but have not ended. This module tracks them and ends them.

A group is open from its first grant until its result is stored or it ends with a reason. Group ids
are granted in order. So two values are enough: the first id that was never granted, and the lower
ids that have ended. The leases of open groups are in the book (`leases/book.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from echo.core.errors import DataError
from echo.core.monitoring.metrics import Counters
from echo.core.records import Cancelled, Discarded, Granted, Refused
from echo.leases.partials import ShippedPartials
from echo.leases.run import RunState
from echo.wire.actions import Action, Note


@dataclass(frozen=True, slots=True)
class AppendRecord(Action):
    """Action: append `record` to the ledger before the learner sends its next messages."""

    record: Granted | Cancelled | Refused | Discarded
    worker_id: str = ""
    """The worker at which the group failed; empty if the group did not fail at a worker."""
    cause: str = ""
    """The cause of the failure, as the worker reports it. If the task's code raised an error, the
    error's traceback follows."""


class FinishedGroups:
    """The ids of all groups that were accepted or have ended. They take little memory.

    Groups finish nearly in order. So the set keeps a number below which all ids are finished, and
    the finished ids above this number.
    """

    def __init__(self, group_ids: Iterable[int]) -> None:
        self._all_below = 0
        self._others: set[int] = set()
        for group_id in group_ids:
            self.add(group_id)

    def __contains__(self, group_id: int) -> bool:
        return 0 <= group_id < self._all_below or group_id in self._others

    def add(self, group_id: int) -> None:
        if group_id >= self._all_below:
            self._others.add(group_id)
        while self._all_below in self._others:
            self._others.remove(self._all_below)
            self._all_below += 1


class OpenGroups:
    """The groups that were granted and have not ended, with their leases and partial rollouts."""

    def __init__(self, run: RunState, counters: Counters) -> None:
        self.leases = run.leases
        self.lineages = run.lineages
        self.step = run.step
        self.next_group_id = run.next_group_id
        self.finished = FinishedGroups(run.finished)
        self.shipped = ShippedPartials(counters)
        self.released: dict[int, str] = {}
        """For the id of each group that its holder has given up, the worker for which the group is
        reserved."""
        self._counters = counters

    def is_open(self, group_id: int) -> bool:
        """Return whether a group was granted and has not ended."""
        return 0 <= group_id < self.next_group_id and group_id not in self.finished

    def reach(self, group_id: int) -> None:
        """Record that a group id is in use. New groups will get higher ids."""
        self.next_group_id = max(self.next_group_id, group_id + 1)

    def close(self, group_id: int) -> None:
        """End all leases of a group, because its result is stored or no longer wanted."""
        self.finished.add(group_id)
        self.leases.finish(group_id)
        self.shipped.discard(group_id)

    def end(
        self, group_id: int, reason: str, *, worker_id: str = "", cause: str = ""
    ) -> list[Action]:
        """End a group without a result. Return the action that records this.

        Args:
            group_id: the id of the group.
            reason: one word, for the record and a counter.
            worker_id: the worker that could not finish the group; "" if there is no such worker.
            cause: the cause that the worker reports, for messages to the operator.
        """
        self.close(group_id)
        self._counters.add(f"discarded/{reason}")
        record = Discarded(group=group_id, reason=reason, step=self.step)
        return [AppendRecord(record, worker_id, cause)]

    def leave_out(self, group_id: int, fault: DataError) -> list[Action]:
        """End a group whose prompt cannot be used.

        Return the action that records this, and a warning.
        """
        note = Note("warning", f"group {group_id} is left out: {fault}")
        return [note, *self.end(group_id, "prompt_error")]

    def validate(self) -> None:
        """For tests: check that the book and the ids agree.

        Raises:
            AssertionError: if the book and the ids disagree.
        """
        self.leases.validate()
        for group_id in self.leases.group_ids:
            assert self.is_open(group_id), f"group {group_id} is in the book and not open"
