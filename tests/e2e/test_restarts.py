"""A relay is killed while an anchor comes over a slow link: what had come does not come again."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import pytest

from tests.e2e.cluster import Cluster
from tests.e2e.slow_link import SlowLink

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

CHUNK_BYTES = 4096
RATE = 80_000.0
"""Bytes per second at which the anchor, some 160 kB, takes two seconds."""
HELD_AFTER = 110_000
"""Bytes after which the link is held, so that the anchor has a middle: of it, and all else."""
OVERHEAD_BYTES = 32_000
"""Handshakes, the learner's answers, heartbeats and tables: what else comes over the link."""


@pytest.fixture
def link(cluster: Cluster) -> Iterator[SlowLink]:
    """Return a slow link to the learner, which tells everybody to come that way."""
    link = SlowLink(int(cluster.learner_address.rpartition(":")[2]), bytes_per_s=RATE)
    yield link
    link.close()


def test_an_anchor_is_gone_on_with_after_a_kill(cluster: Cluster, link: SlowLink) -> None:
    address = f"tcp://127.0.0.1:{link.port}"
    cluster.settings = {
        "network.chunk_bytes": CHUNK_BYTES,
        "network.codec": "delta",
    }
    arenas = cluster.directory / "arenas"
    key = cluster.join.partition("#")[2]
    of_relay = {"network.store_dir": str(arenas), "relay.connect": [f"{address}#{key}"]}
    learner = cluster.start("learner", settings={"learner.advertise": address})
    cluster.wait_for(lambda: cluster.records("published"), "a version", alive=learner)
    link.hold_after(HELD_AFTER)
    relay = cluster.start("relay", name="r1", settings=of_relay)

    def journal_bytes() -> int:
        return sum(path.stat().st_size for path in arenas.glob("*-anchor-*.parcel"))

    cluster.wait_for(lambda: journal_bytes() > 60_000, "a third of the anchor", alive=learner)
    relay.kill()
    assert "holds v0" not in cluster.log("r1"), "it was too fast to show anything"
    num_down = link.num_down

    link.hold_after(math.inf)
    relay = cluster.start("relay", name="r1", settings=of_relay)

    cluster.wait_for(lambda: "holds v0" in cluster.log("r1"), "the rest", alive=relay)
    again_bytes = link.num_down - num_down
    (found,) = re.findall(r"found v0 as anchor: (\d+) of (\d+) chunks are right", cluster.log("r1"))
    num_right, num_chunks = map(int, found)
    assert 50_000 / CHUNK_BYTES < num_right < num_chunks
    missing_bytes = journal_bytes() - num_right * CHUNK_BYTES
    assert missing_bytes < again_bytes < missing_bytes + OVERHEAD_BYTES
    assert num_right * CHUNK_BYTES > OVERHEAD_BYTES, "too little to tell"
