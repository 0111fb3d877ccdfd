"""Micro-batches of rollouts under a budget of tokens, as padded rows or as one packed row.

A rollout's input is its prompt and its completion without the last token, which predicts nothing
that is scored. Padded rows have one rollout each, padded on the right: under causal attention no
real token sees the padding, so no attention mask is needed and the positions are the plain ones. A
packed row has all of them in a line, and the model must keep them apart (train/packing.py). Only
the model's input differs; what a loss sees is the same [B, T].

Shapes: B rollouts of a micro-batch, P prompt tokens, T completion tokens, L input tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from echo.core.rollout import Rollout

PAD_ID = 0
"""Input id of padding: any id of the vocabulary serves, since nothing that is scored sees it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrainingRow:
    """One rollout with its prompt and its advantage, ready to be trained on."""

    prompt_ids: npt.NDArray[np.int32]
    """[P]"""
    rollout: Rollout
    advantage: float
    group_index: int = 0
    """Which group of its batch it belongs to."""
    log_expectation: float = 0.0
    """Log of the group expectation of the sampler's probability, where a loss needs it."""
    proximal_logprobs: npt.NDArray[np.float32] | None = None
    """[T] nats under the policy at the start of the step, where that is not the present one."""

    @property
    def num_inputs(self) -> int:
        """Tokens that go through the model: P + T - 1."""
        return len(self.prompt_ids) + self.rollout.num_tokens - 1

    @property
    def num_trained(self) -> int:
        """Completion tokens that the mask lets through."""
        return int(self.rollout.completion_mask.sum())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segments:
    """The rollouts of a packed row; L tokens in all."""

    lengths: tuple[int, ...]
    """Tokens of each, here on the host, where to look at them costs no wait for a GPU."""
    ends: Tensor
    """[B + 1] int32, where each begins, and L."""
    position_ids: Tensor
    """[1, L] int64, from 0 in each."""

    @staticmethod
    def of(lengths: Sequence[int]) -> Segments:
        """Return segments of these lengths, on the CPU."""
        sizes = torch.tensor([0, *lengths], dtype=torch.int32)
        return Segments(
            lengths=tuple(lengths),
            ends=sizes.cumsum(0, dtype=torch.int32),
            position_ids=torch.cat([torch.arange(length) for length in lengths])[None],
        )

    def to(self, device: torch.device) -> Segments:
        """Return the same on `device`."""
        return Segments(
            lengths=self.lengths,
            ends=self.ends.to(device),
            position_ids=self.position_ids.to(device),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """Rollouts that go through the model together."""

    input_ids: Tensor
    """[B, L] int64, padded on the right; [1, L] where it is packed."""
    token_ids: Tensor
    """[B, T] int64 completion tokens."""
    predictors: Tensor
    """[B, T] int64, position in the flattened input whose output predicts the token."""
    sampler_logprobs: Tensor
    """[B, T] float32 nats."""
    completion_mask: Tensor
    """[B, T] bool, False in padding."""
    advantages: Tensor
    """[B] float32."""
    version_steps: Tensor
    """[B, T] int64, step of the policy version that sampled the token; 0 in padding."""
    group_index: Tensor
    """[B] int64, equal within a group."""
    log_expectations: Tensor
    """[B] float32."""
    proximal_logprobs: Tensor | None = None
    """[B, T] float32 nats; None where the present policy's are meant."""
    segments: Segments | None = None
    """Of a packed row; None where rows are padded."""

    def to(self, device: torch.device) -> MicroBatch:
        """Return the same on `device`."""
        tensors: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name, value in tensors.items():
            tensors[name] = None if value is None else value.to(device)
        return MicroBatch(**tensors)


def pack_micro_batches(
    lengths: Sequence[int], *, max_tokens: int, group_index: Sequence[int] | None = None
) -> list[list[int]]:
    """Divide rows into micro-batches of at most `max_tokens` tokens, padding counted.

    Rows of similar length go together, longest first, so little is padded and a lack of memory
    shows in the first micro-batch. A row longer than the budget gets a micro-batch of its own: it
    cannot be cut. Neither can a group, where rows of one group are asked to stay together.

    Args:
        lengths: tokens of each row, >= 1.
        max_tokens: bound on rows times longest row of a micro-batch, inclusive.
        group_index: group of each row, to keep groups whole; None lets rows go anywhere.

    Returns:
        Indices of `lengths`, each exactly once. The same for the same arguments.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens = {max_tokens}: must be at least 1")
    units: dict[int, list[int]] = {}
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        units.setdefault(index if group_index is None else group_index[index], []).append(index)
    batches: list[list[int]] = []
    # In the order of their longest rows, so the first row of a micro-batch is its longest too.
    for unit in units.values():
        if batches and (len(batches[-1]) + len(unit)) * lengths[batches[-1][0]] <= max_tokens:
            batches[-1] += unit
        else:
            batches.append(unit)
    return batches


def collate(
    samples: Sequence[TrainingRow], *, score_all: bool = False, is_packed: bool = False
) -> MicroBatch:
    """Return the samples as one micro-batch on the CPU.

    Args:
        samples: at least one; all or none have proximal log-probabilities.
        score_all: let the mask through for every completion token, not the trained ones only.
        is_packed: in one row, in place of padded ones.
    """
    num_rows = len(samples)
    lengths = [sample.num_inputs for sample in samples]
    width = max(lengths)
    starts = np.cumsum([0, *lengths]) if is_packed else np.arange(num_rows + 1) * width
    num_tokens = max(sample.rollout.num_tokens for sample in samples)
    input_ids = np.full(starts[-1], PAD_ID, dtype=np.int64)
    token_ids = np.full((num_rows, num_tokens), PAD_ID, dtype=np.int64)
    predictors = np.zeros((num_rows, num_tokens), dtype=np.int64)
    logprobs = np.zeros((num_rows, num_tokens), dtype=np.float32)
    version_steps = np.zeros((num_rows, num_tokens), dtype=np.int64)
    mask = np.zeros((num_rows, num_tokens), dtype=np.bool_)
    has_proximal = samples[0].proximal_logprobs is not None
    proximal = np.zeros((num_rows, num_tokens), dtype=np.float32) if has_proximal else None
    for row, sample in enumerate(samples):
        rollout = sample.rollout
        num_prompt, num_completion = len(sample.prompt_ids), rollout.num_tokens
        start = starts[row]
        input_ids[start : start + num_prompt] = sample.prompt_ids
        input_ids[start + num_prompt : start + lengths[row]] = rollout.token_ids[:-1]
        token_ids[row, :num_completion] = rollout.token_ids
        first = start + num_prompt - 1
        predictors[row, :num_completion] = np.arange(first, first + num_completion)
        logprobs[row, :num_completion] = rollout.sampler_logprobs
        version_steps[row, :num_completion] = rollout.policy_versions[:, 1]
        mask[row, :num_completion] = True if score_all else rollout.completion_mask
        if proximal is not None:
            proximal[row, :num_completion] = sample.proximal_logprobs
    return MicroBatch(
        input_ids=torch.from_numpy(input_ids).view(1 if is_packed else num_rows, -1),
        token_ids=torch.from_numpy(token_ids),
        predictors=torch.from_numpy(predictors),
        sampler_logprobs=torch.from_numpy(logprobs),
        completion_mask=torch.from_numpy(mask),
        advantages=torch.tensor([sample.advantage for sample in samples], dtype=torch.float32),
        version_steps=torch.from_numpy(version_steps),
        group_index=torch.tensor([sample.group_index for sample in samples]),
        log_expectations=torch.tensor(
            [sample.log_expectation for sample in samples], dtype=torch.float32
        ),
        proximal_logprobs=None if proximal is None else torch.from_numpy(proximal),
        segments=Segments.of(lengths) if is_packed else None,
    )
