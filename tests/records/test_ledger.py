from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from echo.core.errors import DataError, StorageError
from echo.core.records import Cancelled, Discarded, Granted, Refused
from echo.core.rollout import Group, Lineage, PolicyVersion, Rollout, trim_stale
from echo.records import ledger as ledger_module
from echo.records.ledger import (
    Accepted,
    ActivationChanged,
    AnyRecord,
    Began,
    BoundChanged,
    Cost,
    Delivery,
    Finished,
    Ledger,
    LedgerState,
    Place,
    Published,
    Sealed,
    Trained,
    deliveries_of,
    has_begun,
    read_group,
    read_lines,
    read_records,
    read_state,
    totals_of,
)
from echo.wire.codec import encode_group

V0 = PolicyVersion(1, 0)
OPEN: list[Ledger] = []


@pytest.fixture(autouse=True)
def no_retired_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delete a file as soon as no resume needs it, so that tests see which are needed."""
    monkeypatch.setattr(ledger_module, "KEPT_BYTES", 0)


@pytest.fixture(autouse=True)
def release_ledgers() -> Iterator[None]:
    """Close what a test leaves open, as a killed process would."""
    yield
    while OPEN:
        OPEN.pop().release()


def make_group(group_id: int, version: PolicyVersion = V0, *, num_tokens: int = 5) -> Group:
    chance = np.random.default_rng(group_id)
    mask = np.ones(num_tokens, dtype=np.bool_)
    mask[0] = False
    rollouts = tuple(
        Rollout(
            token_ids=chance.integers(0, 99, num_tokens, dtype=np.int32),
            sampler_logprobs=-chance.random(num_tokens, dtype=np.float32),
            policy_versions=np.tile(
                np.array([version.lineage, version.step], dtype=np.int32), (num_tokens, 1)
            ),
            completion_mask=mask,
            reward=0.1 * member,
            finish_reason="length",
        )
        for member in range(2)
    )
    return Group(
        group_id=group_id,
        attempt=1,
        worker_id="w1",
        prompt_ids=np.array([7, 8], dtype=np.int32),
        rollouts=rollouts,
    )


GROUP_BYTES = 4 + sum(map(len, encode_group(make_group(0))))


def open_ledger(run_dir: Path, *, spool_bytes: int = 1 << 20) -> Ledger:
    ledger = Ledger(run_dir, spool_bytes=spool_bytes)
    OPEN.append(ledger)
    return ledger


def begin(run_dir: Path, **numbers: Any) -> Ledger:
    ledger = open_ledger(run_dir, **numbers)
    ledger.append(Began(lineage=1, fork_step=0))
    ledger.commit()
    return ledger


def put(ledger: Ledger, *groups: Group) -> None:
    for group in groups:
        ledger.store(group, *encode_group(group))


def store(ledger: Ledger, *groups: Group) -> None:
    put(ledger, *groups)
    ledger.sync()


def grant(group: int, attempt: int = 0) -> Granted:
    return Granted(group=group, attempt=attempt, worker="w1", version=V0)


def discard(group: int, reason: str = "stale") -> Discarded:
    return Discarded(group=group, reason=reason, step=1)


def records(run_dir: Path) -> list[AnyRecord]:
    return list(read_records(run_dir))


def kinds(run_dir: Path) -> list[str]:
    return [json.loads(line)["kind"] for line in read_lines(run_dir)]


def places(run_dir: Path) -> dict[int, Place]:
    return {each.group: each.place for each in records(run_dir) if isinstance(each, Accepted)}


def group_files(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "groups").iterdir())


def state(run_dir: Path, *, lineage: int = 1, step: int = 0) -> LedgerState:
    return read_state(read_records(run_dir), lineage=lineage, step=step)


def copied(run_dir: Path, to: Path) -> Path:
    """Return what a kill of the process would leave now, elsewhere."""
    shutil.rmtree(to, ignore_errors=True)
    return Path(shutil.copytree(run_dir, to, ignore=shutil.ignore_patterns("*-shm")))


# --- records -------------------------------------------------------------------------------------


def test_what_happened_is_read_back_in_order(tmp_path: Path) -> None:
    ledger = begin(tmp_path)
    ledger.append(grant(0))
    store(ledger, make_group(0))
    others: list[AnyRecord] = [
        Granted(group=1, attempt=0, worker="w2", copy_of=3),
        Cancelled(group=1, attempt=0, worker="w2", tokens=17),
        Refused(group=2, attempt=0, worker="w3", reason="stale"),
        Published(version=V0),
        Sealed(version=V0, root="0102", image_hash="03"),
        Finished(step=4),
        BoundChanged(step=4, before=3, bound=2, cause="ess"),
        ActivationChanged(
            step=4, cause="joined", activated=("w1",), deactivated=(), numbers={"rate": 2.5}
        ),
        Cost(step=4, total=1.25, per_h=3.0),
        discard(0),
    ]
    for record in others:
        ledger.append(record)
    ledger.close()
    began, granted, accepted, *rest = found = records(tmp_path)
    assert all(each.at > 1.6e9 for each in found)
    assert [msgspec.structs.replace(each, at=0.0) for each in rest] == others
    assert msgspec.structs.replace(granted, at=0.0) == grant(0)
    assert isinstance(began, Began)
    assert isinstance(accepted, Accepted)
    assert (accepted.group, accepted.attempt, accepted.worker) == (0, 1, "w1")
    # The first token of each rollout is masked.
    assert (accepted.versions, accepted.version_tokens) == ((V0,), (8,))
    assert (accepted.tokens, accepted.rewards) == (10, (0.0, 0.1))
    assert accepted.place == Place("000001.bin", 0, GROUP_BYTES, accepted.place.hash)


def test_whoever_reads_from_outside_needs_the_tables_alone(tmp_path: Path) -> None:
    ledger = begin(tmp_path)
    store(ledger, make_group(0), make_group(1))
    ledger.append(discard(1))
    ledger.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "groups", "ledger.head", "ledger.lock", "ledger.sqlite",
    ]  # fmt: skip
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as database:
        rows = database.execute("SELECT seq, body, hash FROM records ORDER BY seq").fetchall()
        counts = database.execute("SELECT kind, count(*) FROM records GROUP BY kind ORDER BY 1")
        assert counts.fetchall() == [("accepted", 2), ("discarded", 1), ("lineage", 1)]
        assert database.execute("SELECT min(at) FROM records").fetchone()[0] > 1.6e9
        assert database.execute("PRAGMA user_version").fetchone() == (5,)
    assert int((tmp_path / "ledger.head").read_text()) == 4
    for seq, body, digest in rows:
        assert digest == blake3(seq.to_bytes(8, "little") + body.encode()).digest()
    assert [seq for seq, *_ in rows] == [1, 2, 3, 4]
    assert [body for _, body, _ in rows] == list(read_lines(tmp_path))
    name, offset, length, digest = json.loads(rows[2][1])["place"]
    data = (tmp_path / "groups" / name).read_bytes()[offset : offset + length]
    assert blake3(data).hexdigest() == digest


def test_a_group_of_several_versions_says_which_sampled_how_much(tmp_path: Path) -> None:
    ledger = begin(tmp_path)
    group = make_group(0)
    versions = group.rollouts[0].policy_versions.copy()
    versions[:4] = (2, 7)
    swapped = replace(group.rollouts[0], policy_versions=versions)
    store(ledger, replace(group, rollouts=(swapped, group.rollouts[1])))
    [record] = [each for each in records(tmp_path) if isinstance(each, Accepted)]
    assert (record.versions, record.version_tokens) == ((V0, PolicyVersion(2, 7)), (5, 3))
    # What a step says of the same group agrees.
    staleness = ledger.trained([ledger.load(0, record.place)], lineage=2, consumed_at=9)
    assert staleness == {9: 5, 2: 3}


def test_a_step_says_what_was_left_of_a_group_that_was_trimmed(tmp_path: Path) -> None:
    ledger = begin(tmp_path)
    group = make_group(0)
    versions = group.rollouts[0].policy_versions.copy()
    versions[2:] = (1, 7)
    both = tuple(replace(rollout, policy_versions=versions) for rollout in group.rollouts)
    store(ledger, replace(group, rollouts=both))
    trimmed = trim_stale(replace(group, rollouts=both), step=9, max_staleness=2)
    assert trimmed is not None
    staleness = ledger.trained([trimmed, make_group(1)], lineage=1, consumed_at=9)
    accepted, step = records(tmp_path)[-2:]
    assert isinstance(accepted, Accepted)
    assert isinstance(step, Trained)
    assert accepted.versions == (V0, PolicyVersion(1, 7))
    assert step.trimmed == {0: accepted.version_tokens[1:]}
    assert staleness[2] == accepted.version_tokens[1]


def test_a_run_has_begun_once_it_has_a_record(tmp_path: Path) -> None:
    assert not has_begun(tmp_path)
    open_ledger(tmp_path).close()  # of a learner that was killed before it began
    assert not has_begun(tmp_path)
    begin(tmp_path)
    assert has_begun(tmp_path)


def test_a_record_counts_once_it_is_committed(tmp_path: Path) -> None:
    ledger = begin(tmp_path)
    assert not ledger.has_queued
    ledger.append(grant(0))
    assert ledger.has_queued
    assert kinds(tmp_path) == ["lineage"]
    ledger.commit()
    assert not ledger.has_queued
    assert kinds(tmp_path) == ["lineage", "granted"]
    # What writes by itself leaves nothing.
    ledger.trained([make_group(0)], lineage=1, consumed_at=0)
    ledger.checkpointed(lineage=1, step=1, oldest_step=1)
    assert not ledger.has_queued
    assert kinds(tmp_path) == ["lineage", "granted", "trained", "checkpoint"]


def test_a_run_that_goes_on_may_be_read_and_is_not_held_up(tmp_path: Path) -> None:
    ledger = begin(tmp_path)
    for group in range(3):
        ledger.append(grant(group))
    ledger.commit()
    reading = read_records(tmp_path)
    assert isinstance(next(reading), Began)
    ledger.append(grant(3))
    ledger.checkpointed(lineage=1, step=0, oldest_step=0)
    ledger.close()
    assert len(list(reading)) == 3
    assert len(records(tmp_path)) == 6


# --- any sequence, any kill ----------------------------------------------------------------------


class Run:
    """A run of which each group has a file of its own, and what must be there."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.ledger = begin(run_dir)
        self.num_groups = self.num_steps = self.saved_step = 0
        self.waiting: list[int] = []
        self.ended_at: dict[int, int] = {}

    def store(self) -> None:
        put(self.ledger, make_group(self.num_groups))
        self.waiting.append(self.num_groups)
        self.num_groups += 1

    def train(self) -> None:
        if self.waiting:
            group = self.waiting.pop(0)
            self.ledger.trained([make_group(group)], lineage=1, consumed_at=self.num_steps)
            self.num_steps += 1
            self.ended_at[group] = self.num_steps

    def discard(self) -> None:
        if self.waiting:
            self.ended_at[self.waiting[-1]] = 0
            self.ledger.append(discard(self.waiting.pop()))

    def commit(self) -> None:
        self.ledger.commit()

    def sync(self) -> None:
        self.ledger.sync()

    def save(self) -> None:
        """Keep a checkpoint of this step and the one before: steps after that one may be void."""
        before, self.saved_step = self.saved_step, self.num_steps
        self.ledger.checkpointed(lineage=1, step=self.num_steps, oldest_step=before)
        found = places(self.run_dir)
        needed = {g for g in found if self.ended_at.get(g, self.num_steps + 1) > before}
        assert set(group_files(self.run_dir)) == {found[group].file for group in needed}

    def reopen(self) -> None:
        self.ledger.close()
        self.ledger = open_ledger(self.run_dir)
        found = state(self.run_dir, step=self.num_steps)
        assert sorted(found.waiting) == self.waiting
        for group, place in found.waiting.items():
            assert encode_group(self.ledger.load(group, place)) == encode_group(make_group(group))
        self.ledger.free_unused(step=0)
        assert len(group_files(self.run_dir)) == len(self.waiting)
        self.saved_step = self.num_steps


