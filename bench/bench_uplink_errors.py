"""What uplinks that were estimated wrongly cost a broadcast.

The unequal fleets of `broadcast_figures.py` (16 receivers, the learner at 200 Mbit/s, 64 MiB), the
real planner and the real weights plane, on links of paper: every node's uplink is shared equally
by the connections that have something to send, a message takes 20 ms, nothing is lost, and neither
TCP nor the CPU costs anything. Rates and bytes are a 64th of the stated ones, which leaves all
times as they are. The plan is made from the true uplinks times a log-normal error, and kept for
three versions, of which the last is timed.

Prints the share of the fluid optimum min(u0, (u0 + sum of the uplinks) / receivers) that the plan
promises and that the slowest receiver gets: the median over the errors, and the worst.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import statistics
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import harness
from broadcast_figures import MIB, PAYLOAD_SHARE, uplinks_mbit

from echo.protocol.actions import Send, VersionArrived
from echo.protocol.broadcast import Broadcast
from echo.protocol.manifest import TensorSpec, build_manifest, sign
from echo.protocol.messages import LEARNER_ID, Chunk
from echo.protocol.topology import Site, plan_topology
from echo.rollout import PolicyVersion
from tests.protocol.harness import KEY, PUBLIC_KEY, message_of

SCALE = 64
LATENCY_S, LEARNER_MBIT, IMAGE_BYTES, WINDOW_BYTES = 0.02, 200.0, 64 * MIB, 4 * MIB
NUM_VERSIONS = 3
DRAWS = ("log-normal", "80/20", "half NAT")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--errors", type=float, nargs="+", default=[0.0, 0.1, 0.3])
    parser.add_argument("--repeats", type=int, default=5, help="draws of each error but 0")
    parser.add_argument("--chunk", type=int, default=256 << 10)
    arguments = parser.parse_args()
    rows = []
    print(f"{'uplinks':>12} {'error':>6} {'promised':>9} {'got':>6} {'worst':>6}  plans")
    for draw, error in itertools.product(DRAWS, arguments.errors):
        seeds = range(arguments.repeats if error else 1)
        runs = [measure(draw, error, arguments.chunk, seed) for seed in seeds]
        got = [run["got"] for run in runs]
        rows.append({"uplinks": draw, "error": error, "runs": runs})
        promised = statistics.median(run["promised"] for run in runs)
        print(
            f"{draw:>12} {error:>6.2f} {promised:>9.2f} {statistics.median(got):>6.2f} "
            f"{min(got):>6.2f}  {', '.join(run['plan'] for run in runs)}",
            flush=True,
        )
    print(f"wrote {harness.save('uplink_errors', {'rows': rows})}")


def measure(draw: str, error: float, chunk_bytes: int, seed: int) -> dict[str, Any]:
    """Return the shares of the optimum that one plan promises and gets."""
    mbit = [LEARNER_MBIT, *uplinks_mbit(draw, random.Random(1))]
    rates = [rate * 1e6 / 8 * PAYLOAD_SHARE / SCALE for rate in mbit]
    best = min(rates[0], sum(rates) / (len(rates) - 1))
    fleet = Fleet(rates)
    chance = random.Random(seed)
    wrong = [rates[0], *(rate * chance.lognormvariate(0, error) for rate in rates[1:])]
    size = IMAGE_BYTES // SCALE
    plan = plan_topology(
        [site(index, rate) for index, rate in enumerate(wrong)][1:],
        learner=site(0, wrong[0]),
        payload_bytes=size,
        chunk_bytes=chunk_bytes // SCALE,
        rtt_s=lambda one, other: 2 * LATENCY_S,
    )
    fleet.follow(plan.parents)
    seconds = [fleet.deliver(step, size, chunk_bytes // SCALE) for step in range(NUM_VERSIONS)]
    return {
        "plan": f"{plan.kind} {plan.num_stripes}",
        "promised": size / best / plan.predicted_s,
        "got": size / best / seconds[-1],
    }


def name_of(index: int) -> str:
    return LEARNER_ID if index == 0 else f"receiver-{index}"


def site(index: int, rate: float) -> Site:
    name = name_of(index)
    address = f"tcp://{name}:1" if rate else None
    role = "learner" if index == 0 else "worker"
    return Site(name, role, address, uplink_bytes_per_s=rate or None)


@dataclass
class Uplink:
    """What one node sends: equal shares for all connections that have something to send."""

    bytes_per_s: float
    queues: dict[str, deque[list[Any]]] = field(default_factory=dict)
    """By connection: [bytes left, what happens then]."""
    at: float = 0.0
    plan: int = 0

    @property
    def heads(self) -> list[list[Any]]:
        return [queue[0] for queue in self.queues.values() if queue]

    def advance(self, now: float) -> None:
        heads = self.heads
        for head in heads:
            head[0] -= (now - self.at) * self.bytes_per_s / len(heads)
        self.at = now

    def ready(self) -> list[Callable[[], None]]:
        """Return what has been sent to its end."""
        return [
            queue.popleft()[1] for queue in self.queues.values() if queue and queue[0][0] < 1e-3
        ]


class Fleet:
    """Nodes, their connections, and one clock."""

    def __init__(self, rates: Iterable[float]) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._uplinks = {name_of(i): Uplink(max(rate, 1e-3)) for i, rate in enumerate(rates)}
        self._ends: dict[str, tuple[str, str]] = {}
        """Connection -> (parent, child)."""
        self._nodes: dict[str, Broadcast] = {}
        self._deadlines: dict[str, float] = {}
        self._arrived: set[tuple[str, PolicyVersion]] = set()
        for name in self._uplinks:
            node = self._nodes[name] = Broadcast(
                node_id=name, window_bytes=WINDOW_BYTES // SCALE, keep_versions=1, stall_s=30.0
            )
            node.trust(public_key=PUBLIC_KEY, run_id="run", max_image_bytes=IMAGE_BYTES)

    def follow(self, parents: Any) -> None:
        """Connect everybody as a plan says."""
        for name, stripes in parents.items():
            node, count = self._nodes[name], len(stripes)
            self._perform(name, node.set_num_lanes(count, count, now=0.0))
            for lane, hops in enumerate(stripes):
                link = f"{hops[0][0]} to {name}, lane {lane}"
                self._ends[link] = hops[0][0], name
                rtt_s = 2 * LATENCY_S
                self._perform(name, node.set_parent(link, lane=lane, rtt_s=rtt_s, now=0.0))

    def deliver(self, step: int, size: int, chunk_bytes: int) -> float:
        """Return the seconds until everybody has a version."""
        image, version = bytearray(random.Random(step).randbytes(size)), PolicyVersion(1, step)
        manifest = build_manifest(
            run_id="run",
            version=version,
            model_digest="model",
            tensors=[TensorSpec("w", "uint8", (size,), 0, size)],
            image=image,
            chunk_bytes=chunk_bytes,
        )
        began_at = self.now
        learner = self._nodes[LEARNER_ID]
        published = learner.publish(sign(manifest, KEY), manifest, image, now=self.now)
        self._perform(LEARNER_ID, published)
        wanted = {(name, version) for name in self._nodes if name != LEARNER_ID}
        while not wanted <= self._arrived:
            self.now, _, act = heapq.heappop(self._events)
            act()
        return self.now - began_at

    def _at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._count), act))

    def _perform(self, name: str, actions: Iterable[Any]) -> None:
        for action in actions:
            if isinstance(action, VersionArrived):
                self._arrived.add((name, action.version))
            else:
                self._send(name, action)
        deadline = self._nodes[name].deadline
        if deadline is not None and self._deadlines.get(name) != deadline:
            self._deadlines[name] = deadline
            self._at(max(deadline, self.now), lambda: self._expire(name, deadline))

    def _expire(self, name: str, deadline: float) -> None:
        if self._deadlines.get(name) == deadline:
            del self._deadlines[name]
            self._perform(name, self._nodes[name].expire(now=self.now))

    def _send(self, name: str, action: Send) -> None:
        message, payload = message_of(action.frames), [bytes(one) for one in action.frames[1:]]
        parent, child = self._ends[action.peer]
        other = child if name == parent else parent

        def receive() -> None:
            node = self._nodes[other]
            self._perform(other, node.receive(action.peer, message, payload, now=self.now))

        if not isinstance(message, Chunk):
            self._at(self.now + LATENCY_S, receive)
            return
        uplink = self._uplinks[name]
        uplink.advance(self.now)
        uplink.queues.setdefault(action.peer, deque()).append([len(payload[0]), receive])
        self._plan(uplink)

    def _plan(self, uplink: Uplink) -> None:
        """Look at an uplink again when its next message has been sent."""
        uplink.plan += 1
        heads, plan = uplink.heads, uplink.plan
        if heads:
            least = max(0.0, min(head[0] for head in heads))
            at = self.now + least * len(heads) / uplink.bytes_per_s + 1e-9
            self._at(at, lambda: self._sent(uplink, plan))

    def _sent(self, uplink: Uplink, plan: int) -> None:
        if uplink.plan != plan:
            return
        uplink.advance(self.now)
        for receive in uplink.ready():
            self._at(self.now + LATENCY_S, receive)
        self._plan(uplink)


if __name__ == "__main__":
    main()
