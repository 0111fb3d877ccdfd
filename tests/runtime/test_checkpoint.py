from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3

from echo.core.errors import ConfigError, StorageError
from echo.core.records import Discarded, Granted
from echo.core.rollout import Group, Lineage, PolicyVersion
from echo.records.ledger import Finished, Ledger, LedgerQueue, read_lines, read_records, read_state
from echo.runtime.learner.saving import checkpoint as checkpoint_module
from echo.runtime.learner.saving.checkpoint import (
    CheckpointInfo,
    Checkpoints,
    FoundCheckpoint,
    find_checkpoint,
    list_checkpoints,
    read_best,
)
from echo.runtime.learner.saving.resume import SavedRun, StartingPoint, finished_step
from echo.train import saved_state
from echo.train.saved_state import OPTIMIZER_FILE, TRAINER_FILE, WEIGHTS_FILE
from echo.wire.codec import encode_group
from tests.core import groups
from tests.core.groups import make_rollout


class Trainer:
    def __init__(self, state: str) -> None:
        self._state = state

    def save_state(self, directory: Path) -> None:
        (directory / "state").write_text(self._state)


class TrainerOfTwo(Trainer):
    def save_state(self, directory: Path) -> None:
        for name in ("maths", "prose"):
            (directory / name).mkdir()
            super().save_state(directory / name)


class FailingTrainer:
    def save_state(self, directory: Path) -> None:
        (directory / "half").write_text("written")
        raise OSError(28, "No space left on device")


def make(directory: Path, **settings: Any) -> Checkpoints:
    defaults: dict[str, Any] = {
        "run_id": "toy", "interval_steps": 10, "interval_s": None, "keep_last": 2,
        "min_free_bytes": 0, "now": 0.0,
    }  # fmt: skip
    return Checkpoints(directory, **(defaults | settings))


def save(directory: Path, step: int, *, lineage: int = 1, keep_last: int = 2) -> int:
    checkpoints = make(directory, keep_last=keep_last)
    return checkpoints.save(
        Trainer(f"{lineage}/{step}").save_state, lineage=lineage, step=step, now=0.0
    )


def find_whole(directory: Path) -> FoundCheckpoint | None:
    return make(directory).find_whole()


def latest(directory: Path) -> tuple[str, CheckpointInfo]:
    found = find_whole(directory)
    assert found is not None
    assert found.damage == ()
    return (found.path / "state").read_text(), found.info


def test_the_newest_is_found_and_old_ones_go(tmp_path: Path) -> None:
    assert find_whole(tmp_path) is None
    assert [save(tmp_path, step) for step in (10, 20, 30)] == [10, 10, 20]
    assert list(list_checkpoints(tmp_path)) == [20, 30]
    assert latest(tmp_path) == ("1/30", CheckpointInfo(run_id="toy", lineage=1, step=30))


def save_with(checkpoints: Checkpoints, *steps: int) -> None:
    for step in steps:
        checkpoints.save(Trainer(f"1/{step}").save_state, lineage=1, step=step, now=0.0)


def test_the_best_by_its_held_out_score_is_kept_beside_the_last(tmp_path: Path) -> None:
    checkpoints = make(tmp_path)
    checkpoints.expect_score(10)
    save_with(checkpoints, 10, 20, 30, 40)
    assert list(list_checkpoints(tmp_path)) == [10, 30, 40], "10 waits for its score"
    assert checkpoints.score(10, 0.5)
    assert read_best(tmp_path) == (10, 0.5)
    assert not checkpoints.score(40, 0.5), "the earlier of two that are as good stays"
    checkpoints.expect_score(50)
    save_with(checkpoints, 50, 60)
    assert list(list_checkpoints(tmp_path)) == [10, 50, 60]
    assert checkpoints.score(50, 0.75)
    assert list(list_checkpoints(tmp_path)) == [50, 60], "the best before goes"
    checkpoints.expect_score(70)
    save_with(checkpoints, 70, 80, 90)
    assert not checkpoints.score(70, None), "its evaluation failed"
    assert list(list_checkpoints(tmp_path)) == [50, 80, 90]
    assert not checkpoints.score(100, 0.9), "scored before it is saved, as the last step is"
    save_with(make(tmp_path), 95)  # by another process, which knows no scores
    save_with(checkpoints, 100)
    assert read_best(tmp_path) == (100, 0.9)
    assert latest(tmp_path)[0] == "1/100"
    found = find_checkpoint(tmp_path, "best")
    assert found is not None
    assert found[1].step == 100


