"""Files that start workers where machines are rented: each is what its platform reads."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from echo.cli import parsers
from echo.config.load import load_config
from echo.fleet.recipes import IMAGE, KINDS, NAME, Machines, recipe

REPOSITORY = Path(__file__).parents[2]
CONFIG = "configs/wan.toml"
MACHINES = Machines(
    name="fra-4090",
    count=3,
    gpu="NVIDIA GeForce RTX 4090",
    num_gpus=2,
    is_spot=True,
    settings=[
        f"worker.name={NAME}",
        'worker.connect=["tcp://relay.example:7701", "tcp://learner.example:7700"]',
        "network.region=a b $5",
        "worker.listen=tcp://0.0.0.0:7702",
        f"worker.advertise=tcp://{NAME}:7702",
    ],
    least="gpu_name=RTX_4090 gpu_ram>=20",
    disk_gb=40,
)
JOIN = "tcp://learner.example:7700#key.secret.print"


def settings_of(number: int | str) -> list[str]:
    return [setting.replace(NAME, f"fra-4090-{number}") for setting in MACHINES.settings]


def check_line(words: list[str], number: int | str) -> None:
    """The words after echo-node are understood, and set what the plan has set."""
    arguments = parsers.node_parser().parse_args(words)
    assert arguments.role == "worker"
    assert arguments.set == settings_of(number)
    load_config(REPOSITORY / arguments.config, arguments.set, "worker")


def run_script(text: str, tmp_path: Path, *arguments: str, **variables: str) -> list[list[str]]:
    """Run a script whose programs note their arguments; return those of each call in order."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("echo-node", "vastai", "runpodctl"):
        (programs / name).write_text(
            '#!/usr/bin/env bash\nprintf "%s\\0" "$0" "$@" >> "$CALLS"; printf "\\1" >> "$CALLS"\n'
            'case "$*" in search*) echo \'[{"id": 7}, {"id": 8}, {"id": 9}, {"id": 10}]\';; esac\n'
        )
        (programs / name).chmod(0o755)
    (tmp_path / "script").write_text(text)
    calls = tmp_path / "calls"
    subprocess.run(
        ["bash", "script", *arguments], cwd=tmp_path, check=True, timeout=60,
        env={
            "PATH": f"{programs}:{os.environ['PATH']}", "CALLS": str(calls), "ECHO_JOIN": JOIN,
            **variables,
        },
    )  # fmt: skip
    return [call.split("\0")[1:-1] for call in calls.read_text().split("\1")[:-1]]


def text_of(kind: str) -> str:
    return recipe(kind, MACHINES, config=CONFIG)[1]


