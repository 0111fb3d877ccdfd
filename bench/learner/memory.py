"""Memory budget of --dry-run, beside what a step takes."""

from __future__ import annotations

import argparse
import gc
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig

from echo.config.load import parse_config
from echo.config.memory.footprint import Footprint
from echo.config.memory.step import ModelFacts
from echo.core.errors import EchoError
from learner.fake_step import peak_bytes
from learner.groups import PROMPT_TOKENS, make_groups
from learner.models import RandomWeights, settings_of, trainer_step, vocab_size_of


def compare_memory(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Reckon the peak of a step beside what it is, by kind of optimizer."""
    settings = settings_of(arguments.model)
    if arguments.layers:
        settings["num_hidden_layers"] = arguments.layers
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    is_measured = "cuda" in arguments.device
    if is_measured and (arguments.layers or arguments.ranks > 1):
        raise SystemExit("a whole model on one GPU is measured: leave out --layers and --ranks")
    rows: list[dict[str, Any]] = []
    for state in arguments.optimizer:
        weights = RandomWeights(config, "cpu")
        reckoned = budget_of(arguments, config, weights.num_params, state)
        row: dict[str, Any] = {"optimizer": state, "on_a_gpu_gb": reckoned.on_gpu / 1e9}
        if is_measured:
            row |= _measured(arguments, state)
            free_gpu()
            if "reserved_gb" in row:
                row["reckoned/reserved"] = row["on_a_gpu_gb"] / row["reserved_gb"]
        else:
            tracked = peak_bytes(
                config,
                weights,
                tokens=arguments.tokens,
                dtype=getattr(torch, arguments.dtype),
                state=state,
                has_checkpointing=arguments.checkpointing,
                num_ranks=arguments.ranks,
            )
            row |= {"reckoned_gb": reckoned.beside_model / 1e9, "tracked_gb": tracked / 1e9}
            row["reckoned/tracked"] = reckoned.beside_model / tracked
        rows.append(row)
    return rows


def _measured(arguments: argparse.Namespace, state: str) -> dict[str, Any]:
    """Return what the second step takes of a GPU, without the last version; or why it failed."""
    groups = make_groups(arguments, vocab_size_of(arguments.model))
    try:
        step = trainer_step(arguments, "packed", state=state)
        step(groups)
        free_gpu()  # what the first step alone has needed, such as what is compiled
        torch.cuda.reset_peak_memory_stats()
        step(groups)
    except (EchoError, RuntimeError) as error:
        return {"failed": first_line(error)}
    return {
        "allocated_gb": torch.cuda.max_memory_allocated() / 1e9,
        "reserved_gb": torch.cuda.max_memory_reserved() / 1e9,
    }


class Reckoned(NamedTuple):
    """Bytes of a step."""

    beside_model: int
    """Where the model is, with the head of a CPU."""
    on_gpu: int
    """Of a GPU: with its own head, and a reserve."""


def budget_of(arguments: argparse.Namespace, config: Any, num_params: int, state: str) -> Reckoned:
    """Return what the memory budget says."""
    checkpointing = str(arguments.checkpointing).lower()
    footprint = Footprint(
        config=parse_config(
            {},
            [
                f"learner.dtype={arguments.dtype}",
                f"learner.gradient_checkpointing={checkpointing}",
                f"learner.micro_batch_tokens={arguments.tokens}",
                f"optimizer.state={state}",
                "network.codec=full",  # no version is kept
                "eval.interval_steps=0",
                f"sampling.max_completion_tokens={arguments.tokens - PROMPT_TOKENS}",
            ],
        ),
        facts=ModelFacts(
            num_params=num_params,
            num_layers=config.num_hidden_layers,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            vocab_size=config.vocab_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            is_tied=config.tie_word_embeddings,
        ),
        prompt_tokens=PROMPT_TOKENS,
        num_ranks=arguments.ranks,
        has_tensors_alone=True,
    )

    def beside_model(footprint: Footprint) -> int:
        return sum(item.num_bytes for item in footprint.learner_items() if item.is_on_gpu)

    return Reckoned(beside_model(footprint), beside_model(replace(footprint, has_gpu=True)))


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def free_gpu() -> None:
    """Let go of the model that was; those of others are found by a collection alone."""
    gc.collect()
    torch.cuda.empty_cache()
