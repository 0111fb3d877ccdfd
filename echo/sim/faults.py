"""Makes faults in a simulation: the scenario's faults, and random losses of spot machines."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Protocol

from echo.config.fleet_schema import FaultRow
from echo.fleet.market import Offer
from echo.sim.clock import VirtualLoop
from echo.sim.network import Network, Port
from echo.sim.scenario import Scenario
from echo.sim.summary import History, Rental
from echo.sim.worker import SimWorker


@dataclass(slots=True, eq=False)
class SimulatedSite:
    """A rented machine and its access to the network.

    Sometimes no worker runs on the machine.
    """

    name: str
    offer: Offer
    port: Port
    tokens_per_s: float
    worker: SimWorker | None = None
    rental: Rental | None = None
    num_absences: int = 1
    """Number of reasons why no worker can run on the machine at present: each fault that disables
    the machine or its process is one, and at first the machine has not joined yet."""
    is_given_up: bool = False
    """Whether the worker has given the machine back. If so, no worker starts here again."""

    def give_back(self, now: float) -> None:
        """Give the machine back at the time `now`. From then on it costs nothing."""
        if self.rental is not None:
            self.rental.until_s, self.rental = now, None


class Stage(Protocol):
    """The parts of a simulation that faults affect."""

    scenario: Scenario
    loop: VirtualLoop
    network: Network
    history: History
    sites: list[SimulatedSite]

    def start_worker(self, site: SimulatedSite) -> None: ...

    def kill(self, worker: SimWorker, *, is_silent: bool) -> None: ...


class Faults:
    """Schedules and makes the faults of one simulated run."""

    def __init__(self, stage: Stage) -> None:
        """Prepare faults for this stage. They are scheduled when `begin` is called."""
        self._stage = stage

    def begin(self) -> None:
        """Schedule the scenario's faults, and the first loss of each spot machine."""
        stage = self._stage
        for fault in stage.scenario.faults:
            stage.loop.call_at(fault.at_s, self._happen, fault)
        for site in stage.sites:
            if site.offer.losses_per_h > 0:
                chance = random.Random(f"{stage.scenario.settings.seed}/losses/{site.name}")
                self._await_loss(site, chance)

    def _happen(self, fault: FaultRow) -> None:
        loop, network = self._stage.loop, self._stage.network
        if fault.kind == "cut":
            network.cut(fault.target)
            if fault.for_s is not None:
                loop.call_later(fault.for_s, network.mend, fault.target)
            return
        for site in self._targets(fault.target):
            if fault.kind == "slow":
                self._slow(site, fault)
            else:
                self._take(site, is_silent=fault.kind == "preempt", for_s=fault.for_s)

    def _targets(self, name: str) -> list[SimulatedSite]:
        return [site for site in self._stage.sites if name in (site.name, site.offer.name, "*")]

    # --- loss and return -------------------------------------------------------------------------

    def _await_loss(self, site: SimulatedSite, chance: random.Random) -> None:
        wait_s = chance.expovariate(site.offer.losses_per_h / 3600)
        self._stage.loop.call_later(wait_s, self._lose, site, chance)

    def _lose(self, site: SimulatedSite, chance: random.Random) -> None:
        self._take(site, is_silent=True, for_s=site.offer.restart_s)
        self._stage.loop.call_later(site.offer.restart_s, self._await_loss, site, chance)

    def _take(self, site: SimulatedSite, *, is_silent: bool, for_s: float | None) -> None:
        # Clear the site first: its process may end after the next process has begun.
        stage, worker, site.worker = self._stage, site.worker, None
        site.num_absences += 1
        if worker is not None:
            stage.history.num_deaths += 1
            stage.kill(worker, is_silent=is_silent)
        if is_silent:
            # A machine that is taken away is no longer paid for. A machine whose process died is
            # still paid for.
            site.give_back(stage.loop.time())
        if for_s is not None:
            stage.loop.call_later(for_s, self.end_absence, site)

    def end_absence(self, site: SimulatedSite) -> None:
        """Remove one of the reasons why no worker runs at a site.

        If no reason is left and the machine has not been given back, start the site's worker.
        """
        site.num_absences -= 1
        if not site.num_absences and site.worker is None and not site.is_given_up:
            self._stage.start_worker(site)

    # --- stragglers ------------------------------------------------------------------------------

    def _slow(self, site: SimulatedSite, fault: FaultRow) -> None:
        self._scale(site, fault.factor)
        if fault.for_s is not None:
            self._stage.loop.call_later(fault.for_s, self._scale, site, 1 / fault.factor)

    def _scale(self, site: SimulatedSite, factor: float) -> None:
        site.tokens_per_s *= factor
        if site.worker is not None:
            site.worker.set_rate(site.tokens_per_s)
