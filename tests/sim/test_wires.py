"""Simulated links: times that follow from rate and latency, order, cuts, ends, NAT."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from echo.sim.clock import Clock
from echo.sim.wires import FRAMING_BYTES, Path, Port, Wires

BULK = 1_000_000


@dataclass(eq=False)
class Node:
    """A client that takes down what it is told."""

    port: Port
    clock: Clock
    is_alive: bool = True
    heard: list[tuple[float, str, Any]] = field(default_factory=list)

    def on_connected(self, peer: str) -> None:
        self.heard.append((self.clock.now, "up", peer))

    def on_disconnected(self, peer: str, reason: str) -> None:
        self.heard.append((self.clock.now, "down", reason))

    def on_message(self, peer: str, frames: list[bytes]) -> None:
        self.heard.append((self.clock.now, "message", frames[0]))

    def messages(self) -> list[tuple[float, Any]]:
        return [(round(at, 4), what) for at, kind, what in self.heard if kind == "message"]


class Net:
    """A learner in its own region and nodes in another, 10 MB/s and 100 ms away."""

    def __init__(self, **path: Any) -> None:
        self.clock = Clock()
        self.wires = Wires(
            self.clock,
            seed=1,
            weight_scale=1000.0,
            group_bytes=lambda header: 5e6,
            dead_after_s=3.0,
        )
        settings = {"bytes_per_s": 10e6, "latency_s": 0.1}
        self.wires.add_region("far", Path(**(settings | path)))
        self.learner = self.node("learner", "home", address="tcp://learner:1")

    def node(self, name: str, region: str = "far", **port: Any) -> Node:
        node = Node(Port(name, region, **port), self.clock)
        self.wires.listen(node)
        return node

    def link(self, node: Node) -> str:
        peer = self.wires.dial(node, "tcp://learner:1")
        self.clock.run(self.clock.now + 1.0)
        return peer


def test_bulk_takes_its_bytes_at_the_rate_of_one_stream_and_small_ones_the_latency() -> None:
    net = Net()
    node = net.node("a")
    peer = net.link(node)
    net.wires.send(node, peer, [b"x" * (BULK - FRAMING_BYTES)])
    net.wires.send(node, peer, [b"y"])
    net.clock.run(5.0)
    # Nothing is overtaken within a connection.
    assert net.learner.messages() == [(1.2, b"x" * (BULK - FRAMING_BYTES)), (1.2, b"y")]


def test_children_share_an_uplink_and_parents_a_downlink() -> None:
    net = Net(bytes_per_s=1e9, latency_s=0.0)
    nodes = [net.node(name, up_bytes_per_s=4e6) for name in "ab"]
    net.learner.port.down_bytes_per_s = 4e6
    peers = [net.link(node) for node in nodes]
    for _ in range(2):
        net.wires.send(nodes[0], peers[0], [b"x" * BULK])
    net.wires.send(nodes[1], peers[1], [b"y" * BULK])
    net.clock.run(10.0)
    at = [round(at, 2) for at, _ in net.learner.messages()]
    # a's uplink takes .25 s for each; the learner's downlink takes .25 s for each of three.
    assert at == pytest.approx([2.25, 2.5, 2.75], abs=0.01)


def test_true_sizes_are_counted_by_kind_and_link() -> None:
    net = Net()
    node = net.node("a")
    peer = net.link(node)
    net.wires.send(node, peer, [b"header", memoryview(b"x" * 100)])
    net.wires.send(node, peer, [b"header", b"group", b"arrays"])
    overhead = FRAMING_BYTES + 6
    assert net.wires.traffic["far", "home", "weights"] == 100_000 + overhead
    assert net.wires.traffic["far", "home", "rollouts"] == 5e6 + overhead


def test_loss_and_jitter_cost_time_but_no_message_and_no_order() -> None:
    net = Net(jitter_s=0.05, loss=0.3)
    node = net.node("a")
    peer = net.link(node)
    for number in range(50):
        net.wires.send(node, peer, [bytes([number])])
    net.clock.run(10.0)
    assert [what[0] for _, what in net.learner.messages()] == list(range(50))
    at = [at for at, _ in net.learner.messages()]
    assert at[0] >= 1.1
    assert at[-1] > 1.1 + 0.2


def test_a_cut_loses_what_is_in_flight_and_both_ends_learn_of_it_late() -> None:
    net = Net()
    node = net.node("a")
    peer = net.link(node)
    net.wires.send(node, peer, [b"lost"])
    net.wires.cut("far")
    net.clock.run(2.0)
    net.wires.mend("far")
    net.wires.send(node, peer, [b"lost, too"])
    net.clock.run(10.0)
    assert net.learner.messages() == []
    assert [(at, kind) for at, kind, _ in node.heard if kind == "down"] == [(4.0, "down")]
    assert [(at, kind) for at, kind, _ in net.learner.heard] == [(4.0, "down")]
    assert not net.wires.send(node, peer, [b"into the void"])
    again = net.link(node)
    net.wires.send(node, again, [b"back"])
    net.clock.run(20.0)
    assert [what for _, what in net.learner.messages()] == [b"back"]


def test_a_process_that_dies_is_noticed_at_once_and_a_machine_that_vanishes_late() -> None:
    for is_silent, at in ((False, 1.1), (True, 4.0)):
        net = Net()
        node = net.node("a")
        net.link(node)
        node.is_alive = False
        net.wires.vanish(node, is_silent=is_silent)
        net.clock.run(10.0)
        assert [(round(when, 3), kind) for when, kind, _ in net.learner.heard] == [(at, "down")]


def test_hanging_up_tells_the_other_side_after_what_was_said() -> None:
    net = Net()
    node = net.node("a")
    peer = net.link(node)
    net.wires.send(node, peer, [b"last words"])
    net.wires.hang_up(node, peer)
    net.clock.run(5.0)
    assert [kind for _, kind, _ in net.learner.heard] == ["message", "down"]
    assert [kind for _, kind, _ in node.heard] == ["up"]


def test_who_does_not_listen_is_not_reached_until_it_does() -> None:
    net = Net()
    node, late = net.node("a"), net.node("late")
    net.wires.dial(node, "tcp://late:1")
    net.clock.run(3.0)
    assert node.heard == []
    late.port.address = "tcp://late:1"
    net.wires.listen(late)
    net.clock.run(5.0)
    assert [kind for _, kind, _ in node.heard] == ["up"]
