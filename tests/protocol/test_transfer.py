"""Room for an image takes chunks in any order and gives them out again without copying."""

from __future__ import annotations

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo.core.rollout import PolicyVersion
from echo.weights.manifest import build_manifest, sign
from echo.weights.store import Transfer, allocate

IMAGE = bytes(range(256)) * 10
CHUNK_BYTES = 1024


def make_transfer() -> Transfer:
    manifest = build_manifest(
        run_id="run",
        version=PolicyVersion(1, 1),
        model_digest="",
        tensors=[],
        image=IMAGE,
        chunk_bytes=CHUNK_BYTES,
    )
    signed = sign(manifest, Ed25519PrivateKey.generate())
    return Transfer(signed, manifest, allocate(len(IMAGE)), bytearray(manifest.num_chunks))


def test_a_new_storage_fills_chunk_by_chunk_whatever_their_order_and_their_type() -> None:
    transfer = make_transfer()
    assert len(transfer.storage) == len(IMAGE)
    assert transfer.missing() == ((0, 3),)
    transfer.hold(2, bytearray(IMAGE[2048:]))  # shorter than the others
    transfer.hold(0, memoryview(IMAGE)[:1024])
    assert transfer.missing() == ((1, 2),)
    assert not transfer.is_complete
    transfer.hold(1, IMAGE[1024:2048])
    assert transfer.is_complete
    assert transfer.storage == IMAGE


def test_a_chunk_is_a_view_that_nobody_can_write_to() -> None:
    transfer = make_transfer()
    transfer.hold(1, IMAGE[1024:2048])
    chunk = transfer.chunk(1)
    assert chunk.readonly
    assert chunk == IMAGE[1024:2048]
    transfer.storage[1024] ^= 0xFF
    assert chunk != IMAGE[1024:2048]  # the same memory
