"""Passes of rows through the models. A round of a pass is one micro-batch on each rank.

Several ranks make a pass together (ranks/sharding.py). In a round all ranks make the same calls to
a model in the same order, even a rank whose micro-batch has failed or is empty. A rank that runs
out of memory ends the job.

If a process that trains alone runs out of memory, it repeats the pass in smaller micro-batches. If
a single rollout is too large, the batch is refused.

An error in a computation on a batch becomes a `StepError`. Then no weight has changed, and the run
can go on. `FATAL_ERRORS` are raised unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TypeVar

import torch

from echo.algo.batching import MicroBatch, TrainingRow
from echo.core.errors import ConfigError, DataError
from echo.train.models.models import Models
from echo.train.models.policy import Compute
from echo.train.speed import Speedometer
from echo.train.step import MemoryShortageError, StepError

T = TypeVar("T")

MakeRound = Callable[[Sequence[int], MicroBatch], StepError | None]
"""A function that puts a micro-batch through a model. Its arguments are the indices of this rank's
rows (none for an empty micro-batch), and the micro-batch on the device. It returns an error of this
rank, or None.
"""

FATAL_ERRORS = (ConfigError, MemoryError, torch.OutOfMemoryError, torch.AcceleratorError)
"""Errors of the settings, the machine or the device, which every batch would cause."""


@contextmanager
def as_step_errors() -> Iterator[None]:
    """Raise a `StepError` in place of a non-fatal error of the `with` block."""
    try:
        yield
    except StepError:
        raise
    except DataError as error:
        raise StepError(str(error), reason="bad_group") from error
    except FATAL_ERRORS:
        raise
    except Exception as error:
        # Any type of error: the loss may be the user's code.
        text = f"the step raised {type(error).__name__}: {error}"
        raise StepError(text, reason="step_error") from error


def make_rounds(
    micro_batches: Iterable[tuple[Sequence[int], MicroBatch]],
    make_round: MakeRound,
    compute: Compute,
) -> None:
    """Make all rounds of one pass, on all ranks together.

    Args:
        micro_batches: this rank's micro-batches on the CPU, each with the indices of its rows.
        make_round: puts one micro-batch through a model.
        compute: the device and the ranks.

    Raises:
        MemoryShortageError: if this process trains alone, and its memory was too small.
        StepError: on all ranks, if `make_round` returned an error on any rank.
        torch.OutOfMemoryError: if there are several ranks, and this rank's memory was too small.
    """
    ranks, failure = compute.ranks, None
    for indices, micro in micro_batches:
        try:
            failure = make_round(indices, micro.to(compute.device)) or failure
            continue
        except torch.OutOfMemoryError as error:
            if not ranks.is_alone:
                raise
            shortage = MemoryShortageError(
                str(error).partition("\n")[0],
                num_rows=len(indices),
                num_tokens=micro.input_ids.numel(),
            )
        # Raised out here: within `except`, torch's error keeps its frames and tensors in memory.
        raise shortage
    ranks.raise_together(failure)


class Passes:
    """Makes passes. If memory is too small, a pass is repeated in smaller micro-batches."""

    def __init__(self, models: Models, speed: Speedometer) -> None:
        self._models = models
        self._speed = speed
        self._notices: list[str] = []

    def make(
        self,
        rows: Sequence[TrainingRow],
        make_pass: Callable[[], T],
        *,
        step: int,
        can_begin_again: bool = True,
    ) -> T:
        """Make a pass; repeat the pass in smaller micro-batches while memory is too small.

        Args:
            rows: the rows of the pass.
            make_pass: makes the pass once.
            step: number of the present step, from 1, for the notice to the operator.
            can_begin_again: whether the pass may be repeated; False if gradients of earlier calls
                would be lost.

        Returns:
            The result of `make_pass`.

        Raises:
            StepError: if the pass fails, or cannot be repeated.
        """
        # An error on one of several ranks is not the batch's fault, and ends the job.
        guard = as_step_errors if self._models.compute.ranks.is_alone else nullcontext
        while True:
            try:
                with guard():
                    return make_pass()
            except MemoryShortageError as error:
                shortage = error
            self._take_smaller_micro_batches(rows, shortage, step=step)
            if not can_begin_again:
                text = "the gradients of earlier calls were lost when the memory ran out"
                raise StepError(text, reason="out_of_memory")

    def take_notices(self) -> tuple[str, ...]:
        """Return all notices for the operator since the last call."""
        notices, self._notices = tuple(self._notices), []
        return notices

    def _take_smaller_micro_batches(
        self, rows: Sequence[TrainingRow], shortage: MemoryShortageError, *, step: int
    ) -> None:
        """Limit micro-batches to half the tokens of the one that was too large, and add a notice.

        Raises:
            StepError: if the micro-batch cannot be divided.
        """
        num_tokens = shortage.num_tokens
        size = sum(row.num_inputs for row in rows)
        what = (
            f"step {step}, {len(rows)} rollouts of {size} tokens, ran out of "
            f"memory with {num_tokens} tokens in a micro-batch"
        )
        compute = self._models.compute
        if shortage.num_rows == 1 or num_tokens > compute.micro_batch_tokens:
            text = (
                f"{what}, which cannot be cut: set learner.gradient_checkpointing = true, or lower "
                f"sampling.max_completion_tokens ({shortage})"
            )
            raise StepError(text, reason="out_of_memory")
        smaller = num_tokens // 2
        self._models.limit_micro_batches(smaller)
        self._speed.micro_batch_tokens = smaller
        self._notices.append(
            f"{what}; it goes on with learner.micro_batch_tokens = {smaller}: set that, or "
            f"learner.gradient_checkpointing = true, before the next start ({shortage})"
        )
        if compute.device.type == "cuda":
            torch.cuda.empty_cache()  # other programs may need memory that holds no tensor here
