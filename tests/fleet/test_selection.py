"""The cheapest sufficient set against brute force, and where the search reaches its bound."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from echo.fleet import selection
from echo.fleet.job import Job
from echo.fleet.market import RentedFleet
from echo.fleet.selection import SearchLimitError, is_sufficient, select
from tests.fleet.fleets import JOB, make_fleet, make_offer, random_case


def select_by_brute_force(fleet: RentedFleet, job: Job) -> tuple[int, ...] | None:
    """Return the cheapest sufficient set by trying every one."""
    choices = itertools.product(*(range(offer.count + 1) for offer in fleet.offers))
    sufficient = (counts for counts in choices if is_sufficient(fleet, job, counts))
    return min(sufficient, key=lambda counts: fleet.cost_per_h(job, counts), default=None)


def test_the_cheaper_of_two_offers_is_filled_up_by_the_dearer() -> None:
    # 6.4 rollouts/s are needed: 5 at $1 (all there are) and 2 at $2; 7 at $2 would be $14.
    fleet = make_fleet(make_offer("cheap", count=5), make_offer("dear", price_per_h=2.0))
    chosen = select(fleet, JOB)
    assert chosen is not None
    assert (chosen.counts, chosen.gap) == ((5, 2), 0.0)
    assert chosen.cost_per_h == pytest.approx(9)


def test_the_time_of_a_broadcast_rules_out_a_cheap_slow_link() -> None:
    # 100 MB over 4 MB/s takes 25 s; S = 3 and kappa = 1 leave 30 s for it, 4 s of a group and up
    # to 10 s of a batch: not enough. The faster link is dearer.
    fleet = make_fleet(
        make_offer("slow link", price_per_h=0.5, down_bytes_per_s=4e6), make_offer("fast link")
    )
    chosen = select(fleet, JOB)
    assert chosen is not None
    assert chosen.counts == (0, 7)


def test_a_margin_and_useless_groups_ask_for_more() -> None:
    # 6.4 x 1.5 = 9.6 and 6.4 / 0.64 = 10.
    fleet = make_fleet(make_offer("any", count=20))
    for job, count in ((replace(JOB, margin=0.5), 10), (replace(JOB, useful_share=0.64), 10)):
        chosen = select(fleet, job)
        assert chosen is not None
        assert chosen.counts == (count,)


def test_the_smallest_publish_period_with_a_fleet_is_taken() -> None:
    # 25 s per broadcast: 3 periods of 10 s hold it; with S = 7 the window is then 50 s.
    fleet = make_fleet(make_offer("slow link", down_bytes_per_s=4e6))
    chosen = select(fleet, replace(JOB, max_staleness=7), periods=range(1, 9))
    assert chosen is not None
    assert chosen.job.publish_period == 3


def test_nothing_is_chosen_where_nothing_suffices() -> None:
    fleet = make_fleet(make_offer("any", count=6))
    assert select(fleet, JOB) is None
    assert select(make_fleet(), JOB) is None
    enough = make_fleet(make_offer("any"))
    assert select(enough, replace(JOB, budget_per_h=6.9)) is None
    assert select(enough, replace(JOB, budget_per_h=7.0)) is not None


@pytest.mark.slow
@pytest.mark.parametrize("num_fleets", [100, pytest.param(1000, marks=pytest.mark.matrix)])
def test_random_fleets_equal_brute_force(num_fleets: int) -> None:
    num_feasible = 0
    for seed in range(num_fleets):
        fleet, job = random_case(seed)
        num_feasible += equals_brute_force(fleet, job, seed)
    assert num_feasible > 0.3 * num_fleets


def equals_brute_force(fleet: RentedFleet, job: Job, seed: int) -> bool:
    """Compare the choice with that of every set; return whether any suffices."""
    best, chosen = select_by_brute_force(fleet, job), select(fleet, job)
    assert (chosen is None) == (best is None), seed
    if chosen is None or best is None:
        return False
    assert chosen.gap == 0, seed
    assert chosen.cost_per_h == pytest.approx(fleet.cost_per_h(job, best), rel=1e-6), seed
    return True


def hardly_different(seed: int, *, num_offers: int) -> tuple[RentedFleet, Job]:
    """Offers of nearly the same price and speed: hardly a set is ruled out by another."""
    rng = random.Random(seed)
    offers = [
        make_offer(
            str(number),
            count=rng.randint(1, 40),
            price_per_h=rng.uniform(0.9, 1.1),
            tokens_per_s=rng.uniform(90, 110),
            concurrency=rng.randint(1, 8),
            can_listen=number % 2 == 0,
        )
        for number in range(num_offers)
    ]
    job = replace(JOB, groups_per_step=16, max_staleness=2, version_bytes=1e7)
    return make_fleet(*offers), job


@pytest.mark.slow
def test_a_search_that_reaches_its_bound_says_how_much_cheaper_a_set_may_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cases = [hardly_different(23, num_offers=10), hardly_different(21, num_offers=14)]
    best = [select(*case) for case in cases]
    monkeypatch.setattr(selection, "MAX_NODES", 1)
    found = [select(*case) for case in cases]
    gaps = []
    for (fleet, job), proven, one in zip(cases, best, found, strict=True):
        assert proven is not None
        assert one is not None
        assert (proven.gap, is_sufficient(fleet, job, one.counts)) == (0, True)
        assert proven.cost_per_h >= one.cost_per_h * (1 - one.gap) - 1e-9
        gaps.append(one.gap)
    assert 0 < max(gaps) < 0.1
    # Which no other load of the machine changes.
    assert [select(*case) for case in cases] == found


def test_a_search_without_an_answer_is_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "MAX_ROUNDS", 0)
    with pytest.raises(SearchLimitError, match="0 rounds of the search were not enough"):
        select(make_fleet(make_offer("any")), JOB)


def many_small_nodes(seed: int, *, has_pausing_workers: bool) -> tuple[RentedFleet, Job]:
    """Two offers of many nodes, of which one makes broadcasts longer: the rule is tight."""
    rng = random.Random(seed)
    offers = [
        make_offer(
            str(number),
            count=rng.randint(15, 30),
            price_per_h=rng.uniform(0.2, 1),
            tokens_per_s=rng.uniform(300, 900),
            concurrency=rng.randint(1, 16),
            can_listen=number == 1,
            down_bytes_per_s=1e9,
            up_bytes_per_s=1e9,
        )
        for number in range(2)
    ]
    fleet = make_fleet(*offers, uplink=rng.uniform(3e7, 2e8), bytes_per_s=1e9)
    job = replace(
        JOB,
        groups_per_step=16,
        max_staleness=rng.randint(1, 3),
        train_s=rng.uniform(10, 20),
        completion_tokens=300,
        max_completion_tokens=300,
        version_bytes=1e7,
        has_pausing_workers=has_pausing_workers,
    )
    return fleet, job


@pytest.mark.slow
@pytest.mark.parametrize("has_pausing_workers", [True, False])
def test_the_choice_holds_where_the_rule_is_tight(has_pausing_workers: bool) -> None:
    cases = (many_small_nodes(n, has_pausing_workers=has_pausing_workers) for n in range(12))
    num_feasible = sum(equals_brute_force(*case, seed) for seed, case in enumerate(cases))
    assert num_feasible >= 4


@pytest.mark.parametrize("uplink", [2.6e7, 3e7, 4e7, 6e7])
def test_of_thousands_of_pausing_workers_not_one_too_many_is_chosen(uplink: float) -> None:
    # A broadcast of 100 kB takes each of them its share of the uplink, and all of them wait.
    fleet = make_fleet(make_offer("small", count=20_000, tokens_per_s=1.0), uplink=uplink)
    job = replace(JOB, version_bytes=1e5, chunk_bytes=1e4, has_pausing_workers=True)
    least = next(n for n in range(640, 20_001) if is_sufficient(fleet, job, [n]))
    chosen = select(fleet, job)
    assert chosen is not None
    assert (chosen.counts, chosen.gap) == ((least,), 0)
