"""A process that is killed while it writes versions in place leaves a whole one, or none.

A child, forked, turns one image on the disk into the next version again and again, as a node does
that has many deltas to take, and seals some of them. It is killed (SIGKILL) wherever it happens to
be, or kills itself at a chosen point. The next process recovers a version that has a manifest and
of which every chunk is right; or nothing, where the image was half written or had no seal yet.
"""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo.core.rollout import PolicyVersion
from echo.runtime import disk_store
from echo.runtime.disk_store import DiskStore, Saved
from echo.weights import delta
from echo.weights.delta import encode_delta, open_block, split_blocks
from echo.weights.manifest import (
    Manifest,
    TensorSpec,
    build_manifest,
    encode_signed,
    sign,
    verify,
)
from echo.weights.store.in_place import ApplyPatch
from echo.weights.store.patches import Patch

LIMIT = 64 << 20
CHUNK_BYTES = 1 << 10
BLOCK_BYTES = 4 * CHUNK_BYTES
IMAGE_BYTES = 6 * BLOCK_BYTES + 1235
KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
PUBLIC_KEY = KEY.public_key().public_bytes_raw()
RUN = "run"


def described(step: int, image: bytes) -> bytes:
    """Return the signed manifest of a version."""
    tensors = [TensorSpec("w", "uint8", (len(image),), 0, len(image))]
    manifest = build_manifest(
        run_id=RUN,
        version=PolicyVersion(1, step),
        tensors=tensors,
        image=image,
        chunk_bytes=CHUNK_BYTES,
    )
    return encode_signed(sign(manifest, KEY))


def first_image() -> bytes:
    return np.random.default_rng(0).bytes(IMAGE_BYTES)


