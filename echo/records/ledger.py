"""The learner's ledger: records of what happened to every group of prompts.

A record is on the disk before any node is informed of the event. The run's directory contains these
files (format `FORMAT`):

* `ledger.sqlite`, small and never deleted. The table `records` has a row for each event: `seq` (1,
  2, 3, ... without a gap), `body` and `hash`. `body` is a JSON object: `kind`, `at` in Unix
  seconds, and the fields of the record. This module defines a record class for each kind. `hash` is
  BLAKE3 of seq as 8 bytes, little-endian, followed by body. `kind` and `at` are columns too.
  `PRAGMA user_version` is the format.
* `ledger.head`: the number of rows on the disk after the last `sync`, in decimal digits. The number
  is outside the database. So missing rows are noticed if the write-ahead log was damaged, or if an
  older database was copied into the directory.
* `groups/NNNNNN.bin`: the accepted groups, appended. Each `accepted` record has the place of its
  group and the hash of its bytes. A file retires once all its groups have ended and no resume can
  void their ends. The newest retired files, up to KEPT_BYTES in all, are kept for people to read;
  older files are removed. File numbers are never reused.
* `ledger.lock`: the learner that writes the ledger locks this file, and writes its process id into
  it.

Other programs can read the table, or the JSON lines of `echo-rl ledger RUN`.

Files are removed from the run's directory to keep the directory within a bound. A `removed` record
names these files, and is synced before the files are deleted. If a crash prevents the deletion, the
next resume deletes the files.

Reading rule. A lineage record with fork_step f voids the trained records of older lineages with
step > f. These steps were abandoned. The remaining records are the surviving line. On this line
every accepted group has at most one end (trained or discarded), and exactly one after the run has
finished. A discard is never voided.

Durability. The event loop never waits for the disk: it appends to a queue in memory. One other
thread at a time writes the queue in order, in one transaction (`commit`). After `commit` the
records survive a kill of the process (write-ahead log, synchronous = NORMAL). After `sync` the
records also survive a power cut (FULL). So a record is committed before other nodes are informed of
the event. A record is synced before another copy of the same data is dropped: a worker's
acknowledged group, or a checkpoint that a newer checkpoint replaces. After a kill or a power cut
the ledger has a prefix of the committed records, which includes all synced records. All processes
that have the ledger open share memory for the write-ahead log. So on a network volume these
processes must run on the learner's machine.
"""

from __future__ import annotations

import math
import os
import sqlite3
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import msgspec
import numpy as np
from blake3 import blake3

from echo.core.errors import DataError, RemoteProtocolError, StorageError
from echo.core.records import Cancelled, Discarded, Granted, Record, Refused
from echo.core.rollout import Group, Lineage, PolicyVersion, is_surviving
from echo.core.units import format_bytes
from echo.records.files import is_locked, lock_directory, sync_path, write_file
from echo.wire.codec import Frame, decode_group

FORMAT = 5
"""Number of the ledger's format, raised with every new kind of record."""
FILE = "ledger.sqlite"
HEAD = "ledger.head"
HEAD_FORMAT = b"%020d\n"
"""Format of the number in `ledger.head`. All numbers have the same length, so a number can be
overwritten in place.
"""
GROUPS = "groups"
GROUP_FILE_BYTES = 64 << 20
"""Size, in bytes, at which the next group file begins. The size is small, so that files can be
deleted early.
"""
KEPT_BYTES = 256 << 20
"""Largest total size of the retired group files that are kept. No resume needs these files, but
people may want to read their rollouts."""
BUSY_S = 30.0
"""Seconds to wait for a lock of SQLite, which readers hold for milliseconds."""
LOG_RECORDS = 2000
"""Number of records after which the write-ahead log is moved into the database. The log then has
some MB.
"""
READ_ROWS = 2000
"""Number of rows per query. A small number limits the time for which a reader holds a lock."""

_SQLITE_ERRORS = sqlite3.Error, UnicodeDecodeError
"""Errors that reading the database can raise; UnicodeDecodeError if SQLite's text is damaged."""
_SCHEMA = """
CREATE TABLE records (
    seq INTEGER PRIMARY KEY,
    body TEXT NOT NULL,
    hash BLOB NOT NULL,
    kind TEXT GENERATED ALWAYS AS (json_extract(body, '$.kind')) VIRTUAL,
    at REAL GENERATED ALWAYS AS (json_extract(body, '$.at')) VIRTUAL
);
"""


# --- records -------------------------------------------------------------------------------------


class Began(Record, tag="lineage"):
    """The learner started, which began a new lineage of the run.

    `fork_step` is the step from which the lineage continues; 0 for the first lineage.
    """

    lineage: int
    fork_step: int


class Place(msgspec.Struct, frozen=True, array_like=True):
    """The place of a group's bytes. In JSON, a place is an array of its four fields."""

    file: str
    """Name of the group file."""
    offset: int
    length: int
    hash: str
    """BLAKE3 hash of the bytes, in hexadecimal digits."""


class Accepted(Record, tag="accepted"):
    """A worker's group was accepted; the bytes of the group are in a group file."""

    group: int
    attempt: int
    worker: str
    versions: tuple[PolicyVersion, ...]
    version_tokens: tuple[int, ...]
    """For each of `versions`, the number of trainable tokens when the group was accepted."""
    tokens: int
    """Number of completion tokens, masked tokens included."""
    rewards: tuple[float, ...]
    place: Place


