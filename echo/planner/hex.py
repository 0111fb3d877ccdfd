"""AReaL-Hex: divide unequal GPUs of one site between training and generation.

Phase 1 prices a division: the fastest training plan on one side (hex_train.py), the fastest
replicas on the other (hex_rollout.py). Phase 2 finds the division. The paper bisects training's
share of the arithmetic and, at each share, takes the partition that keeps links inside training
and memory bandwidth inside generation (its Eq. 3); an exact share does not exist for whole GPUs,
so the share has a tolerance of half the largest GPU. From there single and joint moves of GPUs are
taken until none shortens the step any more.

A step lasts max(C_T, C_I): generation (with rewards and the update of its weights) and training
overlap, as far as staleness allows.

Source: AReaL-Hex, arXiv:2511.00796, Algorithm 1, Eqs. 1 and 3. Differs from the paper: the moves
at the end, and the cost models of phase 1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from echo.planner.hex_rollout import (
    Replica,
    RolloutPlan,
    choose_replicas,
    possible_replicas,
    share_rollouts,
)
from echo.planner.hex_train import Cluster, HexJob, TrainPlan, search_training
from echo.planner.roofline import BYTES_PER_WEIGHT

MAX_BISECTIONS = 20
"""Halvings of the share; 2^-20 is far below one GPU."""
MAX_MOVE = 8
"""GPUs of one type that change sides at once: a machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A division of the GPUs, and what it leads to."""

    train_counts: Mapping[str, int]
    """GPUs given to training, by type; the others generate."""
    training: TrainPlan
    rollouts: RolloutPlan
    train_s: float
    """C_T, seconds of training per step."""
    rollout_s: float
    """C_I, seconds of generation, rewards and weight update per step."""
    update_s: float
    """The update's part of it."""

    @property
    def step_s(self) -> float:
        """Seconds per step."""
        return max(self.train_s, self.rollout_s)

    @property
    def rank(self) -> tuple[float, float]:
        """What is minimised: the longer side, then the shorter."""
        return self.step_s, min(self.train_s, self.rollout_s)


