"""Settings before they are checked: flattened to paths, with their sources.

A layer is one file or one `--set`. Later layers win, key by key. Of a table of the user's own keys
`--set task.options.digits=3` sets one and leaves the others; `--set task.options={digits=3}` sets
the table: the keys that it had before are gone.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from echo.config.leaves import KeyPath, every_leaf, find_leaf, sections
from echo.core.errors import nearest

OVERRIDE = "--set"
"""The source of settings from the command line."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One value and who set it."""

    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong, found at the first of `paths` and caused by all of them."""

    paths: tuple[KeyPath, ...]
    text: str
    setting: Setting | None = None
    """The value in question where it is not among the accepted settings."""
    is_idle: bool = False
    """Whether nothing is wrong but that the value at the first path has no effect beside others:
    one that a resumed run has merely saved gives way."""


@dataclass(slots=True)
class Layer:
    """What one source sets."""

    settings: dict[KeyPath, Setting] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    replaced: KeyPath | None = None
    """A table that is set as a whole: what earlier layers have in it goes."""


def read_layer(table: Mapping[str, Any], source: str) -> Layer:
    """Return the settings of one source, and its unknown keys as problems."""
    layer = Layer()
    for path, value in flatten(table):
        setting = Setting(value, source)
        if path[0] in sections() and len(path) == 1 and value == {}:
            continue  # an empty section sets nothing
        if find_leaf(path) is None:
            layer.problems.append(Problem((path,), _say_unknown(path), setting))
        else:
            layer.settings[path] = setting
    return layer


def read_override(text: str) -> Layer:
    """Return the layer of one `--set section.key=value`.

    The value is read as TOML; what is not TOML is text, so that names need no quotes.
    """
    key, separator, value = text.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not separator or not all(parts):
        problem = f'"{text}" is not an override; write section.key=value'
        return Layer(problems=[Problem((), problem, Setting(None, OVERRIDE))])
    table: Any = _toml_or_text(value.strip())
    is_table = isinstance(table, Mapping)
    for part in reversed(parts):
        table = {part: table}
    layer = read_layer(table, OVERRIDE)
    if is_table and find_leaf(tuple(parts)) is not None:  # not a whole section
        layer.replaced = tuple(parts)
    return layer


def flatten(table: Mapping[str, Any], parent: KeyPath = ()) -> Iterable[tuple[KeyPath, Any]]:
    """Yield every value of nested tables with its path; an empty table is a value."""
    for key, value in table.items():
        path = (*parent, key)
        if isinstance(value, Mapping) and value:
            yield from flatten(value, path)
        else:
            yield path, value


def nest(settings: Mapping[KeyPath, Setting]) -> dict[str, Any]:
    """Return the nested tables that `settings` flatten; an empty table gives way to its keys."""
    root: dict[str, Any] = {}
    for path in sorted(settings, key=len):
        table = root
        for part in path[:-1]:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                break  # a table's name was given a plain value, which is reported by its type
        else:
            value = settings[path].value
            table[path[-1]] = dict(value) if isinstance(value, Mapping) else value
    return root


def _toml_or_text(text: str) -> Any:
    try:
        table = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    value = table["value"]
    is_plain = len(table) == 1 and isinstance(value, str | int | float | list | dict)
    return value if is_plain else text


def _say_unknown(path: KeyPath) -> str:
    """Say why `path` is no key, and which one was probably meant."""
    section, name = path[0], path[-1]
    if section in sections() and len(path) == 1:
        return f"this is a section, not a key; write [{section}] and its keys below it"
    if find_leaf(path[:1]) or find_leaf(path[:2]):
        return "this key takes a plain value, not a table"
    paths = dict.fromkeys(leaf.path for leaf in every_leaf())
    names = [path[-1] for path in paths if path[0] == section and len(path) == 2]
    near = nearest(name, names)
    if near:
        return f"unknown key; did you mean {near}?"
    if section not in sections() and len(path) > 1:
        near = nearest(section, sections())
        if near:
            return f"unknown section; did you mean [{near}]?"
    alike = nearest(name, [path[-1] for path in paths])
    elsewhere = [".".join(path) for path in paths if path[-1] == alike]
    if len(elsewhere) == 1:
        return f"unknown key; did you mean {elsewhere[0]}?"
    if names:
        return f"unknown key; [{section}] has {', '.join(names)}"
    return f"unknown {'section' if len(path) > 1 else 'key'}; there are {_list_sections()}"


def _list_sections() -> str:
    return ", ".join(f"[{name}]" for name in sections())
