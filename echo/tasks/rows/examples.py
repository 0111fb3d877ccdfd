"""Makes examples from the rows of a dataset.

A row has the column `prompt` (text or messages) or `messages` (a list of objects with `role` and
`content`). A row may also have `tools`, `answer` and `info`. All other columns keep their names. If
the dataset has other names for these columns, `task.options.columns` gives the names.

If the last message of a row is the assistant's, the message is usually a supervised answer, but may
be the beginning of an answer. Echo does not guess, because a wrong guess would cause no error. The
user has to choose with `assistant_last`.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Mapping
from typing import Any

from echo.core.errors import ConfigError
from echo.tasks.messages import Message, fault_of_messages, plain_message
from echo.tasks.task import Example, did_you_mean

_log = logging.getLogger(__name__)

READ_COLUMNS = ("prompt", "messages", "tools", "answer", "info")
"""The columns that have a meaning for Echo."""
TEMPLATE_COLUMNS = ("functions", "documents", "chat_template_kwargs")
"""Columns that other trainers pass to the chat template, but Echo does not."""
ASSISTANT_LAST = ("", "continue", "drop")


class RowReader:
    """Makes examples from rows. Settings name the columns.

    Args:
        columns: the dataset's names for columns in READ_COLUMNS, if the names differ.
        assistant_last: how to read a row whose last message is the assistant's. If empty, such a
            row is refused.

    Raises:
        ConfigError: if `columns` or `assistant_last` has an unknown name or value.
    """

    def __init__(self, columns: Mapping[str, str], assistant_last: str) -> None:
        for name in columns:
            if name not in READ_COLUMNS:
                raise ConfigError(
                    f"task.options.columns.{name}: no such column is read"
                    f"{did_you_mean(name, READ_COLUMNS)}; there are {', '.join(READ_COLUMNS)}"
                )
            if not isinstance(columns[name], str):
                raise ConfigError(
                    f"task.options.columns.{name} = {columns[name]!r}: must be the name of a column"
                )
        if assistant_last not in ASSISTANT_LAST:
            raise ConfigError(
                f"task.options.assistant_last = {assistant_last!r}: must be continue or drop"
            )
        self._given = dict(columns)
        self._names = {name: columns.get(name, name) for name in READ_COLUMNS}
        """The name that each column in READ_COLUMNS has in the dataset."""
        self._prompts = (self._names["prompt"], self._names["messages"])
        self._assistant_last = assistant_last

    def example_of(self, row: Mapping[str, Any]) -> Example:
        """Return the example of a row.

        Raises:
            ValueError, TypeError: if a column is missing or of the wrong kind. The message names
                the column.
        """
        prompt = self._prompt_of(row)
        info = row.get(self._names["info"])
        info = {} if info is None else _parse_json(info, "{")
        if not isinstance(info, dict):
            name = self._names["info"]
            raise TypeError(f"`{name}` must be an object, not {type(info).__name__}")
        self.tools_of(row)
        answer = row.get(self._names["answer"])
        if isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
            prompt, dropped = self._without_last(prompt)
            answer = dropped if answer is None else answer
        # The column of tools stays, since `tools_of` reads it from the example.
        read = {self._names["answer"], self._names["info"], self._prompt_column(row)}
        read |= {name for name in self._prompts if not row.get(name)}
        rest = {name: value for name, value in row.items() if name not in read}
        return Example(
            index=0, split="train", prompt=prompt, answer=answer, info=info, columns=rest
        )

    def tools_of(self, columns: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the tools that a row describes, as JSON schemas.

        Raises:
            TypeError: if the column of the tools is not a list of objects.
        """
        name = self._names["tools"]
        value = _parse_json(columns.get(name), "[")
        if value is None or value == "":
            return []
        if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
            raise TypeError(f"`{name}` must be a list of objects, the schemas of functions")
        return value

    def check_columns(self, path: str, names: Collection[str], *, is_trained_on: bool) -> None:
        """Warn about columns that Echo ignores or uses in an unexpected way.

        Args:
            path: the path of the dataset, for messages.
            names: the names of all columns that at least one row has.
            is_trained_on: whether the rows are training rows. Held-out rows may lack columns.

        Raises:
            ConfigError: if no row has a column that `task.options.columns` names.
        """
        for name, own in self._given.items():
            if own not in names and is_trained_on:
                raise ConfigError(
                    f"task.options.columns.{name} = {own!r}: {path} has no such column"
                    f"{did_you_mean(own, names)}; it has {', '.join(sorted(names))}"
                )
        if all(name in names for name in self._prompts):
            _log.warning(
                "%s: has the columns `%s` and `%s`: the first is the prompt; "
                'task.options.leave_out = ["%s"] takes the other',
                path, *self._prompts, self._prompts[0],
            )  # fmt: skip
        for name in TEMPLATE_COLUMNS:
            if name in names and name not in self._given.values():
                _log.warning("%s: the column `%s` is not given to the chat template", path, name)

    def _prompt_of(self, row: Mapping[str, Any]) -> str | list[Message]:
        """Return a row's `prompt`, or its `messages` if it has no `prompt`.

        Raises:
            ValueError, TypeError: if the prompt is missing or malformed. The message names the
                column.
        """
        names, name = self._prompts, self._prompt_column(row)
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
        texts = (part.get("tool_calls") or plain_message(part)["content"].strip() for part in value)
        if not any(texts):
            raise ValueError(f"needs `{name}`, whose messages are empty in this row")
        # A typed table gives every message the keys of all messages; they are null where unused.
        return [
            {key: value for key, value in message.items() if value is not None} for message in value
        ]

    def _prompt_column(self, row: Mapping[str, Any]) -> str | None:
        return next((name for name in self._prompts if row.get(name)), None)

    def _without_last(self, messages: list[Message]) -> tuple[list[Message], str | None]:
        """Return the prompt's messages, and the text of the last message if it was dropped.

        If `assistant_last` is "drop", the assistant's messages at the end are dropped.
        """
        if self._assistant_last == "continue":
            return messages, None
        if not self._assistant_last:
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


_MESSAGES_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*['"](?:role|content|from)['"]\s*:""")
"""Matches the start of messages that Python printed, or of messages in truncated JSON."""


def _parse_json(value: Any, start: str) -> Any:
    """Return the parsed JSON if `value` is text of the expected kind, else `value`.

    Args:
        value: the value of a column.
        start: how JSON of the expected kind begins: "{" for an object, "[" for a list of objects,
            "[{" for a list of messages.
    """
    if not isinstance(value, str) or not value.lstrip().startswith(start[:1]):
        return value
    try:
        parsed = json.loads(value)
    except (ValueError, RecursionError):
        return value
    if start == "{":
        return parsed
    if not isinstance(parsed, list) or not all(isinstance(part, dict) for part in parsed):
        return value
    is_meant = start == "[" or any(part.keys() & {"role", "from"} for part in parsed)
    return parsed if is_meant else value
