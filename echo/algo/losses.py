"""Policy losses: pure functions of log-probabilities and advantages, registered by name.

A loss sees one micro-batch, but divides by counts of the whole batch that the caller gives. So the
gradient does not depend on how the batch is cut, and rollouts without an advantage may be left out
exactly: they count in the normaliser and contribute nothing else.

Shapes: B rollouts of this micro-batch, T completion tokens (padded).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from echo.errors import ConfigError

MAX_LOG_RATIO = 20.0
"""Bound on |log ratio| before exp, as in verl: finite in float32 and far past every clip."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossInputs:
    """One micro-batch as a loss sees it."""

    learner_logprobs: Tensor
    """[B, T] nats under the policy being trained; carries the gradient."""
    sampler_logprobs: Tensor
    """[B, T] nats under the policy that sampled; data."""
    advantages: Tensor
    """[B] one per rollout."""
    completion_mask: Tensor
    """[B, T] bool, True where a token is trained; what other positions hold does not matter."""
    num_tokens: int
    """Trained tokens of the whole batch, rollouts that were left out included; >= 1."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossOutput:
    """What a loss returns."""

    loss: Tensor
    """Scalar; the sum over micro-batches is the loss of the batch."""
    token_counts: dict[str, Tensor]
    """Scalars without gradient: how many trained tokens each metric's condition held for."""


Loss = Callable[[LossInputs], LossOutput]


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpoLoss:
    """The clipped surrogate of PPO on token ratios against the policy that sampled.

    r_t = pi(t) / mu(t), learner over sampler;  l_t = -min(r_t A, clip(r_t, 1 - low, 1 + high) A);
    for A < 0 with dual clip c also l_t <= -c A;  loss = sum_t l_t / num_tokens.

    Source: GRPO, arXiv:2402.03300; clip-higher and token mean: DAPO, arXiv:2503.14476; dual clip:
    arXiv:1912.09729.
    Differs from the paper: the ratio is taken against the sampler's own log-probabilities, several
    versions old, so it is the importance weight too and no other correction may be multiplied in;
    no KL term; |log r| is limited to 20.
    """

    clip_low: float = 0.2
    """Range below 1 in which a ratio still has a gradient, 0..1."""
    clip_high: float = 0.28
    """Range above 1, >= 0."""
    dual_clip: float | None = 3.0
    """Bound on the ratio where the advantage is negative, > 1 + clip_high; None for no bound."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.clip_low <= 1.0:
            raise ConfigError(f"loss.clip_low = {self.clip_low}: must lie in 0..1")
        if not 0.0 <= self.clip_high < float("inf"):
            raise ConfigError(f"loss.clip_high = {self.clip_high}: must be 0 or more, and finite")
        if self.dual_clip is not None and not 1.0 + self.clip_high < self.dual_clip < float("inf"):
            raise ConfigError(
                f"loss.dual_clip = {self.dual_clip}: must be above 1 + loss.clip_high = "
                f"{1.0 + self.clip_high}; use none to switch it off"
            )

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Return the loss of one micro-batch and how often each clip was active.

        `clip_ratio/low` counts A < 0 and r < 1 - low, `clip_ratio/high` A > 0 and r > 1 + high,
        `clip_ratio/dual` A < 0 and r > c; these tokens have no gradient, `clip_ratio/mean` counts
        them all.
        """
        mask = inputs.completion_mask
        advantages = inputs.advantages[:, None]
        # Selected, not multiplied: whatever stands in padding, NaN included, leaves no trace.
        log_ratio = torch.where(mask, inputs.learner_logprobs - inputs.sampler_logprobs, 0.0)
        ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        clipped = ratio.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        losses = -torch.minimum(ratio * advantages, clipped * advantages)
        is_negative = advantages < 0
        is_dual = torch.zeros_like(mask)
        if self.dual_clip is not None:
            is_dual = mask & is_negative & (ratio > self.dual_clip)
            losses = torch.where(is_dual, -self.dual_clip * advantages, losses)
        is_low = mask & is_negative & (ratio < 1.0 - self.clip_low)
        is_high = mask & (advantages > 0) & (ratio > 1.0 + self.clip_high)
        return LossOutput(
            loss=torch.where(mask, losses, 0.0).sum() / inputs.num_tokens,
            token_counts={
                "clip_ratio/low": is_low.sum(),
                "clip_ratio/high": is_high.sum(),
                "clip_ratio/dual": is_dual.sum(),
                "clip_ratio/mean": (is_low | is_high | is_dual).sum(),
            },
        )


LOSSES: Mapping[str, Callable[..., Loss]] = {"grpo": GrpoLoss}
"""Every loss by its name in the field; keyword options are its fields."""


def make_loss(kind: str, **options: Any) -> Loss:
    """Return the loss registered as `kind`, set up with `options`.

    Raises:
        ConfigError: if there is no such loss (the nearest name is given) or an option is unusable.
    """
    if kind not in LOSSES:
        nearest = difflib.get_close_matches(kind, LOSSES, n=1, cutoff=0.0)
        raise ConfigError(
            f"loss.kind = {kind!r}: no such loss; did you mean {nearest[0]!r}? "
            f"Known: {', '.join(sorted(LOSSES))}"
        )
    return LOSSES[kind](**options)
