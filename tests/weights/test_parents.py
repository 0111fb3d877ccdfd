from __future__ import annotations

from typing import Any

import pytest

from echo.weights.link import ParentFailed
from echo.weights.parents import (
    ALONE_S,
    QUARANTINE_S,
    Connection,
    Parents,
)
from echo.wire.actions import Dial, HangUp, Note
from echo.wire.messages import TopologyPlan
from tests.roles.harness import PUBLIC_KEY, make_broadcast

LEARNER, R1, R2 = ("learner", "tcp://l:1"), ("r1", "tcp://r1:1"), ("r2", "tcp://r2:1")


def make_links(**options: Any) -> Parents:
    broadcast = make_broadcast("w1")
    broadcast.trust.set(public_key=PUBLIC_KEY, run_id="run", max_image_bytes=1 << 20)
    link = Parents(broadcast, retry_s=1.0, **options)
    link.retry_preferred_s = 10.0
    return link


@pytest.fixture
def link() -> Parents:
    return make_links()


def follow(link: Parents, *parents: tuple[str, str], epoch: int = 1, now: float = 0.0) -> list[Any]:
    return link.on_plan(TopologyPlan(epoch=epoch, parents=parents), now=now)


def answer(link: Parents, node_id: str, *, now: float = 0.0) -> list[Any]:
    """Complete the dial that is under way."""
    assert link.next is not None
    link.next.peer = f"peer-{node_id}"
    return link.greeted(link.next.peer, node_id, now=now)


def stand_by(link: Parents, node_id: str, *, sent: float = 0.0, now: float = 0.0) -> list[Any]:
    """Complete the dial of the spare."""
    assert link.spare is not None
    link.spare.peer = f"peer-{node_id}"
    assert link.connected(f"peer-{node_id}", now=sent)
    return link.greeted(f"peer-{node_id}", node_id, now=now)


def fail(link: Parents, node_id: str, *, now: float = 0.0, is_corrupt: bool = False) -> Any:
    peer = f"peer-{node_id}"
    failure = ParentFailed(peer, "reset", is_corrupt=is_corrupt)
    return link.parent_failed(failure, now=now)


def dialled(actions: list[Any]) -> list[str]:
    return [action.address for action in actions if isinstance(action, Dial)]


def test_the_old_link_is_kept_until_the_new_one_has_answered(link: Parents) -> None:
    follow(link, LEARNER)
    answer(link, "learner")
    assert dialled(follow(link, R1, LEARNER, epoch=2)) == ["tcp://r1:1"]
    assert link.receiver.link.peer == "peer-learner"
    assert HangUp("peer-learner") in answer(link, "r1")
    assert link.receiver.link.peer == "peer-r1"


def test_the_next_parent_takes_the_place_of_one_that_fails_and_after_the_last_the_first(
    link: Parents,
) -> None:
    follow(link, R2, R1, LEARNER)
    answer(link, "r2")
    actions = fail(link, "r2")
    assert HangUp("peer-r2") in actions
    assert Note("warning", "weights from r2 failed: reset", "weights from r2") in actions
    assert dialled(actions) == ["tcp://r1:1"]
    assert link.receiver.link.peer is None
    answer(link, "r1")
    assert dialled(fail(link, "r1")) == ["tcp://l:1"]
    answer(link, "learner")
    assert dialled(fail(link, "learner", now=5.0)) == []
    assert link.deadline == 6.0
    assert link.expire(now=5.9) == []
    assert dialled(link.expire(now=6.0)) == ["tcp://r2:1"]


def test_a_parent_that_does_not_answer_is_given_up_after_three_seconds(link: Parents) -> None:
    follow(link, R1, LEARNER, now=1.0)
    assert link.deadline == 4.0
    assert link.expire(now=3.9) == []
    actions = link.expire(now=4.0)
    text = "weights from tcp://r1:1 failed: no answer"
    assert Note("warning", text, "weights from tcp://r1:1") in actions
    assert dialled(actions) == ["tcp://l:1"]


