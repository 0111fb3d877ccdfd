"""Coding of blocks.

A block is a run of an image's bytes, coded alone or as a delta to a base image.

Each block is coded on its own, so blocks can be coded, sent and decoded in any order and by several
threads. The first byte of a coded block names the codec. The second byte is the size of a word in
bytes:

| codec      | content                                          | the shortest if          |
|------------|--------------------------------------------------|--------------------------|
| UNCHANGED  | nothing (and no second byte)                     | nothing changed          |
| CHANGES    | indices and small integer differences            | up to a third changed    |
| DIFFERENCE | zig-zag differences of all words as byte planes  | nearly all changed: fp32 |
| XOR        | exclusive or with the base as byte planes        | words are not numbers    |
| PLANES     | the words as byte planes, no base                | keyframes, another model |
| RAW        | the bytes (and no second byte)                   | noise                    |

A byte plane consists of the bytes at one position in every word. The exponents of floats have
similar values and compress well. Mantissas do not compress, and are stored unchanged. The bytes
after the last whole word are stored at the end.

All arithmetic is on bit patterns as integers, little-endian like the image, so every value is
restored bit for bit. Coding is deterministic for a given version of zstd: all nodes that code the
same block produce the same bytes.

The encoder does not try all codecs. It counts the changed words first. If at most a fifth of the
words have changed, CHANGES is within 5 % of the shortest codec, however large the changes are. If
more words have changed, samples from the whole block decide.

The decoder compares every length with the size of the block before it allocates memory. For an
honest block, the decoder allocates a few times the size of the block. For a malicious block, the
decoder allocates at most about twenty times the size of the block.
"""

from __future__ import annotations

import bisect
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import zstandard
from blake3 import blake3

from echo.core.errors import LocalProtocolError, RemoteProtocolError, StorageError
from echo.weights.manifest import TensorSpec

# --- streams: each one zstd or as it is, whichever is shorter -------------------------------------
#
# A stream is a length (u32) and its bytes. The reader always knows the unpacked size of the stream.
# If the length equals that size, the bytes are stored without compression; otherwise they are one
# zstd frame. The size that a frame claims is compared with the known size before it is unpacked, so
# a hostile frame cannot make the receiver allocate memory.
# The coded bytes are close to random at the level of strings. The gain comes from the Huffman code
# over single bytes. So zstd looks only for long matches, with a table that fits into the
# first-level cache. Compared with zstd's level 1, the result is smaller on every kind of stream,
# and coding is no slower.

Bytes: TypeAlias = npt.NDArray[np.uint8]
Words: TypeAlias = npt.NDArray[Any]
"""Bit patterns: unsigned integers of 1, 2 or 4 bytes each."""

_LENGTH = struct.Struct("<I")
_MAGIC = b"\x28\xb5\x2f\xfd"
_PARAMETERS = zstandard.ZstdCompressionParameters(
    window_log=19,
    hash_log=6,
    chain_log=6,
    search_log=1,
    min_match=7,
    strategy=zstandard.STRATEGY_FAST,
    target_length=0,
)


def pack_streams(*streams: Bytes) -> list[bytes]:
    """Return two parts for each array: the length of the array's stream, and this stream.

    The arrays must be contiguous. A stream has the compressed bytes of its array, or the plain
    bytes if compression does not help.
    """
    # A new compressor costs only 10 us, so each call makes one and threads share none.
    compressor = zstandard.ZstdCompressor(compression_params=_PARAMETERS)
    parts = []
    for data in streams:
        packed = compressor.compress(data.data)
        stored = packed if len(packed) < data.size else data.tobytes()
        parts += [_LENGTH.pack(len(stored)), stored]
    return parts


def planes_of(words: Words) -> list[Bytes]:
    """Return the byte planes of words, beginning with the least significant bytes."""
    planes = words.view(np.uint8).reshape(-1, words.itemsize)
    return [np.ascontiguousarray(planes[:, plane]) for plane in range(words.itemsize)]


def pack_planes(words: Words) -> list[bytes]:
    """Return one stream for each byte plane of the words."""
    return pack_streams(*planes_of(words))


