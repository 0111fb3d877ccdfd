"""A task whose prompts and completions have ever-new lengths, and whose groups always differ."""

from __future__ import annotations

from echo.tasks.task import Example, Task

WORDS = ("river", "seven", "window", "blue", "carry", "stone", "minute", "garden")


class UnevenTask(Task):
    """Say something about some words; half of all answers are right, whatever the model knows."""

    def example(self, index: int, *, split: str) -> Example:
        """Return a prompt of 4 to 43 words."""
        words = [WORDS[(index + place) % len(WORDS)] for place in range(4 + 7 * index % 40)]
        return Example(
            index=index,
            split=split,
            prompt=f"{split} {index}: say something about {' '.join(words)}.",
            answer="",
        )

    def reward(self, example: Example, completion: str) -> float:
        """Return 1 for an answer with an even number of characters."""
        return float(len(completion) % 2 == 0)
