"""A task that runs on another host, behind `echo-task-server` or anything that speaks as it does.

Every call is one POST of JSON (calls.py) to the address, on a connection of its own. A host that
cannot be reached is tried again like a call that asks for it; once a call has been sent it is not
sent again unless it only scores, since an environment has perhaps taken the turn already.
"""

from __future__ import annotations

import http.client
import os
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec

from echo.errors import ConfigError
from echo.tasks.calls import Answer, Call, Fault, Score
from echo.tasks.faults import RewardError
from echo.tasks.host import Limits, TaskHost

TOKEN_VARIABLE = "ECHO_TASK_TOKEN"

PATIENCE = 4
"""Calls that may be in line before one's own at a server."""
MARGIN_S = 5.0
"""Seconds on the way, beside what a call may take there."""


class TaskInfo(msgspec.Struct, frozen=True):
    """What a task's server says of its task."""

    name: str
    has_turns: bool
    max_turns: int | None
    digest: str
    """Of its source, to compare with the learner's."""


@dataclass(frozen=True, slots=True)
class _Response:
    status: int
    body: bytes


class HttpHost(TaskHost):
    """A task on another host."""

    def __init__(self, address: str, limits: Limits, *, max_concurrent: int) -> None:
        """Reach for nothing yet.

        Args:
            address: "http://host:port".
            limits: of its calls.
            max_concurrent: calls of `score_all` at a time.
        """
        super().__init__(address, limits, max_concurrent=max_concurrent)
        self._address = address
        self._place = urlsplit(address).netloc

    def describe(self) -> TaskInfo:
        """Ask what the server has.

        Raises:
            ConfigError: if it cannot be reached or is something else.
        """
        where = f"reward.address = {self._address!r}"
        try:
            response = self._request("GET", b"", MARGIN_S)
            if response.status == http.client.OK:
                return msgspec.json.decode(response.body, type=TaskInfo)
            problem = f"it answers {_words(response)}"
        except (OSError, http.client.HTTPException) as error:
            problem = f"it cannot be reached: {error or type(error).__name__}"
        except msgspec.DecodeError as error:
            problem = f"what answers there is no task's server: {error}"
        raise ConfigError(f"{where}: {problem}; start bin/echo-task-server there")

    def _answer(self, call: Call) -> Answer:
        # The server tries again by itself, and bounds every call; what is left is its queue.
        limit_s = PATIENCE * self.limits.seconds(call) * (self.limits.retries + 1) + MARGIN_S
        try:
            response = self._request("POST", msgspec.json.encode(call), limit_s)
        except TimeoutError:
            raise self.timed_out(call) from None
        except ConnectionRefusedError as error:
            return Answer(fault=Fault("reward_lost", self._lost(call, error), is_transient=True))
        except (OSError, http.client.HTTPException) as error:
            is_safe = isinstance(call, Score)
            return Answer(fault=Fault("reward_lost", self._lost(call, error), is_transient=is_safe))
        if response.status == http.client.SERVICE_UNAVAILABLE:
            return Answer(fault=Fault("reward_lost", f"{self.name} is busy", is_transient=True))
        if response.status != http.client.OK:
            raise RewardError(
                f"{call} at {self.name} was answered {_words(response)}", reason="reward_lost"
            )
        try:
            return msgspec.json.decode(response.body, type=Answer)
        except msgspec.DecodeError as error:
            raise RewardError(
                f"{call}: what {self.name} answers is no answer: {error}", reason="reward_lost"
            ) from error

    def _lost(self, call: Call, error: Exception) -> str:
        return f"{call} at {self.name}: {error or type(error).__name__}; is its server running?"

    def _request(self, method: str, body: bytes, timeout_s: float) -> _Response:
        connection = http.client.HTTPConnection(self._place, timeout=timeout_s)
        token = os.environ.get(TOKEN_VARIABLE)
        headers = {"Content-Type": "application/json", "Connection": "close"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        try:
            connection.request(method, "/", body=body or None, headers=headers)
            response = connection.getresponse()
            return _Response(response.status, response.read())
        finally:
            connection.close()


def _words(response: _Response) -> str:
    text = response.body[:200].decode(errors="replace").strip()
    return f"{response.status} {text}"
