"""Trainers and policies of test models on the CPU, by keyword."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from echo.algo.losses import GrpoLoss
from echo.train.batch import AdvantageSettings
from echo.train.models.policy import Compute, ModelSource, Policy
from echo.train.optimizer import AdamW, OptimizerSettings
from echo.train.trainer import Trainer

CPU = torch.device("cpu")
FAST = OptimizerSettings(learning_rate=3e-4, warmup_steps=0)
TWO_UPDATES = replace(FAST, minibatches_per_step=2)


def split(model_dir: Path, options: dict[str, Any]) -> tuple[ModelSource, Compute]:
    """Take what to load, and how to compute, out of the options."""
    source = {name: options.pop(name) for name in ("tensors", "lora") if name in options}
    names = [field.name for field in fields(Compute) if field.name in options]
    compute = {name: options.pop(name) for name in names}
    return ModelSource(model_dir=model_dir, **source), Compute(**({"device": CPU} | compute))


def trainer_of(model_dir: Path, **options: Any) -> Trainer:
    source, compute = split(model_dir, options)
    return Trainer(source, compute, **options)


def fast_trainer(model_dir: Path, **options: Any) -> Trainer:
    """A trainer of plain GRPO with large updates; options replace its settings."""
    settings: dict[str, Any] = {
        "loss": GrpoLoss(),
        "optimizer": FAST,
        "advantages": AdvantageSettings(normalize_by_std=False),
    }
    return trainer_of(model_dir, **(settings | options))


def policy_of(model_dir: Path, **options: Any) -> Policy:
    source, compute = split(model_dir, options)
    return Policy(source, compute, **options)


class Descent(AdamW):
    """Replaces AdamW: subtracts the gradient from each weight."""

    def __init__(self, trainer: Trainer) -> None:
        self._shards = trainer.weights.shards

    @torch.no_grad()
    def step(self, **settings: Any) -> None:
        for shard in self._shards.values():
            if shard.grad is not None:
                shard -= shard.grad
