"""One process of bench_broadcast.py: a learner or a receiver.

Commands come as lines on stdin, answers and events leave as JSON lines on stdout, and the end of
stdin ends the process. Learner and receiver are the real roles on the real transport; only the
weights are random bytes, published when told to. What depends on how the core plans and publishes
is in the functions at the end; what a core cannot do yet ends the process with {"fault": why}.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import functools
import logging
import os
import secrets
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import uvloop
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from broadcast.kept_store import KeptStore
from broadcast.publishing import ForcedPlanning, publishing_role
from broadcast.stream import commands, tell
from echo.config.load import parse_config
from echo.config.schema import Config
from echo.core.errors import EchoError
from echo.core.rollout import PolicyVersion
from echo.engine import allocator
from echo.net.curve import SECRET_BYTES, CurveKeys, KeyPair
from echo.net.transport import Transport
from echo.roles.joining import fingerprint
from echo.roles.learner import Learner
from echo.roles.members import RunEnded
from echo.roles.plans import Publishing
from echo.roles.relay import Relay
from echo.runtime import node
from echo.runtime.disk_store import open_store
from echo.runtime.identity import Identity, Join, JoinSource
from echo.runtime.learner.versions.publish import Coder, Publication, VersionEncoder
from echo.runtime.node import Node
from echo.runtime.relay import RelayNode
from echo.weights.cipher import KEY_BYTES
from echo.weights.delta import fill
from echo.weights.manifest import TensorSpec, build_manifest, hash_image, sign
from echo.weights.receiver import VersionArrived
from echo.weights.store.memory import RecycledMemory
from echo.wire.actions import Action, Send
from echo.wire.messages import LEARNER_ID

LOG = logging.getLogger("bench")

CHANGED_SHARE = 0.0141
"""Of bf16 weights in one Adam step at learning rate 1e-6."""
IMAGES = 3
"""Of versions that a learner's memory is kept for, as in a run: two that are held, and the next."""
TILE_WEIGHTS = 32 << 20
"""Weights of the first version that are drawn; the rest repeats them."""


SMALLEST_CHUNK = 1 << 16
"""Bytes; a message that carries less is control."""


