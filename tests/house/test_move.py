"""The hard parts of the move, on a house of a few files."""

from __future__ import annotations

import ast
import tomllib
from textwrap import dedent

import pytest

from tests.house.check_moves import Book
from tests.house.move import Result, base_of, move
from tests.house.report import Tree

TABLES = """
base = "abc"
floors = ["core", "wire weights", "roles"]
[plan]
core = "units"
wire = "codec"
weights = "link store"
roles = "node"
[deviations]
[new]
[gone]
probes = "rates exist"
[turned]
[moves.protocol]
"""


def moved(files: dict[str, str], moves: str, *, rooms: tuple[str, ...] = ()) -> Result:
    """Move a house with these files by a book with these lines."""
    texts = {path: dedent(text) for path, text in files.items()}
    book = Book(tomllib.loads(TABLES + dedent(moves)))
    result = move(texts, book, base_of(Tree(texts)), rooms)
    for path, text in result.texts.items():
        if path.endswith(".py"):
            ast.parse(text, path)
    return result


LANES = '''\
"""Lanes of a link."""

from __future__ import annotations

import os

from echo.protocol.units import A

# How many.
MAX = A  # at most
"""Of a `Lane`."""


class Lane:
    """One `Lane` of echo/protocol/lanes.py, see `echo.protocol.units`."""

    size: int = MAX


def _check(lane: Lane) -> Lane:
    return lane
'''

UNITS = '"""Units."""\n\nimport re\n\nA = 1\n\n\ndef _check() -> None:\n    re.compile("")\n'


def test_parts_are_merged_in_order_with_their_comments_and_renamed() -> None:
    files = {"echo/protocol/lanes.py": LANES, "echo/protocol/units.py": UNITS}
    moves = 'lanes = ["weights/link", "Lane -> :Stripe"]\nunits = "weights/link"'
    result = moved(files, moves)
    text = result.texts["echo/weights/link.py"]
    assert text.index("A = 1") < text.index("# How many.\nMAX = A  # at most\n")
    assert '"""Of a `Stripe`."""' in text
    assert "class Stripe:" in text
    assert "One `Stripe` of echo/weights/link.py, see `echo.weights.link`." in text
    assert "def _check(lane: Stripe) -> Stripe:" in text
    assert "def _check_units() -> None:" in text, "two things have one name"
    assert text.startswith('"""Lanes of a link."""'), "the larger part has the word"
    assert "# --- Units ---" in text
    assert "import os" not in text, "nothing uses it"
    assert set(result.gone) == set(files)
    assert result.moved == {"echo/protocol/lanes.py": "echo/weights/link.py"}
    assert result.texts["echo/weights/__init__.py"] == ""


USER = """\
import sys

from echo.protocol import lanes
from echo.protocol.lanes import Lane, _check


def f(monkeypatch, stripe: Lane) -> None:
    def g(Lane: int) -> int:
        return Lane

    monkeypatch.setattr(lanes, "MAX", 2)
    monkeypatch.setattr("echo.protocol.lanes.MAX", 2)
    print(f"{lanes.MAX} {Lane.size}", _check)
"""


def test_uses_follow_by_what_they_mean_and_not_by_their_letters() -> None:
    files = {
        "echo/protocol/lanes.py": LANES,
        "echo/protocol/units.py": UNITS,
        "tests/test_lanes.py": USER,
        "pyproject.toml": 'lanes = "echo.protocol.lanes:Lane"',
    }
    moves = """
        lanes = ["weights/link", "Lane -> :Stripe", "MAX -> core/units:LIMIT"]
        units = "core/units"
    """
    result = moved(files, moves)
    text = result.texts["tests/test_lanes.py"]
    assert "from echo.weights.link import Stripe, _check\n" in text
    assert "def g(Lane: int) -> int:\n        return Lane" in text
    assert 'setattr(link, "LIMIT", 2)' in text, "those who read it are in link"
    assert 'setattr("echo.weights.link.LIMIT", 2)' in text
    assert "from echo.core.units import LIMIT\n" in text
    assert 'print(f"{LIMIT} {Stripe.size}", _check)' in text
    assert result.texts["pyproject.toml"] == 'lanes = "echo.weights.link:Stripe"'


