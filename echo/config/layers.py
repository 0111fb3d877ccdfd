"""Reads settings from files and overrides in layers, and keeps the source of each value.

This module reads run, fleet and scenario files. A layer is one file or one `--set`. A later layer
overrides an earlier layer. A `Schema` defines the keys. All problems are reported at once, each
with its source, key, value and remedy.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, time
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from echo.config.fields import NO_VALUES, UNREADABLE, read_text, toml_or_text
from echo.config.schema import MAX_DEPTH, KeyPath, Leaf, show
from echo.core.errors import ConfigError, in_one, nearest
from echo.core.units import one_line

OVERRIDE = "--set"
"""The source name of settings from --set."""
DEFAULT = "default"
"""The source name of a default. For a profile's default the name begins with "profile "."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The value of one key, and the name of the file or option that set it."""

    value: Any
    source: str

    @property
    def is_default(self) -> bool:
        """Whether the value is a default of the schema or of a profile."""
        return self.source == DEFAULT or self.source.startswith("profile ")


Settings = Mapping[KeyPath, Setting]


@dataclass(frozen=True, slots=True)
class Problem:
    """One error in the settings. Its message shows the value at the first of `paths`.

    The values at the other paths contributed to the error.
    """

    paths: tuple[KeyPath, ...]
    text: str
    setting: Setting | None = None
    """The refused value; None if the value is among the accepted settings."""
    is_idle: bool = False
    """Whether the value at the first path is valid but has no effect, because the values at the
    other paths rule it out. A resumed run replaces such a value by the default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """The keys that exist in one kind of file."""

    what: str
    """The name of this kind of file in messages, as in "the configuration has 3 problems"."""
    override_form: str
    """Text that explains how to write an override."""
    sections: Callable[[], Collection[str]]
    """Returns the names of the sections. An empty section in a file sets nothing."""
    find: Callable[[KeyPath], Leaf | None]
    """Returns the key at a path, or the table of the user's own keys that contains the path."""
    describe_unknown: Callable[[KeyPath], str]
    """Returns the error text for an unknown key, with the most similar key."""
    place: Callable[[KeyPath, Settings], str]
    """Returns the text that names a path in messages."""


# --- reading --------------------------------------------------------------------------------------
# In a table of the user's own keys `--set task.options.digits=3` sets one key and keeps the others;
# `--set task.options={digits=3}` replaces the whole table.


@dataclass(slots=True)
class Layer:
    """The settings from a file or an option, and their problems."""

    settings: dict[KeyPath, Setting] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    replaced: KeyPath | None = None
    """The path of a table that this layer replaces. All earlier settings at or below this path are
    dropped."""


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file.

    Raises:
        ConfigError: if the file cannot be read or is not TOML.
    """
    try:
        return tomllib.loads(read_file(path))
    except UNREADABLE as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error


def read_file(path: Path) -> str:
    """Return the text of a file with settings.

    Raises:
        ConfigError: if the file cannot be read or is not UTF-8.
    """
    try:
        return read_text(path)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error}") from error
    except OSError as error:
        reason = error.strerror or str(error)
        remedy = "give an existing, readable file; configs/ has examples"
        raise ConfigError(f"{path}: cannot be read: {reason}; {remedy}") from error


def read_layer(schema: Schema, table: Mapping[str, Any], source: str) -> Layer:
    """Return the layer of a file's table. Unknown keys become problems."""
    layer = Layer()
    for path, value in flatten(table):
        setting = Setting(value, source)
        if path[0] in schema.sections() and len(path) == 1 and value == {}:
            continue  # an empty section sets nothing
        leaf = schema.find(path)
        if leaf is None:
            text: str | None = schema.describe_unknown(path)
        else:
            text = _describe_altered([*path[len(leaf.path) :], value], in_table=leaf.is_table)
        if text:
            layer.problems.append(Problem((path,), text, setting))
        else:
            layer.settings[path] = setting
    return layer


def read_override(schema: Schema, text: str, source: str = OVERRIDE) -> Layer:
    """Return the layer of one `--set section.key=value`.

    The value is read as TOML. A value that is not valid TOML is text, so names need no quotes.
    """
    key, separator, value = text.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not separator or not all(parts):
        problem = f'"{text}" is not an override; write {schema.override_form}'
        return Layer(problems=[Problem((), problem, Setting(None, source))])
    if value.strip() in NO_VALUES:
        problem = (
            f"this is a null value; leave {key} out, or write '{key}=\"{value.strip()}\"' for text"
        )
        return Layer(problems=[Problem((tuple(parts),), problem, Setting(value.strip(), source))])
    table: Any = toml_or_text(value.strip())
    for part in reversed(parts):
        table = {part: table}
    layer = read_layer(schema, table, source)
    place = tuple(parts)
    leaf, own = schema.find(place), layer.settings.get(place)
    if leaf is not None and (leaf.is_table or (own is not None and own.value != {})):
        layer.replaced = place  # if only some keys of a section are set, nothing is replaced
    return layer


def merge(layers: Iterable[Layer]) -> dict[KeyPath, Setting]:
    """Merge the settings of all layers. For each path, a later layer overrides an earlier layer."""
    merged: dict[KeyPath, Setting] = {}
    for layer in layers:
        if place := layer.replaced:
            merged = {
                path: setting
                for path, setting in merged.items()
                if any(one != other for one, other in zip(path, place, strict=False))
            }
        merged.update(layer.settings)
    return merged


def flatten(table: Mapping[str, Any], parent: KeyPath = ()) -> Iterable[tuple[KeyPath, Any]]:
    """Yield every value of nested tables with its path.

    An empty table is yielded as a value. A table at depth MAX_DEPTH is also yielded as a value, and
    refused later.
    """
    for key, value in table.items():
        path = (*parent, key)
        if isinstance(value, Mapping) and value and len(path) < MAX_DEPTH:
            yield from flatten(value, path)
        else:
            yield path, value


