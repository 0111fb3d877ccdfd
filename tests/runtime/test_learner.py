"""Whole runs in one process: the real parts of all roles on the memory network."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from echo.core.errors import ConfigError, DataError, EngineError
from echo.core.rollout import Group, Rollout
from echo.leases.grants import rounds
from echo.roles.plans import Plans
from echo.runtime.learner.batches.prompts import Prompt, PromptSource
from echo.runtime.learner.report import Progress
from echo.runtime.learner.saving.checkpoint import read_best
from echo.runtime.learner.saving.resume import finished_step, read_uplinks
from echo.runtime.learner.versions.evaluation import Evaluator
from echo.train.step import StepResult
from echo.train.trainer import Trainer
from echo.wire.actions import Action
from echo.wire.messages import Grant
from tests.e2e.audit import read_ledger
from tests.promises.conftest import MakeWorld
from tests.promises.world import World
from tests.runtime.harness import Play, Run, running

MANY = {"max_steps": 1000}


@pytest.mark.slow
def test_a_run_trains_evaluates_saves_and_ends_everybody_and_another_starts_from_its_weights(
    play: Play, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(run: Run) -> None:
        notices = iter([("it ran out of memory",)])
        step = Trainer.step
        monkeypatch.setattr(
            Trainer,
            "step",
            lambda self, groups: replace(step(self, groups), notices=next(notices, ())),
        )
        learner, worker = await run.learner(), await run.worker("w1")
        async with running(learner, worker) as (learning, working):
            assert await learning == "finished"
            assert await working == "the run is finished"
        assert [row["step"] for row in run.ledger("trained")] == [1, 2, 3]
        run.audit()
        evals = [row["eval/version"] for _, row in run.rows if "eval/version" in row]
        assert (evals[0], evals[-1]) == (0, 3)
        # After a step that was short of memory, at the interval, and at the end.
        assert [row["step"] for row in run.ledger("checkpoint")] == [1, 2, 3]
        assert "it ran out of memory" in caplog.text
        assert (run.run_dir / "checkpoints" / "latest").read_text() == "step_000003\n"
        best, scores = read_best(run.run_dir / "checkpoints"), {}
        for _, row in run.rows:
            if "eval/version" in row:
                scores[row["eval/version"]] = row["eval/addition/reward"]
        assert best is not None
        assert best == (best[0], max(scores[step] for step in scores if step))
        AutoModelForCausalLM.from_pretrained(run.run_dir / "final")
        assert finished_step(run.run_dir) == 3
        assert run.snapshots[-1].step == 3

        start = {"init_from": str(run.run_dir / "final")}
        learner = await run.learner(learner=start, run={"name": "second", "max_steps": 1})
        async with running(learner, await run.worker("w1")) as (learning, _):
            await learning
        first = next(r for r in read_ledger(run.directory / "second") if r["kind"] == "sealed")
        # What was exported is what was published, bit by bit.
        assert first["image_hash"] == run.ledger("sealed")[-1]["image_hash"]

    play(scenario)


@pytest.mark.slow
def test_a_run_goes_on_without_an_evaluation_that_has_no_memory(
    play: Play, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def runs_out(*_: Any) -> None:
        raise EngineError("out of memory with a single running rollout: numbers")

    async def scenario(run: Run) -> None:
        learner = await run.learner(run={"max_steps": 1})
        monkeypatch.setattr(Evaluator, "evaluate", runs_out)
        async with running(learner, await run.worker("w1")) as (learning, _):
            assert await learning == "finished"
        said = "is not evaluated, the run goes on: out of memory with a single running rollout"
        assert caplog.text.count(said) == 2
        assert not [row for _, row in run.rows if "eval/version" in row]

    play(scenario)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["worker", "learner"])
def test_rewards_in_parts_and_answers_that_end_as_told_are_trained_on(
    play: Play, where: str
) -> None:
    """Without the stop token an untrained model would end one answer in 32 at each token."""

    async def scenario(run: Run) -> None:
        learner = await run.learner(
            task={"kind": "tests.runtime.rewards:InParts"},
            reward={"where": where},
            sampling={"max_completion_tokens": 8, "min_tokens": 3, "stop": ["1", "2", "3", "+"]},
            model={"dtype": "float32"},
            sync={"max_staleness": 0, "publish_period": 1},
            batch={"groups_per_step": 8},
            eval={"num_samples": 2},
        )
        async with running(learner, await run.worker("w1")) as (learning, _):
            assert await learning == "finished"
        steps = [row for _, row in run.rows if "reward/mean" in row]
        assert len(steps) == 3
        for row in steps:
            assert row["reward/turn/mean"] == 0.5
            parts = row["reward/turn/mean"] + row["reward/length/mean"]
            assert row["reward/mean"] == pytest.approx(parts)
            assert row["is_ratio/mean"] == pytest.approx(1.0, abs=1e-5)
            assert 4 <= row["completions/mean_length"] < 8
        evals = [row for _, row in run.rows if "eval/version" in row]
        assert {"reward", "avg@2", "reward/turn", "reward/length"} <= {
            name.partition("/InParts/")[2] for name in evals[-1]
        }

    play(scenario)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [{"kind": "gspo", "score_centering": 3}, {"kind": "gspo"}])
def test_workers_send_likely_ids_only_for_a_loss_that_needs_them(
    play: Play, monkeypatch: pytest.MonkeyPatch, loss: dict[str, Any]
) -> None:
    trained: list[Rollout] = []
    step = Trainer.step

    def note(self: Trainer, groups: Sequence[Group]) -> StepResult:
        trained.extend(rollout for group in groups for rollout in group.rollouts)
        return step(self, groups)

    async def scenario(run: Run) -> None:
        monkeypatch.setattr(Trainer, "step", note)
        learner = await run.learner(run={"max_steps": 2}, loss=loss)
        async with running(learner, await run.worker("w1")) as (learning, _):
            assert await learning == "finished"
        for rollout in trained:
            if "score_centering" not in loss:
                assert rollout.likely is None
                continue
            assert rollout.likely is not None
            assert rollout.likely.sizes.tolist() == [3] * rollout.num_tokens
            assert rollout.likely.logprobs is not None
            # Rounded to bfloat16 on the way: the lower half of each number is 0.
            assert not (rollout.likely.logprobs.view(np.uint32) & 0xFFFF).any()
        assert len(trained) == 8

    play(scenario)


REWARDS = "tests.runtime.rewards"


@pytest.mark.slow
def test_a_run_that_has_nothing_left_to_learn_ends_and_evaluates_its_last_weights(
    play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(run: Run) -> None:
        learner = await run.learner(
            run=MANY,
            task={"kind": f"{REWARDS}:RightLater"},
            batch={"keep_zero_variance": False, "max_zero_signal_batches": 3},
            # There is room for one batch: a group of which nothing is learned gives its own back.
            sync={"max_staleness": 0},
            eval={"interval_steps": 500},
        )
        async with running(learner, await run.worker("w1")) as (learning, working):
            assert await learning == "finished"
            assert await working == "the run is finished"
        step = learner.role.step
        assert 0 < step < 1000
        assert f"the run ends at step {step}; every reward was 1: the task is solved" in caplog.text
        left_out = {r["group"] for r in run.ledger("discarded") if r["reason"] == "zero_variance"}
        assert len(left_out) >= 6
        assert learner.role.counters["discarded/zero_variance"] == len(left_out)
        assert not left_out & {r["group"] for r in run.ledger("accepted")}
        evals = [row["eval/version"] for _, row in run.rows if "eval/version" in row]
        assert evals == [0, step]
        assert all(row["eval/seconds"] >= 0 for _, row in run.rows if "eval/version" in row)
        assert run.ledger("checkpoint")[-1]["step"] == step
        assert (run.run_dir / "final").exists()
        assert finished_step(run.run_dir) is None, "there are steps left to be made"
        run.audit(max_staleness=0)

    play(scenario)


@pytest.mark.slow
def test_a_group_that_makes_a_step_fail_ends_and_the_others_are_trained(play: Play) -> None:
    async def scenario(run: Run) -> None:
        learner = await run.learner(
            task={"kind": f"{REWARDS}:OneLarge"},
            loss={"kind": f"{REWARDS}:overflowing", "normalize_by_std": False},
            sync={"max_staleness": 0},  # there is room for one batch: what ended gives its back
        )
        async with running(learner, await run.worker("w1")) as (learning, _):
            assert await learning == "finished"
        found = run.audit(max_staleness=0)
        assert found.discard_reasons["nonfinite_gradient"] == found.discarded[1] == 1
        assert found.trained[0] == [1]
        assert found.num_steps == 3
        assert learner.role.counters["discarded/nonfinite_gradient"] == 1
        assert learner.role.counters["steps_failed/nonfinite_gradient"] == 1

    play(scenario)


@pytest.mark.slow
def test_the_mismatch_is_attributed_and_what_it_needs_is_kept_for_a_while(play: Play) -> None:
    async def scenario(run: Run) -> None:
        learner = await run.learner(
            run={"max_steps": 6},
            sync={"max_staleness": 2},
            optimizer={"learning_rate": 1e-2, "warmup_steps": 0},
            metrics={"attribution_steps": 2},
            task={"kind": f"{REWARDS}:InTurn"},
        )
        async with running(learner, await run.worker("w1")) as (learning, _):
            assert await learning == "finished"
        rows = [(step, row) for step, row in run.rows if "attribution/tokens" in row]
        assert [step for step, _ in rows] == [1, 3, 5]
        _, last = rows[-1]
        assert last["attribution/skipped"] == 0.0
        shares = [
            last[f"attribution/{name}"]
            for name in ("staleness", "numerics", "truncation", "tokenisation")
        ]
        assert sum(shares) == pytest.approx(1.0)
        # float32 on both sides: all of it is staleness, and what bfloat16 rounds off.
        assert last["attribution/staleness"] > 0.5
        assert len(list((run.run_dir / "versions").iterdir())) == 4

    play(scenario)


def test_nothing_is_written_where_something_is_wrong(play: Play, tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        with pytest.raises(DataError, match="nothing"):
            await run.learner(learner={"init_from": str(tmp_path / "nothing")})
        with pytest.raises(ConfigError, match="max_completion_tokens = 500"):
            await run.learner(sampling={"max_completion_tokens": 500})
        assert run.ledger() == []
        assert not (run.run_dir / "config.json").exists()

    play(scenario)


# --- on virtual time ------------------------------------------------------------------------------


def in_pool(world: World, seconds: float, is_slow: Callable[[str, str], bool]) -> None:
    """Have calls take so long that this says of: (pool, name of the function)."""
    takes = world.takes
    world.takes = lambda process, pool, function: (  # type: ignore[method-assign]
        seconds
        if is_slow(pool, getattr(function, "__name__", ""))
        else takes(process, pool, function)
    )


def finish(world: World, end: str = "finished") -> str:
    """Let the learner come to its end; return what it says of it."""
    world.run_until(lambda: world.end("learner"))
    reason, text = world.end("learner") or ("", "")
    assert reason == end
    return text


def test_steps_that_fail_one_after_the_other_end_the_run_with_the_cause(
    make_world: MakeWorld,
) -> None:
    """While it saves, it grants nothing, though a worker comes whose engine is idle."""
    world = make_world()
    for group in range(20):
        world.poison(group)
    world.learner()
    learner = world.node("learner")
    in_pool(world, 20.0, lambda pool, name: name == "write_checkpoint")
    granted: set[tuple[int, int]] = set()

    def look(sender: str, receiver: str, message: Any) -> None:
        if isinstance(message, Grant):
            granted.update((lease.group_id, lease.attempt) for lease in message.leases)

    with world.watch(look):
        world.worker("w1")
        world.worker("w2", sample_s=math.inf)
        world.run_until(lambda: not learner.role.is_granting)
        world.kill("w2")
        world.run_until(lambda: not learner.role.leases.num_leases("w2"))
        world.run(1.0)
        assert world.is_alive("learner"), "it has saved already"
        why = finish(world, "failed")
    assert "5 steps in a row failed, the last because the computation" in why
    assert [row["reason"] for row in world.records("discarded")] == ["step_error"] * 10
    assert world.trained() == []
    assert world.records("checkpoint")[-1]["step"] == 0, "what was trained before is not saved"
    assert granted == {(row["group"], row["attempt"]) for row in world.records("granted")}


def test_a_run_for_which_no_prompt_can_be_had_any_more_is_saved_and_ends(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = PromptSource.make

    def none_left(source: PromptSource, group_id: int) -> Prompt:
        if group_id >= 9:
            raise DataError("the rows are gone")
        return make(source, group_id)

    monkeypatch.setattr(PromptSource, "make", none_left)
    monkeypatch.setattr(rounds, "MAX_UNUSABLE", 20)
    world = make_world(checkpoint={"interval_steps": 100})
    world.learner()
    world.worker("w1")
    why = "20 prompts in a row cannot be used, the last because: the rows are gone"
    assert finish(world, "failed") == why
    assert world.step > 0
    assert world.records("checkpoint")[-1]["step"] == world.step
    assert (world.end("w1") or ("", ""))[1] == ""


def test_a_slow_example_holds_up_its_own_group_alone(make_world: MakeWorld) -> None:
    """Each takes its time in a thread; the loop grants what is there, and answers meanwhile."""
    world = make_world()
    world.learner(run={"max_steps": 8})
    in_pool(world, 3.0, lambda pool, name: pool == "prompts")
    world.worker("w1")
    world.run_until(lambda: world.stored() == [0], within_s=4.0)
    finish(world)
    assert [row["group"] for row in world.records("granted")] == [*range(16)]
    world.audit(is_finished=True)


def test_a_result_whose_prompt_is_being_made_is_taken_when_it_comes_again(
    make_world: MakeWorld,
) -> None:
    world = make_world()
    world.learner()
    world.worker("w1", sample_s=2.0)
    world.run_until(lambda: world.sampling("w1"))
    out = world.sampling("w1")
    world.kill("learner")
    in_pool(world, 5.0, lambda pool, name: pool == "prompts")
    world.learner()
    world.run_until(lambda: out <= set(world.acknowledged()))
    assert all(row["attempt"] == 0 for row in world.records("accepted") if row["group"] in out)


def test_a_reward_out_of_bounds_ends_its_group(make_world: MakeWorld) -> None:
    """However it came past the worker's own check."""
    world = make_world()
    world.refuse_group(1)
    world.learner(run={"max_steps": 3})
    world.worker("w1")
    finish(world)
    assert world.ends_of(1) == ["reward_too_large"]
    assert 1 not in world.stored()
    assert world.count("learner", "discarded/reward_too_large") == 1
    assert any("is beyond task.max_reward" in note for note in world.notes("learner"))


