"""Settings of glibc's allocator and of oneDNN, and the return of freed memory.

The process allocates and frees chunks of weights and activations all the time. By default, glibc
maps each large block at its allocation, and unmaps the block when it is freed. The resulting page
faults take more time than the work on the block. So `tune` makes glibc keep freed blocks. Freed
blocks of varying sizes can fragment the heap by gigabytes. So `give_back` returns free memory to
the system after an evaluation. During and after a step, a `Trimmer` returns free memory if the
process has grown. With a small model the process does not grow, and the `Trimmer` returns nothing.
If the `Trimmer` returned memory anyway, page faults would take a third of each step.

With other C libraries these functions do nothing.

oneDNN multiplies 16-bit matrices on a CPU. For each of up to 1 024 shapes, oneDNN caches generated
code and a copy of the weights in oneDNN's own layout. Each sampling call brings new shapes, so a
worker's memory would grow with each call. `bound_onednn` therefore lowers the number of cached
shapes.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from echo.core.memory_sizes import GROWN_BYTES

_KEPT_BYTES = 64 << 20
"""Number of free bytes at the end of a heap that glibc keeps. It is twice the largest block of the
heap, as in glibc's own rule. With less than one block, glibc would return each block at once.
"""
_LARGEST_FROM_HEAP = 32 << 20  # glibc refuses a larger one
_PAD_BYTES = 16 << 20
"""Number of bytes that glibc keeps free at the end of a heap. A thread other than the first has
several heaps of 64 MiB. If the last heap becomes empty, glibc unmaps it, but only if at least this
number of bytes is free at the end of the heap before it. With glibc's default of 128 KiB, a thread
that encodes deltas maps and unmaps its last heap all the time. Encoding then takes up to 1.6 times
the CPU time.
"""

SETTINGS: Mapping[str, tuple[int, int]] = {
    "mmap_threshold": (-3, _LARGEST_FROM_HEAP),
    "trim_threshold": (-1, _KEPT_BYTES),
    "top_pad": (-2, _PAD_BYTES),
}
"""glibc options that keep freed blocks: name -> (number of the option in malloc.h, value)."""


def tune(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Make glibc keep freed blocks: about 64 MiB for each busy thread.

    Args:
        environment: environment variables of the process. Options that MALLOC_* or GLIBC_TUNABLES
            already set are left unchanged.

    Returns:
        The names of the options that were set.
    """
    libc, tunables = _glibc(), environment.get("GLIBC_TUNABLES", "")
    if libc is None:
        return ()
    return tuple(
        name
        for name, (option, value) in SETTINGS.items()
        if f"MALLOC_{name.upper()}_" not in environment
        and f"glibc.malloc.{name}=" not in tunables
        and libc.mallopt(option, value)
    )


ONEDNN_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Environment variables that limit the caches of oneDNN and of PyTorch's layer above oneDNN."""
ONEDNN_SHAPES = 64
"""Number of shapes whose code and weights oneDNN caches. Every decoding step uses the same shapes.
There are about 7 of them.
"""


def bound_onednn(environment: MutableMapping[str, str]) -> None:
    """Limit oneDNN's caches to `ONEDNN_SHAPES` shapes.

    The call must come before the first matrix product.

    Args:
        environment: environment variables of the process. A variable that is already set is left
            unchanged.
    """
    for name in ONEDNN_CACHES:
        environment.setdefault(name, str(ONEDNN_SHAPES))


def give_back() -> None:
    """Return freed memory to the system.

    The time grows with the amount of freed memory.
    """
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


class Trimmer:
    """Returns freed memory to the system when the process has grown."""

    def __init__(self) -> None:
        self._is_usable = _glibc() is not None and _RESIDENT.exists()
        self._num_pages = _resident_pages() if self._is_usable else 0
        """Smallest number of resident pages since memory was last returned. Growth is measured from
        this number.
        """

    def __call__(self) -> None:
        """Return freed memory to the system if the process has grown by `GROWN_BYTES`."""
        if not self._is_usable:
            return
        now = _resident_pages()
        self._num_pages = min(self._num_pages, now)
        if (now - self._num_pages) * mmap.PAGESIZE >= GROWN_BYTES:
            give_back()
            self._num_pages = _resident_pages()


_RESIDENT = Path("/proc/self/statm")


def _resident_pages() -> int:
    return int(_RESIDENT.read_bytes().split()[1])


def _glibc() -> Any:
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018, only to see whether it is glibc
    except (OSError, AttributeError, TypeError):
        return None
    return libc
