"""What the learner tells of itself: a row of metrics per step, and the picture on the screen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from echo.core.metrics import Snapshot
from echo.protocol.learner_session import LearnerSession
from echo.runtime.activation import Activating
from echo.runtime.learner_plan import LearnerPlan
from echo.runtime.progress import Progress
from echo.weights.schedule import PublishPace

Row = Mapping[str, float | Mapping[str, float]]


class Reporting:
    """Rows and pictures, made of running totals."""

    def __init__(
        self,
        session: LearnerSession,
        *,
        progress: Progress,
        pace: PublishPace,
        activating: Activating,
        plan: LearnerPlan,
        write_metrics: Callable[[int, Row], None],
        show: Callable[[Snapshot], None],
        clock: Callable[[], float],
    ) -> None:
        """Join the parts.

        Args:
            session: the learner's conversation.
            progress: running totals.
            pace: when to publish.
            activating: what the run costs.
            plan: names and numbers of the run.
            write_metrics: appends one row of metrics.
            show: draws a snapshot.
            clock: the loop's, seconds.
        """
        self._session = session
        self._progress = progress
        self._pace = pace
        self._activating = activating
        self._plan = plan
        self._write_metrics = write_metrics
        self._show = show
        self._clock = clock

    def write_step(
        self, metrics: Mapping[str, float], staleness: Mapping[int, int], *others: Row
    ) -> None:
        """Append the row of the step that was just made.

        Args:
            metrics: what the trainer reports.
            staleness: its trained tokens by staleness.
            others: what else belongs into the row.
        """
        session = self._session
        row = self._progress.step_metrics(
            metrics, staleness, bytes_sent=session.broadcast.bytes_sent, now=self._clock()
        )
        row |= self._pace.metrics()
        row |= self._activating.metrics(row, now=self._clock())
        row |= self._progress.lengths.metrics(oldest_open=session.leases.oldest_open)
        row |= partial_metrics(session)
        for other in others:
            row |= other
        row["lineage"] = session.lineages[-1].lineage
        row |= {f"count/{name}": value for name, value in session.counters.as_dict().items()}
        self._write_metrics(session.step, row)

    async def show_loop(self) -> None:
        """Draw again and again, until everybody is told that the run is over."""
        while self._session.finish_reason is None:
            self.display()
            await asyncio.sleep(self._plan.refresh_s)

    def display(self) -> None:
        """Draw the present state."""
        self._show(
            self._progress.snapshot(
                self._session,
                run_name=self._plan.run_name,
                max_steps=self._plan.max_steps,
                pace=self._pace,
                cost=self._activating.view(),
                now=self._clock(),
            )
        )


def partial_metrics(session: LearnerSession) -> dict[str, float]:
    """Return what became of unfinished rollouts; empty where none was ever continued.

    Totals are among the counters; here are how many groups wait to be continued, how many steps old
    the oldest token of a continued group was on average, and which share of what was sampled was
    thrown away or will not be trained on.
    """
    counts = session.counters
    if not counts["partials/resumed"] and not counts["partials/parked"]:
        return {}
    members = session.roster.members("worker")
    num_sampled = sum(member.stats.tokens_sampled for member in members)
    num_wasted = counts["partials/wasted_tokens"] + counts["partials/masked_tokens"]
    num_wasted += counts["partials/trimmed_tokens"] + session.buffer.num_trimmed_tokens
    return {
        "partials/waiting": sum(member.worker.num_waiting for member in members),
        "partials/mean_age": counts["partials/age_sum"] / max(1, counts["partials/resumed"]),
        "partials/wasted_ratio": num_wasted / max(1, num_sampled),
    }
