"""Flood a listener with strangers: CPU seconds, delay of members' messages.

A process connects and closes as fast as it can. Meanwhile a member that has joined sends one
message after the other and waits for each to come back. In turns: without a flood, and with it.
CURVE is on, all on loopback.

    python bench/bench_strangers.py [--seconds 8] [--rounds 3]
"""

from __future__ import annotations

import asyncio
import secrets
import statistics
import sys
import time
from typing import Any

from harness import new_parser, parse, save

from echo.net.curve import CurveKeys, KeyPair
from echo.net.transport import Received, TransportOptions, parse_address, without_key
from echo.net.zmq import ZmqTransport

PAUSE_S = 0.02
FLOOD = """
import socket, sys, time
host, port, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
ends_at, number = time.monotonic() + seconds, 0
while time.monotonic() < ends_at:
    socket.create_connection((host, port)).close()
    number += 1
print(number)
"""


async def measure(seconds: float, *, is_flooded: bool) -> dict[str, float]:
    """Return connections per second, CPU seconds of this process, and the member's delays."""
    keys = CurveKeys.of_learner(KeyPair.of(secrets.token_bytes(32)), secrets.token_bytes(16))
    listener = ZmqTransport("tcp://127.0.0.1:0", TransportOptions(), keys)
    member = ZmqTransport(None, TransportOptions(), keys)
    await listener.start()
    await member.start()
    address = str(listener.listen_address)
    peer = member.dial(address)
    await member.receive()

    async def echo() -> None:
        while True:
            for event in await listener.receive():
                if isinstance(event, Received):
                    listener.send(event.peer, event.frames)

    echoing = asyncio.create_task(echo())
    host, port = parse_address(without_key(address))
    cpu_s, started_at = time.process_time(), time.monotonic()
    length = seconds if is_flooded else 0.0
    flood = await asyncio.create_subprocess_exec(
        sys.executable, "-c", FLOOD, host, str(port), str(length), stdout=asyncio.subprocess.PIPE
    )
    delays: list[float] = []
    while time.monotonic() < started_at + seconds:
        sent_at = time.monotonic()
        member.send(peer, [b"x"])
        while not any(isinstance(event, Received) for event in await member.receive()):
            pass
        delays.append(time.monotonic() - sent_at)
        await asyncio.sleep(PAUSE_S)
    cpu_s = time.process_time() - cpu_s
    number = int((await flood.communicate())[0])
    echoing.cancel()
    await member.close()
    await listener.close()
    return {
        "connections_per_s": number / seconds,
        "cpu_s": cpu_s,
        "median_delay_s": statistics.median(delays),
        "longest_delay_s": max(delays),
    }


def main() -> None:
    """Measure in turns, print the medians, write all."""
    parser = new_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=8.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each kind")
    arguments = parse(parser, seconds=1.0, rounds=1)
    rows: list[dict[str, Any]] = []
    for number in range(arguments.rounds):
        for kind in ("quiet", "flooded"):
            found = asyncio.run(measure(arguments.seconds, is_flooded=kind == "flooded"))
            rows.append({"kind": kind, "round": number, **found})
    for kind in ("quiet", "flooded"):
        mine = [row for row in rows if row["kind"] == kind]
        names = [name for name in mine[0] if name not in ("kind", "round")]
        medians = {name: statistics.median(row[name] for row in mine) for name in names}
        print(kind, {name: round(value, 4) for name, value in medians.items()})
    print(save("strangers", {"rows": rows}))


if __name__ == "__main__":
    main()
