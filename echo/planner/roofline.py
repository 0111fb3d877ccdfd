"""How fast a GPU generates and trains a model: the lower of its two roofs, memory and arithmetic.

Decoding one token for `c` sequences reads the weights once and each sequence's cache, and computes
two operations per parameter and sequence; it takes as long as the slower of the two. Training
computes six operations per parameter and token. Both roofs are scaled by what real engines reach:

* 0.60 of the memory bandwidth in decoding: measured as 55-60 % on A100 and H100 by Databricks,
  "LLM Inference Performance Engineering: Best Practices" (2023).
* 0.60 of the arithmetic in large-batch prefill and decoding: between the 76 % of Pope et al.
  (arXiv:2211.05102, prefill of a 540B model) and the 40-50 % of engines on small models.
* 0.40 of the arithmetic in training: Megatron-LM reports 44-52 % (arXiv:2104.04473) and PaLM 46 %
  (arXiv:2204.02311) for pre-training; packed sequences of unequal length lose some of it.

A measured rate always replaces an estimate.
"""

from __future__ import annotations

from dataclasses import dataclass

from echo.planner.catalogue import Gpu, ModelShape

MEMORY_EFFICIENCY = 0.60
"""Share of the memory bandwidth that decoding reaches."""
ARITHMETIC_EFFICIENCY = 0.60
"""Share of the peak that large batches reach in generation."""
TRAIN_EFFICIENCY = 0.40
"""Share of the peak that training reaches."""
USABLE_MEMORY = 0.90
"""Share of a GPU's memory that an engine takes; vLLM's default."""
MAX_SEQUENCES = 256
"""Sequences in one decoding batch at most; vLLM's default on smaller GPUs."""
RESERVED_BYTES = 2 << 30
"""Activations, CUDA graphs and the context of one process."""
BYTES_PER_WEIGHT = 2
"""Generation runs in bfloat16."""


@dataclass(frozen=True, slots=True)
class Decode:
    """What one replica generates."""

    tokens_per_s: float
    """Completion tokens per second, all sequences together."""
    concurrency: int
    """Sequences in the batch."""


def decode(
    gpu: Gpu,
    model: ModelShape,
    *,
    prompt_tokens: float,
    completion_tokens: float,
    tensor_parallel: int = 1,
    max_tokens: float | None = None,
) -> Decode | None:
    """Estimate what `tensor_parallel` GPUs generate together; None if the model does not fit.

    Example, RTX 4090 (1008 GB/s, 24 GiB) and 4.0e9 parameters in 36 layers with 8 heads of 128:
    weights 8.0 GB take 13.3 ms at 605 GB/s; 11.6 GB are left for caches of 147 kB per token.

    Args:
        gpu: what it runs on.
        model: what it runs.
        prompt_tokens: mean length of a prompt.
        completion_tokens: mean length of a completion.
        tensor_parallel: GPUs that hold one replica.
        max_tokens: tokens of the longest sequence; a replica must hold one of them.
    """
    memory = tensor_parallel * (gpu.memory_bytes * USABLE_MEMORY - RESERVED_BYTES)
    free = memory - model.num_params * BYTES_PER_WEIGHT
    longest = max_tokens or prompt_tokens + completion_tokens
    if free < longest * model.cache_bytes_per_token:
        return None
    # Halfway through its completion a sequence has this much behind it: the mean over time.
    mean_context = prompt_tokens + completion_tokens / 2
    concurrency = int(min(MAX_SEQUENCES, free / (mean_context * model.cache_bytes_per_token)))
    bandwidth = tensor_parallel * gpu.bytes_per_s * MEMORY_EFFICIENCY
    flops = tensor_parallel * gpu.flops_per_s * ARITHMETIC_EFFICIENCY
    step_bytes = (
        model.num_params * BYTES_PER_WEIGHT
        + concurrency * mean_context * model.cache_bytes_per_token
    )
    step_s = max(step_bytes / bandwidth, 2 * model.num_params * concurrency / flops)
    step_s += _all_reduce_s(gpu, model, concurrency, tensor_parallel)
    prefill_s = 2 * model.num_params * prompt_tokens / flops
    # One sequence leaves every completion_tokens / concurrency steps and its successor's prompt is
    # read then, while the others wait.
    per_token_s = step_s / concurrency + prefill_s / completion_tokens
    return Decode(1 / per_token_s, concurrency)


def _all_reduce_s(gpu: Gpu, model: ModelShape, num_rows: float, tensor_parallel: int) -> float:
    """Return seconds of two all-reduces per layer over `num_rows` rows of activations."""
    if tensor_parallel == 1:
        return 0.0
    volume = 2 * (tensor_parallel - 1) / tensor_parallel
    row_bytes = num_rows * model.hidden_size * BYTES_PER_WEIGHT
    return 2 * model.num_layers * volume * row_bytes / gpu.link_bytes_per_s


def train_flops(model: ModelShape, *, num_tokens: float, mean_tokens: float) -> float:
    """Return the operations of one optimizer step: forward and backward, attention included.

    Args:
        model: what is trained.
        num_tokens: tokens of the batch, prompts included.
        mean_tokens: tokens of a sequence.
    """
    attention = 6 * model.num_layers * model.hidden_size * mean_tokens
    return num_tokens * (6 * model.num_params + attention)


def train_seconds(
    gpu: Gpu, model: ModelShape, *, num_gpus: int, num_tokens: float, mean_tokens: float
) -> float:
    """Estimate one optimizer step on `num_gpus` equal GPUs, without communication."""
    flops = train_flops(model, num_tokens=num_tokens, mean_tokens=mean_tokens)
    return flops / (num_gpus * gpu.flops_per_s * TRAIN_EFFICIENCY)
