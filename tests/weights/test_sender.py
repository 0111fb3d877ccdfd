"""The sender: chunks in order, to whom, and its words while it has nothing to send."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from echo.core.errors import RemoteProtocolError
from echo.weights import sender
from echo.weights.rates import RISE_S
from echo.weights.sender import FORGET_STALLS, MAX_LEAD_CHUNKS, PIN_STALLS, WAITING_PERIOD_S, Sender
from echo.weights.store.encoded import EncodedVersion
from echo.weights.store.items import Transfer
from echo.weights.store.store import ItemStore
from echo.wire.actions import Action, Send
from echo.wire.messages import (
    FULL,
    OPEN_END,
    Announce,
    Chunk,
    Credit,
    Fetch,
    Gone,
    Segment,
    Subscribe,
    Waiting,
)
from tests.roles.harness import CHUNK_BYTES, message_of
from tests.weights.encoded_versions import coded, described, encoded_of, form_on, v, weights

NUM_CHUNKS = 41
WINDOW = 1 << 20


def make(*, num_held: int = NUM_CHUNKS) -> Sender:
    """Return a node that holds the first chunks of v1, with no children."""
    store = ItemStore(keep_versions=2)
    signed, manifest = described(1)
    held = bytearray(b"\1") * num_held + bytearray(NUM_CHUNKS - num_held)
    store.images[v(1)] = Transfer(signed, manifest, memoryview(weights(1)), held, num_held)
    return Sender(store, node_id="a", stall_s=0.5)


def say(actions: Sequence[Action]) -> list[tuple[str, Any]]:
    """Return (peer, message) of what is sent."""
    return [(a.peer, message_of(a.frames)) for a in actions if isinstance(a, Send)]


def chunks(actions: Sequence[Action], peer: str) -> list[int]:
    return [index for message in messages(actions, peer) for index in message]


def messages(actions: Sequence[Action], peer: str) -> list[tuple[int, ...]]:
    """Return the chunks of each message."""
    return [(m.index, *m.others) for to, m in say(actions) if to == peer and isinstance(m, Chunk)]


def fetch(serving: Sender, peer: str, *, now: float = 0.0, **fields: Any) -> list[Action]:
    given: dict[str, Any] = {"version": v(1), "ranges": ((0, NUM_CHUNKS),), "credit_bytes": WINDOW}
    return serving.receive(peer, Fetch(**(given | fields)), now)


def credit(serving: Sender, peer: str, num_chunks: int, now: float) -> list[Action]:
    message = Credit(version=v(1), credit_bytes=num_chunks * CHUNK_BYTES)
    return serving.receive(peer, message, now)


def hold(serving: Sender, index: int, now: float = 0.0) -> list[Action]:
    """Let a chunk of v1 arrive."""
    image = serving.store.images[v(1)]
    image.has_chunk[index] = 1
    image.num_held += 1
    return serving.forward((v(1), FULL), {index: image.chunk(index)}, now)


def acknowledge(serving: Sender, peer: str, num_chunks: int, now: float, *, more: int = 0) -> None:
    """Have a child say that so many chunks have come, and that so many more may."""
    credit = Credit(
        version=v(1), credit_bytes=more * CHUNK_BYTES, taken_bytes=num_chunks * CHUNK_BYTES
    )
    serving.receive(peer, credit, now)


# --- what children show of the uplink ------------------------------------------------------------


@pytest.mark.parametrize(
    ("peers", "num_held", "more", "is_measured"),
    [
        ("bc", NUM_CHUNKS, 1, True),
        ("bc", 8, 0, False),  # they have been sent all that is here
        ("b", NUM_CHUNKS, 1, False),  # a child alone may be the limit itself
    ],
)
def test_children_that_always_find_more_here_show_all_of_the_uplink(
    peers: str, num_held: int, more: int, *, is_measured: bool
) -> None:
    serving = make(num_held=num_held)
    for peer in peers:
        fetch(serving, peer, credit_bytes=CHUNK_BYTES if more else WINDOW)
    for second in range(8):
        for peer in peers:
            acknowledge(serving, peer, 1, float(second), more=more)
    assert serving.rate.bytes_per_s is not None
    assert serving.rate.is_measured is is_measured


def test_children_wait_no_more_when_something_has_come_for_them() -> None:
    serving = make(num_held=2)
    for peer in ("b", "c"):
        fetch(serving, peer, credit_bytes=2 * CHUNK_BYTES)
    for peer in ("b", "c", "b"):
        acknowledge(serving, peer, 1, 0.0)
    hold(serving, 2, now=1.0)
    acknowledge(serving, "c", 1, 4.0)
    acknowledge(serving, "b", 1, 8.0)
    assert serving.rate.bytes_per_s is not None
    assert serving.rate.is_measured


def test_all_counts_that_a_child_has_had_since_it_came() -> None:
    serving = make()
    fetch(serving, "b", now=100.0, credit_bytes=CHUNK_BYTES)
    for second in range(110, 121):
        acknowledge(serving, "b", 1, float(second))
    assert serving.rate.bytes_per_s == pytest.approx(CHUNK_BYTES, rel=0.01)
    fetch(serving, "c", now=120.0, credit_bytes=CHUNK_BYTES)
    for second in range(121, 125):
        acknowledge(serving, "b", 1, float(second))
    acknowledge(serving, "c", 10, 125.0)
    # The sample: 14 chunks in 5 s.
    share = 1 - math.exp(-5 / RISE_S)
    expected = (1 + share * (14 / 5 - 1)) * CHUNK_BYTES
    assert serving.rate.bytes_per_s == pytest.approx(expected, rel=0.01)


# --- what goes in one message --------------------------------------------------------------------


def test_what_takes_no_time_goes_together(monkeypatch: pytest.MonkeyPatch) -> None:
    serving = make()
    alone = fetch(serving, "b")
    assert messages(alone, "b") == [(index,) for index in range(NUM_CHUNKS)]
    for _ in range(4):  # so many in no time
        fetch(serving, "b")
    together = fetch(serving, "b", credit_bytes=20 * CHUNK_BYTES)
    assert messages(together, "b") == [(*range(8),), (*range(8, 16),), (*range(16, 20),)]
    sends = [action.frames for action in together if isinstance(action, Send)]
    image = serving.store.images[v(1)]
    assert [f for _, *data in sends for f in data] == [image.chunk(index) for index in range(20)]
    monkeypatch.setattr(sender, "TOGETHER_BYTES", 2 * CHUNK_BYTES)
    two = fetch(serving, "b", credit_bytes=4 * CHUNK_BYTES)
    assert messages(two, "b") == [(0, 1), (2, 3)]


def test_on_a_slow_link_each_chunk_goes_alone() -> None:
    serving = make()
    fetch(serving, "b", credit_bytes=CHUNK_BYTES)
    for tenth in range(1, 20):
        credit(serving, "b", 1, now=tenth / 10)
    assert messages(credit(serving, "b", 3, now=2.0), "b") == [(20,), (21,), (22,)]


# --- what is asked for --------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["full", "open", "closed"])
@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"ranges": ((2, 2),)}, "bad ranges"),
        ({"ranges": ((-1, 2),)}, "bad ranges"),
        ({"ranges": ((0, 2), (1, 3))}, "bad ranges"),
    ],
)
def test_an_impossible_fetch_changes_nothing(form: str, fields: Any, match: str) -> None:
    serving = make(num_held=0)
    if form != "full":
        encoded = encoded_of(2, 1, num_pieces=1 if form == "open" else None)
        serving.store.encoded_versions[v(2), form_on(1)] = encoded
        fields = fields | {"version": v(2), "form": form_on(1)}
    fetch(serving, "c")
    with pytest.raises(RemoteProtocolError, match=match):
        fetch(serving, "c", **fields)
    assert chunks(hold(serving, 0), "c") == [0]


def test_an_image_and_a_whole_encoded_have_an_end() -> None:
    serving = make()
    with pytest.raises(RemoteProtocolError, match="bad ranges"):
        fetch(serving, "c", ranges=((0, OPEN_END),))
    encoded = serving.store.encoded_versions[v(2), form_on(1)] = encoded_of(2, 1)
    beyond = ((0, encoded.num_chunks + 1),)
    with pytest.raises(RemoteProtocolError, match="bad ranges"):
        fetch(serving, "c", version=v(2), form=form_on(1), ranges=beyond)


def test_no_more_is_sent_at_once_than_an_honest_child_would_ask_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("echo.weights.sender.MAX_WINDOW_BYTES", 4 * CHUNK_BYTES)
    serving = make()
    assert len(chunks(fetch(serving, "greedy", credit_bytes=1 << 50), "greedy")) == 4
    assert len(chunks(credit(serving, "greedy", 1 << 30, 1.0), "greedy")) == 4


# --- siblings ------------------------------------------------------------------------------------


def test_a_child_is_no_more_than_four_chunks_ahead_of_the_slowest() -> None:
    serving = make()
    assert len(chunks(fetch(serving, "slow", credit_bytes=1), "slow")) == 1
    actions = fetch(serving, "fast")
    # It began where the slow one was, and so may be four further than that.
    assert len(chunks(actions, "fast")) == MAX_LEAD_CHUNKS
    for now in range(1, 5):
        actions = credit(serving, "slow", 1, float(now))
        assert len(chunks(actions, "slow")) == 1
        assert len(chunks(actions, "fast")) == 1


def test_the_fast_one_is_told_to_wait_and_is_not_silent() -> None:
    serving = make()
    fetch(serving, "slow", credit_bytes=1)
    fetch(serving, "fast")
    for tick in range(1, 20):
        now = 0.21 * tick
        assert serving.deadline is not None
        assert serving.deadline <= now
        told = say(serving.expire(now))
        assert ("fast", waiting(1)) in told
        assert "slow" not in dict(told)


@pytest.mark.parametrize(("num_taken", "patience_s"), [(20, 0.5), (1, 5.0)])
def test_one_that_is_dead_is_not_waited_for(num_taken: int, patience_s: float) -> None:
    """Not for long if it was fast; one that is slow may be alive."""
    serving = make()
    fetch(serving, "dead", credit_bytes=num_taken * CHUNK_BYTES)
    num_sent = len(chunks(fetch(serving, "fast"), "fast"))
    for tick in range(1, int(patience_s / 0.21)):
        num_sent += len(chunks(serving.expire(0.21 * tick), "fast"))
    assert num_sent < NUM_CHUNKS
    for tick in range(int(patience_s / 0.21), int(patience_s / 0.21) + 8):
        num_sent += len(chunks(serving.expire(0.21 * tick), "fast"))
    assert num_sent == NUM_CHUNKS


def take_for(serving: Sender, seconds: float, *, now: float, every: dict[str, int]) -> list[int]:
    """Let each child take a chunk every so many ticks, without end; count what they are sent."""
    num_sent = dict.fromkeys(every, 0)
    for tick in range(1, int(seconds / 0.25) + 1):
        at = now + 0.25 * tick
        actions = serving.expire(at)
        for peer, ticks in every.items():
            if tick % ticks == 0:
                actions += credit(serving, peer, 1, at)
        for peer in every:
            num_sent[peer] += len(chunks(actions, peer))
            serving.children[peer].wanted.extend([0] * len(chunks(actions, peer)))
    return list(num_sent.values())


def test_one_that_stalls_after_a_good_minute_is_waited_for_only_for_a_while() -> None:
    """As one whose disk has no more memory to hide behind."""
    serving = make()
    fetch(serving, "b", credit_bytes=1)
    fetch(serving, "c", credit_bytes=1)
    assert min(take_for(serving, 60.0, now=0.0, every={"b": 1, "c": 1})) >= 239
    take_for(serving, 20.0, now=60.0, every={"b": 1, "c": 4})
    slow_apart = take_for(serving, 10.0, now=80.0, every={"b": 1, "c": 4})
    assert slow_apart == [40, 10]
    # It is as good as its siblings again soon after it takes as much as they do.
    take_for(serving, 20.0, now=90.0, every={"b": 1, "c": 1})
    serving.children["b"].lead = serving.children["c"].lead
    assert take_for(serving, 4.0, now=110.0, every={"b": 1, "c": 8})[0] <= 2 + MAX_LEAD_CHUNKS


def test_one_that_was_slow_with_the_version_before_is_not_waited_for() -> None:
    serving = make()
    fetch(serving, "slow", credit_bytes=1)
    fetch(serving, "fast", credit_bytes=1)
    take_for(serving, 20.0, now=0.0, every={"slow": 8, "fast": 1})
    for peer in ("slow", "fast"):
        fetch(serving, peer, now=21.0, credit_bytes=1)
    assert take_for(serving, 4.0, now=21.0, every={"slow": 8, "fast": 1})[1] >= 15


def test_one_that_waits_for_this_node_holds_nobody_up() -> None:
    serving = make(num_held=0)
    image = serving.store.images[v(1)]
    for index in range(1, NUM_CHUNKS):
        image.has_chunk[index] = 1
    fetch(serving, "lacking", ranges=((0, 2),))
    sent = chunks(fetch(serving, "other", ranges=((2, NUM_CHUNKS),)), "other")
    assert sent == list(range(2, NUM_CHUNKS))


def test_what_siblings_of_another_item_take_does_not_matter() -> None:
    serving = make()
    serving.store.encoded_versions[v(2), form_on(1)] = encoded_of(2, 1)
    fetch(serving, "slow", version=v(2), form=form_on(1), ranges=((0, 4),), credit_bytes=1)
    assert len(chunks(fetch(serving, "fast"), "fast")) == NUM_CHUNKS


# --- waiting -------------------------------------------------------------------------------------


def waiting(step: int, *, again_s: float = WAITING_PERIOD_S) -> Waiting:
    return Waiting(version=v(step), again_s=again_s)


def test_waiting_is_repeated_while_this_node_waits_itself() -> None:
    """After twice as long each time, as the child was told before, up to a bound."""
    serving = make(num_held=3)
    fetch(serving, "c")
    told_at = 0.0
    for promised_s in (0.2, 0.4, 0.8, 1.6, 1.6, 1.6):
        assert serving.deadline is not None
        assert say(serving.expire(serving.deadline - 0.001)) == []
        told_at = serving.deadline
        assert say(serving.expire(told_at)) == [("c", waiting(1, again_s=promised_s))]
        assert serving.deadline == pytest.approx(told_at + promised_s)
    assert chunks(hold(serving, 3, told_at + 1.0), "c") == [3]
    assert serving.deadline == pytest.approx(told_at + 1.0 + WAITING_PERIOD_S)


def test_one_that_is_held_back_after_a_long_wait_is_looked_after_soon() -> None:
    """It may have had promises of long silences before the chunk came for which it is held."""
    serving = make(num_held=MAX_LEAD_CHUNKS)
    fetch(serving, "slow", credit_bytes=1)
    assert len(chunks(fetch(serving, "fast"), "fast")) == MAX_LEAD_CHUNKS
    for _ in range(3):
        assert serving.deadline is not None
        now = serving.deadline
        assert say(serving.expire(now))[0][0] == "fast"
    assert serving.deadline == pytest.approx(now + 4 * WAITING_PERIOD_S)
    assert chunks(hold(serving, MAX_LEAD_CHUNKS, now), "fast") == []
    assert serving.children["fast"].held_at == now
    assert serving.deadline == pytest.approx(now + WAITING_PERIOD_S)


def test_a_child_without_credit_is_not_told_to_wait() -> None:
    serving = make(num_held=3)
    fetch(serving, "c", credit_bytes=1)
    assert serving.deadline is None
    assert serving.expire(9.0) == []


def test_one_that_asked_for_what_is_not_known_yet_is_told_so_until_it_is() -> None:
    serving = make()
    assert say(fetch(serving, "c", version=v(2))) == [("c", waiting(2))]
    for tick in range(1, 5):
        assert say(serving.expire(0.21 * tick)) == [("c", waiting(2))]
    encoded = serving.store.encoded_versions[v(2), form_on(1)] = encoded_of(2, 1)
    # It turns out to be known in another form only.
    assert say(serving.expire(2.0)) == [("c", Gone(version=v(2)))]
    assert serving.deadline is None
    ranges = ((0, encoded.num_chunks),)
    sent = fetch(serving, "c", version=v(2), form=form_on(1), ranges=ranges, now=2.0)
    assert len(chunks(sent, "c")) == encoded.num_chunks


def test_a_child_that_needs_not_answer_is_not_forgotten() -> None:
    serving = make()
    serving.receive("c", Subscribe(newest=v(0)), 0.0)
    fetch(serving, "c")
    # Another form of the version that it has taken meanwhile.
    serving.store.encoded_versions[v(1), form_on(None)] = encoded_of(1, None)
    assert isinstance(say(serving.announce(now=1.0))[0][1], Announce)
    serving.forget_silent(1000.0)
    assert "c" in serving.children


def test_a_child_pins_what_it_takes_until_it_has_been_silent_for_long() -> None:
    serving = make()
    fetch(serving, "c", credit_bytes=1)
    assert serving.pinned(PIN_STALLS * serving.stall_s) == {(v(1), FULL)}
    silent_at = PIN_STALLS * serving.stall_s + 0.1
    assert serving.pinned(silent_at) == set()
    credit(serving, "c", 1, silent_at)
    assert serving.pinned(silent_at) == {(v(1), FULL)}


def test_what_is_not_whole_or_has_been_taken_is_not_pinned() -> None:
    serving = make(num_held=3)
    fetch(serving, "c")
    assert serving.pinned(0.0) == set()
    serving = make()
    fetch(serving, "c")
    assert serving.pinned(0.0) == set()


def test_a_child_that_does_not_react_to_what_is_announced_is_forgotten() -> None:
    serving = make()
    for peer in ("silent", "alive"):
        serving.receive(peer, Subscribe(newest=v(0)), 0.0)
    fetch(serving, "alive", now=1.0)
    serving.forget_silent(FORGET_STALLS * serving.stall_s)
    assert sorted(serving.children) == ["alive", "silent"]
    serving.forget_silent(FORGET_STALLS * serving.stall_s + 0.1)
    assert sorted(serving.children) == ["alive"]


# --- encoded versions -----------------------------------------------------------------------------


def grown(serving: Sender, pieces: slice) -> tuple[EncodedVersion, list[Action]]:
    """Add segments of v2 as a delta to what the node has of it."""
    item = (v(2), form_on(1))
    encoded = serving.store.encoded_versions.setdefault(item, EncodedVersion(*item))
    actions = []
    for table, frame, payload in coded(2, 1)[pieces]:
        encoded.add(table, frame, payload)
        actions += serving.extend(item, 0.0)
    return encoded, actions


def test_an_open_fetch_takes_each_segment_as_it_comes() -> None:
    serving = make()
    encoded, _ = grown(serving, slice(0, 1))
    actions = fetch(serving, "c", version=v(2), form=form_on(1), ranges=((0, OPEN_END),))
    _, more = grown(serving, slice(1, None))
    actions += more
    assert sorted(chunks(actions, "c")) == list(range(encoded.num_chunks))
    segments = [m.index for _, m in say(actions) if isinstance(m, Segment)]
    assert segments == list(range(encoded.num_segments))
    kinds = [type(m) for _, m in say(actions) if isinstance(m, Segment | Chunk)]
    assert kinds[0] is Segment
    assert serving.children["c"].fetching is None


def test_a_child_that_knows_more_of_an_encoded_gets_only_what_it_asked_for() -> None:
    """As after a restart of this node."""
    whole = encoded_of(2, 1)
    end = whole.num_chunks
    for known, asked in (
        (2, ((end - 2, OPEN_END),)),
        (3, ((0, 1), (2, end))),
    ):
        serving = make()
        grown(serving, slice(0, 1))
        fields: dict[str, Any] = {"version": v(2), "form": form_on(1)}
        actions = fetch(serving, "c", ranges=asked, num_segments=known, **fields)
        _, more = grown(serving, slice(1, None))
        actions += more
        assert chunks(actions, "c") == [i for a, b in asked for i in range(a, min(b, end))]
        assert [m.index for _, m in say(actions) if isinstance(m, Segment)] == [2][known - 2 :]
