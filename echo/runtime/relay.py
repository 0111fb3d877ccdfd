"""Set up a relay from its configuration."""

from __future__ import annotations

import asyncio
import logging

from echo.config.schema import Config
from echo.core.errors import LocalProtocolError
from echo.net.transport import Transport
from echo.roles.joining import Configure
from echo.roles.relay import Relay
from echo.runtime import node
from echo.runtime.disk_store import open_store
from echo.runtime.event_log import EventLog
from echo.runtime.identity import dial_addresses, node_keys
from echo.runtime.node import DialingNode
from echo.runtime.threads import Threads
from echo.weights.receiver import VersionArrived, VersionAudited, VersionDamaged
from echo.wire.actions import Action, Note


class RelayNode(DialingNode):
    """A relay."""

    def on_action(self, action: Action) -> None:
        """Carry out what concerns a relay."""
        match action:
            case VersionArrived():
                self.perform([Note("info", f"holds {action.version}", "holds")])
            case VersionAudited() | VersionDamaged():
                pass  # the role fetches it anew
            case Configure():
                self.spawn(self._set_up(), name="set-up")
            case _:
                raise LocalProtocolError(f"a relay cannot {type(action).__name__}")

    async def _set_up(self) -> None:
        """Be ready: a relay has no task and no engine, only what it held before."""
        await self.recover()
        self.perform(self.role.configured({}, now=self.now))


async def build_relay(
    config: Config, *, log: logging.Logger, events: EventLog | None = None
) -> RelayNode:
    """Return a relay that is ready to run, listening already.

    Raises:
        EchoError: if something does not fit; the message is for the user.
    """
    keys = node_keys(config, "relay")
    transport = await node.start_transport(config.network, config.relay.listen, keys)
    node.tell_of_kernel(config, config.relay.listen, *dial_addresses(config, "relay"), log=log)
    try:
        return assemble_relay(config, transport, log=log, events=events)
    except BaseException:
        await transport.close()
        raise


def assemble_relay(
    config: Config,
    transport: Transport,
    *,
    threads: Threads | None = None,
    log: logging.Logger,
    events: EventLog | None = None,
) -> RelayNode:
    """Join a relay on a transport that has been started; otherwise as `build_relay`."""
    events = events or EventLog()
    settings = node.node_settings(config, "relay", transport.listen_address, log=log, events=events)
    version_store = open_store(config.network.store_dir, config.network.store_bytes)
    role = events.build(
        "role",
        Relay,
        settings,
        node.make_broadcast(settings.node_id, config.network, version_store, events=events),
        now=asyncio.get_running_loop().time(),
    )
    relay = RelayNode(role, transport, version_store=version_store, threads=threads, log=log)
    relay.at_release.append(events.close)
    return relay
