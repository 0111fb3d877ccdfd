"""Check the address book of the move (moves.toml) against a commit and the plan of HOUSE.md.

    python tests/house/check_moves.py             # complete, in the plan, no import upward
    python tests/house/check_moves.py --done      # each definition stands where the book says
    python tests/house/check_moves.py --find Lane # where a definition of today goes

An address is `room/file`, or `room/file:Name` where a definition is renamed or becomes part of
another one; several are joined by " + " where one is divided. `gone:reason` names an entry of
[gone], `tests/...` and `bench/...` leave the package. A file has one address for all its
definitions, or a list: the address of most, and "Name Other -> address" for the others, or
"Name -> :New" for one that is renamed there.

With --done, names that begin with an underscore are not looked for: they follow their file, and
what they are called there is its business. Scaffolding, as the book is: the last commit of the
house takes both down.
"""

from __future__ import annotations

import argparse
import ast
import graphlib
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.house.report import Function, Tree, bound_names, old_words, tree_at, working_tree

BOOK = Path(__file__).parent / "moves.toml"
OUTSIDE = ("tests/", "bench/")
COMMAND = {"main", "make_parser"}
LOGGERS = {"log", "_log", "logger"}
Definition = tuple[str, str]
"""A file of today and a name at its top, such as ("protocol/lanes", "Lane")."""


@dataclass(frozen=True)
class Address:
    """Where a definition goes: a file of the plan, and the name that it has there."""

    place: str
    name: str
    is_told: bool = field(default=False, compare=False)
    """Whether the book names it: it is renamed, or becomes part of another."""

    @property
    def room(self) -> str:
        return self.place.partition("/")[0]


@dataclass(frozen=True)
class Arrow:
    """A definition, which may be divided, that mentions another."""

    users: tuple[Address, ...]
    targets: tuple[Address, ...]
    definition: Definition
    """What is used, as it is called today."""


class Book:
    """The address book, read."""

    def __init__(self, tables: Mapping[str, Any]) -> None:
        self.base: str = tables["base"]
        self.gone: dict[str, str] = tables["gone"]
        self.new: dict[str, str] = tables["new"]
        self.turned: dict[str, str] = tables["turned"]
        self.since: dict[str, str] = tables.get("since", {})
        self.deviations: dict[str, str] = tables["deviations"]
        self.floors: list[set[str]] = [set(floor.split()) for floor in tables["floors"]]
        self.plan = {
            place for room, names in tables["plan"].items() for place in _places(room, names)
        }
        self.entries: dict[str, dict[str, str]] = {}
        for package, entries in tables["moves"].items():
            for stem, entry in entries.items():
                file = stem if package == "top" else f"{package}/{stem}"
                self.entries[file] = dict(_targets(entry))

    def targets(self, file: str, name: str) -> list[str]:
        """Return what the book says of a definition, divided where it is."""
        entry = self.entries.get(file, {})
        return [part.strip() for part in entry.get(name, entry.get("*", "")).split("+") if part]

    def addresses(self, file: str, name: str) -> list[Address]:
        """Return where in the house a definition goes: nowhere if it is gone or leaves echo/."""
        return [
            Address(target.partition(":")[0], target.partition(":")[2] or name, ":" in target)
            for target in self.targets(file, name)
            if not target.startswith(("gone:", *OUTSIDE))
        ]


def _targets(entry: str | list[str]) -> Iterator[tuple[str, str]]:
    default = ""
    for line in [entry] if isinstance(entry, str) else entry:
        names, arrow, target = line.rpartition(" -> ")
        if not arrow:
            default = target
        whole = default + target if target.startswith(":") else target
        yield from ((name, whole) for name in (names.split() if arrow else ["*"]))


def _places(room: str, names: str) -> Iterator[str]:
    yield from (f"{room}/{name}" if room != "top" else name for name in names.split())


def read_book(path: Path = BOOK) -> Book:
    """Read the address book."""
    return Book(tomllib.loads(path.read_text()))


def stem_of(path: str) -> str:
    """Return a path as the book writes it: echo/core/units.py is core/units."""
    return path.removeprefix("echo/").removesuffix(".py")


def definitions(tree: Tree) -> dict[Definition, ast.stmt]:
    """Return every class, function and constant at the top of a module of echo/."""
    found: dict[Definition, ast.stmt] = {}
    for path, module in tree.modules.items():
        for node in module.body:
            is_named = isinstance(node, ast.ClassDef | Function)
            for name in [node.name] if is_named else bound_names(node):
                found[stem_of(path), name] = node
    return found


