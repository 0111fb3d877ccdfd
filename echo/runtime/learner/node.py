"""The learner node: take a batch, train, record the step, publish a version.

    groups --> role --> ledger (disk) --> buffer --> step --> ledger --> publish --> broadcast
                              |                                     |
                              +--> acknowledgement                  +--> evaluation, checkpoint

The training loop awaits only three things: a full batch of admissible groups, its own model work,
and sometimes a checkpoint. Sending a version never delays the loop: nodes fetch the versions that
they need.

A resume relies on the following order. The records of a batch of actions are committed before its
messages are sent. Groups are synced to the disk before they are acknowledged. The record of a step
is committed before its weights are published. The ledger is synced before a checkpoint becomes
visible. All of this is written in threads.

The node and its parts report their results to the role as events (table in `roles/learner.py`). The
node makes these parts and calls them from `_train`:

    commits.py                  holds messages until their records are committed
    batches/groups.py           scores, writes and acknowledges groups
    batches/waiting.py          ends the run if no worker comes
    batches/stalls.py           explains why the learner waits long or workers are idle
    batches/failed_steps.py     ends the groups that made a step fail
    batches/bound.py            adapts the staleness bound
    costs/                      meters costs, and decides which workers are active
    versions/publish.py         publishes versions
    versions/evaluation.py      evaluates published versions
    versions/weights_check.py   looks for NaN in the weights of versions
    saving/save.py              saves the run
    saving/rollback.py          goes back to a checkpoint after a divergence
    alerts.py                   watches the run, and sends alerts to the operator
    shutdown.py                 announces the end of the run to every node
    operations.py               carries out the operations of operators
    follower.py                 writes rows of metrics, draws the status
    samples.py                  writes some rollouts as text to the log and the trackers
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from echo.config.schema import (
    ActivationSection,
    AlertsSection,
    BatchSection,
    EvalSection,
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
    TransportError,
)
from echo.core.rollout import Group
from echo.leases.open_groups import AppendRecord
from echo.leases.results import StoreGroup
from echo.net.transport import Transport
from echo.records.ledger import Finished, LedgerQueue
from echo.roles.learner import BatchTaken, GrantsDue, GrantsStopped, Learner, StepTaken
from echo.roles.review import ReviewDue, SamplesTrained
from echo.roles.viewers import MakeStatus, Operate, StatusMade
from echo.runtime.learner.alerts import Alerts
from echo.runtime.learner.batches.bound import AdaptiveBound
from echo.runtime.learner.batches.failed_steps import FailedSteps
from echo.runtime.learner.batches.groups import DeliveredGroups
from echo.runtime.learner.batches.prompts import PromptsAhead
from echo.runtime.learner.batches.rewards import LearnerRewards
from echo.runtime.learner.batches.stalls import Stalls
from echo.runtime.learner.batches.waiting import BatchWait
from echo.runtime.learner.commits import Commits
from echo.runtime.learner.costs.activation import ActivationSettings
from echo.runtime.learner.costs.control import METER_S, CostControl
from echo.runtime.learner.costs.measurements import POLL_S
from echo.runtime.learner.follower import Follower, Reporter
from echo.runtime.learner.operations import Operations
from echo.runtime.learner.report import Progress
from echo.runtime.learner.samples import SampleLog
from echo.runtime.learner.saving.checkpoint import Checkpoints
from echo.runtime.learner.saving.disk_limit import DiskLimit
from echo.runtime.learner.saving.rollback import Rollback
from echo.runtime.learner.saving.save import StateSaver
from echo.runtime.learner.shutdown import RunShutdown
from echo.runtime.learner.versions.evaluation import Evaluations, EvaluationSchedule, Evaluator
from echo.runtime.learner.versions.publish import (
    Publication,
    PublishedVersions,
    Publisher,
    VersionEncoder,
)
from echo.runtime.learner.versions.weights_check import WeightsCheck
from echo.runtime.node import Node, advertised
from echo.runtime.threads import MAX_BLOCKING, Threads
from echo.tasks.rewards import RewardError
from echo.train.step import StepError
from echo.weights.schedule import PublishPace
from echo.wire.actions import Action

if TYPE_CHECKING:
    from echo.train.attribution import Attribution
    from echo.train.ranks.rank_group import AnyTrainer


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedRun:
    """The parts of a new or resumed run."""

    ledger: LedgerQueue
    checkpoints: Checkpoints
    activation: ActivationSettings | None
    """The settings of activation; None if all workers are always active."""
    progress: Progress
    trainer: AnyTrainer
    attribution: Attribution | None
    publisher: Publisher
    """Makes versions of the weights, and owns the coder that encodes them."""
    buffer: StalenessBuffer
    role: Learner
    rewards: LearnerRewards | None
    """Scores groups if reward.where is "learner"; None if workers score them."""
    evaluator: Evaluator | None
    """Scores versions on held-out prompts; None if evaluation is off."""
    export: Callable[[Path, Publication], None]
    """Writes a version of the weights to a directory, for other programs."""
    disk_limit: DiskLimit | None = None
    """Keeps the run's directory below its size limit; None in a simulation."""
    samples: SampleLog | None = None
    """Writes sample rollouts of steps and evaluations as text; None if no samples are written."""
    is_recomputing: bool = False
    """Whether the trainer recomputes activations although they would fit into memory."""
    prompts: PromptsAhead | None = None
    """Makes the role's prompts ahead; None if prompts are made on demand."""


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
    evaluation: EvalSection
    keeps_best: bool
    """Whether the checkpoint of the best held-out score is kept."""
    activation: ActivationSection
    alerts: AlertsSection


