"""`echo-rl eval --serve`: real workers, one of which is killed, give the scores of one machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from echo.runtime.identity import ECHO_JOIN
from tests.e2e.cluster import WITHIN_S, Cluster
from tests.e2e.fork_server import REPOSITORY

pytestmark = [pytest.mark.e2e, pytest.mark.matrix, pytest.mark.timeout(600)]


def test_workers_of_which_one_is_killed_give_the_scores_of_one_machine(
    cluster: Cluster, model_dir: Path
) -> None:
    command = [sys.executable, "-m", "echo.cli.main", "eval", str(model_dir), "--json"]
    command += ["--config", str(cluster.config_path), "--prompts", "8", "--samples", "3"]
    where: dict[str, Any] = {
        "cwd": cluster.directory,
        "env": {**os.environ, "PYTHONPATH": str(REPOSITORY)},
        "text": True,
    }
    log = cluster.directory / "eval.out"
    cluster.hold_from(4)
    with log.open("w") as errors:
        served = subprocess.Popen(
            [*command, "--serve", cluster.learner_address],
            stdout=subprocess.PIPE, stderr=errors, **where,
        )  # fmt: skip
    try:
        join = cluster.directory / "runs" / "eval" / "keys" / "join"
        what = "the evaluation writes its join string"
        cluster.wait_for(join.exists, what, within_s=2 * WITHIN_S)  # it imports all that a fork has
        first, second = (
            cluster.start(
                "worker",
                name=name,
                settings={"batch.group_size": 1},  # the file has a run's
                env={ECHO_JOIN: join.read_text().strip()},
            )
            for name in ("w1", "w2")
        )
        cluster.wait_for(lambda: " of 32 answers, 2 workers" in log.read_text(), "some answers")
        first.kill()
        cluster.let_go()
        output, _ = served.communicate(timeout=WITHIN_S)
    finally:
        served.kill()
        served.wait()
    assert served.returncode == 0, log.read_text()
    cluster.finish(second)
    assert "w1 is silent" in log.read_text()

    alone = subprocess.run(command, check=True, capture_output=True, timeout=WITHIN_S, **where)
    expected, found = json.loads(alone.stdout), json.loads(output)
    assert (expected.pop("engine"), found.pop("engine")) == ("transformers", "transformers float32")
    assert found == expected
