"""Ranks for tests: processes forked from one that has imported torch, in a process group of gloo.

    python -m tests.train.forked_ranks REQUESTS.json

The file has a list of [function, number of ranks, arguments]. Each function ("module:name") is
called on all ranks as function(rank_group, **arguments). A line is printed for each, with the JSON
value that rank 0 returned and the errors of all ranks. A function's attribute `times` has arguments
of `form`, for how long its ranks wait for each other.

Imports take most of the time of a small test of ranks, so they are made once, before the first
fork. No thread is started before it, since a fork would lose the thread. Several functions run at
once, since some only wait. Functions with the same argument `directory` run one after the other, as
one reads the files of another.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
TIMEOUT_S = 240.0
"""Limit of the time of a function. On a loaded machine, compiling layers takes half of it."""
NUM_AT_ONCE = 3
"""Functions that run at once."""
IMPORTS = ("torch.distributed.checkpoint", "transformers.models.qwen3.modeling_qwen3", "peft")
"""Modules that every rank needs, imported before the fork."""

Request = tuple[str, int, dict[str, Any]]


@dataclass(frozen=True)
class Answer:
    found: Any
    """Value that rank 0 returned."""
    errors: list[str]
    """Errors of ranks, or the signals that killed them."""

    @property
    def value(self) -> Any:
        assert not self.errors, "\n".join(self.errors)
        return self.found


def run_on_ranks(requests: list[Request], directory: Path) -> list[Answer]:
    """Return the answer to each request."""
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
    prepare({function.partition(":")[0] for function, _, _ in requests})
    waiting, running = requests[::-1], list[Forked]()
    answers: list[Forked] = []
    with tempfile.TemporaryDirectory() as directory:
        while waiting or running:
            while (
                waiting
                and len(running) < NUM_AT_ONCE
                and not any(each.uses(waiting[-1][2].get("directory")) for each in running)
            ):
                own = Path(directory) / str(len(answers))
                own.mkdir()
                answers.append(Forked(*waiting.pop(), own))
                running.append(answers[-1])
            running = [each for each in running if not each.is_over()]
            time.sleep(0.005)
        for each in answers:
            print(json.dumps(each.answer()))
    return 0


def prepare(modules: Iterable[str]) -> None:
    """Do once what all ranks need."""
    for name in (*modules, *IMPORTS):
        importlib.import_module(name)
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("qwen3")  # the first call compiles those of all families
    if sys.platform == "linux":
        assert len(list(Path("/proc/self/task").iterdir())) == 1, "an import started a thread"
    gc.collect()
    gc.freeze()  # or each rank's collector would touch, and so copy, all of it


class Forked:
    """The ranks of one request."""

    def __init__(
        self, function: str, size: int, arguments: dict[str, Any], directory: Path
    ) -> None:
        self._directory, self._state = directory, arguments.get("directory")
        self._running: dict[int, int] = {}
        for rank in range(size):
            if not (pid := os.fork()):
                os._exit(be_rank(function, rank, size, arguments, directory))
            self._running[pid] = rank
        self._give_up_at = time.monotonic() + TIMEOUT_S
        self._errors: list[str] = []

    def uses(self, state: str | None) -> bool:
        """Return whether another request has the same directory as this one."""
        return state is not None and state == self._state

    def is_over(self) -> bool:
        """Note the ranks that have ended, and kill those beyond their time."""
        for pid, rank in list(self._running.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if not found:
                continue
            del self._running[pid]
            if code := os.waitstatus_to_exitcode(status):
                trace = self._directory / f"{rank}.txt"
                text = trace.read_text() if trace.exists() else f"rank {rank}: code {code}"
                self._errors.append(text)
            if code or not rank:  # the others wait for it, and rank 0 says why
                soon = time.monotonic() + (30.0 if rank else 2.0)
                self._give_up_at = min(self._give_up_at, soon)
        if time.monotonic() > self._give_up_at:
            for pid in self._running:
                os.kill(pid, signal.SIGKILL)
            self._give_up_at = float("inf")
        return not self._running

    def answer(self) -> dict[str, Any]:
        """Return the value of rank 0 and the traces of all that failed."""
        path = self._directory / "0.json"
        found = json.loads(path.read_text()) if path.exists() else None
        return {"found": found, "errors": self._errors}


def be_rank(function: str, rank: int, size: int, arguments: dict[str, Any], directory: Path) -> int:
    """Run as one rank; write the answer or a trace, and return the exit code."""
    import torch
    import torch.distributed as dist

    from echo.train.ranks.rank_group import form

    os.dup2(2, 1)  # the answers' channel is the server's
    torch.set_num_threads(1)
    module, _, name = function.partition(":")
    try:
        called = getattr(importlib.import_module(module), name)
        times = getattr(called, "times", {"collective_s": TIMEOUT_S})
        path = f"{directory}/store"
        store = dist.FileStore(path, size)  # type: ignore[attr-defined] # a star brings it there
        answer = called(form(store, rank, size, torch.device("cpu"), **times), **arguments)
        (directory / f"{rank}.json").write_text(json.dumps(answer))
    except BaseException:  # noqa: BLE001 - told to whoever asked, then the process ends
        (directory / f"{rank}.txt").write_text(f"rank {rank}: {traceback.format_exc()}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
