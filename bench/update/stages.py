"""One process of bench_update.py: updates of one kind, stage by stage, as lines of JSON.

Learner and worker are in one process, without a network between them; the stages are calls of the
project's own functions, in the order in which the nodes make them. A process makes one kind of
update: `changes`, which costs what has changed, or `whole`, today's way for late joiners and for
versions in which much has changed; `image` makes images only, each in new memory. So the first
update of a process finds no memory warm.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo.core.rollout import PolicyVersion
from echo.engine import allocator
from echo.engine.weights import VersionImages, publish_image, scatter, tensors_from_image
from echo.runtime.disk_store import open_store
from echo.runtime.learner.versions.publish import CodedSegment, Coder, Publication, make_publication
from echo.runtime.node import MAX_WORKERS
from echo.weights.delta import block_bytes_of
from echo.weights.manifest import encode_signed, hash_image
from echo.weights.store import eviction
from echo.weights.store.items import AuditChunks, Transfer
from echo.weights.store.store import ItemStore
from echo.weights.store.writing import WriteChunk
from echo.wire.messages import Form
from update.state import SCALES, SHAPES, Weights

RUN = "bench"
CHUNK_BYTES = 1 << 20


class Stages:
    """CPU and wall seconds of the stages of one update."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.rows: dict[str, dict[str, float]] = {}

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add what the body takes to a stage."""
        before, at = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        yield
        if self._device != "cpu":
            torch.cuda.synchronize()
        wall_s = time.perf_counter() - at
        after = resource.getrusage(resource.RUSAGE_SELF)
        row = self.rows.setdefault(name, dict.fromkeys(("user", "system", "wall", "faults"), 0.0))
        row["user"] += after.ru_utime - before.ru_utime
        row["system"] += after.ru_stime - before.ru_stime
        row["faults"] += after.ru_minflt - before.ru_minflt
        row["wall"] += wall_s


class Learner:
    """Makes versions."""

    def __init__(self, weights: Weights, *, is_on_device: bool | None) -> None:
        self.key = Ed25519PrivateKey.generate()
        self.coder = Coder(self.key, encrypts=True)
        self.held: Transfer | None = None
        self._weights = weights
        self._images = VersionImages(
            "bfloat16", block_bytes=block_bytes_of(CHUNK_BYTES), is_on_device=is_on_device
        )

    def make(self, step: int) -> Publication:
        """Round the weights."""
        return make_publication(
            self._weights.state,
            PolicyVersion(1, step),
            run_id=RUN,
            images=self._images,
            chunk_bytes=CHUNK_BYTES,
        )

    def keep(self, publication: Publication) -> None:
        """Take a sealed version as the base of the next."""
        self.held = transfer_of(publication, publication.image)


def transfer_of(publication: Publication, storage: bytearray | memoryview) -> Transfer:
    """Return a version that is whole."""
    manifest = publication.manifest
    has_chunk = bytearray(b"\1") * manifest.num_chunks
    return Transfer(publication.signed, manifest, storage, has_chunk, manifest.num_chunks)


class Worker:
    """Takes versions."""

    def __init__(
        self, publication: Publication, public_key: bytes, engine: str, device: str
    ) -> None:
        """Hold a first version, and give it to an engine.

        Args:
            publication: the version, sealed.
            public_key: the learner's.
            engine: "views" of the image, or weights of its own in float32 or bfloat16.
            device: where these are.
        """
        # One version is enough here; that of a learner has to be as in a run, for its memory.
        self.store = ItemStore(keep_versions=1, version_store=open_store(None, None))
        self.store.in_place.mode = "now"
        self._public_key = public_key
        self._pool = ThreadPoolExecutor(min(MAX_WORKERS, os.cpu_count() or 1))
        manifest = publication.manifest
        assert publication.signed is not None
        frame = encode_signed(publication.signed)
        room = self.store.version_store.create(manifest.version, frame, manifest.num_bytes)
        room[:] = publication.image
        self.store.add(transfer_of(publication, room))
        self.own: dict[str, torch.Tensor] = {}
        if engine != "views":
            given = tensors_from_image(manifest.tensors, memoryview(room).toreadonly())
            dtype = getattr(torch, engine)
            self.own = {name: each.to(device, dtype, copy=True) for name, each in given.items()}

    def take(self, segments: list[CodedSegment], stages: Stages) -> Transfer:
        """Take a version from its segments; return it, installed."""
        first = segments[0].table
        item = (first.version, Form("delta", first.base))
        self.store.begin_encoded(item, expected_bytes=0)
        encoded, work = self.store.encoded_versions[item], []
        with stages.stage("worker: verify chunks"):
            for segment in segments:
                table = encoded.verify(
                    segment.frame, public_key=self._public_key, run_id=RUN, max_bytes=1 << 40
                )
                self.store.add_segment(encoded, table, segment.frame)
                for start in range(0, len(segment.payload), table.chunk_bytes):
                    data, index = (
                        segment.payload[start : start + table.chunk_bytes],
                        encoded.num_held,
                    )
                    write = self.store.version_store.write
                    fault = WriteChunk(item, encoded, index, "learner", data, write).run()
                    require(not fault, fault)
                    encoded.mark(index)
                    work += self.store.decodable(encoded, index)
        with stages.stage("worker: open blocks" if encoded.patch else "worker: decode blocks"):
            faults = list(self._pool.map(lambda each: each.run(), work))
        require(not any(faults), "; ".join(faults))
        for each in work:
            encoded.decoded(each)
        if encoded.patch is None:
            self.store.end_decoding(encoded)
            return self._install_whole(self.store.images[encoded.version], stages)
        return self._install_patch(encoded, stages)

    def _install_whole(self, image: Transfer, stages: Stages) -> Transfer:
        with stages.stage("worker: hash at install"):
            require(
                hash_image(image.storage, image.manifest.chunk_bytes) == image.manifest.image_hash,
                "hash",
            )
        with stages.stage("worker: copy into the engine"):
            given = tensors_from_image(
                image.manifest.tensors, memoryview(image.storage).toreadonly()
            )
            for name, tensor in self.own.items():
                tensor.copy_(given[name])
        return image

    def _install_patch(self, encoded: Any, stages: Stages) -> Transfer:
        apply = self.store.in_place.begin(encoded)
        with stages.stage("worker: write (the pause)"):
            require(not apply.run(), "the patch")
        self.store.end_patch(encoded)
        image = self.store.images[encoded.version]
        stages.rows["worker: write (the pause)"]["words"] = apply.patch.num_words
        if self.own:
            with stages.stage("worker: scatter into the engine"), torch.no_grad():
                scatter(apply.patch, apply.image, image.manifest.tensors, self.own)
            stages.rows["worker: scatter into the engine"]["words"] = apply.patch.num_words
        return image

    def audit(self, image: Transfer, publication: Publication, stages: Stages) -> None:
        """Take the seal of a version, look at all of it, and drop what is old."""
        if image.signed is None:
            assert publication.signed is not None
            version = publication.manifest.version
            fault = self.store.seal(version, publication.signed, publication.manifest)
            require(not fault, fault)
            with stages.stage("worker: audit"):
                require(not AuditChunks(image, 0, image.num_chunks).run(), "audit")
        for item in eviction.expendable(self.store, ()):
            self.store.drop(item)

    def check(self, image: Transfer) -> None:
        """Compare the engine's weights with the image."""
        given = tensors_from_image(image.manifest.tensors, memoryview(image.storage).toreadonly())
        for name, tensor in self.own.items():
            require(torch.equal(tensor, given[name].to(tensor)), name)