@pytest.mark.slow
def test_pull_refreshes_before_every_request_and_trains_on_policy(make_world: MakeWorld) -> None:
    world = make_world(sync={"mode": "pull", "max_staleness": 0})
    world.learner(run={"max_steps": 5})
    world.worker("w1")
    world.worker("w2")
    finish(world)
    assert [list(row["staleness"]) for row in world.records("trained")] == [["0"]] * 5
    # Every request was made of a worker that held the newest weights, and was answered by them.
    step = 0
    for record in read_ledger(world.run_dir):
        if record["kind"] == "published":
            step = record["version"][1]
        elif record["kind"] == "granted":
            assert record["version"] == [1, step]
        elif record["kind"] == "accepted":
            assert record["versions"] == [[1, step]]
    assert step == 5


@pytest.mark.parametrize("is_slow", ["seal", "reader"])
def test_a_slow_version_puts_off_the_next_one_and_no_step(
    make_world: MakeWorld, is_slow: str
) -> None:
    """A version is slow to arrive on the host, or slowly read from its memory."""
    # Just in time, the learner may wait for groups while it learns how slow the versions are.
    world = make_world(sync={"max_staleness": 10, "publish_period": 1, "eager": True})
    if is_slow == "seal":
        in_pool(world, 3.5 * world.train_s, lambda pool, name: name == "seal")
    world.learner(run={"max_steps": 16})
    world.worker("w1")
    trained_at: list[float] = []
    read: list[memoryview] = []

    def has_ended() -> bool:
        if world.step > len(trained_at):
            trained_at.append(world.now)
            if world.step == 8:
                read.clear()
            elif is_slow == "reader" and world.step in (3, 4):
                read.append(world.node("learner")._versions.newest.memory[:1])
        return world.end("learner") is not None

    world.run_until(has_ended)
    gaps = [end - begin for begin, end in pairwise(trained_at)]
    assert max(gaps[1:]) < 1.5 * world.train_s, "the first groups are sampled one by one"
    published = [step for _, step in world.published()]
    put_off = [end - begin for begin, end in pairwise(published)]
    if is_slow == "seal":
        assert set(put_off[1:-1]) == {4}, "as soon as the version before is coded"
    else:
        # There is memory for a third image, but not for a fourth, until the readers have ended.
        assert 3 <= max(put_off) <= 5
        assert published[-5:] == [12, 13, 14, 15, 16]
    world.audit(is_finished=True)