CALLS = ["store", "store", "store", "train", "discard", "commit", "sync", "save", "reopen"]


@pytest.mark.slow
@given(st.lists(st.sampled_from(CALLS), max_size=30))
def test_whatever_happens_files_are_unlinked_exactly_when_their_groups_have_ended(
    tmp_path_factory: pytest.TempPathFactory, calls: list[str]
) -> None:
    written: list[AnyRecord] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledger_module, "GROUP_FILE_BYTES", 1)
        patch.setattr(ledger_module, "LOG_RECORDS", 5)
        run = Run(tmp_path_factory.mktemp("run"))
        for call in [*calls, "save", "save"]:
            getattr(run, call)()
            assert records(run.run_dir)[: len(written)] == written, "nothing is rewritten"
            written = records(run.run_dir)
        run.ledger.release()
    stored = [each.group for each in written if isinstance(each, Accepted)]
    assert stored == list(range(run.num_groups))
    assert len(group_files(run.run_dir)) == len(run.waiting)


@pytest.mark.slow
@given(st.data())
def test_a_kill_at_any_write_leaves_a_prefix_of_what_was_committed(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """The log is written from front to back, so a kill is a cut; what follows it never was."""
    run_dir = tmp_path_factory.mktemp("run")
    ledger = begin(run_dir)
    ends = [1]
    for batch in data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=6)):
        for number in range(batch):
            ledger.append(grant(10 * len(ends) + number))
        put(ledger, make_group(len(ends)))
        ledger.commit()
        ends.append(len(records(run_dir)))
    whole = records(run_dir)
    killed = copied(run_dir, run_dir / "killed")
    log = killed / "ledger.sqlite-wal"
    # A share, since the size differs between runs of one example: records have the time of day.
    share = data.draw(st.floats(0, 1), label="share")
    os.truncate(log, int(share * log.stat().st_size))
    found = records(killed)
    assert found == whole[: len(found)]
    assert len(found) in (0, *ends), "a batch is there as a whole, or not at all"
    again = open_ledger(killed)
    again.append(grant(99))
    again.close()
    assert records(killed)[:-1] == found
    for group, place in places(killed).items():
        assert encode_group(again.load(group, place)) == encode_group(make_group(group))
    ledger.release()


