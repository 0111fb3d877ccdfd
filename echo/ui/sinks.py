"""Metric sinks: metrics.jsonl always, TensorBoard and wandb where configured.

metrics.jsonl has every number, and a run ends that cannot write it. The others are for convenience:
one that is not installed is refused at the start, and one that fails is left out with a warning.

metrics.jsonl is only ever appended to. A resumed learner makes some steps again: their rows follow
those of the abandoned ones under a higher `lineage`, and readers let the later ones count
(`echo.records.run_files`).
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from echo.core.errors import StorageError
from echo.core.extras import import_extra
from echo.core.units import one_line

logger = logging.getLogger(__name__)

Metric = float | Mapping[str, float]
"""A number, or numbers by name: a histogram such as `staleness/hist`."""


class _Mirror(Protocol):
    """A further place that metrics are shown at; its library may raise anything."""

    remedy: str
    """What to do where it fails."""

    def start(self) -> None:
        """Open it."""

    def write(self, step: int, metrics: Mapping[str, float], at: float) -> None:
        """Add the metrics of one row."""

    def close(self) -> None:
        """Write out what is buffered."""


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
        self._mirrors: dict[str, _Mirror] = {}
        if "tensorboard" in sinks:
            self._mirrors["tensorboard"] = _TensorBoard(run_dir / "tensorboard")
        if "wandb" in sinks:
            self._mirrors["wandb"] = _Wandb(run_dir, wandb_project, config or {})
        self.path = run_dir / "metrics.jsonl"
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            drop_torn_line(self.path)
            self._file = self.path.open("ab", buffering=0)
        except OSError as error:
            raise StorageError(f"{self.path}: cannot be written: {error.strerror}") from error
        for name, mirror in list(self._mirrors.items()):
            self._try(name, mirror.start)

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
        for name, mirror in list(self._mirrors.items()):
            self._try(name, mirror.write, step, flat, at)

    def close(self) -> None:
        """Close the file and the mirrors."""
        self._file.close()
        for name, mirror in list(self._mirrors.items()):
            self._try(name, mirror.close)

    def _try(self, name: str, call: Callable[..., None], *arguments: Any) -> None:
        """Call a mirror; one that fails is told once, and left out from then on."""
        try:
            call(*arguments)
        except Exception as error:  # noqa: BLE001 -- a disk, a login, a network: training goes on
            remedy = self._mirrors.pop(name).remedy
            logger.warning(
                'metrics.sinks = "%s" fails and is left out, training goes on: %s: %s; %s. %s has '
                "every number",
                name, type(error).__name__, one_line(str(error)), remedy, self.path,
            )  # fmt: skip

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


class _TensorBoard:
    """Event files through TensorBoard's own writer, which needs no torch."""

    remedy = "free some disk space, and resume the run to have it back"

    def __init__(self, directory: Path) -> None:
        self._summary: Any = import_extra(
            "tensorboard.summary", extra="tensorboard", wanted_by='metrics.sinks = "tensorboard"'
        )
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
        """Flush and close the event file."""
        self._writer.close()


class _Wandb:
    """A wandb run; the same run again after a resume."""

    remedy = (
        "set WANDB_API_KEY or call `wandb login`, or keep it here with WANDB_MODE=offline, and "
        "resume the run to have it back"
    )

    def __init__(self, run_dir: Path, project: str, config: Mapping[str, object]) -> None:
        self._wandb: Any = import_extra("wandb", extra="wandb", wanted_by='metrics.sinks = "wandb"')
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
