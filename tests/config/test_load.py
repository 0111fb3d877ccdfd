"""Loading: layers of sources, all problems at once, each with file, key, value and remedy."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo.config.fields import override_of
from echo.config.layers import Setting, nest, read_layer
from echo.config.load import (
    _UNSAFE,
    RUN,
    apply_inherited,
    check_inherited,
    diff_configs,
    dry_run_text,
    inherited_settings,
    keys_set_by_user,
    load_config,
    load_resolved,
    parse_config,
    resolved,
    save_resolved,
)
from echo.config.schema import (
    PROFILES,
    every_leaf,
    inherited_keys,
    kinds_of,
    leaves,
)
from echo.core.errors import ConfigError

PATHS = sorted({leaf.path for leaf in every_leaf()})
BROKEN = """
batch_size = 128
batch.group_sise = 8
sync.max_staleness = 1
sync.publish_period = 9
model.dtype = "bfloat"
optimizer.learning_rate = "3e-4"
task.reward_timeout_s = "5m"
worker.connect = ["tcp://a:7700", "foo"]
checkpoint.keep_last = 0
"""


ANY_VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats(allow_nan=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2)
    | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)  # fmt: skip


def problems_of(table: Mapping[str, object], *overrides: str, role: str | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(table, overrides, role, source="run.toml")
    return str(caught.value)


def test_profiles() -> None:
    lan, wan = parse_config({}), parse_config({"profile": "wan"})
    assert (lan.profile, lan.sync.max_staleness, lan.sync.publish_period) == ("lan", 2, 1)
    assert (wan.sync.max_staleness, wan.sync.publish_period) == (6, "auto")
    assert (wan.sync.initial_publish_period, wan.loss.kind) == (5, "gspo")
    changed = ["loss.dual_clip=2", "loss.kind=grpo"]
    assert parse_config({"profile": "wan"}, changed).loss.kind == "grpo"
    with pytest.raises(ConfigError, match=r'"trainer" .* learner, worker, relay'):
        parse_config({}, role="trainer")


def test_later_sources_win_and_are_remembered() -> None:
    table = {"profile": "wan", "batch": {"group_size": 4}, "run": {"max_steps": 7}}
    config = parse_config(table, ["run.max_steps=8", "run.max_steps=9"])
    assert (config.batch.group_size, config.run.max_steps) == (4, 9)
    assert config.sources["batch.group_size"] == "configuration"
    assert config.sources["run.max_steps"] == "--set"
    assert config.sources["batch.groups_per_step"] == "profile wan"
    assert config.sources["loss.kind"] == "profile wan"
    assert config.sources["loss.clip_low"] == "default"
    assert keys_set_by_user(config) == {"profile", "batch.group_size", "run.max_steps"}


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("model.dtype=float32", "model.dtype", "float32"),
        ('run.name="12"', "run.name", "12"),
        ("run.name = demo", "run.name", "demo"),
        ("run.dir=2024-01-01", "run.dir", "2024-01-01"),
        ("run.dir=a\nb = 3", "run.dir", "a\nb = 3"),
        ("loss.dual_clip=false", "loss.dual_clip", False),
        ("checkpoint.interval_s='15min'", "checkpoint.interval_s", 900.0),
        ("limits.spool_bytes=1GiB", "limits.spool_bytes", 2**30),
        ("worker.connect=tcp://a:1", "worker.connect", ("tcp://a:1",)),
        ("worker.connect=['tcp://a:1','tcp://b:2']", "worker.connect", ("tcp://a:1", "tcp://b:2")),
        ("sync.publish_period=auto", "sync.publish_period", "auto"),
        ("optimizer.learning_rate=1", "optimizer.learning_rate", 1.0),
        ("sync={max_staleness=4}", "sync.max_staleness", 4),
    ],
)
def test_overrides_are_toml_or_else_text(override: str, key: str, value: object) -> None:
    section, name = key.split(".")
    assert getattr(getattr(parse_config({}, [override]), section), name) == value


OPTIONS = {"task": {"options": {"digits": 2, "deep": {"x": 1}}}}


def test_tables_of_the_users_own_keys_merge() -> None:
    config = parse_config(OPTIONS, ["task.options.digits=3", "task.options.deep.y=[1, 2]"])
    assert config.task.options == {"digits": 3, "deep": {"x": 1, "y": [1, 2]}}
    assert config.sources["task.options"] == "configuration + --set"
    assert parse_config({}).task.options == {}, "no default may be changed by a load"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["task.options={}"], {}),
        (["task.options={digits=3}"], {"digits": 3}),
        (["task.options={}", "task.options.digits=3"], {"digits": 3}),
        (["task.options.digits=3", "task.options={}"], {}),
        (["task.options.deep={y=1}"], {"digits": 2, "deep": {"y": 1}}),
        (["task={kind='gsm8k'}"], {"digits": 2, "deep": {"x": 1}}),
        (["task.options.digits.least=3"], {"digits": {"least": 3}, "deep": {"x": 1}}),
        (["task.options.deep=3", "task.options.deep.y=4"], {"digits": 2, "deep": {"y": 4}}),
    ],
)
def test_what_is_set_replaces_what_was_there_before(
    overrides: list[str], expected: dict[str, Any]
) -> None:
    assert parse_config(OPTIONS, overrides).task.options == expected


def test_all_problems_at_once(tmp_path: Path) -> None:
    path = tmp_path / "broken.toml"
    path.write_text(BROKEN, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(path, ["run.max_step=3", "run.seed"], "learner")
    head, *lines = str(caught.value).splitlines()
    assert head == "the configuration has 11 problems:"
    expected = [
        "FILE: batch_size = 128: unknown key; did you mean batch.groups_per_step",
        "FILE: batch.group_sise = 8: unknown key; did you mean group_size?",
        "--set: run.max_step = 3: unknown key; did you mean max_steps?",
        '--set: "run.seed" is not an override; write section.key=value',
        'FILE: model.dtype = "bfloat": must be one of "bfloat16", "float16", "float32"; did you ',
        'FILE: task.reward_timeout_s = "5m": "5m" is not a duration; write ',
        'FILE: optimizer.learning_rate = "3e-4": must be a number, above 0',
        'FILE: worker.connect = ["tcp://a:7700", "foo"]: "foo" is not an address',
        "FILE: checkpoint.keep_last = 0: must be an integer, at least 1 (Number of newest",
        "FILE: sync.publish_period = 9: must be at most sync.max_staleness + 1 = 2, or the run",
        "FILE: model.name: the learner needs it: a model directory or a hub id",
    ]
    for start, line in zip(expected, lines, strict=True):
        assert line.strip().startswith(start.replace("FILE", str(path)))


def test_a_value_is_reported_once_and_no_rule_is_checked_on_it() -> None:
    text = problems_of({"sync": {"max_staleness": -1, "publish_period": 9}})
    assert "sync.max_staleness = -1: must be an integer, at least 0" in text
    assert "deadlock" not in text
    text = problems_of({"sync": {"publish_period": 0}})  # a union
    assert text.count("publish_period = 0") == 1
    assert 'must be "auto" or an integer, at least 1' in text


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("batch.group_size", True, "must be an integer, at least 1"),
        ("batch.group_size", "8", "must be an integer, at least 1"),
        ("batch.group_size", 8.0, "must be an integer, at least 1"),
        ("batch.group_size", None, "must be an integer, at least 1"),
        ("optimizer.max_grad_norm", math.inf, "inf: must be a number, above 0"),
        ("optimizer.learning_rate", math.nan, "nan: must be a number, above 0"),
    ],
)
def test_types_are_strict_and_numbers_finite(key: str, value: object, message: str) -> None:
    section, _, name = key.partition(".")
    assert message in problems_of({section: {name: value}})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.toml", b"[batch\n", "not valid TOML: .*at line 1"),
        ("a.toml", b"a = 1\na = 2\n", "not valid TOML: Cannot overwrite a value .at line 2"),
        ("a.toml", b"a = '\xff'", "not UTF-8 text"),
        ("a.toml", None, "cannot be read: No such file .*configs/"),
        ("", None, "cannot be read: Is a directory"),
        ("a.toml", b"a = " + b"[" * 5000, "not valid TOML"),
        ("a.toml", b"a = " + b"9" * 5000, "not valid TOML"),
        ("a.json", b"[" * 5000, "not valid JSON"),
        ("a.json", b"9" * 5000, "not valid JSON"),
        ("a.json", b"{", "not valid JSON"),
        ("a.json", b"[1, 2]", "holds no configuration"),
    ],
)
def test_an_unreadable_file_is_named(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"{name}: {message}"):
        load_resolved(path) if name == "a.json" else load_config(path)


def test_a_file_that_does_not_end_in_time_is_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as /dev/zero, which would take all memory."""
    (tmp_path / "run.toml").write_text("[batch]\n")
    monkeypatch.setattr("echo.config.fields.MAX_FILE_LENGTH", 8)
    load_config(tmp_path / "run.toml")
    monkeypatch.setattr("echo.config.fields.MAX_FILE_LENGTH", 7)
    with pytest.raises(ConfigError, match=r"run\.toml: cannot be read: File too large; give"):
        load_config(tmp_path / "run.toml")


