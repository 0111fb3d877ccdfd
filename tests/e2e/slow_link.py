"""A TCP link with a rate, which counts what it has carried."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

PIECE_BYTES = 2048


class SlowLink:
    """Carries connections to a port of this machine; what comes back from there is slow.

    It can be held after so many bytes. A connection that the port refuses is closed at once.
    Closing ends all connections.
    """

    def __init__(self, port: int, *, bytes_per_s: float) -> None:
        self.num_down = 0
        """Bytes handed to whoever connected."""
        self._target = ("127.0.0.1", port)
        self._bytes_per_s = bytes_per_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._is_closed = False
        self._lock = threading.Lock()
        self._free_at = 0.0
        self._limit = math.inf
        self._moved = threading.Condition()
        self.port: int = self._listener.getsockname()[1]
        self._spawn(self._accept)

    def _spawn(self, function: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=function, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(self._target)
            except OSError:
                near.close()
                continue
            with self._lock:
                if self._is_closed:
                    near.close()
                    far.close()
                    return
                self._sockets += [near, far]
                self._spawn(self._carry, near, far, False)
                self._spawn(self._carry, far, near, True)

    def _carry(self, source: socket.socket, target: socket.socket, is_down: bool) -> None:
        try:
            while piece := source.recv(PIECE_BYTES):
                if is_down:
                    self._wait(len(piece))
                    with self._moved:
                        self._moved.wait_for(lambda: self.num_down < self._limit)
                target.sendall(piece)
                if is_down:
                    with self._lock:
                        self.num_down += len(piece)
        except OSError:
            pass
        finally:
            _end(source)  # the other direction ends too
            _end(target)

    def _wait(self, num_bytes: int) -> None:
        """Wait until the link, which all connections share, has carried so much more."""
        with self._lock:
            now = time.monotonic()
            self._free_at = max(now, self._free_at) + num_bytes / self._bytes_per_s
            wait_s = self._free_at - now
        time.sleep(wait_s)

    def hold_after(self, num_bytes: float) -> None:
        """Carry nothing more down once it has been so much, until that is moved."""
        with self._moved:
            self._limit = num_bytes
            self._moved.notify_all()

    def close(self) -> None:
        """End everything."""
        self.hold_after(math.inf)
        with self._lock:
            self._is_closed = True
        for each in [self._listener, *self._sockets]:
            _end(each)
        for thread in self._threads:
            thread.join()
        for each in [self._listener, *self._sockets]:
            each.close()


def _end(each: socket.socket) -> None:
    """Wake whoever waits for a socket: closing it alone would not."""
    with contextlib.suppress(OSError):
        each.shutdown(socket.SHUT_RDWR)
