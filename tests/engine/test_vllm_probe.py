"""The probe: its prompt, its expectations and its findings; needs no vLLM."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from echo.core.errors import EngineError
from echo.engine.model import load_directory
from echo.engine.vllm import probe as vllm_probe
from echo.engine.vllm.probe import ALLOWED, NUM_ROUNDINGS, START_TOKENS, SwapProbe
from echo.engine.weights import publish_image, tensors_from_image
from tests.runtime.families import save_family

MakeTinyModel = Callable[..., Path]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def model_dir(make_tiny_model: MakeTinyModel) -> Path:
    """Of a model that finds some tokens much likelier than others."""
    return make_tiny_model(initializer_range=0.2, seed=3)


@torch.no_grad()
def reference(
    directory: Path, tensors: Mapping[str, Tensor], ids: list[int]
) -> tuple[np.ndarray, list[int]]:
    """The log-probabilities of all tokens but the first, and what would be likelier in place."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    model.load_state_dict({name: t.float() for name, t in tensors.items()}, strict=False)
    rows = model(input_ids=torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return rows.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy(), rows.argmax(-1).tolist()


def scaled(tensors: Mapping[str, Tensor], factor: float) -> dict[str, Tensor]:
    return {name: tensor * factor for name, tensor in tensors.items()}


@pytest.mark.parametrize("is_tied", [True, False])
def test_it_expects_what_transformers_computes_from_the_given_weights(
    make_tiny_model: MakeTinyModel, is_tied: bool
) -> None:
    directories = [make_tiny_model(seed=seed, tie_word_embeddings=is_tied) for seed in (0, 1)]
    probe = SwapProbe(directories[0], "float32")
    other = load_directory(make_tiny_model(hidden_size=32), "float32")
    for directory in [*directories, directories[0]]:
        specs, image = publish_image(load_directory(directory, "float32"), "float32")
        tensors = tensors_from_image(specs, memoryview(image).toreadonly())
        assert probe.weight_bytes == sum(4 * tensor.numel() for tensor in tensors.values())
        found = probe.expected(tensors)
        assert len(found.prompt_ids) == probe.num_tokens
        assert found.allowed == ALLOWED["float32"][0]
        expected, _ = reference(directory, tensors, found.prompt_ids)
        np.testing.assert_allclose(found.logprobs, expected, atol=1e-5)
        with pytest.raises(EngineError, match="of the wrong shape"):  # of another model
            probe.expected(other)


def test_its_prompt_is_what_the_model_itself_continues(model_dir: Path) -> None:
    weights = load_directory(model_dir, "float32")
    probe = SwapProbe(model_dir, "float32")
    ids = probe.expected(weights).prompt_ids
    text = ids[: len(ids) // 4]
    _, likeliest = reference(model_dir, weights, text)
    assert text[START_TOKENS : START_TOKENS + 4] == likeliest[START_TOKENS - 1 : START_TOKENS + 3]
    # Not for ever the same, as where greedy samples go round in circles.
    assert len(set(text)) > 6


def test_16_bits_are_compared_in_float32_as_far_as_rounding_was_measured(
    model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    weights = load_directory(model_dir, "bfloat16")
    found = SwapProbe(model_dir, "bfloat16").expected(weights)
    exact, _ = reference(model_dir, weights, found.prompt_ids)
    np.testing.assert_allclose(found.logprobs, exact, atol=2e-5)
    least, most = ALLOWED["bfloat16"]
    assert least <= found.allowed <= most
    for part in (
        "96 tokens",
        "rounding to bfloat16 moves",
        "is allowed",
        "at most 64 MiB, for each",
    ):
        assert part in caplog.text


@torch.no_grad()
@pytest.mark.filterwarnings("ignore")  # of transformers, about itself
def test_what_a_version_has_in_float32_is_not_rounded(tmp_path: Path) -> None:
    """The biases of routers; rounded to 16 bits, these would choose other experts."""
    weights = load_directory(save_family(tmp_path, "glm4_moe"), "bfloat16")
    weights |= scaled({name: t for name, t in weights.items() if ".experts." in name}, 8)
    [bias] = [name for name, tensor in weights.items() if tensor.dtype == torch.float32]
    weights[bias] = torch.tensor([7.513, 7.505, 7.501, 7.512])
    assert len(weights[bias].bfloat16().unique()) == 1
    found = SwapProbe(tmp_path, "bfloat16").expected(weights)
    expected, _ = reference(tmp_path, weights, found.prompt_ids)
    np.testing.assert_allclose(found.logprobs, expected, atol=1e-4)


def test_large_layers_are_made_wider_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_probe, "MAX_WIDENED", 1000)
    layer, values = torch.nn.Linear(64, 48).bfloat16(), torch.ones(3, 64).bfloat16()
    pieces: list[int] = []
    split: Callable[..., tuple[Tensor, ...]] = Tensor.split

    def note(tensor: Tensor, size: int) -> Any:
        found = split(tensor, size)
        pieces.extend(part.numel() for part in found)
        return found

    monkeypatch.setattr(Tensor, "split", note)
    with vllm_probe._Float32():
        found = layer(values)
    monkeypatch.undo()
    assert max(pieces) <= 1000 < sum(pieces) == 64 * 48
    torch.testing.assert_close(found, layer.float()(values.float()))


def test_where_float32_is_dear_only_what_deviates_is_looked_at_in_it(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_probe, "SPARED_S", -1e9)
    monkeypatch.setitem(ALLOWED, "bfloat16", (1e-5, 1e-5))
    weights = load_directory(model_dir, "bfloat16")
    probe = SwapProbe(model_dir, "bfloat16")
    found = probe.expected(weights)
    exact, _ = reference(model_dir, weights, found.prompt_ids)
    assert np.abs(found.logprobs - exact).mean() > 1e-3
    other = probe.expected(scaled(weights, 0.5))
    assert probe.find_fault(found.logprobs, found, weights) is None
    assert probe.find_fault(exact, found, weights) is None
    assert probe.find_fault(exact + np.float32(1e-3), found, weights) is not None
    assert probe.find_fault(exact, other, scaled(weights, 0.5)) is not None


def test_no_version_raises_what_is_allowed_for_it(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ALLOWED, "bfloat16", (0.0, 0.15))
    weights = load_directory(model_dir, "bfloat16")
    probe = SwapProbe(model_dir, "bfloat16")
    allowed = probe.expected(weights).allowed
    wild = scaled(weights, 4.0)
    assert probe.expected(wild).allowed == allowed
    # As the first of a run it would be allowed more, but no more than the most.
    first = SwapProbe(model_dir, "bfloat16")
    assert allowed < first.expected(wild).allowed == 0.15


def test_a_prompt_that_has_become_unlikely_is_replaced_by_a_version_found_right(
    model_dir: Path, make_tiny_model: MakeTinyModel
) -> None:
    old = load_directory(model_dir, "float32")
    new = load_directory(make_tiny_model(initializer_range=0.2, seed=4), "float32")
    probe = SwapProbe(model_dir, "float32")
    first = probe.expected(old)
    probe.accepted(first, old)
    second = probe.expected(new)
    assert second.prompt_ids == first.prompt_ids
    assert second.logprobs.mean() < first.logprobs.mean() - 1
    assert probe.expected(old).prompt_ids == first.prompt_ids  # nobody has found the new one right
    probe.accepted(second, new)
    third = probe.expected(new)
    assert third.prompt_ids != first.prompt_ids
    assert third.logprobs.mean() > second.logprobs.mean() + 1
    assert third.prompt_ids == SwapProbe(model_dir, "float32").expected(new).prompt_ids
    # What was expected before still holds, as after a rollback.
    assert probe.find_fault(first.logprobs, first, old) is None
    probe.accepted(first, old)
    assert probe.expected(new).prompt_ids == third.prompt_ids


def test_weights_with_nan_are_refused_and_leave_the_prompt_to_others(model_dir: Path) -> None:
    weights = load_directory(model_dir, "bfloat16")
    probe = SwapProbe(model_dir, "bfloat16")
    bad = {name: tensor * float("nan") for name, tensor in weights.items()}
    found = probe.expected(bad)
    fault = probe.find_fault(found.logprobs, found, bad)
    assert fault is not None
    assert "the weights hold NaN, or overflow in torch.bfloat16" in fault
    whole = probe.expected(weights)
    assert whole.prompt_ids == SwapProbe(model_dir, "bfloat16").expected(weights).prompt_ids


def test_what_rounding_does_not_explain_is_complained_about(tiny_model_dir: Path) -> None:
    probe = SwapProbe(tiny_model_dir, "float32")
    weights = load_directory(tiny_model_dir, "float32")
    found = probe.expected(weights)
    right = found.logprobs
    assert probe.find_fault(right + 1e-5, found, weights) is None
    fault = probe.find_fault(right + 0.01, found, weights)
    assert fault is not None
    assert "differ from those of transformers by 0.01 nats per token, 0.0002" in fault
    assert probe.find_fault(right * np.nan, found, weights) is not None
    assert probe.find_fault(right[1:], found, weights) is not None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_layer_that_was_missed_stands_out_from_rounding(model_dir: Path, dtype: str) -> None:
    weights = load_directory(model_dir, dtype)
    probe = SwapProbe(model_dir, dtype)
    found = probe.expected(weights)
    rounded = probe._logprobs(found.prompt_ids, is_wide=False)
    assert NUM_ROUNDINGS * probe._difference(rounded, found.logprobs) <= found.allowed
    assert probe.find_fault(rounded, found, weights) is None
    name = "model.layers.1.mlp.down_proj.weight"
    wrong = {**weights, name: torch.zeros_like(weights[name])}
    assert probe.find_fault(probe.expected(wrong).logprobs, found, weights) is not None
