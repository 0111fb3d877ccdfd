"""Scores of tokens by a pass without a gradient.

    of_rows       the policy's log-probability of every completion token
    of_batch      log-ratio and advantage of every trained token, if the loss needs these
    of_reference  the reference's log-probabilities of one micro-batch, within a training pass
    of_version    a published version's scores of every completion token

Log-probabilities are in nats, at the sampling temperature. A token with a support (the ids that it
was drawn from) is scored on the support alone, and any other token on the whole vocabulary. All
ranks call each method together and get the same result.

Shapes: R rows, T completion tokens of a row, B rows of a micro-batch, N trained tokens of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from echo.algo.batching import MicroBatch, TrainingRow
from echo.algo.loss import BatchScores, LossNeeds
from echo.train.models.models import Models
from echo.train.models.policy import Policy
from echo.train.passes.passes import make_rounds

RowScores = list[npt.NDArray[np.float32]]
"""The scores of each row: [T, ...] for its T completion tokens."""


class TokenScores:
    """Scores tokens by the policy and by the frozen models, without a gradient."""

    def __init__(self, models: Models, *, inv_temperature: float) -> None:
        """Store the models that score.

        Args:
            models: the policy and the frozen models.
            inv_temperature: 1 / sampling temperature.
        """
        self._models = models
        self._inv_temperature = inv_temperature

    def of_rows(self, rows: Sequence[TrainingRow]) -> RowScores:
        """Return the policy's log-probabilities [T] for each row, including masked tokens.

        Raises:
            MemoryShortageError: if this process trains alone, and its memory was too small.
        """
        return _score_rows(rows, self._models.policy, self._policy_logprobs)

    def of_version(self, rows: Sequence[TrainingRow]) -> RowScores:
        """Return the scores [T, 2] of each row under the rescorer's present weights.

        Returns:
            Log-probability of each token, and the log of the probability that min_p, top_k and
            top_p leave.

        Raises:
            MemoryShortageError: if this process trains alone, and its memory was too small.
        """
        rescorer = self._models.rescorer
        assert rescorer is not None, "it is a model of its own, which the trainer was not given"
        return _score_rows(rows, rescorer.policy, rescorer.score)

    @torch.no_grad()
    def of_reference(self, micro: MicroBatch) -> Tensor | None:
        """Return [B, T] log-probabilities under the reference, 0 where masked.

        Return None if there is no reference.
        """
        if self._models.reference is None:
            return None
        logprobs, _ = self._models.reference.logprobs(
            micro, inv_temperature=self._inv_temperature, entropy="none"
        )
        return logprobs

    @torch.no_grad()
    def of_batch(self, rows: Sequence[TrainingRow], needs: LossNeeds) -> BatchScores:
        """Return log-ratio and advantage of every trained token of a batch, [N] each.

        Args:
            rows: the rows of the batch.
            needs: needs of the loss, such as whole groups.

        Raises:
            MemoryShortageError: if this process trains alone, and its memory was too small.
        """
        policy, compute = self._models.policy, self._models.compute
        log_ratios = [torch.empty(0, device=compute.device)]
        advantages = [torch.empty(0, device=compute.device)]

        def make_round(indices: Sequence[int], micro: MicroBatch) -> None:
            logprobs = self._policy_logprobs(micro)
            if indices:
                log_ratios.append(micro.pick(logprobs - micro.sampler_logprobs))
                advantages.append(micro.pick(micro.advantages[:, None].expand_as(logprobs)))

        micro_batches = policy.micro_batches(rows, whole_groups=needs.whole_groups)
        make_rounds(micro_batches, make_round, compute)
        own = {"log_ratios": torch.cat(log_ratios), "advantages": torch.cat(advantages)}
        parts = compute.ranks.gather_tensors(own)
        return BatchScores(
            **{name: torch.cat([part[name] for part in parts]).to(compute.device) for name in own}
        )

    def _policy_logprobs(self, micro: MicroBatch) -> Tensor:
        logprobs, _ = self._models.policy.logprobs(
            micro, inv_temperature=self._inv_temperature, entropy="none"
        )
        return logprobs


@torch.no_grad()
def _score_rows(
    rows: Sequence[TrainingRow], policy: Policy, score: Callable[[MicroBatch], Tensor]
) -> RowScores:
    """Return the scores [T, ...] of the completion tokens of each row.

    Args:
        rows: any number of rows, in any order.
        policy: divides the rows into micro-batches.
        score: returns the [B, T, ...] scores of a micro-batch.
    """
    scored: list[tuple[Sequence[int], Tensor]] = []

    def make_round(indices: Sequence[int], micro: MicroBatch) -> None:
        scored.append((indices, score(micro)))

    make_rounds(policy.micro_batches(rows, score_all=True), make_round, policy.compute)
    own = {
        str(index): values[: rows[index].rollout.num_tokens].clone()
        for indices, scores in scored  # read after the pass, so that no round waits for a device
        for index, values in zip(indices, scores.cpu(), strict=False)
    }
    parts = policy.compute.ranks.gather_tensors(own)
    found = {name: values.numpy() for part in parts for name, values in part.items()}
    return [found[str(index)] for index in range(len(rows))]
