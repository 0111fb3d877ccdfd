"""Every key of a fleet file: what can be rented, and the job to rent it for.

Rates are in Mbit/s and prices in $ per hour or per GB (10^9 bytes), as marketplaces quote them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from echo.config.fields import Bytes, Seconds

Positive = Annotated[float, Field(gt=0)]
Amount = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(min_length=1)]


class Row(BaseModel):
    """What all tables of a fleet file have in common."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


class JobRow(Row):
    """The run to plan for."""

    model: Name
    """Model by name: one of the catalogue's or of [[models]]."""
    groups_per_step: Count
    """Groups per optimizer step."""
    group_size: Annotated[int, Field(ge=2)]
    """Rollouts per group."""
    useful_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the groups whose rewards are not all equal; the others are not trained on."""
    prompt_tokens: Positive = 512.0
    """Mean length of a prompt."""
    completion_tokens: Positive
    """Mean length of a completion."""
    max_completion_tokens: Positive
    """Longest completion."""
    completion_spread: Amount = 0.5
    """Standard deviation of the length over its mean."""
    max_staleness: Annotated[int, Field(ge=0)] = 6
    """Inclusive bound S on staleness, optimizer steps."""
    publish_period: Literal["auto"] | Count = "auto"
    """Optimizer steps between two publications; "auto" is the smallest with a sufficient fleet."""
    version_bytes: Annotated[Bytes, Field(gt=0)] | None = None
    """Bytes of one publication, such as a delta's; all weights in bfloat16 if left out."""
    chunk_bytes: Annotated[Bytes, Field(gt=0)] = 1 << 20
    """Bytes of the unit on the wire."""
    has_pausing_workers: bool = False
    """Whether workers stop generating while new weights arrive."""
    margin: Amount = 0.1
    """Share by which the fleet is to exceed the required rate."""
    rate_spread: Amount = 0.1
    """Standard deviation over mean of the time in which the fleet makes one batch."""
    budget_per_h: Positive | None = None
    """$ per hour for nodes and traffic, without the learner; no limit if left out."""


class LearnerRow(Row):
    """The learner's machine."""

    gpu: Name
    """GPU by name."""
    num_gpus: Count = 1
    """GPUs that train together."""
    train_s: Annotated[Seconds, Field(gt=0)] | None = None
    """Measured seconds of one optimizer step; an estimate if left out."""
    price_per_h: Amount
    """$ per hour for the whole machine."""
    uplink_mbit_per_s: Positive
    """What it can send."""
    address: Name = "tcp://LEARNER:7700"
    """Where nodes reach it; stands in the printed commands."""


class RelayRow(Row):
    """A relay that stands in a region."""

    mbit_per_s: Positive
    """Its uplink."""
    price_per_h: Amount
    """$ per hour."""
    address: Name = "tcp://RELAY:7701"
    """Where the region's workers reach it."""


class RegionRow(Row):
    """A place, and the path to it from the learner."""

    name: Name
    """What offers call it."""
    mbit_per_s: Positive | None = None
    """Rate of one stream from the learner; without it there is no path."""
    latency_s: Seconds = 0.0
    """One way."""
    price_per_gb: Amount = 0.0
    """$ per GB that leaves the learner for it."""
    relay: RelayRow | None = None
    """The relay there, if there is one."""


class OfferRow(Row):
    """Nodes of one kind that can be rented."""

    name: Name | None = None
    """What the nodes are called; the GPU's name if left out."""
    gpu: Name
    """GPU by name."""
    num_gpus: Count = 1
    """GPUs of one node, used together."""
    region: Name
    """One of [[regions]]."""
    count: Count
    """How many can be had."""
    price_per_h: Amount
    """$ per hour for one node; 0 for one's own."""
    price_per_gb: Amount = 0.0
    """$ per GB in and out of a node."""
    down_mbit_per_s: Positive
    """Downlink of one node."""
    up_mbit_per_s: Positive
    """Uplink of one node."""
    can_listen: bool = False
    """Whether others can dial it, so that it passes weights on."""
    tokens_per_s: Positive | None = None
    """Measured completion tokens per second of one node; an estimate if left out."""
    concurrency: Count | None = None
    """Rollouts side by side on one node; needed with tokens_per_s."""
    losses_per_h: Amount = 0.0
    """How often one such node is taken away, as a spot machine is."""
    restart_s: Seconds = 300.0
    """Until a lost node is replaced."""


class GpuRow(Row):
    """A GPU that the catalogue lacks, or that is to replace the one of that name."""

    name: Name
    """What offers call it."""
    tflops: Positive
    """Dense bfloat16 peak, 10^12 operations per second."""
    gb_per_s: Positive
    """Memory bandwidth."""
    memory_gib: Count
    """Memory."""
    link_gb_per_s: Positive = 25.0
    """To its neighbours in one machine."""
    price_per_h: Amount
    """Typical $ per hour; an offer far from it gets a notice, unless one of both is 0."""


class ModelRow(Row):
    """A model that the catalogue lacks."""

    name: Name
    """What the job calls it."""
    num_params: Positive
    """Parameters."""
    num_layers: Count
    """Transformer layers."""
    hidden_size: Count
    """Width."""
    num_kv_heads: Count
    """Heads of keys and values."""
    head_dim: Count = 128
    """Width of a head."""


TABLES: dict[str, type[Row]] = {"job": JobRow, "learner": LearnerRow}
"""Tables that stand once."""
LISTS: dict[str, type[Row]] = {
    "regions": RegionRow,
    "offers": OfferRow,
    "gpus": GpuRow,
    "models": ModelRow,
}
"""Tables that repeat."""
