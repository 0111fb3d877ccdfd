"""Log-probabilities straight from hidden states and the LM head, never [N, V] at once.

The obvious path (logits, log_softmax, gather) holds several [N, V] float32 matrices; at 16,384
tokens and a vocabulary of 151,936 each takes 10 GB. Here the vocabulary is walked in chunks. The
forward keeps three numbers per row: the running maximum, the sum of exponentials and, for the
entropy, their weighted sum. The backward computes each chunk of logits again and turns it into
gradients at once. One matrix product more than the obvious path, a fraction of its memory.

Numerics, against the defects found elsewhere:
- Products and statistics are float32 whatever the input. The rounding of bfloat16 logits alone is
  as large as the clip range of GSPO.
- The last, ragged chunk is a true slice, so no phantom column counts as a logit of 0.
- Each row of the weight's gradient is written once, from one float32 product.
- Rows whose gradient is zero (clipped tokens, ignored ids) are dropped before the backward: exact.

Shapes: N tokens, D model width, V vocabulary. This is the form for any device, and the reference
of fused ones, which have to keep this signature. The obvious path is linear_logprob_reference.py.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE_INDEX = -100
"""Id of a row that is not scored, as in PyTorch: its outputs and gradients are 0."""

EntropyMode = Literal["none", "value", "grad"]
"""Whether the entropy is computed, and whether it can be differentiated."""


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    inv_temperature: float | Tensor = 1.0,
    *,
    entropy: EntropyMode = "none",
    vocab_chunk: int = 8192,
) -> tuple[Tensor, Tensor | None]:
    """Return the log-probability of each id under softmax(hidden @ weight.T * inv_temperature).

    Args:
        hidden: [N, D] floating point, the states that predict the ids.
        weight: [V, D], the LM head.
        ids: [N] integer in 0..V-1, or IGNORE_INDEX.
        inv_temperature: 1 / temperature, > 0; one number or [N], a constant for autograd.
        entropy: "value" returns the entropy as a constant, "grad" as a differentiable output.
        vocab_chunk: columns of logits held at a time; N * vocab_chunk floats, twice with entropy.

    Returns:
        Log-probabilities and entropy (None unless asked for), both [N] in nats; float32, or float64
        if `hidden` is float64. Both are 0 on ignored rows.

    Raises:
        ValueError: if shapes disagree, an id is outside the vocabulary, or a setting is unusable.
    """
    _check_shapes(hidden, weight, ids)
    if entropy not in ("none", "value", "grad"):
        raise ValueError(f"entropy = {entropy!r}: use 'none', 'value' or 'grad'")
    if vocab_chunk < 1:
        raise ValueError(f"vocab_chunk = {vocab_chunk}: must be at least 1")
    scale = _row_scale(hidden, inv_temperature)
    is_scored = ids != IGNORE_INDEX
    if not bool(is_scored.all()):
        rows = is_scored.nonzero().squeeze(1)
        logprobs, entropies = linear_logprob(
            hidden[rows], weight, ids[rows], scale[rows], entropy=entropy, vocab_chunk=vocab_chunk
        )
        scattered = logprobs.new_zeros(ids.shape).index_copy(0, rows, logprobs)
        if entropies is None:
            return scattered, None
        return scattered, entropies.new_zeros(ids.shape).index_copy(0, rows, entropies)
    _check_ids(ids, num_columns=weight.shape[0])
    outputs: tuple[Tensor, Tensor | None] = _LinearLogprob.apply(  # type: ignore[no-untyped-call]
        hidden, weight, ids.long(), scale, entropy, vocab_chunk
    )
    return outputs


class _LinearLogprob(torch.autograd.Function):
    """The operation for autograd, on rows that are all scored."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        scale: Tensor,
        entropy: EntropyMode,
        vocab_chunk: int,
    ) -> tuple[Tensor, Tensor | None]:
        dtype = scale.dtype
        # A finite start value: -inf would give inf - inf in the first rescaling.
        peak = torch.full_like(scale, torch.finfo(dtype).min)
        total = torch.zeros_like(scale)
        weighted = torch.zeros_like(scale)
        target = torch.zeros_like(scale)
        states = hidden.to(dtype)
        for start in range(0, weight.shape[0], vocab_chunk):
            logits = _scaled_logits(states, weight[start : start + vocab_chunk], scale)
            target += _pick(logits, ids - start)
            new_peak = torch.maximum(peak, logits.amax(1))
            # Everything is kept relative to the peak: a shift common to all logits cancels exactly.
            drop = peak - new_peak
            keep = drop.exp()
            logits -= new_peak[:, None]
            if entropy == "none":
                total = total * keep + logits.exp_().sum(1)
            else:
                exponentials = logits.exp()
                weighted = (weighted + total * drop) * keep + torch.linalg.vecdot(
                    exponentials, logits
                )
                total = total * keep + exponentials.sum(1)
            peak = new_peak
        log_total = total.log()
        logprobs = (target - peak) - log_total
        entropies = None if entropy == "none" else log_total - weighted / total
        ctx.set_materialize_grads(False)
        ctx.vocab_chunk = vocab_chunk
        ctx.save_for_backward(hidden, weight, ids, scale, peak, total, entropies)
        if entropies is not None and entropy == "value":
            ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        hidden, weight, ids, scale, peak, total, entropies = ctx.saved_tensors
        grad = torch.zeros_like(scale) if grad_logprobs is None else grad_logprobs
        is_live = grad != 0
        if grad_entropy is not None:
            is_live |= grad_entropy != 0
        rows = is_live.nonzero().squeeze(1)
        states = hidden[rows].to(scale.dtype)
        ids, scale, peak, total = ids[rows], scale[rows], peak[rows], total[rows]
        grad = grad[rows]
        if grad_entropy is not None:
            grad_entropy, entropies = grad_entropy[rows], entropies[rows]

        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_states = torch.zeros_like(states)
        grad_weight = torch.empty_like(weight) if needs_weight else None
        for start in range(0, weight.shape[0], ctx.vocab_chunk):
            chunk = weight[start : start + ctx.vocab_chunk]
            logits = _scaled_logits(states, chunk, scale).sub_(peak[:, None])
            grad_logits = _logit_gradient(logits, total, grad, grad_entropy, entropies)
            _add_at(grad_logits, ids - start, grad)
            grad_logits *= scale[:, None]
            if needs_hidden:
                grad_states.addmm_(grad_logits, chunk.to(scale.dtype))
            if grad_weight is not None:
                grad_weight[start : start + len(chunk)] = grad_logits.T @ states
        grad_hidden = None
        if needs_hidden:
            grad_hidden = torch.zeros_like(hidden)
            grad_hidden[rows] = grad_states.to(hidden.dtype)
        return grad_hidden, grad_weight, None, None, None, None


