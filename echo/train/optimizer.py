"""AdamW with moments in one of three forms.

    float32     torch's fused AdamW: 8 bytes per parameter, on the weights' device
    8bit        codes of 8 bits, and a scale for each block of codes; 2.1 bytes
    offloaded   torch's fused AdamW on the CPU: 8 bytes in the host's memory, none on the GPU.
                Each step copies weights and gradients to the host, and weights back.

An optimizer gets this process's shard of each parameter as a plain tensor, with its clipped
gradient. So the code does not depend on the number of processes.

A block of 8-bit moments lies within one row of the parameter. So codes and scales can be divided by
rows among any number of processes, and training continues bit by bit. If a row is not a whole
number of blocks (norms, biases), the moments are float32. Each kind of optimizer can continue the
state of another kind.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from echo.core.errors import DataError
from echo.kernels.adamw_8bit import BLOCK, CodedMoment, Update, update_weights

OptimizerState = Literal["float32", "8bit", "offloaded"]
LrSchedule = Literal["constant", "linear", "cosine"]

EPSILON = 1e-8
"""Number added to the root of the mean square, torch's default."""

MOMENTS = ("exp_avg", "exp_avg_sq")
"""torch's names of the running means of the gradient and of the gradient's square."""
CODES, SCALES = "_codes", "_scales"
"""Suffixes of the two tensors of an 8-bit moment: its codes and its scales."""
STEP = "step"
"""Suffix of the tensor that counts a parameter's updates. AdamW's bias correction needs the count.
"""
PARTS = (*MOMENTS, *(moment + part for moment in MOMENTS for part in (CODES, SCALES)), STEP)
"""Suffixes of the tensors in a parameter's state. The tensor STEP, the last, has one number. All
other tensors have the parameter's number of rows.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """Settings of AdamW. The learning rate rises linearly and then follows its schedule."""

    learning_rate: float = 1e-6
    """The largest learning rate, reached after the warm-up."""
    warmup_steps: int = 10
    """Number of steps over which the learning rate rises. Step n, counted from 1, has n /
    warmup_steps of the full rate.
    """
    lr_schedule: LrSchedule = "constant"
    """The learning rate after the warm-up: constant, or falling to 0 after `num_steps`."""
    num_steps: int = 0
    """Number of steps of the whole run, for a falling schedule."""
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of two running means: of the gradient, and of the gradient's square."""
    max_grad_norm: float = 1.0
    """Bound on the norm of the whole gradient; infinity for no clipping."""
    minibatches_per_step: int = 1
    """Number of updates in a step, each on an equal share of the groups. `optim_step` always makes
    one update.
    """

    def __post_init__(self) -> None:
        if self.lr_schedule != "constant" and self.num_steps < 1:
            raise ValueError(f'lr_schedule = "{self.lr_schedule}" needs num_steps, where it ends')

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of step number `step`, counted from 1.

        The first step after the warm-up has the full rate, and the last step a rate above 0.
        """
        num_over = step - 1 - self.warmup_steps
        if num_over < 0:
            return self.learning_rate * step / self.warmup_steps
        if self.lr_schedule == "constant":
            return self.learning_rate
        progress = min(1.0, num_over / max(1, self.num_steps - self.warmup_steps))
        if self.lr_schedule == "linear":
            return self.learning_rate * (1.0 - progress)
        return self.learning_rate * (1.0 + math.cos(math.pi * progress)) / 2


class AdamW:
    """torch's fused AdamW, with float32 moments on the weights' device."""

    def __init__(self, shards: Mapping[str, Tensor]) -> None:
        """Allocate the moments, which start at 0.

        Args:
            shards: this process's part of each parameter, changed in place by a step. Shards may be
                empty.

        Raises:
            torch.OutOfMemoryError: if the memory is too small for the moments.
        """
        self._shards = dict(shards)
        self._moments = {name: self._new(shard.detach()) for name, shard in shards.items()}
        self._has_begun = False

    def _new(self, shard: Tensor) -> dict[str, Tensor]:
        return {key: torch.zeros_like(shard) for key in MOMENTS} | {STEP: shard.new_zeros(())}

    @torch.no_grad()
    def step(
        self, *, learning_rate: float, betas: tuple[float, float], weight_decay: float
    ) -> None:
        """Make one update of all weights that have a gradient."""
        self._has_begun = True
        held = self._with_gradient()
        _update(
            list(held.values()),
            [shard.grad for shard in held.values() if shard.grad is not None],
            [self._moments[name] for name in held],
            learning_rate=learning_rate,
            betas=betas,
            weight_decay=weight_decay,
        )

    def _with_gradient(self) -> dict[str, Tensor]:
        return {
            name: shard
            for name, shard in self._shards.items()
            if shard.grad is not None and shard.numel()
        }

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the state by "<parameter>/<part>", without copying them.

        Before the first step the result is empty.
        """
        return self._tensors() if self._has_begun else {}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore a state from the `tensors` of an optimizer, perhaps of a different class.

        An empty mapping restores the state before the first step.

        Raises:
            DataError: if a tensor fits no parameter; the state is undefined then.
        """
        own = self._tensors()
        for value in own.values():
            value.zero_()
        held = {key: value for key, value in tensors.items() if not self._is_empty(key)}
        for key, value in _converted(held, own).items():
            if key not in own or own[key].shape != value.shape:
                raise DataError(
                    f"optimizer state {key} of shape {list(value.shape)} fits no parameter of this "
                    "model: it belongs to another one"
                )
            own[key].copy_(value)
        self._has_begun = bool(tensors)

    def _tensors(self) -> dict[str, Tensor]:
        return {
            f"{name}/{key}": value
            for name, moments in self._moments.items()
            for key, value in moments.items()
            if key != STEP or not self._is_empty(f"{name}/{key}")  # an empty shard has no updates
        }

    def _is_empty(self, key: str) -> bool:
        shard = self._shards.get(key.rpartition("/")[0])
        return shard is not None and not shard.numel()


def _update(
    weights: list[Tensor],
    gradients: list[Tensor],
    moments: Sequence[Mapping[str, Tensor]],
    *,
    learning_rate: float,
    betas: tuple[float, float],
    weight_decay: float,
) -> None:
    adamw(
        weights,
        gradients,
        [each["exp_avg"] for each in moments],
        [each["exp_avg_sq"] for each in moments],
        [],
        [each[STEP] for each in moments],
        fused=True,
        amsgrad=False,
        beta1=betas[0],
        beta2=betas[1],
        lr=learning_rate,
        weight_decay=weight_decay,
        eps=EPSILON,
        maximize=False,
    )


class OffloadedAdamW(AdamW):
    """torch's fused AdamW on the CPU, for weights and gradients on a GPU.

    The moments are in the host's memory.
    """

    def __init__(self, shards: Mapping[str, Tensor]) -> None:
        """Allocate, on the host, the moments and two buffers of the largest shard's size."""
        super().__init__(shards)
        largest = max((shard.numel() for shard in shards.values()), default=0)
        is_pinned = any(shard.is_cuda for shard in shards.values())  # pinned memory copies faster
        self._staging = torch.empty(2, largest, device="cpu", pin_memory=is_pinned)

    def _new(self, shard: Tensor) -> dict[str, Tensor]:
        return super()._new(torch.empty_like(shard, device="cpu"))

    @torch.no_grad()
    def step(
        self, *, learning_rate: float, betas: tuple[float, float], weight_decay: float
    ) -> None:
        """Make one update of the weights on the GPU, parameter by parameter."""
        self._has_begun = True
        for name, shard in self._with_gradient().items():
            weight, gradient = self._staging[:, : shard.numel()].view(2, *shard.shape)
            assert shard.grad is not None, "or it is not among them"
            weight.copy_(shard)
            gradient.copy_(shard.grad)
            _update(
                [weight],
                [gradient],
                [self._moments[name]],
                learning_rate=learning_rate,
                betas=betas,
                weight_decay=weight_decay,
            )
            shard.copy_(weight)


