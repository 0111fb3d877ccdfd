"""Models the time that the engine, the trainer and the disk take.

In a simulation, the models replace engine, trainer and disk. An engine samples `tokens_per_s`
completion tokens per second, which its groups share equally. A single sequence is at most
`alone_speedup` times as fast as in a full engine. So a group takes at least the time of its longest
completion at this speed. New weights are installed while groups run, and sample the later tokens. A
paused engine samples no tokens.

The learner's node is the real node (`runtime/learner/node.py`). Its trainer only takes time, its
ledger is in memory, and it saves no checkpoints.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from echo.core.errors import LocalProtocolError
from echo.core.records import Discarded
from echo.core.rollout import Group, PolicyVersion
from echo.records.ledger import Accepted, AnyRecord, LedgerQueue, Place, Trained
from echo.runtime.learner.report import Progress
from echo.runtime.learner.saving.checkpoint import Checkpoints
from echo.runtime.learner.versions.publish import PublishedVersions
from echo.sim.clock import InlineThreads
from echo.sim.lengths import GroupLength, Groups
from echo.sim.scenario import Scenario
from echo.sim.summary import History
from echo.train.step import StepResult
from echo.wire.messages import Lease

# --- engine ---------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class Running:
    """A group that an engine is sampling."""

    lease: Lease
    length: GroupLength
    least_s: float
    """The fewest seconds in which the group can be sampled. In this time, its longest completion is
    sampled if it is alone in the engine."""
    num_tokens: float = 0.0
    """Number of the group's tokens that have been sampled up to now."""
    segments: list[tuple[PolicyVersion, float]] = field(default_factory=list)
    """For each version, oldest first: (version, number of the group's tokens when this version was
    installed)."""

    def shares(self) -> list[tuple[PolicyVersion, float]]:
        """Return (version, number of tokens) for each version that sampled tokens of the group."""
        ends = [start for _, start in self.segments[1:]] + [float(self.length.num_tokens)]
        return [
            (version, end - start)
            for (version, start), end in zip(self.segments, ends, strict=True)
            if end > start
        ]


