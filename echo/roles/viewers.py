"""Serves viewers: guests that watch or operate a run.

A viewer dials the learner with one of two keys (`net/curve.py`). The key "view" allows only
reading. The key "operate" also allows commands. So the transport knows the viewer's rights before
the first message. Viewers are not nodes, and only this module handles their messages.

These rules limit the cost of a viewer for the learner:

* A viewer requests each status (Watch). A status is made at most once in STATUS_S and sent to all
  viewers that requested it. If a viewer has not read the previous status, the transport drops the
  new status.
* At most MAX_VIEWERS viewers with each key are connected. A viewer that is silent for SILENT_S is
  disconnected.
* If a viewer sends a long or malformed message, or too many messages, it is disconnected.

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
"""The names of the two keys. The run's directory has the keys in the files `keys/view` and
`keys/operate`."""
MAX_VIEWERS = {VIEW: 16, OPERATE: 4}
"""For each key, the largest number of viewers that are connected with it. The limits are separate,
so that viewers that only read cannot exclude an operator."""
STATUS_S = 0.5
"""Viewers get at most one status in this many seconds. More statuses would cost the learner time,
and would be too fast to read."""
SILENT_S = 60.0
"""A viewer that has been silent for this many seconds is disconnected. A watching viewer sends a
request every second."""
MAX_MESSAGE_BYTES = 4096
"""Largest number of bytes in a message from a viewer, summed over the frames."""
MAX_MESSAGES_PER_S = 20.0
"""A viewer that sends more messages per second is disconnected. A watching viewer sends one, and
an operator types each command."""


@dataclass(frozen=True, slots=True)
class MakeStatus(Action):
    """Action: make the status of the run and report the event StatusMade."""


@dataclass(frozen=True, slots=True)
class Operate(Action):
    """Action: carry out an operation, and report its outcome as the event OperationDone."""

    peer: str
    operation: Operation


@dataclass(frozen=True, slots=True)
class StatusMade:
    """Event: the status of the run was made. `data` is the status as JSON."""

    data: bytes


@dataclass(frozen=True, slots=True)
class OperationDone:
    """Event: an operation has succeeded or failed."""

    peer: str
    outcome: Outcome


@dataclass(slots=True)
class Viewer:
    """A connected viewer."""

    user: str
    """The name of the viewer's key."""
    received_at: float
    is_waiting: bool = False
    """Whether the viewer has requested a status and waits for it."""
    budget: float = field(default=MAX_MESSAGES_PER_S)
    """Number of messages that the viewer may still send now. The number grows by MAX_MESSAGES_PER_S
    each second."""


class Viewers:
    """Admits viewers, sends them the status, and passes on the operations of operators."""

    def __init__(self, counters: Counters, peer_faults: PeerFaults) -> None:
        """Start without viewers. `counters` counts refusals, and `peer_faults` reports them."""
        self._counters, self._peer_faults = counters, peer_faults
        self._viewers: dict[str, Viewer] = {}
        self._made_at = float("-inf")

    def __contains__(self, peer: str) -> bool:
        return peer in self._viewers

    def __len__(self) -> int:
        return len(self._viewers)

    # --- connections -----------------------------------------------------------------------------

    def connected(self, peer: str, user: str, *, now: float) -> list[Action]:
        """Admit a guest that has the key `user`.

        If too many guests have this key, refuse the guest.
        """
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
        """Remove a viewer whose connection has ended."""
        self._viewers.pop(peer, None)

    # --- messages --------------------------------------------------------------------------------

    def receive(self, peer: str, frames: Sequence[Frame], *, now: float) -> list[Action]:
        """Handle a viewer's message. If the message breaks the rules, disconnect the viewer."""
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
        """Send a status to all viewers that wait for one."""
        self._made_at = now
        actions: list[Action] = []
        for peer, viewer in self._viewers.items():
            if viewer.is_waiting:
                viewer.is_waiting = False
                status = Status(may_operate=viewer.user == OPERATE)
                actions.append(self._send(peer, status, data))
        return actions

    def operation_done(self, peer: str, outcome: Outcome) -> list[Action]:
        """If the operator who requested an operation is still connected, send the outcome to it."""
        return [self._send(peer, outcome)] if peer in self._viewers else []

    def _send(self, peer: str, message: Message, *payload: Frame) -> Action:
        return Send(peer, encode(message, payload, source=LEARNER_ID))

    # --- time ------------------------------------------------------------------------------------

    @property
    def deadline(self) -> float | None:
        """Time at which a status is due, or at which a viewer counts as silent.

        None without viewers.
        """
        viewers = self._viewers.values()
        silent_at = min((each.received_at for each in viewers), default=None)
        made_at = self._made_at + STATUS_S if any(each.is_waiting for each in viewers) else None
        return earliest(None if silent_at is None else silent_at + SILENT_S, made_at)

    def expire(self, *, now: float) -> list[Action]:
        """Disconnect the viewers that are silent. If a status is due, request it."""
        silent = [p for p, each in self._viewers.items() if now >= each.received_at + SILENT_S]
        for peer in silent:
            del self._viewers[peer]
        actions: list[Action] = [HangUp(peer) for peer in silent]
        is_wanted = any(each.is_waiting for each in self._viewers.values())
        if is_wanted and now >= self._made_at + STATUS_S:
            actions.append(MakeStatus())
        return actions
