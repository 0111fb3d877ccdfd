"""Delays of an experiment (bench/late_node.py) in a real learner and its workers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from late_node import DelayedBuffer, LateWorker, delay_installs
from learning.delays import DelayInjector, DelaySettings, Direction

from echo.core.rollout import Group, Lineage
from echo.runtime.learner import setup
from echo.runtime.worker import setup as worker_setup
from tests.core.groups import make_group, make_rollout
from tests.promises.conftest import MakeWorld


@pytest.fixture(autouse=True)
def late_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Build learners and workers of the parts that can be late."""
    monkeypatch.setattr(setup, "StalenessBuffer", DelayedBuffer)
    monkeypatch.setattr(worker_setup, "WorkerNode", LateWorker)


class Woken:
    """Stands for a learner that is to look again."""

    def __init__(self) -> None:
        self.has_news = asyncio.Event()

    def wake(self) -> None:
        self.has_news.set()


def injector(direction: Direction, **settings: Any) -> DelayInjector:
    return DelayInjector(DelaySettings(**settings), direction=direction, seed=0)


def group_of(group_id: int, step: int) -> Group:
    return make_group(make_rollout([(1, step)]), group_id=group_id)


def test_a_group_on_its_way_takes_up_room_and_grows_old_unseen() -> None:
    async def scenario() -> None:
        buffer = DelayedBuffer(max_staleness=1, lineages=(Lineage(1, 0),))
        delays = injector("rollouts", law="constant", lower_s=1.0, upper_s=2.0, speedup=100.0)
        learner: Any = Woken()
        buffer.begin(delays, learner)
        buffer.put(group_of(0, step=4))
        assert buffer.num_unspent(step=4) == 1
        assert buffer.take(1, step=4) is None
        await learner.has_news.wait()
        taken = buffer.take(1, step=4)
        assert taken is not None
        buffer.put_back(taken, num_taken=1)  # it has arrived before
        assert buffer.take(1, step=4) == taken
        buffer.put(group_of(1, step=3))
        assert [evicted.reason for evicted in buffer.evict(step=5)] == ["stale"]
        buffer.put(group_of(2, step=5))
        assert [group.group_id for group in buffer.clear()] == [2]

    asyncio.run(scenario())


@pytest.mark.slow
def test_a_worker_keeps_old_weights_for_its_delay(make_world: MakeWorld) -> None:
    world = make_world(sync={"max_staleness": 6}, checkpoint={"interval_steps": 100})
    world.learner(run={"max_steps": 40})
    world.worker("w1")
    weights = injector("weights", law="constant", speedup=1800.0 / 2.0)
    delay_installs(world.node("w1"), weights)
    world.run_until(lambda: world.end("learner"))
    world.audit(is_finished=True)
    # Half an hour of emulated time is two seconds.
    num_installed = len(world.audited("w1"))
    assert num_installed <= 1 + world.now / 2.0
    assert len(world.published()) == 41
    lags = [int(lag) for record in world.records("trained") for lag in record["staleness"]]
    assert 3 < max(lags) <= 6
    assert weights.metrics()["delays/weights/hist"] == {"2048": num_installed}
