"""Make the rows of metrics and the status of a run for its follower.

The follower is the part of the learner's process that writes and displays them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Protocol

from echo.config.schema import RunSection
from echo.core.monitoring.samples import TextSample
from echo.core.monitoring.status import RunState, RunStatus
from echo.net.transport import Transport
from echo.roles.learner import Learner
from echo.runtime.learner.batches.bound import AdaptiveBound
from echo.runtime.learner.batches.rewards import LearnerRewards
from echo.runtime.learner.batches.stalls import Stalls
from echo.runtime.learner.costs.control import CostControl
from echo.runtime.learner.report import (
    ABANDONED_SHARE,
    TRAINED_SHARE,
    LinkTraffic,
    Progress,
    TaskMetrics,
)
from echo.runtime.threads import Pool
from echo.weights.schedule import PublishPace
from echo.wire.messages import LEARNER_ID

Row = Mapping[str, float | Mapping[str, float] | Mapping[str, str]]

MIN_TRAINED_SHARE = 0.5
"""If less than this share of the agents' tokens is trained on, a warning is logged once."""
SAVE_S = 30.0
"""Seconds between two writes of the status to the disk."""
REFRESH_S = 0.25
"""Seconds between two updates of the display."""


class Follower(Protocol):
    """Receives a run's metrics and status, to write and display them."""

    is_watching: bool
    """Whether the follower displays the status."""

    def write_metrics(self, step: int, row: Row) -> None:
        """Append the row of metrics of `step`."""

    def write_samples(self, step: int, samples: Sequence[TextSample]) -> None:
        """Pass sample rollouts to the trackers.

        `step` is the training step, or the step of the evaluated version.
        """

    @property
    def notices(self) -> tuple[str, ...]:
        """The newest log lines for the operator, oldest first."""

    def show(self, status: RunStatus) -> None:
        """Draw the status of the run on the display."""

    def save(self, status: RunStatus) -> None:
        """Write the status to the disk. Called in a thread.

        Viewers read this file if the learner does not answer.
        """


