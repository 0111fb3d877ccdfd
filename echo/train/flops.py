"""Arithmetic of a step: floating-point operations that the model itself needs.

Of T tokens in segments of s_1, s_2, ... tokens, S of them scored:

    6 N T  +  6 V h S  +  6 sum over layers of H D (s_1^2 + s_2^2 + ...)

N weights in products but the head's V x h, of experts those that a token meets; H heads of width D.
Two operations per weight and token forward, two for the gradient of what goes in, two for that of
the weight, which frozen weights do not have. Of the score matrix the causal half counts, under a
sliding window the band. Recomputation, padding and the optimizer do not count: time spent on them
lowers the utilization, as it should.

The other convention, of PaLM (arXiv:2204.02311, appendix B) and of most published figures, sends
every token through the head and counts the whole score matrix of a row, across its segments, too:
(6 N + 6 V h + 12 sum over layers of H D x row) per token. It says more for the same speed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """One layer's attention."""

    width: int
    """Heads times the mean of their query's and their value's width."""
    window: int | None = None
    """Tokens that one attends to at most, itself included; None for all before it."""

    def flops(self, length: int) -> int:
        """Return the operations of one segment, forward and backward."""
        window = length if self.window is None else min(length, self.window)
        # Pairs of tokens, half the square: the diagonal's other half is left out as is usual.
        return 6 * self.width * (window * window + 2 * (length - window) * window)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFlops:
    """What the operations of a model follow from."""

    body: int
    """Weights in products, without the head's; of experts those that a token meets."""
    body_trained: int
    """Those of them that have a gradient."""
    head: int
    """Weights of the head, V x h."""
    head_trained: int
    attention: tuple[AttentionShape, ...]

    def row(self, length: int, num_scored: int) -> int:
        """Return the operations of one segment, forward and backward.

        Args:
            length: its tokens.
            num_scored: those whose prediction is scored.
        """
        head = (4 * self.head + 2 * self.head_trained) * num_scored
        return self.weights(length) + head + sum(layer.flops(length) for layer in self.attention)

    def weights(self, num_tokens: int) -> int:
        """Return the operations of so many tokens with the weights before the head."""
        return (4 * self.body + 2 * self.body_trained) * num_tokens

    def palm(self, row_lengths: Iterable[int]) -> int:
        """Return what PaLM's convention makes of rows of so many tokens, padding left out."""
        weights = 4 * (self.body + self.head) + 2 * (self.body_trained + self.head_trained)
        width = sum(layer.width for layer in self.attention)
        return sum((weights + 12 * width * tokens) * tokens for tokens in row_lengths)


def model_flops(model: Any, head: Tensor) -> ModelFlops:
    """Return the numbers of a causal language model of transformers.

    Args:
        model: with its adapter, if it has one.
        head: its LM head's weight.
    """
    config = model.config.get_text_config()
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    left_out = {id(tensor) for tensor in (*tables, head)}
    body = body_trained = 0
    for name, tensor in model.named_parameters():
        if tensor.ndim < 2 or id(tensor) in left_out:
            continue
        size = round(tensor.numel() * _share_of_experts(name, config))
        body += size
        body_trained += size * tensor.requires_grad
    return ModelFlops(
        body=body,
        body_trained=body_trained,
        head=head.numel(),
        head_trained=head.numel() * head.requires_grad,
        attention=tuple(_attention(config)),
    )


def _share_of_experts(name: str, config: Any) -> float:
    """Return the share of a weight that one token is multiplied by."""
    if ".experts." not in name:
        return 1.0
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    number = next((n for key in names if (n := getattr(config, key, None))), 1)
    return float(getattr(config, "num_experts_per_tok", number) or number) / number


def _attention(config: Any) -> Iterator[AttentionShape]:
    heads = getattr(config, "num_attention_heads", None)
    if not heads:  # a model without attention
        return
    query = getattr(config, "head_dim", None) or config.hidden_size // heads
    value = query
    if getattr(config, "kv_lora_rank", None):  # latent attention names both widths
        query, value = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
    width = heads * (query + value) // 2
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    for kind in kinds or ["full_attention"] * config.num_hidden_layers:
        if kind in ("full_attention", "attention"):
            yield AttentionShape(width=width, window=None if kinds else window)
        elif kind == "sliding_attention":
            yield AttentionShape(width=width, window=window)


PEAKS = {"H100 PCIe": 756e12, "H100": 989.4e12, "H200": 989.4e12, "A100": 312e12, "L40S": 362e12}
"""Dense bfloat16 operations per second of a GPU, by a part of its name; the first that fits."""


def peak_flops(device: torch.device) -> float | None:
    """Return the operations per second that a device is sold with; None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAKS.items() if part in name), None)
