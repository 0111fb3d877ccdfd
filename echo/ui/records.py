"""Read what a run has written about itself: metrics.jsonl, ledger.jsonl and config.json.

A crash may have torn the last line of the first two: it is left out. Any other damage is an error
that names the line. Rows of steps that a resume abandoned do not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from echo.core.errors import DataError, StorageError

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A held-out evaluation of one version."""

    step: int
    sampled: float
    """Pass rate at the run's sampling temperature, 0..1."""
    greedy: float
    """Pass rate of greedy decoding, 0..1."""
    num_errors: int = 0
    """Rewards that failed, and count as 0."""


@dataclass(frozen=True, slots=True)
class MetricsHistory:
    """The rows of metrics.jsonl that lie on the surviving line of the run."""

    train: tuple[Row, ...] = ()
    """Rows of optimizer steps, by step; all have `reward/mean`."""
    evaluations: tuple[Evaluation, ...] = ()
    broadcast_bytes: float = 0
    """Sum of `broadcast/bytes` of every row, those of abandoned steps too: they were sent."""
    times: tuple[float, ...] = ()
    """Unix seconds of every row, in order of writing."""


@dataclass(slots=True)
class LedgerTotals:
    """What the ledger says about a run, in totals of its surviving line."""

    num_tokens: int = 0
    """Completion tokens of the accepted groups."""
    num_trained: int = 0
    """Groups trained on."""
    discarded: dict[str, int] = field(default_factory=dict)
    """Groups discarded, by reason."""
    staleness_tokens: dict[int, int] = field(default_factory=dict)
    """Trained tokens by staleness."""
    lineage_starts: list[float] = field(default_factory=list)
    """Unix seconds at which each lineage began."""


def json_lines(path: Path) -> Iterator[tuple[int, Row]]:
    """Yield (line number from 1, object) of each line of `path`; a torn last line is left out.

    Raises:
        DataError: if the file is missing.
        StorageError: if it cannot be read or a line before the last is damaged.
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


def read_config(run_dir: Path) -> Row:
    """Return the resolved configuration of the run in `run_dir`.

    Raises:
        DataError: if there is none.
        StorageError: if it is damaged.
    """
    path = run_dir / "config.json"
    try:
        return _json_object(path.read_bytes(), str(path))
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file; is {run_dir} the directory of a run?") from error
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from error


def read_metrics(run_dir: Path) -> MetricsHistory:
    """Read metrics.jsonl of the run in `run_dir`.

    The first row of a new lineage tells where the run was resumed: what older lineages wrote of
    later steps is left out. So it is where a step comes again.
    """
    path = run_dir / "metrics.jsonl"
    train: list[Row] = []
    evaluations: dict[int, Evaluation] = {}
    times = []
    broadcast_bytes = 0.0
    lineage = 0.0
    for number, row in json_lines(path):
        where = f"{path}:{number}"
        step = int(_finite(row, "step", where))
        times.append(_finite(row, "time", where))
        broadcast_bytes += row.get("broadcast/bytes") or 0
        is_step = "reward/mean" in row
        before, lineage = lineage, _finite(row, "lineage", where) if "lineage" in row else lineage
        if lineage > before or (is_step and train and step <= train[-1]["step"]):
            # A row of an optimizer step comes after it, an evaluation before the next one.
            fork_step = step - 1 if is_step else step
            train = [earlier for earlier in train if earlier["step"] <= fork_step]
            evaluations = {at: e for at, e in evaluations.items() if at <= fork_step}
        if is_step:
            train.append(row)
        evaluation = _evaluation(row, step)
        if evaluation is not None:
            evaluations[evaluation.step] = evaluation
    return MetricsHistory(
        tuple(train),
        tuple(evaluations[step] for step in sorted(evaluations)),
        broadcast_bytes,
        tuple(times),
    )


def read_ledger(run_dir: Path) -> LedgerTotals:
    """Add up ledger.jsonl of the run in `run_dir`.

    A lineage that forks at step f voids what older lineages trained in steps after f.
    """
    path = run_dir / "ledger.jsonl"
    totals = LedgerTotals()
    trained: list[Row] = []
    for number, record in json_lines(path):
        where = f"{path}:{number}"
        try:
            _count(record, totals, trained)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StorageError(
                f"{where}: damaged {record.get('kind')!r} record: {type(error).__name__} {error}"
            ) from error
    for record in trained:
        totals.num_trained += len(record["groups"])
        for staleness, tokens in record["staleness"].items():
            known = totals.staleness_tokens.get(int(staleness), 0)
            totals.staleness_tokens[int(staleness)] = known + tokens
    return totals


def staleness_of(rows: tuple[Row, ...]) -> dict[int, int]:
    """Return trained tokens by staleness, summed over `staleness/hist` of metric rows."""
    totals: dict[int, int] = {}
    for row in rows:
        histogram: Mapping[str, int] = row.get("staleness/hist") or {}
        for staleness, tokens in histogram.items():
            totals[int(staleness)] = totals.get(int(staleness), 0) + tokens
    return totals


def _count(record: Row, totals: LedgerTotals, trained: list[Row]) -> None:
    """Add one ledger record to `totals`, a trained one to `trained`."""
    match record["kind"]:
        case "lineage":
            totals.lineage_starts.append(float(record["at"]))
            trained[:] = [
                earlier
                for earlier in trained
                if earlier["lineage"] >= record["lineage"] or earlier["step"] <= record["fork_step"]
            ]
        case "accepted":
            totals.num_tokens += int(record["tokens"])
        case "trained":
            trained.append(
                {
                    "lineage": int(record["lineage"]),
                    "step": int(record["step"]),
                    "groups": list(record["groups"]),
                    "staleness": {int(s): int(n) for s, n in record["staleness"].items()},
                }
            )
        case "discarded":
            reason = str(record["reason"])
            totals.discarded[reason] = totals.discarded.get(reason, 0) + 1
        case _:
            pass  # Grants, publications and checkpoints say nothing about these totals.


def _json_object(text: bytes, where: str) -> Row:
    try:
        value = msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise StorageError(f"{where}: not JSON ({error}); the file is damaged") from error
    if not isinstance(value, dict):
        raise StorageError(f"{where}: not a JSON object; the file is damaged")
    return value


def _finite(row: Row, key: str, where: str) -> float:
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise StorageError(f"{where}: {key} is {value!r}, expected a number; the file is damaged")
    return value


def _evaluation(row: Row, step: int) -> Evaluation | None:
    """The evaluation in `row`, if there is one: eval/<task>/pass@1 and eval/<task>/greedy."""
    sampled = [v for k, v in row.items() if k.startswith("eval/") and k.endswith("/pass@1")]
    greedy = [v for k, v in row.items() if k.startswith("eval/") and k.endswith("/greedy")]
    if not sampled or not greedy or sampled[0] is None or greedy[0] is None:
        return None
    num_errors = int(row.get("eval/reward_errors") or 0)
    return Evaluation(int(row.get("eval/version", step)), sampled[0], greedy[0], num_errors)
