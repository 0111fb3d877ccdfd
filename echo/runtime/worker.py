"""The worker role: sample the leased groups with the newest weights, score them, deliver them.

One engine thread does all model work, one batch of groups after another; between batches the
newest complete version is installed. While a batch runs, the loop goes on receiving weights,
forwarding them to children and delivering results. A version is installed whole, after its hash
has been checked once more in memory, or not at all: if the engine refuses it, the worker keeps
sampling from the one before and says so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from blake3 import blake3

from echo.engine.engine import Completion, Engine, Request, Sampling
from echo.engine.weights import tensors_from_image
from echo.errors import EngineError, LocalProtocolError
from echo.protocol.actions import Action, Configure, LeasesChanged, VersionArrived
from echo.protocol.broadcast import Transfer
from echo.protocol.messages import Lease
from echo.protocol.worker_session import WorkerSession
from echo.rollout import Group, PolicyVersion, Rollout
from echo.runtime.relay import DialingNode
from echo.runtime.transport import Transport
from echo.tasks.scoring import RewardError, score
from echo.tasks.task import Example, Task

DRAIN_S = 30.0
"""Seconds that a stopping worker waits for its running batch and its acknowledgements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    """What a worker is made of once it knows the run."""

    engine: Engine
    task: Task
    decode: Callable[[Sequence[int]], str]
    """Token ids -> text without stop and padding tokens."""
    sampling: Sampling
    group_size: int
    reward_timeout_s: float
    max_prompt_tokens: int
    """Longest prompt that leaves room for a completion in the model's window."""
    groups_per_batch: int
    """Groups sampled at once."""
    digests: dict[str, str]
    read_local_image: Callable[[], bytearray | None]
    """Lays out the weights of the worker's own model directory as a version's image; slow."""


