"""Carry out the address book (moves.toml): move, merge and rename what can be done mechanically.

    python tests/house/move.py --dry-run            # what goes where, and what is left to people
    python tests/house/move.py --room core wire     # these rooms of the new house
    python tests/house/move.py --only weights/link  # these files, old or new
    python tests/house/move.py                      # the whole book

It works on any state of the tree: definitions may be gone, files joined, rooms moved before. What
it does not know stays where it is and is listed; so does what would make a circle of imports or one
upward, since the result has to run. Every use in echo/, tests/ and bench/ follows, and so do
dotted names, paths and `Names` in strings, comments and text files. ruff gives the result its form.

How: every file is parsed (`Source`), with what each name in it stands for. `place` gives every
definition its address, `settle` holds back what cannot go yet, `Target` composes a module out of
the parts that go there, and `Rewriter` turns what a piece of text mentions into what it is called
now. All of it is exact slices of the old text: comments stay. Scaffolding, as the book is.
"""

from __future__ import annotations

import argparse
import ast
import bisect
import io
import re
import subprocess
import sys
import textwrap
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.house.check_moves import LOGGERS, OUTSIDE, Book, read_book
from tests.house.report import REPOSITORY, Tree, bound_names, tree_at

TOPS = ("echo", "tests", "bench")
# What describes the old house, or plants faults in houses on paper, stays as it is.
NOT_OURS = ("tests/house/", "tests/test_layers.py", "bench/results/")
# What not everybody has, or what is slow to load.
HEAVY = {"aiohttp", "matplotlib", "pyarrow", "rich", "scipy", "tokenizers", "torch", "transformers"}
HEAVY |= {"peft", "safetensors", "triton", "uvloop", "verifiers", "vllm", "zmq"}
PATCHES = {"setattr", "delattr", "getattr", "hasattr", "object"}
TYPE_CHECKING = "TYPE_CHECKING"
FUTURE = "from __future__ import annotations"
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
DOTTED = re.compile(r"\becho((?:\.\w+)+)(:\w+)?")
PATH = re.compile(r"(?<![\w/.])(echo/)?((?:\w+/)+\w+|\w+)\.py\b")
QUOTED = re.compile(r"(`{1,2})([A-Za-z_]\w*)((?:\.\w+|\([^`\n]*\))*\1)")
FROM = re.compile(
    r"^(?P<indent>[ \t]*)from (?P<module>echo[\w.]*) import (?P<names>[\w, ]+)$", re.M
)

Key = str
"""A module: its path without .py, such as "echo/protocol/lanes"."""
Definition = tuple[Key, str]


class Import(NamedTuple):
    """One name that an import statement binds."""

    module: str
    name: str | None
    local: str
    is_typing: bool = False
    comment: str = ""

    def line(self, local: str | None = None) -> str:
        """Return a statement that binds it, under another name if one is given."""
        local = local or self.local
        if self.name is None:
            plain = self.module if self.local == self.module.partition(".")[0] else None
            suffix = "" if local == (plain and self.local) else f" as {local}"
            return f"import {self.module}{'' if self.module == local else suffix}{self.comment}"
        suffix = "" if local == self.name else f" as {local}"
        return f"from {self.module} import {self.name}{suffix}{self.comment}"


class Scope:
    """What a function, class or comprehension binds."""

    def __init__(self, kind: str, parent: Scope | None) -> None:
        self.kind = kind
        self.parent = parent
        self.bound: set[str] = set()
        self.imports: dict[str, Import] = {}
        self.outer: set[str] = set()

    def find(self, name: str) -> Scope:
        """Return the scope in which a name that is used here is bound; the module's at last."""
        scope, is_here = self, True
        while scope.parent is not None:
            if name in scope.outer:
                is_here = False
            elif name in scope.bound and (is_here or scope.kind != "class"):
                return scope
            scope, is_here = scope.parent, False
        return scope

    def hides(self, name: str) -> bool:
        """Say whether a name of the module could not be used here."""
        return self.find(name).parent is not None

    def is_deferred(self) -> bool:
        """Say whether code here runs later than the module."""
        return self.kind == "function" or (self.parent is not None and self.parent.is_deferred())


@dataclass
class Ref:
    """A use of a name that the module, or an import inside a function, binds."""

    start: int
    end: int
    name: str
    scope: Scope
    owner: Scope
    """Where it is bound."""
    attribute: str = ""
    """For `module.attribute`: what is taken of the module."""
    attribute_end: int = 0
    patched: str = ""
    """For `setattr(module, "name", ...)`: the name, and where its string is."""
    patched_at: tuple[int, int] = (0, 0)
    is_annotation: bool = False


@dataclass
class Segment:
    """A statement at the top of a module, with the comments above it and the text under it."""

    kind: str  # doc, import, typing, definition, other, main
    node: ast.stmt
    names: list[str]
    start: int
    end: int


class Source:
    """A module as it is now."""

    def __init__(self, key: Key, text: str) -> None:
        self.key = key
        self.text = text
        self.tree = ast.parse(text, f"{key}.py")
        self._lines = text.splitlines(keepends=True)
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))
        self.segments = list(self._cut())
        self.module = Scope("module", None)
        self.refs: list[Ref] = []
        self.statements: list[tuple[ast.Import | ast.ImportFrom, Scope, bool]] = []
        """Import statements, with where they stand and whether they are for types only."""
        self.patch_strings: set[int] = set()
        """Where strings begin that name what is patched."""
        _Scanner(self).run()

    @property
    def stem(self) -> str:
        """What the book calls it."""
        return self.key.removeprefix("echo/")

    @cached_property
    def definitions(self) -> dict[str, Segment]:
        """The segment of each name that is defined at the top."""
        found: dict[str, Segment] = {}
        for segment in self.segments:
            if segment.kind == "definition":
                for name in segment.names:
                    found.setdefault(name, segment)
        return found

    def slice(self, segment: Segment) -> str:
        return self.text[segment.start : segment.end]

    def at(self, line: int, column: int) -> int:
        """Return the offset of a position of ast, which counts bytes."""
        text = self._lines[line - 1] if line <= len(self._lines) else ""
        if not text.isascii():
            column = len(text.encode()[:column].decode())
        return self._starts[line - 1] + column

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        start = self.at(node.lineno, node.col_offset)
        return start, self.at(node.end_lineno or node.lineno, node.end_col_offset or 0)

    def comment_after(self, node: ast.stmt) -> str:
        """Return "  # noqa..." behind a statement."""
        lines = self._lines[node.lineno - 1 : node.end_lineno]
        found = re.search(r"#\s*(noqa|type:)[^\n]*", "".join(lines))
        return f"  {found[0].rstrip()}" if found else ""

    def _cut(self) -> Iterator[Segment]:
        """Yield what stands at the top, each with all lines since the one before."""
        end = 0
        last: Segment | None = None
        for index, node in enumerate(self.tree.body):
            stop = self._starts[min(node.end_lineno or node.lineno, len(self._starts) - 1)]
            kind, names = _kind(node, is_first=index == 0)
            if kind == "text" and last is not None and last.kind == "definition":
                last.end = end = stop
                continue
            if last is not None:
                yield last
            last = Segment("other" if kind == "text" else kind, node, names, end, stop)
            end = stop
        if last is not None:
            last.end = len(self.text)
            yield last


def _kind(node: ast.stmt, *, is_first: bool) -> tuple[str, list[str]]:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return ("doc" if is_first else "text"), []
    if isinstance(node, ast.Import | ast.ImportFrom):
        return "import", []
    if isinstance(node, ast.If):
        test = ast.unparse(node.test)
        return (
            "typing" if test == TYPE_CHECKING else "main" if "__main__" in test else "other"
        ), []
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return "definition", [node.name]
    names = list(bound_names(node))
    return ("definition" if names else "other"), names


def _bound_by(node: ast.AST) -> set[str]:
    """Return what one node binds: by assignment, `except ... as name` or `case {**rest}`."""
    if isinstance(node, ast.Name):
        return set() if isinstance(node.ctx, ast.Load) else {node.id}
    if isinstance(node, ast.alias):
        return set()
    names = (getattr(node, "name", None), getattr(node, "rest", None))
    return {name for name in names if isinstance(name, str)}


