r"""Dataset tasks: rows of any form, any reward function, mixtures.

    [task]
    kind = "dataset"
    options = { path = "train.parquet", reward = "rewards.py:correct" }

A dataset has one of these forms; none of them runs code of the dataset's, and the package
`datasets` is not needed:

    rows.jsonl                          one JSON object per line, UTF-8 (any ending that is not
                                        below)
    rows.parquet                        needs pyarrow
    directory/                          all .parquet, else all .jsonl files in it, by name; or what
                                        `datasets.Dataset.save_to_disk` wrote
    hf://ORG/NAME/CONFIG/SPLIT          the hub's own Parquet copy of that split, downloaded once

`reward` names a function of the user's (reward_functions.py), or "exact" or "math" (answers.py),
which need none.

**Rows.** The default reading of a row takes `prompt` (text or messages) or `messages` (a list of
objects with `role` and `content`), and optionally `tools`, `answer` and `info`; all other columns
are kept under their names. Messages whose last is the assistant's are supervised data more often
than the beginning of an answer: `assistant_last` has to say which. A typed table gives every row
all fields of its objects; those that are null are dropped there, and kept in JSONL. A subclass with
other needs overrides `read_row`, and every subclass says what a completion is worth:

    class Capitals(RowsTask):
        def reward(self, example: Example, completion: str) -> float:
            return float(example.answer.lower() in completion.lower())

Datasets are read at the first example and checked whole, so a malformed row stops the run at its
start, named by file and row, and not in the middle of it; unless `skip_bad` leaves such rows out.
So does a row whose prompt does not fit into the model's window (`examine`). Without held-out rows
of their own one prompt in ten is held out, with all rows that have it.

**Mixtures.** Several tasks in one run, by weight:

    [task]
    kind = "mixture"

    [[task.options.tasks]]
    kind = "gsm8k"
    weight = 3
    options = { path = "gsm8k.jsonl" }

    [[task.options.tasks]]
    kind = "my_task:Reverse"

Of every thousand examples each task has its share, spread evenly, so a batch of any size is mixed
as the weights say. A finite dataset is visited whole, in a new order, before it is visited again.
Each example carries the name of its task; answers go to that one. Where an environment of several
turns is among the tasks, the others are played as episodes of one turn.
"""

from __future__ import annotations

import datetime
import decimal
import functools
import inspect
import json
import logging
import math
import random
import re
import unicodedata
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from echo.core.bounds import MAX_LEASE_BYTES
from echo.core.errors import ConfigError, DataError, EchoError
from echo.core.extras import install_command
from echo.core.units import format_bytes
from echo.tasks.environment import Environment, Reply
from echo.tasks.messages import Message, fault_of_messages, plain_message
from echo.tasks.reward_functions import RewardFunction
from echo.tasks.task import (
    Example,
    Reward,
    Rewards,
    Task,
    did_you_mean,
    is_heldout,
    load_task,
)

# --- forms on disk and on the hub -----------------------------------------------------------------


HUB_PREFIX = "hf://"

PARQUET_REVISION = "refs/convert/parquet"
"""The branch on which the hub keeps every dataset as Parquet."""

NUM_BATCH_ROWS = 1024
_FILES = "_data_files"
"""Key under which a saved dataset's state.json has its files."""
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
"""First bytes of files that are no JSON Lines, and the remedy."""


@dataclass(frozen=True, slots=True)
class DatasetRow:
    """One row, with where it stands."""

    source: str
    """"train.jsonl:12" by line, "train.parquet:12" by row, both from 1."""
    columns: dict[str, Any]
    """Its values by column: plain JSON."""


Rows = Iterator[DatasetRow | DataError]
"""Rows in their order; in place of a malformed one what is wrong with it, naming file and row."""


def read_rows(path: str, leave_out: Collection[str] = ()) -> Rows:
    """Yield the rows of a dataset, and the errors of those that are malformed.

    Columns of a table that no lease could carry are left out, and told.

    Args:
        path: of the dataset.
        leave_out: further columns that rows shall not have.

    Raises:
        DataError: if it cannot be read.
        ConfigError: if a package is missing, or no row has a column that is to be left out.
    """
    names: dict[str, str] = {}
    """Of all columns so far, and what those of a table hold that cannot travel."""
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
    try:
        place = Path(path).expanduser()
        if not place.is_dir():
            return [place]
    except (OSError, RuntimeError) as error:  # too long for a name, or an unknown user's home
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
    """Return which split a file is by its name, such as test-00000-of-00001; empty for none."""
    word = re.split(r"[-_.]", file.name.lower())[0]
    return {"val": "validation", "valid": "validation"}.get(word, word) if word in _SPLITS else ""


