"""What goes wrong in a task's own code: always counted, never a reward of 0."""

from __future__ import annotations

from echo.errors import EchoError


class RewardError(EchoError):
    """A task's code raised, returned nonsense, took too long, or its process died.

    `reason` is one word for counters and for the group's end in the ledger:

        reward_error     it raised, or returned anything but a finite number
        reward_too_large it returned a number beyond task.max_reward
        reward_timeout   it did not return in time; its process was killed
        reward_memory    it wanted more memory than it may have
        reward_lost      its process is gone
        reward_retries   it asked to be called again, once too often
    """

    def __init__(self, text: str, *, reason: str = "reward_error", traceback: str = "") -> None:
        super().__init__(text)
        self.reason = reason
        self.traceback = traceback
        """Of the task's code, as Python prints it; empty where it raised nothing."""
