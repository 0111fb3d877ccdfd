from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from echo.protocol.codec import encode
from echo.protocol.messages import Greet
from echo.runtime.kernel import descriptor_limit, raise_descriptor_limit
from echo.runtime.links import RESERVED_DESCRIPTORS, Strangers
from echo.runtime.transport import Connected, Received, TransportOptions, parse_address
from echo.runtime.transport_zmq import ZmqTransport

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def limit() -> Iterator[tuple[int, int]]:
    """The limit of open files, put back afterwards."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_soft_limit_is_raised_and_never_lowered(limit: tuple[int, int]) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limit[1]))
    assert raise_descriptor_limit(300) == descriptor_limit() == 300
    assert raise_descriptor_limit(260) == 300
    assert raise_descriptor_limit(2**40) == resource.getrlimit(resource.RLIMIT_NOFILE)[1]


@pytest.fixture
def pairs() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    """Connections, both ends of each."""
    made = [socket.socketpair() for _ in range(3)]
    for _, theirs in made:
        theirs.setblocking(False)
    yield made
    for ours, theirs in made:
        ours.close()
        theirs.close()


Pairs = list[tuple[socket.socket, socket.socket]]


def is_open(theirs: socket.socket) -> bool:
    try:
        return theirs.recv(1) != b""
    except BlockingIOError:
        return True


def test_the_oldest_who_said_nothing_is_closed(pairs: Pairs) -> None:
    strangers = Strangers(1)
    for ours, _ in pairs:
        strangers.add(ours.fileno())
    strangers.discard(pairs[1][0].fileno())  # has spoken
    assert strangers.close_excess() == 1
    assert [is_open(theirs) for _, theirs in pairs] == [False, True, True]
    assert strangers.close_excess() == 0
    strangers.close()


def test_a_descriptor_that_is_anothers_by_now_is_left_alone(pairs: Pairs) -> None:
    strangers = Strangers(0)
    (gone, _), (other, its_end), _ = pairs
    strangers.add(gone.fileno())
    os.dup2(other.fileno(), gone.fileno())
    assert strangers.close_excess() == 1
    assert is_open(its_end)
    strangers.close()


def test_the_reserve_is_let_go_while_there_are_too_many(pairs: Pairs) -> None:
    strangers = Strangers(0)
    first = os.open(os.devnull, os.O_RDONLY)
    strangers.add(pairs[0][0].fileno())
    strangers.close_excess()
    freed = [os.open(os.devnull, os.O_RDONLY) for _ in range(RESERVED_DESCRIPTORS)]
    assert max(freed) < first, "those that it held"
    for descriptor in (first, *freed):
        os.close(descriptor)


def test_idle_strangers_make_way_and_disturb_nobody() -> None:
    async def scenario() -> None:
        listener = ZmqTransport("tcp://127.0.0.1:0", TransportOptions(max_strangers=8))
        await listener.start()
        address = str(listener.listen_address)
        old, young = ZmqTransport(), ZmqTransport()
        await old.start()
        await young.start()
        peer = old.dial(address)
        assert isinstance((await old.receive())[0], Connected)
        assert old.send(peer, [b"before"])
        [_, first] = await listener.receive()
        assert isinstance(first, Received)
        idle = [socket.create_connection(parse_address(address)) for _ in range(40)]
        for each in idle:
            each.setblocking(False)
        loop = asyncio.get_running_loop()
        for each in idle[:32]:
            while await loop.sock_recv(each, 64):  # until it is closed, after ZMTP's greeting
                pass
        assert listener.stats().closed_strangers == 32
        newcomer = young.dial(address)
        assert isinstance((await young.receive())[0], Connected)
        assert young.send(newcomer, [b"hello"])
        assert old.send(peer, [b"after"])
        heard: list[bytes] = []
        while len(heard) < 2:
            events = await listener.receive()
            heard += [bytes(e.frames[0]) for e in events if isinstance(e, Received)]
        assert sorted(heard) == [b"after", b"hello"]
        for each in idle:
            each.close()
        for transport in (listener, old, young):
            await transport.close()

    asyncio.run(asyncio.wait_for(scenario(), 30))


@pytest.mark.slow
def test_a_relay_survives_more_strangers_than_it_may_have_files(tmp_path: Path) -> None:
    """Its soft limit is 64 and its hard one 128, and 150 connect: it answers who says hello."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = tmp_path / "relay.toml"
    config.write_text(
        f'run = {{name = "r", dir = "{tmp_path}"}}\nsecurity = {{curve = false}}\n'
        f'relay = {{listen = "tcp://127.0.0.1:{port}", connect = ["tcp://127.0.0.1:1"]}}\n'
    )
    command = f"{sys.executable} -m echo.cli.node --role relay --config {config}"
    relay = subprocess.Popen(
        ["sh", "-c", f"ulimit -Sn 64; ulimit -Hn 128; exec {command}"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stderr=subprocess.PIPE,
    )

    async def greet() -> bytes:
        idle = []
        for _ in range(300):
            try:
                idle.append(socket.create_connection(("127.0.0.1", port)))
                break
            except ConnectionRefusedError:
                await asyncio.sleep(0.05)
        idle += [socket.create_connection(("127.0.0.1", port)) for _ in range(150)]
        node = ZmqTransport()
        await node.start()
        peer = node.dial(f"tcp://127.0.0.1:{port}")
        while True:
            for event in await node.receive():
                if isinstance(event, Connected):
                    greeting = Greet(node_id="w", role="worker", purpose="control")
                    node.send(peer, encode(greeting, source="w"))
                if isinstance(event, Received):
                    for each in idle:
                        each.close()
                    await node.close()
                    return bytes(event.frames[0])

    try:
        # Well before the ten seconds after which an unfinished handshake is given up anyway.
        assert b"Greeted" in asyncio.run(asyncio.wait_for(greet(), 25))
    finally:
        relay.terminate()
        _, text = relay.communicate(timeout=30)
    assert relay.returncode == 128 + signal.SIGTERM
    assert b"connections that said nothing" in text