def _read_jsonl(path: Path) -> Rows:
    with _open(path) as file:
        content = file.read()
    if kind := _foreign_kind(path, content):
        raise DataError(f"{path}: is {kind}; {_READ}")
    for number, line in enumerate(content.splitlines(), start=1):
        raw = line.removeprefix(_BOM)  # editors on Windows write it, and joined files have several
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
    """Return what a file is that is read as JSON Lines, and what to do; empty if it may be some."""
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
    # Python writes NaN where a table had nothing.
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
    # Opened by hand: pyarrow's own error for a missing file names neither path nor remedy.
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
            own = {field.name: _what_cannot_travel(pyarrow, field.type) for field in schema}
            new = {name: own[name] for name in own if name not in {*names, *leave_out}}
            _tell_unable(dataset, new)
            names |= own
            kept = [name for name in schema.names if not names[name] and name not in leave_out]
            if not is_stream:
                batches = parquet.iter_batches(NUM_BATCH_ROWS, columns=kept)
            yield from _batch_rows(path, batches, kept)
        except (pyarrow.ArrowException, OSError) as error:
            kind = "an Arrow stream" if is_stream else "Parquet"
            raise DataError(f"{path}: not readable as {kind}: {error}") from error


def _tell_unable(path: str, columns: Mapping[str, str]) -> None:
    if unable := ", ".join(f"`{name}` ({what})" for name, what in columns.items() if what):
        _log.warning("%s: left out columns that cannot travel to a worker: %s", path, unable)


def _what_cannot_travel(pyarrow: Any, kind: Any) -> str:
    """Return what a column of an Arrow type holds that no lease carries; empty for nothing."""
    types = pyarrow.types
    if types.is_struct(kind):
        inner = (_what_cannot_travel(pyarrow, field.type) for field in kind)
        return next(filter(None, inner), "")
    if types.is_map(kind):
        return _what_cannot_travel(pyarrow, kind.item_type)
    if hasattr(kind, "value_type") and not types.is_dictionary(kind):  # lists of all sizes
        return _what_cannot_travel(pyarrow, kind.value_type)
    if types.is_dictionary(kind):
        return _what_cannot_travel(pyarrow, kind.value_type)
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
    """Return a value as plain JSON: a lease carries it.

    A typed table gives each of its objects all fields: those that are null are dropped.
    """
    match value:
        case float():
            return None if math.isnan(value) else value  # as pandas writes that there is none
        case None | bool() | int() | str():
            return value
        case list() if value and all(isinstance(item, tuple) for item in value):  # a map
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
        # An error of a dry run only shows that it was one.
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


# --- rows -----------------------------------------------------------------------------------------


_log = logging.getLogger(__name__)

READ_COLUMNS = ("prompt", "messages", "tools", "answer", "info")
"""Columns with a meaning of their own."""
TEMPLATE_COLUMNS = ("functions", "documents", "chat_template_kwargs")
"""Columns that other trainers give to the chat template, and Echo does not."""
ASSISTANT_LAST = ("", "continue", "drop")
NO_PATH = "the task has no training rows: set task.options.path to a JSONL or Parquet file"


