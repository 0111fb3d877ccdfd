"""Measure deltas of weights: size, and speed of coding and decoding.

The weights are those of a simulated training: normal, sigma 0.02; gradients normal with a mean of
0.3 sigma of their own per weight; Adam (0.9, 0.95) on an fp32 master. An image is the master
rounded to bf16, or itself. A few million weights show the ratio; they are tiled to an image that
no cache holds for the speed.

    bf16 lr ...       one step behind the base, the optimizer warmed up
    first step        the first one after a start: every weight moves by the learning rate
    4 steps           what a delta over four versions holds
    fp32 lr ...       published without rounding
    keyframe ...        coded without a base

Beside it, on the same blocks and in turns: the exclusive or with the base, zstd level 1 (a
keyframe: zstd level 1 of the image), which others send. Speeds are image bytes per second of
process CPU, on one thread; the image is coded block by block as the learner does it, and what was
decoded is compared with it.

    python bench/bench_delta.py
    python bench/bench_delta.py --quick          some seconds, writes nothing
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import harness
import numpy as np
import numpy.typing as npt
import zstandard

from echo.core.units import parse_size
from echo.weights.delta import BLOCK_BYTES, WordBytes, decode_block, encode_block

LEARNING_RATES = (1e-7, 1e-6, 5e-6, 1e-5)
CODECS = ("unchanged", "raw", "changes", "difference", "xor", "planes")
COLUMNS = "{:<18} {:>9} {:>8} {:>9} {:>7} {:>12} {:>7} {:>12} {:>8} {:>7} {:>7} {:<10}"
HEADINGS = [
    "case", "changed %", "ratio", "xor+zstd1", "enc", "min-max", "dec", "min-max", "xor enc",
    "xor dec", "copy", "codec",
]  # fmt: skip

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Case:
    """Two images, one behind the other; no base for a keyframe."""

    name: str
    base: memoryview | None
    new: memoryview
    word_bytes: WordBytes
    changed_share: float


def parse_arguments() -> argparse.Namespace:
    parser = harness.new_parser(__doc__)
    add = parser.add_argument
    add("--weights", type=int, default=8 << 20, help="simulated weights")
    add("--steps", type=int, default=40, help="of Adam")
    add("--image", type=parse_size, default=256 << 20, help="bytes that are coded: 256MiB")
    add("--block", type=parse_size, default=BLOCK_BYTES)
    add("--repeats", type=int, default=7)
    arguments = harness.parse(
        parser, weights=1 << 20, steps=6, image=1 << 24, block=1 << 20, repeats=3
    )
    if arguments.steps < 5:
        parser.error("--steps must be at least 5: one delta is over four of them")
    return arguments


def simulate(num_weights: int, num_steps: int) -> tuple[dict[float, list[Floats]], list[Floats]]:
    """Return the masters of the last five versions per learning rate, and the first two."""
    generator = np.random.default_rng(0)

    def normal(sigma: float) -> Floats:
        return generator.standard_normal(num_weights, dtype=np.float32) * np.float32(sigma)

    start, mean = normal(0.02), normal(0.3)
    first, second = np.zeros_like(start), np.zeros_like(start)
    versions = {rate: [start] for rate in LEARNING_RATES}
    restart = []
    for step in range(1, num_steps + 1):
        gradient = normal(1.0) + mean
        first += np.float32(0.1) * (gradient - first)
        second += np.float32(0.05) * (gradient * gradient - second)
        # Both moments do not depend on the weights here, so all learning rates share them.
        update = first / np.float32(1 - 0.9**step)
        update /= np.sqrt(second / np.float32(1 - 0.95**step)) + np.float32(1e-8)
        for rate, kept in versions.items():
            kept.append(kept[-1] - np.float32(rate) * update)
            del kept[:-5]
        if step == 1:
            restart = [start, start - np.float32(1e-6) * update]
    return versions, restart


def rounded(values: Floats) -> npt.NDArray[np.uint16]:
    """Return the bit patterns of the nearest bf16 values."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def cases(arguments: argparse.Namespace) -> Iterator[Case]:
    """Yield one case after the other: together they would not fit into a small memory."""
    versions, restart = simulate(arguments.weights, arguments.steps)
    pairs: list[tuple[str, Floats, Floats]] = [
        (f"lr {rate:g}", kept[-2], kept[-1]) for rate, kept in versions.items()
    ]
    pairs.append(("first step 1e-6", restart[0], restart[1]))
    pairs.append(("4 steps 1e-6", versions[1e-6][0], versions[1e-6][-1]))
    for name, old, new in pairs:
        yield make_case(f"bf16 {name}", rounded(old), rounded(new), arguments.image)
    for rate in (1e-7, 1e-6, 1e-5):
        before, after = (values.view(np.uint32) for values in versions[rate][-2:])
        yield make_case(f"fp32 lr {rate:g}", before, after, arguments.image)
    newest = versions[1e-6][-1]
    yield make_case("keyframe bf16", None, rounded(newest), arguments.image)
    yield make_case("keyframe fp32", None, newest.view(np.uint32), arguments.image)


