"""Simulated versions have the size that was asked for; each lies once."""

from __future__ import annotations

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo.core.rollout import PolicyVersion
from echo.runtime.identity import Identity
from echo.sim.versions import SharedStore, Versions

MB = 1e6


def test_each_version_is_an_image_of_so_many_chunks() -> None:
    identity = Identity("r", Ed25519PrivateKey.from_private_bytes(b"k" * 32))
    versions = Versions(identity=identity, num_chunks=8, version_bytes=80 * MB)
    first, second = (versions.make({}, PolicyVersion(1, step)) for step in (0, 1))
    manifest = versions.seal(second).manifest
    assert (manifest.num_chunks, manifest.num_bytes * versions.scale) == (8, 80 * MB)
    assert second.image != first.image


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
