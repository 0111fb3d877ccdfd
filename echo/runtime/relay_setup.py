"""From the configuration to a relay."""

from __future__ import annotations

import asyncio
import logging

from echo.config.machine import read_machine
from echo.config.schema import Config
from echo.protocol.relay_session import RelaySession
from echo.runtime import wiring
from echo.runtime.relay import RelayNode


async def build_relay(config: Config, *, log: logging.Logger) -> RelayNode:
    """Return a relay that is ready to run, listening already if it listens at all."""
    section = config.relay
    transport = await wiring.start_transport(config.network, section.listen)
    node_id = wiring.node_name("relay", section.name)
    settings = wiring.node_settings(
        config,
        "relay",
        node_id=node_id,
        advertise=wiring.advertised(transport.listen_address, section.advertise),
        max_image_bytes=int(wiring.MAX_IMAGE_SHARE * read_machine().host_bytes),
    )
    session = RelaySession(
        settings,
        wiring.make_broadcast(node_id, config.network),
        now=asyncio.get_running_loop().time(),
    )
    return RelayNode(session, transport, log=log)
