"""The choice of workers beside every other set, and what a simulated learner comes to by it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from activation.simulated import scenario, watch
from bench_activation import UPLINK, Broadcast, judge

from echo.fleet.activation import MIN_SAVING, Links, Question, choose
from echo.fleet.job import Job
from echo.fleet.market import Offer

JOB = Job(
    groups_per_step=4,
    group_size=8,
    max_staleness=1,
    publish_period=1,
    train_s=20.0,
    completion_tokens=1000.0,
    max_completion_tokens=4000.0,
    version_bytes=6 * UPLINK,
)
EQUAL = [
    Offer(
        name=f"w{number}",
        region="site",
        price_per_h=1.0,
        tokens_per_s=2000.0,
        concurrency=8,
        down_bytes_per_s=10 * UPLINK,
        up_bytes_per_s=10 * UPLINK,
    )
    for number in range(4)
]
"""A version takes 6 s to each of them, a batch 16 s on one, a group 4 s, and S 1 leaves 20 s: 26 s
for one worker, 24 s for two, 27.3 s for three."""


def make_question(active: set[str], workers: list[Offer] = EQUAL) -> Question:
    names = frozenset(active)
    return Question(
        workers=tuple(workers),
        job=JOB,
        links=Links(broadcast_s=Broadcast(workers, JOB), uplink_bytes_per_s=UPLINK),
        active=names,
        ready=names,
        idle_share=0.2,
        periods=(1, 2),
    )


def test_a_set_is_judged_beside_every_other() -> None:
    assert judge(make_question(set()), {"w0", "w3"}).step_gap == pytest.approx(0.0)
    assert judge(make_question(set()), {"w0", "w3"}).cost_gap == pytest.approx(0.0)
    alone = judge(make_question(set()), {"w1"})
    assert alone.step_gap == pytest.approx(26 / 24 - 1)
    assert alone.cost_gap == pytest.approx(-0.5)
    dearer = [replace(worker, price_per_h=1.0 + number) for number, worker in enumerate(EQUAL)]
    assert judge(make_question(set(), dearer), {"w2", "w3"}).cost_gap == pytest.approx(7 / 3 - 1)


@pytest.mark.slow
def test_a_simulated_learner_ends_with_as_many_as_its_uplink_serves_best() -> None:
    built = scenario(EQUAL, JOB, make_question(set()).links, (1, 2), num_steps=14)
    assert built is not None
    summary, asked, active = watch(built)
    assert summary.is_complete
    names = {name.removesuffix("-1") for name in active}
    assert judge(make_question(set()), names).step_gap == pytest.approx(0.0)
    for question, _ in asked:
        choice = choose(question.workers, question.job, question.links, periods=question.periods)
        assert judge(question, choice.active).step_gap <= 0.02
    assert judge(asked[-1][0], active).step_gap <= MIN_SAVING
