"""CPU seconds of the suite by package, children included, beside tests/budget.toml.

Wall time says how busy a machine was, CPU seconds what a test costs on any. A test is charged with
all that its process and the children of it used between its first fixture and the end of its last
one; so what a fixture of the session costs is charged to the test that had it made. Of a child's
own children those count that it has waited for; without /proc, of children too. The figure travels
with the report of a test's teardown, so it arrives from the processes of pytest-xdist, too.

A CPU second is worth less on a slower or a crowded machine. So every process measures a fixed
piece of work every `PACE_S` seconds: as many times as it takes longer than where the budgets were
measured, as many times larger is every limit (never smaller). Half of the work computes, half of it
writes to fresh pages: on a virtual machine whose host takes freed memory back, a page was seen to
cost a hundred times the usual, and the processor charges its owner for the wait. The limits:

- A package uses at most its budget, measured seconds plus a tenth, times `MARGIN`. Where most
  packages are further over their budgets than the piece of work tells, their median is the measure.
  All packages together are measured by the piece of work alone, so that what makes every test
  dearer is found, too.
- What a test uses by itself, its fixtures apart, is at most `MOST_S`, or `MOST_SLOW_S` where it is
  marked `slow`, in a run of the whole suite. Tests of processes (`e2e`) and those that only --all
  runs (`matrix`) have no limit.

The summary tells what is over its limit. In continuous integration (`CI=true`) that fails the run,
but only on a machine that is at most `QUIET` times as slow as the budgets': on others the figures
say more about the machine than about the tests. With --all nothing has a limit: its properties try
fifteen times as many examples.
"""

from __future__ import annotations

import mmap
import os
import statistics
import time
import tomllib
from collections import defaultdict
from collections.abc import Generator, Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

import pytest

PROPERTY = "cpu_s"
OWN, MOST = "own_cpu_s", "most_cpu_s"
SLOWNESS = "slowness"
STARTED, OWN_S = pytest.StashKey[float](), pytest.StashKey[float]()
BUDGET = Path(__file__).with_name("budget.toml")
MARGIN = 2.0
"""What the piece of work does not tell: other work has other needs of caches and memory."""
QUIET = 1.5
ENOUGH = 5
"""Packages whose median says something."""
MOST_S, MOST_SLOW_S = 2.0, 20.0
"""Wide: on a shared machine a test was seen to use four times as much as alone, and what is loaded
at its first use is charged to who comes first."""
UNLIMITED = {"e2e", "matrix"}
PACE_S = 20.0
PAGES = 4096


def used_s() -> float:
    """Return the CPU seconds of this process and its children, and of theirs that have ended."""
    times = os.times()
    own_s = times.user + times.system + times.children_user + times.children_system
    return own_s + sum(map(_living_s, _children()))


def _children() -> set[int]:
    """Return the children that still run; none where there is no /proc."""
    found: set[int] = set()
    for path in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # a thread that has just ended
            found |= {int(pid) for pid in path.read_text().split()}
    return found


