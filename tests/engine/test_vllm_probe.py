"""The probe: its expectations and its findings; needs no vLLM."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from echo.core.errors import EngineError
from echo.engine.model import load_directory
from echo.engine.vllm.engine import NUM_TOKENS, SwapProbe
from echo.engine.weights import publish_image, tensors_from_image

MakeTinyModel = Callable[..., Path]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@torch.no_grad()
def reference(directory: Path, ids: list[int]) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()


@pytest.mark.parametrize("is_tied", [True, False])
def test_it_expects_what_transformers_computes_from_the_given_weights(
    make_tiny_model: MakeTinyModel, is_tied: bool
) -> None:
    directories = [make_tiny_model(seed=seed, tie_word_embeddings=is_tied) for seed in (0, 1)]
    probe = SwapProbe(directories[0], "float32")
    assert len(set(probe.prompt_ids)) == NUM_TOKENS
    other = load_directory(make_tiny_model(hidden_size=32), "float32")
    for directory in [*directories, directories[0]]:
        specs, image = publish_image(load_directory(directory, "float32"), "float32")
        tensors = tensors_from_image(specs, memoryview(image).toreadonly())
        assert probe.weight_bytes == sum(4 * tensor.numel() for tensor in tensors.values())
        expected = probe.expected(tensors)
        np.testing.assert_allclose(expected, reference(directory, probe.prompt_ids), atol=1e-5)
        with pytest.raises(EngineError, match="of the wrong shape"):  # of another model
            probe.expected(other)


def test_what_rounding_does_not_explain_is_complained_about(tiny_model_dir: Path) -> None:
    probe = SwapProbe(tiny_model_dir, "float32")
    expected = np.linspace(-9, -1, NUM_TOKENS - 1, dtype=np.float32)
    assert probe.complaint(expected + 1e-5, expected) is None
    complaint = probe.complaint(expected + 0.01, expected)
    assert complaint is not None
    assert "differ from those of transformers by 0.01 nats per token, 0.0002" in complaint
    assert probe.complaint(expected * np.nan, expected) is not None
    overflow = probe.complaint(expected, expected * np.inf)
    assert overflow is not None
    assert "the weights hold NaN, or overflow in torch.float32" in overflow
    assert probe.complaint(expected[1:], expected) is not None
    assert SwapProbe(tiny_model_dir, "bfloat16").complaint(expected + 0.05, expected) is None
