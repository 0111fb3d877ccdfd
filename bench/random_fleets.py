"""Workers to choose from: random ones, and the broadcast to each set of them."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Collection, Sequence
from dataclasses import replace

from echo.fleet.activation import Links, Roll
from echo.fleet.job import Job
from echo.fleet.market import Offer


def random_workers(
    seed: int, *, most: int = 8, least: int = 1, groups: int | None = None
) -> tuple[list[Offer], Job, Links]:
    """Return workers of a few kinds or all different, and a job that about half of them can do.

    Args:
        seed: of the case.
        most: workers at most.
        least: workers at least.
        groups: per step, for larger fleets with versions that can reach them; drawn without.
    """
    rng = random.Random(seed)
    kinds = [_random_worker(rng, str(number)) for number in range(rng.randint(1, 4))]
    workers = []
    for number in range(rng.randint(least, most)):
        if rng.random() < 0.5:
            kind = rng.choice(kinds)
            workers.append(replace(kind, name=f"w{number}"))
        else:
            workers.append(_random_worker(rng, f"w{number}"))
    bound = rng.randint(0, 6) if groups is None else 6
    job = Job(
        groups_per_step=rng.choice([2, 4, 8]) if groups is None else groups,
        group_size=8,
        useful_share=rng.choice([1, 0.6]),
        max_staleness=bound,
        publish_period=rng.randint(1, bound + 1) if groups is None else 1,
        train_s=rng.uniform(10, 60),
        completion_tokens=1000,
        max_completion_tokens=4000,
        version_bytes=rng.choice([1e8, 1e9]) if groups is None else 1e7,
        margin=rng.choice([0, 0.1]),
        budget_per_h=rng.choice([math.inf, 4.0]) if groups is None else math.inf,
    )
    links = Links(
        broadcast_s=Broadcast(workers, job),
        uplink_bytes_per_s=UPLINK,
        price_per_gb=rng.choice([0, 0.02]),
    )
    return workers, job, links


UPLINK = 1e9


class Broadcast:
    """What a broadcast takes: the slowest downlink, one chain, all behind the learner's uplink."""

    def __init__(self, workers: Sequence[Offer], job: Job) -> None:
        self.by_name = {worker.name: worker for worker in workers}
        self.version_bytes = job.version_bytes

    def __call__(self, names: Collection[str]) -> float:
        members = [self.by_name[name] for name in names]
        slowest = min((m.down_bytes_per_s for m in members), default=math.inf)
        num_copies = sum(not m.can_listen for m in members) + any(m.can_listen for m in members)
        return max(self.version_bytes / slowest, num_copies * self.version_bytes / UPLINK)


def _random_worker(rng: random.Random, name: str) -> Offer:
    return Offer(
        name=name,
        tokens_per_s=rng.uniform(300, 3000),
        concurrency=rng.randint(8, 64),
        price_per_h=rng.uniform(0.1, 2),
        price_per_gb=rng.choice([0, 0.01]),
        losses_per_h=rng.choice([0, 0.2]),
        restart_s=300,
        can_listen=rng.random() < 0.5,
        down_bytes_per_s=rng.choice([2e7, 1e8, 1e9]),
        up_bytes_per_s=1e9,
    )


def choose_by_brute_force(
    workers: Sequence[Offer], job: Job, links: Links
) -> tuple[float, frozenset[str]] | None:
    """Return the cheapest sufficient set and its cost by trying every one; None without any."""
    roll = Roll(workers, links)
    names = [worker.name for worker in workers]
    found = []
    for size in range(1, len(names) + 1):
        for chosen in itertools.combinations(names, size):
            outlook = roll.outlook(job, chosen)
            if outlook.is_sufficient:
                found.append((outlook.cost_per_h, frozenset(chosen)))
    return min(found, default=None, key=lambda each: each[0])
