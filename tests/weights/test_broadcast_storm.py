"""Whatever happens, every live node ends with the newest version, bit for bit.

Random meshes of one to four links per node; versions published as images, deltas and keyframes,
segment by segment; blocks decoded and chunks written late and in any order; messages lost,
repeated, swapped and damaged; links cut, parents changed, nodes ended and restarted.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeGuard

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from echo.core.errors import RemoteProtocolError
from echo.core.rollout import PolicyVersion
from echo.weights.broadcast import Broadcast
from echo.weights.link import ParentFailed
from echo.weights.receiver import VersionArrived, WriteChunk
from echo.weights.store import DecodeBlock
from echo.wire.actions import Note, Send, Work
from echo.wire.messages import FULL, Chunk, Fetch, Form, Gone, Segment
from tests.roles.harness import CHUNK_BYTES, PUBLIC_KEY, make_broadcast, message_of
from tests.weights.encoded_versions import Piece, coded, described, published, v, weights
from tests.weights.test_store import Rooms

IMAGE_BYTES = 13 * CHUNK_BYTES + 100
KEEP = 2
LEARNER = "a"
MAX_DELIVERIES = 100_000
"""Messages after which a mesh that should have come to rest is going round in circles."""


def image_of(step: int) -> bytes:
    return weights(step, IMAGE_BYTES)


def pieces_of(step: int, base: int | None) -> tuple[Piece, ...]:
    """Return the segments of an encoded version, of one block each."""
    return coded(step, base, blocks_per_segment=1, num_bytes=IMAGE_BYTES)


@functools.cache
def right_chunks(version: PolicyVersion, form: Form) -> list[bytes]:
    """Return what each chunk of an item must be."""
    if form == FULL:
        whole = [image_of(version.step)]
    else:
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
        self.slow = frozenset(slow)
        self.overrides = {"keep_versions": KEEP} | overrides
        self.nodes: dict[str, Broadcast] = {}
        self.rooms: dict[str, Rooms] = {}
        self.links: dict[str, tuple[str, str, int]] = {}
        """Link -> (child, parent, index)."""
        self.queues: dict[tuple[str, str], deque[Any]] = {}
        """(link, receiver) -> what is under way."""
        self.works: list[tuple[str, Work]] = []
        self.failed: list[tuple[str, str]] = []
        self.arrived: list[tuple[str, PolicyVersion]] = []
        self.sent: list[tuple[str, str, Any]] = []
        self.num_refused = 0
        self._serial = itertools.count()
        for name in names:
            self.start(name)

    def start(self, name: str) -> None:
        self.rooms[name] = Rooms()
        self.rooms[name].may_block = name in self.slow
        node = make_broadcast(name, version_store=self.rooms[name], **self.overrides)
        node.trust(public_key=PUBLIC_KEY, run_id="run", max_image_bytes=1 << 20)
        self.nodes[name] = node

    def resume(self, name: str, left: Rooms, chance: random.Random) -> None:
        """Let a node that was started anew find what its former process has left, torn a bit."""
        node, rooms = self.nodes[name], self.rooms[name]
        whole = [version for version, signed in left.live.items() if signed is not None]
        for version in sorted(whole, reverse=True)[:KEEP]:
            signed = left.live[version]
            assert signed is not None
            manifest = node.manifest(version, signed)
            storage = left.version_store[version]
            has_chunk = bytearray(
                blake3(storage[slice(*manifest.chunk_range(index))]).digest()
                == manifest.chunk_hash(index)
                for index in range(manifest.num_chunks)
            )
            rooms.live[version], rooms.version_store[version] = signed, storage
            self.perform(name, node.recover(version, signed, storage, has_chunk, now=self.now))
        for version, journal in sorted(
            left.journals.items(), reverse=True, key=lambda each: each[0]
        ):
            if journal.is_removed:
                continue
            records = journal.records
            if chance.random() < 0.3:
                del records[chance.randrange(len(records) + 1) :]
            if records and chance.random() < 0.3:
                place = chance.randrange(len(records))
                records[place] = (records[place][0], bytes(reversed(records[place][1])))
            encoded = node.rebuild(version, records)
            encoded.journal = rooms.journals[version] = journal
            self.perform(name, node.resume(encoded, now=self.now))

    def stop(self, name: str) -> None:
        """End a node; its parents and children learn of it."""
        del self.nodes[name]
        self.works = [(owner, work) for owner, work in self.works if owner != name]
        for link, (child, parent, _) in list(self.links.items()):
            if name in (child, parent):
                self.close(link)
                if parent == name and child in self.nodes:
                    self.failed.append((child, link))

    # --- links -----------------------------------------------------------------------------------

    def link(self, child: str, index: int) -> str | None:
        return self.nodes[child].receiver.links[index].peer

    def attach(self, child: str, parent: str, index: int = 0, **fields: Any) -> None:
        """Give a link of a node another parent."""
        old = next((k for k, (c, _, n) in self.links.items() if (c, n) == (child, index)), None)
        if old is not None:
            self.close(old)
        link = f"{child}{index}-{parent}#{next(self._serial)}"
        self.links[link] = (child, parent, index)
        self.queues[link, child], self.queues[link, parent] = deque(), deque()
        node = self.nodes[child]
        self.perform(child, node.set_parent(link, link=index, now=self.now, **fields))

    def close(self, link: str) -> None:
        child, parent, _ = self.links.pop(link)
        del self.queues[link, child], self.queues[link, parent]
        if parent in self.nodes:
            self.perform(parent, self.nodes[parent].remove_child(link, now=self.now))

    def set_num_links(self, child: str, parents: list[str]) -> None:
        """Give a node as many links as it has parents now."""
        self.perform(child, self.nodes[child].set_num_links(len(parents), now=self.now))
        for link, (name, _, index) in list(self.links.items()):
            if name == child and index >= len(parents):
                self.close(link)
        for index, parent in enumerate(parents):
            self.attach(child, parent, index)

    # --- actions ---------------------------------------------------------------------------------

    def perform(self, name: str, actions: Iterable[Any]) -> None:
        for action in actions:
            match action:
                case Send():
                    self._send(name, action)
                case ParentFailed():
                    self.failed.append((name, action.peer))
                case VersionArrived():
                    image = self.nodes[name].store[action.version]
                    assert bytes(image.storage) == image_of(action.version.step)
                    self.arrived.append((name, action.version))
                case Note():
                    pass
                case Work():
                    self.works.append((name, action))
                case _:
                    raise AssertionError(action)

    def _send(self, name: str, action: Send) -> None:
        message = message_of(action.frames)
        payload = [bytes(frame) for frame in action.frames[1:]]
        if isinstance(message, Chunk):
            right = right_chunks(message.version, message.form)[message.index]
            assert payload == [right], f"{name} sent chunk {message.index} of {message.version}"
        if isinstance(message, Fetch):
            self._check_fetch(name, message)
        self.sent.append((name, action.peer, message))
        if action.peer in self.links:
            child, parent, _ = self.links[action.peer]
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
        held = item.has_chunk[fetch.link :: fetch.num_links]
        assert all(not any(held[start:stop]) for start, stop in fetch.ranges)

    def deliver(self, way: tuple[str, str], item: Any = None) -> None:
        message, payload = self.queues[way].popleft() if item is None else item
        link, name = way
        try:
            results = self.nodes[name].receive(link, message, list(payload), now=self.now)
        except RemoteProtocolError:
            self.num_refused += 1
            return
        self.perform(name, results)

    def decode(self, index: int = 0) -> None:
        name, work = self.works.pop(index)
        self.perform(name, self.nodes[name].worked(work, work.run(), now=self.now))

    def busy(self) -> list[tuple[str, str]]:
        return [way for way, queue in self.queues.items() if queue]

    def settle(self) -> None:
        """Deliver and decode everything."""
        num_delivered = 0
        while (ways := self.busy()) or self.works:
            for way in ways:
                if self.queues.get(way):
                    self.deliver(way)
                    num_delivered += 1
            while self.works:
                self.decode()
            assert num_delivered < MAX_DELIVERIES, "the mesh does not come to rest"

    def wait(self, seconds: float) -> None:
        self.now += seconds
        for name, node in self.nodes.items():
            self.perform(name, node.expire(now=self.now))

    def publish(self, step: int, base: int | None = None) -> list[Callable[[], None]]:
        """Return what publishes a version, one call after the other: full, then encoded."""

        def whole() -> None:
            if v(step) not in self.nodes[LEARNER].store:
                actions = self.nodes[LEARNER].publish(*published(step, IMAGE_BYTES), now=self.now)
                self.perform(LEARNER, actions)

        def piece(against: int | None, index: int) -> None:
            segment = pieces_of(step, against)[index]
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
        return [first, whole, *rest]

    def holds(self, name: str, step: int) -> bool:
        image = self.nodes[name].store.get(v(step))
        return image is not None and image.is_complete and bytes(image.storage) == image_of(step)

    def check(self) -> None:
        """What must be so at any time."""
        for name, node in self.nodes.items():
            num_children = len(node.children)
            assert len(node.store) <= KEEP + 2 + num_children, sorted(node.store)
            halves = [item for item, encoded in node.encoded_versions.items() if encoded.is_half]
            assert set(halves) <= {node.receiver.item}
            live = set(self.rooms[name].live)
            assert live <= {*node.store, *(version for version, _ in halves)}
            if name != LEARNER:
                journals = self.rooms[name].journals
                kept = {version for version, each in journals.items() if not each.is_removed}
                assert kept == {
                    version for version, form in node.encoded_versions if form.base is None
                }
            item = node.receiver.item
            assert item is None or node.receiver.store.get(item) is not None
            writing = sum(link.writing_bytes for link in node.receiver.links)
            late = [work.data for owner, work in self.works if owner == name and is_write(work)]
            assert 0 <= writing <= sum(map(len, late))
            for child in node.children.values():
                assert child.fetching is None or node.receiver.store.get(child.fetching) is not None


def is_write(work: Work) -> TypeGuard[WriteChunk]:
    return isinstance(work, WriteChunk)


class Storm:
    """Random events; a node has parents with earlier names only."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.names = ["a", "b", "c", "d", "e"]
        window = chance.choice([1, 2048, 10_000])
        slow = chance.sample(self.names, chance.choice([0, 0, 1, 3]))
        self.net = Net(*self.names, slow=slow, window_bytes=window)
        self.step = -1
        self.coding: deque[Callable[[], None]] = deque()
        self.has_spares = chance.random() < 0.4
        for name in self.names[1:]:
            self.divide(name)

    def parent(self, name: str) -> str:
        return self.chance.choice(self.names[: self.names.index(name)])

    def divide(self, name: str) -> None:
        num_links = self.chance.choice([1, 1, 2, 3, 4])
        self.net.set_num_links(name, [self.parent(name) for _ in range(num_links)])
        self.ready_spares(name)

    def ready_spares(self, name: str) -> None:
        for index in range(len(self.net.nodes[name].receiver.links)):
            self.net.nodes[name].set_spare(index, is_ready=self.has_spares)

    def heed_failures(self) -> None:
        failed, self.net.failed = self.net.failed, []
        for name, link in failed:
            if name not in self.names:
                continue
            for index in range(len(self.net.nodes[name].receiver.links)):
                current = self.net.link(name, index)
                if current in (None, link):
                    rtt_s = self.chance.choice([None, 0.01])
                    self.net.attach(name, self.parent(name), index, rtt_s=rtt_s)
            self.ready_spares(name)

    def publish(self) -> None:
        self.code_all()
        self.step += 1
        kind = self.chance.choice(["full", "delta", "delta", "both", "keyframe"])
        step, net = self.step, self.net
        if kind == "full" or step == 0:
            self.coding.extend(net.publish(step)[:1])
        elif kind == "keyframe":
            self.coding.extend(net.publish(step))
        else:
            self.coding.extend(net.publish(step, step - 1))
            if kind == "both":
                self.coding.extend(net.publish(step)[1:])
        self.coding.popleft()()

    def code_all(self) -> None:
        while self.coding:
            self.coding.popleft()()

    def event(self) -> None:
        net, chance = self.net, self.chance
        events = {
            "deliver": 100, "decode": 20, "code": 8, "lose": 2, "repeat": 2, "swap": 2,
            "corrupt": 1, "wait": 6, "publish": 3, "move": 2, "divide": 1, "cut": 1, "die": 0.2,
            "restart": 0.5,
        }  # fmt: skip
        kind = chance.choices(list(events), list(events.values()))[0]
        ways = net.busy()
        name = chance.choice(self.names[1:])
        match kind:
            case "wait":
                net.wait(chance.choice([0.1, 0.25, 0.5, 3.0, 6.0]))
            case "publish" if self.step < 12:
                self.publish()
            case "code" if self.coding:
                self.coding.popleft()()
            case "decode" if net.works:
                net.decode(chance.randrange(len(net.works)))
            case "move":
                index = chance.randrange(len(net.nodes[name].receiver.links))
                net.attach(name, self.parent(name), index)
                self.ready_spares(name)
            case "divide":
                self.divide(name)
            case "die" if len(self.names) > 3:
                self.names.remove(name)
                net.stop(name)
            case "restart":
                self.restart(name)
            case _ if ways:
                self.trouble(kind, chance.choice(ways))
        self.heed_failures()

    def restart(self, name: str) -> None:
        left = self.net.rooms[name]
        self.net.stop(name)
        self.net.start(name)
        if self.chance.random() < 0.7:
            self.net.resume(name, left, self.chance)
        self.divide(name)

    def trouble(self, kind: str, way: tuple[str, str]) -> None:
        net = self.net
        queue = net.queues[way]
        message, payload = queue[0]
        match kind:
            case "lose":
                queue.popleft()
            case "repeat":
                net.deliver(way, (message, payload))
            case "swap":
                queue.rotate(1)
            case "cut":
                queue.clear()
            case "corrupt" if payload:
                queue[0] = (message, [bytes(reversed(payload[0]))])
            case _:
                for _ in range(self.chance.randrange(1, 10)):
                    if net.queues.get(way):
                        net.deliver(way)


