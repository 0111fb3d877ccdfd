"""A whole run on paper: real sessions on a simulated network, with one explicit clock.

`World` carries out what sessions decide, as `runtime/node.py` does: it dials, sends, tells of lost
links, and calls `expire` at each deadline. Beside it are a learner that journals, trains and
checkpoints in no time to speak of, and workers whose engine needs `sample_s` per group. A journal
is a list of records that survives its process, in the form of the ledger's rows.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo.core.buffer import StalenessBuffer
from echo.core.rollout import Group, Lineage, PartialRollout, PolicyVersion, Rollout
from echo.leases.book import LeaseBook
from echo.leases.outbox import Outbox
from echo.leases.partials import PartialGroup, PartialRules
from echo.leases.scheduler import (
    LeaseSettings,
    RecordCancel,
    RecordEnd,
    RecordGrant,
    RecordRefusal,
    RunState,
    StoreGroup,
)
from echo.records.ledger import read_state
from echo.roles.joining import AdmissionSettings, Configure, NodeSettings
from echo.roles.learner import Learner, LearnerSettings
from echo.roles.relay import Relay
from echo.roles.worker import EngineCall, EngineFacts, Install, Recall, Sample, Score, Worker
from echo.sim.network import Route
from echo.weights.broadcast import Broadcast
from echo.weights.manifest import Manifest, SignedManifest, TensorSpec, build_manifest, sign
from echo.weights.receiver import VersionArrived
from echo.weights.store import DecodeBlock
from echo.weights.topology.sites import Site
from echo.wire.actions import Action, Dial, HangUp, Note, Send, Stop
from echo.wire.codec import decode_envelope, decode_message
from echo.wire.messages import LEARNER_ID, Lease, NodeStats
from tests.records.rows import records_of

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC_KEY = KEY.public_key().public_bytes_raw()
CHUNK_BYTES = 1024
LEARNER_ADDRESS = "tcp://learner:1"


def make_image(version: PolicyVersion, *, num_chunks: int = 6) -> bytearray:
    """Return the weights of a version: bytes that depend on nothing but its name."""
    size = (num_chunks - 1) * CHUNK_BYTES + 100
    return bytearray(random.Random(f"{version}").randbytes(size))


def make_version(
    lineage: int, step: int, *, num_chunks: int = 6, key: Ed25519PrivateKey = KEY, run: str = "run"
) -> tuple[SignedManifest, Manifest, bytearray]:
    """Return (signed manifest, manifest, image) of one version."""
    version = PolicyVersion(lineage, step)
    image = make_image(version, num_chunks=num_chunks)
    manifest = build_manifest(
        run_id=run,
        version=version,
        model_digest="model",
        tensors=[TensorSpec("w", "uint8", (len(image),), 0, len(image))],
        image=image,
        chunk_bytes=CHUNK_BYTES,
    )
    return sign(manifest, key), manifest, image


def make_lease(group_id: int, attempt: int) -> Lease:
    """Return the lease of a group: its prompt depends on the id alone."""
    return Lease(
        group_id=group_id,
        attempt=attempt,
        seed=1000 * group_id + attempt,
        prompt_ids=(1, 2, 3 + group_id % 7),
        example={"index": group_id},
    )


class Prompts:
    """Leases by group id, but for those whose prompts have a fault."""

    def __init__(self, faults: Mapping[int, Exception]) -> None:
        self._faults = faults

    def lease(self, group_id: int, attempt: int) -> Lease:
        if group_id in self._faults:
            raise self._faults[group_id]
        return make_lease(group_id, attempt)


def make_rollout(
    versions: Sequence[PolicyVersion], *, reward: float = 1.0, masked: Iterable[int] = ()
) -> Rollout:
    """Return a rollout with one token per version; those at the indices `masked` are masked."""
    mask = np.ones(len(versions), dtype=np.bool_)
    mask[list(masked)] = False
    return Rollout(
        token_ids=np.arange(3, 3 + len(versions), dtype=np.int32),
        sampler_logprobs=np.full(len(versions), -0.5, dtype=np.float32),
        policy_versions=np.array([[v.lineage, v.step] for v in versions], dtype=np.int32),
        completion_mask=mask,
        reward=reward,
        finish_reason="stop",
    )


def make_group(
    group_id: int,
    version: PolicyVersion,
    *,
    attempt: int = 0,
    worker: str = "w1",
    size: int = 2,
    num_tokens: int = 3,
) -> Group:
    """Return a group that answers `make_lease`."""
    return Group(
        group_id=group_id,
        attempt=attempt,
        worker_id=worker,
        prompt_ids=np.array(make_lease(group_id, attempt).prompt_ids, dtype=np.int32),
        rollouts=tuple(make_rollout([version] * num_tokens, reward=float(i)) for i in range(size)),
    )


@dataclass(slots=True, eq=False)
class Process:
    """One start of one node."""

    name: str
    session: Any
    address: str | None
    is_alive: bool = True
    stop: Stop | None = None
    notes: list[str] = field(default_factory=list)
    on_action: Callable[[Action], None] = lambda action: None
    is_frozen: bool = False
    """Whether it is held as by SIGSTOP."""
    held: list[Callable[[], None]] = field(default_factory=list)
    """What has come while it was frozen."""
    due_at: float | None = None
    """Its session's deadline when it was last asked."""
    is_touched: bool = True
    """Whether that may have changed since."""

    def deadline(self) -> float | None:
        """Return when its session wants to act next, if it can."""
        if not self.is_alive or self.is_frozen:
            return None
        if self.is_touched:
            self.due_at, self.is_touched = self.session.deadline, False
        return self.due_at


