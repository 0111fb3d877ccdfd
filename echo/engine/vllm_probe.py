"""Whether the engine samples from the weights that it was given: a probe after every swap.

The expected log-probabilities of a fixed prompt come from transformers on the host, computed from
the very tensors that were handed over, so that no mistake of vLLM can be in them. A tied head that
keeps its old weights, a layer that was missed or a transposed tensor shows as whole nats.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from echo.engine.lora import Lora, build_adapted, target_names
from echo.engine.skeleton import build_skeleton, check_weights
from echo.engine.weights import torch_dtype

NUM_TOKENS = 16
"""Length of the probe's prompt."""

TOLERANCES = {"float32": 2e-4, "float16": 0.02, "bfloat16": 0.1}
"""Mean difference in nats per token that rounding explains, by the dtype that both compute in:
several times what it has come to on a CPU, and far less than other weights make."""


class Probe:
    """A prompt, and what it must give under given weights."""

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
        self._tolerance = TOLERANCES[dtype]
        # Built once: it shares the memory of the weights it was last given, which the engine keeps
        # anyway. Its own, untouched, costs nothing before.
        self._model: Any
        self._adapter: dict[str, Tensor] | None = None
        if lora is None:
            self._model = build_skeleton(Path(model_dir), self._dtype, "eager")
        else:
            self._model, self._adapter = build_adapted(lora, self._dtype, "eager")
        self.lora_targets = target_names(self._adapter or ())
        """Last parts of the names of the modules that have an adapter."""
        config = self._model.config.get_text_config()
        self.vocab_size = int(config.vocab_size)
        window = int(getattr(config, "max_position_embeddings", None) or NUM_TOKENS + 1)
        self.prompt_ids = [
            (1 + i * 2654435761) % self.vocab_size
            for i in range(max(2, min(NUM_TOKENS, window - 1)))
        ]
        """Token ids spread over the vocabulary."""
        distinct = {tensor.data_ptr(): tensor for tensor in self._model.state_dict().values()}
        self.weight_bytes: int = sum(t.numel() * t.element_size() for t in distinct.values())
        """Memory of the weights in the engine's dtype."""

    @torch.inference_mode()
    def expected(self, tensors: Mapping[str, Tensor]) -> npt.NDArray[np.float32]:
        """Return the log-probabilities of the prompt's tokens after the first.

        The tensors themselves become the model's for the moment: beyond a change of dtype nothing
        is copied.

        Raises:
            EngineError: if they are not exactly the weights of this model.
        """
        model = self._model
        if self._adapter is None:
            check_weights(model.state_dict(), tensors)
            cast = {name: tensor.to(self._dtype) for name, tensor in tensors.items()}
            model.load_state_dict(cast, strict=False, assign=True)
            model.tie_weights()
        else:
            check_weights(self._adapter, tensors)
            for name, tensor in tensors.items():
                self._adapter[name].copy_(tensor)
        ids = torch.tensor(self.prompt_ids)
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
        found: npt.NDArray[np.float32] = (
            logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0].numpy()
        )
        return found

    def complaint(
        self, measured: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]
    ) -> str | None:
        """Return what is wrong with the engine's answer, or None if it is right."""
        if measured.shape != expected.shape:
            return f"{len(measured)} log-probabilities came back instead of {len(expected)}"
        error = float(np.abs(measured - expected).mean())
        if error <= self._tolerance:  # not so if it is NaN
            return None
        return (
            f"its log-probabilities differ from those of transformers by {error:.3g} nats per "
            f"token, {self._tolerance:g} is allowed"
        )
