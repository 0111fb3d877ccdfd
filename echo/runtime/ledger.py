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
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from blake3 import blake3

from echo.core.errors import RemoteProtocolError, StorageError
from echo.core.rollout import Group, PolicyVersion
from echo.runtime.durable import sync_path
from echo.runtime.history import SpoolPlace, read_records
from echo.wire.codec import Frame, decode_group

SPOOL_FILE_BYTES = 64 << 20
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
        if self._spool is None or self._spool.tell() >= SPOOL_FILE_BYTES:
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
