"""Count what the house is measured by, for any commit and for the working tree.

    python tests/house/report.py --base 0f09e78               # before and after, by package
    python tests/house/report.py --base 0f09e78 --list exiles # where they are, after

What a count finds may have a reason in tests/house/reasons.toml; then it counts, with how many of
its kind have one.

Every count is a pure function over a source tree (path -> text): nothing of echo/ is imported, so a
commit that does not run can be counted, too. The report is scaffolding and goes with the last
commit of the house.

Against what design/HOUSE.md quotes for commit 0f09e78: 334 files, 53 262 lines, 184 keys and 92 for
fleets and scenarios, 113 of 322 docstrings are the same here. Its 118 files of one importer are the
60 of `lone_files` and 58 longer ones; its 52 below 60 lines are all files so short, whoever imports
them. Of code it has 35 302 lines, this 34 810: the text under a field is documentation here. Its
372 constants and 114 callbacks are by rules that it does not give; here are 582 (431 public) and
147 (136 without the aliases that stand for a Callable).
"""

from __future__ import annotations

import argparse
import ast
import gc
import io
import re
import subprocess
import sys
import tarfile
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[2]
BUDGET = "tests/budget.toml"
REASONS = "tests/house/reasons.toml"
"""A table for each count: "file: name" = why it stays."""
RECORDS = {
    "Enum",
    "IntEnum",
    "StrEnum",
    "NamedTuple",
    "TypedDict",
    "Protocol",
    "Struct",
    "BaseModel",
}
"""Whoever derives from one of these has no life of its own, nor has a frozen dataclass."""
MAX_PARAMETERS = 8
SMALL_FILE_LINES = 120
QUESTIONS = ("What", "Who", "Whose", "Whether", "Which", "How", "Where", "When", "Why")

# The left column of HOUSE.md section 4. Not counted, since only a reader can tell which meaning a
# name has: plan, run, session, journal, forecast, memory, store, uplink (a bandwidth may be called
# so), standby (the state may).
WORDS = (
    "arena", "room", "parcel", "anchor", "composite", "lane", "stray", "settled", "outrun",
    "barren", "freshen", "freshened", "prompting", "capability", "metering", "parked", "reception",
    "intake", "arrival", "farewell", "dismissal", "retirement", "handover", "player", "judge",
    "wave", "fence", "skeleton", "last_words", "draft",
)  # fmt: skip

Function = ast.FunctionDef | ast.AsyncFunctionDef


@cache
def nodes_of(module: ast.Module) -> tuple[ast.AST, ...]:
    """Return every node of a module: a dozen counts walk the same trees."""
    return tuple(ast.walk(module))


class Place(NamedTuple):
    """Something that was found, and where."""

    path: str
    line: int
    name: str


