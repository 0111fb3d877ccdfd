"""What a worker inherits, and the contradictions it reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from echo.config.load import (
    apply_inherited,
    check_inherited,
    inherited_settings,
    keys_set_by_user,
    parse_config,
)
from echo.config.schema import find_leaf, inherited_keys
from echo.core.errors import ConfigError

LEARNER = ("profile=wan", "sampling.temperature=0.9", "task.options.digits=3", "run.seed=5")


def test_the_settings_are_plain_values_of_real_keys() -> None:
    settings = inherited_settings(parse_config({}, LEARNER))
    assert json.loads(json.dumps(settings)) == settings
    assert set(settings) == set(inherited_keys())
    assert all(find_leaf(tuple(key.split("."))) for key in settings)
    assert settings["sampling.temperature"] == 0.9
    assert settings["sync.max_staleness"] == 6
    assert settings["task.options"] == {"digits": 3}
    assert settings["model.chat_template"] is None


def test_a_worker_with_only_an_address_takes_them_all() -> None:
    settings = inherited_settings(parse_config({}, LEARNER))
    worker = parse_config({}, ["worker.connect=tcp://a:1"], "worker")
    assert check_inherited(worker, keys_set_by_user(worker), settings) == []
    effective = apply_inherited(worker, settings)
    assert inherited_settings(effective) == settings
    assert effective.worker.connect == ("tcp://a:1",)
    assert effective.sources["sampling.temperature"] == "learner"
    assert effective.sources["worker.connect"] == "--set"


def test_a_contradiction_names_both_values() -> None:
    settings = inherited_settings(parse_config({}, LEARNER))
    table = {"sampling": {"temperature": 1.0}, "run": {"seed": 5}}
    worker = parse_config(table, source="worker.toml")
    (line,) = check_inherited(worker, keys_set_by_user(worker), settings)
    assert line.startswith("worker.toml: sampling.temperature = 1.0 contradicts the learner")
    assert "uses 0.9; remove it here" in line


def test_one_file_for_both_roles_never_contradicts() -> None:
    config = parse_config({"sampling": {"temperature": 0.7}, "batch": {"group_size": 4}})
    assert check_inherited(config, keys_set_by_user(config), inherited_settings(config)) == []


def test_the_chat_template_travels_as_text(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}" * 20, encoding="utf-8")
    config = parse_config({"model": {"chat_template": str(template)}})
    settings = inherited_settings(config)
    assert settings["model.chat_template"] == "{{ messages }}" * 20
    template.write_text("{{ other }}", encoding="utf-8")
    (line,) = check_inherited(config, keys_set_by_user(config), settings)
    assert 'model.chat_template = "{{ other }}" contradicts' in line
    assert "..." in line, "a long template is cut"
    template.unlink()
    with pytest.raises(ConfigError, match=r"model\.chat_template = .*cannot be read"):
        inherited_settings(config)


def test_a_chat_template_that_only_the_learner_has_contradicts_nothing() -> None:
    """One file serves all machines, and the template's text comes from the learner."""
    worker = parse_config({"model": {"chat_template": "only/there.jinja"}})
    settings = inherited_settings(parse_config({})) | {"model.chat_template": "{{ messages }}"}
    assert check_inherited(worker, keys_set_by_user(worker), settings) == []


def test_settings_that_do_not_fit_are_refused() -> None:
    worker = parse_config({})
    with pytest.raises(ConfigError, match=r"the learner's settings: batch\.group_size = 1"):
        apply_inherited(worker, {"batch.group_size": 1})
