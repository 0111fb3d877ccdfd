"""Real processes of `echo-node`, forked, killed, waited for and always cleaned up.

A `Cluster` is one directory with one configuration, and the nodes that a test starts in it. They
talk over loopback on ports that nobody else is given meanwhile. Every wait is bounded; one that
fails shows the end of every log. Where something is to happen in the middle of a run, a gate holds
the run there (`Cluster.hold_from`), however long the test takes to look.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from echo.runtime.identity import ECHO_JOIN, load_or_create_keys, write_join
from tests.e2e.audit import Audit, Record, audit, read_jsonl, read_ledger
from tests.e2e.fork_server import REPOSITORY, Fork, ForkServer

WITHIN_S = 150.0
"""Seconds for whatever is waited for, on a busy machine: imports of torch, whole runs."""
TAIL_LINES = 40

CONFIG = """
[run]
max_steps = 10

[model]
name = "{model}"

[task]
kind = "digits:DigitsTask"
reward_timeout_s = 100

[sampling]
max_completion_tokens = 8

[sync]
max_staleness = 3
publish_period = 1

[batch]
group_size = 4
groups_per_step = 4
keep_zero_variance = true

[optimizer]
learning_rate = 1e-2
warmup_steps = 0

[learner]
listen = "{learner}"
num_threads = 1

[relay]
listen = "{relay}"
connect = ["{learner}"]

[worker]
connect = ["{learner}"]
listen = "tcp://127.0.0.1:0"
num_threads = 1
max_concurrent_rollouts = 8

[checkpoint]
interval_steps = 3

[eval]
interval_steps = 0

[network]
heartbeat_s = 0.2
dead_after_s = 4
lease_timeout_s = 10
reconnect_for_s = 150
chunk_bytes = "16KiB"

[limits]
min_free_disk_bytes = 0

[ui]
live = "off"
"""

TASK = '''"""A task whose rewards differ within a group and whose pace the environment sets."""

import os
import time
from pathlib import Path

from echo.tasks.task import Example, Task

GATE = Path(__file__).with_name("gate")


class DigitsTask(Task):
    """The share of digits.

    REWARD_S makes each reward take a while, and the file `gate` tells from which example on none is
    given yet. The file REWARD_MARK, if there is to be one, appears with the first reward.
    """

    is_bounded = True

    def example(self, index: int, *, split: str) -> Example:
        return Example(index=index, split=split, prompt=f"{index % 1000:03d}=")

    def reward(self, example: Example, completion: str) -> float:
        if mark := os.environ.get("REWARD_MARK"):
            Path(mark).touch()
        while GATE.exists() and example.index >= int(GATE.read_text()):
            time.sleep(0.02)
        time.sleep(float(os.environ.get("REWARD_S", "0")))
        return sum(character.isdigit() for character in completion) / 8
'''

Result = TypeVar("Result")


def reserve_port() -> tuple[socket.socket, int]:
    """Return a port that only who asks for it by number gets, as long as the socket is open."""
    reserved = socket.socket()
    # Then others may listen on it although it is bound here.
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved, reserved.getsockname()[1]


class GrowingLedger:
    """The records of a run; what was read once is not read again."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._records: list[Record] = []

    def records(self) -> list[Record]:
        """Return all so far; none where there is no ledger yet."""
        self._records += read_ledger(self._run_dir, after=len(self._records))
        return self._records


class NodeProcess:
    """One process of a cluster."""

    def __init__(
        self, name: str, process: Fork | subprocess.Popen[bytes], output_path: Path
    ) -> None:
        self.name = name
        self.process = process
        self.output_path = output_path

    @property
    def output(self) -> str:
        """What it has written to its terminal so far."""
        return self.output_path.read_text(encoding="utf-8", errors="replace")

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        """Kill it at once, as `kill -9` does."""
        self.process.kill()
        self.process.wait(timeout=60)

    def interrupt(self) -> None:
        """Press Ctrl-C."""
        self.process.send_signal(signal.SIGINT)


