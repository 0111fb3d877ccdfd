"""What a task is: where prompts come from and what an answer is worth.

A task is the one small class that a user writes; everything else in the data plane follows from
it. The learner calls `example` and sends the `Example` inside a lease; a worker calls `reward`
with that example and needs no dataset. So an example must survive JSON, and `reward` must depend
on nothing but the example and the completion.

    class Reverse(Task):
        def example(self, index: int, *, split: str) -> Example:
            word = random.Random(f"{split}:{index}").choice(WORDS)
            return Example(index=index, split=split, prompt=f"Reverse {word}", answer=word[::-1])

        def reward(self, example: Example, completion: str) -> float:
            return float(completion.strip() == example.answer)
"""

from __future__ import annotations

import abc
import random
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SPLITS = ("train", "heldout")

HELDOUT_ONE_IN = 10
"""One text in this many is held out where a task splits by hash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One prompt with what is needed to score an answer; every field is JSON."""

    index: int
    """Which example of its split this is, from 0."""
    split: str
    """"train" or "heldout"."""
    prompt: str | list[dict[str, Any]]
    """Plain text, or chat messages with `role` and `content`."""
    answer: Any = None
    """The reference, in whatever form the task's `reward` expects."""
    info: dict[str, Any] = field(default_factory=dict)
    """Whatever else `reward` needs."""
    columns: dict[str, Any] = field(default_factory=dict)
    """The other columns of its row, where it comes from a dataset."""
    task: str = ""
    """The name of its task, where several are mixed."""
    source: str = ""
    """Where it came from, for messages: "train.jsonl:12", or empty."""

    def __post_init__(self) -> None:
        if self.index < 0 or self.split not in SPLITS:
            raise ValueError(
                f"example {self.index} of split {self.split!r}: the index must be at least 0 "
                f"and the split one of {', '.join(SPLITS)}"
            )

    def __str__(self) -> str:
        return self.source or f"{self.split} example {self.index}"


class RetryCall(Exception):  # noqa: N818 -- a request of the task's, not an error of ours
    """Raise this from a task where the same call may work a moment later.

    Such as a judge model that is being started. It is called again, twice;
    ConnectionError and TimeoutError have the same effect.
    """


class Task(abc.ABC):
    """A source of prompts and the judge of their answers.

    Subclasses take their settings as keyword arguments, from [task.options]. The constructor
    must not read datasets: a worker builds the same task and has none.
    """

    is_bounded = False
    """Whether `reward` returns soon whatever it is given, so that it needs no process of its own
    that could be killed."""
    has_turns = False
    """Whether an answer may take several turns (environment.py)."""

    def prepare(self) -> None:  # noqa: B027, most have nothing to prepare
        """Do what takes long and comes before the first call; once in each process that calls."""

    @abc.abstractmethod
    def example(self, index: int, *, split: str) -> Example:
        """Return example `index` of a split: the same one on every call.

        Args:
            index: at least 0 and unbounded; a finite dataset wraps around.
            split: "train" or "heldout"; no prompt is in both.
        """

    @abc.abstractmethod
    def reward(self, example: Example, completion: str) -> float:
        """Return what `completion` is worth as an answer to `example`: a finite number."""

    def num_examples(self, *, split: str) -> int | None:
        """Return how many examples a split has; None if they are made without end."""
        return None

    def dataset_files(self) -> list[Path]:
        """Return the files that examples are read from; their hash identifies the dataset."""
        return []

    def data_problems(self) -> list[str]:
        """Return what is wrong with the datasets as far as a glance at them shows."""
        return []

    def parts(self) -> list[Task]:
        """Return the tasks that this one is made of."""
        return []

    def source_files(self) -> list[Path]:
        """Return files with code that `reward` calls, besides those that define its class."""
        return []


class GeneratedTask(Task):
    """A task that draws its prompts at random and can demonstrate how to answer them.

    Prompts are split by the hash of their text, so a prompt drawn twice is always on the same
    side. Demonstrations, for the supervised warm-up, come from the training side only.
    """

    max_completion_tokens: int
    """Characters of the longest demonstration, and one for the end."""

    @abc.abstractmethod
    def draw(self, rng: random.Random) -> tuple[str, str]:
        """Draw a prompt of either split and a demonstration of how to answer it."""

    @abc.abstractmethod
    def answer(self, prompt: str) -> Any:
        """Return what `reward` needs to know to judge an answer to `prompt`."""

    def example(self, index: int, *, split: str) -> Example:
        """Draw example `index` of a split from a generator seeded with both."""
        # A string seed is hashed with SHA-512: the same on every machine and Python.
        prompt, _ = self._draw_from(random.Random(f"{type(self).__name__}:{split}:{index}"), split)
        return Example(index=index, split=split, prompt=prompt, answer=self.answer(prompt))

    def demonstration(self, rng: random.Random) -> tuple[str, str]:
        """Draw a training prompt and a completion to imitate; it need not be right."""
        return self._draw_from(rng, "train")

    def _draw_from(self, rng: random.Random, split: str) -> tuple[str, str]:
        while True:
            prompt, demonstration = self.draw(rng)
            if is_heldout(prompt) == (split == "heldout"):
                return prompt, demonstration


def is_heldout(text: str) -> bool:
    """Return whether `text` belongs to the held-out side of a split by hash."""
    return zlib.crc32(text.encode()) % HELDOUT_ONE_IN == 0
