"""Neighbours of a user's Python file: the user's other files that the file imports.

Under `python sub/rewards.py` an import finds modules in `sub`. If a task names `sub/rewards.py`,
the imports of this file find the same modules. Imported files in `sub` or in the current directory
affect the rewards as much as the named file. So learner and workers compare these files, too.
Imports are read from the syntax trees of the file and of its neighbours, at any depth. No file is
run. Files of Echo and of installed packages are not neighbours.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

from echo.tasks.syntax import parse

INSTALLED = frozenset({"site-packages", "dist-packages"})


def neighbours_of(path: Path, directories: Sequence[Path]) -> dict[str, Path]:
    """Return the files that a file imports, directly or indirectly.

    Args:
        path: the resolved path of the file.
        directories: the directories that are searched for absolute imports, in this order.

    Returns:
        The neighbours, without the file itself. The key of a neighbour is its imported name, or its
        path if the import is relative.
    """
    found: dict[str, Path] = {}
    if INSTALLED & {*path.parts}:
        return found
    files = [path]
    while files:
        file = files.pop()
        for name, bases in _imports(file, directories):
            for own_name, neighbour in _resolve(name, bases):
                is_relative = bases is not directories
                key = str(neighbour) if is_relative else own_name
                if key not in found and neighbour != path:
                    found[key] = neighbour
                    files.append(neighbour)
    return found


def relative_level(path: Path) -> int:
    """Return the largest number of leading dots in a file's imports."""
    return max((node.level for node in _nodes(path) if isinstance(node, ast.ImportFrom)), default=0)


def _nodes(path: Path) -> Iterator[ast.AST]:
    try:
        tree = parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):  # importing it raises the same
        return
    yield from ast.walk(tree)


def _imports(path: Path, directories: Sequence[Path]) -> Iterator[tuple[str, Sequence[Path]]]:
    """Yield each dotted name in a file's imports, and the directories to search."""
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            names, bases = [alias.name for alias in node.names], directories
        elif isinstance(node, ast.ImportFrom):
            # A name that is imported from a package may be one of its modules.
            prefix = f"{node.module}." if node.module else ""
            names = [prefix + alias.name for alias in node.names]
            names += [node.module] if node.module else []
            for package in path.parents[: node.level]:
                yield "__init__", [package]
            bases = list(path.parents[node.level - 1 : node.level]) if node.level else directories
        else:
            continue
        for name in names:
            if bases is not directories or name.partition(".")[0] != "echo":
                yield name, bases


def _resolve(name: str, bases: Sequence[Path]) -> list[tuple[str, Path]]:
    """Return the files that an import of `name` would run.

    The files are from the first directory in `bases` that has such a file.
    """
    for base in bases:
        found: list[tuple[str, Path]] = []
        place, parts = base, name.split(".")
        for number, part in enumerate(parts, start=1):
            own_name = ".".join(parts[:number])
            if (file := place / part / "__init__.py").is_file():
                found.append((own_name, file.resolve()))
            elif (file := place / f"{part}.py").is_file():
                found.append((own_name, file.resolve()))
                break
            elif not (place / part).is_dir():
                break
            place /= part
        if found:
            return found
    return []
