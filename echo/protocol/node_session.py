"""What a relay and a worker have in common: reaching the learner, and a parent for the weights.

Theory of operation. A node has two outbound links. Over the **control link**, dialled to one of
its configured addresses (the learner's or a relay's), routed messages go to and from the learner.
Over the **weights link**, dialled to the parent that the learner's Plan names, chunks are pulled.
Both are replaced independently, and neither loss stops the node's work.

    dialling --Connected--> greeting --Greeted--> joining --Welcome--> configuring
        ^                                            |  (known already)      | configured()
        |  link lost / no answer for dead_after_s    +--------> readying <---+
        +------------------------- from any state ----------------- | Admitted
                                                                 admitted

* Whatever is sent in a state is repeated every `retry_s` until the state is left. While task and
  engine are being built (it can take minutes) Hello is repeated with the heartbeat's period, so
  that both sides know of each other.
* If the link is lost, or nothing was heard from the learner for `dead_after_s`, the next address
  is dialled: the configured ones in turn, and the learner's own where a Plan told it. So the
  workers of a dead relay find the learner without help.
* After `reconnect_for_s` without the learner the node stops with an error that says what to do.
* Welcome of another run or with other settings, another protocol version, or hashes that differ end
  the node: retrying cannot help.
* The weights link follows the newest Plan (`weights_link.py`).
"""

from __future__ import annotations

from collections.abc import Iterable

from echo.errors import RefusedError, RemoteProtocolError, TransportError
from echo.metrics import Counters
from echo.protocol.actions import Action, Dial, HangUp, Note, Send, Stop, VersionArrived
from echo.protocol.broadcast import Broadcast, ParentFailed
from echo.protocol.codec import (
    Envelope,
    Frame,
    decode_envelope,
    decode_message,
    encode,
    other_protocol,
)
from echo.protocol.joining import Joining
from echo.protocol.joining import NodeSettings as NodeSettings
from echo.protocol.messages import (
    LEARNER_ID,
    Admitted,
    Asset,
    Finish,
    Goodbye,
    Greet,
    Greeted,
    Heartbeat,
    LeaseState,
    Message,
    NodeStats,
    Plan,
    Pulse,
    Refuse,
    Rehello,
    Welcome,
)
from echo.protocol.recent import RecentMap
from echo.protocol.weights_link import CONNECT_TIMEOUT_S, Uplink, WeightsLink
from echo.rollout import PolicyVersion

MAX_PEER_NAMES = 10_000
"""Inbound peers whose names are remembered, for messages to the operator."""


