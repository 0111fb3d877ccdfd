"""How each Triton kernel is launched: tables by Triton version instead of autotuning.

A search at run time costs a start of minutes, may choose differently in every process, and with it
changes bits. What decides is the compiler: the same tile spills registers under one version of
Triton and not under the next. The entries are those that compile for sm_90a without spilling to
speak of (tests/kernels/test_launch_configs.py holds them to it); their speed has not been measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

KernelName = Literal["scores", "grad_logits"]

MAX_SPLITS = 32
"""Parts of the vocabulary that are scored in parallel. Never fitted to the number of rows: so the
result of a row does not depend on the others of its batch. 32 still fill a GPU with 512 rows."""


@dataclass(frozen=True, slots=True)
class LaunchConfig:
    """One way to launch a kernel that multiplies tiles."""

    rows: int
    """Tokens of a tile, a power of two, as are the other two sides."""
    columns: int
    """Vocabulary entries of a tile."""
    depth: int
    """Model width of one step of the product."""
    num_warps: int
    num_stages: int
    """Steps of the product that are loaded ahead, each (rows + columns) * depth elements."""
    group_rows: int = 8
    """Row tiles that run next to each other on the same columns, which they share in the cache."""


_WIDE = LaunchConfig(128, 256, 64, num_warps=8, num_stages=4)
_TALL = LaunchConfig(256, 128, 64, num_warps=8, num_stages=4)

HOPPER: dict[tuple[int, int], dict[KernelName, LaunchConfig]] = {
    (3, 6): {"scores": _WIDE, "grad_logits": _WIDE},
    # From this version on the wide tile's statistics spill (25 stores), the tall one's do not.
    (3, 9): {"scores": _TALL, "grad_logits": _WIDE},
}
"""By version of Triton and kernel; a version is served by the newest entry up to it. With entropy
and without, the same entry compiles well."""

PORTABLE = LaunchConfig(128, 64, 32, num_warps=8, num_stages=3)
"""For every other GPU. Before Hopper operands pass through registers, which must not spill either;
36 KiB of shared memory are there on all of them."""

FLOAT32 = LaunchConfig(64, 64, 32, num_warps=8, num_stages=2)
"""For float32, whose exact products no tensor core takes: to compare with, not for speed."""


def launch_config(
    kernel: KernelName,
    *,
    triton_version: str,
    capability: tuple[int, int],
    element_bytes: int,
) -> LaunchConfig:
    """Return how to launch `kernel` on a GPU of this compute capability."""
    if element_bytes > 2:
        return FLOAT32
    if capability != (9, 0):
        return PORTABLE
    major, minor = (int(part) for part in triton_version.split(".")[:2])
    known = [version for version in sorted(HOPPER) if version <= (major, minor)]
    return HOPPER[known[-1] if known else min(HOPPER)][kernel]
