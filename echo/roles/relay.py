"""The relay's role: forwards routed messages without decoding them.

The relay sends messages for the learner over its control link. It sends a message for a node over
the link on which the node's last message arrived. If a message cannot be forwarded, the relay drops
and counts the message. Senders repeat all important messages (`wire/messages.py`), so a relay keeps
no copies, and its death costs only time.
"""

from __future__ import annotations

from echo.core.errors import RemoteProtocolError
from echo.core.timers import RecentMap
from echo.roles.joining import NodeSettings
from echo.roles.node import DialingRole
from echo.weights.broadcast import Broadcast
from echo.wire.actions import MAX_ROUTES, Action, Send
from echo.wire.codec import Envelope, Frame, forwarded
from echo.wire.messages import LEARNER_ID


class Relay(DialingRole):
    """The role of a relay. It dials, and it forwards routed messages to and from other nodes."""

    def __init__(self, settings: NodeSettings, broadcast: Broadcast, *, now: float) -> None:
        super().__init__(settings, broadcast, now=now)
        broadcast.patch_mode = "now"
        self._routes: RecentMap[str, str] = RecentMap(max_entries=MAX_ROUTES)

    def forward(self, peer: str, envelope: Envelope, frames: list[Frame]) -> list[Action]:
        """Forward a routed message towards its target.

        If there is no route to the target, drop the message.
        """
        onward = forwarded(envelope, frames[1:])
        if envelope.target == LEARNER_ID:
            self._routes[envelope.source] = peer
            if not self.control.node_id:
                self.counters.add("dropped/no_link")
                return []
            self.counters.add("forwarded/up")
            return [Send(self.control.peer, onward)]
        if not self.control.has(peer):
            raise RemoteProtocolError(
                f"a message for {envelope.target} that did not come from the learner's side"
            )
        next_peer = self._routes.get(envelope.target)
        if next_peer is None:
            self.counters.add("dropped/no_route")
            return []
        self.counters.add("forwarded/down")
        return [Send(next_peer, onward)]

    def disconnected(self, peer: str, reason: str, *, now: float) -> list[Action]:
        """Handle the loss of a link. Drop all routes that lead over this link."""
        self._routes.discard_value(peer)
        return super().disconnected(peer, reason, now=now)
