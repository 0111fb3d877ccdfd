"""Contract of kernel backends: functions and records.

A backend is a module with the functions of `Kernels`: torch_kernels.py for any device, which is
also the reference, and triton_kernels.py. The operations in kernels/logprob.py check the input, so
a backend gets only valid rows.

Shapes: N tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

BackendName = Literal["auto", "triton", "torch"]
"""Name of a backend; "auto" takes the fastest that can compute the input."""

MAX_LOG_RATIO = 20.0
"""Bound on |log ratio| before exp, as in verl: finite in float32, and far beyond every clip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioClip:
    """Range of the ratio in which a token has a gradient; the loss has checked the bounds."""

    clip_low: float = 0.2
    """Width of the range below 1, in 0..1."""
    clip_high: float = 0.28
    """Width of the range above 1, >= 0."""
    dual_clip: float | None = 3.0
    """Bound on the ratio where the advantage is negative, > 1 + clip_high; None for no bound."""


@dataclass(frozen=True, slots=True, eq=False)
class PolicyTerms:
    """Results of the policy loss for each token; [N] each, without gradient."""

    losses: Tensor
    """The token's clipped surrogate, not normalised."""
    coefficients: Tensor
    """d loss / d logprob; exactly 0 where a clip is active."""
    ratios: Tensor
    """Learner over sampler, exp of the bounded log ratio."""


@dataclass(frozen=True, slots=True, eq=False)
class PolicyRows:
    """Inputs of the policy loss for each token besides its log-probability."""

    sampler_logprobs: Tensor
    """[N] nats under the policy that sampled."""
    advantages: Tensor
    """[N] advantage of each token's rollout."""
    clip: RatioClip


@dataclass(frozen=True, slots=True, eq=False)
class FurtherIds:
    """Further ids that are scored, any number for each row; M ids of all rows together."""

    rows: Tensor
    """[M] int64 in 0..N-1, ascending: the row of each id."""
    ids: Tensor
    """[M] int64 in 0..V-1, distinct within a row."""

    def sum(self, values: Tensor, num_rows: int) -> Tensor:
        """Return the [num_rows] sums of [M] values by row, added in a fixed order on any device."""
        ends = torch.arange(num_rows + 1, device=self.rows.device)
        offsets = torch.searchsorted(self.rows, ends)
        return torch.segment_reduce(values, "sum", offsets=offsets, initial=0, unsafe=True)

    def add_at(self, matrix: Tensor, values: Tensor, *, start: int) -> None:
        """Add [M] values at each row and id of a chunk of columns, the first of which is `start`.

        Values of ids outside of the chunk are left out.
        """
        columns = self.ids - start
        is_inside = (columns >= 0) & (columns < matrix.shape[1])
        at = self.rows, columns.clamp(0, matrix.shape[1] - 1)
        # Places are distinct, but for sums of zeros: the result does not depend on the order.
        matrix.index_put_(at, values.where(is_inside, 0.0).to(matrix.dtype), accumulate=True)


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Statistics of each row that the forward pass computes; [N] each but for the sets'."""

    logprobs: Tensor
    """Log-probability of the row's id, nats."""
    entropies: Tensor | None
    """Entropy of the row's distribution, nats; None unless `with_entropy`."""
    peak: Tensor
    """Largest logit over temperature, in a unit of the backend's choice."""
    total: Tensor
    """Sum over the vocabulary of exp(logit over temperature - peak)."""
    terms: PolicyTerms | None
    """Terms of the policy loss; None unless policy rows were given."""
    set_logprobs: Tensor | None = None
    """[M] log-probabilities of the sets' ids, nats; None unless sets were given."""


@dataclass(frozen=True, slots=True, eq=False)
class LiveRows:
    """The n <= N rows of a backward pass, with their statistics from the forward.

    They are the rows that have a gradient, or all rows (`logprob.py`).
    """

    states: Tensor
    """[n, D] hidden states."""
    ids: Tensor
    """[n] in 0..V-1."""
    scale: Tensor
    """[n] inverse temperatures."""
    peak: Tensor
    """[n] from `Scores`."""
    total: Tensor
    """[n] from `Scores`."""
    grad: Tensor
    """[n] gradient of the log-probabilities."""
    grad_entropy: Tensor | None
    """[n] gradient of the entropies; None if they have no gradient."""
    entropies: Tensor | None
    """[n] from `Scores`; None only if `grad_entropy` is None."""
    sets: FurtherIds | None = None
    """Sets of these rows; None if they have no gradient."""
    grad_sets: Tensor | None = None
    """[m] gradient of the log-probabilities of the sets' ids; None only if `sets` is None."""

    @property
    def grad_all(self) -> Tensor:
        """[n] sum of the gradients of all log-probabilities of each row."""
        if self.sets is None or self.grad_sets is None:
            return self.grad
        return self.grad + self.sets.sum(self.grad_sets, len(self.grad))


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """M pairs of a row of hidden states and an id."""

    rows: Tensor
    """[M] int64 in 0..N-1, ascending."""
    ids: Tensor
    """[M] int64 in 0..V-1; the same id may stand in several pairs."""


class Kernels(Protocol):
    """The functions of a backend."""

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
        """Score `ids` [N] and the ids of the sets.

        They are scored under hidden [N, D], weight [V, D] and inverse temperatures [N].
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
        """Return the gradients of the rows' states [n, D] and of the weight [V, D], if needed."""
        ...

    def pair_logits(self, hidden: Tensor, weight: Tensor, pairs: Pairs, scale: Tensor) -> Tensor:
        """Return [M] logits over temperature, in the dtype of `scale` [N]."""
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
        """Return the gradients of the states [N, D] and of the weight [V, D], if needed.

        Args:
            hidden: [N, D].
            weight: [V, D].
            pairs: the M pairs.
            grad: [M] gradient of each pair's logit, times the inverse temperature of its row.
            needs_states: whether the first is needed.
            needs_weight: whether the second is needed.
        """
        ...


def host_waits(tensor: Tensor) -> bool:
    """Return whether the host has to wait for a device to read a tensor's values."""
    return tensor.is_cuda


def is_describable(matrix: Tensor) -> bool:
    """Return whether a tensor descriptor, and so TMA, can read the matrix without a copy."""
    row_bytes = matrix.stride(0) * matrix.element_size()
    return matrix.stride(1) == 1 and row_bytes % 16 == 0 and matrix.data_ptr() % 16 == 0


def aligned(matrix: Tensor) -> Tensor:
    """Return the matrix, copied only if a descriptor could not read it."""
    return matrix if is_describable(matrix) else matrix.clone(memory_format=torch.contiguous_format)
