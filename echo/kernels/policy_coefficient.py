"""The policy loss of single tokens with its derivative: GRPO's ratio, clip-higher and dual clip.

With r = exp(learner logprob - sampler logprob), where the log ratio is bounded by
RatioClip.MAX_LOG_RATIO, and advantage A of the token's rollout:

    l = -min(r A, clip(r, 1 - low, 1 + high) A);   for A < 0 with dual clip c also  l <= -c A.

    coefficient = dl / d logprob = -r A, or 0 where a clip is active: where A < 0 and r < 1 - low,
    A > 0 and r > 1 + high, A < 0 and r > c, or |log r| > MAX_LOG_RATIO. On a bound itself, as in
    PyTorch's clamp, the gradient flows.

Contract: this is the loss of echo.algo.ppo_losses.GrpoLoss before its mask and its normaliser. The
caller leaves masked tokens out and weighs the sum with 1 / (tokens of the whole batch). A NaN comes
out as a NaN, never as a clipped token.

The derivative needs nothing but the token's own log-probability, so a kernel that has just computed
this can give both at once (linear_policy_loss). Losses on whole rollouts or groups (GSPO, GEPO)
need their sums first and stay with autograd.

Source: GRPO, arXiv:2402.03300; DAPO, arXiv:2503.14476; dual clip, arXiv:1912.09729.
"""

from __future__ import annotations

from torch import Tensor

from echo.kernels.contract import PolicyRows, RatioClip


def check_policy_rows(
    sampler_logprobs: Tensor, advantages: Tensor, clip: RatioClip, *, like: Tensor
) -> PolicyRows:
    """Return the rows in the dtype of `like` [N], as constants.

    Raises:
        ValueError: if a shape differs from that of `like`.
    """
    for name, values in (("sampler_logprobs", sampler_logprobs), ("advantages", advantages)):
        if values.shape != like.shape:
            raise ValueError(
                f"{name} has shape {list(values.shape)}, expected {list(like.shape)}: one per token"
            )
    sampler_logprobs = sampler_logprobs.detach().to(like.dtype).contiguous()
    return PolicyRows(sampler_logprobs, advantages.detach().to(like.dtype).contiguous(), clip)
