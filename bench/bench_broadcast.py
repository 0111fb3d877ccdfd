"""Measure the broadcast of a version to every receiver, against theory.

Real processes: the learner's role publishes; relays receive, verify, store and pass on. On
loopback the figures are ratios to one raw TCP stream of the same run. With --path wan every node is
a namespace behind an emulated uplink (bench/wan.py, needs root), with --path proxy behind a TCP
proxy with rate and delay (bench/broadcast/proxy.py, which says what it leaves out). The theory is

    chain   size/rate + (hops - 1) * chunk/rate + hops * latency
    star    receivers * size/rate + latency
    tree    fan-out * size/rate + ...

with the rate of the uplink, or on loopback that of raw TCP. Connections are warm: one version goes
ahead unmeasured, then the variants take turns. A version has arrived when the last receiver holds
all of it, every chunk verified; the hash of the whole is compared afterwards.

    python bench/bench_broadcast.py                              loopback
    python bench/bench_broadcast.py --path wan --rate-mbit 100 200 --loss 0 0.001 --curve on off
    python bench/bench_broadcast.py --topologies chain:5 star:5 tree:6:2
    python bench/bench_broadcast.py --quick                      some seconds, writes nothing

The figures that the project has to reach, exactly as its README quotes them, into one file that
grows figure by figure; --resume skips what this commit has measured today:

    python bench/bench_broadcast.py --figures [--only chain-5 stall] [--resume]

Between real machines, one learner and one receiver on each other machine (a receiver that listens
is part of the chain, the others are leaves), with what the link has for the theory; the learner
prints the address that the others connect to, and takes the port after its own for the raw stream:

    python bench/bench_broadcast.py --listen tcp://192.0.2.1:7700 --topologies chain:2 star:2 \\
        --rate-mbit 1000 --latency-ms 5
    python bench/bench_broadcast.py --connect tcp://192.0.2.1:7700... --listen tcp://192.0.2.2:7701
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import wan
from broadcast.figures import FIGURES, Bench, Figure
from broadcast.lab import Echo, Shardcast, Stream, Topology, Variant, shardcast_fault
from broadcast.machines import Distant, DistantStream, Machines, receive
from broadcast.paths import Loopback, Proxied, Wan, capacity_gbit, show_work, work_of
from broadcast.results import Store, deliver, plot, rows_of, show

from echo.core.units import parse_size

DEFAULT_TOPOLOGIES = [Topology("chain", 1), Topology("chain", 5), Topology("star", 5)]


def parse_arguments() -> argparse.Namespace:
    parser = harness.new_parser(__doc__)
    add = parser.add_argument
    add("--path", choices=["loopback", "wan", "proxy"], default="loopback")
    add("--sizes", nargs="+", type=parse_size, default=[128 << 20], help="of the image: 128MiB")
    add("--chunks", nargs="+", type=parse_size, default=[1 << 18, 1 << 20, 1 << 22])
    add("--topologies", nargs="+", type=Topology.parse, default=DEFAULT_TOPOLOGIES,
        help="chain:HOPS star:N tree:N:FAN-OUT auto:N")  # fmt: skip
    add("--curve", nargs="+", choices=["on", "off"], default=["off"], help="encrypted links")
    add("--codecs", nargs="+", choices=["full", "delta"], default=["full"])
    add("--sockets", default="auto", help="for chunks to each parent, with --curve on")
    add("--rate-mbit", nargs="+", type=float, default=[200.0], help="of each uplink")
    add("--latency-ms", nargs="+", type=float, default=[20.0], help="one way")
    add("--loss", nargs="+", type=float, default=[0.0], help="of each segment, with --path wan")
    add("--buffers", choices=["default", "tuned"], default="default", help="of TCP, path wan")
    add("--congestion", help="TCP's congestion control in the namespaces")
    add("--repeats", type=int, default=5)
    add("--limit-s", type=float, default=1800, help="for all variants on one link")
    add("--shardcast-python", default=sys.executable, help="an interpreter that has the package")
    add("--figures", action="store_true", help="measure what the project has to reach")
    add("--only", nargs="+", choices=list(FIGURES), default=list(FIGURES), metavar="FIGURE")
    add("--resume", action="store_true", help="skip what this commit has measured today")
    add("--listen", help="tcp://host:port: be the learner (or with --connect a link of the chain)")
    add("--connect", help="address that the learner has printed: be one receiver")
    few = [Topology("chain", 2), Topology("star", 2)]
    arguments = harness.parse(parser, sizes=[16 << 20], chunks=[1 << 18], repeats=3, topologies=few)
    counts = {topology.num_receivers for topology in arguments.topologies}
    if arguments.path == "proxy" and "on" in arguments.curve:
        parser.error("--path proxy: a proxy has one port, and encrypted chunks take another one")
    if arguments.listen and not arguments.connect and (len(counts), len(arguments.curve)) != (1, 1):
        parser.error("--listen: all --topologies need the same receivers, and --curve is on or off")
    return arguments


@contextlib.contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """Raise TimeoutError if the body takes longer."""

    def give_up(*_: Any) -> None:
        raise TimeoutError(f"not done after {seconds:g} s")

    previous = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def paths(arguments: argparse.Namespace) -> Iterator[tuple[Loopback, list[Topology]]]:
    """Yield what lies between the nodes, one after the other, and what to measure on it."""
    most = 1 + max(topology.num_receivers for topology in arguments.topologies)
    if arguments.listen:
        rate, latency = arguments.rate_mbit[0], arguments.latency_ms[0]
        options = [f"--sockets={arguments.sockets}"]
        options += ["--curve"] * (arguments.curve == ["on"])
        link = {"rate_mbit": rate, "latency_ms": latency, "options": options}
        with contextlib.closing(Machines(arguments.listen, most - 1, **link)) as path:
            # The connections of one topology are torn down for the next: they cannot take turns.
            name = path.name
            for topology in arguments.topologies:
                path.name = f"{name}, {topology}"
                yield path, [topology]
    elif arguments.path == "loopback":
        yield Loopback(), arguments.topologies
    elif arguments.path == "proxy":
        # A node behind a proxy has one port, so that the variants cannot run beside each other.
        links = itertools.product(arguments.rate_mbit, arguments.latency_ms, arguments.topologies)
        for rate, latency, topology in links:
            with contextlib.closing(Proxied(most, rate_mbit=rate, latency_ms=latency)) as path:
                path.name += f", {topology}"
                yield path, [topology]
    else:
        links = itertools.product(arguments.rate_mbit, arguments.latency_ms, arguments.loss)
        for rate, latency, loss in links:
            of_path: dict[str, Any] = {"rate_mbit": rate, "latency_ms": latency, "loss": loss}
            of_path |= {"tuned": arguments.buffers == "tuned", "congestion": arguments.congestion}
            with contextlib.closing(Wan(most, **of_path)) as path:
                yield path, arguments.topologies


def cases_on(
    path: Loopback,
    topologies: list[Topology],
    arguments: argparse.Namespace,
    absent: dict[str, str],
    stack: contextlib.ExitStack,
) -> list[tuple[Variant, int, int]]:
    """Start all variants on a path; what cannot be measured goes to `absent`."""
    if isinstance(path, Machines):
        return cases_between(path, topologies, arguments, absent)
    raw = Stream(path, is_raw=True)
    stack.callback(raw.close)
    cases: list[tuple[Variant, int, int]] = [(raw, size, 0) for size in arguments.sizes]
    for topology, curve, codec in itertools.product(topologies, arguments.curve, arguments.codecs):
        fault = too_much(path, topology)
        if fault:
            absent[f"echo {topology}"] = fault
            continue
        try:
            options = {"curve": curve == "on", "codec": codec, "sockets": arguments.sockets}
            echo = Echo(path, topology, **options)
        except RuntimeError as error:
            absent[f"echo {topology}"] = str(error)
            continue
        stack.callback(echo.close)
        cases += [(echo, s, c) for s in arguments.sizes for c in arguments.chunks]
    if isinstance(path, Wan):
        missing = shardcast_fault(arguments.shardcast_python)
        if missing is not None:
            absent["shardcast"] = missing
        else:
            count = max(topology.num_receivers for topology in arguments.topologies)
            package = Shardcast(path, count, arguments.shardcast_python)
            stack.callback(package.close)
            cases += [(package, size, 0) for size in arguments.sizes]
    else:
        absent["shardcast"] = "its nodes need an address each: --path wan"
    return cases


def too_much(path: Loopback, topology: Topology) -> str:
    """Return why the emulator, and not the links, would be the limit; nothing if it would not."""
    if not isinstance(path, Wan) or not path.bytes_per_s:
        return ""
    gbit, bound = topology.carried(path.bytes_per_s) * 8e-9, emulator_gbit() / 2
    if gbit <= bound:
        return ""
    mbit = int(path.bytes_per_s * 8e-6 * bound / gbit)
    return (
        f"its links carry {gbit:.1f} Gbit/s together, and half of what the emulator can carry is "
        f"{bound:.1f}: --rate-mbit {mbit} or less"
    )


@functools.cache
def emulator_gbit() -> float:
    """Measure the emulator once."""
    gbit = capacity_gbit()
    print(f"the emulator can carry {gbit:.1f} Gbit/s", flush=True)
    return gbit


def cases_between(
    path: Machines,
    topologies: list[Topology],
    arguments: argparse.Namespace,
    absent: dict[str, str],
) -> list[tuple[Variant, int, int]]:
    """Return what is measured between machines that have joined."""
    cases: list[tuple[Variant, int, int]] = []
    if path.fault:
        absent["raw TCP"] = path.fault
    else:
        cases += [(DistantStream(path), size, 0) for size in arguments.sizes]
    for topology, codec in itertools.product(topologies, arguments.codecs):
        echo = Distant(path, topology, codec=codec, curve=arguments.curve == ["on"])
        echo.plan()
        cases += [(echo, s, c) for s in arguments.sizes for c in arguments.chunks]
    absent["shardcast"] = "its nodes are started by the benchmark: --path wan"
    return cases


def run_matrix(arguments: argparse.Namespace) -> None:
    kind = "machines" if arguments.listen else arguments.path
    store = Store(f"broadcast_{kind}")
    for path, topologies in paths(arguments):
        if arguments.resume and store.has(path.name):
            continue
        absent: dict[str, str] = {}
        with contextlib.ExitStack() as stack:
            stack.enter_context(bounded(arguments.limit_s))
            cases = cases_on(path, topologies, arguments, absent, stack)
            rows: list[dict[str, Any]] = []
            before = path.status()
            for rounds in deliver(cases, arguments.repeats):
                rows = rows_of(path, cases, rounds)
                store.put(path.name, {"rows": rows, "absent": absent})
            work = work_of(before, path.status())
        if isinstance(path, Wan):
            work["capacity_gbit"] = emulator_gbit()
        store.put(path.name, {"rows": rows, "absent": absent, "emulator": work, "is_done": True})
        print(path.name)
        show(rows)
        show_work(work)
        for what, why in absent.items():
            print(f"ABSENT: {what}: {why}")
    rows = [row for part in store.parts.values() for row in part["rows"]]
    bars = [(label(row), row["median_s"], row.get("theory_s")) for row in rows]
    picture = store.path.with_suffix(".png")
    plot("one version to the last receiver", bars, picture, "seconds, median")
    print(f"wrote {store.path} and {picture.name}")


def label(row: dict[str, Any]) -> str:
    chunk = f" in {row['chunk_bytes'] >> 10} KiB" if row["chunk_bytes"] else ""
    name = row["variant"].removesuffix(row["topology"].partition(":")[0])
    return f"{name.strip()} {row['topology']}, {row['image_bytes'] >> 20} MiB{chunk}"


def run_figures(arguments: argparse.Namespace) -> None:
    store = Store("broadcast_figures")
    capacity = emulator_gbit() if set(arguments.only) != {"loopback-one-hop"} else None
    for name in arguments.only:
        if arguments.resume and store.has(name):
            continue
        figure = FIGURES[name]
        print(f"\n{name}", flush=True)
        part = measure_figure(name, figure, arguments, store)
        store.put(name, {**part, "emulator_capacity_gbit": capacity})
        print_verdict(figure, part)
    bars = [
        (f"{name}: {what}", value / FIGURES[name].at_least[what], FIGURES[name].aim[what])
        for name, part in store.parts.items()
        for what, value in part.get("achieved", {}).items()
    ]
    marks: list[tuple[str, float, float | None]] = [
        (text, value, mark / FIGURES[text.partition(":")[0]].at_least[text.partition(": ")[2]])
        for text, value, mark in bars
    ]
    picture = plot("achieved / required (mark: aim)", marks, store.path.with_suffix(".png"), "x")
    print(f"wrote {store.path} and {picture.name}")


def measure_figure(
    name: str, figure: Figure, arguments: argparse.Namespace, store: Store
) -> dict[str, Any]:
    """Return a part of the result file: what was achieved, or why nothing was."""
    bench = Bench(
        repeats=arguments.repeats,
        shardcast_python=arguments.shardcast_python,
        on_rows=lambda rows: store.put(name, rows),
    )
    load_before = os.getloadavg()
    part: dict[str, Any] = {"at_least": figure.at_least, "aim": figure.aim}
    try:
        with bounded(figure.limit_s):
            part["achieved"] = figure.measure(bench)
            part["verdict"] = figure.verdict(part["achieved"])
            part["is_done"] = True
    except (RuntimeError, TimeoutError, BrokenPipeError) as error:
        part["fault"] = str(error)
    return {
        **part,
        "rows": bench.rows,
        "emulator": bench.emulator,
        "load_before": load_before,
    }


def print_verdict(figure: Figure, part: dict[str, Any]) -> None:
    if "fault" in part:
        print(f"NOT MEASURED: {part['fault']}", flush=True)
    for what, value in part.get("achieved", {}).items():
        wanted = f"at least {figure.at_least[what]:g}, aim {figure.aim[what]:g}"
        if figure.is_lower_better:
            wanted = wanted.replace("at least", "at most")
        print(f"{part['verdict'][what].upper()}: {what} {value:.3f} ({wanted})", flush=True)


def wan_fault() -> str | None:
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need root on Linux; --path proxy needs none"
    if wan.compiler() is None:
        return "there is no C compiler; --path proxy needs none"
    return None if Path("/dev/net/tun").exists() else "there is no /dev/net/tun; try --path proxy"


def main() -> None:
    arguments = parse_arguments()
    if arguments.connect:
        options = [f"--sockets={arguments.sockets}"]
        options += ["--curve"] if arguments.connect.count("#") else []
        options += [f"--listen={arguments.listen}"] if arguments.listen else []
        receive(arguments.connect, options)
        return
    needs_wan = arguments.path == "wan" or (
        arguments.figures and arguments.only != ["loopback-one-hop"]
    )
    fault = wan_fault() if needs_wan else None
    if fault is not None:
        sys.exit(f"ABSENT: wan: {fault}")
    load = os.getloadavg()
    if arguments.figures:
        run_figures(arguments)
    else:
        run_matrix(arguments)
    print(f"load average {load[0]:.1f} before, {os.getloadavg()[0]:.1f} after")


if __name__ == "__main__":
    main()
