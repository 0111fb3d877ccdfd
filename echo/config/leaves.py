"""One record per configuration key, read off the schema: what help, errors and checks share."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

from pydantic_core import PydanticUndefined

from echo.config.profiles import PROFILES
from echo.config.schema import KINDS, Config
from echo.config.section import INHERITED, OWN_KIND, Role, Section, kind_of
from echo.core.units import without_secrets

KeyPath = tuple[str, ...]
"""A key's place in the file: ("batch", "group_size")."""

_BOUNDS = {  # JSON schema's words, and pydantic's own where the type is a union
    "minimum": "at least",
    "ge": "at least",
    "exclusiveMinimum": "above",
    "gt": "above",
    "maximum": "at most",
    "le": "at most",
    "exclusiveMaximum": "below",
    "lt": "below",
}
_TYPES = {
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "string": "text",
    "object": "a table",
    "array": "a list of texts",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One key of the configuration."""

    path: KeyPath
    expected: str
    """What its value must be, as in "must be ..."."""
    choices: tuple[str, ...]
    """The words it takes, where it takes only certain ones."""
    help: str
    roles: tuple[Role, ...]
    defaults: Mapping[str, Any]
    """Default by profile."""
    kinds: tuple[str, ...] = ()
    """Of its section, where only these have it with this meaning."""
    is_inherited: bool = False
    """Whether the learner decides it for its workers."""

    @property
    def key(self) -> str:
        """The dotted key."""
        return ".".join(self.path)

    @property
    def is_table(self) -> bool:
        """Whether it takes keys of the user's choice."""
        return self.expected == _TYPES["object"]


@cache
def every_leaf() -> tuple[Leaf, ...]:
    """Return every key of the schema in its order; one of several kinds once for each kind."""
    definitions = Config.model_json_schema()
    profile = _leaf(("profile",), definitions["properties"]["profile"], Config)
    found = [profile]
    for name, classes in sections().items():
        for kind, section in classes.items():
            fragments = definitions["$defs"][section.__name__]["properties"]
            names = sorted(section.model_fields, key=lambda field: field != "kind")
            for field in names:
                leaf = _leaf((name, field), fragments[field], section)
                if kind and field == "kind":
                    leaf = _leaf_of_kind(leaf, classes)
                found.append(replace(leaf, kinds=(kind,) if kind else ()))
    return tuple(found)


@cache
def _leaves(kinds: frozenset[tuple[str, str]]) -> Mapping[KeyPath, Leaf]:
    chosen = dict(kinds)
    return {
        leaf.path: leaf
        for leaf in every_leaf()
        if not leaf.kinds or chosen[leaf.path[0]] in leaf.kinds
    }


def leaves(kinds: Mapping[str, str]) -> Mapping[KeyPath, Leaf]:
    """Return the keys of a configuration by path, in the order of the schema.

    Args:
        kinds: of each section that has a class per kind, as `kinds_of` returns them.
    """
    return _leaves(frozenset(kinds.items()))


def kinds_of(config: Config) -> dict[str, str]:
    """Return which class each section with several is of, by the name of the section."""
    return {name: kind_of(getattr(config, name)) for name in KINDS}


@cache
def sections() -> Mapping[str, Mapping[str, type[Section]]]:
    """Return the classes of every section by name and kind; "" where there is one."""
    return {
        name: KINDS.get(name) or {"": cast("type[Section]", info.annotation)}
        for name, info in Config.model_fields.items()
        if name != "profile"
    }


@cache
def _paths() -> Mapping[KeyPath, Leaf]:
    return {leaf.path: leaf for leaf in every_leaf()}


def find_leaf(path: KeyPath) -> Leaf | None:
    """Return the key at `path`, or the table that `path` reaches into, of any kind; or None."""
    leaf = _paths().get(path)
    if leaf is None:
        table = _paths().get(path[:2])
        return table if table is not None and table.is_table else None
    return leaf


def inherited_keys() -> tuple[str, ...]:
    """Return the dotted keys that the learner decides for its workers."""
    return tuple(leaf.key for leaf in _paths().values() if leaf.is_inherited)


def show(value: object) -> str:
    """Return a value as it is written in TOML; `None`, which TOML lacks, as "unset".

    The secrets of join strings are left out, since what is shown ends up in logs.
    """
    if value is None:
        return "unset"
    if isinstance(value, Mapping):
        items = (f"{_show_key(str(key))} = {show(item)}" for key, item in value.items())
        return "{" + ", ".join(items) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(show(item) for item in value) + "]"
    if isinstance(value, bool | str):
        return without_secrets(json.dumps(value, ensure_ascii=False))
    return str(value)


def _show_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key, ensure_ascii=False)


def _leaf(path: KeyPath, fragment: Mapping[str, Any], section: type[Section]) -> Leaf:
    info = section.model_fields[path[-1]]
    default = info.get_default(call_default_factory=True)
    defaults = {name: keys.get(".".join(path), default) for name, keys in PROFILES.items()}
    if default is PydanticUndefined and path == ("profile",):
        defaults = {name: name for name in PROFILES}
    return Leaf(
        path=path,
        expected=_expected(fragment, path[-1]),
        choices=_choices(fragment),
        help=info.description or "",
        roles=section.roles,
        defaults=defaults,
        is_inherited=INHERITED in info.metadata,
    )


def _leaf_of_kind(leaf: Leaf, classes: Mapping[str, type[Section]]) -> Leaf:
    """Return the key that chooses among classes."""
    words = tuple(kind for kind in classes if kind != OWN_KIND)
    expected = f"one of {', '.join(map(show, words))}"
    if OWN_KIND in classes:
        expected += f", or the import path of your own, {show(OWN_KIND)}"
    profiles = {name: keys.get(leaf.key, words[0]) for name, keys in PROFILES.items()}
    text = "Which one; the keys below are its own, and others have others."
    return replace(leaf, choices=words, expected=expected, help=text, defaults=profiles)


def _choices(fragment: Mapping[str, Any]) -> tuple[str, ...]:
    words = list(fragment.get("enum", []))
    if "const" in fragment:
        words.append(fragment["const"])
    for part in fragment.get("anyOf", []):
        words.extend(_choices(part))
    return tuple(words)


def _expected(fragment: Mapping[str, Any], name: str) -> str:
    """Say in words what JSON schema `fragment` accepts."""
    if "anyOf" in fragment:
        parts = [part for part in fragment["anyOf"] if part.get("type") != "null"]
        return " or ".join(_expected(part, name) for part in parts)
    words = _choices(fragment)
    if words:
        listed = ", ".join(show(word) for word in words)
        return f"one of {listed}" if len(words) > 1 else listed
    if name.endswith("_s") and not name.endswith("_per_s"):
        base = 'a duration (seconds, or text such as "30s")'
    elif name.endswith("_bytes"):
        base = 'a size (bytes, or text such as "8GiB")'
    else:
        base = _TYPES[fragment["type"]]
    bounds = [f"{text} {fragment[word]}" for word, text in _BOUNDS.items() if word in fragment]
    if fragment.get("minLength"):
        bounds.append("not empty")
    if "maxLength" in fragment:
        bounds.append(f"at most {fragment['maxLength']} characters")
    if fragment.get("maximum", fragment.get("exclusiveMaximum", 0)) == 2**63:
        bounds.pop()  # what fits into 64 bits, not worth a word
    return ", ".join([base, *bounds])
