"""A delta on its base, written in place: every byte as by the full path, or as it was before."""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo.core.errors import StorageError
from echo.core.rollout import PolicyVersion
from echo.weights import delta
from echo.weights.delta import (
    CHANGES,
    DIFFERENCE,
    PLANES,
    RAW,
    UNCHANGED,
    XOR,
    BlockPatch,
    CodedBlock,
    WordBytes,
    decode_block,
    encode_delta,
    has_changed_little,
    hash_old,
    open_block,
    split_blocks,
)
from echo.weights.store.patches import Patch
from tests.weights.test_delta import blocks

CODECS = [UNCHANGED, RAW, CHANGES, DIFFERENCE, XOR, PLANES]
Drawn = tuple[bytes, bytes, WordBytes]


def opened(coded: CodedBlock, base: bytes) -> BlockPatch:
    return open_block(memoryview(coded.coded), memoryview(base), coded.old_hash)


def coded_as(codec: int, base: bytes, new: bytes, word_bytes: WordBytes) -> CodedBlock:
    """Return a delta in one codec, whatever would be the shortest."""
    if codec == UNCHANGED:
        return CodedBlock(bytes([UNCHANGED]), hash_old(np.empty(0, np.uint8)))
    whole = hash_old(np.frombuffer(base, np.uint8))
    if codec == RAW:
        return CodedBlock(bytes([RAW]) + new, whole)
    old_words, old_tail = delta.split_words(memoryview(base), word_bytes)
    new_words, tail = delta.split_words(memoryview(new), word_bytes)
    parts = delta.CODERS[codec](old_words, new_words)
    old_hash = whole
    if codec == CHANGES:
        _, _, replaced = delta.find_changes(old_words, new_words)
        old_hash = hash_old(replaced, old_tail)
    return CodedBlock(b"".join([bytes([codec, word_bytes]), *parts, tail]), old_hash)


def check_patch(patch: BlockPatch, coded: CodedBlock, base: bytes, new: bytes) -> None:
    """It leads from the base to the new block and back, however often."""
    decoded = bytearray(b"\xa5" * len(new))
    decode_block(memoryview(coded.coded), memoryview(base), memoryview(decoded))
    assert decoded == new
    image = bytearray(base)
    for _ in range(2):
        patch.write(memoryview(image))
        assert image == new
    for _ in range(2):
        patch.take_back(memoryview(image))
        assert image == base


@given(blocks())
def test_written_in_place_a_delta_gives_what_it_decodes_to(drawn: Drawn) -> None:
    base, new, word_bytes = drawn
    coded = encode_delta(memoryview(base), memoryview(new), word_bytes=word_bytes)
    check_patch(opened(coded, base), coded, base, new)


@pytest.mark.parametrize("codec", CODECS)
@given(drawn=blocks())
def test_written_in_place_each_codec_gives_what_it_decodes_to(codec: int, drawn: Drawn) -> None:
    base, new, word_bytes = drawn
    new = base if codec == UNCHANGED else new
    coded = coded_as(codec, base, new, word_bytes)
    check_patch(opened(coded, base), coded, base, new)


@given(drawn=blocks(), seed=st.integers(0, 1000))
def test_whichever_words_had_been_written_taking_back_gives_the_base(
    drawn: Drawn, seed: int
) -> None:
    """As a process leaves it that is killed half way: any words are new, any bytes of them."""
    base, new, word_bytes = drawn
    patch = opened(encode_delta(memoryview(base), memoryview(new), word_bytes=word_bytes), base)
    is_written = np.random.default_rng(seed).random(len(base)) < 0.5
    half = np.where(is_written, np.frombuffer(new, np.uint8), np.frombuffer(base, np.uint8))
    patch.take_back(half.data)
    assert half.tobytes() == base


@given(drawn=blocks(), data=st.data())
def test_a_flipped_bit_of_the_base_is_found_under_a_change_and_stays_beside_one(
    drawn: Drawn, data: st.DataObject
) -> None:
    """What is found later, by the audit, is one bit and no more: a change spreads no damage."""
    base, new, word_bytes = drawn
    if not base:
        return
    coded = encode_delta(memoryview(base), memoryview(new), word_bytes=word_bytes)
    place = data.draw(st.integers(0, len(base) - 1))
    damaged = bytearray(base)
    damaged[place] ^= 1 << data.draw(st.integers(0, 7))
    num_words = len(base) // word_bytes
    word, is_tail = place // word_bytes, place >= num_words * word_bytes
    span = slice(word * word_bytes, (word + 1) * word_bytes)
    is_under = coded.coded[0] not in (UNCHANGED, CHANGES) or (
        coded.coded[0] == CHANGES and (is_tail or base[span] != new[span])
    )
    if is_under:
        with pytest.raises(StorageError, match="not those that the learner had"):
            opened(coded, bytes(damaged))
        return
    opened(coded, bytes(damaged)).write(memoryview(damaged))
    wrong = [at for at, (is_, right) in enumerate(zip(damaged, new, strict=True)) if is_ != right]
    assert wrong == [place]


# --- images ---------------------------------------------------------------------------------------

BLOCK = 1 << 10
SPECIAL = [0, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFC1, 0xFFFF, 1, 0x8001, 0x7F7F]
"""bf16: zeros of both signs, infinities, NaNs with payloads, subnormals, the largest."""


