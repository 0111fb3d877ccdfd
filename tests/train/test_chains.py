"""Rollouts of several chains train as their chains do, computed one by one.

The expected numbers come from transformers' model on one chain at a time, and from the loss on one
row for each rollout.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from echo.algo.loss import LikelyIds, Loss, LossInputs, needs_of
from echo.algo.losses import ReferenceKlLoss, make_loss
from echo.core.chains import Tree
from echo.core.rollout import Group, Rollout
from echo.train.models.policy import ModelSource
from echo.train.trainer import Trainer
from tests.train.test_packing import save_packed
from tests.train.test_supports import logprobs_within, with_supports
from tests.train.test_trainer import make_rollout, with_likely
from tests.train.trainers import TWO_UPDATES, fast_trainer

WIDE: dict[str, Any] = {"clip_low": 0.9, "clip_high": 9.0}
LOSSES: dict[str, Loss] = {
    "grpo": make_loss("grpo"),
    "dr_grpo": make_loss("dr_grpo", max_completion_tokens=20),
    "gspo": make_loss("gspo", **WIDE),
    "gspo centered": make_loss("gspo", score_centering=3, **WIDE),
    "gepo": make_loss("gepo", **WIDE),
    "oapl": make_loss("oapl"),
    "sapo": make_loss("sapo"),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "together": {"packs": True},
    "apart": {"packs": True, "share_prompts": False},
    "padded": {"packs": False},
}


def rollout_of(
    size: int, branches: list[tuple[int, int]], masked: list[int], reward: float
) -> Rollout:
    generator = np.random.default_rng(size)
    return make_rollout(
        generator.integers(3, 28, size=size).tolist(),
        reward,
        sampler_logprobs=generator.uniform(-4, -2, size).astype(np.float32),
        branches=np.array(branches, np.int32).reshape(-1, 2),
        completion_mask=~np.isin(np.arange(size), masked),
    )


def branching_group() -> Group:
    """Four rollouts: chains that branch off sampled tokens, others' branches, prompt, nothing.

    Each has likely ids, which only some losses use.
    """
    bare = (
        rollout_of(14, [(5, 2), (8, 6), (11, -3), (13, 9)], [0, 5, 11], 1.0),
        rollout_of(6, [], [3], 0.0),
        rollout_of(11, [(4, -1), (7, -7)], [4, 7, 8], 0.0),
        rollout_of(9, [(3, 0), (6, 0)], [], 0.5),
    )
    prompt = np.array([1, 9, 14, 3, 22, 5], np.int32)
    rollouts = tuple(with_likely(rollout, 3) for rollout in bare)
    return Group(group_id=3, attempt=0, worker_id="w", prompt_ids=prompt, rollouts=rollouts)


def distributions_alone(model: Any, group: Group, rollout: Rollout) -> Tensor:
    """[T, V] log-probabilities of all ids at each token, in its first chain, each chain alone.

    They are within the support of a token that has one, and 0 for a token that follows nothing.
    """
    num_prompt, num_tokens = len(group.prompt_ids), rollout.num_tokens
    ids = torch.from_numpy(np.concatenate([group.prompt_ids, rollout.token_ids])).long()
    tree = Tree(rollout.branches, num_tokens=num_tokens, num_prompt=num_prompt)
    found: dict[int, Tensor] = {}
    for chain in tree.chains:
        places = [place for run in chain for place in range(*run)]
        own = ids[[place + num_prompt for place in places]]
        logits = model(input_ids=own[None], use_cache=False).logits[0]
        for number, place in enumerate(places):
            if place >= 0 and number:
                found.setdefault(place, logits[number - 1])
    nothing = torch.zeros(model.config.vocab_size)
    rows = torch.stack([found.get(place, nothing) for place in range(num_tokens)])
    follows = torch.tensor([[place in found] for place in range(num_tokens)])
    return logprobs_within(rows, rollout).where(follows, 0.0)


def own_ids(rows: Tensor, rollout: Rollout) -> Tensor:
    """[T] of each token the log-probability of its id, from those of all ids."""
    return rows.gather(1, torch.from_numpy(rollout.token_ids).long()[:, None]).squeeze(1)


def likely_alone(rows: list[Tensor], group: Group) -> LikelyIds:
    """The likely ids of all trained tokens, by the log-probabilities of all ids."""
    width = max(rollout.num_tokens for rollout in group.rollouts)
    places, learner, sampler = [], [], []
    for index, rollout in enumerate(group.rollouts):
        assert rollout.likely is not None
        for token in np.flatnonzero(rollout.completion_mask).tolist():
            sets = rollout.likely[token : token + 1]
            places += [index * width + token] * len(sets.ids)
            learner.append(rows[index][token, torch.from_numpy(sets.ids).long()])
            assert sets.logprobs is not None
            sampler.append(torch.from_numpy(sets.logprobs))
    return LikelyIds(
        places=torch.tensor(places),
        learner_logprobs=torch.cat(learner),
        sampler_logprobs=torch.cat(sampler),
    )


def pass_alone(trainer: Trainer, group: Group) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradient of a group, whose chains go through the model one by one."""
    batch = trainer.prepare([group])
    rows = [distributions_alone(trainer.policy.model, group, each) for each in group.rollouts]
    own = [own_ids(*pair) for pair in zip(rows, group.rollouts, strict=True)]

    def padded(values: list[Tensor]) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(values, batch_first=True)

    inputs = LossInputs(
        learner_logprobs=padded(own),
        sampler_logprobs=padded([torch.from_numpy(r.sampler_logprobs) for r in group.rollouts]),
        advantages=torch.tensor([row.advantage for row in batch.samples]),
        completion_mask=padded([torch.from_numpy(r.completion_mask) for r in group.rollouts]),
        num_tokens=batch.num_tokens,
        num_rollouts=batch.num_rollouts,
        group_index=torch.zeros(len(rows), dtype=torch.int64),
        log_expectation=torch.tensor([row.log_expectation for row in batch.samples])
        if needs_of(trainer.loss).group_expectation
        else None,
        likely=likely_alone(rows, group) if needs_of(trainer.loss).likely_ids else None,
    )
    output = trainer.loss(inputs)
    output.loss.backward()
    return output.loss.item(), gradient_of(trainer)


