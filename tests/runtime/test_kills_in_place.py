"""A process that is killed while it writes versions in place leaves one that is whole.

A child, forked, turns one image on the disk into the next version again and again, as a node does
that has many deltas to take, and seals some of them. It is killed (SIGKILL) wherever it happens to
be, or kills itself at a chosen point. What the next process recovers has a manifest, and every
chunk of it is right.
"""

from __future__ import annotations

import contextlib
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
from echo.weights.store import ApplyPatch, Patch

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
        model_digest="model",
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


def update(directory: Path, tell: Callable[[], object], num_versions: int) -> None:
    """Recover what is there, and turn it into the next version, and the next ..."""
    store = DiskStore(directory, LIMIT)
    [saved] = store.recover(RUN)
    image, step = bytes(saved.storage), saved.version.step
    unsealed: dict[int, bytes] = {}
    chance = random.Random(step)
    for _ in range(num_versions):
        new = next_image(image, step)
        tell()
        work = ApplyPatch(patch_between(image, new, step), saved.storage, store)
        assert not work.run()
        store.advance(PolicyVersion(1, step), PolicyVersion(1, step + 1))
        image, step = new, step + 1
        unsealed[step] = described(step, image)
        tell()
        # Seals come late, of several versions, and not of all.
        if chance.random() < 0.4:
            sealed = chance.choice(list(unsealed))
            store.sealed(PolicyVersion(1, sealed), unsealed[sealed])
            unsealed = {each: frame for each, frame in unsealed.items() if each > sealed}
            if chance.random() < 0.5:
                store.flush()
        tell()
    store.flush()


def forked(directory: Path, prepare: Callable[[], None], num_versions: int) -> tuple[int, int]:
    """Return (process, descriptor): it writes a byte to that before and after whatever it does."""
    reading, writing = os.pipe()
    process = os.fork()
    if process:
        os.close(writing)
        return process, reading
    code = 1
    try:
        prepare()
        update(directory, lambda: os.write(writing, b"."), num_versions)
        code = 0
    except BaseException:  # noqa: BLE001 -- a fork never goes back into pytest
        traceback.print_exc(file=sys.__stderr__)
    finally:
        os._exit(code)


