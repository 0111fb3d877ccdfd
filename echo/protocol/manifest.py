"""What a version of the weights consists of."""

from __future__ import annotations

import msgspec


class TensorSpec(msgspec.Struct, frozen=True):
    """One tensor inside a version's byte image."""

    name: str
    dtype: str
    """"bfloat16", "float32", "float16" or another numpy name."""
    shape: tuple[int, ...]
    offset: int
    """Byte offset in the image."""
    num_bytes: int
