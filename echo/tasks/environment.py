"""A task whose answers take several turns: the policy says something, the environment replies.

    class Guess(Environment):
        def example(self, index: int, *, split: str) -> Example:
            secret = random.Random(f"{split}:{index}").randrange(100)
            return Example(index=index, split=split, prompt="Guess my number.", answer=secret)

        def begin(self, example: Example) -> dict[str, Any]:
            return {"secret": example.answer, "is_found": False}

        def reply(self, state: dict[str, Any], text: str) -> str | None:
            guess = int(text) if text.strip().isdigit() else -1
            state["is_found"] = guess == state["secret"]
            if state["is_found"]:
                return None
            return "higher" if guess < state["secret"] else "lower"

        def outcome(self, state: dict[str, Any]) -> float:
            return float(state["is_found"])

What the environment says becomes tokens of the rollout that are never trained on; what the policy
said stays the tokens that were sampled, never decoded and encoded again. An episode ends when
`reply` returns None, or for want of turns or tokens; `outcome` is asked in either case.
"""

from __future__ import annotations

import abc
from typing import Any

from echo.tasks.task import Example, Task

Message = dict[str, Any]
"""A chat message: the texts `role` and `content`, and whatever else the chat template reads."""


class Environment(Task):
    """A task of several turns."""

    has_turns = True
    max_turns: int | None = None
    """Turns of the policy in one episode; None leaves it to task.max_turns."""

    @abc.abstractmethod
    def begin(self, example: Example) -> Any:
        """Return the state of a new episode, any object; the other methods get it."""

    @abc.abstractmethod
    def reply(self, state: Any, text: str) -> str | Message | list[Message] | None:
        """Return what the environment says to the policy's turn; None when the episode is over.

        Text is one message of the user's. For the last turn that there was room for this is asked,
        too, and what it returns is dropped.
        """

    @abc.abstractmethod
    def outcome(self, state: Any) -> float:
        """Return what the episode was worth, a finite number, whatever ended it."""

    def end(self, state: Any) -> None:
        """Let go of what the episode holds."""

    def tools(self, example: Example) -> list[dict[str, Any]]:
        """Return the tools that the chat template tells the policy of, as JSON schemas."""
        return []

    def reward(self, example: Example, completion: str) -> float:
        """Return what an episode of one turn is worth."""
        state = self.begin(example)
        try:
            self.reply(state, completion)
            return self.outcome(state)
        finally:
            self.end(state)
