"""What counts, from when, and until when."""

from __future__ import annotations

from typing import Any

import pytest

from echo.core.price import Price
from echo.roles.members import Member, Roster
from echo.runtime.learner.cost import CostMeter
from echo.wire.messages import Hello, NodeStats

HOUR = 3600.0


def make(**changes: Any) -> CostMeter:
    given = {
        "learner_per_h": 2.0,
        "learner_per_gb": 0.0,
        "spent": 0.0,
        "now": 0.0,
    }
    return CostMeter(**given | changes)


def join(roster: Roster, name: str, per_h: float | None, *, per_gb: float = 0.0) -> Member:
    hello = Hello(
        node_id=name,
        role="worker",
        incarnation=f"{name}-1",
        echo_version="",
        advertise=None,
        digests={},
        price=Price(per_h=per_h, per_gb=per_gb),
    )
    roster.nodes[name] = Member.of(hello, now=0.0)
    return roster.nodes[name]


@pytest.fixture
def roster() -> Roster:
    return Roster(heartbeat_s=1.0, dead_after_s=10.0)


def test_machines_count_from_joining_and_on_standby_too(roster: Roster) -> None:
    meter = make()
    meter.update(roster, bytes_sent=0, now=HOUR)
    assert meter.total == pytest.approx(2.0)
    join(roster, "w1", 0.5)
    join(roster, "w2", 0.3).node.is_standby = True
    join(roster, "free", None)
    meter.update(roster, bytes_sent=0, now=HOUR)
    meter.update(roster, bytes_sent=0, now=2 * HOUR)
    assert meter.total == pytest.approx(2.0 + 2.8)
    bill = meter.bill()
    assert (bill.machines_per_h, bill.standby_per_h) == pytest.approx((2.8, 0.3))


def test_a_machine_counts_until_its_release_is_confirmed(roster: Roster) -> None:
    meter = make(learner_per_h=0.0)
    released, left = join(roster, "released", 1.0), join(roster, "left", 1.0)
    meter.update(roster, bytes_sent=0, now=0.0)
    roster.leave(released, is_released=True)
    roster.leave(left, is_released=False)
    meter.update(roster, bytes_sent=0, now=60.0)
    assert meter.bill().machines_per_h == pytest.approx(1.0)
    assert meter.bill().unconfirmed_per_h == pytest.approx(1.0)
    meter.update(roster, bytes_sent=0, now=60.0 + HOUR - 1)
    assert meter.bill().machines_per_h == pytest.approx(1.0)
    meter.update(roster, bytes_sent=0, now=60.0 + HOUR)
    assert meter.bill().machines_per_h == 0.0
    assert meter.total == pytest.approx(2 / 60 + 1.0)


def test_a_machine_that_returns_goes_on_counting_once(roster: Roster) -> None:
    meter = make(learner_per_h=0.0)
    member = join(roster, "w", 1.0)
    meter.update(roster, bytes_sent=0, now=0.0)
    del roster.nodes["w"]
    meter.update(roster, bytes_sent=0, now=600.0)
    roster.nodes["w"] = member
    meter.update(roster, bytes_sent=0, now=1200.0)
    meter.update(roster, bytes_sent=0, now=HOUR)
    assert meter.total == pytest.approx(1.0)
    assert meter.bill().unconfirmed_per_h == 0.0


def test_a_new_start_of_a_released_name_counts_again(roster: Roster) -> None:
    meter = make(learner_per_h=0.0)
    roster.leave(join(roster, "w", 1.0), is_released=True)
    again = join(roster, "w", 1.0)
    again.incarnation = "w-2"
    meter.update(roster, bytes_sent=0, now=0.0)
    del roster.nodes["w"]
    meter.update(roster, bytes_sent=0, now=60.0)
    assert meter.bill().machines_per_h == 1.0


def test_traffic_counts_by_what_nodes_report(roster: Roster) -> None:
    meter = make(learner_per_h=0.0, learner_per_gb=0.1)
    member = join(roster, "w", 0.0, per_gb=0.02)
    member.node.stats = NodeStats(bytes_received=10**9, bytes_sent=10**9, tokens_sampled=10**9)
    meter.update(roster, bytes_sent=2 * 10**9, now=60.0)
    # 2 GB of weights and 17 GB of rollouts at the worker, 2 GB at the learner.
    assert meter.total == pytest.approx(0.02 * 19 + 0.1 * 2)
    meter.update(roster, bytes_sent=2 * 10**9, now=120.0)
    assert meter.total == pytest.approx(0.02 * 19 + 0.1 * 2)
    member.incarnation, member.node.stats = "w-2", NodeStats(bytes_received=5 * 10**8)
    meter.update(roster, bytes_sent=2 * 10**9, now=180.0)
    assert meter.total == pytest.approx(0.02 * 19.5 + 0.1 * 2)
    assert meter.bill().traffic_per_h > 0


def test_what_was_spent_before_counts(roster: Roster) -> None:
    meter = make(spent=7.5)
    assert meter.has_prices
    assert meter.bill().total == 7.5


def test_traffic_from_before_a_resume_is_not_counted_again(roster: Roster) -> None:
    meter = make(learner_per_h=0.0, spent=7.5)
    member = join(roster, "w", 0.0, per_gb=0.02)
    meter.update(roster, bytes_sent=0, now=1.0)
    for gigabytes in (400, 401):
        member.node.stats = NodeStats(bytes_received=gigabytes * 10**9)
        member.tokens_sampled = 0
        meter.update(roster, bytes_sent=0, now=float(gigabytes))
    assert meter.total == pytest.approx(7.5 + 0.02)


def test_without_a_price_there_is_nothing_to_show(roster: Roster) -> None:
    meter = make(learner_per_h=0.0)
    join(roster, "w", None)
    meter.update(roster, bytes_sent=10**9, now=HOUR)
    assert not meter.has_prices
    assert meter.total == 0.0


@pytest.mark.parametrize("field", ["per_h", "per_gb", "losses_per_h"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_price_that_is_none_is_refused(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"price.{field}"):
        Price(**{field: value})
