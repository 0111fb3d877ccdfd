"""Dataset tasks: examples are rows, and a function gives the rewards.

    [task]
    kind = "dataset"
    options = { path = "train.parquet", reward = "rewards.py:correct" }

`path` has one of the forms that rows/files.py reads. `reward` names a function that the user has
written (reward_functions.py), or one of the built-in rewards "exact" and "math" (answers.py).

By default a row becomes an example as rows/examples.py describes. A subclass may override
`read_row`. Every subclass defines the reward of a completion:

    class Capitals(RowsTask):
        def reward(self, example: Example, completion: str) -> float:
            return float(example.answer.lower() in completion.lower())

The whole dataset is read and checked when the first example is requested. A row is bad if it is
malformed, or if its prompt does not fit into the model's window (`examine`). A bad row stops the
run at the start, with an error that names file and row. With `skip_bad`, bad rows are left out
instead. Without `heldout_path`, one prompt in ten is held out, together with all rows that have the
same prompt.
"""

from __future__ import annotations

import functools
import json
import logging
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from echo.core.bounds import MAX_LEASE_BYTES
from echo.core.errors import ConfigError, DataError, EchoError
from echo.core.units import format_bytes
from echo.tasks.messages import plain_message
from echo.tasks.reward_functions import RewardSum
from echo.tasks.rows.examples import RowReader
from echo.tasks.rows.files import HUB_PREFIX, DatasetRow, dataset_files, is_local, read_rows
from echo.tasks.task import Example, Reward, Rewards, Task, is_heldout

_log = logging.getLogger(__name__)

NO_PATH = "the task has no training rows: set task.options.path to a JSONL or Parquet file"


class RowsTask(Task):
    """Takes the examples of each split from the rows of a dataset, in the order of the rows.

    Args:
        path: the training rows. A worker receives examples from the learner and needs no path.
        heldout_path: the held-out rows. Without this path, the hash of the prompt selects one
            prompt in ten of `path`.
        columns: the dataset's own column names, such as { prompt = "question" }.
        leave_out: columns that no reward needs, such as large ones.
        skip_bad: leave out malformed rows and prompts that are too long. A warning gives the number
            of these rows and describes the first one.
        assistant_last: how to read a row whose last message is the assistant's. "continue": the
            policy continues this message. "drop": the message is removed, and becomes the example's
            answer if the row has no answer. Empty: the row is refused.
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
        self._reader = RowReader(self.columns, assistant_last)

    def read_row(self, row: Mapping[str, Any]) -> Example:
        """Return a row's example. The caller sets the example's index, split and source.

        Raises:
            ValueError, TypeError, LookupError: if a column is missing or of the wrong kind. The
                caller adds the file and the row.
        """
        return self._reader.example_of(row)

    def tools(self, example: Example) -> list[dict[str, Any]]:
        return self._reader.tools_of(example.columns)

    def examine(self, fault_of: Callable[[Example], str]) -> None:
        """Check every row with `fault_of`.

        See `Task.examine`. With `skip_bad`, bad rows are left out.

        Raises:
            DataError: if a row is bad and `skip_bad` is not set, or if all rows are bad.
        """
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
        """Return the example of row `index` of a split.

        After the last row, indices continue with the first row.

        Raises:
            DataError: if the split has no row.
        """
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
        """Return the local files of the dataset.

        A split on the hub has no local files. The split's name identifies the dataset.
        """
        return [
            file
            for path in (self.path, self.heldout_path)
            if path and not path.startswith(HUB_PREFIX)
            for file in dataset_files(path)
        ]

    def data_problems(self) -> list[str]:
        """Return the faults of the datasets.

        Datasets on this machine are read. For every other dataset, the hub is asked whether it has
        the dataset.
        """
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
            self._warn_of_shared_prompts(sides)
        return sides

    def _warn_of_shared_prompts(self, sides: Mapping[str, Iterable[Example]]) -> None:
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
        return functools.cache(self._read_file)  # both `data_problems` and `_examples` read

    def _read_file(self, path: str) -> list[Example]:
        """Return the examples of all good rows of a dataset.

        Raises:
            DataError: if a row is malformed and `skip_bad` is not set, or if no row is good.
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
        self._reader.check_columns(path, names, is_trained_on=path == self.path)
        return found

    def _example_of(self, row: DatasetRow) -> Example:
        try:
            example = replace(self.read_row(row.columns), source=row.source)
            num_bytes = len(msgspec.msgpack.encode(example))  # encoded as in a lease
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


def _key_of(example: Example) -> str:
    """Return an example's normalised prompt, whose hash decides the split.

    Differences in white space, case or Unicode form do not change the key. Plain text and a single
    user message with the same text have the same key.
    """
    text = example.prompt
    if not isinstance(text, str):
        turns = [(part["role"], plain_message(part)["content"]) for part in text]
        is_alone = [role for role, _ in turns] == ["user"]
        text = turns[0][1] if is_alone else " ".join(f"{role}: {words}" for role, words in turns)
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
    """Takes examples from a dataset's rows, and computes rewards with a function.

    Args:
        path, heldout_path, columns, leave_out, skip_bad, assistant_last: see `RowsTask`.
        reward: "exact" (the completion is `answer`), "math" (the last number or boxed expression
            equals `answer`), or a function: "package.module:function" or
            "path/to/file.py:function". With "math", `answer` is a number, LaTeX, or a solution that
            ends with one of these. For several rewards, give a list of such names, or a table from
            each name to its weight.
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
        reward: str | Sequence[str] | Mapping[str, float] = "exact",
    ) -> None:
        super().__init__(
            path=path,
            heldout_path=heldout_path,
            columns=columns,
            leave_out=leave_out,
            skip_bad=skip_bad,
            assistant_last=assistant_last,
        )
        self._reward = RewardSum(reward, self.columns)

    def read_row(self, row: Mapping[str, Any]) -> Example:
        """Check that a row has the reward function's columns, and return its example.

        Raises:
            ValueError, TypeError, LookupError: if a column is missing or of the wrong kind.
        """
        example = super().read_row(row)
        self._reward.check(example, row)
        return example

    def reward(self, example: Example, completion: str) -> Reward:
        """Return the function's reward for an answer.

        The result of an async function is awaitable.
        """
        value: Reward = self._reward.one(example, completion)
        return value

    def compares_answers(self, example: Example) -> bool:
        """Return whether the function takes all answers of a group as a list."""
        return self._reward.is_of_groups

    def rewards(self, example: Example, completions: list[str]) -> Rewards:
        """Return the function's rewards for a group's answers.

        The result is awaitable if the function is asynchronous.
        """
        values: Rewards = self._reward.all(example, completions)
        return values

    def source_files(self) -> list[Path]:
        return self._reward.files
