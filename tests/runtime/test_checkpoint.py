from __future__ import annotations

from pathlib import Path

import pytest

from echo.errors import StorageError
from echo.runtime.checkpoint import (
    CheckpointInfo,
    Checkpoints,
    drop_later,
    find_latest,
    list_checkpoints,
    save_checkpoint,
)


def save(directory: Path, step: int, *, lineage: int = 1, keep_last: int = 2) -> int:
    return save_checkpoint(
        directory,
        CheckpointInfo(run_id="toy", lineage=lineage, step=step),
        write_state=lambda path: (path / "state").write_text(f"{lineage}/{step}"),
        keep_last=keep_last,
        min_free_bytes=0,
    )


def latest(directory: Path) -> tuple[str, CheckpointInfo]:
    found = find_latest(directory)
    assert found is not None
    path, info = found
    return (path / "state").read_text(), info


def fail(path: Path) -> None:
    (path / "half").write_text("written")
    raise OSError(28, "No space left on device")


def test_the_newest_is_found_and_old_ones_go(tmp_path: Path) -> None:
    assert find_latest(tmp_path) is None
    assert [save(tmp_path, step) for step in (10, 20, 30)] == [10, 10, 20]
    assert list(list_checkpoints(tmp_path)) == [20, 30]
    assert latest(tmp_path) == ("1/30", CheckpointInfo(run_id="toy", lineage=1, step=30))


def test_a_failure_leaves_the_old_one_and_no_rubbish(tmp_path: Path) -> None:
    save(tmp_path, 10)
    with pytest.raises(StorageError, match=r"step 20.*No space left"):
        save_checkpoint(
            tmp_path,
            CheckpointInfo(run_id="toy", lineage=1, step=20),
            write_state=fail,
            keep_last=2,
            min_free_bytes=0,
        )
    assert latest(tmp_path)[0] == "1/10"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step_000010"]


def test_a_disk_that_is_nearly_full_is_not_filled(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"limits\.min_free_disk_bytes"):
        save_checkpoint(
            tmp_path,
            CheckpointInfo(run_id="toy", lineage=1, step=20),
            write_state=fail,
            keep_last=2,
            min_free_bytes=1 << 62,
        )


def test_a_checkpoint_of_an_abandoned_lineage_does_not_push_out_the_new_one(tmp_path: Path) -> None:
    save(tmp_path, 10)
    save(tmp_path, 30)
    (tmp_path / "latest").write_text("step_000010\n")  # the user went back
    assert save(tmp_path, 20, lineage=2, keep_last=1) == 20
    assert latest(tmp_path)[0] == "2/20"
    assert list(list_checkpoints(tmp_path)) == [20]


def test_going_back_drops_what_came_later(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step, keep_last=3)
    drop_later(tmp_path, 20)
    assert list(list_checkpoints(tmp_path)) == [10, 20]


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


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"run_id": "toy", "colour": 1}'])
def test_a_damaged_checkpoint_names_the_others(tmp_path: Path, text: str) -> None:
    save(tmp_path, 10)
    save(tmp_path, 20)
    (tmp_path / "step_000020" / "checkpoint.json").write_text(text)
    with pytest.raises(StorageError, match=r"write its name into .*step_000010"):
        find_latest(tmp_path)


def test_another_format_is_refused(tmp_path: Path) -> None:
    save_checkpoint(
        tmp_path,
        CheckpointInfo(run_id="toy", lineage=1, step=1, format=2),
        write_state=lambda path: None,
        keep_last=1,
        min_free_bytes=0,
    )
    with pytest.raises(StorageError, match="has format 2, this release reads 1"):
        find_latest(tmp_path)


def make(
    directory: Path, *, interval_s: float | None = None, min_free_bytes: int = 0
) -> Checkpoints:
    return Checkpoints(
        directory,
        run_id="toy",
        interval_steps=10,
        interval_s=interval_s,
        keep_last=2,
        min_free_bytes=min_free_bytes,
        saved_step=None,
        now=0.0,
    )


def test_one_is_due_by_steps_or_by_time(tmp_path: Path) -> None:
    checkpoints = make(tmp_path, interval_s=60.0)
    assert checkpoints.is_due(10, now=1.0)
    assert not checkpoints.is_due(11, now=59.0)
    assert checkpoints.is_due(11, now=60.0)
    checkpoints.save(lineage=1, step=11, write_state=lambda path: None, now=60.0)
    assert checkpoints.saved_step == 11
    assert not checkpoints.is_due(12, now=119.0)
    assert not make(tmp_path).is_due(11, now=1e9)


def test_a_failure_is_tried_again_an_interval_later(tmp_path: Path) -> None:
    checkpoints = make(tmp_path, interval_s=60.0, min_free_bytes=1 << 62)
    with pytest.raises(StorageError):
        checkpoints.save(lineage=1, step=11, write_state=fail, now=60.0)
    assert checkpoints.saved_step is None
    assert not checkpoints.is_due(12, now=61.0)
