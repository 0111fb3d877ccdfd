"""References for the kernels: the obvious way, and the policy kernel by itself."""

from __future__ import annotations

import torch
from torch import Tensor

from echo.kernels.contract import BackendName, PolicyTerms, RatioClip
from echo.kernels.logprob import IGNORE_INDEX, check_policy_rows, load_kernels


def linear_logprob_reference(
    hidden: Tensor, weight: Tensor, ids: Tensor, inv_temperature: float | Tensor = 1.0
) -> tuple[Tensor, Tensor]:
    """Return log-probability and entropy of each row by materialising all logits.

    It holds several [N, V] matrices and is differentiated by autograd; 0 on ignored rows.
    """
    scale = torch.as_tensor(inv_temperature, dtype=hidden.dtype, device=hidden.device)
    logprobs = torch.log_softmax((hidden @ weight.T) * scale.expand(len(ids))[:, None], dim=1)
    is_scored = ids != IGNORE_INDEX
    picked = logprobs.gather(1, torch.where(is_scored, ids, 0)[:, None]).squeeze(1)
    entropies = -(logprobs.exp() * logprobs).sum(1)
    return torch.where(is_scored, picked, 0.0), torch.where(is_scored, entropies, 0.0)


def policy_coefficient(
    logprobs: Tensor,
    sampler_logprobs: Tensor,
    advantages: Tensor,
    clip: RatioClip,
    *,
    backend: BackendName = "auto",
) -> PolicyTerms:
    """Return each token's loss, its derivative by the log-probability, and the ratio."""
    policy = check_policy_rows(sampler_logprobs, advantages, clip, like=logprobs)
    detached = logprobs.detach().contiguous()
    return load_kernels(backend, detached).policy_terms(detached, policy)
