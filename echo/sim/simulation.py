"""Build a scenario's nodes, let time pass, and say what it came to."""

from __future__ import annotations

import contextlib
import gc
import math
import random
from collections.abc import Iterator

from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from echo.core.price import Price
from echo.fleet.market import Offer
from echo.leases.outbox import MAX_UNACKED_GROUPS, Outbox
from echo.leases.partials import PartialRules
from echo.roles.joining import NodeSettings
from echo.roles.relay import Relay
from echo.roles.worker import EngineFacts, ReleaseTerms, Worker
from echo.sim.activating import make_activating, spent_before
from echo.sim.clock import Clock
from echo.sim.engine import EngineModel
from echo.sim.faults import Faults
from echo.sim.groups import Groups
from echo.sim.journal import Journal, Start
from echo.sim.learner import SimLearner
from echo.sim.learner_setup import LEARNER_ADDRESS, RUN_ID, make_buffer, make_session, make_times
from echo.sim.records import History, Rental
from echo.sim.relay import SimRelay
from echo.sim.scenario import LEARNER_REGION, Scenario
from echo.sim.site import Site
from echo.sim.version_store import SharedStore
from echo.sim.versions import Versions
from echo.sim.wires import Port, Wires
from echo.sim.worker import SimWorker, WorkerTimes
from echo.weights.broadcast import Broadcast
from echo.weights.schedule import PublishPace

WINDOW_BYTES = 8 << 20
"""What a child asks for ahead at first: chunks are coarse here."""


