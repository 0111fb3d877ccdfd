from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from echo.records.files import sync_path, write_file


def test_a_file_is_replaced_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_file(path, b"first")
    write_file(path, b"second", mode=0o600)
    assert path.read_bytes() == b"second"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_written_keeps_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_file(path, b"first")
    (tmp_path / ".file.tmp").mkdir()  # in the way
    with pytest.raises(IsADirectoryError):
        write_file(path, b"second")
    assert path.read_bytes() == b"first"


def test_a_full_disk_is_not_made_fuller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_file(path, b"first")

    def refuse(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space left"):
        write_file(path, b"second")
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]


def test_syncing_what_is_missing_is_an_error(tmp_path: Path) -> None:
    sync_path(tmp_path)
    with pytest.raises(FileNotFoundError):
        sync_path(tmp_path / "missing")