@dataclass(slots=True, eq=False)
class Wire:
    """One dialled connection, with the names that both ends have for each other."""

    dialler: Process
    listener: Process | None
    address: str
    peer_of_listener: str
    """What the dialler calls the listener."""
    peer_of_dialler: str
    is_up: bool = False
    is_hung_up: bool = False


class LossyLinks:
    """Directed links, each a queue with luck of its own; what is lost stays lost."""

    def __init__(self, seed: int, default: Route) -> None:
        self._seed = seed
        self._default = default
        self._routes: dict[tuple[str, str], Route] = {}
        self._chances: dict[tuple[str, str], random.Random] = {}
        self._idle_at: dict[tuple[str, str], float] = {}
        self._last_arrival_at: dict[tuple[str, str], float] = {}

    def set_link(self, source: str, target: str, route: Route) -> None:
        self._routes[source, target] = route

    def arrival(self, source: str, target: str, num_bytes: int, *, now: float) -> float | None:
        """Return when a message arrives that is sent now; None if it is lost."""
        link = source, target
        route = self._routes.get(link, self._default)
        if link not in self._chances:
            self._chances[link] = random.Random(f"{self._seed}/{source}/{target}")
        chance = self._chances[link]
        is_lost = chance.random() < route.loss
        jitter_s = chance.uniform(0.0, route.jitter_s)
        leaves_at = max(now, self._idle_at.get(link, now)) + num_bytes / route.bytes_per_s
        self._idle_at[link] = leaves_at
        if is_lost:
            return None
        arrives_at = max(
            leaves_at + route.latency_s + jitter_s, self._last_arrival_at.get(link, 0.0)
        )
        self._last_arrival_at[link] = arrives_at
        return arrives_at


