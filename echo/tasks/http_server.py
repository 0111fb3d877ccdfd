"""A task behind an address: HTTP and JSON, so that anything can call it and anything can be called.

    GET  /     {"name": "Guess", "has_turns": true, "max_turns": null, "digest": "..."}
    POST /     a call (calls.py)  ->  an answer

    {"do": "score", "example": {...}, "completion": "4"}       {"value": 1.0}
    {"do": "begin", "episode": "x#1", "example": {...}}        {}
    {"do": "reply", "episode": "x#1", "text": "4"}             {"value": [{"role": ...}]} or {}
    {"do": "outcome", "episode": "x#1"}                        {"value": 0.5}
    {"do": "end", "episode": "x#1"}                            {}
    whatever goes wrong                                        {"fault": {"reason": .., "text": ..}}

An example is an object with `index`, `split`, `prompt`, and perhaps `answer`, `info`, `columns`,
`task` and `source`. With a token every request needs "Authorization: Bearer TOKEN". Calls run in
the server's own process pool; above MAX_CALLS at a time it answers 503, and an episode that nobody
has asked for in EPISODE_IDLE_S is ended, because its worker is gone.
"""

from __future__ import annotations

import hmac
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

from echo.errors import TransportError
from echo.tasks.calls import Answer, Begin, Call, End, Fault, Score
from echo.tasks.faults import RewardError
from echo.tasks.host import TaskHost
from echo.tasks.http_host import TaskInfo

MAX_CALLS = 256
"""Requests at a time; each has a thread."""
MAX_BODY_BYTES = 64 << 20
IDLE_S = 30.0
"""Seconds for a client to send its request."""
EPISODE_IDLE_S = 3600.0

_decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Call)


class TaskServer:
    """Serves one task until it is stopped."""

    def __init__(
        self, host: TaskHost, info: TaskInfo, listen: tuple[str, int], *, token: str = ""
    ) -> None:
        """Bind the address; `serve` serves.

        Args:
            host: where the task's code runs.
            info: what to say of it.
            listen: host and port; port 0 takes any free one.
            token: what clients must show; empty for nothing.

        Raises:
            TransportError: if the address cannot be bound.
        """
        self._host = host
        self._info = info
        self._token = token
        self._slots = threading.BoundedSemaphore(MAX_CALLS)
        self._lock = threading.Lock()
        self._used_at: dict[str, float] = {}
        try:
            self._server = _Server(listen, _Handler)
        except OSError as error:
            raise TransportError(
                f"cannot listen on {listen[0]}:{listen[1]}: {error.strerror or error}; choose "
                "another address"
            ) from error
        self._server.owner = self

    @property
    def port(self) -> int:
        """The port that was bound."""
        return int(self._server.server_address[1])

    def serve(self) -> None:
        """Answer requests until `stop`."""
        self._server.serve_forever(poll_interval=0.1)

    def stop(self) -> None:
        """End `serve` and let go of the address; from another thread than its."""
        self._server.shutdown()
        self._server.server_close()

    def close(self) -> None:
        """End the task's processes."""
        self._host.close()

    # --- requests --------------------------------------------------------------------------------

    def is_welcome(self, authorization: str) -> bool:
        """Return whether a request shows the token."""
        wanted = f"Bearer {self._token}"
        return not self._token or hmac.compare_digest(authorization.encode(), wanted.encode())

    def describe(self) -> bytes:
        """Return what there is."""
        return msgspec.json.encode(self._info)

    def answer(self, body: bytes) -> tuple[HTTPStatus, bytes]:
        """Carry out the call in a request's body."""
        try:
            call: Call = _decoder.decode(body)
        except msgspec.DecodeError as error:
            return HTTPStatus.BAD_REQUEST, f"no call: {error}".encode()
        if not self._slots.acquire(blocking=False):
            return HTTPStatus.SERVICE_UNAVAILABLE, b"too many calls at a time"
        try:
            return HTTPStatus.OK, msgspec.json.encode(self._perform(call))
        finally:
            self._slots.release()

    def _perform(self, call: Call) -> Answer:
        if not isinstance(call, Score):
            self._sweep(call)
        try:
            return Answer(self._host.perform(call))
        except (RewardError, TypeError, ValueError) as error:
            # The last two: an example that is none.
            reason = error.reason if isinstance(error, RewardError) else "reward_error"
            return Answer(fault=Fault(reason, str(error)))

    def _sweep(self, call: Any) -> None:
        """Note that an episode is in use, and end those that nobody uses any more."""
        now = time.monotonic()
        with self._lock:
            if isinstance(call, End):
                self._used_at.pop(call.episode, None)
            else:
                self._used_at[call.episode] = now
            idle = []
            if isinstance(call, Begin):
                idle = [e for e, at in self._used_at.items() if now - at > EPISODE_IDLE_S]
            for episode in idle:
                del self._used_at[episode]
        for episode in idle:
            self._host.perform(End(episode))


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    owner: TaskServer


class _Handler(BaseHTTPRequestHandler):
    """One request."""

    timeout = IDLE_S
    server: _Server

    def do_GET(self) -> None:
        """Say what there is."""
        if self._is_welcome():
            self._respond(HTTPStatus.OK, self.server.owner.describe())

    def do_POST(self) -> None:
        """Carry out a call."""
        if not self._is_welcome():
            return
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            self._respond(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, b"no length, or one too large")
            return
        self._respond(*self.server.owner.answer(self.rfile.read(int(length))))

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002, the library's name
        """Keep quiet: there are thousands of requests."""

    def _is_welcome(self) -> bool:
        if self.server.owner.is_welcome(self.headers.get("Authorization", "")):
            return True
        text = b"the token is missing or wrong: set ECHO_TASK_TOKEN to the server's"
        self._respond(HTTPStatus.UNAUTHORIZED, text)
        return False

    def _respond(self, status: HTTPStatus, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
