"""Checks of this machine for `echo-rl doctor`: packages, GPU, kernel settings and disk.

A check yields findings and makes no lasting change. The machine's facts are arguments, so a test
can cause each failure.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from echo.core.errors import StorageError
from echo.core.extras import find_lock, install_command
from echo.core.units import format_bytes, format_duration, listed
from echo.net.kernel import WANTED_DESCRIPTORS, KernelFacts, slow_settings
from echo.records.files import DiskSpeed, measure_disk
from echo.records.ledger import Ledger

Level = Literal["ok", "warning", "failed"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    level: Level
    """"failed" if a node would not work, "warning" if the node would work badly, otherwise "ok"."""
    name: str
    """The thing that was checked, in one to three words."""
    text: str
    """The result in words."""
    why: str = ""
    """Why the finding matters; empty for "ok"."""
    remedy: str = ""
    """The command or the setting that fixes the fault; empty for "ok", and if `text` is an error's,
    which says it."""


# --- packages -------------------------------------------------------------------------------------

_LOCKED = re.compile(r"^([A-Za-z0-9][\w.-]*)==([^\s;]+)", re.MULTILINE)


def locked_versions(lock: str) -> dict[str, set[str]]:
    """Return the versions of each package in the text of a lock file.

    A package may have several versions, for different versions of Python.
    """
    versions: dict[str, set[str]] = {}
    for name, version in _LOCKED.findall(lock):
        versions.setdefault(_normal(name), set()).add(version)
    return versions


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def installed_versions() -> dict[str, str]:
    """Return the version of each package installed in this Python."""
    return {_normal(one.name): one.version for one in metadata.distributions() if one.name}


def check_packages(
    installed: Mapping[str, str], locked: Mapping[str, Iterable[str]]
) -> Iterator[Finding]:
    """Compare the versions of the installed packages with the locked versions.

    Echo was tested with the locked versions.
    """
    # A local label such as +cpu names a build of the same version.
    others = {
        name: version
        for name, version in installed.items()
        if name in locked and version.partition("+")[0] not in locked[name]
    }
    number = len(installed.keys() & locked.keys())
    if not others:
        yield Finding("ok", "packages", f"{number} packages have the versions of the lock")
        return
    named = [
        f"{name} {version} (lock: {', '.join(sorted(locked[name]))})"
        for name, version in sorted(others.items())
    ]
    yield Finding(
        "warning",
        "packages",
        f"{len(others)} of {number} packages are not as locked: {listed(named)}",
        why="Echo was tested with the versions of the lock; nodes with other versions can compute "
        "other log-probabilities",
        remedy=f"in a checkout {install_command('worker')}; elsewhere pip install -r {find_lock()}",
    )


# --- GPU ------------------------------------------------------------------------------------------

DRIVER = Path("/proc/driver/nvidia/version")


def nvidia_driver(path: Path = DRIVER) -> str | None:
    """Return the version of the loaded NVIDIA driver; None if no driver is loaded."""
    try:
        found = re.search(r"Module[^\n]*?\s(\d+\.[\d.]+)\s", path.read_text(encoding="ascii"))
    except (OSError, UnicodeDecodeError):
        return None
    return found[1] if found else "of unknown version"


def check_gpu(build: str | None, gpus: Iterable[str], driver: str | None) -> Iterator[Finding]:
    """Check that PyTorch finds a GPU if an NVIDIA driver is loaded.

    Args:
        build: what PyTorch is built for, such as "CUDA 13.0" or "CPU"; None if PyTorch is missing.
        gpus: the GPUs that PyTorch finds.
        driver: version of the NVIDIA driver; None if no driver is loaded.
    """
    names = list(gpus)
    loaded = "no NVIDIA driver is loaded" if driver is None else f"NVIDIA driver {driver}"
    if build is None:
        yield Finding("ok", "GPU", f"{loaded}; PyTorch is not installed, and a relay needs none")
    elif names:
        yield Finding("ok", "GPU", f"{', '.join(names)}; PyTorch for {build}; {loaded}")
    elif driver is not None:
        is_for_cpu = build == "CPU"
        yield Finding(
            "failed",
            "GPU",
            f"{loaded}, but PyTorch for {build} finds no GPU",
            why="the engine and the learner would run on the CPU",
            remedy="install PyTorch for CUDA (docs/engines.md)"
            if is_for_cpu
            else "run nvidia-smi: if it lists a GPU, unset CUDA_VISIBLE_DEVICES, or install a "
            "newer driver for this CUDA; a container needs --gpus all",
        )
    else:
        yield Finding("ok", "GPU", f"none; PyTorch for {build}; {loaded}")


# --- kernel ---------------------------------------------------------------------------------------

LEAST_DESCRIPTORS = 4096
"""A learner with some hundred workers may need this many open files."""


def check_descriptors(limit: int) -> Iterator[Finding]:
    """Check that the limit of open files is at least LEAST_DESCRIPTORS."""
    if limit >= LEAST_DESCRIPTORS:
        yield Finding("ok", "open files", f"{limit} are permitted")
        return
    yield Finding(
        "warning",
        "open files",
        f"{limit} are permitted",
        why="each connection takes a descriptor: a learner or relay with many nodes runs out",
        remedy=f"ulimit -Hn {WANTED_DESCRIPTORS} (systemd: LimitNOFILE={WANTED_DESCRIPTORS})",
    )


def check_kernel(facts: KernelFacts) -> Iterator[Finding]:
    """Check that the kernel's TCP settings permit fast transfers over long links."""
    slow = slow_settings(facts)
    if slow is None:
        yield Finding("ok", "TCP settings", "fast enough for 1 Gbit/s at 100 ms, or not readable")
        return
    yield Finding(
        "warning",
        "TCP settings",
        slow.partition("; see ")[0],
        why="one connection over a long link is as fast as these permit; on a local network they "
        "do not matter",
        remedy="sysctl -w net.ipv4.tcp_rmem='4096 131072 67108864' "
        "net.ipv4.tcp_wmem='4096 65536 67108864' net.ipv4.tcp_congestion_control=bbr",
    )


