"""Scenario: a fleet, a job, nodes, links and faults."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from echo.config.fleet_file import FaultRow, PriceRow
from echo.fleet.job import Job
from echo.fleet.market import Offer, Region, RentedFleet
from echo.sim.lengths import Lengths, LogNormalLengths
from echo.sim.network import Route

LEARNER_REGION = "learner"
"""Where the learner stands: routes of regions lead from here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationRule:
    """Which workers generate and which stand by, as `[activation]` of a run's configuration."""

    margin: float = 0.1
    budget_per_h: float = math.inf
    budget_per_run: float = math.inf
    min_dwell_s: float = 120.0
    """As the default of `ActivationSettings`; shorter where a run is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How the run is configured, and the time models of what is not simulated."""

    num_steps: int = 50
    seed: int = 0
    chunks_per_version: int = 64
    image_bytes: float | None = None
    """Of a version in full, where those of the job are deltas; None if each is sent in full."""
    checkpoint_steps: int = 10
    """Between checkpoints, from which a learner that died goes on."""
    release_after_s: float | None = None
    """On standby, after which a worker leaves and gives its machine back; None for never."""
    heartbeat_s: float = 5.0
    dead_after_s: float = 45.0
    lease_timeout_s: float = 180.0
    reconnect_for_s: float = 3600.0
    is_paced: bool = True
    """Whether leases hold workers back; without, whoever has room is given work."""
    queue_share: float = 1.0
    """Groups that wait at a worker for each one in its engine."""
    alone_speedup: float = 2.0
    """How much faster one sequence is on its own than in a full engine."""
    speed_spread: float = 0.0
    """Standard deviation over mean of the rates of nodes of one kind."""
    train_spread: float = 0.0
    """Standard deviation over mean of the learner's step."""
    setup_s: float = 10.0
    """Until a worker has built its engine."""
    swap_s: float = 0.5
    """Until new weights are in the engine."""
    publish_s: float = 0.0
    """In which the learner makes a version, and does nothing else."""
    ledger_s: float = 0.01
    """Until a group is on the learner's disk."""
    join_within_s: float = 5.0
    """In which the workers start, one after the other."""
    give_up_after_s: float = 3600.0
    """Virtual seconds (and GIVE_UP_STEPS steps' time) without a step after which a run is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Everything that a simulation is made of; the same scenario gives the same history."""

    name: str
    fleet: RentedFleet
    job: Job
    """With the publish period; `is_auto_period` says whether it follows what is measured."""
    counts: Sequence[int]
    """Nodes of each offer."""
    settings: Settings = field(default_factory=Settings)
    is_auto_period: bool = False
    weather: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Region -> (jitter in seconds, loss)."""
    faults: Sequence[FaultRow] = ()
    activation: ActivationRule | None = None
    """None where every worker generates, whatever it costs."""
    prices: Sequence[PriceRow] = ()
    lengths: Lengths | None = None
    """Of groups; None for those of the job."""
    train_times: Sequence[float] = ()
    """Recorded seconds of each step, in place of the job's; empty for none."""

    def group_lengths(self) -> Lengths:
        """Return where lengths come from."""
        job = self.job
        return self.lengths or LogNormalLengths(
            mean=job.completion_tokens,
            spread=job.completion_spread,
            limit=job.max_completion_tokens,
            group_size=job.group_size,
            useful_share=job.useful_share,
            seed=self.settings.seed,
        )

    def route(self, region: Region) -> Route:
        """Return the way from the learner to a region."""
        jitter_s, loss = self.weather.get(region.name, (0.0, 0.0))
        return Route(
            bytes_per_s=region.bytes_per_s,
            latency_s=region.latency_s,
            jitter_s=jitter_s,
            loss=loss,
        )

    @property
    def can_learner_die(self) -> bool:
        """Whether a fault takes the learner."""
        return any(f.target == LEARNER_REGION and f.kind != "cut" for f in self.faults)

    def price_per_h(self, offer: Offer, at_s: float) -> float:
        """Return $ per hour for a node at an instant."""
        changes = [c for c in self.prices if c.offer == offer.name and c.at_s <= at_s]
        newest = max(changes, key=lambda change: change.at_s, default=None)
        return offer.price_per_h if newest is None else newest.price_per_h

    def nodes(self) -> list[tuple[str, Offer]]:
        """Return every worker's name and kind, kinds in turn, in the order in which they start."""
        waiting = [
            [(f"{offer.name.replace(' ', '-')}-{number}", offer) for number in range(1, count + 1)]
            for offer, count in zip(self.fleet.offers, self.counts, strict=True)
        ]
        rounds = itertools.zip_longest(*waiting)
        return [node for each in rounds for node in each if node is not None]

    def with_seed(self, seed: int) -> Scenario:
        """Return the same with another seed."""
        return replace(self, settings=replace(self.settings, seed=seed))
