"""The shell around a role: an event loop that carries out the role's decisions.

    transport events, timer, results of model work  ->  role  ->  actions  ->  perform

Only the event loop calls the role, so the role needs no locks. Model work runs in threads
(`threads.py`), which pass their results to the loop. There is one timer. The node resets the timer
only for an earlier deadline. If the timer fires too early, the node sets it again.

An unexpected exception ends the node, because a half-failed node would do more harm. An exception
during the handling of a peer's message drops only this peer, which may join again. Otherwise one
malformed message could stop the fleet.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import re
import secrets
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from typing import Any

from echo import __version__
from echo.config.memory.budget import read_machine
from echo.config.schema import (
    NetworkSection,
    PricedSection,
    RelaySection,
    RentedSection,
    WorkerSection,
)
from echo.core.bounds import MAX_MESSAGE_BYTES, MAX_PAYLOAD_BYTES
from echo.core.errors import (
    EchoError,
    ProtocolError,
    RemoteProtocolError,
    StorageError,
    TransportError,
)
from echo.core.price import Price
from echo.core.rollout import KEEP_VERSIONS
from echo.core.timers import LOG_PERIOD_S, OncePerMinute
from echo.core.units import one_line
from echo.net.curve import CurveKeys
from echo.net.kernel import descriptor_limit, most_sockets, read_kernel, slow_settings
from echo.net.transport import (
    Connected,
    DialFailed,
    Disconnected,
    Received,
    Transport,
    TransportOptions,
    is_loopback,
    parse_key,
    with_key,
)
from echo.net.zmq import ZmqTransport
from echo.roles.joining import NodeSettings
from echo.roles.node import DialingRole, Leaving, Role, Started
from echo.runtime.disk_store import STORE_SHARE, MemoryStore
from echo.runtime.event_log import EventLog
from echo.runtime.identity import JoinSource
from echo.runtime.threads import ThreadPools, Threads
from echo.weights.broadcast import Broadcast
from echo.weights.store.memory import VersionStore
from echo.wire.actions import Action, Dial, HangUp, Note, Send, Stop, Work
from echo.wire.codec import Frame, describe, is_public
from echo.wire.seals import SealKeys

INTERRUPTED = "interrupted"
"""The reason that `run` returns after an operator's interrupt."""
STALL_S = 0.5
"""If a timer fires more than this many seconds late, the loop was blocked."""
CATCH_UP_S = 0.2
"""After the loop was blocked, messages are read for this many seconds before deadlines are checked.
"""
LEAST_WAIT_S = 0.001
"""Shortest delay of a timer, seconds."""
MAX_WORKERS = 8
"""Largest number of threads that decode deltas and write chunks. Each thread handles some GB/s."""
LINGER_S = 2.0
"""Seconds in which a node sends its last messages after its work has ended."""


class Topics:
    """Logs the first note on a topic. Further notes are counted and logged once a minute."""

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._logged_at: dict[str, float] = {}
        self._waiting: dict[str, tuple[Note, int]] = {}

    def log(self, note: Note, *, now: float) -> None:
        """Log a note. If its topic was logged less than LOG_PERIOD_S ago, only count the note."""
        self.log_due(now=now)
        self._waiting.pop(note.ends, None)
        if note.topic in self._logged_at:
            _, number = self._waiting.get(note.topic, (note, 0))
            self._waiting[note.topic] = note, number + 1
            return
        if note.topic:
            self._logged_at[note.topic] = now
        self._write(note, note.text)

    def log_due(self, *, now: float) -> None:
        """Log the number of counted notes on each topic that is due."""
        due = [topic for topic, at in self._logged_at.items() if now >= at + LOG_PERIOD_S]
        for topic in due:
            del self._logged_at[topic]
            if (waiting := self._waiting.pop(topic, None)) is not None:
                self._logged_at[topic] = now
                note, number = waiting
                self._write(note, f"{note.text} ({number} like it in the last minute)")

    def _write(self, note: Note, text: str) -> None:
        level = logging.WARNING if note.level == "warning" else logging.INFO
        self._log.log(level, "%s", text)


