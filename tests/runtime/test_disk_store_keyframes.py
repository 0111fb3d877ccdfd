"""Journals of keyframes: found again by the next process, as far as they are sound."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from echo.core.errors import LocalProtocolError
from echo.core.rollout import PolicyVersion
from echo.runtime.disk_store import DiskStore, KeyframeFile, MemoryStore, SavedKeyframe

LIMIT = 1 << 20
SIZE = 1 << 16
HEADER_BYTES = 12
Opened = Callable[..., DiskStore]


def version(step: int, lineage: int = 1) -> PolicyVersion:
    return PolicyVersion(lineage, step)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    """Return a function that opens the directory anew, as a process that starts does."""
    stores: list[DiskStore] = []

    def reopen(limit_bytes: int = LIMIT, *, run: str = "r") -> DiskStore:
        for former in stores:
            former.close()
        stores.append(DiskStore(tmp_path, limit_bytes))
        stores[-1].recover(run)
        return stores[-1]

    yield reopen
    for store in stores:
        store.close()


def begin(store: DiskStore, step: int) -> KeyframeFile:
    journal = store.journal(version(step))
    assert isinstance(journal, KeyframeFile)
    store.flush()
    return journal


def write(journal: KeyframeFile, *chunks: bytes) -> None:
    """Write a journal, and wait until that is on the disk."""
    journal.table(b"table")
    for index, chunk in enumerate(chunks):
        journal.chunk(index, memoryview(chunk))
    journal._files.thread.flush()


def only(saved: list[SavedKeyframe]) -> SavedKeyframe:
    (found,) = saved
    return found


def journals(directory: Path) -> list[str]:
    return sorted(path.name.rsplit("-", 1)[0] for path in directory.glob("*.keyframe"))


def test_the_next_process_reads_what_was_written_newest_first(opened: Opened) -> None:
    store = opened()
    write(begin(store, 3), b"a" * 100, b"")
    write(begin(store, 4), b"d")
    begin(store, 5)
    saved = opened().recover_encoded()
    assert [each.version for each in saved] == [version(5), version(4), version(3)]
    assert list(saved[0].journal.records()) == []
    assert list(saved[1].journal.records()) == [(None, b"table"), (0, b"d")]
    assert list(saved[2].journal.records()) == [(None, b"table"), (0, b"a" * 100), (1, b"")]


def test_one_that_is_gone_on_with_is_added_to(opened: Opened) -> None:
    write(begin(opened(), 1), b"first")
    journal = only(opened().recover_encoded()).journal
    assert len(list(journal.records())) == 2
    journal.open()
    journal.chunk(7, memoryview(b"second"))
    again = only(opened().recover_encoded()).journal
    assert list(again.records()) == [(None, b"table"), (0, b"first"), (7, b"second")]


@pytest.mark.parametrize("num_torn", [1, 5, 6, HEADER_BYTES + 5])
def test_a_torn_end_is_cut_off_before_more_is_added(opened: Opened, num_torn: int) -> None:
    journal = begin(opened(), 1)
    write(journal, b"first", b"other")
    with journal.path.open("r+b") as file:
        file.truncate(journal.path.stat().st_size - num_torn)
    journal = only(opened().recover_encoded()).journal
    sound = [(None, b"table"), (0, b"first")]
    assert list(journal.records()) == sound
    journal.open()
    journal.chunk(2, memoryview(b"third"))
    assert list(only(opened().recover_encoded()).journal.records()) == [*sound, (2, b"third")]


@pytest.mark.parametrize(
    "junk", [b"\0" * 100, b"echo\0\0\0\0\xff\xff\xff\xff" + b"x" * 50], ids=["zeros", "length"]
)
def test_junk_is_the_end(opened: Opened, junk: bytes) -> None:
    journal = begin(opened(), 1)
    write(journal, b"first")
    with journal.path.open("ab") as file:
        file.write(junk)
    assert len(list(only(opened().recover_encoded()).journal.records())) == 2


def test_what_was_not_accepted_is_cut_off_with_all_that_follows(opened: Opened) -> None:
    write(begin(opened(), 1), b"first", b"second", b"third")
    journal = only(opened().recover_encoded()).journal
    for index, _ in journal.records():
        if index == 1:
            break
    journal.open()
    journal.chunk(5, memoryview(b"new"))
    again = only(opened().recover_encoded()).journal
    assert [index for index, _ in again.records()] == [None, 0, 5]


def test_it_goes_with_its_keyframe(opened: Opened, tmp_path: Path) -> None:
    store = opened()
    journal = begin(store, 1)
    write(journal, b"a" * 100)
    kept = begin(store, 2)
    write(kept, b"b" * 50)
    journal.remove()
    journal.chunk(1, memoryview(b"late"))  # and no more is written
    store.flush()
    assert journals(tmp_path) == ["v2-L1"]
    # The same keyframe may be fetched anew.
    write(begin(store, 1), b"a")
    assert len(opened().recover_encoded()) == 2


def test_the_journals_of_other_runs_are_removed_and_foreign_files_left_alone(
    opened: Opened, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(begin(opened(run="other"), 1), b"a")
    (tmp_path / "v1-L1-mine.keyframe").write_text("mine")
    (tmp_path / "v2-L1-b2dea48d667b2821.keyframe").mkdir()
    caplog.set_level(logging.INFO)
    store = opened()
    assert store.recover_encoded() == []
    store.flush()
    assert journals(tmp_path) == ["v1-L1", "v2-L1"]
    assert (tmp_path / "v1-L1-mine.keyframe").read_text() == "mine"


def test_recovering_twice_gives_nothing_twice(opened: Opened) -> None:
    write(begin(opened(), 1), b"a")
    store = opened()
    assert len(store.recover_encoded()) == 1
    begin(store, 2)
    assert store.recover_encoded() == []


# --- room ----------------------------------------------------------------------------------------


def test_journals_take_what_versions_leave_and_the_oldest_give_way(
    opened: Opened, tmp_path: Path
) -> None:
    store = opened(2 * SIZE)
    store.create(version(1), b"manifest", SIZE)
    for step in (2, 3):
        write(begin(store, step), b"d" * (SIZE // 3))
    write(begin(store, 4), b"d" * (SIZE // 2))
    assert journals(tmp_path) == ["v3-L1", "v4-L1"]
    # A version takes the room of all of them, and is the only thing that may.
    store.create(version(4), b"manifest", SIZE)
    store.flush()
    assert journals(tmp_path) == []


def test_one_that_exceeds_the_limit_alone_is_given_up(opened: Opened, tmp_path: Path) -> None:
    store = opened(SIZE)
    journal = begin(store, 1)
    write(journal, b"a" * (SIZE // 2), b"b" * (SIZE // 2), b"c")
    assert journals(tmp_path) == []
    assert store._encoded_versions.num_bytes == 0


def test_spares_give_way_to_journals(opened: Opened, tmp_path: Path) -> None:
    store = opened(2 * SIZE)
    store.create(version(1), b"manifest", SIZE + SIZE // 2)
    store.drop(version(1))
    write(begin(store, 2), b"a" * SIZE)
    assert journals(tmp_path) == ["v2-L1"]
    assert store._spares == []


def test_the_oldest_are_not_recovered_where_the_limit_is_lower_now(
    opened: Opened, tmp_path: Path
) -> None:
    store = opened()
    for step in (1, 2, 3):
        write(begin(store, step), b"a" * SIZE)
    store = opened(2 * SIZE + 1000)
    saved = store.recover_encoded()
    store.flush()
    assert [each.version for each in saved] == [version(3), version(2)]
    assert journals(tmp_path) == ["v2-L1", "v3-L1"]


def test_the_default_limit_counts_what_a_former_process_has_taken(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened()
    monkeypatch.setattr(store, "_free_bytes", lambda: 1000)
    write(begin(store, 1), b"a" * SIZE)
    assert store._available_bytes() >= 1000 + SIZE


def test_a_disk_that_cannot_be_written_costs_only_the_recovery(
    opened: Opened,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = opened()
    journals_of = [begin(store, step) for step in (1, 2)]
    monkeypatch.setattr("echo.runtime.disk_store.os.writev", lambda *_: 3)
    for journal in journals_of:
        write(journal, b"a" * 100)
    assert journals(tmp_path) == []
    assert store._encoded_versions.num_bytes == store._encoded_versions.behind_bytes == 0
    assert caplog.text.count("No space left on device") == 1
    assert "v1-L1" in caplog.text


def test_a_directory_that_is_gone_costs_only_the_recovery(
    opened: Opened, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened()
    store.directory = store._encoded_versions.directory = tmp_path / "gone"
    write(begin(store, 1), b"a")
    assert "cannot be written: No such file" in caplog.text


def test_the_run_must_be_known_first(tmp_path: Path) -> None:
    store = DiskStore(tmp_path, LIMIT)
    with pytest.raises(LocalProtocolError, match="must come first"):
        store.journal(version(1))
    store.close()


def test_in_memory_nothing_is_kept() -> None:
    store = MemoryStore(LIMIT)
    assert store.journal(version(1)) is None
    assert store.recover_encoded() == []


def test_nobody_else_may_read_them(opened: Opened) -> None:
    assert begin(opened(), 1).path.stat().st_mode & 0o777 == 0o600
