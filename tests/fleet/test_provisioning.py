"""The plan: costs by hand, sensitivities, Pareto front."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echo.fleet.overlap import Resource
from echo.fleet.provisioning import (
    describe_fleet,
    outcome_of,
    pareto_front,
    provision,
    refuse,
    sensitivities,
)
from echo.fleet.selection import Selection, is_sufficient
from tests.fleet.fleets import JOB, make_fleet, make_offer, random_case


def test_costs_by_hand() -> None:
    # 8 nodes at $1, learner $4, no traffic price: $12/h; steps of 10 s: 360 per hour, $0.0333 each
    # of 6400 tokens: $5.208 per million.
    fleet = make_fleet(make_offer("any"))
    outcome = outcome_of(fleet, replace(JOB, learner_price_per_h=4.0), [8])
    assert outcome.prediction.step_s == pytest.approx(10)
    assert outcome.cost_per_h == pytest.approx(12)
    assert outcome.cost_per_step == pytest.approx(12 / 360)
    assert outcome.cost_per_million_tokens == pytest.approx(12 / 360 / 6400 * 1e6)


def test_traffic_is_paid_at_the_pace_that_is_reached() -> None:
    # Four nodes make 4 of 6.4 rollouts/s: steps of 16 s, 225 publications of 4 x 0.1 GB per hour.
    fleet = make_fleet(make_offer("any"), price_per_gb=0.5)
    outcome = outcome_of(fleet, JOB, [4])
    assert outcome.prediction.step_s == pytest.approx(16)
    assert outcome.traffic_per_h == pytest.approx(225 * 0.4 * 0.5)


def test_traffic_is_paid_once_for_each_publication() -> None:
    # One for two steps of 10 s: 180 per hour.
    fleet = make_fleet(make_offer("any"), price_per_gb=0.5)
    outcome = outcome_of(fleet, replace(JOB, publish_period=2), [8])
    assert outcome.prediction.step_s == pytest.approx(10)
    assert outcome.traffic_per_h == pytest.approx(180 * 0.8 * 0.5)


def test_rollouts_are_sent_at_the_pace_that_is_needed() -> None:
    # Eight nodes could make 8 rollouts/s; a step of 10 s takes 64 of 100 tokens, 1 kB each.
    fleet = make_fleet(make_offer("any", price_per_gb=1000.0))
    job = replace(JOB, upload_bytes_per_token=10.0, version_bytes=1.0)
    outcome = outcome_of(fleet, job, [8])
    assert outcome.prediction.step_s == pytest.approx(10)
    assert outcome.traffic_per_h == pytest.approx(360 * 64 * 1e3 / 1e9 * 1000.0, rel=1e-3)


def test_no_node_no_step() -> None:
    outcome = outcome_of(make_fleet(make_offer("any")), JOB, [0])
    assert outcome.prediction.idle_share == 1
    assert outcome.cost_per_step == float("inf")
    assert outcome.traffic_per_h == 0


def test_the_plan_of_a_small_fleet() -> None:
    plan = provision(make_fleet(make_offer("any")), JOB, [1, 2])
    assert plan is not None
    assert plan.outcome.counts == (7,)
    assert plan.required_overlapping == 6.4
    assert plan.required_pausing == pytest.approx(64 / (10 - plan.outcome.broadcast_s))
    assert plan.binding is Resource.LEARNER
    # 10 x S >= 1 s of broadcast + 4 s of a group + 64 / 7 = 14.1 s.
    assert plan.staleness_bounds is not None
    assert plan.staleness_bounds[0] == 2
    assert plan.unpaced_waste == pytest.approx(0.6 / 7)
    assert provision(make_fleet(make_offer("any", count=1)), JOB, [1]) is None


def test_one_node_fewer_costs_less_and_waits_more() -> None:
    fleet = make_fleet(make_offer("any", count=7))
    changes = {item.change: item for item in sensitivities(fleet, JOB, [7])}
    fewer = changes["one fewer any in here"]
    # 6 of 6.4: a step of 10.67 s, 6.25 % of it waiting.
    assert fewer.idle_change == pytest.approx(0.0625)
    assert fewer.cost_change_per_h == pytest.approx(-1)
    assert "one more any in here" not in changes  # there is no eighth
    assert "S = 4" in changes
    assert "S = 2" in changes


def test_where_the_uplink_is_waited_for_half_the_bytes_and_twice_its_rate_help() -> None:
    # Seven copies take 35 s of a window of S + 1 = 4 steps of 10 s: too much, with a batch of 9 s.
    fleet = make_fleet(make_offer("any", count=7), uplink=2e7)
    changes = {item.change: item.idle_change for item in sensitivities(fleet, JOB, [7])}
    assert outcome_of(fleet, JOB, [7]).prediction.idle_share > 0.3
    for change in ("versions of half the size", "twice the learner's uplink"):
        assert changes[change] < -0.2
    # One that is faster waits more.
    assert changes["a learner faster by a tenth"] > 0.01


def test_one_slow_node_does_not_make_the_learner_wait_for_all() -> None:
    # Eight nodes take 4 s for a group of 4, one takes 400 s. It makes one group of 801.
    slow = make_offer("slow", count=1, tokens_per_s=1.0)
    fleet = make_fleet(make_offer("fast", count=8), slow)
    assert fleet.latency_s(JOB, [8, 1]) == 400
    assert fleet.mean_latency_s(JOB, [8, 1]) == pytest.approx((8 * 4 + 0.01 * 400) / 8.01)
    assert outcome_of(fleet, JOB, [8, 1]).prediction.idle_share < 0.01
    assert fleet.mean_latency_s(JOB, [0, 0]) == 0
    speeds = [(speed.rate, speed.group_s) for speed in fleet.speeds(JOB, [3, 1])]
    assert speeds == [*[pytest.approx((1.0, 4.0))] * 3, pytest.approx((0.01, 400.0))]
    selection = Selection(counts=(8, 1), job=JOB, cost_per_h=9.0, gap=0.0)
    assert describe_fleet(fleet, selection).binding is Resource.LEARNER


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))]
)
def test_the_front_falls(seed: int) -> None:
    fleet, job = random_case(seed)
    front = pareto_front(fleet, job)
    costs = [outcome.cost_per_h for outcome in front]
    idle = [outcome.prediction.idle_share for outcome in front]
    assert costs == sorted(costs, reverse=True)
    assert idle == sorted(idle)


# --- remedies -------------------------------------------------------------------------------------


@pytest.mark.slow
def test_too_few_nodes_are_counted() -> None:
    # 4 of the 6.4 rollouts/s: three more nodes, or steps of 16 s.
    refusal = refuse(make_fleet(make_offer("any", count=4)), JOB, [1])
    [reason] = refusal.reasons
    assert reason.startswith("all 4 nodes on offer make 4 rollouts/s, 6.4 are needed")
    texts = [remedy.text for remedy in refusal.remedies]
    assert "3 more any in here ($7.00/h)" in texts
    assert any(text.startswith("steps of 16") for text in texts)
    assert [r.factor for r in refusal.remedies] == sorted(r.factor for r in refusal.remedies)


@pytest.mark.slow
def test_a_budget_that_does_not_pay_for_it() -> None:
    refusal = refuse(make_fleet(make_offer("any")), replace(JOB, budget_per_h=6.0), [1])
    assert refusal.reasons == (
        "the cheapest sufficient fleet costs $7.00/h, the budget is $6.00/h",
    )
    assert refusal.remedies[0].factor == pytest.approx(6.4 / 6, abs=0.1)
    assert "a budget of $7.00/h in place of $6.00/h" in [r.text for r in refusal.remedies]


@pytest.mark.slow
def test_a_broadcast_too_long_for_the_bound() -> None:
    # 25 s over the only link: longer than one period of 10 s.
    fleet = make_fleet(make_offer("thin", down_bytes_per_s=4e6))
    refusal = refuse(fleet, JOB, [1])
    assert refusal.reasons[0] == (
        "one broadcast takes 25 s at best, longer than the 10 s between publications "
        "(publish_period 1 x 10 s)"
    )
    assert any(text.startswith("versions of ") for text in (r.text for r in refusal.remedies))
    # It is the longest of several periods that is too short.
    reason = refuse(fleet, JOB, [1, 2]).reasons[0]
    assert reason.endswith("than the 20 s between publications (publish_period 2 x 10 s)")
    # At S = 7 a period of 3 holds it.
    other = refuse(fleet, replace(JOB, max_staleness=7), [1])
    assert "publish_period 3 in place of 1" in [r.text for r in other.remedies]


@pytest.mark.slow
def test_a_bound_too_tight_for_the_group() -> None:
    # 1 s + 16 s of a group + 64 / 8 = 8 s against S = 1: 10 s; S = 3 allows 30 s.
    fleet = make_fleet(make_offer("wide", concurrency=16))
    refusal = refuse(fleet, replace(JOB, max_staleness=1), [1])
    assert "S = 1 with publish_period 1 allows 10 s" in refusal.reasons[0]
    assert "max_staleness 3 in place of 1" in [r.text for r in refusal.remedies]


@pytest.mark.slow
def test_a_period_too_long_for_the_bound() -> None:
    # 1 s + 4 s + 8 s against S = 3: a period of 3 allows 10 s.
    refusal = refuse(make_fleet(make_offer("any")), JOB, [3])
    [shorter] = [r for r in refusal.remedies if r.text == "publish_period 1 in place of 3"]
    assert shorter.factor == 3


@pytest.mark.slow
def test_a_margin_is_rollouts_and_no_time() -> None:
    # Half as much again makes a batch in 6.7 s: with 1 s and 2 s less than the 10 s of S = 1.
    fleet = make_fleet(make_offer("few", count=2, concurrency=2))
    [reason] = refuse(fleet, replace(JOB, max_staleness=1, margin=0.5), [1]).reasons
    assert reason.startswith("all 2 nodes on offer make 2 rollouts/s, 9.6 are needed")


@pytest.mark.slow
def test_a_thin_uplink_is_named_with_the_rate_that_suffices() -> None:
    # Seven leaves share the uplink: 700 MB in what 30 s - 4 s - 9.1 s leave, but at most 10 s.
    refusal = refuse(make_fleet(make_offer("leaf"), uplink=2e7), JOB, [1])
    [wider] = [r for r in refusal.remedies if "uplink" in r.text]
    assert wider.factor == pytest.approx(3.5, rel=0.02)


@pytest.mark.slow
def test_every_remedy_makes_a_sufficient_fleet() -> None:
    fleet = make_fleet(make_offer("any", count=4), make_offer("other", price_per_h=3.0, count=1))
    refusal = refuse(fleet, replace(JOB, budget_per_h=50.0), [1])
    assert refusal.remedies
    for remedy in refusal.remedies:
        chosen = remedy.selection
        offers = tuple(replace(offer, count=1000) for offer in fleet.offers)
        assert is_sufficient(replace(fleet, offers=offers), chosen.job, chosen.counts)


@pytest.mark.slow
def test_conditions_that_only_collide_are_told_so() -> None:
    # Fast groups but few nodes, many nodes but slow groups: neither alone nor together.
    fleet = make_fleet(make_offer("quick", count=3), make_offer("slow", concurrency=30))
    refusal = refuse(fleet, JOB, [1])
    assert refusal.reasons == (
        "each condition can be met alone but not all at once: nodes that add enough rate make the "
        "broadcast or a group too slow",
    )
