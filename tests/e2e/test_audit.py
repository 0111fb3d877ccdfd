"""The auditor itself: silent on an honest ledger, loud on each planted violation."""

from __future__ import annotations

import copy
import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from tests.e2e.audit import Audit, Record, audit, read_ledger

Ledger = list[Record]


def granted(group: int, attempt: int = 0, worker: str = "w1") -> Record:
    return {
        "kind": "granted", "group": group, "attempt": attempt, "worker": worker, "version": [1, 0]
    }  # fmt: skip


def accepted(group: int, *versions: list[int], attempt: int = 0, worker: str = "w1") -> Record:
    share = 10 // max(1, len(versions))
    return {
        "kind": "accepted", "group": group, "attempt": attempt, "worker": worker,
        "versions": list(versions), "version_tokens": [share] * len(versions), "tokens": 10,
        "rewards": [0.0, 1.0], "place": ["1.bin", 0, 1, "0" * 64],
    }  # fmt: skip


def trained(lineage: int, step: int, groups: list[int], staleness: dict[str, int]) -> Record:
    return {
        "kind": "trained", "lineage": lineage, "step": step, "consumed_at": step - 1,
        "groups": groups, "staleness": staleness,
    }  # fmt: skip


def published(lineage: int, step: int) -> Record:
    return {"kind": "published", "version": [lineage, step], "root": "00"}


def discarded(group: int, reason: str = "stale") -> Record:
    return {"kind": "discarded", "group": group, "reason": reason, "step": 1}


def removed(*paths: str) -> Record:
    return {
        "kind": "removed", "step": 2, "cause": "a limit", "paths": list(paths), "freed_bytes": 9
    }  # fmt: skip


def honest_ledger() -> Ledger:
    """Two steps of two groups; the second is lost in a crash and made again from other groups."""
    return [
        {"kind": "lineage", "lineage": 1, "fork_step": 0},
        published(1, 0),
        *(granted(group) for group in range(5)),
        accepted(0, [1, 0]),
        accepted(1, [1, 0]),
        trained(1, 1, [0, 1], {"0": 20}),
        published(1, 1),
        {"kind": "checkpoint", "lineage": 1, "step": 1},
        accepted(2, [1, 0]),
        accepted(3, [1, 1]),
        trained(1, 2, [2, 3], {"1": 10, "0": 10}),
        published(1, 2),
        {"kind": "lineage", "lineage": 2, "fork_step": 1},
        published(2, 1),
        granted(5),
        granted(4, attempt=1, worker="w2"),
        accepted(4, [2, 1], attempt=1, worker="w2"),
        discarded(5, "zero_variance"),
        trained(2, 2, [2, 4], {"1": 10, "0": 10}),
        discarded(3, "run_finished"),
    ]


def examine(records: Ledger, **overrides: Any) -> Audit:
    settings = {"max_staleness": 1, "groups_per_step": 2, "is_finished": True, **overrides}
    return audit(records, **settings)


def index_of(records: Ledger, kind: str, **fields: Any) -> int:
    return next(
        index
        for index, record in enumerate(records)
        if record["kind"] == kind and fields.items() <= record.items()
    )


def test_an_honest_ledger_with_a_lost_step_passes() -> None:
    result = examine(honest_ledger())

    assert result.problems == []
    assert result.num_steps == 2
    assert result.trained == {0: [1], 1: [1], 2: [2], 4: [2]}
    assert result.staleness == {0: 30, 1: 10}
    assert result.discard_reasons == {"run_finished": 1, "zero_variance": 1}
    assert result.fork_steps == {1: 0, 2: 1}


def test_what_no_resume_needs_may_be_removed() -> None:
    records = [*honest_ledger(), {"kind": "checkpoint", "lineage": 2, "step": 2}]
    records.append(removed("groups/1.bin", "groups/2.bin", "checkpoints/step_000001"))
    assert examine(records).problems == []


def test_a_group_of_two_versions_is_as_stale_as_its_tokens_are() -> None:
    records = honest_ledger()
    at = index_of(records, "accepted", group=4)
    records[at] = accepted(4, [1, 1], [2, 1], attempt=1, worker="w2")
    assert examine(records).problems == []
    at = index_of(records, "accepted", group=3)
    records[at] = accepted(3, [1, 0], [1, 1])
    found = "step 2 says staleness {1: 10, 0: 10}, it was {1: 15, 0: 5}"
    assert found in examine(records).problems


