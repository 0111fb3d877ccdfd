"""What a trainer is told of its optimizer and of the policy that it is pulled towards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from echo.engine.lora import Lora


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """AdamW with a linear warm-up to a constant learning rate."""

    learning_rate: float = 1e-6
    warmup_steps: int = 10
    """Steps until the full learning rate; step n of them, from 1, uses n / warmup_steps of it."""
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first moment and of the second."""
    max_grad_norm: float = 1.0
    """Bound on the norm of the whole gradient; infinity for none."""

    def learning_rate_at(self, step: int) -> float:
        """Return the learning rate of the step that makes version `step`, from 1."""
        return self.learning_rate * min(1.0, step / max(1, self.warmup_steps))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReferenceModel:
    """Where the frozen reference policy comes from; it never changes, so no state holds it."""

    model_dir: Path
    """Hugging Face directory."""
    tensors: Mapping[str, Tensor] | None = None
    """Weights by name instead of the directory's; with `lora` those of its adapter."""
    lora: Lora | None = None
    """The adapter, and its base in place of the directory, where the policy has one."""
