"""Agents that talk to a worker with OpenAI's own client, in a run that trains on what they do."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import stat
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock, Mock

import aiohttp
import numpy as np
import pytest
import torch
from openai import (
    APIConnectionError,
    APIStatusError,
    AsyncOpenAI,
    InternalServerError,
)

from echo.config.load import inherited_settings, parse_config
from echo.core.errors import ConfigError, TransportError
from echo.core.extras import install_command
from echo.core.rollout import Group
from echo.engine.engine import Completion
from echo.roles.worker.outcomes import GroupFinished
from echo.runtime.agents import endpoint
from echo.runtime.agents.agents import StoppingError
from echo.runtime.agents.endpoint import TOKEN_VARIABLE, Endpoint
from echo.runtime.agents.turns import Turn
from echo.runtime.worker.node import serve_agents
from echo.runtime.worker.setup import inherit
from tests.runtime.harness import Play, Run, running

torch.set_num_threads(1)

TEMPLATE = (
    "<bos>{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
)
LISTEN = {"listen": "tcp://127.0.0.1:0"}
AGENT = {**LISTEN, "max_session_tokens": 60}

Json = dict[str, Any]


@pytest.fixture
def template(tmp_path: Path) -> str:
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    return str(tmp_path / "template.jinja")


@dataclass
class Site:
    """A run with one worker whose endpoint is up."""

    url: str
    token: str
    http: aiohttp.ClientSession
    openai: AsyncOpenAI
    groups: list[Group] = field(default_factory=list)
    """What the worker has delivered."""

    async def begin(self, *, wait_s: float = 30.0) -> Json | None:
        """An episode; None when the run is over."""
        address = f"{self.url}/v1/echo/sessions"
        async with self.http.post(address, json={"wait_s": wait_s}) as response:
            if response.status == 410:
                return None
            assert response.status == 200, await response.text()
            found: Json = await response.json()
            return found

    async def reward(self, session: str, body: Json) -> tuple[int, Json]:
        address = f"{self.url}/v1/echo/sessions/{session}/reward"
        async with self.http.post(address, json=body) as response:
            return response.status, await response.json()

    async def ask(self, session: str, messages: list[Json], **options: Any) -> Any:
        return await self.openai.chat.completions.create(
            model="any",
            messages=messages,  # type: ignore[arg-type]
            extra_headers={"X-Echo-Session": session},
            **options,
        )


@asynccontextmanager
async def site(
    run: Run, template: str, *, steps: int = 50, listen: str = LISTEN["listen"]
) -> AsyncIterator[tuple[Site, asyncio.Task[str]]]:
    """Run a learner and a worker with an endpoint beside the block."""
    learner = await run.learner(
        run={"max_steps": steps}, agent=AGENT, model={"chat_template": template, "dtype": "float32"}
    )
    worker = await run.worker("w1", agent={"listen": listen})
    groups: list[Group] = []
    report = worker.report

    def noting(event: Any) -> None:
        if isinstance(event, GroupFinished):
            groups.append(event.group)
        report(event)

    worker.report = noting  # type: ignore[method-assign]
    path = run.run_dir / "workers" / "w1" / "endpoint.json"
    async with running(learner, worker) as (learning, working):
        while not path.exists() or worker.role.installed_version is None:
            assert not working.done(), working.result()
            await asyncio.sleep(0.01)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        told = json.loads(path.read_text())
        headers = {"Authorization": f"Bearer {told['token']}"}
        client = AsyncOpenAI(base_url=f"{told['url']}/v1", api_key=told["token"], max_retries=0)
        async with aiohttp.ClientSession(headers=headers) as http, client:
            yield Site(told["url"], told["token"], http, client, groups), learning


@dataclass
class Played:
    """What an agent knows of one session of its own."""

    seen: list[int]
    """All tokens of the last call, and of what came before it."""
    sampled: list[int]
    reward: float


async def play_one(here: Site, episode: Json, played: dict[str, Played]) -> None:
    """Ask twice, the second time with the first answer in the context."""
    name, messages = episode["session"], list(episode["messages"])
    assert messages == [{"role": "user", "content": episode["prompt"]}]
    assert episode["answer"] is not None
    ids: Json = {"extra_body": {"return_token_ids": True}}
    first = await here.ask(name, messages, **ids)
    text = first.choices[0].message.content
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "1+1="}]
    second = await here.ask(name, messages, **ids)

    before, after = first.choices[0].model_dump(), second.choices[0].model_dump()
    seen = before["prompt_token_ids"] + before["token_ids"]
    assert after["prompt_token_ids"][: len(seen)] == seen, "not as it was sampled"
    assert first.usage.completion_tokens == len(before["token_ids"])
    assert first.system_fingerprint.startswith("v")
    reward = sum(map(str.isdigit, text)) / 6
    whole = after["prompt_token_ids"] + after["token_ids"]
    played[name] = Played(whole, before["token_ids"] + after["token_ids"], reward)
    stated = {"reward": {"digits": reward, "length": 0.0}}
    assert await here.reward(name, stated) == (200, {"reward": reward})


@pytest.mark.slow
def test_an_agent_of_two_calls_is_trained_on_what_it_sampled(play: Play, template: str) -> None:
    async def scenario(run: Run) -> None:
        played: dict[str, Played] = {}
        async with site(run, template, steps=1) as (here, learning):
            try:
                while (episode := await here.begin()) is not None:
                    await play_one(here, episode, played)
            except (APIConnectionError, InternalServerError, aiohttp.ClientError):
                pass  # the run may end in the middle of an episode, and only then is this right:
            assert await learning == "finished"

            own = {tuple(name.split("-")[:3]): one for name, one in played.items()}
            groups = {group.group_id: group for group in here.groups}
            assert run.ledger("trained")
            for record in run.ledger("accepted"):
                group = groups[record["group"]]
                for member, rollout in enumerate(group.rollouts):
                    one = own[str(group.group_id), str(group.attempt), str(member)]
                    assert record["rewards"][member] == one.reward
                    assert rollout.reward_parts == {"digits": one.reward, "length": 0.0}
                    assert [*group.prompt_ids, *rollout.token_ids] == one.seen
                    # The user's second message is masked.
                    assert rollout.token_ids[rollout.completion_mask].tolist() == one.sampled

    play(scenario)


@pytest.mark.slow
def test_the_agent_of_the_documentation_works(play: Play, template: str, tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "training-agents.md").read_text(encoding="utf-8")
    [code] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "agent.py").write_text(code, encoding="utf-8")

    async def scenario(run: Run) -> None:
        async with site(run, template, steps=1) as (_, learning):
            agent = await asyncio.create_subprocess_exec(
                sys.executable,
                str(tmp_path / "agent.py"),
                str(run.run_dir / "workers" / "w1" / "endpoint.json"),
                stderr=asyncio.subprocess.PIPE,
            )
            _, complaints = await agent.communicate()
            assert re.search(rb"HTTP Error 410|Connection", complaints), complaints
            assert await learning == "finished"
        assert run.ledger("trained")

    play(scenario)


@pytest.mark.slow
def test_streams_logprobs_and_texts(play: Play, template: str) -> None:
    async def scenario(run: Run) -> None:
        async with site(run, template) as (here, _):
            episode = await here.begin()
            assert episode is not None
            options: Json = {"stream": True, "stream_options": {"include_usage": True}}
            stream = await here.ask(
                episode["session"], episode["messages"], logprobs=True, **options
            )
            chunks = [chunk async for chunk in stream]
            text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            assert chunks[0].choices[0].delta.role == "assistant"
            assert chunks[-2].choices[0].finish_reason in ("stop", "length")
            rows = chunks[-2].choices[0].logprobs.content
            assert "".join(row.token for row in rows).removesuffix("<eos>") == text
            assert all(row.logprob < 0 for row in rows)
            assert chunks[-1].usage.completion_tokens == len(rows)
            assert await here.reward(episode["session"], {}) == (200, {"reward": 0.0})

            # Without a session: as the caller likes, and not recorded.
            plain: Json = {"model": "m", "prompt": "12+34=", "temperature": 0, "max_tokens": 20}
            whole = await here.openai.completions.create(**plain, logprobs=1)
            logprobs, usage = whole.choices[0].logprobs, whole.usage
            assert logprobs is not None
            assert logprobs.text_offset is not None
            assert logprobs.text_offset[0] == 0
            pieces = [p async for p in await here.openai.completions.create(**plain, stream=True)]
            assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
            # A stop string is sampled, and not shown; it is looked for after min_tokens.
            said = whole.choices[0].text
            short = await here.openai.completions.create(**plain, stop=said[1])
            assert short.choices[0].text == said[: said.index(said[1])]
            assert short.choices[0].finish_reason == "stop"
            later = {"min_tokens": 9, "stop_token_ids": []}
            longer = await here.openai.completions.create(
                **plain, stop=[said[1], "no"], extra_body=later
            )
            assert longer.usage is not None
            assert longer.usage.completion_tokens > 9
            assert usage is not None
            assert [piece.choices[0].finish_reason for piece in pieces[:-1]] == [None]
            again = await here.openai.completions.create(**{**plain, "prompt": [1, 5, 6]})
            assert again.usage.prompt_tokens == 3

            [model] = (await here.openai.models.list()).data
            assert model.id == "run"

    play(scenario)


@pytest.mark.slow
def test_what_cannot_be_done_is_refused_with_a_reason(
    play: Play, template: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """At an address that is open to others, with a token of the user's own."""
    monkeypatch.setenv(TOKEN_VARIABLE, "my-own-token")
    caplog.set_level(logging.INFO)

    async def scenario(run: Run) -> None:
        async with site(run, template, listen="tcp://0.0.0.0:0") as (here, _):
            assert here.token == "my-own-token"
            ask = here.openai.chat.completions.create
            hello: Json = {"model": "m", "messages": [{"role": "user", "content": "1+1="}]}
            for options, complaint, status in (
                ({"n": 2}, "n is not supported: ask as often as you want answers", 400),
                ({"tools": [{"type": "function"}]}, "chat template knows no tools", 400),
                (
                    {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
                    r"chat_template_kwargs\.enable_thinking is not supported: .*the run's",
                    400,
                ),
                ({"messages": [{"role": "user", "content": "1" * 200}]}, "nothing is left", 409),
                ({"extra_headers": {"X-Echo-Session": "me"}}, "no open session 'me'", 404),
                ({"extra_headers": {"Authorization": "?"}}, "token is missing or wrong", 401),
            ):
                with pytest.raises(APIStatusError, match=complaint) as caught:
                    await ask(**{**hello, **options})
                assert caught.value.status_code == status
            for path, data, statuses in (
                ("v1/completions", b'{"prompt": "\\ud800"}', [400]),
                ("v1/completions", b'{"prompt": [99999]}', [400]),
                ("v1/completions", b'{"prompt": "1", "max_tokens": 4611686018427387904}', [200]),
                ("v1/completions", b'{"prompt": "1", "max_tokens": 2, "seed": -9}', [200]),
                ("v1/chat/completions", b'{"messages": [{"role": 3, "content": {}}]}', [200, 400]),
                ("v1/chat/completions", b'{"messages": [{}]}', [200, 400]),
                ("v1/echo/sessions", b'{"\xff": 1}', [400]),
                ("v1/echo/sessions/x/reward", b"{}", [404]),
                ("v1/echo/sessions/%ff/reward", b"{}", [404]),
            ):
                async with here.http.post(f"{here.url}/{path}", data=data) as found:
                    assert found.status in statuses, (data, await found.text())
            async with here.http.get(f"{here.url}/health", headers={"Authorization": ""}) as found:
                assert (found.status, (await found.json())["status"]) == (200, "ok")

            episode = await here.begin()
            assert episode is not None
            name = episode["session"]

            async def reward(given: float | dict[str, float]) -> str:
                status, body = await here.reward(name, {"reward": given})
                return f"{status} {body.get('error', {}).get('message', '')}"

            assert re.match("409 .* has no call to be rewarded", await reward(1))
            # An agent that can only be told a base URL.
            client = here.openai.with_options(base_url=f"{here.url}/sessions/{name}/v1")
            await client.chat.completions.create(**hello)
            assert (await reward(1e999)).startswith("400 ")
            assert re.match("409 .* beyond task.max_reward = 1e.06", await reward(1e38))
            assert re.match("409 .* beyond task.max_", await reward({"a": 1e38, "b": -1e38}))
            assert re.match("400 reward: a part is named 'a b'", await reward({"a b": 1}))
            assert (await reward({})).startswith("400 reward: a reward has 1 to 32 parts")
            assert await reward(1) == "200 "
            assert (await reward(1)).startswith("404 ")

    play(scenario)
    assert "open to other machines, and HTTP is not encrypted" in caplog.text
    assert "my-own-token" not in caplog.text


@pytest.mark.slow
def test_leases_come_with_agents_and_what_one_gives_up_goes_to_the_next(
    play: Play, template: str
) -> None:
    async def scenario(run: Run) -> None:
        async with site(run, template) as (here, _):
            await asyncio.sleep(0.3)
            assert not run.ledger("granted"), "no agent waits"
            first = await here.begin(wait_s=0.0)  # that is, as long as a grant may take
            assert first is not None
            assert len(run.ledger("granted")) == 1
            address = f"{here.url}/v1/echo/sessions/{first['session']}"
            async with here.http.delete(address) as response:
                assert response.status == 204
            others = [await here.begin(), await here.begin()]
            assert [other["index"] for other in others if other] == [first["index"]] * 2
            assert len({first["session"], *(other["session"] for other in others if other)}) == 3
            taken = here.url.replace("http", "tcp")
            second = await run.worker("w2", agent={"listen": taken})
            with pytest.raises(TransportError, match=r"agent\.listen: cannot listen.*port 0"):
                await second.run()

    play(scenario)


def test_a_worker_for_agents_in_a_run_without_them_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"agent\.listen = .* contradicts"):
        inherit(parse_config({"agent": LISTEN}), inherited_settings(parse_config({})), tmp_path)


