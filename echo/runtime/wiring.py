"""From the configuration to a node's transport and session: what all roles set up alike."""

from __future__ import annotations

import re
import secrets
import socket

from echo import __version__
from echo.config.schema import Config, NetworkSection
from echo.protocol.broadcast import Broadcast
from echo.protocol.node_session import NodeSettings
from echo.runtime.transport import TransportOptions
from echo.runtime.transport_zmq import ZmqTransport

HEADROOM_BYTES = 1 << 20
"""Room beside a chunk in the largest message, for headers and for manifests of small chunks."""
MAX_ASSET_BYTES = 64 << 20
"""Largest file that a worker may inherit; the largest tokenizers in use have some 35 MB."""
MAX_IMAGE_SHARE = 0.9
"""Share of a node's memory that one version of the weights may take at most."""


async def start_transport(network: NetworkSection, listen: str | None) -> ZmqTransport:
    """Return a ZeroMQ transport with the configuration's bounds, bound to its address.

    Raises:
        TransportError: if the address is taken or is not this machine's.
    """
    max_message_bytes = max(MAX_ASSET_BYTES, network.chunk_bytes) + HEADROOM_BYTES
    options = TransportOptions(
        max_message_bytes=max_message_bytes,
        max_unsent_bytes=max(64 << 20, 4 * network.window_bytes, 2 * max_message_bytes),
        heartbeat_s=network.heartbeat_s,
        dead_after_s=network.dead_after_s,
    )
    transport = ZmqTransport(listen, options)
    try:
        await transport.start()
    except BaseException:
        await transport.close()
        raise
    return transport


def make_broadcast(node_id: str, network: NetworkSection) -> Broadcast:
    """Return a node's part of the weights plane with the configuration's bounds."""
    return Broadcast(
        node_id=node_id,
        window_bytes=network.window_bytes,
        keep_versions=network.keep_versions,
        # A healthy parent sends a chunk or says that it waits within a heartbeat or two.
        stall_s=max(0.5, network.heartbeat_s),
    )


def node_name(role: str, given: str | None) -> str:
    """Return the node's name: the given one, or one made from the host's that will be unique."""
    if given is not None:
        return given
    host = re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname())[:24] or "host"
    return f"{role}-{host}-{secrets.token_hex(2)}"


def advertised(listen: str | None, advertise: str | None) -> str | None:
    """Return the address that others are told to dial, or None if there is none to tell.

    A wildcard address says nothing to others, so such a listener needs `advertise`.
    """
    if advertise is not None:
        return advertise
    if listen is None or re.match(r"^tcp://(\*|0\.0\.0\.0|\[::\]):", listen):
        return None
    return listen


def node_settings(
    config: Config, role: str, *, node_id: str, advertise: str | None, max_image_bytes: int
) -> NodeSettings:
    """Return what a relay's or worker's session is told."""
    network = config.network
    addresses = config.relay.connect if role == "relay" else config.worker.connect
    return NodeSettings(
        node_id=node_id,
        role=role,
        incarnation=secrets.token_hex(8),
        addresses=tuple(addresses),
        advertise=advertise,
        echo_version=__version__,
        reconnect_for_s=network.reconnect_for_s,
        max_image_bytes=max_image_bytes,
        digests={},
        heartbeat_s=network.heartbeat_s,
        dead_after_s=network.dead_after_s,
    )
