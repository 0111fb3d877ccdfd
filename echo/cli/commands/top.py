"""`echo-rl top`: shows a run on a terminal, and lets the user operate the run by keys."""

from __future__ import annotations

import contextlib
import os
import sys
import termios
import tty
from argparse import Namespace
from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live

from echo.cli.output import run_command
from echo.cli.parsers import top_parser
from echo.core.errors import ConfigError
from echo.core.monitoring.status import RunStatus
from echo.runtime.access import find_run
from echo.runtime.viewer import operator_name, watch
from echo.ui.drawing import InAscii
from echo.ui.top import TopScreen
from echo.wire.messages import Operation


def main(argv: Sequence[str] | None = None) -> int:
    """Run `echo-rl top` and return its exit code."""
    return run_command(_run, top_parser().parse_args(argv))


def _run(arguments: Namespace, console: Console) -> int:
    target = find_run(arguments.run)
    if not target.accesses:
        raise ConfigError(
            f"{target.name}: its links are not encrypted (security.curve = false), or it has not "
            f"started; such a run admits no viewers: echo-rl status {target.name} shows its files"
        )
    if not (console.is_terminal and sys.stdin.isatty()):
        raise ConfigError("echo-rl top needs a terminal; echo-rl status prints once")
    with (
        raw_keys(sys.stdin.fileno()),
        Live(console=console, screen=True, auto_refresh=False) as live,
    ):
        watch(target, TerminalWatcher(live, sys.stdin.fileno()))
    return 0


@contextlib.contextmanager
def raw_keys(terminal: int) -> Iterator[None]:
    """Within the `with` block, make the terminal send each key at once and without echo."""
    before = termios.tcgetattr(terminal)
    try:
        tty.setcbreak(terminal)
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


class TerminalWatcher:
    """Draws the screen of `echo-rl top` on a terminal, and reads its keys."""

    def __init__(self, live: Live, keyboard: int) -> None:
        """Draw on `live`; read keys from the descriptor `keyboard`."""
        self._live = live
        self.keyboard: int | None = keyboard
        self._screen = TopScreen(by=operator_name())
        self._draw()

    @property
    def is_over(self) -> bool:
        """Whether the user has asked to end the command."""
        return self._screen.is_over

    def show(self, status: RunStatus, *, may_operate: bool) -> None:
        """Draw a status."""
        self._screen.show(status, may_operate=may_operate)
        self._draw()

    def say(self, text: str) -> None:
        """Draw one line of text, for example an operation's result."""
        self._screen.say(text)
        self._draw()

    def read_keys(self) -> list[Operation]:
        """Read the pressed keys; return the operations that the user has confirmed."""
        assert self.keyboard is not None
        pressed = os.read(self.keyboard, 1024)
        operations = self._screen.press(pressed.decode(errors="replace") if pressed else "q")
        self._draw()
        return operations

    def _draw(self) -> None:
        self._live.update(_Frame(self._screen), refresh=True)


class _Frame:
    def __init__(self, screen: TopScreen) -> None:
        self._screen = screen

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        view = self._screen.render(options.max_width, console.size.height - 1)
        yield InAscii(view) if options.ascii_only else view
