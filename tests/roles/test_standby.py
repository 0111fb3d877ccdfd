"""Workers on standby: no leases, no weights, in touch, and back at work within one message."""

from __future__ import annotations

from pathlib import Path

import pytest

from echo.wire.messages import TopologyPlan
from tests.roles.harness import LEARNER_ADDRESS, Process, Run, message_of


def start(tmp_path: Path, *, workers: int = 2) -> tuple[Run, Process, list[Process]]:
    run = Run(tmp_path)
    learner = run.start_learner()
    started = [
        run.start_worker(f"w{i + 1}", connect=[LEARNER_ADDRESS], address=f"tcp://w{i + 1}:1")
        for i in range(workers)
    ]
    run.world.run(10.0)
    return run, learner, started


def park(run: Run, learner: Process, *names: str) -> None:
    run.world.perform(learner, learner.session.set_standby(names, now=run.world.now))


@pytest.mark.slow
def test_the_children_of_a_worker_that_is_put_on_standby_get_other_parents(tmp_path: Path) -> None:
    run, learner, workers = start(tmp_path, workers=3)
    parents = {p.session.stats().parent for p in workers}
    [serving] = [p for p in workers if p.name in parents][:1]
    park(run, learner, serving.name)
    run.world.run(30.0)
    others = [p for p in workers if p is not serving]
    assert all(p.session.stats().parent not in ("-", serving.name) for p in others)
    newest = learner.session.broadcast.newest_complete
    assert newest is not None
    assert all(newest.step - p.session.installed_version.step <= 1 for p in others)


@pytest.mark.slow
def test_a_lost_plan_is_repeated_until_the_worker_stands_by(tmp_path: Path) -> None:
    run, learner, [_, w2] = start(tmp_path)
    lost: list[TopologyPlan] = []

    def drop(source: str, target: str, frames: list[bytes]) -> bool:
        if source != "learner" or target != "w2" or len(lost) >= 3:
            return False
        message = message_of(frames)
        if isinstance(message, TopologyPlan):
            lost.append(message)
        return isinstance(message, TopologyPlan)

    run.world.drop = drop
    park(run, learner, "w2")
    run.world.run(20.0)
    assert len(lost) == 3
    assert all(plan.is_standby for plan in lost)
    assert w2.session.standby_since is not None


@pytest.mark.slow
def test_a_learner_that_returns_finds_all_workers_active(tmp_path: Path) -> None:
    run, learner, [_, w2] = start(tmp_path)
    park(run, learner, "w2")
    run.world.run(20.0)
    run.world.kill(learner)
    run.world.run(21.0)
    run.start_learner()
    run.world.run(45.0)
    assert w2.session.standby_since is None
    run.audit()
