"""The network on paper: arithmetic of one link, seeds, cuts, and order for any history."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo.sim.network import Link, Network


def arrivals(network: Network[object]) -> list[tuple[float, object]]:
    return [(packet.arrives_at, packet.payload) for packet in network.deliver(math.inf)]


def test_a_packet_arrives_after_rate_and_delay() -> None:
    network: Network[object] = Network(default=Link(delay_s=0.5, bytes_per_s=100.0))
    # 50 bytes leave in 0.5 s and travel 0.5 s; the second waits for the first to leave.
    assert network.send("a", "b", "first", num_bytes=50, now=10.0) == 11.0
    assert network.send("a", "b", "second", num_bytes=100, now=10.0) == 12.0
    assert network.next_at == 11.0
    assert network.deliver(10.9) == []
    assert [packet.payload for packet in network.deliver(11.0)] == ["first"]
    assert arrivals(network) == [(12.0, "second")]
    assert network.next_at is None


def test_an_idle_link_saves_no_time_up() -> None:
    network: Network[object] = Network(default=Link(bytes_per_s=100.0))
    network.send("a", "b", 1, num_bytes=100, now=0.0)
    assert network.send("a", "b", 2, num_bytes=100, now=50.0) == 51.0


def test_directions_and_links_are_separate() -> None:
    network: Network[object] = Network()
    network.set_link("a", "b", Link(bytes_per_s=1.0, delay_s=5.0))
    assert network.send("a", "b", 1, num_bytes=10, now=0.0) == 15.0
    assert network.send("b", "a", 2, num_bytes=10, now=0.0) == 0.0
    assert network.send("a", "c", 3, num_bytes=10, now=0.0) == 0.0


def test_packets_of_one_instant_arrive_in_the_order_sent() -> None:
    network: Network[object] = Network()
    for number in range(10):
        network.send("abc"[number % 3], "d", number, num_bytes=1, now=1.0)
    assert [payload for _, payload in arrivals(network)] == list(range(10))


def test_loss_takes_its_share_and_the_seed_decides_which() -> None:
    def lost(seed: int) -> list[int]:
        network: Network[object] = Network(seed=seed, default=Link(loss=0.3))
        return [i for i in range(2000) if network.send("a", "b", i, num_bytes=1, now=0.0) is None]

    assert lost(1) == lost(1) != lost(2)
    assert len(lost(1)) == pytest.approx(600, abs=80)
    always: Network[object] = Network(default=Link(loss=1.0))
    assert always.send("a", "b", 1, num_bytes=1, now=0.0) is None


def test_traffic_elsewhere_does_not_change_a_links_fortune() -> None:
    def fortune(is_busy: bool) -> list[float | None]:
        network: Network[object] = Network(seed=3, default=Link(loss=0.5, jitter_s=1.0))
        history = []
        for number in range(50):
            if is_busy:
                network.send("c", "d", number, num_bytes=1, now=float(number))
            history.append(network.send("a", "b", number, num_bytes=1, now=float(number)))
        return history

    assert fortune(is_busy=False) == fortune(is_busy=True)


def test_a_cut_takes_what_is_in_flight_and_what_follows_until_mended() -> None:
    network: Network[object] = Network(default=Link(delay_s=1.0))
    network.send("a", "b", "lost", num_bytes=1, now=0.0)
    network.send("b", "a", "lost too", num_bytes=1, now=0.0)
    network.send("a", "c", "kept", num_bytes=1, now=0.0)
    assert [packet.payload for packet in network.cut("b", "a")] == ["lost", "lost too"]
    assert network.send("a", "b", "refused", num_bytes=1, now=0.5) is None
    assert arrivals(network) == [(1.0, "kept")]
    network.mend("a", "b")
    assert network.send("a", "b", "back", num_bytes=1, now=2.0) == 3.0


def test_a_partition_splits_groups_and_heals() -> None:
    network: Network[object] = Network(default=Link(delay_s=1.0))
    network.send("a", "c", "lost", num_bytes=1, now=0.0)
    assert [packet.payload for packet in network.partition(["a", "b"], ["c"])] == ["lost"]
    assert not network.is_cut("a", "b")
    assert network.is_cut("a", "c")
    assert network.is_cut("c", "unnamed")
    assert not network.is_cut("unnamed", "unnamed too")
    assert not network.is_cut("c", "c")
    network.heal()
    assert not network.is_cut("a", "c")
    with pytest.raises(ValueError, match="more than one group"):
        network.partition(["a"], ["a", "b"])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"delay_s": -1.0}, "delay_s"),
        ({"jitter_s": math.inf}, "jitter_s"),
        ({"loss": 1.5}, "probability"),
        ({"bytes_per_s": 0.0}, "cut it"),
        ({"bytes_per_s": math.nan}, "cut it"),
    ],
)
def test_an_impossible_link_is_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Link(**settings)


@given(
    seed=st.integers(0, 2**32),
    link=st.builds(
        Link,
        delay_s=st.floats(0, 2),
        jitter_s=st.floats(0, 2),
        loss=st.floats(0, 0.9),
        bytes_per_s=st.floats(1, 1e9),
    ),
    sends=st.lists(
        st.tuples(st.sampled_from(["ab", "ba", "ac"]), st.floats(0, 1), st.integers(0, 1000)),
        max_size=40,
    ),
)
def test_each_link_keeps_order_and_delivers_each_packet_once(
    seed: int, link: Link, sends: list[tuple[str, float, int]]
) -> None:
    network: Network[object] = Network(seed=seed, default=link)
    now = 0.0
    expected: dict[str, list[int]] = {"ab": [], "ba": [], "ac": []}
    for number, (route, pause_s, num_bytes) in enumerate(sends):
        now += pause_s
        arrives_at = network.send(route[0], route[1], number, num_bytes=num_bytes, now=now)
        if arrives_at is not None:
            assert arrives_at >= now + link.delay_s
            expected[route].append(number)
    packets = network.deliver(math.inf)
    times = [packet.arrives_at for packet in packets]
    assert times == sorted(times)
    for route, numbers in expected.items():
        taken = [p.payload for p in packets if p.source + p.destination == route]
        assert taken == numbers
