"""Encrypted links: who gets in, who is told what, and that strangers hold nothing."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import random
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from echo.core.errors import TransportError
from echo.net.curve import CurveKeys, KeyPair
from echo.net.transport import (
    Connected,
    DialFailed,
    Received,
    TransportEvent,
    TransportOptions,
    parse_address,
    parse_key,
    with_key,
    without_key,
)
from echo.net.zmq import ZmqTransport
from tests.net import conftest
from tests.net.conftest import Run, num_open_files

OPTIONS = TransportOptions(
    # Nobody is found dead because of a busy machine: no heartbeat is missed while a test may run.
    heartbeat_s=100.0,
    dead_after_s=1000.0,
    connect_timeout_s=1.0,
    min_redial_s=0.02,
    max_redial_s=0.1,
    linger_s=0.3,
)
ANY_PORT = "tcp://127.0.0.1:0"
SECRET = b"s" * 16
SERVER = KeyPair.of(b"k" * 32)
LEARNER = CurveKeys.of_learner(SERVER, SECRET)


opened = functools.partial(conftest.opened, options=OPTIONS)


def worker(address: str = "tcp://elsewhere:1", secret: bytes = SECRET) -> CurveKeys:
    """Return a worker's keys whose join string has the address, or one that nobody knows."""
    key = parse_key(address) or SERVER.public
    return CurveKeys.of_node("worker", secret, with_key(address, key))


async def connected(dialler: ZmqTransport, peer: str, address: str) -> None:
    """Wait until a link stands; attempts may fail, and none is refused for good."""
    while (event := (await dialler.receive())[-1]) != Connected(peer, address):
        assert isinstance(event, DialFailed)
        assert not event.is_refused


async def greet(listener: ZmqTransport, dialler: ZmqTransport, address: str) -> None:
    """Dial and say hello; return once it is heard."""
    peer = dialler.dial(address)
    try:
        await connected(dialler, peer, address)
        assert dialler.send(peer, [b"hello"])
        events: list[TransportEvent] = []
        while len(events) < 2:
            events += await listener.receive()
        assert isinstance(events[1], Received)
        assert events[1].frames == [b"hello"]
    finally:
        dialler.hang_up(peer)


def test_what_passes_cannot_be_read_on_the_way(run: Run) -> None:
    async def scenario() -> None:
        seen = bytearray()

        async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while data := await reader.read(1 << 16):
                seen.extend(data)
                writer.write(data)
            writer.close()

        async def tap(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            up, down = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(pump(reader, down), pump(up, writer))

        async with opened(ANY_PORT, LEARNER) as listener, opened(None, worker()) as dialler:
            port = parse_address(str(listener.listen_address))[1]
            server = await asyncio.start_server(tap, "127.0.0.1", 0)
            tapped = with_key(
                f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}", SERVER.public
            )
            await greet(listener, dialler, tapped)
            await asyncio.sleep(0.1)
            server.close()
        assert b"CURVE" in seen
        assert b"hello" not in seen
        assert SECRET not in seen

    run(scenario())


def test_an_address_without_a_key_is_of_a_relay_or_a_known_listener(run: Run) -> None:
    async def scenario(listens: CurveKeys, port_is_known: bool) -> None:
        async with opened(ANY_PORT, listens) as listener:
            address = without_key(str(listener.listen_address))
            named = address.replace("127.0.0.1", "localhost")
            keys = worker(with_key(named if port_is_known else "tcp://other:1", SERVER.public))
            async with opened(None, keys) as dialler:
                await greet(listener, dialler, address)

    relay = CurveKeys.of_node("relay", SECRET, with_key("tcp://a:1", SERVER.public))
    for listens in (LEARNER, relay):
        for port_is_known in (True, False):
            run(scenario(listens, port_is_known))


