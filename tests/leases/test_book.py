from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo.core.errors import LocalProtocolError
from echo.core.tables import IMPOSSIBLE
from echo.leases import groups
from echo.leases.book import LeaseBook
from echo.leases.grants.admission import most_promised
from echo.leases.groups import (
    EVENTS,
    TABLE,
    Event,
    GroupEnded,
    LastLeaseEnded,
    LeaseBegan,
    Leased,
    LeaseEnded,
    LeaseOver,
    LeaseRecord,
    OpenState,
    ResultArrived,
)
from tests.leases.tables import draw, reachable


def admissible(**numbers: int) -> int:
    defaults = {
        "max_staleness": 2, "installed_step": 0, "step": 0, "groups_per_step": 4,
        "num_buffered": 0, "num_running": 0,
    }  # fmt: skip
    return room(**(defaults | numbers))


def room(*, step: int, groups_per_step: int, num_buffered: int, num_running: int, **of: int) -> int:
    """Return how many more groups are admitted, as `Scheduler` counts them."""
    promised = step * groups_per_step + num_buffered + num_running
    return max(0, most_promised(groups_per_step=groups_per_step, **of) - promised)


def test_the_worked_example() -> None:
    # S = 2, B = 4, the worker holds v5, the learner has done 6 steps: samples of v5 may be trained
    # in the steps that make v6, v7 and v8. 8 steps take 32 groups; 24 are consumed, 3 wait, 2 run.
    assert admissible(installed_step=5, step=6, num_buffered=3, num_running=2) == 3


def room_by_hand(
    *, max_staleness: int, installed_step: int, step: int, groups_per_step: int, promised: int
) -> int:
    """Fill the batches yet to be made, first come first served; count the places that are left.

    The batch that is consumed when `at` steps are done may use samples of the installed version
    while at - installed_step <= max_staleness.
    """
    horizon = range(step, step + max_staleness + installed_step + 2)
    usable = [at for at in horizon if at - installed_step <= max_staleness]
    places = [(at, place) for at in usable for place in range(groups_per_step)]
    return len(places[promised:])


@given(
    max_staleness=st.integers(0, 5),
    installed_step=st.integers(0, 12),
    lag=st.integers(0, 8),
    groups_per_step=st.integers(1, 5),
    num_buffered=st.integers(0, 30),
    num_running=st.integers(0, 30),
)
def test_the_rule_is_that_of_filling_batches_in_order(
    lag: int, num_buffered: int, num_running: int, **numbers: int
) -> None:
    numbers["step"] = numbers["installed_step"] + lag
    left = room(**numbers, num_buffered=num_buffered, num_running=num_running)
    assert left == room_by_hand(**numbers, promised=num_buffered + num_running)


# --- the book ------------------------------------------------------------------------------------


@pytest.fixture
def book() -> LeaseBook:
    return LeaseBook(timeout_s=10.0)


def test_a_finished_group_leaves_nothing_behind(book: LeaseBook) -> None:
    first, second = book.grant(1, "w1", now=0.0), book.grant(1, "w2", now=0.0)
    book.finish(1)
    assert first.is_over
    assert second.is_over
    assert (book.num_running, book.num_leases("w1"), book.group(1).num_attempts) == (0, 0, 0)
    book.grant(2, "w1", now=0.0)
    book.expire(now=10.0)
    book.finish(2)
    assert book.waiting == []
    assert (0, "w1") not in book.group(2).expired
    book.finish(99)


def test_a_worker_that_is_gone_leaves_nothing_behind(book: LeaseBook) -> None:
    book.grant(1, "w1", now=0.0)
    book.finish(1)
    record = book.grant(2, "w1", now=0.0)
    book.drop_worker("w1")
    assert record.is_over
    assert (book.worker_ids, book.num_changes("w1")) == (set(), 0)
    assert book.grant(2, "w1", now=0.0).attempt == 1


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 4), st.integers(0, 2)), max_size=60))
def test_every_open_group_is_leased_or_waits_and_never_both(
    events: list[tuple[int, int, int]],
) -> None:
    book, open_groups, now = LeaseBook(timeout_s=10.0), set[int](), 0.0
    for kind, group_id, worker in events:
        now += 1.5
        name = f"w{worker}"
        match kind:
            case 0 | 1:
                book.grant(group_id, name, now=now)
                open_groups.add(group_id)
            case 2:
                book.expire(now=now)
            case 3:
                book.drop_worker(name)
            case 4:
                book.finish(group_id)
                open_groups.discard(group_id)
            case 5:
                for taken in book.waiting[:1]:
                    book.grant(taken, name, now=now)
            case 6:
                for record in book.worker_leases(name):
                    record.renew(num_tokens=1, now=now)
        leased = {group_id for group_id in range(5) if book.group(group_id).workers}
        assert book.num_running == len(leased)
        assert book.num_running + len(book.waiting) == len(open_groups)
        book.validate()
        per_worker = sum(book.num_leases(f"w{i}") for i in range(3))
        assert per_worker == sum(len(book.group(group_id).workers) for group_id in range(5))


def test_an_attempt_is_revoked_whoever_holds_it() -> None:
    book = LeaseBook(timeout_s=60)
    book.adopt(7, 0, "(before the restart)", now=0.0)
    book.adopt(7, 1, "w2", now=0.0)
    book.revoke_attempt(7, 0)
    assert book.group(7).workers == ["w2"]
    assert book.waiting == []
    book.revoke_attempt(7, 1)
    assert book.num_running == 0
    assert book.waiting == [7]
    book.revoke_attempt(7, 1)  # no worker holds it any more
    assert book.waiting == [7]


