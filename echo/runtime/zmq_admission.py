"""Who may connect to a CURVE listener: those who dial with the key of the run, and nobody else.

libzmq asks inside its own process, by messages to an agreed address (ZAP, RFC 27), while it shakes
hands with a client. The answers come from the loop: no thread, and no list of keys to keep, since
the run has one key for all who dial. A client that is refused learns that it was, and is closed.
"""

from __future__ import annotations

import asyncio
import logging

import zmq

from echo.runtime.zmq_channel import Socket

_log = logging.getLogger(__name__)

_ENDPOINT = "inproc://zeromq.zap.01"
_LOG_EVERY_S = 10.0


class Admission:
    """Answers libzmq's questions about clients of the listeners of one context."""

    def __init__(
        self, context: zmq.Context[Socket], loop: asyncio.AbstractEventLoop, client_key: bytes
    ) -> None:
        """Begin to answer; must exist before the listener is bound.

        Args:
            context: whose listeners ask.
            loop: on which the answers are given.
            client_key: the public key that is admitted.
        """
        self._loop = loop
        self._client_key = client_key
        self._num_unlogged = 0
        self._logged_at = -_LOG_EVERY_S
        self._socket: Socket = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(_ENDPOINT)
        loop.add_reader(self._socket.FD, self.answer)
        self.answer()  # only a reader that has seen EAGAIN is woken

    def answer(self) -> None:
        """Answer all questions that have come."""
        while not self._socket.closed:
            try:
                envelope, _, version, request, *facts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            _domain, host, _identity, mechanism, *credentials = facts
            is_admitted = mechanism == b"CURVE" and credentials == [self._client_key]
            status = (b"200", b"OK") if is_admitted else (b"400", b"unknown key")
            self._socket.send_multipart([envelope, b"", version, request, *status, b"", b""])
            if not is_admitted:
                self._report(host.decode(errors="replace"))

    def close(self) -> None:
        """Stop to answer; clients that come later are refused by libzmq."""
        self._loop.remove_reader(self._socket.FD)
        self._socket.close(linger=0)

    def _report(self, host: str) -> None:
        self._num_unlogged += 1
        now = self._loop.time()
        if now - self._logged_at >= _LOG_EVERY_S:
            _log.warning(
                "refused %d connections without the secret of this run, the last from %s",
                self._num_unlogged,
                host,
            )
            self._num_unlogged, self._logged_at = 0, now