class Trained(Record, tag="trained"):
    """An optimizer step was made."""

    lineage: int
    step: int
    consumed_at: int
    """Number of optimizer steps done before this step."""
    groups: tuple[int, ...]
    staleness: dict[int, int]
    """Number of trained tokens by staleness."""
    trimmed: dict[int, tuple[int, ...]] = msgspec.field(default_factory=dict)
    """For each group whose stale tokens were masked: the numbers of tokens that were trained.

    A group has one number for each version that sampled a trained token.
    """


class Published(Record, tag="published"):
    """A version was published."""

    version: PolicyVersion


class Sealed(Record, tag="sealed"):
    """A published version was hashed. Its hashes can be compared with those that workers record."""

    version: PolicyVersion
    root: str
    """The root hash of the version's manifest, in hexadecimal digits."""
    image_hash: str
    """The hash of the version's image, in hexadecimal digits."""


class Checkpointed(Record, tag="checkpoint"):
    """A checkpoint was completed."""

    lineage: int
    step: int


class Finished(Record, tag="finished"):
    """The run has finished, and all nodes were informed of the end.

    All steps are made, saved and exported.
    """

    step: int
    """Number of optimizer steps that the run has made."""


class Removed(Record, tag="removed"):
    """Files are about to be deleted, so that the run's directory stays within a bound."""

    step: int
    """Number of optimizer steps made before the removal."""
    cause: str
    """The bound that made the removal necessary."""
    paths: tuple[str, ...]
    """The files, and the directories of checkpoints, relative to the run's directory."""
    freed_bytes: int


class BoundChanged(Record, tag="bound"):
    """The learner changed the bound on staleness."""

    step: int
    before: int
    bound: int
    cause: str


class RolledBack(Record, tag="rollback"):
    """The run goes back to a checkpoint; the record of a new lineage follows."""

    step: int
    """Number of optimizer steps made before the rollback."""
    to_step: int
    """Step of the checkpoint; 0 if the run begins again from its initial weights."""
    number: int
    """How often the run has rolled back, including this rollback."""
    cause: str


class Diverged(Record, tag="diverged"):
    """The policy or the weights have diverged.

    The divergence ends the run, and the learner tells the workers to leave. The record of a
    checkpoint may follow. If the run is resumed, the record of a new lineage follows.
    """

    step: int
    cause: str


class ActivationChanged(Record, tag="activation"):
    """The set of active workers changed."""

    step: int
    cause: str
    activated: tuple[str, ...]
    deactivated: tuple[str, ...]
    numbers: dict[str, Any] = msgspec.field(default_factory=dict)
    """The numbers on which the decision was based."""


class Cost(Record, tag="cost"):
    """The costs of the run up to a step, from which a resumed run continues."""

    step: int
    total: float
    """$ spent since the start of the run."""
    per_h: float
    """$ per hour at the time of this step."""


class Operated(Record, tag="operated"):
    """An operator has changed the run, with `echo-rl ctl` or in `echo-rl top`."""

    step: int
    by: str
    """The name that the operator stated."""
    act: str
    subject: str
    """The node, or the key of the setting, that the operation concerns; empty for the run."""
    value: str
    """The value of a setting."""
    outcome: str
    """What was done, in words."""


AnyRecord = (
    Began | Granted | Cancelled | Refused | Accepted | Trained | Discarded | Published | Sealed
    | Checkpointed | Finished | BoundChanged | RolledBack | ActivationChanged | Cost
    | Operated | Removed | Diverged
)  # fmt: skip


_encode = msgspec.json.Encoder().encode
_decoder = msgspec.json.Decoder(AnyRecord)


def _hash(seq: int, body: bytes) -> bytes:
    return blake3(seq.to_bytes(8, "little") + body).digest()


def _tokens_by_version(group: Group) -> tuple[int, ...]:
    """Return how many trainable tokens each of `group.versions` sampled."""
    rows = np.concatenate(
        [rollout.policy_versions[rollout.completion_mask] for rollout in group.rollouts]
    )
    return tuple(
        int((rows == (version.lineage, version.step)).all(1).sum()) for version in group.versions
    )


def staleness_of_groups(groups: Iterable[Group], *, consumed_at: int) -> dict[int, int]:
    """Return staleness -> number of trained tokens with this staleness, over all groups.

    `consumed_at` is the number of optimizer steps done before the step that trains the groups.
    """
    steps = np.concatenate(
        [r.policy_versions[r.completion_mask, 1] for group in groups for r in group.rollouts]
    )
    counts = np.bincount(consumed_at - steps)
    return {int(lag): int(counts[lag]) for lag in np.flatnonzero(counts)}


# --- writing -------------------------------------------------------------------------------------