@pytest.mark.slow
@given(st.randoms(use_true_random=False))
def test_a_kill_while_the_log_is_moved_into_the_database_loses_nothing(
    tmp_path_factory: pytest.TempPathFactory, chance: random.Random
) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    ledger = begin(run_dir)
    for group in range(60):
        ledger.append(grant(group))
    ledger.checkpointed(lineage=1, step=0, oldest_step=0)
    for group in range(60):
        ledger.append(discard(group))
    ledger.sync()
    whole = records(run_dir)
    killed = copied(run_dir, run_dir / "killed")
    moved = copied(run_dir, run_dir / "moved")
    with closing(sqlite3.connect(moved / "ledger.sqlite")) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    before, after = ((each / "ledger.sqlite").read_bytes() for each in (killed, moved))
    before = before.ljust(len(after), b"\0")
    pages = [chance.choice((before, after))[at : at + 4096] for at in range(0, len(after), 4096)]
    (killed / "ledger.sqlite").write_bytes(b"".join(pages))
    assert records(killed) == whole
    open_ledger(killed).close()
    assert records(killed) == whole
    ledger.release()


KILLED = """
import sys
from pathlib import Path
from echo.core.records import Discarded
from echo.records import ledger as module
from tests.records.test_ledger import begin, encode_group, make_group
module.LOG_RECORDS, module.GROUP_FILE_BYTES = 7, 2000
ledger = begin(Path(sys.argv[1]))
for group_id in range(10_000):
    group = make_group(group_id)
    ledger.store(group, *encode_group(group))
    ledger.append(Discarded(group=group_id, reason="stale", step=0))
    ledger.sync()
    print(group_id, flush=True)
    if group_id % 5 == 4:
        ledger.checkpointed(lineage=1, step=0, oldest_step=0)
"""


