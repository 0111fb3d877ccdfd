"""Every key of a scenario that a fleet file lacks: how the run behaves, and what goes wrong."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from echo.config.fields import Bytes, Seconds
from echo.config.fleet_schema import Amount, Count, Name, Row

Instant = Annotated[Seconds, Field(ge=0)]
Share = Annotated[float, Field(ge=0, lt=1)]


class SimRow(Row):
    """How long to simulate, how the run is configured, and times of what is not simulated."""

    num_steps: Count = 50
    """Optimizer steps."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Fixes everything that is drawn."""
    chunks_per_version: Count = 64
    """Grain of a version: few chunks are fast to simulate, many are closer to the truth."""
    image_bytes: Annotated[Bytes, Field(gt=0)] | None = None
    """Of a version in full, where job.version_bytes is a delta's; unset: all are sent in full."""
    checkpoint_steps: Count = 10
    """As checkpoint.interval_steps: where a learner that died goes on."""
    release_after_s: Annotated[Seconds, Field(gt=0)] | None = None
    """As worker.release_after_s, with a command that gives the machine back."""
    rent: dict[str, Annotated[int, Field(ge=0)]] = Field(default_factory=dict)
    """Nodes by offer; an offer that is not named here has all of its count."""
    profile: Literal["lan", "wan"] = "wan"
    """Defaults of the network's times, as for a run."""
    heartbeat_s: Annotated[Seconds, Field(gt=0)] | None = None
    """As network.heartbeat_s."""
    dead_after_s: Annotated[Seconds, Field(gt=0)] | None = None
    """As network.dead_after_s."""
    lease_timeout_s: Annotated[Seconds, Field(gt=0)] | None = None
    """As network.lease_timeout_s."""
    reconnect_for_s: Annotated[Seconds, Field(gt=0)] | None = None
    """As network.reconnect_for_s."""
    is_paced: bool = True
    """Whether leases hold workers back; without, whoever has room is given work."""
    queue_share: Amount = 1.0
    """Groups that wait at a worker for each one in its engine."""
    alone_speedup: Annotated[float, Field(ge=1)] = 2.0
    """How much faster a sequence is sampled on its own than in a full engine."""
    speed_spread: Share = 0.0
    """Standard deviation over mean of the rates of nodes of one kind."""
    train_spread: Share = 0.0
    """Standard deviation over mean of the learner's step."""
    setup_s: Instant = 10.0
    """Until a worker has built its engine."""
    swap_s: Instant = 0.5
    """Until new weights are in an engine."""
    publish_s: Instant = 0.0
    """In which the learner makes a version, and nothing else."""
    journal_s: Instant = 0.01
    """Until a group is on the learner's disk."""
    join_within_s: Instant = 5.0
    """In which the workers start, one after the other."""


class FaultRow(Row):
    """Something that goes wrong at an instant."""

    at_s: Instant
    """When."""
    kind: Literal["kill", "preempt", "cut", "slow"]
    """kill: a process dies; preempt: a machine vanishes; cut: nothing passes; slow: a straggler."""
    target: Name
    """A node (OFFER-1, learner), an offer, "*" for all workers; of a cut: a node or a region."""
    for_s: Annotated[Seconds, Field(gt=0)] | None = None
    """After that it is over; never if left out."""
    factor: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Part of its rate that a slow node keeps."""


class PriceRow(Row):
    """A point of a price trace."""

    offer: Name
    """One of [[offers]]."""
    at_s: Instant
    """From when on."""
    price_per_h: Amount
    """$ per hour for one node."""


class PathRow(Row):
    """What the path from the learner to a region does besides its rate and latency."""

    region: Name
    """One of [[regions]]."""
    jitter_s: Instant = 0.0
    """Added to the latency, evenly distributed up to this."""
    loss: Share = 0.0
    """Probability that a packet is lost."""


SIM_LISTS: dict[str, type[Row]] = {"faults": FaultRow, "prices": PriceRow, "paths": PathRow}
"""Tables of a scenario that repeat."""
