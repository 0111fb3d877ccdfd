"""The checks of `echo-rl doctor`: each failure caused, and links tried on real nodes."""

from __future__ import annotations

import ipaddress
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from echo.core.errors import RefusedError, TransportError
from echo.core.extras import find_lock
from echo.net.kernel import KernelFacts
from echo.records import files
from echo.records.files import DiskSpeed
from echo.runtime.doctor.link import (
    STEP_S,
    LinkReport,
    check_link,
    check_nat,
    route_to,
    try_link,
)
from echo.runtime.doctor.machine import (
    Finding,
    check_descriptors,
    check_disk,
    check_gpu,
    check_kernel,
    check_ledger,
    check_packages,
    check_run_dir,
    installed_versions,
    locked_versions,
    nvidia_driver,
)
from echo.wire.messages import Ready
from tests.net.test_zmq import link_local
from tests.promises.world import ADDRESS, LEARNER, Process, World

DELAY_S = 0.05


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path, delay_s=DELAY_S)
    yield world
    world.close()


def tried(world: World, address: str = LEARNER, fingerprint: bytes | None = None) -> LinkReport:
    """Return the report of a doctor on a machine of its own."""
    process = Process(world, "doctor")

    async def visit() -> LinkReport:
        transport = await world._transport(process, None)
        try:
            return await try_link(transport, ADDRESS.format(address), fingerprint=fingerprint)
        finally:
            await transport.close()

    return world.loop.run_until_complete(world.loop.create_task(visit(), context=process.context))


def levels(findings: Iterator[Finding] | Sequence[Finding]) -> list[str]:
    """Return the level of each finding; each that is not ok says why and what to do."""
    found = list(findings)
    for finding in found:
        assert bool(finding.why) == bool(finding.remedy) == (finding.level != "ok"), finding
    return [finding.level for finding in found]


# --- link -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("through", [LEARNER, "r1"])
def test_a_trial_measures_the_way_and_is_never_admitted(world: World, through: str) -> None:
    world.learner()
    world.relay()
    world.worker("w1")
    world.run(2)
    ready: list[str] = []

    def note(source: str, target: str, message: object) -> None:
        ready.extend([source] * isinstance(message, Ready))

    with world.watch(note):
        report = tried(world, through)
    assert report.fault is None
    assert report.node_id == through
    assert report.rtt_s == pytest.approx(2 * DELAY_S, rel=0.1)
    assert report.up_bytes_per_s is not None
    assert report.welcome is not None
    assert levels(check_link(report))[:2] == ["ok", "ok"]
    assert not ready
    steps = world.step
    world.run(5)
    assert world.step > steps
    assert world.notes_of("left: the doctor has looked")