@pytest.mark.slow
def test_a_killed_process_loses_nothing_that_it_has_told_of(tmp_path: Path) -> None:
    for number, num_told in enumerate([1, 30]):
        run_dir = tmp_path / str(number)
        root = str(Path(__file__).parents[2])
        with subprocess.Popen(
            [sys.executable, "-c", KILLED, str(run_dir)],
            stdout=subprocess.PIPE, text=True, cwd=root, env={**os.environ, "PYTHONPATH": root},
        ) as process:  # fmt: skip
            assert process.stdout is not None
            told = [int(next(process.stdout)) for _ in range(num_told)]
            process.kill()
            told += [int(line) for line in process.stdout]
        stored = [each.group for each in records(run_dir) if isinstance(each, Accepted)]
        ended = [each.group for each in records(run_dir) if isinstance(each, Discarded)]
        assert stored[: len(told)] == ended[: len(told)] == told
        ledger = open_ledger(run_dir)
        found = state(run_dir)
        assert len(found.waiting) <= 1, "its end was not told, so it waits"
        ledger.free_unused(step=0)
        assert group_files(run_dir) == []


def test_the_newest_files_that_no_resume_needs_are_kept_for_readers_and_count_for_no_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "GROUP_FILE_BYTES", 1)
    monkeypatch.setattr(ledger_module, "KEPT_BYTES", 2 * GROUP_BYTES)
    ledger = begin(tmp_path, spool_bytes=GROUP_BYTES)
    for number in range(4):
        group = make_group(number)
        put(ledger, group)  # for which there is room: those before have ended
        ledger.trained([group], lineage=1, consumed_at=number)
        ledger.checkpointed(lineage=1, step=number + 1, oldest_step=number + 1)
    assert group_files(tmp_path) == ["000003.bin", "000004.bin"]
    kept = places(tmp_path)[2]
    assert encode_group(read_group(tmp_path, 2, kept)) == encode_group(make_group(2))
    ledger.close()
    ledger = open_ledger(tmp_path, spool_bytes=GROUP_BYTES)
    ledger.free_unused(step=0)
    assert group_files(tmp_path) == ["000003.bin", "000004.bin"]
    put(ledger, make_group(4))
    ledger.close()


