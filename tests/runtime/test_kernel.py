from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from echo.net.zmq import KernelFacts, advise
from echo.runtime.node import read_kernel

MIB = 1 << 20
REPOSITORY = Path(__file__).parents[2]


def facts(send: int, receive: int, *, bbr: bool = True, after_idle: bool = True) -> KernelFacts:
    return KernelFacts(
        congestion_control="bbr" if bbr else "cubic",
        can_use_bbr=bbr,
        is_bbr_available=bbr,
        max_send_buffer_bytes=send,
        max_receive_buffer_bytes=receive,
        slow_start_after_idle=after_idle,
    )


@pytest.mark.parametrize(
    ("given", "num_sockets"),
    [
        (facts(64 * MIB, 64 * MIB), 1),
        (facts(64 * MIB, 64 * MIB, bbr=False), 4),
        (facts(4 * MIB, 6 * MIB), 8),  # Linux as it is installed, with BBR
        (facts(4 * MIB, 6 * MIB, bbr=False), 8),
        (facts(16 * MIB, 32 * MIB), 2),
        (facts(64 * MIB, 8 * MIB), 4),
        (facts(4096, 4096), 8),
        (facts(0, 0), 8),
        (KernelFacts(), 4),
    ],
)
def test_as_many_sockets_as_a_gigabit_at_100_ms_takes(given: KernelFacts, num_sockets: int) -> None:
    assert advise(given).num_sockets_per_link == num_sockets


def test_a_warning_names_the_sysctl_and_its_value() -> None:
    given = facts(4 * MIB, 6 * MIB, bbr=False)
    send, receive, bbr, idle = advise(given).warnings
    assert "4194304 bytes, about 235 Mbit/s per connection" in send
    assert 'sysctl -w net.ipv4.tcp_wmem="4096 16384 67108864"' in send
    assert 'sysctl -w net.ipv4.tcp_rmem="4096 131072 67108864"' in receive
    assert "weights go out by cubic" in bbr
    assert 'modprobe tcp_bbr && sysctl -w net.ipv4.tcp_allowed_congestion_control="reno' in bbr
    assert "sysctl -w net.ipv4.tcp_slow_start_after_idle=0" in idle


@pytest.mark.parametrize("given", [facts(64 * MIB, 64 * MIB), KernelFacts()])
def test_nothing_is_said_where_nothing_is_wrong_or_known(given: KernelFacts) -> None:
    assert advise(given).warnings == ()


def test_facts_come_from_files_and_missing_ones_are_unknown(tmp_path: Path) -> None:
    assert read_kernel(tmp_path / "none") == KernelFacts()
    (tmp_path / "tcp_wmem").write_text("4096\t16384\t4194304\n")
    (tmp_path / "tcp_rmem").write_text("nonsense\n")
    (tmp_path / "tcp_slow_start_after_idle").write_text("0\n")
    (tmp_path / "tcp_congestion_control").write_text("cubic\n")
    (tmp_path / "tcp_available_congestion_control").write_text("reno cubic\n")
    found = read_kernel(tmp_path)
    assert found.max_send_buffer_bytes == 4 * MIB
    assert found.max_receive_buffer_bytes is None
    assert found.slow_start_after_idle is False
    assert (found.congestion_control, found.is_bbr_available) == ("cubic", False)
    assert found.can_use_bbr is not None


@pytest.mark.skipif(not Path("/proc/sys/net/ipv4/tcp_wmem").exists(), reason="no Linux /proc here")
def test_this_kernel_can_be_read() -> None:
    found = read_kernel()
    assert found.max_send_buffer_bytes
    assert advise(found).num_sockets_per_link >= 1


def test_a_process_keeps_what_it_has_freed_once_told() -> None:
    script = """
import resource
from echo.runtime.node import tune_malloc
import sys, ctypes
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(200):
        ctypes.memset(buffer := ctypes.create_string_buffer(1 << 20), 1, 1 << 20)
        del buffer
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
if sys.argv[1] == "tuned" and not tune_malloc():
    print(-1)
else:
    faults()
    print(faults())
"""
    tuned = subprocess.run(
        [sys.executable, "-c", script, "tuned"],
        cwd=REPOSITORY,
        capture_output=True,
        check=True,
        text=True,
    )
    num_faults = int(tuned.stdout)
    if num_faults < 0:
        pytest.skip("another C library than glibc")
    assert num_faults < 2000, "each of 200 buffers of a mebibyte has 256 pages"
