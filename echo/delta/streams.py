"""Byte streams inside a coded block: each one zstd or as it is, whichever is shorter.

A stream is a length (u32) and that many bytes. The reader always knows the size that the stream
must have once it is unpacked: where the length equals it, the bytes are stored as they are, else
they are one zstd frame. What a frame claims about itself is compared with the promised size before
anything is unpacked, so that a hostile frame cannot make the receiver allocate.

What is coded here is close to random at the level of strings: the gain comes from the Huffman code
over single bytes. Hence the settings: matches only where they are long, and a table for finding
them that fits into the first-level cache. Measured against zstd's level 1, that is smaller on
every kind of stream and no slower.
"""

from __future__ import annotations

import struct
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import zstandard

from echo.core.errors import RemoteProtocolError

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


def pack_stream(data: Bytes) -> list[bytes]:
    """Return `data`, a contiguous array, as a stream: its length and its bytes."""
    # A compressor of its own costs 10 us, and nothing is shared between threads.
    packed = zstandard.ZstdCompressor(compression_params=_PARAMETERS).compress(data.data)
    stored = packed if len(packed) < data.size else data.tobytes()
    return [_LENGTH.pack(len(stored)), stored]


def pack_planes(words: Words) -> list[bytes]:
    """Return words as one stream per byte of a word, the least significant first."""
    planes = words.view(np.uint8).reshape(-1, words.itemsize)
    return [
        part
        for plane in range(words.itemsize)
        for part in pack_stream(np.ascontiguousarray(planes[:, plane]))
    ]


def fill(out: memoryview, data: bytes | bytearray | memoryview) -> None:
    """Copy bytes to a place of their length, without the GIL.

    A slice assignment would hold it, and with it every thread where a page of `out` is a file's and
    the kernel makes its writer wait.
    """
    np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(data, np.uint8))


class Reader:
    """Takes a coded block apart, and refuses what does not fit it."""

    def __init__(self, coded: memoryview) -> None:
        """Read `coded` from its beginning."""
        self._rest = coded

    def take(self, size: int) -> memoryview:
        """Return the next `size` bytes."""
        if size > len(self._rest):
            raise RemoteProtocolError("a coded block that ends too early")
        taken, self._rest = self._rest[:size], self._rest[size:]
        return taken

    def unpack(self, layout: struct.Struct) -> tuple[Any, ...]:
        """Return the next fields."""
        return layout.unpack(self.take(layout.size))

    def stream(self, size: int) -> Bytes:
        """Return the next stream, which must have `size` bytes once it is unpacked."""
        [length] = self.unpack(_LENGTH)
        if length > size:
            raise RemoteProtocolError("a coded block with a stream that is longer than promised")
        stored = self.take(length)
        return np.frombuffer(stored if length == size else _unpacked(stored, size), np.uint8)

    def planes(self, count: int, word_bytes: int) -> Words:
        """Return `count` words that lie in planes."""
        words = np.empty((count, word_bytes), np.uint8)
        for plane in range(word_bytes):
            words[:, plane] = self.stream(count)
        return words.reshape(-1).view(f"<u{word_bytes}")

    def finish(self) -> None:
        """Check that nothing is left."""
        if self._rest:
            raise RemoteProtocolError("a coded block with bytes left over")


def _unpacked(frame: memoryview, size: int) -> bytes:
    """Return what a zstd frame holds, which must be `size` bytes."""
    try:
        # Of skippable frames and dictionaries, which zstd knows too, there are none.
        if bytes(frame[:4]) != _MAGIC:
            raise RemoteProtocolError("a coded block with a stream that is no zstd frame")
        claims = zstandard.get_frame_parameters(frame)
        if claims.content_size != size or claims.window_size > size or claims.dict_id:
            raise RemoteProtocolError("a coded block whose zstd frame is not of the promised size")
        data = zstandard.ZstdDecompressor().decompress(
            frame, max_output_size=size, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise RemoteProtocolError(f"a coded block with a damaged zstd frame: {error}") from error
    if len(data) != size:
        raise RemoteProtocolError("a coded block whose zstd frame does not hold what it claims")
    return data