class Tree:
    """The sources of one commit, or of the working tree."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self.files = dict(sorted(files.items()))

    @cached_property
    def modules(self) -> dict[str, ast.Module]:
        """The parsed modules of echo/, by path."""
        return {
            path: ast.parse(text, path)
            for path, text in self.files.items()
            if path.startswith("echo/") and path.endswith(".py")
        }

    @cached_property
    def tests(self) -> dict[str, ast.Module]:
        """The parsed modules of tests/, by path."""
        return {
            path: ast.parse(text, path)
            for path, text in self.files.items()
            if path.startswith("tests/") and path.endswith(".py")
        }

    @cached_property
    def paths(self) -> dict[str, str]:
        """The path of each module of echo/, by its dotted name."""
        return {
            path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path
            for path in self.modules
        }

    def imported(self, path: str) -> Iterator[tuple[str, str | None, str]]:
        """Yield (path of the module, name taken from it or None, local name) of ours imported."""
        for node in nodes_of(self.modules[path]):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name in self.paths:
                        yield self.paths[alias.name], None, alias.asname or alias.name
            elif isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    local = alias.asname or alias.name
                    if whole in self.paths:
                        yield self.paths[whole], None, local
                    elif node.module in self.paths:
                        yield self.paths[node.module], alias.name, local

    @cached_property
    def classes(self) -> dict[str, dict[str, ast.ClassDef]]:
        """The classes at the top of each module of echo/."""
        return {
            path: {node.name: node for node in module.body if isinstance(node, ast.ClassDef)}
            for path, module in self.modules.items()
        }

    @cached_property
    def classes_called(self) -> dict[str, list[ast.ClassDef]]:
        """The classes at the top of modules of echo/, by name."""
        found = defaultdict(list)
        for classes in self.classes.values():
            for name, node in classes.items():
                found[name].append(node)
        return found

    @cached_property
    def reasons(self) -> dict[str, dict[str, str]]:
        """Why something that is counted stays, by the head of the count and by its place."""
        return tomllib.loads(self.files.get(REASONS, ""))


def tree_at(commit: str, repository: Path = REPOSITORY) -> Tree:
    """Return the sources of `commit`."""
    done = subprocess.run(
        ["git", "-C", str(repository), "archive", "--format=tar", commit, "echo", "tests"],
        capture_output=True,
        check=True,
    )
    files = {}
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        for member in archive.getmembers():
            is_source = member.isfile() and member.name.endswith((".py", ".toml"))
            if is_source and (stream := archive.extractfile(member)) is not None:
                files[member.name] = stream.read().decode()
    return Tree(files)


def working_tree(repository: Path = REPOSITORY) -> Tree:
    """Return the sources as they lie on the disk."""
    paths = [
        path
        for top in ("echo", "tests")
        for pattern in ("*.py", "*.toml")
        for path in (repository / top).rglob(pattern)
    ]
    return Tree({path.relative_to(repository).as_posix(): path.read_text() for path in paths})


def package_of(path: str) -> str:
    """Return the room that a file is in; tests are counted for the directory that they are in."""
    parts = path.split("/")
    return parts[1] if len(parts) > 2 else "(top)"


# Lines: a count by path.


def docstring_lines(module: ast.Module) -> set[int]:
    """Return the lines of `module` that are documentation: under a module, class, function, field.

    A string that stands alone is nothing else, wherever it stands.
    """
    return {
        line
        for node in nodes_of(module)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def code_lines(text: str, module: ast.Module) -> int:
    """Return the number of lines with code: neither blank, nor comment, nor documentation."""
    code = {
        number
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.lstrip().startswith("#")
    }
    return len(code - docstring_lines(module))


def lines(tree: Tree) -> Counter[str]:
    """All lines of echo/."""
    return Counter({path: len(tree.files[path].splitlines()) for path in tree.modules})


def lines_of_code(tree: Tree) -> Counter[str]:
    """Lines of echo/ with code on them."""
    return Counter({p: code_lines(tree.files[p], module) for p, module in tree.modules.items()})


def lines_of_docstring(tree: Tree) -> Counter[str]:
    """Lines of echo/ in docstrings."""
    return Counter({path: len(docstring_lines(module)) for path, module in tree.modules.items()})


def lines_of_test(tree: Tree) -> Counter[str]:
    """All lines of tests/, by the directory that they are in."""
    return Counter({path: len(tree.files[path].splitlines()) for path in tree.tests})


# Everything else: a list of places.


def files(tree: Tree) -> list[Place]:
    """Modules of echo/."""
    return [Place(path, 1, path) for path in tree.modules]


def _descendants(tree: Tree, root: str) -> dict[str, tuple[str, ast.ClassDef]]:
    """Return the classes of the house that derive from the class called `root`, by name."""
    found: dict[str, tuple[str, ast.ClassDef]] = {}
    everything = [(p, c) for p, classes in tree.classes.items() for c in classes.values()]
    known = {root}
    while True:
        new = [
            (path, node)
            for path, node in everything
            if node.name not in found
            and path.startswith("echo/config/")
            and any(_last_name(base) in known for base in node.bases)
        ]
        if not new:
            return found
        found.update({node.name: (path, node) for path, node in new})
        known.update(node.name for _, node in new)


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Subscript):
        return _last_name(node.value)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _fields(
    name: str, classes: Mapping[str, tuple[str, ast.ClassDef]]
) -> dict[str, tuple[str, ast.AnnAssign]]:
    """Return the fields of a pydantic class, inherited ones too, with where they stand."""
    if name not in classes:
        return {}
    path, node = classes[name]
    found: dict[str, tuple[str, ast.AnnAssign]] = {}
    for base in node.bases:
        found.update(_fields(_last_name(base), classes))
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            is_key = not item.target.id.startswith("_")
            if is_key and "ClassVar" not in ast.unparse(item.annotation):
                found[item.target.id] = (path, item)
    return found


def keys(tree: Tree) -> list[Place]:
    """Keys of a run's configuration; classes that share a section count a shared name once."""
    sections = _descendants(tree, "Section")
    found = {}
    for section, (path, field) in _fields("Config", sections).items():
        names = {getattr(node, "id", "") for node in ast.walk(field.annotation)}
        classes = [name for name in names if name in sections]
        if not classes:
            found[section] = Place(path, field.lineno, section)
        for name in classes:
            for key, (where, at) in _fields(name, sections).items():
                found[f"{section}.{key}"] = Place(where, at.lineno, f"{section}.{key}")
    return list(found.values())


