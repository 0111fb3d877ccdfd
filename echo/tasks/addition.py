"""Three-digit addition with a column scratchpad: the task of the quickstart.

    prompt      478+365=
    completion  8+5=137+6=144+3=08>0843

Each column is `a+b=tt`, units first, where `tt` counts the carry from the column before; then `>`
and the sum in four digits. Only the text after the one `>` is judged: reward 1 if it is the
true sum, else 0. Nothing rewards the scratchpad.

The demonstrations come from a class in which most pupils forget every carry, in the columns and
in the sum alike. About 47 % of them are right (the pupils who carry, and sums in which forgetting
is harmless), so imitation cannot do better than that, and the most likely answer of an imitator is
the forgetful one. That carrying pays has to be discovered from the rewards.
"""

from __future__ import annotations

import random

from echo.tasks.task import Example, GeneratedTask

NUM_DIGITS = 3

FORGETFUL_SHARE = 0.75
"""Share of the demonstrations that forget every carry."""


class AdditionTask(GeneratedTask):
    """Add two numbers of three digits; the answer follows `>`, padded to four digits."""

    is_bounded = True
    max_completion_tokens = 24

    def draw(self, rng: random.Random) -> tuple[str, str]:
        """Draw two numbers and how one pupil adds them."""
        left, right = (f"{rng.randrange(10**NUM_DIGITS):0{NUM_DIGITS}d}" for _ in range(2))
        is_forgetful = rng.random() < FORGETFUL_SHARE
        return f"{left}+{right}=", add_in_columns(left, right, is_forgetful=is_forgetful)

    def answer(self, prompt: str) -> str:
        """Return the sum, padded with zeros."""
        left, right = prompt.removesuffix("=").split("+")
        return f"{int(left) + int(right):0{NUM_DIGITS + 1}d}"

    def reward(self, example: Example, completion: str) -> float:
        """Return 1 if the text after the only `>` is the sum, else 0."""
        return float(completion.count(">") == 1 and completion.split(">")[1] == example.answer)


def add_in_columns(left: str, right: str, *, is_forgetful: bool) -> str:
    """Write the scratchpad and the sum of two numbers of equal length, as a pupil would."""
    carry = 0
    columns = []
    digits = ""
    for a, b in zip(reversed(left), reversed(right), strict=True):
        total = int(a) + int(b) + (0 if is_forgetful else carry)
        carry = total // 10
        columns.append(f"{a}+{b}={total:02d}")
        digits = f"{total % 10}{digits}"
    return f"{''.join(columns)}>{carry}{digits}"
