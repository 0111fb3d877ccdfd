"""The worker's node: carry out the actions of the worker's role in threads.

The role (`roles/worker/worker.py`) decides what to sample, stop, score, install and save. The node
carries out each of these actions by a call in a thread, and reports the outcome to the role as an
event (`report`). Meanwhile the loop receives weights, forwards them to children and delivers
results.

Only a complete version is installed. If the learner's signed hashes arrived before the
installation, the image in memory is hashed again before it is loaded. If outside agents produce the
run's rollouts, the engine samples for these agents (`runtime/agents`). At the end the node gives
the machine back (`release.py`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import traceback
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from echo.core.errors import (
    ConfigError,
    EchoError,
    EngineError,
    LocalProtocolError,
    StorageError,
)
from echo.core.extras import install_command
from echo.core.monitoring.metrics import WorkerView
from echo.core.rollout import NO_OPINION, PolicyVersion
from echo.engine.engine import (
    Completion,
    Engine,
    Request,
    Sampling,
    VersionError,
    Watcher,
    describe_error,
    describe_nonfinite,
    is_out_of_memory,
)
from echo.engine.weights import tensors_from_image
from echo.leases.partials import PartialRules
from echo.leases.worker.held import GroupState, PartialGroup
from echo.leases.worker.keeper import PartialsFound, PartialsSaved, Save
from echo.net.transport import Transport
from echo.records.files import write_file
from echo.roles.joining import Configure, NodeState
from echo.roles.worker.departure import Drained, DrainRequested, MachineReleased, Release
from echo.roles.worker.engine_facts import EngineFacts, Sampler
from echo.roles.worker.installing import (
    EngineDamaged,
    Install,
    InstallFailed,
    InstallMissed,
    VersionInstalled,
)
from echo.roles.worker.outcomes import GroupFinished, GroupScored, answer_to
from echo.roles.worker.sampling import (
    CallRaised,
    CallRefused,
    CallReturned,
    CancelEpisodes,
    EngineCall,
    MembersGrown,
    NonfiniteFound,
    NoResult,
    OfferEpisodes,
    Recall,
    Sample,
    Score,
    Withdraw,
)
from echo.roles.worker.worker import EngineBuilt, Worker
from echo.runtime.agents.agents import AgentParts, Agents
from echo.runtime.agents.call_sampler import CallSampler
from echo.runtime.disk_store import MemoryStore
from echo.runtime.episodes import EpisodeRunner, openings_of
from echo.runtime.node import DialingNode, Node
from echo.runtime.threads import MAX_BLOCKING, Pool, Threads
from echo.runtime.worker.release import RentedMachine
from echo.tasks.rewards import RewardError, TaskHost
from echo.tasks.task import Example
from echo.weights.manifest import TensorSpec, hash_image
from echo.weights.receiver import VersionArrived, VersionAudited, VersionDamaged
from echo.weights.store.in_place import ApplyPatch
from echo.weights.store.items import Transfer
from echo.wire.actions import Action, Note
from echo.wire.messages import Lease

# --- The parts of a worker, and the functions that need no node ---


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    """The parts of a worker that depend on the run's settings."""

    engine: Engine
    host: TaskHost
    """Runs the task's code, which computes the rewards of answers."""
    runner: EpisodeRunner | None
    """Plays the episodes of an environment; None if the task has no episodes."""
    decode: Callable[[Sequence[int]], str]
    """Function that decodes token ids, without stop and padding tokens."""
    sampling: Sampling
    group_size: int
    max_prompt_tokens: int
    """Number of tokens of the longest prompt that leaves space for a completion."""
    prompt_bound: str = "the model's window"
    """The limit that determines `max_prompt_tokens`: the model's window or the memory."""
    groups_per_batch: int
    """Number of groups that the engine samples at the same time."""
    num_fit: int = 0
    """Number of groups that fit into memory at the same time; 0 if unknown."""
    note: str = ""
    """A notice about the engine for the user; "" if there is none."""
    rules: PartialRules
    """The rules for unfinished rollouts."""
    partials_path: Path
    """File for unfinished groups, which the next process of this worker reads."""
    installed_path: Path
    """File with the hashes of installed versions, which are compared with the published hashes."""
    agents: AgentParts | None
    """The settings and functions for serving outside agents; None if the run has no agents."""
    digests: dict[str, str]
    engine_name: str = ""
    """Kind and data type of the engine, by which workers are compared."""
    read_local_image: Callable[[], tuple[bytearray, bytes] | None]
    """Slow function that returns the worker's own model as (image, hash), or None."""

    @property
    def facts(self) -> EngineFacts:
        """The facts about the engine that the role needs."""
        sampler: Sampler = "engine" if self.runner is None else "episodes"
        return EngineFacts(
            group_size=self.group_size,
            groups_per_batch=self.groups_per_batch,
            num_fit=self.num_fit,
            is_continuous=self.engine.is_continuous,
            takes_patches=self.engine.takes_patches,
            num_versions=self.engine.num_versions,
            sampler=sampler if self.agents is None else "agents",
            max_prompt_tokens=self.max_prompt_tokens,
            prompt_bound=self.prompt_bound,
            max_completion_tokens=self.sampling.max_completion_tokens,
            rules=self.rules,
            name=self.engine_name,
        )

    def install(self, transfer: Transfer) -> str | None:
        """Load a version into the engine, and return the hex hash of its image.

        If the signed hashes have not arrived yet, the image is not hashed and the result is None.

        Raises:
            EngineError: if the image's hash differs from the signed hash, or if the engine refuses
                the version.
        """
        manifest, digest = transfer.manifest, None
        if transfer.is_hashed:
            digest = hash_image(transfer.storage, manifest.chunk_bytes).hex()
        if digest is not None and digest != manifest.image_hash.hex():
            raise EngineError(
                f"{manifest.version}: the bytes in memory do not hash to what the learner signed; "
                "check this machine's memory"
            )
        image = memoryview(transfer.storage).toreadonly()
        self.engine.load(tensors_from_image(manifest.tensors, image), manifest.version)
        return digest

    def install_patch(self, work: ApplyPatch, specs: Sequence[TensorSpec], is_loaded: bool) -> None:
        """Turn an image in memory and the engine's weights into the next version, in place.

        Args:
            work: the patch (the changed words and their places), and the image to change.
            specs: the descriptions of the tensors in the image.
            is_loaded: whether the engine's weights were loaded from this image. It is False after
                an earlier copy of this version was found damaged in memory. All weights are then
                loaded again.

        Raises:
            EngineError: if the patch cannot be applied. The image and the engine are then
                unchanged.
        """
        patch, engine = work.patch, self.engine
        try:
            work.store.begin_patch(patch)
        except OSError as error:
            raise EngineError(f"{patch.version} cannot be written in place: {error}") from error
        try:
            if is_loaded and engine.installed == patch.base:
                engine.patch(patch, work.image, specs)
            else:
                patch.write(work.image)
                engine.load(tensors_from_image(specs, work.image.toreadonly()), patch.version)
        except EngineError:
            patch.take_back(work.image)
            work.store.cancel_patch(patch)
            raise


