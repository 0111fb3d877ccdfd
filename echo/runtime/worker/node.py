"""The worker role: sample the leased groups with the newest weights, score them, deliver them.

Which groups go into the engine, and when it is stopped, is `runtime/worker/sampling.py`'s affair.
Meanwhile the newest complete version is installed, in flight: no rollout has to end for it, and
each token says which version sampled it. The loop goes on receiving weights, forwarding them to
children and delivering results. A version is installed whole, after its hash has been checked once
more in memory, or not at all: if the engine refuses it, the worker keeps sampling from the one
before and says so. A worker that is told to stop hands its unfinished rollouts over to the learner.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from echo.core.errors import EngineError, LocalProtocolError
from echo.core.metrics import WorkerView
from echo.core.rollout import Group, PolicyVersion, Rollout
from echo.engine.engine import Engine, Sampling
from echo.engine.weights import tensors_from_image
from echo.leases.partials import PartialGroup
from echo.net.transport import Transport
from echo.roles.joining import Configure
from echo.roles.worker import LeaseCancelled, LeasesChanged, Worker
from echo.runtime.agents.sessions import AgentParts
from echo.runtime.episodes import EpisodeRunner
from echo.runtime.node import DialingNode
from echo.runtime.threads import MAX_BLOCKING, Threads
from echo.runtime.worker.sampling import EpisodeLoop, PartialRules, RolloutLoop
from echo.tasks.rewards import TICK_S, RewardError, TaskHost
from echo.tasks.task import Example
from echo.weights.receiver import VersionArrived
from echo.weights.store import Transfer
from echo.wire.actions import Action, Note
from echo.wire.messages import Lease

# --- What a worker is made of, and its few steps that need no node ---


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    """What a worker is made of once it knows the run."""

    engine: Engine
    host: TaskHost
    """Where answers are judged."""
    runner: EpisodeRunner | None
    """Plays the episodes of an environment; None where an answer is one turn."""
    decode: Callable[[Sequence[int]], str]
    """Token ids -> text without stop and padding tokens."""
    sampling: Sampling
    group_size: int
    max_prompt_tokens: int
    """Longest prompt that leaves room for a completion in the model's window."""
    groups_per_batch: int
    """Groups that the engine holds at one time."""
    rules: PartialRules
    """What becomes of unfinished rollouts."""
    partials_path: Path
    """File in which they outlive the process."""
    agents: AgentParts | None
    """What outside agents get, where rollouts come from them."""
    digests: dict[str, str]
    read_local_image: Callable[[], bytearray | None]
    """Lays out the weights of the worker's own model directory as a version's image; slow."""


def install(engine: Engine, transfer: Transfer) -> str:
    """Load a version into the engine after checking its bytes once more; return their hash."""
    manifest = transfer.manifest
    digest = blake3(transfer.storage)
    if digest.digest() != manifest.image_hash:
        raise EngineError(
            f"{manifest.version}: the bytes in memory do not hash to what the learner signed; "
            "check this machine's memory"
        )
    image = memoryview(transfer.storage).toreadonly()
    engine.load(tensors_from_image(manifest.tensors, image), manifest.version)
    return digest.hexdigest()


DRAIN_S = 30.0
"""Seconds that a stopping worker waits for its last rewards and its acknowledgements."""
INSTALL_AGAIN_S = 30.0
"""Seconds after which a version that could not be installed is tried again, if none is newer.

If all workers refuse the newest version, and what they have is too old, no newer one ever comes.
"""


