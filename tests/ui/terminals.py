"""Terminals in memory."""

from __future__ import annotations

import io

from rich.console import Console


class Terminal(io.TextIOWrapper):
    """A terminal in memory."""

    def __init__(self, encoding: str = "utf-8") -> None:
        self._shown = io.BytesIO()
        super().__init__(self._shown, encoding=encoding, write_through=True)

    def isatty(self) -> bool:
        return True

    def text(self) -> str:
        return self._shown.getvalue().decode(self.encoding)


def terminal_console(terminal: Terminal) -> Console:
    environ = {"TERM": "xterm"}
    return Console(file=terminal, width=80, height=24, force_terminal=True, _environ=environ)


class Pipe(io.StringIO):
    """A pipe whose reader has gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    def fileno(self) -> int:
        raise OSError("not a descriptor")
