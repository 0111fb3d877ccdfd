"""The time that an engine takes: shared rate, one sequence's pace, weights taken in flight."""

from __future__ import annotations

import pytest

from echo.core.rollout import PolicyVersion
from echo.sim.lengths import GroupLength, LogNormalLengths
from echo.sim.timing import EngineModel
from echo.wire.messages import Lease

V0, V1 = PolicyVersion(1, 0), PolicyVersion(1, 1)


def lease(number: int) -> Lease:
    return Lease(group_id=number, attempt=0, seed=0, prompt_ids=(0,), example={})


def make_engine(**changes: float) -> EngineModel:
    engine = EngineModel(
        tokens_per_s=changes.get("tokens_per_s", 100.0),
        concurrency=8,
        group_size=4,
        alone_speedup=changes.get("alone_speedup", 1e9),
    )
    engine.install(V0, now=0.0)
    return engine


def test_groups_share_the_rate_and_the_one_left_has_it_alone() -> None:
    engine = make_engine()
    engine.begin(lease(1), GroupLength(100, 50), now=0.0)
    engine.begin(lease(2), GroupLength(300, 80), now=0.0)
    assert engine.next_at == pytest.approx(2.0)
    assert [run.lease.group_id for run in engine.finished(now=2.0)] == [1]
    assert engine.next_at == pytest.approx(4.0)
    assert [run.lease.group_id for run in engine.finished(now=4.0)] == [2]
    assert engine.tokens_made == pytest.approx(400.0)


def test_a_group_takes_at_least_its_longest_completion() -> None:
    # 100 / 8 tokens per second and sequence, twice that alone: 80 tokens take 3.2 s.
    engine = make_engine(alone_speedup=2.0)
    engine.begin(lease(1), GroupLength(100, 80), now=0.0)
    assert engine.next_at == pytest.approx(3.2)


def test_each_version_has_what_was_sampled_while_it_was_in() -> None:
    engine = make_engine()
    engine.begin(lease(1), GroupLength(400, 100), now=0.0)
    engine.install(V1, now=1.0)
    [run] = engine.finished(now=4.0)
    assert run.shares() == [(V0, 100.0), (V1, 300.0)]


def test_a_pause_makes_nothing_and_a_straggler_takes_longer() -> None:
    engine = make_engine()
    engine.begin(lease(1), GroupLength(400, 1), now=0.0)
    engine.pause(True, now=1.0)
    assert engine.next_at == float("inf")
    engine.pause(False, now=3.0)
    assert engine.next_at == pytest.approx(6.0)
    engine.set_rate(50.0, now=4.0)
    assert engine.next_at == pytest.approx(8.0)


def test_lengths_are_a_matter_of_the_group_alone_and_have_their_mean() -> None:
    def make() -> LogNormalLengths:
        return LogNormalLengths(
            mean=200.0, spread=0.5, limit=1000.0, group_size=8, useful_share=0.75, seed=3
        )

    first, second = make(), make()
    drawn = [first.of(number) for number in range(2000)]
    assert [second.of(number) for number in reversed(range(2000))] == drawn[::-1]
    assert sum(g.num_tokens for g in drawn) / 16_000 == pytest.approx(200.0, rel=0.03)
    assert max(g.longest for g in drawn) <= 1000
    assert sum(g.is_useful for g in drawn) / 2000 == pytest.approx(0.75, abs=0.04)
    assert all(g.num_tokens / 8 <= g.longest <= g.num_tokens for g in drawn)
