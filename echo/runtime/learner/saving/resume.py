"""The starting point of a new run, or of a run that resumes from its newest checkpoint.

After a crash the run continues from the newest checkpoint in a new lineage, a branch of the run's
history. The ledger has the groups that were accepted, but not yet trained on at that checkpoint. A
group that may still be trained on returns to the buffer. Any other group ends with a reason. Groups
that were granted but not delivered become leases again. A worker that still has such a group claims
it with its next heartbeat. If no worker claims the group, its lease expires and the group is
granted again. All later checkpoints are deleted, because their steps do not belong to the new
lineage. Files that were recorded as removed before the crash are deleted, too.

Damaged files are not used. If a checkpoint is damaged, the checkpoint before it is used, and the
steps between the two checkpoints are made again. A damaged group ends as "lost", and another group
is granted.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from echo.core.bounds import NodeId, Rate
from echo.core.errors import ConfigError, DivergedError, StorageError
from echo.core.records import Discarded
from echo.core.rollout import Group, Lineage, find_fault, trim_stale
from echo.core.units import counted
from echo.leases.book import LeaseBook
from echo.records.files import write_file
from echo.records.ledger import (
    GROUPS,
    Began,
    Checkpointed,
    Diverged,
    Finished,
    LedgerQueue,
    LedgerState,
    has_begun,
    read_records,
    read_state,
)
from echo.runtime.identity import Identity
from echo.runtime.learner.saving.checkpoint import (
    CheckpointInfo,
    Checkpoints,
    checkpoint_name,
    newest_name,
)
from echo.runtime.learner.saving.disk_limit import delete_entry, last_step


@dataclass(slots=True, kw_only=True)
class StartingPoint:
    """The state from which the learner starts."""

    lineages: tuple[Lineage, ...]
    step: int = 0
    checkpoint: Path | None = None
    """Directory with the trainer's state; None for the initial weights."""
    next_group_id: int = 0
    finished: set[int] = field(default_factory=set)
    open_attempts: dict[int, dict[int, str]] = field(default_factory=dict)
    """For each granted group without a result: the worker of each attempt."""
    buffered: list[Group] = field(default_factory=list)
    staleness_tokens: dict[int, int] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)
    """Group id -> reason why this accepted group can no longer be trained on."""
    num_too_old_tokens: int = 0
    """Number of accepted tokens that are too old to be trained on."""
    losses: list[str] = field(default_factory=list)
    """Log lines, one for each group that could not be read from the ledger."""
    damage: tuple[str, ...] = ()
    """Fault messages of damaged checkpoints newer than `checkpoint`, newest first."""
    removed: tuple[str, ...] = ()
    """Paths that the last lineage recorded as removed; some may still exist."""
    uplinks: dict[str, float] = field(default_factory=dict)
    """Measured bytes per second that each node could send, by node id."""

    @property
    def lineage(self) -> int:
        """The number of the present lineage."""
        return self.lineages[-1].lineage

    def enter_leases(self, leases: LeaseBook, *, now: float) -> None:
        """Add the former leases to `leases`. Workers can claim a lease until it expires."""
        for group_id, holders in sorted(self.open_attempts.items()):
            leases.restore(group_id, holders, now=now)


def check_unused(run_dir: Path) -> None:
    """Check that a directory contains no run.

    Raises:
        ConfigError: if the directory contains a run.
        StorageError: if the directory's ledger cannot be read.
    """
    if has_begun(run_dir):
        raise _holds_a_run(run_dir)


def _holds_a_run(run_dir: Path) -> ConfigError:
    return ConfigError(
        f"{run_dir} holds a run already; continue it with --resume, or choose another name with "
        "--set run.name=..."
    )


