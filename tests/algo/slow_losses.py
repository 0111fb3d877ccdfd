"""Every loss once more, written from its paper's formula: Python floats, one token at a time.

Nothing here knows the classes under test; each function takes plain numbers and returns the loss of
a whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from echo.algo.loss import LossInputs


@dataclass(frozen=True)
class SlowRollout:
    learner: list[float]
    sampler: list[float]
    staleness: list[int]
    advantage: float
    group: int


def rollouts_of(inputs: LossInputs) -> list[SlowRollout]:
    """The rollouts' trained tokens as lists."""
    assert inputs.group_index is not None
    assert inputs.staleness is not None
    found = []
    for row, mask in enumerate(inputs.completion_mask.tolist()):
        kept = [token for token, is_trained in enumerate(mask) if is_trained]
        found.append(
            SlowRollout(
                learner=[float(inputs.learner_logprobs[row, token].detach()) for token in kept],
                sampler=[float(inputs.sampler_logprobs[row, token]) for token in kept],
                staleness=[int(inputs.staleness[row, token]) for token in kept],
                advantage=float(inputs.advantages[row]),
                group=int(inputs.group_index[row]),
            )
        )
    return found


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def num_tokens(rollouts: Sequence[SlowRollout]) -> int:
    return sum(len(rollout.learner) for rollout in rollouts)


def ppo_term(ratio: float, advantage: float, low: float, high: float, dual: float | None) -> float:
    """What PPO maximises."""
    clipped = min(max(ratio, 1 - low), 1 + high)
    value = min(ratio * advantage, clipped * advantage)
    if dual is not None and advantage < 0:
        value = max(value, dual * advantage)
    return value


def token_terms(rollout: SlowRollout, low: float, high: float, dual: float | None) -> list[float]:
    return [
        ppo_term(math.exp(p - q), rollout.advantage, low, high, dual)
        for p, q in zip(rollout.learner, rollout.sampler, strict=True)
    ]


def grpo(
    rollouts: Sequence[SlowRollout],
    low: float = 0.2,
    high: float = 0.28,
    dual: float | None = 3.0,
) -> float:
    total = sum(sum(token_terms(rollout, low, high, dual)) for rollout in rollouts)
    return -total / num_tokens(rollouts)


def grpo_sequence_mean(rollouts: Sequence[SlowRollout]) -> float:
    return -mean([mean(token_terms(rollout, 0.2, 0.28, 3.0)) for rollout in rollouts])


def dapo(rollouts: Sequence[SlowRollout]) -> float:
    return grpo(rollouts, 0.2, 0.28, None)


def dr_grpo(rollouts: Sequence[SlowRollout], max_length: int) -> float:
    total = sum(sum(token_terms(rollout, 0.2, 0.28, None)) for rollout in rollouts)
    return -total / (len(rollouts) * max_length)


def cispo(rollouts: Sequence[SlowRollout], high: float = 5.0) -> float:
    total = 0.0
    for rollout in rollouts:
        for p, q in zip(rollout.learner, rollout.sampler, strict=True):
            total += min(math.exp(p - q), high) * rollout.advantage * p
    return -total / num_tokens(rollouts)


def dppo_tv(rollouts: Sequence[SlowRollout], gap: float = 0.2, kl: float = 0.0) -> float:
    total = 0.0
    for rollout in rollouts:
        for p, q in zip(rollout.learner, rollout.sampler, strict=True):
            change = math.exp(p) - math.exp(q)
            too_high = rollout.advantage > 0 and change > gap
            too_low = rollout.advantage < 0 and change < -gap
            if not too_high and not too_low:
                total -= math.exp(p - q) * rollout.advantage
            total += kl * (p - q) ** 2
    return total / num_tokens(rollouts)