def test_a_worker_for_agents_without_their_package_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, endpoint.__name__, None)
    remedy = re.escape(install_command("worker", "agents"))
    with pytest.raises(ConfigError, match=rf"agent\.listen needs aiohttp.*{remedy}"):
        asyncio.run(serve_agents(Mock(), log=logging.getLogger("test.agents")))


async def ask_raw(port: int, text: bytes) -> bytes:
    """Send bytes over a connection of their own; return all that comes until it is closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(text)
    answer = await reader.read()
    writer.close()
    return answer


@asynccontextmanager
async def endpoint_of(agents: Mock) -> AsyncIterator[int]:
    agents.role.installed_version = None
    endpoint = Endpoint(agents, token="t", log=logging.getLogger())
    async with endpoint.listening("127.0.0.1", 0) as port, asyncio.timeout(60):
        yield port


@pytest.mark.slow
def test_nobody_without_the_token_stays_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "TOKEN_S", 0.05)

    async def main() -> None:
        async with endpoint_of(Mock()) as port:
            assert await ask_raw(port, b"") == b""
            assert await ask_raw(port, b"GET /v1/models HT") == b""
            health = await ask_raw(port, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert health.startswith(b"HTTP/1.1 503")
            # Refused by its headers: not a byte of the body is waited for.
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n"
            for token in (b"", b"Authorization: \xff\r\n"):
                refusal = await ask_raw(port, head + token + b"\r\n")
                assert refusal.startswith(b"HTTP/1.1 401")
            known = b"HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer t\r\nConnection: close\r\n\r\n"
            for asked in (b"GET /v1/chat/completions ", b"POST /v1/responses ", b"POST /models "):
                answer = await ask_raw(port, asked + known)
                assert re.match(rb"HTTP/1\.1 40[45] ", answer)
                assert asked.strip() + b" is not served here; what is: POST /v1/chat" in answer
            packed = (
                b"Content-Encoding: gzip\r\nAuthorization: Bearer t\r\nConnection: close\r\n\r\n"
            )
            refusal = await ask_raw(port, head.replace(b"99", b"3") + packed + b"no!")
            assert refusal.startswith(b"HTTP/1.1 400")
            assert b"the body is not what Content-Encoding" in refusal
            large = head.replace(b"99", b"99999999") + b"Authorization: Bearer t\r\n\r\n"
            assert (await ask_raw(port, large)).startswith(b"HTTP/1.1 413")

    asyncio.run(main())


def test_too_many_without_the_token_are_closed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "MAX_UNKNOWN", 2)
    monkeypatch.setattr(endpoint, "TOKEN_S", 100.0)

    async def main() -> None:
        async with endpoint_of(Mock()) as port:
            pairs = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
            assert await pairs[0][0].read() == b"", "the oldest one"
            for _, writer in pairs:
                writer.close()
                await writer.wait_closed()

    asyncio.run(main())


def test_large_bodies_are_read_one_after_the_other_and_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoint, "MAX_LARGE_BODIES", 1)
    monkeypatch.setattr(endpoint, "BODY_S", 0.3)
    size = endpoint.LARGE_BODY_BYTES + 1
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer t\r\n"
    large = f"{head}Content-Length: {size}\r\n\r\n".encode()
    chunked = f"{head}Transfer-Encoding: chunked\r\n\r\n".encode()
    answers: list[str] = []

    async def main() -> None:
        async with endpoint_of(Mock()) as port:

            async def ask(name: str, text: bytes) -> None:
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(text)
                answer = await reader.readline()
                answers.append(f"{name} {answer.split()[1].decode()}")
                writer.close()

            # It never arrives as a whole.
            stalled = asyncio.ensure_future(ask("stalled", large + b"{"))
            await asyncio.sleep(0.05)
            small = ask("small", f"{head}Content-Length: 1\r\n\r\n{{".encode())
            whole = ask("whole", large + b"{" * size)
            endless = ask("endless", chunked + b"1\r\n{\r\n")
            await asyncio.gather(stalled, small, whole, endless)

    asyncio.run(main())
    assert answers == ["small 400", "stalled 408", "whole 400", "endless 408"]


def test_a_client_that_streams_gets_the_whole_answer_in_events_or_the_status_of_an_error() -> None:
    completion = Completion(
        "r", np.array([5, 6], np.int32), np.zeros(2, np.float32), "stop",
        np.array([[1, 3], [1, 3]], np.int32),
    )  # fmt: skip
    turn = Turn(np.array([5], np.int32), completion, "", None)
    agents = Mock(call=AsyncMock(side_effect=[turn, turn, StoppingError("the worker stops")]))
    agents.parts.model_name = "m"
    agents.parts.dialogue.answer_of = lambda ids: "1" * len(ids)
    hello: Json = {"model": "m", "messages": [{"role": "user", "content": "?"}], "stream": True}

    async def main() -> None:
        async with (
            endpoint_of(agents) as port,
            AsyncOpenAI(
                base_url=f"http://127.0.0.1:{port}/v1", api_key="t", max_retries=0
            ) as client,
        ):
            ask = client.chat.completions.create
            stream: Any = await ask(**hello, stream_options={"include_usage": True})
            text, end, usage = [chunk async for chunk in stream]
            delta = text.choices[0].delta
            assert (delta.role, delta.content) == ("assistant", "11")
            assert (text.choices[0].finish_reason, end.choices[0].finish_reason) == (None, "stop")
            assert end.system_fingerprint == "v3"
            assert usage.usage.total_tokens == 3
            streaming = client.chat.completions.with_streaming_response
            async with streaming.create(**hello) as answer:
                # This client ends with the connection, too; others wait for the mark.
                assert (await answer.text()).endswith("data: [DONE]\n\n")
            with pytest.raises(APIStatusError, match="the worker stops") as caught:
                await ask(**hello)
            assert caught.value.status_code == 503

    asyncio.run(main())
