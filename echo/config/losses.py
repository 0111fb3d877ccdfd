"""Defines the keys of [loss]: one class for each loss, with the loss's parameters.

The losses in echo/algo document the effect of each key on the gradient. The keys are repeated here,
because a relay has no torch and cannot import echo/algo. A test compares names and defaults.

Truncated sampling. With top-p, top-k or min-p a worker computes log-probabilities in the truncated
and renormalised distribution. For each token, a rollout contains the ids from which the token was
drawn. So the learner can compute in the same distribution. If the set of these ids is too large to
send (core/token_sets.py), the learner scores the token in the whole distribution. Let Z be the
probability that truncation has kept. Then the token's ratio of learner to sampler is Z instead of
1, even if both have the same weights. With top-p, Z is between top_p and 1. With top-k and min-p, Z
is any value up to 1.

Many losses accept only ratios above a limit. `least_ratios` returns the limits of a loss. If a
limit is above Z, the loss learns nothing from such tokens with a negative advantage, or leaves out
their whole rollouts. So this loss gets no groups with missing token sets.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from echo.config.fields import OWN_KIND, Off, Section, kind_of

MAX_LIKELY_IDS = 1024
"""Largest number of likely ids of a token."""

ClipLow = Annotated[
    Annotated[float, Field(gt=0, le=1)] | Off,
    Field(description="Clip the ratio below 1 - clip_low; false is off."),
]
ScoreCentering = Annotated[
    int,
    Field(
        ge=0,
        le=MAX_LIKELY_IDS,
        description="How many of the sampler's most likely ids of each token center its score; "
        "workers send them. 32 is usual, 0 is off.",
    ),
]
ClipHigh = Annotated[
    Annotated[float, Field(gt=0)] | Off,
    Field(description="Clip the ratio above 1 + clip_high; false is off."),
]
DualClip = Annotated[
    Annotated[float, Field(gt=1)] | Off,
    Field(description="Largest ratio that counts where the advantage is negative; false is off."),
]
RATIO_UNDER_TOP_K = 0.9
"""The assumed value of Z (see the module) with top-k or min-p. A loss gets groups with missing
token sets only if the loss accepts this ratio. The value is a judgement, because Z has no lower
bound here. PPO's usual range of .2 includes the value. Ranges of a few percent exclude the value
and would clip every token."""

Aggregation = Annotated[
    Literal["token_mean", "sequence_mean"],
    Field(
        description="token_mean: every token has the same weight; sequence_mean: every rollout has."
    ),
]


class LossSection(Section):
    """The keys that all policy-gradient losses share."""

    normalize_by_std: bool = True
    """Divide advantages by their group's spread."""
    leave_one_out: bool = False
    """Compare a rollout's reward with the mean of the group's other rewards."""
    overlong_buffer_tokens: int = Field(default=0, ge=0)
    """Number of tokens before a completion's limit in which the reward falls. At the limit, it has
    fallen by 1. 0 means off."""
    overlong_filter: bool = False
    """Do not train on completions that were cut off at the limit."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of a bonus on the policy's entropy per token. The bonus applies to every rollout. 0
    means off."""

    @property
    def value_beta(self) -> float | None:
        """Return b. The baseline of a group's rewards r is b ln mean exp(r / b).

        If the result is None, the baseline is the mean reward.
        """
        return None

    def own_options(self) -> dict[str, Any]:
        """Return the parameters that only this loss has, under their names.

        `false` becomes None.
        """
        own = self.model_dump(exclude={"kind", *MaskedLossSection.model_fields})
        return {name: None if value is False else value for name, value in own.items()}

    def masks(self) -> dict[str, float | None]:
        """Return the thresholds beyond which rollouts are left out, under their names.

        None means off.
        """
        return {}

    def least_ratios(self) -> dict[str, float]:
        """Return the smallest ratios at which a rollout with a negative advantage has a gradient.

        A ratio is the learner's probability divided by the sampler's. Each limit of the loss gives
        one ratio, which is listed under the limit's key.
        """
        return {}


