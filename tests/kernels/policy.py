"""The policy kernel by itself, which production runs only within `linear_policy_loss`."""

from __future__ import annotations

from torch import Tensor

from echo.kernels.contract import BackendName, PolicyTerms, RatioClip
from echo.kernels.logprob import check_policy_rows, load_kernels


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
