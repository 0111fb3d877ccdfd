"""A worker whose rollouts come from outside agents where the run says so, and else from itself."""

from __future__ import annotations

import ipaddress
import json
import os
import secrets

from echo.core.errors import ConfigError, StorageError
from echo.core.extras import install_command
from echo.protocol.joining import Configure
from echo.records.files import write_file
from echo.runtime.agent_sampling import CallSampler
from echo.runtime.agents import AgentParts, Agents
from echo.runtime.sampling import RolloutLoop
from echo.runtime.worker import WorkerNode

TOKEN_VARIABLE = "ECHO_AGENT_TOKEN"


class AgentWorkerNode(WorkerNode):
    """A worker that can lend its engine to agents."""

    _agents: Agents | None = None

    async def _set_up(self, configure: Configure) -> None:
        await super()._set_up(configure)
        parts = self._parts
        if parts is None or parts.agents is None:
            return
        sampler = CallSampler(
            parts.engine, threads=self.threads, should_stop=lambda: self.has_ended
        )
        self._agents = Agents(
            parts.agents,
            self.session,
            sampler,
            reward_pool=self._reward_pool,
            perform=self.perform,
            clock=lambda: self.now,
        )
        self.spawn(sampler.run(), name="agent-calls")
        self.spawn(self._agents.watch(), name="agent-sessions")
        self.spawn(self._serve(self._agents, parts.agents), name="endpoint")

    async def _serve(self, agents: Agents, parts: AgentParts) -> None:
        try:
            from echo.runtime.agent_http import Endpoint
        except ImportError as error:
            raise ConfigError(
                f"agent.listen needs aiohttp, which cannot be imported here ({error}): run "
                + install_command("worker", "agents")
            ) from error
        token = os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(24)
        host, _, port = parts.listen.removeprefix("tcp://").rpartition(":")

        def announce(bound_port: int) -> None:
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

        endpoint = Endpoint(agents, token=token, log=self.log)
        await endpoint.serve(host.strip("[]"), int(port), announce)

    def _sample_more(self, rollouts: RolloutLoop) -> None:
        """Offer leases to agents where there are any to come, and else sample them here."""
        parts = self._parts
        if parts is None or parts.agents is None:
            super()._sample_more(rollouts)
        elif self._agents is not None:
            num_leases = len(self.session.drafts.queue)
            size, now = parts.group_size, self.now
            drafts = self.session.take(num_leases, group_size=size, now=now)
            self._agents.take(draft.lease for draft in drafts)
            self.session.activity = "serving agents"

    async def finish_work(self) -> None:
        """Begin no more episodes; those under way may end, as far as there is time."""
        if self._agents is not None:
            self._agents.close()
        await super().finish_work()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
