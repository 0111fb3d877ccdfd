"""The processes of bench_broadcast.py: where they run, and what each variant does with them."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PATIENCE_S = 300.0
"""Longest silence of a process that is taken for work."""


class Process:
    """A program that answers lines with JSON lines, and ends with its stdin."""

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._popen = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=HERE.parent
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._popen.stdout:
            self._lines.put(line)
        self._lines.put("")

    def say(self, line: str) -> None:
        self._popen.stdin.write(line + "\n")
        self._popen.stdin.flush()

    def hear(self) -> dict[str, Any]:
        line = self._lines.get(timeout=PATIENCE_S)
        if not line:
            raise RuntimeError(f"{' '.join(self._command)} ended with {self._popen.wait()}")
        return json.loads(line)

    def ask(self, line: str) -> dict[str, Any]:
        self.say(line)
        return self.hear()

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.close()
        try:
            self._popen.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            self._popen.wait()


class Loopback:
    """All nodes beside each other on 127.0.0.1."""

    name = "loopback"
    bytes_per_s: float | None = None
    latency_s = 0.0

    def host(self, index: int) -> str:
        return "127.0.0.1"

    def start(self, index: int, script: str, *arguments: str, python: str = "") -> Process:
        return Process([python or sys.executable, str(HERE / script), *arguments])

    def cpu_s(self) -> float:
        return 0.0

    def close(self) -> None:
        pass


class Wan(Loopback):
    """Each node in a namespace behind an emulated uplink; node 0 is the learner's."""

    def __init__(self, num_nodes: int, *, rate_mbit: float, latency_ms: float, loss: float) -> None:
        self.name = f"{rate_mbit:g} Mbit/s, {2 * latency_ms:g} ms RTT, loss {loss:g}"
        self.bytes_per_s, self.latency_s = rate_mbit * 1e6 / 8, latency_ms / 1e3
        options = {"nodes": num_nodes, "rate-mbit": rate_mbit, "latency-ms": latency_ms}
        words = [f"--{key}={value}" for key, value in {**options, "loss": loss}.items()]
        self._core = Process([sys.executable, str(HERE / "wan.py"), *words])
        self._nodes = self._core.hear()["nodes"]

    def host(self, index: int) -> str:
        return str(self._nodes[index][1])

    def start(self, index: int, script: str, *arguments: str, python: str = "") -> Process:
        inside = ["ip", "netns", "exec", self._nodes[index][0]]
        return Process([*inside, python or sys.executable, str(HERE / script), *arguments])

    def cpu_s(self) -> float:
        return float(self._core.ask("status")["cpu_s"])

    def close(self) -> None:
        self._core.close()


class Variant:
    """One way to bring an image to `num_receivers` nodes."""

    name = ""
    num_receivers = 1
    step = 0
    _processes: list[Process]

    def deliver(self, num_bytes: int, chunk_bytes: int) -> dict[str, Any]:
        """Return seconds until the last receiver has it, CPU seconds, how many have it right."""
        raise NotImplementedError

    def cpu_s(self) -> float:
        return sum(process.ask("cpu")["cpu_s"] for process in self._processes)

    def close(self) -> None:
        for process in reversed(
            self._processes
        ):  # children before parents, so that nobody is missed
            process.close()


