"""A loss that fails on purpose, for a test of what the learner makes of a step that does."""

from __future__ import annotations

from dataclasses import replace

from echo.algo.loss import LossInputs, LossOutput
from echo.algo.losses import GrpoLoss


def overflowing(inputs: LossInputs) -> LossOutput:
    """GRPO, but for a micro-batch with an advantage above 2."""
    output = GrpoLoss()(inputs)
    if float(inputs.advantages.abs().max()) <= 2.0:
        return output
    return replace(output, loss=output.loss * float("inf"))
