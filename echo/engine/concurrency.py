"""How many rollouts an engine has under way at one time, once memory has run out under more.

What one rollout needs is estimated before it begins, and estimates are wrong where others use the
same memory, or where kernels take more than they should. So running out of memory ends nothing by
itself: what was under way goes on, or begins anew, with half as many at one time, and that many it
stays. Only where a single rollout does not fit the engine stops, with the numbers.
"""

from __future__ import annotations

import logging

from echo.core.errors import EngineError

log = logging.getLogger(__name__)

COUNT = "engine/out_of_memory"
"""Under which it is counted, here and in metrics.jsonl."""

_SIGNS = ("memoryerror", "out of memory", "can't allocate memory", "alloc_failed", "bad_alloc")
"""How PyTorch, CUDA's libraries, Python and C++ say that memory has run out."""


def describe(error: BaseException) -> str:
    """Return the kind of an error and its first line."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"


def is_out_of_memory(what: BaseException | str) -> bool:
    """Return whether an error, or what was told of one, says that memory has run out."""
    text = what if isinstance(what, str) else f"{type(what).__name__}: {what}"
    return any(sign in text.lower() for sign in _SIGNS)


class Concurrency:
    """The most rollouts at one time that memory has been seen to hold, or may hold."""

    def __init__(self) -> None:
        """Start without a limit."""
        self.limit: int | None = None
        """Rollouts at one time; None while memory has never run out."""
        self._num_failures = self._num_told = 0

    def bounded(self, number: int) -> int:
        """Return `number`, or the limit where that is lower."""
        return number if self.limit is None else min(number, self.limit)

    def halve(self, num_rollouts: int, *, why: str, numbers: str) -> None:
        """Lower the limit to half of what was too much.

        Args:
            num_rollouts: how many were under way when memory ran out.
            why: the error.
            numbers: what one of them needs and what there is.

        Raises:
            EngineError: if it was one alone.
        """
        self._num_failures += 1
        num_rollouts = self.bounded(num_rollouts)
        if num_rollouts <= 1:
            raise EngineError(
                f"out of memory with a single rollout under way: {why}; {numbers}. Lower "
                "sampling.max_completion_tokens on the learner, use a smaller worker.dtype, end "
                "what else uses this memory, or give this worker a machine with more"
            )
        self.limit = num_rollouts // 2
        log.warning(
            "out of memory with %d rollouts under way (%s; %s); from now on %d at one time",
            num_rollouts,
            why,
            numbers,
            self.limit,
        )

    def take_counts(self) -> dict[str, int]:
        """Return how often memory ran out since this was last asked."""
        number = self._num_failures  # which the engine's thread may raise just now
        number, self._num_told = number - self._num_told, number
        return {COUNT: number} if number else {}
