"""Loss of a broadcast whose uplinks were estimated wrongly.

The unequal fleets of `broadcast/figures.py` (16 receivers, the learner at 200 Mbit/s, 64 MiB), the
real planner and the real weights plane, on links of paper: every node's uplink is shared equally
by the connections that have something to send, a message takes 20 ms, nothing is lost, and neither
TCP nor the CPU costs anything. Rates and bytes are a 64th of the stated ones, which leaves all
times as they are. The plan is made from the true uplinks times a log-normal error, and kept for
three versions, of which the last is timed.

Prints the share of the fluid optimum min(u0, (u0 + sum of the uplinks) / receivers) that the plan
promises and that the slowest receiver gets: the median over the errors, and the worst.

Then the same fleets as they join, while the first version goes out: nothing is known, the learner's
own planning follows what each transfer has shown, and six versions go out, ten seconds apart: with
the product's probes, without them, and as if every uplink were told, wrong by 10 %, once the first
version is there.
"""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import harness
from broadcast.figures import MIB, PAYLOAD_SHARE, uplinks_mbit
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo.core.rollout import PolicyVersion
from echo.weights import rates as weights_rates
from echo.weights.broadcast import Broadcast
from echo.weights.manifest import TensorSpec, build_manifest, sign
from echo.weights.rates import UplinkProbe
from echo.weights.receiver import VersionArrived
from echo.weights.topology import sites
from echo.weights.topology.plan import Planner, plan_topology
from echo.weights.topology.sites import PlannedNode, Site
from echo.wire.actions import Send
from echo.wire.codec import decode_envelope, decode_message
from echo.wire.messages import LEARNER_ID, Chunk, NodeStats, Probe

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC_KEY = KEY.public_key().public_bytes_raw()
SCALE = 64
LATENCY_S, LEARNER_MBIT, IMAGE_BYTES, WINDOW_BYTES = 0.02, 200.0, 64 * MIB, 4 * MIB
NUM_VERSIONS = 3
CONTROL = "control"
"""What a node calls its link to the learner, over which probes go."""
NUM_JOINED, PAUSE_S = 6, 10.0
KNOWN = ("seen", "probed", "told")
DRAWS = ("log-normal", "80/20", "half NAT")


def main() -> None:
    parser = harness.new_parser(__doc__)
    parser.add_argument("--errors", type=float, nargs="+", default=[0.0, 0.1, 0.3])
    parser.add_argument("--repeats", type=int, default=5, help="draws of each error but 0")
    parser.add_argument("--joined", type=int, default=3, help="fleets that have just joined")
    parser.add_argument("--chunk", type=int, default=256 << 10)
    arguments = harness.parse(parser, errors=[0.0, 0.1], repeats=1, joined=1, chunk=1 << 20)
    # What the product assumes and probes with, as small as everything here.
    sites.ASSUMED_BYTES_PER_S /= SCALE
    weights_rates.FIRST_BYTES //= SCALE
    weights_rates.MAX_PROBE_BYTES //= SCALE
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
    joined = []
    print("as they join: the median share of the optimum by version")
    for draw, known in itertools.product(DRAWS, KNOWN):
        seeds = range(arguments.joined)
        runs = [measure_joined(draw, arguments.chunk, seed, known=known) for seed in seeds]
        joined.append({"uplinks": draw, "known_by": known, "runs": runs})
        medians = [statistics.median(run["got"][i] for run in runs) for i in range(NUM_JOINED)]
        texts = " ".join(f"{median:.2f}" for median in medians)
        print(
            f"{draw:>12} {known:>6} {texts}  {', '.join(run['plan'] for run in runs)}", flush=True
        )
    print(f"wrote {harness.save('uplink_errors', {'rows': rows, 'joined': joined})}")


def measure(draw: str, error: float, chunk_bytes: int, seed: int) -> dict[str, Any]:
    """Return the shares of the optimum that one plan promises and gets."""
    rates, best = uplinks(draw)
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
        "plan": plan.kind,
        "promised": size / best / plan.predicted_s,
        "got": size / best / seconds[-1],
    }


