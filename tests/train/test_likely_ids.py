"""Likely ids on their way through a trainer: micro-batches, scores, gradients, refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from echo.algo.batching import TrainingRow, collate
from echo.algo.loss import LossInputs, LossNeeds, LossOutput
from echo.algo.losses import CispoLoss, make_loss
from echo.core.errors import ConfigError
from echo.core.rollout import Group
from echo.core.token_sets import TokenSets
from echo.train.batch import AdvantageSettings, find_refusal, prepare_batch
from echo.train.trainer import Trainer
from tests.train.test_trainer import (
    assert_close,
    change_of,
    gradients_and_metrics,
    make_group,
    make_groups,
    with_likely,
    with_mask,
)
from tests.train.trainers import fast_trainer

VOCAB = 32
CENTERED = LossNeeds(likely_ids=4)


def likely_groups(count: int = 4, k: int = 4) -> list[Group]:
    return [
        replace(group, rollouts=tuple(with_likely(each, k) for each in group.rollouts))
        for group in make_groups(count)
    ]


def test_a_micro_batch_has_the_ids_of_its_scored_tokens() -> None:
    group = with_mask(likely_groups(1)[0], 1, is_trained=False)
    group = change_of(group, 2, likely=None)
    rows = [
        TrainingRow(prompt_ids=group.prompt_ids, rollout=rollout, advantage=1.0)
        for rollout in group.rollouts
    ]
    micro = collate(rows)
    assert micro.likely is not None
    width = micro.token_ids.shape[1]
    expected = [
        (row * width + token, int(token_id), float(logprob))
        for row, rollout in enumerate(group.rollouts)
        if row not in (1, 2) and rollout.likely is not None
        for token in range(rollout.num_tokens)
        for token_id, logprob in zip(
            rollout.likely[token : token + 1].ids,
            rollout.likely[token : token + 1].logprobs,  # type: ignore[arg-type]
            strict=True,
        )
    ]
    found = zip(
        micro.likely.places.tolist(),
        micro.likely.ids.ids.tolist(),
        micro.likely.sampler_logprobs.tolist(),
        strict=True,
    )
    assert list(found) == expected
    assert torch.equal(micro.scored[micro.likely.ids.rows], micro.likely.places)
    assert collate([replace(rows[0], rollout=replace(rows[0].rollout, likely=None))]).likely is None


def test_the_learners_log_probs_of_the_ids_are_the_models(tiny_model_dir: Path) -> None:
    seen: list[LossInputs] = []

    def loss(inputs: LossInputs) -> LossOutput:
        seen.append(inputs)
        return LossOutput(loss=0.0 * inputs.learner_logprobs.sum(), token_counts={})

    loss.needs = CENTERED  # type: ignore[attr-defined]
    [group] = likely_groups(1)
    trainer = fast_trainer(tiny_model_dir, loss=loss)
    batch = trainer.prepare([group])
    trainer.forward_backward(batch, loss)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    likely = seen[0].likely
    assert likely is not None
    assert likely.learner_logprobs.requires_grad
    width = seen[0].completion_mask.shape[1]
    rollouts = sorted((row.rollout for row in batch.samples), key=lambda each: -each.num_tokens)
    for place, token in enumerate(likely.places.tolist()):
        rollout = rollouts[token // width]
        ids = torch.tensor([*group.prompt_ids.tolist(), *rollout.token_ids.tolist()])
        start = len(group.prompt_ids) + token % width - 1
        if place % 4 == 0:  # the first id of a token
            with torch.no_grad():
                every = model(input_ids=ids[None]).logits[0, start].log_softmax(-1)
        assert rollout.likely is not None
        own = rollout.likely.ids[4 * (token % width) + place % 4]
        assert likely.learner_logprobs[place].item() == pytest.approx(every[own].item(), abs=1e-5)


LOSSES = {
    "no weight": CispoLoss(clip_low=1e-9, clip_high=1e-9, score_centering=4),
    "gspo": make_loss("gspo", clip_low=0.9, clip_high=9.0, score_centering=4),
}


@pytest.mark.parametrize("name", LOSSES)
def test_neither_micro_batches_nor_packing_change_the_gradient(
    name: str, tiny_model_dir: Path
) -> None:
    groups = likely_groups()

    def gradients(**options: Any) -> dict[str, torch.Tensor]:
        trainer = fast_trainer(tiny_model_dir, loss=LOSSES[name], **options)
        return gradients_and_metrics(trainer, groups)[0]

    whole = gradients(packs=False)
    assert_close(gradients(packs=False, micro_batch_tokens=30), whole)
    assert_close(gradients(packs=True), whole)
    plain = fast_trainer(tiny_model_dir, loss=replace(LOSSES[name], score_centering=0))  # type: ignore[type-var]
    other = gradients_and_metrics(plain, groups)[0]
    assert max(float((other[key] - whole[key]).abs().max()) for key in whole) > 1e-4


def refusal(group: Group, needs: LossNeeds = CENTERED) -> str | None:
    return find_refusal(group, settings=AdvantageSettings(), needs=needs, vocab_size=VOCAB)


def test_groups_without_the_ids_are_left_out_only_where_the_loss_needs_them() -> None:
    [group] = likely_groups(1)
    assert refusal(group) is None
    lacking = change_of(group, 1, likely=None)
    assert refusal(lacking) == "no_likely"
    assert refusal(lacking, LossNeeds()) is None
    assert refusal(with_mask(lacking, 1, is_trained=False)) is None
    likely = group.rollouts[0].likely
    assert likely is not None
    sizes = likely.sizes.copy()
    sizes[-1] = 0
    assert likely.logprobs is not None
    shorter = TokenSets(sizes=sizes, ids=likely.ids[:-4], logprobs=likely.logprobs[:-4])
    assert refusal(change_of(group, 0, likely=shorter)) == "no_likely"
    batch = prepare_batch(
        [group, replace(lacking, group_id=7)],
        settings=AdvantageSettings(),
        needs=CENTERED,
        vocab_size=VOCAB,
    )
    assert {row.group_index for row in batch.samples} == {0}
    assert batch.metrics["dropped/no_likely"] == 0.5


def test_ids_that_are_no_distribution_are_refused() -> None:
    [group] = likely_groups(1)
    likely = group.rollouts[0].likely
    assert likely is not None
    assert likely.logprobs is not None
    cases: list[tuple[dict[str, Any], str]] = [
        (
            {"ids": np.where(np.arange(len(likely.ids)) == 3, np.int32(VOCAB), likely.ids)},
            "bad_token_ids",
        ),
        ({"logprobs": likely.logprobs + 1}, "bad_logprobs"),
        ({"logprobs": np.full_like(likely.logprobs, np.nan)}, "bad_logprobs"),
        ({"logprobs": np.full_like(likely.logprobs, np.log(0.3))}, "bad_logprobs"),
    ]
    for changes, reason in cases:
        damaged = change_of(group, 0, likely=replace(likely, **changes))
        assert refusal(damaged, LossNeeds()) == reason


def test_a_part_of_the_vocabulary_is_refused(tiny_model_dir: Path) -> None:
    [group] = likely_groups(1)
    rollout = group.rollouts[0]
    support = TokenSets(sizes=np.ones(rollout.num_tokens, np.int32), ids=rollout.token_ids)
    trainer = fast_trainer(tiny_model_dir, loss=LOSSES["gspo"])
    with pytest.raises(ConfigError, match=r"drawn from a part of the vocabulary: set sampling\.t"):
        trainer.step([change_of(group, 0, support=support)])


@pytest.mark.slow
def test_a_step_with_centering_is_made_and_told(tiny_model_dir: Path) -> None:
    trainer: Trainer = fast_trainer(tiny_model_dir, loss=LOSSES["gspo"])
    metrics = trainer.step(likely_groups()).metrics
    assert metrics["grad_norm"] > 0
    assert make_group([1, 0]).rollouts[0].likely is None