def problems(book: Book, tree: Tree) -> Iterator[str]:
    """Yield what is missing from the book, and what it says that cannot be."""
    known = definitions(tree)
    files = {stem_of(path) for path in tree.modules}
    # Most files __init__ are empty: they come and go with their folders.
    bare = {file for file in files if file.endswith("/__init__")} - {file for file, _ in known}
    yield from (f"{file}: not in the book" for file in sorted(files - bare - set(book.entries)))
    for file, entry in book.entries.items():
        if file not in files:
            yield f"{file}: not a file of {book.base}"
        for name in entry:
            if name != "*" and (file, name) not in known:
                yield f"{file}: {name} is not defined there"
        for target in {part for name in entry for part in book.targets(file, name)}:
            yield from (f"{file}: {problem}" for problem in _faults(book, target))
    for file, name in known:
        if file in book.entries and not book.targets(file, name):
            yield f"{file}: {name} has no address"


def _faults(book: Book, target: str) -> Iterator[str]:
    place, _, name = target.partition(":")
    if place == "gone":
        if name not in book.gone:
            yield f"{target} gives no reason of [gone]"
    elif not target.startswith(OUTSIDE) and place not in book.plan | set(book.deviations):
        yield f"{place} is neither in the plan nor a deviation"


def unused(book: Book) -> Iterator[str]:
    """Yield files of the plan that nothing moves into, and reasons that nothing gives."""
    targets = {
        part for f, entry in book.entries.items() for n in entry for part in book.targets(f, n)
    }
    places = {target.partition(":")[0] for target in targets}
    for place in sorted(book.plan - places - set(book.new)):
        yield f"{place}: nothing moves there"
    reasons = {target.partition(":")[2] for target in targets if target.startswith("gone:")}
    yield from (
        f"gone.{reason}: nothing goes for it" for reason in sorted(book.gone.keys() - reasons)
    )
    yield from (f"{d}: nothing moves there" for d in sorted(book.deviations.keys() - places))


def clashes(book: Book, tree: Tree) -> Iterator[str]:
    """Yield public names that the house may not have: old words, two things under one name.

    Definitions that become one say so, by naming it.
    """
    kept: dict[Address, list[str]] = defaultdict(list)
    classes: dict[str, set[str]] = defaultdict(set)
    for (file, name), node in definitions(tree).items():
        if name.startswith("_") or name in LOGGERS:
            continue
        for address in book.addresses(file, name):
            for word in old_words(address.name):
                yield f"{file}: {name} is {address.name} in the house, with '{word}'"
            if not address.is_told and name not in COMMAND:
                kept[address].append(file)
            if isinstance(node, ast.ClassDef):
                classes[address.name].add(address.place)
    yield from (
        f"{address.place}: {address.name} comes from {' and '.join(files)}"
        for address, files in kept.items()
        if len(files) > 1
    )
    yield from (
        f"class {name} is in {' and '.join(sorted(places))}"
        for name, places in classes.items()
        if len(places) > 1
    )


def undone(book: Book, base: Tree, now: Tree) -> Iterator[str]:
    """Yield what does not stand where the book says, and what stands though it is gone."""
    standing = definitions(now)
    for file, name in definitions(base):
        if name.startswith("_"):
            continue
        for address in book.addresses(file, name):
            if (address.place, address.name) not in standing:
                yield f"{file}: {name} is not {address.name} in {address.place}"
        if (file, name) in standing and file not in {a.place for a in book.addresses(file, name)}:
            yield f"{file}: {name} is still there"


@cache
def arrows(book: Book, tree: Tree) -> tuple[Arrow, ...]:
    """Return what uses what, over today's mentions and between the files to come.

    What is divided counts as using only what none of its parts could use from where it is, and as
    used only where no part of it is at hand.
    """
    found = []
    known = definitions(tree)
    in_file: dict[str, dict[str, Definition]] = defaultdict(dict)
    for file, name in known:
        in_file[file][name] = file, name
    names_in, modules_in = _imports(tree)
    for path in tree.modules:
        file = stem_of(path)
        names, modules = names_in[file], modules_in[file]
        for name in in_file[file]:
            used = _used(known[file, name], names | in_file[file], modules) - {(file, name)}
            users = book.addresses(file, name)
            for definition in used:
                # Each file of today has a logger of its own, and will.
                targets = book.addresses(*definition)
                if users and targets and definition[1] not in LOGGERS:
                    found.append(Arrow(tuple(users), tuple(targets), definition))
    return tuple(found)


