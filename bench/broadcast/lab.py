"""Subjects of bench_broadcast.py: this project in several topologies, and its baselines."""

from __future__ import annotations

import subprocess
from collections import Counter
from dataclasses import dataclass
from typing import Any

from broadcast.paths import Loopback, Process

JOIN_S = 120.0
"""Seconds for all nodes of a variant to start and to find their parents."""


@dataclass(frozen=True, slots=True)
class Topology:
    """How an image goes to its receivers."""

    kind: str
    """chain, star, tree, or auto: as the learner finds best."""
    num_receivers: int
    ways: int = 0
    """Fan-out of a tree."""

    @classmethod
    def parse(cls, text: str) -> Topology:
        """Read "chain:5", "star:5", or "tree:16:2" (fan-out)."""
        kind, *numbers = text.split(":")
        num_numbers = {"chain": 1, "star": 1, "tree": 2, "auto": 1}.get(kind)
        if len(numbers) != num_numbers or not all(number.isdigit() for number in numbers):
            raise ValueError(f"{text!r} is none of chain:N, star:N, tree:N:FAN-OUT, auto:N")
        return cls(kind, *map(int, numbers))

    def __str__(self) -> str:
        """Return it as it is written."""
        return ":".join(
            map(str, (self.kind, self.num_receivers, self.ways)[: 3 if self.ways else 2])
        )

    def theory_s(self, size: int, chunk: int, rate: float, latency_s: float) -> float:
        """Return the seconds until the last receiver has all, if only links take time.

        Args:
            size: bytes of the image.
            chunk: bytes of a chunk.
            rate: of every uplink, bytes/s.
            latency_s: one way.
        """
        count, hops = self.num_receivers, self.num_hops
        hop_s = chunk / rate + latency_s
        if self.kind == "star":
            return count * size / rate + latency_s
        if self.kind == "tree":
            fan_out = min(self.ways, count)
            return fan_out * size / rate + (hops - 1) * (fan_out * chunk / rate) + hops * latency_s
        return size / rate + hops * hop_s - chunk / rate

    def carried(self, rate: float) -> float:
        """Return what all links together carry while every uplink in use gives `rate`."""
        if self.kind == "star":
            return rate
        return self.num_receivers * rate / (self.ways if self.kind == "tree" else 1)

    @property
    def num_hops(self) -> int:
        """Links between the learner and the farthest receiver."""
        if self.kind == "chain":
            return self.num_receivers
        depth, width, reached = 0, 1, 0
        while reached < self.num_receivers:
            width *= self.num_receivers if self.kind == "star" else max(self.ways, 2)
            reached, depth = reached + width, depth + 1
        return depth


class Variant:
    """One way to bring an image to receivers."""

    name = ""
    topology = Topology("chain", 1)
    step = 0
    _processes: list[Process]

    def deliver(self, num_bytes: int, chunk_bytes: int) -> dict[str, Any]:
        """Return seconds until the last receiver has it, CPU seconds, how many have it right."""
        raise NotImplementedError

    def cpu_s(self) -> float:
        """Return the CPU seconds of all its processes."""
        return sum(float(process.ask("cpu")["cpu_s"]) for process in self._processes)

    def close(self) -> None:
        """End its processes, children before parents, so that nobody is missed."""
        for process in reversed(self._processes):
            process.close()


