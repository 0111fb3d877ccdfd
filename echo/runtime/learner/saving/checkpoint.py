"""Checkpoints of the learner, made visible by one rename.

    checkpoints/step_000020/   trainer state (echo/train/trainer.py), checkpoint.json,
                               and BLAKE3SUMS, which `b3sum --check` can read
    checkpoints/latest         the name of the newest checkpoint, replaced atomically
    checkpoints/best           the name and the held-out score of the best checkpoint, also replaced
                               atomically; this checkpoint is kept in addition to the last ones

A directory is filled under a temporary name, forced onto the disk, and then renamed. So a full disk
or a kill at any moment leaves the older checkpoints undamaged. A checkpoint is used only if each of
its files has the hash that BLAKE3SUMS lists. The rest of the state is in the ledger: the last
prompt, the buffer, the leases.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from echo.core.errors import DataError, EchoError, StorageError
from echo.core.units import format_bytes
from echo.records.files import hash_file, sync_path, write_file
from echo.records.retention import StoredCheckpoint

FORMAT = 2  # of a checkpoint; a checkpoint of another format is refused
INFO_FILE = "checkpoint.json"
SUMS_FILE = "BLAKE3SUMS"
BEST_FILE = "best"


class DamagedCheckpointError(StorageError):
    """A checkpoint's files have changed since they were written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointInfo:
    """Metadata of a checkpoint, the contents of checkpoint.json."""

    run_id: str
    lineage: int
    step: int
    format: int = FORMAT


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundCheckpoint:
    """The newest undamaged checkpoint, and the faults of newer checkpoints, which are damaged."""

    path: Path
    info: CheckpointInfo
    damage: tuple[str, ...] = ()
    """Fault messages of newer, damaged checkpoints, newest first."""


