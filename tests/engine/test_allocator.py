"""The allocator: its settings, those of the environment, and memory that comes back."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from echo.engine import allocator

REPOSITORY = Path(__file__).parents[2]
SCRIPT = """
import ctypes, resource
from echo.config.memory.budget import psutil
from echo.engine import allocator
def fill():
    return [ctypes.memset(each := ctypes.create_string_buffer(1 << 20), 1, 1 << 20) and each
            for _ in range(100)]
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(200):
        ctypes.memset(buffer := ctypes.create_string_buffer(1 << 20), 1, 1 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
resident = lambda: psutil.Process().memory_info().rss >> 20
if not allocator.tune({}):
    print(-1, 0, 0)
else:
    faults()
    blocks = fill()
    del blocks[:-1]  # the last one keeps all below it in the heap
    kept = resident()
    num_faults = faults()
    allocator.give_back()
    print(num_faults, kept, resident())
"""


def test_a_process_keeps_what_it_has_freed_until_it_gives_it_back() -> None:
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=True, text=True)
    num_faults, kept, resident = map(int, done.stdout.split())
    if num_faults < 0:
        pytest.skip("another C library than glibc")
    assert num_faults < 2000, "each of 200 buffers of a mebibyte has 256 pages"
    assert resident < kept - 80, "99 of them were free"


GROWING = """
import ctypes
from echo.engine import allocator
resident = lambda: int(open("/proc/self/statm").read().split()[1]) >> 8
def make(size):
    return ctypes.memset(each := ctypes.create_string_buffer(size << 10), 1, size << 10) and each
allocator.GROWN_BYTES = 64 << 20
allocator.tune({})
trim, before, kept, most = allocator.Trimmer(), resident(), [], 0
for number in range(200):  # what comes and goes is larger each time, and smaller than what is kept
    passing = make(500 + 2 * number)
    kept.append(make(1000))
    del passing
    if TRIMS:
        trim()
    most = max(most, resident())
print(most - before)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="a system without /proc")
def test_what_a_growing_process_frees_comes_back_meanwhile() -> None:
    grown = {}
    for trims in (True, False):
        script = GROWING.replace("TRIMS", str(trims))
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=True, text=True)
        grown[trims] = int(done.stdout)
    if grown[False] < 290:
        pytest.skip("another C library than glibc")
    # It keeps 195 MiB, and may grow by 64 before it looks.
    assert grown[True] < 270


THREAD = """
import ctypes, resource, threading
from echo.engine import allocator
def make(count):
    return [ctypes.memset(each := ctypes.create_string_buffer(1 << 20), 1, 1 << 20) and each
            for _ in range(count)]
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def work():
    held = make(50)
    make(10)
    del held
    held = make(60)  # of the 64 MiB of a heap
    make(10)
    before = faults()
    for _ in range(20):
        make(10)
    print(faults() - before)
if allocator.tune({}):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
else:
    print(-1)
"""


def test_a_thread_keeps_the_heap_that_it_needs_again_and_again() -> None:
    # Pages of 4 KiB, so that each is a fault.
    command = [sys.executable, "-c", THREAD]
    environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, check=True, text=True
    )
    num_faults = int(done.stdout)
    if num_faults < 0:
        pytest.skip("another C library than glibc")
    assert num_faults < 5000, "ten blocks of 256 pages are made 20 times"


class Libc:
    """Notes what mallopt is told."""

    gnu_get_libc_version = None

    def __init__(self) -> None:
        self.options: list[int] = []

    def mallopt(self, option: int, value: int) -> int:
        assert value > 0
        self.options.append(option)
        return 1


@pytest.mark.parametrize(
    ("environment", "options"),
    [
        ({"MALLOC_ARENA_MAX": "2", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}, [-3, -1, -2]),
        ({"MALLOC_MMAP_THRESHOLD_": "2097152"}, [-1, -2]),
        ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.trim_threshold=1"}, [-3, -2]),
    ],
)
def test_what_the_environment_says_stays(
    monkeypatch: pytest.MonkeyPatch, environment: Mapping[str, str], options: list[int]
) -> None:
    libc = Libc()
    monkeypatch.setattr(ctypes, "CDLL", lambda _: libc)
    assert len(allocator.tune(environment)) == len(options)
    assert libc.options == options


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda _: object())
    assert allocator.tune({}) == ()
    allocator.give_back()
    allocator.Trimmer()()


SHAPES = """
import os, torch
from echo.config.memory.budget import psutil
from echo.engine import allocator
if {is_bounded}:
    allocator.bound_onednn(os.environ)  # PyTorch is there, and nothing was multiplied
layer = torch.nn.Linear(576, 1536, dtype=torch.bfloat16)
resident = lambda: psutil.Process().memory_info().rss >> 20
with torch.inference_mode():
    for rows in range(3, 67):
        layer(torch.zeros(rows, 576, dtype=torch.bfloat16))
    before = resident()
    for rows in range(67, 195):
        layer(torch.zeros(rows, 576, dtype=torch.bfloat16))
print(resident() - before)
"""


@pytest.mark.slow
def test_ever_new_shapes_take_no_more_memory_than_64() -> None:
    grown = {}
    for is_bounded in (True, False):
        command = [sys.executable, "-c", SHAPES.format(is_bounded=is_bounded)]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=True, text=True)
        grown[is_bounded] = int(done.stdout)
    if grown[False] < 40:
        pytest.skip("this CPU multiplies 16-bit matrices without oneDNN, or keeps nothing")
    assert grown[True] < grown[False] / 2


def test_bounds_of_the_environment_stay() -> None:
    environment = {"LRU_CACHE_CAPACITY": "8"}
    allocator.bound_onednn(environment)
    assert environment == {
        "LRU_CACHE_CAPACITY": "8",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": str(allocator.ONEDNN_SHAPES),
    }
