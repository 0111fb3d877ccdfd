"""The OpenAI-compatible HTTP endpoint for agents, in the node's event loop.

    GET  /health                         no token needed
    GET  /v1/models
    POST /v1/chat/completions            logprobs; session: header X-Echo-Session, or
    POST /v1/completions                 /sessions/ID/v1/... for agents that know only a base URL
    POST /v1/echo/sessions               {"wait_s": 30}    an episode; 204 none yet, 410 no more
    POST /v1/echo/sessions/ID/reward     {"reward": 1.0}   without a reward the task judges
    DELETE /v1/echo/sessions/ID          give an episode up

All but /health want `Authorization: Bearer TOKEN`, which OpenAI's clients make of their API key.
The token is asked for before a body is read. A connection over which none has come within TOKEN_S
is closed, and so is the oldest of more than MAX_UNKNOWN of them.

With `stream` a call is answered in the events that OpenAI's clients read, once all is sampled.
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
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, nullcontext
from typing import Annotated, Any

import msgspec
from aiohttp import web
from msgspec import Meta

from echo.core.bounds import MAX_TOKENS, TokenId
from echo.core.errors import DataError, EchoError, StorageError, TransportError
from echo.core.rollout import PolicyVersion
from echo.core.units import one_line
from echo.engine.engine import MIN_TEMPERATURE
from echo.net.transport import format_address, is_loopback, parse_address
from echo.records.files import write_file
from echo.runtime.agents.sessions import (
    Agents,
    CallOptions,
    Dialogue,
    Prompt,
    SessionError,
    StoppingError,
    Turn,
    UnknownSessionError,
)
from echo.tasks.environment import find_calls, without_calls
from echo.tasks.rewards import RewardError
from echo.wire.codec import DECODE_ERRORS

# --- OpenAI's JSON, in and out: what a call may ask for, and what it is answered ---


MAX_TEMPERATURE = 1e3
"""Beyond, logits divided by it are all the same."""

Int = Annotated[int, Meta(ge=-(1 << 63), le=(1 << 63) - 1)]


class BodyError(EchoError):
    """A request's body cannot be served."""


class SlowBodyError(EchoError):
    """A request's body does not arrive."""


_MODEL_DECIDES = "the model decides; ask for it in a message"
_TEMPLATE = "the template and its arguments are the run's: set model.chat_template_kwargs"
_UNABLE: dict[str, tuple[tuple[Any, ...], str]] = {
    "n": ((1,), "ask as often as you want answers"),
    "best_of": ((1,), "ask as often as you want answers, and choose yourself"),
    "stop": (("", []), "answers end with the model's own stop tokens; cut them yourself"),
    "stop_token_ids": (([],), "answers end with the model's own stop tokens"),
    "ignore_eos": ((False,), "answers end with the model's own stop tokens"),
    "min_tokens": ((0,), "remove it"),
    "min_p": ((0,), "remove it"),
    "repetition_penalty": ((1,), "remove it"),
    "presence_penalty": ((0,), "remove it"),
    "frequency_penalty": ((0,), "remove it"),
    "logit_bias": (({},), "remove it"),
    "bad_words": (([],), "remove it"),
    "allowed_token_ids": (([],), "remove it"),
    "use_beam_search": ((False,), "remove it"),
    "truncate_prompt_tokens": ((), "shorten the prompt yourself"),
    "tool_choice": (("auto", "none"), _MODEL_DECIDES),
    "functions": (([],), "send them as `tools`"),
    "function_call": (("auto", "none"), _MODEL_DECIDES),
    "guided_json": ((), _MODEL_DECIDES),
    "guided_regex": ((), _MODEL_DECIDES),
    "guided_choice": ((), _MODEL_DECIDES),
    "guided_grammar": ((), _MODEL_DECIDES),
    "structured_outputs": ((), _MODEL_DECIDES),
    "response_format": (({"type": "text"},), "ask for the format in a message"),
    "chat_template": ((), _TEMPLATE),
    "documents": (([],), _TEMPLATE),
    "reasoning_effort": ((), _TEMPLATE),
    "top_logprobs": ((0,), "only sampled tokens have log-probabilities here"),
    "prompt_logprobs": ((), "only sampled tokens have log-probabilities here"),
    "return_tokens_as_token_ids": ((False,), "take return_token_ids, which adds the ids"),
    "echo": ((False,), "put prompt and answer together yourself"),
    "suffix": (("",), "write it into the prompt"),
    "prompt_embeds": ((), "send text or token ids"),
}
"""Fields that would change an answer and cannot be obeyed: values that ask for nothing, advice."""


