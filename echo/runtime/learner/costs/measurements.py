"""Measure workers, and broadcasts to them, for the forecasts of activation.

Three quantities are measured for each worker: its sampling rate, the time for which it was active,
and the time in which it installs a version. A rate of the learner's uplink is also measured, from
the version that was sent fastest.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache

from echo.core.rollout import PolicyVersion
from echo.fleet.activation import Links
from echo.fleet.market import UNLIMITED
from echo.roles.learner import Learner
from echo.roles.members import Member
from echo.runtime.learner.costs.throughput import THROUGHPUT_WINDOW_S, Throughput

POLL_S = 0.1
"""Seconds between two checks of the installed versions: the precision of broadcast times."""
MAX_VERSIONS = 8
"""Number of newest versions whose publication times are kept."""


@dataclass(slots=True)
class MeasuredWorker:
    """The measurements of one worker."""

    incarnation: str
    throughput: Throughput
    measured_at: float
    active_s: float = 0.0
    """Seconds in which the worker had weights and was not on standby."""
    loaded_s: float = 0.0
    """Loaded seconds, as `Throughput` counts them."""
    load: float = 0.0
    """Mean load of the last minutes while the worker had leases: the occupied share of its places
    for groups, 0 to 1. It is 0 before the first lease."""
    scaling: float = 1.0
    """The exponent with which the engine's tokens per second grow with its load."""
    installed: PolicyVersion | None = None
    free_at: float = 0.0
    """Time from which the worker could fetch the next version.

    This is the latest of three times: when the worker joined, when it became active, and when it
    installed its last version.
    """
    took_s: float | None = None
    """Seconds until the last installation ended, from the publication or `free_at`, whichever was
    later.

    After a change of the active workers, the value is None until the next installation.
    """
    late_s: float | None = None
    """Seconds by which `took_s` exceeds the forecast for all active workers; None if unknown."""
    alone_s: float = 0.0
    """Forecast of the seconds to install a version if no other worker were active.

    The forecast was made when the worker was last active.
    """


class Measurements:
    """Measures workers' rates, and the times of broadcasts to workers."""

    def __init__(self) -> None:
        self.workers: dict[str, MeasuredWorker] = {}
        """Measurements by worker name, for each present worker that was measured at least once."""
        self.published_at: dict[PolicyVersion, float] = {}
        """For each of the last MAX_VERSIONS versions: the loop's time at which the version was
        published.
        """
        self.shown_bytes_per_s = 0.0
        """Highest rate, bytes per second, at which a version was sent: the version's bytes divided
        by the time until the first worker had installed the version.
        """

    def update(self, role: Learner, *, now: float) -> list[Member]:
        """Update the measurements. Return the members that are new or have a new process.

        Call this method at least once per heartbeat.
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
            places = max(1, member.worker.capacity // 2)
            load = min(1.0, role.leases.num_leases(member.node_id) / places)
            elapsed_s = now - state.measured_at
            if member.stats.scaling is not None:
                state.scaling = member.stats.scaling
            if load > 0:
                kept = math.exp(-elapsed_s / THROUGHPUT_WINDOW_S) if state.load else 0.0
                state.load = kept * state.load + (1 - kept) * load
            counted = load**state.scaling if load > 0 else 0.0
            state.throughput.update(load=counted, tokens_sampled=member.tokens_sampled, now=now)
            state.loaded_s += counted * elapsed_s
            if not member.is_standby and member.installed is not None:
                state.active_s += elapsed_s
            state.measured_at = now
            if member.installed is not None and member.installed != state.installed:
                self.note_installed(role, state, member.installed, now=now)
        if len(self.workers) > len(members):
            present = {member.node_id for member in members}
            self.workers = {name: s for name, s in self.workers.items() if name in present}
        return new

    def changed(self, activated: Collection[str], *, now: float) -> None:
        """Record that the workers `activated` have just become active.

        The installation times of all workers are then measured again.
        """
        for name in activated:
            self.workers[name].free_at = now
        for state in self.workers.values():
            state.took_s = None

    def note_installed(
        self, role: Learner, state: MeasuredWorker, version: PolicyVersion, now: float
    ) -> None:
        """Record how many seconds a worker needed to install a version."""
        state.took_s = now - max(self.published_at.get(version, now), state.free_at)
        if state.installed is not None and version == role.broadcast.newest_complete:
            # Not for a worker's first version, which it may have kept from before.
            shown = role.plans.version_bytes / (state.took_s + POLL_S)
            self.shown_bytes_per_s = max(self.shown_bytes_per_s, shown)
        state.installed, state.free_at = version, now

    def links(self, role: Learner, members: Collection[Member]) -> Links:
        """Return the learner's links, which forecast the broadcast to any set of workers.

        The planner of the broadcast does not know every link, so a worker may install a version
        later than planned. The forecast for a set of workers is therefore the planned time plus the
        longest such delay that was measured for a worker of the set. A worker on standby keeps its
        measurements. For a set with workers on standby, the longest `alone_s` of these workers
        takes the place of a shorter planned time.
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
        # A worker without a measured delay gets the shortest measured one: every worker needs the
        # time of coding and installing.
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
        """Return the rate of the learner's uplink in bytes per second; None if it is unknown.

        The result is the higher of two rates: the rate measured by installations, and the rate
        measured by the broadcast. If the broadcast has measured no rate, the configured rate takes
        the place of the broadcast's. The broadcast measures no rate for small versions, and too low
        a rate if the learner's children are slow.
        """
        estimate = role.broadcast.uplink.bytes_per_s
        assumed = role.settings.site.uplink_bytes_per_s if estimate is None else None
        return max(self.shown_bytes_per_s, estimate or 0.0, assumed or 0.0) or None
