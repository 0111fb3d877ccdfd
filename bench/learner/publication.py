"""Steps with a version published after each, and the host memory of that."""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo.core.rollout import PolicyVersion
from echo.engine.weights import VersionImages
from echo.runtime.learner.versions.publish import Coder, Images, Publication, make_publication
from echo.train.ranks.rank_group import AnyTrainer, Launch, LeadTrainer, follow, join
from echo.train.trainer import Trainer
from echo.weights.delta import block_bytes_of
from echo.weights.store.items import Transfer
from learner.groups import make_groups
from learner.models import make_trainer, vocab_size_of

CHUNK_BYTES = 1 << 20
STEPS_IN_A_ROW = 3


class MemoryWatch:
    """Most memory that processes of this machine had, private and in common, since it was asked."""

    def __init__(self, processes: Sequence[int]) -> None:
        """Watch from now on, in a thread."""
        self._paths = [Path(f"/proc/{process}/status") for process in processes]
        self._peaks = self._look()
        threading.Thread(target=self._watch, daemon=True).start()

    def take(self) -> list[dict[str, int]]:
        """Return bytes by process, and begin anew."""
        peaks, self._peaks = self._peaks, self._look()
        return peaks

    def _look(self) -> list[dict[str, int]]:
        found = []
        for path in self._paths:
            lines = dict(line.split(":", 1) for line in path.read_text().splitlines())
            names = {"private": "RssAnon", "in_common": "RssShmem"}
            found.append({key: 1024 * int(lines[name].split()[0]) for key, name in names.items()})
        return found

    def _watch(self) -> None:
        while True:
            for peak, now in zip(self._peaks, self._look(), strict=True):
                for name, value in now.items():
                    peak[name] = max(peak[name], value)
            time.sleep(0.01)


class Publications:
    """Versions that nobody takes: made while the caller waits, coded and hashed beside it.

    As in a run, a version is put off while the one before is coded.
    """

    def __init__(self, trainer: AnyTrainer, images: Images) -> None:
        """Publish what a trainer has, in images that go with it."""
        self._trainer, self._images = trainer, images
        self._coder = Coder(Ed25519PrivateKey.generate(), encrypts=True, helpers=images.helpers)
        self._pool = ThreadPoolExecutor(1)
        self._held: Future[Transfer] | None = None
        parts = ("make", "arrive", "code", "seal", "wait")
        self.seconds: dict[str, list[float]] = {part: [] for part in parts}
        self.coded_bytes: list[int] = []
        self.num_put_off = 0

    def wait(self) -> Transfer | None:
        """Wait for the version before, which is then the base of the next."""
        began_at = time.perf_counter()
        base = None if self._held is None else self._held.result()
        self.seconds["wait"].append(time.perf_counter() - began_at)
        return base

    def publish(self) -> None:
        """Publish the present weights, unless the version before is still coded."""
        is_coded = self._held is None or self._held.done()
        if not (is_coded and self._images.prepare()):
            self.num_put_off += 1
            return
        base = self.wait()
        began_at = time.perf_counter()
        made = make_publication(
            self._trainer.tensors(),
            PolicyVersion(1, self._trainer.step_count),
            run_id="bench",
            images=self._images,
            chunk_bytes=CHUNK_BYTES,
        )
        self.seconds["make"].append(time.perf_counter() - began_at)
        self._held = self._pool.submit(self._code, made, base)

    def _code(self, made: Publication, base: Transfer | None) -> Transfer:
        at = [time.perf_counter()]
        _ = made.image  # which comes from a GPU beside the step
        at.append(time.perf_counter())
        if base is not None:
            segments = self._coder.segments(made, base)
            self.coded_bytes.append(sum(len(segment.payload) for segment in segments))
        at.append(time.perf_counter())
        made = self._coder.seal(made)
        at.append(time.perf_counter())
        for part, (begin, end) in zip(("arrive", "code", "seal"), pairwise(at), strict=True):
            self.seconds[part].append(end - begin)
        number = made.manifest.num_chunks
        return Transfer(made.signed, made.manifest, made.image, bytearray(b"\1" * number), number)


