"""Metric sinks: metrics.jsonl always, TensorBoard and wandb where configured.

metrics.jsonl has every number, and a run ends that cannot write it. The others are for convenience:
one that is not installed is refused at the start, and one that fails is left out with a warning.
Each of them has a thread, in which its library may wait for a network as long as it likes: a run
starts, trains and ends without it.

metrics.jsonl is only ever appended to. A resumed learner makes some steps again: their rows follow
those of the abandoned ones under a higher `lineage`, and readers let the later ones count
(`echo.records.run_files`).
"""

from __future__ import annotations

import logging
import math
import os
import queue
import threading
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import msgspec

from echo.core.errors import ConfigError, StorageError
from echo.core.extras import import_extra
from echo.core.units import one_line

logger = logging.getLogger(__name__)

Metric = float | Mapping[str, float]
"""A number, or numbers by name: a histogram such as `staleness/hist`."""


class _Mirror(Protocol):
    """A further place that metrics are shown at; its library may raise anything."""

    remedy: str
    """Reaction to a failure."""

    def start(self) -> None:
        """Open it."""

    def write(self, step: int, metrics: Mapping[str, float], at: float) -> None:
        """Add the metrics of one row."""

    def close(self) -> None:
        """Write out what is buffered."""


MAX_ROWS_BEHIND = 1000
"""Rows that wait for a mirror; rows that come while the queue is full are left out."""
CLOSE_S = 15.0
"""Seconds that a mirror has at the end of a run for what it has not written yet."""


class _Feed:
    """Feeds a mirror from a thread of its own; one that fails is told once, and left out."""

    def __init__(self, name: str, mirror: _Mirror, path: Path) -> None:
        self._name, self._mirror, self._path = name, mirror, path
        self._rows: queue.Queue[tuple[int, Mapping[str, float], float] | None]
        self._rows = queue.Queue(MAX_ROWS_BEHIND)
        self._has_failed = self._is_behind = False
        self._thread = threading.Thread(target=self._run, name=f"sink-{name}", daemon=True)

    def start(self) -> None:
        """Open the mirror; returns at once."""
        self._thread.start()

    def put(self, step: int, metrics: Mapping[str, float], at: float) -> None:
        """Hand over a row; returns at once."""
        if self._has_failed:
            return
        try:
            self._rows.put_nowait((step, metrics, at))
        except queue.Full:
            if not self._is_behind:
                self._tell("does not keep up and has holes from now on", f"step {step}")
            self._is_behind = True

    def close(self) -> None:
        """Let it write what is left; bounded."""
        give_up_at = time.monotonic() + CLOSE_S
        try:
            self._rows.put(None, timeout=CLOSE_S)
            self._thread.join(max(0.0, give_up_at - time.monotonic()))
        except queue.Full:
            pass
        if self._thread.is_alive() and not self._has_failed:
            self._tell("did not finish", f"no answer within {CLOSE_S:g} s")

    def _run(self) -> None:
        try:
            self._mirror.start()
            while (row := self._rows.get()) is not None:
                self._mirror.write(*row)
            self._mirror.close()
        except Exception as error:  # noqa: BLE001 -- a disk, a login, a network: training goes on
            self._has_failed = True
            why = f"{type(error).__name__}: {one_line(str(error))}"
            self._tell("fails and is left out, training goes on", why)

    def _tell(self, what: str, why: str) -> None:
        text = 'metrics.sinks = "%s" %s: %s; %s. %s has every number'
        logger.warning(text, self._name, what, why, self._mirror.remedy, self._path)


def sinks_missing(sinks: Collection[str]) -> list[str]:
    """Return why sinks cannot be used here, a line for each that is not installed."""
    problems = []
    for name in _MODULES:
        if name in sinks:
            try:
                _import(name)
            except ConfigError as error:
                problems.append(str(error))
    return problems


