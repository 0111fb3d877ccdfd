"""What happened to every prompt group, on disk before anybody is told.

Two kinds of file make up the learner's journal:

* `ledger.jsonl`: one JSON object per line, appended, never rewritten. It is small, kept for good,
  and readable with any tool: anyone can check promises 1 and 2 from it alone.
* `spool/NNNNNN.bin`: the accepted groups themselves, appended; a file is deleted when every group
  in it has come to its end for good.

Records, in the order in which they happen (`kind` and its fields):

    lineage     lineage, fork_step          the learner started; the first has fork_step 0
    granted     group, attempt, worker, version; copy_of, where it repeats another attempt on a
                faster worker
    cancelled   group, attempt, worker, tokens           another attempt was first
    refused     group, attempt, worker, reason           its result; the group is granted again
    accepted    group, attempt, worker, versions, version_tokens, tokens, rewards,
                spool [file, offset, length, BLAKE3 hash of these bytes]
    trained     lineage, step, consumed_at, groups, staleness {"0": tokens, ...},
                trimmed {"17": version_tokens, ...} where a part had grown too old
    discarded   group, reason, step
    published   version, root, image_hash
    checkpoint  lineage, step
    bound       step, before, bound, cause               a decision about the bound on staleness

`version_tokens` counts the trainable tokens that each of `versions` sampled, `tokens` all of the
completions. Between acceptance and training tokens may grow too old in a group that newer weights
have continued: they are masked, and `trimmed` says what was left, for the newest of its `versions`.

Reading rule. A lineage record with fork_step f voids the trained records of older lineages with
step > f: those steps are gone. What remains is the surviving line, on which every accepted group
has at most one end, and exactly one once the run has finished. A discard is never voided.

Durability. `append` reaches the operating system at once (a kill of the process loses nothing);
`sync` reaches the disk, and an accepted group is acknowledged only after it. A torn last line, as a
power cut leaves it, is cut off when the ledger is opened again; damage anywhere else is an error.
A group in the spool is read back only if its bytes have the hash that its record has.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from blake3 import blake3

from echo.core.errors import RemoteProtocolError, StorageError
from echo.core.rollout import Group, Lineage, PolicyVersion, is_surviving
from echo.records.files import sync_path
from echo.records.run_files import MetricsRow, json_lines
from echo.wire.codec import Frame, decode_group

# What a ledger says, read back for a restart: which groups are where, and what is left to do
#
# The format, and the rule by which a new lineage voids steps of older ones, are in ledger.py.


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
class LedgerState:
    """What a ledger says, along the surviving line up to a given checkpoint."""

    lineages: tuple[Lineage, ...] = ()
    next_group_id: int = 0
    finished: set[int] = field(default_factory=set)
    """Groups that were accepted or ended."""
    granted: dict[int, int] = field(default_factory=dict)
    """Open groups that were granted: id -> number of attempts."""
    waiting: dict[int, SpoolPlace] = field(default_factory=dict)
    """Accepted groups without an end: where they lie."""
    staleness_tokens: dict[int, int] = field(default_factory=dict)


class _Reader:
    """A ledger's records, sorted by what they mean for a restart."""

    def __init__(self) -> None:
        self.history = LedgerState()
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

    def resume_from(self, step: int) -> LedgerState:
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
        history.finished = self.accepted.keys() | self.discarded
        history.granted = {g: n for g, n in history.granted.items() if g not in history.finished}
        return history


def read_state(path: Path, *, lineage: int, step: int) -> LedgerState:
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


GROUP_FILE_BYTES = 64 << 20
"""Size at which a new spool file is begun; small enough to be freed soon."""


def _tokens_by_version(group: Group) -> list[int]:
    """Return how many trainable tokens each of the group's versions sampled, in their order."""
    rows = np.concatenate(
        [rollout.policy_versions[rollout.completion_mask] for rollout in group.rollouts]
    )
    return [
        int((rows == (version.lineage, version.step)).all(1).sum()) for version in group.versions
    ]


