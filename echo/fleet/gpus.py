"""Lists GPUs, and estimates decoding and training speed with a roofline model.

A decoding step for `c` sequences reads the weights once, and the cache of each sequence. The step
computes two operations per parameter and sequence. The time of the step is the time of reading or
of computing, whichever is longer. Training computes six operations per parameter and token. Peak
rates are scaled by the shares that real engines reach:

* 0.60 of the memory bandwidth in decoding: measured as 55-60 % on A100 and H100 by Databricks, "LLM
  Inference Performance Engineering: Best Practices" (2023).
* 0.60 of the arithmetic in large-batch prefill and decoding: between the 76 % of Pope et al.
  (arXiv:2211.05102, prefill of a 540B model) and the 40-50 % of engines on small models.
* 0.40 of the arithmetic in training: Megatron-LM reports 44-52 % (arXiv:2104.04473) and PaLM 46 %
  (arXiv:2204.02311) for pre-training; packed sequences of unequal length reach less.

If a rate was measured, it replaces the estimate.
"""

from __future__ import annotations

from dataclasses import dataclass

from echo.core.units import SIZE_UNITS

# --- catalogue ------------------------------------------------------------------------------------
#
# Peak arithmetic is dense bfloat16 (float16 if a GPU lacks bfloat16) with float32 accumulation.
# These rates and the memory bandwidths are from the vendors' data sheets.


