"""A run that trains an adapter: it learns, survives its learner's death, and peft loads the end."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from statistics import mean

import pytest

from tests.e2e.cluster import Cluster

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

MAX_STEPS = 16


def test_an_adapter_learns_across_a_crash_and_is_exported(
    cluster: Cluster, model_dir: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    # 64 rollouts per step: of 16 the means differ by more than what is learned on a bad day.
    cluster.settings = {
        "run.max_steps": MAX_STEPS,
        "batch.groups_per_step": 16,
        "worker.max_concurrent_rollouts": 32,
    }
    trained = {"lora.rank": 8, "optimizer.learning_rate": 1e-2}
    worker = cluster.start("worker", name="w1", settings={"model.name": str(model_dir)})
    doomed = cluster.start("learner", "--crash-at", "published:7", settings=trained)
    assert cluster.wait_for_end(doomed) == -signal.SIGKILL
    cluster.finish(cluster.start("learner", "--resume", settings=trained), worker)

    assert cluster.audit().num_steps == MAX_STEPS
    rewards = [row["reward/mean"] for row in cluster.metrics() if "reward/mean" in row]
    assert mean(rewards[-4:]) > mean(rewards[:4]) + 0.1, rewards
    checkpoint = cluster.run_dir / "checkpoints" / f"step_{MAX_STEPS:06d}"
    assert (checkpoint / "weights.safetensors").stat().st_size < 100_000, "more than the adapter"

    final = cluster.run_dir / "final"
    assert json.loads((final / "adapter_config.json").read_text())["r"] == 8
    base = AutoModelForCausalLM.from_pretrained(model_dir)
    merged = PeftModel.from_pretrained(base, final).merge_and_unload()
    assert sum(p.numel() for p in merged.parameters()) > 100_000
