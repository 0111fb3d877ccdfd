"""Warnings of other packages: counted, and told at the end in a line each.

What pyproject.toml makes an error fails its test: a warning that our modules and tests cause, and
from anywhere one that tells of something left open, never awaited, or raised where nobody sees it.
What else other packages say, of their next release above all, is no reason to fail today.
"""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path

import pytest

MOST_CHARACTERS = 120
SCRIPTS = ("bench", "docs")
"""Folders whose modules know each other by bare names."""


class OtherWarnings:
    """Count what is no error, and tell it at the end."""

    def __init__(self) -> None:
        self._num: Counter[str] = Counter()

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage) -> None:
        path = Path(warning_message.filename)
        _, is_package, inside = path.as_posix().rpartition("/site-packages/")
        where = inside if is_package else path.name
        text = " ".join(str(warning_message.message).split())[:MOST_CHARACTERS]
        name = warning_message.category.__name__
        self._num[f"{where}:{warning_message.lineno}: {name}: {text}"] += 1

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._num:
            return
        terminalreporter.section(f"{self._num.total()} warnings of other packages")
        for text, number in self._num.most_common():
            terminalreporter.write_line(f"{number:5} {text}")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(OtherWarnings())
    scripts = [path for name in SCRIPTS for path in (config.rootpath / name).glob("*.py")]
    for path in scripts:
        config.addinivalue_line("filterwarnings", rf"error:::{path.stem}\Z")
