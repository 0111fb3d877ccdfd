"""Rules that join several keys: deadlock, patience, options without effect, roles."""

from __future__ import annotations

import pytest

from echo.config.load import parse_config
from echo.core.errors import ConfigError

SECRET = "s" * 22
JOIN = f"tcp://10.0.0.5:7700#{'k' * 43}.{SECRET}.{'f' * 22}"


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


def test_the_adaptive_bound_lies_within_the_hard_one() -> None:
    hard = "sync.max_staleness=6"
    parse_config({}, [hard, "sync.adaptive=true", "sync.min_staleness=6"])
    text = problems_of(hard, "sync.adaptive=true", "sync.min_staleness=7")
    assert "must be at most sync.max_staleness = 6" in text
    assert "sync.adaptive is false" in problems_of(hard, "sync.min_staleness=1")


def test_a_step_has_a_group_for_each_of_its_minibatches() -> None:
    groups = "batch.groups_per_step=4"
    parse_config({}, [groups, "batch.minibatches_per_step=4"])
    text = problems_of(groups, "batch.minibatches_per_step=5")
    assert "must be at most batch.groups_per_step = 4: groups stay whole" in text


def test_unfinished_rollouts_within_the_bound() -> None:
    bound = "sync.max_staleness=3"
    parse_config({}, [bound, "rollout.over_submission=2"])
    on_policy = ["sync.max_staleness=0", "sync.publish_period=1"]
    assert "has no use with sync.max_staleness = 0" in problems_of(
        *on_policy, "rollout.over_submission=2"
    )


def test_an_exact_version_and_what_cannot_be_with_it() -> None:
    exact = "rollout.exact_version=true"
    parse_config({}, [exact])
    assert "must be 1 with rollout.exact_version" in problems_of(
        exact, "sync.max_staleness=3", "rollout.over_submission=2"
    )
    assert "newer weights would wait" in problems_of(exact, "agent.listen=tcp://127.0.0.1:0")
    assert "has no use" in problems_of(exact, "rollout.stale_tokens=mask")


def test_a_pull_without_any_effect() -> None:
    parse_config({}, ["reference.kl_coef=0.1", "reference.kl_estimator=k1"])
    text = problems_of("reference.name=base")
    assert "reference.name" in text
    assert "has no effect: reference.kl_coef = 0" in text


@pytest.mark.parametrize("key", ["dead_after_s", "lease_timeout_s"])
def test_patience_is_at_least_two_heartbeats(key: str) -> None:
    parse_config({}, ["network.heartbeat_s=1s", f"network.{key}=2s"])
    text = problems_of("network.heartbeat_s=1s", f"network.{key}=1.9s")
    assert f'network.{key} = "1.9s": must be at least twice network.heartbeat_s (1 s)' in text


def test_encrypted_chunks_fit_into_a_cache() -> None:
    parse_config({}, ["network.chunk_bytes=1MiB"])
    text = problems_of("network.chunk_bytes=2MiB")
    assert "network.chunk_bytes = " in text
    assert "too much with security.curve = true" in text
    assert "clearly more CPU; lower it to 1MiB" in text


def test_a_join_string_is_for_encrypted_runs() -> None:
    text = problems_of(f'worker.connect=["{JOIN}"]', "security.curve=false")
    assert "security.curve = false" in text
    assert "is a join string; remove one of the two" in text
    assert "." + SECRET not in text


@pytest.mark.parametrize("key", ["security.join=keys/join", f"security.join={JOIN}"])
def test_a_join_string_says_where_to_connect(key: str) -> None:
    parse_config({}, [key], "worker")
    with pytest.raises(ConfigError, match=r"at least one address.*ECHO_JOIN"):
        parse_config({}, [key, "security.curve=false"], "worker")


def test_a_group_fits_into_a_message() -> None:
    # 60 MiB / (100 rollouts x 17 bytes) = 37008.9 tokens
    parse_config({}, ["batch.group_size=100", "sampling.max_completion_tokens=37008"])
    text = problems_of("batch.group_size=100", "sampling.max_completion_tokens=37009")
    assert "sampling.max_completion_tokens = 37009: makes groups of up to 60 MiB" in text
    assert "at most 37008 tokens" in text


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["metrics.wandb_project=demo"], 'metrics.sinks has no "wandb"'),
        (["worker.advertise=tcp://a:1"], "worker.listen is not set"),
        (["eval.interval_steps=0", "eval.num_prompts=64"], "eval.interval_steps = 0 switches"),
        (["model.name=./model", "model.revision=main"], "model.name is a directory"),
    ],
)
def test_an_option_without_effect_is_refused(overrides: list[str], why: str) -> None:
    text = problems_of(*overrides)
    assert f"has no effect: {why}" in text
    assert overrides[-1].partition("=")[0] in text


def test_options_with_effect_and_defaults_are_not_refused() -> None:
    parse_config({}, ["metrics.sinks=wandb", "metrics.wandb_project=demo"])
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


def test_nobody_connects_to_itself() -> None:
    text = problems_of("relay.connect=tcp://127.0.0.1:7701", role="relay")
    assert "tcp://127.0.0.1:7701 is this relay's own address" in text


LEARNS = ("model.name=model",)


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["profile=wan", "sampling.top_p=0.95"], "sampling.top_p = 1, or let loss.clip_low"),
        (["profile=wan", "sampling.top_k=20"], "loss.clip_low = 0.02 learns nothing from bad"),
        (["loss.kind=gepo", "loss.clip_low=0.04", "sampling.top_p=0.95"], "reach down to 0.95"),
        (["loss.geometric_low=0.99", "sampling.top_p=0.95"], "loss.geometric_low = 0.99"),
        (["sampling.top_p=0.7"], "from bad rollouts below 0.8"),
    ],
)
def test_truncated_sampling_beside_a_narrow_range(overrides: list[str], text: str) -> None:
    assert text in problems_of(*LEARNS, *overrides, role="learner")
    parse_config({}, overrides)  # a worker does not know the loss
    parse_config({}, [*LEARNS, *overrides[:-1]], "learner")


def test_truncated_sampling_beside_a_wide_range() -> None:
    for kind in ("grpo", "gepo", "cispo", "m2po", "gspo loss.clip_low=0.1"):
        overrides = [*LEARNS, *f"loss.kind={kind}".split()]
        parse_config({}, [*overrides, "sampling.top_p=0.95", "sampling.top_k=20"], "learner")
