"""Sample with a transformers model: the engine that runs wherever torch does.

Any causal language model directory with a config.json; the weights may come through `load` alone.
Shapes: B rows in the batch, U distinct prompts, L longest prompt, V vocabulary.

A call of `generate` is cut into waves that fit the memory budget. In a wave every distinct prompt
runs through the model once, its keys and values are repeated for the rollouts of its group, and all
rows then advance together, one token at a time. Prompts of unequal length are padded on the left;
where all are equal no mask is made at all. Rows that have ended are cut out of the batch whenever
they are a quarter of it, so that in all they cost at most a constant factor.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import DynamicCache

from echo.engine.engine import Completion, Engine, FinishReason, Request, Sampling
from echo.engine.sampling import draw_tokens, uniform_at
from echo.engine.skeleton import build_skeleton, check_weights
from echo.engine.weights import torch_dtype
from echo.errors import EngineError

COMPACT_BELOW = 0.75
"""Share of rows still running at which the ended ones are cut out of the batch."""

SAMPLING_BYTES_PER_LOGIT = 32
"""Logits, their float32 copy, log-probabilities, probabilities and the float64 sum, with room."""


class TransformersEngine(Engine):
    """Sample from a Hugging Face causal language model on one device.

    Args:
        model_dir: directory with config.json; weights in it are not read.
        device: "cpu", "cuda" or another torch device.
        dtype: the dtype to compute in: "float32", "bfloat16" or "float16".
        memory_budget_bytes: memory for weights and rollouts together; None for half of what is
            available now.
        attn_implementation: transformers' name of the attention.
        num_threads: CPU threads of one operation; 0 leaves torch's setting alone.
    """

    def __init__(
        self,
        model_dir: str | Path,
        *,
        device: str = "cpu",
        dtype: str = "float32",
        memory_budget_bytes: int | None = None,
        attn_implementation: str = "sdpa",
        num_threads: int = 0,
    ) -> None:
        self._device = torch.device(device)
        self._num_threads = num_threads
        self._is_loaded = False
        self._model = build_skeleton(Path(model_dir), torch_dtype(dtype), attn_implementation)
        self._model.to(self._device)
        self._forward_arguments = frozenset(inspect.signature(self._model.forward).parameters)
        self._budget_bytes = (
            _available_bytes(self._device) // 2
            if memory_budget_bytes is None
            else memory_budget_bytes
        )
        text_config = self._model.config.get_text_config()
        self._vocab_size = int(text_config.vocab_size)
        window = getattr(text_config, "max_position_embeddings", None)
        self._window = int(window) if window is not None else None
        self._kv_bytes_per_token = _kv_bytes_per_token(text_config, torch_dtype(dtype))

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy weights in; a tied tensor is wanted once, under any of its names."""
        own = self._model.state_dict()
        check_weights(own, tensors)
        for name, tensor in tensors.items():
            own[name].copy_(tensor)
        self._is_loaded = True

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        *,
        should_stop: Callable[[], bool],
    ) -> list[Completion]:
        """Sample a completion for each request; see `Engine.generate`.

        A completion also ends with "length" where the model's window does.
        """
        if not self._is_loaded:
            raise EngineError("no weights are loaded; call load() before generate()")
        if not requests:
            return []
        for request in requests:
            self._check_prompt(request)
        if self._num_threads:
            # Each thread has its own setting, and this may not be the one that built the engine.
            torch.set_num_threads(self._num_threads)
        longest = max(len(request.prompt_ids) for request in requests)
        wave_size = self.max_concurrent_rollouts(longest, sampling.max_completion_tokens)
        completions: list[Completion] = []
        for start in range(0, len(requests), wave_size):
            wave = _Wave(requests[start : start + wave_size], sampling, self._window)
            self._run(wave, should_stop)
            completions.extend(wave.completions())
        return completions

    def max_concurrent_rollouts(self, prompt_tokens: int, completion_tokens: int) -> int:
        """Divide what the weights leave of the memory budget by the need of one rollout."""
        weights = sum(t.numel() * t.element_size() for t in _distinct(self._model.state_dict()))
        one = (
            self._kv_bytes_per_token * (prompt_tokens + completion_tokens)
            + SAMPLING_BYTES_PER_LOGIT * self._vocab_size
        )
        number = (self._budget_bytes - weights) // one
        if number < 1:
            raise EngineError(
                f"the memory budget of {self._budget_bytes} bytes does not hold the weights "
                f"({weights}) and one rollout of {prompt_tokens} + {completion_tokens} tokens "
                f"({one}); raise worker.memory_budget_bytes or lower "
                "sampling.max_completion_tokens"
            )
        return int(number)

    def close(self) -> None:
        """Drop the model."""
        self._is_loaded = False
        self._model.to("meta")

    @torch.inference_mode()
    def _run(self, wave: _Wave, should_stop: Callable[[], bool]) -> None:
        """Advance a wave token by token until every row has ended or `should_stop` says so."""
        if should_stop():
            return
        ids, mask, row_of_prompt = wave.distinct_prompts()
        cache = DynamicCache(config=self._model.config)
        logits = self._forward(ids, mask, _positions(mask, ids.shape), cache)
        repeat = torch.from_numpy(row_of_prompt)
        if len(row_of_prompt) != len(ids):
            cache.batch_select_indices(repeat.to(self._device))
        logits = logits[repeat.to(self._device)]
        if mask is not None:
            # As long as it can get: each step shows the model one more column of it.
            grown = torch.ones(len(repeat), wave.max_tokens, dtype=mask.dtype)
            mask = torch.cat([mask[repeat], grown], dim=1).to(self._device)
        length = ids.shape[1]
        for step in range(wave.max_tokens):
            tokens, logprobs = draw_tokens(logits, wave.sampling, wave.uniforms(step))
            wave.append(step, tokens.cpu().numpy(), logprobs.cpu().numpy())
            if wave.is_done or should_stop():
                return
            kept = wave.compact()
            if kept is not None:
                index = torch.from_numpy(kept).to(self._device)
                cache.batch_select_indices(index)
                tokens = tokens[index]
                mask = mask[index] if mask is not None else None
            positions = torch.from_numpy(wave.lengths + step)[:, None]
            shown = mask[:, : length + step + 1] if mask is not None else None
            logits = self._forward(tokens[:, None], shown, positions, cache)

    def _forward(
        self, ids: Tensor, mask: Tensor | None, positions: Tensor, cache: DynamicCache
    ) -> Tensor:
        """Run the model over new tokens and return the logits [B, V] of the last of each row."""
        arguments: dict[str, Any] = {
            "input_ids": ids.to(self._device),
            "past_key_values": cache,
            "use_cache": True,
        }
        if mask is not None:
            arguments["attention_mask"] = mask.to(self._device)
        # Models with relative positions take no ids; older ones compute all logits.
        if "position_ids" in self._forward_arguments:
            arguments["position_ids"] = positions.to(self._device)
        if "logits_to_keep" in self._forward_arguments:
            arguments["logits_to_keep"] = 1
        logits: Tensor = self._model(**arguments).logits[:, -1]
        return logits

    def _check_prompt(self, request: Request) -> None:
        ids = request.prompt_ids
        where = f"request {request.request_id}"
        if not len(ids):
            raise EngineError(f"{where}: the prompt is empty")
        if self._window is not None and len(ids) >= self._window:
            raise EngineError(
                f"{where}: the prompt has {len(ids)} tokens, the model's window "
                f"{self._window}, which leaves no room for a completion; shorten the prompt"
            )
        if ids.min() < 0 or ids.max() >= self._vocab_size:
            raise EngineError(
                f"{where}: the prompt has token ids from {ids.min()} to {ids.max()}, the model a "
                f"vocabulary of {self._vocab_size}; tokenizer and model do not belong together"
            )


