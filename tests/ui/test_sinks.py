from __future__ import annotations

import errno
import json
import math
import re
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from echo.core.errors import ConfigError, StorageError
from echo.core.extras import install_command
from echo.core.monitoring.samples import TextSample
from echo.records.run_files import read_metrics
from echo.ui import sinks
from echo.ui.sinks import Metric, MetricsWriter, drop_torn_line


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_row_holds_step_time_and_numbers(tmp_path: Path) -> None:
    row: dict[str, Any] = {"reward/mean": np.float32(0.5), "grad_norm": math.nan}
    row["staleness/hist"] = {0: np.int64(7), "1": 2}
    with MetricsWriter(tmp_path / "run") as writer:
        writer.write(3, row, at=12.5)
    row = {"reward/mean": 0.5, "grad_norm": None, "staleness/hist": {"0": 7, "1": 2}}
    assert rows(writer.path) == [{"step": 3, "time": 12.5, **row}]


def test_rows_are_on_disk_at_once_and_survive_a_resume(tmp_path: Path) -> None:
    first = MetricsWriter(tmp_path)
    first.write(1, {"reward/mean": 0.1})
    assert [row["step"] for row in rows(first.path)] == [1]
    # As a kill leaves it: not closed, the last row torn.
    with first.path.open("ab") as file:
        file.write(b'{"step":2,"time":1.0,"rew')
    with MetricsWriter(tmp_path) as second:
        second.write(2, {"reward/mean": 0.2})
    assert [row["reward/mean"] for row in read_metrics(tmp_path).train] == [0.1, 0.2]
    first.close()


@given(whole=st.lists(st.binary(max_size=40).filter(lambda b: b"\n" not in b)), torn=st.binary())
@example(whole=[b"{}"], torn=b"x" * 200_000)  # longer than a read
def test_only_the_torn_line_is_dropped(
    tmp_path_factory: pytest.TempPathFactory, whole: list[bytes], torn: bytes
) -> None:
    path = tmp_path_factory.mktemp("torn") / "metrics.jsonl"
    kept = b"".join(line + b"\n" for line in whole)
    path.write_bytes(kept + torn.replace(b"\n", b""))
    drop_torn_line(path)
    assert path.read_bytes() == kept


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_and_an_unwritable_directory_are_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    full = r"metrics.jsonl: cannot write step 4: No space left"
    with MetricsWriter(tmp_path) as writer, pytest.raises(StorageError, match=full):
        writer.write(4, {"reward/mean": 0.1})
    (tmp_path / "run").write_text("a file")
    with pytest.raises(StorageError, match=r"run/metrics.jsonl: cannot be written"):
        MetricsWriter(tmp_path / "run")


@pytest.mark.parametrize("name", ["tensorboard", "trackio", "wandb"])
def test_a_sink_that_is_not_installed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for module in [m for m in sys.modules if m.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, name, None)  # what Python itself does to block an import
    expected = rf"metrics.sinks = .{name}. needs {name}, which .*{re.escape(install_command(name))}"
    with pytest.raises(ConfigError, match=expected):
        MetricsWriter(tmp_path / "run", sinks=[name])
    [problem] = sinks.sinks_missing([name])
    assert re.search(expected, problem)
    assert not (tmp_path / "run").exists()


class FailingRun:
    """What wandb.init and tensorboard.summary.Writer return, on a disk that is full."""

    def __getattr__(self, name: str) -> Any:
        def call(*_: object, **__: object) -> None:
            if name in ("log", "flush", "close", "finish"):
                raise OSError(errno.ENOSPC, "No space left on device")

        return call


def no_login(**_: object) -> FailingRun:
    raise LookupError("api_key not configured (no-tty)\ncall wandb.login(key=[your_api_key])")


@pytest.mark.parametrize(
    ("sink", "init", "texts"),
    [
        ("wandb", no_login, ["api_key not configured (no-tty)\\ncall", "WANDB_MODE=offline"]),
        ("wandb", lambda **_: FailingRun(), ["No space left", "WANDB_API_KEY"]),
        ("wandb", lambda **_: sys.exit(3), ["SystemExit: 3; "]),
        ("wandb", lambda **_: (_ for _ in ()).throw(ConnectionError), ["ConnectionError; set"]),
        ("tensorboard", lambda _: FailingRun(), ["No space left", "free some disk space"]),
    ],
)
def test_a_sink_that_fails_is_told_once_and_training_goes_on(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    sink: str,
    init: Any,
    texts: list[str],
) -> None:
    library = SimpleNamespace(init=init, summary=SimpleNamespace(Writer=init))
    monkeypatch.setitem(sys.modules, sink, library)
    monkeypatch.setitem(sys.modules, f"{sink}.summary", library.summary)
    with MetricsWriter(tmp_path, sinks=[sink]) as writer:
        for step in (1, 2):
            writer.write(step, {"reward/mean": 0.5})
    assert [row["step"] for row in rows(writer.path)] == [1, 2]
    [said] = caplog.messages
    assert said.startswith(f'metrics.sinks = "{sink}" fails and is left out, training goes on: ')
    assert said.endswith(f"{writer.path} has every number")
    assert all(text in said for text in texts)


class SilentTracker:
    """A tracker whose server accepts connections and never answers."""

    def __init__(self) -> None:
        self.was_asked, self.may_answer = threading.Event(), threading.Event()

    def init(self, **_: object) -> FailingRun:
        self.was_asked.set()
        self.may_answer.wait(60)
        return FailingRun()