def test_without_an_address_the_parent_is_where_this_node_reached_it(link: Parents) -> None:
    anywhere = ("learner", "")
    link.control = Connection("tcp://found:1", peer="out0", node_id="learner")
    assert dialled(follow(link, anywhere)) == ["tcp://found:1"]
    other = make_links()
    assert follow(other, anywhere) == []
    assert other.deadline == 1.0


def test_a_plan_for_the_process_that_bore_this_name_before_is_ignored() -> None:
    newcomer = Parents(make_broadcast("w1"), retry_s=1.0)
    assert follow(newcomer, R1, LEARNER) == []
    assert newcomer.parent == "-"


def test_an_older_plan_is_ignored_unless_the_learner_is_new(link: Parents) -> None:
    follow(link, R1, LEARNER, epoch=5)
    answer(link, "r1")
    assert follow(link, R2, LEARNER, epoch=4) == []
    link.new_learner()
    assert dialled(follow(link, R2, LEARNER, epoch=1)) == ["tcp://r2:1"]


def test_a_new_plan_with_the_parent_in_use_changes_nothing(link: Parents) -> None:
    follow(link, R1, LEARNER)
    answer(link, "r1")
    assert dialled(follow(link, R1, R2, LEARNER, epoch=2)) == ["tcp://r2:1"]  # the spare
    assert link.parent == "r1"
    assert link.receiver.link.peer == "peer-r1"


def test_a_plan_that_changes_while_dialling_drops_that_dial(link: Parents) -> None:
    follow(link, R1, LEARNER)
    assert link.next is not None
    link.next.peer = "peer-r1"
    actions = follow(link, R2, LEARNER, epoch=2)
    assert actions[0] == HangUp("peer-r1")
    assert dialled(actions) == ["tcp://r2:1"]
    assert link.greeted("peer-r1", "r1", now=0.0) == []
    assert fail(link, "r1") == []


def test_the_preferred_parent_is_tried_again_when_the_plan_is_repeated_but_not_at_once(
    link: Parents,
) -> None:
    follow(link, R1, LEARNER)
    answer(link, "r1")
    fail(link, "r1", now=100.0)
    answer(link, "learner", now=100.0)
    assert follow(link, R1, LEARNER, now=109.9) == []
    assert dialled(follow(link, R1, LEARNER, now=110.0)) == ["tcp://r1:1"]
    # It is still away: the parent in use stays in use.
    link.expire(now=113.0)
    assert link.receiver.link.peer == "peer-learner"
    assert follow(link, R1, LEARNER, now=114.0) == []
    # Later each time: it has failed twice.
    assert follow(link, R1, LEARNER, now=132.9) == []
    assert dialled(follow(link, R1, LEARNER, now=133.0)) == ["tcp://r1:1"]


def test_the_loss_of_the_parent_in_use_does_not_disturb_a_dial_under_way(
    link: Parents,
) -> None:
    follow(link, LEARNER)
    answer(link, "learner")
    follow(link, R1, LEARNER, epoch=2)
    assert dialled(fail(link, "learner")) == []
    assert link.next is not None
    answer(link, "r1")
    assert link.parent == "r1"


# --- the spare -----------------------------------------------------------------------------------


def test_a_spare_stands_by_and_takes_over_without_a_dial(link: Parents) -> None:
    follow(link, R1, R2, LEARNER)
    assert dialled(answer(link, "r1")) == ["tcp://r2:1"]
    assert not link.receiver.link.has_spare
    stand_by(link, "r2", sent=1.0, now=1.25)
    assert link.receiver.link.has_spare
    assert link.receiver.link.peer == "peer-r1"
    actions = fail(link, "r1", now=2.0)
    assert link.receiver.link.peer == "peer-r2"
    assert link.parent == "r2"
    assert link.receiver.link.rtt_s == 0.25
    # And the next of the list stands by in its place.
    assert dialled(actions) == ["tcp://l:1"]
    assert not link.receiver.link.has_spare


