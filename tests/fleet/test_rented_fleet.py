"""Time and price of a fleet by hand: streams, hops, relays, traffic, losses."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fleet.fleets import JOB, make_fleet, make_offer, random_case


def test_nodes_that_cannot_listen_share_the_uplink() -> None:
    # 100 MB to two nodes over 20 MB/s: two streams of 10 MB/s take 10 s; to one 5 s.
    fleet = make_fleet(make_offer("leaf"), uplink=2e7)
    assert fleet.learner_streams([2]) == 2
    assert fleet.broadcast_s(JOB, [2]) == 10.0
    assert fleet.broadcast_s(JOB, [1]) == 5.0
    assert fleet.broadcast_s(JOB, [0]) == 0.0


def test_nodes_that_listen_pass_weights_on_chunk_by_chunk() -> None:
    # One stream of 20 MB/s takes 5 s; each further node adds a chunk of 1 MB at 100 MB/s.
    fleet = make_fleet(make_offer("peer", can_listen=True), uplink=2e7)
    assert fleet.learner_streams([4]) == 1
    assert fleet.broadcast_s(JOB, [4]) == pytest.approx(5.03)
    # A slow uplink of the peers slows the chain: 100 MB at 10 MB/s.
    slow = make_fleet(make_offer("peer", can_listen=True, up_bytes_per_s=1e7), uplink=2e7)
    assert slow.broadcast_s(JOB, [1]) == 10.0


def test_a_relay_takes_one_stream_and_serves_its_region() -> None:
    # The learner sends once (0.1 s); the relay serves four leaves with 25 MB/s: 16 s and one hop.
    fleet = make_fleet(
        make_offer("leaf"), relay_bytes_per_s=2.5e7, relay_price_per_h=0.5, latency_s=0.2
    )
    assert fleet.learner_streams([4]) == 1
    assert fleet.broadcast_s(JOB, [4]) == pytest.approx(16 + 0.2 + 0.01)
    assert fleet.rent_per_h([4]) == 4.5
    assert fleet.rent_per_h([0]) == 0.0


def test_traffic_by_hand() -> None:
    # 0.1 GB to three leaves: 3 x 0.1 x (0.10 from the learner + 0.02 at the node) = $0.036.
    fleet = make_fleet(make_offer("leaf", price_per_gb=0.02), price_per_gb=0.1)
    assert fleet.publication_cost(JOB, [3]) == pytest.approx(0.036)
    # 3 rollouts/s of 100 tokens of 17 bytes at $0.02 per GB.
    assert fleet.upload_cost_per_s(JOB, [3]) == pytest.approx(3 * 1700 / 1e9 * 0.02)
    # A publication every 10 s: 360 per hour.
    per_h = 3 + 360 * 0.036 + 3600 * 3 * 1700 / 1e9 * 0.02
    assert fleet.cost_per_h(JOB, [3]) == pytest.approx(per_h)
    # Nodes that listen take one stream: 0.1 x 0.10 + 3 x 0.1 x 0.02.
    chain = make_fleet(make_offer("p", can_listen=True, price_per_gb=0.02), price_per_gb=0.1)
    assert chain.publication_cost(JOB, [3]) == pytest.approx(0.016)
    relayed = make_fleet(make_offer("leaf"), price_per_gb=0.1, relay_bytes_per_s=1e9)
    assert relayed.publication_cost(JOB, [3]) == pytest.approx(0.01)


def test_a_spot_node_loses_time_and_rollouts() -> None:
    # Lost once an hour, back after 400 s: it works 0.9 of the time; each loss costs half of 4.
    offer = make_offer("spot", losses_per_h=1.0, restart_s=400.0)
    assert offer.availability == pytest.approx(0.9)
    assert offer.rollouts_per_s(JOB) == pytest.approx(0.9 - 2 / 3600)


def test_a_group_takes_as_long_as_its_longest_rollout() -> None:
    # 4 sequences share 100 tokens/s: 25 tokens/s each, 100 tokens in 4 s.
    assert make_offer("any").group_latency_s(JOB) == 4.0
    fleet = make_fleet(make_offer("fast"), make_offer("slow", tokens_per_s=50.0))
    assert fleet.latency_s(JOB, [1, 0]) == 4.0
    assert fleet.latency_s(JOB, [1, 1]) == 8.0
    assert fleet.latency_s(JOB, [0, 0]) == 0.0


@given(seed=st.integers(0, 10_000), factor=st.floats(1.0, 4.0))
def test_more_bandwidth_never_lengthens_a_broadcast_and_more_nodes_never_shorten_it(
    seed: int, factor: float
) -> None:
    fleet, job = random_case(seed)
    counts = [offer.count for offer in fleet.offers]
    before = fleet.broadcast_s(job, counts) * (1 + 1e-12)
    wide = replace(fleet, uplink_bytes_per_s=factor * fleet.uplink_bytes_per_s)
    assert wide.broadcast_s(job, counts) <= before
    offers = tuple(
        replace(offer, down_bytes_per_s=factor * offer.down_bytes_per_s) for offer in fleet.offers
    )
    assert replace(fleet, offers=offers).broadcast_s(job, counts) <= before
    for index, count in enumerate(counts):
        fewer = [*counts[:index], count // 2, *counts[index + 1 :]]
        assert fleet.broadcast_s(job, fewer) <= before
