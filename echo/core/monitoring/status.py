"""Defines the status of a run as a tree of plain values, which all views share.

The learner makes the status (`runtime/learner/report.py`). The live view draws the status, and
viewers receive it as JSON. `status.json` in the run's directory has the last status. JSON has no
NaN and no infinity. So NaN or an infinite value becomes None in the status. The curves of earlier
values (`reward_history`, `eval_history`) leave such values out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from echo.core.errors import DataError

MAX_POINTS = 512
"""Largest number of points of a curve in a status. A screen cannot show more points."""
RATE_WINDOW_S = 10.0
"""Displayed rates of a node are averaged over this many seconds. In a shorter time, a rate would
depend on when the node reports."""

RunState = Literal["running", "paused", "finished", "stopped"]
"""The state of a run. "stopped" means that the learner ended before the last step, because it
crashed or was asked to end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """What the learner knows about a node."""

    node_id: str
    role: str
    """"learner", "relay" or "worker"."""
    state: str
    """The node's state in a few words: "training", "generating", "fetching v17 63%", "waiting",
    "lost"."""
    hold: str = ""
    """What the operator has requested of the node: "standby", "drain", or "" if nothing was
    requested."""
    version: str = "-"
    """Installed policy version, as text."""
    staleness: int | None = None
    """The learner's step minus the step of the installed version. None if no version is
    installed."""
    tokens_per_s: float = 0.0
    bytes_per_s: float = 0.0
    """Bytes of weights that the node received in the last seconds, per second."""
    bytes_sent_per_s: float = 0.0
    """Bytes of weights that the node sent in the last seconds, per second."""
    downlink_bytes_per_s: float | None = None
    uplink_bytes_per_s: float | None = None
    """Measured rate of the node's uplink. `downlink_bytes_per_s` is the measured rate of the
    downlink. Both are None before a measurement."""
    rtt_s: float | None = None
    """Round-trip time to the node's parent, seconds; None before a measurement."""
    fetching: str | None = None
    """The version that the node is fetching now, as text; None if it fetches none."""
    num_chunks_held: int = 0
    num_chunks: int = 0
    num_leases: int = 0
    capacity: int = 0
    """Number of groups that a worker can hold. Running and waiting groups both count."""
    num_errors: int = 0
    """Number of groups, calls and messages that failed since the node's process started."""
    parent: str = "-"
    """The node from which this node gets weights."""
    price_per_h: float | None = None
    """Price of the node's machine, $ per hour; None if the node has stated no price."""
    seen_s: float = 0.0
    """Seconds since the learner received the node's last message."""
    mismatch_kl: float | None = None
    """How far the log-probabilities of learner and sampler differ in the worker's newest trained
    groups, nats per token; None before the first group."""
    reward: float | None = None
    """Mean reward of the groups from which `mismatch_kl` was computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkStatus:
    """A link over which a version of the weights travels."""

    parent: str
    child: str
    bytes_per_s: float | None
    """Measured rate at which the child receives weights; None before a measurement."""
    remaining_s: float | None
    """Estimated seconds until the version has arrived, computed from `bytes_per_s`; None before a
    measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionStatus:
    """A version of the weights, and the progress of its transfer."""

    version: str
    done: float
    """Share of the chunks that have arrived, over all receivers, 0..1."""
    num_nodes: int
    """Number of nodes that need the version."""
    num_complete: int
    """Number of nodes that have the whole version."""
    slowest: LinkStatus | None = None
    """The link whose child will receive the version last; None if no node fetches the version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CostStatus:
    """The costs of the run."""

    per_h: float
    """$ per hour for machines and traffic together."""
    total: float
    """$ spent since the start of the run."""
    per_million_tokens: float | None
    """$ per 10^6 accepted completion tokens since the start of the run; None before the first."""
    standby_per_h: float
    """The part of `per_h` that machines on standby cost."""
    unconfirmed_per_h: float
    """The part of `per_h` for machines that have left, but whose release was not confirmed."""
    budget_per_run: float | None
    num_active: int
    """Number of workers that are not on standby. A draining worker counts until it leaves."""
    num_standby: int
    decision: str = ""
    """A description of the last change to the set of active workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedStatus:
    """The speed of the learner in its last step."""

    tokens_per_s: float
    """Tokens per second that the model trained on, including prompts."""
    mfu: float | None
    """Model FLOPs utilisation: the share of the device's peak rate that is used; None if the peak
    is unknown."""
    peak_memory_bytes: float
    forward_backward_s: float
    optimizer_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStatus:
    """The values of an optimizer step that views show. They come from the step's row of metrics."""

    step: int
    """Number of the step, from 1."""
    reward: float | None
    """Mean reward; None if it is not finite."""
    mean_staleness: float | None
    """Mean staleness of the trained tokens, in steps; None without trained tokens."""
    max_staleness: int
    accepted_tokens_per_s: float
    """Completion tokens accepted per second since the previous step."""
    seconds: float
    """Seconds since the previous step."""
    useful_share: float | None = None
    """Share of the groups since the previous step whose rewards differ; None without groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """The state of a run at one instant, collected by its learner."""

    run_name: str
    at: float = 0.0
    """Unix time of the status, seconds."""
    state: RunState = "running"
    elapsed_s: float
    step: int
    max_steps: int
    max_staleness: int
    """The hard bound on staleness, in steps."""
    staleness_bound: int | None = None
    """The staleness bound that applies to new leases; None if it is `max_staleness`."""
    publish_period: int
    activity: str = ""
    """The learner's activity, such as "training"; empty while the learner waits for groups."""
    waiting_for: str = ""
    """The reason why the learner waits; empty while the learner works."""
    explanation: str = ""
    """Text that explains why the learner waits long or why workers have no groups. It begins with
    the remedy, because a small screen cuts off its end. Empty if nothing stalls."""
    eta_s: float | None = None
    """Estimated seconds until the last step has ended; None until two steps have been timed."""
    nodes: tuple[NodeStatus, ...] = ()
    reward_history: tuple[tuple[int, float], ...] = ()
    """The mean rewards of all steps, oldest first: (step, mean reward). With more than MAX_POINTS
    steps, each point is the mean of several steps."""
    eval_history: tuple[tuple[int, float, float], ...] = ()
    """The newest MAX_POINTS evaluations: step, mean reward of sampled answers, mean reward of
    greedy answers."""
    evals_are_rates: bool = True
    """Whether every reward of the evaluations was 0 or 1."""
    eval_errors: Mapping[int, int] = field(default_factory=dict)
    """Number of rewards that failed in each evaluation. The key is the step of the evaluation. A
    failed reward counts as 0."""
    staleness_tokens: Mapping[int, int] = field(default_factory=dict)
    """Number of tokens that the whole run trained on, for each staleness."""
    idle_ratio: float = 0.0
    """Share of the time since the learner's start in which the learner has waited for rollouts,
    0..1. An operator's pauses are left out of both times."""
    recent_idle_ratio: float = 0.0
    """Share of the last minute in which the learner has waited. If the last steps took longer than
    a minute, their time counts."""
    last_step: StepStatus | None = None
    """The newest step; None before this process has made a step."""
    speed: SpeedStatus | None = None
    """The learner's speed in its last step; None before the first step."""
    num_buffered: int = 0
    groups_per_step: int = 0
    num_leased: int = 0
    versions: tuple[VersionStatus, ...] = ()
    """The newest version, then older versions that nodes still fetch, newest first."""
    broadcast_bytes: int = 0
    """Number of weight bytes that the learner itself has sent in the whole run."""
    refused: Mapping[str, int] = field(default_factory=dict)
    """Number of groups that were refused or dropped since the start, for each reason."""
    cost: CostStatus | None = None
    """The costs of the run; None if no machine has a price."""
    notices: tuple[str, ...] = ()
    """The newest log lines for the operator, oldest first."""

    @property
    def bound(self) -> int:
        """The staleness bound that applies to new leases, in steps."""
        return self.max_staleness if self.staleness_bound is None else self.staleness_bound

    def to_json(self) -> bytes:
        """Return the status as one JSON object."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes, *, source: str) -> RunStatus:
        """Read a status from the JSON that `to_json` made.

        Error messages use `source` as the name of the JSON.

        Raises:
            DataError: if the data is no status, or a status of another release.
        """
        try:
            return _decoder.decode(data)
        except (msgspec.DecodeError, RecursionError) as error:
            raise DataError(
                f"{source}: no status of a run, or one of another release ({error}); use the "
                "release that the learner runs"
            ) from error


def finite(value: float | None) -> float | None:
    """Return the value if it is finite, otherwise None."""
    return value if value is not None and math.isfinite(value) else None


def thinned(points: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """Return the points of a curve. If there are more than MAX_POINTS, average neighbouring points.

    Each new point is the mean of an equal number of old points. The last point stays unchanged.
    Points with a value that is not finite are left out.
    """
    known = [(x, y) for x, y in points if math.isfinite(y)]
    size = -(-len(known) // MAX_POINTS)
    if size <= 1:
        return tuple(known)
    *body, last = known
    buckets = [body[start : start + size] for start in range(0, len(body), size)]
    means = [(each[-1][0], math.fsum(y for _, y in each) / len(each)) for each in buckets]
    return (*means, last)


_decoder = msgspec.json.Decoder(RunStatus)