def next_image(image: bytes, step: int) -> bytes:
    """Return the image after another step: some blocks sparse, some dense, a tail."""
    chance = np.random.default_rng(step)
    new = np.frombuffer(image, np.uint8).copy()
    words = new[: len(new) // 2 * 2].view(np.uint16)
    words[chance.random(words.size) < 0.03] += 1
    if step % 4 == 0:
        words[: BLOCK_BYTES // 2] ^= 0x5A5A
    new[-1] ^= 1
    return new.tobytes()


def patch_between(old: bytes, new: bytes, step: int) -> Patch:
    patch = Patch(PolicyVersion(1, step), PolicyVersion(1, step + 1), BLOCK_BYTES)
    for number, (start, stop) in enumerate(split_blocks(len(old), BLOCK_BYTES)):
        before, after = memoryview(old)[start:stop], memoryview(new)[start:stop]
        coded = encode_delta(before, after, word_bytes=2)
        patch.blocks[number] = open_block(memoryview(coded.coded), before, coded.old_hash)
    return patch


# --- the child ------------------------------------------------------------------------------------


def update(
    directory: Path, tell: Callable[[], object], num_versions: int, *, sealed_share: float
) -> None:
    """Recover or fetch a version, and turn it into the next version, and the next ..."""
    store = DiskStore(directory, LIMIT)
    found = store.recover(RUN)
    if found:
        [saved] = found
        storage, image, step = saved.storage, bytes(saved.storage), saved.version.step
    else:
        step, image = 0, first_image()
        storage = store.create(PolicyVersion(1, step), described(step, image), len(image))
        storage[:] = image
        store.flush()
    chance = random.Random(step)
    for _ in range(num_versions):
        new = next_image(image, step)
        tell()
        work = ApplyPatch(patch_between(image, new, step), storage, store)
        assert not work.run()
        store.advance(PolicyVersion(1, step), PolicyVersion(1, step + 1))
        image, step = new, step + 1
        tell()
        if chance.random() < sealed_share:
            store.sealed(PolicyVersion(1, step), described(step, image))
            if sealed_share == 1.0 or chance.random() < 0.5:
                store.flush()
        tell()
    store.flush()


def forked(
    directory: Path, prepare: Callable[[], None], num_versions: int, *, sealed_share: float
) -> tuple[int, int]:
    """Return (process, descriptor): it writes a byte to that before and after whatever it does."""
    reading, writing = os.pipe()
    process = os.fork()
    if process:
        os.close(writing)
        return process, reading
    code = 1
    try:
        prepare()
        tell = functools.partial(os.write, writing, b".")
        update(directory, tell, num_versions, sealed_share=sealed_share)
        code = 0
    except BaseException:  # noqa: BLE001 -- a fork never goes back into pytest
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(code)


def kill_at_a_chance_moment(directory: Path, chance: random.Random) -> None:
    process, reading = forked(directory, lambda: None, 10_000, sealed_share=0.4)
    for _ in range(chance.randrange(1, 40)):
        assert os.read(reading, 1), "the child has ended"
    os.kill(process, signal.SIGKILL)
    os.close(reading)
    _, status = os.waitpid(process, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL


def die_at(directory: Path, prepare: Callable[[], None]) -> None:
    """Let the child, which seals every version, kill itself where `prepare` has planted that."""
    process, reading = forked(directory, prepare, 200, sealed_share=1.0)
    os.close(reading)
    _, status = os.waitpid(process, 0)
    assert os.WIFSIGNALED(status), "it never came to that point"
    assert os.WTERMSIG(status) == signal.SIGKILL


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# --- the next process -----------------------------------------------------------------------------


@contextlib.contextmanager
def recovered(directory: Path) -> Iterator[tuple[Saved, Manifest, bytearray] | None]:
    """Yield what a new process finds: a version, its manifest, and which chunks are right."""
    store = DiskStore(directory, LIMIT)
    try:
        found = store.recover(RUN)
        if not found:
            yield None
            return
        [saved] = found
        _, manifest = verify(
            saved.signed_manifest, public_key=PUBLIC_KEY, run_id=RUN, max_bytes=LIMIT
        )
        assert manifest.version == saved.version
        yield saved, manifest, store.verify_held(manifest, saved.storage)
    finally:
        store.close()


def check_whole(directory: Path) -> int | None:
    """Check that a version that a new process finds is whole; return its step, None without one."""
    with recovered(directory) as found:
        kinds = sorted(path.name.rpartition(".")[2] for path in directory.iterdir())
        if found is None:
            assert kinds == ["lock"], "a half written image is removed"
            return None
        saved, manifest, has_chunk = found
        assert all(has_chunk), f"{manifest.version}: {has_chunk.count(0)} torn chunks"
        assert kinds == ["image", "lock", "manifest"], "what is of no use is removed"
        return saved.version.step


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "versions"


def kill_again_and_again(directory: Path, number: int) -> list[int | None]:
    """Return which version was found after each kill."""
    chance = random.Random(number)
    reached = []
    for _ in range(number):
        kill_at_a_chance_moment(directory, chance)
        reached.append(check_whole(directory))
    return reached


@pytest.mark.slow
def test_killed_at_any_moment_it_leaves_a_whole_version_or_none(directory: Path) -> None:
    kill_again_and_again(directory, 8)


@pytest.mark.slow
@pytest.mark.matrix
def test_killed_two_hundred_times_it_leaves_a_whole_version_or_none(directory: Path) -> None:
    reached = set(kill_again_and_again(directory, 200))
    assert None in reached
    assert len(reached) > 3


# --- chosen points --------------------------------------------------------------------------------


def at_rename(kind: str, *, is_done: bool) -> Callable[[], None]:
    """Return what makes a process die just before, or behind, giving the fourth file its name."""

    def plant() -> None:
        rename, seen = Path.rename, [0]

        def dying(self: Path, target: Path) -> Path:
            if Path(target).suffix == f".{kind}":
                seen[0] += 1
            is_now = seen[0] == 4 and Path(target).suffix == f".{kind}"
            if is_now and not is_done:
                die()
            renamed = rename(self, target)
            if is_now:
                die()
            return renamed

        Path.rename = dying  # type: ignore[method-assign, assignment]

    return plant


def in_a_block(number: int) -> Callable[[], None]:
    """Return what makes a process die with half of the words of a block written."""

    def plant() -> None:
        write, seen = delta._write, [0]

        def dying(block: memoryview, where: object, words: delta.Words, tail: bytes) -> None:
            seen[0] += 1
            if seen[0] < number:
                write(block, where, words, tail)  # type: ignore[arg-type]
                return
            half = words.size // 2
            if where is None:
                delta.fill(block[:half], words[:half].data)
            else:
                target, _ = delta.split_words(block, words.itemsize)
                target[where[:half]] = words[:half]  # type: ignore[index]
            die()

        delta._write = dying

    return plant


def before_the_manifest_is_removed() -> None:
    """The image has become a newer version; the manifest of the one before is still there."""
    remove = disk_store._remove

    def dying(path: Path) -> None:
        if path.name.startswith("v2-"):
            die()
        remove(path)

    disk_store._remove = dying


POINTS: dict[str, tuple[Callable[[], None], int | None]] = {
    # The images are named v0 (a new file), v1, v2, v3; so are the manifests.
    "before the image has its new name": (at_rename("image", is_done=False), 2),
    "behind the image's new name": (at_rename("image", is_done=True), None),
    "in the first block": (in_a_block(1), None),
    "in a sparse block of a later version": (in_a_block(2 * 7 + 5), None),
    "in a dense block": (in_a_block(4 * 7 + 1), None),
    "in the last block": (in_a_block(3 * 7), None),
    "before the former manifest is removed": (before_the_manifest_is_removed, None),
    "before the manifest has its name": (at_rename("manifest", is_done=False), None),
    "behind the manifest": (at_rename("manifest", is_done=True), 3),
}


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.slow
def test_killed_at_a_chosen_point_it_leaves_a_whole_version_or_none(
    directory: Path, point: str
) -> None:
    """Twice: the next process goes on with what the first kill leaves."""
    plant, step = POINTS[point]
    die_at(directory, plant)
    assert check_whole(directory) == step
    die_at(directory, plant)
    check_whole(directory)


def test_without_the_mark_each_torn_chunk_is_known_to_be_wrong(directory: Path) -> None:
    """As after a power failure, where the words are on the disk and the new name is not."""

    def plant() -> None:
        DiskStore.begin_patch = lambda self, patch: None  # type: ignore[method-assign]
        in_a_block(3)()

    die_at(directory, plant)
    with recovered(directory) as found:
        assert found is not None
        saved, manifest, has_chunk = found
        for index, is_held in enumerate(has_chunk):
            start, stop = manifest.chunk_range(index)
            assert is_held == (saved.storage[start:stop] == first_image()[start:stop])
        assert 0 < has_chunk.count(0) < len(has_chunk)


# --- in one process -------------------------------------------------------------------------------


def begun(directory: Path) -> tuple[DiskStore, memoryview]:
    """Return a store with the first version, whole."""
    store = DiskStore(directory, LIMIT)
    assert store.recover(RUN) == []
    image = first_image()
    storage = store.create(PolicyVersion(1, 0), described(0, image), len(image))
    storage[:] = image
    return store, storage


def test_a_version_that_is_written_in_place_and_not_sealed_yet_is_kept_while_it_is_in_use(
    directory: Path,
) -> None:
    """A node that is told of its run again recovers again."""
    store, storage = begun(directory)
    old, new = first_image(), next_image(first_image(), 0)
    work = ApplyPatch(patch_between(old, new, 0), storage, store)
    assert not work.run()
    store.advance(PolicyVersion(1, 0), PolicyVersion(1, 1))
    assert store.recover(RUN) == []
    assert bytes(storage) == new
    store.sealed(PolicyVersion(1, 1), described(1, new))
    store.close()
    assert check_whole(directory) == 1


def test_a_patch_that_was_taken_back_leaves_the_version_before(directory: Path) -> None:
    store, storage = begun(directory)
    patch = patch_between(first_image(), next_image(first_image(), 0), 0)
    store.begin_patch(patch)
    patch.write(storage)
    patch.take_back(storage)
    store.cancel_patch(patch)
    store.close()
    assert check_whole(directory) == 0


def test_an_image_that_cannot_be_marked_is_not_written(directory: Path) -> None:
    store, storage = begun(directory)
    store.flush()
    for path in directory.iterdir():
        path.unlink()
    work = ApplyPatch(patch_between(first_image(), next_image(first_image(), 0), 0), storage, store)
    assert work.run() == "No such file or directory"
    assert bytes(storage) == first_image()
    store.close()