class LedgerQueue(ABC):
    """A queue of records and groups, and the interface of its storage.

    `append` and `store` only fill the queue and may be called in the event loop. The other methods
    access the disk, one at a time, so only threads that may wait for the disk call these methods.
    """

    def __init__(self, run_dir: Path, *, spool_bytes: float) -> None:
        """Start with an empty queue; `store` fails if group files exceed `spool_bytes`."""
        self.run_dir = run_dir
        self.spool_bytes = spool_bytes
        self.num_records = 0
        self._queue: list[tuple[Any, Sequence[Frame]]] = []
        self._queue_lock = threading.Lock()  # for the queue and the count of bytes
        self._write_lock = threading.Lock()  # for all state of `_write_queue`
        self._used_bytes = 0

    def now(self) -> float:
        """Return the present time for records, in Unix seconds."""
        return time.time()

    @property
    def has_queued(self) -> bool:
        """Whether the queue has records that the next `commit` or `sync` would write."""
        return bool(self._queue)

    def append(self, record: AnyRecord) -> None:
        """Append a record to the queue; the next `commit` or `sync` writes it."""
        with self._queue_lock:
            self._queue.append((self._stamped(record), ()))

    def store(self, group: Group, header: Frame, arrays: Frame) -> None:
        """Append an accepted group to the queue; the next `commit` or `sync` writes it.

        The group may be acknowledged to its worker after the next `sync`. `header` and `arrays` are
        the received frames, which must not change before they are written.

        Raises:
            StorageError: if the group files would take more than `spool_bytes`.
        """
        parts = (len(header).to_bytes(4, "little"), header, arrays)
        length = sum(map(len, parts))
        record = Accepted(
            group=group.group_id,
            attempt=group.attempt,
            worker=group.worker_id,
            versions=group.versions,
            version_tokens=_tokens_by_version(group),
            tokens=group.num_tokens,
            rewards=tuple(group.rewards),
            place=Place("", 0, length, ""),
        )
        with self._queue_lock:
            if self._used_bytes + length > self.spool_bytes:
                raise StorageError(
                    f"the spool in {self.run_dir / GROUPS} holds {self._used_bytes} of the "
                    f"{self.spool_bytes} bytes allowed; raise limits.spool_bytes or checkpoint "
                    "more often (checkpoint.interval_steps)"
                )
            self._used_bytes += length
            self._queue.append((self._stamped(record), parts))

    def _stamped(self, record: Any) -> Any:
        return record if record.at else msgspec.structs.replace(record, at=round(self.now(), 3))

    def commit(self) -> None:
        """Write the queue to the disk; its records then survive a kill of the process.

        Raises:
            StorageError: if writing fails. The queue is kept, and none of its records is on the
                disk.
        """
        with self._write_lock:
            self._write_queue(durably=False)

    def sync(self) -> None:
        """Write the queue to the disk; all records then survive a power cut.

        Raises:
            StorageError: if writing fails, as in `commit`.
        """
        with self._write_lock:
            self._write_queue(durably=True)

    def trained(self, groups: Sequence[Group], *, lineage: int, consumed_at: int) -> dict[int, int]:
        """Commit the record of an optimizer step that has trained these groups.

        Return staleness -> number of trained tokens.
        """
        staleness = staleness_of_groups(groups, consumed_at=consumed_at)
        self.append(
            Trained(
                lineage=lineage,
                step=consumed_at + 1,
                consumed_at=consumed_at,
                groups=tuple(group.group_id for group in groups),
                staleness=staleness,
                trimmed={g.group_id: _tokens_by_version(g) for g in groups if g.is_trimmed},
            )
        )
        self.commit()
        return staleness

    @abstractmethod
    def records(self) -> Iterator[AnyRecord]:
        """Yield the records that have been written, oldest first."""

    @abstractmethod
    def checkpointed(self, *, lineage: int, step: int, oldest_step: int) -> None:
        """Sync the record of a checkpoint, and drop the bytes of groups no longer needed.

        `oldest_step` is the step of the oldest kept checkpoint. A group is needed until it has
        ended. A group that was trained after `oldest_step` stays needed, because a resume from the
        oldest checkpoint would train the group again.
        """

    @abstractmethod
    def load(self, group_id: int, place: Place) -> Group:
        """Read a group from the disk after the learner has restarted.

        Raises:
            StorageError: if the group is missing or damaged.
        """

    @abstractmethod
    def hold(self, group_id: int, place: Place, *, step: int) -> None:
        """After the learner has restarted, keep a group that was trained in `step`.

        A resume from a checkpoint before `step` would train the group again.
        """

    @abstractmethod
    def free_unused(self, *, step: int) -> None:
        """After a restart at `step`, drop the bytes of groups that were neither loaded nor held."""

    @abstractmethod
    def delete_again(self, paths: Iterable[str]) -> None:
        """Delete the group files among `paths`, except files with needed groups.

        A group is needed if `load` or `hold` was called for it. `paths` come from `removed`
        records. A crash may have prevented the deletion.
        """

    @abstractmethod
    def close(self) -> None:
        """Write the queue to the disk and close the files."""

    @abstractmethod
    def release(self) -> None:
        """Close the files without writing the queue, whose records are lost."""

    @abstractmethod
    def _write_queue(self, *, durably: bool) -> None:
        """Write the queue to the disk; the caller holds the write lock.

        If `durably`, all records then survive a power cut.
        """