def test_a_spare_takes_over_while_another_parent_is_dialled(link: Parents) -> None:
    follow(link, R1, LEARNER)
    answer(link, "r1")
    stand_by(link, "learner", now=0.25)
    assert dialled(follow(link, R2, R1, LEARNER, epoch=2, now=1.0)) == ["tcp://r2:1"]
    actions = fail(link, "r1", now=1.5)
    assert link.receiver.link.peer == "peer-learner"
    assert link.parent == "learner"
    assert not link.receiver.link.has_spare
    assert link.next is not None
    assert link.next.address == "tcp://r2:1"
    assert dialled(actions) == ["tcp://r1:1"]  # behind r2 in the list: it may be back soon
    # Whoever is dialled takes its place when it answers, and not before.
    assert HangUp("peer-learner") in answer(link, "r2", now=2.0)
    assert link.parent == "r2"


def test_the_parent_that_is_dialled_may_fail_after_the_spare_took_over(link: Parents) -> None:
    follow(link, R1, LEARNER)
    answer(link, "r1")
    stand_by(link, "learner", now=0.25)
    follow(link, R2, LEARNER, epoch=2, now=1.0)
    fail(link, "r1", now=1.5)
    assert dialled(link.expire(now=4.0)) == []
    assert link.next is None
    assert link.parent == "learner"
    assert link.receiver.link.peer == "peer-learner"


def test_a_spare_that_fails_costs_nothing_and_is_dialled_again(link: Parents) -> None:
    follow(link, R1, LEARNER)
    answer(link, "r1")
    stand_by(link, "learner")
    actions = fail(link, "learner", now=5.0)
    assert not any(isinstance(action, Note) for action in actions)
    assert link.receiver.link.peer == "peer-r1"
    assert not link.receiver.link.has_spare
    assert link.deadline == 6.0
    assert dialled(link.expire(now=6.0)) == ["tcp://l:1"]


def test_a_spare_that_does_not_answer_is_given_up_for_a_while(link: Parents) -> None:
    follow(link, R1, LEARNER)
    answer(link, "r1")
    assert link.deadline == 3.0
    link.expire(now=3.0)
    assert link.spare is None
    assert link.receiver.link.peer == "peer-r1"


def test_a_spare_that_is_replaced_while_it_is_late_does_not_cost_the_parent(
    link: Parents,
) -> None:
    follow(link, R1, LEARNER)
    answer(link, "r1")  # and the learner is dialled as its spare
    follow(link, R2, R1, ("r3", "tcp://r3:1"), epoch=2)
    actions = link.expire(now=3.0)  # neither r2 nor the learner has answered
    assert dialled(actions) == ["tcp://r3:1"]
    assert link.parent == "r1"
    assert link.receiver.link.peer == "peer-r1"


def test_without_a_parent_nothing_is_due_for_a_spare(link: Parents) -> None:
    follow(link, R1, LEARNER)
    answer(link, "r1")
    stand_by(link, "learner")
    fail(link, "learner", now=5.0)
    fail(link, "r1", now=5.5)  # before the spare was to be dialled again
    link.expire(now=6.0)
    assert link.deadline == 8.5


def test_who_sent_wrong_chunks_is_passed_over_for_a_while_but_not_the_learner(
    link: Parents,
) -> None:
    follow(link, R1, LEARNER)
    answer(link, "r1")
    fail(link, "r1", now=1.0, is_corrupt=True)
    assert link.suspects(now=1.0) == ("r1",)
    answer(link, "learner")
    fail(link, "learner", now=9.0, is_corrupt=True)
    assert link.next is None
    assert dialled(link.expire(now=10.0)) == ["tcp://l:1"]
    assert link.suspects(now=1.0 + QUARANTINE_S) == ("learner",)


