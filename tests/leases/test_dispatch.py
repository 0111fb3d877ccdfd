"""Dispatch of groups: which worker gets the next one, which are copied, and which move."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo.leases.grants.dispatch import (
    Helper,
    Load,
    Newcomer,
    RunningGroup,
    by_finish,
    even_out,
    hedges,
    moves,
)
from echo.leases.groups import LeaseRecord


def load(name: str, *, speed: float, places: int = 2, held: int = 0, most: int = 10**6) -> Load:
    """Return a worker that needs 1 / speed seconds for a group."""
    made = Load(name, 2 * places, 0, most, most, 1 / speed, 1 / speed, [0.0] * places)
    for _ in range(held):
        made.add()
    return made


def granted(loads: list[Load], num_groups: int) -> Counter[str]:
    for each in loads:
        each.most_promised = each.most_soon = min(each.most_promised, num_groups)
    return Counter(by_finish(loads, num_promised=0))


def test_a_worker_with_older_weights_gets_only_what_fits_its_version() -> None:
    loads = [load("old", speed=9.0, most=2), load("new", speed=1.0, most=5)]
    assert Counter(by_finish(loads, num_promised=0)) == {"old": 2, "new": 3}


def test_an_equal_that_is_ready_a_little_later_is_left_its_share() -> None:
    def shares(later_s: float, speed: float = 1.0) -> list[int]:
        first, second = load("first", speed=1.0, places=16), load("second", speed=speed, places=16)
        second.free_at = [later_s] * 16
        given_to = granted([first, second], 16)
        return [given_to["first"], given_to["second"]]

    assert shares(0.0) == [8, 8]
    assert shares(0.1) == [9, 7]
    assert shares(0.5) == [12, 4]
    # It would have begun when the first one has done it all.
    assert shares(2.0) == [16, 0]
    assert shares(0.0, speed=0.5) == [16, 0], "a full engine is still faster than this one"


workers = st.lists(
    st.tuples(
        st.floats(0.01, 100.0),  # speed
        st.integers(1, 4),  # places
        st.integers(0, 6),  # groups held
        st.integers(0, 30),  # most promised
    ),
    min_size=1,
    max_size=6,
)


@given(workers, st.integers(0, 20))
def test_admission_and_capacity_are_never_passed(
    drawn: list[tuple[float, int, int, int]], num_promised: int
) -> None:
    def make() -> list[Load]:
        return [
            load(f"w{n}", speed=speed, places=places, held=held, most=most)
            for n, (speed, places, held, most) in enumerate(drawn)
        ]

    before = {each.node_id: each for each in make()}
    given_to = by_finish(make(), num_promised=num_promised)
    for index, name in enumerate(given_to):
        assert num_promised + index < before[name].most_promised
    for name, count in Counter(given_to).items():
        assert before[name].num_held + count <= before[name].capacity


@given(workers)
def test_whoever_would_be_done_first_is_given_the_first_group(
    drawn: list[tuple[float, int, int, int]],
) -> None:
    loads = [
        load(f"w{n}", speed=speed, places=places, held=held)
        for n, (speed, places, held, _) in enumerate(drawn)
    ]
    first = min(loads, key=lambda each: (each.finish_at, each.share, each.node_id))
    has_space = first.has_space
    for each in loads:
        each.most_promised = each.most_soon = 1
    assert by_finish(loads, num_promised=0) == ([first.node_id] if has_space else [])


# --- copies ---------------------------------------------------------------------------------------


def running(group_id: int, *, done_at: float, num_tokens: float = 10.0) -> RunningGroup:
    return RunningGroup(LeaseRecord(group_id, 0, "slow", 0.0, 0.0), done_at, num_tokens)


def chosen(
    groups: list[RunningGroup],
    *helpers: Helper,
    factor: float | None = 2.0,
    also: str = "",
    now: float = 0.0,
) -> list[tuple[int, str]]:
    """Return what is copied to whom, of groups that "slow" holds, and `also` another worker."""
    holders = {g.record.group_id: ["slow", also] if also else ["slow"] for g in groups}
    picked = hedges(groups, helpers, holders=holders, factor=factor, now=now)
    return [(record.group_id, name) for record, name in picked]


def test_the_last_groups_go_to_the_fastest() -> None:
    groups = [running(n, done_at=float(10 + n)) for n in range(4)]
    helpers = Helper("b", 5.0, 1), Helper("a", 10.0, 2)
    assert chosen(groups, *helpers) == [(3, "a"), (2, "a"), (1, "b")]


def test_nobody_copies_its_own_group() -> None:
    assert chosen([running(0, done_at=1e9)], Helper("slow", 1.0, 3)) == []


@pytest.mark.slow
@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(1, 100)), max_size=8),
    st.lists(st.tuples(st.floats(0.1, 100), st.integers(0, 3)), max_size=4),
    st.floats(1, 5),
)
def test_copies_pay_and_fit(
    groups: list[tuple[float, float]], helpers: list[tuple[float, int]], factor: float
) -> None:
    made = [running(n, done_at=at, num_tokens=t) for n, (at, t) in enumerate(groups)]
    names = {f"h{n}": speed for n, (speed, _) in enumerate(helpers)}
    picked = chosen(
        made, *(Helper(f"h{n}", *each) for n, each in enumerate(helpers)), factor=factor
    )
    assert len({group for group, _ in picked}) == len(picked)
    for group, name in picked:
        done_at, num_tokens = groups[group]
        assert done_at >= factor * num_tokens / names[name]
    for n, (_, num_places) in enumerate(helpers):
        assert sum(name == f"h{n}" for _, name in picked) <= num_places


def test_a_group_that_is_old_is_copied_whatever_its_holders_say() -> None:
    group = running(0, done_at=1e6)  # granted at 0
    soon = RunningGroup(group.record, 80.0, 10.0)
    helper = partial(Helper, group_s=10.0, num_places=1)

    def copied(now: float, **how: Any) -> bool:
        return bool(chosen([soon], helper("fast", 1.0), now=now, **how))

    assert not copied(80.0)  # 8 x 10 s
    assert copied(80.1)
    assert copied(80.1, factor=9.0), "whatever gain is asked of a copy"
    assert copied(80.1, factor=None), "with hedging switched off, too"
    assert copied(80.1, also="accomplice"), "whoever else has it"
    assert not copied(80.1, also="fast")
    unmeasured = helper("new", None)
    assert chosen([soon], unmeasured, now=80.1) == [(0, "new")]
    assert chosen([group], unmeasured, now=79.0) == [], "late alone is not enough for it"


def test_a_holder_that_claims_to_be_the_fastest_keeps_no_other_from_its_groups() -> None:
    helpers = Helper("slow", 1e6, 9, 0.1), Helper("honest", 1.0, 1, 10.0)
    assert chosen([running(0, done_at=1e3)], *helpers, now=81.0) == [(0, "honest")]


# --- moves ----------------------------------------------------------------------------------------


@given(
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 30), min_size=1),
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), min_size=1, max_size=3),
)
def test_newcomers_are_given_as_many_groups_as_the_others_have(
    held: dict[str, int], joining: list[tuple[int, int]]
) -> None:
    records = {
        name: [LeaseRecord(n, 0, name, 0.0, 0.0) for n in range(number)]
        for name, number in held.items()
    }
    newcomers = [Newcomer(f"n{n}", *each) for n, each in enumerate(joining)]
    moved = even_out(records, newcomers)
    assert len({(record.worker_id, record.group_id) for record, _ in moved}) == len(moved)
    left = {
        name: number - sum(r.worker_id == name for r, _ in moved) for name, number in held.items()
    }
    for newcomer, (before, capacity) in zip(newcomers, joining, strict=True):
        given_to = sum(name == newcomer.node_id for _, name in moved)
        assert newcomer.num_held == before + given_to
        assert not given_to or newcomer.num_held <= capacity
        if newcomer.num_held < capacity:
            assert max(left.values()) <= newcomer.num_held + 1
        if given_to:
            assert newcomer.num_held <= max(left.values()) + 1
    for name, records_of in records.items():
        last = [record for record, _ in moved if record.worker_id == name]
        assert last == records_of[len(records_of) - len(last) :][::-1], "the last one moves first"


def test_a_lease_moves_where_that_saves_more_than_a_group() -> None:
    def moved(*done_at: float, free: int = 4, least_gain_s: float = 0.0) -> list[int]:
        helper = load("idle", speed=1.0, places=4, held=4 - free)
        groups = [running(n, done_at=at) for n, at in enumerate(done_at)]
        return [r.group_id for r, _ in moves(groups, [helper], least_gain_s=least_gain_s)]

    # A group takes the idle worker 1 s alone, up to 2 s beside others.
    assert moved(9.0, 10.0) == [1, 0]
    assert moved(3.2) == []
    assert moved(3.3) == [0]
    assert moved(9.0, 10.0, free=1) == [1]
    assert moved(9.0, 10.0, least_gain_s=8.0) == [1]
    assert moves([running(0, done_at=99.0)], [load("slow", speed=1.0)], least_gain_s=0.0) == []
