from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pytest

from echo.config.load import parse_config
from echo.config.schema import RelaySection, SecuritySection, WorkerSection
from echo.core.bounds import MAX_MESSAGE_BYTES
from echo.core.errors import TransportError
from echo.net.kernel import KernelFacts
from echo.roles.joining import NodeSettings
from echo.runtime import node
from echo.runtime.identity import JoinSource

KEY = "k" * 42 + "A"


def joining(role: Literal["relay", "worker"], connect: Sequence[str] = ()) -> JoinSource:
    return JoinSource(role, connect, SecuritySection(), Path("no/such/directory"))


def settings_of(worker: WorkerSection) -> NodeSettings:
    """What a worker's role is told."""
    join = joining("worker", worker.connect)
    log = logging.getLogger("test")
    return node.node_settings(worker, parse_config({}).network, join, None, log=log)


@pytest.mark.parametrize(
    ("listen", "advertise", "expected"),
    [
        (None, None, None),
        ("tcp://10.0.0.1:7700", None, "tcp://10.0.0.1:7700"),
        ("tcp://0.0.0.0:7700", None, None),
        ("tcp://[::]:7700", None, None),
        ("tcp://0.0.0.0:7700", "tcp://gpu.example:7700", "tcp://gpu.example:7700"),
        (f"tcp://10.0.0.1:7700#{KEY}", None, f"tcp://10.0.0.1:7700#{KEY}"),
        (f"tcp://0.0.0.0:7700#{KEY}", None, None),
        (f"tcp://0.0.0.0:7700#{KEY}", "tcp://gpu.example:1", f"tcp://gpu.example:1#{KEY}"),
    ],
)
def test_only_an_address_that_others_can_dial_is_told(
    listen: str | None, advertise: str | None, expected: str | None
) -> None:
    assert node.advertised(listen, advertise) == expected


@pytest.mark.parametrize(
    ("listen", "advertise", "is_told"),
    [
        ("tcp://0.0.0.0:7701", None, True),
        ("tcp://0.0.0.0:7701", "tcp://a:1", False),
        (None, None, False),
    ],
)
def test_a_listener_that_nobody_can_be_told_of_is_said(
    listen: str | None, advertise: str | None, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    config, log = parse_config({}), logging.getLogger("test.wildcard")
    node.node_settings(
        RelaySection(advertise=advertise), config.network, joining("relay"), listen, log=log
    )
    assert ("relay.advertise is not set" in caplog.text) == is_told


def test_a_name_is_the_users_or_unique() -> None:
    assert node.node_name("worker", "w1") == "w1"
    names = {node.node_name("worker", None) for _ in range(50)}
    assert len(names) > 45
    assert all(re.fullmatch(r"worker-[A-Za-z0-9_.-]+-[0-9a-f]{4}", name) for name in names)


def test_each_start_of_a_node_is_another_incarnation() -> None:
    made = [settings_of(WorkerSection(connect=("tcp://b:2",))) for _ in range(2)]
    assert made[0].addresses == made[1].addresses == ("tcp://b:2",)
    assert made[0].incarnation != made[1].incarnation


def test_a_port_in_use_is_named() -> None:
    async def scenario() -> None:
        network = parse_config({}).network
        first = await node.start_transport(network, "tcp://127.0.0.1:0")
        try:
            address = first.listen_address
            assert address is not None
            assert first.options.max_message_bytes == MAX_MESSAGE_BYTES
            with pytest.raises(TransportError, match=re.escape(address)):
                await node.start_transport(network, address)
        finally:
            await first.close()

    asyncio.run(scenario())


def test_a_plain_listener_on_a_network_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(listen: str) -> None:
        transport = await node.start_transport(parse_config({}).network, listen)
        await transport.close()

    asyncio.run(scenario("tcp://127.0.0.1:0"))
    assert "security.curve" not in caplog.text
    asyncio.run(scenario("tcp://0.0.0.0:0"))
    assert "security.curve is false: any host that reaches tcp://0.0.0.0:0 can read" in caplog.text


def test_no_address_of_a_node_bears_the_secret() -> None:
    join = f"tcp://a:1#{KEY}.{'s' * 22}.{'f' * 22}"
    settings = settings_of(WorkerSection(connect=("tcp://b:2", join)))
    assert settings.addresses == ("tcp://b:2", f"tcp://a:1#{KEY}")


def test_the_kernel_matters_for_links_between_machines(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = KernelFacts(can_use_bbr=False, max_send_buffer_bytes=4 << 20)
    monkeypatch.setattr(node, "read_kernel", lambda: facts)
    log = logging.getLogger("a node's")
    caplog.set_level(logging.INFO)
    near = (None, "tcp://127.0.0.1:1", f"tcp://localhost:1#{KEY}")
    node.warn_of_kernel(*near, profile="wan", log=log)
    assert caplog.text == ""
    for profile, level in (("wan", "WARNING"), ("lan", "INFO")):
        caplog.clear()
        node.warn_of_kernel(None, "tcp://10.0.0.5:1", profile=profile, log=log)
        assert {record.levelname for record in caplog.records} == {level}
        [message] = caplog.messages
        assert "tcp_wmem allows 4194304 bytes; bbr may not be chosen" in message
