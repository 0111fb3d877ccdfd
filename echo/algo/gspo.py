"""Group sequence policy optimisation: one ratio per rollout.

Shapes: B rollouts of this micro-batch, T completion tokens (padded).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from echo.algo.loss import LossInputs, LossOutput, masked_log_ratio, sequence_mean
from echo.algo.ppo_losses import check_clips, clipped_surrogate


def count_tokens(clips: dict[str, Tensor], mask: Tensor) -> dict[str, Tensor]:
    """Return how many trained tokens lie in the rollouts that each [B] clip marks."""
    lengths = mask.sum(1)
    return {name: (where * lengths).sum() for name, where in clips.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class GspoLoss:
    """The clipped surrogate on the geometric mean of a rollout's token ratios.

    s_i = exp(mean_t log(pi(t) / mu(t)));  l_i = -min(s_i A_i, clip(s_i, 1 - low, 1 + high) A_i);
    loss = sum_i l_i / num_rollouts.

    Source: GSPO, arXiv:2507.18071, eq. 5 to 7.
    Differs from the paper: the ratio is taken against the sampler, several versions old, so the
    range is wider than its 3e-4 / 4e-4 (section 5.1), which clip most of such a batch; the limit
    of 20 on |log r| holds token by token, before the mean.
    Limits: the mean over a rollout moves far less than a token does, so ranges made for tokens
    (.2 / .28) leave no trust region under staleness. The default was the best of the three on
    completions of 24 tokens (bench/bench_staleness.py); the longer they are, the less it acts.
    """

    clip_low: float | None = 0.02
    """Range below 1 in which a ratio still has a gradient, 0..1; None for no bound."""
    clip_high: float | None = 0.03
    """Range above 1, >= 0; None for no bound."""

    def __post_init__(self) -> None:
        check_clips(self.clip_low, self.clip_high)

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the loss of one micro-batch and the tokens of clipped rollouts."""
        mask = inputs.completion_mask
        has_tokens = mask.any(1)
        losses, clips = clipped_surrogate(
            sequence_mean(masked_log_ratio(inputs), mask).exp(),
            inputs.advantages,
            has_tokens,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
        )
        return LossOutput(
            loss=losses.where(has_tokens, 0.0).sum() / inputs.num_rollouts,
            token_counts=count_tokens(clips, mask),
        )
