"""The contract of kernel backends: functions and data classes.

A backend is a module with the functions of `Kernels`. torch_kernels.py, the reference, computes on
any device. triton_kernels.py computes on GPUs. kernels/logprob.py checks all input, so a backend
gets only valid rows.

Shapes: N tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

BackendName = Literal["auto", "triton", "torch"]
"""Name of a backend; "auto" chooses the fastest backend for the input."""

MAX_LOG_RATIO = 20.0
"""Bound on |log ratio| in nats before exp, as in verl, so that ratios, their squares and their sums
stay finite in float32. It limits k3 to 19 nats for a token that the other policy excludes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioClip:
    """The range of importance ratios in which a token has a gradient."""

    clip_low: float = 0.2
    """Width of the range below 1 in which a ratio still has a gradient, 0..1."""
    clip_high: float = 0.28
    """Width of the range above 1 in which a ratio still has a gradient, >= 0."""
    dual_clip: float | None = 3.0
    """Bound on the ratio where the advantage is negative, > 1 + clip_high; None for no bound."""


@dataclass(frozen=True, slots=True, eq=False)
class PolicyTerms:
    """Values of the policy loss for each token, without gradient. All tensors are [N]."""

    losses: Tensor
    """The token's clipped surrogate, not normalised."""
    coefficients: Tensor
    """d loss / d log-probability of each token; exactly 0 where a clip is active."""
    ratios: Tensor
    """Probability under the learner divided by probability under the sampler, computed from the
    bounded log ratio.
    """


@dataclass(frozen=True, slots=True, eq=False)
class PolicyRows:
    """Inputs of the policy loss for each token, except the token's log-probability."""

    sampler_logprobs: Tensor
    """[N] log-probability of each token under the policy that sampled the token, nats."""
    advantages: Tensor
    """[N] advantage of each token's rollout."""
    clip: RatioClip


@dataclass(frozen=True, slots=True, eq=False)
class FurtherIds:
    """M further ids that are scored in addition to each row's own id."""

    rows: Tensor
    """[M] int64 in 0..N-1, ascending: the row of each id."""
    ids: Tensor
    """[M] int64 in 0..V-1: the ids, distinct within a row."""

    def sum(self, values: Tensor, num_rows: int) -> Tensor:
        """Return, for each row, the sum of the values of the row's ids, added in a fixed order.

        `values` has a value for each id, [M].
        """
        ends = torch.arange(num_rows + 1, device=self.rows.device)
        offsets = torch.searchsorted(self.rows, ends)
        return torch.segment_reduce(values, "sum", offsets=offsets, initial=0, unsafe=True)

    def add_at(self, matrix: Tensor, values: Tensor, *, start: int) -> None:
        """Add each of the [M] values in place, at the row and column of its id.

        `matrix` has the columns of one chunk of the vocabulary. `start` is the id of its first
        column. Values of ids outside the chunk are ignored.
        """
        columns = self.ids - start
        is_inside = (columns >= 0) & (columns < matrix.shape[1])
        at = self.rows, columns.clamp(0, matrix.shape[1] - 1)
        # Places are distinct, except for sums of zeros, so the result does not depend on the order.
        matrix.index_put_(at, values.where(is_inside, 0.0).to(matrix.dtype), accumulate=True)


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Statistics of each row from the forward pass. All tensors except `set_logprobs` are [N]."""

    logprobs: Tensor
    """Log-probability of the row's id, nats."""
    entropies: Tensor | None
    """Entropy of the row's distribution, nats; None if `forward` was called without `with_entropy`.
    """
    peak: Tensor
    """Largest logit of the row, divided by the temperature. The backend chooses the unit."""
    total: Tensor
    """For each row, the sum over the vocabulary of exp(logit / temperature - peak)."""
    terms: PolicyTerms | None
    """Terms of the policy loss; None if `forward` got no policy rows."""
    set_logprobs: Tensor | None = None
    """[M] log-probabilities of the sets' ids, nats; None if `forward` got no sets."""


