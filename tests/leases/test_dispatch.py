"""Dispatch of groups: copies that pay, expected lengths and speeds."""

from __future__ import annotations

import math
import random
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo.core.records import Granted
from echo.leases.grants.dispatch import (
    Helper,
    Load,
    Newcomer,
    RunningGroup,
    by_finish,
    even_out,
    hedges,
    moves,
)
from echo.leases.grants.finish_times import MAX_LENGTHS, FinishTimes, LengthHistory
from echo.leases.groups import LeaseRecord
from echo.leases.held import GroupState
from echo.leases.open_groups import AppendRecord
from echo.leases.throughput import Throughput
from echo.leases.usefulness import ALONE_S, AWAY_S, Usefulness
from echo.wire.messages import LeaseState
from tests.leases.test_scheduler import make_granting, make_worker
from tests.promises.world import Rated, World


def load(name: str, *, speed: float, places: int = 2, held: int = 0, most: int = 10**6) -> Load:
    """Return a worker that needs 1 / speed seconds for a group."""
    made = Load(name, 2 * places, 0, most, most, 1 / speed, 1 / speed, [0.0] * places)
    for _ in range(held):
        made.add()
    return made


def granted(loads: list[Load], num_groups: int) -> Counter[str]:
    for each in loads:
        each.most_promised = each.most_soon = min(each.most_promised, num_groups)
    return Counter(by_finish(loads, num_promised=0))


def test_a_worker_with_older_weights_gets_only_what_fits_its_version() -> None:
    loads = [load("old", speed=9.0, most=2), load("new", speed=1.0, most=5)]
    assert Counter(by_finish(loads, num_promised=0)) == {"old": 2, "new": 3}


def test_an_equal_that_is_ready_a_little_later_is_left_its_share() -> None:
    def shares(later_s: float, speed: float = 1.0) -> list[int]:
        first, second = load("first", speed=1.0, places=16), load("second", speed=speed, places=16)
        second.free_at = [later_s] * 16
        given_to = granted([first, second], 16)
        return [given_to["first"], given_to["second"]]

    assert shares(0.0) == [8, 8]
    assert shares(0.1) == [9, 7]
    assert shares(0.5) == [12, 4]
    # It would have begun when the first one has done it all.
    assert shares(2.0) == [16, 0]
    assert shares(0.0, speed=0.5) == [16, 0], "a full engine is still faster than this one"


workers = st.lists(
    st.tuples(
        st.floats(0.01, 100.0),  # speed
        st.integers(1, 4),  # places
        st.integers(0, 6),  # groups held
        st.integers(0, 30),  # most promised
    ),
    min_size=1,
    max_size=6,
)


@given(workers, st.integers(0, 20))
def test_admission_and_capacity_are_never_passed(
    drawn: list[tuple[float, int, int, int]], num_promised: int
) -> None:
    def make() -> list[Load]:
        return [
            load(f"w{n}", speed=speed, places=places, held=held, most=most)
            for n, (speed, places, held, most) in enumerate(drawn)
        ]

    before = {each.node_id: each for each in make()}
    given_to = by_finish(make(), num_promised=num_promised)
    for index, name in enumerate(given_to):
        assert num_promised + index < before[name].most_promised
    for name, count in Counter(given_to).items():
        assert before[name].num_held + count <= before[name].capacity


@given(workers)
def test_whoever_would_be_done_first_is_given_the_first_group(
    drawn: list[tuple[float, int, int, int]],
) -> None:
    loads = [
        load(f"w{n}", speed=speed, places=places, held=held)
        for n, (speed, places, held, _) in enumerate(drawn)
    ]
    first = min(loads, key=lambda each: (each.finish_at, each.share, each.node_id))
    has_space = first.has_space
    for each in loads:
        each.most_promised = each.most_soon = 1
    assert by_finish(loads, num_promised=0) == ([first.node_id] if has_space else [])


# --- on real nodes, with virtual time -------------------------------------------------------------

FAST, BOTH = {"fast": 100.0}, {"fast": 100.0, "slow": 10.0}
MEDIAN_TOKENS, MAX_TOKENS = 60, 1200
WARM_UP, NUM_STEPS, LIMIT_S = 4, 16, 300.0


