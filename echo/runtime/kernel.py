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
import socket
from pathlib import Path

from echo.net.zmq import KernelFacts

_SYSCTLS = Path("/proc/sys/net/ipv4")

# glibc's mallopt, from malloc.h.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_KEPT_BYTES = 64 << 20
_LARGEST_FROM_HEAP = 32 << 20  # glibc takes no more


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
