"""Loads and checks a configuration from all its sources.

The sources are, in rising precedence: the defaults of the schema, the defaults of the profile, the
file, and each `--set` in order. All problems are found in one pass. First, each value that is wrong
on its own is reported and replaced by its default. Then the rules that compare several keys are
checked. A worker also applies the settings that the learner sends.
"""

from __future__ import annotations

import json
import os
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from echo.config import other_names
from echo.config.checks import check_config
from echo.config.fields import OWN_KIND, ROLES, UNREADABLE, Role, read_text
from echo.config.layers import (
    DEFAULT,
    MAX_GUESSES,
    OVERRIDE,
    Problem,
    Schema,
    Setting,
    Settings,
    as_error,
    brief,
    describe_expected,
    merge,
    nest,
    read_file,
    read_layer,
    read_override,
    read_toml,
    unreported,
    value_problems,
)
from echo.config.memory.budget import Budget
from echo.config.schema import (
    DEFAULT_PROFILE,
    KINDS,
    PROFILES,
    PULL,
    Config,
    KeyPath,
    Leaf,
    default_text,
    every_leaf,
    find_leaf,
    inherited_keys,
    kinds_of,
    leaves,
    sections,
    show,
)
from echo.core.errors import ConfigError, nearest
from echo.core.paths import local_path
from echo.core.units import counted, format_bytes, without_keys

# --- keys -----------------------------------------------------------------------------------------


def _describe_unknown(path: KeyPath) -> str:
    section, name = path[0], path[-1]
    if section in sections() and len(path) == 1:
        return f"this is a section, not a key; write [{section}] and its keys below it"
    if find_leaf(path[:1]) or find_leaf(path[:2]):
        return "this key takes a plain value, not a table"
    known_elsewhere = other_names.our_name(path)
    if known_elsewhere:
        return f"unknown key; {known_elsewhere}"
    paths = dict.fromkeys(leaf.path for leaf in every_leaf())
    names = [path[-1] for path in paths if path[0] == section and len(path) == 2]
    near = nearest(name, names)
    if near:
        return f"unknown key; did you mean {near}?"
    if section not in sections() and len(path) > 1:
        near = nearest(section, sections())
        if near:
            return f"unknown section; did you mean [{near}]?"
    alike = nearest(name, [path[-1] for path in paths])
    elsewhere = [".".join(path) for path in paths if path[-1] == alike]
    with_unit = [".".join(path) for path in paths if path[-1].startswith(f"{name}_")]
    if alike != name and 0 < len(with_unit) <= MAX_GUESSES:
        elsewhere = with_unit  # the name may mean any of these keys
    if len(elsewhere) == 1 or elsewhere is with_unit:
        # A similar name in another section is only a guess; the key may be another framework's.
        others = "" if alike == name else f"; {OTHER_NAMES}"
        return f"unknown key; did you mean {' or '.join(elsewhere)}?{others}"
    kind = "key" if names or len(path) == 1 else "section"
    known = f"[{section}] has {', '.join(names)}" if names else f"there are {_list_sections()}"
    return f"unknown {kind}; {known}; {OTHER_NAMES}"


OTHER_NAMES = (
    "docs/coming-from-other-frameworks.md has the names that TRL, verl, prime-rl and slime use"
)


def _list_sections() -> str:
    return ", ".join(f"[{name}]" for name in sections())


RUN = Schema(
    what="configuration",
    override_form="section.key=value",
    sections=sections,
    find=find_leaf,
    describe_unknown=_describe_unknown,
    place=lambda path, _: ".".join(path),
)
"""The schema of the configuration file of a run."""


# --- loading --------------------------------------------------------------------------------------


_IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def load_config(path: Path | str, overrides: Sequence[str] = (), role: str | None = None) -> Config:
    """Read a TOML file, apply the overrides, and check the configuration.

    Args:
        path: the configuration file, which all roles share.
        overrides: texts "section.key=value". A value that is not TOML is text.
        role: the role whose required keys must be set: learner, worker or relay. None requires no
            key.

    Raises:
        ConfigError: if anything is wrong. The message lists every problem with file, key, value and
            remedy.
    """
    return parse_config(read_toml(Path(path)), overrides, role, source=str(path))


