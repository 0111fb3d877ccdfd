"""The memory budget compared with the tensors of real steps, counted by torch's tracker."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AutoConfig, AutoModelForCausalLM

from echo.algo.losses import make_loss
from echo.config.load import parse_config
from echo.config.memory.footprint import Footprint
from echo.config.memory.step import ModelFacts
from echo.core.rollout import Group
from echo.train.trainer import Trainer
from tests.train.test_trainer import make_rollout
from tests.train.trainers import FAST, trainer_of

SHAPE: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
PROMPT_TOKENS, COMPLETION_TOKENS = 16, 112
MICRO_BATCH_TOKENS = 2 * (PROMPT_TOKENS + COMPLETION_TOKENS)
AGREEMENT = 0.05
"""Allowed difference of the budget from the tracked bytes, as a share of these."""


def make_model(directory: Path, *, is_tied: bool) -> Path:
    config = AutoConfig.for_model(
        "qwen3", tie_word_embeddings=is_tied, max_position_embeddings=256, **SHAPE
    )
    config.save_pretrained(directory)
    return directory


def weights_of(model_dir: Path) -> dict[str, torch.Tensor]:
    config = AutoConfig.from_pretrained(model_dir)
    return dict(AutoModelForCausalLM.from_config(config).state_dict())


def make_groups() -> list[Group]:
    """Two micro-batches of two rollouts each; in the second, gradients exist already."""
    generator = np.random.default_rng(0)
    return [
        Group(
            group_id=number,
            attempt=0,
            worker_id="w1",
            prompt_ids=np.arange(3, 3 + PROMPT_TOKENS, dtype=np.int32),
            rollouts=tuple(
                make_rollout(generator.integers(3, 1000, size=COMPLETION_TOKENS).tolist(), reward)
                for reward in (1.0, 0.0)
            ),
        )
        for number in range(2)
    ]


def peak_of_a_step(trainer: Trainer) -> int:
    """Return the largest number of bytes of tensors within a step."""
    tracker = MemTracker()
    policy, optimizer = trainer.policy, trainer.adapters.progress.optimizer
    tracker.track_external(
        policy.model, *policy.parameters().values(), *optimizer._tensors().values()
    )
    compute_as_ever = policy._compute

    def one_after_the_other(compute: Callable[..., Any], *arguments: Any) -> Any:
        tracker.reset_mod_stats()  # it takes each module for called once
        return compute_as_ever(compute, *arguments)

    policy._compute = one_after_the_other  # type: ignore[method-assign]
    with tracker, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Expected a tensor or a traceable wrapper")
        trainer.step(make_groups())
    (found,) = tracker.get_tracker_snapshot("peak").values()
    return max(found.values())  # of which one is the sum


@pytest.mark.parametrize(
    ("dtype", "has_checkpointing", "state", "is_tied"),
    [
        ("bfloat16", True, "float32", True),
        pytest.param("float32", False, "float32", True, marks=pytest.mark.matrix),
        pytest.param("float32", True, "float32", False, marks=pytest.mark.matrix),
        pytest.param("bfloat16", False, "float32", True, marks=pytest.mark.matrix),
        pytest.param("bfloat16", False, "8bit", True, marks=pytest.mark.matrix),
        pytest.param("bfloat16", True, "float32", False, marks=pytest.mark.matrix),
    ],
)
@pytest.mark.slow
def test_the_budget_is_the_peak_of_a_real_step(
    dtype: str, has_checkpointing: bool, state: str, is_tied: bool, tmp_path: Path
) -> None:
    torch.set_num_threads(1)
    model_dir = make_model(tmp_path, is_tied=is_tied)
    trainer = trainer_of(
        model_dir,
        tensors=weights_of(model_dir),
        loss=make_loss("grpo"),
        optimizer=FAST,
        dtype=getattr(torch, dtype),
        gradient_checkpointing=has_checkpointing,
        optimizer_state=state,
        micro_batch_tokens=MICRO_BATCH_TOKENS,
    )
    settings = {
        "learner.dtype": dtype,
        "learner.gradient_checkpointing": has_checkpointing,
        "learner.micro_batch_tokens": MICRO_BATCH_TOKENS,
        "optimizer.state": state,
        "sampling.max_completion_tokens": COMPLETION_TOKENS,
        "eval.interval_steps": 0,
    }
    names = {"num_layers": "num_hidden_layers", "num_heads": "num_attention_heads"}
    names |= {"num_kv_heads": "num_key_value_heads"}
    own = ("hidden_size", "intermediate_size", "vocab_size", "head_dim")
    sizes: dict[str, Any] = {name: SHAPE[name] for name in own}
    sizes |= {name: SHAPE[theirs] for name, theirs in names.items()}
    facts = ModelFacts(
        num_params=sum(tensor.numel() for tensor in trainer.policy.parameters().values()),
        is_tied=is_tied,
        **sizes,
    )
    overrides = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    footprint = Footprint(
        config=parse_config({}, overrides),
        facts=facts,
        prompt_tokens=PROMPT_TOKENS,
        has_tensors_alone=True,
    )
    items = [item for item in footprint.learner_items() if item.is_on_gpu]
    budget = sum(item.num_bytes for item in items)
    peak = peak_of_a_step(trainer)
    assert budget == pytest.approx(peak, rel=AGREEMENT), items


@pytest.mark.parametrize("options", [["--optimizer", "float32", "8bit"], ["--ranks", "8"]])
@pytest.mark.matrix
@pytest.mark.slow
def test_it_is_that_of_real_widths(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layers of Qwen3-4B at 8,192 tokens, on tensors without memory."""
    import bench_learner
    import harness

    arguments = ["memory", "--model", "Qwen3-4B", "--layers", "2", "--tokens", "8192"]
    arguments += ["--checkpointing", "--dtype", "bfloat16", "--device", "cpu"]
    monkeypatch.setattr("sys.argv", ["bench_learner.py", *arguments, *options])
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    bench_learner.main()
    (path,) = tmp_path.glob("learner_memory*.json")
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) == options.count("float32") + 1
    for row in rows:
        # Gradients inside of a layer are not reckoned; of two layers they are a twentieth.
        assert row["reckoned/tracked"] == pytest.approx(1.0, abs=2 * AGREEMENT)