def time_publication(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Time steps alone and with a publication after each; on the ranks that torchrun starts."""
    rank_group, processes = None, [os.getpid()]
    if "RANK" in os.environ:
        rank_group = join(Launch.of(os.environ), torch.device(arguments.device).type)
        processes = [int(each) for each in rank_group.ranks.gather(str(os.getpid()).encode())]

    def build(checkpoint: Path | None) -> Trainer:
        return make_trainer(arguments, "packed", rank_group)

    if rank_group is None:
        alone = build(None)
        trainer: AnyTrainer = alone
        images: Images = VersionImages(
            "bfloat16",
            block_bytes=block_bytes_of(CHUNK_BYTES),
            is_on_device=False if arguments.last_version == "host" else None,
            copy_stream=alone.weights.copy_stream,
        )
    elif rank_group.ranks.rank:
        follow(rank_group, build, logging.getLogger())
        return []
    else:
        trainer = LeadTrainer(rank_group, build, None, published_dtype="bfloat16")
        images = trainer.images
    publications, watch = Publications(trainer, images), MemoryWatch(processes)
    found, peaks = _in_turns(arguments, trainer, publications, watch)
    if rank_group is not None:
        rank_group.dismiss()
    image_bytes = 2 * sum(tensor.numel() for tensor in trainer.tensors().values())
    longer = [with_ / alone - 1 for alone, with_ in zip(*found.values(), strict=True)]
    row: dict[str, Any] = {"ranks": len(processes), "image_bytes": image_bytes}
    row |= {f"step_s_{way}": statistics.median(seconds) for way, seconds in found.items()}
    row |= {"longer_by": statistics.median(longer), "longer_by_spread": [min(longer), max(longer)]}
    for part, seconds in publications.seconds.items():
        row[f"{part}_s"] = statistics.median(seconds)
    row["num_put_off"] = publications.num_put_off
    row["coded_share"] = statistics.median(publications.coded_bytes) / image_bytes
    rows = [row]
    for rank in range(len(processes)):
        with_, without = peaks["published"][rank], peaks["alone"][rank]
        rows.append(
            {
                "rank": rank,
                "in_common_of_image": with_["in_common"] / image_bytes,
                "private_more_of_image": (with_["private"] - without["private"]) / image_bytes,
                "private_bytes": with_["private"],
            }
        )
    return rows


def _in_turns(
    arguments: argparse.Namespace,
    trainer: AnyTrainer,
    publications: Publications,
    watch: MemoryWatch,
) -> tuple[dict[str, list[float]], dict[str, list[dict[str, int]]]]:
    """Return seconds of a step, and the most memory of each process, both ways."""
    batches = [make_groups(arguments, vocab_size_of(arguments.model), n) for n in range(2)]
    found: dict[str, list[float]] = {"alone": [], "published": []}
    peaks: dict[str, list[dict[str, int]]] = {}
    for number in range(1 + arguments.steps):
        for way, seconds in found.items():
            trainer.step(batches[0])
            if way == "published":  # whose coding is beside the first of those that are timed
                publications.publish()
            watch.take()
            began_at = time.perf_counter()
            for count in range(STEPS_IN_A_ROW):
                trainer.step(batches[count % len(batches)])
                if way == "published":
                    publications.publish()
            step_s = (time.perf_counter() - began_at) / STEPS_IN_A_ROW
            if way == "published":
                publications.wait()
            if number:
                seconds.append(step_s)
                taken = watch.take()
                peaks[way] = [
                    {name: max(peak[name], value) for name, value in now.items()}
                    for peak, now in zip(peaks.get(way, taken), taken, strict=True)
                ]
    return found, peaks
