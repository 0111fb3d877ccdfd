"""Log-probabilities from hidden states and LM head, without [N, V] logits.

The plain computation (logits, log_softmax, gather) stores several [N, V] float32 matrices, each of
10 GB for 16,384 tokens and a vocabulary of 151,936. Here logits are not stored, and the backward
computes the logits again. This costs one more matrix product, and needs a fraction of the memory.
There are two backends: torch_kernels.py for any device, triton_kernels.py for GPUs.

Numerics:
- Products are summed in float32, and statistics are float32, also for 16-bit input. The rounding of
  bfloat16 logits would be as large as the clip range of GSPO. For float64 input, both are float64.
- A tile of a Triton kernel may reach beyond the vocabulary. Its columns there add nothing.
- Each row of the weight's gradient is written once, from one float32 sum.
- On a CPU, rows with a gradient of zero (clipped tokens) are dropped before the backward. This is
  exact. On a GPU these rows are kept, since the host would wait for their number.

The host never waits for a GPU here. An id outside of the vocabulary raises a `ValueError` on a CPU.
On a GPU, such an id stops the process by a device-side assertion.

Shapes: N tokens, D model width, V vocabulary.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from echo.core.memory_sizes import VOCAB_CHUNK
from echo.kernels import torch_kernels
from echo.kernels.contract import (
    BackendName,
    FurtherIds,
    Kernels,
    LiveRows,
    Pairs,
    PolicyRows,
    RatioClip,
    host_waits,
    is_describable,
)

# --- backends -------------------------------------------------------------------------------------
# Triton is imported only when it is needed, on a GPU: PyTorch for CUDA installs it, PyTorch for
# CPUs does not.


def load_kernels(backend: BackendName, hidden: Tensor, weight: Tensor) -> Kernels:
    """Return the backend for hidden states [N, D] and the LM head [V, D].

    "auto" is Triton on an NVIDIA GPU in bfloat16, PyTorch elsewhere. For float32, PyTorch's cuBLAS
    is faster than the Triton kernels. In float16, gradients of an unscaled loss would underflow.

    Raises:
        ValueError: if the name is unknown, or the backend cannot compute this input.
    """
    if backend not in ("auto", "triton", "torch"):
        raise ValueError(f"backend = {backend!r}: use 'auto', 'triton' or 'torch'")
    is_faster = hidden.is_cuda and hidden.dtype == torch.bfloat16
    if backend == "torch" or (backend == "auto" and not is_faster):
        return torch_kernels
    fault = _find_device_fault(hidden.device) or _find_head_fault(hidden, weight)
    if fault is None:
        from echo.kernels import triton_kernels

        return triton_kernels
    if backend == "auto":
        return torch_kernels
    raise ValueError(f"backend = 'triton': {fault}; 'torch' computes everywhere")


def _find_device_fault(device: torch.device) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if device.type == "cuda" and torch.version.cuda:
        major, minor = torch.cuda.get_device_capability(device)
        return None if major >= 8 else f"the GPU has compute capability {major}.{minor}, below 8.0"
    if device.type != "cpu":
        return f"there is no kernel for device {device}"
    from echo.kernels import triton_kernels

    if triton_kernels.IS_INTERPRETED:
        return None
    return "the tensors are on the CPU, and TRITON_INTERPRET=1 was not set at the start"


def _find_head_fault(hidden: Tensor, weight: Tensor) -> str | None:
    if hidden.dtype != weight.dtype:
        return f"hidden is {hidden.dtype}, but weight is {weight.dtype}"
    if hidden.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"there is no kernel for {hidden.dtype}"
    if is_describable(weight):
        return None
    return (
        f"weight {list(weight.shape)} has strides {list(weight.stride())}; its rows must be "
        "contiguous and begin at multiples of 16 bytes"
    )


# The policy loss of single tokens with its derivative: GRPO's ratio, clip-higher and dual clip
#
# With r = exp(learner logprob - sampler logprob), where the log ratio is bounded by MAX_LOG_RATIO,
# and advantage A of the token's rollout:
#
#     l = -min(r A, clip(r, 1 - low, 1 + high) A);   for A < 0 with dual clip c also  l <= -c A.
#
#     coefficient = dl / d logprob = -r A, or 0 where a clip is active: where A < 0 and r < 1 - low,
#     A > 0 and r > 1 + high, A < 0 and r > c, or |log r| > MAX_LOG_RATIO. On a bound itself, as in
#     PyTorch's clamp, the gradient flows.
# Contract: this is the loss of echo.algo.losses.GrpoLoss before mask and normaliser. The caller
# leaves masked tokens out and divides the sum by the tokens of the whole batch. A NaN gives a NaN,
# and never a clipped token.
# The derivative depends on the token's own log-probability alone, so the kernel that computes this
# returns both (linear_policy_loss). Losses of whole rollouts or groups (GSPO, GEPO) need sums over
# tokens first, and use autograd.
#
# Source: GRPO, arXiv:2402.03300; DAPO, arXiv:2503.14476; dual clip, arXiv:1912.09729.


EntropyMode = Literal["none", "value", "grad"]
"""Whether the entropy is not computed ("none"), has no gradient ("value"), or has a gradient
("grad").
"""


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    inv_temperature: float | Tensor = 1.0,
    *,
    entropy: EntropyMode = "none",
    vocab_chunk: int = VOCAB_CHUNK,
    backend: BackendName = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Return the log-probability of each id, given the hidden state that predicts the id.

    The distribution is softmax(hidden @ weight.T * inv_temperature).

    Args:
        hidden: [N, D], floating point: the hidden states that predict the ids.
        weight: [V, D], the LM head.
        ids: [N] integer in 0..V-1.
        inv_temperature: 1 / temperature, > 0; one number or [N], without gradient.
        entropy: "value" returns the entropy as a constant, "grad" as a differentiable output.
        vocab_chunk: number of columns of logits, or of their gradient, in memory at a time.
        backend: "triton", "torch", or "auto" (see `load_kernels`).

    Returns:
        Log-probabilities and entropies (None if `entropy` is "none"), both [N] in nats. They are
        float32, or float64 if `hidden` is float64.

    Raises:
        ValueError: if shapes disagree, an id on the CPU is outside the vocabulary, a setting is
            invalid, or the backend cannot compute this input.
    """
    options = _check(hidden, weight, ids, entropy, vocab_chunk, backend)
    scale = _row_scale(hidden, inv_temperature)
    outputs: _Outputs = _LinearLogprob.apply(  # type: ignore[no-untyped-call]
        hidden, weight, ids.long(), scale, None, None, options
    )
    return outputs[:2]


