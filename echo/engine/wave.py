"""The rows that a transformers engine advances together, token by token.

Shapes: B rows in the batch, U distinct prompts, L longest prompt, T most tokens of a completion.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from echo.core.errors import EngineError
from echo.core.rollout import PolicyVersion
from echo.engine.engine import Completion, FinishReason, Request, Sampling
from echo.engine.sampling import uniform_at

COMPACT_BELOW = 0.75
"""Share of rows still running at which the ended ones are cut out of the batch."""


class Wave:
    """The rows that run together: what was sampled for each, and which are still running.

    `rows` maps each row of the current batch to its request; compaction shortens it.
    """

    def __init__(self, requests: Sequence[Request], sampling: Sampling, window: int | None) -> None:
        self.sampling = sampling
        self._requests = requests
        num_rows = len(requests)
        contexts = [request.context_ids for request in requests]
        prompt_lengths = np.array([len(context) for context in contexts])
        prefix_lengths = np.array([len(request.prefix_ids) for request in requests])
        self._limits = sampling.max_completion_tokens - prefix_lengths
        if window is not None:
            self._limits = np.minimum(self._limits, window - prompt_lengths)
        self.max_tokens = int(self._limits.max())
        self.num_tokens = 0
        """Tokens sampled so far of each row that is running."""
        self._token_ids = np.zeros((num_rows, self.max_tokens), np.int32)
        self._logprobs = np.zeros((num_rows, self.max_tokens), np.float32)
        self._versions = np.zeros((num_rows, self.max_tokens, 2), np.int32)
        self._lengths = np.zeros(num_rows, np.int64)
        self._reasons: list[FinishReason] = ["abort"] * num_rows
        self._stop_ids = np.array(sampling.stop_ids, np.int64)
        self._rows = np.arange(num_rows)
        self._is_running = np.ones(num_rows, np.bool_)
        self._seeds = np.array([r.seed & 0xFFFFFFFFFFFFFFFF for r in requests], np.uint64)
        self.lengths = prompt_lengths
        """[B] prompt tokens of each row of the batch."""
        # Padding is on the left.
        self._prompts, self._mask, self._prompt_of_request = _distinct_prompts(contexts)
        self.prompt_length = self._prompts.shape[1]
        """L, padding included."""

    @property
    def is_done(self) -> bool:
        """Whether every row has ended."""
        return not self._is_running.any()

    @property
    def num_running(self) -> int:
        """Rows that have not ended."""
        return int(self._is_running.sum())

    @property
    def num_rows(self) -> int:
        """Rows of the batch, B."""
        return len(self._rows)

    def parts(self, max_rows: int) -> list[Wave]:
        """Return the rows that are running as smaller waves; what they sample is found here, too.

        Args:
            max_rows: of one of them.
        """
        running = np.flatnonzero(self._is_running)
        parts = []
        for start in range(0, len(running), max_rows):
            part = copy.copy(self)
            part.keep(running[start : start + max_rows])
            parts.append(part)
        return parts

    def keep(self, rows: npt.NDArray[np.int64]) -> None:
        """Drop all other rows from the batch."""
        self._rows, self._seeds, self.lengths = (
            self._rows[rows],
            self._seeds[rows],
            self.lengths[rows],
        )
        self._is_running = self._is_running[rows]

    def prompts(self) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return each distinct prompt of the batch once, and which one each row has.

        Returns:
            Ids [U, L], the mask [U, L] or None if nothing is padded, and [B] indices of prompts.
        """
        used, prompt_of_row = np.unique(self._prompt_of_request[self._rows], return_inverse=True)
        mask = None if self._mask is None else self._mask[used]
        return self._prompts[used], mask, torch.from_numpy(prompt_of_row)

    def final_mask(self) -> Tensor | None:
        """Return the mask as it is once every row is as long as it can get, [B, L + T]."""
        if self._mask is None:
            return None
        shown = self._mask[self._prompt_of_request[self._rows]]
        grown = torch.ones(len(shown), self.max_tokens, dtype=shown.dtype)
        return torch.cat([shown, grown], dim=1)

    def contexts(self) -> tuple[Tensor, Tensor | None]:
        """Return all that each row of the batch holds by now; K tokens were sampled for each.

        Returns:
            Ids [B, L + K] and the mask [B, L + K], or None if nothing is padded.
        """
        prompt = torch.from_numpy(self._prompt_of_request[self._rows])
        sampled = torch.from_numpy(self._token_ids[self._rows, : self.num_tokens].astype(np.int64))
        ids = torch.cat([self._prompts[prompt], sampled], dim=1)
        if self._mask is None:
            return ids, None
        return ids, torch.cat([self._mask[prompt], torch.ones_like(sampled)], dim=1)

    def uniforms(self, step: int) -> npt.NDArray[np.float64]:
        """Return the random number of each row of the batch for its token `step`."""
        return uniform_at(self._seeds, step)

    def append(
        self,
        step: int,
        token_ids: npt.NDArray[np.int64],
        logprobs: npt.NDArray[np.float32],
        version: PolicyVersion,
    ) -> list[int]:
        """Record token `step` of the rows that are running, and end those that end with it.

        Returns:
            Which requests have ended.
        """
        running = self._is_running
        rows = self._rows[running]
        if np.isnan(logprobs[running]).any():
            raise EngineError(
                f"the model produced NaN at token {step} of request "
                f"{self._requests[rows[np.isnan(logprobs[running])][0]].request_id}; the weights "
                "hold NaN or overflow in the engine's dtype"
            )
        self._token_ids[rows, step] = token_ids[running]
        self._logprobs[rows, step] = logprobs[running]
        self._versions[rows, step] = (version.lineage, version.step)
        self._lengths[rows] = self.num_tokens = step + 1
        is_stop = (token_ids[:, None] == self._stop_ids).any(1) & running
        is_full = (step + 1 >= self._limits[self._rows]) & running & ~is_stop
        for row in self._rows[is_stop]:
            self._reasons[row] = "stop"
        for row in self._rows[is_full]:
            self._reasons[row] = "length"
        self._is_running = running & ~is_stop & ~is_full
        return [int(row) for row in self._rows[is_stop | is_full]]

    def compact(self) -> npt.NDArray[np.int64] | None:
        """Drop ended rows from the batch if they are many; return the rows kept, or None."""
        if self._is_running.sum() > COMPACT_BELOW * len(self._rows):
            return None
        kept = np.flatnonzero(self._is_running)
        self.keep(kept)
        return kept

    def completions(self) -> list[Completion]:
        """Return what was sampled, in the order of the requests."""
        return [self.completion(row) for row in range(len(self._requests))]

    def completion(self, row: int) -> Completion:
        """Return what was sampled for one request so far."""
        num_tokens = self._lengths[row]
        return Completion(
            self._requests[row].request_id,
            self._token_ids[row, :num_tokens].copy(),
            self._logprobs[row, :num_tokens].copy(),
            self._reasons[row],
            self._versions[row, :num_tokens].copy(),
        )


def _distinct_prompts(
    contexts: Sequence[npt.NDArray[np.int32]],
) -> tuple[Tensor, Tensor | None, npt.NDArray[np.int64]]:
    numbers: dict[bytes, int] = {}
    prompts: list[npt.NDArray[np.int32]] = []
    prompt_of_row = np.empty(len(contexts), np.int64)
    for row, context in enumerate(contexts):
        key = context.tobytes()
        if key not in numbers:
            numbers[key] = len(prompts)
            prompts.append(context)
        prompt_of_row[row] = numbers[key]
    longest = max(map(len, prompts))
    ids = np.zeros((len(prompts), longest), np.int64)
    mask = np.zeros((len(prompts), longest), np.int64)
    for number, prompt in enumerate(prompts):
        ids[number, longest - len(prompt) :] = prompt
        mask[number, longest - len(prompt) :] = 1
    return torch.from_numpy(ids), None if mask.all() else torch.from_numpy(mask), prompt_of_row
