"""Task calls as messages, and the process that executes the calls.

    example(index, split)    -> Example                called in the learner's process only
    reward(example, texts)   -> list of float or None  the rewards of one answer, or of all answers
                                                       of a group; None: an answer gets no reward
    begin(episode, example)  -> None                   begins an episode of several turns
    reply(episode, text)     -> messages, or None      the environment's reply to a turn
    outcome(episode)         -> float or None          the reward of the episode
    end(episode)             -> None                   releases the episode, which may be unknown

Every call gets a CallAnswer: a value, or a fault. The process imports the task, but not rewards.py,
which starts and kills processes. The two sides exchange msgpack messages over a socket pair. The
length of each message is sent before the message. Only one call is under way at a time. Neither
side executes the data that it receives.
"""

from __future__ import annotations

import contextlib
import inspect
import math
import os
import re
import reprlib
import resource
import signal
import socket
import struct
import threading
import time
import traceback
from collections.abc import Awaitable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from echo.core.bounds import MAX_TRACEBACK_LENGTH
from echo.core.errors import EchoError
from echo.core.reward_parts import find_name_fault
from echo.core.units import counted
from echo.tasks.environment import Environment
from echo.tasks.messages import Message, fault_of_message
from echo.tasks.processes.guard import fork_guarded
from echo.tasks.task import Example, RetryCall, Task, check_unchanged, load_task

if TYPE_CHECKING:
    import asyncio

TRANSIENT_ERRORS = (RetryCall, ConnectionError, TimeoutError)
"""Errors of a task's code after which a second call may succeed."""

_LOOP_ADVICE = (
    "; make the function `async` and await in it: all calls then share one event loop, for which a "
    "client is made once, in the first call"
)

MAX_MESSAGE_BYTES = 64 << 20
"""Largest size of a message in bytes. Without a bound, a task's code could make the node read a
message of 4 GiB.
"""

_LENGTH = struct.Struct("<I")


# --- messages ------------------------------------------------------------------------------------


class TaskCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """A call of one of the task's methods, with the arguments of the call."""

    method: Literal["example", "reward", "begin", "reply", "outcome", "end"]
    label: str = ""
    """The name of the example in messages; empty if there is no example yet."""
    index: int = 0
    split: str = ""
    example: dict[str, Any] = {}
    text: str = ""
    """The turn of the policy, for `reply`."""
    texts: tuple[str, ...] = ()
    """The answers, for `reward`."""
    episode: str = ""
    """The id of the episode. The caller chooses a new id for each episode."""

    def __str__(self) -> str:
        if self.method == "example":
            return f"example({self.index}, split={self.split!r})"
        return f"{self.method} on {self.label}"

    @property
    def needs_episode(self) -> bool:
        """Whether the call concerns an episode that an earlier call has begun."""
        return self.method in ("reply", "outcome", "end")


class CallFault(msgspec.Struct, frozen=True):
    """The failure of a call, with the fields of `rewards.RewardError`."""

    reason: str
    text: str
    is_transient: bool = False
    """Whether the call may succeed if it is repeated."""
    traceback: str = ""


class CallAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The result of a call: its value or its fault."""

    value: Any = None
    fault: CallFault | None = None


class TaskSpec(msgspec.Struct, frozen=True):
    """The settings from which a process builds its task."""

    kind: str
    options: dict[str, Any]
    memory_bytes: int | None = None
    code: dict[str, dict[str, Any]] = {}
    """The hashes of the task's code, as `task.code_of` returned at the start of the node."""