def weather(seed: int, num_events: int) -> None:
    storm = Storm(random.Random(seed))
    net = storm.net
    storm.publish()
    for _ in range(num_events):
        storm.event()
        net.check()
    # The weather clears: nothing is lost any more, and the learner's Pulse makes nodes ask.
    storm.code_all()
    for round_ in range(100):
        storm.heed_failures()
        net.settle()
        # Last, as long as two silences of somebody whom all parents have failed before.
        net.wait(0.3 if round_ < 95 else 10.0)
        for name in storm.names[1:]:
            net.perform(name, net.nodes[name].resubscribe(now=net.now))
    net.settle()
    net.check()
    for name in storm.names:
        assert net.holds(name, storm.step), f"{name}: {describe(net, name)}"
        assert net.nodes[name].receiver.item is None
        assert len(net.nodes[name].store) <= KEEP + 1
        assert not any(image.writing for image in net.nodes[name].store.values())
    assert not net.works
    assert not net.failed


def describe(net: Net, name: str) -> str:
    node = net.nodes[name]
    links = [(link.peer, link.is_pulling, link.is_denied) for link in node.receiver.links]
    return f"fetches {node.receiver.item}, {node.progress()}, {sorted(node.store)}, {links}"


@pytest.mark.slow
@given(st.integers(0, 2**32))
def test_in_any_weather_all_live_nodes_end_with_the_newest_version(seed: int) -> None:
    weather(seed, 500)


