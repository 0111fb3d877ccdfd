"""Choice of what is removed if a run's directory exceeds a bound.

First goes what no resume needs: retired group files and images of older versions. Then go the
oldest checkpoints, each with the group files that only a resume from this checkpoint needs. What
must stay is never chosen, even if the directory then exceeds the bound: the newest and the best
checkpoint, and the group files that a resume needs from a checkpoint newer than those removed. The
files that are not listed here (ledger, metrics, logs, exported weights) only count.
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
    """Whether it is the newest or the best, or an evaluation of it is under way."""
    keeps_groups: bool
    """Whether the groups that a resume from it trains are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holdings:
    """What a run's directory holds; all paths are relative to this directory."""

    sizes: Mapping[str, int]
    """Path -> bytes of every file, directory of a checkpoint, or other directory."""
    group_files: Mapping[str, float]
    """Path -> step of each group file, oldest first; a resume from a checkpoint before this step
    needs the file. The step is inf while a group in the file has not ended."""
    versions: Sequence[str]
    """Images of older versions, which only an analysis of the mismatch reads, oldest first."""
    checkpoints: Sequence[StoredCheckpoint]
    """The complete checkpoints, oldest first."""

    @property
    def num_bytes(self) -> int:
        """Bytes that the directory holds."""
        return sum(self.sizes.values())


def plan_removals(held: Holdings, *, max_bytes: int) -> list[str]:
    """Return the paths to remove, in order, so that at most `max_bytes` are left.

    If what must stay exceeds `max_bytes`, everything else is returned.
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
    """Yield all that may be removed, in the order of removal."""
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
    """Yield the group files that no resume from a checkpoint of `steps` needs; drop them.

    Without a checkpoint a resume begins again at step 0.
    """
    oldest_step = min(steps, default=0)
    for path in [path for path, step in groups.items() if step <= oldest_step]:
        del groups[path]
        yield path
