"""Rows of every form, what they are worth, and mixtures of tasks."""

from __future__ import annotations

import datetime
import decimal
import gzip
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from echo.core.errors import ConfigError, DataError
from echo.core.extras import install_command
from echo.tasks.dataset import (
    CYCLE,
    NO_PATH,
    DatasetRow,
    DatasetTask,
    MixtureTask,
    RowsTask,
    is_local,
    read_rows,
    spread,
)
from echo.tasks.environment import Environment
from echo.tasks.task import Example, load_task, task_digests

# --- forms on disk and on the hub -----------------------------------------------------------------


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


def rows_of(path: str) -> Iterator[DatasetRow]:
    for row in read_rows(path):
        assert isinstance(row, DatasetRow), row
        yield row


TABLES: list[tuple[Any, str]] = [(write_parquet, "rows.parquet"), (write_saved, "saved")]


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


# --- rows -----------------------------------------------------------------------------------------


def numbered(num_rows: int, tag: str = "q") -> list[dict[str, Any]]:
    return [{"prompt": f"{tag}{index}", "answer": f"a{index}"} for index in range(num_rows)]


class Contains(RowsTask):
    def reward(self, example: Example, completion: str) -> float:
        return float(example.answer in completion)


class Capitals(Contains):
    def read_row(self, row: Any) -> Example:
        return Example(index=0, split="train", prompt=row["country"], answer=row["capital"])


def test_rows_are_served_in_order_and_wrap_around(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    chat = {"messages": messages, "info": {"level": 2}}
    train = write_jsonl(tmp_path / "train.jsonl", numbered(3))
    heldout_path = write_jsonl(tmp_path / "held.jsonl", [chat, *numbered(1, "h")])
    task = Contains(path=train, heldout_path=heldout_path)
    examples = [task.example(index, split="train") for index in range(4)]
    assert [example.prompt for example in examples] == ["q0", "q1", "q2", "q0"]
    assert [example.index for example in examples] == [0, 1, 2, 3]
    assert examples[3].source == f"{train}:1"
    assert (task.num_examples(split="train"), task.num_examples(split="heldout")) == (3, 2)
    example, heldout = (task.example(index, split="heldout") for index in (0, 1))
    assert (example.prompt, example.info, example.answer) == (messages, {"level": 2}, None)
    assert (heldout.prompt, heldout.split) == ("h0", "heldout")
    assert task.reward(heldout, "it is a0") == 1.0


def test_one_file_is_split_by_the_hash_of_its_prompts(tmp_path: Path) -> None:
    rows = numbered(100) + [{"id": 1, "prompt": f" q{index} "} for index in range(100)]
    rows += [{"messages": [{"role": "user", "content": f"\uff31{index}"}]} for index in range(100)]
    part = {"type": "text", "text": "q"}
    rows += [
        {"messages": [{"content": [{**part, "text": f"q{index}"}], "role": "user"}], "id": index}
        for index in range(100)
    ]
    task = Contains(path=write_jsonl(tmp_path / "all.jsonl", rows))
    numbers = {split: task.num_examples(split=split) for split in ("train", "heldout")}
    assert numbers["train"] + numbers["heldout"] == 400
    assert 20 <= numbers["heldout"] <= 60
    sides = [
        {
            "".join(re.findall(r"[q\uff31](\d+)", str(example.prompt)))
            for example in (task.example(index, split=split) for index in range(number))
        }
        for split, number in numbers.items()
    ]
    assert not sides[0] & sides[1]
    one = write_jsonl(tmp_path / "one.jsonl", [{"id": n, "prompt": "q"} for n in range(50)])
    task = Contains(path=one)
    empty = min(numbers, key=lambda split: task.num_examples(split=split))
    with pytest.raises(DataError, match="it has 1 different prompts, and one in ten is held out"):
        task.example(0, split=empty)


def test_heldout_prompts_that_are_trained_on_are_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_jsonl(tmp_path / "train.jsonl", numbered(9))
    heldout = write_jsonl(tmp_path / "held.jsonl", [{"prompt": "Q3 "}, {"prompt": "q10"}])
    assert Contains(path=path, heldout_path=heldout).num_examples(split="heldout") == 2
    assert f"{heldout}: 1 of its 2 prompts are on both sides, also in {path}" in caplog.text


ANSWERED = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "It is 2."},
]


