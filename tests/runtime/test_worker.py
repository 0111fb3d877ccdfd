"""Faults of a worker: memory that runs out, engines that raise, a disk that is full."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from echo.engine.engine import Request
from echo.engine.hf.engine import TransformersEngine
from echo.roles.learner import GrantsStopped
from tests.promises.conftest import MakeWorld
from tests.promises.world import StubEngine
from tests.runtime.harness import Play, Run, running


@pytest.mark.slow
def test_where_one_version_samples_each_group_none_mixes_versions(play: Play) -> None:
    """Newer weights wait for what is under way, and no group is lost."""

    async def scenario(run: Run) -> None:
        learner = await run.learner(
            run={"max_steps": 4},
            sampling={"max_completion_tokens": 60},
            sync={"max_staleness": 4},
            batch={"groups_per_step": 1},
            rollout={"exact_version": True},
        )
        async with running(learner, await run.worker("w1")) as (learning, _):
            assert await learning == "finished"
        accepted = run.ledger("accepted")
        assert all(len(record["versions"]) == 1 for record in accepted)
        assert len({step for record in accepted for _, step in record["versions"]}) > 1
        reasons = {record["reason"] for record in run.ledger("discarded")}
        assert not reasons & {"version_not_installed", "attempts_exhausted"}

    play(scenario)


@pytest.mark.slow
def test_a_worker_whose_memory_runs_out_goes_on_with_less_at_a_time(
    play: Play, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forward = TransformersEngine._forward

    def limited(engine: TransformersEngine, ids: Tensor, *others: Any) -> Tensor:
        if len(ids) > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return forward(engine, ids, *others)

    monkeypatch.setattr(TransformersEngine, "_forward", limited)

    async def scenario(run: Run) -> None:
        learner = await run.learner(batch={"group_size": 4})
        worker = await run.worker("w1", worker={"max_concurrent_rollouts": 8})
        async with running(learner, worker) as (learning, working):
            assert await learning == "finished"
            assert await working == "the run is finished"
        assert worker.role.counters["engine/out_of_memory"] >= 1
        assert any(row.get("engine/out_of_memory") for _, row in run.rows)

    play(scenario)
    assert re.search(
        r"out of memory with \d running rollouts .* from now on at most \d", caplog.text
    )


@pytest.mark.slow
def test_a_run_with_over_submission_keeps_its_promises(play: Play) -> None:
    """Rollouts are stopped early and go on under newer weights."""

    async def scenario(run: Run) -> None:
        learner = await run.learner(
            run={"max_steps": 6},
            sampling={"max_completion_tokens": 60},
            sync={"max_staleness": 3},
            rollout={"over_submission": 2.0},
        )
        worker = await run.worker("w1", worker={"max_concurrent_rollouts": 8})
        async with running(learner, worker) as (learning, _):
            assert await learning == "finished"
        assert worker.role.partial_counts["interrupted"] > 0
        assert worker.role.partial_counts["resumed"] > 0
        assert any(len(record["versions"]) > 1 for record in run.ledger("accepted"))
        run.audit(max_staleness=3)

    play(scenario)


# --- on virtual time ------------------------------------------------------------------------------


def raise_in_engines(
    monkeypatch: pytest.MonkeyPatch,
    *,
    group: int,
    is_fatal: bool = False,
    why: str = "index 99 is out of bounds",
) -> list[StubEngine]:
    """Have engines raise for a group; return those that it has ended, where it is fatal."""
    generate, ended = StubEngine.generate, []

    def raising(engine: StubEngine, requests: Sequence[Request], *others: Any, **_: Any) -> Any:
        if any(request.request_id.startswith(f"{group}.") for request in requests):
            ended.extend([engine] * is_fatal)
            raise IndexError(why)
        if engine in ended:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return generate(engine, requests, *others)

    monkeypatch.setattr(StubEngine, "generate", raising)
    return ended


def test_a_group_for_which_the_engine_raises_ends_alone(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other group of its batch is sampled all the same, and the worker goes on."""
    raise_in_engines(monkeypatch, group=1)
    world = make_world()
    world.learner()
    world.worker("w1")
    world.run_until(lambda: world.step >= 3)
    assert world.is_alive("w1")
    assert world.ends_of(1) == ["engine_error"]
    granted = [(r["group"], r["attempt"]) for r in world.records("granted")]
    assert (1, 0) in granted
    assert all(attempt == 0 for _, attempt in granted)
    [note] = [note for note in world.notes("learner") if "group 1 failed" in note]
    assert "engine_error: IndexError: index 99 is out of bounds" in note
    world.audit()


@pytest.mark.parametrize(
    ("is_fatal", "why"), [(True, "it died"), (False, "out of memory with a single rollout")]
)
def test_a_group_that_ends_the_engines_of_three_workers_ends(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, is_fatal: bool, why: str
) -> None:
    raise_in_engines(monkeypatch, group=1, is_fatal=is_fatal, why=why)
    world = make_world()
    world.learner()
    for name in ("w1", "w2", "w3"):
        world.worker(name)
        world.run_until(lambda: world.end(name))  # noqa: B023
    world.worker("w4")
    world.run_until(lambda: world.ends_of(1))
    assert world.ends_of(1) == ["engine_error"]
    before = world.step
    world.run_until(lambda: world.step >= before + 3)
    assert world.is_alive("w4")
    assert any("it has ended the engines of 3 workers" in note for note in world.notes("learner"))
    world.audit()


def test_what_an_engine_counts_is_told_though_no_group_is_finished(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world()
    world.learner()
    world.report("learner", GrantsStopped())
    monkeypatch.setattr(StubEngine, "take_counts", lambda self: {"engine/out_of_memory": 1})
    world.worker("w1")
    nodes = world.node("learner").role.roster.nodes
    world.run_until(lambda: "w1" in nodes and nodes["w1"].stats.refused.get("engine/out_of_memory"))


def test_a_disk_that_takes_no_note_of_what_is_installed_is_told_and_survived(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr("echo.runtime.worker.node.record_installed", refuse)
    world = make_world()
    world.learner()
    world.worker("w1")
    world.run_until(lambda: world.step >= 2)
    assert not world.has_failed("w1")
    [note] = [note for note in world.notes("w1") if "cannot note in " in note]
    assert "installed.jsonl that v0 is installed: [Errno 28] No space left on device" in note


def test_a_worker_says_that_it_has_no_learner_while_it_has_none(make_world: MakeWorld) -> None:
    world = make_world()
    world.worker("w1", build_s=5.0)
    world.run(1.0)
    assert world.node("w1").view().activity == "dialling: no learner"
    world.learner()
    roster = world.node("learner").role.roster
    world.run_until(lambda: "w1" in roster.nodes)
    world.run(1.0)
    assert world.node("w1").view().activity == "starting"
