"""The planned broadcast in unequal fleets on emulated links, version by version.

Sixteen receivers and the three fleets of `broadcast/figures.py` ("unequal-16"): 64 MiB in chunks of
256 KiB, the source at 200 Mbit/s, 40 ms between any two nodes, no rate told to anybody. The first
version goes out on cold connections, the others on warm ones. All have touched the memory of their
images beforehand.

As in a run whose model lies on every machine, there is a version 0 that nobody has to fetch. So the
nodes are told the size of a version when they join, and show their uplinks by probes.

Prints the share of the fluid optimum min(u0, (u0 + sum of the uplinks) / receivers) that the
slowest receiver gets, duplicates and control as shares of what is delivered, and CPU seconds per GB
delivered. `--settings tuned` gives TCP buffers of 64 MiB and takes its slow start after idle away.
`--rates 0.25` has all links at a quarter of that: nodes and emulator need some 20 CPU seconds per
GB, so two cores are full before the links are.
`--drift 0.3` draws every uplink anew before each version but the first, so what is known is wrong.

The swarm that results up to 20261125 have beside it is gone (README.md).

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

from echo.weights.topology.throughput import fluid_rate

DRAWS = ("log-normal", "80/20", "half NAT")
SOURCE_MBIT, LATENCY_MS, CHUNK = 200.0, 20.0, MIB // 4


def main() -> None:
    parser = harness.new_parser(__doc__)
    parser.add_argument("--draws", nargs="+", choices=DRAWS, default=list(DRAWS))
    parser.add_argument("--versions", type=int, default=5)
    parser.add_argument("--rates", type=float, default=1.0, help="of the links, as a share")
    parser.add_argument("--drift", type=float, default=0.0, help="log-normal, of each uplink")
    parser.add_argument("--mib", type=int, default=64, help="size of a version")
    parser.add_argument("--planes", choices=["echo"], help="as the commands of results have it")
    parser.add_argument("--settings", nargs="+", choices=("default", "tuned"), default=["default"])
    parser.add_argument("--note", default="", help="what else the machine did")
    arguments = harness.parse(parser, draws=["half NAT"], versions=2, mib=16)
    result: dict[str, Any] = {
        "note": arguments.note,
        "rates": arguments.rates,
        "drift": arguments.drift,
        "rows": [],
    }
    for settings, draw in itertools.product(arguments.settings, arguments.draws):
        size = arguments.mib * MIB
        links = Links(draw, settings, arguments.rates, arguments.drift)
        result["rows"] += on_the_wan(links, size, arguments.versions)
    result["summary"] = summary(result["rows"])
    name = "swarm" if "default" in arguments.settings else "swarm_tuned"
    print(f"wrote {harness.save(name, result)}")


def optimum(mbit: list[float]) -> float:
    """Return bytes/s that every receiver may get; the source's uplink comes first."""
    rates = [rate * 1e6 / 8 * PAYLOAD_SHARE for rate in mbit]
    return fluid_rate(rates[0], rates[1:], [float("inf")] * (len(rates) - 1))


class Links(NamedTuple):
    """Links that the emulator is to emulate."""

    draw: str
    settings: str
    rates: float
    drift: float


def on_the_wan(links: Links, size: int, versions: int) -> list[dict[str, Any]]:
    """Return a row for each version."""
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
        echo = Echo(path, Topology("auto", 16), leaves=leaves, model=(size, CHUNK))
        stack.callback(echo.close)
        chance = random.Random(1)
        for version in range(1, versions + 1):
            if links.drift and version > 1:
                now = [rate * chance.lognormvariate(0, links.drift) for rate in uplinks]
                best = optimum([source, *now])
                for index, rate in enumerate(now, start=1):
                    path.set(index, "up", rate or 4)
            before = path.status()
            got = echo.deliver(size, CHUNK)
            delivered = 16 * size
            row = {
                "uplinks": draw,
                "settings": settings,
                "plane": "echo",
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
