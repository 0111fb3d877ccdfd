from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from echo.core.errors import DataError, StorageError
from echo.records.run_files import read_config, read_metrics


def write(path: Path, records: list[dict[str, Any]], tail: str = "") -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + tail)


def row(step: int, reward: float, **more: Any) -> dict[str, Any]:
    return {"step": step, "time": float(step), "reward/mean": reward, **more}


def evaluation(step: int, sampled: float, version: int) -> dict[str, Any]:
    rates = {"eval/t/reward": sampled, "eval/t/greedy": 0.9, "eval/version": version}
    return {"step": step, "time": float(step), **rates}


def test_steps_made_again_after_a_resume_replace_the_abandoned_ones(tmp_path: Path) -> None:
    rows = [
        row(1, 0.1, **{"broadcast/bytes": 10}),
        row(2, 0.2, **{"broadcast/bytes": 10}),
        row(3, 0.3),
        evaluation(3, 0.5, 3),
        evaluation(3, 0.4, 1) | {"eval/reward_errors": 2},
        {"step": 3, "time": 3.0, "eval/version": 3, "eval/reward_errors": 8},
        row(2, 0.7, **{"broadcast/bytes": 10}),
    ]
    write(tmp_path / "metrics.jsonl", rows)
    history = read_metrics(tmp_path)
    assert [(r["step"], r["reward/mean"]) for r in history.train] == [(1, 0.1), (2, 0.7)]
    assert [(e.step, e.sampled, e.num_errors) for e in history.evaluations] == [(1, 0.4, 2)]
    assert history.broadcast_bytes == 30


def test_a_new_lineage_tells_where_the_run_was_resumed(tmp_path: Path) -> None:
    """Also before it has made the first step again: it went back to step 2, and evaluates that."""
    rows = [row(step, step / 10, lineage=1) for step in (1, 2, 3, 4)]
    rows += [evaluation(2, 0.5, 2) | {"lineage": 1}, evaluation(4, 0.6, 4) | {"lineage": 1}]
    rows += [evaluation(2, 0.4, 2) | {"lineage": 2}]
    write(tmp_path / "metrics.jsonl", rows)
    history = read_metrics(tmp_path)
    assert [r["step"] for r in history.train] == [1, 2]
    assert [(e.step, e.sampled) for e in history.evaluations] == [(2, 0.4)]
    write(tmp_path / "metrics.jsonl", [*rows, row(3, 0.7, lineage=2)])
    assert [r["reward/mean"] for r in read_metrics(tmp_path).train] == [0.1, 0.2, 0.7]


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    write(tmp_path / "metrics.jsonl", [row(1, 0.1)], tail='{"step": 2, "ti')
    assert len(read_metrics(tmp_path).train) == 1
    # Complete but for its line end: the writer may have been cut off right there as well.
    write(tmp_path / "metrics.jsonl", [row(1, 0.1)], tail=json.dumps(row(2, 0.2)))
    assert len(read_metrics(tmp_path).train) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"step": 1, "ti', "metrics.jsonl:2: not JSON"),
        ("[1, 2]", "metrics.jsonl:2: not a JSON object"),
        ('{"time": 1}', "metrics.jsonl:2: step is None, expected a number"),
        ('{"step": 1, "time": "now"}', "metrics.jsonl:2: time is 'now', expected a number"),
    ],
)
def test_damage_before_the_last_line_is_an_error(tmp_path: Path, line: str, message: str) -> None:
    text = f"{json.dumps(row(1, 0.1))}\n{line}\n{json.dumps(row(2, 0.2))}\n"
    (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(StorageError, match=message):
        read_metrics(tmp_path)


def test_missing_files_are_named_with_a_remedy(tmp_path: Path) -> None:
    for read, name in (
        (read_metrics, "metrics.jsonl"),
        (read_config, "config.json"),
    ):
        with pytest.raises(DataError, match=f"{name}: no such file; is .* the directory of a run"):
            read(tmp_path)


def test_a_directory_in_place_of_a_file_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(StorageError, match=r"metrics.jsonl: cannot be read: Is a directory"):
        read_metrics(tmp_path)
