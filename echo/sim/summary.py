"""Summary of a simulated run, to compare with a plan or a recorded run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from echo.sim.records import History, rent, traffic_cost
from echo.sim.scenario import Scenario

RUN_IN = 0.2
"""Part of the steps at the beginning that does not count for pace and staleness."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """A simulated run in numbers."""

    name: str
    seed: int
    num_steps: int
    is_complete: bool
    """Whether it made all its steps."""
    duration_s: float
    step_s: float
    """Mean seconds between steps after the run-in; 0 before the second one."""
    idle_share: float
    """Share of the time after the run-in in which the learner waits, 0..1."""
    idle_share_in_all: float
    """The same of all the time, the run-in included."""
    staleness: Mapping[int, float]
    """Share of the trained tokens after the run-in by staleness."""
    tokens_trained: float
    tokens_made: float
    thrown_away: float
    """Share of the sampled tokens that no step will use; useless groups not counted."""
    discarded: Mapping[str, int]
    """Groups that reached the learner and were not trained, by reason."""
    broadcast_s: float
    """Median seconds from a publication until every worker holds it; 0 if none was measured."""
    publish_period: float
    """Mean."""
    gigabytes: Mapping[str, float]
    """10^9 bytes by what and where: "weights learner > oregon"."""
    num_deaths: int
    """Of workers."""
    num_restarts: int
    """Of the learner."""
    num_steps_undone: int
    """Steps that it lost in its deaths and made again."""
    down_s: float
    """Seconds without a learner."""
    end: str
    """Why the run ended before its last step."""
    decisions: Sequence[Mapping[str, object]]
    """Changes of the active workers: when, and the decision in words."""
    num_standby: int
    """Workers on standby at the end."""
    cost_as_counted: float | None
    """$ that the learner itself counts, by which it keeps its budget; None without activation."""
    cost: float
    """$ in all: learner, relays, nodes, traffic."""
    cost_of_learner: float
    cost_of_nodes: float
    """Workers and relays."""
    cost_of_traffic: float
    cost_per_step: float
    cost_per_million_tokens: float
    """$ per 10^6 trained tokens."""

    @property
    def mean_staleness(self) -> float:
        """Mean over the trained tokens."""
        return sum(lag * share for lag, share in self.staleness.items())

    @property
    def max_staleness(self) -> int:
        """Largest of any trained token."""
        return max(self.staleness, default=0)


def summarise(scenario: Scenario, history: History) -> Summary:
    """Return what a run comes to."""
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
        num_restarts=history.num_restarts,
        num_steps_undone=history.num_steps_undone,
        down_s=history.down_s,
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
