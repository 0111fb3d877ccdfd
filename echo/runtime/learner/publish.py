"""Publication of versions: images, and deltas and keyframes coded beside the training.

`VersionEncoder` makes a version in the forms that `weights/schedule.py` decides on, and hands them
to the broadcast:

    image --+--> delta against the version before, where few words have changed: coded in threads,
            |    block by block, each segment signed and sent as soon as it is ready
            +--> seal: hashed and signed as a whole, beside the training
                   +--> in full
                   +--> keyframe, where due, or delta, where much has changed: coded likewise

So what nodes wait for costs what has changed; the image is hashed for those who come later, and for
audits. A version without a delta is sealed first. One version is coded after the other, in the
order of publication.
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
from typing import TYPE_CHECKING, Protocol, TypeAlias

from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo.config.schema import NetworkSection
from echo.core.rollout import PolicyVersion
from echo.records.ledger import LedgerQueue, Published, Sealed
from echo.roles.learner import Learner
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
from echo.weights.store.artifacts import Transfer
from echo.wire.actions import Action
from echo.wire.messages import FULL, ItemId

if TYPE_CHECKING:
    from echo.engine.weights import CodedDelta, CopyStream, VersionImage, VersionImages, Weights
    from echo.train.attribution import Attribution
    from echo.train.ranks.crew import AnyTrainer


# --- From the trainer's weights to a signed version that can be sent ---


@dataclass(frozen=True, slots=True)
class Publication:
    """One version, ready for the broadcast."""

    signed: SignedManifest | None
    """None until it is sealed."""
    manifest: Manifest
    """Without any hash until then."""
    memory: bytearray | memoryview
    """Its image, once that has arrived; unchanged as long as there is a reference to it."""
    ready: Future[CodedDelta | None] | None = None
    """As in `VersionImage`."""

    @property
    def image(self) -> bytearray | memoryview:
        """Its bytes; the caller waits until they have come from a GPU."""
        _ = self.coded
        return self.memory

    @property
    def coded(self) -> CodedDelta | None:
        """Its delta against the version before, where making the image has made it too."""
        return None if self.ready is None else self.ready.result()

    def sealed(
        self, hashes: Sequence[ChunkHashes], key: Ed25519PrivateKey, chunk_key: bytes = b""
    ) -> Publication:
        """Return it signed, with the hashes of all chunks, and their key if they are encrypted."""
        manifest = with_hashes(self.manifest, hashes, chunk_key)
        return replace(self, signed=sign(manifest, key, chunk_key), manifest=manifest)

    def tensors(self) -> Weights:
        """Return the weights, as views of the image."""
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
    """Return what makes the images of a run; without deltas there is nothing to find on a GPU.

    They have one dtype; the tensors named in `unrounded` are published in their own dtype.
    """
    # Only here, as below: a simulated learner has no torch.
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
    model_digest: str,
    images: Images,
    chunk_bytes: int,
) -> Publication:
    """Round weights to the published dtype and lay them out; nothing is hashed yet."""
    made = images.make(tensors, version)
    manifest = Manifest(
        run_id=run_id,
        version=version,
        model_digest=model_digest,
        tensors=made.specs,
        num_bytes=len(made.memory),
        chunk_bytes=chunk_bytes,
        chunk_hashes=b"",
    )
    return Publication(None, manifest, made.memory, made.ready)


class ImageHelper(Protocol):
    """Another process, which sees the memory of images; what it is asked for blocks."""

    def code(
        self,
        image: memoryview,
        base: memoryview | None,
        blocks: Sequence[tuple[int, int, WordBytes]],
        /,
    ) -> list[CodedBlock]:
        """Return blocks coded, as `code_block` does."""

    def hash(
        self, image: memoryview, chunk_bytes: int, chunks: range, key: bytes, /
    ) -> ChunkHashes:
        """Return hashes of chunks, as `hash_chunks` does."""


class Images(Protocol):
    """Makes one image after the other: of one process, or of several together."""

    @property
    def helpers(self) -> Sequence[ImageHelper]:
        """Others who code and hash parts of what it makes."""

    def make(self, weights: Weights, version: PolicyVersion) -> VersionImage:
        """Return the image of a version."""


class Publisher:
    """Makes versions of the trainer's weights, signed with the run's key."""

    def __init__(
        self,
        identity: Identity,
        *,
        encrypts: bool,
        chunk_bytes: int,
        model_digest: str,
        images: Images,
        attribution: Attribution | None = None,
    ) -> None:
        """Take whose versions they are; an attribution wants to keep them."""
        self.coder = Coder(identity.key, encrypts=encrypts, helpers=images.helpers)
        self._identity = identity
        self._images = images
        self._chunk_bytes = chunk_bytes
        self._model_digest = model_digest
        self._attribution = attribution

    def make(self, weights: Weights, version: PolicyVersion) -> Publication:
        """Return the weights as a version; called in the trainer's thread."""
        publication = make_publication(
            weights,
            version,
            run_id=self._identity.run_id,
            model_digest=self._model_digest,
            images=self._images,
            chunk_bytes=self._chunk_bytes,
        )
        if self._attribution is not None:
            self._attribution.keep(publication.manifest, publication.image)
        return publication


