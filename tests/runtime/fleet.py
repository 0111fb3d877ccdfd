"""A learner that publishes synthetic weights, and relays that take them, in one process.

Sessions, nodes, coder and version stores are the real ones. The transport is a network on paper or
ZeroMQ with CURVE on loopback, behind an `Uplink` that each node has of its own: it has a rate, it
can be cut, and it can falsify what it sends.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from bench.publishing import ForcedPlanning, publishing_session
from echo.config.load import parse_config
from echo.config.schema import Config
from echo.core.rollout import PolicyVersion
from echo.net.curve import SECRET_BYTES, CurveKeys, KeyPair
from echo.net.transport import (
    PeerId,
    Received,
    Transport,
    TransportEvent,
    TransportOptions,
    TransportStats,
)
from echo.roles.joining import fingerprint
from echo.roles.learner import Learner
from echo.roles.relay import Relay as RelaySession
from echo.runtime import node as wiring
from echo.runtime.disk_store import MappedStore
from echo.runtime.identity import Identity, Join, node_keys
from echo.runtime.learner.publish import Coder, Publication, VersionEncoder
from echo.runtime.node import Node
from echo.runtime.relay import RelayNode
from echo.sim.network import Network, Port, Route
from echo.sim.transport import SimTransport
from echo.weights import link
from echo.weights.broadcast import Broadcast
from echo.weights.cipher import KEY_BYTES
from echo.weights.manifest import TensorSpec, build_manifest, sign
from echo.wire.actions import Action
from echo.wire.codec import describe
from echo.wire.messages import FULL, LEARNER_ID, Chunk, Fetch
from tests.roles.harness import message_of

CHUNK_BYTES = 128 << 10
IMAGE_BYTES = 6 << 20
"""A block and a half; large enough for codec "auto" to make encoded versions."""
NUM_CHUNKS = IMAGE_BYTES // CHUNK_BYTES
PACE = 6 * IMAGE_BYTES / 10
"""Bytes per second of an uplink at which an image takes some 1.7 s: it has a middle."""
WITHIN_S = 120.0
"""Seconds for whatever is waited for, on a busy machine."""
NETWORK: dict[str, Any] = {
    "heartbeat_s": 0.1,
    "dead_after_s": 2.0,
    "reconnect_for_s": 100.0,
    "chunk_bytes": CHUNK_BYTES,
}
OPTIONS = TransportOptions(
    heartbeat_s=0.1, dead_after_s=2.0, min_redial_s=0.02, max_redial_s=0.2, linger_s=0.2
)
PATIENCE_S = 1000.0
"""Of nodes that must not take a busy machine for a silent parent: more than a test takes."""


class Uplink(Transport):
    """Another transport, behind what a node can send."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self._idle_at = 0.0
        self.bytes_per_s = math.inf
        self.is_cut = False
        """Whether nothing comes or goes, and nobody is told."""
        self.is_corrupt = False
        """Whether every chunk that is sent is a wrong one."""
        self.broadcast: Broadcast | None = None
        self.num_needless = 0
        """Chunks that were requested although they were held."""
        self.num_chunks = {False: 0, True: 0}
        """That came over links, and over their bulk connections."""

    @property
    def listen_address(self) -> str | None:
        return self._inner.listen_address

    async def start(self) -> None:
        await self._inner.start()

    def dial(self, address: str, *, has_bulk: bool = False) -> PeerId:
        return self._inner.dial(address, has_bulk=has_bulk)

    def hang_up(self, peer: PeerId) -> None:
        self._inner.hang_up(peer)

    def send(
        self,
        peer: PeerId,
        frames: Sequence[bytes | bytearray | memoryview],
        *,
        is_public: bool = False,
    ) -> bool:
        if self.is_cut:
            return False
        message = message_of(list(frames))
        if isinstance(message, Fetch):
            self.num_needless += self._num_held(message)
        if self.is_corrupt and isinstance(message, Chunk):
            frames = [frames[0], bytes(~np.frombuffer(frames[1], np.uint8))]
        loop = asyncio.get_running_loop()
        now = loop.time()
        if self._idle_at <= now and self.bytes_per_s == math.inf:
            return self._inner.send(peer, frames, is_public=is_public)
        num_bytes = 64 + sum(map(len, frames))
        self._idle_at = max(now, self._idle_at + 1e-6) + num_bytes / self.bytes_per_s
        loop.call_at(self._idle_at, self._leave, peer, frames, is_public)
        return True

    def _num_held(self, fetch: Fetch) -> int:
        """Return how many of the chunks that are asked for are held."""
        assert self.broadcast is not None
        images, encoded_versions = self.broadcast.store, self.broadcast.encoded_versions
        is_full = fetch.form == FULL
        item = images[fetch.version] if is_full else encoded_versions[fetch.version, fetch.form]
        has_chunk = item.has_chunk[fetch.link :: fetch.num_links]
        return sum(sum(has_chunk[start:stop]) for start, stop in fetch.ranges)

    def _leave(
        self, peer: PeerId, frames: Sequence[bytes | bytearray | memoryview], is_public: bool
    ) -> None:
        if not self.is_cut:
            self._inner.send(peer, frames, is_public=is_public)

    async def receive(self) -> list[TransportEvent]:
        events = await self._inner.receive()
        for event in events:
            if isinstance(event, Received) and describe(event.frames)[2] == "Chunk":
                self.num_chunks[event.is_public] += 1
        return [event for event in events if not (self.is_cut and isinstance(event, Received))]

    async def close(self) -> None:
        if not self.is_cut:  # its last words leave first
            await asyncio.sleep(self._idle_at - asyncio.get_running_loop().time())
        self.is_cut = True
        await self._inner.close()

    def stats(self) -> TransportStats:
        return self._inner.stats()


