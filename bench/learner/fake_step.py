"""Peak of a learner's step at a model's real size, on tensors without memory.

The learner's own model, masters, shards and optimizer compute on torch's fake tensors, and torch's
tracker counts their bytes. The update of 8-bit moments is left out, since a GPU's is compiled, and
so is what decides by numbers: packing's probe, the comparison of logits, and which rows are scored,
so every token counts. Its head is that of torch_kernels.py, as on a CPU, and its attention keeps
what a CPU's keeps.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.weak import WeakIdKeyDictionary

from echo.kernels import torch_kernels
from echo.kernels.adamw_8bit import code_values
from echo.kernels.contract import LiveRows
from echo.train.models.policy import Compute, ModelSource, Policy
from echo.train.optimizer import KINDS, OptimizerState
from echo.train.ranks import sharding
from echo.train.ranks.sharding import ALONE, Ranks


class Head(torch.autograd.Function):
    """Log-probabilities of all tokens of a row, by the kernels of a CPU."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor) -> Tensor:
        """Return them, [N]."""
        ids = torch.zeros(len(states), dtype=torch.int64)
        scale = torch.ones(len(states))
        scores = torch_kernels.forward(
            states, weight, ids, scale, with_entropy=True, policy=None, vocab_chunk=8192
        )
        ctx.save_for_backward(states, weight, ids, scale, scores.peak, scores.total)
        return scores.logprobs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of states and weight."""
        states, weight, ids, scale, peak, total = ctx.saved_tensors
        rows = LiveRows(
            states=states,
            ids=ids,
            scale=scale,
            peak=peak,
            total=total,
            grad=grad,
            grad_entropy=None,
            entropies=None,
        )
        grad_states, grad_weight = torch_kernels.backward(
            rows,
            weight,
            needs_states=ctx.needs_input_grad[0],
            needs_weight=ctx.needs_input_grad[1],
            vocab_chunk=8192,
        )
        assert grad_states is not None, "states always need one"
        return grad_states.to(states.dtype), grad_weight


class _OfStep(MemTracker):
    """Looks for the peak of the step alone: by module it takes the square of their number."""

    def _update_peak_stats(self, peak_state: Any) -> None:
        by_module, self.memory_tracking = self.memory_tracking, WeakIdKeyDictionary()
        super()._update_peak_stats(peak_state)
        self.memory_tracking = by_module


def _all_distinct(ids: Tensor, *, return_inverse: bool) -> tuple[Tensor, Tensor]:
    """Return what `unique` would if all ids were distinct. Those of fake tensors are unknown."""
    assert return_inverse
    return ids.flatten(), torch.arange(ids.numel()).view_as(ids)


class StepTracker(_OfStep):
    """Of one process."""


class ShardedStepTracker(_OfStep, FSDPMemTracker):
    """Of one of several ranks."""


class FakePolicy(Policy):
    """A policy that takes its model's logits on trust: fake numbers cannot be compared."""

    def _check_logits(self, dtype: torch.dtype) -> None:
        pass

    def _score_all(self, ids: Tensor) -> tuple[Tensor]:
        states = self._states(ids, None, self.compute.dtype).flatten(0, 1)
        return (Head.apply(states, self._head),)  # type: ignore[no-untyped-call] # torch's

    def peak_bytes(self, tokens: int, state: OptimizerState) -> int:
        """Return the most bytes that there are in a step of two micro-batches."""
        parameters = self.parameters()
        shards = {name: sharding.local_parameter(tensor) for name, tensor in parameters.items()}
        if self._root is None:
            tracker: StepTracker | ShardedStepTracker = StepTracker()
            tracker.track_external(self.model, *parameters.values())
        else:
            tracker = ShardedStepTracker(self._root)
        ids = torch.zeros((1, tokens), dtype=torch.int64)
        with (
            tracker,
            mock.patch.object(Tensor, "unique", _all_distinct),
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("ignore", message="Expected a tensor or a traceable wrapper")
            optimizer = KINDS[state](shards)
            for _ in range(2):  # in the second, gradients are there already
                self._compute(self._score_all, ids)[0].sum().backward()
                tracker.reset_mod_stats()
            for name, shard in shards.items():
                gradient = parameters[name].grad
                shard.grad = None if gradient is None else sharding.local(gradient)
            if (
                state != "8bit"
            ):  # eager here, which holds copies of its largest weight; else compiled
                optimizer.step(learning_rate=1e-6, betas=(0.9, 0.95), weight_decay=0.0)
            self.round()
        (found,) = tracker.get_tracker_snapshot("peak").values()
        return int(max(found.values()))  # of which one is the sum


def peak_bytes(
    config: Any,
    weights: Mapping[str, Tensor],
    *,
    tokens: int,
    dtype: torch.dtype,
    state: OptimizerState,
    has_checkpointing: bool,
    num_ranks: int = 1,
) -> int:
    """Return the most bytes of tensors that there are in a step of two micro-batches.

    Args:
        config: of the model, by transformers.
        weights: its weights by name, made when they are asked for.
        tokens: of a micro-batch, in one row.
        dtype: that is computed in.
        state: of the optimizer.
        has_checkpointing: whether layers are computed again.
        num_ranks: processes that it is cut up over.
    """
    if state == "8bit":
        for is_signed in (True, False):  # tables are kept, and must have memory
            code_values(is_signed=is_signed, device=torch.device("cpu"))
    ranks = ALONE
    if num_ranks > 1:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
        mesh = init_device_mesh("cpu", (num_ranks,))
        ranks = Ranks(rank=0, size=num_ranks, mesh=mesh)
    try:
        with tempfile.TemporaryDirectory() as directory, FakeTensorMode(allow_non_fake_inputs=True):
            config.save_pretrained(directory)
            compute = Compute(
                device=torch.device("cpu"),
                dtype=dtype,
                packs=False,
                gradient_checkpointing=has_checkpointing,
                ranks=ranks,
            )
            policy = FakePolicy(ModelSource(model_dir=Path(directory), tensors=weights), compute)
            return policy.peak_bytes(tokens, state)
    finally:
        if num_ranks > 1:
            dist.destroy_process_group()