class Ledger(LedgerQueue):
    """The ledger of a run on the disk, open for writing."""

    def __init__(self, run_dir: Path, *, spool_bytes: int) -> None:
        """Open or create the ledger of a run.

        Raises:
            StorageError: if the ledger cannot be opened, is damaged, has another format, or is open
                in another learner process.
        """
        super().__init__(run_dir, spool_bytes=spool_bytes)
        self.path = run_dir / FILE
        self._groups_dir = run_dir / GROUPS
        self._unended: dict[str, set[int]] = {}
        self._ended_at: dict[int, int] = {}
        self._kept: dict[str, int] = {}
        """Retired group files, which no resume needs: path -> bytes, oldest first."""
        self._file: BinaryIO | None = None
        self._is_durable = True
        self._level = ""
        self._num_logged = 0
        try:
            self._groups_dir.mkdir(parents=True, exist_ok=True)
            with ExitStack() as undo:
                self._lock_file = lock_run(run_dir)
                undo.callback(os.close, self._lock_file)
                self._database = self._open_database()
                undo.callback(self._database.close)
                self.num_records = _count_records(self._database, run_dir)
                last_number = _last_file_number(self._database, run_dir)
                if not (run_dir / HEAD).exists():
                    write_file(run_dir / HEAD, HEAD_FORMAT % 0)
                self._head = os.open(run_dir / HEAD, os.O_WRONLY)
                undo.callback(os.close, self._head)
                self._empty_log()
                undo.pop_all()
        except (OSError, *_SQLITE_ERRORS) as error:
            raise StorageError(f"cannot open the ledger in {run_dir}: {error}") from error
        files = self._group_files()
        self._file_number = max([last_number, *(int(path.stem) for path in files)])
        self._used_bytes = sum(path.stat().st_size for path in files)

    def _group_files(self) -> set[Path]:
        found = self._groups_dir.glob("*.bin")
        return {p for p in found if p.stem.isdecimal() and p.stem == f"{int(p.stem):06d}"}

    def _open_database(self) -> sqlite3.Connection:
        """Connect to the database with a write-ahead log; create the table if it is missing.

        Raises:
            StorageError: if the volume does not support a write-ahead log.
        """
        try:
            database = _connect_to_write(self.path)
        except sqlite3.OperationalError as error:
            raise StorageError(
                f"cannot open {self.path}: SQLite's write-ahead log does not work there ({error}); "
                "set run.dir to a directory on a disk of this machine"
            ) from error
        if not database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            # In one transaction, since a kill between the two would leave a ledger without its
            # format.
            database.executescript(f"BEGIN;{_SCHEMA}PRAGMA user_version = {FORMAT};COMMIT;")
            sync_path(self.run_dir)
        return database

    def records(self) -> Iterator[AnyRecord]:
        """Yield the records that have been written, oldest first, as `read_records` does."""
        return read_records(self.run_dir)

    # --- what the disk thread does ---------------------------------------------------------------

    def checkpointed(self, *, lineage: int, step: int, oldest_step: int) -> None:
        """Sync the record of a checkpoint; retire the group files that are no longer needed.

        A file is no longer needed if all its groups have ended, and no group was trained after
        `oldest_step`.
        """
        self.append(Checkpointed(lineage=lineage, step=step))
        with self._write_lock:
            self._write_queue(durably=True)
            with _named(self.run_dir):
                self._empty_log()
                for name, group_ids in list(self._unended.items()):
                    group_ids -= {
                        g for g in group_ids if self._ended_at.get(g, step + 1) <= oldest_step
                    }
                    if not group_ids:
                        self._retire(name)
                self._drop_retired(step=step)
            self._ended_at = {g: at for g, at in self._ended_at.items() if at > oldest_step}

    def _write_queue(self, *, durably: bool) -> None:
        with self._queue_lock:
            queue, self._queue = self._queue, []
        if not queue and (self._is_durable or not durably):
            return
        try:
            with _named(self._groups_dir, "groups"):
                records = [
                    msgspec.structs.replace(record, place=self._put(parts)) if parts else record
                    for record, parts in queue
                ]
                if durably and self._file is not None:
                    os.fdatasync(self._file.fileno())
            with _named(self.run_dir):
                self._write_rows(records, durably=durably)
        except StorageError:
            self._leave_file()  # the file has bytes of this batch without a record
            with self._queue_lock:
                self._queue = queue + self._queue
            raise
        self._is_durable = durably
        for record in records:
            self._note(record)
        if self._num_logged > LOG_RECORDS:
            with _named(self.run_dir):
                self._empty_log()

    def _put(self, parts: Sequence[Frame]) -> Place:
        if self._file is None or self._file.tell() >= GROUP_FILE_BYTES:
            self._next_file()
        file = self._file
        assert file is not None
        offset, digest = file.tell(), blake3()
        for part in parts:
            digest.update(part)
            view = memoryview(part)
            while view:
                view = view[file.write(view) :]
        return Place(self._file_name, offset, file.tell() - offset, digest.hexdigest())

    def _next_file(self) -> None:
        if self._file is not None:
            os.fdatasync(self._file.fileno())
            self._leave_file()
        self._file = (self._groups_dir / f"{self._file_number + 1:06d}.bin").open("xb", buffering=0)
        self._file_number += 1
        sync_path(self._groups_dir)

    def _leave_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    @property
    def _file_name(self) -> str:
        return f"{self._file_number:06d}.bin"

    def _write_rows(self, records: list[AnyRecord], *, durably: bool) -> None:
        rows = []
        for seq, record in enumerate(records, self.num_records + 1):
            body = _encode(record)
            rows.append((seq, body.decode(), _hash(seq, body)))
        if rows:
            with self._transaction(durably=durably):
                self._database.executemany(
                    "INSERT INTO records (seq, body, hash) VALUES (?, ?, ?)", rows
                )
        else:
            sync_path(self.path.with_name(f"{FILE}-wal"))
        self.num_records += len(rows)
        self._num_logged += len(rows)
        if durably:
            # The number is written last: if it preceded its rows, a crash would look like a loss of
            # rows.
            os.pwrite(self._head, HEAD_FORMAT % self.num_records, 0)

    def _empty_log(self) -> None:
        """Move the write-ahead log into the database if no other process is reading."""
        self._database.execute("PRAGMA busy_timeout = 100")
        self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._database.execute(f"PRAGMA busy_timeout = {int(BUSY_S * 1000)}")
        self._num_logged = 0

    @contextmanager
    def _transaction(self, *, durably: bool) -> Iterator[None]:
        level = "FULL" if durably else "NORMAL"
        if level != self._level:
            self._database.execute(f"PRAGMA synchronous = {level}")
            self._level = level
        with _transaction(self._database):
            yield

    def _note(self, record: AnyRecord) -> None:
        """Remember a group's file, or the step at which the group ended."""
        match record:
            case Accepted():
                self._unended.setdefault(record.place.file, set()).add(record.group)
            case Trained():
                self._ended_at.update(dict.fromkeys(record.groups, record.step))
            case Discarded():
                self._ended_at[record.group] = 0

    # --- groups after a restart ------------------------------------------------------------------

    def load(self, group_id: int, place: Place) -> Group:
        """Read a group from its file after the learner has restarted.

        Raises:
            StorageError: if the group's file is missing or damaged.
        """
        group = read_group(self.run_dir, group_id, place)
        self._unended.setdefault(place.file, set()).add(group_id)
        return group

    def hold(self, group_id: int, place: Place, *, step: int) -> None:
        """Keep a group that was trained in `step`; do nothing if its file was removed."""
        if not (self._groups_dir / place.file).exists():
            return
        self._unended.setdefault(place.file, set()).add(group_id)
        self._ended_at[group_id] = step

    def free_unused(self, *, step: int) -> None:
        """After a restart, retire each group file of which no group was loaded or held."""
        with self._write_lock, _named(self.run_dir):
            for path in sorted(self._group_files()):
                if path.name not in self._unended and path.name not in self._kept:
                    self._retire(path.name)
            self._drop_retired(step=step)

    # --- removal ---------------------------------------------------------------------------------

    def group_files(self) -> dict[str, float]:
        """Return path -> step of each complete group file, oldest first.

        Only a resume from a checkpoint before this step needs the file. The step is inf while a
        group of the file has not ended, and 0 for retired files. Paths are relative to the run's
        directory.
        """
        with self._write_lock:
            steps = dict.fromkeys(self._kept, 0.0)
            for name, group_ids in self._unended.items():
                if self._file is None or name != self._file_name:
                    steps[name] = max(self._ended_at.get(group, math.inf) for group in group_ids)
            return {f"{GROUPS}/{name}": steps[name] for name in sorted(steps)}

    def remove(self, record: Removed) -> None:
        """Sync the record of a removal, then delete the group files that it names.

        The caller then deletes all other files that the record names.

        Raises:
            StorageError: if the record cannot be written; then nothing may be deleted.
        """
        self.append(record)
        with self._write_lock, _named(self.run_dir):
            self._write_queue(durably=True)
            for path in record.paths:
                self._delete(path)

    def delete_again(self, paths: Iterable[str]) -> None:
        """Delete the group files among `paths`, except files with needed groups."""
        with self._write_lock, _named(self.run_dir):
            there = {f"{GROUPS}/{path.name}" for path in self._group_files()}
            for path in there.intersection(paths):
                if path.rpartition("/")[2] not in self._unended:
                    self._delete(path)

    def _delete(self, path: str) -> None:
        """Delete the group file at `path`, relative to the run's directory.

        Ignore paths of other files.
        """
        folder, _, name = path.rpartition("/")
        if folder != GROUPS:
            return
        num_bytes = self._kept.pop(name, None)
        if num_bytes is None:
            self._unended.pop(name, None)
            with self._queue_lock:
                self._used_bytes -= (self._groups_dir / name).stat().st_size
        (self._groups_dir / name).unlink()

    def _retire(self, name: str) -> None:
        """Mark a group file as retired, so that it no longer counts towards `spool_bytes`."""
        num_bytes = (self._groups_dir / name).stat().st_size
        if name == self._file_name:
            self._leave_file()
        self._unended.pop(name, None)
        with self._queue_lock:
            self._used_bytes -= num_bytes
        self._kept[name] = num_bytes

    def _drop_retired(self, *, step: int) -> None:
        """Remove the oldest retired files, so that at most KEPT_BYTES remain."""
        excess = sum(self._kept.values()) - KEPT_BYTES
        names: list[str] = []
        for name, num_bytes in self._kept.items():
            if excess <= 0:
                break
            names.append(name)
            excess -= num_bytes
        if not names:
            return
        self.append(
            Removed(
                step=step,
                cause=f"{format_bytes(KEPT_BYTES)} of rollouts that no resume needs are kept",
                paths=tuple(f"{GROUPS}/{name}" for name in names),
                freed_bytes=sum(self._kept[name] for name in names),
            )
        )
        self._write_queue(durably=True)
        for name in names:
            self._delete(f"{GROUPS}/{name}")

    # --- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Sync the queue, close the files, and leave a database without a log file."""
        with self._write_lock:
            self._write_queue(durably=True)
            with _named(self.run_dir):
                self._empty_log()
            with suppress(sqlite3.OperationalError):  # another process is reading, so the log stays
                self._database.execute("PRAGMA busy_timeout = 100")
                self._database.execute("PRAGMA journal_mode = DELETE")
        self.release()

    def release(self) -> None:
        """Close the files without writing the queue, whose records are lost."""
        with self._write_lock:
            if self._lock_file < 0:
                return
            self._leave_file()
            self._database.close()
            os.close(self._head)
            os.close(self._lock_file)
            self._lock_file = -1