@pytest.mark.parametrize(
    ("listens", "dials", "says", "counter"),
    [
        (LEARNER, worker(secret=b"x" * 16), "refuses this node.*another run", "refused_clients"),
        (CurveKeys.of_learner(KeyPair.of(b"y" * 32), SECRET), worker(),
         "another key than the address", "failed_handshakes"),
        (None, worker(), "does not encrypt its links", "failed_handshakes"),
        (LEARNER, None, "encrypts its links", "failed_handshakes"),
    ],
    ids=["secret", "server-key", "plain-listener", "plain-dialler"],
)  # fmt: skip
def test_who_does_not_belong_is_kept_out_and_told_why(
    run: Run,
    caplog: pytest.LogCaptureFixture,
    listens: CurveKeys | None,
    dials: CurveKeys | None,
    says: str,
    counter: str,
) -> None:
    told_node: list[TransportEvent] = []

    def refusals() -> list[str]:
        return [e.reason for e in told_node if isinstance(e, DialFailed) and e.is_refused]

    async def scenario() -> None:
        async with opened(ANY_PORT, listens) as listener, opened(None, dials) as dialler:
            address = without_key(str(listener.listen_address))
            if dials is not None:
                address = with_key(address, SERVER.public)
            num_failed = 0
            while num_failed < 3 or len(refusals()) < 3:
                link = dialler.dial(address)  # as a node does that has others to try between
                told_node.extend(await dialler.receive())
                dialler.hang_up(link)
                counts = getattr(listener.stats(), counter), dialler.stats().failed_handshakes
                num_failed = min(counts)
            assert all(isinstance(event, DialFailed) for event in told_node)
            assert listener.stats().messages_in == 0

    with caplog.at_level(logging.WARNING):
        run(scenario())
    told = [record.getMessage() for record in caplog.records]
    assert len([text for text in told if re.search(says, text)]) == 1  # and not once per attempt
    assert all(re.search(says, reason) for reason in refusals())
    at_listener = [text for text in told if "without the secret of this run, from 127." in text]
    assert len(at_listener) == (counter == "refused_clients")


def test_a_keyed_address_is_not_dialled_in_the_clear(run: Run) -> None:
    async def scenario() -> None:
        async with opened() as dialler:
            with pytest.raises(TransportError, match=r"tcp://a:1 is encrypted.*security\.curve"):
                dialler.dial(with_key("tcp://a:1", SERVER.public))

    run(scenario())


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x01\x00" + b"\x06\x00hello" * 3,
        b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(15) + bytes(32),
        b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(47) + b"\x04\xc8\x05HELLO" + bytes(194),
        random.Random(7).randbytes(4096),
    ],
    ids=["silence", "http", "zmtp-1", "greeting", "empty-hello", "random"],
)
def test_a_stranger_is_closed_in_bounded_time(run: Run, garbage: bytes) -> None:
    async def scenario() -> None:
        async with opened(ANY_PORT, LEARNER) as listener, opened(None, worker()) as dialler:
            loop = asyncio.get_running_loop()
            before = num_open_files()
            with socket.create_connection(parse_address(str(listener.listen_address))) as raw:
                raw.setblocking(False)
                await loop.sock_sendall(raw, garbage)
                with contextlib.suppress(ConnectionResetError):
                    while await loop.sock_recv(raw, 4096):
                        pass
            while num_open_files() > before:  # noqa: ASYNC110, nothing tells of it
                await asyncio.sleep(0.01)
            await greet(listener, dialler, str(listener.listen_address))
            assert listener.stats().messages_in == 1

    run(scenario())


def test_a_failed_start_leaves_no_thread_and_no_descriptor(run: Run) -> None:
    async def scenario() -> None:
        async with opened(ANY_PORT, LEARNER) as listener:
            # The loop's own executor may add a thread where the last one has not yet said
            # that it is idle; one of a single thread, made before, cannot.
            asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
            await asyncio.to_thread(int)
            before = num_open_files(), num_threads()
            with pytest.raises(TransportError, match="in use"):
                await ZmqTransport(listener.listen_address, OPTIONS, LEARNER).start()
            # The kernel lists a thread for a moment after it was joined.
            while num_open_files() > before[0] or num_threads() > before[1]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    run(scenario())


def num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))