class RowsTask(Task):
    """Serve the rows of one dataset, or of one dataset for each split, in their order.

    Args:
        path: the training rows. A worker, which is sent its examples, may leave it out.
        heldout_path: the held-out rows. Without it, one prompt in ten of `path` is held out, by its
            hash.
        columns: where the dataset's names differ, such as { prompt = "question" }.
        leave_out: columns that no reward needs, such as large ones.
        skip_bad: leave malformed rows and prompts that are too long out, and say how many there
            were, and which was the first.
        assistant_last: of rows whose last message is the assistant's: "continue" has the policy go
            on behind it, "drop" takes it away (and for the answer, where the row has none).
            Without it such rows are refused.
    """

    def __init__(
        self,
        *,
        path: str = "",
        heldout_path: str = "",
        columns: Mapping[str, str] | None = None,
        leave_out: Sequence[str] = (),
        skip_bad: bool = False,
        assistant_last: str = "",
    ) -> None:
        for name, value, kind, what in (
            ("path", path, str, "a text"),
            ("heldout_path", heldout_path, str, "a text"),
            ("skip_bad", skip_bad, bool, "true or false"),
            ("columns", columns or {}, Mapping, 'a table such as { prompt = "question" }'),
            ("leave_out", leave_out, list | tuple, 'a list such as ["picture"]'),
        ):
            if not isinstance(value, kind):
                raise ConfigError(f"task.options.{name} = {value!r}: must be {what}")
        self.path = path
        self.heldout_path = heldout_path
        self.skip_bad = skip_bad
        self.columns = dict(columns or {})
        self.leave_out = tuple(leave_out)
        self.assistant_last = assistant_last
        self._prompt_columns = [self.columns.get(name, name) for name in ("prompt", "messages")]
        for name in self.columns:
            if name not in READ_COLUMNS:
                raise ConfigError(
                    f"task.options.columns.{name}: no such column is read"
                    f"{did_you_mean(name, READ_COLUMNS)}; there are {', '.join(READ_COLUMNS)}"
                )
            if not isinstance(self.columns[name], str):
                raise ConfigError(
                    f"task.options.columns.{name} = {self.columns[name]!r}: must be the name of a "
                    "column"
                )
        if assistant_last not in ASSISTANT_LAST:
            raise ConfigError(
                f"task.options.assistant_last = {assistant_last!r}: must be continue or drop"
            )

    def read_row(self, row: Mapping[str, Any]) -> Example:
        """Turn one row into an example; its index, split and source are filled in later.

        Raises:
            ValueError, TypeError, LookupError: if a column is missing or of the wrong kind; the
                caller adds file and row.
        """
        own_names = {name: self.columns.get(name, name) for name in READ_COLUMNS}
        values = {name: row.get(own) for name, own in own_names.items()}
        prompt = self._prompt_of(row)
        info = {} if values["info"] is None else _parse_json(values["info"], "{")
        if not isinstance(info, dict):
            raise TypeError(f"`{own_names['info']}` must be an object, not {type(info).__name__}")
        self._tools_of(values["tools"])
        answer = values["answer"]
        if isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
            prompt, said = self._without_last(prompt)
            answer = said if answer is None else answer
        # `tools` stays a column, which `tools` reads; so does what is not taken for the prompt.
        read = {own_names["answer"], own_names["info"], self._prompt_column(row)}
        read |= {name for name in self._prompt_columns if not row.get(name)}
        rest = {name: value for name, value in row.items() if name not in read}
        return Example(
            index=0, split="train", prompt=prompt, answer=answer, info=info, columns=rest
        )

    def tools(self, example: Example) -> list[dict[str, Any]]:
        return self._tools_of(example.columns.get(self.columns.get("tools", "tools")))

    def examine(self, fault_of: Callable[[Example], str]) -> None:
        """Ask of each row what is wrong with it; see `Task.examine`."""
        for split, examples in self._examples.items():
            faults = [(example, fault_of(example)) for example in examples]
            bad = [(example, fault) for example, fault in faults if fault]
            if not bad:
                continue
            [example, fault], *_ = bad
            if not self.skip_bad or len(bad) == len(examples):
                remedy = "" if self.skip_bad else (
                    ", or leave such rows out with task.options.skip_bad = true"
                )  # fmt: skip
                raise DataError(f"{example}: {fault}{remedy}")
            text = "%s: left out %d of %d %s rows (task.options.skip_bad); the first: %s: %s"
            path = self.path if split == "train" else self.heldout_path or self.path
            _log.warning(text, path, len(bad), len(examples), split, example, fault)
            self._examples[split] = [example for example, fault in faults if not fault]

    def example(self, index: int, *, split: str) -> Example:
        """Return row `index` of a split, wrapping around at its end."""
        examples = self._examples[split]
        if not examples:
            num_prompts = len({_key_of(each) for side in self._examples.values() for each in side})
            raise DataError(
                f"{self.path}: no {split} row; a file this small cannot be split by hash (it has "
                f"{num_prompts} different prompts, and one in ten is held out): "
                "name the held-out rows in task.options.heldout_path"
            )
        return replace(examples[index % len(examples)], index=index, split=split)

    def num_examples(self, *, split: str) -> int:
        return len(self._examples[split])

    def dataset_files(self) -> list[Path]:
        """Return the files that were given; what is on the hub has its name for an identity."""
        return [
            file
            for path in (self.path, self.heldout_path)
            if path and not path.startswith(HUB_PREFIX)
            for file in dataset_files(path)
        ]

    def data_problems(self) -> list[str]:
        """Read every row that is here already; on the hub, ask whether there are any."""
        if not self.path:
            return [NO_PATH]
        problems = []
        for path in filter(None, (self.path, self.heldout_path)):
            try:
                if is_local(path):
                    self._read(path)
            except EchoError as error:
                problems.append(str(error))
        return problems

    def _prompt_of(self, row: Mapping[str, Any]) -> str | list[Message]:
        """Return a row's prompt, from whichever of its two columns has one.

        Raises:
            ValueError: naming the column and what is wrong with it.
        """
        names, name = self._prompt_columns, self._prompt_column(row)
        if name is None:
            here = next((name for name in names if name in row), None)
            if here is not None:
                what = "null" if row[here] is None else "empty"
                raise ValueError(f"needs `{here}`, whose value is {what} in this row")
            raise ValueError(
                f"needs `{names[0]}` (text) or `{names[1]}` (chat messages); it has the columns "
                f"{', '.join(row) or 'none'}; where the dataset calls it otherwise set "
                'task.options.columns = { prompt = "ITS NAME" }'
            )
        value = _parse_json(row[name], "[{")
        if isinstance(value, str):
            if not value.strip():
                raise ValueError(f"needs `{name}`, whose text is empty in this row")
            if name == names[1] or _MESSAGES_AS_TEXT.match(value):
                raise ValueError(
                    f"needs `{name}` as chat messages; in this row it is text, and no list of "
                    "messages in JSON; plain text belongs in the column `prompt`, or another that "
                    "task.options.columns calls so"
                )
            return value
        if not isinstance(value, list):
            raise TypeError(
                f"needs `{name}` as text or chat messages; in this row it is {type(value).__name__}"
            )
        if fault := fault_of_messages(value):
            raise ValueError(f"`{name}`: {fault}")
        said = (part.get("tool_calls") or plain_message(part)["content"].strip() for part in value)
        if not any(said):
            raise ValueError(f"needs `{name}`, whose messages are empty in this row")
        return [_without_nulls(part) for part in value]

    def _prompt_column(self, row: Mapping[str, Any]) -> str | None:
        """Return the column that is a row's prompt; None if it has none."""
        return next((name for name in self._prompt_columns if row.get(name)), None)

    def _without_last(self, messages: list[Message]) -> tuple[list[Message], str | None]:
        """Return messages whose last is the assistant's as they are asked, and what was dropped."""
        if self.assistant_last == "continue":
            return messages, None
        if not self.assistant_last:
            raise ValueError(
                "its last message is the assistant's: the reference of supervised data, or the "
                'beginning of an answer? Set task.options.assistant_last = "drop" to take it away '
                '(it becomes the answer where the row has none), or "continue" to have the policy '
                "go on behind it"
            )
        asked = messages
        while asked and asked[-1]["role"] == "assistant":
            asked = asked[:-1]
        if not asked:
            raise ValueError("all of its messages are the assistant's: nothing is asked")
        return asked, str(plain_message(messages[-1])["content"])

    def _tools_of(self, value: Any) -> list[dict[str, Any]]:
        value = _parse_json(value, "[")
        if value is None or value == "":
            return []
        if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
            name = self.columns.get("tools", "tools")
            raise TypeError(f"`{name}` must be a list of objects, the schemas of functions")
        return value

    @functools.cached_property
    def _examples(self) -> dict[str, list[Example]]:
        if not self.path:
            raise DataError(NO_PATH)
        sides: dict[str, list[Example]] = {"train": [], "heldout": []}
        for example in self._read(self.path):
            is_out = not self.heldout_path and is_heldout(_key_of(example))
            sides["heldout" if is_out else "train"].append(example)
        if self.heldout_path:
            sides["heldout"] = list(self._read(self.heldout_path))
            self._tell_shared(sides)
        return sides

    def _tell_shared(self, sides: Mapping[str, Iterable[Example]]) -> None:
        trained = {_key_of(example) for example in sides["train"]}
        heldout = {_key_of(example) for example in sides["heldout"]}
        if shared := len(trained & heldout):
            _log.warning(
                "%s: %d of its %d prompts are on both sides, also in %s: the evaluation measures "
                "what was learned by heart",
                self.heldout_path, shared, len(heldout), self.path,
            )  # fmt: skip

    @functools.cached_property
    def _read(self) -> Callable[[str], list[Example]]:
        return functools.cache(self._read_file)  # a look at the data comes before its use

    def _read_file(self, path: str) -> list[Example]:
        """Return the examples of all rows.

        Raises:
            DataError: at a malformed row, unless such rows are skipped; or if nothing is left.
        """
        found: list[Example] = []
        bad: list[DataError] = []
        names: set[str] = set()
        for row in read_rows(path, self.leave_out):
            try:
                if isinstance(row, DataError):
                    raise row
                names |= row.columns.keys()
                found.append(self._example_of(row))
            except DataError as error:
                if not self.skip_bad:
                    raise
                bad.append(error)
        if bad:
            text = "%s: skipped %d of %d rows (task.options.skip_bad); the first: %s"
            _log.warning(text, path, len(bad), len(bad) + len(found), bad[0])
        if not found:
            why = (
                f"all rows are malformed; the first: {bad[0]}"
                if bad
                else ("the dataset is empty; write one JSON object per line")
            )
            raise DataError(f"{path}: {why}")
        self._look_at_columns(path, names)
        return found

    def _look_at_columns(self, path: str, names: Collection[str]) -> None:
        """Refuse names of columns that no row has, and tell of columns that are not used."""
        for name, own in self.columns.items():
            if own not in names and path == self.path:
                raise ConfigError(
                    f"task.options.columns.{name} = {own!r}: {path} has no such column"
                    f"{did_you_mean(own, names)}; it has {', '.join(sorted(names))}"
                )
        prompts = self._prompt_columns
        if all(name in names for name in prompts):
            _log.warning(
                "%s: has the columns `%s` and `%s`: the first is the prompt; "
                'task.options.leave_out = ["%s"] takes the other',
                path, *prompts, prompts[0],
            )  # fmt: skip
        for name in TEMPLATE_COLUMNS:
            if name in names and name not in self.columns.values():
                _log.warning("%s: the column `%s` is not given to the chat template", path, name)

    def _example_of(self, row: DatasetRow) -> Example:
        try:
            example = replace(self.read_row(row.columns), source=row.source)
            num_bytes = len(msgspec.msgpack.encode(example))  # as a lease has to carry it
        except KeyError as error:
            raise DataError(f"{row.source}: malformed row: no column {error}") from error
        except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as error:
            large = [name for name, value in row.columns.items() if _has_large_integer(value)]
            what = (
                f"`{large[0]}` holds an integer beyond 64 bits; write it as text"
                if large
                else error
            )
            raise DataError(f"{row.source}: malformed row: {what}") from error
        if num_bytes > MAX_LEASE_BYTES:
            largest = max(row.columns, key=lambda name: len(json.dumps(row.columns[name])))
            raise DataError(
                f"{row.source}: the row has {format_bytes(num_bytes)}, most of it in the column "
                f"`{largest}`; a message to a worker holds {format_bytes(MAX_LEASE_BYTES)}: "
                "shorten it, leave the row out with task.options.skip_bad = true, or a column that "
                "no reward needs with task.options.leave_out"
            )
        return example