def test_a_run_can_go_on_from_the_best_which_is_the_best_until_another_is(tmp_path: Path) -> None:
    """The file `best` can be copied over `latest`; a void best one is forgotten."""
    checkpoints = make(tmp_path)
    save_with(checkpoints, 10)
    checkpoints.score(10, 0.5)
    save_with(checkpoints, 20, 30)
    shutil.copy(tmp_path / "best", tmp_path / "latest")
    assert latest(tmp_path)[0] == "1/10"
    checkpoints.drop_later(10)
    assert (list(list_checkpoints(tmp_path)), read_best(tmp_path)) == ([10], (10, 0.5))
    save_with(checkpoints, 20)
    checkpoints.score(20, 0.8)
    checkpoints.drop_later(10)
    save_with(checkpoints, 20)
    assert read_best(tmp_path) is None, "this is another step 20"


def test_a_failure_leaves_the_old_one_and_no_rubbish(tmp_path: Path) -> None:
    save(tmp_path, 10)
    with pytest.raises(StorageError, match=r"step 20.*No space left"):
        make(tmp_path).save(FailingTrainer().save_state, lineage=1, step=20, now=0.0)
    assert latest(tmp_path)[0] == "1/10"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_000010"]


def test_a_disk_that_is_nearly_full_is_not_filled(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"limits\.min_free_disk_bytes"):
        make(tmp_path, min_free_bytes=1 << 62).save(
            FailingTrainer().save_state, lineage=1, step=20, now=0.0
        )


def test_one_that_would_take_what_must_stay_free_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 10)
    size = sum(path.stat().st_size for path in (tmp_path / "step_000010").iterdir())
    checkpoints = make(tmp_path, min_free_bytes=1000)
    trainer = Trainer("1/20")
    usage = SimpleNamespace(free=1000 + size - 1)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(StorageError, match=f"a checkpoint takes {size} B"):
        checkpoints.save(trainer.save_state, lineage=1, step=20, now=0.0)
    usage.free += 1
    checkpoints.save(trainer.save_state, lineage=1, step=20, now=0.0)
    assert list(list_checkpoints(tmp_path)) == [10, 20]


def test_a_checkpoint_of_an_abandoned_lineage_does_not_push_out_the_new_one(tmp_path: Path) -> None:
    save(tmp_path, 10)
    save(tmp_path, 30)
    (tmp_path / "latest").write_text("step_000010\n")  # the user went back
    assert save(tmp_path, 20, lineage=2, keep_last=1) == 20
    assert latest(tmp_path)[0] == "2/20"
    assert list(list_checkpoints(tmp_path)) == [20]


def test_a_kill_before_the_first_pointer_loses_nothing(tmp_path: Path) -> None:
    save(tmp_path, 10)
    (tmp_path / "latest").unlink()
    assert latest(tmp_path)[0] == "1/10"


def test_steps_sort_as_numbers_and_foreign_names_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "step_000010.bak").mkdir()
    (tmp_path / "step_mine").mkdir()
    save(tmp_path, 999_999)
    assert save(tmp_path, 1_000_000, keep_last=1) == 1_000_000
    assert (tmp_path / "step_000010.bak").exists()
    assert (tmp_path / "step_mine").exists()