def sapo(rollouts: Sequence[SlowRollout]) -> float:
    per_rollout = []
    for rollout in rollouts:
        tau = 1.05 if rollout.advantage < 0 else 1.0
        gates = [
            4 / tau / (1 + math.exp(-tau * (math.exp(p - q) - 1)))
            for p, q in zip(rollout.learner, rollout.sampler, strict=True)
        ]
        per_rollout.append(mean(gates) * rollout.advantage)
    return -mean(per_rollout)


def m2po(rollouts: Sequence[SlowRollout], bound: float = 0.04) -> float:
    """Algorithm 1 of the paper, literally: drop the largest until the mean is within the bound."""
    tokens = [
        (p - q, rollout.advantage)
        for rollout in rollouts
        for p, q in zip(rollout.learner, rollout.sampler, strict=True)
    ]
    is_kept = [True] * len(tokens)
    trust = {i for i, (d, a) in enumerate(tokens) if (a > 0 and d > 0) or (a < 0 and d < 0)}
    while trust and mean([tokens[i][0] ** 2 for i in sorted(trust)]) > bound:
        worst = max(trust, key=lambda i: tokens[i][0] ** 2)
        is_kept[worst] = False
        trust.remove(worst)
    total = sum(math.exp(d) * a for (d, a), keep in zip(tokens, is_kept, strict=True) if keep)
    return -total / len(tokens)


def weight(ratio: float, kind: str, floor: float, cap: float) -> float:
    if kind.endswith("tis"):
        return min(ratio, cap)
    return ratio if floor <= ratio <= cap else 0.0


def decoupled_ppo(
    rollouts: Sequence[SlowRollout],
    kind: str = "token_tis",
    floor: float = 0.0,
    cap: float = 2.0,
    *,
    loglinear: bool = False,
) -> float:
    total = 0.0
    for rollout in rollouts:
        proximal = list(rollout.learner)
        if loglinear:
            for i, (p, q, s) in enumerate(
                zip(rollout.learner, rollout.sampler, rollout.staleness, strict=True)
            ):
                proximal[i] = q + ((s - 1) / s if s >= 1 else 0.0) * (p - q)
        deltas = [x - q for x, q in zip(proximal, rollout.sampler, strict=True)]
        for p, x, delta in zip(rollout.learner, proximal, deltas, strict=True):
            ratio = math.exp(sum(deltas) if kind.startswith("sequence") else delta)
            surrogate = ppo_term(math.exp(p - x), rollout.advantage, 0.2, 0.28, None)
            total += weight(ratio, kind, floor, cap) * surrogate
    return -total / num_tokens(rollouts)


def gspo(rollouts: Sequence[SlowRollout], low: float = 3e-4, high: float = 4e-4) -> float:
    values = []
    for rollout in rollouts:
        ratio = math.exp(mean(rollout.learner) - mean(rollout.sampler))
        values.append(ppo_term(ratio, rollout.advantage, low, high, None))
    return -mean(values)


def gepo(
    rollouts: Sequence[SlowRollout],
    clip: float | None = 0.2,
    kl: float = 0.0,
    gate: float | None = None,
    *,
    one_group: bool = False,
) -> float:
    """Listing 1 of the paper, in probabilities as there."""
    values = []
    for rollout in rollouts:
        group = [other for other in rollouts if one_group or other.group == rollout.group]
        q = [math.exp(mean(other.sampler)) for other in group]
        denominator = sum(value / sum(q) * value for value in q)
        divergence = mean(
            [
                math.exp(b - a) - (b - a) - 1
                for a, b in zip(rollout.learner, rollout.sampler, strict=True)
            ]
        )
        if gate is not None and divergence < gate:
            denominator = math.exp(mean(rollout.sampler))
        ratio = math.exp(mean(rollout.learner)) / denominator
        surrogate = ratio * rollout.advantage
        if clip is not None:
            surrogate = ppo_term(ratio, rollout.advantage, clip, clip, None)
        values.append(-surrogate + kl * divergence)
    return mean(values)
