"""A rented place: a machine's access to the network, and whatever process runs there."""

from __future__ import annotations

from dataclasses import dataclass

from echo.fleet.market import Offer
from echo.sim.network import Port
from echo.sim.records import Rental
from echo.sim.worker import SimWorker


@dataclass(slots=True, eq=False)
class Site:
    """One worker's place, with or without a process."""

    name: str
    offer: Offer
    port: Port
    tokens_per_s: float
    worker: SimWorker | None = None
    rental: Rental | None = None
    num_absences: int = 0
    """Faults that keep the machine away at present."""
    is_given_up: bool = False
    """Whether its worker has given the machine back for good."""

    def give_back(self, now: float) -> None:
        """Pay for the machine no more."""
        if self.rental is not None:
            self.rental.until_s, self.rental = now, None