def fleet_keys(tree: Tree) -> list[Place]:
    """Keys of fleet files and scenarios."""
    rows = _descendants(tree, "Row")
    return [
        Place(where, field.lineno, f"{name}.{key}")
        for name in rows
        for key, (where, field) in _fields(name, rows).items()
    ]


def constants(tree: Tree) -> list[Place]:
    """Names in capitals that a module binds at its top, private ones too."""
    return [
        Place(path, node.lineno, name)
        for path, module in tree.modules.items()
        for node in module.body
        for name in bound_names(node)
        if re.fullmatch(r"_*[A-Z][A-Z0-9_]*", name)
    ]


def bound_names(node: ast.stmt) -> list[str]:
    """Return the names that an assignment at the top of a module binds."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return [
        name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)
    ]


def _functions(module: ast.Module) -> Iterator[Function]:
    for node in nodes_of(module):
        if isinstance(node, Function):
            yield node


def _parameters(function: Function) -> list[ast.arg]:
    arguments = function.args
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]


def constructors(tree: Tree) -> list[Place]:
    """`__init__` with more than 8 parameters besides self."""
    return [
        Place(path, function.lineno, f"{node.name} ({len(_parameters(function)) - 1})")
        for path, module in tree.modules.items()
        for node in nodes_of(module)
        if isinstance(node, ast.ClassDef)
        for function in node.body
        if isinstance(function, Function)
        and function.name == "__init__"
        and len(_parameters(function)) - 1 > MAX_PARAMETERS
    ]


def callbacks(tree: Tree) -> list[Place]:
    """Parameters that are functions: annotated with Callable, or with an alias of ours for one."""
    aliases = {
        (path, name)
        for path, module in tree.modules.items()
        for node in module.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and node.value is not None
        and _says_callable(node.value, set())
        and not isinstance(node.value, ast.Call)
        for name in bound_names(node)
    }
    found = []
    for path, module in tree.modules.items():
        local = {name for where, name in aliases if where == path}
        local |= {
            here for where, name, here in tree.imported(path) if name and (where, name) in aliases
        }
        found += [
            Place(path, parameter.lineno, f"{function.name}({parameter.arg})")
            for function in _functions(module)
            for parameter in _parameters(function)
            if parameter.annotation is not None and _says_callable(parameter.annotation, local)
        ]
    return found


def _says_callable(annotation: ast.expr, aliases: set[str]) -> bool:
    """Tell whether a type is a function or None; a mapping to functions is none."""
    if isinstance(annotation, ast.BinOp):
        return _says_callable(annotation.left, aliases) or _says_callable(annotation.right, aliases)
    if isinstance(annotation, ast.Subscript):
        return _last_name(annotation.value) == "Callable"
    return _last_name(annotation) in aliases | {"Callable"}


def exiles(tree: Tree) -> list[Place]:
    """Functions whose first argument is another file's class: methods in exile."""
    return [place for place, _ in _exiles(tree)]


