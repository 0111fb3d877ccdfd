"""Fixtures shared by all tests: a model small enough to run anywhere, in a real one's format."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def make_tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that writes a small Qwen3 checkpoint (config.json, safetensors).

    Without arguments it is the 100,736-parameter model of the quickstart: vocabulary 32, tied
    embeddings, token ids <pad> 0, <bos> 1, <eos> 2. Keyword arguments override Qwen3Config fields;
    `seed` fixes the weights. torch is imported only when a test asks for a model.
    """

    def make(*, seed: int = 0, **overrides: object) -> Path:
        import torch
        from transformers import Qwen3Config, Qwen3ForCausalLM

        settings: dict[str, object] = {
            "vocab_size": 32,
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 128,
            "initializer_range": 0.04,
            "tie_word_embeddings": True,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **overrides,
        }
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = Qwen3ForCausalLM(Qwen3Config(**settings))
        directory = tmp_path_factory.mktemp("tiny_model")
        model.save_pretrained(directory)
        return directory

    return make


@pytest.fixture(scope="session")
def tiny_model_dir(make_tiny_model: Callable[..., Path]) -> Path:
    """Return the directory of the tiny quickstart-sized Qwen3; treat it as read-only."""
    return make_tiny_model()
