"""Reads rows from JSON Lines, Parquet files, saved datasets and the hub.

A dataset has one of these forms. Reading a dataset runs none of the dataset's code:

    rows.jsonl                          one JSON object per line, UTF-8; the file's name may also
                                        have another ending, except .parquet and .arrow
    rows.parquet                        needs pyarrow
    directory/                          the .parquet or the .jsonl files in it, in the order of
                                        their names; or what `datasets.Dataset.save_to_disk` wrote
    hf://ORG/NAME/CONFIG/SPLIT          the hub's own Parquet copy of that split, downloaded once

The package `datasets` is not used, because it gives every column a single type. So 5 becomes 5.0 if
another row has 5.5, and the text 2024-01-02 becomes a datetime. Errors of `datasets` do not name
the row.
"""

from __future__ import annotations

import datetime
import decimal
import json
import logging
import math
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echo.core.errors import ConfigError, DataError
from echo.core.extras import install_command
from echo.tasks.task import did_you_mean

_log = logging.getLogger(__name__)

HUB_PREFIX = "hf://"

PARQUET_REVISION = "refs/convert/parquet"
"""The branch on which the hub converts every dataset to Parquet."""

NUM_BATCH_ROWS = 1024
"""Number of rows that are read from a Parquet file at once. Each row becomes Python objects, which
take several times the memory of the file.
"""
_FILES = "_data_files"
"""Key under which the state.json of a saved dataset lists its files."""
_READ = (
    "a dataset is JSON Lines (UTF-8, one object a line), Parquet (.parquet), a directory of such "
    "files, or what datasets.save_to_disk wrote"
)
_SPLITS = ("train", "test", "validation", "valid", "val", "dev", "eval", "heldout")
_BOM = b"\xef\xbb\xbf"
_FOREIGN = {
    b"\x1f\x8b": "compressed with gzip: unpack it",
    b"\x28\xb5\x2f\xfd": "compressed with zstd: unpack it",
    b"BZh": "compressed with bzip2: unpack it",
    b"\xfd7zXZ": "compressed with xz: unpack it",
    b"PK\x03\x04": "an archive: unpack it",
    b"\xff\xfe": "UTF-16: save it as UTF-8",
    b"\xfe\xff": "UTF-16: save it as UTF-8",
    b"PAR1": "Parquet: call it .parquet",
    b"ARROW1": "an Arrow file: save it as Parquet",
}
"""First bytes of files that are not JSON Lines -> the format and the remedy."""


@dataclass(frozen=True, slots=True)
class DatasetRow:
    """A row of a dataset, and the place of the row in its file."""

    source: str
    """The file and the line of the row, such as "train.jsonl:12". For a table, the row's number
    takes the place of the line. Lines and rows count from 1.
    """
    columns: dict[str, Any]
    """The values of the row by column, in JSON's types."""


Rows = Iterator[DatasetRow | DataError]
"""Rows in order. A malformed row is replaced by an error that names the file and the row."""


def read_rows(path: str, leave_out: Collection[str] = ()) -> Rows:
    """Yield the rows of a dataset, and an error for each malformed row.

    Columns of bytes and durations in tables are left out with a warning, because a lease cannot
    contain such values.

    Args:
        path: the dataset, in one of the forms above.
        leave_out: names of further columns to leave out.

    Raises:
        DataError: if the dataset cannot be read.
        ConfigError: if a package is missing, or no row has a column of `leave_out`.
    """
    names: dict[str, str] = {}
    """Name of each column found so far -> the type of its values, such as "bytes", if no lease can
    contain such values; else "".
    """
    for file in dataset_files(path):
        if file.suffix in (".parquet", ".arrow"):
            yield from _read_columns(file, path, leave_out, names)
            continue
        for row in _read_jsonl(file):
            if isinstance(row, DatasetRow):
                names |= dict.fromkeys(row.columns, "")
                for name in leave_out:
                    row.columns.pop(name, None)
            yield row
    if absent := [name for name in leave_out if name not in names]:
        raise ConfigError(
            f"task.options.leave_out: {path} has no column {absent[0]!r}"
            f"{did_you_mean(absent[0], names)}; it has {', '.join(names)}"
        )


def is_local(path: str) -> bool:
    """Return whether a dataset can be read without a download.

    If a download is needed, check that the hub has the split.

    Raises:
        DataError: if the dataset is not local, and the hub cannot be reached or has no such split.
    """
    if not path.startswith(HUB_PREFIX):
        return True
    try:
        return bool(_download(path, local_files_only=True))
    except DataError:
        _download(path, dry_run=True)
        return False


