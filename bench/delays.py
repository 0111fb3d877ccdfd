"""Delays between continents, injected into a run on purpose.

Learner and workers are started from here, with the configuration of a run and the delays beside it:

    python bench/delays.py learner --config FILE --law lognormal --speedup 600
    python bench/delays.py worker --config FILE --law lognormal --speedup 600

A group is late after its acknowledgement: the learner's buffer hands it out once its delay has
passed. A worker is late at its install: it keeps its weights until its delay has passed, then takes
the newest complete version. The transport is left alone, since half an hour there would expire
leases, links and acknowledgements. colocated.py and bench_staleness.py have no nodes: there a lag
in versions follows from the same delays (`DelayLags`), or is fixed or drawn evenly.

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

# ruff: noqa: SLF001 -- it wraps what nodes keep to themselves

from __future__ import annotations

import argparse
import asyncio
import bisect
import json
import math
import random
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import NormalDist
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args

if TYPE_CHECKING:
    from echo.core.buffer import StalenessBuffer
    from echo.core.rollout import Group, PolicyVersion
    from echo.runtime.learner.node import LearnerNode
    from echo.runtime.worker.node import WorkerNode

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


# --- delays in the nodes of a run -----------------------------------------------------------------


class DelayedBuffer:
    """A learner's buffer whose groups may be taken only once their delay has passed.

    Meanwhile they take up room there and grow old. Groups that a resumed run or a failed step has
    put back have arrived before.
    """

    def __init__(
        self, buffer: StalenessBuffer, delays: DelayInjector, wake: Callable[[], None]
    ) -> None:
        """Stand before a buffer; `wake` is called whenever a group has become visible."""
        self._buffer = buffer
        self._delays = delays
        self._wake = wake
        self._hidden: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._buffer, name)

    def put(self, group: Group) -> None:
        """Add a group, and hide it for its delay."""
        self._buffer.put(group)
        self._hidden.add(group.group_id)
        delay_s = self._delays.draw(group.worker_id)
        asyncio.get_running_loop().call_later(delay_s, self._reveal, group.group_id)

    def take(self, num_groups: int, *, step: int) -> list[Group] | None:
        """Remove and return the oldest visible groups, or None if there are too few."""
        groups = self._buffer._groups
        hidden = {number: groups.pop(number) for number in self._hidden & groups.keys()}
        try:
            return self._buffer.take(num_groups, step=step)
        finally:
            groups |= hidden

    def _reveal(self, group_id: int) -> None:
        self._hidden.discard(group_id)
        self._wake()


def delay_groups(learner: LearnerNode, delays: DelayInjector) -> None:
    """Let each group be trained only once its delay has passed since it was acknowledged."""
    buffer: Any = DelayedBuffer(learner._buffer, delays, learner.wake)
    learner._buffer = buffer


def delay_installs(worker: WorkerNode, delays: DelayInjector) -> None:
    """Let a worker keep each version for its delay; the first is installed at once."""
    session: Any = worker.session
    install, install_newest = worker._install, session._install_newest
    is_kept = False

    async def install_and_wait(version: PolicyVersion) -> None:
        nonlocal is_kept
        is_kept = True
        await install(version)
        await asyncio.sleep(delays.draw(session.settings.node_id))
        is_kept = False
        worker.perform(session.on_version(now=worker.now))

    worker._install = install_and_wait  # type: ignore[method-assign]
    session._install_newest = lambda *state: [] if is_kept else install_newest(*state)


# --- commands -------------------------------------------------------------------------------------


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


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("role", choices=("learner", "worker"))
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    add_options(parser)
    arguments = parser.parse_args()

    from echo.cli.node import read_run_file, run_role
    from echo.runtime.learner import setup
    from echo.runtime.worker import setup as worker_setup

    config = read_run_file(arguments.config, arguments.set, arguments.role)
    injectors = read_injectors(arguments, config.run.seed)
    build_learner, build_worker = setup.build_learner, worker_setup.build_worker

    async def build_late_learner(*args: Any, **kwargs: Any) -> LearnerNode:
        node = await build_learner(*args, **kwargs)
        delay_groups(node, injectors["rollouts"])
        return node

    async def build_late_worker(*args: Any, **kwargs: Any) -> WorkerNode:
        node = await build_worker(*args, **kwargs)
        delay_installs(node, injectors["weights"])
        return node

    if "rollouts" in injectors:
        setup.build_learner = build_late_learner
    if "weights" in injectors:
        worker_setup.build_worker = build_late_worker
    code = run_role(config, arguments.role, has_report=False)
    for injector in injectors.values():
        if metrics := injector.metrics():
            print(json.dumps(metrics))
    return code


if __name__ == "__main__":
    sys.exit(main())