class Control:
    """Bytes of all messages that carry no chunk."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def counted(self, actions: Iterable[Action]) -> Iterator[Action]:
        """Pass actions on, and count what they send."""
        for action in actions:
            if isinstance(action, Send):
                num_bytes = sum(memoryview(frame).nbytes for frame in action.frames)
                self.num_bytes += num_bytes * (num_bytes < SMALLEST_CHUNK)
            yield action


def cpu() -> dict[str, float]:
    """Return the CPU seconds of this process, and those of them that the kernel has taken."""
    return {"cpu_s": time.process_time(), "kernel_s": os.times().system}


class Publisher(Node):
    """A learner that publishes random bytes instead of training."""

    role: Learner

    def __init__(
        self,
        role: Learner,
        transport: Transport,
        identity: Identity,
        join: str,
        *,
        encrypts: bool,
    ) -> None:
        super().__init__(role, transport, log=LOG)
        self.role = role
        self._identity = identity
        self._join = join
        self._next: Publication | None = None
        self._images = RecycledMemory(IMAGES)
        self._codec = "full"
        self._encrypts = encrypts
        self._coder = Coder(identity.key, encrypts=encrypts)
        self._control = Control()

    def perform(self, actions: Iterable[Action]) -> None:
        super().perform(self._control.counted(actions))

    async def work(self) -> None:
        tell(address=self._join)
        async for command in commands():
            match command:
                case ["plan", count]:
                    await self._until(lambda count=int(count): is_planned(self.role, count))
                    tell(parents=parents(self.role))
                case ["prepare", step, num_bytes, chunk_bytes, codec]:
                    base = None if codec == "full" or self._next is None else self._next.image
                    key = secrets.token_bytes(KEY_BYTES) if self._encrypts else b""
                    image = self._images.take(int(num_bytes))
                    make = functools.partial(make_publication, self._identity, key, codec, base)
                    self._next, self._codec = None, codec
                    self._next = await asyncio.to_thread(make, image, int(step), int(chunk_bytes))
                    tell(hash=self._next.manifest.image_hash.hex())
                case ["publish"]:
                    assert self._next is not None
                    tell(at=time.monotonic())
                    self.report(Publishing())
                    await self._encoded_versions(self._codec).publish(self._next)
                case ["force", kind, ways, count]:
                    force(self.role, kind, int(ways))
                    self.perform(self.role.plans.replan(self.now))
                    await self._until(lambda count=int(count): is_planned(self.role, count))
                    tell(parents=parents(self.role))
                case ["topology"]:
                    tell(**topology(self.role))
                case ["installed"]:
                    await self._until(self._is_installed)
                    tell(at=time.monotonic())
                case ["finish"]:
                    self.report(RunEnded("the benchmark is over"))
                    await self.wait_until(lambda: not self.role.roster.nodes, within_s=5)
                case ["cpu"]:
                    tell(**cpu(), control_bytes=self._control.num_bytes)
        self.stop("the benchmark is over")

    def _encoded_versions(self, codec: str) -> VersionEncoder:
        return VersionEncoder(
            self.role.broadcast, self._coder, codec=codec, pool=self.threads.pool("coder"),
            perform=self.perform, spawn=self.spawn, clock=lambda: self.now,
        )  # fmt: skip

    async def _until(self, is_done: Any) -> None:
        await self.wait_until(is_done, within_s=3600)

    def _is_installed(self) -> bool:
        assert self._next is not None
        version = self._next.manifest.version  # a delta is announced before it is held here
        return all(member.installed == version for member in self.role.roster.members())


class Receiver(RelayNode):
    """A relay that tells when a version has arrived."""

    _is_watching = False
    """Whether gaps are asked for: to look after each message costs as much as some of it."""
    _received_at: float | None = None
    _longest_gap_s = 0.0
    _num_received = 0

    def __init__(self, *words: Any, **options: Any) -> None:
        super().__init__(*words, **options)
        self._control = Control()

    def perform(self, actions: Iterable[Action]) -> None:
        self._note_gap()
        super().perform(self._control.counted(actions))

    def _note_gap(self) -> None:
        """Keep the longest time without weight bytes between two chunks of a version."""
        if not self._is_watching:
            return
        broadcast = self.role.broadcast
        if broadcast.bytes_received != self._num_received:
            if self._received_at is not None:
                self._longest_gap_s = max(self._longest_gap_s, self.now - self._received_at)
            self._num_received, self._received_at = broadcast.bytes_received, self.now

    async def work(self) -> None:
        await super().work()
        tell(ready=True)
        async for command in commands():
            match command:
                case ["cpu"]:
                    tell(
                        **cpu(),
                        control_bytes=self._control.num_bytes,
                        num_duplicates=self.role.broadcast.receiver.num_duplicate_chunks,
                    )
                case ["watch"]:
                    self._is_watching = True
                    self._received_at, self._longest_gap_s = None, 0.0
                case ["hash"]:
                    broadcast = self.role.broadcast
                    assert broadcast.newest_complete is not None
                    held = broadcast.store[broadcast.newest_complete]
                    digest = await asyncio.to_thread(
                        hash_image, held.storage, held.manifest.chunk_bytes
                    )
                    tell(hash=digest.hex(), wire_bytes=broadcast.bytes_received)
                case ["gap"]:
                    tell(longest_gap_s=self._longest_gap_s)
        self.stop("the benchmark is over")

    def on_action(self, action: Action) -> None:
        if isinstance(action, VersionArrived):
            tell(arrived=action.version.step, at=time.monotonic())
        super().on_action(action)


async def run_learner(config: Config, arguments: argparse.Namespace) -> None:
    secret, server = secrets.token_bytes(SECRET_BYTES), KeyPair.of(secrets.token_bytes(32))
    keys = CurveKeys.of_learner(server, secret) if config.security.curve else None
    transport = await node.start_transport(config.network, arguments.listen, keys)
    identity = Identity("bench", Ed25519PrivateKey.generate())
    address = node.advertised(transport.listen_address, arguments.advertise) or ""
    role = publishing_role(config, identity, address)
    kind, _, ways = arguments.topology.partition(":")
    force(role, kind, int(ways or 0))
    join = address if keys is None else str(Join(address, secret, fingerprint(identity.public_key)))
    encrypts = config.security.curve
    await Publisher(role, transport, identity, join, encrypts=encrypts).run()


async def run_receiver(config: Config, arguments: argparse.Namespace) -> None:
    # Without an address of its own a node is a leaf.
    join = JoinSource("relay", config.relay.connect, config.security, config.run_dir)
    transport = await node.start_transport(config.network, arguments.listen, join.keys())
    settings = dataclasses.replace(
        node.node_settings(config.relay, config.network, join, transport.listen_address, log=LOG),
        node_id=arguments.name or f"receiver-{secrets.token_hex(2)}",
        advertise=node.advertised(transport.listen_address, arguments.advertise),
        max_image_bytes=1 << 40,
    )
    if arguments.sockets != "auto":
        most = int(arguments.sockets)
        transport.options = dataclasses.replace(transport.options, max_bulk_connections=most)
    size = arguments.model_bytes
    store = KeptStore(size) if size else open_store(None, None)
    broadcast = node.make_broadcast(settings.node_id, config.network, store)
    if size:
        image = bytearray(random_bytes(0, size))
        broadcast.offer(image, hash_image(image, arguments.chunk_bytes))
    role = Relay(settings, broadcast, now=asyncio.get_running_loop().time())
    await Receiver(role, transport, log=LOG).run()


# --- what depends on the core ---------------------------------------------------------------------


def force(role: Learner, kind: str, ways: int) -> None:
    """Have the role plan that topology from now on; nothing where it shall plan as it likes."""
    if kind != "auto":
        role.plans.planner = ForcedPlanning(role.plans.planner, kind, ways)


def is_planned(role: Learner, count: int) -> bool:
    """Return whether that many receivers take weights from the parents that they were given."""
    members = role.roster.members()
    return len(members) == count and all(
        member.node.plan is not None and member.stats.parent == member.node.plan.first_parent
        for member in members
    )


def topology(role: Learner) -> dict[str, Any]:
    """Return the plan in force, what it promises, and the uplinks that it was made of."""
    plan = role.plans.planner.topology
    uplinks = {each.node_id: each.stats.uplink_bytes_per_s for each in role.roster.members()}
    uplinks[LEARNER_ID] = role.broadcast.uplink.bytes_per_s
    return {
        "kind": None if plan is None else plan.kind,
        "predicted_s": None if plan is None else plan.predicted_s,
        "uplinks_mbit": {name: rate and round(rate * 8e-6, 1) for name, rate in uplinks.items()},
    }


def parents(role: Learner) -> dict[str, str]:
    """Return every receiver's parent."""
    members = role.roster.members()
    return {member.node_id: member.stats.parent for member in members}