def _without_nulls(part: dict[str, Any]) -> Message:
    """Drop the keys that a typed table gives every message, whether it has them or not."""
    return {key: value for key, value in part.items() if value is not None}


_MESSAGES_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*['"](?:role|content|from)['"]\s*:""")
"""First characters of messages as Python prints them, or as JSON that was cut."""


def _parse_json(value: Any, start: str) -> Any:
    """Return a value that is JSON as text parsed; anything else as it is.

    Args:
        value: of a column.
        start: what is parsed: "{" an object, "[" a list of objects, "[{" a list of messages.
    """
    if not isinstance(value, str) or not value.lstrip().startswith(start[:1]):
        return value
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return value
    if start == "{":
        return parsed
    is_objects = isinstance(parsed, list) and all(isinstance(part, dict) for part in parsed)
    is_meant = start == "[" or any(part.keys() & {"role", "from"} for part in parsed)
    return parsed if is_objects and is_meant else value


def _key_of(example: Example) -> str:
    """Return what decides an example's side: its prompt, without what does not make it another.

    White space, case and the form of Unicode do not, nor whether the only message is plain text.
    """
    text = example.prompt
    if not isinstance(text, str):
        said = [(part["role"], plain_message(part)["content"]) for part in text]
        is_alone = [role for role, _ in said] == ["user"]
        text = said[0][1] if is_alone else " ".join(f"{role}: {content}" for role, content in said)
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def _has_large_integer(value: Any) -> bool:
    match value:
        case int():
            return not -(2**63) <= value < 2**64
        case list():
            return any(map(_has_large_integer, value))
        case dict():
            return any(map(_has_large_integer, value.values()))
    return False


