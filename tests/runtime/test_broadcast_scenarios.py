"""What the broadcast promises where nodes come, go, fail and lie, over either transport."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from itertools import chain
from pathlib import Path

import pytest

from bench.publishing import ForcedPlanning
from echo.core.rollout import PolicyVersion
from echo.runtime.disk_store import DiskStore, MemoryStore
from echo.wire.codec import Frame
from tests.runtime.fleet import CHUNK_BYTES, IMAGE_BYTES, NUM_CHUNKS, Fleet, play

SLACK_BYTES = 2 * CHUNK_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["memory", "zmq"])
def test_a_chain_of_four_passes_versions_on(kind: str) -> None:
    async def scenario(fleet: Fleet) -> None:
        await fleet.join("a", "b", "c", "d")
        assert [relay.parent for relay in fleet.relays.values()] == ["learner", "a", "b", "c"]
        await fleet.publish(3)
        # The first version in full or as a keyframe, the others as deltas, each once to a.
        assert fleet.session.broadcast.bytes_sent < 1.3 * IMAGE_BYTES
        assert len(fleet.encoded_versions.coded_bytes) == 2
        for relay in fleet.relays.values():
            assert relay.broadcast.bytes_received < 1.3 * IMAGE_BYTES
            assert relay.broadcast.num_duplicate_chunks == 0
            # Over real links every chunk comes outside of their encryption, having its own.
            assert relay.uplink.num_chunks[kind != "zmq"] == 0
            assert relay.uplink.num_chunks[kind == "zmq"] > NUM_CHUNKS // 2

    play(kind, scenario)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["memory", pytest.param("zmq", marks=pytest.mark.matrix)])
@pytest.mark.matrix
def test_two_stripes_come_from_two_parents(kind: str) -> None:
    async def scenario(fleet: Fleet) -> None:
        await fleet.join("a", "b", "c", "d")
        await fleet.publish(3)
        assert all(relay.parent.count(",") == 1 for relay in fleet.relays.values())
        assert any(len(set(relay.parent.split(","))) == 2 for relay in fleet.relays.values())
        # The learner sends each chunk once: each stripe to one node.
        assert fleet.session.broadcast.bytes_sent < 3.5 * IMAGE_BYTES
        for relay in fleet.relays.values():
            assert relay.broadcast.num_duplicate_chunks <= 1

    play(kind, scenario, num_stripes=2, codec="full")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["memory", pytest.param("zmq", marks=pytest.mark.matrix)])
@pytest.mark.parametrize(
    ("way", "codec", "num_stripes"),
    [
        ("killed", "auto", 2),
        pytest.param("killed", "full", 1, marks=pytest.mark.matrix),
        pytest.param("silent", "auto", 2, marks=pytest.mark.matrix),
    ],
)
def test_a_spare_takes_over_from_a_parent_that_fails(
    kind: str, way: str, codec: str, num_stripes: int
) -> None:
    async def scenario(fleet: Fleet) -> None:
        await fleet.join("a", "b", "c", "d")
        fleet.pace()
        await fleet.publish(arrive=False)
        lost = next(
            name
            for name in fleet.relays
            if any(name in relay.parent.split(",") for relay in fleet.relays.values())
        )
        children = [r for r in fleet.relays.values() if lost in r.parent.split(",")]
        await fleet.until(lambda: all(0.2 < r.share < 0.8 for r in children), "the middle")
        if way == "killed":
            await fleet.kill(lost)
        else:
            fleet.relays.pop(lost).uplink.is_cut = True
        await fleet.arrived()
        for relay in fleet.relays.values():
            assert lost not in relay.parent.split(",")
            # Besides, what is late may come twice: it was asked for again while it was under way.
            # So it is where the version has two forms: a parent that has not yet heard of the one
            # that its child has turned to denies it, and the other parent is asked for all of it.
            is_late = way == "silent" or codec == "auto"
            assert relay.broadcast.num_duplicate_chunks <= (NUM_CHUNKS // 4 if is_late else 2)
            assert relay.broadcast.num_bad_chunks == 0
        await fleet.publish()

    play(kind, scenario, num_stripes=num_stripes, codec=codec, is_patient=way == "killed")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["memory", pytest.param("zmq", marks=pytest.mark.matrix)])
@pytest.mark.matrix
def test_who_sends_wrong_bytes_serves_nobody_any_more(kind: str) -> None:
    async def scenario(fleet: Fleet) -> None:
        await fleet.join("a", "b", "c")
        await fleet.publish()
        parents = {relay.parent for relay in fleet.relays.values()} - {"learner"}
        if not parents:
            pytest.fail("the plan has no relay that serves another")
        liar = min(parents)
        fleet.relays[liar].uplink.is_corrupt = True
        await fleet.publish(2)
        deceived = [relay for relay in fleet.relays.values() if relay.broadcast.num_bad_chunks]
        assert deceived
        for relay in deceived:
            assert relay.node.session.stats().suspects == (liar,)

        def is_leaf() -> bool:
            plans = [member.node.plan for member in fleet.session.roster.members()]
            return all(liar != name for plan in plans for name, _ in chain(*plan.stripes))

        await fleet.until(is_leaf, "the plan knows it")
        await fleet.until(fleet.is_planned, "all follow the plan")
        await fleet.publish()

    play(kind, scenario, num_stripes=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["memory", pytest.param("zmq", marks=pytest.mark.matrix)])
def test_a_node_without_room_keeps_what_it_has_and_goes_on_later(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(fleet: Fleet) -> None:
        version_store = MemoryStore(2 * IMAGE_BYTES)
        await fleet.join("a")
        await fleet.join("b", version_store=version_store)
        await fleet.publish(2)
        await fleet.publish(arrive=False)
        await fleet.arrived("a")
        await fleet.until(lambda: "keeping the versions" in caplog.text, "b says so")
        assert "network.store_bytes" in caplog.text
        full = fleet.relays["b"].broadcast
        assert full.newest_complete.step == 1
        assert full.store[full.newest_complete].storage == fleet.published[1]
        version_store.limit_bytes *= 2
        await fleet.publish()

    play(kind, scenario)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["memory", pytest.param("zmq", marks=pytest.mark.matrix)])
def test_a_node_behind_one_without_room_finds_another_parent(
    kind: str, caplog: pytest.LogCaptureFixture
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

    play(kind, scenario, is_patient=False)


# --- a slow disk ----------------------------------------------------------------------------------


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


@pytest.mark.slow
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
