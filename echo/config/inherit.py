"""What the learner decides for its workers, and what a worker says when its own file disagrees.

A worker needs nothing but an address. These settings travel to it when it joins; one that its
user wrote down must agree, because it would be ignored otherwise.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from echo.config.leaves import inherited_keys, show
from echo.config.load import parse_config, resolved
from echo.config.schema import Config
from echo.core.errors import ConfigError

_TEMPLATE = "model.chat_template"
"""Travels as the file's text; all others as their value."""
_AGENTS = "agent.listen"
"""Whether there is one is for the learner to say; a worker may have an address of its own."""


def inherited_settings(config: Config) -> dict[str, Any]:
    """Return what the learner sends to workers, by dotted key, as plain JSON-able values.

    Raises:
        ConfigError: if the chat template's file cannot be read.
    """
    values = {key: _value(resolved(config), key) for key in inherited_keys()}
    values[_TEMPLATE] = _template_text(config)
    return values


def check_inherited(
    config: Config, keys_set_by_user: Collection[str], settings: Mapping[str, Any]
) -> list[str]:
    """Return one line per setting of the worker's own that contradicts the learner's.

    Args:
        config: the worker's.
        keys_set_by_user: `load.keys_set_by_user(config)`; defaults contradict nothing.
        settings: what the learner sent.
    """
    own = {key: _value(resolved(config), key) for key in inherited_keys() if key != _TEMPLATE}
    if config.model.chat_template is not None and Path(config.model.chat_template).exists():
        # One file serves all machines, and only the learner needs to have what it names.
        own[_TEMPLATE] = _template_text(config)
    return [
        f"{config.sources.get(key, 'configuration')}: {key} = {_brief(own[key])} contradicts the "
        f"learner, which uses {_brief(settings[key])}; remove it here, a worker gets it from there"
        for key in inherited_keys()
        if key in keys_set_by_user
        and key in own
        and key in settings
        and own[key] != settings[key]
        and not (key == _AGENTS and settings[key] is not None)
    ]


def apply_inherited(config: Config, settings: Mapping[str, Any]) -> Config:
    """Return the worker's configuration with the learner's settings in it.

    The chat template stays as it is: its key holds a path, `settings` its text.

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


def _value(table: Mapping[str, Any], key: str) -> Any:
    section, name = key.split(".")
    return table[section][name]


def _template_text(config: Config) -> str | None:
    if config.model.chat_template is None:
        return None
    path = Path(config.model.chat_template)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{config.sources.get(_TEMPLATE, 'configuration')}: {_TEMPLATE} = "
            f"{show(str(path))}: cannot be read: {error}; give an existing Jinja file in UTF-8"
        ) from error


def _brief(value: object) -> str:
    text = show(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
