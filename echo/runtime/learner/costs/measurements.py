"""Measurements of workers and of the broadcast to them, from which activation forecasts.

Each worker has a measured rate, the time for which it was active, and the time that it needs to
install a version. The learner's uplink is as fast as the fastest version that it has sent.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache

from echo.core.rollout import PolicyVersion
from echo.fleet.activation import Links
from echo.fleet.market import UNLIMITED
from echo.leases.throughput import Throughput
from echo.roles.learner import Learner
from echo.roles.members import Member

POLL_S = 0.1
"""Seconds between two looks at the installed versions: the resolution of broadcast times."""
MAX_VERSIONS = 8
"""Versions whose publication times are kept."""


@dataclass(slots=True)
class MeasuredWorker:
    """Measurements of a worker."""

    incarnation: str
    throughput: Throughput
    measured_at: float
    active_s: float = 0.0
    """Seconds in which it had weights and was not on standby."""
    loaded_s: float = 0.0
    """`active_s`, each second weighted by the share of the worker's places that had a group."""
    installed: PolicyVersion | None = None
    free_at: float = 0.0
    """When it received its last version, or became active without one: it can fetch from then
    on.
    """
    took_s: float | None = None
    """Seconds to install the last version, from its publication or from `free_at` if later; None
    until a version is installed after a change.
    """
    late_s: float | None = None
    """Seconds of `took_s` beyond the forecast for all active workers; None if never measured."""
    alone_s: float = 0.0
    """The forecast for this worker alone, from its links when it was last active."""


class Measurements:
    """Measures the workers and the times of broadcasts."""

    def __init__(self) -> None:
        """Start without a worker."""
        self.workers: dict[str, MeasuredWorker] = {}
        """Of each worker that was measured at least once and is here."""
        self.published_at: dict[PolicyVersion, float] = {}
        """Publication times of the last MAX_VERSIONS versions."""
        self.shown_bytes_per_s = 0.0
        """Highest rate at which the learner has sent a version, up to the first worker's
        install.
        """

    def update(self, role: Learner, *, now: float) -> list[Member]:
        """Measure the workers since the last call; return those that are new, or new processes.

        Call it at least once per heartbeat.
        """
        members = role.roster.members("worker")
        newest = role.broadcast.newest_complete
        if newest is not None and newest not in self.published_at:
            self.published_at[newest] = now
            if len(self.published_at) > MAX_VERSIONS:
                del self.published_at[min(self.published_at)]
        new: list[Member] = []
        for member in members:
            state = self.workers.get(member.node_id)
            if state is None or state.incarnation != member.incarnation:
                throughput = Throughput(tokens_sampled=member.tokens_sampled, now=now)
                self.workers[member.node_id] = MeasuredWorker(
                    member.incarnation, throughput, now, installed=member.installed, free_at=now
                )
                new.append(member)
                continue
            slots = max(1, member.worker.capacity // 2)
            load = role.leases.num_leases(member.node_id) / slots
            state.throughput.update(load=load, tokens_sampled=member.tokens_sampled, now=now)
            state.loaded_s += min(1.0, load) * (now - state.measured_at)
            if not member.is_standby and member.installed is not None:
                state.active_s += now - state.measured_at
            state.measured_at = now
            if member.installed is not None and member.installed != state.installed:
                self.note_installed(role, state, member.installed, now=now)
        if len(self.workers) > len(members):
            present = {member.node_id for member in members}
            self.workers = {name: s for name, s in self.workers.items() if name in present}
        return new

    def changed(self, activated: Collection[str], *, now: float) -> None:
        """Note that other workers are active now, so that each installation is timed again."""
        for name in activated:
            self.workers[name].free_at = now
        for state in self.workers.values():
            state.took_s = None

    def note_installed(
        self, role: Learner, state: MeasuredWorker, version: PolicyVersion, now: float
    ) -> None:
        """Record how long a worker needed to install a version."""
        state.took_s = now - max(self.published_at.get(version, now), state.free_at)
        if state.installed is not None and version == role.broadcast.newest_complete:
            # Not for a worker's first version, which it may have kept from before.
            shown = role.plans.version_bytes / (state.took_s + POLL_S)
            self.shown_bytes_per_s = max(self.shown_bytes_per_s, shown)
        state.installed, state.free_at = version, now

    def links(self, role: Learner, members: Collection[Member]) -> Links:
        """Return the learner's links, and a forecast of the broadcast to any set of workers.

        The plan does not know every link. So a forecast adds the longest delay beyond the plan that
        any worker of the set has shown. A worker's measurements are kept while it stands by.
        """
        relays = role.roster.members("relay")
        ahead = [relay.node_id for relay in relays]
        nodes = [member.node for member in (*relays, *members)]
        active = {member.node_id for member in members if not member.is_standby}
        uplink = self._uplink(role)
        forecast = role.plans.planner.forecast(nodes, uplink_bytes_per_s=uplink)
        all_s = forecast([*ahead, *active]) if active else 0.0
        states = {member.node_id: self.workers[member.node_id] for member in members}
        for name, state in states.items():
            if name in active and state.took_s is not None:
                state.late_s = max(0.0, state.took_s - all_s)
                state.alone_s = min(state.took_s, forecast([*ahead, name]))
        # Every worker needs the time of coding and installing.
        least_s = min((s.late_s for s in states.values() if s.late_s is not None), default=0.0)
        late_s = {n: least_s if s.late_s is None else s.late_s for n, s in states.items()}
        alone_s = {n: 0.0 if n in active else s.alone_s for n, s in states.items()}

        @cache
        def broadcast_s(names: frozenset[str]) -> float:
            planned_s = forecast([*ahead, *names])
            alone = max((alone_s[name] for name in names), default=0.0)
            return max(planned_s, alone) + max((late_s[name] for name in names), default=0.0)

        return Links(
            broadcast_s=lambda names: broadcast_s(frozenset(names)),
            uplink_bytes_per_s=uplink or UNLIMITED,
            price_per_gb=role.settings.site.price_per_gb,
            relay_regions=frozenset(relay.node.region for relay in relays if relay.node.region),
        )

    def _uplink(self, role: Learner) -> float | None:
        """Return the bytes per second that the learner can send; None if it never sent.

        The learner's own estimate is too low if its children are slow, and missing if versions are
        small.
        """
        estimate = role.broadcast.uplink.bytes_per_s
        assumed = role.settings.site.uplink_bytes_per_s if estimate is None else None
        return max(self.shown_bytes_per_s, estimate or 0.0, assumed or 0.0) or None
