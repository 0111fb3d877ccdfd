"""Float32 masters of a model whose own weights are 16 bits wide.

A master is the float32 copy of a trained weight. The model and the workers hold the same rounded
weights, so learner and sampler compute with the same numbers. The gradients of each micro-batch are
in 16 bits, and are added in float32 to the gradients of the masters. The masters are trained,
published and saved. Weights that are not trained (the base of an adapter, a reference policy) have
no master, and take 2 bytes per parameter.

A sharded model needs no masters, because FSDP rounds each gathered layer (ranks/sharding.py).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn


class Masters:
    """The trained parameters of a model in float32, each with its gradient."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Round a float32 model in place; keep its unrounded trained parameters as masters.

        Args:
            model: the model, whose trained parameters already require a gradient. Buffers are not
                rounded.
            dtype: the type that the model computes in.
        """
        self._masters: dict[Tensor, nn.Parameter] = {}
        for parameter in model.parameters():
            if parameter.requires_grad:
                master = self._masters[parameter] = nn.Parameter(parameter.detach())
                # The hook refers to one master alone. Python's collector cannot see hooks, so a
                # reference to all masters would form a cycle that is never freed.
                parameter.register_post_accumulate_grad_hook(partial(_add_up, master))
            parameter.data = parameter.data.to(dtype)

    def of(self, tensor: Tensor) -> Tensor:
        """Return the master of a tensor, or the tensor itself if no master exists."""
        return self._masters.get(tensor, tensor)

    @torch.no_grad()
    def round(self) -> None:
        """Round the masters into the model's weights.

        Call this method after each change of the masters.
        """
        if self._masters:
            # One kernel launch copies many tensors; otherwise each tensor would take a launch.
            torch._foreach_copy_(list(self._masters), list(self._masters.values()))


@torch.no_grad()
def _add_up(master: Tensor, parameter: Tensor) -> None:
    gradient, parameter.grad = parameter.grad, None  # dropped first, in case memory runs out below
    assert gradient is not None, "torch calls this when there is one"
    if master.grad is None:
        master.grad = gradient.to(master.dtype)
    else:
        master.grad += gradient
