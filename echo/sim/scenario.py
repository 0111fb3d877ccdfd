"""Defines a scenario: the fleet, job, nodes, links and faults of a simulation."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from echo.config.fleet_schema import FaultRow, PriceRow, SimRow
from echo.config.schema import ActivationSection
from echo.fleet.job import Job
from echo.fleet.market import Offer, RentedFleet
from echo.sim.lengths import LogNormalLengths


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """The input of a simulation. The same scenario always produces the same history."""

    name: str
    fleet: RentedFleet
    job: Job
    """The job. If `is_auto_period`, the publish period is chosen from measurements during the run.
    """
    counts: Sequence[int]
    """Number of nodes of each offer."""
    settings: SimRow = field(default_factory=SimRow)
    is_auto_period: bool = False
    faults: Sequence[FaultRow] = ()
    activation: ActivationSection | None = None
    """The settings of activation. None if all workers generate, whatever they cost."""
    min_dwell_s: float = 120.0
    """Activation keeps a worker active for at least this many seconds. A short run needs a lower
    value."""
    prices: Sequence[PriceRow] = ()

    def group_lengths(self) -> LogNormalLengths:
        """Return the distribution from which the groups' lengths are drawn."""
        job = self.job
        return LogNormalLengths(
            mean=job.completion_tokens,
            spread=job.completion_spread,
            limit=job.max_completion_tokens,
            group_size=job.group_size,
            useful_share=job.useful_share,
            seed=self.settings.seed,
        )

    def price_per_h(self, offer: Offer, at_s: float) -> float:
        """Return what one node of an offer costs at an instant, in $ per hour."""
        changes = [c for c in self.prices if c.offer == offer.name and c.at_s <= at_s]
        newest = max(changes, key=lambda change: change.at_s, default=None)
        return offer.price_per_h if newest is None else newest.price_per_h

    def nodes(self) -> list[tuple[str, Offer]]:
        """Return the name and the offer of each worker, in the order in which workers start.

        The offers alternate, so that workers of all offers start early.
        """
        waiting = [
            [(f"{offer.name.replace(' ', '-')}-{number}", offer) for number in range(1, count + 1)]
            for offer, count in zip(self.fleet.offers, self.counts, strict=True)
        ]
        rounds = itertools.zip_longest(*waiting)
        return [node for each in rounds for node in each if node is not None]

    def with_seed(self, seed: int) -> Scenario:
        return replace(self, settings=self.settings.model_copy(update={"seed": seed}))
