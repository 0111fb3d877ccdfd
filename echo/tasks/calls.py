"""Calls of a task's code: the same few messages to a thread or to a process.

    Score(example, completion)   -> float                  a whole answer
    Begin(episode, example)      -> None                   an episode of several turns
    Reply(episode, text)         -> messages, or None      what the environment says to a turn
    Outcome(episode)             -> float                  what the episode was worth
    End(episode)                 -> None                   it is forgotten

Every call is answered by an Answer: a value, or a fault.
"""

from __future__ import annotations

import math
import traceback
from pathlib import Path
from typing import Any

import msgspec

from echo.tasks.environment import Environment, Message
from echo.tasks.faults import RewardError
from echo.tasks.task import Example, RetryCall, Task

TRANSIENT_ERRORS = (RetryCall, ConnectionError, TimeoutError)
"""What a task's code raises where the same call may work a moment later."""

MAX_TRACEBACK_LENGTH = 2000
"""Characters of a traceback that are told, the last ones."""


class Score(msgspec.Struct, frozen=True, tag_field="do", tag="score"):
    """Ask what an answer is worth."""

    example: dict[str, Any]
    completion: str

    def __str__(self) -> str:
        return f"reward on {Example(**self.example)}"


class Begin(msgspec.Struct, frozen=True, tag_field="do", tag="begin"):
    """Open an episode."""

    episode: str
    """Chosen by the caller, unique; it begins with what messages call the example."""
    example: dict[str, Any]

    def __str__(self) -> str:
        return f"begin on {Example(**self.example)}"


class Reply(msgspec.Struct, frozen=True, tag_field="do", tag="reply"):
    """Ask what the environment says to a turn."""

    episode: str
    text: str

    def __str__(self) -> str:
        return f"reply on {self.episode.partition('#')[0]}"


class Outcome(msgspec.Struct, frozen=True, tag_field="do", tag="outcome"):
    """Ask what an episode that is over was worth."""

    episode: str

    def __str__(self) -> str:
        return f"outcome on {self.episode.partition('#')[0]}"


class End(msgspec.Struct, frozen=True, tag_field="do", tag="end"):
    """Forget an episode; it may be unknown."""

    episode: str

    def __str__(self) -> str:
        return f"end on {self.episode.partition('#')[0]}"


Call = Score | Begin | Reply | Outcome | End


class Fault(msgspec.Struct, frozen=True):
    """What went wrong, as `RewardError` has it."""

    reason: str
    text: str
    is_transient: bool = False
    """Whether the same call may work a moment later."""
    traceback: str = ""


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a call came to."""

    value: Any = None
    fault: Fault | None = None


class _CallError(RewardError):
    """A call or its result that this module refuses."""


class Performer:
    """Carries out calls on one task, one at a time, and holds the state of its episodes."""

    def __init__(self, task: Task) -> None:
        self._task = task
        self._states: dict[str, Any] = {}

    def answer(self, call: Call) -> Answer:
        """Carry out a call, whatever it does; only what ends a process ends this one."""
        where = f"{type(self._task).__name__}.{call}"
        try:
            return Answer(self._perform(call, where))
        except MemoryError:
            text = f"{where} ran out of memory; raise reward.memory_limit_bytes"
            return Answer(fault=Fault("reward_memory", text))
        except _CallError as error:
            return Answer(fault=Fault(error.reason, str(error)))
        except BaseException as error:  # noqa: BLE001 -- the caller learns of it, whatever it is
            text = f"{where} raised {type(error).__name__}: {error}{_place(error)}"
            is_transient = isinstance(error, TRANSIENT_ERRORS)
            return Answer(fault=Fault("reward_error", text, is_transient, _traceback(error)))

    def _perform(self, call: Call, where: str) -> Any:
        match call:
            case Score():
                example = Example(**call.example)
                return finite(self._task.reward(example, call.completion), where)
            case Begin():
                self._states[call.episode] = self._environment.begin(Example(**call.example))
                return None
            case Reply():
                said = self._environment.reply(self._state(call.episode), call.text)
                return None if said is None else _messages(said, where)
            case Outcome():
                return finite(self._environment.outcome(self._state(call.episode)), where)
            case End():
                state = self._states.pop(call.episode, None)
                if state is not None:
                    self._environment.end(state)
                return None

    @property
    def _environment(self) -> Environment:
        if not isinstance(self._task, Environment):
            raise _CallError(
                f"{type(self._task).__name__} has no episodes: it is not an "
                "echo.tasks.environment.Environment"
            )
        return self._task

    def _state(self, episode: str) -> Any:
        if episode not in self._states:
            raise _CallError(
                f"the episode {episode} is not known here; its process was started anew",
                reason="reward_lost",
            )
        return self._states[episode]


def finite(value: object, where: str) -> float:
    """Return a reward as a float.

    Raises:
        RewardError: if it is anything but a finite number.
    """
    try:
        reward = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        reward = math.nan
    if isinstance(value, str | bytes) or not math.isfinite(reward):
        raise _CallError(f"{where} returned {value!r}; it must return a finite number")
    return reward


def _messages(said: str | Message | list[Message], where: str) -> list[Message]:
    """Return what an environment says as messages; text is one message of the user's."""
    if isinstance(said, str):
        return [{"role": "user", "content": said}]
    messages = [said] if isinstance(said, dict) else said
    for message in messages:
        if not isinstance(message, dict) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            raise _CallError(
                f"{where} returned {message!r}; it must return text, messages with the texts "
                "`role` and `content`, or None when the episode is over"
            )
    return messages


def _traceback(error: BaseException) -> str:
    """Return the traceback of a task's code, without the frames of this module that called it."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    lines = traceback.format_exception(type(error), error, frames)
    return "".join(lines).rstrip()[-MAX_TRACEBACK_LENGTH:]


def _place(error: BaseException) -> str:
    """Return the file and line where a task's code raised an error, where that is known."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<")
    ]
    if not frames:
        return ""
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})"
