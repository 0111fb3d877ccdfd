"""The receiver: the next item, its parent, how it is written, and what is done without space."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest

from echo.core.rollout import PolicyVersion
from echo.weights import link as links
from echo.weights.link import MAX_BAD_CHUNKS, ParentFailed
from echo.weights.manifest import encode_signed
from echo.weights.offers import MAX_REFUSED, Offers
from echo.weights.receiver import FIRST_PAUSE_S, MAX_PAUSE_S, RELEASE_PAUSE_S
from echo.weights.store.items import Transfer
from echo.weights.store.store import ItemStore
from echo.weights.store.writing import WRONG_HASH, WriteChunk
from echo.weights.watchdog import WAIT_STALLS
from echo.wire.actions import Send
from echo.wire.codec import Frame
from echo.wire.messages import (
    FULL,
    Announce,
    Chunk,
    Credit,
    EncodedVersionOffer,
    Fetch,
    Form,
    ItemId,
    Message,
    Segment,
    Waiting,
)
from tests.roles.harness import CHUNK_BYTES, PUBLIC_KEY, make_broadcast, message_of
from tests.weights.encoded_versions import (
    IMAGE_BYTES,
    described,
    encoded_of,
    form_on,
    published,
    v,
    weights,
)
from tests.weights.net import NET_BYTES, Net, Rooms, image_of, pieces_of, right_chunks, run

ANCHOR = Form("keyframe")


def knowing(*held: int) -> Offers:
    """Return what a node without offers knows, which holds some versions whole."""
    store = ItemStore(keep_versions=9)
    for step in held:
        signed, manifest = described(step)
        has_chunk = bytearray(b"\1") * manifest.num_chunks
        image = memoryview(weights(step))
        store.images[v(step)] = Transfer(signed, manifest, image, has_chunk, len(has_chunk))
    return Offers(store)


def announce(
    offers: Offers,
    *encoded_versions: tuple[int, int | None, int],
    full: int | None = None,
) -> None:
    """Announce encoded versions (step, step of the base, bytes), and one image."""
    message = Announce(
        version=v(max([full or 0, *(step for step, _, _ in encoded_versions)])),
        offers=tuple(
            EncodedVersionOffer(v(step), None if base is None else v(base), size)
            for step, base, size in encoded_versions
        ),
    )
    offers.replace(message, None if full is None else described(full)[1])


def begin_image(offers: Offers, step: int, *, share: float) -> ItemId:
    """Let a share of an image be held; return it as what is being fetched."""
    offers.store.begin_image(*described(step))
    image = offers.store.images[v(step)]
    for index in range(int(share * image.num_chunks)):
        image.mark(index)
    return v(step), FULL


@pytest.mark.parametrize(
    ("held", "encoded_versions", "full", "step"),
    [
        ((), [], 3, (v(3), FULL)),
        ((), [(3, None, 100)], 3, (v(3), ANCHOR)),
        ((2,), [(3, 2, 10), (3, None, 100)], 3, (v(3), form_on(2))),
        ((1,), [(3, 2, 10), (2, 1, 10), (3, None, 100)], 3, (v(2), form_on(1))),
        ((1,), [(3, 2, 10), (2, 1, 10), (3, 1, 15)], 3, (v(3), form_on(1))),
        ((), [(3, 2, 10), (2, None, 80), (3, None, 100)], 3, (v(2), ANCHOR)),
        ((1,), [(3, 2, 10)], 3, (v(3), FULL)),
        ((3,), [(3, 2, 10)], 3, None),
        ((4,), [(3, 2, 10)], 3, None),
    ],
)
def test_the_first_step_of_the_cheapest_path(
    held: tuple[int, ...], encoded_versions: Any, full: int | None, step: ItemId | None
) -> None:
    offers = knowing(*held)
    announce(offers, *encoded_versions, full=full)
    assert offers.next_step(None) == step


def test_what_a_parent_has_no_more_is_not_fetched() -> None:
    offers = knowing(1)
    announce(offers, (2, 1, 10))
    announce(offers, (3, 2, 10), (2, 1, 10))
    assert offers.next_step(None) == (v(2), form_on(1))
    offers.withdraw((v(2), form_on(1)))
    offers.withdraw((v(2), form_on(1)))
    assert offers.next_step(None) is None
    announce(offers, (2, 1, 10))
    assert offers.newest == v(2)
    offers.clear()
    assert offers.next_step(None) is None


def test_the_newest_that_can_be_reached_is_the_target() -> None:
    offers = knowing(1)
    announce(offers, (2, 1, 10), (9, 8, 10), (4, 3, 10))
    assert offers.newest == v(9)
    assert offers.next_step(None) == (v(2), form_on(1))


@pytest.mark.parametrize(
    "encoded_versions",
    [
        [(5, 5, 1)],
        [(5, 6, 1), (6, 5, 1)],
        [(5, 9, -3)],
        [(0, None, 1)],
        [(2, 1, 1), (4, 2, 1)],
    ],
)
def test_circles_and_ways_back_lead_nowhere(encoded_versions: Any) -> None:
    """A step below the newest version that is held would be taken again and again."""
    offers = knowing(3)
    announce(offers, *encoded_versions)
    assert offers.next_step(None) is None
    assert offers.next_step((v(3), ANCHOR)) == (v(3), ANCHOR)


def test_no_way_leads_over_an_image_that_is_too_old() -> None:
    """Its manifest has been forgotten."""
    offers = knowing(3)
    announce(offers, (5, 2, 10), full=2)
    assert offers.next_step(None) is None


def test_what_was_refused_is_not_tried_again() -> None:
    offers = knowing(1)
    announce(offers, (2, 1, 10), full=2)
    offers.refuse((v(2), form_on(1)))
    assert offers.next_step(None) == (v(2), FULL)
    for step in range(MAX_REFUSED):
        offers.refuse((v(step), ANCHOR))
    assert offers.next_step(None) == (v(2), form_on(1))


def test_what_is_held_of_an_item_costs_nothing() -> None:
    offers = knowing()
    announce(offers, (1, None, IMAGE_BYTES // 2), full=1)
    assert offers.next_step(None) == (v(1), ANCHOR)
    begin_image(offers, 1, share=0.75)
    assert offers.next_step(None) == (v(1), FULL)


# --- pre-emption ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("share", "is_left"), [(0.0, True), (0.45, True), (0.55, False)])
def test_a_newer_image_pre_empts_one_of_which_less_than_half_has_come(
    share: float, is_left: bool
) -> None:
    offers = knowing()
    announce(offers, full=1)
    current = begin_image(offers, 1, share=share)
    announce(offers, full=2)
    assert offers.next_step(current) == ((v(2), FULL) if is_left else current)
    assert offers.has_preempted == is_left


def test_but_not_twice_in_a_row() -> None:
    offers = knowing()
    current = begin_image(offers, 1, share=0.1)
    announce(offers, full=2)
    offers.has_preempted = True
    assert offers.next_step(current) == current


def test_and_not_where_going_on_is_cheaper() -> None:
    offers = knowing()
    current = begin_image(offers, 1, share=0.4)
    announce(offers, (2, 1, IMAGE_BYTES // 10), full=2)
    # 0.6 of an image and a tenth, against a whole one.
    assert offers.next_step(current) == current
    announce(offers, (2, 1, IMAGE_BYTES // 2), full=2)
    assert offers.next_step(current) == (v(2), FULL)


def test_what_is_not_here_any_more_may_always_be_left() -> None:
    offers = knowing()
    announce(offers, full=2)
    offers.has_preempted = True
    assert offers.next_step((v(1), FULL)) == (v(2), FULL)


def test_an_encoded_that_is_half_here_is_finished() -> None:
    offers = knowing(1)
    encoded = offers.store.encoded_versions[v(2), form_on(1)] = encoded_of(2, 1, num_pieces=1)
    encoded.expected_bytes = 10_000
    announce(offers, (2, 1, 10_000), (3, 2, 10), (3, 1, 10))
    assert offers.next_step((v(2), form_on(1))) == (v(2), form_on(1))


# --- written late ---------------------------------------------------------------------------------

WINDOW_CHUNKS = 4
NUM_CHUNKS = -(-NET_BYTES // CHUNK_BYTES)


class SlowNet(Net):
    """A mesh with a node `b` whose chunks wait to be written; failures are kept."""

    def __init__(self, *names: str, **overrides: Any) -> None:
        self.failures: list[ParentFailed] = []
        window = {"window_bytes": WINDOW_CHUNKS * CHUNK_BYTES}
        super().__init__(*names, slow=("b",), **(window | overrides))

    def perform(self, name: str, actions: Iterable[Any]) -> None:
        actions = list(actions)
        self.failures += [action for action in actions if isinstance(action, ParentFailed)]
        super().perform(name, actions)

    def deliver_all(self) -> None:
        """Deliver everything, and write nothing."""
        while ways := self.busy():
            for way in ways:
                if self.queues.get(way):
                    self.deliver(way)

    def publish_image(self, step: int) -> None:
        self.publish(step)[0]()

    def messages(self, name: str, kind: type) -> list[Any]:
        return [
            message for sender, _, message in self.sent if sender == name and type(message) is kind
        ]

    @property
    def writes(self) -> list[WriteChunk]:
        return [work for _, work in self.works if isinstance(work, WriteChunk)]

    @property
    def parent_link(self) -> links.ParentLink:
        return self.nodes["b"].receiver.link


def fetching(*names: str, step: int = 0, **overrides: Any) -> SlowNet:
    """Return a mesh in which `b` has taken a window of a version from `a`, and written nothing."""
    net = SlowNet("a", "b", *names, **overrides)
    net.attach("b", "a")
    net.publish_image(step)
    net.deliver_all()
    return net


def said(actions: Iterable[Any], kind: type) -> list[Any]:
    messages = [message_of(action.frames) for action in actions if isinstance(action, Send)]
    return [message for message in messages if type(message) is kind]


def test_no_more_than_a_window_waits_to_be_written() -> None:
    net = fetching()
    for _ in range(3):
        net.wait(0.01)
        net.deliver_all()
    assert [work.index for work in net.writes] == list(range(WINDOW_CHUNKS))
    assert not net.messages("b", Credit)
    num_most = 0
    while net.writes:
        net.decode()
        net.deliver_all()
        num_most = max(num_most, len(net.writes))
    assert num_most <= WINDOW_CHUNKS
    assert net.holds("b", 0)
    taken = sum(message.taken_bytes for message in net.messages("b", Credit))
    assert 0 < taken <= NET_BYTES


def test_a_parent_that_does_not_heed_its_credit_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "MAX_WINDOW_BYTES", WINDOW_CHUNKS * CHUNK_BYTES)
    monkeypatch.setattr(links, "MAX_WRITING_WINDOWS", 2)
    net = fetching()
    node, link, image = net.nodes["b"], net.link("b") or "", image_of(0)
    limit = 2 * WINDOW_CHUNKS
    for index in range(WINDOW_CHUNKS, limit + 1):
        assert not net.failures, index
        chunk = Chunk(version=v(0), form=FULL, index=index)
        data = image[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]
        net.perform("b", node.receive(link, chunk, [data], now=net.now))
    assert [(each.peer, each.is_corrupt) for each in net.failures] == [(link, False)]
    assert "credit" in net.failures[0].reason
    assert [work.index for work in net.writes] == list(range(limit))
    net.attach("b", "a")
    net.settle()
    assert net.holds("b", 0)


def test_what_is_being_written_takes_its_part_of_the_next_window_too() -> None:
    net = fetching()
    net.wait(0.6)
    net.publish_image(1)
    net.deliver_all()
    assert net.nodes["b"].receiver.item == (v(1), FULL), "less than half of v0 has come"
    fetch = net.messages("b", Fetch)[-1]
    assert (fetch.version, fetch.credit_bytes) == (v(1), 0)
    assert not [work for work in net.writes if work.item_id == (v(1), FULL)]
    net.decode()
    net.deliver_all()
    assert [work.item_id[0] for work in net.writes] == [v(0)] * 3 + [v(1)]
    net.settle()
    assert net.holds("b", 1)


def test_a_parent_that_takes_over_while_chunks_are_written_brings_none_of_them_again() -> None:
    net = fetching()
    net.attach("b", "a")
    net.deliver_all()
    assert [work.index for work in net.writes] == list(range(2 * WINDOW_CHUNKS))
    net.settle()
    assert net.holds("b", 0)
    # Copies would have used up its credit without ever giving any back.
    assert net.nodes["b"].receiver.num_duplicate_chunks == 0
    assert net.now == 0.0


def test_wrong_chunks_are_never_written_and_end_their_parent() -> None:
    net = SlowNet("a", "b", "c")
    net.attach("b", "a")
    net.publish_image(0)
    while not net.queues[way := (net.link("b") or "", "b")] or not isinstance(
        net.queues[way][0][0], Chunk
    ):
        for each in net.busy():
            net.deliver(each)
    link = way[0]
    net.queues[way] = type(net.queues[way])(
        (message, [bytes(reversed(payload[0]))]) if payload else (message, payload)
        for message, payload in net.queues[way]
    )
    net.deliver_all()
    node, before = net.nodes["b"], bytes(net.nodes["b"].store[v(0)].storage)
    for number in range(1, MAX_BAD_CHUNKS + 1):
        work = net.writes[0]
        assert work.run() == WRONG_HASH
        net.decode()
        assert node.receiver.num_bad_chunks == number
    assert [(each.peer, each.is_corrupt) for each in net.failures] == [(link, True)]
    assert bytes(node.store[v(0)].storage) == before
    # The last of its chunks is found to be wrong when another parent has been asked already.
    net.attach("b", "a")
    while net.writes:
        net.decode()
    net.settle()
    assert net.holds("b", 0)


def test_a_parent_is_not_blamed_for_the_disk() -> None:
    net = fetching()
    net.parent_link.has_spare = True
    for _ in range(20):
        net.wait(5.0)
        net.deliver_all()
    assert not net.failed
    while net.writes:
        net.decode()
    net.queues.update({way: type(queue)() for way, queue in net.queues.items()})
    net.wait(0.1)
    assert not net.failed, "it has its patience from the last write on"
    net.wait(5.0)
    assert net.failed


def test_a_disk_that_refuses_is_as_good_as_full(monkeypatch: pytest.MonkeyPatch) -> None:
    net = fetching()

    def refuse(place: memoryview, data: Frame) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(net.rooms["b"], "write", refuse)
    net.deliver_all()
    work = net.writes[0]
    failing = WriteChunk(work.item_id, work.item, work.index, work.peer, work.data, refuse)
    net.works[0] = ("b", failing)
    net.decode()
    assert v(0) not in net.nodes["b"].store
    assert "chunk 0 of v0 cannot be written: Input/output error" in net.notes[-1]
    monkeypatch.undo()
    net.works = [(name, work) for name, work in net.works if work is not failing]
    net.settle()
    net.wait(2.0)
    net.settle()
    assert net.holds("b", 0)
    assert not net.failed


def test_the_time_for_which_the_disk_is_waited_for_shows_no_rate() -> None:
    net = fetching()
    while net.writes:
        assert net.nodes["b"].receiver.rate.is_paused
        assert net.parent_link.rate.is_paused
        net.now += 5.0
        net.decode()
        net.deliver_all()
    assert net.holds("b", 0)
    assert net.nodes["b"].receiver.rate.bytes_per_s is None
    assert net.parent_link.rate.bytes_per_s is None


# --- who offers and does not deliver --------------------------------------------------------------
#
# The liar is no node: it is a link over which a test says what it likes.

STALL_S = 0.5
BOUND_S = WAIT_STALLS * STALL_S + 1.0
DELTA = Form("delta", v(0))


class Liar:
    """A parent that has the version before, and says that it has a delta of one byte."""

    def __init__(self, net: Net, child: str, *, step: int = 1) -> None:
        self.net, self.child, self.step = net, child, step
        net.attach(child, "liar", rtt_s=0.01)
        self.link = net.link(child) or ""
        self.announce()

    def announce(self, step: int | None = None) -> None:
        version = v(self.step if step is None else step)
        self.say(Announce(version=version, offers=(EncodedVersionOffer(version, v(0), 1),)))

    def wait(self) -> None:
        self.say(Waiting(version=v(self.step), form=DELTA))

    def say(self, message: Message, *payload: bytes) -> None:
        if self.is_parent:
            self.net.queues[self.link, self.child].append((message, list(payload)))

    @property
    def is_parent(self) -> bool:
        return self.link in self.net.links


def with_liar(*, step: int = 1) -> tuple[Net, Liar]:
    """Return a child that holds v0, whose parent is the liar, beside the honest learner."""
    net = Net("a", "b", "liar", stall_s=STALL_S)
    net.attach("b", "a")
    run(net.publish(0)[:1])
    net.settle()
    net.sent.clear()
    return net, Liar(net, "b", step=step)


def heed(net: Net) -> None:
    """Give a node whose parent has failed the learner as parent, as the role would its spare."""
    for name, _ in net.failed:
        if net.link(name) is None:
            net.attach(name, "a", rtt_s=0.01)
    net.failed.clear()


def go_on(net: Net, liar: Liar, *, until_s: float, says: str = "waiting") -> None:
    """Let time pass while the liar talks and everybody else is honest."""
    number = 0
    while net.now < until_s and not net.holds("b", 1):
        number += 1
        if says == "waiting" or (says == "both" and number % 2):
            liar.wait()
        elif says in ("announcements", "both"):
            liar.announce()
        elif says == "old tables":
            liar.say(Segment(version=v(liar.step), form=DELTA, index=0), b"")
        elif says == "new versions":
            liar.announce(number)
            liar.wait()
        net.settle()
        net.wait(0.2)
        heed(net)
        net.settle()


@pytest.mark.parametrize(
    "says", ["waiting", "both", "announcements", "old tables", "new versions", "nothing"]
)
@pytest.mark.parametrize("step", [1, 9])
def test_a_version_that_a_liar_offers_cheaply_comes_from_others(says: str, step: int) -> None:
    net, liar = with_liar(step=step)
    run(net.publish(1)[:1])
    net.settle()
    assert net.nodes["b"].receiver.item == (v(step), DELTA)
    go_on(net, liar, until_s=BOUND_S, says=says)
    assert net.holds("b", 1)
    assert not liar.is_parent
    assert net.nodes["b"].receiver.item is None


def test_a_liar_that_proves_its_offer_and_brings_no_chunk_is_left_too() -> None:
    net, liar = with_liar()
    run(net.publish(1, 0))
    first = pieces_of(1, 0)[0]
    net.settle()
    liar.say(Segment(version=v(1), form=DELTA, index=0), first[1])
    net.settle()
    assert net.nodes["b"].encoded_versions[v(1), DELTA].num_segments == 1
    go_on(net, liar, until_s=BOUND_S)
    assert net.holds("b", 1)
    asked = [m for name, link, m in net.sent if isinstance(m, Fetch) and "-a" in link]
    assert [message.num_segments for message in asked] == [1], "the table is known already"


def test_all_are_forgotten_that_are_left_because_they_lack_a_version() -> None:
    net, _ = with_liar()
    net.settle()
    net.nodes["b"].receiver.end()
    for _ in range(2):
        net.perform("b", net.nodes["b"].expect(v(5), now=net.now))
        net.now += 10 * STALL_S
    assert net.failed
    net.wait(0.0)
    assert net.nodes["b"].receiver.offers.newest is None


def test_a_parent_behind_a_slow_link_is_given_more_time() -> None:
    """Once it has brought something after a long pause, so it may again."""
    net, liar = with_liar()
    run(net.publish(1, 0))
    pieces = pieces_of(1, 0)
    net.settle()

    def bring(index: int) -> None:
        liar.say(Segment(version=v(1), form=DELTA, index=index), pieces[index][1])
        net.settle()

    def wait(seconds: float) -> None:
        end = net.now + seconds
        while net.now < end:
            liar.wait()
            net.settle()
            net.wait(0.2)

    bring(0)
    wait(0.9 * WAIT_STALLS * STALL_S)
    bring(1)
    wait(3.0 * WAIT_STALLS * STALL_S)
    assert liar.is_parent
    assert not net.failed
    bring(2)
    chunk = right_chunks(v(1), DELTA)[0]
    liar.say(Chunk(version=v(1), index=0, form=DELTA), chunk)
    net.settle()
    wait(13.0 * WAIT_STALLS * STALL_S)
    assert net.failed


def test_a_pause_before_an_item_does_not_count_for_it() -> None:
    net, liar = with_liar()
    net.settle()
    liar.wait()
    net.settle()
    run(net.publish(1)[:1])
    net.nodes["b"].receiver.offers.refuse((v(1), DELTA))
    net.nodes["b"].receiver.end()
    net.wait(100.0)
    liar.say(Announce(version=v(2), offers=(EncodedVersionOffer(v(2), v(0), 1),)))
    net.settle()
    assert net.nodes["b"].receiver.item == (v(2), DELTA)
    liar.say(Waiting(version=v(2), form=DELTA))
    net.settle()
    net.wait(0.1)
    assert not net.failed


# --- what a killed process has left ---------------------------------------------------------------


def resumed_node(*steps: int) -> tuple[Any, Rooms]:
    """Return a node that holds versions whole, and its version stores."""
    rooms = Rooms()
    broadcast = make_broadcast("b", version_store=rooms)
    broadcast.trust.set(public_key=PUBLIC_KEY, run_id="run", max_image_bytes=1 << 20)
    for step in steps:
        broadcast.publish(*published(step), now=0.0)
    return broadcast, rooms


def test_an_image_is_taken_though_its_manifest_was_forgotten_while_it_was_hashed() -> None:
    broadcast, rooms = resumed_node()
    signed, manifest, image = published(1)
    frame = encode_signed(signed)
    assert broadcast.trust.manifest(v(1), frame) == manifest
    broadcast.trust.retire(v(3), ())  # as newer versions do that have come meanwhile
    storage = rooms.create(v(1), frame, manifest.num_bytes)
    storage[:] = image
    broadcast.recover(v(1), frame, storage, bytearray(b"\x01" * manifest.num_chunks), now=0.0)
    assert broadcast.receiver.store.get((v(1), FULL)) is not None


# --- out of space ---------------------------------------------------------------------------------


def full_node(*, base: int | None) -> Net:
    """Return a net whose node b holds v0 and has no space for v1, published in full or as delta."""
    net = Net("a", "b")
    net.attach("b", "a")
    run(net.publish(0)[:1])
    net.settle()
    net.rooms["b"].is_full = True
    run(net.publish(1)[:1] if base is None else net.publish(1, base)[:1])
    net.settle()
    return net


def retry(net: Net) -> float:
    """Let node b try again; return how long it has paused before."""
    deadline = net.nodes["b"].deadline
    assert deadline is not None
    pause_s, net.now = deadline - net.now, deadline
    net.wait(0.0)
    net.settle()
    return pause_s


@pytest.mark.parametrize("base", [None, 0])
def test_it_is_tried_again_without_an_announcement(base: int | None) -> None:
    net = full_node(base=base)
    node = net.nodes["b"]
    assert node.newest_complete == v(0)
    assert [retry(net) for _ in range(9)] == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert (FIRST_PAUSE_S, MAX_PAUSE_S) == (1, 60)
    [note] = net.notes
    assert note.startswith("keeping the versions that are here, and trying again later: ")
    net.rooms["b"].is_full = False
    if base is not None:
        run(net.publish(1, base)[2:])
    net.settle()
    assert not net.holds("b", 1)
    retry(net)
    assert net.holds("b", 1)
    assert node.deadline is None
    assert len(net.notes) == 1


def test_it_is_tried_as_soon_as_an_image_is_dropped() -> None:
    net = full_node(base=None)
    for _ in range(5):
        assert net.nodes["b"].deadline is not None
        net.now = net.nodes["b"].deadline or 0.0
        net.wait(0.0)
    net.rooms["b"].is_full = False
    node = net.nodes["b"]
    node.store[PolicyVersion(0, 8)] = node.store[v(0)]  # an older one, as a child had pinned
    net.wait(node.receiver.link.stall_s)
    begun_at = net.now
    assert list(node.store) == [v(0)]
    assert node.deadline == pytest.approx(begun_at + RELEASE_PAUSE_S)
    net.wait(RELEASE_PAUSE_S)
    net.settle()
    assert net.holds("b", 1)


def test_a_node_with_space_for_two_images_gets_a_third() -> None:
    net = Net("a", "b")
    net.attach("b", "a")
    node, rooms = net.nodes["b"], net.rooms["b"]
    for step in range(4):
        rooms.is_full = len(rooms.live) == 2
        run(net.publish(step)[:1])
        net.settle()
        if rooms.is_full:
            assert list(rooms.live) == [v(step - 1)], "the newest stays, the one before it goes"
            rooms.is_full = False
            net.wait(RELEASE_PAUSE_S)
            net.settle()
        assert node.newest_complete == v(step)
    assert net.notes == [], "nothing is wrong"


def test_a_node_without_space_does_not_collect_manifests() -> None:
    """Each takes megabytes if the image is large, and the node gets one for each version."""
    net = full_node(base=None)
    node = net.nodes["b"]
    for step in range(2, 9):
        run(net.publish(step)[:1])
        net.settle()
        net.perform("b", node.expect(v(step), now=net.now))
        net.settle()
        net.wait(node.receiver.link.stall_s)
    assert node.newest_complete == v(0)
    assert set(node.trust.manifests) == {v(0), v(8)}


def test_its_own_parent_is_not_blamed() -> None:
    net = full_node(base=None)
    for _ in itertools.repeat(None, 100):
        net.perform("b", net.nodes["b"].expect(v(1), now=net.now))
        net.settle()
        net.wait(0.5)
        net.settle()
    assert not net.failed
    assert len(net.notes) == 1


def test_nothing_to_try_is_nothing_to_wait_for() -> None:
    net = full_node(base=None)
    node = net.nodes["b"]
    link = net.link("b") or ""
    node.receiver.offers.clear()
    net.wait(FIRST_PAUSE_S)
    assert node.deadline is None
    assert node.receiver.store.get((v(1), FULL)) is None
    message = Announce(version=v(1), offers=(EncodedVersionOffer(v(1), v(0), 1),))
    net.deliver((link, "b"), (message, []))
    assert node.receiver.item == (v(1), Form("delta", v(0)))
