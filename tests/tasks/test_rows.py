from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from echo.errors import DataError
from echo.tasks.dataset import NO_PATH, RowsTask
from echo.tasks.task import Example


class Contains(RowsTask):
    def reward(self, example: Example, completion: str) -> float:
        return float(example.answer in completion)


class Capitals(Contains):
    def read_row(self, row: Any) -> Example:
        return Example(index=0, split="train", prompt=row["country"], answer=row["capital"])


def write(path: Path, rows: list[object]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def rows(num_rows: int, tag: str = "q") -> list[object]:
    return [{"prompt": f"{tag}{index}", "answer": f"a{index}"} for index in range(num_rows)]


def test_rows_are_served_in_order_and_wrap_around(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", rows(3))
    task = Contains(path=train, heldout_path=write(tmp_path / "held.jsonl", rows(2, "h")))
    examples = [task.example(index, split="train") for index in range(4)]
    assert [example.prompt for example in examples] == ["q0", "q1", "q2", "q0"]
    assert [example.index for example in examples] == [0, 1, 2, 3]
    assert examples[3].source == f"{train}:1"
    heldout = task.example(1, split="heldout")
    assert (heldout.prompt, heldout.split) == ("h1", "heldout")
    assert task.reward(heldout, "it is a1") == 1.0
    assert (task.num_examples(split="train"), task.num_examples(split="heldout")) == (3, 2)


def test_one_file_is_split_by_the_hash_of_its_lines(tmp_path: Path) -> None:
    task = Contains(path=write(tmp_path / "all.jsonl", rows(400)))
    numbers = {split: task.num_examples(split=split) for split in ("train", "heldout")}
    assert numbers["train"] + numbers["heldout"] == 400
    assert 20 <= numbers["heldout"] <= 60
    sides = [
        {task.example(index, split=split).prompt for index in range(number)}
        for split, number in numbers.items()
    ]
    assert not sides[0] & sides[1]


def test_messages_and_info_are_taken(tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    path = write(tmp_path / "a.jsonl", [{"messages": messages, "info": {"level": 2}}])
    example = Contains(path=path, heldout_path=path).example(0, split="train")
    assert (example.prompt, example.info, example.answer) == (messages, {"level": 2}, None)


def test_the_constructor_reads_nothing(tmp_path: Path) -> None:
    task = Contains(path=str(tmp_path / "absent.jsonl"))
    assert task.reward(Example(index=0, split="train", prompt="", answer="x"), "x") == 1.0
    with pytest.raises(DataError, match=r"absent\.jsonl: cannot read the dataset: No such file"):
        task.example(0, split="train")
    with pytest.raises(DataError, match=r"set task\.options\.path"):
        Contains().example(0, split="train")


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b'{"prompt": "x"', "Expecting"),
        (b"[1, 2]", "must be a JSON object, not list"),
        (b'{"question": "x"}', "needs `prompt`.*it has the columns question"),
        (b'{"prompt": ""}', "needs `prompt`"),
        (b'{"prompt": " \\n"}', "needs `prompt`"),
        (b'{"prompt": 3}', "needs `prompt`"),
        (b'{"prompt": [{"role": "user"}]}', "needs `prompt`"),
        (b'{"prompt": "x", "info": 3}', "`info` must be an object, not int"),
        (b'{"prompt": "\xff"}', "can't decode byte 0xff"),
    ],
)
def test_a_malformed_row_is_named_by_file_and_line(
    tmp_path: Path, line: bytes, problem: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "good"}\n\n' + line + b"\n")
    with pytest.raises(DataError, match=rf"rows\.jsonl:3: malformed row: .*{problem}"):
        Contains(path=str(path)).example(0, split="train")


def test_a_column_missed_by_a_subclass_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl", [{"country": "Chad", "capital": "N'Djamena"}, {"land": 1}])
    with pytest.raises(DataError, match=r"c\.jsonl:2: malformed row: no column 'country'"):
        Capitals(path=path).example(0, split="train")


def test_an_empty_file_and_an_empty_split_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is empty"):
        Contains(path=write(tmp_path / "empty.jsonl", [])).example(0, split="train")
    one_row = write(tmp_path / "one.jsonl", rows(1))
    with pytest.raises(DataError, match=r"set.*heldout_path|heldout_path"):
        Contains(path=one_row).example(0, split="heldout")


def test_bad_rows_are_skipped_counted_and_the_first_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "rows.jsonl"
    lines = [b'{"prompt": "a"}', b'{"prompt": " "}', b"{", b'{"prompt": 3}', b'{"prompt": "b"}']
    path.write_bytes(b"\n".join(lines))
    task = Contains(path=str(path), heldout_path=str(path), skip_bad=True)
    assert task.num_examples(split="train") == 2
    assert task.example(1, split="train").source == f"{path}:5"
    text = f"{path}: skipped 3 of 5 rows (task.options.skip_bad); the first: {path}:2: malformed"
    assert text in caplog.text


def test_a_dataset_of_bad_rows_only_is_refused(tmp_path: Path) -> None:
    task = Contains(path=write(tmp_path / "bad.jsonl", [{"question": "x"}, {}]), skip_bad=True)
    with pytest.raises(DataError, match=r"all rows are malformed; the first: .*bad\.jsonl:1: "):
        task.example(0, split="train")


def test_a_glance_at_the_data_finds_what_is_wrong_with_each_file(tmp_path: Path) -> None:
    bad, none = write(tmp_path / "bad.jsonl", [{}, *rows(2)]), str(tmp_path / "none.jsonl")
    first, second = Contains(path=bad, heldout_path=none).data_problems()
    assert f"{bad}:1: malformed row" in first
    assert f"{none}: cannot read the dataset" in second
    assert Contains(path=bad, skip_bad=True).data_problems() == []
    assert Contains().data_problems() == [NO_PATH]
