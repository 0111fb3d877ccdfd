from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path

import pytest

import echo
from echo.core import extras
from echo.core.errors import ConfigError
from echo.core.extras import import_extra, install_command, models_directory, version


def test_a_missing_package_names_the_extra_that_brings_it() -> None:
    expected = (
        "metrics.wandb needs no_such_package, which is not installed; "
        f"install it with {install_command('wandb')}, or do without metrics.wandb"
    )
    with pytest.raises(ConfigError, match=re.escape(expected)):
        import_extra("no_such_package.part", extra="wandb", wanted_by="metrics.wandb")


def test_a_broken_package_shows_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_installed.py").write_text("import no_such_dependency")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "half_installed", raising=False)
    with pytest.raises(ConfigError, match=r"cannot be imported .*no_such_dependency"):
        import_extra("half_installed", extra="wandb", wanted_by="metrics.wandb")


def test_a_program_is_named_as_it_can_be_called_from_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(extras.CHECKOUT)
    assert extras.program("echo-rl") == "bin/echo-rl"
    monkeypatch.chdir(tmp_path)
    assert extras.program("echo-rl") == str(extras.CHECKOUT / "bin" / "echo-rl")
    monkeypatch.setattr(extras, "CHECKOUT", tmp_path)
    assert extras.program("echo-rl") == "echo-rl"


def test_a_command_is_called_as_the_one_that_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(extras.CHECKOUT)
    monkeypatch.setattr(sys, "argv", ["main.py"])
    assert extras.command("node") == "bin/echo-node"
    assert extras.command("ledger") == "bin/echo-rl ledger"
    monkeypatch.chdir(tmp_path)
    assert extras.command("node") == str(extras.CHECKOUT / "bin" / "echo-node")
    assert extras.command("node", elsewhere=True) == "bin/echo-node"
    # The script that pip installs, and a wheel.
    monkeypatch.setattr(sys, "argv", ["/venv/bin/echo-rl"])
    assert extras.command("node", elsewhere=True) == "echo-rl node"
    monkeypatch.setattr(sys, "argv", ["main.py"])
    monkeypatch.setattr(extras, "CHECKOUT", tmp_path)
    assert extras.command("node") == "echo-rl node"


METADATA = """Metadata-Version: 2.1
Name: echo-rl
Version: 9.8.7
Requires-Dist: pyzmq>=26
Requires-Dist: no-such-torch[cpu]>=2.13; extra == "worker"
Requires-Dist: pytest>=1; extra == "worker"
Requires-Dist: no-such-plots>=3.9; extra == "planner"
Requires-Dist: echo-rl[planner,worker]; extra == "learner"
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installation from a wheel."""
    (tmp_path / "echo_rl-9.8.7.dist-info").mkdir()
    (tmp_path / "echo_rl-9.8.7.dist-info" / "METADATA").write_text(METADATA)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(extras, "CHECKOUT", tmp_path)
    return tmp_path


def test_what_is_missing_is_named_by_package(installed: Path) -> None:
    expected = "pip install 'no-such-plots>=3.9' 'no-such-torch[cpu]>=2.13'"
    assert install_command("learner") == expected
    (installed / ".echo-setup").touch()
    setup = installed / "bin" / "echo-setup"
    setup.parent.mkdir()
    setup.touch()
    assert install_command("worker", "lora") == f"{setup} --role worker --extra lora"


def test_without_metadata_the_checkouts_program_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", missing)
    assert install_command("lora") == "bin/echo-setup --extra lora"


def test_the_version_is_of_our_own_distribution(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(echo, "__version__", "0.8 of another package")
    assert version() == "echo-rl 9.8.7"


def test_a_checkouts_version_is_that_of_its_files(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (installed / "pyproject.toml").touch()
    monkeypatch.setattr(echo, "__version__", "10.0.0")
    assert version() == "echo-rl 10.0.0"


def test_models_are_kept_in_the_checkout_or_in_the_users_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = tmp_path / "clone"
    checkout.mkdir()
    monkeypatch.setattr(extras, "CHECKOUT", checkout)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert models_directory() == tmp_path / "home" / ".cache" / "echo-rl" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert models_directory() == tmp_path / "cache" / "echo-rl" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which its specification says to ignore
    assert models_directory() == tmp_path / "home" / ".cache" / "echo-rl" / "models"
    (checkout / "pyproject.toml").touch()
    assert models_directory() == checkout / "build" / "models"
    monkeypatch.chdir(checkout)
    assert models_directory() == Path("build/models")
