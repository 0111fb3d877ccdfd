"""Packet core of wan.py in Python, for machines without C compiler.

The same rules and the same calls; it carries about 2 Gbit/s in all where the other carries ten.
"""

from __future__ import annotations

import ctypes
import heapq
import os
import random
import select
import shutil
import struct
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

WHAT = ("up", "down", "delay", "loss", "dead")
"""What can be set of a node, in the order of wan_core.c: bytes/s (0 is no limit), s, share, 0/1."""
VNET_BYTES = 10
MAX_READS = 32
"""Packets taken from one node before the others and the clock have their turn."""
STATS = ("packets", "bytes", "dropped", "lost", "late_max_s", "late_sum_s")
TCP_CWR, TCP_PSH, TCP_FIN = 0x80, 8, 1


class Core(Protocol):
    """What wan.py needs of a core."""

    name: str

    def add(self, descriptor: int, address: str) -> None:
        """Enter a node with its TUN device."""

    def set(self, node: int, what: str, value: float) -> None:
        """Change a node's link, also while packets are under way."""

    def run(self, queue_s: float, stop_descriptor: int) -> None:
        """Carry packets until the descriptor can be read."""

    def stats(self) -> dict[str, float]:
        """Return what has been carried, and how late, seconds, beyond the wanted delay."""


class CCore:
    """The core in C; ctypes lets go of the GIL while it runs."""

    name = "C"

    def __init__(self, library: ctypes.CDLL, seed: int) -> None:
        self._library = library
        library.wan_set.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_double]
        library.wan_run.argtypes = [ctypes.c_double, ctypes.c_int]
        library.wan_stats.restype = ctypes.POINTER(ctypes.c_double * len(STATS))
        library.wan_seed(ctypes.c_uint64(seed))

    def add(self, descriptor: int, address: str) -> None:
        octets = bytes(map(int, address.split(".")))
        self._library.wan_add(descriptor, ctypes.c_uint32(struct.unpack("=I", octets)[0]))

    def set(self, node: int, what: str, value: float) -> None:
        self._library.wan_set(node, WHAT.index(what), value)

    def run(self, queue_s: float, stop_descriptor: int) -> None:
        self._library.wan_run(queue_s, stop_descriptor)

    def stats(self) -> dict[str, float]:
        return dict(zip(STATS, self._library.wan_stats().contents, strict=True))


def compiled_library() -> ctypes.CDLL | None:
    """Compile wan_core.c, which takes less than a second; None where there is no compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory) / "wan_core.so"
        source = Path(__file__).with_name("wan_core.c")
        command = [compiler, "-O2", "-shared", "-fPIC", "-o", str(target), str(source)]
        if subprocess.run(command, capture_output=True, check=False).returncode:
            return None
        return ctypes.CDLL(str(target))


def make_core(seed: int) -> Core:
    """Return the fastest core that this machine can have."""
    library = compiled_library()
    return PythonCore(seed) if library is None else CCore(library, seed)


@dataclass(slots=True)
class Node:
    """One node's link to the core."""

    descriptor: int
    value: dict[str, float] = field(default_factory=lambda: dict.fromkeys(WHAT, 0.0))
    free_at: dict[str, float] = field(default_factory=lambda: {"up": 0.0, "down": 0.0})
    """When everything accepted so far will have left."""