@dataclass(frozen=True, slots=True, eq=False)
class LiveRows:
    """The rows of a backward pass, n of the N rows of the forward pass, with their statistics.

    On a CPU, the rows whose gradient is not 0 are live. On a GPU, all N rows are live
    (`logprob._live_rows`).
    """

    states: Tensor
    """[n, D] hidden states."""
    ids: Tensor
    """[n] the scored id of each row, in 0..V-1."""
    scale: Tensor
    """[n] inverse temperature of each row."""
    peak: Tensor
    """[n] `Scores.peak` of each row."""
    total: Tensor
    """[n] `Scores.total` of each row."""
    grad: Tensor
    """[n] gradient of the loss with respect to each row's log-probability."""
    grad_entropy: Tensor | None
    """[n] gradient of the loss with respect to each row's entropy; None if the entropy has no
    gradient.
    """
    entropies: Tensor | None
    """[n] `Scores.entropies` of each row; may be None if `grad_entropy` is None."""
    sets: FurtherIds | None = None
    """The m further ids of these rows; None if their log-probabilities have no gradient."""
    grad_sets: Tensor | None = None
    """[m] gradient of the loss with respect to the log-probabilities of `sets`; None if `sets` is
    None.
    """

    @property
    def grad_all(self) -> Tensor:
        """Return, for each row, `grad` plus the sum of `grad_sets` over the row's ids, [n]."""
        if self.sets is None or self.grad_sets is None:
            return self.grad
        return self.grad + self.sets.sum(self.grad_sets, len(self.grad))


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """M pairs. Each pair has a row of hidden states, and an id to score in this row."""

    rows: Tensor
    """[M] int64 in 0..N-1, ascending: the row of each pair."""
    ids: Tensor
    """[M] int64 in 0..V-1: the id of each pair; the same id may be in several pairs."""


class Kernels(Protocol):
    """The functions that a backend must have."""

    def forward(
        self,
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        scale: Tensor,
        *,
        with_entropy: bool,
        policy: PolicyRows | None,
        sets: FurtherIds | None = None,
        vocab_chunk: int,
    ) -> Scores:
        """Return the scores of each row's id, and of the further ids in `sets`.

        The logits are `hidden` [N, D] times the LM head `weight` [V, D], times the inverse
        temperatures `scale` [N].
        """
        ...

    def backward(
        self,
        rows: LiveRows,
        weight: Tensor,
        *,
        needs_states: bool,
        needs_weight: bool,
        vocab_chunk: int,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of states [n, D] and weight [V, D].

        A gradient is None if it is not needed.
        """
        ...

    def pair_logits(self, hidden: Tensor, weight: Tensor, pairs: Pairs, scale: Tensor) -> Tensor:
        """Return the [M] logits of the pairs, each multiplied by its row's `scale` [N].

        The result has the dtype of `scale`.
        """
        ...

    def pair_gradients(
        self,
        hidden: Tensor,
        weight: Tensor,
        pairs: Pairs,
        grad: Tensor,
        *,
        needs_states: bool,
        needs_weight: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of states [N, D] and weight [V, D].

        A gradient is None if it is not needed.

        Args:
            hidden: [N, D] hidden states.
            weight: [V, D], the LM head.
            pairs: the M pairs.
            grad: [M] gradient of each pair's logit, multiplied by the inverse temperature of the
                row.
            needs_states: whether the gradient of the states is needed.
            needs_weight: whether the gradient of the weight is needed.
        """
        ...


def host_waits(tensor: Tensor) -> bool:
    """Return whether reading a tensor's values would make the host wait for a device."""
    return tensor.is_cuda


def is_describable(matrix: Tensor) -> bool:
    """Return whether a tensor descriptor (TMA) can read the matrix directly."""
    row_bytes = matrix.stride(0) * matrix.element_size()
    return matrix.stride(1) == 1 and row_bytes % 16 == 0 and matrix.data_ptr() % 16 == 0


def aligned(matrix: Tensor) -> Tensor:
    """Return the matrix; if a tensor descriptor cannot read the matrix, return a copy."""
    return matrix if is_describable(matrix) else matrix.clone(memory_format=torch.contiguous_format)