@pytest.mark.parametrize("name", ["state", "checkpoint.json", "BLAKE3SUMS"])
def test_a_flipped_bit_anywhere_passes_over_the_checkpoint(tmp_path: Path, name: str) -> None:
    save(tmp_path, 10)
    save(tmp_path, 20)
    path = tmp_path / "step_000020" / name
    data = path.read_bytes()
    for bit in range(0, 8 * len(data), 31 if len(data) > 8 else 1):
        path.write_bytes(flipped(data, bit))
        found = find_whole(tmp_path)
        assert found is not None
        assert found.info.step == 10
        [damage] = found.damage
        assert "step_000020" in damage
    path.write_bytes(data)
    assert latest(tmp_path)[0] == "1/20"


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def forget_state(path: Path) -> None:
    lines = (path / "BLAKE3SUMS").read_text().splitlines(keepends=True)
    kept = [line for line in lines if not line.endswith("  state\n")]
    (path / "BLAKE3SUMS").write_text("".join(kept))


IS, WAS = (blake3(text).hexdigest() for text in (b"1/21", b"1/20"))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (
            lambda path: (path / "state").write_text("1/21"),
            f"000020/state is damaged: its BLAKE3 hash is {IS}, BLAKE3SUMS has {WAS}",
        ),
        (forget_state, "does not list state"),
        (lambda path: (path / "state").unlink(), "000020/state"),
        (lambda path: (path / "checkpoint.json").unlink(), "checkpoint.json"),
        (lambda path: (path / "BLAKE3SUMS").unlink(), "BLAKE3SUMS is missing"),
    ],
)
def test_what_is_wrong_with_a_checkpoint_is_told_and_the_one_before_is_taken(
    tmp_path: Path, damage: Callable[[Path], object], told: str
) -> None:
    save(tmp_path, 10)
    save(tmp_path, 20)
    damage(tmp_path / "step_000020")
    found = find_whole(tmp_path)
    assert found is not None
    assert found.info.step == 10
    assert told in found.damage[0]


def test_the_folders_of_several_adapters_are_sealed_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(checkpoint_module, "sync_path", lambda path: synced.append(path.name))
    save(tmp_path, 10)
    make(tmp_path).save(TrainerOfTwo("1/20").save_state, lineage=1, step=20, now=0.0)
    assert synced.count("state") == 3
    found = find_whole(tmp_path)
    assert found is not None
    assert found.info.step == 20
    (tmp_path / "step_000020" / "prose" / "state").write_text("1/21")
    found = find_whole(tmp_path)
    assert found is not None
    assert found.info.step == 10
    assert f"prose/state is damaged: its BLAKE3 hash is {IS}" in found.damage[0]


def test_where_every_checkpoint_is_damaged_the_run_does_not_begin_anew_in_silence(
    tmp_path: Path,
) -> None:
    for step in (10, 20):
        save(tmp_path, step)
        (tmp_path / f"step_{step:06d}" / "state").write_text("?")
    with pytest.raises(StorageError, match=r"is whole: .*000020/state.*000010/state.*Restore one"):
        find_whole(tmp_path)


def test_only_older_ones_stand_in_for_a_damaged_one(tmp_path: Path) -> None:
    """The user went back to 20: what lies after it is no part of the run."""
    for step in (10, 20, 30):
        save(tmp_path, step, keep_last=3)
    (tmp_path / "latest").write_text("step_000020\n")
    (tmp_path / "step_000020" / "state").write_text("?")
    found = find_whole(tmp_path)
    assert found is not None
    assert found.info.step == 10


@pytest.mark.parametrize("name", [b"step_000030", b"20", b"\xff"])
def test_a_pointer_to_nothing_is_named_with_what_there_is(tmp_path: Path, name: bytes) -> None:
    save(tmp_path, 10)
    (tmp_path / "latest").write_bytes(name)
    with pytest.raises(StorageError, match=r"latest .*into it; there are: step_000010"):
        find_whole(tmp_path)


