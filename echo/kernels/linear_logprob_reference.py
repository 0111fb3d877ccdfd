"""The obvious way to linear_logprob's results: the oracle of its tests and its bench's baseline.

It holds several [N, V] matrices and is differentiated by autograd; nothing else may use it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from echo.kernels.logprob import IGNORE_INDEX


def linear_logprob_reference(
    hidden: Tensor, weight: Tensor, ids: Tensor, inv_temperature: float | Tensor = 1.0
) -> tuple[Tensor, Tensor]:
    """Return log-probability and entropy of each row by materialising all logits.

    Args:
        hidden: [N, D].
        weight: [V, D].
        ids: [N] integer, IGNORE_INDEX for rows that are not scored.
        inv_temperature: one number or [N].

    Returns:
        Two [N] tensors in nats and in the inputs' dtype, both differentiable, 0 on ignored rows.
    """
    scale = torch.as_tensor(inv_temperature, dtype=hidden.dtype, device=hidden.device)
    logprobs = torch.log_softmax((hidden @ weight.T) * scale.expand(len(ids))[:, None], dim=1)
    is_scored = ids != IGNORE_INDEX
    picked = logprobs.gather(1, torch.where(is_scored, ids, 0)[:, None]).squeeze(1)
    entropies = -(logprobs.exp() * logprobs).sum(1)
    return torch.where(is_scored, picked, 0.0), torch.where(is_scored, entropies, 0.0)