def test_the_resolved_configuration_comes_back(tmp_path: Path) -> None:
    path, overrides = tmp_path / "config.json", ["loss.clip_low=false", "worker.connect=tcp://a:1"]
    config = parse_config({"profile": "wan"}, overrides)
    save_resolved(config, path)
    table = json.loads(path.read_text())
    assert resolved(load_resolved(path)) == resolved(config) == table
    keys = {f"{name}.{key}" for name, part in table.items() if name != "profile" for key in part}
    assert keys | {"profile"} == {leaf.key for leaf in leaves(kinds_of(config)).values()}
    assert load_resolved(path, ["run.max_steps=500"]).run.max_steps == 500
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.slow
@given(st.dictionaries(st.sampled_from(PATHS), ANY_VALUE, min_size=1, max_size=4))
def test_no_value_does_anything_but_load_or_be_reported(values: dict[tuple[str, ...], Any]) -> None:
    table, message = nest({path: Setting(value, "file") for path, value in values.items()}), ""
    try:
        config = parse_config(table)
        assert json.loads(json.dumps(resolved(config))) == resolved(config)
    except ConfigError as error:
        message = str(error)
    assert not message or any(".".join(path) in message for path in values)


def test_the_secret_of_a_join_string_is_never_written_or_shown(tmp_path: Path) -> None:
    secret, address = "s" * 22, f"tcp://10.0.0.5:7700#{'k' * 43}"
    join = f"{address}.{secret}.{'f' * 22}"
    table = {"worker": {"connect": [join]}, "security": {"join": join}}
    config = parse_config(table, role="worker")
    assert config.worker.connect == (join,)
    save_resolved(config, tmp_path / "config.json")
    dry_run = dry_run_text(config, "worker")
    assert "a worker that connects to tcp://10.0.0.5:7700 and " in dry_run
    assert "# configuration, a secret, which is not shown\n" in dry_run
    shown = parse_config(tomllib.loads(dry_run.partition("\n")[2]))
    assert (shown.worker.connect, shown.security.join) == ((address,), None)
    texts = [(tmp_path / "config.json").read_text(), dry_run]
    with pytest.raises(ConfigError) as caught:
        parse_config({**table, "learner": {"advertise": join}})
    for text in [*texts, str(caught.value)]:
        assert address in text
        assert secret not in text
    again = load_resolved(tmp_path / "config.json")
    assert again.worker.connect == (address,)
    assert diff_configs(config, again) == []


