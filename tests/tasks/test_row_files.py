"""Datasets in every form on disk and on the hub."""

from __future__ import annotations

import datetime
import decimal
import gzip
import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from echo.core.errors import ConfigError, DataError
from echo.core.extras import install_command
from echo.tasks.rows.files import DatasetRow, is_local, read_rows
from tests.tasks.rows import ROWS, TABLES, Contains, write_jsonl, write_parquet, write_saved


def rows_of(path: str) -> Iterator[DatasetRow]:
    for row in read_rows(path):
        assert isinstance(row, DatasetRow), row
        yield row


@pytest.mark.parametrize(("write", "name"), [(write_jsonl, "rows.jsonl"), *TABLES])
def test_every_form_gives_the_same_rows(tmp_path: Path, write: Any, name: str) -> None:
    path = write(tmp_path / name, ROWS)
    rows = list(rows_of(path))
    assert [row.columns for row in rows] == ROWS
    if name != "saved":
        assert [row.source for row in rows] == [f"{path}:{n}" for n in (1, 2, 3)]


def test_a_directory_is_all_of_its_files_in_order(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "b.jsonl", ROWS[1:])
    write_jsonl(tmp_path / "a.jsonl", ROWS[:1])
    assert [row.columns for row in rows_of(str(tmp_path))] == ROWS


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("absent.parquet", r"absent\.parquet: cannot read the dataset: No such file"),
        ("", r": no dataset files in this directory; a dataset is"),
        ("/dev/null", r"/dev/null: is a device or pipe, and no dataset; see task"),
        ("~nobody-here/x.jsonl", r"~nobody-here/x\.jsonl: cannot read .*; see task\.options"),
    ],
)
def test_what_is_not_there_is_named(tmp_path: Path, path: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        list(read_rows(path if path[:1] in ("/", "~") else str(tmp_path / path)))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a.jsonl", "b.parquet"], r"holds b\.parquet and a\.jsonl; leave files of one kind"),
        (["train-00000-of-1.jsonl", "Test.jsonl"], r"several splits: Test\.jsonl, train-00000-of"),
        (["val.jsonl", "validation_2.jsonl"], None),
        (["training.jsonl", "tests.jsonl", "b.txt"], None),
    ],
)
def test_a_directory_of_several_datasets_is_refused(
    tmp_path: Path, names: list[str], message: str | None
) -> None:
    for name in names:
        write_jsonl(tmp_path / name, ROWS)
    if message is None:
        assert len(list(rows_of(str(tmp_path)))) == 2 * len(ROWS)
        return
    with pytest.raises(DataError, match=message):
        list(read_rows(str(tmp_path)))


def test_a_column_that_stands_twice_is_refused(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "twice.parquet"
    texts = [pyarrow.array(["x"])] * 3
    table = pyarrow.Table.from_arrays(texts, names=["prompt", "answer", "answer"])
    parquet.write_table(table, path)
    with pytest.raises(DataError, match=r"twice\.parquet: has two columns `answer`; rename one"):
        list(read_rows(str(path)))


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    write_parquet(path, ROWS)
    whole = path.read_bytes()
    for damaged in (b"PAR1 and nothing else", whole[:4] + bytes(40) + whole[44:]):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=r"rows\.parquet: not readable as Parquet"):
            list(read_rows(str(path)))
    path.unlink()
    write_saved(tmp_path / "train", ROWS)
    with pytest.raises(DataError, match=r"name one of its splits: .*/train"):
        list(read_rows(str(tmp_path)))
    path = next((tmp_path / "train").glob("*.arrow"))
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError, match=r"\.arrow: not readable as an Arrow stream"):
        list(read_rows(str(path.parent)))
    for text in ("{", "[]", '{"_data_files": [1]}'):
        (tmp_path / "train" / "state.json").write_text(text)
        with pytest.raises(DataError, match=r"state\.json: is not as .*save the dataset again"):
            list(read_rows(str(path.parent)))


