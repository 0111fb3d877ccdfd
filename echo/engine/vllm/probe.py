"""Check after a swap that vLLM samples from the new weights.

vLLM's log-probabilities of a prompt must match the log-probabilities that transformers computes on
the host from the same tensors. Wrong weights cause a difference of tenths of nats per token.
Examples of wrong weights are a tied head with its old weights, a missed layer and a transposed
tensor.

The prompt is a concatenation of NUM_TEXTS texts. Each text is a fixed beginning and the model's own
greedy continuation, so its tokens are likely. Rounding to 16 bits hardly changes the
log-probabilities of likely tokens. It changes the log-probabilities of unlikely tokens (-15 nats)
by tenths of nats, as much as wrong weights do.

The effect of rounding is measured when the prompt is made. This effect is the mean difference
between transformers' results in 16 bits and in float32. The allowed difference follows from this
measurement and has an upper bound (ALLOWED). Neither later versions nor vLLM can raise the allowed
difference. If the prompt becomes unlikely under the policy, a version that passed the probe
generates a new prompt.

A pass in float32 uses the same 16-bit weights and widens each weight for a single operation, so the
whole model is never held in float32. If this pass takes at most SPARED_S longer than a pass in 16
bits, every version is compared with a float32 pass. Otherwise versions are compared with a 16-bit
pass, and only a version that deviates is compared again with a float32 pass.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import embedding, linear
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from echo.core.units import format_bytes
from echo.engine.lora import Lora, build_adapted, target_names
from echo.engine.model import build_meta_model, check_weights, weight_bytes
from echo.engine.weights import torch_dtype

log = logging.getLogger(__name__)

NUM_TEXTS = 4
"""Number of texts in the prompt. With a single text, all compared tokens would depend on one
beginning.
"""
TEXT_TOKENS = 24
"""Number of tokens of each text. All texts together have 96 tokens. With a few tokens, the mean
difference would depend on single tokens. With thousands, a check would delay each swap.
"""
START_TOKENS = 2
"""Number of tokens at the start of each text. Their ids are spread over the vocabulary, and their
log-probabilities do not count in the mean.
"""

NUM_ROUNDINGS = 2.0
"""Allowed difference, as a multiple of the measured effect of rounding. vLLM rounds in another
order than transformers, so the two differ by 1.5 times that effect (bench/bench_probe.py).
"""

ALLOWED = {"float32": (2e-4, 2e-4), "float16": (0.01, 0.03), "bfloat16": (0.05, 0.15)}
"""vLLM's dtype -> lower and upper bound of the allowed mean difference, nats per token."""

MAX_DRIFT = 1.0
"""A new prompt is made when the present prompt has become less likely by this number of nats per
token.
"""

SPARED_S = 1.0
"""Each swap is checked in float32 if this check takes at most SPARED_S seconds longer than a check
in 16 bits.
"""

MAX_WIDENED = 1 << 24
"""Number of elements of a linear layer that are widened to float32 at once: 64 MiB."""

_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, eq=False)
class Expectation:
    """The prompt, and its expected log-probabilities under one version's weights."""

    prompt_ids: list[int]
    logprobs: npt.NDArray[np.float32]
    """[P - 1] expected log-probability of each prompt token after the first, nats."""
    allowed: float
    """Largest mean difference that passes the probe, nats per token."""


