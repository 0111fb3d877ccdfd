"""The HTTP endpoint for agents, OpenAI-compatible, in the node's own event loop.

    GET  /health                         no token needed
    GET  /v1/models
    POST /v1/chat/completions            stream, logprobs; session: header X-Echo-Session, or
    POST /v1/completions                 /sessions/ID/v1/... for agents that know only a base URL;
                                         min_version, exact_version: honoured, or 409
    POST /v1/echo/sessions               {"wait_s": 30}    an episode; 204 none yet, 410 no more
    POST /v1/echo/sessions/ID/reward     {"reward": 1.0}   without a reward the task judges
    DELETE /v1/echo/sessions/ID          give an episode up

All but /health want `Authorization: Bearer TOKEN`, which OpenAI's clients make of their API key.
The token is asked for before a body is read. A connection over which none has come within TOKEN_S
is closed, and so is the oldest of more than MAX_UNKNOWN of them.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import itertools
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from aiohttp import web

from echo.core.errors import DataError, EchoError, TransportError
from echo.core.units import one_line
from echo.engine.engine import VersionError
from echo.runtime.agent_sessions import Session, SessionError
from echo.runtime.agent_wire import (
    Answer,
    Body,
    BodyError,
    ChatBody,
    TextBody,
    options_of,
    prompt_of,
    read_body,
)
from echo.runtime.agents import Agents, StoppingError
from echo.tasks.rewards import RewardError
from echo.wire.codec import DECODE_ERRORS

MAX_BODY_BYTES = 16 << 20
TOKEN_S = 10.0
"""Seconds that a connection may last before a request with the token has come over it."""
MAX_UNKNOWN = 256
KEEPALIVE_S = 75.0
"""Seconds that a connection may last between two requests."""
MAX_WAIT_S = 60.0
LINGER_S = 1.0
"""Seconds for calls under way to be answered when the node ends."""
SESSION_HEADER = "X-Echo-Session"


class _Begin(msgspec.Struct, forbid_unknown_fields=True):
    wait_s: float = 30.0


class _Reward(msgspec.Struct, forbid_unknown_fields=True):
    reward: float | None = None


class Endpoint:
    """Routes, and what they do."""

    def __init__(self, agents: Agents, *, token: str, log: logging.Logger) -> None:
        """Take whom to serve and the token that callers must know."""
        self._agents = agents
        self._token = token.encode()
        self._log = log
        self._numbers = itertools.count(1)
        self._unknown: dict[web.RequestHandler, asyncio.TimerHandle] = {}
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

    async def serve(self, host: str, port: int, on_listening: Callable[[int], None]) -> None:
        """Listen until cancelled.

        Args:
            host: name or address to bind.
            port: 0 for any free one.
            on_listening: told the port.

        Raises:
            TransportError: if it cannot listen there.
        """
        # Cancellation: an episode must not go to an agent that has hung up.
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
            on_listening(int(listener.sockets[0].getsockname()[1]))
            await asyncio.Event().wait()
        finally:
            self._agents.close()
            if listener is not None:
                listener.close()
            for timer in self._unknown.values():
                timer.cancel()
            await runner.cleanup()

    def _accept(self, runner: web.AppRunner) -> web.RequestHandler:
        """Return aiohttp's protocol for one more connection, which has to show the token soon."""
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
        """Ask for the token, and turn errors into answers."""
        refusal = self._refusal(request)
        if refusal is not None:
            refusal.force_close()  # its body is not read
            return refusal
        try:
            return await handler(request)
        except StoppingError as error:
            return _error(503, str(error))
        except RewardError as error:
            return _error(422, str(error))
        except SessionError as error:
            is_unknown = "no open session" in str(error)
            return _error(404 if is_unknown else 409, str(error))
        except (BodyError, DataError) as error:
            return _error(400, str(error))
        except VersionError as error:
            return _error(409, str(error), code="version_not_installed")
        except EchoError as error:
            self._log.warning("a call of an agent failed: %s", error)
            return _error(500, str(error))

    def _refusal(self, request: web.Request) -> web.Response | None:
        """Return the answer to a request that its headers already forbid."""
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
        version = self._agents.session.installed_version
        is_ready = version is not None
        body = {"status": "ok" if is_ready else "starting", "version": str(version or "")}
        return _json(body, status=200 if is_ready else 503)

    async def _models(self, _: web.Request) -> web.Response:
        name = self._agents.parts.model_name
        model = {"id": name, "object": "model", "created": 0, "owned_by": "echo"}
        return _json({"object": "list", "data": [model]})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, read_body(await request.read(), ChatBody))

    async def _text(self, request: web.Request) -> web.StreamResponse:
        return await self._complete(request, read_body(await request.read(), TextBody))

    async def _complete(self, request: web.Request, body: Body) -> web.StreamResponse:
        session = request.match_info.get("session") or request.headers.get(SESSION_HEADER)
        parts = self._agents.parts
        answer = Answer(
            body, parts.dialogue, model=parts.model_name, call_id=str(next(self._numbers))
        )
        if body.stream:
            return await self._stream(request, session, body, answer)
        turn = await self._agents.call(session, prompt_of(body), options_of(body))
        return _json(answer.whole(turn))

    async def _stream(
        self, request: web.Request, session: str | None, body: Body, answer: Answer
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        dialogue = self._agents.parts.dialogue
        sent = ""

        async def send(event: dict[str, Any]) -> None:
            if not response.prepared:  # until then an error still has a status of its own
                await response.prepare(request)
            await response.write(b"data: " + msgspec.json.encode(event) + b"\n\n")

        async def on_progress(ids: npt.NDArray[np.int32]) -> None:
            nonlocal sent
            text = dialogue.answer_of(ids.tolist())
            # What ends in half a character waits for the other half.
            is_whole = text.startswith(sent) and not text.endswith("\ufffd")
            if is_whole and not answer.has_tools:
                await send(answer.piece(text[len(sent) :], is_first=not response.prepared))
                sent = text

        try:
            turn = await self._agents.call(session, prompt_of(body), options_of(body), on_progress)
        except EchoError as error:
            if not response.prepared:
                raise
            # Its status is out already: OpenAI's clients find the error in the stream.
            await send(_describe_error(str(error), "server_error"))
            return response
        text = dialogue.answer_of(turn.completion.token_ids.tolist())
        if text != sent and not answer.has_tools:
            await send(answer.piece(text.removeprefix(sent)))
        for event in answer.last(turn):
            await send(event)
        await response.write(b"data: [DONE]\n\n")
        return response

    # --- ours ------------------------------------------------------------------------------------

    async def _begin(self, request: web.Request) -> web.Response:
        wait_s = (await _read(request, _Begin)).wait_s
        try:
            session = await self._agents.begin(wait_s=min(max(0.0, wait_s), MAX_WAIT_S))
        except StoppingError as error:
            return _error(410, str(error))
        return web.Response(status=204) if session is None else _json(_describe(session))

    async def _reward(self, request: web.Request) -> web.Response:
        given = (await _read(request, _Reward)).reward
        reward = await self._agents.reward(request.match_info["session"], given)
        return _json({"reward": reward})

    async def _abandon(self, request: web.Request) -> web.Response:
        self._agents.abandon(request.match_info["session"])
        return web.Response(status=204)


def _describe(session: Session) -> dict[str, Any]:
    """Return what an agent is told of its episode."""
    example = session.lease.example
    prompt = example["prompt"]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return {"session": session.session_id, "messages": messages, **example}


async def _read(request: web.Request, kind: type[Any]) -> Any:
    data = await request.read()
    try:
        return msgspec.json.decode(data or b"{}", type=kind)
    except DECODE_ERRORS as error:
        raise BodyError(f"the body cannot be read: {error}") from error


def _json(body: object, *, status: int = 200) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(body), status=status, content_type="application/json"
    )


def _error(status: int, message: str, *, code: str | None = None) -> web.Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return _json(_describe_error(message, kind, code), status=status)


def _describe_error(message: str, kind: str, code: str | None = None) -> dict[str, Any]:
    """Return an error as OpenAI's clients read it."""
    # It may repeat what the caller has sent, and not all of that can be written as UTF-8.
    return {"error": {"message": one_line(message), "type": kind, "code": code}}
