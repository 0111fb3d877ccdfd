"""Set up a relay from its sections of the configuration."""

from __future__ import annotations

import asyncio
import logging

from echo.config.schema import NetworkSection, RelaySection
from echo.core.errors import LocalProtocolError
from echo.net.transport import Transport
from echo.roles.joining import Built, Configure
from echo.roles.relay import Relay
from echo.runtime import node
from echo.runtime.disk_store import open_store
from echo.runtime.identity import JoinSource
from echo.runtime.node import DialingNode
from echo.runtime.threads import Threads
from echo.weights.receiver import VersionArrived, VersionAudited, VersionDamaged
from echo.wire.actions import Action, Note


class RelayNode(DialingNode):
    """Runs a relay's role, and logs the versions that the relay has."""

    def on_action(self, action: Action) -> None:
        match action:
            case VersionArrived():
                self.perform([Note("info", f"holds {action.version}", "holds")])
            case VersionAudited() | VersionDamaged():
                pass  # the role fetches a damaged version again
            case Configure():
                self.spawn(self._set_up(), name="set-up")
            case _:
                raise LocalProtocolError(f"a relay cannot {type(action).__name__}")

    async def _set_up(self) -> None:
        """Recover stored versions, then report Built."""
        await self.recover()
        self.report(Built({}))


async def build_relay(
    section: RelaySection,
    network: NetworkSection,
    join: JoinSource,
    *,
    profile: str,
    log: logging.Logger,
) -> RelayNode:
    """Return a listening relay that is ready to run.

    Raises:
        EchoError: if the relay cannot start. The message is for the user.
    """
    transport = await node.start_transport(network, section.listen, join.keys(), listens_later=True)
    node.warn_of_kernel(section.listen, *join.addresses(), profile=profile, log=log)
    try:
        relay = assemble_relay(section, network, join, transport, log=log)
        # Only after its files are open: strangers' connections could use up the file descriptors.
        transport.listen()
    except BaseException:
        await transport.close()
        raise
    return relay


def assemble_relay(
    section: RelaySection,
    network: NetworkSection,
    join: JoinSource,
    transport: Transport,
    *,
    threads: Threads | None = None,
    log: logging.Logger,
) -> RelayNode:
    """Return a relay on a started transport. The port is not opened."""
    settings = node.node_settings(section, network, join, transport.listen_address, log=log)
    version_store = open_store(network.store_dir, network.store_bytes)
    role = Relay(
        settings,
        node.make_broadcast(settings.node_id, network, version_store),
        now=asyncio.get_running_loop().time(),
    )
    return RelayNode(role, transport, version_store=version_store, threads=threads, log=log)
