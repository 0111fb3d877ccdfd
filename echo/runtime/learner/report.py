"""Totals of the learner for its metrics and its status."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

import numpy as np

from echo.algo.diagnostics import GroupStats, LengthBias, Mismatch
from echo.core.bounds import clamped_rate
from echo.core.monitoring.metrics import LearningCurve
from echo.core.monitoring.status import (
    MAX_POINTS,
    RATE_WINDOW_S,
    CostStatus,
    NodeStatus,
    RunStatus,
    SpeedStatus,
    StepStatus,
    finite,
    thinned,
)
from echo.core.rollout import Group, PolicyVersion
from echo.core.timers import MAX_NAMES_KEPT, RecentMap
from echo.core.units import counted
from echo.leases.mismatch import WINDOW, Sampled
from echo.roles.learner import Learner
from echo.roles.members import Member
from echo.weights.schedule import PublishPace
from echo.wire.messages import LEARNER_ID

IDLE_WINDOW_S = 60.0
"""The displayed share of waiting time is a mean over at least this many seconds."""
IDLE_WINDOW_STEPS = 10
"""The displayed share of waiting time is a mean over at least this many steps."""
MAX_HISTORY = 10_000
"""Largest number of points of a curve kept for the display."""


_ADVICE = {
    "no_opinion": "the reward gave None for all answers to a prompt but one at most: give a number "
    "where answers are to be compared (a function without `return` gives None), or choose other "
    "prompts",
    "all_masked": "no token of them is trained on: with loss.overlong_filter completions that are "
    "cut off are not; raise sampling.max_completion_tokens, or switch the filter off",
    "no_likely": "this loss needs the likely ids of each token, and its worker sends none: start "
    "workers of this release",
    "no_support": "a token was drawn from more ids than a rollout carries, and the range of this "
    "loss is too narrow for its ratio in the whole vocabulary: lower sampling.top_p, set "
    "sampling.top_k, or widen the loss's range (loss.clip_low)",
    "lost_member": "this loss needs a trained token in each rollout of a group: raise "
    "sampling.max_completion_tokens or sync.max_staleness, or choose another loss.kind",
}
"""For each reason why a group is left out of training: a remedy.