class Simulation:
    """One run of a scenario."""

    def __init__(self, scenario: Scenario) -> None:
        """Build everything; `run` lets time pass."""
        self.scenario = scenario
        self.clock = Clock()
        self.history = History()
        job, settings = scenario.job, scenario.settings
        lengths = scenario.group_lengths()
        self.groups = Groups(lengths, upload_bytes_per_token=job.upload_bytes_per_token)
        seed_bytes = blake3(f"{settings.seed}/key".encode()).digest()
        self._key = Ed25519PrivateKey.from_private_bytes(seed_bytes)
        self._versions = Versions(
            run_id=RUN_ID,
            key=self._key,
            num_chunks=settings.chunks_per_version,
            version_bytes=job.version_bytes,
            image_bytes=settings.image_bytes,
        )
        self.wires = Wires(
            self.clock,
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
        self._journal = Journal(
            max_staleness=job.max_staleness,
            # Where no crash can bring anything back, nothing is kept for it.
            checkpoint_steps=settings.checkpoint_steps if scenario.can_learner_die else 1,
        )
        uplink = scenario.fleet.uplink_bytes_per_s
        self._learner_port = Port("learner", LEARNER_REGION, uplink, uplink, LEARNER_ADDRESS)
        self.learner = self._make_learner(self._journal.beginning)
        self.relays = [
            self._make_relay(name)
            for name, region in scenario.fleet.regions.items()
            if region.relay_bytes_per_s is not None
        ]
        self.sites = [self._make_site(name, offer) for name, offer in scenario.nodes()]
        self.by_name = {site.name: site for site in self.sites}

    # --- building --------------------------------------------------------------------------------

    def _broadcast(self, node_id: str) -> Broadcast:
        settings, scale = self.scenario.settings, self._versions.scale
        chunk_bytes = self._versions.chunk_bytes * scale
        return Broadcast(
            node_id=node_id,
            window_bytes=max(1, math.ceil(max(WINDOW_BYTES, chunk_bytes) / scale)),
            # Coarse chunks take longer than a heartbeat: then silence means less.
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

    def _make_learner(self, start: Start, *, spent: float = 0.0) -> SimLearner:
        scenario, job, now = self.scenario, self.scenario.job, self.clock.now
        buffer = make_buffer(scenario, start)
        session = make_session(
            scenario,
            start,
            key=self._key,
            versions=self._versions,
            broadcast=self._broadcast("learner"),
            buffer=buffer,
            now=now,
        )
        pace = PublishPace(
            period=job.publish_period,
            is_auto=scenario.is_auto_period,
            max_staleness=job.max_staleness,
        )
        activating = make_activating(
            scenario,
            session,
            scale=self._versions.scale,
            spent=spent,
            pace=pace,
            history=self.history,
            now=now,
        )
        return SimLearner(
            session,
            self._learner_port,
            clock=self.clock,
            wires=self.wires,
            buffer=buffer,
            groups=self.groups,
            pace=pace,
            times=make_times(scenario),
            num_steps=scenario.settings.num_steps,
            journal=self._journal,
            versions=self._versions,
            version_bytes=job.version_bytes,
            activating=activating,
            history=self.history,
        )

    def _make_relay(self, region_name: str) -> SimRelay:
        region = self.scenario.fleet.regions[region_name]
        address = _relay_address(region_name)
        rate = region.relay_bytes_per_s or math.inf
        port = Port(f"relay-{region_name}", region_name, rate, rate, address)
        price = Price(per_h=region.relay_price_per_h)
        settings = self._node_settings(port, "relay", LEARNER_ADDRESS, price)
        session = Relay(settings, self._broadcast(port.name), now=0.0)
        return SimRelay(session, port, clock=self.clock, wires=self.wires)

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

    def _make_site(self, name: str, offer: Offer) -> Site:
        address = f"tcp://{name}:7702" if offer.can_listen else None
        port = Port(name, offer.region, offer.up_bytes_per_s, offer.down_bytes_per_s, address)
        settings = self.scenario.settings
        chance = random.Random(f"{settings.seed}/speed/{name}")
        factor = max(0.1, chance.gauss(1.0, settings.speed_spread))
        return Site(name, offer, port, offer.tokens_per_s * factor)

    def _price(self, offer: Offer) -> Price:
        """Return what a node states now; of traffic per so many bytes as stand for a GB."""
        return Price(
            per_h=self.scenario.price_per_h(offer, self.clock.now),
            per_gb=offer.price_per_gb * self._versions.scale,
            losses_per_h=offer.losses_per_h,
        )

    def start_worker(self, site: Site) -> None:
        """Start a process at a site, the first or another one."""
        scenario, now = self.scenario, self.clock.now
        job, settings, offer = scenario.job, scenario.settings, site.offer
        has_relay = scenario.fleet.has_relay(offer)
        address = _relay_address(offer.region) if has_relay else LEARNER_ADDRESS
        node_settings = self._node_settings(site.port, "worker", address, self._price(offer))
        outbox = Outbox(
            max_deliveries=MAX_UNACKED_GROUPS, retry_s=max(2.0, 2 * settings.heartbeat_s)
        )
        terms = ReleaseTerms(standby_s=settings.release_after_s)
        broadcast = self._broadcast(site.name)
        session = Worker(node_settings, broadcast, outbox, terms=terms, now=now)
        engine = EngineModel(
            tokens_per_s=site.tokens_per_s,
            concurrency=offer.concurrency,
            group_size=job.group_size,
            alone_speedup=settings.alone_speedup,
        )
        site.worker = SimWorker(
            session,
            site.port,
            wires=self.wires,
            engine=engine,
            groups=self.groups,
            facts=EngineFacts(
                group_size=job.group_size,
                groups_per_batch=engine.groups_per_batch,
                is_continuous=True,
                rules=PartialRules(ship_s=None),
                queue_share=settings.queue_share,
            ),
            times=WorkerTimes(
                setup_s=settings.setup_s,
                swap_s=settings.swap_s,
                is_pausing=job.has_pausing_workers,
            ),
            stage=self,
        )
        if site.rental is None:
            site.rental = Rental(site.name, offer, offer.region, now)
            self.history.rentals.append(site.rental)
        site.worker.start()

    def worker_ended(self, worker: SimWorker) -> None:
        """Note what its engine has made; what it held is lost."""
        self.history.tokens_made += worker.engine.tokens_made
        site = self.by_name[worker.port.name]
        if site.worker is not worker:
            return
        site.worker = None
        if worker.is_released:
            site.give_back(self.clock.now)
            site.is_given_up = True

    # --- the learner's death ---------------------------------------------------------------------

    def end_learner(self, *, is_silent: bool) -> None:
        """End the learner's process; what it has not written down is lost."""
        self.learner.end(is_silent=is_silent)

    def resume_learner(self, *, away_s: float) -> None:
        """Start the learner again, from its newest checkpoint and in a new lineage."""
        start = self._journal.recover()
        self.history.resumed(start.step, down_s=away_s)
        for group, reason in start.ends:
            self.history.lost(reason, self.groups.length(group.group_id).num_tokens)
            self._journal.ended(group.group_id)
            self.groups.forget(group.group_id)
        spent = 0.0
        if self.learner.activating is not None:
            spent = spent_before(self.learner.activating.meter, away_s=away_s)
        self.learner = self._make_learner(start, spent=spent)
        self.learner.start()

    # --- running ---------------------------------------------------------------------------------

    def run(self) -> History:
        """Let time pass until the last step, and return what happened."""
        settings = self.scenario.settings
        self.learner.start()
        for relay in self.relays:
            relay.start()
        apart_s = settings.join_within_s / max(1, len(self.sites))
        for number, site in enumerate(self.sites):
            self.clock.at(number * apart_s, self.start_worker, site)
        Faults(self).begin()
        with rare_collections():
            self.clock.run()
        waiting = self.learner.waiting()
        self.history.tokens_in_flight = sum(waiting.values())
        for site in self.sites:
            if site.worker is not None:
                self.history.tokens_made += site.worker.engine.tokens_made
                self.history.tokens_in_flight += site.worker.tokens_in_flight(waiting)
        self.history.ended_at = self.clock.now
        self.history.num_events = self.clock.num_events
        self.history.counters = self.learner.session.counters.as_dict()
        return self.history


@contextlib.contextmanager
def rare_collections() -> Iterator[None]:
    """Look for circles of garbage less often: many objects live long here, few in circles."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _relay_address(region: str) -> str:
    return f"tcp://relay-{region}:7701"