def test_the_hashes_are_in_the_form_of_b3sum(tmp_path: Path) -> None:
    save(tmp_path, 10)
    lines = (tmp_path / "step_000010" / "BLAKE3SUMS").read_text().splitlines()
    assert [line.split("  ")[1] for line in lines] == ["checkpoint.json", "state"]
    assert lines[1].split("  ")[0] == blake3(b"1/10").hexdigest()


def test_another_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also that of the release before, which knew no hashes."""
    monkeypatch.setattr(checkpoint_module, "CheckpointInfo", partial(CheckpointInfo, format=1))
    save(tmp_path, 1)
    for _ in range(2):
        with pytest.raises(StorageError, match="has format 1, this release reads 2"):
            find_whole(tmp_path)
        (tmp_path / "step_000001" / "BLAKE3SUMS").unlink(missing_ok=True)


def test_one_is_due_by_steps_or_by_time(tmp_path: Path) -> None:
    checkpoints = make(tmp_path, interval_s=60.0)
    assert checkpoints.is_due(10, now=1.0)
    assert not checkpoints.is_due(11, now=59.0)
    assert checkpoints.is_due(11, now=60.0)
    checkpoints.save(Trainer("1/11").save_state, lineage=1, step=11, now=60.0)
    assert checkpoints.saved_step == 11
    assert not checkpoints.is_due(12, now=119.0)
    assert not make(tmp_path).is_due(11, now=1e9)


def test_a_failure_is_tried_again_an_interval_later(tmp_path: Path) -> None:
    checkpoints = make(tmp_path, interval_s=60.0, min_free_bytes=1 << 62)
    with pytest.raises(StorageError):
        checkpoints.save(FailingTrainer().save_state, lineage=1, step=11, now=60.0)
    assert checkpoints.saved_step is None
    assert not checkpoints.is_due(12, now=61.0)


# --- recovery -------------------------------------------------------------------------------------


def make_group(group_id: int, *, lineage: int = 1, step: int = 0) -> Group:
    rollout = make_rollout([(lineage, step)] * 2)
    return groups.make_group(rollout, rollout, group_id=group_id)


class TorchTrainer:
    def save_state(self, directory: Path) -> None:
        tensors = {"layer": torch.arange(4.0)}
        saved_state.save(
            directory, weights=tensors, moments=tensors, counters={}, device=torch.device("cpu")
        )


def checkpoint(run_dir: Path, step: int, *, lineage: int = 1, run_id: str = "toy") -> None:
    checkpoints = make(run_dir / "checkpoints", run_id=run_id, keep_last=9)
    checkpoints.save(TorchTrainer().save_state, lineage=lineage, step=step, now=0.0)


@contextmanager
def opened(run_dir: Path) -> Iterator[Ledger]:
    ledger = Ledger(run_dir, spool_bytes=1 << 20)
    try:
        yield ledger
    finally:
        ledger.close()


def grant(group_id: int, attempt: int = 0) -> Granted:
    return Granted(group=group_id, attempt=attempt, worker="w1", version=PolicyVersion(1, 0))


def store(ledger: Ledger, group: Group) -> Group:
    ledger.append(grant(group.group_id))
    ledger.store(group, *encode_group(group))
    ledger.sync()
    return group


def saved(ledger: LedgerQueue) -> SavedRun:
    return SavedRun(ledger, make(ledger.run_dir / "checkpoints"))


def resume(run_dir: Path, *, max_staleness: int = 2) -> StartingPoint:
    with opened(run_dir) as ledger:
        start = saved(ledger).recover(run_id="toy", max_staleness=max_staleness)
        saved(ledger).enter(start)
        return start


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Return a run that was killed at step 3, with a checkpoint of step 1."""
    with opened(tmp_path) as ledger:
        saved(ledger).enter(saved(ledger).begin())
        groups = [store(ledger, make_group(i, step=step)) for i, step in enumerate([0, 0, 1, 2])]
        ledger.trained(groups[:1], lineage=1, consumed_at=0)
        checkpoint(tmp_path, 1)
        ledger.trained(groups[1:2], lineage=1, consumed_at=1)
        ledger.trained(groups[2:3], lineage=1, consumed_at=2)
        ledger.append(grant(4, attempt=1))
        ledger.append(Discarded(group=5, reason="reward_error", step=3))
    return tmp_path


