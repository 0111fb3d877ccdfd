"""Shows the live view of a run on a terminal. Without a terminal, writes log lines.

The learner passes snapshots to the view, and another thread draws the newest snapshot. So a paused
terminal (Ctrl-S) or a slow connection does not delay the learner. After an output error, the view
stops drawing and stores the reason.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from rich.console import Console, ConsoleOptions, RenderResult
from rich.errors import ConsoleError, LiveError
from rich.live import Live

from echo.core.monitoring.metrics import held_out
from echo.core.monitoring.status import RunStatus
from echo.core.units import counted, format_duration, per_million
from echo.ui.drawing import InAscii, clean, clock, short_count
from echo.ui.screen import bound_text, idle_shares, render_live

logger = logging.getLogger(__name__)

# --- plain log ------------------------------------------------------------------------------------
#
# At most one line per step and one per interval; the first and last step and notices always have a
# line. Evaluations are among the notices. A waiting learner is reported at growing intervals. Each
# hour has a line on what it has cost and brought.


_STEP_LINE_S = 5.0
"""Smallest time between the lines of two steps, seconds. Short steps would fill the log."""
_MAX_NOTICES_PER_UPDATE = 5
"""Largest number of notices that are written at once. Earlier notices are only counted."""
_MAX_WAIT_INTERVAL_S = 300.0
"""Largest time between two lines about the same wait, seconds. The first line follows after twice
_STEP_LINE_S, and each further interval is twice as long."""


class PlainLog:
    """Writes log lines to a console: notices, steps and the learner's waits."""

    def __init__(self, console: Console, *, now: Callable[[], float] = time.monotonic) -> None:
        """Write log lines to `console`. `now` returns the present time in seconds."""
        self._console = console
        self._now = now
        self._step_shown = -1
        self._step_seen = -1
        self._shown_at = float("-inf")
        self._step_at = now()
        self._wait_interval_s = 2 * _STEP_LINE_S
        self._notices: Sequence[str] = ()
        self._hour: RunStatus | None = None
        """The status that the run had at the start of the present hour."""

    def paint(self, snapshot: RunStatus) -> None:
        """Write lines about what has changed since the last snapshot."""
        self._write(self.lines_for(snapshot))

    def finish(self, snapshot: RunStatus) -> None:
        """Write lines about what has changed in the last snapshot of the run.

        The last step always gets a line.
        """
        lines = self.lines_for(snapshot)
        if self._is_news(snapshot):
            lines.append(self._step_line(snapshot))
        self._write(lines)

    def lines_for(self, snapshot: RunStatus) -> list[str]:
        """Return the lines to write now.

        The new notices come first. If an hour has passed, a line about it follows. The last line is
        about a new step or a long wait.
        """
        now = self._now()
        stamp = f"[{clock(snapshot.elapsed_s)}]"
        lines = [f"{stamp} {line}" for line in self._new_notices(snapshot.notices)]
        lines += [f"{stamp} {line}" for line in self._hour_line(snapshot)]
        if snapshot.step != self._step_seen:
            self._step_seen, self._step_at = snapshot.step, now
            self._wait_interval_s = 2 * _STEP_LINE_S
        is_due = now - self._shown_at >= _STEP_LINE_S or snapshot.step >= snapshot.max_steps
        if self._is_news(snapshot) and is_due:
            self._shown_at = now
            lines.append(self._step_line(snapshot))
        elif (
            snapshot.waiting_for
            and now - max(self._shown_at, self._step_at) >= self._wait_interval_s
        ):
            self._shown_at = now
            self._wait_interval_s = min(2 * self._wait_interval_s, _MAX_WAIT_INTERVAL_S)
            lines.append(
                f"{stamp} step {snapshot.step}/{snapshot.max_steps}  no step for "
                f"{clock(now - self._step_at)}, the learner waits for {clean(snapshot.waiting_for)}"
            )
        return lines

    def _hour_line(self, snapshot: RunStatus) -> list[str]:
        before = self._hour
        if before is None or snapshot.step < before.step:
            self._hour = snapshot
            return []
        if snapshot.elapsed_s < before.elapsed_s + 3600:
            return []
        self._hour = snapshot
        return [describe_progress(before, snapshot)]

    def _is_news(self, snapshot: RunStatus) -> bool:
        return snapshot.last_step is not None and snapshot.last_step.step != self._step_shown

    def _step_line(self, snapshot: RunStatus) -> str:
        last = snapshot.last_step
        assert last is not None
        self._step_shown = last.step
        parts = [f"[{clock(snapshot.elapsed_s)}] step {last.step}/{snapshot.max_steps}"]
        parts.append(f"reward {'nan' if last.reward is None else format(last.reward, '.3f')}")
        if last.mean_staleness is not None:
            parts.append(
                f"staleness {last.mean_staleness:.2f} (max {last.max_staleness}, "
                f"{bound_text(snapshot)})"
            )
        parts.append(f"{short_count(last.accepted_tokens_per_s)} tokens/s")
        parts.append(format_duration(last.seconds))
        return f"{'  '.join(parts)}  | {'  '.join(self._run_parts(snapshot))}"

    def _run_parts(self, snapshot: RunStatus) -> list[str]:
        parts = []
        workers = [node for node in snapshot.nodes if node.role == "worker"]
        num_lost = sum(node.state.startswith("lost") for node in workers)
        lost = f" ({num_lost} lost)" if num_lost else ""
        num_alive = len(workers) - num_lost
        parts.append(f"{counted(num_alive, 'worker')}{lost}")
        parts.append(f"idle {idle_shares(snapshot)}")
        if (cost := snapshot.cost) is not None:
            standby = f", {cost.num_standby} on standby" if cost.num_standby else ""
            parts.append(f"${cost.per_h:.2f}/h (${cost.total:.2f} so far{standby})")
        refused = [
            f"{clean(reason)} {count}" for reason, count in snapshot.refused.items() if count
        ]
        if refused:
            parts.append(f"refused {', '.join(refused)}")
        if snapshot.eta_s is not None and snapshot.step < snapshot.max_steps:
            parts.append(f"ETA {clock(snapshot.eta_s)}")
        return parts

    def _new_notices(self, notices: Sequence[str]) -> list[str]:
        """Return the notices that the last snapshot did not have.

        Return at most the newest _MAX_NOTICES_PER_UPDATE.
        """
        known, self._notices = list(self._notices), notices
        # The two windows overlap. The known lines are the longest end of the old window that begins
        # the new one.
        num_known = min(len(known), len(notices))
        while num_known and known[-num_known:] != list(notices[:num_known]):
            num_known -= 1
        new = [clean(line) for line in notices[num_known:]]
        num_hidden = len(new) - _MAX_NOTICES_PER_UPDATE
        if num_hidden <= 0:
            return new
        return [f"({counted(num_hidden, 'earlier notice')} not shown)", *new[num_hidden:]]

    def _write(self, lines: Sequence[str]) -> None:
        """Write each line without wrapping it.

        Question marks replace characters that the console's encoding lacks.
        """
        encoding = self._console.encoding
        for line in lines:
            encodable = line.encode(encoding, "replace").decode(encoding)
            self._console.print(
                encodable, markup=False, highlight=False, emoji=False, soft_wrap=True
            )


