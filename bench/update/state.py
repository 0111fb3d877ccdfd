"""Weights of the shapes of a Qwen3, and steps that change a given share of their bf16 words."""

from __future__ import annotations

from dataclasses import dataclass

import torch

SCALES = {0.001: 2e-8, 0.014: 3.6e-7, 0.1: 4e-6}
"""Share of the bf16 words of weights of N(0, .02) that change -> size of the step that does so."""
SIGMA = 0.02
NOISE_WEIGHTS = 1 << 24


@dataclass(frozen=True)
class Shape:
    """What a Qwen3 consists of."""

    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 151_936

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of its tensors by name."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "model.embed_tokens.weight": (self.vocab, self.hidden)
        }
        for layer in range(self.layers):
            named = {
                "input_layernorm": (self.hidden,),
                "self_attn.q_proj": (queries, self.hidden),
                "self_attn.k_proj": (keys, self.hidden),
                "self_attn.v_proj": (keys, self.hidden),
                "self_attn.o_proj": (self.hidden, queries),
                "self_attn.q_norm": (self.head_dim,),
                "self_attn.k_norm": (self.head_dim,),
                "post_attention_layernorm": (self.hidden,),
                "mlp.gate_proj": (self.inner, self.hidden),
                "mlp.up_proj": (self.inner, self.hidden),
                "mlp.down_proj": (self.hidden, self.inner),
            }
            shapes |= {f"model.layers.{layer}.{name}.weight": size for name, size in named.items()}
        return shapes | {"model.norm.weight": (self.hidden,)}


SHAPES = {
    "Qwen3-0.6B": Shape(layers=28, hidden=1024, inner=3072, heads=16),
    "Qwen3-4B": Shape(layers=36, hidden=2560, inner=9728, heads=32),
    "128MiB": Shape(layers=3, hidden=1024, inner=3072, heads=16, vocab=19_456),
}


class Weights:
    """float32 weights as an optimizer would hold them."""

    def __init__(self, shape: str, share: float, device: str = "cpu") -> None:
        """Draw them.

        Args:
            shape: one of SHAPES.
            share: of the bf16 words that change with each step, one of SCALES.
            device: where they lie.
        """
        self._scale = SCALES[share]
        self._generator = torch.Generator().manual_seed(0)
        self._noise = torch.randn(NOISE_WEIGHTS, generator=self._generator).to(device)
        self.state: dict[str, torch.Tensor] = {}
        for name, size in SHAPES[shape].tensors().items():
            self.state[name] = torch.ones(size, device=device)
            if len(size) > 1:
                self._add(self.state[name].zero_(), SIGMA)

    @torch.no_grad()
    def step(self) -> None:
        """Move every weight a little."""
        for tensor in self.state.values():
            self._add(tensor, self._scale)

    def _add(self, tensor: torch.Tensor, scale: float) -> None:
        """Add noise of another place for each piece."""
        for piece in tensor.view(-1).split(NOISE_WEIGHTS // 2):
            room = NOISE_WEIGHTS - piece.numel()
            start = int(torch.randint(room, (1,), generator=self._generator))
            piece.add_(self._noise[start : start + piece.numel()], alpha=scale)
