"""Scores of rollouts under published weights, computed by a second, frozen model.

The frozen model computes in float32, and is sharded like the trained model. Its weights are either
those of the trainer, rounded as for publication, or those of a version from a file. Each rank reads
only its own rows of the file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from echo.algo.batching import MicroBatch
from echo.core.errors import StorageError
from echo.engine.engine import Sampling
from echo.engine.hf.batch import sampling_logprobs
from echo.train.models.policy import Compute, ModelSource, frozen_policy
from echo.train.ranks import sharding

ROWS_AT_ONCE = 256
"""Number of tokens whose full logits are computed at a time, to find the probability that
truncation leaves.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescoring:
    """Settings of re-scoring: the sampling distribution and the rounding of weights."""

    sampling: Sampling
    """Sampling settings of the workers."""
    published_dtype: torch.dtype
    """dtype to which published versions are rounded."""


class Rescorer:
    """A frozen model that scores tokens under one version's weights at a time."""

    def __init__(self, source: ModelSource, compute: Compute, rescoring: Rescoring) -> None:
        """Build the model. `take` or `load` provides its first weights.

        Args:
            source: the source of the trained model.
            compute: the settings of the trained model's computations.
            rescoring: the sampling distribution and the rounding.
        """
        source = ModelSource(model_dir=source.model_dir, lora=source.lora)
        self.policy = frozen_policy(source, compute)
        self._rescoring = rescoring

    @torch.no_grad()
    def take(self, weights: Mapping[str, Tensor]) -> None:
        """Copy the trainer's weights, rounded as they are for publication.

        `weights` must be sharded in the same way as this model.
        """
        self.policy.load(weights)
        for name, tensor in self.policy.tensors().items():
            if tensor.is_floating_point() and name not in self.policy.unrounded:
                part = sharding.local(tensor)
                part.copy_(part.to(self._rescoring.published_dtype))

    def load(self, version: Path) -> None:
        """Load the weights of a published version from its safetensors file.

        Raises:
            StorageError: on all ranks, if any rank cannot read the file.
        """
        self.policy.load(read_version(version, self.policy.compute.ranks))

    def score(self, micro: MicroBatch) -> Tensor:
        """Return log-probabilities, and logs of the probability that truncation keeps; [B, T, 2].

        For a token with a support (the ids that it was drawn from), the kept probability is 1.

        Args:
            micro: micro-batch on this model's device. All ranks call this method together.
        """
        sampling = self._rescoring.sampling
        inv_temperature = 1.0 / sampling.temperature
        rows, _ = self.policy.logprobs(micro, inv_temperature=inv_temperature, entropy="none")
        masses = torch.zeros_like(rows)
        if sampling.truncates:
            token_ids = micro.pick(micro.token_ids)
            kept = self.policy.from_predictors(
                micro, lambda states, head: log_kept_mass(states, head, token_ids, sampling)
            )
            if micro.supports is not None:  # these tokens were scored on their supports alone
                kept = kept.index_fill(0, micro.supports.within, 0.0)
            masses = micro.spread(kept)
        return torch.stack([rows, masses], dim=-1)


def read_version(path: Path, ranks: sharding.Ranks) -> dict[str, Tensor]:
    """Return the weights of a version from a file.

    Each tensor is read from disk on its first use.

    Args:
        path: path of a safetensors file.
        ranks: the ranks that call this together.

    Raises:
        StorageError: on all ranks, if any rank cannot read the file.
    """
    found: dict[str, Tensor] = {}
    failure: StorageError | None = None
    try:
        found = load_file(path)
    except (OSError, SafetensorError) as error:
        failure = StorageError(f"{path}: cannot read this version: {error}")
    if ranks.add_up(float(failure is not None)):
        raise failure or StorageError(f"{path}: another rank cannot read this version")
    return found


def log_kept_mass(states: Tensor, head: Tensor, token_ids: Tensor, sampling: Sampling) -> Tensor:
    """Return, for each position, the log of the total probability of all kept tokens, [N].

    min_p, top_k and top_p decide which tokens are kept. The drawn token always counts as kept, even
    if rounding would exclude it here.
    """
    masses = []
    whole = replace(sampling, top_k=0, top_p=1.0, min_p=0.0)
    for start in range(0, len(states), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        logits = states[rows].float() @ head.float().T
        is_kept = sampling_logprobs(logits, sampling).isfinite()
        is_kept.scatter_(1, token_ids[rows, None], value=True)
        full = sampling_logprobs(logits, whole)
        masses.append(full.masked_fill(~is_kept, -torch.inf).logsumexp(1).clamp(max=0.0))
    return torch.cat(masses)
