"""Which size of word a block of an image is coded in."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Sequence

from echo.delta.blocks import WordBytes
from echo.protocol.manifest import TensorSpec

_FLOAT_BYTES: dict[str, WordBytes] = {"float32": 4, "bfloat16": 2, "float16": 2}


def word_bytes_of(tensors: Sequence[TensorSpec], start: int, stop: int) -> WordBytes:
    """Return the size of the floats that most bytes of [start, stop) belong to.

    A block may span tensors of several dtypes. It is coded in one size of word, which concerns
    its length only, never its content. Tensors of other dtypes count as bytes; of equal shares
    the larger word wins.

    Args:
        tensors: what lies where in the image, in order of offset.
        start: first byte of the block in the image.
        stop: the byte after its last.
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
