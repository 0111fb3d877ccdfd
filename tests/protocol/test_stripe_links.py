"""Windows, patience and silence of a link, and how an item is divided among several."""

from __future__ import annotations

import math

import pytest

from echo.weights.link import (
    LOOP_S,
    MAX_PATIENCE_S,
    MAX_PROMISE_S,
    MAX_WINDOW_BYTES,
    MIN_PATIENCE_S,
    StripeLink,
    num_sockets,
)
from echo.weights.receiver import StripeLinks

CHUNK = 1 << 20
STALL_S = 2.0


def make(*, rtt_s: float | None = 0.1, first: int = 2 * CHUNK) -> StripeLink:
    lane = StripeLink(0, first_window_bytes=first, stall_s=STALL_S)
    lane.connect("p", rtt_s=rtt_s)
    lane.has_spare = True
    return lane


def take(lane: StripeLink, *, now: float, num_bytes: int = CHUNK) -> tuple[int, int]:
    """Take a chunk that is written at once."""
    lane.came(num_bytes, now=now)
    lane.settle(num_bytes, now=now)
    return lane.took(num_bytes, chunk_bytes=CHUNK)


def pull(lane: StripeLink, rate: float, *, num_chunks: int, at: float = 0.0) -> tuple[float, int]:
    """Take chunks at a rate; return (when the last came, credit given)."""
    credit = lane.begin(now=at)
    for _ in range(num_chunks):
        at += CHUNK / rate
        credit += take(lane, now=at)[1]
    return at, credit


@pytest.mark.parametrize("rate", [1e6, 5e7, 3e8])
@pytest.mark.parametrize("rtt_s", [0.001, 0.1])
def test_the_window_grows_to_one_and_a_half_products_and_two_chunks(
    rate: float, rtt_s: float
) -> None:
    lane = make(rtt_s=rtt_s)
    _, credit = pull(lane, rate, num_chunks=1000)
    wanted = min(1.5 * rate * (rtt_s + LOOP_S) + 2 * CHUNK, MAX_WINDOW_BYTES)
    assert lane.window == pytest.approx(wanted, rel=0.01)
    # All that has come and the window: nothing more is under way.
    assert credit + lane.unspent_bytes == 1000 * CHUNK + lane.window


def test_the_window_is_bounded() -> None:
    lane = make(rtt_s=10.0)
    pull(lane, 1e9, num_chunks=2000)
    assert lane.window == MAX_WINDOW_BYTES


def test_the_window_shrinks_with_the_rate() -> None:
    """What is asked for ahead lies in the queue of a slow uplink, before all that comes later."""
    lane = make(first=100 * CHUNK)
    at, credit = pull(lane, 1e6, num_chunks=400)
    assert lane.window == pytest.approx(1.5e6 * (0.1 + LOOP_S) + 2 * CHUNK, rel=0.01)
    assert credit + lane.unspent_bytes == 400 * CHUNK + lane.window
    pull(lane, 1e8, num_chunks=1000, at=at)
    assert lane.window == pytest.approx(1.5e8 * (0.1 + LOOP_S) + 2 * CHUNK, rel=0.01)


@pytest.mark.parametrize("rtt_s", [None, 0.1])
def test_without_a_rate_or_a_round_trip_the_window_stays(rtt_s: float | None) -> None:
    lane = make(rtt_s=rtt_s)
    pull(lane, 1e8, num_chunks=1000 if rtt_s is None else 3)
    assert lane.window == 2 * CHUNK


def test_credit_is_given_every_quarter_of_the_window() -> None:
    lane = make(rtt_s=None, first=16 * CHUNK)
    lane.begin(now=0.0)
    given = [take(lane, now=0.1) for _ in range(12)]
    assert given == [(0, 0), (0, 0), (0, 0), (4 * CHUNK, 4 * CHUNK)] * 3


def test_another_parent_begins_with_the_first_window() -> None:
    lane = make()
    pull(lane, 3e8, num_chunks=500)
    assert lane.window > 16 * CHUNK
    assert lane.longest_gap_s > 0.0
    lane.connect("q", rtt_s=0.1)
    assert lane.begin(now=0.0) == 2 * CHUNK
    assert lane.rate.bytes_per_s is None
    assert lane.longest_gap_s == 0.0


