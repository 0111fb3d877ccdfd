from __future__ import annotations

import pytest

from echo.tasks.dataset import extract_answer, is_equal, is_plain_number

pytest.importorskip("math_verify")


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("6 * 7 = 42\n#### 42", "42"),
        ("#### 41\nNo, wait.\n#### $42.00.", "42.00"),
        ("####\n1,234,567", "1234567"),
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
        ("nothing here", None),
        (r"\boxed{unclosed", None),
    ],
)
def test_the_final_answer_is_found(completion: str, answer: str | None) -> None:
    assert extract_answer(completion) == answer


def test_equality_is_of_values() -> None:
    assert is_equal("3", "3.000")
    assert not is_equal("3", "3.001")
    assert not is_equal("3", "")


@pytest.mark.parametrize(("text", "expected"), [("-3.50", True), ("3e2", False), ("x", False)])
def test_plain_numbers_are_told_from_expressions(text: str, expected: bool) -> None:
    assert is_plain_number(text) is expected