# ------------------------------------------------------------------------- changing a saved run


def saved(directory: Path, *overrides: str) -> Path:
    config = parse_config({}, overrides)
    save_resolved(config, directory / "config.json")
    return directory / "config.json"


def test_options_that_another_loss_lacks_give_way_on_resume(tmp_path: Path) -> None:
    pull = ("reference.kl_coef=0.1", "reference.kl_estimator=k2")
    path = saved(tmp_path, "loss.dual_clip=4", "loss.clip_high=0.3", "loss.veto=1e-4", *pull)
    config = load_resolved(path, ["loss.kind=gepo"])
    # gepo has clips, and neither a dual clip nor masks.
    own = {"clip_low": 0.2, "clip_high": 0.3, "gate_kl": None, "sampler_kl_coef": 0.0}
    assert config.loss.own_options() == own
    keys = {change.key for change in diff_configs(load_resolved(path), config)}
    assert {"loss.kind", "loss.dual_clip", "loss.veto"} <= keys
    assert "loss.clip_high" not in keys
    assert load_resolved(path, ["reference.kl_coef=0"]).reference.kl_estimator == "k3"
    assert load_resolved(path).loss.own_options()["dual_clip"] == 4


def test_what_is_asked_for_now_does_not_give_way(tmp_path: Path) -> None:
    path = saved(tmp_path, "loss.dual_clip=4")
    with pytest.raises(ConfigError, match=r"--set: loss\.gate_kl .* unknown key with"):
        load_resolved(path, ["loss.kind=gspo", "loss.gate_kl=0.1"])
    own = saved(tmp_path, "loss.kind=mine:loss", "loss.options.a=1", "loss.options.b=2")
    assert load_resolved(own, ["loss.kind=grpo"]).loss.kind == "grpo"


