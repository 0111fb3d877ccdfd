from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from echo.engine.hf.engine import Mailbox


def test_a_job_is_done_at_once_where_nobody_holds_the_mailbox() -> None:
    done = []
    Mailbox().do(lambda: done.append(threading.get_ident()))
    assert done == [threading.get_ident()]


def test_the_holder_does_the_jobs_of_others_and_they_wait_for_it() -> None:
    mailbox = Mailbox()
    done: list[int] = []
    with ThreadPoolExecutor(1) as pool:
        with mailbox.opened():
            assert not mailbox.empty()
            asked = pool.submit(mailbox.do, lambda: done.append(threading.get_ident()))
            while not mailbox.empty():
                assert not asked.done()
        asked.result(timeout=120)
    assert done == [threading.get_ident()]


def test_what_a_job_raises_reaches_who_asked_and_not_the_holder() -> None:
    mailbox = Mailbox()

    def fail() -> None:
        raise ValueError("no")

    with ThreadPoolExecutor(1) as pool:
        with mailbox.opened():
            asked = pool.submit(mailbox.do, fail)
            while not mailbox.empty():
                pass
        with pytest.raises(ValueError, match="no"):
            asked.result(timeout=120)


def test_a_job_that_comes_too_late_is_done_when_the_mailbox_closes() -> None:
    mailbox = Mailbox()
    done: list[int] = []
    with ThreadPoolExecutor(1) as pool:
        with mailbox.opened():
            asked = pool.submit(mailbox.do, lambda: done.append(1))
        asked.result(timeout=120)
    assert done == [1]