def nest(settings: Settings) -> dict[str, Any]:
    """Return the settings as nested tables: the inverse of `flatten`."""
    root: dict[str, Any] = {}
    for path in sorted(settings, key=len):
        table = root
        for part in path[:-1]:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                break  # a table's name has a plain value, which the check of types reports
        else:
            value = settings[path].value
            table[path[-1]] = dict(value) if isinstance(value, Mapping) else value
    return root


MAX_GUESSES = 4
"""Largest number of keys from other sections or tables that the error for an unknown key suggests.
With more keys, a user would search the documentation instead."""
_NO_UTF8 = re.compile("[\ud800-\udfff]")


def _describe_altered(value: Any, *, in_table: bool, depth: int = 0) -> str | None:
    """Return why a value would not stay the same in messages and in config.json.

    Return None if it would stay the same.

    Args:
        value: the value of a key, or a part of it.
        in_table: whether the value is in a table of the user's own keys. The schema does not check
            the types of such values, so more types are refused here.
        depth: the number of tables and lists that contain the value.
    """
    if isinstance(value, Mapping | list):
        if depth == MAX_DEPTH:
            return f"more than {MAX_DEPTH} tables and lists stand within each other"
        inner = (*value, *value.values()) if isinstance(value, Mapping) else value
        found = (_describe_altered(part, in_table=in_table, depth=depth + 1) for part in inner)
        return next(filter(None, found), None)
    if isinstance(value, str) and (_NO_UTF8.search(value) or ("\0" in value and not in_table)):
        return f"{brief(one_line(value))} has a character that UTF-8 or file names cannot hold"
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return f"{brief(value)} has more than 64 bits; write a smaller number, or text in quotes"
    if in_table and isinstance(value, float) and not math.isfinite(value):
        return f"{value} is no number that a message can carry; write a finite one, or text"
    if in_table and isinstance(value, date | time):
        return f"{value} is a date or time, which workers would get as text; put it in quotes"
    return None


# --- what is wrong --------------------------------------------------------------------------------


def value_problems(
    error: ValidationError, locate: Callable[[tuple[int | str, ...]], tuple[KeyPath, Leaf | None]]
) -> list[Problem]:
    """Return one problem for each key in pydantic's error.

    pydantic reports a union once for each of its members. Only the first report is used.

    Args:
        error: the error that pydantic has raised.
        locate: returns the path and the key for a place in the error.
    """
    by_path: dict[KeyPath, Problem] = {}
    for detail in error.errors():
        path, leaf = locate(detail["loc"])
        if leaf is None:  # every other path was refused before validation
            raise AssertionError(f"validation reports an unknown place: {detail}") from error
        own_words = detail.get("ctx", {}).get("error")
        if own_words:
            text = str(own_words)
        elif detail["type"] == "missing" and path[-1] == str(detail["loc"][-1]):
            text = f"missing ({leaf.help.rstrip('.')})"
        elif len(path) > len(leaf.path):  # in a table of the user's own keys
            text = str(detail["msg"]).replace("Input should be", "must be")
        else:
            text = describe_expected(leaf, detail["input"])
        by_path.setdefault(path, Problem((path,), text))
    return list(by_path.values())


def describe_expected(leaf: Leaf, value: object) -> str:
    """Describe the values that a key accepts.

    Suggest the accepted value that is most similar to `value`.
    """
    has_choice = isinstance(value, str) and len(leaf.choices) > 1
    near = nearest(str(value), leaf.choices) if has_choice else None
    hint = f'; did you mean "{near}"?' if near else ""
    meaning = f" ({leaf.help.rstrip('.')})" if leaf.help else ""
    return f"must be {leaf.expected}{hint}{meaning}"


def unreported(found: Iterable[Problem], problems: Iterable[Problem]) -> list[Problem]:
    """Return each problem in `found` whose paths are not among the paths of `problems`."""
    reported = {path for problem in problems for path in problem.paths}
    return [problem for problem in found if reported.isdisjoint(problem.paths)]


def as_error(
    schema: Schema, problems: Sequence[Problem], settings: Settings, file_name: str
) -> ConfigError:
    """Return the error that lists all problems.

    Args:
        schema: the schema of the file with the problems.
        problems: at least one problem.
        settings: the accepted settings with their sources.
        file_name: the source to name for a missing setting.
    """
    lines = [_describe(schema, problem, settings, file_name) for problem in problems]
    return ConfigError(in_one(schema.what, lines))


def _describe(schema: Schema, problem: Problem, settings: Settings, file_name: str) -> str:
    """Return a problem as one line: the source, the key, the value and the error."""
    path = problem.paths[0] if problem.paths else ()
    setting = problem.setting or settings.get(path) or _beside(path, settings, file_name)
    value = "" if setting.value is None or not path else f" = {brief(setting.value)}"
    if setting.is_default and value:
        value += f" ({setting.source})"
    source = file_name if setting.is_default else setting.source
    place = schema.place(path, settings)
    return f"{source}: {place}{value}: {problem.text}" if place else f"{source}: {problem.text}"


def _beside(path: KeyPath, settings: Settings, file_name: str) -> Setting:
    """Return a setting that has no value and names a source.

    In messages, this setting takes the place of a missing key. The source is the source of the
    nearest key that the user has set. If there is no such key, the source is `file_name`.
    """
    for depth in range(len(path), 0, -1):
        for other, setting in settings.items():
            if other[:depth] == path[:depth] and not setting.is_default:
                return Setting(None, setting.source)
    return Setting(None, file_name)


def brief(value: object) -> str:
    """Return a value as TOML text, shortened if it is long."""
    text = show(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
