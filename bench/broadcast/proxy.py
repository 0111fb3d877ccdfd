"""Emulate links without root: a TCP proxy before every node.

    python bench/broadcast/proxy.py --nodes 3 --rate-mbit 200 --latency-ms 20

prints for each node where others reach it (the proxy) and where it must listen itself, as a JSON
line, and ends with its stdin. What a node sends over the connections that others opened to it
shares its uplink's rate, in pieces of 64 KiB; both directions are delayed. Lines on stdin: as of
wan.py, without loss; `dead` lets bytes of the node vanish while its connections stay open.

What it does not emulate: slow start, congestion control, queues that drop, loss and its recovery,
and what a node sends over connections that it opened itself is delayed but not limited. The
kernel's TCP sees loopback on both sides of the proxy. So this shows what pipelining and topology
make of rates and delays, and nothing about TCP over long links; for that is wan.py.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any

PIECE_BYTES = 1 << 16
MAX_QUEUED_BYTES = 4 << 20
"""Read ahead of one direction of a connection, beyond what the delay holds."""
BITS = 1e6 / 8


@dataclass(slots=True)
class Link:
    """One node's uplink, and where it is reached."""

    public_port: int
    real_port: int
    bytes_per_s: float
    delay_s: float
    free_at: float = 0.0
    """When everything accepted so far will have left."""
    is_dead: bool = False

    def leaves_at(self, num_bytes: int, now: float) -> float:
        """Take the uplink for that many bytes; return when the last one has left."""
        rate = self.bytes_per_s
        self.free_at = max(now, self.free_at) + (num_bytes / rate if rate else 0.0)
        return self.free_at


async def carry(
    link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_limited: bool
) -> None:
    """Pass bytes on, each piece when its time has come."""
    pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
    room = asyncio.Event()
    room.set()
    held = 0

    async def take() -> None:
        nonlocal held
        while data := await reader.read(PIECE_BYTES):
            now = time.monotonic()
            leaves_at = link.leaves_at(len(data), now) if is_limited else now
            pieces.put_nowait((leaves_at + link.delay_s, data))
            held += len(data)
            if held > MAX_QUEUED_BYTES + link.bytes_per_s * link.delay_s:
                room.clear()
                await room.wait()
        pieces.put_nowait((0.0, b""))

    taking = asyncio.create_task(take())
    try:
        while True:
            due, data = await pieces.get()
            if not data:
                break
            await asyncio.sleep(due - time.monotonic())
            held -= len(data)
            room.set()
            if not link.is_dead:
                writer.write(data)
                await writer.drain()
    except OSError:
        pass  # one side has gone: the other learns it by the close
    finally:
        taking.cancel()
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await taking
        writer.close()


async def connect(link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Join a connection to the proxy with a new one to the node."""
    try:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", link.real_port)
    except OSError:
        writer.close()  # nobody listens there yet, or any more
        return
    await asyncio.gather(
        carry(link, reader, inner_writer, is_limited=False),
        carry(link, inner_reader, writer, is_limited=True),
    )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def tell(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def change(link: Link, what: str, value: float) -> None:
    """Carry out a command of stdin."""
    if what == "up":
        link.bytes_per_s = value * BITS
    elif what == "delay":
        link.delay_s = value / 1e3
    elif what == "dead":
        link.is_dead = bool(value)
    else:
        print(f"proxy.py: cannot emulate {what}", file=sys.stderr)


async def serve(arguments: argparse.Namespace) -> None:
    """Run until stdin ends."""
    links = []
    for _ in range(arguments.nodes):
        link = Link(0, free_port(), arguments.rate_mbit * BITS, arguments.latency_ms / 1e3)
        server = await asyncio.start_server(functools.partial(connect, link), "127.0.0.1", 0)
        link.public_port = server.sockets[0].getsockname()[1]
        links.append(link)
    tell(nodes=[[link.public_port, link.real_port] for link in links])
    lines = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        match line.decode().split():
            case ["status"]:
                tell(cpu_s=time.process_time(), at=time.monotonic())
            case [node, what, value]:
                change(links[int(node)], what, float(value))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--rate-mbit", type=float, default=200, help="of each uplink; 0: no limit")
    parser.add_argument("--latency-ms", type=float, default=20, help="one way between two nodes")
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
