"""Delays as machines on different continents have them, injected into a run on purpose.

A delay is drawn per event and worker, from a law that is fitted to two quantiles: with confidence c
and alpha = (1 - c) / 2 it lies below `lower` with probability alpha and above `upper` with alpha.

    lognormal     mu = (ln lower + ln upper) / 2, sigma = (ln upper - ln lower) / (2 z),
                  z the standard normal's quantile at 1 - alpha
    weibull       shape k = ln(ln(1/alpha) / -ln(1 - alpha)) / ln(upper / lower),
                  scale = lower / (-ln(1 - alpha))^(1/k)
    exponential   one parameter only: mean = upper / ln(1/alpha), so the upper quantile is right
    constant      upper, always

What is injected is min(max(T - paid, lower), upper): `paid` is what the real transfer takes anyway.
"Up to 1800 s" is thus where a tail is cut off; typical delays are much smaller.

Every worker and direction has a seed of its own: in the published experiments all workers shared
one list of delays, so that they were late together.

Source: HeteroRL, arXiv:2508.17850, section 4 and its published code (lognormal, weibull).
Differs from the source: independent seeds, both directions; the exponential law, which the paper
names and the code lacks.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from dataclasses import dataclass
from statistics import NormalDist
from typing import Literal

DelayLaw = Literal["constant", "lognormal", "weibull", "exponential"]
Direction = Literal["weights", "rollouts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DelaySettings:
    """Which delays are injected; all of them in seconds of the emulated time."""

    law: DelayLaw
    lower_s: float
    """Lower quantile and least delay, above 0."""
    upper_s: float
    """Upper quantile and largest delay."""
    paid_s: float = 0.0
    """What the real transfer takes anyway."""
    confidence: float = 0.995
    """Probability of a delay between both quantiles, before it is cut off."""
    speedup: float = 1.0
    """Emulated seconds per real second."""

    def __post_init__(self) -> None:
        if not 0.0 < self.lower_s <= self.upper_s < math.inf:
            raise ValueError(
                f"lower_s = {self.lower_s}, upper_s = {self.upper_s}: must be above 0 and in order"
            )
        if self.lower_s == self.upper_s and self.law in ("lognormal", "weibull"):
            raise ValueError(f"lower_s = upper_s = {self.upper_s}: a {self.law} law needs a range")
        if not 0.0 < self.confidence < 1.0:
            raise ValueError(f"confidence = {self.confidence}: must lie between 0 and 1")
        if self.paid_s < 0.0 or not 0.0 < self.speedup < math.inf:
            raise ValueError(
                f"paid_s = {self.paid_s} must not be negative, speedup = {self.speedup} must be "
                "above 0"
            )

    def draw(self, chance: random.Random) -> float:
        """Return one delay, in emulated seconds."""
        return min(max(self._draw_law(chance) - self.paid_s, self.lower_s), self.upper_s)

    def _draw_law(self, chance: random.Random) -> float:
        alpha = (1.0 - self.confidence) / 2.0
        match self.law:
            case "constant":
                return self.upper_s + self.paid_s
            case "lognormal":
                mu, sigma = lognormal_parameters(self.lower_s, self.upper_s, alpha)
                return chance.lognormvariate(mu, sigma)
            case "weibull":
                shape, scale = weibull_parameters(self.lower_s, self.upper_s, alpha)
                return chance.weibullvariate(scale, shape)
            case "exponential":
                return chance.expovariate(math.log(1.0 / alpha) / self.upper_s)


def lognormal_parameters(lower: float, upper: float, alpha: float) -> tuple[float, float]:
    """Return mu and sigma of the lognormal law with these quantiles at alpha and 1 - alpha."""
    z = NormalDist().inv_cdf(1.0 - alpha)
    low, high = math.log(lower), math.log(upper)
    return (low + high) / 2.0, (high - low) / (2.0 * z)


def weibull_parameters(lower: float, upper: float, alpha: float) -> tuple[float, float]:
    """Return shape and scale of the Weibull law with these quantiles at alpha and 1 - alpha."""
    below = -math.log1p(-alpha)
    shape = math.log(math.log(1.0 / alpha) / below) / math.log(upper / lower)
    return shape, lower / below ** (1.0 / shape)


class DelayInjector:
    """Delays of one direction, for any number of workers, and what was drawn so far."""

    def __init__(self, settings: DelaySettings, *, direction: Direction, seed: int) -> None:
        """Start; the same seed gives every worker the same delays again."""
        self.settings = settings
        self.direction = direction
        self._seed = seed
        self._chances: dict[str, random.Random] = {}
        self._histogram: Counter[int] = Counter()
        self._num_drawn = 0
        self._sum_s = 0.0
        self._max_s = 0.0

    def draw(self, worker_id: str) -> float:
        """Return the worker's next delay, in real seconds."""
        return self.draw_emulated(worker_id) / self.settings.speedup

    def draw_emulated(self, worker_id: str) -> float:
        """Return the worker's next delay, in emulated seconds."""
        chance = self._chances.get(worker_id)
        if chance is None:
            chance = random.Random(f"{self._seed}/{self.direction}/{worker_id}")
            self._chances[worker_id] = chance
        delay_s = self.settings.draw(chance)
        self._num_drawn += 1
        self._sum_s += delay_s
        self._max_s = max(self._max_s, delay_s)
        self._histogram[_bucket(delay_s)] += 1
        return delay_s

    def metrics(self) -> dict[str, float | dict[str, float]]:
        """Return mean, largest and histogram of all delays so far, in emulated seconds.

        A bucket of the histogram is named by its upper edge, a power of two; the first holds all
        delays of up to 1 s.
        """
        if not self._num_drawn:
            return {}
        name = f"delays/{self.direction}"
        return {
            f"{name}/mean": self._sum_s / self._num_drawn,
            f"{name}/max": self._max_s,
            f"{name}/hist": {str(edge): float(n) for edge, n in sorted(self._histogram.items())},
        }


def _bucket(delay_s: float) -> int:
    """Return the upper edge of the bucket that a delay falls into, seconds."""
    return 1 << math.ceil(math.log2(delay_s)) if delay_s > 1.0 else 1


class DelayedInstalls:
    """When a worker may take newer weights: it keeps the old ones until its delay has passed.

    The first weights are taken at once. Then a delay is drawn; when it has passed, the newest
    complete version is installed, whatever was published meanwhile, and the next is drawn.
    """

    def __init__(self, injector: DelayInjector, worker_id: str) -> None:
        """Start without weights."""
        self._injector = injector
        self._worker_id = worker_id
        self.next_at: float | None = None
        """Instant before which nothing may be installed; None for at once."""

    def may_install(self, *, now: float) -> bool:
        """Return whether the newest version may be installed now."""
        return self.wait_s(now=now) == 0.0

    def wait_s(self, *, now: float) -> float:
        """Return the seconds until a version may be installed."""
        return 0.0 if self.next_at is None else max(0.0, self.next_at - now)

    def installed(self, *, now: float) -> dict[str, int]:
        """Note that a version was installed; return what to count of the delay that begins.

        The counts, `delays/weights/hist/<edge>` and the sum of all `delays/weights/milliseconds`,
        are of emulated time, like `DelayInjector.metrics`; runtime/delays.py adds up workers'.
        """
        delay_s = self._injector.draw_emulated(self._worker_id)
        self.next_at = now + delay_s / self._injector.settings.speedup
        name = f"delays/{self._injector.direction}"
        return {
            f"{name}/hist/{_bucket(delay_s)}": 1,
            f"{name}/milliseconds": round(1000 * delay_s),
        }