def test_a_run_begins_once_and_not_before_it_is_entered(tmp_path: Path) -> None:
    with opened(tmp_path) as ledger:
        saved(ledger).begin()
        saved(ledger).enter(saved(ledger).begin())
        with pytest.raises(ConfigError, match="--resume"):
            saved(ledger).begin()


def test_there_must_be_a_run_to_resume(tmp_path: Path) -> None:
    with opened(tmp_path) as ledger, pytest.raises(ConfigError, match="no run to resume"):
        saved(ledger).recover(run_id="toy", max_staleness=2)


def test_what_was_trained_after_the_checkpoint_waits_again(run_dir: Path) -> None:
    start = resume(run_dir)
    assert (start.step, start.lineage) == (1, 2)
    assert start.lineages == (Lineage(1, 0), Lineage(2, 1))
    assert [group.group_id for group in start.buffered] == [1, 2]
    # Sampled by weights that are gone.
    assert start.ends == {3: "abandoned_version"}
    assert start.open_attempts == {4: {1: "w1"}}
    assert start.finished == {0, 1, 2, 3, 5}
    assert start.next_group_id == 6
    assert start.staleness_tokens == {0: 4}


def test_what_is_too_old_by_then_ends_as_stale(run_dir: Path) -> None:
    start = resume(run_dir, max_staleness=0)
    assert start.ends == {1: "stale", 3: "abandoned_version"}
    assert start.num_too_old_tokens == 4
    assert [group.group_id for group in resume(run_dir, max_staleness=0).buffered] == [2]


def test_what_is_only_in_part_too_old_stays_without_that_part(run_dir: Path) -> None:
    with opened(run_dir) as ledger:
        group = make_group(6)
        versions = np.array([[1, 0], [1, 1]], np.int32)
        rollout = replace(group.rollouts[0], policy_versions=versions)
        store(ledger, replace(group, rollouts=(rollout, rollout)))
        for trims_stale in (False, True):
            start = saved(ledger).recover(run_id="toy", max_staleness=0, trims_stale=trims_stale)
            assert start.ends.get(6) == (None if trims_stale else "stale")
            assert start.num_too_old_tokens == 4 + (2 if trims_stale else 4)
    [group] = [group for group in start.buffered if group.group_id == 6]
    assert group.rollouts[0].completion_mask.tolist() == [False, True]
    assert group.is_trimmed


def test_two_crashes_from_one_checkpoint_are_two_lineages(run_dir: Path) -> None:
    resume(run_dir)
    start = resume(run_dir)
    assert start.lineages == (Lineage(1, 0), Lineage(2, 1), Lineage(3, 1))
    assert [group.group_id for group in start.buffered] == [1, 2]
    assert start.ends == {}  # final from the first time


def test_recovering_writes_nothing_by_itself(run_dir: Path) -> None:
    before = list(read_lines(run_dir))
    with opened(run_dir) as ledger:
        saved(ledger).recover(run_id="toy", max_staleness=2)
    assert list(read_lines(run_dir)) == before


def test_without_a_checkpoint_it_starts_over(run_dir: Path) -> None:
    for path in list_checkpoints(run_dir / "checkpoints").values():
        shutil.rmtree(path)
    (run_dir / "checkpoints" / "latest").unlink()
    start = resume(run_dir)
    assert (start.step, start.checkpoint) == (0, None)
    assert [group.group_id for group in start.buffered] == [0, 1]


def test_going_back_to_an_older_checkpoint_drops_the_later_ones(run_dir: Path) -> None:
    checkpoint(run_dir, 3)
    (run_dir / "checkpoints" / "latest").write_text("step_000001\n")
    assert resume(run_dir).step == 1
    assert list(list_checkpoints(run_dir / "checkpoints")) == [1]


