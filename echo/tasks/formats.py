"""Rows of a dataset from whatever form it has on disk or on the Hugging Face hub.

    rows.jsonl                          one JSON object per line (any ending that is not below)
    rows.parquet                        needs pyarrow
    directory/                          all .parquet, else all .jsonl files in it, by name; or what
                                        `datasets.Dataset.save_to_disk` wrote
    hf://ORG/NAME/CONFIG/SPLIT          the hub's own Parquet copy of that split, downloaded once

No form runs code of the dataset's. The package `datasets` is not needed for any of them.
"""

from __future__ import annotations

import datetime
import decimal
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echo.errors import ConfigError, DataError
from echo.extras import install_command

HUB_PREFIX = "hf://"

PARQUET_REVISION = "refs/convert/parquet"
"""The branch on which the hub keeps every dataset as Parquet."""

NUM_BATCH_ROWS = 1024

OnBad = Callable[[DataError], None]


@dataclass(frozen=True, slots=True)
class Row:
    """One row, with where it stands."""

    source: str
    """"train.jsonl:12" by line, "train.parquet:12" by row, both from 1."""
    columns: dict[str, Any]
    """Its values by column: plain JSON."""
    text: str
    """What decides its side where a dataset is split by hash."""


def refuse(error: DataError) -> None:
    """Stop at a malformed row."""
    raise error


def read_rows(path: str, on_bad: OnBad = refuse) -> Iterator[Row]:
    """Yield the rows of a dataset in their order.

    Args:
        path: of the dataset.
        on_bad: called with what is wrong with a malformed row, which names file and row; if it
            returns, the row is left out.

    Raises:
        DataError: if it cannot be read.
        ConfigError: if a package is missing.
    """
    for file in dataset_files(path):
        match file.suffix:
            case ".parquet":
                yield from _read_parquet(file, on_bad)
            case ".arrow":
                yield from _read_arrow(file, on_bad)
            case _:
                yield from _read_jsonl(file, on_bad)


def is_local(path: str) -> bool:
    """Return whether a dataset can be read without a download; the hub is asked for what cannot.

    Raises:
        DataError: if it is not here, and the hub cannot be asked or has no such split.
    """
    if not path.startswith(HUB_PREFIX):
        return True
    try:
        return bool(_download(path, local_files_only=True))
    except DataError:
        _download(path, dry_run=True)
        return False


def dataset_files(path: str) -> list[Path]:
    """Return the files of a dataset, in the order in which they are read.

    Raises:
        DataError: if a directory has none, or the hub cannot deliver.
    """
    if path.startswith(HUB_PREFIX):
        return _download(path)
    place = Path(path).expanduser()
    if not place.is_dir():
        return [place]
    state = place / "state.json"
    if state.is_file():
        names = json.loads(state.read_bytes()).get("_data_files", [])
        return [place / entry["filename"] for entry in names]
    for ending in ("*.parquet", "*.jsonl"):
        if files := sorted(place.glob(ending)):
            return files
    splits = sorted(child.name for child in place.iterdir() if (child / "state.json").is_file())
    remedy = (
        f"name one of its splits: {', '.join(str(place / split) for split in splits)}"
        if splits
        else "a dataset is a .jsonl or .parquet file, or a directory of them"
    )
    raise DataError(f"{place}: no dataset files in this directory; {remedy}")


def _read_jsonl(path: Path, on_bad: OnBad) -> Iterator[Row]:
    for number, raw in enumerate(_read_bytes(path).splitlines(), start=1):
        if not raw.strip():
            continue
        source = f"{path}:{number}"
        try:
            line = raw.decode()
            row = _parse_object(line)
        except (ValueError, TypeError) as error:
            on_bad(DataError(f"{source}: malformed row: {error}"))
            continue
        yield Row(source, row, line)


def _parse_object(line: str) -> dict[str, Any]:
    row = json.loads(line)
    if not isinstance(row, dict):
        raise TypeError(f"must be a JSON object, not {type(row).__name__}")
    return row


