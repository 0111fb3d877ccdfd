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

# The CPU's tensors take the whole path; then triton is demanded by name, where it is not installed
# and where it is.
SCRIPT = """
import sys
import torch
from echo.kernels.logprob import linear_logprob
hidden = torch.ones(2, 8, dtype=torch.bfloat16, requires_grad=True)
arguments = torch.ones(5, 8, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.long)
def compute():
    hidden.grad = None
    linear_logprob(hidden, *arguments)[0].sum().backward()
    return hidden.grad is not None
def demand():
    try: linear_logprob(hidden, *arguments, backend="triton")
    except ValueError as error: print(error)
print(compute(), "triton" not in sys.modules)
sys.modules["triton"] = None
print(compute())
demand()
del sys.modules["triton"]
demand()
"""


@pytest.mark.slow
def test_neither_triton_nor_a_driver_is_needed_on_the_cpu() -> None:
    environment = {name: text for name, text in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=environment,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
    )
    computed, without, absent, present = done.stdout.splitlines()
    assert (computed, without) == ("True True", "True")
    assert absent.startswith(
        "backend = 'triton': the package triton is not installed; 'torch' computes"
    )
    if importlib.util.find_spec("triton") is not None:
        assert present.startswith(
            "backend = 'triton': the tensors are on the CPU, and TRITON_INTERPRET=1 was not set"
        )


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_cpu_is_served_by_torch(backend: str, dtype: torch.dtype) -> None:
    matrix = torch.ones(2, 8, dtype=dtype)
    assert load_kernels(backend, matrix, matrix) is torch_kernels  # type: ignore[arg-type]


def test_an_unknown_backend_is_named() -> None:
    with pytest.raises(ValueError, match="backend = 'cuda': use 'auto', 'triton' or 'torch'"):
        linear_logprob(
            torch.ones(1, 2),
            torch.ones(3, 2),
            torch.tensor([0]),
            backend="cuda",  # type: ignore[arg-type]
        )
