"""Small scenarios for the tests of the simulator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from echo.config.fleet_schema import SimRow
from echo.fleet.job import Job
from echo.fleet.market import Offer, Region, RentedFleet
from echo.sim.scenario import Scenario
from echo.sim.simulation import Simulation
from echo.sim.summary import History, Summary, summarise

MB = 1e6


def make_job(**changes: Any) -> Job:
    """Return a job of 4 groups of 4 rollouts per step, 10 s each."""
    job = Job(
        groups_per_step=4,
        group_size=4,
        max_staleness=2,
        publish_period=1,
        train_s=10.0,
        completion_tokens=100.0,
        max_completion_tokens=400.0,
        completion_spread=0.3,
        version_bytes=80 * MB,
    )
    return replace(job, **changes)


def make_offer(name: str = "gpu", **changes: Any) -> Offer:
    """Return nodes that make 1 rollout per second each, side by side as many as a batch has."""
    offer = Offer(
        name=name,
        region="near",
        count=4,
        price_per_h=1.0,
        tokens_per_s=100.0,
        concurrency=8,
        down_bytes_per_s=100 * MB,
        up_bytes_per_s=100 * MB,
    )
    return replace(offer, **changes)


def make_scenario(
    *offers: Offer, job: Job | None = None, regions: tuple[Region, ...] = (), **settings: Any
) -> Scenario:
    """Return a scenario with all nodes of these offers."""
    offers = offers or (make_offer(can_listen=True),)
    known = {region.name: region for region in regions} or {
        "near": Region(name="near", bytes_per_s=50 * MB, latency_s=0.02)
    }
    numbers = {"num_steps": 8, "chunks_per_version": 8, "setup_s": 1.0, "join_within_s": 1.0}
    return Scenario(
        name="test",
        fleet=RentedFleet(offers=offers, regions=known, uplink_bytes_per_s=100 * MB),
        job=job or make_job(),
        counts=[offer.count for offer in offers],
        settings=SimRow(**(numbers | settings)),
    )


def simulate(scenario: Scenario) -> tuple[Summary, History]:
    """Run a scenario to its end."""
    history = Simulation(scenario).run()
    return summarise(scenario, history), history