class Ledger:
    """The learner's journal, open for writing."""

    def __init__(self, run_dir: Path, *, spool_bytes: int) -> None:
        """Open (or begin) the journal of a run, cutting off a torn last line.

        Args:
            run_dir: the run's directory.
            spool_bytes: bytes that the spool may take; beyond that storing a group fails.

        Raises:
            StorageError: if it cannot be opened, is damaged, or another process writes it.
        """
        self.path = run_dir / "ledger.jsonl"
        self.spool_dir = run_dir / "spool"
        self.spool_bytes = spool_bytes
        self._unended: dict[str, set[int]] = {}
        self._ended_at: dict[int, int] = {}
        # `sync` runs in other threads: never while the spool's file changes.
        self._spool_lock = threading.Lock()
        try:
            self.spool_dir.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = self.path.open("ab", buffering=0)
            try:
                self._take_over()
                sync_path(run_dir)
            except BaseException:
                self._file.close()
                raise
        except BlockingIOError as error:
            raise StorageError(f"{run_dir} is in use by another learner; stop it first") from error
        except OSError as error:
            raise StorageError(f"cannot open the journal in {run_dir}: {error}") from error
        spool_files = list(self.spool_dir.glob("*.bin"))
        self._spool_number = max((int(p.stem) for p in spool_files), default=0)
        self._used_bytes = sum(p.stat().st_size for p in spool_files)
        self._spool: BinaryIO | None = None

    def _take_over(self) -> None:
        """Keep other processes out, then cut off a torn last line."""
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        *_, end_offset = [0, *(offset for offset, _ in read_records(self.path))]
        self._file.truncate(end_offset)
        self._file.seek(end_offset)

    # --- records ---------------------------------------------------------------------------------

    def append(self, kind: str, **fields: Any) -> None:
        """Write one record; it survives the process, and the machine after the next `sync`."""
        record = {"kind": kind, **fields, "at": round(time.time(), 3)}
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        self._write(self._file, line, "the ledger")

    def sync(self) -> None:
        """Force everything written so far onto the disk."""
        try:
            with self._spool_lock:
                if self._spool is not None:
                    os.fdatasync(self._spool.fileno())
            os.fdatasync(self._file.fileno())
        except OSError as error:
            raise StorageError(f"cannot write the journal {self.path}: {error}") from error

    def _write(self, file: BinaryIO, data: bytes, what: str) -> None:
        start = file.tell()
        view = memoryview(data)
        try:
            while view:
                view = view[file.write(view) :]
        except OSError as error:
            # Half a record in the middle of a file would be damage; at its end it can be cut off.
            with suppress(OSError):
                file.truncate(start)
                file.seek(start)
            raise StorageError(
                f"cannot write {what} in {self.path.parent}: {error}; free disk space, then "
                "continue the run with --resume"
            ) from error

    # --- groups ----------------------------------------------------------------------------------

    def store(self, group: Group, header: Frame, arrays: Frame) -> None:
        """Write an accepted group and its record; call `sync` before acknowledging it."""
        data = len(header).to_bytes(4, "little") + bytes(header) + bytes(arrays)
        place = self._put(group.group_id, data)
        self.append(
            "accepted",
            group=group.group_id,
            attempt=group.attempt,
            worker=group.worker_id,
            versions=[[version.lineage, version.step] for version in group.versions],
            version_tokens=_tokens_by_version(group),
            tokens=group.num_tokens,
            rewards=group.rewards,
            spool=list(place),
        )

    def _put(self, group_id: int, data: bytes) -> SpoolPlace:
        if self._used_bytes + len(data) > self.spool_bytes:
            raise StorageError(
                f"the spool in {self.spool_dir} holds {self._used_bytes} of the {self.spool_bytes} "
                "bytes allowed; raise limits.spool_bytes or checkpoint more often "
                "(checkpoint.interval_steps)"
            )
        if self._spool is None or self._spool.tell() >= GROUP_FILE_BYTES:
            self._next_spool_file()
        assert self._spool is not None
        offset = self._spool.tell()
        self._write(self._spool, data, "a group")
        name = f"{self._spool_number:06d}.bin"
        self._unended.setdefault(name, set()).add(group_id)
        self._used_bytes += len(data)
        return name, offset, len(data), blake3(data).hexdigest()

    def _next_spool_file(self) -> None:
        path = self.spool_dir / f"{self._spool_number + 1:06d}.bin"
        try:
            with self._spool_lock:
                if self._spool is not None:
                    os.fdatasync(self._spool.fileno())
                    self._spool.close()
                self._spool = path.open("ab", buffering=0)
                self._spool_number += 1
            sync_path(self.spool_dir)
        except OSError as error:
            raise StorageError(f"cannot begin a spool file in {self.spool_dir}: {error}") from error

    def load(self, group_id: int, place: SpoolPlace) -> Group:
        """Read a group back from the spool, as after a restart.

        Raises:
            StorageError: if the file is missing or damaged.
        """
        name, offset, length, digest = place
        path = self.spool_dir / name
        try:
            with path.open("rb") as file:
                file.seek(offset)
                data = memoryview(file.read(length))
            found = blake3(data).hexdigest()
            if found != digest:
                raise StorageError(
                    f"group {group_id} cannot be read back from {path}: the BLAKE3 hash of the "
                    f"{length} bytes at {offset} is {found}, the ledger has {digest}"
                )
            header_bytes = int.from_bytes(data[:4], "little")
            group = decode_group(data[4 : 4 + header_bytes], data[4 + header_bytes :])
        except (OSError, RemoteProtocolError) as error:
            raise StorageError(
                f"group {group_id} cannot be read back from {path}: {error}"
            ) from error
        self._unended.setdefault(name, set()).add(group_id)
        return group

    def free_unused(self) -> None:
        """Delete the spool files in which, after a restart, no group is waiting."""
        for path in self.spool_dir.glob("*.bin"):
            if path.name not in self._unended:
                self._delete(path.name)

    def _delete(self, name: str) -> None:
        path = self.spool_dir / name
        self._used_bytes -= path.stat().st_size
        path.unlink()

    # --- ends ------------------------------------------------------------------------------------

    def trained(self, groups: list[Group], *, lineage: int, consumed_at: int) -> dict[int, int]:
        """Record the groups of one optimizer step; return trained tokens by staleness.

        Args:
            groups: what the step is made of.
            lineage: the present lineage.
            consumed_at: optimizer steps done before this one.
        """
        staleness: dict[int, int] = {}
        trimmed = {
            str(group.group_id): _tokens_by_version(group) for group in groups if group.is_trimmed
        }
        for rollout in (rollout for group in groups for rollout in group.rollouts):
            steps = rollout.policy_versions[rollout.completion_mask, 1]
            for lag, count in zip(*np.unique(consumed_at - steps, return_counts=True), strict=True):
                staleness[int(lag)] = staleness.get(int(lag), 0) + int(count)
        self.append(
            "trained",
            lineage=lineage,
            step=consumed_at + 1,
            consumed_at=consumed_at,
            groups=[group.group_id for group in groups],
            staleness={str(lag): n for lag, n in sorted(staleness.items())},
            **({"trimmed": trimmed} if trimmed else {}),
        )
        for group in groups:
            self._ended_at[group.group_id] = consumed_at + 1
        return staleness

    def discarded(self, group_id: int, reason: str, *, step: int) -> None:
        """Record that a group ends untrained; this is final."""
        self.append("discarded", group=group_id, reason=reason, step=step)
        self._ended_at[group_id] = 0

    def published(self, version: PolicyVersion, *, root: bytes, image_hash: bytes) -> None:
        """Record a publication; workers note the hash of the image that they have installed."""
        self.append(
            "published",
            version=[version.lineage, version.step],
            root=root.hex(),
            image_hash=image_hash.hex(),
        )

    def checkpointed(self, *, lineage: int, step: int, oldest_step: int) -> None:
        """Record a durable checkpoint and free the spool of what has become final.

        Args:
            lineage: the present lineage.
            step: the checkpoint's step.
            oldest_step: step of the oldest checkpoint kept: groups trained after it may be needed
                again, so their bytes stay.
        """
        self.append("checkpoint", lineage=lineage, step=step)
        for name, group_ids in list(self._unended.items()):
            group_ids -= {g for g in group_ids if self._ended_at.get(g, step + 1) <= oldest_step}
            if not group_ids and name != f"{self._spool_number:06d}.bin":
                self._delete(name)
                del self._unended[name]
        self._ended_at = {g: at for g, at in self._ended_at.items() if at > oldest_step}

    def close(self) -> None:
        """Force everything onto the disk and close the files."""
        self.sync()
        self.release()

    def release(self) -> None:
        """Close the files, if they are open, as they are: the system has what was written."""
        self._file.close()
        if self._spool is not None:
            self._spool.close()


