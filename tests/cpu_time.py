"""CPU seconds of the suite by package, children included, at the end of pytest's output.

Wall time says how busy a machine was, CPU seconds what a test costs on any. A test is charged with
all that its process and the children of it used between its first fixture and the end of its last
one; so what a fixture of the session costs is charged to the test that had it made. Of a child's
own children those count that it has waited for; without /proc, of children too. A test that is run
again is charged with both runs.

The figure travels with the report of a test's teardown, so it would arrive from the workers of
pytest-xdist, too. The lines are those of a table in TOML, to be compared with tests/budget.toml.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

import pytest

PROPERTY = "cpu_s"
STARTED = pytest.StashKey[float]()


def used_s() -> float:
    """Return the CPU seconds of this process and its children, and of theirs that have ended."""
    times = os.times()
    own_s = times.user + times.system + times.children_user + times.children_system
    return own_s + sum(map(_living_s, _children()))


def _children() -> set[int]:
    """Return the children that still run; none where there is no /proc."""
    lists = [path.read_text() for path in Path("/proc/self/task").glob("*/children")]
    return {int(pid) for text in lists for pid in text.split()}


def _living_s(pid: int) -> float:
    """Return what a process has used, with those that it has waited for; 0 if it has just gone."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def package_of(node_id: str) -> str:
    """Return the directory of tests/ that a test is in, or "top" if it is in none."""
    folders = PurePosixPath(node_id.partition("::")[0]).parent.parts
    inside = folders[1:] if folders[:1] == ("tests",) else folders
    return inside[0] if inside else "top"


class CpuTime:
    """Charge every test, and tell at the end what each package has used."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()
        self._tests: defaultdict[str, set[str]] = defaultdict(set)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        item.stash[STARTED] = used_s()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Iterator[None]:
        report = yield
        if call.when == "teardown":
            now = used_s()
            seconds, item.stash[STARTED] = now - item.stash[STARTED], now
            report.user_properties = [*report.user_properties, (PROPERTY, seconds)]
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            package = package_of(report.nodeid)
            self._tests[package].add(report.nodeid)
            self._seconds[package] += dict(report.user_properties).get(PROPERTY, 0.0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._tests:
            return
        terminalreporter.section("CPU seconds by package")
        width = max(map(len, self._seconds))
        for package, seconds in self._seconds.most_common():
            tests = f"{len(self._tests[package])} tests"
            terminalreporter.write_line(f"{package:{width}} = {seconds:7.1f}  # {tests}")
        inside, everything = self._seconds.total(), used_s()
        terminalreporter.write_line(
            f"# {everything:.1f} in all, {max(everything - inside, 0.0):.1f} of them outside tests"
        )


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(CpuTime())