def _imports(
    tree: Tree,
) -> tuple[dict[str, dict[str, Definition]], dict[str, dict[str, str]]]:
    """Return by file what its names, and the modules that it names, stand for.

    A name that another file only passes on stands for what that one has it from.
    """
    names: dict[str, dict[str, Definition]] = defaultdict(dict)
    modules: dict[str, dict[str, str]] = defaultdict(dict)
    for path in tree.modules:
        for where, name, here in tree.imported(path):
            if name:
                names[stem_of(path)][here] = stem_of(where), name
            else:
                modules[stem_of(path)][here] = stem_of(where)
    for known in list(names.values()):
        for here, (file, name) in known.items():
            while name in names[file]:
                file, name = names[file][name]
            known[here] = file, name
    return names, modules


def _used(
    node: ast.stmt, names: Mapping[str, Definition], modules: Mapping[str, str]
) -> set[Definition]:
    """Return the definitions of ours that a piece of code mentions."""
    found = set()
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and inner.id in names:
            found.add(names[inner.id])
        elif isinstance(inner, ast.Attribute):
            module = modules.get(getattr(inner.value, "id", ""))
            found |= {(module, inner.attr)} if module else set()
    return found


def upward(book: Book, tree: Tree) -> Iterator[str]:
    """Yield every use that would point upward, or across a floor, and that the book leaves open."""
    floors = {room: height for height, rooms in enumerate(book.floors) for room in rooms}

    def is_allowed(user: Address, target: Address) -> bool:
        if user.room == target.room:
            return True
        return floors.get(target.room, -1) < floors.get(user.room, len(floors))

    found = {
        f"{user.place} uses {arrow.definition[1]} of "
        + " + ".join(target.place for target in arrow.targets)
        for arrow in arrows(book, tree)
        if not any(is_allowed(user, target) for user in arrow.users for target in arrow.targets)
        for user in arrow.users
        if not any(_explains(key, user, arrow) for key in book.turned)
    }
    yield from sorted(found)


def needless(book: Book, tree: Tree) -> Iterator[str]:
    """Yield entries of [turned] that nothing needs."""
    for key in book.turned:
        if not any(
            _explains(key, user, arrow) for arrow in arrows(book, tree) for user in arrow.users
        ):
            yield f"turned: nothing needs '{key}'"


def _explains(key: str, user: Address, arrow: Arrow) -> bool:
    place, *names = key.split()
    return place == user.place and ("*" in names or arrow.definition[1] in names)


def circles(book: Book, tree: Tree) -> Iterator[str]:
    """Yield a circle of files that would import each other, if there is one."""
    graph: dict[str, set[str]] = defaultdict(set)
    for arrow in arrows(book, tree):
        if len(arrow.users) == len(arrow.targets) == 1:
            [user], [target] = arrow.users, arrow.targets
            is_open = not any(_explains(key, user, arrow) for key in book.turned)
            if user.place != target.place and user.room == target.room and is_open:
                graph[user.place].add(target.place)
    while True:
        try:
            graphlib.TopologicalSorter(graph).prepare()
        except graphlib.CycleError as error:
            yield "circle: " + " -> ".join(error.args[1][::-1])
            graph[error.args[1][1]].discard(error.args[1][0])
        else:
            return


def faults(book: Book, tree: Tree) -> list[str]:
    """Return all that is wrong with a book about this tree."""
    checks = (problems, clashes, upward, circles, needless)
    return [*unused(book), *(fault for check in checks for fault in check(book, tree))]


def main() -> int:
    """Print what is wrong; the exit status is 1 if anything is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--done", action="store_true", help="compare with the working tree")
    parser.add_argument("--find", metavar="NAME", help="say where a definition goes")
    arguments = parser.parse_args()
    book = read_book()
    base = tree_at(book.base)
    if arguments.find:
        for file, name in definitions(base):
            if name == arguments.find:
                print(f"{file}: {' + '.join(book.targets(file, name))}")
        return 0
    found = faults(book, base)
    if arguments.done:
        found += undone(book, base, working_tree())
    print("\n".join(found) or "the book is complete")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
