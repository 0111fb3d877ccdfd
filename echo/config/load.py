"""From a TOML file and `--set` overrides to a checked configuration, or all that is wrong with it.

Sources, the later winning: the schema's defaults, the profile's, the file, each `--set` in order.
All problems are found in one pass: a value that is wrong on its own is reported, replaced by its
default, and the rules that join several keys are checked on the rest.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from pydantic import ValidationError

from echo.config.checks import check_config
from echo.config.layers import OVERRIDE, Problem, Setting, nest, read_layer, read_override
from echo.config.leaves import KeyPath, Leaf, every_leaf, kinds_of, leaves, show
from echo.config.profiles import DEFAULT_PROFILE, PROFILES, PULL
from echo.config.schema import KINDS, Config
from echo.config.section import OWN_KIND, ROLES, Role
from echo.core.errors import ConfigError, nearest

_FROM_DEFAULT = "default"
_IMPORT_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def load_config(path: Path | str, overrides: Sequence[str] = (), role: str | None = None) -> Config:
    """Read a TOML file and check it together with its overrides.

    Args:
        path: the file, for all roles.
        overrides: "section.key=value" each, values in TOML, else taken as text.
        role: learner, worker or relay: its required keys must be there. None asks for none.

    Raises:
        ConfigError: listing every problem with file, key, value and remedy.
    """
    try:
        table = tomllib.loads(_read_text(Path(path)))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    return parse_config(table, overrides, role, source=str(path))


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
        table: what a file would hold.
        overrides: "section.key=value" each.
        role: whose required keys must be there, or None.
        source: what messages call `table`.
        is_saved: whether `table` is what a run has saved, every key of it: values that an override
            leaves without effect then give way to their defaults, for nobody asked for them.
    """
    if role is not None and role not in ROLES:
        raise ConfigError(f'role "{role}" does not exist; choose one of {", ".join(ROLES)}')
    layers = [read_layer(table, source), *(read_override(text) for text in overrides)]
    user: dict[KeyPath, Setting] = {}
    for layer in layers:
        if layer.replaced is not None:
            place = layer.replaced
            user = {path: value for path, value in user.items() if path[: len(place)] != place}
        user.update(layer.settings)
    if is_saved:
        user = _without_old_defaults(layers[0].settings, user)
    settings, config, problems = _check(user, role)
    idle = [problem.paths[0][:2] for problem in problems if problem.is_idle] if is_saved else []
    if idle:
        kept = {p: s for p, s in user.items() if p[:2] not in idle or s.source == OVERRIDE}
        settings, config, problems = _check(kept, role)
    problems = [problem for layer in layers for problem in layer.problems] + problems
    if problems:
        raise ConfigError(_report([_describe(problem, settings, source) for problem in problems]))
    return config.with_sources(_sources(settings, leaves(kinds_of(config))))


def _check(
    user: Mapping[KeyPath, Setting], role: str | None
) -> tuple[dict[KeyPath, Setting], Config, list[Problem]]:
    """Return all settings, a valid configuration, and what is wrong with the user's."""
    kinds, problems = _choose_kinds(user)
    known = leaves(kinds)
    own = {path: setting for path, setting in user.items() if _leaf_at(path, known)}
    for problem in problems:
        del own[problem.paths[0]]
    settings = {**_default_settings(own, known), **own}
    config, wrong = _validate(settings, known)
    problems += wrong
    reported = {path for problem in problems for path in problem.paths}
    found = [*_keys_of_other_kinds(user, kinds), *check_config(config, cast("Role | None", role))]
    problems += [problem for problem in found if reported.isdisjoint(problem.paths)]
    return settings, config, problems


def _choose_kinds(user: Mapping[KeyPath, Setting]) -> tuple[dict[str, str], list[Problem]]:
    """Return which class each section with several has, and kinds that do not exist."""
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
            problems.append(Problem((path,), _say_expected(leaf, kind), user[path]))
    return kinds, problems


def _keys_of_other_kinds(
    user: Mapping[KeyPath, Setting], kinds: Mapping[str, str]
) -> Iterable[Problem]:
    """Yield a problem for each key that the chosen class of its section does not have."""
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


def _without_old_defaults(
    saved: Mapping[KeyPath, Setting], user: dict[KeyPath, Setting]
) -> dict[KeyPath, Setting]:
    """Return the settings without saved ones that were defaults of a kind that has gone."""
    before, _ = _choose_kinds(saved)
    after, _ = _choose_kinds(user)
    known, profile = leaves(before), _profile_of(saved)
    gone = {section for section in KINDS if before[section] != after[section]}
    return {
        path: setting
        for path, setting in user.items()
        if not (
            path[0] in gone
            and path[1:] != ("kind",)
            and setting is saved.get(path)
            and path in known
            and setting.value == known[path].defaults[profile]
        )
    }


def _leaf_at(path: KeyPath, known: Mapping[KeyPath, Leaf]) -> Leaf | None:
    """Return the key at `path`, or the table that it reaches into, or None."""
    leaf = known.get(path)
    table = known.get(path[:2])
    return leaf or (table if table is not None and table.is_table else None)


def resolved(config: Config) -> dict[str, Any]:
    """Return every value, defaults included, as nested tables that JSON can hold."""
    return config.model_dump(mode="json")


def save_resolved(config: Config, path: Path) -> None:
    """Write `resolved(config)` as JSON; a crash leaves the old file or the new one."""
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(resolved(config), indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)  # noqa: PTH105, the atomic one by name


