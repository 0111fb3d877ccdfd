"""The trainer on a GPU, each way that it can compute there, beside that of a CPU in float32.

Run on one H200 with PyTorch 2.11, without the compiled ways and those of an adapter: `python -m
pytest -m gpu tests/train/test_trainer_gpu.py` (bench/README.md).
With `--all` a CPU plays the GPU's part, as far as that goes.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from echo.algo.losses import make_loss
from echo.core.rollout import PolicyVersion
from echo.engine.hf.engine import TransformersEngine
from echo.engine.lora import Lora
from echo.engine.model import load_directory
from echo.engine.weights import VersionImages, host_bytes, publish_image
from echo.train.trainer import Trainer
from tests.engine.engine_contract import request, run
from tests.engine.test_transformers_engine import sampling
from tests.train.test_mixed_precision import cosine, make_trainer
from tests.train.test_trainer import gradients, make_groups
from tests.train.trainers import TWO_UPDATES

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # the compiler's own

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.matrix),
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
        ],
    ),
]
WAIT = "called a synchronizing CUDA operation"
ROUNDED = {"dtype": torch.bfloat16}
COMPILED = ROUNDED | {"compile_layers": True}
ADAPTER = {"lora": {"rank": 4, "alpha": 8}}
WAYS: Mapping[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": ROUNDED,
    "padded": ROUNDED | {"packs": False},
    "checkpointed": ROUNDED | {"gradient_checkpointing": True},
    "inputs offloaded": ROUNDED | {"gradient_checkpointing": "offload"},
    "moments offloaded": ROUNDED | {"optimizer_state": "offloaded"},
    "moments in 8 bits": ROUNDED | {"optimizer_state": "8bit"},
    "several updates": ROUNDED | {"optimizer": TWO_UPDATES, "loss": make_loss("decoupled_ppo")},
    "whole groups": ROUNDED | {"loss": make_loss("gepo")},
    "adapter": ROUNDED | ADAPTER,
    "compiled": COMPILED,
    "compiled, padded": COMPILED | {"packs": False},
    "compiled, checkpointed": COMPILED | {"gradient_checkpointing": True},
    "compiled, inputs offloaded": COMPILED | {"gradient_checkpointing": "offload"},
    "compiled, adapter": COMPILED | ADAPTER,
}


def trainer_on(device: str, model_dir: Path, way: str, **options: Any) -> Trainer:
    settings = {"loss": make_loss("grpo"), **WAYS[way], **options}
    if "lora" in settings:
        settings["lora"] = Lora(base_dir=model_dir, **settings["lora"])
    return make_trainer(model_dir, settings.pop("loss"), device=torch.device(device), **settings)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.timeout(600)
def test_a_gpu_has_the_gradient_and_the_scores_of_a_cpu(
    way: str, device: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    groups = make_groups(6)
    exact = {
        "dtype": torch.float32,
        "optimizer_state": "float32",
        "gradient_checkpointing": False,
        "compile_layers": False,
    }
    alone = trainer_on("cpu", tiny_model_dir, way, **exact)
    there = trainer_on(device, tiny_model_dir, way)
    for one, other in zip(alone.forward(groups), there.forward(groups), strict=True):
        for row, expected in zip(other, one, strict=True):
            assert abs(row - expected).max() < (1e-4 if way == "float32" else 0.1)
    if way != "several updates":  # whose gradients are of several policies
        found = {
            name: tensor.cpu()
            for name, tensor in gradients(trainer_on(device, tiny_model_dir, way), groups).items()
        }
        near = cosine(gradients(trainer_on("cpu", tiny_model_dir, way, **exact), groups), found)
        assert near > (0.99999 if way == "float32" else 0.99)
    for _ in range(2):
        wanted = alone.step(groups).metrics
        metrics = there.step(groups).metrics
        assert metrics.keys() == wanted.keys()
        assert metrics["loss/policy"] == pytest.approx(wanted["loss/policy"], abs=0.02)
    there.save_state(tmp_path)
    resumed = trainer_on(device, tiny_model_dir, way)
    resumed.load_state(tmp_path)
    # Sums have no fixed order on a GPU.
    loss = there.step(groups).metrics["loss/policy"]
    assert resumed.step(groups).metrics["loss/policy"] == pytest.approx(loss, abs=1e-3)


@pytest.mark.parametrize("device", DEVICES[1:])
@pytest.mark.parametrize("way", ["bfloat16", "padded", "moments in 8 bits", "compiled"])
def test_a_step_waits_for_the_gpu_three_times_at_most(
    way: str, device: str, tiny_model_dir: Path
) -> None:
    """Whatever the number of micro-batches; torch warns of each wait. Beside test_waits.py."""
    trainer = trainer_on(device, tiny_model_dir, way, micro_batch_tokens=64)
    groups = make_groups(16)
    assert len(list(trainer.policy.micro_batches(trainer.prepare(groups).samples))) > 3
    for _ in range(2):  # what the first step makes stays
        trainer.step(groups)
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            trainer.step(groups)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [f"{each.filename}:{each.lineno}" for each in told if WAIT in str(each.message)]
    assert 1 <= len(waits) <= 3, waits


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("is_on_device", [None, False])
def test_a_version_is_of_the_weights_before_the_next_step(
    is_on_device: bool | None, device: str, tiny_model_dir: Path
) -> None:
    trainer = trainer_on(device, tiny_model_dir, "bfloat16")
    images = VersionImages(
        "bfloat16",
        block_bytes=1 << 14,
        is_on_device=is_on_device,
        copy_stream=trainer.weights.copy_stream,
    )
    for step in range(4):
        _, expected = publish_image(trainer.snapshot(), "bfloat16")
        made = images.make(trainer.tensors(), PolicyVersion(1, step))
        trainer.step(make_groups(6, seed=step))
        if made.ready is not None:
            made.ready.result()
        assert torch.equal(host_bytes(made.memory), host_bytes(expected))


@pytest.mark.parametrize("device", DEVICES)
def test_an_evaluation_beside_the_training_samples_what_it_does_alone(
    device: str, tiny_model_dir: Path
) -> None:
    def sampled(*, is_beside: bool) -> list[list[int]]:
        engine = TransformersEngine(
            tiny_model_dir, device=device, rollout_bytes=1 << 20, is_beside=is_beside
        )
        engine.load(load_directory(tiny_model_dir, "float32"))
        requests = [request([1, 5, n], n, str(n)) for n in range(8)]
        return [found.token_ids.tolist() for found in run(engine, requests, sampling())]

    alone = sampled(is_beside=False)
    trainer = trainer_on(device, tiny_model_dir, "bfloat16")
    with ThreadPoolExecutor(1) as pool:
        evaluation = pool.submit(sampled, is_beside=True)
        while not evaluation.done():
            trainer.step(make_groups(6))
        assert evaluation.result() == alone
