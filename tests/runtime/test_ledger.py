from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echo.core.errors import StorageError
from echo.core.rollout import Group, Lineage, PolicyVersion, Rollout, trim_stale
from echo.records import ledger as ledger_module
from echo.records.ledger import Ledger, LedgerState, SpoolPlace, read_records, read_state
from echo.wire.codec import encode_group

V0 = PolicyVersion(1, 0)
OPEN: list[Ledger] = []


@pytest.fixture(autouse=True)
def close_ledgers() -> Iterator[None]:
    """Close what a test leaves open, as a killed process would."""
    yield
    while OPEN:
        ledger = OPEN.pop()
        if not ledger._file.closed:
            ledger.close()


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


def open_ledger(run_dir: Path, *, spool_bytes: int = 1 << 20) -> Ledger:
    ledger = Ledger(run_dir, spool_bytes=spool_bytes)
    OPEN.append(ledger)
    return ledger


def store(ledger: Ledger, *groups: Group) -> None:
    for group in groups:
        ledger.store(group, *encode_group(group))
    ledger.sync()


def records(run_dir: Path) -> list[dict[str, Any]]:
    return [record for _, record in read_records(run_dir / "ledger.jsonl")]


def begin(run_dir: Path, **numbers: Any) -> Ledger:
    ledger = open_ledger(run_dir, **numbers)
    ledger.append("lineage", lineage=1, fork_step=0)
    return ledger


def history(run_dir: Path, *, lineage: int = 1, step: int = 0) -> LedgerState:
    return read_state(run_dir / "ledger.jsonl", lineage=lineage, step=step)


# --- records -------------------------------------------------------------------------------------


def test_what_happened_is_read_back_in_order(tmp_path: Path) -> None:
    ledger = begin(tmp_path)
    ledger.append("granted", group=0, attempt=0, worker="w1", version=[1, 0])
    store(ledger, make_group(0))
    ledger.published(PolicyVersion(1, 0), root=b"\1\2", image_hash=b"\3")
    ledger.discarded(0, "stale", step=9)
    ledger.close()
    found = records(tmp_path)
    kinds = ["lineage", "granted", "accepted", "published", "discarded"]
    assert [record["kind"] for record in found] == kinds
    assert all(record["at"] > 1.6e9 for record in found)
    accepted = found[2]
    assert (accepted["group"], accepted["attempt"], accepted["worker"]) == (0, 1, "w1")
    # The first token of each rollout is masked.
    assert (accepted["versions"], accepted["version_tokens"]) == ([[1, 0]], [8])
    assert accepted["tokens"] == 10
    assert accepted["rewards"] == [0.0, 0.1]
    assert accepted["spool"][:2] == ["000001.bin", 0]
    assert (found[3]["version"], found[3]["root"]) == ([1, 0], "0102")
    assert (found[4]["reason"], found[4]["step"]) == ("stale", 9)


def test_a_group_of_several_versions_says_which_sampled_how_much(tmp_path: Path) -> None:
    ledger = begin(tmp_path)
    group = make_group(0)
    versions = group.rollouts[0].policy_versions.copy()
    versions[:4] = (2, 7)
    swapped = replace(group.rollouts[0], policy_versions=versions)
    store(ledger, replace(group, rollouts=(swapped, group.rollouts[1])))
    [record] = [record for record in records(tmp_path) if record["kind"] == "accepted"]
    assert (record["versions"], record["version_tokens"]) == ([[1, 0], [2, 7]], [5, 3])
    # What a step says of the same group agrees.
    staleness = ledger.trained([ledger.load(0, tuple(record["spool"]))], lineage=2, consumed_at=9)
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
    ledger.close()
    accepted, step = records(tmp_path)[-2:]
    assert accepted["versions"] == [[1, 0], [1, 7]]
    assert step["trimmed"] == {"0": accepted["version_tokens"][1:]}
    assert staleness[2] == accepted["version_tokens"][1]


def test_a_step_is_recorded_with_the_staleness_of_its_trained_tokens(tmp_path: Path) -> None:
    ledger = begin(tmp_path)
    groups = [make_group(3, PolicyVersion(1, 5)), make_group(4, PolicyVersion(1, 7), num_tokens=3)]
    # The first token of each rollout is masked: 2 * 4 tokens of v5 and 2 * 2 of v7.
    assert ledger.trained(groups, lineage=1, consumed_at=7) == {2: 8, 0: 4}
    ledger.close()
    record = records(tmp_path)[-1]
    assert (record["step"], record["consumed_at"], record["groups"]) == (8, 7, [3, 4])
    assert record["staleness"] == {"0": 4, "2": 8}


