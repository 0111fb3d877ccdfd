from __future__ import annotations

import asyncio
import functools
import random
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any, cast
from unittest import mock

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import Tensor

from echo.config.load import parse_config
from echo.core.rollout import PolicyVersion
from echo.engine import weights as engine_weights
from echo.engine.weights import (
    CodedDelta,
    DeviceDelta,
    VersionImages,
    Weights,
    host_bytes,
)
from echo.records.ledger import LedgerQueue
from echo.runtime.learner.versions import publish as encoded_versions
from echo.runtime.learner.versions.publish import (
    CodedSegment,
    Coder,
    Publication,
    VersionEncoder,
    make_images,
    make_publication,
)
from echo.runtime.threads import ThreadPools
from echo.weights.broadcast import Broadcast
from echo.weights.manifest import (
    SignedManifest,
    TensorSpec,
    build_manifest,
    encode_signed,
    provisional,
    sign,
)
from echo.weights.receiver import VersionArrived
from echo.weights.schedule import MAX_PENDING, PublishPace
from echo.weights.store.encoded import DecodeBlock, EncodedVersion, OpenBlock
from echo.weights.store.in_place import ApplyPatch
from echo.weights.store.items import Transfer
from echo.weights.store.patches import PatchMode
from echo.wire.actions import Send
from echo.wire.messages import Announce, Segment
from tests.roles.harness import message_of

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
CODER = Coder(KEY, encrypts=False, num_threads=1)
NUM_BYTES = 9 << 20
"""Two whole blocks and a part of one."""
CHUNK_BYTES = 1 << 20


