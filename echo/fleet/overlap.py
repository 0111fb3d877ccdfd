"""Models how generation and training overlap: the provisioning rule and the idle time.

ECHO-2 (arXiv:2602.02192) states its provisioning rule only in words, which can be read in two ways.
R is the number of rollouts per step, S the staleness bound, kappa the publish period, T_train the
time of a step and T_bcast the time of a broadcast:

* workers that pause while new weights arrive need
      rate >= kappa * R / (kappa * T_train - T_bcast)
* workers that keep generating during the broadcast need
      rate >= R / T_train  and  (kappa - 1) + ceil((T_bcast + T_group + T_queue) / T_train) <= S

T_group is the time of one group, and T_queue = R / rate is the time in which the fleet makes a
batch.

`predict` does not use this rule. It simulates the admission of groups (leases/grants/admission.py)
step by step. Batch k begins after batch k - 1, when a version w with S + w + 1 > k is installed.
Batch k is trained after step k - 1. So the prediction is also valid for fleets that break the
provisioning rule, and shows how long the learner waits.

A batch is complete when the fleet has made all its rollouts, after at least the time of one group.
If groups differ in length, some workers make the last groups of a batch while other workers begin
the next batch or wait for it. This delays a batch by at most half of a group's time.

Broadcasts are sent one after the other, as whole images. Of the versions that wait for the link,
only the newest is sent. A receiver also abandons a version for a newer one, as `weights/offers.py`
describes.

Staleness is predicted for just-in-time grants (leases/grants/just_in_time.py): each batch begins at
the latest instant that delays no step. In three cases, however, a batch begins as early as
admission allows:

* Leases do not limit the workers to the demand.
* The learner waits for more than OPEN_SHARE of its time.
* Without its fastest node, the fleet would be too slow for the job.

In the other cases, some nodes may still be too slow: even if their groups began as late as
possible, the groups would be less than SLACK versions below the staleness bound. These nodes also
begin as early as admission allows. Each node counts in proportion to its rate.

The groups of a batch that begins early begin one after another, as workers become free. The later
ones are from newer versions.

Batches that begin early accumulate until they reach the staleness bound. If the fleet is only a
little faster than the learner, this takes many steps. The prediction is for the steps after that.

The second form of the rule and the prediction are not in the paper.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from statistics import NormalDist

from echo.fleet.job import Job

_CYCLES = 40
"""Number of simulated publications in a prediction. The first half is a warm-up."""
_LONGEST_WARM_UP = 400
"""Batches that begin early may accumulate for at most this many steps. Few runs are longer."""
_LARGEST_TAIL = 0.5
"""The last groups of a batch may delay it by at most this share of one group's time."""
MAX_STALENESS = 64
"""Largest staleness bound that is proposed as a remedy. Published systems train stably up to this
staleness."""
OPEN_SHARE = 0.02
"""If the learner has waited for more than this share of its time, no grants are delayed."""
MAX_LOSS = 0.45
"""Grants are delayed only if the fleet is fast enough without its fastest worker. In this rule, the
fastest worker counts for at most this share of the fleet's speed. So a fleet with twice the
required speed can always delay grants."""
SLACK = 1
"""Grants are delayed only as long as groups stay at least this many versions below the staleness
bound. Otherwise a late group would be stale."""
_PARTS = 8
"""Groups of a batch that begin early begin at this many instants, evenly spread over the time in
which the fleet makes a batch."""
_CHANGE = 0.9
"""A resource is improved by this factor to test whether it limits the run."""


class Resource(Enum):
    """The resources that can limit the speed of a run."""

    LEARNER = "the learner's own steps"
    ROLLOUTS = "the rate of rollouts"
    BROADCAST = "the time of a broadcast"
    LATENCY = "the time that one group takes"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpeed:
    """How fast one node generates."""

    rate: float
    """Rollouts per second."""
    group_s: float
    """Seconds that the node needs to finish a group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The speed, the idle time and the staleness that are predicted for a fleet."""

    step_s: float
    """Mean seconds between optimizer steps; infinite if no rollouts are made."""
    idle_share: float
    """Share of time in which the learner waits for a batch, 0..1."""
    staleness: Mapping[int, float]
    """Share of the trained tokens at each staleness; empty if nothing is trained."""
    wasted_share: float
    """Share of the generated rollouts that are never trained on. Groups without a training signal
    do not count."""

    @property
    def mean_staleness(self) -> float:
        """Mean staleness of the trained tokens, in steps."""
        return sum(staleness * share for staleness, share in self.staleness.items())


