"""What becomes of a worker: contradictions, bad rewards, long prompts, interrupts."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from echo.cli.output import exit_code
from echo.core.errors import ConfigError, EngineError
from echo.core.rollout import PolicyVersion
from echo.engine.engine import UNVERSIONED
from echo.engine.hf.engine import TransformersEngine
from echo.leases.scheduler import Scheduler
from tests.runtime.harness import Play, Run, ends, read_jsonl, running

TASK = """
from echo.tasks.task import Example, Task

class Fussy(Task):
    def example(self, index, *, split):
        prompt = "1+1=" if split == "heldout" or index % 3 else "1" * 200
        return Example(index=index, split=split, prompt="1+2=" if index == 0 else prompt)

    def reward(self, example, completion):
        if example.index % 2:
            raise RuntimeError("no idea")
        return float(len(completion))
"""


@pytest.fixture
def fussy(write_task: Callable[[str, str], None]) -> str:
    write_task("fussy_task", TASK)
    return "fussy_task:Fussy"


def test_a_contradiction_ends_it_with_the_configuration_code(play: Play) -> None:
    async def scenario(run: Run) -> None:
        learner = await run.learner()
        worker = await run.worker("w1", sync={"max_staleness": 5})
        async with running(learner, worker) as (_, working):
            with pytest.raises(ConfigError, match=r"sync\.max_staleness = 5 contradicts") as caught:
                await working
        assert exit_code(caught.value) == 2

    play(scenario)


@pytest.mark.slow
def test_failed_rewards_and_long_prompts_are_counted_and_survived(play: Play, fussy: str) -> None:
    async def scenario(run: Run) -> None:
        learner = await run.learner(task={"kind": fussy})
        async with running(learner, await run.worker("w1")) as (learning, working):
            assert await learning == "finished"
            assert await working == "the run is finished"
        reasons = {record["reason"] for record in run.ledger("discarded")}
        assert {"reward_error", "prompt_too_long"} <= reasons
        assert all(len(end) == 1 for end in ends(run.ledger()).values())

    play(scenario)


@pytest.mark.slow
def test_weights_are_installed_in_flight(play: Play) -> None:
    """No rollout ends for a new version, and each token tells which one sampled it."""

    async def scenario(run: Run) -> None:
        learner = await run.learner(
            run={"max_steps": 8},
            sampling={"max_completion_tokens": 100},
            sync={"max_staleness": 8},
            batch={"groups_per_step": 1},
        )
        workers = [await run.worker(f"w{n}") for n in range(2)]
        async with running(learner, *workers) as (learning, *_):
            assert await learning == "finished"
        accepted = run.ledger("accepted")
        assert any(len(record["versions"]) > 1 for record in accepted)
        for record in accepted:
            assert record["versions"] == sorted(record["versions"])

    play(scenario)


@pytest.mark.slow
def test_groups_of_an_exact_version_do_not_mix_versions(play: Play) -> None:
    """The same run, but newer weights wait for what is under way, and no group is lost."""

    async def scenario(run: Run) -> None:
        learner = await run.learner(
            run={"max_steps": 8},
            sampling={"max_completion_tokens": 100},
            sync={"max_staleness": 8},
            batch={"groups_per_step": 1},
            rollout={"exact_version": True},
        )
        workers = [await run.worker(f"w{n}") for n in range(2)]
        async with running(learner, *workers) as (learning, *_):
            assert await learning == "finished"
        versions = {(r["group"], r["attempt"]): r["version"] for r in run.ledger("granted")}
        accepted = run.ledger("accepted")
        for record in accepted:
            assert record["versions"] == [versions[record["group"], record["attempt"]]]
        assert len({step for record in accepted for _, step in record["versions"]}) > 1
        reasons = {record["reason"] for record in run.ledger("discarded")}
        assert not reasons & {"version_replaced", "version_not_installed", "attempts_exhausted"}

    play(scenario)


@pytest.mark.slow
def test_a_version_that_all_workers_refuse_is_tried_again(
    play: Play, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On-policy nothing but the newest version is of use: no newer one comes without it."""
    load = TransformersEngine.load
    refused: list[PolicyVersion] = []

    def load_the_second_time(
        engine: TransformersEngine,
        tensors: Mapping[str, Tensor],
        version: PolicyVersion = UNVERSIONED,  # the evaluation does not tell
    ) -> None:
        if version == PolicyVersion(1, 2) and not refused:
            refused.append(version)
            raise EngineError("no memory just now")
        load(engine, tensors, version)

    monkeypatch.setattr(TransformersEngine, "load", load_the_second_time)
    monkeypatch.setattr("echo.roles.worker.INSTALL_AGAIN_S", 0.1)

    async def scenario(run: Run) -> None:
        learner = await run.learner(run={"max_steps": 4}, sync={"max_staleness": 0})
        async with running(learner, await run.worker("w1")) as (learning, _):
            assert await learning == "finished"
        assert refused == [PolicyVersion(1, 2)]

    play(scenario)
    assert "cannot install v2, keeping v1: no memory just now" in caplog.text


