"""Viewers: the guests that watch a run, and those that operate it.

A viewer dials the learner with one of two keys (`net/curve.py`). With the key "view" it may only
read. With the key "operate" it may also command. So the transport knows the viewer's rights before
the first message. Viewers are not nodes. Their messages come to this module and to no other part of
the role.

A viewer costs the learner little, whatever it sends or does not read:

* The viewer asks for each status (Watch). A status is made at most once in STATUS_S, and all
  viewers that have asked get it. If an earlier status is still on its way to a viewer, the
  transport drops the new one.
* At most MAX_VIEWERS of each key are connected. A viewer that is silent for SILENT_S is
  disconnected.
* A viewer is disconnected if it sends a long or malformed message, or too many messages.

The shell makes the status (MakeStatus) and carries out operations (Operate).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from echo.core.errors import RemoteProtocolError
from echo.core.monitoring.metrics import Counters
from echo.core.timers import earliest
from echo.core.units import one_line
from echo.wire.actions import Action, HangUp, PeerFaults, Send
from echo.wire.codec import (
    Frame,
    decode_envelope,
    decode_message,
    encode,
    other_protocol,
    payload_bytes,
)
from echo.wire.messages import LEARNER_ID, Message, Operation, Outcome, Refuse, Status, Watch

VIEW, OPERATE = "view", "operate"
"""The names of the two keys, which are in `keys/view` and `keys/operate` of the run's directory."""
MAX_VIEWERS = {VIEW: 16, OPERATE: 4}
"""Largest number of connected viewers, by key. Each key has its own limit, so viewers that only
read never keep an operator out."""
STATUS_S = 0.5
"""Smallest number of seconds between two statuses."""
SILENT_S = 60.0
"""Seconds after which a silent viewer is disconnected. A viewer that watches the run asks every
second."""
MAX_MESSAGE_BYTES = 4096
"""Largest number of bytes of a viewer's message, all frames together."""
MAX_MESSAGES_PER_S = 20.0


@dataclass(frozen=True, slots=True)
class MakeStatus(Action):
    """Make the status of the run, and report it as StatusMade."""


@dataclass(frozen=True, slots=True)
class Operate(Action):
    """Carry out an operation, and report its outcome as OperationDone."""

    peer: str
    operation: Operation


@dataclass(frozen=True, slots=True)
class StatusMade:
    """Event: the status of the run was made, as JSON."""

    data: bytes


@dataclass(frozen=True, slots=True)
class OperationDone:
    """Event: an operation was carried out, or could not be."""

    peer: str
    outcome: Outcome


@dataclass(slots=True)
class Viewer:
    """A connected viewer."""

    user: str
    """The name of the viewer's key."""
    received_at: float
    is_waiting: bool = False
    """Whether the viewer has asked for a status that was not made yet."""
    budget: float = field(default=MAX_MESSAGES_PER_S)
    """Number of messages that the viewer may send now. The number grows by MAX_MESSAGES_PER_S each
    second."""


