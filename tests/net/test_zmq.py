"""The real sockets: kernels, killed processes, garbage, memory."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import ipaddress
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from echo.core.errors import TransportError
from echo.net import dialler as dialling
from echo.net.transport import (
    Connected,
    DialFailed,
    Disconnected,
    Frame,
    Received,
    TransportEvent,
    TransportOptions,
    parse_address,
)
from echo.net.zmq import ZmqTransport
from tests.net import conftest
from tests.net.conftest import Run, each_loop_with_all, num_open_files

OPTIONS = TransportOptions(
    max_message_bytes=1 << 20,
    max_unsent_bytes=4 << 20,
    max_unread_messages=8,
    # Nobody is found dead because of a busy machine: nothing is late while a test may run.
    heartbeat_s=100.0,
    dead_after_s=1000.0,
    connect_timeout_s=100.0,
    min_redial_s=0.02,
    max_redial_s=0.1,
    linger_s=0.3,
)

WATCHFUL = dataclasses.replace(OPTIONS, heartbeat_s=0.2, dead_after_s=3.0)


opened = functools.partial(conftest.opened, options=OPTIONS)


async def one(transport: ZmqTransport) -> object:
    events = await transport.receive()
    assert len(events) == 1, events
    return events[0]


def port_of(transport: ZmqTransport) -> int:
    assert transport.listen_address is not None
    return int(transport.listen_address.rpartition(":")[2])


def connect_raw(transport: ZmqTransport) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port_of(transport)), timeout=60)


def resident_bytes() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def child_process(transport: ZmqTransport, then: str) -> subprocess.Popen[bytes]:
    """Start a process that dials, says hello, and then does something."""
    script = f"""
        import asyncio, time
        from echo.net.transport import TransportOptions
        from echo.net.zmq import ZmqTransport
        async def main():
            transport = ZmqTransport(None, TransportOptions(max_unread_messages=8))
            await transport.start()
            peer = transport.dial({transport.listen_address!r})
            await transport.receive()
            transport.send(peer, [b"hello"])
            {then}
        asyncio.run(main())
    """
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=Path(__file__).parents[2]
    )


async def hello(transport: ZmqTransport) -> str:
    """Wait for the hello of a new inbound peer and return its id."""
    events: list[TransportEvent] = []
    while len(events) < 2:
        events += await transport.receive()
    connected, received = events
    assert isinstance(connected, Connected)
    assert received == Received(connected.peer, [b"hello"])
    return connected.peer


async def linked(dialler: ZmqTransport, listener: ZmqTransport) -> tuple[str, str]:
    """Dial and say hello; return the listener's id at the dialler, and the dialler's there."""
    up = dialler.dial(str(listener.listen_address))
    await one(dialler)
    assert dialler.send(up, [b"hello"])
    return up, await hello(listener)


@pytest.mark.parametrize("address", ["tcp://192.0.2.1:0", "tcp://no.such.host.invalid:0"])
def test_an_address_of_another_machine_cannot_be_bound(run: Run, address: str) -> None:
    async def scenario() -> None:
        transport = ZmqTransport(address, OPTIONS)
        with pytest.raises(TransportError, match="cannot listen on") as caught:
            await transport.start()
        assert address in str(caught.value)
        await transport.close()

    run(scenario())


@pytest.mark.skipif(sys.platform != "linux", reason="other kernels refuse a port that is bound")
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_port_is_refused_to_others_before_its_owner_listens(run: Run, host: str) -> None:
    async def scenario() -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        owner = ZmqTransport(f"tcp://127.0.0.1:{port}", OPTIONS)
        await owner.bind()
        other = ZmqTransport(f"tcp://{host}:{port}", OPTIONS)
        with pytest.raises(TransportError, match=f"on tcp://{host}:{port}: .*choose another port"):
            await other.bind()
        with pytest.raises(ConnectionRefusedError), socket.socket() as early:
            early.connect(("127.0.0.1", port))
        owner.listen()
        async with opened() as dialler:
            dialler.dial(f"tcp://127.0.0.1:{port}")
            assert isinstance(await one(dialler), Connected)
        await owner.close()

    run(scenario())


def test_patience_beyond_what_the_library_counts_is_taken(run: Run) -> None:
    async def scenario() -> None:
        patient = dataclasses.replace(OPTIONS, heartbeat_s=8e8, dead_after_s=8e8)
        async with opened("tcp://127.0.0.1:0", options=patient):
            pass

    run(scenario())


def test_a_port_can_be_taken_again_while_old_connections_linger(run: Run) -> None:
    async def scenario() -> None:
        address = "tcp://127.0.0.1:0"
        for _ in range(2):
            listener = ZmqTransport(address, OPTIONS)
            await listener.start()
            address = f"tcp://127.0.0.1:{port_of(listener)}"
            with socket.create_connection(("127.0.0.1", port_of(listener))):
                await listener.close()  # who closes first leaves the port to TIME_WAIT

    run(scenario())


def test_ipv6_and_names_can_be_dialled(run: Run) -> None:
    async def scenario(listen: str, dial: str) -> None:
        async with opened(listen) as listener, opened() as dialler:
            address = f"{dial}:{port_of(listener)}"
            peer = dialler.dial(address)
            assert await one(dialler) == Connected(peer, address)
            assert dialler.send(peer, [b"hello"])
            await hello(listener)

    run(scenario("tcp://127.0.0.1:0", "tcp://localhost"))
    if (
        not Path("/proc/net/if_inet6").exists()
        or "lo" not in Path("/proc/net/if_inet6").read_text()
    ):
        pytest.skip("this machine has no IPv6 loopback")
    run(scenario("tcp://[::1]:0", "tcp://[::1]"))


@pytest.mark.parametrize("host", ["fe80::1%eth0", "fe80::1%br-lan", "fe80::1%eth0.100"])
def test_an_address_names_the_interface_of_its_network(host: str) -> None:
    assert parse_address(f"tcp://[{host}]:7700") == (host, 7700)


def link_local() -> str | None:
    """Return an address of this machine that needs its interface's name; None if it has none."""
    table = Path("/proc/net/if_inet6")
    for line in table.read_text().splitlines() if table.exists() else []:
        digits, *_, interface = line.split()
        if digits.startswith("fe80"):
            return f"{ipaddress.IPv6Address(int(digits, 16))}%{interface}"
    return None


