"""Micro-batches of rollouts, as padded rows or as one packed row.

A rollout's input is its prompt and its completion without the last token, because no token is
predicted from the last token.

A padded row has one rollout and padding on its right. Under causal attention no real token attends
to padding, so the row needs no attention mask, and positions count from 0.

A packed row has several rollouts one after the other. The model must keep the rollouts apart
(train/models/packing.py). If rollouts share their prompt, the row has the prompt once, before the
completions.

Both kinds of rows may be filled: tokens without a meaning are added, so that only a few different
sizes occur (row_sizes.py). A padded row gets more padding, and rows of padding may be added to make
the number of rows a power of two. A packed row gets tokens that attend only to themselves.

For both kinds of rows, a loss gets the same [B, T] tensors.

A rollout may have several chains, which branch from common tokens (core/chains.py). A packed row
has each piece of such a rollout once, and a piece attends to the earlier tokens of its chain. In
padded rows, and for models that cannot share tokens, each chain is a separate segment, and common
tokens are repeated. In both cases each completion token is predicted once, and a loss gets the
rollout as one row.

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
from echo.core.chains import Piece, Tree, num_tokens_of, predecessors
from echo.core.memory_sizes import MIN_SAVED
from echo.core.rollout import Rollout
from echo.kernels.contract import FurtherIds, Pairs
from echo.kernels.logprob import IdSets

PAD_ID = 0
"""Input id of padding. Any id is possible, since no scored token attends to padding."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingRow:
    """One rollout with its prompt and its advantage, as the trainer's input."""

    prompt_ids: npt.NDArray[np.int32]
    """[P] token ids of the prompt."""
    rollout: Rollout
    advantage: float
    group_index: int = 0
    """Index of the rollout's group in the batch."""
    log_expectation: float = 0.0
    """Log of the group expectation of the sampler's probability (`losses.group_log_expectation`); 0
    if the loss does not need the expectation.
    """
    proximal_logprobs: npt.NDArray[np.float32] | None = None
    """[T] log-probability of each completion token under the policy at the start of the step, nats;
    None if that policy is the present policy.
    """

    @property
    def tree(self) -> Tree | None:
        """The pieces of the rollout's completion; None for a single chain."""
        if not len(self.rollout.branches):
            return None
        return Tree.of(self.rollout, num_prompt=len(self.prompt_ids))

    @property
    def num_inputs(self) -> int:
        """Number of tokens that go through the model if chains share tokens.

        All P + T tokens count, except the last token of each chain.
        """
        tree = self.tree
        num_ends = 1 if tree is None else sum(not tree.is_continued(each) for each in tree.pieces)
        return len(self.prompt_ids) + self.rollout.num_tokens - num_ends

    @property
    def chain_inputs(self) -> list[int]:
        """Number of tokens of each chain that go through the model if chains share no tokens."""
        tree = self.tree
        if tree is None:
            return [self.num_inputs]
        return [num_tokens_of(chain) - 1 for chain in tree.chains]

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Return (number of inputs, number of earlier tokens in the chain) of each piece.

        The first piece includes the prompt.
        """
        tree = self.tree
        if tree is None:
            return [(self.num_inputs, 0)]
        num_prompt = len(self.prompt_ids)
        spans = [
            (_num_inputs(tree, each), num_tokens_of(tree.way_to(each))) for each in tree.pieces
        ]
        return [(num_prompt + spans[0][0], 0), *spans[1:]]

    @property
    def num_trained(self) -> int:
        """Number of completion tokens that are trained."""
        return int(np.count_nonzero(self.rollout.completion_mask))


def _num_inputs(tree: Tree, piece: Piece) -> int:
    """Return the number of tokens of a piece that go through the model.

    If no other piece follows, the last token is excluded, because it predicts no token.
    """
    return piece.end - piece.start - (not tree.is_continued(piece))


RowRuns = tuple[tuple[int, int], ...]
"""Runs of tokens in a packed row: (start, number of tokens) of each run."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segments:
    """Segments of a packed row of L tokens.

    A segment is one of these:

    * a rollout
    * a prompt that several rollouts share, or a completion after such a prompt
    * a piece of a rollout of several chains
    """

    lengths: tuple[int, ...]
    """Number of tokens of each segment, on the host."""
    prefixes: tuple[RowRuns, ...]
    """For each segment, the earlier runs of tokens in the row that the segment continues: a shared
    prompt, and earlier pieces.
    """
    ends: Tensor
    """[n + 1] int32: start of each of the n segments in the row, then L."""
    position_ids: Tensor
    """[1, L] int64: position of each token in its chain."""
    keys: Tensor | None
    """[K] int64: for each segment in order, the places in the row that the segment attends to.
    These are the segment's earlier runs and its own tokens. None if no segment continues earlier
    tokens.
    """
    key_ends: Tensor
    """[n + 1] int32: start of each segment's places in `keys`, then K."""

    @staticmethod
    def of(lengths: Sequence[int], prefixes: Sequence[RowRuns] | None = None) -> Segments:
        """Return the segments of these lengths, with their tensors on the CPU.

        Args:
            lengths: number of tokens of each segment, > 0.
            prefixes: for each segment, the runs of earlier tokens that it continues; None if no
                segment continues earlier tokens.
        """
        sizes = np.cumsum([0, *lengths])
        if prefixes is None or not any(prefixes):
            prefixes, keys = ((),) * len(lengths), None
        else:
            parts = [
                np.arange(start, start + size)
                for runs, own in zip(prefixes, zip(sizes, lengths, strict=False), strict=True)
                for start, size in (*runs, own)
            ]
            keys = torch.from_numpy(np.concatenate(parts))
        before = np.array([sum(size for _, size in runs) for runs in prefixes])
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
    """The sampler's most likely ids at all scored tokens. There are M ids in all."""

    ids: FurtherIds
    """The M ids. `ids.rows` has the index 0..N-1 of each id's scored token."""
    places: Tensor
    """[M] int64: place of each id's scored token in the flattened [B, T]."""
    sampler_logprobs: Tensor
    """[M] float32: log-probability of each id under the sampler, nats."""

    @staticmethod
    def of(rollouts: Sequence[Rollout], is_scored: npt.NDArray[np.bool_]) -> LikelyTokens | None:
        """Return the likely ids of the scored tokens; None if no rollout has likely ids.

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
    """[B, L] int64, padded on the right, or [1, L] if packed. Rows of padding may follow the padded
    rows.
    """
    token_ids: Tensor
    """[B, T] int64: ids of the completion tokens."""
    predictors: Tensor
    """[B, T] int64: place in the flattened input that predicts each completion token."""
    sampler_logprobs: Tensor
    """[B, T] float32: log-probability of each completion token under the sampler, nats."""
    completion_mask: Tensor
    """[B, T] bool: whether each token is trained (or scored, see `score_all` of `collate`); False
    in padding.
    """
    scored: Tensor
    """[N] int64: places in the flattened [B, T] where `completion_mask` is True, computed on the
    host.
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
    proximal policy is the present policy.
    """
    supports: IdSets | None = None
    """The supports of scored tokens. A support is the set of ids that a token was drawn from, if it
    was not the whole vocabulary. None if no token has a support.
    """
    lacking: Pairs | None = None
    """The ids that the sampler excluded, if they are few. Each pair has the index 0..N-1 of a
    scored token, and an id that was excluded for it. None if no id was excluded.
    """
    likely: LikelyTokens | None = None
    """The sampler's most likely ids at each scored token; None if workers send no likely ids."""
    segments: Segments | None = None
    """Segments of a packed row; None for padded rows."""
    num_filled: int = 0
    """Number of tokens that fill the end of a packed row. Each of these tokens is a separate
    segment.
    """

    def spans(self, rows: Sequence[TrainingRow]) -> list[tuple[int, int]]:
        """Return (number of tokens, number of earlier tokens) of each chain or segment.

        Padded rows have chains, and packed rows have segments.

        Args:
            rows: the rows of the micro-batch. If `rows` is empty, the result is empty.
        """
        if not rows or self.segments is None:
            return [(length, 0) for row in rows for length in row.chain_inputs]
        sizes = (sum(size for _, size in runs) for runs in self.segments.prefixes)
        spans = list(zip(self.segments.lengths, sizes, strict=True))
        return spans[: len(spans) - self.num_filled]

    def pick(self, values: Tensor) -> Tensor:
        """Return the values [N] at the scored tokens, from `values` [B, T]."""
        return values.flatten().index_select(0, self.scored)

    def spread(self, values: Tensor) -> Tensor:
        """Return the [N] values at the places of the scored tokens, [B, T]; 0 elsewhere."""
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
    """Copy a CPU tensor to `device`, without waiting for a GPU."""
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
    """Return pairs of a scored token and an id that the sampler excluded for this token.

    None if no rollout has recorded excluded ids.

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
        rollouts: the rollouts. The support of a token is the set of ids that it was drawn from.
        is_scored: [B, T] whether a token is scored.

    Raises:
        ValueError: if a scored token is outside its support.
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
    counts: Sequence[int] | None = None,
    group_index: Sequence[int] | None = None,
    by_powers: bool = False,
) -> list[list[int]]:
    """Divide rows into micro-batches of up to `max_tokens` tokens, including padding.

    Rows of similar length are put together, for little padding. The longest rows come first, so
    that a lack of memory shows at once. Rows are never cut, and a row longer than `max_tokens` gets
    its own micro-batch. With `group_index`, groups are never cut.

    Args:
        lengths: number of tokens of each row, including the row's own padding, >= 1.
        max_tokens: largest product of a micro-batch's number of rows and its longest row.
        counts: for each row, its number of padded rows (one for each chain); None for one padded
            row each.
        group_index: group of each row, to keep groups whole; None for no groups.
        by_powers: whether the number of rows of each micro-batch is a power of two; ignored with
            `group_index`.

    Returns:
        The row indices of each micro-batch. Each index occurs exactly once.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens = {max_tokens}: must be at least 1")
    units: dict[int, list[int]] = {}
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        units.setdefault(index if group_index is None else group_index[index], []).append(index)
    batches: list[list[int]] = []
    num_rows = 0  # of the newest micro-batch
    # Units are in the order of their longest rows, so a micro-batch's first row is its longest.
    for unit in units.values():
        more = len(unit) if counts is None else sum(counts[index] for index in unit)
        if batches and (num_rows + more) * lengths[batches[-1][0]] <= max_tokens:
            batches[-1] += unit
            num_rows += more
        else:
            batches.append(unit)
            num_rows = more
    if by_powers and group_index is None:
        return [part for batch in batches for part in _powers_of_two(batch)]
    return batches