class _Body(msgspec.Struct):
    """Fields that both kinds of calls have; beside these and `_UNABLE` all is ignored."""

    max_tokens: Int | None = None
    max_completion_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)] | None = None
    seed: Int | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


_Unable = msgspec.defstruct("_Unable", [(name, Any, None) for name in _UNABLE])


class ChatBody(_Body, kw_only=True):
    """Of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    logprobs: bool | None = None


class TextBody(_Body, kw_only=True):
    """Of /v1/completions."""

    prompt: str | Annotated[list[TokenId], Meta(max_length=MAX_TOKENS)]
    logprobs: int | None = None


Body = ChatBody | TextBody


def read_body(data: bytes, kind: type[ChatBody] | type[TextBody]) -> Body:
    """Read a call, and refuse what cannot be done: ignoring it would give other samples.

    Raises:
        BodyError: naming the field and what to do.
    """
    try:
        body, unable = msgspec.json.decode(data, type=kind), msgspec.json.decode(data, type=_Unable)
    except DECODE_ERRORS as error:
        raise BodyError(f"the body cannot be read: {error}") from error
    for name, (neutral, advice) in _UNABLE.items():
        value = getattr(unable, name)
        if value is not None and value not in neutral:
            raise BodyError(f"{name} is not supported: {advice}")
    if body.add_generation_prompt is False and not body.continue_final_message:
        raise BodyError("add_generation_prompt = false is not supported: an answer needs a turn")
    _check_numbers(body)
    if isinstance(body, ChatBody) and not body.messages:
        raise BodyError("messages is empty; send at least one")
    if isinstance(body, TextBody) and not body.prompt:
        raise BodyError("prompt is empty; send text or token ids")
    return body


def _check_numbers(body: Body) -> None:
    """Refuse numbers that nothing can be sampled with.

    Raises:
        BodyError: naming the field and its range.
    """
    for name in ("max_tokens", "max_completion_tokens"):
        value = getattr(body, name)
        if value is not None and value < 1:
            raise BodyError(f"{name} = {value}: at least 1")
    if (body.temperature or 0) < 0 or not 0 < (1 if body.top_p is None else body.top_p) <= 1:
        raise BodyError("temperature must be at least 0, top_p above 0 and at most 1")
    if body.temperature and not MIN_TEMPERATURE <= body.temperature <= MAX_TEMPERATURE:
        raise BodyError(
            f"temperature = {body.temperature:g}: 0 for the likeliest, or {MIN_TEMPERATURE:g} to "
            f"{MAX_TEMPERATURE:g}"
        )


def prompt_of(body: Body) -> Prompt:
    """Return the context of a call."""
    return body.messages if isinstance(body, ChatBody) else body.prompt


def options_of(body: Body) -> CallOptions:
    """Return what a call asks for."""
    return CallOptions(
        max_tokens=body.max_completion_tokens or body.max_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        seed=body.seed,
        tools=[] if body.tool_choice == "none" else body.tools or [],
    )


class ChatAnswer:
    """The JSON of one call's answer, as one object or as events."""

    def __init__(self, body: Body, dialogue: Dialogue, *, model: str, call_id: str) -> None:
        self._body = body
        self._is_chat = isinstance(body, ChatBody)
        self._has_tools = self._is_chat and bool(options_of(body).tools)
        self._dialogue = dialogue
        self._head: dict[str, Any] = {
            "id": f"{'chatcmpl' if self._is_chat else 'cmpl'}-{call_id}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, turn: Turn) -> dict[str, Any]:
        """Return the answer to a call that is not streamed."""
        completion = turn.completion
        choice: dict[str, Any] = {"index": 0, "finish_reason": self._reason(turn)}
        if self._is_chat:
            choice["message"] = {**self._message(turn), "refusal": None}
        else:
            choice["text"] = self._dialogue.answer_of(completion.token_ids)
        choice["logprobs"] = self._logprobs(turn)
        if self._body.return_token_ids:
            choice["token_ids"] = completion.token_ids.tolist()
            choice["prompt_token_ids"] = turn.context_ids.tolist()
        name = "chat.completion" if self._is_chat else "text_completion"
        return {
            **self._head,
            "object": name,
            "choices": [choice],
            "usage": usage_of(turn),
            "system_fingerprint": fingerprint_of(turn),
        }

    def events(self, turn: Turn) -> list[dict[str, Any]]:
        """Return the answer to a call with `stream`: its text, its end, and usage if asked for.

        Text and end are two events, as OpenAI sends them: some clients read no text in the last.
        """
        text: dict[str, Any] = {"delta": self._message(turn)}
        end: dict[str, Any] = {"delta": {}}
        if not self._is_chat:
            text = {"text": self._dialogue.answer_of(turn.completion.token_ids)}
            end = {"text": ""}
        end["logprobs"] = self._logprobs(turn)
        chunks = [self._chunk(text, None), self._chunk(end, self._reason(turn))]
        if (self._body.stream_options or {}).get("include_usage"):
            chunks.append({**self._chunk({}, None), "choices": [], "usage": usage_of(turn)})
        return [{**chunk, "system_fingerprint": fingerprint_of(turn)} for chunk in chunks]

    def _message(self, turn: Turn) -> dict[str, Any]:
        """Return the assistant's message, with the tools that it calls where there are tools.

        An agent is not told of calls that cannot be read: where there is one, all stays text.
        """
        text = self._dialogue.answer_of(turn.completion.token_ids)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        calls = find_calls(text) if self._has_tools else []
        if calls and not any(call.fault for call in calls):
            message["content"] = without_calls(text) or None
            message["tool_calls"] = [
                {
                    "index": index,
                    "id": f"{self._head['id']}-{index}",
                    "type": "function",
                    "function": {
                        "name": call.name,
                        "arguments": json.dumps(call.arguments, ensure_ascii=False),
                    },
                }
                for index, call in enumerate(calls)
            ]
        return message

    def _reason(self, turn: Turn) -> str:
        if self._has_tools and "tool_calls" in self._message(turn):
            return "tool_calls"
        return turn.completion.finish_reason

    def _chunk(self, fields: Mapping[str, Any], reason: str | None) -> dict[str, Any]:
        name = "chat.completion.chunk" if self._is_chat else "text_completion"
        choice = {"index": 0, "finish_reason": reason, **fields}
        return {**self._head, "object": name, "choices": [choice]}

    def _logprobs(self, turn: Turn) -> dict[str, Any] | None:
        if self._body.logprobs is None or self._body.logprobs is False:  # 0 asks for them
            return None
        ids = turn.completion.token_ids.tolist()
        tokens = [self._dialogue.text_of([token]) for token in ids]
        logprobs = [float(value) for value in turn.completion.logprobs]
        if self._is_chat:
            rows = [
                {
                    "token": token,
                    "logprob": logprob,
                    "bytes": list(token.encode()),
                    "top_logprobs": [],
                }
                for token, logprob in zip(tokens, logprobs, strict=True)
            ]
            return {"content": rows, "refusal": None}
        offsets = [sum(map(len, tokens[:index])) for index in range(len(tokens))]
        return {
            "tokens": tokens,
            "token_logprobs": logprobs,
            "top_logprobs": None,
            "text_offset": offsets,
        }


def usage_of(turn: Turn) -> dict[str, int]:
    """Return OpenAI's count of tokens."""
    num_prompt, num_sampled = len(turn.context_ids), len(turn.completion.token_ids)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
    }


