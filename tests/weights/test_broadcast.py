from __future__ import annotations

import itertools
from collections import deque
from typing import Any

import pytest

from echo.core.errors import LocalProtocolError, RemoteProtocolError
from echo.core.rollout import PolicyVersion
from echo.weights.link import ParentFailed
from echo.weights.manifest import encode_signed, hash_image
from echo.weights.receiver import VersionArrived
from echo.weights.store.encoded import DecodeBlock
from echo.wire.actions import Note, Send
from echo.wire.codec import Frame, decode_envelope, decode_message, encode
from echo.wire.messages import (
    Announce,
    Chunk,
    Credit,
    Fetch,
    Finish,
    Gone,
    Message,
    Subscribe,
    Waiting,
)
from tests.roles.harness import (
    CHUNK_BYTES,
    PUBLIC_KEY,
    make_broadcast,
    make_image,
    make_version,
    message_of,
)

V1, V2, V3, V4 = (PolicyVersion(1, step) for step in (1, 2, 3, 4))
Item = tuple[Any, list[bytes]]
"""(message, payload)."""


class Mesh:
    """Broadcasts by name; what is sent lies in one queue per direction until it is delivered."""

    def __init__(self, *names: str, **overrides: Any) -> None:
        self.now = 0.0
        self.nodes = {name: make_broadcast(name, **overrides) for name in names}
        self.queues: dict[tuple[str, str], deque[Item]] = {}
        self.arrived: list[tuple[str, PolicyVersion]] = []
        self.failed: list[tuple[str, str, str]] = []
        self.notes: list[str] = []
        self.log: list[tuple[str, str, Any]] = []
        for node in self.nodes.values():
            node.trust.set(public_key=PUBLIC_KEY, run_id="run", max_image_bytes=1 << 20)

    def perform(self, name: str, actions: Any) -> None:
        for action in actions:
            match action:
                case Send():
                    message = message_of(action.frames)
                    payload = [bytes(frame) for frame in action.frames[1:]]
                    if isinstance(message, Chunk):
                        image, indices = make_image(message.version), all_of(message)
                        assert payload == [right_chunk(image, index) for index in indices]
                    self.log.append((name, action.peer, message))
                    self.queues.setdefault((name, action.peer), deque()).append((message, payload))
                case ParentFailed():
                    self.failed.append((name, action.peer, action.reason))
                case VersionArrived():
                    self.arrived.append((name, action.version))
                case Note():
                    self.notes.append(action.text)
                case DecodeBlock():
                    node = self.nodes[name]
                    self.perform(name, node.worked(action, action.run(), now=self.now))
                case _:
                    raise AssertionError(action)

    def publish(self, lineage: int, step: int, *, at: str = "a") -> None:
        self.perform(at, self.nodes[at].publish(*make_version(lineage, step), now=self.now))

    def attach(self, child: str, parent: str | None) -> None:
        self.perform(child, self.nodes[child].set_parent(parent, now=self.now))

    def deliver(self, source: str, target: str, item: Item | None = None) -> Any:
        message, payload = item or self.queues[source, target].popleft()
        if target in self.nodes:
            node = self.nodes[target]
            self.perform(target, node.receive(source, message, list(payload), now=self.now))
        return message

    def settle(self, *, but: tuple[tuple[str, str], ...] = ()) -> None:
        """Deliver everything, round by round, except on some directions."""
        while busy := [way for way, queue in self.queues.items() if queue and way not in but]:
            for way in busy:
                self.deliver(*way)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        for name, node in self.nodes.items():
            self.perform(name, node.expire(now=self.now))

    def cut(self, a: str, b: str) -> None:
        self.queues[a, b] = deque()
        self.queues[b, a] = deque()

    def sent(self, kind: type, source: str | None = None) -> list[Any]:
        return [m for name, _, m in self.log if isinstance(m, kind) and source in (None, name)]

    def holds(self, name: str, version: PolicyVersion) -> bool:
        item = self.nodes[name].store.get(version)
        return item is not None and item.is_complete and item.storage == make_image(version)


def all_of(message: Chunk) -> tuple[int, ...]:
    return message.index, *message.others


def right_chunk(image: bytes | bytearray, index: int) -> bytes:
    return bytes(image[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES])


def chain(*names: str, **overrides: Any) -> Mesh:
    mesh = Mesh(*names, **overrides)
    for parent, child in itertools.pairwise(names):
        mesh.attach(child, parent)
    mesh.settle()
    return mesh


