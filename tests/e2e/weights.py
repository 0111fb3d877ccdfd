"""The bytes of a published version, made without echo and without torch.

Layout of an image, from echo/engine/weights.py: the tensors sorted by name, rounded to bfloat16 (to
nearest even), one after the other, each at a multiple of 16 bytes, zeros between.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from blake3 import blake3

ALIGNMENT_BYTES = 16
CHUNK_BYTES = 16 << 10
"""As in the configuration of `cluster.py`."""


def image_hash(path: Path) -> str:
    """Return the hash of the image that the float32 or bfloat16 tensors of a file make.

    It is that of the hashes of its chunks.
    """
    data = path.read_bytes()
    header_bytes = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + header_bytes])
    header.pop("__metadata__", None)
    image = bytearray()
    for _, tensor in sorted(header.items()):
        start, end = tensor["data_offsets"]
        raw = data[8 + header_bytes + start : 8 + header_bytes + end]
        image += bytes(-len(image) % ALIGNMENT_BYTES)
        image += raw if tensor["dtype"] == "BF16" else _to_bfloat16(raw)
    chunks = (image[start : start + CHUNK_BYTES] for start in range(0, len(image), CHUNK_BYTES))
    return blake3(b"".join(blake3(bytes(chunk)).digest() for chunk in chunks)).hexdigest()


def _to_bfloat16(raw: bytes) -> bytes:
    """Round finite float32 values to nearest even."""
    bits = np.frombuffer(raw, dtype="<u4").astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").tobytes()
