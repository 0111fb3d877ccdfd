"""How much memory can be had."""

from __future__ import annotations

import psutil
import torch


def available_bytes(device: torch.device) -> int:
    """Return the memory that can be had now without taking it from anybody else."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return int(psutil.virtual_memory().available)