class MaskedLossSection(LossSection):
    """A loss with optional limits on ratios. Rollouts outside the limits are left out."""

    geometric_low: float | None = Field(default=None, ge=0, le=1)
    """Leave out rollouts whose tokens' ratios have a geometric mean below this value. The usual
    0.99 leaves out nearly every stale rollout."""
    geometric_high: float | None = Field(default=None, ge=1)
    """Leave out rollouts whose tokens' ratios have a geometric mean above this value."""
    veto: float | None = Field(default=None, ge=0, le=1)
    """Leave out rollouts with a token whose ratio is below this value; 1e-4 is usual."""
    opsm: float | None = Field(default=None, ge=0)
    """Leave out rollouts with a negative advantage and a mean log-ratio below minus this value, in
    nats per token; 1e-4 is usual."""

    def masks(self) -> dict[str, float | None]:
        """Return the four thresholds beyond which rollouts are left out. None means off."""
        own = MaskedLossSection.model_fields.keys() - LossSection.model_fields.keys()
        return self.model_dump(include=set(own))

    def least_ratios(self) -> dict[str, float]:
        """Return the smallest ratio that each active mask accepts, under the mask's key."""
        ends = {
            "geometric_low": self.geometric_low,
            "veto": self.veto,
            "opsm": None if self.opsm is None else math.exp(-self.opsm),
        }
        return {name: end for name, end in ends.items() if end is not None}


class ClippedSection(MaskedLossSection):
    """A loss that clips the ratio of each token or rollout."""

    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.28

    def least_ratios(self) -> dict[str, float]:
        """Return the smallest ratios that the masks and the clip accept, under their keys."""
        return super().least_ratios() | _end_of_clip(self.clip_low)


class GrpoSection(ClippedSection):
    """GRPO: a loss that clips the ratio of each token."""

    kind: Literal["grpo"]
    dual_clip: DualClip = 3.0
    aggregation: Aggregation = "token_mean"


class DrGrpoSection(ClippedSection):
    """Dr. GRPO: GRPO without division by rollout lengths and reward spreads."""

    kind: Literal["dr_grpo"]
    normalize_by_std: bool = False
    """Divide advantages by their group's spread. The paper does not divide."""
    dual_clip: DualClip = False


class DapoSection(ClippedSection):
    """DAPO: GRPO without the dual clip."""

    kind: Literal["dapo"]
    dual_clip: DualClip = False
    aggregation: Aggregation = "token_mean"


class GspoSection(ClippedSection):
    """GSPO: a loss that clips one ratio per rollout, not one per token."""

    kind: Literal["gspo"]
    clip_low: ClipLow = 0.02
    clip_high: ClipHigh = 0.05
    score_centering: ScoreCentering = 0


class GepoSection(LossSection):
    """GEPO: a loss that clips rollouts' ratios to the group's expected probability.

    The expectation is computed from the sampler's probabilities.
    """

    kind: Literal["gepo"]
    normalize_by_std: bool = False
    """Divide advantages by their group's spread. The paper does not divide."""
    clip_low: ClipLow = 0.2
    clip_high: ClipHigh = 0.2
    gate_kl: float | None = Field(default=None, gt=0)
    """KL in nats per token below which a rollout's own ratio is used (GEPO+ has 0.002)."""
    sampler_kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the divergence from the sampler."""

    def least_ratios(self) -> dict[str, float]:
        """Return the ratio at the lower end of the clip, under the clip's key."""
        return _end_of_clip(self.clip_low)


class OaplSection(MaskedLossSection):
    """OAPL: a loss that regresses the log-ratio of each rollout on its advantage."""

    kind: Literal["oapl"]
    normalize_by_std: Literal[False] = False
    """Only false, because this loss compares the log-ratio with unscaled rewards."""
    leave_one_out: Literal[False] = False
    """Only false, because this loss compares a reward with a value over the whole group."""
    beta: float = Field(default=1e-3, gt=0)
    """Reward per nat of a rollout's log-ratio. A smaller value moves the policy further."""
    baseline_beta: float = Field(default=1.0, gt=0)
    """The number b in the value b ln mean exp(r / b) of a group's rewards r. Each reward is
    compared with this value."""

    @property
    def value_beta(self) -> float | None:
        """Return the section's `baseline_beta`."""
        return self.baseline_beta

    def own_options(self) -> dict[str, Any]:
        """Return the loss's own parameter `beta`."""
        return {"beta": self.beta}


class CispoSection(MaskedLossSection):
    """CISPO: a loss that clips token weights and keeps every token's gradient."""

    kind: Literal["cispo"]
    clip_low: ClipLow = 1.0
    clip_high: ClipHigh = 4.0
    score_centering: ScoreCentering = 0


