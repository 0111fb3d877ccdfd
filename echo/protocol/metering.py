"""What the run has cost so far, and what it costs per hour.

A machine counts from its first Hello until the learner knows that it was given back: until a
Goodbye that says so. A worker on standby counts, because its machine bills. One that fell silent,
or left without giving its machine back, counts for LOST_COUNTS_FOR_S more, since nobody can tell
from here whether it still bills; if it comes back meanwhile it simply goes on.

Traffic counts by the bytes that nodes report: weights in and out, and rollouts out. Their counters
go on while the learner is away, so what a node reports first to one that was resumed is what the
learner before it has counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from echo.core.units import GIGABYTE
from echo.protocol.membership import Member, Roster
from echo.wire.codec import BYTES_PER_TOKEN

LOST_COUNTS_FOR_S = 3600.0
"""The usual step of a bill: nobody is told that a machine which vanished bills no more."""
_TRAFFIC_WINDOW_S = 300.0
"""Seconds over which traffic is averaged."""


@dataclass(slots=True)
class _Machine:
    """One machine that is paid for."""

    price_per_h: float
    incarnation: str
    is_standby: bool = False
    gone_at: float | None = None
    """Since when nothing has been heard of it; None while it is there."""
    traffic_bytes: float | None = 0.0
    """As reported by this incarnation; None where its first report is still to come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """What is paid for at one instant."""

    total: float
    """$ so far."""
    machines_per_h: float
    """$ per hour for all machines together: learner, relays, workers, and those below."""
    standby_per_h: float
    """The part of it for workers on standby."""
    unconfirmed_per_h: float
    """The part of it for machines that are gone without word that they were given back."""
    traffic_per_h: float
    """$ per hour, lately."""

    @property
    def per_h(self) -> float:
        """$ per hour in all."""
        return self.machines_per_h + self.traffic_per_h


class Meter:
    """Adds up what the machines of a run and their traffic cost."""

    def __init__(
        self,
        *,
        learner_per_h: float,
        learner_per_gb: float,
        spent: float,
        now: float,
        bytes_per_token: float = BYTES_PER_TOKEN,
    ) -> None:
        """Start to count.

        Args:
            learner_per_h: $ per hour of the learner's own machine.
            learner_per_gb: $ per GB that the learner sends.
            spent: $ before now, as before a resume.
            now: the present.
            bytes_per_token: what a sampled token takes on the wire.
        """
        self.total = spent
        self._is_resumed = spent > 0
        self._bytes_per_token = bytes_per_token
        self._learner_per_h = learner_per_h
        self._learner_per_gb = learner_per_gb
        self._machines: dict[str, _Machine] = {}
        self._sent_bytes = 0
        self._at = now
        self._traffic_per_s = 0.0

    @property
    def has_prices(self) -> bool:
        """Whether anything that is paid for has a price."""
        prices = [machine.price_per_h for machine in self._machines.values()]
        return bool(self._learner_per_h or self.total or any(prices))

    def update(self, roster: Roster, *, bytes_sent: int, now: float) -> None:
        """Count the time since the last call, then take what has changed.

        Args:
            roster: the nodes there are.
            bytes_sent: weights that the learner has sent since it started.
            now: the present.
        """
        elapsed_s = max(0.0, now - self._at)
        self._at = now
        self.total += elapsed_s / 3600 * (
            self._learner_per_h + sum(m.price_per_h for m in self._machines.values())
        )  # fmt: skip
        traffic = self._learner_per_gb * (bytes_sent - self._sent_bytes) / GIGABYTE
        self._sent_bytes = bytes_sent
        traffic += self._take(roster.nodes.values())
        self.total += traffic
        if elapsed_s > 0:
            weight = min(1.0, elapsed_s / _TRAFFIC_WINDOW_S)
            self._traffic_per_s += weight * (traffic / elapsed_s - self._traffic_per_s)
        self._drop_gone(roster, now)

    def _take(self, members: Iterable[Member]) -> float:
        """Enter every node that is there; return $ for its traffic since the last call."""
        cost = 0.0
        for member in members:
            machine = self._machines.get(member.node_id)
            if machine is None:
                machine = _Machine(0.0, member.incarnation)
                machine.traffic_bytes = None if self._is_resumed else 0.0
                self._machines[member.node_id] = machine
            if machine.incarnation != member.incarnation:
                machine.incarnation, machine.traffic_bytes = member.incarnation, 0
            machine.price_per_h = member.price.per_h or 0.0
            machine.is_standby, machine.gone_at = member.is_standby, None
            stats = member.stats
            rollouts = self._bytes_per_token * stats.tokens_sampled
            total = stats.bytes_received + stats.bytes_sent + rollouts
            if machine.traffic_bytes is None:
                machine.traffic_bytes = None if member.num_sampled is None else total
                continue
            cost += member.price.per_gb * max(0, total - machine.traffic_bytes) / GIGABYTE
            machine.traffic_bytes = max(total, machine.traffic_bytes)
        return cost

    def _drop_gone(self, roster: Roster, now: float) -> None:
        for name, machine in list(self._machines.items()):
            if name in roster.nodes:
                continue
            if machine.gone_at is None:
                machine.gone_at, machine.is_standby = now, False
            is_released = roster.released.get(name) == machine.incarnation
            if is_released or now - machine.gone_at >= LOST_COUNTS_FOR_S:
                del self._machines[name]

    def bill(self) -> Bill:
        """Return what is paid for, as of the last update."""
        machines = self._machines.values()
        return Bill(
            total=self.total,
            machines_per_h=self._learner_per_h + sum(m.price_per_h for m in machines),
            standby_per_h=sum(m.price_per_h for m in machines if m.is_standby),
            unconfirmed_per_h=sum(m.price_per_h for m in machines if m.gone_at is not None),
            traffic_per_h=3600 * self._traffic_per_s,
        )
