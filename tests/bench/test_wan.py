"""The emulated WAN: what it does to packets, how fast it is, and that it leaves nothing behind."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import random
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import wan

BENCH = Path(__file__).parents[2] / "bench"
GSO_BYTES = 1448
TAKE = """
import socket, sys, time
started_at, buffer = time.monotonic(), bytearray(1 << 18)  # nothing has come before
connection = socket.create_connection((sys.argv[1], 7))
while connection.recv_into(buffer):
    pass
print(time.monotonic() - started_at)
"""
GIVE = """
import socket, sys
listening = socket.create_server(("", 7))
print(flush=True)
connection, _ = listening.accept()
connection.sendall(bytes(int(sys.argv[1])))
"""


needs_root = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or not Path("/dev/net/tun").exists(),
    reason="network namespaces need root on Linux and /dev/net/tun",
)


def packet(num_payload_bytes: int, seed: int = 0) -> bytes:
    """A TSO packet as the kernel hands it over."""
    vnet = struct.pack("=BBHHHH", 1, 1, 52, GSO_BYTES, 20, 16)
    length = 52 + num_payload_bytes
    ip = struct.pack(
        "!BBHHHBBH4B4B", 0x45, 0, length, 0xFFF0, 0, 64, 6, 0, 10, 98, 0, 1, 10, 98, 0, 2
    )
    tcp = struct.pack("!HHIIBBHHH", 7, 8, 0xFFFFFF00, 5, 8 << 4, 0x99, 100, 0, 0) + bytes(12)
    return vnet + ip + tcp + random.Random(seed).randbytes(num_payload_bytes)


def sum16(data: bytes) -> int:
    total: int = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


@pytest.fixture(scope="module")
def library() -> Any:
    if wan.compiler() is None:
        pytest.skip("no C compiler")
    return wan.compiled_library()


def cut(library: Any, whole: bytes, start: int, stop: int) -> bytes:
    out = ctypes.create_string_buffer(len(whole))
    num_bytes = library.wan_cut(whole, len(whole), start, stop, out)
    return out.raw[:num_bytes]


@pytest.mark.slow
def test_cut_packets_carry_the_same_stream(library: Any) -> None:
    whole = packet(10 * GSO_BYTES + 7)
    assert library.wan_num_segments(whole, len(whole)) == 11
    first, rest = cut(library, whole, 0, 1), cut(library, whole, 1, 11)
    assert first[62:] + rest[62:] == whole[62:]
    assert (first[1], rest[1]) == (0, 1)  # one segment is a plain packet
    assert struct.unpack_from("!I", rest, 10 + 24)[0] == (0xFFFFFF00 + GSO_BYTES) & 0xFFFFFFFF
    assert struct.unpack_from("!H", rest, 12)[0] == len(rest) - 10
    assert sum16(rest[10:30]) == 0xFFFF  # a valid IP header
    assert first[10 + 33] & 9 == 0  # FIN and PSH belong to the last
    assert rest[10 + 33] & 9 == 9
    assert rest[10 + 33] & 0x80 == 0


def test_every_run_of_segments_is_a_valid_packet(library: Any) -> None:
    chance = random.Random(1)
    for seed in range(50):
        whole = packet(chance.randrange(GSO_BYTES + 1, 65000), seed)
        count = library.wan_num_segments(whole, len(whole))
        start = chance.randrange(count)
        stop = chance.randrange(start + 1, count + 1)
        piece = cut(library, whole, start, stop)
        assert piece[62:] == whole[62:][start * GSO_BYTES : stop * GSO_BYTES]
        assert sum16(piece[10:30]) == 0xFFFF
        # The receiving kernel completes the checksum from the sum over the pseudo header.
        pseudo = piece[22:30] + struct.pack("!HH", 6, len(piece) - 30)
        assert struct.unpack_from("!H", piece, 30 + 16)[0] == sum16(pseudo)


@contextlib.contextmanager
def started(*options: str) -> Iterator[tuple[subprocess.Popen[str], list[list[str]]]]:
    command = [sys.executable, str(BENCH / "wan.py"), *options]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process, json.loads(line_of(process))["nodes"]


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def say(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()


def inside(namespace: str, script: str, argument: str) -> subprocess.Popen[str]:
    command = ["ip", "netns", "exec", namespace, sys.executable, "-c", script, argument]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def namespaces() -> str:
    return subprocess.run(
        ["ip", "netns", "list"], capture_output=True, text=True, check=True
    ).stdout


def wait_until_gone(names: list[str]) -> bool:
    give_up_at = time.monotonic() + 60
    while any(name in namespaces() for name in names) and time.monotonic() < give_up_at:
        time.sleep(0.05)
    return not any(name in namespaces() for name in names)


def seconds_for(num_bytes: int, nodes: list[list[str]]) -> float:
    """Send bytes from the first node to the second and return how long it took."""
    with inside(nodes[0][0], GIVE, str(num_bytes)) as source:
        line_of(source)
        with inside(nodes[1][0], TAKE, nodes[0][1]) as sink:
            return float(sink.communicate(timeout=100)[0])


@needs_root
@pytest.mark.matrix
@pytest.mark.parametrize(("way", "loss"), [("up", "0"), ("down", "0"), ("up", "0.01")])
def test_a_link_has_the_rate_that_it_was_given(way: str, loss: str) -> None:
    with started("--latency-ms=5", "--rate-mbit=0", "--congestion=bbr") as (process, nodes):
        # So slow that a machine with other work keeps up.
        say(process, f"{int(way == 'down')} {way} 20")
        say(process, f"0 loss {loss}")
        num_bytes = 3 << 20
        least = 0.7 if loss == "0" else 0.2  # what TCP makes of losses is not the emulator's affair
        rate = 0.0
        for _ in range(5):  # a machine that has other work may be slower than the link
            rate = max(rate, 8 * num_bytes / seconds_for(num_bytes, nodes))
            if rate > least * 20e6:
                break
        say(process, "status")
        status = json.loads(line_of(process))
    assert least * 20e6 < rate < 1.02 * 20e6
    assert status["bytes"] > num_bytes
    assert (status["lost"] > 0) == (loss != "0")
    assert process.returncode == 0
    assert wait_until_gone([name for name, _ in nodes])


@needs_root
@pytest.mark.slow
def test_nothing_stays_of_a_killed_emulator_after_the_next_start() -> None:
    with started("--nodes=1") as (killed, nodes):
        killed.send_signal(signal.SIGKILL)
    assert nodes[0][0] in namespaces()
    with started("--nodes=1") as (process, _):
        assert wait_until_gone([nodes[0][0]])
        process.terminate()
        process.wait(timeout=60)
    assert f"echo{process.pid}-" not in namespaces()
