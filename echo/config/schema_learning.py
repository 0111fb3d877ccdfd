"""The sections that say what is learned from a batch, and under which conditions.

As in schema.py, the text under a field is its help, unit first.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from echo.config.fields import Betas
from echo.config.section import Section


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