class Checkpoints:
    """Decides when the learner saves. Writes and reads checkpoints."""

    def __init__(
        self,
        directory: Path,
        *,
        run_id: str,
        interval_steps: int,
        interval_s: float | None,
        keep_last: int,
        min_free_bytes: int,
        now: float,
    ) -> None:
        """Manage the checkpoints in `directory`.

        Args:
            directory: the directory of the run's checkpoints.
            run_id: the id of the run.
            interval_steps: a checkpoint is due at each multiple of this number of steps.
            interval_s: longest time between two attempts, seconds; None for no limit.
            keep_last: number of newest checkpoints that are kept, at least one.
            min_free_bytes: free bytes that the disk must have after a checkpoint.
            now: the loop's time, seconds.
        """
        self.saved_step: int | None = None
        """Step of the last checkpoint that was written or from which the run resumed; None if there
        is none.
        """
        self._directory = directory
        self._run_id = run_id
        self._interval_steps = interval_steps
        self._interval_s = interval_s
        self._keep_last = keep_last
        self._min_free_bytes = min_free_bytes
        self._tried_at = now
        self.removed_step = -1
        """Step of the newest checkpoint that was removed to limit disk use; -1 before a removal.

        For checkpoints before this step, such as the best checkpoint, no groups are kept.
        """
        self._scores: dict[int, float | None] = {}
        """Held-out scores of steps that may have a checkpoint, without the best score so far.

        A score is None while the step is being evaluated.
        """

    def is_due(self, step: int, *, now: float) -> bool:
        """Return whether a checkpoint is due after `step`."""
        elapsed_s = now - self._tried_at
        is_late = self._interval_s is not None and elapsed_s >= self._interval_s
        return step % self._interval_steps == 0 or is_late

    def save(
        self, save_state: Callable[[Path], None], *, lineage: int, step: int, now: float
    ) -> int:
        """Write a checkpoint, and delete old ones.

        `save_state` fills a directory with the trainer's state. If a checkpoint fails, the next
        attempt is due an interval later.

        Returns:
            The oldest step of the last `keep_last` checkpoints.

        Raises:
            StorageError: if the checkpoint could not be written. Older checkpoints are untouched.
            NonfiniteWeightsError: if weights are NaN or infinite. Older checkpoints are untouched.
        """
        self._tried_at = now
        directory, name = self._directory, checkpoint_name(step)
        temporary = directory / f".{name}.tmp"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._check_space()
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            save_state(temporary)
            info = CheckpointInfo(run_id=self._run_id, lineage=lineage, step=step)
            _seal(temporary, info)
            final = directory / name
            # A directory of this name is from another lineage: each lineage saves a step once.
            shutil.rmtree(final, ignore_errors=True)
            temporary.rename(final)
            sync_path(directory)
            write_file(directory / "latest", f"{name}\n".encode())
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            raise StorageError(f"no checkpoint of step {step} in {directory}: {error}") from error
        except EchoError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        self.saved_step = step
        with suppress(StorageError):  # then the best before stays
            self._mark_best()
        return self._delete_others(step)

    def expect_score(self, step: int) -> None:
        """Keep the checkpoint of a step until `score` is called for this step."""
        self._scores[step] = None

    def score(self, step: int, score: float | None) -> bool:
        """Record the held-out score of a step.

        Return whether the step's checkpoint is now the best. `score` is None if the evaluation gave
        no score. The checkpoint may be written after this call.

        Raises:
            StorageError: if the file `best` cannot be written.
        """
        self._scores.pop(step, None)
        if score is not None:
            self._scores[step] = score
        best = self._mark_best()
        if self.saved_step is not None:
            self._delete_others(self.saved_step)
        return best == step

    def _mark_best(self) -> int | None:
        """If a newly scored checkpoint is better than the best so far, record it as the best.

        Return the step of the new best checkpoint, else None.
        """
        complete, known = list_checkpoints(self._directory), read_best(self._directory)
        scored = {
            step: score
            for step, score in self._scores.items()
            if score is not None and step in complete
        }
        for step in scored:
            del self._scores[step]
        best = max(scored, key=lambda step: (scored[step], -step), default=None)
        if best is None or (known is not None and scored[best] <= known[1]):
            return None
        text = f"{complete[best].name} {scored[best]!r}\n"
        try:
            write_file(self._directory / BEST_FILE, text.encode())
        except OSError as error:
            raise StorageError(f"cannot write {self._directory / BEST_FILE}: {error}") from error
        return best

    def _delete_others(self, step: int) -> int:
        """Delete old checkpoints; keep the last, the best, and those that await a score.

        Return the oldest step of the last `keep_last` checkpoints. Checkpoints after `step` do not
        count, because they belong to an abandoned lineage.
        """
        steps = list_checkpoints(self._directory)
        last = self._last(steps, step)
        for each in steps.keys() - {*last, *self._awaited_or_best()}:
            shutil.rmtree(steps[each], ignore_errors=True)
        return last[0]

    def _last(self, steps: Iterable[int], step: int) -> list[int]:
        return [each for each in steps if self.removed_step < each <= step][-self._keep_last :]

    def _awaited_or_best(self) -> set[int]:
        """Return the steps that are being evaluated, and the step of the best checkpoint."""
        best = read_best(self._directory)
        awaited = {each for each, score in self._scores.items() if score is None}
        return awaited if best is None else awaited | {best[0]}

    def stored(self, *, up_to: int | None = None) -> list[StoredCheckpoint]:
        """Return the complete checkpoints, oldest first.

        If `up_to` is given, leave out checkpoints after the step `up_to`. The field `keeps_groups`
        is true for the last `keep_last` of these checkpoints.
        """
        steps = {
            step: path
            for step, path in list_checkpoints(self._directory).items()
            if up_to is None or step <= up_to
        }
        newest = max(steps, default=0)
        last, special = self._last(steps, newest), self._awaited_or_best()
        return [
            StoredCheckpoint(
                step=step,
                path=f"{self._directory.name}/{path.name}",
                must_stay=step == newest or step in special,
                keeps_groups=step in last,
            )
            for step, path in steps.items()
        ]

    def _check_space(self) -> None:
        saved = list_checkpoints(self._directory)
        newest = saved[max(saved)] if saved else None
        own_bytes = sum((newest / name).stat().st_size for name in _files(newest)) if newest else 0
        free_bytes = shutil.disk_usage(self._directory).free
        if free_bytes - own_bytes < self._min_free_bytes:
            raise StorageError(
                f"no checkpoint: {self._directory} has {format_bytes(free_bytes)} free, a "
                f"checkpoint takes {format_bytes(own_bytes)}, and limits.min_free_disk_bytes = "
                f"{format_bytes(self._min_free_bytes)} must stay free; free some space"
            )

    def drop_later(self, step: int) -> None:
        """Delete the checkpoints after `step`, because the run continues from `step`.

        Raises:
            StorageError: if `latest` cannot be written.
        """
        complete = list_checkpoints(self._directory)
        if step in complete and step < max(complete):
            self.go_back(step)
        best = read_best(self._directory)
        if best is not None and best[0] > step:
            (self._directory / BEST_FILE).unlink(missing_ok=True)  # another one will have its name
        for later, path in complete.items():
            if later > step:
                shutil.rmtree(path, ignore_errors=True)

    def newest_up_to(self, step: int) -> int | None:
        """Return the step of the newest checkpoint up to `step`; None if all checkpoints are later.

        Without any checkpoint the result is 0, because the run can start from its initial weights.
        """
        saved = list_checkpoints(self._directory)
        return max((each for each in saved if each <= step), default=None if saved else 0)

    def go_back(self, step: int) -> None:
        """Make `latest` name the checkpoint of `step`.

        Later checkpoints stay until the run is resumed.

        Raises:
            StorageError: if `latest` cannot be written.
        """
        pointer, saved = self._directory / "latest", list_checkpoints(self._directory)
        if step not in saved:
            return
        try:
            write_file(pointer, f"{saved[step].name}\n".encode())
        except OSError as error:
            raise StorageError(f"cannot write {pointer}: {error}") from error

    def find_whole(self) -> FoundCheckpoint | None:
        """Return the newest undamaged checkpoint; None if there is no checkpoint.

        Checkpoints newer than the one that `latest` names are ignored.

        Raises:
            StorageError: if all checkpoints are damaged, if `latest` names no checkpoint, or if the
                checkpoint has the format of another release.
        """
        complete = list_checkpoints(self._directory)
        newest = self._newest_step(complete)
        damage: list[str] = []
        for step in sorted((step for step in complete if step <= newest), reverse=True):
            try:
                info = _read_whole(complete[step])
            except DamagedCheckpointError as error:
                damage.append(str(error))
            else:
                return FoundCheckpoint(path=complete[step], info=info, damage=tuple(damage))
        if not damage:
            return None
        raise StorageError(
            f"no checkpoint in {self._directory} is whole: {'; '.join(damage)}. Restore one from a "
            f"copy, or delete {self._directory}: --resume then makes every step again from the "
            "initial weights"
        )

    def _newest_step(self, complete: Mapping[int, Path]) -> int:
        """Return the step that `latest` names. If the file is missing, return the last step.

        Raises:
            StorageError: if the file cannot be read or names no checkpoint.
        """
        pointer = self._directory / "latest"
        names = ", ".join(path.name for path in complete.values()) or "none"
        remedy = f"write the name of a checkpoint into it; there are: {names}"
        try:
            named = newest_name(self._directory)
        except (OSError, ValueError) as error:
            raise StorageError(f"{pointer} cannot be read ({error}); {remedy}") from error
        if not named:
            return max(complete, default=0)
        for step, path in complete.items():
            if path.name == named:
                return step
        raise StorageError(f"{pointer} names {named!r}, which is no checkpoint here; {remedy}")


