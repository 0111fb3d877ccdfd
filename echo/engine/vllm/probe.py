"""Probe after a swap: is what vLLM samples from what it was handed over?

vLLM's log-probabilities of a prompt must be those that transformers computes on the host from the
very tensors that were handed over, so that no mistake of vLLM can be in them. A tied head that
keeps its old weights, a layer that was missed or a transposed tensor shows as tenths of nats.

The prompt is a few texts in a row, fixed beginnings as the model itself continues them. The
log-probabilities of tokens that it finds unlikely (-15 nats) are moved by rounding to 16 bits as
much as by wrong weights, tenths of nats; those of likely ones are moved far less.

The effect of rounding is measured when the prompt is made: the mean difference between the model in
16 bits and in float32, both by transformers. Neither a version that is judged later nor anything
that vLLM does raises it, and it has a ceiling. Once the prompt has become unlikely under the
policy, another one is made from a version that was found right, for those that follow.

float32 here is the same 16-bit weights, each made wider for one operation: the whole model never
lies in float32. The pass is what versions are compared with where it is not much slower than that
in 16 bits; else only what deviates is looked at in float32 again before it is refused.
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
TEXT_TOKENS = 24
START_TOKENS = 2
"""With which a text begins: ids spread over the vocabulary, whose probabilities do not count."""

NUM_ROUNDINGS = 2.0
"""Times the measured difference that is allowed. vLLM rounds in another order than transformers and
comes to 1.5 times of it; bench/bench_probe.py has both sides."""

ALLOWED = {"float32": (2e-4, 2e-4), "float16": (0.01, 0.03), "bfloat16": (0.05, 0.15)}
"""The least and the most mean difference in nats per token that is allowed, by vLLM's dtype."""

MAX_DRIFT = 1.0
"""Nats per token by which the texts may become less likely before others are made."""

SPARED_S = 1.0
"""Seconds that a pass in float32 may take longer than one in 16 bits to be made at each swap."""

MAX_WIDENED = 1 << 24
"""Elements of a linear layer that are widened at once: 64 MiB."""

_HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, eq=False)
class Expectation:
    """Log-probabilities that some weights give."""

    prompt_ids: list[int]
    logprobs: npt.NDArray[np.float32]
    """[P - 1] of the prompt's tokens after the first."""
    allowed: float
    """Mean difference, nats per token."""