def test_the_assistants_last_message_is_dropped_or_continued(tmp_path: Path) -> None:
    rows = [{"messages": ANSWERED}, {"prompt": ANSWERED, "answer": "2"}]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)

    def examples(how: str) -> list[Example]:
        task = Contains(path=path, heldout_path=path, assistant_last=how)
        return [task.example(index, split="train") for index in range(2)]

    dropped = examples("drop")
    assert [example.prompt for example in dropped] == [ANSWERED[:1]] * 2
    assert [example.answer for example in dropped] == ["It is 2.", "2"]
    assert [example.prompt for example in examples("continue")] == [ANSWERED] * 2
    with pytest.raises(ConfigError, match="assistant_last = 'close': must be continue or drop"):
        examples("close")
    twice = write_jsonl(tmp_path / "twice.jsonl", [{"messages": [*ANSWERED, ANSWERED[1]]}])
    task = Contains(path=twice, heldout_path=twice, assistant_last="drop")
    assert task.example(0, split="train").prompt == ANSWERED[:1]
    alone = write_jsonl(tmp_path / "alone.jsonl", [{"messages": ANSWERED[1:]}])
    with pytest.raises(DataError, match="all of its messages are the assistant's: nothing is"):
        Contains(path=alone, assistant_last="drop").example(0, split="train")


