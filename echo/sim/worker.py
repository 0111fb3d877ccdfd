"""A simulated worker: the real session, and an engine that takes time instead of thinking."""

from __future__ import annotations

from collections.abc import Callable, Collection

import numpy as np

from echo.core.errors import LocalProtocolError
from echo.core.rollout import Group, PolicyVersion, Rollout
from echo.net.transport import Frame
from echo.roles.joining import Configure
from echo.roles.worker import LeaseCancelled, LeasesChanged, Worker
from echo.sim.clock import Clock
from echo.sim.engine import EngineModel, Running
from echo.sim.groups import Groups
from echo.sim.host import Host
from echo.sim.network import LinkEnd, Network, Port
from echo.weights.receiver import VersionArrived
from echo.wire.actions import Action
from echo.wire.messages import Goodbye, Lease

RETRY_S = 5.0
"""Between looks at whether a worker that is to leave has nothing in hand any more."""


class SimWorker(Host):
    """One start of one worker."""

    def __init__(
        self,
        session: Worker,
        port: Port,
        *,
        clock: Clock,
        network: Network,
        engine: EngineModel,
        groups: Groups,
        group_size: int,
        max_groups: int,
        setup_s: float,
        swap_s: float,
        is_pausing: bool,
        interrupted_for_s: float | None,
        on_end: Callable[[SimWorker], None],
    ) -> None:
        """Put a worker on the network; `start` begins.

        Args:
            session: its conversation.
            port: its access to the network.
            clock: the time.
            network: the links.
            engine: how long sampling takes.
            groups: what every group consists of.
            group_size: rollouts of a group.
            max_groups: groups that it may hold, running and waiting.
            setup_s: until task and engine are built.
            swap_s: until new weights are in the engine.
            is_pausing: whether it makes nothing while new weights arrive.
            interrupted_for_s: on standby after which it gives its machine back; None for never.
            on_end: called once the process is over.
        """
        super().__init__(session, port, clock=clock, network=network)
        self.session = session
        self.engine = engine
        self._groups = groups
        self._group_size = group_size
        self._max_groups = max_groups
        self._setup_s = setup_s
        self._swap_s = swap_s
        self._is_pausing = is_pausing
        self._interrupted_for_s = interrupted_for_s
        self.is_released = False
        """Whether it has given its machine back."""
        self._on_end = on_end
        self._is_installing = False
        self._done_at = -1.0

    def start(self) -> None:
        """Begin to look for the learner."""
        self.perform(self.session.start(now=self.clock.now))

    # --- what the shell asks ---------------------------------------------------------------------

    def connected(self, peer: str) -> list[Action]:
        """Handle that a dialled link stands."""
        return self.session.connected(peer, now=self.clock.now)

    def disconnected(self, peer: str, reason: str) -> list[Action]:
        """Handle that a link is gone."""
        return self.session.disconnected(peer, reason, now=self.clock.now)

    def dialled(self, address: str, purpose: str, peer: str) -> None:
        """Handle that a Dial was carried out."""
        self.session.dialled(address, purpose, peer)

    def on_action(self, action: Action) -> None:
        """Carry out what concerns a worker."""
        match action:
            case Configure():
                self.clock.after(self._setup_s, self._configured)
            case LeasesChanged():
                self._await_retirement()
                self._sample_more()
            case VersionArrived():
                self._install_newest()
            case LeaseCancelled():
                pass  # it is sampled to its end, and the session does not deliver it
            case _:
                raise LocalProtocolError(f"a worker cannot {type(action).__name__}")

    def on_message(self, end: LinkEnd, frames: list[Frame]) -> None:
        """Handle a message; a pausing worker pauses when it begins to fetch new weights."""
        super().on_message(end, frames)
        if self._is_pausing and self.is_alive:
            self._pause()

    def before_expire(self) -> None:
        """Note the progress of what is running, for the heartbeat."""
        self.engine.advance(self.clock.now)
        for group in self.engine.groups:
            self.session.progress(group.lease, int(group.num_tokens))

    def ended(self) -> None:
        """Tell that the process is over; what its engine held is lost."""
        self.engine.advance(self.clock.now)
        self._on_end(self)

    # --- leaving ---------------------------------------------------------------------------------

    def _await_retirement(self) -> None:
        """Look again when it will have been on standby for long enough to leave."""
        since = self.session.standby_since
        if since is not None and self._interrupted_for_s is not None:
            self.clock.at(since + self._interrupted_for_s, self._retire, since)

    def _retire(self, since: float) -> None:
        """Give the machine back, as `runtime/worker/release.py` does, once nothing is in hand."""
        if not self.is_alive or self.session.is_leaving or self.session.standby_since != since:
            return
        if self.engine.groups or len(self.session.outbox) or not self.session.is_admitted:
            self.clock.after(RETRY_S, self._retire, since)
            return
        self.session.is_leaving = self.is_released = True
        self.perform(self.session.to_learner(Goodbye(reason="on standby", is_released=True)))
        self.end(is_silent=False, is_orderly=True)

    # --- weights ---------------------------------------------------------------------------------

    def _configured(self) -> None:
        if self.is_alive:
            self.session.num_places = self.engine.groups_per_batch
            self.session.max_groups = self._max_groups
            self.perform(self.session.configured({}, now=self.clock.now))

    def _install_newest(self) -> None:
        version, installed = self.session.broadcast.newest_complete, self.session.installed_version
        if version is None or self._is_installing or (installed and version <= installed):
            return
        self._is_installing = True
        self.clock.after(self._swap_s, self._installed, version)

    def _installed(self, version: PolicyVersion) -> None:
        self._is_installing = False
        if not self.is_alive:
            return
        session, now = self.session, self.clock.now
        self.engine.install(version, now=now)
        session.installed_version = version
        self.before_expire()
        self.perform(session.heartbeat(now=now) if session.is_admitted else [])
        self._install_newest()
        if self._is_pausing:
            self._pause()
        self._sample_more()

    def _pause(self) -> None:
        is_fetching = self.session.broadcast.fetching is not None or self._is_installing
        has_weights = self.engine.version is not None
        if has_weights and is_fetching != self.engine.is_paused:
            self.engine.pause(is_fetching, now=self.clock.now)
            self._await_next()

    # --- sampling --------------------------------------------------------------------------------

    def tokens_in_flight(self, received: Collection[int]) -> float:
        """Return the tokens here that the learner may still want.

        Args:
            received: groups that it has, whether or not its acknowledgement has come.
        """
        running = sum(group.num_tokens for group in self.engine.groups)
        ids = {group_id for group_id, _ in self.session.outbox.keys} - set(received)
        return running + sum(self._groups.waiting(group_id) for group_id in sorted(ids))

    def set_rate(self, tokens_per_s: float) -> None:
        """Become a straggler, or cease to be one."""
        self.engine.set_rate(tokens_per_s, now=self.clock.now)
        self._await_next()

    def _sample_more(self) -> None:
        """Give the engine as many groups as it has room for."""
        if self.engine.version is None or not self.is_alive:
            return
        size, now = self._group_size, self.clock.now
        for partial in self.session.take(self.engine.space, group_size=size, now=now):
            lease = partial.lease
            self.engine.begin(lease, self._groups.length(lease.group_id), now=self.clock.now)
        is_busy = bool(self.engine.groups)
        self.session.activity = "sampling" if is_busy else "waiting for leases"
        self._await_next()

    def _await_next(self) -> None:
        """Look again when the next group will be complete."""
        at = self.engine.next_at
        if at != self._done_at and at < float("inf"):
            self._done_at = at
            self.clock.at(at, self._look, at)

    def _look(self, at: float) -> None:
        if at != self._done_at or not self.is_alive:
            return
        self._done_at = -1.0
        for running in self.engine.finished(now=self.clock.now):
            self._deliver(running)
        self._sample_more()

    def _deliver(self, running: Running) -> None:
        lease, session = running.lease, self.session
        session.tokens_sampled += running.length.num_tokens
        shares = running.shares()
        self._groups.sampled(lease, shares)
        group = make_group(
            lease,
            [version for version, _ in shares],
            worker_id=session.settings.node_id,
            group_size=self._group_size,
        )
        self.perform(session.finished(group, now=self.clock.now))


def make_group(
    lease: Lease, versions: list[PolicyVersion], *, worker_id: str, group_size: int
) -> Group:
    """Return a group in which one token stands for all that were sampled by one version."""
    count = len(versions)
    rollout = Rollout(
        token_ids=np.zeros(count, dtype=np.int32),
        sampler_logprobs=np.full(count, -0.5, dtype=np.float32),
        policy_versions=np.array([[v.lineage, v.step] for v in versions], dtype=np.int32),
        completion_mask=np.ones(count, dtype=np.bool_),
        reward=0.0,
        finish_reason="stop",
    )
    return Group(
        group_id=lease.group_id,
        attempt=lease.attempt,
        worker_id=worker_id,
        prompt_ids=np.array(lease.prompt_ids, dtype=np.int32),
        rollouts=(rollout,) * group_size,
    )
