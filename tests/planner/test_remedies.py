"""Where nothing fits: the reason in numbers, and changes that keep their word."""

from __future__ import annotations

from dataclasses import replace

import pytest

from echo.fleet.provisioning import refuse
from echo.fleet.selection import is_sufficient
from tests.planner.fleets import JOB, make_fleet, make_offer


def test_too_few_nodes_are_counted() -> None:
    # 4 of the 6.4 rollouts/s: three more nodes, or steps of 16 s.
    refusal = refuse(make_fleet(make_offer("any", count=4)), JOB, [1])
    [reason] = refusal.reasons
    assert reason.startswith("all 4 nodes on offer make 4 rollouts/s, 6.4 are needed")
    texts = [remedy.text for remedy in refusal.remedies]
    assert "3 more any in here ($7.00/h)" in texts
    assert any(text.startswith("steps of 16") for text in texts)
    assert [r.factor for r in refusal.remedies] == sorted(r.factor for r in refusal.remedies)


def test_a_budget_that_does_not_pay_for_it() -> None:
    refusal = refuse(make_fleet(make_offer("any")), replace(JOB, budget_per_h=6.0), [1])
    assert refusal.reasons == (
        "the cheapest sufficient fleet costs $7.00/h, the budget is $6.00/h",
    )
    assert refusal.remedies[0].factor == pytest.approx(6.4 / 6, abs=0.1)
    assert "a budget of $7.00/h in place of $6.00/h" in [r.text for r in refusal.remedies]


def test_a_broadcast_too_long_for_the_bound() -> None:
    # 25 s over the only link: longer than one period of 10 s.
    fleet = make_fleet(make_offer("thin", down_bytes_per_s=4e6))
    refusal = refuse(fleet, JOB, [1])
    assert refusal.reasons[0] == (
        "one broadcast takes 25 s at best, longer than the 10 s between publications "
        "(publish_period 1 x 10 s)"
    )
    assert any(text.startswith("versions of ") for text in (r.text for r in refusal.remedies))
    # At S = 7 a period of 3 holds it.
    other = refuse(fleet, replace(JOB, max_staleness=7), [1])
    assert "publish_period 3 in place of 1" in [r.text for r in other.remedies]


def test_a_bound_too_tight_for_the_group() -> None:
    # 1 s + 16 s of a group + 64 / 8 = 8 s against S = 1: 10 s; S = 3 allows 30 s.
    fleet = make_fleet(make_offer("wide", concurrency=16))
    refusal = refuse(fleet, replace(JOB, max_staleness=1), [1])
    assert "S = 1 with publish_period 1 allows 10 s" in refusal.reasons[0]
    assert "max_staleness 3 in place of 1" in [r.text for r in refusal.remedies]


def test_a_thin_uplink_is_named_with_the_rate_that_suffices() -> None:
    # Seven leaves share the uplink: 700 MB in what 30 s - 4 s - 9.1 s leave, but at most 10 s.
    refusal = refuse(make_fleet(make_offer("leaf"), uplink=2e7), JOB, [1])
    [wider] = [r for r in refusal.remedies if "uplink" in r.text]
    assert wider.factor == pytest.approx(3.5, rel=0.02)


def test_every_remedy_makes_a_sufficient_fleet() -> None:
    fleet = make_fleet(make_offer("any", count=4), make_offer("other", price_per_h=3.0, count=1))
    refusal = refuse(fleet, replace(JOB, budget_per_h=50.0), [1])
    assert refusal.remedies
    for remedy in refusal.remedies:
        chosen = remedy.selection
        offers = tuple(replace(offer, count=1000) for offer in fleet.offers)
        assert is_sufficient(replace(fleet, offers=offers), chosen.job, chosen.counts)


def test_conditions_that_only_collide_are_told_so() -> None:
    # Fast groups but few nodes, many nodes but slow groups: neither alone nor together.
    fleet = make_fleet(make_offer("quick", count=3), make_offer("slow", concurrency=30))
    refusal = refuse(fleet, JOB, [1])
    assert refusal.reasons == (
        "each condition can be met alone but not all at once: nodes that add enough rate make the "
        "broadcast or a group too slow",
    )
