"""Explains why the learner or the workers wait. It finds the cause, the resource and the setting.

The learner observes its fleet several times a minute, as a sampling profiler does. Each observation
divides the time of every worker among the stages of the worker's groups (`WaitStage`). A `Tally`
adds up these times, for the learner's waits and for the whole time.

**The learner waits.** One stage is the cause. The stages rewards, weights, storing and delivering
block groups. A blocking stage is the cause if it takes at least BLOCKED_SHARE of the time.
Otherwise the cause is sampling or granting, whichever takes more time. While the learner waits, no
step ends, so the staleness bound may admit no group for a worker. The idle time of this worker does
not count, because the wait causes it. Each stage leads to a resource:

    rewards      the task's code, at the workers or at the learner
    weights      the first slow link on the path from the learner, or the disk behind this link
    storing      the learner's disk
    delivering   the link from a worker
    sampling     useless groups, slow agents, one slow worker, a staleness bound that admits too few
                 groups for the engines, a setting or a memory that limits the engines, or the
                 number of workers
    granting     the reason in `ObservedFleet.wait_reason`

**Workers have no groups**, and the learner does not wait. Then the learner is the bottleneck. The
cause is the longest part of the step, or a setting that slows down the step unnecessarily.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median
from typing import TypeVar

from echo.core.units import MAX_LISTED, counted, format_bytes, format_duration

MAX_WORKERS_LISTED = 8
"""Largest number of workers that the text on the learner's wait lists."""
BLOCKED_SHARE = 0.35
"""A blocking stage is the cause if it takes at least this share of the workers' time. The share may
be less than MOST_SHARE, because engines sample other groups while some groups are blocked."""
MOST_SHARE = 0.5
"""This share or more of a wait, of the groups, or of the engines' places counts as most of it."""
NOTABLE_SHARE = 0.2
"""A share of time counts if it exceeds this value: of the time in which workers have no groups, or
in which the staleness bound admits none. A smaller share is no cause of a long wait."""
IDLE_SHARE = 0.6
"""If workers have no groups for this share of their time, the fleet is too large for the learner.
A fleet that samples twice as fast as the learner trains is idle half of the time, and is no fault.
"""
CLEAR_FACTOR = 1.5
"""A number is clearly larger than another number if it exceeds this multiple of it. Rates and
numbers of chunks are only as recent as the last heartbeat."""
STRAGGLER_FACTOR = 2.0
"""A straggler must be slower than the median of the other workers by at least this factor. While
the learner waits, it must also sample for this many times the other workers' mean time, because the
measured speeds of short groups vary."""
FEW_ROLLOUTS = 16
"""If an engine samples at most this many concurrent rollouts, more rollouts usually take almost the
same time."""
SATURATED_SCALING = 0.2
"""An engine is saturated, for example by its cores, if its scaling is below this value: three times
the rollouts make at most 1.25 times the tokens per second."""


SERVING_AGENTS = "serving agents"
"""The activity of a worker that serves agents."""


class WaitStage(StrEnum):
    """What happens to a worker's groups, or why a worker has no groups."""

    SAMPLING = "sampling"
    """The engine samples rollouts of the groups."""
    REWARDS = "rewards"
    """The task computes the groups' rewards, at the worker or at the learner."""
    WEIGHTS = "weights"
    """The groups wait for a newer version, or the worker's version is too old for another group."""
    STORING = "storing"
    """The learner writes the groups to its disk."""
    DELIVERING = "delivering"
    """The groups' results are on the way to the learner."""
    ADMISSION = "admission"
    """The worker has no groups, because the staleness bound admits no further group."""
    GRANTING = "granting"
    """The worker has no groups, although the staleness bound admits groups."""


