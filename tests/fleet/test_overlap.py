"""The provisioning rule by hand, and the step-by-step prediction beside it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from echo.fleet.job import Job
from echo.fleet.overlap import (
    NodeSpeed,
    Resource,
    auto_publish_period,
    binding_resource,
    fits_window,
    is_enough,
    least_slowdown,
    predict,
    required_rate,
    staleness_range,
)
from tests.fleet import fleets

JOB = replace(fleets.JOB, publish_period=2)


def test_required_rates_by_hand() -> None:
    # 128 rollouts in 2 x 10 - 4 = 16 s while workers pause 4 s; 64 in 10 s while they do not.
    assert required_rate(JOB, 4.0, is_pausing=True) == 8.0
    assert required_rate(JOB, 4.0, is_pausing=False) == 6.4
    assert required_rate(JOB, 20.0, is_pausing=True) == math.inf


def test_useless_groups_have_to_be_generated_too() -> None:
    assert replace(JOB, useful_share=0.5).rollouts_per_step == 128
    assert replace(JOB, useful_share=0.5).tokens_per_step == JOB.tokens_per_step == 6400


def test_the_longest_of_a_group_by_hand() -> None:
    # Spread 1: sigma^2 = ln 2 = 0.6931, sigma = 0.8326; the quantile of 8/9 is 1.2206:
    # 100 * exp(0.8326 * 1.2206 - 0.3466) = 195.4.
    longest = replace(JOB, completion_spread=1.0).longest_completion_tokens
    assert longest == pytest.approx(195.4, abs=0.1)
    assert replace(JOB, completion_spread=9.0).longest_completion_tokens <= 400
    assert JOB.longest_completion_tokens == 100


def test_the_window_is_the_rule_with_its_rounding() -> None:
    # (kappa - 1) + ceil((T_bcast + T_group + R / rate) / T_train) <= S
    for rate in (4.0, 6.4, 8.0, 64.0):
        for broadcast_s in (0.0, 4.0, 9.9, 12.0):
            for latency_s in (0.0, 3.6, 10.0):
                lag = math.ceil((broadcast_s + latency_s + 64 / rate) / 10)
                by_rule = 1 + lag <= 3
                assert by_rule == fits_window(
                    JOB, rate=rate, broadcast_s=broadcast_s, latency_s=latency_s
                )


def test_a_broadcast_longer_than_the_period_is_never_enough() -> None:
    assert not is_enough(JOB, rate=1e6, broadcast_s=20.0, latency_s=0.0)
    assert is_enough(JOB, rate=1e6, broadcast_s=15.0, latency_s=0.0)
    assert not is_enough(JOB, rate=0.0, broadcast_s=0.0, latency_s=0.0)


@pytest.mark.parametrize(
    ("broadcast_s", "period"),
    [(0.0, 1), (9.99, 1), (10.0, 2), (19.99, 2), (20.0, 3), (30.0, 4), (60.0, 7), (999.0, 7)],
)
def test_a_broadcast_that_ends_with_the_period_is_not_hidden(
    broadcast_s: float, period: int
) -> None:
    # kappa * T_train > T_bcast, and at most S + 1.
    assert auto_publish_period(10.0, broadcast_s, 6) == period


def test_of_the_versions_that_wait_for_a_broadcast_the_newest_is_sent() -> None:
    # A broadcast takes 25 s. Versions 1, 2 and 3 are published at 10, 20 and 30 s. Version 2
    # replaces the broadcast of version 1, which is not half done, and arrives at 45 s. Until then
    # three batches can be trained, and version 2 permits batches 3 and 4 of 10 s each. Version 3,
    # sent at 45 s, is replaced by version 4 at 55 s, which permits two more batches at 80 s.
    job = replace(JOB, publish_period=1, max_staleness=2)
    prediction = predict(job, rate=1e6, broadcast_s=25.0, latency_s=0.0)
    assert prediction.step_s == pytest.approx(35 / 2, rel=0.02)


def test_versions_that_wait_for_the_link_do_not_queue() -> None:
    # A broadcast takes 35 s and a version is published every 10 s: of each three or four one is
    # sent, which S = 11 leaves time for. One after the other, the learner would wait for each.
    job = replace(JOB, publish_period=1, max_staleness=11)
    assert predict(job, rate=1e6, broadcast_s=35.0, latency_s=0.0).idle_share < 1e-6


def test_the_tokens_of_a_long_group_are_as_old_as_the_versions_that_sample_them() -> None:
    # S = 1: batches 2 k and 2 k + 1 begin together with the version of the batch before them, and
    # take 40 s. Steps take 10 s, and a batch begins when the version of the last but one is made.
    job = replace(JOB, publish_period=1, max_staleness=1)
    prediction = predict(job, rate=1e6, broadcast_s=0.0, latency_s=40.0)
    assert prediction.step_s == pytest.approx(25.0)
    # Batch 2 k is generated for 10 s by version 2 k - 1 and for 30 s by version 2 k, the other one
    # for 40 s by version 2 k.
    assert prediction.staleness == pytest.approx({0: 30 / 80, 1: 50 / 80})


@pytest.mark.parametrize("bound", [3, 6, 11])
def test_a_batch_begins_as_late_as_the_learner_allows(bound: int) -> None:
    # 12.8 rollouts per second make 64 in 5 s of a step of 10 s. A version is installed 2 s after
    # its step, so the batch after it is made in time: it is one version old.
    job = replace(JOB, publish_period=1, max_staleness=bound)
    times: dict[str, Any] = {"rate": 12.8, "broadcast_s": 2.0, "latency_s": 0.0}
    assert predict(job, **times).staleness == {1: 1.0}
    # Broadcast and batch take 11 s: the first second of each batch is sampled one version before.
    late = predict(job, **(times | {"broadcast_s": 6.0})).staleness
    assert late == pytest.approx({1: 0.8, 2: 0.2})
    # A group takes 9 s, so 1 of 9 s are.
    slow = predict(job, **(times | {"latency_s": 9.0})).staleness
    assert slow == pytest.approx({1: 8 / 9, 2: 1 / 9})
    # Without its fastest node, the fleet would be too slow: groups are made ahead.
    # Each batch then begins when the version is installed that is S versions older, and takes 8 s.
    tight = times | {"rate": 8.0}
    needed = predict(job, **tight, nodes=[NodeSpeed(rate=2.0, group_s=0.0)] * 4)
    assert needed.staleness == {bound: 1.0}
    spare = predict(job, **tight, nodes=[NodeSpeed(rate=1.0, group_s=0.0)] * 8)
    assert spare.staleness == {1: 1.0}
    # Groups that would be as old as S all the same are made as early as S allows.
    narrow = predict(replace(job, max_staleness=1), **times)
    assert narrow.staleness == {1: 1.0}
    unpaced = predict(job, **times, is_paced=False)
    assert unpaced.mean_staleness > bound


def test_only_nodes_that_are_fast_enough_begin_late() -> None:
    # A group of 25 s that begins 2 s after a version is at best 3 versions old, so with S = 3 the
    # slow quarter of the fleet begins as early as it may. With S = 4 all nodes begin late.
    nodes = [NodeSpeed(rate=3.2, group_s=0.0)] * 3 + [NodeSpeed(rate=3.2, group_s=25.0)]
    times: dict[str, Any] = {"rate": 12.8, "broadcast_s": 2.0, "latency_s": 0.0, "nodes": nodes}
    job = replace(JOB, publish_period=1, max_staleness=3)
    assert predict(job, **times).staleness == pytest.approx({1: 0.75, 3: 0.25})
    assert predict(replace(job, max_staleness=4), **times).staleness == {1: 1.0}


def test_groups_that_are_made_early_accumulate_up_to_the_bound() -> None:
    # A fleet that is 5 % faster than the learner makes a batch more in 20 steps.
    for bound in (2, 6):
        job = replace(JOB, publish_period=1, max_staleness=bound)
        for rate, expected in ((6.72, bound), (6.41, 1.0)):
            nodes = [NodeSpeed(rate=rate, group_s=0.0)]
            found = predict(job, rate=rate, broadcast_s=0.0, latency_s=0.0, nodes=nodes)
            assert found.mean_staleness == pytest.approx(expected, abs=0.06)


def test_the_groups_of_an_early_batch_begin_one_after_another() -> None:
    # The fleet makes a batch in 8 s of a step of 10 s, and needs its only node, so groups begin as
    # early as S = 3 allows. Each takes 10 s. The eight parts of a batch begin 0, 1, ... 7 s after
    # the version of S steps before is installed, and end as long after the next one: 3.5 s, mean.
    job = replace(JOB, publish_period=1, max_staleness=3)
    nodes = [NodeSpeed(rate=8.0, group_s=10.0)]
    found = predict(job, rate=8.0, broadcast_s=0.0, latency_s=10.0, nodes=nodes)
    assert found.staleness == pytest.approx({2: 0.35, 3: 0.65})


def test_a_starved_learner_waits_for_what_is_missing() -> None:
    # 80 % of the required rate: a batch takes 12.5 s, a step 10: it waits a fifth of the time.
    prediction = predict(JOB, rate=0.8 * 6.4, broadcast_s=1.0, latency_s=1.0)
    assert prediction.step_s == pytest.approx(12.5)
    assert prediction.idle_share == pytest.approx(0.2)


def test_pausing_workers_stretch_the_cycle_by_the_broadcast() -> None:
    # Rate 5.12: 128 rollouts take 25 s, and 5 s of each cycle of two steps are lost to a pause.
    job = replace(JOB, has_pausing_workers=True, max_staleness=6)
    prediction = predict(job, rate=5.12, broadcast_s=5.0, latency_s=0.0)
    assert prediction.step_s == pytest.approx(15.0)


def test_on_policy_training_does_everything_in_turn() -> None:
    # S = 0, kappa = 1: broadcast 2 s, batch 64 / 6.4 = 10 s, step 10 s: 22 s.
    job = replace(JOB, max_staleness=0, publish_period=1)
    prediction = predict(job, rate=6.4, broadcast_s=2.0, latency_s=3.0)
    assert prediction.step_s == pytest.approx(22.0)
    assert prediction.staleness == {0: 1.0}
    # Where a group takes longer than the batch of a fleet that is never full, it decides.
    assert predict(job, rate=6.4, broadcast_s=2.0, latency_s=14.0).step_s == pytest.approx(26.0)
    # Groups of different lengths leave workers idle while the last ones go on.
    uneven = replace(job, completion_spread=0.2)
    late = predict(uneven, rate=6.4, broadcast_s=2.0, latency_s=3.0)
    assert late.step_s == pytest.approx(22.0 + 0.2 * 3.0)
    wild = replace(job, completion_spread=2.0)
    assert predict(wild, rate=6.4, broadcast_s=2.0, latency_s=3.0).step_s == pytest.approx(23.5)


def test_by_how_much_longer_steps_satisfy_the_rule_by_hand() -> None:
    job = replace(JOB, max_staleness=6, margin=0.1)
    # A broadcast of 30 s has two steps; 64 rollouts and a tenth more take 17.6 s.
    assert least_slowdown(job, rate=1e6, broadcast_s=30.0, latency_s=0.0) == pytest.approx(1.5)
    assert least_slowdown(job, rate=4.0, broadcast_s=0.0, latency_s=0.0) == pytest.approx(1.76)
    # Broadcast, group and batch have 6 - 2 + 1 steps.
    late = least_slowdown(job, rate=8.0, broadcast_s=10.0, latency_s=42.0)
    assert late == pytest.approx((10 + 42 + 8) / 5 / 10)
    # Pausing workers have what two steps and a broadcast leave: 8.8 s a step, and 2 of 4 s.
    pausing = replace(job, has_pausing_workers=True)
    assert least_slowdown(pausing, rate=8.0, broadcast_s=4.0, latency_s=0.0) == pytest.approx(1.08)


@pytest.mark.parametrize(("bound", "slowdown"), [(0, 2.1), (1, 1.55)])
def test_at_the_longest_period_learner_and_workers_take_turns(bound: int, slowdown: float) -> None:
    # A broadcast of 7 s and a batch of 4 s before each period's steps of 10 s.
    job = replace(JOB, max_staleness=bound, publish_period=bound + 1)
    times: dict[str, Any] = {"rate": 16.0, "broadcast_s": 7.0, "latency_s": 0.0}
    assert least_slowdown(job, **times) == pytest.approx(slowdown)
    assert predict(job, **times).step_s == pytest.approx(10 * slowdown)
    # Slow workers decide: with S = 1 two batches of 32 s and one step after the second.
    slow = least_slowdown(replace(JOB, max_staleness=1), rate=2.0, broadcast_s=7.0, latency_s=0.0)
    assert slow == pytest.approx((7 + 2 * 32 + 10) / 20)
    assert not is_enough(job, **times)


def test_leases_make_no_waste_and_their_absence_does() -> None:
    # Twice the rate: half of what is made is never used.
    paced = predict(JOB, rate=12.8, broadcast_s=1.0, latency_s=1.0)
    unpaced = predict(JOB, rate=12.8, broadcast_s=1.0, latency_s=1.0, is_paced=False)
    assert paced.wasted_share == 0
    assert unpaced.wasted_share == pytest.approx(0.5)
    lost = predict(JOB, rate=12.8, broadcast_s=1.0, latency_s=1.0, lost_per_s=1.6)
    assert lost.wasted_share == pytest.approx(1.6 / 8.0)


def test_spread_costs_where_supply_is_tight_and_nothing_where_it_is_ample() -> None:
    # At exactly the required rate max(T, X) with deviation d has mean T + d * 0.3989; the buffer of
    # S - kappa + 2 = 3 batches makes d = 0.3 * 10 / sqrt(3) = 1.732: 10.69 s.
    job = replace(JOB, rate_spread=0.3)
    tight = predict(job, rate=6.4, broadcast_s=0.1, latency_s=0.1)
    assert tight.step_s == pytest.approx(10.69, abs=0.01)
    ample = predict(job, rate=12.8, broadcast_s=0.1, latency_s=0.1)
    assert ample.idle_share < 0.005
    # Workers that pause for 2 of 20 s still have 18 s for two batches of 5 s.
    pausing = replace(job, has_pausing_workers=True)
    assert predict(pausing, rate=12.8, broadcast_s=2.0, latency_s=0.1).idle_share < 0.01


def test_spread_leaves_the_staleness_of_an_ample_fleet_as_it_is() -> None:
    # A fleet that is needed whole makes groups as early as the bound allows.
    nodes = [NodeSpeed(rate=1.92, group_s=0.1)] * 4
    for rate_spread in (0.0, 0.1):
        job = replace(JOB, publish_period=1, max_staleness=3, rate_spread=rate_spread)
        found = predict(job, rate=7.68, broadcast_s=0.1, latency_s=0.1, nodes=nodes)
        assert found.mean_staleness == pytest.approx(3.0, abs=0.02)


def test_without_a_worker_nothing_happens() -> None:
    prediction = predict(JOB, rate=0.0, broadcast_s=0.0, latency_s=0.0)
    assert (prediction.idle_share, prediction.step_s) == (1.0, math.inf)
    assert binding_resource(JOB, rate=0, broadcast_s=0, latency_s=0) is Resource.ROLLOUTS


@pytest.mark.parametrize(
    ("rate", "broadcast_s", "latency_s", "resource"),
    [
        (3.2, 1.0, 1.0, Resource.ROLLOUTS),
        (64.0, 1.0, 1.0, Resource.LEARNER),
        (64.0, 60.0, 1.0, Resource.BROADCAST),
        (64.0, 1.0, 60.0, Resource.LATENCY),
    ],
)
def test_the_binding_resource(
    rate: float, broadcast_s: float, latency_s: float, resource: Resource
) -> None:
    found = binding_resource(JOB, rate=rate, broadcast_s=broadcast_s, latency_s=latency_s)
    assert found is resource


def test_the_feasible_range_of_s() -> None:
    # kappa = 2: (S - 1) * 10 >= 9 + 12 + 5 = 26 from S = 4 on.
    found = staleness_range(JOB, rate=12.8, broadcast_s=9.0, latency_s=12.0)
    assert found is not None
    assert found[0] == 4
    assert staleness_range(JOB, rate=1.0, broadcast_s=9.0, latency_s=12.0) is None


PAUSING_JOB = replace(JOB, max_staleness=1, publish_period=1, has_pausing_workers=True)
rates = st.floats(1.0, 50.0)
times = st.floats(0.0, 30.0)
jobs = st.builds(
    lambda bound, period, pauses: replace(
        JOB,
        max_staleness=bound,
        publish_period=min(period, bound + 1),
        has_pausing_workers=pauses,
    ),
    st.integers(0, 8),
    st.integers(1, 9),
    st.booleans(),
)


@given(job=jobs, rate=rates, broadcast_s=times, latency_s=times)
@example(job=PAUSING_JOB, rate=7.0, broadcast_s=11.0, latency_s=11.0)
def test_no_token_is_staler_than_the_bound(
    job: Job, rate: float, broadcast_s: float, latency_s: float
) -> None:
    prediction = predict(job, rate=rate, broadcast_s=broadcast_s, latency_s=latency_s)
    assert min(prediction.staleness) >= 0
    assert max(prediction.staleness) <= job.max_staleness
    assert sum(prediction.staleness.values()) == pytest.approx(1)
    assert 0 <= prediction.idle_share < 1


@given(rate=rates, broadcast_s=st.floats(0.0, 20.0), latency_s=times, bound=st.integers(1, 8))
def test_better_resources_never_slow_a_run_whose_workers_generate_on(
    rate: float, broadcast_s: float, latency_s: float, bound: int
) -> None:
    # A broadcast that outlasts the period is abandoned for a newer version or not, which may make
    # a faster link a little slower.
    job = replace(JOB, max_staleness=bound)

    def step_s(job: Job, rate: float, broadcast_s: float, latency_s: float) -> float:
        return predict(job, rate=rate, broadcast_s=broadcast_s, latency_s=latency_s).step_s

    now = step_s(job, rate, broadcast_s, latency_s) + 1e-6
    assert step_s(job, 1.2 * rate, broadcast_s, latency_s) <= now
    assert step_s(job, rate, 0.8 * broadcast_s, latency_s) <= now
    assert step_s(job, rate, broadcast_s, 0.8 * latency_s) <= now
    more = replace(job, max_staleness=bound + 1)
    assert step_s(more, rate, broadcast_s, latency_s) <= now


@given(job=jobs, rate=rates, broadcast_s=times, latency_s=times)
def test_what_the_second_reading_calls_enough_does_not_wait(
    job: Job, rate: float, broadcast_s: float, latency_s: float
) -> None:
    job = replace(job, has_pausing_workers=False)
    if is_enough(job, rate=rate, broadcast_s=broadcast_s, latency_s=latency_s):
        prediction = predict(job, rate=rate, broadcast_s=broadcast_s, latency_s=latency_s)
        assert prediction.idle_share < 1e-6
