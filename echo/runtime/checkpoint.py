"""Checkpoints of the learner: written beside the old ones, made visible by one rename.

    checkpoints/step_000020/   trainer state (echo/engine/trainer_state.py) and checkpoint.json
    checkpoints/latest         the name of the newest, replaced atomically

A directory is complete if it has its final name: it is filled under a temporary one, forced onto
the disk, then renamed. So a full disk or a kill at any moment leaves the older checkpoints whole.
What is not in a checkpoint (prompt cursor, buffer, leases) is in the ledger.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from echo.errors import StorageError

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """What a checkpoint says of itself."""

    run_id: str
    lineage: int
    step: int
    format: int = FORMAT


def save_checkpoint(
    directory: Path,
    info: CheckpointInfo,
    *,
    write_state: Callable[[Path], None],
    keep_last: int,
    min_free_bytes: int,
) -> int:
    """Write a checkpoint and drop those beyond `keep_last`; return the step of the oldest kept.

    Args:
        directory: the run's `checkpoints`.
        info: what to call it.
        write_state: fills a directory with the trainer's state.
        keep_last: checkpoints to keep, this one included; at least 1.
        min_free_bytes: free disk below which nothing is written.

    Raises:
        StorageError: if it could not be written; older checkpoints are untouched.
    """
    name = f"step_{info.step:06d}"
    temporary = directory / f".{name}.tmp"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _check_space(directory, min_free_bytes)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        write_state(temporary)
        (temporary / "checkpoint.json").write_text(json.dumps(asdict(info)))
        for path in (*temporary.iterdir(), temporary):
            _sync(path)
        final = directory / name
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        _sync(directory)
        _point_latest(directory, name)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise StorageError(f"no checkpoint of step {info.step} in {directory}: {error}") from error
    except StorageError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    kept = sorted(directory.glob("step_*"))[-keep_last:]
    for path in set(directory.glob("step_*")) - set(kept):
        shutil.rmtree(path, ignore_errors=True)
    return min(int(path.name.removeprefix("step_")) for path in kept)


def find_latest(directory: Path) -> tuple[Path, CheckpointInfo] | None:
    """Return the newest checkpoint and what it says of itself; None if there is none.

    Raises:
        StorageError: if it is damaged; the message names the others.
    """
    pointer = directory / "latest"
    if not pointer.exists():
        return None
    try:
        path = directory / pointer.read_text().strip()
        fields = json.loads((path / "checkpoint.json").read_text())
        info = CheckpointInfo(**fields)
    except (OSError, ValueError, TypeError) as error:
        others = ", ".join(sorted(p.name for p in directory.glob("step_*"))) or "none"
        raise StorageError(
            f"the newest checkpoint in {directory} cannot be read ({error}); to continue from an "
            f"older one write its name into {pointer}; there are: {others}"
        ) from error
    if info.format != FORMAT:
        raise StorageError(f"{path} has format {info.format}, this release reads {FORMAT}")
    return path, info


def _check_space(directory: Path, min_free_bytes: int) -> None:
    free_bytes = shutil.disk_usage(directory).free
    if free_bytes < min_free_bytes:
        raise StorageError(
            f"no checkpoint: {directory} has {free_bytes} bytes free, limits.min_free_disk_bytes "
            f"asks for {min_free_bytes}; free some space"
        )


def _point_latest(directory: Path, name: str) -> None:
    temporary = directory / ".latest.tmp"
    temporary.write_text(name + "\n")
    _sync(temporary)
    temporary.rename(directory / "latest")
    _sync(directory)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
