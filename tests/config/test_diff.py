"""Differences of two configurations, each classed with its reason."""

from __future__ import annotations

import pytest

from echo.config.load import _SAFE, _UNSAFE, classify, diff_configs, parse_config
from echo.config.schema import every_leaf, find_leaf, sections


def test_equal_configurations_do_not_differ() -> None:
    assert diff_configs(parse_config({}), parse_config({})) == []


@pytest.mark.parametrize(
    ("override", "is_safe"),
    [
        ("run.max_steps=200", True),
        ("optimizer.learning_rate=1e-4", True),
        ("sync.max_staleness=1", True),
        ("learner.micro_batch_tokens=64", True),
        ("batch.group_size=4", False),
        ("model.name=org/other", False),
        ("task.options.digits=4", False),
        ("sampling.temperature=0.5", False),
        ("learner.listen=tcp://0.0.0.0:1", False),
        ("run.seed=9", False),
    ],
)
def test_a_change_is_classed_with_its_reason(override: str, is_safe: bool) -> None:
    old, new = parse_config({}), parse_config({}, [override])
    (change,) = diff_configs(old, new)
    assert override.startswith(change.key)
    assert (change.is_safe, bool(change.why)) == (is_safe, True)
    assert str(change).startswith("safe" if is_safe else "UNSAFE")


def test_a_line_shows_both_values() -> None:
    old, new = parse_config({}), parse_config({}, ["loss.dual_clip=false"])
    (change,) = diff_configs(old, new)
    assert str(change) == "safe   loss.dual_clip: 3.0 -> false (computed anew for every batch)"


def test_a_profile_lists_what_it_changes() -> None:
    old, new = parse_config({}), parse_config({"profile": "wan"})
    keys = [change.key for change in diff_configs(old, new)]
    assert keys[0] == "profile"
    assert {"sync.max_staleness", "batch.group_size", "network.heartbeat_s"} < set(keys)


def test_every_key_is_classed_and_no_other() -> None:
    for leaf in every_leaf():
        assert classify(leaf.key)[1]
    for key in (*_UNSAFE, *_SAFE):
        assert key in sections() or find_leaf(tuple(key.split("."))), key
    assert not set(_UNSAFE) & set(_SAFE)
