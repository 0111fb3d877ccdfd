"""A character-level Qwen3 of 100,736 parameters, small enough to learn on a laptop's CPU.

It is a normal Hugging Face directory: AutoTokenizer and AutoModelForCausalLM load it, and every
node treats it like any other model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from echo.engine.weights import save_safetensors

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")

CHARACTERS = "0123456789+-*/=()<>:,;|. "

PAD_ID, BOS_ID, EOS_ID = range(3)

HEAD_DIM = 16

VLLM_HEAD_DIM = 32
"""The smallest head that vLLM's attention for CPUs knows; half as many make the same width."""

VOCAB_SIZE = 32
"""Rows of the embedding: the 28 tokens, rounded up to a multiple of 16."""


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer: one token per character, <bos> in front, no chat template.

    A character that it does not know becomes <pad>, so that any task's prompts pass through.
    """
    vocabulary = {token: index for index, token in enumerate((*SPECIAL_TOKENS, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", BOS_ID)]
    )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )


def shape(head_dim: int) -> dict[str, Any]:
    """Return the dimensions of the model: 64 wide in attention, whatever the size of a head."""
    return {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 64 // head_dim,
        "num_key_value_heads": 32 // head_dim,
        "head_dim": head_dim,
        "max_position_embeddings": 128,
        "initializer_range": 0.04,
    }


def build_config(*, head_dim: int = HEAD_DIM) -> Qwen3Config:
    """Return the configuration of the model."""
    return Qwen3Config(
        **shape(head_dim),
        tie_word_embeddings=True,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
        architectures=["Qwen3ForCausalLM"],
        dtype="float32",
    )


def build_model(*, seed: int, head_dim: int = HEAD_DIM) -> Qwen3ForCausalLM:
    """Return the model with random float32 weights; torch's global generator is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(build_config(head_dim=head_dim))


def save_tiny_model(directory: Path, model: Qwen3ForCausalLM) -> None:
    """Write model and tokenizer as a Hugging Face directory."""
    directory.mkdir(parents=True, exist_ok=True)
    build_tokenizer().save_pretrained(directory)
    model.config.save_pretrained(directory)
    save_safetensors(directory, dict(model.named_parameters()))
