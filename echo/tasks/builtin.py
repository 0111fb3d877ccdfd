"""Built-in tasks: addition, countdown, GSM8K.

**Addition** of three digits with a column scratchpad is the task of the quickstart.

    prompt      478+365=
    completion  8+5=137+6=144+3=08>0843

Each column is `a+b=tt`, where `tt` includes the carry from the column before. The units come first.
After the columns come `>` and the sum in four digits. The reward is 1 if there is a single `>` and
the text after it is the sum, else 0. The scratchpad does not affect the reward.

Most demonstrations forget every carry, both in the columns and in the sum. About 47 % of the
demonstrations are right, because some sums have no carry and some demonstrations include the
carries. A policy that only imitates the demonstrations is right in at most about 47 % of its
completions. Its most likely completion omits the carries. Only the rewards can teach the policy to
carry.

**Countdown** with three digits: reach a target with + - * and parentheses, using each digit once.

    prompt      228>20=
    completion  2*(2+8)

The completion must be an expression that uses each given digit once and evaluates to the target.
The reward is then 1, else 0. The expression must not join digits into longer numbers. It is
evaluated as a syntax tree and never executed. All demonstrations are right. The text of a prompt
decides whether the prompt is held out. There are only about 165 sets of digits, so held-out prompts
have the same sets as training prompts.

**GSM8K**, grade-school mathematics, is read from any dataset file and judged by math-verify. As
published, a row has a `question` and an `answer`, which ends in a number such as `#### 72`. The
prompt asks for the same ending. Completions are judged as by the reward `math` (answers.py).
"""

from __future__ import annotations

import ast
import operator
import random
from collections.abc import Callable, Mapping
from typing import Any

from echo.tasks.answers import (
    MARKER,
    extract_answer,
    is_equal,
    is_plain_number,
    normalise,
    require_math_verify,
)
from echo.tasks.dataset import RowsTask
from echo.tasks.syntax import parse
from echo.tasks.task import Example, GeneratedTask

# --- addition -------------------------------------------------------------------------------------


NUM_ADDITION_DIGITS = 3
"""Number of digits of each number, with leading zeros."""

FORGETFUL_SHARE = 0.75
"""Share of the demonstrations in which every carry is forgotten."""


class AdditionTask(GeneratedTask):
    """Add two numbers of three digits. The answer has four digits after `>`."""

    is_bounded = True
    max_completion_tokens = 24

    def draw(self, rng: random.Random) -> tuple[str, str]:
        """Return a prompt with two random numbers, and a demonstration.

        In FORGETFUL_SHARE of the demonstrations every carry is forgotten.
        """
        left, right = (
            f"{rng.randrange(10**NUM_ADDITION_DIGITS):0{NUM_ADDITION_DIGITS}d}" for _ in range(2)
        )
        is_forgetful = rng.random() < FORGETFUL_SHARE
        return f"{left}+{right}=", add_in_columns(left, right, is_forgetful=is_forgetful)

    def answer(self, prompt: str) -> str:
        """Return the sum that a prompt asks for, in four digits."""
        left, right = prompt.removesuffix("=").split("+")
        return f"{int(left) + int(right):0{NUM_ADDITION_DIGITS + 1}d}"

    def right_completion(self, example: Example) -> str:
        """Return the scratchpad and the sum for an example, with every carry."""
        left, right = str(example.prompt).removesuffix("=").split("+")
        return add_in_columns(left, right, is_forgetful=False)

    def reward(self, example: Example, completion: str) -> float:
        """Return 1 if the text after the only `>` is the right sum, else 0."""
        return float(completion.count(">") == 1 and completion.split(">")[1] == example.answer)


def add_in_columns(left: str, right: str, *, is_forgetful: bool) -> str:
    """Return the scratchpad and the sum of two numbers of equal length.

    If `is_forgetful`, every carry is forgotten.
    """
    carry = 0
    columns = []
    digits = ""
    for a, b in zip(reversed(left), reversed(right), strict=True):
        total = int(a) + int(b) + (0 if is_forgetful else carry)
        carry = total // 10
        columns.append(f"{a}+{b}={total:02d}")
        digits = f"{total % 10}{digits}"
    return f"{''.join(columns)}>{carry}{digits}"


# --- countdown ------------------------------------------------------------------------------------


NUM_COUNTDOWN_DIGITS = 3
"""Number of digits of a prompt that the expression combines."""

MAX_TARGET = 99
"""Largest target. A prompt has two digits for the target."""

