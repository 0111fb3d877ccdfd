"""The most memory of a trainer's step on a CPU, beside what the memory budget says of it."""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoConfig

from echo.config.load import parse_config
from echo.config.memory.footprint import Footprint
from echo.config.memory.models import read_model_facts
from echo.config.schema import Config
from echo.core.rollout import Group
from echo.engine import allocator
from echo.engine.lora import Lora
from echo.engine.weights import save_safetensors
from echo.runtime.learner.setup import build_loss
from echo.train.batch import AdvantageSettings
from echo.train.models.policy import Compute, ModelSource
from echo.train.optimizer import OptimizerSettings
from echo.train.trainer import Trainer
from learner.groups import rollout
from learner.models import RandomWeights

PROMPT_TOKENS, COMPLETION_TOKENS, GROUP_SIZE = 58, 64, 8
NUM_STEPS = 2
CASES = {
    "shared": (),
    "apart": (),
    "checkpointed": ("learner.gradient_checkpointing=true",),
    "lora": ("lora.rank=16",),
    "kl": ("reference.kl_coef=0.1",),
}
"""Settings of a step, each of which is measured; all but "apart" share prompts in a row."""


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Make steps of SmolLM2's shape with a vocabulary; this process has made none before."""
    torch.set_num_threads(arguments.threads)
    allocator.tune(os.environ)  # as every node does
    config = AutoConfig.for_model(
        "llama",
        vocab_size=arguments.of,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=arguments.layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    weights = RandomWeights(config, "cpu")
    before = psutil.Process().memory_info().rss
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        config.save_pretrained(directory)
        settings = settings_of(arguments)
        shares = arguments.case != "apart"
        items = budget_of(settings, directory, weights.num_params, shares_prompts=shares)
        trainer = make_trainer(arguments, settings, directory, weights)
    rng, peaks = random.Random(0), []
    with ThreadPoolExecutor(1) as pool:  # as in a node: memory of a thread comes from an own heap
        for _ in range(NUM_STEPS):
            forget_peak()
            pool.submit(trainer.step, make_groups(arguments, rng)).result()
            peaks.append(peak_bytes())
    after = psutil.Process().memory_info().rss
    reckoned, peak = sum(items.values()), max(peaks)
    return {
        "case": arguments.case,
        "vocab_size": arguments.of,
        "before_mb": round(before / 1e6),
        "peak_mb": round(peak / 1e6),
        "after_mb": round(after / 1e6),
        "reckoned_mb": round(reckoned / 1e6),
        "reckoned/peak": round(reckoned / peak, 3),
        "items_mb": {name: round(size / 1e6) for name, size in items.items()},
    }


def make_trainer(
    arguments: argparse.Namespace, settings: Config, directory: Path, weights: RandomWeights
) -> Trainer:
    """Return the trainer of a case; `directory` has the model's configuration."""
    source = ModelSource(model_dir=directory, tensors=weights)
    if arguments.case == "lora":  # a base is read from files
        save_safetensors(directory, {key: weights[key].bfloat16() for key in weights})
        source = ModelSource(model_dir=directory, lora=Lora(base_dir=directory, rank=16, alpha=32))
    return Trainer(
        source,
        Compute(
            device=torch.device("cpu"),
            dtype=getattr(torch, arguments.dtype),
            share_prompts=arguments.case != "apart",
            gradient_checkpointing=arguments.case == "checkpointed",
        ),
        loss=build_loss(settings),
        optimizer=OptimizerSettings(learning_rate=1e-6, warmup_steps=0),
        advantages=AdvantageSettings(),
        reference=source if settings.reference.kl_coef else None,
    )


def settings_of(arguments: argparse.Namespace) -> Config:
    """Return the settings of a run that would make such steps."""
    return parse_config(
        {},
        [
            f"learner.dtype={arguments.dtype}",
            "learner.gradient_checkpointing=false",
            "eval.interval_steps=0",
            f"batch.groups_per_step={arguments.groups}",
            f"batch.group_size={GROUP_SIZE}",
            f"sampling.max_completion_tokens={COMPLETION_TOKENS}",
            *CASES[arguments.case],
        ],
    )


def budget_of(
    config: Config, model_dir: Path, num_params: int, *, shares_prompts: bool
) -> dict[str, int]:
    """Return the bytes that the memory budget counts, by item; nothing is published here."""
    facts = read_model_facts(model_dir)
    shares_prompts = shares_prompts and facts.shares_prompts
    footprint = Footprint(
        config=config,
        facts=replace(facts, num_params=num_params, shares_prompts=shares_prompts),
        prompt_tokens=PROMPT_TOKENS,
    )
    return {
        item.name: item.num_bytes
        for item in footprint.learner_items()
        if item.is_on_gpu or item.name == "process"
    }


def make_groups(arguments: argparse.Namespace, rng: random.Random) -> list[Group]:
    """Return the most tokens that a step may have."""

    def tokens(number: int) -> list[int]:
        return [rng.randrange(arguments.of) for _ in range(number)]

    return [
        Group(
            group_id=number,
            attempt=0,
            worker_id="bench",
            prompt_ids=torch.tensor(tokens(PROMPT_TOKENS), dtype=torch.int32).numpy(),
            rollouts=tuple(
                rollout(tokens(COMPLETION_TOKENS), float(member % 2), rng)
                for member in range(GROUP_SIZE)
            ),
        )
        for number in range(arguments.groups)
    ]


def forget_peak() -> None:
    """Have the kernel measure the peak from now on."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_bytes() -> int:
    """Return the most resident bytes since then."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))
