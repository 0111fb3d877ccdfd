"""The sparse form of a difference: where words changed, and by how many steps.

One optimizer step at a small learning rate moves about one bf16 weight in a hundred, and nearly
all of those to a neighbouring value. The bit pattern of a float is ordered like its magnitude, so
a neighbour is one unit in the last place (ULP) away: the integer difference of the patterns is +1
or -1. Integers modulo the word's size know no rounding, so any pattern comes back exactly: NaN
payloads, infinities, and negative zero (from zero a step of half the range).

Three streams, for n changes:

* **gaps**: how many unchanged words lie before each change, one byte each; 255 stands for 255
  unchanged words and no change, so that any gap can be written.
* **steps**: 0, 1, 2, 3 ... for differences of -1, 1, -2, 2 ... in nibbles, two changes to a byte:
  the Huffman code then works on pairs and wastes less of a bit on what is nearly certain. 15
  stands for a larger number, which is found among the
* **escapes**: number - 15 as words in byte planes.

Two changes to a byte instead of one made deltas 4 % shorter than steps of a byte each, and the
streams of 29,000 changes take 0.1 ms to pack instead of 0.15.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from echo.core.errors import RemoteProtocolError
from echo.delta.streams import Bytes, Reader, Words, pack_planes, pack_stream

Indices = npt.NDArray[np.int64]

_COUNTS = struct.Struct("<III")
_PIECE_BYTES = 1 << 20
_SAMPLE_STRIDE = 1 << 10
_SKIP = 255
_ESCAPE = 15


def has_more_changes(old: Words, new: Words, limit: int) -> bool:
    """Return whether surely more than `limit` words differ, cheaply if it is far from that.

    Where samples find less than half of it, False is but an expectation: to count is a pass over
    both blocks, in vain where the changes are sparse and are about to be searched for anyway.
    """
    every = _SAMPLE_STRIDE
    if every * np.count_nonzero(old[::every] != new[::every]) <= limit // 2:
        return False
    size = _PIECE_BYTES // new.itemsize
    count = sum(
        np.count_nonzero(old[start : start + size] != new[start : start + size])
        for start in range(0, new.size, size)
    )
    return bool(count > limit)


def find_changes(old: Words, new: Words) -> tuple[Indices, Words]:
    """Return the indices of the words that differ, in order, and by how much modulo their size.

    Where few do, most of the time goes into finding them. The comparison yields a byte per word;
    eight of those at a time are looked at as one number, and only the numbers that are not zero
    are searched: twice the speed of asking for the nonzero bytes at once. Pieces of a size that
    caches hold spare a sixth, since the words found are then read from there.
    """
    size = max(8, min(_PIECE_BYTES // new.itemsize, -(-new.size // 8) * 8))
    differs = np.zeros(size, np.bool_)
    eights = differs.view(np.uint64)
    indices, steps = [], []
    for start in range(0, max(new.size, 1), size):
        old_piece, new_piece = old[start : start + size], new[start : start + size]
        np.not_equal(old_piece, new_piece, out=differs[: new_piece.size])
        differs[new_piece.size :] = False
        hits = np.flatnonzero(eights != 0)
        inside = np.flatnonzero(np.take(eights, hits).view(np.bool_))
        where = np.take(hits << 3, inside >> 3)
        where += inside & 7
        steps.append(np.take(new_piece, where) - np.take(old_piece, where))
        where += start
        indices.append(where)
    return np.concatenate(indices), np.concatenate(steps)


def zigzag(difference: Words) -> Words:
    """Return 0, 1, 2, 3, 4 ... for differences of 0, -1, 1, -2, 2 ..."""
    signed = difference.view(f"i{difference.itemsize}")
    number: Words = difference << 1
    number ^= (signed >> (8 * difference.itemsize - 1)).view(difference.dtype)
    return number


def unzigzag(number: Words) -> Words:
    """Return the difference that zigzag() made this number of."""
    sign: Words = number & 1
    np.negative(sign, out=sign)
    difference: Words = number >> 1
    difference ^= sign
    return difference


def pack_changes(where: Indices, difference: Words) -> list[bytes]:
    """Code changes.

    Args:
        where: indices of the words that changed, increasing.
        difference: by how much each one changed, modulo the size of a word; none is zero.
    """
    gaps = _pack_gaps(where)
    number = zigzag(difference) - 1
    nibbles = np.zeros(-(-number.size // 2) * 2, np.uint8)
    np.minimum(number, _ESCAPE, out=nibbles[: number.size], casting="unsafe")
    pairs: Bytes = np.bitwise_or(nibbles[0::2], nibbles[1::2] << 4, dtype=np.uint8)
    escapes = number[nibbles[: number.size] == _ESCAPE] - _ESCAPE
    return [
        _COUNTS.pack(where.size, gaps.size, escapes.size),
        *pack_stream(gaps),
        *pack_stream(pairs),
        *pack_planes(escapes),
    ]


def apply_changes(reader: Reader, out: Words) -> None:
    """Add coded changes to `out`, which holds the old words."""
    count, num_gaps, num_escapes = reader.unpack(_COUNTS)
    if count > out.size or num_gaps > count + out.size // _SKIP or num_escapes > count:
        raise RemoteProtocolError("a coded block with more changes than words")
    where = _unpack_gaps(reader.stream(num_gaps))
    if where.size != count or (count and where[-1] >= out.size):
        raise RemoteProtocolError("a coded block whose changes lie outside it")
    table = _STEPS[out.itemsize]
    difference: Words = np.take(table, reader.stream(-(-count // 2))).view(out.dtype)[:count]
    escaped = np.flatnonzero(difference == 0)
    if escaped.size != num_escapes:
        raise RemoteProtocolError("a coded block whose escapes do not fit its changes")
    difference[escaped] = unzigzag(reader.planes(num_escapes, out.itemsize) + (_ESCAPE + 1))
    out[where] = np.take(out, where) + difference


def _pack_gaps(where: Indices) -> Bytes:
    """Return the gaps before each change, one byte each, and escapes where one is too large."""
    gaps = where.copy()
    gaps[1:] -= where[:-1] + 1
    large = np.flatnonzero(gaps >= _SKIP)
    if not large.size:
        return gaps.astype(np.uint8)
    skips, rest = np.divmod(gaps[large], _SKIP)
    gaps[large] = rest
    shift = np.zeros(gaps.size, np.int64)
    shift[large] = skips
    packed = np.full(gaps.size + int(skips.sum()), _SKIP, np.uint8)
    packed[np.arange(gaps.size) + np.cumsum(shift)] = gaps
    return packed


def _unpack_gaps(packed: Bytes) -> Indices:
    """Return the indices of the changes."""
    is_change = packed != _SKIP
    where = np.cumsum(packed + is_change, dtype=np.int64)  # 254 + 1 still is a byte
    where -= 1
    return where if is_change.all() else where[is_change]


def _step_table(word_bytes: int) -> npt.NDArray[np.unsignedinteger[Any]]:
    """Return for each byte the two differences it stands for, side by side as one number."""
    byte = np.arange(256, dtype=f"<u{word_bytes}")
    nibbles = np.stack([byte & 15, byte >> 4], axis=1)
    steps = np.where(nibbles == _ESCAPE, 0, unzigzag(nibbles + 1)).astype(byte.dtype)
    return steps.reshape(-1).view(f"<u{2 * word_bytes}")


_STEPS = {word_bytes: _step_table(word_bytes) for word_bytes in (1, 2, 4)}
