"""Draws the screen of `echo-rl top`: the live view, and a table of nodes to operate.

This module is pure: its inputs are statuses and pressed keys, and its outputs are rows and
operations. With the keys a person sorts, filters and operates nodes. Each operation is shown with
its effect and sent only after "y".
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from rich.console import Group
from rich.text import Text

from echo.core.monitoring.status import NodeStatus, RunStatus
from echo.core.units import counted
from echo.ui.drawing import clean, fit
from echo.ui.screen import node_order, node_rows, render_live
from echo.wire.messages import Act, Operation

Order: TypeAlias = Callable[[NodeStatus], Any]
"""The type of a function that returns a node's sort key."""

SORTS: Mapping[str, Order] = {
    "name": node_order,
    "state": lambda node: node.state,
    "lag": lambda node: -(node.staleness or 0),
    "tok/s": lambda node: -node.tokens_per_s,
    "down/s": lambda node: -node.bytes_per_s,
    "up/s": lambda node: -node.bytes_sent_per_s,
    "rtt": lambda node: -(node.rtt_s or 0.0),
    "leases": lambda node: -node.num_leases,
    "errors": lambda node: -node.num_errors,
    "$/h": lambda node: -(node.price_per_h or 0.0),
    "seen": lambda node: -node.seen_s,
}
"""The orders in which the table can be sorted. Each has a name. Numbers are sorted in descending
order."""
KEYS = "q quit  s S sort  / filter  g graph  p pause  d drain  b standby  + - bound"
CHART_ROWS = 30
"""If the terminal has at least this many rows, the graph is shown from the start."""
_KEY = re.compile(r"\x1b\[[0-9;]*[A-Za-z~]|\x1bO[A-Za-z]|.", re.DOTALL)
_NAMED_KEYS = {
    "\x1b[A": "up", "\x1bOA": "up", "k": "up", "\x1b[B": "down", "\x1bOB": "down", "j": "down",
    "\x1b[5~": "page up", "\x1b[6~": "page down", "\x1b[H": "home", "\x1b[F": "end",
    "\x1b[1~": "home", "\x1b[4~": "end", "\x7f": "erase", "\x08": "erase", "\r": "enter",
    "\n": "enter", "\x1b": "escape",
}  # fmt: skip
PAGE = 10  # rows by which the keys page up and page down move


def keys_in(text: str) -> Iterator[str]:
    """Yield the characters of each key in a text from a terminal."""
    for match in _KEY.finditer(text):
        yield match[0]


@dataclass(frozen=True, slots=True)
class Confirmation:
    """An operation that is carried out once the user presses "y"."""

    text: str
    act: Act
    subject: str = ""
    value: str = ""


