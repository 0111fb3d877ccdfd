"""A task behind an address: the real server and the real client, over loopback."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from echo.errors import ConfigError, TransportError
from echo.tasks import http_server
from echo.tasks.faults import RewardError
from echo.tasks.host import InlineHost, Limits
from echo.tasks.http_host import TOKEN_VARIABLE, HttpHost, TaskInfo
from echo.tasks.http_server import TaskServer
from echo.tasks.task import Example
from tests.tasks.pool_tasks import Counting, Misbehaving

EXAMPLE = Example(index=3, split="train", prompt="?", answer=3, source="rows.jsonl:4")

LIMITS = Limits(score_s=60.0, step_s=60.0, retries=1)

INFO = TaskInfo(name="Counting", has_turns=True, max_turns=4, digest="abc")

Serve = Callable[..., TaskServer]


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)


@pytest.fixture
def serve() -> Iterator[Serve]:
    running: list[tuple[TaskServer, threading.Thread]] = []

    def serve(task: Any = None, **settings: Any) -> TaskServer:
        host = InlineHost(task or Misbehaving(), LIMITS)
        server = TaskServer(host, INFO, ("127.0.0.1", 0), **settings)
        thread = threading.Thread(target=server.serve)
        thread.start()
        running.append((server, thread))
        return server

    yield serve
    for server, thread in running:
        server.stop()
        server.close()
        thread.join(120)


def client(server: TaskServer) -> HttpHost:
    return HttpHost(f"http://127.0.0.1:{server.port}", LIMITS, max_concurrent=2)


def post(server: TaskServer, body: bytes) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    try:
        connection.request("POST", "/", body=body)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def test_rewards_come_over_http(serve: Serve) -> None:
    host = client(serve())
    assert host.score(EXAMPLE, "number 0.25") == 0.25
    rewards = host.score_all(EXAMPLE, ["number 1", "number 2"], on_progress=lambda _: None)
    assert rewards == [1.0, 2.0]
    with pytest.raises(RewardError, match=r"reward on rows\.jsonl:4 raised ZeroDivision") as caught:
        host.score(EXAMPLE, "fail")
    assert caught.value.reason == "reward_error"
    assert host.take_counts()["env/calls"] == 4
    host.close()


def test_episodes_are_played_over_http(serve: Serve) -> None:
    host = client(serve(Counting()))
    assert host.describe() == INFO
    first, second = host.begin(EXAMPLE), host.begin(EXAMPLE)
    assert first.reply("1") == [{"role": "user", "content": "go on"}]
    assert [second.reply(text) is None for text in "123"] == [False, False, True]
    assert (first.outcome(), second.outcome()) == (1 / 3, 1.0)
    second.close()
    with pytest.raises(RewardError, match="is not known here") as caught:
        second.reply("1")
    assert caught.value.reason == "reward_lost"


def test_what_is_documented_is_what_is_spoken(serve: Serve) -> None:
    example = {"index": 0, "split": "train", "prompt": "?"}
    call = {"do": "score", "example": example, "completion": "number 0.5"}
    server = serve()
    assert post(server, json.dumps(call).encode()) == (200, b'{"value":0.5}')
    status, body = post(server, json.dumps({**call, "completion": "fail"}).encode())
    assert (status, json.loads(body)["fault"]["reason"]) == (200, "reward_error")
    status, body = post(server, json.dumps({**call, "example": {"index": 0}}).encode())
    assert (status, json.loads(body)["fault"]["reason"]) == (200, "reward_error")


@pytest.mark.parametrize("body", [b"", b"{", b'{"do": "harm"}', b'{"do": "score"}', b"[1]"])
def test_what_is_no_call_is_refused_and_survived(serve: Serve, body: bytes) -> None:
    server = serve()
    status, text = post(server, body)
    assert status == 400
    assert b"no call" in text
    assert client(server).score(EXAMPLE, "number 1") == 1.0


def test_too_many_calls_are_put_off(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MAX_CALLS", 0)
    with pytest.raises(RewardError, match=r"is busy; tried 2 times") as caught:
        client(serve()).score(EXAMPLE, "number 1")
    assert caught.value.reason == "reward_retries"


def test_a_token_is_asked_for(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    host = client(serve(token="secret"))
    with pytest.raises(ConfigError, match="401 the token is missing or wrong: set ECHO_TASK_TOKEN"):
        host.describe()
    with pytest.raises(RewardError, match="401 the token is missing or wrong"):
        host.score(EXAMPLE, "number 1")
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    assert host.score(EXAMPLE, "number 1") == 1.0


def test_a_server_that_is_away_is_tried_again_and_named() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    host = HttpHost(address, LIMITS, max_concurrent=1)
    with pytest.raises(RewardError, match=r"is its server running.*tried 2 times") as caught:
        host.score(EXAMPLE, "number 1")
    assert caught.value.reason == "reward_retries"
    with pytest.raises(ConfigError, match=r"cannot be reached: .*start bin/echo-task-server"):
        host.describe()


def test_a_turn_that_may_have_been_taken_is_not_sent_again(serve: Serve) -> None:
    """Somebody who hangs up in the middle: a score is repeated, a turn is not."""
    with socket.create_server(("127.0.0.1", 0)) as rude:
        num_calls = [0]

        def hang_up() -> None:
            while True:
                try:
                    peer, _ = rude.accept()
                except OSError:
                    return
                with peer:
                    peer.recv(1 << 16)
                    num_calls[0] += 1

        thread = threading.Thread(target=hang_up, daemon=True)
        thread.start()
        host = HttpHost(f"http://127.0.0.1:{rude.getsockname()[1]}", LIMITS, max_concurrent=1)
        with pytest.raises(RewardError) as caught:
            host.begin(EXAMPLE)
        assert (caught.value.reason, num_calls[0]) == ("reward_lost", 1)
        with pytest.raises(RewardError) as caught:
            host.score(EXAMPLE, "number 1")
        assert (caught.value.reason, num_calls[0]) == ("reward_retries", 3)
        rude.shutdown(socket.SHUT_RDWR)
    thread.join(120)


def test_an_episode_that_nobody_asks_for_is_ended(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = client(serve(Counting()))
    left = host.begin(EXAMPLE)
    monkeypatch.setattr(http_server, "EPISODE_IDLE_S", -1.0)
    host.begin(EXAMPLE)
    with pytest.raises(RewardError, match="is not known here"):
        left.reply("1")


def test_an_address_in_use_is_named(serve: Serve) -> None:
    port = serve().port
    with pytest.raises(TransportError, match=rf"cannot listen on 127\.0\.0\.1:{port}: .*in use"):
        TaskServer(InlineHost(Misbehaving(), LIMITS), INFO, ("127.0.0.1", port))