@pytest.mark.skipif(link_local() is None, reason="no interface has an IPv6 address of its network")
def test_an_address_of_one_network_alone_can_be_dialled(run: Run) -> None:
    async def scenario() -> None:
        async with opened("tcp://[::]:0") as listener, opened() as dialler:
            address = f"tcp://[{link_local()}]:{port_of(listener)}"
            peer = dialler.dial(address)
            assert await one(dialler) == Connected(peer, address)
        async with opened() as dialler:
            reason, _ = await first_failure(dialler, address)
            assert "is closed: nothing listens there" in reason

    run(scenario())


def test_congestion_control_is_chosen_where_it_is_permitted(run: Run) -> None:
    permitted = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text().split()

    async def scenario(name: str) -> None:
        transport = ZmqTransport("tcp://0.0.0.0:0", OPTIONS, congestion_control=name)
        await transport.start()
        with connect_raw(transport) as raw:
            assert raw.getpeername()[1] == port_of(transport)
        await transport.close()

    for name in [*permitted, "nosuchalgorithm"]:
        run(scenario(name))


def hold_up_until_readable(descriptor: int) -> None:
    """Return when something has come of which the loop was not told yet."""
    assert select.select([descriptor], [], [], 60)[0]
    time.sleep(0.01)  # libzmq does not look at its news twice in a millisecond


def test_a_message_whose_wake_up_a_send_has_swallowed_is_received(run: Run) -> None:
    async def scenario() -> None:
        async with opened("tcp://127.0.0.1:0") as listener, opened() as node:
            up, peer = await linked(node, listener)
            node.send(up, [b"again"])
            assert listener.listener is not None
            edge = listener.listener.channel.socket.FD
            hold_up_until_readable(edge)
            assert listener.send(peer, [b"hello to you"])
            assert not select.select([edge], [], [], 0)[0]  # and will not be
            async with asyncio.timeout(10):
                assert await one(listener) == Received(peer, [b"again"])

    run(scenario())


def test_an_oversized_frame_ends_the_senders_connection_only(run: Run) -> None:
    async def scenario() -> None:
        strict = OPTIONS
        loose = TransportOptions(max_message_bytes=8 << 20, min_redial_s=5.0)
        async with (
            opened("tcp://127.0.0.1:0", options=strict) as listener,
            opened(None, options=loose) as rude,
            opened() as polite,
        ):
            up, rude_id = await linked(rude, listener)
            assert rude.send(up, [bytes(strict.max_message_bytes + 1)])
            gone = await one(listener)
            assert isinstance(gone, Disconnected)
            assert gone.peer == rude_id
            assert isinstance(await one(rude), Disconnected)
            await linked(polite, listener)

    run(scenario())


