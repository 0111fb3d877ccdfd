"""Emulate a WAN on this machine: network namespaces around a core with rate, latency and loss.

Each node is a namespace with one TUN device; this process is what lies between them. A packet
leaves through its node's uplink, which sends `rate_mbit` and queues for at most `queue_ms`, and
reaches the other namespace `latency_ms` later. What runs inside uses the kernel's own TCP, with its
buffers and its congestion control. Downlinks have no limit, so this is for one-to-many traffic.

    python bench/wan.py --nodes 3 --rate-mbit 200 --latency-ms 20

prints the namespaces and their addresses as a JSON line, answers "status" on stdin, and removes
everything at the end of stdin. Needs root on Linux. The kernel hands over up to 64 KiB at once and
cuts it later (segmentation offload), so Python keeps up with about 2 Gbit/s in all; "status" tells
the CPU seconds, and a share of a core above one half means that the figures are the emulator's.
A packet of several segments is lost as a whole, with the probability that one of them is.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import heapq
import json
import os
import random
import select
import signal
import struct
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any

# linux/if_tun.h: a device of IP packets, each with a virtio header, checksums and cuts left open.
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4 = 1, 2
VNET_HEADER_BYTES = 10
SEGMENT_BYTES, SEGMENT_HEADER_BYTES = 1448, 52
MAX_PACKET_BYTES = 65536 + VNET_HEADER_BYTES
MAX_READS = 32
"""Packets taken from one node before the others and the clock have their turn."""


@dataclass(slots=True)
class Uplink:
    """One node's way out."""

    namespace: str
    address: str
    descriptor: int
    free_at: float = 0.0
    """When everything accepted so far will have left."""


class Core:
    """What lies between the nodes."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.bytes_per_s = arguments.rate_mbit * 1e6 / 8
        self.latency_s = arguments.latency_ms / 1e3
        self.queue_s = arguments.queue_ms / 1e3
        self.loss = arguments.loss
        self.uplinks: list[Uplink] = []
        self.num_dropped = self.num_lost = 0
        self._random = random.Random(arguments.seed)
        self._under_way: list[tuple[float, int, int, bytes]] = []
        self._num_packets = 0

    def add(self, namespace: str, address: str) -> None:
        """Make a namespace whose only device leads here."""
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        device = f"echo{os.getpid()}n{len(self.uplinks)}"  # unique until it is moved
        flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR
        fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", device.encode(), flags))
        fcntl.ioctl(descriptor, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
        self.uplinks.append(Uplink(namespace, address, descriptor))
        ip("netns", "add", namespace)
        ip("link", "set", device, "netns", namespace)
        ip("-n", namespace, "addr", "add", f"{address}/24", "dev", device)
        ip("-n", namespace, "link", "set", device, "txqueuelen", "1000", "up")
        ip("-n", namespace, "link", "set", "lo", "up")

    def run(self) -> None:
        """Carry packets until stdin ends."""
        by_descriptor = {uplink.descriptor: uplink for uplink in self.uplinks}
        by_address = {uplink.address: uplink for uplink in self.uplinks}
        while True:
            due = self._under_way[0][0] if self._under_way else None
            timeout_s = None if due is None else max(0.0, due - time.monotonic())
            for ready in select.select([0, *by_descriptor], [], [], timeout_s)[0]:
                if ready == 0:
                    if not os.read(0, 4096):
                        return
                    self._report()
                else:
                    self._take(by_descriptor[ready], by_address)
            now = time.monotonic()
            while self._under_way and self._under_way[0][0] <= now:
                _, _, descriptor, packet = heapq.heappop(self._under_way)
                os.write(descriptor, packet)

    def _take(self, uplink: Uplink, by_address: dict[str, Uplink]) -> None:
        now = time.monotonic()
        for _ in range(MAX_READS):
            try:
                packet = os.read(uplink.descriptor, MAX_PACKET_BYTES)
            except BlockingIOError:
                return
            header = packet[VNET_HEADER_BYTES : VNET_HEADER_BYTES + 20]
            target = by_address.get(".".join(map(str, header[16:20])))
            if header[0] >> 4 != 4 or target is None:  # IPv6 looks for routers, for example
                continue
            num_bytes = len(packet) - VNET_HEADER_BYTES
            num_segments = -(-num_bytes // SEGMENT_BYTES)
            starts_at = max(now, uplink.free_at)
            if starts_at - now > self.queue_s:
                self.num_dropped += 1
                continue
            wire_bytes = num_bytes + (num_segments - 1) * SEGMENT_HEADER_BYTES
            uplink.free_at = starts_at + wire_bytes / self.bytes_per_s
            if self.loss and self._random.random() > (1 - self.loss) ** num_segments:
                self.num_lost += 1
                continue
            self._num_packets += 1
            arrival = (uplink.free_at + self.latency_s, self._num_packets)
            heapq.heappush(self._under_way, (*arrival, target.descriptor, packet))

    def _report(self) -> None:
        tell(
            cpu_s=time.process_time(),
            at=time.monotonic(),
            packets=self._num_packets,
            dropped=self.num_dropped,
            lost=self.num_lost,
        )


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def tell(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--rate-mbit", type=float, default=200, help="of each uplink, IP packets")
    parser.add_argument("--latency-ms", type=float, default=20, help="one way")
    parser.add_argument("--queue-ms", type=float, default=100, help="before packets are dropped")
    parser.add_argument("--loss", type=float, default=0.0, help="probability for each segment")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the caller, and that our stdin
    core = Core(arguments)
    try:
        for index in range(arguments.nodes):
            core.add(f"echo{os.getpid()}-{index}", f"10.98.0.{index + 1}")
        os.setpriority(os.PRIO_PROCESS, 0, -10)  # a late network would be measured as a slow one
        tell(nodes=[[uplink.namespace, uplink.address] for uplink in core.uplinks])
        core.run()
    finally:
        for uplink in core.uplinks:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", uplink.namespace)


if __name__ == "__main__":
    main()
