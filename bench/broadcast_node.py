"""One process of bench_broadcast.py: a learner, a receiver, or one end of a raw TCP stream.

Commands come as lines on stdin, answers and events leave as JSON lines on stdout, and the end of
stdin ends the process. Learner and receiver are the real sessions on the real transport; only the
weights are random bytes, published when told to.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import secrets
import socket
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import uvloop
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo.buffer import StalenessBuffer
from echo.config.load import parse_config
from echo.config.schema import Config
from echo.errors import LocalProtocolError
from echo.protocol.actions import Action, VersionArrived
from echo.protocol.learner_session import LearnerSession, LearnerSettings
from echo.protocol.leases import LeaseBook
from echo.protocol.manifest import TensorSpec, build_manifest, sign
from echo.protocol.messages import LEARNER_ID, Lease
from echo.protocol.relay_session import RelaySession
from echo.rollout import Lineage, PolicyVersion
from echo.runtime import wiring
from echo.runtime.identity import Identity
from echo.runtime.node import Node
from echo.runtime.publication import Publication
from echo.runtime.relay import RelayNode
from echo.runtime.transport import Transport

READ_BYTES = 1 << 20
LOG = logging.getLogger("bench")


def tell(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


async def commands() -> AsyncIterator[list[str]]:
    reader = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield line.decode().split()


def tell_cpu() -> None:
    tell(cpu_s=time.process_time())


class Publisher(Node):
    """A learner that publishes random bytes instead of training."""

    session: LearnerSession

    def __init__(self, session: LearnerSession, transport: Transport, identity: Identity) -> None:
        super().__init__(session, transport, log=LOG)
        self.session = session
        self._identity = identity
        self._next: Publication | None = None

    def disconnected(self, peer: str, reason: str) -> list[Action]:
        return self.session.disconnected(peer, now=self.now)

    async def work(self) -> None:
        tell(address=self.transport.listen_address)
        async for command in commands():
            match command:
                case ["plan", count]:
                    await self._until(lambda count=int(count): self._is_planned(count))
                    members = self.session.roster.members()
                    tell(parents={member.node_id: member.stats.parent for member in members})
                case ["prepare", step, num_bytes, chunk_bytes]:
                    sizes = int(num_bytes), int(chunk_bytes)
                    self._next = await asyncio.to_thread(self._prepare, int(step), *sizes)
                    tell(hash=self._next.manifest.image_hash.hex())
                case ["publish"]:
                    at = time.monotonic()
                    item = self._next
                    self.perform(
                        self.session.broadcast.publish(
                            item.signed, item.manifest, item.image, now=self.now
                        )
                    )
                    tell(at=at)
                case ["installed"]:
                    await self._until(self._is_installed)
                    tell(at=time.monotonic())
                case ["cpu"]:
                    tell_cpu()
        self.stop("the benchmark is over")

    async def _until(self, is_done: Any) -> None:
        await self.wait_until(is_done, within_s=3600)

    def _is_planned(self, count: int) -> bool:
        members = self.session.roster.members()
        return len(members) == count and all(
            member.parents and member.stats.parent == member.parents[0][0] for member in members
        )

    def _is_installed(self) -> bool:
        newest = self.session.broadcast.newest_complete
        return all(member.installed == newest for member in self.session.roster.members())

    def _prepare(self, step: int, num_bytes: int, chunk_bytes: int) -> Publication:
        image = bytearray(np.random.default_rng(step).bytes(num_bytes))
        manifest = build_manifest(
            run_id=self._identity.run_id,
            version=PolicyVersion(1, step),
            model_digest="",
            tensors=[TensorSpec("weights", "uint8", (num_bytes,), 0, num_bytes)],
            image=image,
            chunk_bytes=chunk_bytes,
        )
        return Publication(sign(manifest, self._identity.key), manifest, image)


class Receiver(RelayNode):
    """A relay that tells when a version has arrived."""

    async def work(self) -> None:
        await super().work()
        async for command in commands():
            match command:
                case ["cpu"]:
                    tell_cpu()
                case ["hash"]:
                    broadcast = self.session.broadcast
                    image = broadcast.store[broadcast.newest_complete].arena
                    digest = await asyncio.to_thread(lambda image=image: blake3(image).hexdigest())
                    tell(hash=digest, num_duplicates=broadcast.num_duplicate_chunks)
        self.stop("the benchmark is over")

    def on_action(self, action: Action) -> None:
        if isinstance(action, VersionArrived):
            tell(arrived=action.version.step, at=time.monotonic())
        super().on_action(action)


def no_lease(group_id: int, attempt: int) -> Lease:
    raise LocalProtocolError(f"lease {group_id}/{attempt} in a benchmark without workers")


async def run_learner(config: Config, arguments: argparse.Namespace) -> None:
    transport = await wiring.start_transport(config.network, arguments.listen)
    identity = Identity("bench", Ed25519PrivateKey.generate())
    lineages = (Lineage(lineage=1, fork_step=0),)
    settings = LearnerSettings(
        run_id=identity.run_id,
        public_key=identity.public_key,
        advertise=wiring.advertised(transport.listen_address, None) or "",
        max_staleness=1,
        groups_per_step=1,
        group_size=2,
        max_completion_tokens=1,
        vocab_size=1,
        heartbeat_s=config.network.heartbeat_s,
        dead_after_s=config.network.dead_after_s,
        settings={},
        assets={},
        digests={},
    )
    session = LearnerSession(
        settings,
        broadcast=wiring.make_broadcast(LEARNER_ID, config.network),
        buffer=StalenessBuffer(max_staleness=1, lineages=lineages),
        leases=LeaseBook(timeout_s=config.network.lease_timeout_s),
        make_lease=no_lease,
        lineages=lineages,
        step=0,
        next_group_id=0,
        settled=(),
    )
    await Publisher(session, transport, identity).run()


async def run_receiver(config: Config, arguments: argparse.Namespace) -> None:
    # Without an address of its own a node is a leaf, and leaves alone make a star.
    transport = await wiring.start_transport(config.network, arguments.listen)
    settings = wiring.node_settings(
        config,
        "relay",
        node_id=arguments.name or f"receiver-{secrets.token_hex(2)}",
        advertise=transport.listen_address,
        max_image_bytes=1 << 40,
    )
    broadcast = wiring.make_broadcast(settings.node_id, config.network)
    session = RelaySession(settings, broadcast, now=asyncio.get_running_loop().time())
    await Receiver(session, transport, log=LOG).run()


def run_source(arguments: argparse.Namespace) -> None:
    """Send random bytes over one TCP connection, as fast as it takes them."""
    host, port = arguments.listen.removeprefix("tcp://").rsplit(":", 1)
    with socket.create_server((host, int(port))) as listening:
        tell(address=f"tcp://{host}:{listening.getsockname()[1]}")
        connection, _ = listening.accept()
        block = memoryview(np.random.default_rng(0).bytes(READ_BYTES))
        for line in sys.stdin:
            if line.startswith("publish"):
                left = int(line.split()[1])
                tell(at=time.monotonic())
                while left:
                    connection.sendall(block[:left])
                    left -= min(left, len(block))
            else:
                tell_cpu()


def run_sink(arguments: argparse.Namespace) -> None:
    """Receive them into one buffer, without a look at them."""
    host, port = arguments.connect.removeprefix("tcp://").rsplit(":", 1)
    with socket.create_connection((host, int(port))) as connection:
        tell(connected=True)
        buffer = bytearray(READ_BYTES)
        for line in sys.stdin:
            if line.startswith("receive"):
                left = int(line.split()[1])
                while left:
                    left -= connection.recv_into(buffer, min(left, len(buffer)))
                tell(arrived=0, at=time.monotonic())
            else:
                tell_cpu()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=["learner", "receiver", "source", "sink"])
    parser.add_argument("--listen", help="tcp://host:port; port 0 is any free one")
    parser.add_argument("--connect", help="where the learner or the source listens")
    parser.add_argument("--name", help="node id of a receiver")
    parser.add_argument("--window-bytes", type=int, default=8 << 20)
    arguments = parser.parse_args()
    if arguments.role in ("source", "sink"):
        (run_source if arguments.role == "source" else run_sink)(arguments)
        return
    table = {
        "network": {"window_bytes": arguments.window_bytes},
        "relay": {"connect": [arguments.connect or "tcp://127.0.0.1:1"]},
    }
    config, _ = parse_config(table)
    uvloop.run((run_learner if arguments.role == "learner" else run_receiver)(config, arguments))


if __name__ == "__main__":
    main()