def gradient_of(trainer: Trainer) -> dict[str, Tensor]:
    named = trainer.policy.parameters().items()
    found = {name: each.grad.clone() for name, each in named if each.grad is not None}
    trainer.weights.drop_gradients()
    return found


@pytest.mark.parametrize("group", [branching_group(), with_supports(branching_group())])
def test_chains_have_the_scores_that_each_has_alone(group: Group, tiny_model_dir: Path) -> None:
    for how in LAYOUTS.values():
        trainer = fast_trainer(tiny_model_dir, **how)
        [scores] = trainer.forward([group])
        for rollout, found in zip(group.rollouts, scores, strict=True):
            rows = distributions_alone(trainer.policy.model, group, rollout)
            expected = own_ids(rows, rollout).detach().numpy()
            assert abs(found - expected).max() < 3e-6


@pytest.mark.parametrize("name", [*LOSSES, "with supports"])
@pytest.mark.slow
def test_chains_that_share_tokens_train_as_each_does_alone(name: str, tiny_model_dir: Path) -> None:
    """Every sampled token counts once, in its rollout, for losses of tokens, rollouts, groups."""
    group, sizes, loss = branching_group(), {}, LOSSES.get(name, LOSSES["gspo"])
    if name == "with supports":
        group = with_supports(group)
    expected: tuple[float, dict[str, Tensor]] | None = None
    for layout, how in LAYOUTS.items():
        trainer = fast_trainer(tiny_model_dir, loss=loss, **how)
        expected = expected or pass_alone(trainer, group)
        micro_batches = trainer.policy.micro_batches(trainer.prepare([group]).samples)
        sizes[layout] = sum(micro.input_ids.numel() for _, micro in micro_batches)
        trainer.forward_backward(trainer.prepare([group]), trainer.loss)
        gradient = gradient_of(trainer)
        for each, tensor in expected[1].items():
            scale = max(float(tensor.abs().max()), 1e-3)
            assert float((gradient[each] - tensor).abs().max()) < 3e-6 * scale, (name, each)
        metrics = trainer.step([group]).metrics
        assert metrics["loss/policy"] == pytest.approx(expected[0], rel=1e-5, abs=1e-7)
    num_ends = 5 + 1 + 3 + 3
    assert sizes["together"] == 6 + sum(r.num_tokens for r in group.rollouts) - num_ends
    assert sizes["together"] < sizes["apart"] < sizes["padded"]


@pytest.mark.slow
def test_scores_of_other_passes_know_chains_too(tiny_model_dir: Path) -> None:
    """A reference, a proximal policy, and a batch's scores are computed in passes of their own."""
    group = branching_group()
    kinds = [
        make_loss("m2po"),
        make_loss("decoupled_ppo"),
        ReferenceKlLoss(loss=make_loss("gspo"), coef=0.1),
    ]
    for loss in kinds:
        found = []
        for how in ("together", "padded"):
            options: dict[str, Any] = {}
            if isinstance(loss, ReferenceKlLoss):
                options["reference"] = ModelSource(model_dir=tiny_model_dir)
            trainer = fast_trainer(
                tiny_model_dir, loss=loss, optimizer=TWO_UPDATES, **options, **LAYOUTS[how]
            )
            found.append(trainer.step([group, group]).metrics)
        for name, value in found[1].items():
            if not name.startswith(("perf/", "time/")):
                assert found[0][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3 with windows", "qwen3_moe"])
@pytest.mark.matrix
@pytest.mark.slow
def test_windows_and_experts_know_chains_too(family: str, tmp_path: Path) -> None:
    """A window is counted along the chain, not along the row."""
    group, model_dir = branching_group(), save_packed(tmp_path, family)
    [expected] = fast_trainer(model_dir, packs=False).forward([group])
    for how in ("together", "apart"):
        [found] = fast_trainer(model_dir, **LAYOUTS[how]).forward([group])
        for row, other in zip(found, expected, strict=True):
            assert abs(row - other).max() < 3e-6
