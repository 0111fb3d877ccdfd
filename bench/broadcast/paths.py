"""Processes of bench_broadcast.py side by side, or behind emulated links."""

from __future__ import annotations

import contextlib
import json
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parents[1]
PATIENCE_S = 300.0
"""Longest silence of a process that is taken for work."""


class Process:
    """A program that answers lines with JSON lines, and ends with its stdin."""

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._popen = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=BENCH
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            self._lines.put(line)
        self._lines.put("")

    def say(self, line: str) -> None:
        """Give a command."""
        assert self._popen.stdin is not None
        self._popen.stdin.write(line + "\n")
        self._popen.stdin.flush()

    def hear(self, within_s: float = PATIENCE_S) -> dict[str, Any]:
        """Return the next answer or event.

        Raises:
            RuntimeError: if the process has ended, said why it cannot, or is silent for too long.
        """
        name = " ".join(self._command)
        try:
            line = self._lines.get(timeout=within_s)
        except queue.Empty:
            raise RuntimeError(f"{name} said nothing for {within_s:g} s") from None
        if not line:
            raise RuntimeError(f"{name} ended with {self._popen.wait()}")
        fields: dict[str, Any] = json.loads(line)
        if "fault" in fields:
            raise RuntimeError(fields["fault"])
        return fields

    def ask(self, line: str) -> dict[str, Any]:
        """Give a command and return its answer."""
        self.say(line)
        return self.hear()

    @property
    def exit_status(self) -> int | None:
        """What it ended with; None while it runs. Waits a little where its end was heard."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout=1)
        return self._popen.returncode

    @property
    def has_ended(self) -> bool:
        """Whether it runs no more."""
        return self._popen.poll() is not None

    def kill(self) -> None:
        """End it without a last word."""
        self._popen.kill()
        self._popen.wait()

    def close(self) -> None:
        """End it by the end of its stdin."""
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.close()
        try:
            self._popen.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.kill()


class Loopback:
    """All nodes beside each other on 127.0.0.1."""

    name = "loopback"
    bytes_per_s: float | None = None
    """Of each uplink; None where nothing limits it."""
    latency_s = 0.0
    stream_at = 0
    """Node where the raw stream that all is compared with begins; it goes to the next one."""
    step = 0

    def listen(self, index: int) -> str:
        """Return where node `index` shall listen."""
        return "tcp://127.0.0.1:0"

    def advertise(self, index: int) -> str | None:
        """Return where others reach it, if that is not where it listens."""
        return None

    def start(self, index: int, module: str, *arguments: str, python: str = "") -> Process:
        """Start a module of bench/ on node `index`."""
        return Process([python or sys.executable, "-m", module, *arguments])

    def status(self) -> dict[str, float]:
        """Return what the emulator tells: cpu_s, at, and what it carried; nothing without one."""
        return {}

    def close(self) -> None:
        """Remove what was made."""


class Wan(Loopback):
    """Each node in a namespace behind an emulated uplink; node 0 is the learner's."""

    def __init__(self, num_nodes: int, **options: float | str | bool) -> None:
        """Start the emulator.

        Args:
            num_nodes: namespaces.
            options: of wan.py, with underscores: rate_mbit, latency_ms, loss, tuned, ...
        """
        rate, latency = float(options["rate_mbit"]), float(options["latency_ms"])
        self.name = f"{rate:g} Mbit/s, {2 * latency:g} ms RTT, loss {options.get('loss', 0):g}"
        self.name += ", tuned buffers" if options.get("tuned") else ""
        self.bytes_per_s, self.latency_s = rate * 1e6 / 8, latency / 1e3
        words = [f"--nodes={num_nodes}"]
        for key, value in options.items():
            flag = "--" + key.replace("_", "-")
            words += [flag] if value is True else [f"{flag}={value}"] if value else []
        self._core = Process([sys.executable, str(BENCH / "wan.py"), *words])
        try:
            self._nodes = self._core.hear(60)["nodes"]
        except RuntimeError as error:
            raise RuntimeError(f"no emulator: {error}") from None

    def host(self, index: int) -> str:
        """Return the address of node `index`."""
        return str(self._nodes[index][1])

    def inside(self, index: int) -> list[str]:
        """Return what a command of node `index` stands behind."""
        return ["ip", "netns", "exec", self._nodes[index][0]]

    def listen(self, index: int) -> str:
        """Return where node `index` shall listen."""
        return f"tcp://{self.host(index)}:0"

    def start(self, index: int, module: str, *arguments: str, python: str = "") -> Process:
        """Start a module of bench/ on node `index`."""
        return Process([*self.inside(index), python or sys.executable, "-m", module, *arguments])

    def set(self, index: int, what: str, value: float) -> None:
        """Change a node's link: up, down (Mbit/s), delay (ms), loss, dead."""
        self._core.say(f"{index} {what} {value}")

    def status(self) -> dict[str, float]:
        """Return what the emulator tells: cpu_s, at, and what it carried."""
        return self._core.ask("status")

    def close(self) -> None:
        """Remove the namespaces."""
        self._core.close()


