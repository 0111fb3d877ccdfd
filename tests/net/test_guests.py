"""Tests of guests: connections with the key of viewers, beside those of nodes."""

from __future__ import annotations

import asyncio
import functools
import socket

import pytest

from echo.net.admission import MAX_GUEST_BYTES, AcceptedConnections
from echo.net.channel import BULK_ASK
from echo.net.curve import CurveKeys
from echo.net.listener import MAX_GUEST_UNSENT_BYTES
from echo.net.transport import Connected, DialFailed, Disconnected, Received, TransportEvent
from echo.net.zmq import ZmqTransport
from tests.net import conftest
from tests.net.conftest import Run
from tests.net.test_zmq_curve import ANY_PORT, OPTIONS, SECRET, SERVER, worker

VIEW, OPERATE = b"v" * 16, b"o" * 16
LEARNER = CurveKeys.of_learner(SERVER, SECRET, {"view": VIEW, "operate": OPERATE})

opened = functools.partial(conftest.opened, options=OPTIONS)


def guest(secret: bytes = VIEW) -> CurveKeys:
    return CurveKeys.of_guest(secret, SERVER.public)


async def until(transport: ZmqTransport, kind: type[TransportEvent]) -> TransportEvent:
    """Return the next event of this kind."""
    while True:
        for event in await transport.receive():
            if isinstance(event, kind):
                return event


async def known(listener: ZmqTransport, dialler: ZmqTransport) -> tuple[str, str, str]:
    """Connect; return the ids of both ends, and the name that the listener reports."""
    up = dialler.dial(str(listener.listen_address))
    assert isinstance(await until(dialler, Connected), Connected)
    assert dialler.send(up, [b"hello"])
    connected, received = await listener.receive()
    assert isinstance(connected, Connected)
    assert isinstance(received, Received)
    return up, connected.peer, connected.user


@pytest.mark.parametrize(
    ("keys", "user"),
    [(guest(VIEW), "view"), (guest(OPERATE), "operate"), (worker(), "")],
    ids=["view", "operate", "node"],
)
def test_a_listener_names_the_key_of_each_connection(run: Run, keys: CurveKeys, user: str) -> None:
    async def scenario() -> None:
        async with opened(ANY_PORT, LEARNER) as listener, opened(None, keys) as dialler:
            up, peer, found = await known(listener, dialler)
            assert found == user
            assert listener.send(peer, [b"answer"])
            answer = await until(dialler, Received)
            assert answer == Received(up, [b"answer"])

    run(scenario())


def test_no_other_process_of_the_run_admits_guests(run: Run) -> None:
    async def scenario() -> None:
        relay = CurveKeys.of_node("relay", SECRET)
        async with opened(ANY_PORT, relay) as listener:
            secret = CurveKeys.of_guest(VIEW, relay.server.public)
            async with opened(None, secret) as dialler:
                dialler.dial(str(listener.listen_address))
                failed = await until(dialler, DialFailed)
                assert isinstance(failed, DialFailed)
                assert failed.is_refused
                assert listener.stats().messages_in == 0

    run(scenario())


def test_a_guest_gets_no_bulk_connection(run: Run) -> None:
    async def scenario() -> None:
        async with opened(ANY_PORT, LEARNER) as listener, opened(None, guest()) as dialler:
            up, peer, _ = await known(listener, dialler)
            assert dialler.send(up, [BULK_ASK])
            asked = await until(listener, Received)
            assert asked == Received(peer, [BULK_ASK]), "a message like any other"

    run(scenario())


def test_a_guest_that_does_not_read_costs_little(run: Run) -> None:
    async def scenario() -> None:
        async with opened(ANY_PORT, LEARNER) as listener, opened(None, guest()) as dialler:
            _, peer, _ = await known(listener, dialler)
            status, num_sent = bytes(1 << 20), 0
            while listener.send(peer, [status]):  # nothing is read: the loop has no turn
                num_sent += 1
            # What the kernel has taken does not count.
            assert num_sent << 20 <= 4 * MAX_GUEST_UNSENT_BYTES

    run(scenario())


def test_a_guest_that_is_hung_up_on_is_disconnected(run: Run) -> None:
    async def scenario() -> None:
        async with opened(ANY_PORT, LEARNER) as listener, opened(None, guest()) as dialler:
            _, peer, _ = await known(listener, dialler)
            listener.send(peer, [b"go"])
            listener.hang_up(peer)
            reading = asyncio.ensure_future(listener.receive())
            assert (await until(dialler, Received)).frames == [b"go"]  # type: ignore[union-attr]
            await until(dialler, Disconnected)
            reading.cancel()

    run(scenario())


@pytest.mark.parametrize(
    ("has_guests", "speaks_as", "is_closed"),
    [(True, "guest", True), (True, "stranger", True), (True, "node", False),
     (False, "stranger", False)],
)  # fmt: skip
def test_an_endless_message_is_cut_off_unless_a_node_sends_it(
    has_guests: bool, speaks_as: str, is_closed: bool
) -> None:
    """Frame after frame without an end, which libzmq would keep; heartbeats are no such message."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
    with sender, receiver:
        accepted = AcceptedConnections(9, 1 << 30, idle_bytes_per_s=10.0, has_guests=has_guests)
        accepted.add(receiver.fileno(), now=0.0)
        if speaks_as != "stranger":
            accepted.spoke(receiver.fileno(), is_guest=speaks_as == "guest")
        assert accepted.close_unfinished(now=0.0) == 0
        for _ in range(MAX_GUEST_BYTES // (1 << 14) + 1):
            sender.sendall(bytes(1 << 14))
            receiver.recv(1 << 14, socket.MSG_WAITALL)
        assert accepted.close_unfinished(now=86400.0) == 0, "it may have been idle for a day"
        assert accepted.close_unfinished(now=60.0) == is_closed
