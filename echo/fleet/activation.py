"""Activation: the cheapest sufficient set of the workers that joined.

A fleet file offers so many nodes of a kind; a run has workers, each with its own measured rate.
Workers that are alike are put together as one offer. With more than MAX_OFFERS kinds those are put
together that differ by less than a share that grows until few enough are left; the slowest and the
dearest then stand for their kind, so what is chosen is sufficient in any case.

Every set is assessed with the caller's own forecast of a broadcast to exactly these workers, at the
publish period that suits it best of those that are allowed. Up to MAX_TRIED sets all are tried. Of
more, `echo.fleet.selection` answers with the broadcast of `echo.fleet.market`; where that was too
optimistic about the set that was found, what is missing is added, and the search is made again.

If no set satisfies rule and budget, the choice is the set with the least longer step within the
budget, and of those that are hardly slower the cheapest: the learner then waits, and by how much is
told.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from echo.fleet.job import Job
from echo.fleet.market import UNLIMITED, Counts, Offer, Region, RentedFleet
from echo.fleet.overlap import least_slowdown, predict, required_rate
from echo.fleet.selection import select

MAX_OFFERS = 32
"""Kinds of workers up to which HiGHS mostly answers within its second."""
_WIDTHS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 3.0, math.inf)
"""By how much workers of one kind may differ, tried in order."""
_MAX_CORRECTIONS = 4
"""Searches after which the model's time of a broadcast is taken as it is."""
MAX_TRIED = 1100
"""Sets that are assessed: all of ten different workers. Each takes the forecast of a broadcast."""
HARDLY_SLOWER = 1.01
"""By how much longer a step may be than the least one, where a cheaper set is had for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The learner's side, and what a broadcast takes."""

    broadcast_s: Callable[[Collection[str]], float]
    """(names) -> seconds from a publication until all of them hold it."""
    uplink_bytes_per_s: float = UNLIMITED
    price_per_gb: float = 0.0
    """$ per GB that leaves the learner."""
    relay_regions: frozenset[str] = frozenset()
    """Where a relay stands, which is paid for in any case."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What a set of workers leads to."""

    rate: float
    """Rollouts per second."""
    required: float
    """Those that the rule asks for, without margin."""
    broadcast_s: float
    latency_s: float
    cost_per_h: float
    """$ per hour for these workers and their traffic."""
    idle_share: float
    is_sufficient: bool
    """Whether rule, margin and budget are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """How a set of workers satisfies the rule."""

    job: Job
    """With the publish period that suits these workers best."""
    rate: float
    broadcast_s: float
    latency_s: float
    lost_per_s: float
    cost_per_h: float
    """$ per hour for these workers and their traffic, at the pace of the longer step."""
    slowdown: float
    """By how much longer steps must be for the rule to be kept; 1 if it is kept."""
    is_sufficient: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Who should generate, and what comes of it."""

    active: frozenset[str]
    outlook: Outlook
    is_exact: bool
    """Whether no cheaper set would do (with as few kinds of workers as were looked at)."""
    slowdown: float = 1.0
    """The step over the learner's own time for which this set is the cheapest; 1 if it suffices."""


