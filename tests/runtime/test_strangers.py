from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from echo.config.load import parse_config
from echo.engine import model
from echo.engine.model import model_class
from echo.net import channel as channels
from echo.net.kernel import descriptor_limit, raise_descriptor_limit
from echo.net.transport import Connected, Received, TransportOptions, parse_address
from echo.net.zmq import ZmqTransport
from echo.runtime import node
from echo.runtime.identity import JoinSource
from echo.runtime.learner.setup import Options, build_learner
from echo.runtime.relay import build_relay
from echo.runtime.worker.setup import build_worker
from echo.wire.codec import encode
from echo.wire.messages import Greet

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def limit() -> Iterator[tuple[int, int]]:
    """The limit of open files, put back afterwards."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_soft_limit_is_raised_and_never_lowered(limit: tuple[int, int]) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, limit[1]))
    assert raise_descriptor_limit(300) == descriptor_limit() == 300
    assert raise_descriptor_limit(260) == 300
    assert raise_descriptor_limit(2**40) == resource.getrlimit(resource.RLIMIT_NOFILE)[1]


def test_idle_strangers_make_way_and_disturb_nobody() -> None:
    async def scenario() -> None:
        listener = ZmqTransport("tcp://127.0.0.1:0", TransportOptions(max_strangers=8))
        await listener.start()
        address = str(listener.listen_address)
        old, young = ZmqTransport(), ZmqTransport()
        await old.start()
        await young.start()
        peer = old.dial(address)
        assert isinstance((await old.receive())[0], Connected)
        assert old.send(peer, [b"before"])
        [_, first] = await listener.receive()
        assert isinstance(first, Received)
        idle = [socket.create_connection(parse_address(address)) for _ in range(40)]
        for each in idle:
            each.setblocking(False)
        loop = asyncio.get_running_loop()
        for each in idle[:32]:
            while await loop.sock_recv(each, 64):  # until it is closed, after ZMTP's greeting
                pass
        assert listener.stats().closed_strangers == 32
        for each in idle[32:]:  # the youngest are open, and have ZMTP's greeting
            assert await loop.sock_recv(each, 64)
        newcomer = young.dial(address)
        assert isinstance((await young.receive())[0], Connected)
        assert young.send(newcomer, [b"hello"])
        assert old.send(peer, [b"after"])
        heard: list[bytes] = []
        while len(heard) < 2:
            events = await listener.receive()
            heard += [bytes(e.frames[0]) for e in events if isinstance(e, Received)]
        assert sorted(heard) == [b"after", b"hello"]
        for each in idle:
            each.close()
        for transport in (listener, old, young):
            await transport.close()

    asyncio.run(asyncio.wait_for(scenario(), 30))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("role", "soft", "hard", "num_strangers"),
    [
        ("relay", 64, 128, 150),
        pytest.param("relay", 1024, 1024, 1500, marks=pytest.mark.matrix),
        pytest.param("learner", 1024, 1024, 1500, marks=pytest.mark.matrix),
    ],
)
def test_a_node_survives_more_strangers_than_it_may_have_files(
    tmp_path: Path,
    model_dir: Path,
    limit: tuple[int, int],
    role: str,
    soft: int,
    hard: int,
    num_strangers: int,
) -> None:
    """More connect than its limits of open files allow: it answers who says hello."""
    raise_descriptor_limit(4096)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = tmp_path / "node.toml"
    address = f"tcp://127.0.0.1:{port}"
    config.write_text(
        f'run = {{name = "r", dir = "{tmp_path}"}}\nsecurity = {{curve = false}}\n'
        + {
            "relay": f'relay = {{listen = "{address}", connect = ["tcp://127.0.0.1:1"]}}\n',
            "learner": f'learner = {{listen = "{address}"}}\nmodel = {{name = "{model_dir}"}}\n'
            'task = {kind = "addition"}\nsampling = {max_completion_tokens = 6}\n',
        }[role]
    )
    command = f"{sys.executable} -m echo.cli.main node --role {role} --config {config}"
    process = subprocess.Popen(
        ["sh", "-c", f"ulimit -Sn {soft}; ulimit -Hn {hard}; exec {command}"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stderr=subprocess.PIPE,
    )

    def connect() -> socket.socket:
        return socket.create_connection(("127.0.0.1", port))

    def wait_for_port() -> socket.socket:
        while process.poll() is None:
            with contextlib.suppress(ConnectionRefusedError):
                return connect()
            time.sleep(0.05)
        raise AssertionError(process.communicate()[1])

    async def greet() -> bytes:
        genuine = ZmqTransport()
        await genuine.start()
        peer = genuine.dial(address)
        while True:
            for event in await genuine.receive():
                if isinstance(event, Connected):
                    greeting = Greet(node_id="w", role="worker", purpose="control")
                    genuine.send(peer, encode(greeting, source="w"))
                if isinstance(event, Received):
                    await genuine.close()
                    return bytes(event.frames[0])

    idle = [wait_for_port()]
    try:
        idle += [connect() for _ in range(num_strangers)]
        # Well before the ten seconds after which an unfinished handshake is given up anyway.
        assert b"Greeted" in asyncio.run(asyncio.wait_for(greet(), 25))
    finally:
        for each in idle:
            each.close()
        process.terminate()
        _, text = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM, text
    assert b"connections that sent nothing" in text


class BindsError(Exception):
    """The node is about to let strangers in."""


@pytest.mark.slow
@pytest.mark.parametrize("build", [build_learner, build_worker])
def test_the_code_of_the_model_is_imported_before_strangers_can_connect(
    tmp_path: Path,
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    build: Callable[..., Any],
) -> None:
    imported = []

    def import_model(config: Any) -> Any:
        imported.append(config.model_type)
        return model_class(config)

    monkeypatch.setattr(model, "model_class", import_model)

    async def start_transport(*arguments: Any, **options: Any) -> None:
        raise BindsError

    monkeypatch.setattr(node, "start_transport", start_transport)
    table = {
        "run": {"dir": str(tmp_path)},
        "model": {"name": str(model_dir)},
        "security": {"curve": False},
        "worker": {"connect": ["tcp://127.0.0.1:1"]},
        "task": {"kind": "addition"},
        "sampling": {"max_completion_tokens": 6},
    }
    is_learner = build is build_learner
    config = parse_config(table, role="learner" if is_learner else "worker")
    log = logging.getLogger()
    options = Options(follower=Mock(), log=log)
    built = build_learner(config, options) if is_learner else build_worker(config, log=log)
    with pytest.raises(BindsError):
        asyncio.run(built)
    assert imported


@pytest.mark.slow
@pytest.mark.parametrize("role", ["relay", "worker", "learner"])
def test_a_node_has_its_files_open_before_strangers_can_connect(
    tmp_path: Path,
    model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    limit: tuple[int, int],
    role: str,
) -> None:
    """From then on no descriptor is to be had here, as in a burst of strangers."""
    listen = ZmqTransport.listen

    def listen_amid_strangers(transport: ZmqTransport) -> None:
        listen(transport)
        next_descriptor = os.dup(0)
        os.close(next_descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (next_descriptor, limit[1]))

    monkeypatch.setattr(ZmqTransport, "listen", listen_amid_strangers)
    table: dict[str, dict[str, Any]] = {
        "run": {"dir": str(tmp_path)},
        "network": {"store_dir": str(tmp_path / "store")},
        "security": {"curve": False},
        role: {"listen": "tcp://127.0.0.1:0"},
        "task": {"kind": "addition"},
        "sampling": {"max_completion_tokens": 6},
    }
    if role == "learner":
        own = tmp_path / "model"
        shutil.copytree(model_dir, own)
        template = "{{ strftime_now('%d') }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
        (own / "chat_template.jinja").write_text(template)
        table["model"] = {"name": str(own)}
    else:
        table[role]["connect"] = ["tcp://127.0.0.1:1"]
    config = parse_config(table, role=role)
    log = logging.getLogger()

    async def scenario() -> None:
        built: Any
        if role == "relay":
            join = JoinSource("relay", config.relay.connect, config.security, config.run_dir)
            profile = config.profile
            built = await build_relay(config.relay, config.network, join, profile=profile, log=log)
        elif role == "worker":
            built = await build_worker(config, log=log)
        else:
            built = await build_learner(config, Options(follower=Mock(), log=log))
        descriptors_are_out = resource.getrlimit(resource.RLIMIT_NOFILE)[0] < limit[0]
        resource.setrlimit(resource.RLIMIT_NOFILE, limit)
        await built.transport.close()
        built.release()
        assert descriptors_are_out

    asyncio.run(scenario())


def test_who_connects_and_leaves_all_the_time_does_not_hold_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(channels, "NEWS_PER_TURN", 4)

    async def scenario() -> None:
        listener = ZmqTransport("tcp://127.0.0.1:0")
        await listener.start()
        heard, turn = Counter[int](), 0
        assert listener.listener is not None
        channel = listener.listener.channel
        assert isinstance(channel, channels.ZmqChannel)
        channel._on_news = lambda *_: heard.update([turn])
        where = parse_address(str(listener.listen_address))
        for _ in range(20):
            with socket.create_connection(where) as stranger:
                stranger.recv(1)  # of ZMTP's greeting, which comes after the news of it
        while heard.total() < 20:
            turn += 1
            await asyncio.sleep(0)
        assert max(heard.values()) == 4
        await listener.close()

    asyncio.run(asyncio.wait_for(scenario(), 30))


CROWD = """
import socket, sys, time
host, port = sys.argv[1], int(sys.argv[2])
crowd = []
for _ in range(4000):
    crowd.append(socket.socket())
    crowd[-1].setblocking(False)
    crowd[-1].connect_ex((host, port))
