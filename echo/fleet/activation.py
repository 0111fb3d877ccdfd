"""Searches for the best set of active workers among all joined workers.

Workers with equal properties form a kind. If there are more than MAX_KINDS kinds, workers with
similar properties form a kind. The allowed difference grows until there are at most MAX_KINDS
kinds.

A set of workers is assessed with the best of the allowed publish periods. The caller forecasts the
duration of a broadcast to the set. A set is sufficient if it satisfies the provisioning rule
(overlap.py) within the budget. The best set is the cheapest sufficient set.

If no set is sufficient, the learner will wait for rollouts with every set. In this case, the search
compares the sets within the budget. Of the sets with nearly the shortest step time (HARDLY_SLOWER),
it chooses the cheapest.

The search is greedy and begins with several sets: no worker, the active workers, and one set for
each kind. The set of a kind contains this kind and all faster kinds, because one slow worker can
make a set insufficient. From each of these sets, the search changes the number of workers of one
kind, then of two kinds, then of three, as long as the set becomes better. A change of two kinds
replaces one worker by another. A change of three kinds replaces one worker by two, or two by one.
Without these changes, the search would often end at a dearer set in fleets of many kinds.

The learner repeats the search during the run, so MAX_KINDS and MAX_ASSESSED bound its duration.
HARDLY_SLOWER keeps the learner from paying for workers that make a step shorter by less than the
error of the measured rates.
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
"""Workers are sorted into at most this many kinds. With 32 kinds, there are 992 ways to replace a
worker by a worker of another kind."""
_WIDTHS = (0.0, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 3.0, math.inf)
"""How much the properties of workers of one kind may differ, as shares. The values are tried in
this order."""
MAX_ASSESSED = 400
"""Largest number of sets of workers that a search assesses. One assessment takes 1.5 ms for ten
workers and 4 ms for 100 workers."""
HARDLY_SLOWER = 1.01
"""If a cheaper set makes steps at most this many times as long as the shortest step, it is
preferred."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The learner's uplink: the price of its traffic, and a forecast of broadcast times."""

    broadcast_s: Callable[[Collection[str]], float]
    """Returns the seconds from a publication until all named workers hold the version."""
    uplink_bytes_per_s: float = UNLIMITED
    price_per_gb: float = 0.0
    """$ per GB sent by the learner."""
    relay_regions: frozenset[str] = frozenset()
    """Regions with a relay. The relay's price is not counted, because the relay runs in any case.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class SetPrediction:
    """The rate and the cost that are predicted for a set of workers."""

    rate: float
    """Rollouts per second that the workers make together."""
    required: float
    """Rollouts per second that the provisioning rule requires, without the job's margin."""
    broadcast_s: float
    latency_s: float
    """Seconds that the slowest worker takes for a group."""
    cost_per_h: float
    """$ per hour for these workers and for the traffic to and from them."""
    idle_share: float
    is_sufficient: bool
    """Whether the set costs no more than the budget and satisfies the provisioning rule with its
    margin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """Whether a set of workers satisfies the provisioning rule, and what the set costs."""

    job: Job
    """The job with the publish period that is best for these workers."""
    rate: float
    broadcast_s: float
    latency_s: float
    """Seconds that the slowest worker takes for a group."""
    mean_latency_s: float
    """Mean seconds of a group, over all groups."""
    lost_per_s: float
    cost_per_h: float
    """$ per hour for these workers and their traffic, if steps take `slowdown` times as long."""
    slowdown: float
    """Steps must become longer by this factor, so that the set satisfies the provisioning rule. 1
    for a set that already satisfies the rule."""
    is_sufficient: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The set of workers that should generate, with its predicted rate and cost."""

    active: frozenset[str]
    prediction: SetPrediction
    slowdown: float = 1.0
    """The step time with this set, divided by the learner's training time. It is 1 if the set is
    sufficient."""


