"""One optimizer step with the Triton backend against the PyTorch one.

TRITON_INTERPRET=1 python -m tests.engine.triton_step float32             anywhere
python -m tests.engine.triton_step float32 bfloat16                       on an NVIDIA GPU
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

from echo.algo.losses import make_loss
from echo.engine.model import build_model, save_tiny_model
from echo.kernels import triton_kernels
from echo.kernels.contract import BackendName
from echo.train.trainer import OptimizerSettings
from tests.train.test_trainer import gradients, make_groups
from tests.train.trainers import trainer_of

DEVICE = "cpu" if triton_kernels.IS_INTERPRETED else "cuda"


def gradient(model_dir: Path, dtype: torch.dtype, backend: BackendName) -> torch.Tensor:
    trainer = trainer_of(
        model_dir,
        loss=make_loss("grpo"),
        optimizer=OptimizerSettings(),
        device=torch.device(DEVICE),
        dtype=dtype,
        backend=backend,
    )
    return torch.cat([part.flatten().cpu() for part in gradients(trainer, make_groups()).values()])


def main() -> int:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        model_dir = Path(directory) / "model"
        save_tiny_model(model_dir, build_model(seed=0))
        for dtype in (getattr(torch, name) for name in sys.argv[1:]):
            found, expected = (gradient(model_dir, dtype, name) for name in ("triton", "torch"))
            cosine = float(torch.nn.functional.cosine_similarity(found, expected, dim=0))
            print(f"{str(dtype).removeprefix('torch.')} cosine {cosine:.6f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
