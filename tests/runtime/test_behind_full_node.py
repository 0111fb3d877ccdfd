from __future__ import annotations

import pytest

from echo.core.rollout import PolicyVersion
from echo.runtime.disk_store import MemoryStore
from tests.runtime.fleet import IMAGE_BYTES, Fleet, play


@pytest.mark.parametrize("codec", ["auto", "full"])
def test_a_node_behind_one_without_room_finds_another_parent(
    codec: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(fleet: Fleet) -> None:
        await fleet.join("a")
        await fleet.join("b", version_store=MemoryStore(2 * IMAGE_BYTES))
        await fleet.join("c")
        await fleet.publish(2)
        await fleet.publish(arrive=False)
        await fleet.arrived("a")
        await fleet.until(lambda: "keeping the versions" in caplog.text, "b says so")
        newest = PolicyVersion(1, 2)
        held = fleet.relays["c"].broadcast
        # It leaves a parent only after several silences, and may have to leave two.
        await fleet.until(lambda: held.newest_complete == newest, "c has v2")

    play("memory", scenario, codec=codec, is_patient=False)