class Proxied(Loopback):
    """Nodes on 127.0.0.1, each behind a proxy with rate and delay; needs no root."""

    def __init__(self, num_nodes: int, *, rate_mbit: float, latency_ms: float) -> None:
        self.name = f"proxies, {rate_mbit:g} Mbit/s, {2 * latency_ms:g} ms RTT, no TCP effects"
        self.bytes_per_s, self.latency_s = rate_mbit * 1e6 / 8, latency_ms / 1e3
        # A node has one port, so that the raw stream needs two of its own.
        self.stream_at = num_nodes
        options = {"nodes": num_nodes + 2, "rate-mbit": rate_mbit, "latency-ms": latency_ms}
        words = [f"--{key}={value}" for key, value in options.items()]
        self._core = Process([sys.executable, "-m", "broadcast.proxy", *words])
        self._ports = self._core.hear(60)["nodes"]

    def listen(self, index: int) -> str:
        """Return where node `index` shall listen."""
        return f"tcp://127.0.0.1:{self._ports[index][1]}"

    def advertise(self, index: int) -> str:
        """Return where others reach it."""
        return f"tcp://127.0.0.1:{self._ports[index][0]}"

    def set(self, index: int, what: str, value: float) -> None:
        """Change a node's link: up (Mbit/s), delay (ms), dead."""
        self._core.say(f"{index} {what} {value}")

    def status(self) -> dict[str, float]:
        """Return what the proxy tells: cpu_s and at."""
        return self._core.ask("status")

    def close(self) -> None:
        """End the proxies."""
        self._core.close()


def capacity_gbit() -> float:
    """Return what one stream reaches through the emulator of the WAN without limits."""
    command = [sys.executable, str(BENCH / "wan.py"), "--capacity"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return float(done.stdout.split()[0])


def work_of(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Return how hard an emulator worked between two of its states; nothing without one."""
    seconds = after.get("at", 0.0) - before.get("at", 0.0)
    if seconds <= 0:
        return {}
    work = {"cpu_share": (after["cpu_s"] - before["cpu_s"]) / seconds}
    if "bytes" in after:
        late_ms = (after["late_sum_s"] - before["late_sum_s"]) * 1e3
        work |= {
            "gbit_per_s": (after["bytes"] - before["bytes"]) * 8e-9 / seconds,
            "mean_late_ms": late_ms / max(1, after["packets"] - before["packets"]),
            "max_late_ms": after["late_max_s"] * 1e3,
        }
    return work


def show_work(work: dict[str, float]) -> None:
    """Say what is left of the core that the emulator works on, so that it is seen not to limit."""
    if work:
        share = work["cpu_share"]
        print(f"the emulator took {share:.2f} of a core, {1 - share:.2f} left", flush=True)