def random_bytes(step: int, num_bytes: int) -> bytes:
    """Return the image of a version in full, the same in each process."""
    return np.random.default_rng(step).bytes(num_bytes)


def make_publication(
    identity: Identity,
    chunk_key: bytes,
    codec: str,
    base: bytearray | memoryview | None,
    image: memoryview,
    step: int,
    chunk_bytes: int,
) -> Publication:
    """Make of `image` random bytes, or what is an optimizer step away from `base`."""
    chance, num_bytes = np.random.default_rng(step), len(image)
    words = np.frombuffer(image, np.uint16)
    if codec == "full":
        fill(image, random_bytes(step, num_bytes))
    elif base is None:
        weights = (chance.standard_normal(TILE_WEIGHTS, dtype=np.float32) * 0.02).view(np.uint32)
        words[:] = np.resize((weights >> 16).astype(np.uint16), len(words))
    else:
        fill(image, base)
        # Few weights move, and most by one unit in the last place: bench_delta.py simulates it.
        where = chance.integers(0, len(words), int(CHANGED_SHARE * len(words)))
        words[where] += chance.choice(np.array([1, 0xFFFF], np.uint16), len(where))
    manifest = build_manifest(
        run_id=identity.run_id,
        version=PolicyVersion(1, step),
        tensors=[TensorSpec("weights", "bfloat16", (num_bytes // 2,), 0, num_bytes)],
        image=image,
        chunk_bytes=chunk_bytes,
        key=chunk_key,
    )
    return Publication(sign(manifest, identity.key, chunk_key), manifest, image)


def configuration(arguments: argparse.Namespace) -> Config:
    table = {
        "relay": {"connect": [arguments.connect or "tcp://127.0.0.1:1"]},
        "security": {"curve": arguments.curve},
    }
    return parse_config(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=["learner", "receiver"])
    parser.add_argument("--listen", help="tcp://host:port; port 0 is any free one")
    parser.add_argument("--advertise", help="where others reach it, if not there")
    parser.add_argument("--connect", help="what the learner told as its address")
    parser.add_argument("--topology", default="auto", help="auto, chain, star, tree:K")
    parser.add_argument("--sockets", default="auto", help="for chunks to each parent")
    parser.add_argument("--name", help="node id of a receiver")
    parser.add_argument("--curve", action="store_true", help="encrypt all links")
    parser.add_argument("--model-bytes", type=int, default=0, help="of version 0, if it is here")
    parser.add_argument("--chunk-bytes", type=int, default=0, help="of version 0")
    arguments = parser.parse_args()
    allocator.tune(os.environ)
    run = run_learner if arguments.role == "learner" else run_receiver
    try:
        uvloop.run(run(configuration(arguments), arguments))
    except EchoError as error:
        tell(fault=str(error))
        sys.exit(1)


if __name__ == "__main__":
    main()