class Cluster:
    """A directory, a configuration, and the nodes started with it."""

    def __init__(self, directory: Path, model: Path, forks: ForkServer) -> None:
        self.directory = directory
        self._forks = forks
        self._reserved, (learner_port, relay_port) = zip(
            *(reserve_port() for _ in range(2)), strict=True
        )
        self.learner_address = f"tcp://127.0.0.1:{learner_port}"
        self.relay_address = f"tcp://127.0.0.1:{relay_port}"
        self.run_dir = directory / "runs" / "run"
        self.nodes: list[NodeProcess] = []
        self._ledger = GrowingLedger(self.run_dir)
        self.settings: dict[str, Any] = {}
        """Settings of every node, besides those in the file."""
        self.config_path = directory / "config.toml"
        directory.mkdir(parents=True, exist_ok=True)
        self.config_path.write_text(
            CONFIG.format(model=model, learner=self.learner_address, relay=self.relay_address)
        )
        (directory / "digits.py").write_text(TASK)
        self.join = str(
            write_join(self.run_dir, self.learner_address, *load_or_create_keys(self.run_dir))
        )
        """With which relays and workers join; made here, so that any node may start first."""

    # --- processes -------------------------------------------------------------------------------

    def start(
        self,
        role: str,
        *arguments: str,
        name: str = "",
        settings: Mapping[str, object] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> NodeProcess:
        """Start a node.

        Args:
            role: learner, worker or relay.
            arguments: more of the command line, and options of `tests.e2e.node`.
            name: of a worker or relay.
            settings: `--set` for each; a value is written as JSON, which TOML reads alike.
            env: more environment.
        """
        overrides = {**self.settings, **(settings or {})}
        if name:
            overrides[f"{role}.name"] = name
        command = ["--role", role]
        if role == "learner":
            command.append("--no-report")
        if "--config" not in arguments:
            command += ["--config", str(self.config_path)]
        for key, value in overrides.items():
            command += ["--set", f"{key}={value if isinstance(value, str) else json.dumps(value)}"]
        output_path = self.directory / f"{len(self.nodes):02d}-{name or role}.out"
        process = self._forks.fork(
            [*command, *arguments],
            cwd=self.directory,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), ECHO_JOIN: self.join, **(env or {})},
            output=output_path,
        )
        node = NodeProcess(name or role, process, output_path)
        self.nodes.append(node)
        return node

    def close(self) -> None:
        """Kill whatever still runs."""
        for node in self.nodes:
            if node.is_running:
                node.kill()
        for reserved in self._reserved:
            reserved.close()

    # --- holding ---------------------------------------------------------------------------------

    def hold_from(self, group: int) -> None:
        """Let nobody finish this group, or a later one, until the gate is moved or opened."""
        written = self.directory / "gate.new"
        written.write_text(str(group))
        written.rename(self.directory / "gate")

    def let_go(self) -> None:
        """Open the gate for good."""
        self.hold_from(1 << 60)

    # --- waiting ---------------------------------------------------------------------------------

    def wait_for(
        self,
        condition: Callable[[], Result],
        what: str,
        *,
        alive: NodeProcess | None = None,
        within_s: float = WITHIN_S,
    ) -> Result:
        """Look until `condition` is true and return its value; `alive` must not end before."""
        give_up_at = time.monotonic() + within_s
        while True:
            # In this order, so that what a process did last is seen.
            is_gone = alive is not None and not alive.is_running
            result = condition()
            if result:
                return result
            if is_gone and alive is not None:
                code = alive.process.returncode
                raise AssertionError(f"{alive.name} ended with {code} before: {what}\n{self.logs}")
            if time.monotonic() > give_up_at:
                raise AssertionError(f"not within {within_s:.0f} s: {what}\n{self.logs}")
            time.sleep(0.05)

    def wait_for_end(self, node: NodeProcess, *, within_s: float = WITHIN_S) -> int:
        """Wait until a process has ended and return its exit code."""
        self.wait_for(lambda: not node.is_running, f"{node.name} ends", within_s=within_s)
        code = node.process.returncode
        assert code is not None
        return int(code)

    def wait_for_step(self, step: int, learner: NodeProcess) -> None:
        """Wait until the learner, which must not end before, has made a step."""
        self.wait_for(
            lambda: any(record["step"] >= step for record in self.records("trained")),
            f"step {step} is trained",
            alive=learner,
        )

    def finish(self, *nodes: NodeProcess) -> None:
        """Wait until all of these have ended by themselves, without an error."""

        def have_ended() -> bool:
            for node in nodes:
                code = node.process.poll()
                assert not code, f"{node.name} ended with {code}\n{self.logs}"
            return not any(node.is_running for node in nodes)

        self.wait_for(have_ended, f"{', '.join(node.name for node in nodes)} end")

    # --- reading ---------------------------------------------------------------------------------

    def records(self, kind: str | None = None) -> list[Record]:
        """Return the ledger's records so far, or those of one kind."""
        return [record for record in self._ledger.records() if kind in (None, record["kind"])]

    def audit(self, *, max_staleness: int = 3, is_finished: bool = True) -> Audit:
        """Audit the ledger; any problem fails the test."""
        result = audit(
            read_ledger(self.run_dir),
            max_staleness=max_staleness,
            groups_per_step=self.settings.get("batch.groups_per_step", 4),
            is_finished=is_finished,
        )
        problems = "\n".join(result.problems)
        assert not problems, f"the ledger in {self.run_dir} breaks the promises:\n{problems}"
        return result

    def metrics(self) -> list[Record]:
        """Return the rows of metrics.jsonl."""
        return read_jsonl(self.run_dir / "metrics.jsonl")

    def count(self, counter: str) -> float:
        """Return the largest value that a counter of the learner ever had."""
        return max((row.get(f"count/{counter}", 0) for row in self.metrics()), default=0)

    def installed(self, worker: str) -> list[Record]:
        """Return what a worker has installed so far."""
        path = self.run_dir / "workers" / worker / "installed.jsonl"
        return read_jsonl(path) if path.exists() else []

    def has_newest(self, worker: str) -> bool:
        """Return whether a worker has installed the version that was sealed last."""
        sealed, installed = self.records("sealed"), self.installed(worker)
        return bool(sealed and installed) and installed[-1]["version"] == sealed[-1]["version"]

    def open_groups(self, worker: str) -> set[int]:
        """Return the groups that a worker was granted and that have not come to an end."""
        ended = {record["group"] for record in self.records() if _is_result(record)}
        granted = {r["group"] for r in self.records("granted") if r["worker"] == worker}
        return granted - ended

    def log(self, name: str) -> str:
        """Return a node's log file."""
        path = self.run_dir / "logs" / f"{name}.log"
        return path.read_text(encoding="utf-8") if path.exists() else ""

    @property
    def logs(self) -> str:
        """The end of every log, for the message of a failure."""
        paths = [
            *sorted(self.directory.glob("*.out")),
            *sorted(self.directory.glob("runs/*/logs/*")),
        ]
        tails = []
        for path in paths:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL_LINES:]
            tails.append(f"--- {path.name}\n" + "\n".join(lines))
        last = "\n".join(json.dumps(record) for record in self.records()[-5:])
        return "\n".join([*tails, f"--- ledger\n{last}"])


def _is_result(record: Record) -> bool:
    return record["kind"] in ("accepted", "discarded")
