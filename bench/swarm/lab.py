"""Swarm of bench_swarm.py: its processes side by side, as a subject beside today's plane."""

from __future__ import annotations

import time
from typing import Any

from broadcast.lab import JOIN_S, Variant
from broadcast.paths import Loopback


class SwarmFleet(Variant):
    """A source and its receivers, all neighbours of each other."""

    name = "swarm"

    def __init__(
        self, path: Loopback, count: int, *, leaves: frozenset[int], options: tuple[str, ...] = ()
    ) -> None:
        """Start the processes and wait until all are neighbours.

        Args:
            path: where they run.
            count: receivers.
            leaves: receivers that nobody can reach, counted from 1.
            options: of node.py.
        """
        self._processes = []
        addresses: list[str | None] = []
        for index in range(count + 1):
            words = [f"node-{index}", *options]
            if index not in leaves:
                words.append(f"--listen={path.listen(index)}")
            self._processes.append(path.start(index, "swarm.node", *words))
        addresses = [each.hear(JOIN_S)["address"] for each in self._processes]
        for index, process in enumerate(self._processes):
            for other, address in enumerate(addresses):
                if other == index or address is None:
                    continue
                is_caller = index in leaves or index > other
                purposes = "control bulk" if is_caller else "bulk"
                if index > 0:
                    process.say(f"dial node-{other} {address} {purposes}")
                elif is_caller:
                    process.say(f"dial node-{other} {address} control")
        self._wait(count, leaves)
        self.source, *self.receivers = self._processes

    def _wait(self, count: int, leaves: frozenset[int]) -> None:
        until = time.monotonic() + JOIN_S
        while time.monotonic() < until:
            met = [each.ask("met") for each in self._processes]
            # Leaves are no neighbours of each other.
            wanted = [
                count + 1 - len(leaves) if index in leaves else count for index in range(count + 1)
            ]
            served = [0 if index in leaves else count - (index > 0) for index in range(count + 1)]
            if all(
                one["met"] >= want and one["bulk"] >= serve
                for one, want, serve in zip(met, wanted, served, strict=True)
            ):
                return
            time.sleep(0.2)
        raise RuntimeError(f"not all became neighbours: {met}, wanted {wanted} and {served}")

    def counts(self) -> list[dict[str, Any]]:
        """Return what each process counts."""
        return [each.ask("counts") for each in self._processes]

    def deliver(self, num_bytes: int, chunk_bytes: int) -> dict[str, Any]:
        """Publish a version and wait for the last receiver."""
        self.step += 1
        wanted = self.source.ask(f"prepare {self.step} {num_bytes} {chunk_bytes}")["hash"]
        before, cpu_s = self.counts(), self.cpu_s()
        started_at = self.source.ask("publish")["at"]
        arrived = [each.hear() for each in self.receivers]
        cpu_s = self.cpu_s() - cpu_s
        after = self.counts()

        def grown(what: str) -> float:
            return sum(b[what] - a[what] for a, b in zip(before, after, strict=True))

        delivered = num_bytes * len(self.receivers)
        return {
            "seconds": max(each["at"] for each in arrived) - started_at,
            "arrived_s": sorted(round(each["at"] - started_at, 2) for each in arrived),
            "cpu_s": cpu_s,
            "kernel_s": grown("system_s"),
            "num_right": sum(each.ask("hash")["hash"] == wanted for each in self.receivers),
            "duplicates": grown("num_duplicates") * chunk_bytes / delivered,
            "control": grown("control_bytes") / delivered,
            "counts": after,
        }