class SavedRun:
    """The ledger and the checkpoints of a new run or of a run to resume."""

    def __init__(self, ledger: LedgerQueue, checkpoints: Checkpoints) -> None:
        self.ledger = ledger
        self.checkpoints = checkpoints

    def begin(self) -> StartingPoint:
        """Return the starting point of a new run. `enter` writes it to the ledger.

        Raises:
            ConfigError: if the ledger already has records of a run.
        """
        if self.ledger.num_records:
            raise _holds_a_run(self.ledger.run_dir)
        return StartingPoint(lineages=(Lineage(1, 0),))

    def recover(
        self, *, run_id: str, max_staleness: int, trims_stale: bool = False
    ) -> StartingPoint:
        """Return the starting point at the newest undamaged checkpoint.

        `enter` writes the starting point to the ledger. If `trims_stale` is true, tokens that are
        too old are masked, and the group's other tokens are trained on.

        Raises:
            ConfigError: if there is no run to continue, or the checkpoint belongs to another run.
            StorageError: if the ledger is damaged, or if all checkpoints are damaged.
        """
        run_dir = self.ledger.run_dir
        if not self.ledger.num_records:
            raise ConfigError(f"{run_dir} holds no run to resume; start it without --resume")
        found = self.checkpoints.find_whole()
        path = None if found is None else found.path
        info = CheckpointInfo(run_id=run_id, lineage=1, step=0) if found is None else found.info
        if info.run_id != run_id:
            raise ConfigError(
                f"{path} belongs to run {info.run_id}, the directory to {run_id}; move the "
                "files of the other run away"
            )
        history = read_state(self.ledger.records(), lineage=info.lineage, step=info.step)
        lineage = Lineage(history.lineages[-1].lineage + 1, info.step)
        start = StartingPoint(
            lineages=(*history.lineages, lineage),
            step=info.step,
            checkpoint=path,
            next_group_id=history.next_group_id,
            finished=history.finished,
            open_attempts=history.granted,
            staleness_tokens=history.staleness_tokens,
            damage=() if found is None else found.damage,
            removed=tuple(history.last_removed),
        )
        self.checkpoints.removed_step = last_step(history.removed, before=info.step)
        self._hold_trained(history, step=info.step)
        self._load_waiting(start, history, max_staleness=max_staleness, trims_stale=trims_stale)
        return start

    def _hold_trained(self, history: LedgerState, *, step: int) -> None:
        """Keep trained groups that are needed again if the run resumes from an older checkpoint."""
        oldest_step = min(
            (
                each.step
                for each in self.checkpoints.stored(up_to=step)
                if each.keeps_groups and each.path not in history.last_removed
            ),
            default=step,
        )
        for group_id, (trained_at, place) in history.trained.items():
            if trained_at > oldest_step:
                self.ledger.hold(group_id, place, step=trained_at)

    def _load_waiting(
        self, start: StartingPoint, history: LedgerState, *, max_staleness: int, trims_stale: bool
    ) -> None:
        """Add each accepted, unfinished group to `start.buffered` or to `start.ends`."""
        for group_id, place in sorted(history.waiting.items()):
            try:
                group = self.ledger.load(group_id, place)
            except StorageError as error:
                # For example, the user went back to an older checkpoint, and the group was freed
                # before.
                stored = f"{GROUPS}/{place.file}"
                start.losses.append(
                    f"group {group_id}: the run has removed {stored}"
                    if stored in history.removed
                    else str(error)
                )
                start.ends[group_id] = "lost"
                continue
            if trims_stale:
                trimmed = trim_stale(group, step=start.step, max_staleness=max_staleness) or group
                start.num_too_old_tokens += group.num_trained - trimmed.num_trained
                group = trimmed
            fault = find_fault(
                group, step=start.step, max_staleness=max_staleness, lineages=start.lineages
            )
            if fault is None:
                start.buffered.append(group)
            else:
                start.ends[group_id] = fault
                start.num_too_old_tokens += group.num_trained if fault == "stale" else 0

    def enter(self, start: StartingPoint) -> None:
        """Write a starting point to the ledger. Call this when the run can begin.

        Groups in `start.ends` are ended. Checkpoints after the starting point are deleted.

        Raises:
            StorageError: if the ledger cannot be written.
        """
        self._delete_again(start)
        self.ledger.append(Began(lineage=start.lineage, fork_step=start.step))
        for group_id, reason in start.ends.items():
            self.ledger.append(Discarded(group=group_id, reason=reason, step=start.step))
        self.ledger.sync()
        # Only after the sync: from now on the ledger never needs these files and steps.
        self.ledger.free_unused(step=start.step)
        self.checkpoints.drop_later(start.step)
        if start.checkpoint is not None:
            self.checkpoints.saved_step = start.step

    def _delete_again(self, start: StartingPoint) -> None:
        """Delete files that the last lineage has recorded as removed, if they still exist.

        If newer checkpoints are damaged, the run may start from a checkpoint that was recorded as
        removed. Such a checkpoint stays.
        """
        self.ledger.delete_again(start.removed)
        for path in start.removed:
            if self.ledger.run_dir / path != start.checkpoint:
                delete_entry(self.ledger.run_dir, path)

    def find_start(
        self,
        identity: Identity,
        *,
        max_staleness: int,
        trims_stale: bool,
        resume: bool,
        log: logging.Logger,
    ) -> StartingPoint:
        """Return the starting point: from `recover` if `resume` is true, else from `begin`.

        Damaged checkpoints and lost groups are logged.
        """
        if not resume:
            return self.begin()
        start = self.recover(
            run_id=identity.run_id,
            max_staleness=max_staleness,
            trims_stale=trims_stale,
        )
        log.info(
            "resuming at step %d in lineage %d: %s buffered, %d leased, %d discarded",
            start.step, start.lineage,
            counted(len(start.buffered), "group"), len(start.open_attempts), len(start.ends),
        )  # fmt: skip
        for damage in start.damage:
            log.error("%s", damage)
        if start.damage:
            log.error(
                "continuing from %s instead: the steps after %d are void and will be made again",
                start.checkpoint, start.step,
            )  # fmt: skip
        for loss in start.losses:
            log.warning("lost: %s", loss)
        return replace(start, uplinks=read_uplinks(self.ledger.run_dir, log=log))