def test_a_chunk_is_forwarded_before_the_next_one_has_arrived() -> None:
    mesh = chain("a", "b", "c")
    mesh.publish(1, 1)
    while not mesh.queues["a", "b"] or not isinstance(mesh.queues["a", "b"][0][0], Chunk):
        for way, queue in list(mesh.queues.items()):
            if queue and not (way == ("a", "b") and isinstance(queue[0][0], Chunk)):
                mesh.deliver(*way)
    mesh.settle(but=(("a", "b"),))
    assert mesh.nodes["c"].progress() == (V1, 0, 6)
    for held in (1, 2, 3):
        mesh.deliver("a", "b")
        mesh.settle(but=(("a", "b"),))
        assert mesh.nodes["b"].progress() == (V1, held, 6)
        assert mesh.nodes["c"].progress() == (V1, held, 6)


def partial(mesh: Mesh, child: str, parent: str, num_chunks: int) -> None:
    """Deliver everything until `child` holds some chunks, then cut its link."""
    while mesh.nodes[child].progress()[1] < num_chunks:
        for way in [way for way, queue in mesh.queues.items() if queue]:
            if mesh.nodes[child].progress()[1] < num_chunks:
                mesh.deliver(*way)
    mesh.cut(parent, child)


def test_a_parent_that_was_restarted_does_not_make_its_children_start_anew() -> None:
    mesh = Mesh("a", "b", "c")
    mesh.attach("b", "a")
    mesh.attach("c", "b")
    mesh.publish(1, 1)
    partial(mesh, "c", "b", 3)
    mesh.settle()
    num_held = mesh.nodes["c"].progress()[1]
    assert 3 <= num_held < 6
    mesh.nodes["b"] = make_broadcast("b")
    mesh.nodes["b"].trust.set(public_key=PUBLIC_KEY, run_id="run", max_image_bytes=1 << 20)
    mesh.attach("c", "b")
    mesh.settle()
    assert mesh.sent(Waiting, "b")
    assert not mesh.sent(Gone)
    assert mesh.nodes["c"].progress() == (V1, num_held, 6)
    mesh.attach("b", "a")
    mesh.settle()
    mesh.wait(0.5)
    mesh.settle()
    assert mesh.holds("c", V1)
    assert mesh.nodes["c"].receiver.num_duplicate_chunks == 0
    assert not mesh.failed


@pytest.mark.parametrize(
    ("index", "data"), [(1, bytes(CHUNK_BYTES)), (5, make_image(V1)[:CHUNK_BYTES])]
)
def test_one_chunk_of_wrong_bytes_or_length_is_forgiven(index: int, data: bytes) -> None:
    mesh = chain("a", "b")
    mesh.publish(1, 1)
    partial(mesh, "b", "a", 1)
    mesh.deliver("a", "b", (Chunk(version=V1, index=index), [bytes(data)]))
    assert mesh.nodes["b"].receiver.num_bad_chunks == 1
    assert "asking again" in mesh.notes[-1]
    mesh.settle()
    assert mesh.holds("b", V1)
    assert not mesh.failed


def test_of_chunks_that_come_together_only_the_wrong_one_is_asked_for_again() -> None:
    mesh = chain("a", "b", "c")
    mesh.publish(1, 1)
    partial(mesh, "b", "a", 1)
    image = make_image(V1)
    data = [right_chunk(image, 1), bytes(CHUNK_BYTES), right_chunk(image, 0), right_chunk(image, 4)]
    mesh.deliver("a", "b", (Chunk(version=V1, index=1, others=(2, 0, 4)), data))
    assert mesh.nodes["b"].progress() == (V1, 3, 6)
    receiver = mesh.nodes["b"].receiver
    assert receiver.num_bad_chunks == receiver.num_duplicate_chunks == 1
    assert mesh.sent(Fetch, "b")[-1].ranges == ((2, 4), (5, 6))
    mesh.settle()
    assert mesh.holds("c", V1)
    assert not mesh.failed


def test_a_parent_that_has_only_newer_versions_says_gone_and_the_child_takes_the_newest() -> None:
    mesh = chain("a", "b")
    mesh.publish(1, 1)
    partial(mesh, "b", "a", 2)
    mesh.perform("a", mesh.nodes["a"].remove_child("b", now=mesh.now))
    for step in (2, 3):
        mesh.publish(1, step)
    assert sorted(mesh.nodes["a"].store) == [V2, V3]
    mesh.attach("b", "a")
    mesh.settle()
    assert mesh.sent(Gone, "a")[0] == Gone(version=V1)
    assert mesh.holds("b", V3)
    assert sorted(mesh.nodes["b"].store) == [V3]


