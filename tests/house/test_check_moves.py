"""The address book is complete, and each check of it finds what is planted."""

from __future__ import annotations

import subprocess
import tomllib
from textwrap import dedent

import pytest

from tests.house import check_moves
from tests.house.check_moves import Book
from tests.house.report import REPOSITORY, Tree, tree_at

TABLES = """
base = "abc"
floors = ["core", "wire weights", "roles"]
[plan]
core = "units"
weights = "link store"
wire = "codec"
roles = "node"
[deviations]
[new]
[gone]
probes = "rates exist"
[turned]
[moves.top]
units = "core/units"
[moves.protocol]
"""

UNITS = {"units": "A = 1"}


def book(moves: str = "", **tables: str) -> Book:
    """Return a book with these moves of protocol/, and these entries in other tables."""
    text = TABLES + dedent(moves)
    for name, entry in tables.items():
        text = text.replace(f"[{name}]", f"[{name}]\n{entry}")
    return Book(tomllib.loads(text))


def tree(files: dict[str, str] | None = None) -> Tree:
    files = UNITS | (files or {})
    return Tree({f"echo/{name}.py": dedent(text) for name, text in files.items()})


LANES = {"protocol/lanes": "class Lane: ...\nMAX = 1\n_x = 2"}


def test_a_complete_book_has_no_problems() -> None:
    moves = 'lanes = ["Lane -> weights/link:Stripe + roles/node", "MAX _x -> gone:probes"]'
    assert list(check_moves.problems(book(moves), tree(LANES))) == []


@pytest.mark.parametrize(
    ("moves", "complaint"),
    [
        ("", "protocol/lanes: not in the book"),
        ('lanes = ["Lane -> weights/link"]', "protocol/lanes: MAX has no address"),
        ('lanes = ["core/units", "Mane -> wire/codec"]', "Mane is not defined there"),
        ('lanes = "weights/lane"', "weights/lane is neither in the plan nor a deviation"),
        ('lanes = "gone:no"', "gone:no gives no reason"),
        ('lanes = "wire/codec"\nlinks = "wire/codec"', "protocol/links: not a file of abc"),
    ],
)
def test_what_is_missing_or_cannot_be_is_found(moves: str, complaint: str) -> None:
    assert complaint in "\n".join(check_moves.problems(book(moves), tree(LANES)))


def test_a_deviation_with_its_reason_is_an_address() -> None:
    moves = book('lanes = "weights/lane"', deviations='"weights/lane" = "beautiful"')
    assert list(check_moves.problems(moves, tree(LANES))) == []


def test_files_and_reasons_of_no_use_are_found() -> None:
    found = list(check_moves.unused(book('lanes = "weights/link"', new='"wire/codec" = "new"')))
    assert found == [
        "roles/node: nothing moves there",
        "weights/store: nothing moves there",
        "gone.probes: nothing goes for it",
    ]


@pytest.mark.parametrize(
    ("files", "moves", "complaint"),
    [
        (LANES, 'lanes = "weights/link"', "protocol/lanes: Lane is Lane in the house, with 'lane'"),
        (
            {"protocol/a": "X = 1", "protocol/b": "X = 1"},
            'a = "weights/link"\nb = "weights/link"',
            "weights/link: X comes from protocol/a and protocol/b",
        ),
        (
            {"protocol/a": "class C: ...", "protocol/b": "class C: ..."},
            'a = "weights/link"\nb = "wire/codec"',
            "class C is in weights/link and wire/codec",
        ),
    ],
)
def test_names_that_the_house_may_not_have_are_found(
    files: dict[str, str], moves: str, complaint: str
) -> None:
    assert list(check_moves.clashes(book(moves), tree(files))) == [complaint]


def test_definitions_may_become_one_if_the_book_says_so() -> None:
    files = {"protocol/a": "class C: ...", "protocol/b": "class D: ..."}
    moves = 'a = "weights/link:C"\nb = "weights/link:C"'
    assert list(check_moves.clashes(book(moves), tree(files))) == []


USES = {
    "protocol/a": "from echo.protocol.b import D\nfrom echo.protocol import c\ndef f(d: D): c.g()",
    "protocol/b": "class D: ...",
    "protocol/c": "def g(): ...",
}


@pytest.mark.parametrize("room", ["weights/link", "roles/node"])
def test_uses_upward_and_across_a_floor_are_found(room: str) -> None:
    moves = f'a = "wire/codec"\nb = "{room}"\nc = "core/units"'
    [found] = check_moves.upward(book(moves), tree(USES))
    assert found == f"wire/codec uses D of {room}"


def test_uses_are_followed_through_files_that_pass_a_name_on() -> None:
    files = USES | {
        "protocol/a": "from echo.protocol.p import D as E\ndef f(d: E): ...",
        "protocol/p": "from echo.protocol.b import D as D",
    }
    moves = 'a = "wire/codec"\nb = "roles/node"\nc = "core/units"\np = "core/units"'
    [found] = check_moves.upward(book(moves), tree(files))
    assert found == "wire/codec uses D of roles/node"


def test_what_is_divided_is_used_where_one_of_its_parts_is() -> None:
    moves = 'a = "wire/codec"\nb = "roles/node + wire/codec"\nc = "core/units"'
    assert list(check_moves.upward(book(moves), tree(USES))) == []


def test_a_use_that_the_house_turns_round_is_left_alone_and_needed() -> None:
    moves = 'a = "wire/codec"\nb = "roles/node"\nc = "core/units"'
    turned = book(moves, turned='"wire/codec D" = "why"\n"wire/codec g" = "why"')
    assert list(check_moves.upward(turned, tree(USES))) == []
    assert list(check_moves.needless(turned, tree(USES))) == []
    turned.turned["wire/codec nothing"] = "why"
    [found] = check_moves.needless(turned, tree(USES))
    assert found == "turned: nothing needs 'wire/codec nothing'"


def test_files_that_would_import_each_other_are_found() -> None:
    files = {
        "protocol/a": "from echo.protocol.b import g\ndef f(): g()\ndef h(): ...",
        "protocol/b": "from echo.protocol.a import h\ndef g(): h()",
    }
    moves = 'a = "weights/link"\nb = "weights/store"'
    [found] = check_moves.circles(book(moves), tree(files))
    assert "weights/link" in found
    assert "weights/store" in found
    divided = book('a = ["f -> weights/link", "h -> core/units"]\nb = "weights/store"')
    assert list(check_moves.circles(divided, tree(files))) == []


def test_definitions_are_looked_for_where_the_book_says() -> None:
    moves = book(
        'lanes = ["weights/link", "_x -> wire/codec", "Lane -> :Stripe", "MAX -> gone:probes"]'
    )
    base = tree(LANES)
    assert list(check_moves.undone(moves, base, base)) == [
        "protocol/lanes: Lane is not Stripe in weights/link",
        "protocol/lanes: Lane is still there",
        "protocol/lanes: MAX is still there",
        "units: A is not A in core/units",
        "units: A is still there",
    ]
    done = Tree({"echo/core/units.py": "A = 1", "echo/weights/link.py": "class Stripe: ..."})
    assert list(check_moves.undone(moves, base, done)) == []


@pytest.mark.slow
def test_the_address_book_is_complete() -> None:
    real = check_moves.read_book()
    command = ["git", "-C", str(REPOSITORY), "cat-file", "-e", f"{real.base}^{{commit}}"]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip(f"this clone has no commit {real.base}")
    assert check_moves.faults(real, tree_at(real.base)) == []