def test_values_of_json_lines_stay_as_they_are_written(tmp_path: Path) -> None:
    # With one type per column 5 becomes 5.0, the text a datetime, and 2**63 is rounded.
    answers = [5, 5.5, "2024-01-02", "01", 2**63, True, None, [1, "a"]]
    path = write_jsonl(tmp_path / "rows.jsonl", [{"answer": answer} for answer in answers])
    read = [row.columns["answer"] for row in rows_of(path)]
    assert [(type(value), value) for value in read] == [(type(each), each) for each in answers]


def test_typed_values_become_json(tmp_path: Path) -> None:
    when = datetime.datetime(2026, 1, 2, 3, 4, 5)  # noqa: DTZ001 -- what a file without zone has
    row = {"prompt": "x", "when": when, "price": decimal.Decimal("1.50")}
    path = write_parquet(tmp_path / "typed.parquet", [row])
    [read] = rows_of(path)
    assert read.columns == {"prompt": "x", "when": "2026-01-02T03:04:05", "price": 1.5}
    exact = [{"n": decimal.Decimal("12345678901234567890.25")}, {"n": decimal.Decimal("0.10")}]
    path = write_parquet(tmp_path / "decimals.parquet", exact)
    assert [row.columns["n"] for row in rows_of(path)] == ["12345678901234567890.25", 0.1]
    path = write_parquet(tmp_path / "floats.parquet", [{"n": math.nan, "m": [1.0, math.nan]}])
    assert next(rows_of(path)).columns == {"n": None, "m": [1.0, None]}


def test_columns_that_cannot_travel_are_left_out_and_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    picture = {"bytes": b"\x89PNG", "path": "a.png"}
    rows = [
        {
            "prompt": f"x{number}",
            "picture": picture,
            "pictures": [picture],
            "took": datetime.timedelta(seconds=1),
            "raw": b"x",
            "answer": "y",
        }
        for number in range(2)
    ]
    [write, name], *_ = TABLES
    with pytest.raises(DataError, match=r"needs `raw` .*the columns prompt, answer"):
        Contains(path=write(tmp_path / f"a-{name}", rows), columns={"prompt": "raw"}).example(
            0, split="train"
        )
    assert "cannot travel to a worker: `picture`" in caplog.text, "also where it is the prompt"
    for write, name in TABLES:
        caplog.clear()
        path = write(tmp_path / name, rows)
        task = Contains(path=path, heldout_path=path)
        assert task.example(0, split="train").columns == {}
        assert task.num_examples(split="train") == 2
        [line] = [line for line in caplog.messages if "cannot travel" in line]
        unable = "`picture` (bytes), `pictures` (bytes), `took` (durations), `raw` (bytes)"
        assert line == f"{path}: left out columns that cannot travel to a worker: {unable}"
        caplog.clear()
        names = ["picture", "pictures", "took", "raw", "answer"]
        task = Contains(path=path, heldout_path=path, leave_out=names)
        assert task.example(0, split="train").answer is None
        assert "cannot travel" not in caplog.text


