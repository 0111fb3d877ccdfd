"""The counters of a node, and the snapshot for the live view.

Metric names follow the field: `reward/mean`, `staleness/{mean,max}`, `time/{step,train,...}`,
`learner/idle_ratio`, `perf/tokens_per_s`, `broadcast/{bytes,seconds,goodput}` and so on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


class Counters:
    """Counters by name, which only increase; a name exists after its first `add`."""

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
    """What the learner knows about a node, for the live view."""

    node_id: str
    role: str
    """"learner", "relay" or "worker"."""
    state: str
    """A word or short phrase: "training", "generating", "fetching v17 63%", "waiting", "lost"."""
    version: str = "-"
    """Installed policy version, as text."""
    staleness: int | None = None
    """The learner's step minus the installed step; None without an installed version."""
    tokens_per_s: float = 0.0
    bytes_per_s: float = 0.0
    """Weight bytes received per second over the last seconds."""
    num_leases: int = 0
    parent: str = "-"
    """The node from which this node gets weights."""
    seen_s: float = 0.0
    """Seconds since the learner received the node's last message."""
    mismatch_kl: float | None = None
    """Mismatch between learner and sampler in the worker's newest trained groups, nats per token;
    None before the first group."""
    reward: float | None = None
    """Mean reward of the groups for which `mismatch_kl` was computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerView:
    """What a worker knows about itself, for its status line."""

    version: str
    """Installed policy version, as text."""
    num_tokens: int
    """Completion tokens sampled since the process started, including unfinished rollouts."""
    num_groups: int
    """Number of this worker's groups that the learner has accepted."""
    activity: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CostView:
    """The costs of the run, for the live view."""

    per_h: float
    """$ per hour for machines and traffic together."""
    total: float
    """$ spent since the start of the run."""
    per_million_tokens: float | None
    """$ per 10^6 accepted tokens; None before the first accepted token."""
    standby_per_h: float
    """The part of `per_h` for machines on standby."""
    unconfirmed_per_h: float
    """The part of `per_h` for machines that left without a confirmed release."""
    budget_per_run: float | None
    num_active: int
    num_standby: int
    decision: str = ""
    """A description of the last change in which workers are active."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeedView:
    """The speed of the learner in its last step."""

    tokens_per_s: float
    """Tokens per second that went through the model while it trained, prompts included."""
    mfu: float | None
    """Share of the device's peak arithmetic rate that the model used; None if the peak is unknown.
    """
    peak_memory_bytes: float
    forward_backward_s: float
    optimizer_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepView:
    """The values of an optimizer step that the live view shows, from the step's row of metrics."""

    step: int
    """Number of the step, from 1."""
    reward: float
    mean_staleness: float | None
    """Mean staleness of the trained tokens, in steps; None without trained tokens."""
    max_staleness: int
    accepted_tokens_per_s: float
    """Completion tokens accepted per second since the previous step."""
    seconds: float
    """Seconds since the previous step."""


def held_out(is_rate: bool) -> str:
    """Return the label of the mean reward of held-out prompts.

    Args:
        is_rate: whether every reward is 0 or 1.
    """
    return "held-out pass rate" if is_rate else "held-out reward"


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningCurve:
    """The learning curve of a resumed run up to the resume."""

    rewards: Mapping[int, float]
    """Mean reward by step."""
    evaluations: tuple[tuple[int, float, float], ...]
    """For each evaluation: its step, the mean reward of sampled answers, and that of greedy
    answers."""
    is_rate: bool = True
    """Whether every reward of an evaluation was 0 or 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """All that the live view draws, collected by the learner at one instant."""

    run_name: str
    elapsed_s: float
    step: int
    max_steps: int
    max_staleness: int
    publish_period: int
    resumed_at: int = 0
    """The step at which this process of the learner began."""
    activity: str = ""
    """The learner's activity, such as "training"; empty while it waits for groups."""
    waiting_for: str = ""
    """The reason why the learner waits; empty while it does not wait."""
    nodes: tuple[NodeView, ...] = ()
    reward_history: tuple[float, ...] = ()
    """Mean reward of each step so far, oldest first."""
    eval_history: tuple[tuple[int, float, float], ...] = ()
    """For each evaluation: its step, the mean reward of sampled answers, and that of greedy
    answers."""
    evals_are_rates: bool = True
    """Whether every reward of the evaluations was 0 or 1."""
    eval_errors: Mapping[int, int] = field(default_factory=dict)
    """Number of failed rewards, which count as 0, by the step of the evaluation."""
    staleness_tokens: Mapping[int, int] = field(default_factory=dict)
    """Trained tokens by staleness, whole run."""
    idle_ratio: float = 0.0
    """Share of the learner's time spent waiting for rollouts since it started, 0..1."""
    recent_idle_ratio: float = 0.0
    """Share of the last minute, or of the last steps if they took longer, spent waiting."""
    last_step: StepView | None = None
    """The newest step; None before this process has made one."""
    speed: SpeedView | None = None
    """The learner's speed in its last step; None before the first step."""
    num_buffered: int = 0
    groups_per_step: int = 0
    num_leased: int = 0
    broadcast_version: str = "-"
    broadcast_done: float = 0.0
    """Share of all receivers' chunks of the newest version that have arrived, 0..1."""
    broadcast_bytes: int = 0
    """Weight bytes that the learner itself has sent in the whole run."""
    refused: Mapping[str, int] = field(default_factory=dict)
    """Number of groups refused or dropped since the start, by reason."""
    cost: CostView | None = None
    """The costs of the run; None if no machine has a price."""
    notices: tuple[str, ...] = ()
    """The newest log lines for the operator, oldest first."""
