"""Simulated versions have the size that was asked for, in full and as deltas; each lies once."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo.core.rollout import PolicyVersion
from echo.runtime.identity import Identity
from echo.sim.versions import CHUNK_BYTES, SharedStore, Versions
from echo.weights.broadcast import Broadcast

MB = 1e6


def make_versions(image_bytes: float | None) -> Versions:
    return Versions(
        identity=Identity("r", Ed25519PrivateKey.from_private_bytes(b"k" * 32)),
        num_chunks=8,
        version_bytes=80 * MB,
        image_bytes=image_bytes,
    )


def test_without_deltas_each_version_is_an_image_of_so_many_chunks() -> None:
    versions = make_versions(None)
    first, second = (versions.make({}, PolicyVersion(1, step)) for step in (0, 1))
    manifest = versions.seal(second).manifest
    assert (manifest.num_chunks, manifest.num_bytes * versions.scale) == (8, 80 * MB)
    assert second.image != first.image


@pytest.mark.parametrize("ratio", [2, 30, 100])
def test_a_delta_has_so_many_chunks_and_the_image_its_own_size(ratio: int) -> None:
    versions = make_versions(ratio * 80 * MB)
    broadcast = Broadcast(node_id="learner", window_bytes=1, stall_s=1.0)
    for step in range(2):
        made = versions.seal(versions.make({}, PolicyVersion(1, step)))
        assert made.signed is not None
        broadcast.publish(made.signed, made.manifest, made.image, now=float(step))
    made = versions.make({}, PolicyVersion(1, 2))
    assert made.manifest.num_bytes * versions.scale == pytest.approx(ratio * 80 * MB, rel=0.01)
    assert versions.seal(made).manifest.num_chunks == 8
    [delta] = versions.segments(made, broadcast.store[PolicyVersion(1, 1)])
    assert len(delta.payload) * versions.scale == pytest.approx(80 * MB, rel=0.05)
    assert len(delta.payload) / CHUNK_BYTES == pytest.approx(8, abs=1)
    assert delta.table.base == PolicyVersion(1, 1)


def test_an_image_is_shared_and_forgotten_with_its_last_holder() -> None:
    version_store = SharedStore()
    first = version_store.create(PolicyVersion(1, 0), b"", 8)
    second = version_store.create(PolicyVersion(1, 0), b"", 8)
    assert first is second
    assert version_store.create(PolicyVersion(1, 1), b"", 8) is not first
    assert len(version_store) == 1
    version_store.drop(PolicyVersion(1, 0))
    del first
    assert len(version_store) == 1  # the other node reads it
    del second
    assert len(version_store) == 0