def required_rate(job: Job, broadcast_s: float, *, is_pausing: bool | None = None) -> float:
    """Return the rollouts per second that the provisioning rule requires, without the job's margin.

    If broadcasts leave pausing workers no time to generate, the result is infinity.

    Example: 64 rollouts per step, steps of 10 s, a publication every 2 steps, broadcasts of 4 s.
    Pausing workers have 16 s of 20 s for 128 rollouts, so 8 per second are required. Workers that
    keep generating have 10 s for 64 rollouts, so 6.4 per second are required.
    """
    if not (job.has_pausing_workers if is_pausing is None else is_pausing):
        return job.rollouts_per_step / job.train_s
    left_s = job.publish_period * job.train_s - broadcast_s
    return job.publish_period * job.rollouts_per_step / left_s if left_s > 0 else math.inf


def window_s(job: Job) -> float:
    """Return the seconds from a publication to the deadline of the first batch from this version.

    The result is (max_staleness - publish_period + 1) * train_s. After the deadline, the learner
    would wait for the batch.
    """
    return (job.max_staleness - job.publish_period + 1) * job.train_s


def fits_window(job: Job, *, rate: float, broadcast_s: float, latency_s: float) -> bool:
    """Return whether workers keep the staleness bound if they generate during broadcasts.

    This is the condition with S in the provisioning rule (see the module). The code needs no ceil,
    because ceil(y) <= n is equivalent to y <= n for a whole number n.
    """
    if rate <= 0:
        return False
    needed = broadcast_s + latency_s + job.rollouts_per_step / rate
    return needed <= window_s(job) * (1 + 1e-9)


def is_enough(job: Job, *, rate: float, broadcast_s: float, latency_s: float) -> bool:
    """Return whether a fleet satisfies the provisioning rule with the job's margin.

    The rule has two forms: one for workers that pause during a broadcast, and one for workers that
    keep generating. `job` selects the form. In both forms, each broadcast must end before the next
    broadcast begins.
    """
    if broadcast_s >= job.publish_period * job.train_s:
        return False
    if rate * (1 + 1e-9) < required_rate(job, broadcast_s) * (1 + job.margin):
        return False
    return job.has_pausing_workers or fits_window(
        job, rate=rate, broadcast_s=broadcast_s, latency_s=latency_s
    )


def least_slowdown(job: Job, *, rate: float, broadcast_s: float, latency_s: float) -> float:
    """Return the smallest factor by which steps must lengthen to satisfy the provisioning rule.

    If workers keep generating and the publish period is S + 1, where S is max_staleness, workers
    and learner must take turns. Then no step time satisfies the rule, and the result is the step
    time with the learner's wait, divided by train_s.

    Example: max_staleness 1, steps of 10 s with 64 rollouts, 16 rollouts per second, broadcasts of
    7 s, latency 0. With a publish period of 1, a broadcast and a batch take 7 + 4 s. So steps must
    take 11 s, and the factor is 1.1. With a publish period of 2, two steps take 7 + 4 + 20 s. This
    is 15.5 s per step, and the result is 1.55.

    Returns:
        1 if the fleet satisfies the rule with its margin; infinity if the rate or train_s is 0;
        otherwise a factor above 1.
    """
    period, batch = job.publish_period, job.rollouts_per_step
    if rate <= 0 or job.train_s <= 0:
        return math.inf
    if job.has_pausing_workers:
        least_s = batch * (1 + job.margin) / rate + broadcast_s / period
    else:
        num_steps = job.max_staleness - period + 1
        needed_s = broadcast_s + latency_s + batch / rate
        if num_steps > 0:
            needed_s /= num_steps
        else:
            # All batches of a period wait for its version, and the learner waits for the first
            # batch.
            later_s = max(period * job.train_s, (period - 1) * batch / rate + job.train_s)
            needed_s = (needed_s + later_s) / period
        least_s = max(batch * (1 + job.margin) / rate, broadcast_s / period, needed_s)
    if is_enough(job, rate=rate, broadcast_s=broadcast_s, latency_s=latency_s):
        return 1.0
    return max(least_s / job.train_s, 1 + 1e-9)