class Roll:
    """Sorts the joined workers into kinds, and assesses sets of workers."""

    def __init__(
        self, workers: Sequence[Offer], links: Links, *, periods: Sequence[int] = ()
    ) -> None:
        """Sort the workers into kinds.

        Args:
            workers: the workers that have joined.
            links: the learner's uplink and the forecast of broadcasts.
            periods: allowed publish periods; if empty, the job's own period.
        """
        self.workers = tuple(workers)
        self.periods = tuple(periods)
        self._fleets: dict[float, RentedFleet] = {}
        self.links = links
        self.kinds = by_kind(workers)

    def fleet(self, job: Job) -> RentedFleet:
        """Return the workers as a fleet with one offer per kind.

        So the planner's code can compute the cost of a set of workers.
        """
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
        """Return the delay of one worker of each kind, in seconds.

        The delay is the time of a broadcast to this worker alone, plus the time of one group.
        """
        return [
            self.links.broadcast_s([kind[0].name]) + _offer(kind[0].name, kind).group_latency_s(job)
            for kind in self.kinds
        ]

    def counts(self, names: Collection[str]) -> tuple[int, ...]:
        """Return how many of the named workers belong to each kind."""
        return tuple(sum(worker.name in names for worker in kind) for kind in self.kinds)

    def names(self, counts: Counts, preferred: Collection[str]) -> frozenset[str]:
        """Choose `counts` workers of each kind and return their names.

        Within a kind, `preferred` workers come first. Among equally preferred workers, faster
        workers come first.
        """
        chosen: list[str] = []
        for kind, count in zip(self.kinds, counts, strict=True):
            ranked = sorted(kind, key=lambda w: (w.name not in preferred, -w.tokens_per_s, w.name))
            chosen += [worker.name for worker in ranked[:count]]
        return frozenset(chosen)

    def assess(self, job: Job, names: Collection[str]) -> Assessment:
        """Return the rate and cost of a set of workers, and whether the set is sufficient."""
        members = [worker for worker in self.workers if worker.name in names]
        offers = [_offer(worker.name, [worker]) for worker in members]
        rate = sum(offer.rollouts_per_s(job) for offer in offers)
        slowest_s = max((offer.group_latency_s(job) for offer in offers), default=0.0)
        broadcast_s = self.links.broadcast_s(names) if offers else 0.0
        times = {"rate": rate, "broadcast_s": broadcast_s, "latency_s": slowest_s}
        # A period of S + 1 never satisfies the rule; use it only if no shorter one is allowed.
        periods = self.periods or (job.publish_period,)
        jobs = [
            replace(job, publish_period=period)
            for period in [each for each in periods if each <= job.max_staleness] or periods
        ]
        # Of equally good periods use the shortest, as the schedule of publications does.
        job = min(jobs, key=lambda each: least_slowdown(each, **times))
        slowdown = least_slowdown(job, **times)
        # A learner that waits publishes less often.
        paced = job if math.isinf(slowdown) else replace(job, train_s=job.train_s * slowdown)
        fleet, counts = self._fleet_of(job), self.counts(names)
        cost_per_h = fleet.cost_per_h(paced, counts)
        return Assessment(
            job=job,
            rate=rate,
            broadcast_s=broadcast_s,
            latency_s=slowest_s,
            mean_latency_s=fleet.mean_latency_s(job, counts),
            lost_per_s=sum(offer.lost_rollouts_per_s() for offer in offers),
            cost_per_h=cost_per_h,
            slowdown=slowdown,
            is_sufficient=slowdown <= 1 and cost_per_h <= job.budget_per_h * (1 + 1e-9),
        )

    def predict(self, job: Job, names: Collection[str]) -> SetPrediction:
        """Predict the rate, the idle share and the cost of a set of workers."""
        assessed = self.assess(job, names)
        prediction = predict(
            assessed.job,
            rate=assessed.rate,
            broadcast_s=assessed.broadcast_s,
            latency_s=assessed.mean_latency_s,
            lost_per_s=assessed.lost_per_s,
        )
        return SetPrediction(
            rate=assessed.rate,
            required=required_rate(assessed.job, assessed.broadcast_s),
            broadcast_s=assessed.broadcast_s,
            latency_s=assessed.latency_s,
            cost_per_h=assessed.cost_per_h,
            idle_share=prediction.idle_share,
            is_sufficient=assessed.is_sufficient,
        )

    def _fleet_of(self, job: Job) -> RentedFleet:
        if job.version_bytes not in self._fleets:
            self._fleets[job.version_bytes] = self.fleet(job)
        return self._fleets[job.version_bytes]