class Publisher(Node):
    """A learner without a model."""

    session: Learner

    def __init__(self, session: Learner, transport: Transport) -> None:
        super().__init__(session, transport, log=logging.getLogger("fleet.learner"))
        self.session = session

    def disconnected(self, peer: str, reason: str) -> list[Action]:
        return self.session.disconnected(peer, now=self.now)


def images(seed: int = 0) -> Iterator[bytearray]:
    """Yield bf16 weights, in each image a hundredth of them moved a little."""
    chance = np.random.default_rng(seed)
    floats = chance.standard_normal(IMAGE_BYTES // 2).astype(np.float32) * 0.02
    words = (floats.view(np.uint32) >> 16).astype(np.uint16)
    while True:
        yield bytearray(words.tobytes())
        where = chance.integers(len(words), size=len(words) // 100)
        words[where] ^= 1


@dataclasses.dataclass
class Relay:
    """A relay that runs."""

    node: RelayNode
    uplink: Uplink
    task: asyncio.Task[str]

    @property
    def broadcast(self) -> Broadcast:
        return self.node.session.broadcast

    @property
    def parent(self) -> str:
        """Its parents, one per stripe."""
        return self.node.session.stats().parent

    @property
    def share(self) -> float:
        """The part that it holds of what it is fetching."""
        _, num_held, num_chunks = self.broadcast.progress()
        return num_held / num_chunks if num_chunks else 0.0


class Fleet:
    """A learner and its relays."""

    def __init__(self, kind: str, *, num_stripes: int, codec: str, is_patient: bool) -> None:
        """Run over `kind`, "memory" or "zmq"; 0 stripes leave the plan to the learner."""
        self._kind = kind
        self._is_patient = is_patient
        self._codec = codec
        self._num_stripes = num_stripes
        self._network = Network(seed=3, between=Route(latency_s=0.005, jitter_s=0.002))
        self._identity = Identity("fleet", Ed25519PrivateKey.generate())
        self._secret = bytes(range(SECRET_BYTES))
        self._server = KeyPair.of(bytes(range(32)))
        self._images = images()
        self._coder = Coder(self._identity.key, encrypts=True, num_threads=1)
        self._tasks: list[asyncio.Task[str]] = []
        self.relays: dict[str, Relay] = {}
        self.published: list[bytearray] = []

    async def start(self) -> None:
        """Start the learner."""
        config = self._config()
        keys = CurveKeys.of_learner(self._server, self._secret) if self._kind == "zmq" else None
        self.uplink = await self._transport(LEARNER_ID, config, keys)
        address = self.uplink.listen_address or ""
        self._join = (
            address
            if keys is None
            else str(Join(address, self._secret, fingerprint(self._identity.public_key)))
        )
        self.session = publishing_session(config, self._identity, address)
        if self._num_stripes:
            kind = "chain" if self._num_stripes == 1 else "stripes"
            planning = ForcedPlanning(self.session.planning, kind, self._num_stripes)
            self.session.planning = planning
        node = Publisher(self.session, self.uplink)
        self.encoded_versions = VersionEncoder(
            self.session.broadcast,
            self._coder,
            codec=self._codec,
            node=node,
        )
        self._tasks.append(asyncio.create_task(node.run()))

    def _config(self) -> Config:
        join = getattr(self, "_join", "tcp://127.0.0.1:1")
        security = {"curve": self._kind == "zmq"}
        patience = {"dead_after_s": PATIENCE_S} if self._is_patient else {}
        table = {"network": {**NETWORK, **patience}, "security": security}
        return parse_config({**table, "relay": {"connect": [join]}})

    async def _transport(self, name: str, config: Config, keys: CurveKeys | None) -> Uplink:
        if self._kind == "zmq":
            return Uplink(await wiring.start_transport(config.network, "tcp://127.0.0.1:0", keys))
        options = dataclasses.replace(OPTIONS, dead_after_s=config.network.dead_after_s)
        transport = SimTransport(self._network, Port(name, address=f"tcp://{name}:0"), options)
        await transport.start()
        return Uplink(transport)

    # --- relays ----------------------------------------------------------------------------------

    async def join(self, *names: str, version_store: MappedStore | None = None) -> None:
        """Start relays, one after the other, and wait until each follows the plan."""
        for name in names:
            await self.begin(name, version_store=version_store)
            await self.until(self.is_planned, f"{name} follows the plan")

    async def begin(self, name: str, *, version_store: MappedStore | None = None) -> Relay:
        """Start a relay."""
        config = self._config()
        keys = node_keys(config, "relay") if self._kind == "zmq" else None
        uplink = await self._transport(name, config, keys)
        settings = wiring.node_settings(
            config, "relay", node_id=name, advertise=uplink.listen_address, max_image_bytes=1 << 30
        )
        patience = {"heartbeat_s": PATIENCE_S} if self._is_patient else {}  # what it is made of
        broadcast = wiring.make_broadcast(
            name, config.network.model_copy(update=patience), version_store
        )
        session = RelaySession(settings, broadcast, now=asyncio.get_running_loop().time())
        session._weights.retry_preferred_s = NETWORK["dead_after_s"]
        uplink.broadcast = broadcast
        log = logging.getLogger(f"fleet.{name}")
        node = RelayNode(session, uplink, version_store=version_store, log=log)
        relay = Relay(node, uplink, asyncio.create_task(node.run()))
        self._tasks.append(relay.task)
        self.relays[name] = relay
        return relay

    async def kill(self, name: str) -> Relay:
        """End a relay without a last word."""
        relay = self.relays.pop(name)
        relay.uplink.is_cut = True
        relay.task.cancel()
        await asyncio.gather(relay.task, return_exceptions=True)
        return relay

    async def leave(self, name: str) -> None:
        """Stop a relay as its operator would."""
        relay = self.relays.pop(name)
        relay.node.interrupt()
        await relay.task

    def is_planned(self) -> bool:
        """Return whether all relays take weights from the parents that they were given."""
        members = {member.node_id: member for member in self.session.roster.members()}
        return members.keys() == self.relays.keys() and all(
            (plan := members[name].node.plan) is not None and relay.parent == plan.first_parents
            for name, relay in self.relays.items()
        )

    def pace(self, bytes_per_s: float = PACE) -> None:
        """Give every uplink a rate."""
        for uplink in self.uplinks:
            uplink.bytes_per_s = bytes_per_s

    @property
    def uplinks(self) -> list[Uplink]:
        return [self.uplink, *(relay.uplink for relay in self.relays.values())]

    # --- versions --------------------------------------------------------------------------------

    async def publish(self, count: int = 1, *, arrive: bool = True) -> None:
        """Publish the next versions, and wait until every relay has each of them."""
        for _ in range(count):
            image, chunk_key = next(self._images), secrets.token_bytes(KEY_BYTES)
            manifest = build_manifest(
                run_id=self._identity.run_id,
                version=PolicyVersion(1, len(self.published)),
                model_digest="",
                tensors=[TensorSpec("w", "bfloat16", (IMAGE_BYTES // 2,), 0, IMAGE_BYTES)],
                image=image,
                chunk_bytes=CHUNK_BYTES,
                key=chunk_key,
            )
            self.published.append(image)
            signed = sign(manifest, self._identity.key, chunk_key)
            await self.encoded_versions.publish(Publication(signed, manifest, image))
            if arrive:
                await self.encoded_versions.wait()
                await self.arrived()

    async def arrived(self, *names: str) -> None:
        """Wait until relays, all or these, hold the newest version bit for bit."""
        newest = PolicyVersion(1, len(self.published) - 1)
        relays = {name: self.relays[name] for name in names or self.relays}
        await self.until(
            lambda: all(r.broadcast.newest_complete == newest for r in relays.values()),
            f"{', '.join(relays)} have {newest}",
        )
        for name, relay in relays.items():
            held = relay.broadcast.store[newest].storage
            assert held == self.published[-1], f"{name} has other bytes"
            assert relay.uplink.num_needless == 0, f"{name} requested what it held"

    async def until(
        self, condition: Callable[[], object], what: str, *, within_s: float = WITHIN_S
    ) -> None:
        """Wait for a condition."""
        give_up_at = asyncio.get_running_loop().time() + within_s
        while not condition():
            for task in self._tasks:
                if task.done() and not task.cancelled() and task.exception() is not None:
                    await task
            if asyncio.get_running_loop().time() > give_up_at:
                state = {
                    name: (relay.parent, relay.broadcast.newest_complete, relay.share)
                    for name, relay in self.relays.items()
                }
                raise AssertionError(f"not within {within_s:g} s: {what}\n{state}")
            await asyncio.sleep(0.005)

    async def close(self) -> None:
        """End everything."""
        for uplink in self.uplinks:
            uplink.is_cut = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._coder.close()


def play(
    kind: str,
    scenario: Callable[[Fleet], Awaitable[None]],
    *,
    num_stripes: int = 1,
    codec: str = "auto",
    is_patient: bool = True,
) -> None:
    """Play a scenario, a coroutine function of a fleet whose learner runs.

    Unless it is patient, nodes leave a parent that is silent for half a second, as they may have to
    where nothing else tells them of its failure. On a busy machine they leave others too.
    """

    async def main() -> None:
        fleet = Fleet(kind, num_stripes=num_stripes, codec=codec, is_patient=is_patient)
        try:
            async with asyncio.timeout(2 * WITHIN_S):
                await fleet.start()
                await scenario(fleet)
        finally:
            await fleet.close()

    with pytest.MonkeyPatch.context() as patch:
        if is_patient:
            patch.setattr(link, "MIN_PATIENCE_S", PATIENCE_S)
        asyncio.run(main())