def parse_config(
    table: Mapping[str, Any],
    overrides: Sequence[str] = (),
    role: str | None = None,
    *,
    source: str = "configuration",
    is_saved: bool = False,
) -> Config:
    """Check nested tables as `load_config` checks a file.

    Args:
        table: the nested tables.
        overrides: texts "section.key=value".
        role: the role whose required keys must be set; None requires no key.
        source: the name of `table` in messages.
        is_saved: whether `table` is a run's saved configuration, which has every key. If True,
            defaults replace all saved values that have no effect. If False, defaults replace only
            values of `table` that an override makes ineffective, and the configuration has a note
            on each of these values.

    Raises:
        ConfigError: if anything is wrong. The message lists every problem with its remedy.
    """
    if role is not None and role not in ROLES:
        raise ConfigError(f'role "{role}" does not exist; choose one of {", ".join(ROLES)}')
    layers = [read_layer(RUN, table, source), *(read_override(RUN, text) for text in overrides)]
    user = merge(layers)
    if is_saved:
        user = _without_old_defaults(layers[0].settings, user)
    settings, config, problems = _check(user, role)
    idle = [
        problem
        for problem in problems
        if problem.is_idle and (is_saved or _cause_in_override(problem, user))
    ]
    notes = [] if is_saved else [_describe_idle(problem, settings) for problem in idle]
    if idle:
        gone = {problem.paths[0][:2] for problem in idle}
        kept = {p: s for p, s in user.items() if p[:2] not in gone or s.source == OVERRIDE}
        settings, config, problems = _check(kept, role)
    problems = [problem for layer in layers for problem in layer.problems] + problems
    if problems:
        raise as_error(RUN, problems, settings, source)
    return config.with_sources(_sources(settings, leaves(kinds_of(config))), notes)


def _cause_in_override(problem: Problem, user: Settings) -> bool:
    """Return whether a setting of the file has no effect because of a `--set`."""
    idle, *causes = (user.get(path) for path in problem.paths)
    by_line = any(cause is not None and cause.source == OVERRIDE for cause in causes)
    return idle is not None and idle.source != OVERRIDE and by_line


def _describe_idle(problem: Problem, settings: Settings) -> str:
    path, *causes = problem.paths
    setting = problem.setting or settings[path]
    beside = " and ".join(f"{'.'.join(c)} = {brief(settings[c].value)}" for c in causes)
    key = f"{'.'.join(path)} = {brief(setting.value)}"
    return f"{setting.source}: {key} has no effect beside {OVERRIDE} {beside}, and is left out"


def _check(
    user: Settings, role: str | None
) -> tuple[dict[KeyPath, Setting], Config, list[Problem]]:
    """Return all settings, a valid configuration, and the problems.

    In the configuration, defaults replace the values with problems.
    """
    kinds, problems = _choose_kinds(user)
    known = leaves(kinds)
    own = {path: setting for path, setting in user.items() if _leaf_at(path, known)}
    for problem in problems:
        del own[problem.paths[0]]
    settings = {**_default_settings(own, known), **own}
    config, wrong = _validate(settings, known)
    problems += wrong
    found = [*_keys_of_other_kinds(user, kinds), *check_config(config, cast("Role | None", role))]
    return settings, config, [*problems, *unreported(found, problems)]


def _choose_kinds(user: Settings) -> tuple[dict[str, str], list[Problem]]:
    """Return the kind that is chosen for each section, and a problem for each unknown kind."""
    kinds, problems = {}, []
    for section, classes in KINDS.items():
        path = (section, "kind")
        leaf = next(leaf for leaf in every_leaf() if leaf.path == path)
        kinds[section] = leaf.defaults[_profile_of(user)]
        if path not in user:
            continue
        kind = user[path].value
        if isinstance(kind, str) and kind != OWN_KIND and kind in classes:
            kinds[section] = kind
        elif isinstance(kind, str) and OWN_KIND in classes and _IMPORT_PATH.fullmatch(kind):
            kinds[section] = OWN_KIND
        else:
            problems.append(Problem((path,), describe_expected(leaf, kind), user[path]))
    return kinds, problems