def by_kind(workers: Sequence[Offer]) -> list[list[Offer]]:
    """Group the workers into kinds; return at most MAX_KINDS kinds if possible.

    All workers of a kind are in the same region. Either all or none of them can be dialled. If a
    property, such as the price, is 0 for one worker of a kind, it is 0 for all workers of this
    kind.
    """
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
    """Return the key of a worker's kind.

    Workers that differ by less than about `width` get the same key.
    """

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
    """Return a kind of workers as one offer.

    Each property has its worst value among the workers.
    """
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
    """Searches for the best set of workers for one job.

    Assessments are cached by the number of workers of each kind in the set.
    """

    def __init__(self, roll: Roll, job: Job, preferred: Collection[str]) -> None:
        self._roll, self._job, self._preferred = roll, job, frozenset(preferred)
        self._budget_per_h = job.budget_per_h * (1 + 1e-9)
        self._most = tuple(len(kind) for kind in roll.kinds)
        self._assessed: dict[Counts, Assessment] = {}

    def run(self) -> Choice:
        starts = list(self._starts())
        for counts in starts:
            self._rank(counts, 1.0)
        ends = [self._improve(counts, 1.0) for counts in starts]
        # If no step is short enough, a set that is hardly slower may be cheaper.
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
            prediction=self._roll.predict(self._job, names),
            slowdown=self._assessed[counts].slowdown,
        )

    def _starts(self) -> Iterator[Counts]:
        """Yield the sets with which the search begins. No set occurs twice."""
        delays_s = self._roll.delay_s(self._job)
        starts = [(0,) * len(self._most), self._roll.counts(self._preferred)]
        for limit_s in sorted(set(delays_s)):
            pairs = zip(self._most, delays_s, strict=True)
            starts.append(tuple(most if delay_s <= limit_s else 0 for most, delay_s in pairs))
        yield from dict.fromkeys(starts)

    def _improve(self, counts: Counts, limit: float) -> Counts:
        """Change a set of workers until no change improves the set. Return the result.

        A set's slowdown is the factor by which the set lengthens the steps. Slowdowns up to `limit`
        count as equal. Changes of one kind are tried first, because there are fewest of them.
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
        """Yield the sets that differ from `counts` in the number of workers of one kind.

        The new numbers are: one more, one fewer, none, all, and halfway to none and to all.
        """
        for index, (count, most) in enumerate(zip(counts, self._most, strict=True)):
            half, middle = count // 2, (count + most + 1) // 2
            for other in sorted({0, half, count - 1, count + 1, middle, most} - {count, -1}):
                if other <= most:
                    yield (*counts[:index], other, *counts[index + 1 :])

    def _of_two_kinds(self, counts: Counts) -> Iterator[Counts]:
        for removed, added in itertools.permutations(range(len(counts)), 2):
            yield from self._changed(counts, {removed: -1, added: 1})

    def _of_three_kinds(self, counts: Counts) -> Iterator[Counts]:
        """Yield the sets that replace one worker by two of other kinds, or two workers by one."""
        for sign in (1, -1):
            for one in range(len(counts)):
                others = [index for index in range(len(counts)) if index != one]
                for index in others:
                    yield from self._changed(counts, {one: -sign, index: 2 * sign})
                for pair in itertools.combinations(others, 2):
                    yield from self._changed(counts, {one: -sign, pair[0]: sign, pair[1]: sign})

    def _changed(self, counts: Counts, changes: Mapping[int, int]) -> Iterator[Counts]:
        changed = list(counts)
        for index, change in changes.items():
            changed[index] += change
            if not 0 <= changed[index] <= self._most[index]:
                return
        yield tuple(changed)

    def _rank(self, counts: Counts, limit: float) -> tuple[float, ...]:
        """Return the sort key of a set: (whether its cost exceeds the budget, slowdown, cost).

        After MAX_ASSESSED assessments, every new set ranks last.
        """
        if counts not in self._assessed:
            if len(self._assessed) >= MAX_ASSESSED:
                return (math.inf,)
            names = self._roll.names(counts, self._preferred)
            self._assessed[counts] = self._roll.assess(self._job, names)
        assessed = self._assessed[counts]
        is_too_dear = self._is_too_dear(assessed)
        return is_too_dear, max(assessed.slowdown, limit), assessed.cost_per_h

    def _limit(self) -> float:
        """Return the largest slowdown that counts as equal to the smallest slowdown found so far.

        Only sets within the budget are compared. If one of them is sufficient, the result is 1,
        because a sufficient set does not lengthen the steps.
        """
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
    """Return the cheapest set of workers that satisfies the provisioning rule and the budget.

    If no set is sufficient, the sets within the budget are compared. The step time may be at most
    HARDLY_SLOWER times the shortest step time. Of the sets that satisfy this limit, the cheapest is
    returned.

    Args:
        workers: all workers that have joined.
        job: the job, with its budget.
        links: the learner's uplink and the forecast of broadcasts.
        preferred: workers that are chosen before other workers of the same kind.
        periods: allowed publish periods; if empty, the job's own period.
    """
    return _Search(Roll(workers, links, periods=periods), job, preferred).run()


# --- review ---------------------------------------------------------------------------------------
#
# From time to time the active workers are compared with the best set (`choose`). The best set
# replaces them if it saves MIN_SAVING of the step or of the cost, or if the active workers exceed
# the budget. A worker of unknown rate cannot be compared. It generates until its rate is known, if
# the budget allows it; the best set of the other workers is chosen for the rest of the budget.


MIN_SAVING = 0.05
"""A new set replaces the active set only if it saves this share of the step time or of the cost.
Measured rates have an error of about 5 %."""
IDLE_TOLERANCE = 0.02
"""A learner that waits for at most this share of its time counts as busy."""
_PASSED = "the budget per hour is passed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReviewAnswer:
    """The result of a review: the workers that should generate, and the reason."""

    active: frozenset[str]
    """The workers that should generate from now on."""
    before: SetPrediction
    after: SetPrediction
    choice: Choice
    """The best set that can be chosen from the workers with a known rate."""
    cause: str
    """The reason why the active workers change; empty if they do not change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """The inputs of a review at one instant; `solve` can run in another thread."""

    workers: tuple[Offer, ...]
    job: Job
    links: Links
    active: frozenset[str]
    untried: frozenset[str] = frozenset()
    """Workers without a measured rate, because they have not yet generated long enough. Their rates
    are guesses."""
    ready: frozenset[str]
    """Workers whose installed weights are recent enough for the workers to get leases."""
    idle_share: float
    """Share of time that the learner has waited since the last change of the active workers."""
    periods: tuple[int, ...] = ()
    """The publish periods that the review may choose. If empty, the job's own period applies."""

    def solve(self) -> ReviewAnswer:
        """Return the result of the review. With many kinds of workers, this takes seconds."""
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
            # Prefer the active workers; otherwise a review would exchange equally good workers at
            # random.
            members = [worker for worker in known if worker.name in active]
            own = choose(members, job, self.links, periods=self.periods)
            own_cause = _saving(roll, job, active, own, is_waiting=is_waiting)
            # The idle share was measured with all of these workers, and is not valid for fewer.
            if own_cause and not _saving(roll, job, own.active, choice, is_waiting=True):
                choice, cause = own, own_cause
        wanted = choice.active if cause else active
        if wanted - self.ready and not active <= wanted:
            # No worker would generate while the new ones fetch weights, so drop the others later.
            both, before = roll.assess(job, active | wanted), roll.assess(job, active)
            if both.cost_per_h <= left_per_h and both.slowdown <= before.slowdown:
                cause, wanted = f"{cause}, and they begin first", active | wanted
        if trials - self.active or (trials and cause == _PASSED):
            cause = "workers without a measured rate are tried"
        wanted |= trials
        return ReviewAnswer(
            active=wanted,
            before=roll.predict(self.job, self.active),
            after=roll.predict(self.job, wanted),
            choice=choice,
            cause="" if wanted == self.active else cause or _PASSED,
        )

    def _trials(self, roll: Roll) -> frozenset[str]:
        """Return the untried workers that the budget allows. Cheaper workers are tried first."""
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
    """Return the reason why a choice should replace a set of workers; "" if it should not."""
    before, at_most = roll.assess(job, names), 1 - MIN_SAVING
    if before.cost_per_h > job.budget_per_h * (1 + 1e-9):
        return _PASSED
    if is_waiting and choice.slowdown < at_most * before.slowdown:
        if choice.active < names:
            return "the active workers are too many for the links"
        return "other workers make shorter steps"
    if choice.prediction.cost_per_h < at_most * before.cost_per_h:
        return "fewer or cheaper workers are enough"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationDecision:
    """A change of the active workers, and the numbers that caused the change."""

    step: int
    cause: str
    activated: tuple[str, ...]
    deactivated: tuple[str, ...]
    num_active: int
    num_standby: int
    before: SetPrediction
    after: SetPrediction
    train_s: float
    idle_share: float
    """The learner's idle share that was measured before the change."""
    slowdown: float
    """The step time divided by the training time. It is above 1 if no set is sufficient."""

    def __str__(self) -> str:
        """Return one line of text on the decision."""
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
