from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from echo.errors import ConfigError, DataError
from echo.extras import install_command
from echo.tasks.builtin import Gsm8kTask
from echo.tasks.task import Example

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "gsm8k"

pytest.importorskip("math_verify")


def reward(reference: str, completion: str) -> float:
    example = Example(index=0, split="train", prompt="?", answer=reference)
    return Gsm8kTask().reward(example, completion)


@pytest.mark.parametrize(
    ("reference", "completion", "expected"),
    [
        ("42", "#### 42", 1.0),
        ("42", "#### 42.0", 1.0),
        ("42", "#### 42%", 1.0),
        ("42", "#### 43", 0.0),
        ("42", "#### -42", 0.0),
        ("42", "42 at first, but #### 43", 0.0),
        ("0.5", r"\boxed{\frac{1}{2}}", 1.0),
        ("0.5", r"\boxed{\frac{1}{3}}", 0.0),
        ("70000", "#### $70,000", 1.0),
        ("42", "#### forty-two", 0.0),
        ("42", "", 0.0),
        ("42", "#### 9**9**9**9**9", 0.0),
        ("42", "#### " + "4" * 5000, 0.0),
    ],
)
def test_rewards(reference: str, completion: str, expected: float) -> None:
    assert reward(reference, completion) == expected


def test_the_prompt_says_how_to_answer_and_the_row_gives_the_reference(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = {"question": "How many?", "answer": "It is 1,000 + 2.\n#### 1,002"}
    path.write_text(json.dumps(row), encoding="utf-8")
    example = Gsm8kTask(path=str(path), heldout_path=str(path)).example(0, split="train")
    assert example.answer == "1002"
    assert str(example.prompt).startswith("How many?\n")
    assert "####" in str(example.prompt)


@pytest.mark.parametrize("answer", ["no marker 3", "#### three", 7])
def test_a_row_without_a_reference_number_is_malformed(tmp_path: Path, answer: object) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "?", "answer": answer}), encoding="utf-8")
    with pytest.raises(DataError, match=r"rows\.jsonl:1: malformed row: .*answer"):
        Gsm8kTask(path=str(path)).example(0, split="train")


def test_without_math_verify_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=install_command("worker")):
        Gsm8kTask()


def complete_lines(path: Path) -> list[bytes]:
    """The lines of a file, less a last one that a broken download cut short.

    The task itself refuses such a file (it names the line); what is tested here is the verifier.
    """
    *lines, last = path.read_bytes().splitlines()
    try:
        json.loads(last)
    except ValueError:
        return lines
    return [*lines, last]


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason="the GSM8K files are not beside the repository")
@pytest.mark.parametrize(
    ("name", "num_published"),
    [pytest.param("train.jsonl", 7473, marks=pytest.mark.matrix), ("test.jsonl", 1319)],
)
def test_all_references_of_the_data_set_are_right_and_perturbed_ones_wrong(
    tmp_path: Path, name: str, num_published: int
) -> None:
    lines = complete_lines(DATA / name)
    assert num_published - 1 <= len(lines) <= num_published
    path = tmp_path / name
    path.write_bytes(b"\n".join(lines))
    task = Gsm8kTask(path=str(path), heldout_path=str(path))
    rng = random.Random(0)
    for index, line in enumerate(lines):
        example = task.example(index, split="train")
        assert task.reward(example, json.loads(line)["answer"]) == 1.0, example
        wrong = float(example.answer) + rng.choice([-10, -1, 0.5, 1, 9])
        assert task.reward(example, f"#### {wrong:f}") == 0.0, example