def test_messages_and_tools_may_be_json_as_text(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    rows = [
        {"messages": json.dumps(ANSWERED[:1]), "tools": json.dumps(tools)},
        {"prompt": "[1, 2] is what?", "functions": tools, "tools": ""},
    ]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    task = Contains(path=path, heldout_path=path)
    first, second = (task.example(index, split="train") for index in range(2))
    assert (first.prompt, task.tools(first)) == (ANSWERED[:1], tools)
    assert (second.prompt, task.tools(second)) == ("[1, 2] is what?", [])
    named = Contains(path=path, heldout_path=path, columns={"tools": "functions"})
    assert named.tools(named.example(1, split="train")) == tools


def test_columns_for_templates_that_are_not_given_to_them_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    row = {"prompt": "x", "documents": [], "functions": []}
    path = write_jsonl(tmp_path / "rows.jsonl", [row])
    Contains(path=path, heldout_path=path, columns={"tools": "functions"}).num_examples(
        split="train"
    )
    assert caplog.messages[0].endswith("the column `documents` is not given to the chat template")
    assert "functions" not in caplog.text


def test_columns_can_be_left_out_and_too_large_rows_name_theirs(tmp_path: Path) -> None:
    rows = [{"prompt": "x", "note": "y" * (8 << 20), "answer": "z"}, {"prompt": "p", "note": ""}]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    options: dict[str, Any] = {"path": path, "heldout_path": path}
    with pytest.raises(
        DataError, match=r"rows\.jsonl:1: the row has .* in the column `note`; .*skip_b"
    ):
        Contains(**options).example(0, split="train")
    assert Contains(**options, skip_bad=True).num_examples(split="train") == 1
    task = Contains(**options, leave_out=["note"])
    assert (task.example(0, split="train").columns, task.num_examples(split="train")) == ({}, 2)
    with pytest.raises(
        ConfigError, match=r"leave_out: .* no column 'not' \(did you mean 'note'\?\)"
    ):
        Contains(**options, leave_out=["not"], skip_bad=True).example(0, split="train")


def test_rows_without_use_are_named_or_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", numbered(20))

    def fault_of(example: Example) -> str:
        return "too long" if example.prompt in ("q3", "q5") else ""

    with pytest.raises(
        DataError, match=r"rows\.jsonl:4: too long, or leave such rows out with task"
    ):
        Contains(path=path, heldout_path=path).examine(fault_of)
    options: dict[str, Any] = {"path": path, "heldout_path": path, "skip_bad": True}
    mixture = load_task("mixture", {"tasks": [{"kind": "dataset", "options": options}]})
    for task in (Contains(**options), mixture.parts()[0]):
        (mixture if task in mixture.parts() else task).examine(fault_of)
        assert [task.num_examples(split=split) for split in ("train", "heldout")] == [18, 18]
        text = "left out 2 of 20 train rows (task.options.skip_bad); the first"
        assert f"{path}: {text}: {path}:4: too long" in caplog.messages
        caplog.clear()
    with pytest.raises(DataError, match=r"rows\.jsonl:1: bad$"):
        Contains(path=path, heldout_path=path, skip_bad=True).examine(lambda _: "bad")


def test_the_constructor_reads_nothing(tmp_path: Path) -> None:
    task = Contains(path=str(tmp_path / "absent.jsonl"))
    assert task.reward(Example(index=0, split="train", prompt="", answer="x"), "x") == 1.0
    with pytest.raises(DataError, match=r"absent\.jsonl: cannot read the dataset: No such file"):
        task.example(0, split="train")
    with pytest.raises(DataError, match=r"set task\.options\.path"):
        Contains().example(0, split="train")
    with pytest.raises(DataError, match="is empty"):
        Contains(path=write_jsonl(tmp_path / "empty.jsonl", [])).example(0, split="train")
    one_row = write_jsonl(tmp_path / "one.jsonl", numbered(1))
    with pytest.raises(DataError, match="heldout_path"):
        Contains(path=one_row).example(0, split="heldout")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"prompt": "x"', "Expecting"),
        (b"[1, 2]", "must be a JSON object, not list"),
        (b'{"question": "x"}', "needs `prompt`.*it has the columns question"),
        (b'{"prompt": ""}', "needs `prompt`, whose value is empty in this row"),
        (b'{"prompt": null}', "needs `prompt`, whose value is null in this row"),
        (b'{"prompt": " \\n"}', "needs `prompt`, whose text is empty in this row"),
        (b'{"prompt": 3}', "needs `prompt` as text or chat messages; in this row it is int"),
        (b'{"prompt": [{"role": "user"}]}', "`prompt`: message 1 has neither `content` nor"),
        (
            b'{"messages": [{"from": "human", "value": "x"}]}',
            "`messages`: message 1 has `from` and `value`; write them as `role` and `content`",
        ),
        (
            b'{"messages": [{"role": "user", "content": [{"type": "image", "image": "a"}]}]}',
            "`messages`: message 1 has a part of the type 'image'",
        ),
        (
            b'{"messages": [{"role": "system", "content": ""}, {"role": "user", "content": []}]}',
            "needs `messages`, whose messages are empty in this row",
        ),
        (b'{"prompt": "x", "tools": "add"}', "`tools` must be a list of objects"),
        (b'{"prompt": "x", "tools": ["add"]}', "`tools` must be a list of objects"),
        (
            b'{"messages": [{"role": "user", "content": "x"}, '
            b'{"role": "assistant", "content": ""}]}',
            'its last message is the assistant\'s: .* Set task.options.assistant_last = "drop"',
        ),
        (b'{"prompt": "x", "info": 3}', "`info` must be an object, not int"),
        (b'{"prompt": "x", "info": "[1]"}', "`info` must be an object, not str"),
        (b'{"messages": "x"}', "needs `messages` as chat messages; in this row it is text, and"),
        (
            b"{\"prompt\": \"[{'content': 'x', 'role': 'user'}]\"}",
            "needs `prompt` as chat messages; in this row it is text",
        ),
        (b'{"prompt": [{"role": "user", "content": " \\n"}]}', "whose messages are empty"),
        (
            b'{"messages": [{"role": "user", "content": "x"}, '
            b'{"role": "Assistant", "content": "an answer"}]}',
            "message 2 has the role 'Assistant': write 'assistant', which chat templates know",
        ),
        (b'{"prompt": "x", "prompt": "y"}', "'prompt' stands in it twice"),
        (b'{"prompt": "x", "info": {"a": 1, "a": 2}}', "'a' stands in it twice"),
        (b'{"prompt": "\xff"}', "can't decode byte 0xff"),
        # No lease could carry these.
        (rb'{"prompt": "\ud800"}', "surrogates not allowed"),
        (
            b'{"prompt": "p", "answer": 10000000000000000000000000}',
            "`answer` holds an integer beyond",
        ),
        (b"[" * 100_000, "recursion depth"),
    ],
)
def test_a_malformed_row_is_named_by_file_and_line_or_skipped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, line: bytes, problem: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "good"}\n\n' + line + b'\n{"prompt": "b"}\n[]')
    options: dict[str, Any] = {"path": str(path), "heldout_path": str(path)}
    with pytest.raises(DataError, match=rf"rows\.jsonl:3: malformed row: .*{problem}"):
        Contains(**options).example(0, split="train")
    task = Contains(**options, skip_bad=True)
    assert task.num_examples(split="train") == 2
    assert task.example(1, split="train").source == f"{path}:4"
    text = f"{path}: skipped 2 of 4 rows (task.options.skip_bad); the first: {path}:3: malformed"
    assert caplog.text.count(text) == 1, "told once, though training and held-out rows are the same"


