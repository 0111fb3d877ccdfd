"""The trainer with every loss: what a loss asks for it gets, and the batch may be cut anyhow.

Helpers come from test_trainer.py.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from echo.algo.corrections import MaskedLoss, RolloutMasks
from echo.algo.loss import Loss, LossInputs, LossNeeds, LossOutput
from echo.algo.losses import make_loss
from echo.core.rollout import Group
from echo.train.batch import AdvantageSettings
from echo.train.trainer import Trainer
from tests.train.test_trainer import (
    assert_close,
    change_of,
    equal,
    gradients,
    gradients_and_metrics,
    make_group,
    make_groups,
    on_policy,
)
from tests.train.trainers import fast_trainer

LOSSES: dict[str, Loss] = {
    "grpo": make_loss("grpo"),
    "dapo": make_loss("dapo"),
    "dr_grpo": make_loss("dr_grpo", max_completion_tokens=9),
    "gspo": make_loss("gspo", clip_low=0.2, clip_high=0.28),
    "gepo": make_loss("gepo"),
    "gepo with kl": make_loss("gepo", sampler_kl_coef=0.01, clip_low=None, clip_high=None),
    "cispo": make_loss("cispo"),
    "decoupled_ppo": make_loss("decoupled_ppo"),
    "decoupled_ppo loglinear": make_loss("decoupled_ppo", proximal="loglinear"),
    "m2po": make_loss("m2po"),
    "sapo": make_loss("sapo"),
    "dppo_tv": make_loss("dppo_tv", sampler_kl_coef=0.01),
    "masked": MaskedLoss(loss=make_loss("grpo"), masks=RolloutMasks(veto=0.3)),
}


def make_trainer(model_dir: Path, loss: Loss, **options: Any) -> Trainer:
    return fast_trainer(model_dir, loss=loss, **options)


def stale_groups(model_dir: Path, count: int = 6) -> list[Group]:
    """Sampled near the policy, so that not everything is clipped, under versions 0 to 3."""
    generator = np.random.default_rng(0)
    groups = on_policy(make_trainer(model_dir, LOSSES["dapo"]), make_groups(count))

    def age(group: Group, index: int) -> Group:
        rollout = group.rollouts[index]
        noise = generator.normal(0.0, 0.2, rollout.num_tokens).astype(np.float32)
        return change_of(
            group, index, sampler_logprobs=np.minimum(rollout.sampler_logprobs + noise, 0.0)
        )

    for n in range(count):
        for index in range(len(groups[n].rollouts)):
            groups[n] = age(groups[n], index)
    return groups


@pytest.fixture(scope="module")
def stale(tiny_model_dir: Path) -> list[Group]:
    return stale_groups(tiny_model_dir)


def versioned(group: Group, index: int, step: int) -> Group:
    versions = group.rollouts[index].policy_versions.copy()
    versions[:, 1] = step
    return change_of(group, index, policy_versions=versions)


def masked_out(group: Group, index: int) -> Group:
    size = group.rollouts[index].num_tokens
    return change_of(group, index, completion_mask=np.zeros(size, np.bool_))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.slow
def test_micro_batches_change_neither_the_gradient_nor_the_metrics(
    name: str, tiny_model_dir: Path, stale: list[Group]
) -> None:
    whole, metrics = gradients_and_metrics(make_trainer(tiny_model_dir, LOSSES[name]), stale)
    cut = make_trainer(tiny_model_dir, LOSSES[name], micro_batch_tokens=30)
    parts, metrics_of_parts = gradients_and_metrics(cut, stale)
    assert_close(parts, whole)
    assert metrics_of_parts == pytest.approx(metrics, rel=1e-4)


def test_a_penalty_trains_rollouts_without_an_advantage(tiny_model_dir: Path) -> None:
    trainer = make_trainer(tiny_model_dir, LOSSES["gepo with kl"])
    before = trainer.snapshot()
    trainer.step([make_group([1, 1], 1)])
    assert not equal(trainer.snapshot(), before)


# ------------------------------------------------------------------------------ what losses ask


def spy(inputs_seen: list[LossInputs], **needs: bool) -> Loss:
    def loss(inputs: LossInputs) -> LossOutput:
        inputs_seen.append(inputs)
        return LossOutput(
            loss=torch.where(inputs.completion_mask, inputs.learner_logprobs, 0.0).sum() / 100,
            token_counts={},
        )

    loss.needs = LossNeeds(**needs)  # type: ignore[attr-defined]
    return loss


def test_the_proximal_policy_is_the_one_at_the_start_of_the_step(tiny_model_dir: Path) -> None:
    seen: list[LossInputs] = []
    trainer = make_trainer(tiny_model_dir, spy(seen, proximal_logprobs=True))
    group = make_group([1, 0], 2)
    expected = trainer.forward([group])[0]
    trainer.step([group])
    (inputs,) = seen
    assert inputs.proximal_logprobs is not None
    assert not inputs.proximal_logprobs.requires_grad
    # Rows come longest first.
    order = np.argsort([-rollout.num_tokens for rollout in group.rollouts], kind="stable")
    for row, index in enumerate(order):
        size = group.rollouts[index].num_tokens
        assert np.allclose(inputs.proximal_logprobs[row, :size], expected[index], atol=1e-6)


def test_staleness_is_counted_from_the_learners_step(tiny_model_dir: Path) -> None:
    seen: list[LossInputs] = []
    trainer = make_trainer(tiny_model_dir, spy(seen))
    group = versioned(versioned(make_group([1, 0], 2), 0, 1), 1, 0)
    for _ in range(3):
        trainer.step([group])
    inputs = seen[-1]  # two steps are done
    assert inputs.staleness is not None
    found = [set(row[mask].tolist()) for row, mask in zip(
        inputs.staleness, inputs.completion_mask, strict=True
    )]  # fmt: skip
    by_advantage = dict(zip(inputs.advantages.tolist(), found, strict=True))
    assert by_advantage == {0.5: {1}, -0.5: {2}}


def test_the_counts_are_those_of_the_whole_batch(tiny_model_dir: Path) -> None:
    seen: list[LossInputs] = []
    groups = [make_group([1, 0, 0], 0), make_group([1, 1], 1), masked_out(make_group([1, 0], 2), 0)]
    make_trainer(tiny_model_dir, spy(seen), micro_batch_tokens=1).step(groups)
    trained = sum(int(r.completion_mask.sum()) for group in groups for r in group.rollouts)
    assert {inputs.num_tokens for inputs in seen} == {trained}
    assert {inputs.num_rollouts for inputs in seen} == {6}
    assert len(seen) == 4  # three of the first group, the unmasked one of the last


def test_whole_groups_stay_together_with_all_their_members(tiny_model_dir: Path) -> None:
    seen: list[LossInputs] = []
    groups = [make_group([1, 0, 0.5, 0.5], n) for n in range(3)] + [make_group([1, 1], 3)]
    trainer = make_trainer(tiny_model_dir, spy(seen, whole_groups=True), micro_batch_tokens=1)
    trainer.step(groups)
    found = [inputs.group_index.tolist() for inputs in seen if inputs.group_index is not None]
    assert sorted(found) == [[0] * 4, [1] * 4, [2] * 4]  # the equal rewards of the last stay out


def test_the_expectation_is_the_groups_own(tiny_model_dir: Path) -> None:
    seen: list[LossInputs] = []
    group = make_group([1, 0.5, 0], 2)  # the second rollout has no advantage, and counts in it
    for index, value in enumerate([-1.0, -2.0, -3.0]):
        size = group.rollouts[index].num_tokens
        group = change_of(group, index, sampler_logprobs=np.full(size, value, np.float32))
    make_trainer(tiny_model_dir, spy(seen, group_expectation=True)).step([group])
    (inputs,) = seen
    q = np.exp([-1.0, -2.0, -3.0])
    assert inputs.log_expectation is not None
    assert inputs.log_expectation.tolist() == pytest.approx([np.log((q**2).sum() / q.sum())] * 2)


def test_the_first_pass_covers_every_micro_batch(tiny_model_dir: Path) -> None:
    seen: list[LossInputs] = []
    groups = make_groups(4)
    loss = spy(seen, batch_scores=True)
    make_trainer(tiny_model_dir, loss, micro_batch_tokens=30).step(groups)
    assert len(seen) > 1
    for inputs in seen:
        assert inputs.batch_scores is not None
        assert len(inputs.batch_scores.log_ratios) == sum(groups[n].num_tokens for n in (0, 2))
        own = (inputs.learner_logprobs.detach() - inputs.sampler_logprobs)[inputs.completion_mask]
        distance = (own[:, None] - inputs.batch_scores.log_ratios[None]).abs().amin(1)
        assert float(distance.max()) < 1e-5


# --------------------------------------------------------------------------------------- refusals


@pytest.mark.slow
def test_a_group_that_lost_a_member_is_left_out_whole(tiny_model_dir: Path) -> None:
    whole, broken = make_group([1, 0, 0], 0), masked_out(make_group([1, 0, 0], 1), 2)
    alone = gradients(make_trainer(tiny_model_dir, LOSSES["gepo"]), [whole])
    trainer = make_trainer(tiny_model_dir, LOSSES["gepo"])
    assert trainer.refusal(broken) == "lost_member"
    assert trainer.refusal(whole) is None
    assert make_trainer(tiny_model_dir, LOSSES["gspo"]).refusal(broken) is None
    assert_close(gradients(trainer, [whole, broken]), alone)
    metrics = make_trainer(tiny_model_dir, LOSSES["gepo"]).step([whole, broken]).metrics
    lost = sum(rollout.num_tokens for rollout in broken.rollouts[:2])
    assert metrics["dropped/lost_member"] == pytest.approx(lost / (lost + whole.num_tokens))


def test_a_filtered_member_stays_in_the_expectation_and_leaves_the_sum(
    tiny_model_dir: Path,
) -> None:
    seen: list[LossInputs] = []
    group = make_group([1, 0, 0.25], 0)
    unlikely = np.full(group.rollouts[1].num_tokens, -9.0, np.float32)
    group = cut_off(change_of(group, 1, sampler_logprobs=unlikely), 1)
    filtering = AdvantageSettings(overlong_filter=True)
    loss = spy(seen, group_expectation=True)
    trainer = make_trainer(tiny_model_dir, loss, advantages=filtering)
    assert trainer.refusal(group) is None
    metrics = trainer.step([group]).metrics
    make_trainer(tiny_model_dir, loss).step([group])
    filtered, whole = seen
    assert filtered.log_expectation is not None
    assert whole.log_expectation is not None
    assert filtered.log_expectation.tolist() == whole.log_expectation.tolist()[:2]
    q = np.exp([-3.0, -9.0, -3.0])
    assert filtered.log_expectation[0].item() == pytest.approx(np.log((q**2).sum() / q.sum()))
    assert (filtered.num_rollouts, whole.num_rollouts) == (2, 3)
    assert filtered.num_tokens == group.num_tokens - len(unlikely)
    assert metrics["dropped/lost_member"] == 0.0
    # What arrived without a token to train is lost all the same.
    assert trainer.refusal(masked_out(group, 2)) == "lost_member"


def test_mixtures_are_measured(tiny_model_dir: Path) -> None:
    mixed, pure = versioned(make_group([1, 0, 0], 0), 1, 1), make_group([1, 0, 0], 1)
    metrics = make_trainer(tiny_model_dir, LOSSES["gepo"]).step([mixed, pure]).metrics
    assert metrics["groups/mixed"] == 0.5


def damaged(group: Group, **changes: Any) -> Group:
    return change_of(group, 0, **changes)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 0.5])
def test_groups_that_would_poison_the_weights_are_refused_by_name(
    value: float, tiny_model_dir: Path
) -> None:
    trainer = make_trainer(tiny_model_dir, LOSSES["dapo"])
    group = make_group([1, 0], 2)
    logprobs = group.rollouts[0].sampler_logprobs.copy()
    logprobs[-1] = value
    assert trainer.refusal(damaged(group, sampler_logprobs=logprobs)) == "bad_logprobs"
    masked = np.ones(len(logprobs), np.bool_)
    masked[-1] = False
    hidden = damaged(group, sampler_logprobs=logprobs, completion_mask=masked)
    assert trainer.refusal(hidden) is None
    if value != 0.5:
        assert trainer.refusal(damaged(group, reward=value)) == "bad_reward"
    ids = np.full(len(logprobs), 32, np.int32)
    assert trainer.refusal(damaged(group, token_ids=ids)) == "bad_token_ids"
    alone = dataclasses.replace(group, rollouts=group.rollouts[:1])
    assert trainer.refusal(alone) == "one_member"


def test_groups_without_a_gradient_are_told_apart(tiny_model_dir: Path) -> None:
    plain = make_trainer(tiny_model_dir, LOSSES["dapo"])
    equal_rewards, useful = make_group([0.3] * 3, 0), make_group([1, 0, 0.5], 0)
    assert plain.refusal(useful) is None
    assert plain.refusal(equal_rewards) == "zero_variance"
    # The only rollouts with an advantage have no trained token: (1, 0, .5) - .5.
    assert plain.refusal(masked_out(masked_out(useful, 0), 1)) == "zero_variance"
    keeping = AdvantageSettings(keep_zero_variance=True)
    kept = make_trainer(tiny_model_dir, LOSSES["dapo"], advantages=keeping)
    assert kept.refusal(equal_rewards) is None
    # A penalty has a gradient on every rollout.
    assert make_trainer(tiny_model_dir, LOSSES["gepo with kl"]).refusal(equal_rewards) is None


def test_a_group_without_a_trained_token_counts_towards_no_step(tiny_model_dir: Path) -> None:
    group = make_group([1, 0], 0)
    masked = masked_out(masked_out(group, 0), 1)
    keeping = AdvantageSettings(keep_zero_variance=True)
    # Whatever the loss asks for: rollouts without an advantage, whole groups, or nothing.
    for name in ("dapo", "dppo_tv", "gepo"):
        trainer = make_trainer(tiny_model_dir, LOSSES[name], advantages=keeping)
        assert trainer.refusal(masked) == "all_masked"
        assert trainer.refusal(group) is None
    filtering = AdvantageSettings(overlong_filter=True)
    filtered = make_trainer(tiny_model_dir, LOSSES["dapo"], advantages=filtering)
    assert filtered.refusal(cut_off(cut_off(group, 0), 1)) == "all_masked"


def test_what_shapes_rewards_and_masks_decides_whether_there_is_a_gradient(
    tiny_model_dir: Path,
) -> None:
    group = make_group([1, 1, 1], 0)
    longest = max(rollout.num_tokens for rollout in group.rollouts)
    shaping = AdvantageSettings(max_completion_tokens=longest, overlong_buffer_tokens=longest)
    shaped = make_trainer(tiny_model_dir, LOSSES["dapo"], advantages=shaping)
    assert shaped.refusal(group) is None
    filtering = AdvantageSettings(overlong_filter=True)
    filtered = make_trainer(tiny_model_dir, LOSSES["dapo"], advantages=filtering)
    # The only rollouts with an advantage are left out: (1, 0, .5) - .5.
    cut = cut_off(cut_off(make_group([1, 0, 0.5], 0), 0), 1)
    assert filtered.refusal(cut) == "zero_variance"


def test_a_batch_refused_throughout_changes_nothing(tiny_model_dir: Path) -> None:
    trainer = make_trainer(tiny_model_dir, LOSSES["gepo"])
    before = trainer.snapshot()
    metrics = trainer.step([masked_out(make_group([1, 0], 0), 1)]).metrics
    assert metrics["dropped/lost_member"] == 1.0
    assert equal(trainer.snapshot(), before)
    assert trainer.step_count == 1


def test_masks_report_what_they_drop(tiny_model_dir: Path) -> None:
    metrics = (
        make_trainer(
            tiny_model_dir, MaskedLoss(loss=make_loss("grpo"), masks=RolloutMasks(veto=1.0))
        )
        .step(make_groups())
        .metrics
    )
    assert 0 < metrics["dropped/veto"] <= 1


# -------------------------------------------------------------------------------------- overlong


def cut_off(group: Group, index: int) -> Group:
    return change_of(group, index, finish_reason="length")


def test_overlong_completions_are_filtered(tiny_model_dir: Path) -> None:
    group = make_group([1, 0, 0], 0)
    filtered = AdvantageSettings(normalize_by_std=False, overlong_filter=True)
    trainer = make_trainer(tiny_model_dir, LOSSES["dapo"], advantages=filtered)
    plain = make_trainer(tiny_model_dir, LOSSES["dapo"])
    assert_close(gradients(trainer, [cut_off(group, 1)]), gradients(plain, [masked_out(group, 1)]))


def test_overlong_completions_are_penalised(tiny_model_dir: Path) -> None:
    group = make_group([1, 1, 1], 0)
    sizes = [rollout.num_tokens for rollout in group.rollouts]
    assert len(set(sizes)) > 1
    settings = AdvantageSettings(
        normalize_by_std=False, max_completion_tokens=max(sizes), overlong_buffer_tokens=max(sizes)
    )
    shaped = dataclasses.replace(
        group,
        rollouts=tuple(
            dataclasses.replace(rollout, reward=1 - size / max(sizes))
            for rollout, size in zip(group.rollouts, sizes, strict=True)
        ),
    )
    trainer = make_trainer(tiny_model_dir, LOSSES["dapo"], advantages=settings)
    plain = make_trainer(tiny_model_dir, LOSSES["dapo"])
    assert_close(gradients(trainer, [group]), gradients(plain, [shaped]))


def test_leave_one_out_reaches_the_loss(tiny_model_dir: Path) -> None:
    seen: list[LossInputs] = []
    settings = AdvantageSettings(normalize_by_std=False, leave_one_out=True)
    trainer = make_trainer(tiny_model_dir, spy(seen), advantages=settings)
    trainer.step([make_group([1, 0, 0], 0)])
    assert sorted(seen[0].advantages.tolist()) == [-0.5, -0.5, 1.0]
