"""A run's directory stays within its limit, and what is left can be resumed from: real files."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo.core.records import Discarded, Granted
from echo.core.rollout import PolicyVersion
from echo.records import ledger as ledger_module
from echo.records.ledger import Ledger, Published, Removed, read_records, stored_groups
from echo.runtime.learner.saving import disk_limit as disk_limit_module
from echo.runtime.learner.saving.checkpoint import Checkpoints, list_checkpoints
from echo.runtime.learner.saving.disk_limit import DiskLimit, measure
from echo.runtime.learner.saving.resume import SavedRun, StartingPoint
from echo.wire.codec import encode_group
from tests.core import groups
from tests.core.groups import make_rollout
from tests.e2e.audit import audit, read_ledger
from tests.runtime.harness import Play, running
from tests.runtime.harness import Run as RealRun

LOG = logging.getLogger("limit")
STATE_BYTES = 200_000
"""Bytes of a checkpoint, beside which all else is small."""


class Run:
    """A learner's files, without a learner: each group has a file of its own."""

    def __init__(self, directory: Path, *, max_bytes: int | None, keep_last: int = 3) -> None:
        self.directory, self.max_bytes, self.keep_last = directory, max_bytes, keep_last
        self.num_groups = self.lineage = self.peak_bytes = 0
        self.waiting: list[int] = []
        self.open(lambda saved: saved.begin())

    def open(self, start: Callable[[SavedRun], StartingPoint]) -> StartingPoint:
        self.ledger = Ledger(self.directory, spool_bytes=1 << 24)
        self.checkpoints = Checkpoints(
            self.directory / "checkpoints",
            run_id="toy",
            interval_steps=1,
            interval_s=None,
            keep_last=self.keep_last,
            min_free_bytes=0,
            now=0.0,
        )
        self.limit_to(self.max_bytes)
        saved = SavedRun(self.ledger, self.checkpoints)
        begun = start(saved)
        saved.enter(begun)
        self.step, self.lineage = begun.step, begun.lineage
        self.waiting = [group.group_id for group in begun.buffered]
        self.ledger.append(Published(version=PolicyVersion(self.lineage, self.step)))
        self.ledger.commit()
        return begun

    def limit_to(self, max_bytes: int | None) -> None:
        """Give the run another limit, as a resume with other settings does."""
        self.max_bytes = max_bytes
        self.limit = DiskLimit(self.ledger, self.checkpoints, max_bytes=max_bytes, log=LOG)

    def resume(self) -> StartingPoint:
        self.ledger.release()
        return self.open(lambda saved: saved.recover(run_id="toy", max_staleness=99))

    def store(self, number: int = 1) -> None:
        for _ in range(number):
            version = PolicyVersion(1, 0)
            rollout = make_rollout([(1, 0)] * 100)
            group = groups.make_group(rollout, group_id=self.num_groups)
            self.ledger.append(
                Granted(
                    group=group.group_id,
                    attempt=group.attempt,
                    worker=group.worker_id,
                    version=version,
                )
            )
            self.ledger.store(group, *encode_group(group))
            self.waiting.append(self.num_groups)
            self.num_groups += 1
        self.ledger.sync()

    def train(self) -> None:
        if self.waiting:
            group = groups.make_group(make_rollout([(1, 0)] * 100), group_id=self.waiting.pop(0))
            self.ledger.trained([group], lineage=self.lineage, consumed_at=self.step)
            self.step += 1

    def discard(self) -> None:
        if self.waiting:
            ended = self.waiting.pop()
            self.ledger.append(Discarded(group=ended, reason="stale", step=self.step))

    def save(self, *, num_bytes: int = STATE_BYTES) -> None:
        """Do what StateSaver does in its threads."""
        if self.step in list_checkpoints(self.directory / "checkpoints"):
            return

        def save_state(directory: Path) -> None:
            (directory / "state").write_bytes(bytes(num_bytes))
            self.peak_bytes = max(self.peak_bytes, self.num_bytes)

        self.ledger.sync()
        self.limit.make_space(step=self.step)
        oldest_step = self.checkpoints.save(
            save_state, lineage=self.lineage, step=self.step, now=0.0
        )
        self.ledger.checkpointed(lineage=self.lineage, step=self.step, oldest_step=oldest_step)
        self.limit.enforce(step=self.step)

    def make_steps(self, number: int) -> None:
        for _ in range(number):
            self.store()
            self.train()
            self.save()

    @property
    def num_bytes(self) -> int:
        return sum(measure(self.directory).values())

    @property
    def steps(self) -> list[int]:
        return list(list_checkpoints(self.directory / "checkpoints"))

    @property
    def group_files(self) -> list[str]:
        return sorted(path.name for path in (self.directory / "groups").iterdir())

    @property
    def removals(self) -> list[Removed]:
        return [each for each in read_records(self.directory) if isinstance(each, Removed)]

    def check(self) -> None:
        """Check the ledger by what is independent of it, and that it tells the files that went."""
        found = audit(
            read_ledger(self.directory), max_staleness=99, groups_per_step=1, is_finished=False
        )
        assert found.problems == []
        for stored in stored_groups(read_records(self.directory)):
            is_there = (self.directory / "groups" / stored.accepted.place.file).exists()
            assert is_there == (stored.removed is None)


