from __future__ import annotations

import asyncio
import re

import pytest

from echo.config.load import parse_config
from echo.errors import TransportError
from echo.runtime import wiring


@pytest.mark.parametrize(
    ("listen", "advertise", "expected"),
    [
        (None, None, None),
        ("tcp://10.0.0.1:7700", None, "tcp://10.0.0.1:7700"),
        ("tcp://0.0.0.0:7700", None, None),
        ("tcp://[::]:7700", None, None),
        ("tcp://0.0.0.0:7700", "tcp://gpu.example:7700", "tcp://gpu.example:7700"),
    ],
)
def test_only_an_address_that_others_can_dial_is_told(
    listen: str | None, advertise: str | None, expected: str | None
) -> None:
    assert wiring.advertised(listen, advertise) == expected


def test_a_name_is_the_users_or_unique() -> None:
    assert wiring.node_name("worker", "w1") == "w1"
    names = {wiring.node_name("worker", None) for _ in range(50)}
    assert len(names) > 45
    assert all(re.fullmatch(r"worker-[A-Za-z0-9_.-]+-[0-9a-f]{4}", name) for name in names)


@pytest.mark.parametrize(("role", "address"), [("relay", "tcp://a:1"), ("worker", "tcp://b:2")])
def test_each_role_dials_its_own_addresses(role: str, address: str) -> None:
    config, _ = parse_config(
        {"relay": {"connect": ["tcp://a:1"]}, "worker": {"connect": ["tcp://b:2"]}}
    )
    made = [
        wiring.node_settings(config, role, node_id="n", advertise=None, max_image_bytes=1)
        for _ in range(2)
    ]
    assert made[0].addresses == (address,)
    assert made[0].incarnation != made[1].incarnation


def test_a_port_in_use_is_named() -> None:
    async def scenario() -> None:
        network = parse_config({})[0].network
        first = await wiring.start_transport(network, "tcp://127.0.0.1:0")
        try:
            address = first.listen_address
            assert address is not None
            with pytest.raises(TransportError, match=re.escape(address)):
                await wiring.start_transport(network, address)
        finally:
            await first.close()

    asyncio.run(scenario())
