"""Profile an update of the weights: what coding, opening and writing a block consist of.

Beside each function of the project stands what numpy and the machine take for the like without it:
to compare two images, to read or copy one, to read or write the words that change. So what is
above these is the project's, and what is not is the memory's.

CPU seconds of one thread per GB of bf16 image, and nanoseconds per changed word. Steps take turns
block by block, each at another place of the image, so that no cache holds what it works on. The
least of all rounds is told beside the median: on a machine with other work it differs less.

    python bench/bench_update_steps.py
    python bench/bench_update_steps.py --quick          some seconds, writes nothing
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from typing import Any

import harness
import numpy as np
import numpy.typing as npt
import torch
import zstandard
from blake3 import blake3
from update.state import SCALES, SHAPES, Weights

from echo.engine import allocator
from echo.engine.weights import publish_image
from echo.weights import delta

Step = Callable[[int], Any]


class Blocks:
    """Two versions, and everything that an update makes of a block on its way."""

    def __init__(self, shape: str, share: float) -> None:
        """Make an update as learner and worker do."""
        weights = Weights(shape, share)
        old = np.frombuffer(publish_image(weights.state, "bfloat16")[1], "<u2")
        weights.step()
        new = np.frombuffer(publish_image(weights.state, "bfloat16")[1], "<u2")
        size = delta.BLOCK_BYTES // old.itemsize
        self.starts = range(0, old.size - size + 1, size)
        self.num_bytes = len(self.starts) * delta.BLOCK_BYTES
        image, other = old.copy(), old.copy()
        self.old, self.new, self.image, self.other = (
            [whole[start : start + size] for start in self.starts]
            for whole in (old, new, image, other)
        )
        self.found = [delta.find_changes(*pair) for pair in zip(self.old, self.new, strict=True)]
        self.coded = [memoryview(delta.encode_changes(*found[:2])) for found in self.found]
        self.hashes = [delta.hash_old(found[2]) for found in self.found]
        self.patches = [self.opened(number) for number in range(len(self.coded))]
        self.num_words = sum(patch.new.size for patch in self.patches)

    def opened(self, number: int) -> delta.BlockPatch:
        """Return what a block changes, as the worker finds it."""
        base = self.old[number].data.cast("B")
        return delta.open_block(self.coded[number], base, self.hashes[number])

    def read(self, number: int) -> None:
        """Take a coded block apart."""
        reader = delta.BlockReader(self.coded[number])
        reader.take(2)
        delta.read_changes(reader, self.old[number].size, 2)


def steps_of(blocks: Blocks) -> dict[str, Step]:
    """Return the steps by name; each works on the block of a number."""
    old, new, image, patches = blocks.old, blocks.new, blocks.image, blocks.patches
    differs = np.empty(old[0].size, np.bool_)
    gaps = [(patch.where % 256).astype(np.uint8) for patch in patches if patch.where is not None]
    limit = delta.most_sparse(old[0].size)

    def take_words(number: int) -> npt.NDArray[Any]:
        where = patches[number].where
        assert where is not None
        return np.take(old[number], where, mode="clip")

    def set_words(number: int) -> None:
        patch = patches[number]
        image[number][patch.where] = patch.new

    return {
        "learner: look at samples": lambda k: delta.has_more_changes(old[k], new[k], limit),
        "learner: find changes": lambda k: delta.find_changes(old[k], new[k]),
        "learner: pack": lambda k: delta.encode_changes(*blocks.found[k][:2]),
        "learner: hash old words": lambda k: delta.hash_old(blocks.found[k][2]),
        "worker: unpack": blocks.read,
        "worker: open (unpack, read old words, hash)": blocks.opened,
        "worker: write": lambda k: patches[k].write(image[k].data.cast("B")),
        "bound: compare two images": lambda k: np.not_equal(old[k], new[k], out=differs),
        "bound: read an image": lambda k: old[k].view("<u8").max(),
        "bound: copy an image": lambda k: np.copyto(blocks.other[k], old[k]),
        "bound: hash an image": lambda k: blake3(old[k].view(np.uint8).data).digest(),
        "bound: read words, in order": take_words,
        "bound: write words, in order": set_words,
        "bound: zstd of a byte per word": lambda k: zstandard.ZstdCompressor(level=1).compress(
            gaps[k].data
        ),
    }


def measure(blocks: Blocks, rounds: int) -> list[dict[str, Any]]:
    """Return a row per step."""
    steps, num_blocks = steps_of(blocks), len(blocks.starts)
    taken = {name: np.empty((rounds, num_blocks)) for name in steps}
    for turn, number in itertools.product(range(rounds), range(num_blocks)):
        for place, (name, step) in enumerate(steps.items()):
            block = (number + 5 * place) % num_blocks
            before = time.thread_time()
            step(block)
            taken[name][turn, block] = time.thread_time() - before
    rows = []
    for name, seconds in taken.items():
        row: dict[str, Any] = {"step": name}
        for what, values in (("least", seconds.min(0)), ("median", np.median(seconds, 0))):
            row[f"{what}_cpu_s_per_gb"] = values.sum() / blocks.num_bytes * 1e9
            row[f"{what}_ns_per_word"] = values.sum() / blocks.num_words * 1e9
        rows.append(row)
        print(
            f"{name:<46} {row['least_cpu_s_per_gb']:.4f} ({row['median_cpu_s_per_gb']:.4f}) CPU "
            f"s/GB, {row['least_ns_per_word']:6.2f} ({row['median_ns_per_word']:.2f}) ns per word"
        )
    return rows


def main() -> None:
    parser = harness.new_parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="128MiB")
    parser.add_argument("--share", type=float, choices=SCALES, default=0.014)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = harness.parse(parser, rounds=3)
    allocator.tune(os.environ)
    torch.set_num_threads(1)
    blocks = Blocks(arguments.shape, arguments.share)
    rows = measure(blocks, arguments.rounds)
    result = {"options": vars(arguments), "image_bytes": blocks.num_bytes, "steps": rows}
    print(f"wrote {harness.save('update_steps', result).name}")


if __name__ == "__main__":
    main()
