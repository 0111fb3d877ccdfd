"""Rewards computed at the learner, for workers that do not have the answers.

With reward.where = "learner" a worker delivers its rollouts with rewards of 0. Before the trainer
looks at a group or it is written to the ledger, each of its completions is decoded and scored,
off the loop, with the example that the learner has kept. If scoring fails, the group ends with that
reason, as it would at a worker.
"""

from __future__ import annotations

from collections import Counter

from echo.core.errors import DataError
from echo.core.rollout import NO_OPINION, Group
from echo.runtime.learner.batches.prompts import PromptsAhead
from echo.tasks.rewards import RewardError, TaskHost
from echo.tasks.tokenization import TextCodec


class LearnerRewards:
    """Scores groups on their way into the ledger."""

    def __init__(self, host: TaskHost, prompts: PromptsAhead, text: TextCodec) -> None:
        """Take the reward processes, the prompts of the groups, and the model's text."""
        self._host = host
        self._prompts = prompts
        self._text = text
        self._counts: Counter[str] = Counter()

    def counts(self) -> dict[str, int]:
        """Return what the host has counted since the start."""
        self._counts.update(self._host.take_counts())
        return dict(self._counts)

    def score(self, group: Group) -> list[float]:
        """Return one reward per rollout; it blocks.

        Raises:
            RewardError: if the task's code fails.
        """
        texts = [self._text.decode(rollout.token_ids.tolist()) for rollout in group.rollouts]
        try:
            example = self._prompts.example(group.group_id)
        except DataError as error:  # though it had one when the group was granted
            raise RewardError(str(error)) from error
        rewards = self._host.score_all(example, texts)
        return [NO_OPINION if reward is None else reward for reward in rewards]
