"""Rules that join several keys: deadlock, patience, options without effect, roles."""

from __future__ import annotations

import pytest

from echo.config.checks import likely_ids_of, max_tree_tokens
from echo.config.load import parse_config
from echo.core.errors import ConfigError

SECRET = "s" * 22
JOIN = f"tcp://10.0.0.5:7700#{'k' * 43}.{SECRET}.{'f' * 22}"


def problems_of(*overrides: str, role: str | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config({}, overrides, role)
    return str(caught.value)


EXACT = "rollout.exact_version=true sync.max_staleness=3"
BROKEN = {
    # What goes together, and what does not besides: what is said.
    "sync.max_staleness=0 sync.publish_period=1 | sync.publish_period=2": "_staleness + 1 = 1, or",
    "sync.max_staleness=3 sync.publish_period=4 | sync.publish_period=5": "_staleness + 1 = 4, or",
    "sync.max_staleness=6 sync.adaptive=true sync.min_staleness=6 | sync.min_staleness=7": "most",
    "batch.groups_per_step=4 batch.minibatches_per_step=4 | batch.groups_per_step=3": "stay whole",
    "loss.overlong_buffer_tokens=64 | sampling.max_completion_tokens=63": "must be at most sam",
    "sync.max_staleness=3 rollout.over_submission=2 | sync.max_staleness=0": "no effect: with syn",
    f"{EXACT} | rollout.over_submission=2": "must be 1 with rollout.exact_version",
    f"{EXACT} | agent.listen=tcp://127.0.0.1:0": "newer weights would wait",
    "reward.where=learner | agent.listen=tcp://127.0.0.1:0": "rewarded where they are served",
    f"{EXACT} | rollout.stale_tokens=mask": "has no use with rollout.exact_version",
    "network.heartbeat_s=1s network.dead_after_s=2s | network.dead_after_s=1.9s": "at least twice",
    "network.heartbeat_s=1s network.lease_timeout_s=2s | network.lease_timeout_s=1.9s": "t_s (1 s)",
    "network.chunk_bytes=1MiB | network.chunk_bytes=2MiB": "clearly more CPU; lower it to 1MiB",
    # 60 MiB / (100 rollouts x 17 bytes) = 37008.9 tokens
    "batch.group_size=100 sampling.max_completion_tokens=37008 | batch.group_size=101": "36642",
    # 60 MiB / (100 rollouts x (17 + 32 x 5) bytes) = 3554.5 tokens
    "batch.group_size=100 sampling.max_completion_tokens=3554 loss.kind=gspo | "
    "loss.score_centering=32 sampling.max_completion_tokens=3555": "at most 3554",
    # 2^22 / 1024 likely ids = 4096 tokens
    "batch.group_size=2 sampling.max_completion_tokens=4096 loss.kind=gspo "
    "loss.score_centering=1024 | sampling.max_completion_tokens=4097": "at most 4096 tokens",
    "loss.kind=gspo loss.score_centering=32 | sampling.top_p=0.9": "write sampling.top_p = 1",
    "loss.kind=cispo loss.score_centering=1 | sampling.min_p=0.1": "write sampling.min_p = 0",
    "sync.max_staleness=6 | sync.min_staleness=1": "sync.adaptive is false",
    "reference.kl_coef=0.1 reference.kl_estimator=k1 | reference.kl_coef=0": "no effect: refere",
    "metrics.sinks=wandb metrics.project=demo | metrics.sinks=[]": 'sinks has neither "wandb"',
    "ui.live=off | worker.advertise=tcp://a:1": "has no effect: worker.listen is not set",
    "eval.num_prompts=64 | eval.interval_steps=0": "no effect: eval.interval_steps = 0 switches",
    "model.name=org/model model.revision=main | model.name=./model": "no effect: model.name is a",
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_what_does_not_go_together_is_refused(case: str) -> None:
    good, bad = (side.split() for side in case.split("|"))
    parse_config({}, good)
    said = problems_of(*good, *bad)
    assert BROKEN[case] in said
    assert any(override.partition("=")[0] in said for override in (*good, *bad))


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
    parse_config({}, ["metrics.project=echo", "ui.live=off"])
    parse_config({}, ["worker.listen=tcp://0.0.0.0:1", "worker.advertise=tcp://a:1"])


@pytest.mark.parametrize("role", ["worker", "relay"])
def test_a_child_needs_an_address(role: str) -> None:
    text = problems_of(role=role)
    assert f"{role}.connect = [] (default): the {role} needs at least one address" in text
    assert f"--set {role}.connect=tcp://" in text
    parse_config({}, [f"{role}.connect=tcp://a:1"], role)
    assert "model.name: the learner needs it" in problems_of(role="learner")


def test_only_a_learner_needs_rollouts_to_compare() -> None:
    assert "must be at least 2" in problems_of(*LEARNS, "batch.group_size=1", role="learner")
    parse_config({}, ["worker.connect=tcp://a:1", "batch.group_size=1"], "worker")


def test_nobody_connects_to_itself() -> None:
    text = problems_of("relay.connect=tcp://127.0.0.1:7701", role="relay")
    assert "tcp://127.0.0.1:7701 is this relay's own address" in text


LEARNS = ("model.name=model",)


@pytest.mark.parametrize(
    "overrides",
    [
        ["profile=wan", "sampling.top_p=0.95"],
        ["profile=wan", "sampling.top_k=20"],
        ["profile=wan", "sampling.min_p=0.1"],
        ["loss.kind=gepo", "loss.clip_low=0.04", "sampling.top_p=0.95"],
        ["loss.geometric_low=0.99", "sampling.top_p=0.95"],
        ["sampling.top_p=0.7"],
    ],
)
def test_a_narrow_range_needs_the_ids_that_tokens_were_drawn_from(overrides: list[str]) -> None:
    assert parse_config({}, [*LEARNS, *overrides], "learner").needs_support
    assert not parse_config({}, [*LEARNS, *overrides[:-1]], "learner").needs_support


def test_a_wide_range_does_without_them() -> None:
    for kind in ("grpo", "gepo", "cispo", "m2po", "gspo loss.clip_low=0.1"):
        overrides = [*LEARNS, *f"loss.kind={kind}".split()]
        truncated = ["sampling.top_p=0.95", "sampling.top_k=20", "sampling.min_p=0.1"]
        assert not parse_config({}, [*overrides, *truncated], "learner").needs_support


def test_the_chains_of_a_rollout_have_no_more_likely_ids_than_a_rollout_may_have() -> None:
    agents = "agent.listen=tcp://127.0.0.1:0 agent.max_session_tokens=1000 batch.group_size=2"
    centered = "loss.kind=gspo loss.score_centering=1024 learner.micro_batch_tokens=16384"
    config = parse_config({}, f"{agents} {centered}".split())
    assert max_tree_tokens(config, likely_ids_of(config)) == 4096
    assert max_tree_tokens(config, 2048) == 2048
