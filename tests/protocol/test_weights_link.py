from __future__ import annotations

from typing import Any

import pytest

from echo.protocol.actions import Dial, HangUp, Note
from echo.protocol.messages import Plan
from echo.protocol.weights_link import Uplink, WeightsLink
from tests.protocol.harness import PUBLIC_KEY, make_broadcast

LEARNER, R1, R2 = ("learner", "tcp://l:1"), ("r1", "tcp://r1:1"), ("r2", "tcp://r2:1")


@pytest.fixture
def link() -> WeightsLink:
    broadcast = make_broadcast("w1")
    broadcast.trust(public_key=PUBLIC_KEY, run_id="run", max_image_bytes=1 << 20)
    link = WeightsLink(broadcast, retry_s=1.0)
    link.retry_preferred_s = 10.0
    return link


def follow(
    link: WeightsLink, *parents: tuple[str, str], epoch: int = 1, now: float = 0.0, **rest: Any
) -> list[Any]:
    return link.on_plan(Plan(epoch=epoch, parents=parents), control=rest.get("control"), now=now)


def answer(link: WeightsLink, node_id: str, *, now: float = 0.0) -> list[Any]:
    """Complete the dial that is under way."""
    assert link.next is not None
    link.next.peer = f"peer-{node_id}"
    return link.greeted(link.next.peer, node_id, now=now)


def fail(link: WeightsLink, node_id: str, *, now: float = 0.0) -> list[Any]:
    return link.failed(f"peer-{node_id}", "reset", control=None, now=now)


def dialled(actions: list[Any]) -> list[str]:
    return [action.address for action in actions if isinstance(action, Dial)]


def test_the_first_parent_of_the_plan_is_dialled_and_becomes_the_parent(link: WeightsLink) -> None:
    assert link.parent == "-"
    assert dialled(follow(link, R1, LEARNER)) == ["tcp://r1:1"]
    answer(link, "r1")
    assert link.parent == "r1"
    assert link.broadcast.parent == "peer-r1"
    assert link.has("peer-r1")
    assert link.deadline is None


def test_the_old_link_is_kept_until_the_new_one_has_answered(link: WeightsLink) -> None:
    follow(link, LEARNER)
    answer(link, "learner")
    assert dialled(follow(link, R1, LEARNER, epoch=2)) == ["tcp://r1:1"]
    assert link.broadcast.parent == "peer-learner"
    assert HangUp("peer-learner") in answer(link, "r1")
    assert link.broadcast.parent == "peer-r1"


def test_the_next_parent_takes_the_place_of_one_that_fails_and_after_the_last_the_first(
    link: WeightsLink,
) -> None:
    follow(link, R2, R1, LEARNER)
    answer(link, "r2")
    actions = fail(link, "r2")
    assert HangUp("peer-r2") in actions
    assert Note("warning", "weights from r2 failed: reset") in actions
    assert dialled(actions) == ["tcp://r1:1"]
    assert link.broadcast.parent is None
    answer(link, "r1")
    assert dialled(fail(link, "r1")) == ["tcp://l:1"]
    answer(link, "learner")
    assert dialled(fail(link, "learner", now=5.0)) == []
    assert link.deadline == 6.0
    assert link.expire(control=None, now=5.9) == []
    assert dialled(link.expire(control=None, now=6.0)) == ["tcp://r2:1"]


def test_a_parent_that_does_not_answer_is_given_up_after_three_seconds(link: WeightsLink) -> None:
    follow(link, R1, LEARNER, now=1.0)
    assert link.deadline == 4.0
    assert link.expire(control=None, now=3.9) == []
    actions = link.expire(control=None, now=4.0)
    assert Note("warning", "weights from tcp://r1:1 failed: no answer") in actions
    assert dialled(actions) == ["tcp://l:1"]


def test_without_an_address_the_parent_is_where_this_node_reached_it(link: WeightsLink) -> None:
    anywhere = ("learner", "")
    control = Uplink("tcp://found:1", peer="out0", node_id="learner")
    assert dialled(follow(link, anywhere, control=control)) == ["tcp://found:1"]
    other = WeightsLink(make_broadcast("w2"), retry_s=1.0)
    assert follow(other, anywhere) == []
    assert other.deadline == 1.0


def test_an_older_plan_is_ignored_unless_the_learner_is_new(link: WeightsLink) -> None:
    follow(link, R1, LEARNER, epoch=5)
    answer(link, "r1")
    assert follow(link, R2, LEARNER, epoch=4) == []
    link.new_learner()
    assert dialled(follow(link, R2, LEARNER, epoch=1)) == ["tcp://r2:1"]


def test_a_new_plan_with_the_parent_in_use_changes_nothing(link: WeightsLink) -> None:
    follow(link, R1, LEARNER)
    answer(link, "r1")
    assert follow(link, R1, R2, LEARNER, epoch=2) == []
    assert link.parent == "r1"


def test_a_plan_that_changes_while_dialling_drops_that_dial(link: WeightsLink) -> None:
    follow(link, R1, LEARNER)
    assert link.next is not None
    link.next.peer = "peer-r1"
    actions = follow(link, R2, LEARNER, epoch=2)
    assert actions[0] == HangUp("peer-r1")
    assert dialled(actions) == ["tcp://r2:1"]
    assert link.greeted("peer-r1", "r1", now=0.0) == []
    assert fail(link, "r1") == []


def test_the_preferred_parent_is_tried_again_when_the_plan_is_repeated_but_not_at_once(
    link: WeightsLink,
) -> None:
    follow(link, R1, LEARNER)
    answer(link, "r1")
    fail(link, "r1", now=100.0)
    answer(link, "learner", now=100.0)
    assert follow(link, R1, LEARNER, now=109.9) == []
    assert dialled(follow(link, R1, LEARNER, now=110.0)) == ["tcp://r1:1"]
    # It is still away: the parent in use stays in use.
    link.expire(control=None, now=113.0)
    assert link.broadcast.parent == "peer-learner"
    assert follow(link, R1, LEARNER, now=114.0) == []


def test_the_loss_of_the_parent_in_use_does_not_disturb_a_dial_under_way(
    link: WeightsLink,
) -> None:
    follow(link, LEARNER)
    answer(link, "learner")
    follow(link, R1, LEARNER, epoch=2)
    assert dialled(fail(link, "learner")) == []
    assert link.next is not None
    answer(link, "r1")
    assert link.parent == "r1"
