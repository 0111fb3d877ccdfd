"""Re-score a few rollouts under the weights that sampled them, to see what made the mismatch.

For each trained token, with pi the learner now, v the version that sampled it, and what the worker
recorded as mu (nats):

    staleness     log pi'(t) - log v(t)          pi' is pi as it would be published: rounded
    truncation    log v(t) - log v_cut(t)        v_cut is v after top_k and top_p; never above 0
    numerics      log v_cut(t) - log mu(t)       what the worker's engine computes otherwise,
                  + log pi(t) - log pi'(t)       and what publishing rounds off
    tokenisation  0                              token ids travel, text is never encoded again

They add up to log pi - log mu. The last is 0 by construction; what a system that sends text would
have added to it shows in `retokenised`: the share of rollouts whose text encodes to other ids.

Versions that are not held any more are left out, and counted.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from echo.algo.attribution import split_variance
from echo.algo.batching import TrainingRow, collate, pack_micro_batches
from echo.core.rollout import Group, PolicyVersion
from echo.engine.engine import Sampling
from echo.engine.policy import Policy
from echo.engine.sampling import sampling_logprobs

ROWS_AT_ONCE = 256
"""Tokens whose full logits exist at one time, where truncation has to be looked at."""

Floats = npt.NDArray[np.float64]


class MismatchProbe:
    """A frozen model into which versions are loaded to score what they sampled."""

    def __init__(
        self,
        policy: Policy,
        *,
        sampling: Sampling,
        published_dtype: torch.dtype,
        load_version: Callable[[PolicyVersion], Mapping[str, Tensor] | None],
        is_canonical: Callable[[Sequence[int]], bool],
        num_rollouts: int,
        micro_batch_tokens: int,
        seed: int,
        vocab_chunk: int = 8192,
    ) -> None:
        """Take the model and where versions come from.

        Args:
            policy: a frozen model of its own; its weights are overwritten.
            sampling: how workers sample.
            published_dtype: that versions are rounded to.
            load_version: version -> its weights, or None if it is not held.
            is_canonical: completion ids -> whether their text encodes to the same ids.
            num_rollouts: sampled for each measurement.
            micro_batch_tokens: padded tokens that go through the model at once.
            seed: of the choice of rollouts.
            vocab_chunk: columns of logits held at a time.
        """
        self._policy = policy
        self._sampling = sampling
        self._published_dtype = published_dtype
        self._load_version = load_version
        self._is_canonical = is_canonical
        self._num_rollouts = num_rollouts
        self._micro_batch_tokens = micro_batch_tokens
        self._vocab_chunk = vocab_chunk
        self._chance = random.Random(seed)

    def measure(
        self,
        groups: Sequence[Group],
        *,
        score: Callable[[Sequence[Group]], list[list[npt.NDArray[np.float32]]]],
        weights: Mapping[str, Tensor],
    ) -> dict[str, float]:
        """Return the variance of the log-ratio over a small sample, and each cause's share.

        Args:
            groups: what the next step is made of.
            score: the learner's log-probabilities (`Trainer.score`).
            weights: the learner's, before that step.
        """
        chosen = self._choose(groups)
        tokens = sum(int(group.rollouts[0].completion_mask.sum()) for group in chosen)
        if not tokens:
            return {}
        now = [rows[0].astype(np.float64) for rows in score(chosen)]
        rounded, _ = self._score(chosen, self._round(weights))
        parts: dict[str, list[Floats]] = {"staleness": [], "truncation": [], "numerics": []}
        for version in sorted({version for group in chosen for version in group.versions}):
            tensors = self._load_version(version)
            if tensors is None:
                continue
            members = [index for index, group in enumerate(chosen) if version in group.versions]
            then, kept = self._score([chosen[index] for index in members], tensors)
            for index, own, log_kept in zip(members, then, kept, strict=True):
                rollout = chosen[index].rollouts[0]
                is_its = rollout.completion_mask & (
                    rollout.policy_versions == (version.lineage, version.step)
                ).all(1)
                sampler = rollout.sampler_logprobs.astype(np.float64)
                parts["staleness"].append((rounded[index] - own)[is_its])
                parts["truncation"].append(log_kept[is_its])
                numerics = (own - log_kept - sampler) + (now[index] - rounded[index])
                parts["numerics"].append(numerics[is_its])
        joined = {
            name: np.concatenate(part) if part else np.zeros(0) for name, part in parts.items()
        }
        return self._metrics(joined, chosen, tokens)

    def _metrics(
        self, parts: dict[str, Floats], chosen: Sequence[Group], num_tokens: int
    ) -> dict[str, float]:
        num_scored = len(parts["staleness"])
        is_drifted = [
            not self._is_canonical(group.rollouts[0].token_ids.tolist()) for group in chosen
        ]
        metrics = {
            "tokens": float(num_scored),
            "skipped": 1.0 - num_scored / num_tokens,
            "retokenised": float(np.mean(is_drifted)),
        }
        if num_scored:
            metrics |= split_variance(parts | {"tokenisation": np.zeros(num_scored)})
        return {f"attribution/{name}": value for name, value in metrics.items()}

    def _choose(self, groups: Sequence[Group]) -> list[Group]:
        """Return groups of one rollout each, drawn from those with a trained token."""
        rollouts = [
            replace(group, rollouts=(rollout,))
            for group in groups
            for rollout in group.rollouts
            if rollout.completion_mask.any()
        ]
        return self._chance.sample(rollouts, min(self._num_rollouts, len(rollouts)))

    def _round(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: tensor.to(self._published_dtype) if tensor.is_floating_point() else tensor
            for name, tensor in weights.items()
        }

    @torch.no_grad()
    def _score(
        self, groups: Sequence[Group], tensors: Mapping[str, Tensor]
    ) -> tuple[list[Floats], list[Floats]]:
        """Return log-probabilities, and the log of the mass that truncation keeps, per token."""
        self._policy.load(tensors)
        samples = [
            TrainingRow(prompt_ids=group.prompt_ids, rollout=group.rollouts[0], advantage=0.0)
            for group in groups
        ]
        logprobs: dict[int, Floats] = {}
        kept: dict[int, Floats] = {}
        lengths = [sample.num_inputs for sample in samples]
        for indices in pack_micro_batches(lengths, max_tokens=self._micro_batch_tokens):
            micro = collate([samples[index] for index in indices], score_all=True)
            micro = micro.to(self._policy.device)
            rows, _ = self._policy.logprobs(
                micro,
                inv_temperature=1.0 / self._sampling.temperature,
                vocab_chunk=self._vocab_chunk,
            )
            masses = torch.zeros_like(rows)
            if self._sampling.top_p < 1 or self._sampling.top_k:
                states, head = self._policy.predictors(micro)
                mask = micro.completion_mask
                values = _log_kept_mass(states, head, micro.token_ids[mask], self._sampling)
                masses = masses.masked_scatter(mask, values)
            for row, index in enumerate(indices):
                size = samples[index].rollout.num_tokens
                logprobs[index] = rows[row, :size].double().cpu().numpy()
                kept[index] = masses[row, :size].double().cpu().numpy()
        order = range(len(samples))
        return [logprobs[index] for index in order], [kept[index] for index in order]


def _log_kept_mass(states: Tensor, head: Tensor, token_ids: Tensor, sampling: Sampling) -> Tensor:
    """Return [N] the log of the probability that top_k and top_p leave, at most 0.

    The token itself counts as kept: it was drawn, whatever rounding says about it here.
    """
    masses = []
    whole = replace(sampling, top_k=0, top_p=1.0)
    for start in range(0, len(states), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        logits = states[rows].float() @ head.float().T
        is_kept = sampling_logprobs(logits, sampling).isfinite()
        is_kept.scatter_(1, token_ids[rows, None], value=True)
        full = sampling_logprobs(logits, whole)
        masses.append(full.masked_fill(~is_kept, -torch.inf).logsumexp(1).clamp(max=0.0))
    return torch.cat(masses)
