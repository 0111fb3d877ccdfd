"""The trained weights of a process, and their gradients.

Parameters are the trained parameters of the policy, or their float32 masters if the model computes
in 16 bits. A shard is this rank's part of a parameter, in the same memory. If a process trains
alone, a shard is the whole parameter. Optimizers use shards. Forward and backward passes use
parameters.

On a GPU, publication copies the weights on `copy_stream` while the next gradient is computed. Every
method that changes weights waits for `copy_stream` first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from echo.core.errors import EngineError
from echo.core.units import format_bytes
from echo.engine import allocator
from echo.train.models.policy import Policy
from echo.train.optimizer import KINDS, STEP, AdamW, OptimizerSettings
from echo.train.ranks import sharding
from echo.train.step import StepError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Backup:
    """Copies of weights and moments, made before a step of several updates."""

    weights: Mapping[str, Tensor]
    """This rank's shard of each parameter, by parameter name."""
    moments: Mapping[str, Tensor]
    """The state of the optimizer, by "<parameter>/<part>" (optimizer.py)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AdapterSnapshot:
    """The weights and gradients of an adapter while another adapter is in the model."""

    weights: Mapping[str, Tensor]
    """This rank's shard of each parameter, by parameter name, float32."""
    gradients: Mapping[str, Tensor]
    """Unapplied gradients, by parameter name."""


class TrainedWeights:
    """The trained parameters of a policy and their gradients."""

    def __init__(self, policy: Policy) -> None:
        """Store the trained parameters of a policy, and this rank's shards of them."""
        compute = policy.compute
        self._policy = policy
        self._device = compute.device
        self._ranks = compute.ranks
        self._state = compute.optimizer_state
        self._trim = allocator.Trimmer()
        self.parameters = policy.parameters()
        """float32 parameters by name, sharded if there are several ranks."""
        self.shards = {
            name: sharding.local_parameter(tensor) for name, tensor in self.parameters.items()
        }
        """This rank's part of each parameter, by name."""
        is_on_gpu = self._device.type == "cuda"
        # The stream has high priority; otherwise its few kernels would wait behind the step's
        # kernels.
        self.copy_stream = torch.cuda.Stream(self._device, priority=-1) if is_on_gpu else None
        """The stream on which publication copies weights; None on a CPU."""

    def new_optimizer(self) -> AdamW:
        """Return an optimizer of these weights, with moments of 0.

        Raises:
            EngineError: if the memory is too small for the moments.
        """
        with self._memory_of_adamw():
            return KINDS[self._state](self.shards)

    @property
    def has_gradient(self) -> bool:
        """Whether any parameter has a gradient."""
        return any(tensor.grad is not None for tensor in self.parameters.values())

    def grad_norm(self) -> float:
        """Return the norm of the gradient over all parameters and ranks.

        Raises:
            StepError: if the norm is not finite.
        """
        gradients = [tensor.grad for tensor in self.parameters.values() if tensor.grad is not None]
        norm = sharding.norm_over(self._ranks, [sharding.local(each) for each in gradients])
        if not math.isfinite(norm):
            text = f"the norm of the gradient is {norm:g}"
            raise StepError(text, reason="nonfinite_gradient")
        return norm

    def update(self, optimizer: AdamW, settings: OptimizerSettings, *, step: int) -> float:
        """Clip the gradient, update the weights, and drop the gradient.

        Args:
            optimizer: an optimizer from `new_optimizer`.
            settings: settings of this update.
            step: number of the present step, from 1, for the learning rate.

        Returns:
            The norm of the gradient before it was clipped.

        Raises:
            StepError: if the norm is not finite. The gradient is dropped, and no weight has
                changed.
            EngineError: if the memory is too small for the optimizer. Weights may have changed.
        """
        try:
            norm = self.grad_norm()
            for name, shard in self.shards.items():
                gradient = self.parameters[name].grad
                shard.grad = None if gradient is None else sharding.local(gradient)
            if norm > settings.max_grad_norm:
                torch.nn.utils.clip_grads_with_norm_(
                    list(self.shards.values()),
                    settings.max_grad_norm,
                    torch.full((), norm, device=self._device),  # torch.tensor would copy and wait
                )
            self.wait_for_copies()
            with self._memory_of_adamw():
                optimizer.step(
                    learning_rate=settings.learning_rate_at(step),
                    betas=settings.betas,
                    weight_decay=settings.weight_decay,
                )
            self._policy.round()
            if self._device.type == "cuda":
                # Without this wait, the update's seconds would count for the next part of the step.
                # A wait for the whole device would also wait for the publication on the other
                # stream.
                torch.cuda.current_stream(self._device).synchronize()
        finally:
            self.drop_gradients()
        return norm

    def drop_gradients(self) -> None:
        """Drop the gradient of every parameter.

        If the process has grown, freed memory is returned to the system.
        """
        for tensor in (*self.parameters.values(), *self.shards.values()):
            tensor.grad = None
        if self._device.type == "cpu":
            self._trim()  # of activations, too: their sizes differ at each step

    def wait_for_copies(self) -> None:
        """Make the device wait for `copy_stream`; call this before weights change."""
        if self.copy_stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self.copy_stream)

    def back_up(self, optimizer: AdamW) -> Backup:
        """Copy the weights and an optimizer's moments to the host's memory."""
        weights, moments = (
            {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
            for tensors in (self.shards, optimizer.tensors())
        )
        return Backup(weights=weights, moments=moments)

    @torch.no_grad()
    def restore(self, backup: Backup, optimizer: AdamW) -> None:
        """Set the weights and an optimizer's moments to the values of a backup."""
        for name, shard in self.shards.items():
            shard.copy_(backup.weights[name])
        self._policy.round()
        optimizer.load(backup.moments)

    def snapshot_adapter(self) -> AdapterSnapshot:
        """Return the weights and gradients of the adapter in the model.

        The weights are copied. The gradients are not copied.
        """
        return AdapterSnapshot(
            weights={name: shard.detach().clone() for name, shard in self.shards.items()},
            gradients={
                name: tensor.grad
                for name, tensor in self.parameters.items()
                if tensor.grad is not None
            },
        )

    @torch.no_grad()
    def restore_adapter(self, saved: AdapterSnapshot) -> None:
        """Restore the weights and gradients that `snapshot_adapter` returned."""
        self.wait_for_copies()
        for name, shard in self.shards.items():
            shard.copy_(saved.weights[name])
            self.parameters[name].grad = saved.gradients.get(name)
        self._policy.round()

    def cut_as_parameters(self, moments: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return an optimizer's tensors, each sharded like the parameter that it belongs to.

        Args:
            moments: "<parameter>/<part>" -> tensor, as `AdamW.tensors` returns them.
        """
        found = {}
        for key, part in moments.items():
            name, _, kind = key.rpartition("/")
            found[key] = part if kind == STEP else sharding.like(part, self.parameters[name])
        return found

    @contextmanager
    def _memory_of_adamw(self) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError as error:
            num_trained = sum(shard.numel() for shard in self.shards.values())
            raise EngineError(
                f'AdamW with optimizer.state = "{self._state}" ran out of memory '
                f"beside {format_bytes(8 * num_trained)} of weights and gradients: --dry-run shows "
                "what is needed, and which setting makes it less"
            ) from error
