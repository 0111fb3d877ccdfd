"""The plain computation, as the reference of the kernels."""

from __future__ import annotations

import torch
from torch import Tensor


def linear_logprob_reference(
    hidden: Tensor, weight: Tensor, ids: Tensor, inv_temperature: float | Tensor = 1.0
) -> tuple[Tensor, Tensor]:
    """Return log-probability and entropy of each row by materialising all logits.

    It holds several [N, V] matrices and is differentiated by autograd.
    """
    scale = torch.as_tensor(inv_temperature, dtype=hidden.dtype, device=hidden.device)
    logprobs = torch.log_softmax((hidden @ weight.T) * scale.expand(len(ids))[:, None], dim=1)
    return logprobs.gather(1, ids[:, None]).squeeze(1), -(logprobs.exp() * logprobs).sum(1)