def equal_shares(loads: Sequence[Load], *, num_promised: int) -> list[str]:
    """Give each group to the worker with the smallest share of its places in use: what to beat."""
    given_to: list[str] = []
    while True:
        able = [w for w in loads if w.has_space and w.most_promised > num_promised + len(given_to)]
        if not able:
            return given_to
        chosen = min(able, key=lambda each: (each.share, each.node_id))
        chosen.add()
        given_to.append(chosen.node_id)


def play(
    speeds: dict[str, float],
    *,
    max_staleness: int = 0,
    seed: int,
    by_speed: bool = True,
    hedge_factor: float | bool = 2.0,
    hiccups: float = 0.0,
    apart_s: float = 0.0,
    **pace: Any,
) -> tuple[World, float]:
    """Train with workers of these speeds, on groups whose lengths have a heavy tail.

    Args:
        speeds: of a group in a full engine, tokens per second.
        max_staleness: the bound.
        seed: of lengths and hiccups.
        by_speed: whether the faster get more groups, as they do.
        hedge_factor: as in the configuration.
        hiccups: share of the leases with which their workers are 20 times slower than usual.
        apart_s: how much later each worker installs a version than the one before it.
        pace: see `Rated`.

    Returns:
        the world; the mean seconds of a step after the first ones, infinite if there is none.
    """

    def slowdown_of(worker: str, key: tuple[int, int]) -> float:
        return 20.0 if random.Random(f"{seed}/{worker}/{key}").random() < hiccups else 1.0

    def length_of(group: int) -> int:
        drawn = random.Random(f"{seed}/{group}").lognormvariate(0.0, 1.0)
        return min(MAX_TOKENS, max(1, round(MEDIAN_TOKENS * drawn)))

    with (
        tempfile.TemporaryDirectory() as directory,
        pytest.MonkeyPatch.context() as patch,
        closing(
            World(
                Path(directory),
                seed=seed,
                train_s=0.5,
                image_bytes=4096,
                sampling={"max_completion_tokens": MAX_TOKENS},
                sync={"max_staleness": max_staleness},
                batch={"groups_per_step": 16},
                leases={"hedge_factor": hedge_factor},
                network={"lease_timeout_s": 60.0, "heartbeat_s": 1.0},
                checkpoint={"interval_steps": 1000},
            )
        ) as world,
    ):
        if not by_speed:
            patch.setattr("echo.leases.grants.rounds.by_finish", equal_shares)
        world.length_of = length_of
        world.learner()
        for place, (name, tokens_per_s) in enumerate(speeds.items()):
            rated = Rated(
                tokens_per_s=tokens_per_s,
                install_s=apart_s * place,
                slowdown_of=partial(slowdown_of, name),
                **pace,
            )
            world.worker(name, rated=rated)
        world.run_until(lambda: world.step >= WARM_UP or world.now > LIMIT_S, within_s=1e6)
        before, began = world.step, world.now
        world.run_until(lambda: world.step >= NUM_STEPS or world.now > LIMIT_S, within_s=1e6)
        world.audit()
    num_steps = world.step - before
    return world, (world.now - began) / num_steps if num_steps else math.inf


def mean_step(speeds: dict[str, float], *, by_speed: bool = True, **numbers: Any) -> float:
    hedge_factor = 2.0 if by_speed else False
    return play(speeds, by_speed=by_speed, hedge_factor=hedge_factor, **numbers)[1]


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [0, pytest.param(2, marks=pytest.mark.matrix)])
def test_a_worker_ten_times_slower_delays_no_batch(max_staleness: int) -> None:
    alone = mean_step(FAST, max_staleness=max_staleness, seed=3)
    both = mean_step(BOTH, max_staleness=max_staleness, seed=3)
    assert both <= 1.08 * alone, "the slow worker makes it worse than none"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.matrix)])
