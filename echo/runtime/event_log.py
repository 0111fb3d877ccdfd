"""Event log: the events and actions of a role as JSON lines.

    {"now": 81.204, "received": "Grant", "peer": "out-1", "source": "learner", "target": "w1",
     "fields": {"leases": [...]}, "payload": [{"bytes": 81, "blake3": "52b1c09e7d3f"}]}
    {"now": 81.205, "returned": "Sample", "call": {...}}
    {"now": 81.298, "reported": "CallReturned", "call": {...}, "num_tokens": 4096}
    {"now": 81.307, "worked": "DecodeBlock", "block": 3, "chunk_bytes": 1048576, "result": ""}

`now` is the time of the event loop's clock, the only clock of a role. The first line of a process
also has the time of day. Bytes are logged as their length and the first digits of their hash, so
the log contains no weights and no decryption keys. Settings may contain options of users' code, so
only the names of settings are logged. Join strings are logged without their secret.
"""

from __future__ import annotations

import dataclasses
import datetime
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from blake3 import blake3

from echo import __version__
from echo.core.errors import RemoteProtocolError, StorageError
from echo.core.units import without_secrets
from echo.net.transport import Received
from echo.wire.actions import Send, Work
from echo.wire.codec import DECODE_ERRORS, Frame, decode_envelope, payload_bytes

MAX_FILE_BYTES = 128 << 20
"""A file of this size is renamed to FILE.1, which replaces an older FILE.1.

So the newest lines are kept, and a log that runs for days does not fill the disk.
"""
MAX_ITEMS = 16
"""Largest number of logged elements of a list. If a list is longer, its length is logged too."""
MAX_CHARACTERS = 200
"""Largest number of logged characters of a text. If a text is longer, its length is logged too."""

MAX_DEPTH = 16
"""Largest number of levels of a nested value that are logged. No message of a node has more levels.
"""


class EventLog:
    """Appends the events of one process to a file, as JSON lines."""

    def __init__(self, path: Path, *, log: logging.Logger) -> None:
        """Open the file for appending.

        If a later write fails, a warning is written to `log` and the event log ends.

        Raises:
            StorageError: if the file cannot be opened for writing.
        """
        self._path, self._log = path, log
        self._has_begun = False
        try:
            self._fd: int | None = self._open()
        except OSError as error:
            text = f"--log-events: {path} cannot be written: {error.strerror}"
            raise StorageError(text) from error

    def write(self, kind: str, what: Any, *, now: float, **more: str) -> None:
        """Append a line about an event, an action or a piece of work.

        `kind` is "received", "reported", "returned" or "worked". `more` adds fields to the line.
        """
        if self._fd is None:
            return
        at = {"now": round(now, 6)}
        try:
            if not self._has_begun:
                self._has_begun = True
                started = datetime.datetime.now().astimezone().isoformat(timespec="milliseconds")
                self._append(at | {"started": started, "version": __version__})
            self._append(at | {kind: type(what).__name__} | _fields(kind, what) | more)
        except (OSError, TypeError, ValueError, OverflowError, RecursionError) as error:
            # The node goes on without its log.
            self._log.warning("the event log %s ends here: %s", self._path, error)
            self.close()

    def close(self) -> None:
        """Close the file. Later events are not logged."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def _append(self, line: dict[str, Any]) -> None:
        assert self._fd is not None
        os.write(self._fd, msgspec.json.encode(line) + b"\n")
        if os.fstat(self._fd).st_size >= MAX_FILE_BYTES:
            self.close()
            self._path.replace(f"{self._path}.1")
            self._fd = self._open()


def _fields(kind: str, what: Any) -> dict[str, Any]:
    if isinstance(what, Received | Send):
        name, fields = _message(what.frames)
        return {kind: name, "peer": what.peer} | fields
    if isinstance(what, Work) and dataclasses.is_dataclass(what):
        # The other fields are images and parts of the store.
        parts = {field.name: getattr(what, field.name) for field in dataclasses.fields(what)}
        what = {name: part for name, part in parts.items() if isinstance(part, int | str | tuple)}
    plain = msgspec.to_builtins(
        what, builtin_types=(bytes, bytearray, memoryview), str_keys=True, enc_hook=_foreign
    )
    short: dict[str, Any] = _brief(plain)
    return short


def _message(frames: Sequence[Frame]) -> tuple[str, dict[str, Any]]:
    """Return a message's kind and its logged fields; for a malformed message, only its size."""
    try:
        envelope = decode_envelope(frames)
        fields = msgspec.msgpack.decode(envelope.body, type=dict[str, Any])
    except (RemoteProtocolError, *DECODE_ERRORS):
        return "malformed", {"bytes": payload_bytes(frames)}
    kind = fields.pop("type", None)
    payload = [_digest(frame) for frame in frames[1:]]
    message = {"source": envelope.source, "target": envelope.target, "fields": fields}
    name = _brief(kind) if isinstance(kind, str) else "malformed"
    return name, _brief(message) | {"payload": payload}


def _foreign(value: Any) -> Any:
    match value:
        case np.ndarray():
            return {"shape": list(value.shape)}
        case np.generic():
            return value.item()
        case Exception():
            return str(value)
    return type(value).__name__


def _brief(value: Any, depth: int = 0) -> Any:
    match value:
        case None | bool() | int() | float():
            return value
        case str():
            text = without_secrets(value).encode(errors="replace").decode()
            short = f"{text[:MAX_CHARACTERS]}... {len(text)} characters"
            return text if len(text) <= MAX_CHARACTERS else short
        case bytes():
            return _digest(value)
        case bytearray() | memoryview():  # not hashed: a whole image would take seconds
            return {"bytes": payload_bytes([value])}
        case dict() if depth < MAX_DEPTH:
            if isinstance(settings := value.get("settings"), dict):
                value = value | {"settings": sorted(map(str, settings))}
            return {_brief(str(name)): _brief(part, depth + 1) for name, part in value.items()}
        case list() | tuple() if depth < MAX_DEPTH:
            items = [_brief(part, depth + 1) for part in value[:MAX_ITEMS]]
            return [*items, f"... {len(value)} in all"] if len(value) > MAX_ITEMS else items
    return type(value).__name__


def _digest(frame: Frame) -> dict[str, Any]:
    return {"bytes": payload_bytes([frame]), "blake3": blake3(frame).hexdigest(6)}