@contextmanager
def _named(directory: Path, what: str = "the ledger") -> Iterator[None]:
    """Raise a StorageError in place of an error of the disk or of SQLite in the `with` block.

    The message names the directory and the remedy.
    """
    try:
        yield
    except (OSError, sqlite3.Error) as error:
        raise StorageError(
            f"cannot write {what} in {directory}: {error}; free disk space, then continue the "
            "run with --resume"
        ) from error


@contextmanager
def _transaction(database: sqlite3.Connection) -> Iterator[None]:
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        if database.in_transaction:
            database.execute("ROLLBACK")
        raise


# --- reading -------------------------------------------------------------------------------------


def _connect(path: Path, *, is_read_only: bool = False) -> sqlite3.Connection:
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={'ro' if is_read_only else 'rwc'}",
        uri=True,
        timeout=BUSY_S,
        isolation_level=None,  # transactions begin and end explicitly
        check_same_thread=False,
    )


def _connect_to_write(path: Path) -> sqlite3.Connection:
    """Connect to a database with a write-ahead log.

    Raises:
        sqlite3.OperationalError: if the volume does not support a write-ahead log.
    """
    with ExitStack() as undo:
        database = undo.enter_context(closing(_connect(path)))
        mode = database.execute("PRAGMA journal_mode = wal").fetchone()[0]
        database.execute("PRAGMA wal_autocheckpoint = 0")  # see _empty_log
        if mode != "wal":
            raise sqlite3.OperationalError(f"its journal_mode stays {mode!r}")
        with _transaction(database):
            pass  # tests locks and shared memory
        undo.pop_all()
    return database


