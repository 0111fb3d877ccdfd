"""Writes metrics and samples to metrics.jsonl, and to TensorBoard, trackio and wandb.

metrics.jsonl has all numbers; if a run cannot write this file, the run ends. The other sinks are
optional and called mirrors below. Mirrors also get samples of rollouts as tables. If a configured
mirror is not installed, the run is refused at the start. If a mirror fails later, it is dropped
with a warning. Each mirror has its own thread, so a run never waits for a mirror's network.

Rows are only appended to metrics.jsonl. A resumed learner may repeat steps. The new rows of these
steps have a higher `lineage` than the abandoned rows. Readers use only the new rows
(`echo.records.run_files`).
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import msgspec

from echo.core.errors import ConfigError, StorageError
from echo.core.extras import import_extra
from echo.core.monitoring.samples import COLUMNS, TextSample, table_of
from echo.core.units import one_line
from echo.ui.prometheus import PrometheusEndpoint, prometheus_client

logger = logging.getLogger(__name__)

Metric = float | Mapping[str, float] | Mapping[str, str]
"""A number, or numbers under names (as in `staleness/hist`), or texts under names (as in
`explain`)."""


class _Mirror(Protocol):
    """A sink that gets the same rows as metrics.jsonl. Its library may raise any error."""

    remedy: str
    """Text that tells the user what to do if the mirror fails."""

    def start(self) -> None:
        """Open the mirror. This method is called before the first row."""

    def write(self, step: int, metrics: Mapping[str, float], at: float) -> None:
        """Write one row of metrics, with its step and Unix time."""

    def write_samples(self, step: int, samples: Sequence[TextSample], at: float) -> None:
        """Write rollouts as text, with their step and Unix time."""

    def close(self) -> None:
        """Write the buffered rows, and close the mirror."""


MAX_ROWS_BEHIND = 1000
"""Largest number of rows that wait for a mirror. Further rows are dropped."""
CLOSE_S = 15.0
"""At the end of a run, a mirror has this many seconds to write the rows in its queue."""


class _Feed:
    """Passes rows to a mirror, which writes them in a separate thread.

    After a failure, one warning is logged and no more rows are written.
    """

    def __init__(self, name: str, mirror: _Mirror, path: Path) -> None:
        self._name, self._mirror, self._path = name, mirror, path
        self._writes: queue.Queue[Callable[[_Mirror], None] | None]
        self._writes = queue.Queue(MAX_ROWS_BEHIND)
        self._has_failed = self._is_behind = False
        self._thread = threading.Thread(target=self._run, name=f"sink-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, step: int, write: Callable[[_Mirror], None]) -> None:
        """Queue a call that writes to the mirror, and return at once."""
        if self._has_failed:
            return
        try:
            self._writes.put_nowait(write)
        except queue.Full:
            if not self._is_behind:
                self._warn("does not keep up and has holes from now on", f"step {step}")
            self._is_behind = True

    def close(self) -> None:
        """Write the queued rows and close the mirror. This takes at most CLOSE_S."""
        give_up_at = time.monotonic() + CLOSE_S
        try:
            self._writes.put(None, timeout=CLOSE_S)
            self._thread.join(max(0.0, give_up_at - time.monotonic()))
        except queue.Full:
            pass
        if self._thread.is_alive() and not self._has_failed:
            # When the process ends, the library's thread fails as well, which needs no second
            # report.
            self._has_failed = True
            self._warn("did not finish", f"no answer within {CLOSE_S:g} s")

    def _run(self) -> None:
        try:
            self._mirror.start()
            while (write := self._writes.get()) is not None:
                write(self._mirror)
            self._mirror.close()
        except (Exception, SystemExit) as error:  # noqa: BLE001 -- of a disk, a login, a network
            if not self._has_failed:
                self._has_failed = True
                why = ": ".join(filter(None, (type(error).__name__, one_line(str(error)))))
                self._warn("fails and is left out, training goes on", why)

    def _warn(self, what: str, why: str) -> None:
        text = 'metrics.sinks = "%s" %s: %s; %s. %s has every number'
        logger.warning(text, self._name, what, why, self._mirror.remedy, self._path)


def sinks_missing(sinks: Collection[str], *, has_prometheus: bool = False) -> list[str]:
    """Return one line for each configured sink whose library is not installed.

    The line states the remedy.
    """
    wanted: list[Callable[[], object]] = [partial(_import, name) for name in sinks]
    wanted += [prometheus_client] if has_prometheus else []
    problems = []
    for import_library in wanted:
        try:
            import_library()
        except ConfigError as error:
            problems.append(str(error))
    return problems


class MetricsWriter:
    """Appends rows to a run's metrics.jsonl, and passes them to the configured mirrors."""

    def __init__(
        self,
        run_dir: Path,
        *,
        sinks: Collection[str] = (),
        project: str = "echo",
        prometheus: str | None = None,
        config: Mapping[str, object] | None = None,
    ) -> None:
        """Open metrics.jsonl and start the mirrors.

        If a crash has cut off the last line, remove it.

        Args:
            run_dir: directory of the run, created if it is missing; the wandb run has the
                directory's name.
            sinks: "tensorboard" for event files in `run_dir`/tensorboard; "trackio" and "wandb" for
                these trackers, which read variables such as TRACKIO_DIR and WANDB_MODE.
            project: the project in trackio and wandb.
            prometheus: "tcp://host:port" at which Prometheus may read the newest metrics.
            config: the resolved configuration, which trackio and wandb show.

        Raises:
            ConfigError: if a configured mirror is not installed, or the address of Prometheus
                cannot be used.
            StorageError: if the file cannot be opened or repaired.
        """
        # The mirrors come first, since a refusal must not leave an open file.
        mirrors: dict[str, _Mirror] = {}
        if "tensorboard" in sinks:
            mirrors["tensorboard"] = _TensorBoard(run_dir / "tensorboard")
        if "wandb" in sinks:
            mirrors["wandb"] = _Wandb(run_dir, project, config or {})
        if "trackio" in sinks:
            mirrors["trackio"] = _Trackio(run_dir, project, config or {})
        self.path = run_dir / "metrics.jsonl"
        self.endpoint = None
        if prometheus is not None:
            self.endpoint = PrometheusEndpoint(prometheus, run_name=run_dir.name)
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
        """Append one row to metrics.jsonl, and pass the row to the mirrors.

        Args:
            step: the optimizer step to which the metrics belong.
            metrics: numbers and histograms by name. Numbers that are not finite are written as
                null.
            at: Unix time of the row in seconds; None for the present time.

        Raises:
            StorageError: if the row cannot be written, for example on a full disk.
        """
        at = time.time() if at is None else at
        numbers = {name: _plain(value) for name, value in metrics.items()}
        row = msgspec.json.encode({"step": step, "time": at, **numbers}) + b"\n"
        try:
            # One unbuffered write: readers see whole rows, and a crash can tear only the last row.
            written = self._file.write(row)
        except OSError as error:
            raise StorageError(
                f"{self.path}: cannot write step {step}: {error.strerror}; free some disk space"
            ) from error
        if written != len(row):
            raise StorageError(f"{self.path}: the disk is full at step {step}; free some space")
        if self.endpoint is not None:
            self.endpoint.write(step, numbers, at)
        flat = {n: value for n, value in numbers.items() if not isinstance(value, dict)}
        for feed in self._feeds if flat else ():
            feed.put(step, lambda mirror: mirror.write(step, flat, at))

    def write_samples(self, step: int, samples: Sequence[TextSample]) -> None:
        """Pass rollouts to the mirrors as text. The rollouts are not written to metrics.jsonl."""
        at = time.time()
        for feed in self._feeds:
            feed.put(step, lambda mirror: mirror.write_samples(step, samples, at))

    def close(self) -> None:
        """Close metrics.jsonl and the mirrors. This takes a limited time."""
        self._file.close()
        if self.endpoint is not None:
            self.endpoint.close()
        for feed in self._feeds:
            feed.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def drop_torn_line(path: Path) -> None:
    """If a crash has cut off the last line of a file, remove this line.

    A line without a line end was cut off.
    """
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


