"""Settings of the kernel: connections per link, and the one line of advice."""

from __future__ import annotations

from pathlib import Path

import pytest

from echo.net.kernel import KernelFacts, most_sockets, read_kernel, slow_settings

MIB = 1 << 20


def facts(send: int, receive: int, *, bbr: bool = True) -> KernelFacts:
    return KernelFacts(
        congestion_control="bbr" if bbr else "cubic",
        can_use_bbr=bbr,
        max_send_buffer_bytes=send,
        max_receive_buffer_bytes=receive,
    )


@pytest.mark.parametrize(
    ("given", "expected"),
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
def test_as_many_sockets_as_a_gigabit_at_100_ms_takes(given: KernelFacts, expected: int) -> None:
    assert most_sockets(given) == expected


def test_one_line_names_all_settings_that_cost_speed() -> None:
    assert slow_settings(facts(4 * MIB, 6 * MIB, bbr=False)) == (
        "slow on links of 100 ms: net.ipv4.tcp_wmem allows 4194304 bytes; net.ipv4.tcp_rmem allows "
        "6291456 bytes; bbr may not be chosen, so weights go out by cubic; see docs/broadcast.md, "
        "Long, fat links"
    )


@pytest.mark.parametrize("given", [facts(64 * MIB, 64 * MIB), KernelFacts()])
def test_nothing_is_said_where_nothing_is_wrong_or_known(given: KernelFacts) -> None:
    assert slow_settings(given) is None


def test_facts_come_from_files_and_missing_ones_are_unknown(tmp_path: Path) -> None:
    assert read_kernel(tmp_path / "none") == KernelFacts()
    (tmp_path / "tcp_wmem").write_text("4096\t16384\t4194304\n")
    (tmp_path / "tcp_rmem").write_text("nonsense\n")
    (tmp_path / "tcp_congestion_control").write_text("cubic\n")
    (tmp_path / "tcp_available_congestion_control").write_text("reno cubic\n")
    found = read_kernel(tmp_path)
    assert found.max_send_buffer_bytes == 4 * MIB
    assert found.max_receive_buffer_bytes is None
    assert found.congestion_control == "cubic"
    assert found.can_use_bbr is not None


@pytest.mark.skipif(not Path("/proc/sys/net/ipv4/tcp_wmem").exists(), reason="no Linux /proc here")
def test_this_kernel_can_be_read() -> None:
    found = read_kernel()
    assert found.max_send_buffer_bytes
    assert most_sockets(found) >= 1