# --- any reward function --------------------------------------------------------------------------


class DatasetTask(RowsTask):
    """Serve a dataset's rows and judge answers by a function.

    Args:
        path, heldout_path, columns, leave_out, skip_bad, assistant_last: see `RowsTask`.
        reward: "exact" (the text is `answer`), "math" (the last number or boxed expression equals
            `answer`, a number, LaTeX or a solution that ends in one), or a function:
            "package.module:function" or "path/to/file.py:function".
    """

    def __init__(
        self,
        *,
        path: str = "",
        heldout_path: str = "",
        columns: Mapping[str, str] | None = None,
        leave_out: Sequence[str] = (),
        skip_bad: bool = False,
        assistant_last: str = "",
        reward: str = "exact",
    ) -> None:
        super().__init__(
            path=path,
            heldout_path=heldout_path,
            columns=columns,
            leave_out=leave_out,
            skip_bad=skip_bad,
            assistant_last=assistant_last,
        )
        self._reward = RewardFunction(reward, self.columns)

    def read_row(self, row: Mapping[str, Any]) -> Example:
        """Read a row, and check that it has what the reward function asks for."""
        example = super().read_row(row)
        self._reward.check(example, row)
        return example

    def reward(self, example: Example, completion: str) -> Reward:
        """Return what the function says; awaitable where it is asynchronous."""
        value: Reward = self._reward.one(example, completion)
        return value

    def compares_answers(self, example: Example) -> bool:
        """Return whether the function takes lists."""
        return self._reward.is_of_groups

    def rewards(self, example: Example, completions: list[str]) -> Rewards:
        """Return what the function says; awaitable where it is asynchronous."""
        values: Rewards = self._reward.all(example, completions)
        return values

    def source_files(self) -> list[Path]:
        return [] if self._reward.file is None else [self._reward.file]