class Echo(Variant):
    """This project: `kind` is "chain" or "star"; with `listen`, receivers are other machines."""

    def __init__(
        self, path: Loopback, kind: str, count: int, window_bytes: int, listen: str | None = None
    ) -> None:
        self.name, self.kind, self.num_receivers = f"echo {kind}", kind, count
        window = f"--window-bytes={window_bytes}"
        where = listen or f"tcp://{path.host(0)}:0"
        learner = path.start(0, "broadcast_node.py", "learner", f"--listen={where}", window)
        self._processes = [learner]
        self._is_remote = listen is not None
        address = learner.hear()["address"]
        receivers = {}
        for index in [] if listen else range(1, count + 1):
            name = f"receiver-{index}"
            options = [f"--connect={address}", f"--name={name}", window]
            if kind == "chain":
                options.append(f"--listen=tcp://{path.host(index)}:0")
            receivers[name] = path.start(index, "broadcast_node.py", "receiver", *options)
        # Nearest the learner first: they join in any order, and the plan follows that.
        parents = learner.ask(f"plan {count}")["parents"]
        order = sorted(receivers, key=lambda name: distance(name, parents))
        self._processes += [receivers[name] for name in order]

    def deliver(self, num_bytes: int, chunk_bytes: int) -> dict[str, Any]:
        learner, *receivers = self._processes
        self.step += 1
        wanted = learner.ask(f"prepare {self.step} {num_bytes} {chunk_bytes}")["hash"]
        cpu_s = self.cpu_s()
        started_at = learner.ask("publish")["at"]
        if self._is_remote:
            arrived_at = learner.ask("installed")["at"]
            return {"seconds": arrived_at - started_at, "num_right": self.num_receivers}
        arrived_at = max(receiver.hear()["at"] for receiver in receivers)
        cpu_s = self.cpu_s() - cpu_s
        answers = [receiver.ask("hash") for receiver in receivers]
        return {
            "seconds": arrived_at - started_at,
            "cpu_s": cpu_s,
            "num_right": sum(answer["hash"] == wanted for answer in answers),
        }


class RawTcp(Variant):
    """One TCP stream from node 0 to node 1, received into one buffer and not looked at."""

    name = kind = "raw TCP"

    def __init__(self, path: Loopback) -> None:
        listen = f"--listen=tcp://{path.host(0)}:0"
        source = path.start(0, "broadcast_node.py", "source", listen)
        connect = f"--connect={source.hear()['address']}"
        sink = path.start(1, "broadcast_node.py", "sink", connect)
        sink.hear()
        self._processes = [source, sink]

    def deliver(self, num_bytes: int, chunk_bytes: int) -> dict[str, Any]:
        source, sink = self._processes
        cpu_s = self.cpu_s()
        sink.say(f"receive {num_bytes}")
        started_at = source.ask(f"publish {num_bytes}")["at"]
        seconds = sink.hear()["at"] - started_at
        return {"seconds": seconds, "cpu_s": self.cpu_s() - cpu_s, "num_right": 1}


class Shardcast(Variant):
    """The package of that name: clients of one origin."""

    name, kind = "shardcast", "star"

    def __init__(self, path: Loopback, count: int, python: str) -> None:
        self.num_receivers, script = count, "shardcast_node.py"
        self._processes = [path.start(0, script, "origin", python=python)]
        self._processes[0].hear()
        upstream = f"--upstream={path.host(0)}"
        for index in range(1, count + 1):
            client = path.start(index, script, "client", upstream, python=python)
            client.hear()  # one after the other: they share a file in /tmp
            self._processes.append(client)

    def deliver(self, num_bytes: int, chunk_bytes: int) -> dict[str, Any]:
        origin, *receivers = self._processes
        self.step += 1
        wanted = origin.ask(f"prepare {self.step} {num_bytes}")["hash"]
        for receiver in receivers:
            receiver.say(f"receive {self.step}")
        started_at = origin.ask("publish")["at"]
        answers = [receiver.hear() for receiver in receivers]
        return {
            "seconds": max(answer["at"] for answer in answers) - started_at,
            "num_right": sum(answer["hash"] == wanted for answer in answers),
        }


def distance(name: str, parents: dict[str, str]) -> int:
    """Return the hops from the learner, which alone has no parent."""
    return 1 + distance(parents[name], parents) if name in parents else 0


def shardcast_fault(python: str) -> str | None:
    """Return why the package cannot be measured, or None."""
    found = subprocess.run([python, "-c", "import shardcast"], capture_output=True, check=False)
    if found.returncode:
        return "the interpreter has no package shardcast (pip install shardcast)"
    if subprocess.run(["which", "wget"], capture_output=True, check=False).returncode:
        return "it downloads with wget, which is not installed"  # and would install it by itself
    return None
