"""Spike: real nodes on the virtual loop."""

from __future__ import annotations

import asyncio
import heapq
import logging
import math
import random
from functools import lru_cache
from typing import Any

from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo.config.load import parse_config
from echo.config.schema import Config
from echo.core.buffer import StalenessBuffer
from echo.core.errors import EchoError
from echo.core.price import Price
from echo.core.rollout import PolicyVersion
from echo.leases.book import LeaseBook
from echo.leases.outbox import MAX_UNACKED_GROUPS, Outbox
from echo.leases.scheduler import LeaseSettings, RunState
from echo.net.transport import Connected, Disconnected, Received, Transport, TransportOptions
from echo.net.transport import TransportStats
from echo.roles.joining import AdmissionSettings, Configure, NodeSettings
from echo.roles.learner import Learner, LearnerSettings
from echo.roles.relay import Relay
from echo.roles.worker import LeaseCancelled, LeasesChanged, Worker
from echo.runtime.identity import Identity
from echo.runtime.learner.cost import ActivationSettings, CostTerms, spent_before
from echo.runtime.learner.node import LearnerNode, OpenedRun
from echo.runtime.learner.resume import begin, enter, recover
from echo.runtime.node import DialingNode
from echo.runtime.relay import RelayNode
from echo.sim.clock import InlineThreads, VirtualLoop
from echo.sim.engine import EngineModel
from echo.sim.faults import Faults
from echo.sim.groups import Groups
from echo.sim.learner_setup import (
    LEARNER_ADDRESS,
    LOST_WORKER,
    RUN_ID,
    UNBOUNDED,
    BlankPrompts,
    _egress_per_gb,
)
from echo.sim.records import BillRecord, History, Rental, StepRecord
from echo.sim.scenario import LEARNER_REGION, Scenario
from echo.sim.simulation import WINDOW_BYTES, _relay_address, rare_collections
from echo.sim.site import Site
from echo.sim.timing import Disk, LearnerThreads, MemoryCheckpoints, MemoryLedger, TimedTrainer
from echo.sim.version_store import SharedStore
from echo.sim.versions import CHUNK_BYTES, Versions
from echo.sim.wires import Port, Wires
from echo.sim.worker import make_group
from echo.weights.broadcast import Broadcast
from echo.weights.receiver import VersionArrived
from echo.weights.topology.sites import ASSUMED_BYTES_PER_S
from echo.weights.topology.sites import Site as PlanSite
from echo.wire.actions import Action
from echo.wire.messages import LEARNER_ID, Goodbye

log = logging.getLogger("echo.sim")
log.setLevel(logging.ERROR)
GIVE_UP_STEPS = 30


