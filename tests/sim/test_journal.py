"""What survives the simulated learner: nothing is lost, doubled, or trained beyond the bound."""

from __future__ import annotations

import numpy as np

from echo.core.rollout import Group, Lineage, PolicyVersion
from echo.sim.journal import Journal
from echo.sim.worker import stand_in


def group(group_id: int, step: int, *, lineage: int = 1) -> Group:
    rollout = stand_in([PolicyVersion(lineage, step)]).rollout(0.0, stale_tokens="keep")
    return Group(
        group_id=group_id,
        attempt=0,
        worker_id="w",
        prompt_ids=np.zeros(1, np.int32),
        rollouts=(rollout, rollout),
    )


def test_a_crash_undoes_the_steps_after_the_checkpoint_and_keeps_their_groups() -> None:
    journal = Journal(max_staleness=4, checkpoint_steps=2)
    for group_id in range(6):
        journal.granted(group_id, 0)
    journal.granted(4, 1)  # a second attempt
    groups = [group(group_id, 0) for group_id in range(4)]
    for each in groups:
        journal.accepted(each)
    assert journal.trained(groups[:1], step=1) == []
    assert journal.trained(groups[1:2], step=2) == groups[:2]
    assert journal.trained(groups[2:3], step=3) == []
    start = journal.recover()
    assert start.lineages == (Lineage(1, 0), Lineage(2, 2))
    assert (start.step, start.next_group_id) == (2, 6)
    # Two were trained for good, two wait: one of a step that is void, one that was never taken.
    assert start.finished == (0, 1, 2, 3)
    assert list(start.buffered) == groups[2:]
    assert start.open_attempts == {4: 2, 5: 1}
    assert start.ends == ()
    # And what waits can be trained, and lost, once more.
    assert journal.trained(groups[2:], step=4) == groups[2:]


def test_what_was_sampled_by_a_version_of_the_void_steps_ends() -> None:
    journal = Journal(max_staleness=4, checkpoint_steps=2)
    kept, void = group(0, 2), group(1, 3)
    for each in (kept, void):
        journal.granted(each.group_id, 0)
        journal.accepted(each)
    journal.trained([], step=2)
    journal.trained([], step=3)
    start = journal.recover()
    assert list(start.buffered) == [kept]
    assert start.ends == ((void, "abandoned_version"),)


def test_what_ended_stays_so() -> None:
    journal = Journal(max_staleness=1, checkpoint_steps=5)
    journal.granted(0, 0)
    journal.granted(1, 0)
    journal.accepted(group(1, 0))
    journal.ended(0)
    journal.ended(1)
    start = journal.recover()
    assert (start.finished, start.buffered, start.open_attempts) == ((0, 1), (), {})
    assert journal.recover().lineages == (Lineage(1, 0), Lineage(2, 0), Lineage(3, 0))
