"""Shards of a model over several processes (ranks), by FSDP2.

Every rank holds a part of each parameter, gradient and moment. Each decoder layer is a unit: its
weights are gathered on every rank before the layer computes, and split again afterwards. After the
layer's backward pass, its gradient is summed over the ranks and split. All other parameters
(embedding, last norm, head) belong to the root. Every computation with the model, including
log-probabilities, runs within the root's forward. Elsewhere the head is a shard.

    root (ShardedModel)
      embedding --> layer --> layer --> ... --> norm --> head --> log-probabilities
                    (unit)    (unit)

Ranks wait for each other in every layer, forward and backward. So all ranks make the same passes in
the same order. A rank without a micro-batch puts an extra row through the model, and its result
does not count. A rank that runs out of memory within a pass ends the job (rank_group.py), because
the other ranks wait for this rank in the next layer.

Gradients are summed over the ranks and not averaged, since losses are divided by counts of the
whole batch. Parameters and sums are float32. With a compute type of bfloat16, gathering casts each
unit, so autocast is not needed.

Every rank reads the same data and makes the same decisions. A rank's loss, norm of shards and
errors are gathered on all ranks before any decision depends on these values.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from echo.core.errors import EngineError
from echo.train.step import StepError

COLLECTIVE_S = 600.0
"""Longest time, in seconds, that a rank waits for another rank within a command. It is far longer
than a micro-batch takes.
"""

# --- exchange between ranks -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ranks:
    """The processes that train one model together.

    All ranks call the methods in the same order, and wait for each other. `ALONE` is a single
    process, which does not wait.
    """

    rank: int
    """Number of this rank, counted from 0."""
    size: int
    """Number of ranks that train the model together."""
    mesh: DeviceMesh | None
    """The mesh of all ranks in the default process group, which also accepts tensors on the CPU;
    None if this process trains alone.
    """

    @staticmethod
    def of_process_group(device_type: str) -> Ranks:
        """Return the ranks of the default process group."""
        size = dist.get_world_size()
        return Ranks(rank=dist.get_rank(), size=size, mesh=init_device_mesh(device_type, (size,)))

    @property
    def is_alone(self) -> bool:
        """Whether this process trains alone, with a whole model."""
        return self.mesh is None

    def gather(self, own: bytes) -> list[bytes]:
        """Return the bytes `own` of every rank, in the order of ranks."""
        if self.is_alone:
            return [own]
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(own)]))
        largest = max(int(size) for size in sizes)
        sent = torch.zeros(largest, dtype=torch.uint8)
        sent.numpy()[: len(own)] = np.frombuffer(own, dtype=np.uint8)
        received = [torch.empty_like(sent) for _ in range(self.size)]
        dist.all_gather(received, sent)
        return [
            bytes(data[: int(size)].numpy().data)
            for data, size in zip(received, sizes, strict=True)
        ]

    def gather_tensors(self, own: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Return the tensors `own` of every rank, by name, in the order of ranks.

        The results are on the CPU. A process that trains alone gets `own` back unchanged.
        """
        if self.is_alone:
            return [{name: tensor.detach() for name, tensor in own.items()}]
        packed = safetensors.torch.save(
            {name: tensor.detach().to("cpu").contiguous() for name, tensor in own.items()}
        )
        return [safetensors.torch.load(data) for data in self.gather(packed)]

    def raise_together(self, failure: StepError | None) -> None:
        """If any rank has an error, raise the first such rank's error on all ranks.

        Raises:
            StepError: if any rank has an error. If there are several ranks, the message names the
                rank.
        """
        if self.is_alone and failure is not None:
            raise failure
        own = [] if failure is None else [str(failure), failure.reason]
        for rank, failed in enumerate(map(json.loads, self.gather(json.dumps(own).encode()))):
            if failed:
                text, reason = failed
                raise StepError(f"rank {rank}: {text}", reason=reason) from failure

    def first_fault(self, own: str | None) -> str | None:
        """Return the fault of the first rank that has a fault; None if no rank has a fault.

        If there are several ranks, the text names the rank.
        """
        if self.is_alone:
            return own
        for rank, fault in enumerate(self.gather((own or "").encode())):
            if fault:
                return f"rank {rank}: {fault.decode()}"
        return None

    def add_up(self, value: float) -> float:
        """Return the sum of the values of all ranks."""
        if self.is_alone:
            return value
        total = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(total)
        return float(total)


