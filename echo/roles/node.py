"""The role of a relay or a worker: its links for control and weights, heartbeats and timeouts.

Relays and workers dial two links. The **control link** transports routed messages to and from the
learner. The node dials this link at a configured address of the learner or of a relay. Over the
**weights link**, the node fetches chunks from the parent in the learner's plan. Each link is
replaced independently, and the node continues to work while a link is lost.

`roles/joining.py` has the table of a node's states. The rules of the links are:

* While a node joins, it repeats the message of its state every `retry_s` until it enters the next
  state. A request for a file is repeated only after half of `dead_after_s`, because a large file
  takes a while. Task and engine can take minutes to build. Meanwhile the node sends Hello once per
  heartbeat interval, and the learner answers. So neither the node nor the learner counts as silent.
* The control link tries the addresses in turn until the learner answers (`roles/control.py`).
* A Welcome of another run, with other settings or with other hashes, ends the node, because
  retrying cannot help.
* The learner's messages need its seal (`wire/seals.py`), except the types in UNSEALED
  (`wire/messages.py`). A message without a valid seal is refused, and counts as a fault of the node
  that forwarded it.
* The weights link follows the newest plan (`weights/parents.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias

from echo.core.bounds import MAX_NODES, MAX_REASON_LENGTH, clamped_rate
from echo.core.errors import ForgedError, RemoteProtocolError
from echo.core.monitoring.metrics import Counters
from echo.core.rollout import PolicyVersion
from echo.core.timers import MAX_NAMES_KEPT, RecentMap, earliest
from echo.core.units import one_line
from echo.roles.control import LOST_LINK, ControlLink
from echo.roles.joining import Built, Joining, NodeSettings, NodeState
from echo.weights.broadcast import Broadcast
from echo.weights.link import ParentFailed
from echo.weights.parents import Parents
from echo.weights.rates import UplinkProbe, acknowledge
from echo.weights.receiver import VersionArrived
from echo.wire.actions import Action, HangUp, Note, PeerFaults, Send, Work
from echo.wire.codec import (
    Envelope,
    Frame,
    decode_envelope,
    decode_message,
    describe,
    encode,
    other_protocol,
)
from echo.wire.messages import (
    LEARNER_ID,
    Goodbye,
    Greet,
    Greeted,
    Heartbeat,
    LeaseState,
    Message,
    NodeStats,
    Probe,
    ProbeAck,
    Pulse,
    Refuse,
    Rehello,
    TopologyPlan,
)

Handler: TypeAlias = Callable[[Any, Any, float], list[Action]]
"""A function that maps (role, event, present time) to actions."""


@dataclass(frozen=True, slots=True)
class Started:
    """Event: the process has started, so the node can dial the learner."""


@dataclass(frozen=True, slots=True)
class Leaving:
    """Event: the process will end once it has carried out the actions that this event causes."""

    reason: str
    has_failed: bool = False


class DialingRole:
    """Decides what a relay or worker sends and dials, without IO or a clock."""

    def __init__(self, settings: NodeSettings, broadcast: Broadcast, *, now: float) -> None:
        """Make a role without links. The event Started makes it dial."""
        self.settings = settings
        self.broadcast = broadcast
        self.counters = Counters()
        self.is_leaving = False
        self.joining = Joining(settings, broadcast, self)
        self.probing = UplinkProbe(broadcast.uplink, node_id=settings.node_id)
        self._heartbeat_at = self._beat_at = now
        self.learner_step = 0
        self._peer_faults = PeerFaults()
        self._peer_names: RecentMap[str, str] = RecentMap(max_entries=MAX_NAMES_KEPT)
        self._weights = Parents(
            broadcast,
            addresses=settings.addresses,
            retry_s=settings.retry_s,
        )
        self._weights.retry_preferred_s = settings.dead_after_s
        self.control = ControlLink(settings, self.joining, self._weights, now=now)

    def validate(self) -> None:
        """For tests: check that the store, the parent and the children are consistent.

        Raises:
            AssertionError: if they are inconsistent.
        """
        self.broadcast.validate()

    # --- what subclasses override ----------------------------------------------------------------

    def version_in_use(self) -> PolicyVersion | None:
        """Return the version in use.

        For a relay, this is the newest version that the relay holds completely. Without a version,
        return None.
        """
        return self.broadcast.newest_complete

    def capacity(self) -> int:
        """Return the number of groups that this node can hold. For a relay, it is 0."""
        return 0

    def lease_states(self) -> tuple[LeaseState, ...]:
        """Return the state of each lease that this node holds. A relay holds none."""
        return ()

    def stats(self) -> NodeStats:
        """Return the status that a heartbeat reports."""
        version, num_held, num_chunks = self.broadcast.progress()
        return NodeStats(
            state="relaying",
            bytes_received=self.broadcast.bytes_received,
            bytes_sent=self.broadcast.bytes_sent,
            parent=self._weights.parent,
            suspects=self._weights.suspects(now=self._beat_at)[:MAX_NODES],
            uplink_bytes_per_s=clamped_rate(self.broadcast.uplink.bytes_per_s),
            downlink_bytes_per_s=clamped_rate(self.broadcast.receiver.rate.bytes_per_s),
            rtt_s=self._weights.rtt_s,
            fetching=version,
            num_chunks_held=num_held,
            num_chunks=num_chunks,
            refused={name: int(n) for name, n in self.counters.as_dict().items()},
        )

    def on_version(self, *, now: float) -> list[Action]:
        """Handle the arrival of a complete version."""
        return []

    def forward(self, peer: str, envelope: Envelope, frames: list[Frame]) -> list[Action]:
        """Refuse a routed message that is for a different node.

        Relays override this method and forward the message.
        """
        raise RemoteProtocolError(
            f"a message for {envelope.target}; a {self.settings.role} does not relay"
        )

    # --- links -----------------------------------------------------------------------------------

    @property
    def state(self) -> NodeState:
        """The state of this node's admission to the run."""
        return self.joining.state

    @property
    def is_admitted(self) -> bool:
        """Whether the learner has admitted this node over the present control link."""
        return self.state is NodeState.ADMITTED

    def handle(self, event: Any, *, now: float) -> list[Action]:
        """Handle an event from the shell. The table `HANDLERS` names the handler for each type."""
        return self.HANDLERS[type(event)](self, event, now)

    def _on_started(self, event: Started, now: float) -> list[Action]:
        return self.control.begin(now=now)

    def dialled(self, address: str, purpose: str, peer: str) -> None:
        """Record the peer id of the link that the action Dial has opened."""
        if purpose == "control":
            self.control.dialled(address, peer)
        else:
            self._weights.dialled(address, peer)

    def connected(self, peer: str, *, now: float) -> list[Action]:
        """When a dialled link is connected or reconnected, send Greet over it."""
        if self.control.has(peer):
            self.control.connected(now=now)
            return [self._greet(peer, "control")]
        return [self._greet(peer, "weights")] if self._weights.connected(peer, now=now) else []

    def dial_failed(self, peer: str, reason: str, *, is_refused: bool, now: float) -> list[Action]:
        """Handle a failed attempt to dial.

        If all addresses of the learner refuse the node, stop it.

        Args:
            peer: the dialled peer. A parent in the broadcast is ignored, because the weights link
                detects a silent parent itself.
            reason: text of the cause, for the operator.
            is_refused: whether the address refuses this node, so that a retry cannot help.
            now: the present time, seconds.
        """
        if not self.control.has(peer):
            return []
        return self.control.dial_failed(reason, is_refused=is_refused, now=now)

    def disconnected(self, peer: str, reason: str, *, now: float) -> list[Action]:
        """Handle a lost link.

        Depending on the peer, dial again, replace a parent, or remove a child.
        """
        if self.control.has(peer):
            return self.control.disconnected(reason, now=now)
        if self._weights.has(peer):
            failure = ParentFailed(peer, reason)
            return self._weights.parent_failed(failure, now=now)
        self._peer_names.discard(peer)
        return self.broadcast.remove_child(peer, now=now)

    def _greet(self, peer: str, purpose: str) -> Send:
        greet = Greet(node_id=self.settings.node_id, role=self.settings.role, purpose=purpose)
        return Send(peer, encode(greet, source=self.settings.node_id))

    # --- messages --------------------------------------------------------------------------------

    def receive(self, peer: str, frames: list[Frame], *, now: float) -> list[Action]:
        """Handle a message.

        If the message violates the protocol, count and log the error, but do not raise it.
        """
        try:
            return self._receive(peer, decode_envelope(frames), frames, now)
        except RemoteProtocolError as error:
            self.counters.add("protocol_errors")
            name = self._peer_names.get(peer) or peer
            text = f"refused a message from {name}: {error}"
            actions = self._peer_faults.note(name, "protocol", text, now=now)
            if isinstance(error, ForgedError):
                failure = ParentFailed(peer, str(error), is_corrupt=True)
                actions += self._weights.parent_failed(failure, now=now)
            return actions

    def expel(self, peer: str, frames: list[Frame], *, now: float) -> list[Action]:
        """Handle an internal error that a message has caused.

        If the message was for this node, close the link over which the message arrived. If it was
        for another node, keep the link.
        """
        self.counters.add("internal_errors")
        _, target, _ = describe(frames)
        if target not in ("", self.settings.node_id):
            return []
        return [HangUp(peer), *self.disconnected(peer, "an internal error", now=now)]

    def _receive(
        self, peer: str, envelope: Envelope, frames: list[Frame], now: float
    ) -> list[Action]:
        if envelope.target and envelope.target != self.settings.node_id:
            return self.forward(peer, envelope, frames)
        fault = other_protocol(envelope)
        if fault is not None:
            return self._on_other_protocol(peer, envelope.source, fault, now)
        message = decode_message(envelope)
        if not envelope.target:
            return self._on_link_message(peer, message, frames[1:], now)
        if not self.control.has(peer):
            raise RemoteProtocolError(
                f"a {type(message).__name__} that did not come from the learner's side"
            )
        forgery = self.joining.forgery(message)
        if forgery is not None:
            self.counters.add("refused/forged")
            return self.control.leave_address(*forgery, now)
        try:
            is_genuine = self.joining.is_genuine(envelope, message, frames[1:])
        except ForgedError as error:
            self.counters.add("refused/forged")
            raise ForgedError(f"a {type(message).__name__} of the learner's: {error}") from error
        if not is_genuine:
            self.counters.add("dropped/other_channel")
            return []
        return self._on_learner_message(message, frames[1:], now)

    def _on_other_protocol(self, peer: str, source: str, fault: str, now: float) -> list[Action]:
        """Handle a peer that uses a different protocol.

        If this node dialled the peer, leave the peer's address. If the peer is inbound, refuse it.
        """
        if self.control.has(peer):
            return self.control.leave_address("protocol_version", one_line(fault), now)
        self.counters.add("refused/protocol_version")
        if self._weights.has(peer):
            return []
        refuse = Refuse(reason="protocol_version", detail=fault)
        frames = encode(refuse, source=self.settings.node_id, target=source)
        notes = self._peer_faults.note(source, "protocol_version", fault, now=now)
        return [*notes, Send(peer, frames)]

    def _on_link_message(
        self, peer: str, message: Message, payload: list[Frame], now: float
    ) -> list[Action]:
        match message:
            case Greet():
                self._peer_names[peer] = message.node_id
                answer = Greeted(node_id=self.settings.node_id, role=self.settings.role)
                return [Send(peer, encode(answer, source=self.settings.node_id))]
            case Greeted():
                return self._on_greeted(peer, message, now)
            case Probe():
                return acknowledge(peer, source=self.settings.node_id)
            case ProbeAck():
                return self.probing.acknowledged(peer, now=now)
        return self._perform(self.broadcast.receive(peer, message, payload, now=now), now)

    def _perform(self, actions: Iterable[Action | ParentFailed], now: float) -> list[Action]:
        """Handle the failed parents and the new versions that are among the actions.

        Return the other actions.
        """
        rest: list[Action] = []
        for action in actions:
            if isinstance(action, ParentFailed):
                rest += self._weights.parent_failed(action, now=now)
            else:
                rest.append(action)
                if isinstance(action, VersionArrived):
                    self._heartbeat_at = now
                    rest += [*self._probe(action.num_bytes, now), *self.on_version(now=now)]
        return rest

    def _probe(self, num_bytes: int, now: float) -> list[Action]:
        """If other nodes can dial this node, start to measure this node's uplink."""
        control = self.control
        if not control.node_id or self.settings.advertise is None:
            return []
        return self.probing.begin(control.peer, payload_bytes=num_bytes, now=now)

    def _on_greeted(self, peer: str, message: Greeted, now: float) -> list[Action]:
        self._peer_names[peer] = message.node_id
        if self.control.has(peer):
            return self.control.greeted(message.node_id, now=now)
        return self._weights.greeted(peer, message.node_id, now=now)

    def _on_learner_message(
        self, message: Message, payload: list[Frame], now: float
    ) -> list[Action]:
        if not isinstance(message, Rehello):  # a relay may send it without the learner
            self.control.received(now=now)
        return self.joining.receive(message, payload, now=now)

    def on_work(self, message: Message, payload: list[Frame], now: float) -> list[Action]:
        """Handle a message from the learner about plans or about the learner's progress.

        Raises:
            RemoteProtocolError: for any other message.
        """
        match message:
            case TopologyPlan():
                return self._weights.on_plan(message, now=now)
            case Pulse():
                self.learner_step = message.step
                return self._perform(self.broadcast.expect(message.newest, now=now), now)
        raise RemoteProtocolError(f"{type(message).__name__} is not for a {self.settings.role}")

    # --- joining ---------------------------------------------------------------------------------

    def to_learner(self, message: Message, *payload: Frame) -> list[Action]:
        """Return the action that sends a message to the learner.

        Without a link, return no action.
        """
        if not self.control.node_id:
            return []
        frames = encode(
            message,
            payload,
            source=self.settings.node_id,
            target=LEARNER_ID,
            channel=self.joining.seals.newest,
        )
        return [Send(self.control.peer, frames)]

    def _on_built(self, event: Built, now: float) -> list[Action]:
        return self.joining.configured(event.digests, now=now)

    def on_welcome(self, version_bytes: int, *, now: float) -> list[Action]:
        """Handle a Welcome. While the engine is built, measure the uplink for the next plan."""
        self.control.welcomed()
        is_known = self.broadcast.uplink.bytes_per_s is not None
        return [] if is_known else self._probe(version_bytes, now)

    def on_admitted(self, *, now: float) -> list[Action]:
        """Handle the admission of this node. The next heartbeat is due at once."""
        self._heartbeat_at = now
        self._weights.new_learner()
        where = f"{self.control.address} ({self.control.node_id})"
        text = f"joined run {self.joining.run_id} through {where}"
        return [Note("info", text, ends=LOST_LINK)]

    def worked(self, work: Work, fault: str, *, now: float) -> list[Action]:
        """Handle the end of work that the broadcast did in a thread.

        `fault` is "" if the work succeeded.
        """
        return self._perform(self.broadcast.worked(work, fault, now=now), now)

    # --- time ------------------------------------------------------------------------------------

    @property
    def deadline(self) -> float | None:
        """The time at which `expire` must be called next; None if nothing is due."""
        own: tuple[float, ...] = ()
        if self.is_admitted:
            own = (self._heartbeat_at, self.control.silent_at)
        elif self.state is not NodeState.STOPPED:
            own = (self.control.deadline(is_leaving=self.is_leaving),)
        return earliest(*own, self.broadcast.deadline, self._weights.deadline)

    def expire(self, *, now: float) -> list[Action]:
        """Do everything that is due at `now`: repeat messages, send heartbeats, handle timeouts."""
        actions = self._perform(self.broadcast.expire(now=now), now)
        actions += self._weights.expire(now=now)
        if self.is_admitted:
            return actions + self._expire_admitted(now)
        if self.state is NodeState.STOPPED:
            return actions
        return actions + self.control.expire(is_leaving=self.is_leaving, now=now)

    def _expire_admitted(self, now: float) -> list[Action]:
        if now >= self.control.silent_at:
            return self.control.leave_silent(now=now)
        return self.heartbeat(now=now) if now >= self._heartbeat_at else []

    def heartbeat(self, *, now: float) -> list[Action]:
        """Send a heartbeat now. It tells the learner this node's state."""
        self._beat_at, self._heartbeat_at = now, now + self.joining.heartbeat_s
        beat = Heartbeat(
            installed=self.version_in_use(),
            capacity=0 if self.is_leaving else self.capacity(),
            leases=self.lease_states(),
            stats=self.stats(),
        )
        return self.to_learner(beat)

    def _on_leaving(self, event: Leaving, now: float) -> list[Action]:
        if self.state not in (NodeState.CONFIGURING, NodeState.READYING, NodeState.ADMITTED):
            return []  # another process may have the name
        reason = one_line(event.reason)[:MAX_REASON_LENGTH]
        return self.to_learner(Goodbye(reason=reason, has_failed=event.has_failed))

    HANDLERS: ClassVar[Mapping[type, Handler]] = {
        Started: _on_started,
        Built: _on_built,
        Leaving: _on_leaving,
    }
    """For each type of event, the method that handles it."""


