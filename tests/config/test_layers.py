"""Settings of one source: flattening and nesting undo each other; unknown keys find their match."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo.config.checks import Setting
from echo.config.load import flatten, nest, read_layer, read_override
from echo.config.schema import every_leaf
from echo.core.errors import nearest

VALUES = st.one_of(st.integers(), st.text(max_size=3), st.lists(st.integers(), max_size=2))
TABLES = st.recursive(
    st.dictionaries(st.text(max_size=3), VALUES, max_size=3),
    lambda inner: st.dictionaries(st.text(max_size=3), st.one_of(VALUES, inner), max_size=3),
    max_leaves=8,
)


@pytest.mark.slow
@given(TABLES)
def test_nesting_undoes_flattening(table: dict[str, Any]) -> None:
    settings = {path: Setting(value, "file") for path, value in flatten(table)}
    assert nest(settings) == table


def test_nesting_does_not_share_an_empty_table() -> None:
    default: dict[str, Any] = {}
    settings = {
        ("task", "options"): Setting(default, "default"),
        ("task", "options", "digits"): Setting(3, "--set"),
    }
    assert nest(settings) == {"task": {"options": {"digits": 3}}}
    assert default == {}


def test_every_key_is_known_to_its_layer() -> None:
    for leaf in every_leaf():
        layer = read_override(f"{leaf.key}=1")
        assert list(layer.settings) == [leaf.path]
        assert not layer.problems


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ({"batch": {"group_sise": 8}}, "unknown key; did you mean group_size?"),
        ({"batch": {"max_staleness": 8}}, "unknown key; did you mean sync.max_staleness?"),
        ({"batch": {"zebra": 8}}, "[batch] has group_size, groups_per_step"),
        ({"worker": {"max_grad_nrm": 8}}, "unknown key; did you mean optimizer.max_grad_norm?"),
        ({"network": {"heartbeat": 8}}, "unknown key; did you mean heartbeat_s?"),
        ({"learnr": {"listen": 8}}, "unknown section; did you mean [learner]?"),
        ({"max_stalenes": 8}, "unknown key; did you mean sync.max_staleness?"),
        ({"zebra": {"x": 8}}, "unknown section; there are [run], [model], [task]"),
        ({"zebra": 8}, "unknown key; there are [run], [model], [task]"),
        ({"batch": 8}, "this is a section, not a key; write [batch]"),
        ({"batch": {"group_size": {"x": 8}}}, "this key takes a plain value, not a table"),
        ({"profile": {"x": 8}}, "this key takes a plain value, not a table"),
    ],
)
def test_an_unknown_key_finds_its_match(table: dict[str, Any], text: str) -> None:
    layer = read_layer(table, "run.toml")
    (problem,) = layer.problems
    assert text in problem.text
    assert not layer.settings


def test_an_empty_section_is_fine_and_an_unknown_one_is_not() -> None:
    assert not read_layer({"learner": {}}, "run.toml").problems
    assert read_layer({"learnr": {}}, "run.toml").problems


@pytest.mark.parametrize("text", ["run.seed", "=3", ".seed=3", "run..seed=3", ""])
def test_not_an_override(text: str) -> None:
    (problem,) = read_override(text).problems
    assert problem.text == f'"{text}" is not an override; write section.key=value'


def test_nearest() -> None:
    assert nearest("gruop_size", ["group_size", "groups_per_step"]) == "group_size"
    assert nearest("zebra", ["group_size"]) is None