class World:
    """Processes, the wires between them, and the time."""

    def __init__(self, *, seed: int = 0, link: Route | None = None) -> None:
        self.now = 0.0
        self.links = LossyLinks(seed, link or Route(latency_s=0.01))
        self.processes: list[Process] = []
        self.frames_sent: list[tuple[str, str, list[bytes]]] = []
        self.drop: Callable[[str, str, list[bytes]], bool] = lambda source, target, frames: False
        self._wires: dict[tuple[Process, str], Wire] = {}
        self._serial = itertools.count()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []

    # --- processes -------------------------------------------------------------------------------

    def process(self, name: str) -> Process:
        """Return the live process of that name."""
        return next(p for p in self.processes if p.name == name and p.is_alive)

    def add(self, process: Process) -> Process:
        self.processes.append(process)
        return process

    def kill(self, process: Process, *, is_silent: bool = False) -> None:
        """End a process; its peers are told at once unless `is_silent` (a black hole)."""
        process.is_alive = False
        for wire in list(self._wires.values()):
            is_told = wire.is_up and not is_silent
            if is_told and process in (wire.dialler, wire.listener):
                self.later(0.02, lambda wire=wire: self._break(wire, "connection lost"))

    def freeze(self, process: Process) -> None:
        """Hold a process: its connections stand, what comes waits, nothing of its own happens."""
        process.is_frozen = True

    def thaw(self, process: Process) -> None:
        """Let a frozen process go on, with what has come meanwhile first."""
        process.is_frozen = False
        held, process.held = process.held, []
        for call in held:
            call()

    def _break(self, wire: Wire, reason: str) -> None:
        if not wire.is_up:
            return
        wire.is_up = False
        ends = [(wire.dialler, wire.peer_of_listener), (wire.listener, wire.peer_of_dialler)]
        for process, peer in ends:
            if (
                process is not None
                and process.is_alive
                and not (process is wire.dialler and wire.is_hung_up)
            ):
                self._tell_disconnected(process, peer, reason)

    def _tell_disconnected(self, process: Process, peer: str, reason: str) -> None:
        if isinstance(process.session, Learner):
            self.perform(process, process.session.disconnected(peer, now=self.now))
        else:
            self.perform(process, process.session.disconnected(peer, reason, now=self.now))

    # --- actions ---------------------------------------------------------------------------------

    def perform(self, process: Process, actions: Iterable[Action]) -> None:
        process.is_touched = True
        if process.is_frozen:
            process.held.append(lambda: self.perform(process, actions))
            return
        for action in actions:
            if process.is_alive:
                self._carry_out(process, action)

    def _carry_out(self, process: Process, action: Action) -> None:
        match action:
            case Send():
                self._send(process, action)
            case Dial():
                self._dial(process, action)
            case HangUp():
                wire = self._wires.get((process, action.peer))
                if wire is not None:
                    wire.is_hung_up = True
                    self.later(0.01, lambda wire=wire: self._break(wire, "hung up"))
            case Note():
                process.notes.append(action.text)
            case Stop():
                process.stop = process.stop or action
                self.kill(process)
            case DecodeBlock():
                self.later(0.001, lambda work=action: self._decode(process, work))
            case _:
                process.on_action(action)

    def _decode(self, process: Process, work: DecodeBlock) -> None:
        if process.is_alive:
            self.perform(process, process.session.worked(work, work.run(), now=self.now))

    def _dial(self, process: Process, action: Dial) -> None:
        number = next(self._serial)
        wire = Wire(process, None, action.address, f"out{number}", f"in{number}")
        self._wires[process, wire.peer_of_listener] = wire
        process.session.dialled(action.address, action.purpose, wire.peer_of_listener)
        self.later(0.02, lambda: self._connect(wire))

    def _connect(self, wire: Wire) -> None:
        """Complete a dial, or try again later, as a transport does until it is told to hang up."""
        if wire.is_hung_up or not wire.dialler.is_alive:
            return
        listener = next(
            (p for p in self.processes if p.is_alive and p.address == wire.address), None
        )
        if listener is None:
            self.later(0.5, lambda: self._connect(wire))
            return
        wire.listener, wire.is_up = listener, True
        self._wires[listener, wire.peer_of_dialler] = wire
        peer = wire.peer_of_listener
        self.perform(wire.dialler, wire.dialler.session.connected(peer, now=self.now))

    def _send(self, process: Process, action: Send) -> None:
        wire = self._wires.get((process, action.peer))
        if wire is None or not wire.is_up:
            return
        is_dialler = process is wire.dialler
        other = wire.listener if is_dialler else wire.dialler
        assert other is not None
        peer = wire.peer_of_dialler if is_dialler else wire.peer_of_listener
        frames = [bytes(frame) for frame in action.frames]
        self.frames_sent.append((process.name, other.name, frames))
        if self.drop(process.name, other.name, frames):
            return

        def arrive() -> None:
            if other.is_frozen:
                other.held.append(arrive)
            elif wire.is_up and other.is_alive:
                actions = other.session.receive(peer, list(frames), now=self.now)
                self.perform(other, actions)

        size = sum(map(len, frames))
        arrives_at = self.links.arrival(process.name, other.name, size, now=self.now)
        if arrives_at is not None:
            heapq.heappush(self._timers, (arrives_at, next(self._serial), arrive))

    # --- time ------------------------------------------------------------------------------------

    def later(self, delay_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (self.now + delay_s, next(self._serial), call))

    def run(self, until: float) -> None:
        """Let time pass up to `until`."""
        self._touch_all()
        while True:
            instants = [self._timers[0][0]] if self._timers else []
            due = {}
            for process in self.processes:
                if (deadline := process.deadline()) is not None:
                    due[process] = max(deadline, self.now + 0.001)
            instants += due.values()
            at = min(instants, default=until)
            if at >= until:
                self.now = until
                return
            self.now = max(at, self.now)
            while self._timers and self._timers[0][0] <= self.now:
                heapq.heappop(self._timers)[2]()
                self._touch_all()
            for process, instant in due.items():
                if process.is_alive and not process.is_frozen and instant <= self.now:
                    self.perform(process, process.session.expire(now=self.now))

    def _touch_all(self) -> None:
        """Ask every session again: a scenario or an engine did something."""
        for process in self.processes:
            process.is_touched = True

    def run_until(self, is_done: Callable[[], bool], *, within_s: float) -> None:
        """Let time pass until `is_done`, looking every 50 ms; fail after `within_s`."""
        give_up_at = self.now + within_s
        while not is_done():
            assert self.now < give_up_at, f"not done after {within_s} s"
            self.run(self.now + 0.05)