def dataset_files(path: str) -> list[Path]:
    """Return the files of a dataset, in reading order.

    Raises:
        DataError: if a directory has no files of a dataset, or a download fails.
    """
    if path.startswith(HUB_PREFIX):
        return _download(path)
    try:
        place = Path(path).expanduser()
        if not place.is_dir():
            return [place]
    except (OSError, RuntimeError) as error:  # too long a name, or an unknown user
        raise DataError(f"{path}: cannot read the dataset: {error}; see task.options") from error
    state = place / "state.json"
    if state.is_file():
        try:
            return [place / entry["filename"] for entry in json.loads(state.read_bytes())[_FILES]]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{state}: is not as `datasets.Dataset.save_to_disk` writes it: {error!r}; save "
                "the dataset again"
            ) from error
    tables, lines = sorted(place.glob("*.parquet")), sorted(place.glob("*.jsonl"))
    if tables and lines:
        raise DataError(
            f"{place}: holds {tables[0].name} and {lines[0].name}; leave files of one kind there, "
            "or name one file"
        )
    if files := tables or lines:
        named = {split: file.name for file in files if (split := _split_of(file))}
        if len(named) > 1:
            raise DataError(
                f"{place}: holds several splits: {', '.join(named.values())}; name the files of "
                "one (or a directory with these alone) in task.options.path, those of another in "
                "task.options.heldout_path"
            )
        return files
    splits = sorted(child.name for child in place.iterdir() if (child / "state.json").is_file())
    remedy = (
        f"name one of its splits: {', '.join(str(place / split) for split in splits)}"
        if splits
        else _READ
    )
    raise DataError(f"{place}: no dataset files in this directory; {remedy}")


def _split_of(file: Path) -> str:
    """Return the split with which a file's name begins (test-00000-of-00001), or ""."""
    word = re.split(r"[-_.]", file.name.lower())[0]
    return {"val": "validation", "valid": "validation"}.get(word, word) if word in _SPLITS else ""


def _read_jsonl(path: Path) -> Rows:
    with _open(path) as file:
        content = file.read()
    if kind := _foreign_kind(path, content):
        raise DataError(f"{path}: is {kind}; {_READ}")
    for number, line in enumerate(content.splitlines(), start=1):
        raw = line.removeprefix(_BOM)  # Windows editors write one, and joined files have several
        if not raw.strip():
            continue
        source = f"{path}:{number}"
        try:
            row = _parse_object(raw.decode())
        except UnicodeDecodeError as error:
            yield DataError(
                f"{source}: malformed row: {error}; save the file as UTF-8 (one in Latin-1 with "
                "iconv -f latin1 -t utf-8)"
            )
        except (ValueError, TypeError, RecursionError) as error:
            yield DataError(f"{source}: malformed row: {error}")
        else:
            yield DatasetRow(source, row)


def _foreign_kind(path: Path, content: bytes) -> str:
    """Return what format a file has instead of JSON Lines, with the remedy; "" if not known."""
    head = content[:65536].removeprefix(_BOM).lstrip()
    for start, kind in _FOREIGN.items():
        if content.startswith(start):
            return kind
    if head.count(0) > len(head) // 4:
        return "UTF-16, or no text: save it as UTF-8"
    first_line = head.split(b"\n", 1)[0].strip()
    if first_line.startswith(b"[") and not _is_list_without_objects(first_line):
        return "one JSON array: write each of its objects into a line of its own"
    if first_line == b"{":
        return "JSON over several lines: write each object into a line of its own"
    lines = [line.removeprefix(_BOM).lstrip() for line in head.splitlines()]
    if first_line and not any(line[:1] in (b"{", b"[") for line in lines):
        what = "a table of another kind" if path.suffix in (".jsonl", ".json") else path.suffix
        return f"{what or 'another kind of file'}: write each row as a JSON object into a line"
    return ""


def _is_list_without_objects(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), list) and b"{" not in line
    except (ValueError, RecursionError):
        return False


def _parse_object(line: str) -> dict[str, Any]:
    # Python writes NaN for an empty cell of a table.
    row = json.loads(
        line,
        parse_constant=lambda name: None if name == "NaN" else float(name),
        object_pairs_hook=_table_of,
    )
    if not isinstance(row, dict):
        raise TypeError(f"must be a JSON object, not {type(row).__name__}")
    return row


def _table_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        name = next(name for number, (name, _) in enumerate(pairs) if name in dict(pairs[:number]))
        raise ValueError(f"{name!r} stands in it twice; which value counts?")
    return table