class SwapProbe:
    """A prompt, and what it must give under given weights; for use by many threads."""

    def __init__(self, model_dir: Path, dtype: str, lora: Lora | None = None) -> None:
        """Read the shape of the model.

        Args:
            model_dir: directory with config.json.
            dtype: that the engine computes in.
            lora: the adapter that is swapped, and its base; None where all weights are.

        Raises:
            EngineError: if there is no causal language model.
        """
        self._dtype = torch_dtype(dtype)
        self._least, self._most = ALLOWED[dtype]
        # Built once: it shares the memory of the weights it was last given, which the engine keeps
        # anyway. Its own, untouched, costs nothing before.
        self.model: Any
        """transformers' own; its weights are those that were last expected to give something."""
        self._adapter: dict[str, Tensor] | None = None
        if lora is None:
            self.model = build_meta_model(model_dir, self._dtype, "eager")
        else:
            self.model, self._adapter = build_adapted(lora, self._dtype, "eager")
        # An architecture that is not vLLM's own runs in the classes of transformers, which vLLM
        # changes for this process: models of theirs that it has not built itself lack this.
        type(self.model.base_model).do_not_compile = True
        self.lora_targets = target_names(self._adapter or ())
        """Last parts of the names of the modules that have an adapter."""
        config = self.model.config.get_text_config()
        self.vocab_size = int(config.vocab_size)
        self.num_tokens, self._text_tokens = NUM_TEXTS * TEXT_TOKENS, TEXT_TOKENS
        """Length of the prompt, and of a text in it."""
        self.bound(int(getattr(config, "max_position_embeddings", None) or 1 << 20))
        self.weight_bytes = weight_bytes(self.model.state_dict())
        """Memory of the weights in the engine's dtype."""
        self.adapter_bytes = weight_bytes(self._adapter or {})
        """Of these, those of the adapter."""
        self._prompt_ids: list[int] = []
        """Empty while no version has continued the beginnings."""
        self._likelihood = 0.0
        """Nats per token of the prompt when it was made."""
        self._allowed = self._least
        self._is_wide = False
        """Whether versions are compared in float32 at once."""
        self._lock = threading.RLock()
        """Held while the model has weights of its own."""

    def bound(self, window: int) -> None:
        """Keep the prompt, which has yet to be made, shorter than a window."""
        most = max(START_TOKENS + 1, (window - 1) // NUM_TEXTS)
        self._text_tokens = min(self._text_tokens, most)
        self.num_tokens = NUM_TEXTS * self._text_tokens

    def expected(self, tensors: Mapping[str, Tensor]) -> Expectation:
        """Return what the prompt gives under some weights.

        The tensors themselves become the model's for the moment: beyond a change of dtype nothing
        is copied.

        Raises:
            EngineError: if they are not exactly the weights of this model.
        """
        with self._lock:
            self._take(tensors)
            if not self._prompt_ids:
                self._make_prompt()
            prompt_ids = self._prompt_ids
            logprobs = self._logprobs(prompt_ids, is_wide=self._is_wide)
            if not np.isfinite(logprobs).all():
                self._prompt_ids = []  # such a version has continued nothing
            return Expectation(prompt_ids, logprobs, self._allowed)

    def complaint(
        self,
        measured: npt.NDArray[np.float32],
        expectation: Expectation,
        tensors: Mapping[str, Tensor],
    ) -> str | None:
        """Return what is wrong with the engine's answer, or None if it is right.

        Args:
            measured: what the engine gives in place of the expected log-probabilities.
            expectation: under the weights.
            tensors: the weights.
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
        if error <= allowed:  # not so if it is NaN
            return None
        return (
            f"its log-probabilities differ from those of transformers by {error:.3g} nats per "
            f"token, {allowed:.2g} is allowed"
        )

    def accepted(self, expectation: Expectation, tensors: Mapping[str, Tensor]) -> None:
        """Note that vLLM samples from some weights, for which so much was expected.

        If they find the prompt unlikely by now, they make the one for later versions.
        """
        likelihood = self._mean(expectation.logprobs)
        if expectation.prompt_ids is self._prompt_ids and likelihood < self._likelihood - MAX_DRIFT:
            with self._lock:
                self._take(tensors)
                self._make_prompt()

    def _difference(self, one: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> float:
        """Return the mean difference in nats per token."""
        return self._mean(np.abs(one - other))

    def _mean(self, values: npt.NDArray[np.float32]) -> float:
        """Return the mean over the tokens that count."""
        places = np.arange(1, len(values) + 1) % self._text_tokens
        return float(values[places >= START_TOKENS].mean())

    def _take(self, tensors: Mapping[str, Tensor]) -> None:
        """Make tensors the model's."""
        if self._adapter is None:
            check_weights(self.model.state_dict(), tensors)
            cast = {name: tensor.to(self._dtype) for name, tensor in tensors.items()}
            self.model.load_state_dict(cast, strict=False, assign=True)
            self.model.tie_weights()
        else:
            check_weights(self._adapter, tensors)
            for name, tensor in tensors.items():
                self._adapter[name].copy_(tensor)

    def _make_prompt(self) -> None:
        """Have the model continue the beginnings, and measure what rounding makes of it."""
        started = time.perf_counter()
        starts = torch.arange(NUM_TEXTS * START_TOKENS).view(NUM_TEXTS, START_TOKENS)
        starts = (1 + starts * 2654435761) % self.vocab_size
        texts = self.model.generate(
            starts,
            attention_mask=torch.ones_like(starts),
            max_new_tokens=self._text_tokens - START_TOKENS,
            do_sample=False,
            no_repeat_ngram_size=3,  # what goes round in circles shows little
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
        # NaN stays out of it: what holds it is refused, whatever is allowed.
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
        """Return the log-probabilities of a prompt's tokens after the first.

        Args:
            prompt_ids: of the prompt.
            is_wide: whether in float32.
        """
        ids = torch.tensor(prompt_ids)
        with _Float32() if is_wide else contextlib.nullcontext():
            logits = self.model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        rows = logits.float().log_softmax(-1)
        found: npt.NDArray[np.float32] = rows.gather(1, ids[1:, None])[:, 0].numpy()
        return found


class _Float32(TorchFunctionMode):
    """Computes in float32 with weights of 16 bits, made wider one operation at a time."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is embedding:  # only a few rows are wanted
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
    """Return a tensor or a dtype of 16 bits as one of float32, and all else as it is."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in _HALF else value
    return torch.float32 if value in _HALF else value
