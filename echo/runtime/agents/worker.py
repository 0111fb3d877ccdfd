"""A worker whose rollouts come from outside agents where the run says so."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import secrets

from echo.core.errors import ConfigError, StorageError
from echo.core.extras import install_command
from echo.records.files import write_file
from echo.roles.joining import Configure
from echo.roles.worker import OfferEpisodes, Withdraw
from echo.runtime.agents.sessions import AgentParts, Agents, CallSampler
from echo.runtime.worker.node import NodeWatcher, WorkerNode
from echo.wire.actions import Action

TOKEN_VARIABLE = "ECHO_AGENT_TOKEN"


class AgentWorkerNode(WorkerNode):
    """A worker that can lend its engine to agents."""

    _agents: Agents | None = None

    async def _set_up(self, configure: Configure) -> None:
        await super()._set_up(configure)
        parts = self._parts
        if parts is None or parts.agents is None:
            return
        sampler = CallSampler(parts.engine, NodeWatcher(self), threads=self.threads)
        self._agents = Agents(
            parts.agents,
            self.role,
            sampler,
            node=self,
            pool=self._reward_pool,
        )
        self.spawn(sampler.run(), name="agent-calls")
        self.spawn(self._agents.watch(), name="agent-sessions")
        self.spawn(self._serve(self._agents, parts.agents), name="endpoint")

    async def _serve(self, agents: Agents, parts: AgentParts) -> None:
        try:
            # Only here: every worker is of this class, and those without agents lack the package.
            from echo.runtime.agents.endpoint import Endpoint
        except ImportError as error:
            raise ConfigError(
                f"agent.listen needs aiohttp, which cannot be imported here ({error}): run "
                + install_command("worker", "agents")
            ) from error
        token = os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(24)
        host, _, port = parts.listen.removeprefix("tcp://").rpartition(":")
        endpoint = Endpoint(agents, token=token, log=self.log)
        async with endpoint.listening(host.strip("[]"), int(port)) as bound_port:
            url = f"http://{host}:{bound_port}"
            where = parts.endpoint_path
            try:
                write_file(where, json.dumps({"url": url, "token": token}).encode(), mode=0o600)
            except OSError as error:
                raise StorageError(f"cannot write {where}: {error}") from error
            self.log.info("agents are served at %s/v1; address and token are in %s", url, where)
            if not _is_loopback(host):
                self.log.warning(
                    "agent.listen = %s is open to other machines, and HTTP is not encrypted: keep "
                    "it inside a network that you trust, or behind a proxy with TLS",
                    parts.listen,
                )
            await asyncio.Event().wait()

    def on_action(self, action: Action) -> None:
        """Carry out what concerns a worker and its agents."""
        match action:
            case OfferEpisodes():
                assert self._agents is not None  # they ask for leases
                self._agents.take(action.leases)
            case Withdraw():
                if self._agents is not None:
                    self._agents.close()
            case _:
                super().on_action(action)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
