"""Who is given which group next, and which groups have come to their end.

Every grant is journalled before it is sent (`RecordGrant`), so that after a crash no honest result
is unknown. Workers list their leases in each heartbeat; `reconcile` compares that list with the
book: what the worker lacks is sent again, what the book lacks is entered, what is settled is told.

How many groups may be granted is admission's business (`leases.py`), who gets them that of
`dispatch.py`, and whether a slow worker's group is given to another as well that of `hedging.py`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from echo.core.metrics import Counters
from echo.core.rollout import Group, Lineage, PolicyVersion, is_surviving
from echo.core.timers import RecentMap
from echo.protocol.accepted import AcceptedGroups
from echo.protocol.dispatch import Load, by_finish, slowdown
from echo.protocol.forecast import MAX_WORKERS, Forecast, Speed
from echo.protocol.handover import Handover
from echo.protocol.hedging import Helper, Running, copies
from echo.protocol.leases import LeaseBook, LeaseRecord, most_promised, oldest_version
from echo.protocol.membership import Member
from echo.protocol.prompting import first_usable
from echo.protocol.reception import LearnerSettings
from echo.protocol.settled import SettledGroups
from echo.wire.actions import Action, Note
from echo.wire.codec import Frame
from echo.wire.messages import Heartbeat, Lease, LeaseState

MAX_ATTEMPTS = 20
"""Grants of one group after which it is given up: something about it kills workers."""

Obstacle = Literal["", "outdated", "no_worker", "no_weights", "busy"]
"""Why nobody can be given a group for the next batch; "" if somebody can, or the batch is out."""

Bounds = Mapping[PolicyVersion | None, int]
"""Installed version -> how many groups may be promised before it is good for no more."""


@dataclass(frozen=True, slots=True)
class RecordGrant(Action):
    """Journal that a lease was granted, before the Grant that follows is sent."""

    lease: Lease
    worker_id: str
    installed: PolicyVersion | None
    copy_of: int | None = None
    """The attempt that it repeats on a faster worker."""


@dataclass(frozen=True, slots=True)
class RecordCancel(Action):
    """Journal that a lease was ended because another worker was first with its group."""

    group_id: int
    attempt: int
    worker_id: str
    num_tokens: int
    """What it had sampled, as far as was known."""


@dataclass(frozen=True, slots=True)
class RecordRefusal(Action):
    """Journal that the result of a lease was refused; its group is granted again."""

    group_id: int
    attempt: int
    worker_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class StoreGroup(Action):
    """Put this group on the disk, then call the session's `stored`."""

    group: Group
    header: Frame
    arrays: Frame


@dataclass(frozen=True, slots=True)
class RecordEnd(Action):
    """Journal that a group that was never accepted has come to an end, with its reason."""

    group_id: int
    reason: str
    worker_id: str = ""
    """The worker that could not finish it; empty where none was asked to."""
    cause: str = ""
    """What that worker says of it, with the traceback of the task's code in further lines."""


@dataclass(frozen=True, slots=True)
class _Outlook:
    """When a worker will be done with what it has."""

    key: tuple[int, int, int]
    made_at: float
    free_at: list[float]
    running: list[Running]


