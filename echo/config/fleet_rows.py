"""The rows of fleet files, each checked on its own against the schema.

A bad row is named by its table, its number from 1 and what it calls itself. The rules that join
several rows (fleet.py) look at bad ones, too, so that all problems are found in one pass.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from echo.config.fleet_schema import LISTS, TABLES, Row
from echo.config.leaves import show
from echo.core.errors import ConfigError, nearest

AnyRow = TypeVar("AnyRow", bound=BaseModel)


@dataclass(slots=True)
class Rows:
    """The valid rows of all files, and the problems of the others."""

    tables: dict[str, Row] = field(default_factory=dict)
    lists: dict[str, list[tuple[str, Row]]] = field(default_factory=dict)
    """Rows with the words that name each in a message."""
    bad: dict[str, list[tuple[str, Row]]] = field(default_factory=dict)
    """Rows that are not valid, as they stand, what is missing as None; nothing is built of them."""
    problems: list[str] = field(default_factory=list)
    seen: dict[str, str] = field(default_factory=dict)
    """Table -> the file it stands in."""

    def every(self, name: str) -> list[tuple[str, Row]]:
        """Return the rows of a list or table, good and bad."""
        table = [("", self.tables[name])] if name in self.tables else []
        return [*table, *self.lists.get(name, []), *self.bad.get(name, [])]


def read_toml(path: Path) -> dict[str, Any]:
    """Return the tables of a TOML file.

    Raises:
        ConfigError: if it cannot be read.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    except OSError as error:
        remedy = "configs/fleet-example.toml is one to start from"
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; {remedy}") from error


def read_file(rows: Rows, table: Mapping[str, Any], source: str) -> None:
    """Add the rows of one file to `rows`, and what is wrong with them."""
    for name, value in table.items():
        is_list = name in LISTS
        if name not in TABLES and not is_list:
            near = nearest(name, [*TABLES, *LISTS])
            hint = f"did you mean {near}?" if near else f"there are {', '.join((*TABLES, *LISTS))}"
            rows.problems.append(f"{source}: [{name}]: unknown table; {hint}")
        elif name in rows.seen:
            rows.problems.append(f"{source}: [{name}] stands in {rows.seen[name]} too; keep one")
        elif not isinstance(value, list if is_list else dict):
            wanted = f"[[{name}]], a list of tables" if is_list else f"[{name}], one table"
            rows.problems.append(f"{source}: {name} must be written {wanted}")
        else:
            rows.seen[name] = source
            _read_rows(rows, name, value, source)


def _read_rows(rows: Rows, name: str, value: Any, source: str) -> None:
    if name in TABLES:
        where = f"{source}: [{name}]"
        row = check_row(rows, TABLES[name], value, where)
        if row is not None:
            rows.tables[name] = row
        else:
            _keep_bad(rows, name, TABLES[name], value, where)
        return
    rows.lists[name] = []
    for number, item in enumerate(value, 1):
        where = place_of(item, source, name, number)
        row = check_row(rows, LISTS[name], item, where)
        if row is not None:
            rows.lists[name].append((where, row))
        elif isinstance(item, dict):
            _keep_bad(rows, name, LISTS[name], item, where)


def _keep_bad(rows: Rows, name: str, kind: type[Row], value: Mapping[str, Any], where: str) -> None:
    required = {key: None for key, info in kind.model_fields.items() if info.is_required()}
    known = {key: item for key, item in value.items() if key in kind.model_fields}
    rows.bad.setdefault(name, []).append((where, kind.model_construct(**required | known)))


def place_of(item: object, source: str, name: str, number: int) -> str:
    """Return the words for a row of a list: its table, its number from 1, what it calls itself."""
    keys = [key for key in ("name", "gpu", "region") if isinstance(item, dict) and key in item]
    named = f" ({', '.join(str(item[key]) for key in keys)})" if isinstance(item, dict) else ""
    return f"{source}: {name}[{number}]{named if keys else ''}"


def check_row(rows: Rows, kind: type[AnyRow], value: object, where: str) -> AnyRow | None:
    """Return a row if it is valid; otherwise note what is wrong with it."""
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        said: dict[str, str] = {}
        for detail in error.errors():
            key = ".".join(str(part) for part in detail["loc"] if not _is_branch(part))
            said.setdefault(key, _say(kind, key, detail))
        rows.problems.extend(f"{where}: {text}" for text in said.values())
        return None


def _is_branch(part: object) -> bool:
    """Tell whether a part of pydantic's path names a member of a union, not a key."""
    return isinstance(part, str) and ("[" in part or part in ("int", "float"))


def _say(kind: type[BaseModel], key: str, detail: Mapping[str, Any]) -> str:
    name = key.rpartition(".")[2]
    info = kind.model_fields.get(name)
    meaning = f" ({info.description.rstrip('.')})" if info and info.description else ""
    if detail["type"] == "missing":
        return f"{key}: missing{meaning}"
    if detail["type"] == "extra_forbidden":
        near = nearest(name, kind.model_fields)
        hint = f"did you mean {near}?" if near else f"there are {', '.join(kind.model_fields)}"
        return f"{key}: unknown key; {hint}"
    own_words = detail.get("ctx", {}).get("error")
    text = str(own_words) if own_words else str(detail["msg"]).removeprefix("Input should be ")
    return f"{key} = {show(detail['input'])}: must be {text}{meaning}"


def is_known(rows: Rows, where: str, name: object, known: Mapping[str, Any]) -> bool:
    """Tell whether `name` is among `known`, and note a problem with the nearest match if not."""
    if not isinstance(name, str):
        return False  # which has been noted
    if name in known:
        return True
    by_fold = {_fold(other): other for other in known}
    near = nearest(_fold(name), by_fold)
    listed = ", ".join(known) or "none"
    hint = f"did you mean {show(by_fold[near])}?" if near else f"known are {listed}"
    rows.problems.append(f"{where} = {show(name)}: unknown; {hint}")
    return False


def _fold(name: str) -> str:
    """Drop what spellings of one product differ in."""
    return "".join(letter for letter in name.lower() if letter.isalnum()).removeprefix("nvidia")
