"""From the configuration to a relay."""

from __future__ import annotations

import asyncio
import logging

from echo.config.machine import read_machine
from echo.config.schema import Config
from echo.protocol.relay_session import RelaySession
from echo.runtime import links
from echo.runtime.relay import RelayNode


def build_relay(config: Config, *, log: logging.Logger) -> RelayNode:
    """Return a relay that is ready to run; call inside the event loop."""
    section = config.relay
    node_id = links.node_name("relay", section.name)
    settings = links.node_settings(
        config,
        "relay",
        node_id=node_id,
        advertise=links.advertised(section.listen, section.advertise),
        max_image_bytes=int(links.MAX_IMAGE_SHARE * read_machine().host_bytes),
    )
    session = RelaySession(
        settings,
        links.make_broadcast(node_id, config.network),
        now=asyncio.get_running_loop().time(),
    )
    transport = links.make_transport(config.network, section.listen)
    return RelayNode(session, transport, log=log)