class Roll:
    """Workers by kind, and how sets of them are assessed."""

    def __init__(
        self, workers: Sequence[Offer], links: Links, *, periods: Sequence[int] = ()
    ) -> None:
        """Take the workers there are, whose names differ, and publish periods to choose from."""
        self.workers = tuple(workers)
        self.periods = tuple(periods)
        self._fleets: dict[float, RentedFleet] = {}
        self.links = links
        self.kinds = by_kind(workers)
        self._alone_s = [links.broadcast_s([kind[0].name]) for kind in self.kinds]
        """Seconds of a broadcast to one worker of each kind: what any set with it needs."""

    def fleet(
        self, job: Job, *, overhead_s: float = 0.0, is_uplink_shared: bool = True
    ) -> RentedFleet:
        """Return the workers as offers.

        Args:
            job: whose versions are sent.
            overhead_s: what each broadcast takes beyond the model's time.
            is_uplink_shared: whether the learner serves everybody who cannot listen; else nobody
                waits for its uplink, as where others pass everything on.
        """
        links = self.links
        regions = {
            name: Region(
                name=name,
                bytes_per_s=UNLIMITED,
                latency_s=overhead_s,
                price_per_gb=links.price_per_gb,
                relay_bytes_per_s=UNLIMITED if name in links.relay_regions else None,
            )
            for name in {worker.region for worker in self.workers}
        }
        offers = []
        for kind, alone_s in zip(self.kinds, self._alone_s, strict=True):
            offer = _offer(kind[0].name, kind)
            rate = job.version_bytes / alone_s if alone_s > 0 else UNLIMITED
            offers.append(replace(offer, down_bytes_per_s=min(offer.down_bytes_per_s, rate)))
        return RentedFleet(
            offers=tuple(offers),
            regions=regions,
            uplink_bytes_per_s=links.uplink_bytes_per_s if is_uplink_shared else UNLIMITED,
        )

    def counts(self, names: Collection[str]) -> tuple[int, ...]:
        """Return how many of each kind are in a set."""
        return tuple(sum(worker.name in names for worker in kind) for kind in self.kinds)

    def names(self, counts: Counts, preferred: Collection[str]) -> frozenset[str]:
        """Return a set with so many of each kind: those in `preferred` first, then the fastest."""
        chosen: list[str] = []
        for kind, count in zip(self.kinds, counts, strict=True):
            ranked = sorted(kind, key=lambda w: (w.name not in preferred, -w.tokens_per_s, w.name))
            chosen += [worker.name for worker in ranked[:count]]
        return frozenset(chosen)

    def assess(self, job: Job, names: Collection[str]) -> Assessment:
        """Return whether a set suffices and what it costs, by the forecast of its broadcast."""
        members = [worker for worker in self.workers if worker.name in names]
        offers = [_offer(worker.name, [worker]) for worker in members]
        rate = sum(offer.rollouts_per_s(job) for offer in offers)
        latency_s = max((offer.group_latency_s(job) for offer in offers), default=0.0)
        broadcast_s = self.links.broadcast_s(names) if offers else 0.0
        times = {"rate": rate, "broadcast_s": broadcast_s, "latency_s": latency_s}
        # A period of S + 1 never satisfies the rule: it counts where no shorter one may be had.
        periods = self.periods or (job.publish_period,)
        jobs = [
            replace(job, publish_period=period)
            for period in [each for each in periods if each <= job.max_staleness] or periods
        ]
        # Of periods that are as good the shortest, which is what the pace of publications takes.
        job = min(jobs, key=lambda each: least_slowdown(each, **times))
        slowdown = least_slowdown(job, **times)
        # A learner that waits publishes less often.
        paced = job if math.isinf(slowdown) else replace(job, train_s=job.train_s * slowdown)
        cost_per_h = self._fleet_of(job).cost_per_h(paced, self.counts(names))
        return Assessment(
            job=job,
            rate=rate,
            broadcast_s=broadcast_s,
            latency_s=latency_s,
            lost_per_s=sum(offer.lost_rollouts_per_s() for offer in offers),
            cost_per_h=cost_per_h,
            slowdown=slowdown,
            is_sufficient=slowdown <= 1 and cost_per_h <= job.budget_per_h * (1 + 1e-9),
        )

    def outlook(self, job: Job, names: Collection[str]) -> Outlook:
        """Return what a set leads to, by the forecast of its broadcast."""
        assessed = self.assess(job, names)
        prediction = predict(
            assessed.job,
            rate=assessed.rate,
            broadcast_s=assessed.broadcast_s,
            latency_s=assessed.latency_s,
            lost_per_s=assessed.lost_per_s,
        )
        return Outlook(
            rate=assessed.rate,
            required=required_rate(assessed.job, assessed.broadcast_s),
            broadcast_s=assessed.broadcast_s,
            latency_s=assessed.latency_s,
            cost_per_h=assessed.cost_per_h,
            idle_share=prediction.idle_share,
            is_sufficient=assessed.is_sufficient,
        )

    def _fleet_of(self, job: Job) -> RentedFleet:
        """Return the fleet that prices a set, made once for versions of a size."""
        if job.version_bytes not in self._fleets:
            self._fleets[job.version_bytes] = self.fleet(job)
        return self._fleets[job.version_bytes]

    def worst_first(self, job: Job, names: Collection[str]) -> list[str]:
        """Return a set's members by what they cost for each rollout that they add.

        Example: a worker of $0.30/h that makes 2 rollouts per second is worse than one of $0.40/h
        that makes 4.
        """
        fleet = self.fleet(job)
        value: dict[str, float] = {}
        for index, kind in enumerate(self.kinds):
            one = [int(other == index) for other in range(len(self.kinds))]
            cost = fleet.cost_per_h(job, one)
            for worker in kind:
                rate = _offer("", [worker]).rollouts_per_s(job)
                value[worker.name] = cost / rate if rate > 0 else math.inf
        return sorted(names, key=lambda name: (-value[name], name))