If all rewards of a group are equal, `describe_zero_signal` chooses a remedy by the rewards.
"""


class RunCurves:
    """Two curves: the mean reward of each step, and the held-out score of each evaluation.

    The curves also cover the steps before a resume.
    """

    def __init__(self, earlier: LearningCurve | None, *, step: int) -> None:
        """Continue the curves `earlier` of a run that is resumed at `step`.

        For a new run, `earlier` is None.
        """
        self.rewards: deque[float] = deque(maxlen=MAX_HISTORY)
        """Mean reward of each step, oldest first."""
        self.evals: deque[tuple[int, float, float]] = deque(maxlen=MAX_HISTORY)
        """(step, mean sampled reward, mean greedy reward) of each evaluation."""
        self.eval_errors: dict[int, int] = {}
        """Number of failed rewards in each evaluation, by its step."""
        self.evals_are_rates = earlier is None or earlier.is_rate
        """Whether every reward of all evaluations was 0 or 1, so that the scores are pass rates."""
        if earlier is not None:
            first = step
            while first in earlier.rewards:
                first -= 1
            self.rewards.extend(earlier.rewards[at] for at in range(first + 1, step + 1))
            self.evals.extend(point for point in earlier.evaluations if point[0] <= step)

    def evaluated(
        self, step: int, sampled: float, greedy: float, *, is_rate: bool, num_errors: int
    ) -> None:
        """Add an evaluation to the held-out curves. For the arguments see `Progress.evaluated`."""
        self.evals_are_rates &= is_rate
        for known in [point for point in self.evals if point[0] == step]:
            self.evals.remove(known)
        self.evals.append((step, sampled, greedy))
        if num_errors:
            self.eval_errors[step] = num_errors


# --- remaining time -------------------------------------------------------------------------------


_STEPS_REMEMBERED = 20
"""The median is taken over this many steps, so that one slow step has no effect."""


class RemainingTime:
    """Estimates the remaining time of a run from the median duration of its recent steps.

    A period without workers makes one step slow, and one slow step has no effect on the median. The
    first step of the process is not counted, because workers joined during it.
    """

    def __init__(self) -> None:
        self._steps: deque[float] = deque(maxlen=_STEPS_REMEMBERED)
        self._stepped_at: float | None = None

    def stepped(self, *, now: float) -> None:
        """Record that a step ended at the time `now`."""
        if self._stepped_at is not None:
            self._steps.append(now - self._stepped_at)
        self._stepped_at = now

    def eta_s(self, num_steps: int, *, now: float) -> float | None:
        """Return the estimated seconds until `num_steps` more steps.

        The result is None before two steps have ended.
        """
        if self._stepped_at is None or not self._steps:
            return None
        step_s = median(self._steps)
        return max(num_steps * step_s - min(now - self._stepped_at, step_s), 0.0)


class RunningClock:
    """A clock that stops while the learner waits in a paused run.

    Steps and waits are measured by this clock, because a pause of the operator is neither a wait
    for workers nor part of a step. Until the first pause the clock shows the loop's time.
    """

    def __init__(self) -> None:
        self._stands_since, self._stood_s = math.inf, 0.0

    def turn(self, *, stands: bool, now: float) -> None:
        """Stop the clock from now on if `stands` is true, else let it run."""
        self._stood_s += max(0.0, now - self._stands_since)
        self._stands_since = now if stands else math.inf

    def at(self, now: float) -> float:
        """Return the clock's time at the loop's time `now`."""
        return min(now, self._stands_since) - self._stood_s


# --- totals ---------------------------------------------------------------------------------------


class Progress:
    """Totals since the learner started.

    Staleness and curves also cover the time before a resume.
    """

    def __init__(
        self,
        *,
        staleness_tokens: Mapping[int, int],
        now: float,
        step: int = 0,
        earlier: LearningCurve | None = None,
    ) -> None:
        self._started_at = self._stepped_at = now
        self._waited_s = self._trained_s = 0.0
        self._step_times: tuple[float, float] = (0.0, 0.0)
        self._published_s = 0.0
        self._pace = RemainingTime()
        self._sent: deque[tuple[float, int]] = deque()
        """(time, bytes sent until then) of the statuses in the last RATE_WINDOW_S seconds."""
        self._speed: SpeedStatus | None = None
        self.last_step: StepStatus | None = None
        """Figures of the last step; None before the first step."""
        self._tokens_reported = self._bytes_reported = 0
        self._staleness_tokens = dict(staleness_tokens)
        self.curves = RunCurves(earlier, step=step)
        self._curve = self._rewards_by_step(step)
        self._groups = GroupStats()
        self._left_out = GroupStats()
        self._reasons: Counter[str] = Counter()
        self._dropped: dict[str, float] = {}
        self.lengths = LengthBias()
        self.workers = WorkerQuality()
        self.zero_signal = GroupStats()
        """Statistics of the groups without a training signal since the last useful group."""
        self._zero_signal_reasons: Counter[str] = Counter()
        self._num_failed = 0
        self._cause = ""
        self.newest_sampled: PolicyVersion | None = None
        """The newest version that sampled a token of a stored group; None if no group was stored.
        """
        self.activity = "starting"
        """The learner's present activity; empty while it waits for groups."""
        self.on_turn: Callable[[str, float], None] = lambda activity, now: None
        """Called with each new activity and the time."""
        self.num_accepted = self.num_accepted_tokens = 0
        """Number of accepted groups, and number of their completion tokens."""
        self.useless_reasons: Counter[str] = Counter()
        """Number of delivered or failed groups that are not trained on, by reason."""
        self._waits: deque[tuple[float, float]] = deque()
        """(start, end) of the last waits for groups, by the clock that stands in pauses. There is
        about one wait per step.
        """
        self._waiting_since: float | None = None
        self._all_waits_s = 0.0
        self._is_paused, self._clock = False, RunningClock()

    def pause(self, is_paused: bool, *, now: float) -> None:
        """Record that the operator pauses the run, or resumes it if `is_paused` is false."""
        self._is_paused = is_paused
        self._clock.turn(stands=is_paused and not self.activity, now=now)

    def running(self, now: float) -> float:
        """Return the time of the run's clock (`RunningClock`) at the loop's time `now`."""
        return self._clock.at(now)

    def begin(self, activity: str, *, now: float) -> None:
        """Record that the learner begins `activity`; "" means a wait for groups."""
        if self.activity == "starting":
            self._stepped_at = now  # loading the model is no part of the first step
        self.activity = activity
        self.on_turn(activity, now)
        self._clock.turn(stands=self._is_paused and not activity, now=now)
        now = self.running(now)
        if not activity:
            self._waiting_since = now if self._waiting_since is None else self._waiting_since
        elif self._waiting_since is not None:
            self._waits.append((self._waiting_since, now))
            self._all_waits_s += now - self._waiting_since
            self._waiting_since = None
            horizon = now - IDLE_WINDOW_S
            while len(self._waits) > IDLE_WINDOW_STEPS and self._waits[0][1] < horizon:
                self._waits.popleft()

    def idle_ratio_by_now(self, now: float) -> float:
        """Return the share of the time since the start that the learner spent waiting."""
        now = self.running(now)
        since = now if self._waiting_since is None else self._waiting_since
        return (self._all_waits_s + now - since) / max(now - self._started_at, 1e-9)

    def recent_idle_ratio(self, now: float) -> float:
        """Return the share of recent time that the learner spent waiting.

        Recent time is the last IDLE_WINDOW_S or the last IDLE_WINDOW_STEPS steps, whichever is
        longer.
        """
        now = self.running(now)
        waits = list(self._waits)
        if self._waiting_since is not None:
            waits.append((self._waiting_since, now))
        since = now - IDLE_WINDOW_S
        if waits:
            since = min(since, waits[max(-IDLE_WINDOW_STEPS, -len(waits))][0])
        since = max(since, self._started_at)
        waited_s = sum(max(0.0, end - max(start, since)) for start, end in waits)
        return min(1.0, waited_s / max(now - since, 1e-9))

    def accepted(self, group: Group, *, now: float) -> None:
        """Count a group that was stored in the ledger.

        The counts of groups that failed or had no training signal begin at 0 again.
        """
        self.num_accepted += 1
        self.num_accepted_tokens += group.num_tokens
        newest = group.versions[-1]
        self.newest_sampled = max(self.newest_sampled or newest, newest)
        self.zero_signal = GroupStats()
        self._zero_signal_reasons.clear()
        self._num_failed = 0
        self.lengths.delivered(group)

    def left_out(self, group: Group, reason: str, *, now: float) -> None:
        """Count a delivered group that `reason` excludes from training."""
        stats = GroupStats.of([group])
        self._reasons[reason] += 1
        self._zero_signal_reasons[reason] += 1
        self.useless_reasons[reason] += 1
        self._left_out += stats
        self.zero_signal += stats
        self.lengths.delivered(group)

    def unscored(self, group: Group) -> None:
        """Count a group that is not trained on because it has fewer than two rewards."""
        stats = GroupStats(num_groups=1, num_unscored=1)
        self._reasons["no_opinion"] += 1
        self._zero_signal_reasons["no_opinion"] += 1
        self.useless_reasons["no_opinion"] += 1
        self._left_out += stats
        self.zero_signal += stats
        self.lengths.delivered(group)
        if all(math.isnan(rollout.reward) for rollout in group.rollouts):
            self._num_failed += 1
            self._cause = (
                f"group {group.group_id}: the reward gave None for each answer, as a function "
                "without `return` does"
            )

    def failed(self, reason: str, cause: str) -> None:
        """Count a group that could not be finished, for example after a reward error."""
        self._zero_signal_reasons[reason] += 1
        self.useless_reasons[reason] += 1
        self._num_failed += 1
        self._cause = cause
        self.zero_signal += GroupStats(num_groups=1)

    def stepped(
        self,
        groups: Sequence[Group],
        *,
        waited_s: float,
        trained_s: float,
        staleness: Mapping[int, int],
    ) -> None:
        """Count an optimizer step.

        Args:
            groups: the groups of the step.
            waited_s: seconds that the learner waited for the groups.
            trained_s: seconds of training on the groups.
            staleness: staleness in steps -> number of trained tokens with this staleness.
        """
        self.lengths.trained(groups)
        # The statistics of a step also cover the groups that were left out since the step before.
        self._groups, self._left_out = GroupStats.of(groups) + self._left_out, GroupStats()
        num_groups = self._groups.num_groups
        # A reason that has occurred once is reported in every later row, so its column has no gaps.
        self._dropped = {
            f"groups/dropped/{reason}": count / num_groups
            for reason, count in self._reasons.items()
        }
        self._reasons = Counter(dict.fromkeys(self._reasons, 0))
        self._waited_s += waited_s
        self._trained_s += trained_s
        self._step_times = (waited_s, trained_s)
        for lag, num_tokens in staleness.items():
            self._staleness_tokens[lag] = self._staleness_tokens.get(lag, 0) + num_tokens

    def published(self, seconds: float) -> None:
        """Add the seconds for which training stopped to make a version."""
        self._published_s += seconds

    def evaluated(
        self,
        step: int,
        sampled: float,
        greedy: float,
        *,
        is_rate: bool = True,
        num_errors: int = 0,
    ) -> None:
        """Add an evaluation to the held-out curves.

        The evaluation replaces an earlier evaluation of the same step.

        Args:
            step: step of the evaluated version.
            sampled: mean reward of answers sampled at the evaluation's temperature.
            greedy: mean reward of greedy answers, which take the likeliest token each time.
            is_rate: whether every reward was 0 or 1.
            num_errors: number of rewards that failed.
        """
        self.curves.evaluated(step, sampled, greedy, is_rate=is_rate, num_errors=num_errors)

    def step_metrics(
        self,
        metrics: Mapping[str, float],
        staleness: Mapping[int, int],
        *,
        step: int,
        bytes_sent: int,
        now: float,
    ) -> dict[str, float | Mapping[str, float]]:
        """Return a step's row of metrics: the trainer's metrics, times, rates and staleness.

        Rewards, lengths and shares of groups cover the groups of the step, and the groups left out
        since the step before. `bytes_sent` is the total that the learner has sent so far.
        """
        metrics = {**metrics, **self._groups.metrics(), **self._dropped}
        self.curves.rewards.append(metrics.get("reward/mean", 0.0))
        num_tokens = sum(staleness.values())
        waited_s, trained_s = self._step_times
        now = self.running(now)
        step_s = max(now - self._stepped_at, 1e-9)
        tokens_per_s = (self.num_accepted_tokens - self._tokens_reported) / step_s
        row: dict[str, float | Mapping[str, float]] = {
            **metrics,
            "time/step": step_s,
            "time/train": trained_s,
            "time/wait_for_batch": waited_s,
            "learner/idle_ratio": self.idle_ratio,
            "time/publish": self._published_s,
            "perf/accepted_tokens_per_s": tokens_per_s,
            "broadcast/bytes": bytes_sent - self._bytes_reported,
        }
        mean_staleness = None
        if num_tokens:
            total = sum(lag * count for lag, count in staleness.items())
            row["staleness/mean"] = mean_staleness = total / num_tokens
            row["staleness/max"] = max(staleness)
            row["staleness/hist"] = {str(lag): n for lag, n in sorted(staleness.items())}
        if "perf/tokens_per_s" in metrics:
            self._speed = SpeedStatus(
                tokens_per_s=metrics["perf/tokens_per_s"],
                mfu=metrics.get("perf/mfu"),
                peak_memory_bytes=metrics["perf/peak_memory_gb"] * 1e9,
                forward_backward_s=metrics["time/forward_backward"],
                optimizer_s=metrics["time/optimizer"],
            )
        self.last_step = StepStatus(
            step=step,
            reward=finite(self.curves.rewards[-1]),
            mean_staleness=mean_staleness,
            max_staleness=max(staleness, default=0),
            accepted_tokens_per_s=tokens_per_s,
            seconds=step_s,
            useful_share=metrics.get("groups/useful"),
        )
        self._curve = self._rewards_by_step(step)
        self._pace.stepped(now=now)
        self._stepped_at, self._bytes_reported = now, bytes_sent
        self._tokens_reported = self.num_accepted_tokens
        self._published_s = 0.0
        return row

    def describe_zero_signal(self, step: int) -> str:
        """Return a log line for a run that ends at `step` because groups had no training signal.

        The line has the reason and a remedy.
        """
        groups = counted(self.zero_signal.num_groups, "group")
        what = (
            f"nothing could be learned from the last {groups} ({self.zero_signal_text}): the run "
            f"ends at step {step}"
        )
        return f"{what}; {self._zero_signal_advice()}"

    def _zero_signal_advice(self) -> str:
        [(reason, _)] = self._zero_signal_reasons.most_common(1)
        if reason in _ADVICE:
            return _ADVICE[reason]
        stats = self.zero_signal
        mean = stats.reward_sum / max(1, stats.num_rollouts)
        spread = stats.reward_square_sum / max(1, stats.num_rollouts) - mean * mean
        if spread > 1e-9 * max(1.0, mean * mean):
            return (
                "rewards differ from prompt to prompt and never among the answers to one: "
                "all of them are right or all are wrong, or the reward does not depend on the "
                "answer. Look at it, choose prompts of middle difficulty, or raise "
                "batch.group_size or sampling.temperature"
            )
        if mean >= 1:
            return f"every reward was {mean:g}: the task is solved"
        if mean > 0:
            return (
                f"every reward was {mean:g}: if more cannot be had, the task is solved; if it can, "
                "look whether the reward tells a right answer from a wrong one"
            )
        return (
            f"every reward was {mean:g}. Call the reward with a right answer: if that is worth no "
            "more, mend the reward. Otherwise the prompts are too hard: choose easier ones, or "
            "raise batch.group_size, sampling.temperature or batch.max_zero_signal_batches"
        )

    def describe_failing(self, step: int) -> str | None:
        """Return a log line for a run that ends at `step` because groups failed.

        The result is None if, since a group was last stored for training, fewer than half of the
        groups failed.
        """
        num_groups = self.zero_signal.num_groups
        if 2 * self._num_failed < num_groups:
            return None
        return (
            f"{self._num_failed} of the last {counted(num_groups, 'group')} could not be finished "
            f"({self.zero_signal_text}): the run ends at step {step} and is saved; mend what fails "
            f"and continue with --resume. The last one, {self._cause}"
        )

    @property
    def zero_signal_text(self) -> str:
        """Reasons why groups had no training signal since the last useful group, with counts."""
        return ", ".join(f"{n} {reason}" for reason, n in self._zero_signal_reasons.most_common())

    @property
    def idle_ratio(self) -> float:
        """Share of all steps' time that the learner spent waiting for groups."""
        total_s = self._waited_s + self._trained_s
        return self._waited_s / total_s if total_s else 0.0

    def _with_quality(self, view: NodeStatus) -> NodeStatus:
        found = self.workers.of(view.node_id)
        mismatch_kl, reward = finite(found.get("mismatch_kl")), finite(found.get("reward"))
        return replace(view, mismatch_kl=mismatch_kl, reward=reward)

    def status(
        self,
        role: Learner,
        *,
        run_name: str,
        max_steps: int,
        pace: PublishPace,
        cost: CostStatus | None = None,
        waiting_for: str = "",
        explanation: str = "",
        notices: tuple[str, ...] = (),
        price_per_h: float | None = None,
        at: float = 0.0,
        now: float,
    ) -> RunStatus:
        """Return the status of the run, which every view shows.

        Args:
            role: the learner's role.
            run_name: the name of the run.
            max_steps: number of steps after which the run is finished.
            pace: the pace of publishing.
            cost: the costs of the run; None if no machine has a price.
            waiting_for: the cause of the learner's wait; empty if it does not wait.
            explanation: why the run stalls; empty if it does not stall.
            notices: the newest log lines.
            price_per_h: the price of the learner's machine, $ per hour; None if it is not stated.
            at: the time of day, Unix seconds.
            now: the loop's time, seconds.
        """
        bound = role.buffer.admission_staleness
        max_staleness = role.settings.leases.max_staleness
        learner = self._learner(role, price_per_h=price_per_h, now=now)
        others = map(self._with_quality, role.fleet.nodes(step=role.step, now=now))
        return RunStatus(
            run_name=run_name,
            at=at,
            state="paused" if role.is_paused else "running",
            elapsed_s=now - self._started_at,
            step=role.step,
            max_steps=max_steps,
            max_staleness=max_staleness,
            staleness_bound=bound if bound < max_staleness else None,
            publish_period=pace.period,
            activity=self.activity,
            waiting_for=waiting_for,
            explanation=explanation,
            eta_s=self._pace.eta_s(max_steps - role.step, now=self.running(now)),
            nodes=(learner, *others),
            reward_history=self._curve,
            eval_history=self._evaluations(),
            evals_are_rates=self.curves.evals_are_rates,
            eval_errors=dict(self.curves.eval_errors),
            staleness_tokens=dict(self._staleness_tokens),
            idle_ratio=self.idle_ratio_by_now(now),
            recent_idle_ratio=self.recent_idle_ratio(now),
            last_step=self.last_step,
            speed=self._speed,
            num_buffered=len(role.buffer),
            groups_per_step=role.settings.leases.groups_per_step,
            num_leased=role.leases.num_running,
            versions=role.fleet.versions(),
            broadcast_bytes=role.broadcast.bytes_sent,
            refused=_refusals(role.counters.as_dict()),
            cost=cost,
            notices=notices,
        )

    def _learner(self, role: Learner, *, price_per_h: float | None, now: float) -> NodeStatus:
        broadcast, sent = role.broadcast, self._sent
        sent.append((now, broadcast.bytes_sent))
        while len(sent) > 2 and now - sent[0][0] > RATE_WINDOW_S:
            sent.popleft()
        (since, before), (until, after) = sent[0], sent[-1]
        newest = broadcast.newest_complete
        return NodeStatus(
            node_id=LEARNER_ID,
            role="learner",
            state=self.activity or "waiting",
            version="-" if newest is None else str(newest),
            staleness=None if newest is None else role.step - newest.step,
            tokens_per_s=0.0 if self._speed is None else self._speed.tokens_per_s,
            bytes_sent_per_s=(after - before) / max(until - since, 1e-6),
            uplink_bytes_per_s=clamped_rate(broadcast.uplink.bytes_per_s),
            price_per_h=price_per_h,
        )

    def _rewards_by_step(self, step: int) -> tuple[tuple[int, float], ...]:
        rewards = self.curves.rewards
        return thinned(list(zip(range(step - len(rewards) + 1, step + 1), rewards, strict=True)))

    def _evaluations(self) -> tuple[tuple[int, float, float], ...]:
        known = sorted(point for point in self.curves.evals if all(map(math.isfinite, point)))
        return tuple(known[-MAX_POINTS:])