def measure_joined(draw: str, chunk_bytes: int, seed: int, *, known: str) -> dict[str, Any]:
    """Return the shares of the optimum that versions get in a fleet that has just joined."""
    rates, best = uplinks(draw)
    size = IMAGE_BYTES // SCALE
    chance = random.Random(seed)
    order = list(range(1, len(rates)))
    chance.shuffle(order)
    told = {name_of(i): rates[i] * chance.lognormvariate(0, 0.1) for i in order if rates[i]}
    fleet = JoinedFleet(rates, order, has_probes=known == "probed")
    fleet.planning.payload_bytes, fleet.planning.chunk_bytes = size, chunk_bytes // SCALE
    fleet.replan()
    fleet.welcome(size)
    seconds = []
    for step in range(NUM_JOINED):
        seconds.append(fleet.deliver(step, size, chunk_bytes // SCALE))
        fleet.told = told if known == "told" else {}
        fleet.run_until(fleet.now + PAUSE_S)
        fleet.beat()
        if fleet.planning.is_due(now=fleet.now, is_between=True):
            fleet.replan(is_between=True)
    topology = fleet.planning.topology
    assert topology is not None
    return {
        "plan": topology.kind,
        "got": [size / best / one for one in seconds],
    }


def uplinks(draw: str) -> tuple[list[float], float]:
    """Return the uplinks of a fleet, the learner's first, and the fluid optimum, bytes/s."""
    mbit = [LEARNER_MBIT, *uplinks_mbit(draw, random.Random(1))]
    rates = [rate * 1e6 / 8 * PAYLOAD_SHARE / SCALE for rate in mbit]
    return rates, min(rates[0], sum(rates) / (len(rates) - 1))


def name_of(index: int) -> str:
    return LEARNER_ID if index == 0 else f"receiver-{index}"


def message_of(action: Send) -> Any:
    """Return what a node sends."""
    return decode_message(decode_envelope(list(action.frames)))


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
            node.trust.set(public_key=PUBLIC_KEY, run_id="run", max_image_bytes=IMAGE_BYTES)

    def follow(self, parents: Any) -> None:
        """Connect everybody as a plan says."""
        for name, hops in parents.items():
            node, link = self._nodes[name], f"{hops[0][0]} to {name}"
            former = next((each for each, (_, child) in self._ends.items() if child == name), None)
            if link == former:
                continue
            self._ends[link] = hops[0][0], name
            joined = node.set_parent(link, rtt_s=2 * LATENCY_S, now=self.now)
            self._perform(name, joined)
            if former is not None:
                parent, _ = self._ends.pop(former)
                self._perform(parent, self._nodes[parent].remove_child(former, now=self.now))

    def deliver(self, step: int, size: int, chunk_bytes: int) -> float:
        """Return the seconds until everybody has a version."""
        image, version = bytearray(random.Random(step).randbytes(size)), PolicyVersion(1, step)
        manifest = build_manifest(
            run_id="run",
            version=version,
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
            self._step()
        return self.now - began_at

    def run_until(self, when: float) -> None:
        """Go on until an instant."""
        while self._events and self._events[0][0] <= when:
            self._step()
        self.now = when

    def _step(self) -> None:
        self.now, _, act = heapq.heappop(self._events)
        act()

    def _at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._count), act))

    def _perform(self, name: str, actions: Iterable[Any]) -> None:
        for action in actions:
            assert isinstance(action, Send | VersionArrived), action
            if isinstance(action, VersionArrived):
                self._arrived.add((name, action.version))
                self._holds(name, action.version)
            else:
                self._send(name, action)
        deadline = self._nodes[name].deadline
        if deadline is not None and self._deadlines.get(name) != deadline:
            self._deadlines[name] = deadline
            self._at(max(deadline, self.now), lambda: self._expire(name, deadline))

    def _holds(self, name: str, version: PolicyVersion) -> None:
        """Do nothing more for a node that has a version."""

    def _expire(self, name: str, deadline: float) -> None:
        if self._deadlines.get(name) == deadline:
            del self._deadlines[name]
            self._perform(name, self._nodes[name].expire(now=self.now))

    def _send(self, name: str, action: Send) -> None:
        message, payload = message_of(action), [bytes(one) for one in action.frames[1:]]
        if action.peer not in self._ends:
            return  # the plan has changed
        parent, child = self._ends[action.peer]
        other = child if name == parent else parent

        def receive() -> None:
            if action.peer not in self._ends:
                return
            node = self._nodes[other]
            self._perform(other, node.receive(action.peer, message, [*payload], now=self.now))

        self._carry(name, action, payload, receive)

    def _carry(self, name: str, action: Send, payload: list[bytes], receive: Any) -> None:
        """Send bytes up a node's uplink, or what has next to none at once."""
        if not isinstance(message_of(action), Chunk | Probe):
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