BLOCKED = (WaitStage.REWARDS, WaitStage.WEIGHTS, WaitStage.STORING, WaitStage.DELIVERING)


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedNode:
    """What the learner knows about a relay or an active worker at one instant."""

    name: str
    role: str = "worker"
    is_dialable: bool = True
    """Whether other nodes can dial this node to fetch weights."""
    fetching: str = ""
    """The version that the node is fetching, as text; empty if the node is fetching none."""
    num_chunks_held: int = 0
    num_chunks: int = 0
    parent: str = "-"
    """The node from which this node gets weights."""
    bytes_per_s: float | None = None
    """Rate at which the node receives weights; None before a measurement."""
    recent_bytes_per_s: float = 0.0
    """Bytes of weights that the node received in the last seconds, per second."""
    write_bytes_per_s: float | None = None
    """Rate at which the node processes received weights: it verifies, decodes and writes them. None
    if unknown."""
    activity: str = ""
    """What the node does now, in the node's own words."""
    engine: str = ""
    num_leases: int = 0
    num_here: int = 0
    """Number of this worker's leases whose results the learner is scoring or storing now."""
    groups: Mapping[str, int] = field(default_factory=dict)
    """Number of groups in each state, according to the worker's last report. A state is a
    WaitStage, "queued" or "delivered"."""
    is_fresh: bool = True
    """Whether the worker's installed version may sample the next group."""
    num_places: int = 0
    """Number of groups that the worker's engine can sample concurrently; 0 if unknown."""
    num_fit: int = 0
    """Number of concurrent groups that would fit into the worker's memory; 0 if unknown."""
    scaling: float | None = None
    """The exponent with which the engine's tokens per second grow with the number of its rollouts,
    0 to 1; None if unknown."""
    speed: float | None = None
    """Tokens per second of one rollout in the slowest group that the worker is sampling; None if
    unknown."""
    reward_s: float | None = None
    """Mean seconds that recent calls of the task's code took; None without recent calls."""

    @property
    def is_saturated(self) -> bool:
        """Whether more concurrent rollouts would hardly increase the tokens per second."""
        return self.scaling is not None and self.scaling < SATURATED_SCALING

    @property
    def is_installing(self) -> bool:
        """Whether the engine takes a version that the worker has fetched."""
        return self.activity.startswith("installing")

    @property
    def is_fetching(self) -> bool:
        """Whether the node fetches a version from a parent."""
        return bool(self.fetching) and self.parent != "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedFleet:
    """What the learner knows about its own wait and about its fleet at one instant."""

    num_missing: int
    """Number of groups that the next step still lacks."""
    groups_per_step: int
    group_size: int = 1
    max_staleness: int = 0
    hedge_factor: float | None = None
    is_closed: bool = False
    """Whether the staleness bound admits no further groups, whichever version a worker has
    installed."""
    newest: str = ""
    """The newest version, as text; empty if it does not exist or may sample no further group."""
    wait_reason: str = ""
    """The scheduler's reason why the next step's groups cannot be granted; "" if they can be
    granted."""
    num_scoring: int = 0
    """Number of groups whose rewards the learner is computing."""
    num_storing: int = 0
    """Number of groups that the learner is writing to its disk."""
    num_standby: int = 0
    """Workers that the learner has put on standby."""
    num_enough: int | None = None
    """Number of active workers that activation last found enough, when it put others on standby.
    None if it put none on standby."""
    num_held: int = 0
    """Workers that an operator drains or keeps on standby."""
    joining: tuple[str, ...] = ()
    """Workers that have sent Hello but not yet Ready."""
    nodes: tuple[ObservedNode, ...] = ()
    """Relays, and workers that are not on standby."""
    num_useless: int = 0
    """Number of newest groups, one after another, that gave no training signal."""
    useless: str = ""
    """Text on the `num_useless` groups. It gives their number for each reason."""
    _by_name: dict[str, ObservedNode] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {node.name: node for node in self.nodes})

    @property
    def workers(self) -> list[ObservedNode]:
        return [node for node in self.nodes if node.role == "worker"]

    @property
    def has_enough(self) -> bool:
        """Whether as many workers are active as activation last found enough."""
        return self.num_enough is not None and len(self.workers) >= self.num_enough

    def node(self, name: str) -> ObservedNode | None:
        """Return the node that has this name; None for the learner and for unknown nodes."""
        return self._by_name.get(name)

    def path(self, worker: ObservedNode) -> list[ObservedNode]:
        """Return the nodes that are fetching weights on the path from a worker up to the learner.

        The path ends at a node whose parent is the learner. It also ends if the parent has the
        whole version, or CLEAR_FACTOR times as many chunks as the node.
        """
        path = [worker]
        while (parent := self.node(path[-1].parent)) is not None and parent.is_fetching:
            most = max(CLEAR_FACTOR * path[-1].num_chunks_held, 4)
            if parent in path or parent.num_chunks_held > most:
                break
            path.append(parent)
        return path

    def shares(self, worker: ObservedNode) -> dict[WaitStage, float]:
        """Return which share of a worker's present activity each stage takes.

        The shares add up to 1.
        """
        if not worker.num_leases:
            if self.is_closed:
                return {WaitStage.ADMISSION: 1.0}
            return {WaitStage.GRANTING if worker.is_fresh else WaitStage.WEIGHTS: 1.0}
        counts: Counter[WaitStage] = Counter()
        for stage in (WaitStage.SAMPLING, WaitStage.REWARDS, WaitStage.WEIGHTS):
            counts[stage] = worker.groups.get(stage, 0)
        out = worker.num_leases - worker.num_here
        # A group that was acknowledged since the last report is no lease any longer.
        rest = out - counts.total() - worker.groups.get("queued", 0)
        counts[WaitStage.DELIVERING] = max(0, min(worker.groups.get("delivered", 0), rest))
        is_scoring = self.num_scoring > self.num_storing
        counts[WaitStage.REWARDS if is_scoring else WaitStage.STORING] += worker.num_here
        total = counts.total()
        if not total:
            return {WaitStage.WEIGHTS if worker.is_installing else WaitStage.SAMPLING: 1.0}
        return {stage: count / total for stage, count in counts.items() if count}


