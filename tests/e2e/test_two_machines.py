"""docs/two-machines.md, as it stands there, on machines that are network namespaces.

Learner, relay and worker have an address each and no way to anywhere else. The worker holds the
checkout and the join string: its home and its current directory are new, and the learner's
directory is hidden from it. Model and task are small ones in the place of those from the hub, which
the learner alone has to find.

This run goes through bin/, as a user's does: in a copy of the checkout, so that bin/echo-setup
takes the environment of these tests as it is, and installs nothing into it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from echo.runtime.identity import ECHO_JOIN
from tests.e2e.audit import read_ledger
from tests.e2e.cluster import WITHIN_S, NodeProcess
from tests.e2e.fork_server import REPOSITORY

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None,
        reason="network namespaces need root on Linux and the command ip",
    ),
]

PAGE = (REPOSITORY / "docs" / "two-machines.md").read_text(encoding="utf-8")

MACHINES = {"learner": "10.0.0.5", "relay": "10.0.0.6", "worker": "10.0.0.7"}
"""The first has the address that the configuration names."""

SMALL = (
    'kind = "gsm8k"', 'kind = "addition"',
    'options = { path = "hf://openai/gsm8k/main/train", '
    'heldout_path = "hf://openai/gsm8k/main/test" }', "",
    "max_completion_tokens = 1024", "max_completion_tokens = 8",
)  # fmt: skip
"""What is changed in the shared file: old and new text by turns."""

OF_THE_LEARNER = {
    "run.max_steps": 2,
    "batch.group_size": 2,
    "batch.groups_per_step": 2,
    "batch.keep_zero_variance": True,
    "eval.interval_steps": 0,
    "limits.min_free_disk_bytes": 0,
    "ui.live": "off",
}


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a copy of what a clone has that runs."""
    copy = tmp_path.resolve() / "checkout"
    for name in ("bin", "configs", "echo", "locks"):
        shutil.copytree(REPOSITORY / name, copy / name, symlinks=True)
    shutil.copyfile(REPOSITORY / "pyproject.toml", copy / "pyproject.toml")
    return copy


@pytest.fixture
def machines() -> Iterator[dict[str, str]]:
    """Return the namespace of each machine; they are joined by a bridge that leads nowhere else."""
    names = {machine: f"echo-test{os.getpid()}-{machine}" for machine in ("core", *MACHINES)}
    core = names["core"]
    try:
        try:
            for name in names.values():
                ip("netns", "add", name)
            ip("-n", core, "link", "add", "hub", "type", "bridge")
            ip("-n", core, "link", "set", "hub", "up")
            for number, (machine, address) in enumerate(MACHINES.items()):
                name, port = names[machine], f"port{number}"
                ip("-n", core, "link", "add", port, "type", "veth", "peer", "eth0", "netns", name)
                ip("-n", core, "link", "set", port, "master", "hub", "up")
                ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
                ip("-n", name, "link", "set", "eth0", "up")
                ip("-n", name, "link", "set", "lo", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr}")
        yield names
    finally:
        for name in names.values():
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "del", name)