def test_the_command_line_knows_each_kind_and_names_of_files_differ() -> None:
    assert parsers.RECIPES == KINDS
    assert len({recipe(kind, MACHINES, config=CONFIG)[0] for kind in KINDS}) == len(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_each_says_how_it_is_started_and_holds_no_secret(kind: str) -> None:
    text = text_of(kind)
    head = "\n".join(line for line in text.splitlines() if line.startswith("#"))
    assert "ECHO_JOIN" in head
    assert "runs/NAME/keys/join" in head
    assert NAME not in text


def test_a_shell_starts_the_worker_of_its_number(tmp_path: Path) -> None:
    [words] = run_script(text_of("shell"), tmp_path, "2")
    check_line(words, 2)


def test_slurm_starts_one_worker_for_each_task_of_an_array(tmp_path: Path) -> None:
    text = text_of("slurm")
    assert "#SBATCH --array=1-3\n" in text
    assert "#SBATCH --gpus=2\n" in text
    [words] = run_script(text, tmp_path, SLURM_ARRAY_TASK_ID="3")
    check_line(words, 3)


@pytest.mark.parametrize("kind", ["shell", "slurm", "vast", "runpod"])
def test_a_script_without_a_join_string_says_so(kind: str, tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        run_script(text_of(kind), tmp_path, "1", ECHO_JOIN="", SLURM_ARRAY_TASK_ID="1")
    assert not (tmp_path / "calls").exists()


def test_skypilot_starts_one_worker_on_each_node(tmp_path: Path) -> None:
    task = yaml.safe_load(text_of("skypilot"))
    assert task["num_nodes"] == 3
    assert task["resources"]["accelerators"] == "RTX4090:2"
    assert task["resources"]["use_spot"] is True
    assert task["secrets"] == {"ECHO_JOIN": None}
    [words] = run_script(task["run"], tmp_path, SKYPILOT_NODE_RANK="0")
    check_line(words, 1)
    role = re.search(r"echo-setup (.*)", task["setup"])
    assert role is not None
    assert role[1] == "--role worker --extra vllm"


def test_kubernetes_starts_a_worker_in_each_pod() -> None:
    text = text_of("kubernetes")
    wanted: Any = yaml.safe_load(text)
    assert wanted["kind"] == "StatefulSet"
    assert wanted["spec"]["replicas"] == 3
    assert (
        wanted["spec"]["selector"]["matchLabels"]
        == wanted["spec"]["template"]["metadata"]["labels"]
    )
    [container] = wanted["spec"]["template"]["spec"]["containers"]
    assert container["image"] == IMAGE
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 2}
    assert container["envFrom"] == [{"secretRef": {"name": "echo-join"}}]
    check_line([word.replace("$(POD_NAME)", "fra-4090-0") for word in container["args"]], 0)


def test_vast_rents_the_cheapest_that_suffice(tmp_path: Path) -> None:
    search, *rentals = run_script(text_of("vast"), tmp_path)
    assert search[:3] == ["search", "offers", MACHINES.least]
    assert [rental[2] for rental in rentals] == ["7", "8", "9"]
    for number, rental in enumerate(rentals, start=1):
        assert rental[rental.index("--env") + 1] == f"-e ECHO_JOIN={JOIN}"
        check_line(rental[rental.index("--args") + 1 :], number)


def test_runpod_rents_one_pod_for_each_worker(tmp_path: Path) -> None:
    pods = run_script(text_of("runpod"), tmp_path)
    assert len(pods) == 3
    for number, pod in enumerate(pods, start=1):
        assert pod[pod.index("--name") + 1] == f"fra-4090-{number}"
        assert pod[pod.index("--gpuType") + 1] == MACHINES.gpu
        check_line(shlex.split(pod[pod.index("--args") + 1]), number)


def test_systemd_starts_the_worker_of_the_instance(tmp_path: Path) -> None:
    text = text_of("systemd")
    [line] = re.findall(r"^ExecStart=(.*)$", text, re.M)
    program, *words = shlex.split(line.replace("%i", "2").replace("$$", "$"))
    assert program == "/opt/echo-rl/bin/echo-node"
    check_line(words, 2)
    if shutil.which("systemd-analyze"):
        unit = tmp_path / recipe("systemd", MACHINES, config=CONFIG)[0]
        unit.write_text(text.replace("/opt/echo-rl/bin/echo-node", "/bin/true"))
        done = subprocess.run(
            ["systemd-analyze", "verify", unit],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert unit.name not in done.stderr, done.stderr


def test_the_images_are_made_of_files_that_exist_and_commands_that_are_understood() -> None:
    text = (REPOSITORY / "configs" / "Containerfile").read_text()
    for words in re.findall(r"^COPY (.*)$", text, re.M):
        *sources, _ = words.split()
        assert all((REPOSITORY / source).exists() for source in sources)
    targets = re.findall(r"^FROM base AS (\w+)\nRUN bin/echo-setup --role (\w+)", text, re.M)
    assert targets == [("relay", "relay"), ("worker", "worker"), ("learner", "learner")]
    for line in re.findall(r"^CMD (.*)$", text, re.M):
        arguments = parsers.node_parser().parse_args(json.loads(line))
        if arguments.config is not None:
            assert (REPOSITORY / arguments.config).exists()