def predict(
    job: Job,
    *,
    rate: float,
    broadcast_s: float,
    latency_s: float,
    nodes: Sequence[NodeSpeed] = (),
    lost_per_s: float = 0.0,
    is_paced: bool = True,
) -> Prediction:
    """Predict speed, idle share, staleness and waste of a fleet.

    Args:
        job: the job for which the fleet generates.
        rate: rollouts per second of all nodes together.
        broadcast_s: seconds from a publication until every node holds the version.
        latency_s: mean seconds of a group. A fast node counts for more, because it makes more
            groups.
        nodes: speed of each node. Without it, the fleet is assumed to have many equal nodes.
        lost_per_s: rollouts per second that are lost because nodes are lost; `rate` does not
            include these rollouts.
        is_paced: whether leases limit the workers to the demand. Otherwise the surplus rollouts are
            discarded.
    """
    if rate <= 0:
        return Prediction(step_s=math.inf, idle_share=1.0, staleness={}, wasted_share=0.0)
    pipeline = _Pipeline(job, rate, broadcast_s, latency_s, is_paced=is_paced)
    num_steps = _CYCLES * job.publish_period
    pipeline.make_steps(num_steps)
    half = num_steps // 2
    step_s = (pipeline.ends[num_steps] - pipeline.ends[half]) / (num_steps - half)
    idle_share = max(0.0, 1 - job.train_s / step_s)
    left = rate - min(max((node.rate for node in nodes), default=0.0), MAX_LOSS * rate)
    late_share = 0.0
    if is_paced and idle_share <= OPEN_SHARE and left * step_s >= job.rollouts_per_step:
        speeds = nodes or [NodeSpeed(rate=rate, group_s=latency_s)]
        late_share = _share_of_late_nodes(job, speeds, broadcast_s, step_s)
    if late_share < 1:
        pipeline.make_steps(_warm_up(job, pipeline.batch_s))
    staleness = pipeline.staleness(late_share)
    demand = job.rollouts_per_step / step_s
    surplus = 0.0 if is_paced else max(0.0, rate - demand)
    return Prediction(
        step_s=step_s,
        idle_share=idle_share,
        staleness=dict(sorted(staleness.items())),
        wasted_share=(surplus + lost_per_s) / (demand + surplus + lost_per_s),
    )


def _share_of_late_nodes(
    job: Job, nodes: Sequence[NodeSpeed], broadcast_s: float, step_s: float
) -> float:
    """Return the share of the fleet's rate whose groups can begin as late as possible, 0..1."""
    limit = job.max_staleness - SLACK - (job.publish_period - 1)
    late = [n for n in nodes if math.ceil((broadcast_s + n.group_s) / step_s) <= limit]
    return sum(node.rate for node in late) / sum(node.rate for node in nodes)


def _warm_up(job: Job, batch_s: float) -> int:
    """Return the number of steps in which early batches accumulate up to the staleness bound.

    If the fleet is faster than the learner by at most OPEN_SHARE, batches do not accumulate
    reliably, and the result is 0.
    """
    surplus = 1 - batch_s / job.train_s
    if surplus <= OPEN_SHARE:
        return 0
    return math.ceil(min(_LONGEST_WARM_UP, (job.max_staleness + 1) / surplus))