# --- Mismatch and reward of each worker's newest trained groups: `workers/` ---


MAX_NAMES_SHOWN = 64
"""A table in a row of metrics has at most this number of names: those with the largest values, such
as mismatch, bytes or costs. A larger fleet would make each row long.
"""


@dataclass(frozen=True, slots=True)
class _Made:
    mismatch: Mismatch
    reward: float


class WorkerQuality:
    """Mismatch and reward of each worker, over its newest WINDOW trained groups."""

    def __init__(self) -> None:
        self._made: RecentMap[str, deque[_Made]] = RecentMap(max_entries=MAX_NAMES_KEPT)

    def trained(
        self, groups: Sequence[Group], by_group: Mapping[int, Mismatch], *, step: int
    ) -> list[Sampled]:
        """Record the groups of a step. Return a sample for each group whose mismatch was measured.

        A sample has the worker's id, the mean staleness and the mean mismatch KL.

        Args:
            groups: the groups of the step.
            by_group: mismatch by group id, for the groups whose tokens the trainer scored.
            step: number of optimizer steps done before this step.
        """
        samples = []
        for group in groups:
            mismatch = by_group.get(group.group_id)
            if mismatch is None or not mismatch.num_tokens:
                continue
            made = self._made.get(group.worker_id)
            if made is None:
                made = self._made[group.worker_id] = deque(maxlen=WINDOW)
            made.append(_Made(mismatch, fmean(group.rewards)))
            staleness = _mean_staleness(group, step=step)
            samples.append(Sampled(group.worker_id, staleness, mismatch.mean_kl))
        return samples

    def of(self, worker_id: str) -> dict[str, float]:
        """Return a worker's statistics by name; empty if none of its groups was trained."""
        made = self._made.get(worker_id)
        if not made:
            return {}
        total = sum((each.mismatch for each in made), Mismatch())
        return {**total.metrics(), "reward": fmean(each.reward for each in made)}

    def row(self, worker_ids: Iterable[str]) -> dict[str, Mapping[str, float]]:
        """Return each statistic as a table of workers, named "workers/<statistic>".

        Workers without a trained group are left out. At most MAX_NAMES_SHOWN workers are
        included, those with the largest mismatch.
        """
        known = {name: found for name in worker_ids if (found := self.of(name))}
        worst = sorted(known, key=lambda name: -known[name]["mismatch_kl"])[:MAX_NAMES_SHOWN]
        return {
            f"workers/{statistic}": {name: known[name][statistic] for name in sorted(worst)}
            for statistic in ("logprob_difference", "mismatch_kl", "ess", "surprise", "reward")
            if worst
        }


