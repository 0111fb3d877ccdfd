"""AReaL-Hex's own search: training across types of GPU, in pipelines and tensor-parallel.

`bench_planner_hex.py` compares it with the ratios that the paper publishes. Echo's learner shards
weights evenly over GPUs of one type, so `echo-rl plan --hetero` prices only such divisions
(`echo/fleet/hetero.py`); replicas that generate are the same here and there.

Phase 1 prices a division of the GPUs: the fastest training plan on one side, the fastest replicas
on the other. Phase 2 finds the division.

Source: AReaL-Hex, arXiv:2511.00796; each part says how it differs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from echo.fleet.gpus import BYTES_PER_WEIGHT, TRAIN_EFFICIENCY, Gpu, ModelShape, train_flops
from echo.fleet.hetero import (
    ACTIVATION_SHARE,
    MICRO_BATCH_TOKENS,
    PARALLEL_SIZES,
    Cluster,
    OverlappedStep,
    Replica,
    RolloutPlan,
    SiteJob,
    choose_replicas,
    largest_remainder,
    possible_replicas,
    share_rollouts,
)

# --- phase 1, training ----------------------------------------------------------------------------
#
# Tensor and data parallelism stay inside one type of GPU, pipelines may cross types: each type
# holds a run of consecutive stages with a (dp, tp) of its own. Layers go to types in proportion to
# their arithmetic. A step takes as long as its slowest type, plus the bubble of the pipeline, the
# all-reduces of tensor parallelism in a machine and of data parallelism between machines, and the
# activations that cross between stages.
#
# Source: AReaL-Hex, arXiv:2511.00796, section on constrained search; the paper leaves the cost
# model to Metis (ATC 2024), so the formulas here are this project's (ALGORITHMS 3.4, "a proposal").


SHARDED_BYTES_PER_PARAM = 12
"""Float32 masters and Adam moments, split over the replicas as a distributed optimizer does."""
WHOLE_BYTES_PER_PARAM = 4
"""Bfloat16 weights and gradients, on every replica."""
_REDUCES_PER_LAYER = 4
"""Tensor parallelism reduces twice forward and twice backward in every layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """The part of the pipeline on one type of GPU."""

    gpu: str
    data_parallel: int
    tensor_parallel: int
    pipeline_parallel: int
    num_layers: int

    @property
    def num_gpus(self) -> int:
        """GPUs in use."""
        return self.data_parallel * self.tensor_parallel * self.pipeline_parallel


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainPlan:
    """How one optimizer step is computed."""

    stages: tuple[StagePlan, ...] = ()
    step_s: float = math.inf


def search_training(cluster: Cluster, job: SiteJob, counts: Mapping[str, int]) -> TrainPlan:
    """Return the fastest plan on `counts` GPUs of each type; its step is infinite if none fits."""
    best = TrainPlan()
    names = [name for name, count in sorted(counts.items()) if count]
    for size in range(1, len(names) + 1):
        for chosen in itertools.combinations(names, size):
            choices = [_layouts(name, counts[name]) for name in chosen]
            for layout in itertools.product(*choices):
                if _least_seconds(cluster, job, layout) >= best.step_s:
                    continue
                plan = _plan(cluster, job, layout)
                if plan.step_s < best.step_s:
                    best = plan
    return best


def _least_seconds(
    cluster: Cluster, job: SiteJob, layout: Sequence[tuple[str, int, int, int]]
) -> float:
    """Return the seconds of the arithmetic alone: no plan with this layout is faster."""
    num_tokens = job.rollouts_per_step * job.mean_tokens
    flops = train_flops(job.model, num_tokens=num_tokens, mean_tokens=job.mean_tokens)
    power = sum(d * t * p * cluster.gpus[name].flops_per_s for name, d, t, p in layout)
    return flops / (power * TRAIN_EFFICIENCY)


