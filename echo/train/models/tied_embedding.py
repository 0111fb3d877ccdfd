"""The gradient of an embedding whose weight is also the LM head's.

Autograd makes the gradient of a lookup as large as the whole weight, with zeros in all rows that
were not looked up, and then adds it to the gradient of the LM head. With a large vocabulary a step
of a small model on a CPU spends time and memory on that. Here only the rows that were looked up are
added, in place, to the gradient that the weight already has.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def add_rows_in_place(model: Any, trained: Callable[[Tensor], Tensor]) -> None:
    """Have the backward pass of a model's lookup add rows to the gradient of the trained weight.

    Nothing changes if the embedding and the LM head have different weights, if the weight is not
    trained, or if the embedding computes anything besides the lookup.

    Args:
        model: a model of transformers that is not sharded, on a CPU. A GPU would add the rows in an
            order that varies, so its gradients could not be repeated bit by bit.
        trained: returns the parameter whose gradient the optimizer reads: the weight itself, or
            the float32 master of the weight.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if type(embedding) is not nn.Embedding or not embedding.weight.requires_grad:
        return
    if embedding.weight is head.weight and embedding.max_norm is None:
        embedding.register_forward_hook(partial(_look_up, trained(embedding.weight)))


def _look_up(parameter: Tensor, embedding: nn.Embedding, ids: tuple[Tensor], found: Tensor) -> Any:
    """Return the rows that were looked up, with a gradient of their own."""
    if not found.requires_grad:
        return None
    rows = found.detach().requires_grad_()
    rows.register_hook(partial(_add_rows, parameter, ids[0], embedding.padding_idx))
    return rows


@torch.no_grad()
def _add_rows(parameter: Tensor, ids: Tensor, padding_idx: int | None, gradient: Tensor) -> None:
    """Add the gradient of each row to the gradient of the parameter; padding has none."""
    if parameter.grad is None:  # the LM head usually has its gradient by now
        parameter.grad = torch.zeros_like(parameter)
    gradient = gradient.to(parameter.dtype)
    if padding_idx is not None:
        gradient = gradient.masked_fill((ids == padding_idx)[..., None], 0.0)
    parameter.grad.index_add_(0, ids.flatten(), gradient.flatten(0, -2))
