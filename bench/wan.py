"""Emulate a WAN on this machine: network namespaces around a core.

Each node is a namespace with one TUN device; this process is what lies between them. A packet
leaves through its node's uplink, which queues for at most `queue_ms`, travels for the delays of
both nodes, and passes the other node's downlink. What runs inside uses the kernel's own TCP with
its buffers and its congestion control (--tuned enlarges the buffers, --congestion chooses).

    python bench/wan.py --nodes 3 --rate-mbit 200 --latency-ms 20

prints the namespaces and their addresses as a JSON line, and removes everything at the end of
stdin. What a killed one has left behind, the next one removes. Lines on stdin:

    status                         CPU seconds, what was carried, dropped and lost, lateness
    1 up 50                        node 1's uplink sends 50 Mbit/s from now on; 0 is no limit
    1 down 100 / 1 delay 15        its downlink; its share of the one-way delay, ms
    1 loss 0.001 / 1 dead 1        probability for each segment; a black hole

Needs root on Linux and a C compiler: the packet core is wan_core.c, compiled at the start, which
takes less than a second. The kernel hands over up to 64 KiB at once and cuts it later; rates and
queues count the segments that come of it, and single ones are lost. How far the emulator can be
believed: `status` tells the share of a core that it took and how late packets were delivered;
`--capacity` measures what one TCP stream reaches without limits. Stay below half of that in all.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

# linux/if_tun.h: a device of IP packets, each with a virtio header, checksums and cuts left open.
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4 = 1, 2
NAMESPACES = Path("/run/netns")
BUFFERS = ("tcp_rmem", "tcp_wmem")
TUNED_BUFFERS = "4096 131072 67108864"
BITS = 1e6 / 8
WHAT = ("up", "down", "delay", "loss", "dead")
"""What can be set of a node, in the order of wan_core.c: bytes/s (0 is no limit), s, share, 0/1."""
STATS = ("packets", "bytes", "dropped", "lost", "late_max_s", "late_sum_s")
UNITS = {"up": BITS, "down": BITS, "delay": 1e-3, "loss": 1.0, "dead": 1.0}
"""From the unit on the command line to the core's."""


class Core:
    """The packet core in C; ctypes lets go of the GIL while it runs."""

    def __init__(self, seed: int) -> None:
        self._library = library = compiled_library()
        library.wan_set.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_double]
        library.wan_run.argtypes = [ctypes.c_double, ctypes.c_int]
        library.wan_stats.restype = ctypes.POINTER(ctypes.c_double * len(STATS))
        library.wan_seed(ctypes.c_uint64(seed))

    def add(self, descriptor: int, address: str) -> None:
        """Enter a node with its TUN device."""
        octets = bytes(map(int, address.split(".")))
        self._library.wan_add(descriptor, ctypes.c_uint32(struct.unpack("=I", octets)[0]))

    def set(self, node: int, what: str, value: float) -> None:
        """Change a node's link, also while packets are under way."""
        self._library.wan_set(node, WHAT.index(what), value)

    def run(self, queue_s: float, stop_descriptor: int) -> None:
        """Carry packets until the descriptor can be read."""
        self._library.wan_run(queue_s, stop_descriptor)

    def stats(self) -> dict[str, float]:
        """Return what has been carried, and how late, seconds, beyond the wanted delay."""
        return dict(zip(STATS, self._library.wan_stats().contents, strict=True))


def compiler() -> str | None:
    """Return the C compiler of this machine."""
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def compiled_library() -> ctypes.CDLL:
    """Compile wan_core.c and load it."""
    command = compiler()
    if command is None:
        sys.exit("wan.py: there is no C compiler (cc, gcc or clang) for its packet core")
    with tempfile.TemporaryDirectory() as directory:
        target = str(Path(directory) / "wan_core.so")
        source = str(Path(__file__).with_name("wan_core.c"))
        subprocess.run([command, "-O2", "-shared", "-fPIC", "-o", target, source], check=True)
        return ctypes.CDLL(target)


class Emulator:
    """The namespaces and the core between them."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.nodes: list[tuple[str, str]] = []
        self._descriptors: list[int] = []

    def add(self, sysctls: dict[str, str]) -> None:
        """Make a namespace whose only device leads to the core."""
        index = len(self.nodes)
        namespace, address = f"echo{os.getpid()}-{index}", f"10.98.0.{index + 1}"
        descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        self._descriptors.append(descriptor)
        device = f"echo{os.getpid()}n{index}"  # unique until it is moved
        flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR
        fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", device.encode(), flags))
        fcntl.ioctl(descriptor, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
        self.nodes.append((namespace, address))
        ip("netns", "add", namespace)
        ip("link", "set", device, "netns", namespace)
        ip("-n", namespace, "addr", "add", f"{address}/24", "dev", device)
        ip("-n", namespace, "link", "set", device, "txqueuelen", "1000", "up")
        ip("-n", namespace, "link", "set", "lo", "up")
        for name, value in sysctls.items():
            path = f"/proc/sys/net/ipv4/{name}"
            ip("netns", "exec", namespace, "sh", "-c", f"echo {value} > {path}")
        self.core.add(descriptor, address)

    def set(self, node: int, what: str, value: float) -> None:
        """Change a node's link; the value is in the unit of the command line."""
        self.core.set(node, what, value * UNITS[what])

    def close(self) -> None:
        """Remove every namespace."""
        for namespace, _ in self.nodes:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", namespace)
        for descriptor in self._descriptors:
            os.close(descriptor)


