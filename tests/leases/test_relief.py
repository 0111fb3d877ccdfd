"""Relief: the groups that a round has copied."""

from __future__ import annotations

from typing import Any

import pytest

from echo.core.records import Granted
from echo.leases.groups import LeaseRecord
from echo.leases.open_groups import AppendRecord
from echo.wire.messages import LeaseState
from tests.leases.test_scheduler import beat, granted, make_granting, make_worker


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


def test_what_agents_play_is_copied_because_of_its_age_alone() -> None:
    of = {"max_staleness": 0, "hedge_factor": 2.0, "prompts_are_free": True}
    granting = make_granting(of=of)
    busy, idle = make_worker("busy", (2, 3), 4), make_worker("idle", (2, 3), 4)
    for name in ("busy", "idle"):
        granting.finish_times.made(name, num_tokens=3000, seconds=60.0, now=0.0)
    group_ids = list(granted(granting, busy)["busy"])
    for now in map(float, range(1, 20)):
        # Two signs of life a second, in a group that usually gets 50 tokens a second.
        signs = [
            LeaseState(group_id=each, attempt=0, num_tokens=int(2 * now), running_s=now)
            for each in group_ids
        ]
        beat(granting, busy, *signs, now=now)
        assert granted(granting, busy, idle, now=now) == {}
    assert granted(granting, busy, idle, now=479.0) == {}
    assert granted(granting, busy, idle, now=481.0) == {"idle": group_ids}


def test_a_copy_of_a_copy_has_the_seed_of_the_original() -> None:
    granting = make_granting(of={"max_staleness": 0, "hedge_factor": 2.0})
    workers = [make_worker(name, (2, 3), 4) for name in ("slow", "stuck", "fast")]
    for worker, seconds in zip(workers, (100.0, 1.0, 1.0), strict=True):
        name = worker.node_id
        granting.finish_times.made(name, num_tokens=10, seconds=seconds, now=0.0)
    granting.make_round(workers[:1], now=0.0)
    _, first = granting.make_round(workers[:2], now=1.0)
    _, second = granting.make_round(workers, now=60.0)  # the copies are old by now
    assert [lease.attempt for lease in second["fast"]] == [2, 2, 2, 2]
    for lease in (*first["stuck"], *second["fast"]):
        assert lease.seed == granting.prompts.lease(lease.group_id, 0).seed