def test_patience_doubles_with_each_parent_that_was_left_until_one_shows_a_rate() -> None:
    lane = make()
    for num_failures, patience_s in ((0, 2.0), (1, 4.0), (3, 16.0), (4, 32.0), (9, 32.0)):
        lane.num_failures = num_failures
        lane.connect("q", rtt_s=0.1)
        assert lane.patience_s(CHUNK) == patience_s
    pull(lane, 1e9, num_chunks=200)
    assert lane.num_failures == 0


@pytest.mark.parametrize(
    ("rate", "rtt_s", "patience_s"),
    [
        (1e9, 0.001, MIN_PATIENCE_S),
        (1e9, 0.4, 1.6),
        (CHUNK / 2, 0.1, 8.0),
        (100.0, 0.1, MAX_PATIENCE_S),
        (1e9, None, STALL_S),
    ],
)
def test_patience(rate: float, rtt_s: float | None, patience_s: float) -> None:
    lane = make(rtt_s=rtt_s)
    assert lane.patience_s(CHUNK) == STALL_S
    at, _ = pull(lane, rate, num_chunks=2000)
    assert lane.patience_s(CHUNK) == pytest.approx(patience_s, rel=0.01)
    assert lane.deadline(CHUNK) == at + lane.patience_s(CHUNK)


@pytest.mark.parametrize(
    ("again_s", "patience_s"),
    [(1.6, 2.1), (1e9, MAX_PROMISE_S + 0.5), (0.0, 0.5), (math.nan, 0.5), (-1.0, 0.5)],
)
def test_a_parent_that_waits_has_the_time_that_it_says_within_reason(
    again_s: float, patience_s: float
) -> None:
    lane = make()
    at, _ = pull(lane, 1e9, num_chunks=200)
    lane.has_spare = True
    lane.waits(again_s=again_s)
    assert lane.is_waiting
    assert lane.patience_s(CHUNK) == pytest.approx(patience_s)
    lane.lives(now=at)
    assert lane.patience_s(CHUNK) == MIN_PATIENCE_S, "it has sent something"


def test_the_silence_of_one_stripe_of_several_is_borne_longer() -> None:
    lanes = StripeLinks(first_window_bytes=CHUNK, stall_s=STALL_S)
    lanes.resize(4)
    for lane in lanes:
        lane.connect("p", rtt_s=0.01)
        lane.has_spare = True
        pull(lane, 1e9, num_chunks=200)
        assert lane.patience_s(CHUNK) == 4 * MIN_PATIENCE_S
    lanes.resize(4, 1)
    assert lanes[0].patience_s(CHUNK) == MIN_PATIENCE_S, "connections to one parent"


def test_only_one_with_a_spare_is_left_at_once_and_not_before_the_first_chunk() -> None:
    lane = make()
    at, _ = pull(lane, 1e9, num_chunks=200)
    assert lane.patience_s(CHUNK) == MIN_PATIENCE_S
    lane.has_spare = False
    assert lane.patience_s(CHUNK) == STALL_S
    lane.has_spare = True
    lane.begin(now=at)
    assert lane.patience_s(CHUNK) == STALL_S
    lane.lives(now=at + 0.1)
    assert lane.patience_s(CHUNK) == MIN_PATIENCE_S


def test_one_that_starves_at_times_is_given_longer() -> None:
    lane = make()
    lane.begin(now=0.0)
    at = 5.0  # for the first chunk everybody waits
    for _ in range(200):
        take(lane, now=(at := at + 0.01))
    assert lane.patience_s(CHUNK) == MIN_PATIENCE_S
    take(lane, now=(at := at + 0.45))
    assert lane.patience_s(CHUNK) == pytest.approx(1.35)
    for _ in range(200):
        take(lane, now=(at := at + 0.01))
    assert lane.patience_s(CHUNK) == MIN_PATIENCE_S


