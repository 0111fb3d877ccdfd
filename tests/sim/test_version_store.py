"""Equal images lie in one place, for as long as somebody holds them."""

from __future__ import annotations

from echo.core.rollout import PolicyVersion
from echo.sim.version_store import SharedStore


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
