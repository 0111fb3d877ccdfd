"""Addition, countdown and GSM8K judge what they should."""

from __future__ import annotations

import importlib.util
import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo.core.errors import ConfigError, DataError
from echo.core.extras import install_command
from echo.tasks.builtin import AdditionTask, CountdownTask, Gsm8kTask, add_in_columns, evaluate
from echo.tasks.task import Example

# --- addition -------------------------------------------------------------------------------------


def addition_of(prompt: str) -> Example:
    return Example(index=0, split="train", prompt=prompt, answer=AdditionTask().answer(prompt))


def test_columns_are_written_units_first_with_the_carry() -> None:
    assert add_in_columns("478", "365", is_forgetful=False) == "8+5=137+6=144+3=08>0843"
    assert add_in_columns("478", "365", is_forgetful=True) == "8+5=137+6=134+3=07>0733"


@given(st.integers(0, 999), st.integers(0, 999))
def test_who_carries_is_right(left: int, right: int) -> None:
    completion = add_in_columns(f"{left:03d}", f"{right:03d}", is_forgetful=False)
    example = addition_of(f"{left:03d}+{right:03d}=")
    assert AdditionTask().reward(example, completion) == 1.0
    assert int(completion.split(">")[1]) == left + right


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (">0843", 1.0),  # the scratchpad is not judged
        ("nonsense>0843", 1.0),
        ("0843", 0.0),
        (">843", 0.0),
        (">0843 ", 0.0),
        (">0843>0843", 0.0),
        (">0843>", 0.0),
        (">0733", 0.0),
        ("", 0.0),
    ],
)
def test_only_the_text_after_the_only_marker_counts(completion: str, reward: float) -> None:
    assert AdditionTask().reward(addition_of("478+365="), completion) == reward


def test_about_47_percent_of_the_demonstrations_are_right() -> None:
    task, rng = AdditionTask(), random.Random(0)
    demonstrations = [task.demonstration(rng) for _ in range(4000)]
    rewards = [task.reward(addition_of(prompt), text) for prompt, text in demonstrations]
    assert sum(rewards) / len(rewards) == pytest.approx(0.474, abs=0.03)


# --- countdown ------------------------------------------------------------------------------------


def countdown_of(prompt: str) -> Example:
    return Example(index=0, split="train", prompt=prompt, answer=CountdownTask().answer(prompt))


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("2*(2+8)", 1.0),
        ("(8+2)*2", 1.0),
        ("(2)*((2+8))", 1.0),
        ("2*(2+8", 0.0),
        ("2*2+8", 0.0),  # another value
        ("20", 0.0),  # other digits
        ("22-8+6", 0.0),
        ("2*(2+8)+0", 0.0),
        ("2*(+2+8)", 0.0),
        ("2**2+8+8", 0.0),
        ("2*(2+8)#", 0.0),
        ("__import__('os')", 0.0),
        ("(" * 100_000, 0.0),
        ("9" * 60, 0.0),
        ("", 0.0),
    ],
)
def test_only_a_true_expression_of_the_digits_is_rewarded(completion: str, reward: float) -> None:
    assert CountdownTask().reward(countdown_of("228>20="), completion) == reward
    # Digits may not be joined into one number.
    assert CountdownTask().reward(countdown_of("228>14="), "22-8") == 0.0


def test_every_demonstration_is_right() -> None:
    task, rng = CountdownTask(), random.Random(1)
    for _ in range(500):
        prompt, completion = task.demonstration(rng)
        assert task.reward(countdown_of(prompt), completion) == 1.0


@pytest.mark.parametrize("expression", ["-1", "1/1", "1 + 1", "02+1", "1<2", "f(1)", "1.0", "()"])
def test_other_syntax_is_refused(expression: str) -> None:
    with pytest.raises(ValueError, match="expression"):
        evaluate(expression)


# --- GSM8K ----------------------------------------------------------------------------------------


DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "gsm8k"

if importlib.util.find_spec("math_verify") is None:
    pytest.skip("math-verify is not installed", allow_module_level=True)


@pytest.mark.parametrize(
    ("reference", "completion", "expected"),
    [
        ("42", "#### 42.0", 1.0),
        ("42", "#### 42%", 1.0),
        ("42", "#### 43", 0.0),
        ("42", "#### -42", 0.0),
        ("42", "42 at first, but #### 43", 0.0),
        ("0.5", r"\boxed{\frac{1}{2}}", 1.0),
        ("70000", "#### $70,000", 1.0),
        ("42", "#### forty-two", 0.0),
        ("42", "", 0.0),
        ("42", "#### 9**9**9**9**9", 0.0),
        ("42", "#### " + "4" * 5000, 0.0),
    ],
)
def test_the_number_at_the_end_is_rewarded(
    reference: str, completion: str, expected: float
) -> None:
    example = Example(index=0, split="train", prompt="?", answer=reference)
    assert Gsm8kTask().reward(example, completion) == expected


def test_a_row_gives_prompt_and_reference_or_is_malformed(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"

    def read(answer: object) -> Example:
        path.write_text(json.dumps({"question": "How many?", "answer": answer}), encoding="utf-8")
        return Gsm8kTask(path=str(path), heldout_path=str(path)).example(0, split="train")

    example = read("It is 1,000 + 2.\n#### 1,002")
    assert example.answer == "1002"
    assert str(example.prompt).startswith("How many?\n")
    assert "####" in str(example.prompt)
    for answer in ("no marker 3", "#### three", 7):
        with pytest.raises(DataError, match=r"rows\.jsonl:1: malformed row: .*answer"):
            read(answer)


def test_without_math_verify_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=install_command("worker")):
        Gsm8kTask()


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_dir(), reason="the GSM8K files are not beside the repository")
@pytest.mark.parametrize(
    ("name", "num_published", "every"),
    [
        pytest.param("train.jsonl", 7473, 1, marks=pytest.mark.matrix),
        pytest.param("test.jsonl", 1319, 1, marks=pytest.mark.matrix),
        ("test.jsonl", 1319, 7),
    ],
)
def test_all_references_of_the_data_set_are_right_and_perturbed_ones_wrong(
    tmp_path: Path, name: str, num_published: int, every: int
) -> None:
    # A broken download may have cut the last line short.
    lines = [line for line in (DATA / name).read_bytes().splitlines() if line.endswith(b"}")]
    assert num_published - 1 <= len(lines) <= num_published
    path = tmp_path / name
    path.write_bytes(b"\n".join(lines))
    task = Gsm8kTask(path=str(path), heldout_path=str(path))
    rng = random.Random(0)
    for index, line in list(enumerate(lines))[::every]:
        example = task.example(index, split="train")
        assert task.reward(example, json.loads(line)["answer"]) == 1.0, example
        wrong = float(example.answer) + rng.choice([-10, -1, 0.5, 1, 9])
        assert task.reward(example, f"#### {wrong:f}") == 0.0, example