def test_a_link_slower_than_the_pace_of_publication_is_not_starved() -> None:
    mesh = chain("a", "b", window_bytes=CHUNK_BYTES)
    for step in range(1, 30):
        mesh.publish(1, step)
        # One chunk's worth of messages for each publication: a transfer lasts six versions.
        for _ in range(3):
            for way in [way for way, queue in mesh.queues.items() if queue]:
                mesh.deliver(*way)
    assert len(mesh.arrived) >= 3
    newest = max(version for _, version in mesh.arrived)
    assert newest.step >= 29 - 2 * 9
    assert len(mesh.nodes["a"].store) <= 3
    assert not mesh.sent(Gone)


def test_a_version_that_the_parent_passes_over_does_not_hold_its_children_up() -> None:
    mesh = Mesh("a", "b", "c")
    mesh.attach("b", "a")
    mesh.publish(1, 1)
    partial(mesh, "b", "a", 3)
    mesh.attach("b", "a")
    mesh.publish(1, 2)
    # b learns of v2 while it is busy with v1; c, which comes now, asks b for v2 and waits.
    while V2 not in mesh.nodes["b"].store:
        mesh.deliver(*next(way for way, queue in mesh.queues.items() if queue))
    mesh.attach("c", "b")
    mesh.settle(but=(("a", "b"),))
    assert mesh.nodes["c"].progress() == (V2, 0, 6)
    mesh.publish(1, 3)
    mesh.queues["a", "b"].rotate(1)  # the announcement of v3, in front of the rest of v1
    mesh.settle()
    assert mesh.arrived == [("b", V1), ("b", V3), ("c", V3)]
    assert sorted(mesh.nodes["b"].store) == [V1, V3]


# --- silence -------------------------------------------------------------------------------------


def test_a_lost_chunk_is_asked_for_again_and_the_second_silence_ends_the_parent() -> None:
    mesh = chain("a", "b")
    mesh.publish(1, 1)
    partial(mesh, "b", "a", 2)
    assert mesh.nodes["b"].deadline == 0.5
    mesh.wait(0.5)
    assert mesh.sent(Fetch, "b")[-1].ranges == ((2, 6),)
    assert not mesh.failed
    mesh.cut("a", "b")
    mesh.wait(0.5)
    assert mesh.failed == [("b", "a", "no chunk of v1 for 1.0 s")]
    assert mesh.nodes["b"].deadline is None
    mesh.attach("b", "a")
    mesh.settle()
    assert mesh.holds("b", V1)


def test_a_parent_that_does_not_answer_a_subscription_is_reported() -> None:
    mesh = Mesh("a", "b")
    mesh.attach("b", "a")
    mesh.cut("a", "b")
    mesh.wait(0.5)
    assert len(mesh.sent(Subscribe, "b")) == 2
    mesh.cut("a", "b")
    mesh.wait(0.5)
    assert mesh.failed == [("b", "a", "no answer for 1.0 s")]


def test_an_answer_clears_the_first_silence() -> None:
    mesh = chain("a", "b")
    mesh.publish(1, 1)
    mesh.settle()
    answers: list[tuple[Message, list[bytes]]] = [
        (Announce(version=V1), [encode_signed(make_version(1, 1)[0])]),
        (Waiting(version=None), []),
    ]
    for answer in answers:
        mesh.perform("b", mesh.nodes["b"].receiver.requests.subscribe(now=mesh.now))
        mesh.cut("a", "b")
        mesh.wait(0.5)
        mesh.deliver("a", "b", answer)
        mesh.perform("b", mesh.nodes["b"].receiver.requests.subscribe(now=mesh.now))
        mesh.cut("a", "b")
        mesh.wait(0.5)
        assert not mesh.failed
        mesh.deliver("a", "b", answer)


def test_a_parent_with_nothing_new_answers_and_is_left_in_peace() -> None:
    mesh = chain("a", "b")
    assert mesh.sent(Waiting, "a") == [Waiting(version=None)]
    for _ in range(10):
        mesh.wait(0.5)
        mesh.settle()
    assert not mesh.failed
    assert mesh.nodes["b"].deadline is None
    assert mesh.nodes["b"].progress() == (None, 0, 0)


# --- who may say what ----------------------------------------------------------------------------


def test_only_the_parent_is_listened_to() -> None:
    mesh = chain("a", "b")
    signed, _, image = make_version(1, 1)
    mesh.deliver("x", "b", (Announce(version=V1), [encode_signed(signed)]))
    assert not mesh.nodes["b"].store
    mesh.publish(1, 1)
    partial(mesh, "b", "a", 1)
    mesh.deliver("x", "b", (Chunk(version=V1, index=3), [bytes(image[3072:4096])]))
    mesh.deliver("x", "b", (Gone(version=V1), []))
    mesh.deliver("x", "b", (Waiting(version=V1), []))
    assert mesh.nodes["b"].progress() == (V1, 1, 6)