print("here", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_crowd_leaves_descriptors_to_a_node_that_may_have_few(limit: tuple[int, int]) -> None:
    if limit[1] != resource.RLIM_INFINITY and limit[1] < 4200:
        pytest.skip("the crowd needs 4 200 open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, limit[1]))

    async def scenario() -> None:
        network = parse_config({}).network
        listener = await node.start_transport(network, "tcp://127.0.0.1:0", None)
        where = parse_address(str(listener.listen_address))
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit[1], limit[1]))
        command = [sys.executable, "-c", CROWD, where[0], str(where[1])]
        pipe = subprocess.PIPE
        crowd = subprocess.Popen(command, stdin=pipe, stdout=pipe)  # noqa: ASYNC220
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, limit[1]))
        member = ZmqTransport()
        await member.start()
        listening = asyncio.ensure_future(hear(listener))
        try:
            assert crowd.stdout is not None
            # While they come in: files are opened as the ledger's are.
            ready = asyncio.get_running_loop().run_in_executor(None, crowd.stdout.readline)
            ends_at = time.monotonic() + 2.5
            while time.monotonic() < ends_at:
                with Path(os.devnull).open("rb"):  # noqa: ASYNC230
                    await asyncio.sleep(0.002)
            assert await ready == b"here\n"
            peer = member.dial(str(listener.listen_address))
            async with asyncio.timeout(10):
                assert isinstance((await member.receive())[0], Connected)
                assert member.send(peer, [b"hello"])
                assert await listening == b"hello"
        finally:
            listening.cancel()
            crowd.communicate(timeout=30)
            await member.close()
            await listener.close()

    async def hear(listener: ZmqTransport) -> bytes:
        while True:
            for event in await listener.receive():
                if isinstance(event, Received):
                    return bytes(event.frames[0])

    asyncio.run(scenario())
