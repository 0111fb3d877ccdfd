"""Simulates a worker: its role is real, and its engine is simulated."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import numpy as np

from echo.core.errors import LocalProtocolError
from echo.core.rollout import PartialRollout, PolicyVersion
from echo.leases.worker.held import LeaseKey, key_of
from echo.roles.joining import Configure
from echo.roles.worker.departure import Drained, MachineReleased, Release
from echo.roles.worker.engine_facts import EngineFacts
from echo.roles.worker.installing import Install, VersionInstalled
from echo.roles.worker.outcomes import GroupScored
from echo.roles.worker.sampling import CallReturned, EngineCall, MembersGrown, Recall, Sample, Score
from echo.roles.worker.worker import EngineBuilt, Worker
from echo.runtime.node import DialingNode
from echo.sim.clock import InlineThreads
from echo.sim.lengths import Groups, Shares
from echo.sim.timing import EngineModel, Running
from echo.sim.transport import SimTransport
from echo.weights.receiver import VersionArrived, VersionAudited
from echo.wire.actions import Action

_log = logging.getLogger("echo.sim")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerTimes:
    """How long each kind of work takes at a worker, except sampling."""

    setup_s: float
    """Seconds until the task and the engine are built."""
    swap_s: float
    """Seconds until new weights are installed in the engine."""
    is_pausing: bool
    """Whether the engine pauses while new weights arrive."""


class SimWorker(DialingNode):
    """The process of a worker. Its role is real, but its actions only take simulated time."""

    def __init__(
        self,
        role: Worker,
        transport: SimTransport,
        *,
        engine: EngineModel,
        groups: Groups,
        facts: EngineFacts,
        times: WorkerTimes,
        on_end: Callable[[SimWorker], None],
    ) -> None:
        super().__init__(role, transport, threads=InlineThreads(), log=_log)
        self.role: Worker = role
        self.link = transport
        self.name = role.settings.node_id
        self.engine = engine
        self._groups = groups
        self._facts = facts
        self._times = times
        self._on_end = on_end
        self._calls: dict[LeaseKey, EngineCall] = {}
        self.is_released = False
        """Whether this worker has given its machine back."""
        self._num_installing = 0
        self._done_at = -1.0

    # --- calls of the shell ----------------------------------------------------------------------

    def perform(self, actions: Iterable[Action]) -> None:
        """Execute actions that the role has returned.

        If `WorkerTimes.is_pausing` is true, the engine pauses while the worker fetches or installs
        new weights.
        """
        super().perform(actions)
        if self._times.is_pausing:
            self._pause()

    def on_action(self, action: Action) -> None:
        """Execute one action of the role, in simulated time."""
        call_later = asyncio.get_running_loop().call_later
        match action:
            case Configure():
                call_later(self._times.setup_s, self._built)
            case Sample():
                self._begin(action.call)
            case Recall():
                self._give_back(action.call)
            case Score():
                self.report(GroupScored(action.group, self._rewards(action)))
            case Install():
                self._num_installing += 1
                call_later(self._times.swap_s, self._installed, action.version)
            case Release():
                self.is_released = True
                self.report(MachineReleased(is_confirmed=True))
            case Drained() | VersionArrived() | VersionAudited():
                pass
            case _:
                raise LocalProtocolError(f"a worker cannot {type(action).__name__}")

    def _rewards(self, score: Score) -> list[float]:
        """Return the rewards of a group.

        If the group has no training signal, all rewards are equal.
        """
        is_useful = self._groups.length(score.group.lease.group_id).is_useful
        return [float(is_useful), *[0.0] * (self._facts.group_size - 1)]

    def before_expire(self) -> None:
        """Bring the progress of the running groups up to date for the next heartbeat."""
        self.engine.advance(self.now)
        for running in self.engine.groups:
            for group in self._calls[key_of(running.lease)].groups:
                group.num_progress = int(running.num_tokens)

    def release(self) -> None:
        """End this process. The groups in its engine are lost."""
        super().release()
        self.engine.advance(self.now)
        self._on_end(self)

    # --- weights ---------------------------------------------------------------------------------

    def _built(self) -> None:
        if not self.has_ended:
            self.report(EngineBuilt(self._facts, {}))

    def _installed(self, version: PolicyVersion) -> None:
        self._num_installing -= 1
        if self.has_ended:
            return
        self.engine.install(version, now=self.now)
        self.before_expire()
        self.report(VersionInstalled(version))

    def _pause(self) -> None:
        is_fetching = self.role.broadcast.receiver.item is not None or self._num_installing > 0
        has_weights = self.engine.version is not None
        if has_weights and is_fetching != self.engine.is_paused:
            self.engine.pause(is_fetching, now=self.now)
            self._await_next()

    # --- sampling --------------------------------------------------------------------------------

    def tokens_in_flight(self, received: Collection[int]) -> float:
        """Return how many of this worker's tokens may still be trained on.

        Groups in `received` are not counted, because they have reached the learner.
        """
        self.engine.advance(self.now)
        running = sum(group.num_tokens for group in self.engine.groups)
        ids = {group_id for group_id, _ in self.role.outbox.keys} - set(received)
        return running + sum(self._groups.waiting(group_id) for group_id in sorted(ids))

    def set_rate(self, tokens_per_s: float) -> None:
        """Set how many completion tokens the engine samples per second.

        A low rate makes a straggler.
        """
        self.engine.set_rate(tokens_per_s, now=self.now)
        self._await_next()

    def _begin(self, call: EngineCall) -> None:
        for group in call.groups:
            self._calls[group.key] = call
            length = self._groups.length(group.lease.group_id)
            self.engine.begin(group.lease, length, now=self.now)
        self._await_next()

    def _give_back(self, call: EngineCall) -> None:
        """Stop an engine call, and drop the tokens that it has sampled.

        Another worker then samples the call's groups from the start.
        """
        num_tokens = 0.0
        for group in call.groups:
            del self._calls[group.key]
            num_tokens += self.engine.stop(group.lease, now=self.now)
        self.report(CallReturned(call, round(num_tokens)))
        self._await_next()

    def _await_next(self) -> None:
        at = self.engine.next_at
        if at != self._done_at and at < float("inf"):
            self._done_at = at
            asyncio.get_running_loop().call_at(at, self._wake, at)

    def _wake(self, at: float) -> None:
        if at != self._done_at or self.has_ended:
            return
        self._done_at = -1.0
        for running in self.engine.finished(now=self.now):
            self._sampled(running)
        self._await_next()

    def _sampled(self, running: Running) -> None:
        lease = running.lease
        call = self._calls.pop(key_of(lease))
        shares = running.shares()
        self._groups.sampled(lease, shares)
        longest, other = stand_in(shares, running.length.longest), stand_in(shares, 1)
        for group in call.groups:
            members = [longest, *[other] * (len(group.members) - 1)]
            self.report(MembersGrown(call, group, members))
        self.report(CallReturned(call, running.length.num_tokens))


def stand_in(shares: Shares, num_tokens: int) -> PartialRollout:
    """Return a rollout of `num_tokens` tokens, or of one for each version if that is more.

    The versions share the tokens in proportion to `shares`. The learner predicts the times of
    groups from their longest rollouts, so these have all of their tokens. To save time, the other
    rollouts have one for each version.
    """
    total = sum(share for _, share in shares)
    counts = [max(1, int(num_tokens * share / total)) for _, share in shares]
    counts[counts.index(max(counts))] += max(num_tokens, len(shares)) - sum(counts)
    steps = np.array([[version.lineage, version.step] for version, _ in shares], dtype=np.int32)
    count = sum(counts)
    return PartialRollout(
        token_ids=np.zeros(count, dtype=np.int32),
        sampler_logprobs=np.full(count, -0.5, dtype=np.float32),
        policy_versions=np.repeat(steps, counts, axis=0),
        completion_mask=np.ones(count, dtype=np.bool_),
        finish_reason="stop",
        num_segments=1,
    )
