"""The schema: every key is documented, and each kind of value refuses what it should."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo.config.load import parse_config
from echo.config.schema import PROFILES, every_leaf, preset_publish_period, show
from echo.core.errors import ConfigError
from echo.fleet.overlap import auto_publish_period


def test_every_key_has_help_that_is_a_sentence() -> None:
    for leaf in every_leaf():
        assert leaf.help.endswith("."), leaf.key
        assert len(leaf.help) > 12, leaf.key


def test_profiles_list_the_same_keys_and_only_real_ones() -> None:
    keys = {leaf.key for leaf in every_leaf()}
    assert PROFILES["lan"].keys() == PROFILES["wan"].keys()
    assert PROFILES["lan"].keys() <= keys


@pytest.mark.parametrize(
    "override",
    [
        "learner.listen=tcp://*:7700",
        "learner.listen=tcp://[::1]:0",
        "learner.advertise=tcp://learner.example.org:7700",
        "worker.connect=tcp://[fe80::1]:65535",
        "learner.device=cuda:1",
        "task.kind=my_tasks.sorting:SortTask",
        "sampling.top_k=0",
        "loss.kind=gepo",
        "loss.kind=my_package.losses:loss",
        "loss.clip_high=false",
        "loss.dual_clip=2",
        f"worker.connect=tcp://10.0.0.5:7700#{'k' * 43}",
        f"relay.connect=['tcp://10.0.0.5:7700#{'k' * 43}.{'s' * 22}.{'f' * 22}', 'tcp://a:1']",
        f"security.join=tcp://10.0.0.5:7700#{'k' * 43}.{'s' * 22}.{'f' * 22}",
        "engine.kind=vllm",
        "leases.hedge_factor=false",
        "leases.hedge_factor=1.5",
        "checkpoint.interval_s=false",
        "eval.interval_steps=0",
    ],
)
def test_accepted(override: str) -> None:
    parse_config({}, [override])


def test_an_engine_has_its_own_keys() -> None:
    options = "engine.options.max_num_seqs=64"
    parse_config({}, ["engine.kind=vllm", options])
    with pytest.raises(ConfigError, match=r'unknown key with engine\.kind = "transformers"'):
        parse_config({}, [options])


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
        (
            f"worker.connect=tcp://a:1#{'k' * 43}.{'s' * 22}",
            "is a join string of an earlier release",
        ),
        (f"worker.advertise=tcp://a:1#{'k' * 43}", "each process adds its own"),
        (f"security.join=tcp://a:1#{'k' * 43}", "is not a join string"),
        ("learner.device=gpu", 'write "auto", "cpu", "cuda" or "cuda:1"'),
        ("task.kind=my-task", "import path of your own"),
        ("task.kind=", "import path of your own"),
        ("run.name=a/b", "cannot name a directory"),
        ("run.name=..", "cannot name a directory"),
        (f"run.name={'x' * 65}", "messages hold names of 64"),
        (f"network.region={'x' * 65}", "at most 64 characters"),
        ("sampling.temperature=0", "must be a number, at least 0.01"),
        ("sampling.top_p=1.1", "must be a number, above 0, at most 1"),
        ("loss.dual_clip=1", "must be a number, above 1"),
        ("loss.dual_clip=true", "must be a number, above 1"),
        ("loss.kind=gepoo", '"package.module:function"; did you mean "gepo"?'),
        ("loss.kind=my.losses:", '"package.module:function"'),
        ("loss.clip_low=0", "must be a number, above 0, at most 1 or false"),
        ("loss.clip_high=true", "must be a number, above 0 or false"),
        ("loss.normalize_by_std=1", "must be true or false"),
        ("loss.kind=decoupled_ppo loss.importance_weight=tis", '"sequence_tis", "token_mis"'),
        ("network.chunk_bytes=1GiB", "at least 1024, at most 16777216"),
        ("network.store_dir=", "must be text, not empty"),
        ("network.store_bytes=0", "at least 1 (Bytes that versions may"),
        ("checkpoint.keep_last=0", "must be an integer, at least 1"),
        ("checkpoint.interval_s=0", "must be a duration"),
        ("batch.group_size=1", "must be an integer, at least 2, at most 65536 (Rollouts per"),
        ("model.name=", "must be text, not empty"),
        ("run.seed=-1", "must be an integer, at least 0"),
        ("task.options=3", "must be a table"),
        ("engine.kind=sglang", 'one of "transformers", "vllm"'),
        ("engine.kind=vllm engine.process=thread", 'one of "auto", "inline", "engine"'),
        ("leases.hedge_factor=0.5", "at least 1"),
        ("engine.kv_cache=drop", 'one of "recompute", "keep"'),
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
    fixed = [config.learner.listen, config.relay.listen]
    assert len(set(fixed)) == 2
    assert config.worker.listen is None
    assert config.agent.listen is None


# --- publish periods ------------------------------------------------------------------------------


@pytest.mark.parametrize(("max_staleness", "period"), [(0, 1), (1, 1), (2, 1), (3, 2), (6, 5)])
def test_the_preset(max_staleness: int, period: int) -> None:
    assert preset_publish_period(max_staleness) == period


@pytest.mark.parametrize(
    ("t_bcast_s", "period"),
    [(0.0, 1), (9.9, 1), (10.0, 2), (19.9, 2), (25.0, 3), (1e9, 7), (float("inf"), 7)],
)
def test_the_smallest_that_hides_the_broadcast(t_bcast_s: float, period: int) -> None:
    assert auto_publish_period(10.0, t_bcast_s, 6) == period


@given(st.floats(1e-3, 1e4), st.floats(0, 1e6), st.integers(0, 100))
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


# --- prices ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["worker.price_per_h=-0.1"], "worker.price_per_h"),
        (["worker.price_per_gb=-1"], "worker.price_per_gb"),
        (["relay.price_per_h=-1"], "relay.price_per_h"),
        (["learner.price_per_h=-1"], "learner.price_per_h"),
        (["worker.losses_per_h=-1"], "worker.losses_per_h"),
        (["worker.losses_per_h=0.2"], "worker.price_per_h is not set"),
        (["activation.budget_per_h=0"], "activation.budget_per_h"),
        (["activation.budget_per_run=-5"], "activation.budget_per_run"),
        (["activation.margin=-0.1"], "activation.margin"),
        (["activation.mode=off", "activation.budget_per_h=2"], 'activation.mode = "off"'),
        (["sync.mode=pull", "activation.budget_per_h=2"], "sync.mode"),
    ],
)
def test_what_contradicts_itself_is_refused(overrides: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config({}, overrides)
    assert complaint in str(caught.value)


def test_free_and_unknown_are_two_things() -> None:
    assert parse_config({}, ["worker.price_per_h=0"]).worker.price_per_h == 0.0
    assert parse_config({}).worker.price_per_h is None


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