def describe_progress(before: RunStatus, after: RunStatus) -> str:
    """Return a line that describes the steps, tokens, rewards and costs between two statuses."""
    num_steps = after.step - before.step
    num_tokens = sum(after.staleness_tokens.values()) - sum(before.staleness_tokens.values())
    parts = [counted(num_steps, "step"), f"{short_count(num_tokens)} tokens trained"]
    for label, first, last in (
        ("reward", before.reward_history, after.reward_history),
        (held_out(after.evals_are_rates), before.eval_history, after.eval_history),
    ):
        if first and last:
            parts.append(f"{label} {first[-1][1]:.3f} -> {last[-1][1]:.3f}")
    if before.cost is not None and after.cost is not None:
        spent = after.cost.total - before.cost.total
        price = per_million(spent, num_tokens)
        each = "" if price is None else f" (${price:.3g} per million trained tokens)"
        parts.append(f"for ${spent:.2f}{each}")
    return f"the last {format_duration(after.elapsed_s - before.elapsed_s)}: {', '.join(parts)}"


# --- full-screen view -----------------------------------------------------------------------------


REDRAW_S = 0.25
"""The screen is drawn at most once in this many seconds."""
_CLOSE_TIMEOUT_S = 2.0
"""A blocked terminal may delay the end of the run by at most this many seconds."""