class EngineModel:
    """A model of a worker's engine. It computes when each group will be complete."""

    def __init__(
        self, *, tokens_per_s: float, concurrency: int, group_size: int, alone_speedup: float
    ) -> None:
        """Start with an engine that has no groups and no weights.

        Args:
            tokens_per_s: completion tokens per second of a full engine.
            concurrency: number of rollouts that are sampled at the same time.
            group_size: number of rollouts of a group.
            alone_speedup: ratio of a sequence's speed alone to its speed in a full engine.
        """
        self.tokens_per_s = tokens_per_s
        self.groups_per_batch = max(1, concurrency // group_size)
        self._concurrency = concurrency
        self._alone_speedup = alone_speedup
        self.groups: list[Running] = []
        self.version: PolicyVersion | None = None
        self.tokens_made = 0.0
        self.is_paused = False
        self._at = 0.0

    def begin(self, lease: Lease, length: GroupLength, *, now: float) -> None:
        """Start to sample a group of this length with the installed version."""
        assert self.version is not None
        self.advance(now)
        pace = self.tokens_per_s / self._concurrency * self._alone_speedup
        running = Running(lease, length, length.longest / pace)
        running.segments.append((self.version, 0.0))
        self.groups.append(running)

    def install(self, version: PolicyVersion, *, now: float) -> None:
        """Install a version, which samples all further tokens."""
        self.advance(now)
        self.version = version
        for group in self.groups:
            group.segments.append((version, group.num_tokens))

    def pause(self, is_paused: bool, *, now: float) -> None:
        """If `is_paused`, pause the engine. Otherwise resume it."""
        self.advance(now)
        self.is_paused = is_paused

    def set_rate(self, tokens_per_s: float, *, now: float) -> None:
        """Set the number of completion tokens that the engine samples per second."""
        self.advance(now)
        for group in self.groups:
            group.least_s *= self.tokens_per_s / tokens_per_s
        self.tokens_per_s = tokens_per_s

    def advance(self, now: float) -> None:
        """Add the tokens that the engine has sampled between the last call and `now`."""
        elapsed_s, self._at = now - self._at, now
        if self.is_paused or elapsed_s <= 0:
            return
        for group in self.groups:
            made = min(self._rate(group) * elapsed_s, group.length.num_tokens - group.num_tokens)
            group.num_tokens += made
            self.tokens_made += made

    def stop(self, lease: Lease, *, now: float) -> float:
        """Remove an incomplete group. Return how many of its tokens were sampled."""
        self.advance(now)
        [stopped] = [group for group in self.groups if group.lease is lease]
        self.groups.remove(stopped)
        return stopped.num_tokens

    def finished(self, *, now: float) -> list[Running]:
        """Remove and return the groups that are complete."""
        self.advance(now)
        # A group with a tenth of a token left is complete, which saves an event.
        done = [g for g in self.groups if g.num_tokens >= g.length.num_tokens - 0.1]
        self.groups = [group for group in self.groups if group not in done]
        return done

    @property
    def next_at(self) -> float:
        """Time at which the next group will be complete, if nothing changes before then.

        The time is infinite while the engine is paused or has no groups.
        """
        if self.is_paused:
            return math.inf
        return self._at + min(
            ((g.length.num_tokens - g.num_tokens) / self._rate(g) for g in self.groups),
            default=math.inf,
        )

    def _rate(self, group: Running) -> float:
        return min(self.tokens_per_s / len(self.groups), group.length.num_tokens / group.least_s)


# --- trainer --------------------------------------------------------------------------------------


class TimedTrainer:
    """Takes the place of the trainer. Its steps take time and do nothing else."""

    def __init__(self, scenario: Scenario, groups: Groups) -> None:
        self._scenario = scenario
        self._groups = groups
        self.step_count = 0
        self.staleness: dict[int, float] = {}
        """For each staleness, the number of tokens on which the last step trained."""
        self.stepped_at = 0.0
        self.mean_length = 0.0
        """Mean number of tokens in a completion of the last step."""

    def step_s(self) -> float:
        """Return how many seconds the next step takes, drawn with the scenario's spread."""
        scenario, number = self._scenario, self.step_count
        chance = random.Random(f"{scenario.settings.seed}/step/{number}")
        return scenario.job.train_s * max(0.1, chance.gauss(1.0, scenario.settings.train_spread))

    def refusal(self, group: Group) -> str | None:
        """If a group has no training signal, return "zero_variance". Otherwise return None."""
        return None if self._groups.length(group.group_id).is_useful else "zero_variance"

    def step(self, groups: Sequence[Group]) -> StepResult:
        """Count a step. Store how stale its groups are and how long their completions are."""
        self.staleness = {}
        for group in groups:
            for version, tokens in self._groups.shares(group):
                lag = self.step_count - version.step
                self.staleness[lag] = self.staleness.get(lag, 0.0) + tokens
        self.step_count += 1
        self.stepped_at = asyncio.get_running_loop().time()
        num_completions = sum(len(group.rollouts) for group in groups)
        tokens = sum(self._groups.length(group.group_id).num_tokens for group in groups)
        self.mean_length = tokens / num_completions
        return StepResult(metrics={})

    def find_faulty(self, groups: Sequence[Group]) -> dict[int, str]:
        return {}

    def tensors(self) -> dict[str, Any]:
        """Return no tensors, because the bytes of a simulated version are noise."""
        return {}

    snapshot = tensors

    def save_state(self, directory: Path) -> None:
        """Save nothing, because the trainer has no state."""


class TimedProgress(Progress):
    """The learner's progress. The mean length of completions comes from the simulation."""

    def __init__(self, trainer: TimedTrainer, *, now: float) -> None:
        super().__init__(staleness_tokens={}, now=now)
        self._trainer = trainer

    def step_metrics(
        self,
        metrics: Mapping[str, float],
        staleness: Mapping[int, int],
        *,
        step: int,
        bytes_sent: int,
        now: float,
    ) -> dict[str, float | Mapping[str, float]]:
        """Return the row of metrics of a step.

        It includes the mean length, which activation reads.
        """
        row = super().step_metrics(metrics, staleness, step=step, bytes_sent=bytes_sent, now=now)
        row["completions/mean_length"] = self._trainer.mean_length
        return row


# --- disk -----------------------------------------------------------------------------------------


RUN_DIR = Path("simulation")


class MemoryLedger(LedgerQueue):
    """Takes the place of the ledger. It keeps only the ids of groups that wait for training."""

    def __init__(self, groups: Groups, history: History) -> None:
        super().__init__(RUN_DIR, spool_bytes=float("inf"))
        self._groups = groups
        self._history = history
        self.waiting: set[int] = set()
        """Ids of accepted groups that have been neither trained on nor discarded."""

    def now(self) -> float:
        """Return the time that records get: the virtual seconds since the start."""
        return asyncio.get_running_loop().time()

    def records(self) -> Iterator[AnyRecord]:
        """Yield no records, because a simulated run is never resumed."""
        return iter(())

    def _write_queue(self, *, durably: bool) -> None:
        queue, self._queue = self._queue, []
        self.num_records += len(queue)
        for record, _ in queue:
            match record:
                case Accepted():
                    self.waiting.add(record.group)
                case Trained():
                    for group_id in record.groups:
                        self._forget(group_id)
                case Discarded():
                    self._history.recorded(record, self._groups)
                    self._forget(record.group)
                case _:
                    self._history.recorded(record, self._groups)

    def _forget(self, group_id: int) -> None:
        self.waiting.discard(group_id)
        self._groups.forget(group_id)

    def checkpointed(self, *, lineage: int, step: int, oldest_step: int) -> None:
        """Do nothing, because no records are stored."""

    def load(self, group_id: int, place: Place) -> Group:
        """Raise LocalProtocolError, because a simulated run is never resumed."""
        raise LocalProtocolError(f"group {group_id} is not kept")

    def hold(self, group_id: int, place: Place, *, step: int) -> None:
        """Do nothing, because no files are stored."""

    def free_unused(self, *, step: int) -> None:
        """Do nothing, because no files are stored."""

    def delete_again(self, paths: Iterable[str]) -> None:
        """Do nothing, because no files are stored."""

    def close(self) -> None:
        self.sync()

    def release(self) -> None:
        """Drop the records that are still queued."""
        self._queue = []


class NoCheckpoints(Checkpoints):
    """Takes the place of the learner's checkpoints. No checkpoint is ever due or written."""

    def __init__(self, *, now: float) -> None:
        super().__init__(
            RUN_DIR,
            run_id="",
            interval_steps=1,
            interval_s=None,
            keep_last=1,
            min_free_bytes=0,
            now=now,
        )

    def is_due(self, step: int, *, now: float) -> bool:
        return False

    def save(
        self, save_state: Callable[[Path], None], *, lineage: int, step: int, now: float
    ) -> int:
        """Write nothing. Return `step`, as if this were the only checkpoint."""
        self.saved_step = step
        return step


SYNC_S = 0.01
"""Seconds until an accepted group is on the learner's disk."""


class LearnerThreads(InlineThreads):
    """Takes the place of the learner's threads. Some calls take simulated time.

    Only calls that make a step, make a version or sync the ledger take time.
    """

    def __init__(self, scenario: Scenario, trainer: TimedTrainer) -> None:
        super().__init__()
        self._settings = scenario.settings
        self._trainer = trainer

    def takes(self, pool: str, function: Callable[..., Any]) -> float:
        """Return how many simulated seconds a call of `function` takes in this pool."""
        what = getattr(function, "__func__", None)
        if what is TimedTrainer.step:
            return self._trainer.step_s()
        if what is PublishedVersions.make_version:
            return self._settings.publish_s
        return SYNC_S if what is MemoryLedger.sync else 0.0