# --- mixtures -------------------------------------------------------------------------------------


CYCLE = 1000
"""Examples in which every task has its exact share, to a thousandth."""

_TABLE_KEYS = ("kind", "weight", "options", "name")


class MixtureTask(Environment):
    """Draw from several tasks.

    Args:
        tasks: tables with `kind`, and perhaps `options`, `weight` (1) and `name` (what metrics
            call it; the kind's last part).
    """

    def __init__(self, *, tasks: Sequence[Mapping[str, Any]] = ()) -> None:
        if not tasks:
            raise ConfigError("task.kind = mixture needs tables [[task.options.tasks]] with a kind")
        self._parts: dict[str, Task] = {}
        weights = []
        for number, table in enumerate(tasks):
            where = f"task.options.tasks[{number}]"
            name, weight = _check_table(where, table)
            if name in self._parts:
                raise ConfigError(f"{where}: two tasks are called {name!r}; give them a `name`")
            self._parts[name] = load_task(table["kind"], table.get("options", {}))
            if isinstance(self._parts[name], MixtureTask):
                raise ConfigError(f"{where}: a mixture in a mixture; list its tasks here")
            weights.append(weight)
        self._names = list(self._parts)
        self._schedule = spread([weight / sum(weights) for weight in weights])
        if 0 in self._shares:
            number = self._shares.index(0)
            raise ConfigError(
                f"task.options.tasks[{number}].weight = {weights[number]:g}: fewer than one "
                f"example in {CYCLE}, so none would be drawn; raise it, or leave the task out"
            )
        self.is_bounded = all(task.is_bounded for task in self._parts.values())
        self.has_turns = any(task.has_turns for task in self._parts.values())

    def prepare(self) -> None:
        for task in self._parts.values():
            task.prepare()

    def example(self, index: int, *, split: str) -> Example:
        """Return an example of the task whose turn it is."""
        cycle, position = divmod(index, CYCLE)
        part, rank = self._schedule[position]
        name = self._names[part]
        count = cycle * self._shares[part] + rank
        own = self._parts[name].example(self._own_index(name, count, split), split=split)
        return replace(own, index=index, task=name)

    def reward(self, example: Example, completion: str) -> Reward:
        return self.part_of(example).reward(example, completion)

    def compares_answers(self, example: Example) -> bool:
        return self.part_of(example).compares_answers(example)

    def rewards(self, example: Example, completions: list[str]) -> Rewards:
        return self.part_of(example).rewards(example, completions)

    def begin(self, example: Example) -> Any:
        """Begin an episode of the example's task."""
        task = self.part_of(example)
        own = task.begin(example) if isinstance(task, Environment) else [example, ""]
        return _begun(task, own) if inspect.isawaitable(own) else (task, own)

    def reply(self, state: Any, text: str) -> Reply | Awaitable[Reply]:
        """Pass the turn on; a task of one turn says nothing."""
        task, own = state
        if isinstance(task, Environment):
            return task.reply(own, text)
        own[1] = text
        return None

    def outcome(self, state: Any) -> Reward:
        """Ask the example's task."""
        task, own = state
        if isinstance(task, Environment):
            return task.outcome(own)
        reward: Reward = task.reward(*own)
        return reward

    def end(self, state: Any) -> Awaitable[None] | None:
        """End the episode."""
        task, own = state
        return task.end(own) if isinstance(task, Environment) else None

    def tools(self, example: Example) -> list[dict[str, Any]]:
        """Return the tools of the example's task."""
        task = self.part_of(example)
        return task.tools(example)

    def part_of(self, example: Example) -> Task:
        return self._parts[example.task]

    def examine(self, fault_of: Callable[[Example], str]) -> None:
        for task in self._parts.values():
            task.examine(fault_of)

    def dataset_files(self) -> list[Path]:
        return [file for task in self._parts.values() for file in task.dataset_files()]

    def parts(self) -> list[Task]:
        """Return the tasks, in their order."""
        return list(self._parts.values())

    @functools.cached_property
    def _shares(self) -> list[int]:
        parts = [part for part, _ in self._schedule]
        return [parts.count(part) for part in range(len(self._names))]

    def _own_index(self, name: str, count: int, split: str) -> int:
        size = self._parts[name].num_examples(split=split)
        if size is None or split != "train" or not size:
            return count
        epoch, position = divmod(count, size)
        return _order_of(name, epoch, size)[position]


