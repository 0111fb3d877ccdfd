"""Swarm against today's plane: unequal fleets on the same emulated links, in turns.

Sixteen receivers and the three fleets of `broadcast/figures.py` ("unequal-16"): 64 MiB in chunks of
256 KiB, the source at 200 Mbit/s, 40 ms between any two nodes, no rate told to anybody. The swarm
(`swarm/protocol.py` over `echo/net/zmq.py`, `swarm/node.py`) and the plane that is planned
(`broadcast/node.py`, "auto") stand beside each other on one emulator, and each version goes through
one and then through the other: version 1 on cold connections, the others on warm ones. Both have
touched the memory of their images beforehand.

As in a run whose model lies on every machine, there is a version 0 that nobody has to fetch. So the
nodes of the planned plane are told the size of a version when they join, and show their uplinks by
probes. The swarm has neither probes nor, but at its source, a use for them.

Prints the share of the fluid optimum min(u0, (u0 + sum of the uplinks) / receivers) that the
slowest receiver gets, duplicates and control as shares of what is delivered, and CPU seconds per GB
delivered. `--settings tuned` gives TCP buffers of 64 MiB and takes its slow start after idle away.
`--rates 0.25` has all links at a quarter of that: nodes and emulator need some 20 CPU seconds per
GB, so two cores are full before the links are, and both planes are then as fast as the CPU.
`--drift 0.3` draws every uplink anew before each version but the first, so what is known is wrong.
First the rules alone, on links of paper (`swarm/paper.py`), rates exact; there also 64 receivers,
each with 16 neighbours that are chosen by chance.

Needs root, and a machine that is quiet: the nodes take a core, and what others take is missing.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import statistics
from typing import Any, NamedTuple

import harness
from broadcast.figures import MIB, PAYLOAD_SHARE, uplinks_mbit
from broadcast.lab import Echo, Topology
from broadcast.paths import Wan, work_of
from swarm.lab import SwarmFleet
from swarm.paper import PaperFleet

from echo.weights.topology.throughput import fluid_rate

DRAWS = ("log-normal", "80/20", "half NAT")
SOURCE_MBIT, LATENCY_MS, CHUNK = 200.0, 20.0, MIB // 4
PAPER_SCALE = 64
"""Rates and bytes on paper are so much smaller, which leaves all times as they are."""


def main() -> None:
    parser = harness.new_parser(__doc__)
    parser.add_argument("--draws", nargs="+", choices=DRAWS, default=list(DRAWS))
    parser.add_argument("--versions", type=int, default=5)
    parser.add_argument("--rates", type=float, default=1.0, help="of the links, as a share")
    parser.add_argument("--drift", type=float, default=0.0, help="log-normal, of each uplink")
    parser.add_argument("--mib", type=int, default=64, help="size of a version")
    parser.add_argument("--planes", nargs="+", choices=("swarm", "echo"), default=["swarm", "echo"])
    parser.add_argument("--settings", nargs="+", choices=("default", "tuned"), default=["default"])
    parser.add_argument("--note", default="", help="what else the machine did")
    arguments = harness.parse(parser, draws=["half NAT"], versions=2, mib=16)
    paper = []
    if "swarm" in arguments.planes:
        paper = [on_paper(draw, seed) for draw in arguments.draws for seed in range(3)]
        draws = [*arguments.draws, "equal"]
        paper += [on_paper(draw, 0, count=64, degree=16, versions=1) for draw in draws]
    result: dict[str, Any] = {
        "note": arguments.note,
        "rates": arguments.rates,
        "drift": arguments.drift,
        "paper": paper,
        "rows": [],
    }
    for settings, draw in itertools.product(arguments.settings, arguments.draws):
        size = arguments.mib * MIB
        links = Links(draw, settings, arguments.rates, arguments.drift)
        result["rows"] += on_the_wan(links, arguments.planes, size, arguments.versions)
    result["summary"] = summary(result["rows"])
    name = "swarm" if "default" in arguments.settings else "swarm_tuned"
    print(f"wrote {harness.save(name, result)}")


def optimum(mbit: list[float]) -> float:
    """Return bytes/s that every receiver may get; the source's uplink comes first."""
    rates = [rate * 1e6 / 8 * PAYLOAD_SHARE for rate in mbit]
    return fluid_rate(rates[0], rates[1:], [float("inf")] * (len(rates) - 1))