def _count_records(database: sqlite3.Connection, run_dir: Path) -> int:
    """Check the format of the database, and return the number of its records.

    Raises:
        StorageError: if the format is different, or records at the end are missing.
    """
    path, head = run_dir / FILE, run_dir / HEAD
    # Read before the rows are counted: a running learner increases both.
    least = head.read_bytes() if head.exists() else b"0"
    if not least.strip().isdigit():
        raise _damaged(head, "it holds no number")
    try:
        found = database.execute("PRAGMA user_version").fetchone()[0]
        if found != FORMAT:
            raise StorageError(
                f"{path} has ledger format {found}, this release has format {FORMAT}; continue the "
                "run with the release that began it, or start a new one from its weights with "
                "--init-from"
            )
        [last] = database.execute("SELECT coalesce(max(seq), 0) FROM records").fetchone()
    except _SQLITE_ERRORS as error:
        raise _damaged(path, str(error)) from error
    if last < int(least):
        raise _damaged(path, f"it has {last} records where it had {int(least)}")
    return int(last)


def _last_file_number(database: sqlite3.Connection, run_dir: Path) -> int:
    """Return the number of the file that got the newest accepted group; 0 if there is no group.

    The file may have been removed since.

    Raises:
        StorageError: if the record of the group is damaged.
    """
    row = database.execute(
        "SELECT seq, body, hash FROM records WHERE kind = 'accepted' ORDER BY seq DESC LIMIT 1"
    ).fetchone()
    if row is None:
        return 0
    seq, body, digest = row
    if digest != _hash(seq, body.encode()):
        raise _damaged(run_dir / FILE, f"record {seq} has not the bytes of its hash")
    return int(Path(_decoder.decode(body).place.file).stem)


def _damaged(path: Path, what: str) -> StorageError:
    return StorageError(
        f"{path} is damaged: {what}; restore {FILE} and {HEAD} from a copy, or start a new run "
        "from weights of this one with --init-from"
    )