# --- what the weather has shown, one by one -------------------------------------------------------


def run(calls: Iterable[Callable[[], None]]) -> None:
    for call in calls:
        call()


def test_where_a_parent_has_not_the_form_the_others_send_it_all() -> None:
    net = Net("a", "b", "c", "d")
    for name in "bcd":
        net.attach(name, "a")
    run(net.publish(0)[:1])
    net.settle()
    net.stop("c")
    net.start("c")  # it has nothing, and so takes v1 in full
    net.attach("c", "a")
    run(net.publish(1, 0))
    while net.busy() or net.works:
        for way in net.busy():
            if not way[0].startswith("d"):
                net.deliver(way)
            else:
                net.queues[way].clear()
        while net.works:
            net.decode()
        assert net.now == 0.0
    net.attach("b", "a")
    net.settle()
    assert (v(1), Form("delta", v(0))) not in net.nodes["c"].encoded_versions
    net.failed.clear()
    net.nodes["c"].receiver.store.encoded_versions.clear()
    net.set_num_links("d", ["a", "c"])
    net.settle()
    assert net.holds("d", 1)
    fetched = {m.form.kind for name, _, m in net.sent if name == "d" and isinstance(m, Fetch)}
    assert fetched == {"full", "delta"}
    assert not net.failed


