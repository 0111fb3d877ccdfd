"""Publish versions as images, and as deltas and keyframes encoded during training.

An image is the bytes of all weights of a version. A delta has the words of an image that differ
from an earlier version. A keyframe is a compressed image.

`VersionEncoder` encodes a version in the forms that `weights/schedule.py` selects, and passes the
forms to the broadcast:

    image --+--> delta against the previous version, if few words have changed: encoded in threads,
            |    block by block; each segment is signed and sent as soon as it is ready
            +--> seal: the whole image is hashed and signed during training
                   +--> the image in full
                   +--> a keyframe if due, or a delta if many words have changed: encoded likewise

The whole image is hashed after the delta is sent, for nodes that join later and for audits. So
nodes wait only for the delta, whose size depends on the number of changed words. A version without
a delta is sealed first. Versions are encoded one at a time, in the order of publication.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo.config.schema import NetworkSection
from echo.core.rollout import PolicyVersion
from echo.records.ledger import LedgerQueue, Published, Sealed
from echo.roles.learner import Learner
from echo.roles.plans import Publishing
from echo.runtime.identity import Identity
from echo.runtime.learner.commits import Commits
from echo.runtime.learner.report import Progress
from echo.runtime.threads import Pool
from echo.weights.broadcast import Broadcast
from echo.weights.cipher import KEY_BYTES, crypt, hash_key
from echo.weights.delta import (
    CodedBlock,
    WordBytes,
    block_bytes_of,
    code_block,
    has_changed_little,
    split_blocks,
    word_bytes_of,
)
from echo.weights.manifest import (
    HASH_BYTES,
    ChunkHashes,
    Manifest,
    SegmentTable,
    SignedManifest,
    encode_signed,
    hash_chunks,
    sign,
    with_hashes,
)
from echo.weights.offers import form_of
from echo.weights.schedule import FormSchedule, PublishPace
from echo.weights.store.items import Transfer
from echo.wire.actions import Action
from echo.wire.messages import FULL, ItemId

if TYPE_CHECKING:
    from echo.engine.weights import CodedDelta, CopyStream, VersionImage, VersionImages, Weights
    from echo.train.attribution import Attribution
    from echo.train.ranks.rank_group import AnyTrainer


# --- From the trainer's weights to a signed version that can be sent ---


@dataclass(frozen=True, slots=True)
class Publication:
    """One version of the weights: its manifest and its image."""

    signed: SignedManifest | None
    """The signed manifest; None until the version is sealed."""
    manifest: Manifest
    """The manifest, without chunk hashes until the version is sealed."""
    memory: bytearray | memoryview
    """The image, valid once `ready` is done. The image is not overwritten while something refers to
    it.
    """
    ready: Future[CodedDelta | None] | None = None
    """Future that is done when the image is complete. Its result is the delta, or None.

    `ready` is None if the image was complete from the start.
    """

    @property
    def image(self) -> bytearray | memoryview:
        """The image's bytes. Reading this blocks until the copy from the GPU is complete."""
        _ = self.coded
        return self.memory

    @property
    def coded(self) -> CodedDelta | None:
        """The delta that was encoded with the image, or None. Reading this blocks."""
        return None if self.ready is None else self.ready.result()

    def sealed(
        self, hashes: Sequence[ChunkHashes], key: Ed25519PrivateKey, chunk_key: bytes = b""
    ) -> Publication:
        """Return the publication with a signed manifest that has all chunk hashes.

        `chunk_key` decrypts the chunks. It is b"" if the chunks are not encrypted.
        """
        manifest = with_hashes(self.manifest, hashes, chunk_key)
        return replace(self, signed=sign(manifest, key, chunk_key), manifest=manifest)

    def tensors(self) -> Weights:
        """Return the weights as views of the image. Like `image`, this call blocks."""
        from echo.engine.weights import tensors_from_image

        return tensors_from_image(self.manifest.tensors, memoryview(self.image).toreadonly())


