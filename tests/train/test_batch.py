"""Training batches: advantages and counts of groups."""

from __future__ import annotations

from echo.algo.loss import LossNeeds
from echo.train.batch import AdvantageSettings, prepare_batch
from tests.train.test_trainer import make_group


def test_groups_of_several_sizes_keep_their_order() -> None:
    groups = [make_group(rewards, n) for n, rewards in enumerate([[1, 0], [0, 0, 3], [0, 1]])]
    batch = prepare_batch(
        groups,
        settings=AdvantageSettings(normalize_by_std=False),
        needs=LossNeeds(),
        vocab_size=32,
    )
    assert [row.advantage for row in batch.samples] == [0.5, -0.5, -1.0, -1.0, 2.0, -0.5, 0.5]
    assert [row.group_index for row in batch.samples] == [0, 0, 1, 1, 1, 2, 2]
    expected = [rollout for group in groups for rollout in group.rollouts]
    assert all(row.rollout is each for row, each in zip(batch.samples, expected, strict=True))
    assert batch.num_tokens == sum(group.num_tokens for group in groups)
    assert batch.num_rollouts == 7