# --- disk -----------------------------------------------------------------------------------------

SLOW_SYNC_S = 0.1
"""The doctor warns if an fsync takes longer than this number of seconds. A group is acknowledged
only after an fsync.
"""
SLOW_BYTES_PER_S = 50e6
"""The doctor warns if a directory takes fewer bytes per second. At this rate, a checkpoint of 10 GB
takes 200 s.
"""


def check_disk(
    directory: Path, *, free_bytes: int, min_free_bytes: int, speed: DiskSpeed
) -> Iterator[Finding]:
    """Check the space and the speed of the volume that holds a run's directory."""
    if free_bytes < min_free_bytes:
        yield Finding(
            "failed",
            "disk space",
            f"{format_bytes(free_bytes)} are free at {directory}",
            why="no checkpoint is written that would leave less than limits.min_free_disk_bytes = "
            f"{format_bytes(min_free_bytes)}",
            remedy="free space, or set run.dir to another volume",
        )
    else:
        yield Finding("ok", "disk space", f"{format_bytes(free_bytes)} are free at {directory}")
    measured = f"{format_bytes(speed.bytes_per_s)}/s; {format_duration(speed.sync_s)} for an fsync"
    if speed.sync_s <= SLOW_SYNC_S and speed.bytes_per_s >= SLOW_BYTES_PER_S:
        yield Finding("ok", "disk speed", measured)
        return
    yield Finding(
        "warning",
        "disk speed",
        measured,
        why="the learner acknowledges a group when it is on the disk, and a worker stores versions",
        remedy="set run.dir (and network.store_dir) to a local disk",
    )


def check_ledger(directory: Path) -> Iterator[Finding]:
    """Check that the volume can hold a ledger, by creating a temporary ledger."""
    try:
        with tempfile.TemporaryDirectory(dir=directory) as place:
            Ledger(Path(place), spool_bytes=1 << 20).close()
    except (OSError, StorageError) as error:
        yield Finding(
            "failed",
            "ledger",
            f"cannot be made in {directory}: {error}",
            why="the learner records every group there before it acknowledges the group",
            remedy="set run.dir to a local disk that this user may write to",
        )
    else:
        yield Finding("ok", "ledger", f"can be made in {directory}")


def check_run_dir(run_dir: Path, *, min_free_bytes: int) -> Iterator[Finding]:
    """Check the volume of a run's directory, which need not exist yet."""
    place = run_dir.absolute()
    while not place.is_dir() and place != place.parent:
        place = place.parent
    try:
        speed = measure_disk(place)
    except OSError as error:
        yield Finding(
            "failed",
            "disk",
            f"{place} cannot be written: {error.strerror}",
            why="a node keeps its files there",
            remedy="set run.dir to a directory that this user may write to",
        )
        return
    free = shutil.disk_usage(place).free
    yield from check_disk(place, free_bytes=free, min_free_bytes=min_free_bytes, speed=speed)
    yield from check_ledger(place)


def check_python() -> Iterator[Finding]:
    """Report the version of the running Python.

    No check is needed, because Echo does not start on an unsupported Python.
    """
    number = ".".join(map(str, sys.version_info[:3]))
    yield Finding("ok", "Python", f"{number}, {sys.executable}")
