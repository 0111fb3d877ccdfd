"""Connect a viewer to a learner, to request statuses and to send operations.

A viewer dials every address at which the learner may be, and uses the first address that answers.
The viewer requests the next status only after the previous status has arrived. So over a slow link,
statuses arrive less often, but are never outdated. A lost connection is redialled automatically.
"""

from __future__ import annotations

import asyncio
import getpass
import socket
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Protocol, TypeVar

from echo.core.errors import DataError, RefusedError, RemoteProtocolError, TransportError
from echo.core.monitoring.status import RunStatus
from echo.net.curve import CurveKeys
from echo.net.transport import (
    Connected,
    DialFailed,
    Disconnected,
    Received,
    TransportOptions,
    parse_key,
    without_key,
)
from echo.net.zmq import ZmqTransport
from echo.runtime.access import Access, Target
from echo.wire.codec import decode_envelope, decode_message, encode
from echo.wire.messages import Act, Message, Operation, Outcome, Refuse, Status, Watch

ANSWER_S = 10.0
"""Seconds within which a learner must answer a request."""
ASK_S = 1.0
"""Seconds between two requests for the status while a run is shown."""
AGAIN_S = 5.0
"""Seconds after which an unanswered request is repeated."""
OPTIONS = TransportOptions(connect_timeout_s=5.0, max_redial_s=2.0, linger_s=0.5)

Answer = TypeVar("Answer")


def operator_name() -> str:
    """Return the name under which this user's operations are recorded: user@host."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "unknown"
    return f"{user}@{socket.gethostname()}"[:128]


class ViewerLink:
    """A viewer's transport, which dials several addresses and uses the first that answers."""

    def __init__(self, accesses: Sequence[Access]) -> None:
        """Prepare to dial one learner at several addresses.

        `accesses` has at least one access. All accesses have the same keys.
        """
        key = parse_key(accesses[0].address)
        assert key is not None, "a viewer's key has the learner's key"
        keys = CurveKeys.of_guest(accesses[0].secret, key)
        self.transport = ZmqTransport(None, OPTIONS, keys)
        self._addresses = [access.address for access in accesses]
        self._dialled: dict[str, str] = {}
        self._peer: str | None = None
        self._failures: dict[str, DialFailed] = {}

    async def open(self) -> None:
        """Dial all addresses."""
        await self.transport.start()
        self._dialled = {self.transport.dial(address): address for address in self._addresses}

    @property
    def is_up(self) -> bool:
        """Whether the learner is connected."""
        return self._peer is not None

    @property
    def failure(self) -> str:
        """The reason why no address answers.

        The reason is "" if an address answers, or if an address is still being tried.
        """
        if self.is_up or len(self._failures) < len(self._dialled):
            return ""
        if any(failed.is_refused for failed in self._failures.values()):
            where = ", ".join(map(without_key, self._addresses))
            return (
                f"the learner at {where} refuses this key: it belongs to another run, or was "
                "replaced; copy keys/view or keys/operate of the run's directory again"
            )
        return "; ".join(dict.fromkeys(failed.reason for failed in self._failures.values()))

    def send(self, message: Message) -> None:
        """Send a message to the learner. The message is lost if there is no link."""
        if self._peer is not None:
            self.transport.send(self._peer, encode(message, source="viewer"))

    async def receive(self) -> list[tuple[Any, list[Any]]]:
        """Wait for events of the transport. Return each received message with its payload."""
        messages = []
        for event in await self.transport.receive():
            match event:
                case Connected(peer) if self._peer is None:
                    self._peer = peer
                    self._failures.clear()
                case Connected(peer):  # another address of the same learner
                    self.transport.hang_up(peer)
                    self._dialled.pop(peer, None)
                case Disconnected(peer) if peer == self._peer:
                    self._peer = None
                case DialFailed(peer):
                    self._failures[peer] = event
                case Received(peer, frames) if peer == self._peer:
                    messages.append(_decoded(frames))
        return messages


def _decoded(frames: list[Any]) -> tuple[Any, list[Any]]:
    try:
        message = decode_message(decode_envelope(frames))
    except RemoteProtocolError as error:
        raise DataError(
            f"the learner's answer cannot be read ({error}); use the release that the learner runs"
        ) from error
    if isinstance(message, Refuse):
        raise RefusedError(f"the learner refuses this viewer: {message.detail}")
    return message, frames[1:]


# --- one question ---------------------------------------------------------------------------------


def ask_status(target: Target) -> RunStatus:
    """Return the present status of a run.

    Raises:
        TransportError: if no learner answers.
        RefusedError: if the learner does not admit another viewer.
        DataError: if the answer cannot be read. The learner then runs another release.
    """

    def answer(message: Any, payload: Sequence[Any]) -> RunStatus | None:
        is_status = isinstance(message, Status) and payload
        return RunStatus.from_json(bytes(payload[0]), source=target.name) if is_status else None

    return _run(_ask(target, Watch(), answer))