def _layouts(name: str, count: int) -> list[tuple[str, int, int, int]]:
    """Return (type, dp, tp, pp) for each way to use most of `count` GPUs."""
    return [
        (name, count // (tensor * pipeline), tensor, pipeline)
        for tensor in PARALLEL_SIZES
        for pipeline in PARALLEL_SIZES
        if tensor * pipeline <= count
    ]


def _plan(cluster: Cluster, job: SiteJob, layout: Sequence[tuple[str, int, int, int]]) -> TrainPlan:
    power = [d * t * p * cluster.gpus[name].flops_per_s for name, d, t, p in layout]
    layers = largest_remainder(job.model.num_layers, power)
    stages = tuple(
        StagePlan(
            gpu=name,
            data_parallel=data,
            tensor_parallel=tensor,
            pipeline_parallel=pipeline,
            num_layers=num_layers,
        )
        for (name, data, tensor, pipeline), num_layers in zip(layout, layers, strict=True)
    )
    if any(stage.num_layers < stage.pipeline_parallel for stage in stages):
        return TrainPlan()
    if not all(_fits(cluster.gpus[stage.gpu], job.model, stage) for stage in stages):
        return TrainPlan()
    return TrainPlan(stages=stages, step_s=step_seconds(cluster, job, stages))


def _fits(gpu: Gpu, model: ModelShape, stage: StagePlan) -> bool:
    """Tell whether weights, gradients and optimizer of a stage leave room for activations."""
    params = model.num_params * stage.num_layers / model.num_layers
    params /= stage.tensor_parallel * stage.pipeline_parallel
    per_param = WHOLE_BYTES_PER_PARAM + SHARDED_BYTES_PER_PARAM / stage.data_parallel
    return params * per_param <= gpu.memory_bytes * (1 - ACTIVATION_SHARE)


def step_seconds(cluster: Cluster, job: SiteJob, stages: Sequence[StagePlan]) -> float:
    """Return the seconds of one optimizer step.

    Example: 8 GPUs of 10^14 operations per second at 40 %, dp 8, a step of 3.2 * 10^15 operations:
    10 s, plus the all-reduce of the gradients inside one machine.
    """
    num_stages = sum(stage.pipeline_parallel for stage in stages)
    least_data_parallel = min(stage.data_parallel for stage in stages)
    num_tokens = job.rollouts_per_step * job.mean_tokens
    micro_batches = max(1.0, num_tokens / least_data_parallel / MICRO_BATCH_TOKENS)
    slowest = max(_type_seconds(cluster, job, stage) for stage in stages)
    bubble = 1 + (num_stages - 1) / micro_batches
    return slowest * bubble + _crossing_s(cluster, job, stages) + _gradients_s(cluster, job, stages)


def _type_seconds(cluster: Cluster, job: SiteJob, stage: StagePlan) -> float:
    """Return the seconds that the busiest stage on one type computes and reduces."""
    gpu, model = cluster.gpus[stage.gpu], job.model
    num_tokens = job.rollouts_per_step * job.mean_tokens
    # Stages of one type hold whole layers, so the fullest one decides.
    fullest = math.ceil(stage.num_layers / stage.pipeline_parallel)
    flops = train_flops(model, num_tokens=num_tokens, mean_tokens=job.mean_tokens)
    per_stage = flops * fullest / model.num_layers
    power = stage.data_parallel * stage.tensor_parallel * gpu.flops_per_s * TRAIN_EFFICIENCY
    rows = num_tokens / stage.data_parallel
    volume = 2 * (stage.tensor_parallel - 1) / stage.tensor_parallel
    reduced = _REDUCES_PER_LAYER * fullest * rows * model.hidden_size * BYTES_PER_WEIGHT * volume
    return per_stage / power + reduced / gpu.link_bytes_per_s


def _crossing_s(cluster: Cluster, job: SiteJob, stages: Sequence[StagePlan]) -> float:
    """Return the seconds of activations and their gradients between types."""
    if len(stages) == 1:
        return 0.0
    replicas = min(stage.data_parallel for stage in stages)
    num_tokens = job.rollouts_per_step * job.mean_tokens / replicas
    sent = 2 * num_tokens * job.model.hidden_size * BYTES_PER_WEIGHT
    return (len(stages) - 1) * sent / cluster.cross_bytes_per_s


def _gradients_s(cluster: Cluster, job: SiteJob, stages: Sequence[StagePlan]) -> float:
    """Return the seconds of the slowest all-reduce of gradients over the replicas of a stage."""
    slowest = 0.0
    for stage in stages:
        gpu = cluster.gpus[stage.gpu]
        params = job.model.num_params * stage.num_layers / job.model.num_layers
        params /= stage.tensor_parallel * stage.pipeline_parallel
        volume = 2 * (stage.data_parallel - 1) / stage.data_parallel
        is_local = stage.num_gpus <= gpu.num_per_node
        link = gpu.link_bytes_per_s if is_local else cluster.node_bytes_per_s
        slowest = max(slowest, volume * params * BYTES_PER_WEIGHT / link)
    return slowest


# --- phase 2, division ----------------------------------------------------------------------------
#
# The paper bisects training's share of the arithmetic and, at each share, takes the partition that
# keeps links inside training and memory bandwidth inside generation (its Eq. 3); an exact share
# does not exist for whole GPUs, so it has a tolerance of half the largest GPU. From there single
# and joint moves of GPUs are taken until none shortens the step any more.
#
# Source: AReaL-Hex, arXiv:2511.00796, Algorithm 1, Eqs. 1 and 3. Differs from the paper: the moves
# at the end, the coarser divisions of large clusters, and the cost models of phase 1.


MAX_BISECTIONS = 20
"""Halvings of the share; 2^-20 is far below one GPU."""
MAX_DIVISIONS = 20_000
"""Divisions that each halving looks at; of more, only every so many GPUs of a type."""
MAX_MOVE = 8
"""GPUs of one type that change sides at once: a machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule(OverlappedStep):
    """A division of the GPUs, and what it leads to."""

    train_counts: Mapping[str, int]
    """GPUs given to training, by type; the others generate."""
    training: TrainPlan


class HexScheduler:
    """The search over divisions of one cluster for one job; prices are remembered."""

    def __init__(self, cluster: Cluster, job: SiteJob, *, update_s: float | None = None) -> None:
        """Prepare the search.

        Args:
            cluster: the GPUs.
            job: what is trained.
            update_s: measured seconds of a weight update, the links' estimate if None.
        """
        self.cluster, self.job = cluster, job
        self.types = sorted(cluster.counts)
        self._update_s = update_s
        self._replicas = possible_replicas(cluster, job)
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
            rollout_s=generate_s + update_s,
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
                    own, count, self.job.rollouts_per_step
                )
            chosen.extend(self._rollouts[name, count].replicas)
        return share_rollouts(chosen, self.job.rollouts_per_step)

    def update_seconds(self, training: TrainPlan, rollouts: RolloutPlan) -> float:
        """Return the seconds in which new weights reach the replicas, over the slowest link."""
        if self._update_s is not None:
            return self._update_s
        trained_on = {stage.gpu for stage in training.stages}
        crosses = len(rollouts.types | trained_on) > 1
        link = self.cluster.cross_bytes_per_s if crosses else self.cluster.node_bytes_per_s
        return self.job.model.num_params * BYTES_PER_WEIGHT / link

    def divisions(self) -> Iterator[tuple[int, ...]]:
        """Return all divisions, or in a large cluster those by steps of several GPUs of a type."""
        counts = [self.cluster.counts[name] for name in self.types]
        steps = [1] * len(counts)
        choices = [range(count + 1) for count in counts]
        while math.prod(map(len, choices)) > MAX_DIVISIONS:
            most = max(range(len(counts)), key=lambda index: len(choices[index]))
            steps[most] *= 2
            choices[most] = range(0, counts[most] + 1, steps[most])
        return itertools.product(*choices)

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

        divisions = list(self.divisions())
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
