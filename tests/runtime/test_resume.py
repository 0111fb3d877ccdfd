"""A learner takes up what another one has left."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from echo.core.rollout import Lineage
from echo.leases.book import LOST_WORKER, LeaseBook
from echo.runtime.learner.saving.resume import (
    UPLINKS_FILE,
    StartingPoint,
    read_uplinks,
    save_uplinks,
)

LOG = logging.getLogger("resume")


def test_a_lease_that_was_out_is_granted_again_if_nobody_claims_it() -> None:
    start = StartingPoint(
        lineages=(Lineage(1, 0), Lineage(2, 3)),
        open_attempts={5: {0: "w1"}, 7: {0: "w1", 1: "w2"}},
    )
    book = LeaseBook(timeout_s=60.0)
    start.enter_leases(book, now=10.0)
    assert [(r.group_id, r.attempt) for r in book.worker_leases(LOST_WORKER)] == [(5, 0), (7, 1)]
    assert [book.group(7).was_granted(attempt, "w1") for attempt in (0, 1)] == [True, False]
    assert book.waiting == []
    book.expire(now=70.0)
    assert book.waiting == [5, 7]
    assert book.grant(7, "w1", now=70.0).attempt == 2


def test_uplinks_are_read_as_they_were_saved(tmp_path: Path) -> None:
    assert read_uplinks(tmp_path, log=LOG) == {}
    save_uplinks(tmp_path, {"learner": 1e6, "w1": 2.5e7}, log=LOG)
    assert read_uplinks(tmp_path, log=LOG) == {"learner": 1e6, "w1": 2.5e7}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"w1": -1}', '{"w1": "fast"}', '{"w1": 1e99}'])
def test_uplinks_that_cannot_be_read_are_named_and_left_out(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / UPLINKS_FILE).write_text(text)
    assert read_uplinks(tmp_path, log=LOG) == {}
    assert "uplinks.json is left out, uplinks are measured again: " in caplog.text


def test_where_uplinks_cannot_be_saved_the_run_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_uplinks(tmp_path / "missing", {"w1": 1e6}, log=LOG)
    assert "uplinks.json cannot be written" in caplog.text
