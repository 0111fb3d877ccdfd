"""Tokens that were drawn from a part of the vocabulary are scored on it, however rows are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from echo.algo import batching
from echo.algo.losses import make_loss
from echo.core.rollout import Group, PartialRollout, PolicyVersion, Rollout
from echo.core.token_sets import NOT_RECORDED, TOO_LARGE
from echo.engine.engine import Request, Sampling
from echo.engine.hf.engine import TransformersEngine
from echo.engine.lora import Lora
from echo.engine.model import load_directory
from echo.train.trainer import Trainer
from tests.train.test_trainer import (
    assert_close,
    change_of,
    gradients,
    make_group,
    make_groups,
    own_gradients,
    with_mask,
)
from tests.train.trainers import fast_trainer
from tests.wire.sets import Lacking, make_sets

UNCLIPPED = make_loss("grpo", clip_low=None, clip_high=None, dual_clip=None)
VOCABULARY = 32


def with_supports(group: Group, *, seed: int = 0) -> Group:
    """The same group, with 1 to 6 ids for each token, for some all but a few, for some all ids."""
    generator = np.random.default_rng([seed, group.group_id])
    for index, rollout in enumerate(group.rollouts):
        sets: list[list[int] | int] = []
        for place, token in enumerate(rollout.token_ids.tolist()):
            others = generator.integers(0, VOCABULARY, size=generator.integers(0, 6)).tolist()
            sets.append(sorted({token, *others}))
            if place % 4 == 2:
                sets[-1] = Lacking(sorted({*range(0, 9, 2)} - {token}))
            if place % 4 == 3:
                sets[-1] = TOO_LARGE if place % 8 == 3 else NOT_RECORDED
        group = change_of(group, index, support=make_sets(*sets))
    return group


def supported_groups() -> list[Group]:
    """Groups with supports, one without, and masked tokens."""
    groups = [with_supports(group) for group in make_groups(5)]
    groups[2] = make_group([0, 1, 0, 0], 2)
    mask = [n % 3 > 0 for n in range(groups[3].rollouts[1].num_tokens)]
    mask[-1] = True
    return [*groups[:3], with_mask(groups[3], 1, is_trained=mask), groups[4]]


def own_logprobs(model: Any, group: Group, index: int) -> Tensor:
    """[T] log-probs of a rollout by a masked softmax of the model's own logits."""
    rollout = group.rollouts[index]
    ids = torch.tensor([*group.prompt_ids, *rollout.token_ids])
    logits = model(input_ids=ids[None, :-1]).logits[0, len(group.prompt_ids) - 1 :]
    own: Tensor = logprobs_within(logits, rollout).gather(1, ids[len(group.prompt_ids) :, None])
    return own.squeeze(1)


def logprobs_within(logits: Tensor, rollout: Rollout) -> Tensor:
    """[T, V] log-probs of all ids, from their logits, within the support of each token."""
    counts = torch.ones_like(logits, dtype=torch.bool)
    for place in range(rollout.num_tokens):
        support = rollout.support
        if support is not None and support.counts[place] > 0:
            counts[place] = bool(support.lacks[place])
            ids_of = support[place : place + 1].ids.astype(np.int64)
            counts[place, ids_of] = not support.lacks[place]
    return logits.masked_fill(~counts, -torch.inf).log_softmax(-1)