class _Pipeline:
    """Computes the times at which batches are generated and trained, and versions published."""

    def __init__(
        self, job: Job, rate: float, broadcast_s: float, latency_s: float, *, is_paced: bool
    ) -> None:
        self.job = job
        self.broadcast_s = broadcast_s
        self.latency_s = latency_s
        self.is_paced = is_paced
        self.batch_s = job.rollouts_per_step / rate
        """Seconds that a batch takes if all workers have work."""
        self.tail_s = min(_LARGEST_TAIL, job.completion_spread) * latency_s
        """Seconds that a batch takes in addition to `batch_s`, because its last groups end late."""
        self.spread_step_s = _with_spread(job, self.batch_s)
        """Least mean seconds of a step, because the time that a batch takes varies."""
        self.ends = [0.0]
        """For each version, the time at which its training ends. The initial weights, version 0,
        exist at time 0."""
        self.installed = [(0.0, 0)]
        """(time, version) of each installed version, in order of time."""
        self.has_preempted = False
        """Whether the newest broadcast has replaced an older version's broadcast before its half,
        as a receiver does once (weights/offers.py)."""
        self.generated_at = 0.0
        """The time at which the fleet has finished the newest batch."""
        self.begins: list[float] = []
        """For each step, the earliest time at which its batch begins."""

    def make_steps(self, num_steps: int) -> None:
        """Compute the times of the next steps' batches, training and publications."""
        for step in range(len(self.begins), len(self.begins) + num_steps):
            self._make_step(step)

    def _make_step(self, step: int) -> None:
        begin = max(self.generated_at, self._gate(step))
        self.begins.append(begin)
        self.generated_at = self._spans_of_work(begin, self.batch_s)[-1][1]
        whole_at = max(begin + self.latency_s, self.generated_at + self.tail_s)
        end = max(self.ends[-1], whole_at) + self.job.train_s
        self.ends.append(max(end, self.ends[-1] + self.spread_step_s))
        version = step + 1
        if version % self.job.publish_period == 0:
            self._send(version, now=self.ends[-1])

    def _send(self, version: int, *, now: float) -> None:
        """Compute when a version that is published now will be installed."""
        done_at, _ = self.installed[-1]
        begun_at = done_at - self.broadcast_s
        if begun_at > now:
            # The version before this one still waits for the link, so this one replaces it.
            self.installed[-1] = (done_at, version)
        elif now - begun_at < self.broadcast_s / 2 and not self.has_preempted:
            self.installed[-1] = (now + self.broadcast_s, version)
            self.has_preempted = True
        else:
            self.installed.append((max(now, done_at) + self.broadcast_s, version))
            self.has_preempted = False

    def _gate(self, step: int) -> float:
        """Return the earliest time at which workers may begin this step's batch.

        A version that may generate the batch must be installed by then.
        """
        if not self.is_paced:
            return 0.0
        oldest = step - self.job.max_staleness
        at, _ = self.installed[bisect_left(self.installed, oldest, key=lambda pair: pair[1])]
        return at

    def _spans_of_work(self, begin: float, work_s: float) -> list[tuple[float, float]]:
        """Return the intervals in which workers generate. Together they last `work_s` seconds.

        The first interval starts at or after `begin`. If workers pause, broadcasts interrupt the
        work.
        """
        spans, at = [], begin
        for arrival, _ in self.installed[1:] if self.job.has_pausing_workers else ():
            departure = arrival - self.broadcast_s
            if arrival <= at:
                continue
            if departure >= at + work_s:
                break
            if departure > at:
                spans.append((at, departure))
                work_s -= departure - at
            at = arrival
        return [*spans, (at, at + work_s)]

    def staleness(self, late_share: float) -> dict[int, float]:
        """Return the share of the tokens at each staleness.

        `late_share` is the share of the tokens that are generated as late as possible, 0..1. The
        other tokens are generated as early as admission allows.
        """
        found: dict[int, float] = {}
        for share, is_just_in_time in ((late_share, True), (1 - late_share, False)):
            seconds = self._seconds(is_just_in_time=is_just_in_time) if share > 0 else {}
            for lag, part in seconds.items():
                found[lag] = found.get(lag, 0.0) + share * part / sum(seconds.values())
        return found

    def _seconds(self, *, is_just_in_time: bool) -> dict[int, float]:
        """Return for how many seconds the last batches of each staleness are generated.

        The version that is installed during generation determines the staleness. If
        `is_just_in_time`, each batch begins at the latest instant that delays no step. Otherwise
        its groups begin one after another, as workers become free.
        """
        found: dict[int, float] = {}
        free_until = math.inf
        num_steps = _CYCLES // 2 * self.job.publish_period
        for step in reversed(range(len(self.begins) - num_steps, len(self.begins))):
            begin, ready_at = self.begins[step], self.ends[step + 1] - self.job.train_s
            if is_just_in_time:
                until = min(ready_at - self.tail_s, free_until)
                latest = min(self._begin_of_work(until, self.batch_s), ready_at - self.latency_s)
                free_until = begin = max(begin, latest)
                spans = self._spans_of_work(begin, max(self.batch_s, self.latency_s))
            else:
                spans = self._spans_of_groups(begin)
            for since, until in spans:
                self._note_staleness(found, step, since, min(until, ready_at))
        return found

    def _spans_of_groups(self, begin: float) -> list[tuple[float, float]]:
        """Return the intervals in which the groups of a batch are generated.

        The batch's first group starts at or after `begin`, and its last one `batch_s` of work
        later.
        """
        part_s = self.batch_s / _PARTS
        spans = []
        for part in range(_PARTS):
            begun_at = self._spans_of_work(begin, part * part_s)[-1][1]
            spans += self._spans_of_work(begun_at, max(part_s, self.latency_s))
        return spans

    def _begin_of_work(self, end: float, work_s: float) -> float:
        """Return when workers must begin, so that they work for `work_s` seconds until `end`."""
        begin = end - work_s
        for arrival, _ in reversed(self.installed[1:]) if self.job.has_pausing_workers else ():
            if arrival - self.broadcast_s < end and arrival > begin:
                begin -= min(arrival, end) - (arrival - self.broadcast_s)
        return begin

    def _note_staleness(self, found: dict[int, float], step: int, begin: float, end: float) -> None:
        """Add the seconds from `begin` to `end` to `found`, under the staleness of the batch."""
        installs = [*self.installed, (math.inf, -1)]
        for (since, version), (until, _) in itertools.pairwise(installs):
            part = min(end, until) - max(begin, since)
            if part > 0:
                lag = step - version
                found[lag] = found.get(lag, 0.0) + part


