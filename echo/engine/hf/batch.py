"""A batch of rows that the transformers engine samples together, token by token.

Shapes: B rows in the batch, U distinct prompts, L longest prompt, T most tokens of a completion.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from echo.core.rollout import PolicyVersion
from echo.core.token_sets import MAX_SET_IDS, NOT_RECORDED, TOO_LARGE, TokenSets
from echo.engine.engine import Completion, FinishReason, Request, Sampling

# --- sampling -------------------------------------------------------------------------------------
#
# Shapes: B rows, V vocabulary.
#
# Each draw inverts the cumulative distribution at one uniform number, which depends only on the
# row's seed and the token's position. So a request's tokens do not depend on the other rows of its
# batch. A vocabulary of 150,000 takes no more random numbers than a vocabulary of 32. Rounding is
# the exception. A matrix product may round differently in a batch of another size. This moves
# probabilities by some 1e-7, and so changes a token about once in a million.


_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def uniform_at(seeds: npt.NDArray[np.uint64], step: int) -> npt.NDArray[np.float64]:
    """For each seed, return the number at `step` of the seed's random stream, uniform in [0, 1).

    The generator is a counter-based SplitMix64 (Steele, Lea and Flood, 2014). The seeds are hashed
    first. Otherwise neighbouring seeds would give the same stream, shifted by one step.

    Args:
        seeds: [B] seed of each stream.
        step: position in the streams, at least 0.

    Returns:
        [B] numbers, multiples of 2**-52.
    """
    offset = np.uint64((step + 1) * int(_GOLDEN) & 0xFFFFFFFFFFFFFFFF)
    bits = _mix(_mix(seeds + _GOLDEN) + offset)
    return (bits >> np.uint64(12)).astype(np.float64) * 2.0**-52


def bar_stops(
    logits: Tensor, sampling: Sampling, is_barred: npt.NDArray[np.bool_] | None
) -> Tensor:
    """Return [B, V] logits in which the stop ids of barred rows are minus infinity.

    If no row is barred, `is_barred` is None.
    """
    if is_barred is None:
        return logits
    rows = torch.from_numpy(np.flatnonzero(is_barred)).to(logits.device)
    stops = torch.tensor(sampling.stop_ids, device=logits.device)
    known = stops[stops < logits.shape[-1]]
    return logits.index_put((rows[:, None], known[None]), logits.new_tensor(-torch.inf))


def sampling_logprobs(logits: Tensor, sampling: Sampling) -> Tensor:
    """Return the log-probabilities of the distribution that `sampling` draws from.

    Temperature is applied first, then min_p, top_k and top_p, as in vLLM. The result is
    renormalised. Greedy sampling uses the plain softmax. top_k also keeps tokens that are as likely
    as the k-th token.

    Args:
        logits: [B, V] float32.
        sampling: how tokens are drawn.

    Returns:
        [B, V] float32, -inf where a token cannot be drawn.
    """
    if sampling.greedy:
        return logits.log_softmax(-1)
    if sampling.temperature != 1:
        logits = logits / sampling.temperature
    if sampling.min_p > 0:
        probabilities = logits.softmax(-1)
        least = probabilities.amax(-1, keepdim=True) * sampling.min_p
        logits = logits.masked_fill(probabilities < least, -torch.inf)
    if 0 < sampling.top_k < logits.shape[-1]:
        least = logits.topk(sampling.top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.sort(dim=-1, descending=True)
        probabilities = ordered.softmax(-1)
        before = probabilities.cumsum(-1) - probabilities
        beyond = before >= sampling.top_p
        beyond[:, 0] = False  # the most likely token always stays, even if rounding would drop it
        logits = logits.masked_fill(beyond.scatter(-1, order, beyond), -torch.inf)
    return logits.log_softmax(-1)


def draw_tokens(
    logits: Tensor, sampling: Sampling, uniforms: npt.NDArray[np.float64]
) -> tuple[Tensor, Tensor, TokenSets | None]:
    """Draw one token for each row.

    Args:
        logits: [B, V] in any floating-point dtype.
        sampling: how tokens are drawn.
        uniforms: [B] in [0, 1); not used when greedy.

    Returns:
        Token ids [B] int64, their log-probabilities [B] float32, and the supports. The supports are
        None if `sampling` does not truncate.
    """
    logprobs = sampling_logprobs(logits.float(), sampling)
    if sampling.greedy:
        token_ids = logprobs.argmax(-1, keepdim=True)
    else:
        # In float64: a float32 sum over a large vocabulary would lose small probabilities.
        cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
        target = torch.from_numpy(uniforms).to(logits.device)[:, None] * cumulative[:, -1:]
        # "right" skips tokens of probability 0: their sum equals the sum of the token before.
        token_ids = torch.searchsorted(cumulative, target, right=True)
        token_ids.clamp_(max=logits.shape[-1] - 1)  # needed only for NaN: such a row ends
    supports = _supports(logprobs) if sampling.truncates else None
    return token_ids[:, 0], logprobs.gather(-1, token_ids)[:, 0], supports


def _supports(logprobs: Tensor) -> TokenSets:
    """Return the ids that can be drawn in each row of [B, V] log-probabilities."""
    can_be_drawn = logprobs.isfinite()
    sizes = can_be_drawn.sum(-1)
    is_recorded = (sizes <= MAX_SET_IDS) & (sizes < logprobs.shape[-1])
    ids = (can_be_drawn & is_recorded[:, None]).nonzero()[:, 1]
    sizes = torch.where(sizes > MAX_SET_IDS, TOO_LARGE, sizes)
    sizes = torch.where(sizes == logprobs.shape[-1], NOT_RECORDED, sizes)
    return TokenSets(
        sizes=sizes.to(torch.int32).cpu().numpy(), ids=ids.to(torch.int32).cpu().numpy()
    )


def most_likely(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Return the k most likely ids of each row, where k is `sampling.likely_ids`.

    Args:
        logits: [B, V] in any floating-point dtype.
        sampling: the distribution, as for `draw_tokens`.

    Returns:
        [B, k] int64 ids, ascending in each row, and [B, k] float32 log-probabilities. An id that
        cannot be drawn has minus infinity.
    """
    logprobs = sampling_logprobs(logits.float(), sampling)
    ids = logprobs.topk(min(sampling.likely_ids, logprobs.shape[-1]), dim=-1, sorted=False).indices
    ids = ids.sort(-1).values
    return ids, logprobs.gather(-1, ids)