def remove_stale() -> list[str]:
    """Remove the namespaces of emulators that did not live to do it; return their names."""
    removed = []
    for path in NAMESPACES.glob("echo*-*") if NAMESPACES.exists() else ():
        match = re.fullmatch(r"echo(\d+)-\d+", path.name)
        if match is None or is_emulator(int(match[1])):
            continue
        with contextlib.suppress(subprocess.CalledProcessError):  # another start was faster
            ip("netns", "del", path.name)
            removed.append(path.name)
    return removed


def is_emulator(pid: int) -> bool:
    """Return whether the process lives, and is one of these and not one with a used number."""
    try:
        return b"wan.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def tell(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


def sysctls(arguments: argparse.Namespace) -> dict[str, str]:
    """Return what to set in each namespace under net.ipv4."""
    values = dict.fromkeys(BUFFERS, TUNED_BUFFERS) if arguments.tuned else {}
    if arguments.tuned:
        values["tcp_slow_start_after_idle"] = "0"
    if arguments.congestion:
        values["tcp_congestion_control"] = arguments.congestion
    return values


def serve(emulator: Emulator, stop: int) -> None:
    """Carry out lines from stdin until it ends, then stop the core."""
    for line in sys.stdin:
        match line.split():
            case ["status"]:
                stats = emulator.core.stats()
                tell(cpu_s=time.process_time(), at=time.monotonic(), **stats)
            case [node, what, value] if what in WHAT:
                emulator.set(int(node), what, float(value))
            case _:
                print(f"wan.py: {line!r} is no command", file=sys.stderr)
    os.write(stop, b"x")


def start(arguments: argparse.Namespace) -> Emulator:
    """Make the namespaces; on failure what was made is removed."""
    emulator = Emulator(Core(arguments.seed))
    try:
        for index in range(arguments.nodes):
            emulator.add(sysctls(arguments))
            emulator.set(index, "up", arguments.rate_mbit)
            emulator.set(index, "down", arguments.down_mbit)
            emulator.set(index, "delay", arguments.latency_ms / 2)
            emulator.set(index, "loss", arguments.loss / 2)
    except BaseException:
        emulator.close()
        raise
    return emulator


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--nodes", type=int, default=2)
    add("--rate-mbit", type=float, default=200, help="of each uplink, IP packets; 0: no limit")
    add("--down-mbit", type=float, default=0, help="of each downlink; 0: no limit")
    add("--latency-ms", type=float, default=20, help="one way between any two nodes")
    add("--queue-ms", type=float, default=100, help="before packets are dropped")
    add("--loss", type=float, default=0.0, help="probability for each segment between two nodes")
    add("--tuned", action="store_true", help="TCP buffers up to 64 MiB, no slow start after idle")
    add("--congestion", help="TCP's congestion control inside; the system's default if left out")
    add("--seed", type=int, default=0)
    add("--capacity", action="store_true", help="print what one TCP stream reaches, and end")
    return parser.parse_args()


def print_capacity() -> None:
    """Measure one TCP stream through the core without any limit."""
    options = ["--rate-mbit=0", "--latency-ms=0", "--tuned", "--queue-ms=1000"]
    command = [sys.executable, __file__, *options]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        nodes = json.loads(process.stdout.readline())["nodes"]
        serving = "import socket as s; c, _ = s.create_server(('', 7)).accept(); b = bytes(1 << 20)"
        serving += "\nfor _ in range(1000): c.sendall(b)"
        taking = "import socket as s, time; time.sleep(1); c = s.create_connection(('{}', 7))\n"
        taking += "b = bytearray(1 << 20); t = time.monotonic(); n = 0\n"
        taking += "while k := c.recv_into(b): n += k\nprint(n / (time.monotonic() - t))"
        inside = [["ip", "netns", "exec", name, sys.executable, "-c"] for name, _ in nodes]
        source = subprocess.Popen([*inside[0], serving])
        sink = [*inside[1], taking.format(nodes[0][1])]
        rate = float(subprocess.run(sink, capture_output=True, check=True).stdout)
        source.wait()
        process.stdin.close()
    print(f"{rate * 8 / 1e9:.1f} Gbit/s")


def main() -> None:
    arguments = parse_arguments()
    if arguments.capacity:
        print_capacity()
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the caller, and that our stdin
    remove_stale()
    emulator = start(arguments)
    try:
        os.setpriority(os.PRIO_PROCESS, 0, -10)  # a late network would be measured as a slow one
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing)  # the core in C does not come back for a signal's handler
        threading.Thread(target=serve, args=(emulator, writing), daemon=True).start()
        tell(nodes=emulator.nodes)
        emulator.core.run(arguments.queue_ms / 1e3, reading)
    finally:
        emulator.close()


if __name__ == "__main__":
    main()