def _plain(value: Metric) -> float | dict[str, float | str]:
    """Convert a metric's values from numpy's types to Python's types."""
    if isinstance(value, Mapping):
        return {
            str(name): each if isinstance(each, str) else _number(each)
            for name, each in value.items()
        }
    return value if type(value) is int else float(value)


def _number(value: float) -> float:
    """Return a whole number as an integer. Return any other number as a float.

    Counts of tokens are easier to read as integers.
    """
    return int(value) if math.isfinite(value) and value == int(value) else float(value)


_MODULES = {"tensorboard": "tensorboard.summary", "trackio": "trackio", "wandb": "wandb"}


def _import(sink: str) -> ModuleType:
    return import_extra(_MODULES[sink], extra=sink, wanted_by=f'metrics.sinks = "{sink}"')


class _TensorBoard:
    remedy = "free some disk space, and resume the run to have it back"

    def __init__(self, directory: Path) -> None:
        self._summary: Any = _import("tensorboard")
        self._directory = directory
        self._samples: Any = None
        """The writer for samples. It has a directory of its own, because TensorBoard reads one file
        of a directory at a time."""

    def start(self) -> None:
        self._writer = self._summary.Writer(str(self._directory))

    def write(self, step: int, metrics: Mapping[str, float], at: float) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step, wall_time=at)
        self._writer.flush()

    def write_samples(self, step: int, samples: Sequence[TextSample], at: float) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.text.metadata import create_summary_metadata
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
        from tensorboard.util.tensor_util import make_tensor_proto

        if self._samples is None:
            self._samples = EventFileWriter(str(self._directory / "samples"))
        value = Summary.Value(
            tag="samples",
            metadata=create_summary_metadata(display_name="samples", description=""),
            tensor=make_tensor_proto(_markdown(samples)),
        )
        self._samples.add_event(Event(wall_time=at, step=step, summary=Summary(value=[value])))
        self._samples.flush()

    def close(self) -> None:
        self._writer.close()
        if self._samples is not None:
            self._samples.close()


