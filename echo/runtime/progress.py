"""Running totals of the learner: what goes into the metrics and onto the screen."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from echo.metrics import Snapshot
from echo.protocol.learner_session import LearnerSession
from echo.rollout import Group
from echo.runtime.publication import PublishPace

RATE_WINDOW_S = 10.0
"""Seconds over which the display averages its rates."""
MAX_HISTORY = 10_000
"""Points of a curve kept for the display."""


class Progress:
    """Counts what the learner has done since it started (and, for staleness, before)."""

    def __init__(self, *, staleness_tokens: Mapping[int, int], now: float) -> None:
        """Start counting.

        Args:
            staleness_tokens: trained tokens by staleness of the steps before a resume.
            now: the loop's clock, seconds.
        """
        self._started_at = now
        self._stepped_at = now
        self._waited_s = 0.0
        self._trained_s = 0.0
        self._step_times: tuple[float, float] = (0.0, 0.0)
        self._accepted: deque[tuple[float, int]] = deque()
        self._tokens_since_step = 0
        self._bytes_reported = 0
        self._staleness_tokens = dict(staleness_tokens)
        self._rewards: deque[float] = deque(maxlen=MAX_HISTORY)
        self._evals: deque[tuple[int, float, float]] = deque(maxlen=MAX_HISTORY)
        self.is_training = False

    def accepted(self, group: Group, *, now: float) -> None:
        """Count a group that was stored."""
        self._tokens_since_step += group.num_tokens
        self._accepted.append((now, group.num_tokens))
        while self._accepted and now - self._accepted[0][0] > RATE_WINDOW_S:
            self._accepted.popleft()

    def stepped(self, *, waited_s: float, trained_s: float, staleness: Mapping[int, int]) -> None:
        """Count a step: seconds waited for its batch, seconds trained, its tokens by staleness."""
        self._waited_s += waited_s
        self._trained_s += trained_s
        self._step_times = (waited_s, trained_s)
        for lag, num_tokens in staleness.items():
            self._staleness_tokens[lag] = self._staleness_tokens.get(lag, 0) + num_tokens

    def evaluated(self, step: int, sampled: float, greedy: float) -> None:
        """Add a point to the pass-rate curves."""
        self._evals.append((step, sampled, greedy))

    def step_metrics(
        self,
        metrics: Mapping[str, float],
        staleness: Mapping[int, int],
        *,
        bytes_sent: int,
        now: float,
    ) -> dict[str, float | Mapping[str, float]]:
        """Return one row: the trainer's metrics with times, rates and staleness of this step.

        Args:
            metrics: what the trainer reports.
            staleness: trained tokens of the step by staleness.
            bytes_sent: weights sent since the start, bytes.
            now: the loop's clock, seconds.
        """
        self._rewards.append(metrics.get("reward/mean", 0.0))
        num_tokens = sum(staleness.values())
        waited_s, trained_s = self._step_times
        step_s = max(now - self._stepped_at, 1e-9)
        row: dict[str, float | Mapping[str, float]] = {
            **metrics,
            "time/step": step_s,
            "time/train": trained_s,
            "time/wait_for_batch": waited_s,
            "learner/idle_ratio": self.idle_ratio,
            "perf/tokens_per_s": self._tokens_since_step / step_s,
            "broadcast/bytes": bytes_sent - self._bytes_reported,
        }
        if num_tokens:
            total = sum(lag * count for lag, count in staleness.items())
            row["staleness/mean"] = total / num_tokens
            row["staleness/max"] = max(staleness)
            row["staleness/hist"] = {str(lag): n for lag, n in sorted(staleness.items())}
        self._stepped_at, self._tokens_since_step, self._bytes_reported = now, 0, bytes_sent
        return row

    @property
    def idle_ratio(self) -> float:
        """Share of the time since the start that the learner waited for groups."""
        total_s = self._waited_s + self._trained_s
        return self._waited_s / total_s if total_s else 0.0

    def snapshot(
        self,
        session: LearnerSession,
        *,
        run_name: str,
        max_steps: int,
        pace: PublishPace,
        now: float,
    ) -> Snapshot:
        """Return everything that the live view draws."""
        held, wanted = broadcast_progress(session)
        newest = session.broadcast.newest_complete
        window_s = min(RATE_WINDOW_S, max(now - self._started_at, 1e-9))
        return Snapshot(
            run_name=run_name,
            elapsed_s=now - self._started_at,
            step=session.step,
            max_steps=max_steps,
            max_staleness=session.settings.max_staleness,
            publish_period=pace.period,
            waiting_for="" if self.is_training else describe_wait(session),
            nodes=session.views(now=now),
            reward_history=tuple(self._rewards),
            eval_history=tuple(sorted(self._evals)),
            staleness_tokens=dict(self._staleness_tokens),
            idle_ratio=self.idle_ratio,
            tokens_per_s=sum(n for at, n in self._accepted if now - at <= RATE_WINDOW_S) / window_s,
            num_buffered=len(session.buffer),
            groups_per_step=session.settings.groups_per_step,
            num_leased=session.leases.num_running,
            broadcast_version="-" if newest is None else str(newest),
            broadcast_done=held / wanted if wanted else 1.0,
            broadcast_bytes=session.broadcast.bytes_sent,
            refused=_refusals(session),
        )


def broadcast_progress(session: LearnerSession) -> tuple[int, int]:
    """Return (chunks of the newest version that nodes hold, chunks that they want), summed."""
    newest = session.broadcast.newest_complete
    if newest is None:
        return 0, 0
    num_chunks = session.broadcast.store[newest].manifest.num_chunks
    held = 0
    members = session.roster.members()
    for member in members:
        if member.installed is not None and member.installed >= newest:
            held += num_chunks
        elif member.stats.fetching == newest:
            held += member.stats.num_chunks_held
    return held, num_chunks * len(members)


def describe_wait(session: LearnerSession) -> str:
    """Say what the learner waits for, and for whom, in one line."""
    settings, buffered = session.settings, len(session.buffer)
    missing = settings.groups_per_step - buffered
    workers = session.roster.members("worker")
    if missing <= 0:
        return ""
    if not workers:
        return f"{missing} groups; no worker has joined yet"
    parts = []
    for member in workers:
        stats, leases = member.stats, session.leases.num_leases(member.node_id)
        if stats.fetching is not None:
            progress = f"{stats.num_chunks_held}/{stats.num_chunks} chunks from {stats.parent}"
            parts.append(f"{member.node_id} has {leases} and fetches {stats.fetching} ({progress})")
        else:
            parts.append(f"{member.node_id} has {leases} ({stats.state})")
    return f"{missing} of {settings.groups_per_step} groups; {'; '.join(parts)}"


def _refusals(session: LearnerSession) -> dict[str, int]:
    prefixes = ("refused/", "discarded/")
    return {
        name.split("/", 1)[1]: int(count)
        for name, count in session.counters.as_dict().items()
        if name.startswith(prefixes)
    }