class JoinedFleet(Fleet):
    """A fleet whose plans are the learner's own: it looks at its links every second."""

    def __init__(self, rates: Sequence[float], order: Sequence[int], *, has_probes: bool) -> None:
        super().__init__(rates)
        self.planning = Planner(learner=site(0, 0.0), chunk_bytes=1)
        self.planning.learner = Site(LEARNER_ID, "learner", "tcp://learner:1")
        self.told: dict[str, float] = {}
        """What probes have shown, if there are any."""
        self._members = []
        self._probes = {
            name_of(index): UplinkProbe(self._nodes[name_of(index)].uplink, node_id=name_of(index))
            for index in (0, *order)
            if has_probes and rates[index]
        }
        for index in order:
            address = f"tcp://{name_of(index)}:1" if rates[index] else None
            self._members.append(PlannedNode(name_of(index), "worker", address))
        self._at(1.0, self._look)

    def welcome(self, version_bytes: int) -> None:
        """Have everybody probe who can serve, as the learner's Welcome makes them."""
        for name, probe in self._probes.items():
            if name != LEARNER_ID:
                self._probe(name, probe.begin(CONTROL, payload_bytes=version_bytes, now=self.now))

    def replan(self, *, is_between: bool = False) -> None:
        """Have the learner plan, by what heartbeats have told it."""
        uplink = self._nodes[LEARNER_ID].uplink.bytes_per_s
        moved = self.planning.move(
            self._members, uplink_bytes_per_s=uplink, now=self.now, is_between=is_between
        )
        self.follow({name: plan.parents for name, plan in moved})

    def beat(self) -> None:
        """Have everybody send a heartbeat."""
        for member in self._members:
            node = self._nodes[member.node_id]
            seen = (node.uplink.bytes_per_s, self.told.get(member.node_id))
            parents = [parent for parent, name in self._ends.values() if name == member.node_id]
            member.installed = node.newest_complete
            stats = NodeStats(
                parent=parents[0] if parents else "-",
                uplink_bytes_per_s=max((rate for rate in seen if rate is not None), default=None),
                downlink_bytes_per_s=node.receiver.rate.bytes_per_s,
                rtt_s=2 * LATENCY_S,
                fetching=node.progress()[0],
            )
            self.planning.learn(stats, former=member.stats)
            if member.stats.uplink_bytes_per_s is not None:
                self._probe_own(member.node_id)
            member.stats = stats

    def _holds(self, name: str, version: PolicyVersion) -> None:
        if name in self._probes:
            size = self._nodes[name].store[version].num_bytes
            begun = self._probes[name].begin(CONTROL, payload_bytes=size, now=self.now)
            self._probe(name, begun)

    def _probe_own(self, to: str) -> None:
        """Have the learner show its own uplink, where nobody takes anything from it."""
        probe = self._probes.get(LEARNER_ID)
        if probe is not None and not self._nodes[LEARNER_ID].is_serving:
            size = self.planning.payload_bytes
            begun = probe.begin(f"{CONTROL} of {to}", payload_bytes=size, now=self.now)
            self._probe(LEARNER_ID, begun)

    def _probe(self, name: str, actions: Iterable[Any]) -> None:
        for action in actions:
            payload = [bytes(one) for one in action.frames[1:]]

            def answered(peer: str = action.peer) -> None:
                self._probe(name, self._probes[name].acknowledged(peer, now=self.now))
                self.planning.has_news |= name == LEARNER_ID

            self._carry(
                name, action, payload, lambda act=answered: self._at(self.now + LATENCY_S, act)
            )

    def _look(self) -> None:
        self.beat()
        if self.planning.is_due(now=self.now):
            self.replan()
        self._at(self.now + 1.0, self._look)


if __name__ == "__main__":
    main()