def checkpoint_name(step: int) -> str:
    """Return the name of a checkpoint's directory."""
    return f"step_{step:06d}"


def newest_name(directory: Path) -> str:
    """Return the name of a checkpoint that the file `latest` contains; "" if the file is missing.

    Raises:
        OSError, ValueError: if the file cannot be read.
    """
    pointer = directory / "latest"
    return pointed_name(pointer) if pointer.exists() else ""


def pointed_name(pointer: Path) -> str:
    """Return the first word of the file `latest` or `best`, the name of a checkpoint.

    Raises:
        OSError, ValueError: if the file cannot be read.
    """
    return (pointer.read_text("utf-8").split() or [""])[0]


def read_best(directory: Path) -> tuple[int, float] | None:
    """Return the step and the held-out score of the best checkpoint; None if unknown."""
    try:
        name, score = (directory / BEST_FILE).read_text("utf-8").split()
        steps = {path.name: step for step, path in list_checkpoints(directory).items()}
        return steps[name], float(score)
    except (OSError, ValueError, KeyError):
        return None


def find_checkpoint(directory: Path, which: str) -> tuple[Path, CheckpointInfo] | None:
    """Find an undamaged checkpoint, and return its directory and metadata.

    Args:
        directory: the directory of a run's checkpoints.
        which: the step as digits, "best", or "" for the newest checkpoint. If there are no
            checkpoints yet, the result for "" is None.

    Raises:
        DataError: if there is no such checkpoint.
        DamagedCheckpointError: if the checkpoint is damaged.
    """
    complete = list_checkpoints(directory)
    if not which and not complete:
        return None
    names = {path.name: path for path in complete.values()}
    if which.isdecimal():
        path = complete.get(int(which))
    else:
        try:
            path = names.get(pointed_name(directory / (which or "latest")))
        except (OSError, ValueError):
            path = None
    if path is None:
        steps = ", ".join(map(str, complete)) or "none yet"
        raise DataError(
            f"{directory} has no checkpoint {which or 'latest'}; there are steps {steps}"
        )
    return path, _read_whole(path)