def exiles_of_objects(tree: Tree) -> list[Place]:
    """Those of them whose class is an object with a life of its own, and no record or contract."""
    return [place for place, owner in _exiles(tree) if not _is_record(owner, tree)]


def _exiles(tree: Tree) -> Iterator[tuple[Place, ast.ClassDef]]:
    for path, module in tree.modules.items():
        foreign = {
            here: tree.classes[where][name]
            for where, name, here in tree.imported(path)
            if name and where != path and name in tree.classes[where]
        }
        for function in module.body:
            if not isinstance(function, Function):
                continue
            first = [*function.args.posonlyargs, *function.args.args][:1]
            for parameter in first:
                name = _last_name(parameter.annotation) if parameter.annotation else ""
                if name in foreign:
                    text = f"{function.name}({parameter.arg}: {name})"
                    yield Place(path, function.lineno, text), foreign[name]


def _is_record(node: ast.ClassDef, tree: Tree) -> bool:
    """Tell whether a class is a frozen dataclass, or derives from what makes records."""
    bases = {_last_name(base) for base in node.bases}
    return (
        any(map(_is_frozen, node.decorator_list))
        or not bases.isdisjoint(RECORDS)
        or any(_is_record(base, tree) for name in bases for base in tree.classes_called[name])
    )


def _is_frozen(decorator: ast.expr) -> bool:
    return (
        isinstance(decorator, ast.Call)
        and _last_name(decorator.func) == "dataclass"
        and any(each.arg == "frozen" for each in decorator.keywords)
    )


def re_exports(tree: Tree) -> list[Place]:
    """`from a import X as X`: a name that has two addresses."""
    return [
        Place(path, node.lineno, alias.name)
        for path, module in tree.modules.items()
        for node in nodes_of(module)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    ]


def importers(tree: Tree) -> dict[str, set[str]]:
    """Return which files of echo/ import each of its files, wherever the import stands."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in tree.modules:
        for where, _, _ in tree.imported(path):
            if where != path:
                found[where].add(path)
    return found


def lone_files(tree: Tree) -> list[Place]:
    """Files that exactly one other file of echo/ imports, and that have fewer than 120 lines."""
    return [
        Place(path, len(tree.files[path].splitlines()), f"for {next(iter(used_by))}")
        for path, used_by in sorted(importers(tree).items())
        if len(used_by) == 1 and len(tree.files[path].splitlines()) < SMALL_FILE_LINES
    ]


def twice_used_names(tree: Tree) -> list[Place]:
    """Public classes and functions whose name another file of the house has, too."""
    places = defaultdict(list)
    for path, module in tree.modules.items():
        for node in module.body:
            is_definition = isinstance(node, ast.ClassDef | Function)
            if is_definition and not node.name.startswith("_") and node.name != "main":
                places[node.name].append(Place(path, node.lineno, node.name))
    return [place for _, found in sorted(places.items()) if len(found) > 1 for place in found]


def questions(tree: Tree) -> list[Place]:
    """Module docstrings that begin with What, Who, Whether, Which, How, Where, When."""
    return [
        Place(path, 1, (ast.get_docstring(module) or "").partition("\n")[0])
        for path, module in tree.modules.items()
        if (ast.get_docstring(module) or "").startswith(tuple(f"{word} " for word in QUESTIONS))
    ]


# Words.


def parts_of(name: str) -> list[str]:
    """Split a name into its words: "LaneLink" is lane, link and "num_lanes" is num, lane."""
    pieces = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", name)
    return [_singular(piece.lower()) for piece in pieces]


def _singular(word: str) -> str:
    return word.removesuffix("s") if word.removesuffix("s") in WORDS else word


def old_words(name: str) -> list[str]:
    """Return the words of the left column that `name`, or a text, has."""
    parts = parts_of(name)
    joined = [*parts, *("_".join(pair) for pair in pairwise(parts))]
    joined += [_singular(pair) for pair in joined]
    return sorted({part for part in joined if part in WORDS})


def words(tree: Tree) -> list[Place]:
    """Words of the left column: in names, in message tags, in texts that reach an operator."""
    return [
        Place(path, line, f"{word}: {text}")
        for path, module in tree.modules.items()
        for line, text in dict.fromkeys([*_names(path, module), *_texts(module)])
        for word in old_words(text)
    ]


def _names(path: str, module: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the names that a module defines: its own, classes, functions, attributes, parameters.

    Local variables are nobody's business but their function's.
    """
    yield 1, Path(path).stem
    for node in module.body:
        yield from ((node.lineno, name) for name in bound_names(node))
    for node in nodes_of(module):
        if isinstance(node, ast.ClassDef):
            yield node.lineno, node.name
            for item in node.body:
                yield from ((item.lineno, name) for name in bound_names(item))
            for keyword in node.keywords:
                if keyword.arg == "tag" and isinstance(keyword.value, ast.Constant):
                    yield node.lineno, str(keyword.value.value)
        elif isinstance(node, Function):
            yield node.lineno, node.name
            yield from ((parameter.lineno, parameter.arg) for parameter in _parameters(node))
            yield from _own_attributes(node)


