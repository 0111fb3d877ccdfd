"""Work that one thread asks of another, to be done where that one can be interrupted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager

Job = Callable[[], None]


class Mailbox:
    """Jobs for whoever holds it open; where nobody does, they are done at once."""

    def __init__(self) -> None:
        """Start closed."""
        self._owner = threading.Lock()
        self._lock = threading.Lock()
        self._is_open = False
        self._jobs: list[tuple[Job, Future[None]]] = []

    def do(self, job: Job) -> None:
        """Return when `job` has been done, by the thread that holds the mailbox open or this one.

        What the job raises is raised here.
        """
        with self._lock:
            if not self._is_open:
                job()
                return
            done: Future[None] = Future()
            self._jobs.append((job, done))
        done.result()

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Promise to call `empty` again and again; one thread at a time, the others wait."""
        with self._owner:
            with self._lock:
                self._is_open = True
            try:
                yield
            finally:
                with self._lock:
                    self._is_open = False
                    self._do_all()

    def empty(self) -> bool:
        """Do what has come in; return whether there was anything."""
        if not self._jobs:
            return False
        with self._lock:
            self._do_all()
        return True

    def _do_all(self) -> None:
        for job, done in self._jobs:
            try:
                job()
            except BaseException as error:  # noqa: BLE001 -- belongs to the thread that asked
                done.set_exception(error)
            else:
                done.set_result(None)
        self._jobs.clear()