def load_resolved(path: Path, overrides: Sequence[str] = (), role: str | None = None) -> Config:
    """Read what `save_resolved` wrote, with overrides on top.

    Saved values that the overrides leave without effect, such as options of another loss, give way.

    Raises:
        ConfigError: as `load_config`.
    """
    try:
        table = json.loads(_read_text(path))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(table, dict):
        raise ConfigError(f"{path}: holds no configuration but {show(table)[:60]}")
    return parse_config(table, overrides, role, source=str(path), is_saved=True)


def keys_set_by_user(config: Config) -> frozenset[str]:
    """Return the dotted keys that a file or `--set` gave, not a profile or default."""
    return frozenset(
        key
        for key, source in config.sources.items()
        if source != _FROM_DEFAULT and not source.startswith("profile ")
    )


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text: {error}") from error
    except OSError as error:
        reason = error.strerror or str(error)
        remedy = "give an existing, readable file; configs/ has examples"
        raise ConfigError(f"{path}: cannot be read: {reason}; {remedy}") from error


def _profile_of(user: Mapping[KeyPath, Setting]) -> str:
    profile = user[("profile",)].value if ("profile",) in user else DEFAULT_PROFILE
    known = isinstance(profile, str) and profile in PROFILES
    return cast("str", profile) if known else DEFAULT_PROFILE


def _default_settings(
    user: Mapping[KeyPath, Setting], known: Mapping[KeyPath, Leaf]
) -> dict[KeyPath, Setting]:
    """Return every key's default under the user's profile and mode."""
    profile = _profile_of(user)
    mode = user.get(("sync", "mode"))
    is_pull = mode is not None and mode.value == "pull"
    found = {}
    for path, leaf in known.items():
        value = leaf.defaults[profile]
        source = f"profile {profile}" if leaf.key in PROFILES[profile] else _FROM_DEFAULT
        if is_pull and leaf.key in PULL:
            value, source = PULL[leaf.key], "profile pull"
        found[path] = Setting(value, source)
    return found


def _validate(
    settings: Mapping[KeyPath, Setting], known: Mapping[KeyPath, Leaf]
) -> tuple[Config, list[Problem]]:
    """Return a valid configuration and what had to be replaced by its default for that."""
    try:
        return Config.model_validate(nest(settings)), []
    except ValidationError as error:
        problems = _value_problems(error, known)
    bad = {problem.paths[0] for problem in problems}
    kept = {path: setting for path, setting in settings.items() if path[:2] not in bad}
    repaired = {**_default_settings(kept, known), **kept}
    return Config.model_validate(nest(repaired)), problems


def _value_problems(error: ValidationError, known: Mapping[KeyPath, Leaf]) -> list[Problem]:
    """Return one problem per key; a union reports once for each of its members."""
    by_path: dict[KeyPath, Problem] = {}
    for detail in error.errors():
        place = [str(part) for part in detail["loc"]]
        if place[0] in KINDS:
            del place[1]  # which class of the section
        leaf = _leaf_at(tuple(place[:2]), known)
        if leaf is None:  # every other path was refused before validation
            raise AssertionError(f"validation reports an unknown place: {detail}") from error
        own_words = detail.get("ctx", {}).get("error")
        text = str(own_words) if own_words else _say_expected(leaf, detail["input"])
        by_path.setdefault(leaf.path, Problem((leaf.path,), text))
    return list(by_path.values())


def _say_expected(leaf: Leaf, value: object) -> str:
    has_choice = isinstance(value, str) and len(leaf.choices) > 1
    near = nearest(str(value), leaf.choices) if has_choice else None
    hint = f'; did you mean "{near}"?' if near else ""
    return f"must be {leaf.expected}{hint} ({leaf.help.rstrip('.')})"


def _describe(problem: Problem, settings: Mapping[KeyPath, Setting], file_name: str) -> str:
    """Return one line: file or --set, key, value, what is wrong."""
    if not problem.paths:
        return f"{OVERRIDE}: {problem.text}"
    path = problem.paths[0]
    setting = problem.setting or settings.get(path) or Setting(None, file_name)
    source = setting.source
    is_default = source == _FROM_DEFAULT or source.startswith("profile ")
    value = "" if setting.value is None else f" = {show(setting.value)}"
    if is_default and value:
        value += f" ({source})"
    prefix = file_name if is_default else source
    return f"{prefix}: {'.'.join(path)}{value}: {problem.text}"


def _report(lines: Iterable[str]) -> str:
    unique = list(dict.fromkeys(lines))
    if len(unique) == 1:
        return unique[0]
    return "\n  ".join([f"the configuration has {len(unique)} problems:", *unique])


def _sources(settings: Mapping[KeyPath, Setting], known: Mapping[KeyPath, Leaf]) -> dict[str, str]:
    """Return where each key came from; a table of the user's keys may have several sources."""
    found: dict[str, list[str]] = {leaf.key: [] for leaf in known.values()}
    for path, setting in settings.items():
        leaf = _leaf_at(path, known)
        if leaf is not None and setting.source not in found[leaf.key]:
            found[leaf.key].append(setting.source)
    return {
        key: " + ".join(sorted(set(names) - {_FROM_DEFAULT}, key=OVERRIDE.__eq__) or names)
        for key, names in found.items()
    }
