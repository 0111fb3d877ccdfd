"""What a child says to its parents: what it wants to hear of, what is missing, and more credit."""

from __future__ import annotations

from collections.abc import Iterable

from echo.protocol.actions import Action, Send
from echo.protocol.bounds import MAX_RANGES
from echo.protocol.codec import encode
from echo.protocol.lanes import Lane, Lanes
from echo.protocol.messages import Credit, Fetch, Message, Subscribe
from echo.protocol.parcel import Parcel
from echo.protocol.store import ItemId, Store
from echo.protocol.transfer import Chunked


class Asking:
    """The requests of one node."""

    def __init__(self, lanes: Lanes, store: Store, *, node_id: str) -> None:
        """Ask over these lanes for what is missing in this store."""
        self._lanes = lanes
        self._store = store
        self._node_id = node_id

    def subscribe(self, lane: Lane, *, now: float) -> list[Action]:
        """Ask a lane's parent what can be had."""
        if lane.peer is None:
            return []
        if not lane.is_asking and not lane.is_pulling:
            lane.progress_at = now
        lane.is_asking = True
        return [self._send(lane.peer, Subscribe(newest=self._store.newest_complete))]

    def request_all(
        self, item_id: ItemId | None, now: float, lanes: Iterable[Lane] | None = None
    ) -> list[Action]:
        """Ask these lanes, or all, for an item."""
        asked = self._lanes if lanes is None else lanes
        return [action for lane in asked for action in self.request(item_id, lane, now)]

    def request(self, item_id: ItemId | None, lane: Lane, now: float) -> list[Action]:
        """Ask a lane's parent for everything that is missing, with a full window of credit."""
        item = None if item_id is None else self._store.get(item_id)
        share = self._lanes.share(lane)
        if lane.peer is None or item_id is None or item is None or share is None:
            return []
        version, form = item_id
        ranges = item.missing(*share)
        if not ranges:
            lane.finish()
            return []
        fetch = Fetch(
            version=version,
            form=form,
            ranges=ranges[:MAX_RANGES],
            credit_bytes=lane.begin(now=now),
            lane=share[0],
            num_lanes=share[1],
            num_segments=item.num_segments if isinstance(item, Parcel) else 0,
        )
        return [self._send(lane.peer, fetch)]

    def is_missing(self, lane: Lane, item: Chunked) -> bool:
        """Return whether a lane lacks something of the item, or may be given more of it."""
        share = self._lanes.share(lane)
        return share is not None and item.is_missing(*share)

    def give_credit(
        self, item_id: ItemId, lane: Lane, taken_bytes: int, credit_bytes: int
    ) -> list[Action]:
        """Acknowledge what has come from a lane's parent, and let it send more."""
        if not taken_bytes or lane.peer is None:
            return []
        version, form = item_id
        given = Credit(
            version=version, form=form, credit_bytes=credit_bytes, taken_bytes=taken_bytes
        )
        return [self._send(lane.peer, given)]

    def _send(self, peer: str, message: Message) -> Send:
        return Send(peer, encode(message, [], source=self._node_id))
