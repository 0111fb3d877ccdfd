"""A swarm on links of paper: real nodes, uplinks shared equally by the links that send.

Messages but chunks take the latency only. Neither TCP nor the CPU costs anything: what is lost
against the fluid optimum is lost by the rules of `swarm.py`.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo.core.rollout import PolicyVersion
from echo.weights.manifest import SignedManifest, TensorSpec, build_manifest, sign
from echo.weights.store import ItemStore, Transfer
from echo.wire.actions import Action, Note, Send, Work
from echo.wire.codec import encode
from echo.wire.messages import FULL, Announce, Chunk, ItemId
from swarm.messages import Have, Tables, message_of
from swarm.protocol import ItemArrived, NeighbourFailed, Swarm

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
FRAMING_BYTES = 60
"""What TCP, ZMTP and IP add to a message, roughly."""


@dataclass(eq=False)
class PaperNode:
    """One node and its uplink."""

    name: str
    bytes_per_s: float
    swarm: Swarm
    store: ItemStore
    queues: dict[str, deque[list[Any]]] = field(default_factory=dict)
    """Link -> [bytes left, all bytes, what happens then]."""
    at: float = 0.0
    plan: int = 0
    deadline: float | None = None
    is_dead: bool = False
    arrived: dict[ItemId, float] = field(default_factory=dict)
    control_bytes: int = 0
    chunk_bytes: int = 0
    asked: list[tuple[str, Any]] = field(default_factory=list)

    @property
    def heads(self) -> list[list[Any]]:
        return [queue[0] for queue in self.queues.values() if queue]

    def advance(self, now: float) -> None:
        heads = self.heads
        for head in heads:
            head[0] -= (now - self.at) * self.bytes_per_s / len(heads)
        self.at = now


class PaperFleet:
    """Nodes, their links, and one clock; node 0 is the source."""

    def __init__(
        self,
        rates: Sequence[float],
        *,
        latency_s: float = 0.02,
        degree: int | None = None,
        seed: int = 0,
    ) -> None:
        """Connect everybody with everybody, or with so many neighbours chosen by chance.

        Args:
            rates: bytes/s of each uplink, the source's first; 0 for who cannot serve.
            latency_s: one way between any two.
            degree: neighbours of each node; None for all others.
            seed: of the fleet.
        """
        self.now = 0.0
        self.latency_s = latency_s
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._chance = random.Random(seed)
        self.failed: list[NeighbourFailed] = []
        self.corrupt: Callable[[str, bytes], bytes] | None = None
        self.nodes: dict[str, PaperNode] = {}
        for index, rate in enumerate(rates):
            name, store = f"n{index}", ItemStore(keep_versions=2)
            swarm = Swarm(store, node_id=name, can_serve=rate > 0, seed=seed * 1000 + index)
            self.nodes[name] = PaperNode(name, max(rate, 1.0), swarm, store)
        for one, other in self._pairs(len(rates), degree):
            self.connect(one, other)

    def _pairs(self, count: int, degree: int | None) -> list[tuple[str, str]]:
        names = list(self.nodes)
        if degree is None or degree >= count - 1:
            return list(itertools.combinations(names, 2))
        pairs = {tuple(sorted((names[0], n))) for n in self._chance.sample(names[1:], degree)}
        serving = [n for n in names[1:] if self.nodes[n].bytes_per_s > 1]
        for name in names[1:]:
            others = [n for n in serving if n != name]
            for other in self._chance.sample(others, min(len(others), degree // 2)):
                pairs.add(tuple(sorted((name, other))))
        return sorted(pairs)

    def connect(self, one: str, other: str) -> None:
        """Make neighbours of two nodes."""
        for here, there in ((one, other), (other, one)):
            # A link is named by who uses it to reach whom.
            actions = self.nodes[here].swarm.meet(there, there, there + "/bulk", now=self.now)
            self._perform(self.nodes[here], actions)

    def publish(self, step: int, size: int, chunk_bytes: int) -> ItemId:
        """Have the source publish an image of random bytes."""
        signed, image = random_image(step, size, chunk_bytes)
        version = signed[1].version
        source = self.nodes["n0"]
        has_chunk = bytearray(b"\1") * signed[1].num_chunks
        source.store.images[version] = Transfer(*signed, image, has_chunk, len(has_chunk))
        self._perform(source, source.swarm.publish((version, FULL), now=self.now))
        return version, FULL

    def deliver(self, step: int, size: int, chunk_bytes: int, *, within_s: float = 600.0) -> float:
        """Return the seconds until every live node has a version."""
        began_at = self.now
        item_id = self.publish(step, size, chunk_bytes)
        self.run_until_arrived(item_id, within_s=within_s)
        return self.now - began_at

    def run_until_arrived(self, item_id: ItemId, *, within_s: float = 600.0) -> None:
        """Go on until every live node has an item."""
        until = self.now + within_s
        others = [node for node in self.nodes.values() if node.name != "n0"]
        while not all(item_id in node.arrived or node.is_dead for node in others):
            if self.now > until:
                raise RuntimeError(f"{item_id} has not come within {within_s:g} s")
            self.step()

    def step(self) -> None:
        """Let the next thing happen."""
        self.now, _, act = heapq.heappop(self._events)
        act()

    def at(self, when: float, act: Callable[[], None]) -> None:
        """Have something happen at an instant."""
        heapq.heappush(self._events, (when, next(self._count), act))

    def kill(self, name: str, *, is_seen: bool) -> None:
        """End a node; `is_seen`: its neighbours' links close, else it just says nothing more."""
        dead = self.nodes[name]
        dead.is_dead = True
        if is_seen:
            for node in self.nodes.values():
                self.at(self.now + self.latency_s, lambda node=node: self._leave(node, name))

    def _leave(self, node: PaperNode, name: str) -> None:
        node.queues.pop(name + "/bulk", None)
        self._perform(node, node.swarm.leave(name, now=self.now))
        self._plan(node)

    def _perform(self, node: PaperNode, actions: Iterable[Action]) -> None:
        for action in actions:
            if node.is_dead:
                return
            if isinstance(action, Send):
                self._send(node, action)
            elif isinstance(action, ItemArrived):
                node.arrived[action.item_id] = self.now
            elif isinstance(action, NeighbourFailed):
                self.failed.append(action)
            else:
                assert isinstance(action, Note | Work), action
        deadline = node.swarm.deadline
        if deadline is not None and node.deadline != deadline:
            node.deadline = deadline
            self.at(max(deadline, self.now), lambda: self._expire(node, deadline))

    def _expire(self, node: PaperNode, deadline: float) -> None:
        if node.deadline == deadline and not node.is_dead:
            node.deadline = None
            self._perform(node, node.swarm.expire(now=self.now))

    def _send(self, node: PaperNode, action: Send) -> None:
        name = action.peer.partition("/")[0]
        message = message_of(action.frames)
        payload = [bytes(frame) for frame in action.frames[1:]]
        node.asked.append((name, message))

        def receive() -> None:
            self._receive(self.nodes[name], node.name, message, payload)

        if not isinstance(message, Chunk):
            num_bytes = sum(map(len, action.frames)) + FRAMING_BYTES
            node.control_bytes += num_bytes
            self.at(self.now + self.latency_s, receive)
            return
        if self.corrupt is not None:
            payload[0] = self.corrupt(node.name, payload[0])
        size = len(payload[0])
        node.chunk_bytes += size
        node.advance(self.now)
        node.queues.setdefault(action.peer, deque()).append([size, size, receive])
        self._plan(node)

    def _receive(self, node: PaperNode, sender: str, message: Any, payload: list[bytes]) -> None:
        if node.is_dead:
            return
        if isinstance(message, Announce):
            signed = random_images[message.version]
            if message.version not in node.store.images:
                node.store.begin_image(*signed)
                self._perform(node, node.swarm.want((message.version, FULL), now=self.now))
            return
        if isinstance(message, Have) and message.version not in node.store.images:
            # As the plane around it would: who is no neighbour of the source asks its own.
            ask = Tables(version=message.version, form=message.form, num_segments=0)
            self._send(node, Send(sender, encode(ask, source=node.name)))
        actions = node.swarm.receive(sender, message, payload, now=self.now)
        self._perform(node, actions)

    def _plan(self, node: PaperNode) -> None:
        node.plan += 1
        heads, plan = node.heads, node.plan
        if heads:
            least = max(0.0, min(head[0] for head in heads))
            at = self.now + least * len(heads) / node.bytes_per_s + 1e-9
            self.at(at, lambda: self._sent(node, plan))

    def _sent(self, node: PaperNode, plan: int) -> None:
        if node.plan != plan or node.is_dead:
            return
        node.advance(self.now)
        for peer, queue in list(node.queues.items()):
            if queue and queue[0][0] < 1e-3:
                self.at(self.now + self.latency_s, queue.popleft()[2])
                unsent = sum(size for _, size, _ in queue)
                self._perform(node, node.swarm.left(peer, unsent, now=self.now))
        self._plan(node)


random_images: dict[PolicyVersion, tuple[SignedManifest, Any]] = {}


def random_image(step: int, size: int, chunk_bytes: int) -> tuple[Any, bytearray]:
    """Return the manifest, signed and not, of an image of random bytes, and the image."""
    image = bytearray(random.Random(step).randbytes(size))
    manifest = build_manifest(
        run_id="run",
        version=PolicyVersion(1, step),
        model_digest="model",
        tensors=[TensorSpec("w", "uint8", (size,), 0, size)],
        image=image,
        chunk_bytes=chunk_bytes,
    )
    signed = random_images[manifest.version] = sign(manifest, KEY), manifest
    return signed, image
