"""Whole runs in one process: the real parts of all roles on the memory network."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from echo.core.errors import ConfigError, DataError, StorageError
from echo.core.rollout import Group
from echo.leases.partials import PartialGroup
from echo.runtime.learner.node import LearnerNode
from echo.tasks.rewards import TaskHost
from echo.train.step import StepError
from echo.wire.actions import Action
from echo.wire.messages import Ack, Announce, Grant
from tests.e2e.audit import read_ledger
from tests.roles.harness import message_of, note_ways
from tests.runtime.harness import Play, Run, ends, running

MANY = {"max_steps": 1000}


async def reach_step(learner: LearnerNode, step: int) -> None:
    assert await learner.wait_until(lambda: learner.session.step >= step, within_s=60)


def assert_every_group_ended_once(run: Run) -> None:
    assert [end for end in ends(run.ledger()).values() if len(end) != 1] == []


def test_a_run_trains_evaluates_saves_and_ends_everybody(play: Play) -> None:
    async def scenario(run: Run) -> None:
        learner, worker = await run.learner(), await run.worker("w1")
        async with running(learner, worker) as (learning, working):
            assert await learning == "finished"
            assert await working == "the run is finished"
        assert [row["step"] for row in run.ledger("trained")] == [1, 2, 3]
        assert_every_group_ended_once(run)
        evals = [row["eval/version"] for _, row in run.rows if "eval/version" in row]
        assert (evals[0], evals[-1]) == (0, 3)
        assert (run.run_dir / "checkpoints" / "latest").read_text() == "step_000003\n"
        AutoModelForCausalLM.from_pretrained(run.run_dir / "final")
        assert run.snapshots[-1].step == 3

    play(scenario)


@pytest.mark.parametrize("are_stored", [True, pytest.param(False, marks=pytest.mark.matrix)])
def test_what_a_message_tells_of_is_on_record_before_it_leaves(
    play: Play, *, are_stored: bool
) -> None:
    """A kill of the learner right after a message leaves its cause in the ledger."""

    async def scenario(run: Run) -> None:
        learner = await run.learner(batch={"keep_zero_variance": are_stored})
        send, told, untold = learner.transport.send, Counter[str](), []

        def watched(peer: str, frames: Sequence[bytes], **how: bool) -> bool:
            match message_of(frames):
                case Grant(leases=leases):
                    kinds, tags = {"granted"}, {(e.group_id, e.attempt) for e in leases}
                case Ack(group_id=group, attempt=attempt, outcome="accepted"):
                    kinds, tags = {"accepted", "discarded"}, {(group, attempt), (group, None)}
                case Announce(version=version):
                    kinds, tags = {"published"}, {(version.lineage, version.step)}
                case _:
                    return bool(send(peer, frames, **how))
            on_record = {
                tuple(r["version"]) if r["kind"] == "published" else (r["group"], r.get("attempt"))
                for r in run.ledger()
                if r["kind"] in kinds
            }
            told.update(kinds)
            is_told = tags & on_record if "discarded" in kinds else tags <= on_record
            untold.extend([] if is_told else [(kinds, tags)])
            return bool(send(peer, frames, **how))

        learner.transport.send = watched
        async with running(learner, await run.worker("w1")) as (learning, _):
            assert await learning == "finished"
        assert untold == []
        assert min(told["granted"], told["accepted"]) >= 3
        assert told["published"] >= 1

    play(scenario)


REWARDS = "tests.runtime.rewards"


def test_groups_that_teach_nothing_give_their_admission_back(play: Play) -> None:
    async def scenario(run: Run) -> None:
        learner = await run.learner(
            task={"kind": f"{REWARDS}:SometimesEqual"},
            batch={"keep_zero_variance": False},
            sync={"max_staleness": 0},
        )
        async with running(learner, await run.worker("w1")) as (learning, _):
            assert await learning == "finished"
        left_out = {r["group"] for r in run.ledger("discarded") if r["reason"] == "zero_variance"}
        trained = {group for r in run.ledger("trained") for group in r["groups"]}
        # Every third prompt has rewards that differ; the others end, and more are granted for them.
        assert {group % 3 for group in trained} == {0}
        assert {group % 3 for group in left_out} == {1, 2}
        accepted = {r["group"] for r in run.ledger("accepted")}
        assert not accepted & left_out
        assert_every_group_ended_once(run)
        counters = learner.session.counters.as_dict()
        assert counters["discarded/zero_variance"] == len(left_out)
        rows = [row for _, row in run.rows if "groups/useful" in row]
        assert len(rows) == 3
        assert sum(row["groups/all_right"] for row in rows) > 0
        assert sum(row["groups/all_wrong"] for row in rows) > 0

    play(scenario)


def test_a_run_from_which_nothing_is_learned_ends_and_says_why(
    play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(run: Run) -> None:
        learner = await run.learner(
            run=MANY,
            task={"kind": f"{REWARDS}:AlwaysRight"},
            batch={"keep_zero_variance": False, "max_zero_signal_batches": 3},
        )
        async with running(learner, await run.worker("w1")) as (learning, working):
            assert await learning == "finished"
            assert await working == "the run is finished"
        assert run.ledger("trained") == []
        reasons = [r["reason"] for r in run.ledger("discarded")]
        assert reasons.count("zero_variance") >= 6
        assert [row["eval/version"] for _, row in run.rows if "eval/version" in row] == [0]
        assert (run.run_dir / "final").exists()

    with caplog.at_level(logging.WARNING):
        play(scenario)
    assert "the task is solved, and the run ends at step 0" in caplog.text


@pytest.mark.slow
def test_a_fast_worker_with_equal_rewards_ends_no_run_that_others_work_for(
    play: Play, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(run: Run) -> None:
        learner = await run.learner(
            task={"kind": f"{REWARDS}:NeverEqual"},
            batch={"keep_zero_variance": False, "max_zero_signal_batches": 3},
        )
        bad, honest = await run.worker("bad"), await run.worker("honest")
        finished, at_once, score = bad.session.finished, bad._score, honest._score
        members = learner.session.roster.nodes

        async def once_both_are_here(partial: PartialGroup) -> None:
            await learner.wait_until(
                lambda: "honest" in members and members["honest"].worker.capacity > 0, within_s=60
            )
            await at_once(partial)

        def equal(group: Group, *, now: float) -> list[Action]:
            rollouts = tuple(replace(rollout, reward=1.0) for rollout in group.rollouts)
            return finished(replace(group, rollouts=rollouts), now=now)

        async def late(partial: PartialGroup) -> None:
            await asyncio.sleep(0.5)
            await score(partial)

        monkeypatch.setattr(bad.session, "finished", equal)
        monkeypatch.setattr(bad, "_score", once_both_are_here)
        monkeypatch.setattr(honest, "_score", late)
        async with running(learner, bad, honest) as (learning, *_):
            assert await learning == "finished"
        assert learner.session.step == 3
        workers = {r["group"]: r["worker"] for r in run.ledger("accepted")}
        trained = [group for r in run.ledger("trained") for group in r["groups"]]
        assert {workers[group] for group in trained} == {"honest"}
        assert_every_group_ended_once(run)

    with caplog.at_level(logging.WARNING):
        play(scenario)
    assert "bad is set aside until other workers have delivered 2 groups" in caplog.text


def test_a_run_that_ends_early_evaluates_its_last_weights(play: Play) -> None:
    async def scenario(run: Run) -> None:
        learner = await run.learner(
            run=MANY,
            task={"kind": f"{REWARDS}:RightLater"},
            batch={"keep_zero_variance": False, "max_zero_signal_batches": 3},
            eval={"interval_steps": 500},
        )
        async with running(learner, await run.worker("w1")) as (learning, _):
            assert await learning == "finished"
        step = learner.session.step
        assert 0 < step < 1000
        evals = [row["eval/version"] for _, row in run.rows if "eval/version" in row]
        assert evals == [0, step]
        assert run.ledger("checkpoint")[-1]["step"] == step
        assert_every_group_ended_once(run)

    play(scenario)


FAILING = {"kind": "tests.runtime.losses:failing", "normalize_by_std": False}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "reason"),
    [
        pytest.param("raise", "step_error", marks=pytest.mark.matrix),
        ("overflow", "nonfinite_gradient"),
    ],
)
def test_a_group_that_makes_a_step_fail_ends_and_the_others_are_trained(
    play: Play, caplog: pytest.LogCaptureFixture, how: str, reason: str
) -> None:
    async def scenario(run: Run) -> None:
        learner = await run.learner(
            task={"kind": f"{REWARDS}:OneLarge"},
            loss={**FAILING, "options": {"how": how}},
            sync={"max_staleness": 0},  # there is room for one batch: what ended gives its back
        )
        async with running(learner, await run.worker("w1")) as (learning, _):
            assert await learning == "finished"
        found = ends(run.ledger())
        assert found.pop(1) == [reason]
        assert found[0] == ["trained at 1"]
        assert [row["step"] for row in run.ledger("trained")] == [1, 2, 3]
        assert_every_group_ended_once(run)
        assert learner.session.counters[f"discarded/{reason}"] == 1
        assert learner.session.counters[f"steps_failed/{reason}"] == 1

    with caplog.at_level(logging.WARNING):
        play(scenario)
    assert "ended without training: group 1 of w1" in caplog.text


@pytest.mark.slow
def test_steps_that_fail_one_after_the_other_end_the_run_with_the_cause(play: Play) -> None:
    async def scenario(run: Run) -> None:
        loss = {**FAILING, "options": {"above": 0.0}}
        learner = await run.learner(task={"kind": f"{REWARDS}:OneLarge"}, loss=loss)
        async with running(learner, await run.worker("w1")) as (learning, _):
            with pytest.raises(StepError, match=r"5 steps in a row failed.*too much"):
                await learning
        failed = [r["group"] for r in run.ledger("discarded") if r["reason"] == "step_error"]
        assert len(failed) == 10
        assert run.ledger("trained") == []
        assert run.ledger("checkpoint")[-1]["step"] == 0, "what was trained before is not saved"

    play(scenario)


@pytest.mark.slow
@pytest.mark.parametrize("is_checked", [True, False])
def test_a_reward_out_of_bounds_ends_its_group_at_the_worker_or_at_the_learner(
    play: Play, monkeypatch: pytest.MonkeyPatch, *, is_checked: bool
) -> None:
    if not is_checked:  # a worker that says what it likes
        monkeypatch.setattr(TaskHost, "_bounded", lambda self, call, value: value)

    async def scenario(run: Run) -> None:
        task = {"kind": f"{REWARDS}:OneLarge", "options": {"scale": 1.7e308}}
        learner = await run.learner(task=task)
        async with running(learner, await run.worker("w1")) as (learning, _):
            assert await learning == "finished"
        end = {r["group"]: r["reason"] for r in run.ledger("discarded")}
        assert end[1] == "reward_too_large"
        assert 1 not in {r["group"] for r in run.ledger("accepted")}
        assert learner.session.counters["discarded/reward_too_large"] == 1
        assert all(abs(row.get("reward/mean", 0.0)) <= 1.0 for _, row in run.rows)

    play(scenario)


def test_the_mismatch_is_attributed_and_what_it_needs_is_kept_for_a_while(play: Play) -> None:
    async def scenario(run: Run) -> None:
        learner = await run.learner(
            run={"max_steps": 6},
            sync={"max_staleness": 2},
            optimizer={"learning_rate": 1e-2, "warmup_steps": 0},
            metrics={"attribution_steps": 2},
            task={"kind": f"{REWARDS}:SometimesEqual"},
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


@pytest.mark.slow
def test_pull_refreshes_before_every_request_and_trains_on_policy(play: Play) -> None:
    async def scenario(run: Run) -> None:
        learner = await run.learner(
            run={"max_steps": 5},
            sync={"mode": "pull", "max_staleness": 0},
            task={"kind": f"{REWARDS}:SometimesEqual"},
            batch={"keep_zero_variance": False},
        )
        async with running(learner, await run.worker("w1"), await run.worker("w2")) as (
            learning,
            *_,
        ):
            assert await learning == "finished"
        assert [list(r["staleness"]) for r in run.ledger("trained")] == [["0"]] * 5
        # Every request was made of a worker that held the newest weights, and was answered by them.
        step = 0
        for record in run.ledger():
            if record["kind"] == "published":
                step = record["version"][1]
            elif record["kind"] == "granted":
                assert record["version"] == [1, step]
            elif record["kind"] == "accepted":
                assert record["versions"] == [[1, step]]
        assert step == 5

    play(scenario)


def test_the_last_weights_are_published_and_evaluated_whatever_the_period(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = note_ways(monkeypatch)

    async def scenario(run: Run) -> None:
        learner = await run.learner(sync={"max_staleness": 2, "publish_period": 2})
        async with running(learner, await run.worker("w1")) as (learning, _):
            await learning
        assert [r["version"] for r in run.ledger("published")] == [[1, 0], [1, 2], [1, 3]]
        evals = [row["eval/version"] for _, row in run.rows if "eval/version" in row]
        assert evals[-1] == 3
        assert planned == [0, 2, 3], "the way is planned before a version goes out"

    play(scenario)


def test_a_resume_at_the_last_step_only_finishes(play: Play) -> None:
    async def scenario(run: Run) -> None:
        for resume in (False, True):
            learner = await run.learner(
                resume=resume, sync={"max_staleness": 3, "publish_period": 2}
            )
            async with running(learner, await run.worker("w1")) as (learning, _):
                assert await learning == "finished"
            shutil.rmtree(run.run_dir / "final")
        assert [r["step"] for r in run.ledger("trained")] == [1, 2, 3]
        assert [r["version"] for r in run.ledger("published")][-1] == [2, 3]
        assert len([r for r in run.ledger("published") if r["version"] == [2, 3]]) == 1
        assert_every_group_ended_once(run)

    play(scenario)


def test_an_interrupt_before_the_first_worker_ends_at_once(play: Play) -> None:
    async def scenario(run: Run) -> None:
        learner = await run.learner()
        async with running(learner) as (learning,):
            await asyncio.sleep(0.05)
            learner.interrupt()
            assert await learning == "interrupted"
        assert run.ledger("checkpoint")[-1]["step"] == 0

    play(scenario)


def test_an_interrupt_during_the_end_lets_it_finish(play: Play) -> None:
    async def scenario(run: Run) -> None:
        learner = await run.learner(eval={"num_prompts": 256})
        async with running(learner, await run.worker("w1")) as (learning, _):
            await reach_step(learner, 3)
            assert await learner.wait_until(lambda: not learner.session.is_granting, within_s=60)
            learner.interrupt()
            assert await learning == "finished"
        assert [r["step"] for r in run.ledger("checkpoint")].count(3) == 1
        assert (run.run_dir / "final").exists()
        assert_every_group_ended_once(run)

    play(scenario)


def test_a_failed_checkpoint_is_survived(play: Play, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(run: Run) -> None:
        learner = await run.learner(limits={"min_free_disk_bytes": 1 << 60})
        async with running(learner, await run.worker("w1")) as (learning, _):
            assert await learning == "finished"
        assert run.ledger("checkpoint") == []
        assert learner.session.counters.as_dict()["checkpoints_failed"] == 2

    with caplog.at_level(logging.WARNING):
        play(scenario)
    assert "limits.min_free_disk_bytes" in caplog.text


def test_a_ledger_that_cannot_be_written_ends_the_run(play: Play) -> None:
    async def scenario(run: Run) -> None:
        learner = await run.learner(run=MANY, limits={"spool_bytes": 1 << 20})
        learner._ledger.spool_bytes = 100
        async with running(learner, await run.worker("w1")) as (learning, _):
            with pytest.raises(StorageError, match=r"limits\.spool_bytes"):
                await learning

    play(scenario)


def test_nothing_is_written_before_everything_is_built(play: Play, tmp_path: Path) -> None:
    async def scenario(run: Run) -> None:
        missing = str(tmp_path / "nothing")
        with pytest.raises(DataError, match="nothing"):
            await run.learner(learner={"init_from": missing})
        assert run.ledger() == []
        assert not (run.run_dir / "config.json").exists()
        async with running(await run.learner(), await run.worker("w1")) as (learning, _):
            assert await learning == "finished"

    play(scenario)


def test_a_run_can_start_from_the_weights_of_another(play: Play) -> None:
    async def scenario(run: Run) -> None:
        async with running(await run.learner(), await run.worker("w1")) as (learning, _):
            await learning
        start = {"init_from": str(run.run_dir / "final")}
        learner = await run.learner(learner=start, run={"name": "second", "max_steps": 1})
        async with running(learner, await run.worker("w1")) as (learning, _):
            await learning
        published = read_ledger(run.directory / "second")
        first = next(r for r in published if r["kind"] == "sealed")
        # What was exported is what was published, bit by bit.
        assert first["image_hash"] == run.ledger("sealed")[-1]["image_hash"]

    play(scenario)


def test_a_prompt_without_room_is_refused(play: Play) -> None:
    async def scenario(run: Run) -> None:
        with pytest.raises(ConfigError, match="max_completion_tokens = 500"):
            await run.learner(sampling={"max_completion_tokens": 500})

    play(scenario)