def test_a_tracker_that_never_answers_delays_neither_start_nor_steps_nor_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = SilentTracker()
    monkeypatch.setitem(sys.modules, "wandb", tracker)
    monkeypatch.setattr(sinks, "CLOSE_S", 0.01)
    monkeypatch.setattr(sinks, "MAX_ROWS_BEHIND", 2)
    try:
        with MetricsWriter(tmp_path, sinks=["wandb"]) as writer:
            assert tracker.was_asked.wait(60)
            for step in range(1, 6):
                writer.write(step, {"reward/mean": 0.5})
        assert [row["step"] for row in rows(writer.path)] == [1, 2, 3, 4, 5]
        behind, unfinished = caplog.messages
        assert "does not keep up and has holes from now on: step 3; " in behind
        assert "did not finish: no answer within 0.01 s; " in unfinished
    finally:
        tracker.may_answer.set()
    # At the end of the process the library gives up, which adds no second line.
    [thread] = [each for each in threading.enumerate() if each.name == "sink-wandb"]
    thread.join(60)
    assert caplog.messages == [behind, unfinished]


def test_tensorboard_gets_every_number(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsWriter(tmp_path, sinks=["tensorboard"]) as writer:
        for step in (1, 2):
            row: dict[str, Metric] = {"reward/mean": step / 4, "staleness/hist": {"0": 1}}
            writer.write(step, row, at=float(step))
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert events.Tags()["tensors"] == ["reward/mean"]
    values = [float(np.asarray(e.tensor_proto.float_val)[0]) for e in events.Tensors("reward/mean")]
    assert values == [0.25, 0.5]


SAMPLES = [
    TextSample(kind="train", prompt="1+1=", completion="2\x1b[2J", reward=1.0, source="w1"),
    TextSample(kind="eval", prompt="`|`", completion="<b>", reward=math.nan, source="v3"),
]


def test_tensorboard_gets_samples_as_a_table_without_control_characters(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsWriter(tmp_path, sinks=["tensorboard"]) as writer:
        writer.write(3, {"reward/mean": 0.5})
        writer.write_samples(3, SAMPLES)
    events = EventAccumulator(str(tmp_path / "tensorboard" / "samples")).Reload()
    [event] = events.Tensors("samples")
    [head, _, *cells] = event.tensor_proto.string_val[0].decode().splitlines()
    assert head == "kind | reward | source | prompt | completion"
    assert cells == [
        "`train` | 1 | `w1` | `1+1=` | `2\\x1b[2J`",
        "`eval` | nan | `v3` | `'¦'` | `<b>`",
    ]
    assert event.step == 3


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(60)
def test_wandb_works_offline_and_goes_on_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    ids = []
    for step in (2, 1):
        with MetricsWriter(tmp_path, sinks=["wandb"], config={"run": {"seed": 0}}) as writer:
            writer.write(step, {"reward/mean": 0.5})
            writer.write_samples(step, SAMPLES)
        ids.append((tmp_path / "wandb_id").read_text())
    assert ids[0] == ids[1]
    logs = list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert logs
    assert all(ids[0] in log.name for log in logs)
    assert any(b"samples" in log.read_bytes() for log in logs)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(60)
def test_trackio_keeps_rows_and_samples_here_and_goes_on_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    trackio = pytest.importorskip("trackio")
    run_dir = tmp_path / "addition"
    for step in (2, 3):
        with MetricsWriter(run_dir, sinks=["trackio"], config={"run": {"seed": 0}}) as writer:
            writer.write(step, {"reward/mean": 0.5})
            writer.write_samples(step, SAMPLES)
    assert [run.name for run in trackio.Api().runs("echo")] == ["addition"]
    logged = trackio.SQLiteStorage.get_logs("echo", "addition")
    assert [row["step"] for row in logged if row.get("reward/mean") == 0.5] == [2, 3]
    tables = [row["samples"] for row in logged if "samples" in row]
    assert len(tables) == 2
    assert "1+1=" in str(tables[0])


class _Server(ThreadingHTTPServer):
    """A server of wandb's calls that answers each with one status, or never."""

    def __init__(self, status: int | None) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.status, self.may_end = status, threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def end(self) -> None:
        self.may_end.set()
        self.shutdown()
        self.server_close()


class _Answer(BaseHTTPRequestHandler):
    server: _Server

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        if self.server.status is None:
            self.server.may_end.wait(60)
            return
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(b"\x00 no JSON")

    def log_message(self, *_: object) -> None: ...


@pytest.mark.matrix
@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("status", [None, 200, 401, 403, 500])
def test_a_wandb_server_that_refuses_fails_or_is_silent_holds_nothing_up(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    status: int | None,
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setattr(sinks, "CLOSE_S", 2.0)
    server = _Server(status)
    try:
        monkeypatch.setenv("WANDB_API_KEY", 40 * "a")
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
        with MetricsWriter(tmp_path, sinks=["wandb"]) as writer:
            for step in range(1, 4):
                began_at = time.monotonic()
                writer.write(step, {"reward/mean": 0.5})
                assert time.monotonic() - began_at < 2.0
    finally:
        server.end()
    assert [row["step"] for row in rows(writer.path)] == [1, 2, 3]
    [said] = [text for text in caplog.messages if text.startswith("metrics.sinks")]
    assert "fails and is left out" in said or "did not finish" in said
