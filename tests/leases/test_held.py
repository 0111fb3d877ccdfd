"""The table of a group at its worker: total, drawn as it is, and obeyed in every pair."""

from __future__ import annotations

import pytest

from echo.core.errors import LocalProtocolError
from echo.core.tables import IGNORED, IMPOSSIBLE
from echo.leases.worker import held
from echo.leases.worker.held import (
    BUSY,
    EVENTS,
    TABLE,
    WAITING,
    Closed,
    Event,
    GroupState,
    HeldLeases,
    PartialGroup,
    Reclaimed,
    Reported,
    Taken,
    Whole,
)
from echo.leases.worker.outbox import Outbox
from echo.wire.messages import Deliver
from tests.leases.tables import draw, reachable
from tests.roles.harness import make_lease
from tests.roles.test_worker import members

MESSAGE = Deliver(group_id=0, attempt=0)
WAYS: dict[GroupState, list[Event]] = {
    GroupState.QUEUED: [],
    GroupState.RUNNING: [Taken(1.0)],
    GroupState.RECLAIMED: [Taken(1.0), Reclaimed()],
    GroupState.INTERRUPTED: [],
    GroupState.SCORING: [Taken(1.0), Whole()],
    GroupState.UNWANTED: [Taken(1.0), Closed()],
    GroupState.DELIVERED: [Reported(MESSAGE)],
    GroupState.ENDED: [Closed()],
}
"""How a group comes to each state."""


def make(event: type[Event]) -> Event:
    what: dict[type[Event], Event] = {Taken: Taken(2.0), Reported: Reported(MESSAGE)}
    return what[event] if event in what else event()  # type: ignore[call-arg]


def group_in(state: GroupState) -> tuple[HeldLeases, PartialGroup]:
    leases = HeldLeases(Outbox(max_deliveries=8, retry_s=1e9))
    leases.add(make_lease(0), members(0, 0) if state is GroupState.INTERRUPTED else ())
    [group] = leases.of(*WAITING)
    if not group.members and state is not GroupState.QUEUED:
        group.members = members(0, 0)
    for event in WAYS[state]:
        leases.handle(group, event)
    assert group.state is state
    return leases, group


def test_the_table_is_total_and_the_docstring_draws_it() -> None:
    assert set(TABLE) == set(GroupState)
    for steps in TABLE.values():
        assert set(steps) == set(EVENTS)
    ordered = {state: {event: steps[event] for event in EVENTS} for state, steps in TABLE.items()}
    assert held.__doc__ is not None
    assert draw(ordered, impossible=IMPOSSIBLE) in held.__doc__


def test_every_state_is_reached_and_each_has_an_end() -> None:
    assert reachable(TABLE, GroupState.QUEUED) == set(GroupState)
    for state in GroupState:
        assert GroupState.ENDED in reachable(TABLE, state)
    assert set(TABLE[GroupState.ENDED].values()) == {IGNORED, IMPOSSIBLE}


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", GroupState)
def test_every_event_does_in_every_state_what_the_table_says(
    state: GroupState, event: type[Event]
) -> None:
    leases, group = group_in(state)
    step = TABLE[state][event]
    if step is IMPOSSIBLE:
        with pytest.raises(LocalProtocolError, match=f"{event.__name__} of group 0, which is"):
            leases.handle(group, make(event))
        assert group.state is state
    else:
        leases.handle(group, make(event))
        assert group.state is (step.then or state)
    leases.validate()
    is_held = group.state is not GroupState.ENDED
    assert ((0, 0) in leases) is is_held
    assert len(leases) == is_held
    # A heartbeat lists it for as long, and the outbox has what was delivered.
    assert len(leases.states()) == is_held
    assert ((0, 0) in leases.outbox) is (group.state is GroupState.DELIVERED)


@pytest.mark.parametrize("state", [*WAITING, *BUSY])
def test_a_heartbeat_lists_a_group_as_waiting_or_running(state: GroupState) -> None:
    leases, _ = group_in(state)
    [listed] = leases.states(now=3.0)
    assert listed.is_waiting is (state in WAITING)
    assert listed.running_s == (0.0 if state in WAITING else 2.0)


def test_a_group_that_comes_back_with_tokens_counts_as_continued() -> None:
    for state in WAITING:
        leases, group = group_in(state)
        leases.handle(group, Taken(1.0))
        assert group.seconds(3.0) == (0.0 if state is GroupState.INTERRUPTED else 2.0)


def test_a_damaged_state_is_found() -> None:
    leases, group = group_in(GroupState.RUNNING)
    group.state = GroupState.SCORING
    with pytest.raises(AssertionError, match="is scoring among the running"):
        leases.validate()
    leases, _ = group_in(GroupState.DELIVERED)
    leases.outbox.acknowledge((0, 0))
    with pytest.raises(AssertionError, match="the outbox"):
        leases.validate()