def test_what_the_parent_itself_waits_for_is_no_gap() -> None:
    lane = make()
    lane.begin(now=0.0)
    take(lane, now=0.1)
    lane.rate.pause()  # as a Waiting does
    take(lane, now=3.0)
    assert lane.longest_gap_s == 0.0


def test_a_lane_that_awaits_nothing_is_never_silent() -> None:
    lane = make()
    assert lane.deadline(CHUNK) is None
    lane.begin(now=1.0)
    assert lane.deadline(CHUNK) == 1.0 + STALL_S
    lane.finish()
    assert lane.deadline(CHUNK) is None
    lane.is_asking = True
    assert lane.deadline(CHUNK) == 1.0 + STALL_S
    lane.connect(None, rtt_s=None)
    assert lane.deadline(CHUNK) is None


def test_the_second_silence_counts_with_the_first() -> None:
    lane = make()
    lane.begin(now=0.0)
    assert lane.silence_s(CHUNK, now=STALL_S) == STALL_S
    lane.is_silent, lane.progress_at = True, STALL_S
    assert lane.silence_s(CHUNK, now=2 * STALL_S) == 2 * STALL_S
    take(lane, now=2 * STALL_S, num_bytes=1)
    assert not lane.is_silent


def test_only_silent_lanes_are_named() -> None:
    lanes = StripeLinks(first_window_bytes=1, stall_s=STALL_S)
    lanes.resize(3)
    for lane in lanes:
        lane.connect(f"p{lane.index}", rtt_s=None)
        lane.begin(now=float(lane.index))
    assert lanes.deadline(CHUNK) == STALL_S
    assert [lane.index for lane in lanes.silent(CHUNK, now=1.0 + STALL_S)] == [0, 1]
    lanes.finish()
    assert lanes.silent(CHUNK, now=99.0) == []
    assert lanes.deadline(CHUNK) is None


def test_lanes_come_and_go() -> None:
    lanes = StripeLinks(first_window_bytes=1, stall_s=STALL_S)
    assert len(lanes) == 1
    lanes[0].connect("p", rtt_s=None)
    assert lanes.resize(4) == []
    assert [lane.index for lane in lanes] == [0, 1, 2, 3]
    lanes[2].connect("q", rtt_s=None)
    assert lanes.of("q") is lanes[2]
    assert lanes.resize(2) == ["q"]
    assert lanes.of("q") is None
    assert lanes[0].peer == "p"
    lanes.resize(3)
    assert lanes[2].peer is None


def test_an_item_is_divided_among_those_that_may_have_it() -> None:
    lanes = StripeLinks(first_window_bytes=1, stall_s=STALL_S)
    lanes.resize(4)
    assert [lanes.share(lane) for lane in lanes] == [(0, 4), (1, 4), (2, 4), (3, 4)]
    lanes[1].is_denied = True
    assert [lanes.share(lane) for lane in lanes] == [(0, 3), None, (1, 3), (2, 3)]
    lanes.finish()  # the next item is another
    assert lanes.share(lanes[1]) == (1, 4)
    lanes[1].is_denied = True
    lanes[1].connect("other", rtt_s=None)
    assert lanes.share(lanes[1]) == (1, 4)


def test_far_parents_get_more_connections() -> None:
    rtts = (0.0005, 0.04, 0.06, 0.1, 0.3)
    assert [num_sockets(rtt_s, most=8) for rtt_s in rtts] == [1, 1, 3, 6, 8]
    assert num_sockets(0.3, most=1) == 1


def test_a_connection_that_brings_something_speaks_for_all_to_the_same_parent() -> None:
    lanes = StripeLinks(first_window_bytes=1 << 20, stall_s=5.0)
    lanes.resize(4, 2)
    for lane in lanes:
        lane.connect(f"peer{lane.index}", rtt_s=None)
        lane.begin(now=0.0)
    lanes[2].progress_at = 4.0
    assert [lane.index for lane in lanes.silent(1024, now=6.0)] == [1, 3]
    assert [lane.index for lane in lanes.silent(1024, now=9.0)] == [0, 1, 2, 3]