WAYS: dict[str, dict[str, Any]] = {
    "padded": {"packs": False, "micro_batch_tokens": 40},
    "packed": {"share_prompts": False, "micro_batch_tokens": 40},
    "shared prompts": {"micro_batch_tokens": 80},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.slow
def test_scores_and_gradient_are_those_of_a_masked_softmax(
    way: str, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batching, "MIN_SAVED", 0.0)  # share even the shortest prompts
    groups = supported_groups()
    trainer = fast_trainer(tiny_model_dir, loss=UNCLIPPED, **WAYS[way])
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    total = torch.zeros(())
    num_tokens = sum(group.num_trained for group in groups)
    for group, scores in zip(groups, trainer.forward(groups), strict=True):
        mean = float(np.mean(group.rewards))
        for index, rollout in enumerate(group.rollouts):
            logprobs = own_logprobs(model, group, index)
            assert np.allclose(scores[index], logprobs.detach().numpy(), atol=2e-6)
            ratios = (logprobs - torch.from_numpy(rollout.sampler_logprobs)).exp()
            kept = torch.from_numpy(rollout.completion_mask)
            total = total - (ratios[kept] * (rollout.reward - mean)).sum() / num_tokens
    total.backward()
    assert_close(gradients(trainer, groups), own_gradients(model))


@pytest.mark.parametrize("kind", ["grpo", "gspo", "gepo", "decoupled_ppo", "m2po"])
@pytest.mark.slow
def test_every_kind_of_loss_gets_scores_within_the_supports(
    kind: str, tiny_model_dir: Path
) -> None:
    """On-policy: the ratios of all tokens are 1, so that a step has the gradient of its scores."""
    trainer = fast_trainer(tiny_model_dir, loss=make_loss(kind))
    groups = supported_groups()
    for place, scores in enumerate(trainer.forward(groups)):
        for index, values in enumerate(scores):
            groups[place] = change_of(groups[place], index, sampler_logprobs=values)
    metrics = trainer.step(groups).metrics
    assert metrics["is_ratio/mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["is_ratio/max"] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.slow
def test_an_adapter_is_trained_on_supports_too(tiny_model_dir: Path) -> None:
    groups = supported_groups()
    lora = Lora(base_dir=tiny_model_dir, rank=4, alpha=8)
    adapted = fast_trainer(tiny_model_dir, lora=lora, loss=UNCLIPPED)
    whole = fast_trainer(tiny_model_dir, loss=UNCLIPPED)
    pairs = zip(adapted.forward(groups), whole.forward(groups), strict=True)
    assert all(np.allclose(*rows, atol=2e-6) for pair in pairs for rows in zip(*pair, strict=True))
    before = {name: tensor.clone() for name, tensor in adapted.snapshot().items()}
    adapted.step(groups)
    moved = [not torch.equal(before[name], each) for name, each in adapted.snapshot().items()]
    assert any(moved)


STOPS = (2, 5, 30, 31)
SAMPLINGS: dict[str, dict[str, Any]] = {
    "top_p .5": {"top_p": 0.5},
    "top_p .9": {"top_p": 0.9},
    "top_p .95, warm": {"top_p": 0.95, "temperature": 1.5},
    "top_p .99": {"top_p": 0.99},
    "top_k 5": {"top_k": 5},
    "top_k 20": {"top_k": 20},
    "min_p .05": {"min_p": 0.05, "temperature": 0.6},
    "min_p .3": {"min_p": 0.3},
    "all": {"top_p": 0.9, "top_k": 12, "min_p": 0.02, "temperature": 0.7},
    "min_tokens": {"min_tokens": 9, "stop_ids": STOPS, "temperature": 0.8},
    "min_tokens, top_p": {"min_tokens": 9, "stop_ids": STOPS, "top_p": 0.95},
}


def sample(model_dir: Path, sampling: Sampling, *, num_groups: int = 4) -> list[Group]:
    """Groups of four rollouts, each in two segments: the second continues the first."""
    engine = TransformersEngine(model_dir)
    engine.load(load_directory(model_dir, "float32"), PolicyVersion(1, 0))
    groups = [make_group([1, 0, 0, 1], n) for n in range(num_groups)]
    members = {
        f"{n}.{index}": (group.prompt_ids, PartialRollout())
        for n, group in enumerate(groups)
        for index in range(4)
    }
    for segment in range(2):
        requests = [
            Request(name, prompt, 4 * place + segment, member.token_ids)
            for place, (name, (prompt, member)) in enumerate(members.items())
        ]
        limit = (6, 14)[segment]
        if segment:  # an ended answer is not continued
            requests = [r for r in requests if r.prefix_ids[-1] not in sampling.stop_ids]
        for done in engine.generate(requests, replace(sampling, max_completion_tokens=limit)):
            prompt, member = members[done.request_id]
            longer = member.extended(
                done.token_ids,
                done.logprobs,
                done.policy_versions,
                finish_reason="abort" if segment == 0 else "length",
                support=done.support,
            )
            members[done.request_id] = prompt, longer
    engine.close()
    return [
        replace(
            group,
            rollouts=tuple(
                members[f"{n}.{index}"][1].rollout(float(index % 2), stale_tokens="keep")
                for index in range(4)
            ),
        )
        for n, group in enumerate(groups)
    ]


def ratios_of(trainer: Trainer, groups: Sequence[Group]) -> npt.NDArray[np.float64]:
    parts = [
        scores - rollout.sampler_logprobs
        for group, each in zip(groups, trainer.forward(groups), strict=True)
        for rollout, scores in zip(group.rollouts, each, strict=True)
    ]
    ratios: npt.NDArray[np.float64] = np.exp(np.concatenate(parts, dtype=np.float64))
    return ratios


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.slow
def test_on_policy_every_ratio_is_1(name: str, tiny_model_dir: Path) -> None:
    """Without the supports the mean ratio is the mass that truncation has left."""
    sampling = replace(Sampling(1.0, 1.0, 0, 1, ()), **SAMPLINGS[name])
    groups = sample(tiny_model_dir, sampling)
    trainer = fast_trainer(tiny_model_dir, temperature=sampling.temperature)
    ratios = ratios_of(trainer, groups)
    # min_tokens makes the sampler stop later, not never.
    assert 4 * 4 * max(9, 14 * (not sampling.stop_ids)) <= len(ratios) <= 4 * 4 * 14
    assert abs(ratios - 1).max() < 2e-5
    bare = [
        replace(group, rollouts=tuple(replace(each, support=None) for each in group.rollouts))
        for group in groups
    ]
    assert ratios_of(trainer, bare).mean() < 0.9999