def _powers_of_two(indices: list[int]) -> Iterator[list[int]]:
    while indices:
        number = 1 << len(indices).bit_length() - 1
        yield indices[:number]
        indices = indices[number:]


def share_prompts(
    rows: Sequence[TrainingRow], *, max_tokens: int, whole: Sequence[int] | None = None
) -> tuple[list[int], list[int]]:
    """Divide rows into units. The rows of a unit share a prompt.

    A unit has at most half the tokens of a micro-batch, so that several units fit into a
    micro-batch. Rows share a prompt only if this saves enough of their tokens (MIN_SAVED).

    Args:
        rows: the rows. Rows with the same prompt must have the same array object as `prompt_ids`.
        max_tokens: limit of a micro-batch's tokens.
        whole: group of each row, to keep groups whole; None for no groups.

    Returns:
        For each row, the number of tokens that the row adds to a packed row, and the number of its
        unit. The tokens of a shared prompt count for the first row of a unit.
    """
    gathered: list[list[int]] = []
    sizes: list[int] = []  # tokens of each unit
    newest: dict[tuple[int, int], int] = {}  # by prompt, and by group if groups are not cut
    for index, row in enumerate(rows):
        key = id(row.prompt_ids), -1 if whole is None else whole[index]
        own = row.num_inputs - len(row.prompt_ids)
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
                lengths[index] = rows[index].num_inputs - len(rows[index].prompt_ids)
                units[index] = first
    return lengths, units


