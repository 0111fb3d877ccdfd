"""Explanations from observed fleets: the time of workers by stage, and the cause that follows."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from echo.fleet.explain import (
    SERVING_AGENTS,
    Explanation,
    ObservedFleet,
    ObservedNode,
    StepParts,
    Tally,
    WaitStage,
    describe_wait,
    explain_idle,
    explain_wait,
)


def worker(name: str = "w1", **fields: Any) -> ObservedNode:
    """Return a worker that samples two groups."""
    numbers: dict[str, Any] = {"num_leases": 2, "groups": {"sampling": 2}, "num_places": 2}
    return ObservedNode(name=name, **(numbers | fields))


def fleet(*nodes: ObservedNode, **fields: Any) -> ObservedFleet:
    numbers: dict[str, Any] = {"num_missing": 2, "groups_per_step": 4}
    return ObservedFleet(nodes=nodes, **(numbers | fields))


def explained(*fleets: ObservedFleet) -> Explanation:
    """Return the explanation of a wait of ten seconds in each of these states."""
    tally = Tally()
    for each in fleets:
        tally.add(each, 10.0, is_waiting=True)
    return explain_wait(tally, fleets[-1])


@pytest.mark.parametrize(
    ("fields", "shares"),
    [
        ({}, {WaitStage.SAMPLING: 1.0}),
        (
            {"groups": {"sampling": 1, "rewards": 1}},
            {WaitStage.SAMPLING: 0.5, WaitStage.REWARDS: 0.5},
        ),
        ({"groups": {"weights": 2}}, {WaitStage.WEIGHTS: 1.0}),
        ({"groups": {"queued": 2}}, {WaitStage.SAMPLING: 1.0}),
        ({"groups": {}, "activity": "installing v3"}, {WaitStage.WEIGHTS: 1.0}),
        ({"groups": {"delivered": 2}}, {WaitStage.DELIVERING: 1.0}),
        ({"groups": {"delivered": 2}, "num_here": 2}, {WaitStage.STORING: 1.0}),
        # A result that was acknowledged since the last report is no lease any longer.
        ({"groups": {"sampling": 2, "delivered": 3}}, {WaitStage.SAMPLING: 1.0}),
        ({"num_leases": 0}, {WaitStage.GRANTING: 1.0}),
        ({"num_leases": 0, "is_fresh": False}, {WaitStage.WEIGHTS: 1.0}),
    ],
)  # fmt: skip
def test_a_workers_time_is_divided_by_what_its_groups_do(
    fields: dict[str, Any], shares: dict[WaitStage, float]
) -> None:
    each = worker(**fields)
    assert fleet(each).shares(each) == shares


def test_without_admission_a_worker_without_groups_waits_for_the_bound() -> None:
    idle = worker(num_leases=0, is_fresh=False)
    assert fleet(idle, is_closed=True).shares(idle) == {WaitStage.ADMISSION: 1.0}


def test_groups_that_the_learner_scores_wait_for_their_rewards() -> None:
    each = worker(groups={"delivered": 2}, num_here=2)
    found = explained(fleet(each, num_scoring=2))
    assert (found.cause, found.setting) == ("slow_reward", "reward.where")


def test_the_learners_waiting_time_is_divided_without_the_workers_that_have_no_groups() -> None:
    tally = Tally()
    state = fleet(worker(), worker("w2", num_leases=0), is_closed=True)
    tally.add(state, 8.0, is_waiting=True)
    tally.add(state, 5.0, is_waiting=False)
    assert tally.wait_by_stage() == {WaitStage.SAMPLING: 8.0}
    assert tally.idle_share == pytest.approx(0.5)
    total = Tally()
    total.include(tally)
    total.include(tally)
    assert total.wait_by_stage() == {WaitStage.SAMPLING: 16.0}


def test_the_slowest_hop_of_the_weights_is_followed_up_to_who_has_them() -> None:
    fetch: dict[str, Any] = {
        "groups": {"weights": 2},
        "fetching": "v3",
        "num_chunks": 12,
        "bytes_per_s": 1e3,
    }
    child = worker(parent="r1", **fetch)
    relay = ObservedNode(name="r1", role="relay", fetching="v3", parent="learner", bytes_per_s=2e3)
    found = explained(fleet(child, relay))
    assert (found.cause, found.resource) == ("slow_weights", "link from the learner to r1")
    assert "w1 fetches v3 (0/12 chunks from r1 at" in found.chain
    assert found.chain.endswith("r1 takes it from learner at 1.95 KiB/s")
    # Later the relay has all of it, and the worker takes much longer.
    later = fleet(child, replace(relay, fetching=""))
    assert explained(fleet(child, relay), later, later).cause == "slow_relay"
    # So is its uplink if it passes on much less than it gets.
    ahead = replace(relay, num_chunks=12, num_chunks_held=9)
    lagging = explained(fleet(replace(child, num_chunks_held=4), ahead))
    assert lagging.cause == "slow_relay"
    assert "r1 has 9 chunks of it" in lagging.chain
    close = explained(fleet(replace(child, num_chunks_held=7), ahead))
    assert close.cause == "slow_weights", "the learner limits both"
    # A loop of parents ends.
    loop = fleet(replace(child, parent="w2"), worker("w2", parent="w1", **fetch))
    assert explained(loop).cause == "slow_relay"


def test_a_disk_that_writes_as_slowly_as_weights_come_is_at_fault() -> None:
    each = worker(
        groups={"weights": 2}, fetching="v3", parent="learner", write_bytes_per_s=1e3,
        recent_bytes_per_s=0.9e3,
    )  # fmt: skip
    assert explained(fleet(each)).setting == "network.store_dir"
    assert explained(fleet(replace(each, write_bytes_per_s=1e6))).cause == "slow_weights"


def test_a_worker_that_waits_without_fetching_installs_or_lacks_a_parent() -> None:
    each = worker(groups={"weights": 2})
    assert explained(fleet(each)).cause == "no_weights"
    # Versions are not too rare if one that may sample is on its way.
    found = explained(fleet(each, newest="v3"))
    assert (found.cause, found.setting) == ("slow_weights", "sync.publish_period")
    assert "w1 waits for v3, which it has not begun to fetch" in found.chain
    assert explained(fleet(replace(each, activity="installing v3"))).cause == "slow_install"


@pytest.mark.parametrize(("hedge_factor", "setting"), [(None, "leases.hedge_factor"), (2.0, "")])
def test_one_slow_worker_is_a_straggler_and_a_long_group_is_none(
    hedge_factor: float | None, setting: str
) -> None:
    slow, idle = worker(speed=1.0), worker("w2", num_leases=0, speed=8.0)
    found = explained(fleet(slow, idle, is_closed=True, hedge_factor=hedge_factor))
    assert (found.cause, found.resource, found.setting) == ("straggler", "w1", setting)
    busy = worker("w2", speed=8.0)
    assert explained(fleet(slow, busy)).cause == "few_workers", "both of them sample"
    equal = replace(slow, speed=7.0)
    assert explained(fleet(equal, idle, is_closed=True)).cause == "few_in_flight"


def test_more_workers_are_named_only_where_all_of_them_sample() -> None:
    assert explained(fleet(worker(), worker("w2"))).cause == "few_workers"
    idle = worker("w2", num_leases=0)
    assert explained(fleet(worker(), idle, is_closed=True)).setting == "sync.max_staleness"


@pytest.mark.parametrize(
    ("scaling", "cause"), [(None, "few_in_flight"), (0.6, "few_in_flight"), (0.1, "few_workers")]
)
def test_engines_whose_cores_are_the_limit_do_not_have_too_few_rollouts(
    scaling: float | None, cause: str
) -> None:
    # The memory has many places, and the bound admits no more groups.
    many = worker(num_places=64, scaling=scaling)
    assert explained(fleet(many, is_closed=True)).cause == cause
    # A setting gives the engine few places.
    few = worker(num_places=1, num_fit=64, scaling=scaling, groups={"sampling": 1})
    assert explained(fleet(few, group_size=4)).cause == cause
    beside = worker("w2", num_places=1, num_fit=64, groups={"sampling": 1})
    assert explained(fleet(few, beside, group_size=4)).cause == "few_in_flight"


def test_groups_that_teach_nothing_are_named_before_the_workers() -> None:
    tally = Tally(num_accepted=2)
    tally.useless["zero_variance"] = 5
    tally.add(fleet(worker()), 10.0, is_waiting=True)
    found = explain_wait(tally, fleet(worker()))
    assert found.cause == "useless_groups"
    assert "nothing could be learned from 5 of the last 7 groups (5 zero_variance)" in found.chain
    # If this group had been useful, the step would still lack five.
    tally = Tally(useless=Counter(zero_variance=1))
    tally.add(fleet(worker(), num_missing=6), 10.0, is_waiting=True)
    assert explain_wait(tally, fleet(worker(), num_missing=6)).cause == "few_workers"


@pytest.mark.parametrize(
    ("state", "cause"),
    [
        (fleet(), "no_worker"),
        (fleet(num_standby=2), "no_worker"),
        (fleet(worker(num_leases=0), wait_reason="busy"), "busy"),
        (fleet(worker(num_leases=0), wait_reason="no_agent"), "no_agent"),
        (fleet(worker(num_leases=0)), "slow_prompts"),
        (fleet(worker(num_leases=0), is_closed=True, wait_reason="outdated"), "outdated"),
    ],
)
def test_a_wait_without_groups_has_its_reason(state: ObservedFleet, cause: str) -> None:
    assert explained(state).cause == cause


def test_a_fleet_with_workers_on_standby_is_not_asked_for_more() -> None:
    found = explained(fleet(worker(), num_standby=1))
    assert (found.cause, found.setting) == ("few_workers", "activation.mode")
    assert found.remedy.startswith('set activation.mode = "off" (1 is on standby), or ')
    assert explained(fleet(worker(), num_held=1)).remedy.startswith("add workers")


def test_where_activation_needs_no_more_workers_none_are_asked_for() -> None:
    busy = fleet(worker(), num_enough=1)
    assert explained(busy).setting == "activation.margin"
    assert explained(busy).remedy.startswith("raise activation.margin, or ")
    closed = fleet(worker(num_places=64), is_closed=True, num_enough=1)
    assert explained(replace(closed, num_enough=None)).remedy.endswith(", or add workers")
    assert explained(closed).remedy == "raise sync.max_staleness or batch.groups_per_step"
    # A worker of those that were enough is gone.
    assert explained(replace(busy, num_enough=2)).remedy.startswith("add workers")


def test_workers_that_an_operator_holds_are_for_the_operator_to_give_back() -> None:
    found = explained(fleet(num_held=2))
    assert found.chain.endswith("an operator holds every worker")
    assert "ctl resume" in found.remedy


def test_workers_that_are_joining_are_named_and_no_others_asked_for() -> None:
    state = fleet(joining=("w1", "w2"))
    assert describe_wait(state).endswith("w1 and w2 are joining")
    found = explained(state)
    assert "w1 and w2 are joining" in found.chain
    assert "start workers" not in found.remedy


@pytest.mark.parametrize(
    ("parts", "cause"),
    [
        ({}, "slow_learner"),
        ({"publish_s": 5.0}, "slow_publishing"),
        ({"save_s": 5.0}, "slow_checkpoints"),
        ({"train_s": 4.5, "publish_s": 4.4}, "slow_learner"),
        ({"train_s": 2.0, "publish_s": 3.0, "save_s": 3.5}, "slow_checkpoints"),
        ({"is_recomputing": True}, "needless_checkpointing"),
    ],
)
def test_idle_workers_have_a_part_of_the_step_to_thank(parts: dict[str, Any], cause: str) -> None:
    tally = Tally()
    tally.add(fleet(worker(num_leases=0), is_closed=True), 9.0, is_waiting=False)
    tally.add(fleet(worker()), 1.0, is_waiting=False)
    found = explain_idle(tally, StepParts(step_s=10.0, **parts))
    assert found is not None
    assert found.cause == cause
    assert "no groups 90% of the time" in found.chain
    assert explain_idle(Tally(), StepParts(step_s=10.0, **parts)) is None


def test_groups_that_agents_play_wait_for_agents() -> None:
    assert explained(fleet(worker(activity=SERVING_AGENTS))).cause == "slow_agents"


def test_a_long_list_of_workers_is_cut() -> None:
    many = [worker(f"w{number}") for number in range(100)]
    assert describe_wait(fleet(*many)).endswith("; 92 others have 184")
    assert "w0, w1, w2, w3, w4 and 95 others sample" in explained(fleet(*many)).chain
