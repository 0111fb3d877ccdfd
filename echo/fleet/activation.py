"""Activation: the best set of the workers that joined, by a greedy search.

A fleet file offers so many nodes of a kind; a run has workers, each with its own measured rate.
Workers that are alike are put together as one kind. With more than MAX_KINDS kinds those are put
together that differ by less than a share that grows until few enough are left.

Every set is assessed with the caller's own forecast of a broadcast to exactly these workers, at the
publish period that suits it best of those that are allowed. The best set is the cheapest that
satisfies rule and budget. If none does, it is the set with the least longer step within the budget;
of sets that are hardly slower, the cheapest. The learner then waits, and the decision says for how
much of the time.

The search begins with several sets: nobody, the active workers, and for each kind all workers whose
broadcasts and groups take no longer than those of this kind, since one slow link or long group can
rule out everything else. From each it changes the numbers of one kind, then of two, then of three,
for as long as a change makes the set better, and within MAX_ASSESSED sets.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from echo.fleet.job import Job
from echo.fleet.market import UNLIMITED, Counts, Offer, Region, RentedFleet
from echo.fleet.overlap import least_slowdown, predict, required_rate

MAX_KINDS = 32
"""Kinds of workers at most: a change of two kinds has a thousand forms, as many as are assessed."""
_WIDTHS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 3.0, math.inf)
"""By how much workers of one kind may differ, tried in order."""
MAX_ASSESSED = 400
"""Sets that one search assesses, each with a forecast: 1.5 ms for ten workers, 4 ms for 100."""
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

    def fleet(self, job: Job) -> RentedFleet:
        """Return the workers as offers, as the planner and the price of a set see them."""
        links = self.links
        regions = {
            name: Region(
                name=name,
                bytes_per_s=UNLIMITED,
                price_per_gb=links.price_per_gb,
                relay_bytes_per_s=UNLIMITED if name in links.relay_regions else None,
            )
            for name in {worker.region for worker in self.workers}
        }
        offers = []
        for kind in self.kinds:
            offer, alone_s = _offer(kind[0].name, kind), links.broadcast_s([kind[0].name])
            rate = job.version_bytes / alone_s if alone_s > 0 else UNLIMITED
            offers.append(replace(offer, down_bytes_per_s=min(offer.down_bytes_per_s, rate)))
        return RentedFleet(
            offers=tuple(offers), regions=regions, uplink_bytes_per_s=links.uplink_bytes_per_s
        )

    def delay_s(self, job: Job) -> list[float]:
        """Return the seconds of a broadcast and a group with one kind alone, by kind."""
        return [
            self.links.broadcast_s([kind[0].name]) + _offer(kind[0].name, kind).group_latency_s(job)
            for kind in self.kinds
        ]

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


def by_kind(workers: Sequence[Offer]) -> list[list[Offer]]:
    """Return the workers by kind, with at most MAX_KINDS kinds if what they cost allows it."""
    kinds: list[list[Offer]] = []
    for width in _WIDTHS:
        found: dict[object, list[Offer]] = {}
        for worker in workers:
            found.setdefault(_kind(worker, width), []).append(worker)
        kinds = list(found.values())
        if len(kinds) <= MAX_KINDS:
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
    """Sets of workers that were assessed for one job, by their numbers of each kind."""

    def __init__(self, roll: Roll, job: Job, preferred: Collection[str]) -> None:
        self._roll, self._job, self._preferred = roll, job, frozenset(preferred)
        self._budget_per_h = job.budget_per_h * (1 + 1e-9)
        self._most = tuple(len(kind) for kind in roll.kinds)
        self._assessed: dict[Counts, Assessment] = {}

    def run(self) -> Choice:
        """Return the best set that was found."""
        starts = list(self._starts())
        for counts in starts:
            self._rank(counts, 1.0)
        ends = [self._improve(counts, 1.0) for counts in starts]
        # Where no step is short enough, sets that are hardly slower may be cheaper.
        limit = self._limit()
        for counts in ends:
            self._improve(counts, limit)
        _, counts = min(
            (assessed.cost_per_h, counts)
            for counts, assessed in self._assessed.items()
            if assessed.slowdown <= self._limit() and not self._is_too_dear(assessed)
        )
        names = self._roll.names(counts, self._preferred)
        return Choice(
            active=names,
            outlook=self._roll.outlook(self._job, names),
            slowdown=self._assessed[counts].slowdown,
        )

    def _starts(self) -> Iterator[Counts]:
        """Yield the sets to begin with, each once."""
        delays_s = self._roll.delay_s(self._job)
        starts = [(0,) * len(self._most), self._roll.counts(self._preferred)]
        for limit_s in sorted(set(delays_s)):
            pairs = zip(self._most, delays_s, strict=True)
            starts.append(tuple(most if delay_s <= limit_s else 0 for most, delay_s in pairs))
        yield from dict.fromkeys(starts)

    def _improve(self, counts: Counts, limit: float) -> Counts:
        """Return the last of better and better sets; a step up to `limit` counts as short enough.

        The changes of few kinds come first: there are fewer of them.
        """
        changes = (self._of_one_kind, self._of_two_kinds, self._of_three_kinds)
        while True:
            for change in changes:
                best = counts
                for each in change(counts):
                    if self._rank(each, limit) < self._rank(best, limit):
                        best = each
                if best != counts:
                    break
            if best == counts:
                return counts
            counts = best

    def _of_one_kind(self, counts: Counts) -> Iterator[Counts]:
        """Yield the sets with one more or fewer of a kind, none, all, or half way to these."""
        for index, (count, most) in enumerate(zip(counts, self._most, strict=True)):
            half, middle = count // 2, (count + most + 1) // 2
            for other in sorted({0, half, count - 1, count + 1, middle, most} - {count, -1}):
                if other <= most:
                    yield (*counts[:index], other, *counts[index + 1 :])

    def _of_two_kinds(self, counts: Counts) -> Iterator[Counts]:
        """Yield the sets with one worker in place of one of another kind."""
        for removed, added in itertools.permutations(range(len(counts)), 2):
            yield from self._changed(counts, {removed: -1, added: 1})

    def _of_three_kinds(self, counts: Counts) -> Iterator[Counts]:
        """Yield the sets with two workers in place of one, or one in place of two."""
        for sign in (1, -1):
            for one in range(len(counts)):
                others = [index for index in range(len(counts)) if index != one]
                for index in others:
                    yield from self._changed(counts, {one: -sign, index: 2 * sign})
                for pair in itertools.combinations(others, 2):
                    yield from self._changed(counts, {one: -sign, pair[0]: sign, pair[1]: sign})

    def _changed(self, counts: Counts, changes: Mapping[int, int]) -> Iterator[Counts]:
        """Yield the set with so many more or fewer of some kinds, if there are as many."""
        changed = list(counts)
        for index, change in changes.items():
            changed[index] += change
            if not 0 <= changed[index] <= self._most[index]:
                return
        yield tuple(changed)

    def _rank(self, counts: Counts, limit: float) -> tuple[float, ...]:
        """Rank by the step within the budget, then by the cost; last what may not be assessed."""
        if counts not in self._assessed:
            if len(self._assessed) >= MAX_ASSESSED:
                return (math.inf,)
            names = self._roll.names(counts, self._preferred)
            self._assessed[counts] = self._roll.assess(self._job, names)
        assessed = self._assessed[counts]
        is_too_dear = self._is_too_dear(assessed)
        return is_too_dear, max(assessed.slowdown, limit), assessed.cost_per_h

    def _limit(self) -> float:
        """Return up to which slowdown a set counts as no slower than the best within the budget."""
        found = self._assessed.values()
        least = min(each.slowdown for each in found if not self._is_too_dear(each))
        return 1.0 if least <= 1 else least * HARDLY_SLOWER

    def _is_too_dear(self, assessed: Assessment) -> bool:
        return assessed.cost_per_h > self._budget_per_h


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
    return _Search(Roll(workers, links, periods=periods), job, preferred).run()


# --- review ---------------------------------------------------------------------------------------
#
# The active workers are compared with the best set (`choose`), from time to time. They are changed
# where the best set saves MIN_SAVING of the step or of the cost, or the budget is passed. A worker
# whose rate was never seen cannot be compared: it generates until its rate is known, for as much of
# the budget as that takes; what is left of the budget is for the best set of the others.


MIN_SAVING = 0.05
"""Share of the step or of the cost that another set must save: rates are measured to some 5 %."""
IDLE_TOLERANCE = 0.02
"""Share of the time that a learner may wait and still count as busy."""
_PASSED = "the budget per hour is passed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewAnswer:
    """What to do about a question."""

    active: frozenset[str]
    """Who should generate from now on."""
    before: Outlook
    after: Outlook
    choice: Choice
    """The best set of the workers with a known rate."""
    cause: str
    """Why anything changes; empty if nothing does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """All that an answer depends on, at one instant; it can be answered in another thread."""

    workers: tuple[Offer, ...]
    job: Job
    links: Links
    active: frozenset[str]
    untried: frozenset[str] = frozenset()
    """Workers that have not generated for long enough to show a rate, which is a guess."""
    ready: frozenset[str]
    """Workers that hold weights which leases are granted for."""
    idle_share: float
    """Measured, since the last change."""
    periods: tuple[int, ...] = ()
    """Publish periods that may be had; the job's own if there are none."""

    def solve(self) -> ReviewAnswer:
        """Return what to do; takes seconds for many kinds of workers."""
        roll = Roll(self.workers, self.links, periods=self.periods)
        trials = self._trials(roll)
        left_per_h = self.job.budget_per_h - roll.assess(self.job, trials).cost_per_h
        job = replace(self.job, budget_per_h=left_per_h)
        known = [worker for worker in self.workers if worker.name not in self.untried]
        active = self.active - self.untried
        choice = choose(known, job, self.links, preferred=active, periods=self.periods)
        is_waiting = self.idle_share > IDLE_TOLERANCE
        cause = _saving(roll, job, active, choice, is_waiting=is_waiting)
        if cause and not choice.active <= active:
            # Between workers that are as good as each other a review would exchange them by chance.
            members = [worker for worker in known if worker.name in active]
            own = choose(members, job, self.links, periods=self.periods)
            own_cause = _saving(roll, job, active, own, is_waiting=is_waiting)
            # Whether the learner waits was measured with all of them: of fewer it says nothing.
            if own_cause and not _saving(roll, job, own.active, choice, is_waiting=True):
                choice, cause = own, own_cause
        wanted = choice.active if cause else active
        if wanted - self.ready and not active <= wanted:
            # Nobody generates while all fetch weights: the others go with the next review.
            both, before = roll.assess(job, active | wanted), roll.assess(job, active)
            if both.cost_per_h <= left_per_h and both.slowdown <= before.slowdown:
                cause, wanted = f"{cause}, and they begin first", active | wanted
        if trials - self.active or (trials and cause == _PASSED):
            cause = "workers without a measured rate are tried"
        wanted |= trials
        return ReviewAnswer(
            active=wanted,
            before=roll.outlook(self.job, self.active),
            after=roll.outlook(self.job, wanted),
            choice=choice,
            cause="" if wanted == self.active else cause or _PASSED,
        )

    def _trials(self, roll: Roll) -> frozenset[str]:
        """Return the untried workers whose rates the budget pays for, the cheapest first."""
        trials: frozenset[str] = frozenset()
        for worker in sorted(self.workers, key=lambda worker: (worker.price_per_h, worker.name)):
            if worker.name in self.untried:
                more = trials | {worker.name}
                if roll.assess(self.job, more).cost_per_h <= self.job.budget_per_h:
                    trials = more
        return trials


def _saving(
    roll: Roll, job: Job, names: frozenset[str], choice: Choice, *, is_waiting: bool
) -> str:
    """Return why a choice is to take the place of a set of workers; empty if it is not."""
    before, at_most = roll.assess(job, names), 1 - MIN_SAVING
    if before.cost_per_h > job.budget_per_h * (1 + 1e-9):
        return _PASSED
    if is_waiting and choice.slowdown < at_most * before.slowdown:
        if choice.active < names:
            return "the active workers are too many for the links"
        return "other workers make shorter steps"
    if choice.outlook.cost_per_h < at_most * before.cost_per_h:
        return "fewer or cheaper workers are enough"
    return ""


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
