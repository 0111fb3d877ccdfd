"""Help and dry run: every key appears, and the printed configuration loads again."""

from __future__ import annotations

import tomllib

import pytest

from echo.config.fields import ROLES, Role
from echo.config.load import dry_run_text, parse_config, resolved, resolved_lines, schema_help
from echo.config.memory.budget import Machine, memory_budget
from echo.config.schema import every_leaf
from tests.config.test_memory import TINY


@pytest.mark.parametrize("role", [*ROLES, None])
def test_help_has_every_key_of_the_role_and_no_other(role: Role | None) -> None:
    keys = set()
    section = ""
    for line in schema_help(role).splitlines():
        if line.startswith("["):
            section = line[1:].partition("]")[0] + "."
        elif line.startswith("  ") and line[2] != " ":
            keys.add(section + line.split()[0])
    assert keys == {leaf.key for leaf in every_leaf() if role is None or role in leaf.roles}


def test_help_shows_values_defaults_and_profiles() -> None:
    text = schema_help("learner")
    assert "max_staleness = 2 (lan), 6 (wan)" in text
    assert 'dtype = "bfloat16"' in text
    flowing = " ".join(text.split())
    assert 'Takes one of "bfloat16", "float16", "float32".' in flowing
    assert "Takes a number, above 0, at most 1 or false." in flowing
    assert max(len(line) for line in text.splitlines()) <= 100


def test_the_printed_configuration_loads_again_and_says_where_each_value_came_from() -> None:
    overrides = ["task.options.words=['a\"b', 'ü']", "run.name=x y", "loss.veto=1e-3"]
    table = {"profile": "wan", "batch": {"group_size": 4}}
    config = parse_config(table, overrides, source="run.toml")
    again = parse_config(tomllib.loads("\n".join(resolved_lines(config))))
    assert resolved(again) == resolved(config)
    lines = {line.split(" = ")[0]: line for line in resolved_lines(config)}
    sources = {"group_size": "run.toml", "veto": "--set", "max_staleness": "profile wan"}
    for key, source in {**sources, "betas": "default", "chunk_bytes": "default, 1 MiB"}.items():
        assert lines[key].endswith(f"# {source}")


def test_a_dry_run_says_what_would_start() -> None:
    table = {"model": {"name": "org/model"}, "profile": "wan"}
    config = parse_config(table, role="learner")
    budget = memory_budget(config, "learner", TINY, Machine(host_bytes=2**20))
    text = dry_run_text(config, "learner", budget=budget, notices=["look"])
    first, memory, notice, _, profile = text.splitlines()[:5]
    assert "a learner of org/model on tcp://127.0.0.1:7700, 100 steps of 512 rollouts" in first
    assert "publish period auto, 5 until measured" in first
    assert memory == f"memory: DOES NOT FIT: {budget.line}"
    assert notice == "notice: look"
    assert profile.startswith('profile = "wan"')
    assert "[worker]" not in text


def test_a_dry_run_of_the_children() -> None:
    overrides = ["worker.connect=['tcp://a:1', 'tcp://b:2']", "relay.connect=tcp://a:1"]
    worker, relay = (
        dry_run_text(parse_config({}, overrides), role).splitlines()[0]
        for role in ("worker", "relay")
    )
    assert worker.endswith(
        "a worker that connects to tcp://a:1, then tcp://b:2 and serves no weights to others"
    )
    assert relay.endswith("a relay that connects to tcp://a:1 and serves on tcp://127.0.0.1:7701")
