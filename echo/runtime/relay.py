"""The relay role: a session and a transport; it needs one open port, no GPU and no torch."""

from __future__ import annotations

import logging

from echo.errors import LocalProtocolError
from echo.protocol.actions import Action, Configure, VersionArrived
from echo.protocol.node_session import NodeSession
from echo.protocol.relay_session import RelaySession
from echo.runtime.node import Node
from echo.runtime.transport import Transport


class DialingNode(Node):
    """What relay and worker share: a session that dials out."""

    session: NodeSession

    def connected(self, peer: str) -> list[Action]:
        """Handle that a dialled link stands."""
        return self.session.connected(peer, now=self.now)

    def disconnected(self, peer: str, reason: str) -> list[Action]:
        """Handle that a link is gone."""
        return self.session.disconnected(peer, reason, now=self.now)

    def dialled(self, address: str, purpose: str, peer: str) -> None:
        """Handle that a Dial was carried out."""
        self.session.dialled(address, purpose, peer)

    async def drain(self) -> None:
        """Say goodbye, so that nobody waits for this node; the transport delivers it."""
        self.session.is_leaving = True
        self.perform(self.session.leave("stopped by its operator"))


class RelayNode(DialingNode):
    """A relay."""

    def __init__(self, session: RelaySession, transport: Transport, *, log: logging.Logger) -> None:
        """Join the parts; `run` starts them."""
        super().__init__(session, transport, log=log)
        self.session: RelaySession = session

    async def work(self) -> None:
        """Start looking for the learner; everything else happens in the session."""
        self.perform(self.session.start(now=self.now))

    def on_action(self, action: Action) -> None:
        """Carry out what concerns a relay."""
        match action:
            case VersionArrived():
                self.log.info("holds %s", action.version)
            case Configure():
                # A relay has no task and no engine: it is ready as it is.
                self.perform(self.session.configured({}, now=self.now))
            case _:
                raise LocalProtocolError(f"a relay cannot {type(action).__name__}")