# --- damage --------------------------------------------------------------------------------------


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def bits_of(path: Path, number: int) -> list[int]:
    return random.Random(0).sample(range(8 * path.stat().st_size), number)


@pytest.mark.slow
def test_a_flipped_bit_of_the_database_is_named_or_changes_nothing(tmp_path: Path) -> None:
    ledger = begin(tmp_path / "run")
    for group in range(40):
        ledger.append(grant(group))
    store(ledger, make_group(0))
    ledger.close()
    path = tmp_path / "run" / "ledger.sqlite"
    whole, data = records(tmp_path / "run"), path.read_bytes()
    num_named = 0
    for bit in bits_of(path, 200):
        flip(path, bit)
        try:
            assert records(tmp_path / "run") == whole, f"bit {bit}"
        except StorageError:
            num_named += 1
        path.write_bytes(data)
    # All that the records are made of; the rest is free, or for people.
    assert num_named > 50


@pytest.mark.slow
def test_a_flipped_bit_of_the_log_is_named_and_nothing_is_misread(tmp_path: Path) -> None:
    ledger = begin(tmp_path / "run")
    for group in range(8):
        ledger.append(grant(group))
        ledger.sync()
    whole = records(tmp_path / "run")
    killed = copied(tmp_path / "run", tmp_path / "killed")
    num_named = 0
    for bit in bits_of(killed / "ledger.sqlite-wal", 60):
        killed = copied(tmp_path / "run", tmp_path / "killed")
        flip(killed / "ledger.sqlite-wal", bit)
        try:
            found = records(killed)
            Ledger(killed, spool_bytes=1 << 20).release()
        except StorageError:
            num_named += 1
            continue
        assert found == whole, f"bit {bit}"
    assert num_named > 20


def test_an_older_ledger_in_place_of_the_newest_is_named(tmp_path: Path) -> None:
    ledger = begin(tmp_path)
    ledger.close()
    older = (tmp_path / "ledger.sqlite").read_bytes()
    ledger = open_ledger(tmp_path)
    ledger.append(grant(0))
    ledger.close()
    (tmp_path / "ledger.sqlite").write_bytes(older)
    for read in (open_ledger, records):
        with pytest.raises(StorageError, match=r"it has 1 records where it had 2; .*ledger\.head"):
            read(tmp_path)


def test_what_was_only_committed_is_no_loss_and_a_sync_alone_makes_it_one(tmp_path: Path) -> None:
    ledger = begin(tmp_path / "run")
    ledger.append(grant(0))
    ledger.commit()
    killed = copied(tmp_path / "run", tmp_path / "killed")
    (killed / "ledger.sqlite-wal").write_bytes(b"")
    assert records(killed) == []
    ledger.sync()  # without a record of its own
    killed = copied(tmp_path / "run", tmp_path / "killed")
    (killed / "ledger.sqlite-wal").write_bytes(b"")
    with pytest.raises(StorageError, match="it has 0 records where it had 2"):
        records(killed)


def test_a_head_without_a_number_is_named(tmp_path: Path) -> None:
    begin(tmp_path).close()
    (tmp_path / "ledger.head").write_bytes(b"\x00" * 21)
    for read in (open_ledger, records):
        with pytest.raises(StorageError, match=r"ledger\.head is damaged: it holds no number"):
            read(tmp_path)


