"""The simulated learner: the real session and buffer, a journal and a step that only take time.

It does what `runtime/learner/node.py` does, in the same order: take a full batch of admissible
groups, step, advance, drop what is too old, publish, look again. Groups without a gradient end at
once and others are granted; all others are stored, acknowledged, and then visible to the training.
What it has written down (`journal.py`) survives it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from echo.core.buffer import StalenessBuffer
from echo.core.errors import LocalProtocolError
from echo.core.rollout import Group, PolicyVersion
from echo.leases.scheduler import RecordCancel, RecordEnd, RecordGrant, RecordRefusal, StoreGroup
from echo.roles.learner import Learner
from echo.sim.activating import Activating
from echo.sim.clock import Clock
from echo.sim.groups import Groups
from echo.sim.host import Host
from echo.sim.journal import Journal
from echo.sim.network import Network, Port
from echo.sim.records import History, StepRecord
from echo.sim.versions import Versions
from echo.weights.schedule import PublishPace
from echo.wire.actions import Action

LOOK_S = 0.1
"""Between looks at who holds the newest version, as in `runtime/learner/node.py`."""
GIVE_UP_STEPS = 30
"""A run in which nothing was trained for the time of so many steps has no future."""
NODES_PER_LOOK_S = 1000.0
"""Larger fleets are looked at less often, so that looking costs no more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerTimes:
    """How long the learner takes for what is not simulated."""

    train_s: float
    train_spread: float
    recorded: Sequence[float]
    """Seconds of each step, from the first on; empty for `train_s`."""
    publish_s: float
    journal_s: float
    seed: int
    give_up_after_s: float

    def draw(self, step: int) -> float:
        """Return the seconds of the step that follows `step`."""
        if self.recorded:
            return self.recorded[step % len(self.recorded)]
        chance = random.Random(f"{self.seed}/step/{step}")
        return self.train_s * max(0.1, chance.gauss(1.0, self.train_spread))