OUTPUT_ERRORS = (OSError, ValueError, ConsoleError, LiveError, SystemExit)
"""Exceptions that a terminal raises if it is lost (EIO), blocked or closed, or if its encoding
lacks a character.

rich reports a pipe without a reader as SystemExit.
"""


class _Frame:
    """A snapshot.

    Its layout is computed while it is drawn, so that it fits the terminal's present size.
    """

    def __init__(self, snapshot: RunStatus) -> None:
        self._snapshot = snapshot

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        # The last row stays free: a line end there would scroll the first row away.
        height = console.size.height - 1
        view = render_live(self._snapshot, options.max_width, height=height)
        yield InAscii(view) if options.ascii_only else view


class _ScreenPainter:
    """Draws snapshots on the terminal's alternate screen. There a resize leaves no traces."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None

    def paint(self, snapshot: RunStatus) -> None:
        frame = _Frame(snapshot)
        if self._live is None:
            self._live = Live(
                frame,
                console=self._console,
                screen=True,
                auto_refresh=False,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._live.start(refresh=True)
        else:
            self._live.update(frame, refresh=True)

    def finish(self, snapshot: RunStatus) -> None:
        if self._live is not None:
            self._live.stop()
        self._console.print(_Frame(snapshot))


class LiveView:
    """Shows the newest snapshot on a console, at most once per `REDRAW_S`.

    Use the view as a context manager, or call `close`. The view's methods raise no errors if the
    terminal is resized, paused or gone, or if the terminal's encoding lacks block characters.
    """

    def __init__(self, console: Console, *, mode: Literal["auto", "on", "off"] = "auto") -> None:
        """Start the thread that draws. It waits for the first `update`.

        Args:
            console: the console to draw on.
            mode: "auto" draws on a terminal and writes lines to other outputs. "on" always draws,
                and "off" always writes lines.
        """
        can_draw = console.is_terminal and not console.is_dumb_terminal
        is_drawn = mode == "on" or (mode == "auto" and can_draw)
        self.failure: str | None = None
        """The reason why the view has stopped drawing; None while the view works."""
        self._painter = _ScreenPainter(console) if is_drawn else PlainLog(console)
        self._newest: RunStatus | None = None
        self._has_news = threading.Event()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="live-view", daemon=True)
        self._thread.start()

    def update(self, snapshot: RunStatus) -> None:
        """Set the snapshot that is drawn next, and return at once."""
        self._newest = snapshot
        self._has_news.set()

    def close(self) -> None:
        """Show the last snapshot and restore the terminal. This takes a limited time.

        Further calls have no effect.
        """
        self._is_closing.set()
        self._has_news.set()
        self._thread.join(_CLOSE_TIMEOUT_S)

    def __enter__(self) -> LiveView:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._is_closing.is_set():
            self._has_news.wait()
            self._has_news.clear()
            if self._newest is not None and self.failure is None and not self._is_closing.is_set():
                with self._surviving():
                    self._painter.paint(self._newest)
            self._is_closing.wait(REDRAW_S)
        # After a failure too, to restore the terminal as far as possible.
        if self._newest is not None:
            with self._surviving():
                self._painter.finish(self._newest)

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        """Suppress an output error, and record it in `failure`."""
        try:
            yield
        except OUTPUT_ERRORS as error:
            if self.failure is None:
                self.failure = f"{type(error).__name__}: {error}"
                logger.warning("The live view stopped, the run goes on: %s", self.failure)