class LearnerNode(Node):
    """Connects the parts of a learner, and calls them from its training loop."""

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
        """Connect the parts of an opened run."""
        super().__init__(run.role, transport, threads=threads, log=log)
        self.role: Learner = run.role
        self._buffer, self.ledger, self.progress = run.buffer, run.ledger, run.progress
        self._train_on = (run.trainer if run.attribution is None else run.attribution).step
        self._coder, self._export, self._prompts = run.publisher.coder, run.export, run.prompts
        self._sections, self._samples = sections, run.samples
        pool = self.threads.pool
        self._model_pool, self._disk_pool = pool("trainer"), pool("disk")
        self.pace = PublishPace(
            period=sections.sync.initial_publish_period,
            is_auto=sections.sync.publish_period == "auto",
            max_staleness=sections.sync.max_staleness,
        )
        self.is_stopping = False
        """Whether the operator has asked the learner to stop."""
        self._failure: EchoError | None = None
        """The error that ends the run; None while no error has occurred."""
        self._is_work_over = asyncio.Event()
        self._wire_groups(run)
        self._wire_versions(run, follower)
        self._wire_reports(run, follower)

    def _act(self, actions: Iterable[Action]) -> None:
        self.perform(actions)

    def _clock(self) -> float:
        return self.now

    def _wire_groups(self, run: OpenedRun) -> None:
        sections, transport = self._sections, self.transport
        address = advertised(transport.listen_address, sections.learner.advertise)
        self._waiting = BatchWait(
            run.role,
            address=address or str(transport.listen_address),
            reconnect_for_s=sections.network.reconnect_for_s,
            log=self.log,
        )
        self._commits = Commits(run.ledger, self._disk_pool, perform=super().perform)
        self._delivered = DeliveredGroups(
            run.role,
            run.ledger,
            run.buffer,
            run.progress,
            refusal=run.trainer.refusal,
            rewards=run.rewards,
            disk=self._disk_pool,
            scoring=self.threads.pool("reward", MAX_BLOCKING),
            perform=self._act,
            report=self.report,
            spawn=self.spawn,
            wake=self._waiting.wake,
            clock=self._clock,
        )
        self.bound = AdaptiveBound(sections.sync, run.buffer, self.pace, run.ledger, log=self.log)

    def _wire_versions(self, run: OpenedRun, follower: Follower) -> None:
        sections, trainer_pool, log = self._sections, self._model_pool, self.log
        encoder = VersionEncoder(
            run.role.broadcast,
            run.publisher.coder,
            codec=sections.network.codec,
            pool=self.threads.pool("coder"),
            perform=self._act,
            spawn=self.spawn,
            clock=self._clock,
            ledger=run.ledger,
        )
        self._versions = PublishedVersions(
            run.role,
            run.trainer,
            run.publisher,
            encoder,
            self._commits,
            pace=self.pace,
            ledger=run.ledger,
            progress=run.progress,
            trainer_pool=trainer_pool,
            report=self.report,
            wake=self.wake,
            clock=self._clock,
        )
        self._is_put_off = False
        """Whether the publication of a due version was postponed."""
        self._weights_check = WeightsCheck(
            sections.model, sections.run_dir, run.progress, trainer=trainer_pool, log=log
        )
        self._failed_steps = FailedSteps(
            run.role, run.trainer, run.buffer, run.ledger, self._versions, self._weights_check,
            trainer_pool=trainer_pool, log=log,
        )  # fmt: skip
        self._saver = StateSaver(
            run.checkpoints, run.trainer, run.ledger, run.role, self._weights_check, run.disk_limit,
            run_dir=sections.run_dir, trainer_pool=trainer_pool, disk=self._disk_pool, log=log,
        )  # fmt: skip
        self._rollback = Rollback(
            sections.alerts, run.checkpoints, run.ledger, self._weights_check, log=log
        )
        self._evaluations: Evaluations | None = None
        if run.evaluator is not None:
            schedule = EvaluationSchedule(
                interval_steps=sections.evaluation.interval_steps, max_steps=sections.run.max_steps
            )
            self._evaluations = Evaluations(
                run.evaluator, schedule, run.progress, follower, run.samples,
                task_kind=sections.task_kind,
                pool=self.threads.pool("evaluation"), spawn=self.spawn,
                scored=self._saver.score if sections.keeps_best else None,
                should_stop=lambda: self.is_stopping or self.has_ended, log=log,
            )  # fmt: skip

    def _wire_reports(self, run: OpenedRun, follower: Follower) -> None:
        sections, log = self._sections, self.log
        self.costs = CostControl(
            run.role,
            learner_per_h=sections.learner.price_per_h or 0.0,
            learner_per_gb=sections.network.price_per_gb,
            trains_on_all=sections.batch.keep_zero_variance,
            budget_per_run=sections.activation.budget_per_run,
            settings=run.activation, pace=self.pace, progress=run.progress,
            ledger=run.ledger, now=self.now, log=log,
        )  # fmt: skip
        self._stalls = Stalls(
            run.role, self._delivered, run.progress, is_recomputing=run.is_recomputing,
            num_enough=lambda: self.costs.num_enough, write=follower.write_metrics, log=log,
            now=self.now,
        )  # fmt: skip
        self._reporter = Reporter(
            follower, run.role, self.transport, run=sections.run, progress=run.progress,
            pace=self.pace, bound=self.bound, costs=self.costs, rewards=run.rewards,
            price_per_h=sections.learner.price_per_h, time_of_day=run.ledger.now,
            stalls=self._stalls, log=log,
        )  # fmt: skip
        self._alerts = Alerts(
            sections.alerts, run.role, run.progress, self.costs, self._stalls,
            run_dir=sections.run_dir, pool=self.threads.pool("alerts"), clock=self._clock,
            time_of_day=run.ledger.now, log=log,
        )  # fmt: skip
        self._operations = Operations(
            run.role, progress=run.progress, bound=self.bound, costs=self.costs, ledger=run.ledger,
            report=self.report, stop=self.interrupt, clock=self._clock, log=log,
        )  # fmt: skip
        self._shutdown = RunShutdown(
            run.role, self.transport, report=self.report, wait_until=self.wait_until,
            clock=self._clock,
        )  # fmt: skip

    def release(self) -> None:
        """End the threads that encode versions. Release the ledger if an error left it open."""
        self._coder.close()
        self.ledger.release()

    # --- actions ---------------------------------------------------------------------------------

    def perform(self, actions: Iterable[Action]) -> None:
        """Carry out actions in order.

        If some of the actions append records, messages wait until the records are committed.
        """
        batch = list(actions)
        if self._delivered.is_open and any(isinstance(each, AppendRecord) for each in batch):
            super().perform(e for e in batch if isinstance(e, AppendRecord | StoreGroup))
            self._commits.hold([e for e in batch if not isinstance(e, AppendRecord | StoreGroup)])
        else:
            super().perform(batch)

    def _finish_turn(self) -> None:
        super()._finish_turn()
        self._commits.want()

    def on_guest(self, peer: str, user: str) -> None:
        """Admit a viewer if the number of viewers is below its limit."""
        self.perform(self.role.guest_connected(peer, user, now=self.now))

    def on_action(self, action: Action) -> None:
        """Carry out an action of the role.

        After the run's end, no group is stored or recorded.
        """
        match action:
            case StoreGroup() if self._delivered.is_open:
                self._delivered.accept(action)
            case AppendRecord() if self._delivered.is_open:
                self.ledger.append(action.record)
                self._delivered.note(action)
                if action.worker_id and self._weights_check.suspect(action.record):
                    self.wake()
            case MakeStatus():
                self.report(StatusMade(self._reporter.status(now=self.now).to_json()))
            case Operate():
                self._operations.carry_out(action)
            case StoreGroup() | AppendRecord():
                pass  # too late: the group is not acknowledged, or has no end to be recorded
            case _:
                raise LocalProtocolError(f"a learner cannot {type(action).__name__}")

    def wake(self) -> None:
        """Make the training loop check for a full batch."""
        self._waiting.wake()

    # --- the run ---------------------------------------------------------------------------------

    async def work(self) -> None:
        """Train until the last step, save, announce the end to every node, and stop."""
        self.spawn(self._delivered.run(), name="store")
        self.spawn(self._commits.run(), name="records")
        if self._prompts is not None:
            self.spawn(self._make_prompts(self._prompts), name="prompts")
        if self._reporter.is_watching:
            self.spawn(self._reporter.run(), name="display")
            self.spawn(self._reporter.keep_saved(self._disk_pool), name="status")
        self.spawn(self._watch_costs(), name="activation")
        self.spawn(self._stalls.watch(), name="stalls")
        self.spawn(self._alerts.watch(), name="alerts")
        self.spawn(self._alerts.send(), name="sending alerts")
        if len(self.role.lineages) > 1:  # the run was resumed
            self._shutdown.expect_former_nodes()
        try:
            try:
                await self._train()
            except (TransportError, StepError) as error:
                await self._roll_back(error)
                await self._save()  # what was trained before is sound
                raise
            if self.is_stopping:
                await self._save()
                return
            if self._failure is None:
                await self._finish()
            if self._failure is not None:
                await self._roll_back(self._failure)
                await self._give_up(self._failure)
        finally:
            self._is_work_over.set()

    async def _make_prompts(self, prompts: PromptsAhead) -> None:
        """Make prompts until cancelled. If a group waited for its prompt, grant leases."""
        pool = self.threads.pool("prompts")
        while True:
            if await prompts.make(pool):
                self.report(GrantsDue())

    async def _watch_costs(self) -> None:
        costs, pool = self.costs, self.threads.pool("activation")
        has_published = self._versions.has_published
        while True:
            if costs.is_idle:
                with suppress(TimeoutError):
                    async with asyncio.timeout(METER_S):
                        await has_published.wait()
            has_published.clear()
            await asyncio.sleep(POLL_S)
            now = self.now
            if actions := costs.measure(now=now):
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
            waited_from = self.progress.running(self.now)
            groups = await self._next_batch()
            if groups is None:
                return
            started_at = self.now
            waited_s = self.progress.running(started_at) - waited_from
            self.progress.begin("training", now=self.now)
            try:
                result = await self._model_pool.run(self._train_on, groups)
            except StepError as error:
                self._alerts.step_failed(error)
                await self._failed_steps.end_faulty(groups, error)
                # Groups may be granted in place of those that have ended.
                self.report(GrantsDue())
                continue
            self._failed_steps.succeeded()
            for notice in result.notices:
                self.log.warning("%s", notice)
            trained_s = self.costs.train_s = self.now - started_at
            staleness = await self._model_pool.run(
                partial(
                    self.ledger.trained,
                    groups,
                    lineage=role.lineages[-1].lineage,
                    consumed_at=role.step,
                )
            )
            samples = self.progress.workers.trained(groups, result.by_group, step=role.step)
            self.report(SamplesTrained(samples))
            self.report(StepTaken(role.step + 1))
            self._evict()
            is_lower = self.bound.adapt(role.step, result.metrics, staleness)
            if is_lower or self.pace.is_due(role.step):
                self._is_put_off = True
            # If no version may be sampled any more, publish at once: no groups would arrive
            # meanwhile.
            if self._is_put_off and (self.pace.is_overdue(role.step) or self._versions.prepare()):
                await self._publish()
            role.counters.add("tokens/trained", sum(staleness.values()))
            self.progress.stepped(
                groups, waited_s=waited_s, trained_s=trained_s, staleness=staleness
            )
            row = self._reporter.write_step(result.metrics | result.speed, staleness, now=self.now)
            if self._samples is not None:
                self._samples.trained(role.step, groups)
            self._failure = self._alerts.stepped(row)
            # A notice may mean that memory ran short, and the next step could run out of memory.
            is_due = result.notices or self._saver.is_due(now=self.now)
            if is_due and self._failure is None:
                await self._checkpoint()

    async def _next_batch(self) -> list[Group] | None:
        """Wait for a full batch of groups within the staleness bound, and return it.

        The result is None if training ends: after a stop, a failure, a spent budget, or too many
        groups without a training signal.
        """
        self.progress.begin("", now=self.now)
        self._waiting.begin(now=self.now)
        waits_from = self.now
        while not self.is_stopping:
            if self.costs.is_spent:
                self.log.warning("%s", self.costs.describe_spent(self.role.step))
                return None
            self._evict()
            if self._is_put_off and self._versions.prepare():
                await self._publish()
                self.progress.begin("", now=self.now)
            num_groups = self._sections.batch.groups_per_step
            groups = self._buffer.take(num_groups, step=self.role.step)
            if groups is not None:
                # The buffer has space again.
                self.report(BatchTaken(waited_s=self.now - waits_from))
                return groups
            self._failure = await self._find_failure()
            if self._failure is not None:
                return None
            if self._delivered.is_zero_signal:
                self.log.warning("%s", self.progress.describe_zero_signal(self.role.step))
                return None
            if await self._waiting.wait() and not self.is_stopping:
                await self._check_wait()
        return None

    async def _find_failure(self) -> EchoError | None:
        if self.role.prompt_fault is not None:
            return self.role.prompt_fault
        newest = self._versions.newest
        if self._weights_check.is_due and newest is not None:
            found = await self._weights_check.examine(newest)
            if found:
                return EngineError(found)
        if self._delivered.is_zero_signal:
            failing = self.progress.describe_failing(self.role.step)
            return None if failing is None else RewardError(failing)
        return None

    def _evict(self) -> None:
        if self._delivered.evict():
            # Grant others in their place now, without waiting for the next heartbeat.
            self.report(GrantsDue())

    async def _check_wait(self) -> None:
        """Grant leases to workers. If the newest version is outdated, publish first."""
        self.report(ReviewDue())
        wait_reason = self._waiting.check(now=self.now)
        if wait_reason == "outdated" and not self._versions.is_current:
            await self._publish()
            self.progress.begin("", now=self.now)
        if wait_reason == "no_weights":
            stats = [member.stats for member in self.role.roster.members("worker")]
            if any(each.refused.get("engine/installs_failed") for each in stats):
                self._weights_check.is_due = True
        self.report(GrantsDue())

    async def _publish(self) -> None:
        self._is_put_off = False
        publication = await self._versions.publish()
        if self._evaluations is None or not self._evaluations.published(publication):
            return
        # The initial weights are those of the model, and need no checkpoint.
        if self._sections.keeps_best and self.role.step:
            self._saver.expect_score(self.role.step)
            await self._checkpoint()

    async def _checkpoint(self) -> None:
        """Write a checkpoint if weights are unsaved. NaN in the weights ends the run."""
        if self._saver.has_to_save:
            self.progress.begin("saving a checkpoint", now=self.now)
            self._failure = await self._saver.save(now=self.now) or self._failure

    # --- the end ---------------------------------------------------------------------------------

    async def _finish(self) -> None:
        self.report(GrantsStopped())
        if not self._versions.is_current:
            # The last weights are evaluated and exported even if no worker will use them.
            await self._publish()
        last = self._versions.newest
        assert last is not None, "training begins with a version"
        if self._evaluations is not None:
            self.progress.begin("evaluating", now=self.now)
            await self._evaluations.finish(last)
        await self._take_no_more_groups()
        self._delivered.end_buffered("run_finished")
        await self._checkpoint()
        if self._failure is not None:
            return
        self.progress.begin("exporting", now=self.now)
        await self._disk_pool.run(self._export, self._sections.run_dir / "final", last)
        # The last picture shows who took part, so it is drawn before they leave.
        self.progress.begin("done", now=self.now)
        self._reporter.display(now=self.now)
        await self._shutdown.announce("the run is finished")
        await self._versions.wait()
        is_finished = self.role.step >= self._sections.run.max_steps
        if is_finished:
            self.ledger.append(Finished(step=self.role.step))
        await self._disk_pool.run(self.ledger.close)
        await self._alerts.flush()
        await self._reporter.save(self._disk_pool, state="finished" if is_finished else "stopped")
        self.stop("finished")

    async def _save(self) -> None:
        """Save an unfinished run. --resume then continues from the present step."""
        await self._close_records()
        self.log.info(
            "stopped at step %d; --resume continues from step %d%s",
            self.role.step, self._saver.saved_step,
            ", workers wait for it" if self.role.roster.members("worker") else "",
        )  # fmt: skip

    async def _roll_back(self, error: EchoError) -> None:
        """Roll the run back if `error` requires it.

        Raises:
            RolledBackError: if the run is rolled back. The other nodes wait until the learner has
                resumed, so the end is not announced to them.
        """
        if self._weights_check.has_failed:
            self._alerts.nonfinite(str(error))
        find = partial(self._rollback.find, error, step=self.role.step)
        record = await self._disk_pool.run(find)
        if record is None:
            return
        await self._take_no_more_groups()
        await self._versions.wait()
        await self._alerts.flush()
        raise await self._disk_pool.run(self._rollback.apply, record)

    async def _give_up(self, failure: EchoError) -> None:
        await self._close_records()
        self._reporter.display(now=self.now)
        await self._shutdown.announce("the run cannot go on, see the learner's log")
        self.stop("failed", failure)

    async def _close_records(self) -> None:
        await self._take_no_more_groups()
        await self._checkpoint()
        await self._versions.wait()  # publication may still record a version's seal
        await self._disk_pool.run(self.ledger.close)
        await self._alerts.flush()
        await self._reporter.save(self._disk_pool, state="stopped")

    async def _take_no_more_groups(self) -> None:
        """Stop granting and accepting groups. Return when all written groups are on the disk."""
        self.report(GrantsStopped())
        await self._delivered.close()
        await self._commits.commit()

    async def drain(self) -> None:
        """Stop granting groups. Return when the running step has ended and the run is saved."""
        self.is_stopping = True
        self.report(GrantsStopped())
        self.wake()
        await self._is_work_over.wait()