class PythonCore:
    """The core in Python."""

    name = "Python"

    def __init__(self, seed: int) -> None:
        self._nodes: list[Node] = []
        self._by_address: dict[bytes, int] = {}
        self._random = random.Random(seed)
        self._under_way: list[tuple[float, int, int, bool, bytes]] = []
        self._num_packets = 0
        self._stats = dict.fromkeys(STATS, 0.0)

    def add(self, descriptor: int, address: str) -> None:
        self._by_address[bytes(map(int, address.split(".")))] = len(self._nodes)
        self._nodes.append(Node(descriptor))

    def set(self, node: int, what: str, value: float) -> None:
        self._nodes[node].value[what] = value

    def stats(self) -> dict[str, float]:
        return dict(self._stats)

    def run(self, queue_s: float, stop_descriptor: int) -> None:
        by_descriptor = {node.descriptor: node for node in self._nodes}
        while True:
            due = self._under_way[0][0] if self._under_way else None
            timeout_s = None if due is None else max(0.0, due - time.monotonic())
            ready = select.select([stop_descriptor, *by_descriptor], [], [], timeout_s)[0]
            if stop_descriptor in ready:
                return
            for descriptor in ready:
                self._take(by_descriptor[descriptor], queue_s)
            self._deliver_due(queue_s)

    def _take(self, node: Node, queue_s: float) -> None:
        for _ in range(MAX_READS):
            try:
                packet = os.read(node.descriptor, 65536 + VNET_BYTES)
            except BlockingIOError:
                return
            target = self._by_address.get(packet[VNET_BYTES + 16 : VNET_BYTES + 20])
            if packet[VNET_BYTES] >> 4 != 4 or target is None:  # IPv6 looks for routers
                continue
            other = self._nodes[target]
            if node.value["dead"] or other.value["dead"]:
                continue
            delay_s, loss = (node.value[what] + other.value[what] for what in ("delay", "loss"))
            at = time.monotonic()
            for due, run in self._transmit(node, "up", packet, at, loss, queue_s):
                self._push(due + delay_s, target, False, run)

    def _deliver_due(self, queue_s: float) -> None:
        now = time.monotonic()
        while self._under_way and self._under_way[0][0] <= now:
            due, _, target, is_last, packet = heapq.heappop(self._under_way)
            node = self._nodes[target]
            if not is_last and node.value["down"]:
                for later, run in self._transmit(node, "down", packet, due, 0.0, queue_s):
                    self._push(later, target, True, run)
                continue
            self._stats["late_sum_s"] += now - due
            self._stats["late_max_s"] = max(self._stats["late_max_s"], now - due)
            self._stats["packets"] += 1
            self._stats["bytes"] += len(packet) - VNET_BYTES
            if not node.value["dead"]:
                os.write(node.descriptor, packet)

    def _push(self, due: float, target: int, is_last: bool, packet: bytes) -> None:
        self._num_packets += 1
        heapq.heappush(self._under_way, (due, self._num_packets, target, is_last, packet))

    def _transmit(
        self, node: Node, way: str, packet: bytes, at: float, loss: float, queue_s: float
    ) -> list[tuple[float, bytes]]:
        """Pass a packet over a link; return what survives, and when it has left."""
        count = num_segments(packet)
        head = header_bytes(packet) if count > 1 else 0
        wire_bytes = len(packet) - VNET_BYTES + (count - 1) * head
        segment_s = wire_bytes / count / node.value[way] if node.value[way] else 0.0
        starts_at = max(at, node.free_at[way])
        runs, start, index = [], 0, 0
        while index < count and starts_at - at + index * segment_s <= queue_s:
            if loss and self._random.random() < loss:
                self._stats["lost"] += 1
                runs.append((start, index))
                start = index + 1
            index += 1
        self._stats["dropped"] += count - index
        runs.append((start, index))
        node.free_at[way] = max(node.free_at[way], starts_at + index * segment_s)
        return [
            (starts_at + stop * segment_s, packet if stop - first == count else cut(packet, *run))
            for run in runs
            for first, stop in [run]
            if first < stop
        ]


# --- packets of several segments ------------------------------------------------------------------


def header_bytes(packet: bytes) -> int:
    """Return the bytes of the IP and the TCP header."""
    ip = (packet[VNET_BYTES] & 15) * 4
    return ip + (packet[VNET_BYTES + ip + 12] >> 4) * 4


def num_segments(packet: bytes) -> int:
    """Return into how many segments the receiving kernel may cut a packet."""
    _, kind, _, size = struct.unpack_from("=BBHH", packet)
    return -(-(len(packet) - VNET_BYTES - header_bytes(packet)) // size) if kind else 1


def cut(packet: bytes, start: int, stop: int) -> bytes:
    """Return segments [start, stop) of a packet as a packet of their own."""
    (size,) = struct.unpack_from("=H", packet, 4)
    head, ip = header_bytes(packet), (packet[VNET_BYTES] & 15) * 4
    payload = packet[VNET_BYTES + head :]
    piece = payload[start * size : stop * size]
    vnet = bytearray(packet[:VNET_BYTES])
    if len(piece) <= size:
        vnet[1] = 0
        vnet[4:6] = bytes(2)
    network = bytearray(packet[VNET_BYTES : VNET_BYTES + ip])
    (number,) = struct.unpack_from("!H", network, 4)
    struct.pack_into("!HH", network, 2, head + len(piece), (number + start) & 0xFFFF)
    struct.pack_into("!H", network, 10, 0)
    struct.pack_into("!H", network, 10, ~_sum16(network) & 0xFFFF)
    tcp = bytearray(packet[VNET_BYTES + ip : VNET_BYTES + head])
    (sequence,) = struct.unpack_from("!I", tcp, 4)
    struct.pack_into("!I", tcp, 4, (sequence + start * size) & 0xFFFFFFFF)
    if stop * size < len(payload):
        tcp[13] &= ~(TCP_FIN | TCP_PSH) & 0xFF
    if start:
        tcp[13] &= ~TCP_CWR & 0xFF
    # The checksum is left to the receiving kernel; it wants the sum over the pseudo header here.
    pseudo = _sum16(network[12:20] + struct.pack("!HH", 6, len(tcp) + len(piece)))
    struct.pack_into("!H", tcp, 16, pseudo)
    return bytes(vnet + network + tcp) + piece


def _sum16(data: bytes | bytearray) -> int:
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total