def fill(out: memoryview, data: bytes | bytearray | memoryview) -> None:
    """Without holding the GIL, copy `data` to `out`, which must have the same length.

    A slice assignment would hold the GIL. If `out` is a mapped file, the kernel may block the
    writer, and all other threads would wait for the GIL.
    """
    np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(data, np.uint8))


class BlockReader:
    """Reads the fields of a coded block.

    The methods raise RemoteProtocolError if a field does not fit the block.
    """

    def __init__(self, coded: memoryview) -> None:
        """Start to read at the beginning of `coded`."""
        self._rest = coded
        self._decompressor = zstandard.ZstdDecompressor()

    def take(self, size: int) -> memoryview:
        """Return the next `size` bytes."""
        if size > len(self._rest):
            raise RemoteProtocolError("a coded block that ends too early")
        taken, self._rest = self._rest[:size], self._rest[size:]
        return taken

    def unpack(self, layout: struct.Struct) -> tuple[Any, ...]:
        """Return the next fields, read by the format `layout`."""
        return layout.unpack(self.take(layout.size))

    def stream(self, size: int) -> Bytes:
        """Return the content of the next stream, which must be `size` bytes long."""
        [length] = self.unpack(_LENGTH)
        if length > size:
            raise RemoteProtocolError("a coded block with a stream that is longer than promised")
        stored = self.take(length)
        if length < size:
            return np.frombuffer(_unpacked(stored, size, self._decompressor), np.uint8)
        return np.frombuffer(stored, np.uint8)

    def planes(self, count: int, word_bytes: int) -> Words:
        """Return `count` words of `word_bytes` bytes each, read from the next byte planes."""
        words = np.empty((count, word_bytes), np.uint8)
        for plane in range(word_bytes):
            words[:, plane] = self.stream(count)
        return words.reshape(-1).view(f"<u{word_bytes}")

    def finish(self) -> None:
        """Check that all bytes of the block were read."""
        if self._rest:
            raise RemoteProtocolError("a coded block with bytes left over")


def _unpacked(frame: memoryview, size: int, decompressor: zstandard.ZstdDecompressor) -> bytes:
    """Return the content of a zstd frame, which must be `size` bytes long.

    Raises:
        RemoteProtocolError: if the frame is malformed or has another size.
    """
    try:
        # The encoder makes no skippable frames and uses no dictionaries.
        if bytes(frame[:4]) != _MAGIC:
            raise RemoteProtocolError("a coded block with a stream that is no zstd frame")
        claims = zstandard.get_frame_parameters(frame)
        if claims.content_size != size or claims.window_size > size or claims.dict_id:
            raise RemoteProtocolError("a coded block whose zstd frame is not of the promised size")
        data = decompressor.decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise RemoteProtocolError(f"a coded block with a damaged zstd frame: {error}") from error
    if len(data) != size:
        raise RemoteProtocolError("a coded block whose zstd frame does not hold what it claims")
    return data


# --- sparse changes: where words changed, and by how many steps -----------------------------------
#
# One optimizer step at a small learning rate moves about one bf16 weight in a hundred, and nearly
# all of those to a neighbouring value. The bit pattern of a float is ordered like its magnitude, so
# a neighbour is one unit in the last place (ULP) away: the integer difference of the patterns is +1
# or -1. Integers modulo the word's size know no rounding, so any pattern comes back exactly: NaN
# payloads, infinities, and negative zero (from zero a step of half the range).
#
# Three streams, for n changes:
#
# * **gaps**: how many unchanged words lie before each change, one byte each; 255 stands for 255
#   unchanged words and no change, so that any gap can be written.
# * **steps**: 0, 1, 2, 3 ... for differences of -1, 1, -2, 2 ... in nibbles, two changes to a byte:
#   the Huffman code then works on pairs and wastes less of a bit on what is nearly certain. 15
#   stands for a larger number, which is found among the
# * **escapes**: number - 15 as words in byte planes.
#
# Two changes to a byte instead of one made deltas 4 % shorter than steps of a byte each, and the
# streams of 29,000 changes take 0.1 ms to pack instead of 0.15.