class BusyTime:
    """Measures the time in which at least one call is running."""

    def __init__(self) -> None:
        self._num_calls, self._at, self._seconds = 0, 0.0, 0.0

    def begin(self, *, now: float) -> None:
        """Record that a call begins."""
        self._count(now)
        self._num_calls += 1

    def end(self, *, now: float) -> None:
        """Record that a call has ended."""
        self._count(now)
        self._num_calls -= 1

    def take_ms(self, *, now: float) -> int:
        """Return the busy time since the last call of this method, in whole milliseconds."""
        self._count(now)
        milliseconds = int(1000 * self._seconds)
        self._seconds -= milliseconds / 1000
        return milliseconds

    def _count(self, now: float) -> None:
        if self._num_calls:
            self._seconds += now - self._at
        self._at = now


class Node:
    """Runs a role with a transport, and with threads for model work."""

    def __init__(
        self,
        role: Role,
        transport: Transport,
        *,
        threads: Threads | None = None,
        log: logging.Logger,
    ) -> None:
        """Connect a role and a started transport. If `threads` is None, use real threads."""
        self.transport = transport
        self.log = log
        self._role = role
        self._topics = Topics(log)
        self._timer: asyncio.Handle | None = None
        self._timer_at = 0.0
        self._is_catching_up = False
        self._is_reading = False
        self._stopped: asyncio.Future[str] | None = None
        self._num_interrupts = 0
        self._reports = OncePerMinute()
        self.threads = ThreadPools() if threads is None else threads
        self._weights_pool = self.threads.pool("weights", min(MAX_WORKERS, os.cpu_count() or 1))
        self._weights_busy = BusyTime()
        self._tasks: set[asyncio.Task[None]] = set()
        self.at_release: list[Callable[[], None]] = []
        """Functions that are called when the node has ended, for any reason."""
        self.event_log: EventLog | None = None
        """Log of everything that the role receives and returns; None if nothing is logged."""

    # --- overridden by the nodes of each role ----------------------------------------------------

    def on_action(self, action: Action) -> None:
        """Carry out an action that only this kind of role returns."""
        raise TypeError(f"{type(action).__name__} is not for {type(self).__name__}")

    def on_guest(self, peer: str, user: str) -> None:
        """Handle the connection of a guest, such as a viewer. `user` names the guest's key."""

    def before_expire(self) -> None:
        """Update the role's counters before `expire`, which may report them."""

    async def work(self) -> None:
        """Do the work of this kind of node.

        When the method has returned, the node continues to relay until it is stopped.
        """

    async def drain(self) -> None:
        """Finish the work that must not be lost. Called after the first interrupt."""

    def release(self) -> None:
        """Release this kind of node's resources. Called at the node's end, also after an error."""

    # --- running ---------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """The time of the loop's clock, seconds. A role sees no other clock."""
        return asyncio.get_running_loop().time()

    async def run(self) -> str:
        """Run the node until it is stopped, and return the reason of its end.

        Raises:
            EchoError: if the node must end. The message is for the user.
        """
        self._stopped = asyncio.get_running_loop().create_future()
        self.spawn(self._read(), name="transport")
        self.spawn(self.work(), name="work")
        try:
            return await self._stopped
        finally:
            if self._timer is not None:
                self._timer.cancel()
            while self._tasks:  # a task may start another while it ends
                for task in self._tasks:
                    task.cancel()
                # Not `gather`: since Python 3.12 it returns at once if all tasks are done, and the
                # callbacks that remove the tasks from the set would never run.
                await asyncio.wait(self._tasks)
            self.threads.close()
            for release in (self.release, *self.at_release):
                try:
                    release()
                except Exception:
                    # Continue with the other releases, and close the transport, which sends the
                    # node's last messages with the reason for its end.
                    self.log.exception("the node ends, and cannot release something")
            await self.transport.close()

    def interrupt(self) -> None:
        """Stop at the operator's request. The first call starts `drain`; later calls do nothing."""
        self._num_interrupts += 1
        if self._num_interrupts == 1:
            self.log.warning("stopping once unfinished work is safe (again to stop at once)")
            self.spawn(self._drain(), name="drain")

    async def _drain(self) -> None:
        await self.drain()
        self.stop(INTERRUPTED)

    @property
    def has_ended(self) -> bool:
        """Whether the node has ended.

        After the end, the results of the node's threads are no longer needed.
        """
        return self._stopped is not None and self._stopped.done()

    def stop(self, reason: str, error: BaseException | None = None) -> None:
        """Make `run` return `reason`, or raise `error` if `error` is given."""
        if self._stopped is None or self.has_ended:
            return
        if error is not None:
            self._stopped.set_exception(error)
        else:
            self._stopped.set_result(reason)

    def spawn(self, work: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        """Run a coroutine as a task.

        If the task fails, the node ends. If the node ends, the task is cancelled.
        """
        task = asyncio.create_task(self._guard(work), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        # A task that is cancelled before its first step never awaits the work.
        task.add_done_callback(lambda _: work.close())
        return task

    async def _guard(self, work: Awaitable[None]) -> None:
        with self._ending_at_failure():
            await work

    @contextlib.contextmanager
    def _ending_at_failure(self) -> Iterator[None]:
        """If the `with` block raises an error, end the node with this error."""
        try:
            yield
        except EchoError as error:
            self.stop("failed", error)
        except Exception as error:
            self.log.exception("internal error; please report this")
            self.stop("failed", error)

    async def _read(self) -> None:
        role = self._role
        while True:
            events = await self.transport.receive()
            self._is_reading = True
            for event in events:
                if self.event_log is not None:
                    self.event_log.write("received", event, now=self.now)
                match event:
                    case Received() if event.is_public and not is_public(event.frames):
                        self._refuse_public(event)
                    case Received():
                        self.perform(self._receive(event.peer, list(event.frames)))
                    case Connected():
                        self._connected(event)
                    case Disconnected(peer, reason):
                        self.perform(role.disconnected(peer, reason, now=self.now))
                    case DialFailed(peer, reason, is_refused):
                        failed = role.dial_failed(peer, reason, is_refused=is_refused, now=self.now)
                        self.perform(failed)
            self._is_reading = False
            self._finish_turn()

    def _connected(self, event: Connected) -> None:
        """Report a new link to the role if this node dialled it.

        For a guest's link, call `on_guest`. Other peers introduce themselves by their first
        message.
        """
        if event.address is not None:
            self.perform(self._role.connected(event.peer, now=self.now))
        elif event.user:
            self.on_guest(event.peer, event.user)

    def _refuse_public(self, event: Received) -> None:
        text = "dropped an unencrypted message that is no chunk: its sender is no node of this run"
        self._topics.log(Note("warning", text, text), now=self.now)

    def _receive(self, peer: str, frames: list[Frame]) -> list[Action]:
        """Pass a message to the role. If the role raises an exception, drop the sender."""
        try:
            return self._role.receive(peer, frames, now=self.now)
        except Exception as error:
            if isinstance(error, EchoError) and not isinstance(error, ProtocolError):
                raise  # a fault of this node's disk or data
            source, _, kind = describe(frames)
            source = one_line(source or peer)
            text = f"internal error in a {one_line(kind)} from {source}: closing its link"
            line = self._reports.line(source, kind, f"{text}; please report this", now=self.now)
            if line is not None:
                self.log.exception("%s", line)
            return self._role.expel(peer, frames, now=self.now)

    # --- acting ----------------------------------------------------------------------------------

    def perform(self, actions: Iterable[Action]) -> None:
        """Carry out actions in order, then set the timer.

        During a burst of messages, the timer is set once, after the last message.
        """
        for action in actions:
            if self.event_log is not None:
                self.event_log.write("returned", action, now=self.now)
            match action:
                case Send():
                    self.transport.send(action.peer, action.frames, is_public=action.is_public)
                case Dial():
                    self._dial(action)
                case HangUp():
                    self.transport.hang_up(action.peer)
                case Note():
                    self._topics.log(action, now=self.now)
                case Stop():
                    self.stop(action.reason, action.error)
                case Work():
                    self._work(action)
                case _:
                    self.on_action(action)
        if not self._is_reading:
            self._finish_turn()

    def report(self, event: Any) -> None:
        """Pass an event to the role, and carry out the actions that the role returns."""
        if self.event_log is not None:
            self.event_log.write("reported", event, now=self.now)
        self.perform(self._role.handle(event, now=self.now))

    def _finish_turn(self) -> None:
        self._topics.log_due(now=self.now)
        self._arm()

    def _dial(self, action: Dial) -> None:
        try:
            peer = self.transport.dial(action.address, has_bulk=action.purpose == "weights")
        except TransportError as error:
            # The address comes from another node's message. After a timeout the role tries another
            # address.
            self._topics.log(Note("warning", str(error), f"dial {action.address}"), now=self.now)
        else:
            self._role.dialled(action.address, action.purpose, peer)

    def _work(self, work: Work) -> None:
        self._weights_busy.begin(now=self.now)
        finished = self._weights_pool.run(work.run)
        finished.add_done_callback(functools.partial(self._on_finished, work))

    def _on_finished(self, work: Work, future: asyncio.Future[str]) -> None:
        self._weights_busy.end(now=self.now)
        if self.has_ended or future.cancelled():
            return
        with self._ending_at_failure():
            fault = future.result()
            if self.event_log is not None:
                self.event_log.write("worked", work, now=self.now, result=fault)
            self.perform(self._role.worked(work, fault, now=self.now))

    def _arm(self) -> None:
        deadline = self._role.deadline
        if deadline is None or self._stopped is None or self.has_ended:
            return
        # At least a millisecond ahead: a deadline that stays in the past must not spin the loop.
        at = max(deadline, self.now + LEAST_WAIT_S)
        if self._timer is None or at < self._timer_at:
            self._set_timer(at)

    def _set_timer(self, at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        # Stored here because a uvloop handle has no `when` if the time passes meanwhile.
        self._timer_at = at
        self._timer = asyncio.get_running_loop().call_at(at, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        is_late = self.now - self._timer_at > STALL_S
        if is_late and not self._is_catching_up:
            # The loop did not run (a heavy import, a suspended laptop). Read messages that have
            # arrived meanwhile first; otherwise the node would mistake its own pause for the
            # silence of its peers. Wait only once, since otherwise a node on an overloaded machine
            # would never send a heartbeat.
            self._is_catching_up = True
            self._set_timer(self.now + CATCH_UP_S)
            return
        self._is_catching_up = False
        with self._ending_at_failure():
            self.before_expire()
            self.perform(self._role.expire(now=self.now))

    async def wait_until(self, is_done: Callable[[], bool], *, within_s: float) -> bool:
        """Call `is_done` every 50 ms until it returns true, at most for `within_s` seconds.

        Return whether it has returned true. This method is used at the end of a node, to wait for
        conditions in the role's state.
        """
        give_up_at = self.now + within_s
        while not is_done():
            if self.now >= give_up_at:
                return False
            await asyncio.sleep(0.05)
        return True


# --- Nodes that dial out: recovery of stored versions, and their goodbye ---


class DialingNode(Node):
    """The node of a relay or worker, which dials the learner."""

    def __init__(
        self,
        role: DialingRole,
        transport: Transport,
        *,
        version_store: MemoryStore | None = None,
        threads: Threads | None = None,
        log: logging.Logger,
    ) -> None:
        """Connect role, transport and threads as `Node` does.

        If `version_store` is None, versions are kept in memory without a size limit.
        """
        super().__init__(role, transport, threads=threads, log=log)
        self.role = role
        self.version_store = version_store

    def before_expire(self) -> None:
        """Update the counter of the time spent on decoding and writing weights.

        Heartbeats report this counter.
        """
        self.role.counters.add("weights/busy_ms", self._weights_busy.take_ms(now=self.now))

    async def work(self) -> None:
        """Make the role dial the learner. All other work follows from actions."""
        self.report(Started())

    async def recover(self) -> None:
        """Read the versions that an earlier process stored, and offer them to the broadcast."""
        version_store, broadcast = self.version_store, self.role.broadcast
        if version_store is None:
            return
        files = self.threads.pool("recovery")
        for saved in await files.run(version_store.recover, broadcast.trust.run_id):
            try:
                manifest = broadcast.trust.manifest(saved.version, saved.signed_manifest)
                has_chunk = await files.run(version_store.verify_held, manifest, saved.storage)
            except (RemoteProtocolError, StorageError) as error:
                self.log.warning("dropped %s, which was left here: %s", saved.version, error)
                version_store.drop(saved.version)
                continue
            text = "found %s: %d of %d chunks are right"
            self.log.info(text, saved.version, sum(has_chunk), manifest.num_chunks)
            frame, storage = saved.signed_manifest, saved.storage
            self.perform(broadcast.recover(saved.version, frame, storage, has_chunk, now=self.now))

    def release(self) -> None:
        """Close the version store. On disk, its versions stay for the next process."""
        if self.version_store is not None:
            self.version_store.close()

    def stop(self, reason: str, error: BaseException | None = None) -> None:
        """End `run`. If an error is given, first send it to the learner in a Goodbye."""
        try:
            if error is not None and not self.has_ended:
                self.report(Leaving(str(error), has_failed=True))
        finally:
            super().stop(reason, error)

    async def drain(self) -> None:
        """Send Goodbye, so that no node waits for this node."""
        self.role.is_leaving = True
        self.report(Leaving("stopped by its operator"))


# --- Set-up that all roles share: from the configuration to a node's transport and role ---


_log = logging.getLogger(__name__)

MAX_ASSET_BYTES = MAX_PAYLOAD_BYTES
"""Largest size of a file that a worker may inherit. The largest tokenizers have some 35 MB."""
MAX_STRANGERS = 4096
"""Largest number of connections that have not sent a message yet.

If a quarter of the limit of open files is lower, this quarter is used.
"""
FIRST_WINDOW_CHUNKS = 4
"""Number of chunks that a child requests ahead until the rate of its link is measured.

With several chunks, the next chunk is already requested while a chunk is sent.
"""
MAX_FIRST_WINDOW_BYTES = 2 << 20
"""Largest number of bytes that a child requests ahead until the rate of its link is measured.

All these bytes may wait in the queue of a slow uplink: four seconds at 4 Mbit/s. The broadcasts in
bench/results were measured with this bound.
"""


async def start_transport(
    network: NetworkSection,
    listen: str | None,
    keys: CurveKeys | None = None,
    *,
    listens_later: bool = False,
) -> ZmqTransport:
    """Return a started ZeroMQ transport with the configuration's bounds, bound to `listen`.

    If `listen` is None, the transport only dials. If `listens_later` is true, the port accepts
    connections only after a call of the transport's `listen`. If `keys` is None, links are not
    encrypted.

    Raises:
        TransportError: if the address is in use or does not belong to this machine.
    """
    options = TransportOptions(
        max_message_bytes=MAX_MESSAGE_BYTES,
        max_unsent_bytes=2 * MAX_MESSAGE_BYTES,
        heartbeat_s=network.heartbeat_s,
        dead_after_s=network.dead_after_s,
        max_strangers=min(MAX_STRANGERS, descriptor_limit() // 4),
        max_bulk_connections=most_sockets(read_kernel()),
    )
    transport = ZmqTransport(listen, options, keys)
    await (transport.bind() if listens_later else transport.start())
    if keys is None and listen is not None and not is_loopback(listen):
        _log.warning(
            "security.curve is false: any host that reaches %s can read the weights and join",
            listen,
        )
    return transport


def warn_of_kernel(*addresses: str | None, profile: str, log: logging.Logger) -> None:
    """Log the kernel settings that slow down links with a long delay, in one line.

    If all links stay on this machine, nothing is logged. For profile "wan" the line is a warning.
    """
    if all(address is None or is_loopback(address) for address in addresses):
        return
    level = logging.WARNING if profile == "wan" else logging.INFO
    line = slow_settings(read_kernel())
    if line is not None:
        log.log(level, "%s", line)


def make_broadcast(
    node_id: str,
    network: NetworkSection,
    version_store: VersionStore | None = None,
    *,
    keep_versions: int = KEEP_VERSIONS,
) -> Broadcast:
    """Return a node's part in the broadcast, with the configuration's bounds.

    The learner receives no versions, so its `version_store` is None. The node keeps `keep_versions`
    images. In addition, it keeps the images that its children are fetching.
    """
    return Broadcast(
        node_id=node_id,
        window_bytes=min(FIRST_WINDOW_CHUNKS * network.chunk_bytes, MAX_FIRST_WINDOW_BYTES),
        # A healthy parent sends a chunk, or reports that it waits, within one or two heartbeats.
        stall_s=max(0.5, network.heartbeat_s),
        keep_versions=keep_versions,
        version_store=version_store,
    )


def node_name(role: str, given: str | None) -> str:
    """Return the given name. Without one, return a unique name made from the role and the host."""
    if given is not None:
        return given
    host = re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname())[:24] or "host"
    return f"{role}-{host}-{secrets.token_hex(2)}"


def worker_dir(run_dir: Path, node_id: str) -> Path:
    """Return the directory in which a worker keeps its own files."""
    return run_dir / "workers" / node_id


def advertised(listen: str | None, advertise: str | None) -> str | None:
    """Return the address at which other nodes can dial this node; None if there is none.

    A node that listens on a wildcard address needs `advertise`, because other nodes cannot dial a
    wildcard. `listen` is the transport's address. If `listen` has a server key, so has the result.
    """
    if listen is not None and advertise is not None:
        key = parse_key(listen)
        return advertise if key is None else with_key(advertise, key)
    if listen is None or re.match(r"^tcp://(\*|0\.0\.0\.0|\[::\]):", listen):
        return advertise
    return listen


def new_seal_keys() -> SealKeys:
    """Return a new key pair with which this process seals its messages (echo/wire/seals.py)."""
    return SealKeys(secrets.token_bytes(32))


def node_settings(
    section: RelaySection | WorkerSection,
    network: NetworkSection,
    join: JoinSource,
    listen: str | None,
    *,
    log: logging.Logger,
) -> NodeSettings:
    """Return the settings of a relay's or worker's role.

    A warning is logged if other nodes cannot dial this node.
    """
    role = join.role
    advertise = advertised(listen, section.advertise)
    if listen is not None and advertise is None:
        log.warning(
            "%s.listen is a wildcard and %s.advertise is not set: no node can be sent "
            "here to fetch weights; set it to the address at which others reach this %s",
            *3 * (role,),
        )
    return NodeSettings(
        node_id=node_name(role, section.name),
        role=role,
        incarnation=secrets.token_hex(8),
        addresses=join.addresses(),
        advertise=advertise,
        echo_version=__version__,
        reconnect_for_s=network.reconnect_for_s,
        max_image_bytes=int(STORE_SHARE * read_machine().host_bytes),
        digests={},
        seal_keys=new_seal_keys(),
        heartbeat_s=network.heartbeat_s,
        dead_after_s=network.dead_after_s,
        fingerprint=join.fingerprint(),
        region=network.region,
        price_per_gb=network.price_per_gb,
        price=stated_price(section),
    )


def stated_price(section: PricedSection) -> Price:
    """Return the cost of a node's machine and traffic, as configured."""
    return Price(
        per_h=section.price_per_h,
        per_gb=section.price_per_gb,
        losses_per_h=section.losses_per_h if isinstance(section, RentedSection) else 0.0,
    )