_GIB = SIZE_UNITS["GiB"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One type of GPU."""

    name: str
    flops_per_s: float
    """Peak rate of dense 16-bit arithmetic, operations per second."""
    bytes_per_s: float
    """Memory bandwidth, bytes per second."""
    memory_bytes: int
    link_bytes_per_s: float
    """Bandwidth to another GPU of the same machine, bytes per second in each direction."""
    num_per_node: int = 8
    """Number of GPUs in a typical machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The dimensions of a model, from which its speed is estimated."""

    name: str
    num_params: float
    num_layers: int
    hidden_size: int
    num_kv_heads: int
    head_dim: int

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers, with two bytes per number."""
        return 2 * 2 * self.num_layers * self.num_kv_heads * self.head_dim


def _gpu(name: str, tflops: float, gb_per_s: float, gib: int, link_gb_per_s: float) -> Gpu:
    return Gpu(
        name=name,
        flops_per_s=tflops * 1e12,
        bytes_per_s=gb_per_s * 1e9,
        memory_bytes=gib * _GIB,
        link_bytes_per_s=link_gb_per_s * 1e9,
    )


_ROWS = (
    #     name            TFLOP/s  GB/s  GiB  link GB/s
    _gpu("T4", 65, 320, 16, 12),
    _gpu("V100-32GB", 125, 900, 32, 150),
    _gpu("A10", 125, 600, 24, 25),
    _gpu("L4", 121, 300, 24, 25),
    _gpu("RTX 3090", 71, 936, 24, 12),
    _gpu("RTX 4090", 165, 1008, 24, 25),
    _gpu("RTX 5090", 210, 1792, 32, 50),
    _gpu("RTX A6000", 155, 768, 48, 25),
    _gpu("L40S", 362, 864, 48, 25),
    _gpu("A100-40GB", 312, 1555, 40, 300),
    _gpu("A100-80GB", 312, 2039, 80, 300),
    _gpu("H20", 148, 4000, 96, 450),
    _gpu("H800", 756, 2000, 80, 200),
    _gpu("H100-PCIe", 756, 2039, 80, 50),
    _gpu("H100-SXM", 989, 3350, 80, 450),
    _gpu("H200", 989, 4800, 141, 450),
    _gpu("B200", 2250, 8000, 180, 900),
)

GPUS: dict[str, Gpu] = {gpu.name: gpu for gpu in _ROWS}
"""The catalogue of GPUs: each GPU under its name. The source for H20 and H800 is
arXiv:2511.00796."""


def _model(name: str, params: float, layers: int, hidden: int, kv_heads: int) -> ModelShape:
    return ModelShape(
        name=name,
        num_params=params,
        num_layers=layers,
        hidden_size=hidden,
        num_kv_heads=kv_heads,
        head_dim=128,
    )


MODELS: dict[str, ModelShape] = {
    model.name: model
    for model in (
        # From each model's config.json; all have heads of 128.
        _model("Qwen2.5-1.5B", 1.54e9, 28, 1536, 2),
        _model("Qwen2.5-3B", 3.09e9, 36, 2048, 2),
        _model("Qwen2.5-7B", 7.62e9, 28, 3584, 4),
        _model("Qwen2.5-14B", 14.77e9, 48, 5120, 8),
        _model("Qwen2.5-32B", 32.76e9, 64, 5120, 8),
        _model("Qwen3-0.6B", 0.60e9, 28, 1024, 8),
        _model("Qwen3-1.7B", 1.72e9, 28, 2048, 8),
        _model("Qwen3-4B", 4.02e9, 36, 2560, 8),
        _model("Qwen3-8B", 8.19e9, 36, 4096, 8),
        _model("Qwen3-14B", 14.77e9, 40, 5120, 8),
        _model("Qwen3-32B", 32.76e9, 64, 5120, 8),
    )
}

MEMORY_EFFICIENCY = 0.60
"""Share of the memory bandwidth that decoding uses in practice."""
ARITHMETIC_EFFICIENCY = 0.60
"""Share of the peak arithmetic rate that generation reaches with large batches."""
TRAIN_EFFICIENCY = 0.40
"""Share of the peak arithmetic rate that training reaches."""
USABLE_MEMORY = 0.90
"""Share of a GPU's memory that an engine uses. 0.90 is vLLM's default."""
MAX_SEQUENCES = 256
"""Largest number of sequences in a decoding batch. 256 is vLLM's default on smaller GPUs."""
RESERVED_BYTES = 2 << 30
"""Bytes of GPU memory that one process needs for activations, CUDA graphs and its context."""
BYTES_PER_WEIGHT = 2
"""Bytes that a weight takes in generation, which runs in bfloat16."""


@dataclass(frozen=True, slots=True)
class Decode:
    """The speed and the batch size of one copy of the model that generates."""

    tokens_per_s: float
    """Completion tokens per second of all sequences together."""
    concurrency: int
    """Number of sequences in the batch."""


def decode_rate(
    gpu: Gpu,
    model: ModelShape,
    *,
    prompt_tokens: float,
    completion_tokens: float,
    tensor_parallel: int = 1,
    max_tokens: float | None = None,
) -> Decode | None:
    """Return the estimated speed of a model on `tensor_parallel` GPUs together.

    If the model does not fit into the GPUs' memory, return None.

    Example: an RTX 4090 (1008 GB/s, 24 GiB), and 4.0e9 parameters in 36 layers with 8 KV heads of
    width 128. Reading 8.0 GB of weights takes 13.3 ms at 60 % of the bandwidth. 11.6 GB remain for
    caches of 147 kB per token.
    """
    memory = tensor_parallel * (gpu.memory_bytes * USABLE_MEMORY - RESERVED_BYTES)
    free = memory - model.num_params * BYTES_PER_WEIGHT
    longest = max_tokens or prompt_tokens + completion_tokens
    if free < longest * model.cache_bytes_per_token:
        return None
    # The mean context over time is as long as a sequence halfway through its completion.
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
    # A sequence ends every completion_tokens / concurrency steps. The prompt of the next sequence
    # is prefilled then, while the others wait.
    per_token_s = step_s / concurrency + prefill_s / completion_tokens
    return Decode(1 / per_token_s, concurrency)


def _all_reduce_s(gpu: Gpu, model: ModelShape, num_rows: float, tensor_parallel: int) -> float:
    """Return the seconds that all-reduces take: two per layer, each over `num_rows` activations."""
    if tensor_parallel == 1:
        return 0.0
    volume = 2 * (tensor_parallel - 1) / tensor_parallel
    row_bytes = num_rows * model.hidden_size * BYTES_PER_WEIGHT
    return 2 * model.num_layers * volume * row_bytes / gpu.link_bytes_per_s


def train_flops(model: ModelShape, *, num_tokens: float, mean_tokens: float) -> float:
    """Return how many operations the forward and backward passes of an optimizer step need.

    Attention is included.
    """
    attention = 6 * model.num_layers * model.hidden_size * mean_tokens
    return num_tokens * (6 * model.num_params + attention)


def train_seconds(
    gpu: Gpu, model: ModelShape, *, num_gpus: int, num_tokens: float, mean_tokens: float
) -> float:
    """Return the estimated seconds of one optimizer step on `num_gpus` equal GPUs.

    Communication between the GPUs is not counted.
    """
    flops = train_flops(model, num_tokens=num_tokens, mean_tokens=mean_tokens)
    return flops / (num_gpus * gpu.flops_per_s * TRAIN_EFFICIENCY)
