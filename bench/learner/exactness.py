"""Log-probabilities of packed and of padded rows, family by family."""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from echo.algo.losses import GrpoLoss
from echo.core.rollout import Group
from echo.train.models.policy import Compute, ModelSource
from echo.train.optimizer import OptimizerSettings
from echo.train.trainer import Trainer
from learner.groups import rollout
from learner.models import TINY

WINDOW = {"sliding_window": 5}
MIXED = {"layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES: Mapping[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": WINDOW,
    "phi3": WINDOW,
    "smollm3": {"no_rope_layers": [1, 0]},
    "olmo3": WINDOW | MIXED,
    "gemma3_text": WINDOW | MIXED | {"query_pre_attn_scalar": 16},
    "qwen3_moe": EXPERTS,
}


def compare_families(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Score random rollouts in packed and in padded rows, and once more in float32."""
    rng = random.Random(0)
    sizes = (16, 3, 40, 1, 23)
    groups = [
        Group(
            group_id=number,
            attempt=0,
            worker_id="bench",
            prompt_ids=np.array([1, *range(3, 4 + number)], dtype=np.int32),
            rollouts=tuple(
                rollout([rng.randrange(3, 32) for _ in range(size)], 0.0, rng) for _ in range(2)
            ),
        )
        for number, size in enumerate(sizes)
    ]
    rows: list[dict[str, Any]] = []
    for family, settings in FAMILIES.items():
        scores = {
            (packing, dtype): _scores(family, settings, packing, dtype, arguments.device, groups)
            for packing in ("packed", "padded")
            for dtype in {"float32", arguments.dtype}
        }
        truth = scores["padded", "float32"]
        row: dict[str, Any] = {"family": family}
        for (packing, dtype), values in sorted(scores.items()):
            difference = values - truth
            row[f"{packing} {dtype} rms"] = float(np.sqrt((difference**2).mean()))
            row[f"{packing} {dtype} max"] = float(np.abs(difference).max())
        rows.append(row)
    return rows


def _scores(
    family: str,
    settings: Mapping[str, Any],
    packing: str,
    dtype: str,
    device: str,
    groups: Sequence[Group],
) -> Any:
    with tempfile.TemporaryDirectory() as directory:
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **{**TINY, **settings})
        model = AutoModelForCausalLM.from_config(config)
        model.save_pretrained(directory)
        trainer = Trainer(
            ModelSource(model_dir=Path(directory)),
            Compute(
                device=torch.device(device),
                dtype=getattr(torch, dtype),
                packs=packing == "packed",
            ),
            loss=GrpoLoss(),
            optimizer=OptimizerSettings(),
        )
        assert f"on {packing} rows" in trainer.describe_rows(), trainer.describe_rows()
        scores = trainer.forward(groups)
    return np.concatenate([row.astype(np.float64) for rows in scores for row in rows])
