"""Micro-batches of rollouts under a budget of tokens, as padded rows or as one packed row.

The input of a rollout is its prompt and its completion without the last token, from which no scored
token is predicted. A padded row has one rollout and padding on its right. Under causal attention no
real token attends to the padding, so the row needs no attention mask, and its positions count from
0. A packed row has several rollouts one after the other, and the model must keep them apart
(train/models/packing.py). Rollouts of one prompt may share it: the packed row then has the prompt
once, before their completions. A packed row may be filled to one of a few sizes, with tokens that
attend to themselves alone. Padded rows may be filled to one of a few lengths, and further rows of
padding may make their number a power of two. Only the model's input differs; a loss gets the same
[B, T] tensors.

Shapes: B rollouts of a micro-batch, P prompt tokens, T completion tokens, L input tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from echo.algo.row_sizes import RowSizes
from echo.core.rollout import Rollout
from echo.kernels.contract import FurtherIds, Pairs
from echo.kernels.logprob import IdSets

PAD_ID = 0
"""Input id of padding; it may be any id of the vocabulary, since no scored token attends to it."""

MIN_SAVED = 0.2
"""Rollouts share a prompt only if that saves at least this share of their tokens. Attention is
slower with shared prompts: below this share a CPU loses more time in attention than sharing saves
elsewhere.
"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingRow:
    """One rollout with its prompt and its advantage, as the trainer takes it."""

    prompt_ids: npt.NDArray[np.int32]
    """[P] token ids of the prompt."""
    rollout: Rollout
    advantage: float
    group_index: int = 0
    """Index of the rollout's group in the batch."""
    log_expectation: float = 0.0
    """Log of the group expectation of the sampler's probability (`losses.group_log_expectation`); 0
    if the loss does not use it.
    """
    proximal_logprobs: npt.NDArray[np.float32] | None = None
    """[T] log-probability of each completion token under the policy at the start of the step, nats;
    None if that policy is the present one.
    """

    @property
    def num_inputs(self) -> int:
        """Number of the rollout's tokens that go through the model: P + T - 1."""
        return len(self.prompt_ids) + self.rollout.num_tokens - 1

    @property
    def num_trained(self) -> int:
        """Number of completion tokens that are trained."""
        return int(np.count_nonzero(self.rollout.completion_mask))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segments:
    """Segments of a packed row of L tokens.

    A segment is a rollout, a prompt that several rollouts share, or a completion after such a
    prompt.
    """

    lengths: tuple[int, ...]
    """Number of tokens of each segment; on the host, so that no reader has to wait for a GPU."""
    prefixes: tuple[tuple[int, int], ...]
    """For each segment, where the prompt that it shares starts in the row, and the number of that
    prompt's tokens; (0, 0) if the segment shares no prompt.
    """
    ends: Tensor
    """[n + 1] int32: the place in the row where each of the n segments starts, then L."""
    position_ids: Tensor
    """[1, L] int64: position of each token in its segment; counts from 0, or from the end of the
    prompt that the segment shares.
    """
    keys: Tensor | None
    """[K] int64: the places in the row that each segment attends to, one segment after another: its
    shared prompt and itself; None if no segment shares a prompt.
    """
    key_ends: Tensor
    """[n + 1] int32: the place in `keys` where the list of each segment starts, then K."""

    @staticmethod
    def of(lengths: Sequence[int], prefixes: Sequence[tuple[int, int]] | None = None) -> Segments:
        """Return the segments of these lengths, with their tensors on the CPU.

        Args:
            lengths: number of tokens of each segment, > 0.
            prefixes: for each segment, where the prompt that it shares starts in the row, and the
                number of that prompt's tokens; None if no prompt is shared.
        """
        sizes = np.cumsum([0, *lengths])
        if prefixes is None or not any(size for _, size in prefixes):
            prefixes, keys = ((0, 0),) * len(lengths), None
        else:
            parts = [
                np.concatenate([np.arange(first, first + size), np.arange(start, start + length)])
                for (first, size), start, length in zip(prefixes, sizes, lengths, strict=False)
            ]
            keys = torch.from_numpy(np.concatenate(parts))
        before = np.array([size for _, size in prefixes])
        positions = np.arange(sizes[-1]) + np.repeat(before - sizes[:-1], lengths)
        key_sizes = np.cumsum([0, *(before + lengths)])
        return Segments(
            lengths=tuple(lengths),
            prefixes=tuple(prefixes),
            ends=torch.from_numpy(sizes.astype(np.int32)),
            position_ids=torch.from_numpy(positions)[None],
            keys=keys,
            key_ends=torch.from_numpy(key_sizes.astype(np.int32)),
        )

    def to(self, device: torch.device) -> Segments:
        return replace(
            self,
            ends=_moved(self.ends, device),
            position_ids=_moved(self.position_ids, device),
            keys=None if self.keys is None else _moved(self.keys, device),
            key_ends=_moved(self.key_ends, device),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LikelyTokens:
    """The sampler's most likely ids at each scored token; M ids for all tokens together."""

    ids: FurtherIds
    """The M ids; the row of an id is the number of its scored token, 0..N-1."""
    places: Tensor
    """[M] int64: for each id, the place of its scored token in the flattened [B, T]."""
    sampler_logprobs: Tensor
    """[M] float32: log-probability of each id under the sampler, nats."""

    @staticmethod
    def of(rollouts: Sequence[Rollout], is_scored: npt.NDArray[np.bool_]) -> LikelyTokens | None:
        """Return the likely ids of the scored tokens, on the CPU; None if no rollout has such ids.

        Args:
            rollouts: the rollouts of a micro-batch.
            is_scored: [B, T] whether each token is scored.
        """
        if all(rollout.likely is None for rollout in rollouts):
            return None
        counts, ids, logprobs = [], [], []
        for rollout, scored in zip(rollouts, is_scored, strict=True):
            likely, is_row = rollout.likely, scored[: rollout.num_tokens]
            if likely is None or likely.logprobs is None:
                counts.append(np.zeros(is_row.sum(), np.int32))
                continue
            kept = np.repeat(is_row, likely.counts)
            counts.append(likely.counts[is_row])
            ids.append(likely.ids[kept])
            logprobs.append(likely.logprobs[kept])
        sizes = np.concatenate(counts)
        rows = np.repeat(np.arange(len(sizes)), sizes)
        return LikelyTokens(
            ids=FurtherIds(
                torch.from_numpy(rows), torch.from_numpy(np.concatenate(ids).astype(np.int64))
            ),
            places=torch.from_numpy(np.flatnonzero(is_scored)[rows]),
            sampler_logprobs=torch.from_numpy(np.concatenate(logprobs)),
        )

    def to(self, device: torch.device) -> LikelyTokens:
        return LikelyTokens(
            ids=FurtherIds(_moved(self.ids.rows, device), _moved(self.ids.ids, device)),
            places=_moved(self.places, device),
            sampler_logprobs=_moved(self.sampler_logprobs, device),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """The tensors of some rollouts that go through the model together."""

    input_ids: Tensor
    """[B, L] int64, padded on the right; a filled micro-batch has further rows of padding. [1, L]
    if packed.
    """
    token_ids: Tensor
    """[B, T] int64: ids of the completion tokens."""
    predictors: Tensor
    """[B, T] int64: place in the flattened input whose output predicts each completion token."""
    sampler_logprobs: Tensor
    """[B, T] float32: log-probability of each completion token under the sampler, nats."""
    completion_mask: Tensor
    """[B, T] bool: whether each token is trained (or scored, see `collate`); False in padding."""
    scored: Tensor
    """[N] int64: the places in the flattened [B, T] where `completion_mask` is True: the scored
    tokens. The host computes these places: if a GPU found them, the host would have to wait.
    """
    advantages: Tensor
    """[B] float32: advantage of each rollout."""
    version_steps: Tensor
    """[B, T] int64: step of the policy version that sampled each token; 0 in padding."""
    group_index: Tensor
    """[B] int64: index of each rollout's group in the batch, equal within a group."""
    log_expectations: Tensor
    """[B] float32: `TrainingRow.log_expectation` of each rollout."""
    proximal_logprobs: Tensor | None = None
    """[B, T] float32: log-probability of each token under the proximal policy, nats; None if the
    proximal policy is the present one.
    """
    supports: IdSets | None = None
    """For each scored token that was drawn from a part of the vocabulary, the ids of that part;
    None if all were drawn from the whole vocabulary.
    """
    lacking: Pairs | None = None
    """For scored tokens drawn from the whole vocabulary but a few ids, these ids; the row of a pair
    counts the scored tokens. None if there are none.
    """
    likely: LikelyTokens | None = None
    """The sampler's most likely ids at each scored token; None if workers send no likely ids."""
    segments: Segments | None = None
    """Segments of a packed row; None for padded rows."""
    num_filled: int = 0
    """Number of tokens at the end of a packed row that belong to no rollout; each of them is a
    segment.
    """

    def spans(self, rows: Sequence[TrainingRow]) -> list[tuple[int, int]]:
        """Return two numbers of tokens for each rollout or segment: its own, and its prompt's.

        The second number is 0 if the segment shares no prompt.

        Args:
            rows: the rows that the micro-batch was made from; if there are none, the result is
                empty.
        """
        if not rows or self.segments is None:
            return [(row.num_inputs, 0) for row in rows]
        sizes = (size for _, size in self.segments.prefixes)
        spans = list(zip(self.segments.lengths, sizes, strict=True))
        return spans[: len(spans) - self.num_filled]

    def pick(self, values: Tensor) -> Tensor:
        """Return the [N] values at the scored tokens of [B, T] values, in the order of `scored`."""
        return values.flatten().index_select(0, self.scored)

    def spread(self, values: Tensor) -> Tensor:
        """Return a [B, T] tensor with the [N] values at the scored tokens, and 0 elsewhere."""
        shape = self.completion_mask.shape
        return values.new_zeros(shape.numel()).index_copy(0, self.scored, values).view(shape)

    def to(self, device: torch.device) -> MicroBatch:
        """Return a copy of the micro-batch whose tensors are on `device`."""
        tensors: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in tensors.items():
            if isinstance(value, Tensor):
                tensors[name] = _moved(value, device)
            elif isinstance(value, Segments | LikelyTokens):
                tensors[name] = value.to(device)
            elif isinstance(value, IdSets):
                tensors[name] = _moved_sets(value, device)
            elif isinstance(value, Pairs):
                tensors[name] = _moved_pairs(value, device)
        return MicroBatch(**tensors)


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy of a CPU tensor on `device`, without waiting for a GPU."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # a copy from other memory waits until the GPU is idle
    return tensor.to(device, non_blocking=True)


def _moved_sets(sets: IdSets, device: torch.device) -> IdSets:
    return IdSets(
        pairs=_moved_pairs(sets.pairs, device),
        sizes=_moved(sets.sizes, device),
        own=_moved(sets.own, device),
        within=_moved(sets.within, device),
        beyond=_moved(sets.beyond, device),
    )


def _moved_pairs(pairs: Pairs, device: torch.device) -> Pairs:
    return Pairs(_moved(pairs.rows, device), _moved(pairs.ids, device))


def lacking_ids(rollouts: Sequence[Rollout], is_scored: npt.NDArray[np.bool_]) -> Pairs | None:
    """Return the ids that the supports of scored tokens lack, where those are recorded, or None.

    Args:
        rollouts: the rollouts.
        is_scored: [B, T] whether a token is scored.
    """
    rows, ids, num_scored = [], [], 0
    for rollout, scored in zip(rollouts, is_scored, strict=True):
        is_row, support = scored[: rollout.num_tokens], rollout.support
        if support is not None and support.lacks.any():
            lacking = is_row & support.lacks
            numbers = num_scored + np.cumsum(is_row)[lacking] - 1
            rows.append(np.repeat(numbers, support.counts[lacking]))
            ids.append(support.ids[np.repeat(lacking, support.counts)])
        num_scored += int(is_row.sum())
    if not any(map(len, rows)):
        return None
    return Pairs(
        torch.from_numpy(np.concatenate(rows).astype(np.int64)),
        torch.from_numpy(np.concatenate(ids).astype(np.int64)),
    )


def id_sets(rollouts: Sequence[Rollout], is_scored: npt.NDArray[np.bool_]) -> IdSets | None:
    """Return the supports of the scored tokens; None if no scored token has a support.

    Args:
        rollouts: the rollouts; the support of a token is the set of ids that it was drawn from.
        is_scored: [B, T] whether a token is scored.

    Raises:
        ValueError: if a scored token is not in its support.
    """
    if all(rollout.support is None for rollout in rollouts):
        return None
    sizes, ids, tokens = [], [], []
    for rollout, scored in zip(rollouts, is_scored, strict=True):
        is_row = scored[: rollout.num_tokens]
        tokens.append(rollout.token_ids[is_row])
        support = rollout.support
        if support is None:
            sizes.append(np.zeros(len(tokens[-1]), np.int32))
            continue
        sizes.append(np.maximum(support.sizes[is_row], 0))
        ids.append(support.ids[np.repeat(is_row & ~support.lacks, support.counts)])
    counts, members = np.concatenate(sizes), np.concatenate(ids)
    within = np.flatnonzero(counts)
    if not len(within):
        return None
    is_own = members == np.repeat(np.concatenate(tokens), counts)
    if is_own.sum() != len(within):
        raise ValueError("a scored token is not among the ids that it was drawn from")
    rows = np.repeat(np.arange(len(within)), counts[within])
    return IdSets(
        pairs=Pairs(torch.from_numpy(rows), torch.from_numpy(members.astype(np.int64))),
        sizes=torch.from_numpy(counts[within].astype(np.int64)),
        own=torch.from_numpy(np.flatnonzero(is_own)),
        within=torch.from_numpy(within),
        beyond=torch.from_numpy(np.flatnonzero(counts == 0)),
    )


def pack_micro_batches(
    lengths: Sequence[int],
    *,
    max_tokens: int,
    group_index: Sequence[int] | None = None,
    by_powers: bool = False,
) -> list[list[int]]:
    """Return the rows divided into micro-batches of up to `max_tokens` tokens, padding counted.

    Rows of similar length are put together, longest first, so that there is little padding and a
    lack of memory shows in the first micro-batch. A row is never cut: a row longer than
    `max_tokens` gets a micro-batch of its own. With `group_index` a group is never cut either.

    Args:
        lengths: tokens of each row, including the padding that the row would have alone, >= 1.
        max_tokens: bound on a micro-batch's number of rows times its longest row, inclusive.
        group_index: group of each row, to keep groups whole; None lets rows go anywhere.
        by_powers: whether the number of rows of each micro-batch is a power of two; without effect
            if groups are kept whole.

    Returns:
        The row indices of each micro-batch; each index occurs exactly once. The result depends on
        the arguments alone.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens = {max_tokens}: must be at least 1")
    units: dict[int, list[int]] = {}
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        units.setdefault(index if group_index is None else group_index[index], []).append(index)
    batches: list[list[int]] = []
    # Units are in the order of their longest rows, so a micro-batch's first row is its longest.
    for unit in units.values():
        if batches and (len(batches[-1]) + len(unit)) * lengths[batches[-1][0]] <= max_tokens:
            batches[-1] += unit
        else:
            batches.append(unit)
    if by_powers and group_index is None:
        return [part for batch in batches for part in _powers_of_two(batch)]
    return batches


def _powers_of_two(indices: list[int]) -> Iterator[list[int]]:
    """Divide a micro-batch into parts whose numbers of rows are powers of two, largest first."""
    while indices:
        number = 1 << len(indices).bit_length() - 1
        yield indices[:number]
        indices = indices[number:]


def share_prompts(
    rows: Sequence[TrainingRow], *, max_tokens: int, whole: Sequence[int] | None = None
) -> tuple[list[int], list[int]]:
    """Gather the rows of each prompt into units, in which the prompt can be shared.

    A unit has at most half the tokens of a micro-batch, so that several units fit into one
    micro-batch. The rows of a unit share their prompt only if that saves at least MIN_SAVED of the
    tokens that the rows have without sharing.

    Args:
        rows: rows of one prompt have the same array object as `prompt_ids`.
        max_tokens: limit of a micro-batch's tokens.
        whole: group of each row, if groups must not be cut; None otherwise.

    Returns:
        Two numbers for each row: how many tokens it adds to a packed row, and the number of its
        unit. The tokens of a shared prompt count for the first row of the unit. Rows with the same
        unit share their prompt.
    """
    gathered: list[list[int]] = []
    sizes: list[int] = []  # tokens of each unit
    newest: dict[tuple[int, int], int] = {}  # by prompt, and by group if groups are not cut
    for index, row in enumerate(rows):
        key = id(row.prompt_ids), -1 if whole is None else whole[index]
        own = row.rollout.num_tokens - 1
        unit = newest.get(key)
        if unit is None or (whole is None and sizes[unit] + own > max_tokens // 2):
            unit = newest[key] = len(gathered)
            gathered.append([])
            sizes.append(len(row.prompt_ids))
        gathered[unit].append(index)
        sizes[unit] += own
    lengths, units = [row.num_inputs for row in rows], list(range(len(rows)))
    for members, size in zip(gathered, sizes, strict=True):
        if size <= (1.0 - MIN_SAVED) * sum(lengths[index] for index in members):
            first, *others = members
            for index in others:
                lengths[index] = rows[index].rollout.num_tokens - 1
                units[index] = first
    return lengths, units


@dataclass(slots=True)
class _Row:
    """The segments of a packed row under construction."""

    lengths: list[int] = field(default_factory=list)
    prefixes: list[tuple[int, int]] = field(default_factory=list)
    size: int = 0

    def add(self, length: int, prefix: tuple[int, int] = (0, 0)) -> int:
        """Append a segment, unless its length is 0; return the place where it starts in the row."""
        start = self.size
        if length:
            self.lengths.append(length)
            self.prefixes.append(prefix)
            self.size += length
        return start


def _lay_out(
    samples: Sequence[TrainingRow],
    *,
    is_packed: bool,
    units: Sequence[int],
    sizes: RowSizes,
    max_tokens: int,
) -> tuple[_Row, list[tuple[int, int]]]:
    """Return one row of all samples, and where each sample's prompt and completion start in it.

    If rows are not packed, each sample has a segment as long as the longest sample.
    """
    row, places = _Row(), []
    if not is_packed:
        longest = max(sample.num_inputs for sample in samples)
        width = sizes.width(longest, max_tokens=max_tokens)
        number = sizes.number(len(samples), width, max_tokens=max_tokens)
        starts = [row.add(width) for _ in range(number)][: len(samples)]
        places = [
            (start, start + len(sample.prompt_ids))
            for start, sample in zip(starts, samples, strict=True)
        ]
        return row, places
    for _, same in groupby(zip(units, samples, strict=True), key=lambda pair: pair[0]):
        members = [sample for _, sample in same]
        num_prompt = len(members[0].prompt_ids)
        if len(members) > 1:
            start = row.add(num_prompt)
            prefix = start, num_prompt
            places += [
                (start, row.add(member.rollout.num_tokens - 1, prefix)) for member in members
            ]
        else:
            start = row.add(members[0].num_inputs)
            places.append((start, start + num_prompt))
    return row, places


def _predictors(
    samples: Sequence[TrainingRow],
    places: Sequence[tuple[int, int]],
    is_token: npt.NDArray[np.bool_],
) -> npt.NDArray[np.int64]:
    """Return [B, T] places of the inputs that predict the completion tokens; 0 in padding.

    The prompt's last token predicts the first completion token, and each completion token the next.
    """
    columns = np.arange(is_token.shape[1])
    starts = np.array([start for _, start in places], np.int64)
    predictors: npt.NDArray[np.int64] = starts[:, None] + columns - 1
    predictors[:, 0] = [
        prompt + len(sample.prompt_ids) - 1
        for sample, (prompt, _) in zip(samples, places, strict=True)
    ]
    predictors[~is_token] = 0
    return predictors


def collate(
    samples: Sequence[TrainingRow],
    *,
    score_all: bool = False,
    is_packed: bool = False,
    units: Sequence[int] | None = None,
    row_sizes: RowSizes | None = None,
    max_tokens: int = 0,
) -> MicroBatch:
    """Return the samples as one micro-batch on the CPU.

    Args:
        samples: at least one sample; either all samples have proximal log-probabilities or no
            sample has.
        score_all: whether `completion_mask` covers every completion token, not only trained tokens.
        is_packed: whether to put all samples into one row.
        units: unit of each sample in a packed row; neighbours of the same unit share their prompt.
            None if no prompt is shared.
        row_sizes: sizes that rows are filled to; None to fill no row.
        max_tokens: limit of a micro-batch's tokens; filling by `row_sizes` does not exceed this
            limit.
    """
    units = range(len(samples)) if units is None else units
    row_sizes = row_sizes or RowSizes()
    row, places = _lay_out(
        samples, is_packed=is_packed, units=units, sizes=row_sizes, max_tokens=max_tokens
    )
    num_filled = 0
    if is_packed:
        num_filled = row_sizes.packed(row.size, max_tokens=max_tokens) - row.size
        for _ in range(num_filled):
            row.add(1)
    input_ids = _input_ids(samples, places, row.size)
    rollouts = [sample.rollout for sample in samples]
    sizes = np.array([rollout.num_tokens for rollout in rollouts])
    is_token = np.arange(sizes.max()) < sizes[:, None]
    padded = partial(_padded, is_token)
    mask = is_token
    if not score_all:
        mask = padded([rollout.completion_mask for rollout in rollouts], np.bool_)
    proximal = [
        sample.proximal_logprobs for sample in samples if sample.proximal_logprobs is not None
    ]
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids).view(-1, row.size if is_packed else row.lengths[0]),
        token_ids=torch.from_numpy(padded([each.token_ids for each in rollouts], np.int64)),
        predictors=torch.from_numpy(_predictors(samples, places, is_token)),
        sampler_logprobs=torch.from_numpy(
            padded([each.sampler_logprobs for each in rollouts], np.float32)
        ),
        completion_mask=torch.from_numpy(mask),
        scored=torch.from_numpy(np.flatnonzero(mask)),
        advantages=torch.tensor([sample.advantage for sample in samples], dtype=torch.float32),
        version_steps=torch.from_numpy(
            padded([each.policy_versions[:, 1] for each in rollouts], np.int64)
        ),
        group_index=torch.tensor([sample.group_index for sample in samples]),
        log_expectations=torch.tensor(
            [sample.log_expectation for sample in samples], dtype=torch.float32
        ),
        proximal_logprobs=torch.from_numpy(padded(proximal, np.float32)) if proximal else None,
        supports=id_sets(rollouts, mask),
        lacking=lacking_ids(rollouts, mask),
        likely=LikelyTokens.of(rollouts, mask),
        segments=Segments.of(row.lengths, row.prefixes) if is_packed else None,
        num_filled=num_filled,
    )


def _input_ids(
    samples: Sequence[TrainingRow], places: Sequence[tuple[int, int]], size: int
) -> npt.NDArray[np.int64]:
    """Return the [size] input ids of the row that `_lay_out` returned, with PAD_ID between samples.

    `places` has the start of each sample's prompt and completion.
    """
    input_ids = np.full(size, PAD_ID, dtype=np.int64)
    for sample, (prompt, start) in zip(samples, places, strict=True):
        input_ids[prompt : prompt + len(sample.prompt_ids)] = sample.prompt_ids
        tokens = sample.rollout.token_ids
        input_ids[start : start + len(tokens) - 1] = tokens[:-1]
    return input_ids


def _padded(
    is_token: npt.NDArray[np.bool_], values: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike
) -> npt.NDArray[Any]:
    """Return the values of each rollout as a row of a [B, T] array, with 0 in padding.

    `is_token` is False in padding.
    """
    rows = np.zeros(is_token.shape, dtype)
    rows[is_token] = np.concatenate(values)
    return rows