def _keys_of_other_kinds(user: Settings, kinds: Mapping[str, str]) -> Iterable[Problem]:
    """Yield a problem for each key that belongs only to kinds that were not chosen."""
    known = leaves(kinds)
    for path, setting in user.items():
        if _leaf_at(path, known):
            continue
        section, name = path[:2]
        kind = user.get((section, "kind"))
        profile = _profile_of(user)
        chosen = show(kinds[section] if kind is None else kind.value)
        origin = "" if kind else ", the default"
        if not kind and f"{section}.kind" in PROFILES[profile]:
            origin += f" of the profile {profile}"
        owners = [leaf.kinds[0] for leaf in every_leaf() if leaf.path == (section, name)]
        names = [own[1] for own in known if own[0] == section and own[1:] != ("kind",)]
        near = nearest(name, names)
        yield Problem(
            (path, (section, "kind")),
            f"unknown key with {section}.kind = {chosen}{origin}: it belongs to "
            f"{', '.join(owners)}; "
            + (f"did you mean {near}?" if near else f"{chosen} has {', '.join(names)}"),
            setting,
            is_idle=True,
        )


def _without_old_defaults(saved: Settings, user: dict[KeyPath, Setting]) -> dict[KeyPath, Setting]:
    """Return the settings in `user` that still apply.

    `user` contains settings of a saved run, `saved`, and the user's changes. If the user has chosen
    another `kind` for a section, the saved defaults of the former kind no longer apply.
    """
    before, _ = _choose_kinds(saved)
    after, _ = _choose_kinds(user)
    known, profile = leaves(before), _profile_of(saved)
    old = {
        path
        for path, setting in saved.items()
        if before.get(path[0]) != after.get(path[0])
        and path[1:] != ("kind",)
        and path in known
        and setting.value == known[path].defaults[profile]
    }
    return {path: user[path] for path in user if path not in old or user[path] != saved[path]}


def _leaf_at(path: KeyPath, known: Mapping[KeyPath, Leaf]) -> Leaf | None:
    """Return the key at `path`, or the table of the user's own keys that contains `path`."""
    leaf = known.get(path)
    table = known.get(path[:2])
    return leaf or (table if table is not None and table.is_table else None)


def resolved(config: Config) -> dict[str, Any]:
    """Return all values of a configuration, including defaults, as nested tables for JSON."""
    return config.model_dump(mode="json")


def save_resolved(config: Config, path: Path) -> None:
    """Write all values of a configuration as JSON, atomically.

    After a crash, the file has the complete old or the complete new content.
    """
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(resolved(config), indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)  # noqa: PTH105, the atomic one by name


def load_resolved(path: Path, overrides: Sequence[str] = (), role: str | None = None) -> Config:
    """Read a file that `save_resolved` wrote, and apply the overrides.

    If an override makes a saved value ineffective, the default replaces the value. Examples are
    options of a loss that is no longer chosen.

    Raises:
        ConfigError: if anything is wrong, as for `load_config`.
    """
    try:
        table = json.loads(read_file(path))
    except UNREADABLE as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: holds no configuration but {show(table)[:60]}")
    return parse_config(table, overrides, role, source=str(path), is_saved=True)


def keys_set_by_user(config: Config) -> frozenset[str]:
    """Return the dotted keys that a file or `--set` has set."""
    return frozenset(
        key for key, source in config.sources.items() if not Setting(None, source).is_default
    )


def _profile_of(user: Settings) -> str:
    given = user.get(("profile",))
    is_known = given is not None and isinstance(given.value, str) and given.value in PROFILES
    return given.value if given is not None and is_known else DEFAULT_PROFILE


def _default_settings(user: Settings, known: Mapping[KeyPath, Leaf]) -> dict[KeyPath, Setting]:
    """Return the default of every key, for the user's profile and sync.mode."""
    profile = _profile_of(user)
    mode = user.get(("sync", "mode"))
    is_pull = mode is not None and mode.value == "pull"
    found = {}
    for path, leaf in known.items():
        value = leaf.defaults[profile]
        source = f"profile {profile}" if leaf.key in PROFILES[profile] else DEFAULT
        if is_pull and leaf.key in PULL:
            value, source = PULL[leaf.key], "profile pull"
        found[path] = Setting(value, source)
    return found


def _validate(settings: Settings, known: Mapping[KeyPath, Leaf]) -> tuple[Config, list[Problem]]:
    """Return a configuration in which defaults replace invalid values.

    Also return one problem for each invalid value.
    """
    try:
        return Config.model_validate(nest(settings)), []
    except ValidationError as error:
        problems = value_problems(error, lambda place: _locate(known, place))
    bad = {problem.paths[0] for problem in problems}
    kept = {path: setting for path, setting in settings.items() if path[:2] not in bad}
    repaired = {**_default_settings(kept, known), **kept}
    return Config.model_validate(nest(repaired)), problems


