"""Rows and what they are worth."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from echo.core.errors import ConfigError, DataError
from echo.tasks.dataset import NO_PATH, DatasetTask
from echo.tasks.task import Example, load_task
from tests.tasks.rows import Contains, numbered, write_jsonl


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


@pytest.mark.parametrize("prompt", ['[{"a": 1}]', "[3, 1, 2]", '["b", {"role": 1}]', "[[]]", "[]"])
def test_a_prompt_that_is_other_json_is_text(tmp_path: Path, prompt: str) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": prompt}])
    example = Contains(path=path, heldout_path=path).example(0, split="train")
    assert example.prompt == prompt


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
