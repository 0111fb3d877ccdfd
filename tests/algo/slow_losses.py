"""Every loss once more, written from its paper's formula: Python floats, one token at a time.

Nothing here knows the classes under test; each function takes plain numbers and returns the loss of
a whole batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from echo.algo.loss import LossInputs


@dataclass(frozen=True)
class SlowRollout:
    learner: list[float]
    sampler: list[float]
    reference: list[float]
    staleness: list[int]
    advantage: float
    group: int


def rollouts_of(inputs: LossInputs) -> list[SlowRollout]:
    """The rollouts' trained tokens as lists."""
    assert inputs.group_index is not None
    assert inputs.staleness is not None
    assert inputs.reference_logprobs is not None
    found = []
    for row, mask in enumerate(inputs.completion_mask.tolist()):
        kept = [token for token, is_trained in enumerate(mask) if is_trained]
        found.append(
            SlowRollout(
                learner=[float(inputs.learner_logprobs[row, token].detach()) for token in kept],
                sampler=[float(inputs.sampler_logprobs[row, token]) for token in kept],
                reference=[float(inputs.reference_logprobs[row, token]) for token in kept],
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
    """The objective that PPO maximises."""
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


Keep = Callable[[SlowRollout], bool]


def keep_all(_rollout: SlowRollout) -> bool:
    return True


def ratios(rollout: SlowRollout) -> list[float]:
    return [math.exp(p - q) for p, q in zip(rollout.learner, rollout.sampler, strict=True)]


def keep_geometric(low: float, high: float) -> Keep:
    """Geo-RS: the geometric mean of the token ratios lies in a range."""
    return lambda rollout: low <= math.prod(ratios(rollout)) ** (1 / len(rollout.learner)) <= high


def keep_unvetoed(least: float) -> Keep:
    return lambda rollout: min(ratios(rollout)) >= least


def keep_opsm(most: float) -> Keep:
    """Off-policy sequence masking: a bad rollout is dropped if the divergence is too large."""
    return lambda rollout: (
        rollout.advantage >= 0 or mean([-math.log(ratio) for ratio in ratios(rollout)]) <= most
    )


def grpo(
    rollouts: Sequence[SlowRollout],
    low: float = 0.2,
    high: float = 0.28,
    dual: float | None = 3.0,
    *,
    keep: Keep = keep_all,
) -> float:
    total = sum(sum(token_terms(rollout, low, high, dual)) for rollout in rollouts if keep(rollout))
    return -total / num_tokens(rollouts)


def pulled_grpo(
    rollouts: Sequence[SlowRollout],
    estimator: str,
    coef: float,
    *,
    still: Sequence[SlowRollout] | None = None,
) -> float:
    """GRPO and its KL to a reference, k3 limited as documented.

    The weights of k2 are those of `still`, at rest.
    """
    total = 0.0
    for rollout, at_rest in zip(rollouts, still or rollouts, strict=True):
        weighing = at_rest if estimator == "k2" else rollout
        for p, ref, ratio in zip(rollout.learner, rollout.reference, ratios(weighing), strict=True):
            log_r = min(ref - p, 5.0) if estimator == "k3" else ref - p
            penalty = {
                "k1": -log_r,
                "k2": log_r**2 / 2,
                "k3": math.exp(log_r) - 1 - log_r,
            }[estimator]
            total += penalty * min(ratio, 2.0)
    return grpo(rollouts) + coef * total / num_tokens(rollouts)


def grpo_sequence_mean(rollouts: Sequence[SlowRollout]) -> float:
    return -mean([mean(token_terms(rollout, 0.2, 0.28, 3.0)) for rollout in rollouts])


def dapo(rollouts: Sequence[SlowRollout]) -> float:
    return grpo(rollouts, 0.2, 0.28, None)


def dr_grpo(rollouts: Sequence[SlowRollout], max_length: int) -> float:
    total = sum(sum(token_terms(rollout, 0.2, 0.28, None)) for rollout in rollouts)
    return -total / (len(rollouts) * max_length)


def cispo(
    rollouts: Sequence[SlowRollout],
    high: float = 5.0,
    *,
    still: Sequence[SlowRollout] | None = None,
) -> float:
    """The weights, which have no gradient, are those of `still`."""
    total = 0.0
    for rollout, at_rest in zip(rollouts, still or rollouts, strict=True):
        for p, ratio in zip(rollout.learner, ratios(at_rest), strict=True):
            total += min(ratio, high) * rollout.advantage * p
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
    """Algorithm 1 of the paper, step by step: drop the largest until the mean is within the
    bound.
    """
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


def weight(ratio: float, kind: str, cap: float) -> float:
    if kind.endswith("tis"):
        return min(ratio, cap)
    return ratio if ratio <= cap else 0.0


def decoupled_ppo(
    rollouts: Sequence[SlowRollout],
    kind: str = "token_tis",
    cap: float = 2.0,
    *,
    loglinear: bool = False,
    still: Sequence[SlowRollout] | None = None,
) -> float:
    """The proximal policy, which has no gradient, is that of `still`."""
    total = 0.0
    for rollout, at_rest in zip(rollouts, still or rollouts, strict=True):
        proximal = list(at_rest.learner)
        if loglinear:
            for i, (p, q, s) in enumerate(
                zip(at_rest.learner, rollout.sampler, rollout.staleness, strict=True)
            ):
                proximal[i] = q + ((s - 1) / s if s >= 1 else 0.0) * (p - q)
        deltas = [x - q for x, q in zip(proximal, rollout.sampler, strict=True)]
        for p, x, delta in zip(rollout.learner, proximal, deltas, strict=True):
            ratio = math.exp(sum(deltas) if kind.startswith("sequence") else delta)
            surrogate = ppo_term(math.exp(p - x), rollout.advantage, 0.2, 0.28, None)
            total += weight(ratio, kind, cap) * surrogate
    return -total / num_tokens(rollouts)


def gspo(
    rollouts: Sequence[SlowRollout],
    low: float = 0.02,
    high: float = 0.05,
    *,
    keep: Keep = keep_all,
) -> float:
    values = []
    for rollout in rollouts:
        ratio = math.exp(mean(rollout.learner) - mean(rollout.sampler))
        value = ppo_term(ratio, rollout.advantage, low, high, None)
        values.append(value if keep(rollout) else 0.0)
    return -mean(values)


def oapl(rollouts: Sequence[SlowRollout], beta: float = 1e-3) -> float:
    """Rollouts without an advantage are left out."""
    values = [
        (beta * (sum(each.learner) - sum(each.sampler)) - each.advantage) ** 2
        if each.advantage
        else 0.0
        for each in rollouts
    ]
    return mean(values)


def gepo(
    rollouts: Sequence[SlowRollout],
    clip: float | None = 0.2,
    kl: float = 0.0,
    gate: float | None = None,
) -> float:
    """Listing 1 of the paper, in probabilities as there."""
    values = []
    for rollout in rollouts:
        group = [other for other in rollouts if other.group == rollout.group]
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