def test_a_group_may_be_trimmed_of_what_had_grown_too_old() -> None:
    records = honest_ledger()
    at = index_of(records, "accepted", group=4)
    records[at] = accepted(4, [1, 0], [2, 1], attempt=1, worker="w2")
    step = records[index_of(records, "trained", lineage=2)]
    step |= {"consumed_at": 1, "staleness": {"1": 10, "0": 5}, "trimmed": {"4": [5]}}
    # Within the bound there was no reason to.
    assert examine(records).problems == ["group 4 was trimmed of [[1, 0]] at step 2"]
    assert examine(records, max_staleness=0).problems[-1] == "group 2 was trained with staleness 1"
    step["trimmed"] = {"4": [4]}
    assert "group 4 was trimmed to [4] of [5] tokens" in examine(records).problems
    step["trimmed"] = {"4": [5, 5]}
    assert "group 4 was trimmed to [5, 5] of [5, 5] tokens" in examine(records).problems
    del step["trimmed"]
    assert examine(records).problems[0].startswith("step 2 says staleness")


def test_an_unfinished_run_may_have_groups_without_an_end() -> None:
    records = honest_ledger()[:-1]

    assert examine(records, is_finished=False).problems == []
    assert examine(records).problems == ["group 3 was accepted and has no end"]


def delete(kind: str, **fields: Any) -> Callable[[Ledger], None]:
    def apply(records: Ledger) -> None:
        del records[index_of(records, kind, **fields)]

    return apply


def change(kind: str, fields: Record, **new: Any) -> Callable[[Ledger], None]:
    return lambda records: records[index_of(records, kind, **fields)].update(new)


def append(*new: Record) -> Callable[[Ledger], None]:
    return lambda records: records.extend(copy.deepcopy(list(new)))


