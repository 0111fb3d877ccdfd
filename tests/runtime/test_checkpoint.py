from __future__ import annotations

from pathlib import Path

import pytest
from blake3 import blake3

from echo.core.errors import StorageError
from echo.runtime.learner.checkpoint import (
    CheckpointInfo,
    Checkpoints,
    drop_later,
    find_whole,
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
    found = find_whole(directory)
    assert found is not None
    assert found.damage == ()
    return (found.path / "state").read_text(), found.info


def fail(path: Path) -> None:
    (path / "half").write_text("written")
    raise OSError(28, "No space left on device")


def test_the_newest_is_found_and_old_ones_go(tmp_path: Path) -> None:
    assert find_whole(tmp_path) is None
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
    assert latest(tmp_path)[0] == "1/20"


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


def test_damage_is_told_with_file_and_both_hashes(tmp_path: Path) -> None:
    save(tmp_path, 10)
    save(tmp_path, 20)
    (tmp_path / "step_000020" / "state").write_text("1/21")
    found = find_whole(tmp_path)
    assert found is not None
    [damage] = found.damage
    is_, was = (blake3(text).hexdigest() for text in (b"1/21", b"1/20"))
    assert damage == (
        f"{tmp_path}/step_000020/state is damaged: its BLAKE3 hash is {is_}, BLAKE3SUMS has {was}"
    )


@pytest.mark.parametrize("name", ["state", "checkpoint.json", "BLAKE3SUMS"])
def test_a_file_that_is_missing_is_damage_too(tmp_path: Path, name: str) -> None:
    save(tmp_path, 10)
    save(tmp_path, 20)
    (tmp_path / "step_000020" / name).unlink()
    found = find_whole(tmp_path)
    assert found is not None
    assert found.info.step == 10
    assert name in found.damage[0]


def test_sums_that_lost_a_line_are_damage_too(tmp_path: Path) -> None:
    save(tmp_path, 10)
    save(tmp_path, 20)
    sums = tmp_path / "step_000020" / "BLAKE3SUMS"
    lines = sums.read_text().splitlines(keepends=True)
    sums.write_text("".join(line for line in lines if not line.endswith("  state\n")))
    found = find_whole(tmp_path)
    assert found is not None
    assert found.info.step == 10
    assert "does not list state" in found.damage[0]


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


def test_another_format_is_refused(tmp_path: Path) -> None:
    """Also that of the release before, which knew no hashes."""
    save_checkpoint(
        tmp_path,
        CheckpointInfo(run_id="toy", lineage=1, step=1, format=1),
        write_state=lambda path: None,
        keep_last=1,
        min_free_bytes=0,
    )
    for _ in range(2):
        with pytest.raises(StorageError, match="has format 1, this release reads 2"):
            find_whole(tmp_path)
        (tmp_path / "step_000001" / "BLAKE3SUMS").unlink(missing_ok=True)


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
