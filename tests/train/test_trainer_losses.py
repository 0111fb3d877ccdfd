"""The trainer with every loss: its needs are met, and micro-batches do not change the result.

Helpers come from test_trainer.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from echo.algo.corrections import MaskedLoss, RolloutMasks
from echo.algo.loss import Loss, LossInputs, LossNeeds, LossOutput
from echo.algo.losses import make_loss
from echo.core.rollout import Group
from echo.train.trainer import Trainer
from tests.train.test_trainer import (
    assert_close,
    change_of,
    equal,
    gradients_and_metrics,
    make_group,
    make_groups,
    on_policy,
    with_likely,
    with_mask,
)
from tests.train.trainers import fast_trainer

LOSSES: dict[str, Loss] = {
    "grpo": make_loss("grpo"),
    "dapo": make_loss("dapo"),
    "dr_grpo": make_loss("dr_grpo", max_completion_tokens=9),
    "gspo": make_loss("gspo", clip_low=0.2, clip_high=0.28),
    "gspo centered": make_loss("gspo", clip_low=0.2, clip_high=0.28, score_centering=3),
    "gepo": make_loss("gepo"),
    "gepo with kl": make_loss("gepo", sampler_kl_coef=0.01, clip_low=None, clip_high=None),
    "oapl": make_loss("oapl", beta=0.1),
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
            groups[n] = change_of(
                groups[n], index, likely=with_likely(groups[n].rollouts[index], 3).likely
            )
    return groups


@pytest.fixture(scope="module")
def stale(tiny_model_dir: Path) -> list[Group]:
    return stale_groups(tiny_model_dir)


def versioned(group: Group, index: int, step: int) -> Group:
    versions = group.rollouts[index].policy_versions.copy()
    versions[:, 1] = step
    return change_of(group, index, policy_versions=versions)


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
    groups = [
        make_group([1, 0, 0], 0),
        make_group([1, 1], 1),
        with_mask(make_group([1, 0], 2), 0, is_trained=False),
    ]
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


def test_a_penalty_trains_rollouts_without_an_advantage(tiny_model_dir: Path) -> None:
    trainer = make_trainer(tiny_model_dir, LOSSES["gepo with kl"])
    before = trainer.snapshot()
    trainer.step([make_group([1, 1], 1)])
    assert not equal(trainer.snapshot(), before)


def test_mixtures_are_measured(tiny_model_dir: Path) -> None:
    mixed, pure = versioned(make_group([1, 0, 0], 0), 1, 1), make_group([1, 0, 0], 1)
    metrics = make_trainer(tiny_model_dir, LOSSES["gepo"]).step([mixed, pure]).metrics
    assert metrics["groups/mixed"] == 0.5


def test_masks_report_what_they_drop(tiny_model_dir: Path) -> None:
    metrics = (
        make_trainer(
            tiny_model_dir, MaskedLoss(loss=make_loss("grpo"), masks=RolloutMasks(veto=1.0))
        )
        .step(make_groups())
        .metrics
    )
    assert 0 < metrics["dropped/veto"] <= 1


def test_a_batch_refused_throughout_changes_nothing(tiny_model_dir: Path) -> None:
    trainer = make_trainer(tiny_model_dir, LOSSES["gepo"])
    before = trainer.snapshot()
    metrics = trainer.step([with_mask(make_group([1, 0], 0), 1, is_trained=False)]).metrics
    assert metrics["dropped/lost_member"] == 1.0
    assert equal(trainer.snapshot(), before)
    assert trainer.step_count == 1
