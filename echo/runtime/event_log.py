"""Event log: record what a role was fed, and replay it.

A role knows no clock and does no IO: time is an argument, and so the same calls bring the same
actions. A log has each call from outside (`RecordedCall`). It begins where the role is built, since
without its beginning nothing can be replayed: the first calls are of the classes of its parts
(`EventLog.build`).

The objects that are recorded get a class of their own, whose public methods write what is called
from outside, and each attribute that the shell sets: so a node without a log pays nothing, and a
new method of a role is recorded without a line here. `event_values.py` says what is kept of
arguments and outcomes.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, ParamSpec, TypeVar

import msgspec

from echo.core.buffer import StalenessBuffer
from echo.core.errors import DataError, EchoError
from echo.leases.book import LeaseBook
from echo.leases.outbox import Outbox
from echo.records.event_log import EventFile, read_frames
from echo.roles.learner import Learner
from echo.roles.relay import Relay
from echo.roles.worker import Worker
from echo.runtime.event_values import Outside, Values, actions_of, handed_out, outcomes
from echo.weights.broadcast import Broadcast
from echo.weights.receiver import WRONG_HASH, WriteChunk
from echo.weights.store import Transfer, allocate

P = ParamSpec("P")
T = TypeVar("T")

BUILT = {
    kind.__name__: kind
    for kind in (Learner, Worker, Relay, Broadcast, StalenessBuffer, LeaseBook, Outbox)
}
"""What a log may build."""
SET = "__setattr__"
"""What is called where a shell gives an attribute another value."""
READS = {"views", "obstacle", "broadcast_progress", "describe_wait", "deadline_of"}
"""Methods that change nothing and are called often."""
ASKED = {"create", "sign", "public_key", "lease", "seal_key", "nonce", "code"}
"""Methods of what lies outside that answer the role with something."""
MAX_SHOWN = 500
"""Characters of an action that a difference shows."""


class RecordedCall(msgspec.Struct, array_like=True):
    """A call from outside of the role, and what came of it."""

    target: str
    """Name of the object that is called, or was made."""
    method: Annotated[str, msgspec.Meta(pattern=f"^([^_]|{SET}$)")]
    """The class where one is made."""
    arguments: dict[str, Any]
    answers: list[tuple[str, Any]] = []
    """Of what the role itself asked meanwhile: a prompt, a signature, space for a version."""
    outcome: list[str] = []
    handed_out: list[int] = []
    """By which numbers later calls refer to what it handed out."""


# --- record ---------------------------------------------------------------------------------------


class EventLog:
    """Records the calls of one role; without a file it does nothing."""

    def __init__(self, path: Path | None = None, *, log: logging.Logger | None = None) -> None:
        """Begin a new file, or none; that it has ended is told in the log.

        Raises:
            StorageError: if it is there already, or cannot be written.
        """
        self._file = None if path is None else EventFile(path)
        self._log = log or logging.getLogger(__name__)
        self._values = Values()
        self._answers: list[tuple[str, Any]] | None = None
        """Those of the call that is under way."""

    def build(self, name: str, make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return `make(...)`, a part of the role under a name, whose calls are recorded."""
        if self._file is None:
            return make(*args, **kwargs)
        arguments = inspect.signature(make).bind(*args, **kwargs).arguments
        call = functools.partial(make, *args, **kwargs)
        made: T = self._enter(RecordedCall(name, make.__name__, arguments), call)
        self._values.names[id(made)] = name
        self._watch(name, made)
        return made

    def outside(self, target: T) -> T:
        """Return `target`, which is not recorded, such that what it answers to the role is."""
        if self._file is None or target is None:
            return target
        traits = [getattr(target, name, None) for name in ("may_block", "may_patch")]
        return Outside(functools.partial(self._ask, target), traits)  # type: ignore[return-value]

    def close(self) -> None:
        """Record nothing from now on."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _watch(self, name: str, target: Any) -> None:
        kind = type(target)
        methods = dict(inspect.getmembers(kind, inspect.isfunction))
        watched = {SET} | {each for each in methods if each[0] != "_" and each not in READS}
        body = {each: self._watched(name, getattr(kind, each)) for each in watched}
        target.__class__ = type(kind.__name__, (kind,), {"__slots__": ()} | body)

    def _watched(self, name: str, function: Callable[..., Any]) -> Any:
        signature, method = inspect.signature(function), function.__name__

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._file is None or self._answers is not None:
                return function(*args, **kwargs)
            _, *arguments = signature.bind(*args, **kwargs).arguments.items()
            again = functools.partial(function, *args, **kwargs)
            return self._enter(RecordedCall(name, method, dict(arguments)), again)

        return call

    def _enter(self, entry: RecordedCall, call: Callable[[], Any]) -> Any:
        with self._ending_at(entry):
            entry.arguments = self._values.pack_fields(entry.arguments)
        self._answers, result = [], None
        try:
            result = call()
        except Exception as error:
            result = error
            raise
        finally:
            with self._ending_at(entry):
                entry.answers = [(name, self._values.pack(each)) for name, each in self._answers]
                entry.outcome = outcomes(result)
                entry.handed_out = [id(each) for each in handed_out(result)]
                if self._file and not self._file.write(msgspec.msgpack.encode(entry)):
                    self._end("it has reached its bound")
            self._answers = None
        return result

    def _ask(self, target: Any, name: str, *args: Any) -> Any:
        """Have a question of the role answered, by one who is not recorded."""
        answer = None
        try:
            answer = getattr(target, name)(*args)
        except EchoError as error:
            answer = error
            raise
        finally:
            if self._answers is not None and name in ASKED:
                self._answers.append((name, answer))
        return answer

    @contextlib.contextmanager
    def _ending_at(self, entry: RecordedCall) -> Iterator[None]:
        """End the log where a call cannot be recorded; the node goes on."""
        try:
            yield
        except OSError as error:
            self._end(str(error.strerror))
        except (TypeError, ValueError, OverflowError) as error:
            self._end(f"{entry.target}.{entry.method} cannot be recorded: {error!r}")

    def _end(self, reason: str) -> None:
        if self._file is not None:
            self._log.warning("the event log %s ends here: %s", self._file.path, reason)
            self.close()


# --- replay ---------------------------------------------------------------------------------------


class DifferenceError(Exception):
    """A call did not come out as it was recorded."""


class Replay:
    """A role that is built anew, as far as it has come."""

    def __init__(self) -> None:
        self.num_calls = self.num_actions = 0
        self.difference = ""
        """Which call came out otherwise, and how; empty if all was the same."""
        self.is_bounded = False
        """Whether the log had reached its bound."""
        self._values = Values(self._answer)
        self._answers: Iterator[tuple[str, Any]] = iter(())

    def repeat(self, frame: bytes) -> None:
        """Call what was called.

        Raises:
            DataError: if it is no call, or of something that no shell calls.
            DifferenceError: if something else came out.
        """
        try:
            entry = msgspec.convert(self._values.decoder.decode(frame), RecordedCall)
            name, method, arguments = entry.target, entry.method, entry.arguments
            function = BUILT.get(method) or getattr(self._values.known[name], method)
            bound = inspect.BoundArguments(inspect.signature(function), arguments)
            when = f" at {arguments['now']:.6f} s" if "now" in arguments else ""
        except (msgspec.MsgspecError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise DataError(f"entry {self.num_calls + 1} cannot be called: {error!r}") from error
        self.num_calls += 1
        self._answers = iter(entry.answers)
        result: Any
        try:
            result = function(*bound.args, **bound.kwargs)
        except Exception as error:  # noqa: BLE001 -- raised when it was recorded, or a difference
            result = error
        outcome = outcomes(result)
        if outcome != entry.outcome:
            how = _compare(entry.outcome, outcome, actions_of(result))
            cause = result if isinstance(result, Exception) else None
            raise DifferenceError(f"call {self.num_calls}, {name}.{method}{when}: {how}") from cause
        self.num_actions += len(outcome)
        self._values.known.update(zip(entry.handed_out, handed_out(result), strict=False))
        if method in BUILT:
            self._values.known[name] = result

    def _answer(self, name: str, *_: Any) -> Any:
        """Answer what the role asks as it was answered then."""
        if name not in ASKED:
            return None
        recorded, answer = next(self._answers, ("nothing", None))
        if recorded != name:
            raise DifferenceError(f"it asks for {name}, then it asked for {recorded}")
        if isinstance(answer, EchoError):
            raise answer
        return answer


def replay_log(path: Path) -> Replay:
    """Feed a log to the role that it begins with, up to the first action that differs.

    Raises:
        DataError: if it is no log of this version of Echo, is damaged, or ends within an entry.
    """
    replay = Replay()
    with _unseen_chunks():
        try:
            for frame in read_frames(path):
                if frame:
                    replay.repeat(frame)
                replay.is_bounded = not frame
        except DifferenceError as error:
            replay.difference = str(error)
        except DataError as error:
            before = f"; the {replay.num_calls} calls before it came out the same"
            raise DataError(f"{error}{before if replay.num_calls else ''}") from error
    return replay


def _compare(expected: list[str], got: list[str], actions: list[Any]) -> str:
    """Say at which action two outcomes part."""
    pairs = itertools.zip_longest(expected, got, fillvalue="nothing")
    index, (was, is_now) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
    shown = f"\n  {actions[index]!r}"[:MAX_SHOWN] if index < len(actions) else ""
    return f"action {index + 1} was {was} and is now {is_now}{shown}"


@contextlib.contextmanager
def _unseen_chunks() -> Iterator[None]:
    """Compare the hash of a chunk as it was recorded; send as many bytes as it has."""

    def run(work: WriteChunk) -> str:
        is_right = getattr(work.data, "digest", b"") == work.item.chunk_hash(work.index)
        return "" if is_right else WRONG_HASH

    real = WriteChunk.run, Transfer.chunk
    fake = run, lambda image, index: allocate(image.chunk_size(index))
    try:
        WriteChunk.run, Transfer.chunk = fake  # type: ignore[method-assign, assignment]
        yield
    finally:
        WriteChunk.run, Transfer.chunk = real  # type: ignore[method-assign]
