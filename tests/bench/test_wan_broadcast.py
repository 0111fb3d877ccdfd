"""Versions over an emulated WAN with losses, where the link of one receiver dies on the way.

The receivers are processes of bench/broadcast_node.py, each in a network namespace of its own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY / "bench"))

from broadcast_paths import Process, Wan  # noqa: E402

NUM_BYTES = 4 << 20
CHUNK_BYTES = 128 << 10
LINK = {"rate_mbit": 50, "latency_ms": 20, "loss": 0.005, "seed": 7, "congestion": "bbr"}
RECEIVERS = ("r1", "r2", "r3")
WITHIN_S = 120.0


def why_not() -> str:
    """Return why no namespaces can be made here, "" if they can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    if shutil.which("ip") is None:
        return "there is no program ip (iproute2)"
    name = f"echo-try-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        return f"no network namespace can be made: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


def congestion_control() -> str:
    """Return bbr where the kernel has it: what others make of losses is not the subject here."""
    path = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
    return "bbr" if "bbr" in path.read_text().split() else ""


def end(process: Process) -> None:
    """Kill a process, unless it has ended, and close its pipes."""
    process.kill()
    with contextlib.suppress(RuntimeError):
        while True:
            process.hear(5)
    with contextlib.suppress(BrokenPipeError), process._popen:
        pass


class Site:
    """The processes, and until when all has to be over."""

    def __init__(self, wan: Wan, stack: contextlib.ExitStack) -> None:
        self.over_at = time.monotonic() + WITHIN_S
        options = ["--curve", "--sockets", "1"]
        self.learner = self.start(
            wan, stack, 0, "learner", "--topology", "chain", "--listen", wan.listen(0), *options
        )
        address = self.hear(self.learner, "address")
        self.receivers: dict[str, Process] = {}
        for index, name in enumerate(RECEIVERS, 1):
            words = ["--name", name, "--connect", address, "--listen", wan.listen(index), *options]
            self.receivers[name] = self.start(wan, stack, index, "receiver", *words)
        self.learner.say(f"plan {len(RECEIVERS)}")
        self.parents = self.hear(self.learner, "parents")
        self.over_at = time.monotonic() + WITHIN_S

    def start(self, wan: Wan, stack: contextlib.ExitStack, index: int, *arguments: str) -> Process:
        process = wan.start(index, "broadcast_node.py", *arguments)
        stack.callback(end, process)
        return process

    def hear(self, process: Process, key: str) -> Any:
        """Return a field of the next line that has it."""
        while True:
            fields = process.hear(max(0.1, self.over_at - time.monotonic()))
            if key in fields:
                return fields[key]

    def publish(self, step: int) -> str:
        """Publish a version and return its hash."""
        self.learner.say(f"prepare {step} {NUM_BYTES} {CHUNK_BYTES} full")
        image_hash = self.hear(self.learner, "hash")
        self.learner.say("publish")
        self.hear(self.learner, "at")
        return image_hash

    def hash(self, name: str, step: int) -> str:
        """Wait until a receiver has a version and return the hash of what it holds."""
        process = self.receivers[name]
        while self.hear(process, "arrived") != step:
            pass
        process.say("hash")
        return self.hear(process, "hash")


@pytest.mark.matrix
@pytest.mark.parametrize("way", ["killed", "dead"])
def test_versions_reach_all_others_when_a_receiver_is_lost(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    link = {**LINK, "congestion": congestion_control()}
    with contextlib.ExitStack() as stack:
        wan = Wan(1 + len(RECEIVERS), **link)
        stack.callback(end, wan._core)
        stack.callback(wan.close)
        site = Site(wan, stack)
        assert len(set(site.parents.values())) == len(RECEIVERS), "it is no chain"
        (lost,) = (name for name, parent in site.parents.items() if parent == "learner")
        image_hash = site.publish(1)
        assert {site.hash(name, 1) for name in RECEIVERS} == {image_hash}

        image_hash = site.publish(2)
        time.sleep(0.35)  # of 0.7 s that 4 MiB take at least
        if way == "killed":
            site.receivers[lost].kill()
        else:
            wan.set(1 + RECEIVERS.index(lost), "dead", 1)
        for name in set(RECEIVERS) - {lost}:
            assert site.hash(name, 2) == image_hash
        assert time.monotonic() < site.over_at
        assert wan.status()["lost"] > 0
    assert not any(Path("/run/netns", name).exists() for name, _ in wan._nodes)