def kill_at_a_chance_moment(directory: Path, chance: random.Random) -> None:
    process, reading = forked(directory, lambda: None, 10_000)
    for _ in range(chance.randrange(1, 40)):
        assert os.read(reading, 1), "the child has ended"
    os.kill(process, signal.SIGKILL)
    os.close(reading)
    _, status = os.waitpid(process, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL


def die_at(directory: Path, prepare: Callable[[], None]) -> None:
    """Let the child kill itself where `prepare` has planted that."""
    process, reading = forked(directory, prepare, 200)
    os.close(reading)
    _, status = os.waitpid(process, 0)
    assert os.WIFSIGNALED(status), "it never came to that point"
    assert os.WTERMSIG(status) == signal.SIGKILL


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# --- the next process -----------------------------------------------------------------------------


def begin(directory: Path) -> None:
    """Leave the first version, whole."""
    store = DiskStore(directory, LIMIT)
    assert store.recover(RUN) == []
    image = first_image()
    store.create(PolicyVersion(1, 0), described(0, image), len(image))[:] = image
    store.close()


@contextlib.contextmanager
def recovered(directory: Path) -> Iterator[tuple[Saved, Manifest, bytearray]]:
    """Yield what a new process finds: the version, its manifest, and which chunks are right."""
    store = DiskStore(directory, LIMIT)
    try:
        [saved] = store.recover(RUN)
        _, manifest = verify(
            saved.signed_manifest, public_key=PUBLIC_KEY, run_id=RUN, max_bytes=LIMIT
        )
        assert manifest.version == saved.version
        yield saved, manifest, store.verify_held(manifest, saved.storage)
    finally:
        store.close()


def check_whole(directory: Path) -> int:
    """Check that what a new process finds is whole; return which version that is."""
    with recovered(directory) as (saved, manifest, has_chunk):
        assert all(has_chunk), f"{manifest.version}: {has_chunk.count(0)} torn chunks"
        names = sorted(path.name.rpartition(".")[2] for path in directory.iterdir())
        assert names == ["image", "lock", "manifest"], "what is of no use is removed"
        return saved.version.step


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    begin(tmp_path / "versions")
    return tmp_path / "versions"


def kill_again_and_again(directory: Path, number: int) -> None:
    chance = random.Random(number)
    reached = [0]
    for _ in range(number):
        kill_at_a_chance_moment(directory, chance)
        reached.append(check_whole(directory))
    assert reached == sorted(reached), "a sealed version is never lost again"
    assert reached[-1] >= number / 4


@pytest.mark.slow
def test_killed_at_any_moment_it_leaves_a_version_that_is_whole(directory: Path) -> None:
    kill_again_and_again(directory, 8)


@pytest.mark.slow
@pytest.mark.matrix
def test_killed_two_hundred_times_it_leaves_a_version_that_is_whole(directory: Path) -> None:
    kill_again_and_again(directory, 200)


# --- chosen points --------------------------------------------------------------------------------


def at_rename(kind: str, *, is_done: bool) -> Callable[[], None]:
    """Return what makes a process die just before, or behind, giving the third file its name."""

    def plant() -> None:
        rename, seen = Path.rename, [0]

        def dying(self: Path, target: Path) -> Path:
            if Path(target).suffix == f".{kind}":
                seen[0] += 1
            is_now = seen[0] == 3 and Path(target).suffix == f".{kind}"
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
                target, _ = delta._split(block, words.itemsize)
                target[where[:half]] = words[:half]  # type: ignore[index]
            die()

        delta._write = dying

    return plant


def before_undo_is_removed() -> None:
    """A manifest has been written; what it makes useless is still there."""
    remove, seen = disk_store._remove, [0]

    def dying(path: Path) -> None:
        seen[0] += path.suffix == ".undo"
        if seen[0] == 2:
            die()
        remove(path)

    disk_store._remove = dying


def before_undo_is_written() -> None:
    pack, seen = disk_store.pack_undo, [0]

    def dying(patch: Patch) -> bytes:
        seen[0] += 1
        if seen[0] == 3:
            die()
        return pack(patch)

    disk_store.pack_undo = dying


POINTS = {
    "before the undo record": before_undo_is_written,
    "before the undo record has its name": at_rename("undo", is_done=False),
    "behind the undo record": at_rename("undo", is_done=True),
    "in the first block": in_a_block(1),
    "in a sparse block of a later version": in_a_block(2 * 7 + 5),
    "in a dense block": in_a_block(4 * 7 + 1),
    "in the last block": in_a_block(3 * 7),
    "before the image has its new name": at_rename("image", is_done=False),
    "behind the image's new name": at_rename("image", is_done=True),
    "before the manifest has its name": at_rename("manifest", is_done=False),
    "behind the manifest": at_rename("manifest", is_done=True),
    "before undo records are removed": before_undo_is_removed,
}


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.slow
def test_killed_at_a_chosen_point_it_leaves_a_version_that_is_whole(
    directory: Path, point: str
) -> None:
    """Twice: what the first kill leaves is gone on with."""
    for _ in range(2):
        die_at(directory, POINTS[point])
        check_whole(directory)


@pytest.mark.slow
def test_killed_while_it_takes_back_the_next_process_does_so(directory: Path) -> None:
    """Between two blocks of the old words, and before the image has its old name again."""
    die_at(directory, in_a_block(2 * 7 + 5))
    for plant in (in_a_block(3), at_rename_back):
        process, reading = forked(directory, plant, 0)
        os.close(reading)
        _, status = os.waitpid(process, 0)
        assert os.WIFSIGNALED(status)
    check_whole(directory)


def at_rename_back() -> None:
    rename = Path.rename

    def dying(self: Path, target: Path) -> Path:
        if Path(target).suffix == ".image":
            die()
        return rename(self, target)

    Path.rename = dying  # type: ignore[method-assign, assignment]


def test_without_the_record_it_tears(directory: Path) -> None:
    """What is checked above would be found, if it were so."""

    def plant() -> None:
        DiskStore.begin_patch = lambda self, patch: None  # type: ignore[method-assign]
        in_a_block(3)()

    die_at(directory, plant)
    with recovered(directory) as (_, _, has_chunk):
        assert 0 < has_chunk.count(0) < len(has_chunk)


# --- in one process -------------------------------------------------------------------------------


def test_what_this_process_has_written_in_place_is_not_taken_back_by_itself(
    directory: Path,
) -> None:
    """A node that is told of its run again recovers again; its newest version has no seal yet."""
    store = DiskStore(directory, LIMIT)
    [saved] = store.recover(RUN)
    old, new = first_image(), next_image(first_image(), 0)
    work = ApplyPatch(patch_between(old, new, 0), saved.storage, store)
    assert not work.run()
    store.advance(PolicyVersion(1, 0), PolicyVersion(1, 1))
    assert store.recover(RUN) == []
    assert bytes(saved.storage) == new
    store.close()
    assert check_whole(directory) == 0


def test_where_the_record_is_torn_each_chunk_is_known_to_be_wrong(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As after a power failure: nothing is synced."""
    die_at(directory, in_a_block(2))
    [undo] = directory.glob("*.undo")
    undo.write_bytes(undo.read_bytes()[:-40])
    with recovered(directory) as (saved, manifest, has_chunk):
        assert "the undo record of v1 is damaged" in caplog.text
        for index, is_held in enumerate(has_chunk):
            start, stop = manifest.chunk_range(index)
            assert is_held == (saved.storage[start:stop] == first_image()[start:stop])
        assert 0 < has_chunk.count(0) <= 2 * BLOCK_BYTES // CHUNK_BYTES
