"""The shell around a session in the simulator: what `runtime/node.py` is in a process.

It carries out what the session decides, in order, and calls `expire` at its deadline. The session
is the one that runs in production; nothing in it knows of this.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from typing import cast

from echo.core.errors import EchoError
from echo.net.transport import Frame
from echo.roles.node import Role
from echo.sim.clock import Clock
from echo.sim.network import LinkEnd, Network, Port
from echo.wire.actions import Action, Dial, HangUp, Note, Send, Stop, Work

REDIAL_S = 0.5
"""Between attempts to connect to somebody who does not answer."""
LEAST_WAIT_S = 0.001
"""A deadline that stays in the past must not hold up time, as in `runtime/node.py`."""


class Host:
    """One start of one node: a session, its links and its timer; roles derive from it."""

    def __init__(self, session: Role, port: Port, *, clock: Clock, network: Network) -> None:
        """Put a session on the network.

        Args:
            session: the node's.
            port: the node's access to the network, which outlives the process.
            clock: the time.
            network: the connections.
        """
        self.port = port
        self.clock = clock
        self.network = network
        self.is_alive = True
        self.warnings: dict[str, int] = {}
        """Warnings by their first words."""
        self.error: EchoError | None = None
        self._session = session
        self._ids = itertools.count(1)
        self._ends: dict[str, LinkEnd] = {}
        self._armed_at = math.inf
        network.listen(self)

    # --- what roles fill in ----------------------------------------------------------------------

    def connected(self, peer: str) -> list[Action]:
        """Handle that a dialled link stands."""
        return []

    def disconnected(self, peer: str, reason: str) -> list[Action]:
        """Handle that a link is gone."""
        return []

    def dialled(self, address: str, purpose: str, peer: str) -> None:
        """Handle that a Dial was carried out."""

    def on_action(self, action: Action) -> None:
        """Carry out an action that is the role's own affair."""
        raise TypeError(f"{type(action).__name__} is not for {type(self).__name__}")

    def before_expire(self) -> None:
        """Bring up to date what the session tells others."""

    def ended(self) -> None:
        """Let go of what the role holds: the process is over."""

    # --- events ----------------------------------------------------------------------------------

    def on_connected(self, end: LinkEnd) -> None:
        """Handle that a dialled link stands."""
        self.perform(self.connected(end.peer))

    def on_refused(self, end: LinkEnd, reason: str) -> None:
        """Dial again a little later."""
        self.clock.after(REDIAL_S, self._redial, end)

    def on_disconnected(self, end: LinkEnd, reason: str) -> None:
        """Handle that a link is gone."""
        if self._ends.pop(end.peer, None) is not None:
            self.perform(self.disconnected(end.peer, reason))

    def on_message(self, end: LinkEnd, frames: list[Frame]) -> None:
        """Handle a message."""
        if not end.peer:
            end.peer = f"i{end.number}"
            self._ends[end.peer] = end
        if end.peer in self._ends:
            self.perform(self._session.receive(end.peer, [*frames], now=self.clock.now))

    # --- acting ----------------------------------------------------------------------------------

    def perform(self, actions: Iterable[Action]) -> None:
        """Carry out actions in order, then arm the timer anew."""
        for action in actions:
            if not self.is_alive:
                return
            match action:
                case Send():
                    self._send(action)
                case Dial():
                    end = self._dial(action.address, f"o{next(self._ids)}")
                    self.dialled(action.address, action.purpose, end.peer)
                case HangUp():
                    self._hang_up(action.peer)
                case Note():
                    self._note(action)
                case Stop():
                    self.error = action.error
                    self.end(is_silent=False, is_orderly=action.error is None)
                case Work():
                    self.clock.at(self.clock.now, self._work, action)
                case _:
                    self.on_action(action)
        self._arm()

    def _send(self, send: Send) -> None:
        end = self._ends.get(send.peer)
        if end is not None:
            self.network.send(end, cast("list[Frame]", list(send.frames)))

    def _hang_up(self, peer: str) -> None:
        end = self._ends.pop(peer, None)
        if end is not None and end.address is not None:
            self.network.hang_up(end)

    def _dial(self, address: str, peer: str) -> LinkEnd:
        self._ends[peer] = end = self.network.dial(self, address, peer=peer)
        return end

    def _redial(self, end: LinkEnd) -> None:
        if self._ends.get(end.peer) is end and end.address is not None:
            self._dial(end.address, end.peer)

    def _note(self, note: Note) -> None:
        if note.level == "warning":
            words = " ".join(word for word in note.text.split()[:6] if word.isalpha())
            self.warnings[words] = self.warnings.get(words, 0) + 1

    def _work(self, work: Work) -> None:
        if self.is_alive:
            self.perform(self._session.worked(work, work.run(), now=self.clock.now))

    def end(self, *, is_silent: bool, is_orderly: bool = False) -> None:
        """End the process; its peers are told, unless its machine is gone with it.

        Args:
            is_silent: whether the machine is gone.
            is_orderly: whether what was sent still arrives, as where it ends by itself.
        """
        if not self.is_alive:
            return
        self.is_alive = False
        self._ends.clear()
        if is_silent:
            self.network.vanish(self)
        else:
            self.network.close(self, linger_s=math.inf if is_orderly else 0.0)
        self.ended()

    # --- time ------------------------------------------------------------------------------------

    def _arm(self) -> None:
        deadline = self._session.deadline
        if deadline is None or not self.is_alive:
            return
        at = max(deadline, self.clock.now + LEAST_WAIT_S)
        # A timer that fires too early looks again; only an earlier one must be set now.
        if at < self._armed_at:
            self._armed_at = at
            self.clock.at(at, self._on_timer, at)

    def _on_timer(self, at: float) -> None:
        if at != self._armed_at or not self.is_alive:
            return
        self._armed_at = math.inf
        self.before_expire()
        self.perform(self._session.expire(now=self.clock.now))
