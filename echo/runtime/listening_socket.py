"""The socket that a parent listens on, made here so that its congestion control can be chosen.

It is bound first and listens later: the address is taken before a node has opened its files, and
strangers cannot take the descriptors that it opens them with.

Accepted connections inherit the setting, and it rules the direction that carries the weights: from
the parent, who binds, to its children. BBR keeps its rate under loss where cubic collapses. Where
the kernel does not permit the wanted algorithm, and on loopback, the system's default stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
import logging
import socket
import struct
import sys

from echo.core.errors import TransportError
from echo.runtime.transport import parse_address

_log = logging.getLogger(__name__)

_BACKLOG = 512
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27  # of Linux's asm-generic/socket.h
_DROP = struct.pack("HBBI", 0x06, 0, 0, 0)  # BPF_RET | BPF_K: keep 0 bytes of every packet
_REMEDIES = {
    errno.EADDRINUSE: "another process listens there; stop it or choose another port",
    errno.EADDRNOTAVAIL: "this machine has no such address; use one of its own or 0.0.0.0",
    errno.EACCES: "ports below 1024 need privileges; choose a higher one",
}


async def bound_socket(address: str, congestion_control: str | None) -> socket.socket:
    """Return a non-blocking TCP socket that is bound to `address` and does not listen yet.

    Raises:
        TransportError: if it cannot be bound; the message names the address and the remedy.
    """
    host, port = parse_address(address)
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, where = found[0]
        bound = socket.socket(family, kind, protocol)
        try:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(where)
            _set_congestion_control(bound, congestion_control)
            bound.setblocking(False)
        except OSError:
            bound.close()
            raise
    except OSError as error:
        raise _refusal(address, error) from error
    return bound


def listen_on(bound: socket.socket, address: str) -> None:
    """Let others connect.

    Raises:
        TransportError: if somebody else has bound the same port, and listened first.
    """
    try:
        bound.listen(_BACKLOG)
    except OSError as error:
        raise _refusal(address, error) from error


def _refusal(address: str, error: OSError) -> TransportError:
    remedy = _REMEDIES.get(error.errno or 0, "check the host and the port")
    return TransportError(f"cannot listen on {address}: {error}: {remedy}")


def _set_congestion_control(bound: socket.socket, name: str | None) -> None:
    """Choose how accepted connections send; keep the default where the kernel refuses."""
    host = str(bound.getsockname()[0])
    if name is None or host == "::1" or host.startswith("127."):
        return
    try:
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
    except OSError as error:
        _log.warning(
            "%s is not available (%s): weights may crawl on lossy links; "
            "add it to net.ipv4.tcp_allowed_congestion_control",
            name,
            error,
        )


class Gate:
    """Keeps newcomers from a listening socket for a while, and leaves its connections alone.

    libzmq accepts whoever the kernel offers, at any rate, and ends its connections when it is told
    to unbind. So the kernel is told to drop what comes to the listening socket itself: newcomers'
    kernels try again, after one second, two, four. On Linux; elsewhere the gate stays open.
    """

    def __init__(self, bound: socket.socket) -> None:
        """Hold the socket, which listens until both it and the gate are closed."""
        self._socket = bound.dup()

    def shut(self) -> None:
        """Let nobody in, beside the few hundred who wait for being accepted already."""
        if sys.platform == "linux":
            rules = ctypes.create_string_buffer(_DROP)
            program = struct.pack("HP", 1, ctypes.addressof(rules))
            with contextlib.suppress(OSError):  # a sandbox that forbids it
                self._socket.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)

    def open(self) -> None:
        """Let everybody in."""
        if sys.platform == "linux" and self._socket.fileno() >= 0:
            with contextlib.suppress(OSError):  # it was open
                self._socket.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)

    def close(self) -> None:
        """Let go of the socket."""
        self._socket.close()
