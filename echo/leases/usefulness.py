"""Decides which workers deliver groups from which the learner can learn something.

The learner grants prompts without regard to the worker. So a useful group comes from an honest
worker with a probability equal to that worker's share of all delivered groups. A broken or
dishonest worker that returns equal rewards does not have to sample. So it becomes the fastest
worker and gets most of the leases. Two rules prevent such a worker from stopping a run.

**Set aside.** When a useful group arrives, each worker gets a credit. The credit is the worker's
share of the groups that were delivered since the previous useful group. A worker is set aside if
its credits sum up to EXPECTED groups or more, and its useful groups are at most LEAST_SHARE of
these credits. The worker then gets no groups for AWAY_S, and its count begins again. An honest
worker's number of useful groups varies at most like a Poisson variable. So if 20 useful groups are
expected, the probability of 2 or fewer is 5e-7. If the whole fleet delivers no useful group, no
worker is credited, so no worker is set aside.

**A quorum.** A run ends after `max_zero_signal_groups` groups in a row without a useful group. If
one worker made nearly all of these groups, this worker gets no groups until the other workers have
delivered a batch. So a fast worker cannot end the run between two useful groups of slower workers.
If no other worker exists, or no other worker could sample for ALONE_S, the groups of this worker
alone can end the run. Groups of a worker that is set aside do not count.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from echo.core.timers import RecentMap
from echo.core.units import format_duration
from echo.leases.book import MAX_WORKERS

EXPECTED = 20.0
"""A worker may be set aside only when it is credited with this many useful groups. With fewer
groups, an honest worker could be set aside by chance."""
LEAST_SHARE = 0.1
"""A worker is set aside if it delivered at most this share of the useful groups that it is credited
with."""
AWAY_S = 600.0
"""Number of seconds for which a worker is set aside. After this time, its fault may have passed."""
ALONE_S = 60.0
"""If no other worker could sample for this many seconds, no worker stays set aside."""


@dataclass(slots=True)
class _Record:
    """How many useful groups are expected of a worker, and how many useful ones it delivered."""

    expected: float = 0.0
    useful: float = 0.0


class Usefulness:
    """Counts the useful groups of each worker, and decides which workers are set aside."""

    def __init__(self, *, max_zero_signal_groups: int, groups_per_step: int) -> None:
        """Start without groups.

        The run ends after `max_zero_signal_groups` useless groups in a row.
        """
        self._max_zero_signal_groups = max_zero_signal_groups
        self._quorum = max(1, min(groups_per_step, max_zero_signal_groups // 2))
        self._records: RecentMap[str, _Record] = RecentMap(max_entries=MAX_WORKERS)
        self._since_useful: dict[str, int] = {}
        """For each worker, how many groups it has delivered since the fleet's last useful group."""
        self._num_void = 0
        """How many groups workers that were set aside have delivered since the last useful
        group."""
        self._away_until: dict[str, float] = {}
        self._dominant: str | None = None
        """The worker that made nearly all groups since the last useful group. This worker gets no
        groups until other workers have delivered enough groups (`_quorum`)."""
        self._has_asked = False
        """Whether the dominant worker was admitted again since the last useful group, because no
        other worker could sample for ALONE_S.
        """
        self._alone_since: float | None = None

    @property
    def num_discounted(self) -> int:
        """Number of groups, since the last useful group, from workers that are or were set aside.

        The run ends after `max_zero_signal_groups` groups in a row without a useful group. The
        discounted groups do not count.
        """
        dominant = 0 if self._dominant is None else self._since_useful[self._dominant]
        return self._num_void + dominant

    def is_set_aside(self, worker_id: str) -> bool:
        """Return whether a worker is set aside. Such a worker gets no groups."""
        return worker_id == self._dominant or worker_id in self._away_until

    def delivered(self, worker_id: str, *, is_useful: bool, now: float) -> list[str]:
        """Count a delivered group.

        Return a message to the operator for each worker that is set aside as a result.
        """
        if not is_useful:
            if worker_id in self._away_until:
                self._num_void += 1
            else:
                self._since_useful[worker_id] = self._since_useful.get(worker_id, 0) + 1
            return []
        counts = self._since_useful
        counts[worker_id] = counts.get(worker_id, 0) + 1
        self._since_useful, self._num_void, self._dominant = {}, 0, None
        self._has_asked = False
        num_groups = sum(counts.values())
        texts = []
        for name, count in counts.items():
            record = self._records.get(name) or _Record()
            self._records[name] = record
            record.expected += count / num_groups
            record.useful += name == worker_id
            if record.expected >= EXPECTED and record.useful <= LEAST_SHARE * record.expected:
                texts.append(self._set_aside(name, record, now))
            elif record.expected >= 2 * EXPECTED:
                record.expected, record.useful = record.expected / 2, record.useful / 2
        return texts

    def _set_aside(self, worker_id: str, record: _Record, now: float) -> str:
        self._away_until[worker_id] = now + AWAY_S
        self._records.discard(worker_id)
        return (
            f"{worker_id} is set aside for {format_duration(AWAY_S)}: something could be learned "
            f"from {record.useful:.0f} of its groups, where {record.expected:.0f} were to be "
            "expected by what other workers deliver; check its engine, its task and who runs it"
        )

    def exclude(self, worker_id: str, why: str, *, now: float) -> str:
        """Set a worker aside for the reason `why`. Return a message that informs the operator."""
        self._away_until[worker_id] = now + AWAY_S
        self._records.discard(worker_id)
        return (
            f"{worker_id} is set aside for {format_duration(AWAY_S)}: {why}; check its engine, its "
            "weights and who runs it"
        )

    @property
    def is_idle(self) -> bool:
        """Whether `review` would change nothing."""
        return (
            not self._away_until
            and self._dominant is None
            and sum(self._since_useful.values()) < self._max_zero_signal_groups
        )

    def review(self, workers: Mapping[str, bool], *, now: float) -> list[str]:
        """Decide which workers are set aside. Return the messages that inform the operator.

        Args:
            workers: name of a worker -> whether the worker can sample now.
            now: the present time, seconds.
        """
        others = [name for name in workers if not self.is_set_aside(name)]
        if any(workers[name] for name in others):
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = now
        is_alone = self._alone_since is not None and now >= self._alone_since + ALONE_S
        texts = []
        for name, until in list(self._away_until.items()):
            if now >= until or is_alone:
                del self._away_until[name]
                texts.append(f"{name} is no longer set aside")
        counts = self._since_useful
        if self._dominant is not None:
            if sum(counts.values()) - counts[self._dominant] >= self._quorum:
                self._dominant = None
            elif is_alone:
                # It is the only worker, so its next groups count. Its groups from before it was set
                # aside do not.
                self._num_void += counts.pop(self._dominant)
                self._dominant, self._has_asked = None, True
        elif (text := self._find_dominant(others)) is not None:
            texts.append(text)
        if not self._away_until and self._dominant is None:
            self._alone_since = None
        return texts

    def _find_dominant(self, others: Collection[str]) -> str | None:
        """If a worker made nearly all groups since the last useful group, set it aside.

        Return a message for the operator; None if no worker was set aside.
        """
        counts = self._since_useful
        num_groups = sum(counts.values())
        if num_groups < self._max_zero_signal_groups or self._has_asked:
            return None
        dominant = max(counts, key=lambda name: counts[name])
        is_only_one = all(name == dominant for name in others)
        if is_only_one or num_groups - counts[dominant] >= self._quorum:
            return None
        self._dominant = dominant
        return (
            f"{dominant} is set aside until other workers have delivered {self._quorum} "
            f"groups: nothing could be learned from the last {num_groups}, of which "
            f"{counts[dominant]} are its own"
        )
