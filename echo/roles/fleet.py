"""The fleet for its operator: the nodes and versions of a status, and one-line descriptions."""

from __future__ import annotations

import math
from collections.abc import Sequence

from echo.core.rollout import PolicyVersion
from echo.core.status import LinkStatus, NodeStatus, VersionStatus
from echo.leases.book import LeaseBook
from echo.roles.members import Member, Roster
from echo.weights.broadcast import Broadcast

MAX_NAMES_LISTED = 3
"""Most silent nodes that a line names; the line gives only the number of further ones."""
MAX_VERSIONS_LISTED = 8
MAX_WORKERS_LISTED = 8
"""Most workers whose state is in the line that describes a wait of the learner."""


class FleetView:
    """Describes the nodes and their leases, and changes nothing."""

    def __init__(self, roster: Roster, leases: LeaseBook, broadcast: Broadcast) -> None:
        """Describe the state of these nodes, leases and broadcast."""
        self._roster, self._leases, self._broadcast = roster, leases, broadcast

    def nodes(self, *, step: int, now: float) -> tuple[NodeStatus, ...]:
        """Return the status of each node; `step` is the learner's step."""
        return tuple(
            member.view(step=step, num_leases=self._leases.num_leases(member.node_id), now=now)
            for member in self._roster.nodes.values()
        )

    def versions(self) -> tuple[VersionStatus, ...]:
        """Return the status of the newest version, and of other versions that nodes fetch.

        All active nodes are to have the newest version. At most MAX_VERSIONS_LISTED versions are
        included, the newest first.
        """
        newest = self._broadcast.newest_complete
        members = self._roster.active()
        fetched: dict[PolicyVersion, list[Member]] = {} if newest is None else {newest: []}
        for member in members:
            if member.stats.fetching is not None:
                fetched.setdefault(member.stats.fetching, []).append(member)
        listed = sorted(fetched, reverse=True)[:MAX_VERSIONS_LISTED]
        return tuple(
            self._version(version, fetched[version], members if version == newest else ())
            for version in listed
        )

    def _version(
        self, version: PolicyVersion, fetching: Sequence[Member], everyone: Sequence[Member]
    ) -> VersionStatus:
        """Return how far a version has travelled.

        Args:
            version: the version.
            fetching: the nodes that fetch it.
            everyone: all nodes that are to have it; empty if these are only the nodes of
                `fetching`.
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
        """Return the link of the node that receives its version last; None if no node fetches."""
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

    def describe_wait(self, *, num_buffered: int, num_groups: int) -> str:
        """Return a text on the groups missing for a step and the workers that have leases.

        The text is empty if no group is missing.

        Args:
            num_buffered: number of accepted groups in the buffer.
            num_groups: number of groups in a step.
        """
        missing = num_groups - num_buffered
        workers = self._roster.active("worker")
        if missing <= 0:
            return ""
        if not workers:
            has_standby = bool(self._roster.members("worker"))
            why = "every worker is on standby" if has_standby else "no worker is connected"
            return f"{missing} groups; {why}"
        held = [(self._leases.num_leases(member.node_id), member) for member in workers]
        held.sort(key=lambda each: -each[0])
        fleet = [member.describe(number) for number, member in held[:MAX_WORKERS_LISTED]]
        if others := held[MAX_WORKERS_LISTED:]:
            fleet.append(f"{len(others)} others have {sum(number for number, _ in others)}")
        return f"{missing} of {num_groups} groups; {'; '.join(fleet)}"

    def describe_silent(self, silent: Sequence[Member], *, now: float) -> str:
        """Return one line about nodes, at least one, that are dropped because they are silent."""
        names = [member.node_id for member in silent]
        if len(names) > MAX_NAMES_LISTED:
            names[MAX_NAMES_LISTED:] = [f"{len(names) - MAX_NAMES_LISTED} others"]
        silent_s = min(now - member.last_seen_at for member in silent)
        num_groups = sum(self._leases.num_leases(member.node_id) for member in silent)
        verb = "is" if len(silent) == 1 else "are"
        return (
            f"{', '.join(names)} {verb} silent for {silent_s:.0f} s; {num_groups} groups are "
            "granted again"
        )


def held_share(member: Member) -> float:
    """Return the share of chunks, 0..1, that a node has of the version that it fetches."""
    stats = member.stats
    return min(1.0, stats.num_chunks_held / stats.num_chunks) if stats.num_chunks else 0.0


def _remaining_s(link: LinkStatus) -> float:
    return math.inf if link.remaining_s is None else link.remaining_s