def make_images(
    dtype: str,
    network: NetworkSection,
    unrounded: Set[str] = frozenset(),
    *,
    fits_on_gpu: bool = True,
    copy_stream: CopyStream | None = None,
) -> VersionImages:
    """Return the object that makes a run's images (the maker).

    If the GPU has space (`fits_on_gpu`) and the run uses deltas, the maker keeps the last image on
    the GPU and finds the changed words there. Tensors are published in `dtype`. Tensors named in
    `unrounded` keep their own dtype.
    """
    # Imported here, and in other functions below, because a simulated learner has no torch.
    from echo.engine.weights import VersionImages

    return VersionImages(
        dtype,
        block_bytes=block_bytes_of(network.chunk_bytes),
        is_on_device=None if fits_on_gpu and network.codec != "full" else False,
        unrounded=unrounded,
        copy_stream=copy_stream,
    )


def make_publication(
    tensors: Weights,
    version: PolicyVersion,
    *,
    run_id: str,
    images: Images,
    chunk_bytes: int,
) -> Publication:
    """Return an unhashed publication of these weights, in the published dtype."""
    made = images.make(tensors, version)
    manifest = Manifest(
        run_id=run_id,
        version=version,
        tensors=made.specs,
        num_bytes=len(made.memory),
        chunk_bytes=chunk_bytes,
        chunk_hashes=b"",
    )
    return Publication(None, manifest, made.memory, made.ready)


class ImageHelper(Protocol):
    """A process that maps the same images as this process. Its methods block."""

    def code(
        self,
        image: memoryview,
        base: memoryview | None,
        blocks: Sequence[tuple[int, int, WordBytes]],
        /,
    ) -> list[CodedBlock]:
        """Encode blocks of an image against `base`, as `code_block` does."""

    def hash(
        self, image: memoryview, chunk_bytes: int, chunks: range, key: bytes, /
    ) -> ChunkHashes:
        """Return the hashes of chunks of an image, as `hash_chunks` does."""


class Images(Protocol):
    """Makes images of versions, one at a time, in one process or several."""

    @property
    def helpers(self) -> Sequence[ImageHelper]:
        """The helper processes, which encode and hash parts of the images."""

    def prepare(self) -> bool:
        """Return whether `make` would start at once. If memory is missing, begin to allocate it."""

    def make(self, weights: Weights, version: PolicyVersion) -> VersionImage:
        """Return the image of a version with these weights."""


class Publisher:
    """Makes publications from the trainer's weights. `coder` signs the publications."""

    def __init__(
        self,
        identity: Identity,
        *,
        encrypts: bool,
        chunk_bytes: int,
        images: Images,
        attribution: Attribution | None = None,
    ) -> None:
        """Make versions of the run that `identity` identifies. `images` makes their images.

        `attribution` measures causes of the sampler-learner mismatch. If it is given, it gets each
        image, and writes the image to disk for later measurements.
        """
        self.coder = Coder(identity.key, encrypts=encrypts, helpers=images.helpers)
        self._identity = identity
        self._images = images
        self._chunk_bytes = chunk_bytes
        self._attribution = attribution

    def prepare(self) -> bool:
        """Return whether `make` would start at once. If memory is missing, begin to allocate it."""
        return self._images.prepare()

    def make(self, weights: Weights, version: PolicyVersion) -> Publication:
        """Return an unhashed publication of these weights. Called in the trainer's thread."""
        publication = make_publication(
            weights,
            version,
            run_id=self._identity.run_id,
            images=self._images,
            chunk_bytes=self._chunk_bytes,
        )
        if self._attribution is not None:
            self._attribution.keep(publication.manifest, publication.image)
        return publication


_log = logging.getLogger(__name__)

SEGMENT_BYTES = 64 << 20
"""Image bytes of one segment. One core encodes a segment in about twenty milliseconds."""
DELTA_CHUNK_BYTES = 256 << 10
"""Bytes of a chunk of a delta. Small chunks pass through a chain of nodes faster than large chunks.
"""