# ------------------------------------------------------------------------------------- pull mode


def test_pull_is_on_policy_whatever_the_profile(tmp_path: Path) -> None:
    path = saved(tmp_path, "sync.max_staleness=3", "sync.publish_period=2")
    on_policy = [parse_config({}, [f"profile={name}", "sync.mode=pull"]) for name in PROFILES]
    # A lag gives way on resume.
    for config in (*on_policy, load_resolved(path, ["sync.mode=pull"])):
        assert (config.sync.max_staleness, config.sync.publish_period) == (0, 1)
    # The workers' defaults contradict nothing.
    assert not any("sync.max_staleness" in keys_set_by_user(config) for config in on_policy)
    text = problems_of({}, "sync.mode=pull", "sync.max_staleness=3", "sync.publish_period=2")
    assert "sync.max_staleness = 3: must be 0" in text
    assert "sync.publish_period = 2: must be 1" in text


# --- layers of a configuration --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ({"batch": {"max_staleness": 8}}, "unknown key; did you mean sync.max_staleness?"),
        ({"batch": {"zebra": 8}}, "[batch] has group_size, groups_per_step"),
        ({"worker": {"max_grad_nrm": 8}}, "unknown key; did you mean optimizer.max_grad_norm?"),
        ({"network": {"heartbeat": 8}}, "unknown key; did you mean heartbeat_s?"),
        ({"learnr": {"listen": 8}}, "unknown section; did you mean [learner]?"),
        ({"max_stalenes": 8}, "unknown key; did you mean sync.max_staleness?"),
        ({"zebra": {"x": 8}}, "unknown section; there are [run], [model], [task]"),
        ({"zebra": 8}, "unknown key; there are [run], [model], [task]"),
        ({"batch": {"num_generations": 8}}, "batch.group_size (num_generations in TRL)?"),
        ({"optimizer": {"lr": 8}}, "unknown key; did you mean optimizer.learning_rate (lr in"),
        ({"trainer": {"optim": {"lr": 8}}}, "did you mean optimizer.learning_rate (optim.lr in"),
        ({"ckpt": {"interval": 8}}, "checkpoint.interval_steps (ckpt.interval in prime-rl)?"),
        ({"loss": {"epsilon_high": 8}}, "unknown key; did you mean loss.clip_high (epsilon_high"),
        ({"temperature": 1}, "unknown key; did you mean sampling.temperature?"),
        ({"sampling": {"max_new_tokens": 8}}, "did you mean sampling.max_completion_tokens?"),
        ({"sampling": {"stop_strings": ["\n"]}}, "unknown key; did you mean sampling.stop?"),
        ({"interval": 8}, "eval.interval_steps?; docs/coming-from-other-frameworks.md has"),
        ({"batch": 8}, "this is a section, not a key; write [batch]"),
        ({"batch": {"group_size": {"x": 8}}}, "this key takes a plain value, not a table"),
        ({"profile": {"x": 8}}, "this key takes a plain value, not a table"),
    ],
)
def test_an_unknown_key_finds_its_match(table: dict[str, Any], text: str) -> None:
    layer = read_layer(RUN, {**table, "relay": {}}, "run.toml")
    (problem,) = layer.problems
    assert text in problem.text
    assert not layer.settings


