"""Compute the expected numbers of test_adamw_8bit.py by torchao.

Where torchao is installed:
    python -m tests.kernels.torchao_updates > tests/kernels/torchao_updates.json
"""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import Any

import torch

from echo.kernels.adamw_8bit import BLOCK
from tests.kernels.test_adamw_8bit import (
    BETAS,
    CPU,
    DECAY,
    EPSILON,
    RATE,
    SMALL,
    first_weights,
    gradients,
    updates,
)


def updated(betas: tuple[float, float]) -> dict[str, Any]:
    """Return weights, codes and scales after all updates."""
    from torchao.optim.adam import single_param_adam
    from torchao.optim.subclass_8bit import OptimState8bit

    weights = first_weights(SMALL)
    moments = [
        OptimState8bit(
            torch.zeros(SMALL, dtype=torch.uint8),
            torch.zeros(SMALL[0] * SMALL[1] // BLOCK),
            OptimState8bit.zeros((BLOCK,), is_signed, BLOCK, CPU).qmap,
            is_signed,
            dtype=torch.float32,
        )
        for is_signed in (True, False)
    ]
    for step in range(1, 1 + len(updates(betas))):
        single_param_adam(
            weights, gradients(step, SMALL), torch.tensor(float(step)), *moments, None,
            torch.tensor(RATE), *betas, DECAY, EPSILON, IS_ADAMW=True, BF16_STOCHASTIC_ROUND=False,
        )  # fmt: skip
    return {
        "weights": weights.flatten().tolist(),
        "codes": [bytes(moment.codes.flatten().tolist()).hex() for moment in moments],
        "scales": [moment.scale.tolist() for moment in moments],
    }


if __name__ == "__main__":
    found = {str(betas): updated(betas) for betas in BETAS}
    print(json.dumps({"torchao": version("torchao"), "updates": found}))