class DecoupledPpoSection(ClippedSection):
    """Decoupled PPO: a loss that clips the ratio to a proximal policy."""

    kind: Literal["decoupled_ppo"]
    dual_clip: DualClip = False
    proximal: Literal["recompute", "loglinear"] = "recompute"
    """The proximal policy. recompute: the learner's policy when the step begins; loglinear: an
    estimate of the policy one version earlier."""
    importance_weight: Literal["token_tis", "sequence_tis", "token_mis", "sequence_mis"] = (
        "token_tis"
    )
    """How the ratio of the proximal policy to the sampler is bounded. tis truncates the ratio and
    mis masks the ratio, per token (token) or per rollout (sequence)."""
    importance_cap: float = Field(default=2.0, ge=1)
    """Ratio above which the weight is truncated (tis) or becomes 0 (mis)."""

    def least_ratios(self) -> dict[str, float]:
        """Return the smallest ratios that the masks and the clip accept, under their keys.

        If `proximal` is "recompute", the clip is left out. In this case the clip compares the
        learner with itself, and truncated sampling does not change the ratio.
        """
        ends = super().least_ratios()
        if self.proximal == "recompute":
            ends.pop("clip_low", None)
        return ends


class M2poSection(MaskedLossSection):
    """M2PO: a loss that bounds the second moment of the batch's log-ratios."""

    kind: Literal["m2po"]
    max_second_moment: float = Field(default=0.04, ge=0)
    """Bound on the mean squared log-ratio."""

    def least_ratios(self) -> dict[str, float]:
        """Return the smallest ratios that the masks and the bound accept, under their keys.

        For the bound, return the ratio at which a single token reaches the bound.
        """
        end = math.exp(-math.sqrt(self.max_second_moment))
        return super().least_ratios() | {"max_second_moment": end}


class SapoSection(MaskedLossSection):
    """SAPO: a soft gate replaces the clip, so every token keeps some gradient."""

    kind: Literal["sapo"]
    tau_positive: float = Field(default=1.0, ge=1e-6)
    """How fast the gate closes for positive advantages."""
    tau_negative: float = Field(default=1.05, ge=1e-6)
    """How fast the gate closes for negative advantages."""
    aggregation: Aggregation = "sequence_mean"


class DppoTvSection(MaskedLossSection):
    """DPPO-TV: a loss that bounds the change of each token's probability."""

    kind: Literal["dppo_tv"]
    normalize_by_std: bool = False
    """Divide advantages by their group's spread. The paper does not divide."""
    max_probability_gap: float = Field(default=0.2, ge=0, le=1)
    """Largest change of a token's probability."""
    sampler_kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the distance to the sampler."""

    def least_ratios(self) -> dict[str, float]:
        """Return the smallest ratios that the masks and the bound accept, under their keys.

        For the bound, return the smallest ratio that the bound accepts if the sampler gives the
        token a probability of 1. For less probable tokens the bound accepts smaller ratios.
        """
        end = 1 - self.max_probability_gap
        return super().least_ratios() | {"max_probability_gap": end}


class OwnLossSection(MaskedLossSection):
    """A loss function of your own."""

    kind: str
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function."""

    def own_options(self) -> dict[str, Any]:
        """Return the user's table of options unchanged."""
        return self.options


LOSSES: Mapping[str, type[LossSection]] = {
    "grpo": GrpoSection,
    "dr_grpo": DrGrpoSection,
    "dapo": DapoSection,
    "gspo": GspoSection,
    "gepo": GepoSection,
    "oapl": OaplSection,
    "cispo": CispoSection,
    "decoupled_ppo": DecoupledPpoSection,
    "m2po": M2poSection,
    "sapo": SapoSection,
    "dppo_tv": DppoTvSection,
    OWN_KIND: OwnLossSection,
}
"""The section class of each kind of loss. All losses that an import path names have the kind
OWN_KIND."""

AnyLoss = Annotated[
    Annotated[GrpoSection, Tag("grpo")]
    | Annotated[DrGrpoSection, Tag("dr_grpo")]
    | Annotated[DapoSection, Tag("dapo")]
    | Annotated[GspoSection, Tag("gspo")]
    | Annotated[GepoSection, Tag("gepo")]
    | Annotated[OaplSection, Tag("oapl")]
    | Annotated[CispoSection, Tag("cispo")]
    | Annotated[DecoupledPpoSection, Tag("decoupled_ppo")]
    | Annotated[M2poSection, Tag("m2po")]
    | Annotated[SapoSection, Tag("sapo")]
    | Annotated[DppoTvSection, Tag("dppo_tv")]
    | Annotated[OwnLossSection, Tag(OWN_KIND)],
    Discriminator(kind_of),
]


def _end_of_clip(clip_low: float | Literal[False]) -> dict[str, float]:
    return {} if clip_low is False else {"clip_low": 1 - clip_low}