def record_installed(path: Path, version: PolicyVersion, image_hash: str) -> None:
    """Append an installed version's hash to a file.

    Later the hash is compared with the published hash.

    Raises:
        OSError: if the file cannot be written.
    """
    record = {"version": [version.lineage, version.step], "image_hash": image_hash}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


class NodeWatcher(Watcher):
    """Stops an engine call when the worker's node has ended."""

    def __init__(self, node: Node) -> None:
        self.node = node

    def should_stop(self) -> bool:
        return self.node.has_ended


class EpisodeWatcher(NodeWatcher):
    """Adds the progress of episodes to their engine call, and stops a call that is not wanted."""

    def __init__(self, node: Node, call: EngineCall) -> None:
        super().__init__(node)
        self.call = call

    def should_stop(self) -> bool:
        """Return whether the node has ended, or the learner wants none of the call's groups.

        A recalled call continues to its end, because no other worker has its environments.
        """
        return self.node.has_ended or not any(group.is_sampled for group in self.call.groups)

    def on_tokens(self, number: int) -> None:
        """Add `number` sampled tokens to the call's progress."""
        self.call.on_progress(number)

    def on_progress(self, number: int) -> None:
        """Add `number` engine steps that sampled no token, as in a prefill, to the progress."""
        self.call.on_progress(number)


