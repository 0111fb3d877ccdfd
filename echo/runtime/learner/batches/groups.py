"""Score, write and acknowledge the groups that workers deliver.

A group without a training signal is ended at once with a reason and acknowledged, and another group
is granted in its place. All other groups are written to the ledger. Once they are on the disk, they
are acknowledged and put into the buffer.

If a worker delivers no useful groups while other workers do, the role sets this worker aside.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from echo.core.buffer import StalenessBuffer
from echo.core.records import Discarded, Refused
from echo.core.rollout import Group, scored_part
from echo.leases.open_groups import AppendRecord
from echo.leases.results import NO_FAULT, GroupDiscarded, GroupStored, StoreGroup
from echo.records.ledger import LedgerQueue
from echo.roles.learner import Learner
from echo.runtime.learner.batches.rewards import LearnerRewards
from echo.runtime.learner.report import Progress
from echo.runtime.threads import Pool
from echo.tasks.rewards import RewardError
from echo.wire.actions import Action, Note
from echo.wire.codec import encode_group


class DeliveredGroups:
    """Stores delivered groups and acknowledges them. Ends groups that cannot be trained on."""

    def __init__(
        self,
        role: Learner,
        ledger: LedgerQueue,
        buffer: StalenessBuffer,
        progress: Progress,
        *,
        refusal: Callable[[Group], str | None],
        rewards: LearnerRewards | None,
        disk: Pool,
        scoring: Pool,
        perform: Callable[[Iterable[Action]], None],
        report: Callable[[Any], None],
        spawn: Callable[..., asyncio.Task[None]],
        wake: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        """Start without groups, and accept delivered groups until `close`.

        Args:
            role: receives the events about the groups.
            ledger: stores the accepted groups until they are trained on.
            buffer: gets each group once it is on the disk.
            progress: counts the groups by their outcomes.
            refusal: returns the reason why a group cannot be trained on, or None.
            rewards: scores groups if reward.where is "learner"; None if workers score them.
            disk: the thread that writes the ledger.
            scoring: the threads that run `rewards`.
            perform: carries out actions of the node.
            report: passes an event to the role, and carries out the actions that the role returns.
            spawn: starts a coroutine as a task of the node.
            wake: makes the training loop check again whether a batch is full.
            clock: returns the loop's time, seconds.
        """
        self.is_open = True
        """Whether delivered groups are still accepted. A group that arrives after `close` is never
        acknowledged, so its worker delivers it again to the learner that resumes the run.
        """
        self._role, self._ledger, self._buffer = role, ledger, buffer
        self._progress = progress
        self._refusal, self._rewards = refusal, rewards
        self._disk, self._scoring = disk, scoring
        self._perform, self._report = perform, report
        self._spawn, self._wake, self._clock = spawn, wake, clock
        self._unsynced: list[Group] = []
        self.num_scoring = self.num_storing = 0
        """Number of groups that the learner is scoring, and number of groups that are being written
        to the disk.
        """
        self._store_wanted, self._has_stored_all = asyncio.Event(), asyncio.Event()

    @property
    def is_zero_signal(self) -> bool:
        """Whether the last `max_zero_signal_groups` groups all had no training signal.

        Groups of workers that were set aside are not counted.
        """
        num_groups = self._progress.zero_signal.num_groups - self._role.review.num_discounted
        return num_groups >= self._role.settings.leases.max_zero_signal_groups

    # --- a delivered group -----------------------------------------------------------------------

    def accept(self, action: StoreGroup) -> None:
        """Score a delivered group if its worker did not score it.

        Then write the group, or end it.
        """
        if self._rewards is None:
            self._store(action)
        else:
            self._spawn(self._score(self._rewards, action.group), name="reward")

    async def _score(self, rewards: LearnerRewards, group: Group) -> None:
        self.num_scoring += 1
        try:
            scores = await self._scoring.run(rewards.score, group)
        except RewardError as error:
            if self.is_open:
                text = f"group {group.group_id} on the learner: {error.reason}: {error}"
                self._end_failed(group, error.reason, text, error.traceback)
            return
        finally:
            self.num_scoring -= 1
        rollouts = tuple(
            replace(rollout, reward=reward)
            for rollout, reward in zip(group.rollouts, scores, strict=True)
        )
        group = replace(group, rollouts=rollouts)
        self._store(StoreGroup(group, *encode_group(group)))

    def _store(self, action: StoreGroup) -> None:
        """Write a group, or end it if it cannot be trained on."""
        if not self.is_open:
            return
        group = scored_part(action.group)
        if group is None:
            self._progress.unscored(action.group)
            self._end(action.group, "no_opinion")
            return
        if group is not action.group:
            action = StoreGroup(group, *encode_group(group))
        reason = self._refusal(group)
        if reason is None:
            self._ledger.store(group, action.header, action.arrays)
            self._unsynced.append(group)
            self.num_storing += 1
            self._store_wanted.set()
        elif reason == "reward_too_large":
            largest = max(group.rewards, key=abs)
            text = f"group {group.group_id} of {group.worker_id}: {reason}: {largest:g} is beyond "
            self._end_failed(group, reason, f"{text}task.max_reward")
        else:
            self._progress.left_out(group, reason, now=self._clock())
            self._end(group, reason)

    async def run(self) -> None:
        """Sync written groups to the disk in batches and acknowledge them, until `close`."""
        try:
            while self.is_open or self._unsynced:
                await self._store_wanted.wait()
                self._store_wanted.clear()
                groups, self._unsynced = self._unsynced, []
                if groups:
                    await self._disk.run(self._ledger.sync)
                    self._acknowledge(groups)
        finally:
            self._has_stored_all.set()

    def _acknowledge(self, groups: list[Group]) -> None:
        self.num_storing -= len(groups)
        for group in groups:
            self._buffer.put(group)
            self._progress.accepted(group, now=self._clock())
            self._report(GroupStored(group.group_id))
        self._wake()

    async def close(self) -> None:
        """Stop accepting groups. Return when all written groups are in the buffer."""
        self.is_open = False
        self._store_wanted.set()
        await self._has_stored_all.wait()

    # --- groups that end without training --------------------------------------------------------

    def note(self, action: AppendRecord) -> None:
        """Count a group as failed if its record reports a failed worker or a wrong result."""
        record = action.record
        if isinstance(record, Discarded) and action.worker_id:
            cause = f"group {record.group} on {action.worker_id}: {action.cause}"
            self._count_failed(record.reason, cause)
        elif isinstance(record, Refused) and record.reason not in NO_FAULT:
            cause = f"group {record.group} on {record.worker}: its result was refused"
            self._count_failed(record.reason, cause)

    def evict(self) -> bool:
        """End buffered groups that are too old. Return whether a group was ended."""
        step, num_before = self._role.step, self._buffer.num_too_old_tokens
        evicted = self._buffer.evict(step=step)
        num_too_old = self._buffer.num_too_old_tokens - num_before
        self._role.counters.add("tokens/too_old", num_too_old)
        for each in evicted:
            group_id = each.group.group_id
            self._ledger.append(Discarded(group=group_id, reason=each.reason, step=step))
            self._role.counters.add(f"discarded/{each.reason}")
        return bool(evicted)

    def end_buffered(self, reason: str) -> None:
        """End all buffered groups. Write `reason` into the ledger for each group."""
        for group in self._buffer.clear():
            end = Discarded(group=group.group_id, reason=reason, step=self._role.step)
            self._ledger.append(end)

    def _end_failed(self, group: Group, reason: str, text: str, traceback: str = "") -> None:
        self._perform([Note("warning", text)])
        self._count_failed(reason, f"{text}\n{traceback}".strip())
        self._end(group, reason)

    def _count_failed(self, reason: str, cause: str) -> None:
        self._progress.failed(reason, cause)
        self._wake_if_zero_signal()

    def _end(self, group: Group, reason: str) -> None:
        self._report(GroupDiscarded(group.group_id, reason))
        self._wake_if_zero_signal()

    def _wake_if_zero_signal(self) -> None:
        if self.is_zero_signal:
            self._wake()
