"""From groups to what one step trains on: checks, advantages, expectations, and the counts.

A group that would poison the weights raises an error that names it: it should never have been
admitted. A group that only this loss cannot use is left out whole, as if it had not been in the
batch, and counted under `dropped/<reason>` as a share of the batch's trained tokens:

    lost_member     a rollout without a trained token, where the loss needs complete groups
    mixed_policies  several policy versions, where the loss wants one
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from echo.algo.advantages import group_advantages, overlong_penalties
from echo.algo.batching import Sample
from echo.algo.gepo import group_log_expectation
from echo.algo.loss import LossNeeds
from echo.errors import DataError
from echo.rollout import Group, Rollout

MAX_LOGPROB = 1e-3
"""Log-probabilities above this are none; a little above 0 is rounding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageSettings:
    """How rewards become advantages."""

    normalize_by_std: bool = True
    """Divide by the standard deviation of the group's rewards."""
    leave_one_out: bool = False
    """Leave a rollout's own reward out of its baseline."""
    max_completion_tokens: int = 0
    """The limit that the penalty below counts from; 0 where there is none."""
    overlong_buffer_tokens: int = 0
    """Tokens before the limit in which a completion's reward falls by up to 1; 0 is off."""
    overlong_filter: bool = False
    """Do not train on completions cut off at the limit; their rewards count in the baseline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """What one step trains on."""

    samples: list[Sample]
    """Those that go through the model."""
    num_tokens: int
    """Trained tokens of the batch, of rollouts that need no model too."""
    num_rollouts: int
    """Rollouts with a trained token, likewise."""
    metrics: dict[str, float]
    """What can be said without the model."""


def prepare_batch(
    groups: Sequence[Group],
    *,
    settings: AdvantageSettings,
    needs: LossNeeds,
    vocab_size: int,
) -> StepBatch:
    """Return what a step trains on.

    Args:
        groups: at least one.
        settings: of the advantages.
        needs: of the loss.
        vocab_size: of the model.

    Raises:
        DataError: if a group cannot be trained on; it is named.
    """
    for group in groups:
        check_group(group, vocab_size)
    groups = [_filter_overlong(group) if settings.overlong_filter else group for group in groups]
    reasons = [refusal(group, needs) for group in groups]
    kept = [group for group, reason in zip(groups, reasons, strict=True) if reason is None]
    samples = [
        sample
        for index, group in enumerate(kept)
        for sample in _group_samples(group, index, settings, needs)
    ]
    metrics = _batch_metrics(groups)
    if needs.group_expectation or needs.single_policy:
        metrics |= _dropped_metrics(groups, reasons)
    return StepBatch(
        samples=_with_gradient(samples, needs),
        num_tokens=sum(sample.num_trained for sample in samples),
        num_rollouts=sum(sample.num_trained > 0 for sample in samples),
        metrics=metrics,
    )


def refusal(group: Group, needs: LossNeeds) -> str | None:
    """Return why a loss with these needs cannot use a sound group, or None if it can."""
    has_all = all(bool(rollout.completion_mask.any()) for rollout in group.rollouts)
    if needs.group_expectation and not has_all:
        return "lost_member"
    if needs.single_policy and len(group.versions) > 1:
        return "mixed_policies"
    return None


def check_group(group: Group, vocab_size: int) -> None:
    """Refuse what would poison the weights or stop the process inside a GPU kernel.

    Raises:
        DataError: naming the group and what is wrong with it.
    """
    where = f"group {group.group_id} (attempt {group.attempt}, worker {group.worker_id})"
    if len(group.rollouts) < 2:
        raise DataError(f"{where} has one rollout: advantages need two or more of each prompt")
    if not np.isfinite(group.rewards).all():
        raise DataError(f"{where}: rewards are not all finite: {group.rewards}")
    ids = [("prompt", group.prompt_ids)]
    for index, rollout in enumerate(group.rollouts):
        ids.append((f"rollout {index}", rollout.token_ids))
        logprobs = rollout.sampler_logprobs
        is_bad = rollout.completion_mask & ~(np.isfinite(logprobs) & (logprobs <= MAX_LOGPROB))
        if is_bad.any():
            token = int(is_bad.argmax())
            raise DataError(
                f"{where}, rollout {index}: sampler log-prob of token {token} is "
                f"{logprobs[token]}, expected a finite number of at most 0; the group cannot be "
                "trained on, and its worker's sampler is at fault"
            )
    for name, token_ids in ids:
        if token_ids.min() < 0 or token_ids.max() >= vocab_size:
            raise DataError(
                f"{where}, {name}: token ids span {token_ids.min()}..{token_ids.max()}, outside "
                f"the model's vocabulary of {vocab_size}; the worker has another tokenizer"
            )


def _filter_overlong(group: Group) -> Group:
    """Return the group with nothing trained in the completions that were cut off."""
    rollouts = tuple(
        replace(rollout, completion_mask=np.zeros_like(rollout.completion_mask))
        if rollout.finish_reason == "length"
        else rollout
        for rollout in group.rollouts
    )
    return replace(group, rollouts=rollouts)


def _group_samples(
    group: Group, index: int, settings: AdvantageSettings, needs: LossNeeds
) -> list[Sample]:
    rewards = torch.tensor([group.rewards], dtype=torch.float64)
    if settings.overlong_buffer_tokens:
        rewards += overlong_penalties(
            torch.tensor([[rollout.num_tokens for rollout in group.rollouts]]),
            max_tokens=settings.max_completion_tokens,
            buffer_tokens=settings.overlong_buffer_tokens,
        )
    advantages = group_advantages(
        rewards,
        normalize_by_std=settings.normalize_by_std,
        leave_one_out=settings.leave_one_out,
    )
    log_expectation = _log_expectation(group.rollouts) if needs.group_expectation else 0.0
    return [
        Sample(
            prompt_ids=group.prompt_ids,
            rollout=rollout,
            advantage=advantage,
            group_index=index,
            log_expectation=log_expectation,
        )
        for rollout, advantage in zip(group.rollouts, advantages[0].tolist(), strict=True)
    ]


def _log_expectation(rollouts: Sequence[Rollout]) -> float:
    """Return the log of the group expectation over these rollouts' trained tokens."""
    means = [
        float(rollout.sampler_logprobs[rollout.completion_mask].mean(dtype=np.float64))
        for rollout in rollouts
    ]
    own: Tensor = torch.tensor(means, dtype=torch.float64)
    return float(group_log_expectation(own, torch.zeros(len(means), dtype=torch.int64))[0])


