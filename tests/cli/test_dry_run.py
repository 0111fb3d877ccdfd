from __future__ import annotations

from pathlib import Path

import pytest

from echo.cli.dry_run import dry_run
from echo.config.load import parse_config
from echo.config.schema import ROLES, Role

ADDRESS = "tcp://10.0.0.1:7700"


@pytest.mark.parametrize("role", ROLES)
def test_each_role_has_one(tiny_model_dir: Path, role: Role) -> None:
    table = {
        "model": {"name": str(tiny_model_dir)},
        "worker": {"connect": ADDRESS, "device": "cpu"},
        "relay": {"connect": ADDRESS},
        "learner": {"device": "cpu"},
    }
    text = dry_run(parse_config(table, role=role)[0], role)
    assert role in text
    assert "profile" in text
    assert "not known here" not in text


def test_a_worker_without_a_model_says_when_the_budget_is_known() -> None:
    config, _ = parse_config({"worker": {"connect": ADDRESS}}, role="worker")
    assert "known once the learner has told" in dry_run(config, "worker")


def test_a_model_on_the_hub_is_not_downloaded() -> None:
    config, _ = parse_config({"model": {"name": "org/model"}}, role="learner")
    assert "memory budget: not known here" in dry_run(config, "learner")