def require(is_so: bool, what: str) -> None:
    if not is_so:
        raise SystemExit(f"update/stages.py: wrong: {what}")


def update(step: int, kind: str, learner: Learner, worker: Worker, stages: Stages) -> int:
    """Make one update; return its payload in bytes."""
    with stages.stage("learner: round into an image"):
        publication = learner.make(step)
    if kind == "whole":
        with stages.stage("learner: manifest"):
            publication = learner.coder.seal(publication)
    with stages.stage("learner: find, pack, sign"):
        segments = list(learner.coder.segments(publication, learner.held))
    image = worker.take(segments, stages)
    with stages.stage("learner: seal"):
        publication = learner.coder.seal(publication)
    worker.audit(image, publication, stages)
    require(np.array_equal(np.asarray(image.storage), np.asarray(publication.image)), "image")
    worker.check(image)
    learner.keep(publication)
    return sum(len(segment.payload) + len(segment.frame) for segment in segments)


def make_images(weights: Weights, count: int) -> None:
    """Make images in memory that is new for each, as versions were made before it was kept."""
    for number in range(1, count + 1):
        weights.step()
        stages = Stages("cpu")
        with stages.stage("learner: round into new memory"):
            _, image = publish_image(weights.state, "bfloat16")
        row = {"update": number, "image_bytes": len(image), "wire_bytes": len(image)}
        del image
        print(json.dumps({**row, "stages": stages.rows}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["changes", "whole", "image"])
    parser.add_argument("--shape", choices=SHAPES, default="Qwen3-0.6B")
    parser.add_argument("--share", type=float, choices=SCALES, default=0.014)
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--engine", choices=["views", "float32", "bfloat16"], default="views")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments = parser.parse_args()
    allocator.tune(os.environ)
    torch.set_num_threads(1)
    weights = Weights(arguments.shape, arguments.share, arguments.device)
    if arguments.kind == "image":
        make_images(weights, arguments.updates)
        return
    is_whole = arguments.kind == "whole"
    learner = Learner(weights, is_on_device=False if is_whole else None)
    first = learner.coder.seal(learner.make(0))
    learner.keep(first)
    public_key = learner.key.public_key().public_bytes_raw()
    worker = Worker(first, public_key, arguments.engine, arguments.device)
    del first
    for step in range(1, arguments.updates + 1):
        weights.step()
        stages = Stages(arguments.device)
        payload_bytes = update(step, arguments.kind, learner, worker, stages)
        assert learner.held is not None
        row = {"update": step, "image_bytes": learner.held.num_bytes, "wire_bytes": payload_bytes}
        print(json.dumps({**row, "stages": stages.rows}), flush=True)


if __name__ == "__main__":
    main()