class _Scanner:
    """Finds what every name of a module stands for."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._f_strings: list[ast.JoinedStr] = []

    def run(self) -> None:
        module = self._source.module
        self._bind(self._source.tree.body, module)
        self._visit_all(self._source.tree.body, module)

    # What a scope binds, without what the scopes in it bind.

    def _bind(self, nodes: Iterable[ast.AST], scope: Scope, *, is_typing: bool = False) -> None:
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                scope.bound.add(node.name)
            elif isinstance(node, COMPREHENSIONS):
                walrus = [n.target for n in ast.walk(node) if isinstance(n, ast.NamedExpr)]
                scope.bound |= {target.id for target in walrus}
            elif isinstance(node, ast.Import | ast.ImportFrom):
                for item in self._imports(node, is_typing=is_typing):
                    scope.bound.add(item.local)
                    scope.imports.setdefault(item.local, item)
                self._source.statements.append((node, scope, is_typing))
            elif isinstance(node, ast.Global | ast.Nonlocal):
                scope.outer |= set(node.names)
            elif not isinstance(node, ast.Lambda):
                scope.bound |= _bound_by(node)
                for_types = isinstance(node, ast.If) and ast.unparse(node.test) == TYPE_CHECKING
                inner = ast.iter_child_nodes(node)
                self._bind(inner, scope, is_typing=is_typing or for_types)

    def _imports(self, node: ast.Import | ast.ImportFrom, *, is_typing: bool) -> Iterator[Import]:
        comment = self._source.comment_after(node)
        for alias in node.names:
            if isinstance(node, ast.Import):
                local = alias.asname or alias.name.partition(".")[0]
                yield Import(alias.name, None, local, is_typing, comment)
            else:
                local = alias.asname or alias.name
                yield Import(node.module or "", alias.name, local, is_typing, comment)

    # What is used.

    def _visit_all(
        self, nodes: Iterable[ast.AST | None], scope: Scope, *, note: bool = False
    ) -> None:
        for node in nodes:
            if node is not None:
                self._visit(node, scope, note=note)

    def _visit(self, node: ast.AST, scope: Scope, *, note: bool = False) -> None:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                self._function(node, scope)
            case ast.ClassDef():
                self._class(node, scope)
            case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
                self._comprehension(node, scope)
            case ast.Name():
                self._name(node, scope, note=note)
            case ast.Call():
                self._call(node, scope)
            case ast.Global():
                self._global(node, scope)
            case _:
                self._visit_other(node, scope, note=note)

    def _visit_other(self, node: ast.AST, scope: Scope, *, note: bool) -> None:
        if isinstance(node, ast.AnnAssign):
            self._visit(node.annotation, scope, note=True)
            self._visit_all([node.target, node.value], scope)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if ref := self._name(node.value, scope, note=note):
                ref.attribute, ref.attribute_end = node.attr, self._source.span(node)[1]
        elif isinstance(node, ast.Constant) and note and isinstance(node.value, str):
            self._quoted(node, scope)
        elif isinstance(node, ast.JoinedStr):
            self._f_strings.append(node)
            self._visit_all(ast.iter_child_nodes(node), scope)
            self._f_strings.pop()
        else:
            is_literal = isinstance(node, ast.Subscript) and "Literal" in ast.unparse(node.value)
            self._visit_all(ast.iter_child_nodes(node), scope, note=note and not is_literal)

    def _class(self, node: ast.ClassDef, scope: Scope) -> None:
        self._visit_all([*node.decorator_list, *node.bases, *node.keywords], scope)
        inner = Scope("class", scope)
        self._bind(node.body, inner)
        self._visit_all(node.body, inner)

    def _function(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda, scope: Scope
    ) -> None:
        arguments = node.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        every += [extra for extra in (arguments.vararg, arguments.kwarg) if extra]
        self._visit_all([*arguments.defaults, *arguments.kw_defaults], scope)
        inner = Scope("function", scope)
        inner.bound = {argument.arg for argument in every}
        if isinstance(node, ast.Lambda):
            self._bind([node.body], inner)
            self._visit(node.body, inner)
            return
        self._visit_all(node.decorator_list, scope)
        self._visit_all(
            [node.returns, *(argument.annotation for argument in every)], scope, note=True
        )
        self._bind(node.body, inner)
        self._visit_all(node.body, inner)

    def _comprehension(self, node: ast.AST, scope: Scope) -> None:
        inner = Scope("comprehension", scope)
        generators: list[ast.comprehension] = node.generators  # type: ignore[attr-defined]
        for generator in generators:
            names = [n for n in ast.walk(generator.target) if isinstance(n, ast.Name)]
            inner.bound |= {name.id for name in names}
        self._visit(generators[0].iter, scope)
        for index, generator in enumerate(generators):
            self._visit_all([generator.iter] if index else [], inner)
            self._visit_all([generator.target, *generator.ifs], inner)
        parts = [getattr(node, name, None) for name in ("elt", "key", "value")]
        self._visit_all(parts, inner)

    def _name(self, node: ast.Name, scope: Scope, *, note: bool) -> Ref | None:
        owner = scope.find(node.id)
        if owner.parent is not None and node.id not in owner.imports:
            return None
        if owner.parent is None and node.id not in owner.bound:
            return None
        start, end = self._source.span(node)
        if self._source.text[start:end] != node.id:  # in an f-string, positions are not to be had
            for start, end in self._in_f_string(node.id):
                self._add(Ref(start, end, node.id, scope, owner, is_annotation=note))
            return None
        return self._add(Ref(start, end, node.id, scope, owner, is_annotation=note))

    def _add(self, ref: Ref) -> Ref | None:
        if any(other.start == ref.start for other in self._source.refs[-40:]):
            return None
        self._source.refs.append(ref)
        return ref

    def _in_f_string(self, name: str) -> Iterator[tuple[int, int]]:
        start, end = self._source.span(self._f_strings[0])
        for braces in re.finditer(r"(?<!\{)\{[^{}]*", self._source.text[start:end]):
            for found in re.finditer(rf"(?<![\w.'\"]){name}\b(?!['\"=])", braces[0]):
                at = start + braces.start() + found.start()
                yield at, at + len(name)

    def _quoted(self, node: ast.Constant, scope: Scope) -> None:
        """Take the names in an annotation that is a string."""
        start, end = self._source.span(node)
        for found in re.finditer(r"(?<![\w.])[A-Za-z_]\w*", self._source.text[start:end]):
            owner = scope.find(found[0])
            if owner.parent is None and found[0] in owner.bound:
                at = start + found.start()
                self._add(Ref(at, at + len(found[0]), found[0], scope, owner, is_annotation=True))

    def _call(self, node: ast.Call, scope: Scope) -> None:
        name = (
            node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        )
        self._visit(node.func, scope)
        for index, argument in enumerate(node.args):
            self._visit(argument, scope, note=name == "cast" and index == 0)
        self._visit_all(node.keywords, scope)
        match node.args:
            case [ast.Name() as module, ast.Constant(value=str() as value) as at, *_] if (
                name in PATCHES
            ):
                start = self._source.span(module)[0]
                for ref in self._source.refs:
                    if ref.start == start:
                        ref.patched, ref.patched_at = value, self._source.span(at)
            case [ast.Constant(value=str()) as at, *_] if name in ("setattr", "patch"):
                self._source.patch_strings.add(self._source.span(at)[0])
            case [ast.Constant(value=str() as value) as at, *_] if (
                "Type" in name or "tuple" in name
            ):
                if value in self._source.module.bound:  # T = TypeVar("T")
                    start = self._source.span(at)[0] + 1
                    ref = Ref(start, start + len(value), value, scope, self._source.module)
                    ref.is_annotation = True
                    self._add(ref)

    def _global(self, node: ast.Global, scope: Scope) -> None:
        start, end = self._source.span(node)
        for found in re.finditer(r"\w+", self._source.text[start:end]):
            if found[0] in node.names:
                at = start + found.start()
                self._add(Ref(at, at + len(found[0]), found[0], scope, self._source.module))


class Work:
    """What is left to people, by room."""

    def __init__(self) -> None:
        self.lines: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))

    def add(self, key: Key, kind: str, line: str) -> None:
        room = key.removeprefix("echo/").partition("/")[0]
        if line not in self.lines[room][kind]:
            self.lines[room][kind].append(line)

    def join(self, key: Key, kind: str, head: str, name: str) -> None:
        """Add a name to a line that begins with `head`."""
        lines = self.lines[key.removeprefix("echo/").partition("/")[0]][kind]
        for index, line in enumerate(lines):
            if line.startswith(f"{head}: "):
                lines[index] = f"{line} {name}"
                return
        lines.append(f"{head}: {name}")

    def text(self, rooms: Iterable[str] = ()) -> str:
        """Return the lists of some rooms, or of all."""
        parts = []
        for room in sorted(set(self.lines) & set(rooms) if rooms else self.lines):
            parts.append(f"\n## {room}")
            for kind, lines in sorted(self.lines[room].items()):
                parts.append(f"{kind}:")
                parts += [f"  - {line}" for line in lines]
        return "\n".join(parts)


@dataclass(frozen=True)
class Goal:
    """Where a definition is to go."""

    place: Key
    name: str
    main: Key
    """Where the rest of its file goes: next best."""
    is_told: bool = True
    """Whether the book, or the file it stands in, knows it."""


class House:
    """All modules, and what every name in them stands for."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self.files = dict(files)
        self.sources = {
            path.removesuffix(".py"): Source(path.removesuffix(".py"), text)
            for path, text in files.items()
            if path.endswith(".py") and path.startswith(TOPS) and not path.startswith(NOT_OURS)
        }
        self.keys = {dotted(key): key for key in self.sources}

    def module_of(self, item: Import) -> Key | None:
        """Return the module of ours that an import binds, if it is one."""
        if item.name is None:
            return self.keys.get(item.module) if item.local != "echo" else None
        return self.keys.get(f"{item.module}.{item.name}")

    def origin(self, item: Import) -> Definition | Key | Import:
        """Return what an import stands for, through files that only pass it on."""
        seen = set()
        while item not in seen:
            seen.add(item)
            if (module := self.module_of(item)) is not None:
                return module
            source = self.sources.get(self.keys.get(item.module, ""))
            if source is None or item.name is None:
                return item
            if item.name in source.definitions:
                return source.key, item.name
            if item.name not in source.module.imports:
                return item
            item = source.module.imports[item.name]
        return item

    def meaning(self, source: Source, ref: Ref) -> Definition | Key | Import | None:
        """Return what a use stands for: a definition, a module of ours, or something foreign."""
        if ref.owner.parent is None and ref.name in source.definitions:
            return source.key, ref.name
        item = ref.owner.imports.get(ref.name)
        return None if item is None else self.origin(item)

    def member(self, module: Key, name: str) -> Definition | Import | None:
        """Return what `module.name` is."""
        source = self.sources[module]
        if name in source.definitions:
            return module, name
        if name in source.module.imports:
            found = self.origin(source.module.imports[name])
            return found if not isinstance(found, str) else None
        return None

    @cached_property
    def uses(self) -> dict[Definition, set[tuple[Definition | Key, bool]]]:
        """What each definition of echo/ mentions, and whether it needs it to be made.

        A module that is used whole stands for itself. Other statements stand under "".
        """
        found: dict[Definition, set[tuple[Definition | Key, bool]]] = defaultdict(set)
        for source in self.sources.values():
            for segment, ref in refs_by_segment(source):
                user = (source.key, segment.names[0] if segment.names else "")
                meaning = self.meaning(source, ref)
                if isinstance(meaning, str) and ref.attribute:
                    meaning = self.member(meaning, ref.attribute) or meaning
                if meaning is not None and not isinstance(meaning, Import) and meaning != user:
                    is_now = not (ref.scope.is_deferred() or ref.is_annotation)
                    found[user].add((meaning, is_now))
        return found