class Site:
    """The directory of one machine, and the node that runs there."""

    def __init__(
        self, directory: Path, checkout: Path, namespace: str, *, hidden: Path | None = None
    ) -> None:
        self.directory = directory
        self._checkout = checkout
        self.home = directory / "home"
        self.home.mkdir(parents=True)
        self.events = directory / "node.events"
        self._namespace = namespace
        # `ip netns exec` has made a mount namespace, too, so nobody else sees this mount.
        self._hide = "" if hidden is None else f"mount -t tmpfs none '{hidden}' && "

    def start(self, role: str, config: Path, join: str, **settings: object) -> NodeProcess:
        assert f"\nbin/echo-node --role {role} --config configs/{config.name}\n" in PAGE
        program = self._checkout / "bin" / "echo-node"
        command = [str(program), "--role", role, "--config", str(config)]
        if role == "learner":
            command.append("--no-report")  # which draws
        command += ["--log-events", str(self.events)]
        for key, value in settings.items():
            command += ["--set", f"{key}={value if isinstance(value, str) else json.dumps(value)}"]
        inside = ("sh", "-c", f'{self._hide}exec "$@"', "sh")
        output_path = self.directory.with_suffix(".out")
        with output_path.open("wb") as output:
            process = subprocess.Popen(
                [*("ip", "netns", "exec", self._namespace), *inside, *command],
                cwd=self.directory,
                env={
                    "PATH": os.environ["PATH"],
                    "HOME": str(self.home),
                    "VIRTUAL_ENV": sys.prefix,
                    "PYTHONPATH": str(self._checkout),
                    ECHO_JOIN: join,
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return NodeProcess(role, process, output_path)


def write_config(checkout: Path) -> Path:
    """Put a small task into the shipped file."""
    path = checkout / "configs" / "two-machines.toml"
    text = path.read_text()
    for old, new in zip(SMALL[::2], SMALL[1::2], strict=True):
        assert text.count(old) == 1
        text = text.replace(old, new)
    path.write_text(text)
    return path


def check_directory(second: Site) -> None:
    """Check what the worker has on its disk: what it was sent, and nothing from a hub."""
    [worker_dir] = (second.directory / "runs" / "two-machines" / "workers").iterdir()
    assert (worker_dir / "installed.jsonl").read_text()
    assert (worker_dir / "model" / "tokenizer.json").exists()
    left = [path for path in second.directory.rglob("*") if path.suffix == ".safetensors"]
    assert not left, "weights were downloaded"
    assert not (second.home / ".cache" / "huggingface" / "hub").exists()


def test_the_page_works_with_nothing_on_the_worker_but_checkout_and_join_string(
    tmp_path: Path, model_dir: Path, checkout: Path, machines: dict[str, str]
) -> None:
    config = write_config(checkout)
    first = Site(tmp_path / "first", checkout, machines["learner"])
    model = str(shutil.copytree(model_dir, first.directory / "model"))
    between = Site(tmp_path / "between", checkout, machines["relay"], hidden=first.directory)
    second = Site(tmp_path / "second", checkout, machines["worker"], hidden=first.directory)
    nodes: list[NodeProcess] = []

    def wait_for(condition: Callable[[], object], *needed: NodeProcess) -> None:
        give_up_at = time.monotonic() + WITHIN_S
        while not condition():
            is_hopeless = time.monotonic() > give_up_at or not all(n.is_running for n in needed)
            assert not is_hopeless or condition(), logs()
            time.sleep(0.02)

    def logs() -> str:
        return "\n".join(f"--- {node.name}\n{node.output}" for node in nodes)

    try:
        nodes.append(first.start("learner", config, "", **OF_THE_LEARNER, **{"model.name": model}))
        join_path = first.directory / "runs" / "two-machines" / "keys" / "join"
        wait_for(join_path.exists, nodes[0])
        join = join_path.read_text().strip()
        assert join.startswith("tcp://10.0.0.5:7700#")
        nodes.append(between.start("relay", config, join))
        connect = ["tcp://10.0.0.6:7701", "tcp://10.0.0.5:7700"]
        named = {"worker.connect": connect, "worker.name": "w1"}  # so that its files stay
        nodes.append(second.start("worker", config, join, **named))
        wait_for(lambda: not any(node.is_running for node in nodes))
        assert [node.process.returncode for node in nodes] == [0, 0, 0], logs()
    finally:
        for node in nodes:
            if node.is_running:
                os.killpg(node.process.pid, signal.SIGKILL)
                node.process.wait(timeout=60)

    assert "through tcp://10.0.0.6:7701" in nodes[2].output
    assert "model.name = 'Qwen/Qwen3-0.6B' is the learner's" in nodes[2].output
    records = read_ledger(first.directory / "runs" / "two-machines")
    assert sum(record["kind"] == "trained" for record in records) == 2
    check_directory(second)
    secret = join.split(".")[-2]
    for site in (first, between, second):
        written = site.events.read_text()
        assert len(written.splitlines()) > 20
        assert all(type(json.loads(line)) is dict for line in written.splitlines())
        assert secret not in written
