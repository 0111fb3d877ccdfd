"""Phase 1 of AReaL-Hex, generation side: which replicas to run on the GPUs given to generation.

With continuous shares of the rollouts the optimum for given replicas is proportional to their
rates, so the paper's programme (bilinear as printed) is an integer knapsack: maximise the summed
rate of the replicas subject to the GPUs of each type. The shares are then rounded.

Source: AReaL-Hex, arXiv:2511.00796, Eq. 2. Differs from the paper: rates come from this project's
roofline, since HexGen's cost model is not reproduced there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from echo.core.errors import PlanError
from echo.planner.hex_train import PARALLEL_SIZES, Cluster, HexJob, largest_remainder
from echo.planner.roofline import decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One way to run a copy of the model."""

    gpus: tuple[tuple[str, int], ...]
    """(type, GPUs) that one copy takes."""
    tensor_parallel: int
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPlan:
    """The replicas to run and what each generates of a step."""

    replicas: tuple[tuple[Replica, int], ...] = ()
    """(replica, how many)."""
    rollouts: tuple[int, ...] = ()
    """Rollouts of one step for each kind of replica."""

    @property
    def tokens_per_s(self) -> float:
        """Completion tokens per second of all replicas."""
        return sum(replica.tokens_per_s * count for replica, count in self.replicas)

    @property
    def types(self) -> frozenset[str]:
        """Types of GPU in use."""
        return frozenset(name for replica, _ in self.replicas for name, _ in replica.gpus)


def possible_replicas(cluster: Cluster, job: HexJob) -> tuple[Replica, ...]:
    """Return the replicas that fit, tensor-parallel inside one machine."""
    found = []
    for name, gpu in sorted(cluster.gpus.items()):
        for size in PARALLEL_SIZES:
            estimate = decode(
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


def choose_replicas(
    replicas: Sequence[Replica], counts: Mapping[str, int], num_rollouts: int
) -> RolloutPlan:
    """Return the replicas with the highest summed rate on `counts` GPUs of each type.

    Raises:
        PlanError: if the solver fails.
    """
    if not replicas or not any(counts.values()):
        return RolloutPlan()
    types = sorted(counts)
    use = np.array([[dict(r.gpus).get(name, 0) for r in replicas] for name in types], dtype=float)
    limits = np.array([counts[name] for name in types], dtype=float)
    rates = np.array([replica.tokens_per_s for replica in replicas])
    result = milp(
        -rates / rates.max(),
        integrality=np.ones(len(replicas)),
        bounds=Bounds(0, limits.sum()),
        constraints=LinearConstraint(use, ub=limits),
        options={"mip_rel_gap": 0.0},
    )
    if result.x is None:
        raise PlanError(f"the solver found no replicas for {dict(counts)}: {result.message}")
    numbers = [int(value) for value in np.rint(result.x)]
    chosen = [(r, n) for r, n in zip(replicas, numbers, strict=True) if n]
    return share_rollouts(chosen, num_rollouts)


def share_rollouts(replicas: Sequence[tuple[Replica, int]], num_rollouts: int) -> RolloutPlan:
    """Return the plan in which each kind of replica generates in proportion to its rate."""
    if not replicas:
        return RolloutPlan()
    rates = [replica.tokens_per_s * count for replica, count in replicas]
    shares = largest_remainder(num_rollouts, rates)
    return RolloutPlan(replicas=tuple(replicas), rollouts=tuple(shares))