@functools.cache
def image_at(step: int, share: float) -> bytes:
    """Return an image of bf16 weights, with a share of the weights of the one before moved."""
    chance = np.random.default_rng(step)
    if step == 0:
        weights = (chance.standard_normal(NUM_BYTES // 2) * 100).astype(np.float16)
        return weights.tobytes()
    words = np.frombuffer(image_at(step - 1, share), np.uint16).copy()
    where = chance.random(len(words)) < share
    words[where] += chance.integers(1, 3, size=int(where.sum()), dtype=np.uint16)
    return words.tobytes()


def moving_images(count: int, *, share: float) -> list[bytearray]:
    return [bytearray(image_at(step, share)) for step in range(count)]


def publication_of(step: int, image: bytearray) -> Publication:
    spec = TensorSpec("w", "bfloat16", (NUM_BYTES // 2,), 0, NUM_BYTES)
    manifest = build_manifest(
        run_id="run",
        version=PolicyVersion(1, step),
        tensors=[spec],
        image=image,
        chunk_bytes=CHUNK_BYTES,
    )
    return Publication(sign(manifest, KEY), manifest, image)


class Noted:
    """A ledger that keeps its records in a list."""

    def __init__(self) -> None:
        self.records: list[Any] = []

    def append(self, record: Any) -> None:
        self.records.append(record)


class Pair:
    """A learner's broadcast and one child, joined directly."""

    def __init__(self, codec: str) -> None:
        self.learner = Broadcast(node_id="learner", window_bytes=8 << 20, stall_s=5.0)
        self.child = Broadcast(node_id="child", window_bytes=8 << 20, stall_s=5.0)
        self.child.trust.set(
            public_key=KEY.public_key().public_bytes_raw(), run_id="run", max_image_bytes=1 << 30
        )
        self.arrived: list[PolicyVersion] = []
        self.heard: list[Announce | Segment] = []
        self.ledger = Noted()
        self.coder = Coder(KEY, encrypts=True, num_threads=2)
        self.encoded_versions = VersionEncoder(
            self.learner,
            self.coder,
            codec=codec,
            pool=ThreadPools().pool("coder"),
            perform=lambda actions: self.perform("learner", actions),
            spawn=asyncio.create_task,
            clock=lambda: 0.0,
            ledger=cast("LedgerQueue", self.ledger),
        )

    def perform(self, name: str, actions: Any) -> None:
        for action in actions:
            match action:
                case Send():
                    other = self.child if name == "learner" else self.learner
                    target = "child" if name == "learner" else "learner"
                    message, payload = message_of(action.frames), list(action.frames[1:])
                    if isinstance(message, Announce | Segment):
                        self.heard.append(message)
                    self.perform(target, other.receive(name, message, payload, now=0.0))
                case DecodeBlock() | OpenBlock() | ApplyPatch():
                    self.perform(name, self.child.worked(action, action.run(), now=0.0))
                case VersionArrived():
                    self.arrived.append(action.version)

    def join(self) -> None:
        self.perform("child", self.child.set_parent("learner", now=0.0))

    async def publish(self, *publications: Publication) -> None:
        for publication in publications:
            coding = await self.encoded_versions.publish(publication)
            await self.encoded_versions.wait()
            if coding is not None:
                coding.result()


def play(
    codec: str,
    *publications: Publication,
    before: Sequence[Publication] = (),
    mode: PatchMode = "copy",
) -> Pair:
    """Publish to a child what it sees, and before that what came too early for it."""

    async def main() -> Pair:
        pair = Pair(codec)
        pair.child.patch_mode = mode
        await pair.publish(*before)
        pair.join()
        await pair.publish(*publications)
        pair.coder.close()
        return pair

    return asyncio.run(main())


def publications_of(images: Iterable[bytearray]) -> list[Publication]:
    return [publication_of(step, image) for step, image in enumerate(images)]


@pytest.mark.parametrize("codec", [pytest.param("auto", marks=pytest.mark.matrix), "delta", "full"])
@pytest.mark.slow
def test_versions_arrive_bit_for_bit_in_whatever_form(codec: str) -> None:
    images = moving_images(3, share=0.01)
    pair = play(codec, *publications_of(images))
    assert pair.arrived == [PolicyVersion(1, step) for step in range(3)]
    for step in (1, 2):
        assert pair.child.store[PolicyVersion(1, step)].storage == images[step]
    if codec == "full":
        assert not pair.learner.encoded_versions
        assert pair.child.bytes_received == 3 * NUM_BYTES
    else:
        # The first in full or as a keyframe, the others as deltas.
        assert pair.child.bytes_received < 1.2 * NUM_BYTES
        assert set(pair.encoded_versions.coded_bytes) == {PolicyVersion(1, 1), PolicyVersion(1, 2)}


def unsealed_of(step: int, image: bytearray) -> Publication:
    """Return a version as it comes from the trainer: nobody has hashed it yet."""
    made = publication_of(step, image)
    manifest = provisional(made.manifest, made.manifest.version)
    return Publication(None, manifest, image)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["copy", "now"])
def test_a_version_that_changed_little_leaves_before_its_image_is_hashed(mode: PatchMode) -> None:
    images = moving_images(3, share=0.01)
    pair = play("delta", *map(unsealed_of, range(3), images), mode=mode)
    newest = PolicyVersion(1, 2)
    assert pair.arrived == [PolicyVersion(1, step) for step in range(3)]
    image = pair.child.store[newest]
    assert bytes(image.read(0, NUM_BYTES)) == images[2]
    assert not image.is_hashed
    heard = [type(message) for message in pair.heard if message.version == newest]
    assert heard.index(Segment) < heard.index(Announce), "the seal follows the delta"
    assert image.signed is not None
    plain = publication_of(2, images[2]).manifest
    keyed = {"sent_hashes": image.manifest.sent_hashes, "key_hash": image.manifest.key_hash}
    assert all(keyed.values())
    assert image.manifest == msgspec.structs.replace(plain, **keyed)
    hashes = {record.version: record.image_hash for record in pair.ledger.records}
    assert hashes[newest] == image.manifest.image_hash.hex()
    assert sorted(hashes) == pair.arrived
    memories = {id(each.storage) for each in pair.child.store.values()}
    assert len(memories) == (len(pair.child.store) if mode == "copy" else 1)


@pytest.mark.slow
def test_a_version_that_changed_much_says_what_comes_out() -> None:
    """As every float32 one does: it is decoded into memory of its own, whoever takes patches."""
    images = moving_images(3, share=0.5)
    pair = play("delta", *map(unsealed_of, range(3), images), mode="now")
    assert pair.arrived == [PolicyVersion(1, step) for step in range(3)]
    for image in pair.child.store.values():
        assert image.is_hashed
        assert image.signed is not None
        assert not image.later
    deltas = [each for (_, form), each in pair.child.encoded_versions.items() if form.base]
    assert deltas
    assert not any(each.is_on_base for each in deltas)


@pytest.mark.slow
def test_a_laggard_takes_one_delta_after_the_other() -> None:
    images = moving_images(5, share=0.01)
    publications = publications_of(images)
    newest = PolicyVersion(1, 4)

    async def main() -> Pair:
        pair = Pair("delta")
        pair.join()
        await pair.publish(publications[0])
        pair.perform("child", pair.child.set_parent(None, now=0.0))
        pair.perform("learner", pair.learner.remove_child("child", now=0.0))
        await pair.publish(*publications[1:])
        pair.join()
        pair.coder.close()
        return pair

    pair = asyncio.run(main())
    assert pair.child.store[newest].storage == images[-1]
    assert len(pair.arrived) == 5


FLOATS = {"float32": 4, "float16": 2, "bfloat16": 2}
SPECIAL = {
    4: "0 80000000 7f800000 ff800000 7fc00000 7f800001 ffffffff 1 7f7fffff",
    2: "0 8000 7f80 ff80 7fc0 7f81 ffff 7c00 fc00 7c01 7e55 1",
    8: "0 1 8000000000000000 ffffffffffffffff",
}
"""Zeros of both signs, infinities, NaNs with payloads, subnormals, extremes, as bit patterns."""


def special_publications() -> list[Publication]:
    """Return two versions in which values of any kind have become values of any other kind."""
    parts: list[tuple[bytes, bytes]] = []
    tensors, offset = [], 0
    chance = np.random.default_rng(2)
    for dtype, size in (*FLOATS.items(), ("int64", 8)):
        words = [int(word, 16) for word in SPECIAL[size].split()]
        old, new = (
            np.array(side, f"<u{size}").repeat(40)
            for side in zip(*((a, b) for a in words for b in words), strict=True)
        )
        calm = chance.integers(0, 100, 20_000).astype(old.dtype)
        old, new = np.concatenate([old, calm]), np.concatenate([new, calm])
        parts.append((old.tobytes(), new.tobytes()))
        tensors.append(TensorSpec(dtype, dtype, (old.size,), offset, old.nbytes))
        offset += old.nbytes
    publications = []
    for step in (0, 1):
        image = bytearray(b"".join(part[step] for part in parts))
        manifest = build_manifest(
            run_id="run", version=PolicyVersion(1, step), tensors=tensors,
            image=image, chunk_bytes=16 << 10,
        )  # fmt: skip
        publications.append(Publication(sign(manifest, KEY), manifest, image))
    return publications


@pytest.mark.parametrize("is_late", [False, True], ids=["delta", "keyframe"])
def test_values_of_every_kind_survive_bit_for_bit(is_late: bool) -> None:
    publications = special_publications()
    pair = play("delta", before=publications[1:]) if is_late else play("delta", *publications)
    (*_, newest) = sorted(pair.child.encoded_versions)
    assert newest[1].kind == ("keyframe" if is_late else "delta"), "it came in full"
    storage = memoryview(pair.child.store[PolicyVersion(1, 1)].storage)
    for spec in publications[1].manifest.tensors:
        where = slice(spec.offset, spec.offset + spec.num_bytes)
        assert storage[where] == publications[1].image[where], spec.dtype


def test_a_hopeless_delta_is_not_sent() -> None:
    images = [bytearray(random.Random(seed).randbytes(NUM_BYTES)) for seed in range(2)]
    pair = play("auto", *publications_of(images))
    assert pair.arrived == [PolicyVersion(1, 0), PolicyVersion(1, 1)]
    assert not pair.encoded_versions.coded_bytes
    assert pair.child.bytes_received == 2 * NUM_BYTES


@pytest.mark.slow
def test_a_late_joiner_takes_the_keyframe_and_the_deltas_behind_it() -> None:
    images = moving_images(3, share=0.01)
    pair = play("auto", before=publications_of(images))
    assert any(form.kind == "keyframe" for _, form in pair.child.encoded_versions)
    assert pair.arrived[-1] == PolicyVersion(1, 2)
    assert pair.child.store[PolicyVersion(1, 2)].storage == images[2]
    assert pair.child.bytes_received < NUM_BYTES


@pytest.mark.slow
def test_no_key_encrypts_two_forms_and_no_nonce_two_texts() -> None:
    images = moving_images(3, share=0.01)

    async def main() -> list[Pair]:
        pairs = [Pair("auto"), Pair("auto")]  # of a learner, and of the same one resumed
        for pair in pairs:
            pair.join()
            await pair.publish(*(unsealed_of(i, image) for i, image in enumerate(images)))
            pair.coder.close()
        return pairs

    keys, under_keys = list[bytes](), set()
    for pair in asyncio.run(main()):
        items = [*pair.learner.encoded_versions.values(), *pair.learner.store.values()]
        for item in items:
            if isinstance(item, Transfer):
                assert item.signed is not None
                frames = [encode_signed(item.signed)]
            else:
                assert isinstance(item, EncodedVersion)
                frames = [*item.frames]
            own = {msgspec.msgpack.decode(frame, type=SignedManifest).key for frame in frames}
            assert item.is_encrypted
            assert len(own) == 1, "segments of one form count their chunks on under one key"
            keys += own
            chunks = [bytes(item.chunk(index)) for index in range(item.num_chunks)]
            under_keys |= {(*own, index, chunk) for index, chunk in enumerate(chunks)}
    assert len(keys) == len(set(keys)) >= 8
    assert len({(key, index) for key, index, _ in under_keys}) == len(under_keys)


# --- when versions are published ------------------------------------------------------------------


def version(step: int) -> PolicyVersion:
    return PolicyVersion(1, step)


def due_steps(pace: PublishPace, steps: Iterable[int]) -> list[int]:
    """Publish where it is due; return those steps."""
    due = []
    for step in steps:
        if pace.is_due(step):
            pace.published(version(step), num_bytes=1, now=float(step))
            due.append(step)
    return due


def test_a_fixed_period_stays() -> None:
    pace = PublishPace(period=2, is_auto=False, max_staleness=3)
    assert pace.metrics() == {"publish_period": 2}
    assert due_steps(pace, range(7)) == [0, 2, 4, 6]
    pace.published(version(6), num_bytes=100, now=0.0)
    assert pace.received([version(6)], now=50.0, train_s=1.0)
    measured = {"broadcast/seconds": 50.0, "broadcast/goodput": 2.0}
    assert pace.metrics() == {"publish_period": 2, **measured}


@pytest.mark.parametrize(
    ("broadcast_s", "train_s", "period"),
    [(0.5, 1.0, 1), (2.5, 1.0, 3), (100.0, 1.0, 4), (60.0, None, 2)],
    ids=["short", "long", "never above S + 1", "no step was timed yet"],
)
def test_auto_takes_the_smallest_period_that_hides_the_broadcast(
    broadcast_s: float, train_s: float | None, period: int
) -> None:
    pace = PublishPace(period=2, is_auto=True, max_staleness=3)
    pace.published(version(8), num_bytes=100, now=10.0)
    assert pace.received([version(8)], now=10.0 + broadcast_s, train_s=train_s)
    assert pace.period == period


def test_the_slowest_worker_counts_and_one_without_weights_is_waited_for() -> None:
    pace = PublishPace(period=1, is_auto=True, max_staleness=3)
    pace.published(version(1), num_bytes=1, now=1.0)
    pace.published(version(2), num_bytes=1, now=2.0)
    assert not pace.received([version(2), version(0)], now=3.0, train_s=1.0)
    assert not pace.received([version(2), None], now=3.0, train_s=1.0)
    assert not pace.received([], now=3.0, train_s=1.0)
    assert pace.received([version(2), version(1)], now=3.0, train_s=1.0)
    assert pace.broadcast_s == 2.0
    assert pace.received([version(2), version(2)], now=3.5, train_s=1.0)
    assert pace.broadcast_s == 1.5
    assert not pace.received([version(2), version(2)], now=9.0, train_s=1.0)


def test_versions_that_nobody_takes_are_forgotten() -> None:
    pace = PublishPace(period=1, is_auto=False, max_staleness=3)
    for step in range(10 * MAX_PENDING):
        pace.published(version(step), num_bytes=1, now=float(step))
    assert not pace.received([version(8 * MAX_PENDING)], now=1e6, train_s=1.0)


def test_a_lower_bound_shortens_the_period_and_a_higher_one_gives_it_back() -> None:
    pace = PublishPace(period=4, is_auto=False, max_staleness=6)
    for bound, period in ((5, 4), (2, 3), (0, 1), (6, 4)):
        pace.limit(bound)
        assert pace.period == period
    pace = PublishPace(period=4, is_auto=True, max_staleness=6)
    pace.limit(1)
    assert pace.period == 2
    pace.published(version(0), num_bytes=1, now=0.0)
    pace.received([version(0)], now=50.0, train_s=1.0)
    assert pace.period == 2  # 50 steps long, and the bound lets it be S + 1


def test_the_period_counts_from_the_last_version_whatever_its_step() -> None:
    pace = PublishPace(period=4, is_auto=False, max_staleness=6)
    pace.published(version(9), num_bytes=1, now=0.0)  # as after a resume
    assert due_steps(pace, range(10, 20)) == [13, 17]
    assert not pace.is_overdue(17 + 6), "the next step may be trained on what 17 has sampled"
    assert pace.is_overdue(17 + 7)
    pace.limit(2)
    assert due_steps(pace, range(20, 30)) == [20, 23, 26, 29]
    # A raised bound gives the period back, and the next version is not put off to a multiple of it.
    pace.limit(6)
    assert due_steps(pace, range(30, 40)) == [33, 37]
    pace = PublishPace(period=7, is_auto=True, max_staleness=6)
    pace.published(version(0), num_bytes=1, now=0.0)
    pace.limit(1)
    pace.limit(6)
    assert due_steps(pace, range(1, 9)) == [2, 4, 6, 8]  # until it is measured again


@pytest.mark.parametrize("max_staleness", [3, 6, 10])
@pytest.mark.parametrize("seed", range(5))
def test_two_versions_are_never_further_apart_than_the_bound_allows(
    max_staleness: int, seed: int
) -> None:
    pace = PublishPace(period=max(1, max_staleness - 1), is_auto=True, max_staleness=max_staleness)
    chance = random.Random(seed)
    pace.published(version(0), num_bytes=1, now=0.0)
    arrivals, now, last, gaps, periods = [(4.5, version(0))], 0.0, 0, [], set()
    for step in range(1, 301):
        train_s = max(0.1, chance.gauss(1.0, 0.2))
        now += train_s
        while arrivals and arrivals[0][0] <= now:
            at, arrived = arrivals.pop(0)
            pace.received([arrived], now=at, train_s=train_s)
            periods.add(pace.period)
        if pace.is_due(step):
            gaps.append(step - last)
            pace.published(version(step), num_bytes=1, now=now)
            arrivals.append((now + 4.5, version(step)))
            last = step
    assert len(periods) > 1 or max_staleness == 3  # the noise changes what is measured
    assert max(gaps) <= max_staleness + 1
    assert 300 - last <= max_staleness


# --- versions made on the device ------------------------------------------------------------------


DEVICE_CHUNK_BYTES = 1 << 16
BLOCK_BYTES = 4 << 20


def unsealed(images: VersionImages, weights: Weights, step: int) -> Publication:
    return make_publication(
        weights,
        PolicyVersion(1, step),
        run_id="run",
        images=images,
        chunk_bytes=DEVICE_CHUNK_BYTES,
    )


def publish(images: VersionImages, weights: Weights, step: int) -> Publication:
    return CODER.seal(unsealed(images, weights, step))


class Learner:
    """Weights that move a little with each step, by an amount that bf16 mostly rounds away."""

    def __init__(self, device: str = "cpu") -> None:
        self._generator = torch.Generator().manual_seed(0)
        self._device = device
        embedding = self._random(2500, 1000).to(device)
        self.weights: dict[str, Tensor] = {
            "embedding": embedding,
            "head": embedding,  # tied
            "norm": torch.ones(1001, device=device),
            "matrix": self._random(3000, 701).to(device).t(),
            "frequencies": torch.arange(5, device=device),
            "empty": torch.empty(0, 3, device=device),
        }

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator) * 0.02

    def step(self, share: float, scale: float) -> None:
        """Move a share of the weights, in place as an optimizer does."""
        for name in ("embedding", "matrix"):
            tensor = self.weights[name]
            change = self._random(*tensor.shape) * scale
            change *= torch.rand(tensor.shape, generator=self._generator) < share
            tensor += change.to(self._device)


def assert_same(one: Publication, other: Publication) -> None:
    assert one.signed == other.signed
    assert one.manifest == other.manifest
    assert one.image == other.image


def transfer_of(publication: Publication) -> Transfer:
    broadcast = Broadcast(node_id="x", window_bytes=8 << 20, stall_s=5.0)
    assert publication.signed is not None
    broadcast.publish(publication.signed, publication.manifest, publication.image, now=0.0)
    return broadcast.store[publication.manifest.version]


def encoded(
    coder: Coder, publication: Publication, base: Publication | None
) -> Sequence[tuple[bytes, bytes]]:
    transfer = None if base is None else transfer_of(base)
    made: list[CodedSegment] = list(coder.segments(publication, transfer))
    return [(segment.frame, bytes(segment.payload)) for segment in made]


def compare(device: str, dtype: str, share: float, scale: float) -> list[bool]:
    """Publish three versions both ways; return of which the delta was made on the device."""
    learner = Learner(device)
    here = VersionImages(dtype, block_bytes=BLOCK_BYTES, is_on_device=False)
    there = VersionImages(dtype, block_bytes=BLOCK_BYTES, is_on_device=device == "cpu" or None)
    coder = Coder(KEY, encrypts=False, num_threads=2)
    published: list[Publication] = []
    are_coded = []
    for step in range(3):
        expected, made = publish(here, learner.weights, step), publish(there, learner.weights, step)
        assert_same(made, expected)
        assert "head" not in {spec.name for spec in made.manifest.tensors}
        assert expected.coded is None
        are_coded.append(made.coded is not None)
        if published:
            encoded_versions_made = encoded(coder, made, published[-1])
            assert encoded_versions_made == encoded(coder, expected, published[-1])
            with mock.patch.object(coder, "_pool") as pool:  # nothing is coded twice
                if are_coded[-1]:
                    assert encoded(coder, made, published[-1]) == encoded_versions_made
                pool.submit.assert_not_called()
            # Against other bases it is coded as ever.
            assert encoded(coder, made, published[0]) == encoded(coder, expected, published[0])
        published.append(made)
        learner.step(share, scale)
    assert encoded(coder, published[-1], None)
    coder.close()
    return are_coded


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "share", "scale", "coded"),
    [
        ("bfloat16", 1.0, 1e-4, [False, True, True]),
        pytest.param("bfloat16", 0.0, 0.0, [False, True, True], marks=pytest.mark.matrix),
        ("float32", 0.05, 1e-2, [False, True, True]),
        # Nearly all words change: the image crosses whole.
        pytest.param("float32", 1.0, 1e-2, [False] * 3, marks=pytest.mark.matrix),
        ("bfloat16", 1.0, 1.0, [False, False, False]),
    ],
)
def test_the_device_makes_what_the_host_makes(
    dtype: str, share: float, scale: float, coded: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoded_versions, "SEGMENT_BYTES", BLOCK_BYTES)  # several segments
    assert compare("cpu", dtype, share, scale) == coded


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(
    ("dtype", "share", "scale"), [("bfloat16", 1.0, 1e-4), ("float32", 0.05, 1e-2)]
)
def test_a_gpu_makes_what_the_host_makes(dtype: str, share: float, scale: float) -> None:
    assert compare("cuda", dtype, share, scale) == [False, True, True]


