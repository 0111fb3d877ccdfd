"""Installed version and optional packages.

A checkout has bin/echo-setup; elsewhere pip installs packages, named as our own metadata names
them. Never by the name of our distribution, which no index has.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import shlex
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

from echo.core.errors import ConfigError
from echo.core.paths import local_path

DISTRIBUTION = "echo-rl"
CHECKOUT = Path(__file__).resolve().parents[2]
ROLES = ("learner", "worker", "relay")
"""Extras that are roles, too."""
STAMP = ".echo-setup"
"""File that bin/echo-setup leaves in the environments that it makes."""


def version() -> str:
    """Return our name and version, whatever else is installed here and called echo."""
    # In a checkout echo/__init__.py is ours, and newer than what was once installed from it; among
    # installed packages another one called echo may have written its own over it.
    if not (CHECKOUT / "pyproject.toml").exists():
        with contextlib.suppress(metadata.PackageNotFoundError):
            return f"{DISTRIBUTION} {metadata.version(DISTRIBUTION)}"
    from echo import __version__

    return f"{DISTRIBUTION} {__version__}"


def program(name: str) -> str:
    """Return one of our programs as it is called from this directory."""
    own, near = CHECKOUT / "bin" / name, Path("bin") / name
    if not own.exists():
        return name
    return str(near if near.exists() and near.samefile(own) else own)


def command(name: str, *, elsewhere: bool = False) -> str:
    """Return how a command is called: `bin/echo-node` in a checkout, `echo-rl node` from a wheel.

    Args:
        name: of the command.
        elsewhere: whether the line is for another machine, in the directory of its checkout.
    """
    script, is_installed = f"echo-{name}", Path(sys.argv[0]).name == DISTRIBUTION
    if is_installed or not (CHECKOUT / "bin" / "echo-rl").exists():
        return f"{DISTRIBUTION} {name}"
    rest = "" if (CHECKOUT / "bin" / script).exists() else f" {name}"
    found = DISTRIBUTION if rest else script
    return (str(Path("bin", found)) if elsewhere else program(found)) + rest


def models_directory() -> Path:
    """Return where models that we make are kept: in a checkout, else in the user's cache."""
    if (CHECKOUT / "pyproject.toml").exists():
        place = CHECKOUT / "build" / "models"
        return place.relative_to(CHECKOUT) if Path.cwd() == CHECKOUT else place
    cache = local_path(os.environ.get("XDG_CACHE_HOME", ""))
    return (cache if cache.is_absolute() else local_path("~/.cache")) / DISTRIBUTION / "models"


def find_config(name: str) -> Path:
    """Return one of the configurations that come with us: where a clone has it, or in the package.

    Raises:
        ConfigError: if this installation lacks it.
    """
    for directory in (Path("configs"), Path(__file__).parents[1] / "configs"):
        if (directory / name).exists():
            return directory / name
    raise ConfigError(f"configs/{name} did not come with this installation of Echo")


def import_extra(module: str, *, extra: str, wanted_by: str) -> ModuleType:
    """Import `module`, which the extra `extra` of this distribution installs.

    Args:
        module: dotted name of the module.
        extra: name of the extra, as in pyproject.toml.
        wanted_by: the setting or output that needs it, for the message.

    Raises:
        ConfigError: if it is missing or broken; names the cause and the remedy.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == package
        cause = "is not installed" if is_missing else f"cannot be imported ({error})"
        raise ConfigError(
            f"{wanted_by} needs {package}, which {cause}; install it with "
            f"{install_command(extra)}, or do without {wanted_by}"
        ) from error


def install_command(*extras: str) -> str:
    """Return the command that adds, to this environment, what it lacks of these extras."""
    wanted = sorted({one for extra in extras for one in _requirements(extra)})
    if (Path(sys.prefix) / STAMP).exists() or not wanted:
        roles = [f"--role {extra}" for extra in extras if extra in ROLES]
        others = [f"--extra {extra}" for extra in extras if extra not in ROLES]
        return " ".join([program("echo-setup"), *roles, *others])
    missing = [one for one in wanted if not _is_installed(one)]
    return shlex.join(["pip", "install", *(missing or wanted)])


def _is_installed(requirement: str) -> bool:
    try:
        metadata.distribution(re.split(r"[^\w.-]", requirement)[0])
    except metadata.PackageNotFoundError:
        return False
    return True


def _requirements(extra: str) -> set[str]:
    """Return what an extra asks for by our metadata, with the extras of ours that it contains.

    A relay needs what every installation has, and is no extra.
    """
    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return set()
    found = set()
    for line in lines:
        requirement, _, marker = line.partition(";")
        marker = marker.replace("'", '"')
        if f'extra == "{extra}"' not in marker and (extra != "relay" or "extra ==" in marker):
            continue
        name, bracket, inner = requirement.strip().partition("[")
        if name == DISTRIBUTION and bracket:
            found |= {one for other in inner.rstrip("]").split(",") for one in _requirements(other)}
        else:
            found.add(requirement.strip())
    return found
