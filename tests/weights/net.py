"""A mesh of broadcasts on queues: links by number, bytes checked at every send."""

from __future__ import annotations

import functools
import itertools
import sys
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeGuard

from blake3 import blake3

from echo.core.errors import RemoteProtocolError, StorageError
from echo.core.rollout import PolicyVersion
from echo.weights.broadcast import Broadcast
from echo.weights.link import ParentFailed
from echo.weights.receiver import VersionArrived, VersionAudited, VersionDamaged
from echo.weights.store.in_place import ApplyPatch
from echo.weights.store.items import Transfer
from echo.weights.store.memory import VersionStore
from echo.weights.store.patches import Patch
from echo.weights.store.writing import WriteChunk
from echo.wire.actions import Note, Send, Work
from echo.wire.codec import Frame
from echo.wire.messages import FULL, Chunk, Fetch, Form
from tests.roles.harness import CHUNK_BYTES, PUBLIC_KEY, make_broadcast, message_of
from tests.weights.encoded_versions import Piece, coded, published, sent_chunks, v, weights

NET_BYTES = 13 * CHUNK_BYTES + 100
KEEP = 2
LEARNER = "a"
MAX_DELIVERIES = 100_000
"""Messages after which a mesh that should have come to rest is going round in circles."""


class Rooms(VersionStore):
    """Version stores that refuse to be asked twice, as those that survive a process do."""

    def __init__(self) -> None:
        self.live: dict[PolicyVersion, bytes | None] = {}
        self.marked: set[PolicyVersion] = set()
        """Versions whose memory is being written in place."""
        self.version_store: dict[PolicyVersion, memoryview] = {}
        self.is_full = False
        self.max_images = sys.maxsize
        self.may_block = False

    def create(self, version: PolicyVersion, signed: bytes | None, num_bytes: int) -> memoryview:
        if self.is_full or len(self.live) >= self.max_images:
            raise StorageError("no space")
        assert version not in self.live
        self.live[version] = signed
        storage = self.version_store[version] = memoryview(bytearray(num_bytes))
        return storage

    def sealed(self, version: PolicyVersion, signed: bytes) -> None:
        if version in self.live:  # else it has become a newer version
            assert self.live[version] is None
            self.live[version] = signed

    def begin_patch(self, patch: Patch) -> None:
        self.marked.add(patch.base)

    def cancel_patch(self, patch: Patch) -> None:
        self.marked.remove(patch.base)

    def advance(self, base: PolicyVersion, version: PolicyVersion) -> None:
        self.marked.remove(base)
        del self.live[base]
        self.live[version] = None
        self.version_store[version] = self.version_store.pop(base)

    def write(self, place: memoryview, data: Frame) -> None:
        place[:] = data

    def drop(self, version: PolicyVersion) -> None:
        self.live.pop(version, None)


def image_of(step: int) -> bytes:
    return weights(step, NET_BYTES)


def pieces_of(step: int, base: int | None, *, is_on_base: bool = False) -> tuple[Piece, ...]:
    """Return the segments of an encoded version, of one block each."""
    return coded(step, base, blocks_per_segment=1, num_bytes=NET_BYTES, is_on_base=is_on_base)


@functools.cache
def right_chunks(version: PolicyVersion, form: Form) -> list[bytes]:
    """Return what each chunk of an item must be as it travels."""
    if form == FULL:
        return sent_chunks(version.step, image_of(version.step))
    base = None if form.base is None else form.base.step
    whole = [bytes(payload) for _, _, payload in pieces_of(version.step, base)]
    return [
        part[start : start + CHUNK_BYTES]
        for part in whole
        for start in range(0, len(part), CHUNK_BYTES)
    ]