def test_a_trial_measures_the_skew_of_the_clocks(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", lambda: 1e9 + world.loop.time())
    world.learner()
    world.run(2)
    skew_s = 0.0
    monkeypatch.setattr(time, "time", lambda: 1e9 + world.loop.time() - skew_s)  # the doctor's
    for skew_s, level in ((0.0, "ok"), (-0.5, "ok"), (30.0, "warning")):
        report = tried(world)
        assert report.skew_s == pytest.approx(skew_s, abs=report.skew_error_s)
        assert 0 < report.skew_error_s < 2 * DELAY_S
        assert levels(check_link(report)) == ["ok", "ok", level]


def test_an_answer_that_another_key_has_signed_is_refused(world: World) -> None:
    world.learner()
    report = tried(world, fingerprint=bytes(16))
    assert isinstance(report.fault, RefusedError)
    assert "fingerprint" in str(report.fault)
    assert levels(check_link(report)) == ["ok", "failed"]


def test_a_learner_that_does_not_answer_is_given_up(world: World) -> None:
    world.learner()
    world.drop("Welcome")
    before = world.now
    report = tried(world)
    assert isinstance(report.fault, TransportError)
    assert "no answer to Hello" in str(report.fault)
    assert world.now - before < 2 * STEP_S
    assert levels(check_link(report)) == ["ok", "failed"]


def test_an_address_where_nobody_listens_is_a_failure(world: World) -> None:
    report = tried(world, "nowhere")
    assert report.node_id is None
    assert isinstance(report.fault, TransportError)
    assert levels(check_link(report)) == ["failed"]


@pytest.mark.parametrize(
    ("rtt_s", "rate", "level"), [(0.02, 1e7, "ok"), (0.5, 1e7, "warning"), (0.02, 1e5, "warning")]
)
def test_a_slow_link_is_a_warning(rtt_s: float, rate: float, level: str) -> None:
    report = LinkReport("tcp://h:1", "learner", rtt_s=rtt_s, up_bytes_per_s=rate)
    assert levels(check_link(report)) == [level]


@pytest.mark.parametrize(
    ("own", "advertise", "level"),
    [
        ("192.168.1.7", "tcp://192.168.1.7:7702", "warning"),
        ("192.168.1.7", "tcp://8.8.4.4:7702", "ok"),
        ("192.168.1.7", None, "ok"),
        ("8.8.4.4", "tcp://8.8.4.4:7702", "ok"),
    ],
)
def test_a_private_address_that_is_told_to_others_is_a_warning(
    own: str, advertise: str | None, level: str
) -> None:
    assert levels(check_nat(own, "8.8.8.8", advertise)) == [level]


@pytest.mark.skipif(link_local() is None, reason="no interface has an IPv6 address of its network")
def test_the_route_to_an_address_of_one_network_alone_is_found() -> None:
    own = (link_local() or "").partition("%")[0]
    route = route_to(f"tcp://[{link_local()}]:7700")
    assert route is not None
    assert route[0] == own


def test_a_host_name_is_one_of_the_addresses_that_are_compared() -> None:
    route = route_to("tcp://localhost:7700")
    assert route is not None
    assert all(ipaddress.ip_address(end).is_loopback for end in route)


# --- machine --------------------------------------------------------------------------------------


def test_this_environment_is_compared_with_the_real_lock() -> None:
    locked, installed = locked_versions(find_lock().read_text()), installed_versions()
    assert len(locked.keys() & installed.keys()) > 20
    assert locked["numpy"]
    [finding] = check_packages(installed | {"numpy": "1.0+local"}, locked)
    assert finding.level == "warning"
    assert "numpy 1.0+local (lock: 2." in finding.text


def test_versions_of_the_lock_and_builds_of_them_are_right() -> None:
    locked = {"torch": {"2.13.0"}, "numpy": {"2.4", "2.5"}, "absent": {"1"}}
    assert levels(check_packages({"torch": "2.13.0+cpu", "numpy": "2.5", "own": "3"}, locked)) == [
        "ok"
    ]


@pytest.mark.parametrize(
    ("build", "gpus", "driver", "level"),
    [
        ("CUDA 13.0", ["H200"], "580.1", "ok"),
        ("CUDA 13.0", [], None, "ok"),
        ("CPU", [], "580.1", "failed"),
        ("CUDA 13.0", [], "470.1", "failed"),
        (None, [], "580.1", "ok"),
    ],
)
def test_a_gpu_that_pytorch_does_not_find_is_a_failure(
    build: str | None, gpus: list[str], driver: str | None, level: str
) -> None:
    assert levels(check_gpu(build, gpus, driver)) == [level]


def test_the_driver_is_read_from_the_kernel(tmp_path: Path) -> None:
    path = tmp_path / "version"
    assert nvidia_driver(path) is None
    path.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n"
        "GCC version:  gcc version 12.3.0\n"
    )
    assert nvidia_driver(path) == "580.95.05"


def test_limits_of_the_kernel_warn() -> None:
    assert levels(check_descriptors(1024)) == ["warning"]
    assert levels(check_descriptors(1 << 16)) == ["ok"]
    slow = KernelFacts(
        congestion_control="cubic", max_send_buffer_bytes=4 << 20, max_receive_buffer_bytes=6 << 20
    )
    assert levels(check_kernel(slow)) == ["warning"]
    assert levels(check_kernel(KernelFacts())) == ["ok"]


def test_a_full_and_a_slow_disk(tmp_path: Path) -> None:
    def checked(free_bytes: int, rate: float, sync_s: float) -> list[str]:
        speed = DiskSpeed(rate, sync_s)
        return levels(
            check_disk(tmp_path, free_bytes=free_bytes, min_free_bytes=1 << 20, speed=speed)
        )

    assert checked(1 << 30, 1e9, 0.001) == ["ok", "ok"]
    assert checked(1 << 19, 1e9, 0.001) == ["failed", "ok"]
    assert checked(1 << 30, 1e6, 0.001) == ["ok", "warning"]
    assert checked(1 << 30, 1e9, 0.5) == ["ok", "warning"]


def test_a_run_directory_is_checked_and_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "TRIAL_BYTES", 1 << 20)
    findings = list(check_run_dir(tmp_path / "runs" / "new", min_free_bytes=0))
    assert [finding.name for finding in findings] == ["disk space", "disk speed", "ledger"]
    assert findings[2].level == "ok"
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_written_is_a_failure(tmp_path: Path) -> None:
    assert levels(check_ledger(tmp_path / "missing")) == ["failed"]
    if os.geteuid():  # root may write anywhere
        tmp_path.chmod(0o500)
        assert levels(check_run_dir(tmp_path, min_free_bytes=0)) == ["failed"]
