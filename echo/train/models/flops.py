"""Number of floating-point operations that a step needs.

For T tokens in segments of s_1, s_2, ... tokens, with S scored tokens:

    6 N T  +  6 V h S  +  6 sum over layers of H D (s_1^2 + s_2^2 + ...)

N is the number of weights in matrix products that one token uses, without the LM head and without
unused experts. V is the vocabulary size, and h the model width. H is the number of heads, and D the
width of a head. Per token, each weight takes two operations forward, two for the gradient of its
input and, if trained, two for its own gradient. Of the score matrix, only the causal half counts,
or the band within a sliding window. Recomputation, padding and the optimizer do not count, so they
lower the utilization.

Most published figures use the convention of PaLM (arXiv:2204.02311, appendix B). It counts the head
for every token, and the whole score matrix of a row, even across segments:

    6 N + 6 V h + 12 sum over layers of H D x row     per token

Here, row is the number of tokens of the row. PaLM's convention gives a higher utilization at the
same speed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from echo.engine.model import UNREADABLE, head_widths, layer_configs

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """Sizes of the attention of one layer."""

    width: int
    """Number of heads times the mean of a query's width and a value's width."""
    window: int | None = None
    """Largest number of tokens that a token attends to, including itself; None for no limit."""

    def flops(self, length: int) -> int:
        """Return the number of operations of the attention of one segment, forward and backward."""
        window = length if self.window is None else min(length, self.window)
        # Half of the square matrix of token pairs; by convention half of its diagonal is not
        # counted.
        return 6 * self.width * (window * window + 2 * (length - window) * window)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlops:
    """Sizes of a model that determine its number of operations."""

    body: int
    """Number of weights that one token uses in matrix products, without the LM head."""
    body_trained: int
    """Number of the weights in `body` that have a gradient."""
    head: int
    """Number of weights of the LM head."""
    head_trained: int
    attention: tuple[AttentionShape, ...]
    is_exact: bool = True
    """Whether attention is counted. If the model's configuration cannot be read, only weights are
    counted, and no utilization is reported.
    """

    def row(self, length: int, num_scored: int) -> int:
        """Return the number of operations of one segment, forward and backward.

        Args:
            length: the number of tokens of the segment.
            num_scored: the number of scored tokens.
        """
        head = (4 * self.head + 2 * self.head_trained) * num_scored
        return self.weights(length) + head + self.attention_of(length)

    def attention_of(self, length: int) -> int:
        """Return the number of operations of the attention of one segment in all layers."""
        return sum(layer.flops(length) for layer in self.attention)

    def weights(self, num_tokens: int) -> int:
        """Return the number of operations of `num_tokens` tokens in all layers before the head."""
        return (4 * self.body + 2 * self.body_trained) * num_tokens

    def palm(self, row_lengths: Iterable[int]) -> int:
        """Return the number of operations of rows, counted by PaLM's convention.

        `row_lengths` has the number of tokens of each row, without padding.
        """
        weights = 4 * (self.body + self.head) + 2 * (self.body_trained + self.head_trained)
        width = sum(layer.width for layer in self.attention)
        return sum((weights + 12 * width * tokens) * tokens for tokens in row_lengths)


def model_flops(model: Any, head: Tensor) -> ModelFlops:
    """Return the sizes of a causal language model of transformers.

    If the model's configuration cannot be read, training goes on, but no utilization is reported.

    Args:
        model: the model, including an adapter.
        head: the weight of the model's LM head.
    """
    config = model.config.get_text_config()
    try:
        return _count(model, head, config)
    except UNREADABLE as error:
        log.warning(
            "the arithmetic of %s is unknown, its attention is left out, and so is perf/mfu: "
            "%s: %s", type(model).__name__, type(error).__name__, str(error).partition("\n")[0],
        )  # fmt: skip
        return replace(_count(model, head, None), is_exact=False)


def _count(model: Any, head: Tensor, config: Any | None) -> ModelFlops:
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    left_out = {id(tensor) for tensor in (*tables, head)}
    body = body_trained = 0
    for name, tensor in model.named_parameters():
        if tensor.ndim < 2 or id(tensor) in left_out:
            continue
        share = 1.0 if config is None else _share_of_experts(name, config)
        size = round(tensor.numel() * share)
        body += size
        body_trained += size * tensor.requires_grad
    return ModelFlops(
        body=body,
        body_trained=body_trained,
        head=head.numel(),
        head_trained=head.numel() * head.requires_grad,
        attention=() if config is None else tuple(_attention(config)),
    )


def _share_of_experts(name: str, config: Any) -> float:
    """Return the share of a weight tensor that one token uses; below 1 for experts."""
    if ".experts." not in name:
        return 1.0
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    number = next((n for key in names if (n := getattr(config, key, None))), 1)
    chosen = (getattr(config, key, None) for key in ("num_experts_per_tok", "top_k_experts"))
    return float(next(filter(None, chosen), number)) / number


def _attention(config: Any) -> Iterator[AttentionShape]:
    layers, kinds = layer_configs(config), getattr(config, "layer_types", None)
    for layer, kind in zip(layers, kinds or ["attention"] * len(layers), strict=True):
        widths = head_widths(layer)
        if not any(widths):  # a model without attention
            continue
        width = layer.num_attention_heads * sum(widths) // 2
        window = getattr(layer, "sliding_window", None)
        if kind in ("full_attention", "attention"):
            yield AttentionShape(width=width, window=None if kinds else window)
        elif kind == "sliding_attention":
            yield AttentionShape(width=width, window=window)


PEAKS = {"H100 PCIe": 756e12, "H100": 989.4e12, "H200": 989.4e12, "A100": 312e12, "L40S": 362e12}
"""(part of a GPU's name, dense bfloat16 operations per second). The first name that is part of the
device's name counts.
"""


def peak_flops(device: torch.device) -> float | None:
    """Return a device's peak operations per second; None if `PEAKS` lacks the device."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAKS.items() if part in name), None)