Indices = npt.NDArray[np.int64]

_COUNTS = struct.Struct("<III")
_PIECE_BYTES = 1 << 20
"""Number of bytes of a block that are compared at once. The result, one byte for each word, then
fits into a core's cache. Much smaller pieces would need more calls of numpy.
"""
_SAMPLE_STRIDE = 1 << 13
"""Number of words from one sample to the next. No cache holds a sample, so samples are expensive. A
block of 16-bit words has 256 samples, which tell whether most of its words have changed.
"""
_SKIP = 255  # the byte for 255 unchanged words and no change
_ESCAPE = 15  # the nibble for a number that is among the escapes


def has_more_changes(old: Words, new: Words, limit: int) -> bool:
    """Return whether more than `limit` words differ between `old` and `new`.

    The result False may be an estimate.

    If samples suggest that at most half of `limit` words differ, the words are not counted. This
    saves a pass over both blocks.
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


def has_changed_little(old: memoryview, new: memoryview) -> bool:
    """Return whether few words differ between two images, estimated from samples.

    Args:
        old: one image.
        new: the other image, of the same length. The function compares units of two bytes, so each
            half of a larger word counts as a word.
    """
    size = len(new) // 2
    stride = max(1, min(_SAMPLE_STRIDE + 1, size // _SAMPLE_STRIDE))
    before, after = (np.frombuffer(image, "<u2", size)[::stride] for image in (old, new))
    return int(np.count_nonzero(before != after)) <= SPARSE_SHARE * max(1, after.size)


def find_changes(old: Words, new: Words) -> tuple[Indices, Words, Words]:
    """Return the ascending indices, the differences and the old values of the changed words.

    A difference is new minus old, modulo the size of a word. The comparison yields a byte for each
    word. Eight of these bytes are read as one number, and only nonzero numbers are examined. This
    is twice as fast as a search for nonzero bytes.
    """
    size = max(8, min(_PIECE_BYTES // new.itemsize, -(-new.size // 8) * 8))
    differs = np.zeros(size, np.bool_)
    eights = differs.view(np.uint64)
    indices, steps, replaced = [], [], []
    for start in range(0, max(new.size, 1), size):
        old_piece, new_piece = old[start : start + size], new[start : start + size]
        np.not_equal(old_piece, new_piece, out=differs[: new_piece.size])
        differs[new_piece.size :] = False
        hits = np.flatnonzero(eights != 0)
        inside = np.flatnonzero(gather(eights, hits).view(np.bool_))
        where = gather(hits << 3, inside >> 3)
        where += inside & 7
        replaced.append(gather(old_piece, where))
        steps.append(gather(new_piece, where) - replaced[-1])
        where += start
        indices.append(where)
    return np.concatenate(indices), np.concatenate(steps), np.concatenate(replaced)


def gather(values: npt.NDArray[Any], where: Indices) -> npt.NDArray[Any]:
    """Return the values at the indices `where`, which must be valid.

    The indices are clipped, because clipping is numpy's fastest check of indices.
    """
    return np.take(values, where, mode="clip")


def zigzag(difference: Words) -> Words:
    """Return 0, 1, 2, 3, 4 ... for the differences 0, -1, 1, -2, 2 ..."""
    signed = difference.view(f"i{difference.itemsize}")
    number: Words = difference << 1
    number ^= (signed >> (8 * difference.itemsize - 1)).view(difference.dtype)
    return number


def unzigzag(number: Words) -> Words:
    """Return the differences from their zig-zag numbers: the inverse of `zigzag`."""
    sign: Words = number & 1
    np.negative(sign, out=sign)
    difference: Words = number >> 1
    difference ^= sign
    return difference


def pack_changes(where: Indices, difference: Words) -> list[bytes]:
    """Return the coded form of changes to words.

    Args:
        where: indices of the changed words, increasing.
        difference: new minus old value of each changed word, modulo the size of a word. No
            difference is zero.
    """
    gaps = _pack_gaps(where)
    number = zigzag(difference) - 1
    escaped = np.flatnonzero(number >= _ESCAPE)
    nibbles = np.zeros(-(-number.size // 2) * 2, np.uint8)
    nibbles[: number.size] = number
    nibbles[escaped] = _ESCAPE
    both = nibbles.view("<u2")
    pairs = (both | both >> 4).astype(np.uint8)
    escapes = number[escaped] - _ESCAPE
    return [
        _COUNTS.pack(where.size, gaps.size, escapes.size),
        *pack_streams(gaps, pairs, *planes_of(escapes)),
    ]


def read_changes(reader: BlockReader, num_words: int, word_bytes: int) -> tuple[Indices, Words]:
    """Return the indices and differences that `pack_changes` has coded.

    Args:
        reader: a reader, positioned at the coded changes.
        num_words: number of words of the block.
        word_bytes: size of a word, in bytes.

    Raises:
        RemoteProtocolError: if the changes do not fit a block of this size.
    """
    count, num_gaps, num_escapes = reader.unpack(_COUNTS)
    if count > num_words or num_gaps > count + num_words // _SKIP or num_escapes > count:
        raise RemoteProtocolError("a coded block with more changes than words")
    where = _unpack_gaps(reader.stream(num_gaps))
    if where.size != count or (count and where[-1] >= num_words):
        raise RemoteProtocolError("a coded block whose changes lie outside it")
    steps = np.take(_STEPS[word_bytes], reader.stream(-(-count // 2)))
    difference: Words = steps.view(f"<u{word_bytes}")[:count]
    if count - np.count_nonzero(difference) != num_escapes:
        raise RemoteProtocolError("a coded block whose escapes do not fit its changes")
    escapes = reader.planes(num_escapes, word_bytes)
    if num_escapes:
        difference[difference == 0] = unzigzag(escapes + (_ESCAPE + 1))
    return where, difference


def _pack_gaps(where: Indices) -> Bytes:
    """Return the number of unchanged words before each change, as bytes.

    A byte of 255 means that the next byte continues the number.
    """
    gaps = where.copy()
    np.subtract(where[1:], where[:-1], out=gaps[1:])
    gaps[1:] -= 1
    packed = gaps.astype(np.uint8)
    large = np.flatnonzero(gaps >= _SKIP)
    if not large.size:
        return packed
    skips, packed[large] = np.divmod(gaps[large], _SKIP)
    return np.insert(packed, np.repeat(large, skips), _SKIP)


def _unpack_gaps(packed: Bytes) -> Indices:
    is_change = packed != _SKIP
    steps = packed + is_change  # at most 254 + 1, which fits a byte
    steps[:1] -= 1  # no change precedes the first one
    where: Indices = np.cumsum(steps, dtype=np.int64)[is_change]
    return where


def _step_table(word_bytes: int) -> npt.NDArray[np.unsignedinteger[Any]]:
    """Return an array that has, for each byte, the two differences that the byte encodes.

    Each half of the byte, four bits, encodes one difference. If a half is _ESCAPE, its
    difference in the array is 0.
    """
    byte = np.arange(256, dtype=f"<u{word_bytes}")
    nibbles = np.stack([byte & 15, byte >> 4], axis=1)
    steps = np.where(nibbles == _ESCAPE, 0, unzigzag(nibbles + 1)).astype(byte.dtype)
    return steps.reshape(-1).view(f"<u{2 * word_bytes}")


_STEPS = {word_bytes: _step_table(word_bytes) for word_bytes in (1, 2, 4)}

# --- blocks: code and decode ----------------------------------------------------------------------

WordBytes: TypeAlias = Literal[1, 2, 4]

BLOCK_BYTES = 4 << 20
"""Number of image bytes in a block. A block fits into the CPU's caches, and is large compared with
its headers.
"""

UNCHANGED, RAW, CHANGES, DIFFERENCE, XOR, PLANES = range(6)

SPARSE_SHARE = 0.2
"""Largest share of changed words for which CHANGES is used without a comparison with other codecs.
"""
NUM_SAMPLES = 16
"""Number of samples of a block on which codecs are compared. The samples are spread over the block,
because its tensors may have changed in different ways.
"""
SAMPLE_WORDS = 1024
"""Number of words in a sample. All samples together are 1/128 of a block of 16-bit words, so the
comparison takes little time.
"""

_Coder: TypeAlias = Callable[[Words, Words], list[bytes]]


def block_bytes_of(chunk_bytes: int) -> int:
    """Return the size of a block in bytes, a multiple of `chunk_bytes`."""
    return max(1, BLOCK_BYTES // chunk_bytes) * chunk_bytes


@dataclass(frozen=True, slots=True)
class CodedBlock:
    """A block coded as a delta, with the hash of the bytes that it replaces."""

    coded: bytes
    old_hash: bytes
    """BLAKE3-256 hash of the replaced bytes. With the codec CHANGES, these are the old values of
    the changed words and the tail. With all other codecs, they are the whole block of the base.
    """


def encode_block(base: memoryview | None, new: memoryview, *, word_bytes: WordBytes) -> bytes:
    """Return the coded form of a block.

    Args:
        base: the same block in the version that the receiver holds; None to code the block alone.
        new: the bytes of the block, of any length.
        word_bytes: size of the floats in the block, in bytes; 1 if the block has no floats, or if
            its contents are unknown.

    Raises:
        LocalProtocolError: if the base and the block differ in length.
    """
    if base is not None:
        return encode_delta(base, new, word_bytes=word_bytes).coded
    words, tail = split_words(new, word_bytes)
    return _no_longer(_assembled(PLANES, pack_planes(words), word_bytes, tail), new)


def code_block(
    base: memoryview | None, new: memoryview, block: tuple[int, int, WordBytes]
) -> CodedBlock:
    """Code one block of an image; return the coded block with the hash of the replaced bytes.

    Args:
        base: the image of the version that the receiver holds; None to code the block alone.
        new: the image to code.
        block: start and stop of the block in both images, and the size of its words.
    """
    start, stop, word_bytes = block
    if base is None:
        return CodedBlock(encode_block(None, new[start:stop], word_bytes=word_bytes), b"")
    return encode_delta(base[start:stop], new[start:stop], word_bytes=word_bytes)


def encode_delta(base: memoryview, new: memoryview, *, word_bytes: WordBytes) -> CodedBlock:
    """Code a block as a delta; return the coded block with the hash of the replaced bytes.

    The arguments are those of `encode_block`.
    """
    if len(base) != len(new):
        raise LocalProtocolError(f"a base of {len(base)} bytes for a block of {len(new)}")
    words, tail = split_words(new, word_bytes)
    old, old_tail = split_words(base, word_bytes)
    if not has_more_changes(old, words, most_sparse(words.size)):
        where, difference, replaced = find_changes(old, words)
        if not where.size and old_tail == tail:
            return CodedBlock(bytes([UNCHANGED]), hash_old(old[:0]))
        if where.size <= most_sparse(words.size):
            coded = encode_changes(where, difference, tail)
            if len(coded) <= len(new):
                return CodedBlock(coded, hash_old(replaced, old_tail))
    codec = _shortest(old, words)
    coded = _no_longer(_assembled(codec, CODERS[codec](old, words), word_bytes, tail), new)
    return CodedBlock(coded, _old_hash(coded[0], base, old, old_tail, words))


def _old_hash(codec: int, base: memoryview, old: Words, old_tail: memoryview, new: Words) -> bytes:
    if codec == CHANGES:
        _, _, replaced = find_changes(old, new)
        return hash_old(replaced, old_tail)
    return hash_old(np.frombuffer(base, np.uint8))


def hash_old(words: Words, tail: memoryview | bytes = b"") -> bytes:
    """Return one hash over the replaced words, in order, followed by the replaced tail.

    The tail has the bytes after the last whole word of the block.
    """
    return blake3(words.view(np.uint8).data).update(tail).digest()


def most_sparse(num_words: int) -> int:
    """Return the largest number of changed words with which a block is sparse.

    A sparse block is coded as CHANGES, without a comparison with other codecs.
    """
    return int(SPARSE_SHARE * num_words)


def encode_changes(where: Indices, difference: Words, tail: memoryview | bytes = b"") -> bytes:
    """Return the coded form of a block whose changes are known and sparse.

    Args:
        where: indices of the changed words, increasing.
        difference: new minus old value of each changed word, modulo the size of a word.
        tail: the block's bytes after the last whole word.
    """
    return _assembled(CHANGES, pack_changes(where, difference), difference.itemsize, tail)


@dataclass(frozen=True, slots=True)
class BlockPatch:
    """The changes that a delta makes to a block, and the old words for undoing the changes."""

    where: Indices | None
    """Indices of the changed words, increasing; None if the whole block is replaced."""
    old: Words
    new: Words
    old_tail: bytes
    """The bytes after the last whole word, before the change."""
    new_tail: bytes

    @property
    def num_bytes(self) -> int:
        """Size of the arrays of this patch, in bytes."""
        positions = 0 if self.where is None else self.where.nbytes
        return positions + self.old.nbytes + self.new.nbytes

    def write(self, block: memoryview) -> None:
        """Write the new words into `block`, which may contain old or new words."""
        _write(block, self.where, self.new, self.new_tail)

    def take_back(self, block: memoryview) -> None:
        """Write the old words into `block`, which may contain old or new words."""
        _write(block, self.where, self.old, self.old_tail)


def _write(block: memoryview, where: Indices | None, words: Words, tail: bytes) -> None:
    if where is None:
        fill(block, words.data)
        return
    target, behind = split_words(block, words.itemsize)
    target[where] = words
    behind[:] = tail


_NOTHING = np.empty(0, np.int64)


def open_block(coded: memoryview, base: memoryview, old_hash: bytes) -> BlockPatch:
    """Return the changes that a coded block makes to its base; the base is not written.

    Args:
        coded: the result of `encode_delta`, or any bytes from the network.
        base: the same block in the base.
        old_hash: the hash that the replaced bytes must have.

    Raises:
        RemoteProtocolError: if the block is malformed.
        StorageError: if the block was coded against another base.
    """
    reader = BlockReader(coded)
    [codec] = reader.take(1)
    old_tail = base[:0]
    if codec == UNCHANGED:
        reader.finish()
        empty = _NOTHING.view(np.uint8)
        patch = BlockPatch(_NOTHING, empty, empty, b"", b"")
    elif codec == CHANGES:
        word_bytes = _word_bytes(reader)
        words, old_tail = split_words(base, word_bytes)
        where, difference = read_changes(reader, words.size, word_bytes)
        old: Words = gather(words, where)
        new_tail = bytes(reader.take(len(old_tail)))
        reader.finish()
        patch = BlockPatch(where, old, old + difference, bytes(old_tail), new_tail)
    else:
        whole = np.empty(len(base), np.uint8)
        decode_block(coded, base, whole.data)
        old_tail = base[len(base) :]
        patch = BlockPatch(None, np.frombuffer(base, np.uint8).copy(), whole, b"", b"")
    if hash_old(patch.old, old_tail) != old_hash:
        raise StorageError("the words that it is to replace are not those that the learner had")
    return patch


def decode_block(coded: memoryview, base: memoryview | None, out: memoryview) -> None:
    """Decode a block, and write all its bytes to `out`.

    Args:
        coded: the result of `encode_block`, or any bytes from the network.
        base: the same block in the base; None without a base.
        out: memory of the block's length, which must not overlap the base.

    Raises:
        RemoteProtocolError: if the coded block is malformed; the content of `out` is then
            undefined.
    """
    reader = BlockReader(coded)
    [codec] = reader.take(1)
    if codec == RAW:
        fill(out, reader.take(len(out)))
    elif codec == PLANES:
        words, tail = split_words(out, _word_bytes(reader))
        words[:] = reader.planes(words.size, words.itemsize)
        tail[:] = reader.take(len(tail))
    elif codec in (UNCHANGED, CHANGES, DIFFERENCE, XOR):
        if base is None or len(base) != len(out):
            raise RemoteProtocolError("a coded block that needs a base of its own length")
        _decode_difference(codec, reader, base, out)
    else:
        raise RemoteProtocolError(f"a coded block of the unknown codec {codec}")
    reader.finish()


def _decode_difference(codec: int, reader: BlockReader, base: memoryview, out: memoryview) -> None:
    if codec == UNCHANGED:
        fill(out, base)
        return
    word_bytes = _word_bytes(reader)
    words, tail = split_words(out, word_bytes)
    old, _ = split_words(base, word_bytes)
    if codec == CHANGES:
        where, difference = read_changes(reader, words.size, word_bytes)
        np.copyto(words, old)
        words[where] = gather(old, where) + difference
    elif codec == DIFFERENCE:
        np.add(old, unzigzag(reader.planes(words.size, word_bytes)), out=words)
    else:
        np.bitwise_xor(old, reader.planes(words.size, word_bytes), out=words)
    tail[:] = reader.take(len(tail))


CODERS: dict[int, _Coder] = {
    CHANGES: lambda old, new: pack_changes(*find_changes(old, new)[:2]),
    DIFFERENCE: lambda old, new: pack_planes(zigzag(new - old)),
    XOR: lambda old, new: pack_planes(old ^ new),
    PLANES: lambda _, new: pack_planes(new),
}


def _shortest(old: Words, new: Words) -> int:
    old, new = _samples(old), _samples(new)
    return min(CODERS, key=lambda codec: sum(map(len, CODERS[codec](old, new))))


def _samples(words: Words) -> Words:
    if words.size <= NUM_SAMPLES * SAMPLE_WORDS:
        return words
    starts = np.linspace(0, words.size - SAMPLE_WORDS, NUM_SAMPLES, dtype=np.int64)
    return np.concatenate([words[start : start + SAMPLE_WORDS] for start in starts])


def _assembled(codec: int, parts: list[bytes], word_bytes: int, tail: memoryview | bytes) -> bytes:
    return b"".join([bytes([codec, word_bytes]), *parts, tail])


def _no_longer(coded: bytes, new: memoryview) -> bytes:
    """Return the coded block, or the block coded as RAW if RAW is shorter."""
    return coded if len(coded) <= len(new) else b"".join([bytes([RAW]), new])


def split_words(block: memoryview, word_bytes: int) -> tuple[Words, memoryview]:
    """Return a block's words, and the bytes after its last whole word."""
    count = len(block) // word_bytes
    words: Words = np.frombuffer(block, f"<u{word_bytes}", count)
    return words, block[count * word_bytes :]


