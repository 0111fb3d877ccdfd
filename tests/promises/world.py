"""The one file of the promises that knows the product: nodes, faults and records in plain words.

Scenarios speak of learner, relay and worker, of kill, freeze, cut and drop, and look at what was
trained, acknowledged and installed; `test_vocabulary.py` holds that none of them imports the
product. So a promise outlives every move and merge: only this file follows the code.

`LearnerNode`, `WorkerNode` and `RelayNode` are built as a process builds them, with real files, and
run on an asyncio loop on virtual time: messages go over a network on paper, threads are inline
(`echo/sim/clock.py`), and so minutes take a second, the same each time. Only the engine, the
trainer, the task and the model are stand-ins: samples and steps take the seconds that a scenario
says.
"""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import heapq
import json
import logging
import math
import random
import shutil
import sqlite3
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo.algo.diagnostics import Mismatch, mismatch_by_group
from echo.config.load import parse_config
from echo.config.schema import Config
from echo.core.errors import (
    EchoError,
    EngineError,
    RefusedError,
    TransportError,
)
from echo.core.monitoring.status import RunStatus
from echo.core.rollout import Group, PolicyVersion
from echo.engine.engine import (
    UNVERSIONED,
    UNWATCHED,
    Completion,
    Engine,
    Request,
    Sampling,
    Watcher,
)
from echo.engine.weights import find_nonfinite
from echo.leases.partials import PartialRules
from echo.leases.worker.held import BUSY, GroupState
from echo.net.transport import PeerId, TransportOptions
from echo.records.ledger import AnyRecord, Ledger, Published
from echo.roles.learner import StandbyChosen
from echo.roles.worker.sampling import EngineCall, Recall, Sample
from echo.runtime import relay
from echo.runtime.event_log import EventLog
from echo.runtime.identity import JoinSource
from echo.runtime.learner import setup
from echo.runtime.learner.batches.prompts import PromptSource
from echo.runtime.node import Node
from echo.runtime.worker import setup as worker_setup
from echo.runtime.worker.node import WorkerParts
from echo.sim.clock import InlinePool, InlineThreads, VirtualLoop
from echo.sim.network import LinkEnd, Network, Port, Route
from echo.sim.transport import SimTransport
from echo.tasks.builtin import AdditionTask
from echo.tasks.rewards import LaterHost, RewardError
from echo.train.step import NonfiniteWeightsError, StepError, StepResult
from echo.weights.manifest import TensorSpec, build_manifest, hash_image, sign
from echo.weights.store.patches import Patch
from echo.wire import codec
from echo.wire.actions import Send
from echo.wire.messages import FULL, Ack, Deliver, Fetch, Goodbye, Message
from echo.wire.seals import Channel
from tests.e2e.audit import audit, read_ledger
from tests.roles.harness import make_group, make_hello, message_of

TRUE_LOGPROB = -0.5
"""Of every token, as the learner scores it."""
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
FOREIGN_KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))


