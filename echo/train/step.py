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
    """Finite numbers by metric; a metric without meaning in this step is absent."""
    speed: dict[str, float] = field(default_factory=dict, compare=False)
    """Times and rates, which differ when the same step is made again."""
    by_group: Mapping[int, Mismatch] = field(default_factory=dict, compare=False)
    """Group id -> difference between the worker's log-probabilities and the learner's."""
    notices: tuple[str, ...] = field(default=(), compare=False)
    """Notices for the operator, for example that memory ran out; the caller logs them."""


class StepError(DataError):
    """A batch that cannot be trained on; weights, optimizer and step count are unchanged."""

    def __init__(self, text: str, *, reason: str) -> None:
        """Take the text, and the reason for the ledger and the counters."""
        super().__init__(text)
        self.reason = reason
        """bad_group, step_error (the computation raised), nonfinite_gradient or out_of_memory."""


class MemoryShortageError(StepError):
    """A micro-batch for which the memory was too small."""

    def __init__(self, text: str, *, num_rows: int, num_tokens: int) -> None:
        """Take the size of the micro-batch; `num_tokens` counts padding as well."""
        super().__init__(text, reason="out_of_memory")
        self.num_rows, self.num_tokens = num_rows, num_tokens


class NonfiniteWeightsError(EchoError):
    """Weights that hold NaN or infinity, and are not saved."""

    def __init__(self, names: Sequence[str], *, num_tensors: int) -> None:
        """Take the names of the tensors, and the number of all tensors."""
        super().__init__(f"NaN or infinity in {len(names)} of {num_tensors} tensors: {names[0]}")
        self.names, self.num_tensors = names, num_tensors
