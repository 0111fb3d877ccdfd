"""What a ledger says, read back for a restart: which groups are where, and what is left to do.

The format, and the rule by which a new lineage voids steps of older ones, are in ledger.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from echo.core.errors import StorageError
from echo.core.rollout import Lineage, PolicyVersion, is_surviving

SpoolPlace = tuple[str, int, int, str]
"""(file name, offset, length, BLAKE3 hash in hexadecimal digits) of a group in the spool.

The length of its header is stored with it.
"""


def read_records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (byte offset of the line's end, record) for every whole line of a ledger.

    Raises:
        StorageError: if a line other than a torn last one is damaged.
    """
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            offset += len(line)
            try:
                record = json.loads(line)
                record["kind"]
            except (ValueError, TypeError, KeyError) as error:
                raise _damaged(path, f"line {number}", error) from error
            yield offset, record


def _damaged(path: Path, where: str, error: Exception) -> StorageError:
    return StorageError(
        f"{path}: {where} is damaged ({error!r}); restore the file from a copy, or start a new run "
        "from the last checkpoint with --init-from"
    )


@dataclass(slots=True)
class History:
    """What a ledger says, along the surviving line up to a given checkpoint."""

    lineages: tuple[Lineage, ...] = ()
    next_group_id: int = 0
    settled: set[int] = field(default_factory=set)
    """Groups that were accepted or ended."""
    granted: dict[int, int] = field(default_factory=dict)
    """Open groups that were granted: id -> number of attempts."""
    waiting: dict[int, SpoolPlace] = field(default_factory=dict)
    """Accepted groups without an end: where they lie."""
    staleness_tokens: dict[int, int] = field(default_factory=dict)


class _Reader:
    """A ledger's records, sorted by what they mean for a restart."""

    def __init__(self) -> None:
        self.history = History()
        self.lineages: list[Lineage] = []
        self.accepted: dict[int, SpoolPlace] = {}
        self.discarded: set[int] = set()
        self.trained: list[tuple[PolicyVersion, list[int], dict[str, int]]] = []

    def take(self, record: dict[str, Any]) -> None:
        """Note one record; an unknown kind, as of a later release, means nothing here."""
        match record["kind"]:
            case "lineage":
                self.lineages.append(Lineage(record["lineage"], record["fork_step"]))
            case "granted":
                history, group_id, attempt = self.history, record["group"], record["attempt"]
                history.granted[group_id] = max(history.granted.get(group_id, 0), attempt + 1)
                history.next_group_id = max(history.next_group_id, group_id + 1)
            case "accepted":
                file_name, offset, length, digest = record["spool"]
                self.accepted[record["group"]] = (file_name, offset, length, digest)
            case "discarded":
                # One whose prompt cannot be used was never granted.
                history, group_id = self.history, record["group"]
                history.next_group_id = max(history.next_group_id, group_id + 1)
                self.discarded.add(group_id)
            case "trained":
                version = PolicyVersion(record["lineage"], record["step"])
                self.trained.append((version, record["groups"], record["staleness"]))

    def resume_from(self, step: int) -> History:
        """Return what is left to do after going back to the checkpoint of `step`."""
        history = self.history
        # The new lineage forks off at the checkpoint, so later steps of its own are void as well.
        newest = self.lineages[-1].lineage if self.lineages else 0
        forks = [*self.lineages, Lineage(newest + 1, step)]
        trained: set[int] = set()
        tokens = history.staleness_tokens
        for version, groups, staleness in self.trained:
            if is_surviving(version, forks):
                trained.update(groups)
                for lag, num_tokens in staleness.items():
                    tokens[int(lag)] = tokens.get(int(lag), 0) + num_tokens
        ended = trained | self.discarded
        history.lineages = tuple(self.lineages)
        history.waiting = {g: place for g, place in self.accepted.items() if g not in ended}
        history.settled = self.accepted.keys() | self.discarded
        history.granted = {g: n for g, n in history.granted.items() if g not in history.settled}
        return history


def read_history(path: Path, *, lineage: int, step: int) -> History:
    """Read what is left to do after going back to the checkpoint of `step` in `lineage`.

    Args:
        path: the ledger.
        lineage: lineage of the checkpoint.
        step: its step; trained records after it are void.

    Raises:
        StorageError: if the ledger is damaged, or a later lineage has abandoned the checkpoint.
    """
    reader = _Reader()
    for end_offset, record in read_records(path):
        try:
            reader.take(record)
        except (ValueError, TypeError, KeyError) as error:
            where = f"the {record['kind']!r} record that ends at byte {end_offset}"
            raise _damaged(path, where, error) from error
    if not is_surviving(PolicyVersion(lineage, step), reader.lineages):
        raise StorageError(
            f"the checkpoint of step {step} in lineage {lineage} is not on the run's history any "
            "more: the run was resumed from an earlier one since; write the name of another one "
            "into checkpoints/latest"
        )
    return reader.resume_from(step)
