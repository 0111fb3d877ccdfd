"""Whatever happens, every live node ends with the newest version, bit for bit.

Random trees; nodes with space for two images or more; versions published as images, deltas and
keyframes, segment by segment; blocks decoded and chunks written late and in any order; messages
lost, repeated, swapped and damaged; links cut, parents changed, nodes ended and restarted.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo.weights.store.encoded import DecodeBlock
from echo.weights.store.patches import PatchMode
from echo.wire.messages import Fetch, Form, Gone, Segment
from tests.roles.harness import CHUNK_BYTES
from tests.weights.encoded_versions import coded, described, v
from tests.weights.net import KEEP, LEARNER, NET_BYTES, Net, image_of, pieces_of, run


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
        self.modes: list[PatchMode] = ["copy", "now", "on_install"]
        self.max_images = chance.choice([2, 3, 4, 99])
        for name in self.names[1:]:
            self.fit_out(name)
            self.move(name)
        self.net.is_overtaking = chance.random() < 0.5

    def fit_out(self, name: str) -> None:
        self.net.nodes[name].patch_mode = self.chance.choice(self.modes)
        self.net.rooms[name].max_images = self.max_images

    def parent(self, name: str) -> str:
        return self.chance.choice(self.names[: self.names.index(name)])

    def move(self, name: str, **fields: object) -> None:
        self.net.attach(name, self.parent(name), **fields)
        self.net.nodes[name].receiver.link.has_spare = self.has_spares

    def heed_failures(self) -> None:
        failed, self.net.failed = self.net.failed, []
        for name, link in failed:
            if name in self.names and self.net.link(name) in (None, link):
                self.move(name, rtt_s=self.chance.choice([None, 0.01]))

    def publish(self) -> None:
        self.code_all()
        self.step += 1
        kind = self.chance.choice(["full", "delta", "on_base", "on_base", "both", "keyframe"])
        step, net = self.step, self.net
        if kind == "full" or step == 0:
            self.coding.extend(net.publish(step)[:1])
        elif kind == "keyframe":
            self.coding.extend(net.publish(step))
        else:
            self.coding.extend(net.publish(step, step - 1, is_on_base=kind == "on_base"))
            if kind == "both":
                self.coding.extend(net.publish(step)[1:])
        self.coding.popleft()()

    def code_all(self) -> None:
        while self.coding:
            self.coding.popleft()()

    def event(self) -> None:
        net, chance = self.net, self.chance
        events = {
            "deliver": 100, "work": 25, "code": 8, "lose": 2, "repeat": 2, "swap": 2, "corrupt": 1,
            "wait": 6, "publish": 3, "move": 3, "cut": 1, "die": 0.2, "restart": 0.5,
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
            case "work":
                self.work()
            case "move":
                self.move(name)
            case "die" if len(self.names) > 3:
                self.names.remove(name)
                net.stop(name)
            case "restart":
                self.restart(name)
            case _ if ways:
                self.trouble(kind, chance.choice(ways))
        self.heed_failures()

    def work(self) -> None:
        """Let a thread do a piece of its work, or an engine take a version or refuse it."""
        net, chance = self.net, self.chance
        if net.installs and chance.random() < 0.2:
            fault = chance.choice(["", "", "", "the engine refuses it"])
            net.install(chance.randrange(len(net.installs)), fault)
        elif net.works:
            net.decode(chance.randrange(len(net.works)))

    def restart(self, name: str) -> None:
        left = self.net.rooms[name]
        self.net.stop(name)
        self.net.start(name)
        self.fit_out(name)
        if self.chance.random() < 0.7:
            self.net.resume(name, left)
        self.move(name)

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
    for round_ in range(110):
        storm.heed_failures()
        net.settle()
        # Last, as long as two silences of somebody whom all parents have failed before, and as the
        # longest pause before another search for space.
        net.wait(0.3 if round_ < 95 else 10.0)
        for name in storm.names[1:]:
            net.perform(name, net.nodes[name].receiver.requests.subscribe(now=net.now))
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
    link = node.receiver.link
    state = f"{link.state} from {link.peer}"
    return f"fetches {node.receiver.item}, {node.progress()}, {sorted(node.store)}, {state}"


@pytest.mark.slow
@given(st.integers(0, 2**32))
def test_in_any_weather_all_live_nodes_end_with_the_newest_version(seed: int) -> None:
    weather(seed, 500)


# --- what the weather has shown, one by one -------------------------------------------------------


def test_where_another_parent_has_not_the_form_the_version_comes_in_another() -> None:
    net = Net("a", "c", "d")
    net.attach("d", "a")
    run(net.publish(0)[:1])
    net.settle()
    first, whole, *rest = net.publish(1, 0)
    run([first])
    while net.nodes["d"].receiver.item is None:
        net.deliver(net.busy()[0])
    run([whole, *rest])
    net.attach("c", "a")  # it has no base, and so takes v1 in full
    while ways := [way for way in net.busy() if way[0].startswith("c")]:
        net.deliver(ways[0])
    assert net.holds("c", 1)
    assert not net.nodes["c"].encoded_versions
    net.attach("d", "c")
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
    way = (net.link("c") or "", "c")
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
    assert isinstance(stale, DecodeBlock)
    item = (stale.version, stale.form)
    link = net.link("b") or ""
    net.deliver((link, "b"), (Gone(version=stale.version, form=stale.form), []))
    assert item not in net.nodes["b"].encoded_versions
    net.perform("b", net.nodes["b"].receiver.requests.subscribe(now=0.0))
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
    assert isinstance(work, DecodeBlock)
    net.perform("b", net.nodes["b"].worked(work, "it is wrong", now=0.0))
    net.settle()
    assert net.holds("b", 1)
    assert (v(1), work.form) not in net.nodes["b"].encoded_versions
    net.perform("b", net.nodes["b"].expire(now=0.0))  # the base is looked at: it may be wrong
    net.settle()
    assert net.nodes["b"].deadline is None


def test_an_image_that_lies_here_ends_the_fetch_of_its_encoded() -> None:
    net = Net("a", "b")
    node = net.nodes["b"]
    node.offer(bytearray(image_of(0)), described(0, NET_BYTES)[1].image_hash)
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


def test_a_delta_on_a_base_of_another_size_is_refused() -> None:
    net = Net("a", "b")
    net.attach("b", "a")
    run(net.publish(0)[:1])
    net.settle()
    run(net.publish(1, 0)[:2])
    link = net.link("b") or ""
    node = net.nodes["b"]
    while not node.encoded_versions:
        net.deliver((link, "b") if net.queues[link, "b"] else (link, "a"))
    net.queues[link, "b"].clear()
    table, frame, _ = coded(1, 0, num_bytes=NET_BYTES + CHUNK_BYTES)[0]
    message = Segment(version=v(1), form=Form("delta", v(0)), index=0)
    net.deliver((link, "b"), (message, [frame]))
    assert not node.encoded_versions
    net.perform("b", node.receiver.requests.subscribe(now=0.0))
    net.settle()
    assert table.image_bytes != NET_BYTES
    assert net.holds("b", 1)


def test_junk_instead_of_a_table_is_no_sign_of_life() -> None:
    net = Net("a", "b")
    net.attach("b", "a")
    run(net.publish(0)[:1])
    net.settle()
    run(net.publish(1, 0)[:1])
    link = net.link("b") or ""
    net.deliver((link, "b"))
    message = Segment(version=v(1), form=Form("delta", v(0)), index=0)
    for _ in range(2):
        net.queues[link, "b"].clear()
        net.deliver((link, "b"), (message, [b"junk"]))
        net.wait(0.5)
    assert net.num_refused == 2
    assert net.failed == [("b", link)]
