"""Packed rows hold several rollouts, and the attention keeps them apart.

A row [1, L] has no padding, so no computation is wasted. Each micro-batch nearly reaches the limit
of tokens. A row can hold whole groups that would not fit into a padded rectangle. An attention
registered with transformers as `packed` keeps rollouts apart, by one of the kernels in
attention.py. No mask function is registered with it, so transformers makes no mask of size L x L.
transformers passes the result of `arguments` on to every layer.

Completions may share a prompt. The prompt is then a segment of its own, and each completion attends
to the prompt's keys and then to its own. The kernel gets the prompt's keys once for each
completion. Everything else in a layer is computed once for the prompt. A rollout of several chains
is divided into pieces in the same way. Each piece attends to the keys of all tokens that come
before it in its chain. These tokens may be in several places of the row.

This attention does what a mask would do: it is causal, within the segment, and within the layer's
window. Other settings of a model's attention (caps, sinks, biases, windows in the mask only) are
refused. Layers that mix tokens without attention cannot see segments. With some architectures,
rollouts would affect each other silently. So `find_packing_fault` tries each model: two short
segments in one row must give the states that each gives alone. The probe is too short to show a
window or a chunk, so only layers of full and sliding attention are accepted. The tests check
sliding attention for each family of models. `can_share_prompts` tries two completions of one prompt
in the same way.

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
"""Types of layers that keep segments apart with this attention."""

UNSUPPORTED = ("softcap", "s_aux", "position_bias")
"""Arguments of attention functions that this attention does not support."""

PROBE_LENGTHS = (9, 6)
"""Number of tokens of each of the two segments that a model is tried on."""

PROMPT_PROBE = (9, 3, 6)
"""Number of tokens of the prompt and of each of the two completions that a model is tried on."""

MAX_LEAK = {torch.float32: 1e-3, torch.bfloat16: 0.3}
"""Largest relative difference of a token's state that counts as rounding, by type. In 16 bits deep
models round by several percent, so the bound only shows that the kernel works.
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
"""Errors that a model's code may raise if it cannot work with packed rows."""


def arguments(
    segments: Segments, kernel: Kernel, *, seen: set[LayerShape] | None = None
) -> dict[str, Any]:
    """Return a model's arguments for a packed row, besides `input_ids`.

    Args:
        segments: segments of the row, on the model's device.
        kernel: computes the attention. A varlen kernel gets the segments as tensors, another kernel
            as `SegmentRuns`.
        seen: gets the shapes of the attention of the model's layers; None to collect none.
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
    """Return the long segments at the start of a row, None if there are none."""
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

    A kernel without cumulative lengths gets this class. The segments of a run have equal lengths,
    and the same runs of tokens before them.
    """

    runs: tuple[tuple[int, int, RowRuns], ...]
    """For each run of segments: their number, their length, and the runs of tokens before them."""
    single: Mapping[tuple[int, int], int]
    """The runs that are a single segment, for example a shared prompt. The key is the start and the
    length of the segment, and the value is the index of the run in `runs`.
    """
    masks: Masks
    """The masks of the row. All layers of the model use the same masks."""

    @staticmethod
    def of(spans: Iterable[tuple[int, RowRuns]]) -> SegmentRuns:
        """Return the runs of a row's segments.

        `spans` has each segment's length, and the runs of tokens before the segment.
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
        query: [1, H, L, D], or several rows of one segment each.
        key: [1, Hkv, L, D]; each of its heads serves H / Hkv heads of the query.
        value: [1, Hkv, L, Dv].
        attention_mask: None; a mask is refused.
        scaling: factor of the scores; None for 1 / sqrt(D).
        dropout: 0; dropout is refused.
        sliding_window: largest number of tokens that a token attends to, itself included; None for
            no limit.
        is_causal: True or None; False is refused.
        cu_seq_lens_q: [n + 1] int32, starts of the segments, then L; for the kernel.
        cu_seq_lens_k: [n + 1] int32, starts of the segments' keys, then their number.
        max_length_q: tokens of the longest segment, for the kernel.
        max_length_k: largest number of keys of a segment.
        segment_keys: [K] int64, places of the segments' keys in the row, for the kernel. None if
            each segment has only the keys of its own tokens.
        long_segments: segments at the start of the row that dense products compute; None for none.
        segment_runs: runs of equal segments, for a kernel without cumulative lengths.
        seen_shapes: gets the shape of this layer's attention.
        others: further arguments of this model's attention.

    Returns:
        [1, L, H, Dv], and no weights.

    Raises:
        NotImplementedError: if the model needs another kind of attention.
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
    """Return the attention within a row's segments, [1, L, H, Dv], run by run.

    This function is not compiled: each row has other runs and would need another graph.
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
    """Yield the states of each run of tokens in `before`, [number, H, size, D].

    All `number` segments get the same states. If a run is one of `parts`, that part is yielded,
    because its gradient is small. The gradient of a slice of `states` has the size of the row.
    """
    for run in before:
        start, size = run
        place = segments.single.get(run)
        found = states[0, :, start : start + size] if place is None else parts[place]
        yield found.expand(number, -1, -1, -1)


def find_packing_fault(
    model: Any, own_dtype: torch.dtype, dtype: torch.dtype, shapes: set[LayerShape]
) -> str | None:
    """Switch a model to packed rows. Return why it cannot take them, or None.

    A model that cannot take packed rows is left unchanged.

    Args:
        model: a model of transformers, with the attention "sdpa" or "eager", in evaluation mode.
        own_dtype: the type that the model computes in without autocast.
        dtype: the type of the model's matrix products in training.
        shapes: gets the shapes of the attention of the model's layers.
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

    Each completion must get the states that it would get alone.

    Args:
        model: a model that was already switched to packed rows.
        dtype: the type of its matrix products.
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
    """Return a reason if the second segment's states depend on the first segment."""
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
