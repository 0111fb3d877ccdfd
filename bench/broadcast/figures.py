"""Figures that the broadcast has to reach, one function each.

Every figure is a ratio within one run: to raw TCP, to what the link carries, or to another variant
on the same links. "The link" is what TCP can carry of it, 1448 bytes of every packet of 1500.
"""

from __future__ import annotations

import contextlib
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from broadcast.lab import Echo, Shardcast, Stream, Topology, Variant, shardcast_fault
from broadcast.paths import Loopback, Wan, show_work, work_of
from broadcast.results import deliver, rows_of, show
from echo.config.memory.budget import read_machine

MIB = 1 << 20
PAYLOAD_SHARE = 1448 / 1500
Cases = list[tuple[Variant, int, int]]


@dataclass
class Bench:
    """What all figures share."""

    repeats: int
    shardcast_python: str
    on_rows: Callable[[dict[str, Any]], None]
    """Called with the rows so far after every round."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    emulator: dict[str, float] = field(default_factory=dict)

    def measure(self, path: Loopback, cases: Cases, *, warm_ups: int = 1) -> list[float]:
        """Return the median seconds of every case, and keep the rows."""
        earlier, before = self.rows, path.status()
        for rounds in deliver(cases, self.repeats, warm_ups):
            self.rows = [*earlier, *rows_of(path, cases, rounds)]
            self.on_rows({"rows": self.rows})
        after = path.status()
        self.note_emulator(before, after)
        show(self.rows[len(earlier) :])
        return [row["median_s"] for row in self.rows[len(earlier) :]]

    def note_emulator(self, before: dict[str, float], after: dict[str, float]) -> None:
        """Keep how hard the emulator worked, so that it can be seen whether it was the limit."""
        self.emulator = work_of(before, after)
        show_work(self.emulator)


@dataclass(frozen=True)
class Figure:
    """One row of the table."""

    measure: Callable[[Bench], dict[str, float]]
    """Returns what was achieved, by name."""
    at_least: dict[str, float]
    aim: dict[str, float]
    is_lower_better: bool = False
    limit_s: float = 900.0

    def verdict(self, achieved: dict[str, float]) -> dict[str, str]:
        """Return "aim", "met" or "missed" for each name."""
        sign = -1 if self.is_lower_better else 1
        return {
            name: "aim"
            if sign * value >= sign * self.aim[name]
            else "met"
            if sign * value >= sign * self.at_least[name]
            else "missed"
            for name, value in achieved.items()
        }


@contextlib.contextmanager
def wan(num_nodes: int, rate_mbit: float, latency_ms: float, **options: Any) -> Iterator[Wan]:
    """A WAN of equal uplinks; loss_recovery and buffers are the system's unless options say."""
    path = Wan(num_nodes, rate_mbit=rate_mbit, latency_ms=latency_ms, **options)
    with contextlib.closing(path):
        yield path


def loopback_one_hop(bench: Bench) -> dict[str, float]:
    """Without store, verified and stored, and both of it encrypted, against raw TCP."""
    path = Loopback()
    with contextlib.ExitStack() as stack:
        variants: list[Variant] = []
        for make in (
            lambda: Stream(path, is_raw=True),
            lambda: Stream(path, is_raw=False),
            lambda: Stream(path, is_raw=False, curve=True),
            lambda: Echo(path, Topology("chain", 1)),
            lambda: Echo(path, Topology("chain", 1), curve=True),
        ):
            variants.append(make())
            stack.callback(variants[-1].close)
        # Four versions ahead: until then a receiver takes memory that it has never used.
        bench.measure(path, [(one, 512 * MIB, MIB) for one in variants], warm_ups=4)
    ratios = {row["variant"]: row["vs_raw"] for row in bench.rows}
    return {
        "without store": ratios["bare plane"],
        "with verify and store": ratios["echo chain"],
        "with CURVE": ratios["echo chain curve"],
    }