def test_a_kill_loses_nothing_that_was_appended(tmp_path: Path) -> None:
    ledger = begin(tmp_path)
    store(ledger, make_group(0))
    # Not closed, as after SIGKILL: another process sees everything.
    assert [record["kind"] for record in records(tmp_path)] == ["lineage", "accepted"]


@pytest.mark.parametrize("torn", [b'{"kind":"trai', b"{", b"\0" * 100, b'{"kind":"discarded"}'])
def test_a_torn_last_line_is_cut_off(tmp_path: Path, torn: bytes) -> None:
    ledger = begin(tmp_path)
    ledger.append("granted", group=0, attempt=0, worker="w1")
    ledger.close()
    whole = ledger.path.read_bytes()
    ledger.path.write_bytes(whole + torn)
    assert history(tmp_path).granted == {0: 1}
    ledger = open_ledger(tmp_path)
    assert ledger.path.read_bytes() == whole
    ledger.append("granted", group=1, attempt=0, worker="w1")
    ledger.close()
    assert history(tmp_path).granted == {0: 1, 1: 1}


def test_a_ledger_that_is_nothing_but_a_torn_line_is_empty(tmp_path: Path) -> None:
    (tmp_path / "ledger.jsonl").write_bytes(b'{"kind"')
    open_ledger(tmp_path).close()
    assert (tmp_path / "ledger.jsonl").read_bytes() == b""


@pytest.mark.parametrize("line", [b'{"kind":\n', b"\xff\xfe\n", b"[1]\n", b"7\n", b'{"at":1}\n'])
def test_damage_in_the_middle_is_named_by_its_line(tmp_path: Path, line: bytes) -> None:
    ledger = begin(tmp_path)
    ledger.close()
    ledger.path.write_bytes(ledger.path.read_bytes() + line + ledger.path.read_bytes())
    for read in (open_ledger, history):
        with pytest.raises(StorageError, match=r"line 2 is damaged.*--init-from"):
            read(tmp_path)


def test_a_record_without_its_fields_is_damage(tmp_path: Path) -> None:
    ledger = begin(tmp_path)
    ledger.append("trained", lineage=1)
    ledger.close()
    with pytest.raises(StorageError, match=r"the 'trained' record that ends at byte \d+"):
        history(tmp_path)


def test_a_record_of_a_later_release_is_passed_over(tmp_path: Path) -> None:
    ledger = begin(tmp_path)
    ledger.append("praised", group=0)
    ledger.close()
    assert history(tmp_path) == LedgerState(lineages=(Lineage(1, 0),))


# --- what is left to do --------------------------------------------------------------------------


def write(run_dir: Path, *lines: dict[str, Any]) -> None:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run_dir / "ledger.jsonl").write_text(text)


def lineage(number: int, fork_step: int) -> dict[str, Any]:
    return {"kind": "lineage", "lineage": number, "fork_step": fork_step}


def place(group: int) -> tuple[str, int, int, str]:
    return "000001.bin", 10 * group, 10, f"{group:064x}"


def granted(group: int, attempt: int = 0) -> dict[str, Any]:
    return {"kind": "granted", "group": group, "attempt": attempt, "worker": "w1"}


def accepted(group: int) -> dict[str, Any]:
    return {"kind": "accepted", "group": group, "spool": [*place(group)]}


def trained(number: int, step: int, *groups: int) -> dict[str, Any]:
    return {
        "kind": "trained",
        "lineage": number,
        "step": step,
        "groups": list(groups),
        "staleness": {"0": 10, "1": step},
    }


def discarded(group: int) -> dict[str, Any]:
    return {"kind": "discarded", "group": group, "reason": "stale", "step": 1}


def test_groups_are_settled_waiting_or_granted(tmp_path: Path) -> None:
    write(
        tmp_path,
        lineage(1, 0),
        *(granted(group) for group in range(6)),
        granted(3, 1),
        accepted(0),
        accepted(1),
        accepted(2),
        trained(1, 1, 0),
        discarded(2),
        discarded(5),
    )
    found = history(tmp_path, step=1)
    assert found.next_group_id == 6
    assert found.finished == {0, 1, 2, 5}
    assert found.waiting == {1: place(1)}
    assert found.granted == {3: 2, 4: 1}
    assert found.staleness_tokens == {0: 10, 1: 1}
    assert found.lineages == (Lineage(1, 0),)