class SwapProbe:
    """Makes the prompt and computes its expected log-probabilities. Thread-safe."""

    def __init__(self, model_dir: Path, dtype: str, lora: Lora | None = None) -> None:
        """Build the model without weights.

        The first call of `expected` makes the prompt.

        Args:
            model_dir: directory with config.json.
            dtype: the dtype that the engine computes in.
            lora: shape of the swapped adapter, and its base model; None if all weights are swapped.

        Raises:
            EngineError: if the directory has no causal language model.
        """
        self._dtype = torch_dtype(dtype)
        self._least, self._most = ALLOWED[dtype]
        # Built once. The model shares the memory of the weights that it was last given, which the
        # engine keeps anyway. Before the first weights it takes no memory (meta tensors).
        self.model: Any
        """transformers' model, with the weights of the last call of `_take`."""
        self._adapter: dict[str, Tensor] | None = None
        if lora is None:
            self.model = build_meta_model(model_dir, self._dtype, "eager")
        else:
            self.model, self._adapter = build_adapted(lora, self._dtype, "eager")
        # If vLLM does not implement an architecture, it runs the model in classes of transformers
        # and patches these classes in this process. The patched classes read this attribute, which
        # vLLM sets only on models that it has built.
        type(self.model.base_model).do_not_compile = True
        self.lora_targets = target_names(self._adapter or ())
        """Last parts of the names of the modules that have an adapter."""
        config = self.model.config.get_text_config()
        self.vocab_size = int(config.vocab_size)
        self.num_tokens, self._text_tokens = NUM_TEXTS * TEXT_TOKENS, TEXT_TOKENS
        """Number of tokens of the prompt, and of each text in it."""
        self.bound(int(getattr(config, "max_position_embeddings", None) or 1 << 20))
        self.weight_bytes = weight_bytes(self.model.state_dict())
        """Bytes of the model's weights in the engine's dtype."""
        self.adapter_bytes = weight_bytes(self._adapter or {})
        """Bytes of the adapter in the engine's dtype."""
        self._prompt_ids: list[int] = []
        """Token ids of the prompt; empty until a version has generated it."""
        self._likelihood = 0.0
        """Mean log-probability of the prompt's tokens under the weights that generated the prompt,
        nats per token.
        """
        self._allowed = self._least
        self._is_wide = False
        """Whether every version is compared with a pass in float32. If false, only a version that
        deviates is compared with such a pass.
        """
        self._lock = threading.RLock()
        """Lock that is held while the model's weights are replaced or used."""

    def bound(self, window: int) -> None:
        """Limit the prompt to `window` tokens. Call this before the prompt is made."""
        most = max(START_TOKENS + 1, (window - 1) // NUM_TEXTS)
        self._text_tokens = min(self._text_tokens, most)
        self.num_tokens = NUM_TEXTS * self._text_tokens

    def expected(self, tensors: Mapping[str, Tensor]) -> Expectation:
        """Return the prompt, its log-probabilities under the weights, and the allowed difference.

        Tensors that have the model's dtype become the model's weights without a copy.

        Raises:
            EngineError: if the tensors are not exactly the weights of this model.
        """
        with self._lock:
            self._take(tensors)
            if not self._prompt_ids:
                self._make_prompt()
            prompt_ids = self._prompt_ids
            logprobs = self._logprobs(prompt_ids, is_wide=self._is_wide)
            if not np.isfinite(logprobs).all():
                self._prompt_ids = []  # the text of a version with NaN is useless
            return Expectation(prompt_ids, logprobs, self._allowed)

    def find_fault(
        self,
        measured: npt.NDArray[np.float32],
        expectation: Expectation,
        tensors: Mapping[str, Tensor],
    ) -> str | None:
        """Return how the engine's log-probabilities deviate, or None if they match.

        Args:
            measured: the engine's log-probabilities of the prompt, [P - 1].
            expectation: the expected log-probabilities under the weights.
            tensors: the weights, with which the prompt is computed again in float32 if necessary.
        """
        expected, allowed = expectation.logprobs, expectation.allowed
        if measured.shape != expected.shape:
            return f"{len(measured)} log-probabilities came back instead of {len(expected)}"
        if not np.isfinite(expected).all():
            return (
                "transformers finds log-probabilities that are NaN or infinite, too: the weights "
                f"hold NaN, or overflow in {self._dtype}"
            )
        error = self._difference(measured, expected)
        if error > allowed and self._dtype in _HALF and not self._is_wide:
            with self._lock:
                self._take(tensors)
                wide = self._logprobs(expectation.prompt_ids, is_wide=True)
            error = self._difference(measured, wide)
        if error <= allowed:  # false for NaN
            return None
        return (
            f"its log-probabilities differ from those of transformers by {error:.3g} nats per "
            f"token, {allowed:.2g} is allowed"
        )

    def accepted(self, expectation: Expectation, tensors: Mapping[str, Tensor]) -> None:
        """Record weights that passed the probe.

        If the prompt has become unlikely under these weights, use the weights to generate a new
        prompt.
        """
        likelihood = self._mean(expectation.logprobs)
        if expectation.prompt_ids is self._prompt_ids and likelihood < self._likelihood - MAX_DRIFT:
            with self._lock:
                self._take(tensors)
                self._make_prompt()

    def _difference(self, one: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> float:
        return self._mean(np.abs(one - other))

    def _mean(self, values: npt.NDArray[np.float32]) -> float:
        """Return the mean of [P - 1] values, leaving out the beginnings of the texts."""
        places = np.arange(1, len(values) + 1) % self._text_tokens
        return float(values[places >= START_TOKENS].mean())

    def _take(self, tensors: Mapping[str, Tensor]) -> None:
        if self._adapter is None:
            own = self.model.state_dict()
            check_weights(own, tensors)
            # Not the engine's dtype: a router's bias stays in float32, as in vLLM.
            cast = {name: tensor.to(own[name].dtype) for name, tensor in tensors.items()}
            self.model.load_state_dict(cast, strict=False, assign=True)
            self.model.tie_weights()
        else:
            check_weights(self._adapter, tensors)
            for name, tensor in tensors.items():
                self._adapter[name].copy_(tensor)

    def _make_prompt(self) -> None:
        """Generate the prompt with the present weights, and measure the effect of rounding."""
        started = time.perf_counter()
        starts = torch.arange(NUM_TEXTS * START_TOKENS).view(NUM_TEXTS, START_TOKENS)
        starts = (1 + starts * 2654435761) % self.vocab_size
        texts = self.model.generate(
            starts,
            attention_mask=torch.ones_like(starts),
            max_new_tokens=self._text_tokens - START_TOKENS,
            do_sample=False,
            no_repeat_ngram_size=3,  # a repeated phrase tests little
            eos_token_id=None,
        )
        self._prompt_ids = texts.flatten().tolist()
        made = time.perf_counter()
        plain = self._logprobs(self._prompt_ids, is_wide=False)
        self._likelihood = self._mean(plain)
        if self._dtype not in _HALF:
            return
        rounded = time.perf_counter()
        rounding = self._difference(plain, self._logprobs(self._prompt_ids, is_wide=True))
        ended = time.perf_counter()
        # With NaN use the lower bound: weights with NaN are refused in any case.
        wanted = NUM_ROUNDINGS * rounding if math.isfinite(rounding) else 0.0
        self._allowed = min(self._most, max(self._least, wanted))
        self._is_wide = (ended - rounded) - (rounded - made) <= SPARED_S
        largest = max((p.numel() for p in self.model.parameters() if p.dim() > 2), default=0)
        log.info(
            "versions are probed with %d tokens that this model continues by itself, found in "
            "%.1f s: rounding to %s moves their log-probabilities by %.2g nats per token, %.2g is "
            "allowed; in float32 they take %.1f s and at most %s, %s",
            self.num_tokens,
            made - started,
            str(self._dtype).removeprefix("torch."),
            rounding,
            self._allowed,
            ended - rounded,
            format_bytes(4 * max(largest, MAX_WIDENED)),
            "for each version" if self._is_wide else "for versions that seem wrong",
        )

    @torch.inference_mode()
    def _logprobs(self, prompt_ids: list[int], *, is_wide: bool) -> npt.NDArray[np.float32]:
        """Return the log-probability of each token after the prompt's first token, [P - 1].

        Args:
            prompt_ids: token ids of the prompt.
            is_wide: whether to compute in float32.
        """
        ids = torch.tensor(prompt_ids)
        with _Float32() if is_wide else contextlib.nullcontext():
            logits = self.model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        rows = logits.float().log_softmax(-1)
        found: npt.NDArray[np.float32] = rows.gather(1, ids[1:, None])[:, 0].numpy()
        return found


class _Float32(TorchFunctionMode):
    """Computes in float32 with 16-bit weights.

    Each operation widens only the weights that it uses.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is embedding:  # widen only the rows that were looked up
            return _widened(func(*args, **kwargs))
        if func is linear and args[1].numel() > MAX_WIDENED:
            values, weight, *bias = tree_map(_widened, args[:1]) + args[1:]
            parts = weight.split(max(1, MAX_WIDENED // weight.shape[1]))
            products = torch.cat([linear(values, part.float()) for part in parts], -1)
            bias = [each for each in (*bias, kwargs.get("bias")) if each is not None]
            return products + bias[0].float() if bias else products
        args, kwargs = tree_map(_widened, (args, kwargs))
        return func(*args, **kwargs)


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.dtype in _HALF else value
    return torch.float32 if value in _HALF else value
