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

* Whatever is sent in a state is repeated every `retry_s` until the state is left.
* If the link is lost, or nothing was heard from the learner for `dead_after_s`, the next address
  is dialled: the configured ones in turn, and the learner's own where a Plan told it. So the
  workers of a dead relay find the learner without help.
* After `reconnect_for_s` without the learner the node stops with an error that says what to do.
* Welcome of another run, or hashes that differ, end the node: retrying cannot help.
* The weights link follows the newest Plan: first choice first, the next one when a link is lost or
  its parent failed. The old link is kept until the new one has answered.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from echo.errors import RefusedError, RemoteProtocolError, TransportError
from echo.metrics import Counters
from echo.protocol.actions import (
    Action,
    Configure,
    Dial,
    HangUp,
    Note,
    Send,
    Stop,
    VersionArrived,
)
from echo.protocol.broadcast import Broadcast, ParentFailed
from echo.protocol.codec import Envelope, Frame, decode_envelope, decode_message, encode
from echo.protocol.joining import Assets, digest_mismatch
from echo.protocol.messages import (
    LEARNER_ID,
    Admitted,
    Asset,
    AssetRequest,
    Finish,
    Goodbye,
    Greet,
    Greeted,
    Heartbeat,
    Hello,
    LeaseState,
    Message,
    NodeStats,
    Plan,
    Pulse,
    Ready,
    Refuse,
    Rehello,
    Welcome,
)
from echo.rollout import Lineage, PolicyVersion

CONNECT_TIMEOUT_S = 3.0
"""Seconds to wait for a dialled address before the next is tried; a WAN handshake takes under 1."""


@dataclass(slots=True)
class Uplink:
    """One outbound link."""

    address: str
    peer: str = ""
    is_connected: bool = False
    node_id: str = ""
    """Who answered; empty until Greeted."""
    dialled_at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """What a node is told by its own configuration."""

    node_id: str
    role: str
    incarnation: str
    addresses: tuple[str, ...]
    """Where to look for the learner, in order."""
    advertise: str | None
    """Where this node serves weights to others; None if it does not listen."""
    echo_version: str
    reconnect_for_s: float
    max_image_bytes: int
    digests: dict[str, str]
    """Hashes of what the node has before it hears from the learner; empty if it inherits all."""
    retry_s: float = 1.0
    heartbeat_s: float = 5.0
    """Until Welcome says otherwise."""
    dead_after_s: float = 45.0


