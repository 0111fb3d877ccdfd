"""Tasks whose prompts are the rows of a dataset: JSONL, Parquet or Hugging Face (formats.py).

The default reading of a row takes `prompt` (text) or `messages` (a list of objects with `role` and
`content`), and optionally `answer` and `info`; all other columns are kept under their names. A
subclass with other needs overrides `read_row`, and every subclass says what a completion is worth:

    class Capitals(RowsTask):
        def reward(self, example: Example, completion: str) -> float:
            return float(example.answer.lower() in completion.lower())

Datasets are read at the first example and checked whole, so a malformed row stops the run at its
start, named by file and row, and not in the middle of it; unless `skip_bad` leaves such rows out.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from echo.errors import ConfigError, DataError, EchoError
from echo.tasks.formats import HUB_PREFIX, OnBad, dataset_files, is_local, read_rows, refuse
from echo.tasks.imports import nearest
from echo.tasks.task import Example, Task, is_heldout

_log = logging.getLogger(__name__)

READ_COLUMNS = ("prompt", "messages", "answer", "info")
"""Columns with a meaning of their own."""
NO_PATH = "the task has no training rows: set task.options.path to a JSONL or Parquet file"


class RowsTask(Task):
    """Serve the rows of one dataset, or of one dataset for each split, in their order.

    Args:
        path: the training rows. A worker, which is sent its examples, may leave it out.
        heldout_path: the held-out rows. Without it, one row in ten of `path` is held out, by the
            hash of its text.
        columns: where the dataset's names differ, such as { prompt = "question" }.
        skip_bad: leave malformed rows out and say how many there were, and which was the first.
    """

    def __init__(
        self,
        *,
        path: str = "",
        heldout_path: str = "",
        columns: Mapping[str, str] | None = None,
        skip_bad: bool = False,
    ) -> None:
        self.path = path
        self.heldout_path = heldout_path
        self.skip_bad = skip_bad
        self.columns = dict(columns or {})
        for name in self.columns:
            if name not in READ_COLUMNS:
                raise ConfigError(
                    f"task.options.columns.{name}: no such column is read"
                    f"{nearest(name, READ_COLUMNS)}; there are {', '.join(READ_COLUMNS)}"
                )

    def read_row(self, row: Mapping[str, Any]) -> Example:
        """Turn one row into an example; its index, split and source are filled in later.

        Raises:
            ValueError, TypeError, LookupError: if a column is missing or of the wrong kind; the
                caller adds file and row.
        """
        own_names = {name: self.columns.get(name, name) for name in READ_COLUMNS}
        values = {name: row.get(own) for name, own in own_names.items()}
        prompt = values["prompt"] or values["messages"]
        if isinstance(prompt, str):
            prompt = prompt if prompt.strip() else None
        is_chat = isinstance(prompt, list) and all(_is_message(part) for part in prompt)
        if not prompt or not (isinstance(prompt, str) or is_chat):
            raise ValueError(
                f"needs `{own_names['prompt']}` (text) or `{own_names['messages']}` (objects with "
                "the texts `role` and `content`); it has the columns "
                f"{', '.join(row) or 'none'}; where the dataset calls it otherwise set "
                'task.options.columns = { prompt = "ITS NAME" }'
            )
        info = values["info"] if values["info"] is not None else {}
        if not isinstance(info, dict):
            raise TypeError(f"`{own_names['info']}` must be an object, not {type(info).__name__}")
        rest = {name: value for name, value in row.items() if name not in own_names.values()}
        return Example(
            index=0,
            split="train",
            prompt=prompt if isinstance(prompt, str) else [_message(part) for part in prompt],
            answer=values["answer"],
            info=info,
            columns=rest,
        )

    def example(self, index: int, *, split: str) -> Example:
        """Return row `index` of a split, wrapping around at its end."""
        examples = self._examples[split]
        if not examples:
            raise DataError(
                f"{self.path}: no {split} row; a file this small cannot be split by hash: "
                "name the held-out rows in task.options.heldout_path"
            )
        return replace(examples[index % len(examples)], index=index, split=split)

    def num_examples(self, *, split: str) -> int:
        """Return the rows of a split."""
        return len(self._examples[split])

    def dataset_files(self) -> list[Path]:
        """Return the files that were given; what is on the hub has its name for an identity."""
        paths = [
            path
            for path in (self.path, self.heldout_path)
            if path and not path.startswith(HUB_PREFIX)
        ]
        return [file for path in paths for file in dataset_files(path)]

    def data_problems(self) -> list[str]:
        """Read the first row of each dataset."""
        if not self.path:
            return [NO_PATH]
        problems = []
        for path in filter(None, (self.path, self.heldout_path)):
            try:
                if is_local(path):
                    next(self._parse(path, (lambda _: None) if self.skip_bad else refuse), None)
            except EchoError as error:
                problems.append(str(error))
        return problems

    @functools.cached_property
    def _examples(self) -> dict[str, list[Example]]:
        if not self.path:
            raise DataError(NO_PATH)
        rows = self._read(self.path)
        if self.heldout_path:
            heldout = self._read(self.heldout_path)
            return {
                "train": [example for _, example in rows],
                "heldout": [example for _, example in heldout],
            }
        return {
            "train": [example for text, example in rows if not is_heldout(text)],
            "heldout": [example for text, example in rows if is_heldout(text)],
        }

    def _read(self, path: str) -> list[tuple[str, Example]]:
        bad: list[DataError] = []
        examples = list(self._parse(path, bad.append if self.skip_bad else refuse))
        if bad:
            _log.warning(
                "%s: skipped %d of %d rows (task.options.skip_bad); the first: %s",
                path,
                len(bad),
                len(bad) + len(examples),
                bad[0],
            )
        if not examples and bad:
            raise DataError(f"{path}: all rows are malformed; the first: {bad[0]}")
        if not examples:
            raise DataError(f"{path}: the dataset is empty; write one JSON object per line")
        return examples

    def _parse(self, path: str, on_bad: OnBad) -> Iterator[tuple[str, Example]]:
        """Yield what decides a row's side, and its example."""
        for row in read_rows(path, on_bad):
            try:
                example = self.read_row(row.columns)
            except KeyError as error:
                on_bad(DataError(f"{row.source}: malformed row: no column {error}"))
            except (ValueError, LookupError, TypeError) as error:
                on_bad(DataError(f"{row.source}: malformed row: {error}"))
            else:
                yield row.text, replace(example, source=row.source)


def _is_message(part: object) -> bool:
    return isinstance(part, dict) and all(
        isinstance(part.get(key), str) for key in ("role", "content")
    )


def _message(part: dict[str, Any]) -> dict[str, Any]:
    """Drop the keys that a typed table gives every message, whether it has them or not."""
    return {key: value for key, value in part.items() if value is not None}
