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


@pytest.mark.parametrize(
    ("good", "bad", "text"),
    [
        *[
            (
                [f"sync.max_staleness={bound}", f"sync.publish_period={bound + 1}"],
                f"sync.publish_period={bound + 2}",
                f"at most sync.max_staleness + 1 = {bound + 1}, or the run would deadlock",
            )
            for bound in (0, 1, 3)
        ],
        (
            ["sync.max_staleness=6", "sync.adaptive=true", "sync.min_staleness=6"],
            "sync.min_staleness=7",
            "must be at most sync.max_staleness = 6",
        ),
        (
            ["batch.groups_per_step=4", "batch.minibatches_per_step=4"],
            "batch.minibatches_per_step=5",
            "must be at most batch.groups_per_step = 4: groups stay whole",
        ),
        (
            ["sampling.max_completion_tokens=64", "loss.overlong_buffer_tokens=64"],
            "loss.overlong_buffer_tokens=65",
            "must be at most sampling.max_completion_tokens = 64",
        ),
        (
            ["sync.max_staleness=3", "rollout.over_submission=2"],
            "sync.max_staleness=0",
            "has no effect: with sync.max_staleness = 0 what the stop leaves unfinished is too old",
        ),
        (
            ["rollout.exact_version=true", "sync.max_staleness=3"],
            "rollout.over_submission=2",
            "must be 1 with rollout.exact_version",
        ),
        (
            ["rollout.exact_version=true"],
            "agent.listen=tcp://127.0.0.1:0",
            "newer weights would wait",
        ),
        (["rollout.exact_version=true"], "rollout.stale_tokens=mask", "has no use"),
        *[
            (
                ["network.heartbeat_s=1s", f"network.{key}=2s"],
                f"network.{key}=1.9s",
                f'{key} = "1.9s": must be at least twice network.heartbeat_s (1 s)',
            )
            for key in ("dead_after_s", "lease_timeout_s")
        ],
        (
            ["network.chunk_bytes=1MiB"],
            "network.chunk_bytes=2MiB",
            "clearly more CPU; lower it to 1MiB",
        ),
        # 60 MiB / (100 rollouts x 17 bytes) = 37008.9 tokens
        (
            ["batch.group_size=100", "sampling.max_completion_tokens=37008"],
            "sampling.max_completion_tokens=37009",
            "makes groups of up to 60 MiB with batch.group_size = 100; a group travels",
        ),
        (["sync.max_staleness=6"], "sync.min_staleness=1", "sync.adaptive is false"),
        (
            ["reference.kl_coef=0.1", "reference.kl_estimator=k1"],
            "reference.kl_coef=0",
            "has no effect: reference.kl_coef = 0",
        ),
        (
            ["metrics.sinks=wandb", "metrics.wandb_project=demo"],
            "metrics.sinks=[]",
            'has no effect: metrics.sinks has no "wandb"',
        ),
        ([], "worker.advertise=tcp://a:1", "has no effect: worker.listen is not set"),
        (
            ["eval.num_prompts=64"],
            "eval.interval_steps=0",
            "has no effect: eval.interval_steps = 0 switches",
        ),
        (
            ["model.name=org/model", "model.revision=main"],
            "model.name=./model",
            "has no effect: model.name is a directory",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(good: list[str], bad: str, text: str) -> None:
    parse_config({}, good)
    said = problems_of(*good, bad)
    assert text in said
    assert any(override.partition("=")[0] in said for override in (*good, bad))


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


def test_options_with_effect_and_defaults_are_not_refused() -> None:
    parse_config({}, ["metrics.wandb_project=echo", "ui.live=off"])
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