class Granting:
    """Leases for workers, as far as admission and their capacities allow."""

    def __init__(
        self,
        settings: LearnerSettings,
        *,
        leases: LeaseBook,
        buffer: AcceptedGroups,
        make_lease: Callable[[int, int], Lease],
        lineages: Sequence[Lineage],
        step: int,
        next_group_id: int,
        settled: Iterable[int],
        counters: Counters,
    ) -> None:
        """Start; for the arguments see `LearnerSession`."""
        self.settings = settings
        self.leases = leases
        self.buffer = buffer
        self.make_lease = make_lease
        self.lineages = lineages
        self.step = step
        self.next_group_id = next_group_id
        self.settled = SettledGroups(settled)
        self.counters = counters
        self.handover = Handover(counters)
        self.forecast = Forecast(
            max_tokens=settings.max_completion_tokens,
            group_size=settings.group_size,
            heartbeat_s=settings.heartbeat_s,
        )
        self._outlooks: RecentMap[str, _Outlook] = RecentMap(max_entries=MAX_WORKERS)
        self._unreturned: list[Action] = []
        """Ends of groups that were decided by a `grant` that failed."""

    def is_open(self, group_id: int) -> bool:
        """Return whether a group has been granted and its result is still wanted."""
        return 0 <= group_id < self.next_group_id and group_id not in self.settled

    def settle(self, group_id: int) -> None:
        """End all leases of a group: its result is here, or is not wanted any more."""
        self.settled.add(group_id)
        self.leases.finish(group_id)
        self.handover.discard(group_id)

    def end(
        self, group_id: int, reason: str, *, worker_id: str = "", cause: str = ""
    ) -> list[Action]:
        """End a group that was never accepted; who could not finish it, and why, if anybody."""
        self.settle(group_id)
        self.counters.add(f"discarded/{reason}")
        return [RecordEnd(group_id, reason, worker_id, cause)]

    # --- who gets what ---------------------------------------------------------------------------

    def is_closed(self, newest: PolicyVersion | None) -> bool:
        """Return whether nobody can be given a group, without looking at anybody.

        So it is most of the time in a fleet that is fast enough: all that admission allows to a
        worker with the newest version is promised.

        Args:
            newest: the newest version that was published; None if that is not known.
        """
        step = self.step if newest is None else newest.step
        return self._num_promised >= self._limit(step) and not self._is_hedging

    def obstacle(self, workers: Sequence[Member], newest: PolicyVersion | None) -> Obstacle:
        """Return what keeps the groups of the next batch from being granted.

        Args:
            workers: who takes part.
            newest: the newest version that was published; None if that is not known.
        """
        num_unspent = self.buffer.num_unspent(step=self.step)
        if self.leases.num_running or num_unspent >= self.settings.groups_per_step:
            return ""
        if newest is not None and self.is_closed(newest):
            return "outdated"
        if not workers:
            return "no_worker"
        bounds, num_promised = self._bounds(workers), self._num_promised
        fresh = [w for w in workers if bounds.get(w.installed, 0) > num_promised]
        if not fresh:
            return "no_weights"
        has_room = any(w.is_able(bounds) and self._num_held(w) < w.capacity for w in fresh)
        return "" if has_room else "busy"

    def grant(
        self, workers: Sequence[Member], *, now: float
    ) -> tuple[list[Action], dict[str, list[Lease]]]:
        """Hand out groups; return the records to journal, and the new leases of each worker."""
        records, self._unreturned = self._unreturned, []
        granted: dict[str, list[Lease]] = {}
        made: list[LeaseRecord] = []
        try:
            self._grant(workers, records, granted, made, now)
        except Exception:
            # None of them will be journalled, and so none may be out.
            for record in made:
                self.leases.revoke(record)
            # Those that have ended are settled, and will be journalled.
            self._unreturned = [each for each in records if not isinstance(each, RecordGrant)]
            raise
        return records, granted

    def _grant(
        self,
        workers: Sequence[Member],
        records: list[Action],
        granted: dict[str, list[Lease]],
        made: list[LeaseRecord],
        now: float,
    ) -> None:
        bounds = self._bounds(workers)
        able = {member.node_id: member for member in workers if member.is_able(bounds)}
        is_hedging = self._is_hedging
        if not is_hedging and not self._has_use(able.values(), bounds):
            return
        self.forecast.refresh(list(able))
        loads = self._loads(able.values(), bounds, now)
        foreseen = [self._outlook_of(member, now) for member in workers] if is_hedging else []
        num_promised = self._num_promised
        for node_id in by_finish(loads, num_promised=num_promised):
            record = self.leases.grant(self._next_group(records), node_id, now=now)
            made.append(record)
            record.min_version = self._oldest_version(num_promised)
            num_promised += 1
            self._enter(record, able[node_id], records, granted)
        for node_id in granted:
            self.leases.note_load(node_id, now=now)
        if is_hedging:
            running = [each for outlook in foreseen for each in outlook.running]
            for original, node_id in self._copies(able, bounds, running, now):
                record = self.leases.grant(original.group_id, node_id, now=now)
                made.append(record)
                record.copy_of, record.min_version = original.attempt, original.min_version
                self.counters.add("hedges/issued")
                self._enter(record, able[node_id], records, granted)

    def _enter(
        self,
        record: LeaseRecord,
        member: Member,
        records: list[Action],
        granted: dict[str, list[Lease]],
    ) -> None:
        lease = self._lease_of(record, member)
        records.append(RecordGrant(lease, member.node_id, member.installed, record.copy_of))
        granted.setdefault(member.node_id, []).append(lease)

    def _lease_of(self, record: LeaseRecord, member: Member) -> Lease:
        """Return what the worker is sent; a copy has the seed of its original."""
        lease = self.make_lease(record.group_id, record.attempt)
        origin = record.attempt if record.copy_of is None else record.copy_of
        seed = self.make_lease(record.group_id, origin).seed
        if self.settings.exact_version and record.exact_version is None:
            record.exact_version = member.installed
        versions = {"min_version": record.min_version, "exact_version": record.exact_version}
        return msgspec.structs.replace(lease, seed=seed, **versions)

    def _oldest_version(self, num_promised: int) -> PolicyVersion | None:
        """Return the oldest version that may sample the next group; any of its step will do."""
        return oldest_version(
            self.lineages,
            max_staleness=min(self.settings.max_staleness, self.buffer.admission_staleness),
            groups_per_step=self.settings.groups_per_step,
            num_promised=num_promised,
        )

    @property
    def _num_promised(self) -> int:
        """Groups consumed, accepted or running; one that two workers run counts once."""
        consumed = self.step * self.settings.groups_per_step
        return consumed + self.buffer.num_unspent(step=self.step) + self.leases.num_running

    @property
    def _is_hedging(self) -> bool:
        """Whether the next batch waits for groups that run."""
        return (
            self.settings.hedge_factor is not None
            and self.leases.num_running > 0
            and self.buffer.num_unspent(step=self.step) < self.settings.groups_per_step
        )

    def _num_held(self, member: Member) -> int:
        return self.leases.num_leases(member.node_id) + member.num_strays

    def _bounds(self, workers: Iterable[Member]) -> Bounds:
        """Return the versions in use from which may still be sampled, and what each is good for."""
        versions = {member.installed for member in workers if member.installed is not None}
        return {v: self._limit(v.step) for v in versions if is_surviving(v, self.lineages)}

    def _limit(self, installed_step: int) -> int:
        return most_promised(
            max_staleness=min(self.settings.max_staleness, self.buffer.admission_staleness),
            installed_step=installed_step,
            groups_per_step=self.settings.groups_per_step,
        )

    def _has_use(self, able: Iterable[Member], bounds: Bounds) -> bool:
        """Return whether any of these has room for a group and admission has one for it."""
        num_promised = self._num_promised
        return any(
            bounds[member.installed] > num_promised and self._num_held(member) < member.capacity
            for member in able
        )

    def _loads(self, able: Collection[Member], bounds: Bounds, now: float) -> list[Load]:
        """Return what each able worker has to do."""
        versions = {member.installed for member in able if member.installed is not None}
        newest = max(versions, default=None)
        loads: list[Load] = []
        for member in able:
            name, installed, capacity = member.node_id, member.installed, member.capacity
            free_at = self._outlook_of(member, now).free_at
            speed = self.forecast.of(name)
            if speed.measured is None:
                capacity = min(capacity, len(free_at))  # no queue before it shows its speed
            own = bounds[installed]
            soon, soon_at = own, now
            alone_s = self._alone_s(speed, len(free_at))
            if newest is not None and installed is not None and installed < newest:
                soon, soon_at = self._soon(member, installed, newest, own, now)
            loads.append(
                Load(
                    name,
                    capacity,
                    self._num_held(member),
                    own,
                    soon,
                    alone_s,
                    alone_s / self.forecast.hope(speed, now=now),
                    [at if at > soon_at else soon_at for at in free_at],
                )
            )
        return loads

    def _soon(
        self, member: Member, installed: PolicyVersion, newest: PolicyVersion, own: int, now: float
    ) -> tuple[int, float]:
        """Return how many groups may be promised with the version it has soon, and from when on."""
        at = self.forecast.installs_at(member.node_id, newest, now=now)
        if at is None:
            return own, now
        return own + (newest.step - installed.step) * self.settings.groups_per_step, at

    def _alone_s(self, speed: Speed, num_places: int) -> float:
        """Return how long a group would take in the empty engine, from what the load has cost."""
        load = slowdown(speed.load, num_places)
        return self.forecast.lengths.mean / self.forecast.known_speed(speed) / load

    def _outlook_of(self, member: Member, now: float) -> _Outlook:
        """Return when a worker will be done with what it has; a little old, if nothing changed."""
        key = (
            self.leases.num_changes(member.node_id),
            member.num_strays,
            member.stats.num_places or max(1, member.capacity),
        )
        known = self._outlooks.get(member.node_id)
        if known is None or known.key != key or now > known.made_at + self.settings.heartbeat_s:
            known = self._outlooks[member.node_id] = self._foresee(member, key, now)
        return known

    def _foresee(self, member: Member, key: tuple[int, int, int], now: float) -> _Outlook:
        _, num_strays, num_places = key
        outlook = _Outlook(key, now, [now] * num_places, [])
        records = self.leases.worker_leases(member.node_id)
        records.sort(key=lambda record: (not record.running_s, record.group_id))
        for index, record in enumerate(records):
            num_tokens, rest_s = self.forecast.outlook(
                record, is_running=index < num_places, now=now
            )
            done_at = outlook.free_at[0] + rest_s
            heapq.heapreplace(outlook.free_at, done_at)
            outlook.running.append(Running(record, done_at, num_tokens))
        for _ in range(num_strays):
            speed = self.forecast.speed(member.node_id, now=now)
            done_at = outlook.free_at[0] + self.forecast.lengths.mean / speed
            heapq.heapreplace(outlook.free_at, done_at)
        return outlook

    def _copies(
        self, able: dict[str, Member], bounds: Bounds, running: list[Running], now: float
    ) -> list[tuple[LeaseRecord, str]]:
        """Return which leases to copy to workers that have nothing else to do."""
        assert self.settings.hedge_factor is not None
        helpers = [
            Helper(node_id, self.forecast.speed(node_id, now=now), num_free)
            for node_id, member in able.items()
            if (num_free := (member.stats.num_places or member.capacity) - self._num_held(member))
            > 0
            and self.forecast.has_made_a_group(node_id)
            # What it makes must be as fresh as what was promised.
            and bounds[member.installed] >= self._num_promised
        ]
        if not helpers:
            return []
        alone = {id(record) for record in self.leases.running_alone()}
        groups = [group for group in running if id(group.record) in alone]
        return copies(groups, helpers, factor=self.settings.hedge_factor, now=now)

    def _next_group(self, records: list[Action]) -> int:
        """Return the group to grant next, passing over those whose prompt cannot be had."""

        def leave_out(group_id: int, why: str) -> None:
            records.append(Note("warning", f"group {group_id} is left out: {why}"))
            records.extend(self.end(group_id, "prompt_error"))

        return first_usable(
            lambda: self._candidate(records), lambda group: self.make_lease(group, 0), leave_out
        )

    def _candidate(self, records: list[Action]) -> int:
        """Return one that came back, otherwise a new one."""
        while (group_id := self.leases.next_returned()) is not None:
            if group_id in self.settled:
                continue
            if self.leases.num_attempts(group_id) < MAX_ATTEMPTS:
                return group_id
            records += self.end(group_id, "attempts_exhausted")
        self.next_group_id += 1
        return self.next_group_id - 1

    def reconcile(
        self,
        member: Member,
        message: Heartbeat,
        *,
        has_progress: bool,
        resend_after_s: float,
        now: float,
    ) -> tuple[list[Lease], list[tuple[int, int]]]:
        """Bring the book and the worker's own list together.

        Args:
            member: the worker.
            message: its heartbeat.
            has_progress: whether it has sampled anything since the last one.
            resend_after_s: how long a lease may be missing from its list before it is sent again.
            now: the present instant.

        Returns:
            The leases to send again, and (group, attempt) of those that are not wanted any more.
        """
        self.handover.count(member, message)
        listed = {(state.group_id, state.attempt): state for state in message.leases}
        records = self.leases.worker_leases(member.node_id)
        # What waits behind a running group shares its progress.
        has_progress |= any(
            (record.group_id, record.attempt) in listed
            and listed[record.group_id, record.attempt].num_tokens > record.num_tokens
            for record in records
        )
        lost: list[Lease] = []
        for record in records:
            state = listed.pop((record.group_id, record.attempt), None)
            if state is not None:
                record.is_confirmed = True
                self.forecast.heard(record, state, now=now)
                is_idle = state.num_tokens <= 0 or state.is_waiting
                if state.num_tokens > record.num_tokens or (has_progress and is_idle):
                    num_tokens = max(state.num_tokens, record.num_tokens)
                    self.leases.renew(record, num_tokens=num_tokens, now=now)
            elif record.is_confirmed or now - record.sent_at > resend_after_s:
                # The Grant was lost, or the worker was restarted under the same incarnation.
                record.sent_at, record.is_confirmed = now, False
                lost.append(self._lease_of(record, member))
        self.forecast.seen(member.node_id, records, now=now)
        if member.installed is not None:
            self.forecast.installed(member.node_id, member.installed, now=now)
        self._outlooks.discard(member.node_id)
        unwanted = self._take_in(member, listed, now=now)
        member.is_stuck = member.num_strays > 0 and not has_progress
        return lost, unwanted

    def _take_in(
        self, member: Member, listed: dict[tuple[int, int], LeaseState], *, now: float
    ) -> list[tuple[int, int]]:
        """Enter what a worker lists and the book lacks; return what is not wanted any more."""
        unwanted: list[tuple[int, int]] = []
        member.num_strays = 0
        for (group_id, attempt), state in listed.items():
            is_given_up = state.is_waiting and self.leases.newest_attempt(group_id) > attempt
            if not self.is_open(group_id) or is_given_up:
                unwanted.append((group_id, attempt))
            elif not self.leases.has_expired(group_id, attempt, member.node_id):
                record = self.leases.adopt(group_id, attempt, member.node_id, now=now)
                record.is_confirmed = True
                continue
            # An expired lease's result is welcome, but it does not bind the group any more.
            member.num_strays += state.num_tokens >= 0
        return unwanted
