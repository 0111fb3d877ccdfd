"""The catalogue's names and dimensions."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo.fleet.gpus import GPUS, MODELS, Gpu, ModelShape, decode_rate, train_flops, train_seconds


def test_names_are_the_keys() -> None:
    assert all(gpu.name == name for name, gpu in GPUS.items())
    assert all(model.name == name for name, model in MODELS.items())
    assert {"RTX 4090", "A100-80GB", "H100-SXM", "H20", "H800"} <= GPUS.keys()


def test_the_cache_of_a_token_by_hand() -> None:
    # Keys and values of 36 layers x 8 heads x 128 numbers of 2 bytes: 147 456.
    assert MODELS["Qwen3-4B"].cache_bytes_per_token == 2 * 36 * 8 * 128 * 2


def test_the_published_inputs_of_hex_stand_as_printed() -> None:
    h20, h800 = GPUS["H20"], GPUS["H800"]
    assert (h20.flops_per_s, h20.bytes_per_s) == (148e12, 4e12)
    assert (h800.flops_per_s, h800.bytes_per_s) == (756e12, 2e12)
    assert (h20.link_bytes_per_s, h800.link_bytes_per_s) == (450e9, 200e9)


# --- rates ----------------------------------------------------------------------------------------


GPU = Gpu(
    name="plain",
    flops_per_s=1e14,
    bytes_per_s=1e12,
    memory_bytes=10 * 10**9,
    link_bytes_per_s=1e11,
)
MODEL = ModelShape(
    name="one", num_params=1e9, num_layers=10, hidden_size=1000, num_kv_heads=5, head_dim=100
)


def test_decoding_by_hand() -> None:
    # Memory 9.0e9 - 2.147e9 - weights 2.0e9 = 4.853e9. A token's cache takes 2x2x10x5x100 = 20 kB,
    # a sequence has 500 + 1000 / 2 = 1000 tokens on average, 20 MB: 242 of them fit.
    # One step reads 2.0e9 + 242 x 2.0e7 = 6.84e9 bytes at 6e11 bytes/s: 11.4 ms; the arithmetic of
    # 242 x 2e9 at 6e13 takes 8.07 ms. A prompt takes 500 x 2e9 / 6e13 = 16.67 ms, once per 1000
    # tokens. One token: 11.4e-3 / 242 + 16.67e-6 = 63.8e-6 s.
    found = decode_rate(GPU, MODEL, prompt_tokens=500, completion_tokens=1000)
    assert found is not None
    assert found.concurrency == 242
    assert found.tokens_per_s == pytest.approx(1 / 63.8e-6, rel=2e-3)


def test_a_model_that_does_not_fit_has_no_rate() -> None:
    small = replace(GPU, memory_bytes=4 * 10**9)
    assert decode_rate(small, MODEL, prompt_tokens=500, completion_tokens=1000) is None
    two = decode_rate(small, MODEL, prompt_tokens=500, completion_tokens=1000, tensor_parallel=2)
    assert two is not None
    # One sequence of full length must fit as well: 4.853e9 / 20 kB = 242 650 tokens.
    assert decode_rate(GPU, MODEL, prompt_tokens=1, completion_tokens=9, max_tokens=250_000) is None


def test_training_by_hand() -> None:
    # (6e9 + 6 x 10 x 1000 x 100 of attention) x 1000 tokens = 6.006e12; two GPUs at 40 %.
    assert train_flops(MODEL, num_tokens=1000, mean_tokens=100) == pytest.approx(6.006e12)
    seconds = train_seconds(GPU, MODEL, num_gpus=2, num_tokens=1000, mean_tokens=100)
    assert seconds == pytest.approx(6.006e12 / 8e13)


def test_the_catalogue_is_in_its_units() -> None:
    for gpu in GPUS.values():
        assert 5e13 <= gpu.flops_per_s <= 5e15
        assert 3e11 <= gpu.bytes_per_s <= 1e13
        assert 16 * 2**30 <= gpu.memory_bytes <= 300 * 2**30
    for model in MODELS.values():
        # Layers alone take about 12 x layers x width^2; embeddings come on top.
        layers = 12 * model.num_layers * model.hidden_size**2
        assert 0.4 * layers < model.num_params < 3 * layers


@given(
    gpu=st.sampled_from(sorted(GPUS)),
    model=st.sampled_from(sorted(MODELS)),
    factor=st.floats(1.0, 4.0),
    tokens=st.floats(10, 10_000),
)
def test_a_better_gpu_is_never_slower(gpu: str, model: str, factor: float, tokens: float) -> None:
    plain = GPUS[gpu]
    before = decode_rate(plain, MODELS[model], prompt_tokens=100, completion_tokens=tokens)
    faster = replace(
        plain, flops_per_s=factor * plain.flops_per_s, bytes_per_s=factor * plain.bytes_per_s
    )
    after = decode_rate(faster, MODELS[model], prompt_tokens=100, completion_tokens=tokens)
    if before is None:
        assert after is None
    else:
        assert after is not None
        assert after.tokens_per_s >= before.tokens_per_s * (1 - 1e-12)