def refs_by_segment(source: Source) -> Iterator[tuple[Segment, Ref]]:
    """Yield each use with the piece of the module that it stands in."""
    segments = source.segments
    starts = [segment.start for segment in segments]
    for ref in source.refs:
        segment = segments[bisect.bisect_right(starts, ref.start) - 1]
        if segment.kind not in ("import", "doc", "typing"):
            yield segment, ref


def dotted(key: Key) -> str:
    """Return the name of a module."""
    return key.removesuffix("/__init__").replace("/", ".")


def key_of(place: str) -> Key:
    """Return the module that an address stands for."""
    return place if place.startswith(OUTSIDE) else f"echo/{place}"


class Addresses:
    """The book, asked about a tree that is no longer its own."""

    def __init__(
        self, book: Book, base: Mapping[str, list[tuple[str, str, int]]], work: Work
    ) -> None:
        """Take the definitions of the book's commit: by file name, kind and length."""
        self._book = book
        self._work = work
        self._base = base
        self._kinds = {(f, n): (kind, size) for f, found in base.items() for n, kind, size in found}
        self._arrived: dict[str, list[tuple[str, str, str]]] = defaultdict(list)
        self._named: dict[str, list[tuple[str, str]]] = defaultdict(list)
        self._becoming: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
        for file, name in self._kinds:
            self._named[name].append((file, name))
            for place, new in self._targets(file, name):
                self._arrived[place].append((file, name, new))
                if new and len(self._targets(file, name)) == 1:
                    self._becoming[place, new].append((file, name))
        self.places = book.plan | set(book.deviations)

    def _targets(self, file: str, name: str) -> list[tuple[str, str]]:
        targets = self._book.targets(file, name)
        parts = [target.partition(":") for target in targets if not target.startswith("gone:")]
        return [(place, new) for place, _, new in parts]

    def origin(self, file: str, name: str) -> tuple[str, str] | None:
        """Return which definition of the book's commit stands in a file under a name today."""
        if file in self.places:
            for old, old_name, new in self._arrived[file]:
                if name in (old_name, new):
                    return old, old_name
        if (file, name) in self._kinds:
            return file, name
        if file in self.places:
            mains = [f for f in self._base if self.main(f) == file]
            for old, old_name in self._named[name]:
                if old in mains:
                    return old, old_name
        known = self._named[name]
        room = file.partition("/")[0]
        near = [one for one in known if one[0].partition("/")[0] == room]
        if len(near) == 1 or (len(known) == 1 and not name.startswith("_")):
            return (near or known)[0]
        return None

    def main(self, file: str) -> str | None:
        """Return where most of a file goes; None if all of it is gone or nobody knows it."""
        entry = self._book.entries.get(file, {})
        targets = [entry["*"]] if "*" in entry else []
        places = [t.partition(":")[0] for t in targets if not t.startswith("gone:")]
        if places:
            return places[0]
        sizes: Counter[str] = Counter()
        for name, _, size in self._base.get(file, []):
            for place, _ in self._targets(file, name)[:1]:
                sizes[place] += size
        return sizes.most_common(1)[0][0] if sizes else None

    def goals(self, house: House) -> dict[Definition, Goal]:
        """Return where every definition of echo/ should go, as far as that is mechanical."""
        found: dict[Definition, Goal] = {}
        for source in house.sources.values():
            if not source.key.startswith("echo/"):
                continue
            origins = {name: self.origin(source.stem, name) for name in source.definitions}
            rest = self._rest(source, origins)
            for name in source.definitions:
                found[source.key, name] = self._goal(source, name, origins[name], rest)
        return found

    def _rest(self, source: Source, origins: Mapping[str, tuple[str, str] | None]) -> Key:
        """Return where what is not told by name goes: with the rest of its file."""
        if source.stem in self.places and source.stem not in self._book.entries:
            return source.key
        if (main := self.main(source.stem)) is not None:
            return key_of(main)
        if source.stem in self._book.entries or source.stem in self.places:
            return source.key
        sizes: Counter[str] = Counter()
        for name, origin in origins.items():
            if origin and (targets := self._targets(*origin)):
                sizes[targets[0][0]] += len(source.slice(source.definitions[name]))
        if sizes:
            return key_of(sizes.most_common(1)[0][0])
        if source.definitions and source.stem not in ("cli/__init__",):
            self._work.add(source.key, "a file that the book does not know stays", source.stem)
        return source.key

    def _goal(self, source: Source, name: str, origin: tuple[str, str] | None, rest: Key) -> Goal:
        if origin is None:
            known = source.stem in self.places
            if not known and name not in LOGGERS:
                line = f"{source.stem}: {name} -> {rest.removeprefix('echo/')}"
                self._work.add(rest, "not in the book, goes with the rest of its file", line)
            return Goal(rest, name, rest, is_told=known)
        targets = self._targets(*origin)
        if not targets:
            reason = self._book.targets(*origin)
            self._work.join(
                rest,
                "gone by the book, and still there",
                f"{source.stem} ({', '.join(reason)})",
                name,
            )
            return Goal(rest, name, rest)
        place, new = targets[0]
        own_main = self.main(origin[0])
        main = key_of(own_main) if own_main is not None else rest
        if len(targets) > 1:
            line = f"{name} -> {' + '.join(':'.join(filter(None, t)) for t in targets)}"
            self._work.add(key_of(place), "to be divided; it is under its old name here", line)
            return Goal(key_of(place), name, main)
        if not new or new == name:
            return Goal(key_of(place), name, main)
        if not self._is_mechanical(origin, place, new):
            line = f"{name} (from {origin[0]}) becomes part of {new}"
            self._work.add(key_of(place), "to be merged by hand", f"{place}: {line}")
            twins = self._becoming[place, new]
            is_twin = all(self._kinds[twin][0] != "class" for twin in twins) and len(twins) > 1
            if is_twin and name == new:
                return Goal(main, name, main)
            return Goal(key_of(place), name, main)
        return Goal(key_of(place), new, main)

    def _is_mechanical(self, origin: tuple[str, str], place: str, new: str) -> bool:
        """Say whether a rename is one, and not the wish that two things become one."""
        kind, _ = self._kinds[origin]
        is_camel = new[0].isupper() and not new.isupper()
        if kind == "function" and is_camel:
            return False
        rivals = self._becoming[place, new]
        rivals = rivals + [(f, n) for f, n, told in self._arrived[place] if n == new and not told]
        if len(rivals) == 1:
            return True
        named = [rival for rival in rivals if rival[1] == new]
        classes = [rival for rival in rivals if self._kinds[rival][0] == "class"]
        if not classes:  # constants and functions that are one: told apart where they clash
            return True
        first = (named or sorted(classes, key=lambda rival: -self._kinds[rival][1]))[0]
        return origin == first


