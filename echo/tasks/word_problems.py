"""Generated one-step word problems, for a pretrained chat model.

    prompt      Ava has 12 shells and finds 9 more. How many shells does Ava have now?
                Answer in one short sentence.
    completion  Ava has 12 + 9 = 21 shells.

A problem asks for one of the four operations on small whole numbers. The text is one of 32 stories
with random names and things. The reward is 1 if the last number of the completion is the answer,
else 0, even if the completion was cut off. The text before the last number does not affect the
reward.

A small pretrained model may choose the wrong operation, miscalculate, or continue after the answer.
Such a model learns to calculate and to stop. The hash of a prompt's text decides whether the prompt
is held out. So held-out problems have the same stories as training problems, but never the same
text.
"""

from __future__ import annotations

import random
import re
from decimal import Decimal

from echo.tasks.task import Example, Task, is_heldout

NAMES = (
    "Ava", "Ben", "Carla", "Dan", "Ella", "Finn", "Grace", "Hugo", "Iris", "Jack", "Kira", "Leo",
    "Mia", "Noah", "Olga", "Paul", "Rosa", "Sam", "Tess", "Will",
)  # fmt: skip

THINGS = (
    "apples", "beads", "books", "buttons", "cards", "coins", "cookies", "eggs", "flowers", "keys",
    "lemons", "marbles", "nuts", "pencils", "plums", "shells", "stamps", "stickers", "stones",
    "tickets",
)  # fmt: skip

PLACES = ("bags", "baskets", "boxes", "drawers", "jars", "piles", "rows", "shelves")

STORIES: dict[str, tuple[str, ...]] = {
    "+": (
        "{name} has {a} {things} and finds {b} more. How many {things} does {name} have now?",
        "{name} has {a} {things} and {other} has {b}. How many {things} do they have together?",
        "{name} buys {a} {things} on Monday and {b} on Tuesday. How many {things} does {name} buy?",
        "There are {a} {things} on the table. {name} puts {b} more there. How many {things} are on "
        "the table now?",
        "{other} gives {b} {things} to {name}, who had {a} before. How many {things} does {name} "
        "have now?",
        "{name} counts {a} red {things} and {b} blue {things}. How many {things} is that in all?",
        "{name} has {a} {things}. {other} has {b} more than {name}. How many {things} does {other} "
        "have?",
        "A box holds {a} {things} and a bag holds {b}. How many {things} are there in total?",
    ),
    "-": (
        "{name} has {a} {things} and loses {b} of them. How many {things} does {name} have left?",
        "{name} has {a} {things} and gives {b} to {other}. How many {things} does {name} keep?",
        "There are {a} {things} in a box. {name} takes out {b}. How many {things} are still in the "
        "box?",
        "{name} has {a} {things} and {other} has {b}. How many more {things} does {name} have than "
        "{other}?",
        "{name} sells {b} of {a} {things}. How many {things} are not sold?",
        "Of {a} {things} on the table, {b} are red. How many {things} are not red?",
        "{name} needs {a} {things} and has {b}. How many {things} does {name} still need?",
        "{name} had some {things}, found {b} more, and now has {a}. How many {things} did {name} "
        "have before?",
    ),
    "*": (
        "There are {a} {places} with {b} {things} in each. How many {things} are there in all?",
        "{name} fills {a} {places} with {b} {things} each. How many {things} does {name} need?",
        "{name} buys {b} {things} every day for {a} days. How many {things} does {name} buy?",
        "Each of {a} friends brings {b} {things}. How many {things} do they bring together?",
        "One of the {things} costs {b} dollars. How many dollars does {name} pay for {a} {things}?",
        "{name} has {b} {things}, and {other} has {a} times as many. How many {things} does "
        "{other} have?",
        "{name} puts {a} {things} on each of {b} plates. How many {things} are on the plates?",
        "A pack holds {b} {things}. How many {things} are in {a} packs?",
    ),
    "/": (
        "{name} shares {a} {things} equally among {b} friends. How many {things} does each friend "
        "get?",
        "{name} puts {a} {things} equally into {b} {places}. How many {things} are in each?",
        "A pack holds {b} {things}. How many packs does {name} need for {a} {things}?",
        "{name} pays {a} dollars for {b} {things}. How many dollars does one of them cost?",
        "{name} uses {b} {things} a day. For how many days do {a} {things} last?",
        "{name} sorts {a} {things} into groups of {b}. How many groups are there?",
        "{name} finds {a} {things} in {b} days, the same number each day. How many {things} does "
        "{name} find each day?",
        "{other} has {a} {things}, {b} times as many as {name}. How many {things} does {name} "
        "have?",
    ),
}
"""The stories by operation; `a` and `b` are the two numbers, in the order of the calculation."""

INSTRUCTION = "Answer in one short sentence."
"""The last sentence of every prompt. It asks for short answers, which a CPU generates fast."""

_NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")

MAX_NUMBER_CHARS = 20
"""Largest number of characters of a parsed number. A longer number is wrong."""


class WordProblemTask(Task):
    """Solve a word problem of one step. The answer is the completion's last number."""

    is_bounded = True

    def example(self, index: int, *, split: str) -> Example:
        """Return problem `index` of a split, drawn with a seed made from `index` and `split`."""
        rng = random.Random(f"{type(self).__name__}:{split}:{index}")
        while True:
            prompt, answer = draw_problem(rng)
            if is_heldout(prompt) == (split == "heldout"):
                return Example(index=index, split=split, prompt=prompt, answer=answer)

    def reward(self, example: Example, completion: str) -> float:
        """Return 1 if the completion's last number is the answer, else 0."""
        return float(last_number(completion) == example.answer)


def draw_problem(rng: random.Random) -> tuple[str, int]:
    """Return a random problem, of any operation, and its answer."""
    operation = rng.choice("+-*/")
    a, b, answer = draw_numbers(operation, rng)
    name, other = rng.sample(NAMES, 2)
    story = rng.choice(STORIES[operation])
    text = story.format(
        a=a, b=b, name=name, other=other, things=rng.choice(THINGS), places=rng.choice(PLACES)
    )
    return f"{text} {INSTRUCTION}", answer


def draw_numbers(operation: str, rng: random.Random) -> tuple[int, int, int]:
    """Return two random numbers and the result of the operation.

    The result is a whole number above 1.
    """
    if operation == "+":
        a, b = rng.randint(2, 20), rng.randint(2, 20)
        return a, b, a + b
    if operation == "-":
        b, answer = rng.randint(2, 20), rng.randint(2, 20)
        return b + answer, b, answer
    a, b = rng.randint(2, 9), rng.randint(2, 9)
    return (a, b, a * b) if operation == "*" else (a * b, b, a)


def last_number(text: str) -> Decimal | None:
    """Return the last number in a text, or None.

    The number may have commas between its thousands.
    """
    found = _NUMBER.findall(text)
    if not found or len(found[-1]) > MAX_NUMBER_CHARS:
        return None
    return Decimal(found[-1].replace(",", ""))