def _markdown(samples: Sequence[TextSample]) -> str:
    """Return samples as a Markdown table. Their texts are formatted as code."""
    lines = [" | ".join(COLUMNS), " | ".join(["---"] * len(COLUMNS))]
    for row in table_of(samples):
        cells = (
            f"`{one_line(cell).replace('`', chr(39)).replace('|', '¦')}`"
            if isinstance(cell, str)
            else f"{cell:g}"
            for cell in row
        )
        lines.append(" | ".join(cells))
    return "\n".join(lines)


class _Wandb:
    """Writes rows to a run of wandb. A resumed run of Echo continues its run of wandb."""

    remedy = (
        "set WANDB_API_KEY or call `wandb login`, or keep it here with WANDB_MODE=offline, and "
        "resume the run to have it back"
    )

    def __init__(self, run_dir: Path, project: str, config: Mapping[str, object]) -> None:
        self._wandb: Any = _import("wandb")
        self._run_dir, self._project, self._config = run_dir, project, config

    def start(self) -> None:
        self._run = self._wandb.init(
            project=self._project,
            name=self._run_dir.name,
            dir=str(self._run_dir),
            id=_wandb_id(self._run_dir),
            resume="allow",
            config=dict(self._config),
        )
        # wandb's own step may only grow, but a resumed learner goes back, so plots use our step.
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, metrics: Mapping[str, float], at: float) -> None:
        del at
        self._run.log({"step": step, **metrics})

    def write_samples(self, step: int, samples: Sequence[TextSample], at: float) -> None:
        del at
        table = self._wandb.Table(columns=list(COLUMNS), data=table_of(samples))
        self._run.log({"step": step, "samples": table})

    def close(self) -> None:
        """Finish the wandb run, which uploads its last rows."""
        self._run.finish()


def _wandb_id(run_dir: Path) -> str:
    path = run_dir / "wandb_id"
    if not path.exists():
        path.write_text(os.urandom(4).hex(), encoding="ascii")
    return path.read_text(encoding="ascii").strip()


class _Trackio:
    """Writes rows to a run of trackio.

    A resumed run of Echo continues its run of trackio.
    """

    remedy = (
        "see TRACKIO_DIR, TRACKIO_SPACE_ID and TRACKIO_SERVER_URL, and resume the run to have it "
        "back"
    )

    def __init__(self, run_dir: Path, project: str, config: Mapping[str, object]) -> None:
        self._trackio: Any = _import("trackio")
        self._name, self._project, self._config = run_dir.name, project, config

    def start(self) -> None:
        with _silenced():
            self._run = self._trackio.init(
                project=self._project,
                name=self._name,
                resume="allow",
                config=dict(self._config),
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def write(self, step: int, metrics: Mapping[str, float], at: float) -> None:
        del at
        self._run.log(dict(metrics), step=step)

    def write_samples(self, step: int, samples: Sequence[TextSample], at: float) -> None:
        del at
        table = self._trackio.Table(columns=list(COLUMNS), data=table_of(samples))
        self._run.log({"samples": table}, step=step)

    def close(self) -> None:
        with _silenced():
            self._run.finish()


def _silenced() -> contextlib.redirect_stdout[io.StringIO]:
    """Within the `with` block, drop trackio's output, because it would break the live view."""
    return contextlib.redirect_stdout(io.StringIO())
