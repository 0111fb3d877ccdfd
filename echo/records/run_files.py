"""Reads metrics.jsonl, config.json and status.json of a run.

If a crash has cut off the last line of metrics.jsonl, this line is left out. Any other damage is an
error that names the line. Rows of steps that a resume has abandoned are left out.

A worker's rate is its completion tokens divided by the time for which the worker held a group. A
worker holds a group from the grant to the acceptance. Time without a lease does not lower the rate.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from echo.core.errors import DataError, StorageError
from echo.core.monitoring.status import RunStatus
from echo.fleet.job import Job
from echo.records.files import write_file
from echo.records.ledger import Delivery

MetricsRow = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of evaluating one version on held-out prompts."""

    step: int
    sampled: float
    """Mean reward of answers sampled at the run's temperature."""
    greedy: float
    """Mean reward of answers decoded greedily."""
    num_errors: int = 0
    """Number of answers whose reward failed; these rewards count as 0."""
    is_rate: bool = True
    """Whether every reward was 0 or 1, so that the means are pass rates."""


@dataclass(frozen=True, slots=True)
class MetricsHistory:
    """The rows of metrics.jsonl that belong to the surviving history of the run."""

    train: tuple[MetricsRow, ...] = ()
    """Rows of optimizer steps, in order; each has `reward/mean`."""
    evaluations: tuple[Evaluation, ...] = ()
    explained: tuple[MetricsRow, ...] = ()
    """Rows that explain why the learner or its workers waited; some were written during a wait."""
    broadcast_bytes: float = 0
    """Sum of `broadcast/bytes` of all rows, including rows of abandoned steps."""
    times: tuple[float, ...] = ()
    """Unix seconds of all rows, in the order in which they were written."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """For each count (`count/*`), the sum of its last values in all lineages."""

    @property
    def evals_are_rates(self) -> bool:
        """Whether every reward of every evaluation was 0 or 1."""
        return all(evaluation.is_rate for evaluation in self.evaluations)


def json_lines(path: Path) -> Iterator[tuple[int, MetricsRow]]:
    """Yield (line number, JSON object) for each line of a file. The first line has number 1.

    An incomplete last line is left out.

    Raises:
        DataError: if the file is missing.
        StorageError: if the file cannot be read, or a line before the last is damaged.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    return
                if line.strip():
                    yield number, _json_object(line, f"{path}:{number}")
    except FileNotFoundError as error:
        raise DataError(
            f"{path}: no such file; is {path.parent} the directory of a run that has started?"
        ) from error
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from error


def read_config(run_dir: Path) -> MetricsRow:
    """Return the resolved configuration that a run has saved.

    Raises:
        DataError: if the run has saved no configuration.
        StorageError: if the file is damaged.
    """
    path = run_dir / "config.json"
    try:
        return _json_object(path.read_bytes(), str(path))
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file; is {run_dir} the directory of a run?") from error
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from error


STATUS = "status.json"


def save_status(run_dir: Path, status: RunStatus) -> None:
    """Write the status of a run into its directory.

    Raises:
        StorageError: if the file cannot be written.
    """
    path = run_dir / STATUS
    try:
        write_file(path, status.to_json())
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror}") from error


def read_status(run_dir: Path) -> RunStatus:
    """Return the status that a run's learner wrote last.

    Raises:
        DataError: if the run has no status, or if another release wrote the status.
        StorageError: if the file cannot be read.
    """
    path = run_dir / STATUS
    try:
        return RunStatus.from_json(path.read_bytes(), source=str(path))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DataError(
            f"{path}: no such file; is {run_dir} the directory of a run that has started?"
        ) from error
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from error


def read_metrics(run_dir: Path) -> MetricsHistory:
    """Return the metrics of a run without rows of abandoned steps.

    The first row of a new lineage shows the step at which the run was resumed. Rows of later steps
    in older lineages are left out. If a step is repeated within a lineage, the step's earlier rows
    are left out, too.

    Raises:
        DataError: if the run has no metrics.
        StorageError: if the file is damaged.
    """
    path = run_dir / "metrics.jsonl"
    train: list[MetricsRow] = []
    evaluations: dict[int, Evaluation] = {}
    explained: list[MetricsRow] = []
    times = []
    broadcast_bytes = 0.0
    lineage = 0.0
    counts: dict[float, MetricsRow] = {}
    for number, row in json_lines(path):
        where = f"{path}:{number}"
        step = int(_finite(row, "step", where))
        times.append(_finite(row, "time", where))
        broadcast_bytes += row.get("broadcast/bytes") or 0
        is_step = "reward/mean" in row
        before, lineage = lineage, _finite(row, "lineage", where) if "lineage" in row else lineage
        if lineage > before or (is_step and train and step <= train[-1]["step"]):
            # The row of a step has the number after the step; an evaluation has the number before
            # the next step.
            fork_step = step - 1 if is_step else step
            train = [earlier for earlier in train if earlier["step"] <= fork_step]
            evaluations = {at: e for at, e in evaluations.items() if at <= fork_step}
            explained = [earlier for earlier in explained if earlier["step"] <= fork_step]
        if is_step:
            train.append(row)
            counts[lineage] = {k: v for k, v in row.items() if k.startswith("count/") and v}
        if "explain" in row:
            explained.append(row)
        evaluation = _evaluation(row, step)
        if evaluation is not None:
            evaluations[evaluation.step] = evaluation
    return MetricsHistory(
        tuple(train),
        tuple(evaluations[step] for step in sorted(evaluations)),
        tuple(explained),
        broadcast_bytes,
        tuple(times),
        sum(map(Counter, counts.values()), Counter()),
    )