class KilledError(BaseException):
    """The process is gone in the middle of this call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rated:
    """The pace of an engine that takes groups at any time."""

    tokens_per_s: float
    """Of each group where it is full."""
    places: int = 4
    alone: float = 1.0
    """How much faster a group on its own is: engines read all weights for every token."""
    install_s: float = 0.0
    fit: int = 0
    """Groups that its memory would hold; 0 if it does not say."""
    slowdown_of: Callable[[tuple[int, int]], float] = lambda key: 1.0
    """How many times slower than usual it is with (group, attempt)."""


PROGRESS_S = 0.5
"""Between two looks at how far a group is."""
PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)
"""Whose callback runs; None for those of the network and of the scenario."""


class WorldLoop(VirtualLoop):
    """Virtual time in which whole processes can be stopped, as SIGSTOP stops them."""

    def __init__(self) -> None:
        super().__init__()
        self._frozen: dict[Process | None, tuple[list[Any], list[asyncio.Handle]]] = {}
        """Of each stopped process, its timers and what is ready of it."""

    def freeze(self, process: Process) -> None:
        """Make no more calls of a process."""
        timers = [timer for timer in self._timers if _owner(timer[2]) is process]
        self._timers = [timer for timer in self._timers if timer not in timers]
        heapq.heapify(self._timers)
        self._frozen[process] = timers, []

    def thaw(self, process: Process) -> None:
        """Go on with what became due meanwhile."""
        timers, ready = self._frozen.pop(process, ([], []))
        for timer in timers:
            heapq.heappush(self._timers, timer)
        self._ready.extend(ready)

    def _run_once(self) -> None:
        for _ in range(len(self._ready) if self._frozen else 0):
            handle = self._ready.popleft()
            _, ready = self._frozen.get(_owner(handle), ([], self._ready))
            ready.append(handle)
        super()._run_once()


def _owner(handle: asyncio.Handle) -> Process | None:
    context: Context = handle._context  # type: ignore[attr-defined]
    return context.get(PROCESS)


class NobodysNetwork(Network):
    """The network, whose time goes on whichever process is stopped."""

    def at(self, instant: float, call: Callable[..., None], *arguments: Any) -> None:
        Context().run(super().at, instant, call, *arguments)


class ThreadsOfProcess(InlineThreads):
    """Calls that take as long as the world says."""

    def __init__(self, world: World, process: Process) -> None:
        super().__init__()
        self._world = world
        self._process = process

    def pool(self, name: str, num_threads: int = 1) -> InlinePool:
        return EnginePool(self._process) if name == "sample" else super().pool(name, num_threads)

    def takes(self, pool: str, function: Callable[..., Any]) -> float:
        return self._world.takes(self._process, pool, function)


class EnginePool(InlinePool):
    """Calls of an engine, which stops where its call is recalled, unless it hangs."""

    def __init__(self, process: Process) -> None:
        super().__init__(process.threads, "sample", 1)
        self._process = process

    def run(self, function: Callable[..., Any], *arguments: Any) -> asyncio.Future[Any]:
        return asyncio.create_task(self._run(function, *arguments))

    async def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        process = self._process
        if process.rated is not None:
            await self._sample(process.rated, process.calls.popleft())
        else:
            with suppress(TimeoutError):
                async with asyncio.timeout(process.threads.takes("sample", function)):
                    await process.looked_at.wait()
        if process.threads.is_closed:
            raise asyncio.CancelledError
        return function(*arguments)

    async def _sample(self, rated: Rated, call: EngineCall) -> None:
        """Sample a group beside those that are here already, until it is whole or recalled."""
        process, loop = self._process, asyncio.get_running_loop()
        [group] = call.groups
        length = process.world.length_of(group.lease.group_id)
        rests = [length - member.num_tokens for member in group.members if not member.is_finished]
        made, num_counted = 0.0, 0
        slowdown = rated.slowdown_of(group.key)
        process.num_sampling += 1
        process.look()
        while (left := max(rests) - made) > 1e-6 and not call.is_recalled:
            share = process.num_sampling / rated.places
            rate = rated.tokens_per_s * rated.alone / (1 + (rated.alone - 1) * share) / slowdown
            began, looked_at = loop.time(), process.looked_at
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left / rate, PROGRESS_S)):
                    await looked_at.wait()
            made += rate * (loop.time() - began)
            num_tokens = sum(min(int(made + 1e-6), rest) for rest in rests)
            call.on_tokens(num_tokens - num_counted)
            num_counted = num_tokens
        process.tokens_made = int(made + 1e-6)
        process.num_sampling -= 1
        process.look()


class Process:
    """One start of one node."""

    def __init__(self, world: World, name: str) -> None:
        self.name = name
        self.world = world
        self.context = copy_context()
        self.context.run(PROCESS.set, self)
        self.threads = ThreadsOfProcess(world, self)
        self.log = logging.getLogger(f"promises.{name}")
        self.engine: StubEngine | None = None
        self.node: Any = None
        self.task: asyncio.Task[str] | None = None
        self.is_alive = True
        self.stop_reason = ""
        """With which it ended itself."""
        self.requested_though_held = 0
        self.has_published = False
        """Whether a version was recorded whose first offer has not left yet."""
        self.full_disk = ""
        """What its disk takes nothing more of: "records", "checkpoints" or "versions"."""
        self.kill_at: tuple[str, int] | None = None
        self.build_s = 0.0
        """Seconds that its engine takes to build."""
        self.sample_s: float | None = None
        """Seconds of a call of its engine; None for the world's."""
        self.rated: Rated | None = None
        """The pace of its engine; None where a call takes its seconds, whatever it is of."""
        self.calls: deque[EngineCall] = deque()
        """Of a rated engine, those that are about to begin."""
        self.tokens_made = 0
        """Of a rated engine, tokens of each rollout in the call that is about to return."""
        self.num_sampling = 0
        self.looked_at = asyncio.Event()
        self.lie = 0.0
        """Nats that it takes off what it states of its samples."""
        self.noise = 0.0
        """Nats by which its engine rounds at most."""
        self.reward_s = 0.0
        """Seconds that the rewards of a group take."""
        self.reward_fault = ""
        """Why nothing that it samples is worth anything."""

    def look(self) -> None:
        """Have those that wait for its engine look again: a call begins, ends, or is recalled."""
        self.looked_at.set()
        self.looked_at = asyncio.Event()

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

    def kill(self, *, is_silent: bool = False) -> None:
        """End it where it stands: nothing is written or sent any more."""
        self.is_alive = False
        self.threads.close()
        self.world.loop.thaw(self)
        if self.node is not None:
            self.node.transport.kill(is_silent=is_silent)
        if self.task is not None:
            self.task.cancel()


class WatchedTransport(SimTransport):
    """A transport that may lose messages, and at whose first offer a learner may die."""

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
        if peer in self._ends:
            target = self._ends[peer].far.client.port.name
            if process.world.is_lost(process.name, target, frames):
                return True
        is_sent = super().send(peer, frames, is_public=is_public)
        head = bytes(frames[0])
        if b"Fetch" in head and isinstance(fetch := message_of(frames), Fetch):
            process.requested_though_held += num_held(process.node.role.broadcast, fetch)
        if b"Announce" in head and process.has_published:
            process.has_published = False
            process.reach("published")
        return is_sent

    def on_refused(self, end: LinkEnd, reason: str) -> None:
        """Dial again later; the node hears of it as of everything else in its own process."""
        self._process.context.run(super().on_refused, end, reason)


def num_held(broadcast: Any, fetch: Fetch) -> int:
    """Return how many of the chunks that are asked for are held."""
    is_full = fetch.form == FULL
    held = broadcast.store if is_full else broadcast.encoded_versions
    item = held.get(fetch.version if is_full else (fetch.version, fetch.form))
    if item is None:
        return 0
    return sum(sum(item.has_chunk[start:stop]) for start, stop in fetch.ranges)


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

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._unsynced: set[int] = set()

    def _write_queue(self, *, durably: bool) -> None:
        self.process.check_alive()
        if self.process.full_disk == "records":
            self._next_file()
            file: Any = FullDisk(self._file)
            self._file = file
            [num_pages] = self._database.execute("PRAGMA page_count").fetchone()
            self._database.execute(f"PRAGMA max_page_count = {num_pages}")
        super()._write_queue(durably=durably)

    def append(self, record: AnyRecord) -> None:
        self.process.has_published |= isinstance(record, Published)
        super().append(record)

    def store(self, group: Group, *rest: Any) -> None:
        super().store(group, *rest)
        self._unsynced.add(group.group_id)

    def sync(self) -> None:
        super().sync()
        if self._unsynced:
            self.process.world.durable |= self._unsynced
            self._unsynced = set()
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
    weights = SimpleNamespace(copy_stream=None)

    def __init__(self, process: Process, checkpoint: Path | None) -> None:
        self._process = process
        world = process.world
        world.trainer = self
        self.step_count = 0
        self._weights = np.random.default_rng(0).standard_normal(world.num_weights)
        if checkpoint is not None:
            self.step_count = int((checkpoint / "step").read_text())
            self._weights = np.frombuffer((checkpoint / "weights").read_bytes()).copy()

    def describe_rows(self) -> str:
        return "no model, no rows"

    def refusal(self, group: Group) -> str | None:
        world = self._process.world
        if group.worker_id in world.useless_workers:
            return "zero_variance"
        return "reward_too_large" if group.group_id in world.refused_groups else None

    def step(self, groups: Sequence[Group]) -> StepResult:
        if self.find_faulty(groups):
            raise StepError("the computation raised", reason="step_error")
        self.step_count += 1
        self._weights[self.step_count % 97 :: 97] += 0.01
        return StepResult(
            metrics=self._process.world.metrics_of(self.step_count),
            by_group={group.group_id: _mismatch(group) for group in groups},
        )

    def find_faulty(self, groups: Sequence[Group]) -> dict[int, str]:
        bad = self._process.world.poisoned_groups
        return {g.group_id: "step_error" for g in groups if g.group_id in bad}

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"w": torch.from_numpy(self._weights.astype(np.float32))}

    snapshot = tensors

    def save_state(self, directory: Path) -> None:
        if self._process.full_disk == "checkpoints":
            raise OSError(errno.ENOSPC, "No space left on device")
        if bad := find_nonfinite(self.tensors()):
            raise NonfiniteWeightsError(bad, num_tensors=1)
        (directory / "step").write_text(str(self.step_count))
        (directory / "weights").write_bytes(self._weights.tobytes())
        self._process.reach("checkpoint")