def linear_further_logprobs(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    sets: FurtherIds,
    inv_temperature: float | Tensor = 1.0,
    *,
    entropy: EntropyMode = "none",
    vocab_chunk: int = VOCAB_CHUNK,
    backend: BackendName = "auto",
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the results of `linear_logprob`, and the log-probabilities of the ids in `sets`.

    One forward pass over the LM head computes all results, and one backward pass all gradients.

    Args:
        hidden: as for `linear_logprob`.
        weight: as for `linear_logprob`.
        ids: as for `linear_logprob`.
        sets: M further ids of any rows.
        inv_temperature: as for `linear_logprob`.
        entropy: as for `linear_logprob`.
        vocab_chunk: as for `linear_logprob`.
        backend: as for `linear_logprob`.

    Returns:
        [N] log-probabilities, [N] entropies or None, and the [M] log-probabilities of `sets`, with
        gradient.

    Raises:
        ValueError: as `linear_logprob`; also if `sets` has different numbers of rows and ids.
    """
    options = _check(hidden, weight, ids, entropy, vocab_chunk, backend)
    scale = _row_scale(hidden, inv_temperature)
    if sets.rows.shape != sets.ids.shape or sets.ids.ndim != 1:
        raise ValueError(
            f"sets have rows {list(sets.rows.shape)} and ids {list(sets.ids.shape)}: one row an id"
        )
    _check_ids(sets.ids, len(weight))
    outputs: _Outputs = _LinearLogprob.apply(  # type: ignore[no-untyped-call]
        hidden, weight, ids.long(), scale, None, sets, options
    )
    further = outputs[4]
    assert further is not None
    return outputs[0], outputs[1], further


@dataclass(frozen=True, slots=True, eq=False)
class TokenLosses:
    """The results of `linear_policy_loss`. All tensors are [N]."""

    losses: Tensor
    """Clipped policy loss of each token, not normalised, with gradient."""
    logprobs: Tensor
    """Log-probability of each token in nats, with gradient."""
    ratios: Tensor
    """Probability of each token under the learner divided by its probability under the sampler,
    without gradient.
    """
    entropies: Tensor
    """Entropy of the distribution at each token in nats, without gradient."""


def linear_policy_loss(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    sampler_logprobs: Tensor,
    advantages: Tensor,
    inv_temperature: float | Tensor = 1.0,
    *,
    clip: RatioClip,
    vocab_chunk: int = VOCAB_CHUNK,
    backend: BackendName = "auto",
) -> TokenLosses:
    """Return each token's clipped policy loss, log-probability, ratio and entropy.

    The result equals the policy loss computed from `linear_logprob`, but one kernel computes all
    values together. The loss of a batch is the mean of `losses` over its trained tokens.

    Args:
        hidden: as for `linear_logprob`.
        weight: as for `linear_logprob`.
        ids: as for `linear_logprob`.
        sampler_logprobs: [N] log-probabilities under the policy that sampled, nats, without
            gradient.
        advantages: [N] advantage of each token's rollout, without gradient.
        inv_temperature: as for `linear_logprob`.
        clip: the bounds of the ratio.
        vocab_chunk: as for `linear_logprob`.
        backend: as for `linear_logprob`.

    Raises:
        ValueError: as `linear_logprob`.
    """
    options = _check(hidden, weight, ids, "value", vocab_chunk, backend)
    scale = _row_scale(hidden, inv_temperature)
    for name, values in (("sampler_logprobs", sampler_logprobs), ("advantages", advantages)):
        if values.shape != scale.shape:
            raise ValueError(
                f"{name} has shape {list(values.shape)}, expected {list(scale.shape)}: one a token"
            )
    sampler_logprobs = sampler_logprobs.detach().to(scale.dtype).contiguous()
    policy = PolicyRows(sampler_logprobs, advantages.detach().to(scale.dtype).contiguous(), clip)
    logprobs, entropies, losses, ratios, _ = _LinearLogprob.apply(  # type: ignore[no-untyped-call]
        hidden, weight, ids.long(), scale, policy, None, options
    )
    return TokenLosses(losses, logprobs, ratios, entropies)


# --- logits of chosen ids, and log-probabilities within a set of ids ------------------------------
# A token that was drawn from a set of ids is scored on that set. The learner's logits outside of
# the set do not count. An id inside the set counts however low the learner ranks it. Only the rows
# of the LM head that the sets name are read. So there is neither an [N, V] matrix nor a pass over
# the head.


def linear_pair_logits(
    hidden: Tensor,
    weight: Tensor,
    pairs: Pairs,
    inv_temperature: float | Tensor = 1.0,
    *,
    backend: BackendName = "auto",
) -> Tensor:
    """Return the logits of M pairs, divided by the temperature, with gradient.

    If id a of a row has the log-probability l, another id j of the row has the log-probability l +
    logit(j) - logit(a).

    Args:
        hidden: as for `linear_logprob`.
        weight: as for `linear_logprob`.
        pairs: the M pairs, in the order of their rows.
        inv_temperature: as for `linear_logprob`.
        backend: as for `linear_logprob`.

    Raises:
        ValueError: if shapes disagree, an id on the CPU is outside the vocabulary, or the backend
            cannot compute this input.
    """
    _check_shapes(hidden, weight, pairs.ids, num_rows=len(pairs.rows))
    kernels = load_kernels(backend, hidden, weight)
    logits: Tensor = _PairLogits.apply(  # type: ignore[no-untyped-call]
        hidden, weight, pairs, _row_scale(hidden, inv_temperature), kernels
    )
    return logits


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class IdSets:
    """Sets of ids, for rows that are scored on a set, and not on the whole vocabulary.

    S of the N rows have a set. The sets have M members in all.
    """

    pairs: Pairs
    """Row and id of each member. `pairs.rows` counts only rows with a set, 0..S-1."""
    sizes: Tensor
    """[S] int64: number of ids in each set, at least 1."""
    own: Tensor
    """[S] int64: for each set, the index in `pairs` of the id whose log-probability is returned."""
    within: Tensor
    """[S] int64: the row of each set, 0..N-1."""
    beyond: Tensor
    """[N - S] int64: the rows that have no set. They are scored on the whole vocabulary."""


def linear_set_logprob(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    sets: IdSets,
    inv_temperature: float = 1.0,
    *,
    entropy: EntropyMode = "none",
    vocab_chunk: int = VOCAB_CHUNK,
    backend: BackendName = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Return log-probabilities like `linear_logprob`, but take a row's softmax over the row's set.

    Args:
        hidden: as for `linear_logprob`.
        weight: as for `linear_logprob`.
        ids: as for `linear_logprob`; ignored for rows with a set.
        sets: the sets, each of which contains the row's own id.
        inv_temperature: as for `linear_logprob`.
        entropy: as for `linear_logprob`. For a row with a set, the entropy is over the set.
        vocab_chunk: as for `linear_logprob`.
        backend: as for `linear_logprob`.

    Raises:
        ValueError: as `linear_logprob`.
    """
    states = hidden.index_select(0, sets.within)
    logits = linear_pair_logits(states, weight, sets.pairs, inv_temperature, backend=backend)
    own_logprobs, own_entropies = _within_sets(logits, sets, entropy)
    size = sets.within.shape[0] + sets.beyond.shape[0]
    logprobs = own_logprobs.new_zeros(size).index_copy(0, sets.within, own_logprobs)
    entropies = None
    if own_entropies is not None:
        entropies = own_entropies.new_zeros(size).index_copy(0, sets.within, own_entropies)
    if len(sets.beyond):
        other_logprobs, other_entropies = linear_logprob(
            hidden.index_select(0, sets.beyond),
            weight,
            ids.index_select(0, sets.beyond),
            inv_temperature,
            entropy=entropy,
            vocab_chunk=vocab_chunk,
            backend=backend,
        )
        logprobs = logprobs.index_copy(0, sets.beyond, other_logprobs)
        if entropies is not None and other_entropies is not None:
            entropies = entropies.index_copy(0, sets.beyond, other_entropies)
    return logprobs, entropies


def _within_sets(
    logits: Tensor, sets: IdSets, entropy: EntropyMode
) -> tuple[Tensor, Tensor | None]:
    """Return log-probability and entropy of each set, [S], from the members' logits [M].

    The entropy is None if `entropy` is "none".
    """

    def each(values: Tensor) -> Tensor:
        return values.index_select(0, sets.pairs.rows)

    # All values are relative to the peak, so a shift common to all logits cancels exactly.
    relative = logits - each(_reduced(logits.detach(), sets.sizes, "max"))
    log_total = _reduced(relative.exp(), sets.sizes, "sum").log()
    logprobs = relative.index_select(0, sets.own) - log_total
    if entropy == "none":
        return logprobs, None
    with torch.set_grad_enabled(torch.is_grad_enabled() and entropy == "grad"):
        all_logprobs = relative - each(log_total)
        entropies = -_reduced(all_logprobs.exp() * all_logprobs, sets.sizes, "sum")
    return logprobs, entropies


def _reduced(values: Tensor, sizes: Tensor, reduce: Literal["max", "sum"]) -> Tensor:
    """Return the maximum or the sum of each set's values, [S] from [M]."""
    if not len(values):  # a reduction of nothing has no gradient
        return values.new_zeros(0) + values.sum()
    return torch.segment_reduce(values, reduce, lengths=sizes, unsafe=True)


MAX_LACKING_MASS = 1.0 - 1e-6
"""Largest total probability of a row's excluded ids. Above it, the remaining probability is too
small for float32.
"""


def without_ids(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    logprobs: Tensor,
    entropies: Tensor | None,
    lacking: Pairs,
    inv_temperature: float = 1.0,
    *,
    has_entropy_gradient: bool = False,
    backend: BackendName = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Return log-probabilities and entropies of rows whose distribution excludes a few ids.

    From the log-probability l and the entropy H over the whole vocabulary, the results l' and H'
    are as follows. P is the total probability of the row's excluded ids, and p the probability of
    each:

        l' = l - ln(1 - P)
        H' = (H + sum of p ln p over the excluded ids) / (1 - P) + ln(1 - P)

    Args:
        hidden: as for `linear_logprob`.
        weight: as for `linear_logprob`.
        ids: as for `linear_logprob`.
        logprobs: [N] from `linear_logprob`, with gradient.
        entropies: [N] from `linear_logprob`, or None.
        lacking: the excluded ids, in the order of the rows. Rows without excluded ids are
            unchanged.
        inv_temperature: as for `linear_logprob`.
        has_entropy_gradient: whether the returned entropies have a gradient.
        backend: as for `linear_logprob`.

    Raises:
        ValueError: as `linear_pair_logits`.
    """
    rows = lacking.rows
    own = Pairs(rows, ids.index_select(0, rows).long())
    logits, own_logits = (
        linear_pair_logits(hidden, weight, pairs, inv_temperature, backend=backend)
        for pairs in (lacking, own)
    )
    lacking_logprobs = logprobs.index_select(0, rows) + logits - own_logits
    sets = FurtherIds(rows, lacking.ids)
    masses = sets.sum(lacking_logprobs.exp(), len(logprobs)).clamp(max=MAX_LACKING_MASS)
    log_kept = torch.log1p(-masses)
    if entropies is not None:
        with torch.set_grad_enabled(torch.is_grad_enabled() and has_entropy_gradient):
            terms = sets.sum(lacking_logprobs.exp() * lacking_logprobs, len(logprobs))
            entropies = (entropies + terms) / log_kept.exp() + log_kept
    return logprobs - log_kept, entropies


class _PairLogits(torch.autograd.Function):
    """The autograd operation that computes the logits of pairs of a row and an id."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, pairs: Pairs, scale: Tensor, kernels: Kernels
    ) -> Tensor:
        ctx.save_for_backward(hidden, weight, pairs.rows, pairs.ids, scale)
        ctx.kernels = kernels
        return kernels.pair_logits(hidden, weight, pairs, scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, rows, ids, scale = ctx.saved_tensors
        needs_states, needs_weight = ctx.needs_input_grad[:2]
        grad_states, grad_weight = ctx.kernels.pair_gradients(
            hidden,
            weight,
            Pairs(rows, ids),
            grad * scale.index_select(0, rows),
            needs_states=needs_states,
            needs_weight=needs_weight,
        )
        grad_hidden = None if grad_states is None else grad_states.to(hidden.dtype)
        return grad_hidden, grad_weight, None, None, None


@dataclass(frozen=True, slots=True)
class _Options:
    kernels: Kernels
    entropy: EntropyMode
    vocab_chunk: int


_Outputs = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


class _LinearLogprob(torch.autograd.Function):
    """The autograd operation that computes log-probabilities from states and LM head."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        scale: Tensor,
        policy: PolicyRows | None,
        sets: FurtherIds | None,
        options: _Options,
    ) -> _Outputs:
        scores = options.kernels.forward(
            hidden,
            weight,
            ids,
            scale,
            with_entropy=options.entropy != "none",
            policy=policy,
            sets=sets,
            vocab_chunk=options.vocab_chunk,
        )
        terms, entropies = scores.terms, scores.entropies
        ctx.set_materialize_grads(False)
        ctx.options = options
        ctx.save_for_backward(
            hidden,
            weight,
            ids,
            scale,
            scores.peak,
            scores.total,
            entropies,
            None if terms is None else terms.coefficients,
            None if sets is None else sets.rows,
            None if sets is None else sets.ids,
        )
        constants = [] if terms is None else [terms.ratios]
        if entropies is not None and options.entropy == "value":
            constants.append(entropies)
        ctx.mark_non_differentiable(*constants)
        if terms is None:
            return scores.logprobs, entropies, None, None, scores.set_logprobs
        return scores.logprobs, entropies, terms.losses, terms.ratios, scores.set_logprobs

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,
        grad_logprobs: Tensor | None,
        grad_entropy: Tensor | None,
        grad_losses: Tensor | None,
        _grad_ratios: None,
        grad_sets: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None, None]:
        hidden, weight, ids, scale, peak, total, entropies, coefficients = ctx.saved_tensors[:8]
        sets = None if grad_sets is None else FurtherIds(*ctx.saved_tensors[8:])
        grad = torch.zeros_like(scale) if grad_logprobs is None else grad_logprobs
        if grad_losses is not None:
            grad = grad + grad_losses * coefficients
        rows = _live_rows(grad, grad_entropy, sets, grad_sets)
        if sets is not None and grad_sets is not None and rows is not None:
            is_live = torch.isin(sets.rows, rows)
            places = torch.searchsorted(rows, sets.rows[is_live])
            sets, grad_sets = FurtherIds(places, sets.ids[is_live]), grad_sets[is_live]

        def live(values: Tensor) -> Tensor:
            return values if rows is None else values[rows]

        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_states, grad_weight = ctx.options.kernels.backward(
            LiveRows(
                states=live(hidden),
                ids=live(ids),
                scale=live(scale),
                peak=live(peak),
                total=live(total),
                grad=live(grad),
                grad_entropy=None if grad_entropy is None else live(grad_entropy),
                entropies=None if grad_entropy is None else live(entropies),
                sets=sets,
                grad_sets=grad_sets,
            ),
            weight,
            needs_states=needs_hidden,
            needs_weight=needs_weight,
            vocab_chunk=ctx.options.vocab_chunk,
        )
        grad_hidden = None
        if grad_states is not None:
            grad_hidden = grad_states.to(hidden.dtype)
            if rows is not None:
                grad_hidden = torch.zeros_like(hidden).index_copy_(0, rows, grad_hidden)
        return grad_hidden, grad_weight, None, None, None, None, None


def _live_rows(
    grad: Tensor, grad_entropy: Tensor | None, sets: FurtherIds | None, grad_sets: Tensor | None
) -> Tensor | None:
    """Return the indices of the rows with a gradient; None for all rows.

    On a GPU the result is always None, because the host would have to wait for the GPU to find
    these rows. All rows are then computed. The result is exact, too, because a row without a
    gradient adds exactly 0.
    """
    if host_waits(grad):
        return None
    is_live = grad != 0
    if grad_entropy is not None:
        is_live |= grad_entropy != 0
    if sets is not None and grad_sets is not None:
        is_live[sets.rows[grad_sets != 0]] = True
    rows = is_live.nonzero().squeeze(1)
    return None if len(rows) == len(is_live) else rows


def _check(
    hidden: Tensor,
    weight: Tensor,
    ids: Tensor,
    entropy: EntropyMode,
    vocab_chunk: int,
    backend: BackendName,
) -> _Options:
    _check_shapes(hidden, weight, ids)
    if entropy not in ("none", "value", "grad"):
        raise ValueError(f"entropy = {entropy!r}: use 'none', 'value' or 'grad'")
    if vocab_chunk < 1:
        raise ValueError(f"vocab_chunk = {vocab_chunk}: must be at least 1")
    return _Options(load_kernels(backend, hidden, weight), entropy, vocab_chunk)


def _row_scale(hidden: Tensor, inv_temperature: float | Tensor) -> Tensor:
    """Return the inverse temperatures, [N], in the dtype of the statistics."""
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


def _check_shapes(
    hidden: Tensor, weight: Tensor, ids: Tensor, *, num_rows: int | None = None
) -> None:
    num_rows = len(hidden) if num_rows is None else num_rows
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden {list(hidden.shape)} and weight {list(weight.shape)} must be [N, D] and [V, D]"
        )
    if ids.shape != (num_rows,):
        raise ValueError(f"ids has shape {list(ids.shape)}, expected [{num_rows}]")
    _check_ids(ids, len(weight))


def _check_ids(ids: Tensor, vocab_size: int) -> None:
    if not ids.numel():
        return
    if host_waits(ids):
        is_inside = ((ids >= 0) & (ids < vocab_size)).all()
        torch._assert_async(is_inside, "an id is outside the LM head's rows")  # noqa: SLF001
        return
    low, high = torch.stack(ids.aminmax()).tolist()
    if low < 0 or high >= vocab_size:
        raise ValueError(f"ids span {low}..{high}, but the LM head has {vocab_size} rows")