def _read_columns(
    path: Path, dataset: str, leave_out: Collection[str], names: dict[str, str]
) -> Rows:
    pyarrow = _import_pyarrow(path)
    is_stream = path.suffix == ".arrow"
    # Opened here, since pyarrow's error for a missing file names neither path nor remedy.
    with _open(path) as file:
        try:
            if is_stream:
                batches = pyarrow.ipc.open_stream(file)
                schema = batches.schema
            else:
                parquet = pyarrow.parquet.ParquetFile(file)
                schema = parquet.schema_arrow
            if twice := sorted(name for name, n in Counter(schema.names).items() if n > 1):
                raise DataError(
                    f"{path}: has two columns `{twice[0]}`; rename one of them, or drop it"
                )
            own = {field.name: _find_unsendable(pyarrow, field.type) for field in schema}
            new = {name: own[name] for name in own if name not in {*names, *leave_out}}
            _warn_of_columns(dataset, new)
            names |= own
            kept = [name for name in schema.names if not names[name] and name not in leave_out]
            if not is_stream:
                batches = parquet.iter_batches(NUM_BATCH_ROWS, columns=kept)
            yield from _batch_rows(path, batches, kept)
        except (pyarrow.ArrowException, OSError) as error:
            kind = "an Arrow stream" if is_stream else "Parquet"
            raise DataError(f"{path}: not readable as {kind}: {error}") from error


def _warn_of_columns(path: str, columns: Mapping[str, str]) -> None:
    if unable := ", ".join(f"`{name}` ({what})" for name, what in columns.items() if what):
        _log.warning("%s: left out columns that cannot travel to a worker: %s", path, unable)


def _find_unsendable(pyarrow: Any, kind: Any) -> str:
    """Return which values of an Arrow type a lease cannot contain, or ""."""
    types = pyarrow.types
    if types.is_struct(kind):
        inner = (_find_unsendable(pyarrow, field.type) for field in kind)
        return next(filter(None, inner), "")
    if types.is_map(kind):
        return _find_unsendable(pyarrow, kind.item_type)
    if hasattr(kind, "value_type") and not types.is_dictionary(kind):  # lists of all sizes
        return _find_unsendable(pyarrow, kind.value_type)
    if types.is_dictionary(kind):
        return _find_unsendable(pyarrow, kind.value_type)
    checks = {
        "bytes": (
            *(types.is_binary, types.is_large_binary, types.is_fixed_size_binary),
            getattr(types, "is_binary_view", types.is_binary),  # not in older releases
        ),
        "durations": (types.is_duration, types.is_interval),
    }
    found = (what for what, tests in checks.items() if any(test(kind) for test in tests))
    return next(found, "")


def _batch_rows(path: Path, batches: Any, names: Sequence[str]) -> Rows:
    number = 0
    for batch in batches:
        for values in batch.select(names).to_pylist():
            number += 1
            source = f"{path}:{number}"
            try:
                columns = {name: _to_json(value, name, source) for name, value in values.items()}
            except DataError as error:
                yield error
                continue
            yield DatasetRow(source, columns)


def _to_json(value: Any, column: str, source: str) -> Any:
    """Return a value converted to JSON's types, because a lease contains only these types.

    Null fields of objects are dropped. In a typed table, every object has the fields of all objects
    in the column, and the fields that it lacked before are null.
    """
    match value:
        case float():
            return None if math.isnan(value) else value  # pandas writes NaN for an empty cell
        case None | bool() | int() | str():
            return value
        case list() if value and all(isinstance(item, tuple) for item in value):  # an Arrow map
            return {str(key): _to_json(item, column, source) for key, item in value}
        case list():
            return [_to_json(item, column, source) for item in value]
        case dict():
            return {
                str(key): _to_json(item, column, source)
                for key, item in value.items()
                if item is not None
            }
        case datetime.date() | datetime.time():
            return value.isoformat()
        case decimal.Decimal():
            number = float(value)
            return number if decimal.Decimal(repr(number)) == value else str(value)
    raise DataError(
        f"{source}: malformed row: column {column!r} holds {type(value).__name__}, which cannot "
        f'travel to a worker; set task.options.leave_out = ["{column}"], or store it as text'
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


def _open(path: Path) -> Any:
    try:
        if path.exists() and not path.is_file():
            raise DataError(f"{path}: is a device or pipe, and no dataset; see task.options")
        return path.open("rb")
    except OSError as error:
        raise DataError(
            f"{path}: cannot read the dataset: {error.strerror}; the path is relative to "
            f"{Path.cwd()}; see task.options"
        ) from error


def _download(path: str, **options: Any) -> list[Path]:
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
        # The outer error of a dry run says only that it was a dry run.
        cause = (options.get("dry_run") and error.__cause__) or error
        line = str(cause).splitlines()[0].rstrip(".")
        raise DataError(
            f"{path}: the hub cannot deliver it: {type(cause).__name__}: {line}. Without a network "
            "fetch it where there is one,\n"
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