class Pipe:
    """Sends and receives messages over this process's side of a socket pair."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def send(self, message: Any, *, within_s: float | None = None) -> None:
        """Send a whole message to the other side.

        Raises:
            TimeoutError: if the other side does not read the message within `within_s`.
            OSError: if the other side is closed.
        """
        data = msgspec.msgpack.encode(message)
        self._socket.settimeout(within_s)
        self._socket.sendall(_LENGTH.pack(len(data)) + data)

    def receive(self, kind: type[Any], *, within_s: float | None = None) -> Any:
        """Wait for the next message, which must be of type `kind`.

        Raises:
            TimeoutError: if no message arrives within `within_s`.
            OSError: if the other side is closed, or sends more than MAX_MESSAGE_BYTES.
            msgspec.DecodeError: if the bytes are not a message of type `kind`.
        """
        give_up_at = None if within_s is None else time.monotonic() + within_s
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, give_up_at))
        if length > MAX_MESSAGE_BYTES:
            raise ConnectionError(f"a message of {length} bytes; {MAX_MESSAGE_BYTES} are allowed")
        return msgspec.msgpack.decode(self._read(length, give_up_at), type=kind)

    @property
    def is_open(self) -> bool:
        """Whether the other side is open or has sent unread bytes."""
        try:
            self._socket.settimeout(0)
            return bool(self._socket.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        self._socket.close()

    def _read(self, count: int, give_up_at: float | None) -> bytes:
        parts = []
        while count:
            left_s = None if give_up_at is None else max(1e-3, give_up_at - time.monotonic())
            self._socket.settimeout(left_s)
            part = self._socket.recv(min(count, 1 << 20))
            if not part:
                raise ConnectionError("the other end is closed")
            parts.append(part)
            count -= len(part)
        return b"".join(parts)


# --- carrying out calls --------------------------------------------------------------------------


class Performer:
    """Executes the calls of a task's code, and keeps the states of the task's episodes.

    The task's code may return awaitables. All awaitables run in the same event loop. So a client,
    lock or queue that the code creates works in all later calls.
    """

    def __init__(self, task: Task) -> None:
        self._task = task
        self._states: dict[str, Any] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_lock = threading.Lock()

    def answer(self, call: TaskCall) -> CallAnswer:
        """Execute a call, and return its value or its fault.

        The method never raises an error. Every error of the task's code becomes a fault.
        """
        where = f"{type(self._task).__name__}.{call}"
        try:
            return CallAnswer(self._perform(call, where))
        except MemoryError:
            text = f"{where} ran out of memory; raise reward.memory_limit_bytes"
            return CallAnswer(fault=CallFault("reward_memory", text))
        except _Refused as refused:
            return CallAnswer(fault=refused.fault)
        except BaseException as error:  # noqa: BLE001 -- every error goes to the caller as a fault
            advice = _LOOP_ADVICE if _is_about_loop(error) else ""
            text = f"{where} raised {describe_raised(error)}{advice}"
            fault = CallFault("reward_error", text, is_transient(error), _traceback(error))
            return CallAnswer(fault=fault)

    def _perform(self, call: TaskCall, where: str) -> Any:
        match call.method:
            case "example":
                try:
                    return self._awaited(self._task.example(call.index, split=call.split))
                except EchoError as error:  # a dataset's error names file and row already
                    raise _Refused(str(error)) from error
            case "reward":
                return self._rewards(Example(**call.example), call.texts, where)
            case "begin":
                state = self._awaited(self._environment.begin(Example(**call.example)))
                self._states[call.episode] = state
                return None
            case "reply":
                reply = self._environment.reply(self._state(call.episode), call.text)
                answer = self._awaited(reply)
                return None if answer is None else _messages(answer, where)
            case "outcome":
                outcome = self._environment.outcome(self._state(call.episode))
                return _opinion(self._awaited(outcome), where)
            case "end":
                state = self._states.pop(call.episode, None)
                if state is not None:
                    self._awaited(self._environment.end(state))
                return None

    def _rewards(
        self, example: Example, texts: Sequence[str], where: str
    ) -> list[float | dict[str, float] | None]:
        if len(texts) == 1 or not self._task.compares_answers(example):
            return [
                _opinion(self._awaited(self._task.reward(example, text)), where) for text in texts
            ]
        values = self._awaited(self._task.rewards(example, list(texts)))
        number = f"a list of {counted(len(texts), 'number')}, one for each answer"
        if isinstance(values, str | bytes | Mapping | Set) or not isinstance(values, Iterable):
            refusal = f"{where} returned {_shown(values)}; it must return {number}"
            raise _Refused(refusal + _advice(values))
        values = list(values)
        if len(values) != len(texts):
            returned = counted(len(values), "reward")
            raise _Refused(f"{where} returned {returned}; it must return {number}")
        return [_opinion(value, where) for value in values]

    def _awaited(self, value: Any) -> Any:
        if not inspect.isawaitable(value):
            return value
        import asyncio  # here, since it doubles the time of a start and few tasks need it

        # InlineHost calls from several threads, which take turns here.
        with self._loop_lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
            return self._loop.run_until_complete(_result_of(value))

    def wait_for(self, file: socket.socket) -> None:
        """If the task's code has used asyncio, wait until the socket has data.

        Meanwhile the event loop runs the asyncio tasks that the task's code has started.
        """
        if self._loop is None:
            return
        import asyncio

        loop, is_ready = self._loop, self._loop.create_future()
        loop.add_reader(file, is_ready.cancel)
        try:
            with contextlib.suppress(asyncio.CancelledError):
                loop.run_until_complete(is_ready)
        finally:
            loop.remove_reader(file)

    @property
    def _environment(self) -> Environment:
        if not isinstance(self._task, Environment):
            raise _Refused(
                f"{type(self._task).__name__} has no episodes: it is not an "
                "echo.tasks.environment.Environment"
            )
        return self._task

    def _state(self, episode: str) -> Any:
        if episode not in self._states:
            raise _Refused(
                f"the episode {episode} is not known here; its process was restarted",
                reason="reward_lost",
            )
        return self._states[episode]


class _Refused(Exception):  # noqa: N818 -- it has the fault that the caller receives
    def __init__(self, text: str, *, reason: str = "reward_error") -> None:
        super().__init__(text)
        self.fault = CallFault(reason, text)


async def _result_of(value: Awaitable[Any]) -> Any:
    return await value


def _opinion(value: object, where: str) -> float | dict[str, float] | None:
    """Return a reward as a float, or a reward in parts as floats by name.

    Return None if the task cannot score the answer. Refuse values that are not finite numbers.
    """
    if value is None:
        return None
    if isinstance(value, Mapping):
        if fault := find_name_fault(value):
            raise _Refused(f"{where} returned {_shown(value)}: {fault}")
        return {name: _number(part, f"{where}, part {name}") for name, part in value.items()}
    return _number(value, where)


def _number(value: object, where: str) -> float:
    """Return a reward or a part of it as a float.

    Raises:
        _Refused: if the value is not a finite number.
    """
    try:
        reward = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        reward = math.nan
    if isinstance(value, str | bytes) or not math.isfinite(reward):
        raise _Refused(
            f"{where} returned {_shown(value)}; it must return a finite number, or "
            f"None for no opinion{_advice(value)}"
        )
    return reward


def _advice(value: object) -> str:
    """Return a remedy for a value that is not a reward; "" if none is known."""
    if inspect.isgenerator(value) or inspect.isasyncgen(value):
        return ": say `return` in place of `yield`"
    if inspect.iscoroutine(value):
        value.close()  # otherwise Python warns of it as well
        return ": make the function `async` and await this, several with asyncio.gather"
    if isinstance(value, list | tuple):
        return ": a list is what f(completions, ...) returns, with `s`"
    return ""


def _shown(value: object) -> str:
    try:
        return reprlib.repr(value)
    except ValueError:  # Python prints no number with this many digits
        return f"{type(value).__name__} beyond all bounds"


def _messages(answer: str | Message | list[Message], where: str) -> list[Message]:
    """Return an environment's reply as messages. Text becomes one user message."""
    if isinstance(answer, str):
        return [{"role": "user", "content": answer}]
    messages = [answer] if isinstance(answer, dict) else answer
    for message in messages:
        if fault := fault_of_message(message):
            raise _Refused(
                f"{where} returned {_shown(message)}, which {fault}; it must return text, chat "
                "messages, or None when the episode is over"
            )
    return messages


