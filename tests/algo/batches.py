"""Batches in float64 for tests of losses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from echo.algo.advantages import group_advantages
from echo.algo.loss import BatchScores, Loss, LossInputs, LossOutput, sequence_mean
from echo.algo.losses import group_log_expectation

GROUP_SIZE = 4
LENGTHS = [5, 4, 3, 2, 1, 5, 4, 4, 2, 5, 3, 1]


def doubles(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def make_inputs(
    learner: Tensor,
    sampler: Tensor,
    advantages: Tensor,
    mask: Tensor | None = None,
    **fields: Any,
) -> LossInputs:
    """All inputs of a loss, as the trainer makes them for a batch of one micro-batch."""
    mask = torch.ones_like(learner, dtype=torch.bool) if mask is None else mask
    inputs = LossInputs(
        learner_logprobs=learner,
        sampler_logprobs=sampler,
        advantages=advantages,
        completion_mask=mask,
        num_tokens=int(mask.sum()),
        num_rollouts=int(mask.any(1).sum()),
        group_index=torch.zeros(len(mask), dtype=torch.int64),
        proximal_logprobs=learner.detach().clone(),  # gradcheck moves the learner's in place
        staleness=torch.full(mask.shape, 2),
        batch_scores=BatchScores(
            log_ratios=(learner - sampler).detach()[mask],
            advantages=advantages[:, None].expand(mask.shape)[mask],
        ),
        reference_logprobs=0.8 * sampler - 0.1,
    )
    inputs = replace(inputs, **fields)
    if inputs.log_expectation is None and bool(mask.any(1).all()) and len(mask) > 1:
        own = sequence_mean(sampler, mask)
        assert inputs.group_index is not None
        inputs = replace(inputs, log_expectation=group_log_expectation(own, inputs.group_index))
    return inputs


def random_inputs(seed: int = 0, *, spread: float = 0.5, **fields: Any) -> LossInputs:
    """Three groups of four rollouts of 1 to 5 tokens; `spread` is how far the learner moved."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(LENGTHS), 5)
    sampler = -3.0 * torch.rand(shape, dtype=torch.float64, generator=generator) - 0.01
    noise = torch.randn(shape, dtype=torch.float64, generator=generator)
    rewards = torch.rand((3, GROUP_SIZE), dtype=torch.float64, generator=generator).numpy()
    learner = (sampler + spread * noise).clamp(max=-1e-3 if spread else 0.0)
    return make_inputs(
        learner.requires_grad_(),
        sampler,
        torch.from_numpy(group_advantages(rewards, normalize_by_std=False)).flatten(),
        torch.arange(5)[None] < torch.tensor(LENGTHS)[:, None],
        group_index=torch.arange(3).repeat_interleave(GROUP_SIZE),
        staleness=torch.randint(0, 6, shape, generator=generator),
        **fields,
    )


def rows_of(inputs: LossInputs, rows: Tensor) -> LossInputs:
    """Some rows of a batch, in any order, with the counts of the whole batch."""
    changed = {
        name: getattr(inputs, name)[rows]
        for name in (
            "learner_logprobs",
            "sampler_logprobs",
            "advantages",
            "completion_mask",
            "group_index",
            "proximal_logprobs",
            "staleness",
            "log_expectation",
            "reference_logprobs",
        )
    }
    return replace(inputs, **changed)


def gradient(loss: Loss, inputs: LossInputs) -> Tensor:
    """[B, T] of the loss by the learner's log-probs."""
    leaf = inputs.learner_logprobs.detach().requires_grad_()
    output = loss(replace(inputs, learner_logprobs=leaf))
    (grad,) = torch.autograd.grad(output.loss, leaf, allow_unused=True)
    return torch.zeros_like(leaf) if grad is None else grad


def counts(output: LossOutput) -> dict[str, int]:
    return {name: int(count) for name, count in output.token_counts.items()}
