"""The field's names: accepted with a notice, explained where they have no counterpart."""

from __future__ import annotations

import pytest

from echo.config.aliases import _NAMES, _PLACES, _WITHOUT_COUNTERPART, explain_missing
from echo.config.leaves import find_leaf, leaves
from echo.config.load import parse_config
from echo.errors import ConfigError


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("num_generations=4", "batch.group_size", 4),
        ("batch.rollouts_per_example=4", "batch.group_size", 4),
        ("orchestrator.rollouts_per_example=4", "batch.group_size", 4),
        ("trainer.optim.lr=1e-4", "optimizer.learning_rate", 1e-4),
        ("lr=1e-4", "optimizer.learning_rate", 1e-4),
        ("learner.lr=1e-4", "optimizer.learning_rate", 1e-4),
        ("learning_rate=1e-4", "optimizer.learning_rate", 1e-4),
        ("trainer.max_steps=7", "run.max_steps", 7),
        ("max_steps=7", "run.max_steps", 7),
        ("max_grad_norm=2.0", "optimizer.max_grad_norm", 2.0),
        ("max_new_tokens=7", "sampling.max_completion_tokens", 7),
        ("sampling.max_completion_length=7", "sampling.max_completion_tokens", 7),
        ("max_off_policy_steps=7", "sync.max_staleness", 7),
        ("max_head_offpolicyness=7", "sync.max_staleness", 7),
        ("max_policy_age=7", "sync.max_staleness", 7),
        ("weight_sync_steps=2", "sync.publish_period", 2),
        ("output_dir=out", "run.dir", "out"),
        ("ckpt.interval=7", "checkpoint.interval_steps", 7),
        ("ckpt.keep_last=7", "checkpoint.keep_last", 7),
        ("eval.interval=7", "eval.interval_steps", 7),
        ("epsilon_high=0.3", "loss.clip_high", 0.3),
        ("beta=0.04", "reference.kl_coef", 0.04),
        ("trainer.kl_loss_coef=0.001", "reference.kl_coef", 0.001),
        ("loss_type=dapo", "loss.kind", "dapo"),
        ("policy_loss.loss_mode=gspo", "loss.kind", "gspo"),
        ("delta=4.0", "loss.dual_clip", 4.0),
        ("loss_agg_mode=sequence_mean", "loss.aggregation", "sequence_mean"),
        ("mask_truncated_completions=true", "loss.overlong_filter", True),
        ("actor.overlong_buffer_len=512", "loss.overlong_buffer_tokens", 512),
        ("off_policy_mask_threshold=1e-4", "loss.opsm", 1e-4),
        ("algorithm.rollout_correction.rollout_token_veto_threshold=1e-4", "loss.veto", 1e-4),
        ("wandb.name=demo", "run.name", "demo"),
        ("seed=7", "run.seed", 7),
    ],
)
def test_an_alias_is_read_with_a_notice(override: str, key: str, value: object) -> None:
    config, notices = parse_config({}, [override])
    section, name = key.split(".")
    assert getattr(getattr(config, section), name) == value
    assert notices == [f"--set: {override.partition('=')[0]} is read as {key}"]


def test_an_alias_may_reach_into_a_table() -> None:
    config, _ = parse_config({"enable_thinking": False})
    assert config.model.chat_template_kwargs == {"enable_thinking": False}


def test_our_own_names_give_no_notice() -> None:
    assert parse_config({"batch": {"group_size": 4}, "run": {"max_steps": 3}})[1] == []


def test_one_setting_under_two_names_must_agree() -> None:
    table = {"batch": {"group_size": 4}, "num_generations": 4}
    assert parse_config(table)[0].batch.group_size == 4
    with pytest.raises(ConfigError, match="num_generations = 8: contradicts batch"):
        parse_config({**table, "num_generations": 8})


def test_set_overrides_the_file_under_either_name() -> None:
    config, _ = parse_config({"batch": {"group_size": 4}}, ["num_generations=8"])
    assert config.batch.group_size == 8


def test_every_alias_leads_to_a_key_and_hides_none() -> None:
    for target in [*_NAMES.values(), *_PLACES.values()]:
        assert find_leaf(tuple(target.split("."))), target
    for alias in _PLACES:
        assert not find_leaf(tuple(alias.split("."))), alias


def test_a_name_is_either_an_alias_or_explained() -> None:
    names = {path[-1] for path in leaves()}
    assert not set(_WITHOUT_COUNTERPART) & (set(_NAMES) | names)


def test_explanations_name_keys_that_exist() -> None:
    assert "groups_per_step" in (explain_missing(("trainer", "batch_size")) or "")
    assert explain_missing(("batch", "zebra")) is None
    for text in _WITHOUT_COUNTERPART.values():
        for word in text.replace(",", " ").split():
            section, dot, name = word.partition(".")
            if dot and name:
                assert find_leaf((section, name)), text