@dataclass(slots=True)
class LedgerTotals:
    """What the ledger says about a run, in totals of its surviving line."""

    num_tokens: int = 0
    """Completion tokens of the accepted groups."""
    num_trained: int = 0
    """Groups trained on."""
    discarded: dict[str, int] = field(default_factory=dict)
    """Groups discarded, by reason."""
    staleness_tokens: dict[int, int] = field(default_factory=dict)
    """Trained tokens by staleness."""
    lineage_starts: list[float] = field(default_factory=list)
    """Unix seconds at which each lineage began."""


def totals_of(run_dir: Path) -> LedgerTotals:
    """Add up ledger.jsonl of the run in `run_dir`.

    A lineage that forks at step f voids what older lineages trained in steps after f.
    """
    path = run_dir / "ledger.jsonl"
    totals = LedgerTotals()
    trained: list[MetricsRow] = []
    for number, record in json_lines(path):
        where = f"{path}:{number}"
        try:
            _count(record, totals, trained)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StorageError(
                f"{where}: damaged {record.get('kind')!r} record: {type(error).__name__} {error}"
            ) from error
    for record in trained:
        totals.num_trained += len(record["groups"])
        for staleness, tokens in record["staleness"].items():
            known = totals.staleness_tokens.get(int(staleness), 0)
            totals.staleness_tokens[int(staleness)] = known + tokens
    return totals


