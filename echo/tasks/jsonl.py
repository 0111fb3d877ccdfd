"""Tasks whose prompts are the lines of a JSONL file.

A row is an object. The default reading takes `prompt` (text) or `messages` (a list of objects
with `role` and `content`), and optionally `answer` and `info`; a subclass with other columns
overrides `read_row`, and every subclass says what a completion is worth:

    class Capitals(JsonlTask):
        def reward(self, example: Example, completion: str) -> float:
            return float(example.answer.lower() in completion.lower())

Files are read at the first example and checked whole, so a malformed row stops the run at its
start, named by file and line, and not in the middle of it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from echo.errors import DataError
from echo.tasks.task import Example, Task, is_heldout


class JsonlTask(Task):
    """Serve the rows of one file, or of one file for each split, in their order.

    Args:
        path: the training rows. A worker, which is sent its examples, may leave it out.
        heldout_path: the held-out rows. Without it, one row in ten of `path` is held out, by the
            hash of its line.
    """

    def __init__(self, *, path: str = "", heldout_path: str = "") -> None:
        self.path = path
        self.heldout_path = heldout_path

    def read_row(self, row: Mapping[str, Any]) -> Example:
        """Turn one row into an example; its index, split and source are filled in later.

        Raises:
            ValueError, TypeError, LookupError: if a column is missing or of the wrong kind; the
                caller adds file and line.
        """
        prompt = row.get("prompt") or row.get("messages")
        is_chat = isinstance(prompt, list) and all(_is_message(part) for part in prompt)
        if not prompt or not (isinstance(prompt, str) or is_chat):
            raise ValueError(
                "needs `prompt` (text) or `messages` (objects with the texts `role` and "
                f"`content`); it has the columns {', '.join(row) or 'none'}"
            )
        info = row.get("info", {})
        if not isinstance(info, dict):
            raise TypeError(f"`info` must be an object, not {type(info).__name__}")
        return Example(index=0, split="train", prompt=prompt, answer=row.get("answer"), info=info)

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
        """Return the files that were given."""
        return [Path(path).expanduser() for path in (self.path, self.heldout_path) if path]

    @functools.cached_property
    def _examples(self) -> dict[str, list[Example]]:
        if not self.path:
            raise DataError("the task has no training rows: set task.options.path to a JSONL file")
        files = [self._read(path) for path in self.dataset_files()]
        if self.heldout_path:
            train, heldout = files
            return {
                "train": [example for _, example in train],
                "heldout": [example for _, example in heldout],
            }
        return {
            "train": [example for line, example in files[0] if not is_heldout(line)],
            "heldout": [example for line, example in files[0] if is_heldout(line)],
        }

    def _read(self, path: Path) -> list[tuple[str, Example]]:
        try:
            lines = path.read_bytes().splitlines()
        except OSError as error:
            raise DataError(
                f"{path}: cannot read the dataset: {error.strerror}; the path is relative to "
                f"{Path.cwd()}; see task.options"
            ) from error
        rows = []
        for number, raw in enumerate(lines, start=1):
            if not raw.strip():
                continue
            source = f"{path}:{number}"
            try:
                line = raw.decode()
                example = self.read_row(_parse_object(line))
            except KeyError as error:
                raise DataError(f"{source}: malformed row: no column {error}") from error
            except (ValueError, LookupError, TypeError) as error:
                raise DataError(f"{source}: malformed row: {error}") from error
            rows.append((line, replace(example, source=source)))
        if not rows:
            raise DataError(f"{path}: the dataset is empty; write one JSON object per line")
        return rows


def _parse_object(line: str) -> dict[str, Any]:
    row = json.loads(line)
    if not isinstance(row, dict):
        raise TypeError(f"must be a JSON object, not {type(row).__name__}")
    return row


def _is_message(part: object) -> bool:
    return isinstance(part, dict) and all(
        isinstance(part.get(key), str) for key in ("role", "content")
    )