@pytest.fixture
def begun() -> tuple[Learner, VersionImages]:
    """Return a learner, and images on the device that have one version of it."""
    learner = Learner()
    images = VersionImages("bfloat16", block_bytes=BLOCK_BYTES, is_on_device=True)
    publish(images, learner.weights, 0)
    return learner, images


Begun = tuple[Learner, VersionImages]


def published_whole(learner: Learner, step: int) -> Publication:
    return publish(VersionImages("bfloat16", block_bytes=1), learner.weights, step)


@pytest.mark.slow
def test_only_a_number_and_what_changed_cross(begun: Begun) -> None:
    learner, images = begun
    learner.step(1.0, 1e-4)
    crossed: list[int] = []
    bring = engine_weights.copy_to_host

    def counted(tensors: Sequence[Tensor]) -> list[npt.NDArray[Any]]:
        crossed.extend(tensor.numel() * tensor.element_size() for tensor in tensors)
        return bring(tensors)

    with mock.patch.object(engine_weights, "copy_to_host", counted):
        made = publish(images, learner.weights, 1)
    assert 0 < sum(crossed) < 0.2 * made.manifest.num_bytes


@pytest.mark.slow
def test_two_images_on_the_device_are_written_in_turns(begun: Begun) -> None:
    learner, images = begun
    with mock.patch.object(torch, "zeros", wraps=torch.zeros) as made:
        for step in range(1, 5):
            learner.step(1.0, 1e-4)
            assert_same(publish(images, learner.weights, step), published_whole(learner, step))
    on_device = [call for call in made.mock_calls if "device" in call.kwargs]
    assert len(on_device) == 1


