from __future__ import annotations

import stat
from pathlib import Path

import pytest

from echo.core.errors import StorageError
from echo.runtime.identity import load_or_create_identity, load_or_create_keys


def test_a_run_keeps_its_id_and_key(tmp_path: Path) -> None:
    first = load_or_create_identity(tmp_path, run_name="toy")
    again = load_or_create_identity(tmp_path, run_name="toy")
    assert first.run_id.startswith("toy-")
    assert (again.run_id, again.public_key) == (first.run_id, first.public_key)
    assert len(first.public_key) == 32


def test_two_runs_of_one_name_differ(tmp_path: Path) -> None:
    first = load_or_create_identity(tmp_path / "a", run_name="toy")
    second = load_or_create_identity(tmp_path / "b", run_name="toy")
    assert first.run_id != second.run_id
    assert first.public_key != second.public_key


def test_nobody_else_reads_the_key(tmp_path: Path) -> None:
    load_or_create_identity(tmp_path, run_name="toy")
    assert stat.S_IMODE((tmp_path / "keys" / "learner.key").stat().st_mode) == 0o600


def test_a_key_without_an_id_is_of_a_start_that_was_killed(tmp_path: Path) -> None:
    load_or_create_identity(tmp_path, run_name="toy")
    (tmp_path / "run.json").unlink()
    again = load_or_create_identity(tmp_path, run_name="toy")
    assert load_or_create_identity(tmp_path, run_name="toy").public_key == again.public_key


@pytest.mark.parametrize("text", ["", "[]", "{}", "nonsense"])
def test_a_damaged_id_is_named(tmp_path: Path, text: str) -> None:
    load_or_create_identity(tmp_path, run_name="toy")
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(StorageError, match=str(tmp_path)):
        load_or_create_identity(tmp_path, run_name="toy")


def test_a_lost_key_is_not_replaced(tmp_path: Path) -> None:
    load_or_create_identity(tmp_path, run_name="toy")
    (tmp_path / "keys" / "learner.key").unlink()
    with pytest.raises(StorageError, match=r"learner\.key"):
        load_or_create_identity(tmp_path, run_name="toy")


def test_only_the_owner_may_look_into_the_directory_of_keys(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir(mode=0o755)
    load_or_create_identity(tmp_path, run_name="toy")
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700
    load_or_create_keys(tmp_path / "other")
    assert stat.S_IMODE((tmp_path / "other" / "keys").stat().st_mode) == 0o700
