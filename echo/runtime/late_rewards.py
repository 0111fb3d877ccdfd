"""Rewards at the learner, for groups whose workers know no answers (reward.where = "learner").

The worker delivers its rollouts with rewards of 0. Before a group is judged by the trainer or
written to the journal, each of its completions is decoded and scored here, off the loop, with the
example that the learner has kept. A group that cannot be scored ends with the reason, as it would
have at a worker.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Protocol

from echo.core.rollout import Group
from echo.leases.scheduler import StoreGroup
from echo.runtime.threads import MAX_BLOCKING, Threads
from echo.tasks.rewards import RewardError, TaskHost
from echo.tasks.task import Example
from echo.wire.codec import encode_group


class Spawn(Protocol):
    """Starts a coroutine whose failure ends the node."""

    def __call__(self, work: Coroutine[Any, Any, None], *, name: str) -> object:
        """Start it."""


class LateRewards:
    """Scores groups on their way into the journal."""

    def __init__(
        self,
        host: TaskHost,
        *,
        example_of: Callable[[int], Example],
        decode: Callable[[Sequence[int]], str],
        spawn: Spawn,
        threads: Threads,
    ) -> None:
        """Join the parts.

        Args:
            host: who judges.
            example_of: group id -> its example.
            decode: token ids -> text.
            spawn: see there.
            threads: the node's.
        """
        self._host = host
        self._example_of = example_of
        self._decode = decode
        self._spawn = spawn
        self._pool = threads.pool("reward", MAX_BLOCKING)
        self._counts: Counter[str] = Counter()

    def counts(self) -> dict[str, int]:
        """Return what the host has counted since the start."""
        self._counts.update(self._host.take_counts())
        return dict(self._counts)

    def score(
        self,
        action: StoreGroup,
        *,
        then: Callable[[StoreGroup], None],
        on_fault: Callable[[Group, RewardError], None],
    ) -> None:
        """Score a group beside everything else, and hand on what comes of it."""

        async def work() -> None:
            try:
                rewards = await self._pool.run(self._rewards, action.group)
            except RewardError as error:
                on_fault(action.group, error)
                return
            rollouts = tuple(
                replace(rollout, reward=reward)
                for rollout, reward in zip(action.group.rollouts, rewards, strict=True)
            )
            group = replace(action.group, rollouts=rollouts)
            then(StoreGroup(group, *encode_group(group)))

        self._spawn(work(), name="reward")

    def _rewards(self, group: Group) -> list[float]:
        texts = [self._decode(rollout.token_ids.tolist()) for rollout in group.rollouts]
        example = self._example_of(group.group_id)
        return list(self._host.score_all(example, texts))