# --- roles ---------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class Numbers:
    """What the run is configured with."""

    max_staleness: int = 2
    groups_per_step: int = 2
    group_size: int = 2
    heartbeat_s: float = 1.0
    dead_after_s: float = 4.0
    lease_timeout_s: float = 6.0
    reconnect_for_s: float = 300.0
    sample_s: float = 0.3
    train_s: float = 0.2
    checkpoint_interval: int = 3
    num_chunks: int = 6


class Run:
    """A learner that can be killed and resumed, relays, workers, and the journal of it all."""

    def __init__(self, tmp_path: Path, *, seed: int = 0, link: Route | None = None, **numbers: Any):
        self.world = World(seed=seed, link=link)
        self.numbers = Numbers(**numbers)
        self.records: list[dict[str, Any]] = []
        self.groups: dict[int, Group] = {}
        """Accepted groups, as the group files have them."""
        self.acked: list[tuple[int, str]] = []
        self.checkpoint = (1, 0)
        self.is_training = True
        self.max_steps = 10**9
        self.learner: Learner | None = None
        self._numbers_of_starts = itertools.count()

    def journal(self, kind: str, **fields: Any) -> None:
        self.records.append({"kind": kind, **fields})

    # --- learner ---------------------------------------------------------------------------------

    def start_learner(self, **overrides: Any) -> Process:
        """Start the learner, or resume it from its newest checkpoint."""
        numbers = self.numbers
        if not self.records:
            lineages: tuple[Lineage, ...] = (Lineage(1, 0),)
            step, next_group_id, finished, granted, waiting = 0, 0, set(), {}, {}
        else:
            lineage, step = self.checkpoint
            history = read_state(records_of(self.records), lineage=lineage, step=step)
            lineages = (*history.lineages, Lineage(history.lineages[-1].lineage + 1, step))
            next_group_id, finished = history.next_group_id, history.finished
            granted, waiting = history.granted, history.waiting
        self.journal("lineage", lineage=lineages[-1].lineage, fork_step=lineages[-1].fork_step)
        buffer = StalenessBuffer(max_staleness=numbers.max_staleness, lineages=lineages)
        leases = LeaseBook(timeout_s=numbers.lease_timeout_s)
        for group_id in waiting:
            buffer.put(self.groups[group_id])
        for group_id, num_attempts in granted.items():
            leases.adopt(group_id, num_attempts - 1, "?", now=self.world.now)
        settings: dict[str, Any] = {
            "run_id": "run",
            "key": KEY,
            "max_staleness": numbers.max_staleness,
            "groups_per_step": numbers.groups_per_step,
            "group_size": numbers.group_size,
            "max_completion_tokens": 16,
            "vocab_size": 100,
            "heartbeat_s": numbers.heartbeat_s,
            "max_zero_signal_groups": 20 * numbers.groups_per_step,
            "dead_after_s": numbers.dead_after_s,
            "settings": {"sampling": {"temperature": 1.0}},
            "assets": {"config.json": b"{}", "tokenizer.json": b"[1]"},
            "digests": {"model": "aaaa", "tokenizer": "bbbb"},
        }
        settings |= overrides

        def of(record: type) -> dict[str, Any]:
            names = {field.name for field in dataclasses.fields(record)}
            return {name: value for name, value in settings.items() if name in names}

        session = Learner(
            LearnerSettings(
                admission=AdmissionSettings(**of(AdmissionSettings)),
                leases=LeaseSettings(**of(LeaseSettings)),
                site=Site(LEARNER_ID, "learner", LEARNER_ADDRESS),
            ),
            RunState(
                leases=leases,
                lineages=lineages,
                step=step,
                next_group_id=next_group_id,
                finished=finished,
            ),
            broadcast=make_broadcast("learner"),
            buffer=buffer,
            prompts=Prompts({}),
        )
        process = self.world.add(Process("learner", session, LEARNER_ADDRESS))
        process.on_action = lambda action: self._on_learner_action(process, action)
        self.learner = session
        self._discard_unusable(session)
        self._publish(process)
        self._train(process)
        return process

    def _on_learner_action(self, process: Process, action: Action) -> None:
        match action:
            case RecordGrant():
                lease = action.lease
                self.journal(
                    "granted", group=lease.group_id, attempt=lease.attempt, worker=action.worker_id
                )
            case StoreGroup():
                group = action.group
                self.groups[group.group_id] = group
                self.journal(
                    "accepted",
                    group=group.group_id,
                    attempt=group.attempt,
                    worker=group.worker_id,
                    place=["mem", 0, 0, ""],
                )
                self.world.later(0.01, lambda: self._stored(process, group))
            case RecordEnd():
                self.journal("discarded", group=action.group_id, reason=action.reason)
            case RecordCancel():
                self.journal("cancelled", group=action.group_id, worker=action.worker_id)
            case RecordRefusal():
                self.journal("refused", group=action.group_id, reason=action.reason)
            case _:
                raise AssertionError(action)

    def _stored(self, process: Process, group: Group) -> None:
        if process.is_alive:
            process.session.buffer.put(group)
            self.acked.append((group.group_id, group.worker_id))
            self.world.perform(process, process.session.stored(group.group_id, now=self.world.now))

    def _discard_unusable(self, session: Learner) -> None:
        for evicted in session.buffer.evict(step=session.step):
            self.journal("discarded", group=evicted.group.group_id, reason=evicted.reason)

    def _publish(self, process: Process) -> None:
        session = process.session
        lineage = session.lineages[-1].lineage
        parts = make_version(lineage, session.step, num_chunks=self.numbers.num_chunks)
        self.world.perform(process, session.broadcast.publish(*parts, now=self.world.now))

    def _train(self, process: Process) -> None:
        """Train one step if there is a batch, and come back."""
        if not process.is_alive:
            return
        session, delay_s = process.session, 0.05
        self._discard_unusable(session)
        if self.is_training and session.step < self.max_steps:
            groups = session.buffer.take(self.numbers.groups_per_step, step=session.step)
            if groups is not None:
                self.world.perform(process, session.grant(now=self.world.now))
                self.world.later(self.numbers.train_s, lambda: self._step(process, groups))
                return
        self.world.later(delay_s, lambda: self._train(process))

    def _step(self, process: Process, groups: list[Group]) -> None:
        if not process.is_alive:
            return
        session = process.session
        lineage, step = session.lineages[-1].lineage, session.step
        staleness = {str(step - v.step): 1 for group in groups for v in group.versions}
        self.journal(
            "trained",
            lineage=lineage,
            step=step + 1,
            consumed_at=step,
            groups=[group.group_id for group in groups],
            staleness=staleness,
        )
        self.world.perform(process, session.advance(step + 1, now=self.world.now))
        self._publish(process)
        if session.step % self.numbers.checkpoint_interval == 0:
            self.checkpoint = (lineage, session.step)
        self._train(process)

    # --- other nodes -----------------------------------------------------------------------------

    def node_settings(self, name: str, role: str, addresses: Sequence[str], **overrides: Any):
        numbers = self.numbers
        settings: dict[str, Any] = {
            "node_id": name,
            "role": role,
            "incarnation": f"{name}#{next(self._numbers_of_starts)}",
            "addresses": tuple(addresses),
            "advertise": None,
            "echo_version": "0",
            "reconnect_for_s": numbers.reconnect_for_s,
            "max_image_bytes": 1 << 20,
            "digests": {},
            "heartbeat_s": numbers.heartbeat_s,
            "dead_after_s": numbers.dead_after_s,
        }
        return NodeSettings(**(settings | overrides))

    def start_relay(
        self, name: str, *, connect: Sequence[str] = (LEARNER_ADDRESS,), **overrides: Any
    ) -> Process:
        address = f"tcp://{name}:1"
        settings = self.node_settings(name, "relay", connect, advertise=address, **overrides)
        session = Relay(settings, make_broadcast(name), now=self.world.now)
        process = self.world.add(Process(name, session, address))

        def on_action(action: Action) -> None:
            if isinstance(action, Configure):
                self.world.perform(process, session.configured({}, now=self.world.now))
            else:
                assert isinstance(action, VersionArrived), action

        process.on_action = on_action
        self.world.perform(process, session.start(now=self.world.now))
        return process

    def start_worker(
        self,
        name: str,
        *,
        connect: Sequence[str] = (LEARNER_ADDRESS,),
        address: str | None = None,
        build_s: float = 0.1,
        digests: dict[str, str] | None = None,
        has: dict[str, str] | None = None,
        **overrides: Any,
    ) -> Process:
        overrides |= {"advertise": address, "digests": has or {}}
        settings = self.node_settings(name, "worker", connect, **overrides)
        session = ReticentWorker(
            settings,
            make_broadcast(name),
            Outbox(max_deliveries=8, retry_s=1.0),
            now=self.world.now,
        )
        process = self.world.add(Process(name, session, address))
        engine = SimEngine(self, process, session, build_s=build_s, digests=digests or {})
        process.on_action = engine.on_action
        self.world.perform(process, session.start(now=self.world.now))
        return process

    # --- the independent check -------------------------------------------------------------------

    def audit(self) -> None:
        """Check promises 1 and 2 from the journal alone."""
        forks = [(r["lineage"], r["fork_step"]) for r in self.records if r["kind"] == "lineage"]
        ends: dict[int, list[str]] = {}
        accepted: set[int] = set()
        for record in self.records:
            match record["kind"]:
                case "accepted":
                    assert record["group"] not in accepted, f"{record} accepted twice"
                    accepted.add(record["group"])
                case "discarded":
                    ends.setdefault(record["group"], []).append(record["reason"])
                case "trained":
                    is_void = any(
                        lineage > record["lineage"] and record["step"] > fork_step
                        for lineage, fork_step in forks
                    )
                    for group_id in record["groups"]:
                        assert group_id in accepted, f"{group_id} trained before accepted"
                        oldest = min(v.step for v in self.groups[group_id].versions)
                        staleness = record["consumed_at"] - oldest
                        assert 0 <= staleness <= self.numbers.max_staleness, record
                        if not is_void:
                            ends.setdefault(group_id, []).append(f"step {record['step']}")
        twice = {group_id: found for group_id, found in ends.items() if len(found) > 1}
        assert not twice, twice
        lost = {group_id for group_id, _ in self.acked} - accepted
        assert not lost, lost
        assert self.learner is not None
        # What is in the step being made has no end yet, and there is at most one such step.
        open_groups = {g for g in accepted - ends.keys() if g not in self.learner.buffer}
        assert len(open_groups) <= self.numbers.groups_per_step + 2, open_groups

    def trained(self) -> list[int]:
        return [g for r in self.records if r["kind"] == "trained" for g in r["groups"]]


