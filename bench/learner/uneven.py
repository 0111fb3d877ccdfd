"""A task whose prompts and completions have ever-new lengths, and whose groups always differ."""

from __future__ import annotations

from echo.tasks.task import Example, Task

WORDS = ("river", "seven", "window", "blue", "carry", "stone", "minute", "garden")


class UnevenTask(Task):
    """Count some words; half of all answers are right, whatever the model knows."""

    def example(self, index: int, *, split: str) -> Example:
        """Return a prompt with 4 to 43 of them; a short answer is asked for, or all are cut off."""
        words = [WORDS[(index + place) % len(WORDS)] for place in range(4 + 7 * index % 40)]
        return Example(
            index=index,
            split=split,
            prompt=f"{split} {index}: how many words are these: {' '.join(words)}? "
            "Answer in one short sentence.",
            answer="",
        )

    def reward(self, example: Example, completion: str) -> float:
        """Return 1 for an answer with an even number of characters."""
        return float(len(completion) % 2 == 0)