def _read_parquet(path: Path, on_bad: OnBad) -> Iterator[Row]:
    pyarrow = _import_pyarrow(path)
    # Opened by hand: pyarrow's own error for a missing file names neither path nor remedy.
    with _open(path) as file:
        try:
            batches = pyarrow.parquet.ParquetFile(file).iter_batches(NUM_BATCH_ROWS)
            yield from _batch_rows(path, batches, on_bad)
        except pyarrow.ArrowException as error:
            raise DataError(f"{path}: not readable as Parquet: {error}") from error


def _read_arrow(path: Path, on_bad: OnBad) -> Iterator[Row]:
    pyarrow = _import_pyarrow(path)
    with _open(path) as file:
        try:
            yield from _batch_rows(path, pyarrow.ipc.open_stream(file), on_bad)
        except pyarrow.ArrowException as error:
            raise DataError(f"{path}: not readable as an Arrow stream: {error}") from error


def _batch_rows(path: Path, batches: Any, on_bad: OnBad) -> Iterator[Row]:
    number = 0
    for batch in batches:
        for values in batch.to_pylist():
            number += 1
            source = f"{path}:{number}"
            try:
                columns = {name: _to_json(value, name, source) for name, value in values.items()}
            except DataError as error:
                on_bad(error)
                continue
            yield Row(source, columns, json.dumps(columns, sort_keys=True))


def _to_json(value: Any, column: str, source: str) -> Any:
    """Return a value as plain JSON: a lease carries it."""
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list():
            return [_to_json(item, column, source) for item in value]
        case dict():
            return {str(key): _to_json(item, column, source) for key, item in value.items()}
        case datetime.date() | datetime.time():
            return value.isoformat()
        case decimal.Decimal():
            return float(value)
    raise DataError(
        f"{source}: malformed row: column {column!r} holds {type(value).__name__}, which cannot "
        "travel to a worker; drop the column or store it as text or numbers"
    )


def _import_pyarrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(
            f"{path} needs the package pyarrow: {install_command('parquet')}; or convert it to "
            "JSONL"
        ) from error
    return pyarrow


def _read_bytes(path: Path) -> bytes:
    with _open(path) as file:
        content: bytes = file.read()
        return content


def _open(path: Path) -> Any:
    try:
        return path.open("rb")
    except OSError as error:
        raise DataError(
            f"{path}: cannot read the dataset: {error.strerror}; the path is relative to "
            f"{Path.cwd()}; see task.options"
        ) from error


def _download(path: str, **options: Any) -> list[Path]:
    """Download one split from the hub, unless it is in its cache; a dry run only asks for it."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    parts = path.removeprefix(HUB_PREFIX).strip("/").split("/")
    if len(parts) != 4:
        raise ConfigError(
            f"{path!r}: a dataset on the hub is named hf://ORG/NAME/CONFIG/SPLIT, such as "
            "hf://openai/gsm8k/main/train; its page lists configs (subsets) and splits"
        )
    repository, folder = "/".join(parts[:2]), "/".join(parts[2:])
    try:
        found: Any = snapshot_download(
            repository,
            repo_type="dataset",
            revision=PARQUET_REVISION,
            allow_patterns=f"{folder}/*.parquet",
            **options,
        )
    except (HfHubHTTPError, HFValidationError, OSError, ValueError) as error:
        raise DataError(
            f"{path}: the hub cannot deliver it: {type(error).__name__}: "
            f"{str(error).splitlines()[0]}. Without a network fetch it where there is one,\n"
            f"  hf download {repository} --repo-type dataset --revision {PARQUET_REVISION} "
            f"--include '{folder}/*.parquet' --local-dir DIR\n"
            f"copy DIR here and write DIR/{folder} in place of {path} in the configuration"
        ) from error
    if options.get("dry_run"):
        files = [Path(file.filename) for file in found]
    else:
        files = sorted((Path(found) / folder).glob("*.parquet"))
    if not files:
        raise DataError(
            f"{path}: {repository} has no split {folder!r} (CONFIG/SPLIT) as Parquet on the hub"
        )
    return files
