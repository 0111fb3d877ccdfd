from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo.weights.link import (
    LOOP_S,
    MOST_BYTES_PER_S,
    UPLINK_SAMPLE_S,
    RateEstimate,
    UplinkEstimate,
    window_bytes,
)

MIB = 1 << 20


def feed(rate: RateEstimate, num_chunks: int, *, every_s: float, start: float = 0.0) -> float:
    now = start
    for _ in range(num_chunks):
        rate.add(MIB, now=now)
        now += every_s
    return now


def test_a_burst_of_one_chunk_is_no_estimate() -> None:
    rate = RateEstimate()
    for second in range(20):
        rate.add(MIB, now=float(second))
        rate.pause()
    assert rate.bytes_per_s is None


def test_the_rate_is_that_of_busy_time_only() -> None:
    rate = RateEstimate()
    now = feed(rate, 20, every_s=0.1)
    for _ in range(5):
        rate.pause()
        now = feed(rate, 20, every_s=0.1, start=now + 100)
    assert rate.bytes_per_s == pytest.approx(10 * MIB)


def test_short_bursts_add_up() -> None:
    rate = RateEstimate()
    now = 0.0
    for _ in range(10):
        now = feed(rate, 3, every_s=0.03, start=now + 10)
        rate.pause()
    assert rate.bytes_per_s == pytest.approx(MIB / 0.03)


def test_the_estimate_follows_a_change_within_seconds() -> None:
    rate = RateEstimate()
    now = feed(rate, 50, every_s=0.1)
    feed(rate, 100, every_s=0.05, start=now)
    assert rate.bytes_per_s == pytest.approx(20 * MIB, rel=0.05)


@given(st.lists(st.tuples(st.integers(0, 1 << 30), st.floats(-1, 5), st.booleans())))
def test_whatever_the_clock_does_the_estimate_is_bounded(
    events: list[tuple[int, float, bool]],
) -> None:
    rate, now = RateEstimate(), 0.0
    for num_bytes, step_s, does_pause in events:
        now += step_s
        rate.add(num_bytes, now=now)
        if does_pause:
            rate.pause()
    assert rate.bytes_per_s is None or 0 <= rate.bytes_per_s <= MOST_BYTES_PER_S


def acknowledge(rate: UplinkEstimate, per_s: float, *, is_limit: bool, start: float) -> float:
    """Have a MiB acknowledged so often for 20 s; return when that ends."""
    for count in range(int(20 * per_s)):
        rate.add(MIB, now=start + count / per_s)
        rate.wait(0.0 if is_limit else 1.0, now=start + count / per_s)
    rate.pause()
    return start + 20


def test_what_an_uplink_has_shown_is_not_forgotten_while_it_could_send_more() -> None:
    rate = UplinkEstimate()
    now = acknowledge(rate, 10, is_limit=False, start=0.0)
    assert rate.bytes_per_s == pytest.approx(10 * MIB)
    now = acknowledge(rate, 5, is_limit=False, start=now)
    assert rate.bytes_per_s == pytest.approx(10 * MIB)
    now = acknowledge(rate, 20, is_limit=False, start=now)
    assert rate.bytes_per_s == pytest.approx(20 * MIB, rel=0.02)
    now = acknowledge(rate, 5, is_limit=True, start=now)
    acknowledge(rate, 5, is_limit=True, start=now)
    assert rate.bytes_per_s == pytest.approx(5 * MIB, rel=0.01)


def limited(rate: UplinkEstimate, per_s: float, *, start: float) -> float:
    """Have one sample come in which the uplink was the limit; return when that ends."""
    for count in range(int(UPLINK_SAMPLE_S[1] * per_s) + 1):
        rate.add(MIB, now=start + count / per_s)
        rate.wait(0.0, now=start + count / per_s)
    return start + UPLINK_SAMPLE_S[1]


def test_only_several_low_samples_in_a_row_lower_an_uplink_and_to_the_best_of_them() -> None:
    rate = UplinkEstimate()
    now = limited(rate, 10, start=0.0)
    for per_s in (4, 6, 5):
        now = limited(rate, per_s, start=now)
        assert rate.bytes_per_s == pytest.approx(10 * MIB, rel=0.01)
    now = limited(rate, 10.1, start=now)
    for per_s in (4, 6, 5):
        now = limited(rate, per_s, start=now)
        assert rate.bytes_per_s == pytest.approx(10 * MIB, rel=0.03)
    limited(rate, 3, start=now)
    assert rate.bytes_per_s == pytest.approx(6 * MIB, rel=0.05)


def test_who_waited_in_a_pause_does_not_count() -> None:
    rate = UplinkEstimate()
    rate.add(MIB, now=0.0)
    rate.wait(1.0, now=0.0)
    rate.pause()
    limited(rate, 10, start=100.0)
    assert rate.bytes_per_s == pytest.approx(10 * MIB, rel=0.01)
    assert rate.is_measured


def test_what_was_sent_before_the_clock_began_does_not_count() -> None:
    """Eight children say at nearly the same time what they have received since a second ago."""
    rate = UplinkEstimate()
    for child in range(8):
        rate.add(MIB, now=1.0 + child * 0.001, since=0.0)
    share = 8 * MIB / 8
    for second in range(2, 30):
        for child in range(8):
            now = second + child * 0.001
            rate.add(share, now=now, since=now - 1)
    assert rate.bytes_per_s == pytest.approx(8 * MIB, rel=0.02)


def test_an_uplink_shows_no_more_than_it_has_though_children_acknowledge_many_at_once() -> None:
    """Seven children with a share each of 5 MB/s say so at times of their own."""
    rate, rng = UplinkEstimate(), random.Random(3)
    share, now = 5e6 / 7, 0.0
    said = [(rng.random() * 0.7, 0) for _ in range(7)]
    best = 0.0
    while now < 120:
        now, child = min((at, child) for child, (at, _) in enumerate(said))
        lump = rng.choice((1, 2, 3)) * MIB // 4
        rate.add(lump, now=now)
        said[child] = (now + lump / share, lump)
        best = max(best, rate.bytes_per_s or 0.0)
    assert 4.7e6 < (rate.bytes_per_s or 0) < 5.4e6
    assert best < 5.6e6


def test_other_ways_of_sending_only_raise_it() -> None:
    rate = UplinkEstimate()
    rate.show(5.0)
    rate.show(3.0)
    assert rate.bytes_per_s == 5.0
    rate.show(7.0)
    assert rate.bytes_per_s == 7.0


def test_the_window_holds_what_is_under_way_and_grows_from_its_own_limit() -> None:
    bounds = {"first": 4 * MIB, "most": 64 * MIB}
    assert window_bytes(125e6, 0.1, MIB, **bounds) == int(1.5 * 125e6 * (0.1 + LOOP_S)) + 2 * MIB
    assert window_bytes(None, 0.1, MIB, **bounds) == 4 * MIB
    assert window_bytes(1e3, 0.001, MIB, **bounds) == int(1.5e3 * (0.001 + LOOP_S)) + 2 * MIB
    assert window_bytes(1e10, 1.0, MIB, **bounds) == 64 * MIB
    # A link of 1 Gbit/s and 100 ms: what a window lets through decides the next one.
    window = window_bytes(None, None, MIB, **bounds)
    for _ in range(6):
        window = window_bytes(min(window / 0.1, 125e6), 0.1, MIB, **bounds)
    assert window >= 1.3 * 12.5e6 + 2 * MIB