@pytest.mark.parametrize(
    ("section", "value", "text"),
    [
        ("sync", {"max_staleness": 2**63}, "= 9223372036854775808: 9223372036854775808 has more"),
        ("task", {"options": {"a": [{"b": -(2**63) - 1}]}}, "-9223372036854775809 has more than"),
        ("task", {"options": {"a": 16**5000}}, "000... has more than 64 bits; write a smaller"),
        (
            "task",
            {"options": {"a": math.nan}},
            "nan is no number that a message can carry",
        ),
        ("model", {"chat_template_kwargs": {"a": [-math.inf]}}, "-inf is no number"),
        ("task", {"options": {"a": date(2026, 1, 2)}}, "2026-01-02 is a date or time, which"),
        ("task", {"options": {"a": "\ud800"}}, '"\\\\ud800" has a character that UTF-8'),
        ("task", {"options": {"a": {"\udfff": 1}}}, '"\\\\udfff" has a character that UTF-8'),
        ("run", {"dir": "a\0b"}, '"a\\\\x00b" has a character that UTF-8 or file names'),
        ("run", {"dir": "x" * 256}, "a name of more than 255 bytes, which no disk takes"),
    ],
)
def test_what_would_not_reach_a_worker_as_written(
    section: str, value: dict[str, Any], text: str
) -> None:
    (name,) = value
    problems = problems_of({section: value})
    assert f"run.toml: {section}.{name}" in problems
    assert text in problems


@pytest.mark.parametrize("text", ["[" * 5000, "{a=" * 500, "9" * 5000])
def test_an_override_that_python_cannot_read_is_text(text: str) -> None:
    assert parse_config({}, [f"task.options.a={text}"]).task.options == {"a": text}
    assert "max_steps = " in problems_of({}, f"run.max_steps={text}")


@pytest.mark.parametrize("key", ["task.options", "model.chat_template_kwargs", "nothing"])
def test_tables_within_tables_have_a_bound(tmp_path: Path, key: str) -> None:
    path = tmp_path / "a.toml"
    for depth, is_right in ((25, key != "nothing"), (2000, False)):
        path.write_text(f"{key}{'.a' * depth} = 1")
        if is_right:
            load_config(path)
            continue
        with pytest.raises(ConfigError, match=r"more than 32 tables and lists|unknown"):
            load_config(path)


@pytest.mark.parametrize("word", ["null", "None", "~"])
def test_a_null_value_is_called_one(word: str) -> None:
    told = f'model.name = "{word}": this is a null value; leave model.name out, or write '
    assert told in problems_of({}, f"model.name={word}")
    assert parse_config({}, [f'model.name="{word}"']).model.name == word
    assert parse_config({}, [override_of("model.name", word)]).model.name == word


@pytest.mark.parametrize("text", ["run.seed", "=3", ".seed=3", "run..seed=3", ""])
def test_not_an_override(text: str) -> None:
    assert f'"{text}" is not an override; write section.key=value' in problems_of({}, text)


# --- what workers inherit -------------------------------------------------------------------------


LEARNER = ("profile=wan", "sampling.temperature=0.9", "task.options.digits=3", "run.seed=5")


