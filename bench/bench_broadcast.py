"""Measure how fast one version of the weights reaches every receiver, against the theory.

Real processes: the learner's session publishes; relays receive, verify, store and pass on. On
loopback the figures are ratios to one raw TCP stream of the same run. With --wan every node is a
namespace behind an emulated uplink (bench/wan.py, needs root). The theory is

    chain   size/rate + (hops - 1) * chunk/rate + hops * latency
    star    receivers * size/rate + latency

with the rate of the uplink, or on loopback that of raw TCP. Connections are warm: one version goes
ahead unmeasured, then the variants take turns. A version has arrived when the last receiver holds
all of it, every chunk verified; the hash of the whole is compared afterwards.

    python bench/bench_broadcast.py --wan
    python bench/bench_broadcast.py --smoke          some seconds, writes nothing

Between real machines, one learner and one receiver on each other machine (a receiver that listens
is part of the chain, the others are leaves), with what the link has for the theory:

    python bench/bench_broadcast.py --listen tcp://192.0.2.1:7700 --topologies chain:2 \\
        --rate-mbit 1000 --latency-ms 5
    python bench/bench_broadcast.py --connect tcp://192.0.2.1:7700 --listen tcp://192.0.2.2:7701
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import harness
from broadcast_lab import HERE, Echo, Loopback, RawTcp, Shardcast, Variant, Wan, shardcast_fault

from echo.units import parse_size

HEADINGS = [
    "variant",
    "receivers",
    "MiB",
    "chunk",
    "median_s",
    "min-max",
    "GB/s",
    "vs_raw",
    "x_theory",
    "CPU_s/GB",
    "right",
]
SMOKE_TOPOLOGIES = ["chain:2", "star:2"]
COLUMNS = "{:<16} {:>9} {:>8} {:>8} {:>8} {:>15} {:>6} {:>7} {:>8} {:>6} {:>6}"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--sizes", nargs="+", type=parse_size, default=[128 << 20], help="of the image: 128MiB")
    add("--chunks", nargs="+", type=parse_size, default=[1 << 18, 1 << 20, 1 << 22])
    add("--topologies", nargs="+", default=["chain:1", "chain:5", "star:5"], help="kind:receivers")
    add("--window", type=parse_size, default=8 << 20, help="credit of a child")
    add("--repeats", type=int, default=5)
    add("--wan", action="store_true", help="between namespaces, and with shardcast")
    add("--rate-mbit", type=float, default=200)
    add("--latency-ms", type=float, default=20, help="one way")
    add("--loss", type=float, default=0.0)
    add("--shardcast-python", default=sys.executable, help="an interpreter that has the package")
    add("--listen", help="tcp://host:port: be the learner (or with --connect a link of the chain)")
    add("--connect", help="tcp://host:port of the learner: be one receiver")
    add("--smoke", action="store_true")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.sizes, arguments.chunks, arguments.repeats = [4 << 20], [1 << 18], 1
        arguments.topologies = arguments.topologies[:1] if arguments.listen else SMOKE_TOPOLOGIES
    return arguments


def measure(
    path: Loopback, cases: list[tuple[Variant, int, int]], repeats: int
) -> list[dict[str, Any]]:
    """Return one row per case; the cases take turns, the first round is for warming up."""
    rounds: list[list[dict[str, Any]]] = []
    for number in range(repeats + 1):
        print(f"{path.name}: round {number} of {repeats}", file=sys.stderr)
        rounds.append([one.deliver(size, chunk) for one, size, chunk in cases])
    measured = rounds[1:]
    raw = {size: index for index, (one, size, _) in enumerate(cases) if isinstance(one, RawTcp)}
    rows = []
    for index, (variant, size, chunk) in enumerate(cases):
        results = [each[index] for each in measured]
        seconds = [result["seconds"] for result in results]
        row = {
            "path": path.name,
            "variant": variant.name,
            "receivers": variant.num_receivers,
            "image_bytes": size,
            "chunk_bytes": chunk,
            "seconds": seconds,
            "median_s": statistics.median(seconds),
            "num_right": min(result["num_right"] for each in rounds for result in [each[index]]),
        }
        rate = path.bytes_per_s
        if size in raw:
            raw_s = [each[raw[size]]["seconds"] for each in measured]
            # Each with the raw stream of its own round, so that the machine's load cancels out.
            ratios = [other / own for other, own in zip(raw_s, seconds, strict=True)]
            row["vs_raw"] = statistics.median(ratios)
            rate = rate or size / statistics.median(raw_s)
        if rate is not None:
            row["theory_s"] = theory_s(variant, size, chunk, rate, path.latency_s)
            row["vs_theory"] = row["median_s"] / row["theory_s"]
        if all("cpu_s" in result for result in results):
            total_gb = size * variant.num_receivers / 1e9
            row["cpu_s_per_gb"] = statistics.median(r["cpu_s"] for r in results) / total_gb
        rows.append(row)
    return rows


def theory_s(variant: Variant, size: int, chunk: int, rate: float, latency_s: float) -> float:
    """Return the seconds until the last receiver has everything, if only the links take time."""
    count = variant.num_receivers
    if variant.kind == "star":
        return count * size / rate + latency_s
    return size / rate + (count - 1) * chunk / rate + count * latency_s


def show(rows: list[dict[str, Any]]) -> None:
    print(COLUMNS.format(*HEADINGS))
    for row in rows:
        size, count = row["image_bytes"], row["receivers"]
        print(
            COLUMNS.format(
                row["variant"],
                count,
                f"{size / 2**20:g}",
                f"{row['chunk_bytes'] >> 10} Ki" if row["chunk_bytes"] else "-",
                f"{row['median_s']:.3f}",
                f"{min(row['seconds']):.3f}-{max(row['seconds']):.3f}",
                f"{size / row['median_s'] / 1e9:.3f}",
                f"{row['vs_raw']:.2f}" if "vs_raw" in row else "-",
                f"{row['vs_theory']:.2f}" if "vs_theory" in row else "-",
                f"{row['cpu_s_per_gb']:.2f}" if "cpu_s_per_gb" in row else "-",
                f"{row['num_right']}/{count}",
            )
        )


def run_loopback(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    path = Loopback()
    with contextlib.ExitStack() as stack:
        cases: list[tuple[Variant, int, int]] = []
        if arguments.listen:  # the other machines have nothing that would take a raw stream
            path.name, path.latency_s = "between machines", arguments.latency_ms / 1e3
            path.bytes_per_s = arguments.rate_mbit * 1e6 / 8
        else:
            raw = RawTcp(path)
            stack.callback(raw.close)
            cases += [(raw, size, 0) for size in arguments.sizes]
        for variant in start_echo(path, arguments, stack):
            cases += [(variant, s, c) for s in arguments.sizes for c in arguments.chunks]
        return measure(path, cases, arguments.repeats)


def run_wan(arguments: argparse.Namespace, absent: dict[str, str]) -> list[dict[str, Any]]:
    most = max(int(topology.split(":")[1]) for topology in arguments.topologies)
    link = {name: getattr(arguments, name) for name in ("rate_mbit", "latency_ms", "loss")}
    with contextlib.ExitStack() as stack:
        path = Wan(most + 1, **link)
        stack.callback(path.close)
        variants: list[Variant] = [RawTcp(path)]
        stack.callback(variants[0].close)
        variants += start_echo(path, arguments, stack)
        python = arguments.shardcast_python
        fault = shardcast_fault(python)
        if fault is not None:
            absent["shardcast"] = fault
        else:
            variants.append(Shardcast(path, most, python))
            stack.callback(variants[-1].close)
        started_at, cpu_s = time.monotonic(), path.cpu_s()
        sizes, chunks = arguments.sizes, arguments.chunks
        cases = [(one, s, c) for one in variants for s in sizes for c in chunks]
        rows = measure(path, cases, arguments.repeats)
        share = (path.cpu_s() - cpu_s) / (time.monotonic() - started_at)
        print(f"the emulator took {share:.2f} of a core on average")
        return rows


def start_echo(
    path: Loopback, arguments: argparse.Namespace, stack: contextlib.ExitStack
) -> list[Variant]:
    variants: list[Variant] = []
    for topology in arguments.topologies:
        kind, count = topology.split(":")
        variants.append(Echo(path, kind, int(count), arguments.window, arguments.listen))
        stack.callback(variants[-1].close)
    return variants


def wan_fault() -> str | None:
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux"
    return None if Path("/dev/net/tun").exists() else "there is no /dev/net/tun"


def plot(rows: list[dict[str, Any]], path: Path) -> Path:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    rows = rows[::-1]
    labels = [
        f"{row['variant']} x{row['receivers']}, {row['image_bytes'] >> 20} MiB"
        + (f" in {row['chunk_bytes'] >> 10} KiB" if row["chunk_bytes"] else "")
        for row in rows
    ]
    figure, axis = plt.subplots(figsize=(9, 1.5 + 0.36 * len(rows)))
    axis.barh(labels, [row["median_s"] for row in rows], color="#4878a8", label="measured")
    marks = [row.get("theory_s", float("nan")) for row in rows]
    axis.plot(marks, labels, "|", color="#c03028", markersize=16, label="theory")
    axis.set_xlabel("seconds until the last receiver holds all, median")
    axis.set_title(rows[0]["path"])
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    return path


def main() -> None:
    arguments = parse_arguments()
    if arguments.connect:
        command = [sys.executable, str(HERE / "broadcast_node.py"), "receiver"]
        command += [f"--connect={arguments.connect}", f"--window-bytes={arguments.window}"]
        command += [f"--listen={arguments.listen}"] if arguments.listen else []
        os.execv(command[0], command)
    load, absent = os.getloadavg(), {}
    fault = wan_fault() if arguments.wan else None
    if fault is not None:
        sys.exit(f"ABSENT: wan: {fault}")
    rows = run_wan(arguments, absent) if arguments.wan else run_loopback(arguments)
    show(rows)
    for what, why in absent.items():
        print(f"ABSENT: {what}: {why}")
    print(f"load average {load[0]:.1f} before, {os.getloadavg()[0]:.1f} after")
    if not arguments.smoke:
        what = f"broadcast_{'wan' if arguments.wan else 'loopback'}"
        print(f"wrote {harness.save(what, {'rows': rows, 'absent': absent, 'load_before': load})}")
        print(f"wrote {plot(rows, harness.result_path(what, '.png'))}")
    if any(row["num_right"] < row["receivers"] for row in rows):
        sys.exit("a receiver ended with other bytes than were published")


if __name__ == "__main__":
    main()
