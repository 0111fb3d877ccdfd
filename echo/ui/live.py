"""Show a run while it goes on: a full-screen view on a terminal, log lines elsewhere.

The learner hands over snapshots and never waits for the terminal: a thread of its own draws the
newest one, so that a paused terminal (Ctrl-S), a slow connection or one that was cut costs the
learner nothing. Nothing that goes wrong with the output reaches it either: the view falls silent
and keeps the reason.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, Protocol

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.errors import ConsoleError, LiveError
from rich.live import Live
from rich.table import Table
from rich.text import Text

from echo.core.metrics import Snapshot
from echo.ui import sections
from echo.ui.charts import InAscii
from echo.ui.pace import Pace
from echo.ui.plain import PlainLog

logger = logging.getLogger(__name__)

_MIN_SIDE_BY_SIDE = 56
"""Below this width a curve and a histogram beside each other are both unreadable."""
_MAX_CHART_ROWS = 14
_MAX_NOTICES = 6
_CLOSE_TIMEOUT_S = 2.0
"""How long a terminal that takes no output may hold up the end of the run."""

OUTPUT_ERRORS = (OSError, ValueError, ConsoleError, LiveError, SystemExit)
"""What writing to a terminal can raise: gone (EIO), not ready, closed, not encodable.

SystemExit is how rich reports a pipe that nobody reads any more."""


def render(
    snapshot: Snapshot,
    width: int,
    *,
    height: int | None = None,
    eta_s: float | None = None,
) -> Group:
    """Draw `snapshot` as rows of text that fill `width` and fit into `height`.

    Args:
        snapshot: what to show.
        width: cells per row; made for 60 to 200, sensible outside.
        height: rows of the terminal; None for as many as are useful.
        eta_s: seconds to the end, None while unknown.
    """
    width = max(width, 1)
    rows_left = height if height is not None else 2 + _MAX_CHART_ROWS + len(snapshot.nodes) + 20
    title = sections.header(snapshot, width, eta_s=eta_s)
    num_wait_rows = 2 if width < 100 and rows_left >= 22 else 1
    state = sections.status(snapshot, width, num_wait_rows=num_wait_rows)
    refused = sections.refusals(snapshot.refused, width)
    told = sections.notices(snapshot.notices[-_MAX_NOTICES:], width)
    rows_of_newest, rows_of_notices = len(told[-1]) if told else 0, sum(map(len, told))
    # What each part gets, the most telling first; then air between the parts; then larger parts.
    rows_left -= len(title) + len(state)
    num_nodes = len(snapshot.nodes)
    wanted = {
        "chart": (6, _MAX_CHART_ROWS),
        "table": (min(num_nodes, 5) + 1, num_nodes + 1),
        "refused": (len(refused), len(refused)),
        "notices": (rows_of_newest, rows_of_notices),
        "gaps": (4 if refused or told else 3,) * 2,
    }
    granted = _share_out(wanted, rows_left)
    table = sections.node_table(snapshot.nodes, width, granted["table"])
    charts = _charts(snapshot, width, granted["chart"])
    foot = refused[: granted["refused"]] + _newest_whole(told, granted["notices"])
    rows = _join([title, charts, state, table, foot], granted["gaps"])
    return Group(*(rows if height is None else rows[:height]))


def _newest_whole(notices: list[list[Text]], num_rows: int) -> list[Text]:
    """Return the rows of the newest notices that fit as a whole, and of the newest in any case."""
    rows: list[Text] = []
    for notice in reversed(notices):
        if rows and len(rows) + len(notice) > num_rows:
            break
        rows = notice + rows
    return rows[:num_rows]


def _share_out(wanted: Mapping[str, tuple[int, int]], num_rows: int) -> dict[str, int]:
    """Grant each part its least rows while there are any, then the growing ones their most.

    Args:
        wanted: (least, most) rows per part, the most telling part first.
        num_rows: rows to share out.
    """
    granted = dict.fromkeys(wanted, 0)
    for name, limit in [
        *((name, least) for name, (least, _) in wanted.items()),
        *((name, wanted[name][1]) for name in ("table", "notices", "chart")),
    ]:
        extra = max(min(limit - granted[name], num_rows), 0)
        granted[name] += extra
        num_rows -= extra
    return granted


def _charts(snapshot: Snapshot, width: int, height: int) -> list[RenderableType]:
    """The reward curve, and beside it the histogram of staleness where both have room."""
    if width < _MIN_SIDE_BY_SIDE or height < 4:
        return [*sections.reward_chart(snapshot, width, height)]
    right_width = min(max(width * 3 // 10, 21), 44)
    left_width = width - right_width - 3
    beside = Table.grid(padding=(0, 3, 0, 0))
    for column_width in (left_width, right_width):
        beside.add_column(width=column_width)
    beside.add_row(
        Group(*sections.reward_chart(snapshot, left_width, height)),
        Group(*sections.staleness_histogram(snapshot, right_width, height)),
    )
    return [beside]


def _join(blocks: Iterable[Sequence[RenderableType]], num_gaps: int) -> list[RenderableType]:
    """All rows of `blocks` with a blank row before each block but the first, `num_gaps` at most."""
    rows: list[RenderableType] = []
    for block in blocks:
        if block and rows and num_gaps > 0:
            rows.append(Text())
            num_gaps -= 1
        rows += block
    return rows


class _Painter(Protocol):
    """One way to show snapshots; each method may raise any of OUTPUT_ERRORS."""

    def paint(self, snapshot: Snapshot) -> None:
        """Show `snapshot`."""

    def finish(self, snapshot: Snapshot) -> None:
        """Leave the terminal as found, with the last state on it."""


class _Frame:
    """A snapshot that takes the size of the terminal at the moment it is drawn."""

    def __init__(self, snapshot: Snapshot, eta_s: float | None) -> None:
        self._snapshot = snapshot
        self._eta_s = eta_s

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw for the console's present size and encoding."""
        # The last row stays free: a line end written there would scroll the first one away.
        height = console.size.height - 1
        view = render(self._snapshot, options.max_width, height=height, eta_s=self._eta_s)
        yield InAscii(view) if options.ascii_only else view