def staleness_of_group(rows: tuple[MetricsRow, ...]) -> dict[int, int]:
    """Return trained tokens by staleness, summed over `staleness/hist` of metric rows."""
    totals: dict[int, int] = {}
    for row in rows:
        histogram: Mapping[str, int] = row.get("staleness/hist") or {}
        for staleness, tokens in histogram.items():
            totals[int(staleness)] = totals.get(int(staleness), 0) + tokens
    return totals


def _count(record: MetricsRow, totals: LedgerTotals, trained: list[MetricsRow]) -> None:
    """Add one ledger record to `totals`, a trained one to `trained`."""
    match record["kind"]:
        case "lineage":
            totals.lineage_starts.append(float(record["at"]))
            trained[:] = [
                earlier
                for earlier in trained
                if earlier["lineage"] >= record["lineage"] or earlier["step"] <= record["fork_step"]
            ]
        case "accepted":
            totals.num_tokens += int(record["tokens"])
        case "trained":
            trained.append(
                {
                    "lineage": int(record["lineage"]),
                    "step": int(record["step"]),
                    "groups": list(record["groups"]),
                    "staleness": {int(s): int(n) for s, n in record["staleness"].items()},
                }
            )
        case "discarded":
            reason = str(record["reason"])
            totals.discarded[reason] = totals.discarded.get(reason, 0) + 1
        case _:
            pass  # Grants, publications and checkpoints say nothing about these totals.
