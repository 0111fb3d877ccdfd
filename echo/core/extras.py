"""Finds the installed version of Echo, and imports packages that only some features need.

In a checkout, bin/echo-setup installs packages. Otherwise pip installs the requirements in Echo's
metadata. If a package is missing, the error shows a pip command. The command lists the requirements
one by one, because Echo is on no package index.
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
"""Names of roles. "learner" and "worker" are also names of extras."""
STAMP = ".echo-setup"
"""Name of the file that bin/echo-setup writes into each new environment."""


def version() -> str:
    """Return Echo's name and version.

    Another installed package called echo cannot change the result.
    """
    # In a checkout echo/__init__.py is ours, and newer than the metadata of an earlier
    # installation. Among installed packages, another package called echo may have overwritten it.
    if not (CHECKOUT / "pyproject.toml").exists():
        with contextlib.suppress(metadata.PackageNotFoundError):
            return f"{DISTRIBUTION} {metadata.version(DISTRIBUTION)}"
    from echo import __version__

    return f"{DISTRIBUTION} {__version__}"


def program(name: str) -> str:
    """Return the path of a program of Echo. If possible, the path is relative."""
    own, near = CHECKOUT / "bin" / name, Path("bin") / name
    if not own.exists():
        return name
    return str(near if near.exists() and near.samefile(own) else own)


def command(name: str, *, elsewhere: bool = False) -> str:
    """Return the command line that runs an Echo command.

    For the command `node`, this is `bin/echo-node` in a checkout, and `echo-rl node` with an
    installed package.

    Args:
        name: the command.
        elsewhere: whether the command line is for another machine. If True, the path is relative to
            the other machine's checkout.
    """
    script, is_installed = f"echo-{name}", Path(sys.argv[0]).name == DISTRIBUTION
    if is_installed or not (CHECKOUT / "bin" / "echo-rl").exists():
        return f"{DISTRIBUTION} {name}"
    rest = "" if (CHECKOUT / "bin" / script).exists() else f" {name}"
    found = DISTRIBUTION if rest else script
    return (str(Path("bin", found)) if elsewhere else program(found)) + rest


def models_directory() -> Path:
    """Return the directory for the models that Echo makes.

    The directory is in the checkout. For an installed package, it is in the user's cache.
    """
    if (CHECKOUT / "pyproject.toml").exists():
        place = CHECKOUT / "build" / "models"
        return place.relative_to(CHECKOUT) if Path.cwd() == CHECKOUT else place
    cache = local_path(os.environ.get("XDG_CACHE_HOME", ""))
    return (cache if cache.is_absolute() else local_path("~/.cache")) / DISTRIBUTION / "models"


def find_config(name: str) -> Path:
    """Return the path of an example configuration, found in ./configs or in the package.

    Raises:
        ConfigError: if this installation does not include the configuration.
    """
    for directory in (Path("configs"), Path(__file__).parents[1] / "configs"):
        if (directory / name).exists():
            return directory / name
    raise ConfigError(f"configs/{name} did not come with this installation of Echo")


def find_lock() -> Path:
    """Return the path of the file that lists the tested versions of all packages.

    Raises:
        ConfigError: if this installation does not include the file.
    """
    path = Path(__file__).parents[1] / "locks" / "all.txt"
    if path.exists():
        return path
    raise ConfigError("locks/all.txt did not come with this installation of Echo")


def import_extra(module: str, *, extra: str, wanted_by: str) -> ModuleType:
    """Import a module that one of Echo's extras installs.

    Args:
        module: the module's dotted name.
        extra: the extra's name in pyproject.toml.
        wanted_by: the setting or output that needs the module, for the error message.

    Raises:
        ConfigError: if the module is missing or cannot be imported. The message names the cause and
            the remedy.
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
    """Return the command that installs the missing packages of these extras."""
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
    """Return the requirements that Echo's metadata lists for an extra.

    The list contains the requirements of included extras. "relay" is not an extra: a relay needs
    only the requirements of every installation.
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
