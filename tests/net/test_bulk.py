"""Bulk connections: what passes, what strangers can do there, and what becomes of a link."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import random
import socket
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
import zmq

from echo.core.bounds import MAX_CONNECTIONS
from echo.core.errors import TransportError
from echo.net import dialler as dialling
from echo.net.admission import MAX_STRANGER_BYTES
from echo.net.channel import (
    BULK_ASK,
    BULK_OFFER,
    BULK_PORT_OFFSET,
    TOKEN_BYTES,
    ZmqChannel,
    ZmqOutbox,
)
from echo.net.curve import CurveKeys
from echo.net.dialler import GREETING_BYTES
from echo.net.listener import Inbound
from echo.net.transport import (
    MAX_PORT,
    Connected,
    DialFailed,
    Disconnected,
    Frame,
    Received,
    TransportEvent,
    TransportOptions,
    parse_address,
    with_key,
)
from echo.net.zmq import ZmqTransport
from tests.net.conftest import Run
from tests.net.test_zmq import link_local, resident_bytes
from tests.net.test_zmq_curve import ANY_PORT, LEARNER, OPTIONS, SERVER, opened, worker

CHUNK = random.Random(1).randbytes(1 << 20)
SMALL: list[Frame] = [b"x" * 200]


class Pair:
    """A parent that listens, and a child that has dialled it."""

    def __init__(self, parent: ZmqTransport, child: ZmqTransport, bulk_port: int) -> None:
        self.parent = parent
        self.child = child
        self.bulk_port = bulk_port
        self.link = child.dial(parent.listen_address or "", has_bulk=True)
        self.heard: list[TransportEvent] = []
        self.at_parent: list[TransportEvent] = []

    @property
    def inbound(self) -> Inbound:
        """The child as its parent knows it, since it connected last."""
        [*_, peer] = [event.peer for event in self.at_parent if isinstance(event, Connected)]
        found = self.parent.find_inbound(peer)
        assert found is not None
        return found

    async def until(self, is_done: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not is_done():  # noqa: ASYNC110, what is waited for has no event
                await asyncio.sleep(0.005)

    async def read(self, transport: ZmqTransport, into: list[TransportEvent]) -> None:
        with contextlib.suppress(TransportError):  # it is closed
            while True:
                into += await transport.receive()

    def received(self) -> list[Received]:
        return [event for event in self.heard if isinstance(event, Received)]

    async def send(self, frames: list[Frame], *, is_public: bool) -> Received:
        """Send from parent to child; return how it came."""
        before = len(self.received())
        assert self.parent.send(self.inbound.peer, frames, is_public=is_public)
        await self.until(lambda: len(self.received()) > before)
        return self.received()[-1]


async def offer_of(parent: ZmqTransport) -> tuple[int, bytes]:
    """Return port and token that a parent offers to a child, which is gone afterwards."""
    async with opened(None, worker(parent.listen_address or "")) as child:
        link = child.dial(parent.listen_address or "")
        await child.receive()
        child.send(link, [BULK_ASK])
        hearing = asyncio.ensure_future(child.receive())
        events = await parent.receive()
        [offer] = await hearing
        assert isinstance(offer, Received)
    while not any(isinstance(event, Disconnected) for event in events):
        events += await parent.receive()
    _, port, token = offer.frames
    return int.from_bytes(port, "big"), bytes(token)


@contextlib.asynccontextmanager
async def pair(options: TransportOptions = OPTIONS) -> AsyncIterator[Pair]:
    async with (
        opened(ANY_PORT, LEARNER, options=options) as parent,
        opened(None, worker(parent.listen_address or ""), options=options) as child,
    ):
        both = Pair(parent, child, (await offer_of(parent))[0])
        readers = [
            asyncio.create_task(both.read(parent, both.at_parent)),
            asyncio.create_task(both.read(child, both.heard)),
        ]
        await both.until(lambda: Connected(both.link, parent.listen_address) in both.heard)
        assert child.send(both.link, [b"greet"])
        await both.until(lambda: any(isinstance(e, Received) for e in both.at_parent))
        await both.until(lambda: len(both.inbound.bulk) > 0)
        yield both
        for reader in readers:
            reader.cancel()


def test_what_is_public_goes_over_the_bulk_connection_and_the_rest_does_not(run: Run) -> None:
    async def scenario() -> None:
        async with pair() as both:
            assert both.at_parent[1:] == [Received(both.at_parent[0].peer, [b"greet"])]
            public = await both.send([b"head", CHUNK], is_public=True)
            assert public == Received(both.link, [b"head", CHUNK], is_public=True)
            private = await both.send([b"head", CHUNK], is_public=False)
            assert private == Received(both.link, [b"head", CHUNK], is_public=False)
            assert both.child.stats().public_messages_in == 1
            # Up it goes over the link, whatever it is: nobody may say anything over there.
            assert both.child.send(both.link, SMALL, is_public=True)
            await both.until(lambda: len(both.at_parent) == 3)
            assert both.at_parent[-1] == Received(both.inbound.peer, SMALL)

    run(scenario())


@pytest.mark.skipif(link_local() is None, reason="no interface has an IPv6 address of its network")
def test_a_parent_can_listen_at_an_address_of_one_network_alone(run: Run) -> None:
    async def scenario() -> None:
        async with (
            opened(f"tcp://[{link_local()}]:0", LEARNER) as parent,
            opened(None, worker(parent.listen_address or "")) as child,
        ):
            link = child.dial(parent.listen_address or "")
            assert await child.receive() == [Connected(link, parent.listen_address)]
            assert parent.bulk_port

    run(scenario())


@pytest.mark.parametrize(("keys", "has_bulk"), [(LEARNER, False), (None, True)])
def test_links_without_keys_and_those_that_do_not_ask_have_none(
    run: Run, keys: CurveKeys | None, has_bulk: bool
) -> None:
    async def scenario() -> None:
        async with (
            opened(ANY_PORT, keys) as parent,
            opened(None, keys and worker(parent.listen_address or "")) as child,
        ):
            link = child.dial(parent.listen_address or "", has_bulk=has_bulk)
            assert await child.receive() == [Connected(link, parent.listen_address)]
            child.send(link, [b"greet"])
            events: list[TransportEvent] = []
            while len(events) < 2:
                events += await parent.receive()
            assert events[1] == Received(events[0].peer, [b"greet"])
            assert parent.send(events[0].peer, SMALL, is_public=True)
            assert await child.receive() == [Received(link, SMALL)]

    run(scenario())


@pytest.mark.parametrize("keys", [None, worker()], ids=["plain", "encrypts"])
def test_a_node_that_dials_the_port_of_weights_is_told_so(run: Run, keys: CurveKeys | None) -> None:
    async def scenario() -> None:
        async with pair() as both, opened(None, keys) as dialler:
            address = f"tcp://127.0.0.1:{both.bulk_port}"
            if keys is not None:
                address = with_key(address, SERVER.public)
            dialler.dial(address)
            [told] = await dialler.receive()
            assert isinstance(told, DialFailed)
            assert told.is_refused
            port = f"name the one on which it listens, as a rule {both.bulk_port - 1000}"
            assert "is the port on which a node sends weights" in told.reason
            assert port in told.reason

    run(scenario())


# --- strangers ------------------------------------------------------------------------------------


def raw_greeting(mechanism: bytes) -> bytes:
    return b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)


def hello(token: bytes) -> bytes:
    body = b"\x05HELLO\x04bulk" + bytes([len(token)]) + token
    return b"\x04" + bytes([len(body)]) + body


READY = b"\x04\x1c\x05READY\x0bSocket-Type" + (6).to_bytes(4, "big") + b"DEALER"
MORE = b"\x01\x01x"
"""A frame of one byte, with more to come."""
STRANGERS = {
    "bytes of nothing": random.Random(2).randbytes(1 << 16),
    "no token": raw_greeting(b"NULL") + READY + MORE * 20_000,
    "the oldest protocol": b"\x01\x00" + b"\x02\x01x" * 20_000,
    "frames before any token": raw_greeting(b"PLAIN") + MORE * 20_000,
    "a token that is none": raw_greeting(b"PLAIN") + hello(b"t" * 32) + MORE * 20_000,
    "a command of 8 EiB": raw_greeting(b"PLAIN") + b"\x06" + (1 << 62).to_bytes(8, "big"),
    "a command of 300 bytes": raw_greeting(b"PLAIN")
    + b"\x06"
    + (300).to_bytes(8, "big")
    + bytes(300),
}


async def closes(port: int, data: bytes) -> int:
    """Send bytes to a port; return how many came back until the other side closed."""
    loop = asyncio.get_running_loop()
    with socket.socket() as raw:
        raw.setblocking(False)
        await loop.sock_connect(raw, ("127.0.0.1", port))
        num_bytes = 0
        with contextlib.suppress(ConnectionError):
            if data.startswith(b"\xff"):  # the other side is greeted first, and greets
                await loop.sock_sendall(raw, data[:GREETING_BYTES])
                while num_bytes < GREETING_BYTES:
                    part = await loop.sock_recv(raw, GREETING_BYTES)
                    if not part:
                        return num_bytes
                    num_bytes += len(part)
                data = data[GREETING_BYTES:]
            sending = asyncio.create_task(loop.sock_sendall(raw, data))
            try:
                while part := await loop.sock_recv(raw, 1 << 16):
                    num_bytes += len(part)
            finally:
                sending.cancel()
                with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                    await sending
        return num_bytes


@pytest.mark.parametrize("kind", STRANGERS)
def test_a_stranger_is_heard_by_nobody_and_closed(run: Run, kind: str) -> None:
    async def scenario() -> None:
        async with pair() as both:
            # No more than greeting, and an error: nothing of what a member is sent.
            assert await closes(both.bulk_port, STRANGERS[kind]) < 200
            assert len(both.at_parent) == 2
            assert (await both.send([b"head", CHUNK], is_public=True)).is_public

    run(scenario())


def test_strangers_make_a_node_hold_nothing(run: Run) -> None:
    async def scenario() -> None:
        async with pair() as both:
            flood = raw_greeting(b"PLAIN") + MORE * 400_000
            before = 0
            for _ in range(4):
                await asyncio.gather(*[closes(both.bulk_port, flood) for _ in range(10)])
                before = before or resident_bytes()
            # 12 million frames of a byte, which take 64 bytes each where they are kept.
            assert resident_bytes() - before < 96 << 20
            assert len(both.at_parent) == 2

    run(scenario())


def test_silent_strangers_are_bounded_and_make_way(
    run: Run,
) -> None:
    few = dataclasses.replace(OPTIONS, max_strangers=8)

    async def scenario() -> None:
        async with pair(few) as both:
            with contextlib.ExitStack() as held:
                for _ in range(40):
                    raw = socket.create_connection(("127.0.0.1", both.bulk_port))
                    held.enter_context(contextlib.closing(raw))
                await both.until(lambda: both.parent.stats().closed_strangers >= 32)
                assert (await both.send([b"head", CHUNK], is_public=True)).is_public

    run(scenario())


def test_a_long_link_has_several_bulk_connections_and_the_emptiest_is_taken(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dialling, "num_connections", lambda rtt_s, *, most: most)

    async def scenario() -> None:
        async with pair(dataclasses.replace(OPTIONS, max_bulk_connections=3)) as both:
            await both.until(lambda: len(both.inbound.bulk) == 3)
            assert len(set(both.inbound.tokens)) == 3
            given: Counter[ZmqOutbox] = Counter()

            def send(outbox: ZmqOutbox, frames: Sequence[bytes], num_bytes: int) -> bool:
                given[outbox] += 1
                return sent(outbox, frames, num_bytes)

            # As if the kernel took nothing: it may empty the first before the second is asked.
            sent = ZmqOutbox.send
            with monkeypatch.context() as patched:
                patched.setattr(ZmqOutbox, "send", send)
                patched.setattr(ZmqOutbox, "unsent_bytes", property(given.__getitem__))
                for _ in range(12):
                    assert both.parent.send(both.inbound.peer, [b"head", CHUNK], is_public=True)
            assert [given[outbox] for outbox in both.inbound.bulk] == [4, 4, 4]
            await both.until(lambda: len(both.received()) == 12)
            assert both.child.stats().public_messages_in == 12

    run(scenario())


def test_a_token_is_good_for_one_connection_of_a_link_that_stands(run: Run) -> None:
    async def scenario() -> None:
        async with pair() as both:
            [used] = both.inbound.tokens
            assert len(used) == 2 * TOKEN_BYTES
            # Replayed, by who has read it on the way.
            assert await closes(both.bulk_port, raw_greeting(b"PLAIN") + hello(used) + MORE) < 200
            assert (await both.send([b"head", CHUNK], is_public=True)).is_public
            # One that was handed out and not used, whose link is gone.
            async with opened(None, worker(both.parent.listen_address or "")) as other:
                link = other.dial(both.parent.listen_address or "")
                await other.receive()
                other.send(link, [BULK_ASK])
                [offer] = await other.receive()
                assert isinstance(offer, Received)
                unused = bytes(offer.frames[2])
                for _ in range(2 * MAX_CONNECTIONS):  # no more than that are handed out
                    other.send(link, [BULK_ASK])
                peer = both.inbound.peer
                await both.until(lambda: len(both.inbound.tokens) == MAX_CONNECTIONS)
                assert unused in both.inbound.tokens
            await both.until(lambda: both.parent.find_inbound(peer) is None)
            assert await closes(both.bulk_port, raw_greeting(b"PLAIN") + hello(unused) + MORE) < 200

    run(scenario())


def test_a_member_says_nothing_over_a_bulk_connection(run: Run) -> None:
    """Not even somebody with a good token makes anybody read, or take, what it sends there."""

    async def scenario() -> None:
        async with pair() as both:
            bulk = both.child._peers[both.link]._bulk[0].channel  # type: ignore[union-attr]
            assert isinstance(bulk, ZmqChannel)
            for _ in range(10):
                bulk.socket.send(b"listen to me", zmq.NOBLOCK)
            await both.until(lambda: both.parent.stats().discarded_messages == 10)
            assert len(both.at_parent) == 2
            bulk.socket.send(bytes(MAX_STRANGER_BYTES + 1), zmq.NOBLOCK)
            # Too long: it is closed, and with it the link, which is dialled anew.
            await both.until(lambda: any(isinstance(e, Disconnected) for e in both.heard))

    run(scenario())


# --- links and their bulk connections -------------------------------------------------------------


def test_a_link_whose_bulk_connection_ends_is_dialled_anew(run: Run) -> None:
    async def scenario() -> None:
        async with pair() as both:
            old = both.inbound
            listener, both.parent.bulk_listener = both.parent.bulk_listener, None
            assert listener is not None
            listener.close(0)
            await both.until(lambda: any(isinstance(e, Disconnected) for e in both.heard))
            await both.until(lambda: len([e for e in both.heard if isinstance(e, Connected)]) == 2)
            assert both.child.send(both.link, [b"greet"])
            await both.until(
                lambda: any(isinstance(e, Received) and e.peer != old.peer for e in both.at_parent)
            )
            assert both.parent.find_inbound(old.peer) is None
            # Nobody listens there any more: it goes without.
            assert not (await both.send(SMALL, is_public=True)).is_public

    run(scenario())


def test_what_cannot_have_a_bulk_connection_goes_over_the_link(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = server.getsockname()[1]

    async def scenario() -> None:
        async with opened(ANY_PORT, LEARNER) as parent:
            parent.bulk_port = closed
            async with opened(None, worker(parent.listen_address or "")) as child:
                link = child.dial(parent.listen_address or "", has_bulk=True)
                heard = await child.receive()
                assert heard == [Connected(link, parent.listen_address)]
                child.send(link, [b"greet"])
                events: list[TransportEvent] = []
                while len(events) < 2:
                    events += await parent.receive()
                while not caplog.records:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(0.05):
                            heard += await child.receive()
                parent.send(events[0].peer, SMALL, is_public=True)
                assert await child.receive() == [Received(link, SMALL)]

    with caplog.at_level(logging.WARNING):
        run(scenario())
    assert f"port {closed} of tcp://127.0.0.1" in caplog.text
    assert SERVER.secret.hex() not in caplog.text


@pytest.mark.parametrize(
    "offer",
    [
        [],
        [b"\x1e\x61"],
        [b"\0\0", b"t"],
        [bytes(64), b"t"],
        [b"\x1e\x61", b""],
        [b"\x1e\x61", bytes(300)],
    ],
    ids=["nothing", "no token", "no port", "no number", "an empty token", "a long token"],
)
def test_an_offer_that_is_none_ends_nothing(run: Run, offer: list[bytes]) -> None:
    async def scenario() -> None:
        async with (
            opened(ANY_PORT, LEARNER) as parent,
            opened(None, worker(parent.listen_address or "")) as child,
        ):
            parent.bulk_port = 0  # it offers nothing by itself
            link = child.dial(parent.listen_address or "", has_bulk=True)
            assert await child.receive() == [Connected(link, parent.listen_address)]
            [connected] = await parent.receive()  # as the child asks for a bulk connection
            for frames in ([BULK_OFFER, *offer], SMALL):
                assert parent.send(connected.peer, frames)
            assert await child.receive() == [Received(link, SMALL)]

    run(scenario())


def test_the_bulk_port_follows_the_listeners_own(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        for _ in range(20):  # until neither port is taken by somebody else
            with socket.create_server(("127.0.0.1", 0)) as server:
                port = server.getsockname()[1]
            address = f"tcp://127.0.0.1:{port}"
            with contextlib.suppress(Exception):
                async with opened(address, LEARNER) as first:
                    if (await offer_of(first))[0] == port + BULK_PORT_OFFSET:
                        break
        else:
            raise AssertionError("the port was never so much above")
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1] - BULK_PORT_OFFSET
            async with opened(f"tcp://127.0.0.1:{port}", LEARNER) as second:
                taken = server.getsockname()[1]
                bulk_port, _ = await offer_of(second)
                assert bulk_port not in (0, taken)
                assert f"port {taken} is taken" in caplog.text
                assert f"they do at port {bulk_port}" in caplog.text

    run(scenario())


def test_a_listener_near_the_last_port_says_why_it_has_another_bulk_port(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        for port in range(MAX_PORT, MAX_PORT - BULK_PORT_OFFSET, -1):
            with contextlib.suppress(TransportError):  # somebody else has the port
                async with opened(f"tcp://127.0.0.1:{port}", LEARNER) as node:
                    bulk_port, _ = await offer_of(node)
                break
        assert f"port {port + BULK_PORT_OFFSET} does not exist, at which" in caplog.text
        assert f"they do at port {bulk_port}; open that one, or listen at" in caplog.text

    run(scenario())


# --- messages without an end ----------------------------------------------------------------------


FRAME = b"\x03" + (1 << 16).to_bytes(8, "big") + bytes(1 << 16)
"""A long frame after which more of its message follows."""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of others does not count")
def test_a_message_of_many_frames_is_bounded_as_one_frame_is(run: Run) -> None:
    few = dataclasses.replace(OPTIONS, max_message_bytes=1 << 20, max_unsent_bytes=4 << 20)

    async def scenario() -> None:
        async with opened(ANY_PORT, None, options=few) as parent, opened(None, None) as child:
            address = parent.listen_address or ""
            heard: list[TransportEvent] = []

            async def hear() -> None:
                while True:
                    heard.extend(await parent.receive())

            hearing = asyncio.create_task(hear())
            reader, writer = await asyncio.open_connection(*parse_address(address))
            writer.write(raw_greeting(b"NULL"))
            await reader.readexactly(GREETING_BYTES)
            writer.write(READY)
            num_sent = 0
            with contextlib.suppress(ConnectionError):
                async with asyncio.timeout(20):
                    while num_sent < 1000 and not reader.at_eof():
                        writer.write(FRAME)
                        await writer.drain()
                        num_sent += 1
                        await asyncio.sleep(0.002)
            # Closed after some two megabytes, of the sixty-five that it would have sent.
            assert num_sent < 500
            assert parent.stats().discarded_messages == 1
            writer.close()
            # Whole messages of the largest size pass, as many as come.
            link = child.dial(address)
            await child.receive()
            for _ in range(5):
                assert child.send(link, [bytes(1 << 19), bytes(1 << 19)])
                await asyncio.sleep(0.05)
            async with asyncio.timeout(20):
                while sum(isinstance(event, Received) for event in heard) < 5:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            hearing.cancel()

    run(scenario())
