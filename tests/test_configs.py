"""Every file under configs/ loads for every role, without a name that is not ours."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from echo.config.fields import ROLES, Role
from echo.config.load import dry_run_text, load_config

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.toml"))
# Fleets and scenarios are other formats: tests/config/test_fleet.py, tests/cli/test_sim.py.
CONFIGS = [path for path in CONFIGS if not path.name.startswith(("fleet-", "scenario-"))]


def test_there_are_files_to_check() -> None:
    names = {path.name for path in CONFIGS}
    assert names >= {"quickstart.toml", "countdown.toml", "gsm8k.toml", "two-machines.toml"}


def files_with_roles() -> list[tuple[str, Role]]:
    """Each file with the roles it describes: relays are optional."""
    return [
        (path.name, role)
        for path in CONFIGS
        for role in ROLES
        if role != "relay" or "relay" in tomllib.loads(path.read_text(encoding="utf-8"))
    ]


@pytest.mark.parametrize(("name", "role"), files_with_roles())
def test_it_loads_and_can_be_described(name: str, role: Role) -> None:
    config = load_config(CONFIGS[0].with_name(name), role=role)
    assert f"would start: a {role}" in dry_run_text(config, role)


def test_the_quickstart_is_the_measured_recipe() -> None:
    config = load_config(CONFIGS[0].with_name("quickstart.toml"), role="learner")
    assert config.task.kind == "addition"
    assert (config.batch.group_size, config.batch.groups_per_step) == (8, 32)
    assert (config.sync.max_staleness, config.sync.publish_period) == (3, 1)
    assert (config.optimizer.learning_rate, config.optimizer.warmup_steps) == (3e-4, 10)
    assert (config.run.max_steps, config.sampling.max_completion_tokens) == (100, 24)
    assert (config.optimizer.weight_decay, config.eval.interval_steps) == (0.0, 20)
    assert config.learner.listen == "tcp://127.0.0.1:7700"
    assert config.relay.listen == "tcp://127.0.0.1:7701"
    assert config.worker.connect == (config.relay.listen,)
