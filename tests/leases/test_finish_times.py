"""Finish times: expected lengths, speeds, and when groups will be done."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo.leases.grants.finish_times import MAX_GROUPS, FinishTimes, LengthHistory
from echo.leases.groups import LeaseRecord
from echo.wire.messages import LeaseState


def make_forecast() -> FinishTimes:
    return FinishTimes(max_tokens=1000, group_size=4, heartbeat_s=1.0)


def lease_record(worker: str = "w1", *, at: float = 0.0) -> LeaseRecord:
    return LeaseRecord(1, 0, worker, at, at)


def beat(
    forecast: FinishTimes, record: LeaseRecord, *, now: float, tokens: int, ran: float
) -> None:
    state = LeaseState(group_id=1, attempt=0, num_tokens=tokens, running_s=ran)
    forecast.on_lease_state(record, state, now=now)


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=600), st.floats(0, 1100))
def test_the_rest_is_the_mean_of_what_is_longer(seen: list[int], num_tokens: float) -> None:
    lengths = LengthHistory(max_tokens=1000)
    for length in seen:
        lengths.add(length)
    longer = [length for length in seen[-MAX_GROUPS:] if length > num_tokens]
    expected = statistics.fmean(longer) - num_tokens if longer else max(1.0, num_tokens)
    assert lengths.rest(num_tokens) == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert lengths.rest(num_tokens) > 0
    assert lengths.mean == pytest.approx(statistics.fmean(seen[-MAX_GROUPS:]))


def test_a_worker_that_says_it_took_no_time_has_a_speed_all_the_same() -> None:
    times = FinishTimes(max_tokens=100, group_size=2, heartbeat_s=1.0)
    times.made("w1", num_tokens=10, seconds=5e-324, now=0.0)
    record = LeaseRecord(0, 0, "w1", 0.0, 0.0)
    state = LeaseState(group_id=0, attempt=0, num_tokens=5, running_s=1.0)
    times.on_lease_state(record, state, now=1.0)
    assert all(map(math.isfinite, times.forecast(record, is_running=True, now=1.0)))


def test_a_speed_is_of_the_load_at_which_it_was_measured() -> None:
    forecast = make_forecast()
    assert forecast.of("w1").load == 1
    forecast.made("w1", num_tokens=100, seconds=1.0, load=4.0, now=0.0)
    assert forecast.of("w1").load == pytest.approx(4)
    forecast.made("w1", num_tokens=100, seconds=0.8, load=9.0, now=0.0)
    assert forecast.of("w1").load == pytest.approx(6.5)  # .8 s each, the older weighing less


def test_heartbeats_show_a_speed_before_the_first_group_is_done() -> None:
    forecast, record = make_forecast(), lease_record()
    beat(forecast, record, now=2.0, tokens=400, ran=2.0)
    record.num_tokens = 400
    forecast.seen("w1", [record], now=2.0)
    assert forecast.speed("w1", now=2.0) == pytest.approx(50)  # 400 tokens of 4 in 2 s


def test_an_idle_worker_grows_more_hopeful_up_to_the_fastest() -> None:
    forecast = make_forecast()
    forecast.made("slow", num_tokens=100, seconds=100.0, now=0.0)
    forecast.made("fast", num_tokens=100, seconds=1.0, now=0.0)
    forecast.refresh(["slow", "fast"])
    assert forecast.speed("slow", now=0.0) == pytest.approx(1.0)
    # Four groups' worth of its own time, which is 400 s, double it.
    assert forecast.speed("slow", now=400.0) == pytest.approx(2.0)
    assert forecast.speed("slow", now=1e6) == pytest.approx(100.0)
    assert forecast.known_speed(forecast.of("slow")) == pytest.approx(1.0)
    assert forecast.speed("fast", now=1e6) == pytest.approx(100.0)
    forecast.seen("slow", [lease_record("slow")], now=1e6)
    assert forecast.speed("slow", now=1e6) == pytest.approx(1.0), "it is working again"


def known_finish(*lengths: int, speed: float = 10.0) -> FinishTimes:
    forecast = make_forecast()
    for length in lengths:
        forecast.made("w1", num_tokens=length, seconds=length / speed, now=0.0)
    return forecast


def test_a_group_without_news_is_judged_by_its_worker() -> None:
    forecast, record = known_finish(100, 300), lease_record()
    assert forecast.forecast(record, is_running=False, now=5.0) == pytest.approx((200, 20.0))
    # Started when it was granted: 50 tokens by now.
    assert forecast.forecast(record, is_running=True, now=5.0) == pytest.approx((200, 15.0))
    assert forecast.forecast(record, is_running=True, now=15.0) == pytest.approx((300, 15.0))


def test_a_group_of_which_one_completion_runs_is_not_slow() -> None:
    forecast, record = known_finish(100, 300), lease_record()
    for second in range(1, 6):
        # All four at first, then one alone.
        beat(forecast, record, now=float(second), tokens=40 + 10 * (second - 1), ran=float(second))
    assert record.longest == pytest.approx(50)
    assert record.rate == pytest.approx(10)
    assert forecast.forecast(record, is_running=True, now=5.5) == pytest.approx((200, 14.5))


def test_a_group_that_has_stalled_shows() -> None:
    forecast, record = known_finish(100, 300), lease_record()
    beat(forecast, record, now=1.0, tokens=40, ran=1.0)
    before = forecast.forecast(record, is_running=True, now=1.0)[1]
    for second in range(2, 7):
        beat(forecast, record, now=float(second), tokens=40, ran=float(second))
    assert record.longest == pytest.approx(10)
    assert forecast.forecast(record, is_running=True, now=6.0)[1] > 20 * before


def test_a_heartbeat_out_of_turn_is_no_stall() -> None:
    forecast, record = known_finish(100, 300), lease_record()
    beat(forecast, record, now=1.0, tokens=40, ran=1.0)
    beat(forecast, record, now=1.1, tokens=40, ran=1.1)
    assert record.rate == pytest.approx(10)