def step(image: npt.NDArray[np.uint16], share: float, seed: int) -> npt.NDArray[np.uint16]:
    """Return the next version of an image of bf16 words; some become special values."""
    chance = np.random.default_rng(seed)
    new = image.copy()
    where = np.flatnonzero(chance.random(image.size) < share)
    new[where] += chance.choice(np.array([1, 2, 0xFFFF], np.uint16), where.size)
    some = where[chance.random(where.size) < 0.2]
    new[some] = chance.choice(np.array(SPECIAL, np.uint16), some.size)
    return new


def patch_between(old: bytes, new: bytes, at: int) -> tuple[Patch, list[CodedBlock]]:
    """Return what a delta changes, through the wire's form of it."""
    patch = Patch(PolicyVersion(1, at), PolicyVersion(1, at + 1), BLOCK)
    coded = []
    for number, (start, stop) in enumerate(split_blocks(len(old), BLOCK)):
        before, after = memoryview(old)[start:stop], memoryview(new)[start:stop]
        block = encode_delta(before, after, word_bytes=2)
        patch.blocks[number] = open_block(memoryview(block.coded), before, block.old_hash)
        coded.append(block)
    return patch, coded


def test_after_fifty_updates_in_place_the_image_is_that_of_the_full_path() -> None:
    """Sparse and dense steps, special values, a tail of one byte; and all the way back."""
    chance = np.random.default_rng(7)
    words = chance.integers(0, 1 << 16, 5 * BLOCK // 2 + 100, dtype=np.uint16)
    words[: len(SPECIAL)] = SPECIAL
    images = [words.tobytes() + b"\x07"]
    in_place, full = bytearray(images[0]), images[0]
    patches = []
    for at in range(50):
        share = [0.01, 0.001, 0.5, 0.0, 0.15][at % 5]
        words = step(words, share, at)
        images.append(words.tobytes() + bytes([at]))
        patch, coded = patch_between(images[-2], images[-1], at)
        patch.write(memoryview(in_place))
        patches.append(patch)
        decoded = bytearray(len(full))
        for block, (start, stop) in zip(coded, split_blocks(len(full), BLOCK), strict=True):
            base, out = memoryview(full)[start:stop], memoryview(decoded)[start:stop]
            decode_block(memoryview(block.coded), base, out)
        full = bytes(decoded)
        assert in_place == full == images[-1]
    assert {block.where is None for patch in patches for block in patch.blocks.values()} == {
        False, True,
    }  # fmt: skip
    for patch, image in zip(reversed(patches), reversed(images[:-1]), strict=True):
        patch.take_back(memoryview(in_place))
        assert in_place == image


def test_some_blocks_of_an_image_are_taken_back_alone() -> None:
    chance = np.random.default_rng(3)
    words = chance.integers(0, 1 << 16, 3 * BLOCK + 40, dtype=np.uint16)
    old, new = words.tobytes(), step(words, 0.05, 1).tobytes()
    patch, _ = patch_between(old, new, 0)
    assert patch.num_words == sum(block.new.size for block in patch.blocks.values()) > 0
    for first, stop in ((0, 1), (2, 5), (6, 7)):
        span = slice(first * BLOCK, stop * BLOCK)
        piece = bytearray(new[span])
        patch.take_back(memoryview(piece), first)
        assert piece == old[span]


def test_a_block_of_which_nothing_is_known_stays_as_it_is() -> None:
    """A patch that is being opened has some of its blocks: those alone can be taken back."""
    chance = np.random.default_rng(3)
    words = chance.integers(0, 1 << 16, BLOCK, dtype=np.uint16)
    old, new = words.tobytes(), step(words, 0.05, 1).tobytes()
    patch, _ = patch_between(old, new, 0)
    del patch.blocks[1]
    image = bytearray(new)
    patch.take_back(memoryview(image))
    assert image == old[:BLOCK] + new[BLOCK:]


def test_what_a_patch_needs_is_counted() -> None:
    block = BlockPatch(np.arange(3), np.zeros(3, np.uint16), np.ones(3, np.uint16), b"", b"")
    assert block.num_bytes == 3 * (8 + 2 + 2)
    whole = dataclasses.replace(block, where=None)
    assert whole.num_bytes == 3 * (2 + 2)


@pytest.mark.parametrize(
    ("share", "is_little"), [(0.0, True), (0.01, True), (0.15, True), (0.3, False), (1.0, False)]
)
@pytest.mark.parametrize("num_words", [100_000, 3_000_000])
def test_samples_tell_whether_little_has_changed(
    share: float, is_little: bool, num_words: int
) -> None:
    """Above a fifth the whole path is taken: `VersionEncoder` asks this first."""
    chance = np.random.default_rng(0)
    old = chance.integers(0, 1 << 16, num_words, dtype=np.uint16)
    new = old.copy()
    new[chance.random(num_words) < share] ^= 1
    assert has_changed_little(old.data.cast("B"), new.data.cast("B")) is is_little


def test_float32_that_changed_all_over_has_not_changed_little() -> None:
    chance = np.random.default_rng(0)
    old = chance.standard_normal(100_000, dtype=np.float32)
    new = old + np.float32(1e-3) * chance.standard_normal(100_000, dtype=np.float32)
    assert not has_changed_little(old.data.cast("B"), new.data.cast("B"))
    assert has_changed_little(memoryview(b""), memoryview(b""))
