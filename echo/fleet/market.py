"""Computes the rates, prices and broadcast times of regions, offers and rented fleets.

A fleet is a list of offers with the number of active nodes of each offer. The learner sends one
stream of weights to each region with a relay. In other regions, the learner sends one stream to
each offer whose nodes listen, because these nodes forward the weights in a chain. Every other node
gets its own stream. All these streams share the learner's uplink. The streams within a region share
the uplink of the region's relay. Streams are pipelined by chunks, so each hop delays a version by
the time of one chunk.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from echo.core.units import GIGABYTE
from echo.fleet.job import Job
from echo.fleet.overlap import NodeSpeed

UNLIMITED = 1e15
"""Rate, in bytes per second, that stands for a link without a known limit."""
Counts = Sequence[int]
"""Number of active nodes of each offer, in the order of the fleet's offers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A region, and the network path from the learner to the region."""

    name: str
    bytes_per_s: float
    """Rate of one stream from the learner to the region, bytes per second."""
    latency_s: float = 0.0
    price_per_gb: float = 0.0
    """$ per GB sent from the learner to this region."""
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
    """Whether other nodes can dial a node of this offer to get weights."""
    price_per_gb: float = 0.0
    """$ per GB that the node receives or sends."""
    losses_per_h: float = 0.0
    """Number of losses of a node per hour, for example because a spot machine is preempted."""
    restart_s: float = 0.0
    """Seconds until a lost node is replaced."""

    @property
    def availability(self) -> float:
        """Share of time in which a node works. In the rest, the lost node is being replaced."""
        return 1 / (1 + self.losses_per_h / 3600 * self.restart_s)

    def lost_rollouts_per_s(self) -> float:
        """Return how many rollouts per second are lost because nodes are lost.

        An unfinished rollout counts as half.
        """
        return self.losses_per_h / 3600 * self.concurrency / 2

    def rollouts_per_s(self, job: Job) -> float:
        """Return how many rollouts per second one node finishes."""
        made = self.tokens_per_s / job.completion_tokens * self.availability
        return max(0.0, made - self.lost_rollouts_per_s())

    def group_latency_s(self, job: Job) -> float:
        """Return the seconds that one node needs to finish a group.

        This is the time of the group's longest rollout at the speed of a full engine.
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
        """Return the region of an offer's nodes."""
        return self.regions[offer.region]

    def rate(self, job: Job, counts: Counts) -> float:
        """Return the rollouts per second that the active nodes finish together."""
        pairs = zip(self.offers, counts, strict=True)
        return sum(offer.rollouts_per_s(job) * count for offer, count in pairs)

    def speeds(self, job: Job, counts: Counts) -> list[NodeSpeed]:
        """Return the speed of each active node."""
        return [
            NodeSpeed(rate=offer.rollouts_per_s(job), group_s=offer.group_latency_s(job))
            for offer, count in zip(self.offers, counts, strict=True)
            for _ in range(count)
        ]

    def latency_s(self, job: Job, counts: Counts) -> float:
        """Return the seconds that the slowest active node needs for a group; 0 without nodes."""
        pairs = zip(self.offers, counts, strict=True)
        return max((offer.group_latency_s(job) for offer, count in pairs if count), default=0.0)

    def mean_latency_s(self, job: Job, counts: Counts) -> float:
        """Return the mean seconds of a group, over all groups of the active nodes; 0 without nodes.

        Fast nodes make more groups, so they count for more.
        """
        rate = self.rate(job, counts)
        pairs = zip(self.offers, counts, strict=True)
        total = sum(
            offer.group_latency_s(job) * offer.rollouts_per_s(job) * count for offer, count in pairs
        )
        return total / rate if rate > 0 else 0.0

    def broadcast_s(self, job: Job, counts: Counts) -> float:
        """Return the seconds from a publication until the last active node holds the version.

        Example: a version of 1 GB for two nodes, an uplink of 100 MB/s and downlinks of 80 MB/s. If
        the nodes cannot listen, two streams of 50 MB/s take 20 s. If the nodes listen, one stream
        of 80 MB/s takes 12.5 s, plus the time of one chunk for the second hop.
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
        """Return the number of streams in which the learner sends each version."""
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

        A node that listens forwards the version, so the node's uplink also limits the rate.
        """
        links = [self.region_of(offer).bytes_per_s, offer.down_bytes_per_s]
        return min([*links, offer.up_bytes_per_s] if offer.can_listen else links)

    def num_hops(self, offer: Offer, count: int) -> int:
        """Return the number of nodes that forward a version before an offer's last node gets it.

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
        """Return what the active nodes and their relays cost, in $ per hour."""
        pairs = list(zip(self.offers, counts, strict=True))
        relays = {offer.region for offer, count in pairs if count and self.has_relay(offer)}
        nodes = sum(offer.price_per_h * count for offer, count in pairs)
        return nodes + sum(self.regions[name].relay_price_per_h for name in relays)

    def publication_cost(self, job: Job, counts: Counts) -> float:
        """Return what it costs to send one publication to all active nodes, in $."""
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
        """Return what it costs to send rollouts at the full rate of all nodes, in $ per second."""
        pairs = zip(self.offers, counts, strict=True)
        per_rollout = job.completion_tokens * job.upload_bytes_per_token / GIGABYTE
        return sum(
            count * offer.rollouts_per_s(job) * per_rollout * offer.price_per_gb
            for offer, count in pairs
        )

    def cost_per_h(self, job: Job, counts: Counts) -> float:
        """Return what nodes, relays and traffic cost if the learner never waits, in $ per hour.

        `select` minimises this cost. A version is published every publish_period * train_s seconds.
        """
        publications_per_h = 3600 / (job.publish_period * job.train_s)
        traffic = self.publication_cost(job, counts) * publications_per_h
        return self.rent_per_h(counts) + traffic + 3600 * self.upload_cost_per_s(job, counts)