class MetricsWriter:
    """Append rows to metrics.jsonl of a run and mirror them elsewhere as configured."""

    def __init__(
        self,
        run_dir: Path,
        *,
        sinks: Collection[str] = (),
        wandb_project: str = "echo",
        config: Mapping[str, object] | None = None,
    ) -> None:
        """Open the file, repair its end if a crash tore it, and start the mirrors.

        Args:
            run_dir: directory of the run, made if missing; its name names the run in wandb.
            sinks: "tensorboard" for event files in `run_dir`/tensorboard, "wandb" for Weights &
                Biases; WANDB_MODE and the like apply.
            wandb_project: project to log to.
            config: resolved configuration, shown by wandb.

        Raises:
            ConfigError: if a mirror is wanted that is not installed.
            StorageError: if the file cannot be opened or repaired.
        """
        # The mirrors first: a refusal must not leave an open file behind.
        mirrors: dict[str, _Mirror] = {}
        if "tensorboard" in sinks:
            mirrors["tensorboard"] = _TensorBoard(run_dir / "tensorboard")
        if "wandb" in sinks:
            mirrors["wandb"] = _Wandb(run_dir, wandb_project, config or {})
        self.path = run_dir / "metrics.jsonl"
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            drop_torn_line(self.path)
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            raise StorageError(f"{self.path}: cannot be written: {error.strerror}") from error
        self._feeds = [_Feed(name, mirror, self.path) for name, mirror in mirrors.items()]
        for feed in self._feeds:
            feed.start()

    def write(self, step: int, metrics: Mapping[str, Metric], *, at: float | None = None) -> None:
        """Append one row.

        Args:
            step: optimizer step the numbers belong to.
            metrics: numbers and histograms by name; what is not finite is written as null.
            at: unix seconds, now if None.

        Raises:
            StorageError: if the row cannot be written, a full disk for instance.
        """
        at = time.time() if at is None else at
        numbers = {name: _plain(value) for name, value in metrics.items()}
        row = msgspec.json.encode({"step": step, "time": at, **numbers}) + b"\n"
        try:
            # Unbuffered and in one piece: a reader sees whole rows, a crash tears the last at most.
            written = self._file.write(row)
        except OSError as error:
            raise StorageError(
                f"{self.path}: cannot write step {step}: {error.strerror}; free some disk space"
            ) from error
        if written != len(row):
            raise StorageError(f"{self.path}: the disk is full at step {step}; free some space")
        flat = {n: value for n, value in numbers.items() if not isinstance(value, dict)}
        for feed in self._feeds:
            feed.put(step, flat, at)

    def close(self) -> None:
        """Close the file and the mirrors; bounded."""
        self._file.close()
        for feed in self._feeds:
            feed.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def drop_torn_line(path: Path) -> None:
    """Cut off a last line without its line end, which a crash in mid-write leaves behind."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        end = file.seek(0, os.SEEK_END)
        keep = end
        while keep > 0:
            start = max(keep - 65536, 0)
            file.seek(start)
            newline = file.read(keep - start).rfind(b"\n")
            if newline >= 0:
                keep = start + newline + 1
                break
            keep = start
        if keep < end:
            logger.warning("%s: dropped a torn last line of %d bytes", path, end - keep)
            file.truncate(keep)


def _plain(value: Metric) -> float | dict[str, float]:
    """Numbers of any library as Python's own; the counts among them stay whole."""
    if isinstance(value, Mapping):
        return {str(name): _number(count) for name, count in value.items()}
    return value if type(value) is int else float(value)


def _number(value: float) -> float:
    """A whole number stays whole: token counts read better without a point."""
    return int(value) if math.isfinite(value) and value == int(value) else float(value)


_MODULES = {"tensorboard": "tensorboard.summary", "wandb": "wandb"}


def _import(sink: str) -> ModuleType:
    """Import a sink's library.

    Raises:
        ConfigError: if it is not installed.
    """
    return import_extra(_MODULES[sink], extra=sink, wanted_by=f'metrics.sinks = "{sink}"')


class _TensorBoard:
    """Event files through TensorBoard's own writer, which needs no torch."""

    remedy = "free some disk space, and resume the run to have it back"

    def __init__(self, directory: Path) -> None:
        self._summary: Any = _import("tensorboard")
        self._directory = directory

    def start(self) -> None:
        """Make the directory and its event file."""
        self._writer = self._summary.Writer(str(self._directory))

    def write(self, step: int, metrics: Mapping[str, float], at: float) -> None:
        """Add one scalar per metric."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step, wall_time=at)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    """A wandb run; the same run again after a resume."""

    remedy = (
        "set WANDB_API_KEY or call `wandb login`, or keep it here with WANDB_MODE=offline, and "
        "resume the run to have it back"
    )

    def __init__(self, run_dir: Path, project: str, config: Mapping[str, object]) -> None:
        self._wandb: Any = _import("wandb")
        self._run_dir, self._project, self._config = run_dir, project, config

    def start(self) -> None:
        """Begin the run, or go on with it."""
        self._run = self._wandb.init(
            project=self._project,
            name=self._run_dir.name,
            dir=str(self._run_dir),
            id=_wandb_id(self._run_dir),
            resume="allow",
            config=dict(self._config),
        )
        # wandb's own step may only grow, a resumed learner goes back: steps are plotted by ours.
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, metrics: Mapping[str, float], at: float) -> None:
        """Log one row; wandb stamps it with its own clock."""
        del at
        self._run.log({"step": step, **metrics})

    def close(self) -> None:
        """Finish the run, which uploads what is left."""
        self._run.finish()


def _wandb_id(run_dir: Path) -> str:
    """The id of the wandb run that belongs to `run_dir`, kept in a file there."""
    path = run_dir / "wandb_id"
    if not path.exists():
        path.write_text(os.urandom(4).hex(), encoding="ascii")
    return path.read_text(encoding="ascii").strip()