def is_transient(error: BaseException) -> bool:
    """Return whether a call that raised this error may succeed if the call is repeated.

    If a connection fails, HTTP clients raise errors whose cause is the socket's error. So all
    causes of the error are examined.
    """
    while not isinstance(error, TRANSIENT_ERRORS):
        cause = error.__cause__ or error.__context__
        is_own = type(error).__module__ == "builtins" and not isinstance(error, OSError)
        if cause is None or is_own:
            return False
        error = cause
    return True


def _is_about_loop(error: BaseException) -> bool:
    is_loop = re.search(r"[Ee]vent loop|different loop", str(error))
    return isinstance(error, RuntimeError) and is_loop is not None


def describe_raised(error: BaseException) -> str:
    """Describe an error of a task's code: its type, text, file and line."""
    return f"{type(error).__name__}: {error}{raised_at(error)}"


def _traceback(error: BaseException) -> str:
    """Return an error's traceback as text, without the frames of this module."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    lines = traceback.format_exception(type(error), error, frames)
    return "".join(lines).rstrip()[-MAX_TRACEBACK_LENGTH:]


def raised_at(error: BaseException) -> str:
    """Return " (file:line)" of the place where an error was raised, or ""."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<")
    ]
    if not frames:
        return ""
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})"


# --- the process ---------------------------------------------------------------------------------