class Viewers:
    """Admits viewers, sends them statuses, and passes on the operations of operators."""

    def __init__(self, counters: Counters, peer_faults: PeerFaults) -> None:
        """Start without viewers; `counters` count refusals, and `peer_faults` reports them."""
        self._counters, self._peer_faults = counters, peer_faults
        self._viewers: dict[str, Viewer] = {}
        self._made_at = float("-inf")

    def __contains__(self, peer: str) -> bool:
        return peer in self._viewers

    def __len__(self) -> int:
        return len(self._viewers)

    # --- connections -----------------------------------------------------------------------------

    def connected(self, peer: str, user: str, *, now: float) -> list[Action]:
        """Admit a guest with the key `user`; refuse it if there are too many."""
        most = MAX_VIEWERS.get(user, 0)
        if sum(viewer.user == user for viewer in self._viewers.values()) < most:
            self._viewers[peer] = Viewer(user, now)
            return []
        self._counters.add("viewers/too_many")
        text = f"{most} viewers are connected with the key {user!r}, the most that a learner admits"
        refuse = Refuse(reason="too_many_viewers", detail=f"{text}; close another one first")
        notes = self._peer_faults.note("viewers", "too_many", f"refused a viewer: {text}", now=now)
        return [*notes, self._send(peer, refuse), HangUp(peer)]

    def disconnected(self, peer: str) -> None:
        """Forget a viewer whose connection has ended."""
        self._viewers.pop(peer, None)

    # --- messages --------------------------------------------------------------------------------

    def receive(self, peer: str, frames: Sequence[Frame], *, now: float) -> list[Action]:
        """Handle a viewer's message; disconnect the viewer if the message breaks the rules."""
        viewer = self._viewers[peer]
        elapsed_s, viewer.received_at = now - viewer.received_at, now
        grown = viewer.budget + MAX_MESSAGES_PER_S * elapsed_s
        viewer.budget = min(grown, MAX_MESSAGES_PER_S) - 1
        if viewer.budget < 0:
            return self._drop(peer, "more messages than a viewer may send", now)
        if payload_bytes(frames) > MAX_MESSAGE_BYTES:
            return self._drop(peer, f"a message of {payload_bytes(frames)} bytes", now)
        try:
            envelope = decode_envelope(frames)
            if (fault := other_protocol(envelope)) is not None:
                refuse = Refuse(reason="protocol_version", detail=fault)
                return [self._send(peer, refuse), *self._drop(peer, fault, now)]
            message = decode_message(envelope)
        except RemoteProtocolError as error:
            return self._drop(peer, str(error), now)
        match message:
            case Watch():
                viewer.is_waiting = True
                return []
            case Operation():
                return self._on_operation(peer, viewer, message, now)
        return self._drop(peer, f"a {type(message).__name__}, which viewers do not send", now)

    def _on_operation(
        self, peer: str, viewer: Viewer, message: Operation, now: float
    ) -> list[Action]:
        if viewer.user == OPERATE:
            return [Operate(peer, message)]
        self._counters.add("viewers/read_only")
        text = f"refused to {message.act} for {one_line(message.by)}, whose key only reads"
        notes = self._peer_faults.note("viewers", "read_only", text, now=now)
        why = "this key only reads; operations need the one in keys/operate of the run's directory"
        outcome = Outcome(number=message.number, is_done=False, text=why)
        return [*notes, self._send(peer, outcome)]

    def _drop(self, peer: str, why: str, now: float) -> list[Action]:
        viewer = self._viewers.pop(peer)
        self._counters.add("viewers/disconnected")
        text = f"disconnected a viewer with the key {viewer.user!r}: {one_line(why)}"
        return [*self._peer_faults.note("viewers", "message", text, now=now), HangUp(peer)]

    # --- statuses and outcomes -------------------------------------------------------------------

    def status_made(self, data: bytes, *, now: float) -> list[Action]:
        """Send a status to the viewers that wait for one."""
        self._made_at = now
        actions: list[Action] = []
        for peer, viewer in self._viewers.items():
            if viewer.is_waiting:
                viewer.is_waiting = False
                status = Status(may_operate=viewer.user == OPERATE)
                actions.append(self._send(peer, status, data))
        return actions

    def operation_done(self, peer: str, outcome: Outcome) -> list[Action]:
        """Send an operator the outcome of an operation, if the operator is still connected."""
        return [self._send(peer, outcome)] if peer in self._viewers else []

    def _send(self, peer: str, message: Message, *payload: Frame) -> Action:
        return Send(peer, encode(message, payload, source=LEARNER_ID))

    # --- time ------------------------------------------------------------------------------------

    @property
    def deadline(self) -> float | None:
        """Time at which a status is due or a viewer counts as silent; None without viewers."""
        viewers = self._viewers.values()
        silent_at = min((each.received_at for each in viewers), default=None)
        made_at = self._made_at + STATUS_S if any(each.is_waiting for each in viewers) else None
        return earliest(None if silent_at is None else silent_at + SILENT_S, made_at)

    def expire(self, *, now: float) -> list[Action]:
        """Disconnect silent viewers, and request a status if one is due."""
        silent = [p for p, each in self._viewers.items() if now >= each.received_at + SILENT_S]
        for peer in silent:
            del self._viewers[peer]
        actions: list[Action] = [HangUp(peer) for peer in silent]
        is_wanted = any(each.is_waiting for each in self._viewers.values())
        if is_wanted and now >= self._made_at + STATUS_S:
            actions.append(MakeStatus())
        return actions
