"""Phase 1 of AReaL-Hex, training side: the fastest (dp, tp, pp) for the GPUs given to training.

Tensor and data parallelism stay inside one type of GPU, pipelines may cross types: each type holds
a run of consecutive stages with a (dp, tp) of its own. Layers go to types in proportion to their
arithmetic. A step takes as long as its slowest type, plus the bubble of the pipeline, the
all-reduces of tensor parallelism in a machine and of data parallelism between machines, and the
activations that cross between stages.

Source: AReaL-Hex, arXiv:2511.00796, section on constrained search; the paper leaves the cost model
to Metis (ATC 2024), so the formulas here are this project's (ALGORITHMS 3.4, "a proposal").
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from echo.planner.catalogue import Gpu, ModelShape
from echo.planner.roofline import BYTES_PER_WEIGHT, TRAIN_EFFICIENCY, train_flops

PARALLEL_SIZES = (1, 2, 4, 8)
"""Degrees tried for tensor and pipeline parallelism: divisors of a machine."""
MICRO_BATCH_TOKENS = 16_384
"""Tokens of one micro-batch of one replica."""
SHARDED_BYTES_PER_PARAM = 12
"""Float32 masters and Adam moments, split over the replicas as a distributed optimizer does."""
WHOLE_BYTES_PER_PARAM = 4
"""Bfloat16 weights and gradients, on every replica."""
ACTIVATION_SHARE = 0.3
"""Share of a GPU's memory kept for activations, recomputed layer by layer."""
_REDUCES_PER_LAYER = 4
"""Tensor parallelism reduces twice forward and twice backward in every layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """GPUs of one site by type, and the links between machines."""

    gpus: Mapping[str, Gpu]
    counts: Mapping[str, int]
    node_bytes_per_s: float = 5e9
    """Between machines of one type, per GPU."""
    cross_bytes_per_s: float = 1.5e9
    """Between types."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HexJob:
    """What is trained, per optimizer step."""

    model: ModelShape
    rollouts_per_step: int
    prompt_tokens: float
    completion_tokens: float
    max_tokens: float
    """Tokens of the longest sequence, prompt included."""
    reward_s: float = 0.0
    """Seconds of rewards that nothing hides."""

    @property
    def mean_tokens(self) -> float:
        """Tokens of a sequence."""
        return self.prompt_tokens + self.completion_tokens


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

    stages: tuple[StagePlan, ...] = field(default=())
    step_s: float = math.inf


def search_training(cluster: Cluster, job: HexJob, counts: Mapping[str, int]) -> TrainPlan:
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
    cluster: Cluster, job: HexJob, layout: Sequence[tuple[str, int, int, int]]
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


def _plan(cluster: Cluster, job: HexJob, layout: Sequence[tuple[str, int, int, int]]) -> TrainPlan:
    layers = _share_layers(cluster, job.model.num_layers, layout)
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


def _share_layers(
    cluster: Cluster, num_layers: int, layout: Sequence[tuple[str, int, int, int]]
) -> list[int]:
    """Divide the layers in proportion to arithmetic, by largest remainder."""
    power = [d * t * p * cluster.gpus[name].flops_per_s for name, d, t, p in layout]
    return largest_remainder(num_layers, power)


def largest_remainder(total: int, weights: Sequence[float]) -> list[int]:
    """Divide `total` whole things in proportion to `weights`; example: 10 by (2, 1) is [7, 3]."""
    exact = [total * weight / sum(weights) for weight in weights]
    shares = [math.floor(value) for value in exact]
    order = sorted(range(len(exact)), key=lambda index: shares[index] - exact[index])
    for index in order[: total - sum(shares)]:
        shares[index] += 1
    return shares


def _fits(gpu: Gpu, model: ModelShape, stage: StagePlan) -> bool:
    """Tell whether weights, gradients and optimizer of a stage leave room for activations."""
    params = model.num_params * stage.num_layers / model.num_layers
    params /= stage.tensor_parallel * stage.pipeline_parallel
    per_param = WHOLE_BYTES_PER_PARAM + SHARDED_BYTES_PER_PARAM / stage.data_parallel
    return params * per_param <= gpu.memory_bytes * (1 - ACTIVATION_SHARE)


def step_seconds(cluster: Cluster, job: HexJob, stages: Sequence[StagePlan]) -> float:
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


def _type_seconds(cluster: Cluster, job: HexJob, stage: StagePlan) -> float:
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


def _crossing_s(cluster: Cluster, job: HexJob, stages: Sequence[StagePlan]) -> float:
    """Return the seconds of activations and their gradients between types."""
    if len(stages) == 1:
        return 0.0
    replicas = min(stage.data_parallel for stage in stages)
    num_tokens = job.rollouts_per_step * job.mean_tokens / replicas
    sent = 2 * num_tokens * job.model.hidden_size * BYTES_PER_WEIGHT
    return (len(stages) - 1) * sent / cluster.cross_bytes_per_s


def _gradients_s(cluster: Cluster, job: HexJob, stages: Sequence[StagePlan]) -> float:
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