def test_a_worker_with_only_an_address_takes_all_settings() -> None:
    options = {"least": -(2**63), "most": 2**63 - 1, "share": 1e300}
    learner = parse_config({"task": {"options": options}}, LEARNER)
    settings = msgspec.msgpack.decode(msgspec.msgpack.encode(inherited_settings(learner)))
    assert set(settings) == set(inherited_keys())
    worker = parse_config({}, ["worker.connect=tcp://a:1"], "worker")
    assert check_inherited(worker, settings) == []
    effective = apply_inherited(worker, settings)
    assert inherited_settings(effective) == inherited_settings(learner) == settings
    assert effective.task.options == {**options, "digits": 3}
    assert (effective.sync.max_staleness, effective.model.chat_template) == (6, None)
    assert effective.worker.connect == ("tcp://a:1",)
    assert effective.sources["sampling.temperature"] == "learner"
    assert effective.sources["worker.connect"] == "--set"
    with pytest.raises(ConfigError, match=r"the learner's settings: batch\.group_size = 0"):
        apply_inherited(worker, {"batch.group_size": 0})


def test_a_contradiction_names_both_values() -> None:
    settings = inherited_settings(parse_config({}, LEARNER))
    table = {"sampling": {"temperature": 1.0}, "run": {"seed": 5}}
    worker = parse_config(table, source="worker.toml")
    (line,) = check_inherited(worker, settings)
    assert line.startswith("worker.toml: sampling.temperature = 1.0 contradicts the learner")
    assert "uses 0.9; remove it here" in line
    assert check_inherited(worker, inherited_settings(worker)) == [], "one file for both roles"


def test_an_empty_chat_template_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.jinja"
    path.write_text(" \n")
    config = parse_config({"model": {"chat_template": str(path)}})
    with pytest.raises(
        ConfigError, match=r'empty\.jinja": is empty; "none" leaves prompts without'
    ):
        inherited_settings(config)


def test_a_path_may_begin_at_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "own.jinja").write_text("{{ messages }}")
    keys = ("run.dir=~/runs", "network.store_dir=~/store", "model.chat_template=~/own.jinja")
    config = parse_config({}, keys)
    assert config.run_dir == tmp_path / "runs" / "run"
    assert config.network.store_dir == str(tmp_path / "store")
    assert inherited_settings(config)["model.chat_template"] == "{{ messages }}"
    assert check_inherited(config, {"model.chat_template": "other"}), "the file is compared"


def test_no_chat_template_travels_as_no_text() -> None:
    config = parse_config({"model": {"chat_template": "none"}})
    assert inherited_settings(config)["model.chat_template"] == ""
    assert check_inherited(config, {"model.chat_template": ""}) == []
    [line] = check_inherited(config, {"model.chat_template": "{{ other }}"})
    assert "contradicts" in line


def test_a_byte_order_mark_is_no_part_of_a_file(tmp_path: Path) -> None:
    template, file = tmp_path / "chat.jinja", tmp_path / "run.toml"
    template.write_text("\ufeff{{ messages }}", encoding="utf-8")
    file.write_text(
        f"\ufeff[model]\nchat_template = {json.dumps(str(template))}\n", encoding="utf-8"
    )
    settings = inherited_settings(load_config(file))
    assert settings["model.chat_template"] == "{{ messages }}"


def test_the_chat_template_travels_as_text(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}" * 20, encoding="utf-8")
    config = parse_config({"model": {"chat_template": str(template)}})
    settings = inherited_settings(config)
    assert settings["model.chat_template"] == "{{ messages }}" * 20
    template.write_text("{{ other }}", encoding="utf-8")
    (line,) = check_inherited(config, settings)
    assert 'model.chat_template = "{{ other }}" contradicts' in line
    assert "..." in line, "a long template is cut"
    template.unlink()
    with pytest.raises(ConfigError, match=r"model\.chat_template = .*cannot be read"):
        inherited_settings(config)
    # One file serves all machines, and the template's text comes from the learner.
    assert check_inherited(config, settings) == []


