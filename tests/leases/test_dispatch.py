from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo.leases.dispatch import Load, by_finish
from tests.leases.unequal import Unequal


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


def test_a_worker_gets_nothing_that_the_others_finish_sooner() -> None:
    assert granted([load("fast", speed=10.0), load("slow", speed=1.0)], 8) == {"fast": 4}
    # The other four wait for the fast one: it needs 0.4 s for all eight, the slow one 1 s for one.
    assert granted([load("fast", speed=10.0), load("slow", speed=1.0)], 24) == {
        "fast": 4,
        "slow": 2,
    }


def test_a_worker_with_older_weights_gets_only_what_fits_its_version() -> None:
    loads = [load("old", speed=9.0, most=2), load("new", speed=1.0, most=5)]
    assert Counter(by_finish(loads, num_promised=0)) == {"old": 2, "new": 3}


def test_what_a_worker_will_do_with_its_next_version_is_left_to_it() -> None:
    def pair(ready_at: float) -> list[Load]:
        first, second = load("first", speed=1.0, most=8), load("second", speed=1.0, most=4)
        second.most_soon, second.free_at = 8, [ready_at] * 2
        return [first, second]

    assert by_finish(pair(0.1), num_promised=4) == ["first", "first"]
    assert by_finish(pair(9.0), num_promised=4) == ["first"] * 4


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


def test_a_slow_worker_that_may_have_become_faster_is_tried_with_one_group() -> None:
    fast, slow = load("fast", speed=1.0, places=16), load("slow", speed=0.1, places=16)
    slow.hoped_s = 0.9
    assert granted([fast, slow], 16) == {"fast": 15, "slow": 1}


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


# --- on the real sessions, with virtual time ------------------------------------------------------

FAST, BOTH = {"fast": 100.0}, {"fast": 100.0, "slow": 10.0}


def equal_shares(loads: Sequence[Load], *, num_promised: int) -> list[str]:
    """Give each group to the worker with the smallest share of its places in use: what to beat."""
    given_to: list[str] = []
    while True:
        able = [w for w in loads if w.has_space and w.most_promised > num_promised + len(given_to)]
        if not able:
            return given_to
        chosen = min(able, key=lambda each: (each.share, each.node_id))
        chosen.add()
        given_to.append(chosen.node_id)


def mean_step(
    speeds: dict[str, float],
    *,
    by_speed: bool = True,
    max_staleness: int,
    seed: int,
    places: int = 4,
    alone: float = 1.0,
    apart_s: float = 0.0,
) -> float:
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        if not by_speed:
            patch.setattr("echo.leases.scheduler.by_finish", equal_shares)
        run = Unequal(
            Path(directory),
            tail=1.0,
            seed=seed,
            max_staleness=max_staleness,
            groups_per_step=16,
            train_s=0.5,
            lease_timeout_s=60.0,
            alone=alone,
            apart_s=apart_s,
        )
        run.start(speeds, places=places, hedge_factor=2.0 if by_speed else None)
        run.play(20, within_s=2000.0)
        figures = run.figures()
    assert figures["steps"] == 15
    return figures["step_mean_s"]


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [0, pytest.param(2, marks=pytest.mark.matrix)])
def test_a_worker_ten_times_slower_delays_no_batch(max_staleness: int) -> None:
    alone = mean_step(FAST, max_staleness=max_staleness, seed=3)
    both = mean_step(BOTH, max_staleness=max_staleness, seed=3)
    assert both <= 1.08 * alone, "the slow worker makes it worse than none"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.matrix)])
@pytest.mark.parametrize(
    ("places", "alone", "at_most"),
    [
        # Engines with places for a whole batch, slower the more is in them: a full one by 4 or 2.
        (16, 4.0, 0.95),
        pytest.param(16, 2.0, 0.98, marks=pytest.mark.matrix),
        # One that is not: using the others costs no more than the instants until they are ready.
        pytest.param(16, 1.0, 1.02, marks=pytest.mark.matrix),
        # Engines that a batch fills all.
        pytest.param(4, 2.0, 1.01, marks=pytest.mark.matrix),
    ],
)
def test_equal_workers_share_a_batch_though_they_install_it_one_after_the_other(
    places: int, alone: float, at_most: float, seed: int
) -> None:
    def seconds(*, by_speed: bool) -> float:
        return mean_step(
            {f"w{number}": 100.0 for number in range(4)},
            by_speed=by_speed,
            max_staleness=0,
            seed=seed,
            places=places,
            alone=alone,
            apart_s=0.1,
        )

    assert seconds(by_speed=True) <= at_most * seconds(by_speed=False)


@pytest.mark.slow
@pytest.mark.parametrize("speed", [10.0, pytest.param(50.0, marks=pytest.mark.matrix)])
def test_a_slower_worker_delays_no_batch_that_the_other_has_room_for(speed: float) -> None:
    def seconds(speeds: dict[str, float]) -> float:
        return mean_step(speeds, max_staleness=0, seed=3, places=16, alone=2.0, apart_s=0.1)

    assert seconds({"fast": 100.0, "slow": speed}) <= 1.05 * seconds({"fast": 100.0})


@pytest.mark.matrix
def test_with_equal_shares_it_does() -> None:
    alone = mean_step(FAST, by_speed=False, max_staleness=0, seed=3)
    both = mean_step(BOTH, by_speed=False, max_staleness=0, seed=3)
    assert both > 2 * alone, "there is nothing to improve on: the test above shows nothing"
