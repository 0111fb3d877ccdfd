"""Reads the content of a report from a run's files.

The run may be finished, under way or crashed, even before its first step. The report leaves out
parts without data. Steps that a resumed learner did not keep are abandoned. Curves do not show
abandoned steps. Times, bytes and costs include these steps, because they were paid for.
"""

from __future__ import annotations

import datetime
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from echo.core.errors import DataError
from echo.core.records import Discarded, Refused
from echo.core.units import format_bytes, format_duration, one_line, per_million
from echo.records.ledger import (
    ActivationChanged,
    AnyRecord,
    Began,
    BoundChanged,
    Checkpointed,
    Diverged,
    Finished,
    Operated,
    Removed,
    RolledBack,
    deliveries_of,
    is_in_use,
    read_records,
)
from echo.records.run_files import (
    MetricsHistory,
    MetricsRow,
    WorkerRate,
    json_lines,
    rates_of,
    read_config,
    read_metrics,
)
from echo.ui.stalls import WAIT, Stall, stalls_of
from echo.ui.summary import RunSummary, summarise_run

SAMPLE = " sample of step "
"""A line of the learner's log that contains this text is a sample of a rollout."""
WARNING = re.compile(
    r"[0-9:]+ (WARNING|ERROR|CRITICAL) "
    r'|\{"time": "[^"]+", "level": "(warning|error|critical)"'  # ui.log_format = "json"
)
"""Matches the beginning of a log line that is a warning or an error."""
MAX_DECISIONS = 100
"""Largest number of decisions in a report. The newest decisions are shown."""
MAX_LONG_WAITS = 10
"""Largest number of waits in a report. The longest waits are shown."""
MIN_WAIT_S = 1.0
"""A wait is listed only if it takes more than this many seconds. Most steps wait for a moment."""
MAX_LOG_LINES = 40
"""Largest number of lines in each of three lists of a report: the learner's log, its warnings, and
its samples of rollouts. The newest lines are shown."""
LOG_BYTES = 4 << 20
"""Number of bytes that are read from the end of the learner's log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A change of the run that the learner or an operator has made."""

    at: float
    """Unix time of the change, seconds."""
    step: int
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LongWait:
    """A step before which the learner waited long."""

    at: float
    """Unix time at which the step ended, seconds."""
    step: int
    waited_s: float
    share: float
    """Share of the step's time in which the learner waited."""
    cause: str
    """The explanation of the wait that was recorded. If there is none, the recorded reason, which
    may be empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedNode:
    """What a run's files say about a node. Missing facts are None."""

    node_id: str
    rate: WorkerRate | None
    num_groups: int
    num_tokens: int
    """Number of completion tokens in those groups of the node that were accepted."""
    received_bytes: float | None
    """Number of bytes of weights that the node received."""
    cost: float | None
    """$ that the node's machine and traffic have cost."""
    mismatch_kl: float | None
    reward: float | None

    @property
    def cost_per_million_tokens(self) -> float | None:
        """$ of this node per 10^6 of its accepted tokens; None without prices or such tokens."""
        return None if self.cost is None else per_million(self.cost, self.num_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedRun:
    """What a report says about a run."""

    run_dir: Path
    name: str
    state: str
    """The state of the run as a phrase, such as "finished" or "under way"."""
    is_cut_off: bool
    """Whether the learner has ended before the run was finished."""
    config: MetricsRow
    history: MetricsHistory
    rows: Sequence[MetricsRow]
    """All rows of metrics.jsonl, including the rows of abandoned steps."""
    summary: RunSummary | None
    """The summary of the run; None before its first step."""
    lineages: Sequence[Began]
    discarded: Mapping[str, int]
    """For each reason, the number of discarded groups."""
    refused: Mapping[str, int]
    """For each reason, the number of refused results."""
    decisions: Sequence[Decision]
    num_decisions: int
    """Number of all decisions. Decisions that the report leaves out count, too."""
    stalls: Sequence[Stall]
    """The stalls for which an explanation was recorded, oldest first."""
    long_waits: Sequence[LongWait]
    """The longest waits, longest first."""
    nodes: Sequence[ReportedNode]
    log: Sequence[str]
    """The last lines of the learner's log."""
    log_warnings: Sequence[str]
    """The last warnings, alerts and errors in the learner's log."""
    log_samples: Sequence[str]
    """The last samples of rollouts in the learner's log, each as one line."""

    @property
    def step(self) -> int:
        """Number of optimizer steps in the part of the history that was not abandoned."""
        return int(self.history.train[-1]["step"]) if self.history.train else 0

    @property
    def steps(self) -> list[MetricsRow]:
        """The rows of all optimizer steps, including abandoned steps."""
        return [row for row in self.rows if "reward/mean" in row]

    def section(self, name: str) -> MetricsRow:
        """Return a section of the run's configuration; empty if there is none."""
        section = self.config.get(name)
        return section if isinstance(section, dict) else {}

    def totals(self, table: str) -> dict[str, float]:
        """Add up each entry of a table over all rows. Return the sums, largest first."""
        totals: Counter[str] = Counter()
        for row in self.rows:
            totals.update(row.get(table) or {})
        return {name: float(total) for name, total in totals.most_common()}


def read_run(run_dir: Path) -> ReportedRun:
    """Return the content of a report about a run.

    Raises:
        DataError: if the directory has no run.
        StorageError: if a file is damaged. A last line that a crash has cut off is no error.
    """
    config = read_config(run_dir)
    facts = _Facts()
    for record in read_records(run_dir):
        facts.add(record)
    path = run_dir / "metrics.jsonl"
    rows = [row for _, row in json_lines(path)] if path.exists() else []
    history = read_metrics(run_dir) if path.exists() else MetricsHistory()
    decisions = sorted([*facts.decisions, *facts.removals()], key=lambda each: each.at)
    is_running, log = is_in_use(run_dir), _log_lines(run_dir)
    run = config.get("run")
    name = run.get("name") if isinstance(run, dict) else None
    return ReportedRun(
        run_dir=run_dir,
        name=one_line(str(name or run_dir.resolve().name)),
        state=_state(facts, history, config, is_running=is_running),
        is_cut_off=not is_running and not facts.is_finished,
        config=config,
        history=history,
        rows=rows,
        summary=summarise_run(run_dir) if history.train else None,
        lineages=facts.lineages,
        discarded=facts.discarded,
        refused=facts.refused,
        decisions=decisions[-MAX_DECISIONS:],
        num_decisions=len(decisions),
        stalls=stalls_of(history),
        long_waits=_long_waits(rows),
        nodes=_nodes(run_dir, config, rows),
        log=[line for line in log if SAMPLE not in line][-MAX_LOG_LINES:],
        log_warnings=[line for line in log if WARNING.match(line)][-MAX_LOG_LINES:],
        log_samples=[line for line in log if SAMPLE in line][-MAX_LOG_LINES:],
    )


class _Facts:
    """The facts that a report needs from the records of a ledger."""

    def __init__(self) -> None:
        self.lineages: list[Began] = []
        self.discarded: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.decisions: list[Decision] = []
        self.is_finished = False
        self.last_at = 0.0
        self.checkpoint: int | None = None
        self._removed: dict[str, Removed] = {}

    def add(self, record: AnyRecord) -> None:
        self.last_at = record.at
        match record:
            case Began():
                self.is_finished = False
                self.lineages.append(record)
                if self.checkpoint is not None:  # later checkpoints are abandoned
                    self.checkpoint = record.fork_step
            case Discarded():
                self.discarded[record.reason] += 1
            case Refused():
                self.refused[record.reason] += 1
            case Checkpointed():
                self.checkpoint = record.step
            case Finished():
                self.is_finished = True
            case Removed():
                self._add_removed(record)
        decision = _decision(record)
        if decision is not None:
            self.decisions.append(decision)

    def _add_removed(self, record: Removed) -> None:
        """Add a removal of files to the earlier removals that have the same cause."""
        earlier = self._removed.get(record.cause)
        if earlier is not None:
            record = msgspec.structs.replace(
                record,
                paths=earlier.paths + record.paths,
                freed_bytes=earlier.freed_bytes + record.freed_bytes,
            )
        self._removed[record.cause] = record

    def removals(self) -> list[Decision]:
        """Return one decision for each cause of removals.

        The decision has the time of the last removal.
        """
        return [
            Decision(
                at=each.at,
                step=each.step,
                what=f"removed files and checkpoints ({len(each.paths)}), "
                f"{format_bytes(each.freed_bytes)} in all: {each.cause}",
            )
            for each in self._removed.values()
        ]


def _decision(record: AnyRecord) -> Decision | None:
    match record:
        case Began() if record.lineage > 1:
            what = f"resumed from the checkpoint of step {record.fork_step}"
            return Decision(at=record.at, step=record.fork_step, what=what)
        case Finished():
            what = "finished"
        case BoundChanged():
            what = f"bound on staleness {record.before} to {record.bound}: {record.cause}"
        case ActivationChanged():
            what = _activation(record)
        case Operated():
            what = f"{record.by}: {record.outcome}"
        case RolledBack():
            what = f"rolled back to the checkpoint of step {record.to_step}: {record.cause}"
        case Diverged():
            what = f"ended: {record.cause}"
        case _:
            return None
    return Decision(at=record.at, step=record.step, what=what)


def _activation(record: ActivationChanged) -> str:
    changes = [
        f"{verb} {', '.join(names)}"
        for verb, names in (("activated", record.activated), ("standby for", record.deactivated))
        if names
    ]
    return f"{'; '.join(changes) or 'workers stay as they are'}: {record.cause}"


def _state(facts: _Facts, history: MetricsHistory, config: MetricsRow, *, is_running: bool) -> str:
    step = int(history.train[-1]["step"]) if history.train else 0
    max_steps = (config.get("run") or {}).get("max_steps", step)
    if facts.is_finished:
        return "finished"
    if is_running:
        return f"under way, {step} of {max_steps} steps made"
    text = f"ended after {step} of {max_steps} steps without finishing"
    if facts.last_at:
        text += f"; last record {utc(facts.last_at)}"
    if facts.checkpoint is None:
        return f"{text}; it has no checkpoint"
    return f"{text}; a resume continues from the checkpoint of step {facts.checkpoint}"


def utc(at: float) -> str:
    """Return a Unix time in seconds as text, in UTC."""
    return datetime.datetime.fromtimestamp(at, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


# --- stalls ---------------------------------------------------------------------------------------


def _long_waits(rows: Iterable[MetricsRow]) -> list[LongWait]:
    """Return the MAX_LONG_WAITS longest waits, longest first."""
    found = [row for row in rows if (row.get("time/wait_for_batch") or 0.0) > MIN_WAIT_S]
    found.sort(key=lambda row: -float(row["time/wait_for_batch"]))
    return [
        LongWait(
            at=row["time"],
            step=int(row["step"]),
            waited_s=row["time/wait_for_batch"],
            share=min(1.0, row["time/wait_for_batch"] / max(row.get("time/step") or 0.0, 1e-9)),
            cause=explanation_of(row) or _stages(row),
        )
        for row in found[:MAX_LONG_WAITS]
    ]


def explanation_of(row: MetricsRow) -> str:
    """Return a row's explanation of why the learner or workers waited. Return "" if it has none."""
    found: Any = row.get("explain")
    return str(found.get("text", "")) if isinstance(found, dict) else ""


def _stages(row: MetricsRow) -> str:
    stages = {
        name.removeprefix(WAIT): value
        for name, value in row.items()
        if name.startswith(WAIT) and value
    }
    longest = sorted(stages, key=lambda name: -stages[name])
    return ", ".join(f"{name} {format_duration(stages[name])}" for name in longest)


# --- nodes ----------------------------------------------------------------------------------------


def _nodes(run_dir: Path, config: MetricsRow, rows: Sequence[MetricsRow]) -> list[ReportedNode]:
    """Return the nodes of a run: first the nodes without groups, then the workers.

    The workers are sorted by their numbers of tokens.
    """
    deliveries = deliveries_of(read_records(run_dir))
    group_size = int((config.get("batch") or {}).get("group_size", 1))
    rates = rates_of(deliveries, group_size)
    groups = Counter(each.worker for each in deliveries)
    tokens: Counter[str] = Counter()
    for each in deliveries:
        tokens[each.worker] += each.num_tokens
    costs, received = _sums(rows, "cost/by_node"), _sums(_by_child(rows), "links/bytes")
    names = {*rates, *costs, *received} - {"others"}
    mismatches, rewards = _newest(rows, "workers/mismatch_kl"), _newest(rows, "workers/reward")
    nodes = [
        ReportedNode(
            node_id=name,
            rate=rates.get(name),
            num_groups=groups[name],
            num_tokens=tokens[name],
            received_bytes=received.get(name),
            cost=costs.get(name),
            mismatch_kl=mismatches.get(name),
            reward=rewards.get(name),
        )
        for name in sorted(names)
    ]
    return sorted(nodes, key=lambda node: (node.num_groups > 0, -node.num_tokens))


def _by_child(rows: Iterable[MetricsRow]) -> Iterator[MetricsRow]:
    for row in rows:
        links: Mapping[str, float] = row.get("links/bytes") or {}
        for link, num_bytes in links.items():
            yield {"links/bytes": {link.rpartition(" > ")[2]: num_bytes}}


def _sums(rows: Iterable[MetricsRow], table: str) -> dict[str, float]:
    sums: dict[str, float] = {}
    for row in rows:
        for name, value in (row.get(table) or {}).items():
            sums[name] = sums.get(name, 0.0) + value
    return sums


def _newest(rows: Iterable[MetricsRow], table: str) -> dict[str, float]:
    newest: dict[str, float] = {}
    for row in rows:
        newest.update(row.get(table) or {})
    return newest


def _log_lines(run_dir: Path) -> list[str]:
    try:
        with (run_dir / "logs" / "learner.log").open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - LOG_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return text.splitlines()


def differing_settings(runs: Sequence[ReportedRun]) -> dict[str, list[str]]:
    """Return the settings that differ between the runs: key -> the value in each run."""
    flat = [dict(_flat(run.config)) for run in runs]
    keys = sorted({key for settings in flat for key in settings})
    found = {key: [settings.get(key, "-") for settings in flat] for key in keys}
    return {key: values for key, values in found.items() if len(set(values)) > 1}


def _flat(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in section.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value)


def read_runs(run_dirs: Sequence[Path]) -> list[ReportedRun]:
    """Read the runs to compare. Give them distinct names.

    Raises:
        DataError: if a run occurs twice.
        DataError, StorageError: for the same reasons as `read_run`.
    """
    seen: set[Path] = set()
    for run_dir in run_dirs:
        if run_dir.resolve() in seen:
            raise DataError(f"{run_dir}: is compared with itself; name other runs after --compare")
        seen.add(run_dir.resolve())
    runs = [read_run(run_dir) for run_dir in run_dirs]
    num_named = Counter(run.name for run in runs)
    return [
        replace(run, name=f"{run.name} ({number})") if num_named[run.name] > 1 else run
        for number, run in enumerate(runs, 1)
    ]