# --- what a resume may change ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "is_safe"),
    [
        ("optimizer.learning_rate=1e-4", True),
        ("learner.micro_batch_tokens=64", True),
        ("batch.group_size=4", False),
        ("task.options.digits=4", False),
        ("learner.listen=tcp://0.0.0.0:1", False),
        ("run.seed=9", False),
    ],
)
def test_a_change_is_classed_with_its_reason(override: str, is_safe: bool) -> None:
    old, new = parse_config({}), parse_config({}, [override])
    (change,) = diff_configs(old, new)
    assert override.startswith(change.key)
    assert bool(change.unsafe_reason) is not is_safe
    assert str(change).startswith("safe" if is_safe else "UNSAFE")


def test_a_line_shows_both_values_and_a_profile_lists_what_it_changes() -> None:
    old = parse_config({})
    (change,) = diff_configs(old, parse_config({}, ["loss.dual_clip=false"]))
    assert str(change) == "safe   loss.dual_clip: 3.0 -> false"
    keys = [change.key for change in diff_configs(old, parse_config({"profile": "wan"}))]
    assert keys[0] == "profile"
    assert {"sync.max_staleness", "batch.group_size", "network.heartbeat_s"} < set(keys)


SAFE = {
    *("profile", "run.max_steps", "model.attn_implementation", "task.reward_timeout_s"),
    *("task.step_timeout_s", "task.max_reward", "task.max_turns", "reward"),
    *(
        "sampling.max_completion_tokens",
        "sampling.stop",
        "sync.mode",
        "sync.max_staleness",
        "sync.adaptive",
    ),
    *("sync.eager", "sync.min_staleness", "sync.publish_period", "batch.minibatches_per_step"),
    *("batch.keep_zero_variance", "batch.max_zero_signal_batches", "loss", "reference"),
    *("optimizer", "learner", "leases", "activation", "worker", "agent", "rollout", "engine"),
    *("relay", "checkpoint", "eval", "network", "security", "limits", "metrics", "alerts", "ui"),
}
"""Keys and whole sections: what is stored and sampled means the same after they changed."""


def test_every_key_is_classed_and_no_other() -> None:
    named = {name for leaf in every_leaf() for name in (leaf.key, leaf.path[0])}
    assert {*_UNSAFE, *SAFE} <= named
    assert not set(_UNSAFE) & SAFE
    unclassed = [
        leaf.key for leaf in every_leaf() if not {leaf.key, leaf.path[0]} & {*_UNSAFE, *SAFE}
    ]
    assert unclassed == [], "unsafe to change on a resume: _UNSAFE, with the reason; else SAFE"


@pytest.mark.parametrize(
    ("table", "override", "key"),
    [
        ({"eval": {"num_prompts": 48}}, "eval.interval_steps=0", "eval.num_prompts = 48"),
        ({"lora": {"rank": 4, "alpha": 9}}, "lora.rank=0", "lora.alpha = 9"),
        ({"loss": {"kind": "grpo", "dual_clip": 5}}, "loss.kind=gepo", "loss.dual_clip = 5"),
    ],
)
def test_the_command_line_may_switch_off_what_the_file_sets(
    table: dict[str, Any], override: str, key: str
) -> None:
    config = parse_config(table, [override], source="run.toml")
    [note] = config.notes
    assert note.startswith(f"run.toml: {key} has no effect beside --set {override.split('=')[0]}")
    path = key.partition(" ")[0]
    assert config.sources.get(path) != "run.toml"
    with pytest.raises(ConfigError, match=r"no effect|unknown key"):
        parse_config(table, [override, f"{path}=7"], source="run.toml")
    section, name = override.split("=")[0].split(".")
    in_file = {"interval_steps": 0, "rank": 0, "kind": "gepo"}[name]
    with pytest.raises(ConfigError, match=r"no effect|unknown key"):
        parse_config({section: {**table[section], name: in_file}}, source="run.toml")
