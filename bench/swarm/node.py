"""One process of bench_swarm.py: a node of a swarm over the project's own transport.

Commands come as lines on stdin, answers and events leave as JSON lines on stdout, as in
broadcast/node.py. A node dials others with two links each: one for messages, one over which it is
sent chunks, so that no message waits behind chunks; whoever is dialled sends by the congestion
control that its listening socket has.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import time
from collections.abc import Iterable
from typing import Any

import uvloop
from blake3 import blake3
from broadcast.kept_store import KeptStore
from broadcast.node import make_publication
from broadcast.stream import commands, tell
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo.core.bounds import MAX_MESSAGE_BYTES
from echo.core.errors import RemoteProtocolError
from echo.net.transport import Connected, Disconnected, Received, TransportOptions, without_key
from echo.net.zmq import Inbound, ZmqTransport
from echo.runtime.disk_store import open_store
from echo.runtime.identity import Identity
from echo.runtime.node import tune_malloc
from echo.weights.manifest import hash_image
from echo.weights.store import ItemStore, Transfer, TrustedManifests, allocate
from echo.wire.actions import Action, Note, Send, Work
from echo.wire.codec import encode
from echo.wire.messages import FULL, Announce, Greet, ItemId
from swarm.messages import message_of
from swarm.protocol import ItemArrived, NeighbourFailed, Swarm

RUN_ID = "bench"
KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
POLL_S = 0.01
"""Between two looks at what has left the sockets."""


class CountingTransport(ZmqTransport):
    """Tells what has left for the kernel, which holds little that is not under way."""

    max_socket_bytes = 0
    """Of a connection that was accepted; 0 for no bound."""

    async def bind(self) -> None:
        await super().bind()
        if self._bound is not None and self.max_socket_bytes:
            option = socket.TCP_NOTSENT_LOWAT
            self._bound.setsockopt(socket.IPPROTO_TCP, option, self.max_socket_bytes)

    def unsent_bytes(self, peer: str) -> int:
        """Return what was accepted for a peer that has dialled, and not yet given to the kernel."""
        found = self._peers.get(peer)
        return found.outbox.unsent_bytes if isinstance(found, Inbound) else 0


class SwarmNode:
    """A swarm, its transport and its store."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        options = TransportOptions(
            max_message_bytes=MAX_MESSAGE_BYTES, max_unsent_bytes=2 * MAX_MESSAGE_BYTES
        )
        self.name = arguments.name
        self._listens = arguments.listen is not None
        self._is_leaf = arguments.leaf
        self.transport = CountingTransport(
            arguments.listen, options, congestion_control=arguments.congestion or None
        )
        self.transport.max_socket_bytes = arguments.socket_bytes
        kept = arguments.kept_bytes
        version_store = KeptStore(kept) if kept else open_store(None, None)
        self.store = ItemStore(keep_versions=2, version_store=version_store)
        self.trust = TrustedManifests()
        self.trust.set(
            public_key=KEY.public_key().public_bytes_raw(), run_id=RUN_ID, max_image_bytes=1 << 40
        )
        can_serve = self._listens and not self._is_leaf
        seed = int(blake3(self.name.encode()).hexdigest()[:8], 16)
        self.swarm = Swarm(self.store, node_id=self.name, can_serve=can_serve, seed=seed)
        self._control: dict[str, str] = {}
        self._bulk: dict[str, str] = {}
        """Node -> link over which chunks go to it."""
        self._met: set[str] = set()
        self._dialled: dict[str, tuple[str, str]] = {}
        """Link -> (node, purpose)."""
        self._inbound: dict[str, tuple[str, str]] = {}
        self._next: Any = None
        self.control_bytes = self.control_messages = 0
        self._poll: asyncio.TimerHandle | None = None
        self._tick: asyncio.TimerHandle | None = None
        self._tick_at: float | None = None
        self.late_s = 0.0
        self._looked_at = 0.0
        self._unsent: dict[str, int] = {}
        """What was last seen to wait for a link's socket."""

    @property
    def now(self) -> float:
        return time.monotonic()

    async def run(self) -> None:
        await self.transport.start()
        address = self.transport.listen_address
        tell(address=None if address is None else without_key(address))
        listening = asyncio.create_task(self._receive())
        async for command in commands():
            self._obey(command)
        listening.cancel()
        await self.transport.close()

    def _obey(self, command: list[str]) -> None:
        match command:
            case ["dial", name, address, *purposes]:
                for purpose in purposes:
                    self._dialled[self.transport.dial(address)] = name, purpose
            case ["met"]:
                tell(met=len(self._met), bulk=len(self._bulk))
            case ["prepare", step, num_bytes, chunk_bytes]:
                identity, image = Identity(RUN_ID, KEY), allocate(int(num_bytes))
                self._next = make_publication(
                    identity, b"", "full", None, image, int(step), int(chunk_bytes)
                )
                tell(hash=self._next.manifest.image_hash.hex())
            case ["publish"]:
                tell(at=self.now)
                manifest, count = self._next.manifest, self._next.manifest.num_chunks
                image = Transfer(
                    self._next.signed, manifest, self._next.image, bytearray(b"\1") * count, count
                )
                self.store.images[manifest.version] = image
                self._perform(self.swarm.publish((manifest.version, FULL), now=self.now))
                self._retire()
            case ["cpu"]:
                tell(cpu_s=time.process_time())
            case ["hash"]:
                held = self.store.images[self.store.newest_complete]
                tell(hash=hash_image(held.storage, held.manifest.chunk_bytes).hex())
            case ["counts"]:
                swarm = self.swarm
                tell(
                    num_duplicates=swarm.num_duplicate_chunks,
                    control_bytes=self.control_bytes,
                    control_messages=self.control_messages,
                    slots=swarm.slots,
                    ahead=swarm._ahead,  # noqa: SLF001 -- to be looked at
                    socket_ms=round(1e3 * swarm._socket_s),  # noqa: SLF001
                    uplink_mbit=round((swarm.uplink.bytes_per_s or 0) * 8e-6, 1),
                    bytes_sent=swarm.bytes_sent,
                    expired=swarm.num_expired_turns,
                    late_ms=round(1e3 * self.late_s),
                    is_leaf=swarm.is_leaf,
                    user_s=round(os.times().user, 2),
                    system_s=round(os.times().system, 2),
                )
                self.late_s = 0.0

    async def _receive(self) -> None:
        while True:
            for event in await self.transport.receive():
                match event:
                    case Connected(peer, address) if address is not None:
                        name, purpose = self._dialled[peer]
                        greet = Greet(node_id=self.name, role="worker", purpose=purpose)
                        self.transport.send(peer, encode(greet, source=self.name))
                        self._link(name, purpose, peer, is_ours=True)
                    case Disconnected(peer):
                        name, _ = self._dialled.get(peer) or self._inbound.pop(peer, ("", ""))
                        if name in self._met:
                            self._met.discard(name)
                            self._perform(self.swarm.leave(name, now=self.now))
                    case Received(peer, frames):
                        self._hear(peer, list(frames))
            if self.now - self._looked_at > POLL_S / 2:
                self._look()

    def _link(self, name: str, purpose: str, peer: str, *, is_ours: bool) -> None:
        if purpose == "control":
            self._control[name] = peer
        elif not is_ours:
            self._bulk[name] = peer
        if name in self._control:
            self._met.add(name)
            met = self.swarm.meet(name, self._control[name], self._bulk.get(name), now=self.now)
            self._perform(met)

    def _hear(self, peer: str, frames: list[Any]) -> None:
        message = message_of(frames)
        payload = frames[1:]
        if isinstance(message, Greet):
            self._inbound[peer] = message.node_id, message.purpose
            self._link(message.node_id, message.purpose, peer, is_ours=False)
            return
        if isinstance(message, Announce):
            self._on_announce(message, payload)
            return
        name, _ = self._dialled.get(peer) or self._inbound.get(peer, ("", ""))
        link = self._control.get(name, peer)
        try:
            self._perform(self.swarm.receive(link, message, payload, now=self.now))
        except RemoteProtocolError as error:
            tell(fault=f"{name}: {error}")

    def _on_announce(self, message: Announce, payload: list[Any]) -> None:
        manifest = self.trust.manifest(message.version, payload[0])
        if manifest.version in self.store.images:
            return
        self.store.begin_image(*self.trust.manifests[manifest.version])
        self._perform(self.swarm.want((manifest.version, FULL), now=self.now))
        self._retire()

    def _retire(self) -> None:
        newest = max(self.store.images)
        for item_id in self.store.expendable([(newest, FULL)]):
            self._perform(self.swarm.drop(item_id, now=self.now))
            self.store.drop(item_id)

    def _perform(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Send(peer, frames):
                    if len(frames) == 1 or len(frames[1]) < 65536:
                        self.control_bytes += sum(map(len, frames))
                        self.control_messages += 1
                    self.transport.send(peer, frames)
                    if len(frames) > 1:
                        self._unsent.pop(peer, None)
                        self._poll_soon()
                case ItemArrived(item_id):
                    self._arrived(item_id)
                case Work():
                    self._perform(self.swarm.written(action, action.run(), now=self.now))
                case NeighbourFailed(_, reason):
                    tell(fault=reason)
                case Note(_, text):
                    tell(fault=text)
        self._schedule()

    def _arrived(self, item_id: ItemId) -> None:
        tell(arrived=item_id[0].step, at=self.now)

    def _look(self) -> None:
        """Tell the swarm what has left, at once and then every few milliseconds."""
        now = self._looked_at = self.now
        for peer in self.swarm.links_in_use:
            unsent = self.transport.unsent_bytes(peer)
            if unsent < self._unsent.get(peer, 1 << 60):
                self._unsent[peer] = unsent
                left = self.swarm.left(peer, unsent, now=now)
                if left:
                    self._perform(left)
        if self.swarm.links_in_use:
            self._poll_soon()

    def _poll_soon(self) -> None:
        if self._poll is None:
            self._poll = asyncio.get_running_loop().call_later(POLL_S, self._poll_again)

    def _poll_again(self) -> None:
        self._poll = None
        self._look()

    def _schedule(self) -> None:
        deadline = self.swarm.deadline
        if deadline == self._tick_at:
            return
        if self._tick is not None:
            self._tick.cancel()
        self._tick, self._tick_at = None, deadline
        if deadline is not None:
            delay_s = max(0.0, deadline - self.now)
            self._tick = asyncio.get_running_loop().call_later(delay_s, self._expire)

    def _expire(self) -> None:
        self.late_s = max(self.late_s, self.now - (self._tick_at or self.now))
        self._tick = self._tick_at = None
        self._perform(self.swarm.expire(now=self.now))
        self._look()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--listen", help="tcp://host:port; port 0 is any free one")
    parser.add_argument("--leaf", action="store_true", help="serve nobody")
    parser.add_argument("--congestion", default="bbr")
    parser.add_argument("--socket-bytes", type=int, default=64 << 10)
    parser.add_argument("--kept-bytes", type=int, default=0, help="size of images in kept memory")
    arguments = parser.parse_args()
    tune_malloc()
    uvloop.run(SwarmNode(arguments).run())


if __name__ == "__main__":
    main()