def on_paper(
    draw: str, seed: int, *, count: int = 16, degree: int | None = None, versions: int = 3
) -> dict[str, Any]:
    """Return the shares that the rules reach where neither TCP nor the CPU costs anything.

    Args:
        draw: the fleet.
        seed: of all that is left to chance.
        count: receivers.
        degree: neighbours of each; None for all others.
        versions: how many go out, one after the other.
    """
    mbit = [SOURCE_MBIT, *uplinks_mbit(draw, random.Random(1), count=count)]
    rates = [rate * 1e6 / 8 * PAYLOAD_SHARE / PAPER_SCALE for rate in mbit]
    fleet = PaperFleet(rates, latency_s=LATENCY_MS / 1e3, degree=degree, seed=seed)
    size, shares = 64 * MIB, []
    for step in range(1, versions + 1):
        seconds = fleet.deliver(step, size // PAPER_SCALE, CHUNK // PAPER_SCALE)
        shares.append(size / optimum(mbit) / seconds)
    delivered = len(shares) * size * count
    nodes = fleet.nodes.values()
    row = {
        "uplinks": draw,
        "receivers": count,
        "neighbours": degree,
        "seed": str(seed),
        "shares": shares,
        "duplicates": sum(n.swarm.num_duplicate_chunks for n in nodes) * CHUNK / delivered,
        "control": sum(n.control_bytes for n in nodes) / delivered,
    }
    text = ", ".join(f"{share:.3f}" for share in shares)
    print(f"paper {draw:>10}, {count} receivers: {text}", flush=True)
    return row


class Links(NamedTuple):
    """Links that the emulator is to emulate."""

    draw: str
    settings: str
    rates: float
    drift: float


def on_the_wan(links: Links, names: list[str], size: int, versions: int) -> list[dict[str, Any]]:
    """Return a row for each version and plane."""
    draw, settings, scale, _ = links
    source = SOURCE_MBIT * scale
    uplinks = [rate * scale for rate in uplinks_mbit(draw, random.Random(1))]
    best = optimum([source, *uplinks])
    leaves = frozenset(index for index, rate in enumerate(uplinks, start=1) if not rate)
    options = {"rate_mbit": source, "latency_ms": LATENCY_MS, "tuned": settings == "tuned"}
    rows = []
    with contextlib.ExitStack() as stack:
        path = stack.enter_context(contextlib.closing(Wan(17, **options)))
        for index, rate in enumerate(uplinks, start=1):
            path.set(index, "up", rate or 4)
        planes: list[SwarmFleet | Echo] = []
        if "swarm" in names:
            kept = f"--kept-bytes={size}"
            planes.append(SwarmFleet(path, 16, leaves=leaves, options=(kept,)))
            stack.callback(planes[-1].close)
        if "echo" in names:
            planes.append(Echo(path, Topology("auto", 16), leaves=leaves, model=(size, CHUNK)))
            stack.callback(planes[-1].close)
        chance = random.Random(1)
        for version in range(1, versions + 1):
            if links.drift and version > 1:
                now = [rate * chance.lognormvariate(0, links.drift) for rate in uplinks]
                best = optimum([source, *now])
                for index, rate in enumerate(now, start=1):
                    path.set(index, "up", rate or 4)
            for plane in planes:
                before = path.status()
                got = plane.deliver(size, CHUNK)
                delivered = 16 * size
                row = {
                    "uplinks": draw,
                    "settings": settings,
                    "plane": plane.name.partition(" ")[0],
                    "version": str(version),
                    "share": size / best / got["seconds"],
                    "seconds": got["seconds"],
                    "cpu_s_per_gb": got["cpu_s"] / (delivered / 1e9),
                    "kernel_s_per_gb": got["kernel_s"] / (delivered / 1e9),
                    "num_right": got["num_right"],
                    "duplicates": got["duplicates"],
                    "control": got["control"],
                    "load": os.getloadavg()[0],
                    "emulator": work_of(before, path.status()),
                }
                rows.append(row)
                print(
                    f"{draw:>10} {row['settings']:>7} {row['plane']:>5} v{version}: "
                    f"{row['share']:.3f} of the optimum, {row['seconds']:.1f} s, "
                    f"CPU {row['cpu_s_per_gb']:.1f} s/GB, right {row['num_right']}, "
                    f"load {row['load']:.1f}",
                    flush=True,
                )
    return rows


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the first share and the median of the warm ones, by settings, fleet and plane."""
    found = []
    for key in dict.fromkeys((r["settings"], r["uplinks"], r["plane"]) for r in rows):
        mine = [r for r in rows if (r["settings"], r["uplinks"], r["plane"]) == key]
        warm = [r["share"] for r in mine[1:]]
        line = {
            "settings": key[0],
            "uplinks": key[1],
            "plane": key[2],
            "first": mine[0]["share"],
            "warm": statistics.median(warm) if warm else None,
            "cpu_s_per_gb": statistics.median(r["cpu_s_per_gb"] for r in mine),
        }
        found.append(line)
        print(
            f"{key[1]:>10} {key[0]:>7} {key[2]:>5}: first {line['first']:.3f}"
            + ("" if not warm else f", warm {line['warm']:.3f} (median of {len(warm)})"),
            flush=True,
        )
    return found


if __name__ == "__main__":
    main()