async def _begun(task: Task, own: Awaitable[Any]) -> tuple[Task, Any]:
    return task, await own


def spread(shares: Sequence[float]) -> list[tuple[int, int]]:
    """Return which part's turn it is at each place of a cycle, and how often it was before.

    Every prefix of the cycle has each part's share of it to within one.
    """
    counts = [0] * len(shares)
    schedule = []
    for place in range(1, CYCLE + 1):
        part = max(range(len(shares)), key=lambda part: shares[part] * place - counts[part])
        schedule.append((part, counts[part]))
        counts[part] += 1
    return schedule


@functools.lru_cache(maxsize=8)
def _order_of(name: str, epoch: int, size: int) -> list[int]:
    order = list(range(size))
    random.Random(f"{name}/epoch {epoch}").shuffle(order)
    return order


def _check_table(where: str, table: Mapping[str, Any]) -> tuple[str, float]:
    """Return the name and the weight of one table."""
    for key in table:
        if key not in _TABLE_KEYS:
            raise ConfigError(
                f"{where}.{key}: no such key{did_you_mean(key, _TABLE_KEYS)}; it takes "
                f"{', '.join(_TABLE_KEYS)}"
            )
    kind, weight = table.get("kind"), table.get("weight", 1)
    if not isinstance(kind, str):
        raise ConfigError(f"{where}: needs a `kind`, as task.kind")
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
        raise ConfigError(f"{where}.weight = {weight!r}: must be a finite number above 0")
    return str(table.get("name", kind.rpartition(":")[2])), float(weight)
