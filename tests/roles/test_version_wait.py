"""Leases that name the oldest version to sample them under: honoured, or given back."""

from __future__ import annotations

import msgspec
import pytest

from echo.core.rollout import PolicyVersion
from echo.leases.grants.admission import most_promised, oldest_step
from echo.leases.worker.held import Closed, GroupState, Stopped
from echo.roles.worker.worker import MAX_VERSION_WAIT_S, Worker
from echo.wire.messages import Lease
from tests.promises.conftest import MakeWorld
from tests.roles.harness import make_lease
from tests.roles.test_worker import Paper

OLD, NEWER = PolicyVersion(1, 0), PolicyVersion(1, 7)


def asking(group_id: int, version: PolicyVersion | None = NEWER) -> Lease:
    return make_lease(group_id, min_version=version)


def test_a_lease_waits_for_so_long_and_no_longer() -> None:
    paper = Paper(version=OLD)
    role, first, second = paper.role, asking(1), asking(2)
    late_at = 10.0 + MAX_VERSION_WAIT_S

    def given_back(now: float, *leases: Lease) -> list[int]:
        for group in role.held.of(*GroupState):
            role.held.handle(group, Closed())
        for lease in leases:
            role.held.add(lease)
        paper.do(role.expire(now=now))
        return paper.delivered()

    assert given_back(10.0, first) == []
    assert given_back(late_at - 0.1, first, second) == []
    assert given_back(late_at, first, second) == [1]
    assert given_back(late_at + 1.0, second) == []
    # One whose version came, and that waits again later, waits anew.
    assert given_back(late_at + 2.0) == []
    assert given_back(2 * late_at, second) == []


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
@pytest.mark.parametrize("num_promised", [0, 1, 3, 4, 11, 12, 40])
def test_the_oldest_step_is_the_first_that_admission_lets_through(
    max_staleness: int, num_promised: int
) -> None:
    step = oldest_step(max_staleness=max_staleness, groups_per_step=4, num_promised=num_promised)

    def is_let_through(installed_step: int) -> bool:
        limit = most_promised(
            max_staleness=max_staleness, installed_step=installed_step, groups_per_step=4
        )
        return limit > num_promised

    assert is_let_through(step)
    assert step == 0 or not is_let_through(step - 1)


def role_with(*leases: Lease, version: PolicyVersion) -> Paper:
    """Return a worker with a version whose engine has begun none of its leases."""
    paper = Paper(version=version)
    for lease in leases:
        paper.role.held.add(lease)
    return paper


def taken(role: Worker, installed: PolicyVersion | None) -> list[int]:
    """Return the groups that an engine with this version samples."""
    groups = role.held.take(9, group_size=2, installed=installed)
    return [group.lease.group_id for group in groups]


def test_older_weights_sample_nothing_of_it_and_newer_ones_do() -> None:
    wanted = enumerate([NEWER, None, OLD])
    role = role_with(*(asking(n, version) for n, version in wanted), version=OLD).role
    assert taken(role, OLD) == [1, 2]
    assert taken(role, PolicyVersion(1, 8)) == [0]
    # One that was begun waits, too.
    [group] = [group for group in role.held.of(GroupState.RUNNING) if group.key == (0, 0)]
    role.held.handle(group, Stopped())
    assert taken(role, PolicyVersion(1, 6)) == []


@pytest.mark.slow
def test_what_has_waited_in_vain_goes_to_another_worker(make_world: MakeWorld) -> None:
    world = make_world(leases={"hedge_factor": False}, sync={"eager": True})
    world.learner()
    world.worker("w1")
    role = world.node("w1").role
    learner = world.node("learner").role
    world.run_until(lambda: role.held.of(GroupState.QUEUED))
    world.hang_engine("w1")
    queue = role.held.of(GroupState.QUEUED)
    newest = learner.broadcast.newest_complete
    assert all(group.lease.min_version is not None for group in queue), "as the learner says"
    assert all(group.lease.min_version <= newest for group in queue)
    waiting = {group.key[0] for group in queue}
    for group in queue:
        group.lease = msgspec.structs.replace(group.lease, min_version=PolicyVersion(1, 99))
    role.max_groups = 0  # so that it is not the one that gets them again
    world.run_until(lambda: not role.held.of(GroupState.QUEUED), within_s=2 * MAX_VERSION_WAIT_S)
    assert role.counters["engine/version_refused"] == len(waiting)
    world.run_until(lambda: not world.undelivered("w1"))
    assert learner.counters["leases_given_back"] == len(waiting)
    assert {*learner.leases.waiting} & waiting == waiting
    assert any("v99 or newer is wanted" in note for note in world.notes("w1"))
    world.worker("w2")
    world.run_until(lambda: waiting <= {*world.acknowledged()})
    assert not any(name.startswith("discarded/") for name in learner.counters.as_dict())
    world.audit()
