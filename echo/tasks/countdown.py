"""Countdown with three digits: reach a target with + - * and parentheses, each digit used once.

    prompt      228>20=
    completion  2*(2+8)

Reward 1 if the completion is an expression over exactly the given digits, each a number of its
own, that evaluates to the target; else 0. The expression is walked as a syntax tree, never
executed. The demonstrations are all right; prompts are split by text, but there are only about
165 sets of digits, so held-out prompts share them with training.
"""

from __future__ import annotations

import ast
import operator
import random
from collections.abc import Callable

from echo.tasks.task import Example, GeneratedTask

NUM_DIGITS = 3

MAX_TARGET = 99

MAX_EXPRESSION_CHARS = 64
"""Longer completions are wrong unread: the parser's recursion is bounded by this."""

OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}


class CountdownTask(GeneratedTask):
    """Combine three digits into a target between 0 and 99."""

    is_bounded = True
    max_completion_tokens = 12

    def draw(self, rng: random.Random) -> tuple[str, str]:
        """Draw digits and a random expression over them whose value is a valid target."""
        while True:
            digits = [rng.choice("123456789") for _ in range(NUM_DIGITS)]
            expression = random_expression(digits, rng)
            target, _ = evaluate(expression)
            if 0 <= target <= MAX_TARGET and len(expression) < self.max_completion_tokens:
                return f"{''.join(sorted(digits))}>{target:02d}=", expression

    def answer(self, prompt: str) -> dict[str, object]:
        """Return the digits, sorted, and the target."""
        digits, target = prompt.removesuffix("=").split(">")
        return {"digits": [int(digit) for digit in digits], "target": int(target)}

    def reward(self, example: Example, completion: str) -> float:
        """Return 1 if the expression uses each digit once and reaches the target, else 0."""
        try:
            value, numbers = evaluate(completion)
        except ValueError:
            return 0.0
        answer = example.answer
        return float(value == answer["target"] and sorted(numbers) == answer["digits"])


def random_expression(digits: list[str], rng: random.Random) -> str:
    """Combine digits, in this order, by random operators with the parentheses they need."""
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
    """Return the value of an expression of whole numbers and the numbers in it.

    Raises:
        ValueError: if it is anything but numbers, + - * and parentheses.
    """
    if len(expression) > MAX_EXPRESSION_CHARS or not set(expression) <= set("0123456789+-*()"):
        raise ValueError(f"not an expression over digits, + - * and (): {expression[:80]!r}")
    try:
        tree = ast.parse(expression, mode="eval")
    except SyntaxError as error:
        raise ValueError(f"not a complete expression: {expression!r}") from error
    numbers: list[int] = []
    return _walk(tree.body, numbers), numbers


def _walk(node: ast.expr, numbers: list[int]) -> int:
    if isinstance(node, ast.BinOp) and (combine := OPERATORS.get(type(node.op))) is not None:
        return combine(_walk(node.left, numbers), _walk(node.right, numbers))
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        numbers.append(node.value)
        return node.value
    raise ValueError(f"{type(node).__name__} is not allowed in an expression")


def _parenthesise_sum(expression: str) -> str:
    return f"({expression})" if "+" in expression or "-" in expression else expression
