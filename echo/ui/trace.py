"""Makes a trace of what the learner did and which leases each worker held.

Perfetto can show the trace; the format is Chrome's JSON trace events. The spans come from the
ledger and the metrics, which the learner writes with its own clock. A worker's span begins when the
learner grants a group, and ends when the learner accepts the group or ends the lease. A lease that
a resumed learner had to end has ended with the learner before. The events within the span, such as
reward calls, and single transfers of weights are not recorded, so relays are not in the trace. If
spans of a worker overlap, they are in different rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from echo.core.errors import ConfigError, DataError
from echo.core.records import Cancelled, Discarded, Granted, Refused
from echo.core.units import counted, one_line
from echo.records.ledger import (
    Accepted,
    ActivationChanged,
    AnyRecord,
    Began,
    BoundChanged,
    Checkpointed,
    Published,
    Trained,
    read_records,
)
from echo.records.run_files import MetricsRow
from echo.ui.report.run import ReportedRun, explanation_of
from echo.wire.messages import LEARNER_ID

MAX_EVENTS = 500_000
"""Largest number of events in a trace. A trace with so many events has about 100 MB, and Perfetto
can still open it."""
MICROSECONDS = 1e6  # in a second; times in the trace are microseconds

Event = dict[str, Any]
Window = tuple[int, int]
"""The first and the last step that a trace contains."""
ALL: Window = (0, 10**9)
"""All steps: the option takes step numbers of at most nine digits."""

TRAINING, WAITING, PUBLISHING, EVALUATING, EVENTS = range(5)
_ROWS = ("trains", "waits for groups", "makes versions", "evaluates", "events")
"""Names of the rows that the learner has in the trace, in order."""


def parse_window(text: str) -> Window:
    """Parse the value of the option `--trace`: "10-20", "10" or "all".

    Raises:
        ConfigError: if the text has another form.
    """
    if text == "all":
        return ALL
    steps = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", text)
    if steps is None:
        raise ConfigError(f"--trace {text!r}: write the steps as 10-20, or `all`")
    window = int(steps[1]), int(steps[2] or steps[1])
    if window[0] > window[1]:
        raise ConfigError(f"--trace {text}: the first step is after the last")
    return window


def render_trace(run: ReportedRun, window: Window) -> bytes:
    """Return the trace of those steps of a run that lie in the window, as JSON.

    Raises:
        DataError: if the run did not make these steps, or if the trace would be too large.
    """
    begin, end = _times(run, window)
    nodes: dict[str, int] = {LEARNER_ID: 0}
    events = list(_learner_events(run.rows, begin, end))
    events += _lease_events(run, nodes, begin, end)
    if len(events) > MAX_EVENTS:
        raise DataError(
            f"--trace: {len(events)} events, more than the {MAX_EVENTS} that Perfetto shows well; "
            "choose fewer steps"
        )
    # Perfetto drops events before 0, such as a lease that was granted before the window.
    zero = min([begin, *(event["ts"] for event in events)])
    for event in events:
        event["ts"] = round((event["ts"] - zero) * MICROSECONDS)
        if (ended_at := event.pop("end", None)) is not None:
            # Both ends are rounded, not the length: a span must not overlap its successor.
            event["dur"] = round((ended_at - zero) * MICROSECONDS) - event["ts"]
    names = list(_names(nodes))
    return msgspec.json.encode(
        {"traceEvents": names + events, "displayTimeUnit": "ms", "otherData": {"run": run.name}}
    )


def _times(run: ReportedRun, window: Window) -> tuple[float, float]:
    """Return the Unix times at which the steps of the window start and end.

    Raises:
        DataError: if the run did not make any of these steps.
    """
    steps = [
        row
        for row in run.steps
        if row.get("time/step") is not None and window[0] <= row["step"] <= window[1]
    ]
    if not steps:
        raise DataError(f"--trace: {run.run_dir} has no such steps; it has made {run.step}")
    begin = min(row["time"] - row["time/step"] for row in steps)
    if window == ALL:
        begin = min([begin, *(began.at for began in run.lineages)])
    return begin, max(row["time"] for row in steps)


def _names(nodes: Mapping[str, int]) -> Iterator[Event]:
    for node, pid in nodes.items():
        named = {"ph": "M", "pid": pid, "tid": 0}
        yield {**named, "name": "process_name", "args": {"name": one_line(node)}}
        yield {**named, "name": "process_sort_index", "args": {"sort_index": pid}}
    for row, name in enumerate(_ROWS):
        yield {"ph": "M", "pid": 0, "tid": row, "name": "thread_name", "args": {"name": name}}


def _span(name: str, pid: int, row: int, start: float, end: float, /, **facts: Any) -> Event:
    return {
        "ph": "X", "name": name, "pid": pid, "tid": row, "ts": start, "end": end, "args": facts,
    }  # fmt: skip


def _mark(name: str, at: float, **facts: Any) -> Event:
    return {"ph": "i", "s": "p", "name": name, "pid": 0, "tid": EVENTS, "ts": at, "args": facts}


def _learner_events(rows: Iterable[MetricsRow], begin: float, end: float) -> Iterator[Event]:
    """Yield what the learner did between two times, according to rows of metrics."""
    for row in rows:
        at = row["time"]
        if not begin < at <= end:
            continue
        seconds = row.get("eval/seconds")
        if seconds:
            name = f"evaluation of v{row['eval/version']}"
            yield _span(name, 0, EVALUATING, at - seconds, at)
        if row.get("time/step") is None:
            continue
        name, train_s = f"step {row['step']}", row.get("time/train") or 0.0
        waited_s = min(row.get("time/wait_for_batch") or 0.0, row["time/step"])
        trained_from = at - train_s
        yield _span(name, 0, TRAINING, trained_from, at, reward=row.get("reward/mean"))
        facts = {"why": text} if (text := explanation_of(row)) else {}
        yield _span(name, 0, WAITING, trained_from - waited_s, trained_from, **facts)
        if row.get("time/publish"):
            began_at = at - row["time/step"]
            yield _span(name, 0, PUBLISHING, began_at, began_at + row["time/publish"])


class _Ended(NamedTuple):
    """A lease that has ended, how, and when in Unix seconds."""

    lease: Granted
    how: str
    at: float


class _Leases:
    """The leases that workers hold according to the records of the ledger.

    A resumed learner accepts the results of open leases. It ends those whose workers have left.
    """

    def __init__(self) -> None:
        self._held: dict[int, dict[int, Granted]] = {}
        self._orphaned: dict[tuple[int, int], float] = {}
        """(group, attempt) of a lease whose learner has ended -> time of its learner's last record.
        """
        self._last_at = 0.0

    def end_by(self, record: AnyRecord) -> list[_Ended]:
        """Return the leases that a record ends."""
        before, self._last_at = self._last_at, record.at
        match record:
            case Granted():
                # The record of a lease that has expired is the grant of its group to another.
                is_copy = record.copy_of is not None
                ended = (
                    [] if is_copy else self._end_group(record.group, "not finished, granted again")
                )
                self._held.setdefault(record.group, {})[record.attempt] = record
                return ended
            case Accepted():
                return self._end(record, f"accepted, {counted(record.tokens, 'token')}")
            case Cancelled():
                return self._end(record, "cancelled")
            case Refused():
                return self._end(record, f"refused: {record.reason}")
            case Discarded():
                return self._end_group(record.group, f"discarded: {record.reason}")
            case Began():
                for group, leases in self._held.items():
                    for attempt in leases:
                        self._orphaned.setdefault((group, attempt), before)
        return []

    def end_all(self, *, at: float) -> list[_Ended]:
        """Return the leases that no record ends, as if they ended at this time."""
        self._last_at = at
        return [
            each for group in list(self._held) for each in self._end_group(group, "not ended yet")
        ]

    def _end(self, record: Accepted | Cancelled | Refused, how: str) -> list[_Ended]:
        lease = self._held.get(record.group, {}).pop(record.attempt, None)
        return [] if lease is None else [_Ended(lease, how, record.at)]

    def _end_group(self, group: int, how: str) -> list[_Ended]:
        return [self._end_lease(lease, how) for lease in self._held.pop(group, {}).values()]

    def _end_lease(self, lease: Granted, how: str) -> _Ended:
        """Return the end of a lease whose worker delivered nothing."""
        at = self._orphaned.get((lease.group, lease.attempt))
        if at is not None:
            return _Ended(lease, "the learner ended", at)
        return _Ended(lease, how, self._last_at)


def _lease_events(
    run: ReportedRun, nodes: dict[str, int], begin: float, end: float
) -> Iterator[Event]:
    """Yield the workers' leases and the learner's decisions between two times.

    Workers are added to `nodes` with their process numbers in the trace.
    """
    leases, ended = _Leases(), list[_Ended]()
    for record in read_records(run.run_dir):
        if record.at > end:
            continue
        ended += leases.end_by(record)
        if record.at >= begin:
            yield from _marks(record)
    ended += leases.end_all(at=end)
    rows: dict[str, _Rows] = {}
    for lease, how, at in sorted(ended, key=lambda each: each.at):
        if at >= begin:
            pid = nodes.setdefault(lease.worker, len(nodes))
            row = rows.setdefault(lease.worker, _Rows()).take(lease.at, at)
            name, facts = f"group {lease.group}", {"attempt": lease.attempt, "end": how}
            yield _span(name, pid, row, lease.at, at, **facts)


def _marks(record: AnyRecord) -> Iterator[Event]:
    match record:
        case Began():
            yield _mark(f"lineage {record.lineage} begins", record.at, fork_step=record.fork_step)
        case Published():
            yield _mark(f"{record.version} published", record.at)
        case Checkpointed():
            yield _mark(f"checkpoint of step {record.step}", record.at)
        case Discarded():
            yield _mark(f"group {record.group} discarded", record.at, reason=record.reason)
        case Trained():
            yield _mark(f"step {record.step} recorded", record.at, groups=list(record.groups))
        case BoundChanged():
            name = f"bound on staleness {record.bound}"
            yield _mark(name, record.at, cause=record.cause)
        case ActivationChanged():
            yield _mark("active workers change", record.at, cause=record.cause)


class _Rows:
    """Distributes the spans of a worker over rows, so that no spans of a row overlap.

    Spans are added in the order of their ends, so the span that was added last to a row ends last.
    If this span has ended when a new span begins, the row is free for the new span.
    """

    def __init__(self) -> None:
        self._ends: list[float] = []

    def take(self, start: float, end: float) -> int:
        """Return the first row that is free at `start`, and occupy it until `end`."""
        for row, free_from in enumerate(self._ends):
            if free_from <= start:
                self._ends[row] = end
                return row
        self._ends.append(end)
        return len(self._ends) - 1
