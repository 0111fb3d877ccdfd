"""Tables of states, as a module's docstring draws them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any


def draw(table: Mapping[Any, Mapping[type, Any]], *, impossible: Any) -> str:
    """Return a table of states by events: where each leads, `-` for nowhere, `!` for a fault."""
    [*rows] = table.items()
    events = list(rows[0][1])
    cells = [["", *(event.__name__ for event in events)]]
    for state, steps in rows:
        ends = ["!" if steps[event] is impossible else steps[event].then or "-" for event in events]
        cells.append([state, *ends])
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
    return "\n".join(f"    {line}" for line in lines)


def reachable(table: Mapping[Any, Mapping[type, Any]], start: StrEnum) -> set[Any]:
    """Return the states that events lead to from `start`, itself included."""
    found, new = {start}, [start]
    while new:
        steps = table[new.pop()].values()
        new += [step.then for step in steps if step.then is not None and step.then not in found]
        found.update(new)
    return found
