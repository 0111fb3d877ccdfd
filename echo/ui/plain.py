"""Tell how a run goes in single lines, for pipes, log files and terminals that cannot draw.

At most one line per step and one per interval; the first and last step, evaluations and notices
always show. A learner that waits says so, less and less often while nothing changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from rich.console import Console

from echo.core.metrics import Snapshot
from echo.ui.charts import clean
from echo.ui.pace import Pace, clock
from echo.ui.sections import idle_shares, short_count

_MAX_NOTICES_PER_UPDATE = 5
_WAIT_GROWTH = 2
_MAX_WAIT_INTERVAL_S = 300.0


class PlainLog:
    """Write the lines that `lines_for` finds worth writing to a console."""

    def __init__(
        self,
        console: Console,
        *,
        interval_s: float = 5.0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Write to `console`, step lines at least `interval_s` seconds apart on the clock `now`."""
        self._console = console
        self._interval_s = interval_s
        self._now = now
        self._pace = Pace()
        self._step_shown = -1
        self._step_seen = -1
        self._shown_at = float("-inf")
        self._step_at = now()
        self._wait_interval_s = 2 * interval_s
        self._evals: set[tuple[int, float, float]] | None = None
        self._notices: Sequence[str] = ()

    def paint(self, snapshot: Snapshot) -> None:
        """Write whatever is new in `snapshot`."""
        self._write(self.lines_for(snapshot))

    def finish(self, snapshot: Snapshot) -> None:
        """Write what is left to say, the last step in any case."""
        lines = self.lines_for(snapshot)
        if snapshot.step != self._step_shown:
            self._step_shown = snapshot.step
            lines.append(self._step_line(snapshot))
        self._write(lines)

    def lines_for(self, snapshot: Snapshot) -> list[str]:
        """Return the lines to write now: notices, evaluations, the step or the wait."""
        now = self._now()
        self._pace.observe(snapshot)
        stamp = f"[{clock(snapshot.elapsed_s)}]"
        lines = [f"{stamp} {line}" for line in self._new_notices(snapshot.notices)]
        if self._evals is None:  # what was evaluated before a resume is no news
            earlier = snapshot.eval_history if snapshot.resumed_at else ()
            self._evals = {point for point in earlier if point[0] <= snapshot.resumed_at}
        for point in snapshot.eval_history:
            if point not in self._evals:
                self._evals.add(point)
                step, sampled, greedy = point
                rates = f"{sampled:.3f} sampled, {greedy:.3f} greedy"
                if num_errors := snapshot.eval_errors.get(step):
                    rates += f"; {num_errors} rewards failed and count as 0"
                lines.append(f"{stamp} eval at step {step}: held-out pass rate {rates}")
        if snapshot.step != self._step_seen:
            self._step_seen, self._step_at = snapshot.step, now
            self._wait_interval_s = 2 * self._interval_s
        is_due = now - self._shown_at >= self._interval_s or snapshot.step >= snapshot.max_steps
        if snapshot.step != self._step_shown and is_due:
            self._step_shown, self._shown_at = snapshot.step, now
            lines.append(self._step_line(snapshot))
        elif (
            snapshot.waiting_for
            and now - max(self._shown_at, self._step_at) >= self._wait_interval_s
        ):
            self._shown_at = now
            self._wait_interval_s = min(self._wait_interval_s * _WAIT_GROWTH, _MAX_WAIT_INTERVAL_S)
            lines.append(
                f"{stamp} step {snapshot.step}/{snapshot.max_steps}  no step for "
                f"{clock(now - self._step_at)}, the learner waits for {clean(snapshot.waiting_for)}"
            )
        return lines

    def _step_line(self, snapshot: Snapshot) -> str:
        parts = [f"[{clock(snapshot.elapsed_s)}] step {snapshot.step}/{snapshot.max_steps}"]
        if snapshot.reward_history:
            parts.append(f"reward {snapshot.reward_history[-1]:.3f}")
        histogram = snapshot.staleness_tokens
        if tokens := sum(histogram.values()):
            mean = sum(staleness * count for staleness, count in histogram.items()) / tokens
            parts.append(f"staleness {mean:.2f} (max {max(histogram)} of {snapshot.max_staleness})")
        workers = [node for node in snapshot.nodes if node.role == "worker"]
        num_lost = sum(node.state.startswith("lost") for node in workers)
        lost = f" ({num_lost} lost)" if num_lost else ""
        num_alive = len(workers) - num_lost
        parts.append(f"{num_alive} worker{'' if num_alive == 1 else 's'}{lost}")
        parts.append(f"{short_count(snapshot.tokens_per_s)} tokens/s")
        parts.append(f"idle {idle_shares(snapshot)}")
        if (cost := snapshot.cost) is not None:
            standby = f", {cost.num_standby} on standby" if cost.num_standby else ""
            parts.append(f"${cost.per_h:.2f}/h (${cost.total:.2f} so far{standby})")
        refused = [
            f"{clean(reason)} {count}" for reason, count in snapshot.refused.items() if count
        ]
        if refused:
            parts.append(f"refused {', '.join(refused)}")
        eta_s = self._pace.eta_s(snapshot)
        if eta_s is not None and snapshot.step < snapshot.max_steps:
            parts.append(f"ETA {clock(eta_s)}")
        return "  ".join(parts)

    def _new_notices(self, notices: Sequence[str]) -> list[str]:
        """The notices that were not in the last snapshot; only the newest few of a flood."""
        known, self._notices = list(self._notices), notices
        # The window slides: what is known is the longest end of the old that starts the new one.
        num_known = min(len(known), len(notices))
        while num_known and known[-num_known:] != list(notices[:num_known]):
            num_known -= 1
        new = [clean(line) for line in notices[num_known:]]
        num_hidden = len(new) - _MAX_NOTICES_PER_UPDATE
        if num_hidden <= 0:
            return new
        return [f"({num_hidden} earlier notices not shown)", *new[num_hidden:]]

    def _write(self, lines: Sequence[str]) -> None:
        """Write each line whole; what the console's encoding lacks becomes a question mark."""
        encoding = self._console.encoding
        for line in lines:
            encodable = line.encode(encoding, "replace").decode(encoding)
            self._console.print(
                encodable, markup=False, highlight=False, emoji=False, soft_wrap=True
            )
