"""Describes the nodes and versions to the operator, in the status and in log lines."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from echo.core.monitoring.status import LinkStatus, NodeStatus, VersionStatus
from echo.core.rollout import PolicyVersion
from echo.core.units import counted, listed
from echo.fleet.explain import ObservedFleet, ObservedNode
from echo.leases.scheduler import Scheduler
from echo.roles.members import Member, Roster
from echo.weights.broadcast import Broadcast

MAX_VERSIONS_LISTED = 8
"""Largest number of versions in a status. A fleet usually fetches one or two versions at a time."""
MIN_RUNNING_S = 5.0
"""A group must have run for this many seconds before its rate counts as the worker's speed.
Heartbeats are seconds apart, so earlier rates are inaccurate."""
LATE_GROUPS = 2.0
"""The rate of a group also counts once the group has run this many times its worker's usual time.

A slow worker may hand over each group before it has run MIN_RUNNING_S, and deliver none.
"""


class FleetView:
    """Describes the nodes and their leases without changing them."""

    def __init__(self, roster: Roster, scheduler: Scheduler, broadcast: Broadcast) -> None:
        self._roster, self._scheduler, self._broadcast = roster, scheduler, broadcast
        self._leases = scheduler.groups.leases

    def nodes(self, *, step: int, now: float) -> tuple[NodeStatus, ...]:
        """Return the status of each node. `step` is the learner's present step."""
        return tuple(
            member.view(step=step, num_leases=self._leases.num_leases(member.node_id), now=now)
            for member in self._roster.nodes.values()
        )

    def versions(self) -> tuple[VersionStatus, ...]:
        """Return the status of the newest version, and of other versions that nodes are fetching.

        At most MAX_VERSIONS_LISTED versions are included, newest first.
        """
        newest = self._broadcast.newest_complete
        members = self._roster.active()
        fetched: dict[PolicyVersion, list[Member]] = {} if newest is None else {newest: []}
        for member in members:
            if member.stats.fetching is not None:
                fetched.setdefault(member.stats.fetching, []).append(member)
        shown = sorted(fetched, reverse=True)[:MAX_VERSIONS_LISTED]
        return tuple(
            self._version(version, fetched[version], members if version == newest else ())
            for version in shown
        )

    def _version(
        self, version: PolicyVersion, fetching: Sequence[Member], everyone: Sequence[Member]
    ) -> VersionStatus:
        """Return the progress of a version's broadcast.

        Args:
            version: the version.
            fetching: the nodes that fetch it.
            everyone: all nodes that should get the version. If empty, only the nodes in `fetching`
                count.
        """
        num_complete = sum(m.installed is not None and m.installed >= version for m in everyone)
        shares = [held_share(member) for member in fetching if member.installed != version]
        num_nodes = len(everyone) or len(fetching)
        return VersionStatus(
            version=str(version),
            done=min(1.0, (num_complete + sum(shares)) / num_nodes) if num_nodes else 1.0,
            num_nodes=num_nodes,
            num_complete=num_complete,
            slowest=self._slowest_link(fetching),
        )

    def _slowest_link(self, fetching: Sequence[Member]) -> LinkStatus | None:
        """Return the link to the node that will finish last. Return None if no node is fetching."""
        payload = self._broadcast.payload
        num_bytes = 0 if payload is None else payload.num_bytes
        links = []
        for member in fetching:
            rate = member.stats.downlink_bytes_per_s
            remaining = None if not rate else (1 - held_share(member)) * num_bytes / rate
            links.append(LinkStatus(
                parent=member.stats.parent,
                child=member.node_id,
                bytes_per_s=rate,
                remaining_s=remaining,
            ))  # fmt: skip
        return max(links, key=_remaining_s, default=None)

    def observe(self) -> ObservedFleet:
        """Return what relays and active workers are doing now. Explanations of waits use it."""
        scheduler, settings = self._scheduler, self._scheduler.settings
        members = self._roster.active()
        workers = [member.worker for member in members if member.role == "worker"]
        resting = [m for m in self._roster.members("worker") if m.is_standby]
        newest = self._broadcast.newest_complete
        fresh, is_closed = scheduler.usable(workers, newest)
        return ObservedFleet(
            num_missing=settings.groups_per_step - len(scheduler.buffer),
            groups_per_step=settings.groups_per_step,
            group_size=settings.group_size,
            max_staleness=scheduler.quota.max_staleness,
            hedge_factor=settings.hedge_factor,
            is_closed=is_closed,
            newest="" if newest is None or is_closed else str(newest),
            wait_reason=scheduler.wait_reason(workers, newest),
            num_standby=sum(member.hold is None for member in resting),
            num_held=sum(member.hold is not None for member in resting),
            joining=tuple(self._roster.joining("worker")),
            nodes=tuple(
                self._observe_worker(member, is_fresh=member.installed in fresh)
                if member.role == "worker"
                else member.describe(0)
                for member in members
            ),
        )

    def _observe_worker(self, member: Member, *, is_fresh: bool) -> ObservedNode:
        records = self._leases.worker_leases(member.node_id)
        finish_times = self._scheduler.finish_times
        least_s = min(MIN_RUNNING_S, LATE_GROUPS * finish_times.group_s(member.node_id))
        running = [record.rate for record in records if record.running_s >= least_s]
        measured = finish_times.of(member.node_id).measured
        return replace(
            member.describe(len(records)),
            num_here=sum(record.is_delivered for record in records),
            is_fresh=is_fresh,
            speed=min(running, default=measured),
        )

    def describe_silent(self, silent: Sequence[Member], *, now: float) -> str:
        """Return a log line about the nodes that are dropped because they are silent."""
        names = listed(member.node_id for member in silent)
        silent_s = min(now - member.last_seen_at for member in silent)
        num_groups = sum(self._leases.num_leases(member.node_id) for member in silent)
        verb = "is" if len(silent) == 1 else "are"
        granted = f"{counted(num_groups, 'group')} {'is' if num_groups == 1 else 'are'} granted"
        return f"{names} {verb} silent for {silent_s:.0f} s; {granted} again"


def held_share(member: Member) -> float:
    """Return which share of the fetched version's chunks a node has, 0..1."""
    stats = member.stats
    return min(1.0, stats.num_chunks_held / stats.num_chunks) if stats.num_chunks else 0.0


def _remaining_s(link: LinkStatus) -> float:
    return math.inf if link.remaining_s is None else link.remaining_s
