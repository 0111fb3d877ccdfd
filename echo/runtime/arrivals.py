"""What becomes of a delivered group until it may be trained: judged, written, acknowledged.

A group from which the trainer would learn nothing is ended at once with its reason: it is
acknowledged, gives its admission back, and another is granted for it. All others are written to
the journal, and acknowledged and put into the buffer once they are on the disk.

Who delivers nothing that can be learned from while others do is set aside (`usefulness.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress

from echo.core.buffer import StalenessBuffer
from echo.core.rollout import Group
from echo.leases.dispatch import Usefulness
from echo.leases.scheduler import RecordEnd, StoreGroup
from echo.protocol.learner_session import LearnerSession
from echo.records.ledger import Ledger
from echo.runtime.late_rewards import LateRewards
from echo.runtime.progress import Progress
from echo.runtime.task_metrics import TaskMetrics
from echo.tasks.rewards import RewardError
from echo.wire.actions import Action, Note


class Arrivals:
    """The way of groups from the learner's session into its buffer."""

    def __init__(
        self,
        session: LearnerSession,
        *,
        ledger: Ledger,
        buffer: StalenessBuffer,
        progress: Progress,
        refusal: Callable[[Group], str | None],
        max_barren_groups: int,
        perform: Callable[[Iterable[Action]], None],
        sync: Callable[[], Awaitable[None]],
        clock: Callable[[], float],
    ) -> None:
        """Join the parts; `run` stores.

        Args:
            session: the learner's conversation.
            ledger: the journal, open.
            buffer: where groups wait to be trained.
            progress: running totals.
            refusal: why a group should not count towards a step, or None.
            max_barren_groups: see `is_barren`.
            perform: carries out what the session asks for.
            sync: forces the journal onto the disk, off the loop.
            clock: the loop's, seconds.
        """
        self._session = session
        self._ledger = ledger
        self._buffer = buffer
        self._progress = progress
        self._refusal = refusal
        self._max_barren_groups = max_barren_groups
        self._usefulness = Usefulness(
            max_barren_groups=max_barren_groups,
            groups_per_step=session.settings.leases.groups_per_step,
        )
        self._has_set_aside = False
        self._perform = perform
        self._sync = sync
        self._clock = clock
        self._unsynced: list[Group] = []
        self._store_wanted = asyncio.Event()
        self._has_news = asyncio.Event()
        self.is_open = True
        """Whether groups are taken in; one that comes later is never acknowledged."""
        self.late_rewards: LateRewards | None = None
        """Who scores the groups, where workers do not."""
        self._task_metrics = TaskMetrics()

    @property
    def is_barren(self) -> bool:
        """Whether nothing could be learned from any of the last `max_barren_groups` groups.

        Those of workers that are set aside do not count.
        """
        num_groups = self._progress.barren.num_groups - self._usefulness.num_discounted
        return num_groups >= self._max_barren_groups

    def take_in(self, action: StoreGroup) -> None:
        """Have a group scored if nobody has; then write it, or end it and grant another."""
        if self.late_rewards is None:
            self._take_in(action)
        else:
            self.late_rewards.score(action, then=self._take_in, on_fault=self._on_fault)

    def _take_in(self, action: StoreGroup) -> None:
        """Write a group that counts towards a step; end one that does not, and grant another."""
        if not self.is_open:
            return
        reason = self._refusal(action.group)
        if reason == "reward_too_large":
            self._end_unrewarded(action.group, reason)
            return
        if reason is not None:
            self._progress.left_out(action.group, reason, now=self._clock())
            self._judge(action.group.worker_id, is_useful=False)
            self._end(action.group, reason)
            return
        self._ledger.store(action.group, action.header, action.arrays)
        self._unsynced.append(action.group)
        self._store_wanted.set()

    def _end_unrewarded(self, group: Group, reason: str) -> None:
        """End a group whose rewards are no numbers to count with."""
        largest = max(group.rewards, key=abs)
        text = f"group {group.group_id} of {group.worker_id}: {reason}: {largest:g} is beyond "
        text += "task.max_reward"
        self._perform([Note("warning", text)])
        self._count_failed(group.worker_id, reason, text)
        self._end(group, reason)

    def _on_fault(self, group: Group, error: RewardError) -> None:
        if self.is_open:
            text = f"group {group.group_id}: {error.reason}: {error}"
            self._perform([Note("warning", text)])
            cause = f"group {group.group_id} on the learner: {error}\n{error.traceback}".strip()
            self._count_failed(group.worker_id, error.reason, cause)
            self._end(group, error.reason)

    def on_failed(self, action: RecordEnd) -> None:
        """Count a group that its worker could not finish."""
        cause = f"group {action.group_id} on {action.worker_id}: {action.cause}"
        self._count_failed(action.worker_id, action.reason, cause)
        self._tell_if_barren()

    def _count_failed(self, worker_id: str, reason: str, cause: str) -> None:
        """Count a group that could not be finished, for the run's end and against its worker."""
        self._progress.failed(reason, cause)
        self._judge(worker_id, is_useful=False)

    def _end(self, group: Group, reason: str) -> None:
        self._ledger.discarded(group.group_id, reason, step=self._session.step)
        self._session.counters.add(f"discarded/{reason}")
        self._perform(self._session.stored(group.group_id, now=self._clock()))
        self._tell_if_barren()

    def _tell_if_barren(self) -> None:
        if self.is_barren:
            self._has_news.set()

    def _judge(self, worker_id: str, *, is_useful: bool) -> None:
        """Count a group for or against its worker."""
        texts = self._usefulness.delivered(worker_id, is_useful=is_useful, now=self._clock())
        self._perform([Note("warning", text) for text in texts])
        self.review()

    def review(self) -> None:
        """Decide whose groups are wanted; call it now and then, since nobody is set aside for ever.

        Grants follow from what the caller does next.
        """
        if self._usefulness.is_calm and not self._has_set_aside:
            return
        members = self._session.roster.members("worker")
        can_sample = {
            member.node_id: member.worker.capacity > 0 and not member.worker.is_stuck
            for member in members
            if not member.is_standby
        }
        texts = self._usefulness.review(can_sample, now=self._clock())
        for member in members:
            member.worker.is_set_aside = self._usefulness.is_set_aside(member.node_id)
        self._has_set_aside = any(member.worker.is_set_aside for member in members)
        self._perform([Note("warning", text) for text in texts])

    async def run(self) -> None:
        """Force written groups onto the disk, many at once, then acknowledge them."""
        while self.is_open or self._unsynced:
            await self._store_wanted.wait()
            self._store_wanted.clear()
            groups, self._unsynced = self._unsynced, []
            if not groups:
                continue
            await self._sync()
            for group in groups:
                self._buffer.put(group)
                self._progress.accepted(group, now=self._clock())
                self._judge(group.worker_id, is_useful=True)
                self._perform(self._session.stored(group.group_id, now=self._clock()))
            self._has_news.set()

    def close(self) -> None:
        """Take nothing in any more; `run` ends once what was written is in the buffer."""
        self.is_open = False
        self._store_wanted.set()

    def wake(self) -> None:
        """End `wait`."""
        self._has_news.set()

    async def wait(self, *, until: float) -> None:
        """Wait until groups have come, or nothing can be learned, since the last call.

        Args:
            until: instant at which to look again even so.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await self._has_news.wait()
        self._has_news.clear()

    def metrics(self) -> dict[str, float]:
        """Return how the task's code did."""
        totals = {
            member.node_id: member.stats.refused
            for member in self._session.roster.members("worker")
        }
        if self.late_rewards is not None:
            totals["learner"] = self.late_rewards.counts()
        return self._task_metrics.row(totals)
