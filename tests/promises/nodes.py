"""What `world.py` is for level N: real nodes on a virtual loop, with real files below them.

`LearnerNode`, `WorkerNode` and `RelayNode` are built as a process builds them, and run on an
asyncio loop on virtual time: messages go over a network on paper, threads are inline
(`echo/sim/clock.py`), and so minutes take a second, the same each time. Only the engine, the
trainer, the task and the model are stand-ins: samples and steps take the seconds that a scenario
says.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import random
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from blake3 import blake3

from echo.config.load import parse_config
from echo.config.schema import Config
from echo.core.errors import EchoError, EngineError
from echo.core.metrics import Snapshot
from echo.core.rollout import Group, PolicyVersion
from echo.engine.engine import NOBODY, UNVERSIONED, Completion, Engine, Request, Sampling, Watcher
from echo.leases.partials import PartialRules
from echo.net.transport import PeerId, TransportOptions
from echo.records.ledger import AnyRecord, Ledger, Published
from echo.runtime import relay
from echo.runtime.event_log import EventLog
from echo.runtime.learner import setup
from echo.runtime.learner.prompts import PromptSource
from echo.runtime.node import Node
from echo.runtime.worker import setup as worker_setup
from echo.runtime.worker.node import WorkerParts
from echo.sim.clock import InlineThreads, VirtualLoop
from echo.sim.network import Network, Port, Route
from echo.sim.transport import SimTransport
from echo.tasks.builtin import AdditionTask
from echo.tasks.rewards import LaterHost
from echo.train.step import StepError, StepResult
from echo.weights.manifest import TensorSpec
from echo.weights.store import Patch
from echo.wire.messages import FULL, Fetch
from tests.e2e.audit import audit, read_ledger
from tests.roles.harness import message_of

Version = tuple[int, int]
"""(lineage, step)."""

LEARNER = "learner"
ADDRESS = "tcp://{}:7700"
CHUNK_BYTES = 4096
POINTS = ("stored", "stepped", "trained", "published", "checkpoint", "checkpointed")
"""Where a learner can be killed, in the order in which a group and a step come by them: the group
is on the disk and nobody was told; the step is made, the records do not know; they know, nothing is
published; the version is offered; the checkpoint is written, not visible; it is visible."""
OPTIONS = TransportOptions(
    heartbeat_s=0.5, dead_after_s=3.0, min_redial_s=0.1, max_redial_s=1.0, linger_s=0.5
)
SETTINGS: dict[str, dict[str, Any]] = {
    "sync": {"max_staleness": 3, "publish_period": 1},
    "sampling": {"max_completion_tokens": 4},
    "batch": {"group_size": 2, "groups_per_step": 2, "keep_zero_variance": True},
    "checkpoint": {"interval_steps": 2, "keep_last": 2},
    "eval": {"interval_steps": 0},
    "limits": {"min_free_disk_bytes": 0},
    "security": {"curve": False},
    "network": {
        "heartbeat_s": 0.5,
        "dead_after_s": 5.0,
        "lease_timeout_s": 20.0,
        "reconnect_for_s": 60.0,
        "chunk_bytes": CHUNK_BYTES,
        "codec": "full",
    },
}
INHERITED = ("sync", "sampling", "batch")


class KilledError(BaseException):
    """The process is gone in the middle of this call."""


class ThreadsOfProcess(InlineThreads):
    """Calls that take as long as the world says."""

    def __init__(self, world: NodeWorld, name: str) -> None:
        super().__init__()
        self.world = world
        self.name = name

    def takes(self, pool: str, function: Callable[..., Any]) -> float:
        return self.world.takes(self.name, pool, function)


class Process:
    """One start of one node."""

    def __init__(self, world: NodeWorld, name: str) -> None:
        self.name = name
        self.world = world
        self.threads = ThreadsOfProcess(world, name)
        self.log = logging.getLogger(f"promises.{name}")
        self.engine: StubEngine | None = None
        self.node: Any = None
        self.task: asyncio.Task[str] | None = None
        self.is_alive = True
        self.requested_though_held = 0
        self.has_published = False
        """Whether a version was recorded whose first offer has not left yet."""
        self.full_disk = ""
        """What a disk takes nothing more of: "records" or "checkpoints"."""
        self.kill_at: tuple[str, int] | None = None

    def check_alive(self) -> None:
        if not self.is_alive:
            raise KilledError

    def reach(self, point: str) -> None:
        """Die here if this point was chosen and the learner has come by it often enough."""
        self.check_alive()
        if self.kill_at is None or self.kill_at[0] != point:
            return
        self.kill_at = point, self.kill_at[1] - 1
        if self.kill_at[1] == 0:
            self.kill()
            raise KilledError

    def kill(self) -> None:
        """End it where it stands: nothing is written or sent any more."""
        self.is_alive = False
        self.threads.close()
        if self.node is not None:
            self.node.transport.kill()
        if self.task is not None:
            self.task.cancel()


class WatchedTransport(SimTransport):
    """A transport that counts needless requests, and at whose first offer a learner may die."""

    def __init__(self, process: Process, network: Network, listen: str | None) -> None:
        super().__init__(network, Port(process.name, address=listen), OPTIONS)
        self._process = process

    def send(
        self,
        peer: PeerId,
        frames: Sequence[bytes | bytearray | memoryview],
        *,
        is_public: bool = False,
    ) -> bool:
        process = self._process
        if not process.is_alive:
            return False
        is_sent = super().send(peer, frames, is_public=is_public)
        head = bytes(frames[0])
        if b"Fetch" in head and isinstance(fetch := message_of(list(frames)), Fetch):
            process.requested_though_held += num_held(process.node.session.broadcast, fetch)
        if b"Announce" in head and process.has_published:
            process.has_published = False
            process.reach("published")
        return is_sent


def num_held(broadcast: Any, fetch: Fetch) -> int:
    """Return how many of the chunks that are asked for are held."""
    is_full = fetch.form == FULL
    held = broadcast.store if is_full else broadcast.encoded_versions
    item = held.get(fetch.version if is_full else (fetch.version, fetch.form))
    if item is None:
        return 0
    has_chunk = item.has_chunk[fetch.link :: fetch.num_links]
    return sum(sum(has_chunk[start:stop]) for start, stop in fetch.ranges)


class FullDisk:
    """A file that takes half of what is written to it, and says that the disk is full."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: memoryview) -> int:
        if len(data) > 1:
            return int(self._file.write(data[: len(data) // 2]))
        raise OSError(errno.ENOSPC, "No space left on device")


class WatchedLedger(Ledger):
    """The records, at whose points a learner may die, on a disk that may be full."""

    process: Process
    num_unsynced = 0

    def _write_queue(self, *, durably: bool) -> None:
        self.process.check_alive()
        if self.process.full_disk == "records":
            self._next_file()
            self._file = FullDisk(self._file)
            [num_pages] = self._database.execute("PRAGMA page_count").fetchone()
            self._database.execute(f"PRAGMA max_page_count = {num_pages}")
        super()._write_queue(durably=durably)

    def append(self, record: AnyRecord) -> None:
        self.process.has_published |= isinstance(record, Published)
        super().append(record)

    def store(self, *arguments: Any) -> None:
        super().store(*arguments)
        self.num_unsynced += 1

    def sync(self) -> None:
        super().sync()
        if self.num_unsynced:
            self.num_unsynced = 0
            self.process.reach("stored")

    def trained(self, *arguments: Any, **named: Any) -> Any:
        self.process.reach("stepped")
        staleness = super().trained(*arguments, **named)
        self.process.reach("trained")
        return staleness

    def checkpointed(self, **named: Any) -> None:
        super().checkpointed(**named)
        self.process.reach("checkpointed")


class StubTrainer:
    """Weights that move a little with each step, and groups that no step can bear."""

    unrounded: frozenset[str] = frozenset()

    def __init__(self, process: Process, checkpoint: Path | None) -> None:
        self._process = process
        world = process.world
        self.step_count = 0
        self._weights = np.random.default_rng(0).standard_normal(world.num_weights)
        if checkpoint is not None:
            self.step_count = int((checkpoint / "step").read_text())
            self._weights = np.frombuffer((checkpoint / "weights").read_bytes()).copy()

    def describe_rows(self) -> str:
        return "no model, no rows"

    def refusal(self, group: Group) -> str | None:
        world = self._process.world
        return "reward_too_large" if group.group_id in world.refused_groups else None

    def step(self, groups: Sequence[Group]) -> StepResult:
        if self.find_faulty(groups):
            raise StepError("the computation raised", reason="step_error")
        self.step_count += 1
        self._weights[self.step_count % 97 :: 97] += 0.01
        return StepResult(metrics=self._process.world.metrics_of(self.step_count))

    def find_faulty(self, groups: Sequence[Group]) -> dict[int, str]:
        bad = self._process.world.poisoned_groups
        return {g.group_id: "step_error" for g in groups if g.group_id in bad}

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"w": torch.from_numpy(self._weights.astype(np.float32))}

    snapshot = tensors

    def save_state(self, directory: Path) -> None:
        if self._process.full_disk == "checkpoints":
            raise OSError(errno.ENOSPC, "No space left on device")
        (directory / "step").write_text(str(self.step_count))
        (directory / "weights").write_bytes(self._weights.tobytes())
        self._process.reach("checkpoint")


class StubExporter:
    """Nothing of the weights is kept for other programs."""

    def __init__(self, *_: Any) -> None: ...

    def export(self, *_: Any) -> None: ...


class StubEngine(Engine):
    """Tokens of the installed version, all at once."""

    def __init__(self, *, takes_patches: bool = False) -> None:
        self.takes_patches = takes_patches
        self.num_patched = 0
        self._installed: PolicyVersion | None = None
        self.refuses: set[int] = set()

    @property
    def installed(self) -> PolicyVersion | None:
        return self._installed

    def load(self, tensors: Any, version: PolicyVersion = UNVERSIONED) -> None:
        if version.step in self.refuses:
            raise EngineError("the probe found other weights")
        self._installed = version

    def patch(self, patch: Patch, image: memoryview, specs: Sequence[TensorSpec]) -> None:
        patch.write(image)
        self.load(None, patch.version)
        self.num_patched += 1

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, watcher: Watcher = NOBODY, **_: Any
    ) -> list[Completion]:
        version, found = self._installed, []
        assert version is not None
        for request in requests:
            number = sampling.max_completion_tokens - len(request.prefix_ids)
            found.append(
                Completion(
                    request.request_id,
                    np.arange(3, 3 + number, dtype=np.int32),
                    np.full(number, -0.5, np.float32),
                    "length",
                    np.tile(np.array([version.lineage, version.step], np.int32), (number, 1)),
                )
            )
            watcher.on_tokens(number)
            watcher.on_completion(found[-1])
        return found

    @contextmanager
    def holding(self, exact_version: PolicyVersion) -> Iterator[None]:
        yield

    def max_concurrent_rollouts(self, prompt_tokens: int, completion_tokens: int) -> int:
        return 4

    def close(self) -> None:
        self._installed = None


class NodeWorld:
    """One run directory, the nodes that were started in it, and the network between them."""

    is_watching = True

    def __init__(
        self,
        directory: Path,
        *,
        seed: int = 0,
        delay_s: float = 0.01,
        jitter_s: float = 0.0,
        bytes_per_s: float = float("inf"),
        sample_s: float = 0.3,
        train_s: float = 0.3,
        noise: float = 0.0,
        image_bytes: int = 8 * CHUNK_BYTES,
        log_events: bool = False,
        **sections: dict[str, Any],
    ) -> None:
        """Make an empty world.

        Args:
            directory: real, for records, checkpoints and versions.
            seed: decides jitter and noise.
            delay_s, jitter_s, bytes_per_s: of every link, unless `link` says otherwise.
            sample_s, train_s: seconds of a call of an engine, and of an optimizer step.
            noise: standard deviation of these, as a share.
            image_bytes: size of a version.
            log_events: whether each process records what its role is fed (`event_logs`).
            sections: the configuration of all nodes, by section.
        """
        self.directory = directory
        self.chance = random.Random(seed)
        self.sections = sections
        self.num_weights = image_bytes // 2
        self.poisoned_groups: set[int] = set()
        self.refused_groups: set[int] = set()
        self.metrics_of: Callable[[int], dict[str, float]] = lambda step: {}
        self.rows: list[dict[str, Any]] = []
        """Of metrics, as they were written."""
        self.snapshots: list[Snapshot] = []
        self.event_logs: list[tuple[str, Path]] = []
        """(name of the node, its event log), in the order of their starts."""
        self._log_events = log_events
        self._noise = noise
        self.sample_s, self.train_s = sample_s, train_s
        self._slow_disks: dict[str, float] = {}
        route = Route(latency_s=delay_s, jitter_s=jitter_s, bytes_per_s=bytes_per_s)
        self._network = Network(seed=seed, between=route, bulk_bytes=0)
        self._processes: list[Process] = []
        self._told: list[tuple[str, str]] = []
        self._loop = VirtualLoop()
        self._handler = _Notes(self._told)
        logging.getLogger("promises").addHandler(self._handler)
        logging.getLogger("promises").setLevel(logging.INFO)

    def close(self) -> None:
        """End every process."""

        async def end() -> None:
            for process in self._processes:
                if process.is_alive:
                    process.kill()
            await asyncio.sleep(0.1)
            tasks = [process.task for process in self._processes if process.task is not None]
            await asyncio.gather(*tasks, return_exceptions=True)

        self._loop.run_until_complete(end())
        self._loop.close()
        logging.getLogger("promises").removeHandler(self._handler)

    def write_metrics(self, step: int, row: Any) -> None:
        self.rows.append(dict(row))

    def show(self, snapshot: Snapshot) -> None:
        self.snapshots.append(snapshot)

    def takes(self, name: str, pool: str, function: Callable[..., Any]) -> float:
        """Return the seconds of the next call in a pool of a node."""
        if pool == "weights":
            return self._slow_disks.get(name, 0.0)
        is_step = getattr(function, "__func__", None) is StubTrainer.step
        seconds = self.sample_s if pool == "sample" else self.train_s if is_step else 0.0
        return max(0.0, seconds * (1 + self._noise * self.chance.gauss())) if seconds else 0.0

    # --- nodes -----------------------------------------------------------------------------------

    def learner(
        self,
        *,
        address: str = LEARNER,
        kill_at: str | None = None,
        times: int = 1,
        **sections: Any,
    ) -> None:
        """Start the learner, or resume it from its newest checkpoint.

        Args:
            address: where it listens.
            kill_at: one of POINTS, to die there.
            times: how often it comes by first, this one included.
            sections: see `NodeWorld`.

        Raises:
            EchoError: if it cannot begin.
        """
        process = Process(self, LEARNER)
        process.kill_at = None if kill_at is None else (kill_at, times)
        self._start(process, self._build_learner, {"address": address, **sections})

    def relay(self, name: str = "r1", *, via: str = LEARNER, **sections: Any) -> None:
        """Start a relay."""
        self._start(Process(self, name), self._build_relay, {"via": via, **sections})

    def worker(
        self,
        name: str,
        *,
        via: str = LEARNER,
        serves: bool = False,
        in_place: bool = False,
        **sections: Any,
    ) -> None:
        """Start a worker, which may pass weights on to others, and take them in place."""
        how = {"via": via, "serves": serves, "in_place": in_place}
        self._start(Process(self, name), self._build_worker, {**how, **sections})

    def _start(self, process: Process, build: Callable[..., Any], sections: Any) -> None:
        async def start() -> None:
            process.node = await build(process, **sections)
            process.task = asyncio.create_task(process.node.run(), name=process.name)

        self._loop.run_until_complete(start())
        self._processes.append(process)

    def _events(self, process: Process) -> EventLog:
        if not self._log_events:
            return EventLog()
        path = self.directory / f"{len(self.event_logs)}.events"
        self.event_logs.append((process.name, path))
        return EventLog(path, log=process.log)

    def _config(self, role: str, sections: dict[str, Any], **own: Any) -> Config:
        table = {name: dict(section) for name, section in SETTINGS.items()}
        for more in (self.sections, sections):
            for name, section in more.items():
                table.setdefault(name, {}).update(section)
        if role == LEARNER:
            table["model"] = {"name": str(self.directory)}
        else:
            for name in (*INHERITED, "checkpoint", "eval"):
                table.pop(name, None)
        table.setdefault("run", {}).update(name="run", dir=str(self.directory))
        table.setdefault(role, {}).update(own)
        return parse_config(table, role=role)

    async def _transport(self, process: Process, listen: str | None) -> WatchedTransport:
        transport = WatchedTransport(process, self._network, listen)
        await transport.start()
        return transport

    async def _build_learner(self, process: Process, *, address: str, **sections: Any) -> Node:
        sections = {"run": {"max_steps": 1_000_000}, **sections}
        config = self._config(LEARNER, sections, listen=ADDRESS.format(address))
        ledger = type("LedgerOfProcess", (WatchedLedger,), {"process": process})
        task = AdditionTask()
        text: Any = SimpleNamespace(decode=str, encode_prompt=lambda prompt, tools: [1, 2, 3])
        data: Any = SimpleNamespace(
            model_dir=self.directory,
            task=task,
            host=LaterHost(),
            prompts=PromptSource(task, text, seed=0),
            text=text,
            digests={"model": "m"},
            vocab_size=32,
            lora=None,
            read_assets=dict,
        )
        transport = await self._transport(process, config.learner.listen)
        with ExitStack() as patches:
            for module, name, stub in (
                (setup, "Ledger", ledger),
                (setup, "build_trainer", lambda config, model, start, lora, crew: StubTrainer(
                    process, start.checkpoint
                )),
                (setup, "DirectoryExporter", StubExporter),
            ):  # fmt: skip
                patches.enter_context(mock.patch.object(module, name, stub))
            try:
                return setup.assemble_learner(
                    config,
                    data,
                    transport,
                    resume=(self.run_dir / "ledger.sqlite").exists(),
                    follower=self,
                    threads=process.threads,
                    log=process.log,
                    events=self._events(process),
                )
            except BaseException:
                await transport.close()
                raise

    async def _build_relay(self, process: Process, *, via: str, **sections: Any) -> Node:
        address = ADDRESS.format(process.name)
        own = {"name": process.name, "listen": address, "connect": [ADDRESS.format(via)]}
        config = self._config("relay", sections, **own)
        transport = await self._transport(process, config.relay.listen)
        node = relay.assemble_relay(
            config,
            transport,
            threads=process.threads,
            log=process.log,
            events=self._events(process),
        )
        self._write_inline(node)
        return node

    async def _build_worker(
        self, process: Process, *, via: str, serves: bool, in_place: bool, **sections: Any
    ) -> Node:
        own: dict[str, Any] = {"name": process.name, "connect": [ADDRESS.format(via)]}
        if serves:
            own["listen"] = ADDRESS.format(process.name)
        config = self._config("worker", sections, **own)
        process.engine = StubEngine(takes_patches=in_place)

        def build_parts(*arguments: Any) -> WorkerParts:
            assert process.engine is not None
            return WorkerParts(
                engine=process.engine,
                host=LaterHost(),
                runner=None,
                decode=str,
                sampling=Sampling(1.0, 1.0, 0, 4, ()),
                group_size=2,
                max_prompt_tokens=1 << 20,
                groups_per_batch=2,
                rules=PartialRules(),
                partials_path=self.run_dir / "workers" / process.name / "partials.bin",
                installed_path=self.run_dir / "workers" / process.name / "installed.jsonl",
                agents=None,
                digests={"model": "m"},
                read_local_image=lambda: None,
            )

        transport = await self._transport(process, config.worker.listen)
        with mock.patch.object(worker_setup, "build_parts", build_parts):
            node = worker_setup.assemble_worker(
                config,
                transport,
                threads=process.threads,
                log=process.log,
                events=self._events(process),
            )
        self._write_inline(node)
        return node

    @staticmethod
    def _write_inline(node: Any) -> None:
        """Have small files beside the versions written at once, in the loop."""
        thread = getattr(node.version_store, "_thread", None)
        if thread is not None:
            thread.close()

    def _process(self, name: str) -> Process:
        """Return the newest process of that name, dead or alive."""
        return next(p for p in reversed(self._processes) if p.name == name)

    def node(self, name: str) -> Any:
        """Return what runs in the newest process of that name, for tests of its insides."""
        return self._process(name).node

    # --- faults ----------------------------------------------------------------------------------

    def kill(self, name: str) -> None:
        """End a process as SIGKILL does."""

        async def kill() -> None:
            self._process(name).kill()

        self._loop.run_until_complete(kill())
        self.run(0.01)

    def interrupt(self, name: str) -> None:
        """Press Ctrl-C once."""
        self.call(self._process(name).node.interrupt)

    def call(self, function: Callable[[], Any]) -> None:
        """Have something called in the loop, as nodes' own parts are."""
        self._loop.call_soon(function)

    def link(self, source: str, target: str, *, bytes_per_s: float, delay_s: float = 0.01) -> None:
        """Give one direction of a link its own rate."""
        route = Route(latency_s=delay_s, bytes_per_s=bytes_per_s)
        self._network.set_route(source, target, route)

    def cut(self, a: str, b: str) -> None:
        """Cut two nodes apart."""
        self._loop.call_soon(self._network.cut, a, b)

    def mend(self, a: str, b: str) -> None:
        """Let them reach each other again."""
        self._loop.call_soon(self._network.mend, a, b)

    def slow_disk(self, name: str, seconds: float) -> None:
        """Let each chunk take so long to be written at a node."""
        self._slow_disks[name] = seconds

    def enlarge_store(self, name: str, num_bytes: int) -> None:
        """Let the versions of a node take so many bytes from now on."""
        self._process(name).node.version_store.limit_bytes = num_bytes

    def damage_chunks(self, name: str, *, number: int) -> None:
        """Let the next chunks that a node sends arrive with other bytes."""
        transport = self._process(name).node.transport
        send, left = transport.send, [number]

        def damage(peer: PeerId, frames: Sequence[Any], **how: bool) -> bool:
            if b"Chunk" in bytes(frames[0]) and left[0]:
                left[0] -= 1
                frames = [frames[0], bytes(len(frames[1]))]
            return bool(send(peer, frames, **how))

        transport.send = damage

    def fill_disk(self, *, of: str) -> None:
        """Let the learner's disk take no more "records" or "checkpoints"; "": all again."""
        self._process(LEARNER).full_disk = of

    def refuse_version(self, worker: str, step: int) -> None:
        """Let a worker's engine refuse the version of a step."""
        engine = self._process(worker).engine
        assert engine is not None
        engine.refuses.add(step)

    def flip_bit(self, name: str) -> None:
        """Flip a bit of the newest version in a node's memory."""
        store = self._process(name).node.session.broadcast.store
        store[max(store)].storage[1234] ^= 16

    def poison(self, group: int) -> None:
        """Let a group make every step raise that it is part of."""
        self.poisoned_groups.add(group)

    def refuse_group(self, group: int) -> None:
        """Let the trainer take nothing of a group from now on, as with another loss."""
        self.refused_groups.add(group)

    def damage_record(self, number: int) -> Callable[[], None]:
        """Falsify one of the records, which count from 1; return what undoes it."""
        path = self.run_dir / "ledger.sqlite"
        data = path.read_bytes()
        with closing(sqlite3.connect(path)) as database, database:
            damage = "UPDATE records SET body = replace(body, 'kind', 'kynd') WHERE seq = ?"
            database.execute(damage, (number,))
        return lambda: [path.write_bytes(data)].clear()

    def tear_records(self) -> None:
        """Leave half a record behind the last one, as a power cut does."""
        path = self.run_dir / "ledger.sqlite"
        log = path.with_name("ledger.sqlite-wal")
        data = path.read_bytes()
        with closing(sqlite3.connect(path)) as database:
            database.execute("PRAGMA journal_mode = WAL")
            with database:
                database.execute("INSERT INTO records VALUES (1000000, '{}', x'00')")
            torn = log.read_bytes()[:-100]
        path.write_bytes(data)
        log.write_bytes(torn)

    def damage_checkpoint(self, step: int) -> None:
        """Flip a bit of a checkpoint."""
        path = self.run_dir / "checkpoints" / f"step_{step:06d}" / "weights"
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)

    # --- time ------------------------------------------------------------------------------------

    @property
    def now(self) -> float:
        """Seconds since the beginning."""
        return self._loop.time()

    def run(self, seconds: float) -> None:
        """Let time pass."""
        self._loop.run_until_complete(asyncio.sleep(seconds))

    def run_until(self, is_done: Callable[[], object], *, within_s: float = 60.0) -> float:
        """Let time pass until `is_done`; return the seconds that it took, fail after `within_s`."""
        began = self.now

        async def wait() -> None:
            while not is_done():
                assert self.now < began + within_s, f"not within {within_s:g} s: {self._told[-8:]}"
                await asyncio.sleep(0.02)

        self._loop.run_until_complete(wait())
        return self.now - began

    @property
    def told(self) -> list[tuple[str, str]]:
        """(node, line) of all that was logged."""
        return list(self._told)

    @property
    def weights(self) -> Any:
        """The present learner's weights."""
        return self._process(LEARNER).node._trainer.tensors()["w"].numpy()

    # --- what happened ---------------------------------------------------------------------------

    @property
    def run_dir(self) -> Path:
        return self.directory / "run"

    @property
    def step(self) -> int:
        """Optimizer steps of the present learner."""
        step: int = self._process(LEARNER).node.session.step
        return step

    def is_alive(self, name: str) -> bool:
        """Return whether a process has neither ended nor been killed."""
        task = self._process(name).task
        return task is not None and not task.done()

    def end(self, name: str) -> tuple[str, str] | None:
        """Return (reason, message) with which a node ended itself, or None."""
        process = self._process(name)
        if process.task is None or not process.task.done() or not process.is_alive:
            return None
        error = process.task.exception()
        if error is None:
            return process.task.result(), ""
        assert isinstance(error, EchoError), repr(error)
        return "failed", str(error)

    def start_error(self, start: Callable[[], None]) -> str:
        """Return the message with which a node refuses to start; empty if it starts."""
        try:
            start()
        except EchoError as error:
            return str(error)
        return ""

    def notes(self, node: str) -> list[str]:
        """Return what a node logged."""
        return [text for name, text in self._told if name == node]

    def records(self, kind: str) -> list[dict[str, Any]]:
        """Return the learner's records of a kind, oldest first, over all its lives."""
        return [r for r in read_ledger(self.run_dir) if r["kind"] == kind]

    def trained(self) -> list[int]:
        """Return the groups of every step, in order, steps that were lost with a crash too."""
        return [group for record in self.records("trained") for group in record["groups"]]

    def stored(self) -> list[int]:
        """Return the groups that were accepted, each as often as it was."""
        return [record["group"] for record in self.records("accepted")]

    def ends_of(self, group: int) -> list[str]:
        """Return the reasons with which a group was discarded."""
        return [r["reason"] for r in self.records("discarded") if r["group"] == group]

    def published(self) -> list[Version]:
        """Return the versions that were published, in order."""
        return [(lineage, step) for lineage, step in (
            record["version"] for record in self.records("published")
        )]  # fmt: skip

    def installed(self, name: str) -> Version | None:
        """Return the version that a worker samples from, or a relay holds whole."""
        version = self._process(name).node.session.version_in_use()
        return None if version is None else (version.lineage, version.step)

    def is_bit_exact(self, name: str) -> bool:
        """Return whether every whole version of a node is, byte for byte, what was published."""
        sealed = {tuple(r["version"]): r["image_hash"] for r in self.records("sealed")}
        images = self._process(name).node.session.broadcast.store
        hashes = {
            (version.lineage, version.step): blake3(image.read(0, image.num_bytes)).hexdigest()
            for version, image in images.items()
            if image.is_complete
        }
        known = hashes.keys() & sealed.keys()
        return bool(known) and all(hashes[version] == sealed[version] for version in known)

    def num_in_place(self, name: str) -> int:
        """Return how many versions a worker's engine has taken in place."""
        engine = self._process(name).engine
        assert engine is not None
        return engine.num_patched

    def audited(self, name: str) -> dict[Version, str]:
        """Return the hash of each version that a worker has installed and found to be right."""
        path = self.run_dir / "workers" / name / "installed.jsonl"
        records = map(json.loads, path.read_text().splitlines())
        return {(r["version"][0], r["version"][1]): r["image_hash"] for r in records}

    def chunks_held(self, name: str) -> tuple[int, int]:
        """Return how many chunks a node has of what it is fetching, and of how many."""
        version, held, total = self._process(name).node.session.broadcast.progress()
        return (0, 0) if version is None else (held, total)

    def bytes_received(self, name: str) -> int:
        """Return the bytes of weights that the present process of a node has received."""
        received: int = self._process(name).node.session.broadcast.bytes_received
        return received

    def requested_though_held(self, name: str) -> int:
        """Return how many chunks a process of a node has asked for although it held them."""
        return self._process(name).requested_though_held

    def count(self, node: str, name: str) -> float:
        """Return one of a node's counters."""
        counters = self._process(node).node.session.counters
        return float(counters[name])

    def heard_ago_s(self, name: str) -> float:
        """Return how long ago the learner has heard of a node."""
        roster = self._process(LEARNER).node.session.roster
        return float(self.now - roster.nodes[name].heard_at)

    def waiting_for(self) -> str:
        """Return the learner's sentence about what it waits for."""
        return self.snapshots[-1].waiting_for

    def audit(self, *, is_finished: bool = False) -> None:
        """Check staleness and exactly-once from the records alone; fail where they do not hold."""
        settings = SETTINGS | {"sync": SETTINGS["sync"] | self.sections.get("sync", {})}
        found = audit(
            read_ledger(self.run_dir),
            max_staleness=settings["sync"]["max_staleness"],
            groups_per_step=settings["batch"]["groups_per_step"],
            is_finished=is_finished,
        )
        assert found.problems == []


class _Notes(logging.Handler):
    """Collects what nodes tell their operators."""

    def __init__(self, told: list[tuple[str, str]]) -> None:
        super().__init__()
        self._told = told

    def emit(self, record: logging.LogRecord) -> None:
        self._told.append((record.name.removeprefix("promises."), record.getMessage()))
