"""Files that a user's Python file imports from beside it, found without running any.

`python sub/rewards.py` finds modules in `sub`; so does a task. Files there, or in the current
directory, decide about the task as much as the named file, so they are compared between learner and
workers, too. Imports are read from the syntax, wherever they stand in a file; those of neighbours
are followed. Echo itself and installed packages are no neighbours.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path

INSTALLED = frozenset({"site-packages", "dist-packages"})


def neighbours_of(path: Path, directories: Sequence[Path]) -> dict[str, Path]:
    """Return the neighbours of a file, its own not among them.

    Args:
        path: of the file, resolved.
        directories: where absolute imports are looked for, in this order.

    Returns:
        By the name under which they are imported; for a relative import this is the file's path.
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
    """Return how many directories up the imports of a file reach; 0 if all are absolute."""
    return max((node.level for node in _nodes(path) if isinstance(node, ast.ImportFrom)), default=0)


def _nodes(path: Path) -> Iterator[ast.AST]:
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):  # importing it says what is wrong
        return
    yield from ast.walk(tree)


def _imports(path: Path, directories: Sequence[Path]) -> Iterator[tuple[str, Sequence[Path]]]:
    """Yield dotted names that may be modules, and where to look for each."""
    for node in _nodes(path):
        if isinstance(node, ast.Import):
            names, bases = [alias.name for alias in node.names], directories
        elif isinstance(node, ast.ImportFrom):
            # A name imported from a package may be a module in it.
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
    """Return the files that importing a name would run, of the first directory that has any."""
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
