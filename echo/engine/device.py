"""Where torch computes: which device, how many threads, how much memory is free."""

from __future__ import annotations

import torch


def pick_device(name: str) -> str:
    """Return torch's name of a device; "auto" is the first GPU where there is one.

    Args:
        name: "auto", "cpu", "cuda" or "cuda:N".
    """
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def set_num_threads(num_threads: int) -> None:
    """Let one operation on the CPU use this many threads; 0 leaves torch's own choice."""
    if num_threads:
        torch.set_num_threads(num_threads)


def free_gpu_bytes(name: str) -> int | None:
    """Return the free memory of a device, bytes; None if it is a CPU, or a GPU that is not here.

    Args:
        name: as for `pick_device`.
    """
    device = torch.device(pick_device(name))
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    return int(torch.cuda.mem_get_info(device)[0])


def pick_dtype(name: str, device: str) -> torch.dtype:
    """Return what to compute in: "auto" is bfloat16 on a GPU and float32 elsewhere.

    Args:
        name: "auto", "float32" or "bfloat16".
        device: torch's name of it.
    """
    if name == "auto":
        name = "bfloat16" if device.startswith("cuda") else "float32"
    return torch.bfloat16 if name == "bfloat16" else torch.float32
