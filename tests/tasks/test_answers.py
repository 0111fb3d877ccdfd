"""Answers: what the rewards `exact` and `math` find equal."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import pytest

from echo.core.errors import DataError
from echo.tasks.answers import exact, extract_answer
from echo.tasks.dataset import DatasetTask
from echo.tasks.task import Example, load_task


@pytest.mark.parametrize(
    ("answer", "right", "wrong"),
    [
        ("Paris", " Paris\n", "Paris!"),
        (" Paris\n", "Paris", "paris"),
        (42, "42 42.0 4.2e1", "42,0 4 042x ٤٢"),
        (5.0, "5 5.0 +5 05 .5e1", "5.1 5..0 5_0 five"),
        (1e3, "1000 1e3 1E+3", "1e4 1"),
        (-0.0, "0 -0 0.0", "-1 -"),
        (0.1, "0.1 .10 1e-1", "0.10000000000000001"),
        (2**63 + 1, "9223372036854775809", "9223372036854775808 9.223372036854775809e17"),
        (5, "", "nan inf sNaN 1e99999999"),
        (True, "true True TRUE", "1 yes"),
        (False, "false", "0"),
        ("5", "5", "5.0"),
    ],
)
def test_a_number_is_right_in_each_way_to_write_it(answer: Any, right: str, wrong: str) -> None:
    for text in right.split() if not isinstance(answer, str) else [right]:
        assert exact(f" {text}\n", answer) == 1.0, text
    for text in wrong.split():
        assert exact(text, answer) == 0.0, text


REFUSED = [
    ("exact", ["5", "five"], "compares with one text or number, not with a list; name a function"),
    ("math", ["5", "five"], "`math` compares with one text or number, not with a list"),
    ("exact", {"a": 1}, "not with a dict"),
    ("exact", math.nan, "no text equals it"),
    ("exact", " ", "an empty answer would be worth 1"),
    ("math", True, "`math` compares numbers"),
]


@pytest.mark.parametrize(("reward", "answer", "message"), REFUSED)
def test_a_reference_that_no_text_can_equal_is_refused_with_its_column(
    reward: str, answer: Any, message: str
) -> None:
    task = DatasetTask(reward=reward, columns={"answer": "solution"})
    with pytest.raises((ValueError, TypeError), match="`solution` = ") as caught:
        task.read_row({"prompt": "p", "solution": answer})
    assert message in str(caught.value)
    assert DataError is not type(caught.value), "the caller adds file and row"


if importlib.util.find_spec("math_verify") is None:
    pytest.skip("math-verify is not installed", allow_module_level=True)


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("6 * 7 = 42\n#### 42", "42"),
        ("#### 41\nNo, wait.\n#### $42.00.", "42.00"),
        ("####\n1,234,567", "1234567"),
        ("#### **42**.", "42"),
        ("#### `1,200`,", "1200"),
        (r"So \boxed{\frac{1}{2}} it is, 3 times", r"\frac{1}{2}"),
        (r"\boxed{12} then \boxed{\text{about } 13}", "13"),
        ("first 3, then 4.5 apples.", "4.5"),
        ("**-17**", "-17"),
        ("7 - 12 = -5", "-5"),
        ("between 10-12", "12"),
        ("half: .5", ".5"),
        ("it costs $1,250.", "1250"),
        ("#### ", None),
        ("ends with 8 ####", "8"),
        ("about 1e3, or 1.5E-2", "0.015"),
        ("1e3", "1000"),
        (r"\boxed{2e3}", "2000"),
        ("nothing here", None),
        (r"\boxed{unclosed", None),
    ],
)
def test_the_final_answer_is_found(completion: str, answer: str | None) -> None:
    assert extract_answer(completion) == answer


# --- any reward function --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reward", "answer", "right", "wrong"),
    [
        ("math", 5.0, "so 5", "so 5.5"),
        ("math", 1e22, "so 1e22", "22"),
        ("math", 3, "3", "1e3"),
        ("math", -0.0, "0", "1"),
        ("math", " 7\n", "7", "8"),
        ("math", "0.5", r"so it is \boxed{\frac{1}{2}}", r"so it is \boxed{\frac{1}{3}}"),
        ("math", "1,200", "That makes $1200.", "That makes $120."),
        ("math", r"$\frac{3}{4}$", r"\boxed{0.75}", r"\boxed{\frac{1}{4}}"),
        ("math", r"Hence \boxed{\sqrt{2}}.", r"\boxed{\sqrt{2}}", r"\boxed{2}"),
        ("math", "x^2", r"\boxed{x^2}", r"\boxed{x^3}"),
        ("math", "Paris", r"\boxed{Paris}", r"\boxed{Pairs}"),
        ("math", r"\text{Paris}", r"\boxed{\text{Paris}}", r"\boxed{\text{Pairs}}"),
        ("math", "even", r"so it is \boxed{\text{even}.}", r"\boxed{\text{odd}}"),
        ("math", r"It is \boxed{(\text{C})}.", r"\boxed{(\text{C})}", r"\boxed{(\text{D})}"),
    ],
)
def test_the_built_in_rewards(reward: str, answer: Any, right: str, wrong: str) -> None:
    task = load_task("dataset", {"reward": reward})
    example = Example(index=0, split="train", prompt="?", answer=answer)
    assert [task.reward(example, text) for text in (right, wrong)] == [1.0, 0.0]
