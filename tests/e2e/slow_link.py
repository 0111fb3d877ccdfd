"""A TCP link with a rate, which counts what it has carried."""

from __future__ import annotations

import math
import socket
import threading
import time

PIECE_BYTES = 2048


class SlowLink:
    """Carries connections to a port of this machine; what comes back from there is slow.

    It can be held after so many bytes. Closing ends all connections.
    """

    def __init__(self, port: int, *, bytes_per_s: float) -> None:
        self.num_down = 0
        """Bytes handed to whoever connected."""
        self._target = ("127.0.0.1", port)
        self._bytes_per_s = bytes_per_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = [self._listener]
        self._lock = threading.Lock()
        self._free_at = 0.0
        self._limit = math.inf
        self._moved = threading.Condition()
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
            except OSError:
                return
            self._sockets += [near, far]
            threading.Thread(target=self._carry, args=(near, far, False), daemon=True).start()
            threading.Thread(target=self._carry, args=(far, near, True), daemon=True).start()

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
            for each in (source, target):
                each.close()

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
        for each in self._sockets:
            each.close()
