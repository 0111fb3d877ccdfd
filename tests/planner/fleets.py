"""Fleets to test with: a small one by hand, and random ones."""

from __future__ import annotations

import math
import random

from echo.fleet.job import Job
from echo.fleet.market import Offer, Region, RentedFleet

JOB = Job(
    groups_per_step=8,
    group_size=8,
    max_staleness=3,
    publish_period=1,
    train_s=10.0,
    completion_tokens=100.0,
    max_completion_tokens=400.0,
    version_bytes=1e8,
    chunk_bytes=1e6,
    margin=0.0,
)


def make_offer(name: str, **changes: object) -> Offer:
    """100 tokens/s, one rollout per second; 10 MB/s down."""
    settings: dict[str, object] = {
        "name": name,
        "region": "here",
        "count": 10,
        "price_per_h": 1.0,
        "tokens_per_s": 100.0,
        "concurrency": 4,
        "down_bytes_per_s": 1e8,
        "up_bytes_per_s": 1e8,
        **changes,
    }
    return Offer(**settings)  # type: ignore[arg-type]


def make_fleet(*offers: Offer, uplink: float = 1e9, **region: object) -> RentedFleet:
    settings: dict[str, object] = {"name": "here", "bytes_per_s": 1e8, **region}
    return RentedFleet(
        offers=offers,
        regions={"here": Region(**settings)},  # type: ignore[arg-type]
        uplink_bytes_per_s=uplink,
    )


def random_case(seed: int, *, num_offers: int = 4, most: int = 4) -> tuple[RentedFleet, Job]:
    """A fleet and a job, about half of them feasible."""
    rng = random.Random(seed)
    regions = {
        name: Region(
            name=name,
            bytes_per_s=rng.uniform(2e6, 2e8),
            latency_s=rng.uniform(0, 0.3),
            price_per_gb=rng.choice([0, 0.02, 0.1]),
            relay_bytes_per_s=rng.choice([None, 1e7, 1e8]),
            relay_price_per_h=rng.choice([0, 0.05]),
        )
        for name in ("a", "b")[: rng.randint(1, 2)]
    }
    offers = tuple(
        Offer(
            name=str(number),
            region=rng.choice(list(regions)),
            count=rng.randint(0, most),
            price_per_h=rng.uniform(0.1, 3),
            tokens_per_s=rng.uniform(500, 5000),
            concurrency=rng.randint(8, 128),
            down_bytes_per_s=rng.uniform(2e6, 1e8),
            up_bytes_per_s=rng.uniform(1e6, 1e8),
            can_listen=rng.random() < 0.5,
            price_per_gb=rng.choice([0, 0.01, 0.05]),
            losses_per_h=rng.choice([0, 0.1, 1]),
            restart_s=300,
        )
        for number in range(rng.randint(1, num_offers))
    )
    bound = rng.randint(0, 6)
    job = Job(
        groups_per_step=rng.choice([8, 32]) * (1 if most < 10 else 4),
        group_size=8,
        useful_share=rng.choice([1, 0.6]),
        max_staleness=bound,
        publish_period=rng.randint(1, bound + 1),
        train_s=rng.uniform(10, 120),
        completion_tokens=1000,
        max_completion_tokens=4000,
        completion_spread=rng.choice([0, 0.5]),
        version_bytes=rng.choice([1e8, 1e9]),
        has_pausing_workers=rng.random() < 0.5,
        margin=rng.choice([0, 0.1]),
        budget_per_h=rng.choice([math.inf, 4.0 if most < 10 else 40.0]),
    )
    return RentedFleet(
        offers=offers, regions=regions, uplink_bytes_per_s=rng.uniform(1e7, 2e8)
    ), job