def test_what_was_not_asked_for_is_ignored() -> None:
    mesh = chain("a", "b")
    mesh.deliver("a", "b", (Chunk(version=V1, index=0), [bytes(CHUNK_BYTES)]))
    mesh.deliver("a", "b", (Gone(version=V3), []))
    mesh.deliver("x", "a", (Credit(version=V1, credit_bytes=10), []))
    assert not mesh.nodes["b"].store
    assert mesh.nodes["b"].receiver.num_bad_chunks == 0
    mesh.publish(1, 1)
    mesh.settle()
    mesh.publish(1, 2)
    mesh.settle()
    signed, _, _ = make_version(1, 1)
    fresh = make_version(1, 0)[0]
    mesh.deliver("a", "b", (Announce(version=V1), [encode_signed(signed)]))
    mesh.deliver("a", "b", (Announce(version=PolicyVersion(1, 0)), [encode_signed(fresh)]))
    assert sorted(mesh.nodes["b"].store) == [V1, V2]


@pytest.mark.parametrize(
    ("message", "payload", "match"),
    [
        (Announce(version=V2), [], "without exactly one manifest"),
        (Announce(version=V2), [b"junk"], "malformed manifest"),
        (Announce(version=V2), [encode_signed(make_version(1, 3)[0])], "with the manifest of v3"),
        (Announce(version=V2), [encode_signed(make_version(1, 2, run="x")[0])], "run 'x'"),
        (Chunk(version=V1, index=6), [b"x"], "bad index or without its bytes"),
        (Chunk(version=V1, index=0), [], "bad index or without its bytes"),
        (Chunk(version=V1, index=1, others=(2,)), [b"x"], "bad index or without its bytes"),
        (Chunk(version=V1, index=1, others=(6,)), [b"x", b"y"], "bad index or without its bytes"),
        (Finish(reason=""), [], "Finish does not belong to the weights plane"),
    ],
)
def test_a_parents_mistake_is_named(message: Any, payload: list[Frame], match: str) -> None:
    mesh = chain("a", "b")
    mesh.publish(1, 1)
    partial(mesh, "b", "a", 1)
    with pytest.raises(RemoteProtocolError, match=match):
        mesh.nodes["b"].receive("a", message, payload, now=0.0)
    assert mesh.nodes["b"].progress() == (V1, 1, 6)


def test_an_image_of_another_size_is_a_mistake_of_ours() -> None:
    node = make_broadcast("a")
    signed, manifest, image = make_version(1, 1)
    with pytest.raises(LocalProtocolError, match="image of 5221 bytes"):
        node.publish(signed, manifest, image + b"x", now=0.0)


def test_the_frames_of_a_chunk_are_views_of_the_store() -> None:
    node = make_broadcast("a")
    node.publish(*make_version(1, 1), now=0.0)
    fetch = Fetch(version=V1, ranges=((0, 1),), credit_bytes=10)
    [send] = node.receive("x", fetch, [], now=0.0)
    assert isinstance(send, Send)
    assert isinstance(send.frames[1], memoryview)
    assert send.frames[1].obj is node.store[V1].storage
    assert send.frames[1].readonly
    assert decode_message(decode_envelope(encode(fetch, source="x"))) == fetch

    # What Mesh.perform asserts at each Send: no node ever sent a chunk that is not the learner's.


def test_bytes_that_lie_here_already_are_not_transferred() -> None:
    mesh = Mesh("a", "b", "c")
    signed, manifest, image = make_version(1, 1)
    mesh.nodes["b"].offer(bytearray(image), manifest.image_hash)
    mesh.attach("b", "a")
    mesh.attach("c", "b")
    mesh.perform("a", mesh.nodes["a"].publish(signed, manifest, image, now=0.0))
    mesh.settle()
    assert mesh.arrived == [("b", V1), ("c", V1)]
    assert not [m for source, _, m in mesh.log if source == "a" and isinstance(m, Chunk)]
    assert bytes(mesh.nodes["c"].store[V1].storage) == bytes(image)


def test_an_offer_that_is_not_the_version_is_dropped_and_the_version_fetched() -> None:
    mesh = Mesh("a", "b")
    other = bytearray(make_image(V2))
    mesh.nodes["b"].offer(other, hash_image(other, CHUNK_BYTES))
    mesh.attach("b", "a")
    mesh.publish(1, 1)
    mesh.settle()
    assert bytes(mesh.nodes["b"].store[V1].storage) == bytes(make_image(V1))
    mesh.publish(1, 2)  # the offer would fit now, but it was of the first version only
    mesh.settle()
    assert mesh.nodes["b"].bytes_received == len(make_image(V1)) + len(make_image(V2))