def main(fd: int, node: int) -> None:
    """Build the task, and execute calls until the node closes the socket pair.

    Args:
        fd: descriptor of the task's side of the socket pair.
        node: process id of the node.
    """
    end = socket.socket(fileno=fd)
    fork_guarded(node, end)
    own_id, pipe = os.getpid(), Pipe(end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        spec: TaskSpec = pipe.receive(TaskSpec)
        try:
            check_unchanged(spec.code)
            task = load_task(spec.kind, spec.options)
            task.prepare()
        except Exception as error:  # noqa: BLE001 -- a task's code raises anything
            what = error if isinstance(error, EchoError) else describe_raised(error)
            text = f"the task's process cannot build it: {what}"
            pipe.send(CallAnswer(fault=CallFault("reward_lost", text)))
            return
        _limit_memory(spec.memory_bytes)
        pipe.send(CallAnswer())
        performer = Performer(task)
        while True:
            performer.wait_for(end)
            call: TaskCall = pipe.receive(TaskCall)
            answer = performer.answer(call)
            if os.getpid() != own_id:  # a child that the task's code forked must not answer
                os._exit(0)
            # A timer that this call has set must not interrupt the next call or the wait for it.
            for timer in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF):
                signal.setitimer(timer, 0.0)
            _send(pipe, answer, call)


def _limit_memory(memory_bytes: int | None) -> None:
    if memory_bytes is not None:
        # Imports differ between machines, so the limit counts from the memory used after them.
        limit = memory_bytes + _data_bytes()
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _data_bytes() -> int:
    """Return this process's private writable memory in bytes; 0 if unknown."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:  # noqa: PTH123
            found = [line for line in file if line.startswith("VmData:")]
        return int(found[0].split()[1]) << 10
    except (OSError, IndexError, ValueError):
        return 0


def _send(pipe: Pipe, answer: CallAnswer, call: TaskCall) -> None:
    try:
        pipe.send(answer)
    except (TypeError, ValueError, msgspec.MsgspecError) as error:
        text = f"{call} returned what cannot be sent: {error}; return texts and numbers"
        pipe.send(CallAnswer(fault=CallFault("reward_error", text)))