class SimLearner(Host):
    """The learner."""

    def __init__(
        self,
        session: Learner,
        port: Port,
        *,
        clock: Clock,
        network: Network,
        buffer: StalenessBuffer,
        groups: Groups,
        pace: PublishPace,
        times: LearnerTimes,
        num_steps: int,
        journal: Journal,
        versions: Versions,
        version_bytes: float,
        activating: Activating | None,
        history: History,
    ) -> None:
        """Put the learner on the network; `start` begins.

        Args:
            session: its conversation.
            port: its access to the network.
            clock: the time.
            network: the links.
            buffer: the session's, of groups accepted and not yet trained.
            groups: what every group consists of.
            pace: when to publish.
            times: how long it takes for what.
            num_steps: after which the run ends.
            journal: the run's.
            versions: what it publishes.
            version_bytes: true bytes of each version.
            activating: watches costs and workers; None for nobody.
            history: takes down what happens.
        """
        super().__init__(session, port, clock=clock, network=network)
        self.session: Learner = session
        self._buffer = buffer
        self._groups = groups
        self._pace = pace
        self._times = times
        self._num_steps = num_steps
        self._journal = journal
        self._versions = versions
        self._version_bytes = version_bytes
        self.activating = activating
        self._history = history
        self._unsynced: list[Group] = []
        self._is_waiting = False
        self._waiting_since = 0.0
        self._train_s: float | None = None

    def start(self) -> None:
        """Publish the first weights and wait for a batch."""
        self._publish()
        self._look_at_arrivals()
        if self.activating is not None:
            self._look_at_costs(self.activating)
        self._wait()

    # --- what the shell asks ---------------------------------------------------------------------

    def disconnected(self, peer: str, reason: str) -> list[Action]:
        """Handle that a link is gone."""
        return self.session.disconnected(peer, now=self.clock.now)

    def on_action(self, action: Action) -> None:
        """Carry out what concerns the learner."""
        match action:
            case RecordGrant():
                self._journal.granted(action.lease.group_id, action.lease.attempt)
            case StoreGroup():
                self._take_in(action.group)
            case RecordCancel() | RecordRefusal():
                pass  # the session counts them
            case RecordEnd():
                self._journal.ended(action.group_id)
                self._groups.forget(action.group_id)
            case _:
                raise LocalProtocolError(f"a learner cannot {type(action).__name__}")

    # --- groups ----------------------------------------------------------------------------------

    def _take_in(self, group: Group) -> None:
        """Store a group that counts towards a step; end one that does not."""
        is_useful = self._groups.length(group.group_id).is_useful
        if self.activating is not None:
            self.activating.arrived(is_useful=is_useful)
        if is_useful:
            if not self._unsynced:
                self.clock.after(self._times.journal_s, self._stored)
            self._unsynced.append(group)
            return
        self._lose(group, "zero_variance")
        self.perform(self.session.stored(group.group_id, now=self.clock.now))

    def _stored(self) -> None:
        """Acknowledge what is now on the disk, many at once."""
        if not self.is_alive:
            return
        groups, self._unsynced = self._unsynced, []
        for group in groups:
            self._journal.accepted(group)
            self._buffer.put(group)
            self.perform(self.session.stored(group.group_id, now=self.clock.now))
        self._train_if_ready()

    def _lose(self, group: Group, reason: str) -> None:
        """Note the end of a group that is not trained."""
        self._journal.ended(group.group_id)
        tokens = self._groups.length(group.group_id).num_tokens
        self._history.lost(reason, tokens)
        self.session.counters.add(f"discarded/{reason}")
        self._groups.forget(group.group_id)

    def waiting(self) -> dict[int, float]:
        """Return the groups that wait to be trained, and how many tokens they have."""
        groups = [*self._buffer, *self._unsynced]
        return {g.group_id: self._groups.length(g.group_id).num_tokens for g in groups}

    # --- the training loop -----------------------------------------------------------------------

    def _wait(self) -> None:
        self._is_waiting, self._waiting_since = True, self.clock.now
        self._train_if_ready()

    def _discard_unusable(self) -> None:
        evicted = self._buffer.evict(step=self.session.step)
        for each in evicted:
            self._lose(each.group, each.reason)
        if evicted:
            self.perform(self.session.grant(now=self.clock.now))

    def _train_if_ready(self) -> None:
        """Begin a step if the batch is full."""
        size = self.session.settings.leases.groups_per_step
        if not self._is_waiting:
            return
        if self.activating is not None and self.activating.is_spent:
            self._end_run("the budget of the run is spent")
            return
        if len(self._buffer) < size:
            return
        self._discard_unusable()
        groups = self._buffer.take(size, step=self.session.step)
        if groups is None:
            return
        self._is_waiting = False
        self.perform(self.session.grant(now=self.clock.now))
        train_s = self._times.draw(self.session.step)
        self.clock.after(train_s, self._step, groups, self.clock.now)

    def _step(self, groups: list[Group], started_at: float) -> None:
        """Make a step: advance, discard, publish, and go on."""
        if not self.is_alive:
            return
        session, now = self.session, self.clock.now
        self._train_s = now - started_at
        consumed_at = session.step
        self.perform(session.advance(session.step + 1, now=now))
        self._discard_unusable()
        self._history.stepped(
            StepRecord(
                step=session.step,
                time_s=now,
                waited_s=started_at - self._waiting_since,
                trained_s=self._train_s,
                staleness=self._staleness(groups, consumed_at),
                publish_period=self._pace.period,
                broadcast_s=self._pace.broadcast_s,
            )
        )
        if self.activating is not None:
            completions = len(groups) * session.settings.leases.group_size
            tokens = sum(self._groups.length(group.group_id).num_tokens for group in groups)
            self.activating.stepped(
                step_s=now - self._waiting_since,
                waited_s=started_at - self._waiting_since,
                completion_tokens=tokens / completions,
                now=now,
            )
        for group in self._journal.trained(groups, step=session.step):
            self._groups.forget(group.group_id)
        if session.step >= self._num_steps:
            self.clock.stop()
        elif self._pace.is_due(session.step):
            self.clock.after(self._times.publish_s, self._publish_and_go_on)
        else:
            self._wait()

    def _staleness(self, groups: Sequence[Group], consumed_at: int) -> dict[int, float]:
        """Return the trained tokens by staleness."""
        found: dict[int, float] = {}
        for group in groups:
            for version, tokens in self._groups.shares(group):
                lag = consumed_at - version.step
                found[lag] = found.get(lag, 0.0) + tokens
        return found

    # --- versions --------------------------------------------------------------------------------

    def _publish_and_go_on(self) -> None:
        if self.is_alive:
            self._publish()
            self._wait()

    def _publish(self) -> None:
        """Hand the present version to the broadcast."""
        session, now = self.session, self.clock.now
        version = PolicyVersion(session.lineages[-1].lineage, session.step)
        self._pace.published(version, num_bytes=round(self._version_bytes), now=now)
        self.perform(session.make_way(now=now))
        self.perform(self._versions.publish(session.broadcast, version, now=now))

    # --- what is watched -------------------------------------------------------------------------

    def _look_at_costs(self, activating: Activating) -> None:
        """Measure what workers do and cost, and change who is active."""
        if not self.is_alive:
            return
        now = self.clock.now
        waiting_s = now - self._waiting_since if self._is_waiting else 0.0
        self.perform(activating.look(waiting_s=waiting_s, now=now))
        self._train_if_ready()
        self.clock.after(activating.look_s, self._look_at_costs, activating)

    def _end_run(self, reason: str) -> None:
        self._history.end = reason
        self.clock.stop()

    def _look_at_arrivals(self) -> None:
        """Time the broadcasts: look often when a version has reached every worker."""
        if not self.is_alive:
            return
        members = self.session.roster.active("worker")
        installed = [member.installed for member in members]
        before = self._pace.broadcast_s
        if self._pace.received(installed, now=self.clock.now, train_s=self._train_s):
            self._history.broadcast(self._pace.broadcast_s or before or 0.0)
        patience_s = max(self._times.give_up_after_s, GIVE_UP_STEPS * self._times.train_s)
        if self._is_waiting and self.clock.now > self._waiting_since + patience_s:
            self._end_run(f"no step within {patience_s:.0f} s")
        look_s = max(LOOK_S, len(members) / NODES_PER_LOOK_S)
        self.clock.after(look_s, self._look_at_arrivals)