@pytest.mark.parametrize(
    ("places", "alone", "at_most"),
    [
        # Engines with places for a whole batch, slower the more is in them: a full one by 4 or 2.
        (16, 4.0, 0.95),
        pytest.param(16, 2.0, 0.98, marks=pytest.mark.matrix),
        # One that is not: using the others costs no more than the instants until they are ready.
        pytest.param(16, 1.0, 1.02, marks=pytest.mark.matrix),
        # Engines that a batch fills all.
        pytest.param(4, 2.0, 1.01, marks=pytest.mark.matrix),
    ],
)
def test_equal_workers_share_a_batch_though_they_install_it_one_after_the_other(
    places: int, alone: float, at_most: float, seed: int
) -> None:
    def seconds(*, by_speed: bool) -> float:
        return mean_step(
            {f"w{number}": 100.0 for number in range(4)},
            by_speed=by_speed,
            max_staleness=0,
            seed=seed,
            places=places,
            alone=alone,
            apart_s=0.1,
        )

    assert seconds(by_speed=True) <= at_most * seconds(by_speed=False)


@pytest.mark.matrix
@pytest.mark.parametrize(("speed", "at_most"), [(10.0, 1.05), (50.0, 1.15)])
def test_a_slower_worker_delays_no_batch_that_the_other_has_room_for(
    speed: float, at_most: float
) -> None:
    def seconds(speeds: dict[str, float]) -> float:
        return mean_step(speeds, max_staleness=0, seed=3, places=16, alone=2.0, apart_s=0.1)

    assert seconds({"fast": 100.0, "slow": speed}) <= at_most * seconds({"fast": 100.0})


@pytest.mark.matrix
def test_with_equal_shares_it_does() -> None:
    alone = mean_step(FAST, by_speed=False, max_staleness=0, seed=3)
    both = mean_step(BOTH, by_speed=False, max_staleness=0, seed=3)
    # Moves and copies for their age, which remain, spare it some of that.
    assert both > 1.5 * alone, "there is nothing to improve on: the test above shows nothing"


# --- when groups will be done ---------------------------------------------------------------------


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
    longer = [length for length in seen[-MAX_LENGTHS:] if length > num_tokens]
    expected = statistics.fmean(longer) - num_tokens if longer else max(1.0, num_tokens)
    assert lengths.rest(num_tokens) == pytest.approx(expected, rel=1e-6, abs=1e-6)
    assert lengths.rest(num_tokens) > 0
    assert lengths.mean == pytest.approx(statistics.fmean(seen[-MAX_LENGTHS:]))


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


# --- copies ---------------------------------------------------------------------------------------


def running(group_id: int, *, done_at: float, num_tokens: float = 10.0) -> RunningGroup:
    return RunningGroup(LeaseRecord(group_id, 0, "slow", 0.0, 0.0), done_at, num_tokens)


def chosen(
    groups: list[RunningGroup],
    *helpers: Helper,
    factor: float | None = 2.0,
    also: str = "",
    now: float = 0.0,
) -> list[tuple[int, str]]:
    """Return what is copied to whom, of groups that "slow" holds, and `also` another worker."""
    holders = {g.record.group_id: ["slow", also] if also else ["slow"] for g in groups}
    picked = hedges(groups, helpers, holders=holders, factor=factor, now=now)
    return [(record.group_id, name) for record, name in picked]


def test_the_last_groups_go_to_the_fastest() -> None:
    groups = [running(n, done_at=float(10 + n)) for n in range(4)]
    helpers = Helper("b", 5.0, 1), Helper("a", 10.0, 2)
    assert chosen(groups, *helpers) == [(3, "a"), (2, "a"), (1, "b")]


def test_nobody_copies_its_own_group() -> None:
    assert chosen([running(0, done_at=1e9)], Helper("slow", 1.0, 3)) == []


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(1, 100)), max_size=8),
    st.lists(st.tuples(st.floats(0.1, 100), st.integers(0, 3)), max_size=4),
    st.floats(1, 5),
)
def test_copies_pay_and_fit(
    groups: list[tuple[float, float]], helpers: list[tuple[float, int]], factor: float
) -> None:
    made = [running(n, done_at=at, num_tokens=t) for n, (at, t) in enumerate(groups)]
    names = {f"h{n}": speed for n, (speed, _) in enumerate(helpers)}
    picked = chosen(
        made, *(Helper(f"h{n}", *each) for n, each in enumerate(helpers)), factor=factor
    )
    assert len({group for group, _ in picked}) == len(picked)
    for group, name in picked:
        done_at, num_tokens = groups[group]
        assert done_at >= factor * num_tokens / names[name]
    for n, (_, num_places) in enumerate(helpers):
        assert sum(name == f"h{n}" for _, name in picked) <= num_places


