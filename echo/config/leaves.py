"""One record per configuration key, read off the schema: what help, errors and checks share."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic_core import PydanticUndefined

from echo.config.profiles import PROFILES
from echo.config.schema import Config, Role, Section
from echo.units import without_secrets

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

    @property
    def key(self) -> str:
        """The dotted key."""
        return ".".join(self.path)

    @property
    def is_table(self) -> bool:
        """Whether it takes keys of the user's choice."""
        return self.expected == _TYPES["object"]


@cache
def leaves() -> Mapping[KeyPath, Leaf]:
    """Return every key of the schema by path, in the order of the schema."""
    schema = Config.model_json_schema()
    found: dict[KeyPath, Leaf] = {}
    for name, section in sections().items():
        fragments = schema["$defs"][section.__name__]["properties"]
        for field in section.model_fields:
            found[(name, field)] = _leaf((name, field), fragments[field], section)
    return {("profile",): _leaf(("profile",), schema["properties"]["profile"], Config), **found}


@cache
def sections() -> Mapping[str, type[Section]]:
    """Return every section of the schema by name."""
    return {
        name: info.annotation
        for name, info in Config.model_fields.items()
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section)
    }


def find_leaf(path: KeyPath) -> Leaf | None:
    """Return the key at `path`, or the table that `path` reaches into, or None."""
    leaf = leaves().get(path)
    if leaf is None:
        table = leaves().get(path[:2])
        return table if table is not None and table.is_table else None
    return leaf


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
    )


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