def _locate(
    known: Mapping[KeyPath, Leaf], place: tuple[int | str, ...]
) -> tuple[KeyPath, Leaf | None]:
    path = tuple(map(str, place))
    if path[0] in KINDS:
        path = (path[0], *path[2:])  # pydantic puts the class of the section second
    leaf = _leaf_at(path[:2], known)
    return path if leaf is None else leaf.path, leaf


def _sources(settings: Settings, known: Mapping[KeyPath, Leaf]) -> dict[str, str]:
    """Return where each key's value comes from. The result is keyed by the dotted key.

    A table of the user's own keys may have several sources, joined by " + ".
    """
    found: dict[str, list[str]] = {leaf.key: [] for leaf in known.values()}
    for path, setting in settings.items():
        leaf = _leaf_at(path, known)
        if leaf is not None and setting.source not in found[leaf.key]:
            found[leaf.key].append(setting.source)
    return {
        key: " + ".join(sorted(set(names) - {DEFAULT}, key=OVERRIDE.__eq__) or names)
        for key, names in found.items()
    }


# --- texts ----------------------------------------------------------------------------------------
#
# For `--help` and `--dry-run`.


def schema_help(role: Role | None = None) -> str:
    """Return a help text for the keys that `role` reads: values, default and meaning.

    With None, return help on the keys of all roles.
    """
    lines = [
        'Configuration keys (TOML). Durations take "30s", "5min", "2h"; sizes take "8GiB", "200MB".'
    ]
    for (name, kind), group in _by_section(every_leaf(), role).items():
        lines.append("")
        if name:
            summary = (sections()[name][kind].__doc__ or "").partition("\n")[0]
            heading = f"[{name}] kind = {show(kind)}" if kind else f"[{name}]"
            lines.append(f"{heading}  {summary}")
        for leaf in group:
            lines.append(f"  {leaf.path[-1]} = {default_text(leaf)}")
            text = f"{leaf.help} Takes {leaf.expected}."
            lines += textwrap.wrap(text, 96, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines)


def dry_run_text(
    config: Config,
    role: Role,
    *,
    would_start: bool = True,
    budget: Budget | None = None,
    notices: Iterable[str] = (),
    preview: Iterable[str] = (),
) -> str:
    """Return the text of a dry run.

    The text says whether the node would start. It shows the settings, the memory budget, the
    notices and a preview of the data.
    """
    head = "would start" if would_start else "would not start, see the end"
    lines = [f"{head}: {_describe_start(config, role)}"]
    if budget is not None:
        lines.append(f"memory: {'' if budget.fits else 'DOES NOT FIT: '}{budget.line}")
    lines += [f"notice: {notice}" for notice in notices]
    lines += preview
    lines += ["", *resolved_lines(config, role)]
    return "\n".join(lines)


def resolved_lines(config: Config, role: Role | None = None) -> list[str]:
    """Return the configuration as lines of TOML, each with the source of its value."""
    lines: list[str] = []
    values = resolved(config)
    for (name, _), group in _by_section(leaves(kinds_of(config)).values(), role).items():
        if name:
            lines += ["", f"[{name}]"]
        for leaf in group:
            value = _at(values, leaf.path)
            notes = [config.sources.get(leaf.key, "")]
            if leaf.key.endswith("_bytes") and isinstance(value, int):
                notes.append(format_bytes(value))
            # TOML has no word for a missing value, and this text should load again.
            text = f"# {leaf.path[-1]}" if value is None else f"{leaf.path[-1]} = {show(value)}"
            if value is None:
                is_secret = getattr(getattr(config, leaf.path[0], None), leaf.path[-1], None)
                notes.append("a secret, which is not shown" if is_secret else "not set")
            note = ", ".join(filter(None, notes))
            lines.append(f"{text:<56} # {note}" if note else text)
    return lines


