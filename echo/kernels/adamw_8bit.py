"""AdamW with moments of 8 bits, in one pass over the weights.

Source: Dettmers et al., 8-bit Optimizers via Block-wise Quantization, arXiv:2110.02861.

A moment is divided into blocks of BLOCK numbers. The largest magnitude in a block is the block's
scale. Each number is divided by the scale of its block and stored as an 8-bit code: the index of
the nearest of 256 code values. Code values lie in [-1, 1], or in [0, 1] for the mean of squares.
Their magnitudes span seven decades, and higher decades have more code values. Values, rounding and
the order of operations are the same as in torchao's AdamW8bit. So states of torchao can be
continued with equal results.

    m' = lerp(m, g, 1 - beta1)          v' = lerp(v, g^2, 1 - beta2)
    w' = w (1 - lr decay) - lr (m' / (1 - beta1^t)) / (sqrt(v') / sqrt(1 - beta2^t) + eps)

Here m is the mean of gradients g, v the mean of their squares, w the weights, lr the learning rate,
decay the weight decay, t the step, and beta1, beta2 and eps AdamW's constants. The weights are
updated with the unrounded moments. There are two backends: Triton on a GPU, with one launch per
tensor, and torch on any device.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

BLOCK = 64
"""Number of consecutive values of a moment that share a scale. Model widths are multiples of 64,
but often not of 256.
"""
DECADES = 7
"""Number of decades that the code values span, as in torchao."""
MIN_SCALE = 1e-12
"""Smallest scale. It allows a block of zeros to be divided by its scale."""


@dataclass(frozen=True, slots=True)
class CodedMoment:
    """A moment of AdamW, coded in 8 bits. An update changes the codes and scales in place."""

    codes: Tensor
    """uint8 code of each number, contiguous; any shape with n * BLOCK numbers."""
    scales: Tensor
    """float32 scale of each block, contiguous; any shape with n numbers."""
    is_signed: bool

    def decoded(self) -> Tensor:
        """Return the decoded moment, float32, in the shape of the codes."""
        values = code_values(is_signed=self.is_signed, device=self.codes.device)
        found = values[self.codes.view(-1, BLOCK).int()] * self.scales.view(-1, 1)
        return found.view(self.codes.shape)

    def encode(self, values: Tensor) -> None:
        """Encode `values`, float32 in the shape of the codes."""
        table = code_values(is_signed=self.is_signed, device=values.device)
        blocks = values.reshape(-1, BLOCK)
        scales = blocks.abs().amax(1).clamp(min=MIN_SCALE)
        blocks = blocks / scales[:, None]
        below = (torch.searchsorted(table, blocks, right=True) - 1).clamp(min=0)
        above = (below + 1).clamp(max=len(table) - 1)
        is_nearer = blocks - table[below] >= (table[above] - table[below]) * 0.5
        self.codes.copy_(torch.where(is_nearer, above, below).view(self.codes.shape))
        self.scales.copy_(scales.view(self.scales.shape))


@dataclass(frozen=True, slots=True)
class Update:
    """The hyperparameters of one AdamW update, rounded to float32."""

    learning_rate: float
    beta1: float
    beta2: float
    decay: float
    """Share by which weights shrink: learning rate times weight decay."""
    epsilon: float
    correction1: float
    """Correction of the mean's bias: 1 - beta1^t."""
    root_correction2: float
    """Root of the correction of the mean square's bias: sqrt(1 - beta2^t)."""

    @classmethod
    def of(
        cls,
        step: int,
        *,
        learning_rate: float,
        betas: tuple[float, float],
        weight_decay: float,
        epsilon: float,
    ) -> Update:
        """Return the hyperparameters of update number `step`, counted from 1."""
        number, rate = torch.tensor(float(step)), torch.tensor(learning_rate)
        return cls(
            learning_rate=float(rate),
            beta1=betas[0],
            beta2=betas[1],
            decay=float(rate * weight_decay),
            epsilon=epsilon,
            correction1=float(1 - betas[0] ** number),
            root_correction2=float((1 - betas[1] ** number).sqrt()),
        )


@cache
def code_values(*, is_signed: bool, device: torch.device) -> Tensor:
    """Return the 256 code values, float32, ascending."""
    parts = [torch.tensor([0.0, 1.0])]
    for decade in range(DECADES):
        num_values = 2 ** (decade if is_signed else decade + 1)
        edges = torch.linspace(0.1, 1, num_values + 1)
        values = 10.0 ** (decade - DECADES + 1) * ((edges[:-1] + edges[1:]) / 2)
        parts += [values, -values] if is_signed else [values]
    return torch.cat(parts).sort().values.to(device)


def update_weights(
    weights: Tensor,
    gradients: Tensor,
    mean: CodedMoment,
    mean_square: CodedMoment,
    update: Update,
    *,
    backend: str = "auto",
) -> None:
    """Make one AdamW update of `weights` and both moments, in place.

    Args:
        weights: float32, any shape of n * BLOCK numbers, contiguous.
        gradients: gradients in the same shape.
        mean: running mean of the gradients, changed in place.
        mean_square: running mean of the squared gradients, changed in place.
        update: the hyperparameters of this update.
        backend: "triton", "torch", or "auto": Triton on a GPU if installed, otherwise torch.
    """
    has_triton = weights.is_cuda and importlib.util.find_spec("triton") is not None
    if backend == "triton" or (backend == "auto" and has_triton):
        from echo.kernels.triton_adamw_8bit import launch_update

        moments, device = (mean, mean_square), weights.device
        coded, squared = ((moment.codes, moment.scales) for moment in moments)
        first, second = (code_values(is_signed=m.is_signed, device=device) for m in moments)
        numbers = (
            update.learning_rate,
            1 - update.beta1,
            1 - update.beta2,
            update.decay,
            update.epsilon,
            update.correction1,
            update.root_correction2,
            MIN_SCALE,
        )
        tables = (first, second)
        launch_update(weights, gradients.contiguous(), coded, squared, tables, numbers, block=BLOCK)
        return
    weights.sub_(update.decay * weights)
    means = torch.lerp(mean.decoded(), gradients, 1 - update.beta1)
    squares = torch.lerp(mean_square.decoded(), gradients.square(), 1 - update.beta2)
    mean.encode(means)
    mean_square.encode(squares)
    divisor = squares.sqrt() / update.root_correction2 + update.epsilon
    weights.sub_(update.learning_rate * (means / update.correction1) / divisor)
