"""Regions, offers and rented fleets: their rates, prices and broadcast times.

A fleet is a list of offers with the number of active nodes of each. The learner sends the weights
once to each region with a relay. In other regions it sends them once to each offer whose nodes
listen, because these nodes pass the weights on in a chain. It sends them once to every other node.
These streams share the learner's uplink. The streams within a region share the uplink of its relay.
Streams are pipelined by chunks, so a hop delays a version by the time of one chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from echo.core.units import GIGABYTE
from echo.fleet.job import Job

UNLIMITED = 1e15
"""Bytes per second of a link without a known limit."""
Counts = Sequence[int]
"""Number of active nodes of each offer, in the order of the fleet's offers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A region, and the network path from the learner to it."""

    name: str
    bytes_per_s: float
    """Rate of one stream from the learner to the region, bytes per second."""
    latency_s: float = 0.0
    price_per_gb: float = 0.0
    """$ per GB that the learner sends to this region."""
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
    """Number of rollouts that one node generates at the same time."""
    down_bytes_per_s: float = UNLIMITED
    up_bytes_per_s: float = UNLIMITED
    can_listen: bool = False
    """Whether other nodes can dial a node of this offer; if so, it passes weights on to them."""
    price_per_gb: float = 0.0
    """$ per GB that enters or leaves the node."""
    losses_per_h: float = 0.0
    """Times per hour that a node is lost, for example a spot machine that is reclaimed."""
    restart_s: float = 0.0
    """Seconds until a lost node is replaced."""

    @property
    def availability(self) -> float:
        """Share of the time in which a node works and is not being replaced."""
        return 1 / (1 + self.losses_per_h / 3600 * self.restart_s)

    def lost_rollouts_per_s(self) -> float:
        """Return how many rollouts per second are lost with lost nodes.

        An unfinished rollout counts as half a rollout.
        """
        return self.losses_per_h / 3600 * self.concurrency / 2

    def rollouts_per_s(self, job: Job) -> float:
        """Return the number of rollouts per second that one node finishes."""
        made = self.tokens_per_s / job.completion_tokens * self.availability
        return max(0.0, made - self.lost_rollouts_per_s())

    def group_latency_s(self, job: Job) -> float:
        """Return the seconds that one node takes for a group.

        This is the time of the longest rollout, at the speed of one sequence in a full engine.
        """
        return job.longest_completion_tokens * self.concurrency / self.tokens_per_s


@dataclass(frozen=True, slots=True, kw_only=True)
class RentedFleet:
    """All offers, their regions, and the rate of the learner's uplink."""

    offers: tuple[Offer, ...]
    regions: Mapping[str, Region]
    uplink_bytes_per_s: float
    """Rate of the learner's uplink, bytes per second."""

    def region_of(self, offer: Offer) -> Region:
        """Return the region in which an offer's nodes are."""
        return self.regions[offer.region]

    def rate(self, job: Job, counts: Counts) -> float:
        """Return the rollouts per second that the active nodes finish together."""
        pairs = zip(self.offers, counts, strict=True)
        return sum(offer.rollouts_per_s(job) * count for offer, count in pairs)

    def largest_rate(self, job: Job, counts: Counts) -> float:
        """Return the rollouts per second of the fastest active node; 0 without nodes."""
        pairs = zip(self.offers, counts, strict=True)
        return max((offer.rollouts_per_s(job) for offer, count in pairs if count), default=0.0)

    def latency_s(self, job: Job, counts: Counts) -> float:
        """Return the seconds of a group on the slowest active node; 0 without nodes."""
        pairs = zip(self.offers, counts, strict=True)
        return max((offer.group_latency_s(job) for offer, count in pairs if count), default=0.0)

    def broadcast_s(self, job: Job, counts: Counts) -> float:
        """Return the seconds from a publication until the last active node holds the version.

        Example: 1 GB to two nodes that cannot listen, over an uplink of 100 MB/s and downlinks of
        80 MB/s. Two streams of 50 MB/s take 20 s. If they listen, one stream runs at the 80 MB/s of
        the downlink. It takes 12.5 s, plus one chunk for the second hop.
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
        """Return the number of nodes to which the learner itself sends each version."""
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
        """Return the rate, in bytes per second, at which one node can receive a version.

        A node that listens passes the version on, so its uplink must reach that rate, too.
        """
        links = [self.region_of(offer).bytes_per_s, offer.down_bytes_per_s]
        return min([*links, offer.up_bytes_per_s] if offer.can_listen else links)

    def num_hops(self, offer: Offer, count: int) -> int:
        """Return how many nodes pass a version on to the last node of an offer.

        The offer has `count` nodes.
        """
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
        """Return the $ per hour for the active nodes and for the relays that serve them."""
        pairs = list(zip(self.offers, counts, strict=True))
        relays = {offer.region for offer, count in pairs if count and self.has_relay(offer)}
        nodes = sum(offer.price_per_h * count for offer, count in pairs)
        return nodes + sum(self.regions[name].relay_price_per_h for name in relays)

    def publication_cost(self, job: Job, counts: Counts) -> float:
        """Return the $ for sending one publication to all active nodes."""
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
        """Return the $ per second for sending rollouts, at the full rate of all nodes."""
        pairs = zip(self.offers, counts, strict=True)
        per_rollout = job.completion_tokens * job.upload_bytes_per_token / GIGABYTE
        return sum(
            count * offer.rollouts_per_s(job) * per_rollout * offer.price_per_gb
            for offer, count in pairs
        )

    def cost_per_h(self, job: Job, counts: Counts) -> float:
        """Return the $ per hour for nodes, relays and traffic, if the learner never waits.

        `select` minimises this cost. A version is published every publish_period * train_s seconds.
        """
        publications_per_h = 3600 / (job.publish_period * job.train_s)
        traffic = self.publication_cost(job, counts) * publications_per_h
        return self.rent_per_h(counts) + traffic + 3600 * self.upload_cost_per_s(job, counts)