def _living_s(pid: int) -> float:
    """Return what a process has used, with those that it has waited for; 0 if it has just gone."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def piece_of_work_s() -> float:
    """Return the CPU seconds of this thread for work that is always the same.

    Python's own, as most of what the suite does, and the first writes to 4 096 pages.
    """
    started_s = time.thread_time()
    with mmap.mmap(-1, PAGES * mmap.PAGESIZE) as pages:
        pages[:: mmap.PAGESIZE] = bytes(PAGES)
    counts: dict[str, int] = {}
    for number in range(60_000):
        key = str(number % 977)
        counts[key] = counts.get(key, 0) + number
    return time.thread_time() - started_s


def package_of(node_id: str) -> str:
    """Return the directory of tests/ that a test is in, "top" if it is in none, or "vllm"."""
    path = PurePosixPath(node_id.partition("::")[0])
    if path.name.startswith("test_vllm_"):
        return "vllm"
    folders = path.parent.parts
    inside = folders[1:] if folders[:1] == ("tests",) else folders
    return inside[0] if inside else "top"


class CpuTime:
    """Charge every test, and tell at the end what each package has used."""

    def __init__(self, config: pytest.Config) -> None:
        budget = tomllib.loads(BUDGET.read_text())
        is_all = config.getoption("--all", False)
        self._limits_s: dict[str, float] = {} if is_all else budget["cpu_s"]
        self._piece_s: float = budget["piece_of_work_s"]
        # As they are now: tests of this file set them.
        self._used_s, self._piece_of_work_s = used_s, piece_of_work_s
        # A plant has to be caught by what a test asserts; and only where all tests are collected is
        # what a test loads, torch above all, loaded before it.
        is_whole = config.args == config.getini("testpaths")
        self._has_limits = is_whole and not is_all and config.getoption("--plant", None) is None
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._tests: defaultdict[str, set[str]] = defaultdict(set)
        self._own_s: dict[str, tuple[float, float]] = {}
        self._slowness: list[float] = []
        self._last, self._measure_at = 1.0, 0.0

    def slowness(self) -> float:
        """Return how many times longer work takes here than where the budgets were measured."""
        if time.monotonic() >= self._measure_at:
            self._last = max(1.0, self._piece_of_work_s() / self._piece_s)
            self._measure_at = time.monotonic() + PACE_S
        return self._last

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.slowness()
        item.stash[STARTED] = self._used_s()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        before = self._used_s()
        result = yield
        item.stash[OWN_S] = self._used_s() - before
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.when == "teardown":
            now = self._used_s()
            seconds, item.stash[STARTED] = now - item.stash[STARTED], now
            told = [(PROPERTY, seconds), (SLOWNESS, self._last)]
            if self._has_limits and not any(map(item.get_closest_marker, UNLIMITED)):
                most_s = MOST_SLOW_S if item.get_closest_marker("slow") else MOST_S
                told += [(OWN, item.stash.get(OWN_S, 0.0)), (MOST, most_s)]
            report.user_properties = [*report.user_properties, *told]
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            package = package_of(report.nodeid)
            told = {name: one for name, one in report.user_properties if isinstance(one, float)}
            self._tests[package].add(report.nodeid)
            self._seconds[package] += told.get(PROPERTY, 0.0)
            self._slowness.append(told.get(SLOWNESS, 1.0))
            self._own_s[report.nodeid] = told.get(OWN, 0.0), told.get(MOST, 0.0)

    def mean_slowness(self) -> float:
        """Return the mean of what all processes measured."""
        return statistics.fmean(self._slowness or [1.0])

    def tests_over_limit(self) -> list[str]:
        """Return what each test that is too dear used."""
        scale = self.mean_slowness()
        return [
            f"{node_id} used {own_s:.2f} s of CPU by itself, and {most_s:g} s are what a test "
            f"{'with' if most_s == MOST_SLOW_S else 'without'} the mark `slow` may use (times "
            f"{scale:.2f} on this machine): make it cheaper, or mark it `slow` or `matrix`"
            for node_id, (own_s, most_s) in self._own_s.items()
            if own_s > most_s * scale
        ]

    def over_budget(self) -> list[str]:
        """Return what is over its budget, worded for whoever has to find out why."""
        limits_s = self._limits_s
        used_s = {name: s for name, s in self._seconds.items() if name in limits_s}
        scale = self.mean_slowness()
        checked = {name: (limits_s[name], scale) for name in used_s}
        if len(used_s) >= ENOUGH:
            median = statistics.median(s / limits_s[name] for name, s in used_s.items())
            checked = {name: (limits_s[name], max(scale, median)) for name in used_s}
            used_s["all together"] = sum(used_s.values())
            checked["all together"] = (sum(limits_s[name] for name in checked), scale)
        return [
            f"{name} used {used_s[name]:.1f} s of CPU, and its budget is {limit:g} s "
            f"(times {scale * MARGIN:.2f} on this machine): see --durations=20"
            for name, (limit, scale) in checked.items()
            if limit * scale * MARGIN < used_s[name]
        ]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        is_over = bool(self.over_budget() or self.tests_over_limit())
        is_binding = os.environ.get("CI") == "true" and self.mean_slowness() <= QUIET
        if is_binding and is_over and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self._tests:
            return
        terminalreporter.section("CPU seconds by package")
        width = max(map(len, self._seconds))
        for package, seconds in sorted(self._seconds.items(), key=lambda each: -each[1]):
            of = f" of {limit:g}," if (limit := self._limits_s.get(package)) else ""
            tests = f"{len(self._tests[package])} tests"
            terminalreporter.write_line(f"{package:{width}} = {seconds:7.1f}  #{of} {tests}")
        inside, everything = sum(self._seconds.values()), self._used_s()
        terminalreporter.write_line(
            f"# {everything:.1f} in all, {max(everything - inside, 0.0):.1f} outside tests, "
            f"on a machine {self.mean_slowness():.2f} times as slow as the budgets'"
        )
        for text in self.over_budget():
            terminalreporter.write_line(f"OVER BUDGET: {text}", red=True)
        for text in self.tests_over_limit():
            terminalreporter.write_line(f"OVER LIMIT: {text}", red=True)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(CpuTime(config))
