"""Event log on disk: frames with a length and a checksum, up to a bound.

    echo event log 1        and a line break, then again and again:
    length | crc32 | frame  two little-endian 32-bit numbers; the top bit of the length: deflated

A frame is written with one call, so a killed process leaves whole ones. At the bound a last, empty
frame says that the log was ended there. `runtime/event_log.py` says what the frames hold.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from echo.core.errors import DataError, StorageError

MAX_LOG_BYTES = 256 << 20
"""Where a log ends: it can still be sent to somebody, and replayed within minutes."""
MAGIC = b"echo event log 1\n"
DEFLATE_FROM = 512
"""Bytes from which a frame is worth deflating."""
MAX_FRAME_BYTES = 1 << 30
"""Of one frame; a length beyond it is damage."""
_HEAD = struct.Struct("<II")
_DEFLATED = 1 << 31


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
            self._file.write(MAGIC)
        except FileExistsError as error:
            raise StorageError(f"{path} is there already; name a new file for the log") from error
        except OSError as error:
            raise StorageError(f"{path} cannot be written: {error.strerror}") from error

    def write(self, frame: bytes) -> bool:
        """Append a frame; return whether there was room for it, after which there is none.

        Raises:
            OSError: if the disk refuses it.
        """
        flag = 0
        if len(frame) >= DEFLATE_FROM:
            frame, flag = zlib.compress(frame, 1), _DEFLATED
        self._left -= _HEAD.size + len(frame)
        has_room = self._left >= 0
        data = frame if has_room else b""
        head = _HEAD.pack(len(data) | (flag if has_room else 0), zlib.crc32(data))
        self._file.write(head + data)
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
            if file.read(len(MAGIC)) != MAGIC:
                raise DataError(f"{path} is no event log of this version of Echo")
            while head := file.read(_HEAD.size):
                where = f"{path}: the frame at byte {file.tell() - len(head)}"
                if len(head) < _HEAD.size:
                    raise DataError(f"{where} is cut off")
                length, checksum = _HEAD.unpack(head)
                is_deflated, length = bool(length & _DEFLATED), length & ~_DEFLATED
                if length > MAX_FRAME_BYTES:
                    raise DataError(f"{where} is damaged")
                data = file.read(length)
                if len(data) < length:
                    raise DataError(f"{where} is cut off")
                if zlib.crc32(data) != checksum:
                    raise DataError(f"{where} is damaged")
                yield zlib.decompress(data) if is_deflated else data
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
