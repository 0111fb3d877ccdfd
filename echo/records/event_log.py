"""Event log on disk: frames, each deflated and with its length, up to a bound.

    echo event log, 0.1.0   the version of Echo, and a line break; then again and again:
    length | frame          a little-endian 32-bit number; a zlib stream, which has a checksum

A frame is written with one call, so a killed process leaves whole ones. At the bound a last, empty
frame says that the log was ended there. `runtime/event_log.py` says what the frames hold.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path

from echo import __version__
from echo.core.errors import DataError, StorageError

MAX_LOG_BYTES = 256 << 20
"""Where a log ends: it can still be sent to somebody, and replayed within minutes. No frame is
longer, on disk or in memory."""
HEAD = f"echo event log, {__version__}\n".encode()
LENGTH_BYTES = 4


class EventFile:
    """Appends frames to a new file."""

    def __init__(self, path: Path, *, max_bytes: int = MAX_LOG_BYTES) -> None:
        """Create the file.

        Raises:
            StorageError: if it is there already, or cannot be written.
        """
        self.path = path
        self._left = max_bytes
        try:
            self._file = path.open("xb", buffering=0)
            self._file.write(HEAD)
        except FileExistsError as error:
            raise StorageError(f"{path} is there already; name a new file for the log") from error
        except OSError as error:
            raise StorageError(f"{path} cannot be written: {error.strerror}") from error

    def write(self, frame: bytes) -> bool:
        """Append a frame; return whether there was room for it, after which there is none.

        Raises:
            OSError: if the disk refuses it.
        """
        data = zlib.compress(frame, 1)
        self._left -= LENGTH_BYTES + len(data)
        has_room = self._left >= 0 and len(frame) <= MAX_LOG_BYTES
        data = data if has_room else zlib.compress(b"")
        self._file.write(len(data).to_bytes(LENGTH_BYTES, "little") + data)
        return has_room

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


def read_frames(path: Path) -> Iterator[bytes]:
    """Yield the frames of a log, the last one empty if the log had reached its bound.

    Raises:
        DataError: where it is no log, is damaged, or ends within a frame.
    """
    try:
        with path.open("rb") as file:
            if (found := file.read(len(HEAD))) != HEAD:
                raise DataError(
                    f"{path} is no event log of echo-rl {__version__}: it begins with {found!r}; "
                    "replay a log with the release that recorded it"
                )
            while head := file.read(LENGTH_BYTES):
                where = f"{path}: the frame at byte {file.tell() - len(head)}"
                length = int.from_bytes(head, "little")
                data = file.read(min(length, MAX_LOG_BYTES))
                if len(head) < LENGTH_BYTES or len(data) < length:
                    raise DataError(f"{where} is cut off")
                inflater = zlib.decompressobj()
                try:
                    frame = inflater.decompress(data, MAX_LOG_BYTES)
                except zlib.error as error:
                    raise DataError(f"{where} is damaged: {error}") from error
                if not inflater.eof:
                    raise DataError(f"{where} is damaged")
                yield frame
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
