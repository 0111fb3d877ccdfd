"""Simulates the learner: the real learner's node, without a disk and with a simulated trainer."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from echo.config.fleet_schema import LEARNER_REGION
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
from echo.core.monitoring.samples import TextSample
from echo.core.monitoring.status import RunStatus
from echo.core.rollout import Lineage
from echo.fleet.job import Job
from echo.leases.book import LeaseBook
from echo.leases.run import LeaseSettings, RunState
from echo.roles.joining import AdmissionSettings
from echo.roles.learner import Learner, LearnerSettings
from echo.runtime.identity import Identity
from echo.runtime.learner.costs.activation import ActivationSettings
from echo.runtime.learner.follower import Row
from echo.runtime.learner.node import LearnerNode, OpenedRun, RunSections
from echo.sim.lengths import Groups
from echo.sim.scenario import Scenario
from echo.sim.summary import BillRecord, History, StepRecord
from echo.sim.timing import (
    RUN_DIR,
    LearnerThreads,
    MemoryLedger,
    NoCheckpoints,
    TimedProgress,
    TimedTrainer,
)
from echo.sim.transport import SimTransport
from echo.sim.versions import CHUNK_BYTES, Versions
from echo.weights.broadcast import Broadcast
from echo.weights.topology.sites import ASSUMED_BYTES_PER_S, Site
from echo.wire.messages import LEARNER_ID, Lease
from echo.wire.seals import SealKeys

if TYPE_CHECKING:
    from echo.runtime.learner.versions.publish import Publication


RUN_ID = "simulation"
LEARNER_ADDRESS = "tcp://learner:7700"
GIVE_UP_S, GIVE_UP_STEPS = 3600.0, 30
"""A run ends if no step was trained for GIVE_UP_STEPS step times and for GIVE_UP_S seconds."""
LINEAGES = (Lineage(1, 0),)
UNBOUNDED = 1 << 30
"""A staleness bound that is too large to delay any lease."""

_log = logging.getLogger("echo.sim")


class SimLearner(LearnerNode):
    """The real learner's node, which records its steps in the history of the simulation."""

    is_watching = False
    notices = ()

    def __init__(
        self,
        scenario: Scenario,
        groups: Groups,
        history: History,
        transport: SimTransport,
        *,
        identity: Identity,
        versions: Versions,
        broadcast: Broadcast,
        end: Callable[[str], None],
    ) -> None:
        """Start to run the scenario. The learner sends its messages over `transport`.

        `end` is called when the run ends. The argument of `end` is the reason, or "" after the last
        step.
        """
        self.link, self._num_broadcasts = transport, 0
        self._scenario, self._groups, self._history, self._end_run = scenario, groups, history, end
        sections = make_sections(scenario, scale=versions.scale)
        now = asyncio.get_running_loop().time()
        self._memory = MemoryLedger(groups, history)
        buffer = make_buffer(scenario)
        role = make_role(
            scenario, identity=identity, broadcast=broadcast, buffer=buffer, scale=versions.scale,
            now=now,
        )  # fmt: skip
        trainer: Any = TimedTrainer(scenario, groups)
        self.trainer: TimedTrainer = trainer
        publisher: Any = versions
        opened = OpenedRun(
            ledger=self._memory,
            checkpoints=NoCheckpoints(now=now),
            activation=_activation_settings(scenario, scale=versions.scale),
            progress=TimedProgress(self.trainer, now=now),
            trainer=trainer,
            attribution=None,
            publisher=publisher,
            buffer=buffer,
            role=role,
            rewards=None,
            evaluator=None,
            export=self.export,
        )
        threads = LearnerThreads(scenario, self.trainer)
        super().__init__(opened, transport, sections, self, threads=threads, log=_log)

    def waiting(self) -> dict[int, float]:
        """Return the number of tokens of each group that is accepted but not yet trained on.

        Keys are group ids.
        """
        return {i: self._groups.length(i).num_tokens for i in self._memory.waiting}

    def write_metrics(self, step: int, row: Row) -> None:
        """Record a step, and the explanations of waits.

        If activation is on, record the costs as well.
        """
        figures: Mapping[str, Any] = row
        history, trainer = self._history, self.trainer
        if "explain" in row:
            history.explained.append((step, figures["explain"]))
        if "time/step" not in row:
            return
        if self.pace.num_broadcasts > self._num_broadcasts:
            self._num_broadcasts = self.pace.num_broadcasts
            history.broadcasts.append(figures["broadcast/seconds"])
        history.stepped(
            StepRecord(
                step=step,
                time_s=trainer.stepped_at,
                waited_s=figures["time/wait_for_batch"],
                trained_s=figures["time/train"],
                staleness=trainer.staleness,
                publish_period=figures["publish_period"],
                broadcast_s=figures.get("broadcast/seconds"),
            )
        )
        if self._scenario.activation is not None and "cost/total" in figures:
            history.bills.append(
                BillRecord(
                    time_s=trainer.stepped_at,
                    per_h=figures["cost/per_hour"],
                    standby_per_h=figures["cost/standby_per_hour"],
                    total=figures["cost/total"],
                    num_active=figures["workers/active"],
                    num_standby=figures["workers/standby"],
                )
            )
        if step >= self._scenario.settings.num_steps:
            self._end_run("")

    def write_samples(self, step: int, samples: Sequence[TextSample]) -> None:
        """Do nothing with the samples, because a simulated rollout has no text."""

    def show(self, status: RunStatus) -> None:
        """Do nothing with the status, because a simulation has no terminal."""

    def save(self, status: RunStatus) -> None:
        """Do nothing with the status, because a simulation has no disk."""

    def export(self, directory: Path, publication: Publication) -> None:
        """Record that the run ends before its last step, because its budget is spent.

        After the last step, this call has no effect.
        """
        self._end_run("the budget of the run is spent")


