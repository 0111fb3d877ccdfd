"""Start or resume of a run: the newest checkpoint and the ledger.

After a crash the run continues from the newest checkpoint in a new lineage. The ledger says which
groups were accepted and not trained on the surviving line; those that may still be trained return
to the buffer, the others end with their reason. Groups that were granted and not delivered are
entered as leases of an unknown worker: the worker that has them claims them with its next
heartbeat, otherwise they expire and are granted again. Checkpoints after the one that the run
continues from are deleted: their steps are no longer on any history.

Damaged files are not used. The checkpoint before a damaged one is used in its place, and the steps
between them are void, as if the user had gone back; a damaged group ends as "lost", and another one
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
from echo.core.errors import ConfigError, StorageError
from echo.core.records import Discarded
from echo.core.rollout import Group, Lineage, find_fault, trim_stale
from echo.leases.book import LeaseBook
from echo.records.files import write_file
from echo.records.ledger import Began, Finished, LedgerQueue, has_begun, read_records, read_state
from echo.runtime.identity import Identity
from echo.runtime.learner.saving.checkpoint import (
    CheckpointInfo,
    Checkpoints,
    checkpoint_name,
    newest_name,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StartingPoint:
    """The state from which the learner starts."""

    lineages: tuple[Lineage, ...]
    step: int = 0
    checkpoint: Path | None = None
    """Trainer state to load; None for the initial weights."""
    next_group_id: int = 0
    finished: set[int] = field(default_factory=set)
    open_attempts: dict[int, dict[int, str]] = field(default_factory=dict)
    """Granted groups without a result: id -> attempt -> worker."""
    buffered: list[Group] = field(default_factory=list)
    staleness_tokens: dict[int, int] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)
    """Accepted groups that can no longer be trained: id -> reason."""
    losses: list[str] = field(default_factory=list)
    """Groups that could not be read back, one line per group; they end as "lost"."""
    damage: tuple[str, ...] = ()
    """Faults of newer checkpoints than `checkpoint`, the newest first."""
    uplinks: dict[str, float] = field(default_factory=dict)
    """Node id -> bytes per second that it could send."""

    @property
    def lineage(self) -> int:
        """The present lineage."""
        return self.lineages[-1].lineage

    def enter_leases(self, leases: LeaseBook, *, now: float) -> None:
        """Enter the former leases, until their workers claim them or they expire."""
        for group_id, holders in sorted(self.open_attempts.items()):
            leases.restore(group_id, holders, now=now)


def check_unused(run_dir: Path) -> None:
    """Check that no run lives in a directory.

    Raises:
        ConfigError: if one does.
        StorageError: if its ledger cannot be read.
    """
    if has_begun(run_dir):
        raise _holds_a_run(run_dir)


def _holds_a_run(run_dir: Path) -> ConfigError:
    return ConfigError(
        f"{run_dir} holds a run already; continue it with --resume, or choose another name with "
        "--set run.name=..."
    )


class SavedRun:
    """A run's ledger and checkpoints on the disk, new or to be resumed."""

    def __init__(self, ledger: LedgerQueue, checkpoints: Checkpoints) -> None:
        """Hold a run's checkpoints and its ledger, which must be open."""
        self.ledger = ledger
        self.checkpoints = checkpoints

    def begin(self) -> StartingPoint:
        """Return the starting point of a new run in an empty ledger; `enter` writes it.

        Raises:
            ConfigError: if a run lives there already.
        """
        if self.ledger.num_records:
            raise _holds_a_run(self.ledger.run_dir)
        return StartingPoint(lineages=(Lineage(1, 0),))

    def recover(
        self, *, run_id: str, max_staleness: int, trims_stale: bool = False
    ) -> StartingPoint:
        """Return the newest whole checkpoint as the starting point; `enter` writes it.

        With `trims_stale` a group keeps its other tokens when some have grown too old.

        Raises:
            ConfigError: if there is no run to continue.
            StorageError: if the ledger is damaged, or every checkpoint.
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
        )
        for group_id, place in sorted(history.waiting.items()):
            try:
                group = self.ledger.load(group_id, place)
            except StorageError as error:
                # For example, the user went back to an older checkpoint, and the group was freed
                # before.
                start.losses.append(str(error))
                start.ends[group_id] = "lost"
                continue
            if trims_stale:
                trimmed = trim_stale(group, step=info.step, max_staleness=max_staleness)
                group = trimmed or group
            fault = find_fault(
                group, step=info.step, max_staleness=max_staleness, lineages=start.lineages
            )
            if fault is None:
                start.buffered.append(group)
            else:
                start.ends[group_id] = fault
        return start

    def enter(self, start: StartingPoint) -> None:
        """Open the lineage in the ledger, once everything else is ready for it.

        Raises:
            StorageError: if it cannot be written.
        """
        self.ledger.append(Began(lineage=start.lineage, fork_step=start.step))
        for group_id, reason in start.ends.items():
            self.ledger.append(Discarded(group=group_id, reason=reason, step=start.step))
        self.ledger.sync()
        # Only after the sync: from now on the ledger never needs these files and steps.
        self.ledger.free_unused()
        self.checkpoints.drop_later(start.step)
        if start.checkpoint is not None:
            self.checkpoints.saved_step = start.step

    def find_start(
        self,
        identity: Identity,
        *,
        max_staleness: int,
        trims_stale: bool,
        resume: bool,
        log: logging.Logger,
    ) -> StartingPoint:
        """Return the starting point of a new run, or of an existing one to be resumed."""
        if not resume:
            return self.begin()
        start = self.recover(
            run_id=identity.run_id,
            max_staleness=max_staleness,
            trims_stale=trims_stale,
        )
        log.info(
            "resuming at step %d in lineage %d: %d groups buffered, %d leased, %d discarded",
            start.step, start.lineage,
            len(start.buffered), len(start.open_attempts), len(start.ends),
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

    A run also counts as unfinished if the user has gone back to an earlier checkpoint or deleted
    the export.

    Raises:
        EchoError: if its ledger cannot be read.
    """
    if not (run_dir / "final").is_dir():
        return None
    last = deque(read_records(run_dir), maxlen=1)
    with suppress(OSError, ValueError):  # a resume tells of these
        newest = newest_name(run_dir / "checkpoints")
        if last and isinstance(last[0], Finished) and newest == checkpoint_name(last[0].step):
            return last[0].step
    return None


# --- Uplinks: what nodes could send, so that a resumed run plans its first version by it ---

UPLINKS_FILE = "uplinks.json"
_uplinks_decoder = msgspec.json.Decoder(dict[NodeId, Rate])


def save_uplinks(run_dir: Path, uplinks: Mapping[str, float], *, log: logging.Logger) -> None:
    """Write bytes per second by node; if that fails a resumed run measures them again."""
    try:
        write_file(run_dir / UPLINKS_FILE, msgspec.json.encode(uplinks))
    except OSError as error:
        log.warning("%s cannot be written: %s", run_dir / UPLINKS_FILE, error)


def read_uplinks(run_dir: Path, *, log: logging.Logger) -> dict[str, float]:
    """Return the rates that `save_uplinks` wrote last; empty, with a warning, if unreadable."""
    path = run_dir / UPLINKS_FILE
    try:
        return _uplinks_decoder.decode(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, msgspec.DecodeError) as error:
        log.warning("%s is left out, uplinks are measured again: %s", path, error)
        return {}
