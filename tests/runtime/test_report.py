"""Totals in a run's rows and snapshots, and what the learner says that it waits for."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from echo.algo.diagnostics import GroupStats
from echo.core.monitoring.metrics import LearningCurve
from echo.core.rollout import Group, PolicyVersion
from echo.engine import allocator
from echo.engine.engine import Completion, Request, Sampling
from echo.roles.members import Member
from echo.runtime.learner import report
from echo.runtime.learner.report import (
    IDLE_WINDOW_STEPS,
    LinkTraffic,
    Progress,
    RemainingTime,
    TaskMetrics,
    largest,
)
from echo.runtime.learner.versions.evaluation import (
    EvalResult,
    Evaluations,
    EvaluationSchedule,
    Evaluator,
)
from echo.tasks.rewards import InlineHost, Limits
from echo.tasks.task import Example, Task
from echo.wire.messages import NodeStats
from tests.engine.watchers import watching
from tests.promises.conftest import MakeWorld
from tests.promises.world import StubEngine
from tests.roles.harness import make_hello
from tests.runtime.test_checkpoint import make_group


def test_a_row_has_times_rates_and_staleness_of_its_step() -> None:
    progress = Progress(staleness_tokens={0: 100}, now=10.0)
    group = make_group(0)
    progress.accepted(group, now=11.0)
    progress.published(0.25)
    progress.stepped([group], waited_s=1.5, trained_s=0.5, staleness={0: 3, 2: 1})
    row = progress.step_metrics({"loss/policy": 0.5}, {0: 3, 2: 1}, step=7, bytes_sent=70, now=12.0)
    assert row == {
        **GroupStats.of([group]).metrics(),
        "loss/policy": 0.5,
        "time/step": 2.0,
        "time/train": 0.5,
        "time/wait_for_batch": 1.5,
        "learner/idle_ratio": 0.75,
        "time/publish": 0.25,
        "perf/accepted_tokens_per_s": 2.0,
        "broadcast/bytes": 70,
        "staleness/mean": 0.5,
        "staleness/max": 2,
        "staleness/hist": {"0": 3, "2": 1},
    }
    progress.stepped([group], waited_s=0.0, trained_s=0.5, staleness={})
    told = progress.last_step
    assert told is not None
    assert (told.step, told.mean_staleness, told.max_staleness) == (7, 0.5, 2)
    assert (told.reward, told.accepted_tokens_per_s, told.seconds) == (row["reward/mean"], 2.0, 2.0)
    again = progress.step_metrics({}, {}, step=8, bytes_sent=100, now=13.0)
    assert (again["broadcast/bytes"], again["perf/accepted_tokens_per_s"]) == (30, 0.0)
    assert "staleness/mean" not in again


def test_loading_the_model_is_no_part_of_the_first_step() -> None:
    progress = Progress(staleness_tokens={}, now=0.0)
    progress.begin("publishing", now=50.0)
    progress.begin("", now=51.0)
    row = progress.step_metrics({}, {}, step=1, bytes_sent=0, now=60.0)
    assert row["time/step"] == 10.0


def rewarded(group_id: int, *rewards: float) -> Group:
    group = make_group(group_id)
    [rollout] = group.rollouts[:1]
    return replace(group, rollouts=tuple(replace(rollout, reward=reward) for reward in rewards))


def test_groups_that_did_not_count_are_part_of_the_rewards_of_their_step() -> None:
    progress = Progress(staleness_tokens={}, now=0.0)
    for number, rewards in enumerate([(1, 1), (0, 0), (1, 1)]):
        progress.left_out(rewarded(number, *rewards), "zero_variance", now=1.0)
    assert progress.num_accepted_tokens == 0
    for expected in ((0.625, 0.5, 0.25), (0.5, 0.0, 1.0)):
        progress.stepped([rewarded(9, 1, 0)], waited_s=0.0, trained_s=1.0, staleness={})
        row = progress.step_metrics({"reward/mean": 0.5}, {}, step=1, bytes_sent=0, now=2.0)
        told = row["reward/mean"], row["groups/all_right"], row["groups/useful"]
        assert row["perf/accepted_tokens_per_s"] == 0.0
        assert row["groups/dropped/zero_variance"] == (0.75 if expected[2] < 1 else 0.0)
        # Told with the first step that follows, and never again.
        assert told == expected


def test_a_useful_group_ends_a_zero_signal_stretch() -> None:
    progress = Progress(staleness_tokens={}, now=0.0)
    progress.left_out(rewarded(0, 0, 0), "zero_variance", now=1.0)
    progress.left_out(rewarded(1, 0, 0), "zero_variance", now=1.0)
    assert progress.zero_signal.num_groups == 2
    assert "choose easier ones" in progress.describe_zero_signal(3)
    progress.accepted(rewarded(2, 0, 1), now=1.0)
    assert progress.zero_signal.num_groups == 0
    progress.left_out(rewarded(3, 1, 1), "zero_variance", now=1.0)
    assert progress.describe_zero_signal(3) == (
        "nothing could be learned from the last 1 group (1 zero_variance): the run ends at step "
        "3; every reward was 1: the task is solved"
    )


@pytest.mark.parametrize(
    ("reason", "rewards", "advice"),
    [
        ("zero_variance", [(0, 0), (-1, -1)], "never among the answers to one: all of them are"),
        ("zero_variance", [(0, 0)] * 2, "every reward was 0. Call the reward with a right answer"),
        ("zero_variance", [(0.1, 0.1)] * 2, "every reward was 0.1: if more cannot be had, the ta"),
        ("all_masked", [(0, 1)], "raise sampling.max_completion_tokens"),
        ("lost_member", [(0, 1)], "needs a trained token in each rollout"),
        ("no_opinion", [(math.nan, 1)], "the reward gave None for all answers to a prompt but one"),
    ],
)
def test_the_advice_follows_what_the_groups_have_in_common(
    reason: str, rewards: list[tuple[float, ...]], advice: str
) -> None:
    progress = Progress(staleness_tokens={}, now=0.0)
    for number, each in enumerate(rewards):
        if reason == "no_opinion":
            progress.unscored(rewarded(number, *each))
        else:
            progress.left_out(rewarded(number, *each), reason, now=1.0)
    text = progress.describe_zero_signal(3)
    assert advice in text
    assert ("easier" in text) is advice.startswith("every reward was 0. ")


def test_a_reward_that_never_gives_a_number_has_failed() -> None:
    progress = Progress(staleness_tokens={}, now=0.0)
    progress.unscored(rewarded(0, math.nan, 1))
    progress.unscored(rewarded(1, math.nan, math.nan))
    progress.unscored(rewarded(2, math.nan, math.nan))
    failing = progress.describe_failing(0)
    assert failing is not None
    assert "2 of the last 3 groups could not be finished (3 no_opinion): the run ends" in failing
    assert "group 2: the reward gave None for each answer, as a function without" in failing


def test_a_group_without_opinions_is_neither_useful_nor_in_the_mean_reward() -> None:
    progress = Progress(staleness_tokens={}, now=0.0)
    progress.unscored(rewarded(0, math.nan, math.nan))
    progress.stepped([rewarded(9, 1, 0)], waited_s=0.0, trained_s=1.0, staleness={})
    row = progress.step_metrics({}, {}, step=1, bytes_sent=0, now=2.0)
    assert (row["reward/mean"], row["groups/useful"]) == (0.5, 0.5)
    assert row["groups/dropped/no_opinion"] == 0.5


def run_steps(
    progress: Progress, num: int, *, now: float, waited_s: float, trained_s: float
) -> float:
    for _ in range(num):
        progress.begin("", now=now)
        progress.begin("training", now=now + waited_s)
        now += waited_s + trained_s
        progress.stepped([make_group(0)], waited_s=waited_s, trained_s=trained_s, staleness={})
    return now


def test_the_recent_idle_share_forgets_what_was_long_ago() -> None:
    progress = Progress(staleness_tokens={}, now=0.0)
    now = run_steps(progress, 100, now=0.0, waited_s=9.0, trained_s=1.0)
    assert progress.recent_idle_ratio(now) == pytest.approx(0.9, abs=0.02)
    now = run_steps(progress, 60, now=now, waited_s=0.0, trained_s=1.0)
    assert progress.recent_idle_ratio(now) == 0.0
    assert progress.idle_ratio == pytest.approx(900 / 1060)
    # A wait that goes on counts while it does.
    progress.begin("", now=now)
    assert progress.idle_ratio_by_now(now + 30) == pytest.approx(930 / 1090)
    assert progress.recent_idle_ratio(now + 30) == pytest.approx(0.5)
    assert progress.recent_idle_ratio(now + 600) > 0.98
    # Of long steps it is that of some steps.
    now = run_steps(progress, 30, now=now, waited_s=100.0, trained_s=300.0)
    assert progress.recent_idle_ratio(now) == pytest.approx(0.25)
    assert len(progress._waits) <= IDLE_WINDOW_STEPS + 1


def test_a_pause_is_neither_a_wait_nor_part_of_a_step() -> None:
    progress = Progress(staleness_tokens={}, now=0.0)
    now = run_steps(progress, 10, now=0.0, waited_s=1.0, trained_s=3.0)
    progress.step_metrics({}, {}, step=10, bytes_sent=0, now=now)
    progress.begin("", now=40.0)
    progress.pause(True, now=42.0)
    for at in (42.0, 900.0):
        assert progress.recent_idle_ratio(at) == pytest.approx(12 / 42)
        assert progress.idle_ratio_by_now(at) == pytest.approx(12 / 42)
    progress.pause(False, now=1042.0)
    progress.begin("training", now=1044.0)
    # While the learner trains, its time counts, whether the run is paused or not.
    progress.pause(True, now=1045.0)
    assert progress.running(1050.0) == 50.0
    row = progress.step_metrics({}, {}, step=11, bytes_sent=0, now=1050.0)
    assert row["time/step"] == 10.0
    progress.begin("", now=1050.0)
    progress.pause(True, now=1060.0)  # once more
    progress.pause(False, now=1070.0)
    assert progress.idle_ratio_by_now(1070.0) == pytest.approx(14 / 50)


def test_the_curve_goes_on_where_a_run_was_resumed_after_its_last_hole() -> None:
    rewards = {step: step / 10 for step in range(1, 8) if step != 2}
    evaluations = ((0, 0.3, 0.2), (4, 0.5, 0.4), (6, 0.6, 0.5))
    curve = LearningCurve(rewards=rewards, evaluations=evaluations)
    progress = Progress(staleness_tokens={}, now=0.0, step=4, earlier=curve)
    assert list(progress.curves.rewards) == [0.3, 0.4]  # later ones are void
    assert list(progress.curves.evals) == [(0, 0.3, 0.2), (4, 0.5, 0.4)]
    progress.evaluated(4, 0.55, 0.45, is_rate=False, num_errors=2)
    assert not progress.curves.evals_are_rates
    assert list(progress.curves.evals) == [(0, 0.3, 0.2), (4, 0.55, 0.45)]
    assert progress.curves.eval_errors == {4: 2}


def test_the_learner_says_whom_it_waits_for(make_world: MakeWorld) -> None:
    world = make_world()
    world.learner(run={"max_steps": 3})
    world.run_until(lambda: world.snapshots and world.waiting_for())
    assert world.snapshots[0].activity in ("starting", "publishing")
    snapshot = world.snapshots[-1]
    assert snapshot.waiting_for == "2 groups; no worker is connected"
    assert (snapshot.step, snapshot.max_steps, snapshot.num_buffered) == (0, 3, 0)
    assert snapshot.versions[0].done == 1.0
    learner = world.node("learner")
    for number in range(3):
        learner.progress.left_out(rewarded(number, 1, 1), "zero_variance", now=1.0)
    world.run(1.0)
    assert world.waiting_for().endswith(
        "; nothing could be learned from the last 3 groups (3 zero_variance)"
    )


STEADY = (900.0, 910.0, 920.0, 930.0)
"""When steps were made: the first of a process waits for workers."""


@pytest.mark.parametrize(
    ("steps", "now", "eta_s"),
    [
        (STEADY[:1], 900.0, None),
        (STEADY, 930.0, 160.0),
        (STEADY, 933.0, 157.0),  # three seconds into the step under way, three fewer are left
        # A time without workers does not move it.
        ((*STEADY, 4000.0), 4000.0, 160.0),
        (STEADY, 4000.0, 150.0),
    ],
)
def test_remaining_time(steps: Sequence[float], now: float, eta_s: float | None) -> None:
    """What is left of 16 steps."""
    pace = RemainingTime()
    for at in steps:
        pace.stepped(now=at)
    assert pace.eta_s(16, now=now) == eta_s


@pytest.mark.slow
def test_a_snapshot_shows_every_node_and_at_the_end_what_the_run_has_learned(
    make_world: MakeWorld,
) -> None:
    world = make_world()
    world.learner(run={"max_steps": 8})
    for name in ("w0", "w1"):
        world.worker(name)
    world.run_until(lambda: world.end("learner"))
    last = world.snapshots[-1]
    assert {node.node_id for each in world.snapshots for node in each.nodes} == {
        "learner", "w0", "w1",
    }  # fmt: skip
    assert sum(last.staleness_tokens.values()) > 0
    assert len(last.reward_history) == 8
    assert (last.activity, last.waiting_for) == ("done", "")
    views = [world.node(name).view() for name in ("w0", "w1")]
    assert sum(view.num_groups for view in views) >= 16
    assert all(view.num_tokens > 0 and view.version.startswith("v") for view in views)


@pytest.mark.slow
def test_the_share_of_wasted_tokens_counts_what_workers_sampled_that_are_gone(
    make_world: MakeWorld,
) -> None:
    world = make_world(run={"max_steps": 100})
    world.learner()
    world.worker("w1")
    world.run_until(lambda: world.step >= 10)
    role = world.node("w1").role
    role.partial_counts.update(resumed=1, wasted_tokens=role.tokens_sampled // 2)
    world.run_until(lambda: world.count("learner", "partials/wasted_tokens") > 0)
    world.kill("w1")
    world.worker("w2")
    world.run_until(lambda: "w1" not in world.node("learner").role.roster.nodes)
    step = world.step
    world.run_until(lambda: world.step >= step + 2)
    shares = [row["partials/wasted_ratio"] for row in world.rows if "partials/wasted_ratio" in row]
    assert shares == sorted(shares, reverse=True), "no more is wasted, and more is sampled"
    assert shares[0] > 1.5 * shares[-1]


# --- metrics of tasks -----------------------------------------------------------------------------


def test_totals_become_differences_over_all_workers() -> None:
    metrics = TaskMetrics(is_resumed=False)
    first = {
        "w1": {"env/calls": 10, "env/milliseconds": 500, "refused/stale": 3},
        "w2": {"env/calls": 10, "env/milliseconds": 1500, "env/errors": 2, "env/retries": 1},
    }
    assert metrics.row(first) == pytest.approx(
        {"env/calls": 20, "env/errors": 2, "env/retries": 1, "env/latency": 0.1}
    )
    second = {"w1": {"env/calls": 14, "env/milliseconds": 540}, "w2": first["w2"]}
    assert metrics.row(second) == pytest.approx(
        {"env/calls": 4, "env/errors": 0, "env/retries": 0, "env/latency": 0.01}
    )
    # A worker that starts anew or leaves takes nothing back.
    assert metrics.row({"w1": {"env/calls": 3}})["env/calls"] == 3
    assert metrics.row({"w1": {"env/calls": 3}, "w2": {"env/calls": 11}})["env/calls"] == 1


def test_a_resumed_learner_does_not_count_again_what_workers_counted_before() -> None:
    metrics = TaskMetrics(is_resumed=True)
    assert metrics.row({"w1": {"env/calls": 5000, "env/errors": 70}}) == {}
    row = metrics.row({"w1": {"env/calls": 5004, "env/errors": 71}, "learner": {"env/calls": 3}})
    assert (row["env/calls"], row["env/errors"]) == (7, 1), "its own counts begin at 0"


def test_of_workers_that_come_and_go_the_newest_are_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(report, "MAX_NAMES_KEPT", 2)
    metrics = TaskMetrics(is_resumed=False)
    for name in ("w1", "w2", "w3"):
        metrics.row({name: {"env/calls": 10}})
    assert metrics.row({"w2": {"env/calls": 11}})["env/calls"] == 1
    assert metrics.row({"w1": {"env/calls": 11}})["env/calls"] == 11


def test_bytes_are_counted_by_link_from_one_step_to_the_next() -> None:
    def members(*, received: int, parent: str = "relay") -> list[Member]:
        member = Member.of(make_hello("w1"), now=0.0)
        stats = NodeStats(bytes_received=received, parent=parent, downlink_bytes_per_s=5e6)
        member.node.stats = stats
        return [member]

    links = LinkTraffic(is_resumed=False)
    first = {"links/bytes": {"relay > w1": 100.0}, "links/goodput": {"relay > w1": 5e6}}
    assert links.row(members(received=100)) == first
    assert links.row(members(received=100)) == {}
    assert links.row(members(received=150, parent="w2"))["links/bytes"] == {"w2 > w1": 50.0}
    assert links.row(members(received=160, parent="-"))["links/bytes"] == {"w2 > w1": 10.0}
    restarted = links.row(members(received=30))
    assert restarted["links/bytes"] == {"relay > w1": 30.0}
    resumed = LinkTraffic(is_resumed=True)
    assert resumed.row(members(received=100)) == {}
    assert resumed.row(members(received=130))["links/bytes"] == {"relay > w1": 30.0}


def test_a_run_that_is_resumed_before_its_first_checkpoint_counts_only_new_bytes(
    make_world: MakeWorld,
) -> None:
    world = make_world(checkpoint={"interval_steps": 100})
    world.learner()
    world.worker("w1")
    world.run_until(lambda: world.step == 3)
    world.kill("learner")
    before, num_rows = world.bytes_received("w1"), len(world.rows)
    world.learner()
    world.run_until(lambda: len(world.rows) > num_rows)
    [row] = world.rows[num_rows:]
    assert row["lineage"] == 2
    assert sum(row.get("links/bytes", {}).values()) <= world.bytes_received("w1") - before


def test_a_table_of_many_names_adds_up() -> None:
    table = largest({f"n{number:03}": 1.0 + (number == 70) for number in range(100)})
    assert len(table) == 65
    assert (table["n070"], table["others"], sum(table.values())) == (2.0, 36.0, 101.0)


def test_what_is_rare_is_shown_from_its_first_time_on_and_of_no_call_nothing() -> None:
    metrics = TaskMetrics(is_resumed=False)
    assert metrics.row({"w1": {"engine/out_of_memory": 0, "refused/stale": 3}}) == {}
    assert metrics.row({"w1": {"engine/out_of_memory": 2}}) == {"engine/out_of_memory": 2}
    second = {"w1": {"engine/out_of_memory": 2, "env/turn_limit": 5}}
    assert metrics.row(second) == {"engine/out_of_memory": 0, "env/turn_limit": 5}
    played = {"w1": {**second["w1"], "env/episodes": 4, "env/turns": 10, "env/tool_calls": 6}}
    row = metrics.row(played)
    assert (row["env/turns"], row["env/tool_calls"]) == (2.5, 1.5), "per episode, since the last"
    assert "env/turns" not in metrics.row(played)


def test_the_trained_share_of_what_agents_sample_is_of_the_last_step() -> None:
    metrics = TaskMetrics(is_resumed=False)
    counts: dict[str, int] = {"agents/tokens_sampled": 90, "agents/tokens_trained": 30}
    counts |= {"agents/num_episodes": 4, "agents/num_chains": 6, "agents/num_turns": 10}
    first = {"w1": dict(counts), "w2": {}}
    expected = {"agents/trained_share": 1 / 3, "agents/abandoned_share": 0, "agents/chains": 1.5}
    expected["agents/turns"] = 2.5
    assert metrics.row(first) == pytest.approx(expected)
    assert metrics.row(first) == {}
    counts |= {"agents/tokens_sampled": 110, "agents/tokens_trained": 45}
    counts |= {"agents/tokens_abandoned": 5}
    expected = {"agents/trained_share": 0.75, "agents/abandoned_share": 0.25}
    assert metrics.row({"w1": counts}) == expected


# --- evaluation -----------------------------------------------------------------------------------


class EchoEngine(StubEngine):
    """Answers with the prompt's last token; sampled ones with that plus the seed's parity."""

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, *_: Any, **named: Any
    ) -> list[Completion]:
        ids = [int(r.prompt_ids[-1]) + (0 if sampling.greedy else r.seed % 2) for r in requests]
        logprobs, versions = np.zeros(1, np.float32), np.zeros((1, 2), np.int32)
        return [
            Completion(r.request_id, np.array([i], np.int32), logprobs, "stop", versions)
            for r, i in zip(requests, ids, strict=True)
        ]


class Same(Task):
    def example(self, index: int, *, split: str) -> Example:
        return Example(index=index, split=split, prompt=str(index), answer=str(index))

    def reward(self, example: Example, completion: str) -> float:
        if example.answer == "3":
            raise RuntimeError("no idea")
        return float(completion == example.answer)


SAMPLING = Sampling(1.0, 1.0, 0, 4, ())


def make_evaluator(
    prompts: Sequence[int] = range(4),
    engine: type[StubEngine] = EchoEngine,
    num_samples: int = 1,
) -> Evaluator:
    task = Same()
    text: Any = SimpleNamespace(decode=lambda ids: str(ids[0]), decode_all=lambda ids: str(ids[0]))
    return Evaluator(
        engine(),
        InlineHost(task, Limits(score_s=60.0, step_s=60.0)),
        prompts=[(task.example(i, split="heldout"), [0, i]) for i in prompts],
        text=text,
        sampling=SAMPLING,
        num_samples=num_samples,
    )


def line(result: EvalResult) -> str:
    """The log line of the first evaluation of a run."""
    return result.describe(is_rate=result.is_rate)


def test_the_mean_of_rewards_that_are_not_0_or_1_is_no_pass_rate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Same, "reward", lambda self, example, completion: 0.5)
    result = make_evaluator().evaluate(PolicyVersion(1, 7), {})
    assert result is not None
    metrics = result.metrics("same")
    assert (metrics["eval/same/reward"], metrics["eval/same/greedy"]) == (0.5, 0.5)
    assert "eval/same/pass@1" not in metrics
    assert line(result) == "evaluation of v7: held-out reward 0.500 sampled, 0.500 greedy"


def test_both_rates_are_means_and_a_failed_reward_counts_as_zero() -> None:
    result = make_evaluator().evaluate(PolicyVersion(1, 7), {})
    assert result is not None
    assert result.metrics("same") == {
        "eval/same/pass@1": 0.25,
        "eval/same/reward": 0.25,  # 1 of four: odd seeds answer one too many
        "eval/same/greedy": 0.75,
        "eval/version": 7,
        "eval/reward_errors": 2,
    }
    assert line(result).startswith(
        "evaluation of v7: held-out pass rate 0.250 sampled, 0.750 greedy; 2 of 8 rewards failed "
        "and count as 0: Same.reward on heldout example 3 raised RuntimeError: no idea"
    )


def test_several_answers_to_a_prompt_tell_what_the_best_of_some_would_be() -> None:
    """Seeds alternate between odd and even, so that every other answer is right."""
    result = make_evaluator(prompts=[0, 1, 2], num_samples=6).evaluate(PolicyVersion(1, 7), {})
    assert result is not None
    assert result.num_rewards == 3 * 6 + 3
    row = result.metrics("same")
    assert (row["eval/same/reward"], row["eval/same/avg@6"]) == (0.5, 0.5)
    assert row["eval/same/pass@2"] == pytest.approx(1 - 3 * 2 / (6 * 5))
    found = [row[f"eval/same/pass@{k}"] for k in (1, 4, 6)]
    assert found == pytest.approx([0.5, 1.0, 1.0])
    assert "0.500 sampled, 1.000 greedy, pass@6 1.000 [" in line(result)


def test_answers_without_an_opinion_are_in_no_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    opinions = {"0": None, "1": 0.5}
    monkeypatch.setattr(Same, "reward", lambda self, example, text: opinions[example.answer])
    result = make_evaluator(prompts=[0, 1]).evaluate(PolicyVersion(1, 7), {})
    assert result is not None
    assert (result.sampled, result.greedy, result.is_rate) == (0.5, 0.5, False)
    assert result.metrics("same")["eval/no_opinion"] == 2
    assert "(no opinion on 2 of 4 answers)" in line(result)
    nothing = make_evaluator(prompts=[0]).evaluate(PolicyVersion(1, 7), {})
    assert nothing is not None
    assert not nothing.has_figure
    assert line(nothing) == "evaluation of v7: no figure (no opinion on 2 of 2 answers)"


def test_an_evaluation_whose_rewards_all_fail_has_no_figure() -> None:
    result = make_evaluator(prompts=[3, 3]).evaluate(PolicyVersion(1, 0), {})
    assert result is not None
    assert result.metrics("same") == {"eval/version": 0, "eval/reward_errors": 4}
    expected = "evaluation of v0: no figure, 4 of 4 rewards failed: Same.reward"
    assert line(result).startswith(expected)


class NoProbabilities(EchoEngine):
    def generate(self, requests: Sequence[Request], *rest: Any, **named: Any) -> list[Completion]:
        spoilt: dict[str, Any] = {
            "finish_reason": "nonfinite",
            "logprobs": np.array([np.nan], np.float32),
        }
        return [replace(each, **spoilt) for each in super().generate(requests, *rest, **named)]


def test_an_evaluation_of_a_model_that_gives_no_probabilities_says_so() -> None:
    result = make_evaluator(engine=NoProbabilities).evaluate(PolicyVersion(1, 0), {})
    assert result is not None
    assert not result.has_figure
    what = "8 of 8 rewards failed: the model gave a log-probability of nan at token 0 of request "
    assert f"{what}eval.3.0: the weights hold NaN" in line(result)


@pytest.mark.parametrize("after", [0, 3, 6, 99])
def test_it_stops_wherever_it_is_and_gives_back_its_memory(
    after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed: list[None] = []
    monkeypatch.setattr(allocator, "give_back", lambda: freed.append(None))
    asked = iter(range(100))
    stop = watching(should_stop=lambda: next(asked) >= after)
    result = make_evaluator().evaluate(PolicyVersion(1, 0), {}, stop)
    assert (result is None) == (after < 99)
    assert len(freed) == 1


def test_every_interval_is_evaluated_once_whatever_the_publish_period() -> None:
    def due_steps(*published: int, max_steps: int = 1000) -> list[int]:
        schedule = EvaluationSchedule(interval_steps=20, max_steps=max_steps)
        return [step for step in published if schedule.is_due(step, is_running=False)]

    assert due_steps(*range(61)) == [0, 20, 40, 60]
    assert due_steps(*range(0, 70, 3)) == [0, 21, 42, 60]
    assert due_steps(*range(0, 100, 30)) == [0, 30, 60, 90]
    assert due_steps(*range(25, 62)) == [40, 60], "a resume between two waits for the next"
    assert due_steps(*range(34), max_steps=33) == [0, 20]
    assert due_steps(*range(41), max_steps=40) == [0, 20], "the last one is, when the run ends"


def test_one_that_runs_is_not_joined_by_another() -> None:
    schedule = EvaluationSchedule(interval_steps=1, max_steps=4)
    is_running = [False, True, True, False, False]
    assert [
        step for step, busy in enumerate(is_running) if schedule.is_due(step, is_running=busy)
    ] == [0, 3]


def make_evaluations(evaluator: Any, progress: Any, run: Callable[..., Any]) -> Evaluations:
    return Evaluations(
        evaluator,
        EvaluationSchedule(interval_steps=1, max_steps=4),
        progress,
        Mock(),
        None,
        task_kind="addition",
        pool=Mock(run=run),
        spawn=lambda work, name: asyncio.create_task(work, name=name),
        scored=None,
        should_stop=lambda: False,
        log=logging.getLogger(),
    )


def test_rewards_that_are_0_or_1_by_chance_make_no_pass_rate_of_the_score(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    rewards = iter([0.5] * 8 + [1.0] * 8)
    monkeypatch.setattr(Same, "reward", lambda self, example, completion: next(rewards))

    async def run(function: Callable[[], Any]) -> Any:
        return function()

    async def scenario() -> None:
        progress = Progress(staleness_tokens={}, now=0.0)
        evaluations = make_evaluations(make_evaluator(), progress, run)
        for step in (1, 2):
            version = PolicyVersion(1, step)
            await evaluations.finish(Mock(manifest=Mock(version=version), tensors=dict))

    asyncio.run(scenario())
    lines = [record.getMessage().rpartition(", in")[0] for record in caplog.records]
    assert lines == [
        "evaluation of v1: held-out reward 0.500 sampled, 0.500 greedy",
        "evaluation of v2: held-out reward 1.000 sampled, 1.000 greedy",
    ]


def test_the_end_waits_for_the_evaluation_that_runs_and_repeats_none() -> None:
    evaluated: list[int] = []

    def evaluate(version: PolicyVersion, tensors: Any, watcher: Any) -> None:
        evaluated.append(version.step)

    async def scenario() -> None:
        gate = asyncio.Event()

        async def run(function: Callable[[], None]) -> None:
            await gate.wait()
            function()

        evaluations = make_evaluations(Mock(evaluate=evaluate), Mock(), run)
        last = Mock(manifest=Mock(version=PolicyVersion(1, 3)))
        evaluations.published(last)
        at_the_end = asyncio.create_task(evaluations.finish(last))
        await asyncio.sleep(0)
        assert not at_the_end.done()
        gate.set()
        await at_the_end
        assert evaluated == [3]

    asyncio.run(scenario())