@pytest.mark.slow
def test_an_image_is_overwritten_once_it_has_arrived_and_nothing_reads_it(begun: Begun) -> None:
    """With a slow copy and a slow reader. Until then `prepare` is False, and nothing waits."""
    (learner, images), gate = begun, threading.Event()
    bring = engine_weights.copy_to_host
    with mock.patch.object(
        engine_weights, "copy_to_host", lambda tensors: gate.wait(10) and bring(tensors)
    ):
        late = unsealed(images, learner.weights, 1)
        assert not images.prepare()
        gate.set()
        reader, expected = memoryview(late.image)[100:200], bytes(late.image)[100:200]
    del late
    addresses = {np.frombuffer(reader, np.uint8).ctypes.data - 100}
    for step in range(2, 6):
        while not images.prepare():  # a thread makes memory for a third image, once
            wait_for_thread = images._growing
            assert wait_for_thread is not None
            wait_for_thread.result()
        learner.step(1.0, 1e-4)
        made = publish(images, learner.weights, step)
        assert_same(made, published_whole(learner, step))
        addresses.add(np.frombuffer(made.image, np.uint8).ctypes.data)
        assert reader == expected
    assert len(addresses) == 3
    other = memoryview(made.image)[:1]
    publish(images, learner.weights, 6)
    assert not images.prepare(), "two images are read, and the third is the newest"
    del reader
    assert images.prepare()
    del other


