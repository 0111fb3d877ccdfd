"""Divides the GPUs of one site between training and generation. The GPUs may be of different types.

Only divisions that Echo can run are tried. GPUs of one type train, and torchrun's ranks share the
weights evenly. All other GPUs generate, and vLLM runs each copy of the model within one machine.
All such divisions are tried, because they are few.

The idea is from AReaL-Hex (arXiv:2511.00796). AReaL-Hex also splits training by layers and tensors,
and across types of GPU. `bench/hex_search.py` implements this larger search and compares its
results with the paper.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from echo.fleet.gpus import BYTES_PER_WEIGHT, Gpu, ModelShape, decode_rate, train_seconds

PARALLEL_SIZES = (1, 2, 4, 8)
"""Degrees of tensor parallelism to try for a copy of the model that generates. All divide 8, the
number of GPUs in a machine."""
MICRO_BATCH_TOKENS = 16_384
"""Number of tokens in one micro-batch of one rank."""
STATE_BYTES_PER_PARAM = 16
"""Bytes per parameter for bfloat16 weights and gradients, float32 master weights, and Adam moments.
FSDP2 shards all of these."""
ACTIVATION_SHARE = 0.3
"""Share of a GPU's memory that is reserved for activations. They are recomputed layer by layer."""
_PASSES_PER_MICRO_BATCH = 3
"""For each micro-batch, the bytes of all weights travel over the links this many times.

The forward pass and the backward pass send the weights. Then the gradients are sent.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The GPUs of one site, listed by type, and the links between the site's machines."""

    gpus: Mapping[str, Gpu]
    counts: Mapping[str, int]
    node_bytes_per_s: float = 5e9
    """Bandwidth between machines with the same type of GPU, bytes per second and GPU."""
    cross_bytes_per_s: float = 1.5e9
    """Bandwidth between machines with different types of GPU, bytes per second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteJob:
    """The work of one optimizer step on a site."""

    model: ModelShape
    rollouts_per_step: int
    prompt_tokens: float
    completion_tokens: float
    max_tokens: float
    """Number of tokens of the longest sequence, including the prompt."""

    @property
    def mean_tokens(self) -> float:
        """Mean number of tokens of a sequence, including the prompt."""
        return self.prompt_tokens + self.completion_tokens


# --- training -------------------------------------------------------------------------------------


def train_step_s(cluster: Cluster, job: SiteJob, name: str, num_gpus: int) -> float:
    """Return the seconds of one optimizer step on `num_gpus` GPUs of the type `name`.

    If the model does not fit into memory, the result is infinite. FSDP2 gathers the next layer
    while it computes the present layer. So the step time is the time of traffic or of computation,
    whichever is longer.

    Example: 8 GPUs each reach 40 % of 10^14 operations per second. A step of 3.2 * 10^15 operations
    takes 10 s, if sending the weights takes less time than computing a micro-batch of 16 384
    tokens.
    """
    gpu, model = cluster.gpus[name], job.model
    state_bytes = model.num_params * STATE_BYTES_PER_PARAM / num_gpus
    if state_bytes > gpu.memory_bytes * (1 - ACTIVATION_SHARE):
        return math.inf
    num_tokens = job.rollouts_per_step * job.mean_tokens
    compute_s = train_seconds(
        gpu, model, num_gpus=num_gpus, num_tokens=num_tokens, mean_tokens=job.mean_tokens
    )
    is_local = num_gpus <= gpu.num_per_node
    link = gpu.link_bytes_per_s if is_local else cluster.node_bytes_per_s
    num_micro_batches = max(1.0, num_tokens / num_gpus / MICRO_BATCH_TOKENS)
    volume = model.num_params * BYTES_PER_WEIGHT * (num_gpus - 1) / num_gpus
    traffic_s = num_micro_batches * _PASSES_PER_MICRO_BATCH * volume / link
    return max(compute_s, traffic_s)


def training_sizes(gpu: Gpu, count: int) -> Iterator[int]:
    """Yield the numbers of GPUs, at most `count`, with which training can run.

    Within one machine, any number of GPUs can train together. If several machines train together,
    each uses all its GPUs.
    """
    yield from range(1, min(count, gpu.num_per_node) + 1)
    yield from range(2 * gpu.num_per_node, count + 1, gpu.num_per_node)


# --- generation -----------------------------------------------------------------------------------
#
# If shares of the rollouts are continuous, the best shares for given replicas are proportional to
# their rates. So AReaL-Hex's programme (its Eq. 2, printed as a bilinear one) is an integer
# knapsack: maximise the summed rate of the replicas subject to the GPUs of each type. No replica
# spans two types, so each type has its own knapsack, solved by dynamic programming. The shares are
# then rounded.


def largest_remainder(total: int, weights: Sequence[float]) -> list[int]:
    """Divide `total` into whole numbers in proportion to `weights`.

    For example, 10 divided by (2, 1) is [7, 3].
    """
    exact = [total * weight / sum(weights) for weight in weights]
    shares = [math.floor(value) for value in exact]
    order = sorted(range(len(exact)), key=lambda index: shares[index] - exact[index])
    for index in order[: total - sum(shares)]:
        shares[index] += 1
    return shares


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """A set of GPUs that runs one copy of the model for generation."""

    gpus: tuple[tuple[str, int], ...]
    """The GPUs of one copy, as (type, number of GPUs)."""
    tensor_parallel: int
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlan:
    """The kinds of model copies to run, and the number of rollouts for each kind."""

    replicas: tuple[tuple[Replica, int], ...] = ()
    """The kinds of copies, as (replica, number of copies)."""
    rollouts: tuple[int, ...] = ()
    """For each entry in `replicas`, the number of rollouts per step that all its copies make
    together."""

    @property
    def tokens_per_s(self) -> float:
        """Completion tokens per second of all copies together."""
        return sum(replica.tokens_per_s * count for replica, count in self.replicas)

    @property
    def types(self) -> frozenset[str]:
        """The types of GPU that the copies use."""
        return frozenset(name for replica, _ in self.replicas for name, _ in replica.gpus)


def possible_replicas(cluster: Cluster, job: SiteJob) -> tuple[Replica, ...]:
    """Return the replicas whose GPUs have enough memory for the model.

    The GPUs of a replica are in one machine and work in tensor parallel.
    """
    found = []
    for name, gpu in sorted(cluster.gpus.items()):
        for size in PARALLEL_SIZES:
            estimate = decode_rate(
                gpu,
                job.model,
                prompt_tokens=job.prompt_tokens,
                completion_tokens=job.completion_tokens,
                tensor_parallel=size,
                max_tokens=job.max_tokens,
            )
            if estimate is not None:
                found.append(
                    Replica(
                        gpus=((name, size),),
                        tensor_parallel=size,
                        tokens_per_s=estimate.tokens_per_s,
                    )
                )
    return tuple(found)


def choose_replicas(replicas: Sequence[Replica], count: int, num_rollouts: int) -> RolloutPlan:
    """Choose replicas that together use at most `count` GPUs and generate fastest. Return the plan.

    All replicas use the same type of GPU.
    """
    # best[n]: the highest rate on n GPUs, and the number of each kind of replica that has it.
    best = [(0.0, (0,) * len(replicas))]
    for num_gpus in range(1, count + 1):
        options = [best[-1]]
        for place, replica in enumerate(replicas):
            [(_, size)] = replica.gpus
            if size <= num_gpus:
                rate, numbers = best[num_gpus - size]
                more = (*numbers[:place], numbers[place] + 1, *numbers[place + 1 :])
                options.append((rate + replica.tokens_per_s, more))
        best.append(max(options))
    chosen = [(r, n) for r, n in zip(replicas, best[-1][1], strict=True) if n]
    return share_rollouts(chosen, num_rollouts)


def share_rollouts(replicas: Sequence[tuple[Replica, int]], num_rollouts: int) -> RolloutPlan:
    """Divide the rollouts among replicas in proportion to their rates; return the plan."""
    if not replicas:
        return RolloutPlan()
    rates = [replica.tokens_per_s * count for replica, count in replicas]
    shares = largest_remainder(num_rollouts, rates)
    return RolloutPlan(replicas=tuple(replicas), rollouts=tuple(shares))


# --- division -------------------------------------------------------------------------------------
#
# A step lasts max(C_T, C_I) (AReaL-Hex, Eq. 1), because training overlaps with generation, rewards
# and the weight update, as far as staleness allows.


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlappedStep:
    """A step in which training and generation run at the same time."""

    rollouts: RolloutPlan
    train_s: float
    """Seconds of training per step."""
    rollout_s: float
    """Seconds of generation, rewards and weight update per step."""
    update_s: float
    """Seconds of the weight update, a part of `rollout_s`."""

    @property
    def step_s(self) -> float:
        """Seconds of one step: the time of training or of generation, whichever is longer."""
        return max(self.train_s, self.rollout_s)

    @property
    def rank(self) -> tuple[float, float]:
        """The sort key of a step. A better step has a lower key.

        The key consists of the times of training and generation: first the longer time, then the
        shorter time.
        """
        return self.step_s, min(self.train_s, self.rollout_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Division(OverlappedStep):
    """A step in which some GPUs train while all other GPUs generate."""

    train_gpu: str
    num_train_gpus: int


def find_division(cluster: Cluster, job: SiteJob) -> Division | None:
    """Return the division whose step is shortest.

    If no division has enough memory for the model, return None.
    """
    replicas = possible_replicas(cluster, job)
    divisions = (
        price(cluster, job, replicas, name, num_gpus)
        for name, count in sorted(cluster.counts.items())
        for num_gpus in training_sizes(cluster.gpus[name], count)
    )
    best = min(divisions, key=lambda division: division.rank, default=None)
    return None if best is None or math.isinf(best.step_s) else best


def price(
    cluster: Cluster, job: SiteJob, replicas: Sequence[Replica], name: str, num_gpus: int
) -> Division:
    """Return the division in which `num_gpus` GPUs of type `name` train.

    All other GPUs generate.
    """
    chosen: list[tuple[Replica, int]] = []
    for other, count in cluster.counts.items():
        own = [replica for replica in replicas if replica.gpus[0][0] == other]
        rest = count - num_gpus if other == name else count
        chosen += choose_replicas(own, rest, job.rollouts_per_step).replicas
    rollouts = share_rollouts(chosen, job.rollouts_per_step)
    crosses = len(rollouts.types | {name}) > 1
    link = cluster.cross_bytes_per_s if crosses else cluster.node_bytes_per_s
    update_s = job.model.num_params * BYTES_PER_WEIGHT / link
    rate = rollouts.tokens_per_s
    generate_s = job.rollouts_per_step * job.completion_tokens / rate if rate > 0 else math.inf
    return Division(
        train_gpu=name,
        num_train_gpus=num_gpus,
        rollouts=rollouts,
        train_s=train_step_s(cluster, job, name, num_gpus),
        rollout_s=generate_s + update_s,
        update_s=update_s,
    )
