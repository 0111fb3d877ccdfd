"""Commit before send: messages wait until the records that they rely on are on the disk.

A batch of actions whose records are not committed yet is held, and performed after the commit. The
commit runs in the thread of the disk, and takes all records that were appended meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence

from echo.records.ledger import LedgerQueue
from echo.runtime.threads import Pool
from echo.wire.actions import Action


class Commits:
    """Commits the records of the ledger, and holds actions until theirs are committed."""

    def __init__(
        self,
        ledger: LedgerQueue,
        disk: Pool,
        *,
        perform: Callable[[Iterable[Action]], None],
    ) -> None:
        """Start with no held actions; `disk` is the thread of the ledger."""
        self._ledger = ledger
        self._disk = disk
        self._perform = perform
        self._held: list[Sequence[Action]] = []
        self._has_records = asyncio.Event()

    def hold(self, actions: Sequence[Action]) -> None:
        """Perform these actions after the next commit; the caller must see to that commit."""
        self._held.append(actions)

    def want(self) -> None:
        """Have `run` commit soon if the ledger has uncommitted records."""
        if self._ledger.has_queued:
            self._has_records.set()

    async def run(self) -> None:
        """Commit records as they come, until cancelled."""
        while True:
            await self._has_records.wait()
            self._has_records.clear()
            await self.commit()

    async def commit(self) -> None:
        """Commit the records so far, and perform the actions that were held for them."""
        held, self._held = self._held, []
        await self._disk.run(self._ledger.commit)
        for actions in held:
            self._perform(actions)