def send_command(target: Target, act: Act, subject: str = "", value: str = "") -> Outcome:
    """Make the learner carry out an operation, and return the outcome.

    Raises:
        TransportError, RefusedError, DataError: for the same reasons as `ask_status`.
    """
    operation = Operation(number=1, act=act, subject=subject, value=value, by=operator_name())

    def answer(message: Any, payload: Sequence[Any]) -> Outcome | None:
        return message if isinstance(message, Outcome) else None

    return _run(_ask(target, operation, answer))


async def _ask(
    target: Target, question: Message, answer: Callable[[Any, Sequence[Any]], Answer | None]
) -> Answer:
    link = ViewerLink(target.accesses)
    was_up = False
    try:
        await link.open()
        with suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                while not link.failure:
                    messages = await link.receive()
                    if link.is_up and not was_up:
                        link.send(question)
                    was_up = link.is_up
                    for message, payload in messages:
                        if (found := answer(message, payload)) is not None:
                            return found
        why = link.failure or f"no answer within {ANSWER_S:g} s"
    finally:
        await link.transport.close()
    raise TransportError(f"{target.name}: no learner answers: {why}")


def _run(main: Coroutine[Any, Any, Answer]) -> Answer:
    return asyncio.run(main)


# --- watching -------------------------------------------------------------------------------------


class RunWatcher(Protocol):
    """Shows a run to a user, and reads the user's keys."""

    keyboard: int | None
    """File descriptor of the terminal from which keys are read; None if there is no terminal."""

    @property
    def is_over(self) -> bool:
        """Whether the user has asked to end the view."""

    def show(self, status: RunStatus, *, may_operate: bool) -> None:
        """Draw a status."""

    def say(self, text: str) -> None:
        """Show a text about the connection or an operation's outcome. "" removes the text."""

    def read_keys(self) -> list[Operation]:
        """Return the operations that the user has confirmed with keys."""


def watch(target: Target, watcher: RunWatcher) -> None:
    """Show a run to a watcher until the user ends the view.

    The learner is redialled if it is lost, or if it runs on this machine and is still starting.

    Raises:
        TransportError: if no learner has answered since the call.
        RefusedError, DataError: for the same reasons as `ask_status`.
    """
    _run(_watch(target, watcher))


async def _watch(target: Target, watcher: RunWatcher) -> None:
    link = ViewerLink(target.accesses)
    viewing = _Viewing(link, watcher)
    try:
        await link.open()
        with viewing.reading_keys():
            while not watcher.is_over:
                await viewing.turn()
                if link.failure and not viewing.has_shown and not target.is_in_use:
                    raise TransportError(f"{target.name}: no learner answers: {link.failure}")
    finally:
        await link.transport.close()


class _Viewing:
    """The state of a view: when the next status is requested, and whether a status was shown."""

    def __init__(self, link: ViewerLink, watcher: RunWatcher) -> None:
        self._link, self._watcher = link, watcher
        self._loop = asyncio.get_running_loop()
        self._waiting: asyncio.Timeout | None = None
        self._ask_at = 0.0
        self._was_up = False
        self.has_shown = False

    @contextmanager
    def reading_keys(self) -> Iterator[None]:
        """Within the block, read keys and send the operations that the user confirms."""
        keyboard = self._watcher.keyboard
        if keyboard is not None:
            self._loop.add_reader(keyboard, self._on_keys)
        try:
            yield
        finally:
            if keyboard is not None:
                self._loop.remove_reader(keyboard)

    def _on_keys(self) -> None:
        for operation in self._watcher.read_keys():
            self._link.send(operation)
        if self._watcher.is_over and self._waiting is not None:
            self._waiting.reschedule(self._loop.time())

    async def turn(self) -> None:
        link, now = self._link, self._loop.time()
        messages: list[tuple[Any, list[Any]]] = []
        with suppress(TimeoutError):
            until = self._ask_at if link.is_up else now + ASK_S
            async with asyncio.timeout_at(until) as self._waiting:
                messages = await link.receive()
        self._waiting = None
        now = self._loop.time()
        if link.is_up and not self._was_up:
            self._ask_at = now
            self._watcher.say("")
        elif not link.is_up and self.has_shown:
            self._watcher.say(f"no answer, dialling again: {link.failure or 'the link was lost'}")
        elif link.failure:
            self._watcher.say("the learner is starting: it does not answer yet")
        self._was_up = link.is_up
        for message, payload in messages:
            self._take(message, payload, now)
        if link.is_up and now >= self._ask_at:
            link.send(Watch())
            self._ask_at = now + AGAIN_S

    def _take(self, message: Any, payload: list[Any], now: float) -> None:
        match message:
            case Status() if payload:
                self._ask_at = now + ASK_S
                self.has_shown = True
                status = RunStatus.from_json(bytes(payload[0]), source="the learner")
                self._watcher.show(status, may_operate=message.may_operate)
            case Outcome():
                self._watcher.say(f"{'' if message.is_done else 'not done: '}{message.text}")
