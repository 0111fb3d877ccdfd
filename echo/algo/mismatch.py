"""How far the policy that sampled is from the policy being trained, in four numbers."""

from __future__ import annotations

from torch import Tensor


def mismatch_metrics(learner_logprobs: Tensor, sampler_logprobs: Tensor) -> dict[str, float]:
    """Return the statistics of the importance ratio r = pi / mu over a batch of tokens.

    is_ratio/mean and is_ratio/max of r; ess = (sum r)^2 / (N sum r^2), the share of the tokens that
    an on-policy sample of equal worth would have, 1 when all ratios are equal; mismatch_kl =
    mean(r - 1 - log r), an unbiased and never negative estimate of KL(mu || pi) in nats per token.

    Args:
        learner_logprobs: [N] nats under the policy being trained; N >= 1.
        sampler_logprobs: [N] nats under the policy that sampled.
    Source: the estimator k3 of J. Schulman, "Approximating KL Divergence" (2020); Kish's effective
    sample size.
    """
    log_ratio = (learner_logprobs.detach() - sampler_logprobs).double()
    ratio = log_ratio.exp()
    return {
        "is_ratio/mean": float(ratio.mean()),
        "is_ratio/max": float(ratio.max()),
        "ess": float(ratio.mean().square() / ratio.square().mean()),
        "mismatch_kl": float((log_ratio.expm1() - log_ratio).mean()),
    }
