"""The learner's command: the node, its metrics and its live view, and the summary at the end."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from echo.cli import interrupts
from echo.cli.output import LogFormatter, make_log
from echo.cli.process import run_loop, run_node
from echo.config.load import resolved
from echo.config.schema import Config
from echo.core.errors import EchoError
from echo.core.extras import PROGRAMS
from echo.core.metrics import LearningCurve, Snapshot
from echo.net.transport import is_loopback
from echo.records.run_files import read_metrics
from echo.runtime.identity import Join
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
        """Take a line; what raised where is for the log."""
        line = re.split(r"\n\s*Traceback \(", self.format(record), maxsplit=1)[0]
        self.lines = [*self.lines, line][-MAX_NOTICES:]
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
    board.setFormatter(LogFormatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
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
            sinks=section.sinks,
            wandb_project=section.wandb_project,
            config=resolved(config),
        ) as metrics,
        LiveView(console, mode=config.ui.live) as view,
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
    # Imported here: a relay's machine has no torch.
    from echo.runtime.learner.setup import build_learner

    node = await build_learner(
        config,
        resume=resume,
        write_metrics=metrics.write,
        show=show,
        log=log,
        earlier=read_curve(config.run_dir, log) if resume else None,
    )
    if config.security.curve and sys.stderr.isatty():
        invite(config.run_dir / "keys" / "join")
    return await run_node(node)


def read_curve(run_dir: Path, log: logging.Logger) -> LearningCurve | None:
    """Return what the run has learned so far; None, with a warning, if that cannot be read."""
    try:
        history = read_metrics(run_dir)
    except EchoError as error:
        log.warning("the view begins without the curve of the steps before: %s", error)
        return None
    rewards = {int(row["step"]): row["reward/mean"] for row in history.train}
    return LearningCurve(
        rewards={step: reward for step, reward in rewards.items() if reward is not None},
        evaluations=tuple((e.step, e.sampled, e.greedy) for e in history.evaluations),
    )


def invite(join_path: Path) -> None:
    """Print how a worker on another machine joins; to a terminal only, since it is a secret."""
    join = Join.parse(join_path.read_text(encoding="utf-8"))
    if not is_loopback(join.address):
        print(
            f"others join with:\n  ECHO_JOIN={join} {PROGRAMS}echo-rl node --role worker",
            file=sys.stderr,
        )


def report(run_dir: Path, console: Console, *, commands: list[str] | None = None) -> None:
    """Draw the learning curve and print the summary of a run."""
    learning_curve(run_dir, run_dir / "learning_curve.png")
    summary = summarise(run_dir, commands=commands)
    text = as_text(summary)
    on_screen = as_text(summary, width=min(console.width, 110)) if console.is_terminal else text
    console.file.write(on_screen + "\n")
    (run_dir / "summary.txt").write_text(text + "\n", encoding="utf-8")
