"""The catalogue's names and dimensions."""

from __future__ import annotations

from echo.fleet.gpus import GPUS, MODELS


def test_names_are_the_keys() -> None:
    assert all(gpu.name == name for name, gpu in GPUS.items())
    assert all(model.name == name for name, model in MODELS.items())
    assert {"RTX 4090", "A100-80GB", "H100-SXM", "H20", "H800"} <= GPUS.keys()


def test_the_cache_of_a_token_by_hand() -> None:
    # Keys and values of 36 layers x 8 heads x 128 numbers of 2 bytes: 147 456.
    assert MODELS["Qwen3-4B"].cache_bytes_per_token == 2 * 36 * 8 * 128 * 2


def test_the_published_inputs_of_hex_stand_as_printed() -> None:
    h20, h800 = GPUS["H20"], GPUS["H800"]
    assert (h20.flops_per_s, h20.bytes_per_s, h20.price_per_h) == (148e12, 4e12, 1.85)
    assert (h800.flops_per_s, h800.bytes_per_s, h800.price_per_h) == (756e12, 2e12, 5.28)
    assert (h20.link_bytes_per_s, h800.link_bytes_per_s) == (450e9, 200e9)
