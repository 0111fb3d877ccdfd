"""Counters of a node, and the snapshot of the live view.

Metric names follow the field: `reward/mean`, `staleness/{mean,max}`, `time/{step,train,...}`,
`learner/idle_ratio`, `perf/tokens_per_s`, `broadcast/{bytes,seconds,goodput}` and so on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


class Counters:
    """Named monotonic counts; a name exists once it has been counted."""

    def __init__(self) -> None:
        self._counts: dict[str, float] = {}

    def add(self, name: str, amount: float = 1) -> None:
        self._counts[name] = self._counts.get(name, 0) + amount

    def __getitem__(self, name: str) -> float:
        return self._counts.get(name, 0)

    def as_dict(self) -> dict[str, float]:
        """Return a copy of all counts, sorted by name."""
        return dict(sorted(self._counts.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """One node as the learner sees it."""

    node_id: str
    role: str
    """"learner", "relay" or "worker"."""
    state: str
    """One word or short phrase: "training", "generating", "fetching v17 63%", "waiting", "lost"."""
    version: str = "-"
    """Installed policy version, as text."""
    staleness: int | None = None
    """Learner's step minus the installed step; None where it has no meaning."""
    tokens_per_s: float = 0.0
    bytes_per_s: float = 0.0
    """Weight bytes received per second over the last seconds."""
    num_leases: int = 0
    parent: str = "-"
    """Where it gets weights from."""
    seen_s: float = 0.0
    """Seconds since it was last heard of."""
    mismatch_kl: float | None = None
    """Of a worker's newest trained groups, nats per token; None before there is one."""
    reward: float | None = None
    """Mean reward of the same groups."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """A worker as it sees itself."""

    version: str
    """Installed policy version, as text."""
    num_tokens: int
    """Completion tokens sampled since the process started, those in the engine included."""
    num_groups: int
    """Groups that the learner has accepted of them."""
    activity: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CostView:
    """Costs of the run, as the live view shows them."""

    per_h: float
    """$ per hour, machines and traffic."""
    total: float
    """$ so far."""
    per_million_tokens: float | None
    """$ per 10^6 accepted tokens; None before there are any."""
    standby_per_h: float
    """The part of `per_h` for machines on standby."""
    unconfirmed_per_h: float
    """The part for machines that are gone without word that they were given back."""
    budget_per_run: float | None
    num_active: int
    num_standby: int
    decision: str = ""
    """The last change of who generates, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedView:
    """How fast the learner trained its last step."""

    tokens_per_s: float
    """Through the model, prompts included, while it trained."""
    mfu: float | None
    """Share of the device's arithmetic that the model needed; None where that is not known."""
    peak_memory_bytes: float
    forward_backward_s: float
    optimizer_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """Values of one optimizer step's row of metrics."""

    step: int
    """Steps done with it."""
    reward: float
    mean_staleness: float | None
    """Of the trained tokens, in steps; None if there were none."""
    max_staleness: int
    accepted_tokens_per_s: float
    """Completion tokens accepted since the step before, over the time since it."""
    seconds: float
    """Since the step before."""


def held_out(is_rate: bool) -> str:
    """Name the mean reward of held-out prompts by what it is.

    Args:
        is_rate: whether every reward is 0 or 1.
    """
    return "held-out pass rate" if is_rate else "held-out reward"


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningCurve:
    """Learning curve of a run from before it was resumed."""

    rewards: Mapping[int, float]
    """Mean reward by step."""
    evaluations: tuple[tuple[int, float, float], ...]
    """(step, mean reward sampled, mean reward greedy)."""
    is_rate: bool = True
    """Whether every reward of an evaluation was 0 or 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Everything the live view draws, taken at one instant by the learner."""

    run_name: str
    elapsed_s: float
    step: int
    max_steps: int
    max_staleness: int
    publish_period: int
    resumed_at: int = 0
    """Step at which this process of the learner began."""
    activity: str = ""
    """The learner's activity, such as "training"; empty while it waits for groups."""
    waiting_for: str = ""
    """Reason for which the learner waits, in words; empty while it does something."""
    nodes: tuple[NodeView, ...] = ()
    reward_history: tuple[float, ...] = ()
    """Mean reward of each step so far, oldest first."""
    eval_history: tuple[tuple[int, float, float], ...] = ()
    """(step, mean reward sampled, mean reward greedy) of each evaluation so far."""
    evals_are_rates: bool = True
    """Whether every reward of them was 0 or 1."""
    eval_errors: Mapping[int, int] = field(default_factory=dict)
    """Rewards that failed, and count as 0, by the step of the evaluation; only where some did."""
    staleness_tokens: Mapping[int, int] = field(default_factory=dict)
    """Trained tokens by staleness, whole run."""
    idle_ratio: float = 0.0
    """Share of the learner's time spent waiting for rollouts since it started, 0..1."""
    recent_idle_ratio: float = 0.0
    """The same of the last minute, or of the last steps if those took longer."""
    last_step: StepView | None = None
    """None before this process has made one."""
    speed: SpeedView | None = None
    """Of the last step; None before the first."""
    num_buffered: int = 0
    groups_per_step: int = 0
    num_leased: int = 0
    broadcast_version: str = "-"
    broadcast_done: float = 0.0
    """Share of all receivers' chunks of the newest version that have arrived, 0..1."""
    broadcast_bytes: int = 0
    """Weight bytes that the learner itself has sent, whole run."""
    refused: Mapping[str, int] = field(default_factory=dict)
    """Groups refused or dropped so far, by reason."""
    cost: CostView | None = None
    """None where nothing has a price."""
    notices: tuple[str, ...] = ()
    """Newest log lines worth showing, oldest first."""
