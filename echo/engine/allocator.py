"""Settings of the C library's allocator and of oneDNN, and the memory that they give back.

Chunks of weights and a step's activations come and go all the time. By default glibc maps each
large block and returns it when it is freed, and its page faults cost more than the work on it. So
it is told to keep such blocks, and after a step or a call of an engine it is told to return them:
blocks of ever-new sizes leave holes that fit nothing, gigabytes of them. Within a step it happens
whenever the process has grown (`Trimmer`): what a layer makes and drops lies among what it keeps.

Does nothing with other C libraries.

oneDNN, which multiplies 16-bit matrices on a CPU, keeps what it has prepared for each shape: code,
and weights in an order of its own, for 1 024 shapes. A call that samples has shapes that no earlier
call had, so without a bound a worker grows call by call.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

_KEPT_BYTES = 64 << 20
_LARGEST_FROM_HEAP = 32 << 20  # glibc takes no more

SETTINGS: Mapping[str, tuple[int, int]] = {
    "mmap_threshold": (-3, _LARGEST_FROM_HEAP),
    "trim_threshold": (-1, _KEPT_BYTES),
}
"""By the name of each in glibc's environment variables: its number (malloc.h) and the value."""


def tune(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Have the process keep freed blocks, some 64 MiB per busy thread.

    Args:
        environment: of the process; what it sets by MALLOC_* or GLIBC_TUNABLES stays as it is.

    Returns:
        The names of what was set.
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
"""Environment variables of oneDNN and of PyTorch's layer above it; each keeps as much by itself."""
ONEDNN_SHAPES = 64
"""A decoding step has some 7, which repeat at the next one."""


def bound_onednn(environment: MutableMapping[str, str]) -> None:
    """Have oneDNN keep few shapes; it reads the environment at its first product.

    Args:
        environment: of the process; what it sets by itself stays as it is.
    """
    for name in ONEDNN_CACHES:
        environment.setdefault(name, str(ONEDNN_SHAPES))


GROWN_BYTES = 256 << 20
"""Of a process between two times that it returns what it has freed, within a step. With 64 MiB a
step takes more page faults, and its peak is hardly lower."""


def give_back() -> None:
    """Return freed memory to the system; it takes as long as there is much of it."""
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


class Trimmer:
    """Returns freed memory whenever the process has grown by `GROWN_BYTES` since the last time."""

    def __init__(self) -> None:
        """Begin with the process as large as it is."""
        self._is_here = _glibc() is not None and _RESIDENT.exists()
        self._num_pages = _resident_pages() if self._is_here else 0
        """Of the process after the last time; less if it has become smaller since."""

    def __call__(self) -> None:
        """Return what the process has freed if it has grown."""
        if not self._is_here:
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
    """Return the C library if it is glibc, else None."""
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018, only to see whether it is glibc
    except (OSError, AttributeError, TypeError):
        return None
    return libc
