"""The learner's command: the node, its metrics and its live view, and the summary at the end."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from echo.cli import interrupts
from echo.cli.output import make_log
from echo.cli.process import run_loop, run_node
from echo.config.load import resolved
from echo.config.schema import Config
from echo.metrics import Snapshot
from echo.runtime.curve import Join
from echo.runtime.learner_setup import build_learner
from echo.runtime.transport import is_loopback
from echo.ui.live import LiveView
from echo.ui.plots import learning_curve
from echo.ui.sinks import MetricsWriter
from echo.ui.summary import as_text, summarise

MAX_NOTICES = 6
"""Log lines shown in the live view."""


class NoticeBoard(logging.Handler):
    """Keeps the newest log lines for the live view, and knows which it has not shown."""

    def __init__(self) -> None:
        """Start empty."""
        super().__init__()
        self.lines: list[str] = []
        self._num_unseen = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Take a line."""
        self.lines = [*self.lines, self.format(record)][-MAX_NOTICES:]
        self._num_unseen += 1

    def show(self) -> tuple[str, ...]:
        """Return the lines for the view, which shows them now."""
        self._num_unseen = 0
        return tuple(self.lines)

    @property
    def unseen(self) -> list[str]:
        """The lines that came after the view's last look."""
        return self.lines[-self._num_unseen :] if self._num_unseen else []


def run_learner(config: Config, *, resume: bool, has_report: bool) -> int:
    """Run the learner with its display; return the exit code."""
    run_dir = config.run_dir
    board = NoticeBoard()
    board.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    log = make_log("learner", to_file=run_dir / "logs" / "learner.log", to_terminal=False)
    log.addHandler(board)
    sampling = config.sampling
    if sampling.top_p < 1 or sampling.top_k:
        log.warning(
            "sampling.top_p or top_k truncates what workers sample: their log-probabilities are of "
            "the truncated distribution, the learner's of the whole one, so ratios start below 1"
        )
    console = Console(stderr=True)
    section = config.metrics
    with (
        interrupts.unwinding(),
        MetricsWriter(
            run_dir,
            tensorboard=section.tensorboard,
            wandb=section.wandb,
            wandb_project=section.wandb_project,
            config=resolved(config),
        ) as metrics,
        LiveView(console, config.ui.refresh_per_s, mode=config.ui.live) as view,
    ):
        code = run_loop(
            _run(config, resume=resume, metrics=metrics, show=_show_on(view, board), log=log), log
        )
    if code and not interrupts.is_interruption(code):
        print(f"error: {board.lines[-1] if board.lines else 'see the log'}", file=sys.stderr)
        print(f"log: {run_dir / 'logs' / 'learner.log'}", file=sys.stderr)
        return code
    for line in board.unseen:
        # Above all what Ctrl-C has saved and how to go on: it is told after the view has ended.
        print(line, file=sys.stderr)
    if not code and has_report and (run_dir / "final").exists():
        report(run_dir, console)
    return code


def _show_on(view: LiveView, board: NoticeBoard) -> Callable[[Snapshot], None]:
    return lambda snapshot: view.update(replace(snapshot, notices=board.show()))


async def _run(
    config: Config,
    *,
    resume: bool,
    metrics: MetricsWriter,
    show: Callable[[Snapshot], None],
    log: logging.Logger,
) -> str:
    node = await build_learner(
        config, resume=resume, write_metrics=metrics.write, show=show, log=log
    )
    if config.security.curve and sys.stderr.isatty():
        invite(config.run_dir / "keys" / "join")
    return await run_node(node)


def invite(join_path: Path) -> None:
    """Print how a worker on another machine joins; to a terminal only, since it is a secret."""
    join = Join.parse(join_path.read_text(encoding="utf-8"))
    if not is_loopback(join.address):
        print(f"others join with:\n  ECHO_JOIN={join} bin/echo-node --role worker", file=sys.stderr)


def report(run_dir: Path, console: Console, *, commands: list[str] | None = None) -> None:
    """Draw the learning curve and print the summary of a run."""
    learning_curve(run_dir, run_dir / "learning_curve.png")
    text = as_text(summarise(run_dir, commands=commands), width=min(console.width, 110))
    console.file.write(text + "\n")
    (run_dir / "summary.txt").write_text(text + "\n", encoding="utf-8")
