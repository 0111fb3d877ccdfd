"""Losses that fail on purpose, for tests of what the learner makes of a step that does."""

from __future__ import annotations

from dataclasses import replace

from echo.algo.loss import LossInputs, LossOutput
from echo.algo.losses import GrpoLoss


def failing(inputs: LossInputs, *, above: float = 2.0, how: str = "raise") -> LossOutput:
    """GRPO, but for a micro-batch with an advantage above a limit."""
    output = GrpoLoss()(inputs)
    if float(inputs.advantages.abs().max()) <= above:
        return output
    if how == "raise":
        raise OverflowError("this advantage is too much")
    return replace(output, loss=output.loss * float("inf"))
