"""The schema: every key is documented, and each kind of value refuses what it should."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from echo.config.load import parse_config
from echo.config.schema import PROFILES, every_leaf, preset_publish_period, show
from echo.core.errors import ConfigError
from echo.fleet.overlap import auto_publish_period


def test_every_key_has_help_and_profiles_list_the_same_keys() -> None:
    for leaf in every_leaf():
        assert leaf.help.endswith("."), leaf.key
        assert len(leaf.help) > 12, leaf.key
    keys = {leaf.key for leaf in every_leaf()}
    assert PROFILES["lan"].keys() == PROFILES["wan"].keys() <= keys


def test_an_evaluation_samples_as_the_training_but_for_its_own_settings() -> None:
    sampling = {"top_k": 5, "min_p": 0.1, "top_p": 0.5, "temperature": 0.7, "min_tokens": 2}
    given: dict[str, Any] = {"sampling": {**sampling, "stop": ["</a>"], "max_completion_tokens": 9}}
    config = parse_config(given)
    assert config.evaluation_sampling == config.sampling
    own = {"top_k": 0, "min_p": 0.0, "top_p": 1.0, "temperature": 0.6, "max_completion_tokens": 99}
    config = parse_config({**given, "eval": own})
    assert config.evaluation_sampling == config.sampling.model_copy(update=own)


JOIN = f"tcp://10.0.0.5:7700#{'k' * 43}.{'s' * 22}.{'f' * 22}"


@pytest.mark.parametrize(
    "override",
    [
        "learner.listen=tcp://*:7700",
        "learner.listen=tcp://[::1]:0",
        "learner.advertise=tcp://learner.example.org:7700",
        "worker.connect=tcp://[fe80::1]:65535",
        f"worker.connect=tcp://[fe80::1%br-lan]:7700#{'k' * 43}",
        "learner.listen=tcp://[fe80::1%eth0.100]:7700",
        "learner.device=cuda:1",
        "loss.kind=my_package.losses:loss",
        "loss.clip_low=false",
        f"worker.connect=tcp://10.0.0.5:7700#{'k' * 43}",
        f"relay.connect=['{JOIN}', 'tcp://a:1']",
        "leases.hedge_factor=false",
        "worker.price_per_h=0",
    ],
)
def test_accepted(override: str) -> None:
    parse_config({}, [override])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("learner.listen=localhost:7700", "not an address to listen on"),
        ("learner.listen=tcp://0.0.0.0:70000", "not an address to listen on"),
        ("worker.connect=tcp://0.0.0.0:7700", "not an address to connect to"),
        ("worker.connect=tcp://host:0", "not an address to connect to"),
        ("worker.connect=7", "must be a list of texts"),
        ("optimizer.betas=[0.9]", "must be a list of 2, each a number, at least 0, below 1"),
        ("worker.connect=tcp://a:1#short", "must be a key of 43 letters"),
        (f"worker.connect=tcp://a:1#{'k' * 43}.short", "the last two of 22"),
        (f"worker.connect=tcp://a:1#{'k' * 43}.{'s' * 22}", "the last two of 22"),
        (f"worker.advertise=tcp://a:1#{'k' * 43}", "each process adds its own"),
        (f"security.join=tcp://a:1#{'k' * 43}", "is not a join string"),
        ("learner.device=gpu", 'write "auto", "cpu", "cuda" or "cuda:1"'),
        ("task.kind=my-task", "import path of your own"),
        ("task.kind=", "import path of your own"),
        ("run.name=a/b", "cannot name a directory"),
        ("run.name=..", "cannot name a directory"),
        (f"run.name={'x' * 65}", "messages hold names of 64"),
        ("loss.dual_clip=true", "must be a number, above 1"),
        ("loss.kind=gepoo", '"package.module:function"; did you mean "gepo"?'),
        ("loss.kind=my.losses:", '"package.module:function"'),
        ("loss.clip_low=0", "must be a number, above 0, at most 1 or false"),
        ("loss.normalize_by_std=1", "must be true or false"),
        ("loss.kind=decoupled_ppo loss.importance_weight=tis", '"sequence_tis", "token_mis"'),
        ("checkpoint.interval_s=0", "must be a duration"),
        ("batch.group_size=0", "must be an integer, at least 1, at most 65536 (Rollouts per"),
        ("model.name=", "must be text, not empty"),
        ("task.options=3", "must be a table"),
        ("engine.kind=sglang", 'one of "transformers", "vllm"'),
        ("engine.options.max_num_seqs=6", 'unknown key with engine.kind = "transformers"'),
        ("worker.price_per_h=-0.1", "at least 0"),
        ("worker.losses_per_h=0.2", "worker.price_per_h is not set"),
        ("activation.mode=off activation.budget_per_h=2", 'activation.mode = "off"'),
        ("sync.mode=pull activation.budget_per_h=2", "sync.mode"),
    ],
)
def test_refused(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({}, override.split())
    key = override.split()[-1].partition("=")[0]
    assert str(caught.value).startswith(f"--set: {key} = ")
    assert message in str(caught.value)


def test_values_are_shown_as_toml() -> None:
    value = {"a": True, "b c": [1, "x"], "d": 1e-8}
    assert show(value) == '{a = true, "b c" = [1, "x"], d = 1e-08}'
    assert show(None) == "unset"


def test_default_ports_do_not_collide_on_one_machine() -> None:
    """Of what one machine has several, workers and their endpoints, none has a port of its own."""
    config = parse_config({})
    assert config.learner.listen != config.relay.listen
    assert config.worker.listen is config.agent.listen is None


# --- publish periods ------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_staleness", "period"), [(0, 1), (1, 1), (2, 1), (3, 2), (6, 5)])
def test_the_preset(max_staleness: int, period: int) -> None:
    assert preset_publish_period(max_staleness) == period


@given(st.floats(1e-3, 1e4), st.floats(0, 1e6) | st.just(math.inf), st.integers(0, 100))
@example(t_train=10.0, t_bcast=10.0, bound=6)
@example(t_train=10.0, t_bcast=math.inf, bound=6)
def test_it_never_deadlocks_and_is_smallest(t_train: float, t_bcast: float, bound: int) -> None:
    period = auto_publish_period(t_train, t_bcast, bound)
    assert 1 <= period <= bound + 1
    if period <= bound:
        assert period * t_train > t_bcast * (1 - 1e-12)
    if period > 1:
        assert (period - 1) * t_train <= t_bcast * (1 + 1e-12)


@pytest.mark.parametrize(
    "arguments", [(0.0, 1.0, 1), (1.0, -1.0, 1), (1.0, 1.0, -1), (math.nan, 1.0, 1)]
)
def test_refuses_what_cannot_be(arguments: tuple[float, float, int]) -> None:
    with pytest.raises(ValueError, match="t_train_s must be above 0"):
        auto_publish_period(*arguments)


# --- groups that grow old -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_staleness", "stale_tokens", "expected"),
    [(2, "keep", True), (2, "mask", True), (2, "drop", False), (0, "keep", False)],
)
def test_a_group_keeps_its_younger_tokens_where_those_are_of_use(
    max_staleness: int, stale_tokens: str, expected: bool
) -> None:
    overrides = [f"sync.max_staleness={max_staleness}", f"rollout.stale_tokens={stale_tokens}"]
    assert parse_config({}, overrides).trims_stale is expected