def test_steps_after_the_checkpoint_are_void_and_their_groups_wait_again(tmp_path: Path) -> None:
    lines = [lineage(1, 0), *(accepted(group) for group in range(4))]
    lines += [trained(1, step + 1, step) for step in range(4)]
    write(tmp_path, *lines)
    assert sorted(history(tmp_path, step=4).waiting) == []
    found = history(tmp_path, step=2)
    assert sorted(found.waiting) == [2, 3]
    assert found.finished == {0, 1, 2, 3}
    assert found.staleness_tokens == {0: 20, 1: 3}


def test_a_discard_is_never_void(tmp_path: Path) -> None:
    write(tmp_path, lineage(1, 0), accepted(0), discarded(0), lineage(2, 0))
    assert history(tmp_path, lineage=2).waiting == {}


def test_a_group_trained_again_after_a_fork_has_one_end(tmp_path: Path) -> None:
    write(
        tmp_path,
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
    )
    assert sorted(history(tmp_path, lineage=3, step=3).waiting) == [1]
    assert sorted(history(tmp_path, lineage=2, step=2).waiting) == [1, 3]
    assert sorted(history(tmp_path, lineage=1, step=1).waiting) == [1, 2, 3]


def test_a_checkpoint_that_a_later_lineage_left_is_refused(tmp_path: Path) -> None:
    write(tmp_path, lineage(1, 0), lineage(2, 5))
    assert history(tmp_path, lineage=1, step=5)
    assert history(tmp_path, lineage=2, step=9)
    with pytest.raises(StorageError, match=r"step 8 in lineage 1 is not on the run's history"):
        history(tmp_path, lineage=1, step=8)
    with pytest.raises(StorageError, match="step 4 in lineage 2 is not"):
        history(tmp_path, lineage=2, step=4)


# --- spool ---------------------------------------------------------------------------------------


def places(run_dir: Path) -> dict[int, SpoolPlace]:
    found = [record for record in records(run_dir) if record["kind"] == "accepted"]
    return {record["group"]: tuple(record["spool"]) for record in found}


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "spool").iterdir())


def test_groups_are_read_back_bit_for_bit(tmp_path: Path) -> None:
    ledger = begin(tmp_path)
    groups = [make_group(i, PolicyVersion(1, i), num_tokens=3 + i) for i in range(4)]
    store(ledger, *groups[:2])
    ledger.close()
    ledger = open_ledger(tmp_path)
    store(ledger, *groups[2:])
    found = history(tmp_path).waiting
    assert found == places(tmp_path)
    assert {name for name, *_ in found.values()} == {"000001.bin", "000002.bin"}
    for group in groups:
        again = ledger.load(group.group_id, found[group.group_id])
        assert encode_group(again) == encode_group(group)


def test_a_spool_that_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    ledger = begin(tmp_path)
    store(ledger, make_group(0))
    [place] = places(tmp_path).values()
    path = tmp_path / "spool" / place[0]
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(StorageError, match=r"group 0 cannot be read back from .*000001.bin"):
        ledger.load(0, place)
    path.write_bytes(b"\xff" * len(data))
    with pytest.raises(StorageError, match="group 0 cannot be read back"):
        ledger.load(0, place)
    path.unlink()
    with pytest.raises(StorageError, match="group 0 cannot be read back"):
        ledger.load(0, place)


