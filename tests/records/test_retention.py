"""The choice of what to remove takes no more than is necessary, and nothing that is needed."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from echo.records.retention import Holdings, StoredCheckpoint, plan_removals


def checkpoint(
    step: int, *, must_stay: bool = False, keeps_groups: bool = True
) -> StoredCheckpoint:
    return StoredCheckpoint(
        step=step, path=f"checkpoints/{step}", must_stay=must_stay, keeps_groups=keeps_groups
    )


RUN = Holdings(
    sizes={
        "ledger": 5, "groups/1": 10, "groups/2": 10, "groups/3": 10, "groups/4": 10,
        "versions/1": 7, "versions/2": 7,
        "checkpoints/5": 100, "checkpoints/10": 100, "checkpoints/20": 100, "checkpoints/30": 100,
    },
    group_files={"groups/1": 0, "groups/2": 15, "groups/3": 25, "groups/4": math.inf},
    versions=["versions/1"],
    checkpoints=[
        checkpoint(5, must_stay=True, keeps_groups=False),  # the best
        checkpoint(10),
        checkpoint(20),
        checkpoint(30, must_stay=True),
    ],
)  # fmt: skip
ORDER = [
    "groups/1", "versions/1", "checkpoints/10", "groups/2", "checkpoints/20", "groups/3",
]  # fmt: skip


def test_nothing_goes_within_the_limit_and_then_no_more_than_is_needed() -> None:
    total = RUN.num_bytes
    assert plan_removals(RUN, max_bytes=total) == []
    assert plan_removals(RUN, max_bytes=total - 1) == ORDER[:1]
    assert plan_removals(RUN, max_bytes=total - 11) == ORDER[:2]
    assert plan_removals(RUN, max_bytes=total - 18) == ORDER[:3]
    assert plan_removals(RUN, max_bytes=total - 118) == ORDER[:4]


def test_the_newest_and_the_best_checkpoint_and_unended_groups_stay_whatever_the_limit() -> None:
    assert plan_removals(RUN, max_bytes=0) == ORDER


def test_the_best_checkpoint_holds_no_groups_once_a_newer_one_has_gone() -> None:
    held = Holdings(
        sizes={"groups/1": 1, "groups/2": 1, "checkpoints/10": 1},
        group_files={"groups/1": 10, "groups/2": 15},
        versions=[],
        checkpoints=[checkpoint(5, must_stay=True), checkpoint(10), checkpoint(20, must_stay=True)],
    )
    assert plan_removals(held, max_bytes=0) == ["checkpoints/10", "groups/1", "groups/2"]


def test_without_a_checkpoint_all_that_was_trained_stays() -> None:
    held = Holdings(
        sizes={"groups/1": 1, "groups/2": 1},
        group_files={"groups/1": 0, "groups/2": 1},
        versions=[],
        checkpoints=[],
    )
    assert plan_removals(held, max_bytes=0) == ["groups/1"]


@st.composite
def holdings(draw: st.DrawFn) -> Holdings:
    steps = draw(st.lists(st.integers(1, 9), unique=True, max_size=5).map(sorted))
    num_last = draw(st.integers(1, 3))
    checkpoints = [
        StoredCheckpoint(
            step=step,
            path=f"checkpoints/{step}",
            must_stay=step == steps[-1] or draw(st.booleans()),
            keeps_groups=step in steps[-num_last:],
        )
        for step in steps
    ]
    ends = draw(st.lists(st.sampled_from([0.0, *map(float, range(1, 10)), math.inf]), max_size=6))
    groups = {f"groups/{number}": end for number, end in enumerate(ends)}
    versions = [f"versions/{number}" for number in range(draw(st.integers(0, 2)))]
    paths = ["ledger", *groups, *versions, *(each.path for each in checkpoints)]
    sizes = {path: draw(st.integers(0, 9)) for path in paths}
    return Holdings(sizes=sizes, group_files=groups, versions=versions, checkpoints=checkpoints)


@given(holdings(), st.integers(0, 100))
def test_what_is_left_can_be_resumed_from_and_is_within_the_limit_if_that_is_possible(
    held: Holdings, max_bytes: int
) -> None:
    chosen = plan_removals(held, max_bytes=max_bytes)
    assert len(set(chosen)) == len(chosen)
    assert not any(each.must_stay and each.path in chosen for each in held.checkpoints)
    last_removed = max((each.step for each in held.checkpoints if each.path in chosen), default=0)
    left = [
        each.step for each in held.checkpoints if each.keeps_groups and each.step > last_removed
    ]
    for path, end in held.group_files.items():
        is_needed = end == math.inf or any(step < end for step in left) or (not left and end > 0)
        assert not (is_needed and path in chosen)
    freed = sum(held.sizes[path] for path in chosen)
    assert set(chosen) == set(plan_removals(held, max_bytes=0)) or (
        held.num_bytes - freed <= max_bytes
    )
    if chosen:  # the last one was necessary
        assert held.num_bytes - freed + held.sizes[chosen[-1]] > max_bytes
