from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo.leases.book import LeaseRecord
from echo.leases.dispatch import Helper, RunningGroup, hedges
from echo.leases.scheduler import RecordGrant
from tests.leases.test_scheduler import make_granting, make_worker
from tests.leases.unequal import Unequal


def running(group_id: int, *, done_at: float, num_tokens: float = 10.0) -> RunningGroup:
    return RunningGroup(LeaseRecord(group_id, 0, "slow", 0.0, 0.0), done_at, num_tokens)


def chosen(
    groups: list[RunningGroup], *helpers: Helper, factor: float = 2.0
) -> list[tuple[int, str]]:
    return [
        (record.group_id, name) for record, name in hedges(groups, helpers, factor=factor, now=0.0)
    ]


def test_the_last_groups_go_to_the_fastest() -> None:
    groups = [running(n, done_at=float(10 + n)) for n in range(4)]
    helpers = Helper("b", 5.0, 1), Helper("a", 10.0, 2)
    assert chosen(groups, *helpers) == [(3, "a"), (2, "a"), (1, "b")]


def test_a_copy_must_be_expected_so_many_times_sooner() -> None:
    groups = [running(0, done_at=10.0)]
    assert chosen(groups, Helper("a", 2.0, 1)) == [(0, "a")]  # 5 s for 10 tokens
    assert chosen(groups, Helper("a", 1.9, 1)) == []
    assert chosen(groups, Helper("a", 1.9, 1), factor=1.5) == [(0, "a")]


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


# --- in the learner's session ---------------------------------------------------------------------


def test_a_copy_is_journalled_counts_once_and_has_the_seed_of_its_original() -> None:
    granting = make_granting(of={"max_staleness": 0, "hedge_factor": 2.0})
    slow, fast = make_worker("slow", (2, 3), 4), make_worker("fast", (2, 3), 4)
    for name, seconds in (("slow", 100.0), ("fast", 1.0)):
        granting.forecast.made(name, num_tokens=10, seconds=seconds, now=0.0)
    granting.grant([slow], now=0.0)
    assert granting.leases.num_running == 4
    records, leases = granting.grant([slow, fast], now=1.0)
    assert granting.leases.num_running == 4, "a group that two workers run counts once"
    assert list(leases) == ["fast"]
    grants = [record for record in records if isinstance(record, RecordGrant)]
    assert [(g.lease.group_id, g.lease.attempt, g.copy_of) for g in grants] == [
        (group_id, 1, 0) for group_id in (12, 13, 14, 15)
    ]
    for lease in leases["fast"]:
        assert lease.seed == granting.make_lease(lease.group_id, 0).seed
    assert granting.grant([slow, fast], now=2.0) == ([], {}), "each has one copy at most"
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
    granting.forecast.made("slow", num_tokens=10, seconds=100.0, now=0.0)
    if change == "helper in its first group":
        # Its sampling alone: how long its rewards take has not been seen.
        sampled = LeaseRecord(99, 0, "fast", 0.0, 0.0, running_s=0.1, num_tokens=20)
        granting.forecast.seen("fast", [sampled], now=0.0)
        assert granting.forecast.speed("fast", now=0.0) == pytest.approx(100)
    elif change != "unmeasured helper":
        granting.forecast.made("fast", num_tokens=10, seconds=1.0, now=0.0)
    granting.grant([slow], now=0.0)
    if change == "batch":
        granting.buffer.num_unspent = lambda *, step: 4  # type: ignore[method-assign]
    _, leases = granting.grant([slow, fast], now=1.0)
    assert leases == {}


def play(tmp_path: Path, *, hedge_factor: float | None, seed: int = 1) -> Unequal:
    run = Unequal(
        tmp_path,
        tail=1.0,
        hiccups=0.03,
        seed=seed,
        max_staleness=0,
        groups_per_step=16,
        train_s=0.5,
        lease_timeout_s=60.0,
    )
    run.start({"a": 100.0, "b": 100.0, "slow": 10.0}, hedge_factor=hedge_factor)
    run.play(25, within_s=2000.0)
    return run


@pytest.mark.slow
def test_copies_save_a_batch_from_a_worker_that_is_suddenly_slow(tmp_path: Path) -> None:
    without, hedged = play(tmp_path, hedge_factor=None), play(tmp_path, hedge_factor=2.0)
    assert hedged.figures()["step_mean_s"] < 0.75 * without.figures()["step_mean_s"]
    assert not without.copies
    learner = hedged.learner
    won = {(r["group"], r["attempt"]) for r in hedged.records if r["kind"] == "accepted"}
    won &= hedged.copies
    assert won
    assert len(won) == learner.counters["hedges/won"]
    assert len(hedged.copies) == learner.counters["hedges/issued"]
    # Every copy makes one of the two a loser; all of them were told, and stopped.
    assert hedged.num_cancelled == learner.counters["leases_cancelled"]
    assert hedged.num_cancelled >= len(hedged.copies) - 1
    assert sum(engine.tokens_cancelled for engine in hedged.engines.values()) > 0
    for engine in hedged.engines.values():
        assert not any(group.is_unwanted for group in engine.session.partials.running.values())
    assert hedged.figures()["wasted_share"] < 0.15


def test_the_loser_is_told_to_stop_and_journalled(tmp_path: Path) -> None:
    run = Unequal(tmp_path, tail=0.0, max_staleness=0, groups_per_step=12, lease_timeout_s=60.0)
    run.start({"a": 100.0, "slow": 1.0}, hedge_factor=2.0)
    run.world.run_until(lambda: run.num_cancelled > 0, within_s=100.0)
    [*_, record] = [r for r in run.records if r["kind"] == "cancelled"]
    accepted = next(r for r in run.records if r.get("group") == record["group"] and "place" in r)
    assert accepted["worker"] != record["worker"]
    run.world.run(run.world.now + 1.0)
    engine = run.engines[record["worker"]]
    assert all(key[0] != record["group"] for key in engine.session.partials.running)
    assert engine.session.counters["cancelled"] >= 1
