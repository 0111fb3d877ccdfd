"""The benchmark of the broadcast runs, and judges what arrived by its hash."""

from __future__ import annotations

import contextlib
import random
import socket
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY / "bench"))

import bench_broadcast  # noqa: E402
from broadcast_figures import FIGURES, uplinks_mbit  # noqa: E402
from broadcast_lab import Topology  # noqa: E402
from broadcast_paths import Loopback, Wan  # noqa: E402


def smoke(*options: str) -> dict[str, list[str]]:
    """Run it for some seconds; return the words of its lines by variant."""
    done = subprocess.run(
        [sys.executable, "bench/bench_broadcast.py", "--smoke", *options],
        cwd=REPOSITORY,
        env={"PYTHONPATH": str(REPOSITORY), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "wrote" not in done.stdout
    return {line[:18].strip(): line[18:].split() for line in done.stdout.splitlines()}


@pytest.mark.matrix
def test_every_receiver_of_the_smoke_run_ends_with_the_right_bytes() -> None:
    rows = smoke("--curve", "on", "off")
    assert rows["raw TCP"][-1] == "1/1"
    for name in ("echo chain", "echo star", "echo chain curve", "echo star curve"):
        assert rows[name][-1] == "2/2"


@pytest.mark.matrix
def test_behind_proxies_no_transfer_is_faster_than_its_theory() -> None:
    rows = smoke("--path", "proxy", "--rate-mbit", "50", "--latency-ms", "30")
    for name in ("echo chain", "echo star"):
        assert rows[name][-1] == "2/2"
        assert float(rows[name][-3]) > 0.95  # x_theory
    assert rows["raw TCP"][-1] == "1/1"
    assert float(rows["raw TCP"][-3]) > 0.95, "it did not pass the proxy"


@pytest.mark.matrix
def test_receivers_that_are_started_elsewhere_take_part() -> None:
    """In whatever order they join and whatever their stdin is; the learner's end is theirs."""
    script, environment = "bench/bench_broadcast.py", {"PYTHONPATH": str(REPOSITORY), "PATH": ""}
    options = {"cwd": REPOSITORY, "env": environment, "stdin": subprocess.DEVNULL, "text": True}
    port = free_ports()
    words = ["--smoke", "--listen", f"tcp://127.0.0.1:{port}", "--codecs", "full", "delta"]
    words += ["--curve", "on"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, script, *words], **options, **pipes) as learner:
        told = learner.stderr.readline()
        address = told.split("'")[1]
        command = [sys.executable, script, f"--connect={address}"]
        out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with (
            subprocess.Popen(command, **options, **out) as leaf,
            subprocess.Popen([*command, "--listen=tcp://127.0.0.1:0"], **options, **out) as link,
        ):
            text, errors = learner.communicate(timeout=240)
            lasts = [receiver.communicate(timeout=120)[0] for receiver in (leaf, link)]
    assert learner.returncode == 0, errors
    lines = [line.split() for line in text.splitlines()]
    rows = {tuple(line[: line.index("4") - 1]): line for line in lines if "256" in line}
    for kind in ("chain", "star"):
        for codec in ((), ("delta",)):
            assert rows["echo", kind, *codec, "curve"][-1] == "2/2"
    assert sum(line[:2] == ["raw", "TCP"] for line in lines) == 2
    for last in lasts:
        assert "version 8 is here, every chunk verified" in last
        assert last.endswith("the learner has finished\n")


def free_ports() -> int:
    """Return a port that is free together with the next one."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first, contextlib.suppress(OSError):
            port = int(first.getsockname()[1])
            with socket.create_server(("127.0.0.1", port + 1)):
                return port


def test_what_an_emulator_would_limit_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_broadcast, "emulator_gbit", lambda: 4.0)
    path = object.__new__(Wan)  # the links' rate is all that counts
    path.bytes_per_s = 200e6 / 8
    sizes = ("chain:10", "star:16", "stripes:8:2", "tree:20:2")
    assert [bench_broadcast.too_much(path, Topology.parse(text)) for text in sizes] == [""] * 4
    fault = bench_broadcast.too_much(path, Topology.parse("chain:16"))
    assert fault == (
        "its links carry 3.2 Gbit/s together, and half of what the emulator can carry is 2.0: "
        "--rate-mbit 125 or less"
    )
    assert not bench_broadcast.too_much(Loopback(), Topology.parse("chain:16"))


def test_theory_is_that_of_the_links() -> None:
    seconds = {
        text: Topology.parse(text).theory_s(1000, 10, 100.0, 0.5)
        for text in ("star:4", "chain:1", "chain:4", "tree:6:2", "stripes:6:2")
    }
    assert seconds["star:4"] == 40.5
    assert seconds["chain:1"] == 10.5
    assert seconds["chain:4"] == pytest.approx(10 + 3 * 0.1 + 4 * 0.5)
    assert seconds["tree:6:2"] == pytest.approx(20 + 1 * 0.2 + 2 * 0.5)
    assert seconds["stripes:6:2"] == pytest.approx(10 + 2 * (0.2 + 0.5))


@pytest.mark.parametrize("text", ["ring:3", "chain", "chain:2:2", "tree:4"])
def test_a_topology_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is none of"):
        Topology.parse(text)


def test_a_verdict_knows_which_way_is_better() -> None:
    stall, chain = FIGURES["stall"], FIGURES["sixteen"]
    assert stall.verdict({"killed": 0.6, "black-holed": 0.7}) == {
        "killed": "missed",
        "black-holed": "aim",
    }
    assert chain.verdict({"x star": 11.0}) == {"x star": "met"}


def test_uplinks_are_the_same_in_every_run() -> None:
    draws = [uplinks_mbit("log-normal", random.Random(1)) for _ in range(2)]
    assert draws[0] == draws[1]
    assert uplinks_mbit("half NAT", random.Random(1)).count(0.0) == 8
