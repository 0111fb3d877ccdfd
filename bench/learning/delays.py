"""Delays between continents, injected into a run on purpose.

`late_node.py` starts learners and workers with them. colocated.py and bench_staleness.py have no
nodes: there a lag in versions follows from the same delays (`DelayLags`), or is fixed or drawn
evenly.

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

import argparse
import bisect
import math
import random
from collections import Counter
from dataclasses import dataclass, fields
from statistics import NormalDist
from typing import Literal, Protocol, get_args

DelayLaw = Literal["constant", "lognormal", "weibull", "exponential"]
Direction = Literal["weights", "rollouts"]

MAX_DRAWS = 1000
"""Groups in a row that may be too old before the delays count as too long for the bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DelaySettings:
    """Which delays are injected; all of them in seconds of the emulated time."""

    law: DelayLaw
    lower_s: float = 60.0
    """Lower quantile and least delay, above 0."""
    upper_s: float = 1800.0
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
        chance = self._chances.get(worker_id)
        if chance is None:
            chance = random.Random(f"{self._seed}/{self.direction}/{worker_id}")
            self._chances[worker_id] = chance
        delay_s = self.settings.draw(chance)
        self._num_drawn += 1
        self._sum_s += delay_s
        self._max_s = max(self._max_s, delay_s)
        # A bucket is named by its upper edge.
        self._histogram[1 << math.ceil(math.log2(delay_s)) if delay_s > 1.0 else 1] += 1
        return delay_s / self.settings.speedup

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


# --- lags: how many versions old a group is, where time is counted in optimizer steps -----------


class Lags(Protocol):
    """Where lags come from."""

    @property
    def max_lag(self) -> int:
        """The largest that is ever drawn."""

    def draw(self, step: int) -> int:
        """Return the lag, at most `step`, of the next group of the step that follows `step`."""


@dataclass(frozen=True, slots=True)
class FixedLag:
    """The same lag for every group, as soon as so many versions exist."""

    max_lag: int

    def draw(self, step: int) -> int:
        """Return the lag."""
        return min(self.max_lag, step)


class UniformLag:
    """Every lag from 0 up to the largest, equally often."""

    def __init__(self, max_lag: int, *, seed: int) -> None:
        """Start drawing."""
        self.max_lag = max_lag
        self._chance = random.Random(f"{seed}/lags")

    def draw(self, step: int) -> int:
        """Return the lag."""
        return self._chance.randint(0, min(self.max_lag, step))


class DelayLags:
    """Lags that follow from delays in both directions: HeteroRL, with time counted in steps.

    A step takes `step_s` emulated seconds, and each makes a version. Every worker keeps its weights
    until its delay has passed, then takes the newest version. A group that is trained on at some
    instant was sampled one rollout delay earlier, by what its worker held then. Groups beyond the
    bound are lost, and counted.
    """

    def __init__(
        self,
        *,
        weights: DelayInjector | None,
        rollouts: DelayInjector | None,
        num_workers: int,
        step_s: float,
        max_lag: int,
        seed: int,
    ) -> None:
        """Start at step 0, with every worker holding the first version.

        Args:
            weights: delays of versions; None for none.
            rollouts: delays of groups; None for none.
            num_workers: which take turns at random.
            step_s: emulated seconds per optimizer step.
            max_lag: the bound, inclusive.
            seed: of the turns.
        """
        self.max_lag = max_lag
        self.num_lost = 0
        """Groups that were too old."""
        self._rollouts = rollouts
        self._step_s = step_s
        self._chance = random.Random(f"{seed}/turns")
        names = [f"w{number}" for number in range(1, num_workers + 1)]
        self._timelines = {name: _Timeline(weights, name, step_s) for name in names}

    def draw(self, step: int) -> int:
        """Return the lag.

        Raises:
            ValueError: if delays are so long that next to no group is within the bound.
        """
        now = step * self._step_s
        for _ in range(MAX_DRAWS):
            worker = self._chance.choice(list(self._timelines))
            delay_s = 0.0 if self._rollouts is None else self._rollouts.draw(worker)
            version = self._timelines[worker].version_at(max(0.0, now - delay_s))
            if step - version <= self.max_lag:
                return step - version
            self.num_lost += 1
        raise ValueError(
            f"{MAX_DRAWS} groups in a row were more than {self.max_lag} versions old at step "
            f"{step}: the delays are too long for steps of {self._step_s:g} s"
        )


class _Timeline:
    """Which version one worker held when."""

    def __init__(self, weights: DelayInjector | None, worker_id: str, step_s: float) -> None:
        self._step_s = step_s
        self._weights = weights
        self._worker_id = worker_id
        self._next_at = 0.0
        self._at: list[float] = []
        self._versions: list[int] = []
        self._install(0.0)

    def version_at(self, instant: float) -> int:
        if self._weights is None:
            return int(instant / self._step_s)
        while self._next_at <= instant:
            self._install(self._next_at)
        return self._versions[bisect.bisect_right(self._at, instant) - 1]

    def _install(self, instant: float) -> None:
        """Take the newest version of this instant."""
        self._at.append(instant)
        self._versions.append(int(instant / self._step_s))
        if self._weights is not None:
            self._next_at = instant + self._weights.draw(self._worker_id)


# --- options -----------------------------------------------------------------------------------


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `read_injectors` reads."""
    parser.add_argument("--law", choices=get_args(DelayLaw), help="of the delays; none without it")
    parser.add_argument("--directions", choices=("both", *get_args(Direction)), default="both")
    for setting in fields(DelaySettings)[1:]:
        option = f"--{setting.name.replace('_', '-')}"
        parser.add_argument(option, type=float, default=setting.default, metavar="NUMBER")


def read_injectors(arguments: argparse.Namespace, seed: int) -> dict[Direction, DelayInjector]:
    """Return the delays that the options ask for, by direction."""
    if arguments.law is None:
        return {}
    numbers = {setting.name: getattr(arguments, setting.name) for setting in fields(DelaySettings)}
    try:
        settings = DelaySettings(**numbers)
    except ValueError as error:
        raise SystemExit(f"delays: {error}") from error
    directions: tuple[Direction, ...] = get_args(Direction)
    return {
        direction: DelayInjector(settings, direction=direction, seed=seed)
        for direction in directions
        if arguments.directions in ("both", direction)
    }
