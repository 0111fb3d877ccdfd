"""What a learner takes up again that another one has left."""

from __future__ import annotations

from echo.core.rollout import Lineage
from echo.leases.book import LeaseBook
from echo.runtime.learner.resume import LOST_WORKER, StartingPoint


def test_a_lease_that_was_out_is_granted_again_if_nobody_claims_it() -> None:
    start = StartingPoint(lineages=(Lineage(1, 0), Lineage(2, 3)), open_attempts={5: 1, 7: 2})
    book = LeaseBook(timeout_s=60.0)
    start.enter_leases(book, now=10.0)
    assert [(r.group_id, r.attempt) for r in book.worker_leases(LOST_WORKER)] == [(5, 0), (7, 1)]
    assert book.next_returned() is None
    book.expire(now=70.0)
    assert [book.next_returned(), book.next_returned()] == [5, 7]
    assert book.grant(7, "w1", now=70.0).attempt == 2