def same_form(house: House, definition: Definition) -> str:
    """Return what a definition is, apart from names of its own and words about it."""
    node = house.sources[definition[0]].definitions[definition[1]].node
    if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
        return ast.dump(node.value)
    return ast.dump(node)


class Places:
    """Where each definition is to stand, and what it will be called: `goals`, with what is held."""

    def __init__(
        self,
        house: House,
        goals: dict[Definition, Goal],
        book: Book,
        work: Work,
    ) -> None:
        self._house = house
        self._goals = goals
        self._book = book
        self._work = work
        self._floors = {room: n for n, rooms in enumerate(book.floors) for room in rooms}
        self._plan = {key_of(place) for place in book.plan | set(book.deviations)}
        self.level = dict.fromkeys(goals, 0)
        self._folders: set[Key] = set()

    def choose(self, rooms: set[str], files: set[str]) -> None:
        """Move these rooms and files only, or all if neither is given."""
        for definition, goal in self._goals.items():
            place, here = goal.place.removeprefix("echo/"), definition[0].removeprefix("echo/")
            is_meant = place.partition("/")[0] in rooms or place in files or here in files
            if (rooms or files) and not is_meant:
                self.level[definition] = 2
            else:
                parts = goal.place.split("/")
                self._folders |= {"/".join(parts[:n]) for n in range(2, len(parts))}

    def __call__(self, definition: Definition) -> Key:
        goal = self._goals[definition]
        return [goal.place, goal.main, self.old(definition[0])][self.level[definition]]

    def old(self, key: Key) -> Key:
        """Return where what does not move stays: a module cannot have the name of a folder."""
        return f"{key}/{key.rpartition('/')[2]}" if key in self._folders else key

    def main(self, key: Key) -> Key:
        """Return where most of a file is going to be."""
        sizes: Counter[Key] = Counter()
        source = self._house.sources[key]
        for name, segment in source.definitions.items():
            if (key, name) in self._goals:
                sizes[self((key, name))] += segment.end - segment.start
        return sizes.most_common(1)[0][0] if sizes else self.old(key)

    def settle(self) -> None:
        """Hold back what would make a circle of imports, or an import upward."""
        uses = [
            (user, used)
            for user, found in self._house.uses.items()
            if user[0].startswith("echo/")
            for used, _ in found
        ]
        touching: dict[Definition, set[int]] = defaultdict(set)
        for number, pair in enumerate(uses):
            for one in pair:
                if one in self._goals:
                    touching[one].add(number)
        while True:
            mains = {key: self.main(key) for key in self._house.sources if key.startswith("echo/")}
            edges = Counter((self._at(a, mains), self._at(b, mains)) for a, b in uses)
            if not (bad := self._bad(edges)):
                return
            found = {
                one
                for pair in uses
                if (self._at(pair[0], mains), self._at(pair[1], mains)) in bad
                for one in pair
                if one in self._goals and self.level[one] < 2
            }
            best = None
            for group in self._candidates(found):
                numbers = {number for one in group for number in touching[one]}
                trial = edges.copy()
                trial.subtract(
                    (self._at(a, mains), self._at(b, mains))
                    for a, b in map(uses.__getitem__, numbers)
                )
                before = {one: self.level[one] for one in group}
                self._hold(group)
                trial.update(
                    (self._at(a, mains), self._at(b, mains))
                    for a, b in map(uses.__getitem__, numbers)
                )
                self.level |= before
                trial = Counter({pair: count for pair, count in trial.items() if count > 0})
                cost = sum(trial[pair] for pair in self._bad(trial))
                size = sum(self._size(one) for one in group)
                if best is None or (cost, size) < best[:2]:
                    best = (cost, size, group)
            if best is None:
                return
            self._hold(best[2])

    def _at(self, one: Definition | Key, mains: Mapping[Key, Key]) -> Key:
        """Return where a definition, a module, or what else is in one, is."""
        if isinstance(one, tuple) and one in self._goals:
            return self(one)
        key = one[0] if isinstance(one, tuple) else one
        return mains.get(key, key)

    def _hold(self, group: Iterable[Definition]) -> None:
        for definition in group:
            goal = self._goals[definition]
            is_split = self.level[definition] == 0 and goal.main != goal.place
            self.level[definition] = 1 if is_split else 2

    def _size(self, definition: Definition) -> int:
        segment = self._house.sources[definition[0]].definitions[definition[1]]
        return segment.end - segment.start

    def _bad(self, edges: Mapping[tuple[Key, Key], object]) -> set[tuple[Key, Key]]:
        pairs = [pair for pair in edges if pair[0] != pair[1]]
        group = components(pairs)
        return {
            pair for pair in pairs if group[pair[0]] == group[pair[1]] or self._is_upward(*pair)
        }

    def _is_upward(self, user: Key, used: Key) -> bool:
        if used.startswith(OUTSIDE):
            return not user.startswith(OUTSIDE)
        if user not in self._plan and used not in self._plan:
            return False
        rooms = self._homes(user) | {user.split("/")[1]} & set(self._floors)
        targets = self._homes(used)
        return bool(rooms and targets) and not any(
            room == target or self._floors[room] > self._floors[target]
            for room in rooms
            for target in targets
        )

    def _homes(self, key: Key) -> set[str]:
        """Return the rooms of what is in a module; none where some of it goes."""
        stem = key.removeprefix("echo/")
        entry = self._book.entries.get(stem, {})
        if key in self._plan or not entry:
            return {stem.partition("/")[0]} & set(self._floors)
        targets = {part for name in entry for part in self._book.targets(stem, name)}
        rooms = {target.partition("/")[0] for target in targets}
        return rooms if rooms <= set(self._floors) else set()

    def _candidates(self, found: Iterable[Definition]) -> Iterator[tuple[Definition, ...]]:
        """Yield what might be held: a definition; a file's part that goes there; a file."""
        seen = set()
        for one in sorted(found):
            goal = self._goals[one]
            together = [
                other
                for other, its in self._goals.items()
                if other[0] == one[0] and self.level[other] < 2 and its.place == goal.place
            ]
            whole = [o for o in self._goals if o[0] == one[0] and self.level[o] < 2]
            for group in ([one], together, whole):
                if group and (key := tuple(sorted(group))) not in seen:
                    seen.add(key)
                    yield key

    def list_held(self, chosen: Mapping[Definition, int]) -> None:
        """Write down what did not go where the book says."""
        held: dict[tuple[Key, Key, Key], list[str]] = defaultdict(list)
        for definition, level in self.level.items():
            goal = self._goals[definition]
            if level > chosen[definition] and self(definition) != goal.place:
                held[definition[0], self(definition), goal.place].append(definition[1])
        for (source, place, goal_place), names in sorted(held.items()):
            here, there = place.removeprefix("echo/"), goal_place.removeprefix("echo/")
            line = f"{source[5:]}: {' '.join(names)} in {here}, not {there}"
            self._work.add(goal_place, "held back: it would make a circle or point upward", line)


def components(edges: Iterable[tuple[Key, Key]]) -> dict[Key, int]:
    """Return for each node the number of its strongly connected component (Tarjan)."""
    graph: dict[Key, list[Key]] = defaultdict(list)
    for one, other in edges:
        graph[one].append(other)
        graph[other]
    index: dict[Key, int] = {}
    low: dict[Key, int] = {}
    stack: list[Key] = []
    found: dict[Key, int] = {}

    def visit(node: Key) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph[node]:
            if other not in index:
                visit(other)
            if other not in found:
                low[node] = min(low[node], low[other])
        while low[node] == index[node] and node not in found:
            found[stack.pop()] = index[node]

    sys.setrecursionlimit(10_000)
    for node in list(graph):
        if node not in index:
            visit(node)
    return found


