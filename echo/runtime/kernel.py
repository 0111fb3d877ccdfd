"""What the kernel and the C library allow the transport, read once when a node starts.

One TCP connection over a long link is as fast as its buffers and its congestion control permit,
whatever ZeroMQ does. At 1 Gbit/s and 100 ms, whose bandwidth-delay product is 12.5 MB, one
connection with the usual 4 MiB of `tcp_wmem` reaches a quarter of the link, since about 0.7 of a
buffer is window, and several together all of it. With losses cubic falls far below, BBR does not.
So nodes open several connections to a parent where buffers are small or BBR cannot be had, and say
which sysctl would make that unnecessary. All values are of the network namespace.
"""

from __future__ import annotations

import ctypes
import math
import resource
import socket
from dataclasses import dataclass
from pathlib import Path

ASSUMED_RATE_BYTES_PER_S = 125e6
"""1 Gbit/s: the link for which `auto` provides."""
ASSUMED_RTT_S = 0.1
WINDOW_SHARE = 0.7
"""Measured share of a kernel buffer that is in flight at most; the rest is bookkeeping."""
WANTED_BUFFER_BYTES = 64 << 20
"""What to set the buffers to: room for several times the product above."""
SOCKETS_WITHOUT_BBR = 4
"""Least number of connections where one lost packet halves a connection's rate."""
MAX_SOCKETS = 8
"""Beyond, nothing was gained."""

WANTED_DESCRIPTORS = 1 << 16
"""Open files: enough for a learner with thousands of workers that have several links each."""

_SYSCTLS = Path("/proc/sys/net/ipv4")

# glibc's mallopt, from malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_KEPT_BYTES = 64 << 20
_LARGEST_FROM_HEAP = 32 << 20  # glibc takes no more


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelFacts:
    """Settings of TCP; None where the system does not tell."""

    congestion_control: str | None = None
    """What new sockets use."""
    can_use_bbr: bool | None = None
    """Whether this process may choose BBR for a socket of its own."""
    is_bbr_available: bool | None = None
    """Whether the kernel has it, whoever may choose it."""
    max_send_buffer_bytes: int | None = None
    max_receive_buffer_bytes: int | None = None
    slow_start_after_idle: bool | None = None


@dataclass(frozen=True, slots=True)
class Advice:
    """What follows from the facts."""

    num_sockets_per_link: int
    warnings: tuple[str, ...]
    """One per setting that costs speed, with the sysctl and the value to give it."""


def read_facts(sysctls: Path = _SYSCTLS) -> KernelFacts:
    """Return what the kernel tells; other systems than Linux tell nothing."""
    available = _read(sysctls / "tcp_available_congestion_control")
    after_idle = _read(sysctls / "tcp_slow_start_after_idle")
    default = _read(sysctls / "tcp_congestion_control")
    return KernelFacts(
        congestion_control=default[0] if default else None,
        can_use_bbr=None if not available else _can_choose("bbr"),
        is_bbr_available=None if not available else "bbr" in available,
        max_send_buffer_bytes=_last_number(_read(sysctls / "tcp_wmem")),
        max_receive_buffer_bytes=_last_number(_read(sysctls / "tcp_rmem")),
        slow_start_after_idle=None if not after_idle else after_idle != ["0"],
    )


def advise(facts: KernelFacts) -> Advice:
    """Return how many connections one link needs for 1 Gbit/s at 100 ms, and what would help."""
    bdp_bytes = ASSUMED_RATE_BYTES_PER_S * ASSUMED_RTT_S
    known = [
        size
        for size in (facts.max_send_buffer_bytes, facts.max_receive_buffer_bytes)
        if size is not None
    ]
    num_sockets, warnings = 1, []
    if not known:
        num_sockets = SOCKETS_WITHOUT_BBR
    elif min(known) < 2 * bdp_bytes:
        enough = bdp_bytes / (WINDOW_SHARE * max(1, min(known)))
        num_sockets = min(MAX_SOCKETS, 2 ** math.ceil(math.log2(max(1.0, enough))))
    for name, size in (
        ("tcp_wmem", facts.max_send_buffer_bytes),
        ("tcp_rmem", facts.max_receive_buffer_bytes),
    ):
        if size is not None and size < 2 * bdp_bytes:
            mbit_per_s = round(WINDOW_SHARE * size / ASSUMED_RTT_S * 8e-6)
            middle = "16384" if name == "tcp_wmem" else "131072"
            warnings.append(
                f"net.ipv4.{name} allows {size} bytes, about {mbit_per_s} Mbit/s per connection at "
                f'100 ms: sysctl -w net.ipv4.{name}="4096 {middle} {WANTED_BUFFER_BYTES}"'
            )
    if facts.can_use_bbr is False:
        num_sockets = max(num_sockets, SOCKETS_WITHOUT_BBR)
        load = "" if facts.is_bbr_available else "modprobe tcp_bbr && "
        warnings.append(
            f"bbr cannot be chosen, so weights go out by {facts.congestion_control}, which "
            f"crawls on links that lose packets: {load}sysctl -w "
            'net.ipv4.tcp_allowed_congestion_control="reno cubic bbr"'
        )
        if facts.slow_start_after_idle:
            warnings.append(
                "net.ipv4.tcp_slow_start_after_idle is 1: every version starts slowly again: "
                "sysctl -w net.ipv4.tcp_slow_start_after_idle=0"
            )
    return Advice(num_sockets, tuple(warnings))


def raise_descriptor_limit(wanted: int = WANTED_DESCRIPTORS) -> int:
    """Raise the limit of open files as far as it may be; return what it is now.

    Every link takes descriptors, and the usual soft limit of 1024 is meant for programs that use
    `select`, which nothing here does.
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


def tune_malloc() -> bool:
    """Let the C library keep freed memory for the next chunk; return whether it could be told.

    libzmq allocates one buffer per message. By default glibc maps each of a megabyte anew and
    returns it when it is freed, so that every chunk costs its page faults twice. Some 64 MiB per
    busy thread stay with the process instead. Does nothing with other C libraries.
    """
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018, only to see whether it is glibc
        mallopt = libc.mallopt
    except (OSError, AttributeError, TypeError):
        return False
    settings = (
        (_M_MMAP_THRESHOLD, _LARGEST_FROM_HEAP),
        (_M_TRIM_THRESHOLD, _KEPT_BYTES),
        (_M_TOP_PAD, _KEPT_BYTES // 4),
    )
    results = [mallopt(option, value) for option, value in settings]
    return results == [1] * len(settings)


def _read(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").split()
    except (OSError, UnicodeDecodeError):
        return []


def _last_number(words: list[str]) -> int | None:
    return int(words[-1]) if words and words[-1].isdigit() else None


def _can_choose(name: str) -> bool:
    """Try it: what may be chosen depends on the list of allowed ones and on privileges."""
    with socket.socket() as probe:
        try:
            probe.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
        except OSError:
            return False
    return True
