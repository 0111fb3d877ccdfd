"""Tasks and a loss that do not depend on the model, for tests of what the learner makes of them."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace

from echo.algo.loss import LossInputs, LossOutput
from echo.algo.losses import GrpoLoss
from echo.tasks.task import Example, Task


class InTurn(Task):
    """Rewards of each prompt are 1 and 0 in turn, however many others are scored meanwhile."""

    is_bounded = True

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_scored: Counter[int] = Counter()

    def example(self, index: int, *, split: str) -> Example:
        return Example(index=index, split=split, prompt=f"{index % 10}+1=")

    def reward(self, example: Example, completion: str) -> float:
        with self._lock:
            self._num_scored[example.index] += 1
            return float(self._num_scored[example.index] % 2)


class InParts(InTurn):
    """The same in two parts, of which the second costs a hundredth for each character."""

    def reward(self, example: Example, completion: str) -> dict[str, float]:  # type: ignore[override]
        return {"turn": super().reward(example, completion), "length": -len(completion) / 100}


class RightLater(InTurn):
    """Rewards differ for the first prompts; all others are right whatever is answered."""

    def reward(self, example: Example, completion: str) -> float:
        if example.split != "train" or example.index >= 6:
            return 1.0
        return super().reward(example, completion)


class OneLarge(InTurn):
    """Rewards differ within every group; one group's are far larger than those of the others."""

    def reward(self, example: Example, completion: str) -> float:
        value = super().reward(example, completion)
        is_large = example.split == "train" and example.index == 1
        return 100.0 * (0.5 + 0.5 * value) if is_large else value


class Raises(InTurn):
    """No reward can be had."""

    def reward(self, example: Example, completion: str) -> float:
        raise KeyError("answer")


def overflowing(inputs: LossInputs) -> LossOutput:
    """GRPO, but for a micro-batch with an advantage above 2."""
    output = GrpoLoss()(inputs)
    if float(inputs.advantages.abs().max()) <= 2.0:
        return output
    return replace(output, loss=output.loss * float("inf"))