def list_checkpoints(directory: Path) -> dict[int, Path]:
    """Return the directory of each complete checkpoint by its step, in ascending order."""
    found = {
        int(match[1]): path
        for path in directory.glob("step_*")
        if (match := re.fullmatch(r"step_(\d{6,})", path.name)) is not None
    }
    return dict(sorted(found.items()))


def _seal(directory: Path, info: CheckpointInfo) -> None:
    (directory / INFO_FILE).write_text(json.dumps(asdict(info)), encoding="utf-8")
    sums = "".join(f"{hash_file(directory / name)}  {name}\n" for name in _files(directory))
    (directory / SUMS_FILE).write_text(sums, encoding="utf-8")
    for path in (*directory.rglob("*"), directory):
        sync_path(path)


def _files(directory: Path) -> list[str]:
    return sorted(
        path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()
    )


def _read_whole(path: Path) -> CheckpointInfo:
    sums = path / SUMS_FILE
    try:
        if sums.exists():
            _verify(path, sums.read_text(encoding="utf-8"))
        info = CheckpointInfo(**json.loads((path / INFO_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise DamagedCheckpointError(f"{path} cannot be read: {error}") from error
    if info.format != FORMAT:
        raise StorageError(
            f"{path} has format {info.format}, this release reads {FORMAT}; a new run starts from "
            "exported weights with --init-from"
        )
    if not sums.exists():
        raise DamagedCheckpointError(f"{sums} is missing")
    return info


def _verify(path: Path, sums: str) -> None:
    lines = [line.partition("  ") for line in sums.split("\n") if line]
    expected = {name: digest for digest, _, name in lines}
    unlisted = {*_files(path)} - expected.keys() - {SUMS_FILE}
    if unlisted or INFO_FILE not in expected:
        names = ", ".join(sorted(unlisted | ({INFO_FILE} - expected.keys())))
        raise DamagedCheckpointError(f"{path / SUMS_FILE} is damaged: it does not list {names}")
    for name, digest in expected.items():
        found = hash_file(path / name)
        if found != digest:
            raise DamagedCheckpointError(
                f"{path / name} is damaged: its BLAKE3 hash is {found}, {SUMS_FILE} has {digest}"
            )