def _mismatch(group: Group) -> Mismatch:
    """Return how far what a worker has stated is from the -.5 nats of every token."""
    stated = torch.cat([torch.from_numpy(each.sampler_logprobs) for each in group.rollouts])
    true = torch.full_like(stated, TRUE_LOGPROB)
    sums = mismatch_by_group(
        true, stated, -true, group_of=torch.zeros(len(stated), dtype=torch.int64), num_groups=1
    )
    return Mismatch(*sums[0].tolist())


class StubHost(LaterHost):
    """Every answer is worth 0, or has a fault."""

    def __init__(self, process: Process) -> None:
        super().__init__()
        self._process = process

    def _answer(self, call: Any) -> Any:
        if self._process.reward_fault:
            raise RewardError("it raised", reason=self._process.reward_fault)
        return super()._answer(call)


class StubEngine(Engine):
    """Tokens of the installed version: 3, 4, ...

    A stopped call returns one or three tokens of each rollout, or, if the engine is rated, as many
    as its pace has made.
    """

    def __init__(self, process: Process | None = None, *, takes_patches: bool = False) -> None:
        self._process = process
        self.is_continuous = process is not None and process.rated is not None
        self.takes_patches = takes_patches
        self.num_patched = 0
        self._installed: PolicyVersion | None = None
        self.refuses: set[int] = set()
        self.in_mid_patch: Callable[[Patch, memoryview], None] | None = None

    @property
    def installed(self) -> PolicyVersion | None:
        return self._installed

    def load(self, tensors: Any, version: PolicyVersion = UNVERSIONED) -> None:
        if version.step in self.refuses:
            raise EngineError("the probe found other weights")
        self._installed = version

    def patch(self, patch: Patch, image: memoryview, specs: Sequence[TensorSpec]) -> None:
        if self.in_mid_patch is not None:
            self.in_mid_patch(patch, image)
        patch.write(image)
        self.load(None, patch.version)
        self.num_patched += 1

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        watcher: Watcher = UNWATCHED,
        **_: Any,
    ) -> list[Completion]:
        version, found = self._installed, []
        assert version is not None
        is_recalled = watcher.should_stop()
        for place, request in enumerate(requests):
            start, number = len(request.prefix_ids), sampling.max_completion_tokens
            if self._process is not None:
                number = self._process.world.length_of(int(request.request_id.split(".")[0]))
            number -= start
            is_stopped = is_recalled
            if is_recalled and self._process is not None and self._process.rated is not None:
                is_stopped = self._process.tokens_made < number
                number = min(number, self._process.tokens_made)
            elif is_recalled:
                number = min(number - 1, 1 + 2 * (place % 2))
            found.append(
                Completion(
                    request.request_id,
                    3 + np.arange(start, start + number, dtype=np.int32) % 16,
                    self._logprobs(number),
                    "abort" if is_stopped else "length",
                    np.tile(np.array([version.lineage, version.step], np.int32), (number, 1)),
                )
            )
            if not self.is_continuous:  # else they were counted as they came
                watcher.on_tokens(number)
            if not is_stopped:
                watcher.on_completion(found[-1])
        return found

    def _logprobs(self, number: int) -> Any:
        """Return what it states of its tokens, with a noise of its own."""
        process = self._process
        lie = 0.0 if process is None else process.lie
        noise = 0.0 if process is None else process.noise
        chance = np.random.default_rng(number)
        return (TRUE_LOGPROB - lie - noise * chance.random(number)).astype(np.float32)

    def max_concurrent_rollouts(self, prompt_tokens: int, completion_tokens: int) -> int:
        return 4

    def close(self) -> None:
        self._installed = None


