"""A disk slower than the link: the node goes on as before, and only its own versions come late.

Nodes, sessions, ZeroMQ with CURVE and file version stores are the real ones; below them `write`
waits.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from bench.publishing import ForcedPlanning
from echo.runtime.disk_store import DiskStore
from echo.wire.codec import Frame
from tests.runtime.fleet import IMAGE_BYTES, NUM_CHUNKS, Fleet, play

pytestmark = pytest.mark.slow

LIMIT = 4 * IMAGE_BYTES
WRITE_S = 0.15
"""What one chunk takes: the disk takes 0.9 MB/s per thread."""
HANGS_S = 30.0
"""After which a disk that stands still goes on, so that a loop that waits for it fails its test."""


class SlowStore(DiskStore):
    """Version stores on a disk that takes its time."""

    def write(self, place: memoryview, data: Frame) -> None:
        time.sleep(WRITE_S)
        super().write(place, data)


class Pulse:
    """A task that only wants to run often, and notes how long it had to wait."""

    def __init__(self) -> None:
        self.largest_gap_s = 0.0
        self._task = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        last = time.monotonic()
        while True:
            await asyncio.sleep(0.01)
            now = time.monotonic()
            self.largest_gap_s, last = max(self.largest_gap_s, now - last), now

    async def end(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def starred(scenario: Callable[[Fleet], Awaitable[None]]) -> Callable[[Fleet], Awaitable[None]]:
    """Let all relays take full images from the learner."""

    async def play_it(fleet: Fleet) -> None:
        fleet.session.planning = ForcedPlanning(fleet.session.planning, "star")
        await scenario(fleet)

    return play_it


@pytest.mark.matrix
def test_a_version_comes_at_the_pace_of_the_disk(tmp_path: Path) -> None:
    async def scenario(fleet: Fleet) -> None:
        await fleet.join("slow", version_store=SlowStore(tmp_path, LIMIT))
        await fleet.join("fast")
        pulse = Pulse()
        begun_at = time.monotonic()
        await fleet.publish(arrive=False)
        await fleet.arrived("fast")
        slow = fleet.relays["slow"]
        assert slow.share < 1.0, "it has come to the fast one alone"
        await fleet.arrived()
        took_s = time.monotonic() - begun_at
        await fleet.publish()
        await pulse.end()
        assert pulse.largest_gap_s < took_s / 2
        assert slow.parent == "learner"
        assert slow.broadcast.bytes_received == 2 * IMAGE_BYTES

    play("zmq", starred(scenario), codec="full")
    assert NUM_CHUNKS * WRITE_S > 4.0, "or the disk is too fast to tell"