class CallWatcher(EpisodeWatcher):
    """Passes completions from the engine's thread to the loop, and stops recalled calls."""

    def __init__(self, node: Node, call: EngineCall) -> None:
        """Watch a call. Must be called in the node's loop."""
        super().__init__(node, call)
        self.ended: asyncio.Queue[Completion | None] = asyncio.Queue()
        """The call's completions in the order in which they end; None after the last one."""
        self._loop = asyncio.get_running_loop()

    def should_stop(self) -> bool:
        """Return whether the node has ended or the role has recalled the call."""
        return self.call.is_recalled or self.node.has_ended

    def on_tokens(self, number: int) -> None:
        self.call.on_tokens(number)

    def on_completion(self, completion: Completion) -> None:
        if not self.node.has_ended:
            self._loop.call_soon_threadsafe(self.ended.put_nowait, completion)


class WorkerNode(DialingNode):
    """Carries out a worker role's actions with the engine, the rewards and the disk."""

    _sample_pool: Pool
    """Threads for calls of the engine. The engine determines the number of threads."""

    def __init__(
        self,
        role: Worker,
        transport: Transport,
        *,
        build: Callable[[Mapping[str, Any], Mapping[str, bytes]], WorkerParts],
        on_release: str | None = None,
        version_store: MemoryStore | None = None,
        threads: Threads | None = None,
        log: logging.Logger,
    ) -> None:
        """Connect role, transport and threads. `run` starts the node.

        Args:
            role: the worker's role, which decides the node's actions.
            transport: the transport with the node's connections.
            build: slow function that builds the parts from the inherited settings and files; called
                in a thread.
            on_release: shell command that gives the machine back, or None.
            version_store: the store of received versions; see `DialingNode`.
            threads: the pools of threads; if None, real threads are used.
            log: the log of this node.
        """
        super().__init__(role, transport, version_store=version_store, threads=threads, log=log)
        self.role: Worker = role
        self.build = build
        self._engine_pool = self.threads.pool("engine")
        self._reward_pool = self.threads.pool("reward", MAX_BLOCKING)
        self._file_pool = self.threads.pool("partials")
        self._parts: WorkerParts | None = None
        self._agents: Agents | None = None
        """The outside agents that the engine samples for; None if the run has none."""
        self._machine = RentedMachine(on_release, log=log)
        self._drained = asyncio.Event()
        self._calls: set[EngineCall] = set()
        """The running calls of the engine."""
        self._is_damaged = False
        """Whether the installed version was found to be damaged in memory."""

    def view(self) -> WorkerView:
        """Return this worker's status for its operator: version, counts and activity."""
        role = self.role
        version = role.installed_version
        has_learner = role.state not in (NodeState.DIALLING, NodeState.JOINING)
        return WorkerView(
            version="no version" if version is None else str(version),
            num_tokens=role.tokens_sampled + sum(call.seen_tokens for call in self._calls),
            num_groups=role.num_accepted,
            activity=role.activity if has_learner else f"{role.state}: no learner",
        )

    @property
    def parts(self) -> WorkerParts:
        """The parts of this worker. They exist once the worker is configured."""
        assert self._parts is not None
        return self._parts

    # --- actions ---------------------------------------------------------------------------------

    def on_action(self, action: Action) -> None:
        """Carry out an action of a worker. A slow action runs as a task."""
        match action:
            case OfferEpisodes():
                assert self._agents is not None  # the role offers episodes only to agents
                self._agents.take(action.leases)
            case CancelEpisodes():
                assert self._agents is not None
                self._agents.cancel(action.lease)
            case Withdraw():
                if self._agents is not None:
                    self._agents.close()
            case Drained():
                self._drained.set()
            case VersionAudited() | VersionDamaged():
                self._audited(action)
            case Recall() | VersionArrived():
                pass  # the watcher polls `is_recalled`; the role has the version
            case _:
                self.spawn(self._work_of(action), name=type(action).__name__.lower())

    def _work_of(self, action: Action) -> Coroutine[Any, Any, None]:
        match action:
            case Configure():
                return self._set_up(action)
            case Sample():
                return self._see_through(action.call)
            case Score():
                return self._score(action.group)
            case Install():
                return self._install(action.version)
            case Save():
                return self._save(action.data)
            case Release():
                return self._give_back(action.reason)
        raise LocalProtocolError(f"a worker cannot {type(action).__name__}")

    async def _set_up(self, configure: Configure) -> None:
        settings, assets = configure.settings, configure.assets
        parts = await self._engine_pool.run(self.build, settings, assets)
        self._parts = parts
        if parts.note:
            self.log.info("%s", parts.note)
        # Without this, their processes would outlive this process.
        self.at_release += [parts.host.close, parts.engine.close]
        if parts.runner is not None:
            self.at_release.append(parts.runner.close)
        places = parts.facts.num_places if parts.engine.is_continuous else 1
        self._sample_pool = self.threads.pool("sample", places)
        await self.recover()
        local = await self._engine_pool.run(parts.read_local_image)
        if local is not None:
            self.role.broadcast.offer(*local)
        try:
            left = await self._file_pool.run(parts.partials_path.read_bytes)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise StorageError(f"cannot read {parts.partials_path}: {error}") from error
        else:
            self.report(PartialsFound(left))
        if parts.agents is not None:
            self._begin_agents(parts.agents)
        self.report(EngineBuilt(parts.facts, parts.digests))

    def before_expire(self) -> None:
        """Add the counts of the task and the engine to the role's counters.

        The next heartbeat reports these counters.
        """
        super().before_expire()
        if self._parts is None:
            return
        for call in self._calls:
            call.credit()
        for counts in (self._parts.host.take_counts(), self._parts.engine.take_counts()):
            for name, number in counts.items():
                self.role.counters.add(name, number)

    # --- sampling --------------------------------------------------------------------------------

    async def _see_through(self, call: EngineCall) -> None:
        self._calls.add(call)
        try:
            await (self._sample(call) if self.parts.runner is None else self._play(call))
        finally:
            self._calls.discard(call)

    async def _sample(self, call: EngineCall) -> None:
        parts, watcher = self.parts, CallWatcher(self, call)
        members = {
            f"{group.lease.group_id}.{group.lease.attempt}.{index}": (group, index)
            for group in call.groups
            for index, member in enumerate(group.members)
            if not member.is_finished
        }
        requests = [_request(name, *place) for name, place in members.items()]
        sampling = replace(parts.sampling, greedy=call.is_greedy)
        generated = self._sample_pool.run(
            lambda: parts.engine.generate(requests, sampling, watcher, version=call.version)
        )
        generated.add_done_callback(lambda _: watcher.ended.put_nowait(None))

        def extend(completion: Completion) -> None:
            group, index = members[completion.request_id]
            if completion.finish_reason == "nonfinite":
                self.report(NonfiniteFound(group, describe_nonfinite(completion)))
                return
            longer = list(group.members)
            longer[index] = longer[index].extended(
                completion.token_ids,
                completion.logprobs,
                completion.policy_versions,
                finish_reason=completion.finish_reason,
                support=completion.support,
                likely=completion.likely,
            )
            self.report(MembersGrown(call, group, longer))

        try:
            while (completion := await watcher.ended.get()) is not None:
                extend(completion)
        finally:
            generated.cancel()
        try:
            completions = generated.result()
        except Exception as error:  # noqa: BLE001 -- an engine may raise anything
            await self._raised(call, error)
            return
        if self.has_ended:
            return
        for completion in completions:
            if completion.finish_reason == "abort":
                extend(completion)
        num_tokens = sum(len(completion.token_ids) for completion in completions)
        self.report(CallReturned(call, num_tokens))

    async def _play(self, call: EngineCall) -> None:
        parts = self.parts
        assert parts.runner is not None
        runner, leases = parts.runner, [group.lease for group in call.groups]
        openings = openings_of(leases, group_size=parts.group_size)
        sampling = replace(parts.sampling, greedy=call.is_greedy)
        try:
            results = await self._sample_pool.run(
                lambda: runner.play(
                    openings,
                    sampling,
                    EpisodeWatcher(self, call),
                    version=call.version,
                )
            )
        except Exception as error:  # noqa: BLE001 -- an engine may raise anything
            await self._raised(call, error)
            return
        if self.has_ended:
            return
        num_tokens = 0
        for lease, result in zip(leases, results, strict=True):
            if isinstance(result, RewardError):
                self._give_up(lease, result)
                continue
            num_tokens += sum(int(rollout.completion_mask.sum()) for rollout in result)
            group = answer_to(lease, result, worker_id=self.role.settings.node_id)
            self.report(GroupFinished(group))
        self.report(CallReturned(call, num_tokens))

    async def _raised(self, call: EngineCall, error: Exception) -> None:
        """Report an error of an engine call to the role.

        Raises:
            EchoError: if the engine can no longer sample, so that the node must end.
        """
        if self.has_ended:
            return
        if isinstance(error, VersionError):
            # Newer weights have replaced the version that the call asked for.
            self.report(CallRefused(call, str(error)))
            return
        text, frames = describe_error(error), "".join(traceback.format_exception(error))
        line = self._reports.line("engine", text, f"the engine has raised: {text}", now=self.now)
        if line is not None:
            self.log.warning("%s", line, exc_info=error)
        # If memory is too small for one rollout, a test with one token would prove nothing.
        # Otherwise test whether the engine still samples.
        is_usable = not is_out_of_memory(error) and await self._sample_pool.run(
            self.parts.engine.can_sample
        )
        self.report(CallRaised(call, text, frames, is_usable))
        if not is_usable:
            if isinstance(error, EchoError):
                raise error
            why = f"the engine cannot sample since it raised {text}; restart the worker"
            raise EngineError(why) from error

    # --- agents, where rollouts come from them ---------------------------------------------------

    def _begin_agents(self, parts: AgentParts) -> None:
        sampler = CallSampler(self.parts.engine, NodeWatcher(self), threads=self.threads)
        self._agents = Agents(parts, self.role, sampler, node=self, threads=self.threads)
        self.spawn(sampler.run(), name="agent-calls")
        self.spawn(self._agents.watch(), name="agent-sessions")
        self.spawn(serve_agents(self._agents, log=self.log), name="endpoint")

    # --- rewards, weights, the disk --------------------------------------------------------------

    async def _score(self, group: PartialGroup) -> None:
        try:
            rewards = await self._reward_pool.run(self._score_all, group)
        except RewardError as error:
            self._give_up(group.lease, error)
        else:
            if not self.has_ended:
                self.report(GroupScored(group, rewards))

    def _score_all(self, group: PartialGroup) -> list[float]:
        """Return one reward per completion. The call blocks.

        If the node ends or the group is no longer wanted, the result is shorter.
        """
        parts, rewards = self.parts, []
        texts = [parts.decode(member.token_ids.tolist()) for member in group.members]
        for reward in parts.host.score_all(Example(**group.lease.example), texts):
            rewards.append(NO_OPINION if reward is None else reward)
            if self.has_ended or group.state is not GroupState.SCORING:
                break
        return rewards

    def _give_up(self, lease: Lease, error: RewardError) -> None:
        self.report(NoResult(lease, error.reason, str(error), error.traceback))

    async def _install(self, version: PolicyVersion) -> None:
        parts, broadcast = self.parts, self.role.broadcast
        work, digest = broadcast.patch_of(version), None
        source = work.patch.base if work is not None else version
        if source not in broadcast.store:
            self.report(InstallMissed())
            return
        image = broadcast.store[source]
        try:
            if work is None:
                digest = await self._engine_pool.run(parts.install, image)
            else:
                specs, is_loaded = image.manifest.tensors, not self._is_damaged
                await self._engine_pool.run(parts.install_patch, work, specs, is_loaded)
        except EngineError as error:
            if work is not None:
                self.perform(self.role.worked(work, str(error), now=self.now))
            self.report(InstallFailed(version, error))
            return
        if work is not None:
            self.perform(self.role.worked(work, "", now=self.now))
            if version not in broadcast.store:  # an audit has found its memory damaged meanwhile
                self.report(InstallMissed())
                return
        if digest is not None:
            self._record(version, digest)
        self._is_damaged = False
        self.report(VersionInstalled(version))

    def _audited(self, result: VersionAudited | VersionDamaged) -> None:
        if isinstance(result, VersionDamaged):
            self._is_damaged = True
            self.report(EngineDamaged())
        elif self.role.installed_version == result.version:
            self._record(result.version, result.image_hash.hex())

    def _record(self, version: PolicyVersion, image_hash: str) -> None:
        path = self.parts.installed_path
        try:
            record_installed(path, version, image_hash)
        except OSError as error:
            text = f"cannot note in {path} that {version} is installed: {error}; free disk space"
            self.perform([Note("warning", text, "installed")])

    async def _save(self, data: bytes) -> None:
        path, fault = self.parts.partials_path, ""
        try:
            await self._file_pool.run(write_file, path, data)
        except OSError as error:
            fault = f"{path}: {error}"
        self.report(PartialsSaved(fault))

    # --- stopping --------------------------------------------------------------------------------

    async def run(self) -> str:
        """Run until the node is stopped. Then give the machine back, except after an interrupt."""
        reason = await super().run()
        # Also wait for a release command that is running already, even after an interrupt.
        if self._num_interrupts == 0 or self._machine.is_releasing:
            await self._machine.give_back(reason)
        return reason

    async def _give_back(self, reason: str) -> None:
        self.report(MachineReleased(await self._machine.give_back(reason)))

    async def drain(self) -> None:
        """Finish the current groups or pass them to the learner, then send Goodbye."""
        self.report(DrainRequested())
        await self._drained.wait()
        await super().drain()


async def serve_agents(agents: Agents, *, log: logging.Logger) -> None:
    """Serve outside agents until cancelled.

    Raises:
        ConfigError: if aiohttp cannot be imported.
    """
    try:
        # Imported here because workers without agents may lack the package.
        from echo.runtime.agents.endpoint import serve
    except ImportError as error:
        raise ConfigError(
            f"agent.listen needs aiohttp, which cannot be imported here ({error}): run "
            + install_command("worker", "agents")
        ) from error
    await serve(agents, log=log)


def _request(name: str, group: PartialGroup, index: int) -> Request:
    return Request(
        request_id=name,
        prompt_ids=np.array(group.lease.prompt_ids, dtype=np.int32),
        seed=group.seed_of(index),
        prefix_ids=group.members[index].token_ids,
    )
