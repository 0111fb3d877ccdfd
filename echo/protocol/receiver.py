"""The child's half of the weights plane: fetch the chosen item over the lanes, verify and write it.

`broadcast.py` has the rules, `offers.py` chooses the item. It is begun on every lane that has a
parent; each lane asks for what is missing of its own chunks. What becomes of a chunk:

    take -> WriteChunk -> here and now, or in a thread (`writing.py`) -> written: held, credited
"""

from __future__ import annotations

from collections.abc import Iterable

from echo.core.bounds import MAX_RANGES
from echo.core.errors import RemoteProtocolError, StorageError
from echo.core.timers import earliest
from echo.protocol.lanes import MAX_BAD_CHUNKS, Lane, Lanes, ParentFailed
from echo.protocol.offers import Offers
from echo.protocol.parcel import DecodeBlock, Parcel
from echo.protocol.rates import RateEstimate
from echo.protocol.room import Room
from echo.protocol.serving import Serving
from echo.protocol.store import Store
from echo.protocol.transfer import Chunked, Transfer
from echo.protocol.trust import Trust
from echo.protocol.watchdog import Watchdog
from echo.protocol.writing import WRONG_HASH, VersionArrived, WriteChunk
from echo.wire.actions import Action, Note, Send
from echo.wire.codec import Frame, encode
from echo.wire.messages import (
    FULL,
    Announce,
    Chunk,
    Credit,
    Fetch,
    Gone,
    ItemId,
    Message,
    Segment,
    Subscribe,
    Waiting,
)


