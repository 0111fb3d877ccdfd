"""Which backend computes an operation.

Triton is never imported before it is needed, and not needed without a GPU: PyTorch for CPUs does
not bring it, PyTorch for CUDA does.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

from echo.kernels import torch_kernels
from echo.kernels.contract import BackendName, Kernels, is_describable


def load_kernels(backend: BackendName, values: Tensor, weight: Tensor | None = None) -> Kernels:
    """Return the backend that computes with `values`, and with the LM head if there is one.

    "auto" is Triton on an NVIDIA GPU, products with the head only in bfloat16; PyTorch elsewhere.
    No tensor core multiplies float32 exactly, so cuBLAS is best there; gradients of logits in
    float16 would need their loss scaled up.

    Args:
        backend: by name.
        values: [N, D] hidden states with `weight` [V, D], or [N] numbers without.
        weight: the LM head.

    Raises:
        ValueError: if the name is unknown, or Triton is demanded and cannot compute this input.
    """
    if backend not in ("auto", "triton", "torch"):
        raise ValueError(f"backend = {backend!r}: use 'auto', 'triton' or 'torch'")
    is_faster = values.is_cuda and (weight is None or values.dtype == torch.bfloat16)
    if backend == "torch" or (backend == "auto" and not is_faster):
        return torch_kernels
    obstacle = _obstacle_of_device(values.device)
    if obstacle is None and weight is not None:
        obstacle = _obstacle_of_head(values, weight)
    if obstacle is None:
        from echo.kernels import triton_kernels

        return triton_kernels
    if backend == "auto":
        return torch_kernels
    raise ValueError(f"backend = 'triton': {obstacle}; 'torch' computes everywhere")


def _obstacle_of_device(device: torch.device) -> str | None:
    """Return why Triton cannot compute on this device, None if it can."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    if device.type == "cuda" and torch.version.cuda:
        major, minor = torch.cuda.get_device_capability(device)
        return None if major >= 8 else f"the GPU has compute capability {major}.{minor}, below 8.0"
    if device.type != "cpu":
        return f"there is no kernel for device {device}"
    from echo.kernels import triton_kernels

    if triton_kernels.IS_INTERPRETED:
        return None
    return "the tensors are on the CPU, and TRITON_INTERPRET=1 was not set at the start"


def _obstacle_of_head(hidden: Tensor, weight: Tensor) -> str | None:
    """Return why Triton cannot multiply these two, None if it can."""
    if hidden.dtype != weight.dtype:
        return f"hidden is {hidden.dtype}, but weight is {weight.dtype}"
    if hidden.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"there is no kernel for {hidden.dtype}"
    if is_describable(weight):
        return None
    return (
        f"weight {list(weight.shape)} has strides {list(weight.stride())}; its rows must be "
        "contiguous and begin at multiples of 16 bytes"
    )