def edit(run_dir: Path, statement: str, *values: Any) -> None:
    with closing(sqlite3.connect(run_dir / "ledger.sqlite")) as database, database:
        database.execute(statement, values)


@pytest.mark.parametrize(
    ("statement", "named"),
    [
        ("DELETE FROM records WHERE seq = 3", "record 3 is missing"),
        ("DELETE FROM records WHERE seq > 4", "it has 4 records where it had 6"),
        ("UPDATE records SET body = replace(body, 'w1', 'w2') WHERE seq = 2", "record 2 has not"),
        ("UPDATE records SET hash = x'00' WHERE seq = 5", "record 5 has not the bytes"),
        ("DROP TABLE records", "no such table: records"),
    ],
)
def test_damage_is_named_by_its_record(tmp_path: Path, statement: str, named: str) -> None:
    ledger = begin(tmp_path)
    for group in range(5):
        ledger.append(grant(group))
    ledger.close()
    edit(tmp_path, statement)
    with pytest.raises(StorageError, match=rf"ledger.sqlite is damaged: .*{named}.*--init-from"):
        records(tmp_path)


def test_records_that_have_changed_places_are_noticed(tmp_path: Path) -> None:
    ledger = begin(tmp_path)
    ledger.append(grant(0))
    ledger.append(grant(1))
    ledger.close()
    edit(tmp_path, "UPDATE records SET seq = 5 - seq + 10 WHERE seq > 1")
    edit(tmp_path, "UPDATE records SET seq = seq - 10 WHERE seq > 1")
    with pytest.raises(StorageError, match="record 2 has not the bytes of its hash"):
        records(tmp_path)


def test_a_record_without_its_fields_is_damage(tmp_path: Path) -> None:
    begin(tmp_path).close()
    body = b'{"kind":"trained","lineage":1}'
    digest = blake3((2).to_bytes(8, "little") + body).digest()
    edit(tmp_path, "INSERT INTO records VALUES (2, ?, ?)", body.decode(), digest)
    with pytest.raises(StorageError, match=r"record 2: Object missing required field"):
        records(tmp_path)


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    (tmp_path / "ledger.sqlite").write_bytes(b"not a database, but long enough to look at" * 100)
    with pytest.raises(StorageError, match=r"ledger.sqlite is damaged: file is not a database"):
        records(tmp_path)
    with pytest.raises(StorageError, match=r"cannot open the ledger in .*not a database"):
        open_ledger(tmp_path)


def test_a_group_file_that_is_missing_or_short_is_named(tmp_path: Path) -> None:
    ledger = begin(tmp_path)
    store(ledger, make_group(0))
    [place] = places(tmp_path).values()
    path = tmp_path / "groups" / place.file
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(StorageError, match=r"group 0 cannot be read back from .*000001.bin"):
        ledger.load(0, place)
    path.unlink()
    with pytest.raises(StorageError, match="group 0 cannot be read back"):
        ledger.load(0, place)


