"""Plain byte stream that bench_broadcast.py compares with.

Two kinds: `source` and `sink` are one raw TCP connection; `giver` and `taker` are the bare data
plane of this project, its transport between a ROUTER and a DEALER with credits, where chunks are
counted but not hashed and not stored. Commands and answers are those of node.py.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import uvloop

from echo.engine import allocator
from echo.net.curve import SECRET_BYTES, CurveKeys, KeyPair
from echo.net.transport import Connected, Received, TransportOptions
from echo.net.zmq import ZmqTransport
from echo.roles.joining import FINGERPRINT_BYTES
from echo.runtime.identity import Join

READ_BYTES = 1 << 20
SOURCE_BYTES = 128 << 20
"""Sent again and again: larger than caches, as an image would be."""
SIZE = struct.Struct("<q")
OPTIONS = TransportOptions(max_unsent_bytes=256 << 20)


def tell(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def tell_cpu() -> None:
    tell(cpu_s=time.process_time())


async def commands() -> AsyncIterator[list[str]]:
    """Yield the lines of stdin as words, until it ends."""
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield line.decode().split()


def random_bytes(num_bytes: int) -> memoryview:
    return memoryview(np.random.default_rng(0).bytes(num_bytes))


# --- raw TCP --------------------------------------------------------------------------------------


def run_source(arguments: argparse.Namespace) -> None:
    """Send random bytes over one TCP connection, as fast as it takes them."""
    host, port = arguments.listen.removeprefix("tcp://").rsplit(":", 1)
    with socket.create_server((host, int(port))) as listening:
        tell(address=f"tcp://{host}:{listening.getsockname()[1]}")
        connection, _ = listening.accept()
        if arguments.acked:
            tell(connected=True)
        data = random_bytes(SOURCE_BYTES)
        for line in sys.stdin:
            if line.startswith("publish"):
                left, start = int(line.split()[1]), 0
                tell(at=time.monotonic())
                if arguments.acked:
                    connection.sendall(SIZE.pack(left))
                while left:
                    block = data[start : start + min(left, READ_BYTES)]
                    connection.sendall(block)
                    left -= len(block)
                    start = (start + len(block)) % SOURCE_BYTES
                if arguments.acked:
                    connection.recv(1)
                    tell(arrived=0, at=time.monotonic())
            else:
                tell_cpu()


def run_sink(arguments: argparse.Namespace) -> None:
    """Receive them into one buffer, without a look at them."""
    host, port = arguments.connect.removeprefix("tcp://").rsplit(":", 1)
    with socket.create_connection((host, int(port))) as connection:
        tell(connected=True)
        buffer = bytearray(READ_BYTES)
        if arguments.follow:
            follow(connection, buffer)
            return
        for line in sys.stdin:
            if line.startswith("receive"):
                drain(connection, int(line.split()[1]), buffer)
                tell(arrived=0, at=time.monotonic())
            else:
                tell_cpu()


def drain(connection: socket.socket, left: int, buffer: bytearray) -> None:
    """Receive that many bytes."""
    while left:
        num_read = connection.recv_into(buffer, min(left, len(buffer)))
        if not num_read:
            raise ConnectionError("the stream has ended")
        left -= num_read


def follow(connection: socket.socket, buffer: bytearray) -> None:
    """Receive what the other end says that it sends, and tell it when it is here."""
    while size := connection.recv(SIZE.size, socket.MSG_WAITALL):
        drain(connection, SIZE.unpack(size)[0], buffer)
        connection.sendall(b"!")


# --- the bare data plane --------------------------------------------------------------------------


async def run_giver(arguments: argparse.Namespace) -> None:
    """Send as many chunks as credits come, out of one large buffer."""
    secret, server = secrets.token_bytes(SECRET_BYTES), KeyPair.of(secrets.token_bytes(32))
    keys = CurveKeys.of_learner(server, secret) if arguments.curve else None
    transport = ZmqTransport(arguments.listen, OPTIONS, keys)
    await transport.start()
    address = transport.listen_address
    join = Join(str(address), secret, bytes(FINGERPRINT_BYTES))  # there is no learner here
    tell(address=str(join) if arguments.curve else address)
    data = random_bytes(SOURCE_BYTES)
    giving = asyncio.create_task(give(transport, data))
    async for command in commands():
        if command[0] == "publish":
            tell(at=time.monotonic())
        else:
            tell_cpu()
    giving.cancel()
    await transport.close()


async def give(transport: ZmqTransport, data: memoryview) -> None:
    """Answer each credit (number of chunks, their bytes) with chunks."""
    start = 0
    while True:
        for event in await transport.receive():
            if not isinstance(event, Received):
                continue
            count, chunk_bytes = struct.unpack("<qq", event.frames[0])
            for _ in range(count):
                chunk = data[start : start + chunk_bytes]
                if not transport.send(event.peer, [b"chunk", chunk]):
                    raise RuntimeError("a chunk was refused although there was credit for it")
                start = (start + chunk_bytes) % (SOURCE_BYTES - chunk_bytes)


async def run_taker(arguments: argparse.Namespace) -> None:
    """Take chunks and give credit for more, a quarter of the window at a time."""
    join = Join.parse(arguments.connect) if arguments.curve else None
    keys = None if join is None else CurveKeys.of_node("worker", join.secret, join.address)
    transport = ZmqTransport(None, OPTIONS, keys)
    await transport.start()
    peer = transport.dial(arguments.connect if join is None else join.address)
    while not any(isinstance(event, Connected) for event in await transport.receive()):
        pass
    tell(connected=True)
    async for command in commands():
        if command[0] == "receive":
            num_bytes, chunk_bytes = int(command[1]), int(command[2])
            await take(transport, peer, num_bytes // chunk_bytes, chunk_bytes, arguments.window)
            tell(arrived=0, at=time.monotonic())
        else:
            tell_cpu()
    await transport.close()


async def take(
    transport: ZmqTransport, peer: str, count: int, chunk_bytes: int, window_bytes: int
) -> None:
    """Receive `count` chunks."""
    window = max(4, window_bytes // chunk_bytes)
    asked, taken, owed = min(window, count), 0, 0
    transport.send(peer, [struct.pack("<qq", asked, chunk_bytes)])
    while taken < count:
        for event in await transport.receive():
            if not isinstance(event, Received):
                continue
            taken, owed = taken + 1, owed + 1
            if owed >= window // 4 and asked < count:
                more = min(owed, count - asked)
                transport.send(peer, [struct.pack("<qq", more, chunk_bytes)])
                asked, owed = asked + more, 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=["source", "sink", "giver", "taker"])
    parser.add_argument("--listen", help="tcp://host:port; port 0 is any free one")
    parser.add_argument("--connect", help="what the other end told as its address")
    parser.add_argument("--curve", action="store_true", help="encrypt the bare data plane")
    parser.add_argument("--acked", action="store_true", help="say sizes, and wait for an answer")
    parser.add_argument("--follow", action="store_true", help="take sizes from there, and answer")
    parser.add_argument("--window", type=int, default=8 << 20, help="credit of the taker, bytes")
    arguments = parser.parse_args()
    match arguments.role:
        case "source":
            run_source(arguments)
        case "sink":
            with contextlib.suppress(OSError):  # the other end has gone, or was never there
                run_sink(arguments)
        case role:
            allocator.tune(os.environ)
            uvloop.run((run_giver if role == "giver" else run_taker)(arguments))


if __name__ == "__main__":
    main()