_log = logging.getLogger(__name__)

SEGMENT_BYTES = 64 << 20
"""Image bytes of one segment: coded in some twenty milliseconds by one core."""
DELTA_CHUNK_BYTES = 256 << 10
"""Payload chunk of a delta: small ones fill a chain of nodes sooner."""


@dataclass(frozen=True, slots=True)
class CodedSegment:
    """One segment of an encoded version, ready for the broadcast."""

    table: SegmentTable
    frame: bytes
    payload: memoryview


_UnderWay: TypeAlias = tuple[list[Future[CodedBlock]], list[Future[list[CodedBlock]]]]
"""Blocks of a segment that this process codes, and those that each helper does."""


def _gathered(under_way: _UnderWay) -> tuple[CodedBlock, ...]:
    """Return the blocks in their order, as soon as all are coded."""
    own, others = under_way
    hands = [[future.result() for future in own], *(future.result() for future in others)]
    return tuple(block for blocks in zip_longest(*hands) for block in blocks if block is not None)


class Coder:
    """Codes images into encoded versions, with a pool of threads."""

    def __init__(
        self,
        key: Ed25519PrivateKey,
        *,
        encrypts: bool,
        helpers: Sequence[ImageHelper] = (),
        num_threads: int | None = None,
    ) -> None:
        """Sign with the learner's key, and encrypt each form with a key of its own if asked to.

        Each helper codes and hashes as much as this process, whose threads are as many as its
        cores, within reason, unless `num_threads` says otherwise.
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
        """Return a version with the hashes of its image, signed."""
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
        """Return a key that nothing was encrypted with."""
        return secrets.token_bytes(KEY_BYTES) if self._encrypts else b""

    def segments(self, publication: Publication, base: Transfer | None) -> Iterator[CodedSegment]:
        """Code a version against `base`, or on its own; the next segment is coded meanwhile.

        A version that is not sealed yet is coded on its base; another with the hashes of what comes
        out.
        """
        block_bytes = block_bytes_of(publication.manifest.chunk_bytes)
        per_segment = max(1, SEGMENT_BYTES // block_bytes)
        made = publication.coded
        version = None if base is None else base.manifest.version
        batches: Iterator[tuple[CodedBlock, ...]]
        if made is not None and (made.base, made.block_bytes) == (version, block_bytes):
            # It was needed for the image already.
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
        """Yield the coded blocks of one segment after the other."""
        manifest, image = publication.manifest, memoryview(publication.image)
        old = None if base is None else memoryview(base.storage)
        blocks = [
            (start, stop, word_bytes_of(manifest.tensors, start, stop))
            for start, stop in split_blocks(manifest.num_bytes, block_bytes)
        ]

        def submit(first: int) -> _UnderWay:
            """Deal the blocks of a segment among this process and its helpers."""
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
    """Publishes versions in the forms that are worth it."""

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
        """Begin without a version.

        Args:
            broadcast: sends versions out.
            coder: makes the forms.
            codec: of network.codec.
            pool: the thread that calls the coder.
            perform: carries out actions.
            spawn: runs a coroutine beside the loop.
            clock: returns the loop's time, seconds.
            ledger: where sealed versions are recorded, if anywhere.
        """
        self._broadcast = broadcast
        self._coder = coder
        self._perform, self._spawn, self._clock = perform, spawn, clock
        self._ledger = ledger
        self._pool = pool
        self._schedule = FormSchedule(codec)
        self._last: asyncio.Task[None] | None = None
        self.coded_bytes: dict[PolicyVersion, int] = {}
        """Size of the delta of each version that went out as one; the last few."""

    async def wait(self) -> None:
        """Wait for the version that is being coded."""
        if self._last is not None:
            await asyncio.wait([self._last])

    async def publish(self, publication: Publication) -> asyncio.Task[None] | None:
        """Send a version out; return the task that codes it, None if there is nothing to code.

        The version before is waited for, so the learner is never more than one version ahead of
        its coder.
        """
        await self.wait()
        manifest = publication.manifest
        base = self._base(manifest)
        form = self._schedule.begin(manifest.num_bytes, has_base=base is not None)
        if form != "delta":
            publication, base = await self._seal(publication), None
        if form == "full":
            return None
        self._last = self._spawn(self._code(publication, base), name="encoded_versions")
        return self._last

    def _base(self, manifest: Manifest) -> Transfer | None:
        """Return the version before, if a delta against it is possible."""
        newest = self._broadcast.newest_complete
        if newest is None:
            return None
        held = self._broadcast.store[newest]
        is_alike = held.manifest.tensors == manifest.tensors
        return held if is_alike and held.manifest.num_bytes == manifest.num_bytes else None

    async def _seal(self, publication: Publication) -> Publication:
        """Hash and sign a version, and offer it in full."""
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

    async def _code(self, publication: Publication, base: Transfer | None) -> None:
        version = publication.manifest.version
        if base is not None:
            if not await self._pool.run(_has_changed_little, base, publication):
                publication = await self._pool.run(self._coder.seal, publication)
            num_bytes = await self._send(publication, base)
            publication = await self._seal(publication)
            if num_bytes:
                self.coded_bytes[version] = num_bytes
                while len(self.coded_bytes) > 16:
                    del self.coded_bytes[min(self.coded_bytes)]
        if self._schedule.is_keyframe_due(self._offers(), version):
            await self._send(publication, None)

    def _offers(self) -> dict[ItemId, int]:
        images, encoded = self._broadcast.store.items(), self._broadcast.encoded_versions.items()
        offers = {(version, FULL): image.num_bytes for version, image in images}
        return offers | {item_id: item.num_bytes for item_id, item in encoded}

    async def _send(self, publication: Publication, base: Transfer | None) -> int:
        """Code one form and hand over its segments; return its bytes, 0 if it was hopeless."""
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


# --- Which version is out, and the publication of the next ---


class PublishedVersions:
    """Publishes the present weights after a step, and keeps the version that is out."""

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
        perform: Callable[[Iterable[Action]], None],
        clock: Callable[[], float],
    ) -> None:
        """Begin before the first version.

        Args:
            role: plans the broadcast, and knows lineage and step.
            trainer: has the weights.
            publisher: makes a version of them.
            encoder: sends the version out.
            commits: commit its record before that.
            pace: learns when versions go out.
            ledger: has the record.
            progress: counts the time in which nothing is trained.
            trainer_pool: the trainer's thread.
            perform: carries out actions.
            clock: returns the loop's time, seconds.
        """
        self.newest: Publication | None = None
        """The version that is out; None before the first."""
        self.has_published = asyncio.Event()
        """Set with each version; the waiting task clears it."""
        self._role, self._trainer, self._publisher = role, trainer, publisher
        self._encoder, self._commits = encoder, commits
        self._pace, self._ledger, self._progress = pace, ledger, progress
        self._pool, self._perform, self._clock = trainer_pool, perform, clock

    @property
    def is_current(self) -> bool:
        """Whether the weights of the present step are out."""
        newest = self.newest
        return newest is not None and newest.manifest.version.step == self._role.step

    async def publish(self) -> Publication:
        """Hand the present weights to the broadcast; return them as a version."""
        role, began_at = self._role, self._clock()
        self._progress.begin("publishing", now=began_at)
        publication = await self.make_unpublished()
        version = publication.manifest.version
        self.newest = publication
        self._ledger.append(Published(version=version))
        await self._commits.commit()
        num_bytes = publication.manifest.num_bytes
        self._pace.published(version, num_bytes=num_bytes, now=self._clock())
        self.has_published.set()
        self._perform(role.plans.before_publish(now=self._clock()))
        await self._encoder.publish(publication)
        self._progress.published(self._clock() - began_at)
        return publication

    async def make_unpublished(self) -> Publication:
        """Return the present weights as a version, without publishing it."""
        # Once the version before is coded, its image alone is in memory, and gives its memory back.
        await self._encoder.wait()
        version = PolicyVersion(self._role.lineages[-1].lineage, self._role.step)
        return await self._pool.run(self.make_version, version)

    def make_version(self, version: PolicyVersion) -> Publication:
        """Return the present weights as a version; called in the trainer's thread."""
        return self._publisher.make(self._trainer.tensors(), version)
