"""The plan: costs by hand, sensitivities, Pareto front."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echo.fleet.overlap import Resource
from echo.fleet.provisioning import outcome_of, pareto_front, provision, sensitivities
from tests.planner.fleets import JOB, make_fleet, make_offer, random_case


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


@pytest.mark.parametrize("seed", range(12))
def test_the_front_falls(seed: int) -> None:
    fleet, job = random_case(seed)
    front = pareto_front(fleet, job)
    costs = [outcome.cost_per_h for outcome in front]
    idle = [outcome.prediction.idle_share for outcome in front]
    assert costs == sorted(costs, reverse=True)
    assert idle == sorted(idle)