def test_a_run_is_finished_where_nothing_is_left_to_do(run_dir: Path) -> None:
    pointer = run_dir / "checkpoints" / "latest"
    with opened(run_dir) as ledger:
        ledger.append(Finished(step=1))
    assert finished_step(run_dir) is None, "it was not exported"
    (run_dir / "final").mkdir()
    assert finished_step(run_dir) == 1
    for name in (b"step_000000\n", b"\xff"):
        pointer.write_bytes(name)
        assert finished_step(run_dir) is None
    pointer.write_text("step_000001\n")
    resume(run_dir)
    assert finished_step(run_dir) is None


def test_a_group_that_is_gone_ends_as_lost(run_dir: Path) -> None:
    for path in (run_dir / "groups").glob("*.bin"):
        path.unlink()
    start = resume(run_dir)
    assert start.ends == {1: "lost", 2: "lost", 3: "lost"}
    assert len(start.losses) == 3
    assert "group 1 cannot be read back" in start.losses[0]
    assert resume(run_dir).ends == {}


def flip_a_bit(path: Path, at: int | None = None) -> None:
    data = path.read_bytes()
    path.write_bytes(flipped(data, 8 * (len(data) // 2 if at is None else at)))


@pytest.mark.parametrize(
    "name", [WEIGHTS_FILE, OPTIMIZER_FILE, TRAINER_FILE, "checkpoint.json", "BLAKE3SUMS"]
)
def test_a_flipped_bit_in_a_checkpoint_makes_its_steps_void(run_dir: Path, name: str) -> None:
    checkpoint(run_dir, 3)
    flip_a_bit(run_dir / "checkpoints" / "step_000003" / name)
    start = resume(run_dir)
    assert (start.step, start.lineages) == (1, (Lineage(1, 0), Lineage(2, 1)))
    assert start.checkpoint == run_dir / "checkpoints" / "step_000001"
    [damage] = start.damage
    assert f"step_000003/{name}" in damage or name == "BLAKE3SUMS"
    # What was trained after step 1 waits again, as when the user goes back.
    assert [group.group_id for group in start.buffered] == [1, 2]
    # The next resume finds the run at the same checkpoint, without damage.
    assert list(list_checkpoints(run_dir / "checkpoints")) == [1]
    again = resume(run_dir)
    assert (again.step, again.damage) == (1, ())


def test_without_a_whole_checkpoint_nothing_is_written(run_dir: Path) -> None:
    flip_a_bit(run_dir / "checkpoints" / "step_000001" / WEIGHTS_FILE)
    before = list(read_lines(run_dir))
    with pytest.raises(StorageError, match=r"no checkpoint .* is whole"):
        resume(run_dir)
    assert list(read_lines(run_dir)) == before
    assert list(list_checkpoints(run_dir / "checkpoints")) == [1]


def test_a_flipped_bit_in_a_stored_group_ends_that_group(run_dir: Path) -> None:
    place = read_state(read_records(run_dir), lineage=1, step=1).waiting[1]
    # In the last number of its log-probabilities: nothing else about it would look wrong.
    flip_a_bit(run_dir / "groups" / place.file, place.offset + place.length - 1)
    start = resume(run_dir)
    assert [group.group_id for group in start.buffered] == [2]
    assert start.ends == {1: "lost", 3: "abandoned_version"}
    assert "group 1 cannot be read back" in start.losses[0]
    assert resume(run_dir).ends == {}


def test_a_checkpoint_of_another_run_is_refused(run_dir: Path) -> None:
    checkpoint(run_dir, 3, run_id="other")
    with pytest.raises(ConfigError, match="belongs to run other"):
        resume(run_dir)


def test_a_checkpoint_of_an_abandoned_history_is_refused(run_dir: Path) -> None:
    resume(run_dir)
    checkpoint(run_dir, 2, lineage=1)
    with pytest.raises(StorageError, match="not on the run's history"):
        resume(run_dir)