# --- What everything is called when it has moved ---


class Names:
    """The module and the name that each definition has in the end."""

    def __init__(
        self, house: House, goals: Mapping[Definition, Goal], places: Places, work: Work
    ) -> None:
        self._house = house
        self._work = work
        self._places = places
        self.final: dict[Definition, Definition] = {
            one: (places(one), goal.name if places.level[one] == 0 else one[1])
            for one, goal in goals.items()
        }
        self._keep_apart()
        self._avoid_locals()
        self.mains = {
            key: self._main(source) if key.startswith("echo/") else key
            for key, source in house.sources.items()
        }
        known = Counter(name for _, name in self.final)
        self._renamed = {
            name: new for (_, name), (_, new) in self.final.items() if known[name] == 1
        }

    def _main(self, source: Source) -> Key:
        return self._places.main(source.key)

    def of(self, definition: Definition) -> Definition:
        """Return where a definition stands and what it is called; tests stay as they are."""
        return self.final.get(definition, definition)

    def renamed(self, name: str) -> str | None:
        """Return the new name of what has this name nowhere but in one place."""
        new = self._renamed.get(name, name)
        is_word = name.islower() and "_" not in name
        return None if new == name or is_word else new

    def _keep_apart(self) -> None:
        """Let no two definitions of one module have one name, unless they are the same."""
        by_name: dict[Definition, list[Definition]] = defaultdict(list)
        for definition, final in self.final.items():
            by_name[final].append(definition)
        for (place, name), rivals in by_name.items():
            if len(rivals) < 2:
                continue
            sources = self._house.sources
            order = sorted(rivals, key=lambda r: (r[0] != place, -len(sources[r[0]].text)))
            kept = same_form(self._house, order[0])
            for rival in order[1:]:
                if same_form(self._house, rival) != kept:
                    self.final[rival] = place, told_apart(name, rival[0].rpartition("/")[2])
                    line = f"{place[5:]}: {name} of {rival[0][5:]} is {self.final[rival][1]}"
                    self._work.add(place, "two things under one name", line)

    def _avoid_locals(self) -> None:
        """Take a rename back where a local variable has the new name in the same module."""
        for source in self._house.sources.values():
            for segment, ref in refs_by_segment(source):
                meaning = self._house.meaning(source, ref)
                if not isinstance(meaning, tuple) or isinstance(meaning, Import):
                    continue
                place, new = self.of(meaning)
                user = (source.key, segment.names[0] if segment.names else "")
                is_same = self.of(user)[0] == place
                if new != ref.name and is_same and ref.scope.hides(new):
                    self.final[meaning] = place, meaning[1]
                    line = f"{place[5:]}: {meaning[1]} is not {new}, a variable of {source.key}"
                    self._work.add(place, "not renamed", line)

    def place_to_patch(self, module: Key, name: str) -> Definition:
        """Return where `module.name` is looked up by those who were in that module."""
        member = self._house.member(module, name)
        source = self._house.sources[module]
        found: Counter[Key] = Counter()
        for segment, ref in refs_by_segment(source):
            if ref.name == name and ref.owner.parent is None:
                user = (module, segment.names[0] if segment.names else "")
                if user != member:
                    found[self.final[user][0] if user in self.final else self.mains[module]] += 1
        new = member[1] if isinstance(member, tuple) and not isinstance(member, Import) else name
        place = self.mains[module]
        if isinstance(member, tuple) and not isinstance(member, Import):
            home, new = self.of(member)
            place = home if member[0] == module else place
        if found:
            place = found.most_common(1)[0][0]
        if len(found) > 1:
            line = f"{module[5:]}.{name}: used by {' '.join(k[5:] for k in found)}"
            self._work.add(place, "patched in one place of several", line)
        return place, new

    # Names, modules and paths in prose and strings.

    def dotted(self, text: str, *, is_patch: bool = False) -> str:
        """Return echo.a.b, echo.a.b.Name or echo.a.b:name as it is called now."""
        parts = text.replace(":", ".").split(".")
        for length in range(len(parts), 1, -1):
            key = self._house.keys.get(".".join(parts[:length]))
            if key is None or key.endswith("__init__"):
                continue
            rest, place = parts[length:], self.mains[key]
            if rest:
                member = self._house.member(key, rest[0])
                if is_patch:
                    place, rest[0] = self.place_to_patch(key, rest[0])
                elif isinstance(member, tuple) and not isinstance(member, Import):
                    place, rest[0] = self.of(member)
            colon = ":" if ":" in text else "."
            return dotted(place) + (colon + ".".join(rest) if rest else "")
        return text

    def path(self, folder: str, prefix: str, path: str) -> str | None:
        """Return a path of echo/ as it is now, None if it is none or has not changed."""
        direct = f"echo/{path}"
        near = f"{folder}/{path}"
        key = direct if prefix or "/" in path else near
        if key not in self._house.sources or self.mains.get(key, key) == key:
            return None
        if not prefix and "/" not in path and not key.startswith("echo/"):
            return None
        return (prefix or "") + self.mains[key].removeprefix("echo/") + ".py"

    def in_script(self, found: re.Match[str]) -> str:
        """Return a from-import of a program in a string."""
        lines: dict[str, list[str]] = defaultdict(list)
        key = self._house.keys.get(found["module"])
        for part in found["names"].split(","):
            name, _, local = part.strip().partition(" as ")
            whole = self._house.keys.get(f"{found['module']}.{name}")
            if whole is not None:
                package, _, stem = dotted(self.mains[whole]).rpartition(".")
                lines[package].append(_as(stem, local or name))
            elif key is not None and isinstance(d := self._house.member(key, name), tuple):
                place, new = self.of(d) if not isinstance(d, Import) else (key, name)
                lines[dotted(place)].append(_as(new, local or name))
            else:
                return found[0]
        return "\n".join(
            f"{found['indent']}from {module} import {', '.join(names)}"
            for module, names in lines.items()
        )


def _wrapped(paragraph: str) -> list[str]:
    """Return the lines of a paragraph, filled anew if one is too long for a comment."""
    lines = paragraph.strip("\n").splitlines()
    if all(len(line) <= 98 for line in lines):
        return lines
    starts = [0, *(i for i, line in enumerate(lines) if i and line.lstrip()[:2] in ("* ", "- "))]
    if len(starts) > 1:
        ends = [*starts[1:], len(lines)]
        parts = ["\n".join(lines[a:b]) for a, b in zip(starts, ends, strict=True)]
        return [line for part in parts for line in _wrapped(part)]
    first, *others = lines
    indent = first[: len(first) - len(first.lstrip())]
    hanging = others[0][: len(others[0]) - len(others[0].lstrip())] if others else indent
    return textwrap.wrap(
        " ".join(" ".join(lines).split()), 98, initial_indent=indent, subsequent_indent=hanging
    )


def _as(name: str, local: str) -> str:
    return name if name == local else f"{name} as {local}"


def told_apart(name: str, stem: str) -> str:
    """Return a name with the name of its file, in the manner of the name."""
    if name.isupper():
        return f"{name}_{stem.upper()}"
    if name.lstrip("_")[0].isupper():
        return name + "".join(word.capitalize() for word in stem.split("_"))
    return f"{name}_{stem}"


# --- Writing ---

Thing = tuple[str, str, str]
"""What an import brings: ("name", key, name), ("module", key, ""), ("foreign", module, name)."""


@dataclass
class Edits:
    """Replacements in one source."""

    source: Source
    found: list[tuple[int, int, str]] = field(default_factory=list)

    def put(self, start: int, end: int, text: str) -> None:
        if self.source.text[start:end] != text:
            self.found.append((start, end, text))

    def text(self, start: int, end: int) -> str:
        """Return a slice of the source with all replaced; the first edit of a place holds."""
        out, at = [], start
        for one, other, text in sorted(self.found, key=lambda edit: edit[:2]):
            if at <= one and other <= end:
                out += [self.source.text[at:one], text]
                at = other
        return "".join([*out, self.source.text[at:end]])