def test_a_group_that_is_old_is_copied_whatever_its_holders_say() -> None:
    group = running(0, done_at=1e6)  # granted at 0
    soon = RunningGroup(group.record, 80.0, 10.0)
    helper = partial(Helper, group_s=10.0, num_places=1)

    def copied(now: float, **how: Any) -> bool:
        return bool(chosen([soon], helper("fast", 1.0), now=now, **how))

    assert not copied(80.0)  # 4 x 2 x 10 s
    assert copied(80.1)
    assert not copied(100.0, factor=3.0)
    assert copied(121.0, factor=3.0)
    assert copied(80.1, factor=None), "with hedging switched off, too"
    assert copied(80.1, also="accomplice"), "whoever else has it"
    assert not copied(80.1, also="fast")
    unmeasured = helper("new", None)
    assert chosen([soon], unmeasured, now=80.1) == [(0, "new")]
    assert chosen([group], unmeasured, now=79.0) == [], "late alone is not enough for it"


def test_a_holder_that_claims_to_be_the_fastest_keeps_no_other_from_its_groups() -> None:
    helpers = Helper("slow", 1e6, 9, 0.1), Helper("honest", 1.0, 1, 10.0)
    assert chosen([running(0, done_at=1e3)], *helpers, now=81.0) == [(0, "honest")]


# --- moves ----------------------------------------------------------------------------------------


@given(
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 30), min_size=1),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), min_size=1, max_size=3),
)
def test_newcomers_are_given_as_many_groups_as_the_others_have(
    held: dict[str, int], joining: list[tuple[int, int]]
) -> None:
    records = {
        name: [LeaseRecord(n, 0, name, 0.0, 0.0) for n in range(number)]
        for name, number in held.items()
    }
    newcomers = [Newcomer(f"n{n}", *each) for n, each in enumerate(joining)]
    moved = even_out(records, newcomers)
    assert len({(record.worker_id, record.group_id) for record, _ in moved}) == len(moved)
    left = {
        name: number - sum(r.worker_id == name for r, _ in moved) for name, number in held.items()
    }
    for newcomer, (before, capacity) in zip(newcomers, joining, strict=True):
        given_to = sum(name == newcomer.node_id for _, name in moved)
        assert newcomer.num_held == before + given_to
        assert not given_to or newcomer.num_held <= capacity
        if newcomer.num_held < capacity:
            assert max(left.values()) <= newcomer.num_held + 1
        if given_to:
            assert newcomer.num_held <= max(left.values()) + 1
    for name, records_of in records.items():
        last = [record for record, _ in moved if record.worker_id == name]
        assert last == records_of[len(records_of) - len(last) :][::-1], "the last one moves first"


def test_a_lease_moves_where_that_saves_more_than_a_group() -> None:
    def moved(*done_at: float, free: int = 4, least_gain_s: float = 0.0) -> list[int]:
        helper = load("idle", speed=1.0, places=4, held=4 - free)
        groups = [running(n, done_at=at) for n, at in enumerate(done_at)]
        return [r.group_id for r, _ in moves(groups, [helper], least_gain_s=least_gain_s)]

    # A group takes the idle worker 1 s alone, up to 2 s beside others.
    assert moved(9.0, 10.0) == [1, 0]
    assert moved(3.2) == []
    assert moved(3.3) == [0]
    assert moved(9.0, 10.0, free=1) == [1]
    assert moved(9.0, 10.0, least_gain_s=8.0) == [1]
    assert moves([running(0, done_at=99.0)], [load("slow", speed=1.0)], least_gain_s=0.0) == []


# --- in the learner's role ---------------------------------------------------------------------


def test_a_copy_is_recorded_counts_once_and_has_the_seed_of_its_original() -> None:
    granting = make_granting(of={"max_staleness": 0, "hedge_factor": 2.0})
    slow, fast = make_worker("slow", (2, 3), 4), make_worker("fast", (2, 3), 4)
    for name, seconds in (("slow", 100.0), ("fast", 1.0)):
        granting.finish_times.made(name, num_tokens=10, seconds=seconds, now=0.0)
    granting.make_round([slow], now=0.0)
    assert granting.leases.num_running == 4
    records, leases = granting.make_round([slow, fast], now=1.0)
    assert granting.leases.num_running == 4, "a group that two workers run counts once"
    assert list(leases) == ["fast"]
    grants = [each.record for each in records if isinstance(each, AppendRecord)]
    assert [(g.group, g.attempt, g.copy_of) for g in grants if isinstance(g, Granted)] == [
        (group_id, 1, 0) for group_id in (12, 13, 14, 15)
    ]
    for lease in leases["fast"]:
        assert lease.seed == granting.prompts.lease(lease.group_id, 0).seed
    assert granting.make_round([slow, fast], now=2.0) == ([], {}), "each has one copy at most"
    assert granting.counters["hedges/issued"] == 4


