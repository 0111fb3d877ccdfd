"""Several named adapters on one base model. The model holds one adapter at a time.

`use` puts another adapter into the model. The weights, unapplied gradients, moments, settings and
counts of all other adapters are stored in `Adapters`. So no other part of a trainer depends on the
number of adapters. All adapters have the same shape, and share the trainer's loss, temperature,
advantages and reference.

A trainer of all weights has no adapters. Then `Adapters.progress` is the progress of all weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from echo.core.errors import ConfigError, DataError
from echo.engine.lora import draw_adapter
from echo.train.models.policy import Policy
from echo.train.optimizer import AdamW, OptimizerSettings
from echo.train.ranks import sharding
from echo.train.weights import AdapterSnapshot, TrainedWeights


@dataclass(slots=True, kw_only=True, eq=False)
class TrainingProgress:
    """The optimizer, settings and counts of one adapter, or of a model without adapters."""

    optimizer: AdamW
    """The optimizer with its moments."""
    settings: OptimizerSettings
    """Settings of the optimizer's updates in a step."""
    step_count: int = 0
    """Number of batches that the training has consumed."""
    num_skipped_nonfinite: int = 0
    """Number of batches refused because of a loss or gradient that was not finite."""


class Adapters:
    """The named adapters of a trainer. One adapter is in the model, and all others are stored."""

    def __init__(
        self,
        policy: Policy,
        weights: TrainedWeights,
        *,
        name: str | None,
        settings: OptimizerSettings,
    ) -> None:
        """Start with a new optimizer for the trained weights.

        Args:
            policy: the model.
            weights: its trained weights.
            name: name of the adapter in the model; None if all weights are trained.
            settings: settings of the updates in a step.

        Raises:
            EngineError: if the memory is too small for the moments.
        """
        self._policy = policy
        self._weights = weights
        self.in_use = name
        """Name of the adapter in use; None if all weights are trained."""
        self.progress = TrainingProgress(optimizer=weights.new_optimizer(), settings=settings)
        """Progress of the adapter in use."""
        self._others: dict[str, tuple[AdapterSnapshot, TrainingProgress]] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all adapters, sorted; empty if all weights are trained."""
        return () if self.in_use is None else tuple(sorted({self.in_use, *self._others}))

    def add(
        self,
        name: str,
        *,
        optimizer: OptimizerSettings,
        tensors: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Add an adapter of the same shape as the adapter in use.

        The model keeps the adapter in use.

        Args:
            name: the adapter's name, of letters, digits, "_", "-" and ".".
            optimizer: settings of the adapter's updates in a step.
            tensors: whole tensors to start from; None for a new adapter that leaves the model's
                output unchanged.

        Raises:
            ConfigError: if there is an adapter of this name already, or all weights are trained.
            DataError: if the tensors belong to an adapter of another shape.
            EngineError: if the memory is too small for the adapter's moments.
        """
        if self.in_use is None:
            raise _no_adapters(name)
        if not re.fullmatch(r"\w[\w.-]*", name, re.ASCII):
            raise ConfigError(
                f'adapter {name!r}: a name is of letters, digits, "_", "-" and ".", and begins '
                "with none of the last two"
            )
        if name in self.names:
            raise ConfigError(
                f"adapter {name!r}: there is one already; use() it, or take another name"
            )
        own = self._policy.tensors()
        if tensors is None:
            shapes = {key: tensor.shape for key, tensor in own.items()}
            tensors = draw_adapter(shapes, seed=self._policy.compute.seed + len(self.names))
        try:
            self._policy.check(tensors)
        except DataError as error:
            raise DataError(
                f"adapter {name!r}: {error}; the adapters of a trainer have one shape, which its "
                "ModelSource.lora says: another shape needs another trainer"
            ) from error
        weights = {
            key: torch.empty_like(shard.detach()) for key, shard in self._weights.shards.items()
        }
        for key, part in weights.items():
            sharding.copy_local(sharding.like(part, own[key]), tensors[key])
        moments = self._weights.new_optimizer()
        self._others[name] = (
            AdapterSnapshot(weights=weights, gradients={}),
            TrainingProgress(optimizer=moments, settings=optimizer),
        )

    def use(self, name: str) -> None:
        """Put an adapter into the model, and store the adapter that was in use.

        An unapplied gradient is stored together with its adapter.

        Raises:
            ConfigError: if there is no adapter of this name.
        """
        if name == self.in_use:
            return
        if self.in_use is None:
            raise _no_adapters(name)
        if name not in self._others:
            raise ConfigError(
                f"adapter {name!r}: this trainer has {', '.join(self.names)}; adapters.add() "
                "adds another one"
            )
        own = (self._weights.snapshot_adapter(), self.progress)
        other, self.progress = self._others.pop(name)
        self._others[self.in_use] = own
        self.in_use = name
        self._weights.restore_adapter(other)

    def check_gradient(self) -> None:
        """Raise an error if the adapter in use has no gradient, but another adapter has one.

        Raises:
            ConfigError: if only stored adapters have a gradient. The message names these adapters.
        """
        waiting = sorted(name for name, (aside, _) in self._others.items() if aside.gradients)
        if waiting and not self._weights.has_gradient:
            raise ConfigError(
                f"optim_step: the adapter in use, {self.in_use!r}, has no gradient, and one of "
                f"{', '.join(waiting)} waits: use() that one before"
            )

    def for_each(self, act: Callable[[str], None]) -> None:
        """Call `act` with the name of each adapter, while that adapter is in use."""
        before = self.in_use
        assert before is not None, "all weights are trained, and there is no adapter"
        try:
            for name in self.names:
                self.use(name)
                act(name)
        finally:
            self.use(before)


def _no_adapters(name: str) -> ConfigError:
    return ConfigError(
        f"adapter {name!r}: this trainer trains all weights; one whose ModelSource has a lora "
        "trains adapters"
    )