def finished_step(run_dir: Path) -> int | None:
    """Return the last step of a finished run; None if the run is not finished.

    The result is also None if the user has made `latest` name an earlier checkpoint, or has deleted
    the directory `final` with the exported weights.

    Raises:
        EchoError: if the run's ledger cannot be read.
    """
    if not (run_dir / "final").is_dir():
        return None
    last = deque(read_records(run_dir), maxlen=1)
    with suppress(OSError, ValueError):  # a resume reports these errors
        newest = newest_name(run_dir / "checkpoints")
        if last and isinstance(last[0], Finished) and newest == checkpoint_name(last[0].step):
            return last[0].step
    return None


def find_divergence(run_dir: Path) -> DivergedError | None:
    """Return the error of a run that ended because it diverged; None for any other run.

    If the user has made `latest` name an earlier checkpoint, the result is None, too.

    Raises:
        EchoError: if the run's ledger cannot be read.
    """
    ended: Diverged | None = None
    newest = ""
    for record in read_records(run_dir):
        match record:
            case Began():
                ended = None
                newest = checkpoint_name(record.fork_step) if record.fork_step else ""
            case Diverged():
                ended = record
            case Checkpointed():
                newest = checkpoint_name(record.step)
    if ended is None:
        return None
    with suppress(OSError, ValueError):  # a resume reports these errors
        if newest_name(run_dir / "checkpoints") != newest:
            return None
    text = "the run ended so, and its workers have left"
    remedy = "--resume-or-begin and restarts by torchrun do not continue it, --resume does"
    return DivergedError(f"{ended.cause}; {text}: {remedy}", good_step=ended.step)


# --- Uplinks: what nodes could send, so that a resumed run plans its first version by it ---

UPLINKS_FILE = "uplinks.json"
_uplinks_decoder = msgspec.json.Decoder(dict[NodeId, Rate])


def save_uplinks(run_dir: Path, uplinks: Mapping[str, float], *, log: logging.Logger) -> None:
    """Write the measured uplink rates of all nodes, in bytes per second, to a file.

    If this fails, a warning is logged, and a resumed run measures the rates again.
    """
    try:
        write_file(run_dir / UPLINKS_FILE, msgspec.json.encode(uplinks))
    except OSError as error:
        log.warning("%s cannot be written: %s", run_dir / UPLINKS_FILE, error)


def read_uplinks(run_dir: Path, *, log: logging.Logger) -> dict[str, float]:
    """Return the rates that `save_uplinks` wrote last; empty if there are none.

    If the file cannot be read, the result is empty and a warning is logged.
    """
    path = run_dir / UPLINKS_FILE
    try:
        return _uplinks_decoder.decode(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as error:
        log.warning("%s is left out, uplinks are measured again: %s", path, error)
        return {}
