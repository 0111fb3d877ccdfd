"""Compute rewards on the learner, so that workers do not need the answers.

If reward.where is "learner", a worker delivers its rollouts with rewards of 0. The learner decodes
and scores each completion in a thread, with the example that the learner has kept. Then the learner
writes the group to the ledger. If scoring fails, the group ends with the reason that it would get
if a worker's scoring failed.
"""

from __future__ import annotations

from collections import Counter

from echo.core.errors import DataError
from echo.core.rollout import NO_OPINION, Group
from echo.runtime.learner.batches.prompts import PromptsAhead
from echo.tasks.rewards import RewardError, TaskHost
from echo.tasks.tokenization import TextCodec


class LearnerRewards:
    """Scores delivered groups before they are written to the ledger."""

    def __init__(self, host: TaskHost, prompts: PromptsAhead, text: TextCodec) -> None:
        """Score answers in the processes of `host`, with the examples of `prompts`.

        `text` decodes the answers.
        """
        self._host = host
        self._prompts = prompts
        self._text = text
        self._counts: Counter[str] = Counter()

    def counts(self) -> dict[str, int]:
        """Return all counts of the host by name, summed since the start."""
        self._counts.update(self._host.take_counts())
        return dict(self._counts)

    def score(self, group: Group) -> list[float]:
        """Return one reward per rollout of the group, in the same order. The call blocks.

        Raises:
            RewardError: if the task's code fails.
        """
        texts = [self._text.decode(rollout.token_ids.tolist()) for rollout in group.rollouts]
        try:
            example = self._prompts.example(group.group_id)
        except DataError as error:  # it was readable when the group was granted
            raise RewardError(str(error)) from error
        rewards = self._host.score_all(example, texts)
        return [NO_OPINION if reward is None else reward for reward in rewards]