def test_maps_of_a_table_are_objects(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    kind = pyarrow.map_(pyarrow.string(), pyarrow.int64())
    table = pyarrow.table(
        {"prompt": ["x", "y"], "scores": pyarrow.array([[("a", 1), ("b", None)], []], kind)}
    )
    parquet.write_table(table, tmp_path / "maps.parquet")
    found = [row.columns["scores"] for row in rows_of(str(tmp_path / "maps.parquet"))]
    assert found == [{"a": 1, "b": None}, []]


def test_nulls_that_a_table_adds_are_dropped_and_those_of_jsonl_stay(tmp_path: Path) -> None:
    def row(arguments: dict[str, Any]) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
        said = {"role": "assistant", "content": "-", "tool_calls": [call]}
        turns = [{"role": "user", "content": "?"}, said, {"role": "tool", "content": "5"}]
        tool = {"type": "function", "function": {"name": "add", "parameters": arguments}}
        return {"messages": turns, "tools": [tool], "info": {"args": arguments}}

    rows = [row({"left": 2}), row({"right": 3, "digits": [1]})]
    for write, name in TABLES:
        path = write(tmp_path / name, rows)
        task = Contains(path=path, heldout_path=path)
        for number, expected in enumerate(rows):
            example = task.example(number, split="train")
            assert (example.prompt, example.info) == (expected["messages"], expected["info"])
            assert task.tools(example) == expected["tools"]
    on_purpose = [row({"left": None})]
    path = write_jsonl(tmp_path / "rows.jsonl", on_purpose)
    example = Contains(path=path, heldout_path=path).example(0, split="train")
    assert example.prompt == on_purpose[0]["messages"]


def test_a_byte_order_mark_is_no_part_of_a_row(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [json.dumps(row).encode() for row in ROWS]
    path.write_bytes(b"\r\n".join(b"\xef\xbb\xbf" + line for line in lines))
    assert [row.columns for row in rows_of(str(path))] == ROWS
    path.write_bytes(b'{"prompt": "x", "answer": NaN}')
    assert next(rows_of(str(path))).columns == {"prompt": "x", "answer": None}


ARRAY = json.dumps(ROWS)


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("rows.jsonl", json.dumps(ROWS[0]).encode("utf-16"), "UTF-16: save it as UTF-8"),
        ("rows.jsonl", json.dumps(ROWS[0]).encode("utf-16-le"), "UTF-16, or no text"),
        ("rows.jsonl", json.dumps(ROWS[0]).encode("utf-32-be"), "UTF-16, or no text"),
        ("rows.json", ARRAY.encode(), "one JSON array: write each of its objects into a line"),
        ("rows.json", ARRAY.encode("utf-8-sig"), "one JSON array"),
        ("rows.json", json.dumps(ROWS, indent=2).encode(), "one JSON array"),
        ("rows.json", json.dumps(ROWS[0], indent=2).encode(), "JSON over several lines"),
        ("rows.csv", b"prompt,answer\none,1\n", r"\.csv: write each row as a JSON object into"),
        ("rows.jsonl", b"prompt,answer\none,1\n", "a table of another kind: write each row"),
        ("rows", b"- prompt: one\n- prompt: two\n", "another kind of file: write each row"),
        ("rows.jsonl.gz", gzip.compress(b"{}", mtime=0), "compressed with gzip: unpack it"),
        ("rows.jsonl.zst", b"\x28\xb5\x2f\xfd...", "compressed with zstd"),
        ("rows.zip", b"PK\x03\x04...", "an archive: unpack it"),
        ("rows.pq", b"PAR1...", "Parquet: call it .parquet"),
    ],
)
def test_files_of_other_kinds_are_refused_with_those_that_are_read(
    tmp_path: Path, name: str, content: bytes, kind: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"{name}: is {kind}.*; a dataset is JSON Lines \(UTF-8"):
        Contains(path=str(path), skip_bad=True).example(0, split="train")


def test_without_pyarrow_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rows.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=re.escape(install_command("parquet") + "; or convert")):
        list(read_rows(str(tmp_path / "rows.parquet")))


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
    path = "hf://openai/gsm8k/main/train"
    assert not is_local(path)
    assert [call.get("dry_run") for call in hub] == [None, True], "asked for, not downloaded"
    hub.clear()
    assert [row.columns for row in rows_of(path)] == ROWS
    assert hub[0] == {
        "repository": "openai/gsm8k",
        "repo_type": "dataset",
        "revision": "refs/convert/parquet",
        "allow_patterns": "main/train/*.parquet",
    }
    assert is_local(path)
    assert is_local("rows.jsonl")
    with pytest.raises(DataError, match="no connection"):
        is_local("hf://openai/gsm9k/main/train")


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
