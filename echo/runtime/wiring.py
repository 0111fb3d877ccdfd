"""From the configuration to a node's transport and session: what all roles set up alike."""

from __future__ import annotations

import logging
import re
import secrets
import socket

from echo import __version__
from echo.config.schema import Config, NetworkSection
from echo.core.bounds import MAX_MESSAGE_BYTES, MAX_PAYLOAD_BYTES
from echo.core.price import Price
from echo.net.curve import CurveKeys
from echo.net.transport import TransportOptions, is_loopback, parse_key, with_key
from echo.net.zmq import ZmqTransport, advise, descriptor_limit
from echo.protocol.joining import NodeSettings
from echo.runtime.join import dial_addresses, signing_fingerprint
from echo.runtime.kernel import read_facts
from echo.weights.broadcast import Broadcast
from echo.weights.store import VersionStore

_log = logging.getLogger(__name__)

MAX_ASSET_BYTES = MAX_PAYLOAD_BYTES
"""Largest file that a worker may inherit; the largest tokenizers in use have some 35 MB."""
MAX_STRANGERS = 4096
"""Connections at once that have not said anything yet; a quarter of all open files at most."""
FIRST_WINDOW_CHUNKS = 4
"""What a child asks for ahead until its link has shown its rate: several, so that they pipeline."""
MAX_FIRST_WINDOW_BYTES = 2 << 20
"""Of that; all of it may lie in the queue of a slow uplink, for four seconds at 4 Mbit/s. The
broadcasts in bench/results were measured with it."""
MAX_IMAGE_SHARE = 0.9
"""Share of a node's memory that one version of the weights may take at most."""


async def start_transport(
    network: NetworkSection,
    listen: str | None,
    keys: CurveKeys | None = None,
    *,
    listens_later: bool = False,
) -> ZmqTransport:
    """Return a ZeroMQ transport with the configuration's bounds, bound to its address.

    Args:
        network: the bounds and timings.
        listen: where to listen; None only to dial.
        keys: with which all links are encrypted; None for none of them.
        listens_later: whether the caller lets others connect, by `listen`.

    Raises:
        TransportError: if the address is taken or is not this machine's.
    """
    options = TransportOptions(
        max_message_bytes=MAX_MESSAGE_BYTES,
        max_unsent_bytes=2 * MAX_MESSAGE_BYTES,
        heartbeat_s=network.heartbeat_s,
        dead_after_s=network.dead_after_s,
        max_strangers=min(MAX_STRANGERS, descriptor_limit() // 4),
    )
    transport = ZmqTransport(listen, options, keys)
    await (transport.bind() if listens_later else transport.start())
    if keys is None and listen is not None and not is_loopback(listen):
        _log.warning(
            "security.curve is false: whoever reaches %s can read the weights and join the run",
            listen,
        )
    return transport


def warn_of_kernel(*addresses: str | None) -> None:
    """Say which settings of the kernel cost speed, unless all links stay on this machine."""
    if all(address is None or is_loopback(address) for address in addresses):
        return
    for warning in advise(read_facts()).warnings:
        _log.warning("%s", warning)


def sockets_per_link(parent: str | None) -> int:
    """Return how many connections to open for weights to one parent, by the kernel's settings.

    Args:
        parent: the parent's address; on loopback one is enough.
    """
    if parent is not None and is_loopback(parent):
        return 1
    return advise(read_facts()).num_sockets_per_link


def make_broadcast(
    node_id: str, network: NetworkSection, arenas: VersionStore | None = None
) -> Broadcast:
    """Return a node's part of the weights plane with the configuration's bounds.

    Args:
        node_id: name of the node.
        network: the bounds.
        arenas: where received versions lie; None at the learner, which receives none.
    """
    return Broadcast(
        node_id=node_id,
        window_bytes=min(FIRST_WINDOW_CHUNKS * network.chunk_bytes, MAX_FIRST_WINDOW_BYTES),
        # A healthy parent sends a chunk or says that it waits within a heartbeat or two.
        stall_s=max(0.5, network.heartbeat_s),
        arenas=arenas,
    )


def node_name(role: str, given: str | None) -> str:
    """Return the node's name: the given one, or one made from the host's that will be unique."""
    if given is not None:
        return given
    host = re.sub(r"[^A-Za-z0-9_.-]", "-", socket.gethostname())[:24] or "host"
    return f"{role}-{host}-{secrets.token_hex(2)}"


def advertised(listen: str | None, advertise: str | None) -> str | None:
    """Return the address that others are told to dial, or None if there is none to tell.

    A wildcard address says nothing to others, so such a listener needs `advertise`, to which the
    server key is added that `listen`, the transport's address, has.
    """
    if listen is not None and advertise is not None:
        key = parse_key(listen)
        return advertise if key is None else with_key(advertise, key)
    if listen is None or re.match(r"^tcp://(\*|0\.0\.0\.0|\[::\]):", listen):
        return advertise
    return listen


def node_settings(
    config: Config, role: str, *, node_id: str, advertise: str | None, max_image_bytes: int
) -> NodeSettings:
    """Return what a relay's or worker's session is told."""
    network = config.network
    addresses = dial_addresses(config, role)
    return NodeSettings(
        node_id=node_id,
        role=role,
        incarnation=secrets.token_hex(8),
        addresses=addresses,
        advertise=advertise,
        echo_version=__version__,
        reconnect_for_s=network.reconnect_for_s,
        max_image_bytes=max_image_bytes,
        digests={},
        heartbeat_s=network.heartbeat_s,
        dead_after_s=network.dead_after_s,
        fingerprint=signing_fingerprint(config, role),
        sockets_per_link=sockets_per_link(next(iter(addresses), None)),
        region=network.region,
        price_per_gb=network.price_per_gb,
        price=stated_price(config, role),
    )


def stated_price(config: Config, role: str) -> Price:
    """Return what the configuration says that a relay's or worker's machine costs."""
    if role == "relay":
        return Price(per_h=config.relay.price_per_h, per_gb=config.relay.price_per_gb)
    worker = config.worker
    return Price(
        per_h=worker.price_per_h,
        per_gb=worker.price_per_gb,
        losses_per_h=worker.losses_per_h,
    )
