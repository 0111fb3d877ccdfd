"""A node out of space says so once and tries again: soon after a release, else ever more rarely."""

from __future__ import annotations

import itertools

import pytest

from echo.core.rollout import PolicyVersion
from echo.weights.receiver import FIRST_PAUSE_S, MAX_PAUSE_S, RELEASE_PAUSE_S
from echo.wire.actions import Note
from echo.wire.messages import FULL, Announce, EncodedVersionOffer, Form
from tests.weights.encoded_versions import v
from tests.weights.net import Net, run


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


def retry(net: Notes) -> float:
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


def test_after_it_was_found_everything_begins_anew() -> None:
    net = full_node(base=None)
    assert [retry(net), retry(net)] == [1, 2]
    net.rooms["b"].is_full = False
    assert retry(net) == 4
    assert net.holds("b", 1)
    net.rooms["b"].is_full = True
    run(net.publish(2)[:1])
    net.settle()
    assert len(net.notes) == 2
    assert [retry(net), retry(net)] == [1, 2]


def test_a_release_is_no_reason_to_try_if_nothing_lacks_space() -> None:
    net = Notes("a", "b")
    net.attach("b", "a")
    for step in range(3):  # of which the oldest is dropped
        run(net.publish(step)[:1])
        net.settle()
    node = net.nodes["b"]
    assert not net.holds("b", 0)
    assert net.holds("b", 2)
    assert node.deadline is None


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
