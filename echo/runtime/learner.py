"""The learner role: take a batch, train, journal, publish; everything else happens beside it.

    groups --> session --> journal (disk) --> buffer --> step --> journal --> publish --> broadcast
                              |                                      |
                              +--> acknowledgement                   +--> evaluation, checkpoint

The training loop awaits three things only: a full batch of admissible groups, its own model work,
and (every so often) a checkpoint. It never waits for the network otherwise: versions are handed to
the broadcast and pulled by whoever needs them.

Order of events around a step, which recovery relies on: groups are journalled and synced before
they are acknowledged; the record of a step is written before its weights are published; and
everything written is synced before a checkpoint becomes visible.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from echo.buffer import StalenessBuffer
from echo.engine.trainer import Trainer
from echo.engine.weights import Weights
from echo.errors import LocalProtocolError, StorageError
from echo.metrics import Snapshot
from echo.protocol.actions import Action, RecordEnd, RecordGrant, StoreGroup
from echo.protocol.learner_session import LearnerSession
from echo.protocol.manifest import Manifest
from echo.rollout import Group, PolicyVersion
from echo.runtime.checkpoint import Checkpoints
from echo.runtime.evaluation import Evaluations
from echo.runtime.faults import Faults
from echo.runtime.ledger import Ledger
from echo.runtime.node import LINGER_S, Node
from echo.runtime.progress import Progress
from echo.runtime.publication import Publication, PublishPace
from echo.runtime.transport import Transport

ARRIVAL_LOOK_S = 0.1
"""Seconds between looks at who holds the newest version: how finely a broadcast is timed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerPlan:
    """The numbers that the training loop follows."""

    run_name: str
    run_dir: Path
    task_name: str
    max_steps: int
    groups_per_step: int
    refresh_s: float
    """Seconds between snapshots for the display."""


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
        ledger: Ledger,
        checkpoints: Checkpoints,
        pace: PublishPace,
        progress: Progress,
        evaluations: Evaluations | None,
        publish: Callable[[Weights, PolicyVersion], Publication],
        tensors_of: Callable[[Manifest, bytearray], Weights],
        export: Callable[[Path, Weights], None],
        write_metrics: Callable[[int, Mapping[str, float | Mapping[str, float]]], None],
        show: Callable[[Snapshot], None],
        faults: Faults,
        log: logging.Logger,
    ) -> None:
        """Join the parts; `run` starts them.

        Args:
            session: the learner's conversation, holding buffer, leases and broadcast.
            transport: its links.
            plan: numbers.
            buffer: the session's, of groups accepted and not yet trained.
            trainer: model and optimizer, at the session's step.
            ledger: the journal, open.
            checkpoints: when and where to save.
            pace: when to publish.
            progress: running totals for metrics and display.
            evaluations: held-out evaluation; None for none.
            publish: (weights, version) -> signed publication; called in the trainer's thread.
            tensors_of: (manifest, image) -> tensors, zero-copy, for the evaluation.
            export: writes a Hugging Face directory.
            write_metrics: appends one row of metrics.
            show: draws a snapshot.
            faults: where to die, in tests.
            log: where to tell what happens.
        """
        super().__init__(session, transport, log=log)
        self.session: LearnerSession = session
        self._plan = plan
        self._buffer = buffer
        self._trainer = trainer
        self._ledger = ledger
        self._checkpoints = checkpoints
        self._pace = pace
        self._progress = progress
        self._evaluations = evaluations
        self._publish_version = publish
        self._tensors_of = tensors_of
        self._export = export
        self._write_metrics = write_metrics
        self._show = show
        self._faults = faults
        self._model_thread = self.new_thread("trainer")
        self._disk_thread = self.new_thread("disk")
        self._eval_thread = self.new_thread("evaluation")
        self._groups_arrived = asyncio.Event()
        self._store_wanted = asyncio.Event()
        self._store_task: asyncio.Task[None] | None = None
        self._unsynced: list[Group] = []
        self._published_step = -1
        self._train_s: float | None = None
        self._is_stopping = False
        self._takes_groups = True
        self._is_work_over = asyncio.Event()

    def release(self) -> None:
        """Let go of the journal; where the end was not a clean one it is still open."""
        self._ledger.release()

    # --- actions ---------------------------------------------------------------------------------

    def disconnected(self, peer: str, reason: str) -> list[Action]:
        """Handle that a link is gone."""
        return self.session.disconnected(peer, now=self.now)

    def on_action(self, action: Action) -> None:
        """Carry out what concerns the learner."""
        match action:
            case RecordGrant():
                installed, lease = action.installed, action.lease
                version = None if installed is None else [installed.lineage, installed.step]
                self._ledger.append(
                    "granted",
                    group=lease.group_id,
                    attempt=lease.attempt,
                    worker=action.worker_id,
                    version=version,
                )
            case StoreGroup() | RecordEnd() if not self._takes_groups:
                # Too late: it is not acknowledged, or was never accepted, so it needs no end.
                pass
            case StoreGroup():
                self._ledger.store(action.group, action.header, action.arrays)
                self._unsynced.append(action.group)
                self._store_wanted.set()
            case RecordEnd():
                self._ledger.discarded(action.group_id, action.reason, step=self.session.step)
            case _:
                raise LocalProtocolError(f"a learner cannot {type(action).__name__}")

    async def _store_loop(self) -> None:
        """Force written groups onto the disk, many at once, then acknowledge them."""
        while self._takes_groups or self._unsynced:
            await self._store_wanted.wait()
            self._store_wanted.clear()
            groups, self._unsynced = self._unsynced, []
            if not groups:
                continue
            await self.in_thread(self._disk_thread, self._ledger.sync)
            for group in groups:
                self._faults.reach("stored", group.group_id)
                self._buffer.put(group)
                self._progress.accepted(group, now=self.now)
                self.perform(self.session.stored(group.group_id, now=self.now))
            self._groups_arrived.set()

    async def _take_no_more_groups(self) -> None:
        """End the store loop, once everything that was written is on the disk and in the buffer."""
        self._takes_groups = False
        self._store_wanted.set()
        assert self._store_task is not None
        await self._store_task

    # --- the training loop -----------------------------------------------------------------------

    async def work(self) -> None:
        """Train until the last step, then tell everybody and end."""
        self._store_task = self.spawn(self._store_loop(), name="store")
        self.spawn(self._show_loop(), name="display")
        self.spawn(self._watch_arrivals(), name="arrivals")
        try:
            await self._train()
            if self._is_stopping:
                await self._save()
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
            self._progress.is_training = True
            result = await self.in_thread(self._model_thread, partial(self._trainer.step, groups))
            trained_s = self._train_s = self.now - started_at
            self._faults.reach("stepped", session.step + 1)
            staleness = self._ledger.trained(
                groups, lineage=session.lineages[-1].lineage, consumed_at=session.step
            )
            self._faults.reach("trained", session.step + 1)
            self.perform(session.advance(session.step + 1, now=self.now))
            self._discard_unusable()
            if self._pace.is_due(session.step):
                await self._publish()
            waited_s = started_at - waited_from
            self._progress.stepped(waited_s=waited_s, trained_s=trained_s, staleness=staleness)
            self._write_step(result.metrics, staleness)
            if self._checkpoints.is_due(session.step, now=self.now):
                await self._checkpoint()

    async def _next_batch(self) -> list[Group] | None:
        """Wait for a full batch of groups within the bound; None when stopping."""
        self._progress.is_training = False
        while not self._is_stopping:
            self._groups_arrived.clear()
            self._discard_unusable()
            groups = self._buffer.take(self._plan.groups_per_step, step=self.session.step)
            if groups is not None:
                # There is room in the buffer again.
                self.perform(self.session.grant(now=self.now))
                return groups
            await self._groups_arrived.wait()
        return None

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
        version = PolicyVersion(session.lineages[-1].lineage, session.step)
        publication = await self.in_thread(
            self._model_thread, lambda: self._publish_version(self._trainer.snapshot(), version)
        )
        manifest, root = publication.manifest, publication.signed.root
        self._ledger.published(version, root=root, image_hash=manifest.image_hash)
        self._pace.published(version, num_bytes=manifest.num_bytes, now=self.now)
        self._published_step = session.step
        self.perform(
            session.broadcast.publish(publication.signed, manifest, publication.image, now=self.now)
        )
        self._faults.reach("published", session.step)
        if self._evaluations is not None and await self._evaluations.is_due(version):
            tensors = self._tensors_of(manifest, publication.image)
            task = self.spawn(self._evaluate(version, tensors), name="evaluation")
            self._evaluations.started(task)

    async def _evaluate(self, version: PolicyVersion, tensors: Weights) -> None:
        assert self._evaluations is not None
        evaluate = self._evaluations.evaluate
        result = await self.in_thread(
            self._eval_thread,
            lambda: evaluate(
                version, tensors, should_stop=lambda: self._is_stopping or self.has_ended
            ),
        )
        if result is None:
            return
        self._progress.evaluated(version.step, result.sampled, result.greedy)
        self._write_metrics(version.step, result.metrics(self._plan.task_name))
        text = "evaluation of %s: sampled %.3f, greedy %.3f"
        self.log.info(text, version, result.sampled, result.greedy)

    # --- checkpoints and the end -----------------------------------------------------------------

    async def _checkpoint(self) -> None:
        """Save the whole state; a full disk is reported and survived."""
        session, checkpoints = self.session, self._checkpoints
        lineage, step, now = session.lineages[-1].lineage, session.step, self.now
        if checkpoints.saved_step == step:
            return

        def write_state(directory: Path) -> None:
            self._ledger.sync()
            self._trainer.save_state(directory)
            self._faults.reach("checkpoint", step)

        try:
            oldest_step = await self.in_thread(
                self._model_thread,
                lambda: checkpoints.save(
                    lineage=lineage, step=step, write_state=write_state, now=now
                ),
            )
        except StorageError as error:
            session.counters.add("checkpoints_failed")
            self.log.warning("%s; the checkpoint before stays the newest", error)
            return
        self._ledger.checkpointed(lineage=lineage, step=step, oldest_step=oldest_step)
        self._faults.reach("checkpointed", step)
        self.log.info("checkpoint of step %d saved", step)

    async def _finish(self) -> None:
        """Evaluate, give every remaining group its end, save, export, tell every node."""
        self.session.is_granting = False
        if self._published_step != self.session.step:
            # The last weights are evaluated and exported even if no worker will use them.
            await self._publish()
        if self._evaluations is not None:
            await self._evaluations.wait()
        await self._take_no_more_groups()
        for group in self._buffer.clear():
            self._ledger.discarded(group.group_id, "run_finished", step=self.session.step)
        await self._checkpoint()
        tensors = await self.in_thread(self._model_thread, self._trainer.snapshot)
        final = self._plan.run_dir / "final"
        await self.in_thread(self._disk_thread, lambda: self._export(final, tensors))
        await self.in_thread(self._disk_thread, self._ledger.close)
        # The last picture shows who took part, so it is drawn before they leave.
        self._display()
        self.perform(self.session.finish("the run is finished"))
        # A moment for the nodes to hear it: each heartbeat is told again.
        grace_s = max(LINGER_S, 2 * self.session.settings.heartbeat_s)
        if not await self.wait_until(lambda: not self.session.roster.nodes, within_s=grace_s):
            self.perform(self.session.dismiss_all())

    async def _save(self) -> None:
        """Save after an interrupt, so that --resume goes on from here."""
        await self._take_no_more_groups()
        await self._checkpoint()
        await self.in_thread(self._disk_thread, self._ledger.close)
        self.log.info(
            "stopped at step %d; --resume continues from step %d, workers wait for it",
            self.session.step, self._checkpoints.saved_step or 0,
        )  # fmt: skip

    async def drain(self) -> None:
        """Let the running step come to its end and the state be saved."""
        self._is_stopping = True
        self.session.is_granting = False
        self._groups_arrived.set()
        await self._is_work_over.wait()

    # --- metrics and display ---------------------------------------------------------------------

    def _write_step(self, metrics: Mapping[str, float], staleness: Mapping[int, int]) -> None:
        """Append one row of metrics."""
        session = self.session
        row = self._progress.step_metrics(
            metrics, staleness, bytes_sent=session.broadcast.bytes_sent, now=self.now
        )
        row |= self._pace.metrics()
        row |= {f"count/{name}": value for name, value in session.counters.as_dict().items()}
        self._write_metrics(session.step, row)

    async def _watch_arrivals(self) -> None:
        """Time the broadcasts: look often when a version has reached every worker."""
        while True:
            await asyncio.sleep(ARRIVAL_LOOK_S)
            installed = [member.installed for member in self.session.roster.members("worker")]
            self._pace.received(installed, now=self.now, train_s=self._train_s)

    async def _show_loop(self) -> None:
        while self.session.finish_reason is None:
            self._display()
            await asyncio.sleep(self._plan.refresh_s)

    def _display(self) -> None:
        self._show(
            self._progress.snapshot(
                self.session,
                run_name=self._plan.run_name,
                max_steps=self._plan.max_steps,
                pace=self._pace,
                now=self.now,
            )
        )
