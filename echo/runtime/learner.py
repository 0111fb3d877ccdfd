"""The learner role: take a batch, train, journal, publish; everything else happens beside it.

    groups --> session --> journal (disk) --> buffer --> step --> journal --> publish --> broadcast
                              |                                      |
                              +--> acknowledgement                   +--> evaluation, checkpoint

The training loop awaits three things only: a full batch of admissible groups, its own model work,
and (every so often) a checkpoint. It never waits for the network otherwise: versions are handed to
the broadcast and pulled by whoever needs them. While it waits for a batch it looks every heartbeat
whether one can come at all (`waiting.py`); without workers the run is saved and ends after a while.

Order of events around a step, which recovery relies on: groups are journalled and synced before
they are acknowledged; the record of a step is written before its weights are published; and
everything written is synced before a checkpoint becomes visible.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from echo.core.buffer import StalenessBuffer
from echo.core.errors import LocalProtocolError, StorageError, TransportError
from echo.core.metrics import Snapshot
from echo.core.rollout import Group, PolicyVersion
from echo.engine.weights import Weights
from echo.leases.scheduler import RecordCancel, RecordEnd, RecordGrant, RecordRefusal, StoreGroup
from echo.net.transport import Transport
from echo.protocol.learner_session import LearnerSession
from echo.records.ledger import Ledger
from echo.runtime.activation import Activating
from echo.runtime.adaptation import Adaptation
from echo.runtime.arrivals import Arrivals
from echo.runtime.checkpoint import Checkpoints
from echo.runtime.evaluation import Evaluations
from echo.runtime.farewell import Farewell
from echo.runtime.journal import record
from echo.runtime.learner_plan import LearnerPlan
from echo.runtime.node import Node
from echo.runtime.parcels import Coder, Parcels
from echo.runtime.progress import Progress
from echo.runtime.publication import Publication
from echo.runtime.reporting import Reporting
from echo.runtime.threads import Threads
from echo.runtime.waiting import Waiting
from echo.tasks.rewards import RewardError
from echo.train.trainer import StepError, StepResult, Trainer
from echo.weights.manifest import Manifest
from echo.weights.schedule import PublishPace
from echo.wire.actions import Action

MAX_FAILED_STEPS = 5
"""Batches in a row of which no step could be made, after which the run ends with the cause."""


class LearnerNode(Node):
    """The learner."""

    def __init__(
        self,
        session: LearnerSession,
        transport: Transport,
        *,
        plan: LearnerPlan,
        buffer: StalenessBuffer,
        trainer: Trainer,
        train: Callable[[Sequence[Group]], StepResult],
        ledger: Ledger,
        checkpoints: Checkpoints,
        pace: PublishPace,
        adaptation: Adaptation,
        activating: Activating,
        waiting: Waiting,
        progress: Progress,
        evaluations: Evaluations | None,
        publish: Callable[[Weights, PolicyVersion], Publication],
        coder: Coder,
        tensors_of: Callable[[Manifest, bytearray], Weights],
        export: Callable[[Path, Weights], None],
        write_metrics: Callable[[int, Mapping[str, float | Mapping[str, float]]], None],
        show: Callable[[Snapshot], None],
        threads: Threads | None = None,
        log: logging.Logger,
    ) -> None:
        """Join the parts; `run` starts them.

        Args:
            session: the learner's conversation, holding buffer, leases and broadcast.
            transport: its links.
            plan: numbers.
            buffer: the session's, of groups accepted and not yet trained.
            trainer: model and optimizer, at the session's step.
            train: makes one of its steps; called in the trainer's thread.
            ledger: the journal, open.
            checkpoints: when and where to save.
            pace: when to publish.
            adaptation: of the bound on staleness.
            activating: what the workers cost, and which of them are needed.
            waiting: looks after the learner while it waits for groups.
            progress: running totals for metrics and display.
            evaluations: held-out evaluation; None for none.
            publish: (weights, version) -> signed publication; called in the trainer's thread.
            coder: makes deltas and anchors of published versions.
            tensors_of: (manifest, image) -> tensors, zero-copy, for the evaluation.
            export: writes a Hugging Face directory.
            write_metrics: appends one row of metrics.
            show: draws a snapshot.
            threads: see `Node`.
            log: where to tell what happens.
        """
        super().__init__(session, transport, threads=threads, log=log)
        self.session: LearnerSession = session
        self._plan = plan
        self._buffer = buffer
        self._trainer = trainer
        self._train_on = train
        self._ledger = ledger
        self._checkpoints = checkpoints
        self._pace = pace
        self._adaptation = adaptation
        self._activating = activating
        self._waiting = waiting
        self._progress = progress
        self._evaluations = evaluations
        self._publish_version = publish
        self._coder = coder
        self._parcels = Parcels(
            session.broadcast,
            coder,
            codec=plan.codec,
            perform=self.perform,
            spawn=partial(self.spawn, name="parcels"),
            pool=self.threads.pool("coder"),
            now=lambda: self.now,
        )
        self._tensors_of = tensors_of
        self._export = export
        self._write_metrics = write_metrics
        self._reporting = Reporting(
            session,
            progress=progress,
            pace=pace,
            activating=activating,
            plan=plan,
            write_metrics=write_metrics,
            show=show,
            clock=lambda: self.now,
        )
        self._model_pool = self.threads.pool("trainer")
        self._disk_pool = self.threads.pool("disk")
        self._eval_pool = self.threads.pool("evaluation")
        self.arrivals = Arrivals(
            session,
            ledger=ledger,
            buffer=buffer,
            progress=progress,
            refusal=trainer.refusal,
            max_barren_groups=plan.max_barren_groups,
            perform=self.perform,
            sync=lambda: self._disk_pool.run(ledger.sync),
            clock=lambda: self.now,
        )
        self._store_task: asyncio.Task[None] | None = None
        self._published_step = -1
        self._num_failed_steps = 0
        self._farewell = Farewell(self, session, clock=lambda: self.now)
        self._is_stopping = False
        self._failure: RewardError | None = None
        """Why the run cannot go on, where it cannot."""
        self._is_work_over = asyncio.Event()

    def release(self) -> None:
        """Let go of the journal; where the end was not a clean one it is still open."""
        self._coder.close()
        self._ledger.release()

    # --- actions ---------------------------------------------------------------------------------

    def disconnected(self, peer: str, reason: str) -> list[Action]:
        """Handle that a link is gone."""
        return self.session.disconnected(peer, now=self.now)

    def on_action(self, action: Action) -> None:
        """Carry out what concerns the learner."""
        match action:
            case StoreGroup() if self.arrivals.is_open:
                self.arrivals.take_in(action)
            case RecordGrant() | RecordCancel() | RecordRefusal() | RecordEnd() if (
                self.arrivals.is_open
            ):
                record(self._ledger, action, step=self.session.step)
                if isinstance(action, RecordEnd) and action.worker_id:
                    self.arrivals.on_failed(action)
            case StoreGroup() | RecordGrant() | RecordCancel() | RecordRefusal() | RecordEnd():
                # Too late: it is not acknowledged, or was never accepted, so it needs no end.
                pass
            case _:
                raise LocalProtocolError(f"a learner cannot {type(action).__name__}")

    async def _take_no_more_groups(self) -> None:
        """Wait until everything that was written is on the disk and in the buffer."""
        self.arrivals.close()
        assert self._store_task is not None
        await self._store_task

    # --- the training loop -----------------------------------------------------------------------

    async def work(self) -> None:
        """Train until the last step, then tell everybody and end."""
        self._store_task = self.spawn(self.arrivals.run(), name="store")
        self.spawn(self._reporting.show_loop(), name="display")
        watch = self._activating.run(
            self.perform,
            lambda: self.now,
            wake=self.arrivals.wake,
            pool=self.threads.pool("activation"),
        )
        self.spawn(watch, name="activation")
        if len(self.session.lineages) > 1:  # a run that goes on
            self._farewell.expect()
        try:
            try:
                await self._train()
            except (TransportError, StepError):  # what was trained before is sound
                await self._save()
                raise
            if self._is_stopping:
                await self._save()
            elif self._failure is not None:
                await self._give_up(self._failure)
            else:
                await self._finish()
                self.stop("finished")
        finally:
            self._is_work_over.set()

    async def _train(self) -> None:
        plan, session = self._plan, self.session
        await self._publish()
        while session.step < plan.max_steps and not self._is_stopping:
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
            trained_s = self._activating.train_s = self.now - started_at
            staleness = self._ledger.trained(
                groups, lineage=session.lineages[-1].lineage, consumed_at=session.step
            )
            self.perform(session.advance(session.step + 1, now=self.now))
            self._discard_unusable()
            is_lower = self._adaptation.after_step(session.step, result.metrics, staleness)
            if is_lower or self._pace.is_due(session.step):
                await self._publish()
            waited_s = started_at - waited_from
            self._progress.stepped(
                groups, waited_s=waited_s, trained_s=trained_s, staleness=staleness
            )
            others = self.arrivals.metrics(), self._adaptation.metrics()
            self._reporting.write_step(result.metrics, staleness, *others)
            if self._checkpoints.is_due(session.step, now=self.now):
                await self._checkpoint()

    async def _set_aside(self, groups: list[Group], error: StepError) -> None:
        """End the groups that made a step fail, or all of its batch; the others go back.

        Raises:
            StepError: if step after step fails, so that they can hardly be to blame.
        """
        step, counters = self.session.step, self.session.counters
        self._num_failed_steps += 1
        counters.add(f"steps_failed/{error.reason}")
        faulty = await self._model_pool.run(self._trainer.find_faulty, groups)
        # None of them alone: then it is all of them together.
        faulty = faulty or {group.group_id: error.reason for group in groups}
        for group_id, reason in faulty.items():
            self._ledger.discarded(group_id, reason, step=step)
            counters.add(f"discarded/{reason}")
        names = ", ".join(
            f"{group.group_id} of {group.worker_id}" for group in groups if group.group_id in faulty
        )
        text = f"step {step + 1} failed: {error}; ended without training: group {names}"
        self.log.warning("%s", text, exc_info=error.__cause__)
        if self._num_failed_steps >= MAX_FAILED_STEPS:
            raise StepError(
                f"{self._num_failed_steps} steps in a row failed, the last because {error}; the "
                "groups have ended, the run is saved, and --resume goes on with others",
                reason=error.reason,
            ) from error
        rest = [group for group in groups if group.group_id not in faulty]
        self._buffer.put_back(rest, num_taken=len(groups))
        # Others may be granted in place of those that have ended.
        self.perform(self.session.grant(now=self.now))

    async def _next_batch(self) -> list[Group] | None:
        """Wait for a full batch of groups within the bound; None if the training is over."""
        self._progress.begin("", now=self.now)
        self._waiting.begin(now=self.now)
        while not self._is_stopping:
            if self._activating.is_spent:
                self.log.warning("%s", self._activating.describe_spent(self.session.step))
                return None
            self._discard_unusable()
            num_groups = self._plan.groups_per_step
            groups = self._buffer.take(num_groups, step=self.session.step)
            if groups is not None:
                # There is room in the buffer again.
                self.perform(self.session.grant(now=self.now))
                return groups
            if self.arrivals.is_barren:
                failing = self._progress.describe_failing(self.session.step)
                if failing is None:
                    self.log.warning("%s", self._progress.describe_barren(self.session.step))
                else:
                    self._failure = RewardError(failing)
                return None
            await self.arrivals.wait(until=self._waiting.look_at)
            if self.now >= self._waiting.look_at and not self._is_stopping:
                await self._look()
        return None

    async def _look(self) -> None:
        """Ask again what nothing else may ask: who can be given a group, and from which version."""
        self.arrivals.review()
        obstacle = self._waiting.look(now=self.now)
        if obstacle == "outdated" and self._published_step != self.session.step:
            await self._publish()
            self._progress.begin("", now=self.now)
        self.perform(self.session.grant(now=self.now))

    def _discard_unusable(self) -> None:
        evicted = self._buffer.evict(step=self.session.step)
        for each in evicted:
            self._ledger.discarded(each.group.group_id, each.reason, step=self.session.step)
            self.session.counters.add(f"discarded/{each.reason}")
        if evicted:
            # Others may be granted in their place, now and not at the next heartbeat.
            self.perform(self.session.grant(now=self.now))

    async def _publish(self) -> None:
        """Hand the present weights to the broadcast, and to the evaluation when it is due."""
        session = self.session
        self._progress.begin("publishing", now=self.now)
        version = PolicyVersion(session.lineages[-1].lineage, session.step)
        publication = await self._model_pool.run(
            lambda: self._publish_version(self._trainer.tensors(), version)
        )
        manifest, root = publication.manifest, publication.signed.root
        self._ledger.published(version, root=root, image_hash=manifest.image_hash)
        self._pace.published(version, num_bytes=manifest.num_bytes, now=self.now)
        self._published_step = session.step
        self.perform(session.make_way(now=self.now))
        await self._parcels.publish(publication)
        if self._evaluations is not None and await self._evaluations.is_due(version):
            tensors = self._tensors_of(manifest, publication.image)
            task = self.spawn(self._evaluate(version, tensors), name="evaluation")
            self._evaluations.started(task)

    async def _evaluate(self, version: PolicyVersion, tensors: Weights) -> None:
        assert self._evaluations is not None
        evaluate = self._evaluations.evaluate
        result = await self._eval_pool.run(
            lambda: evaluate(
                version, tensors, should_stop=lambda: self._is_stopping or self.has_ended
            ),
        )
        if result is None:
            return
        if result.has_figure:
            self._progress.evaluated(
                version.step, result.sampled, result.greedy, num_errors=result.num_reward_errors
            )
        row = {**result.metrics(self._plan.task_name), "lineage": version.lineage}
        self._write_metrics(version.step, row)
        level = logging.WARNING if result.num_reward_errors else logging.INFO
        self.log.log(level, "%s", result)

    async def _evaluate_present(self) -> None:
        """Evaluate the present weights, as where a run ends before its last step."""
        version = PolicyVersion(self.session.lineages[-1].lineage, self.session.step)
        publication = await self._model_pool.run(
            lambda: self._publish_version(self._trainer.tensors(), version)
        )
        await self._evaluate(version, self._tensors_of(publication.manifest, publication.image))

    # --- checkpoints and the end -----------------------------------------------------------------

    async def _checkpoint(self) -> None:
        """Save the whole state; a full disk is reported and survived."""
        session, checkpoints = self.session, self._checkpoints
        lineage, step, now = session.lineages[-1].lineage, session.step, self.now
        if checkpoints.saved_step == step:
            return
        self._progress.begin("saving a checkpoint", now=self.now)

        def write_state(directory: Path) -> None:
            self._ledger.sync()
            self._trainer.save_state(directory)

        try:
            oldest_step = await self._model_pool.run(
                lambda: checkpoints.save(
                    lineage=lineage, step=step, write_state=write_state, now=now
                ),
            )
        except StorageError as error:
            session.counters.add("checkpoints_failed")
            self.log.warning("%s; the checkpoint before stays the newest", error)
            return
        self._ledger.checkpointed(lineage=lineage, step=step, oldest_step=oldest_step)
        self.log.info("checkpoint of step %d saved", step)

    async def _finish(self) -> None:
        """Evaluate, give every remaining group its end, save, export, tell every node."""
        self.session.is_granting = False
        if self._published_step != self.session.step:
            # The last weights are evaluated and exported even if no worker will use them.
            await self._publish()
        if self._evaluations is not None:
            self._progress.begin("evaluating", now=self.now)
            await self._evaluations.wait()
            if self._evaluations.evaluated_step != self.session.step:
                await self._evaluate_present()
        await self._take_no_more_groups()
        for group in self._buffer.clear():
            self._ledger.discarded(group.group_id, "run_finished", step=self.session.step)
        await self._checkpoint()
        tensors = await self._model_pool.run(self._trainer.snapshot)
        final = self._plan.run_dir / "final"
        self._progress.begin("exporting", now=self.now)
        await self._disk_pool.run(self._export, final, tensors)
        await self._disk_pool.run(self._ledger.close)
        # The last picture shows who took part, so it is drawn before they leave.
        self._progress.begin("done", now=self.now)
        self._reporting.display()
        await self._farewell.say("the run is finished")

    async def _save(self) -> None:
        """Save where the run does not end for good, so that --resume goes on from here."""
        await self._close_records()
        self.log.info(
            "stopped at step %d; --resume continues from step %d%s",
            self.session.step, self._checkpoints.saved_step or 0,
            ", workers wait for it" if self.session.roster.members("worker") else "",
        )  # fmt: skip

    async def _give_up(self, failure: RewardError) -> None:
        """Save, so that --resume goes on once the task is mended, tell every node, and fail."""
        self.session.is_granting = False
        await self._close_records()
        self._reporting.display()
        await self._farewell.say("groups cannot be finished, see the learner's log")
        self.stop("failed", failure)

    async def _close_records(self) -> None:
        await self._take_no_more_groups()
        await self._checkpoint()
        await self._disk_pool.run(self._ledger.close)

    async def drain(self) -> None:
        """Let the running step come to its end and the state be saved."""
        self._is_stopping = True
        self.session.is_granting = False
        self.arrivals.wake()
        await self._is_work_over.wait()
