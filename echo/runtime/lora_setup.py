"""From [lora] to an adapter and the base model under it, on the learner and on its workers.

The learner's base is what the run starts from: learner.init_from if that is a whole model, else
model.name. A worker samples from the same bytes or not at all: it takes its own model.name, or else
the directory or hub id that the learner names, whichever has the learner's hash.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from echo.config.schema import Config
from echo.core.errors import ConfigError, DataError
from echo.engine.lora import Lora, base_digest, is_adapter
from echo.engine.weights import resolve_model
from echo.records.files import write_file

NAME, REVISION, DIGEST = "base.name", "base.revision", "base.digest"
"""What the learner tells its workers beside the inherited settings."""


def learner_lora(config: Config, model_dir: Path) -> Lora | None:
    """Return the adapter that a learner trains; None if it trains all weights."""
    start = _initial_directory(config)
    base_dir = model_dir if start is None or is_adapter(start) else start
    return make_lora(config, base_dir)


def make_lora(config: Config, base_dir: Path) -> Lora | None:
    """Return the adapter of a configuration, its base in `base_dir`; None for none."""
    section = config.lora
    if not section.rank:
        return None
    return Lora(
        base_dir=base_dir,
        rank=section.rank,
        alpha=2 * section.rank if section.alpha is None else section.alpha,
        target_modules=section.target_modules,
    )


def initial_adapter(config: Config) -> Path | None:
    """Return the directory of the adapter that a run starts from, if it does from one.

    Raises:
        ConfigError: if there is one, and [lora] is off.
    """
    start = _initial_directory(config)
    if start is None or not is_adapter(start):
        return None
    if not config.lora.rank:
        raise ConfigError(
            f"learner.init_from = {str(start)!r} holds an adapter and no whole model: set "
            "lora.rank to its rank to train it on, or merge it into its base (peft's "
            "merge_and_unload)"
        )
    return start


def base_name(config: Config, lora: Lora) -> str:
    """Return under which name others find the base: an absolute directory, or a hub id."""
    name = str(config.model.name)
    is_hub_id = not Path(name).expanduser().is_dir() and _is_models(config, lora)
    return name if is_hub_id else str(lora.base_dir.absolute())


def base_settings(config: Config, lora: Lora | None, *, is_resumed: bool) -> dict[str, Any]:
    """Return what workers are told of the base, which is hashed for it; nothing without adapter.

    Raises:
        DataError: if its weights are missing, or have changed since the run began.
    """
    if lora is None:
        return {}
    digest = base_digest(lora.base_dir)
    path = config.run_dir / "base.json"
    if not is_resumed:
        write_file(path, json.dumps({"digest": digest}).encode())
    elif json.loads(path.read_bytes())["digest"] != digest:
        raise DataError(
            f"the weights in {lora.base_dir} are not those that this run's adapter was trained on; "
            "put them back, or start a new run"
        )
    revision = config.model.revision if _is_models(config, lora) else None
    return {NAME: base_name(config, lora), REVISION: revision, DIGEST: digest}


def worker_lora(config: Config, settings: Mapping[str, Any]) -> Lora | None:
    """Return the adapter of a worker, over a base with the learner's hash.

    Args:
        config: the worker's, with what it inherits.
        settings: what the learner sent.

    Raises:
        ConfigError: if no such base can be found here.
    """
    if not config.lora.rank:
        return None
    model = config.model
    tried = []
    for name, revision in ((model.name, model.revision), (settings[NAME], settings[REVISION])):
        if name is None:
            continue
        try:
            directory = resolve_model(name, revision)
            if base_digest(directory) == settings[DIGEST]:
                return make_lora(config, directory)
        except DataError as error:
            tried.append(str(error))
        else:
            tried.append(f"{name}: other weights than the learner's base")
    raise ConfigError(
        "\n  ".join(
            [
                f"the learner trains an adapter on {settings[NAME]}, and only the adapter is sent: "
                "copy that directory here and set model.name to it",
                *tried,
            ]
        )
    )


def _initial_directory(config: Config) -> Path | None:
    start = config.learner.init_from
    return None if start is None else Path(start).expanduser()


def _is_models(config: Config, lora: Lora) -> bool:
    """Return whether the base is what model.name names."""
    start = _initial_directory(config)
    return start is None or lora.base_dir != start