@pytest.mark.parametrize(
    "change", ["factor", "batch", "stale helper", "unmeasured helper", "helper in its first group"]
)
def test_nothing_is_copied_without_need(change: str) -> None:
    factor = None if change == "factor" else 1.5
    of: dict[str, Any] = {"max_staleness": 1, "hedge_factor": factor}
    granting = make_granting(of=of)
    old = change == "stale helper"
    # All that admission allows is running, or, where the next batch is there, half of it.
    num_running = 4 if change == "batch" else 8
    slow = make_worker("slow", (2, 3), num_running)
    fast = make_worker("fast", (1, 2) if old else (2, 3), 8)
    granting.finish_times.made("slow", num_tokens=10, seconds=100.0, now=0.0)
    if change == "helper in its first group":
        # Its sampling alone: how long its rewards take has not been seen.
        sampled = LeaseRecord(99, 0, "fast", 0.0, 0.0, running_s=0.1, num_tokens=20)
        granting.finish_times.seen("fast", [sampled], now=0.0)
        assert granting.finish_times.speed("fast", now=0.0) == pytest.approx(100)
    elif change != "unmeasured helper":
        granting.finish_times.made("fast", num_tokens=10, seconds=1.0, now=0.0)
    granting.make_round([slow], now=0.0)
    if change == "batch":
        granting.buffer.num_unspent = lambda *, step: 4  # type: ignore[method-assign]
    _, leases = granting.make_round([slow, fast], now=1.0)
    assert leases == {}


@pytest.mark.slow
def test_copies_save_a_batch_from_a_worker_that_is_suddenly_slow() -> None:
    fleet = {"a": 100.0, "b": 100.0, "slow": 10.0}
    _, without_s = play(fleet, seed=4, hiccups=0.03, hedge_factor=False)
    world, hedged_s = play(fleet, seed=4, hiccups=0.03)
    assert hedged_s < min(0.75 * without_s, 10.0)
    num_issued, num_won, num_cancelled = (
        world.count("learner", f"{name}")
        for name in ("hedges/issued", "hedges/won", "leases_cancelled")
    )
    assert 0 < num_won <= num_issued
    # Every copy makes one of its group's leases a loser; all of them were told, and stopped.
    held = [group for name in fleet for group in world.leased(name)]
    assert num_cancelled >= num_issued - (len(held) - len(set(held)))
    for name in fleet:
        assert not world.node(name).role.held.of(GroupState.UNWANTED)


# --- what a worker could make ---------------------------------------------------------------------


def look(capability: Throughput, *, load: float, rate: float, seconds: int, start: int = 0) -> int:
    """Let time pass at so many tokens per second; return the instant."""
    for second in range(start + 1, start + seconds + 1):
        capability.look(load=load, tokens_sampled=round(rate * second), now=float(second))
    return start + seconds


def test_half_loaded_it_is_taken_for_twice_as_fast() -> None:
    capability = Throughput(tokens_sampled=0, now=0.0)
    look(capability, load=0.5, rate=25.0, seconds=100)
    assert capability.tokens_per_s == pytest.approx(50.0)


def test_nothing_is_known_before_some_tokens_have_come() -> None:
    capability = Throughput(tokens_sampled=0, now=0.0)
    assert capability.tokens_per_s is None
    look(capability, load=1.0, rate=50.0, seconds=2)
    assert capability.tokens_per_s is None
    capability.look(load=1.0, tokens_sampled=150, now=3.0)
    assert capability.tokens_per_s is not None