@dataclass(slots=True)
class Tally:
    """Sums up the time that workers spend in each stage, in the learner's waits and in total."""

    waited_s: float = 0.0
    """Seconds in which the learner waited while at least one worker was active."""
    closed_s: float = 0.0
    """Seconds in which the learner waited and the staleness bound admitted no groups."""
    waits: dict[tuple[WaitStage, str], float] = field(default_factory=dict)
    """For each (stage, worker), the seconds that the worker spent in the stage while the learner
    waited."""
    seconds: dict[WaitStage, float] = field(default_factory=dict)
    """For each stage, the seconds that all workers spent in it, whether the learner waited or
    not."""
    places_s: float = 0.0
    """Seconds that the learner waited, multiplied by the number of the engines' places for
    groups."""
    used_places_s: float = 0.0
    """The part of `places_s` in which places were in use to sample groups."""
    seen: dict[WaitStage, ObservedFleet] = field(default_factory=dict)
    """For each stage, the last observed fleet in which a worker was in this stage while the learner
    waited."""
    slow_hops: dict[str, float] = field(default_factory=dict)
    """For each node, the seconds in which workers waited until this node had fetched weights from a
    parent. The parent already had these weights."""
    seen_paths: dict[str, list[ObservedNode]] = field(default_factory=dict)
    """For each node in `slow_hops`, the last observed path from a waiting worker to this node."""
    num_accepted: int = 0
    """Number of groups that were delivered and kept for training."""
    useless: Counter[str] = field(default_factory=Counter)
    """Number of groups that gave no training signal, for each reason."""

    def add(self, fleet: ObservedFleet, seconds: float, *, is_waiting: bool) -> None:
        """Add a period of `seconds` in which the fleet was in the observed state."""
        if is_waiting and fleet.workers:
            self.waited_s += seconds
            self.closed_s += seconds * fleet.is_closed
        for worker in fleet.workers:
            for stage, share in fleet.shares(worker).items():
                _add(self.seconds, stage, share * seconds)
                if is_waiting:
                    self._add_wait(fleet, worker, stage, share * seconds)
            if is_waiting:
                num_used = worker.groups.get(WaitStage.SAMPLING, 0) if worker.num_leases else 0
                self.places_s += worker.num_places * seconds
                self.used_places_s += min(worker.num_places, num_used) * seconds

    def _add_wait(
        self, fleet: ObservedFleet, worker: ObservedNode, stage: WaitStage, seconds: float
    ) -> None:
        _add(self.waits, (stage, worker.name), seconds)
        self.seen[stage] = fleet
        if stage is WaitStage.WEIGHTS and worker.is_fetching:
            path = fleet.path(worker)
            _add(self.slow_hops, path[-1].name, seconds)
            self.seen_paths[path[-1].name] = path

    def include(self, other: Tally) -> None:
        """Add the times and counts of a later tally to this tally."""
        for name in ("waited_s", "closed_s", "places_s", "used_places_s", "num_accepted"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for waits, seconds in other.waits.items():
            _add(self.waits, waits, seconds)
        for stage, seconds in other.seconds.items():
            _add(self.seconds, stage, seconds)
        for node, seconds in other.slow_hops.items():
            _add(self.slow_hops, node, seconds)
        self.seen |= other.seen
        self.seen_paths |= other.seen_paths
        self.useless += other.useless

    def in_waits(self) -> dict[WaitStage, float]:
        """Return the seconds that all workers spent in each stage while the learner waited.

        The stage ADMISSION is left out, because it is an effect of the wait: the staleness bound
        admits no more groups until the learner has made further steps.
        """
        found = dict.fromkeys(WaitStage, 0.0)
        for (stage, _), seconds in self.waits.items():
            found[stage] += seconds
        del found[WaitStage.ADMISSION]
        return found

    def wait_by_stage(self) -> dict[WaitStage, float]:
        """Divide the seconds that the learner waited among the stages of the workers.

        The sum is `waited_s`, or 0 if no worker was in a counted stage.
        """
        by_stage = self.in_waits()
        total = sum(by_stage.values())
        return {s: self.waited_s * each / total for s, each in by_stage.items() if each}

    @property
    def idle_share(self) -> float:
        """Share of the workers' time in which a worker had no groups, although it could sample."""
        total = sum(self.seconds.values())
        idle = (WaitStage.ADMISSION, WaitStage.GRANTING)
        idle_s = sum(self.seconds.get(stage, 0.0) for stage in idle)
        return idle_s / total if total else 0.0


Key = TypeVar("Key")


def _add(times: dict[Key, float], key: Key, seconds: float) -> None:
    times[key] = times.get(key, 0.0) + seconds


@dataclass(frozen=True, slots=True)
class Explanation:
    """The cause of a wait, the responsible resource, and a remedy."""

    cause: str
    """A short name, such as "slow_relay"; docs/troubleshooting.md has one row per cause."""
    resource: str
    """The responsible node, link, disk or code."""
    setting: str
    """The configuration key to change; empty if only another machine would help."""
    chain: str
    """The chain of causes from the missing groups to the resource, as text."""
    remedy: str

    def __str__(self) -> str:
        return f"{self.chain}; {self.remedy}"


# --- the wait itself ------------------------------------------------------------------------------


def describe_wait(fleet: ObservedFleet) -> str:
    """Return text that lists a step's missing groups and the workers that hold leases.

    The text is empty if no group is missing.
    """
    workers = fleet.workers
    if fleet.num_missing <= 0:
        return ""
    if workers:
        held = sorted(workers, key=lambda worker: -worker.num_leases)
        parts = [_missing(fleet), *map(_describe, held[:MAX_WORKERS_LISTED])]
        if others := held[MAX_WORKERS_LISTED:]:
            have = f"{_others(len(others))} {_verb(others, 'has', 'have')}"
            parts.append(f"{have} {sum(each.num_leases for each in others)}")
    else:
        parts = [counted(fleet.num_missing, "group"), _without_workers(fleet)]
    if fleet.num_useless >= fleet.groups_per_step:
        groups = counted(fleet.num_useless, "group")
        useless = f"nothing could be learned from the last {groups}"
        parts.append(f"{useless} ({fleet.useless})")
    return "; ".join(parts)


def _without_workers(fleet: ObservedFleet) -> str:
    if fleet.joining:
        return f"{_names(fleet.joining)} {_verb(fleet.joining, 'is', 'are')} joining"
    if fleet.num_standby:
        return "every worker is on standby"
    return "an operator holds every worker" if fleet.num_held else "no worker is connected"


def _missing(fleet: ObservedFleet) -> str:
    return f"{max(1, fleet.num_missing)} of {counted(fleet.groups_per_step, 'group')}"


def _describe(worker: ObservedNode) -> str:
    if worker.fetching:
        return f"{worker.name} has {worker.num_leases} and fetches {_fetch(worker)}"
    return f"{worker.name} has {worker.num_leases} ({worker.activity})"


def _fetch(node: ObservedNode) -> str:
    text = f"{node.num_chunks_held}/{counted(node.num_chunks, 'chunk')} from {node.parent}"
    if node.bytes_per_s is not None:
        text += f" at {format_bytes(node.bytes_per_s)}/s"
    return f"{node.fetching} ({text})"


def _held(node: ObservedNode) -> str:
    return counted(node.num_chunks_held, "chunk") if node.is_fetching else "all"


def _names(names: Sequence[str]) -> str:
    shown = list(names[:MAX_LISTED])
    if others := len(names) - MAX_LISTED:
        shown += [_others(others)] if others > 0 else []
    return " and ".join(filter(None, (", ".join(shown[:-1]), *shown[-1:])))


def _others(number: int) -> str:
    return counted(number, "other")


def _verb(names: Sequence[object], singular: str, plural: str) -> str:
    return singular if len(names) == 1 else plural


# --- the learner waits ----------------------------------------------------------------------------


def explain_wait(tally: Tally, fleet: ObservedFleet) -> Explanation:
    """Explain why the learner waited in the time of a tally. `fleet` is the present state."""
    if not fleet.workers and not tally.waits:
        return _no_worker(fleet)
    by_stage = tally.in_waits()
    total = sum(by_stage.values())
    blocked = max(BLOCKED, key=lambda stage: by_stage[stage])
    if not total:
        return _granting(tally, fleet)
    if by_stage[blocked] >= BLOCKED_SHARE * total:
        names = _by_time(tally, blocked)
        if blocked is WaitStage.WEIGHTS:
            return _weights(tally, names)
        explain = {
            WaitStage.REWARDS: _rewards,
            WaitStage.STORING: _storing,
            WaitStage.DELIVERING: _delivering,
        }[blocked]
        return explain(tally.seen[blocked], names)
    if by_stage[WaitStage.GRANTING] > by_stage[WaitStage.SAMPLING]:
        return _granting(tally, tally.seen[WaitStage.GRANTING])
    return _sampling(tally, tally.seen.get(WaitStage.SAMPLING, fleet))


def _by_time(tally: Tally, stage: WaitStage) -> list[str]:
    """Return the workers whose groups were in this stage.

    Workers with the longest times come first.
    """
    times = {name: s for (at, name), s in tally.waits.items() if at is stage}
    least = max(times.values()) / 10
    return sorted((n for n, s in times.items() if s >= least), key=lambda name: -times[name])


def _no_worker(fleet: ObservedFleet) -> Explanation:
    setting, remedy = "", "start workers with the join string of the run"
    if fleet.joining:
        remedy = "a worker loads model and engine first, and its log says how far it is"
    elif fleet.num_standby:
        setting = "activation.mode"
        remedy = 'set activation.mode = "off" or raise activation.margin'
    elif fleet.num_held:
        remedy = "start workers, or give one of these back: echo-rl ctl resume NODE RUN"
    chain = f"{_missing(fleet)}: {_without_workers(fleet)}"
    return Explanation("no_worker", "workers", setting, chain, remedy)


def _granting(tally: Tally, fleet: ObservedFleet) -> Explanation:
    chain = f"{_missing(fleet)}: no worker is given one"
    if fleet.wait_reason == "no_agent":
        return Explanation(
            "no_agent", "agents", "agent.listen",
            f"{_missing(fleet)}: no agent has asked for a group",
            "have agents call a worker's endpoint",
        )  # fmt: skip
    if fleet.wait_reason == "outdated" or (not fleet.wait_reason and fleet.is_closed):
        return Explanation(
            "outdated", "learner", "sync.publish_period",
            f"{chain}: the newest version is too old for the next step",
            "lower sync.publish_period, or raise sync.max_staleness",
        )  # fmt: skip
    if fleet.wait_reason == "busy":
        names = [worker.name for worker in fleet.workers]
        return Explanation(
            "busy", _names(names), "",
            f"{chain}: {_names(names)} {_verb(names, 'takes', 'take')} none",
            "look at the log of such a worker: its engine hangs, or it is full of results that "
            "nobody wants; restart it",
        )  # fmt: skip
    return Explanation(
        "slow_prompts", "learner", "",
        f"{chain}: prompts are not ready",
        "make the task's examples cheaper to build",
    )  # fmt: skip


def _rewards(fleet: ObservedFleet, names: Sequence[str]) -> Explanation:
    workers = [worker for worker in fleet.workers if worker.name in names]
    times = [worker.reward_s for worker in workers if worker.reward_s is not None]
    call = f"a call takes {format_duration(max(times))}" if times else "no call has returned"
    if fleet.num_scoring > fleet.num_storing:
        return Explanation(
            "slow_reward", "task at the learner", "reward.where",
            f"{_missing(fleet)}: {fleet.num_scoring} wait for their reward at the learner",
            'make the reward faster, or set reward.where = "worker"',
        )  # fmt: skip
    num = sum(worker.groups.get(WaitStage.REWARDS, 0) for worker in workers)
    return Explanation(
        "slow_reward", f"task at {_names(names)}", "task.reward_timeout_s",
        f"{_missing(fleet)}: {num} wait for their reward at {_names(names)}, where {call}",
        "make the reward faster, or lower task.reward_timeout_s so that a call that hangs ends "
        "sooner",
    )  # fmt: skip


def _storing(fleet: ObservedFleet, names: Sequence[str]) -> Explanation:
    return Explanation(
        "slow_disk", "disk of the learner", "run.dir",
        f"{_missing(fleet)}: results of {_names(names)} are being written to the learner's disk",
        "set run.dir to a faster disk of this machine",
    )  # fmt: skip


def _delivering(fleet: ObservedFleet, names: Sequence[str]) -> Explanation:
    return Explanation(
        "slow_delivery", f"uplink of {_names(names)}", "",
        f"{_missing(fleet)}: results of {_names(names)} are on the way to the learner",
        "give such a worker a faster uplink, or a relay nearby",
    )  # fmt: skip


# --- the path of the weights ----------------------------------------------------------------------


def _weights(tally: Tally, names: Sequence[str]) -> Explanation:
    fleet = tally.seen[WaitStage.WEIGHTS]
    start = f"{_missing(fleet)}: {_names(names)} {_verb(names, 'waits', 'wait')} for"
    waited_s = tally.in_waits()[WaitStage.WEIGHTS]
    if sum(tally.slow_hops.values()) < MOST_SHARE * waited_s:
        waiting = [worker for worker in fleet.workers if worker.name in names]
        installing = [each for each in waiting if each.is_installing]
        if installing:
            name, activity = installing[0].name, installing[0].activity
            return Explanation(
                "slow_install", f"engine of {name}", "sync.publish_period",
                f"{start} new weights; {name} is {activity}",
                "raise sync.publish_period, so that versions come less often",
            )  # fmt: skip
        if fleet.newest:
            # A slow uplink on the path also delays the reports of fetches.
            return Explanation(
                "slow_weights", f"links to {_names(names)}", "sync.publish_period",
                f"{start} {fleet.newest}, which {_verb(names, 'it has', 'they have')} not begun to "
                "fetch",
                "raise sync.publish_period, or give their parents faster uplinks",
            )  # fmt: skip
        return Explanation(
            "no_weights", _names(names), "sync.max_staleness",
            f"{start} weights that the next step may be trained on",
            "raise sync.max_staleness, or lower sync.publish_period",
        )  # fmt: skip
    slowest = max(tally.slow_hops, key=lambda name: tally.slow_hops[name])
    path = tally.seen_paths[slowest]
    hops = [f"{path[0].name} fetches {_fetch(path[0])}"]
    hops += [f"{node.name} takes it from {node.parent}" for node in path[1:]]
    if len(path) > 1 and path[-1].bytes_per_s is not None:
        hops[-1] += f" at {format_bytes(path[-1].bytes_per_s)}/s"
    return _slow_hop(fleet, path[-1], f"{start} {path[0].fetching}: {', and '.join(hops)}")


def _slow_hop(fleet: ObservedFleet, node: ObservedNode, chain: str) -> Explanation:
    """Explain why a node fetches slowly from a parent that holds the whole version."""
    writes = node.write_bytes_per_s
    # If the disk is slower than the link, chunks come in bursts, whose rate may be unknown.
    comes = node.bytes_per_s or node.recent_bytes_per_s
    if writes is not None and writes <= CLEAR_FACTOR * comes:
        return Explanation(
            "slow_disk", f"disk of {node.name}", "network.store_dir",
            f"{chain}, which writes {format_bytes(writes)}/s",
            f"set network.store_dir on {node.name} to a faster disk",
        )  # fmt: skip
    beside = [each for each in fleet.nodes if each.parent == node.parent and each.name != node.name]
    parent = fleet.node(node.parent)
    if parent is not None:
        return Explanation(
            "slow_relay", parent.name, "worker.connect" if parent.role == "relay" else "",
            f"{chain}; {parent.name} has {_held(parent)} of it, so its uplink is the bottleneck",
            f"add a relay beside {parent.name} and name it in worker.connect, or raise "
            "sync.publish_period",
        )  # fmt: skip
    leaves = [each.name for each in (node, *beside) if not each.is_dialable]
    has_relay = any(each.role == "relay" or each.is_dialable for each in fleet.nodes)
    if len(leaves) > 1 and not has_relay:
        return Explanation(
            "no_relay", "uplink of the learner", "worker.advertise",
            f"{chain}; {len(leaves)} workers cannot be dialled, so the learner's uplink sends each "
            "a copy",
            "start a relay near them, or set worker.listen and worker.advertise where they can be "
            "reached",
        )  # fmt: skip
    return Explanation(
        "slow_weights", f"link from the learner to {node.name}", "sync.publish_period",
        chain,
        "raise sync.publish_period, or give the learner a faster uplink",
    )  # fmt: skip


# --- sampling takes long --------------------------------------------------------------------------


def _sampling(tally: Tally, fleet: ObservedFleet) -> Explanation:
    num_useless = tally.useless.total()
    num_delivered = tally.num_accepted + num_useless
    # With these groups, the step would lack none.
    is_enough = num_useless >= fleet.num_missing
    if is_enough and num_useless >= MOST_SHARE * num_delivered:
        reasons = ", ".join(f"{n} {reason}" for reason, n in tally.useless.most_common())
        return Explanation(
            "useless_groups", "task", "batch.group_size",
            f"{_missing(fleet)}: nothing could be learned from {num_useless} of the last "
            f"{counted(num_delivered, 'group')} ({reasons})",
            "choose prompts of middle difficulty, or raise batch.group_size"
            if "zero_variance" in tally.useless
            else "docs/troubleshooting.md says what each reason means",
        )  # fmt: skip
    if all(worker.activity == SERVING_AGENTS for worker in fleet.workers if worker.num_leases):
        return Explanation(
            "slow_agents", "agents", "",
            f"{_missing(fleet)}: agents play them",
            "run more agents at the workers' endpoints, or faster ones",
        )  # fmt: skip
    straggler = _straggler(tally, fleet)
    if straggler is not None:
        return straggler
    names = _by_time(tally, WaitStage.SAMPLING)
    samplers = [worker for worker in fleet.workers if worker.name in names]
    places = [worker.num_places for worker in samplers if worker.num_places]
    used = tally.used_places_s / tally.places_s if tally.places_s else 1.0
    chain = f"{_missing(fleet)}: {_names(names)} {_verb(names, 'samples', 'sample')}"
    is_idle = tally.idle_share > NOTABLE_SHARE
    is_closed = tally.closed_s > NOTABLE_SHARE * tally.waited_s
    is_saturated = bool(samplers) and all(worker.is_saturated for worker in samplers)
    if is_idle or (used < MOST_SHARE and is_closed and not is_saturated):
        remedy = "raise sync.max_staleness or batch.groups_per_step"
        return Explanation(
            "few_in_flight", "staleness bound", "sync.max_staleness",
            f"{chain} with {used:.0%} of the engines' places used: sync.max_staleness = "
            f"{fleet.max_staleness} admits no more groups",
            remedy if is_idle or fleet.has_enough else f"{remedy}, or {_more_workers(fleet)}",
        )  # fmt: skip
    limited = [worker for worker in samplers if worker.num_places and not worker.is_saturated]
    is_few = bool(places) and max(places) * fleet.group_size <= FEW_ROLLOUTS
    if limited and is_few and used >= MOST_SHARE:
        few = _few_places(fleet, limited, chain)
        if few is not None:
            return few
    setting = "activation.margin" if fleet.has_enough else ""
    return Explanation(
        "few_workers", "workers", "activation.mode" if fleet.num_standby else setting,
        f"{chain} all the time, which takes longer than a step",
        f"{_more_workers(fleet)}, or lower sampling.max_completion_tokens",
    )  # fmt: skip


def _more_workers(fleet: ObservedFleet) -> str:
    """Return the remedy for too few workers.

    If activation has put workers on standby, it might put an added worker on standby, too. So the
    remedy is then to make all workers generate. If those on standby have left since, the remedy is
    to let activation keep more.
    """
    if fleet.num_standby:
        verb = _verb(range(fleet.num_standby), "is", "are")
        return f'set activation.mode = "off" ({fleet.num_standby} {verb} on standby)'
    return "raise activation.margin" if fleet.has_enough else "add workers"


def _straggler(tally: Tally, fleet: ObservedFleet) -> Explanation | None:
    """Return an explanation if the learner waits mostly for one slow worker.

    Otherwise return None.
    """
    times = {name: s for (at, name), s in tally.waits.items() if at is WaitStage.SAMPLING}
    name = max(times, key=lambda each: times[each], default="")
    worker = fleet.node(name)
    others = [w.speed for w in fleet.workers if w.name != name and w.speed is not None]
    if worker is None or worker.speed is None or not others:
        return None
    usual = median(others)
    others_s = (sum(times.values()) - times[name]) / len(others)
    if times[name] < STRAGGLER_FACTOR * others_s or usual < STRAGGLER_FACTOR * worker.speed:
        return None
    off = fleet.hedge_factor is None
    hedge = "set leases.hedge_factor = 2 so that a faster worker samples such groups, too, or "
    return Explanation(
        "straggler", name, "leases.hedge_factor" if off else "",
        f"{_missing(fleet)}: {name} has {worker.num_leases} and samples {worker.speed:.3g} tokens "
        f"per second and rollout, the others {usual:.3g}",
        f"{hedge if off else ''}stop {name}",
    )  # fmt: skip


def _few_places(
    fleet: ObservedFleet, samplers: Sequence[ObservedNode], chain: str
) -> Explanation | None:
    """Return an explanation if a setting or the memory limits the engines.

    Otherwise return None.
    """
    worker = min(samplers, key=lambda each: each.num_places)
    places = counted(worker.num_places * fleet.group_size, "rollout")
    text = f"{chain} all the time, and {worker.name}'s engine samples only {places} at once"
    if worker.num_fit >= 2 * worker.num_places:
        fits = worker.num_fit * fleet.group_size
        return Explanation(
            "few_in_flight", f"engine of {worker.name}", "worker.max_concurrent_rollouts",
            f"{text}, while its memory holds {fits}",
            f"raise worker.max_concurrent_rollouts on {worker.name}",
        )  # fmt: skip
    if not worker.num_fit:
        return None
    is_vllm = worker.engine.startswith("vllm")
    setting = "engine.options.kv_cache_memory_bytes" if is_vllm else "worker.dtype"
    remedy = f"raise {setting}" if is_vllm else 'set worker.dtype = "bfloat16"'
    return Explanation(
        "small_kv_cache", f"memory of {worker.name}", setting,
        f"{text}, as its KV cache holds no more",
        f"{remedy}, lower sampling.max_completion_tokens, or take a machine with more memory",
    )  # fmt: skip


# --- workers are idle -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """The mean seconds of each part of a step, and the settings that influence them."""

    step_s: float
    train_s: float = 0.0
    publish_s: float = 0.0
    save_s: float = 0.0
    is_recomputing: bool = False
    """Whether activations are recomputed although they would fit into memory."""


def explain_idle(tally: Tally, parts: StepParts) -> Explanation | None:
    """Return why workers had no groups in the time of a tally.

    If the workers had enough groups, return None.
    """
    share = tally.idle_share
    if share < (NOTABLE_SHARE if parts.is_recomputing else IDLE_SHARE):
        return None
    chain = (
        f"workers have no groups {share:.0%} of the time: the learner is the bottleneck, its step "
        f"takes {format_duration(parts.step_s)}, training {format_duration(parts.train_s)} of it"
    )
    if parts.is_recomputing:
        return Explanation(
            "needless_checkpointing", "learner", "learner.gradient_checkpointing",
            f"{chain}, and recomputes activations that would fit into its memory",
            'set learner.gradient_checkpointing = "auto"',
        )  # fmt: skip
    if parts.publish_s > max(parts.train_s, parts.save_s):
        return Explanation(
            "slow_publishing", "learner", "sync.publish_period",
            f"{chain} and making versions {format_duration(parts.publish_s)}",
            "raise sync.publish_period",
        )  # fmt: skip
    if parts.save_s > parts.train_s:
        return Explanation(
            "slow_checkpoints", "disk of the learner", "checkpoint.interval_steps",
            f"{chain} and writing checkpoints {format_duration(parts.save_s)}",
            "raise checkpoint.interval_steps",
        )  # fmt: skip
    return Explanation(
        "slow_learner", "learner", "learner.num_threads",
        chain,
        "give it a faster device or more threads (learner.num_threads), or stop workers",
    )  # fmt: skip