class Scheduler:
    """The search over divisions of one cluster for one job; prices are remembered."""

    def __init__(self, cluster: Cluster, job: HexJob, *, update_s: float | None = None) -> None:
        """Prepare the search.

        Args:
            cluster: the GPUs.
            job: what is trained.
            update_s: measured seconds of a weight update, the links' estimate if None.
        """
        self.cluster, self.job = cluster, job
        self.types = sorted(cluster.counts)
        self._update_s = update_s
        self._replicas: tuple[Replica, ...] = possible_replicas(cluster, job)
        self._training: dict[tuple[int, ...], TrainPlan] = {}
        self._rollouts: dict[tuple[str, int], RolloutPlan] = {}

    def find(self) -> Schedule:
        """Return the best schedule found; its step is infinite if nothing fits."""
        best = self.bisect()
        while True:
            here = tuple(best.train_counts[name] for name in self.types)
            better = min(map(self.price, self._neighbours(here)), key=lambda s: s.rank)
            if not better.rank < best.rank:
                return best
            best = better

    def bisect(self) -> Schedule:
        """Return the best schedule along the bisection of training's share."""
        low, high = 0.0, 1.0
        best: Schedule | None = None
        for _ in range(MAX_BISECTIONS):
            share = (low + high) / 2
            schedule = self.price(self._partition(share))
            if best is None or schedule.rank < best.rank:
                best = schedule
            if schedule.train_s < schedule.rollout_s:
                high = share
            else:
                low = share
            if high - low < self._tolerance() / 2:
                break
        assert best is not None
        return best

    def price(self, train_counts: tuple[int, ...]) -> Schedule:
        """Return the schedule of one division, given as training's GPUs of each type."""
        given = dict(zip(self.types, train_counts, strict=True))
        rest = {name: self.cluster.counts[name] - given[name] for name in self.types}
        if train_counts not in self._training:
            self._training[train_counts] = search_training(self.cluster, self.job, given)
        training = self._training[train_counts]
        rollouts = self._generation(rest)
        rate = rollouts.tokens_per_s
        tokens = self.job.rollouts_per_step * self.job.completion_tokens
        update_s = self.update_seconds(training, rollouts)
        generate_s = tokens / rate if rate > 0 else math.inf
        return Schedule(
            train_counts=given,
            training=training,
            rollouts=rollouts,
            train_s=training.step_s,
            rollout_s=generate_s + self.job.reward_s + update_s,
            update_s=update_s,
        )

    def _generation(self, counts: Mapping[str, int]) -> RolloutPlan:
        """Return the best replicas on `counts` GPUs.

        Replicas stay on one type, so the knapsack falls apart into one per type, and those recur.
        """
        chosen: list[tuple[Replica, int]] = []
        for name, count in counts.items():
            if (name, count) not in self._rollouts:
                own = [replica for replica in self._replicas if replica.gpus[0][0] == name]
                self._rollouts[name, count] = choose_replicas(
                    own, {name: count}, self.job.rollouts_per_step
                )
            chosen.extend(self._rollouts[name, count].replicas)
        return share_rollouts(chosen, self.job.rollouts_per_step)

    def update_seconds(self, training: TrainPlan, rollouts: RolloutPlan) -> float:
        """Return the seconds in which new weights reach the replicas, over the slowest link."""
        if self._update_s is not None:
            return self._update_s
        trained_on = {stage.gpu for stage in training.stages}
        crosses = bool(rollouts.types | trained_on) and len(rollouts.types | trained_on) > 1
        link = self.cluster.cross_bytes_per_s if crosses else self.cluster.node_bytes_per_s
        return self.job.model.num_params * BYTES_PER_WEIGHT / link

    def _divisions(self) -> Iterator[tuple[int, ...]]:
        return itertools.product(*(range(self.cluster.counts[name] + 1) for name in self.types))

    def _neighbours(self, here: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
        """Yield the divisions in which one or two types move by up to a machine."""
        limits = [self.cluster.counts[name] for name in self.types]
        reach = [
            range(max(0, count - MAX_MOVE), min(limit, count + MAX_MOVE) + 1)
            for count, limit in zip(here, limits, strict=True)
        ]
        yield here
        pairs = itertools.combinations(range(len(here)), 2) if len(here) > 1 else [(0, 0)]
        for first, second in pairs:
            for one, other in itertools.product(reach[first], reach[second]):
                there = list(here)
                there[first], there[second] = one, other
                yield tuple(there)

    def _tolerance(self) -> float:
        """Return half the share of the arithmetic that the largest GPU has."""
        used = [name for name in self.types if self.cluster.counts[name]]
        return max(self.cluster.gpus[name].flops_per_s for name in used) / self._power() / 2

    def _power(self) -> float:
        counts = self.cluster.counts
        return sum(self.cluster.gpus[name].flops_per_s * counts[name] for name in self.types)

    def _partition(self, share: float) -> tuple[int, ...]:
        """Return the division with about this share of the arithmetic that Eq. 3 prefers."""

        def distance(division: tuple[int, ...]) -> float:
            pairs = zip(self.types, division, strict=True)
            power = sum(self.cluster.gpus[name].flops_per_s * count for name, count in pairs)
            return abs(power / self._power() - share)

        divisions = list(self._divisions())
        nearest = min(map(distance, divisions))
        within = max(nearest, self._tolerance()) + 1e-12
        return max((d for d in divisions if distance(d) <= within), key=self._preference)

    def _preference(self, division: tuple[int, ...]) -> float:
        """Return Eq. 3: bandwidth inside training plus memory bandwidth inside generation."""
        counts = self.cluster.counts
        whole = tuple(counts[name] for name in self.types)
        memory = {name: self.cluster.gpus[name].bytes_per_s for name in self.types}
        pairs = list(zip(self.types, division, strict=True))
        generating = sum((counts[name] - count) * memory[name] for name, count in pairs)
        total = sum(counts[name] * memory[name] for name in self.types)
        links = self._links(whole)
        return (self._links(division) / links if links else 0.0) + generating / total

    def _links(self, counts: tuple[int, ...]) -> float:
        """Return the summed bandwidth of all pairs of GPUs, machines filled one by one."""
        total = 0.0
        for name, count in zip(self.types, counts, strict=True):
            gpu = self.cluster.gpus[name]
            full, rest = divmod(count, gpu.num_per_node)
            local = full * math.comb(gpu.num_per_node, 2) + math.comb(rest, 2)
            total += local * gpu.link_bytes_per_s
            total += (math.comb(count, 2) - local) * self.cluster.node_bytes_per_s
        crossing = math.comb(sum(counts), 2) - sum(math.comb(count, 2) for count in counts)
        return total + crossing * self.cluster.cross_bytes_per_s