@pytest.fixture(autouse=True)
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "GROUP_FILE_BYTES", 1)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """A run with three checkpoints, of which two are within the limit with all else."""
    run = Run(tmp_path, max_bytes=3 * STATE_BYTES)
    yield run
    run.ledger.release()


def test_the_oldest_goes_first_with_a_record_and_the_newest_and_the_best_stay(run: Run) -> None:
    run.limit_to(None)
    run.make_steps(4)
    assert run.removals == []
    assert (run.steps, run.group_files[0]) == ([2, 3, 4], "000001.bin")
    run.checkpoints.score(2, 0.5)
    run.limit_to(5 * STATE_BYTES // 2)
    run.make_steps(1)
    assert run.steps == [2, 5], "3 and 4 made space; 2 is the best"
    assert run.num_bytes <= 5 * STATE_BYTES // 2
    first, second = run.removals
    assert first.cause == "limits.run_dir_bytes = 488 KiB"
    assert first.paths[:2] == ("groups/000001.bin", "groups/000002.bin")
    assert [p for r in (first, second) for p in r.paths if "step" in p] == [
        "checkpoints/step_000003", "checkpoints/step_000004",
    ]  # fmt: skip
    run.check()


def test_space_is_made_before_a_checkpoint_is_written(run: Run) -> None:
    run.make_steps(6)
    assert 2 * STATE_BYTES < run.peak_bytes <= 3 * STATE_BYTES


def test_the_best_does_not_make_groups_wait_for_ever(run: Run) -> None:
    run.make_steps(1)
    run.checkpoints.score(1, 0.5)
    run.make_steps(5)
    assert run.steps == [1, 6]
    assert len(run.group_files) < 4
    run.resume()
    run.make_steps(2)
    assert run.steps == [1, 8]
    assert len(run.group_files) < 4
    run.check()


@pytest.mark.slow
def test_checkpoints_on_another_disk_do_not_count(tmp_path: Path) -> None:
    run_dir, other_disk = tmp_path / "run", tmp_path / "other"
    for directory in (run_dir / "groups", other_disk / "step_00000001"):
        directory.mkdir(parents=True)
        (directory / "file").write_bytes(bytes(1000))
    (run_dir / "checkpoints").symlink_to(other_disk)
    assert measure(run_dir) == {"groups/file": 1000}


@pytest.mark.parametrize(
    "number",
    [0, pytest.param(1, marks=pytest.mark.matrix), pytest.param(2, marks=pytest.mark.matrix)],
)
def test_a_resume_from_each_checkpoint_that_is_left_loses_no_group(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "KEPT_BYTES", 0)  # what no resume needs goes at once
    run = Run(tmp_path / "run", max_bytes=4 * STATE_BYTES)
    run.store(3)  # unended for long
    run.make_steps(7)
    run.resume()
    assert len(run.steps) == 3
    step = run.steps[number]
    (tmp_path / "run" / "checkpoints" / "latest").write_text(f"step_{step:06d}\n")
    start = run.resume()
    assert (start.step, start.losses) == (step, [])
    assert len(run.waiting) == run.num_groups - step, "all groups that were not trained by then"
    run.check()
    run.ledger.release()


def test_the_number_of_a_removed_file_is_not_given_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "KEPT_BYTES", 0)
    run = Run(tmp_path, max_bytes=3 * STATE_BYTES, keep_last=1)  # no older one needs groups
    run.make_steps(2)
    assert run.group_files == []
    run.resume()
    run.store()
    assert run.group_files == ["000003.bin"]
    run.check()
    run.ledger.release()