class WorkerNode(DialingNode):
    """A worker."""

    def __init__(
        self,
        session: Worker,
        transport: Transport,
        *,
        build: Callable[[Mapping[str, Any], Mapping[str, bytes]], WorkerParts],
        on_installed: Callable[[PolicyVersion, str], None],
        threads: Threads | None = None,
        log: logging.Logger,
    ) -> None:
        """Join the parts; `run` starts them.

        Args:
            session: the worker's conversation.
            transport: its links.
            build: (inherited settings, inherited files) -> parts; slow, called in a thread.
            on_installed: called with each installed version and the hash of its image.
            threads: see `Node`.
            log: where to tell what happens.
        """
        super().__init__(session, transport, threads=threads, log=log)
        self.session: Worker = session
        self._build = build
        self._on_installed = on_installed
        self._engine_pool = self.threads.pool("engine")
        self._reward_pool = self.threads.pool("reward", MAX_BLOCKING)
        self._rollouts: RolloutLoop | None = None
        self._episodes: EpisodeLoop | None = None
        self._wake = asyncio.Event()
        self._has_arrived = asyncio.Event()
        self._parts: WorkerParts | None = None
        self._configure: Configure | None = None
        self._refused_version: PolicyVersion | None = None
        self._is_stopping = False

    def view(self) -> WorkerView:
        """Return what this worker does, for its operator."""
        session = self.session
        in_engine = 0 if self._rollouts is None else self._rollouts.num_tokens
        version = session.installed_version
        return WorkerView(
            version="no version" if version is None else str(version),
            num_tokens=session.tokens_sampled + in_engine,
            num_groups=session.num_accepted,
            activity=session.activity if session.is_admitted else f"{session.state}: no learner",
        )

    # --- actions ---------------------------------------------------------------------------------

    def on_action(self, action: Action) -> None:
        """Carry out what concerns a worker."""
        match action:
            case Configure():
                self._configure = action
                self._wake.set()
            case LeasesChanged() | VersionArrived():
                self._has_arrived.set()
                self._wake.set()
            case LeaseCancelled():
                text = f"group {action.group_id} was finished by another worker"
                self.perform([Note("info", text, "superseded")])
                if self._rollouts is not None:
                    self._rollouts.give_up()
            case _:
                raise LocalProtocolError(f"a worker cannot {type(action).__name__}")

    # --- the work loop ---------------------------------------------------------------------------

    async def work(self) -> None:
        """Sample as long as there are leases; wait for weights, leases or configuration."""
        self.perform(self.session.start(now=self.now))
        while not self._is_stopping:
            self._wake.clear()
            if self._configure is not None and self._parts is None:
                await self._set_up(self._configure)
            if self._rollouts is not None and self._parts is not None:
                self._count_calls(self._parts)
                self._sample_more(self._rollouts)
            await self._wake.wait()

    async def _set_up(self, configure: Configure) -> None:
        settings, assets = configure.settings, configure.assets
        parts = await self._engine_pool.run(self._build, settings, assets)
        self._parts = parts
        await self.recover()
        image = await self._engine_pool.run(parts.read_local_image)
        if image is not None:
            self.session.broadcast.offer(image, blake3(image).digest())
        rollouts = self._make_rollouts(parts)
        await rollouts.recover()
        self._rollouts = rollouts
        self.session.num_places = rollouts.num_places
        # Some wait in the queue, so that the engine never waits for the network.
        self.session.max_groups = rollouts.max_groups
        self.perform(self.session.configured(parts.digests, now=self.now))
        self.spawn(self._install_versions(parts, rollouts), name="install")

    def _make_rollouts(self, parts: WorkerParts) -> RolloutLoop:
        rollouts = RolloutLoop(
            self.session,
            parts.engine,
            parts.sampling,
            rules=parts.rules,
            group_size=parts.group_size,
            groups_per_batch=parts.groups_per_batch,
            path=parts.partials_path,
            admit=partial(self._admit, parts),
            refuse=self._refuse,
            deliver=partial(self._on_whole, parts),
            wake=self._wake.set,
            perform=self.perform,
            spawn=self.spawn,
            threads=self.threads,
            clock=lambda: self.now,
            has_ended=lambda: self.has_ended,
            log=self.log,
        )
        if parts.runner is not None:
            self._episodes = EpisodeLoop(
                self.session,
                parts.runner,
                parts.sampling,
                group_size=parts.group_size,
                groups_per_batch=parts.groups_per_batch,
                is_continuous=parts.engine.is_continuous,
                admit=partial(self._admit, parts),
                refuse=self._refuse,
                deliver=partial(self._on_played, parts),
                wake=self._wake.set,
                spawn=self.spawn,
                threads=self.threads,
                has_ended=lambda: self.has_ended,
            )
        return rollouts

    def _sample_more(self, rollouts: RolloutLoop) -> None:
        """Give the engine as many groups as it has room for."""
        loop = self._episodes or rollouts
        loop.sample_more()
        self.session.activity = "sampling" if loop.is_busy else self._waiting_for()

    def _waiting_for(self) -> str:
        if self.session.standby_since is not None:
            return "standing by"
        installed = self.session.installed_version
        if installed is None:
            return "waiting for weights"
        if self.session.partials.awaiting(installed):
            return "waiting for newer weights"
        return "waiting for acks" if self.session.outbox.is_full else "waiting for leases"

    # --- weights ---------------------------------------------------------------------------------

    async def _install_versions(self, parts: WorkerParts, rollouts: RolloutLoop) -> None:
        """Install each version that arrives, or the newest of several."""
        while not self._is_stopping:
            self._has_arrived.clear()
            version = self.session.broadcast.newest_complete
            if version is None or not self._is_wanted(version):
                await self._wait_for_version()
            else:
                await self._install(parts, rollouts, version)

    async def _wait_for_version(self) -> None:
        """Wait for a version to arrive, or until it is time to try a refused one again."""
        is_refused = self._refused_version is not None
        try:
            async with asyncio.timeout(INSTALL_AGAIN_S if is_refused else None):
                await self._has_arrived.wait()
        except TimeoutError:
            self._refused_version = None

    def _is_wanted(self, version: PolicyVersion) -> bool:
        installed = self.session.installed_version
        return version != self._refused_version and (installed is None or version > installed)

    async def _install(
        self, parts: WorkerParts, rollouts: RolloutLoop, version: PolicyVersion
    ) -> None:
        if parts.rules.stale_tokens == "drop":
            # Nothing that older weights have begun goes on, in flight or not.
            await rollouts.hold()
        try:
            await self._install_now(parts, rollouts, version)
        finally:
            rollouts.release()

    async def _install_now(
        self, parts: WorkerParts, rollouts: RolloutLoop, version: PolicyVersion
    ) -> None:
        session = self.session
        transfer = session.broadcast.store[version]
        if not rollouts.is_busy:
            session.activity = f"installing {version}"
        try:
            digest = await self._engine_pool.run(install, parts.engine, transfer)
        except EngineError as error:
            self._refused_version = version
            session.counters.add("engine/installs_failed")
            self.log.warning(
                "cannot install %s, keeping %s: %s", version, session.installed_version, error
            )
            if session.installed_version is None:
                raise
            return
        self._on_installed(version, digest)
        self.perform(session.on_installed(version, now=self.now))
        self._wake.set()

    # --- groups ----------------------------------------------------------------------------------

    def _admit(self, parts: WorkerParts, partial_group: PartialGroup) -> bool:
        """Return whether the prompt leaves room in the window; report it if it does not."""
        num_tokens = len(partial_group.lease.prompt_ids)
        if num_tokens <= parts.max_prompt_tokens:
            return True
        detail = (
            f"the prompt has {num_tokens} tokens, the model's window leaves "
            f"{parts.max_prompt_tokens} beside "
            f"{parts.sampling.max_completion_tokens} sampled ones"
        )
        self.perform(
            self.session.failed(partial_group.lease, "prompt_too_long", detail, now=self.now)
        )
        return False

    def _refuse(self, leases: Sequence[Lease], why: str) -> None:
        """Give leases back whose version was replaced before the engine had begun them."""
        for lease in leases:
            self.perform(self.session.superseded(lease, why, now=self.now))

    def _on_whole(self, parts: WorkerParts, partial_group: PartialGroup) -> None:
        self.spawn(self._deliver(parts, partial_group), name="deliver")

    async def _deliver(self, parts: WorkerParts, partial_group: PartialGroup) -> None:
        """Score a whole group and deliver it."""
        lease = partial_group.lease
        example = Example(**lease.example)
        try:
            rewards = await self._while_progressing(
                partial_group, self._reward_pool.run(self._score_all, parts, example, partial_group)
            )
        except RewardError as error:
            self._give_up(lease, error)
            return
        finally:
            self._count_calls(parts)
        if len(rewards) < len(partial_group.members):
            self.session.partials.end(partial_group.key)
            return
        if self.has_ended:
            return
        rollouts = [
            member.rollout(reward, stale_tokens=parts.rules.stale_tokens)
            for member, reward in zip(partial_group.members, rewards, strict=True)
        ]
        self._finish(lease, rollouts)

    async def _while_progressing(
        self, partial_group: PartialGroup, scoring: asyncio.Future[list[float]]
    ) -> list[float]:
        """Wait for rewards, and keep the lease meanwhile.

        Every call of a task's code is bounded, also one that hangs or waits for a free thread: its
        end, and not that of its lease, tells what was wrong.
        """
        try:
            while not (await asyncio.wait({scoring}, timeout=TICK_S))[0]:
                partial_group.num_progress += 1
            return scoring.result()
        finally:
            scoring.cancel()

    def _on_played(
        self, parts: WorkerParts, lease: Lease, result: Sequence[Rollout] | RewardError
    ) -> None:
        self._count_calls(parts)
        if self.session.is_cancelled(lease):
            self.session.partials.end((lease.group_id, lease.attempt))
        elif isinstance(result, RewardError):
            self._give_up(lease, result)
        else:
            self._finish(lease, result)

    def _finish(self, lease: Lease, rollouts: Sequence[Rollout]) -> None:
        group = Group(
            group_id=lease.group_id,
            attempt=lease.attempt,
            worker_id=self.session.settings.node_id,
            prompt_ids=np.array(lease.prompt_ids, dtype=np.int32),
            rollouts=tuple(rollouts),
        )
        self.perform(self.session.finished(group, now=self.now))

    def _give_up(self, lease: Lease, error: RewardError) -> None:
        text, traceback = str(error), error.traceback
        self.perform(
            self.session.failed(lease, error.reason, text, traceback=traceback, now=self.now)
        )

    def _count_calls(self, parts: WorkerParts) -> None:
        for counts in (parts.host.take_counts(), parts.engine.take_counts()):
            for name, number in counts.items():
                self.session.counters.add(name, number)

    def _score_all(
        self, parts: WorkerParts, example: Example, partial_group: PartialGroup
    ) -> list[float]:
        """Return one reward per completion, fewer once nobody waits; runs in another thread."""
        texts = [parts.decode(member.token_ids.tolist()) for member in partial_group.members]
        rewards: list[float] = []
        for reward in parts.host.score_all(example, texts):
            rewards.append(reward)
            partial_group.num_progress += 1
            if self.has_ended or self.session.is_cancelled(partial_group.lease):
                break
        return rewards

    # --- stopping --------------------------------------------------------------------------------

    async def drain(self) -> None:
        """Finish what is in hand, then say goodbye."""
        await self.finish_work()
        await super().drain()

    async def finish_work(self) -> None:
        """Hand over what is unfinished, and wait until the learner has what is finished."""
        self._is_stopping = self.session.is_leaving = True
        self._wake.set()
        self.perform(self.session.heartbeat(now=self.now) if self.session.is_admitted else [])
        if self._rollouts is not None:
            await self._rollouts.leave()
        session = self.session
        await self.wait_until(
            lambda: not session.partials.running and not len(session.outbox), within_s=DRAIN_S
        )

    def release(self) -> None:
        """Stop the engine and the task, whose processes would outlive this one; free the images."""
        if self._parts is not None:
            self._parts.host.close()
            if self._parts.runner is not None:
                self._parts.runner.close()
            self._parts.engine.close()
        super().release()
