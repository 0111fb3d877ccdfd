"""Simulates a fleet: builds the nodes of a scenario, runs them in virtual time, records a history.

The learner, the relays and the roles of workers run their real code on an event loop with virtual
time (`clock.py`) and a simulated network (`network.py`). Simulated times replace the engines, the
trainer and the disk (`timing.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import random
from collections.abc import Iterator
from typing import Any

from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo.config.fleet_schema import LEARNER_REGION
from echo.core.errors import EchoError
from echo.core.price import Price
from echo.core.rollout import MAX_UNACKED_GROUPS
from echo.fleet.market import Offer
from echo.leases.partials import PartialRules
from echo.leases.worker.outbox import Outbox
from echo.net.transport import TransportOptions
from echo.roles.joining import NodeSettings
from echo.roles.relay import Relay
from echo.roles.worker.departure import ReleaseTerms
from echo.roles.worker.engine_facts import EngineFacts
from echo.roles.worker.worker import Worker
from echo.runtime.identity import Identity
from echo.runtime.node import Node
from echo.runtime.relay import RelayNode
from echo.sim.clock import InlineThreads, VirtualLoop
from echo.sim.faults import Faults, SimulatedSite
from echo.sim.learner import GIVE_UP_S, GIVE_UP_STEPS, LEARNER_ADDRESS, RUN_ID, SimLearner
from echo.sim.lengths import Groups
from echo.sim.network import Network, Port, Route
from echo.sim.scenario import Scenario
from echo.sim.summary import History, Rental
from echo.sim.timing import EngineModel
from echo.sim.transport import SimTransport
from echo.sim.versions import CHUNK_BYTES, SharedStore, Versions
from echo.sim.worker import SimWorker, WorkerTimes
from echo.weights.broadcast import Broadcast
from echo.wire.seals import SealKeys

WINDOW_BYTES = 8 << 20
"""At first, a child requests at most this many bytes ahead. The number is large because simulated
chunks are large."""

_log = logging.getLogger("echo.sim")
# Nodes' reports to operators are dropped: the history has their content.
_log.addHandler(logging.NullHandler())
_log.propagate = False


class Simulation:
    """One run of a scenario in the simulator."""

    def __init__(self, scenario: Scenario) -> None:
        """Build the scenario's network and sites. The nodes start when `run` is called."""
        self.scenario = scenario
        self.loop = VirtualLoop()
        self.history = History()
        job, settings = scenario.job, scenario.settings
        lengths = scenario.group_lengths()
        self.groups = Groups(lengths, upload_bytes_per_token=job.upload_bytes_per_token)
        seed_bytes = blake3(f"{settings.seed}/key".encode()).digest()
        self._identity = Identity(RUN_ID, Ed25519PrivateKey.from_private_bytes(seed_bytes))
        self._versions = self._make_versions()
        self.network = Network(
            seed=settings.seed,
            weight_scale=self._versions.scale,
            groups=self.groups,
        )
        self.history.traffic = self.network.traffic
        for region in scenario.fleet.regions.values():
            route = Route(bytes_per_s=region.bytes_per_s, latency_s=region.latency_s)
            self.network.add_region(region.name, route)
        self.version_store = SharedStore()
        self._options = TransportOptions(dead_after_s=settings.dead_after_s)
        self._num_starts = 0
        uplink = scenario.fleet.uplink_bytes_per_s
        self._learner_port = Port("learner", LEARNER_REGION, uplink, uplink, LEARNER_ADDRESS)
        self.sites = [self._make_site(name, offer) for name, offer in scenario.nodes()]
        self.by_name = {site.name: site for site in self.sites}
        self.learner: SimLearner
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._ended: asyncio.Future[str] = self.loop.create_future()
        self.loop.set_exception_handler(self._on_fault)

    # --- building --------------------------------------------------------------------------------

    def _make_versions(self) -> Versions:
        job, settings = self.scenario.job, self.scenario.settings
        return Versions(
            identity=self._identity,
            num_chunks=settings.chunks_per_version,
            version_bytes=job.version_bytes,
        )

    def _broadcast(self, node_id: str) -> Broadcast:
        settings, scale = self.scenario.settings, self._versions.scale
        chunk_bytes = CHUNK_BYTES * scale
        return Broadcast(
            node_id=node_id,
            window_bytes=max(1, math.ceil(max(WINDOW_BYTES, chunk_bytes) / scale)),
            # Large chunks take longer than a heartbeat, so allow a longer silence.
            stall_s=max(0.5, settings.heartbeat_s, 4 * chunk_bytes / self._slowest_bytes_per_s()),
            version_store=self.version_store,
        )

    def _slowest_bytes_per_s(self) -> float:
        fleet = self.scenario.fleet
        rates = [fleet.uplink_bytes_per_s]
        for offer, count in zip(fleet.offers, self.scenario.counts, strict=True):
            if count:
                rates += [fleet.link_bytes_per_s(offer), offer.down_bytes_per_s]
        return min(rates)

    def _transport(self, port: Port) -> SimTransport:
        transport = SimTransport(self.network, port, self._options)
        self.network.listen(transport)
        return transport

    def _start(self, node: Node) -> None:
        task = self.loop.create_task(self._run(node))
        self._tasks[task] = None
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        del self._tasks[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _on_fault(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """End the simulation, because a callback of the loop has raised an exception."""
        self._fail(context.get("exception") or RuntimeError(context["message"]))

    def _fail(self, error: BaseException) -> None:
        """End the simulation, because an unexpected exception has occurred."""
        if not self._ended.done():
            self._ended.set_exception(error)

    async def _run(self, node: Node) -> None:
        try:
            await node.run()
        except EchoError as error:
            if node is self.learner:
                self.end(str(error))

    def _start_learner(self) -> None:
        self.learner = SimLearner(
            self.scenario,
            self.groups,
            self.history,
            self._transport(self._learner_port),
            identity=self._identity,
            versions=self._versions,
            broadcast=self._broadcast("learner"),
            end=self.end,
        )
        self._start(self.learner)

    def _start_relay(self, region_name: str, bytes_per_s: float) -> None:
        region = self.scenario.fleet.regions[region_name]
        address = _relay_address(region_name)
        port = Port(f"relay-{region_name}", region_name, bytes_per_s, bytes_per_s, address)
        price = Price(per_h=region.relay_price_per_h)
        settings = self._node_settings(port, "relay", LEARNER_ADDRESS, price)
        role = Relay(settings, self._broadcast(port.name), now=0.0)
        self._start(RelayNode(role, self._transport(port), threads=InlineThreads(), log=_log))

    def _node_settings(self, port: Port, role: str, address: str, price: Price) -> NodeSettings:
        settings = self.scenario.settings
        self._num_starts += 1
        return NodeSettings(
            node_id=port.name,
            role=role,
            incarnation=f"{self._num_starts}",
            addresses=(address,),
            advertise=port.address,
            echo_version="simulated",
            reconnect_for_s=settings.reconnect_for_s,
            max_image_bytes=1 << 40,
            digests={},
            seal_keys=SealKeys(f"{port.name}/{self._num_starts}".encode()),
            heartbeat_s=settings.heartbeat_s,
            dead_after_s=settings.dead_after_s,
            region=port.region,
            price_per_gb=price.per_gb,
            price=price,
        )

    def _make_site(self, name: str, offer: Offer) -> SimulatedSite:
        address = f"tcp://{name}:7702" if offer.can_listen else None
        port = Port(name, offer.region, offer.up_bytes_per_s, offer.down_bytes_per_s, address)
        settings = self.scenario.settings
        chance = random.Random(f"{settings.seed}/speed/{name}")
        factor = max(0.1, chance.gauss(1.0, settings.speed_spread))
        return SimulatedSite(name, offer, port, offer.tokens_per_s * factor)

    def _price(self, offer: Offer) -> Price:
        """Return what a node costs at present. The price of traffic is per simulated GB."""
        return Price(
            per_h=self.scenario.price_per_h(offer, self.loop.time()),
            per_gb=offer.price_per_gb * self._versions.scale,
            losses_per_h=offer.losses_per_h,
        )

    def start_worker(self, site: SimulatedSite) -> None:
        """Start the process of a worker at a site. From now on, the site's machine costs money."""
        scenario, now = self.scenario, self.loop.time()
        job, settings, offer = scenario.job, scenario.settings, site.offer
        has_relay = scenario.fleet.has_relay(offer)
        address = _relay_address(offer.region) if has_relay else LEARNER_ADDRESS
        node_settings = self._node_settings(site.port, "worker", address, self._price(offer))
        outbox = Outbox(
            max_deliveries=MAX_UNACKED_GROUPS, retry_s=max(2.0, 2 * settings.heartbeat_s)
        )
        terms = ReleaseTerms(standby_s=settings.release_after_s)
        broadcast = self._broadcast(site.name)
        role = Worker(node_settings, broadcast, outbox, terms=terms, now=now)
        engine = EngineModel(
            tokens_per_s=site.tokens_per_s,
            concurrency=offer.concurrency,
            group_size=job.group_size,
            alone_speedup=settings.alone_speedup,
        )
        site.worker = SimWorker(
            role,
            self._transport(site.port),
            engine=engine,
            groups=self.groups,
            facts=EngineFacts(
                group_size=job.group_size,
                groups_per_batch=engine.groups_per_batch,
                is_continuous=True,
                rules=PartialRules(ship_s=None),
            ),
            times=WorkerTimes(
                setup_s=settings.setup_s,
                swap_s=settings.swap_s,
                is_pausing=job.has_pausing_workers,
            ),
            on_end=self._worker_ended,
        )
        if site.rental is None:
            site.rental = Rental(site.name, offer, now)
            self.history.rentals.append(site.rental)
        self._start(site.worker)

    # --- ends and returns ------------------------------------------------------------------------

    def _worker_ended(self, worker: SimWorker) -> None:
        """Record that a worker has ended. Add the tokens that it sampled to the history.

        If the worker has given its machine back, the site is not used again.
        """
        self.history.tokens_made += worker.engine.tokens_made
        site = self.by_name[worker.name]
        if site.worker is not worker:
            return
        site.worker = None
        if worker.is_released:
            site.give_back(self.loop.time())
            site.is_given_up = True

    def kill(self, worker: SimWorker, *, is_silent: bool) -> None:
        """End the process of a worker. Messages that the worker has not sent are lost.

        If `is_silent`, the machine is also lost, and peers are not notified.
        """
        worker.stop("killed")
        worker.link.kill(is_silent=is_silent)

    def end(self, reason: str) -> None:
        """End the run. `reason` says why; it is empty after the last step."""
        if not self._ended.done():
            self._ended.set_result(reason)

    # --- running ---------------------------------------------------------------------------------

    def run(self) -> History:
        """Simulate until the run ends, and return the history of the run."""
        with rare_collections(), asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(self._main())
        return self.history

    async def _main(self) -> None:
        history, settings = self.history, self.scenario.settings
        self._start_learner()
        for name, region in self.scenario.fleet.regions.items():
            if region.relay_bytes_per_s is not None:
                self._start_relay(name, region.relay_bytes_per_s)
        apart_s = settings.join_within_s / max(1, len(self.sites))
        faults = Faults(self)
        for number, site in enumerate(self.sites):
            self.loop.call_at(number * apart_s, faults.end_absence, site)
        faults.begin()
        self._give_up_later()
        history.end = await self._ended
        history.ended_at, history.num_events = self.loop.time(), self.loop.num_calls
        history.counters = self.learner.role.counters.as_dict()
        waiting = self.learner.waiting()
        history.tokens_in_flight = sum(waiting.values())
        for site in self.sites:
            if site.worker is not None:
                history.tokens_in_flight += site.worker.tokens_in_flight(waiting)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _give_up_later(self) -> None:
        """End the run if its last step, or its start, was too long ago. Else check again later."""
        steps, job = self.history.steps, self.scenario.job
        patience_s = max(GIVE_UP_S, GIVE_UP_STEPS * job.train_s)
        give_up_at = patience_s + (steps[-1].time_s if steps else 0.0)
        if self.loop.time() > give_up_at:
            self.end(f"no step within {patience_s:.0f} s")
        else:
            self.loop.call_at(give_up_at + 0.1, self._give_up_later)


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Within the `with` block, run the garbage collector less often.

    Most objects of a simulation live long, and few are in reference cycles.
    """
    before = gc.get_threshold()
    gc.set_threshold(50_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _relay_address(region: str) -> str:
    return f"tcp://relay-{region}:7701"