@pytest.mark.slow
@each_loop_with_all
def test_a_peer_that_never_reads_costs_no_memory_beyond_its_bound(run: Run) -> None:
    async def scenario() -> None:
        async with opened("tcp://127.0.0.1:0") as listener:
            with child_process(listener, "time.sleep(60)") as process:
                try:
                    stuck = await hello(listener)
                    before = resident_bytes()
                    accepted_bytes = refused = 0
                    while refused <= 50:
                        chunk = os.urandom(1 << 18)
                        if listener.send(stuck, [chunk]):
                            accepted_bytes += len(chunk)
                        else:
                            refused += 1
                            await asyncio.sleep(0.01)
                    peer = listener.find_inbound(stuck)
                    assert peer is not None
                    waiting = peer.outbox.unsent_bytes
                    assert 0 <= OPTIONS.max_unsent_bytes - waiting < (1 << 18) + 1024
                    # Its own queue and unread messages, plus what the two kernels buffer.
                    assert accepted_bytes < 64 << 20
                    assert resident_bytes() - before < 4 * OPTIONS.max_unsent_bytes
                finally:
                    process.kill()
            gone = await one(listener)
            assert isinstance(gone, Disconnected)
            assert not listener.send(stuck, [b"x"])

    run(scenario())


@pytest.mark.slow
@each_loop_with_all
def test_a_killed_dialler_is_reported_soon(run: Run) -> None:
    async def scenario() -> None:
        async with opened("tcp://127.0.0.1:0") as listener:  # its kernel says so, no heartbeat
            with child_process(listener, "await asyncio.sleep(60)") as process:
                child = await hello(listener)
                process.send_signal(signal.SIGKILL)
            gone = await one(listener)
            assert isinstance(gone, Disconnected)
            assert gone.peer == child
            assert not listener.send(child, [b"x"])

    run(scenario())


@pytest.mark.slow
@each_loop_with_all
def test_a_frozen_peer_lives_as_long_as_its_kernel_but_a_silent_one_does_not(run: Run) -> None:
    async def scenario() -> None:
        async with opened("tcp://127.0.0.1:0", options=WATCHFUL) as listener:
            with child_process(listener, "await asyncio.sleep(60)") as process:
                try:
                    child = await hello(listener)
                    process.send_signal(signal.SIGSTOP)  # its kernel answers TCP, nobody answers us
                    gone = await one(listener)
                    assert isinstance(gone, Disconnected)
                    assert gone.peer == child
                finally:
                    process.kill()

    run(scenario())


@pytest.mark.slow
@each_loop_with_all
def test_a_busy_loop_does_not_make_a_node_look_dead(run: Run) -> None:
    async def scenario() -> None:
        async with opened("tcp://127.0.0.1:0", options=WATCHFUL) as listener:
            busy = "time.sleep(4.5); transport.send(peer, [b'alive']); await asyncio.sleep(60)"
            with child_process(listener, busy) as process:
                try:
                    child = await hello(listener)
                    assert await one(listener) == Received(child, [b"alive"])
                finally:
                    process.kill()

    run(scenario())


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\xff" + bytes(8) + b"\x7f" + bytes(200),
        b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00NULL" + bytes(48) + b"\xff" * 64,
        b"\x01\x00" + b"\x06\x00hello" * 3,
        random.Random(7).randbytes(4096),
    ],
    ids=["http", "greeting-of-zeros", "null-greeting-then-garbage", "zmtp-1", "random"],
)
def test_garbage_does_no_harm(run: Run, garbage: bytes) -> None:
    async def scenario() -> None:
        async with opened("tcp://127.0.0.1:0") as listener, opened() as dialler:
            with connect_raw(listener) as raw, connect_raw(listener):  # one stays silent
                raw.sendall(garbage)
                up, child = await linked(dialler, listener)
            assert dialler.send(up, [b"still"])
            assert await one(listener) == Received(child, [b"still"])
            assert listener.stats().messages_in == 2

    run(scenario())


def test_a_dial_to_something_else_keeps_trying_and_never_connects(run: Run) -> None:
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            async with opened() as dialler:
                peer = dialler.dial(f"tcp://127.0.0.1:{port}")
                loop = asyncio.get_running_loop()
                server.setblocking(False)
                for _ in range(3):
                    raw, _ = await loop.sock_accept(server)
                    raw.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
                    raw.close()
                assert not dialler.send(peer, [b"x"])
                events = await dialler.receive()
                assert all(isinstance(event, DialFailed) for event in events)

    run(scenario())


def raising(error: Exception) -> Callable[..., object]:
    def fail(*_: object, **__: object) -> object:
        raise error

    return fail