def _by_section(keys: Iterable[Leaf], role: Role | None) -> dict[tuple[str, str], list[Leaf]]:
    """Return the keys that `role` reads.

    The keys are grouped by the name and the kind of their section. The name is "" for keys outside
    sections. The kind is "" if the section has only one kind.
    """
    groups: dict[tuple[str, str], list[Leaf]] = {}
    for leaf in keys:
        if role is None or role in leaf.roles:
            place = leaf.path[0] if len(leaf.path) == 2 else ""
            groups.setdefault((place, "".join(leaf.kinds)), []).append(leaf)
    return groups


def _describe_start(config: Config, role: Role) -> str:
    if role == "learner":
        batch, period = config.batch, config.sync.publish_period
        rollouts = batch.groups_per_step * batch.group_size
        if period == "auto":
            cadence = f"auto, {config.sync.initial_publish_period} until measured"
        else:
            cadence = str(period)
        return (
            f"a learner of {config.model.name} on {config.learner.listen}, "
            f"{counted(config.run.max_steps, 'step')} of {counted(rollouts, 'rollout')} "
            f"({counted(batch.groups_per_step, 'group')} x {batch.group_size}) "
            f'of task "{config.task.kind}", staleness at most {config.sync.max_staleness}, '
            f"publish period {cadence}, into {config.run_dir}"
        )
    node = config.worker if role == "worker" else config.relay
    serves = f"serves on {node.listen}" if node.listen else "serves no weights to others"
    addresses = without_keys(", then ".join(node.connect)) or "the address of its join string"
    return f"a {role} that connects to {addresses} and {serves}"


# --- a changed configuration of a resumed run -----------------------------------------------------
# A change is safe if it affects only later steps: stored data and sampled rollouts keep their
# meaning. A change is unsafe if their meaning changes, or if processes that were not restarted
# would disagree. A key is safe unless it, or its section, is listed here.


_OTHER_RUN = "the run lives in that directory; start a new run with --init-from instead"
_OTHER_PROMPTS = "buffered groups and the position in the data belong to the old prompts"
_OTHER_SAMPLING = "buffered rollouts carry log-probs of the old distribution"
_OTHER_COUNTS = "the ledger and the admission of groups count in the old number"
_OLD_ADDRESS = "relays and workers that were not restarted dial the old address"
_OTHER_SECURITY = "relays and workers that were not restarted could not connect any more"
_OTHER_MODEL = "the checkpoint holds weights of the old model; start a new run with --init-from"

_UNSAFE: Mapping[str, str] = {
    "run.name": _OTHER_RUN,
    "run.dir": _OTHER_RUN,
    "run.seed": "the order of prompts follows from it: some would be drawn twice, others never",
    "model.name": _OTHER_MODEL,
    "model.revision": _OTHER_MODEL,
    "model.dtype": "workers that were not restarted hold versions in the old type",
    "model.chat_template": _OTHER_PROMPTS,
    "model.chat_template_kwargs": _OTHER_PROMPTS,
    "task.kind": _OTHER_PROMPTS,
    "task.options": _OTHER_PROMPTS,
    "sampling.temperature": _OTHER_SAMPLING,
    "sampling.top_p": _OTHER_SAMPLING,
    "sampling.top_k": _OTHER_SAMPLING,
    "sampling.min_p": _OTHER_SAMPLING,
    "sampling.min_tokens": _OTHER_SAMPLING,
    "batch.group_size": _OTHER_COUNTS + "; buffered groups have the old size",
    "batch.groups_per_step": _OTHER_COUNTS,
    "lora": _OTHER_MODEL,
    "learner.listen": _OLD_ADDRESS,
    "learner.advertise": _OLD_ADDRESS,
    "security.curve": _OTHER_SECURITY,
    "learner.init_from": "a resumed run takes its weights from its checkpoint",
}
"""Reasons why a change is unsafe. Each is listed under a dotted key or a section."""


@dataclass(frozen=True, slots=True)
class Change:
    """A setting with different values in two configurations of a run."""

    key: str
    old: Any
    new: Any
    unsafe_reason: str | None

    def __str__(self) -> str:
        text = f"{self.key}: {show(self.old)} -> {show(self.new)}"
        return f"UNSAFE {text} ({self.unsafe_reason})" if self.unsafe_reason else f"safe   {text}"


def diff_configs(old: Config, new: Config) -> list[Change]:
    """Return the settings that differ, in schema order."""
    before, after = resolved(old), resolved(new)
    changes = []
    for path, leaf in {**leaves(kinds_of(old)), **leaves(kinds_of(new))}.items():
        was, now = _at(before, path), _at(after, path)
        if was != now:
            unsafe_reason = _UNSAFE.get(leaf.key) or _UNSAFE.get(path[0])
            changes.append(Change(leaf.key, was, now, unsafe_reason))
    return changes