def test_a_room_moves_alone_and_the_rest_later() -> None:
    files = {"echo/protocol/lanes.py": LANES, "echo/protocol/units.py": UNITS}
    moves = 'lanes = ["weights/link", "Lane -> :Stripe"]\nunits = "core/units"'
    book = Book(tomllib.loads(TABLES + moves))
    base = base_of(Tree(files))
    first = move(files, book, base, ["core"])
    assert "from echo.core.units import A\n" in first.texts["echo/protocol/lanes.py"]
    left = {path: text for path, text in (files | first.texts).items() if path not in first.gone}
    second = move(left, book, base)
    assert "class Stripe" in second.texts["echo/weights/link.py"]
    assert "echo/core/units.py" not in second.texts, "it is there already"
    done = {p: text for p, text in (left | second.texts).items() if p not in second.gone}
    assert move(done, book, base).texts == {}


@pytest.mark.parametrize("room", ["weights/store", "roles/node"])
def test_what_would_make_a_circle_or_point_upward_stays(room: str) -> None:
    files = {
        "echo/protocol/a.py": "from echo.protocol.b import g\n\n\ndef f(): g()\n\n\ndef h(): ...\n",
        "echo/protocol/b.py": "def g(): ...\n",
        "echo/protocol/c.py": "from echo.protocol.a import h\n\n\ndef i(): h()\n",
    }
    moves = f'a = "weights/link"\nb = "{room}"\nc = "{room}"'
    result = moved(files, moves)
    placed = files | result.texts
    texts = {path: text for path, text in placed.items() if path not in result.gone}
    assert "echo/weights/link.py" in texts or "echo/protocol/a.py" in texts
    assert "held back" in result.work.text()
    for path, text in texts.items():
        if path.startswith("echo/weights/link"):
            assert "roles" not in text


def test_what_the_book_does_not_know_stays_with_its_file_and_is_listed() -> None:
    files = {"echo/protocol/units.py": "A = 1\n"}
    book = Book(tomllib.loads(TABLES + 'units = "core/units"'))
    now = {"echo/protocol/units.py": "A = 1\nB = 2\n", "echo/protocol/new.py": "C = 3\n"}
    result = move(now, book, base_of(Tree(files)))
    assert "B = 2" in result.texts["echo/core/units.py"]
    assert "echo/protocol/new.py" not in result.gone
    assert "protocol/units: B -> core/units" in result.work.text()
    assert "protocol/new" in result.work.text()


def test_what_becomes_part_of_another_or_is_divided_keeps_its_name() -> None:
    files = {
        "echo/protocol/a.py": "class Asking:\n    x = 1\n    y = 2\n\n\nclass D: ...\n",
        "echo/protocol/b.py": "def take(): ...\n\n\nOLD = 1\n",
    }
    moves = """
        a = ["weights/link", "Asking -> :Receiver", "D -> weights/store:E + roles/node"]
        b = ["weights/link", "take -> :Receiver", "OLD -> gone:probes"]
    """
    result = moved(files, moves)
    assert "class Receiver:" in result.texts["echo/weights/link.py"]
    assert "def take()" in result.texts["echo/weights/link.py"]
    assert "OLD = 1" in result.texts["echo/weights/link.py"]
    assert "class D" in result.texts["echo/weights/store.py"]
    text = result.work.text()
    assert "take (from protocol/b) becomes part of Receiver" in text
    assert "D -> weights/store:E + roles/node" in text
    assert "protocol/b (gone:probes): OLD" in text


def test_the_same_definition_twice_becomes_one() -> None:
    log = "import logging\n\nlog = logging.getLogger(__name__)\n\n\n"
    files = {
        "echo/protocol/a.py": log + "def f(): log.info('a')\n",
        "echo/protocol/b.py": log + "def g(): log.info('b')\n",
    }
    result = moved(files, 'a = "wire/codec"\nb = "wire/codec"')
    assert result.texts["echo/wire/codec.py"].count("getLogger") == 1
