"""Commit before send: messages wait until the records of their batch are in the ledger.

If a batch of actions appends records to the ledger, the other actions of the batch are held until
these records are committed. A commit runs in the disk's thread. It includes all records that were
appended before the commit began.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from echo.records.ledger import LedgerQueue
from echo.runtime.threads import Pool
from echo.wire.actions import Action


class Commits:
    """Commits the ledger's records, and holds actions until the commit."""

    def __init__(
        self,
        ledger: LedgerQueue,
        disk: Pool,
        *,
        perform: Callable[[Iterable[Action]], None],
    ) -> None:
        """Start without held actions. `disk` is the thread that writes the ledger."""
        self._ledger = ledger
        self._disk = disk
        self._perform = perform
        self._held: list[Sequence[Action]] = []
        self._has_records = asyncio.Event()

    def hold(self, actions: Sequence[Action]) -> None:
        """Hold actions until the next commit.

        The caller must request the commit (`want` or `commit`).
        """
        self._held.append(actions)

    def want(self) -> None:
        """Make `run` commit if the ledger has uncommitted records."""
        if self._ledger.has_queued:
            self._has_records.set()

    async def run(self) -> None:
        """Commit records whenever `want` is called, until cancelled."""
        while True:
            await self._has_records.wait()
            self._has_records.clear()
            await self.commit()

    async def commit(self) -> None:
        """Commit all records appended so far, then perform the held actions."""
        held, self._held = self._held, []
        await self._disk.run(self._ledger.commit)
        for actions in held:
            self._perform(actions)
