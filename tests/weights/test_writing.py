"""Where chunks are written late: what a node holds, serves, asks for and blames anybody for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from echo.weights import link as links
from echo.weights.link import MAX_BAD_CHUNKS, ParentFailed
from echo.weights.receiver import WRONG_HASH, WriteChunk
from echo.wire.actions import Note, Send
from echo.wire.messages import FULL, Chunk, Credit, Fetch
from tests.roles.harness import CHUNK_BYTES, message_of
from tests.weights.encoded_versions import v
from tests.weights.net import NET_BYTES, Net, image_of

WINDOW_CHUNKS = 4
NUM_CHUNKS = -(-NET_BYTES // CHUNK_BYTES)


class SlowNet(Net):
    """A mesh with a node `b` whose chunks wait to be written; notes and failures are kept."""

    def __init__(self, *names: str, **overrides: Any) -> None:
        self.notes: list[str] = []
        self.failures: list[ParentFailed] = []
        window = {"window_bytes": WINDOW_CHUNKS * CHUNK_BYTES}
        super().__init__(*names, slow=("b",), **(window | overrides))

    def perform(self, name: str, actions: Iterable[Any]) -> None:
        actions = list(actions)
        self.notes += [action.text for action in actions if isinstance(action, Note)]
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

    def stripe_link(self, index: int = 0) -> Any:
        return self.nodes["b"].receiver.links[index]


def fetching(*names: str, step: int = 0, **overrides: Any) -> SlowNet:
    """Return a mesh in which `b` has taken a window of a version from `a`, and written nothing."""
    net = SlowNet("a", "b", *names, **overrides)
    net.attach("b", "a")
    net.publish_image(step)
    net.deliver_all()
    return net


def say(actions: Iterable[Any], kind: type) -> list[Any]:
    messages = [message_of(action.frames) for action in actions if isinstance(action, Send)]
    return [message for message in messages if type(message) is kind]


# --- credit --------------------------------------------------------------------------------------


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


def test_each_write_frees_its_part_of_the_window() -> None:
    net = fetching()
    net.decode(2)
    (credit,) = net.messages("b", Credit)
    assert credit.taken_bytes == credit.credit_bytes == CHUNK_BYTES


def test_a_parent_that_does_not_heed_its_credit_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "MAX_WINDOW_BYTES", CHUNK_BYTES)
    monkeypatch.setattr(links, "MAX_WRITING_WINDOWS", 2)
    net = fetching()
    node, link, image = net.nodes["b"], net.link("b", 0) or "", image_of(0)
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
    assert net.nodes["b"].fetching == v(1), "less than half of v0 has come"
    fetch = net.messages("b", Fetch)[-1]
    assert (fetch.version, fetch.credit_bytes) == (v(1), 0)
    assert not [work for work in net.writes if work.item_id == (v(1), FULL)]
    net.decode()
    net.deliver_all()
    assert [work.item_id[0] for work in net.writes] == [v(0)] * 3 + [v(1)]
    net.settle()
    assert net.holds("b", 1)


# --- holding -------------------------------------------------------------------------------------


def test_a_chunk_is_held_and_served_when_it_is_written() -> None:
    net = fetching("c")
    net.attach("c", "b")
    net.deliver_all()
    image = net.nodes["b"].store[v(0)]
    assert image.num_held == 0
    assert not net.messages("b", Chunk)
    net.decode(1)
    assert image.has_chunk[1] == 1
    assert not net.messages("b", Chunk), "the first is not there yet"
    net.decode(0)
    assert [message.index for message in net.messages("b", Chunk)] == [0, 1]
    net.settle()
    assert net.holds("c", 0)


def test_what_is_being_written_is_not_asked_for() -> None:
    net = fetching()
    net.decode()
    net.attach("b", "a")
    assert net.messages("b", Fetch)[-1].ranges == ((WINDOW_CHUNKS, NUM_CHUNKS),)
    net.deliver_all()
    actions = net.nodes["b"].receiver.request((v(0), FULL), net.stripe_link(), net.now)
    assert say(actions, Fetch)[0].ranges == ((1 + len(net.writes), NUM_CHUNKS),)
    net.settle()
    assert net.holds("b", 0)


def test_a_parent_that_takes_over_while_chunks_are_written_brings_none_of_them_again() -> None:
    net = fetching()
    net.attach("b", "a")
    net.deliver_all()
    assert [work.index for work in net.writes] == list(range(2 * WINDOW_CHUNKS))
    net.settle()
    assert net.holds("b", 0)
    # Copies would have used up its credit without ever giving any back.
    assert net.nodes["b"].num_duplicate_chunks == 0
    assert net.now == 0.0


def test_a_chunk_of_a_version_that_was_dropped_changes_nothing() -> None:
    net = fetching()
    stale = list(net.writes)
    net.works.clear()
    net.publish_image(1)
    net.deliver_all()
    assert v(0) not in net.nodes["b"].store
    old = stale[0].item
    for work in stale:
        net.perform("b", net.nodes["b"].worked(work, work.run(), now=net.now))
    assert old.num_held == 0
    net.settle()
    assert net.holds("b", 1)


# --- faults --------------------------------------------------------------------------------------


def test_wrong_chunks_are_never_written_and_end_their_parent() -> None:
    net = SlowNet("a", "b", "c")
    net.attach("b", "a")
    net.publish_image(0)
    while not net.queues[way := (net.link("b", 0) or "", "b")] or not isinstance(
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
        assert node.num_bad_chunks == number
    assert [(each.peer, each.is_corrupt) for each in net.failures] == [(link, True)]
    assert bytes(node.store[v(0)].storage) == before
    # The last of its chunks is found to be wrong when another parent has been asked already.
    net.attach("b", "a")
    while net.writes:
        net.decode()
    net.settle()
    assert net.holds("b", 0)


def test_a_chunk_found_wrong_after_the_links_were_divided_anew_is_asked_for_again() -> None:
    net = SlowNet("a", "b")
    net.set_num_links("b", ["a", "a"])
    net.publish_image(0)
    while not (ways := [way for way in net.busy() if isinstance(net.queues[way][0][0], Chunk)]):
        for each in net.busy():
            net.deliver(each)
    message, [data] = net.queues[ways[0]][0]
    net.queues[ways[0]][0] = message, [bytes(reversed(data))]
    net.deliver_all()
    bad = next(n for n, work in enumerate(net.writes) if work.index == message.index)
    _, work = net.works.pop(bad)
    net.set_num_links("b", ["a", "a", "a"])
    net.settle()
    assert not net.holds("b", 0)
    assert not any(link.is_pulling for link in net.nodes["b"].receiver.links)
    net.perform("b", net.nodes["b"].worked(work, work.run(), now=net.now))
    net.settle()
    assert net.holds("b", 0)


def test_a_parent_is_not_blamed_for_the_disk() -> None:
    net = fetching()
    net.nodes["b"].set_spare(0, is_ready=True)
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

    def refuse(place: memoryview, data: bytes) -> None:
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


# --- rates ---------------------------------------------------------------------------------------


def test_the_time_for_which_the_disk_is_waited_for_shows_no_rate() -> None:
    net = fetching()
    while net.writes:
        assert net.nodes["b"].receiver.rate.is_paused
        assert net.stripe_link().rate.is_paused
        net.now += 5.0
        net.decode()
        net.deliver_all()
    assert net.holds("b", 0)
    assert net.nodes["b"].downlink_bytes_per_s is None
    assert net.stripe_link().rate.bytes_per_s is None


def test_an_image_is_bit_for_bit_in_whatever_order_it_is_written() -> None:
    net = fetching()
    while net.writes:
        net.decode(len(net.works) - 1)
        net.deliver_all()
    assert bytes(net.nodes["b"].store[v(0)].storage) == image_of(0)
