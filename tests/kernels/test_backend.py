"""The choice of a backend: by device and dtype, by name, and with or without triton."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from echo.kernels import torch_kernels
from echo.kernels.logprob import linear_logprob, load_kernels

REPOSITORY = Path(__file__).parents[2]

# The CPU's tensors take the whole path, then triton is demanded by name.
SCRIPT = """
import sys
if {is_absent}: sys.modules["triton"] = None
import torch
from echo.kernels.logprob import linear_logprob
hidden = torch.ones(2, 8, dtype=torch.bfloat16, requires_grad=True)
ids = torch.zeros(2, dtype=torch.long)
linear_logprob(hidden, torch.ones(5, 8, dtype=torch.bfloat16), ids)[0].sum().backward()
print(hidden.grad is not None, {is_absent} or "triton" not in sys.modules)
try: linear_logprob(hidden, torch.ones(5, 8, dtype=torch.bfloat16), ids, backend="triton")
except ValueError as error: print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_absent", "message"),
    [
        (True, "backend = 'triton': the package triton is not installed; 'torch' computes"),
        pytest.param(
            False,
            "backend = 'triton': the tensors are on the CPU, and TRITON_INTERPRET=1 was not set",
            marks=pytest.mark.skipif(
                importlib.util.find_spec("triton") is None, reason="triton is not installed"
            ),
        ),
    ],
)
def test_neither_triton_nor_a_driver_is_needed_on_the_cpu(*, is_absent: bool, message: str) -> None:
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(is_absent=is_absent)],
        env=environment,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    computed, refused = done.stdout.splitlines()
    assert computed == "True True"
    assert refused.startswith(message)


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_cpu_is_served_by_torch(backend: str, dtype: torch.dtype) -> None:
    matrix = torch.ones(2, 8, dtype=dtype)
    assert load_kernels(backend, matrix, matrix) is torch_kernels  # type: ignore[arg-type]
    assert load_kernels(backend, matrix[0]) is torch_kernels  # type: ignore[arg-type]


def test_an_unknown_backend_is_named() -> None:
    with pytest.raises(ValueError, match="backend = 'cuda': use 'auto', 'triton' or 'torch'"):
        linear_logprob(
            torch.ones(1, 2),
            torch.ones(3, 2),
            torch.tensor([0]),
            backend="cuda",  # type: ignore[arg-type]
        )