def by_kind(workers: Sequence[Offer]) -> list[list[Offer]]:
    """Return the workers by kind, with at most MAX_OFFERS kinds if what they cost allows it."""
    kinds: list[list[Offer]] = []
    for width in _WIDTHS:
        found: dict[object, list[Offer]] = {}
        for worker in workers:
            found.setdefault(_kind(worker, width), []).append(worker)
        kinds = list(found.values())
        if len(kinds) <= MAX_OFFERS:
            break
    return kinds


def _kind(worker: Offer, width: float) -> object:
    """Return what workers have in common that are alike up to a share of `width`."""

    def about(value: float) -> float:
        if width == 0 or value <= 0:
            return value
        return 0.0 if math.isinf(width) else round(math.log(value) / math.log1p(width))

    amounts = (
        worker.tokens_per_s,
        worker.concurrency,
        worker.price_per_h,
        worker.price_per_gb,
        worker.losses_per_h,
        worker.restart_s,
        worker.down_bytes_per_s,
        worker.up_bytes_per_s,
    )
    return worker.region, worker.can_listen, *map(about, amounts)


def _offer(name: str, kind: Sequence[Offer]) -> Offer:
    """Return a kind as one offer: the worst of everything that its workers have."""
    longest = max(worker.concurrency / max(worker.tokens_per_s, 1e-9) for worker in kind)
    tokens_per_s = min(worker.tokens_per_s for worker in kind)
    return replace(
        kind[0],
        name=name,
        count=len(kind),
        price_per_h=max(worker.price_per_h for worker in kind),
        tokens_per_s=max(tokens_per_s, 1e-9),
        concurrency=max(1, math.ceil(longest * tokens_per_s - 1e-9)),
        down_bytes_per_s=min(worker.down_bytes_per_s for worker in kind),
        up_bytes_per_s=min(worker.up_bytes_per_s for worker in kind),
        price_per_gb=max(worker.price_per_gb for worker in kind),
        losses_per_h=max(worker.losses_per_h for worker in kind),
        restart_s=max(worker.restart_s for worker in kind),
    )


