"""Outcome of a training step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from echo.algo.diagnostics import Mismatch
from echo.core.errors import DataError, EchoError


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Report of one step."""

    metrics: dict[str, float]
    """Finite numbers under the field's names; a metric without meaning in this step is absent."""
    speed: dict[str, float] = field(default_factory=dict, compare=False)
    """Times and rates, which differ from one run of the same step to the next."""
    by_group: Mapping[int, Mismatch] = field(default_factory=dict, compare=False)
    """Group id -> how what its worker has stated differs from the learner's own scores."""
    notices: tuple[str, ...] = field(default=(), compare=False)
    """Notices for the operator: that the memory ran short. The caller of steps saves."""


class StepError(DataError):
    """A batch that no step can be made of; weights, optimizer and step count are as before."""

    def __init__(self, text: str, *, reason: str) -> None:
        """Say what happened, and name it for the ledger and the counters."""
        super().__init__(text)
        self.reason = reason
        """bad_group, step_error (the computation raised), nonfinite_gradient or out_of_memory."""


class MemoryShortageError(StepError):
    """A micro-batch that the memory did not hold."""

    def __init__(self, text: str, *, num_rows: int, num_tokens: int) -> None:
        """Say what it had; padding is counted, too."""
        super().__init__(text, reason="out_of_memory")
        self.num_rows, self.num_tokens = num_rows, num_tokens


class NonfiniteWeightsError(EchoError):
    """Weights that hold NaN or infinity; nothing is saved of them."""

    def __init__(self, names: Sequence[str], *, num_tensors: int) -> None:
        """Name those that do, of `num_weights`."""
        super().__init__(f"NaN or infinity in {len(names)} of {num_tensors} tensors: {names[0]}")
        self.names, self.num_tensors = names, num_tensors