def one_wan_hop(rate_mbit: float, loss: float, size: int) -> Callable[[Bench], dict[str, float]]:
    """Return the measurement of one encrypted hop at 100 ms with the kernel's default buffers."""

    def measure(bench: Bench) -> dict[str, float]:
        with (
            wan(2, rate_mbit, 50, loss=loss) as path,
            contextlib.closing(Stream(path, is_raw=True)) as raw,
            contextlib.closing(Echo(path, Topology("chain", 1), curve=True)) as echo,
        ):
            _, seconds = bench.measure(path, [(raw, size // 8, 0), (echo, size, MIB)])
        return {"of the link": size / seconds / (rate_mbit * 1e6 / 8 * PAYLOAD_SHARE)}

    return measure


def chain_of_five(bench: Bench) -> dict[str, float]:
    """Against size / rate, connections warm."""
    size = 128 * MIB
    with (
        wan(6, 200, 20) as path,
        contextlib.closing(Echo(path, Topology("chain", 5))) as echo,
    ):
        cases: Cases = [(echo, size, chunk) for chunk in (MIB // 4, MIB)]
        seconds = min(bench.measure(path, cases))
    return {"x size/rate": seconds / (size / (200e6 / 8 * PAYLOAD_SHARE))}


def uplinks_mbit(draw: str, chance: random.Random, *, count: int = 16) -> list[float]:
    """Return uplinks of a fleet, 0 behind a NAT that nobody reaches.

    Args:
        draw: "log-normal" with 20 Mbit/s in the median, "80/20", "half NAT" or "equal".
        chance: of the log-normal ones.
        count: how many.
    """
    match draw:
        case "log-normal":
            return [20 * chance.lognormvariate(0, 1) for _ in range(count)]
        case "80/20":
            return [200.0 if index % 5 == 0 else 4.0 for index in range(count)]
        case "half NAT":
            return [0.0 if index % 2 else 100.0 for index in range(count)]
        case _:
            return [100.0] * count


def unequal_uplinks(bench: Bench) -> dict[str, float]:
    """Against the fluid optimum min(u0, (u0 + sum of the uplinks) / receivers)."""
    achieved, size = {}, 64 * MIB
    for draw in ("log-normal", "80/20", "half NAT"):
        uplinks = uplinks_mbit(draw, random.Random(1))
        with wan(17, 200, 20) as path:
            path.name += f", {draw}"
            for index, rate in enumerate(uplinks, start=1):
                path.set(index, "up", rate or 4)
            leaves = frozenset(index for index, rate in enumerate(uplinks, start=1) if not rate)
            with contextlib.closing(Echo(path, Topology("auto", 16), leaves=leaves)) as echo:
                # The rates that the plan follows are learned from the first versions.
                (seconds,) = bench.measure(path, [(echo, size, MIB // 4)], warm_ups=5)
                bench.rows[-1]["plan"] = echo.learner.ask("topology")
        best = min(200, (200 + sum(uplinks)) / 16) * 1e6 / 8 * PAYLOAD_SHARE
        achieved[draw] = size / best / seconds
    return achieved


def sixteen_receivers(bench: Bench) -> dict[str, float]:
    """Chain against star over the same sockets and uplinks."""
    size = 64 * MIB
    with (
        wan(17, 200, 10) as path,
        contextlib.closing(Echo(path, Topology("chain", 16))) as chain,
        contextlib.closing(Echo(path, Topology("star", 16))) as star,
    ):
        chain_s, star_s = bench.measure(path, [(one, size, MIB // 4) for one in (chain, star)])
    return {"x star": star_s / chain_s}


def against_shardcast(bench: Bench) -> dict[str, float]:
    """Five receivers that verify; the package in its faster arrangement."""
    fault = shardcast_fault(bench.shardcast_python)
    if fault is not None:
        raise RuntimeError(f"shardcast: {fault}")
    size, python = 64 * MIB, bench.shardcast_python
    with wan(6, 200, 20) as path:
        with (
            contextlib.closing(Echo(path, Topology("chain", 5))) as echo,
            contextlib.closing(Echo(path, Topology("star", 5))) as star,
        ):
            echo_s, _ = bench.measure(path, [(one, size, MIB // 4) for one in (echo, star)])
        packages = []
        for is_chained, shard_bytes in ((False, 50_000_000), (False, 4_000_000), (True, 4_000_000)):
            options: dict[str, Any] = {"is_chained": is_chained, "shard_bytes": shard_bytes}
            with contextlib.closing(Shardcast(path, 5, python, **options)) as package:
                packages += bench.measure(path, [(package, size, 0)], warm_ups=0)
    return {"x shardcast": min(packages) / echo_s}


def stall(bench: Bench) -> dict[str, float]:
    """The longest time without a chunk below a parent that is killed, and one that vanishes."""
    achieved = {}
    for what in ("killed", "black-holed"):
        stalls = [one_stall(what) for _ in range(bench.repeats)]
        bench.rows.append({"event": what, "stalls_s": stalls})
        bench.on_rows({"rows": bench.rows})
        print(f"{what}: {', '.join(f'{seconds:.2f}' for seconds in stalls)} s", flush=True)
        achieved[what] = statistics.median(stalls)
    return achieved


def one_stall(what: str) -> float:
    """Return the longest gap at the child of a relay that fails in mid-transfer, seconds."""
    with (
        wan(4, 100, 20) as path,
        contextlib.closing(Echo(path, Topology("chain", 3))) as echo,
    ):
        echo.deliver(4 * MIB, MIB // 4)
        wanted = echo.prepare(32 * MIB, MIB // 4)
        for receiver in echo.receivers:
            receiver.say("watch")
        started_at = echo.publish()
        victim, *living = echo.receivers
        time.sleep(max(0.0, started_at + 1.2 - time.monotonic()))  # of 2.8 s
        if what == "killed":
            victim.kill()
        else:
            path.set(int(echo.order[0].rpartition("-")[2]), "dead", 1)
        for receiver in living:
            receiver.hear(60)
        if echo.num_right(living, wanted) != len(living):
            raise RuntimeError(f"after its parent was {what} a receiver ended with other bytes")
        seconds = float(living[0].ask("gap")["longest_gap_s"])
        if what == "black-holed":
            victim.kill()
        return seconds


def delta_swap(bench: Bench) -> dict[str, float]:
    """A delta on an image of 4 GB at 1 Gbit/s, against the time that its bytes take.

    Both ends and the encoded versions between them take seven times the image on one machine, so
    where memory does not permit it the image is smaller.
    """
    size = min(4_000_000_000, int(0.1 * read_machine().host_bytes) // (4 * MIB) * 4 * MIB)
    with (
        wan(2, 1000, 10) as path,
        contextlib.closing(Echo(path, Topology("chain", 1), codec="delta")) as echo,
    ):
        results = [echo.deliver(size, MIB) for _ in range(bench.repeats + 1)][1:]
    bench.rows = results
    wire_s = [result["wire_bytes"] / (1e9 / 8 * PAYLOAD_SHARE) for result in results]
    ratios = [one["seconds"] / bound for one, bound in zip(results, wire_s, strict=True)]
    return {"x network time": statistics.median(ratios)}


FIGURES = {
    "loopback-one-hop": Figure(
        loopback_one_hop,
        {"without store": 0.7, "with verify and store": 0.45, "with CURVE": 0.2},
        {"without store": 0.85, "with verify and store": 0.6, "with CURVE": 0.25},
    ),
    "wan-1g-100ms": Figure(
        one_wan_hop(1000, 0, 1536 * MIB), {"of the link": 0.95}, {"of the link": 0.97}
    ),
    "wan-300m-loss": Figure(
        one_wan_hop(300, 0.001, 256 * MIB), {"of the link": 0.85}, {"of the link": 0.93}
    ),
    "chain-5": Figure(chain_of_five, {"x size/rate": 1.15}, {"x size/rate": 1.05}, True),
    "unequal-16": Figure(
        unequal_uplinks,
        dict.fromkeys(("log-normal", "80/20", "half NAT"), 0.85),
        dict.fromkeys(("log-normal", "80/20", "half NAT"), 0.95),
        limit_s=1200,
    ),
    "sixteen": Figure(sixteen_receivers, {"x star": 10}, {"x star": 14}),
    "shardcast-5": Figure(against_shardcast, {"x shardcast": 1.5}, {"x shardcast": 3}),
    "stall": Figure(
        stall,
        {"killed": 0.5, "black-holed": 1.0},
        {"killed": 0.27, "black-holed": 0.72},
        is_lower_better=True,
    ),
    "delta-swap": Figure(delta_swap, {"x network time": 1.25}, {"x network time": 1.1}, True),
}
