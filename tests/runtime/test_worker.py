"""What becomes of a worker: contradictions, bad rewards, long prompts, interrupts."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from echo.cli.output import exit_code
from echo.errors import ConfigError
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
def fussy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "fussy_task.py").write_text(TASK)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "fussy_task", raising=False)
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


def test_an_interrupted_worker_delivers_and_says_goodbye(play: Play) -> None:
    async def scenario(run: Run) -> None:
        learner = await run.learner(run={"max_steps": 1000})
        worker = await run.worker("w1")
        async with running(learner, worker) as (_, working):
            assert await learner.wait_until(lambda: learner.session.step >= 2, within_s=5)
            worker.interrupt()
            assert await working == "interrupted"
            assert not worker.session.running
            assert not len(worker.session.outbox)
            assert await learner.wait_until(lambda: not learner.session.roster.nodes, within_s=0.3)
            assert learner.session.leases.num_leases("w1") == 0

    play(scenario)


def test_a_worker_keeps_its_results_while_the_learner_is_away(play: Play) -> None:
    async def scenario(run: Run) -> None:
        worker = await run.worker("w1")
        async with running(worker) as (working,):
            learner = await run.learner(run={"max_steps": 1000})
            async with running(learner):
                assert await learner.wait_until(lambda: learner.session.step >= 2, within_s=5)
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
