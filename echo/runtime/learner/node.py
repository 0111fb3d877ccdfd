"""The learner node: take a batch, train, record, publish.

    groups --> role --> ledger (disk) --> buffer --> step --> ledger --> publish --> broadcast
                              |                                     |
                              +--> acknowledgement                  +--> evaluation, checkpoint

The training loop awaits three things only: a full batch of admissible groups, its own model work,
and (every so often) a checkpoint. It never waits for the network otherwise: versions are handed to
the broadcast and pulled by the nodes that need them.

Order of events, which a resume relies on: what a batch of actions records is committed before its
messages leave; groups are synced before they are acknowledged; the record of a step is committed
before its weights are published; and everything is synced before a checkpoint becomes visible. The
event loop writes none of it: threads do.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from echo.algo.staleness import ControlSettings, Signals, StalenessController
from echo.config.schema import (
    ActivationSection,
    BatchSection,
    LearnerSection,
    ModelSection,
    NetworkSection,
    RunSection,
    SyncSection,
)
from echo.core.buffer import StalenessBuffer
from echo.core.errors import (
    EchoError,
    EngineError,
    LocalProtocolError,
    StorageError,
    TransportError,
)
from echo.core.records import Discarded, Refused
from echo.core.rollout import Group, PolicyVersion, scored_part
from echo.core.units import format_duration
from echo.engine.engine import Watcher, is_out_of_memory
from echo.leases.open_groups import AppendRecord
from echo.leases.results import NO_FAULT, StoreGroup
from echo.net.transport import Transport
from echo.records.ledger import BoundChanged, Finished, LedgerQueue, Published
from echo.roles.learner import Learner
from echo.runtime.learner.checkpoint import Checkpoints
from echo.runtime.learner.cost import LOOK_S, METER_S, ActivationSettings, CostControl
from echo.runtime.learner.evaluation import Evaluations
from echo.runtime.learner.follower import Follower
from echo.runtime.learner.prompts import PromptsAhead
from echo.runtime.learner.publish import Publication, Publisher, VersionEncoder
from echo.runtime.learner.report import TRAINED_SHARE, Progress, TaskMetrics
from echo.runtime.learner.resume import save_uplinks
from echo.runtime.learner.rewards import LearnerRewards
from echo.runtime.learner.waiting import BatchWait
from echo.runtime.node import LINGER_S, Node, advertised
from echo.runtime.threads import MAX_BLOCKING, Threads
from echo.tasks.rewards import RewardError
from echo.train.step import NonfiniteWeightsError, StepError
from echo.weights.schedule import PublishPace
from echo.wire.actions import Action, Note
from echo.wire.codec import encode_group
from echo.wire.messages import BAD_LOGPROBS

if TYPE_CHECKING:
    from echo.train.attribution import Attribution
    from echo.train.ranks.crew import AnyTrainer


MIN_TRAINED_SHARE = 0.5
"""Of the tokens that agents sample; below it, one line says so."""
REFRESH_S = 0.25
"""Seconds between snapshots for the display."""
MAX_FAILED_STEPS = 5
"""Failed steps in a row after which the run ends with the cause."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedRun:
    """A run that has begun, or goes on."""

    ledger: LedgerQueue
    checkpoints: Checkpoints
    activation: ActivationSettings | None
    """Which workers are activated; None where every one generates, whatever it costs."""
    progress: Progress
    trainer: AnyTrainer
    attribution: Attribution | None
    publisher: Publisher
    """Makes versions of the weights, and codes them."""
    buffer: StalenessBuffer
    role: Learner
    rewards: LearnerRewards | None
    """Scores groups where workers do not; None where they do."""
    evaluations: Evaluations | None
    """Of held-out prompts; None for none."""
    export: Callable[[Path, Publication], None]
    """Writes a version as a directory for other programs."""
    prompts: PromptsAhead | None = None
    """The source of prompts that the role asks; None where it need not wait for any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSections:
    """The sections of the configuration that a learner's node reads."""

    run: RunSection
    run_dir: Path
    model: ModelSection
    task_kind: str
    sync: SyncSection
    batch: BatchSection
    learner: LearnerSection
    network: NetworkSection
    activation: ActivationSection


class EvaluationWatcher(Watcher):
    """Stops an evaluation when its learner stops."""

    def __init__(self, node: LearnerNode) -> None:
        self._node = node

    def should_stop(self) -> bool:
        """Return whether the learner is stopping, or over."""
        return self._node.is_stopping or self._node.has_ended


