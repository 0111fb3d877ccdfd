"""How a worker keeps its engine busy where answers take several turns: whole groups, played out.

The state of an episode lives in its environment, which no other worker has, so nothing unfinished
is parked, shipped or continued here: a group that was begun is played to its end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from echo.core.rollout import Rollout
from echo.engine.engine import Sampling, VersionError
from echo.leases.partials import PartialGroup
from echo.protocol.worker_session import WorkerSession
from echo.runtime.engine_call import exact_version_of
from echo.runtime.episodes import EpisodePlayer, openings_of
from echo.runtime.threads import Threads
from echo.tasks.rewards import RewardError
from echo.wire.messages import Lease


class EpisodeLoop:
    """Hands groups to the player as the engine has room."""

    def __init__(
        self,
        session: WorkerSession,
        player: EpisodePlayer,
        sampling: Sampling,
        *,
        group_size: int,
        groups_per_batch: int,
        is_continuous: bool,
        admit: Callable[[PartialGroup], bool],
        refuse: Callable[[Sequence[Lease], str], None],
        deliver: Callable[[Lease, Sequence[Rollout] | RewardError], None],
        wake: Callable[[], None],
        spawn: Callable[..., Any],
        threads: Threads,
        has_ended: Callable[[], bool],
    ) -> None:
        """Join the parts.

        Args:
            session: the worker's conversation.
            player: plays.
            sampling: how.
            group_size: rollouts of a group.
            groups_per_batch: groups in the engine at one time.
            is_continuous: whether groups may join those that are played.
            admit: whether a group can be sampled at all; it reports those that cannot.
            refuse: gives back leases whose version has been replaced.
            deliver: takes what came of a group.
            wake: has `sample_more` called soon.
            spawn: runs a coroutine until the node's end.
            threads: the node's.
            has_ended: whether the node is over; asked from the player's threads.
        """
        self._session = session
        self._player = player
        self._sampling = sampling
        self._group_size = group_size
        self._groups_per_batch = groups_per_batch
        self._is_continuous = is_continuous
        self._admit = admit
        self._refuse = refuse
        self._deliver = deliver
        self._wake = wake
        self._spawn = spawn
        self._has_ended = has_ended
        self._num_playing = 0
        num_threads = groups_per_batch if is_continuous else 1
        self._pool = threads.pool("play", num_threads)

    @property
    def is_busy(self) -> bool:
        """Whether anything is played."""
        return self._num_playing > 0

    def sample_more(self) -> None:
        """Begin as many groups as there is room for."""
        room = self._groups_per_batch - self._num_playing
        if self._session.installed_version is None or (self.is_busy and not self._is_continuous):
            room = 0
        taken = self._session.take(room, group_size=self._group_size)
        drafts = [draft for draft in taken if self._admit(draft)]
        size = 1 if self._is_continuous else max(1, len(drafts))
        for start in range(0, len(drafts), size):
            batch = drafts[start : start + size]
            self._num_playing += len(batch)
            self._spawn(self._play(batch), name="play")

    async def _play(self, drafts: Sequence[PartialGroup]) -> None:
        leases = [draft.lease for draft in drafts]
        openings = openings_of(leases, group_size=self._group_size)
        exact_version = exact_version_of(leases)

        def on_progress(number: int) -> None:
            for draft in drafts:
                draft.num_progress += number

        try:
            results = await self._pool.run(
                lambda: self._player.play(
                    openings,
                    self._sampling,
                    should_stop=self._has_ended,
                    on_progress=on_progress,
                    exact_version=exact_version,
                ),
            )
        except VersionError as error:
            self._refuse(leases, str(error))
            return
        finally:
            self._num_playing -= len(drafts)
            self._wake()
        if self._has_ended():
            return
        for draft, result in zip(drafts, results, strict=True):
            if not isinstance(result, RewardError):
                masks = [rollout.completion_mask for rollout in result]
                self._session.tokens_sampled += sum(int(mask.sum()) for mask in masks)
            self._deliver(draft.lease, result)
