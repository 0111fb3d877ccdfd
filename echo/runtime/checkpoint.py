"""Checkpoints of the learner: written beside the old ones, made visible by one rename.

    checkpoints/step_000020/   trainer state (echo/engine/trainer_state.py) and checkpoint.json
    checkpoints/latest         the name of the newest, replaced atomically

A directory is complete if it has its final name: it is filled under a temporary one, forced onto
the disk, then renamed. So a full disk or a kill at any moment leaves the older checkpoints whole.
What is not in a checkpoint (prompt cursor, buffer, leases) is in the ledger.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from echo.errors import StorageError
from echo.runtime.durable import sync_path, write_file

FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """What a checkpoint says of itself."""

    run_id: str
    lineage: int
    step: int
    format: int = FORMAT


class Checkpoints:
    """When the learner saves, and what it has saved."""

    def __init__(
        self,
        directory: Path,
        *,
        run_id: str,
        interval_steps: int,
        interval_s: float | None,
        keep_last: int,
        min_free_bytes: int,
        saved_step: int | None,
        now: float,
    ) -> None:
        """Start counting from now.

        Args:
            directory: the run's `checkpoints`.
            run_id: the run's id.
            interval_steps: steps between checkpoints.
            interval_s: seconds after which one is due even so; None for no such rule.
            keep_last: checkpoints to keep, at least 1.
            min_free_bytes: free disk below which nothing is written.
            saved_step: step of the checkpoint that the run was resumed from; None without one.
            now: the loop's clock, seconds.
        """
        self.saved_step = saved_step
        self._directory = directory
        self._run_id = run_id
        self._interval_steps = interval_steps
        self._interval_s = interval_s
        self._keep_last = keep_last
        self._min_free_bytes = min_free_bytes
        self._tried_at = now

    def is_due(self, step: int, *, now: float) -> bool:
        """Return whether to save after `step`."""
        elapsed_s = now - self._tried_at
        is_late = self._interval_s is not None and elapsed_s >= self._interval_s
        return step % self._interval_steps == 0 or is_late

    def save(
        self, *, lineage: int, step: int, write_state: Callable[[Path], None], now: float
    ) -> int:
        """Save; return the step of the oldest checkpoint kept.

        Args:
            lineage: the present lineage.
            step: optimizer steps done.
            write_state: fills a directory with the trainer's state.
            now: the loop's clock, seconds. A save that fails is tried again an interval later.

        Raises:
            StorageError: if it could not be written; older checkpoints are untouched.
        """
        self._tried_at = now
        oldest_step = save_checkpoint(
            self._directory,
            CheckpointInfo(run_id=self._run_id, lineage=lineage, step=step),
            write_state=write_state,
            keep_last=self._keep_last,
            min_free_bytes=self._min_free_bytes,
        )
        self.saved_step = step
        return oldest_step


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
        (temporary / "checkpoint.json").write_text(json.dumps(asdict(info)), encoding="utf-8")
        for path in (*temporary.iterdir(), temporary):
            sync_path(path)
        final = directory / name
        # Of another lineage if it exists: a step is saved once in each.
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        sync_path(directory)
        write_file(directory / "latest", f"{name}\n".encode())
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise StorageError(f"no checkpoint of step {info.step} in {directory}: {error}") from error
    except StorageError:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    steps = list_checkpoints(directory)
    # Not only the highest steps: one above this belongs to a history that was left.
    kept = [step for step in steps if step <= info.step][-keep_last:]
    for step in steps.keys() - set(kept):
        shutil.rmtree(steps[step], ignore_errors=True)
    return kept[0]


def list_checkpoints(directory: Path) -> dict[int, Path]:
    """Return the complete checkpoints by step, ascending."""
    found = {
        int(match[1]): path
        for path in directory.glob("step_*")
        if (match := re.fullmatch(r"step_(\d{6,})", path.name)) is not None
    }
    return dict(sorted(found.items()))


def drop_later(directory: Path, step: int) -> None:
    """Delete the checkpoints after `step`: the run continues from there without them."""
    for later, path in list_checkpoints(directory).items():
        if later > step:
            shutil.rmtree(path, ignore_errors=True)


def find_latest(directory: Path) -> tuple[Path, CheckpointInfo] | None:
    """Return the newest checkpoint and what it says of itself; None if there is none.

    Raises:
        StorageError: if it is damaged; the message names the others.
    """
    pointer = directory / "latest"
    complete = list_checkpoints(directory)
    if not complete and not pointer.exists():
        return None
    try:
        # Killed before the very first pointer was written, a run has a checkpoint without one.
        newest = complete[max(complete)].name if complete else ""
        path = directory / (pointer.read_text("utf-8").strip() if pointer.exists() else newest)
        fields = json.loads((path / "checkpoint.json").read_text(encoding="utf-8"))
        info = CheckpointInfo(**fields)
    except (OSError, ValueError, TypeError) as error:
        others = ", ".join(path.name for path in complete.values()) or "none"
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