def test_a_crash_between_the_record_and_the_deletion_is_made_up_for_by_the_resume(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.limit_to(None)
    run.make_steps(4)
    run.store(1)

    def die(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "_delete", die)
        run.limit_to(2 * STATE_BYTES)
        with pytest.raises(KeyboardInterrupt):
            run.limit.enforce(step=4)
    assert len(run.removals) == 1
    assert (run.steps, len(run.group_files)) == ([2, 3, 4], 5)
    assert run.resume().losses == []
    assert (run.steps, run.group_files) == ([4], ["000004.bin", "000005.bin"])
    run.check()


def test_a_checkpoint_that_the_run_starts_from_is_not_deleted_even_if_it_was_to_go(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.limit_to(None)
    run.make_steps(3)
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "_delete", lambda *_: None)
        patch.setattr(disk_limit_module, "delete_entry", lambda *_: None)
        run.limit_to(STATE_BYTES)
        run.limit.enforce(step=3)
    (run.directory / "checkpoints" / "step_000003" / "state").write_bytes(b"")
    start = run.resume()
    assert (start.step, start.losses) == (2, [])
    assert run.steps == [2]
    assert run.waiting == [2]


def test_a_checkpoint_of_the_same_name_in_a_later_lineage_is_not_what_was_removed(run: Run) -> None:
    run.make_steps(4)
    assert "checkpoints/step_000002" in run.removals[-1].paths
    (run.directory / "checkpoints" / "latest").write_text("step_000003\n")
    run.max_bytes = None
    shutil.rmtree(run.directory / "checkpoints")  # the user begins again from the initial weights
    run.resume()
    for _ in range(2):
        run.train()
    run.save()
    assert run.resume().step == 2


def test_what_must_stay_above_the_limit_is_named_once(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run.limit_to(STATE_BYTES)
    run.store(2)
    run.make_steps(3)
    assert (run.steps, run.waiting) == ([3], [3, 4])
    assert run.group_files == ["000004.bin", "000005.bin"]
    [warning] = [each for each in caplog.records if each.levelno == logging.WARNING]
    text = warning.getMessage()
    assert "above limits.run_dir_bytes = 195 KiB" in text
    assert "checkpoints 196 KiB, " in text
    assert text.endswith("raise limits.run_dir_bytes")
    run.store()
    run.train()
    run.save(num_bytes=STATE_BYTES // 2)
    run.make_steps(1)
    assert caplog.text.count("above limits") == 2, "again after it was within the limit"


def test_images_of_older_versions_go_before_a_checkpoint_and_the_newest_stays(run: Run) -> None:
    run.make_steps(2)
    folder = run.directory / "versions"
    folder.mkdir()
    for name in ("v1_9", "v1_10", "v2_3"):
        (folder / f"{name}.safetensors").write_bytes(bytes(STATE_BYTES))
    (folder / "v9_9.partial").write_bytes(b"being written")
    run.limit_to(9 * STATE_BYTES // 2)
    run.limit.enforce(step=2)
    left = sorted(path.name for path in folder.iterdir())
    assert left == ["v1_10.safetensors", "v2_3.safetensors", "v9_9.partial"]
    run.limit_to(1)
    run.limit.enforce(step=2)
    assert sorted(path.name for path in folder.iterdir()) == left[1:]
    assert run.steps == [2]


@pytest.mark.parametrize("path", ["checkpoints/..", "checkpoints/best", "../run", "versions/.."])
def test_nothing_is_deleted_but_checkpoints_and_versions(tmp_path: Path, path: str) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "versions").mkdir()
    (tmp_path / "run" / "checkpoints" / "best").write_text("step_000001 0.5\n")
    disk_limit_module.delete_entry(tmp_path / "run", path)
    assert (tmp_path / "run" / "checkpoints" / "best").exists()


CALLS = ["store", "store", "train", "train", "save", "save", "discard", "resume", "squeeze", "ease"]


@pytest.mark.matrix
@pytest.mark.slow
@given(st.lists(st.sampled_from(CALLS), max_size=40))
def test_whatever_happens_each_checkpoint_that_is_left_can_be_resumed_from(
    tmp_path_factory: pytest.TempPathFactory, calls: list[str]
) -> None:
    directory = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledger_module, "GROUP_FILE_BYTES", 1)
        run = Run(directory / "run", max_bytes=3 * STATE_BYTES)
        for call in calls:
            match call:
                case "squeeze":
                    run.limit_to(STATE_BYTES)
                case "ease":
                    run.limit_to(3 * STATE_BYTES)
                case "resume":
                    assert run.resume().losses == []
                case _:
                    getattr(run, call)()
            run.check()
        run.ledger.close()
        steps = run.steps
        for step in steps:
            copy = directory / f"from {step}"
            shutil.copytree(directory / "run", copy)
            (copy / "checkpoints" / "latest").write_text(f"step_{step:06d}\n")
            run.directory = copy
            start = run.open(lambda saved: saved.recover(run_id="toy", max_staleness=99))
            assert (start.step, start.losses) == (step, [])
            run.ledger.release()


@pytest.mark.matrix
@pytest.mark.slow
def test_a_real_run_stays_within_its_limit_is_resumed_and_finishes(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "GROUP_FILE_BYTES", 3000)
    limit = 1_400_000  # three checkpoints

    async def scenario(run: RealRun) -> None:
        for max_steps in (7, 10):
            learner = await run.learner(
                resume=max_steps > 7,
                run={"max_steps": max_steps},
                checkpoint={"interval_steps": 1, "keep_last": 4},
                limits={"run_dir_bytes": limit},
            )
            async with running(learner, await run.worker("w1")) as (learning, _):
                assert await learning == "finished"
            sizes = measure(run.run_dir)
            assert sum(sizes.values()) - sizes["final"] <= limit
            run.audit()
        removed = [path for row in run.ledger("removed") for path in row["paths"]]
        assert {path.partition("/")[0] for path in removed} == {"groups", "checkpoints"}
        assert not any((run.run_dir / path).exists() for path in removed)

    play(scenario)
