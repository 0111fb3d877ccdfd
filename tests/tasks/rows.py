"""Rows as the tests write them: files of every form, and a task that serves them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from echo.tasks.dataset import RowsTask
from echo.tasks.task import Example

ROWS: list[dict[str, Any]] = [
    {"prompt": "one", "answer": "1", "info": {"level": 1}},
    {"prompt": "two", "answer": "2", "info": {"level": 2}},
    {"prompt": "three", "answer": "3", "info": {"level": 3}},
]


def write_jsonl(path: Path, rows: Sequence[object]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def write_saved(directory: Path, rows: list[dict[str, Any]]) -> str:
    """Write what `datasets.Dataset.save_to_disk` writes, as far as it is read."""
    pyarrow = pytest.importorskip("pyarrow")
    directory.mkdir(parents=True)
    table = pyarrow.Table.from_pylist(rows)
    names = []
    for number in range(2):
        names.append(f"data-{number:05d}-of-00002.arrow")
        part = table.slice(2 * number, 2)
        with pyarrow.ipc.new_stream(str(directory / names[-1]), table.schema) as stream:
            stream.write_table(part)
    state = {"_data_files": [{"filename": name} for name in names], "_split": None}
    (directory / "state.json").write_text(json.dumps(state), encoding="utf-8")
    return str(directory)


TABLES: list[tuple[Any, str]] = [(write_parquet, "rows.parquet"), (write_saved, "saved")]


def numbered(num_rows: int, tag: str = "q") -> list[dict[str, Any]]:
    return [{"prompt": f"{tag}{index}", "answer": f"a{index}"} for index in range(num_rows)]


class Contains(RowsTask):
    def reward(self, example: Example, completion: str) -> float:
        return float(example.answer in completion)
