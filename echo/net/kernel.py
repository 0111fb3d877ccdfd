"""Settings of the kernel that limit the transport, read once when a node starts.

One TCP connection over a long link is as fast as its buffers and its congestion control permit. At
1 Gbit/s and 100 ms the bandwidth-delay product is 12.5 MB. A TCP window takes about 0.7 of a
buffer. So one connection with the usual 4 MiB of `tcp_wmem` reaches a quarter of the link. Several
connections together can fill the link. If packets are lost, cubic falls far below the link's rate,
but BBR does not. So nodes open several connections to a parent if buffers are small or BBR is not
permitted. docs/broadcast.md names the sysctls with which one connection is enough.

Each connection takes a descriptor. So the limit on open files is raised as far as permitted.
"""

from __future__ import annotations

import math
import resource
import socket
from dataclasses import dataclass
from pathlib import Path

from echo.core.bounds import MAX_CONNECTIONS

ASSUMED_RATE_BYTES_PER_S = 125e6
"""Rate of the link for which `auto` chooses the number of connections: 1 Gbit/s."""
ASSUMED_RTT_S = 0.1
"""Round-trip time of that link in seconds, as between two continents."""
BDP_BYTES = ASSUMED_RATE_BYTES_PER_S * ASSUMED_RTT_S
"""Number of bytes under way that fill that link: its bandwidth-delay product."""
WINDOW_SHARE = 0.7
"""Largest measured share of a kernel buffer that holds bytes under way. Overhead takes the rest of
the buffer.
"""
SOCKETS_WITHOUT_BBR = 4
"""Least number of connections of a link without BBR. With several connections, a lost packet halves
the rate of only one of them, and not of the whole link.
"""
WANTED_DESCRIPTORS = 1 << 16
"""Wanted limit of open files: enough for a learner and thousands of workers, each with several
links.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFacts:
    """The kernel's TCP settings; None for a setting that the system does not report."""

    congestion_control: str | None = None
    """The congestion control algorithm that new sockets use."""
    can_use_bbr: bool | None = None
    """Whether this process may choose the algorithm BBR for a socket."""
    max_send_buffer_bytes: int | None = None
    max_receive_buffer_bytes: int | None = None


_SYSCTLS = Path("/proc/sys/net/ipv4")


def read_kernel(sysctls: Path = _SYSCTLS) -> KernelFacts:
    """Return the kernel's TCP settings. On systems that are not Linux, all settings are None."""
    available = _read(sysctls / "tcp_available_congestion_control")
    default = _read(sysctls / "tcp_congestion_control")
    return KernelFacts(
        congestion_control=default[0] if default else None,
        can_use_bbr=None if not available else _can_choose("bbr"),
        max_send_buffer_bytes=_last_number(_read(sysctls / "tcp_wmem")),
        max_receive_buffer_bytes=_last_number(_read(sysctls / "tcp_rmem")),
    )


def _read(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").split()
    except (OSError, UnicodeDecodeError):
        return []


def _last_number(words: list[str]) -> int | None:
    return int(words[-1]) if words and words[-1].isdigit() else None


def _can_choose(name: str) -> bool:
    """Return whether this process may choose a congestion control algorithm.

    The function tries the algorithm on a new socket, and closes the socket.
    """
    with socket.socket() as probe:
        try:
            probe.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
        except OSError:
            return False
    return True


def most_sockets(facts: KernelFacts) -> int:
    """Return how many connections a link needs to reach 1 Gbit/s at 100 ms."""
    sizes = (facts.max_send_buffer_bytes, facts.max_receive_buffer_bytes)
    known = [size for size in sizes if size is not None]
    num_sockets = 1 if known and facts.can_use_bbr is not False else SOCKETS_WITHOUT_BBR
    if known and min(known) < 2 * BDP_BYTES:
        enough = BDP_BYTES / (WINDOW_SHARE * max(1, min(known)))
        num_sockets = max(num_sockets, 2 ** math.ceil(math.log2(max(1.0, enough))))
    return min(MAX_CONNECTIONS, num_sockets)


def slow_settings(facts: KernelFacts) -> str | None:
    """Return a message about settings that make long links slow; None if there are none."""
    sizes = {"tcp_wmem": facts.max_send_buffer_bytes, "tcp_rmem": facts.max_receive_buffer_bytes}
    faults = [
        f"net.ipv4.{name} allows {size} bytes"
        for name, size in sizes.items()
        if size is not None and size < 2 * BDP_BYTES
    ]
    if facts.can_use_bbr is False:
        faults.append(f"bbr may not be chosen, so weights go out by {facts.congestion_control}")
    if not faults:
        return None
    return f"slow on links of 100 ms: {'; '.join(faults)}; see docs/broadcast.md, Long, fat links"


def raise_descriptor_limit(wanted: int = WANTED_DESCRIPTORS) -> int:
    """Raise the limit of open files to `wanted` if the system permits it; return the new limit.

    If `wanted` is not permitted, the limit is raised as far as permitted. Every link takes
    descriptors. The usual soft limit of 1024 is for programs that use `select`. Echo does not use
    `select`.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < target:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
    return descriptor_limit()


def descriptor_limit() -> int:
    """Return how many files this process may have open."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return WANTED_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft
