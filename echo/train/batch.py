"""The training batch: checks groups, and computes advantages and the counts of a loss.

If the loss needs group expectations (`group_log_expectation` in algo/losses.py), they are computed
too.

`find_refusal` returns the reason why a group should not count towards a step. The learner calls
`find_refusal` before it accepts a group:

    one_member      a single rollout, which cannot be compared with another rollout
    bad_reward      a reward that is not finite
    reward_too_large  a reward beyond the bound, which might overflow in the step
    bad_logprobs    a trained token whose log-probability by the sampler is above 0 or not finite
    bad_token_ids   an id outside the vocabulary
    bad_support     a token outside its support, the ids that it was drawn from
    all_masked      no trained token, for example if all completions were cut off
    no_support      a trained token without a support, if the loss needs supports
    no_likely       a trained token without likely ids, if the loss needs likely ids
    lost_member     a rollout without a trained token, if the loss needs complete groups
    zero_variance   every advantage is 0, and the loss has no other gradient

The reasons from one_member to bad_support mean that the group would damage the weights: a step
raises an error that names the group. Groups with other reasons are left out, and `dropped/<reason>`
has their share of the batch's trained tokens. Groups of zero variance still count in the normaliser
(the number of tokens or rollouts by which a loss divides).

A completion that `overlong_filter` leaves out is not a lost member. Its reward still counts in the
group's baseline, and its probability in the group's expectation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from echo.algo.advantages import group_advantages, overlong_penalties
from echo.algo.batching import TrainingRow
from echo.algo.diagnostics import GroupStats
from echo.algo.loss import LossNeeds
from echo.algo.losses import group_log_expectation
from echo.core.errors import DataError
from echo.core.rollout import MAX_LOGPROB, Group, Rollout
from echo.core.token_sets import TOO_LARGE

MAX_LIKELY_MASS = 1.05
"""Largest accepted sum of the probabilities of a token's likely ids. The bound is above 1, because
workers round the probabilities that they send.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageSettings:
    """Settings that determine how rewards become advantages."""

    normalize_by_std: bool = True
    """Whether advantages are divided by the standard deviation of the group's rewards."""
    leave_one_out: bool = False
    """Whether a rollout's own reward is left out of its baseline."""
    max_completion_tokens: int = 0
    """Largest number of tokens of a completion. A completion of this length gets a length penalty
    of 1. 0 means no length penalty.
    """
    overlong_buffer_tokens: int = 0
    """Number of tokens before `max_completion_tokens` over which the length penalty rises from 0 to
    1. 0 means no length penalty.
    """
    overlong_filter: bool = False
    """Whether completions that were cut off at the limit are left out of training. The rewards of
    these completions still count in the baseline.
    """
    value_beta: float | None = None
    """The number b in the baseline b ln(mean(exp(r / b))), where r are the rewards of the group.
    None if the baseline is the mean reward.
    """
    keep_zero_variance: bool = False
    """Whether a group whose advantages are all 0 counts towards a step."""
    max_abs_reward: float = 1e6
    """Largest absolute reward that a step accepts."""
    needs_support: bool = False
    """Whether each trained token needs its support, the ids that it was drawn from. Without a
    support, a token is scored on the whole vocabulary, and its ratio may lie outside the loss's
    range.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """The batch that one step trains on."""

    samples: list[TrainingRow]
    """The rows that go through the model."""
    num_tokens: int
    """Number of trained tokens of the batch, including rollouts that do not go through the model.
    """
    num_rollouts: int
    """Number of rollouts with a trained token, including rollouts that do not go through the model.
    """
    metrics: dict[str, float]
    """Metrics of the batch's rewards and lengths, by metric name."""
    group_ids: tuple[int, ...]
    """Ids of the groups, in the order of `TrainingRow.group_index`."""


def prepare_batch(
    groups: Sequence[Group],
    *,
    settings: AdvantageSettings,
    needs: LossNeeds,
    vocab_size: int,
) -> StepBatch:
    """Return the batch that a step trains on.

    Args:
        groups: the groups of the batch, at least one.
        settings: rules to compute advantages from rewards.
        needs: the inputs that the loss needs.
        vocab_size: number of token ids of the model.

    Raises:
        DataError: if a group cannot be trained on; the text names the group.
    """
    for group in groups:
        # Such a group would damage the weights, or end the process inside a GPU kernel.
        if (damage := _find_damage(group, vocab_size, settings.max_abs_reward)) is not None:
            where = f"group {group.group_id} (attempt {group.attempt}, worker {group.worker_id})"
            raise DataError(f"{where}{damage[1]}")
    reasons = [_unusable(group, needs) for group in groups]
    kept = [group for group, reason in zip(groups, reasons, strict=True) if reason is None]
    samples = _samples(kept, settings, needs)
    groups = [_trained_part(group, settings) for group in groups]
    metrics = GroupStats.of(groups).metrics()
    metrics |= _support_metrics(groups)
    if needs.group_expectation:
        metrics["dropped/lost_member"] = _dropped_share(groups, reasons, "lost_member")
    if needs.likely_ids:
        metrics["dropped/no_likely"] = _dropped_share(groups, reasons, "no_likely")
    num_trained = [sample.num_trained for sample in samples]
    return StepBatch(
        samples=_with_gradient(samples, needs),
        num_tokens=sum(num_trained),
        num_rollouts=sum(number > 0 for number in num_trained),
        metrics=metrics,
        group_ids=tuple(group.group_id for group in kept),
    )


def find_refusal(
    group: Group, *, settings: AdvantageSettings, needs: LossNeeds, vocab_size: int
) -> str | None:
    """Return why a group should not count towards a step; None if the group should count.

    The module's docstring lists the reasons.

    Args:
        group: the group as the worker delivered it.
        settings: rules to compute advantages from rewards.
        needs: the inputs that the loss needs.
        vocab_size: number of token ids of the model.
    """
    damage = _find_damage(group, vocab_size, settings.max_abs_reward)
    if damage is not None:
        return damage[0]
    if not _trained_part(group, settings).num_trained:
        return "all_masked"
    if settings.needs_support and _lacks_support(group):
        return "no_support"
    reason = _unusable(group, needs)
    if reason is not None:
        return reason
    if settings.keep_zero_variance or needs.every_rollout:
        return None
    samples = _samples([group], settings, needs)
    return None if _with_gradient(samples, needs) else "zero_variance"


def _unusable(group: Group, needs: LossNeeds) -> str | None:
    """Return the reason why a loss with these needs cannot use a group, or None if it can.

    `_find_damage` must have found no damage in the group.
    """
    if needs.likely_ids and not all(map(_has_likely_ids, group.rollouts)):
        return "no_likely"
    if not needs.group_expectation:
        return None
    is_whole = all(bool(rollout.completion_mask.any()) for rollout in group.rollouts)
    return None if is_whole else "lost_member"


def _support_metrics(groups: Sequence[Group]) -> dict[str, float]:
    sizes = [
        rollout.support.sizes[rollout.completion_mask]
        for group in groups
        for rollout in group.rollouts
        if rollout.support is not None
    ]
    every = np.concatenate(sizes) if sizes else np.empty(0, np.int32)
    if not len(every):
        return {}
    travelled = every[every > 0]
    return {
        "support/ids": float(travelled.mean()) if len(travelled) else 0.0,
        "support/too_large": float((every == TOO_LARGE).mean()),
    }


def _lacks_support(group: Group) -> bool:
    """Return whether the support of a trained token is unknown or was too large to send."""
    for rollout in group.rollouts:
        support, mask = rollout.support, rollout.completion_mask
        if mask.any() and (support is None or (support.sizes[mask] == TOO_LARGE).any()):
            return True
    return False


def _has_likely_ids(rollout: Rollout) -> bool:
    if rollout.likely is None:
        return not rollout.completion_mask.any()
    return bool((rollout.likely.counts[rollout.completion_mask] > 0).all())


def _find_damage(group: Group, vocab_size: int, max_abs_reward: float) -> tuple[str, str] | None:
    """Return the reason and the description of a group's damage."""
    if len(group.rollouts) < 2:
        return "one_member", " has one rollout: advantages need two or more of each prompt"
    if not np.isfinite(group.rewards).all():
        return "bad_reward", f": rewards are not all finite: {group.rewards}"
    if max(map(abs, group.rewards)) > max_abs_reward:
        return "reward_too_large", (
            f": rewards lie beyond task.max_reward = {max_abs_reward:g}: {group.rewards}"
        )
    # All rollouts are checked in one call: checked one by one, many short rollouts would take a
    # tenth of a step.
    rollouts = group.rollouts
    logprobs = np.concatenate([rollout.sampler_logprobs for rollout in rollouts])
    mask = np.concatenate([rollout.completion_mask for rollout in rollouts])
    is_bad = mask & ~(np.isfinite(logprobs) & (logprobs <= MAX_LOGPROB))
    if is_bad.any():
        first = int(is_bad.argmax())
        ends = np.cumsum([rollout.num_tokens for rollout in rollouts])
        index = int(np.searchsorted(ends, first, side="right"))
        token = first - int(ends[index]) + rollouts[index].num_tokens
        return "bad_logprobs", (
            f", rollout {index}: sampler log-prob of token {token} is "
            f"{logprobs[first]}, expected a finite number of at most 0; the group cannot be "
            "trained on, and its worker's sampler is at fault"
        )
    ids = [group.prompt_ids, *(rollout.token_ids for rollout in rollouts)]
    if not _are_within(np.concatenate(ids), vocab_size):
        index = next(n for n, each in enumerate(ids) if not _are_within(each, vocab_size))
        name = f"rollout {index - 1}" if index else "prompt"
        return "bad_token_ids", (
            f", {name}: token ids span {ids[index].min()}..{ids[index].max()}, outside "
            f"the model's vocabulary of {vocab_size}; the worker has another tokenizer"
        )
    for index, rollout in enumerate(rollouts):
        support = rollout.support
        if support is not None and not (
            _are_within(np.append(support.ids, 0), vocab_size)
            and support.includes(rollout.token_ids).all()
        ):
            return "bad_support", (
                f", rollout {index}: a token is not among the ids that it was drawn from, or these "
                "are outside the vocabulary; its worker's sampler is at fault"
            )
        if (damage := _damage_of_likely(rollout, vocab_size)) is not None:
            return damage[0], f", rollout {index}: {damage[1]}; its worker's sampler is at fault"
    return None


def _damage_of_likely(rollout: Rollout, vocab_size: int) -> tuple[str, str] | None:
    likely = rollout.likely
    if likely is None or likely.logprobs is None or not len(likely.ids):
        return None
    if not _are_within(likely.ids, vocab_size):
        return "bad_token_ids", f"likely ids lie outside the model's vocabulary of {vocab_size}"
    is_bad = ~(np.isfinite(likely.logprobs) & (likely.logprobs <= MAX_LOGPROB))
    masses = np.bincount(likely.rows, weights=np.exp(np.where(is_bad, 0.0, likely.logprobs)))
    if is_bad.any() or masses.max() > MAX_LIKELY_MASS:
        return "bad_logprobs", "the log-probabilities of likely ids are not of a distribution"
    return None


def _are_within(ids: npt.NDArray[np.int32], vocab_size: int) -> bool:
    return bool(ids.min() >= 0 and ids.max() < vocab_size)


def _trained_part(group: Group, settings: AdvantageSettings) -> Group:
    """Return the group, with all tokens of completions that `overlong_filter` excludes masked."""
    if not settings.overlong_filter:
        return group
    rollouts = tuple(
        replace(rollout, completion_mask=np.zeros_like(rollout.completion_mask))
        if rollout.finish_reason == "length"
        else rollout
        for rollout in group.rollouts
    )
    return replace(group, rollouts=rollouts)


def _samples(
    groups: Sequence[Group], settings: AdvantageSettings, needs: LossNeeds
) -> list[TrainingRow]:
    samples = []
    for index, (group, advantages) in enumerate(
        zip(groups, _advantages(groups, settings), strict=True)
    ):
        log_expectation = _log_expectation(group.rollouts) if needs.group_expectation else 0.0
        rollouts = _trained_part(group, settings).rollouts
        samples += [
            TrainingRow(
                prompt_ids=group.prompt_ids,
                rollout=rollout,
                advantage=advantage,
                group_index=index,
                log_expectation=log_expectation,
            )
            for rollout, advantage in zip(rollouts, advantages, strict=True)
        ]
    return samples


def _advantages(groups: Sequence[Group], settings: AdvantageSettings) -> list[list[float]]:
    of_size: dict[int, list[int]] = {}
    for index, group in enumerate(groups):
        of_size.setdefault(len(group.rollouts), []).append(index)
    found: dict[int, list[float]] = {}
    for indices in of_size.values():
        same = [groups[index] for index in indices]
        rewards = np.array([group.rewards for group in same], np.float64)
        if settings.overlong_buffer_tokens:
            rewards += overlong_penalties(
                np.array([[each.num_tokens for each in group.rollouts] for group in same]),
                max_tokens=settings.max_completion_tokens,
                buffer_tokens=settings.overlong_buffer_tokens,
            )
        advantages = group_advantages(
            rewards,
            normalize_by_std=settings.normalize_by_std,
            leave_one_out=settings.leave_one_out,
            value_beta=settings.value_beta,
        )
        found.update(zip(indices, advantages.tolist(), strict=True))
    return [found[index] for index in range(len(groups))]


def _log_expectation(rollouts: Sequence[Rollout]) -> float:
    means = [
        float(rollout.sampler_logprobs[rollout.completion_mask].mean(dtype=np.float64))
        for rollout in rollouts
    ]
    own: Tensor = torch.tensor(means, dtype=torch.float64)
    return float(group_log_expectation(own, torch.zeros(len(means), dtype=torch.int64))[0])


def _with_gradient(samples: Sequence[TrainingRow], needs: LossNeeds) -> list[TrainingRow]:
    """Return the samples that have a gradient if the loss has these needs."""
    if needs.every_rollout:
        live = [sample for sample in samples if sample.num_trained]
    else:
        live = [sample for sample in samples if sample.num_trained and sample.advantage != 0]
    if not needs.whole_groups:
        return live
    indices = {sample.group_index for sample in live}
    return [sample for sample in samples if sample.group_index in indices]


def _dropped_share(groups: Sequence[Group], reasons: Sequence[str | None], dropped: str) -> float:
    sizes = [
        sum(int(rollout.completion_mask.sum()) for rollout in group.rollouts) for group in groups
    ]
    lost = sum(size for size, reason in zip(sizes, reasons, strict=True) if reason == dropped)
    return lost / max(1, sum(sizes))