MAX_EXPRESSION_CHARS = 64
"""Number of characters of the longest completion that is parsed. A longer completion is wrong. The
limit bounds the parser's recursion.
"""

OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


class CountdownTask(GeneratedTask):
    """Combine three digits into an expression with a given value between 0 and 99."""

    is_bounded = True
    max_completion_tokens = 12

    def draw(self, rng: random.Random) -> tuple[str, str]:
        """Return a prompt with digits and a target, and an expression for the target."""
        while True:
            digits = [rng.choice("123456789") for _ in range(NUM_COUNTDOWN_DIGITS)]
            expression = random_expression(digits, rng)
            target, _ = evaluate(expression)
            if 0 <= target <= MAX_TARGET and len(expression) < self.max_completion_tokens:
                return f"{''.join(sorted(digits))}>{target:02d}=", expression

    def answer(self, prompt: str) -> dict[str, object]:
        """Return the sorted digits and the target of a prompt."""
        digits, target = prompt.removesuffix("=").split(">")
        return {"digits": [int(digit) for digit in digits], "target": int(target)}

    def right_completion(self, example: Example) -> str:
        """Return an expression for the example's target. A random search finds the expression."""
        rng, digits = random.Random(str(example.prompt)), list(map(str, example.answer["digits"]))
        while True:  # there are only some thousand expressions
            rng.shuffle(digits)
            expression = random_expression(digits, rng)
            if self.reward(example, expression):
                return expression

    def reward(self, example: Example, completion: str) -> float:
        """Return 1 if each digit is used once and the target is reached, else 0."""
        try:
            value, numbers = evaluate(completion)
        except ValueError:
            return 0.0
        answer = example.answer
        return float(value == answer["target"] and sorted(numbers) == answer["digits"])


def random_expression(digits: list[str], rng: random.Random) -> str:
    """Return an expression of the digits, in this order, with random operators.

    Parentheses are added only where the order of the operations needs them.
    """
    if len(digits) == 1:
        return digits[0]
    cut = rng.randrange(1, len(digits))
    left, right = random_expression(digits[:cut], rng), random_expression(digits[cut:], rng)
    symbol = rng.choice("+-*")
    if symbol == "*":
        left = _parenthesise_sum(left)
    if symbol in "*-":
        right = _parenthesise_sum(right)
    return f"{left}{symbol}{right}"


def evaluate(expression: str) -> tuple[int, list[int]]:
    """Return an expression's value, and the whole numbers that the expression contains.

    Raises:
        ValueError: if the text is not an expression of whole numbers, + - * and parentheses, or is
            longer than MAX_EXPRESSION_CHARS.
    """
    if len(expression) > MAX_EXPRESSION_CHARS or not set(expression) <= set("0123456789+-*()"):
        raise ValueError(f"not an expression over digits, + - * and (): {expression[:80]!r}")
    try:
        tree = parse(expression, mode="eval")
    except SyntaxError as error:
        raise ValueError(f"not a complete expression: {expression!r}") from error
    numbers: list[int] = []
    return _walk(tree, numbers), numbers


def _walk(node: ast.AST, numbers: list[int]) -> int:
    if isinstance(node, ast.Expression):
        return _walk(node.body, numbers)
    if isinstance(node, ast.BinOp) and (combine := OPERATORS.get(type(node.op))) is not None:
        return combine(_walk(node.left, numbers), _walk(node.right, numbers))
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        numbers.append(node.value)
        return node.value
    raise ValueError(f"{type(node).__name__} is not allowed in an expression")


def _parenthesise_sum(expression: str) -> str:
    return f"({expression})" if "+" in expression or "-" in expression else expression


# --- GSM8K ----------------------------------------------------------------------------------------


INSTRUCTION = (
    "Think step by step. End with a line that holds only #### and the answer as a number, "
    "such as: #### 42"
)


class Gsm8kTask(RowsTask):
    """Solve word problems of a dataset. The answers are numbers."""

    def __init__(self, *, path: str = "", heldout_path: str = "", skip_bad: bool = False) -> None:
        super().__init__(path=path, heldout_path=heldout_path, skip_bad=skip_bad)
        require_math_verify("task.kind = gsm8k")

    def read_row(self, row: Mapping[str, Any]) -> Example:
        """Return an example. Its prompt is the row's question with an instruction.

        The answer of the example is the number after `####` in the row.
        """
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
        """Return 1 if the answer in the completion is equal to the reference, else 0."""
        answer = extract_answer(completion)
        return float(answer is not None and is_equal(example.answer, answer))