Places = npt.NDArray[np.int64]
"""[P + T]: place in the row of each token of a sample, prompt and completion; -1 for a token that
does not go through the model.
"""


@dataclass(slots=True)
class _Row:
    """The segments and input ids of a micro-batch under construction.

    The micro-batch is one packed row, or it is padded rows, each of which is one segment here.
    """

    lengths: list[int] = field(default_factory=list)
    prefixes: list[RowRuns] = field(default_factory=list)
    ids: list[tuple[int, npt.NDArray[np.int32]]] = field(default_factory=list)
    """(place in the row of the first id, input ids) of each run."""
    size: int = 0

    def add(self, length: int, prefix: RowRuns = ()) -> int:
        """Append a segment if its length is above 0; return its start in the row."""
        start = self.size
        if length:
            self.lengths.append(length)
            self.prefixes.append(prefix)
            self.size += length
        return start

    def put(self, start: int, *ids: npt.NDArray[np.int32]) -> None:
        """Put input ids into the row from `start` on."""
        for part in ids:
            self.ids.append((start, part))
            start += len(part)

    def input_ids(self) -> npt.NDArray[np.int64]:
        """Return the ids of the row, with PAD_ID in empty places."""
        input_ids = np.full(self.size, PAD_ID, dtype=np.int64)
        for start, ids in self.ids:
            input_ids[start : start + len(ids)] = ids
        return input_ids


