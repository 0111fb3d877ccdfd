"""The one file of the promises that knows the product: nodes, faults and records in plain words.

Scenarios speak of learner, relay and worker, of kill, freeze, cut and drop, and look at what was
trained, acknowledged and installed; `test_vocabulary.py` holds that none of them imports the
product. So a promise outlives every move and merge: only this file follows the code.

Level R: roles and sessions on a virtual clock, bytes on a network on paper. Nothing here sleeps,
opens a socket or reads a clock, and the same seed gives the same history.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo.core.errors import RefusedError, TransportError
from echo.core.metrics import Counters
from echo.core.rollout import PartialRollout, PolicyVersion
from echo.sim.network import Route
from echo.wire import codec
from echo.wire.actions import Send
from echo.wire.messages import Ack, Chunk, Deliver, Fetch
from tests.leases.unequal import Unequal
from tests.roles.harness import (
    KEY,
    LEARNER_ADDRESS,
    Process,
    make_group,
    make_image,
    make_version,
    message_of,
)

Version = tuple[int, int]
"""(lineage, step)."""

LEARNER = "learner"


class World:
    """One run: a learner that can be killed and resumed, relays, workers, and its records."""

    def __init__(
        self,
        directory: Path,
        *,
        seed: int = 0,
        delay_s: float = 0.01,
        jitter_s: float = 0.0,
        loss: float = 0.0,
        bytes_per_s: float = float("inf"),
        **numbers: Any,
    ) -> None:
        """Make an empty world.

        Args:
            directory: for what a resumed learner reads.
            seed: decides losses, jitter, and `chance`.
            delay_s, jitter_s, loss, bytes_per_s: of every link, unless `link` says otherwise.
            numbers: the configuration, such as max_staleness, groups_per_step, sample_s, train_s.
        """
        numbers = {"num_chunks": 6} | numbers
        link = Route(latency_s=delay_s, jitter_s=jitter_s, loss=loss, bytes_per_s=bytes_per_s)
        self.chance = random.Random(seed)
        self._run = Unequal(directory, tail=0.0, seed=seed, link=link, **numbers)
        self._world = self._run.world
        self._drops: list[Callable[[str, str, list[bytes]], bool]] = [self._note_needless]
        self._world.drop = self._is_dropped
        self.chunks_requested_though_held = 0

    def _is_dropped(self, sender: str, target: str, frames: list[bytes]) -> bool:
        """Ask every one of those that drop messages: some only look."""
        return sum(drop(sender, target, frames) for drop in self._drops) > 0

    # --- nodes -----------------------------------------------------------------------------------

    def learner(self, **settings: Any) -> None:
        """Start the learner, or resume it from its newest checkpoint."""
        self._run.start_learner(**settings)

    def relay(self, name: str = "r1") -> None:
        """Start a relay."""
        self._run.start_relay(name)

    def worker(
        self, name: str, *, via: Sequence[str] = (LEARNER,), serves: bool = False, **options: Any
    ) -> None:
        """Start a worker that knows the addresses of the nodes `via`, in this order.

        Args:
            name: of the worker.
            via: where it looks for the learner.
            serves: whether it can pass weights on to others.
            options: build_s, the seconds that its engine takes to build; has, the hashes that it
                says at once; digests, those that it knows once its engine is built.
        """
        connect = [LEARNER_ADDRESS if node == LEARNER else f"tcp://{node}:1" for node in via]
        address = f"tcp://{name}:1" if serves else None
        self._run.start_worker(name, connect=connect, address=address, **options)

    def restart(self, name: str, *, via: Sequence[str] = (LEARNER,)) -> None:
        """Start a node again that was killed."""
        if name == LEARNER:
            self.learner()
        elif name.startswith("r"):
            self.relay(name)
        else:
            self.worker(name, via=via)

    def rated_fleet(self, tokens_per_s: dict[str, float], **settings: Any) -> None:
        """Start a learner, and workers whose engines sample at these rates."""
        self._run.start(tokens_per_s, **settings)

    def num_stopped(self) -> int:
        """Return how many groups of rated engines were stopped because another was first."""
        return self._run.num_cancelled

    def sampling(self, worker: str) -> set[int]:
        """Return the groups that a rated engine samples."""
        return {group for group, _ in self._run.engines[worker].session.partials.running}

    def _process(self, name: str) -> Process:
        """Return the newest process of that name, dead or alive."""
        return next(p for p in reversed(self._world.processes) if p.name == name)

    # --- faults ----------------------------------------------------------------------------------

    def kill(self, name: str, *, silently: bool = False) -> None:
        """End a process; silently: its machine is gone, and nobody is told."""
        self._world.kill(self._process(name), is_silent=silently)

    def freeze(self, name: str) -> None:
        """Hold a process as SIGSTOP does: its connections stand and nothing moves."""
        self._world.freeze(self._process(name))

    def thaw(self, name: str) -> None:
        """Let a frozen process go on with what has arrived meanwhile."""
        self._world.thaw(self._process(name))

    def link(self, source: str, target: str, *, bytes_per_s: float, delay_s: float = 0.01) -> None:
        """Give one direction of a link its own rate."""
        route = Route(latency_s=delay_s, bytes_per_s=bytes_per_s)
        self._world.links.set_link(source, target, route)

    def drop(self, kind: str, *, times: int | None = None, source: str | None = None) -> list[str]:
        """Lose messages of a kind, the next `times` or all; return the list of those lost."""
        lost: list[str] = []
        name = kind.encode()

        def is_lost(sender: str, target: str, frames: list[bytes]) -> bool:
            is_meant = name in frames[0] and type(message_of(frames)).__name__ == kind
            if (
                not is_meant
                or source not in (None, sender)
                or (times is not None and len(lost) >= times)
            ):
                return False
            lost.append(f"{sender} to {target}")
            return True

        self._drops.append(is_lost)
        return lost

    def stop_dropping(self) -> None:
        """Let every message through again."""
        del self._drops[1:]

    def corrupt_chunks(self, source: str) -> None:
        """Falsify every chunk of weights that a node sends."""
        world, perform = self._world, self._world._send

        def send(process: Process, action: Send) -> None:
            if process.name == source and isinstance(message_of(list(action.frames)), Chunk):
                wrong = bytes(~np.frombuffer(bytes(action.frames[1]), np.uint8))
                action = Send(action.peer, [action.frames[0], wrong])
            perform(process, action)

        world._send = send  # type: ignore[method-assign]

    def hang_engine(self, worker: str) -> None:
        """Let a worker's engine begin groups and never finish them."""
        self._engine(worker).is_hung = True

    def fail_rewards(self, worker: str, reason: str | None) -> None:
        """Let a worker's groups end with this reason; None: no more."""
        self._engine(worker).fail_with = reason

    def begin_partials(self, worker: str, group: int, lengths: Sequence[int]) -> None:
        """Let a worker's hung engine give a group up after so many tokens of each rollout."""
        process = self._process(worker)
        held = process.session.partials
        [partial] = [held.running[key] for key in held.running if key[0] == group] or [
            partial
            for partial in held.take(9, group_size=2, installed=process.session.installed_version)
            if partial.lease.group_id == group
        ]
        held.running[partial.key] = partial
        partial.members = [
            PartialRollout().extended(
                np.arange(3, 3 + length, dtype=np.int32),
                np.full(length, -0.5, np.float32),
                np.full((length, 2), (1, 0), np.int32),
                finish_reason="abort",
            )
            for length in lengths
        ]
        held.park(partial)
        now = self._world.now
        self._world.perform(process, process.session.ship(interval_s=0, now=now))

    def _engine(self, worker: str) -> Any:
        return self._process(worker).on_action.__self__  # type: ignore[attr-defined]

    # --- operators -------------------------------------------------------------------------------

    def stop_training(self) -> None:
        """Have the learner make no further step; groups are still accepted."""
        self._run.is_training = False

    def leave(self, worker: str) -> None:
        """Stop a worker as its operator would."""
        process = self._process(worker)
        self._world.perform(process, process.session.leave("stopped by its operator"))
        self._world.kill(process)

    def stand_by(self, *workers: str) -> None:
        """Put exactly these workers on standby."""
        process = self._process(LEARNER)
        names = set(workers)
        self._world.perform(process, process.session.set_standby(names, now=self._world.now))

    # --- time ------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """Seconds since the beginning."""
        return self._world.now

    def run(self, seconds: float) -> None:
        """Let time pass."""
        self._world.run(self._world.now + seconds)

    def run_until(self, is_done: Callable[[], object], *, within_s: float = 60.0) -> float:
        """Let time pass until `is_done`; return the seconds that it took, fail after `within_s`."""
        began = self._world.now
        self._world.run_until(lambda: bool(is_done()), within_s=within_s)
        return self._world.now - began

    # --- what happened ---------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Optimizer steps of the present learner."""
        return self._process(LEARNER).session.step

    @property
    def num_chunks(self) -> int:
        """Chunks of each version."""
        return self._run.numbers.num_chunks

    def records(self, kind: str) -> list[dict[str, Any]]:
        """Return the learner's records of a kind, oldest first, over all its lives."""
        return [record for record in self._run.records if record["kind"] == kind]

    def trained(self) -> list[int]:
        """Return the groups of every step, in order, steps that were lost with a crash too."""
        return self._run.trained()

    def acknowledged(self) -> list[int]:
        """Return the groups that were acknowledged to a worker."""
        return [group for group, _ in self._run.acked]

    def ages(self) -> list[int]:
        """Return how many steps old the oldest token of each trained group was."""
        return [
            record["consumed_at"] - min(v.step for v in self._run.groups[group].versions)
            for record in self.records("trained")
            for group in record["groups"]
        ]

    def sampled_by(self, group: int) -> set[int]:
        """Return the steps of the versions that sampled an accepted group."""
        return {version.step for version in self._run.groups[group].versions}

    def leased(self, worker: str) -> set[int]:
        """Return the groups that the learner has leased to a worker."""
        leases = self._process(LEARNER).session.leases
        return {record.group_id for record in leases.worker_leases(worker)}

    def installed(self, worker: str) -> Version | None:
        """Return the version that a worker samples from, or a relay holds whole."""
        version = self._process(worker).session.version_in_use()
        return None if version is None else (version.lineage, version.step)

    def is_bit_exact(self, node: str) -> bool:
        """Return whether every whole version of a node is, byte for byte, what was published."""
        images = self._process(node).session.broadcast.store
        whole = {version: image for version, image in images.items() if image.is_complete}
        return bool(whole) and all(
            image.storage == make_image(version, num_chunks=self.num_chunks)
            for version, image in whole.items()
        )

    def parent(self, node: str) -> str:
        """Return from whom a node takes weights."""
        return self._process(node).session.stats().parent

    def num_hops(self, node: str) -> int:
        """Return over how many links weights reach a node from the learner."""
        return 0 if node == LEARNER else 1 + self.num_hops(self.parent(node))

    def is_admitted(self, node: str) -> bool:
        """Return whether a node lives and takes part."""
        process = self._process(node)
        return process.is_alive and process.session.is_admitted

    def is_on_standby(self, worker: str) -> bool:
        """Return whether a worker stands by."""
        return self._process(worker).session.standby_since is not None

    def end(self, node: str) -> tuple[str, str] | None:
        """Return (reason, message) with which a node ended itself, or None."""
        stop = self._process(node).stop
        return None if stop is None else (stop.reason, str(stop.error or ""))

    def has_failed(self, node: str) -> bool:
        """Return whether a node ended itself with an error for its operator."""
        stop = self._process(node).stop
        return stop is not None and isinstance(stop.error, RefusedError | TransportError)

    def notes(self, node: str) -> list[str]:
        """Return what a node logged."""
        return self._process(node).notes

    def count(self, node: str, name: str) -> float:
        """Return one of a node's counters."""
        counters: Counters = self._process(node).session.counters
        return counters[name]

    def _note_needless(self, sender: str, target: str, frames: list[bytes]) -> bool:
        """Count the chunks that a node asks for although it holds them."""
        if b"Fetch" in frames[0] and isinstance(fetch := message_of(frames), Fetch):
            images = self._process(sender).session.broadcast.store
            if (image := images.get(fetch.version)) is not None:
                held = image.has_chunk[fetch.link :: fetch.num_links]
                self.chunks_requested_though_held += sum(
                    sum(held[start:stop]) for start, stop in fetch.ranges
                )
        return False

    def chunks_held(self, node: str) -> int:
        """Return how many chunks a node has of the version that it is fetching, 0 for none."""
        version, num_held, num_chunks = self._process(node).session.broadcast.progress()
        return num_held if version is not None and num_held < num_chunks else 0

    def undelivered(self, worker: str) -> int:
        """Return how many finished groups a worker holds that are not acknowledged."""
        return len(self._process(worker).session.outbox)

    def outbox_bound(self, worker: str) -> int:
        """Return how many of them it may hold."""
        bound: int = self._process(worker).session.outbox.max_deliveries
        return bound

    def capacity(self, worker: str) -> int:
        """Return how many groups a worker would take at present."""
        places: int = self._process(worker).session.capacity()
        return places

    def num_waiting(self) -> int:
        """Return how many accepted groups wait for their step."""
        return len(self._process(LEARNER).session.buffer)

    def num_granted(self, worker: str) -> int:
        """Return how many leases a worker was ever granted."""
        return sum(record["worker"] == worker for record in self.records("granted"))

    def partial_tokens(self, worker: str, group: int) -> list[list[int]]:
        """Return the tokens that a worker holds of each unfinished rollout of a group."""
        partials = self._process(worker).session.partials
        held = partials.interrupted | partials.running
        [partial] = [held[key] for key in held if key[0] == group]
        return [member.token_ids.tolist() for member in partial.members]

    def audit(self) -> None:
        """Check staleness and exactly-once from the records alone; fail where they do not hold."""
        self._run.audit()

    def without_end(self) -> set[int]:
        """Return acknowledged groups that were neither trained nor discarded nor wait."""
        ended = {record["group"] for record in self.records("discarded")} | set(self.trained())
        buffer = self._process(LEARNER).session.buffer
        return {
            group for group in self.acknowledged() if group not in ended and group not in buffer
        }

    # --- strangers and liars ---------------------------------------------------------------------

    def say_garbage(self, node: str, *, times: int) -> int:
        """Feed a node random frames; return the messages with which it answered."""
        session = self._process(node).session
        answers = 0
        for size in range(times):
            frames = [self.chance.randbytes(size) for _ in range(self.chance.randrange(4))]
            actions = session.receive("in99", frames, now=self.now)
            answers += sum(isinstance(action, Send) for action in actions)
        return answers

    def deliver(
        self,
        group: int,
        *,
        worker: str = "w1",
        attempt: int = 0,
        version: Version = (1, 0),
        size: int | None = None,
        change: dict[str, Any] | None = None,
    ) -> tuple[str, str]:
        """Hand the learner a result as from a worker; return (outcome, reason) of its answer.

        The outcome is "stored" where the learner keeps it and acknowledges it later.
        """
        learner = self._process(LEARNER)
        content = make_group(
            group,
            PolicyVersion(*version),
            attempt=attempt,
            worker=worker,
            size=size or self._run.numbers.group_size,
        )
        if change:
            first = dataclasses.replace(content.rollouts[0], **change)
            content = dataclasses.replace(content, rollouts=(first, *content.rollouts[1:]))
        payload = codec.encode_group(content)
        message = Deliver(group_id=group, attempt=attempt)
        frames = codec.encode(message, payload, source=worker, target=LEARNER)
        peer = self._peer_of(worker)
        actions = learner.session.receive(peer, frames, now=self.now)
        self._world.perform(learner, actions)
        for action in actions:
            if isinstance(action, Send) and isinstance(ack := message_of(action.frames), Ack):
                return ack.outcome, ack.reason
        is_stored = any(type(action).__name__ == "StoreGroup" for action in actions)
        return ("stored", "") if is_stored else ("ignored", "")

    def _peer_of(self, worker: str) -> str:
        """Return the name of the link on which the learner hears a worker."""
        peer: str = self._process(LEARNER).session._routes.peer_of(worker) or "in0"
        return peer

    def publish_forged(self, *, run: str = "run", is_foreign: bool = False) -> None:
        """Have the learner offer a version of a run, signed with its own key or a foreign one."""
        learner = self._process(LEARNER)
        key = Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33))) if is_foreign else KEY
        lineage = learner.session.lineages[-1].lineage
        parts = make_version(
            lineage, learner.session.step + 1, num_chunks=self.num_chunks, key=key, run=run
        )
        self._world.perform(learner, learner.session.broadcast.publish(*parts, now=self.now))

    @contextmanager
    def watch(self, look: Callable[[str, str, Any], None]) -> Iterator[None]:
        """Call `look(sender, receiver, message)` for every message sent within the block."""

        def seen(sender: str, target: str, frames: list[bytes]) -> bool:
            look(sender, target, message_of(frames))
            return False

        self._drops.append(seen)
        yield
        self._drops.remove(seen)
