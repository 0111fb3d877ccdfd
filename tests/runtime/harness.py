"""A whole run in one process and one loop: learner, relay and workers on a network on paper."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from echo.config.load import parse_config
from echo.config.schema import Config
from echo.core.monitoring.samples import TextSample
from echo.core.monitoring.status import RunStatus
from echo.net.transport import TransportOptions
from echo.runtime.identity import JoinSource
from echo.runtime.learner.node import LearnerNode
from echo.runtime.learner.setup import Options, assemble_learner, load_data
from echo.runtime.node import Node
from echo.runtime.relay import RelayNode, assemble_relay
from echo.runtime.worker.node import WorkerNode
from echo.runtime.worker.setup import assemble_worker
from echo.sim.network import Network, Port
from echo.sim.transport import SimTransport
from tests.e2e.audit import Audit, audit, read_ledger

Play = Callable[..., None]
"""Plays a scenario, a coroutine function of a `Run`, within `limit_s` seconds."""

LEARNER, RELAY = "tcp://learner:7700", "tcp://relay:7701"

OPTIONS = TransportOptions(
    heartbeat_s=0.1, dead_after_s=0.5, min_redial_s=0.02, max_redial_s=0.1, linger_s=0.2
)

SETTINGS: dict[str, Any] = {
    "run": {"name": "run", "max_steps": 3},
    "sampling": {"max_completion_tokens": 6},
    "sync": {"max_staleness": 1, "publish_period": 1},
    # An untrained model is right by chance only, so most of its groups teach nothing.
    "batch": {"group_size": 2, "groups_per_step": 2, "keep_zero_variance": True},
    "learner": {"listen": LEARNER, "device": "cpu", "num_threads": 1},
    "relay": {"listen": RELAY, "connect": [LEARNER]},
    "worker": {"connect": [LEARNER], "device": "cpu", "num_threads": 1},
    "checkpoint": {"interval_steps": 2, "keep_last": 2},
    "eval": {"interval_steps": 2, "num_prompts": 4},
    "limits": {"min_free_disk_bytes": 0},
    "network": {
        "heartbeat_s": 0.05,
        "dead_after_s": 1.0,  # more than a stall of the loop that its node does not notice
        "lease_timeout_s": 5.0,
        "reconnect_for_s": 60.0,
        "chunk_bytes": 65536,
    },
}


@dataclass
class Run:
    """One run directory, and the nodes that were started in it."""

    directory: Path
    model_dir: Path
    network: Network
    rows: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    samples: list[tuple[int, TextSample]] = field(default_factory=list)
    snapshots: list[RunStatus] = field(default_factory=list)
    is_watching: bool = True
    notices: tuple[str, ...] = ()

    def write_metrics(self, step: int, row: Mapping[str, Any]) -> None:
        self.rows.append((step, dict(row)))

    def write_samples(self, step: int, samples: Sequence[TextSample]) -> None:
        self.samples += [(step, sample) for sample in samples]

    def show(self, status: RunStatus) -> None:
        self.snapshots.append(status)

    def save(self, status: RunStatus) -> None:
        self.saved = status

    @property
    def run_dir(self) -> Path:
        return self.directory / "run"

    def config(self, role: str, **sections: dict[str, Any]) -> Config:
        table: dict[str, Any] = {name: dict(section) for name, section in SETTINGS.items()}
        table["run"]["dir"] = str(self.directory)
        if role == "learner":
            table["model"] = {"name": str(self.model_dir)}
        else:
            for name in ("sampling", "sync", "batch"):
                del table[name]  # inherited
        for name, section in sections.items():
            table.setdefault(name, {}).update(section)
        return parse_config(table, role=role)

    async def transport(self, name: str, listen: str | None) -> SimTransport:
        transport = SimTransport(self.network, Port(name, address=listen), OPTIONS)
        await transport.start()
        return transport

    async def learner(self, *, resume: bool = False, **sections: dict[str, Any]) -> LearnerNode:
        config = self.config("learner", **sections)
        data = load_data(config)
        transport = await self.transport("learner", config.learner.listen)
        try:
            options = Options(follower=self, log=logging.getLogger("test.learner"), resume=resume)
            return assemble_learner(config, data, transport, options)
        except BaseException:
            await transport.close()
            raise

    async def relay(self, **sections: dict[str, Any]) -> RelayNode:
        config = self.config("relay", **{"relay": {"name": "relay"}, **sections})
        transport = await self.transport("relay", config.relay.listen)
        join = JoinSource("relay", config.relay.connect, config.security, config.run_dir)
        log = logging.getLogger("test.relay")
        return assemble_relay(config.relay, config.network, join, transport, log=log)

    async def worker(self, name: str, **sections: dict[str, Any]) -> WorkerNode:
        worker = {"name": name, **sections.pop("worker", {})}
        config = self.config("worker", worker=worker, **sections)
        transport = await self.transport(name, config.worker.listen)
        return assemble_worker(config, transport, log=logging.getLogger(f"test.{name}"))

    def ledger(self, kind: str | None = None) -> list[dict[str, Any]]:
        records = read_ledger(self.run_dir)
        return [record for record in records if kind in (None, record["kind"])]

    def audit(self, *, max_staleness: int = 1) -> Audit:
        """Check staleness and exactly-once of a run that is over, from the ledger alone."""
        numbers = {"max_staleness": max_staleness, "groups_per_step": 2}
        found = audit(self.ledger(), is_finished=True, **numbers)
        assert found.problems == []
        return found


@asynccontextmanager
async def running(*nodes: Node) -> AsyncIterator[list[asyncio.Task[str]]]:
    """Run nodes beside the block; those still running at its end are killed."""
    tasks = [asyncio.create_task(node.run()) for node in nodes]
    await asyncio.sleep(0)  # a node that is killed before it begins would release nothing
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
