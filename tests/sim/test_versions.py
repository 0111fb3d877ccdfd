"""Simulated versions have the size that was asked for, in full and as deltas."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo.core.rollout import PolicyVersion
from echo.sim.versions import CHUNK_BYTES, Versions
from echo.weights.broadcast import Broadcast
from echo.wire.messages import Form

MB = 1e6


def make_versions(image_bytes: float | None) -> Versions:
    return Versions(
        run_id="r",
        key=Ed25519PrivateKey.from_private_bytes(b"k" * 32),
        num_chunks=8,
        version_bytes=80 * MB,
        image_bytes=image_bytes,
    )


def test_without_deltas_each_version_is_an_image_of_so_many_chunks() -> None:
    versions = make_versions(None)
    broadcast = Broadcast(node_id="learner", window_bytes=1, stall_s=1.0)
    versions.publish(broadcast, PolicyVersion(1, 0), now=0.0)
    versions.publish(broadcast, PolicyVersion(1, 1), now=1.0)
    image = broadcast.store[PolicyVersion(1, 1)]
    assert (image.num_chunks, image.num_bytes * versions.scale) == (8, 80 * MB)
    assert bytes(image.storage) != bytes(broadcast.store[PolicyVersion(1, 0)].storage)
    assert not broadcast.encoded_versions


@pytest.mark.parametrize("ratio", [2, 30, 100])
def test_a_delta_has_so_many_chunks_and_the_image_its_own_size(ratio: int) -> None:
    versions = make_versions(ratio * 80 * MB)
    broadcast = Broadcast(node_id="learner", window_bytes=1, stall_s=1.0)
    for step in range(3):
        versions.publish(broadcast, PolicyVersion(1, step), now=float(step))
    newest = PolicyVersion(1, 2)
    delta = broadcast.encoded_versions[newest, Form("delta", PolicyVersion(1, 1))]
    assert delta.num_bytes * versions.scale == pytest.approx(80 * MB, rel=0.05)
    assert delta.num_chunks in (7, 8, 9)
    image = broadcast.store[newest]
    assert image.num_bytes * versions.scale == pytest.approx(ratio * 80 * MB, rel=0.01)
    assert image.num_chunks == 8
    assert delta.chunk_size(0) == CHUNK_BYTES
    # The plan is made for what travels as a rule.
    assert broadcast.payload is delta
