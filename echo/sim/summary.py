"""Records the history of a simulated run. Summarises time, staleness, waste, traffic and cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median

from echo.config.fleet_schema import LEARNER_REGION, PriceRow
from echo.core.records import Discarded
from echo.core.units import GIGABYTE
from echo.fleet.activation import ActivationDecision, SetPrediction
from echo.fleet.market import Offer
from echo.records.ledger import ActivationChanged, AnyRecord
from echo.sim.lengths import Groups
from echo.sim.scenario import Scenario

Traffic = dict[tuple[str, str, str], float]
"""For each (source region, destination region, kind), the number of bytes. The kind is "weights",
"rollouts" or "control"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """An optimizer step of a simulated run."""

    step: int
    """Number of completed steps, including this step."""
    time_s: float
    """Time at which the step ended, seconds."""
    waited_s: float
    trained_s: float
    staleness: Mapping[int, float]
    """For each staleness, the number of tokens on which the step trained."""
    publish_period: int
    broadcast_s: float | None
    """Seconds that the newest complete broadcast took to reach every worker; None before the first
    broadcast."""

    @property
    def tokens(self) -> float:
        """Number of tokens that the step trained on."""
        return sum(self.staleness.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class BillRecord:
    """What the run costs at the end of a step, according to the learner."""

    time_s: float
    per_h: float
    """$ per hour for all machines and for recent traffic."""
    standby_per_h: float
    """The part of `per_h` that workers on standby cost."""
    total: float
    """$ spent since the start of the run."""
    num_active: int
    num_standby: int


@dataclass(slots=True, eq=False)
class Rental:
    """A period in which the run paid for one machine."""

    name: str
    offer: Offer
    since_s: float
    until_s: float | None = None


@dataclass(slots=True)
class History:
    """What happened in a simulated run, in order."""

    steps: list[StepRecord] = field(default_factory=list)
    broadcasts: list[float] = field(default_factory=list)
    """Seconds that each broadcast took to reach every worker."""
    lost_tokens: dict[str, float] = field(default_factory=dict)
    """For each reason, the number of tokens in groups that reached the learner but were not trained
    on."""
    num_lost: dict[str, int] = field(default_factory=dict)
    """For each reason, the number of groups that reached the learner but were not trained on."""
    traffic_at_steps: list[Traffic] = field(default_factory=list)
    rentals: list[Rental] = field(default_factory=list)
    bills: list[BillRecord] = field(default_factory=list)
    """One bill for each step, if activation is on."""
    decisions: list[tuple[float, ActivationDecision]] = field(default_factory=list)
    """For each change of the active workers: (instant, decision)."""
    explained: list[tuple[int, Mapping[str, str]]] = field(default_factory=list)
    """Explanations of why the learner or workers waited: (step, explanation), as in
    metrics.jsonl."""
    num_deaths: int = 0
    """Number of times that a worker died."""
    end: str = ""
    """The reason why the run ended before its last step; "" if all steps were made."""
    traffic: Traffic = field(default_factory=dict)
    """Number of bytes that the network has transported. The network updates it."""
    tokens_made: float = 0.0
    """Number of tokens that all engines sampled. Tokens that were not trained on count, too."""
    tokens_in_flight: float = 0.0
    """Number of sampled tokens that could still have been trained on when the run ended."""
    ended_at: float = 0.0
    num_events: int = 0
    counters: Mapping[str, float] = field(default_factory=dict)
    """The counters of the learner's role."""

    def stepped(self, record: StepRecord) -> None:
        """Add the record of a step to the history. Also store the traffic up to this step."""
        self.steps.append(record)
        self.traffic_at_steps.append(dict(self.traffic))

    def recorded(self, record: AnyRecord, groups: Groups) -> None:
        """Add a record of the learner's ledger to the history.

        Only discarded groups and changes of activation are added.
        """
        match record:
            case Discarded() if tokens := groups.waiting(record.group):
                self.lost(record.reason, tokens)
            case ActivationChanged():
                numbers = dict(record.numbers)
                for name in ("before", "after"):
                    numbers[name] = SetPrediction(**numbers[name])
                made = ActivationDecision(
                    step=record.step,
                    cause=record.cause,
                    activated=tuple(record.activated),
                    deactivated=tuple(record.deactivated),
                    **numbers,
                )
                self.decisions.append((record.at, made))

    def lost(self, reason: str, tokens: float) -> None:
        """Count a group that has reached the learner but will not be trained on."""
        self.lost_tokens[reason] = self.lost_tokens.get(reason, 0.0) + tokens
        self.num_lost[reason] = self.num_lost.get(reason, 0) + 1


def rent(rental: Rental, prices: Sequence[PriceRow], until_s: float) -> float:
    """Return how much rent a machine costs until an instant, in $.

    `prices` has the changes of the offers' prices.
    """
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
    """Return what all traffic of the learner and of the nodes costs, in $.

    The learner pays for sent bytes, and nodes pay for sent and received bytes. The price of a
    region's traffic is the mean price of the region's offers.
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


# --- summary --------------------------------------------------------------------------------------


RUN_IN = 0.2
"""Share of the steps that count as the run-in, the start of a run. Figures on speed and staleness
leave out the run-in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The figures that summarise a simulated run."""

    name: str
    seed: int
    num_steps: int
    is_complete: bool
    """Whether the run made all its optimizer steps."""
    duration_s: float
    step_s: float
    """Mean seconds between steps after the run-in (see RUN_IN); 0 if no step was made."""
    idle_share: float
    """Share of time after the run-in (see RUN_IN) in which the learner waits, 0..1."""
    idle_share_in_all: float
    """Share of the whole time in which the learner waits, 0..1."""
    staleness: Mapping[int, float]
    """For each staleness, its share of the tokens that were trained on after the run-in (see
    RUN_IN)."""
    tokens_trained: float
    tokens_made: float
    thrown_away: float
    """Share of the sampled tokens that were never trained on. Tokens of groups without a training
    signal do not count."""
    discarded: Mapping[str, int]
    """For each reason, the number of groups that reached the learner but were not trained on."""
    broadcast_s: float
    """Median of the seconds from a publication until every worker holds the version; 0 without a
    measurement."""
    publish_period: float
    """Mean number of steps between publications."""
    gigabytes: Mapping[str, float]
    """Traffic in units of 10^9 bytes. Each key has the kind and the route, such as "weights learner
    > oregon"."""
    num_deaths: int
    """Number of times that a worker died."""
    end: str
    """The reason why the run ended before its last step; "" if all steps were made."""
    decisions: Sequence[Mapping[str, object]]
    """Changes of the active workers: (instant, text on the decision)."""
    num_standby: int
    """Number of workers on standby at the end."""
    cost_as_counted: float | None
    """$ spent according to the learner. The budget limits this number. None without activation."""
    cost: float
    """$ spent in total, for learner, relays, workers and traffic."""
    cost_of_learner: float
    cost_of_nodes: float
    """$ spent for workers and relays."""
    cost_of_traffic: float
    cost_per_step: float
    cost_per_million_tokens: float
    """$ per 10^6 tokens that were trained on."""

    @property
    def mean_staleness(self) -> float:
        """Mean staleness of the trained tokens, in steps."""
        return sum(lag * share for lag, share in self.staleness.items())

    @property
    def max_staleness(self) -> int:
        """Largest staleness of a trained token, in steps."""
        return max(self.staleness, default=0)


def summarise(scenario: Scenario, history: History) -> Summary:
    """Return the summary of a simulated run."""
    steps = history.steps
    first = int(RUN_IN * len(steps))
    counted = steps[first:]
    waited_s = sum(step.waited_s for step in counted)
    until_s = counted[-1].time_s if counted else 0.0
    since_s = steps[first - 1].time_s if first else 0.0
    tokens: dict[int, float] = {}
    for step in counted:
        for lag, number in step.staleness.items():
            tokens[lag] = tokens.get(lag, 0.0) + number
    trained = sum(step.tokens for step in steps)
    thrown_away = history.tokens_made - trained - history.tokens_in_flight
    thrown_away -= history.lost_tokens.get("zero_variance", 0.0)
    hours = history.ended_at / 3600
    nodes = sum(rent(rental, scenario.prices, history.ended_at) for rental in history.rentals)
    relays = hours * sum(region.relay_price_per_h for region in scenario.fleet.regions.values())
    traffic = traffic_cost(scenario, history.traffic)
    cost = nodes + relays + traffic + hours * scenario.job.learner_price_per_h
    return Summary(
        name=scenario.name,
        seed=scenario.settings.seed,
        num_steps=len(steps),
        is_complete=len(steps) >= scenario.settings.num_steps,
        duration_s=history.ended_at,
        step_s=(until_s - since_s) / len(counted) if counted else 0.0,
        idle_share=waited_s / (until_s - since_s) if counted else 1.0,
        idle_share_in_all=sum(step.waited_s for step in steps) / until_s if counted else 1.0,
        staleness={lag: number / sum(tokens.values()) for lag, number in sorted(tokens.items())},
        tokens_trained=trained,
        tokens_made=history.tokens_made,
        thrown_away=max(0.0, thrown_away) / max(1.0, history.tokens_made),
        discarded=dict(sorted(history.num_lost.items())),
        broadcast_s=median(history.broadcasts) if history.broadcasts else 0.0,
        publish_period=fmean(step.publish_period for step in steps) if steps else 0.0,
        gigabytes={
            f"{what} {source} > {target}": num_bytes / 1e9
            for (source, target, what), num_bytes in sorted(history.traffic.items())
        },
        num_deaths=history.num_deaths,
        end=history.end,
        decisions=[{"time_s": at, "text": str(made)} for at, made in history.decisions],
        num_standby=history.bills[-1].num_standby if history.bills else 0,
        cost_as_counted=history.bills[-1].total if history.bills else None,
        cost=cost,
        cost_of_learner=hours * scenario.job.learner_price_per_h,
        cost_of_nodes=nodes + relays,
        cost_of_traffic=traffic,
        cost_per_step=cost / max(1, len(steps)),
        cost_per_million_tokens=cost / max(1e-9, trained / 1e6),
    )
