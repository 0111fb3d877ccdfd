"""Records of a simulation: time, staleness, waste, traffic, money."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from echo.core.units import GIGABYTE
from echo.fleet.activation import ActivationDecision, Outlook
from echo.fleet.market import Offer
from echo.records.ledger import ActivationChanged, AnyRecord, Discarded
from echo.sim.groups import Groups
from echo.sim.scenario import LEARNER_REGION, PriceChange, Scenario

Traffic = dict[tuple[str, str, str], float]
"""(from region, to region, "weights", "rollouts" or "control") -> bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One optimizer step."""

    step: int
    """Steps done with this one."""
    time_s: float
    """When it was done."""
    waited_s: float
    trained_s: float
    staleness: Mapping[int, float]
    """Trained tokens by staleness."""
    publish_period: int
    broadcast_s: float | None
    """Seconds of the last broadcast that has reached every worker."""

    @property
    def tokens(self) -> float:
        """Trained tokens."""
        return sum(self.staleness.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class BillRecord:
    """What the learner counts as costs at the end of a step."""

    time_s: float
    per_h: float
    """$ per hour for all machines and, lately, traffic."""
    standby_per_h: float
    """The part of it for workers on standby."""
    total: float
    """$ so far."""
    num_active: int
    num_standby: int


@dataclass(slots=True, eq=False)
class Rental:
    """The time in which one machine was paid for."""

    name: str
    offer: Offer | None
    """None for a relay."""
    region: str
    since_s: float
    until_s: float | None = None


@dataclass(slots=True)
class History:
    """Everything that happened, in order."""

    steps: list[StepRecord] = field(default_factory=list)
    broadcasts: list[float] = field(default_factory=list)
    """Seconds of each broadcast that has reached every worker."""
    lost_tokens: dict[str, float] = field(default_factory=dict)
    """Tokens of groups that reached the learner and were not trained, by reason."""
    num_lost: dict[str, int] = field(default_factory=dict)
    """The groups."""
    traffic_at_steps: list[Traffic] = field(default_factory=list)
    rentals: list[Rental] = field(default_factory=list)
    bills: list[BillRecord] = field(default_factory=list)
    """One for each step, where activation takes part."""
    decisions: list[tuple[float, ActivationDecision]] = field(default_factory=list)
    """(when, what) of each change of the active workers."""
    num_deaths: int = 0
    """Of workers."""
    num_restarts: int = 0
    """Of the learner."""
    num_steps_undone: int = 0
    """Steps after a checkpoint that the learner lost in its deaths."""
    down_s: float = 0.0
    """Seconds without a learner."""
    end: str = ""
    """Why the run ended before its last step."""
    traffic: Traffic = field(default_factory=dict)
    """The network's own count, which goes on."""
    tokens_made: float = 0.0
    """By all engines, whatever became of them."""
    tokens_in_flight: float = 0.0
    """Sampled and on their way to a step when the run ended."""
    ended_at: float = 0.0
    num_events: int = 0
    counters: Mapping[str, float] = field(default_factory=dict)
    """The learner's session's own."""

    def stepped(self, record: StepRecord) -> None:
        """Take down a step."""
        self.steps.append(record)
        self.traffic_at_steps.append(dict(self.traffic))

    def resumed(self, step: int, *, down_s: float) -> None:
        """Take down that the learner goes on after a step: those that follow it are void."""
        kept = [each for each in self.steps if each.step <= step]
        self.num_restarts += 1
        self.num_steps_undone += len(self.steps) - len(kept)
        self.down_s += down_s
        self.steps, self.traffic_at_steps = kept, self.traffic_at_steps[: len(kept)]
        self.bills = self.bills[: len(kept)]

    def recorded(self, record: AnyRecord, groups: Groups) -> None:
        """Take down what concerns groups and workers of a record of the learner."""
        match record:
            case Discarded() if tokens := groups.waiting(record.group):
                self.lost(record.reason, tokens)
            case ActivationChanged():
                numbers = dict(record.numbers)
                for name in ("before", "after"):
                    numbers[name] = Outlook(**numbers[name])
                made = ActivationDecision(
                    step=record.step,
                    cause=record.cause,
                    activated=tuple(record.activated),
                    interrupted=tuple(record.deactivated),
                    **numbers,
                )
                self.decisions.append((record.at, made))

    def broadcast(self, seconds: float) -> None:
        """Take down how long a version took to reach every worker."""
        self.broadcasts.append(seconds)

    def lost(self, reason: str, tokens: float) -> None:
        """Take down a group that was not trained."""
        self.lost_tokens[reason] = self.lost_tokens.get(reason, 0.0) + tokens
        self.num_lost[reason] = self.num_lost.get(reason, 0) + 1


def rent(rental: Rental, prices: Sequence[PriceChange], until_s: float) -> float:
    """Return $ for a machine up to an instant, following the prices of its offer."""
    if rental.offer is None:
        return 0.0
    end_s = until_s if rental.until_s is None else min(rental.until_s, until_s)
    price, since_s, total = rental.offer.price_per_h, rental.since_s, 0.0
    for change in sorted(prices, key=lambda change: change.at_s):
        if change.offer != rental.offer.name or change.at_s >= end_s:
            continue
        if change.at_s > since_s:
            total += price * (change.at_s - since_s)
            since_s = change.at_s
        price = change.price_per_h
    return (total + price * max(0.0, end_s - since_s)) / 3600


def traffic_cost(scenario: Scenario, traffic: Traffic) -> float:
    """Return $ for what the links have carried: out of the learner, and in and out of nodes.

    The nodes' traffic is priced per region: where offers of one region differ, by their mean.
    """
    fleet, total = scenario.fleet, 0.0
    node_prices: dict[str, float] = {}
    for name in fleet.regions:
        known = [
            (offer.price_per_gb, count)
            for offer, count in zip(fleet.offers, scenario.counts, strict=True)
            if offer.region == name and count
        ]
        count = sum(number for _, number in known)
        node_prices[name] = sum(p * n for p, n in known) / count if count else 0.0
    for (source, target, _), num_bytes in traffic.items():
        if source == LEARNER_REGION and target in fleet.regions:
            total += num_bytes * fleet.regions[target].price_per_gb
        total += num_bytes * (node_prices.get(source, 0.0) + node_prices.get(target, 0.0))
    return total / GIGABYTE
