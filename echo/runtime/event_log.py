"""Event log: record what a role was fed, and replay it.

A role knows no clock and does no IO: time is an argument, and so the same calls bring the same
actions. A log begins where the role is built, since without its beginning nothing can be replayed:

    head   version of Echo
    build  the parts of a role, with their arguments (`EventLog.build`)
    call   each call from outside: its arguments, the answers of what the role itself asked
           meanwhile (`EventLog.outside`: a prompt, a signature, space for a version), and what
           came out
    set    an attribute that the shell has given another value

`event_values.py` says what is kept of arguments and outcomes. The objects that are recorded get a
class of their own, whose public methods and attributes write what is done from outside: so a node
without a log pays nothing, and a new method of a role is recorded without a line here.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import msgspec

from echo import __version__
from echo.core.buffer import StalenessBuffer
from echo.core.errors import DataError, EchoError
from echo.leases.book import LeaseBook
from echo.leases.outbox import Outbox
from echo.records.event_log import EventFile, read_frames
from echo.roles.learner import Learner
from echo.roles.relay import Relay
from echo.roles.worker import Worker
from echo.runtime.event_values import Outside, Values, class_at, digests_of, path_of
from echo.weights.broadcast import Broadcast
from echo.weights.receiver import WRONG_HASH, WriteChunk
from echo.weights.store import Transfer, allocate

P = ParamSpec("P")
T = TypeVar("T")

BUILT = (Learner, Worker, Relay, Broadcast, StalenessBuffer, LeaseBook, Outbox)
"""What a log may build."""
PARTS = ("counters",)
"""Parts of a role that its shell calls directly."""
READS = {
    "views", "obstacle", "progress", "broadcast_progress", "describe_wait", "rebuild", "manifest",
    "as_dict", "deadline_of",
}  # fmt: skip
"""Methods that change nothing and are called often, or in threads."""
ASKED = {"create", "journal", "sealed", "advance", "drop", "sign", "public_key", "lease"}
"""Methods of what lies outside that a role calls itself."""
MAX_SHOWN = 500
"""Characters of an action that a difference shows."""

# --- record ---------------------------------------------------------------------------------------


class EventLog:
    """Records the calls of one role; without a file it does nothing."""

    def __init__(self, path: Path | None = None, *, log: logging.Logger | None = None) -> None:
        """Begin a file.

        Args:
            path: a new file; None to record nothing.
            log: where to tell that the log has ended.

        Raises:
            StorageError: if it is there already, or cannot be written.
        """
        self._file = None if path is None else EventFile(path)
        self._log = log or logging.getLogger(__name__)
        self._values = Values()
        self._answers: list[list[Any]] = []
        self._is_inside = False
        self._thread = threading.get_ident()
        self._write([__version__])

    def build(self, name: str, make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return `make(...)`, a part of the role under a name, whose calls are recorded."""
        if self._file is None:
            return make(*args, **kwargs)
        arguments = inspect.signature(make).bind(*args, **kwargs).arguments
        entry = ["build", name, path_of(make), self._pack(arguments)]  # type: ignore[arg-type]
        made: T = self._enter(entry, functools.partial(make, *args, **kwargs))
        self._values.name(name, made)
        self._watch(name, made)
        for part in PARTS:
            if hasattr(made, part):
                self._watch(f"{name}.{part}", getattr(made, part))
        return made

    def outside(self, target: T) -> T:
        """Return `target`, which is not recorded, such that what it answers to the role is."""
        if self._file is None or target is None:
            return target
        return _Asked(target, self._answered)  # type: ignore[return-value]

    def close(self) -> None:
        """Record nothing from now on."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _watch(self, name: str, target: Any) -> None:
        kind = type(target)
        body: dict[str, Any] = {"__slots__": (), "__setattr__": self._setter(name)}
        for method, function in inspect.getmembers(kind, inspect.isfunction):
            if not method.startswith("_") and method not in READS:
                body[method] = self._recorded(name, method, function)
        target.__class__ = type(kind.__name__, (kind,), body)

    def _setter(self, name: str) -> Callable[[Any, str, Any], None]:
        def set_attribute(target: Any, attribute: str, value: Any) -> None:
            if self._is_outside:
                self._write(["set", name, attribute, self._pack({"": value})])
            object.__setattr__(target, attribute, value)

        return set_attribute

    def _recorded(self, name: str, method: str, function: Callable[..., Any]) -> Any:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._is_outside:
                return function(*args, **kwargs)
            _, *arguments = signature.bind(*args, **kwargs).arguments.items()
            entry = ["call", name, method, self._pack(dict(arguments))]
            return self._enter(entry, functools.partial(function, *args, **kwargs))

        return call

    @property
    def _is_outside(self) -> bool:
        """Whether a call that begins now comes from outside of the role."""
        is_here = self._thread == threading.get_ident()
        return self._file is not None and not self._is_inside and is_here

    def _enter(self, entry: list[Any], call: Callable[[], Any]) -> Any:
        self._is_inside, self._answers = True, []
        result: Any = None
        try:
            result = call()
        except Exception as error:
            result = error
            raise
        finally:
            self._is_inside = False
            self._write([*entry, self._answers, digests_of(result, self._values)])
        return result

    def _answered(self, name: str, answer: Any) -> None:
        if self._is_inside and self._thread == threading.get_ident():
            self._answers.append([name, self._pack({"": answer})])

    def _pack(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return what is written of values; one that cannot be read again ends the log."""
        try:
            return self._values.pack_fields(arguments)
        except (TypeError, ValueError, KeyError) as error:
            self._end(f"a call with {', '.join(arguments)} cannot be recorded: {error!r}")
            return {}

    def _write(self, entry: list[Any]) -> None:
        if self._file is None:
            return
        try:
            if self._file.write(msgspec.msgpack.encode(entry)):
                return
            reason = "it has reached its bound"
        except OSError as error:
            reason = f"{error.strerror}"
        except (TypeError, ValueError, OverflowError) as error:
            reason = f"a value cannot be written: {error}"
        self._end(reason)

    def _end(self, reason: str) -> None:
        if self._file is not None:
            self._log.warning("the event log %s ends here: %s", self._file.path, reason)
            self.close()


