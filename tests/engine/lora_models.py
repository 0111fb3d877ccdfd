"""A base model with an adapter that has been trained for a while, for the tests of engines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from echo.engine.lora import Lora
from echo.engine.weights import publish_image, tensors_from_image
from echo.train.models.policy import Policy
from tests.train.trainers import policy_of


def adapted_policy(base_dir: Path, *, seed: int = 0, rank: int = 4) -> tuple[Policy, Lora]:
    """The learner's model, its adapter far from nothing."""
    lora = Lora(base_dir=base_dir, rank=rank, alpha=2 * rank)
    policy = policy_of(base_dir, lora=lora)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in policy.tensors().values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.2)
    return policy, lora


def published(policy: Policy) -> Mapping[str, Tensor]:
    """The adapter as it arrives at a worker: views of a version's image."""
    specs, image = publish_image(policy.tensors(), "float32")
    return tensors_from_image(specs, memoryview(image).toreadonly())