def _own_attributes(function: Function) -> Iterator[tuple[int, str]]:
    """Yield the attributes that a constructor gives its object."""
    if function.name != "__init__":
        return
    for node in ast.walk(function):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ):
            yield node.lineno, node.attr


LOG_METHODS = {"debug", "info", "warning", "error", "exception", "critical"}
OUTPUT = {"Note", "print", "show", "fail"}
METRIC = re.compile(r"[a-z_]+(/[a-z0-9_]+)+")
"""The name of a metric or a counter, wherever it stands: "groups/outrun"."""


def _texts(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the literals of a module that an operator reads: logs, notes, errors, metric names."""
    for node in nodes_of(module):
        if isinstance(node, ast.Call) and _is_told(node.func):
            values = [*node.args, *(keyword.value for keyword in node.keywords)]
            for inner in (inner for value in values for inner in ast.walk(value)):
                if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                    yield inner.lineno, inner.value
        elif isinstance(node, ast.Constant) and METRIC.fullmatch(str(node.value)):
            yield node.lineno, node.value


def _is_told(function: ast.expr) -> bool:
    name = _last_name(function)
    if isinstance(function, ast.Attribute) and name in LOG_METHODS:
        return "log" in _last_name(function.value)
    return name in OUTPUT or name.endswith("Error")


def tests(tree: Tree) -> list[Place]:
    """Test functions, a parametrized one counted once."""
    return [
        Place(path, function.lineno, function.name)
        for path, module in tree.tests.items()
        if Path(path).name.startswith("test_")
        for function in _functions(module)
        if function.name.startswith("test_")
    ]


def cpu_seconds(tree: Tree) -> Counter[str]:
    """CPU seconds that tests/budget.toml grants the tests of a directory."""
    budget = tomllib.loads(tree.files.get(BUDGET, "")).get("cpu_s", {})
    folders = {name: "" if name == "top" else f"{name}/" for name in budget}
    return Counter({f"tests/{folders[name]}": round(s) for name, s in budget.items()})


@dataclass(frozen=True)
class Column:
    """One count, under a head that fits above its numbers."""

    head: str
    count: Callable[[Tree], Counter[str] | list[Place]]

    def by_package(self, tree: Tree) -> Counter[str]:
        """Return the count of every package."""
        found = self.count(tree)
        if not isinstance(found, Counter):
            found = Counter(place.path for place in found)
        total: Counter[str] = Counter()
        for path, number in found.items():
            total[package_of(path)] += number
        return total


COLUMNS = (
    Column("files", files),
    Column("lines", lines),
    Column("code", lines_of_code),
    Column("doc", lines_of_docstring),
    Column("test", lines_of_test),
    Column("tests", tests),
    Column("cpu_s", cpu_seconds),
    Column("keys", keys),
    Column("fleet_keys", fleet_keys),
    Column("consts", constants),
    Column("init>8", constructors),
    Column("callbacks", callbacks),
    Column("exiles", exiles),
    Column("of_objects", exiles_of_objects),
    Column("X_as_X", re_exports),
    Column("lone<120", lone_files),
    Column("twice", twice_used_names),
    Column("questions", questions),
    Column("words", words),
)


def table(before: Tree, after: Tree) -> str:
    """Return the counts by package and in total; "9>4" where `after` differs from `before`."""
    counts = [(column.by_package(before), column.by_package(after)) for column in COLUMNS]
    packages = sorted({name for pair in counts for count in pair for name in count})
    rows = [["", *(column.head for column in COLUMNS)]]
    rows += [[p, *(_cell(old[p], new[p]) for old, new in counts)] for p in packages]
    rows.append(["total", *(_cell(old.total(), new.total()) for old, new in counts)])
    return aligned(rows)


def _cell(old: int, new: int) -> str:
    return str(old or "-") if old == new else f"{old}>{new}"


def aligned(rows: Iterable[list[str]]) -> str:
    """Return rows of text as a table: the first column to the left, the others to the right."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0])]
            + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        ).rstrip()
        for row in rows
    )