def _with_gradient(samples: Sequence[Sample], needs: LossNeeds) -> list[Sample]:
    """Return the samples that a loss with these needs has a use for."""
    if needs.every_rollout:
        live = [sample for sample in samples if sample.num_trained]
    else:
        live = [sample for sample in samples if sample.num_trained and sample.advantage != 0]
    if not needs.whole_groups:
        return live
    indices = {sample.group_index for sample in live}
    return [sample for sample in samples if sample.group_index in indices]


def _batch_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """The metrics that need no model: all rollouts, also those without an advantage.

    A group is all_right or all_wrong if its rewards are equal, and above 0 or not; else useful. It
    is mixed if several policy versions sampled it.
    """
    rewards = np.array([reward for group in groups for reward in group.rewards], dtype=np.float64)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    is_equal = np.array([min(group.rewards) == max(group.rewards) for group in groups])
    is_positive = np.array([max(group.rewards) > 0 for group in groups])
    return {
        "reward/mean": float(rewards.mean()),
        "reward/std": float(rewards.std()),
        "completions/mean_length": float(np.mean([rollout.num_tokens for rollout in rollouts])),
        "completions/clipped_ratio": float(
            np.mean([rollout.finish_reason == "length" for rollout in rollouts])
        ),
        "groups/all_right": float((is_equal & is_positive).mean()),
        "groups/all_wrong": float((is_equal & ~is_positive).mean()),
        "groups/useful": float((~is_equal).mean()),
        "groups/mixed": float(np.mean([len(group.versions) > 1 for group in groups])),
    }


def _dropped_metrics(groups: Sequence[Group], reasons: Sequence[str | None]) -> dict[str, float]:
    """Return the share of the batch's trained tokens in groups left out, by reason."""
    sizes = [
        sum(int(rollout.completion_mask.sum()) for rollout in group.rollouts) for group in groups
    ]
    return {
        f"dropped/{name}": sum(
            size for size, reason in zip(sizes, reasons, strict=True) if reason == name
        )
        / max(1, sum(sizes))
        for name in ("lost_member", "mixed_policies")
    }
