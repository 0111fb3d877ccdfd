"""Receiver: fetch the chosen item from the parent, verify, write, retry.

`broadcast.py` has the rules of the plane. The child's half of it is one `Receiver`, with `Offers`
that choose the item, a `ParentLink` over which it comes, and a `Watchdog` over the parent. It asks
the parent for what is missing. What becomes of a chunk:

    Chunk -> take -> WriteChunk -> [a thread, or here and now] -> written: held, served, credited

Chunks that have come in one message are verified one by one, and then held, passed on and credited
together: what Python does for each costs as much as half of its hash.

**Choice.** The way to the newest version with the fewest bytes is taken step by step; what is held
already of an item need not be fetched again and counts for nothing.

**Writing.** Where a version store may make its writer wait (a mapped file, whose pages the kernel
holds back when the disk is behind), the work goes to a thread and the loop goes on. In memory it is
done at once, since a thread costs more than the copy; so are chunks of encoded versions, which lie
in memory everywhere.

* *Backpressure.* Credit is given for what has been written: what waits in memory is bounded by the
  window of the link, so a slow disk throttles the parent. A parent that far exceeds its credit is
  left.
* *Order.* Writes end in any order; nothing depends on it. A chunk that is being written is not
  missing (it is not asked for again; a second copy is thrown away), and not held (it
  is not served).
* *Evicted meanwhile.* Bytes are verified before they are written, so what is written late is right.
  The work keeps the image's space lent, so that it is not recycled for another version. The result
  of a write into an item that was dropped is ignored, but for the credit that it frees.
* *Silence.* While a chunk is being written the parent is not to blame, and where no credit is left
  meanwhile, the time does not count for the rate of the link.
* *A disk that refuses* is as good as full.

**Out of order.** Chunks may come over another connection than all else (`net/zmq.py`), and so
before the table that says what they must hash to. They wait for it, EARLY_BYTES of them at most.

**Audit.** What is made of deltas is right because the learner has signed each and the words that it
replaces; what lies beside them nobody has looked at since. So when the seal of a version has come,
its chunks are hashed, some at a time and at most AUDIT_SHARE of the time. Memory that turns out to
be damaged is given up with every version in it, and the newest is fetched whole.

**Timeout.** A parent that is silent for too long (`link.py` says how long) is left for the spare;
without one it is asked once more, and left at the second silence. A parent that waits itself says
so again and again, and is not silent: the fault may lie far above it. Offers are not signed, so a
parent may announce an item that it will never receive. It is left after WAIT_STALLS silences in
which nothing has come, or four times the longest pause after which something did come from it:
behind a slow link the pauses are long.

**Out of space.** The versions that are here are kept, and it is tried again. Space may become free
here, as soon as an image is dropped, or by others' doing (a disk that was full), of which nobody
tells: so it is also retried with a backoff. The operator reads of it once, however often it is
tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echo.core.bounds import MAX_RANGES
from echo.core.errors import RemoteProtocolError, StorageError
from echo.core.rollout import PolicyVersion
from echo.core.timers import earliest
from echo.weights import eviction
from echo.weights.artifacts import AuditChunks, Chunked, Transfer
from echo.weights.audit import Audit
from echo.weights.changes import ChunksHeld, EvictionDue, ItemDropped, ItemsChanged, SegmentKnown
from echo.weights.encoded import DecodeBlock, EncodedVersion, OpenBlock
from echo.weights.in_place import ApplyPatch
from echo.weights.link import MAX_BAD_CHUNKS, LinkState, ParentFailed, ParentLink, RateEstimate
from echo.weights.offers import Offers
from echo.weights.store import ItemStore
from echo.weights.trust import TrustedManifests
from echo.weights.watchdog import Watchdog
from echo.weights.writing import WRONG_HASH, EarlyChunks, WriteChunk
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


@dataclass(frozen=True, slots=True)
class VersionArrived(Action):
    """A version is complete in the store, or ready to be written; a worker may install it."""

    version: PolicyVersion
    num_bytes: int
    """Of its image."""


@dataclass(frozen=True, slots=True)
class VersionAudited(Action):
    """Every byte of a version has been found to be what the learner signed."""

    version: PolicyVersion
    image_hash: bytes


@dataclass(frozen=True, slots=True)
class VersionDamaged(Action):
    """The bytes of a version are not what the learner signed: nothing may be made of it."""

    version: PolicyVersion


FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0
"""Between two tries to find space; it doubles each time."""
RELEASE_PAUSE_S = 0.2
"""After an image was dropped: what is still being sent of it is not free at once."""


class SpaceRetry:
    """Decides when to look again for the space that an item lacks."""

    def __init__(self) -> None:
        """Start with nothing that lacks space."""
        self.retry_at: float | None = None
        """When to look again; None while nothing lacks space."""
        self._pause_s, self._has_noted = FIRST_PAUSE_S, False

    @property
    def is_lacking(self) -> bool:
        """Whether an item lacks space, and is to be tried again."""
        return self.retry_at is not None

    def lack(self, error: StorageError, *, now: float) -> list[Action]:
        """Look again after a pause, which doubles each time; report the first failure."""
        self.retry_at = now + self._pause_s
        self._pause_s = min(MAX_PAUSE_S, 2 * self._pause_s)
        if self._has_noted:
            return []
        self._has_noted = True
        text = f"keeping the versions that are here, and trying again later: {error}"
        return [Note("warning", text)]

    def released(self, *, now: float) -> None:
        """Look again soon, if anything lacks space: an image was dropped."""
        if self.retry_at is not None:
            self.retry_at = min(self.retry_at, now + RELEASE_PAUSE_S)

    def is_due(self, *, now: float) -> bool:
        """Return whether it is time to look; if so, the next `lack` sets another time."""
        if self.retry_at is None or now < self.retry_at:
            return False
        self.retry_at = None
        return True

    def found(self) -> None:
        """Start over: the next lack of space is reported again, and has the shortest pause."""
        self.retry_at, self._pause_s, self._has_noted = None, FIRST_PAUSE_S, False


class Receiver:
    """The child's half of the weights plane: what one node fetches."""

    def __init__(
        self, store: ItemStore, *, node_id: str, window_bytes: int, stall_s: float
    ) -> None:
        """Start without a parent; the store is shared with the parent's half."""
        self.store = store
        self.link = ParentLink(first_window_bytes=window_bytes, stall_s=stall_s)
        self.item: ItemId | None = None
        self.bytes_received = 0
        self.rate = RateEstimate()
        """Of all parents, one after the other."""
        self.num_bad_chunks = 0
        self.num_duplicate_chunks = 0
        self.offers = Offers(store)
        self.trust = TrustedManifests()
        self._early = EarlyChunks()
        """Of the item that is being fetched."""
        self._node_id = node_id
        self.space = SpaceRetry()
        self.watchdog = Watchdog(self.link, self.offers, store)
        self.audit = Audit(store)

    @property
    def _present(self) -> Chunked | None:
        """What is here of the item that is being fetched."""
        return None if self.item is None else self.store.get(self.item)

    # --- the parent ------------------------------------------------------------------------------

    def set_parent(
        self, peer: str | None, *, rtt_s: float | None = None, now: float
    ) -> list[Action]:
        """Take weights from `peer` from now on; what is held is kept."""
        if self.link.peer != peer:
            self.disconnect()
        self.link.connect(peer, rtt_s=rtt_s)
        subscribe = self.resubscribe(now=now)
        return [*subscribe, *(self._forsake(now) or self._request(now))]

    def disconnect(self) -> str:
        """Leave the parent; return which it was."""
        peer = self.link.peer or ""
        self.offers.clear()
        self.watchdog.clear()
        self.link.connect(None, rtt_s=None)
        return peer

    def _forsake(self, now: float) -> list[Action]:
        """Give up an item that the parent does not offer, if there is no proof that it exists.

        Otherwise the next parent might never be able to serve it.
        """
        item = self.item
        encoded = None if item is None else self.store.encoded_versions.get(item)
        if item is None or encoded is None or encoded.num_segments or item in self.offers:
            return []
        self.end()
        return [*self._drop(item), *self._consider(now)]

    def resubscribe(self, *, now: float) -> list[Action]:
        """Ask the parent what can be had: at first, and in case an Announce was lost."""
        if self.link.peer is None:
            return []
        self.link.subscribe(now=now)
        return [self._send(self.link.peer, Subscribe(newest=self.store.newest_signed))]

    # --- messages --------------------------------------------------------------------------------

    def heard(self, peer: str) -> bool:
        """Note that a peer has sent something; return whether it is the parent."""
        if peer != self.link.peer:
            return False
        self.link.heard()
        return True

    def receive(
        self, peer: str, message: Message, payload: list[Frame], *, now: float
    ) -> list[Action | ParentFailed]:
        """Handle a message of the parent, but for chunks (`take`); those of others are ignored.

        Raises:
            RemoteProtocolError: if it broke a rule.
        """
        if not self.heard(peer):
            return []
        match message:
            case Announce():
                return [*self._on_announce(message, payload, now)]
            case Segment():
                return self._on_segment(message, payload, now)
            case Waiting():
                if self.item == (message.version, message.form):
                    self.watchdog.waits(again_s=message.again_s, now=now)
                    self.rate.pause()
            case Gone():
                return self._on_gone(message, now)
        return []

    def _on_announce(self, message: Announce, payload: list[Frame], now: float) -> list[Action]:
        if len(payload) > 1 or (not payload and not message.offers):
            raise RemoteProtocolError("an Announce without exactly one manifest")
        manifest = self.trust.manifest(message.version, payload[0]) if payload else None
        self.offers.replace(message, manifest)
        local = self.trust.use_local_image(message.version)
        actions = [] if local is None else self.adopt(local, now=now)
        actions += self._seal(message.version, now)
        actions += self._forsake(now) or self._consider(now)
        if self.link.state is LinkState.WAITING and self.item in self.offers:
            # It said that it did not have the item yet; now it may.
            actions += self._request(now)
        return actions

    def _seal(self, version: PolicyVersion, now: float) -> list[Action]:
        """Take the learner's manifest of an image that is here already, made of deltas."""
        image = self.store.images.get(version)
        if image is None or image.signed is not None or version not in self.trust.manifests:
            return []
        if self.offers.is_refused((version, FULL)):
            return []
        fault = self.store.seal(version, *self.trust.manifests[version])
        if fault:  # who has passed it on is not to blame: the learner has signed it
            self.offers.refuse((version, FULL))
            return [Note("warning", f"{fault}; it is not taken")]
        self.audit.begin(image, now=now)
        return [ItemsChanged()]

    def audited(self, work: AuditChunks, fault: str, *, now: float) -> list[Action]:
        """Take the result of an AuditChunks."""
        if not self.audit.worked(work, fault, now=now):
            return []
        version = work.image.manifest.version
        if not fault:
            return [VersionAudited(version, work.image.manifest.image_hash)]
        gone = eviction.damaged(self.store)
        if self.item in gone:
            self.end()
        text = (
            f"{fault} of {version} in memory is not what the learner signed: fetching the newest "
            "version whole; if this comes again, check this machine's memory and disk"
        )
        return [
            Note("warning", text),
            VersionDamaged(version),
            *self._drop(*gone),
            *self._consider(now),
        ]

    def adopt(self, transfer: Transfer, *, now: float) -> list[Action]:
        """Take an image, or a part of one, that lies on this machine already."""
        version = transfer.manifest.version
        self.store.add(transfer)
        if transfer.is_complete:
            return self.arrived((version, FULL), now)
        return [ItemsChanged()]

    # --- what to fetch ---------------------------------------------------------------------------

    def _consider(self, now: float) -> list[Action]:
        """Begin the next step towards the newest version, or go on with the present one."""
        step = self.offers.next_step(self.item)
        if step is None or step == self.item:
            return [] if self.link.awaits_chunks else self._request(now)
        return [*self.begin(step, now), EvictionDue()]

    def begin(self, item_id: ItemId, now: float) -> list[Action]:
        """Fetch an item from now on; what is held of it is kept."""
        version, form = item_id
        self.end()
        self.rate.pause()
        self.item = item_id
        halves = eviction.begun_otherwise(self.store, item_id)
        actions = self._drop(*halves)
        try:
            if form == FULL and version not in self.store.images:
                self.store.begin_image(*self.trust.manifests[version])
                self.space.found()
            elif form != FULL and item_id not in self.store.encoded_versions:
                self.store.begin_encoded(item_id, expected_bytes=self.offers.num_bytes(item_id))
        except StorageError as error:
            self.end()
            return [*actions, *self.space.lack(error, now=now)]
        return [*actions, ItemsChanged(), *self._request(now)]

    def end(self) -> None:
        """Fetch nothing for now."""
        self.item = None
        self._early.clear()
        self.link.complete()

    # --- what comes ------------------------------------------------------------------------------

    def _on_segment(
        self, message: Segment, payload: list[Frame], now: float
    ) -> list[Action | ParentFailed]:
        item_id = (message.version, message.form)
        encoded = self.store.encoded_versions.get(item_id)
        if encoded is None or item_id != self.item:
            return []
        if message.index != encoded.num_segments or not encoded.is_open:
            self.watchdog.lives(now=now)
            return []
        if len(payload) != 1:
            raise RemoteProtocolError(f"a Segment of {message.version} without its table")
        table = self.trust.segment(encoded, payload[0])
        self.watchdog.lives(now=now)
        self.watchdog.came(now=now)
        try:
            fault = self.store.add_segment(encoded, table, bytes(payload[0]))
        except StorageError as error:
            self.end()
            dropped = self._drop(item_id)
            return [*self.space.lack(error, now=now), *dropped]
        if fault:
            return [*self._refuse(item_id, fault, now)]
        self.space.found()
        actions: list[Action | ParentFailed] = [SegmentKnown(item_id)]
        for peer, chunk, data in self._early.take(encoded.num_chunks):
            actions += self.take(peer, chunk, data, now=now)
        return actions

    def decoded(
        self, work: DecodeBlock | OpenBlock, fault: str, *, now: float
    ) -> list[Action | ParentFailed]:
        """Take the result of a block; that of a version that was dropped meanwhile is ignored."""
        encoded = work.encoded
        item_id = (encoded.version, encoded.form)
        if self.store.encoded_versions.get(item_id) is not encoded:
            return []
        if fault:
            base = self.store.images.get(encoded.form.base) if encoded.form.base else None
            if base is not None and base.signed is not None and base.is_complete:
                self.audit.begin(base, now=now)  # it may be that which is wrong
            return [*self._refuse(item_id, f"block {work.block} is wrong: {fault}", now)]
        if not encoded.decoded(work):
            return []
        if encoded.is_ready:
            if self.store.in_place.mode == "now":
                return [self.store.in_place.begin(encoded)]
            return [*self.arrived(item_id, now)]
        self.store.end_decoding(encoded)
        return [*self._go_on(encoded.version, now), *self.arrived(item_id, now)]

    # --- in place --------------------------------------------------------------------------------

    def applied(self, work: ApplyPatch, fault: str, *, now: float) -> list[Action | ParentFailed]:
        """Take the result of an ApplyPatch; that of memory given up meanwhile is ignored."""
        encoded = self.store.in_place.find(work.patch)
        if encoded is None:
            return []
        item_id = (encoded.version, encoded.form)
        if fault:
            self.store.in_place.take_back(encoded)
            return [*self._refuse(item_id, f"it cannot be written in place: {fault}", now)]
        self.store.end_patch(encoded)
        return [*self._go_on(encoded.version, now), *self.arrived(item_id, now)]

    def _go_on(self, version: PolicyVersion, now: float) -> list[Action]:
        """Take the seal of a version that has become whole, and open the deltas on top of it."""
        return [*self._seal(version, now), *self.store.decodable_on(version)]

    def _refuse(self, item_id: ItemId, fault: str, now: float) -> list[Action]:
        """Never take an item again that the learner has signed, but that is of no use."""
        version, form = item_id
        self.offers.refuse(item_id)
        gone = [item_id, *eviction.partial_on(self.store, {version})]
        if self.item in gone:
            self.end()
        return [
            Note("warning", f"{version} as {form}: {fault}; fetching it in another form"),
            *self._drop(*gone),
            *self._consider(now),
        ]

    def arrived(self, item_id: ItemId, now: float) -> list[Action]:
        """Go on after a version has become whole."""
        version, _ = item_id
        if self.item is not None and self.item[0] == version:
            self.end()
            self.offers.has_preempted = False
        item = self.store.get(item_id)
        assert item is not None
        num_bytes = item.image_bytes if isinstance(item, EncodedVersion) else item.num_bytes
        return [
            ItemsChanged(),
            VersionArrived(version, num_bytes),
            *self._consider(now),
            EvictionDue(),
        ]

    def _on_gone(self, message: Gone, now: float) -> list[Action | ParentFailed]:
        """Give an item up that the parent has no more; an Announce of what there is follows."""
        item_id = (message.version, message.form)
        self.offers.withdraw(item_id)
        if self.item != item_id:
            return []
        self.end()
        return [*self._drop(item_id), *self._consider(now)]

    # --- chunks ----------------------------------------------------------------------------------

    def take(
        self, peer: str, message: Chunk, payload: list[Frame], *, now: float
    ) -> list[Action | ParentFailed]:
        """Begin to write chunks that the parent has sent; those of another peer are ignored.

        Raises:
            RemoteProtocolError: if one belongs nowhere.
        """
        item_id = (message.version, message.form)
        is_parent, link, item = self.heard(peer), self.link, self.store.get(item_id)
        if not is_parent or item is None:
            return []
        indices = (message.index, *message.others)
        # The next tables of an encoded version that is being fetched may name further chunks.
        is_growing = item.is_open and item_id == self.item
        are_there = is_growing or max(indices) < item.num_chunks
        if len(payload) != len(indices) or not are_there:
            raise RemoteProtocolError(
                f"a Chunk of {message.version} with a bad index or without its bytes"
            )
        begun: list[WriteChunk] = []
        size, again, actions = 0, 0, list[Action | ParentFailed]()
        write = self.store.version_store.write if self.store.may_block(item_id) else None
        for index, data in zip(indices, payload, strict=True):
            if index >= item.num_chunks:
                early = Chunk(version=message.version, index=index, form=message.form)
                self._early.keep(peer, early, [data])
                self.watchdog.lives(now=now)
                continue
            self.bytes_received += len(data)
            if item.has_chunk[index] or index in item.writing:
                self.num_duplicate_chunks += 1
                again += len(data)
            elif link.has_space(size + len(data)):
                item.writing.add(index)
                size += len(data)
                begun.append(WriteChunk(item_id, item, index, peer, data, write))
            else:
                reason = "it sends far more than it was given credit for"
                actions.append(ParentFailed(self.disconnect(), reason))
                break
        if begun and not actions:
            link.came(size, now=now)
            self.rate.add(size, now=now)
        if again and not actions:  # it took of the window as well
            actions += self._give_credit(again, now)
        return [*actions, *self._write(begun, now)] if begun else actions

    def _write(self, begun: list[WriteChunk], now: float) -> Sequence[Action | ParentFailed]:
        """Write chunks that have come, here and now or in threads."""
        item_id, item = begun[0].item_id, begun[0].item
        if not self.store.may_block(item_id):
            return self._written([(work, work.run()) for work in begun], now)
        if item_id == self.item and not item.is_missing:
            self.link.complete()
        # Until it is written, a link without credit brings nothing: that says nothing of its rate.
        if not self.link.can_bring:
            self.link.rate.pause()
            self.rate.pause()
        return begun

    def written(self, work: WriteChunk, fault: str, *, now: float) -> list[Action | ParentFailed]:
        """Take the result of a WriteChunk."""
        return self._written([(work, fault)], now)

    def _written(
        self, done: list[tuple[WriteChunk, str]], now: float
    ) -> list[Action | ParentFailed]:
        """Take the results of chunks that have come together."""
        first, _ = done[0]
        item_id, item = first.item_id, first.item
        is_parent = first.peer == self.link.peer  # else it was left meanwhile
        size = sum(len(work.data) for work, _ in done)
        for work, _ in done:
            item.writing.discard(work.index)
        if is_parent:
            self.link.settle(size, now=now)
        if self.store.get(item_id) is not item:
            # It was dropped. What the chunks took of the window is free again.
            return [*self._give_credit(size, now)] if is_parent else []
        right = [work for work, fault in done if not fault]
        actions = self._hold(right, is_parent, now) if right else []
        for work, fault in done:
            if fault == WRONG_HASH:
                actions += self._refuse_chunk(work, now)
            elif fault:
                actions += self._leave_unwritable(work, fault, now)
        return actions

    def _hold(
        self, right: list[WriteChunk], is_parent: bool, now: float
    ) -> list[Action | ParentFailed]:
        """Count chunks as held, report them, and continue with what they complete."""
        item_id, item = right[0].item_id, right[0].item
        chunks: dict[int, Frame] = {}
        size = 0
        for work in right:
            item.mark(work.index)
            chunks[work.index] = work.data
            size += len(work.data)
        actions: list[Action | ParentFailed] = [ChunksHeld(item_id, chunks)]
        if is_parent:
            self.watchdog.came(now=now)
            actions += self._give_credit(size, now)
        if isinstance(item, EncodedVersion):
            for index in chunks:
                actions += self.store.decodable(item, index)
        elif item.is_complete:
            actions += self.arrived(item_id, now)
        return actions

    def _give_credit(self, size: int, now: float) -> list[Action]:
        """Acknowledge what was written, of whatever item, and ask for more of the present one."""
        taken, credit = self.link.took(size, chunk_bytes=size)
        item, peer = self._present, self.link.peer
        if item is None or self.item is None:
            return []
        if not item.is_missing:
            self.link.complete()
            return []
        if not taken or peer is None:
            return []
        version, form = self.item
        given = Credit(version=version, form=form, credit_bytes=credit, taken_bytes=taken)
        return [self._send(peer, given)]

    def _refuse_chunk(self, work: WriteChunk, now: float) -> list[Action | ParentFailed]:
        """Ask again for a chunk that is wrong, or leave the parent that sends such."""
        self.num_bad_chunks += 1
        text = f"chunk {work.index} of {work.item_id[0]} from {work.peer} does not match its hash"
        actions: list[Action | ParentFailed] = [Note("warning", f"{text}; asking again")]
        if work.peer == self.link.peer:  # else it was left meanwhile
            self.link.num_bad_chunks += 1
            if self.link.num_bad_chunks >= MAX_BAD_CHUNKS:
                self.disconnect()
                actions.append(ParentFailed(work.peer, text, is_corrupt=True))
        return [*actions, *(self._request(now) if self.item == work.item_id else [])]

    def _leave_unwritable(self, work: WriteChunk, fault: str, now: float) -> list[Action]:
        """Leave an item that the disk refuses, as one for which there is no space."""
        error = StorageError(f"chunk {work.index} of {work.item_id[0]} cannot be written: {fault}")
        if self.item == work.item_id:
            self.end()
        return [*self.space.lack(error, now=now), *self._drop(work.item_id)]

    # --- keeping and time ------------------------------------------------------------------------

    def _drop(self, *items: ItemId) -> list[Action]:
        for item in items:
            self.store.drop(item)
        return [ItemDropped(item) for item in items]

    @property
    def needed(self) -> set[ItemId]:
        """The items that may not be evicted: the one that is fetched, and its base."""
        if self.item is None:
            return set()
        base = self.item[1].base
        return {self.item} if base is None else {self.item, (base, FULL)}

    @property
    def deadline(self) -> float | None:
        """When the parent counts as silent, space is looked for again, or an audit goes on."""
        return earliest(self.watchdog.deadline(self.item), self.space.retry_at, self.audit.deadline)

    def expire(self, *, now: float) -> list[Action | ParentFailed]:
        """Leave a parent that does not deliver, or ask it once more."""
        item = self._present
        if item is None or not item.is_missing:
            self.link.complete()  # the last table has come over another connection than the chunks
        reason, is_asked_again = self.watchdog.look(self.item, now=now)
        actions: list[Action | ParentFailed] = []
        if reason:
            actions.append(ParentFailed(self.disconnect(), reason))
        if is_asked_again:
            actions += self.resubscribe(now=now)
        actions += self._forsake(now) or (self._request(now) if is_asked_again else [])
        actions += self.audit.expire(now=now)
        if self.space.is_due(now=now):
            actions += self._consider(now)
        return actions

    # --- what the parent is told -----------------------------------------------------------------

    def _request(self, now: float) -> list[Action]:
        """Ask the parent for everything that is missing, with a full window of credit."""
        item, peer = self._present, self.link.peer
        if peer is None or item is None or self.item is None:
            return []
        ranges = item.missing()
        if not ranges:
            self.link.complete()
            return []
        credit_bytes = self.link.fetch(now=now)
        return [self._send(peer, _fetch(self.item, item, ranges, credit_bytes))]

    def _send(self, peer: str, message: Message) -> Send:
        return Send(peer, encode(message, [], source=self._node_id))


def _fetch(
    item_id: ItemId, item: Chunked, ranges: tuple[tuple[int, int], ...], credit_bytes: int
) -> Fetch:
    """Return the request for chunks of an item, as many runs of them as a message may name."""
    version, form = item_id
    return Fetch(
        version=version,
        form=form,
        ranges=ranges[:MAX_RANGES],
        credit_bytes=credit_bytes,
        num_segments=item.num_segments if isinstance(item, EncodedVersion) else 0,
    )