async def first_failure(transport: ZmqTransport, address: str) -> tuple[str, bool]:
    """Return what a node is told of the first attempt at an address."""
    peer = transport.dial(address)
    try:
        [failure] = await transport.receive()
    finally:
        transport.hang_up(peer)
    assert isinstance(failure, DialFailed)
    assert failure.peer == peer
    return failure.reason, failure.is_refused


def test_why_nobody_is_reached_is_told_apart(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async def scenario() -> None:
        async with opened() as dialler:
            with socket.socket() as taken:
                taken.bind(("127.0.0.1", 0))  # and does not listen
                closed = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
                reason, is_refused = await first_failure(dialler, closed)
                assert (reason, is_refused) == (
                    f"the port of {closed} is closed: nothing listens there",
                    False,
                )
                for error, text in (
                    (TimeoutError(), "does not answer: the host is off"),
                    (OSError(113, "No route to host"), "cannot be reached: No route to host"),
                ):
                    with monkeypatch.context() as patch:
                        patch.setattr(dialling, "read_greeting", raising(error))
                        assert text in (await first_failure(dialler, closed))[0]
            server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
            tunnel = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            reason, is_refused = await first_failure(dialler, tunnel)
            assert "is no node, or a tunnel whose other end is closed" in reason
            assert not is_refused
            server.close()
            reason, _ = await first_failure(dialler, f"tcp://{'a' * 64}:7700")
            assert re.search("is not known: .*label too long", reason), reason
            unknown = socket.gaierror(-2, "Name or service not known")
            monkeypatch.setattr(socket, "getaddrinfo", raising(unknown))
            reason, _ = await first_failure(dialler, "tcp://lerner:7700")
            assert reason == (
                "the host name of tcp://lerner:7700 is not known: Name or service not known"
            )

    run(scenario())


def test_large_frames_are_not_copied_and_arrive_intact(run: Run) -> None:
    async def scenario() -> None:
        async with opened("tcp://127.0.0.1:0") as listener, opened() as dialler:
            _, child = await linked(dialler, listener)
            storage = memoryview(os.urandom(16 << 18))
            chunks = [storage[i << 18 : (i + 1) << 18] for i in range(16)]
            taken: list[memoryview] = []
            for index in range(64):
                # Refused while the thread that hears what libzmq has sent did not get its turn.
                message: list[Frame] = [index.to_bytes(2, "big"), chunks[index % 16]]
                while not listener.send(child, message):  # noqa: ASYNC110, nothing tells of it
                    await asyncio.sleep(0.001)
                if index % 4 == 3:
                    while len(taken) <= index:
                        for event in await dialler.receive():
                            assert isinstance(event, Received)
                            assert event.frames[0] == len(taken).to_bytes(2, "big")
                            chunk = event.frames[1]
                            assert isinstance(chunk, memoryview)
                            taken.append(chunk)
            assert all(chunk == chunks[index % 16] for index, chunk in enumerate(taken))

    run(scenario())


@pytest.mark.slow
@each_loop_with_all
def test_close_is_bounded_although_a_peer_never_reads(run: Run) -> None:
    async def scenario() -> None:
        listener = ZmqTransport("tcp://127.0.0.1:0", OPTIONS)
        await listener.start()
        with child_process(listener, "time.sleep(60)") as process:
            try:
                stuck = await hello(listener)
                for _ in range(200):
                    listener.send(stuck, [bytes(1 << 19)])
                    await asyncio.sleep(0.002)
                assert listener.stats().refused_sends > 0
                started_at = time.monotonic()
                await listener.close()
                # What it holds would take for ever; the rest is for a busy machine.
                assert time.monotonic() - started_at < OPTIONS.linger_s + 20
            finally:
                process.kill()

    run(scenario())


def test_connections_that_come_and_go_leave_nothing_behind(run: Run) -> None:
    async def scenario() -> None:
        async with opened("tcp://127.0.0.1:0") as listener, opened() as dialler:
            num_descriptors = 0
            seen = set()
            for number in range(20):
                up, child = await linked(dialler, listener)
                seen.add(child)
                dialler.hang_up(up)
                assert isinstance(await one(listener), Disconnected)
                if number == 5:
                    num_descriptors = num_open_files()
            assert len(seen) == 20
            # libzmq closes them in a thread of its own.
            while num_open_files() > num_descriptors + 4:  # noqa: ASYNC110, nothing tells of it
                await asyncio.sleep(0.01)
            assert not any(listener.find_inbound(child) for child in seen)

    run(scenario())