def _read_rows(run_dir: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (seq, body) of each record, oldest first, after checking the record's hash.

    Raises:
        DataError: if the run has no ledger.
        StorageError: if the ledger cannot be read, has another format or is damaged.
    """
    path = run_dir / FILE
    if not path.exists():
        raise DataError(
            f"{path}: no such file; is {run_dir} the directory of a run that has started?"
        )
    seq = 0
    try:
        with closing(_connect(path, is_read_only=True)) as database:
            num_records = _count_records(database, run_dir)
            database.text_factory = bytes
            while seq < num_records:
                rows = database.execute(
                    "SELECT seq, body, hash FROM records WHERE seq > ? ORDER BY seq LIMIT ?",
                    (seq, min(READ_ROWS, num_records - seq)),
                ).fetchall()
                for found, body, digest in rows or [(0, b"", b"")]:
                    seq += 1
                    if found != seq:
                        raise _damaged(path, f"record {seq} is missing")
                    if not isinstance(body, bytes) or digest != _hash(seq, body):
                        raise _damaged(path, f"record {seq} has not the bytes of its hash")
                    yield seq, body
    except _SQLITE_ERRORS as error:
        raise _damaged(path, str(error)) from error


def read_lines(run_dir: Path) -> Iterator[str]:
    """Yield the records of a run as JSON texts, one per record, oldest first.

    Raises:
        DataError, StorageError: for the same reasons as `read_records`.
    """
    for _, body in _read_rows(run_dir):
        yield body.decode()


def read_records(run_dir: Path) -> Iterator[AnyRecord]:
    """Yield the records of a run, oldest first.

    The run may be under way. Records that are written during the read are left out.

    Raises:
        DataError: if the run has no ledger.
        StorageError: if the ledger cannot be read, has another format or is damaged.
    """
    for seq, body in _read_rows(run_dir):
        try:
            yield _decoder.decode(body)
        except msgspec.DecodeError as error:
            raise _damaged(run_dir / FILE, f"record {seq}: {error}") from error


def read_group(run_dir: Path, group_id: int, place: Place) -> Group:
    """Read an accepted group from its file.

    Args:
        run_dir: the run's directory.
        group_id: number of the group, for the error's text.
        place: the place of the group's bytes, from its `accepted` record.

    Raises:
        StorageError: if the group's file is missing or damaged.
    """
    path = run_dir / GROUPS / place.file
    where = f"group {group_id} cannot be read back from {path}"
    try:
        with path.open("rb") as file:
            file.seek(place.offset)
            data = memoryview(file.read(place.length))
        found = blake3(data).hexdigest()
        if found != place.hash:
            raise StorageError(
                f"{where}: the BLAKE3 hash of the {place.length} bytes at {place.offset} is "
                f"{found}, the ledger has {place.hash}"
            )
        header_bytes = int.from_bytes(data[:4], "little")
        return decode_group(data[4 : 4 + header_bytes], data[4 + header_bytes :])
    except (OSError, RemoteProtocolError) as error:
        raise StorageError(f"{where}: {error}") from error


def lock_run(run_dir: Path) -> int:
    """Lock a run for this process until the returned descriptor is closed.

    Raises:
        StorageError: if another learner has locked the run.
    """
    return lock_directory(
        run_dir,
        "ledger.lock",
        called=str(run_dir),
        in_use="is in use by another learner; stop it first (process {})",
    )


def is_in_use(run_dir: Path) -> bool:
    """Return whether a learner on this machine has the run open."""
    return is_locked(run_dir / "ledger.lock")


def has_ledger(run_dir: Path) -> bool:
    """Return whether a directory has a ledger, which may have no records or an unknown format."""
    return (run_dir / FILE).exists()


def has_begun(run_dir: Path) -> bool:
    """Return whether a directory has a run with records.

    Such a run can only be resumed.

    Raises:
        StorageError: if the ledger cannot be read.
    """
    return has_ledger(run_dir) and next(read_records(run_dir), None) is not None


# --- what the records say ------------------------------------------------------------------------


@dataclass(slots=True)
class LedgerState:
    """The state of a run's groups after a return to a checkpoint.

    Steps after the checkpoint do not count.
    """

    lineages: tuple[Lineage, ...] = ()
    next_group_id: int = 0
    finished: set[int] = field(default_factory=set)
    """Ids of the groups that were accepted or discarded."""
    granted: dict[int, dict[int, str]] = field(default_factory=dict)
    """Granted groups that were neither accepted nor discarded: group id -> attempt -> worker."""
    waiting: dict[int, Place] = field(default_factory=dict)
    """Accepted groups that were neither trained nor discarded: group id -> place of the group's
    bytes.
    """
    trained: dict[int, tuple[int, Place]] = field(default_factory=dict)
    """Accepted groups that were trained: group id -> step, and the place of the group's bytes."""
    staleness_tokens: dict[int, int] = field(default_factory=dict)
    removed: set[str] = field(default_factory=set)
    """Paths of all files that were removed, relative to the run's directory."""
    last_removed: list[str] = field(default_factory=list)
    """Paths of the files that the last lineage has removed. Paths of earlier lineages are left out,
    because a newer checkpoint may have the same name as a removed one.
    """


def read_state(records: Iterable[AnyRecord], *, lineage: int, step: int) -> LedgerState:
    """Return the state of a run after a return to a checkpoint.

    The checkpoint is that of `step` in `lineage`. `records` are all records of the run, oldest
    first. Records of steps that were trained after the checkpoint are void.

    Raises:
        StorageError: if a later lineage has abandoned the checkpoint, or if records of steps before
            the checkpoint are missing.
    """
    state = LedgerState()
    lineages: list[Lineage] = []
    accepted: dict[int, Place] = {}
    discarded: set[int] = set()
    steps: list[Trained] = []
    for record in records:
        match record:
            case Began():
                lineages.append(Lineage(record.lineage, record.fork_step))
                state.last_removed = []
            case Removed():
                state.removed.update(record.paths)
                state.last_removed += record.paths
            case Granted():
                state.granted.setdefault(record.group, {})[record.attempt] = record.worker
                state.next_group_id = max(state.next_group_id, record.group + 1)
            case Accepted():
                accepted[record.group] = record.place
            case Discarded():
                # A group with an unusable prompt was never granted.
                state.next_group_id = max(state.next_group_id, record.group + 1)
                discarded.add(record.group)
            case Trained():
                steps.append(record)
    surviving = _steps_until(PolicyVersion(lineage, step), steps, lineages)
    ended = discarded.union(*(record.groups for record in surviving))
    _add_staleness(surviving, state.staleness_tokens)
    state.trained = {
        group: (record.step, accepted[group])
        for record in surviving
        for group in record.groups
        if group in accepted
    }
    state.lineages = tuple(lineages)
    state.waiting = {group: place for group, place in accepted.items() if group not in ended}
    state.finished = accepted.keys() | discarded
    state.granted = {g: n for g, n in state.granted.items() if g not in state.finished}
    return state


def _steps_until(
    checkpoint: PolicyVersion, steps: Sequence[Trained], lineages: Sequence[Lineage]
) -> list[Trained]:
    """Return the steps up to a checkpoint, without the steps that a resume has made void.

    Raises:
        StorageError: as for `read_state`.
    """
    lineage, step = checkpoint.lineage, checkpoint.step
    if not is_surviving(checkpoint, lineages):
        raise StorageError(
            f"the checkpoint of step {step} in lineage {lineage} is not on the run's history any "
            "more: the run was resumed from an earlier one since; write the name of another one "
            "into checkpoints/latest"
        )
    # The new lineage forks at the checkpoint, so later steps of the checkpoint's lineage are void.
    forks = [*lineages, Lineage(lineages[-1].lineage + 1, step)]
    surviving = _surviving(steps, forks)
    last = max((record.step for record in surviving), default=0)
    if last < step:
        # Records are synced before their checkpoint becomes visible.
        raise StorageError(
            f"the checkpoint of step {step} in lineage {lineage} is ahead of the ledger, whose "
            f"last step is {last}: the end of the ledger is lost; restore it from a copy, or write "
            "the name of an older checkpoint into checkpoints/latest"
        )
    return surviving


@dataclass(slots=True)
class LedgerTotals:
    """Totals over the records of a run. Only steps on the surviving history count."""

    num_tokens: int = 0
    """Number of completion tokens of the accepted groups."""
    num_trained: int = 0
    """Number of groups that were trained on."""
    discarded: dict[str, int] = field(default_factory=dict)
    """Number of discarded groups, by reason."""
    staleness_tokens: dict[int, int] = field(default_factory=dict)
    """Number of trained tokens, by staleness."""
    lineage_starts: list[float] = field(default_factory=list)
    """Unix seconds at which each lineage began."""
    cost: Cost | None = None
    """The newest record of the costs; None if no machine has a price."""


def totals_of(records: Iterable[AnyRecord]) -> LedgerTotals:
    """Return the totals over the records of a run."""
    totals = LedgerTotals()
    lineages: list[Lineage] = []
    steps: list[Trained] = []
    for record in records:
        match record:
            case Began():
                totals.lineage_starts.append(record.at)
                lineages.append(Lineage(record.lineage, record.fork_step))
            case Accepted():
                totals.num_tokens += record.tokens
            case Trained():
                steps.append(record)
            case Discarded():
                totals.discarded[record.reason] = totals.discarded.get(record.reason, 0) + 1
            case Cost():
                totals.cost = record
    surviving = _surviving(steps, lineages)
    totals.num_trained = sum(len(record.groups) for record in surviving)
    _add_staleness(surviving, totals.staleness_tokens)
    return totals


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """A group that a worker delivered and the learner accepted."""

    worker: str
    granted_at: float
    """Time at which the group was granted, in seconds. The time in which the learner was down does
    not count, because a worker may have held groups for all of it."""
    accepted_at: float
    """Time at which the group was accepted, in the same seconds."""
    num_tokens: int
    """Number of completion tokens of all rollouts."""


def deliveries_of(records: Iterable[AnyRecord]) -> list[Delivery]:
    """Return the deliveries that the learner accepted, in the order of acceptance."""
    granted: dict[tuple[int, int], float] = {}
    last_at = down_s = 0.0
    found = []
    for record in records:
        match record:
            case Began() if last_at:
                down_s += max(0.0, record.at - last_at)
            case Granted():
                granted[record.group, record.attempt] = record.at - down_s
            case Accepted() if (record.group, record.attempt) in granted:
                found.append(
                    Delivery(
                        worker=record.worker,
                        granted_at=granted[record.group, record.attempt],
                        accepted_at=record.at - down_s,
                        num_tokens=record.tokens,
                    )
                )
        last_at = record.at
    return found


class StoredGroup(NamedTuple):
    """An accepted group, and how it ended in the surviving history of the run."""

    accepted: Accepted
    step: int | None
    """The optimizer step that trained the group; None if no step did."""
    consumed_at: int | None
    """Number of optimizer steps done before the step that trained the group; None if no step
    trained the group. The staleness is computed from this number.
    """
    discarded: str
    """The reason why the group was discarded; "" if it was not discarded."""
    max_staleness: int | None = None
    """Largest staleness of the tokens that the step trained; None if no step trained the group.
    Older tokens of the group were masked.
    """
    removed: Removed | None = None
    """The record with which the group's file was removed; None if the file is kept."""

    @property
    def end(self) -> str:
        """Text on how the group ended; "not trained yet" if the group has not ended."""
        if self.step is not None:
            return f"trained in step {self.step}"
        return f"discarded: {self.discarded}" if self.discarded else "not trained yet"


def stored_groups(records: Iterable[AnyRecord]) -> list[StoredGroup]:
    """Return the accepted groups of a run, in the order of acceptance.

    The files of groups that ended long ago may be removed (see the module's docstring).
    """
    accepted: dict[int, Accepted] = {}
    removed: dict[str, Removed] = {}
    reasons: dict[int, str] = {}
    lineages: list[Lineage] = []
    steps: list[Trained] = []
    for record in records:
        match record:
            case Accepted():
                accepted[record.group] = record
            case Discarded():
                reasons[record.group] = record.reason
            case Removed():
                removed.update(dict.fromkeys(record.paths, record))
            case Trained():
                steps.append(record)
            case Began():
                lineages.append(Lineage(record.lineage, record.fork_step))
    trained = {group: step for step in _surviving(steps, lineages) for group in step.groups}
    return [
        StoredGroup(
            record,
            step=trained[group].step if group in trained else None,
            consumed_at=trained[group].consumed_at if group in trained else None,
            discarded=reasons.get(group, ""),
            max_staleness=max(trained[group].staleness, default=None) if group in trained else None,
            removed=removed.get(f"{GROUPS}/{record.place.file}"),
        )
        for group, record in accepted.items()
    ]


def _surviving(steps: Iterable[Trained], lineages: Sequence[Lineage]) -> list[Trained]:
    return [
        record
        for record in steps
        if is_surviving(PolicyVersion(record.lineage, record.step), lineages)
    ]


def _add_staleness(steps: Iterable[Trained], totals: dict[int, int]) -> None:
    for record in steps:
        for lag, num_tokens in record.staleness.items():
            totals[lag] = totals.get(lag, 0) + num_tokens
