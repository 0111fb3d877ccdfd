"""Keep a run's directory within `limits.run_dir_bytes`.

`records/retention.py` chooses what is removed. This module measures the directory, records the
removal in the ledger, and then deletes the files. After a crash between record and deletion,
`resume.py` deletes the recorded files. So every missing file has a record.
"""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from echo.core.units import format_bytes, listed
from echo.records.ledger import GROUPS, Ledger, Removed
from echo.records.retention import Holdings, plan_removals
from echo.runtime.learner.saving.checkpoint import Checkpoints

VERSIONS = "versions"
"""Directory with images of versions, which are kept for the analysis of the mismatch."""
_VERSION = re.compile(rf"{VERSIONS}/v(\d+)_(\d+)\.safetensors")
_CHECKPOINT = re.compile(r"checkpoints/step_(\d+)")
_SPLIT = (GROUPS, "checkpoints", VERSIONS)
"""Directories whose entries are measured separately."""


class DiskLimit:
    """Removes old files from a run's directory when the directory exceeds its limit."""

    def __init__(
        self,
        ledger: Ledger,
        checkpoints: Checkpoints,
        *,
        max_bytes: int | None,
        log: logging.Logger,
    ) -> None:
        """Keep the run's directory within `max_bytes`. If `max_bytes` is None, remove nothing.

        All methods must be called in the thread that writes checkpoints.
        """
        self._ledger, self._checkpoints = ledger, checkpoints
        self._run_dir = ledger.run_dir
        self._max_bytes = max_bytes
        self._log = log
        self._has_warned = False

    def make_space(self, *, step: int) -> None:
        """Make space for a checkpoint as large as the newest one.

        Raises:
            StorageError: if the ledger cannot be written. Nothing is then deleted.
        """
        if self._max_bytes is not None:
            held = self._survey()
            newest = held.checkpoints[-1:]
            coming = sum(held.sizes.get(each.path, 0) for each in newest)
            self._remove(held, step=step, max_bytes=self._max_bytes - coming)

    def enforce(self, *, step: int) -> None:
        """Remove files until the directory is within its limit. If this is impossible, warn once.

        Raises:
            StorageError: if the ledger cannot be written. Nothing is then deleted.
        """
        if self._max_bytes is None:
            return
        held = self._survey()
        left_bytes = held.num_bytes - self._remove(held, step=step, max_bytes=self._max_bytes)
        is_above = left_bytes > self._max_bytes
        if is_above and not self._has_warned:
            self._log.warning("%s", self._describe(self._survey()))
        self._has_warned = is_above

    def _survey(self) -> Holdings:
        sizes = measure(self._run_dir)
        found = {
            (int(match[1]), int(match[2])): path
            for path in sizes
            if (match := _VERSION.fullmatch(path)) is not None
        }
        return Holdings(
            sizes=sizes,
            group_files=self._ledger.group_files(),
            versions=[found[version] for version in sorted(found)[:-1]],
            checkpoints=self._checkpoints.stored(),
        )

    def _remove(self, held: Holdings, *, step: int, max_bytes: int) -> int:
        """Reduce the directory to `max_bytes`, and return the number of freed bytes."""
        paths = plan_removals(held, max_bytes=max_bytes)
        if not paths:
            return 0
        freed_bytes = sum(held.sizes.get(path, 0) for path in paths)
        bound = f"limits.run_dir_bytes = {format_bytes(self._max_bytes or 0)}"
        self._ledger.remove(
            Removed(step=step, cause=bound, paths=tuple(paths), freed_bytes=freed_bytes)
        )
        for path in paths:
            delete_entry(self._run_dir, path)
        self._checkpoints.removed_step = last_step(paths, default=self._checkpoints.removed_step)
        self._log.info("removed %s, %s, for %s", listed(paths), format_bytes(freed_bytes), bound)
        return freed_bytes

    def _describe(self, held: Holdings) -> str:
        parts: Counter[str] = Counter()
        for path, num_bytes in held.sizes.items():
            parts[path.partition("/")[0].partition(".")[0]] += num_bytes  # all files of the ledger
        largest = listed(f"{name} {format_bytes(size)}" for name, size in parts.most_common())
        return (
            f"{self._run_dir} holds {format_bytes(held.num_bytes)}, above limits.run_dir_bytes = "
            f"{format_bytes(self._max_bytes or 0)}, and nothing more may be removed "
            f"({largest}); raise limits.run_dir_bytes"
        )


def measure(run_dir: Path) -> dict[str, int]:
    """Return the size in bytes of each entry of a run's directory, by relative path.

    The size of a directory includes all its files, but not those behind a symbolic link, which may
    lead to another disk. In the directories of groups, checkpoints and
    versions, each entry is listed separately.
    """
    sizes: Counter[str] = Counter()
    for folder, _, names in os.walk(run_dir):
        inside = Path(folder).relative_to(run_dir).parts
        for name in names:
            parts = (*inside, name)
            depth = 2 if parts[0] in _SPLIT else 1
            try:
                size = Path(folder, name).lstat().st_size
            except FileNotFoundError:  # deleted meanwhile
                continue
            sizes["/".join(parts[:depth])] += size
    return dict(sizes)


def last_step(paths: Iterable[str], *, default: int = -1, before: float = math.inf) -> int:
    """Return the largest checkpoint step in `paths` that is below `before`.

    Without such a checkpoint, return `default`.
    """
    matches = (_CHECKPOINT.fullmatch(path) for path in paths)
    steps = [int(match[1]) for match in matches if match is not None]
    return max((step for step in steps if step < before), default=default)


def delete_entry(run_dir: Path, path: str) -> None:
    """Delete a checkpoint or the image of a version. The ledger deletes group files.

    A failure is ignored: the entry stays, and its size still counts.
    """
    if _CHECKPOINT.fullmatch(path):
        shutil.rmtree(run_dir / path, ignore_errors=True)
    elif _VERSION.fullmatch(path):
        with suppress(OSError):
            (run_dir / path).unlink()