class WorkerNode(DialingNode):
    """A worker."""

    def __init__(
        self,
        session: WorkerSession,
        transport: Transport,
        *,
        build: Callable[[Mapping[str, Any], Mapping[str, bytes]], WorkerParts],
        on_installed: Callable[[PolicyVersion, str], None],
        log: logging.Logger,
    ) -> None:
        """Join the parts; `run` starts them.

        Args:
            session: the worker's conversation.
            transport: its links.
            build: (inherited settings, inherited files) -> parts; slow, called in a thread.
            on_installed: called with each installed version and the hash of its image.
            log: where to tell what happens.
        """
        super().__init__(session, transport, log=log)
        self.session: WorkerSession = session
        self._build = build
        self._on_installed = on_installed
        self._engine_thread = self.new_thread("engine")
        self._wake = asyncio.Event()
        self._parts: WorkerParts | None = None
        self._configure: Configure | None = None
        self._refused_version: PolicyVersion | None = None
        self._num_done = 0
        self._is_stopping = False

    # --- actions ---------------------------------------------------------------------------------

    def on_action(self, action: Action) -> None:
        """Carry out what concerns a worker."""
        match action:
            case Configure():
                self._configure = action
                self._wake.set()
            case LeasesChanged() | VersionArrived():
                self._wake.set()
            case _:
                raise LocalProtocolError(f"a worker cannot {type(action).__name__}")

    # --- the work loop ---------------------------------------------------------------------------

    async def work(self) -> None:
        """Sample as long as there are leases; wait for weights, leases or configuration."""
        self.perform(self.session.start(now=self.now))
        while not self._is_stopping:
            self._wake.clear()
            if self._parts is None:
                await self._configure_once()
            elif not await self._work_once(self._parts):
                await self._wake.wait()

    async def _configure_once(self) -> None:
        if self._configure is None:
            await self._wake.wait()
            return
        settings, assets = self._configure.settings, self._configure.assets
        parts = await self.in_thread(self._engine_thread, lambda: self._build(settings, assets))
        image = await self.in_thread(self._engine_thread, parts.read_local_image)
        if image is not None:
            self.session.broadcast.offer(image, blake3(image).digest())
        self._parts = parts
        # As many groups again wait in the queue, so that the engine never waits for the network.
        self.session.max_groups = 2 * parts.groups_per_batch
        self.perform(self.session.configured(parts.digests, now=self.now))

    async def _work_once(self, parts: WorkerParts) -> bool:
        """Install what is new and sample one batch; return whether there was anything to do."""
        installed = await self._install_newest(parts)
        leases = self.session.take_leases(parts.groups_per_batch)
        if not leases:
            self.session.activity = self._waiting_for()
            return installed
        self.session.activity = "sampling"
        await self._sample(parts, leases)
        return True

    def _waiting_for(self) -> str:
        if self.session.installed_version is None:
            return "waiting for weights"
        return "waiting for acks" if self.session.outbox.is_full else "waiting for leases"

    # --- weights ---------------------------------------------------------------------------------

    async def _install_newest(self, parts: WorkerParts) -> bool:
        session = self.session
        version = session.broadcast.newest_complete
        if version in (None, session.installed_version, self._refused_version):
            return False
        assert version is not None
        if session.installed_version is not None and version < session.installed_version:
            return False
        transfer = session.broadcast.store[version]
        session.activity = f"installing {version}"
        try:
            digest = await self.in_thread(
                self._engine_thread, lambda: _install(parts.engine, transfer)
            )
        except EngineError as error:
            self._refused_version = version
            session.counters.add("installs_failed")
            self.log.warning(
                "cannot install %s, keeping %s: %s", version, session.installed_version, error
            )
            if session.installed_version is None:
                raise
            return False
        session.installed_version = version
        self._on_installed(version, digest)
        self.perform(session.heartbeat(now=self.now) if session.is_admitted else [])
        return True

    # --- sampling --------------------------------------------------------------------------------

    async def _sample(self, parts: WorkerParts, leases: list[Lease]) -> None:
        """Sample, score and deliver these groups."""
        fitting = []
        for lease in leases:
            if len(lease.prompt_ids) <= parts.max_prompt_tokens:
                fitting.append(lease)
                continue
            detail = (
                f"the prompt has {len(lease.prompt_ids)} tokens, the model's window leaves "
                f"{parts.max_prompt_tokens} beside "
                f"{parts.sampling.max_completion_tokens} sampled ones"
            )
            self.perform(self.session.failed(lease, "prompt_too_long", detail, now=self.now))
        if not fitting:
            return
        version = self.session.installed_version
        assert version is not None
        requests = [
            Request(
                request_id=f"{lease.group_id}.{lease.attempt}.{member}",
                prompt_ids=np.array(lease.prompt_ids, dtype=np.int32),
                seed=lease.seed + member,
            )
            for lease in fitting
            for member in range(parts.group_size)
        ]
        self._num_done = 0
        reporter = asyncio.create_task(self._report_progress(fitting), name="progress")
        try:
            completions = await self.in_thread(
                self._engine_thread,
                lambda: parts.engine.generate(requests, parts.sampling, should_stop=self._count),
            )
            self.session.tokens_sampled += sum(len(c.token_ids) for c in completions)
            self.session.activity = "scoring"
            size = parts.group_size
            for index, lease in enumerate(fitting):
                own = completions[index * size : (index + 1) * size]
                await self._deliver(parts, lease, own, version)
        finally:
            reporter.cancel()

    def _count(self) -> bool:
        """Count a decoding step or a reward (called by other threads); return whether to stop."""
        self._num_done += 1
        return self.has_ended

    async def _report_progress(self, leases: list[Lease]) -> None:
        while True:
            await asyncio.sleep(self.session.heartbeat_s / 2)
            for lease in leases:
                self.session.progress(lease, self._num_done)

    async def _deliver(
        self,
        parts: WorkerParts,
        lease: Lease,
        completions: Sequence[Completion],
        version: PolicyVersion,
    ) -> None:
        example = Example(**lease.example)
        try:
            rewards = await asyncio.to_thread(self._score_all, parts, example, completions)
        except RewardError as error:
            self.perform(self.session.failed(lease, "reward_error", str(error), now=self.now))
            return
        group = Group(
            group_id=lease.group_id,
            attempt=lease.attempt,
            worker_id=self.session.settings.node_id,
            prompt_ids=np.array(lease.prompt_ids, dtype=np.int32),
            rollouts=tuple(
                _make_rollout(completion, version, reward)
                for completion, reward in zip(completions, rewards, strict=True)
            ),
        )
        self.perform(self.session.finished(group, now=self.now))

    def _score_all(
        self, parts: WorkerParts, example: Example, completions: Sequence[Completion]
    ) -> list[float]:
        """Return one reward per completion; runs in another thread."""
        rewards: list[float] = []
        for completion in completions:
            text = parts.decode(completion.token_ids.tolist())
            rewards.append(score(parts.task, example, text, parts.reward_timeout_s))
            if self._count():
                break  # Nobody waits for these any more.
        return rewards

    # --- stopping --------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Take no more leases, finish the running batch, wait for its acknowledgements."""
        self._is_stopping = self.session.is_leaving = True
        self._wake.set()
        self.perform(self.session.heartbeat(now=self.now) if self.session.is_admitted else [])
        await self.wait_until(
            lambda: not self.session.running and not len(self.session.outbox), within_s=DRAIN_S
        )
        await super().drain()


def _install(engine: Engine, transfer: Transfer) -> str:
    """Load a version into the engine after checking its bytes once more; return their hash."""
    manifest = transfer.manifest
    digest = blake3(transfer.arena)
    if digest.digest() != manifest.image_hash:
        raise EngineError(
            f"{manifest.version}: the bytes in memory do not hash to what the learner signed; "
            "check this machine's memory"
        )
    image = memoryview(transfer.arena).toreadonly()
    engine.load(tensors_from_image(manifest.tensors, image))
    return digest.hexdigest()


def _make_rollout(completion: Completion, version: PolicyVersion, reward: float) -> Rollout:
    num_tokens = len(completion.token_ids)
    return Rollout(
        token_ids=completion.token_ids,
        sampler_logprobs=completion.logprobs,
        policy_versions=np.tile(
            np.array([version.lineage, version.step], dtype=np.int32), (num_tokens, 1)
        ),
        completion_mask=np.ones(num_tokens, dtype=np.bool_),
        reward=reward,
        finish_reason=completion.finish_reason,
    )
