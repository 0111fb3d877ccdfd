"""A node without room says so once and tries again: soon after a release, else ever more rarely."""

from __future__ import annotations

import itertools

import pytest
from tests.protocol.encoded_versions import v

from echo.core.errors import StorageError
from echo.core.rollout import PolicyVersion
from echo.weights.receiver import FIRST_PAUSE_S, MAX_PAUSE_S, RELEASE_PAUSE_S, SpaceRetry
from echo.wire.actions import Note
from echo.wire.messages import FULL, Announce, EncodedVersionOffer, Form
from tests.protocol.test_broadcast_storm import Net, run

FULL_DISK = StorageError("the disk is full")


def test_the_pause_doubles_up_to_a_minute_and_the_note_comes_once() -> None:
    room, now, pauses = SpaceRetry(), 100.0, []
    notes = []
    for _ in range(9):
        notes += room.lacks(FULL_DISK, now=now)
        assert room.retry_at is not None
        pauses.append(room.retry_at - now)
        now = room.retry_at
        assert not room.is_due(now=now - 0.01)
        assert room.is_due(now=now)
        assert not room.is_due(now=now)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert (FIRST_PAUSE_S, MAX_PAUSE_S) == (1, 60)
    text = "keeping the versions that are here, and trying again later: the disk is full"
    assert notes == [Note("warning", text)]


def test_after_it_was_found_everything_begins_anew() -> None:
    room = SpaceRetry()
    for now in (0.0, 1.0, 2.0):
        room.lacks(FULL_DISK, now=now)
    room.found()
    assert room.retry_at is None
    assert not room.is_due(now=1e9)
    assert len(room.lacks(FULL_DISK, now=10.0)) == 1
    assert room.retry_at == 10.0 + FIRST_PAUSE_S


def test_a_release_is_a_chance_only_if_something_lacks_room() -> None:
    room = SpaceRetry()
    room.released(now=1.0)
    assert room.retry_at is None
    for now in (0.0, 1.0, 3.0):
        room.lacks(FULL_DISK, now=now)
    room.released(now=3.0)
    assert room.retry_at == 3.0 + RELEASE_PAUSE_S
    room.released(now=3.1)
    assert room.retry_at == 3.0 + RELEASE_PAUSE_S


# --- a node that has none ------------------------------------------------------------------------


class Notes(Net):
    """A net that keeps what the operator reads."""

    def __init__(self, *names: str) -> None:
        super().__init__(*names)
        self.notes: list[str] = []

    def perform(self, name: str, actions: object) -> None:
        kept = list(actions)  # type: ignore[call-overload]
        self.notes += [action.text for action in kept if isinstance(action, Note)]
        super().perform(name, kept)


def full_node(*, base: int | None) -> Notes:
    """Return a net whose node b holds v0 and has no space for v1, published in full or as delta."""
    net = Notes("a", "b")
    net.attach("b", "a")
    run(net.publish(0)[:1])
    net.settle()
    net.rooms["b"].is_full = True
    run(net.publish(1)[:1] if base is None else net.publish(1, base)[:1])
    net.settle()
    return net


@pytest.mark.parametrize("base", [None, 0])
def test_it_is_tried_again_without_an_announcement(base: int | None) -> None:
    net = full_node(base=base)
    node = net.nodes["b"]
    assert node.newest_complete == v(0)
    tried = []
    while net.now < 200.0:
        assert node.deadline is not None
        tried.append(node.deadline - net.now)
        net.now = node.deadline
        net.wait(0.0)
        net.settle()
    assert tried[:4] == [1.0, 2.0, 4.0, 8.0]
    assert len(tried) < 12
    assert len(net.notes) == 1
    net.rooms["b"].is_full = False
    if base is not None:
        run(net.publish(1, base)[2:])
    net.settle()
    assert not net.holds("b", 1)
    assert node.deadline is not None
    net.now = node.deadline
    net.wait(0.0)
    net.settle()
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
    # A third version that a child has pinned goes.
    for version in (PolicyVersion(0, 7), PolicyVersion(0, 8)):
        node.store[version] = node.store[v(0)]
    net.wait(node.receiver._stall_s)
    begun_at = net.now
    assert sorted(node.store) == [PolicyVersion(0, 8), v(0)]
    assert node.deadline == pytest.approx(begun_at + RELEASE_PAUSE_S)
    net.wait(RELEASE_PAUSE_S)
    net.settle()
    assert net.holds("b", 1)


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
    link = net.link("b", 0) or ""
    node.receiver.offers.forget(link)
    net.wait(FIRST_PAUSE_S)
    assert node.deadline is None
    assert node.receiver.store.get((v(1), FULL)) is None
    message = Announce(version=v(1), offers=(EncodedVersionOffer(v(1), v(0), 1),))
    net.deliver((link, "b"), (message, []))
    assert node.receiver.item == (v(1), Form("delta", v(0)))
