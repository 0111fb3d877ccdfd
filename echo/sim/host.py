"""The shell around a session in the simulator: what `runtime/node.py` is in a process.

It carries out what the session decides, in order, and calls `expire` at its deadline. The session
is the one that runs in production; nothing in it knows of this.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from echo.core.errors import EchoError
from echo.roles.node import Role
from echo.sim.clock import Clock
from echo.sim.wires import Port, Wires
from echo.wire.actions import Action, Dial, HangUp, Note, Send, Stop, Work
from echo.wire.codec import Frame

LEAST_WAIT_S = 0.001
"""A deadline that stays in the past must not hold up time, as in `runtime/node.py`."""


class Host:
    """One start of one node: a session, its links and its timer; roles derive from it."""

    def __init__(self, session: Role, port: Port, *, clock: Clock, wires: Wires) -> None:
        """Put a session on the network.

        Args:
            session: the node's.
            port: the node's access to the network, which outlives the process.
            clock: the time.
            wires: the network.
        """
        self.port = port
        self.clock = clock
        self.wires = wires
        self.is_alive = True
        self.warnings: dict[str, int] = {}
        """Warnings by their first words."""
        self.error: EchoError | None = None
        self._session = session
        self._armed_at = math.inf
        wires.listen(self)

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

    def on_connected(self, peer: str) -> None:
        """Handle that a dialled link stands."""
        self.perform(self.connected(peer))

    def on_disconnected(self, peer: str, reason: str) -> None:
        """Handle that a link is gone."""
        self.perform(self.disconnected(peer, reason))

    def on_message(self, peer: str, frames: list[Frame]) -> None:
        """Handle a message."""
        self.perform(self._session.receive(peer, frames, now=self.clock.now))

    # --- acting ----------------------------------------------------------------------------------

    def perform(self, actions: Iterable[Action]) -> None:
        """Carry out actions in order, then arm the timer anew."""
        for action in actions:
            if not self.is_alive:
                return
            match action:
                case Send():
                    self.wires.send(self, action.peer, action.frames)
                case Dial():
                    peer = self.wires.dial(self, action.address)
                    self.dialled(action.address, action.purpose, peer)
                case HangUp():
                    self.wires.hang_up(self, action.peer)
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
        self.wires.vanish(self, is_silent=is_silent, is_orderly=is_orderly)
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