@pytest.mark.slow
def test_a_changed_layout_crosses_whole(begun: Begun) -> None:
    learner, images = begun
    learner.weights["norm"] = torch.ones(7)
    made = publish(images, learner.weights, 1)
    assert made.coded is None
    assert_same(made, published_whole(learner, 1))
    learner.step(1.0, 1e-4)
    following = publish(images, learner.weights, 2)
    assert following.coded is not None
    assert following.coded.base == PolicyVersion(1, 1)


@pytest.mark.slow
def test_a_device_without_room_is_left_alone(
    begun: Begun, caplog: pytest.LogCaptureFixture
) -> None:
    learner, images = begun
    with mock.patch.object(DeviceDelta, "encode", side_effect=torch.OutOfMemoryError("full")):
        made = publish(images, learner.weights, 1)
    assert made.coded is None
    assert_same(made, published_whole(learner, 1))
    assert publish(images, learner.weights, 2).coded is None
    assert len(caplog.records) == 1


@pytest.mark.slow
def test_weights_may_change_while_a_version_on_the_device_is_looked_at(begun: Begun) -> None:
    (learner, images), gate = begun, threading.Event()
    learner.step(1.0, 1e-4)
    expected = published_whole(learner, 1)
    bring = engine_weights.copy_to_host

    def late(tensors: Sequence[Tensor]) -> list[npt.NDArray[Any]]:
        gate.wait(10)
        return bring(tensors)

    with mock.patch.object(engine_weights, "copy_to_host", late):
        made = unsealed(images, learner.weights, 1)
        learner.step(1.0, 1e-4)
        assert made.ready is not None
        assert not made.ready.done()
        gate.set()
        assert_same(CODER.seal(made), expected)
    assert made.coded is not None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("is_on_device", [None, False])