@dataclass(slots=True)
class _Layout:
    """A `_Row`, with the place of each sample in the row."""

    row: _Row = field(default_factory=_Row)
    starts: list[tuple[int, int]] = field(default_factory=list)
    """For each sample of one chain, the start of its prompt and the start of its completion in the
    row. Entries of samples with several chains are not used.
    """
    trees: dict[int, Places] = field(default_factory=dict)
    """Index of a sample with several chains -> places of the sample's tokens."""

    def add(self, sample: TrainingRow, prompt: int | None = None, width: int = 0) -> None:
        """Append a sample that has one chain.

        Args:
            sample: the sample.
            prompt: start of the shared prompt in the row; None to append the sample's own prompt.
            width: number of tokens to which to fill the segment on the right; 0 for no filling.
        """
        ids, num_prompt = sample.rollout.token_ids[:-1], len(sample.prompt_ids)
        if prompt is None:
            prompt = self.row.add(width or sample.num_inputs)
            self.row.put(prompt, sample.prompt_ids, ids)
            self.starts.append((prompt, prompt + num_prompt))
        else:
            start = self.row.add(len(ids), ((prompt, num_prompt),))
            self.row.put(start, ids)
            self.starts.append((prompt, start))

    def add_pieces(self, sample: TrainingRow, tree: Tree, prompt: int | None = None) -> None:
        """Append each piece of a sample that has several chains as a segment.

        `prompt` is the start of the shared prompt in the row. If `prompt` is None, the sample's own
        prompt is appended with the first piece.
        """
        ids, num_prompt = _all_ids(sample), tree.num_prompt
        places: Places = np.full(len(ids), -1, np.int64)
        if prompt is not None:
            places[:num_prompt] = np.arange(prompt, prompt + num_prompt)
        for number, piece in enumerate(tree.pieces):
            has_prompt = number == 0 and prompt is None
            first = 0 if has_prompt else num_prompt + piece.start
            end = num_prompt + piece.start + _num_inputs(tree, piece)
            way = [] if has_prompt else tree.way_to(piece)
            runs = [(int(places[num_prompt + a]), b - a) for a, b in way]
            start = self.row.add(end - first, _joined(runs))
            self.row.put(start, ids[first:end])
            places[first:end] = np.arange(start, start + end - first)
        self._add_tree(places)

    def add_chains(self, sample: TrainingRow, tree: Tree, width: int = 0) -> None:
        """Append each chain of a sample as a segment. Each segment is filled to `width` tokens."""
        ids, num_prompt = _all_ids(sample), tree.num_prompt
        places: Places = np.full(len(ids), -1, np.int64)
        for chain in tree.chains:
            own = np.concatenate([np.arange(a, b) for a, b in chain])[:-1] + num_prompt
            start = self.row.add(width or len(own))
            self.row.put(start, ids[own])
            places[own] = np.arange(start, start + len(own))
        self._add_tree(places)

    def fill(self, row_sizes: RowSizes, max_tokens: int) -> int:
        """Fill a packed row up to a size from `row_sizes`; return the number of tokens added."""
        num_filled = row_sizes.packed(self.row.size, max_tokens=max_tokens) - self.row.size
        for _ in range(num_filled):
            self.row.add(1)
        return num_filled

    def _add_tree(self, places: Places) -> None:
        self.trees[len(self.starts)] = places
        self.starts.append((0, 0))


