"""Choice of the files to remove if a run's directory exceeds a bound.

Files that no resume needs are removed first: retired group files and images of older versions. The
oldest checkpoints are removed next. When a checkpoint is removed, the group files that only a
resume from this checkpoint needs are removed, too. The newest and the best checkpoint must stay,
and so must a checkpoint that is being evaluated, even if the directory then exceeds the bound. The
group files that a resume from a checkpoint needs stay until this checkpoint or a newer one is
removed. Other files (ledger, metrics, logs, exported weights) count towards the bound and are never
removed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCheckpoint:
    """A checkpoint on the disk."""

    step: int
    path: str
    """The directory, relative to the run's directory."""
    must_stay: bool
    """Whether this checkpoint is the newest or the best, or is being evaluated."""
    keeps_groups: bool
    """Whether to keep the groups that a resume from this checkpoint would train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """The contents of a run's directory; all paths are relative to this directory."""

    sizes: Mapping[str, int]
    """Path -> size in bytes of each entry of the directory, which is a file or a directory."""
    group_files: Mapping[str, float]
    """Path -> step of each group file, oldest first; a resume from a checkpoint before this step
    needs the file. The step is inf while a group in the file has not ended."""
    versions: Sequence[str]
    """Images of versions that only an analysis of the mismatch reads, oldest first."""
    checkpoints: Sequence[StoredCheckpoint]
    """The complete checkpoints, oldest first."""

    @property
    def num_bytes(self) -> int:
        """Bytes that the directory holds."""
        return sum(self.sizes.values())


def plan_removals(held: Holdings, *, max_bytes: int) -> list[str]:
    """Return the paths to remove, in order, so that at most `max_bytes` remain.

    If the files that must stay exceed `max_bytes`, return all other paths.
    """
    excess = held.num_bytes - max_bytes
    chosen: list[str] = []
    for path in _removable(held):
        if excess <= 0:
            break
        chosen.append(path)
        excess -= held.sizes.get(path, 0)
    return chosen


def _removable(held: Holdings) -> Iterator[str]:
    """Yield all paths that may be removed, in the order of removal."""
    groups = dict(held.group_files)
    steps = {each.step for each in held.checkpoints if each.keeps_groups}
    yield from _freed(groups, steps)
    yield from held.versions
    for checkpoint in held.checkpoints:
        if not checkpoint.must_stay:
            yield checkpoint.path
            # The best may be far older than the others: it does not hold groups in their place.
            steps = {step for step in steps if step > checkpoint.step}
            yield from _freed(groups, steps)


def _freed(groups: dict[str, float], steps: set[int]) -> Iterator[str]:
    """Yield the group files that no resume from a checkpoint of `steps` needs.

    Remove these files from `groups`. If `steps` is empty, a resume begins at step 0, so only
    retired files are yielded.
    """
    oldest_step = min(steps, default=0)
    for path in [path for path, step in groups.items() if step <= oldest_step]:
        del groups[path]
        yield path