@dataclass(frozen=True, slots=True)
class CodedSegment:
    """One segment of an encoded version, ready for the broadcast."""

    table: SegmentTable
    frame: bytes
    payload: memoryview


_UnderWay: TypeAlias = tuple[list[Future[CodedBlock]], list[Future[list[CodedBlock]]]]


def _gathered(under_way: _UnderWay) -> tuple[CodedBlock, ...]:
    own, others = under_way
    hands = [[future.result() for future in own], *(future.result() for future in others)]
    return tuple(block for blocks in zip_longest(*hands) for block in blocks if block is not None)


class Coder:
    """Encodes images as deltas and keyframes, and seals versions, in a pool of threads."""

    def __init__(
        self,
        key: Ed25519PrivateKey,
        *,
        encrypts: bool,
        helpers: Sequence[ImageHelper] = (),
        num_threads: int | None = None,
    ) -> None:
        """Sign with the learner's key.

        If `encrypts` is true, each form of a version has its own key. All helpers and this process
        encode and hash equal shares. This process uses `num_threads` threads, by default one per
        core and at most 16.
        """
        self._key = key
        self._encrypts = encrypts
        threads = num_threads or min(16, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="coder")
        self._helpers = [(ThreadPoolExecutor(1, "helper"), helper) for helper in helpers]

    def close(self) -> None:
        """End the threads."""
        for pool in (self._pool, *(pool for pool, _ in self._helpers)):
            pool.shutdown(wait=False, cancel_futures=True)

    def seal(self, publication: Publication) -> Publication:
        """Hash a version's image, and return the signed version. The call blocks."""
        if publication.signed is not None:
            return publication
        key, made, image = self._draw_key(), publication.manifest, memoryview(publication.image)
        every = 1 + len(self._helpers)
        ends = [len(made.chunks) * number // every for number in range(every + 1)]
        own, *others = (made.chunks[start:stop] for start, stop in pairwise(ends))
        under_way = [
            pool.submit(helper.hash, image, made.chunk_bytes, chunks, key)
            for (pool, helper), chunks in zip(self._helpers, others, strict=True)
        ]
        hashes = [hash_chunks(image, made.chunk_bytes, own, key)]
        hashes += [future.result() for future in under_way]
        return publication.sealed(hashes, self._key, key)

    def _draw_key(self) -> bytes:
        return secrets.token_bytes(KEY_BYTES) if self._encrypts else b""

    def segments(self, publication: Publication, base: Transfer | None) -> Iterator[CodedSegment]:
        """Yield the encoded segments of a delta, or of a keyframe if `base` is None.

        While the caller handles a segment, the next segment is encoded. If the version is sealed, a
        segment has the hashes of the resulting image chunks. Otherwise the segment has hashes of
        the words of `base` that the segment replaces.
        """
        block_bytes = block_bytes_of(publication.manifest.chunk_bytes)
        per_segment = max(1, SEGMENT_BYTES // block_bytes)
        made = publication.coded
        version = None if base is None else base.manifest.version
        batches: Iterator[tuple[CodedBlock, ...]]
        if made is not None and (made.base, made.block_bytes) == (version, block_bytes):
            # Making the image has coded this delta already.
            starts = range(0, len(made.blocks), per_segment)
            batches = (made.blocks[start : start + per_segment] for start in starts)
        else:
            batches = self._code(publication, base, block_bytes, per_segment)
        first = first_chunk = 0
        chunk_key = self._draw_key()
        for index, coded in enumerate(batches):
            segment = self._segment(
                publication, base, index, first, block_bytes, coded,
                chunk_key=chunk_key, first_chunk=first_chunk,
            )  # fmt: skip
            yield segment
            first += len(coded)
            first_chunk += segment.table.num_chunks

    def _code(
        self, publication: Publication, base: Transfer | None, block_bytes: int, per_segment: int
    ) -> Iterator[tuple[CodedBlock, ...]]:
        manifest, image = publication.manifest, memoryview(publication.image)
        old = None if base is None else memoryview(base.storage)
        blocks = [
            (start, stop, word_bytes_of(manifest.tensors, start, stop))
            for start, stop in split_blocks(manifest.num_bytes, block_bytes)
        ]

        def submit(first: int) -> _UnderWay:
            """Start to encode the segment from block `first` on, here and in the helpers."""
            segment, every = blocks[first : first + per_segment], 1 + len(self._helpers)
            own = [self._pool.submit(code_block, old, image, block) for block in segment[::every]]
            return own, [
                pool.submit(helper.code, image, old, segment[number::every])
                for number, (pool, helper) in enumerate(self._helpers, 1)
            ]

        under_way = submit(0)
        for first in range(0, len(blocks), per_segment):
            ahead = submit(first + per_segment)
            yield _gathered(under_way)
            under_way = ahead

    def _segment(
        self,
        publication: Publication,
        base: Transfer | None,
        index: int,
        first_block: int,
        block_bytes: int,
        coded: Sequence[CodedBlock],
        *,
        chunk_key: bytes,
        first_chunk: int,
    ) -> CodedSegment:
        manifest, signed = publication.manifest, publication.signed
        chunk_bytes = manifest.chunk_bytes
        if base is not None:
            chunk_bytes = min(chunk_bytes, DELTA_CHUNK_BYTES)
        payload = memoryview(bytearray().join(block.coded for block in coded))
        hashes = []
        for number, start in enumerate(range(0, len(payload), chunk_bytes), first_chunk):
            chunk = payload[start : start + chunk_bytes]
            if chunk_key:
                crypt(chunk_key, number, chunk, chunk)
            hashes.append(blake3(chunk).digest())
        stop = min((first_block + len(coded)) * block_bytes, manifest.num_bytes)
        first_result = first_block * block_bytes // manifest.chunk_bytes
        last_result = -(-stop // manifest.chunk_bytes)
        table = SegmentTable(
            run_id=manifest.run_id,
            version=manifest.version,
            base=None if base is None else base.manifest.version,
            index=index,
            image_bytes=manifest.num_bytes,
            image_chunk_bytes=manifest.chunk_bytes,
            block_bytes=block_bytes,
            chunk_bytes=chunk_bytes,
            first_block=first_block,
            block_sizes=tuple(len(block.coded) for block in coded),
            chunk_hashes=b"".join(hashes),
            result_hashes=manifest.chunk_hashes[
                first_result * HASH_BYTES : last_result * HASH_BYTES
            ],
            manifest=encode_signed(signed) if signed and stop == manifest.num_bytes else None,
            old_hashes=b"" if signed else b"".join(block.old_hash for block in coded),
            key_hash=hash_key(chunk_key),
        )
        frame = encode_signed(sign(table, self._key, chunk_key))
        return CodedSegment(table, frame, payload.toreadonly())


def _has_changed_little(base: Transfer, publication: Publication) -> bool:
    return has_changed_little(memoryview(base.storage), memoryview(publication.image))


class VersionEncoder:
    """Encodes and publishes versions in the forms that the schedule selects.

    A form is the full image, a keyframe or a delta.
    """

    def __init__(
        self,
        broadcast: Broadcast,
        coder: Coder,
        *,
        codec: str,
        pool: Pool,
        perform: Callable[[Iterable[Action]], None],
        spawn: Callable[..., asyncio.Task[None]],
        clock: Callable[[], float],
        ledger: LedgerQueue | None = None,
    ) -> None:
        """Connect the parts that encode and send versions.

        Args:
            broadcast: sends versions to the nodes.
            coder: encodes deltas and keyframes, and seals versions.
            codec: the value of network.codec.
            pool: the thread that calls the coder.
            perform: carries out actions.
            spawn: starts a coroutine as a task of the node.
            clock: returns the loop's time, seconds.
            ledger: records sealed versions; None for no record.
        """
        self._broadcast = broadcast
        self._coder = coder
        self._perform, self._spawn, self._clock = perform, spawn, clock
        self._ledger = ledger
        self._pool = pool
        self._schedule = FormSchedule(codec)
        self._last: asyncio.Task[None] | None = None
        self.coded_bytes: dict[PolicyVersion, int] = {}
        """Bytes of each delta by version, for the last 16 versions that were sent as a delta."""

    @property
    def is_idle(self) -> bool:
        """Whether no version is being encoded."""
        return self._last is None or self._last.done()

    async def wait(self) -> None:
        """If a version is being encoded, wait until it is sealed."""
        if self._last is not None:
            await asyncio.wait([self._last])

    async def publish(self, publication: Publication) -> asyncio.Task[None]:
        """Begin to publish a version. Return the task that encodes and seals the version.

        The call first waits until the previous version is encoded. So the learner is never more
        than one version ahead of its coder.
        """
        await self.wait()
        self._last = self._spawn(self._make_forms(publication), name="encoded_versions")
        return self._last

    def _base(self, manifest: Manifest) -> Transfer | None:
        """Return the version against which a delta can be encoded; None if there is none."""
        newest = self._broadcast.newest_complete
        if newest is None:
            return None
        held = self._broadcast.store[newest]
        is_alike = held.manifest.tensors == manifest.tensors
        return held if is_alike and held.manifest.num_bytes == manifest.num_bytes else None

    async def _seal(self, publication: Publication) -> Publication:
        """Seal a version, record the seal, and offer the whole image to nodes.

        Sealing hashes the image and signs the hashes. Return the sealed publication.
        """
        publication = await self._pool.run(self._coder.seal, publication)
        manifest, signed = publication.manifest, publication.signed
        if manifest.version in self._broadcast.store:
            return publication
        assert signed is not None
        if self._ledger is not None:
            seal = Sealed(
                version=manifest.version,
                root=signed.root.hex(),
                image_hash=manifest.image_hash.hex(),
            )
            self._ledger.append(seal)
        self._perform(
            self._broadcast.publish(signed, manifest, publication.image, now=self._clock())
        )
        self._schedule.made((manifest.version, FULL), manifest.num_bytes)
        return publication

    async def _make_forms(self, publication: Publication) -> None:
        manifest = publication.manifest
        version, base = manifest.version, self._base(manifest)
        form = self._schedule.begin(manifest.num_bytes, has_base=base is not None)
        if form == "delta" and base is not None:
            if not await self._pool.run(_has_changed_little, base, publication):
                publication = await self._pool.run(self._coder.seal, publication)
            num_bytes = await self._send(publication, base)
            publication = await self._seal(publication)
            if num_bytes:
                self.coded_bytes[version] = num_bytes
                while len(self.coded_bytes) > 16:
                    del self.coded_bytes[min(self.coded_bytes)]
        else:
            publication = await self._seal(publication)
        if form != "full" and self._schedule.is_keyframe_due(self._offers(), version):
            await self._send(publication, None)

    def _offers(self) -> dict[ItemId, int]:
        images, encoded = self._broadcast.store.items(), self._broadcast.encoded_versions.items()
        offers = {(version, FULL): image.num_bytes for version, image in images}
        return offers | {item_id: item.num_bytes for item_id, item in encoded}

    async def _send(self, publication: Publication, base: Transfer | None) -> int:
        """Encode a version in one form, and publish its segments. Return the number of bytes.

        The form is a delta against `base`, or a keyframe if `base` is None. If the first segment is
        hardly smaller than its part of the image, the form is abandoned and the result is 0.
        """
        manifest = publication.manifest
        item = (manifest.version, form_of(None if base is None else base.manifest.version))
        segments = self._coder.segments(publication, base)
        total = image_bytes = 0
        while (segment := await self._pool.run(next, segments, None)) is not None:
            table = segment.table
            total += table.num_bytes
            image_bytes += len(table.block_sizes) * table.block_bytes
            image_bytes = min(image_bytes, manifest.num_bytes)
            if table.index == 0 and self._schedule.is_hopeless(total, image_bytes):
                self._schedule.made(item, total * manifest.num_bytes // image_bytes)
                return 0
            expected_bytes = total * manifest.num_bytes // image_bytes
            self._perform(
                self._broadcast.publish_segment(
                    table,
                    segment.frame,
                    segment.payload,
                    expected_bytes=expected_bytes,
                    now=self._clock(),
                )
            )
        self._schedule.made(item, total)
        _log.debug("%s as %s: %d of %d bytes", *item, total, manifest.num_bytes)
        return total


# --- The published version, and the publication of the next ---


class PublishedVersions:
    """Publishes the trainer's weights, and keeps the newest published version."""

    def __init__(
        self,
        role: Learner,
        trainer: AnyTrainer,
        publisher: Publisher,
        encoder: VersionEncoder,
        commits: Commits,
        *,
        pace: PublishPace,
        ledger: LedgerQueue,
        progress: Progress,
        trainer_pool: Pool,
        report: Callable[[Any], None],
        wake: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        """Connect the parts that publish versions.

        Args:
            role: plans the broadcast, and has the current lineage and step.
            trainer: holds the weights.
            publisher: turns the weights into a publication.
            encoder: encodes and sends the version.
            commits: commits the ledger's record before the version is sent.
            pace: records when versions are published.
            ledger: records each published version.
            progress: counts the time that publishing takes.
            trainer_pool: the trainer's thread.
            report: passes an event to the role, and carries out the actions that the role returns.
            wake: called when a version is encoded and sealed, because the next version may be due.
            clock: returns the loop's time, seconds.
        """
        self.newest: Publication | None = None
        """The newest published version; None before the first publication."""
        self.has_published = asyncio.Event()
        """Event that is set when a version is published. The task that waits for the event clears
        it.
        """
        self._role, self._trainer, self._publisher = role, trainer, publisher
        self._encoder, self._commits = encoder, commits
        self._pace, self._ledger, self._progress = pace, ledger, progress
        self._pool, self._report, self._clock = trainer_pool, report, clock
        self._wake = wake

    def prepare(self) -> bool:
        """Return whether `publish` would begin at once: the encoder is idle, and memory is free."""
        return self._encoder.is_idle and self._publisher.prepare()

    @property
    def is_current(self) -> bool:
        """Whether the weights of the current step have been published."""
        newest = self.newest
        return newest is not None and newest.manifest.version.step == self._role.step

    async def publish(self) -> Publication:
        """Publish the trainer's current weights, and return the publication."""
        began_at = self._clock()
        self._progress.begin("publishing", now=began_at)
        publication = await self.make_unpublished()
        version = publication.manifest.version
        self.newest = publication
        self._ledger.append(Published(version=version))
        await self._commits.commit()
        num_bytes = publication.manifest.num_bytes
        self._pace.published(version, num_bytes=num_bytes, now=self._clock())
        self.has_published.set()
        self._report(Publishing())
        coding = await self._encoder.publish(publication)
        coding.add_done_callback(lambda _: self._wake())
        self._progress.published(self._clock() - began_at)
        return publication

    async def wait(self) -> None:
        """Wait until the newest version is sealed."""
        await self._encoder.wait()

    async def make_unpublished(self) -> Publication:
        """Return a publication of the trainer's current weights without publishing it."""
        # Wait until the previous version is coded: then only the previous version's image is in
        # memory, and the memory of older images can be reused.
        await self.wait()
        version = PolicyVersion(self._role.lineages[-1].lineage, self._role.step)
        return await self._pool.run(self.make_version, version)

    def make_version(self, version: PolicyVersion) -> Publication:
        """Return the trainer's current weights as a publication. Called in the trainer's thread."""
        return self._publisher.make(self._trainer.tensors(), version)