class ReticentWorker(Worker):
    """A worker that does not say how many groups it samples at one time."""

    def stats(self) -> NodeStats:
        return msgspec.structs.replace(super().stats(), num_places=0)


class SimEngine:
    """The worker's own work: build, install, sample one group after the other."""

    def __init__(
        self,
        run: Run,
        process: Process,
        session: Worker,
        *,
        build_s: float,
        digests: dict[str, str],
    ) -> None:
        self.run, self.process, self.session = run, process, session
        self.build_s, self.digests = build_s, digests
        self.fail_with: str | None = None
        self.is_hung = False

    def on_action(self, action: Action) -> None:
        world, session = self.run.world, self.session
        match action:
            case Configure():
                self.process.notes.append(f"configured with {sorted(action.assets)}")
                world.later(self.build_s, self._built)
            case Install():
                item = session.broadcast.store[action.version]
                assert item.storage == make_image(
                    action.version, num_chunks=self.run.numbers.num_chunks
                )
                assert blake3(item.storage).digest() == item.manifest.image_hash
                world.perform(self.process, session.installed(action.version, now=world.now))
            case Sample():
                if not self.is_hung:
                    version = session.installed_version
                    assert version is not None
                    delay_s = self.run.numbers.sample_s
                    world.later(delay_s, lambda: self._sampled(action.call, version))
            case Score():
                self._score(action.group)
            case Recall() | VersionArrived():
                pass  # it ends as it would have, and is not delivered
            case _:
                raise AssertionError(action)

    def _built(self) -> None:
        if self.process.is_alive:
            facts = EngineFacts(
                group_size=self.run.numbers.group_size,
                groups_per_batch=1,
                is_continuous=True,
                rules=PartialRules(ship_s=None),
                queue_share=2.0,
            )
            actions = self.session.built(facts, self.digests, now=self.run.world.now)
            self.run.world.perform(self.process, actions)

    def _sampled(self, call: EngineCall, version: PolicyVersion) -> None:
        if not self.process.is_alive:
            return
        world, session = self.run.world, self.session
        sample(world, self.process, call, make_member([version] * 3))
        num_tokens = 3 * self.run.numbers.group_size * (self.fail_with is None)
        actions = session.returned(call, num_tokens=num_tokens, now=world.now)
        world.perform(self.process, actions)

    def _score(self, group: PartialGroup) -> None:
        session, now = self.session, self.run.world.now
        if self.fail_with is not None:
            actions = session.failed(group.lease, self.fail_with, "it raised", now=now)
        else:
            rewards = [float(member) for member in range(len(group.members))]
            actions = session.scored(group, rewards, now=now)
        self.run.world.perform(self.process, actions)