def test_in_the_middle_of_a_group_its_rate_is_that_of_the_groups_that_have_ended() -> None:
    capability = Throughput(tokens_sampled=0, now=0.0)
    rates = []
    for second in range(1, 160):  # groups of 30 s and 3000 tokens
        capability.look(load=1.0, tokens_sampled=3000 * (second // 30), now=float(second))
        rates.append(capability.tokens_per_s)
    assert rates[88:] == [None] + [pytest.approx(100.0)] * 70
    # In 90 s without a report, 60 s more than ever before, it would have made two groups.
    capability.look(load=1.0, tokens_sampled=15_000, now=240.0)
    slower = capability.tokens_per_s
    assert slower is not None
    assert 60.0 < slower < 75.0


def test_a_single_report_is_an_early_estimate() -> None:
    capability = Throughput(tokens_sampled=0, now=0.0)
    capability.look(load=0.5, tokens_sampled=0, now=20.0)
    assert capability.early_tokens_per_s is None
    capability.look(load=0.5, tokens_sampled=3000, now=60.0)
    assert capability.early_tokens_per_s == pytest.approx(100.0)
    assert capability.tokens_per_s is None


def test_what_was_sampled_before_the_first_report_is_no_rate() -> None:
    # A worker that has long been at work joins a learner that has just come back.
    capability = Throughput(tokens_sampled=None, now=0.0)
    capability.look(load=0.0, tokens_sampled=None, now=1.0)
    for second in range(2, 40):
        capability.look(load=1.0, tokens_sampled=10**6 + 50 * second, now=float(second))
    assert capability.tokens_per_s == pytest.approx(50.0)


# --- from whom something can be learned -----------------------------------------------------------

B = 4
MAX_BARREN = 20 * B


def make_usefulness() -> Usefulness:
    return Usefulness(max_zero_signal_groups=MAX_BARREN, groups_per_step=B)


def deliver_groups(
    counts: Usefulness,
    rates: Mapping[str, float],
    share: Callable[[str, int], float],
    *,
    num_groups: int,
    seed: int,
) -> list[tuple[int, str]]:
    """Deliver groups of workers with these speeds; return (group, text) of everything told.

    Args:
        counts: of whom.
        rates: groups per second by worker.
        share: (worker, group) -> probability that the group is useful.
        num_groups: delivered by all together.
        seed: of the chance.
    """
    chance, told = random.Random(seed), []
    for number in range(num_groups):
        present = {name: rate for name, rate in rates.items() if not counts.is_set_aside(name)}
        [name] = chance.choices([*present], [*present.values()])
        is_useful = chance.random() < share(name, number)
        texts = counts.delivered(name, is_useful=is_useful, now=number / 100)
        texts += counts.review(dict.fromkeys(rates, True), now=number / 100)
        told += [(number, text) for text in texts]
    return told


@pytest.mark.parametrize("attacker_rate", [0.3, 1.0, 50.0])
def test_a_worker_from_which_nothing_can_be_learned_is_set_aside(attacker_rate: float) -> None:
    counts = make_usefulness()
    rates = {"w1": 1.0, "w2": 0.5, "bad": attacker_rate}
    told = deliver_groups(
        counts, rates, lambda name, _: 0.0 if name == "bad" else 0.4, num_groups=4000, seed=1
    )
    texts = [text for _, text in told if "set aside for 10min" in text]
    assert len(texts) == 1
    assert texts[0].startswith("bad is set aside for 10min: something could be learned from 0 of")
    assert counts.is_set_aside("bad")
    assert not counts.is_set_aside("w1")
    assert not counts.is_set_aside("w2")


def test_it_gets_another_chance_and_is_judged_anew() -> None:
    counts = make_usefulness()
    rates = {"w1": 1.0, "bad": 9.0}
    deliver_groups(counts, rates, lambda name, _: 0.3 * (name == "w1"), num_groups=2000, seed=2)
    assert counts.is_set_aside("bad")
    assert counts.review(dict.fromkeys(rates, True), now=20 + AWAY_S) == [
        "bad is no longer set aside"
    ]
    assert not counts.is_set_aside("bad")
    assert counts.is_idle
    # It was mended meanwhile.
    assert deliver_groups(counts, rates, lambda name, _: 0.3, num_groups=2000, seed=3) == []


@pytest.mark.parametrize("seed", range(4))
def test_honest_workers_are_never_set_aside_whatever_the_share_and_its_course(seed: int) -> None:
    counts = make_usefulness()
    rates = {"fast": 10.0, "w1": 1.0, "w2": 0.5, "slow": 0.02}

    def share(name: str, number: int) -> float:
        if number < 300:
            return 0.0  # nothing is right yet
        return (0.01, 0.6, 0.1, 0.02)[number // 300 % 4]

    told = deliver_groups(counts, rates, share, num_groups=3000, seed=seed)
    # A second opinion may be asked for, which nobody is judged by.
    assert not [text for _, text in told if "something could be learned" in text]


def test_one_worker_does_not_end_the_run_between_useful_groups_of_others() -> None:
    counts, able = make_usefulness(), {"bad": True, "honest": True}
    for _ in range(MAX_BARREN):
        assert counts.is_idle
        counts.delivered("bad", is_useful=False, now=0.0)
    [text] = counts.review(able, now=0.0)
    assert text.startswith(f"bad is set aside until other workers have delivered {B} groups")
    assert counts.is_set_aside("bad")
    counts.delivered("bad", is_useful=False, now=0.0)  # it was under way
    assert counts.num_discounted == MAX_BARREN + 1
    for _ in range(B - 1):
        counts.delivered("honest", is_useful=False, now=0.0)
        assert counts.review(able, now=0.0) == []
    counts.delivered("honest", is_useful=True, now=0.0)
    assert not counts.is_set_aside("bad")
    assert counts.num_discounted == 0
    assert counts.is_idle


def test_where_the_others_agree_the_run_is_zero_signal() -> None:
    counts, able = make_usefulness(), {"fast": True, "slow": True}
    for _ in range(MAX_BARREN):
        counts.delivered("fast", is_useful=False, now=0.0)
    counts.review(able, now=0.0)
    assert counts.num_discounted == MAX_BARREN
    for _ in range(B):
        counts.delivered("slow", is_useful=False, now=0.0)
        counts.review(able, now=0.0)
    assert counts.num_discounted == 0
    assert not counts.is_set_aside("fast")
    assert counts.review(able, now=0.0) == []  # asked once
    # Equal workers are heard at the same time.
    counts = make_usefulness()
    for number in range(MAX_BARREN):
        counts.delivered([*able][number % 2], is_useful=False, now=0.0)
        assert counts.review(able, now=0.0) == []
    assert counts.num_discounted == 0


@pytest.mark.parametrize("without", [{}, {"w2": False}], ids=["gone", "stuck"])
def test_where_nobody_else_can_sample_a_worker_speaks_and_says_it_all_again(
    without: dict[str, bool],
) -> None:
    counts = make_usefulness()
    for _ in range(MAX_BARREN):
        counts.delivered("w1", is_useful=False, now=0.0)
    assert counts.review({"w1": True}, now=0.0) == []  # alone from the beginning
    assert counts.num_discounted == 0
    counts.review({"w1": True, "w2": True}, now=0.0)
    assert counts.is_set_aside("w1")
    counts.review({"w1": True} | without, now=1.0)
    counts.review({"w1": True, "w2": True}, now=30.0)  # a moment's absence is none
    counts.review({"w1": True} | without, now=31.0)
    counts.review({"w1": True} | without, now=30.0 + ALONE_S)
    assert counts.is_set_aside("w1")
    counts.review({"w1": True} | without, now=31.0 + ALONE_S)
    assert not counts.is_set_aside("w1")
    assert counts.num_discounted == MAX_BARREN
    for _ in range(MAX_BARREN):
        counts.delivered("w1", is_useful=False, now=100.0)
        assert counts.review({"w1": True} | without, now=100.0) == []
    assert counts.num_discounted == MAX_BARREN  # and as many count now


def test_who_was_set_aside_is_wanted_again_where_nobody_else_can_sample() -> None:
    counts, rates = make_usefulness(), {"w1": 1.0, "bad": 9.0}
    deliver_groups(counts, rates, lambda name, _: 0.3 * (name == "w1"), num_groups=2000, seed=2)
    assert counts.is_set_aside("bad")
    before = counts.num_discounted
    counts.delivered("bad", is_useful=False, now=20.0)
    assert counts.num_discounted == before + 1
    assert counts.review({"bad": True}, now=20.0) == []
    assert counts.review({"bad": True}, now=20.0 + ALONE_S) == ["bad is no longer set aside"]