class NodeSession:
    """A relay's or worker's conversation with everybody else, without IO and without a clock."""

    def __init__(self, settings: NodeSettings, broadcast: Broadcast, *, now: float) -> None:
        """Start disconnected; call `start` for the first actions."""
        self.settings = settings
        self.broadcast = broadcast
        self.counters = Counters()
        self.is_leaving = False
        self._joining = Joining(settings, broadcast, send=self.to_learner)
        self._learner_address = ""
        self._control: Uplink | None = None
        self._address_index = 0
        self._lost_at = now
        self._heard_at = now
        self._heartbeat_at = now
        self._warned_at = now
        self._peer_names: RecentMap[str, str] = RecentMap(max_entries=MAX_PEER_NAMES)
        self._weights = WeightsLink(broadcast, retry_s=settings.retry_s)
        self._weights.retry_preferred_s = settings.dead_after_s

    # --- what subclasses fill in -----------------------------------------------------------------

    def installed(self) -> PolicyVersion | None:
        """Return the newest version in use; for a relay the newest held whole."""
        return self.broadcast.newest_complete

    def capacity(self) -> int:
        """Return how many groups this node can hold at once."""
        return 0

    def lease_states(self) -> tuple[LeaseState, ...]:
        """Return the leases of this node."""
        return ()

    def stats(self) -> NodeStats:
        """Return what to tell the learner about this node."""
        version, num_held, num_chunks = self.broadcast.progress()
        return NodeStats(
            state="relaying",
            bytes_received=self.broadcast.bytes_received,
            bytes_sent=self.broadcast.bytes_sent,
            parent=self._weights.parent,
            fetching=version,
            num_chunks_held=num_held,
            num_chunks=num_chunks,
            refused={name: int(n) for name, n in self.counters.as_dict().items()},
        )

    def on_routed(self, message: Message, payload: list[Frame], *, now: float) -> list[Action]:
        """Handle a message from the learner that this class does not know."""
        raise RemoteProtocolError(f"{type(message).__name__} is not for a {self.settings.role}")

    def on_admitted(self, *, now: float) -> list[Action]:
        """Handle that the learner has (again) admitted this node."""
        return []

    def forward(self, peer: str, envelope: Envelope, frames: list[Frame]) -> list[Action]:
        """Handle a routed message for another node."""
        raise RemoteProtocolError(
            f"a message for {envelope.target}; a {self.settings.role} does not relay"
        )

    # --- links -----------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        """One of "dialling", "joining", "configuring", "readying" and "admitted"."""
        return self._joining.state

    @property
    def heartbeat_s(self) -> float:
        """Seconds between heartbeats."""
        return self._joining.heartbeat_s

    @property
    def is_admitted(self) -> bool:
        """Whether the learner has admitted this node and the link stands."""
        return self.state == "admitted"

    def start(self, *, now: float) -> list[Action]:
        """Dial the first address."""
        self._lost_at = self._heard_at = now
        return self._dial_control(now)

    def dialled(self, address: str, purpose: str, peer: str) -> None:
        """Note which peer a Dial has become."""
        link = self._control if purpose == "control" else self._weights.next
        if link is not None and link.address == address and not link.peer:
            link.peer = peer

    def connected(self, peer: str, *, now: float) -> list[Action]:
        """Handle that a dialled link stands (for the first time or again)."""
        for link, purpose in ((self._control, "control"), (self._weights.next, "weights")):
            if link is not None and link.peer == peer:
                return [self._greet(peer, purpose)]
        return []

    def disconnected(self, peer: str, reason: str, *, now: float) -> list[Action]:
        """Handle that a link is gone, inbound or outbound."""
        if self._control is not None and self._control.peer == peer:
            return [
                Note("warning", f"lost the link to {self._control.address}: {reason}"),
                *self._next_address(now),
            ]
        if self._weights.has(peer):
            return self._weights.failed(peer, reason, control=self._control, now=now)
        self._peer_names.discard(peer)
        return self.broadcast.remove_child(peer, now=now)

    def _greet(self, peer: str, purpose: str) -> Send:
        greet = Greet(node_id=self.settings.node_id, role=self.settings.role, purpose=purpose)
        return Send(peer, encode(greet, source=self.settings.node_id))

    def _addresses(self) -> list[str]:
        known = list(self.settings.addresses)
        if self._learner_address and self._learner_address not in known:
            known.append(self._learner_address)
        return known

    def _dial_control(self, now: float) -> list[Action]:
        addresses = self._addresses()
        address = addresses[self._address_index % len(addresses)]
        self._control = Uplink(address, dialled_at=now)
        self._joining.state = "dialling"
        self._joining.retry_at = now + CONNECT_TIMEOUT_S
        return [Dial(address, "control")]

    def _next_address(self, now: float) -> list[Action]:
        """Leave the control link and try the next address."""
        actions: list[Action] = []
        if self._control is not None and self._control.peer:
            actions.append(HangUp(self._control.peer))
        self._address_index += 1
        return actions + self._dial_control(now)

    # --- messages --------------------------------------------------------------------------------

    def receive(self, peer: str, frames: list[Frame], *, now: float) -> list[Action]:
        """Handle one message; a peer's mistake is counted and noted, never raised."""
        try:
            return self._receive(peer, decode_envelope(frames), frames, now)
        except RemoteProtocolError as error:
            self.counters.add("protocol_errors")
            name = self._peer_names.get(peer) or peer
            return [Note("warning", f"refused a message from {name}: {error}")]

    def _receive(
        self, peer: str, envelope: Envelope, frames: list[Frame], now: float
    ) -> list[Action]:
        if envelope.target and envelope.target != self.settings.node_id:
            return self.forward(peer, envelope, frames)
        fault = other_protocol(envelope)
        if fault is not None:
            return self._on_other_protocol(peer, envelope.source, fault)
        message = decode_message(envelope)
        if not envelope.target:
            return self._on_link_message(peer, message, frames[1:], now)
        if not self.is_from_learner(peer):
            raise RemoteProtocolError(
                f"a {type(message).__name__} that did not come from the learner's side"
            )
        return self._on_learner_message(message, frames[1:], now)

    def is_from_learner(self, peer: str) -> bool:
        """Return whether messages of the learner come over this link."""
        return self._control is not None and self._control.peer == peer

    def _on_other_protocol(self, peer: str, source: str, fault: str) -> list[Action]:
        """Stop if it is whom we dialled; answer in our version if it is who dialled us."""
        if self.is_from_learner(peer):
            return [Stop("protocol_version", RefusedError(fault))]
        self.counters.add("refused/protocol_version")
        if self._weights.has(peer):
            return []
        refuse = Refuse(reason="protocol_version", detail=fault)
        frames = encode(refuse, source=self.settings.node_id, target=source)
        return [Note("warning", fault), Send(peer, frames)]

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
        return self._perform(self.broadcast.receive(peer, message, payload, now=now), now)

    def _perform(self, actions: Iterable[Action | ParentFailed], now: float) -> list[Action]:
        """Carry out what concerns this session in the broadcast's actions; pass on the rest."""
        rest: list[Action] = []
        for action in actions:
            if isinstance(action, ParentFailed):
                rest += self._weights.failed(
                    action.peer, action.reason, control=self._control, now=now
                )
            else:
                rest.append(action)
                if isinstance(action, VersionArrived):
                    self._heartbeat_at = now
        return rest

    def _on_greeted(self, peer: str, message: Greeted, now: float) -> list[Action]:
        self._peer_names[peer] = message.node_id
        if self._control is not None and self._control.peer == peer:
            if self._control.node_id:
                return []
            self._control.node_id = message.node_id
            self._heard_at = now
            return self._joining.begin(now)
        return self._weights.greeted(peer, message.node_id, now=now)

    def _on_learner_message(
        self, message: Message, payload: list[Frame], now: float
    ) -> list[Action]:
        self._heard_at = self._lost_at = now
        match message:
            case Welcome() | Asset() | Rehello() | Refuse() | Finish():
                return self._joining.receive(message, payload, now=now)
            case Admitted():
                return self._on_admitted(message, now)
            case Plan():
                for node_id, address in message.parents:
                    if node_id == LEARNER_ID and address:
                        self._learner_address = address
                return self._weights.on_plan(message, control=self._control, now=now)
            case Pulse():
                return self._on_pulse(message, now)
        return self.on_routed(message, payload, now=now)

    # --- joining ---------------------------------------------------------------------------------

    def to_learner(self, message: Message, *payload: Frame) -> list[Action]:
        """Return the Send of a routed message, or nothing while there is no link."""
        if self._control is None or not self._control.node_id:
            return []
        frames = encode(message, payload, source=self.settings.node_id, target=LEARNER_ID)
        return [Send(self._control.peer, frames)]

    def configured(self, digests: dict[str, str], *, now: float) -> list[Action]:
        """Note that task and engine are built, with these hashes."""
        return self._joining.configured(digests, now=now)

    def _on_admitted(self, message: Admitted, now: float) -> list[Action]:
        if not self._joining.is_expected(message):
            return []
        self._joining.state, self._heartbeat_at = "admitted", now
        self._weights.new_learner()
        assert self._control is not None
        where = f"{self._control.address} ({self._control.node_id})"
        return [
            Note("info", f"joined run {self._joining.run_id} through {where}"),
            *self.on_admitted(now=now),
        ]

    def _on_pulse(self, message: Pulse, now: float) -> list[Action]:
        known = self.broadcast.newest_known
        if message.newest is not None and (known is None or known < message.newest):
            # Either the Announce is still on its way down the chain, or it was lost on a link.
            return self.broadcast.resubscribe(now=now)
        return []

    # --- time ------------------------------------------------------------------------------------

    @property
    def deadline(self) -> float | None:
        """When `expire` must be called next."""
        instants = [self._joining.retry_at, self._lost_at + self.settings.reconnect_for_s]
        if self.is_admitted:
            instants = [self._heartbeat_at, self._heard_at + self._joining.dead_after_s]
        instants += [t for t in (self.broadcast.deadline, self._weights.deadline) if t is not None]
        return min(instants)

    def expire(self, *, now: float) -> list[Action]:
        """Do what has become due."""
        actions = self._perform(self.broadcast.expire(now=now), now)
        actions += self._weights.expire(control=self._control, now=now)
        if self.is_admitted:
            return actions + self._expire_admitted(now)
        return actions + self._expire_joining(now)

    def _expire_admitted(self, now: float) -> list[Action]:
        if now >= self._heard_at + self._joining.dead_after_s:
            text = f"nothing heard from the learner for {self._joining.dead_after_s:.0f} s"
            return [Note("warning", text), *self._next_address(now)]
        return self.heartbeat(now=now) if now >= self._heartbeat_at else []

    def _expire_joining(self, now: float) -> list[Action]:
        remaining_s = self._lost_at + self.settings.reconnect_for_s - now
        if remaining_s <= 0:
            return [Stop("learner_unreachable", TransportError(self._describe_failure()))]
        if now < self._joining.retry_at:
            return []
        actions: list[Action] = []
        if self.state != "configuring" and now >= self._warned_at + 5:
            self._warned_at = now
            where = self._control.address if self._control is not None else "?"
            text = f"{self.state}: no learner at {where} yet; giving up in {remaining_s:.0f} s"
            actions.append(Note("warning", text))
        if self.state == "dialling" or now >= self._heard_at + self._joining.dead_after_s:
            return actions + self._next_address(now)
        return actions + self._joining.repeat(now)

    def _describe_failure(self) -> str:
        settings = self.settings
        return (
            f"no learner reached at {', '.join(self._addresses())} for "
            f"{settings.reconnect_for_s:.0f} s; check that it runs, that its port is open, and the "
            f"addresses under [{settings.role}] connect; network.reconnect_for_s sets how long to "
            "try"
        )

    def heartbeat(self, *, now: float) -> list[Action]:
        """Tell the learner this node's state, now."""
        self._heartbeat_at = now + self.heartbeat_s
        beat = Heartbeat(
            installed=self.installed(),
            capacity=0 if self.is_leaving else self.capacity(),
            leases=self.lease_states(),
            stats=self.stats(),
        )
        return self.to_learner(beat)

    def leave(self, reason: str) -> list[Action]:
        """Say goodbye; the process ends after these actions."""
        return self.to_learner(Goodbye(reason=reason)) if self.is_admitted else []
