"""The sections that say what is learned from a batch, and under which conditions.

As in schema.py, the text under a field is its help, unit first.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from echo.config.fields import Off, Seconds
from echo.config.losses import LossKind
from echo.config.section import Section


class LossSection(Section):
    """The policy-gradient loss."""

    kind: LossKind
    """grpo, dr_grpo, dapo, gspo, gepo, cispo, decoupled_ppo, m2po, sapo, dppo_tv, or your own."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of a loss of your own, "package.module:function"."""
    normalize_by_std: bool | None = None
    """Divide advantages by their group's spread; unset: yes, but for dr_grpo, gepo, dppo_tv."""
    leave_one_out: bool = False
    """Leave a rollout's own reward out of the mean it is compared with."""
    overlong_buffer_tokens: int = Field(default=0, ge=0)
    """Tokens before the limit over which rewards fall by up to 1; 0 is off."""
    overlong_filter: bool = False
    """Do not train on completions cut off at the limit."""
    clip_low: Annotated[float, Field(gt=0, le=1)] | Off | None = None
    """Clip the ratio below 1 - clip_low; unset: 0.2 (gspo 0.02, cispo 1); false is off."""
    clip_high: Annotated[float, Field(gt=0)] | Off | None = None
    """Clip above 1 + clip_high; unset: 0.28 (gepo 0.2, gspo 0.03, cispo 4); false is off."""
    dual_clip: Annotated[float, Field(gt=1)] | Off | None = None
    """Bound on the ratio where the advantage is negative; unset: grpo 3, else off; false is off."""
    aggregation: Literal["token_mean", "sequence_mean"] | None = None
    """Mean over tokens, or over rollouts; unset: token_mean (sapo sequence_mean)."""
    gate_kl: float | None = Field(default=None, gt=0)
    """gepo: KL in nats per token below which a rollout's own ratio is used (GEPO+ has 0.002)."""
    sampler_kl_coef: float | None = Field(default=None, ge=0)
    """gepo, dppo_tv: weight of the distance to the sampler; unset: 0."""
    proximal: Literal["recompute", "loglinear"] | None = None
    """decoupled_ppo: where the proximal policy comes from; unset: recompute."""
    importance_weight: Literal["token_tis", "sequence_tis", "token_mis", "sequence_mis"] | None = (
        None
    )
    """decoupled_ppo: how proximal / sampler is bounded; unset: token_tis."""
    importance_cap: float | None = Field(default=None, ge=1)
    """decoupled_ppo: ratio at which the weight is cut or drops; unset: 2."""
    max_second_moment: float | None = Field(default=None, ge=0)
    """m2po: bound on the mean squared log-ratio; unset: 0.04."""
    tau_positive: float | None = Field(default=None, gt=0)
    """sapo: how fast the gate closes for positive advantages; unset: 1."""
    tau_negative: float | None = Field(default=None, gt=0)
    """sapo: the same for negative ones; unset: 1.05."""
    max_probability_gap: float | None = Field(default=None, ge=0, le=1)
    """dppo_tv: largest change of a token's probability; unset: 0.2."""
    geometric_low: float | None = Field(default=None, ge=0, le=1)
    """Leave out rollouts with a geometric mean ratio below; drops nearly all under staleness."""
    geometric_high: float | None = Field(default=None, ge=1)
    """The same above."""
    veto: float | None = Field(default=None, ge=0, le=1)
    """Leave out rollouts with a token whose ratio is below; 1e-4 is usual."""
    opsm: float | None = Field(default=None, ge=0)
    """Leave out bad rollouts further off-policy than this, nats per token; 1e-4 is usual."""


class OptimizerSection(Section):
    """The optimizer."""

    kind: Literal["adamw"] = "adamw"
    """adamw: Adam with decoupled weight decay."""
    learning_rate: float = Field(default=1e-6, gt=0)
    """Step size after the warm-up, constant."""
    warmup_steps: int = Field(default=10, ge=0)
    """Optimizer steps over which the learning rate rises linearly."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """Decay of the second moment."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the denominator of the update."""
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
    law: Literal["off", "constant", "lognormal", "weibull", "exponential"] = "off"
    """How delays are spread; constant is always upper_s."""
    directions: Literal["both", "weights", "rollouts"] = "both"
    """Which way: weights to the workers, rollouts to the learner."""
    lower_s: Seconds = Field(default=60.0, gt=0)
    """Least delay, and the law's lower quantile."""
    upper_s: Seconds = Field(default=1800.0, gt=0)
    """Largest delay, and the law's upper quantile."""
    paid_s: Seconds = Field(default=0.0, ge=0)
    """What the real transfer takes anyway; it is subtracted."""
    confidence: float = Field(default=0.995, gt=0, lt=1)
    """Probability of a delay between both quantiles."""
    speedup: float = Field(default=1.0, gt=0)
    """Emulated time: delays pass so many times faster; 600 makes three seconds of half an hour."""
