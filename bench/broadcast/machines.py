"""Measure a broadcast between real machines, for bench_broadcast.py.

All topologies take turns on the same processes, and so do their connections. The raw TCP stream
that they are compared with goes to the receiver that is there first, from the learner's next port.
"""

from __future__ import annotations

import sys
from typing import Any

from broadcast.lab import JOIN_S, Topology, Variant
from broadcast.paths import Loopback, Process
from echo.net.transport import format_address, parse_address, without_key

START_S = 3600.0
"""Seconds in which somebody has to start the receivers."""
STREAM_S = 10.0
"""Seconds for the raw stream of a receiver that is there to be connected."""


class Machines(Loopback):
    """The learner's machine; who starts the receivers are people."""

    def __init__(
        self, listen: str, count: int, *, rate_mbit: float, latency_ms: float, options: list[str]
    ) -> None:
        """Start the learner, say how it is reached, and wait for the receivers.

        Args:
            listen: address of this machine that the others reach.
            count: receivers.
            rate_mbit: of the link, for the theory.
            latency_ms: one way, for the theory.
            options: of broadcast/node.py.
        """
        self.name = f"between {1 + count} machines"
        self.bytes_per_s, self.latency_s = rate_mbit * 1e6 / 8, latency_ms / 1e3
        self.fault = ""
        """Why there is no raw stream."""
        self.learner = self.start(0, "broadcast.node", "learner", f"--listen={listen}", *options)
        self.source = self.learner
        try:
            address = self.learner.hear(JOIN_S)["address"]
            where = stream_address(address)
            self.source = self.start(
                0, "broadcast.stream", "source", f"--listen={where}", "--acked"
            )
            self.source.hear(JOIN_S)
            print(f"on the other machines: --connect '{address}'", file=sys.stderr, flush=True)
            self.learner.say(f"plan {count}")
            self.learner.hear(START_S)
            try:
                self.source.hear(STREAM_S)
            except RuntimeError:
                self.fault = f"no receiver reaches {where}: open that port"
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Send the receivers home and end."""
        if self.source is not self.learner:
            self.source.kill()
        if not self.learner.has_ended:
            self.learner.say("finish")
        self.learner.close()


class Distant(Variant):
    """This project, on machines that have joined."""

    def __init__(self, path: Machines, topology: Topology, *, codec: str, curve: bool) -> None:
        """Make it the topology from now on."""
        self.topology, self.codec, self._path = topology, codec, path
        parts = ["echo", topology.kind, "delta" if codec == "delta" else "", "curve" * curve]
        self.name = " ".join(filter(None, parts))

    def plan(self) -> None:
        """Have everybody take the parents of this topology, unless they have."""
        learner, topology = self._path.learner, self.topology
        learner.say(f"force {topology.kind} {topology.ways} {topology.num_receivers}")
        learner.hear(JOIN_S)

    def deliver(self, num_bytes: int, chunk_bytes: int) -> dict[str, Any]:
        """Publish a version and wait until the last receiver says that it has verified it."""
        self._path.step += 1
        learner = self._path.learner
        learner.ask(f"prepare {self._path.step} {num_bytes} {chunk_bytes} {self.codec}")
        started_at = learner.ask("publish")["at"]
        arrived_at = learner.ask("installed")["at"]
        return {"seconds": arrived_at - started_at, "num_right": self.topology.num_receivers}

    def close(self) -> None:
        """Do nothing: the processes are the path's."""


class DistantStream(Variant):
    """One raw TCP connection to the receiver that was there first."""

    name = "raw TCP"

    def __init__(self, path: Machines) -> None:
        self._source = path.source

    def deliver(self, num_bytes: int, chunk_bytes: int) -> dict[str, Any]:
        """Send that many bytes and wait for the word that they are there."""
        started_at = self._source.ask(f"publish {num_bytes}")["at"]
        return {"seconds": self._source.hear()["at"] - started_at, "num_right": 1}

    def close(self) -> None:
        """Do nothing: the process is the path's."""


def stream_address(address: str) -> str:
    """Return where the raw stream comes from: the port after the learner's."""
    if not address:
        raise RuntimeError("--listen needs the address that the others reach, not a wildcard")
    host, port = parse_address(without_key(address))
    return format_address(host, port + 1)


def receive(connect: str, options: list[str]) -> None:
    """Be one receiver until the learner sends it home."""
    path = Loopback()
    where = stream_address(connect.partition("#")[0])
    processes: list[Process] = [
        path.start(0, "broadcast.node", "receiver", f"--connect={connect}", *options),
        path.start(0, "broadcast.stream", "sink", f"--connect={where}", "--follow"),
    ]
    receiver = processes[0]
    try:
        receiver.hear(START_S)
        print("joined; waiting for versions", flush=True)
        while not receiver.has_ended:
            event = receiver.hear(START_S)
            print(f"version {event['arrived']} is here, every chunk verified", flush=True)
    except RuntimeError as error:
        if receiver.exit_status != 0:
            sys.exit(str(error))
        print("the learner has finished", flush=True)
    except KeyboardInterrupt:
        pass
    finally:
        for process in processes:
            process.kill()
