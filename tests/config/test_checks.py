"""Rules that join several keys: deadlock, patience, options without effect, roles."""

from __future__ import annotations

import pytest

from echo.config.load import parse_config
from echo.errors import ConfigError


def problems_of(*overrides: str, role: str | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config({}, overrides, role)
    return str(caught.value)


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_a_publish_period_that_would_deadlock(max_staleness: int) -> None:
    bound = f"sync.max_staleness={max_staleness}"
    parse_config({}, [bound, f"sync.publish_period={max_staleness + 1}"])
    text = problems_of(bound, f"sync.publish_period={max_staleness + 2}")
    assert (
        f"at most sync.max_staleness + 1 = {max_staleness + 1}, or the run would deadlock" in text
    )


def test_auto_never_deadlocks() -> None:
    config, _ = parse_config({}, ["sync.max_staleness=0", "sync.publish_period=auto"])
    assert config.sync.initial_publish_period == 1


@pytest.mark.parametrize("key", ["dead_after_s", "lease_timeout_s"])
def test_patience_is_at_least_two_heartbeats(key: str) -> None:
    parse_config({}, ["network.heartbeat_s=1s", f"network.{key}=2s"])
    text = problems_of("network.heartbeat_s=1s", f"network.{key}=1.9s")
    assert f'network.{key} = "1.9s": must be at least twice network.heartbeat_s (1 s)' in text


def test_a_window_holds_two_chunks() -> None:
    parse_config({}, ["network.chunk_bytes=4MiB"])
    text = problems_of("network.chunk_bytes=5MiB")
    assert "network.window_bytes = 8388608 (default): must be at least twice" in text


def test_a_group_fits_into_a_message() -> None:
    # 60 MiB / (100 rollouts x 17 bytes) = 37008.9 tokens
    parse_config({}, ["batch.group_size=100", "sampling.max_completion_tokens=37008"])
    text = problems_of("batch.group_size=100", "sampling.max_completion_tokens=37009")
    assert "sampling.max_completion_tokens = 37009: makes groups of up to 60 MiB" in text
    assert "at most 37008 tokens" in text


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["metrics.wandb_project=demo"], "metrics.wandb is false"),
        (["ui.live=off", "ui.refresh_per_s=2"], 'ui.live is "off"'),
        (["worker.advertise=tcp://a:1"], "worker.listen is not set"),
        (["eval.interval_steps=0", "eval.num_prompts=64"], "eval.interval_steps = 0 switches"),
        (["model.name=./model", "model.revision=main"], "model.name is a directory"),
        (["model.name=/model", "model.cache_dir=/c"], "model.name is a directory"),
    ],
)
def test_an_option_without_effect_is_refused(overrides: list[str], why: str) -> None:
    text = problems_of(*overrides)
    assert f"has no effect: {why}" in text
    assert overrides[-1].partition("=")[0] in text


def test_options_with_effect_and_defaults_are_not_refused() -> None:
    parse_config({}, ["metrics.wandb=true", "metrics.wandb_project=demo"])
    parse_config({}, ["metrics.wandb_project=echo", "ui.live=off"])
    parse_config({}, ["model.name=org/model", "model.revision=main"])
    parse_config({}, ["worker.listen=tcp://0.0.0.0:1", "worker.advertise=tcp://a:1"])


@pytest.mark.parametrize("role", ["worker", "relay"])
def test_a_child_needs_an_address(role: str) -> None:
    text = problems_of(role=role)
    assert f"{role}.connect = [] (default): the {role} needs at least one address" in text
    assert f"--set {role}.connect=tcp://" in text
    parse_config({}, [f"{role}.connect=tcp://a:1"], role)


def test_the_learner_needs_a_model() -> None:
    assert "model.name: the learner needs it" in problems_of(role="learner")
    parse_config({}, ["model.name=org/model"], "learner")


def test_no_role_asks_for_nothing() -> None:
    parse_config({})


def test_nobody_connects_to_itself() -> None:
    text = problems_of("relay.connect=tcp://127.0.0.1:7701", role="relay")
    assert "tcp://127.0.0.1:7701 is this relay's own address" in text