# --- the last resort ------------------------------------------------------------------------------


@pytest.mark.parametrize("planned", [(R1, ("learner", "")), (R1,)])
@pytest.mark.parametrize("is_corrupt", [True, False])
def test_who_has_lost_all_planned_parents_asks_the_learner_itself(
    planned: tuple[tuple[str, str], ...], is_corrupt: bool
) -> None:
    """It knows where: the plan does not, or a relay on the way has struck the learner out."""
    link = make_links(addresses=["tcp://r1:1", "tcp://l:1"])
    link.control = Connection("tcp://r1:1", peer="out0", node_id="r1")
    follow(link, *planned)
    answer(link, "r1")
    assert dialled(fail(link, "r1", now=5.0, is_corrupt=is_corrupt)) == ["tcp://l:1"]
    answer(link, "learner", now=5.1)
    assert link.parent == "learner"
    # The plan is repeated, as long as the parent is another: the learner is kept.
    assert dialled(follow(link, *planned, now=14.9)) == []
    again = dialled(follow(link, *planned, now=15.0))
    assert again == ([] if is_corrupt else ["tcp://r1:1"])
    assert link.parent == "learner"


def test_weights_of_the_last_resort_are_the_learners_alone() -> None:
    link = make_links(addresses=["tcp://x:1", "tcp://l:1"])
    follow(link, R1)
    answer(link, "r1")
    assert dialled(fail(link, "r1", now=5.0)) == ["tcp://x:1"]
    assert dialled(answer(link, "r9", now=5.1)) == ["tcp://l:1"]
    assert link.receiver.link.peer is None


def test_a_node_that_reaches_nothing_but_its_control_peer_fetches_there() -> None:
    """A slow relay was taken out of the plan; the worker behind it cannot reach the learner."""
    link = make_links(addresses=["tcp://r1:1"])
    link.control = Connection("tcp://r1:1", peer="out0", node_id="r1")
    assert dialled(follow(link, LEARNER)) == ["tcp://l:1"]
    assert dialled(link.expire(now=3.0)) == ["tcp://r1:1"]
    answer(link, "r1", now=3.1)
    assert link.parent == "r1"
    # The plan is repeated: the relay is kept while the learner is tried again.
    assert dialled(follow(link, LEARNER, now=13.0)) == ["tcp://l:1"]
    link.expire(now=16.0)
    assert link.parent == "r1"
    # If the relay fails, too, all are dialled again.
    assert dialled(fail(link, "r1", now=20.0)) == []
    assert dialled(link.expire(now=21.0)) == ["tcp://l:1"]


def test_where_nobody_else_can_be_asked_a_quarantine_is_short() -> None:
    link = make_links(addresses=["tcp://r1:1"])
    link.control = Connection("tcp://r1:1", peer="out0", node_id="r1")
    follow(link, R1, ("learner", ""))
    answer(link, "r1")
    assert dialled(fail(link, "r1", now=5.0, is_corrupt=True)) == []
    now = 5.0
    while not (again := dialled(link.expire(now=now))):
        assert link.deadline is not None
        now = link.deadline
    assert again == ["tcp://r1:1"]
    assert ALONE_S <= now - 5.0 <= ALONE_S + 1.0


# --- standby --------------------------------------------------------------------------------------


def test_a_node_on_standby_leaves_its_parents_and_follows_the_next_plan(link: Parents) -> None:
    follow(link, R1, LEARNER)
    answer(link, "r1")
    stand_by(link, "learner")
    actions = follow(link, epoch=2)
    assert {HangUp("peer-r1"), HangUp("peer-learner")} <= set(actions)
    assert link.parent == "-"
    assert link.receiver.link.peer is None
    assert not link.receiver.link.has_spare
    assert link.deadline is None
    assert dialled(follow(link, R1, LEARNER, epoch=3)) == ["tcp://r1:1"]