class Binder:
    """What the names of one module, or of one function that imports, are called from now on."""

    def __init__(self, key: Key, taken: Mapping[str, Thing]) -> None:
        self.key = key
        self.taken = dict(taken)
        self.local: dict[Thing, str] = {}
        self.imports: dict[Thing, Import | None] = {}
        self.is_typing: dict[Thing, bool] = {}

    def bind(self, thing: Thing, wishes: list[str], refs: list[Ref], *, is_typing: bool) -> str:
        """Return the local name of a thing: the first wish that nothing hides."""
        if thing in self.local:
            self.is_typing[thing] = self.is_typing[thing] and is_typing
            return self.local[thing]
        stem = thing[1].rpartition("/")[2].rpartition(".")[2]
        for wish in [*wishes, told_apart(wishes[0], stem), f"{stem}_{wishes[0]}"]:
            is_free = self.taken.get(wish, thing) == thing
            if is_free and not any(ref.name != wish and ref.scope.hides(wish) for ref in refs):
                break
        self.taken[wish] = thing
        self.local[thing] = wish
        self.is_typing[thing] = is_typing
        return wish


class Writer:
    """Composes every module anew out of the parts that go there."""

    def __init__(self, house: House, names: Names, work: Work) -> None:
        self._house = house
        self._names = names
        self._work = work
        self.parts: dict[Key, dict[Key, list[Segment]]] = defaultdict(lambda: defaultdict(list))
        for source in house.sources.values():
            for segment in source.segments:
                if segment.kind not in ("import", "typing", "doc"):
                    self.parts[self._goes(source, segment)][source.key].append(segment)
        self.is_still = {key: self._stands(key) for key in house.sources}

    def _goes(self, source: Source, segment: Segment) -> Key:
        if segment.kind == "definition":
            return self._names.of((source.key, segment.names[0]))[0]
        return self._names.mains[source.key]

    def _stands(self, key: Key) -> bool:
        """Say whether a module keeps all that it has and gets nothing."""
        source = self._house.sources[key]
        mine = [s for s in source.segments if s.kind not in ("import", "typing", "doc")]
        if not mine:
            return key not in self.parts and self._names.mains[key] == key
        return self.parts.get(key, {}) == {key: mine}

    def files(self) -> dict[Key, str]:
        """Return the text of every module of the new house."""
        texts = {k: self._in_place(self._house.sources[k]) for k, s in self.is_still.items() if s}
        for key in self.parts:
            if not self.is_still.get(key):
                texts[key] = self._compose(key)
        return texts

    def main_source(self, key: Key) -> Key:
        """Return the source that most of a module comes from."""
        sizes = {k: sum(s.end - s.start for s in found) for k, found in self.parts[key].items()}
        return max(sizes, key=lambda k: (self._names.mains[k] == key, k == key, sizes[k], k))

    # A module that stays: its import statements and the names in it change.

    def _in_place(self, source: Source) -> str:
        edits = Edits(source)
        own: dict[str, Thing] = {
            name: ("name", source.key, self._names.of((source.key, name))[1])
            for name in source.definitions
        }
        self._rewrite(source, edits, source.refs, {id(source.module): None}, own)
        self._mentions(source, edits)
        return edits.text(0, len(source.text))

    def _compose(self, key: Key) -> str:
        parts = self.parts[key]
        order = self._order(key)
        main = self.main_source(key)
        taken: dict[str, Thing] = {}
        for part, segments in parts.items():
            for segment in segments:
                for name in segment.names:
                    new = self._names.of((part, name))[1]
                    taken[new] = ("name", key, new)
        binder = Binder(key, taken)
        refs = {
            part: [ref for segment, ref in refs_by_segment(self._house.sources[part])
                   if segment in parts[part]]
            for part in order
        }  # fmt: skip
        self._bind_all(binder, refs)
        body: list[str] = []
        last: list[str] = []
        standing: set[str] = set()
        for part in order:
            source = self._house.sources[part]
            edits = Edits(source)
            self._rewrite(source, edits, refs[part], {id(source.module): binder}, {})
            self._mentions(source, edits, key)
            if part != main and len(order) > 1:
                body.append(self._heading(source, edits, key))
            for segment in parts[part]:
                new = {self._names.of((part, name))[1] for name in segment.names}
                if segment.kind == "definition" and new <= standing:
                    continue
                standing |= new
                text = edits.text(segment.start, segment.end)
                if "__file__" in text:
                    text = self._deeper(text, part, key)
                (body if segment.kind != "main" else last).append(text)
        self._list_heavy(key)
        head = self._docstring(key, main)
        if any(FUTURE in self._house.sources[part].text for part in order):
            head += f"\n{FUTURE}\n"
        return head + "\n" + self._import_block(binder) + "\n" + "".join(body + last)

    def _list_heavy(self, key: Key) -> None:
        """Write down what some parts of a module load while imported, and the others do not."""
        loaded = {
            part: {
                item.module.partition(".")[0]
                for item in self._house.sources[part].module.imports.values()
                if not item.is_typing
            }
            for part in self.parts[key]
        }
        for package in HEAVY & set().union(*loaded.values()):
            if who := [part for part in loaded if package not in loaded[part]]:
                line = f"{key}: {package}, which {' '.join(p[5:] for p in who)} did not need"
                self._work.add(key, "loads more than its parts did", line)

    def _docstring(self, key: Key, main: Key) -> str:
        source = self._house.sources[main]
        for segment in source.segments:
            if segment.kind == "doc" and key in (self._names.mains[main], main):
                edits = Edits(source)
                self._mentions(source, edits, key)
                return edits.text(segment.start, segment.end)
        self._work.add(key, "without a docstring of its own", key)
        return f'"""Parts of {", ".join(part[5:] for part in self.parts[key])}."""\n'

    def _heading(self, source: Source, edits: Edits, key: Key) -> str:
        text = ""
        for segment in source.segments:
            if segment.kind == "doc" and self._names.mains[source.key] == key:
                text = edits.text(segment.start, segment.end).strip().strip('"').rstrip()
        if not text:
            return "\n\n\n"
        title, _, rest = text.partition("\n\n")
        title = " ".join(title.split()).removesuffix(".")
        out = [f"# --- {title} ---"] if len(title) < 90 else [f"# {one}" for one in _wrapped(title)]
        for paragraph in rest.split("\n\n") if rest.strip() else []:
            out += ["#", *(f"# {one}".rstrip() for one in _wrapped(paragraph))]
        return "\n\n\n" + "\n".join(out) + "\n\n"

    def _deeper(self, text: str, part: Key, key: Key) -> str:
        more = key.count("/") - part.count("/")
        self._work.add(key, "look at __file__", f"{key} (from {part})")
        if not more:
            return text
        text = re.sub(
            r"(__file__\).*?\.parents\[)(\d+)", lambda m: f"{m[1]}{int(m[2]) + more}", text
        )
        return re.sub(r"(__file__\)(?:\.resolve\(\))?)\.parent\b", rf"\1.parents[{more}]", text)

    def _order(self, key: Key) -> list[Key]:
        """Return the sources of a module so that each can be executed after those before it."""
        parts = self.parts[key]
        hard: dict[Key, set[Key]] = defaultdict(set)
        soft: dict[Key, set[Key]] = defaultdict(set)
        for part, segments in parts.items():
            for segment in segments:
                for name in segment.names or [""]:
                    for used, is_now in self._house.uses.get((part, name), ()):
                        other = used[0] if isinstance(used, tuple) else used
                        at_home = not isinstance(used, tuple) or self._names.of(used)[0] == key
                        if other != part and other in parts and at_home:
                            (hard if is_now else soft)[part].add(other)
        main = self.main_source(key)
        order: list[Key] = []
        rest = sorted(parts, key=lambda part: (part != main, part))
        while rest:
            done = set(order)
            ready = [p for p in rest if hard[p] <= done and soft[p] <= done]
            ready = ready or [p for p in rest if hard[p] <= done]
            if not ready:
                self._work.add(key, "cannot be ordered", f"{key}: {' '.join(rest)}")
                ready = rest
            order.append(ready[0])
            rest.remove(ready[0])
        return order

    def _import_block(self, binder: Binder) -> str:
        typing, lines = [], []
        for thing, local in binder.local.items():
            kind, module, name = thing
            if kind == "name":
                line = f"from {dotted(module)} import {_as(name, local)}"
            elif kind == "module":
                package, _, stem = dotted(module).rpartition(".")
                line = f"from {package} import {_as(stem, local)}"
            else:
                line = (binder.imports[thing] or Import(module, name, local)).line(local)
            (typing if binder.is_typing[thing] else lines).append(line)
        if typing and "from typing import TYPE_CHECKING" not in lines:
            lines.append("from typing import TYPE_CHECKING")
        text = "".join(f"{line}\n" for line in sorted(lines))
        if typing:
            text += "\nif TYPE_CHECKING:\n" + "".join(f"    {line}\n" for line in sorted(typing))
        return text

    # What a use becomes.

    def _bind_all(self, binder: Binder, refs: Mapping[Key, list[Ref]]) -> None:
        """Choose the local name of everything that the parts of a module use."""
        by_thing: dict[Thing, list[tuple[Ref, list[str], Import | None]]] = defaultdict(list)
        modules: dict[Key, list[tuple[Source, Ref, Import]]] = defaultdict(list)
        for part, found in refs.items():
            source = self._house.sources[part]
            for ref in found:
                if ref.owner.parent is not None:
                    continue
                meaning = self._house.meaning(source, ref)
                item = source.module.imports.get(ref.name)
                if isinstance(meaning, str) and item is not None:
                    modules[meaning].append((source, ref, item))
                elif isinstance(meaning, Import):
                    thing = ("foreign", meaning.module, meaning.name or "")
                    by_thing[thing].append(
                        (
                            ref,
                            [meaning.local],
                            meaning._replace(is_typing=item.is_typing if item else False),
                        )
                    )
                elif meaning is not None:
                    place, new = self._names.of(meaning)
                    if place != binder.key:
                        alias = item is not None and item.local != item.name
                        wishes = [ref.name, new] if alias else [new, ref.name]
                        by_thing["name", place, new].append((ref, wishes, item))
        for thing, uses in by_thing.items():
            is_typing = all(item is not None and item.is_typing for _, _, item in uses)
            only = [ref for ref, _, _ in uses]
            local = binder.bind(thing, uses[0][1], only, is_typing=is_typing)
            binder.imports[thing] = uses[0][2]
            self._list_alias(binder.key, thing, local)
        for module, found in modules.items():
            self._bind_module(binder, module, [(ref, item) for _, ref, item in found])

    def _list_alias(self, key: Key, thing: Thing, local: str) -> None:
        if thing[0] == "name" and local != thing[2]:
            line = f"{key}: {thing[2]} of {dotted(thing[1])} is {local} here"
            self._work.add(key, "imported under another name", line)

    def _needs(self, module: Key, ref: Ref) -> tuple[Key, Definition | None]:
        """Return which module `module.x` or setattr(module, "x") needs, and which definition."""
        if ref.patched:
            return self._names.place_to_patch(module, ref.patched)[0], None
        member = self._house.member(module, ref.attribute) if ref.attribute else None
        if isinstance(member, tuple) and not isinstance(member, Import):
            final = self._names.of(member)
            return final[0], final
        if not ref.attribute:
            line = f"{ref.name} (was {module[5:]})"
            self._work.add(self._names.mains[module], "a module used whole", line)
        return self._names.mains[module], None

    def _bind_module(self, binder: Binder, module: Key, found: list[tuple[Ref, Import]]) -> None:
        needs = [(ref, item, *self._needs(module, ref)) for ref, item in found]
        places = {place for _, _, place, _ in needs}
        for ref, item, place, final in needs:
            others = [r for r, _, p, _ in needs if p == place]
            if place == binder.key and final is not None:
                continue
            if len(places) > 1 and final is not None:
                same = [r for r, _, p, f in needs if f == final]
                binder.bind(("name", *final), [final[1]], same, is_typing=item.is_typing)
                continue
            stem = place.rpartition("/")[2]
            wishes = [stem, ref.name, f"{stem}_module"]
            if item.local != (item.name or "") or place == module:
                wishes.insert(0, ref.name)
            binder.bind(("module", place, ""), wishes, others, is_typing=item.is_typing)

    def _rewrite(
        self,
        source: Source,
        edits: Edits,
        refs: list[Ref],
        binders: dict[int, Binder | None],
        own: Mapping[str, Thing],
    ) -> None:
        """Replace uses, and import statements, by what they are called now."""
        module_binder = binders[id(source.module)]
        key = module_binder.key if module_binder else source.key
        inside: dict[int, list[Ref]] = defaultdict(list)
        for ref in refs:
            inside[id(ref.owner)].append(ref)
        for node, scope, _ in source.statements:
            if scope is source.module and module_binder is not None:
                continue
            if id(scope) not in binders or binders[id(scope)] is None:
                taken = own if scope is source.module else {}
                binders[id(scope)] = self._bind_scope(source, scope, inside[id(scope)], key, taken)
            binder = binders[id(scope)]
            if binder is not None:
                self._statement(source, edits, node, binder, scope)
        for segment in source.segments:
            for name in segment.names:
                self._name_of(source, edits, segment, name)
        for ref in refs:
            self._use(source, edits, ref, key, binders.get(id(ref.owner)))

    def _bind_scope(
        self, source: Source, scope: Scope, refs: list[Ref], key: Key, own: Mapping[str, Thing]
    ) -> Binder:
        """Choose the local names of what the statements of one scope import."""
        taken: dict[str, Thing] = {
            name: ("foreign", name, "bound here") for name in scope.bound - set(scope.imports)
        }
        taken |= {thing[2]: thing for thing in own.values()}
        binder = Binder(key, taken)
        modules = {}
        for local, item in scope.imports.items():
            meaning = self._house.origin(item)
            uses = [ref for ref in refs if ref.name == local]
            if isinstance(meaning, str):
                modules[meaning] = [(ref, item) for ref in uses] or [(_no_ref(item, scope), item)]
            elif isinstance(meaning, Import):
                binder.taken[local] = ("foreign", meaning.module, meaning.name or "")
            else:
                place, new = self._names.of(meaning)
                if place == key:
                    continue
                is_alias = item.local != item.name
                wishes = [new] if item.local == item.name else [item.local]
                thing = ("name", place, new)
                name = binder.bind(thing, [*wishes, local], uses, is_typing=item.is_typing)
                if not is_alias:
                    self._list_alias(source.key, thing, name)
        for module, found in modules.items():
            self._bind_module(binder, module, found)
        return binder

    def _statement(
        self,
        source: Source,
        edits: Edits,
        node: ast.Import | ast.ImportFrom,
        binder: Binder,
        scope: Scope,
    ) -> None:
        """Write an import statement anew, as several if need be, if anything of it has moved."""
        lines: dict[str, list[str]] = defaultdict(list)
        is_changed = False
        for alias in node.names:
            item = scope.imports.get(alias.asname or alias.name)
            if item is None or not isinstance(node, ast.ImportFrom):
                return
            meaning = self._house.origin(item)
            here = dotted(self._house.keys.get(item.module, item.module))
            as_before = [(here, ast.unparse(alias))]
            if isinstance(meaning, str):
                found = self._module_names(source, meaning, item, binder, scope)
            elif isinstance(meaning, Import):
                found = as_before
            else:
                place, new = self._names.of(meaning)
                text = _as(new, binder.local.get(("name", place, new), new))
                text = f"{new} as {new}" if alias.asname == alias.name else text
                found = [(dotted(place), text)] if place != binder.key else []
            is_changed |= found != as_before
            for module, name in found:
                if name not in lines[module]:
                    lines[module].append(name)
        if is_changed:
            start, end = source.span(node)
            comment = source.comment_after(node)
            text = ("\n" + " " * node.col_offset).join(
                f"from {m} import {', '.join(n)}{comment}" for m, n in lines.items() if n
            )
            edits.put(start, end, text or ("pass" if self._is_alone(source, node) else ""))

    def _module_names(
        self, source: Source, module: Key, item: Import, binder: Binder, scope: Scope
    ) -> list[tuple[str, str]]:
        """Return (module, name) of what stands for an imported module from now on."""
        found: list[tuple[str, str]] = []
        refs = [ref for ref in source.refs if ref.owner is scope and ref.name == item.local]
        for ref in refs or [_no_ref(item, scope)]:
            place, final = self._needs(module, ref)
            thing: Thing = ("module", place, "")
            if final is not None and ("name", *final) in binder.local:
                thing = ("name", *final)
            if thing in binder.local:
                package, _, stem = dotted(place).rpartition(".")
                where, name = (dotted(place), thing[2]) if thing[0] == "name" else (package, stem)
                if (pair := (where, _as(name, binder.local[thing]))) not in found:
                    found.append(pair)
        return found

    def _is_alone(self, source: Source, node: ast.stmt) -> bool:
        for parent in ast.walk(source.tree):
            for body in (getattr(parent, name, None) for name in ("body", "orelse", "finalbody")):
                if isinstance(body, list) and node in body:
                    return len(body) == 1
        return False

    def _name_of(self, source: Source, edits: Edits, segment: Segment, name: str) -> None:
        """Rename a class or function where it is defined."""
        new = self._names.of((source.key, name))[1]
        node = segment.node
        if new != name and isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            start = source.at(node.lineno, node.col_offset)
            found = re.compile(rf"(?:class|def)\s+({name})\b").search(source.text, start)
            if found:
                edits.put(*found.span(1), new)

    def _use(self, source: Source, edits: Edits, ref: Ref, key: Key, binder: Binder | None) -> None:
        meaning = self._house.meaning(source, ref)
        if meaning is None:
            return
        if isinstance(meaning, str):
            self._use_of_module(edits, ref, meaning, key, binder)
        elif isinstance(meaning, Import):
            thing = ("foreign", meaning.module, meaning.name or "")
            if binder is not None and thing in binder.local:
                edits.put(ref.start, ref.end, binder.local[thing])
        else:
            place, new = self._names.of(meaning)
            local = binder.local.get(("name", place, new)) if binder is not None else None
            if local is None and (place == key or ref.owner.parent is None):
                local = new if place == key else ref.name
            edits.put(ref.start, ref.end, local or ref.name)

    def _use_of_module(
        self, edits: Edits, ref: Ref, module: Key, key: Key, binder: Binder | None
    ) -> None:
        if binder is None:
            return
        place, final = self._needs(module, ref)
        if ref.patched:
            new = self._names.place_to_patch(module, ref.patched)[1]
            start, end = ref.patched_at
            edits.put(start, end, edits.source.text[start:end].replace(ref.patched, new))
        if final is not None and (place == key or ("name", *final) in binder.local):
            name = final[1] if place == key else binder.local["name", *final]
            edits.put(ref.start, ref.attribute_end, name)
            return
        if ("module", place, "") in binder.local:
            edits.put(ref.start, ref.end, binder.local["module", place, ""])
        if final is not None:
            edits.put(ref.attribute_end - len(ref.attribute), ref.attribute_end, final[1])

    # Prose.

    def _mentions(self, source: Source, edits: Edits, key: Key | None = None) -> None:
        taken = sorted((start, end) for start, end, _ in edits.found)
        for start, end, text, is_prose in _words(source):
            if any(one < end and start < other for one, other in taken):
                continue
            new = self.prose(
                text, source, is_prose=is_prose, is_patch=start in source.patch_strings
            )
            edits.put(start, end, new)

    def prose(
        self, text: str, source: Source | None, *, is_prose: bool, is_patch: bool = False
    ) -> str:
        """Return a text with modules, paths and `Names` as they are called now."""
        names = self._names
        text = FROM.sub(names.in_script, text)

        def renamed(found: re.Match[str]) -> str:
            old, new = found[2], None
            if source is not None and old in source.definitions:
                new = names.of((source.key, old))[1]
            elif source is not None and old in source.module.imports:
                meaning = self._house.origin(source.module.imports[old])
                is_ours = isinstance(meaning, tuple) and not isinstance(meaning, Import)
                new = names.of(meaning)[1] if is_ours else None
            else:
                new = names.renamed(old)
            return f"{found[1]}{new or old}{found[3]}"

        folder = source.key.rpartition("/")[0] if source is not None else ""
        text = PATH.sub(lambda m: names.path(folder, m[1] or "", m[2]) or m[0], text)
        text = DOTTED.sub(lambda m: names.dotted(m[0], is_patch=is_patch), text)
        return QUOTED.sub(renamed, text) if is_prose else text


