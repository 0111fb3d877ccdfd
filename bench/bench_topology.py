"""Compare the planner's choices with the fluid optimum, and time the planning.

For each distribution of uplinks and number of nodes: the rate that the slowest receiver gets from
each kind of plan, and from the plan that is chosen for a full snapshot, as shares of the bound
r* = min(u0, min d, (u0 + sum u) / N). This is arithmetic, not a transfer: uplinks are shared
equally by all the children that a node serves (echo/weights/topology/throughput.py). The learner
has 1 Gbit/s; downlinks have at least 200 Mbit/s.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import harness

from echo.weights.topology.plan import plan_topology
from echo.weights.topology.sites import Site
from echo.weights.topology.throughput import fluid_rate

MBIT = 125e3
LEARNER_MBIT, LEAST_DOWNLINK_MBIT, RTT_S = 1000.0, 200.0, 0.1
DRAWS: dict[str, Callable[[random.Random], float]] = {
    "all 100": lambda rng: 100.0,
    "log-normal, median 100": lambda rng: min(1000.0, 100 * math.exp(rng.gauss(0, 1))),
    "80 % 20, 20 % 1000": lambda rng: 1000.0 if rng.random() < 0.2 else 20.0,
    "50 % NAT, 50 % 500": lambda rng: 500.0 if rng.random() < 0.5 else 0.0,
}
PAYLOADS = {"16 GB": (16 * 10**9, 1 << 20), "143 MB": (143 * 10**6, 256 << 10)}


def main() -> None:
    parser = harness.new_parser(__doc__)
    parser.add_argument("--nodes", type=int, nargs="+", default=[16, 64, 512])
    parser.add_argument("--draws", type=int, default=50, help="fleets for each row")
    parser.add_argument("--time-nodes", type=int, nargs="+", default=[16, 64, 256, 1000, 4000])
    parser.add_argument("--repeats", type=int, default=5, help="for each planning time")
    arguments = harness.parse(parser, nodes=[16], draws=3, time_nodes=[16, 64], repeats=2)
    rows = [
        row(kind, num_nodes, arguments.draws) for kind in DRAWS for num_nodes in arguments.nodes
    ]
    report(rows)
    times = [timed(num_nodes, arguments.repeats) for num_nodes in arguments.time_nodes]
    for one in times:
        print(f"{one['num_nodes']:>5} nodes: {one['new_s']:.4f} s anew, {one['kept_s']:.4f} s kept")
    print(f"wrote {harness.save('topology', {'shares': rows, 'planning': times})}")
    print(f"wrote {draw(rows, times)}")


def row(kind: str, num_nodes: int, num_draws: int) -> dict[str, Any]:
    """Return median and worst share of the optimum by kind of plan."""
    rng = random.Random(f"{kind} {num_nodes}")
    shares: dict[str, list[float]] = {}
    optima, kinds = [], []
    for _ in range(num_draws):
        nodes = fleet(kind, num_nodes, rng)
        uplinks = [site.uplink_bytes_per_s or 0.0 for site in nodes]
        downlinks = [site.downlink_bytes_per_s or 0.0 for site in nodes]
        best = fluid_rate(LEARNER_MBIT * MBIT, uplinks, downlinks)
        optima.append(best / MBIT)
        found = planned(nodes)
        kinds.append(found.kind)
        rates: dict[str, float] = {}
        for one in found.candidates:
            rates[one.kind] = max(rates.get(one.kind, 0.0), one.rate_bytes_per_s)
        rates["chosen"] = found.rate_bytes_per_s
        for name, rate in rates.items():
            shares.setdefault(name, []).append(rate / best)
    return {
        "uplinks_mbit": kind,
        "num_nodes": num_nodes,
        "num_draws": num_draws,
        "optimum_mbit": round(statistics.mean(optima), 1),
        "shares": {
            name: {"median": round(statistics.median(some), 3), "worst": round(min(some), 3)}
            for name, some in shares.items()
        },
        "chosen": {name: kinds.count(name) for name in sorted(set(kinds))},
    }


def fleet(kind: str, num_nodes: int, rng: random.Random) -> list[Site]:
    found = []
    for index in range(num_nodes):
        up = DRAWS[kind](rng)
        name, down = f"n{index}", max(LEAST_DOWNLINK_MBIT, up)
        address = f"tcp://{name}:1" if up else None
        found.append(Site(name, "worker", address, up * MBIT, down * MBIT))
    return found


def planned(nodes: list[Site], *, payload: str = "16 GB", **settings: Any) -> Any:
    payload_bytes, chunk_bytes = PAYLOADS[payload]
    return plan_topology(
        nodes,
        learner=Site("learner", "learner", "tcp://l:1", LEARNER_MBIT * MBIT),
        payload_bytes=payload_bytes,
        chunk_bytes=chunk_bytes,
        rtt_s=lambda first, second: RTT_S,
        **settings,
    )


def timed(num_nodes: int, repeats: int) -> dict[str, Any]:
    """Return the slower payload's median time of a new plan, and of one after a node has left."""
    nodes = fleet("log-normal, median 100", num_nodes, random.Random(num_nodes))
    rest = nodes[: num_nodes // 2] + nodes[num_nodes // 2 + 1 :]
    new, kept = [], []
    for payload in PAYLOADS:
        began, ended, previous = [], [], planned(nodes, payload=payload)
        for _ in range(repeats):
            start = time.perf_counter()
            planned(nodes, payload=payload)
            began.append(time.perf_counter() - start)
            start = time.perf_counter()
            planned(rest, payload=payload, previous=previous)
            ended.append(time.perf_counter() - start)
        new.append(statistics.median(began))
        kept.append(statistics.median(ended))
    return {"num_nodes": num_nodes, "new_s": round(max(new), 4), "kept_s": round(max(kept), 4)}


NAMES = ("chain", "tree", "star", "chosen")


def report(rows: list[dict[str, Any]]) -> None:
    print("median / worst share of the fluid optimum")
    print(f"{'uplinks, Mbit/s':<24}{'N':>4}{'r*':>6}" + "".join(f"{name:>13}" for name in NAMES))
    for one in rows:
        cells = [one["shares"].get(name) for name in NAMES]
        texts = [f"{c['median']:.2f} / {c['worst']:.2f}" if c else "-" for c in cells]
        head = f"{one['uplinks_mbit']:<24}{one['num_nodes']:>4}{one['optimum_mbit']:>6.0f}"
        print(head + "".join(f"{text:>13}" for text in texts), one["chosen"])


def draw(rows: list[dict[str, Any]], times: list[dict[str, Any]]) -> Any:
    figure = harness.new_figure((13, 4.5), dpi=130)
    left, right = figure.subplots(1, 2, width_ratios=[3, 1])
    width = 0.8 / len(NAMES)
    for number, name in enumerate(NAMES):
        heights = [one["shares"].get(name, {"median": 0.0})["median"] for one in rows]
        left.bar([i + number * width for i in range(len(rows))], heights, width, label=name)
    left.axhline(0.85, color="black", linewidth=0.8, linestyle=":")
    labels = [f"{one['uplinks_mbit']}\nN = {one['num_nodes']}" for one in rows]
    left.set_xticks([i + 0.4 for i in range(len(rows))], labels, rotation=60, fontsize=7)
    left.set_ylabel("share of the fluid optimum, median")
    left.legend(fontsize=7, ncols=4, loc="lower center")
    counts = [one["num_nodes"] for one in times]
    right.loglog(counts, [one["new_s"] for one in times], marker="o", label="anew")
    right.loglog(counts, [one["kept_s"] for one in times], marker="o", label="after one left")
    right.set_xlabel("nodes")
    right.set_ylabel("seconds to plan")
    right.legend(fontsize=7)
    path = harness.result_path("topology", ".png")
    figure.savefig(path)
    return path


if __name__ == "__main__":
    main()
