"""Float32 masters of a model whose own weights are 16 bits wide.

The model holds the masters rounded, as workers do: learner and sampler compute with the same
numbers, and no operation casts a weight again. Its gradients come in 16 bits, once per micro-batch,
and add up in float32 as those of the masters, which alone are trained, published and saved. Weights
that are not trained (the base of an adapter, a reference policy) have no master: 2 bytes per
parameter.

Shards need none (ranks/sharding.py): there each layer is rounded whenever it is put together.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn


class Masters:
    """The trained parameters of a model in float32, each with its gradient."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        """Round a float32 model in place; its buffers stay as they are.

        Args:
            model: what is to be trained already requires a gradient.
            dtype: that it computes in.
        """
        self._masters: dict[Tensor, nn.Parameter] = {}
        for parameter in model.parameters():
            if parameter.requires_grad:
                master = self._masters[parameter] = nn.Parameter(parameter.detach())
                # Of the master alone: hooks are out of sight of Python's collector, and one that
                # knew of all masters would keep them, and itself, forever.
                parameter.register_post_accumulate_grad_hook(partial(_add_up, master))
            parameter.data = parameter.data.to(dtype)

    def of(self, tensor: Tensor) -> Tensor:
        """Return the master of a parameter, or the tensor itself if it has none."""
        return self._masters.get(tensor, tensor)

    @torch.no_grad()
    def round(self) -> None:
        """Make the model's weights those of the masters, after these have changed."""
        for parameter, master in self._masters.items():
            parameter.copy_(master)


@torch.no_grad()
def _add_up(master: Tensor, parameter: Tensor) -> None:
    """Take over the gradient of one backward pass."""
    gradient, parameter.grad = parameter.grad, None  # or it would stay if memory runs out here
    assert gradient is not None, "torch calls this when there is one"
    if master.grad is None:
        master.grad = gradient.to(master.dtype)
    else:
        master.grad += gradient