def _mean_staleness(group: Group, *, step: int) -> float:
    steps = np.concatenate(
        [rollout.policy_versions[rollout.completion_mask, 1] for rollout in group.rollouts]
    )
    return step - float(steps.mean()) if len(steps) else 0.0


def _refusals(counts: Mapping[str, float]) -> dict[str, int]:
    prefixes = ("refused/", "discarded/")
    return {
        name.split("/", 1)[1]: int(count)
        for name, count in counts.items()
        if name.startswith(prefixes)
    }


# --- Weight bytes by link: `links/` ---


NO_PARENT = "-"
"""The name that a node without a parent reports as its parent."""


def largest(values: Mapping[str, float]) -> dict[str, float]:
    """Return the MAX_NAMES_SHOWN largest values, and the sum of all others as "others"."""
    names = sorted(values, key=lambda name: -values[name])
    shown = {name: values[name] for name in sorted(names[:MAX_NAMES_SHOWN])}
    others = sum(values[name] for name in names[MAX_NAMES_SHOWN:])
    return {**shown, "others": others} if others else shown


class LinkTraffic:
    """Weight bytes that each node receives from its parent in a step.

    The bytes that a node received in a step count for the parent that the node has at the end of
    the step. If the node has no parent then, the bytes count for its last parent.
    """

    def __init__(self, *, is_resumed: bool) -> None:
        """Start without totals.

        In a new run, the first total of a node counts in full. Nodes continue to count while the
        learner is away. So a resumed learner counts only what a node adds to its first total.
        """
        self._is_resumed = is_resumed
        self._before: RecentMap[str, tuple[int, str]] = RecentMap(max_entries=MAX_NAMES_KEPT)

    def row(self, members: Iterable[Member]) -> dict[str, Mapping[str, float]]:
        """For each link, return the bytes since the last call and the measured bytes per second.

        A link is named "PARENT > NODE".
        """
        received, goodput = {}, {}
        for member in members:
            total, parent = member.stats.bytes_received, member.stats.parent
            first = total if self._is_resumed else 0
            before, last_parent = self._before.get(member.node_id) or (first, parent)
            parent = last_parent if parent == NO_PARENT else parent
            self._before[member.node_id] = total, parent
            name = f"{parent} > {member.node_id}"
            if total != before:
                received[name] = float(_increase(before, total))
                if member.stats.downlink_bytes_per_s is not None:
                    goodput[name] = member.stats.downlink_bytes_per_s
        shown = largest(received)
        rates = {name: goodput[name] for name in shown if name in goodput}
        tables = {"links/bytes": shown, "links/goodput": rates}
        return {name: table for name, table in tables.items() if table}