class Net:
    """Nodes by name, and links by number; both ends call a link by the same name."""

    def __init__(self, *names: str, slow: Iterable[str] = (), **overrides: Any) -> None:
        """Start nodes; of those that are slow each chunk is written as late as it may be."""
        self.now = 0.0
        self.is_overtaking = False
        """Whether chunks come before all else that is on the same way."""
        self.slow = frozenset(slow)
        self.overrides = {"keep_versions": KEEP} | overrides
        self.nodes: dict[str, Broadcast] = {}
        self.rooms: dict[str, Rooms] = {}
        self.links: dict[str, tuple[str, str]] = {}
        """Link -> (child, parent)."""
        self.queues: dict[tuple[str, str], deque[Any]] = {}
        """(link, receiver) -> what is under way."""
        self.works: list[tuple[str, Work]] = []
        self.failed: list[tuple[str, str]] = []
        self.notes: list[str] = []
        self.arrived: list[tuple[str, PolicyVersion]] = []
        self.installs: list[tuple[str, PolicyVersion]] = []
        """What nodes that have engines are about to write into them."""
        self.audited: list[tuple[str, PolicyVersion]] = []
        self.damaged: list[tuple[str, PolicyVersion]] = []
        self.sent: list[tuple[str, str, Any]] = []
        self.num_refused = 0
        self._serial = itertools.count()
        for name in names:
            self.start(name)

    def start(self, name: str) -> None:
        self.rooms[name] = Rooms()
        self.rooms[name].may_block = name in self.slow
        node = make_broadcast(name, version_store=self.rooms[name], **self.overrides)
        node.trust.set(public_key=PUBLIC_KEY, run_id="run", max_image_bytes=1 << 20)
        self.nodes[name] = node

    def resume(self, name: str, left: Rooms) -> None:
        """Let a node that was started again find what its former process has left."""
        node, rooms = self.nodes[name], self.rooms[name]
        found = [v for v, signed in left.live.items() if signed and v not in left.marked]
        for version in sorted(found, reverse=True)[:KEEP]:
            signed = left.live[version]
            assert signed is not None
            manifest = node.trust.manifest(version, signed)
            storage = left.version_store[version]
            has_chunk = bytearray(
                blake3(storage[slice(*manifest.chunk_range(index))]).digest()
                == manifest.chunk_hash(index)
                for index in range(manifest.num_chunks)
            )
            rooms.live[version], rooms.version_store[version] = signed, storage
            self.perform(name, node.recover(version, signed, storage, has_chunk, now=self.now))

    def stop(self, name: str) -> None:
        """End a node; its parents and children learn of it."""
        del self.nodes[name]
        self.works = [(owner, work) for owner, work in self.works if owner != name]
        self.installs = [each for each in self.installs if each[0] != name]
        for link, (child, parent) in list(self.links.items()):
            if name in (child, parent):
                self.close(link)
                if parent == name and child in self.nodes:
                    self.failed.append((child, link))

    # --- links -----------------------------------------------------------------------------------

    def link(self, child: str) -> str | None:
        return self.nodes[child].receiver.link.peer

    def attach(self, child: str, parent: str, **fields: Any) -> None:
        """Give a node another parent."""
        old = next((link for link, (name, _) in self.links.items() if name == child), None)
        if old is not None:
            self.close(old)
        link = f"{child}-{parent}#{next(self._serial)}"
        self.links[link] = (child, parent)
        self.queues[link, child], self.queues[link, parent] = deque(), deque()
        node = self.nodes[child]
        self.perform(child, node.set_parent(link, now=self.now, **fields))

    def close(self, link: str) -> None:
        child, parent = self.links.pop(link)
        del self.queues[link, child], self.queues[link, parent]
        if parent in self.nodes:
            self.perform(parent, self.nodes[parent].remove_child(link, now=self.now))

    # --- actions ---------------------------------------------------------------------------------

    def perform(self, name: str, actions: Iterable[Any]) -> None:
        for action in actions:
            match action:
                case Send():
                    self._send(name, action)
                case ParentFailed():
                    self.failed.append((name, action.peer))
                case VersionArrived() | VersionAudited() | VersionDamaged():
                    self._note(name, action)
                case Note():
                    self.notes.append(action.text)
                case Work():
                    self.works.append((name, action))
                case _:
                    raise AssertionError(action)

    def _note(self, name: str, action: VersionArrived | VersionAudited | VersionDamaged) -> None:
        version = action.version
        match action:
            case VersionAudited():
                self.audited.append((name, version))
            case VersionDamaged():
                self.damaged.append((name, version))
            case VersionArrived():
                image = self.nodes[name].store.get(version)
                if image is None:
                    self.installs.append((name, version))
                else:
                    assert content(image) == image_of(version.step)
                self.arrived.append((name, version))

    def _send(self, name: str, action: Send) -> None:
        message = message_of(action.frames)
        payload = [bytes(frame) for frame in action.frames[1:]]
        assert action.is_public == isinstance(message, Chunk)
        if isinstance(message, Chunk):
            right = right_chunks(message.version, message.form)
            assert payload == [right[index] for index in (message.index, *message.others)], message
        if isinstance(message, Fetch):
            self._check_fetch(name, message)
        self.sent.append((name, action.peer, message))
        if action.peer in self.links:
            child, parent = self.links[action.peer]
            other = parent if name == child else child
            self.queues[action.peer, other].append((message, payload))

    def _check_fetch(self, name: str, fetch: Fetch) -> None:
        """What is held is not asked for again."""
        node = self.nodes[name]
        item = (
            node.store[fetch.version]
            if fetch.form == FULL
            else node.encoded_versions[fetch.version, fetch.form]
        )
        assert all(not any(item.has_chunk[start:stop]) for start, stop in fetch.ranges)

    def _next(self, way: tuple[str, str]) -> Any:
        """Return what comes next: chunks have a connection of their own, and may be first."""
        queue = self.queues[way]
        chunks = [i for i, (message, _) in enumerate(queue) if isinstance(message, Chunk)]
        place = chunks[0] if chunks and self.is_overtaking else 0
        item = queue[place]
        del queue[place]
        return item

    def deliver(self, way: tuple[str, str], item: Any = None) -> None:
        message, payload = self._next(way) if item is None else item
        link, name = way
        try:
            results = self.nodes[name].receive(link, message, list(payload), now=self.now)
        except RemoteProtocolError:
            self.num_refused += 1
            return
        self.perform(name, results)

    def decode(self, index: int = 0) -> None:
        name, work = self.works.pop(index)
        fault = work.run()
        work = work.work if isinstance(work, Engine) else work
        self.perform(name, self.nodes[name].worked(work, fault, now=self.now))

    def install(self, index: int = 0, fault: str = "") -> None:
        """Let an engine take a version that is ready, in place, or refuse it."""
        name, version = self.installs.pop(index)
        node = self.nodes[name]
        if (work := node.patch_of(version)) is not None:
            self.works.append((name, Engine(work, fault)))

    def busy(self) -> list[tuple[str, str]]:
        return [way for way, queue in self.queues.items() if queue]

    def settle(self) -> None:
        """Deliver and decode everything."""
        num_delivered = 0
        while (ways := self.busy()) or self.works or self.installs:
            for way in ways:
                if self.queues.get(way):
                    self.deliver(way)
                    num_delivered += 1
            while self.works or self.installs:
                self.decode() if self.works else self.install()
            assert num_delivered < MAX_DELIVERIES, "the mesh does not come to rest"

    def wait(self, seconds: float) -> None:
        self.now += seconds
        for name, node in self.nodes.items():
            self.perform(name, node.expire(now=self.now))

    def publish(
        self, step: int, base: int | None = None, *, is_on_base: bool = False
    ) -> list[Callable[[], None]]:
        """Return what publishes a version, one call after the other.

        In full, then encoded; behind the first segment of a delta; or the seal of one on its base.
        """

        def whole() -> None:
            if v(step) not in self.nodes[LEARNER].store:
                actions = self.nodes[LEARNER].publish(*published(step, NET_BYTES), now=self.now)
                self.perform(LEARNER, actions)

        def piece(against: int | None, index: int) -> None:
            segment = pieces_of(step, against, is_on_base=is_on_base)[index]
            size = sum(table.num_bytes for table, _, _ in pieces_of(step, against))
            node = self.nodes[LEARNER]
            actions = node.publish_segment(*segment, expected_bytes=size, now=self.now)
            self.perform(LEARNER, actions)

        def pieces(against: int | None) -> list[Callable[[], None]]:
            number = len(pieces_of(step, against))
            return [functools.partial(piece, against, index) for index in range(number)]

        if base is None:
            return [whole, *pieces(None)]
        first, *rest = pieces(base)
        return [first, *rest, whole] if is_on_base else [first, whole, *rest]

    def holds(self, name: str, step: int) -> bool:
        image = self.nodes[name].store.get(v(step))
        return image is not None and image.is_complete and content(image) == image_of(step)

    def check(self) -> None:
        """What must be so at any time."""
        for name, node in self.nodes.items():
            num_children = len(node.children)
            assert len(node.store) <= KEEP + 3 + num_children, sorted(node.store)
            halves = [item for item, encoded in node.encoded_versions.items() if encoded.is_half]
            assert {item for item in halves if not node.encoded_versions[item].is_ready} <= {
                node.receiver.item
            }
            for version, image in node.store.items():
                if image.is_complete and image.later:
                    assert content(image) == image_of(version.step)
            live = set(self.rooms[name].live)
            assert live <= {*node.store, *(version for version, _ in halves)}
            node.validate()
            writing = node.receiver.link.writing_bytes
            late = [work.data for owner, work in self.works if owner == name and is_write(work)]
            assert 0 <= writing <= sum(map(len, late))


def content(image: Transfer) -> bytes:
    """Return the bytes of a version, as a child would get them."""
    return bytes(image.read(0, image.num_bytes))


class Engine(Work):
    """Writes a version into an engine, which may refuse it; see `Broadcast.patch_of`."""

    def __init__(self, work: ApplyPatch, fault: str) -> None:
        self.work, self.fault = work, fault

    def run(self) -> str:
        if self.fault:
            return self.fault
        return self.work.run()


def is_write(work: Work) -> TypeGuard[WriteChunk]:
    return isinstance(work, WriteChunk)


def run(calls: Iterable[Callable[[], None]]) -> None:
    for call in calls:
        call()
