"""The simulated disk outlives the learner: nothing is lost, doubled, or trained too old."""

from __future__ import annotations

from pathlib import Path

from echo.core.records import Discarded, Granted
from echo.core.rollout import Group, Lineage, PolicyVersion
from echo.runtime.learner.resume import SavedRun, StartingPoint
from echo.sim.lengths import Groups, LogNormalLengths
from echo.sim.summary import History
from echo.sim.timing import Disk, MemoryCheckpoints, MemoryLedger
from echo.wire.codec import encode_group
from tests.core.groups import make_group, make_rollout
from tests.sim.scenarios import make_scenario
from tests.sim.virtual import run_virtual


class Trainer:
    def save_state(self, directory: Path) -> None:
        pass


RUN = "r"
LENGTHS = LogNormalLengths(
    mean=50.0, spread=0.0, limit=50.0, group_size=2, useful_share=1.0, seed=0
)


def group_of(group_id: int, step: int) -> Group:
    return make_group(*[make_rollout([(1, step)])] * 2, group_id=group_id)


class Life:
    """One start of a learner, whose records are kept by hand."""

    def __init__(self, disk: Disk, *, max_staleness: int = 4) -> None:
        self.ledger = MemoryLedger(disk)
        self.checkpoints = MemoryCheckpoints(disk, make_scenario(), run_id=RUN, now=0.0)
        saved = SavedRun(self.ledger, self.checkpoints)
        if self.ledger.num_records:
            self.start = saved.recover(run_id=RUN, max_staleness=max_staleness)
        else:
            self.start = saved.begin()
        saved.enter(self.start)

    def granted(self, *group_ids: int, attempt: int = 0) -> None:
        for number in group_ids:
            self.ledger.append(
                Granted(group=number, attempt=attempt, worker="w", version=PolicyVersion(1, 0))
            )

    def accepted(self, *groups: Group) -> None:
        for group in groups:
            self.ledger.store(group, *encode_group(group))
        self.ledger.sync()

    def trained(self, *groups: Group, step: int) -> None:
        self.ledger.trained(groups, lineage=1, consumed_at=step - 1)

    def checkpoint(self, step: int) -> None:
        self.checkpoints.save(Trainer().save_state, lineage=1, step=step, now=0.0)
        self.ledger.checkpointed(lineage=1, step=step, oldest_step=step)


def make_disk(*, is_kept: bool = True) -> Disk:
    groups = Groups(LENGTHS, upload_bytes_per_token=1.0)
    return Disk(groups, History(), is_kept=is_kept)


def test_a_crash_undoes_the_steps_after_the_checkpoint_and_keeps_their_groups() -> None:
    async def main() -> tuple[Disk, StartingPoint]:
        disk = make_disk()
        life = Life(disk)
        groups = [group_of(number, 0) for number in range(4)]
        life.granted(*range(6))
        life.granted(4, attempt=1)
        life.accepted(*groups)
        life.trained(groups[0], step=1)
        life.trained(groups[1], step=2)
        life.checkpoint(2)
        life.trained(groups[2], step=3)
        life.ledger.append(Discarded(group=3, reason="never written", step=3))
        life.ledger.release()
        return disk, Life(disk).start

    disk, start = run_virtual(main())
    assert start.lineages == (Lineage(1, 0), Lineage(2, 2))
    assert (start.step, start.next_group_id) == (2, 6)
    # Two were trained for good, two wait: one of a step that is void, one that was never taken.
    assert start.finished == {0, 1, 2, 3}
    assert [group.group_id for group in start.buffered] == [2, 3]
    assert {group: len(who) for group, who in start.open_attempts.items()} == {4: 2, 5: 1}
    assert start.ends == {}
    assert sorted(disk.waiting()) == [2, 3]


def test_what_was_sampled_by_a_version_of_the_void_steps_ends() -> None:
    async def main() -> StartingPoint:
        disk = make_disk()
        life = Life(disk)
        first, second, third = (group_of(number, 0) for number in range(3))
        kept, void = group_of(3, 2), group_of(4, 3)
        life.granted(*range(5))
        life.accepted(first, second, third, kept, void)
        life.trained(first, step=1)
        life.trained(second, step=2)
        life.checkpoint(2)
        life.trained(third, step=3)
        return Life(disk).start

    start = run_virtual(main())
    assert [group.group_id for group in start.buffered] == [2, 3]
    assert start.ends == {4: "abandoned_version"}


def test_where_nobody_comes_back_nothing_is_kept() -> None:
    async def main() -> Disk:
        disk = make_disk(is_kept=False)
        life = Life(disk)
        groups = [group_of(number, 0) for number in range(2)]
        life.granted(0, 1)
        life.accepted(*groups)
        life.trained(groups[0], step=1)
        return disk

    disk = run_virtual(main())
    assert (disk.records, disk.waiting()) == ([], [1])
