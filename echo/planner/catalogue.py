"""The GPUs and models that the planner knows by name; a fleet file can change and add rows.

Peak arithmetic is dense bfloat16 (float16 where a GPU lacks it) with float32 accumulation, from the
vendor's data sheets; memory bandwidth likewise. Prices are what one such GPU typically cost per
hour on a marketplace in 2025-2026: they only fill in for a missing offer and move every week.
"""

from __future__ import annotations

from dataclasses import dataclass

from echo.core.units import SIZE_UNITS

_GIB = SIZE_UNITS["GiB"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU model."""

    name: str
    flops_per_s: float
    """Dense 16-bit peak."""
    bytes_per_s: float
    """Memory bandwidth."""
    memory_bytes: int
    price_per_h: float
    """Typical price, $ per hour."""
    link_bytes_per_s: float
    """Bandwidth to its neighbours in one machine, per direction."""
    num_per_node: int = 8
    """GPUs in the usual machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The dimensions of a model that decide its speed."""

    name: str
    num_params: float
    num_layers: int
    hidden_size: int
    num_kv_heads: int
    head_dim: int

    @property
    def cache_bytes_per_token(self) -> int:
        """Key and value of one token in every layer, two bytes each."""
        return 2 * 2 * self.num_layers * self.num_kv_heads * self.head_dim


def _gpu(
    name: str, tflops: float, gb_per_s: float, gib: int, price: float, link_gb_per_s: float
) -> Gpu:
    return Gpu(
        name=name,
        flops_per_s=tflops * 1e12,
        bytes_per_s=gb_per_s * 1e9,
        memory_bytes=gib * _GIB,
        price_per_h=price,
        link_bytes_per_s=link_gb_per_s * 1e9,
    )


_ROWS = (
    #     name            TFLOP/s  GB/s  GiB  $/h   link GB/s
    _gpu("T4", 65, 320, 16, 0.15, 12),
    _gpu("V100-32GB", 125, 900, 32, 0.25, 150),
    _gpu("A10", 125, 600, 24, 0.30, 25),
    _gpu("L4", 121, 300, 24, 0.35, 25),
    _gpu("RTX 3090", 71, 936, 24, 0.18, 12),
    _gpu("RTX 4090", 165, 1008, 24, 0.34, 25),
    _gpu("RTX 5090", 210, 1792, 32, 0.55, 50),
    _gpu("RTX A6000", 155, 768, 48, 0.45, 25),
    _gpu("L40S", 362, 864, 48, 0.80, 25),
    _gpu("A100-40GB", 312, 1555, 40, 0.80, 300),
    _gpu("A100-80GB", 312, 2039, 80, 1.39, 300),
    _gpu("H20", 148, 4000, 96, 1.85, 450),
    _gpu("H800", 756, 2000, 80, 5.28, 200),
    _gpu("H100-PCIe", 756, 2039, 80, 1.99, 50),
    _gpu("H100-SXM", 989, 3350, 80, 2.69, 450),
    _gpu("H200", 989, 4800, 141, 3.99, 450),
    _gpu("B200", 2250, 8000, 180, 6.00, 900),
)

GPUS: dict[str, Gpu] = {gpu.name: gpu for gpu in _ROWS}
"""H20 and H800 as printed in arXiv:2511.00796, prices too."""


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
