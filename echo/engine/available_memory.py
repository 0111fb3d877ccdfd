"""How much memory can be had."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def available_bytes(device: torch.device) -> int:
    """Return the memory that can be had now without taking it from anybody else."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        # Free pages alone would leave out the file cache, which is most of a busy machine.
        for line in meminfo.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
