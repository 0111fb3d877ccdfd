"""Search and download of models on the Hugging Face hub.

A relay's dry run imports this module, so the module must not import torch.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

from echo.config.memory.models import find_model
from echo.config.schema import ModelSection, show
from echo.core.errors import DataError
from echo.core.extras import import_extra

CONFIG = "config.json"
DOWNLOAD_PATTERNS = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
"""Files to download: no Python code, and weights only in a format that cannot contain code."""


def directory_here(model: ModelSection, *files: str) -> Path | None:
    """Return a model's local directory; None if the model has none.

    `files` are names of files that the caller needs. A hub model has a local directory only if the
    hub's cache holds all of them.

    Raises:
        DataError: if the directory does not exist or holds no model, or if the name is not a valid
            hub id.
    """
    name = model.name or ""
    path = find_model(name, model.revision)
    return _cached(name, model.revision, *files) if path is None else path


def fetch_config(model: ModelSection) -> Path:
    """Return the directory with a model's config.json. If the file is missing, download it.

    Raises:
        DataError: if the model has no config.json, or the hub cannot be reached.
    """
    path = directory_here(model, CONFIG)
    if path is not None:
        return path
    name = model.name or ""
    ask(name, model.revision)
    hub = _library(name)
    try:
        return Path(hub.hf_hub_download(name, CONFIG, revision=model.revision)).parent
    except _errors(hub) as error:
        raise DataError(_explain(error, hub, name, model.revision, "model.name")) from error


def download(name: str, revision: str | None, key: str) -> Path:
    """Download the missing files of a hub model, and return the model's cache directory.

    Raises:
        DataError: if the model cannot be downloaded.
    """
    hub = _library(name)
    if _cached(name, revision, CONFIG, key=key) is None:
        ask(name, revision, key=key)
    try:
        patterns = DOWNLOAD_PATTERNS
        return Path(hub.snapshot_download(name, revision=revision, allow_patterns=patterns))
    except _errors(hub) as error:
        raise DataError(_explain(error, hub, name, revision, key)) from error


def ask(name: str, revision: str | None, *, key: str = "model.name") -> None:
    """Raise at once if the hub lacks a model or cannot be reached.

    A download would raise only after retries for 30 s.

    Raises:
        DataError: if the hub has no model of that name, or cannot be reached.
    """
    hub = _library(name)
    try:
        hub.get_hf_file_metadata(hub.hf_hub_url(name, CONFIG, revision=revision))
    except _errors(hub) as error:
        raise DataError(_explain(error, hub, name, revision, key)) from error


def _library(name: str) -> ModuleType:
    return import_extra("huggingface_hub", extra="worker", wanted_by=f"reading {name} on the hub")


def _errors(hub: ModuleType) -> tuple[type[Exception], ...]:
    return OSError, ValueError, *hub.errors.HfHubHTTPError.__bases__


def _cached(name: str, revision: str | None, *files: str, key: str = "model.name") -> Path | None:
    """Return a model's directory in the hub's cache, or None.

    Return None if the directory lacks one of `files`.

    Raises:
        DataError: if the name cannot be the id of a model on the hub.
    """
    hub = _library(name)
    try:
        found = [hub.try_to_load_from_cache(name, file, revision=revision) for file in files]
    except hub.errors.HFValidationError as error:
        raise DataError(_explain(error, hub, name, revision, key)) from error
    return Path(found[0]).parent if all(isinstance(each, str) for each in found) else None


def _explain(error: Exception, hub: ModuleType, name: str, revision: str | None, key: str) -> str:
    page, errors = f"https://huggingface.co/{name}", hub.errors
    copy = f"set {key} to a directory with a copy of the model"
    cause = str(error).partition("\n")[0] or type(error).__name__
    unreachable = f"the hub cannot be reached ({cause}); connect this machine, or {copy}"
    reasons = {
        errors.HFValidationError: "that is no id of a model on the hub either; check its spelling",
        errors.GatedRepoError: f"the hub gives it only to those who have accepted its terms: do so "
        f"at {page}, and set HF_TOKEN to your token",
        errors.RepositoryNotFoundError: "the hub has no such model, or it is not public: "
        "check its spelling, or set HF_TOKEN to a token that may read it",
        errors.RevisionNotFoundError: f"the hub has no revision {show(revision)} of it; "
        f"{page}/tree/main lists them",
        errors.LocalEntryNotFoundError: unreachable,
        errors.EntryNotFoundError: "the hub has no config.json of it; name a model in the format "
        "of transformers",
        errors.OfflineModeIsEnabled: f"HF_HUB_OFFLINE says not to ask the hub; unset it, or {copy}",
        Exception: unreachable,
    }
    reason = next(text for kind, text in reasons.items() if isinstance(error, kind))
    return f"{key} = {show(name)}: no directory or cached model here, and {reason}"
