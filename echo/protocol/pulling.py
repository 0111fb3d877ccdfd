"""The child's half of the weights plane: choose what to fetch, fetch it over the lanes, verify it.

`broadcast.py` has the rules, `offers.py` chooses the item. It is begun on every lane that has a
parent; each lane asks for what is missing of its own chunks.
"""

from __future__ import annotations

from echo.errors import RemoteProtocolError, StorageError
from echo.protocol.actions import Action, Note, VersionArrived
from echo.protocol.asking import Asking
from echo.protocol.codec import Frame
from echo.protocol.lanes import Lane, Lanes, ParentFailed
from echo.protocol.manifest import FULL
from echo.protocol.messages import (
    Announce,
    Gone,
    Message,
    Segment,
    Waiting,
)
from echo.protocol.offers import Offers
from echo.protocol.pacing import earliest
from echo.protocol.parcel import DecodeBlock
from echo.protocol.rates import RateEstimate
from echo.protocol.room import Room
from echo.protocol.serving import Serving
from echo.protocol.store import ItemId, Store
from echo.protocol.transfer import Transfer
from echo.protocol.trust import Trust
from echo.protocol.watchdog import Watchdog


class Pulling:
    """What one node fetches."""

    def __init__(
        self, store: Store, serving: Serving, *, node_id: str, window_bytes: int, stall_s: float
    ) -> None:
        """Start without parents; store and serving are shared with the parent's half."""
        self.store = store
        self.serving = serving
        self.lanes = Lanes(first_window_bytes=window_bytes, stall_s=stall_s)
        self.item: ItemId | None = None
        self.bytes_received = 0
        self.rate = RateEstimate()
        """Of all lanes together."""
        self.num_bad_chunks = 0
        self.num_duplicate_chunks = 0
        self.offers = Offers(store)
        self.trust = Trust()
        self.room = Room()
        self.asking = Asking(self.lanes, store, node_id=node_id)
        self._stall_s, self._retired_at = stall_s, 0.0
        self.watchdog = Watchdog(self.lanes, self.offers, store, stall_s=stall_s)

    # --- lanes -----------------------------------------------------------------------------------

    def set_num_lanes(self, num_lanes: int, num_stripes: int | None, *, now: float) -> list[Action]:
        """Change the number of lanes; those that remain keep their parents."""
        if num_lanes == len(self.lanes):
            return []
        for peer in self.lanes.resize(num_lanes, num_stripes):
            self._forget(peer)
        return self._forsake(now) or self.asking.request_all(self.item, now)

    def set_parent(
        self, peer: str | None, *, lane: int, rtt_s: float | None, now: float
    ) -> list[Action]:
        """Take a lane's weights from `peer`."""
        here = self.lanes[lane]
        was_denied = here.is_denied
        if here.peer != peer:
            self.disconnect(here)
        here.connect(peer, rtt_s=rtt_s)
        asked = self.lanes if was_denied else [here]
        subscribe = self.asking.subscribe(here, now=now)
        wanted = self._forsake(now) or self.asking.request_all(self.item, now, asked)
        return [*subscribe, *wanted]

    def leave(self) -> list[str]:
        """Leave all parents; return them."""
        return [self.disconnect(lane) for lane in self.lanes if lane.peer is not None]

    def disconnect(self, lane: Lane) -> str:
        """Leave a lane's parent."""
        peer = lane.peer or ""
        self._forget(peer)
        lane.connect(None, rtt_s=None)
        return peer

    def _forget(self, peer: str) -> None:
        """Forget what a parent has offered, and how long it took."""
        self.offers.forget(peer)
        self.watchdog.forget(peer)

    def _forsake(self, now: float) -> list[Action]:
        """Give up what nobody offers any more, if there is no proof that it exists.

        Who is asked for it next might wait for it for ever.
        """
        item = self.item
        parcel = None if item is None else self.store.parcels.get(item)
        if item is None or parcel is None or parcel.num_segments or self.offers.is_offered(item):
            return []
        self.end()
        return [*self.serving.drop(item, now=now), *self._consider(now)]

    def resubscribe(self, *, now: float) -> list[Action]:
        """Ask every parent what can be had."""
        return [action for lane in self.lanes for action in self.asking.subscribe(lane, now=now)]

    # --- messages --------------------------------------------------------------------------------

    def heard(self, peer: str) -> Lane | None:
        """Return the lane of a parent that has said something; None if it is nobody's."""
        lane = self.lanes.of(peer)
        if lane is not None:
            lane.is_asking = False
            lane.is_silent &= lane.is_pulling
        return lane

    def receive(
        self, peer: str, message: Message, payload: list[Frame], *, now: float
    ) -> list[Action | ParentFailed]:
        """Handle a message of a parent, but for chunks (`chunks.py`); others are ignored.

        Raises:
            RemoteProtocolError: if it broke a rule.
        """
        lane = self.heard(peer)
        if lane is None:
            return []
        match message:
            case Announce():
                return [*self._on_announce(lane, peer, message, payload, now)]
            case Segment():
                return [*self._on_segment(lane, message, payload, now)]
            case Waiting():
                if self.item == (message.version, message.form):
                    self.watchdog.waits(lane, again_s=message.again_s, now=now)
                    self.rate.pause()
            case Gone():
                return self._on_gone(lane, message, now)
        return []

    def _on_announce(
        self, lane: Lane, peer: str, message: Announce, payload: list[Frame], now: float
    ) -> list[Action]:
        if len(payload) > 1 or (not payload and not message.offers):
            raise RemoteProtocolError("an Announce without exactly one manifest")
        manifest = self.trust.manifest(message.version, payload[0]) if payload else None
        self.offers.hear(peer, message, manifest)
        local = self.trust.use_local_image(message.version)
        actions = [] if local is None else self.adopt(local, now=now)
        actions += self._forsake(now) or self._consider(now)
        if lane.is_waiting and self.offers.has(peer, self.item):
            # It said that it did not have the item yet; now it may.
            actions += self.asking.request(self.item, lane, now)
        return actions

    def adopt(self, transfer: Transfer, *, now: float) -> list[Action]:
        """Take an image, or a part of one, that lies on this machine already."""
        version = transfer.manifest.version
        self.store.images[version] = transfer
        if transfer.is_complete:
            return self.arrived((version, FULL), now)
        return self.serving.announce(now=now)

    # --- what to fetch ---------------------------------------------------------------------------

    def _consider(self, now: float) -> list[Action]:
        """Begin the next step towards the newest version, or go on with the present one."""
        step = self.offers.next_step(self.item)
        if step is None or step == self.item:
            idle = [lane for lane in self.lanes if not lane.is_pulling]
            return self.asking.request_all(self.item, now, idle)
        return [*self.begin(step, now), *self.retire(now)]

    def begin(self, item_id: ItemId, now: float) -> list[Action]:
        """Fetch an item from now on; what is held of it is kept."""
        version, form = item_id
        self.lanes.finish()
        self.rate.pause()
        self.item = item_id
        halves = self.store.begun_otherwise(item_id)
        actions = [action for half in halves for action in self.serving.drop(half, now=now)]
        try:
            if form == FULL and version not in self.store.images:
                self.store.begin_image(*self.trust.manifests[version])
                self.room.found()
            elif form != FULL and item_id not in self.store.parcels:
                self.store.begin_parcel(item_id, expected_bytes=self.offers.num_bytes(item_id))
        except StorageError as error:
            self.end()
            return [*actions, *self.room.lacks(error, now=now)]
        return [*actions, *self.serving.announce(now=now), *self.asking.request_all(self.item, now)]

    def end(self) -> None:
        """Fetch nothing for now."""
        self.item = None
        self.lanes.finish()

    # --- what comes ------------------------------------------------------------------------------

    def _on_segment(
        self, lane: Lane, message: Segment, payload: list[Frame], now: float
    ) -> list[Action]:
        item_id = (message.version, message.form)
        parcel = self.store.parcels.get(item_id)
        if parcel is None or item_id != self.item:
            return []
        if message.index != parcel.num_segments or not parcel.is_open:
            self.watchdog.lives(lane, now=now)
            return []
        if len(payload) != 1:
            raise RemoteProtocolError(f"a Segment of {message.version} without its table")
        table = self.trust.segment(parcel, payload[0])
        self.watchdog.lives(lane, now=now)
        self.watchdog.came(lane, now=now)
        try:
            fault = self.store.add_segment(parcel, table, bytes(payload[0]))
        except StorageError as error:
            self.end()
            dropped = self.serving.drop(item_id, now=now)
            return [*self.room.lacks(error, now=now), *dropped]
        if fault:
            return self._refuse(item_id, fault, now)
        self.room.found()
        return self.serving.extend(item_id, now)

    def decoded(self, work: DecodeBlock, fault: str, *, now: float) -> list[Action | ParentFailed]:
        """Take the result of a block; one of a parcel that was dropped meanwhile is ignored."""
        item_id = (work.version, work.form)
        if self.store.parcels.get(item_id) is not work.parcel:
            return []
        if fault:
            return [*self._refuse(item_id, f"block {work.block} is wrong: {fault}", now)]
        image = work.parcel.decoded(work)
        if image is None:
            return []
        self.store.end_decoding(image)
        return [*self.arrived(item_id, now)]

    def _refuse(self, item_id: ItemId, fault: str, now: float) -> list[Action]:
        """Never take an item again that the learner has signed, but that is of no use."""
        version, form = item_id
        self.offers.refuse(item_id)
        if self.item == item_id:
            self.end()
        return [
            Note("warning", f"{version} as {form}: {fault}; fetching it in another form"),
            *self.serving.drop(item_id, now=now),
            *self._consider(now),
        ]

    def arrived(self, item_id: ItemId, now: float) -> list[Action]:
        """Go on after a version has become whole."""
        version, _ = item_id
        if self.item is not None and self.item[0] == version:
            self.end()
            self.offers.has_preempted = False
        return [
            *self.serving.announce(now=now),
            VersionArrived(version),
            *self._consider(now),
            *self.retire(now),
        ]

    def _on_gone(self, lane: Lane, message: Gone, now: float) -> list[Action | ParentFailed]:
        """Leave an item to the other lanes, or give it up; an Announce of what there is follows."""
        item_id = (message.version, message.form)
        self.offers.withdraw(lane.peer or "", item_id)
        if self.item != item_id:
            return []
        lane.finish()
        lane.is_denied = True
        if any(other.peer is not None and not other.is_denied for other in self.lanes):
            return [*self.asking.request_all(self.item, now)]
        self.end()
        return [*self.serving.drop(item_id, now=now), *self._consider(now)]

    # --- keeping and time ------------------------------------------------------------------------

    def retire(self, now: float) -> list[Action]:
        """Drop what nobody needs any more."""
        self._retired_at = now
        self.serving.forget_silent(now)
        self.trust.retire(self.store.newest_complete)
        if self.store.is_lean:
            return []
        keep = self.serving.pinned(now)
        if self.item is not None:
            keep.add(self.item)
            base = self.item[1].base
            if base is not None:
                keep.add((base, FULL))
        dropped = self.store.expendable(keep)
        if any(form == FULL for _, form in dropped):
            self.room.released(now=now)
        return [action for item in dropped for action in self.serving.drop(item, now=now)]

    @property
    def deadline(self) -> float | None:
        """When a lane counts as silent, or room is looked for again."""
        return earliest(self.watchdog.deadline(self.item), self.room.retry_at)

    def expire(self, *, now: float) -> list[Action | ParentFailed]:
        """Leave parents that do not deliver, or ask them once more."""
        item = None if self.item is None else self.store.get(self.item)
        for lane in self.lanes:
            # The last table has come over another lane, or another parent has sent it all.
            if lane.is_pulling and (item is None or not self.asking.is_missing(lane, item)):
                lane.finish()
        leave, again = self.watchdog.look(self.item, now=now)
        actions: list[Action | ParentFailed] = []
        for lane, reason in leave:
            actions.append(ParentFailed(self.disconnect(lane), reason))
        for lane in again:
            actions += self.asking.subscribe(lane, now=now) if lane.is_asking else []
        actions += self._forsake(now) or self.asking.request_all(self.item, now, again)
        if self.room.is_due(now=now):
            actions += self._consider(now)
        # Time alone lets go of little: of what those hold who have been silent for long.
        if now >= self._retired_at + self._stall_s:
            actions += self.retire(now)
        return actions
