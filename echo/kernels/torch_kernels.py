"""PyTorch kernels for any device: the reference for the fused kernels.

Logits are computed in chunks of the vocabulary. The forward keeps the running maximum and the sum
of exponentials of each row and, for the entropy, the sum weighted by logits. The backward computes
each chunk of logits again. From these logits it computes the gradients of the logits. `Scores.peak`
is in nats.

Products are in float32 (in float64 for float64 input), with one exception. If the input is bfloat16
on a CPU, and oneDNN supports bfloat16 on this CPU, the backward multiplies in bfloat16 and sums in
float32. The backward then also rounds the gradients of the logits to bfloat16, as the Triton
kernels do on a GPU.

Shapes: N tokens, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from echo.kernels.contract import (
    MAX_LOG_RATIO,
    FurtherIds,
    LiveRows,
    Pairs,
    PolicyRows,
    PolicyTerms,
    Scores,
)

SIZES_PER_OCTAVE = 16
"""Number of allowed sizes between n and 2 n rows. A backward pass in bfloat16 appends rows with
gradient 0 up to the next allowed size.
"""


def forward(
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
    """Return the scores of the ids. At most N * vocab_chunk logits are in memory at a time.

    The statistics have the dtype of `scale`.
    """
    dtype = scale.dtype
    # A finite start value: -inf would give inf - inf in the first rescaling.
    peak = torch.full_like(scale, torch.finfo(dtype).min)
    total = torch.zeros_like(scale)
    weighted = torch.zeros_like(scale)
    target = torch.zeros_like(scale)
    further = None if sets is None else scale.new_zeros(len(sets.ids))
    states = hidden.to(dtype)
    spare = _spare(scale, weight, vocab_chunk) if with_entropy else None
    for start, _, logits in _chunks(states, weight, scale, vocab_chunk):
        target += _pick(logits, ids - start)
        if sets is not None and further is not None:
            further += _pick_of_rows(logits, sets.rows, sets.ids - start)
        new_peak = torch.maximum(peak, logits.amax(1))
        # All values are relative to the peak, so a shift common to all logits cancels exactly.
        drop = peak - new_peak
        keep = drop.exp()
        logits -= new_peak[:, None]
        if spare is not None:
            exponentials = torch.exp(logits, out=_front(spare, logits.shape))
            weighted = (weighted + total * drop) * keep + logits.mul_(exponentials).sum(1)
            total = total * keep + exponentials.sum(1)
        else:
            total = total * keep + logits.exp_().sum(1)
        peak = new_peak
    log_total = total.log()
    logprobs = (target - peak) - log_total
    entropies = log_total - weighted / total if with_entropy else None
    terms = None if policy is None else policy_terms(logprobs, policy)
    if sets is not None and further is not None:
        further = (further - peak[sets.rows]) - log_total[sets.rows]
    return Scores(logprobs, entropies, peak, total, terms, further)


def backward(
    rows: LiveRows, weight: Tensor, *, needs_states: bool, needs_weight: bool, vocab_chunk: int
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of states and weight. A gradient is None if it is not needed.

    Each row of the weight's gradient is written once, by one product.
    """
    num_rows, dtype = len(rows.states), rows.scale.dtype
    is_narrow = _is_narrow(rows.states, weight)
    if is_narrow:
        rows, dtype = _padded(rows), torch.bfloat16
    scale, states = rows.scale, rows.states.to(dtype)
    # Every term of a gradient is a multiple of one of these, so logits need no further pass.
    rows = replace(
        rows,
        grad=rows.grad * scale,
        grad_entropy=None if rows.grad_entropy is None else rows.grad_entropy * scale,
        grad_sets=None
        if rows.sets is None or rows.grad_sets is None
        else rows.grad_sets * scale[rows.sets.rows],
    )
    grad_all = rows.grad_all
    grad_states = torch.zeros_like(states, dtype=scale.dtype) if needs_states else None
    grad_weight = torch.empty_like(weight) if needs_weight else None
    for start, chunk, logits in _chunks(states, weight, scale, vocab_chunk):
        logits -= rows.peak[:, None]
        grad_logits = _logit_gradient(logits, rows, grad_all)
        _add_at(grad_logits, rows.ids - start, rows.grad)
        if rows.sets is not None and rows.grad_sets is not None:
            rows.sets.add_at(grad_logits, rows.grad_sets, start=start)
        grad_logits = grad_logits.to(dtype)
        if grad_states is not None and is_narrow:
            grad_states += grad_logits @ chunk
        elif grad_states is not None:
            grad_states.addmm_(grad_logits, chunk)
        if grad_weight is not None and grad_weight.dtype == dtype:
            torch.mm(grad_logits.T, states, out=grad_weight[start : start + len(chunk)])
        elif grad_weight is not None:
            grad_weight[start : start + len(chunk)] = grad_logits.T @ states
    return None if grad_states is None else grad_states[:num_rows], grad_weight


