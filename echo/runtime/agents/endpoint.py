"""The OpenAI-compatible HTTP endpoint for agents, which runs in the node's event loop.

    GET  /health                         no token needed
    GET  /v1/models
    POST /v1/chat/completions            logprobs; session: header X-Echo-Session, or
    POST /v1/completions                 /sessions/ID/v1/... for agents that know only a base URL
    POST /v1/echo/sessions               {"wait_s": 30}    an episode; 204 none yet, 410 no more;
                                                           waits 1 to 60 seconds
    POST /v1/echo/sessions/ID/reward     {"reward": 1.0}   or an object with the reward's parts by
                                                           name; without a reward, the task's reward
                                                           function is called
    DELETE /v1/echo/sessions/ID          give up the episode

Every request except /health needs `Authorization: Bearer TOKEN`. OpenAI's clients make this header
from their API key. The token is checked before a body is read. A connection is closed if it does
not send the token within TOKEN_S. At most MAX_UNKNOWN connections may be open without a token. If
more such connections are open, the oldest is closed.

With `stream`, the whole answer is sampled first. Then the answer is sent as the events that
OpenAI's clients expect.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import itertools
import json
import logging
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, nullcontext
from typing import Any

import msgspec
from aiohttp import web

from echo.core.errors import DataError, EchoError, StorageError, TransportError
from echo.core.reward_parts import PartedReward, find_name_fault
from echo.core.units import one_line
from echo.net.transport import format_address, is_loopback, parse_address
from echo.records.files import write_file
from echo.runtime.agents.agents import Agents, StoppingError
from echo.runtime.agents.openai_json import (
    TEMPLATE,
    Body,
    BodyError,
    ChatAnswer,
    ChatBody,
    TextBody,
    options_of,
    prompt_of,
    read_body,
)
from echo.runtime.agents.sessions import SessionError, UnknownSessionError
from echo.tasks.rewards import RewardError
from echo.wire.codec import DECODE_ERRORS


class SlowBodyError(EchoError):
    """A request's body does not arrive in time."""


MAX_BODY_BYTES = 16 << 20
"""Largest size of a request's body, in bytes. A text of a million tokens has about 4 MB."""
LARGE_BODY_BYTES = 256 << 10
"""A body is large if it has more bytes than this number, or if its size is unknown.

At most MAX_LARGE_BODIES large bodies are read at the same time.
"""
MAX_LARGE_BODIES = 4
"""Largest number of large bodies in memory at the same time: 64 MiB with the largest bodies."""
BODY_S = 30.0
"""Seconds within which a request's body must arrive. Until then, a large body keeps one of
MAX_LARGE_BODIES places."""
TOKEN_S = 10.0
"""Seconds after which a connection that has not sent the token is closed."""
MAX_UNKNOWN = 256
"""Largest number of open connections that have not sent the token. Each takes a file descriptor, of
which many systems allow a process 1 024.
"""
KEEPALIVE_S = 75.0
"""Seconds that a connection may be idle between two requests, as in nginx."""
MIN_WAIT_S = 1.0
"""Seconds that a request for an episode waits at least. The learner must have the time to grant a
lease, which the worker asks for only while an agent waits.
"""
MAX_WAIT_S = 60.0
"""Longest time, in seconds, that a request waits for an episode. A longer `wait_s` is cut to this
time, because clients and proxies give up requests that stay unanswered for long.
"""
LINGER_S = 1.0
"""Seconds that running calls may still take when the node ends."""
SESSION_HEADER = "X-Echo-Session"
_STATUSES: tuple[tuple[type[EchoError], int], ...] = (
    (StoppingError, 503),
    (RewardError, 422),
    (UnknownSessionError, 404),
    (SessionError, 409),
    (SlowBodyError, 408),
    (BodyError, 400),
    (DataError, 400),
)
"""Class of errors -> HTTP status. The first class that matches an error determines its status. If
no class matches, the status is 500.
"""
_SERVED = (
    "POST /v1/chat/completions, POST /v1/completions and GET /v1/models, also behind /sessions/ID; "
    "give a client a base URL that ends in /v1"
)


class _Begin(msgspec.Struct, forbid_unknown_fields=True):
    wait_s: float = 30.0


class _Reward(msgspec.Struct, forbid_unknown_fields=True):
    reward: float | dict[str, float] | None = None