def sample(world: World, process: Process, call: EngineCall, member: PartialRollout) -> None:
    """Let an engine finish all groups of a call, every member in the same way."""
    for group in call.groups:
        members = [member] * len(group.members)
        actions = process.session.sampled(call, group, members, now=world.now)
        world.perform(process, actions)


def make_member(versions: Sequence[PolicyVersion]) -> PartialRollout:
    """Return a finished member with one token per version."""
    rollout = make_rollout(versions)
    return PartialRollout().extended(
        rollout.token_ids,
        rollout.sampler_logprobs,
        rollout.policy_versions,
        finish_reason=rollout.finish_reason,
    )


def make_broadcast(node_id: str, **overrides: Any) -> Broadcast:
    settings: dict[str, Any] = {"window_bytes": 4096, "keep_versions": 2, "stall_s": 0.5}
    return Broadcast(node_id=node_id, **(settings | overrides))


def message_of(frames: Sequence[bytes]) -> Any:
    """Return the message inside the frames of one of our nodes."""
    return decode_message(decode_envelope(list(frames)))


def note_ways(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the step of each version for which the way is planned in time."""
    ready: list[int] = []

    def noting(session: Learner, *, now: float) -> list[Action]:
        newest = session.broadcast.newest_complete
        assert newest is None or newest.step < session.step, "that version is out already"
        ready.append(session.step)
        return []

    monkeypatch.setattr(Learner, "make_way", noting)
    return ready