def _all_ids(sample: TrainingRow) -> npt.NDArray[np.int32]:
    return np.concatenate([sample.prompt_ids, sample.rollout.token_ids])


def _joined(runs: Sequence[tuple[int, int]]) -> RowRuns:
    """Join runs that are adjacent in the row."""
    joined: list[tuple[int, int]] = []
    for start, size in runs:
        if joined and sum(joined[-1]) == start:
            joined[-1] = joined[-1][0], joined[-1][1] + size
        else:
            joined.append((start, size))
    return tuple(joined)


def _apart(samples: Sequence[TrainingRow], width: int = 0) -> _Layout:
    """Return the samples with each chain as a separate segment.

    Each segment is filled to `width` tokens; 0 for no filling.
    """
    layout = _Layout()
    for sample in samples:
        tree = sample.tree
        if tree is None:
            layout.add(sample, width=width)
        else:
            layout.add_chains(sample, tree, width)
    return layout


def _padded_rows(samples: Sequence[TrainingRow], sizes: RowSizes, max_tokens: int) -> _Layout:
    lengths = [length for sample in samples for length in sample.chain_inputs]
    width = sizes.width(max(lengths), max_tokens=max_tokens)
    layout = _apart(samples, width)
    for _ in range(sizes.number(len(lengths), width, max_tokens=max_tokens) - len(lengths)):
        layout.row.add(width)
    return layout


def _together(samples: Sequence[TrainingRow], units: Sequence[int]) -> _Layout:
    """Return one row that has the prompt of each unit once.

    Common tokens of a sample's chains also occur once.
    """
    layout = _Layout()
    for _, same in groupby(zip(units, samples, strict=True), key=lambda pair: pair[0]):
        members = [sample for _, sample in same]
        prompt = None
        if len(members) > 1:
            shared = members[0].prompt_ids
            prompt = layout.row.add(len(shared))
            layout.row.put(prompt, shared)
        for sample in members:
            tree = sample.tree
            if tree is None:
                layout.add(sample, prompt)
            else:
                layout.add_pieces(sample, tree, prompt)
    return layout


def _predictors(
    samples: Sequence[TrainingRow], layout: _Layout, is_token: npt.NDArray[np.bool_]
) -> npt.NDArray[np.int64]:
    """Return the place of the input that predicts each completion token, [B, T].

    The input is the previous token of the chain; for the first completion token, the last token of
    the prompt. The place is 0 in padding, and -1 for a token that no input predicts.
    """
    columns = np.arange(is_token.shape[1])
    starts = np.array([start for _, start in layout.starts], np.int64)
    predictors: npt.NDArray[np.int64] = starts[:, None] + columns - 1
    predictors[:, 0] = [
        prompt + len(sample.prompt_ids) - 1
        for sample, (prompt, _) in zip(samples, layout.starts, strict=True)
    ]
    predictors[~is_token] = 0
    for index, places in layout.trees.items():
        rollout, num_prompt = samples[index].rollout, len(samples[index].prompt_ids)
        before = predecessors(rollout.branches, num_tokens=rollout.num_tokens) + num_prompt
        found = np.where(before < 0, -1, places[before])
        predictors[index, : rollout.num_tokens] = found
    return predictors


