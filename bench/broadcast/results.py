"""Rows of bench_broadcast.py: medians against theory, table, result file."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness

from broadcast.lab import Variant
from broadcast.paths import Loopback

HEADINGS = {
    "variant": "{:<18}",
    "receivers": "{:>9}",
    "MiB": "{:>7}",
    "chunk": "{:>8}",
    "median_s": "{:>8}",
    "min-max": "{:>15}",
    "GB/s": "{:>6}",
    "vs_raw": "{:>6}",
    "x_theory": "{:>8}",
    "CPU_s/GB": "{:>8}",
    "right": "{:>6}",
}


def deliver(
    cases: list[tuple[Variant, int, int]], repeats: int, warm_ups: int = 1
) -> Iterator[list[list[dict[str, Any]]]]:
    """Let the cases take turns; after each measured round yield all measured rounds so far."""
    rounds: list[list[dict[str, Any]]] = []
    for number in range(warm_ups + repeats):
        results = [variant.deliver(size, chunk) for variant, size, chunk in cases]
        for (variant, _, _), result in zip(cases, results, strict=True):
            if result["num_right"] < variant.topology.num_receivers:
                raise RuntimeError(f"{variant.name}: {result} ended with other bytes")
        if number >= warm_ups:
            rounds.append(results)
            yield rounds


def rows_of(
    path: Loopback, cases: list[tuple[Variant, int, int]], rounds: list[list[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Return one row per case, with medians over the rounds."""
    raw = {
        size: index for index, (variant, size, _) in enumerate(cases) if variant.name == "raw TCP"
    }
    rows = []
    for index, (variant, size, chunk) in enumerate(cases):
        results = [each[index] for each in rounds]
        seconds = [result["seconds"] for result in results]
        row = {
            "path": path.name,
            "variant": variant.name,
            "topology": str(variant.topology),
            "receivers": variant.topology.num_receivers,
            "image_bytes": size,
            "chunk_bytes": chunk,
            "seconds": seconds,
            "median_s": statistics.median(seconds),
            "num_right": min(result["num_right"] for result in results),
        }
        rate = path.bytes_per_s
        if size in raw:
            raw_s = [each[raw[size]]["seconds"] for each in rounds]
            # Each with the raw stream of its own round, so that the machine's load cancels out.
            ratios = [other / own for other, own in zip(raw_s, seconds, strict=True)]
            row["vs_raw"] = statistics.median(ratios)
            row["vs_raw_spread"] = [min(ratios), max(ratios)]
            rate = rate or size / statistics.median(raw_s)
        if rate is not None:
            row["theory_s"] = variant.topology.theory_s(size, chunk, rate, path.latency_s)
            row["vs_theory"] = row["median_s"] / row["theory_s"]
        if all("cpu_s" in result for result in results):
            total_gb = size * variant.topology.num_receivers / 1e9
            row["cpu_s_per_gb"] = statistics.median(r["cpu_s"] for r in results) / total_gb
        rows.append(row)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print the rows as a table."""
    columns = " ".join(HEADINGS.values())
    print(columns.format(*HEADINGS))
    for row in rows:
        size, count = row["image_bytes"], row["receivers"]
        print(
            columns.format(
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
            ),
            flush=True,
        )


class Store:
    """A result file that is written after every row, and read again by the next run."""

    def __init__(self, what: str) -> None:
        """Open today's file of this name."""
        self.what = what
        self.path = harness.result_path(what, ".json")
        self.parts: dict[str, Any] = {}
        self._load()

    def _load(self) -> None:
        if self.path.exists():
            self.parts = json.loads(self.path.read_text()).get("parts", {})

    def put(self, name: str, part: dict[str, Any]) -> None:
        """Keep a part under its name, in place of an earlier one, with its environment."""
        self._load()  # another run may have added its parts meanwhile
        self.parts[name] = {"environment": harness.environment(), **part}
        harness.save(self.what, {"parts": self.parts})

    def has(self, name: str) -> bool:
        """Return whether a finished part of this name, of this commit, is there."""
        part = self.parts.get(name, {})
        if not part.get("is_done", False):
            return False
        return bool(part["environment"]["commit"] == harness.environment()["commit"])


def plot(title: str, bars: list[tuple[str, float, float | None]], path: Path, unit: str) -> Path:
    """Draw one bar for each (label, value, mark); the mark is what it is compared with."""
    labels = [label for label, _, _ in bars][::-1]
    figure = harness.new_figure((9, 1.5 + 0.36 * len(bars)), dpi=110)
    axis = figure.subplots()
    axis.barh(labels, [value for _, value, _ in bars][::-1], color="#4878a8", label="measured")
    marks = [float("nan") if mark is None else mark for _, _, mark in bars][::-1]
    axis.plot(marks, labels, "|", color="#c03028", markersize=16, label="compared with")
    axis.set_xlabel(unit)
    axis.set_title(title)
    axis.legend()
    figure.savefig(path)
    return path
