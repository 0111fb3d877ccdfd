"""What a rollout engine is: weights in, token ids with log-probabilities out.

An engine is driven from one thread and knows nothing of networks, versions or rewards. Weights
arrive only through `load`, between calls of `generate`.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn: the same for every request of a call."""

    temperature: float
    """Divides the logits; above 0."""
    top_p: float
    """Keep the fewest most likely tokens that reach this probability; 1 keeps all."""
    top_k: int
    """Keep this many most likely tokens (more where they tie), before top_p; 0 keeps all."""
    max_completion_tokens: int
    """Tokens after which a completion ends with "length", at least 1."""
    stop_ids: tuple[int, ...]
    """Token ids that end a completion with "stop"; the id is part of the completion."""
    greedy: bool = False
    """Take the most likely token. Temperature, top_p and top_k then play no part."""

    def __post_init__(self) -> None:
        checks = {
            "temperature": (self.temperature > 0, "above 0; for the most likely token use greedy"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "top_k": (self.top_k >= 0, "at least 0 (0 = off)"),
            "max_completion_tokens": (self.max_completion_tokens >= 1, "at least 1"),
        }
        for name, (is_valid, rule) in checks.items():
            if not is_valid:
                raise ValueError(f"sampling.{name} is {getattr(self, name)}, must be {rule}")


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One completion to sample."""

    request_id: str
    prompt_ids: npt.NDArray[np.int32]
    """[P] token ids, at least one."""
    seed: int
    """Fixes the random choices of this request, whatever else is in the batch."""


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """What was sampled for one request."""

    request_id: str
    token_ids: npt.NDArray[np.int32]
    """[T] sampled ids, the stop token included; empty only after an abort."""
    logprobs: npt.NDArray[np.float32]
    """[T] natural log-probability of each id under the distribution it was drawn from: after
    temperature, top_k and top_p, renormalised. When greedy, under the plain softmax of the
    logits (temperature 1), since the choice itself was certain."""
    finish_reason: FinishReason
    """"stop" (a stop id), "length" (the limit, or the end of the model's window), "abort"."""


class Engine(abc.ABC):
    """Sample completions from a causal language model."""

    @abc.abstractmethod
    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Install weights: all of them, or none if any does not fit.

        Args:
            tensors: by name; tied ones once, under either name. They are copied, and cast to the
                engine's dtype.

        Raises:
            EngineError: listing the names and shapes that do not belong to this model.
        """

    @abc.abstractmethod
    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        *,
        should_stop: Callable[[], bool],
    ) -> list[Completion]:
        """Sample one completion for each request, in their order.

        Args:
            requests: any number; they run in waves where memory does not hold all at once.
            sampling: how.
            should_stop: asked before every token. Once it returns True, unfinished completions
                are returned as they are, with the reason "abort".

        Raises:
            EngineError: before any work if a prompt does not fit the model.
        """

    @abc.abstractmethod
    def max_concurrent_rollouts(self, prompt_tokens: int, completion_tokens: int) -> int:
        """Return how many rollouts of this size memory holds at once, at least 1.

        Raises:
            EngineError: if not even one fits, with the numbers.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Give back memory and processes; the engine cannot be used afterwards."""