def test_the_last_weights_are_published_whatever_the_period_and_a_resume_only_finishes(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[int] = []

    def plan(plans: Plans, *, now: float) -> list[Action]:
        role = world.node("learner").role
        newest = role.broadcast.newest_complete
        assert newest is None or newest.step < role.step, "that version is out already"
        planned.append(role.step)
        return []

    monkeypatch.setattr(Plans, "before_publish", plan)
    world = make_world(sync={"max_staleness": 2, "publish_period": 2})
    for published in ([(1, 0), (1, 2), (1, 3)], [(2, 3)]):
        world.learner(run={"max_steps": 3})
        world.worker("w1")
        finish(world)
        assert world.published()[-len(published) :] == published
        assert world.records("finished")[-1] == list(read_ledger(world.run_dir))[-1]
    assert planned == [0, 2, 3, 3], "the way is planned before a version goes out"
    assert [row["step"] for row in world.records("trained")] == [1, 2, 3]
    world.audit(is_finished=True)


@pytest.mark.parametrize("activity", ["saving a checkpoint", "exporting", "done"])
def test_an_interrupt_before_the_first_worker_saves_and_one_at_the_end_lets_it_finish(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch, activity: str
) -> None:
    world = make_world()
    world.learner()
    world.run(0.1)
    world.interrupt("learner")
    finish(world, "interrupted")
    assert world.records("checkpoint")[-1]["step"] == 0
    begin = Progress.begin

    def begin_and_interrupt(progress: Progress, now_doing: str, *, now: float) -> None:
        begin(progress, now_doing, now=now)
        if world.step == 3 and now_doing == activity:
            world.node("learner").interrupt()

    monkeypatch.setattr(Progress, "begin", begin_and_interrupt)
    world.learner(run={"max_steps": 3})
    world.worker("w1")
    finish(world)
    assert [row["step"] for row in world.records("checkpoint")].count(3) == 1
    world.audit(is_finished=True)


def test_a_spool_that_is_full_ends_the_run(make_world: MakeWorld) -> None:
    world = make_world()
    world.learner()
    world.node("learner").ledger.spool_bytes = 100
    world.worker("w1")
    assert "limits.spool_bytes" in finish(world, "failed")


def test_a_resumed_run_knows_what_nodes_could_send(make_world: MakeWorld) -> None:
    world = make_world()
    told: list[float | None] = []
    for _ in range(2):
        world.learner(run={"max_steps": world.step + 2 if told else 2})
        world.worker("w1")
        learner, worker = world.node("learner"), world.node("w1")
        told.append(learner.role.broadcast.uplink.bytes_per_s)
        learner.role.broadcast.uplink.show(3e9)
        worker.role.broadcast.uplink.show(5e9)
        finish(world)
        assert read_uplinks(world.run_dir, log=learner.log) == {"learner": 3e9, "w1": 5e9}
    assert told == [None, 3e9]