def _word_bytes(reader: BlockReader) -> int:
    [word_bytes] = reader.take(1)
    if word_bytes not in (1, 2, 4):
        raise RemoteProtocolError(f"a coded block with words of {word_bytes} bytes")
    return int(word_bytes)


# --- word size: the floats that make up a block of an image ---------------------------------------

_FLOAT_BYTES: dict[str, WordBytes] = {"float32": 4, "bfloat16": 2, "float16": 2}


def word_bytes_of(tensors: Sequence[TensorSpec], start: int, stop: int) -> WordBytes:
    """Return the word size in which to code the bytes [start, stop) of an image.

    A block may span tensors of several dtypes, but is coded with one size of word: the size whose
    tensors take the largest share of the bytes. Of two equal shares, the larger size wins. Tensors
    without floats count as words of 1 byte. The size affects only the coded length, not the decoded
    content.

    Args:
        tensors: places of the tensors in the image, in order of offset.
        start: first byte of the block in the image.
        stop: the byte after the last byte of the block.
    """
    shares: Counter[WordBytes] = Counter()
    first = bisect.bisect_right(tensors, start, key=lambda tensor: tensor.offset) - 1
    for tensor in tensors[max(first, 0) :]:
        if tensor.offset >= stop:
            break
        inside = min(tensor.offset + tensor.num_bytes, stop) - max(tensor.offset, start)
        if inside > 0:
            shares[_FLOAT_BYTES.get(tensor.dtype, 1)] += inside
    return max(shares, key=lambda size: (shares[size], size), default=1)


def split_blocks(image_bytes: int, block_bytes: int) -> Sequence[tuple[int, int]]:
    """Return the byte range [start, stop) of each block of an image."""
    return [
        (start, min(start + block_bytes, image_bytes))
        for start in range(0, image_bytes, block_bytes)
    ]
