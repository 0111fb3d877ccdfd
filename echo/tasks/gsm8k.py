r"""Grade-school mathematics (GSM8K) from any dataset file, judged by math-verify.

Rows have `question` and `answer`, as published: the answer ends in `#### 72`. The prompt asks for
the same ending. A completion's answer is what follows its last `####`; failing that its last
`\boxed{...}`; failing that its last number. It is right if math-verify finds it equal to
the reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from echo.tasks.math_answer import (
    MARKER,
    extract_answer,
    is_equal,
    is_plain_number,
    normalise,
    require_math_verify,
)
from echo.tasks.rows import RowsTask
from echo.tasks.task import Example

INSTRUCTION = (
    "Think step by step. End with a line that holds only #### and the answer as a number, "
    "such as: #### 42"
)


class Gsm8kTask(RowsTask):
    """Solve word problems whose answer is a number.

    Args:
        path: training rows with `question` and `answer`.
        heldout_path: held-out rows; without it, one row in ten of `path`.
        skip_bad: leave malformed rows out and say how many there were, and which was the first.
    """

    def __init__(self, *, path: str = "", heldout_path: str = "", skip_bad: bool = False) -> None:
        super().__init__(path=path, heldout_path=heldout_path, skip_bad=skip_bad)
        require_math_verify("task.kind = gsm8k")

    def read_row(self, row: Mapping[str, Any]) -> Example:
        """Take the question with the instruction, and the number after the answer's marker."""
        question, answer = row.get("question"), row.get("answer")
        if not isinstance(question, str) or not isinstance(answer, str):
            raise TypeError(
                f"needs the texts `question` and `answer`; it has {', '.join(row) or 'no columns'}"
            )
        if not question.strip():
            raise ValueError("`question` is empty")
        reference = normalise(answer.rpartition(MARKER)[2])
        if MARKER not in answer or not is_plain_number(reference):
            raise ValueError(f"`answer` must end in '{MARKER} <number>', not {answer[-40:]!r}")
        prompt = f"{question.strip()}\n{INSTRUCTION}"
        return Example(index=0, split="train", prompt=prompt, answer=reference)

    def reward(self, example: Example, completion: str) -> float:
        """Return 1 if the completion's answer equals the reference, else 0."""
        answer = extract_answer(completion)
        return float(answer is not None and is_equal(example.answer, answer))