PAIR_NUMBERS = 1 << 22
"""Largest number of gathered states or weights in memory at a time."""


def pair_logits(hidden: Tensor, weight: Tensor, pairs: Pairs, scale: Tensor) -> Tensor:
    """Return the [M] logits of the pairs, divided by the temperature."""
    logits = scale.new_empty(len(pairs.rows))
    for part in _parts(hidden, pairs):
        rows, ids = pairs.rows[part], pairs.ids[part]
        states = hidden.index_select(0, rows).to(scale.dtype)
        columns = weight.index_select(0, ids).to(scale.dtype)
        logits[part] = torch.linalg.vecdot(states, columns) * scale.index_select(0, rows)
    return logits


def pair_gradients(
    hidden: Tensor,
    weight: Tensor,
    pairs: Pairs,
    grad: Tensor,
    *,
    needs_states: bool,
    needs_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of states and weight. A gradient is None if it is not needed."""
    grad_states = torch.zeros_like(hidden, dtype=grad.dtype) if needs_states else None
    grad_weight = torch.zeros_like(weight, dtype=grad.dtype) if needs_weight else None
    for part in _parts(hidden, pairs):
        rows, ids, factors = pairs.rows[part], pairs.ids[part], grad[part, None]
        if grad_states is not None:
            grad_states.index_add_(0, rows, weight.index_select(0, ids).to(grad.dtype) * factors)
        if grad_weight is not None:
            grad_weight.index_add_(0, ids, hidden.index_select(0, rows).to(grad.dtype) * factors)
    return grad_states, None if grad_weight is None else grad_weight.to(weight.dtype)


def _parts(hidden: Tensor, pairs: Pairs) -> list[slice]:
    step = max(1, PAIR_NUMBERS // hidden.shape[1])
    return [slice(start, start + step) for start in range(0, len(pairs.rows), step)]


def policy_terms(logprobs: Tensor, policy: PolicyRows) -> PolicyTerms:
    """Return losses, coefficients and ratios of the policy loss."""
    clip, advantages = policy.clip, policy.advantages
    log_ratio = logprobs - policy.sampler_logprobs
    ratios = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    surrogate = ratios * advantages
    losses = -torch.minimum(
        surrogate, ratios.clamp(1.0 - clip.clip_low, 1.0 + clip.clip_high) * advantages
    )
    is_negative = advantages < 0
    is_flat = log_ratio.abs() > MAX_LOG_RATIO
    is_flat |= is_negative & (ratios < 1.0 - clip.clip_low)
    is_flat |= (advantages > 0) & (ratios > 1.0 + clip.clip_high)
    if clip.dual_clip is not None:
        is_dual = is_negative & (ratios > clip.dual_clip)
        losses = torch.where(is_dual, -clip.dual_clip * advantages, losses)
        is_flat |= is_dual
    return PolicyTerms(losses, torch.where(is_flat, 0.0, -surrogate), ratios)


def _chunks(
    states: Tensor, weight: Tensor, scale: Tensor, vocab_chunk: int
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (first id, weights, logits divided by temperature) of each chunk of the vocabulary.

    The weights [columns, D] have the dtype of the states, and the logits [N, columns] have the
    dtype of the statistics. All chunks use the same memory for logits. The caller may overwrite the
    logits.

    A product in bfloat16 is rounded to 8 bits of mantissa, too few for logits. So each product is
    computed a second time, and the rounded first result is subtracted before the second rounding.
    This difference has the next 8 bits, and is added to the logits in float32.
    """
    spare = _spare(scale, weight, vocab_chunk)
    is_exact = states.dtype == scale.dtype
    scaled = states * scale[:, None] if is_exact else states
    rounded = None if is_exact else torch.empty_like(spare, dtype=states.dtype)
    for start in range(0, weight.shape[0], vocab_chunk):
        chunk = weight[start : start + vocab_chunk].to(states.dtype)
        logits = _front(spare, (len(states), len(chunk)))
        if rounded is None:
            torch.mm(scaled, chunk.T, out=logits)  # the inverse temperature is in the states
        else:
            product = torch.mm(states, chunk.T, out=_front(rounded, logits.shape))
            logits.copy_(product)
            logits += product.addmm_(states, chunk.T, beta=-1.0)
            logits *= scale[:, None]
        yield start, chunk, logits


def _spare(scale: Tensor, weight: Tensor, vocab_chunk: int) -> Tensor:
    return scale.new_empty(len(scale) * min(vocab_chunk, weight.shape[0]))


def _front(spare: Tensor, shape: tuple[int, int] | torch.Size) -> Tensor:
    return spare[: shape[0] * shape[1]].view(shape)


def _is_narrow(states: Tensor, weight: Tensor) -> bool:
    """Return whether the backward multiplies in bfloat16 with float32 sums.

    True if states and weight are bfloat16 on a CPU, and oneDNN supports bfloat16 on this CPU.
    """
    is_bfloat16 = states.dtype == weight.dtype == torch.bfloat16
    is_here = is_bfloat16 and states.device.type == "cpu"
    return is_here and torch.ops.mkldnn._is_mkldnn_bf16_supported()  # noqa: SLF001, no public name


def _padded(rows: LiveRows) -> LiveRows:
    """Append rows of gradient 0, so that the number of rows is one of a few sizes.

    Few sizes save memory, because a CPU keeps code and buffers for each number of rows.
    """
    num_rows = len(rows.states)
    step = max(1, (1 << num_rows.bit_length()) // 2 // SIZES_PER_OCTAVE)
    more = -num_rows % step
    if not more:
        return rows

    def pad(values: Tensor | None, value: float = 0.0) -> Any:
        if values is None:
            return None
        sides = (0, 0, 0, more) if values.ndim == 2 else (0, more)
        return torch.nn.functional.pad(values, sides, value=value)

    return replace(
        rows,
        states=pad(rows.states),
        ids=pad(rows.ids),
        scale=pad(rows.scale, 1.0),
        peak=pad(rows.peak),
        total=pad(rows.total, 1.0),
        grad=pad(rows.grad),
        grad_entropy=pad(rows.grad_entropy),
        entropies=pad(rows.entropies),
    )


def _logit_gradient(logits: Tensor, rows: LiveRows, grad: Tensor) -> Tensor:
    """Overwrite the logits with the gradient of the loss; return the result.

    For a row with the scored id y, the logit z_j and the probability p_j of each id j:

        p_j = exp(z_j) / total
        d log p_y / d z_j = 1[j = y] - p_j
        d entropy / d z_j = -p_j (log p_j + entropy)

    The caller adds the terms 1[j = y].

    Args:
        logits: [N, columns] logits of a chunk of the vocabulary, minus the peak of each row.
        rows: the rows of the backward pass, with their statistics.
        grad: `rows.grad_all`, which the caller computes once for all chunks.
    """
    total = rows.total
    if rows.grad_entropy is None or rows.entropies is None:
        return logits.exp_().mul_(-(grad / total)[:, None])
    exponentials = logits.exp()
    logits += (rows.entropies - total.log())[:, None]
    logits *= (rows.grad_entropy / total)[:, None]
    logits += (grad / total)[:, None]
    return logits.mul_(exponentials).neg_()


def _pick(logits: Tensor, columns: Tensor) -> Tensor:
    """Return each row's logit at its column, [N]; 0 if this chunk lacks the column."""
    is_inside = (columns >= 0) & (columns < logits.shape[1])
    picked = logits.gather(1, columns.clamp(0, logits.shape[1] - 1)[:, None]).squeeze(1)
    return torch.where(is_inside, picked, 0.0)


def _pick_of_rows(logits: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Return the logits at rows and columns, [M]; 0 where this chunk lacks the column."""
    is_inside = (columns >= 0) & (columns < logits.shape[1])
    return logits[rows, columns.clamp(0, logits.shape[1] - 1)].where(is_inside, 0.0)


def _add_at(matrix: Tensor, columns: Tensor, values: Tensor) -> None:
    """Add each row's value at its column, if the column is in this chunk."""
    is_inside = (columns >= 0) & (columns < matrix.shape[1])
    columns = columns.clamp(0, matrix.shape[1] - 1)[:, None]
    matrix.scatter_add_(1, columns, torch.where(is_inside, values, 0.0)[:, None])
