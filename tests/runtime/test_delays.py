"""Delays of an experiment (bench/delays.py), wrapped around a real learner and its workers."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import numpy as np
import pytest

from bench.delays import (
    DelayedBuffer,
    DelayInjector,
    DelaySettings,
    Direction,
    delay_installs,
)
from echo.core.buffer import StalenessBuffer
from echo.core.rollout import Group, Lineage, Rollout
from tests.runtime.harness import Play, Run, ends, read_jsonl, running


def injector(direction: Direction, **settings: Any) -> DelayInjector:
    return DelayInjector(DelaySettings(**settings), direction=direction, seed=0)


def make_group(group_id: int, step: int) -> Group:
    rollout = Rollout(
        token_ids=np.zeros(1, np.int32),
        sampler_logprobs=np.zeros(1, np.float32),
        policy_versions=np.array([[1, step]], np.int32),
        completion_mask=np.ones(1, np.bool_),
        reward=0.0,
        finish_reason="stop",
    )
    ids = np.ones(1, np.int32)
    return Group(group_id=group_id, attempt=0, worker_id="w", prompt_ids=ids, rollouts=(rollout,))


def test_a_group_on_its_way_takes_up_room_and_grows_old_unseen() -> None:
    async def scenario() -> None:
        inner = StalenessBuffer(max_staleness=1, lineages=(Lineage(1, 0),))
        delays = injector("rollouts", law="constant", lower_s=1.0, upper_s=2.0, speedup=100.0)
        has_news = asyncio.Event()
        buffer = DelayedBuffer(inner, delays, has_news.set)
        buffer.put(make_group(0, step=4))
        assert inner.num_unspent(step=4) == 1
        assert buffer.take(1, step=4) is None
        await has_news.wait()
        taken = buffer.take(1, step=4)
        assert taken is not None
        buffer.put_back(taken, num_taken=1)  # it has arrived before
        assert buffer.take(1, step=4) == taken
        buffer.put(make_group(1, step=3))
        assert [evicted.reason for evicted in buffer.evict(step=5)] == ["stale"]
        buffer.put(make_group(2, step=5))
        assert [group.group_id for group in buffer.clear()] == [2]

    asyncio.run(scenario())


def lags_of(run: Run) -> Counter[int]:
    """Return how many groups were trained so many versions late; each group ended once."""
    assert [end for end in ends(run.ledger()).values() if len(end) != 1] == []
    lags: Counter[int] = Counter()
    for record in run.ledger("trained"):
        lags.update({int(lag): count for lag, count in record["staleness"].items()})
    return lags


@pytest.mark.slow
def test_a_worker_keeps_old_weights_for_its_delay(play: Play) -> None:
    async def scenario(run: Run) -> None:
        learner = await run.learner(run={"max_steps": 16}, sync={"max_staleness": 6})
        worker = await run.worker("w1")
        weights = injector("weights", law="constant", speedup=900.0)
        delay_installs(worker, weights)
        started_at = asyncio.get_running_loop().time()
        async with running(learner, worker) as (learning, _):
            assert await learning == "finished"
        elapsed_s = asyncio.get_running_loop().time() - started_at
        installed = read_jsonl(run.run_dir / "workers" / "w1" / "installed.jsonl")
        # Half an hour of emulated time is two seconds: so many versions at most, of 17 published.
        assert len(installed) <= 1 + elapsed_s / 2.0
        assert len(run.ledger("published")) == 17
        assert 3 < max(lags_of(run)) <= 6
        assert weights.metrics()["delays/weights/hist"] == {"2048": len(installed)}

    play(scenario)