class LearnerNode(Node):
    """The learner."""

    def __init__(
        self,
        run: OpenedRun,
        transport: Transport,
        sections: RunSections,
        follower: Follower,
        *,
        threads: Threads | None = None,
        log: logging.Logger,
    ) -> None:
        role, ledger = run.role, run.ledger
        super().__init__(role, transport, threads=threads, log=log)
        self.role: Learner = role
        self._opened, self._sections, self._follower = run, sections, follower
        self._buffer, self._trainer, self._ledger = run.buffer, run.trainer, ledger
        self._train_on = (run.trainer if run.attribution is None else run.attribution).step
        self._progress = run.progress
        sync, network = sections.sync, sections.network
        self.pace = pace = PublishPace(
            period=sync.initial_publish_period,
            is_auto=sync.publish_period == "auto",
            max_staleness=sync.max_staleness,
        )
        self._controller: StalenessController | None = None
        """Moves the bound on staleness; None if that is off or there is nothing to choose."""
        if sync.adaptive and sync.min_staleness < sync.max_staleness:
            settings = ControlSettings(least=sync.min_staleness, most=sync.max_staleness)
            self._controller = StalenessController(settings)
        self._costs = CostControl(
            role,
            learner_per_h=sections.learner.price_per_h or 0.0,
            learner_per_gb=network.price_per_gb,
            trains_on_all=sections.batch.keep_zero_variance,
            budget_per_run=sections.activation.budget_per_run,
            settings=run.activation, pace=pace, progress=run.progress,
            ledger=ledger, now=self.now, log=log,
        )  # fmt: skip
        address = advertised(transport.listen_address, sections.learner.advertise)
        self._waiting = BatchWait(
            role,
            address=address or str(transport.listen_address),
            reconnect_for_s=network.reconnect_for_s,
            log=log,
        )
        self._encoded_versions = VersionEncoder(
            role.broadcast,
            run.publisher.coder,
            codec=network.codec,
            node=self,
            ledger=ledger,
        )
        self._task_metrics = TaskMetrics()
        self._has_told_share = False
        pool = self.threads.pool
        self._model_pool, self._disk_pool = pool("trainer"), pool("disk")
        self._eval_pool, self._reward_pool = pool("evaluation"), pool("reward", MAX_BLOCKING)
        self._begin_state()

    def _begin_state(self) -> None:
        """Start with nothing under way."""
        self._held: list[list[Action]] = []
        """Batches of actions that wait until their records are committed."""
        self._has_records, self._has_news, self._has_published = (asyncio.Event() for _ in range(3))
        self._unsynced: list[Group] = []
        self._store_wanted = asyncio.Event()
        self._store_task: asyncio.Task[None] | None = None
        # A group that comes when no more are taken is never acknowledged.
        self._takes_groups, self.is_stopping = True, False
        self._published_step, self._num_failed_steps = -1, 0
        self._published: Publication | None = None
        # Until then nodes of this run may be out there and dial, as after a crash.
        self._missing_until = -math.inf
        # Why the run cannot go on, where it cannot.
        self._failure: EchoError | None = None
        # Whether the weights may be why nothing can be sampled; what was looked through for that
        # last, and what has sampled.
        self._is_in_doubt = self._has_bad_weights = False
        self._examined: PolicyVersion | None = None
        self._sampled: PolicyVersion | None = None
        self._is_work_over = asyncio.Event()

    def release(self) -> None:
        """Release the ledger; after an unclean end it is still open."""
        self._opened.publisher.coder.close()
        self._ledger.release()

    # --- actions ---------------------------------------------------------------------------------

    def perform(self, actions: Iterable[Action]) -> None:
        """Carry out actions in order; a batch that has records waits until they are committed."""
        batch = list(actions)
        if self._takes_groups and any(isinstance(each, AppendRecord) for each in batch):
            super().perform(e for e in batch if isinstance(e, AppendRecord | StoreGroup))
            self._held.append([e for e in batch if not isinstance(e, AppendRecord | StoreGroup)])
        else:
            super().perform(batch)

    def _settle(self) -> None:
        """Have committed, too, what has been recorded meanwhile."""
        super()._settle()
        if self._ledger.has_queued:
            self._has_records.set()

    async def _commit_records(self) -> None:
        """Commit whatever comes, all at once that has come meanwhile."""
        while True:
            await self._has_records.wait()
            self._has_records.clear()
            await self._commit()

    async def _commit(self) -> None:
        """Commit the records so far, and perform the batches that wait for them."""
        held, self._held = self._held, []
        await self._disk_pool.run(self._ledger.commit)
        for batch in held:
            super().perform(batch)

    def on_action(self, action: Action) -> None:
        """Carry out what concerns the learner."""
        match action:
            case StoreGroup() if self._takes_groups:
                self.accept(action)
            case AppendRecord() if self._takes_groups:
                self._ledger.append(action.record)
                self._note_failure(action)
            case StoreGroup() | AppendRecord():
                # Too late: it is not acknowledged, or was never accepted, so it needs no end.
                pass
            case _:
                raise LocalProtocolError(f"a learner cannot {type(action).__name__}")

    def _note_failure(self, action: AppendRecord) -> None:
        """Count a group that a worker could not finish, or whose result was wrong."""
        record = action.record
        if isinstance(record, Discarded) and action.worker_id:
            self._failed(
                record.reason, f"group {record.group} on {action.worker_id}: {action.cause}"
            )
            if record.reason == BAD_LOGPROBS:
                self._is_in_doubt = True
                self.wake()
        elif isinstance(record, Refused) and record.reason not in NO_FAULT:
            cause = f"group {record.group} on {record.worker}: its result was refused"
            self._failed(record.reason, cause)

    # --- groups: scored, written, acknowledged ---------------------------------------------------
    #
    # A group from which the trainer would learn nothing is ended at once with its reason: it is
    # acknowledged, gives its admission back, and another is granted for it. All others are written
    # to the ledger, and acknowledged and put into the buffer once they are on the disk.
    #
    # The role sets a worker aside that delivers no useful groups while others do.

    @property
    def _is_zero_signal(self) -> bool:
        """Whether nothing could be learned from any of the last `max_zero_signal_groups`.

        Groups of workers that are set aside do not count.
        """
        num_groups = self._progress.zero_signal.num_groups - self.role.num_discounted
        return num_groups >= self.role.settings.leases.max_zero_signal_groups

    def accept(self, action: StoreGroup) -> None:
        """Have a group scored unless a worker has; then write it, or end it and grant another."""
        if self._opened.rewards is None:
            self._store_group(action)
        else:
            self.spawn(self._score(self._opened.rewards, action.group), name="reward")

    async def _score(self, rewards: LearnerRewards, group: Group) -> None:
        """Score a group beside everything else, then accept it; end it where that fails."""
        try:
            scores = await self._reward_pool.run(rewards.score, group)
        except RewardError as error:
            if self._takes_groups:
                text = f"group {group.group_id} on the learner: {error.reason}: {error}"
                self._end_failed(group, error.reason, text, error.traceback)
            return
        rollouts = tuple(
            replace(rollout, reward=reward)
            for rollout, reward in zip(group.rollouts, scores, strict=True)
        )
        group = replace(group, rollouts=rollouts)
        self._store_group(StoreGroup(group, *encode_group(group)))

    def _store_group(self, action: StoreGroup) -> None:
        """Write a group that counts towards a step; end one that does not, and grant another."""
        if not self._takes_groups:
            return
        group = scored_part(action.group)
        if group is None:
            self._progress.unscored(action.group)
            self._end_group(action.group, "no_opinion")
            return
        if group is not action.group:
            action = StoreGroup(group, *encode_group(group))
        reason = self._trainer.refusal(group)
        if reason is None:
            self._ledger.store(group, action.header, action.arrays)
            self._unsynced.append(group)
            self._store_wanted.set()
        elif reason == "reward_too_large":
            largest = max(group.rewards, key=abs)
            text = f"group {group.group_id} of {group.worker_id}: {reason}: {largest:g} is beyond "
            self._end_failed(group, reason, f"{text}task.max_reward")
        else:
            self._progress.left_out(group, reason, now=self.now)
            self._end_group(group, reason)

    def _end_failed(self, group: Group, reason: str, text: str, traceback: str = "") -> None:
        """End a group that failed here, and say why."""
        self.perform([Note("warning", text)])
        self._failed(reason, f"{text}\n{traceback}".strip())
        self._end_group(group, reason)

    def _failed(self, reason: str, cause: str) -> None:
        """Count a group from which nothing can be learned, for it failed."""
        self._progress.failed(reason, cause)
        self._tell_if_zero_signal()

    def _end_group(self, group: Group, reason: str) -> None:
        """End a group from which nothing can be learned; its worker is told as of any other."""
        self.role.counters.add(f"discarded/{reason}")
        acknowledgement = self.role.stored(group.group_id, is_useful=False, now=self.now)
        end = Discarded(group=group.group_id, reason=reason, step=self.role.step)
        self.perform([AppendRecord(end), *acknowledgement])
        self._tell_if_zero_signal()

    def _tell_if_zero_signal(self) -> None:
        if self._is_zero_signal:
            self.wake()

    async def _store_loop(self) -> None:
        """Force written groups onto the disk, many at once, then acknowledge them."""
        while self._takes_groups or self._unsynced:
            await self._store_wanted.wait()
            self._store_wanted.clear()
            groups, self._unsynced = self._unsynced, []
            if not groups:
                continue
            await self._disk_pool.run(self._ledger.sync)
            for group in groups:
                self._buffer.put(group)
                self._sampled = max(self._sampled or group.versions[-1], group.versions[-1])
                self._progress.accepted(group, now=self.now)
                stored = self.role.stored(group.group_id, is_useful=True, now=self.now)
                self.perform(stored)
            self.wake()

    async def _take_no_more_groups(self) -> None:
        """Wait until everything that was written is on the disk and in the buffer."""
        self._takes_groups = self.role.is_granting = False  # what is not recorded is not granted
        self._store_wanted.set()
        assert self._store_task is not None
        await self._store_task
        await self._commit()

    def wake(self) -> None:
        """Let the training loop look again whether it has a batch."""
        self._has_news.set()

    async def _wait_for_news(self, *, until: float) -> None:
        """Wait until groups have come, or nothing can be learned, since the last call."""
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until):
                await self._has_news.wait()
        self._has_news.clear()

    # --- the training loop -----------------------------------------------------------------------

    async def work(self) -> None:
        """Train until the last step, then send Finish to every node and end."""
        self._store_task = self.spawn(self._store_loop(), name="store")
        self.spawn(self._commit_records(), name="records")
        if self._opened.prompts is not None:
            self.spawn(self._make_prompts(self._opened.prompts), name="prompts")
        if self._follower.is_watching:
            self.spawn(self._show_loop(), name="display")
        self.spawn(self._watch_costs(), name="activation")
        if len(self.role.lineages) > 1:  # a run that goes on
            self._missing_until = self.now + self._return_s
        try:
            try:
                await self._train()
            except (TransportError, StepError):  # what was trained before is sound
                await self._save()
                raise
            if self.is_stopping:
                await self._save()
                return
            if self._failure is None:
                await self._finish()
            if self._failure is not None:
                await self._give_up(self._failure)
        finally:
            self._is_work_over.set()

    async def _make_prompts(self, prompts: PromptsAhead) -> None:
        """Make prompts, and grant what has waited for them."""
        pool = self.threads.pool("prompts")
        while True:
            if await prompts.make(pool):
                self.perform(self.role.grant(now=self.now))

    async def _watch_costs(self) -> None:
        """Measure the workers and what they cost, and decide which are needed, until the end."""
        costs, pool = self._costs, self.threads.pool("activation")
        while True:
            if costs.is_calm:
                with suppress(TimeoutError):
                    async with asyncio.timeout(METER_S):
                        await self._has_published.wait()
            self._has_published.clear()
            await asyncio.sleep(LOOK_S)
            now = self.now
            if actions := costs.look(now=now):
                self.perform(actions)
            question = costs.review(now=now)
            if costs.is_spent:
                self.wake()
            if question is not None:
                answer = await pool.run(question.solve)
                self.perform(costs.decide(question, answer, now=self.now))

    async def _train(self) -> None:
        role = self.role
        await self._publish()
        max_steps = self._sections.run.max_steps
        while role.step < max_steps and not self.is_stopping and self._failure is None:
            waited_from = self.now
            groups = await self._next_batch()
            if groups is None:
                return
            started_at = self.now
            self._progress.begin("training", now=self.now)
            try:
                result = await self._model_pool.run(self._train_on, groups)
            except StepError as error:
                await self._set_aside(groups, error)
                continue
            self._num_failed_steps = 0
            for notice in result.notices:
                self.log.warning("%s", notice)
            trained_s = self._costs.train_s = self.now - started_at
            staleness = await self._model_pool.run(
                partial(
                    self._ledger.trained,
                    groups,
                    lineage=role.lineages[-1].lineage,
                    consumed_at=role.step,
                )
            )
            samples = self._progress.workers.trained(groups, result.by_group, step=role.step)
            self.perform(role.compare(samples, now=self.now))
            self.perform(role.advance(role.step + 1, now=self.now))
            self._discard_unusable()
            is_lower = self.adapt(role.step, result.metrics, staleness)
            if is_lower or self.pace.is_due(role.step):
                await self._publish()
            waited_s = started_at - waited_from
            self._progress.stepped(
                groups, waited_s=waited_s, trained_s=trained_s, staleness=staleness
            )
            self._write_step(result.metrics | result.speed, staleness)
            # Where memory ran short it may be gone altogether in the next step.
            if result.notices or self._opened.checkpoints.is_due(role.step, now=self.now):
                await self._checkpoint()

    def adapt(self, step: int, metrics: Mapping[str, float], staleness: Mapping[int, int]) -> bool:
        """Let the controller move the bound on staleness; return whether it is lower now.

        A lower bound gates new leases only, shortens the publish period and publishes at once; what
        is buffered or being sampled stays valid up to the hard bound.
        """
        if self._controller is None:
            return False
        signals = Signals(
            ess=metrics.get("ess"),
            mismatch_kl=metrics.get("mismatch_kl"),
            clip_ratio=metrics.get("clip_ratio/mean"),
            staleness=max(staleness, default=0),
        )
        decision = self._controller.observe(step, signals)
        if decision is None:
            return False
        self._ledger.append(BoundChanged(**asdict(decision)))
        self.log.info(
            "staleness bound %d -> %d: %s", decision.before, decision.bound, decision.cause
        )
        self._buffer.admission_staleness = decision.bound
        self.pace.limit(decision.bound)
        return decision.bound < decision.before

    async def _set_aside(self, groups: list[Group], error: StepError) -> None:
        """End the groups that made a step fail, or all of its batch; the others go back.

        Raises:
            StepError: if step after step fails, so that they can hardly be to blame.
        """
        step, counters = self.role.step, self.role.counters
        self._num_failed_steps += 1
        counters.add(f"steps_failed/{error.reason}")
        faulty = await self._model_pool.run(self._trainer.find_faulty, groups)
        # None of them alone: then it is all of them together.
        faulty = faulty or {group.group_id: error.reason for group in groups}
        for group_id, reason in faulty.items():
            self._ledger.append(Discarded(group=group_id, reason=reason, step=step))
            counters.add(f"discarded/{reason}")
        names = ", ".join(
            f"{group.group_id} of {group.worker_id}" for group in groups if group.group_id in faulty
        )
        text = f"step {step + 1} failed: {error}; ended without training: group {names}"
        self.log.warning("%s", text, exc_info=error.__cause__)
        if self._num_failed_steps >= MAX_FAILED_STEPS:
            if error.reason == "nonfinite_gradient":
                await self._encoded_versions.wait()
                found = await self._find_bad_weights(await self._make_present())
                if found:
                    raise StepError(found, reason=error.reason) from error
            raise StepError(
                f"{self._num_failed_steps} steps in a row failed, the last because {error}; the "
                "groups have ended, the run is saved, and --resume goes on with others",
                reason=error.reason,
            ) from error
        rest = [group for group in groups if group.group_id not in faulty]
        self._buffer.put_back(rest, num_taken=len(groups))
        # Others may be granted in place of those that have ended.
        self.perform(self.role.grant(now=self.now))

    async def _next_batch(self) -> list[Group] | None:
        """Wait for a full batch of groups within the bound; None if the training has ended."""
        self._progress.begin("", now=self.now)
        self._waiting.begin(now=self.now)
        while not self.is_stopping:
            if self._costs.is_spent:
                self.log.warning("%s", self._costs.describe_spent(self.role.step))
                return None
            self._discard_unusable()
            num_groups = self._sections.batch.groups_per_step
            groups = self._buffer.take(num_groups, step=self.role.step)
            if groups is not None:
                # There is room in the buffer again.
                self.perform(self.role.grant(now=self.now))
                return groups
            if self.role.prompt_fault is not None:
                self._failure = self.role.prompt_fault
                return None
            if self._is_in_doubt and (found := await self._examine_published()):
                self._failure = EngineError(found)
                return None
            if self._is_zero_signal:
                failing = self._progress.describe_failing(self.role.step)
                if failing is None:
                    self.log.warning("%s", self._progress.describe_zero_signal(self.role.step))
                else:
                    self._failure = RewardError(failing)
                return None
            await self._wait_for_news(until=self._waiting.look_at)
            if self.now >= self._waiting.look_at and not self.is_stopping:
                await self._look()
        return None

    async def _look(self) -> None:
        """Look again which worker can be given a group, and from which version."""
        self.perform(self.role.review_workers(now=self.now))
        wait_reason = self._waiting.look(now=self.now)
        if wait_reason == "outdated" and self._published_step != self.role.step:
            await self._publish()
            self._progress.begin("", now=self.now)
        if wait_reason == "no_weights":
            stats = [member.stats for member in self.role.roster.members("worker")]
            self._is_in_doubt |= any(each.refused.get("engine/installs_failed") for each in stats)
        self.perform(self.role.grant(now=self.now))

    # A worker whose model gives no probabilities reports that, ends the group and goes on. The
    # learner then checks the published version for NaN, once, and the weights of every checkpoint
    # before they are saved. Where they hold NaN no worker can ever sample again, so the run ends
    # there, and they are not saved (again).

    async def _examine_published(self) -> str:
        """Look once through the version that is out; return what is wrong with it, if anything."""
        self._is_in_doubt, publication = False, self._published
        if publication is None or publication.manifest.version == self._examined:
            return ""
        self._examined = publication.manifest.version
        found = await self._find_bad_weights(publication)
        if not found:
            text = "the weights of %s are finite: what cannot sample from them is at fault itself"
            self.log.warning(text, self._examined)
        return found

    async def _find_bad_weights(self, publication: Publication) -> str:
        """Return what is wrong with weights that hold NaN; nothing if they hold none."""
        # Only here: a simulated learner has no torch.
        from echo.engine.weights import find_nonfinite

        names = await self._model_pool.run(lambda: find_nonfinite(publication.tensors()))
        if not names:
            return ""
        manifest = publication.manifest
        return self._describe_bad_weights(names, len(manifest.tensors), manifest.version)

    def _describe_bad_weights(
        self, names: Sequence[str], num_tensors: int, version: PolicyVersion
    ) -> str:
        """Say which weights hold NaN, since when, and what to do; nothing is saved from now on."""
        self._has_bad_weights = True
        model, latest = self._sections.model, self._sections.run_dir / "checkpoints" / "latest"
        what = (
            f"{version} of {model.name}, in {model.dtype}, has NaN or infinity in {len(names)} of "
            f"{num_tensors} tensors, such as {names[0]}: nothing can be sampled from it"
        )
        if self._sampled is not None:
            what += f". {self._sampled} is the newest version that has sampled a whole group"
        if not version.step:
            return f"{what}; start from other weights (model.name, learner.init_from)"
        return (
            f"{what}. Write the name of a checkpoint before {version} into {latest} and continue "
            "with --resume, perhaps at a lower optimizer.learning_rate"
        )

    def _discard_unusable(self) -> None:
        step = self.role.step
        evicted = self._buffer.evict(step=step)
        for each in evicted:
            group_id = each.group.group_id
            self._ledger.append(Discarded(group=group_id, reason=each.reason, step=step))
            self.role.counters.add(f"discarded/{each.reason}")
        if evicted:
            # Others may be granted in their place, now and not at the next heartbeat.
            self.perform(self.role.grant(now=self.now))

    async def _publish(self) -> None:
        """Hand the present weights to the broadcast, and to the evaluation when it is due."""
        role, began_at = self.role, self.now
        self._progress.begin("publishing", now=self.now)
        # Then only its image is in memory, and the one before makes room for this.
        await self._encoded_versions.wait()
        version = PolicyVersion(role.lineages[-1].lineage, role.step)
        publication = await self._model_pool.run(self.make_version, version)
        self._published = publication
        self._ledger.append(Published(version=version))
        await self._commit()
        self.pace.published(version, num_bytes=publication.manifest.num_bytes, now=self.now)
        self._published_step = role.step
        self._has_published.set()
        self.perform(role.plan_publish(now=self.now))
        await self._encoded_versions.publish(publication)
        self._progress.published(self.now - began_at)
        evaluations = self._opened.evaluations
        if evaluations is not None and evaluations.is_due(role.step):
            evaluations.started(self.spawn(self._evaluate(publication), name="evaluation"))

    def make_version(self, version: PolicyVersion) -> Publication:
        """Return the present weights as a version; called in the trainer's thread."""
        return self._opened.publisher.make(self._trainer.tensors(), version)

    async def _evaluate(self, publication: Publication) -> None:
        assert self._opened.evaluations is not None
        version, evaluate = publication.manifest.version, self._opened.evaluations.evaluate
        began_at = self.now
        try:
            result = await self._eval_pool.run(
                # There, because the weights may still be on their way.
                lambda: evaluate(version, publication.tensors(), EvaluationWatcher(self)),
            )
        except EngineError as error:
            if not is_out_of_memory(error):
                raise
            text = "%s is not evaluated, the run goes on: %s; eval.interval_steps=0 does without"
            self.log.warning(text, version, error)
            return
        if result is None:
            return
        if result.has_figure:
            self._progress.evaluated(
                version.step,
                result.sampled,
                result.greedy,
                is_rate=result.is_rate,
                num_errors=result.num_reward_errors,
            )
        task_name = self._sections.task_kind.rpartition(":")[2]
        seconds = self.now - began_at
        row = {**result.metrics(task_name), "eval/seconds": seconds, "lineage": version.lineage}
        self._follower.write_metrics(version.step, row)
        level = logging.WARNING if result.num_reward_errors else logging.INFO
        self.log.log(level, "%s, in %s", result, format_duration(seconds))

    async def _make_present(self) -> Publication:
        """Return the present weights as a version that is not published."""
        version = PolicyVersion(self.role.lineages[-1].lineage, self.role.step)
        return await self._model_pool.run(self.make_version, version)

    # --- checkpoints and the end -----------------------------------------------------------------

    async def _checkpoint(self) -> None:
        """Save the whole state; a full disk is reported and survived, NaN ends the run."""
        role, checkpoints = self.role, self._opened.checkpoints
        lineage, step, now = role.lineages[-1].lineage, role.step, self.now
        if checkpoints.saved_step == step or self._has_bad_weights:
            return
        self._progress.begin("saving a checkpoint", now=self.now)

        def save() -> int:
            self._ledger.sync()
            return checkpoints.save(self._trainer.save_state, lineage=lineage, step=step, now=now)

        try:
            oldest_step = await self._model_pool.run(save)
        except NonfiniteWeightsError as error:
            version = PolicyVersion(lineage, step)
            why = self._describe_bad_weights(error.names, error.num_tensors, version)
            self._failure = EngineError(why)
            return
        except StorageError as error:
            role.counters.add("checkpoints_failed")
            self.log.warning("%s; the checkpoint before stays the newest", error)
            return
        record = partial(self._ledger.checkpointed, lineage=lineage, step=step)
        await self._disk_pool.run(partial(record, oldest_step=oldest_step))
        save_rates = partial(save_uplinks, self._sections.run_dir, role.uplinks(), log=self.log)
        await self._disk_pool.run(save_rates)
        self.log.info("checkpoint of step %d saved", step)

    async def _finish(self) -> None:
        """Evaluate, give every remaining group its end, save, export, tell every node."""
        self.role.is_granting = False
        if self._published_step != self.role.step:
            # The last weights are evaluated and exported even if no worker will use them.
            await self._publish()
        assert self._published is not None
        if self._opened.evaluations is not None:
            self._progress.begin("evaluating", now=self.now)
            await self._opened.evaluations.wait()
            if self._opened.evaluations.evaluated_step != self.role.step:
                await self._evaluate(self._published)
        await self._take_no_more_groups()
        step = self.role.step
        for group in self._buffer.clear():
            end = Discarded(group=group.group_id, reason="run_finished", step=step)
            self._ledger.append(end)
        await self._checkpoint()
        if self._failure is not None:
            return
        final = self._sections.run_dir / "final"
        self._progress.begin("exporting", now=self.now)
        await self._disk_pool.run(self._opened.export, final, self._published)
        # The last picture shows who took part, so it is drawn before they leave.
        self._progress.begin("done", now=self.now)
        self.display()
        await self._tell_end("the run is finished")
        if step >= self._sections.run.max_steps:
            self._ledger.append(Finished(step=step))
        await self._disk_pool.run(self._ledger.close)
        self.stop("finished")

    async def _save(self) -> None:
        """Save where the run does not end for good, so that --resume goes on from here."""
        await self._close_records()
        self.log.info(
            "stopped at step %d; --resume continues from step %d%s",
            self.role.step, self._opened.checkpoints.saved_step or 0,
            ", workers wait for it" if self.role.roster.members("worker") else "",
        )  # fmt: skip

    async def _give_up(self, failure: EchoError) -> None:
        """Save, so that --resume goes on once the cause is mended, tell every node, and fail."""
        await self._close_records()
        self.display()
        await self._tell_end("the run cannot go on, see the learner's log")
        self.stop("failed", failure)

    async def _close_records(self) -> None:
        await self._take_no_more_groups()
        await self._checkpoint()
        await self._disk_pool.run(self._ledger.close)

    async def drain(self) -> None:
        """Let the running step come to its end and the state be saved."""
        self.is_stopping = True
        self.role.is_granting = False
        self.wake()
        await self._is_work_over.wait()

    # A node that has lost its way to the learner dials at growing pauses: after the learner's
    # crash, a relay's, or a link's. A run that ends meanwhile would be over before such a node came
    # once; its dials would fail, and it would end with an error. So the learner stays until each
    # node that was heard of a moment ago has gone, or has had the time to come back; and a learner
    # that resumes a run stays until the nodes of the former process have had the same time.

    @property
    def _return_s(self) -> float:
        """Seconds in which a node has dialled twice, and was greeted each time."""
        heartbeat_s = self.role.settings.leases.heartbeat_s
        return max(LINGER_S, 2 * (self.transport.options.max_redial_s + heartbeat_s))

    async def _tell_end(self, reason: str) -> None:
        """Tell every node, also those that have yet to come back; return when all have gone."""
        self.perform(self.role.finish(reason))
        # Each heartbeat is told again, and so is who joins; what goes to workers needs the relays.
        await self._wait_for_leaving({"worker"})
        self.perform(self.role.dismiss_all())
        await self._wait_for_leaving({"worker", "relay"})

    async def _wait_for_leaving(self, roles: Set[str]) -> None:
        """Wait until the nodes of these roles have gone, or could have come back."""
        return_s, nodes = self._return_s, self.role.roster.nodes

        def is_over() -> bool:
            now = self.now
            return now >= self._missing_until and not any(
                node.role in roles and now < node.last_seen_at + return_s for node in nodes.values()
            )

        within_s = max(return_s, self._missing_until - self.now)
        await self.wait_until(is_over, within_s=within_s)

    # --- what the learner tells of itself: a row of metrics per step, a picture on the screen ----

    def _write_step(self, metrics: Mapping[str, float], staleness: Mapping[int, int]) -> None:
        """Append the row of the step that was just made."""
        role, now = self.role, self.now
        row = self._progress.step_metrics(
            metrics,
            staleness,
            step=role.step,
            bytes_sent=role.broadcast.bytes_sent,
            now=now,
        )
        row |= self.pace.metrics()
        row |= self._costs.metrics(row, now=now)
        row |= self._progress.lengths.metrics(oldest_open=role.leases.oldest_open)
        row |= self._partial_metrics()
        row |= self._task_code_metrics()
        workers = [member.node_id for member in role.roster.members("worker")]
        row |= self._progress.workers.row(workers)
        if self._controller is not None:
            row["staleness/bound"] = self._buffer.admission_staleness
        row["lineage"] = role.lineages[-1].lineage
        row |= {f"count/{name}": value for name, value in role.counters.as_dict().items()}
        row |= {f"net/{name}": value for name, value in asdict(self.transport.stats()).items()}
        self._follower.write_metrics(role.step, row)

    def _task_code_metrics(self) -> dict[str, float]:
        """Return how the task's code did since the last step."""
        roster = self.role.roster
        totals = {
            **roster.take_counts_left(),
            **{member.node_id: member.stats.refused for member in roster.members("worker")},
        }
        if self._opened.rewards is not None:
            totals["learner"] = self._opened.rewards.counts()
        row = self._task_metrics.row(totals)
        share = row.get(TRAINED_SHARE, 1.0)
        if share < MIN_TRAINED_SHARE and not self._has_told_share:
            self._has_told_share = True
            self.log.warning(
                "%.0f %% of the tokens that agents have sampled are trained on: their calls do not "
                "go on from earlier ones, so each begins a new chain, and of a session one chain "
                "is trained; send earlier answers as they were sampled (docs/training-agents.md)",
                100 * share,
            )
        return row

    def _partial_metrics(self) -> dict[str, float]:
        """Return what became of unfinished rollouts; empty where none was ever continued.

        Totals are among the counters; here are how many groups wait to be continued, how many steps
        old the oldest token of a continued group was on average, and which share of what was
        sampled was thrown away or will not be trained on.
        """
        role = self.role
        counts = role.counters
        if not counts["partials/resumed"] and not counts["partials/interrupted"]:
            return {}
        members = role.roster.members("worker")
        num_sampled = sum(member.stats.tokens_sampled for member in members)
        num_wasted = counts["partials/wasted_tokens"] + counts["partials/masked_tokens"]
        num_wasted += counts["partials/trimmed_tokens"] + role.buffer.num_trimmed_tokens
        return {
            "partials/waiting": sum(member.worker.num_waiting for member in members),
            "partials/mean_age": counts["partials/age_sum"] / max(1, counts["partials/resumed"]),
            "partials/wasted_ratio": num_wasted / max(1, num_sampled),
        }

    async def _show_loop(self) -> None:
        """Draw again and again, until every node is told that the run has ended."""
        while self.role.finish_reason is None:
            self.display()
            await asyncio.sleep(REFRESH_S)

    def display(self) -> None:
        """Draw the present state."""
        if not self._follower.is_watching:
            return
        self._follower.show(
            self._progress.snapshot(
                self.role,
                run_name=self._sections.run.name,
                max_steps=self._sections.run.max_steps,
                pace=self.pace,
                cost=self._costs.view(),
                now=self.now,
            )
        )