def test_a_flipped_bit_anywhere_in_a_stored_group_is_noticed(tmp_path: Path) -> None:
    ledger = begin(tmp_path)
    store(ledger, make_group(0), make_group(1))
    place = places(tmp_path)[1]
    path = tmp_path / "groups" / place.file
    for byte in range(place.offset, place.offset + place.length, place.length // 20):
        flip(path, 8 * byte + byte % 8)
        with pytest.raises(StorageError, match=rf"at {place.offset} is \w+, .* has {place.hash}"):
            ledger.load(1, place)
        assert ledger.load(0, places(tmp_path)[0]).group_id == 0
        flip(path, 8 * byte + byte % 8)


def test_a_file_that_others_put_beside_the_group_files_is_left_alone(tmp_path: Path) -> None:
    store(begin(tmp_path), make_group(0))
    OPEN.pop().close()
    foreign = ["0000009.bin", "copy of 000001.bin", "notes.txt", "²³⁴⁵⁶⁷.bin"]
    for name in foreign:
        (tmp_path / "groups" / name).write_bytes(b"mine")
    ledger = open_ledger(tmp_path, spool_bytes=GROUP_BYTES)
    ledger.free_unused(step=0)
    store(ledger, make_group(1))  # for which there is room
    assert places(tmp_path)[1].file == "000002.bin"
    assert {path.name for path in (tmp_path / "groups").iterdir()} == {*foreign, "000002.bin"}


# --- full disks ----------------------------------------------------------------------------------


@contextmanager
def no_file_beyond(num_bytes: int) -> Iterator[None]:
    """Let no file grow beyond a size, as a full disk would; Python ignores the signal of it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_too_full_for_a_group_keeps_all_before_and_takes_it_later(tmp_path: Path) -> None:
    assert signal.getsignal(signal.SIGXFSZ) == signal.SIG_IGN
    ledger = begin(tmp_path)
    store(ledger, *(make_group(i, num_tokens=900) for i in range(3)))
    size = (tmp_path / "groups" / "000001.bin").stat().st_size
    before = records(tmp_path)
    put(ledger, make_group(3, num_tokens=900), make_group(4, num_tokens=900))
    ledger.append(grant(5))
    with no_file_beyond(size + size // 2), pytest.raises(StorageError) as caught:
        ledger.sync()
    text = str(caught.value)
    assert f"cannot write groups in {tmp_path / 'groups'}: [Errno 27] File too large" in text
    assert text.endswith("free disk space, then continue the run with --resume")
    assert records(tmp_path) == before
    ledger.sync()
    assert kinds(tmp_path) == ["lineage", *["accepted"] * 5, "granted"]
    for group, place in places(tmp_path).items():
        whole = encode_group(make_group(group, num_tokens=900))
        assert encode_group(ledger.load(group, place)) == whole


def test_a_disk_too_full_for_records_keeps_all_before_and_takes_them_later(
    tmp_path: Path,
) -> None:
    ledger = begin(tmp_path)
    before = records(tmp_path)
    log = tmp_path / "ledger.sqlite-wal"
    for group in range(100):
        ledger.append(grant(group))
    with (
        no_file_beyond(log.stat().st_size + 6000),
        pytest.raises(StorageError, match=r"cannot write the ledger.*free disk space"),
    ):
        ledger.commit()
    assert records(copied(tmp_path, tmp_path / "killed")) == records(tmp_path) == before
    ledger.commit()
    ledger.close()
    assert [each.group for each in records(tmp_path) if isinstance(each, Granted)] == [*range(100)]


def test_space_for_groups_is_bounded_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "GROUP_FILE_BYTES", 1)
    ledger = begin(tmp_path, spool_bytes=2 * GROUP_BYTES)
    store(ledger, make_group(0), make_group(1))
    full = f"the spool in .* holds {2 * GROUP_BYTES} of the {2 * GROUP_BYTES} bytes.*spool_bytes"
    with pytest.raises(StorageError, match=full):
        put(ledger, make_group(2))
    assert sorted(places(tmp_path)) == [0, 1]
    ledger.append(discard(0))
    ledger.checkpointed(lineage=1, step=1, oldest_step=0)
    store(ledger, make_group(2))
    ledger.close()
    with pytest.raises(StorageError, match=r"limits\.spool_bytes"):
        put(open_ledger(tmp_path, spool_bytes=2 * GROUP_BYTES), make_group(3))


# --- group files ---------------------------------------------------------------------------------


# --- who may write, and where --------------------------------------------------------------------


def test_a_directory_of_a_later_format_is_refused_with_both_numbers(tmp_path: Path) -> None:
    begin(tmp_path).close()
    edit(tmp_path, "PRAGMA user_version = 6")
    for read in (open_ledger, records):
        with pytest.raises(StorageError, match="has ledger format 6, this release has format 5"):
            read(tmp_path)


def test_a_directory_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no such file; is .* the directory of a run"):
        records(tmp_path)
    assert list(tmp_path.iterdir()) == [], "reading leaves no trace"


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "groups").write_text("in the way")
    with pytest.raises(StorageError, match="cannot open the ledger in"):
        open_ledger(tmp_path)


def test_a_volume_without_shared_memory_is_named_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "ledger.sqlite-shm").mkdir()  # so that there can be none
    with pytest.raises(StorageError, match=r"write-ahead log does not work there.*set run\.dir"):
        open_ledger(tmp_path)


# --- what is left to do --------------------------------------------------------------------------


def place(group: int) -> Place:
    return Place("000001.bin", 10 * group, 10, f"{group:064x}")


def lineage(number: int, fork_step: int) -> Began:
    return Began(lineage=number, fork_step=fork_step, at=100.0 * number)


def accepted(group: int, *, at: float = 0.0) -> Accepted:
    return Accepted(
        at=at, group=group, attempt=0, worker="w1", versions=(V0,), version_tokens=(8,),
        tokens=10, rewards=(0.0, 1.0), place=place(group),
    )  # fmt: skip


def trained(number: int, step: int, *groups: int) -> Trained:
    return Trained(
        lineage=number, step=step, consumed_at=step - 1, groups=groups, staleness={0: 10, 1: step}
    )


def test_groups_are_finished_waiting_or_granted() -> None:
    found = read_state(
        [
            lineage(1, 0),
            *(grant(group) for group in range(6)),
            grant(3, 1),
            *(accepted(group) for group in range(3)),
            trained(1, 1, 0),
            discard(2),
            discard(5),
        ],
        lineage=1,
        step=1,
    )
    assert found.next_group_id == 6
    assert found.finished == {0, 1, 2, 5}
    assert found.waiting == {1: place(1)}
    assert found.granted == {3: {0: "w1", 1: "w1"}, 4: {0: "w1"}}
    assert found.staleness_tokens == {0: 10, 1: 1}
    assert found.lineages == (Lineage(1, 0),)


def test_a_discard_is_never_void() -> None:
    found: list[AnyRecord] = [lineage(1, 0), accepted(0), discard(0), lineage(2, 0)]
    assert read_state(found, lineage=2, step=0).waiting == {}


def test_a_group_trained_again_after_a_fork_has_one_end() -> None:
    found: list[AnyRecord] = [
        lineage(1, 0),
        *(accepted(group) for group in range(4)),
        trained(1, 1, 0),
        trained(1, 2, 1),
        trained(1, 3, 2),
        lineage(2, 1),
        trained(2, 2, 2),
        trained(2, 3, 1),
        lineage(3, 2),
        trained(3, 3, 3),
    ]
    assert sorted(read_state(found, lineage=3, step=3).waiting) == [1]
    assert sorted(read_state(found, lineage=2, step=2).waiting) == [1, 3]
    assert sorted(read_state(found, lineage=1, step=1).waiting) == [1, 2, 3]
    totals = totals_of(found)
    assert totals.num_trained == 3
    assert totals.lineage_starts == [100.0, 200.0, 300.0]


def test_a_checkpoint_that_a_later_lineage_left_is_refused() -> None:
    found: list[AnyRecord] = [
        lineage(1, 0),
        *(trained(1, step, step) for step in range(1, 9)),
        lineage(2, 5),
    ]
    found += [trained(2, step, step) for step in range(6, 10)]
    assert read_state(found, lineage=1, step=5)
    assert read_state(found, lineage=2, step=9)
    with pytest.raises(StorageError, match=r"step 8 in lineage 1 is not on the run's history"):
        read_state(found, lineage=1, step=8)
    with pytest.raises(StorageError, match="step 4 in lineage 2 is not"):
        read_state(found, lineage=2, step=4)


def test_a_ledger_whose_end_is_lost_does_not_let_groups_be_trained_twice() -> None:
    found: list[AnyRecord] = [lineage(1, 0), accepted(0), accepted(1), trained(1, 1, 0)]
    with pytest.raises(
        StorageError, match="step 2 in lineage 1 is ahead of the ledger, whose last"
    ):
        read_state(found, lineage=1, step=2)


# --- what it adds up to --------------------------------------------------------------------------


def test_totals_count_what_became_of_groups_and_the_newest_bill() -> None:
    totals = totals_of(
        [
            lineage(1, 0),
            *(accepted(group) for group in range(3)),
            trained(1, 1, 0),
            discard(1, "zero_variance"),
            discard(7, "zero_variance"),
            discard(8, "reward_error"),
            Cost(step=1, total=1.0, per_h=2.0),
            Cost(step=2, total=1.5, per_h=2.5, at=77.0),
        ]
    )
    assert (totals.num_trained, totals.num_tokens) == (1, 30)
    assert totals.discarded == {"zero_variance": 2, "reward_error": 1}
    assert totals.staleness_tokens == {0: 10, 1: 1}
    assert totals.cost == Cost(step=2, total=1.5, per_h=2.5, at=77.0)
    assert totals_of([]).cost is None


def test_deliveries_go_from_grant_to_acceptance() -> None:
    grants = [Granted(group=0, attempt=0, worker="w1", at=5.0), grant(1)]
    found: list[AnyRecord] = [*grants, accepted(0, at=9.0), accepted(2)]
    assert deliveries_of(found) == [
        Delivery(worker="w1", granted_at=5.0, accepted_at=9.0, num_tokens=10)
    ]
