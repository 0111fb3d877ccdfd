"""A simulated relay: the real session, which needs nothing else."""

from __future__ import annotations

from echo.roles.joining import Configure
from echo.roles.relay import Relay
from echo.sim.clock import Clock
from echo.sim.host import Host
from echo.sim.network import Network, Port
from echo.wire.actions import Action


class SimRelay(Host):
    """One start of one relay."""

    def __init__(self, session: Relay, port: Port, *, clock: Clock, network: Network) -> None:
        """Put a relay on the network; `start` begins."""
        super().__init__(session, port, clock=clock, network=network)
        self.session = session

    def start(self) -> None:
        """Begin to look for the learner."""
        self.perform(self.session.start(now=self.clock.now))

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
        """Build nothing; versions are forwarded by the session itself."""
        if isinstance(action, Configure):
            self.perform(self.session.configured({}, now=self.clock.now))