VIOLATIONS = {
    "a group trained twice on the surviving line": (
        change("trained", {"lineage": 2}, groups=[0, 4]),
        "group 0: trained at [1, 2], discarded 0 times",
    ),
    "a group trained twice in one step": (
        change("trained", {"lineage": 2}, groups=[4, 4], staleness={"0": 20}),
        "group 4: trained at [2, 2], discarded 0 times",
    ),
    "a group trained and discarded": (
        append(discarded(0)),
        "group 0: trained at [1], discarded 1 times",
    ),
    "a file of groups removed that a resume needs": (
        append(removed("groups/1.bin")),
        "group 2 was removed, and a resume would need it",
    ),
    "the newest checkpoint removed": (
        append(removed("checkpoints/step_000001")),
        "the newest checkpoint, of step 1, was removed",
    ),
    "a bound beyond the hard one": (
        append({"kind": "bound", "step": 2, "before": 1, "bound": 2, "cause": "room"}),
        "step 2 chose the bound 2",
    ),
    "a group accepted after it had ended": (
        lambda records: records.insert(
            index_of(records, "accepted", group=0), discarded(0, "zero_variance")
        ),
        "group 0 was accepted after its discard",
    ),
    "a group that nobody was granted has an end": (
        append(discarded(99, "zero_variance")),
        "group 99 was discarded and never granted",
    ),
    "a group discarded twice": (
        append(discarded(3)),
        "group 3: trained at [], discarded 2 times",
    ),
    "a discard forgotten in a later lineage": (
        lambda records: records.insert(index_of(records, "lineage", lineage=2), discarded(2)),
        "group 2 was trained at step 2 after its discard",
    ),
    "a group lost": (delete("discarded", group=3), "group 3 was accepted and has no end"),
    "a group accepted twice": (append(accepted(3, [1, 1])), "group 3 was accepted twice"),
    "a group trained that was never accepted": (
        delete("accepted", group=4),
        "group 4 was trained at step 2 before acceptance",
    ),
    "a group from a worker that never had it": (
        change("accepted", {"group": 4}, worker="w3"),
        "group 4 was accepted from w3 (attempt 1), to whom it was not granted",
    ),
    "a gap in the group ids": (
        change("granted", {"group": 5}, group=6),
        "groups [5] were never granted, later ones were",
    ),
    "a step missing": (delete("trained", step=1), "the surviving steps are [2]"),
    "a step made twice": (
        append(trained(2, 2, [2, 4], {"1": 10, "0": 10})),
        "the surviving steps are [1, 2, 2]",
    ),
    "a step that goes on in the old lineage": (
        change("trained", {"lineage": 2}, lineage=1),
        "step 2 of lineage 1 in lineage 2",
    ),
    "a step of too few groups": (
        change("trained", {"step": 1}, groups=[0], staleness={"0": 10}),
        "step 1 is made of 1 groups",
    ),
    "a wrong instant of consumption": (
        change("trained", {"step": 1}, consumed_at=1),
        "step 1 was consumed at 1",
    ),
    "a histogram that flatters": (
        change("trained", {"lineage": 2}, staleness={"0": 20}),
        "step 2 says staleness {0: 20}, it was {1: 10, 0: 10}",
    ),
    "a sample of an abandoned version": (
        change("accepted", {"group": 4}, versions=[[1, 2]]),
        "group 4 was trained with the abandoned [1, 2]",
    ),
    "a sample of a version that nobody published": (
        change("accepted", {"group": 4}, versions=[[2, 0]]),
        "group 4 has samples of [2, 0], which nobody published",
    ),
    "a sample from the future": (
        change("accepted", {"group": 0}, versions=[[1, 3]]),
        "group 0 was trained with staleness -3",
    ),
    "a trained group without a trainable token": (
        change("accepted", {"group": 0}, versions=[]),
        "group 0 was sampled by [], [10] tokens each",
    ),
    "more tokens than the group has": (
        change("accepted", {"group": 0}, version_tokens=[11]),
        "group 0 has 10 tokens, trained are [11]",
    ),
    "a version without a token": (
        change("accepted", {"group": 0}, versions=[[1, 0], [1, 0]], version_tokens=[10, 0]),
        "group 0 was sampled by [[1, 0], [1, 0]], [10, 0] tokens each",
    ),
    "a version published twice": (append(published(2, 1)), "version (2, 1) was published twice"),
    "a version of an old lineage": (
        append(published(1, 3)),
        "version (1, 3) was published in lineage 2",
    ),
    "a lineage skipped": (
        change("lineage", {"lineage": 2}, lineage=3),
        "lineage 3 follows lineage 1",
    ),
    "a lineage that forks off in the future": (
        change("lineage", {"lineage": 2}, fork_step=5),
        "lineage 2 forks at 5, but only 2 steps exist",
    ),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_a_planted_violation_is_found(name: str) -> None:
    plant, problem = VIOLATIONS[name]
    records = honest_ledger()
    plant(records)

    assert problem in examine(records).problems


def test_a_token_beyond_the_bound_is_found_in_every_step_abandoned_ones_too() -> None:
    problems = examine(honest_ledger(), max_staleness=0).problems

    assert problems == ["group 2 was trained with staleness 1"] * 2


def test_the_tables_are_read_by_their_description_alone(tmp_path: Path) -> None:
    assert read_ledger(tmp_path) == []
    path = tmp_path / "ledger.sqlite"
    bodies = [json.dumps(record) for record in honest_ledger()]
    rows = [
        (seq, body, blake3(seq.to_bytes(8, "little") + body.encode()).digest())
        for seq, body in enumerate(bodies, 1)
    ]
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("CREATE TABLE records (seq INTEGER PRIMARY KEY, body TEXT, hash BLOB)")
        database.executemany("INSERT INTO records VALUES (?, ?, ?)", rows)
    assert read_ledger(tmp_path) == honest_ledger()
    assert read_ledger(tmp_path, after=3) == honest_ledger()[3:]
    for damage, problem in [
        ("UPDATE records SET body = replace(body, 'w1', 'w2') WHERE seq = 4", "w2"),
        ("DELETE FROM records WHERE seq = 2", "record 2 is missing"),
    ]:
        with closing(sqlite3.connect(path)) as database, database:
            database.execute(damage)
        with pytest.raises(AssertionError, match=problem):
            read_ledger(tmp_path)