# --- Metrics of the task's own code and the engines, over all workers: `env/`, `engine/` ---
# Workers report their totals with every heartbeat. Here the totals become differences from one step
# to the next. A worker that restarts counts from 0 again.


EPISODE_COUNTS = ("env/episodes", "env/turns", "env/tool_calls")
"""Names of counts that cover the finished episodes of environments."""

COUNTED = ("env/calls", "env/errors", "env/retries")

RARE = (
    "env/no_opinion",
    "env/turn_limit",
    "env/token_limit",
    "engine/out_of_memory",
    "engine/calls_failed",
    "engine/installs_failed",
    "engine/version_refused",
)
"""Names of counts that appear in a row only after they have risen above 0."""

MILLISECONDS = "env/milliseconds"
AGENT_COUNTS = (
    "agents/tokens_sampled",
    "agents/tokens_trained",
    "agents/tokens_abandoned",
    "agents/num_episodes",
    "agents/num_chains",
    "agents/num_turns",
)
"""Names of counts that cover finished sessions.

The counts are, in order: all sampled tokens, the tokens delivered for training, the tokens of
sessions that were given up, the delivered episodes, and the chains and the answered calls of these
episodes.
"""
TRAINED_SHARE = "agents/trained_share"
ABANDONED_SHARE = "agents/abandoned_share"


