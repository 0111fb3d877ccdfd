from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from echo.buffer import StalenessBuffer
from echo.metrics import Counters
from echo.protocol.actions import RecordGrant
from echo.protocol.granting import Granting, SettledGroups
from echo.protocol.leases import LeaseBook
from echo.protocol.membership import Member
from echo.protocol.messages import Heartbeat, LeaseState, NodeStats
from echo.rollout import Lineage, PolicyVersion
from tests.protocol.harness import make_group, make_lease

LINEAGES = (Lineage(1, 0), Lineage(2, 3))


def make_granting(**changes: Any) -> Granting:
    settings: dict[str, Any] = {
        "leases": LeaseBook(timeout_s=10.0),
        "buffer": StalenessBuffer(max_staleness=1, lineages=LINEAGES),
        "make_lease": make_lease,
        "lineages": LINEAGES,
        "max_staleness": 1,
        "groups_per_step": 4,
        "step": 3,
        "next_group_id": 12,
        "settled": range(12),
        "counters": Counters(),
    }
    return Granting(**(settings | changes))


def make_worker(name: str, installed: tuple[int, int] | None, capacity: int = 8) -> Member:
    version = None if installed is None else PolicyVersion(*installed)
    return Member(name, "worker", "i", None, 0.0, True, version, capacity)


def listing(*leases: tuple[int, int, int]) -> Heartbeat:
    return Heartbeat(
        installed=None,
        capacity=0,
        leases=tuple(LeaseState(group_id=g, attempt=a, num_tokens=n) for g, a, n in leases),
        stats=NodeStats(),
    )


def granted(granting: Granting, *workers: Member, now: float = 0.0) -> dict[str, list[int]]:
    records, leases = granting.grant(workers, now=now)
    grants = [r for r in records if isinstance(r, RecordGrant)]
    assert sorted((r.worker_id, r.lease.group_id) for r in grants) == sorted(
        (name, lease.group_id) for name, given in leases.items() for lease in given
    )
    return {name: [lease.group_id for lease in given] for name, given in leases.items()}


def test_admission_is_by_the_version_that_the_worker_holds() -> None:
    # (S + w + 1) * B = 20 for w = 3; 12 are consumed, so 8 fit.
    granting = make_granting()
    assert granted(granting, make_worker("w1", (2, 3), 100)) == {"w1": list(range(12, 20))}
    # A worker one step behind may still add to the batch that is next, and it is full.
    assert granted(granting, make_worker("w2", (1, 2))) == {}


def test_the_worker_with_the_smaller_share_of_its_capacity_in_use_comes_first() -> None:
    workers = make_worker("w1", (2, 3), 2), make_worker("w2", (2, 3), 4)
    given = granted(make_granting(), *workers)
    assert {name: len(groups) for name, groups in given.items()} == {"w1": 2, "w2": 4}
    given = granted(make_granting(groups_per_step=2, step=2, next_group_id=4), *workers)
    assert {name: len(groups) for name, groups in given.items()} == {"w1": 2, "w2": 4}


def test_who_has_no_weights_or_abandoned_ones_gets_nothing() -> None:
    workers = make_worker("w1", None), make_worker("w2", (1, 4)), make_worker("w3", (2, 3), 0)
    assert granted(make_granting(), *workers) == {}


def test_groups_in_the_buffer_take_up_room() -> None:
    granting = make_granting()
    for group_id in range(6):
        granting.buffer.put(make_group(group_id, PolicyVersion(2, 3)))  # type: ignore[attr-defined]
    assert len(granted(granting, make_worker("w1", (2, 3)))["w1"]) == 2


def test_returned_groups_are_granted_before_new_ones_and_settled_ones_never() -> None:
    granting = make_granting()
    for group_id in (12, 13, 14):
        granting.leases.return_group(group_id)
    granting.next_group_id = 15
    granting.settled.add(13)
    assert granted(granting, make_worker("w1", (2, 3), 3)) == {"w1": [12, 14, 15]}


def test_what_the_worker_lacks_is_sent_again_and_what_the_book_lacks_is_entered() -> None:
    granting, worker = make_granting(), make_worker("w1", (2, 3), 2)
    assert granted(granting, worker) == {"w1": [12, 13]}
    granting.next_group_id = 30

    def reconcile(now: float, *leases: tuple[int, int, int]) -> tuple[list[int], Any]:
        lost, unwanted = granting.reconcile(
            worker, listing(*leases), has_progress=False, resend_after_s=2.0, now=now
        )
        return [lease.group_id for lease in lost], unwanted

    assert reconcile(1.0, (12, 0, 0)) == ([], [])  # 13 may still be on its way
    assert reconcile(2.5, (12, 0, 0)) == ([13], [])
    assert reconcile(3.0, (12, 0, 0), (13, 0, 0)) == ([], [])
    assert reconcile(4.0, (12, 0, 0)) == ([13], [])  # it had it, and lost it
    assert reconcile(4.1, (12, 0, 0), (13, 0, 0), (25, 3, 9)) == ([], [])
    assert granting.leases.workers_of(25) == ["w1"]
    assert reconcile(4.2, (12, 0, 0), (13, 0, 0), (25, 3, 9), (4, 0, 0)) == ([], [(4, 0)])
    assert (worker.num_strays, worker.is_stuck) == (1, False)  # 25 made progress
    assert reconcile(4.3, (12, 0, 0), (13, 0, 0), (25, 3, 9), (4, 0, 0)) == ([], [(4, 0)])
    assert (worker.num_strays, worker.is_stuck) == (1, True)


def test_an_expired_lease_is_not_entered_again_and_binds_its_worker_until_it_is_gone() -> None:
    granting, worker = make_granting(), make_worker("w1", (2, 3), 2)
    granted(granting, worker)
    assert len(granting.leases.expire(now=10.0)) == 2
    beat = listing((12, 0, 0), (13, 0, -1))
    granting.reconcile(worker, beat, has_progress=False, resend_after_s=2.0, now=10.1)
    assert granting.leases.num_returned == 2
    # 13 lies finished in its outbox; 12 still occupies its engine.
    assert (worker.num_strays, worker.is_stuck) == (1, True)
    assert granted(granting, worker) == {}
    granting.reconcile(worker, beat, has_progress=True, resend_after_s=2.0, now=10.2)
    assert granted(granting, worker) == {"w1": [12]}


def test_progress_on_one_group_renews_those_that_wait_behind_it() -> None:
    granting, worker = make_granting(), make_worker("w1", (2, 3), 2)
    granted(granting, worker)

    def beat(now: float, num_tokens: int) -> None:
        granting.reconcile(
            worker,
            listing((12, 0, num_tokens), (13, 0, 0)),
            has_progress=False,
            resend_after_s=2.0,
            now=now,
        )

    beat(8.0, 5)
    assert granting.leases.expire(now=12.0) == []
    beat(16.0, 5)
    assert len(granting.leases.expire(now=18.0)) == 2


@given(st.lists(st.integers(0, 40)), st.lists(st.integers(0, 40)))
def test_settled_groups_are_a_set(first: list[int], second: list[int]) -> None:
    settled, expected = SettledGroups(first), set(first)
    for group_id in second:
        settled.add(group_id)
        expected.add(group_id)
    assert {group_id for group_id in range(-3, 50) if group_id in settled} == expected
    assert len(settled._others) <= len(expected)


def test_settled_groups_take_no_memory_once_they_are_contiguous() -> None:
    settled = SettledGroups([3, 1, 0])
    assert settled._others == {3}
    settled.add(2)
    assert settled._others == set()
    assert 3 in settled
    assert 4 not in settled
