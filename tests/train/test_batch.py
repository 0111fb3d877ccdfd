"""Training batches: groups that count towards a step, advantages, expectations, counts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from echo.algo.loss import LossNeeds
from echo.core.errors import DataError
from echo.core.rollout import Group
from echo.core.token_sets import TOO_LARGE
from echo.train.batch import AdvantageSettings, StepBatch, find_refusal, prepare_batch
from tests.train.test_trainer import change_of, make_group, make_rollout, with_mask
from tests.wire.sets import make_sets

NO_NEEDS = LossNeeds()
WHOLE = LossNeeds(group_expectation=True)
PENALTY = LossNeeds(every_rollout=True)


def refusal(group: Group, needs: LossNeeds = NO_NEEDS, **settings: Any) -> str | None:
    return find_refusal(group, settings=AdvantageSettings(**settings), needs=needs, vocab_size=32)


def prepare(groups: Sequence[Group], needs: LossNeeds = NO_NEEDS, **settings: Any) -> StepBatch:
    advantages = AdvantageSettings(**{"normalize_by_std": False, **settings})
    return prepare_batch(groups, settings=advantages, needs=needs, vocab_size=32)


def advantages(batch: StepBatch) -> list[float]:
    return [row.advantage for row in batch.samples]


def masked_out(group: Group, *indices: int) -> Group:
    for index in indices:
        group = with_mask(group, index, is_trained=False)
    return group


def cut_off(group: Group, *indices: int) -> Group:
    for index in indices:
        group = change_of(group, index, finish_reason="length")
    return group


def test_groups_of_several_sizes_keep_their_order() -> None:
    groups = [make_group(rewards, n) for n, rewards in enumerate([[1, 0], [0, 0, 3], [0, 1]])]
    batch = prepare(groups)
    assert advantages(batch) == [0.5, -0.5, -1.0, -1.0, 2.0, -0.5, 0.5]
    assert [row.group_index for row in batch.samples] == [0, 0, 1, 1, 1, 2, 2]
    expected = [rollout for group in groups for rollout in group.rollouts]
    assert all(row.rollout is each for row, each in zip(batch.samples, expected, strict=True))
    assert batch.num_tokens == sum(group.num_tokens for group in groups)
    assert batch.num_rollouts == 7
    assert advantages(prepare([make_group([1, 0, 0])], leave_one_out=True)) == [1.0, -0.5, -0.5]


# -------------------------------------------------------------------------------------- overlong


def test_overlong_completions_are_filtered() -> None:
    group = make_group([1, 0, 0], 0)
    found = prepare([cut_off(group, 1)], overlong_filter=True)
    expected = prepare([masked_out(group, 1)])
    assert advantages(found) == advantages(expected)
    assert (found.num_tokens, found.num_rollouts) == (expected.num_tokens, expected.num_rollouts)
    assert len(found.samples) == 2


def test_overlong_completions_are_penalised() -> None:
    group = make_group([1, 1, 1], 0)
    sizes = [rollout.num_tokens for rollout in group.rollouts]
    assert len(set(sizes)) > 1
    limits: dict[str, Any] = {
        "max_completion_tokens": max(sizes),
        "overlong_buffer_tokens": max(sizes),
    }
    shaped = make_group([1 - size / max(sizes) for size in sizes], 0)
    assert advantages(prepare([group], **limits)) == pytest.approx(advantages(prepare([shaped])))
    assert refusal(group, **limits) is None
    assert refusal(group) == "zero_variance"


def test_a_filtered_member_stays_in_the_expectation_and_leaves_the_sum() -> None:
    group = make_group([1, 0, 0.25], 0)
    unlikely = np.full(group.rollouts[1].num_tokens, -9.0, np.float32)
    group = cut_off(change_of(group, 1, sampler_logprobs=unlikely), 1)
    assert refusal(group, WHOLE, overlong_filter=True) is None
    filtered, whole = prepare([group], WHOLE, overlong_filter=True), prepare([group], WHOLE)
    q = np.exp([-3.0, -9.0, -3.0])
    expected = pytest.approx(np.log((q**2).sum() / q.sum()))
    for batch, num_rollouts in ((filtered, 2), (whole, 3)):
        assert [row.log_expectation for row in batch.samples] == [expected] * num_rollouts
        assert batch.num_rollouts == num_rollouts
        assert batch.metrics["dropped/lost_member"] == 0.0
    assert filtered.num_tokens == group.num_tokens - len(unlikely)
    # What arrived without a token to train is lost all the same.
    assert refusal(masked_out(group, 2), WHOLE, overlong_filter=True) == "lost_member"


# -------------------------------------------------------------------------------------- refusals


def test_a_group_that_lost_a_member_is_left_out_whole() -> None:
    whole, broken = make_group([1, 0, 0], 0), masked_out(make_group([1, 0, 0], 1), 2)
    assert refusal(broken, WHOLE) == "lost_member"
    assert refusal(whole, WHOLE) is None
    assert refusal(broken) is None
    batch, alone = prepare([broken, whole], WHOLE), prepare([whole], WHOLE)
    assert advantages(batch) == advantages(alone)
    assert [batch.group_ids[row.group_index] for row in batch.samples] == [0, 0, 0]
    assert (batch.num_tokens, batch.num_rollouts) == (whole.num_tokens, 3)
    lost = sum(rollout.num_tokens for rollout in broken.rollouts[:2])
    share = lost / (lost + whole.num_tokens)
    assert batch.metrics["dropped/lost_member"] == pytest.approx(share)


def test_groups_without_a_gradient_are_told_apart() -> None:
    equal_rewards, useful = make_group([0.3] * 3, 0), make_group([1, 0, 0.5], 0)
    assert refusal(useful) is None
    assert refusal(equal_rewards) == "zero_variance"
    assert prepare([equal_rewards]).samples == []
    # The only rollouts with an advantage have no trained token: (1, 0, .5) - .5.
    assert refusal(masked_out(useful, 0, 1)) == "zero_variance"
    assert refusal(cut_off(useful, 0, 1), overlong_filter=True) == "zero_variance"
    assert refusal(equal_rewards, keep_zero_variance=True) is None
    # A penalty has a gradient on every rollout.
    assert refusal(equal_rewards, PENALTY) is None
    assert len(prepare([equal_rewards], PENALTY).samples) == 3


@pytest.mark.parametrize("needs", [NO_NEEDS, PENALTY, WHOLE])
def test_a_group_without_a_trained_token_counts_towards_no_step(needs: LossNeeds) -> None:
    group = make_group([1, 0], 0)
    assert refusal(masked_out(group, 0, 1), needs, keep_zero_variance=True) == "all_masked"
    assert refusal(cut_off(group, 0, 1), needs, overlong_filter=True) == "all_masked"
    assert refusal(group, needs) is None


def bad_logprobs(value: float) -> Group:
    group = make_group([1, 0], 3)
    logprobs = group.rollouts[1].sampler_logprobs.copy()
    logprobs[-1] = value
    return change_of(group, 1, sampler_logprobs=logprobs)


BAD_LOGPROB = r"group 3 \(attempt 0, worker w1\), rollout 1: sampler log-prob of token \d is "


LOST_OWN = [[0]] * make_group([1, 0], 8).rollouts[1].num_tokens
"""Sets of an id that no token has."""


@pytest.mark.parametrize(
    ("group", "reason", "message"),
    [
        *(
            (bad_logprobs(value), "bad_logprobs", BAD_LOGPROB + str(value))
            for value in (math.nan, math.inf, -math.inf, 0.5)
        ),
        (make_group([1.0], 4), "one_member", "group 4 .* has one rollout"),
        (make_group([1.0, math.nan], 5), "bad_reward", r"group 5 .* rewards .*: \[1\.0, nan\]"),
        (make_group([1.0, math.inf], 5), "bad_reward", r"group 5 .* rewards .*: \[1\.0, inf\]"),
        (
            dataclasses.replace(
                make_group([1], 6),
                rollouts=(make_rollout([5, 6], 1.0), make_rollout([3, 32], 0.0)),
            ),
            "bad_token_ids",
            r"group 6 .*, rollout 1: token ids span 3\.\.32, outside the model's vocabulary of 32",
        ),
        (
            dataclasses.replace(make_group([1, 0], 7), prompt_ids=np.array([-1], np.int32)),
            "bad_token_ids",
            r"group 7 .*, prompt: token ids span -1\.\.-1",
        ),
        (
            change_of(make_group([1, 0], 8), 1, support=make_sets(*LOST_OWN)),
            "bad_support",
            r"group 8 .*, rollout 1: a token is not among the ids that it was drawn from",
        ),
    ],
)
def test_a_group_that_would_poison_the_weights_is_refused_by_name(
    group: Group, reason: str, message: str
) -> None:
    assert refusal(group) == reason
    with pytest.raises(DataError, match=message):
        prepare([make_group([1, 0]), group])
    if reason == "bad_logprobs":  # of a token that is not trained, they do no harm
        size = group.rollouts[1].num_tokens
        assert refusal(with_mask(group, 1, is_trained=np.arange(size) < size - 1)) is None


def test_a_loss_of_a_narrow_range_gets_no_token_whose_ids_are_not_known() -> None:
    group = make_group([1, 0], 3)
    assert refusal(group) is None
    assert refusal(group, needs_support=True) == "no_support"
    for index, rollout in enumerate(group.rollouts):
        own = [[token] for token in rollout.token_ids.tolist()]
        group = change_of(group, index, support=make_sets(*own))
    assert refusal(group, needs_support=True) is None
    own = [[token] for token in group.rollouts[1].token_ids.tolist()]
    assert prepare([group]).metrics["support/ids"] == 1.0
    large = change_of(group, 1, support=make_sets(TOO_LARGE, *own[1:]))
    assert refusal(large, needs_support=True) == "no_support"
    share = 1 / group.num_tokens
    assert prepare([large]).metrics["support/too_large"] == pytest.approx(share)
    masked = with_mask(large, 1, is_trained=[n > 0 for n in range(len(own))])
    assert refusal(masked, needs_support=True) is None
    assert refusal(change_of(group, 1, support=make_sets(0, *own[1:])), needs_support=True) is None