def legend(tree: Tree) -> str:
    """Return a line for each column: its head, what it counts, how much of that has a reason."""
    return "\n".join(
        f"{c.head}: {(c.count.__doc__ or '').partition(chr(10))[0]}{_excused(c, tree)}"
        for c in COLUMNS
    )


def _excused(column: Column, tree: Tree) -> str:
    if column.head not in tree.reasons:
        return ""
    found = list(column.count(tree))
    num_excused = sum(bool(reason_of(column, place, tree)) for place in found)
    return f" {len(found)} ({num_excused} with a reason)"


def reason_of(column: Column, place: Place, tree: Tree) -> str:
    """Return why something stays; an empty text if that has not been said."""
    return tree.reasons.get(column.head, {}).get(f"{place.path}: {place.name}", "")


def idle_reasons(tree: Tree) -> list[str]:
    """Return the reasons for what is not there any more."""
    found = {
        c.head: {f"{p.path}: {p.name}" for p in c.count(tree)}
        for c in COLUMNS
        if c.head in tree.reasons
    }
    return [
        f"{head}: {place}"
        for head, places in tree.reasons.items()
        for place in places
        if place not in found.get(head, ())
    ]


def main() -> int:
    """Print the table, or the places of one count."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--base", default="HEAD", help="commit before (HEAD)")
    parser.add_argument("--head", help="commit after; the working tree if left out")
    parser.add_argument("--list", choices=[c.head for c in COLUMNS], help="list what is found")
    arguments = parser.parse_args()
    gc.disable()  # half the time went into nodes that live until the end
    after = tree_at(arguments.head) if arguments.head else working_tree()
    if arguments.list:
        [column] = [column for column in COLUMNS if column.head == arguments.list]
        found = column.count(after)
        if isinstance(found, Counter):
            print(aligned([[path, str(number)] for path, number in found.most_common()]))
        else:
            for place in found:
                reason = reason_of(column, place, after)
                print(f"{place.path}:{place.line}: {place.name}{reason and '  # '}{reason}")
        return 0
    print(table(tree_at(arguments.base), after))
    print(f"\n{legend(after)}")
    for idle in idle_reasons(after):
        print(f"{REASONS}: nothing has this reason any more: {idle}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
