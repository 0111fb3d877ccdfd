"""The shell around a session: one loop that carries out what the session decides.

    transport events, timer, results of model work  ->  session  ->  actions  ->  perform

The session is called from the event loop only, so it needs no locks; model work runs in threads
(`threads.py`) and its results come back to the loop. There is one timer. It is armed anew only for
a deadline that comes earlier: one that fires too early looks again. An unexpected exception ends
the node with that exception: a node that limps on with half its parts would be worse. Only while a
peer's message is handled it ends that peer instead, or whoever can make one up could end every
node: the session has decided nothing then that it does not return, and the peer may begin anew.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

from echo.core.errors import EchoError, ProtocolError, TransportError
from echo.core.timers import OncePerMinute
from echo.core.units import one_line
from echo.net.transport import Connected, Disconnected, Received, Transport
from echo.protocol.session import Session
from echo.runtime.threads import ThreadPools, Threads
from echo.wire.actions import Action, Dial, HangUp, Note, Send, Stop, Work
from echo.wire.codec import Frame, describe

REPEAT_S = 60.0
"""Seconds between two lines of one topic."""

INTERRUPTED = "interrupted"
"""Why a node has ended that its operator stopped."""
STALL_S = 0.5
"""A timer that fires this late means that the loop did not run."""
CATCH_UP_S = 0.2
"""Seconds to read what arrived during a stall before anything is declared late."""
LEAST_WAIT_S = 0.001
"""A timer fires no sooner than this."""
MAX_WORKERS = 8
"""Threads that decode deltas and write chunks; each takes some GB of weights per second."""
LINGER_S = 2.0
"""Seconds for the last messages of a node to leave after its work is over."""


class Topics:
    """Tells the first note of a topic at once, and those that follow in one line a minute."""

    def __init__(self, log: logging.Logger) -> None:
        """Begin with nothing told."""
        self._log = log
        self._told_at: dict[str, float] = {}
        self._waiting: dict[str, tuple[Note, int]] = {}

    def tell(self, note: Note, *, now: float) -> None:
        """Log a note, or count it."""
        self.tell_due(now=now)
        if note.topic in self._told_at:
            _, number = self._waiting.get(note.topic, (note, 0))
            self._waiting[note.topic] = note, number + 1
            return
        if note.topic:
            self._told_at[note.topic] = now
        self._write(note, note.text)

    def tell_due(self, *, now: float) -> None:
        """Log what was counted a minute long, and forget the topics of which no more came."""
        due = [topic for topic, at in self._told_at.items() if now >= at + REPEAT_S]
        for topic in due:
            del self._told_at[topic]
            if (waiting := self._waiting.pop(topic, None)) is not None:
                self._told_at[topic] = now
                note, number = waiting
                self._write(note, f"{note.text} ({number} like it in the last minute)")

    def _write(self, note: Note, text: str) -> None:
        level = logging.WARNING if note.level == "warning" else logging.INFO
        self._log.log(level, "%s", text)


class Node:
    """One process's node: a session, a transport, and the threads in which models work."""

    def __init__(
        self,
        session: Session,
        transport: Transport,
        *,
        threads: Threads | None = None,
        log: logging.Logger,
    ) -> None:
        """Join the parts.

        Args:
            session: decides.
            transport: has been started, so that its address is known.
            threads: where blocking calls are made; None for a process's own. They end with the
                node.
            log: where to tell what happens.
        """
        self.transport = transport
        self.log = log
        self._session = session
        self._topics = Topics(log)
        transport.on_dial_failed = self._on_dial_failed
        self._timer: asyncio.Handle | None = None
        self._timer_at = 0.0
        self._stopped: asyncio.Future[str] | None = None
        self._num_interrupts = 0
        self._reports = OncePerMinute()
        self.threads = ThreadPools() if threads is None else threads
        self._weights_pool = self.threads.pool("weights", min(MAX_WORKERS, os.cpu_count() or 1))
        self._tasks: set[asyncio.Task[None]] = set()
        self.at_release: list[Callable[[], None]] = []
        """What else is called at the end, whatever ended the node."""

    # --- what roles fill in ----------------------------------------------------------------------

    def connected(self, peer: str) -> list[Action]:
        """Handle that a dialled link stands."""
        return []

    def disconnected(self, peer: str, reason: str) -> list[Action]:
        """Handle that a link is gone."""
        return []

    def dialled(self, address: str, purpose: str, peer: str) -> None:
        """Handle that a Dial was carried out."""

    def dial_failed(self, peer: str, reason: str, *, is_refused: bool) -> list[Action]:
        """Handle that an attempt to dial failed; the transport goes on trying."""
        return []

    def on_action(self, action: Action) -> None:
        """Carry out an action that is the role's own affair."""
        raise TypeError(f"{type(action).__name__} is not for {type(self).__name__}")

    async def work(self) -> None:
        """Do the role's work; when it returns the node goes on relaying until it is stopped."""

    async def drain(self) -> None:
        """Finish what must not be lost, after the first interrupt."""

    def release(self) -> None:
        """Let go of what the role holds, however the node has ended."""

    # --- running ---------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """The loop's clock, seconds: the only one that a session sees."""
        return asyncio.get_running_loop().time()

    async def run(self) -> str:
        """Run until stopped and return the reason.

        Raises:
            EchoError: if the node cannot go on; the message is for the user.
        """
        self._stopped = asyncio.get_running_loop().create_future()
        self.spawn(self._read(), name="transport")
        self.spawn(self.work(), name="work")
        try:
            return await self._stopped
        finally:
            if self._timer is not None:
                self._timer.cancel()
            while self._tasks:  # one may begin another while it ends
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)
            self.threads.close()
            self.release()
            for let_go in self.at_release:
                let_go()
            await self.transport.close()

    def interrupt(self) -> None:
        """Handle that the operator wants it to end: the first call drains, others do nothing."""
        self._num_interrupts += 1
        if self._num_interrupts == 1:
            self.log.warning("stopping: finishing what must not be lost (again to stop at once)")
            self.spawn(self._drain(), name="drain")

    async def _drain(self) -> None:
        await self.drain()
        self.stop(INTERRUPTED)

    @property
    def has_ended(self) -> bool:
        """Whether the node is over, so that work in its threads is of no use any more."""
        return self._stopped is not None and self._stopped.done()

    def stop(self, reason: str, error: BaseException | None = None) -> None:
        """End `run`, cleanly or with an error."""
        if self._stopped is None or self.has_ended:
            return
        if error is not None:
            self._stopped.set_exception(error)
        else:
            self._stopped.set_result(reason)

    def spawn(self, work: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        """Run a coroutine beside the others; its failure ends the node, the node's end ends it."""
        task = asyncio.create_task(self._guard(work), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # One that is cancelled before its first step never comes to await the work.
        task.add_done_callback(lambda _: work.close())
        return task

    async def _guard(self, work: Awaitable[None]) -> None:
        """Turn the failure of a task into the end of the node."""
        try:
            await work
        except EchoError as error:
            self.stop("failed", error)
        except Exception as error:
            self.log.exception("internal error")
            self.stop("failed", error)

    async def _read(self) -> None:
        while True:
            for event in await self.transport.receive():
                match event:
                    case Received():
                        self.perform(self._receive(event.peer, list(event.frames)))
                    case Connected():
                        if event.address is not None:
                            self.perform(self.connected(event.peer))
                    case Disconnected():
                        self.perform(self.disconnected(event.peer, event.reason))

    def _receive(self, peer: str, frames: list[Frame]) -> list[Action]:
        """Have a message handled; a fault in that ends the peer, whose message it was."""
        try:
            return self._session.receive(peer, frames, now=self.now)
        except Exception as error:
            if isinstance(error, EchoError) and not isinstance(error, ProtocolError):
                raise  # its disk or its data: this node's own affair
            source, _, kind = describe(frames)
            source = one_line(source or peer)
            text = f"internal error in a {one_line(kind)} from {source}: parting with it"
            line = self._reports.say(source, kind, f"{text}; please report this", now=self.now)
            if line is not None:
                self.log.exception("%s", line)
            return self._session.expel(peer, frames, now=self.now)

    def _on_dial_failed(self, peer: str, reason: str, is_refused: bool) -> None:
        self.perform(self.dial_failed(peer, reason, is_refused=is_refused))

    # --- acting ----------------------------------------------------------------------------------

    def perform(self, actions: Iterable[Action]) -> None:
        """Carry out actions in order, then arm the timer anew."""
        for action in actions:
            match action:
                case Send():
                    self.transport.send(action.peer, action.frames)
                case Dial():
                    self._dial(action)
                case HangUp():
                    self.transport.hang_up(action.peer)
                case Note():
                    self._topics.tell(action, now=self.now)
                case Stop():
                    self.stop(action.reason, action.error)
                case Work():
                    self._work(action)
                case _:
                    self.on_action(action)
        self._topics.tell_due(now=self.now)
        self._arm()

    def _dial(self, action: Dial) -> None:
        try:
            peer = self.transport.dial(action.address)
        except TransportError as error:
            # An address from another node's message; the session moves on when it times out.
            self.log.warning("%s", error)
        else:
            self.dialled(action.address, action.purpose, peer)

    def _work(self, work: Work) -> None:
        """Decode a block or write a chunk in a thread, and tell the session what came of it."""
        finished = self._weights_pool.run(work.run)
        finished.add_done_callback(functools.partial(self._on_finished, work))

    def _on_finished(self, work: Work, future: asyncio.Future[str]) -> None:
        if self.has_ended or future.cancelled():
            return
        try:
            self.perform(self._session.worked(work, future.result(), now=self.now))
        except EchoError as error:
            self.stop("failed", error)
        except Exception as error:
            self.log.exception("internal error")
            self.stop("failed", error)

    def _arm(self) -> None:
        deadline = self._session.deadline
        if deadline is None or self._stopped is None or self.has_ended:
            return
        # Never sooner than a millisecond: a deadline that stays in the past must not spin.
        at = max(deadline, self.now + LEAST_WAIT_S)
        if self._timer is None or at < self._timer_at:
            self._set_timer(at)

    def _set_timer(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        # Kept because uvloop returns handles without `when` if the instant passes meanwhile.
        self._timer_at = at
        self._timer = asyncio.get_running_loop().call_at(at, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self.now - self._timer_at > STALL_S:
            # The loop was held up (a heavy import, a suspended laptop): what has arrived meanwhile
            # is read first, or this node would take its own absence for that of the others.
            self._set_timer(self.now + CATCH_UP_S)
            return
        try:
            self.perform(self._session.expire(now=self.now))
        except EchoError as error:
            self.stop("failed", error)
        except Exception as error:
            self.log.exception("internal error")
            self.stop("failed", error)

    async def wait_until(self, is_done: Callable[[], bool], *, within_s: float) -> bool:
        """Look every few milliseconds until `is_done`; return False if it takes too long.

        For the few waits at the end of a node, whose conditions live in the session, which knows
        no events.
        """
        give_up_at = self.now + within_s
        while not is_done():
            if self.now >= give_up_at:
                return False
            await asyncio.sleep(0.05)
        return True