class _Search:
    """Sets of workers that were looked at for one job, by their numbers of each kind."""

    def __init__(self, roll: Roll, job: Job, preferred: Collection[str]) -> None:
        self._roll, self._job, self._preferred = roll, job, frozenset(preferred)
        self.most = tuple(len(kind) for kind in roll.kinds)
        self.assessed: dict[Counts, Assessment] = {}

    @property
    def num_sets(self) -> int:
        """How many sets there are."""
        return math.prod(count + 1 for count in self.most)

    def assess(self, counts: Counts) -> Assessment:
        """Return what a set leads to."""
        if counts not in self.assessed:
            names = self._roll.names(counts, self._preferred)
            self.assessed[counts] = self._roll.assess(self._job, names)
        return self.assessed[counts]

    def try_all(self) -> None:
        """Judge every set."""
        for counts in itertools.product(*(range(count + 1) for count in self.most)):
            self.assess(counts)

    def climb(self, counts: Counts) -> None:
        """Judge what lies between a set and one whose step no single change makes shorter.

        From there on to one that no single change makes cheaper with hardly a longer step.
        """
        counts = self._descend(counts, self._by_step)
        limit = self._limit()
        self._descend(
            counts,
            lambda assessed: (assessed.slowdown > limit, *reversed(self._by_step(assessed))),
        )

    def _descend(self, counts: Counts, rank: Callable[[Assessment], tuple[float, ...]]) -> Counts:
        """Return the last of ever better sets, each a single change from the one before."""
        while len(self.assessed) < MAX_TRIED:
            nearest = min(self._neighbours(counts), key=lambda each: rank(self.assess(each)))
            if rank(self.assess(nearest)) >= rank(self.assess(counts)):
                break
            counts = nearest
        return counts

    def _by_step(self, assessed: Assessment) -> tuple[float, ...]:
        """Rank by the step within the budget, then by the cost."""
        is_too_dear = assessed.cost_per_h > self._job.budget_per_h * (1 + 1e-9)
        return is_too_dear, assessed.slowdown, assessed.cost_per_h

    def _neighbours(self, counts: Counts) -> Iterator[Counts]:
        """Yield sets with one, half or all of a kind more or fewer, or one exchanged."""
        for index, count in enumerate(counts):
            for other in {0, count // 2, count - 1, count + 1, self.most[index]}:
                if 0 <= other <= self.most[index] and other != count:
                    yield (*counts[:index], other, *counts[index + 1 :])
            for added in range(len(counts)):
                if count and added != index and counts[added] < self.most[added]:
                    changed = list(counts)
                    changed[index], changed[added] = count - 1, counts[added] + 1
                    yield tuple(changed)

    def _limit(self) -> float:
        """Return up to which slowdown a set counts as no slower than the best within the budget."""
        budget = self._job.budget_per_h * (1 + 1e-9)
        steps = (each.slowdown for each in self.assessed.values() if each.cost_per_h <= budget)
        least = min(steps, default=math.inf)
        return 1.0 if least <= 1 else least * HARDLY_SLOWER

    def best(self, *, is_exact: bool) -> Choice:
        """Return the cheapest of the sets that are hardly slower than the fastest."""
        # One of them is within the budget, and so is the cheapest.
        limit = self._limit()
        _, counts = min(
            (assessed.cost_per_h, counts)
            for counts, assessed in self.assessed.items()
            if assessed.slowdown <= limit
        )
        names = self._roll.names(counts, self._preferred)
        outlook = self._roll.outlook(self._job, names)
        slowdown = self.assessed[counts].slowdown
        return Choice(active=names, outlook=outlook, is_exact=is_exact, slowdown=slowdown)


def choose(
    workers: Sequence[Offer],
    job: Job,
    links: Links,
    *,
    preferred: Collection[str] = (),
    periods: Sequence[int] = (),
) -> Choice:
    """Return the cheapest set of workers that satisfies the rule within the budget.

    Args:
        workers: that there are.
        job: with its budget.
        links: forecast of broadcasts.
        preferred: workers that are taken before others like them.
        periods: publish periods that may be had; the job's own if there are none.

    Returns:
        If no set is sufficient, the cheapest of those with hardly more than the least longer step.
    """
    roll = Roll(workers, links, periods=periods)
    search = _Search(roll, job, preferred)
    if search.num_sets <= MAX_TRIED:
        search.try_all()
        return search.best(is_exact=True)
    for period in roll.periods or (job.publish_period,):
        found = _select(roll, replace(job, publish_period=period), preferred)
        if found is not None:
            return found
    nobody = (0,) * len(search.most)
    search.assess(nobody)
    for start in (nobody, search.most):
        search.climb(start)
    return search.best(is_exact=False)


def _select(roll: Roll, job: Job, preferred: Collection[str]) -> Choice | None:
    """Return the cheapest sufficient set by the model of broadcasts, corrected; None without."""
    for is_uplink_shared in (True, False):
        overhead_s = 0.0
        for _ in range(_MAX_CORRECTIONS):
            fleet = roll.fleet(job, overhead_s=overhead_s, is_uplink_shared=is_uplink_shared)
            selection = select(fleet, job)
            if selection is None:
                break
            names = roll.names(selection.counts, preferred)
            outlook = roll.outlook(job, names)
            if outlook.is_sufficient:
                return Choice(active=names, outlook=outlook, is_exact=selection.is_exact)
            missing_s = outlook.broadcast_s - fleet.broadcast_s(job, selection.counts)
            if missing_s <= 0:
                break
            overhead_s += missing_s
    return None


# --- review ---------------------------------------------------------------------------------------
#
# What is active is compared with the cheapest set that satisfies the rule with its margin
# (`choose`). Two things keep it calm:
#
# * *hysteresis*: what is active counts as enough with half the margin, and where the learner has
#   not waited lately whatever the estimates say; a cheaper set must save `min_saving`, and one with
#   other workers that much against the best that those which are active can do by themselves:
#   estimates differ from one question to the next, equal workers by chance;
# * *small steps*: where what is active is enough, a quarter of the workers at most is dropped at a
#   time, the worst first: that which costs most for each rollout it adds. And only while those that
#   hold weights are enough without it, so that one that is activated in another's place has caught
#   up before the other is dropped.
#
# A budget goes before all that. Where nothing satisfies rule and budget, the answer is the cheapest
# set for the least longer step; workers that make the step longer, since each of them makes the
# broadcast longer, are dropped at once.


IDLE_TOLERANCE = 0.02
"""Share of the time that a learner may wait and still count as busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewAnswer:
    """What to do about a question."""

    active: frozenset[str]
    """Who should generate from now on."""
    before: Outlook
    after: Outlook
    choice: Choice
    cause: str
    """Why anything changes; empty if nothing does."""
    is_pending: bool
    """Whether there is more to be changed that has to wait."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """All that an answer depends on, at one instant; it can be answered in another thread."""

    workers: tuple[Offer, ...]
    job: Job
    links: Links
    active: frozenset[str]
    steady: frozenset[str]
    """Active workers whose dwell is over."""
    ready: frozenset[str]
    """Workers that hold weights which leases are granted for."""
    idle_share: float
    """Measured, lately."""
    min_saving: float
    periods: tuple[int, ...] = ()
    """Publish periods that may be had; the job's own if there are none."""

    def solve(self) -> ReviewAnswer:
        """Return what to do; takes seconds for many kinds of workers."""
        roll = Roll(self.workers, self.links, periods=self.periods)
        calm = replace(self.job, margin=self.job.margin / 2)
        before = roll.outlook(calm, self.active)
        choice = self._choose()
        is_enough = before.is_sufficient or self.idle_share <= IDLE_TOLERANCE
        saving = before.cost_per_h - choice.outlook.cost_per_h
        pays = saving > 0 and saving >= self.min_saving * before.cost_per_h
        cause, wanted = "", self.active
        if before.cost_per_h > self.job.budget_per_h * (1 + 1e-9):
            cause, wanted = "the budget per hour is passed", choice.active
        elif not is_enough:
            cause = "the active workers are not enough"
            spared = self.steady if choice.slowdown > 1 and pays else frozenset()
            wanted = self._within_budget(roll, (self.active - spared) | choice.active, choice)
            if roll.assess(self.job, wanted).slowdown > choice.slowdown * HARDLY_SLOWER:
                # Each of the others makes the broadcast longer.
                cause, wanted = "other workers alone make shorter steps", choice.active
                if wanted <= self.active:
                    cause = "the active workers are too many for the links"
        elif pays:
            cause = "fewer or cheaper workers are enough"
            wanted = self._shrunk(roll, calm, choice)
            if wanted > self.active:
                cause = "cheaper workers are there, and begin before others are put on standby"
        if wanted == self.active:
            cause = ""
        return ReviewAnswer(
            active=wanted,
            before=before,
            after=roll.outlook(calm, wanted),
            choice=choice,
            cause=cause,
            is_pending=(bool(cause) or pays) and wanted != choice.active,
        )

    def _choose(self) -> Choice:
        """Return the best set, or that of the active workers alone if it is hardly worse."""
        choice = choose(
            self.workers, self.job, self.links, preferred=self.active, periods=self.periods
        )
        if choice.active <= self.active or self.active <= choice.active:
            return choice
        members = [worker for worker in self.workers if worker.name in self.active]
        own = choose(members, self.job, self.links, periods=self.periods)
        if own.slowdown > 1 >= choice.slowdown:
            return choice
        if choice.slowdown > 1 and own.active and not self.active - choice.active <= self.steady:
            return own  # an exchange waits for the dwell of those that others would replace
        less = 1 - self.min_saving
        is_faster = choice.slowdown < less * own.slowdown
        is_cheaper = choice.outlook.cost_per_h < less * own.outlook.cost_per_h
        return choice if is_faster or (is_cheaper and choice.slowdown <= own.slowdown) else own

    def _within_budget(self, roll: Roll, names: frozenset[str], choice: Choice) -> frozenset[str]:
        """Return a set, or what was chosen instead if the set costs too much."""
        cost_per_h = roll.outlook(self.job, names).cost_per_h
        return names if cost_per_h <= self.job.budget_per_h else choice.active

    def _shrunk(self, roll: Roll, job: Job, choice: Choice) -> frozenset[str]:
        """Return the active workers without the worst of those that are not chosen.

        Where none can be dropped before others have taken its place, these are activated first.
        """
        names, num_left = self.active, max(1, len(self.active) // 4)
        dropped = [n for n in self.active - choice.active if n in self.steady]
        for name in roll.worst_first(job, dropped):
            without = names - {name}
            if num_left and roll.outlook(job, without & self.ready).is_sufficient:
                names, num_left = without, num_left - 1
        if names == self.active and dropped:
            return self._within_budget(roll, self.active | choice.active, choice)
        return names


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationDecision:
    """A change that was made, with the numbers behind it."""

    step: int
    cause: str
    activated: tuple[str, ...]
    deactivated: tuple[str, ...]
    num_active: int
    num_standby: int
    before: Outlook
    after: Outlook
    train_s: float
    idle_share: float
    """Measured before the change."""
    slowdown: float
    """Above 1: no set satisfies rule and budget, and steps take so much longer."""
    is_exact: bool

    def __str__(self) -> str:
        """Say what was decided, in one line."""
        parts = [f"{self.num_active} of {self.num_active + self.num_standby} workers active"]
        for verb, names in (("activated", self.activated), ("put on standby", self.deactivated)):
            if names:
                shown = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
                parts.append(f"{verb} {shown}")
        after = self.after
        parts.append(
            f"{after.rate:.3g} rollouts/s for the {after.required:.3g} that are needed, broadcast "
            f"{after.broadcast_s:.3g} s"
        )
        parts.append(f"${after.cost_per_h:.2f}/h in place of ${self.before.cost_per_h:.2f}/h")
        if self.slowdown > 1:
            parts.append(
                f"nothing better is there within the budget: the learner waits "
                f"{after.idle_share:.0%} of the time"
            )
        return f"{self.cause}: {'; '.join(parts)}"
