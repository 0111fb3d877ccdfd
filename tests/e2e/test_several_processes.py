"""A learner of two processes: one is killed, the other says so, and the same command goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster, NodeProcess, reserve_port
from tests.e2e.fork_server import REPOSITORY

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

ENDS_WITHIN_S = 60.0
"""From a process's death until the other has ended; some six on an idle machine."""


SETTINGS = {"run.max_steps": 6, "checkpoint.interval_steps": 2}


def free_port() -> int:
    """Return a port that nobody listens on."""
    held, port = reserve_port()
    held.close()
    return port


def start_learner(cluster: Cluster) -> list[NodeProcess]:
    """Start both processes as torchrun would."""
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [
        cluster.start(
            "learner",
            "--resume-or-begin",
            settings=SETTINGS,
            env={**world, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]


def test_a_killed_process_ends_the_job_and_the_same_command_goes_on(cluster: Cluster) -> None:
    worker = cluster.start("worker", name="w1")
    first, second = start_learner(cluster)
    cluster.wait_for_step(3, first)
    second.process.send_signal(signal.SIGTERM)  # which the first alone heeds
    time.sleep(0.2)
    assert second.is_running
    second.kill()
    assert cluster.wait_for_end(first, within_s=ENDS_WITHIN_S) == 1
    log = (cluster.run_dir / "logs" / "learner.log").read_text()
    assert "rank 1 left no reason" in log
    assert worker.is_running

    cluster.finish(*start_learner(cluster), worker)
    assert len(cluster.records("lineage")) == 2
    assert cluster.records("lineage")[1]["fork_step"] >= 2
    cluster.audit()
    assert (cluster.run_dir / "final" / "model.safetensors").exists()


def find_rank(launcher: int, rank: int) -> int:
    """Return the process of a rank among a launcher's children; 0 if it is not there yet."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            environment = (path / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if parent == launcher and f"RANK={rank}".encode() in environment:
            return int(path.name)
    return 0


def start_torchrun(cluster: Cluster, machines: int) -> list[NodeProcess]:
    """Start two processes by a launcher, or one by the launcher of each of two machines."""
    command = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "2"]
    command += ["--nnodes", str(machines), "--nproc-per-node", str(2 // machines)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    command += ["-m", "echo.cli.main", "node", "--role", "learner", "--no-report"]
    command += ["--resume-or-begin", "--config", str(cluster.config_path)]
    for key, value in SETTINGS.items():
        command += ["--set", f"{key}={value}"]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    if machines > 1:
        env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    for number in range(machines):
        output = cluster.directory / f"torchrun{number}.out"
        with output.open("wb") as written:
            process = subprocess.Popen(
                command, cwd=cluster.directory, env=env, stdout=written, stderr=written
            )
        cluster.nodes.append(NodeProcess(f"torchrun{number}", process, output))
    return cluster.nodes[-machines:]


@pytest.mark.matrix
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("machines", [1, 2])
def test_torchrun_begins_a_new_life_that_continues(machines: int, cluster: Cluster) -> None:
    worker = cluster.start("worker", name="w1")
    launchers = start_torchrun(cluster, machines)
    cluster.wait_for_step(3, launchers[0])
    os.kill(max(find_rank(launcher.process.pid, 1) for launcher in launchers), signal.SIGKILL)
    cluster.finish(*launchers, worker)
    lineages = cluster.records("lineage")
    assert len(lineages) == 2
    assert lineages[1]["fork_step"] >= 2
    cluster.audit()
    assert "rank 1 left no reason" in (cluster.run_dir / "logs" / "learner.log").read_text()