class TaskMetrics:
    """Computes counts per step from the totals that nodes report about the task's code."""

    def __init__(self, *, is_resumed: bool) -> None:
        """Start without totals.

        In a new run, the first totals of a worker count in full. Workers continue to count while
        the learner is away. So a resumed learner counts only what a worker adds to its first
        totals.
        """
        self._is_resumed = is_resumed
        self._before: RecentMap[str, Mapping[str, int]] = RecentMap(max_entries=MAX_NAMES_KEPT)
        self._seen: set[str] = set()

    def row(self, totals: Mapping[str, Mapping[str, int]]) -> dict[str, float]:
        """Return by how much each count has increased since the last call.

        `totals` has each node's running totals by name.
        """
        names = (*COUNTED, MILLISECONDS, *RARE, *AGENT_COUNTS, *EPISODE_COUNTS)
        before = {node: self._last(node, counts) for node, counts in totals.items()}
        sums = {
            name: sum(
                _increase(before[node].get(name, 0), counts.get(name, 0))
                for node, counts in totals.items()
            )
            for name in names
        }
        for node, counts in totals.items():
            self._before[node] = counts
        self._seen.update(name for name in names if sums[name])
        row: dict[str, float] = {name: sums[name] for name in RARE if name in self._seen}
        sampled, trained, abandoned, episodes, chains, turns = map(sums.__getitem__, AGENT_COUNTS)
        if sampled:
            row[TRAINED_SHARE] = trained / sampled
            row[ABANDONED_SHARE] = abandoned / sampled
        if episodes:
            row["agents/chains"] = chains / episodes
            row["agents/turns"] = turns / episodes
        if num_played := sums["env/episodes"]:
            row["env/turns"] = sums["env/turns"] / num_played
            row["env/tool_calls"] = sums["env/tool_calls"] / num_played
        if not self._seen.intersection((*COUNTED, MILLISECONDS)):
            return row
        row |= {name: sums[name] for name in COUNTED}
        if sums["env/calls"]:
            row["env/latency"] = sums[MILLISECONDS] / sums["env/calls"] / 1000
        return row

    def _last(self, node: str, counts: Mapping[str, int]) -> Mapping[str, int]:
        """Return a node's totals at the last call; for a new node, the totals to count from."""
        known = self._before.get(node)
        if known is None:
            return counts if self._is_resumed and node != LEARNER_ID else {}
        return known


def _increase(before: int, now: int) -> int:
    return now - before if now >= before else now
