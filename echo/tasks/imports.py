"""Find a user's module, class or function by the name that the configuration gives it."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
import sysconfig
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from echo.errors import ConfigError


def import_module(where: str, name: str) -> ModuleType:
    """Import a module by its dotted name, from the current directory too, or by its file.

    Args:
        where: what to begin messages with, such as "task.kind = 'my_task:Reverse'".
        name: "package.module", or the path of a file that ends in ".py".

    Raises:
        ConfigError: if there is no such module, or importing it fails.
    """
    directory = str(Path.cwd())
    if directory not in sys.path:
        # Stays: the user's module may import its neighbours later, while it scores.
        sys.path.insert(0, directory)
        importlib.invalidate_caches()
    try:
        return _import_file(Path(name)) if name.endswith(".py") else importlib.import_module(name)
    except Exception as error:
        if isinstance(error, FileNotFoundError) and name.endswith(".py"):
            problem = f"no file {name!r} in {directory}"
        elif isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            neighbours = [path.stem for path in Path(directory).glob("*.py")]
            problem = (
                f"no module {name!r} in {directory} or among the installed packages"
                f"{nearest(name, neighbours)}"
            )
        else:
            problem = f"importing {name!r} failed: {type(error).__name__}: {error}"
        raise ConfigError(f"{where}: {problem}") from error


def find_code(name: str) -> list[Path]:
    """Return the Python files that `import_module` would run for a name, without running any.

    They are the module's own and those of the packages around it. Python's own library is left
    out: it comes with the interpreter.

    Returns:
        The files in the order in which they would be run; none if there is no such module.
    """
    if name.endswith(".py"):
        path = Path(name).expanduser().resolve()
        return [path] if path.is_file() else []
    importlib.invalidate_caches()
    found: list[Path] = []
    package = ""
    directory = str(Path.cwd())
    search: Sequence[str] | None = sys.path if directory in sys.path else [directory, *sys.path]
    for part in name.split("."):
        package = f"{package}.{part}" if package else part
        known = getattr(sys.modules.get(package), "__spec__", None)
        spec = known or (None if search is None else _find_spec(package, search))
        if spec is None:
            return []
        if spec.has_location and spec.origin is not None:
            found.append(Path(spec.origin).resolve())
        search = spec.submodule_search_locations
    return [path for path in found if path.suffix == ".py" and not _is_pythons_own(path)]


def load_function(where: str, spec: str) -> Callable[..., Any]:
    """Return the function that "package.module:name" or "path/to/file.py:name" names.

    Raises:
        ConfigError: if there is none.
    """
    module_name, colon, name = spec.rpartition(":")
    if not colon or not module_name or not name:
        raise ConfigError(
            f"{where}: name a function as 'package.module:function' or 'path/to/file.py:function'"
        )
    module = import_module(where, module_name)
    found = getattr(module, name, None)
    if not callable(found):
        own = [
            key
            for key, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        raise ConfigError(
            f"{where}: {module_name} has no function {name!r}{nearest(name, own)}; it defines "
            f"{', '.join(own) or 'none'}"
        )
    function: Callable[..., Any] = found
    return function


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a question that names the closest of `known`, or nothing."""
    matches = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def _find_spec(name: str, search: Sequence[str]) -> ModuleSpec | None:
    # Not importlib.util.find_spec, which imports the packages around a module.
    specs = (finder.find_spec(name, search) for finder in sys.meta_path)
    return next((spec for spec in specs if spec is not None), None)


def _is_pythons_own(path: Path) -> bool:
    library = Path(sysconfig.get_path("stdlib")).resolve()
    return path.is_relative_to(library) and not {"site-packages", "dist-packages"} & {*path.parts}


def _import_file(path: Path) -> ModuleType:
    path = path.expanduser().resolve()
    name = f"echo_user_{path.stem}"
    known = sys.modules.get(name)
    if known is not None and known.__file__ == str(path):
        return known
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    # Entered first, as dataclasses and the like look their own module up.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
