"""Outcome of a training step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from echo.algo.diagnostics import Mismatch
from echo.core.errors import DataError, EchoError


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The metrics of one training step, and its notices for the operator."""

    metrics: dict[str, float]
    """Finite numbers by metric. Metrics without a value in this step are left out."""
    speed: dict[str, float] = field(default_factory=dict, compare=False)
    """Metrics of time and speed. Unlike `metrics`, these differ if the step is repeated."""
    by_group: Mapping[int, Mismatch] = field(default_factory=dict, compare=False)
    """Group id -> mismatch between the worker's and the learner's log-probabilities."""
    notices: tuple[str, ...] = field(default=(), compare=False)
    """Notices for the operator, to be logged by the caller; for example that memory ran out."""


class StepError(DataError):
    """The error for a batch that cannot be trained on.

    The trainer's state is unchanged.
    """

    def __init__(self, text: str, *, reason: str) -> None:
        """Store the message, and a reason for ledger and counters."""
        super().__init__(text)
        self.reason = reason
        """Name of the reason: bad_group, step_error (the computation raised), nonfinite_gradient or
        out_of_memory.
        """


class MemoryShortageError(StepError):
    """The error for a micro-batch that was too large for the memory."""

    def __init__(self, text: str, *, num_rows: int, num_tokens: int) -> None:
        """Store the numbers of rows and tokens of the micro-batch; tokens include padding."""
        super().__init__(text, reason="out_of_memory")
        self.num_rows, self.num_tokens = num_rows, num_tokens


class NonfiniteWeightsError(EchoError):
    """The error for weights that contain NaN or infinity. Such weights are not saved."""

    def __init__(self, names: Sequence[str], *, num_tensors: int) -> None:
        super().__init__(f"NaN or infinity in {len(names)} of {num_tensors} tensors: {names[0]}")
        self.names, self.num_tensors = names, num_tensors