def test_what_a_lost_parent_had_offered_is_not_asked_of_others() -> None:
    net = Net("a", "b", "c")
    net.attach("c", "a")
    run(net.publish(0)[:1])
    net.settle()
    net.attach("b", "a")
    first, whole, *rest = net.publish(1, 0)
    run([first])
    way = (net.link("c", 0) or "", "c")
    net.deliver(way)  # the announcement of the delta, and no more
    net.queues[way].clear()
    for _ in range(2):
        net.wait(0.5)
        net.queues[way].clear()
    assert ("c", way[0]) in net.failed
    net.nodes["b"].receiver.store.encoded_versions.clear()
    run([whole, *rest])
    net.nodes[LEARNER].receiver.store.encoded_versions.clear()
    net.attach("c", LEARNER)
    net.settle()
    assert net.holds("c", 1)
    assert len([m for _, _, m in net.sent if isinstance(m, Gone)]) <= 1


def test_a_block_of_an_encoded_that_was_dropped_counts_for_no_other() -> None:
    net = Net("a", "b")
    net.attach("b", "a")
    run(net.publish(0)[:1])
    net.settle()
    [first, _, *rest] = net.publish(1, 0)
    run([first, *rest])
    while not net.works:
        net.deliver(net.busy()[0])
    _, stale = net.works[0]
    item = (stale.version, stale.form)
    link = net.link("b", 0) or ""
    net.deliver((link, "b"), (Gone(version=stale.version, form=stale.form), []))
    assert item not in net.nodes["b"].encoded_versions
    net.perform("b", net.nodes["b"].resubscribe(now=0.0))
    while net.busy():
        net.deliver(net.busy()[0])
    assert item in net.nodes["b"].encoded_versions
    encoded = net.nodes["b"].encoded_versions[item]
    mine = [
        work for _, work in net.works if isinstance(work, DecodeBlock) and work.encoded is encoded
    ]
    assert len(mine) == len(pieces_of(1, 0))
    for work in mine[1:]:
        net.perform("b", net.nodes["b"].worked(work, work.run(), now=0.0))
    net.perform("b", net.nodes["b"].worked(stale, stale.run(), now=0.0))
    assert v(1) not in net.nodes["b"].store
    net.perform("b", net.nodes["b"].worked(mine[0], mine[0].run(), now=0.0))
    assert net.holds("b", 1)


