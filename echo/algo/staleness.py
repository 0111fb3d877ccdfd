"""The adaptive staleness bound. The signals of each step raise or lower the bound.

Each step reports three signals of the distance between sampler and learner: the effective sample
size (ess), the mismatch (mismatch_kl), and the share of clipped tokens (clip_ratio). The signals
are smoothed. One bad signal lowers the bound. The bound may rise only if all signals are good:

  too high        ess < ess_low, or mismatch_kl > kl_high, or clip_ratio > clip_high
  may rise        ess > (1 + ess_low) / 2, mismatch_kl < kl_high / 2, clip_ratio < clip_high / 2,
                  and the rollouts were as old as the bound allows

If the bound is too high, it falls by 1. It falls by half if mismatch_kl, clip_ratio or 1 - ess is
more than twice its limit, where the limit of 1 - ess is 1 - ess_low. If the bound may rise in
`patience` steps in a row, it rises by 1. After each decision, no decision follows for `patience`
steps, since a decision acts only on rollouts that are granted later. The bound stays between the
limits `least` and `most`.

Source: additive increase and multiplicative decrease, as in TCP's congestion control.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlSettings:
    """The limits on the signals and on the staleness bound."""

    least: int
    """Smallest value of the bound in steps, >= 0."""
    most: int
    """Largest value of the bound in steps; at most the fixed bound on staleness."""
    ess_low: float = 0.8
    """If the effective sample size, as a share of the tokens, is below this value, the bound is too
    high.
    """
    kl_high: float = 0.05
    """If the mismatch of learner and sampler, in nats per token, is above this value, the bound is
    too high.
    """
    clip_high: float = 0.1
    """If the share of clipped tokens is above this value, the bound is too high."""
    patience: int = 5
    """Smallest number of steps between two decisions, >= 1. It is also the number of consecutive
    good steps before the bound rises.
    """
    smoothing: float = 0.7
    """Weight of all earlier steps in the smoothed signals, 0..1."""

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most:
            raise ValueError(
                f"least = {self.least}, most = {self.most}: must be 0 or more, in order"
            )
        if self.patience < 1 or not 0.0 <= self.smoothing < 1.0:
            raise ValueError(
                f"patience = {self.patience} must be at least 1, smoothing = {self.smoothing} must "
                "lie in 0..1"
            )


@dataclass(frozen=True, slots=True)
class Signals:
    """The signals of one step. A signal is None if it was not reported."""

    ess: float | None
    mismatch_kl: float | None
    clip_ratio: float | None
    staleness: int
    """Staleness of the oldest trained token, in steps."""


@dataclass(frozen=True, slots=True)
class BoundDecision:
    """A change of the staleness bound."""

    step: int
    before: int
    bound: int
    cause: str
    """Description of the reason, with the values of the signals."""


class StalenessController:
    """Raises and lowers the staleness bound according to the signals of each step."""

    def __init__(self, settings: ControlSettings) -> None:
        self.settings = settings
        self.bound = settings.most
        self._smoothed: dict[str, float] = {}
        self._num_good = 0
        self._quiet_until = 0

    def observe(self, step: int, signals: Signals) -> BoundDecision | None:
        """Process the signals of a step; return the change of the bound, or None for no change.

        Args:
            step: number of finished optimizer steps.
            signals: signals of the last of these steps.
        """
        for name in ("ess", "mismatch_kl", "clip_ratio"):
            self._smooth(name, getattr(signals, name))
        excess, cause = self._excess()
        is_used = signals.staleness >= self.bound
        self._num_good = self._num_good + 1 if is_used and excess < 0.5 else 0
        if step < self._quiet_until or not self._smoothed:
            return None
        if excess > 1.0:
            lower = self.bound - 1 if excess <= 2.0 else self.bound // 2
            return self._decide(step, max(self.settings.least, lower), cause)
        if self._num_good >= self.settings.patience:
            values = ", ".join(f"{name} {value:.3g}" for name, value in self._smoothed.items())
            return self._decide(step, min(self.settings.most, self.bound + 1), f"room: {values}")
        return None

    def _smooth(self, name: str, value: float | None) -> None:
        if value is None or not math.isfinite(value):
            return
        weight = self.settings.smoothing if name in self._smoothed else 0.0
        self._smoothed[name] = weight * self._smoothed.get(name, 0.0) + (1.0 - weight) * value

    def _excess(self) -> tuple[float, str]:
        """Return (worst signal as a multiple of its limit, description of the signal).

        The signal ess counts as 1 - ess, and its limit as 1 - ess_low.
        """
        settings, smoothed = self.settings, self._smoothed
        # This is 0 at ess = 1: like the other two signals, it is 0 if sampler and learner agree.
        loss = 1.0 - smoothed.get("ess", 1.0)
        found = [
            (_ratio(loss, 1.0 - settings.ess_low), "ess", "below", settings.ess_low),
            (_ratio(smoothed.get("mismatch_kl", 0.0), settings.kl_high), "mismatch_kl", "above",
             settings.kl_high),
            (_ratio(smoothed.get("clip_ratio", 0.0), settings.clip_high), "clip_ratio", "above",
             settings.clip_high),
        ]  # fmt: skip
        excess, name, side, limit = max(found)
        return excess, f"{name} {smoothed.get(name, 0.0):.3g} {side} {limit:g}"

    def _decide(self, step: int, bound: int, cause: str) -> BoundDecision | None:
        self._num_good = 0
        if bound == self.bound:
            return None
        decision = BoundDecision(step, self.bound, bound, cause)
        self.bound = bound
        self._quiet_until = step + self.settings.patience
        return decision


def _ratio(value: float, limit: float) -> float:
    if limit > 0.0:
        return value / limit
    return math.inf if value > 0.0 else 0.0