def make_case(
    name: str, old: npt.NDArray[Any] | None, new: npt.NDArray[Any], num_bytes: int
) -> Case:
    def image(words: npt.NDArray[Any]) -> memoryview:
        return np.resize(words, num_bytes // words.itemsize).view(np.uint8).data

    share = 1.0 if old is None else float(np.mean(old != new))
    base = None if old is None else image(old)
    return Case(name, base, image(new), 2 if new.itemsize == 2 else 4, share)


class Echo:
    """The codec of this project."""

    def __init__(self, word_bytes: WordBytes) -> None:
        self._word_bytes = word_bytes

    def encode(self, base: memoryview | None, new: memoryview) -> bytes:
        return encode_block(base, new, word_bytes=self._word_bytes)

    def decode(self, coded: bytes, base: memoryview | None, out: memoryview) -> None:
        decode_block(memoryview(coded), base, out)


class XorZstd:
    """What others send; without a base the image itself goes through zstd."""

    def encode(self, base: memoryview | None, new: memoryview) -> bytes:
        data = new if base is None else (words(base) ^ words(new)).data
        return zstandard.ZstdCompressor(level=1).compress(data)

    def decode(self, coded: bytes, base: memoryview | None, out: memoryview) -> None:
        data = zstandard.ZstdDecompressor().decompress(coded)
        if base is None:
            out[:] = data
        else:
            np.bitwise_xor(words(base), np.frombuffer(data, np.uint64), out=words(out))


def words(block: memoryview) -> npt.NDArray[np.uint64]:
    return np.frombuffer(block, np.uint64)


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    done = work()
    return time.process_time() - start, done


def run(codec: Echo | XorZstd, case: Case, out: memoryview, block: int) -> dict[str, Any]:
    """Code and decode an image once."""
    starts = range(0, len(case.new), block)

    def base(start: int) -> memoryview | None:
        return None if case.base is None else case.base[start : start + block]

    encode_s, coded = timed(
        lambda: [codec.encode(base(start), case.new[start : start + block]) for start in starts]
    )

    def decode() -> None:
        for start, one in zip(starts, coded, strict=True):
            codec.decode(one, base(start), out[start : start + block])

    decode_s, _ = timed(decode)
    if not np.array_equal(np.asarray(out), np.asarray(case.new)):
        raise SystemExit(f"{case.name}: {type(codec).__name__} did not bring the image back")
    size = len(case.new)
    return {
        "ratio": size / sum(map(len, coded)),
        "encode": size / encode_s / 1e9,
        "decode": size / decode_s / 1e9,
        "codec": CODECS[Counter(one[0] for one in coded).most_common(1)[0][0]]
        if isinstance(codec, Echo)
        else "",
    }


def measure(case: Case, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of a case; the codecs take turns, the first round is for warming up."""
    out = np.zeros(len(case.new), np.uint8).data
    rounds: list[dict[str, Any]] = []
    for _ in range(arguments.repeats + 1):
        copy_s, _ = timed(lambda: np.copyto(np.asarray(out), np.asarray(case.new)))
        ours = run(Echo(case.word_bytes), case, out, arguments.block)
        theirs = run(XorZstd(), case, out, arguments.block)
        rounds.append({"echo": ours, "xor_zstd1": theirs, "copy": len(case.new) / copy_s / 1e9})
    measured = rounds[1:]
    row: dict[str, Any] = {
        "case": case.name,
        "changed_share": case.changed_share,
        "codec": measured[0]["echo"]["codec"],
        "copy_gb_s": statistics.median(one["copy"] for one in measured),
    }
    for name in ("echo", "xor_zstd1"):
        figures = row[name] = {"ratio": measured[0][name]["ratio"]}
        for what in ("encode", "decode"):
            values = [one[name][what] for one in measured]
            figures[f"{what}_gb_s"] = statistics.median(values)
            figures[f"{what}_spread"] = [min(values), max(values)]
    return row


def show(row: dict[str, Any]) -> None:
    ours, theirs = row["echo"], row["xor_zstd1"]
    print(
        COLUMNS.format(
            row["case"],
            f"{100 * row['changed_share']:.2f}",
            f"{ours['ratio']:.1f}",
            f"{theirs['ratio']:.1f}",
            f"{ours['encode_gb_s']:.2f}",
            "{:.2f}-{:.2f}".format(*ours["encode_spread"]),
            f"{ours['decode_gb_s']:.2f}",
            "{:.2f}-{:.2f}".format(*ours["decode_spread"]),
            f"{theirs['encode_gb_s']:.2f}",
            f"{theirs['decode_gb_s']:.2f}",
            f"{row['copy_gb_s']:.1f}",
            row["codec"],
        ),
        flush=True,
    )


def plot(rows: list[dict[str, Any]]) -> None:
    figure = harness.new_figure((13, 4.5))
    axes = figure.subplots(1, 3, sharey=True)
    places = np.arange(len(rows))
    for axis, what, title in zip(
        axes,
        ("ratio", "encode_gb_s", "decode_gb_s"),
        ("times shorter than the image", "coded, GB/s per core", "decoded, GB/s per core"),
        strict=True,
    ):
        for shift, name, label in ((-0.2, "echo", "echo"), (0.2, "xor_zstd1", "XOR + zstd 1")):
            values = [row[name][what] for row in rows]
            bars = axis.barh(places + shift, values, 0.4, label=label)
            axis.bar_label(bars, fmt="%.3g", fontsize=7, padding=2)
        axis.set_title(title)
        axis.margins(x=0.2)
    axes[0].set_xscale("log")
    axes[0].set_yticks(places, [row["case"] for row in rows])
    axes[0].invert_yaxis()
    axes[0].legend()
    figure.savefig(harness.result_path("delta", ".png"))


def main() -> None:
    arguments = parse_arguments()
    rows = []
    print(COLUMNS.format(*HEADINGS))
    for case in cases(arguments):
        rows.append(measure(case, arguments))
        show(rows[-1])
    settings = {
        name: getattr(arguments, name) for name in ("weights", "steps", "image", "block", "repeats")
    }
    settings["zstandard"] = zstandard.__version__
    path = harness.save("delta", {"settings": settings, "rows": rows})
    plot(rows)
    print(f"wrote {path} and its .png")


if __name__ == "__main__":
    main()