class Receiver:
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
        self._node_id = node_id
        self._stall_s, self._retired_at = stall_s, 0.0
        self.watchdog = Watchdog(self.lanes, self.offers, store, stall_s=stall_s)

    # --- lanes -----------------------------------------------------------------------------------

    def set_num_lanes(self, num_lanes: int, num_stripes: int | None, *, now: float) -> list[Action]:
        """Change the number of lanes; those that remain keep their parents."""
        if num_lanes == len(self.lanes):
            return []
        for peer in self.lanes.resize(num_lanes, num_stripes):
            self._forget(peer)
        return self._forsake(now) or self._request_all(self.item, now)

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
        subscribe = self._subscribe(here, now=now)
        wanted = self._forsake(now) or self._request_all(self.item, now, asked)
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
        return [action for lane in self.lanes for action in self._subscribe(lane, now=now)]

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
        """Handle a message of a parent, but for chunks (`take`); others are ignored.

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
            actions += self.request(self.item, lane, now)
        return actions

    def adopt(self, transfer: Transfer, *, now: float) -> list[Action]:
        """Take an image, or a part of one, that lies on this machine already."""
        version = transfer.manifest.version
        self.store.images[version] = transfer
        if transfer.is_complete:
            return self.arrived((version, FULL), now)
        return self.serving.announce(now=now)

    def resume(self, parcel: Parcel, *, now: float) -> list[Action]:
        """Take what was rebuilt: to serve it if it is whole and done, else to go on fetching it.

        Newer ones must come first, and images before anchors. What is of no use is removed.
        """
        store, item = self.store, (parcel.version, parcel.form)
        newest = store.newest_complete
        is_past = newest is not None and parcel.version <= newest
        if is_past and parcel.is_complete:
            store.parcels[item] = parcel
            return self.serving.announce(now=now)
        fault = ""
        if is_past or not parcel.num_segments or parcel.version in store.images or self.item:
            fault = "it is of no use any more"
        else:
            try:
                store.resume(parcel)
            except StorageError as error:
                fault = str(error)
        if fault:
            if parcel.journal is not None:
                parcel.journal.remove()
            text = f"dropped what was left here of {parcel.version} as {parcel.form}: {fault}"
            return [Note("info", text)]
        held = [index for index in range(parcel.num_chunks) if parcel.has_chunk[index]]
        decoding = [work for index in held for work in store.decodable(parcel, index)]
        return [*self.begin(item, now), *decoding]

    # --- what to fetch ---------------------------------------------------------------------------

    def _consider(self, now: float) -> list[Action]:
        """Begin the next step towards the newest version, or go on with the present one."""
        step = self.offers.next_step(self.item)
        if step is None or step == self.item:
            idle = [lane for lane in self.lanes if not lane.is_pulling]
            return self._request_all(self.item, now, idle)
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
        return [*actions, *self.serving.announce(now=now), *self._request_all(self.item, now)]

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
            return [*self._request_all(self.item, now)]
        self.end()
        return [*self.serving.drop(item_id, now=now), *self._consider(now)]

    # --- chunks ----------------------------------------------------------------------------------

    def take(
        self, peer: str, message: Chunk, payload: list[Frame], *, now: float
    ) -> list[Action | ParentFailed]:
        """Begin to write a chunk that a parent has sent; one of somebody else is ignored.

        Raises:
            RemoteProtocolError: if it belongs nowhere.
        """
        item_id = (message.version, message.form)
        lane, item = self.heard(peer), self.store.get(item_id)
        if lane is None or item is None:
            return []
        if len(payload) != 1 or not 0 <= message.index < item.num_chunks:
            raise RemoteProtocolError(
                f"a Chunk of {message.version} with a bad index or without its bytes"
            )
        data = payload[0]
        self.bytes_received += len(data)
        if item.has_chunk[message.index] or message.index in item.writing:
            self.num_duplicate_chunks += 1
            return []
        if not lane.has_room(len(data)):
            reason = "it sends far more than it was given credit for"
            return [ParentFailed(self.disconnect(lane), reason)]
        write = self.store.arenas.write
        work = WriteChunk(item_id, item, message.index, peer, data, write)
        if len(data) != item.chunk_size(message.index):
            return self._refuse_chunk(work, now)
        item.writing.add(message.index)
        lane.came(len(data), now=now)
        self.rate.add(len(data), now=now)
        if not self.store.may_block(item_id):
            return self.written(work, work.run(), now=now)
        if item_id == self.item and not self._is_missing(lane, item):
            lane.finish()
        # Until it is written, a lane without credit brings nothing: that says nothing of its rate.
        if not lane.can_bring:
            lane.rate.pause()
        if not any(each.can_bring for each in self.lanes):
            self.rate.pause()
        return [work]

    def written(self, work: WriteChunk, fault: str, *, now: float) -> list[Action | ParentFailed]:
        """Take the result of a WriteChunk."""
        item, index, size = work.item, work.index, len(work.data)
        lane = self.lanes.of(work.peer)  # None if that parent was left meanwhile
        if lane is not None:
            lane.settle(size, now=now)
        item.writing.discard(index)
        if self.store.get(work.item_id) is not item:
            # It was dropped. What the chunk took of the window is free again.
            return [*self._give_credit(lane, size)]
        if fault == WRONG_HASH:
            return self._refuse_chunk(work, now)
        if fault:
            return [*self._leave_unwritable(work, fault, now)]
        item.mark(index)
        if lane is not None:
            self.watchdog.came(lane, now=now)
        actions: list[Action | ParentFailed] = [
            *self.serving.forward(work.item_id, index, now),
            *self._give_credit(lane, size),
        ]
        if isinstance(item, Parcel):
            return [*actions, *self.store.decodable(item, index)]
        if item.is_complete:
            return [*actions, *self.arrived(work.item_id, now)]
        return actions

    def _give_credit(self, lane: Lane | None, size: int) -> list[Action]:
        """Acknowledge what was written, of whatever item, and ask for more of the present one."""
        if lane is None:
            return []
        taken, credit = lane.took(size, chunk_bytes=size)
        item = None if self.item is None else self.store.get(self.item)
        if item is None or self.item is None:
            return []
        if not self._is_missing(lane, item):
            lane.finish()
            return []
        return self._send_credit(self.item, lane, taken, credit)

    def _refuse_chunk(self, work: WriteChunk, now: float) -> list[Action | ParentFailed]:
        """Ask again for a chunk that is wrong, or leave the parent that sends such."""
        self.num_bad_chunks += 1
        version, _ = work.item_id
        text = f"chunk {work.index} of {version} from {work.peer} does not match its hash"
        actions: list[Action | ParentFailed] = [Note("warning", f"{text}; asking again")]
        lane = self.lanes.of(work.peer)  # None if that parent was left meanwhile
        if lane is not None:
            lane.num_bad_chunks += 1
            if lane.num_bad_chunks >= MAX_BAD_CHUNKS:
                self.disconnect(lane)
                actions.append(ParentFailed(work.peer, text, is_corrupt=True))
        return [*actions, *self._ask_again(work, now)]

    def _ask_again(self, work: WriteChunk, now: float) -> list[Action]:
        """Ask for a chunk over the lane whose it is now: lanes may have changed meanwhile."""
        if self.item != work.item_id:
            return []
        lanes = self.lanes
        shares = [(lane, lanes.share(lane)) for lane in lanes]
        asked = [lane for lane, share in shares if share and work.index % share[1] == share[0]]
        return self._request_all(self.item, now, asked)

    def _leave_unwritable(self, work: WriteChunk, fault: str, now: float) -> list[Action]:
        """Leave an item that the disk refuses, as one for which there is no room."""
        version, _ = work.item_id
        error = StorageError(f"chunk {work.index} of {version} cannot be written: {fault}")
        if self.item == work.item_id:
            self.end()
        return [*self.room.lacks(error, now=now), *self.serving.drop(work.item_id, now=now)]

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
            if lane.is_pulling and (item is None or not self._is_missing(lane, item)):
                lane.finish()
        leave, again = self.watchdog.look(self.item, now=now)
        actions: list[Action | ParentFailed] = []
        for lane, reason in leave:
            actions.append(ParentFailed(self.disconnect(lane), reason))
        for lane in again:
            actions += self._subscribe(lane, now=now) if lane.is_asking else []
        actions += self._forsake(now) or self._request_all(self.item, now, again)
        if self.room.is_due(now=now):
            actions += self._consider(now)
        # Time alone lets go of little: of what those hold who have been silent for long.
        if now >= self._retired_at + self._stall_s:
            actions += self.retire(now)
        return actions

    # --- what parents are told -------------------------------------------------------------------

    def _subscribe(self, lane: Lane, *, now: float) -> list[Action]:
        """Ask a lane's parent what can be had."""
        if lane.peer is None:
            return []
        if not lane.is_asking and not lane.is_pulling:
            lane.progress_at = now
        lane.is_asking = True
        return [self._send(lane.peer, Subscribe(newest=self.store.newest_complete))]

    def _request_all(
        self, item_id: ItemId | None, now: float, lanes: Iterable[Lane] | None = None
    ) -> list[Action]:
        """Ask these lanes, or all, for an item."""
        asked = self.lanes if lanes is None else lanes
        return [action for lane in asked for action in self.request(item_id, lane, now)]

    def request(self, item_id: ItemId | None, lane: Lane, now: float) -> list[Action]:
        """Ask a lane's parent for everything that is missing, with a full window of credit."""
        item = None if item_id is None else self.store.get(item_id)
        share = self.lanes.share(lane)
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

    def _is_missing(self, lane: Lane, item: Chunked) -> bool:
        """Return whether a lane lacks something of the item, or may be given more of it."""
        share = self.lanes.share(lane)
        return share is not None and item.is_missing(*share)

    def _send_credit(
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