def keep_choices(saved: Config, config: Config) -> Config:
    """Return `config`, in which the dtype chosen at the first start replaces the dtype "auto"."""
    if config.learner.dtype != "auto":
        return config
    learner = config.learner.model_copy(update={"dtype": saved.learner.dtype})
    return config.model_copy(update={"learner": learner})


def _at(table: Any, path: Sequence[str]) -> Any:
    for part in path:
        table = table.get(part)
    return table


# --- what workers inherit -------------------------------------------------------------------------
# A worker needs only an address. The learner sends it these settings when it joins. A setting in
# the worker's own configuration must agree with the learner's, because it would be ignored.


_TEMPLATE = "model.chat_template"
"""The key that names the template's file. The learner sends workers the file's text instead of the
path."""
NO_TEMPLATE = "none"
"""Value of `model.chat_template` that switches all templates off, even the tokenizer's."""
_AGENTS = "agent.listen"
"""The key with the address for agents. Workers serve agents only if the learner sets this key. A
worker may choose another address."""


def inherited_settings(config: Config) -> dict[str, Any]:
    """Return the JSON values of the settings that the learner sends to workers, under dotted keys.

    Raises:
        ConfigError: if the chat template's file cannot be read.
    """
    return _inherited_values(config) | {_TEMPLATE: _template_text(config)}


def check_inherited(config: Config, settings: Mapping[str, Any]) -> list[str]:
    """Return one line for each setting of the worker that contradicts the learner's settings."""
    own = _inherited_values(config)
    del own[_TEMPLATE]
    given = config.model.chat_template
    if given is not None and (given == NO_TEMPLATE or local_path(given).exists()):
        # One file serves all machines, and only the learner needs the files that it names.
        own[_TEMPLATE] = _template_text(config)
    return [
        f"{config.sources.get(key, 'configuration')}: {key} = {brief(own[key])} contradicts the "
        f"learner, which uses {brief(settings[key])}; remove it here, or start without "
        "--config: a worker gets it from there"
        for key in own
        if key in keys_set_by_user(config)
        and key in settings
        and own[key] != settings[key]
        and not (key == _AGENTS and settings[key] is not None)
    ]


def apply_inherited(config: Config, settings: Mapping[str, Any]) -> Config:
    """Return the worker's configuration, in which the learner's values replace the worker's values.

    The key `model.chat_template` keeps the worker's own path. For this key, `settings` has a
    template's text, and not a path.

    Raises:
        ConfigError: if a setting does not fit this version's schema.
    """
    table = resolved(config)
    for key in inherited_keys():
        if key in settings and key != _TEMPLATE:
            section, name = key.split(".")
            if key != _AGENTS or table[section][name] is None:
                table[section][name] = settings[key]
    changed = parse_config(table, source="the learner's settings")
    inherited = {key: "learner" for key in inherited_keys() if key in settings and key != _TEMPLATE}
    return changed.with_sources({**config.sources, **inherited})


def has_own_model(config: Config) -> bool:
    """Return whether the worker takes its model from model.name.

    Otherwise the worker gets the learner's model. All machines share one configuration file. A hub
    id in this file is for the learner only. A name from --set, or a directory that exists on this
    machine, is for this worker.
    """
    name = config.model.name
    return name is not None and (
        local_path(name).is_dir() or config.sources.get("model.name") == OVERRIDE
    )


def _inherited_values(config: Config) -> dict[str, Any]:
    table = resolved(config)
    return {key: _at(table, key.split(".")) for key in inherited_keys()}


def _template_text(config: Config) -> str | None:
    if config.model.chat_template is None:
        return None
    if config.model.chat_template == NO_TEMPLATE:
        return ""
    path = local_path(config.model.chat_template)
    where = f"{config.sources.get(_TEMPLATE, 'configuration')}: {_TEMPLATE} = {show(str(path))}"
    try:
        text = read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{where}: cannot be read: {error}; give an existing Jinja file in UTF-8"
        ) from error
    if not text.strip():
        raise ConfigError(f'{where}: is empty; "{NO_TEMPLATE}" leaves prompts without a template')
    return text