def _json_object(text: bytes, where: str) -> MetricsRow:
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise StorageError(f"{where}: not JSON ({error}); the file is damaged") from error
    if not isinstance(value, dict):
        raise StorageError(f"{where}: not a JSON object; the file is damaged")
    return value


def _finite(row: MetricsRow, key: str, where: str) -> float:
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise StorageError(f"{where}: {key} is {value!r}, expected a number; the file is damaged")
    return value


def _is_of_evaluation(key: str) -> bool:
    """Return whether a metric's key belongs to an evaluation as a whole.

    The key of one part of a reward has one more level, so the result is False.
    """
    return key.startswith("eval/") and key.count("/") <= 2


def _evaluation(row: MetricsRow, step: int) -> Evaluation | None:
    """Return the evaluation that a row of metrics contains, or None.

    The keys of an evaluation are eval/<task>/reward and eval/<task>/greedy.
    """
    values = {k.rpartition("/")[2]: v for k, v in row.items() if _is_of_evaluation(k)}
    sampled, greedy = values.get("reward"), values.get("greedy")
    if sampled is None or greedy is None:
        return None
    return Evaluation(
        int(values.get("version", step)),
        sampled,
        greedy,
        num_errors=int(values.get("reward_errors") or 0),
        is_rate="pass@1" in values,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerRate:
    """How fast a worker delivered groups."""

    tokens_per_s: float
    """Completion tokens per second while the worker held at least one group."""
    concurrency: int
    """Largest number of rollouts that the worker held at the same time."""
    group_s: float
    """Median seconds from the grant of a group to its acceptance."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRates:
    """The rates that a run has measured. A simulation is compared with these rates."""

    name: str
    num_steps: int
    job: Job
    """The job to simulate, with the times, lengths and sizes that the run has measured."""
    workers: Mapping[str, WorkerRate]
    broadcast_s: float
    """Median seconds of a broadcast; 0 if no broadcast was recorded."""
    idle_share: float
    """Recorded share of time that the learner spent waiting."""
    useful_share: float
    """Recorded share of the groups whose rewards were not all equal."""

    @property
    def mean_group_s(self) -> float:
        """Mean seconds of a group, over the groups of all workers.

        It includes waits in a worker's queue and on the wire.
        """
        rates = [(worker.tokens_per_s, worker.group_s) for worker in self.workers.values()]
        return sum(rate * group_s for rate, group_s in rates) / sum(rate for rate, _ in rates)


def values_of(rows: Sequence[MetricsRow], key: str) -> list[float]:
    """Return the values of a metric, from the rows that have it."""
    return [row[key] for row in rows if row.get(key) is not None]


def rates_of(deliveries: Iterable[Delivery], group_size: int) -> dict[str, WorkerRate]:
    """Return how fast each worker delivered groups, by the worker's name."""
    by_worker: dict[str, list[Delivery]] = {}
    for each in deliveries:
        by_worker.setdefault(each.worker, []).append(each)
    return {name: _rate(found, group_size) for name, found in sorted(by_worker.items())}


def _rate(deliveries: list[Delivery], group_size: int) -> WorkerRate:
    spans = sorted((each.granted_at, each.accepted_at) for each in deliveries)
    busy_s, until = 0.0, -math.inf
    for begin, end in spans:
        busy_s += max(0.0, end - max(begin, until))
        until = max(until, end)
    changes = sorted([(begin, 1) for begin, _ in spans] + [(end, -1) for _, end in spans])
    most = max(accumulate(change for _, change in changes))
    num_tokens = sum(each.num_tokens for each in deliveries)
    return WorkerRate(
        tokens_per_s=num_tokens / max(busy_s, 1e-9),
        concurrency=most * group_size,
        group_s=median(end - begin for begin, end in spans),
    )
