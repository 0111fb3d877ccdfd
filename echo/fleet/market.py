"""Regions, offers and rented fleets: rate, price, broadcast time.

A fleet is a list of offers with the number of active nodes of each. The learner sends the weights
once to each region with a relay, once to each offer whose nodes listen (they pass the weights on in
a chain), and once to every other node. These streams share the learner's uplink. The streams within
a region share the uplink of its relay. Streams are pipelined by chunks, so a hop delays a version
by the time of one chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from echo.core.units import GIGABYTE
from echo.fleet.job import Job

UNLIMITED = 1e15
"""Bytes per second of a link without a known limit."""
Counts = Sequence[int]
"""Active nodes of each offer, in the order of the fleet's offers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A place, and the path to it from the learner."""

    name: str
    bytes_per_s: float
    """Rate of one stream from the learner."""
    latency_s: float = 0.0
    price_per_gb: float = 0.0
    """$ per GB that leaves the learner for this region."""
    relay_bytes_per_s: float | None = None
    """Uplink of the region's relay, bytes per second; None without a relay."""
    relay_price_per_h: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Nodes of one kind that can be rented, or a worker that has joined."""

    name: str
    region: str = ""
    count: int = 1
    price_per_h: float = 0.0
    tokens_per_s: float
    """Completion tokens per second of one node."""
    concurrency: int
    """Rollouts that one node generates side by side."""
    down_bytes_per_s: float = UNLIMITED
    up_bytes_per_s: float = UNLIMITED
    can_listen: bool = False
    """Whether other nodes can dial it; then it passes weights on."""
    price_per_gb: float = 0.0
    """$ per GB that enters or leaves the node."""
    losses_per_h: float = 0.0
    """Times per hour that a node is lost, for example a spot machine that is reclaimed."""
    restart_s: float = 0.0
    """Seconds until a lost node is replaced."""

    @property
    def availability(self) -> float:
        """Share of the time in which one node works."""
        return 1 / (1 + self.losses_per_h / 3600 * self.restart_s)

    def lost_rollouts_per_s(self) -> float:
        """Unfinished rollouts that one node loses per second, counted as half a rollout each."""
        return self.losses_per_h / 3600 * self.concurrency / 2

    def rollouts_per_s(self, job: Job) -> float:
        """Rollouts per second that one node finishes."""
        made = self.tokens_per_s / job.completion_tokens * self.availability
        return max(0.0, made - self.lost_rollouts_per_s())

    def group_latency_s(self, job: Job) -> float:
        """Seconds of a group: its longest rollout at the speed of one sequence."""
        return job.longest_completion_tokens * self.concurrency / self.tokens_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RentedFleet:
    """All offers, their regions, and the learner's uplink."""

    offers: tuple[Offer, ...]
    regions: Mapping[str, Region]
    uplink_bytes_per_s: float
    """Uplink of the learner."""

    def region_of(self, offer: Offer) -> Region:
        """Return the region of an offer."""
        return self.regions[offer.region]

    def rate(self, job: Job, counts: Counts) -> float:
        """Return the rollouts per second of the active nodes."""
        pairs = zip(self.offers, counts, strict=True)
        return sum(offer.rollouts_per_s(job) * count for offer, count in pairs)

    def latency_s(self, job: Job, counts: Counts) -> float:
        """Return the seconds of a group on the slowest active node; 0 if no node is active."""
        pairs = zip(self.offers, counts, strict=True)
        return max((offer.group_latency_s(job) for offer, count in pairs if count), default=0.0)

    def broadcast_s(self, job: Job, counts: Counts) -> float:
        """Return the seconds from a publication until the last active node holds it.

        Example: 1 GB to two nodes that cannot listen, over an uplink of 100 MB/s and downlinks of
        80 MB/s: two streams of 50 MB/s take 20 s. If they listen, one stream runs at the 80 MB/s
        of the downlink and takes 12.5 s plus one chunk for the second hop.
        """
        streams = self.learner_streams(counts)
        return max(
            (
                max(
                    job.version_bytes * streams / self.uplink_bytes_per_s,
                    self._relay_s(job, offer.region, counts),
                    job.version_bytes / self.link_bytes_per_s(offer),
                )
                + self.region_of(offer).latency_s
                + self.num_hops(offer, count) * job.chunk_bytes / self.link_bytes_per_s(offer)
                for offer, count in zip(self.offers, counts, strict=True)
                if count
            ),
            default=0.0,
        )

    def learner_streams(self, counts: Counts) -> int:
        """Return how many times the learner sends a version."""
        relays = {
            offer.region
            for offer, count in zip(self.offers, counts, strict=True)
            if count and self.has_relay(offer)
        }
        direct = sum(
            min(count, 1) if offer.can_listen else count
            for offer, count in zip(self.offers, counts, strict=True)
            if not self.has_relay(offer)
        )
        return len(relays) + direct

    def has_relay(self, offer: Offer) -> bool:
        """Return whether the offer's region has a relay."""
        return self.region_of(offer).relay_bytes_per_s is not None

    def link_bytes_per_s(self, offer: Offer) -> float:
        """Return the rate of one node's stream; a node that listens must also send at that rate."""
        links = [self.region_of(offer).bytes_per_s, offer.down_bytes_per_s]
        return min([*links, offer.up_bytes_per_s] if offer.can_listen else links)

    def num_hops(self, offer: Offer, count: int) -> int:
        """Return the number of hops between the learner and the last node of an offer."""
        return (count - 1 if offer.can_listen else 0) + self.has_relay(offer)

    def _relay_s(self, job: Job, region_name: str, counts: Counts) -> float:
        uplink = self.regions[region_name].relay_bytes_per_s
        if uplink is None:
            return 0.0
        streams = sum(
            min(count, 1) if offer.can_listen else count
            for offer, count in zip(self.offers, counts, strict=True)
            if offer.region == region_name
        )
        return job.version_bytes * streams / uplink

    def rent_per_h(self, counts: Counts) -> float:
        """Return $ per hour of the active nodes and of the relays that serve them."""
        pairs = list(zip(self.offers, counts, strict=True))
        relays = {offer.region for offer, count in pairs if count and self.has_relay(offer)}
        nodes = sum(offer.price_per_h * count for offer, count in pairs)
        return nodes + sum(self.regions[name].relay_price_per_h for name in relays)

    def publication_cost(self, job: Job, counts: Counts) -> float:
        """Return $ for the traffic of one publication."""
        gigabytes = job.version_bytes / GIGABYTE
        relays = set()
        total = 0.0
        for offer, count in zip(self.offers, counts, strict=True):
            region = self.region_of(offer)
            total += count * offer.price_per_gb * gigabytes
            if self.has_relay(offer):
                relays.update([offer.region] if count else [])
            else:
                streams = min(count, 1) if offer.can_listen else count
                total += streams * region.price_per_gb * gigabytes
        return total + sum(self.regions[name].price_per_gb * gigabytes for name in relays)

    def upload_cost_per_s(self, job: Job, counts: Counts) -> float:
        """Return $ per second for sending rollouts, if all nodes generate at full rate."""
        pairs = zip(self.offers, counts, strict=True)
        per_rollout = job.completion_tokens * job.upload_bytes_per_token / GIGABYTE
        return sum(
            count * offer.rollouts_per_s(job) * per_rollout * offer.price_per_gb
            for offer, count in pairs
        )

    def cost_per_h(self, job: Job, counts: Counts) -> float:
        """Return $ per hour for nodes, relays and traffic, if the learner never waits.

        A selection minimises this cost. A version is published every publish_period * train_s.
        """
        publications_per_h = 3600 / (job.publish_period * job.train_s)
        traffic = self.publication_cost(job, counts) * publications_per_h
        return self.rent_per_h(counts) + traffic + 3600 * self.upload_cost_per_s(job, counts)
