from __future__ import annotations

import datetime
import decimal
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from echo.errors import ConfigError, DataError
from echo.extras import install_command
from echo.tasks.dataset import is_local, read_rows

ROWS: list[dict[str, Any]] = [
    {"prompt": "one", "answer": "1", "info": {"level": 1}},
    {"prompt": "two", "answer": "2", "info": {"level": 2}},
    {"prompt": "three", "answer": "3", "info": {"level": 3}},
]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
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


@pytest.mark.parametrize(
    ("write", "name"),
    [(write_jsonl, "rows.jsonl"), (write_parquet, "rows.parquet"), (write_saved, "saved")],
)
def test_every_form_gives_the_same_rows(tmp_path: Path, write: Any, name: str) -> None:
    rows = list(read_rows(write(tmp_path / name, ROWS)))
    assert [row.columns for row in rows] == ROWS
    assert len({row.text for row in rows}) == 3


def test_rows_are_named_by_file_and_number(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "rows.parquet", ROWS)
    assert [row.source for row in read_rows(path)] == [f"{path}:{n}" for n in (1, 2, 3)]


def test_a_directory_is_all_of_its_files_in_order(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "b.jsonl", ROWS[1:])
    write_jsonl(tmp_path / "a.jsonl", ROWS[:1])
    assert [row.columns["prompt"] for row in read_rows(str(tmp_path))] == ["one", "two", "three"]


def test_a_directory_of_splits_asks_for_one(tmp_path: Path) -> None:
    write_saved(tmp_path / "train", ROWS)
    with pytest.raises(DataError, match=r"name one of its splits: .*/train"):
        list(read_rows(str(tmp_path)))


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.parquet: cannot read the dataset: No such file"):
        list(read_rows(str(tmp_path / "absent.parquet")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty: no dataset files in this directory; a dataset is"):
        list(read_rows(str(tmp_path / "empty")))


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"PAR1 and nothing else")
    with pytest.raises(DataError, match=r"rows\.parquet: not readable as Parquet"):
        list(read_rows(str(path)))


def test_typed_values_become_json_and_bytes_are_refused(tmp_path: Path) -> None:
    when = datetime.datetime(2026, 1, 2, 3, 4, 5)  # noqa: DTZ001 -- what a file without zone has
    row = {"prompt": "x", "when": when, "price": decimal.Decimal("1.50")}
    path = write_parquet(tmp_path / "typed.parquet", [row])
    [read] = read_rows(path)
    assert read.columns == {"prompt": "x", "when": "2026-01-02T03:04:05", "price": 1.5}
    path = write_parquet(tmp_path / "bytes.parquet", [{"prompt": "x", "image": b"\x89PNG"}])
    with pytest.raises(DataError, match=r"bytes\.parquet:1: .*column 'image' holds bytes.*drop"):
        list(read_rows(path))


def test_without_pyarrow_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=re.escape(install_command("parquet") + "; or convert")):
        list(read_rows(str(path)))


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A hub that has openai/gsm8k, config main, split train; the calls that it got."""
    huggingface_hub = pytest.importorskip("huggingface_hub")
    calls: list[dict[str, Any]] = []

    def snapshot_download(repository: str, **settings: Any) -> Any:
        calls.append({"repository": repository, **settings})
        if repository != "openai/gsm8k":
            raise OSError("no connection")
        if settings.get("dry_run"):
            return [SimpleNamespace(filename=str(settings["allow_patterns"]))]
        if settings.get("local_files_only") and not (tmp_path / "snapshot").is_dir():
            raise OSError("not in the cache")
        folder = tmp_path / "snapshot" / "main" / "train"
        if not folder.is_dir():
            folder.mkdir(parents=True)
            write_parquet(folder / "0000.parquet", ROWS)
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return calls


def test_a_split_comes_from_the_hub_as_parquet(hub: list[dict[str, Any]]) -> None:
    rows = list(read_rows("hf://openai/gsm8k/main/train"))
    assert [row.columns for row in rows] == ROWS
    assert hub[0] == {
        "repository": "openai/gsm8k",
        "repo_type": "dataset",
        "revision": "refs/convert/parquet",
        "allow_patterns": "main/train/*.parquet",
    }


@pytest.mark.parametrize(
    ("path", "kind", "message"),
    [
        ("hf://openai/gsm8k", ConfigError, "hf://ORG/NAME/CONFIG/SPLIT"),
        ("hf://openai/gsm8k/main/dev", DataError, "has no split 'main/dev'"),
        (
            "hf://openai/gsm9k/main/dev",
            DataError,
            r"no connection\. Without a network.*\n  hf download openai/gsm9k --repo-type dataset "
            r"--revision refs/convert/parquet --include 'main/dev/\*\.parquet' --local-dir DIR\n"
            "copy DIR here and write DIR/main/dev in place of",
        ),
    ],
)
def test_what_the_hub_has_not_is_explained(
    hub: list[dict[str, Any]], path: str, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        list(read_rows(path))


def test_what_is_on_the_hub_is_asked_for_and_not_downloaded(hub: list[dict[str, Any]]) -> None:
    path = "hf://openai/gsm8k/main/train"
    assert not is_local(path)
    assert [call.get("dry_run") for call in hub] == [None, True]
    list(read_rows(path))
    assert is_local(path)
    assert is_local("rows.jsonl")
    with pytest.raises(DataError, match="no connection"):
        is_local("hf://openai/gsm9k/main/train")
