"""The sections that say what is learned from a batch, and under which conditions.

As in schema.py, the text under a field is its help, unit first.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from echo.config.fields import Betas, Seconds
from echo.config.section import Inherited, Section


class OptimizerSection(Section):
    """AdamW: Adam with decoupled weight decay."""

    learning_rate: float = Field(default=1e-6, gt=0)
    """Step size after the warm-up, constant."""
    warmup_steps: int = Field(default=10, ge=0)
    """Optimizer steps over which the learning rate rises linearly."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    betas: Betas = (0.9, 0.95)
    """Decay of the first moment and of the second."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Norm to which the gradient is clipped."""


class ReferenceSection(Section):
    """A frozen policy that the one being trained is pulled towards."""

    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the divergence from it, per token; 0 is off."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """How the divergence is estimated from a token's two log-probabilities."""
    name: str | None = Field(default=None, min_length=1)
    """Directory or hub id; unset: the weights that the run started from."""


class DelaysSection(Section):
    """Delays injected on purpose, as between continents; for experiments (HeteroRL)."""

    roles = ("learner", "worker")
    law: Inherited[Literal["off", "constant", "lognormal", "weibull", "exponential"]] = "off"
    """How delays are spread; constant is always upper_s."""
    directions: Inherited[Literal["both", "weights", "rollouts"]] = "both"
    """Which way: weights to the workers, rollouts to the learner."""
    lower_s: Inherited[Seconds] = Field(default=60.0, gt=0)
    """Least delay, and the law's lower quantile."""
    upper_s: Inherited[Seconds] = Field(default=1800.0, gt=0)
    """Largest delay, and the law's upper quantile."""
    paid_s: Inherited[Seconds] = Field(default=0.0, ge=0)
    """What the real transfer takes anyway; it is subtracted."""
    confidence: Inherited[float] = Field(default=0.995, gt=0, lt=1)
    """Probability of a delay between both quantiles."""
    speedup: Inherited[float] = Field(default=1.0, gt=0)
    """Emulated time: delays pass so many times faster; 600 makes three seconds of half an hour."""