def _scaled_logits(states: Tensor, chunk: Tensor, scale: Tensor) -> Tensor:
    """[N, columns] logits over temperature, in the dtype of the statistics."""
    return (states @ chunk.to(states.dtype).T).mul_(scale[:, None])


def _logit_gradient(
    logits: Tensor,
    total: Tensor,
    grad: Tensor,
    grad_entropy: Tensor | None,
    entropies: Tensor | None,
) -> Tensor:
    """Overwrite logits relative to their peak with their gradient, but for the target's own term.

    d logp_y / d z_j = 1[j = y] - p_j  and  d entropy / d z_j = -p_j (log p_j + entropy), where
    p_j = exp(z_j) / total. What is constant in a row is folded into its factors: fewer passes, and
    exact where logits are large, because no logarithm is added to their peak.
    """
    if grad_entropy is None or entropies is None:
        return logits.exp_().mul_(-(grad / total)[:, None])
    exponentials = logits.exp()
    logits += (entropies - total.log())[:, None]
    logits *= (grad_entropy / total)[:, None]
    logits += (grad / total)[:, None]
    return logits.mul_(exponentials).neg_()


def _pick(logits: Tensor, columns: Tensor) -> Tensor:
    """[N] the logit of each row's column, 0 where the column is in another chunk."""
    is_inside = (columns >= 0) & (columns < logits.shape[1])
    picked = logits.gather(1, columns.clamp(0, logits.shape[1] - 1)[:, None]).squeeze(1)
    return torch.where(is_inside, picked, 0.0)


def _add_at(matrix: Tensor, columns: Tensor, values: Tensor) -> None:
    """Add one value per row at its column, nothing where the column is in another chunk."""
    is_inside = (columns >= 0) & (columns < matrix.shape[1])
    columns = columns.clamp(0, matrix.shape[1] - 1)[:, None]
    matrix.scatter_add_(1, columns, torch.where(is_inside, values, 0.0)[:, None])


def _row_scale(hidden: Tensor, inv_temperature: float | Tensor) -> Tensor:
    """[N] inverse temperatures in the dtype of the statistics: float32, or float64 for float64."""
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    if not isinstance(inv_temperature, Tensor):
        if not 0.0 < inv_temperature < float("inf"):
            raise ValueError(f"inv_temperature = {inv_temperature}: must be positive and finite")
        return torch.full((len(hidden),), inv_temperature, dtype=dtype, device=hidden.device)
    if inv_temperature.shape != hidden.shape[:1]:
        raise ValueError(
            f"inv_temperature has shape {list(inv_temperature.shape)}, expected [{len(hidden)}]"
        )
    if inv_temperature.requires_grad:
        raise ValueError("inv_temperature requires a gradient, which this operation does not give")
    if not bool(((inv_temperature > 0) & inv_temperature.isfinite()).all()):
        raise ValueError("inv_temperature must be positive and finite in every row")
    return inv_temperature.to(dtype)


def _check_shapes(hidden: Tensor, weight: Tensor, ids: Tensor) -> None:
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden {list(hidden.shape)} and weight {list(weight.shape)} must be [N, D] and [V, D]"
        )
    if ids.shape != hidden.shape[:1]:
        raise ValueError(f"ids has shape {list(ids.shape)}, expected [{len(hidden)}]")


def _check_ids(ids: Tensor, *, num_columns: int) -> None:
    if ids.numel() and not bool(((ids >= 0) & (ids < num_columns)).all()):
        raise ValueError(
            f"ids span {int(ids.min())}..{int(ids.max())}, but the LM head has {num_columns} rows; "
            f"use {IGNORE_INDEX} for rows that are not scored"
        )