class LoopClock:
    """Clock of the wires on a loop."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop

    @property
    def now(self) -> float:
        return self.loop._now

    def at(self, instant: float, call: Any, *arguments: Any) -> None:
        self.loop.call_at(max(instant, self.loop._now), call, *arguments)

    def after(self, delay_s: float, call: Any, *arguments: Any) -> None:
        self.loop.call_at(self.loop._now + delay_s, call, *arguments)


class WireTransport(Transport):
    def __init__(self, wires: Wires, port: Port) -> None:
        self.wires, self.port = wires, port
        self.options = OPTIONS
        self.is_alive = True
        self.on_dial_failed = None
        self._inbox: list[Any] = []
        self._waiter: Any = None
        self._dialled: dict[str, str] = {}
        wires.listen(self)

    @property
    def listen_address(self):
        return self.port.address

    async def start(self):
        pass

    def dial(self, address):
        peer = self.wires.dial(self, address)
        self._dialled[peer] = address
        return peer

    def hang_up(self, peer):
        self.wires.hang_up(self, peer)

    def send(self, peer, frames):
        return self.wires.send(self, peer, frames)

    async def receive(self):
        while not self._inbox:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        events, self._inbox = self._inbox, []
        return events

    def _put(self, event):
        self._inbox.append(event)
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def on_connected(self, peer):
        self._put(Connected(peer, self._dialled[peer]))

    def on_disconnected(self, peer, reason):
        self._put(Disconnected(peer, reason))

    def on_message(self, peer, frames):
        self._put(Received(peer, frames))

    async def close(self):
        self.vanish(is_silent=False, is_orderly=True)

    def vanish(self, *, is_silent, is_orderly=False):
        if self.is_alive:
            self.is_alive = False
            self.wires.vanish(self, is_silent=is_silent, is_orderly=is_orderly)

    def stats(self):
        return TransportStats()


OPTIONS = TransportOptions()


class SimWorker(DialingNode):
    def __init__(self, session, transport, *, simulation, site, engine, max_groups) -> None:
        super().__init__(session, transport, threads=InlineThreads(), log=log)
        self.session = session
        self.engine = engine
        self.site = site
        self._simulation = simulation
        scenario = simulation.scenario
        self._groups = simulation.groups
        self._group_size = scenario.job.group_size
        self._max_groups = max_groups
        self._settings = scenario.settings
        self._is_pausing = scenario.job.has_pausing_workers
        self.is_released = False
        self._is_installing = False
        self._done_at = -1.0
        self.loop = simulation.loop

    async def work(self) -> None:
        self.perform(self.session.start(now=self.now))

    def _receive(self, peer, frames):
        actions = super()._receive(peer, frames)
        if self._is_pausing:
            self._pause()
        return actions

    def on_action(self, action: Action) -> None:
        match action:
            case Configure():
                self.loop.call_later(self._settings.setup_s, self._configured)
            case LeasesChanged():
                self._await_retirement()
                self._sample_more()
            case VersionArrived():
                self._install_newest()
            case LeaseCancelled():
                pass
            case _:
                raise TypeError(action)

    def _on_timer(self) -> None:
        self.advance()
        super()._on_timer()

    def advance(self) -> None:
        self.engine.advance(self.loop._now)
        for group in self.engine.groups:
            self.session.progress(group.lease, int(group.num_tokens))

    def _await_retirement(self) -> None:
        since, keep_s = self.session.standby_since, self._settings.release_after_s
        if since is not None and keep_s is not None:
            self.loop.call_at(since + keep_s, self._retire, since)

    def _retire(self, since: float) -> None:
        if self.has_ended or self.session.is_leaving or self.session.standby_since != since:
            return
        if self.engine.groups or len(self.session.outbox) or not self.session.is_admitted:
            self.loop.call_later(5.0, self._retire, since)
            return
        self.session.is_leaving = self.is_released = True
        self.perform(self.session.to_learner(Goodbye(reason="on standby", is_released=True)))
        self.stop("released")

    def _configured(self) -> None:
        if not self.has_ended:
            self.session.num_places = self.engine.groups_per_batch
            self.session.max_groups = self._max_groups
            self.perform(self.session.configured({}, now=self.now))

    def _install_newest(self) -> None:
        version, installed = self.session.broadcast.newest_complete, self.session.installed_version
        if version is None or self._is_installing or (installed and version <= installed):
            return
        self._is_installing = True
        self.loop.call_later(self._settings.swap_s, self._installed, version)

    def _installed(self, version: PolicyVersion) -> None:
        self._is_installing = False
        if self.has_ended:
            return
        session, now = self.session, self.now
        self.engine.install(version, now=now)
        session.installed_version = version
        self.advance()
        self.perform(session.heartbeat(now=now) if session.is_admitted else [])
        self._install_newest()
        if self._is_pausing:
            self._pause()
        self._sample_more()

    def _pause(self) -> None:
        is_fetching = self.session.broadcast.fetching is not None or self._is_installing
        if self.engine.version is not None and is_fetching != self.engine.is_paused:
            self.engine.pause(is_fetching, now=self.now)
            self._await_next()

    def tokens_in_flight(self, received) -> float:
        running = sum(group.num_tokens for group in self.engine.groups)
        ids = {group_id for group_id, _ in self.session.outbox.keys} - set(received)
        return running + sum(self._groups.waiting(group_id) for group_id in sorted(ids))

    def set_rate(self, tokens_per_s: float) -> None:
        self.engine.set_rate(tokens_per_s, now=self.loop._now)
        self._await_next()

    def _sample_more(self) -> None:
        if self.engine.version is None or self.has_ended:
            return
        now = self.loop._now
        for partial in self.session.take(self.engine.space, group_size=self._group_size, now=now):
            self.engine.begin(partial.lease, self._groups.length(partial.lease.group_id), now=now)
        self.session.activity = "sampling" if self.engine.groups else "waiting for leases"
        self._await_next()

    def _await_next(self) -> None:
        at = self.engine.next_at
        if at != self._done_at and at < math.inf:
            self._done_at = at
            self.loop.call_at(at, self._look, at)

    def _look(self, at: float) -> None:
        if at != self._done_at or self.has_ended:
            return
        self._done_at = -1.0
        for running in self.engine.finished(now=self.loop._now):
            lease, session = running.lease, self.session
            session.tokens_sampled += running.length.num_tokens
            shares = running.shares()
            self._groups.sampled(lease, shares)
            group = make_group(
                lease,
                [version for version, _ in shares],
                worker_id=session.settings.node_id,
                group_size=self._group_size,
            )
            self.perform(session.finished(group, now=self.now))
        self._sample_more()


@lru_cache(maxsize=1)
def base_config() -> Config:
    return parse_config({"model": {"name": "simulated"}}, role="learner")


def make_config(scenario: Scenario, *, scale: float) -> Config:
    base, job, settings, rule = base_config(), scenario.job, scenario.settings, scenario.activation
    update = {
        "run": {"max_steps": settings.num_steps},
        "batch": {"groups_per_step": job.groups_per_step},
        "sync": {
            "max_staleness": job.max_staleness,
            "publish_period": "auto" if scenario.is_auto_period else job.publish_period,
        },
        "network": {
            "heartbeat_s": settings.heartbeat_s,
            "reconnect_for_s": settings.reconnect_for_s,
            "price_per_gb": _egress_per_gb(scenario) * scale,
            "codec": "full" if settings.image_bytes is None else "delta",
        },
        "learner": {"price_per_h": job.learner_price_per_h},
        "activation": {
            "budget_per_run": None
            if rule is None or math.isinf(rule.budget_per_run)
            else rule.budget_per_run
        },
    }
    sections = {
        name: getattr(base, name).model_copy(update=values) for name, values in update.items()
    }
    return base.model_copy(update=sections)


class Spike:
    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.loop = VirtualLoop()
        self.clock = LoopClock(self.loop)
        self.history = History()
        job, settings = scenario.job, scenario.settings
        self.groups = Groups(
            scenario.group_lengths(), upload_bytes_per_token=job.upload_bytes_per_token
        )
        seed_bytes = blake3(f"{settings.seed}/key".encode()).digest()
        self.identity = Identity(RUN_ID, Ed25519PrivateKey.from_private_bytes(seed_bytes))
        self._versions = self._make_versions()
        self.wires = Wires(
            self.clock,  # type: ignore
            seed=settings.seed,
            weight_scale=self._versions.scale,
            group_bytes=self.groups.num_bytes,
            dead_after_s=settings.dead_after_s,
        )
        self.history.traffic = self.wires.traffic
        for region in scenario.fleet.regions.values():
            self.wires.add_region(region.name, scenario.path(region))
        self.version_store = SharedStore()
        self._num_starts = 0
        self.disk = Disk(self.groups, self.history, is_kept=scenario.can_learner_die)
        uplink = scenario.fleet.uplink_bytes_per_s
        self._learner_port = Port("learner", LEARNER_REGION, uplink, uplink, LEARNER_ADDRESS)
        self.sites = [self._make_site(name, offer) for name, offer in scenario.nodes()]
        self.config = make_config(scenario, scale=self._versions.scale)
        self.relays: list[Any] = []
        self.learner: Any = None
        self._ended: Any = None
        self._num_broadcasts = 0
        self._stepped_at = 0.0
        self.tasks: dict[Any, Any] = {}

    def _make_versions(self) -> Versions:
        job, settings = self.scenario.job, self.scenario.settings
        return Versions(
            identity=self.identity,
            num_chunks=settings.chunks_per_version,
            version_bytes=job.version_bytes,
            image_bytes=settings.image_bytes,
        )

    def _broadcast(self, node_id: str) -> Broadcast:
        settings, scale = self.scenario.settings, self._versions.scale
        chunk_bytes = self._versions.chunk_bytes * scale
        return Broadcast(
            node_id=node_id,
            window_bytes=max(1, math.ceil(max(WINDOW_BYTES, chunk_bytes) / scale)),
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

    def _start(self, node: Any) -> None:
        self.tasks[node] = self.loop.create_task(self._run(node))

    async def _run(self, node: Any) -> None:
        try:
            await node.run()
        except EchoError as error:
            if node is self.learner:
                self.end(str(error))
        finally:
            del self.tasks[node]
            if isinstance(node, SimWorker):
                self._worker_ended(node)

    def _make_learner(self) -> LearnerNode:
        scenario, job, settings = self.scenario, self.scenario.job, self.scenario.settings
        now = self.loop.time()
        ledger = MemoryLedger(self.disk)
        checkpoints = MemoryCheckpoints(self.disk, scenario, run_id=RUN_ID, now=now)
        spent = 0.0
        if ledger.num_records:
            start = recover(
                ledger, checkpoints, run_id=RUN_ID, max_staleness=job.max_staleness
            )
            spent = spent_before(ledger.records(), now=now)
        else:
            start = begin(ledger)
        buffer = StalenessBuffer(max_staleness=job.max_staleness, lineages=start.lineages)
        if not settings.is_paced:
            buffer.admission_staleness = UNBOUNDED
        for group in start.buffered:
            buffer.put(group)
        scale = self._versions.scale
        leases = LeaseBook(timeout_s=settings.lease_timeout_s)
        for group_id, num_attempts in sorted(start.open_attempts.items()):
            leases.adopt(group_id, num_attempts - 1, LOST_WORKER, now=now)
        session = Learner(
            LearnerSettings(
                admission=AdmissionSettings(
                    run_id=RUN_ID,
                    key=self.identity.key,
                    settings={},
                    assets={},
                    digests={},
                    heartbeat_s=settings.heartbeat_s,
                    dead_after_s=settings.dead_after_s,
                ),
                leases=LeaseSettings(
                    max_staleness=job.max_staleness if settings.is_paced else UNBOUNDED,
                    groups_per_step=job.groups_per_step,
                    group_size=job.group_size,
                    max_completion_tokens=max(1, round(job.max_completion_tokens)),
                    vocab_size=1,
                    heartbeat_s=settings.heartbeat_s,
                ),
                site=PlanSite(
                    LEARNER_ID,
                    "learner",
                    LEARNER_ADDRESS,
                    uplink_bytes_per_s=ASSUMED_BYTES_PER_S / scale,
                    region=LEARNER_REGION,
                    price_per_gb=_egress_per_gb(scenario) * scale,
                ),
                chunk_bytes=CHUNK_BYTES,
            ),
            RunState(
                leases=leases,
                lineages=start.lineages,
                step=start.step,
                next_group_id=start.next_group_id,
                finished=start.finished,
            ),
            broadcast=self._broadcast("learner"),
            buffer=buffer,
            prompts=BlankPrompts(),
        )
        enter(ledger, checkpoints, start)
        rule = scenario.activation
        activation = None
        if rule is not None:
            activation = ActivationSettings(
                groups_per_step=job.groups_per_step,
                group_size=job.group_size,
                max_completion_tokens=max(1, round(job.max_completion_tokens)),
                margin=rule.margin,
                min_dwell_s=rule.min_dwell_s,
                budget_per_h=rule.budget_per_h,
                upload_bytes_per_token=job.upload_bytes_per_token / scale,
            )
        trainer: Any = TimedTrainer(scenario, self.groups, step=start.step)
        self.trainer = trainer
        publisher: Any = self._make_versions()
        self._num_broadcasts = 0
        return LearnerNode(
            OpenedRun(
                ledger=ledger,
                checkpoints=checkpoints,
                start=start,
                costs=CostTerms(spent, activation),
                trainer=trainer,
                attribution=None,
                buffer=buffer,
                session=session,
            ),
            WireTransport(self.wires, self._learner_port),
            self.config,
            publisher=publisher,
            rewards=None,
            evaluations=None,
            export=self._exported,
            write_metrics=self._on_step,
            show=None,
            earlier=None,
            threads=LearnerThreads(scenario, trainer),
            log=log,
        )

    def _on_step(self, step: int, row: Any) -> None:
        pace = self.learner.pace
        if pace.num_broadcasts > self._num_broadcasts:
            self._num_broadcasts = pace.num_broadcasts
            self.history.broadcast(pace.broadcast_s)
        self._stepped_at = self.trainer.stepped_at
        self.history.stepped(
            StepRecord(
                step=step,
                time_s=self.trainer.stepped_at,
                waited_s=row["time/wait_for_batch"],
                trained_s=row["time/train"],
                staleness=self.trainer.staleness,
                publish_period=row["publish_period"],
                broadcast_s=row.get("broadcast/seconds"),
            )
        )
        if self.scenario.activation is not None and "cost/total" in row:
            self.history.bills.append(
                BillRecord(
                    time_s=self.loop.time(),
                    per_h=row["cost/per_hour"],
                    standby_per_h=row["cost/standby_per_hour"],
                    total=row["cost/total"],
                    num_active=row["workers/active"],
                    num_standby=row["workers/standby"],
                )
            )
        if step >= self.scenario.settings.num_steps:
            self.end("")

    def _exported(self, directory: Any, weights: Any) -> None:
        self.end("the budget of the run is spent")

    def end(self, reason: str) -> None:
        if not self._ended.done():
            self.history.end = reason
            self._ended.set_result(None)

    async def _watch(self) -> None:
        settings = self.scenario.settings
        patience_s = max(
            settings.give_up_after_s, GIVE_UP_STEPS * self.scenario.job.train_s
        )
        while self.loop.time() <= self._stepped_at + patience_s:
            await asyncio.sleep(self._stepped_at + patience_s - self.loop.time() + 1.0)
        self.end(f"no step within {patience_s:.0f} s")

    def _make_relay(self, region_name: str) -> RelayNode:
        region = self.scenario.fleet.regions[region_name]
        address = _relay_address(region_name)
        rate = region.relay_bytes_per_s or math.inf
        port = Port(f"relay-{region_name}", region_name, rate, rate, address)
        price = Price(per_h=region.relay_price_per_h)
        settings = self._node_settings(port, "relay", LEARNER_ADDRESS, price)
        session = Relay(settings, self._broadcast(port.name), now=0.0)
        return RelayNode(
            session, WireTransport(self.wires, port), threads=InlineThreads(), log=log
        )

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
            heartbeat_s=settings.heartbeat_s,
            dead_after_s=settings.dead_after_s,
            region=port.region,
            price_per_gb=price.per_gb,
            price=price,
        )

    def _make_site(self, name: str, offer: Any) -> Site:
        address = f"tcp://{name}:7702" if offer.can_listen else None
        port = Port(name, offer.region, offer.up_bytes_per_s, offer.down_bytes_per_s, address)
        settings = self.scenario.settings
        chance = random.Random(f"{settings.seed}/speed/{name}")
        factor = max(0.1, chance.gauss(1.0, settings.speed_spread))
        return Site(name, offer, port, offer.tokens_per_s * factor)

    def _price(self, offer: Any) -> Price:
        return Price(
            per_h=self.scenario.price_per_h(offer, self.loop.time()),
            per_gb=offer.price_per_gb * self._versions.scale,
            losses_per_h=offer.losses_per_h,
        )

    def start_worker(self, site: Site) -> None:
        scenario, now = self.scenario, self.loop.time()
        job, settings, offer = scenario.job, scenario.settings, site.offer
        has_relay = scenario.fleet.has_relay(offer)
        address = _relay_address(offer.region) if has_relay else LEARNER_ADDRESS
        node_settings = self._node_settings(site.port, "worker", address, self._price(offer))
        outbox = Outbox(
            max_deliveries=MAX_UNACKED_GROUPS, retry_s=max(2.0, 2 * settings.heartbeat_s)
        )
        session = Worker(node_settings, self._broadcast(site.name), outbox, now=now)
        engine = EngineModel(
            tokens_per_s=site.tokens_per_s,
            concurrency=offer.concurrency,
            group_size=job.group_size,
            alone_speedup=settings.alone_speedup,
        )
        site.worker = SimWorker(
            session,
            WireTransport(self.wires, site.port),
            simulation=self,
            site=site,
            engine=engine,
            max_groups=max(1, round((1 + settings.queue_share) * engine.groups_per_batch)),
        )
        if site.rental is None:
            site.rental = Rental(site.name, offer, offer.region, now)
            self.history.rentals.append(site.rental)
        self._start(site.worker)

    def kill(self, node: Any, *, is_silent: bool) -> None:
        node.transport.vanish(is_silent=is_silent)
        task = self.tasks.get(node)
        node.stop("killed")
        if isinstance(node, SimWorker):
            node.session.is_leaving = True

    def _worker_ended(self, worker: SimWorker) -> None:
        worker.engine.advance(self.loop._now)
        site = worker.site
        self.history.tokens_made += worker.engine.tokens_made
        if site.worker is not worker:
            return
        site.worker = None
        if worker.is_released:
            site.give_back(self.loop.time())
            site.is_given_up = True

    async def _main(self) -> None:
        self._ended = self.loop.create_future()
        settings = self.scenario.settings
        self.learner = self._make_learner()
        self._start(self.learner)
        for region_name, region in self.scenario.fleet.regions.items():
            if region.relay_bytes_per_s is not None:
                self.relays.append(self._make_relay(region_name))
                self._start(self.relays[-1])
        apart_s = settings.join_within_s / max(1, len(self.sites))
        for number, site in enumerate(self.sites):
            self.loop.call_at(number * apart_s, self.start_worker, site)
        watch = self.loop.create_task(self._watch())
        await self._ended
        self.history.ended_at = self.loop.time()
        waiting = {
            g.group_id: self.groups.length(g.group_id).num_tokens
            for g in [*self.learner._buffer, *self.learner._unsynced]
        }
        self.history.tokens_in_flight = sum(waiting.values())
        for site in self.sites:
            if site.worker is not None:
                self.history.tokens_in_flight += site.worker.tokens_in_flight(waiting)
        watch.cancel()
        tasks = list(self.tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.history.num_events = self.loop.num_calls
        self.history.counters = self.learner.session.counters.as_dict()

    def run(self) -> History:
        with rare_collections():
            with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
                runner.run(self._main())
        return self.history
