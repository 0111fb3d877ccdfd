"""Requests to the parent: announcements, missing chunks, and the credit to send them."""

from __future__ import annotations

from echo.core.bounds import MAX_RANGES
from echo.weights.link import ParentLink
from echo.weights.store.encoded import EncodedVersion
from echo.weights.store.items import Chunked
from echo.weights.store.store import ItemStore
from echo.wire.actions import Action, Send
from echo.wire.codec import encode
from echo.wire.messages import Credit, Fetch, ItemId, Message, Subscribe


class Requests:
    """Makes the messages that a node sends to its parent. The link determines the credit."""

    def __init__(self, link: ParentLink, store: ItemStore, *, node_id: str) -> None:
        """Store the link and the item store, both shared with the `Receiver`."""
        self._link, self._store, self._node_id = link, store, node_id

    def subscribe(self, *, now: float) -> list[Action]:
        """Ask the parent for an Announce.

        Call this for a new parent, and if an Announce may have been lost.
        """
        if self._link.peer is None:
            return []
        self._link.subscribe(now=now)
        return self._send(Subscribe(newest=self._store.newest_signed))

    def fetch(self, item_id: ItemId | None, *, now: float) -> list[Action]:
        """Request all missing chunks of an item, with a full window of credit.

        Args:
            item_id: the item that is being fetched; None for no item.
            now: the present time.
        """
        item = None if item_id is None else self._store.get(item_id)
        if self._link.peer is None or item is None or item_id is None:
            return []
        ranges = item.missing()
        if not ranges:
            self._link.complete()
            return []
        return self._send(_fetch(item_id, item, ranges, self._link.fetch(now=now)))

    def credit(self, item_id: ItemId | None, num_bytes: int) -> list[Action]:
        """Acknowledge written bytes, and give credit for the item `item_id`.

        Args:
            item_id: the item that is being fetched; None for no item.
            num_bytes: number of bytes, of any item, that were written since the last
                acknowledgement.
        """
        taken, credit = self._link.took(num_bytes, chunk_bytes=num_bytes)
        item = None if item_id is None else self._store.get(item_id)
        if item is None or item_id is None:
            return []
        if not item.is_missing:
            self._link.complete()
            return []
        if not taken:
            return []
        version, form = item_id
        given = Credit(version=version, form=form, credit_bytes=credit, taken_bytes=taken)
        return self._send(given)

    def _send(self, message: Message) -> list[Action]:
        peer = self._link.peer
        return [] if peer is None else [Send(peer, encode(message, [], source=self._node_id))]


def _fetch(
    item_id: ItemId, item: Chunked, ranges: tuple[tuple[int, int], ...], credit_bytes: int
) -> Fetch:
    version, form = item_id
    return Fetch(
        version=version,
        form=form,
        ranges=ranges[:MAX_RANGES],
        credit_bytes=credit_bytes,
        num_segments=item.num_segments if isinstance(item, EncodedVersion) else 0,
    )
