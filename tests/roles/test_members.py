from __future__ import annotations

import pytest

from echo.core.rollout import PolicyVersion
from echo.roles import members
from echo.roles.members import Member, Presence, Roster
from echo.wire.messages import Heartbeat, NodeStats
from tests.roles.harness import make_hello


@pytest.fixture
def roster() -> Roster:
    return Roster(heartbeat_s=2.0, dead_after_s=10.0)


def hello(roster: Roster, incarnation: str, *, now: float, name: str = "w1") -> str:
    """Return what a Hello's claim comes to, and let the node in if it is right."""
    message = make_hello(name, incarnation=incarnation)
    claim = roster.claim(message, now=now)
    if claim in ("new", "restarted"):
        roster.move(Member.of(message, now=now), Presence.KNOWN)
    return claim


def beat(tokens: int = 0, num_bytes: int = 0) -> Heartbeat:
    stats = NodeStats(state="sampling", tokens_sampled=tokens, bytes_received=num_bytes)
    return Heartbeat(installed=PolicyVersion(1, 4), capacity=3, leases=(), stats=stats)


def test_a_rival_of_long_ago_does_not_count_against_another_one(roster: Roster) -> None:
    hello(roster, "i1", now=0.0)
    assert hello(roster, "i2", now=1.0) == "wait"
    roster.nodes["w1"].beat(beat(), now=99.0)
    assert hello(roster, "i3", now=100.0) == "wait"
    assert hello(roster, "i3", now=103.0) == "restarted"


def test_each_of_several_rivals_is_told_that_the_name_is_taken(roster: Roster) -> None:
    hello(roster, "i1", now=0.0)
    for now in range(1, 12):
        roster.nodes["w1"].beat(beat(), now=float(now))
        assert hello(roster, f"i{now % 3 + 2}", now=float(now)) == "wait"
    roster.nodes["w1"].beat(beat(), now=12.0)
    assert [hello(roster, name, now=12.0) for name in ("i2", "i3", "i4")] == ["name_taken"] * 3


def test_names_that_a_member_makes_up_are_bounded_until_they_fall_silent(
    roster: Roster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "MAX_NODES", 2)
    assert [hello(roster, "i1", now=0.0, name=name) for name in ("w1", "x1", "x2")] == [
        "new",
        "new",
        "full",
    ]
    assert hello(roster, "i1", now=1.0, name="w1") == "again", "who is known stays"
    for member in roster.take_silent(now=10.5):
        roster.move(member, Presence.UNKNOWN)
    assert hello(roster, "i1", now=10.5, name="x2") == "new"


def test_a_drain_is_of_the_process_and_a_standby_of_the_name(roster: Roster) -> None:
    for name, hold in (("w1", "drain"), ("w2", "standby")):
        hello(roster, "i1", now=0.0, name=name)
        roster.hold(name, hold)  # type: ignore[arg-type]

    def holds() -> list[str | None]:
        return [roster.nodes[name].hold for name in ("w1", "w2")]

    for name in ("w1", "w2"):
        assert hello(roster, "i2", now=5.0, name=name) == "restarted"
    assert holds() == [None, "standby"], "who is started again is wanted, also within dead_after_s"
    assert not roster.nodes["w1"].is_standby
    roster.hold("w1", "drain")
    for member in roster.take_silent(now=16.0):
        roster.move(member, Presence.UNKNOWN)
    for name in ("w1", "w2"):
        assert hello(roster, "i2", now=20.0, name=name) == "new"
    assert holds() == ["drain", "standby"], "the same process comes back after an outage"


def test_rates_are_of_the_last_ten_seconds(roster: Roster) -> None:
    hello(roster, "i1", now=0.0)
    member = roster.nodes["w1"]
    assert member.rates() == (0.0, 0.0, 0.0)
    assert member.beat(beat(tokens=100), now=0.0) is None, "perhaps of an earlier learner"
    assert member.rates() == (0.0, 0.0, 0.0)
    assert member.beat(beat(tokens=100), now=5.0) == 0
    assert member.beat(beat(tokens=300, num_bytes=1000), now=10.0) == 200
    assert member.rates() == (20.0, 100.0, 0.0)
    for now in range(12, 30, 2):
        member.beat(beat(tokens=300, num_bytes=1000), now=float(now))
    assert member.rates() == (0.0, 0.0, 0.0)


def test_a_node_is_shown_as_it_was_last_heard(roster: Roster) -> None:
    hello(roster, "i1", now=0.0)
    member = roster.nodes["w1"]
    view = member.view(step=6, num_leases=0, now=1.0)
    assert (view.state, view.version, view.staleness) == ("joining", "-", None)
    roster.move(member, Presence.ADMITTED)
    member.beat(beat(), now=2.0)
    view = member.view(step=6, num_leases=2, now=5.0)
    assert (view.state, view.version, view.staleness) == ("sampling", "v4", 2)
    assert (view.num_leases, view.seen_s) == (2, 3.0)
    stats = NodeStats(
        state="sampling", fetching=PolicyVersion(1, 5), num_chunks_held=2, num_chunks=9, parent="r1"
    )
    member.beat(Heartbeat(installed=None, capacity=0, leases=(), stats=stats), now=6.0)
    view = member.view(step=6, num_leases=2, now=6.0)
    assert (view.state, view.parent) == ("sampling, fetching v5 2/9", "r1")
