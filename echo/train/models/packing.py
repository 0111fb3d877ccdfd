"""Packed rows: several rollouts in one row, which the attention keeps apart.

A packed row [1, L] has no padding, so no computation is wasted, and a row can hold whole groups
that would not fit into a padded rectangle. An attention registered with transformers as `packed`
keeps rollouts apart, by one of the kernels in attention.py. This attention has no mask function, so
transformers makes no L x L mask. transformers passes the result of `arguments` to every layer.

Completions may share a prompt. The prompt is then a segment of its own, and each completion attends
to the prompt's keys and to its own keys. The kernel gets the prompt's keys once for each
completion. All other work of a layer is done once for the prompt. In the same way, a rollout of
several chains (core/chains.py) is divided into pieces. Each piece attends to all earlier tokens of
its chain, which may be in several places of the row.

This attention is causal, and stays within the segment and the layer's window. Models with other
settings of attention (caps, sinks, biases, windows in the mask only) are refused. In some
architectures, layers mix tokens without attention, so rollouts would affect each other silently.
Therefore `find_packing_fault` tries each model: two short segments in one row must get the same
states as each segment alone. The two segments are shorter than usual windows and chunks of
attention, so the trial cannot test layers that have these. Of such layers, only those of sliding
attention are accepted, because this attention implements their windows. `can_share_prompts` tries
two completions of one prompt in the same way.

Shapes: L tokens of a row, H heads of width D, n segments.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from echo.algo.batching import RowRuns, Segments
from echo.train.models.attention import (
    Kernel,
    LayerShape,
    LongSegments,
    Masks,
    attend_alone,
    attend_long,
    attend_varlen,
    is_dense,
    plain_kernel,
)

NAME = "packed"
"""transformers' name of the attention for packed rows."""

LAYER_TYPES = {"full_attention", "sliding_attention"}
"""transformers' names of the layer types that this attention supports."""

UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""Names of the arguments of attention functions that this attention refuses."""

PROBE_LENGTHS = (9, 6)
"""Lengths of the two segments of a trial, in tokens."""

PROMPT_PROBE = (9, 3, 6)
"""Lengths of the prompt and the two completions of a trial, in tokens."""

MAX_LEAK = {torch.float32: 1e-3, torch.bfloat16: 0.3}
"""dtype -> largest relative difference of a token's state that counts as rounding. In 16 bits, deep
models round by several percent, so the trial only shows that the kernel works.
"""

PROBE_ERRORS = (
    ValueError,
    TypeError,
    NotImplementedError,
    AttributeError,
    KeyError,
    IndexError,
    RuntimeError,
    AssertionError,
)
"""Errors that a model may raise if its code cannot handle packed rows."""


def arguments(
    segments: Segments, kernel: Kernel, *, seen: set[LayerShape] | None = None
) -> dict[str, Any]:
    """Return the arguments that a model needs for a packed row in addition to `input_ids`.

    Args:
        segments: segments of the row, on the model's device.
        kernel: kernel of the attention. A varlen kernel gets the segments as tensors; all other
            kernels get `SegmentRuns`.
        seen: collects the shapes of the layers' attention; None to collect nothing.
    """
    given: dict[str, Any] = {"position_ids": segments.position_ids}
    if seen is not None:
        given["seen_shapes"] = seen
    spans = list(zip(segments.lengths, segments.prefixes, strict=True))
    if not kernel.is_varlen:
        return given | {"segment_runs": SegmentRuns.of(spans)}
    return given | {
        "cu_seq_lens_q": segments.ends,
        "cu_seq_lens_k": segments.key_ends,
        "max_length_q": max(segments.lengths),
        "max_length_k": max(_num_keys(each) for each in spans),
        "segment_keys": segments.keys,
        "long_segments": _long_segments(segments, kernel),
    }


def _long_segments(segments: Segments, kernel: Kernel) -> LongSegments | None:
    """Return the long segments at the start of a row; None if the row has no long segments."""
    spans = list(zip(segments.lengths, segments.prefixes, strict=True))
    is_other = (
        kernel.long_from is None or length < kernel.long_from or bool(runs)
        for length, runs in spans
    )
    number = next((place for place, other in enumerate(is_other) if other), len(spans))
    if not number:
        return None
    others, lengths = spans[number:], segments.lengths[:number]
    start = sum(lengths)  # the same in row and keys: long segments share no prompt
    return LongSegments(
        lengths=lengths,
        others=(
            segments.ends[number:] - start,
            segments.key_ends[number:] - start,
            max(length for length, _ in others),
            max(_num_keys(each) for each in others),
        )
        if others
        else None,
        keys=None if segments.keys is None else segments.keys[start:],
    )


def _num_keys(span: tuple[int, RowRuns]) -> int:
    length, runs = span
    return length + sum(size for _, size in runs)


@dataclass(frozen=True, slots=True, eq=False)
class SegmentRuns:
    """The segments of a packed row, grouped into runs of equal neighbours.

    Segments are equal if they have the same length and attend to the same earlier tokens. Kernels
    without cumulative lengths use this class.
    """

    runs: tuple[tuple[int, int, RowRuns], ...]
    """For each run: number of segments, length of a segment, and the earlier runs of tokens that
    the segments attend to.
    """
    single: Mapping[tuple[int, int], int]
    """(start, length) of each run of a single segment, such as a shared prompt -> index of the run
    in `runs`.
    """
    masks: Masks
    """The masks of the row, shared by all layers."""

    @staticmethod
    def of(spans: Iterable[tuple[int, RowRuns]]) -> SegmentRuns:
        """Return the runs of a row's segments.

        `spans` has each segment's length, and the earlier runs of tokens that the segment attends
        to.
        """
        runs = tuple((len(list(same)), *span) for span, same in groupby(spans))
        starts = accumulate((number * length for number, length, _ in runs), initial=0)
        single = {
            (start, length): place
            for place, (start, (number, length, _)) in enumerate(zip(starts, runs, strict=False))
            if number == 1
        }
        return SegmentRuns(runs, single, {})


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: int | None = None,
    max_length_k: int | None = None,
    segment_keys: Tensor | None = None,
    long_segments: LongSegments | None = None,
    segment_runs: SegmentRuns | None = None,
    seen_shapes: set[LayerShape] | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """Return causal attention within each segment of a row.

    transformers prescribes the signature.

    Args:
        module: the layer's attention.
        query: [1, H, L, D], or several rows with one segment each.
        key: [1, Hkv, L, D]; each key head serves H / Hkv query heads.
        value: [1, Hkv, L, Dv].
        attention_mask: None; a mask is refused.
        scaling: factor of the scores; None for 1 / sqrt(D).
        dropout: 0; dropout is refused.
        sliding_window: largest number of tokens that a token attends to, including itself; None for
            no limit.
        is_causal: True or None; False is refused.
        cu_seq_lens_q: [n + 1] int32, starts of the segments, then L; for the kernel.
        cu_seq_lens_k: [n + 1] int32, starts of the segments' keys, then the number of keys.
        max_length_q: number of tokens of the longest segment, for the kernel.
        max_length_k: largest number of keys of a segment.
        segment_keys: [K] int64, places of the segments' keys in the row, for the kernel. None if
            each segment has only the keys of its own tokens.
        long_segments: segments at the start of the row that dense products compute; None for none.
        segment_runs: runs of equal segments, for a kernel without cumulative lengths.
        seen_shapes: collects the shape of this layer's attention.
        others: further arguments of this model's attention.

    Returns:
        The attention [1, L, H, Dv], and None in place of the attention weights.

    Raises:
        NotImplementedError: if the model needs a refused setting.
    """
    is_masked = attention_mask is not None or bool(dropout) or is_causal is False
    _refuse_unsupported(
        module, query, key, is_masked=is_masked, window=sliding_window, others=others
    )
    if seen_shapes is not None:
        seen_shapes.add(LayerShape.of(query, key, value, sliding_window))
    if segment_runs is not None:
        return _attend_runs(query, key, value, segment_runs, scaling, sliding_window), None
    if cu_seq_lens_q is None:
        # A call without segments comes from padded rows.
        return attend_alone(query, key, value, scaling, sliding_window), None
    if long_segments is not None and is_dense(query.shape[3], value.shape[3], sliding_window):
        return attend_long(query, key, value, long_segments, scaling), None
    segments = cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k
    return attend_varlen(query, key, value, segments, segment_keys, scaling, sliding_window), None


AttentionInterface.register(NAME, packed_attention)


def _refuse_unsupported(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    *,
    is_masked: bool,
    window: int | None,
    others: Mapping[str, object],
) -> None:
    for name in UNSUPPORTED:
        if others.get(name) is not None:
            raise NotImplementedError(f"packed attention has no {name}")
    if is_masked:
        raise NotImplementedError("packed attention is causal, without dropout and without a mask")
    if window is None and getattr(module, "sliding_window", None):
        name = type(module).__name__
        raise NotImplementedError(f"{name} says its sliding window in the mask only")
    if query.shape[2] != key.shape[2]:
        raise NotImplementedError("packed attention has no cache")


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend_runs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: SegmentRuns,
    scaling: float | None,
    window: int | None,
) -> Tensor:
    """Return the attention within a row's segments, [1, L, H, Dv], computed run by run.

    This function is not compiled, because each new set of runs would need a new graph.
    """
    sizes = [number * length for number, length, _ in segments.runs]
    queries, keys, values = (torch.split(x[0], sizes, 1) for x in (query, key, value))
    parts = []
    for (number, length, before), *states in zip(segments.runs, queries, keys, values, strict=True):
        # [H, number * length, D] -> [number, H, length, D], a view.
        q, k, v = (x.view(len(x), number, length, x.shape[-1]).transpose(0, 1) for x in states)
        if before:
            k, v = (
                torch.cat([*each, own], 2)
                for each, own in (
                    (_before(key, keys, segments, before, number), k),
                    (_before(value, values, segments, before, number), v),
                )
            )
        parts.append(attend_alone(q, k, v, scaling, window, segments.masks).flatten(0, 1))
    return torch.cat(parts)[None]


def _before(
    states: Tensor,
    parts: Sequence[Tensor],
    segments: SegmentRuns,
    before: RowRuns,
    number: int,
) -> Iterator[Tensor]:
    """Yield the keys or values of each earlier run of tokens in `before`, [number, H, size, D].

    All `number` segments attend to the same earlier tokens, so they get the same result.

    Args:
        states: the keys or values of the whole row.
        parts: the keys or values of each run of segments. If an earlier run of tokens is exactly
            one segment, its part is used instead of a slice of `states`, because the gradient of a
            slice would have the size of the whole row.
        segments: the segments of the row.
        before: (start, size) of each earlier run of tokens.
        number: number of segments.
    """
    for run in before:
        start, size = run
        place = segments.single.get(run)
        found = states[0, :, start : start + size] if place is None else parts[place]
        yield found.expand(number, -1, -1, -1)


def find_packing_fault(
    model: Any, own_dtype: torch.dtype, dtype: torch.dtype, shapes: set[LayerShape]
) -> str | None:
    """Switch a model to packed rows; return the reason if the model cannot take packed rows.

    A model that cannot take packed rows is left unchanged.

    Args:
        model: a model of transformers, with the attention "sdpa" or "eager", in evaluation mode.
        own_dtype: the dtype of the model's computation without autocast.
        dtype: the dtype of the model's matrix products in training.
        shapes: collects the shapes of the layers' attention.
    """
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if strange := sorted(kinds - LAYER_TYPES):
        return f"its layers of {', '.join(strange)} carry one rollout into the next"
    device = next(model.parameters()).device
    # Any two segments that differ in their first token.
    ids = torch.cat([torch.arange(3, 3 + PROBE_LENGTHS[0]), torch.arange(5, 5 + PROBE_LENGTHS[1])])
    ids = (ids % model.config.get_text_config().vocab_size)[None].to(device)
    row = Segments.of(PROBE_LENGTHS).to(device)
    before = model.config._attn_implementation  # noqa: SLF001, its setter is public
    try:
        with torch.no_grad():
            alone = _states(model, ids[:, PROBE_LENGTHS[0] :])
            model.set_attn_implementation(NAME)
            if model.config._attn_implementation != NAME:  # noqa: SLF001
                return f"{type(model).__name__} takes no other attention"
            fault = _find_leak(model, ids, row, alone, own_dtype, shapes)
            if fault is None and dtype != own_dtype:
                fault = _find_leak(model, ids, row, alone, dtype, shapes)
    except PROBE_ERRORS as error:
        fault = str(error).partition("\n")[0] or type(error).__name__
    if fault is not None:
        model.set_attn_implementation(before)
    return fault


def can_share_prompts(model: Any, dtype: torch.dtype) -> bool:
    """Return whether completions that share a prompt get correct states.

    Each completion must get the same states as without sharing.

    Args:
        model: a model that was already switched to packed rows.
        dtype: the dtype of the model's matrix products.
    """
    device = next(model.parameters()).device
    prompt, _, other = PROMPT_PROBE
    ids = torch.arange(3, 3 + sum(PROMPT_PROBE))
    ids = (ids % model.config.get_text_config().vocab_size)[None].to(device)
    alone = torch.cat([ids[:, :prompt], ids[:, -other:]], 1)
    prefixes: list[RowRuns] = [(), ((0, prompt),), ((0, prompt),)]
    rows = (
        (ids, Segments.of(PROMPT_PROBE, prefixes)),
        (alone, Segments.of([prompt + other])),
    )
    kernel = plain_kernel(device, dtype)
    with (
        torch.no_grad(),
        torch.autocast(device.type, dtype, enabled=dtype != torch.float32),
    ):
        shared, expected = (
            _states(model, row, **arguments(segments.to(device), kernel)) for row, segments in rows
        )
    return _difference(shared[:, -other:], expected[:, -other:]) <= MAX_LEAK[dtype]


def _find_leak(
    model: Any,
    ids: Tensor,
    row: Segments,
    alone: Tensor,
    dtype: torch.dtype,
    shapes: set[LayerShape],
) -> str | None:
    """Return a reason if the second segment's states depend on the first segment, else None."""
    given = arguments(row, plain_kernel(ids.device, dtype), seen=shapes)
    with torch.autocast(ids.device.type, dtype, enabled=dtype != torch.float32):
        packed = _states(model, ids, **given)
    leak = _difference(packed[:, PROBE_LENGTHS[0] :], alone)
    if leak <= MAX_LEAK[dtype]:
        return None
    return f"a rollout changes by {leak:.0%} when another one stands before it in the row"


def _difference(found: Tensor, expected: Tensor) -> float:
    found, expected = found.float(), expected.float()
    return float(((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


def _states(model: Any, ids: Tensor, **given: Any) -> Tensor:
    states: Tensor = model.base_model(input_ids=ids, use_cache=False, **given).last_hidden_state
    return states
