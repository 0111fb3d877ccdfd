"""Who offers and does not deliver is left within a bounded time, and the version comes from others.

The liar is no node: it is a link over which a test says what it likes.
"""

from __future__ import annotations

import pytest

from echo.weights.receiver import WAIT_STALLS
from echo.wire.messages import (
    Announce,
    Chunk,
    EncodedVersionOffer,
    Fetch,
    Form,
    Message,
    Segment,
    Waiting,
)
from tests.weights.encoded_versions import v
from tests.weights.net import Net, pieces_of, right_chunks, run

STALL_S = 0.5
BOUND_S = WAIT_STALLS * STALL_S + 1.0
DELTA = Form("delta", v(0))


class Liar:
    """A parent that has the version before, and says that it has a delta of one byte."""

    def __init__(self, net: Net, child: str, *, index: int = 0, step: int = 1) -> None:
        self.net, self.child, self.index, self.step = net, child, index, step
        net.attach(child, "liar", index, rtt_s=0.01)
        self.link = net.link(child, index) or ""
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


def with_liar(*parents: str, step: int = 1) -> tuple[Net, Liar]:
    """Return a child that holds v0, whose first parent is the liar, and the honest learner."""
    net = Net("a", "b", "liar", stall_s=STALL_S)
    net.attach("b", "a")
    run(net.publish(0)[:1])
    net.settle()
    net.set_num_links("b", ["a", *parents])
    net.settle()
    net.sent.clear()
    return net, Liar(net, "b", step=step)


def heed(net: Net, to: str = "a") -> None:
    """Give each link that has failed the learner as parent, as the session would its spare."""
    for name, link in net.failed:
        for index, each in enumerate(net.nodes[name].receiver.links):
            if each.peer is None and f"{name}{index}-" in link:
                net.attach(name, to, index, rtt_s=0.01)
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


@pytest.mark.parametrize("step", [1, 9])
def test_an_honest_parent_beside_a_liar_is_not_left(step: int) -> None:
    net, liar = with_liar("a", step=step)
    honest = net.link("b", 1)
    run(net.publish(1)[:1])
    go_on(net, liar, until_s=BOUND_S)
    assert net.holds("b", 1)
    assert net.link("b", 1) == honest
    assert not liar.is_parent


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


def test_what_only_a_lost_parent_has_offered_is_not_waited_for() -> None:
    """The learner has not come to that version, and would say that it waits."""
    net, liar = with_liar(step=9)
    net.settle()
    assert net.nodes["b"].receiver.item == (v(9), DELTA)
    net.attach("b", "a")
    assert net.nodes["b"].receiver.item is None
    net.settle()
    run(net.publish(1, 0))
    net.settle()
    assert net.holds("b", 1)
    assert net.now == 0.0
    assert not liar.is_parent


def test_all_are_forgotten_that_are_left_because_they_lack_a_version() -> None:
    net, _ = with_liar()
    net.settle()
    net.nodes["b"].receiver.end()
    for _ in range(2):
        net.perform("b", net.nodes["b"].expect(v(5), now=net.now))
        net.now += 10 * STALL_S
    assert net.failed
    net.wait(0.0)
    assert net.nodes["b"].newest_known == v(0)


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