def _with_spread(job: Job, batch_s: float) -> float:
    """Return the mean time of a step if the time that a batch takes varies.

    A step takes max(T, X), where T is the training time and X is the time of a batch. The buffer
    averages X over the batches that the staleness bound allows to be made ahead. If X is normally
    distributed, the mean time is

        T + d * (z * Phi(z) + phi(z)),    z = (E[X] - T) / d

    where E[X] is the mean of X, d is the standard deviation of the average, Phi is the normal
    distribution and phi is its density.
    """
    ahead = max(1, job.max_staleness - job.publish_period + 2)
    deviation = job.rate_spread * batch_s / math.sqrt(ahead)
    if deviation == 0:
        return batch_s
    normal = NormalDist()
    z = (batch_s - job.train_s) / deviation
    return max(batch_s, job.train_s + deviation * (z * normal.cdf(z) + normal.pdf(z)))


def binding_resource(job: Job, *, rate: float, broadcast_s: float, latency_s: float) -> Resource:
    """Return the resource that limits the speed of the run.

    This is the resource whose improvement by a tenth shortens the step most.
    """

    def step_s(job: Job, rate: float, broadcast_s: float, latency_s: float) -> float:
        return predict(job, rate=rate, broadcast_s=broadcast_s, latency_s=latency_s).step_s

    faster_learner = replace(job, train_s=job.train_s * _CHANGE)
    changed = {
        Resource.LEARNER: step_s(faster_learner, rate, broadcast_s, latency_s),
        Resource.ROLLOUTS: step_s(job, rate / _CHANGE, broadcast_s, latency_s),
        Resource.BROADCAST: step_s(job, rate, broadcast_s * _CHANGE, latency_s),
        Resource.LATENCY: step_s(job, rate, broadcast_s, latency_s * _CHANGE),
    }
    return Resource.ROLLOUTS if rate <= 0 else min(changed, key=lambda which: changed[which])


def staleness_range(
    job: Job, *, rate: float, broadcast_s: float, latency_s: float
) -> tuple[int, int] | None:
    """Return the range of useful staleness bounds for a fleet.

    The first number is the smallest bound that satisfies the provisioning rule. The second number
    is the largest bound that still reduces the idle share. If no bound up to MAX_STALENESS
    satisfies the rule, the result is None. The job's own bound is not used.
    """

    def idle(bound: int) -> float:
        changed = replace(job, max_staleness=bound)
        return predict(changed, rate=rate, broadcast_s=broadcast_s, latency_s=latency_s).idle_share

    def suffices(bound: int) -> bool:
        changed = replace(job, max_staleness=bound)
        return is_enough(changed, rate=rate, broadcast_s=broadcast_s, latency_s=latency_s)

    limit = MAX_STALENESS
    least = next(filter(suffices, range(job.publish_period - 1, limit + 1)), None)
    if least is None:
        return None
    floor = idle(limit)
    saturated = next((bound for bound in range(least, limit) if idle(bound) <= floor + 1e-3), limit)
    return least, saturated


def auto_publish_period(t_train_s: float, t_bcast_s: float, max_staleness: int) -> int:
    """Return the smallest publish period in which training hides the broadcast of each version.

    This is the smallest period with period * t_train_s > t_bcast_s, but at most max_staleness + 1.
    If the period were longer than max_staleness + 1, the newest version would become too old to
    sample from before the next version is published. Then learner and workers would wait for each
    other.

    Args:
        t_train_s: seconds per optimizer step, above 0.
        t_bcast_s: seconds until the slowest active worker holds a published version, at least 0.
        max_staleness: bound on staleness, in steps, at least 0.

    Returns:
        Optimizer steps between publications, from 1 to max_staleness + 1.

    Raises:
        ValueError: if an argument is out of its range.
    """
    if not (t_train_s > 0 and t_bcast_s >= 0 and max_staleness >= 0):
        raise ValueError(
            f"auto_publish_period({t_train_s=}, {t_bcast_s=}, {max_staleness=}): t_train_s must be "
            "above 0, the others at least 0"
        )
    longest = max_staleness + 1
    ratio = t_bcast_s / t_train_s
    return longest if ratio >= longest else min(longest, math.floor(ratio) + 1)
