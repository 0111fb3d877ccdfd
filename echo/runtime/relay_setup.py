"""From the configuration to a relay."""

from __future__ import annotations

import asyncio
import logging

from echo.config.memory import read_machine
from echo.config.schema import Config
from echo.net.transport import Transport
from echo.protocol.relay_session import RelaySession
from echo.runtime import wiring
from echo.runtime.arenas_files import open_arenas
from echo.runtime.join import dial_addresses, node_keys
from echo.runtime.relay import RelayNode
from echo.runtime.threads import Threads


async def build_relay(config: Config, *, log: logging.Logger) -> RelayNode:
    """Return a relay that is ready to run, listening already.

    Raises:
        EchoError: if something does not fit; the message is for the user.
    """
    keys = node_keys(config, "relay")
    transport = await wiring.start_transport(config.network, config.relay.listen, keys)
    wiring.warn_of_kernel(config.relay.listen, *dial_addresses(config, "relay"))
    try:
        return assemble_relay(config, transport, log=log)
    except BaseException:
        await transport.close()
        raise


def assemble_relay(
    config: Config, transport: Transport, *, threads: Threads | None = None, log: logging.Logger
) -> RelayNode:
    """Join a relay on a transport that has been started; otherwise as `build_relay`."""
    section = config.relay
    node_id = wiring.node_name("relay", section.name)
    settings = wiring.node_settings(
        config,
        "relay",
        node_id=node_id,
        advertise=wiring.advertised(transport.listen_address, section.advertise),
        max_image_bytes=int(wiring.MAX_IMAGE_SHARE * read_machine().host_bytes),
    )
    arenas = open_arenas(config.network.store_dir, config.network.store_bytes)
    session = RelaySession(
        settings,
        wiring.make_broadcast(node_id, config.network, arenas),
        now=asyncio.get_running_loop().time(),
    )
    return RelayNode(session, transport, arenas=arenas, threads=threads, log=log)