# --- The contract between a role and its shell: a process (`runtime/node.py`) or a simulation ---


class Role(Protocol):
    """The interface of a role. Events go in and actions come out, without IO or a clock."""

    @property
    def deadline(self) -> float | None:
        """The time at which `expire` must be called next; None if nothing is due."""

    def handle(self, event: Any, *, now: float) -> list[Action]:
        """Handle an event from the shell. Each role has a table with the events that it handles."""

    def receive(self, peer: str, frames: list[Frame], *, now: float) -> list[Action]:
        """Handle a message that the peer has sent as frames."""

    def expel(self, peer: str, frames: list[Frame], *, now: float) -> list[Action]:
        """Drop the node or the link whose message raised an unexpected exception.

        This method does not decode the message, because decoding may have caused the exception.
        """

    def validate(self) -> None:
        """For tests: check, after each event, that the parts of the role are consistent.

        Raises:
            AssertionError: if they are inconsistent.
        """
        return

    def disconnected(self, peer: str, reason: str, *, now: float) -> list[Action]:
        """Handle the loss of a link, inbound or outbound."""

    def worked(self, work: Work, fault: str, *, now: float) -> list[Action]:
        """Handle the end of work in a thread. `fault` is "" if the work succeeded."""

    # Methods that a shell calls only for roles that dial:

    def dialled(self, address: str, purpose: str, peer: str) -> None:
        """Record the peer id of the link that the action Dial has opened."""
        return

    def connected(self, peer: str, *, now: float) -> list[Action]:
        """Handle a dialled link that has been connected."""
        return []

    def dial_failed(self, peer: str, reason: str, *, is_refused: bool, now: float) -> list[Action]:
        """Handle a failed attempt to dial. The transport repeats the attempt itself."""
        return []

    def expire(self, *, now: float) -> list[Action]:
        """Carry out all work that is due at `now`."""
