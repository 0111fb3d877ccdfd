"""Estimates of a divergence between two policies from the tokens that were sampled.

Each takes the log-probabilities of the same tokens under two policies and returns one estimate per
token. With tokens sampled from `logprobs`' policy p and r = other / p, all estimate KL(p || other):

    k1 = -log r             unbiased, can be negative, noisy
    k2 = (log r)^2 / 2      biased, never negative, small variance
    k3 = r - 1 - log r      unbiased, never negative; heavy-tailed where r is large

As penalties differentiated through `logprobs` they differ: the gradient of k1 has expectation 0 and
pulls nowhere, that of k2 is the gradient of KL(p || other), that of k3 the gradient of the other
direction, KL(other || p).

Source: J. Schulman, "Approximating KL Divergence" (2020).
Differs from the source: log r is limited in k3, so that one token cannot make a sum infinite.
Limits: tokens must come from `logprobs`' own policy. Where they are several versions old, multiply
by the importance ratio, or read the result as a distance on the tokens at hand.
"""

from __future__ import annotations

from torch import Tensor

MIN_LOG_RATIO = -20.0
MAX_LOG_RATIO = 5.0
"""Bounds on log r in k3: e^5 caps one token at 142 nats. Unbounded, it reached 3e6 in one of the
runs published with GEPO."""


def kl_k1(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """Return log p - log other, in nats, in the shape of the arguments."""
    return logprobs - other_logprobs


def kl_k2(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """Return half the squared log-ratio, in nats squared, in the shape of the arguments."""
    return (other_logprobs - logprobs).square() / 2


def kl_k3(logprobs: Tensor, other_logprobs: Tensor) -> Tensor:
    """Return r - 1 - log r with log r limited to -20..5, in the shape of the arguments."""
    log_ratio = (other_logprobs - logprobs).clamp(MIN_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio.expm1() - log_ratio