class _Wave:
    """The rows that run together: what was sampled for each, and which are still running.

    `rows` maps each row of the current batch to its request; compaction shortens it.
    """

    def __init__(self, requests: Sequence[Request], sampling: Sampling, window: int | None) -> None:
        self.sampling = sampling
        self._requests = requests
        num_rows = len(requests)
        prompt_lengths = np.array([len(request.prompt_ids) for request in requests])
        self._limits = np.full(num_rows, sampling.max_completion_tokens)
        if window is not None:
            self._limits = np.minimum(self._limits, window - prompt_lengths)
        self.max_tokens = int(self._limits.max())
        self._token_ids = np.zeros((num_rows, self.max_tokens), np.int32)
        self._logprobs = np.zeros((num_rows, self.max_tokens), np.float32)
        self._num_tokens = np.zeros(num_rows, np.int64)
        self._reasons: list[FinishReason] = ["abort"] * num_rows
        self._stop_ids = np.array(sampling.stop_ids, np.int64)
        self._rows = np.arange(num_rows)
        self._is_running = np.ones(num_rows, np.bool_)
        self._seeds = np.array([r.seed & 0xFFFFFFFFFFFFFFFF for r in requests], np.uint64)
        self.lengths = prompt_lengths
        """[B] prompt tokens of each row of the batch."""

    @property
    def is_done(self) -> bool:
        """Whether every row has ended."""
        return not self._is_running.any()

    def distinct_prompts(self) -> tuple[Tensor, Tensor | None, npt.NDArray[np.int64]]:
        """Return each distinct prompt once, padded on the left, and which one each row has.

        Returns:
            Ids [U, L], mask [U, L] or None if nothing is padded, and prompt of row [B].
        """
        numbers: dict[bytes, int] = {}
        prompts: list[npt.NDArray[np.int32]] = []
        prompt_of_row = np.empty(len(self._requests), np.int64)
        for row, request in enumerate(self._requests):
            key = request.prompt_ids.tobytes()
            if key not in numbers:
                numbers[key] = len(prompts)
                prompts.append(request.prompt_ids)
            prompt_of_row[row] = numbers[key]
        longest = max(map(len, prompts))
        ids = np.zeros((len(prompts), longest), np.int64)
        mask = np.zeros((len(prompts), longest), np.int64)
        for number, prompt in enumerate(prompts):
            ids[number, longest - len(prompt) :] = prompt
            mask[number, longest - len(prompt) :] = 1
        has_padding = not mask.all()
        return torch.from_numpy(ids), torch.from_numpy(mask) if has_padding else None, prompt_of_row

    def uniforms(self, step: int) -> npt.NDArray[np.float64]:
        """Return the random number of each row of the batch for its token `step`."""
        return uniform_at(self._seeds, step)

    def append(
        self, step: int, token_ids: npt.NDArray[np.int64], logprobs: npt.NDArray[np.float32]
    ) -> None:
        """Record token `step` of the rows that are running, and end those that end with it."""
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
        self._num_tokens[rows] = step + 1
        is_stop = (token_ids[:, None] == self._stop_ids).any(1) & running
        is_full = (step + 1 >= self._limits[self._rows]) & running & ~is_stop
        for row in self._rows[is_stop]:
            self._reasons[row] = "stop"
        for row in self._rows[is_full]:
            self._reasons[row] = "length"
        self._is_running = running & ~is_stop & ~is_full

    def compact(self) -> npt.NDArray[np.int64] | None:
        """Drop ended rows from the batch if they are many; return the rows kept, or None."""
        if self._is_running.sum() > COMPACT_BELOW * len(self._rows):
            return None
        kept = np.flatnonzero(self._is_running)
        self._rows, self._seeds, self.lengths = (
            self._rows[kept],
            self._seeds[kept],
            self.lengths[kept],
        )
        self._is_running = self._is_running[kept]
        return kept

    def completions(self) -> list[Completion]:
        """Return what was sampled, in the order of the requests."""
        return [
            Completion(
                request.request_id,
                self._token_ids[row, : self._num_tokens[row]].copy(),
                self._logprobs[row, : self._num_tokens[row]].copy(),
                self._reasons[row],
            )
            for row, request in enumerate(self._requests)
        ]


def _positions(mask: Tensor | None, shape: torch.Size) -> Tensor:
    """Return position ids [U, L]: 0 at the first real token of each row."""
    if mask is None:
        return torch.arange(shape[1]).expand(shape)
    return (mask.cumsum(-1) - 1).clamp_(min=0)


def _distinct(state: Mapping[str, Tensor]) -> list[Tensor]:
    return list({tensor.data_ptr(): tensor for tensor in state.values()}.values())


def _kv_bytes_per_token(config: Any, dtype: torch.dtype) -> int:
    """Return the bytes of keys and values of one token, with one layer counted twice.

    While a layer's cache grows by a token, old and new copy exist side by side.
    """
    num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return int(2 * (config.num_hidden_layers + 1) * num_heads * head_dim * dtype.itemsize)


def _available_bytes(device: torch.device) -> int:
    """Return the memory that can be had now without taking it from anybody else."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        # Free pages alone would leave out the file cache, which is most of a busy machine.
        for line in meminfo.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
