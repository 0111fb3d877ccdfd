"""What the two ways of running vLLM have in common: requests in, samples out, weights swapped.

A tag is the text that vLLM attaches to tokens as their weight version. Each installation of weights
has its own, so that the same version installed twice can be told apart.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from echo.core.errors import EngineError
from echo.engine.engine import FinishReason

START_TIMEOUT_S = 600.0
"""Seconds for vLLM to start: loading its code, compiling, profiling a GPU's memory."""


class EngineDeadError(EngineError):
    """vLLM has died, or does not answer: it must be started anew."""


class EngineWasDeadError(EngineDeadError):
    """It had died before it began with what was asked of it."""


@dataclass(frozen=True, slots=True)
class Death:
    """How a vLLM came to its end."""

    reason: str
    num_running: int
    """Requests that were under way."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a started engine reports of itself."""

    num_blocks: int
    """Blocks of the KV cache."""
    block_size: int
    """Tokens per block."""
    max_model_len: int
    """Longest sequence, tokens."""
    max_num_seqs: int
    """Sequences sampled at one time."""

    def blocks_of(self, num_tokens: int) -> int:
        """Return how many blocks hold so many tokens."""
        return -(-num_tokens // self.block_size)


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, end) of a sample and the tag of the weights that sampled them."""

    tag: str
    start: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """What vLLM answered to one request."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    """[T]; empty if they were not asked for."""
    finish_reason: FinishReason
    spans: tuple[Span, ...]
    prompt_logprobs: npt.NDArray[np.float32]
    """[P - 1] of the prompt's tokens after the first; empty if they were not asked for."""


class Backend(abc.ABC):
    """A running vLLM; its methods may be called from any thread."""

    facts: Facts
    death: Death | None = None
    """Set once it is known to have died, or was given up."""

    @property
    @abc.abstractmethod
    def is_dead(self) -> bool:
        """Whether it has died or was given up."""

    @abc.abstractmethod
    def submit(
        self, request_id: str, prompt: Mapping[str, Any], params: Any, priority: int
    ) -> Future[Sample]:
        """Begin to sample.

        Args:
            request_id: not in use.
            prompt: vLLM's, with the token ids.
            params: vLLM's SamplingParams.
            priority: lower ones first.

        Returns:
            What gets the sample, or EngineDeadError.
        """

    @abc.abstractmethod
    def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests; they get what was sampled so far, with the reason "abort"."""

    @abc.abstractmethod
    def num_sampled(self) -> dict[str, int]:
        """Return the tokens so far of every request that runs."""

    @abc.abstractmethod
    def update(self, update_info: Mapping[str, str], tag: str, *, clears_cache: bool) -> None:
        """Pause, take the weights over, tag what follows, and go on; bounded in time.

        Args:
            update_info: where the weights are, for `vllm_transfer`; or where an "adapter" is.
            tag: not used before.
            clears_cache: whether keys and values are thrown away and computed anew.

        Raises:
            EngineDeadError: if that fails at any point; the engine is of no use any more.
        """

    @abc.abstractmethod
    def die(self, reason: str) -> None:
        """Give up on the engine: every request gets EngineDeadError."""

    @abc.abstractmethod
    def close(self) -> None:
        """Stop vLLM; bounded in time."""


def adapter_request(arguments: Mapping[str, Any], path: str = "") -> Any:
    """Return vLLM's LoRARequest for the one adapter, or None where there is none.

    Args:
        arguments: of the engine.
        path: directory to load it from, in place of what is there; empty to sample with it.
    """
    if not arguments.get("enable_lora"):
        return None
    from vllm.lora.request import LoRARequest

    return LoRARequest(
        lora_name="policy", lora_int_id=1, lora_path=path or "loaded", load_inplace=bool(path)
    )


def read_output(output: Any) -> Sample:
    """Translate a finished `RequestOutput` of vLLM."""
    [completion] = output.outputs
    token_ids = list(completion.token_ids)
    rows = zip(token_ids, completion.logprobs or [{}] * len(token_ids), strict=True)
    prompt = list(output.prompt_token_ids)
    # Nothing stands before the first token of a prompt, so it has no row.
    prompt_rows = zip(prompt, output.prompt_logprobs or [None] * len(prompt), strict=True)
    return Sample(
        token_ids=np.array(token_ids, np.int32),
        logprobs=np.array([row[token].logprob for token, row in rows if row], np.float32),
        finish_reason=completion.finish_reason,
        spans=tuple(Span(s.version, s.start, s.end) for s in completion.weight_versions or ()),
        prompt_logprobs=np.array(
            [row[token].logprob for token, row in prompt_rows if row], np.float32
        ),
    )


def num_sampled(output_processor: Any) -> dict[str, int]:
    """Return the tokens so far of every request, from vLLM's bookkeeping in this process."""
    states = list(output_processor.request_states.values())
    return {state.external_req_id: state.detokenizer.num_output_tokens() for state in states}


def read_facts(vllm_config: Any) -> Facts:
    """Return what a started engine says of itself."""
    return Facts(
        num_blocks=int(vllm_config.cache_config.num_gpu_blocks),
        block_size=int(vllm_config.cache_config.block_size),
        max_model_len=int(vllm_config.model_config.max_model_len),
        max_num_seqs=int(vllm_config.scheduler_config.max_num_seqs),
    )