def _no_ref(item: Import, scope: Scope) -> Ref:
    return Ref(-1, -1, item.local, scope, scope)


def _words(source: Source) -> Iterator[tuple[int, int, str, bool]]:
    """Yield comments and strings, with whether they are prose."""
    starts = {
        source.span(node.value)[0]
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            start = source._starts[token.start[0] - 1] + token.start[1]
            end = start + len(token.string)
            is_prose = token.type == tokenize.COMMENT or start in starts
            yield start, end, token.string, is_prose


# --- Carrying it out ---


def base_of(tree: Tree) -> dict[str, list[tuple[str, str, int]]]:
    """Return name, kind and length of every definition of the book's commit, by file."""
    found: dict[str, list[tuple[str, str, int]]] = {}
    for path, module in tree.modules.items():
        names = found.setdefault(path.removeprefix("echo/").removesuffix(".py"), [])
        for node in module.body:
            size = (node.end_lineno or node.lineno) - node.lineno + 1
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                kind = "class" if isinstance(node, ast.ClassDef) else "function"
                names.append((node.name, kind, size))
            else:
                names += [(name, "constant", size) for name in bound_names(node)]
    return found


@dataclass
class Result:
    """The house as it is after the move."""

    texts: dict[str, str]
    """Every file that is new or has changed, by path."""
    gone: list[str]
    moved: dict[str, str]
    """Old path -> new path, where history can follow."""
    work: Work
    came: dict[Key, list[Key]]


def move(
    files: Mapping[str, str],
    book: Book,
    base: Mapping[str, list[tuple[str, str, int]]],
    rooms: Iterable[str] = (),
    only: Iterable[str] = (),
) -> Result:
    """Carry out the book, or some rooms or files of it, on these files (path -> text)."""
    work = Work()
    house = House(files)
    addresses = Addresses(book, base, work)
    goals = addresses.goals(house)
    places = Places(house, goals, book, work)
    places.choose(set(rooms), set(only))
    chosen = dict(places.level)
    places.settle()
    places.list_held(chosen)
    names = Names(house, goals, places, work)
    writer = Writer(house, names, work)
    modules = writer.files()
    texts = {f"{key}.py": text for key, text in modules.items()}
    for path, text in files.items():
        if not path.endswith(".py") and not path.startswith(NOT_OURS):
            texts[path] = writer.prose(text, None, is_prose=path != "CHANGELOG.md")
    gone = {f"{key}.py" for key in house.sources} - set(texts)
    folders = {str(Path(path).parent) for path in texts if path.startswith("echo/")}
    for folder in folders:
        texts.setdefault(f"{folder}/__init__.py", "")
    live = {str(Path(p).parent) for p in texts if p.startswith("echo/") and "__init__" not in p}
    for path in [p for p in texts if p.endswith("/__init__.py") and p.startswith("echo/")]:
        folder = str(Path(path).parent)
        if not texts[path] and not any(
            one == folder or one.startswith(f"{folder}/") for one in live
        ):
            gone.add(path)
            del texts[path]
    moved = {}
    for key in writer.parts:
        main = f"{writer.main_source(key)}.py"
        if main in gone and f"{key}.py" not in files:
            moved[main] = f"{key}.py"
    changed = {path: text for path, text in texts.items() if files.get(path) != text}
    came = {k: list(found) for k, found in writer.parts.items() if not writer.is_still.get(k)}
    return Result(changed, sorted(gone & set(files)), moved, work, came)


def tracked(repository: Path) -> dict[str, str]:
    """Return every text file of the working tree that git knows or might."""
    command = ["git", "-C", str(repository), "ls-files", "-co", "--exclude-standard"]
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    files = {}
    for path in done.stdout.splitlines():
        file = repository / path
        if file.is_symlink() or not file.is_file() or path.startswith(NOT_OURS):
            continue
        try:
            files[path] = file.read_text()
        except UnicodeDecodeError:
            continue
    return files


def write(result: Result, repository: Path) -> None:
    """Write a result; files that only moved are moved by git."""

    def git(*arguments: str) -> None:
        subprocess.run(["git", "-C", str(repository), *arguments], check=True)

    for old, new in result.moved.items():
        (repository / new).parent.mkdir(parents=True, exist_ok=True)
        git("mv", old, new)
    for path in result.gone:
        if path not in result.moved:
            git("rm", "-q", "-f", path)
    for path, text in result.texts.items():
        (repository / path).parent.mkdir(parents=True, exist_ok=True)
        (repository / path).write_text(text)
    git("add", *result.texts)
    paths = [path for path in result.texts if path.endswith(".py")]
    for arguments in (["check", "--fix", "-q"], ["format", "-q"]):
        subprocess.run(
            [sys.executable, "-m", "ruff", *arguments, *paths], cwd=repository, check=False
        )
    git("add", *result.texts)


def main() -> int:
    """Carry out the book and print what is left to people."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--room", nargs="+", default=[], help="rooms of the new house")
    parser.add_argument("--only", nargs="+", default=[], metavar="FILE", help="such as wire/codec")
    parser.add_argument("--dry-run", action="store_true", help="write nothing")
    arguments = parser.parse_args()
    book = read_book()
    result = move(
        tracked(REPOSITORY), book, base_of(tree_at(book.base)), arguments.room, arguments.only
    )
    if not arguments.dry_run:
        write(result, REPOSITORY)
    for key, parts in sorted(result.came.items()):
        print(f"{key}: {' '.join(part.removeprefix('echo/') for part in parts)}")
    print(f"{len(result.texts)} files written, {len(result.gone)} gone, {len(result.moved)} moved")
    print(result.work.text(arguments.room))
    return 0


if __name__ == "__main__":
    sys.exit(main())