class _ScreenPainter:
    """Draw on the terminal's alternate screen, which a resize cannot smear."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._pace = Pace()
        self._live: Live | None = None

    def paint(self, snapshot: Snapshot) -> None:
        """Draw `snapshot` over the one before."""
        self._pace.observe(snapshot)
        frame = _Frame(snapshot, self._pace.eta_s(snapshot))
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

    def finish(self, snapshot: Snapshot) -> None:
        """Leave the alternate screen and print the last frame where the user will look."""
        if self._live is not None:
            self._live.stop()
        self._console.print(_Frame(snapshot, self._pace.eta_s(snapshot)))


class LiveView:
    """Show the newest snapshot on a console, at most `refresh_per_s` times a second.

    Use as a context manager or call `close`. No method raises because of the terminal: resized,
    paused, gone, or of an encoding without block characters.
    """

    def __init__(
        self,
        console: Console,
        refresh_per_s: float = 4.0,
        *,
        mode: Literal["auto", "on", "off"] = "auto",
        plain_interval_s: float = 5.0,
    ) -> None:
        """Start the drawing thread; nothing is shown before the first update.

        Args:
            console: where to draw.
            refresh_per_s: most redraws per second.
            mode: "auto" draws on a terminal and logs lines elsewhere; "on" and "off" insist.
            plain_interval_s: least seconds between two step lines where lines are logged.
        """
        if not refresh_per_s > 0:
            raise ValueError(f"refresh_per_s is {refresh_per_s}, must be above 0")
        can_draw = console.is_terminal and not console.is_dumb_terminal
        is_drawn = mode == "on" or (mode == "auto" and can_draw)
        self.failure: str | None = None
        """Why the view fell silent; None while it works."""
        self._painter: _Painter = (
            _ScreenPainter(console) if is_drawn else PlainLog(console, interval_s=plain_interval_s)
        )
        self._period_s = 1 / refresh_per_s
        self._newest: Snapshot | None = None
        self._has_news = threading.Event()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="live-view", daemon=True)
        self._thread.start()

    def update(self, snapshot: Snapshot) -> None:
        """Hand over the newest state; returns at once."""
        self._newest = snapshot
        self._has_news.set()

    def close(self) -> None:
        """Show the last state and give the terminal back; bounded, and harmless when repeated."""
        self._is_closing.set()
        self._has_news.set()
        self._thread.join(_CLOSE_TIMEOUT_S)

    def __enter__(self) -> LiveView:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _run(self) -> None:
        """Draw until closed, in the drawing thread."""
        while not self._is_closing.is_set():
            self._has_news.wait()
            self._has_news.clear()
            if self._newest is not None and self.failure is None and not self._is_closing.is_set():
                self._attempt(self._painter.paint, self._newest)
            self._is_closing.wait(self._period_s)
        # Also after a failure: whatever can still be restored of the terminal is.
        if self._newest is not None:
            self._attempt(self._painter.finish, self._newest)

    def _attempt(self, show: Callable[[Snapshot], None], snapshot: Snapshot) -> None:
        try:
            show(snapshot)
        except OUTPUT_ERRORS as error:
            if self.failure is None:
                self.failure = f"{type(error).__name__}: {error}"
                logger.warning("The live view stopped, the run goes on: %s", self.failure)