def test_the_load_of_a_group_is_the_mean_of_what_its_worker_held_at_its_start_and_at_its_end() -> (
    None
):
    book = LeaseBook(timeout_s=10.0)
    for group_id in range(4):
        book.grant(group_id, "w1", now=1.0)
    book.note_load("w1", now=1.0)
    book.grant(4, "w1", now=2.0)
    book.note_load("w1", now=2.0)
    assert book.mean_leases("w1", 0, 0) == 4.5  # 4 when it was granted, 5 now
    assert book.mean_leases("w1", 4, 0) == 5
    for group_id in (1, 2, 3):
        book.finish(group_id)
    assert book.mean_leases("w1", 0, 0) == 3
    assert book.mean_leases("w2", 77, 0) == 1  # not in the book any more: only itself is known of


def test_a_lease_that_was_given_back_does_not_come_back_by_an_old_list() -> None:
    book = LeaseBook(timeout_s=10.0)
    book.grant(3, "w1", now=0.0)
    book.give_back(3, 0, "w1")
    assert (0, "w1") in book.group(3).expired
    assert book.num_leases("w1") == 0
    assert book.waiting == [3]
    assert book.grant(3, "w1", now=1.0).attempt == 1
    # Said twice, as when the answer is lost, it takes nothing from who has it now.
    book.give_back(3, 0, "w1")
    assert book.group(3).workers == ["w1"]
    assert book.waiting == []


# --- the states of a group -----------------------------------------------------------------------


def in_state(state: OpenState) -> LeaseBook:
    """Return a book with a group 1 in this state, which two workers were granted."""
    book = LeaseBook(timeout_s=10.0)
    first, _ = book.grant(1, "w1", now=0.0), book.grant(1, "w2", now=0.0)
    match state:
        case OpenState.WAITING:
            book.expire(now=10.0)
        case OpenState.STORING:
            book.revoke(first)
            book.deliver(1, 0, "w1")
        case OpenState.CLOSED:
            book.finish(1)
    assert book.group(1).state is (OpenState.WAITING if state is OpenState.CLOSED else state)
    return book


def event_of(book: LeaseBook, kind: type[Event]) -> Event:
    """Return an event of this kind as it could happen to group 1."""
    group, spare = book.group(1), LeaseRecord(1, 7, "w7", 0.0, 0.0)
    record = group.leases[-1] if group.leases else spare
    events: dict[type[Event], Event] = {
        Leased: Leased(5, "w3", 20.0),
        LeaseEnded: LeaseEnded(record),
        LastLeaseEnded: LastLeaseEnded(record),
        ResultArrived: ResultArrived(1, "w2"),
        GroupEnded: GroupEnded(),
    }
    return events[kind]


@pytest.mark.parametrize("kind", EVENTS)
@pytest.mark.parametrize("state", OpenState)
def test_every_event_does_in_every_state_what_the_table_says(
    state: OpenState, kind: type[Event]
) -> None:
    book, move = in_state(state), TABLE[state][kind]
    group, event = book.group(1), event_of(book, kind)
    if state is OpenState.CLOSED:
        group.state = state  # the book has forgotten it
    before = list(group.leases)
    if move is IMPOSSIBLE:
        with pytest.raises(LocalProtocolError, match=f"{kind.__name__} of group 1, which is"):
            group.handle(event)
        assert (group.state, group.leases) == (state, before)
        return
    changes = group.handle(event)
    assert group.state is (move.then or state)
    began = [change.record for change in changes if isinstance(change, LeaseBegan)]
    over = [change.record for change in changes if isinstance(change, LeaseOver)]
    assert [record for record in [*before, *began] if record not in over] == group.leases
    assert all(record.is_over for record in over)
    assert group.is_storing is (group.result is not None and group.state is OpenState.STORING)


def test_the_book_follows_the_states_of_its_groups() -> None:
    book = LeaseBook(timeout_s=10.0)
    first, second = book.grant(1, "w1", now=0.0), book.grant(1, "w2", now=0.0)
    seen = []
    for event in (
        lambda: book.revoke(first),
        lambda: book.revoke(second),
        lambda: book.grant(1, "w3", now=1.0),
        lambda: book.deliver(1, 2, "w3"),
        lambda: book.drop_worker("w3"),
        lambda: book.finish(1),
    ):
        event()
        book.validate()
        seen.append((book.waiting, book.num_running, str(book.group(1).state)))
    assert seen == [
        ([], 1, "granted"),
        ([1], 0, "waiting"),
        ([], 1, "granted"),
        ([], 1, "storing"),
        ([], 1, "storing"),
        ([], 0, "waiting"),  # as a group is that was never granted
    ]
    with pytest.raises(KeyError):
        book.deliver(1, 2, "w3")


def test_the_table_is_total_drawn_and_without_dead_ends() -> None:
    assert all(list(steps) == list(EVENTS) for steps in TABLE.values())
    assert set(TABLE) == set(OpenState)
    assert groups.__doc__ is not None
    assert draw(TABLE, impossible=IMPOSSIBLE) in groups.__doc__
    assert reachable(TABLE, OpenState.WAITING) == set(OpenState)
    for state in OpenState:
        assert OpenState.CLOSED in reachable(TABLE, state)


def test_a_group_that_is_being_stored_is_not_granted_again_though_its_worker_is_gone() -> None:
    book = LeaseBook(timeout_s=10.0)
    book.grant(1, "w1", now=0.0)
    book.deliver(1, 0, "w1")
    book.drop_worker("w1")
    assert book.waiting == []
    assert book.num_running == 1
    book.finish(1)
    assert book.num_running == 0