class NodeSession:
    """A relay's or worker's conversation with everybody else, without IO and without a clock."""

    def __init__(self, settings: NodeSettings, broadcast: Broadcast, *, now: float) -> None:
        """Start disconnected; call `start` for the first actions."""
        self.settings = settings
        self.broadcast = broadcast
        self.counters = Counters()
        self.state = "dialling"
        self.run_id = ""
        self.lineages: tuple[Lineage, ...] = ()
        self.learner_step = 0
        self.learner_newest: PolicyVersion | None = None
        self.heartbeat_s = settings.heartbeat_s
        self.dead_after_s = settings.dead_after_s
        self.is_leaving = False
        self._assets = Assets()
        self._digests: dict[str, str] | None = None
        self._learner_key = b""
        self._learner_address = ""
        self._control: Uplink | None = None
        self._weights: Uplink | None = None
        self._next_weights: Uplink | None = None
        self._address_index = 0
        self._plan = Plan(epoch=-1, parents=())
        self._plan_index = 0
        self._replan_at: float | None = None
        self._lost_at = now
        self._heard_at = now
        self._retry_at = now
        self._heartbeat_at = now
        self._warned_at = now
        self._peer_names: dict[str, str] = {}

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
            parent=self._weights.node_id if self._weights else "-",
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
    def is_admitted(self) -> bool:
        """Whether the learner has admitted this node and the link stands."""
        return self.state == "admitted"

    def start(self, *, now: float) -> list[Action]:
        """Dial the first address."""
        self._lost_at = self._heard_at = now
        return self._dial_control(now)

    def dialled(self, address: str, purpose: str, peer: str) -> None:
        """Note which peer a Dial has become."""
        link = self._control if purpose == "control" else self._next_weights
        if link is not None and link.address == address and not link.peer:
            link.peer = peer

    def connected(self, peer: str, *, now: float) -> list[Action]:
        """Handle that a dialled link stands (for the first time or again)."""
        for link, purpose in ((self._control, "control"), (self._next_weights, "weights")):
            if link is not None and link.peer == peer:
                link.is_connected = True
                return [self._greet(peer, purpose)]
        return []

    def disconnected(self, peer: str, reason: str, *, now: float) -> list[Action]:
        """Handle that a link is gone, inbound or outbound."""
        if self._control is not None and self._control.peer == peer:
            return [
                Note("warning", f"lost the link to {self._control.address}: {reason}"),
                *self._next_address(now),
            ]
        for link in (self._weights, self._next_weights):
            if link is not None and link.peer == peer:
                return self._weights_failed(peer, reason, now)
        self._peer_names.pop(peer, None)
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
        self.state = "dialling"
        self._retry_at = now + CONNECT_TIMEOUT_S
        return [Dial(address, "control")]

    def _next_address(self, now: float) -> list[Action]:
        """Leave the control link and try the next address."""
        actions: list[Action] = []
        if self._control is not None and self._control.peer:
            actions.append(HangUp(self._control.peer))
        if self.state == "admitted":
            self._lost_at = now
        self._address_index += 1
        return actions + self._dial_control(now)

    # --- messages --------------------------------------------------------------------------------

    def receive(self, peer: str, frames: list[Frame], *, now: float) -> list[Action]:
        """Handle one message; a peer's mistake is counted and noted, never raised."""
        try:
            envelope = decode_envelope(frames)
            if envelope.target and envelope.target != self.settings.node_id:
                return self.forward(peer, envelope, frames)
            message = decode_message(envelope)
            if envelope.target:
                return self._on_learner_message(message, frames[1:], now)
            return self._on_link_message(peer, message, frames[1:], now)
        except RemoteProtocolError as error:
            self.counters.add("protocol_errors")
            return [
                Note(
                    "warning", f"refused a message from {self._peer_names.get(peer, peer)}: {error}"
                )
            ]

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
                rest += self._weights_failed(action.peer, action.reason, now)
            else:
                rest.append(action)
                if isinstance(action, VersionArrived):
                    self._heartbeat_at = now
        return rest

    def _on_greeted(self, peer: str, message: Greeted, now: float) -> list[Action]:
        self._peer_names[peer] = message.node_id
        if self._control is not None and self._control.peer == peer:
            self._control.node_id = message.node_id
            self.state, self._retry_at, self._heard_at = "joining", now, now
            return self._repeat(now)
        link = self._next_weights
        if link is not None and link.peer == peer:
            link.node_id = message.node_id
            old, self._weights, self._next_weights = self._weights, link, None
            actions: list[Action] = [HangUp(old.peer)] if old is not None and old.peer else []
            return actions + self.broadcast.set_parent(peer, now=now)
        return []

    def _on_learner_message(
        self, message: Message, payload: list[Frame], now: float
    ) -> list[Action]:
        self._heard_at = now
        match message:
            case Welcome():
                return self._on_welcome(message, now)
            case Asset():
                return self._on_asset(message, payload, now)
            case Admitted():
                return self._on_admitted(message, now)
            case Rehello():
                if self.is_admitted:
                    self.state, self._lost_at = "joining", now
                    return self._repeat(now)
                return []
            case Refuse():
                error = RefusedError(
                    f"the learner refused this node ({message.reason}): {message.detail}"
                )
                return [Stop(message.reason, error)]
            case Finish():
                return [Stop(message.reason)]
            case Plan():
                return self._on_plan(message, now)
            case Pulse():
                return self._on_pulse(message)
        return self.on_routed(message, payload, now=now)

    # --- joining ---------------------------------------------------------------------------------

    def to_learner(self, message: Message, *payload: Frame) -> list[Action]:
        """Return the Send of a routed message, or nothing while there is no link."""
        if self._control is None or not self._control.node_id:
            return []
        frames = encode(message, payload, source=self.settings.node_id, target=LEARNER_ID)
        return [Send(self._control.peer, frames)]

    def _repeat(self, now: float) -> list[Action]:
        """Send what the present state waits to have answered."""
        self._retry_at = now + self.settings.retry_s
        settings = self.settings
        match self.state:
            case "joining":
                hello = Hello(
                    node_id=settings.node_id,
                    role=settings.role,
                    incarnation=settings.incarnation,
                    echo_version=settings.echo_version,
                    advertise=settings.advertise,
                    digests=settings.digests,
                )
                return self.to_learner(hello)
            case "configuring":
                return [
                    action
                    for name in self._assets.missing
                    for action in self.to_learner(AssetRequest(name=name))
                ]
            case "readying":
                ready = Ready(incarnation=settings.incarnation, digests=self._digests or {})
                return self.to_learner(ready)
        return []

    def _on_welcome(self, message: Welcome, now: float) -> list[Action]:
        if self.state != "joining" or message.incarnation != self.settings.incarnation:
            return []
        if self.run_id and (message.run_id, message.public_key) != (self.run_id, self._learner_key):
            detail = (
                f"this node belongs to run {self.run_id}, the learner now runs {message.run_id}"
            )
            return [Stop("another_run", RefusedError(f"{detail}; restart the node to join it"))]
        self.run_id, self._learner_key = message.run_id, message.public_key
        self.lineages = message.lineages
        self.heartbeat_s, self.dead_after_s = message.heartbeat_s, message.dead_after_s
        self.broadcast.trust(
            public_key=message.public_key,
            run_id=message.run_id,
            max_image_bytes=self.settings.max_image_bytes,
        )
        fault = digest_mismatch(ours=self.settings.digests, theirs=message.digests)
        if fault is not None:
            return [Stop("digest_mismatch", RefusedError(fault))]
        if self._digests is not None:
            self.state = "readying"
            return self._repeat(now)
        self.state = "configuring"
        wanted = {} if self.settings.role == "relay" else message.assets
        self._assets = Assets(wanted, settings=message.settings)
        if not self._assets.missing:
            return self._configure(now)
        return self._repeat(now)

    def _on_asset(self, message: Asset, payload: list[Frame], now: float) -> list[Action]:
        if (
            self.state != "configuring"
            or len(payload) != 1
            or message.name not in self._assets.missing
        ):
            return []
        self._assets.add(message.name, bytes(payload[0]))
        return self._configure(now) if not self._assets.missing else []

    def _configure(self, now: float) -> list[Action]:
        self._retry_at = now + self.settings.retry_s
        return [Configure(self._assets.settings, self._assets.files)]

    def configured(self, digests: dict[str, str], *, now: float) -> list[Action]:
        """Note that task and engine are built, with these hashes."""
        self._digests = digests
        if self.state == "configuring":
            self.state = "readying"
            return self._repeat(now)
        return []

    def _on_admitted(self, message: Admitted, now: float) -> list[Action]:
        if self.state != "readying" or message.incarnation != self.settings.incarnation:
            return []
        self.state, self._heartbeat_at = "admitted", now
        assert self._control is not None
        where = f"{self._control.address} ({self._control.node_id})"
        return [
            Note("info", f"joined run {self.run_id} through {where}"),
            *self.on_admitted(now=now),
        ]

    def _on_pulse(self, message: Pulse) -> list[Action]:
        self.learner_step, self.learner_newest = message.step, message.newest
        known = self.broadcast.newest_known
        if message.newest is not None and (known is None or known < message.newest):
            # Either the Announce is still on its way down the chain, or it was lost on a link.
            return self.broadcast.resubscribe()
        return []

    # --- weights link ----------------------------------------------------------------------------

    def _on_plan(self, message: Plan, now: float) -> list[Action]:
        if message.epoch <= self._plan.epoch and message.parents == self._plan.parents:
            return []
        self._plan, self._plan_index, self._replan_at = message, 0, None
        for node_id, address in message.parents:
            if node_id == LEARNER_ID and address:
                self._learner_address = address
        return self._follow_plan(now)

    def _follow_plan(self, now: float) -> list[Action]:
        """Dial the preferred parent unless the link to it stands already."""
        actions: list[Action] = []
        if self._next_weights is not None:
            actions += [HangUp(self._next_weights.peer)] if self._next_weights.peer else []
            self._next_weights = None
        while self._plan_index < len(self._plan.parents):
            node_id, address = self._plan.parents[self._plan_index]
            if self._weights is not None and self._weights.node_id == node_id:
                return actions
            if not address and self._control is not None and self._control.node_id == node_id:
                address = self._control.address
            if address:
                self._next_weights = Uplink(address, dialled_at=now)
                return [*actions, Dial(address, "weights")]
            self._plan_index += 1
        self._plan_index, self._replan_at = 0, now + self.settings.retry_s
        return actions

    def _weights_failed(self, peer: str, reason: str, now: float) -> list[Action]:
        """Go on with the next parent of the plan."""
        actions: list[Action] = [HangUp(peer)]
        for link in (self._weights, self._next_weights):
            if link is not None and link.peer == peer:
                name = link.node_id or link.address
                actions.append(Note("warning", f"weights from {name} failed: {reason}"))
        if self._weights is not None and self._weights.peer == peer:
            self._weights = None
            actions += self.broadcast.set_parent(None, now=now)
            if self._next_weights is not None:
                return actions
        if self._next_weights is not None and self._next_weights.peer == peer:
            self._next_weights = None
        self._plan_index += 1
        return actions + self._follow_plan(now)

    # --- time ------------------------------------------------------------------------------------

    @property
    def deadline(self) -> float | None:
        """When `expire` must be called next."""
        instants = [self._retry_at, self._lost_at + self.settings.reconnect_for_s]
        if self.is_admitted:
            instants = [self._heartbeat_at, self._heard_at + self.dead_after_s]
        instants += [t for t in (self.broadcast.deadline, self._replan_at) if t is not None]
        if self._next_weights is not None:
            instants.append(self._next_weights.dialled_at + CONNECT_TIMEOUT_S)
        return min(instants)

    def expire(self, *, now: float) -> list[Action]:
        """Do what has become due."""
        actions = self._perform(self.broadcast.expire(now=now), now)
        if self._replan_at is not None and now >= self._replan_at:
            self._replan_at = None
            actions += self._follow_plan(now)
        link = self._next_weights
        if link is not None and not link.node_id and now >= link.dialled_at + CONNECT_TIMEOUT_S:
            actions += self._weights_failed(link.peer, "no answer", now)
        if self.is_admitted:
            return actions + self._expire_admitted(now)
        return actions + self._expire_joining(now)

    def _expire_admitted(self, now: float) -> list[Action]:
        if now >= self._heard_at + self.dead_after_s:
            text = f"nothing heard from the learner for {self.dead_after_s:.0f} s"
            return [Note("warning", text), *self._next_address(now)]
        return self.heartbeat(now=now) if now >= self._heartbeat_at else []

    def _expire_joining(self, now: float) -> list[Action]:
        remaining_s = self._lost_at + self.settings.reconnect_for_s - now
        if remaining_s <= 0:
            tried = ", ".join(self._addresses())
            return [
                Stop(
                    "learner_unreachable",
                    TransportError(
                        f"no learner reached at {tried} for {self.settings.reconnect_for_s:.0f} s; check "
                        "that it runs, that its port is open, and the addresses under "
                        f"[{self.settings.role}] connect; network.reconnect_for_s sets how long to try"
                    ),
                )
            ]
        if now < self._retry_at:
            return []
        actions: list[Action] = []
        if now >= self._warned_at + 5:
            self._warned_at = now
            where = self._control.address if self._control is not None else "?"
            text = f"{self.state}: no learner at {where} yet; giving up in {remaining_s:.0f} s"
            actions.append(Note("warning", text))
        waits_for_learner = self.state in ("joining", "readying")
        if self.state == "dialling" or (
            waits_for_learner and now >= self._heard_at + self.dead_after_s
        ):
            return actions + self._next_address(now)
        return actions + self._repeat(now)

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
