"""The fleet for its operator: rows of the live view, and one-line descriptions."""

from __future__ import annotations

from collections.abc import Sequence

from echo.core.metrics import NodeView
from echo.leases.book import LeaseBook
from echo.roles.members import Member, Roster
from echo.weights.broadcast import Broadcast

MAX_NAMES_LISTED = 3
"""Most silent nodes that a line names; the line gives only the number of further ones."""
MAX_WORKERS_LISTED = 8
"""Most workers whose state is in the line that describes a wait of the learner."""


class FleetView:
    """Describes the nodes and their leases, and changes nothing."""

    def __init__(self, roster: Roster, leases: LeaseBook, broadcast: Broadcast) -> None:
        """Describe the state of these nodes, leases and broadcast."""
        self._roster, self._leases, self._broadcast = roster, leases, broadcast

    def nodes(self, *, step: int, now: float) -> tuple[NodeView, ...]:
        """Return the rows of the live view, one per node; `step` is the learner's step."""
        return tuple(
            member.view(step=step, num_leases=self._leases.num_leases(member.node_id), now=now)
            for member in self._roster.nodes.values()
        )

    def broadcast_progress(self) -> tuple[int, int]:
        """Return (chunks held, chunks wanted) of the newest version, over all active nodes."""
        newest = self._broadcast.newest_complete
        if newest is None:
            return 0, 0
        num_chunks = self._broadcast.store[newest].manifest.num_chunks
        held = 0
        members = self._roster.active()
        for member in members:
            if member.installed is not None and member.installed >= newest:
                held += num_chunks
            elif member.stats.fetching == newest:
                held += member.stats.num_chunks_held
        return held, num_chunks * len(members)

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