class Echo(Variant):
    """This project."""

    def __init__(
        self,
        path: Loopback,
        topology: Topology,
        *,
        curve: bool = False,
        codec: str = "full",
        sockets: str = "auto",
        leaves: frozenset[int] = frozenset(),
        model: tuple[int, int] | None = None,
    ) -> None:
        """Start the processes and wait until everybody has the parent of the plan.

        Args:
            path: where they run.
            topology: what the learner shall plan.
            curve: whether links are encrypted.
            codec: full or delta.
            sockets: connections for chunks to each parent, where links are encrypted, or auto.
            leaves: receivers that nobody can reach, counted from 1.
            model: bytes and chunk bytes of the model that all nodes have before they join, as where
                it lies in a directory of each machine: it is version 0, and receivers keep memory
                for images of its size. None for no version before the first that is delivered.
        """
        self.topology, self.codec, self._leaves = topology, codec, leaves
        self._wire_bytes = 0
        parts = ["echo", topology.kind, "delta" if codec == "delta" else "", "curve" * curve]
        self.name = " ".join(filter(None, parts))
        self._options = [f"--sockets={sockets}"]
        self._options += ["--curve"] * curve
        if model is not None:
            self._options += [f"--model-bytes={model[0]}", f"--chunk-bytes={model[1]}"]
        self._path = path
        self._processes = []
        try:
            self._join(model)
        except BaseException:
            self.close()
            raise

    def _join(self, model: tuple[int, int] | None) -> None:
        """Start the learner and then the receivers, and sort these by their hops from it."""
        topology = self.topology
        forced = topology.kind + (f":{topology.ways}" if topology.ways else "")
        self.learner = self._start(0, "learner", self._path.listen(0), f"--topology={forced}")
        self.address = self.learner.hear(JOIN_S)["address"]
        if model is not None:
            self.learner.ask("prepare 0 {} {} full".format(*model))
            self.publish()
        receivers: dict[str, Process] = {}
        for index in range(1, topology.num_receivers + 1):
            where = None if index in self._leaves else self._path.listen(index)
            words = [f"--connect={self.address}", f"--name=receiver-{index}"]
            receivers[f"receiver-{index}"] = self._start(index, "receiver", where, *words)
        for receiver in receivers.values():
            receiver.hear(JOIN_S)
            if model is not None:
                receiver.hear(JOIN_S)  # it has version 0
        self.learner.say(f"plan {topology.num_receivers}")
        parents = self.learner.hear(JOIN_S)["parents"]
        # Nearest the learner first: they join in any order, and the plan follows that.
        self.order = sorted(receivers, key=lambda name: distance(name, parents))
        self.receivers = [receivers[name] for name in self.order]
        self._processes = [self.learner, *self.receivers]

    def _start(self, index: int, role: str, listen: str | None, *words: str) -> Process:
        advertise = self._path.advertise(index)
        words = (*words, *([f"--listen={listen}"] if listen else []))
        words = (*words, *([f"--advertise={advertise}"] if listen and advertise else []))
        process = self._path.start(index, "broadcast.node", role, *self._options, *words)
        self._processes.append(process)
        return process

    def prepare(self, num_bytes: int, chunk_bytes: int) -> str:
        """Have the next version made; return its hash."""
        self.step += 1
        command = f"prepare {self.step} {num_bytes} {chunk_bytes} {self.codec}"
        return str(self.learner.ask(command)["hash"])

    def publish(self) -> float:
        """Publish it; return when that was."""
        return float(self.learner.ask("publish")["at"])

    def deliver(self, num_bytes: int, chunk_bytes: int) -> dict[str, Any]:
        """Publish a version and wait for the last receiver."""
        wanted = self.prepare(num_bytes, chunk_bytes)
        before = self._used()
        started_at = self.publish()
        arrived_at = max(receiver.hear()["at"] for receiver in self.receivers)
        used = self._used()
        used.subtract(before)
        wire_bytes, self._wire_bytes = self._wire_bytes, self.wire_bytes()
        delivered = num_bytes * len(self.receivers)
        return {
            "seconds": arrived_at - started_at,
            "cpu_s": used["cpu_s"],
            "kernel_s": used["kernel_s"],
            "num_right": self.num_right(self.receivers, wanted),
            "wire_bytes": self._wire_bytes - wire_bytes,
            "duplicates": used["num_duplicates"] * chunk_bytes / delivered,
            "control": used["control_bytes"] / delivered,
        }

    def _used(self) -> Counter[str]:
        """Return CPU seconds, control bytes, and chunks that came twice, of all processes."""
        return sum((Counter(process.ask("cpu")) for process in self._processes), Counter())

    def wire_bytes(self) -> int:
        """Return the weight bytes that the receivers have received, on the average."""
        sizes = [int(each.ask("hash")["wire_bytes"]) for each in self.receivers]
        return sum(sizes) // len(sizes)

    def num_right(self, receivers: list[Process], wanted: str) -> int:
        """Return how many of them hold the image with this hash."""
        return sum(receiver.ask("hash")["hash"] == wanted for receiver in receivers)


class Stream(Variant):
    """One stream from node 0 to node 1 that nobody looks at; see stream.py."""

    def __init__(self, path: Loopback, *, is_raw: bool, curve: bool = False) -> None:
        """Connect the ends: raw TCP, or the bare data plane of this project."""
        self.name = "raw TCP" if is_raw else "bare plane" + " curve" * curve
        giver, taker = ("source", "sink") if is_raw else ("giver", "taker")
        options, at = ["--curve"] * curve, path.stream_at
        source = path.start(at, "broadcast.stream", giver, f"--listen={path.listen(at)}", *options)
        told = source.hear()["address"]
        address = path.advertise(at) or told
        sink = path.start(at + 1, "broadcast.stream", taker, f"--connect={address}", *options)
        self._processes = [source, sink]
        sink.hear()

    def deliver(self, num_bytes: int, chunk_bytes: int) -> dict[str, Any]:
        """Send that many bytes."""
        source, sink = self._processes
        cpu_s = self.cpu_s()
        sink.say(f"receive {num_bytes} {chunk_bytes}")
        started_at = source.ask(f"publish {num_bytes}")["at"]
        arrived_at = sink.hear()["at"]
        return {
            "seconds": arrived_at - min(started_at, arrived_at),
            "cpu_s": self.cpu_s() - cpu_s,
            "num_right": 1,
        }


class Shardcast(Variant):
    """The package of that name: clients of one origin, or of middle nodes before it."""

    name = "shardcast"

    def __init__(
        self,
        path: Any,
        count: int,
        python: str,
        *,
        is_chained: bool = False,
        shard_bytes: int = 50_000_000,
    ) -> None:
        """Start the origin and the clients; `path` gives every node its own address.

        Args:
            path: a WAN.
            count: clients, or middle nodes and one client if chained.
            python: an interpreter that has the package.
            is_chained: whether each node downloads from the one before instead of the origin.
            shard_bytes: unit of downloads, by default the package's.
        """
        self.topology = Topology("chain" if is_chained else "star", count)
        self.name += " middle" * is_chained + f" {shard_bytes // 10**6}MB"
        module = "broadcast.shardcast_process"
        self._processes = [
            path.start(0, module, "origin", f"--shard-bytes={shard_bytes}", python=python)
        ]
        self._processes[0].hear()
        for index in range(1, count + 1):
            role = "middle" if is_chained and index < count else "client"
            upstream = f"--upstream={path.host(index - 1 if is_chained else 0)}"
            client = path.start(index, module, role, upstream, python=python)
            client.hear()  # one after the other: they share a file in /tmp
            self._processes.append(client)

    def deliver(self, num_bytes: int, chunk_bytes: int) -> dict[str, Any]:
        """Publish a file and wait for the last client; the package chooses its own chunks."""
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