ALONE = Ranks(rank=0, size=1, mesh=None)
"""The ranks of a process that trains its model alone."""


def is_loss(error: BaseException) -> bool:
    """Return whether an error means that other ranks have ended."""
    text = str(error)
    return isinstance(error, dist.DistError | ConnectionError | EOFError) or (
        isinstance(error, RuntimeError) and ("gloo" in text or "Connection" in text)
    )


# --- the model in units ---------------------------------------------------------------------------


class ShardedModel(nn.Module):
    """The root of a sharded model. Embedding and head are complete within its `forward`."""

    def __init__(self, model: nn.Module) -> None:
        """Store an unsharded model, to be divided by `shard`."""
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function that computes with the model."""
        return compute(*arguments)


def shard(model: Any, ranks: Ranks, dtype: torch.dtype) -> ShardedModel:
    """Divide a model into shards, in place; return the root for all computations.

    A new parameter object replaces each parameter, under the same name. Tied parameters stay tied.

    Args:
        model: a causal language model of transformers, equal on all ranks, on any device. The
            trained parameters must already require a gradient.
        ranks: two or more ranks. The shards are on the ranks' type of device.
        dtype: the type that the model computes in.

    Raises:
        EngineError: if the model does not name its layers.
    """
    assert ranks.mesh is not None, "a process by itself has its model whole"
    layers = [
        module
        for module in model.base_model.modules()
        if isinstance(module, GradientCheckpointingLayer)
    ]
    if not layers:
        raise EngineError(
            f"{type(model).__name__} does not say what its layers are, so it cannot be divided "
            "among several processes: train it with one"
        )
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32
    )
    root = ShardedModel(model)
    for module in (*layers, root):
        unit = fully_shard(module, mesh=ranks.mesh, mp_policy=policy)
        # These two settings do not reach the units inside.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(enable=True)  # gloo has no scaled sum
        # Otherwise ranks whose tokens use different experts would sum different gradients.
        unit.set_reduce_scatter_unused_params(reduce_scatter_unused_params=True, recurse=False)
    return root


def call(root: ShardedModel, compute: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a function that computes with a sharded model.

    If gradients are off, gathered weights are divided again afterwards.
    """
    found = root(compute, *arguments)
    if not torch.is_grad_enabled():
        assert isinstance(root, FSDPModule), "shard() has made it one"
        root.reshard()  # otherwise only a backward pass does this
    return found


# --- shards as plain tensors ----------------------------------------------------------------------


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, without copying it.

    An unsharded tensor is returned unchanged.
    """
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def copy_local(tensor: Tensor, given: Tensor) -> None:
    """Copy `given` into `tensor`.

    If `tensor` is sharded and `given` is not, this rank's rows are copied.
    """
    if isinstance(given, DTensor):
        given = local(given)
    elif isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        given = given[slice(*rows_of(tensor.shape[0], mesh.get_local_rank(), mesh.size()))]
    local(tensor).copy_(given)


def rows_of(num_rows: int, rank: int, size: int) -> tuple[int, int]:
    """Return the half-open range of a rank's rows.

    FSDP2 divides a tensor as `torch.chunk` does.
    """
    most = -(-num_rows // size)
    return min(num_rows, rank * most), min(num_rows, (rank + 1) * most)


def local_parameter(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor as a parameter, so that the part can have a gradient."""
    return nn.Parameter(local(tensor)) if isinstance(tensor, DTensor) else tensor


def like(part: Tensor, tensor: Tensor) -> Tensor:
    """Return `part`, as a sharded tensor if `tensor` is sharded.

    `part` must have the rows of this rank's part of `tensor`.
    """
    if not isinstance(tensor, DTensor):
        return part
    whole_of_it = torch.empty((tensor.shape[0], *part.shape[1:]), device="meta")
    return DTensor.from_local(
        part,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=whole_of_it.shape,
        stride=whole_of_it.stride(),
    )


def norm_over(ranks: Ranks, parts: list[Tensor]) -> float:
    """Return the norm over all elements of all ranks' `parts`."""
    norm = float(torch.nn.utils.get_total_norm(parts))
    return math.sqrt(ranks.add_up(norm * norm))  # a process alone gets the same number
