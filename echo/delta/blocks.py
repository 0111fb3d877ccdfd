"""Coded blocks: a piece of a version's image, alone or as its difference to an older version.

A block is coded on its own, so that blocks can be coded, sent and decoded in any order and by
several threads at once. Its first byte says how, the second the bytes of a word:

| codec      | holds                                                   | the shortest where       |
|------------|---------------------------------------------------------|--------------------------|
| UNCHANGED  | nothing (and no second byte)                            | nothing changed          |
| CHANGES    | indices and small integer differences (echo.delta.gaps) | up to a third changed    |
| DIFFERENCE | zig-zag differences of all words as byte planes         | nearly all did: fp32     |
| XOR        | exclusive or with the base as byte planes               | bits mean something else |
| PLANES     | the words as byte planes, no base                       | anchors, another model   |
| RAW        | the bytes (and no second byte)                          | noise                    |

A byte plane gathers one byte of every word: the exponents of floats lie close together and pack
well, mantissas do not and stay as they are. Bytes that do not fill a word follow at the end.

Everything is an integer on bit patterns, little-endian like the image, so every value comes back
bit for bit. Coding is deterministic for a given zstd: all nodes that code the same block get the
same bytes.

The encoder does not try all codecs. How many words changed is known first: up to a fifth CHANGES
is within 5 % of the shortest whatever the steps are, above that samples from all over the block
decide.

The decoder trusts nothing: every length is compared with the size of the block before memory is
taken. For honest blocks that is a few times the block, for any at most some twenty times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

import numpy as np

from echo.core.errors import LocalProtocolError, RemoteProtocolError
from echo.delta.gaps import (
    Indices,
    apply_changes,
    find_changes,
    has_more_changes,
    pack_changes,
    unzigzag,
    zigzag,
)
from echo.delta.streams import Reader, Words, fill, pack_planes

WordBytes: TypeAlias = Literal[1, 2, 4]

BLOCK_BYTES = 4 << 20
"""Image bytes per block: small enough for the caches, large enough that its headers vanish."""

UNCHANGED, RAW, CHANGES, DIFFERENCE, XOR, PLANES = range(6)

SPARSE_SHARE = 0.2
"""Changed share of the words up to which CHANGES is not compared with other codecs."""
NUM_SAMPLES = 16
SAMPLE_WORDS = 1024

_Coder: TypeAlias = Callable[[Words, Words], list[bytes]]


def block_bytes_of(chunk_bytes: int) -> int:
    """Return the image bytes per block of a version with chunks of this size: whole chunks."""
    return max(1, BLOCK_BYTES // chunk_bytes) * chunk_bytes


def encode_block(base: memoryview | None, new: memoryview, *, word_bytes: WordBytes) -> bytes:
    """Return the coded form of a block.

    Args:
        base: the same block of the version that the receiver holds; None codes it alone.
        new: the block, of any length.
        word_bytes: size of the floats that it holds, 1 if of other or unknown things.

    Raises:
        LocalProtocolError: if base and block differ in length.
    """
    words, tail = _split(new, word_bytes)
    if base is None:
        return _no_longer(_assembled(PLANES, pack_planes(words), word_bytes, tail), new)
    if len(base) != len(new):
        raise LocalProtocolError(f"a base of {len(base)} bytes for a block of {len(new)}")
    old, old_tail = _split(base, word_bytes)
    if not has_more_changes(old, words, most_sparse(words.size)):
        where, difference = find_changes(old, words)
        if not where.size and old_tail == tail:
            return bytes([UNCHANGED])
        if where.size <= most_sparse(words.size):
            return _no_longer(encode_changes(where, difference, tail), new)
    codec = _shortest(old, words)
    return _no_longer(_assembled(codec, _CODERS[codec](old, words), word_bytes, tail), new)


def most_sparse(num_words: int) -> int:
    """Return how many words of a block may have changed for it to count as sparse."""
    return int(SPARSE_SHARE * num_words)


def encode_changes(where: Indices, difference: Words, tail: memoryview | bytes = b"") -> bytes:
    """Return the coded form of a block whose changes are known already and sparse.

    Args:
        where: indices of the words that changed, increasing.
        difference: by how much each of them did, modulo the size of a word.
        tail: the block's bytes after the last whole word.
    """
    return _assembled(CHANGES, pack_changes(where, difference), difference.itemsize, tail)


def decode_block(coded: memoryview, base: memoryview | None, out: memoryview) -> None:
    """Write the block that `coded` stands for to `out`, every byte of it.

    Args:
        coded: what encode_block() returned, or anything else that came from the network.
        base: the same block of the version that it was coded against; None if there is none.
        out: memory of the block's length, not overlapping the base.

    Raises:
        RemoteProtocolError: if it is malformed; `out` then holds anything.
    """
    reader = Reader(coded)
    [codec] = reader.take(1)
    if codec == RAW:
        fill(out, reader.take(len(out)))
    elif codec == PLANES:
        words, tail = _split(out, _word_bytes(reader))
        words[:] = reader.planes(words.size, words.itemsize)
        tail[:] = reader.take(len(tail))
    elif codec in (UNCHANGED, CHANGES, DIFFERENCE, XOR):
        if base is None or len(base) != len(out):
            raise RemoteProtocolError("a coded block that needs a base of its own length")
        _decode_difference(codec, reader, base, out)
    else:
        raise RemoteProtocolError(f"a coded block of the unknown codec {codec}")
    reader.finish()


def _decode_difference(codec: int, reader: Reader, base: memoryview, out: memoryview) -> None:
    """Write base and coded difference together to `out`."""
    if codec == UNCHANGED:
        fill(out, base)
        return
    word_bytes = _word_bytes(reader)
    words, tail = _split(out, word_bytes)
    old, _ = _split(base, word_bytes)
    if codec == CHANGES:
        np.copyto(words, old)
        apply_changes(reader, words)
    elif codec == DIFFERENCE:
        np.add(old, unzigzag(reader.planes(words.size, word_bytes)), out=words)
    else:
        np.bitwise_xor(old, reader.planes(words.size, word_bytes), out=words)
    tail[:] = reader.take(len(tail))


def _code_changes(old: Words, new: Words) -> list[bytes]:
    return pack_changes(*find_changes(old, new))


def _code_difference(old: Words, new: Words) -> list[bytes]:
    return pack_planes(zigzag(new - old))


def _code_xor(old: Words, new: Words) -> list[bytes]:
    return pack_planes(old ^ new)


def _code_alone(old: Words, new: Words) -> list[bytes]:
    return pack_planes(new)


_CODERS: dict[int, _Coder] = {
    CHANGES: _code_changes,
    DIFFERENCE: _code_difference,
    XOR: _code_xor,
    PLANES: _code_alone,
}


def _shortest(old: Words, new: Words) -> int:
    """Return the codec that codes samples of the block the shortest."""
    old, new = _samples(old), _samples(new)
    return min(_CODERS, key=lambda codec: sum(map(len, _CODERS[codec](old, new))))


def _samples(words: Words) -> Words:
    """Return pieces from all over a block, or all of it where it is small."""
    if words.size <= NUM_SAMPLES * SAMPLE_WORDS:
        return words
    starts = np.linspace(0, words.size - SAMPLE_WORDS, NUM_SAMPLES, dtype=np.int64)
    return np.concatenate([words[start : start + SAMPLE_WORDS] for start in starts])


def _assembled(codec: int, parts: list[bytes], word_bytes: int, tail: memoryview | bytes) -> bytes:
    """Return a coded block of its parts."""
    return b"".join([bytes([codec, word_bytes]), *parts, tail])


def _no_longer(coded: bytes, new: memoryview) -> bytes:
    """Return a coded block, or the block as it is if that is no longer."""
    return coded if len(coded) <= len(new) else b"".join([bytes([RAW]), new])


def _split(block: memoryview, word_bytes: int) -> tuple[Words, memoryview]:
    """Return a block's words, and the bytes after the last whole one."""
    count = len(block) // word_bytes
    words: Words = np.frombuffer(block, f"<u{word_bytes}", count)
    return words, block[count * word_bytes :]


def _word_bytes(reader: Reader) -> int:
    """Return the size of a word, as the second byte says it."""
    [word_bytes] = reader.take(1)
    if word_bytes not in (1, 2, 4):
        raise RemoteProtocolError(f"a coded block with words of {word_bytes} bytes")
    return int(word_bytes)
