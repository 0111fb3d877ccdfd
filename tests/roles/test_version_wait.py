"""Leases that name the oldest version to sample them under: honoured, or given back."""

from __future__ import annotations

import msgspec
import pytest

from echo.core.rollout import PolicyVersion
from echo.leases.book import most_promised, oldest_step
from echo.roles.worker import VersionWait, Worker
from echo.wire.messages import Lease
from tests.roles.harness import Process, Run, make_lease

NEWER = PolicyVersion(1, 7)


def asking(group_id: int, version: PolicyVersion | None = NEWER) -> Lease:
    return msgspec.structs.replace(make_lease(group_id, 0), min_version=version)


def test_a_lease_waits_for_so_long_and_no_longer() -> None:
    wait = VersionWait(max_s=5.0)
    first, second = asking(1), asking(2)
    assert wait.late([first], now=10.0) == []
    assert wait.late([first, second], now=14.9) == []
    assert wait.late([first, second], now=15.0) == [first]
    assert wait.late([second], now=16.0) == []
    # One whose version came, and that waits again later, waits anew.
    assert wait.late([], now=17.0) == []
    assert wait.late([second], now=30.0) == []


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


@pytest.fixture
def worker(hung_run: Run) -> Process:
    """A worker on v0 that was granted three groups and has begun none of them."""
    return hung_run.world.process("w1")


def taken(session: Worker, installed: PolicyVersion | None) -> list[int]:
    """Return the groups that an engine with this version samples."""
    groups = session.partials.take(9, group_size=2, installed=installed)
    return [group.lease.group_id for group in groups]


def test_leases_say_which_version_they_were_granted_for(worker: Process) -> None:
    queue = worker.session.partials.queue
    assert {lease.min_version for lease in queue.values()} == {PolicyVersion(1, 0)}


def test_older_weights_sample_nothing_of_it_and_newer_ones_do(worker: Process) -> None:
    session = worker.session
    session.partials.queue = {
        (n, 0): asking(n, version) for n, version in enumerate([NEWER, None, PolicyVersion(1, 0)])
    }
    assert taken(session, PolicyVersion(1, 0)) == [1, 2]
    assert taken(session, PolicyVersion(1, 8)) == [0]
    # One that was begun waits, too.
    session.partials.park(session.partials.running[0, 0])
    assert taken(session, PolicyVersion(1, 6)) == []


def test_what_has_waited_in_vain_goes_to_another_worker(worker: Process) -> None:
    run, session = worker.on_action.__self__.run, worker.session
    learner = run.world.process("learner").session
    session.partials.queue = {key: asking(key[0]) for key in session.partials.queue}
    session.version_wait.max_s = 2.0
    session.max_groups = 0  # so that it is not the one that gets them again
    run.world.run(4.0)
    assert len(session.partials.queue) == 3
    run.world.run(7.0)
    assert not session.partials.queue
    assert not len(session.outbox)
    assert session.counters["engine/version_refused"] == 3
    assert learner.counters["leases_given_back"] == 3
    assert len(learner.leases._returned) == 3
    assert any("v7 or newer is wanted, v0 is installed" in note for note in worker.notes)
    run.start_worker("w2")
    run.world.run(12.0)
    assert learner.counters["accepted"] >= 3
    assert not any(name.startswith("discarded/") for name in learner.counters.as_dict())
    assert all(group_id in learner._scheduler.finished for group_id in range(3))


OLD, HERE, NEXT = (PolicyVersion(1, step) for step in (0, 1, 2))


def wanting(group_id: int, version: PolicyVersion) -> Lease:
    return msgspec.structs.replace(make_lease(group_id, 0), exact_version=version)


def test_an_exact_version_is_sampled_by_that_one_alone(worker: Process) -> None:
    session = worker.session
    session.partials.queue = {(n, 0): wanting(n, v) for n, v in enumerate([OLD, HERE, NEXT])}
    assert taken(session, HERE) == [1]
    assert [lease.group_id for lease in session.partials.awaiting(HERE)] == [2]
    assert [lease.group_id for lease in session.partials.superseded(HERE)] == [0]
    assert session.partials.superseded(None) == []
    assert taken(session, None) == []


def test_a_new_version_gives_back_at_once_what_wants_the_one_before(worker: Process) -> None:
    run, session = worker.on_action.__self__.run, worker.session
    learner = run.world.process("learner").session
    session.partials.queue = {(n, 0): wanting(n, HERE) for n in range(3)}
    session.installed_version = HERE
    [hung] = session._calls
    [sample] = session.returned(hung, num_tokens=0, now=run.world.now)
    [begun] = sample.call.groups
    [interrupted] = session.partials.take(1, group_size=2, installed=HERE)
    session.partials.park(interrupted)
    run.world.perform(worker, session.installed(NEXT, now=run.world.now))
    # What is in the engine is its affair, which keeps the new version out meanwhile.
    assert list(session.partials.running) == [begun.key]
    assert not session.partials.queue
    assert not session.partials.interrupted
    assert session.counters["engine/version_refused"] == 2
    assert any("exactly v1 is wanted, v2 is installed" in note for note in worker.notes)
    run.world.run(run.world.now + 2.0)
    assert not len(session.outbox)
    assert learner.counters["leases_given_back"] == 2
    assert not any(name.startswith("discarded/") for name in learner.counters.as_dict())
    # Where the engine was faster than the word of it, that is found out when it refuses.
    given_back = session.refused(sample.call, "v2 is installed", now=run.world.now)
    run.world.perform(worker, given_back)
    assert begun.key not in session.partials
    run.world.run(run.world.now + 2.0)
    assert learner.counters["leases_given_back"] == 3
    # It happens with each version, so that the operator of the learner is not told.
    assert not any("gives group" in note for note in run.world.process("learner").notes)