class TopScreen:
    """What the screen shows: the newest status, and what the user has chosen."""

    def __init__(self, *, by: str) -> None:
        """Start without a status. `by` is the operator's name, which each operation contains."""
        self._by = by
        self._numbers = itertools.count(1)
        self.status: RunStatus | None = None
        self.may_operate = False
        self.is_over = False
        self._said = ""
        self._sort = "name"
        self._is_reversed = False
        self._filter = ""
        self._is_typing = False
        self._has_chart: bool | None = None
        """Whether the graph is shown. None until the user has chosen."""
        self._selected = ""
        """Id of the node that the user has selected; "" if no node is selected."""
        self._pending: Confirmation | None = None

    def show(self, status: RunStatus, *, may_operate: bool) -> None:
        """Set the status to show."""
        self.status, self.may_operate = status, may_operate

    def say(self, text: str) -> None:
        """Set the line that reports on the connection or an operation. "" removes the line."""
        self._said = text

    # --- keys ------------------------------------------------------------------------------------

    def press(self, text: str) -> list[Operation]:
        """Handle the keys that the user has pressed. Return the operations that are confirmed."""
        operations = []
        for key in keys_in(text):
            if self._pending is not None:
                operations += self._answer(self._pending, key)
            elif self._is_typing:
                self._type(key)
            else:
                self._choose(key)
        return operations

    def _answer(self, question: Confirmation, key: str) -> list[Operation]:
        self._pending = None
        if key not in ("y", "Y"):
            self._said = "not done"
            return []
        self._said = "asked the learner ..."
        return [
            Operation(
                number=next(self._numbers),
                act=question.act,
                subject=question.subject,
                value=question.value,
                by=self._by,
            )
        ]

    def _type(self, key: str) -> None:
        match _NAMED_KEYS.get(key):
            case "enter":
                self._is_typing = False
            case "escape":
                self._is_typing, self._filter = False, ""
            case "erase":
                self._filter = self._filter[:-1]
            case _ if len(key) == 1 and key.isprintable():
                self._filter = (self._filter + key)[:40]

    def _choose(self, key: str) -> None:
        self._said = ""
        sorts = list(SORTS)
        match _NAMED_KEYS.get(key, key):
            case "q":
                self.is_over = True
            case "up" | "down" | "page up" | "page down" | "home" | "end" as move:
                self._move(move)
            case "s":
                self._sort = sorts[(sorts.index(self._sort) + 1) % len(sorts)]
            case "S":
                self._is_reversed = not self._is_reversed
            case "/":
                self._is_typing = True
            case "escape":
                self._filter = ""
            case "g":
                self._has_chart = not self._has_chart
            case "p" | "d" | "b" | "+" | "-" as act:
                self._ask(act)

    def _move(self, move: str) -> None:
        names = [node.node_id for node in self.nodes()]
        if not names:
            return
        at = names.index(self._selected) if self._selected in names else -1
        by = {"up": -1, "down": 1, "page up": -PAGE, "page down": PAGE}.get(move)
        if by is None:
            at = 0 if move == "home" else len(names) - 1
        elif at < 0:
            at = 0
        else:
            at = min(max(at + by, 0), len(names) - 1)
        self._selected = names[at]

    def _ask(self, key: str) -> None:
        """Ask the user to confirm the operation of a key.

        If the operation is not possible, show the reason.
        """
        if self.status is None:
            return
        if not self.may_operate:
            self._said = "this key only reads: use the one in keys/operate of the run's directory"
            return
        if key == "p":
            self._pending = (
                Confirmation("resume the run?", "resume")
                if self.status.state == "paused"
                else Confirmation("pause the run? no more groups are granted", "pause")
            )
        elif key in "+-":
            bound = self.status.bound + (1 if key == "+" else -1)
            text = f"staleness bound of new leases: {self.status.bound} -> {bound}?"
            if 0 <= bound <= self.status.max_staleness:
                self._pending = Confirmation(text, "set", "sync.max_staleness", str(bound))
            else:
                self._said = f"the bound is from 0 to {self.status.max_staleness}"
        else:
            self._ask_for_node(key)

    def _ask_for_node(self, key: str) -> None:
        node = next((each for each in self.nodes() if each.node_id == self._selected), None)
        name = "" if node is None else clean(node.node_id)
        if node is None or node.role == "learner":
            self._said = "select a worker or relay first, with the arrow keys"
        elif key == "d":
            leases = counted(node.num_leases, "lease")
            text = f"drain {name}? it finishes its {leases} and leaves"
            self._pending = Confirmation(text, "drain", node.node_id)
        elif node.hold:
            self._pending = Confirmation(f"give {name} leases again?", "resume", node.node_id)
        else:
            text = f"put {name} on standby after its {counted(node.num_leases, 'lease')}?"
            self._pending = Confirmation(text, "standby", node.node_id)

    # --- drawing ---------------------------------------------------------------------------------

    def nodes(self) -> list[NodeStatus]:
        """Return the nodes that match the filter, in the order that the user has chosen."""
        nodes = () if self.status is None else self.status.nodes
        wanted = self._filter.lower()
        found = [
            node
            for node in nodes
            if wanted in f"{node.node_id} {node.role} {node.state} {node.parent}".lower()
        ]
        found.sort(key=node_order)
        found.sort(key=SORTS[self._sort], reverse=self._is_reversed)
        return found

    def render(self, width: int, height: int) -> Group:
        """Return the rows that fill a terminal of this size."""
        if self.status is None:
            return Group(fit(Text(self._said or "waiting for the learner ..."), width))
        has_chart = height >= CHART_ROWS if self._has_chart is None else self._has_chart
        view = render_live(
            self.status, width, height=height - 1, has_chart=has_chart, table=self._table
        )
        return Group(view, self._foot(width))

    def _table(self, width: int, height: int) -> list[Text]:
        """Return at most `height` rows of the table, around the selected node."""
        if height < 3:
            return []
        nodes = self.nodes()
        names = [node.node_id for node in nodes]
        at = names.index(self._selected) if self._selected in names else 0
        num_rows = height - 2
        first = min(max(at - num_rows // 2, 0), max(len(nodes) - num_rows, 0))
        window = nodes[first : first + num_rows]
        rows = node_rows(window, width, selected=self._selected) if window else []
        order = f"by {self._sort}{', reversed' if self._is_reversed else ''}"
        shown = f"{first + 1}-{first + len(window)} of {len(nodes)}" if nodes else "none"
        wanted = f", filter {self._filter!r}" if self._filter else ""
        return [*rows, fit(Text(f"{shown} {order}{wanted}", "dim"), width)]

    def _foot(self, width: int) -> Text:
        if self._pending is not None:
            return fit(Text(f"{self._pending.text} (y/n)", "bold yellow"), width)
        if self._is_typing:
            text = f"filter: {self._filter}_  (Enter keeps it, Esc clears it)"
            return fit(Text(text, "bold"), width)
        if self._said:
            return fit(Text(clean(self._said), "bold"), width)
        return fit(Text(KEYS, "dim"), width)
