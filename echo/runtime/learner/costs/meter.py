"""Cost meter: the cost of a run's machines and traffic, in total and per hour.

A machine counts from the first Hello of its node until a Goodbye reports that the machine was given
back. A worker on standby counts, because its machine is billed. If a worker falls silent, or leaves
without giving its machine back, the learner cannot know whether the machine is still billed. So the
machine counts for another LOST_COUNTS_FOR_S. If the worker comes back during this time, its machine
continues to count.

Traffic is counted from the bytes that nodes report: weights in and out, and rollouts out. The
nodes' counters continue while the learner is away. So a resumed learner assumes that the first
totals of a node were already counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from echo.core.units import GIGABYTE
from echo.records.ledger import LedgerTotals
from echo.roles.members import Member, Roster
from echo.wire.codec import BYTES_PER_TOKEN
from echo.wire.messages import LEARNER_ID

LOST_COUNTS_FOR_S = 3600.0
"""Seconds for which a lost machine is still counted as billed: one usual billing step."""
_TRAFFIC_WINDOW_S = 300.0
"""Seconds over which the cost of traffic is averaged. Weights are sent in bursts, so the average
over a few seconds would alternate between nothing and the price of a burst."""


@dataclass(slots=True)
class _Machine:
    price_per_h: float
    incarnation: str
    is_standby: bool = False
    gone_at: float | None = None
    """Loop's time at which the machine's node left or fell silent; None for a member."""
    traffic_bytes: float | None = 0.0
    """Bytes of traffic that the node's present process has reported.

    In a resumed learner, None until the first report.
    """


class CostMeter:
    """Adds up the cost of a run's machines and traffic, in $."""

    def __init__(
        self,
        *,
        learner_per_h: float,
        learner_per_gb: float,
        spent: float,
        now: float,
        bytes_per_token: float = BYTES_PER_TOKEN,
    ) -> None:
        self.total = spent
        self._is_resumed = spent > 0
        self._bytes_per_token = bytes_per_token
        self._learner_per_h = learner_per_h
        self._learner_per_gb = learner_per_gb
        self._machines: dict[str, _Machine] = {}
        self._sent_bytes = 0
        self._at = now
        self._traffic_per_s = 0.0
        self._by_node: defaultdict[str, float] = defaultdict(float)

    @property
    def machines_per_h(self) -> float:
        """$ per hour for all counted machines."""
        return self._learner_per_h + sum(m.price_per_h for m in self._machines.values())

    @property
    def standby_per_h(self) -> float:
        """The part of `machines_per_h` for workers on standby."""
        return sum(m.price_per_h for m in self._machines.values() if m.is_standby)

    @property
    def unconfirmed_per_h(self) -> float:
        """The part of `machines_per_h` for machines that left but may still be billed."""
        return sum(m.price_per_h for m in self._machines.values() if m.gone_at is not None)

    @property
    def traffic_per_h(self) -> float:
        """$ per hour for traffic, averaged over the last _TRAFFIC_WINDOW_S."""
        return 3600 * self._traffic_per_s

    @property
    def has_prices(self) -> bool:
        """Whether a machine has a price or money was spent."""
        prices = [machine.price_per_h for machine in self._machines.values()]
        return bool(self._learner_per_h or self.total or any(prices))

    def update(self, roster: Roster, *, bytes_sent: int, now: float) -> None:
        """Add the cost since the last call, then record the present machines and their prices.

        `bytes_sent` is the total number of bytes that the learner has sent.
        """
        elapsed_s = max(0.0, now - self._at)
        self._at = now
        hours = elapsed_s / 3600
        self.total += hours * self.machines_per_h
        traffic = self._learner_per_gb * (bytes_sent - self._sent_bytes) / GIGABYTE
        self._by_node[LEARNER_ID] += hours * self._learner_per_h + traffic
        for name, machine in self._machines.items():
            self._by_node[name] += hours * machine.price_per_h
        self._sent_bytes = bytes_sent
        traffic += self._take(roster.nodes.values())
        self.total += traffic
        if elapsed_s > 0:
            weight = min(1.0, elapsed_s / _TRAFFIC_WINDOW_S)
            self._traffic_per_s += weight * (traffic / elapsed_s - self._traffic_per_s)
        self._drop_gone(roster, now)

    def take_by_node(self) -> dict[str, float]:
        """Return what each node's machine and traffic have cost since the last call, in $.

        Nodes without costs are left out.
        """
        costs, self._by_node = self._by_node, defaultdict(float)
        return {node: cost for node, cost in costs.items() if cost}

    def _take(self, members: Iterable[Member]) -> float:
        """Record each member's machine. Return the cost of traffic since the last call, in $."""
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
            machine.is_standby, machine.gone_at = member.is_resting, None
            stats = member.stats
            rollouts = self._bytes_per_token * stats.tokens_sampled
            total = stats.bytes_received + stats.bytes_sent + rollouts
            if machine.traffic_bytes is None:
                machine.traffic_bytes = None if member.tokens_sampled is None else total
                continue
            traffic = member.price.per_gb * max(0, total - machine.traffic_bytes) / GIGABYTE
            self._by_node[member.node_id] += traffic
            cost += traffic
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


def spent_before(totals: LedgerTotals, *, now: float) -> float:
    """Return what a run had cost before a resume, in $, as computed from its ledger's totals.

    While the learner was away, machines were still billed for an unknown time. At most
    LOST_COUNTS_FOR_S of this time is counted. `now` is Unix time, seconds.
    """
    last = totals.cost
    if last is None:
        return 0.0
    away_s = min(max(0.0, now - last.at), LOST_COUNTS_FOR_S)
    return last.total + last.per_h * away_s / 3600