def test_a_flipped_bit_anywhere_in_a_stored_group_is_noticed(tmp_path: Path) -> None:
    ledger = begin(tmp_path)
    store(ledger, make_group(0), make_group(1))
    file_name, offset, length, digest = places(tmp_path)[1]
    path = tmp_path / "spool" / file_name
    data = path.read_bytes()
    for byte in range(offset, offset + length, length // 20):
        changed = bytearray(data)
        changed[byte] ^= 1 << byte % 8
        path.write_bytes(changed)
        with pytest.raises(StorageError, match=f"at {offset} is [0-9a-f]{{64}}, .* has {digest}"):
            ledger.load(1, (file_name, offset, length, digest))
        assert ledger.load(0, places(tmp_path)[0]).group_id == 0


def test_a_file_is_deleted_when_all_its_groups_are_final(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "GROUP_FILE_BYTES", 1)
    ledger = begin(tmp_path)
    groups = [make_group(i) for i in range(5)]
    store(ledger, *groups)
    assert names(tmp_path) == [f"00000{i}.bin" for i in range(1, 6)]
    for step in range(3):
        ledger.trained([groups[step]], lineage=1, consumed_at=step)
    ledger.discarded(3, "stale", step=3)
    # Checkpoints of the steps 2 and 3 are kept: going back to 2 would need group 2 again.
    ledger.checkpointed(lineage=1, step=3, oldest_step=2)
    assert names(tmp_path) == ["000003.bin", "000005.bin"]
    ledger.checkpointed(lineage=1, step=4, oldest_step=3)
    assert names(tmp_path) == ["000005.bin"]
    assert sorted(history(tmp_path, step=2).waiting) == [2, 4]


def test_room_in_the_spool_is_bounded_and_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "GROUP_FILE_BYTES", 1)
    size = 4 + sum(map(len, encode_group(make_group(0))))
    ledger = begin(tmp_path, spool_bytes=2 * size)
    store(ledger, make_group(0), make_group(1))
    with pytest.raises(
        StorageError, match=f"holds {2 * size} of the {2 * size} bytes.*spool_bytes"
    ):
        store(ledger, make_group(2))
    assert sorted(places(tmp_path)) == [0, 1]
    ledger.discarded(0, "stale", step=1)
    ledger.checkpointed(lineage=1, step=1, oldest_step=0)
    store(ledger, make_group(2))
    ledger.close()
    with pytest.raises(StorageError, match=r"limits\.spool_bytes"):
        store(open_ledger(tmp_path, spool_bytes=2 * size), make_group(3))


def test_after_a_restart_files_in_which_nothing_waits_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger_module, "GROUP_FILE_BYTES", 1)
    ledger = begin(tmp_path)
    store(ledger, make_group(0), make_group(1))
    ledger.close()
    ledger = open_ledger(tmp_path)
    ledger.load(1, places(tmp_path)[1])
    ledger.free_unused()
    assert names(tmp_path) == ["000002.bin"]
    store(ledger, make_group(2))
    assert names(tmp_path) == ["000002.bin", "000003.bin"]


# --- full disks ----------------------------------------------------------------------------------

FULL_DISK = """
import resource, signal, sys
from pathlib import Path
sys.path.insert(0, {root!r})
from tests.runtime.test_ledger import begin, make_group, store
from echo.core.errors import StorageError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
ledger = begin(Path({run_dir!r}))
store(ledger, make_group(0))
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
try:
    for group_id in range(1, 100):
        store(ledger, make_group(group_id))
except StorageError as error:
    print(error)
    ledger.append("lineage", lineage=2, fork_step=0) if {limit} > 4000 else None
"""


@pytest.mark.slow
def test_a_full_disk_leaves_files_without_half_records(tmp_path: Path) -> None:
    """No file may grow beyond a limit: the spool reaches it first, in the middle of a group."""
    root = str(Path(__file__).parents[2])
    program = FULL_DISK.format(root=root, run_dir=str(tmp_path), limit=5000)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "cannot write a group in" in done.stdout
    assert "free disk space, then continue the run with --resume" in done.stdout
    found = records(tmp_path)
    assert found[-1]["kind"] == "lineage"
    assert (tmp_path / "ledger.jsonl").read_bytes().endswith(b"\n")
    stored = places(tmp_path)
    assert 3 < len(stored) < 99
    end = max(offset + length for _, offset, length, _ in stored.values())
    assert (tmp_path / "spool" / "000001.bin").stat().st_size == end < 5000
    ledger = open_ledger(tmp_path)
    for group_id, place in stored.items():
        assert encode_group(ledger.load(group_id, place)) == encode_group(make_group(group_id))
    store(ledger, make_group(99))


@pytest.mark.slow
def test_a_full_ledger_is_cut_back_to_its_last_whole_line(tmp_path: Path) -> None:
    program = FULL_DISK.format(
        root=str(Path(__file__).parents[2]), run_dir=str(tmp_path), limit=700
    )
    program = program.replace("store(ledger, make_group(group_id))", 'ledger.append("x" * 40)')
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "cannot write the ledger in" in done.stdout
    data = (tmp_path / "ledger.jsonl").read_bytes()
    assert data.endswith(b"}\n")
    assert 600 < len(data) <= 700


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "spool").write_text("in the way")
    with pytest.raises(StorageError, match="cannot open the journal in"):
        open_ledger(tmp_path)
