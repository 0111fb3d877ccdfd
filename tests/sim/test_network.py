"""Simulated links: times that follow from rate and latency, order, cuts, ends, NAT."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from typing import Any

import pytest

from echo.sim.network import FRAMING_BYTES, LinkEnd, Network, Port, Route

BULK = 1_000_000


class Clock:
    """The present, and what is to happen when."""

    def __init__(self) -> None:
        self.now = 0.0
        self._serial = 0
        self._events: list[tuple[float, int, Any, tuple[Any, ...]]] = []

    def at(self, instant: float, call: Any, *arguments: Any) -> None:
        self._serial += 1
        heapq.heappush(self._events, (max(instant, self.now), self._serial, call, arguments))

    def run(self, until: float = math.inf) -> None:
        """Let time pass up to `until`, or until nothing is left to do."""
        events = self._events
        while events and events[0][0] <= until:
            self.now, _, call, arguments = heapq.heappop(events)
            call(*arguments)
        if math.isfinite(until):
            self.now = max(self.now, until)


class TimedNetwork(Network):
    """A network whose time a test lets pass."""

    def __init__(self, clock: Clock, **settings: Any) -> None:
        super().__init__(**settings)
        self.clock = clock

    @property
    def now(self) -> float:
        return self.clock.now

    def at(self, instant: float, call: Any, *arguments: Any) -> None:
        self.clock.at(instant, call, *arguments)


@dataclass(eq=False)
class Node:
    """A client that takes down what it is told."""

    port: Port
    clock: Clock
    heard: list[tuple[float, str, Any]] = field(default_factory=list)

    def on_connected(self, end: LinkEnd) -> None:
        self.heard.append((self.clock.now, "up", end))

    def on_refused(self, end: LinkEnd, reason: str) -> None:
        self.heard.append((self.clock.now, "refused", reason))

    def on_disconnected(self, end: LinkEnd, reason: str) -> None:
        self.heard.append((self.clock.now, "down", reason))

    def on_message(self, end: LinkEnd, frames: list[Any]) -> None:
        self.heard.append((self.clock.now, "message", frames[0]))

    def messages(self) -> list[tuple[float, Any]]:
        return [(round(at, 4), what) for at, kind, what in self.heard if kind == "message"]


class Groups:
    """Groups of 5 MB."""

    def num_bytes(self, header: Any) -> float:
        return 5e6


class Net:
    """A learner in its own region and nodes in another, 10 MB/s and 100 ms away.

    It is not one of the worlds of nodes (promises, weights, e2e), because nothing of Echo runs on
    these links: their clients only note what arrives and when.
    """

    def __init__(self, **route: Any) -> None:
        self.clock = Clock()
        self.network = TimedNetwork(self.clock, seed=1, weight_scale=1000.0, groups=Groups())
        settings = {"bytes_per_s": 10e6, "latency_s": 0.1}
        self.network.add_region("far", Route(**(settings | route)))
        self.learner = self.node("learner", "home", address="tcp://learner:1")

    def node(self, name: str, region: str = "far", **port: Any) -> Node:
        node = Node(Port(name, region, dead_after_s=3.0, **port), self.clock)
        self.network.listen(node)
        return node

    def link(self, node: Node) -> LinkEnd:
        end = self.network.dial(node, "tcp://learner:1")
        self.clock.run(self.clock.now + 1.0)
        return end


def test_bulk_takes_its_bytes_at_the_rate_of_one_stream_and_small_ones_the_latency() -> None:
    net = Net()
    node = net.node("a")
    end = net.link(node)
    net.network.send(end, [b"x" * (BULK - FRAMING_BYTES)])
    net.network.send(end, [b"y"])
    net.clock.run(5.0)
    # Nothing is overtaken within a connection.
    assert net.learner.messages() == [(1.2, b"x" * (BULK - FRAMING_BYTES)), (1.2, b"y")]


def test_children_share_an_uplink_and_parents_a_downlink() -> None:
    net = Net(bytes_per_s=1e9, latency_s=0.0)
    nodes = [net.node(name, up_bytes_per_s=4e6) for name in "ab"]
    net.learner.port.down_bytes_per_s = 4e6
    ends = [net.link(node) for node in nodes]
    for _ in range(2):
        net.network.send(ends[0], [b"x" * BULK])
    net.network.send(ends[1], [b"y" * BULK])
    net.clock.run(10.0)
    at = [round(at, 2) for at, _ in net.learner.messages()]
    # a's uplink takes .25 s for each; the learner's downlink takes .25 s for each of three.
    assert at == pytest.approx([2.25, 2.5, 2.75], abs=0.01)


def test_a_parent_serves_its_children_one_after_the_other() -> None:
    net = Net(bytes_per_s=1e9, latency_s=0.0)
    nodes = [net.node(name) for name in "abc"]
    ends = [net.link(node) for node in nodes]
    net.learner.port.up_bytes_per_s = 4e6
    for end in ends:
        net.network.send(end.far, [b"x" * BULK])
    net.clock.run(10.0)
    at = [node.messages()[0][0] for node in nodes]
    assert at == pytest.approx([3.25, 3.5, 3.75], abs=0.01)


def test_small_messages_slip_in_between_the_bulk_of_others() -> None:
    net = Net(bytes_per_s=1e9, latency_s=0.0)
    nodes = [net.node(name) for name in "ab"]
    ends = [net.link(node) for node in nodes]
    net.learner.port.up_bytes_per_s = 4e6
    net.network.send(ends[0].far, [b"x" * BULK])
    net.network.send(ends[1].far, [b"small"])
    net.clock.run(10.0)
    assert nodes[1].messages() == [(2.0, b"small")]


def test_true_sizes_are_counted_by_kind_and_link() -> None:
    net = Net()
    node = net.node("a")
    end = net.link(node)
    chunk = memoryview(b"x" * 100)
    for num_chunks in (1, 2, 3):  # as many go together as the receiver takes in an instant
        net.network.send(end, [b"header", *[chunk] * num_chunks])
    net.network.send(end, [b"header", b"group", b"arrays"])
    overhead = FRAMING_BYTES + 6
    assert net.network.traffic["far", "home", "weights"] == 600_000 + 3 * overhead
    assert net.network.traffic["far", "home", "rollouts"] == 5e6 + overhead


def test_jitter_costs_time_but_no_message_and_no_order() -> None:
    net = Net(jitter_s=0.05)
    node = net.node("a")
    end = net.link(node)
    for number in range(50):
        net.network.send(end, [bytes([number])])
    net.clock.run(10.0)
    assert [what[0] for _, what in net.learner.messages()] == list(range(50))
    at = [at for at, _ in net.learner.messages()]
    assert at[0] >= 1.1
    assert 1.1 + 0.04 < at[-1] <= 1.1 + 0.05


def test_a_cut_loses_what_is_in_flight_and_both_ends_learn_of_it_late() -> None:
    net = Net()
    node = net.node("a")
    end = net.link(node)
    net.network.send(end, [b"lost"])
    net.network.cut("far")
    net.clock.run(2.0)
    net.network.mend("far")
    net.network.send(end, [b"lost, too"])
    net.clock.run(10.0)
    assert net.learner.messages() == []
    assert [(at, kind) for at, kind, _ in node.heard if kind == "down"] == [(4.0, "down")]
    assert [(at, kind) for at, kind, _ in net.learner.heard] == [(4.0, "down")]
    assert not net.network.send(end, [b"into the void"])
    again = net.link(node)
    net.network.send(again, [b"back"])
    net.clock.run(20.0)
    assert [what for _, what in net.learner.messages()] == [b"back"]


def test_a_process_that_dies_is_noticed_at_once_and_a_machine_that_vanishes_late() -> None:
    for is_silent, at in ((False, 1.1), (True, 4.0)):
        net = Net()
        node = net.node("a")
        net.link(node)
        if is_silent:
            net.network.vanish(node)
        else:
            net.network.close(node)
        net.clock.run(10.0)
        assert [(round(when, 3), kind) for when, kind, _ in net.learner.heard] == [(at, "down")]


def test_hanging_up_tells_the_other_side_after_what_was_said() -> None:
    net = Net()
    node = net.node("a")
    end = net.link(node)
    net.network.send(end, [b"last words"])
    net.network.hang_up(end)
    net.clock.run(5.0)
    assert [kind for _, kind, _ in net.learner.heard] == ["message", "down"]
    assert [kind for _, kind, _ in node.heard] == ["up"]


def test_who_does_not_listen_is_not_reached_until_it_does() -> None:
    net = Net()
    node, late = net.node("a"), net.node("late")
    net.network.dial(node, "tcp://late:1")
    net.clock.run(3.0)
    assert [(kind, what) for _, kind, what in node.heard] == [("refused", "no node listens there")]
    late.port.address = "tcp://late:1"
    net.network.listen(late)
    net.network.dial(node, "tcp://late:1")
    net.clock.run(5.0)
    assert [kind for _, kind, _ in node.heard] == ["refused", "up"]


def test_what_waits_at_the_downlink_is_heard_before_the_end() -> None:
    net = Net()
    net.learner.port.down_bytes_per_s = 1e6
    node = net.node("a")
    end = net.link(node)
    net.network.send(end, [b"x" * BULK])
    net.network.hang_up(end)
    net.clock.run(5.0)
    assert [(round(at, 2), kind) for at, kind, _ in net.learner.heard] == [
        (2.1, "message"),
        (2.1, "down"),
    ]


def test_cuts_part_pairs_and_groups_and_leave_the_others_alone() -> None:
    net = Net()
    nodes = {name: net.node(name, region) for name, region in (("a", "far"), ("b", "near"))}
    for node in nodes.values():
        net.link(node)
    net.network.cut("a", "b")
    net.network.cut("a", "home")  # a pair of a node and a region
    net.clock.run(10.0)
    assert [kind for _, kind, _ in nodes["a"].heard] == ["up", "down"]
    assert [kind for _, kind, _ in nodes["b"].heard] == ["up"]
    net.network.mend("a", "home")
    net.network.cut(["b", "c"])
    net.link(nodes["a"])
    net.clock.run(20.0)
    assert [kind for _, kind, _ in nodes["a"].heard] == ["up", "down", "up"]
    assert [kind for _, kind, _ in nodes["b"].heard] == ["up", "down"]


def test_a_route_has_a_direction_and_changes_under_a_connection_that_stands() -> None:
    net = Net()
    node = net.node("a")
    end = net.link(node)
    net.network.set_route("far", "home", Route(latency_s=2.0))
    net.network.send(end, [b"slow"])
    net.network.send(end.far, [b"as before"])
    net.clock.run(10.0)
    assert node.messages() == [(1.1, b"as before")]
    assert net.learner.messages() == [(3.0, b"slow")]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"latency_s": -1.0}, "latency_s"),
        ({"jitter_s": math.inf}, "jitter_s"),
        ({"bytes_per_s": 0.0}, "cut"),
        ({"bytes_per_s": math.nan}, "cut"),
    ],
)
def test_an_impossible_route_is_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Route(**settings)