def make_sections(scenario: Scenario, *, scale: float) -> RunSections:
    """Return the configuration sections that the learner's node reads.

    Args:
        scenario: the simulated scenario.
        scale: number of real bytes per byte of a simulated version; prices of traffic are
            multiplied by this number.
    """
    job, settings = scenario.job, scenario.settings
    return RunSections(
        run=RunSection(max_steps=settings.num_steps),
        run_dir=RUN_DIR,
        model=ModelSection(name="simulated"),
        task_kind="addition",
        sync=SyncSection(
            max_staleness=job.max_staleness,
            publish_period="auto" if scenario.is_auto_period else job.publish_period,
        ),
        batch=make_batch(job),
        learner=LearnerSection(price_per_h=job.learner_price_per_h),
        network=NetworkSection(
            heartbeat_s=settings.heartbeat_s,
            dead_after_s=settings.dead_after_s,
            lease_timeout_s=settings.lease_timeout_s,
            reconnect_for_s=settings.reconnect_for_s,
            price_per_gb=_egress_per_gb(scenario) * scale,
            codec="full",
        ),
        evaluation=EvalSection(),
        keeps_best=False,
        activation=scenario.activation or ActivationSection(),
        alerts=AlertsSection(stall_s=None),
    )


def make_batch(job: Job) -> BatchSection:
    """Return the configuration section that states the size of a batch."""
    return BatchSection(group_size=job.group_size, groups_per_step=job.groups_per_step)


def make_buffer(scenario: Scenario) -> StalenessBuffer:
    """Return an empty buffer in which the learner keeps accepted groups."""
    job = scenario.job
    buffer = StalenessBuffer(max_staleness=job.max_staleness, lineages=LINEAGES)
    if not scenario.settings.is_paced:
        # Without pacing, leases are granted without a bound on staleness. The buffer still
        # enforces `max_staleness`.
        buffer.admission_staleness = UNBOUNDED
    return buffer


def make_role(
    scenario: Scenario,
    *,
    identity: Identity,
    broadcast: Broadcast,
    buffer: StalenessBuffer,
    scale: float,
    now: float,
) -> Learner:
    """Return the role that the learner has in the scenario."""
    job, settings = scenario.job, scenario.settings
    return Learner(
        LearnerSettings(
            admission=AdmissionSettings(
                run_id=identity.run_id,
                key=identity.key,
                seal_keys=SealKeys(b"learner"),
                settings={},
                assets={},
                digests={},
                heartbeat_s=settings.heartbeat_s,
                dead_after_s=settings.dead_after_s,
            ),
            leases=LeaseSettings(
                max_staleness=job.max_staleness if settings.is_paced else UNBOUNDED,
                groups_per_step=job.groups_per_step,
                group_size=job.group_size,
                max_completion_tokens=max(1, round(job.max_completion_tokens)),
                vocab_size=1,
                heartbeat_s=settings.heartbeat_s,
                max_zero_signal_groups=job.groups_per_step
                * make_batch(job).max_zero_signal_batches,
                is_eager=settings.is_eager or not settings.is_paced,
            ),
            site=Site(
                LEARNER_ID,
                "learner",
                LEARNER_ADDRESS,
                uplink_bytes_per_s=ASSUMED_BYTES_PER_S / scale,
                region=LEARNER_REGION,
                price_per_gb=_egress_per_gb(scenario) * scale,
            ),
            chunk_bytes=CHUNK_BYTES,
        ),
        RunState(leases=LeaseBook(timeout_s=settings.lease_timeout_s), lineages=LINEAGES),
        broadcast=broadcast,
        buffer=buffer,
        prompts=NoPrompts(),
    )


def _activation_settings(scenario: Scenario, *, scale: float) -> ActivationSettings | None:
    rule, job = scenario.activation, scenario.job
    if rule is None:
        return None
    return ActivationSettings(
        groups_per_step=job.groups_per_step,
        group_size=job.group_size,
        max_completion_tokens=max(1, round(job.max_completion_tokens)),
        margin=rule.margin,
        min_dwell_s=scenario.min_dwell_s,
        budget_per_h=math.inf if rule.budget_per_h is None else rule.budget_per_h,
        upload_bytes_per_token=job.upload_bytes_per_token / scale,
    )


def _egress_per_gb(scenario: Scenario) -> float:
    fleet = scenario.fleet
    regions = {o.region for o, count in zip(fleet.offers, scenario.counts, strict=True) if count}
    prices = [fleet.regions[name].price_per_gb for name in sorted(regions)]
    return fmean(prices) if prices else 0.0


class NoPrompts:
    """Takes the place of the prompt source. In a simulation, all prompts are equal."""

    def lease(self, group_id: int, attempt: int) -> Lease:
        return Lease(group_id=group_id, attempt=attempt, seed=group_id, prompt_ids=(0,), example={})
