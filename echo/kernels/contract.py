"""Contract of kernel backends: functions and records.

A backend is a module with the functions of `Kernels`: torch_kernels.py, for any device and the
reference of the other, and triton_kernels.py. The operations in front of them (kernels/logprob.py)
check the input, so that a backend sees only sound, scored rows.

Shapes: N tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

BackendName = Literal["auto", "triton", "torch"]
"""Which backend computes; "auto" takes the fastest that is right for the input."""

MAX_LOG_RATIO = 20.0
"""Bound on |log ratio| before exp, as in verl: finite in float32 and far past every clip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioClip:
    """The range of a token's ratio in which it has a gradient; its loss has checked the bounds."""

    clip_low: float = 0.2
    """Range below 1, 0..1."""
    clip_high: float = 0.28
    """Range above 1, >= 0."""
    dual_clip: float | None = 3.0
    """Bound on the ratio where the advantage is negative, > 1 + clip_high; None for no bound."""


@dataclass(frozen=True, slots=True, eq=False)
class PolicyTerms:
    """Results of the policy loss for each token; [N] each, without gradient."""

    losses: Tensor
    """The token's clipped surrogate, before any normaliser."""
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
    """[N] one per token."""
    clip: RatioClip


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Statistics of each row that the forward pass computes; [N] each."""

    logprobs: Tensor
    """Nats, of the row's id."""
    entropies: Tensor | None
    """Nats; None unless asked for."""
    peak: Tensor
    """Largest logit over temperature, in whatever unit the backend likes best."""
    total: Tensor
    """Sum over the vocabulary of exp(logit over temperature - peak)."""
    terms: PolicyTerms | None
    """None unless policy rows were given."""


@dataclass(frozen=True, slots=True, eq=False)
class LiveRows:
    """The rows that have a gradient, with what the forward found out about them; n <= N rows."""

    states: Tensor
    """[n, D] the rows of the hidden states."""
    ids: Tensor
    """[n] in 0..V-1."""
    scale: Tensor
    """[n] inverse temperatures."""
    peak: Tensor
    """[n] of Scores."""
    total: Tensor
    """[n] of Scores."""
    grad: Tensor
    """[n] gradient of the log-probabilities."""
    grad_entropy: Tensor | None
    """[n] gradient of the entropies; None where they have none."""
    entropies: Tensor | None
    """[n] of Scores; not None where `grad_entropy` is not."""


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
        vocab_chunk: int,
    ) -> Scores:
        """Score `ids` [N] under hidden [N, D], weight [V, D] and inverse temperatures [N]."""
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


def is_describable(matrix: Tensor) -> bool:
    """Return whether a tensor descriptor, and so TMA, can read the matrix as it lies there."""
    row_bytes = matrix.stride(0) * matrix.element_size()
    return matrix.stride(1) == 1 and row_bytes % 16 == 0 and matrix.data_ptr() % 16 == 0


def aligned(matrix: Tensor) -> Tensor:
    """Return the matrix such that a descriptor can read it, copied only if it must be."""
    return matrix if is_describable(matrix) else matrix.clone(memory_format=torch.contiguous_format)
