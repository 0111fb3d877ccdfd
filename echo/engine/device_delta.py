"""Deltas coded where the weights live: only what changed crosses to the host.

The learner keeps the last published image on its device. Comparing it with the new one, finding
the words that differ and subtracting them runs there at the speed of its memory; the host receives
an index and a difference per change, some 4 % of a bf16 image after a small step, and packs them.
The coded blocks are those of echo.weights.delta, byte for byte, so that no receiver can tell where
they were made. A block that is not sparse is copied to the host and coded there.

The host's own copy of the new image costs no transfer either: it is decode_block() of what came
out of here, on top of the version before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Executor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from echo.core.errors import EngineError
from echo.weights.delta import (
    BLOCK_BYTES,
    UNCHANGED,
    WordBytes,
    encode_block,
    encode_changes,
    most_sparse,
    word_bytes_of,
)
from echo.weights.manifest import TensorSpec

MIN_BLOCK_BYTES = 4 << 10
"""Shorter blocks are coded on the host: their headers may exceed what they spare."""

_PATTERNS: dict[WordBytes, torch.dtype] = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
"""Integers whose differences wrap around, as those of bit patterns must."""


class DeviceDelta:
    """Codes each image against the one before, on the device that holds both."""

    def __init__(self, image: Tensor, *, block_bytes: int = BLOCK_BYTES) -> None:
        """Start from a published image.

        Args:
            image: its bytes, uint8 [num_bytes], contiguous. It is kept, not copied: nobody may
                change it any more.
            block_bytes: image bytes per block, a multiple of 16.
        """
        self._image = image
        self._block_bytes = block_bytes

    def changed_share(self, new: Tensor, tensors: Sequence[TensorSpec]) -> float:
        """Return the share of the words that changed; only that number crosses to the host.

        Arguments and errors as for `encode`.
        """
        counts, num_words = [], 0
        for start, stop, word_bytes in self._blocks(new, tensors):
            pattern = _PATTERNS[1 if (stop - start) % word_bytes else word_bytes]
            words = new[start:stop].view(pattern)
            counts.append(torch.count_nonzero(self._image[start:stop].view(pattern) != words))
            num_words += words.numel()
        return int(torch.stack(counts).sum()) / num_words if counts else 0.0

    def encode(
        self,
        new: Tensor,
        tensors: Sequence[TensorSpec],
        *,
        held: memoryview | None = None,
        pool: Executor | None = None,
    ) -> Iterator[bytes]:
        """Yield the coded blocks that lead from the last image to `new`, in order.

        Once all have been taken, `new` is the last image; an iteration that was abandoned
        changes nothing.

        Args:
            new: the image's bytes, on the same device and of the same length. Kept, like the
                first one.
            tensors: what lies where in it, in order of offset.
            held: the last image on the host, where it is there too: blocks that are not sparse
                are coded against it, so that their base need not cross.
            pool: threads to code in, several blocks at a time.

        Raises:
            EngineError: if `new` is not of the same form as the last image.
        """
        old = self._image

        def encode_one(block: tuple[int, int, WordBytes]) -> bytes:
            start, stop, word_bytes = block
            base = None if held is None else held[start:stop]
            return _encode(old[start:stop], new[start:stop], word_bytes, base)

        blocks = self._blocks(new, tensors)
        yield from map(encode_one, blocks) if pool is None else pool.map(encode_one, blocks)
        self._image = new

    def _blocks(
        self, new: Tensor, tensors: Sequence[TensorSpec]
    ) -> Iterator[tuple[int, int, WordBytes]]:
        """Yield where each block begins and ends, and the size of its words."""
        old = self._image
        if (new.shape, new.dtype, new.device) != (old.shape, torch.uint8, old.device):
            raise EngineError(
                f"an image of {new.dtype}{list(new.shape)} on {new.device} cannot follow one of "
                f"{old.dtype}{list(old.shape)} on {old.device}"
            )
        for start in range(0, new.numel(), self._block_bytes):
            stop = min(start + self._block_bytes, new.numel())
            yield start, stop, word_bytes_of(tensors, start, stop)


def _encode(old: Tensor, new: Tensor, word_bytes: WordBytes, held: memoryview | None) -> bytes:
    """Return what encode_block() returns for this block."""
    if new.numel() < MIN_BLOCK_BYTES or new.numel() % word_bytes:
        return _encode_on_host(old, new, word_bytes, held)
    pattern = _PATTERNS[word_bytes]
    old_words, new_words = old.view(pattern), new.view(pattern)
    found = torch.nonzero(old_words != new_words).flatten()
    if not found.numel():
        return bytes([UNCHANGED])
    if found.numel() > most_sparse(new_words.numel()):
        return _encode_on_host(old, new, word_bytes, held)
    steps = _to_host(new_words[found] - old_words[found]).view(f"<u{word_bytes}")
    where = _to_host(found.to(torch.int32)).astype(np.int64)
    return encode_changes(where, steps)


def _encode_on_host(
    old: Tensor, new: Tensor, word_bytes: WordBytes, held: memoryview | None
) -> bytes:
    base = _to_host(old).data if held is None else held
    return encode_block(base, _to_host(new).data, word_bytes=word_bytes)


def _to_host(tensor: Tensor) -> npt.NDArray[Any]:
    return tensor.cpu().numpy()