def test_a_block_that_does_not_decode_has_the_version_fetched_in_another_form() -> None:
    net = Net("a", "b")
    net.attach("b", "a")
    run(net.publish(0)[:1])
    net.settle()
    run(net.publish(1, 0))
    while not net.works:
        net.deliver(net.busy()[0])
    _, work = net.works.pop(0)
    net.perform("b", net.nodes["b"].worked(work, "it is wrong", now=0.0))
    net.settle()
    assert net.holds("b", 1)
    assert (v(1), work.form) not in net.nodes["b"].encoded_versions
    assert net.nodes["b"].deadline is None


def test_an_image_that_lies_here_ends_the_fetch_of_its_encoded() -> None:
    net = Net("a", "b")
    node = net.nodes["b"]
    node.offer(bytearray(image_of(0)), described(0, IMAGE_BYTES)[1].image_hash)
    whole, *pieces = net.publish(0)
    run(pieces)
    net.attach("b", "a")
    for _ in range(6):
        net.deliver(net.busy()[0])
    assert node.receiver.item == (v(0), Form("keyframe"))
    run([whole])
    net.settle()
    assert node.receiver.item is None
    assert net.holds("b", 0)
    run(net.publish(1)[:1])
    net.settle()
    assert net.holds("b", 1)


def test_a_link_whose_last_table_came_over_another_is_not_blamed() -> None:
    net = Net("a", "b")
    num_links = 2 * sum(table.num_chunks for table, _, _ in pieces_of(1, 0))
    net.set_num_links("b", ["a"] * num_links)
    run(net.publish(0)[:1])
    net.settle()
    for index in range(num_links):
        net.nodes["b"].set_spare(index, is_ready=True)
    run(net.publish(1, 0)[:1] + net.publish(1, 0)[2:])
    while net.busy():
        net.deliver(net.busy()[0])  # and nothing is decoded
    for _ in range(10):
        net.wait(0.6)
        while net.busy():
            net.deliver(net.busy()[0])
    assert not net.failed
    net.settle()
    assert net.holds("b", 1)


def test_a_delta_on_a_base_of_another_size_is_refused() -> None:
    net = Net("a", "b")
    net.attach("b", "a")
    run(net.publish(0)[:1])
    net.settle()
    run(net.publish(1, 0)[:2])
    link = net.link("b", 0) or ""
    node = net.nodes["b"]
    while not node.encoded_versions:
        net.deliver((link, "b") if net.queues[link, "b"] else (link, "a"))
    net.queues[link, "b"].clear()
    table, frame, _ = coded(1, 0, num_bytes=IMAGE_BYTES + CHUNK_BYTES)[0]
    message = Segment(version=v(1), form=Form("delta", v(0)), index=0)
    net.deliver((link, "b"), (message, [frame]))
    assert not node.encoded_versions
    net.perform("b", node.resubscribe(now=0.0))
    net.settle()
    assert table.image_bytes != IMAGE_BYTES
    assert net.holds("b", 1)


def test_junk_instead_of_a_table_is_no_sign_of_life() -> None:
    net = Net("a", "b")
    net.attach("b", "a")
    run(net.publish(0)[:1])
    net.settle()
    run(net.publish(1, 0)[:1])
    link = net.link("b", 0) or ""
    net.deliver((link, "b"))
    message = Segment(version=v(1), form=Form("delta", v(0)), index=0)
    for _ in range(2):
        net.queues[link, "b"].clear()
        net.deliver((link, "b"), (message, [b"junk"]))
        net.wait(0.5)
    assert net.num_refused == 2
    assert net.failed == [("b", link)]
