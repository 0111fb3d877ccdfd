r"""Grade-school mathematics (GSM8K) from JSONL, judged by math-verify.

Rows have `question` and `answer`, as published: the answer ends in `#### 72`. The prompt asks for
the same ending. A completion's answer is what follows its last `####`; failing that its last
`\boxed{...}`; failing that its last number. It is right if math-verify finds it equal to
the reference.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Mapping
from typing import Any

from echo.errors import ConfigError
from echo.tasks.jsonl import JsonlTask
from echo.tasks.task import Example

INSTRUCTION = (
    "Think step by step. End with a line that holds only #### and the answer as a number, "
    "such as: #### 42"
)

MARKER = "####"

MAX_ANSWER_CHARS = 64

_NUMBER = re.compile(r"(?:(?<!\d)[-+])?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
_PLAIN = re.compile(r"[-+]?\d+(?:\.\d*)?|[-+]?\.\d+")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_UNITS = re.compile(r"\\(?:text|mathrm|mbox)\{[^{}]*\}|\\[$%!,; ]|[$%€£]")


class Gsm8kTask(JsonlTask):
    """Solve word problems whose answer is a number.

    Args:
        path: training rows, JSONL with `question` and `answer`.
        heldout_path: held-out rows; without it, one row in ten of `path`.
    """

    def __init__(self, *, path: str = "", heldout_path: str = "") -> None:
        super().__init__(path=path, heldout_path=heldout_path)
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError(
                "task.kind = gsm8k needs the package math-verify; pip install 'echo-rl[worker]'"
            )
        # It warns that its time limits are off; they are, because `score` sets one (see is_equal).
        logging.getLogger("math_verify").setLevel(logging.ERROR)

    def read_row(self, row: Mapping[str, Any]) -> Example:
        """Take the question with the instruction, and the number after the answer's marker."""
        question, answer = row.get("question"), row.get("answer")
        if not isinstance(question, str) or not isinstance(answer, str):
            raise TypeError(
                f"needs the texts `question` and `answer`; it has {', '.join(row) or 'no columns'}"
            )
        reference = normalise(answer.rpartition(MARKER)[2])
        if MARKER not in answer or not _PLAIN.fullmatch(reference):
            raise ValueError(f"`answer` must end in '{MARKER} <number>', not {answer[-40:]!r}")
        prompt = f"{question.strip()}\n{INSTRUCTION}"
        return Example(index=0, split="train", prompt=prompt, answer=reference)

    def reward(self, example: Example, completion: str) -> float:
        """Return 1 if the completion's answer equals the reference, else 0."""
        answer = extract_answer(completion)
        return float(answer is not None and is_equal(example.answer, answer))


def extract_answer(completion: str) -> str | None:
    """Return the final answer of a completion, normalised; None if there is none."""
    head, marker, tail = completion.rpartition(MARKER)
    if marker and (line := tail.strip().partition("\n")[0]):
        return normalise(line)
    boxed = _last_boxed(completion)
    if boxed is not None:
        return normalise(boxed)
    numbers = _NUMBER.findall(head if marker else completion)
    return normalise(numbers[-1]) if numbers else None


def normalise(answer: str) -> str:
    """Remove what is not the value: currency, percent, units in text, thousands, full stops."""
    answer = _THOUSANDS.sub("", _UNITS.sub("", answer))
    return answer.strip().strip("*_`").rstrip(".,;").strip()


def is_equal(reference: str, answer: str) -> bool:
    """Return whether math-verify finds two answers equal.

    Powers and factorials are refused unread: no answer here needs them, and `9**9**9**9` would
    keep the computer algebra busy for ever.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    if not answer or len(answer) > MAX_ANSWER_CHARS or re.search(r"\^|\*\*|!", answer):
        return False
    # The library's own time limits use SIGALRM, which only a main thread may; `score` has one.
    target = parse(reference, [ExprExtractionConfig()], parsing_timeout=None)
    if _PLAIN.fullmatch(answer):
        value = parse(answer, [ExprExtractionConfig()], parsing_timeout=None)
    else:
        value = parse(f"${answer}$", [LatexExtractionConfig()], parsing_timeout=None)
    return bool(verify(target, value, timeout_seconds=None))


def _last_boxed(completion: str) -> str | None:
    r"""Return what stands inside the last complete \boxed{...}."""
    start = completion.rfind(r"\boxed{")
    if start < 0:
        return None
    begin = start + len(r"\boxed{")
    depth = 1
    for position in range(begin, len(completion)):
        depth += {"{": 1, "}": -1}.get(completion[position], 0)
        if depth == 0:
            return completion[begin:position]
    return None