def test_a_look_at_the_data_finds_what_is_wrong_with_each_file(tmp_path: Path) -> None:
    none, bad = (
        str(tmp_path / "none.jsonl"),
        write_jsonl(tmp_path / "bad.jsonl", [*numbered(2), {}]),
    )
    first, second = Contains(path=bad, heldout_path=none).data_problems()
    assert f"{bad}:3: malformed row" in first
    assert f"{none}: cannot read the dataset" in second
    assert Contains(path=bad, skip_bad=True).data_problems() == []
    assert Contains().data_problems() == [NO_PATH]
    [problem] = Capitals(path=bad).data_problems()
    assert f"{bad}:1: malformed row: no column 'country'" in problem
    [problem] = Capitals(path=bad, skip_bad=True).data_problems()
    assert f"all rows are malformed; the first: {bad}:1: " in problem


# --- columns of other names -----------------------------------------------------------------------


def test_columns_of_other_names_are_mapped(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"question": "q", "solution": "42", "level": 1}])
    task = DatasetTask(path=path, columns={"prompt": "question", "answer": "solution"})
    example = task.example(0, split="train" if task.num_examples(split="train") else "heldout")
    assert (example.prompt, example.answer, example.columns) == ("q", "42", {"level": 1})


def test_a_column_that_no_row_has_is_no_other_name(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "p", "solution": "1"}])
    what = r"columns\.answer = 'solutoin': .* no such column \(did you mean 'solution'\?\); it has"
    with pytest.raises(ConfigError, match=what):
        Contains(path=path, columns={"answer": "solutoin"}).example(0, split="train")


def test_of_two_prompts_in_a_row_one_is_taken_and_the_other_stays_a_column(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    turns = [{"role": "user", "content": "chat"}]
    rows = [{"prompt": "text", "messages": turns, "info": '{"a": 1}'}]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    example = Contains(path=path, heldout_path=path).example(0, split="train")
    assert (example.prompt, example.columns, example.info) == (
        "text",
        {"messages": turns},
        {"a": 1},
    )
    assert (
        f"{path}: has the columns `prompt` and `messages`: the first is the prompt" in caplog.text
    )
    caplog.clear()
    example = Contains(path=path, heldout_path=path, leave_out=["prompt"]).example(0, split="train")
    assert (example.prompt, example.columns) == (turns, {})
    assert "has the columns" not in caplog.text


def test_a_prompt_that_is_json_of_other_objects_is_text(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": '[{"a": 1}]'}])
    example = Contains(path=path, heldout_path=path).example(0, split="train")
    assert example.prompt == '[{"a": 1}]'


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1, [1, {"x": 10**30}]])
def test_an_integer_beyond_64_bits_is_named_by_its_column(tmp_path: Path, value: object) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "p", "answer": 2**63, "size": value}])
    what = r"rows\.jsonl:1: .*`size` holds an integer beyond 64 bits; write it as text"
    with pytest.raises(DataError, match=what):
        DatasetTask(path=path).example(0, split="train")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"columns": {"promt": "q"}}, r"promt: no such column is read \(did you me"),
        ({"columns": {"prompt": "q"}}, r"rows\.jsonl:1: .*needs `q`.*columns prompt"),
        ({"columns": {"info": "promt"}, "reward": "math"}, r"rows\.jsonl:1: .*needs the columns"),
        ({"columns": ["q"]}, r"task\.options\.columns = \['q'\]: must be a table such as"),
        ({"columns": {"info": 3}}, r"task\.options\.columns\.info = 3: must be the name of"),
        ({"leave_out": "id"}, r"task\.options\.leave_out = 'id': must be a list such as"),
        ({"skip_bad": "false"}, r"task\.options\.skip_bad = 'false': must be true or false"),
        ({"heldout_path": ["a"]}, r"task\.options\.heldout_path = \['a'\]: must be a text"),
        ({"reward": "exact"}, r"rows\.jsonl:1: .*needs the columns answer; it has pro"),
    ],
)
def test_what_does_not_fit_is_named_with_the_remedy(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "p"}])
    is_of_a_row = message.startswith("rows")
    with pytest.raises(DataError if is_of_a_row else ConfigError, match=message):
        DatasetTask(path=path, **options).example(0, split="train")


# --- mixtures -------------------------------------------------------------------------------------


HERE = "tests.tasks.pool_tasks"