class SmallMemory:
    """Memory of workers that holds so many rows' keys and values and no more."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_rows: int) -> None:
        forward = TransformersEngine._forward

        def limited(engine: TransformersEngine, ids: Tensor, *others: Any) -> Tensor:
            is_workers = engine.installed != UNVERSIONED  # the evaluation does not tell versions
            if is_workers and len(ids) > num_rows:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return forward(engine, ids, *others)

        monkeypatch.setattr(TransformersEngine, "_forward", limited)


@pytest.mark.slow
def test_a_worker_whose_memory_runs_out_goes_on_with_less_at_a_time(
    play: Play, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    SmallMemory(monkeypatch, num_rows=3)

    async def scenario(run: Run) -> None:
        learner = await run.learner(run={"max_steps": 4}, batch={"group_size": 4})
        worker = await run.worker("w1", worker={"max_concurrent_rollouts": 8})
        async with running(learner, worker) as (learning, working):
            assert await learning == "finished"
            assert await working == "the run is finished"
        assert worker.session.counters["engine/out_of_memory"] >= 1
        assert any(row.get("engine/out_of_memory") for _, row in run.rows)

    play(scenario)
    assert re.search(r"out of memory with \d rollouts under way .* from now on \d", caplog.text)


def test_a_worker_whose_memory_does_not_hold_one_rollout_ends_with_the_numbers(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    SmallMemory(monkeypatch, num_rows=0)

    async def scenario(run: Run) -> None:
        learner = await run.learner()
        worker = await run.worker("w1")
        async with running(learner, worker) as (learning, working):
            with pytest.raises(EngineError, match=r"single rollout .* the weights take .* free"):
                await working
            assert not learning.done()

    play(scenario)


def test_a_lease_of_newer_weights_is_waited_for_and_given_back(
    play: Play, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The learner asks twice for weights that nobody has, and then for those that there are."""
    oldest, wanted = Scheduler._oldest_version, [PolicyVersion(1, 99)] * 2
    monkeypatch.setattr(
        Scheduler,
        "_oldest_version",
        lambda granting, number: wanted.pop() if wanted else oldest(granting, number),
    )

    async def scenario(run: Run) -> None:
        learner = await run.learner(run={"max_steps": 100_000})
        worker = await run.worker("w1", engine={"version_wait_s": 0.2})
        async with running(learner, worker) as (learning, _):
            counters = learner.session.counters
            # However fast the other groups are trained on: only then may the run end.
            assert await learner.wait_until(lambda: counters["leases_given_back"] == 2, within_s=60)
            learner.interrupt()
            assert await learning == "interrupted"
        assert worker.session.version_wait.max_s == 0.2
        assert worker.session.counters["engine/version_refused"] == 2
        assert learner.session.counters["leases_given_back"] == 2
        reasons = {record["reason"] for record in run.ledger("discarded")}
        assert "version_not_installed" not in reasons

    play(scenario)
    assert re.search(r"v99 or newer is wanted, v\d is installed", caplog.text)


def test_what_an_engine_counts_is_told_though_no_group_is_finished(play: Play) -> None:
    async def scenario(run: Run) -> None:
        learner = await run.learner()
        learner.session.is_granting = False
        worker = await run.worker("w1")
        async with running(learner, worker):
            assert await worker.wait_until(
                lambda: worker.session.installed_version is not None, within_s=60
            )
            assert worker._parts is not None
            with pytest.raises(EngineError):
                worker._parts.engine._concurrency.halve(1, why="", numbers="")  # type: ignore[attr-defined]
            counters = worker.session.counters
            assert await worker.wait_until(
                lambda: counters["engine/out_of_memory"] == 1, within_s=60
            )

    play(scenario)


def test_an_interrupted_worker_delivers_and_says_goodbye(
    play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    async def scenario(run: Run) -> None:
        learner = await run.learner(run={"max_steps": 1000})
        worker = await run.worker("w1")
        async with running(learner, worker) as (_, working):
            assert await learner.wait_until(lambda: learner.session.step >= 2, within_s=60)
            worker.interrupt()
            assert await working == "interrupted"
            assert not worker.session.partials.running
            assert not len(worker.session.outbox)
            assert await learner.wait_until(lambda: not learner.session.roster.nodes, within_s=60)
            assert learner.session.leases.num_leases("w1") == 0

    play(scenario)
    assert "w1 left: stopped by its operator" in caplog.text, "it was missed instead"


@pytest.mark.slow
def test_a_worker_keeps_its_results_while_the_learner_is_away(play: Play) -> None:
    async def scenario(run: Run) -> None:
        worker = await run.worker("w1")
        async with running(worker) as (working,):
            learner = await run.learner(run={"max_steps": 1000})
            async with running(learner):
                assert await learner.wait_until(lambda: learner.session.step >= 2, within_s=60)
            await asyncio.sleep(0.1)
            assert not working.done()
            step = run.ledger("trained")[-1]["step"]
            learner = await run.learner(resume=True, run={"max_steps": step + 3})
            async with running(learner) as (learning,):
                assert await learning == "finished"
            await working
        installed = read_jsonl(run.run_dir / "workers" / "w1" / "installed.jsonl")
        assert {record["version"][0] for record in installed} == {1, 2}

    play(scenario)
