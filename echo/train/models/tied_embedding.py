"""The gradient of an embedding whose weight is also the weight of the LM head.

For a lookup, autograd makes a gradient as large as the whole weight. All rows that were not looked
up are zeros. Autograd then adds this gradient to the gradient of the LM head. With a large
vocabulary, a step of a small model on a CPU spends time and memory on these zeros. This module adds
only the rows that were looked up, in place, to the gradient that the weight already has. The sums
are the same, bit for bit.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn


def add_rows_in_place(model: Any) -> None:
    """Make the backward pass of a model's embedding add rows in place to the weight's gradient.

    Nothing changes if the embedding and the LM head have different weights, if the weight is not
    trained, or if the embedding computes more than the lookup.

    Args:
        model: a float32 model of transformers on a CPU that is not sharded. A GPU would add the
            rows in an order that varies, so its gradients could not be repeated bit by bit.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if type(embedding) is not nn.Embedding or not embedding.weight.requires_grad:
        return
    if embedding.weight is head.weight and embedding.max_norm is None:
        embedding.register_forward_hook(_look_up)


def _look_up(embedding: nn.Embedding, ids: tuple[Tensor], found: Tensor) -> Any:
    """Return the looked-up rows, detached from the weight.

    `_add_rows` gets the gradient of these rows. If no gradient is computed, return None.
    """
    if not found.requires_grad:
        return None
    rows = found.detach().requires_grad_()
    rows.register_hook(partial(_add_rows, embedding.weight, ids[0], embedding.padding_idx))
    return rows


@torch.no_grad()
def _add_rows(weight: Tensor, ids: Tensor, padding_idx: int | None, gradient: Tensor) -> None:
    """Add the gradient of each row that was looked up to the weight's gradient.

    Padding has no gradient.
    """
    if weight.grad is None:  # the LM head usually has its gradient by now
        weight.grad = torch.zeros_like(weight)
    if padding_idx is not None:
        gradient = gradient.masked_fill((ids == padding_idx)[..., None], 0.0)
    rows, places = ids.unique(return_inverse=True)
    sums = gradient.new_zeros(len(rows), gradient.shape[-1])
    sums.index_add_(0, places.flatten(), gradient.flatten(0, -2))
    weight.grad.index_add_(0, rows, sums)