def dataset(directory: Path, num_rows: int) -> dict[str, Any]:
    path = write_jsonl(directory / "a.jsonl", numbered(num_rows))
    return {"kind": "dataset", "options": {"path": path, "heldout_path": path}}


def make(*tables: dict[str, Any]) -> MixtureTask:
    task = load_task("mixture", {"tasks": list(tables)})
    assert isinstance(task, MixtureTask)
    return task


@pytest.mark.parametrize("shares", [[1.0], [0.5, 0.5], [0.75, 0.2, 0.05], [0.999, 0.001]])
def test_every_stretch_is_mixed_as_the_weights_say(shares: list[float]) -> None:
    parts = [part for part, _ in spread(shares)]
    for length in (1, 7, 50, 333, CYCLE):
        counts = Counter(parts[:length])
        assert all(abs(counts[k] - share * length) <= 1 for k, share in enumerate(shares))
    assert spread(shares)[-1][1] == Counter(parts)[parts[-1]] - 1


def test_examples_go_to_their_own_task(tmp_path: Path) -> None:
    task = make({"kind": "addition", "weight": 3}, dataset(tmp_path, 4))
    examples = [task.example(index, split="train") for index in range(40)]
    assert [example.index for example in examples] == list(range(40))
    assert Counter(example.task for example in examples) == {"addition": 30, "dataset": 10}
    for example in examples:
        right = f"1+1>{example.answer}" if example.task == "addition" else example.answer
        assert task.reward(example, right) == 1.0
        assert task.reward(example, "?") == 0.0
    assert examples == [task.example(index, split="train") for index in range(40)]


def test_a_dataset_is_visited_whole_before_it_is_visited_again(tmp_path: Path) -> None:
    task = make({"kind": "addition"}, dataset(tmp_path, 7))
    examples = (task.example(index, split="train") for index in range(2 * CYCLE))
    prompts = [example.prompt for example in examples if example.task == "dataset"]
    assert len(prompts) == CYCLE
    epochs = [tuple(prompts[start : start + 7]) for start in range(0, 7 * 100, 7)]
    assert all(len(set(epoch)) == 7 for epoch in epochs)
    assert len(set(epochs)) > 50, "in another order each time"


def test_tasks_of_one_and_of_several_turns(tmp_path: Path) -> None:
    task = make({"kind": f"{HERE}:Counting"}, dataset(tmp_path, 4))
    assert (task.has_turns, task.is_bounded) == (True, False)
    examples = {
        example.task: example for example in (task.example(i, split="train") for i in (0, 1))
    }
    answer = str(examples["dataset"].answer)
    for name, texts, said in (
        ("Counting", ["1", "2", "3"], ["go on", "go on", None]),
        ("dataset", [answer], [None]),
    ):
        state = task.begin(examples[name])
        assert [task.reply(state, text) for text in texts] == said
        assert task.outcome(state) == 1.0
        task.end(state)


def test_tasks_of_one_turn_make_a_task_of_one_turn_and_all_are_in_the_digest() -> None:
    two, one = make({"kind": "addition"}, {"kind": "countdown"}), make({"kind": "addition"})
    assert isinstance(two, Environment)
    assert (two.has_turns, two.is_bounded) == (False, True)
    assert task_digests(one)["task_source"] != task_digests(two)["task_source"]


ADDITION: dict[str, Any] = {"kind": "addition"}


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([], r"needs tables \[\[task\.options\.tasks\]\]"),
        ([{**ADDITION, "wieght": 2}], r"tasks\[0\]\.wieght: .*did you mean 'weight'"),
        ([{**ADDITION, "weight": 0}], r"tasks\[0\]\.weight = 0: must be a finite number"),
        ([{**ADDITION, "weight": math.inf}], r"weight = inf: must be a finite number"),
        (
            [{**ADDITION, "weight": 5000}, {"kind": "countdown"}],
            r"tasks\[1\]\.weight = 1: fewer than one example in 1000.*leave the task out",
        ),
        (
            [{"kind": "mixture", "options": {"tasks": [ADDITION]}}],
            r"tasks\[0\]: a mixture in a mixture; list its tasks here",
        ),
        ([{"weight": 2}], r"tasks\[0\]: needs a `kind`"),
        ([ADDITION] * 2, r"tasks\[1\]: two tasks are called 'addition'; give them a"),
        ([{"kind": "additon"}], "did you mean 'addition'"),
    ],
)
def test_what_does_not_fit_is_named(tables: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_task("mixture", {"tasks": tables})
