"""A pull towards a frozen reference policy, around any loss.

Shapes: B rollouts of this micro-batch, T completion tokens (padded), N trained tokens of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from echo.algo.kl import kl_k1, kl_k2, kl_k3
from echo.algo.loss import (
    Loss,
    LossInputs,
    LossNeeds,
    LossOutput,
    aggregate,
    masked_log_ratio,
    needs_of,
    required,
)
from echo.core.errors import ConfigError

KlEstimator = Literal["k1", "k2", "k3"]
KL_ESTIMATORS = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}

MAX_KL_WEIGHT = 2.0
"""Bound on the importance weight of a token's penalty, the cap of truncated importance sampling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceKlLoss:
    """A loss plus c KL(learner || reference), estimated on the batch's own tokens.

    loss = inner + c sum_t w_t k_t / num_tokens, with k_t one of k1, k2, k3 of learner and reference
    (kl.py) and w_t = min(pi(t) / mu(t), 2), learner over sampler: tokens are the sampler's, so
    without the weight it is not the learner's divergence that is estimated. The weight carries the
    gradient for k1 and k3, and none for k2. So below the cap all three pull the same way: their
    gradient has the expectation of w log(pi / ref) grad log pi, which is that of the divergence.

    Every rollout is trained on, whatever its advantage: the pull acts everywhere.

    Source: k3 as a penalty: GRPO, arXiv:2402.03300, eq. 4; the estimators: J. Schulman (2020);
    with importance weights: slime's unbiased KL.
    Differs from the paper: the mean is over the batch's tokens; the weights, without which neither
    divergence is estimated from stale tokens.
    Limits: tokens whose weight is at the cap are pulled with the gradient of k2 or not at all.
    """

    loss: Loss
    """The loss inside, masks included; what they leave out is still pulled."""
    coef: float
    """c, > 0."""
    estimator: KlEstimator = "k3"

    def __post_init__(self) -> None:
        if self.estimator not in KL_ESTIMATORS:
            raise ConfigError(
                f"reference.kl_estimator = {self.estimator!r}: must be one of "
                f"{', '.join(KL_ESTIMATORS)}"
            )
        if not 0.0 < self.coef < float("inf"):
            raise ConfigError(f"reference.kl_coef = {self.coef}: must be above 0 and finite")

    @property
    def needs(self) -> LossNeeds:
        """What the loss inside needs, every rollout, and the reference's log-probabilities."""
        return replace(needs_of(self.loss), every_rollout=True, reference_logprobs=True)

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the sum of both, and the mean penalty of a token (`kl/reference`)."""
        reference = required(inputs.reference_logprobs, "reference_logprobs", self)
        output = self.loss(inputs)
        penalties = self._penalties(inputs, reference)
        return LossOutput(
            loss=output.loss + self.coef * aggregate(penalties, inputs, "token_mean"),
            token_counts=output.token_counts | {"kl/reference": penalties.detach().sum()},
        )

    def _penalties(self, inputs: LossInputs, reference: Tensor) -> Tensor:
        """Return [B, T] w_t k_t, 0 outside the mask."""
        mask = inputs.completion_mask
        learner = torch.where(mask, inputs.learner_logprobs, 0.0)
        values = KL_ESTIMATORS[self.estimator](learner, torch.where(mask, reference, 0.0))
        weights = masked_log_ratio(inputs).exp().clamp(max=MAX_KL_WEIGHT)
        return values * (weights.detach() if self.estimator == "k2" else weights)