class Reporter:
    """Makes rows of metrics and the run's status from the state of a learner's parts."""

    def __init__(
        self,
        follower: Follower,
        role: Learner,
        transport: Transport,
        *,
        run: RunSection,
        progress: Progress,
        pace: PublishPace,
        bound: AdaptiveBound,
        costs: CostControl,
        rewards: LearnerRewards | None,
        price_per_h: float | None,
        time_of_day: Callable[[], float],
        stalls: Stalls,
        log: logging.Logger,
    ) -> None:
        """Report the state of the learner's parts to `follower`.

        `price_per_h` is the price of the learner's machine, $ per hour. `time_of_day` returns Unix
        seconds.
        """
        self._follower, self._role, self._transport = follower, role, transport
        self._run, self._progress, self._pace = run, progress, pace
        self._bound, self._costs, self._rewards = bound, costs, rewards
        self._price_per_h, self._time_of_day = price_per_h, time_of_day
        self._stalls = stalls
        self._log = log
        is_resumed = len(role.lineages) > 1  # also at step 0, without a checkpoint
        self._task_metrics = TaskMetrics(is_resumed=is_resumed)
        self._links = LinkTraffic(is_resumed=is_resumed)
        self._has_warned_of_share = False

    @property
    def is_watching(self) -> bool:
        """Whether the follower displays the status."""
        return self._follower.is_watching

    def write_step(
        self, metrics: Mapping[str, float], staleness: Mapping[int, int], *, now: float
    ) -> Row:
        """Make, write and return the row of metrics of the last step.

        Args:
            metrics: the trainer's metrics for the step.
            staleness: staleness in steps -> number of trained tokens with this staleness.
            now: the present time, seconds.
        """
        role = self._role
        row: dict[str, float | Mapping[str, float] | Mapping[str, str]] = {}
        row |= self._progress.step_metrics(
            metrics,
            staleness,
            step=role.step,
            bytes_sent=role.broadcast.bytes_sent,
            now=now,
        )
        row |= self._pace.metrics()
        row |= self._costs.metrics(row, now=now)
        row |= self._stalls.stepped(now)
        row |= self._links.row(role.roster.members())
        row |= self._progress.lengths.metrics(oldest_open=role.leases.oldest_open)
        row |= self._partial_metrics()
        row |= self._task_code_metrics()
        workers = [member.node_id for member in role.roster.members("worker")]
        row |= self._progress.workers.row(workers)
        row |= self._bound.metrics()
        row["lineage"] = role.lineages[-1].lineage
        row |= {f"count/{name}": value for name, value in role.counters.as_dict().items()}
        row |= {f"net/{name}": value for name, value in asdict(self._transport.stats()).items()}
        self._follower.write_metrics(role.step, row)
        return row

    def _task_code_metrics(self) -> dict[str, float]:
        roster = self._role.roster
        totals = {
            **roster.take_counts_left(),
            **{member.node_id: member.stats.refused for member in roster.members("worker")},
        }
        if self._rewards is not None:
            totals[LEARNER_ID] = self._rewards.counts()
        row = self._task_metrics.row(totals)
        share = row.get(TRAINED_SHARE, 1.0)
        if share < MIN_TRAINED_SHARE and not self._has_warned_of_share:
            self._has_warned_of_share = True
            self._log.warning(
                "%.0f %% of the tokens that agents have sampled are trained on; %.0f %% are of "
                "sessions that were given up, the others of chains beyond the most tokens of a "
                "rollout: raise learner.micro_batch_tokens, or rewrite less of the history "
                "(docs/training-agents.md)",
                100 * share, 100 * row[ABANDONED_SHARE],
            )  # fmt: skip
        return row

    def _partial_metrics(self) -> dict[str, float]:
        """Return metrics of unfinished rollouts; empty until a rollout is interrupted or continued.

        * partials/waiting: number of groups that wait to be continued.
        * partials/mean_age: age of the oldest token of a group, steps; mean over continued groups.
        * partials/wasted_ratio: share of sampled tokens that are not trained on.
        """
        role = self._role
        counts = role.counters
        if not counts["partials/resumed"] and not counts["partials/interrupted"]:
            return {}
        members = role.roster.members("worker")
        num_wasted = counts["partials/wasted_tokens"] + counts["partials/masked_tokens"]
        num_wasted += counts["partials/trimmed_tokens"] + role.buffer.num_trimmed_tokens
        return {
            "partials/waiting": sum(member.worker.num_waiting for member in members),
            "partials/mean_age": counts["partials/age_sum"] / max(1, counts["partials/resumed"]),
            "partials/wasted_ratio": num_wasted / max(1, counts["tokens/sampled"]),
        }

    async def save(self, pool: Pool, *, state: RunState | None = None) -> None:
        """Write the present status to the disk; `state`, if given, replaces the run's state."""
        status = self.status(now=asyncio.get_running_loop().time())
        if state is not None:
            learner, *others = status.nodes
            nodes = (replace(learner, state=state), *others)
            status = replace(status, state=state, nodes=nodes, waiting_for="", activity="")
        await pool.run(self._follower.save, status)

    async def keep_saved(self, pool: Pool) -> None:
        """Write the present status to the disk every SAVE_S until the run's end is announced."""
        while self._role.shutdown.reason is None:
            await self.save(pool)
            await asyncio.sleep(SAVE_S)

    async def run(self) -> None:
        """Draw the present status every REFRESH_S until the run's end is announced."""
        while self._role.shutdown.reason is None:
            self.display(now=asyncio.get_running_loop().time())
            await asyncio.sleep(REFRESH_S)

    def display(self, *, now: float) -> None:
        """Draw the present status if `is_watching` is true."""
        if not self._follower.is_watching:
            return
        self._stalls.check(now)
        self._follower.show(self.status(now=now))

    def status(self, *, now: float) -> RunStatus:
        """Return the present status of the run."""
        return self._progress.status(
            self._role,
            run_name=self._run.name,
            max_steps=self._run.max_steps,
            pace=self._pace,
            cost=self._costs.view(),
            waiting_for=self._stalls.waiting_for,
            explanation=self._stalls.explanation,
            notices=self._follower.notices,
            price_per_h=self._price_per_h,
            at=self._time_of_day(),
            now=now,
        )
