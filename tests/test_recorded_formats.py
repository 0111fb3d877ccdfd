"""Directories of an older release: refused by name and number, and left as they are.

`recorded/` was written by two steps of the quickstart with a tiny model and one worker, before the
ledger was SQLite; weights and groups are left out.
"""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from echo.core.errors import StorageError
from echo.records.ledger import Ledger, read_records
from echo.runtime.disk_store import DiskStore
from tests.runtime.test_checkpoint import find_whole

RECORDED = Path(__file__).parent / "recorded"


@pytest.mark.parametrize(
    ("kind", "opened", "message"),
    [
        (
            "run",
            lambda path: Ledger(path, spool_bytes=1),
            r"format 1 .*format 2; --init-from .*run/final",
        ),
        ("run", lambda path: list(read_records(path)), r"format 1 .*format 2; --init-from"),
        ("checkpoints", find_whole, r"step_000002 has format 1, this release reads 2; .*init-from"),
    ],
)
def test_an_older_format_is_refused_with_both_numbers_and_the_remedy(
    tmp_path: Path, kind: str, opened: Callable[[Path], object], message: str
) -> None:
    shutil.copytree(RECORDED / kind, tmp_path / kind)
    with pytest.raises(StorageError, match=message):
        opened(tmp_path / kind)
    assert files_of(tmp_path / kind) == files_of(RECORDED / kind)


def test_a_later_format_of_the_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "echo-store-3.lock").touch()
    with pytest.raises(StorageError, match="holds versions in format 3, this release has format 2"):
        DiskStore(tmp_path)


def files_of(directory: Path) -> dict[str, bytes]:
    paths = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}