def fingerprint_of(turn: Turn) -> str:
    """Return which policy version sampled the last token."""
    return str(PolicyVersion(*turn.completion.policy_versions[-1].tolist()))


MAX_BODY_BYTES = 16 << 20
LARGE_BODY_BYTES = 256 << 10
"""Of larger bodies, and of those whose size is not told, MAX_LARGE_BODIES are read at a time."""
MAX_LARGE_BODIES = 4
BODY_S = 30.0
"""Seconds that a body may take to arrive."""
TOKEN_S = 10.0
"""Seconds that a connection may last before a request with the token has come over it."""
MAX_UNKNOWN = 256
KEEPALIVE_S = 75.0
"""Seconds that a connection may last between two requests."""
MAX_WAIT_S = 60.0
LINGER_S = 1.0
"""Seconds for calls under way to be answered when the node ends."""
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
"""Of errors, the first that is one counts; all others are 500."""
_SERVED = (
    "POST /v1/chat/completions, POST /v1/completions and GET /v1/models, also behind /sessions/ID; "
    "give a client a base URL that ends in /v1"
)


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
        """Serve while the body runs; give it the port.

        Args:
            host: name or address to bind.
            port: 0 for any free one.

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
            yield int(listener.sockets[0].getsockname()[1])
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
        except (web.HTTPNotFound, web.HTTPMethodNotAllowed) as error:
            what = f"{request.method} {request.path}"
            return _error(error.status, f"{what} is not served here; what is: {_SERVED}")
        except web.HTTPRequestEntityTooLarge as error:  # once it is unpacked
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
        """Return a request's body; while others are read it stays in the client's hands.

        Raises:
            SlowBodyError: if it does not arrive in time.
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
            raise BodyError(f"chat_template_kwargs.{other} is not supported: {_TEMPLATE}")
        answer = ChatAnswer(
            body, parts.dialogue, model=parts.model_name, call_id=str(next(self._numbers))
        )
        turn = await self._agents.call(session, prompt_of(body), options_of(body))
        return _events(answer.events(turn)) if body.stream else _json(answer.whole(turn))

    # --- ours ------------------------------------------------------------------------------------

    async def _begin(self, request: web.Request) -> web.Response:
        wait_s = _decode(await self._read(request), _Begin).wait_s
        try:
            session = await self._agents.begin(wait_s=min(max(0.0, wait_s), MAX_WAIT_S))
        except StoppingError as error:
            return _error(410, str(error))
        return web.Response(status=204) if session is None else _json(session.opening)

    async def _reward(self, request: web.Request) -> web.Response:
        given = _decode(await self._read(request), _Reward).reward
        reward = await self._agents.reward(request.match_info["session"], given)
        return _json({"reward": reward})

    async def _abandon(self, request: web.Request) -> web.Response:
        self._agents.abandon(request.match_info["session"])
        return web.Response(status=204)


TOKEN_VARIABLE = "ECHO_AGENT_TOKEN"


async def serve(agents: Agents, *, log: logging.Logger) -> None:
    """Serve agents until cancelled; the log and a file of the worker's say where.

    Raises:
        TransportError: if it cannot listen.
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
    """Return an error as OpenAI's clients read it."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    # It may repeat what the caller has sent, and not all of that can be written as UTF-8.
    error = {"message": one_line(message), "type": kind, "code": None}
    return _json({"error": error}, status=status)