class EightBitAdamW(AdamW):
    """AdamW whose moments are codes of 8 bits (kernels/adamw_8bit.py)."""

    def __init__(self, shards: Mapping[str, Tensor]) -> None:
        """Allocate the moments, which start at 0.

        Raises:
            torch.OutOfMemoryError: if the memory is too small for the moments.
        """
        super().__init__(shards)
        self._num_updates = dict.fromkeys(self._shards, 0)

    def _new(self, shard: Tensor) -> dict[str, Tensor]:
        row = math.prod(shard.shape[1:]) if shard.dim() > 1 else 1
        if row % BLOCK:
            return super()._new(shard)
        parts = {STEP: shard.new_zeros(())}
        for key in MOMENTS:
            parts[key + CODES] = torch.zeros_like(shard, dtype=torch.uint8)
            parts[key + SCALES] = shard.new_zeros(shard.shape[0], row // BLOCK)
        return parts

    @torch.no_grad()
    def step(
        self, *, learning_rate: float, betas: tuple[float, float], weight_decay: float
    ) -> None:
        """Make one update of all weights that have a gradient."""
        self._has_begun = True
        options: dict[str, Any] = {
            "learning_rate": learning_rate, "betas": betas, "weight_decay": weight_decay,
        }  # fmt: skip
        held = self._with_gradient()
        plain = [name for name in held if MOMENTS[0] in self._moments[name]]
        gradients = [shard.grad for shard in held.values() if shard.grad is not None]
        by_name = dict(zip(held, gradients, strict=True))
        if plain:
            _update(
                [held[name] for name in plain],
                [by_name[name] for name in plain],
                [self._moments[name] for name in plain],
                **options,
            )
        coded = sorted(held.keys() - set(plain))
        if coded:
            # One launch for all tensors together.
            torch._foreach_add_([self._moments[name][STEP] for name in coded], 1.0)
        updates: dict[int, Update] = {}
        for name in coded:
            parts = self._moments[name]
            step = self._num_updates[name] = self._num_updates[name] + 1
            if step not in updates:
                updates[step] = Update.of(step, epsilon=EPSILON, **options)
            mean, square = (_coded(k, parts[k + CODES], parts[k + SCALES]) for k in MOMENTS)
            update_weights(held[name].detach(), by_name[name], mean, square, updates[step])

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore a state from the `tensors` of an optimizer, perhaps of a different class.

        An empty mapping restores the state before the first step.

        Raises:
            DataError: if a tensor fits no parameter; the state is undefined then.
        """
        super().load(tensors)
        self._num_updates = {name: int(parts[STEP]) for name, parts in self._moments.items()}


def _coded(moment: str, codes: Tensor, scales: Tensor) -> CodedMoment:
    return CodedMoment(codes, scales, is_signed=moment == MOMENTS[0])


def _converted(tensors: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for key, value in tensors.items():
        plain = key.removesuffix(CODES).removesuffix(SCALES)
        moment = plain.rpartition("/")[2]
        if key in own:
            found[key] = value
        elif key + CODES in own and own[key + CODES].shape == value.shape:
            codes = found[key + CODES] = torch.empty_like(value, dtype=torch.uint8)
            scales = torch.empty_like(own[key + SCALES], device=value.device)
            found[key + SCALES] = scales
            _coded(moment, codes, scales).encode(value)
        elif key.endswith(CODES):
            found[plain] = _coded(moment, value, tensors[plain + SCALES]).decoded()
        elif plain not in own:
            found[key] = value
    return found


KINDS: Mapping[OptimizerState, type[AdamW]] = {
    "float32": AdamW,
    "8bit": EightBitAdamW,
    "offloaded": OffloadedAdamW,
}
