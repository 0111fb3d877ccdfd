from __future__ import annotations

import random

import pytest

from echo.core.buffer import StalenessBuffer
from echo.core.rollout import Group, Lineage, staleness_of
from tests.core.groups import make_group, make_rollout

FIRST = (Lineage(1, 0),)


def sampled(group_id: int, *versions: tuple[int, int], is_masked: bool = False) -> Group:
    masked = range(len(versions)) if is_masked else ()
    return make_group(make_rollout(versions, masked), group_id=group_id)


def fill(buffer: StalenessBuffer, *groups: Group) -> StalenessBuffer:
    for group in groups:
        buffer.put(group)
    return buffer


def ids(groups: list[Group] | None) -> list[int]:
    assert groups is not None
    return [group.group_id for group in groups]


def test_the_bound_is_inclusive() -> None:
    buffer = StalenessBuffer(max_staleness=2, lineages=FIRST)
    fill(buffer, sampled(0, (1, 5)), sampled(1, (1, 4)))
    [evicted] = buffer.evict(step=7)
    assert (evicted.group.group_id, evicted.reason) == (1, "stale")
    assert ids(buffer.take(1, step=7)) == [0]


def test_a_batch_of_which_no_step_was_made_is_taken_again_without_its_bad_groups() -> None:
    buffer = StalenessBuffer(max_staleness=0, lineages=FIRST)
    fill(buffer, *(sampled(n, (1, 3)) for n in range(3)))
    taken = buffer.take(3, step=3)
    assert buffer.num_unspent(step=3) == 3
    assert taken is not None
    buffer.put_back(taken[1:], num_taken=3)
    assert buffer.num_unspent(step=3) == 2  # there is room for another
    assert buffer.take(3, step=3) is None
    fill(buffer, sampled(3, (1, 3)))
    assert ids(buffer.take(3, step=3)) == [1, 2, 3]


def test_a_continued_group_of_which_a_part_is_too_old_stays_without_it() -> None:
    buffer = StalenessBuffer(max_staleness=1, lineages=FIRST, trims_stale=True)
    fill(buffer, sampled(0, (1, 3), (1, 2), (1, 1)), sampled(1, (1, 1)))
    [evicted] = buffer.evict(step=3)
    assert (evicted.group.group_id, evicted.reason) == (1, "stale")
    assert (buffer.num_trimmed_tokens, buffer.num_too_old_tokens) == (1, 2)
    assert buffer.evict(step=3) == []
    [evicted] = buffer.evict(step=5)
    assert evicted.reason == "stale"
    fill(buffer, sampled(2, (1, 5), (1, 4), (1, 3)))
    assert buffer.evict(step=5) == []
    [group] = buffer.take(1, step=5) or []
    assert group.rollouts[0].completion_mask.tolist() == [True, True, False]
    assert group.is_trimmed
    assert group.oldest_version is not None
    assert group.oldest_version.step == 4


def test_the_oldest_come_first_and_then_the_smallest_id() -> None:
    buffer = StalenessBuffer(max_staleness=9, lineages=FIRST)
    fill(buffer, sampled(5, (1, 2)), sampled(1, (1, 4)), sampled(3, (1, 2)))
    assert buffer.take(4, step=4) is None
    assert len(buffer) == 3
    assert ids(buffer.take(2, step=4)) == [3, 5]
    assert ids(buffer.take(1, step=4)) == [1]
    assert len(buffer) == 0


def test_take_refuses_to_hand_out_what_was_not_evicted_and_changes_nothing() -> None:
    buffer = StalenessBuffer(max_staleness=1, lineages=FIRST)
    fill(buffer, sampled(0, (1, 1)), sampled(1, (1, 3)))
    with pytest.raises(ValueError, match="group 0 cannot be trained at step 3: stale"):
        buffer.take(2, step=3)
    assert 0 in buffer
    assert len(buffer) == 2


def test_a_group_enters_once() -> None:
    buffer = fill(StalenessBuffer(max_staleness=1, lineages=FIRST), sampled(4, (1, 0)))
    assert 4 in buffer
    assert 5 not in buffer
    with pytest.raises(ValueError, match="group 4 is in the buffer already"):
        buffer.put(sampled(4, (1, 0)))


def test_a_batch_in_training_is_unspent_until_its_step_is_done() -> None:
    buffer = StalenessBuffer(max_staleness=1, lineages=FIRST)
    fill(buffer, *(sampled(i, (1, 0)) for i in range(5)))
    assert buffer.num_unspent(step=0) == 5
    buffer.take(2, step=0)
    assert len(buffer) == 3
    assert buffer.num_unspent(step=0) == 5
    buffer.take(1, step=0)
    assert buffer.num_unspent(step=0) == 5
    assert buffer.num_unspent(step=1) == 2


def test_a_lower_bound_for_new_leases_leaves_what_is_here_valid() -> None:
    buffer = StalenessBuffer(max_staleness=2, lineages=FIRST)
    assert buffer.admission_staleness == 2
    fill(buffer, sampled(0, (1, 1)))
    buffer.admission_staleness = 0
    assert buffer.evict(step=3) == []
    assert ids(buffer.take(1, step=3)) == [0]


@pytest.mark.parametrize("seed", range(20))
def test_whatever_comes_in_what_goes_out_is_within_the_bound(seed: int) -> None:
    chance = random.Random(seed)
    max_staleness = chance.randrange(4)
    buffer = StalenessBuffer(max_staleness=max_staleness, lineages=FIRST)
    put, gone = 0, 0
    for step in range(30):
        for _ in range(chance.randrange(6)):
            versions = [(1, max(0, step - chance.randrange(6))) for _ in range(3)]
            buffer.put(sampled(put, *versions))
            put += 1
        gone += len(buffer.evict(step=step))
        taken = buffer.take(2, step=step) or []
        gone += len(taken)
        assert all(0 <= staleness_of(group, step=step) <= max_staleness for group in taken)
    assert put == gone + len(buffer)