class _Asked(Outside):
    """What a role asks; tells each answer."""

    def __init__(self, target: Any, answered: Callable[[str, Any], None]) -> None:
        self._target = target
        self._answered = answered
        self.may_block = getattr(target, "may_block", None)
        self.may_patch = getattr(target, "may_patch", None)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        return functools.partial(self._ask, name, value) if name in ASKED else value

    def _ask(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        try:
            answer = function(*args)
        except EchoError as error:
            self._answered(name, error)
            raise
        self._answered(name, None if name == "journal" else answer)
        return answer


# --- replay ---------------------------------------------------------------------------------------


class DifferenceError(Exception):
    """A call did not come out as it was recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """How far a replay came."""

    num_calls: int
    num_actions: int
    difference: str
    """Which call came out otherwise, and how; empty if all was the same."""
    is_bounded: bool
    """Whether the log had reached its bound."""


def replay_log(path: Path) -> Replayed:
    """Feed a log to the role that it begins with, up to the first action that differs.

    Raises:
        DataError: if it is no log of this version of Echo, is damaged, or ends within an entry.
    """
    replay, difference, frame = _Replay(), "", b""
    frames = read_frames(path)
    with _unseen_chunks():
        try:
            _check_head(path, next(frames, b""))
            for frame in frames:
                if frame:
                    replay.follow(msgspec.msgpack.decode(frame))
        except DifferenceError as error:
            difference = str(error)
        except DataError as error:
            before = f"; the {replay.num_calls} calls before it came out the same"
            raise DataError(f"{error}{before if replay.num_calls else ''}") from error
    return Replayed(
        num_calls=replay.num_calls,
        num_actions=replay.num_actions,
        difference=difference,
        is_bounded=not frame,
    )


def _check_head(path: Path, frame: bytes) -> None:
    recorded = msgspec.msgpack.decode(frame)[0] if frame else "an unknown version"
    if recorded != __version__:
        raise DataError(
            f"{path} was recorded by echo-rl {recorded}, this is {__version__}; replay it with the "
            "release that recorded it"
        )


def _run_unseen(work: WriteChunk) -> str:
    """Compare the recorded hash of a chunk with the signed one; there is nothing to write."""
    is_right = getattr(work.data, "digest", b"") == work.item.chunk_hash(work.index)
    return "" if is_right else WRONG_HASH


def _unseen_chunk(image: Transfer, index: int) -> memoryview:
    """Return as many bytes as a chunk has: there is nothing to encrypt."""
    return allocate(image.chunk_size(index))


@contextlib.contextmanager
def _unseen_chunks() -> Iterator[None]:
    run, chunk = WriteChunk.run, Transfer.chunk
    try:
        WriteChunk.run = _run_unseen  # type: ignore[method-assign, assignment]
        Transfer.chunk = _unseen_chunk  # type: ignore[method-assign, assignment]
        yield
    finally:
        WriteChunk.run = run  # type: ignore[method-assign]
        Transfer.chunk = chunk  # type: ignore[method-assign]


class _Replay:
    """Builds the role of a log anew, and calls it."""

    def __init__(self) -> None:
        self.num_calls = self.num_actions = 0
        self._values = Values()
        self._values.keep()
        self._values.outside = functools.partial(_Answering, self)
        self._answers: Iterator[list[Any]] = iter(())

    def follow(self, entry: list[Any]) -> None:
        """Repeat one entry.

        Raises:
            DifferenceError: if something else came out.
        """
        match entry:
            case ["set", str() as name, str() as attribute, packed]:
                setattr(self._values.find(name), attribute, self._values.unpack(packed)[""])
            case ["build", str() as name, str() as path, arguments, answers, expected]:
                kind = class_at(path, BUILT)
                made = self._call(f"build {name}", kind, arguments, answers, expected)
                self._values.name(name, made)
            case ["call", str() as name, str() as method, arguments, answers, expected] if (
                not method.startswith("_")
            ):
                function = getattr(self._values.find(name), method)
                self._call(f"{name}.{method}", function, arguments, answers, expected)
            case _:
                raise DataError(f"entry {self.num_calls + 1} is of no kind")

    def _call(
        self,
        name: str,
        function: Callable[..., Any],
        packed: dict[str, Any],
        answers: list[list[Any]],
        expected: list[list[Any]],
    ) -> Any:
        self.num_calls += 1
        self._answers = iter(answers)
        arguments = self._values.unpack(packed)
        bound = inspect.BoundArguments(inspect.signature(function), arguments)
        when = f" at {arguments['now']:.6f} s" if "now" in arguments else ""
        where = f"call {self.num_calls}, {name}{when}"
        try:
            result = function(*bound.args, **bound.kwargs)
        except Exception as error:
            result = error
            if digests_of(error, self._values) != expected:
                raise DifferenceError(f"{where}: {_compare(expected, error)}") from error
            return None
        got = digests_of(result, self._values)
        if got != expected:
            raise DifferenceError(f"{where}: {_compare(expected, result)}")
        self.num_actions += len(got)
        return result

    def answer(self, name: str) -> Any:
        """Return what was answered when the role asked this."""
        recorded, packed = next(self._answers, ["nothing", {}])
        if recorded != name:
            raise DifferenceError(f"it asks for {name}, then it asked for {recorded}")
        value = self._values.unpack(packed)[""]
        if isinstance(value, EchoError):
            raise value
        return value


class _Answering(Outside):
    """Answers a role as the log says."""

    def __init__(self, replay: _Replay, traits: list[bool | None]) -> None:
        self._replay = replay
        self.may_block, self.may_patch = traits

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self._replay.answer(name)


def _compare(expected: list[list[Any]], result: Any) -> str:
    """Say at which action two outcomes part."""
    actions = result if isinstance(result, list) else [result]
    got = digests_of(result, Values())
    nothing: list[Any] = ["nothing", b""]
    pairs = itertools.zip_longest(expected, got, fillvalue=nothing)
    index, (was, is_now) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
    shown = f"\n  {actions[index]!r}"[:MAX_SHOWN] if index < len(actions) else ""
    return (
        f"action {index + 1} was {was[0]} {was[1].hex()} and is now {is_now[0]} "
        f"{is_now[1].hex()}{shown}"
    )
