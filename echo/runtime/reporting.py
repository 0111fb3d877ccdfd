"""What the learner tells of itself: a row of metrics per step, and the picture on the screen."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from echo.core.metrics import Snapshot
from echo.roles.learner import Learner
from echo.runtime.learner.cost import CostControl
from echo.runtime.learner.report import Progress, Row, StepSettings, partial_metrics
from echo.weights.schedule import PublishPace


class Reporting:
    """Rows and pictures, made of running totals."""

    def __init__(
        self,
        session: Learner,
        *,
        progress: Progress,
        pace: PublishPace,
        activating: CostControl,
        plan: StepSettings,
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