def _mix(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


COMPACT_BELOW = 0.75
"""`compact` drops the ended rows when at most this share of the rows still runs."""


class StaticBatch:
    """The rows that are sampled together, with their tokens and states.

    `rows` maps each row of the current batch to its request. `compact` shortens `rows`.
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
        """Number of tokens sampled so far for each running row; all running rows have the same
        number.
        """
        self._token_ids = np.zeros((num_rows, self.max_tokens), np.int32)
        self._logprobs = np.zeros((num_rows, self.max_tokens), np.float32)
        self._versions = np.zeros((num_rows, self.max_tokens, 2), np.int32)
        self._supports: list[list[tuple[int, npt.NDArray[np.int32]]]] = [
            [] for _ in range(num_rows)
        ]
        """For each request, the size and the ids of each token's support; empty if the sampling
        does not truncate.
        """
        k = sampling.likely_ids
        self._likely_ids = np.zeros((num_rows, self.max_tokens, k), np.int32)
        self._likely_logprobs = np.zeros((num_rows, self.max_tokens, k), np.float32)
        """Log-probabilities of `_likely_ids`: minus infinity for an id that could not be drawn.
        Zeros take no memory until they are written.
        """
        self._lengths = np.zeros(num_rows, np.int64)
        self._reasons: list[FinishReason] = ["abort"] * num_rows
        self._stop_ids = np.array(sampling.stop_ids, np.int64)
        self._turns = [request.turn_ids for request in requests]
        """For each request, the tokens of its present turn that earlier calls have sampled."""
        self._num_barred = np.array([sampling.num_barred(len(turn)) for turn in self._turns])
        self._rows = np.arange(num_rows)
        self._is_running = np.ones(num_rows, np.bool_)
        self._seeds = np.array([r.seed & 0xFFFFFFFFFFFFFFFF for r in requests], np.uint64)
        self.lengths = prompt_lengths
        """[B] number of context tokens of each row, before the first token sampled here."""
        # Padding is on the left.
        self._prompts, self._mask, self._prompt_of_request = _distinct_prompts(contexts)
        self.prompt_length = self._prompts.shape[1]
        """L, the padded length of the prompts."""

    @property
    def is_done(self) -> bool:
        return not self._is_running.any()

    @property
    def num_running(self) -> int:
        return int(self._is_running.sum())

    @property
    def num_rows(self) -> int:
        """Number of rows in the batch, B."""
        return len(self._rows)

    def parts(self, max_rows: int) -> list[StaticBatch]:
        """Divide the running rows into batches of up to `max_rows` rows.

        The new batches share the arrays of this batch, so this batch also gets their samples.
        """
        running = np.flatnonzero(self._is_running)
        parts = []
        for start in range(0, len(running), max_rows):
            part = copy.copy(self)
            part.keep(running[start : start + max_rows])
            parts.append(part)
        return parts

    def keep(self, rows: npt.NDArray[np.int64]) -> None:
        """Keep only the batch's rows with these indices."""
        self._rows, self._seeds, self.lengths = (
            self._rows[rows],
            self._seeds[rows],
            self.lengths[rows],
        )
        self._is_running = self._is_running[rows]

    def prompts(self) -> tuple[Tensor, Tensor | None, Tensor]:
        """Return the distinct prompts of the batch, and the index of each row's prompt.

        Returns:
            Ids [U, L], the mask [U, L], and indices of prompts [B]. The mask is None if nothing is
            padded.
        """
        used, prompt_of_row = np.unique(self._prompt_of_request[self._rows], return_inverse=True)
        mask = None if self._mask is None else self._mask[used]
        return self._prompts[used], mask, torch.from_numpy(prompt_of_row)

    def final_mask(self) -> Tensor | None:
        """Return the mask [B, L + T] that the rows have after T tokens.

        Return None if no row is padded.
        """
        if self._mask is None:
            return None
        shown = self._mask[self._prompt_of_request[self._rows]]
        grown = torch.ones(len(shown), self.max_tokens, dtype=shown.dtype)
        return torch.cat([shown, grown], dim=1)

    def contexts(self) -> tuple[Tensor, Tensor | None]:
        """Return the ids of each row: its prompt, then its K sampled tokens.

        Returns:
            Ids [B, L + K], and the mask [B, L + K]. The mask is None if nothing is padded.
        """
        prompt = torch.from_numpy(self._prompt_of_request[self._rows])
        sampled = torch.from_numpy(self._token_ids[self._rows, : self.num_tokens].astype(np.int64))
        ids = torch.cat([self._prompts[prompt], sampled], dim=1)
        if self._mask is None:
            return ids, None
        return ids, torch.cat([self._mask[prompt], torch.ones_like(sampled)], dim=1)

    def uniforms(self, step: int) -> npt.NDArray[np.float64]:
        """Return the random number with which each row draws token `step`."""
        return uniform_at(self._seeds, step)

    def is_barred(self, step: int) -> npt.NDArray[np.bool_] | None:
        """Return, for each row, whether token `step` must not be a stop id, [B].

        If no row forbids stop ids, return None.
        """
        is_barred: npt.NDArray[np.bool_] = step < self._num_barred[self._rows]
        return is_barred if is_barred.any() else None

    def append(
        self,
        step: int,
        token_ids: npt.NDArray[np.int64],
        logprobs: npt.NDArray[np.float32],
        version: PolicyVersion,
        supports: TokenSets | None = None,
    ) -> list[int]:
        """Record token `step` of each running row, and end completed rows.

        Returns:
            Indices of the requests that have ended.
        """
        running = self._is_running
        rows = self._rows[running]
        self._token_ids[rows, step] = token_ids[running]
        self._logprobs[rows, step] = logprobs[running]
        self._versions[rows, step] = (version.lineage, version.step)
        if supports is not None:
            ids = np.split(supports.ids, np.cumsum(supports.counts)[:-1])
            for place in np.flatnonzero(running):
                self._supports[self._rows[place]].append((supports.sizes[place], ids[place]))
        self._lengths[rows] = self.num_tokens = step + 1
        is_bad = ~np.isfinite(logprobs) & running
        is_stop = (token_ids[:, None] == self._stop_ids).any(1) & running & ~is_bad
        if self.sampling.stop is not None:
            for place in np.flatnonzero(running & ~is_stop & ~is_bad):
                is_stop[place] = self._completes_stop_string(self._rows[place], step)
        is_full = (step + 1 >= self._limits[self._rows]) & running & ~is_stop & ~is_bad
        ends: list[tuple[FinishReason, npt.NDArray[np.bool_]]] = [
            ("nonfinite", is_bad),
            ("stop", is_stop),
            ("length", is_full),
        ]
        for reason, is_ended in ends:
            for row in self._rows[is_ended]:
                self._reasons[row] = reason
        self._is_running = running & ~is_bad & ~is_stop & ~is_full
        return [int(row) for row in self._rows[running & ~self._is_running]]

    def _completes_stop_string(self, row: int, step: int) -> bool:
        stop, before = self.sampling.stop, self._turns[row]
        assert stop is not None
        if len(before) + step < self.sampling.min_tokens:
            return False
        sampled = self._token_ids[row, max(0, step + 1 - stop.num_tokens) : step + 1].tolist()
        return stop.are_complete([*before[-stop.num_tokens :].tolist(), *sampled])

    def note_likely(
        self, step: int, ids: npt.NDArray[np.int64], logprobs: npt.NDArray[np.float32]
    ) -> None:
        """Record the [B, k] most likely ids of token `step` of each running row."""
        rows, k = self._rows[self._is_running], ids.shape[1]
        self._likely_ids[rows, step, :k] = ids[self._is_running]
        self._likely_logprobs[rows, step, :k] = logprobs[self._is_running]
        self._likely_logprobs[rows, step, k:] = -np.inf

    def compact(self) -> npt.NDArray[np.int64] | None:
        """Drop the ended rows if they are at least a quarter of the batch.

        Return the indices of the rows that are kept, or None if no row was dropped.
        """
        if self._is_running.sum() > COMPACT_BELOW * len(self._rows):
            return None
        kept = np.flatnonzero(self._is_running)
        self.keep(kept)
        return kept

    def completions(self) -> list[Completion]:
        """Return the completions in the order of the requests."""
        return [self.completion(row) for row in range(len(self._requests))]

    def completion(self, row: int) -> Completion:
        """Return the completion of one request, with the tokens sampled so far."""
        num_tokens = self._lengths[row]
        return Completion(
            self._requests[row].request_id,
            self._token_ids[row, :num_tokens].copy(),
            self._logprobs[row, :num_tokens].copy(),
            self._reasons[row],
            self._versions[row, :num_tokens].copy(),
            self._support_of(row),
            self._likely_of(row),
        )

    def _support_of(self, row: int) -> TokenSets | None:
        if not self.sampling.truncates:
            if not self.sampling.has_support:
                return None
            num_before, num_tokens = len(self._turns[row]), int(self._lengths[row])
            return self.sampling.barred_support(num_before, num_tokens)
        supports = self._supports[row]
        return TokenSets(
            sizes=np.array([size for size, _ in supports], np.int32),
            ids=np.concatenate([np.empty(0, np.int32), *(ids for _, ids in supports)]),
        )

    def _likely_of(self, row: int) -> TokenSets | None:
        if not self.sampling.likely_ids:
            return None
        logprobs = self._likely_logprobs[row, : self._lengths[row]]
        is_drawn = np.isfinite(logprobs)
        return TokenSets(
            sizes=is_drawn.sum(1).astype(np.int32),
            ids=self._likely_ids[row, : self._lengths[row]][is_drawn],
            logprobs=logprobs[is_drawn],
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
