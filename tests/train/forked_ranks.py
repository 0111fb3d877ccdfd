"""Ranks for tests: processes forked from one that has imported torch, in a process group of gloo.

    python -m tests.train.forked_ranks REQUESTS.json

The file has a list of [function, number of ranks, arguments]. One after the other, each function
("module:name") is called on all ranks as function(crew, **arguments), and what rank 0 returns (of
JSON) and what any rank raised is printed, a line each. A function may have `times` that its ranks
wait for each other, of `form`. Importing takes most of the time of a small
test of ranks, and is done once; nothing else happens before a fork, so no thread is lost in it.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
TIMEOUT_S = 120.0
"""Of a whole function."""

Request = tuple[str, int, dict[str, Any]]


@dataclass(frozen=True)
class Answer:
    found: Any
    """What rank 0 returned."""
    errors: list[str]
    """What ranks raised, or the signals that killed them."""

    @property
    def value(self) -> Any:
        assert not self.errors, "\n".join(self.errors)
        return self.found


def run_on_ranks(requests: list[Request], directory: Path) -> list[Answer]:
    """Return what came of each request."""
    path = directory / "requests.json"
    path.write_text(json.dumps(requests))
    done = subprocess.run(
        [sys.executable, "-m", __name__, str(path)],
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    found = [Answer(**json.loads(line)) for line in done.stdout.splitlines()]
    assert len(found) == len(requests)
    return found


def main(path: str) -> int:
    requests: list[Request] = json.loads(Path(path).read_text())
    for name in {function.partition(":")[0] for function, _, _ in requests}:
        importlib.import_module(name)
    importlib.import_module("torch.distributed.checkpoint")
    importlib.import_module("transformers.models.qwen3.modeling_qwen3")
    if sys.platform == "linux":
        assert len(list(Path("/proc/self/task").iterdir())) == 1, "an import started a thread"
    for request in requests:
        with tempfile.TemporaryDirectory() as directory:
            print(json.dumps(fork_ranks(*request, Path(directory))), flush=True)
    return 0


def fork_ranks(
    function: str, size: int, arguments: dict[str, Any], directory: Path
) -> dict[str, Any]:
    """Return the value of rank 0 and the traces of all that failed."""
    running: dict[int, int] = {}
    for rank in range(size):
        if not (pid := os.fork()):
            os._exit(be_rank(function, rank, size, arguments, directory))
        running[pid] = rank
    give_up_at = time.monotonic() + TIMEOUT_S
    errors = []
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            rank = running.pop(pid)
            if code := os.waitstatus_to_exitcode(status):
                trace = directory / f"{rank}.txt"
                errors.append(trace.read_text() if trace.exists() else f"rank {rank}: code {code}")
            if code or not rank:  # the others wait for it, and rank 0 says why
                give_up_at = min(give_up_at, time.monotonic() + (30.0 if rank else 2.0))
        elif time.monotonic() > give_up_at:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
            give_up_at = float("inf")
        else:
            time.sleep(0.005)
    path = directory / "0.json"
    return {"found": json.loads(path.read_text()) if path.exists() else None, "errors": errors}


def be_rank(function: str, rank: int, size: int, arguments: dict[str, Any], directory: Path) -> int:
    """Be one of the ranks, leave the answer or a trace, and return the exit code."""
    import torch
    import torch.distributed as dist

    from echo.train.ranks.crew import form

    os.dup2(2, 1)  # the answers' channel is the server's
    torch.set_num_threads(1)
    module, _, name = function.partition(":")
    try:
        called = getattr(importlib.import_module(module), name)
        times = getattr(called, "times", {"collective_s": TIMEOUT_S, "silent_s": TIMEOUT_S})
        store = dist.FileStore(f"{directory}/store", size)
        answer = called(form(store, rank, size, torch.device("cpu"), **times), **arguments)
        (directory / f"{rank}.json").write_text(json.dumps(answer))
    except BaseException:  # noqa: BLE001 - told to whoever asked, then the process ends
        (directory / f"{rank}.txt").write_text(f"rank {rank}: {traceback.format_exc()}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