def test_a_version_comes_down_from_a_gpu_beside_the_training(is_on_device: bool | None) -> None:
    learner, stream = Learner("cuda"), torch.cuda.Stream()
    images = VersionImages(
        "bfloat16", block_bytes=BLOCK_BYTES, is_on_device=is_on_device, copy_stream=stream
    )
    here = VersionImages("bfloat16", block_bytes=BLOCK_BYTES, is_on_device=False)
    for step in range(4):
        expected = publish(here, learner.weights, step)
        made = unsealed(images, learner.weights, step)
        assert host_bytes(made.memory).is_pinned()
        torch.cuda.current_stream().wait_stream(stream)
        learner.step(1.0, 1e-4)
        assert_same(CODER.seal(made), expected)


def test_the_loop_waits_for_no_version() -> None:
    class OfThreads(Future[CodedDelta | None]):
        def result(self, timeout: float | None = None) -> CodedDelta | None:
            assert self.done() or threading.current_thread() is not threading.main_thread()
            return super().result(timeout)

    images = moving_images(2, share=0.01)
    first, second = publication_of(0, images[0]), unsealed_of(1, images[1])
    arrival = OfThreads()
    threading.Timer(0.05, arrival.set_result, [None]).start()
    late = Publication(None, second.manifest, second.memory, arrival)
    assert play("delta", first, late).arrived == [version(0), version(1)]


def test_only_cuda_is_a_device_and_only_where_deltas_are_wanted() -> None:
    fake = mock.Mock(device=torch.device("cuda", 1))
    network = parse_config({}).network
    images = make_images("bfloat16", network, fits_on_gpu=False)
    assert images.device_of({"w": fake}) is None
    for codec, device in (("auto", fake.device), ("delta", fake.device), ("full", None)):
        images = make_images("bfloat16", network.model_copy(update={"codec": codec}))
        assert images.device_of({"w": fake}) == device
        assert images.device_of({"w": torch.zeros(1)}) is None
        assert images.device_of({"w": fake, "x": torch.zeros(1)}) is None
