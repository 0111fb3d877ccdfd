"""Nodes of a benchmark that do not come, and do not go, end it in time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from nodes import processes

DEAF = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
time.sleep(60)
"""

NAMES = (
    "steps",
    "tokens",
    "max_staleness",
    "group_size",
    "groups_per_step",
    "max_concurrent_rollouts",
    "dead_after_s",
)
"""What a benchmark leaves open in the configuration of its nodes."""


@pytest.mark.slow
def test_a_learner_that_says_nothing_and_hears_nothing_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deaf.py").write_text(DEAF)
    monkeypatch.setattr(processes, "END_S", 0.1)
    settings: dict[str, Any] = dict.fromkeys(NAMES, 1)
    with pytest.raises(SystemExit, match="no learner that workers can join: it is silent"):
        processes.run_nodes(
            "deaf", tmp_path, [], lambda _: [], within_s=0.5, tree=tmp_path, **settings
        )


NODE = """
import os, pathlib, signal, sys, time

def end(*_):
    pathlib.Path({directory!r}, "ended").touch()
    sys.exit()

signal.signal(signal.SIGTERM, end)
pathlib.Path({directory!r}, "fifo").write_text(f"{{os.getpid()}}\\n")
time.sleep(60)
"""
SCRIPT = """
import pathlib
import harness
from learning import quickstart
from nodes import processes
harness.parse(harness.new_parser("A benchmark."))
where = pathlib.Path({directory!r})
settings = dict.fromkeys({names}, 1)
{call}
"""
RUN_NODES = """
processes.run_nodes("node", where, [], lambda _: [], within_s=60, tree=where, **settings)
"""
QUICKSTART = "quickstart.train('addition', 0, [], timeout_s=60)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "call"), [("node.py", RUN_NODES), ("echo/cli/main.py", QUICKSTART)]
)
def test_a_benchmark_that_gets_sigterm_ends_its_nodes(
    tmp_path: Path, module: str, call: str
) -> None:
    node_path = tmp_path / module
    node_path.parent.mkdir(parents=True, exist_ok=True)
    node_path.write_text(NODE.format(directory=str(tmp_path)))
    os.mkfifo(tmp_path / "fifo")
    script = SCRIPT.format(names=NAMES, directory=str(tmp_path), call=call)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{processes.BENCH}"}
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, env=environment, cwd=tmp_path) as benchmark:
        node = int((tmp_path / "fifo").read_text())
        benchmark.terminate()
        assert benchmark.wait(timeout=30) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(node, 0)
    assert (tmp_path / "ended").exists()