def collate(
    samples: Sequence[TrainingRow],
    *,
    score_all: bool = False,
    is_packed: bool = False,
    shares_tokens: bool = True,
    units: Sequence[int] | None = None,
    row_sizes: RowSizes | None = None,
    max_tokens: int = 0,
) -> MicroBatch:
    """Return the samples as one micro-batch on the CPU.

    Args:
        samples: one or more samples. Either all or no samples have proximal log-probabilities.
        score_all: whether `completion_mask` includes all completion tokens, or only trained tokens.
        is_packed: whether to put all samples into one row.
        shares_tokens: whether chains share tokens in a packed row, or are separate segments.
        units: unit of each sample in a packed row; neighbours of the same unit share their prompt.
            None to share no prompt.
        row_sizes: chooses the sizes to which rows are filled; None to fill no row.
        max_tokens: limit of a micro-batch's tokens, including filling.
    """
    units = range(len(samples)) if units is None else units
    row_sizes, num_filled = row_sizes or RowSizes(), 0
    if is_packed:
        layout = _together(samples, units) if shares_tokens else _apart(samples)
        num_filled = layout.fill(row_sizes, max_tokens)
    else:
        layout = _padded_rows(samples, row_sizes, max_tokens)
    row = layout.row
    rollouts = [sample.rollout for sample in samples]
    sizes = np.array([rollout.num_tokens for rollout in rollouts])
    is_token = np.arange(sizes.max()) < sizes[:, None]
    padded = partial(_padded, is_token)
    predictors = _predictors(samples, layout, is_token)
    mask = is_token & (predictors >= 0)
    if not score_all:
        mask[is_token] = np.concatenate([rollout.completion_mask for rollout in rollouts])
    proximal = [
        sample.proximal_logprobs for sample in samples if sample.proximal_logprobs is not None
    ]
    return MicroBatch(
        input_ids=torch.from_numpy(row.input_ids()).view(1 if is_packed else len(row.lengths), -1),
        token_ids=padded([each.token_ids for each in rollouts], np.int64),
        predictors=torch.from_numpy(predictors.clip(0)),
        sampler_logprobs=padded([each.sampler_logprobs for each in rollouts], np.float32),
        completion_mask=torch.from_numpy(mask),
        scored=torch.from_numpy(np.flatnonzero(mask)),
        advantages=torch.tensor([sample.advantage for sample in samples], dtype=torch.float32),
        version_steps=padded([each.policy_versions[:, 1] for each in rollouts], np.int64),
        group_index=torch.tensor([sample.group_index for sample in samples]),
        log_expectations=torch.tensor(
            [sample.log_expectation for sample in samples], dtype=torch.float32
        ),
        proximal_logprobs=padded(proximal, np.float32) if proximal else None,
        supports=id_sets(rollouts, mask),
        lacking=lacking_ids(rollouts, mask),
        likely=LikelyTokens.of(rollouts, mask),
        segments=Segments.of(row.lengths, row.prefixes) if is_packed else None,
        num_filled=num_filled,
    )


def _padded(
    is_token: npt.NDArray[np.bool_], values: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike
) -> Tensor:
    """Return the values of each rollout as one row of a [B, T] tensor; 0 in padding.

    `is_token` is False in padding.
    """
    rows = np.zeros(is_token.shape, dtype)
    rows[is_token] = np.concatenate(values)
    return torch.from_numpy(rows)