class Endpoint:
    """The routes of the endpoint, and the checks of requests."""

    def __init__(self, agents: Agents, *, token: str, log: logging.Logger) -> None:
        self._agents = agents
        self._token = token.encode()
        self._log = log
        self._numbers = itertools.count(1)
        self._unknown: dict[web.RequestHandler, asyncio.TimerHandle] = {}
        self._large_bodies = asyncio.Semaphore(MAX_LARGE_BODIES)
        self.app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._guard])
        add = self.app.router
        add.add_get("/health", self._health)
        for prefix in ("", "/sessions/{session}"):
            add.add_get(f"{prefix}/v1/models", self._models)
            add.add_post(f"{prefix}/v1/chat/completions", self._chat)
            add.add_post(f"{prefix}/v1/completions", self._text)
        add.add_post("/v1/echo/sessions", self._begin)
        add.add_post("/v1/echo/sessions/{session}/reward", self._reward)
        add.add_delete("/v1/echo/sessions/{session}", self._abandon)

    @asynccontextmanager
    async def listening(self, host: str, port: int) -> AsyncIterator[int]:
        """Serve until the `async with` block ends; yield the port.

        Args:
            host: the name or address to bind.
            port: 0 for any free port.

        Raises:
            TransportError: if the address cannot be bound.
        """
        # Handlers are cancelled, since an agent that has disconnected must not get an episode.
        runner = web.AppRunner(
            self.app,
            access_log=None,
            handle_signals=False,
            handler_cancellation=True,
            shutdown_timeout=LINGER_S,
            keepalive_timeout=KEEPALIVE_S,
            lingering_time=LINGER_S,
        )
        await runner.setup()
        listener: asyncio.Server | None = None
        try:
            try:
                listener = await asyncio.get_running_loop().create_server(
                    functools.partial(self._accept, runner), host, port
                )
            except OSError as error:
                raise TransportError(
                    f"agent.listen: cannot listen on {host}:{port}: {error.strerror or error}; set "
                    "it to another address, or to port 0 for any free port"
                ) from error
            yield int(listener.sockets[0].getsockname()[1])
        finally:
            self._agents.close()
            if listener is not None:
                listener.close()
            for timer in self._unknown.values():
                timer.cancel()
            await runner.cleanup()

    def _accept(self, runner: web.AppRunner) -> web.RequestHandler:
        assert runner.server is not None
        connection = runner.server()
        self._unknown[connection] = asyncio.get_running_loop().call_later(
            TOKEN_S, self._close_unknown, connection
        )
        if len(self._unknown) > MAX_UNKNOWN:
            self._close_unknown(next(iter(self._unknown)))
        return connection

    def _close_unknown(self, connection: web.RequestHandler) -> None:
        self._unknown.pop(connection).cancel()
        connection.force_close()

    # --- around every call -----------------------------------------------------------------------

    @web.middleware
    async def _guard(
        self,
        request: web.Request,
        handler: Callable[[web.Request], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        refusal = self._refusal(request)
        if refusal is not None:
            refusal.force_close()  # the body is not read
            return refusal
        try:
            return await handler(request)
        except (web.HTTPNotFound, web.HTTPMethodNotAllowed) as error:
            what = f"{request.method} {request.path}"
            return _error(error.status, f"{what} is not served here; what is: {_SERVED}")
        except web.HTTPRequestEntityTooLarge as error:  # after decompression
            return _error(error.status, f"a body may have {MAX_BODY_BYTES} bytes")
        except EchoError as error:
            status = next((code for kind, code in _STATUSES if isinstance(error, kind)), 500)
            if status == 500:
                self._log.warning("a call of an agent failed: %s", error)
            answer = _error(status, str(error))
            if isinstance(error, SlowBodyError):
                answer.force_close()
            return answer

    def _refusal(self, request: web.Request) -> web.Response | None:
        header = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if hmac.compare_digest(header.encode(errors="surrogateescape"), self._token):
            timer = self._unknown.pop(request.protocol, None)
            if timer is not None:
                timer.cancel()
        elif request.path != "/health":
            return _error(401, "the token is missing or wrong: send it as the API key")
        if (request.content_length or 0) > MAX_BODY_BYTES:
            return _error(413, f"a body may have {MAX_BODY_BYTES} bytes")
        return None

    # --- OpenAI's --------------------------------------------------------------------------------

    async def _health(self, _: web.Request) -> web.Response:
        version = self._agents.role.installed_version
        is_ready = version is not None
        body = {"status": "ok" if is_ready else "starting", "version": str(version or "")}
        return _json(body, status=200 if is_ready else 503)

    async def _models(self, _: web.Request) -> web.Response:
        name = self._agents.parts.model_name
        model = {"id": name, "object": "model", "created": 0, "owned_by": "echo"}
        return _json({"object": "list", "data": [model]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, read_body(await self._read(request), ChatBody))

    async def _text(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, read_body(await self._read(request), TextBody))

    async def _read(self, request: web.Request) -> bytes:
        """Return a request's body.

        At most MAX_LARGE_BODIES large bodies are read at a time.

        Raises:
            SlowBodyError: if the body does not arrive in time.
        """
        size = request.content_length
        is_large = size is None or size > LARGE_BODY_BYTES
        async with self._large_bodies if is_large else nullcontext():
            try:
                async with asyncio.timeout(BODY_S):
                    return await request.read()
            except TimeoutError as error:
                raise SlowBodyError(f"the body did not arrive within {BODY_S:g} s") from error
            except web.RequestPayloadError as error:
                text = "the body is not what Content-Encoding or Transfer-Encoding says it is"
                raise BodyError(text) from error

    async def _complete(self, request: web.Request, body: Body) -> web.StreamResponse:
        session = request.match_info.get("session") or request.headers.get(SESSION_HEADER)
        parts = self._agents.parts
        arguments = body.chat_template_kwargs
        if arguments and (other := parts.dialogue.other_arguments(arguments)):
            raise BodyError(f"chat_template_kwargs.{other} is not supported: {TEMPLATE}")
        answer = ChatAnswer(
            body, parts.dialogue, model=parts.model_name, call_id=str(next(self._numbers))
        )
        turn = await self._agents.call(session, prompt_of(body), options_of(body))
        return _events(answer.events(turn)) if body.stream else _json(answer.whole(turn))

    # --- ours ------------------------------------------------------------------------------------

    async def _begin(self, request: web.Request) -> web.Response:
        wait_s = _decode(await self._read(request), _Begin).wait_s
        try:
            session = await self._agents.begin(wait_s=min(max(MIN_WAIT_S, wait_s), MAX_WAIT_S))
        except StoppingError as error:
            return _error(410, str(error))
        return web.Response(status=204) if session is None else _json(session.opening)

    async def _reward(self, request: web.Request) -> web.Response:
        given = _decode(await self._read(request), _Reward).reward
        if isinstance(given, dict):
            if fault := find_name_fault(given):
                return _error(400, f"reward: {fault}")
            given = PartedReward(given)
        reward = await self._agents.reward(request.match_info["session"], given)
        return _json({"reward": None if reward is None else float(reward)})

    async def _abandon(self, request: web.Request) -> web.Response:
        self._agents.abandon(request.match_info["session"])
        return web.Response(status=204)


TOKEN_VARIABLE = "ECHO_AGENT_TOKEN"


async def serve(agents: Agents, *, log: logging.Logger) -> None:
    """Write the endpoint's address and token to a file, and serve agents until cancelled.

    Raises:
        TransportError: if the address cannot be bound.
        StorageError: if the file cannot be written.
    """
    token = os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(24)
    listen, where = agents.parts.listen, agents.parts.endpoint_path
    host, port = parse_address(listen)
    async with Endpoint(agents, token=token, log=log).listening(host, port) as bound_port:
        url = format_address(host, bound_port).replace("tcp://", "http://")
        try:
            write_file(where, json.dumps({"url": url, "token": token}).encode(), mode=0o600)
        except OSError as error:
            raise StorageError(f"cannot write {where}: {error}") from error
        log.info("agents are served at %s/v1; address and token are in %s", url, where)
        if not is_loopback(listen):
            log.warning(
                "agent.listen = %s is open to other machines, and HTTP is not encrypted: keep "
                "it inside a network that you trust, or behind a proxy with TLS",
                listen,
            )
        await asyncio.Event().wait()


def _decode(data: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(data or b"{}", type=kind)
    except DECODE_ERRORS as error:
        raise BodyError(f"the body cannot be read: {error}") from error


def _json(body: object, *, status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(body), status=status, content_type="application/json"
    )


def _events(events: Iterable[object]) -> web.Response:
    lines = [msgspec.json.encode(event) for event in events] + [b"[DONE]"]
    body = b"".join(b"data: " + line + b"\n\n" for line in lines)
    return web.Response(body=body, content_type="text/event-stream")


def _error(status: int, message: str) -> web.Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    # The message may repeat text of the caller that UTF-8 cannot encode.
    error = {"message": one_line(message), "type": kind, "code": None}
    return _json({"error": error}, status=status)