class World:
    """One run directory, the nodes that were started in it, and the network between them."""

    is_watching = True

    trainer: StubTrainer
    """The trainer of the present learner, or of the last one."""

    def __init__(
        self,
        directory: Path,
        *,
        seed: int = 0,
        delay_s: float = 0.01,
        jitter_s: float = 0.0,
        loss: float = 0.0,
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
            seed: decides jitter, losses, noise, and `chance`.
            delay_s, jitter_s, bytes_per_s: of every link, unless `link` says otherwise.
            loss: share of the messages that never arrive.
            sample_s, train_s: seconds of a call of an engine, and of an optimizer step.
            noise: standard deviation of these, as a share.
            image_bytes: size of a version.
            log_events: whether each node writes NAME.jsonl into the directory.
            sections: the configuration of all nodes, by section.
        """
        self.directory = directory
        self.chance = random.Random(seed)
        self.sections = sections
        self.num_weights = image_bytes // 2
        self.poisoned_groups: set[int] = set()
        self.refused_groups: set[int] = set()
        longest: int = self._section("sampling")["max_completion_tokens"]
        self.length_of: Callable[[int], int] = lambda group: longest
        """Tokens of the rollouts of a group."""
        self.assets = {"config.json": b"{}", "tokenizer.json": b"[1]"}
        """Files that workers inherit."""
        self.useless_workers: set[str] = set()
        """Those from whose groups nothing can be learned."""
        self.metrics_of: Callable[[int], dict[str, float]] = lambda step: {}
        self.samples: list[tuple[int, Any]] = []
        self.rows: list[dict[str, Any]] = []
        """Of metrics, as they were written."""
        self.snapshots: list[RunStatus] = []
        self.durable: set[int] = set()
        """Groups that were forced onto the disk."""
        self._log_events = log_events
        self._noise, self._loss, self._luck = noise, loss, random.Random(f"{seed}/loss")
        self._watchers: list[Callable[[str, str, Any], bool | None]] = []
        self._acknowledged: list[int] = []
        self._failure: AssertionError | None = None
        """Of who watches."""
        self.sample_s, self.train_s = sample_s, train_s
        self._slow_disks: dict[str, float] = {}
        route = Route(latency_s=delay_s, jitter_s=jitter_s, bytes_per_s=bytes_per_s)
        self._network = NobodysNetwork(seed=seed, between=route, bulk_bytes=0)
        self._processes: list[Process] = []
        self._told: list[tuple[str, str]] = []
        self.loop = WorldLoop()
        self._handler = _Notes(self._told)
        logging.getLogger("promises").addHandler(self._handler)
        logging.getLogger("promises").setLevel(logging.INFO)

    def _section(self, name: str) -> dict[str, Any]:
        """Return a section of the configuration."""
        return SETTINGS[name] | self.sections.get(name, {})

    def close(self) -> None:
        """End every process."""

        async def end() -> None:
            for process in self._processes:
                if process.is_alive:
                    process.kill()
            await asyncio.sleep(0.1)
            tasks = [process.task for process in self._processes if process.task is not None]
            await asyncio.gather(*tasks, return_exceptions=True)

        self.loop.run_until_complete(end())
        self.loop.close()
        logging.getLogger("promises").removeHandler(self._handler)

    def write_metrics(self, step: int, row: Any) -> None:
        self.rows.append(dict(row))

    notices: tuple[str, ...] = ()

    def write_samples(self, step: int, samples: Any) -> None:
        self.samples += [(step, sample) for sample in samples]

    def show(self, status: RunStatus) -> None:
        self.snapshots.append(status)

    def save(self, status: RunStatus) -> None:
        self.saved = status

    def takes(self, process: Process, pool: str, function: Callable[..., Any]) -> float:
        """Return the seconds of the next call in a pool of a node."""
        seconds = 0.0
        if pool == "weights":
            return self._slow_disks.get(process.name, 0.0)
        if pool == "reward":
            return process.reward_s
        if pool == "disk" and getattr(function, "__func__", None) is WatchedLedger.sync:
            return self._slow_disks.get(process.name, 0.0)
        if pool == "sample":
            seconds = self.sample_s if process.sample_s is None else process.sample_s
        elif getattr(function, "__func__", None) is StubTrainer.step:
            seconds = self.train_s
        elif pool == "engine" and function is process.node.build:
            return process.build_s
        elif getattr(function, "__func__", None) is WorkerParts.install and process.rated:
            return process.rated.install_s
        return max(0.0, seconds * (1 + self._noise * self.chance.gauss())) if seconds else 0.0

    # --- nodes -----------------------------------------------------------------------------------

    def learner(
        self, *, address: str = LEARNER, kill_at: str | None = None, times: int = 1, **sections: Any
    ) -> None:
        """Start the learner, or resume it from its newest checkpoint.

        Args:
            address: where it listens.
            kill_at: one of POINTS, to die there.
            times: how often it comes by first, this one included.
            sections: see `World`.

        Raises:
            EchoError: if it cannot begin.
        """
        process = Process(self, LEARNER)
        process.kill_at = None if kill_at is None else (kill_at, times)
        self._start(process, self._build_learner, {"address": address, **sections})

    def relay(self, name: str = "r1", *, via: Sequence[str] = (LEARNER,), **sections: Any) -> None:
        """Start a relay that knows the addresses of the nodes `via`, in this order."""
        self._start(Process(self, name), self._build_relay, {"via": via, **sections})

    def worker(
        self,
        name: str,
        *,
        via: Sequence[str] = (LEARNER,),
        serves: bool = False,
        in_place: bool = False,
        build_s: float = 0.0,
        sample_s: float | None = None,
        rated: Rated | None = None,
        reward_s: float = 0.0,
        model: str = "m",
        engine: str = "transformers float32",
        **sections: Any,
    ) -> None:
        """Start a worker.

        Args:
            name: of the worker.
            via: where it looks for the learner, in this order.
            serves: whether it can pass weights on to others.
            in_place: whether its engine takes changes of the weights in place.
            build_s: seconds that its engine takes to build.
            sample_s: seconds of a call of its engine; None for the world's.
            rated: the pace of its engine, where a group takes as long as it has tokens.
            reward_s: seconds that the rewards of a group take.
            model: the hash of its model; the learner's is "m".
            engine: kind and data type of its engine.
            sections: see `World`.
        """
        process = Process(self, name)
        process.build_s, process.sample_s, process.rated = build_s, sample_s, rated
        process.reward_s = reward_s
        how = {"via": via, "serves": serves, "in_place": in_place, "model": model, "engine": engine}
        self._start(process, self._build_worker, {**how, **sections})

    def restart(self, name: str, *, via: Sequence[str] = (LEARNER,)) -> None:
        """Start a node again that was killed."""
        if name == LEARNER:
            self.learner()
        elif name.startswith("r"):
            self.relay(name)
        else:
            self.worker(name, via=via)

    def _start(self, process: Process, build: Callable[..., Any], sections: Any) -> None:
        async def start() -> None:
            process.node = node = await build(process, **sections)
            if self._log_events:
                path = self.directory / f"{process.name}.jsonl"
                node.event_log = EventLog(path, log=process.log)
                node.at_release.append(node.event_log.close)
            stop = node.stop

            def stopping(reason: str, error: BaseException | None = None) -> None:
                process.stop_reason = process.stop_reason or reason
                stop(reason, error)

            node.stop = stopping
            perform = node.perform

            def perform_and_validate(actions: Sequence[Any]) -> None:
                perform(actions)
                try:
                    node.role.validate()
                except AssertionError as error:
                    self._failure = self._failure or error

            node.perform = perform_and_validate
            process.task = asyncio.create_task(node.run(), name=process.name)

        self.loop.run_until_complete(self.loop.create_task(start(), context=process.context))
        self._processes.append(process)

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
        table["run"] = {"name": "run", "dir": str(self.directory), **table.get("run", {})}
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
        text: Any = SimpleNamespace(
            decode=str, decode_all=str, encode_prompt=lambda prompt, tools: [1, 2, 3]
        )
        data: Any = SimpleNamespace(
            model_dir=self.directory,
            task=task,
            host=LaterHost(),
            prompts=PromptSource(task, text, seed=0),
            text=text,
            digests={"model": "m"},
            vocab_size=32,
            lora=None,
            read_assets=lambda: self.assets,
        )
        transport = await self._transport(process, config.learner.listen)
        with ExitStack() as patches:
            for module, name, stub in (
                (setup, "Ledger", ledger),
                (setup, "build_trainer", lambda config, model, start, *_, **__: StubTrainer(
                    process, start.checkpoint
                )),
                (setup, "export_directory", lambda *_: None),
            ):  # fmt: skip
                patches.enter_context(mock.patch.object(module, name, stub))
            try:
                options = setup.Options(
                    follower=self,
                    log=process.log,
                    resume=(config.run_dir / "ledger.sqlite").exists(),
                    threads=process.threads,
                )
                return setup.assemble_learner(config, data, transport, options)
            except BaseException:
                await transport.close()
                raise

    async def _build_relay(self, process: Process, *, via: Sequence[str], **sections: Any) -> Node:
        address = ADDRESS.format(process.name)
        own = {"name": process.name, "listen": address, "connect": [*map(ADDRESS.format, via)]}
        config = self._config("relay", sections, **own)
        transport = await self._transport(process, config.relay.listen)
        node = relay.assemble_relay(
            config.relay,
            config.network,
            JoinSource("relay", config.relay.connect, config.security, config.run_dir),
            transport,
            threads=process.threads,
            log=process.log,
        )
        self._prepare_store(process, node)
        return node

    async def _build_worker(
        self,
        process: Process,
        *,
        via: Sequence[str],
        serves: bool,
        in_place: bool,
        model: str,
        engine: str,
        **sections: Any,
    ) -> Node:
        own: dict[str, Any] = {"name": process.name, "connect": [*map(ADDRESS.format, via)]}
        if serves:
            own["listen"] = ADDRESS.format(process.name)
        config = self._config("worker", sections, **own)
        process.engine = StubEngine(process, takes_patches=in_place)
        max_tokens = self._section("sampling")["max_completion_tokens"]

        def build_parts(*arguments: Any) -> WorkerParts:
            assert process.engine is not None
            return WorkerParts(
                engine=process.engine,
                host=StubHost(process),
                runner=None,
                decode=str,
                sampling=Sampling(1.0, 1.0, 0, max_tokens, ()),
                group_size=2,
                max_prompt_tokens=1 << 20,
                groups_per_batch=process.rated.places if process.rated else 2,
                num_fit=process.rated.fit if process.rated else 0,
                rules=PartialRules(),
                partials_path=self.run_dir / "workers" / process.name / "partials.bin",
                installed_path=self.run_dir / "workers" / process.name / "installed.jsonl",
                agents=None,
                digests={"model": model},
                engine_name=engine,
                read_local_image=lambda: None,
            )

        transport = await self._transport(process, config.worker.listen)
        with mock.patch.object(worker_setup, "build_parts", build_parts):
            node = worker_setup.assemble_worker(
                config,
                transport,
                threads=process.threads,
                log=process.log,
            )
        self._prepare_store(process, node)
        act = node.on_action

        def on_action(action: Any) -> None:
            if isinstance(action, Sample) and process.rated is not None:
                process.calls.append(action.call)
            act(action)
            if isinstance(action, Recall) and process.sample_s != math.inf:
                process.look()

        node.on_action = on_action  # type: ignore[method-assign]
        return node

    @staticmethod
    def _prepare_store(process: Process, node: Any) -> None:
        """Have small files beside the versions written at once, and chunks while there is space."""
        store = node.version_store
        thread = getattr(store, "_thread", None)
        if thread is not None:
            thread.close()
        write = store.write

        def write_if_possible(place: memoryview, data: Any) -> None:
            if process.full_disk == "versions":
                raise OSError(errno.ENOSPC, "No space left on device")
            write(place, data)

        store.write = write_if_possible

    def _process(self, name: str) -> Process:
        """Return the newest process of that name, dead or alive."""
        return next(p for p in reversed(self._processes) if p.name == name)

    def node(self, name: str) -> Any:
        """Return what runs in the newest process of that name, for tests of its insides."""
        return self._process(name).node

    # --- faults ----------------------------------------------------------------------------------

    def kill(self, name: str, *, silently: bool = False) -> None:
        """End a process as SIGKILL does; silently: its machine is gone, and nobody is told."""

        async def kill() -> None:
            self._process(name).kill(is_silent=silently)

        self.loop.run_until_complete(kill())
        self.run(0.01)

    def freeze(self, name: str) -> None:
        """Hold a process as SIGSTOP does: its connections stand and nothing moves."""
        self.loop.freeze(self._process(name))

    def thaw(self, name: str) -> None:
        """Let a frozen process go on with what has arrived meanwhile."""
        self.loop.thaw(self._process(name))

    def interrupt(self, name: str) -> None:
        """Press Ctrl-C once."""
        self.within(name, self.node(name).interrupt)

    def within(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Have something called in a process, as its own parts are; return what it returns."""

        async def call() -> Any:
            return function(*arguments)

        context = self._process(name).context
        return self.loop.run_until_complete(self.loop.create_task(call(), context=context))

    def report(self, name: str, event: Any) -> None:
        """Have a node report an event to its role, and carry out the actions."""
        self.within(name, self.node(name).report, event)

    def perform(self, name: str, actions: Sequence[Any]) -> None:
        """Have a node carry out actions."""
        self.within(name, self.node(name).perform, actions)

    def hang_engine(self, worker: str) -> None:
        """Let a worker's engine begin groups and never finish them."""
        self._process(worker).sample_s = math.inf

    def make_up_progress(self, worker: str, *, num_tokens: int) -> None:
        """Let a worker report so many more tokens of each of its groups with each heartbeat."""
        role = self.node(worker).role
        heartbeat = role.heartbeat

        def lying(*, now: float) -> Any:
            for partial in role.held.of(*BUSY):
                partial.num_progress += num_tokens
            return heartbeat(now=now)

        role.heartbeat = lying

    def state_logprobs(self, worker: str, *, lie: float = 0.0, noise: float = 0.0) -> None:
        """Let a worker state so many nats less than it sampled with, or round by up to so many."""
        process = self._process(worker)
        process.lie, process.noise = lie, noise

    def fail_rewards(self, worker: str, reason: str) -> None:
        """Let a worker's groups end with this reason; empty: no more."""
        self._process(worker).reward_fault = reason

    # --- messages --------------------------------------------------------------------------------

    def is_lost(self, sender: str, target: str, frames: Sequence[Any]) -> bool:
        """Let all that watch look at a message, and return whether it never arrives."""
        head = bytes(frames[0])
        if b"Ack" in head and isinstance(ack := message_of(frames), Ack):
            self._acknowledged += [ack.group_id] * (ack.outcome == "accepted")
        message, is_lost = message_of(frames) if self._watchers else None, False
        for watch in self._watchers:
            try:
                is_lost |= watch(sender, target, message) is True
            except AssertionError as error:  # the node would take it for a fault of its own
                self._failure = self._failure or error
        return is_lost or (self._loss > 0 and self._luck.random() < self._loss)

    @contextmanager
    def watch(self, look: Callable[[str, str, Any], None]) -> Iterator[None]:
        """Call `look(sender, receiver, message)` for every message sent within the block."""
        self._watchers.append(look)
        yield
        self._watchers.remove(look)

    def drop(
        self,
        kind: str,
        *,
        times: float = math.inf,
        source: str | None = None,
        target: str | None = None,
    ) -> list[str]:
        """Lose messages of a kind, the next `times` or all; return the list of those lost."""
        lost: list[str] = []

        def drops(sender: str, receiver: str, message: Any) -> bool:
            is_meant = source in (None, sender) and target in (None, receiver)
            if type(message).__name__ == kind and is_meant and len(lost) < times:
                lost.append(f"{sender} to {receiver}")
                return True
            return False

        self._watchers.append(drops)
        return lost

    def stop_dropping(self) -> None:
        """Let every message through again."""
        self._watchers.clear()

    def say_garbage(self, node: str, *, times: int) -> int:
        """Feed a node random frames; return the messages with which it answered."""
        role, answers = self.node(node).role, 0
        for size in range(times):
            frames = [self.chance.randbytes(size) for _ in range(self.chance.randrange(4))]
            actions = role.receive("in99", frames, now=self.now)
            answers += sum(isinstance(action, Send) for action in actions)
        return answers

    def peer_of(self, node: str) -> str:
        """Return the learner's link over which a node has said hello."""
        return self.node(LEARNER).role.routes.peer_of(node) or "none"

    def deliver(
        self,
        group: int,
        *,
        worker: str = "w1",
        attempt: int = 0,
        version: Version = (1, 0),
        size: int = 2,
        change: dict[str, Any] | None = None,
        over: str | None = None,
        content: Group | None = None,
    ) -> tuple[str, str]:
        """Hand the learner a result as from a worker; return (outcome, reason) of its answer.

        The outcome is "stored" where the learner keeps it and acknowledges it later. It comes over
        the link of the worker, or `over` that of another node. `content` stands in for the group
        that the worker would have made.
        """
        content = content or make_group(
            group, PolicyVersion(*version), attempt=attempt, worker=worker, size=size
        )
        if change:
            first = dataclasses.replace(content.rollouts[0], **change)
            content = dataclasses.replace(content, rollouts=(first, *content.rollouts[1:]))
        message = Deliver(group_id=group, attempt=attempt)
        frames = codec.encode(
            message,
            codec.encode_group(content),
            source=worker,
            target=LEARNER,
            channel=self.channel_of(over or worker),
        )
        role = self.node(LEARNER).role
        actions = role.receive(self.peer_of(over or worker), frames, now=self.now)
        self.perform(LEARNER, actions)
        for action in actions:
            if isinstance(action, Send) and isinstance(ack := message_of(action.frames), Ack):
                self.run(0.005)  # in which the group is granted again
                return ack.outcome, ack.reason
        is_stored = any(type(action).__name__ == "StoreGroup" for action in actions)
        return ("stored", "") if is_stored else ("ignored", "")

    def channel_of(self, node: str) -> Channel:
        """Return the channel in which a node seals what it says to the learner."""
        channel: Channel = self.node(node).role.joining.seals.newest
        return channel

    def claim(self, name: str, *, over: str) -> None:
        """Say hello to the learner as another process of this name, over the link of a node."""
        self._say(make_hello(name, incarnation="other"), name, over)

    def leave(self, name: str, *, over: str) -> None:
        """Say goodbye to the learner under this name, over the link of a node."""
        self._say(Goodbye(reason="forged"), name, over)

    def _say(self, message: Message, name: str, over: str) -> None:
        channel = self.channel_of(over)
        frames = codec.encode(message, source=name, target=LEARNER, channel=channel)
        self.node(LEARNER).role.receive(self.peer_of(over), frames, now=self.now)

    def publish_forged(self, *, run: str | None = None, is_foreign: bool = False) -> None:
        """Have the learner offer a version of a run, signed with its own key or a foreign one."""
        role = self.node(LEARNER).role
        newest = role.broadcast.store[role.broadcast.newest_complete]
        image, real = bytearray(newest.read(0, newest.num_bytes)), newest.manifest
        image[::97] = bytes(len(image[::97]))
        manifest = build_manifest(
            run_id=run or real.run_id,
            version=PolicyVersion(real.version.lineage, real.version.step + 1),
            tensors=real.tensors,
            image=image,
            chunk_bytes=CHUNK_BYTES,
        )
        key = FOREIGN_KEY if is_foreign else role.settings.admission.key
        parts = sign(manifest, key), manifest, image
        self.perform(LEARNER, role.broadcast.publish(*parts, now=self.now))

    # --- networks and disks ----------------------------------------------------------------------

    def link(self, source: str, target: str, *, bytes_per_s: float, delay_s: float = 0.01) -> None:
        """Give one direction of a link its own rate."""
        route = Route(latency_s=delay_s, bytes_per_s=bytes_per_s)
        self._network.set_route(source, target, route)

    def cut(self, a: str, b: str) -> None:
        """Cut two nodes apart."""
        self.loop.call_soon(self._network.cut, a, b)

    def mend(self, a: str, b: str) -> None:
        """Let them reach each other again."""
        self.loop.call_soon(self._network.mend, a, b)

    def slow_disk(self, name: str, seconds: float) -> None:
        """Let each chunk take so long to be written at a node."""
        self._slow_disks[name] = seconds

    def enlarge_store(self, name: str, num_bytes: int) -> None:
        """Let the versions of a node take so many bytes from now on."""
        self.node(name).version_store.limit_bytes = num_bytes

    def damage_chunks(self, name: str, *, number: int) -> None:
        """Let the next chunks that a node sends arrive with other bytes."""
        transport = self.node(name).transport
        send, left = transport.send, [number]

        def damage(peer: PeerId, frames: Sequence[Any], **how: bool) -> bool:
            if b"Chunk" in bytes(frames[0]) and left[0]:
                left[0] -= 1
                frames = [frames[0], bytes(len(frames[1]))]
            return bool(send(peer, frames, **how))

        transport.send = damage

    def fill_disk(self, name: str = LEARNER, *, of: str) -> None:
        """Let a disk take no more "records", "checkpoints" or "versions"; "": all again."""
        self._process(name).full_disk = of

    def refuse_version(self, worker: str, step: int) -> None:
        """Let a worker's engine refuse the version of a step."""
        engine = self._process(worker).engine
        assert engine is not None
        engine.refuses.add(step)

    def flip_bit(self, name: str) -> None:
        """Flip a bit of the newest version in a node's memory."""
        store = self.node(name).role.broadcast.store
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
        return self.loop.time()

    def run(self, seconds: float) -> None:
        """Let time pass."""
        self.loop.run_until_complete(asyncio.sleep(seconds))
        if self._failure is not None:
            raise self._failure

    def run_until(self, is_done: Callable[[], object], *, within_s: float = 60.0) -> float:
        """Let time pass until `is_done`; return the seconds that it took, fail after `within_s`."""
        began = self.now

        async def wait() -> None:
            while not is_done():
                if self._failure is not None:
                    raise self._failure
                assert self.now < began + within_s, f"not within {within_s:g} s: {self._told[-8:]}"
                await asyncio.sleep(0.02)

        self.loop.run_until_complete(wait())
        return self.now - began

    @property
    def told(self) -> list[tuple[str, str]]:
        """(node, line) of all that was logged."""
        return list(self._told)

    @property
    def weights(self) -> Any:
        """The present learner's weights."""
        return self.trainer.tensors()["w"].numpy()

    # --- what happened ---------------------------------------------------------------------------

    @property
    def run_dir(self) -> Path:
        return self.directory / "run"

    @property
    def step(self) -> int:
        """Optimizer steps of the present learner."""
        step: int = self.node(LEARNER).role.step
        return step

    def stand_by(self, *workers: str) -> None:
        """Put exactly these workers on standby."""
        self.report(LEARNER, StandbyChosen(frozenset(workers)))

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
        assert error is None or isinstance(error, EchoError), repr(error)
        return process.stop_reason, str(error or "")

    def has_failed(self, name: str) -> bool:
        """Return whether a node ended itself with an error for its operator."""
        task = self._process(name).task
        assert task is not None
        return task.done() and isinstance(task.exception(), RefusedError | TransportError)

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

    def notes_of(self, words: str) -> list[str]:
        """Return what the learner logged with these words."""
        return [text for text in self.notes(LEARNER) if words in text]

    def records(self, kind: str) -> list[dict[str, Any]]:
        """Return the learner's records of a kind, oldest first, over all its lives."""
        return [r for r in read_ledger(self.run_dir) if r["kind"] == kind]

    def trained(self) -> list[int]:
        """Return the groups of every step, in order, steps that were lost with a crash too."""
        return [group for record in self.records("trained") for group in record["groups"]]

    def stored(self) -> list[int]:
        """Return the groups that were accepted, each as often as it was."""
        return [record["group"] for record in self.records("accepted")]

    def num_stored(self, worker: str, *, of: set[int]) -> int:
        """Return how many of these groups were accepted from a worker."""
        records = self.records("accepted")
        return sum(r["worker"] == worker and r["group"] in of for r in records)

    def acknowledged(self) -> list[int]:
        """Return the groups that were acknowledged to a worker, each as often as it was."""
        return list(self._acknowledged)

    def versions_of(self, group: int) -> list[Version]:
        """Return the versions that sampled an accepted group."""
        [record] = [r for r in self.records("accepted") if r["group"] == group]
        return [(lineage, step) for lineage, step in record["versions"]]

    def ages(self) -> list[int]:
        """Return how many steps old the oldest token of each trained group was."""
        oldest = {
            record["group"]: min(step for _, step in record["versions"])
            for record in self.records("accepted")
        }
        return [
            record["consumed_at"] - oldest[group]
            for record in self.records("trained")
            for group in record["groups"]
        ]

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
        version = self.node(name).role.version_in_use()
        return None if version is None else (version.lineage, version.step)

    def is_bit_exact(self, name: str) -> bool:
        """Return whether every whole version of a node is, byte for byte, what was published."""
        sealed = {tuple(r["version"]): r["image_hash"] for r in self.records("sealed")}
        images = self.node(name).role.broadcast.store
        hashes = {
            (version.lineage, version.step): hash_image(
                image.read(0, image.num_bytes), CHUNK_BYTES
            ).hex()
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

    def keep_half_written(self, name: str, directory: Path) -> None:
        """Copy a worker's versions on the disk as a kill in the middle of a patch leaves them.

        The first one that is written over a version whose manifest is there.
        """
        engine, store = self._process(name).engine, self.node(name).version_store
        assert engine is not None

        def copy(patch: Patch, image: memoryview) -> None:
            is_sealed = any(store.directory.glob(f"v{patch.base.step}-*.manifest"))
            if is_sealed and not directory.exists():
                written, half = bytearray(image), len(image) // 2
                patch.write(memoryview(written))
                assert written[:half] != image[:half]
                image[:half] = written[:half]
                shutil.copytree(store.directory, directory)

        engine.in_mid_patch = copy

    def audited(self, name: str) -> dict[Version, str]:
        """Return the hash of each version that a worker has installed and found to be right."""
        path = self.run_dir / "workers" / name / "installed.jsonl"
        records = map(json.loads, path.read_text().splitlines())
        return {(r["version"][0], r["version"][1]): r["image_hash"] for r in records}

    def leased(self, worker: str) -> set[int]:
        """Return the groups that the learner has leased to a worker."""
        leases = self.node(LEARNER).role.leases
        return {record.group_id for record in leases.worker_leases(worker)}

    def num_granted(self, worker: str) -> int:
        """Return how many leases a worker was ever granted."""
        return sum(record["worker"] == worker for record in self.records("granted"))

    def sampling(self, worker: str) -> set[int]:
        """Return the groups that a worker's engine has."""
        return {group.lease.group_id for group in self.node(worker).role.held.of(*BUSY)}

    def partial_tokens(self, worker: str, group: int) -> list[list[int]]:
        """Return the tokens that a worker holds of each unfinished rollout of a group."""
        held = self.node(worker).role.held.of(GroupState.INTERRUPTED, *BUSY)
        [partial] = [each for each in held if each.lease.group_id == group]
        return [member.token_ids.tolist() for member in partial.members]

    def undelivered(self, worker: str) -> int:
        """Return how many finished groups a worker holds that are not acknowledged."""
        return len(self.node(worker).role.outbox)

    def outbox_bound(self, worker: str) -> int:
        """Return how many of them it may hold."""
        bound: int = self.node(worker).role.outbox.max_deliveries
        return bound

    def capacity(self, worker: str) -> int:
        """Return how many groups a worker would take at present."""
        places: int = self.node(worker).role.capacity()
        return places

    def num_waiting(self) -> int:
        """Return how many accepted groups wait for their step."""
        return len(self.node(LEARNER).role.buffer)

    def is_admitted(self, name: str) -> bool:
        """Return whether a node lives and takes part."""
        return self.is_alive(name) and self.node(name).role.is_admitted

    def is_on_standby(self, worker: str) -> bool:
        """Return whether a worker stands by."""
        return self.node(worker).role.departure.standby_since is not None

    def parent(self, name: str) -> str:
        """Return from whom a node takes weights."""
        parent: str = self.node(name).role.stats().parent
        return parent

    def uplink(self, name: str) -> float | None:
        """Return the bytes per second that a node's uplink was seen to carry, once known."""
        rate: float | None = self.node(name).role.stats().uplink_bytes_per_s
        return rate

    def planned_parents(self, name: str) -> list[str]:
        """Return from whom a node takes weights by the learner's plan, the preferred one first."""
        plan = self.node(LEARNER).role.roster.nodes[name].node.plan
        return [] if plan is None else [parent for parent, _ in plan.parents]

    def num_hops(self, name: str) -> int:
        """Return over how many links weights reach a node from the learner."""
        return 0 if name == LEARNER else 1 + self.num_hops(self.parent(name))

    def chunks_held(self, name: str) -> tuple[int, int]:
        """Return how many chunks a node has of what it is fetching, and of how many."""
        version, held, total = self.node(name).role.broadcast.progress()
        return (0, 0) if version is None else (held, total)

    def bytes_received(self, name: str) -> int:
        """Return the bytes of weights that the present process of a node has received."""
        received: int = self.node(name).role.broadcast.bytes_received
        return received

    def requested_though_held(self, name: str) -> int:
        """Return how many chunks a process of a node has asked for although it held them."""
        return self._process(name).requested_though_held

    def count(self, node: str, name: str) -> float:
        """Return one of a node's counters."""
        counters = self.node(node).role.counters
        return float(counters[name])

    def heard_ago_s(self, name: str) -> float:
        """Return how long ago the learner has heard of a node."""
        roster = self.node(LEARNER).role.roster
        return float(self.now - roster.nodes[name].last_seen_at)

    def waiting_for(self) -> str:
        """Return the learner's sentence about what it waits for."""
        return self.snapshots[-1].waiting_for

    def audit(self, *, is_finished: bool = False) -> None:
        """Check staleness and exactly-once from the records alone; fail where they do not hold."""
        found = audit(
            read_ledger(self.run_dir),
            max_staleness=self._section("sync")["max_staleness"],
            groups_per_step=self._section("batch")["groups_per_step"],
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
