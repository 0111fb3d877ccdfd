"""The receiver: fetches an item from the parent, verifies and writes its chunks, and retries.

`broadcast.py` has the rules of the weights plane. A `Receiver` is the child's half of this plane,
and has five parts. `Offers` choose the item to fetch. `ParentLink` has the state and credit of the
link. `Requests` ask for missing chunks. `Watchdog` detects a parent that does not deliver. `Audit`
verifies images that deltas have made. A chunk passes these steps:

    Chunk -> take -> WriteChunk -> [a thread, or here at once] -> written: held, served, credited

Chunks that arrive in one message are verified one by one, and then held, forwarded and credited
together. This saves time in Python: for a single chunk, the Python code takes half as long as the
hash.

**Writing.** If the version store is a mapped file, a write may block until the disk has caught up.
Such a write runs in a thread. A write to memory is done at once, because a thread costs more than
the copy. Chunks of encoded versions are always in memory.

* *Backpressure.* Credit is given for written chunks. So the window of the link bounds the memory of
  unwritten chunks, and a slow disk throttles the parent. The node leaves a parent that far exceeds
  its credit.
* *Order.* Writes may end in any order. A chunk that is being written is not requested again, and a
  second copy is discarded. The chunk is not served before the write has ended.
* *Eviction.* A `WriteChunk` keeps a reference to the image's memory. So this memory is not reused
  for another version before the write ends. If the item is dropped during the write, the result of
  the write is ignored, and only the credit is returned.
* *Silence.* While a chunk is being written, the parent does not count as silent. Time without
  credit does not lower the measured rate of the link.
* *A failed write.* If the disk refuses a write, the receiver acts as if the disk were full.

**Out of order.** Chunks and tables may travel over different connections (`net/zmq.py`), so a chunk
may arrive before the table with its hash. Up to MAX_WINDOW_BYTES of such chunks are kept until the
table arrives.

**Damage.** If the audit finds damaged memory, all versions in this memory are dropped. The newest
version is then fetched as a whole image.

**Out of space.** If there is no space for an item, all images but the newest complete one are
dropped, and the node retries the fetch. The retry follows soon after this node has dropped an
image, and otherwise after a pause that doubles each time. The operator gets a single warning, at
the first failure that the drop of images could not prevent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echo.core.errors import RemoteProtocolError, StorageError
from echo.core.rollout import PolicyVersion
from echo.core.timers import earliest
from echo.weights.link import MAX_BAD_CHUNKS, LinkState, ParentFailed, ParentLink
from echo.weights.offers import Offers
from echo.weights.rates import RateEstimate
from echo.weights.requests import Requests
from echo.weights.store import eviction
from echo.weights.store.audit import Audit
from echo.weights.store.changes import (
    ChunksHeld,
    EvictionDue,
    ItemDropped,
    ItemsChanged,
    SegmentKnown,
)
from echo.weights.store.encoded import DecodeBlock, EncodedVersion, OpenBlock
from echo.weights.store.in_place import ApplyPatch
from echo.weights.store.items import AuditChunks, Transfer
from echo.weights.store.store import ItemStore
from echo.weights.store.trust import TrustedManifests
from echo.weights.store.writing import WRONG_HASH, EarlyChunks, WriteChunk
from echo.weights.watchdog import Watchdog
from echo.wire.actions import Action, Note
from echo.wire.codec import Frame
from echo.wire.messages import (
    FULL,
    Announce,
    Chunk,
    Gone,
    ItemId,
    Message,
    Segment,
    Waiting,
)


@dataclass(frozen=True, slots=True)
class VersionArrived(Action):
    """A version is complete, or its patch is ready, so a worker may install it."""

    version: PolicyVersion
    num_bytes: int
    """Number of bytes of the version's image."""


@dataclass(frozen=True, slots=True)
class VersionAudited(Action):
    """The audit has found that every chunk of a version matches its hash."""

    version: PolicyVersion
    image_hash: bytes


@dataclass(frozen=True, slots=True)
class VersionDamaged(Action):
    """The audit found damaged bytes in a version. The version must not be used from now on."""

    version: PolicyVersion


FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0
"""The first and the longest pause between two retries, in seconds. The pause doubles each time."""
RELEASE_PAUSE_S = 0.2
"""Seconds from the drop of an image to the next retry. The pause is needed because the image's
memory is freed only when the last frame that uses it has been sent.
"""


class SpaceRetry:
    """Decides when to retry the allocation of space for an item."""

    def __init__(self) -> None:
        """Start with no item that lacks space."""
        self.retry_at: float | None = None
        """Time of the next retry; None while no item lacks space."""
        self._pause_s, self._has_noted = FIRST_PAUSE_S, False

    @property
    def is_lacking(self) -> bool:
        """Whether an item lacks space and will be retried."""
        return self.retry_at is not None

    def lack(self, error: StorageError, *, has_others: bool, now: float) -> list[Action]:
        """Record that an item found no space; retry after a pause.

        The pause doubles each time. The first failure returns a warning for the operator. If there
        are other images to drop (`has_others`), the second failure returns the warning.
        """
        is_expected = has_others and self._pause_s == FIRST_PAUSE_S
        self.retry_at = now + self._pause_s
        self._pause_s = min(MAX_PAUSE_S, 2 * self._pause_s)
        if self._has_noted or is_expected:
            return []
        self._has_noted = True
        text = f"keeping the versions that are here, and trying again later: {error}"
        return [Note("warning", text)]

    def released(self, *, now: float) -> None:
        """Record that an image was dropped; retry soon if an item lacks space."""
        if self.retry_at is not None:
            self.retry_at = min(self.retry_at, now + RELEASE_PAUSE_S)

    def is_due(self, *, now: float) -> bool:
        """Return whether to retry now.

        After True is returned, the next retry is due only after a call of `lack`.
        """
        if self.retry_at is None or now < self.retry_at:
            return False
        self.retry_at = None
        return True

    def found(self) -> None:
        """Record that the item has found space.

        The next failure is reported again and begins with the shortest pause.
        """
        self.retry_at, self._pause_s, self._has_noted = None, FIRST_PAUSE_S, False


class Receiver:
    """The child's half of the weights plane: fetches weights from the node's parent."""

    def __init__(
        self, store: ItemStore, *, node_id: str, window_bytes: int, stall_s: float
    ) -> None:
        """Start with no parent and no item to fetch.

        `store` is shared with the parent's half of this node. The other arguments are those of
        `Broadcast`.
        """
        self.store = store
        self.link = ParentLink(first_window_bytes=window_bytes, stall_s=stall_s)
        self.item: ItemId | None = None
        self.bytes_received = 0
        self.rate = RateEstimate()
        """The rate at which this node receives weights. It is kept when the parent changes."""
        self.num_bad_chunks = 0
        self.num_duplicate_chunks = 0
        self.offers = Offers(store)
        self.trust = TrustedManifests()
        self._early = EarlyChunks()
        """Chunks of the item being fetched that arrived before the table that has their hashes."""
        self.requests = Requests(self.link, store, node_id=node_id)
        self.space = SpaceRetry()
        self.watchdog = Watchdog(self.link, self.offers, store)
        self.audit = Audit(store)

    # --- the parent ------------------------------------------------------------------------------

    def set_parent(
        self, peer: str | None, *, rtt_s: float | None = None, now: float
    ) -> list[Action]:
        """Make `peer` the parent to fetch from; None stops fetching. Held chunks are kept."""
        if self.link.peer != peer:
            self.disconnect()
        self.link.connect(peer, rtt_s=rtt_s)
        subscribe = self.requests.subscribe(now=now)
        return [*subscribe, *(self._abandon_unoffered(now) or self._request(now))]

    def disconnect(self) -> str:
        """Leave the parent; return its link, or "" if there is no parent."""
        peer = self.link.peer or ""
        self.offers.clear()
        self.watchdog.clear()
        self.link.connect(None, rtt_s=None)
        return peer

    def _abandon_unoffered(self, now: float) -> list[Action]:
        """Abandon the present item if the parent does not offer it and it has no table yet.

        Such an item may not exist at all.
        """
        item = self.item
        encoded = None if item is None else self.store.encoded_versions.get(item)
        if item is None or encoded is None or encoded.num_segments or item in self.offers:
            return []
        self.end()
        return [*self._drop(item), *self._consider(now)]

    # --- messages --------------------------------------------------------------------------------

    def _is_from_parent(self, peer: str) -> bool:
        """Return whether `peer` is the parent. If so, record that the parent has sent a message."""
        if peer != self.link.peer:
            return False
        self.link.on_message()
        return True

    def receive(
        self, peer: str, message: Message, payload: list[Frame], *, now: float
    ) -> list[Action | ParentFailed]:
        """Handle a message of the parent, except a Chunk (see `take`).

        Messages of peers that are not the parent are ignored.

        Raises:
            RemoteProtocolError: if the parent broke a rule of the protocol.
        """
        if not self._is_from_parent(peer):
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
        actions += self._abandon_unoffered(now) or self._consider(now)
        if self.link.state is LinkState.WAITING and self.item in self.offers:
            # The parent had replied that it did not have the item yet; now it may have it.
            actions += self._request(now)
        return actions

    def _seal(self, version: PolicyVersion, now: float) -> list[Action]:
        image = self.store.images.get(version)
        if image is None or image.signed is not None or version not in self.trust.manifests:
            return []
        if self.offers.is_refused((version, FULL)):
            return []
        fault = self.store.seal(version, *self.trust.manifests[version])
        if fault:  # not the parent's fault: the learner has signed the manifest
            self.offers.refuse((version, FULL))
            return [Note("warning", f"{fault}; it is not taken")]
        self.audit.begin(image, now=now)
        return [ItemsChanged()]

    def audited(self, work: AuditChunks, fault: str, *, now: float) -> list[Action]:
        """Handle the result of AuditChunks, the hashing of some chunks of an image."""
        if not self.audit.worked(work, fault, now=now):
            return []
        version = work.image.manifest.version
        if not fault:
            return [VersionAudited(version, work.image.manifest.image_hash)]
        gone = eviction.damaged(self.store)
        if self.item in gone:
            self.end()
        return [
            _damage_note(version, fault),
            VersionDamaged(version),
            *self._drop(*gone),
            *self._consider(now),
        ]

    def adopt(self, transfer: Transfer, *, now: float) -> list[Action]:
        """Add an image that is on this machine already, complete or partial."""
        version = transfer.manifest.version
        self.store.add(transfer)
        if transfer.is_complete:
            return self.arrived((version, FULL), now)
        return [ItemsChanged()]

    # --- what to fetch ---------------------------------------------------------------------------

    def _consider(self, now: float) -> list[Action]:
        """Fetch the next item on the path to the newest version."""
        step = self.offers.next_step(self.item)
        if step is None or step == self.item:
            return [] if self.link.awaits_chunks else self._request(now)
        return [*self.begin(step, now), EvictionDue()]

    def begin(self, item_id: ItemId, now: float) -> list[Action]:
        """Start to fetch an item. Held chunks of the item are kept."""
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
            return [*actions, *self._lack(error, now)]
        return [*actions, ItemsChanged(), *self._request(now)]

    def _lack(self, error: StorageError, now: float) -> list[Action]:
        """Retry the fetch later, and drop other images now."""
        has_others = len(self.store.images) > 1
        return [*self.space.lack(error, has_others=has_others, now=now), EvictionDue()]

    def _request(self, now: float) -> list[Action]:
        return self.requests.fetch(self.item, now=now)

    def end(self) -> None:
        """Stop fetching the present item."""
        self.item = None
        self._early.clear()
        self.link.complete()

    # --- tables and blocks -----------------------------------------------------------------------

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
        self.watchdog.received(now=now)
        try:
            fault = self.store.add_segment(encoded, table, bytes(payload[0]))
        except StorageError as error:
            self.end()
            dropped = self._drop(item_id)
            return [*self._lack(error, now), *dropped]
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
        """Handle the result of decoding a block.

        The result is ignored if the block's version has been dropped.
        """
        encoded = work.encoded
        item_id = (encoded.version, encoded.form)
        if self.store.encoded_versions.get(item_id) is not encoded:
            return []
        if fault:
            base = self.store.images.get(encoded.form.base) if encoded.form.base else None
            if base is not None and base.signed is not None and base.is_complete:
                self.audit.begin(base, now=now)  # the base may be damaged
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
        """Handle the result of ApplyPatch, the writing of a delta over its base.

        The result is ignored if the image's memory has been dropped.
        """
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
        """Seal a complete version, and decode the deltas that have this version as their base.

        Sealing adds the version's manifest, if the manifest has arrived.
        """
        return [*self._seal(version, now), *self.store.decodable_on(version)]

    def _refuse(self, item_id: ItemId, fault: str, now: float) -> list[Action]:
        """Drop a signed item that this node cannot use, and never fetch it again."""
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
        """Report that a version is complete, and start to fetch the next version."""
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
        """Abandon an item that the parent no longer has. A new Announce of the parent follows."""
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
        """Start to write chunks that the parent has sent; ignore chunks from other peers.

        Raises:
            RemoteProtocolError: if a chunk's index is outside its item, or its bytes are missing.
        """
        item_id = (message.version, message.form)
        is_parent, link, item = self._is_from_parent(peer), self.link, self.store.get(item_id)
        if not is_parent or item is None:
            return []
        indices = (message.index, *message.others)
        # The next tables of an encoded version that is being fetched may name further chunks.
        is_growing = item.is_open and item_id == self.item
        _check(message, payload, num_chunks=None if is_growing else item.num_chunks)
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
            link.received(size, now=now)
            self.rate.add(size, now=now)
        if again and not actions:  # duplicates have used credit, too
            actions += self.requests.credit(self.item, again)
        return [*actions, *self._write(begun, now)] if begun else actions

    def _write(self, begun: list[WriteChunk], now: float) -> Sequence[Action | ParentFailed]:
        """Write chunks at once if they go to memory; otherwise return work for threads."""
        item_id, item = begun[0].item_id, begun[0].item
        if not self.store.may_block(item_id):
            return self._written([(work, work.run()) for work in begun], now)
        if item_id == self.item and not item.is_missing:
            self.link.complete()
        # Until a write ends, the parent has no credit: the wait does not count for the link's rate.
        if not self.link.can_bring:
            self.link.rate.pause()
            self.rate.pause()
        return begun

    def written(self, work: WriteChunk, fault: str, *, now: float) -> list[Action | ParentFailed]:
        """Handle the result of WriteChunk, the verification and writing of a chunk."""
        return self._written([(work, fault)], now)

    def _written(
        self, done: list[tuple[WriteChunk, str]], now: float
    ) -> list[Action | ParentFailed]:
        first, _ = done[0]
        item_id, item = first.item_id, first.item
        is_parent = first.peer == self.link.peer  # otherwise that parent was left meanwhile
        size = sum(len(work.data) for work, _ in done)
        for work, _ in done:
            item.writing.discard(work.index)
        if is_parent:
            self.link.released(size, now=now)
        if self.store.get(item_id) is not item:
            # The item was dropped. The credit of its chunks is free again.
            return [*self.requests.credit(self.item, size)] if is_parent else []
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
        """Mark written chunks as held, and process what they complete: blocks or an image."""
        item_id, item = right[0].item_id, right[0].item
        chunks: dict[int, Frame] = {}
        size = 0
        for work in right:
            item.mark(work.index)
            chunks[work.index] = work.data
            size += len(work.data)
        actions: list[Action | ParentFailed] = [ChunksHeld(item_id, chunks)]
        if is_parent:
            self.watchdog.received(now=now)
            actions += self.requests.credit(self.item, size)
        if isinstance(item, EncodedVersion):
            for index in chunks:
                actions += self.store.decodable(item, index)
        elif item.is_complete:
            actions += self.arrived(item_id, now)
        return actions

    def _refuse_chunk(self, work: WriteChunk, now: float) -> list[Action | ParentFailed]:
        """Request a chunk with a wrong hash again.

        After MAX_BAD_CHUNKS such chunks, leave the parent.
        """
        self.num_bad_chunks += 1
        text = f"chunk {work.index} of {work.item_id[0]} from {work.peer} does not match its hash"
        actions: list[Action | ParentFailed] = [Note("warning", f"{text}; asking again")]
        if work.peer == self.link.peer:  # otherwise that parent was left meanwhile
            self.link.num_bad_chunks += 1
            if self.link.num_bad_chunks >= MAX_BAD_CHUNKS:
                self.disconnect()
                actions.append(ParentFailed(work.peer, text, is_corrupt=True))
        return [*actions, *(self._request(now) if self.item == work.item_id else [])]

    def _leave_unwritable(self, work: WriteChunk, fault: str, now: float) -> list[Action]:
        error = StorageError(f"chunk {work.index} of {work.item_id[0]} cannot be written: {fault}")
        if self.item == work.item_id:
            self.end()
        dropped = self._drop(work.item_id)
        return [*self._lack(error, now), *dropped]

    # --- keeping and time ------------------------------------------------------------------------

    def _drop(self, *items: ItemId) -> list[Action]:
        for item in items:
            self.store.drop(item)
        return [ItemDropped(item) for item in items]

    @property
    def deadline(self) -> float | None:
        """Time of the next call of `expire`; None if no call is due.

        The call asks a silent parent again, retries an item that lacked space, or continues the
        audit.
        """
        return earliest(self.watchdog.deadline(self.item), self.space.retry_at, self.audit.deadline)

    def expire(self, *, now: float) -> list[Action | ParentFailed]:
        """Ask a silent parent again or leave it.

        Also retry an item that lacked space, and continue the audit.
        """
        item = None if self.item is None else self.store.get(self.item)
        if item is None or not item.is_missing:
            self.link.complete()  # the last table may arrive after the last chunk
        reason, is_asked_again = self.watchdog.check(self.item, now=now)
        actions: list[Action | ParentFailed] = []
        if reason:
            actions.append(ParentFailed(self.disconnect(), reason))
        if is_asked_again:
            actions += self.requests.subscribe(now=now)
        actions += self._abandon_unoffered(now) or (self._request(now) if is_asked_again else [])
        actions += self.audit.expire(now=now)
        if self.space.is_due(now=now):
            actions += self._consider(now)
        return actions


def _check(message: Chunk, payload: list[Frame], *, num_chunks: int | None) -> None:
    """Check a Chunk message for an item of `num_chunks` chunks.

    If `num_chunks` is None, the number of chunks is not final, and every index is accepted.

    Raises:
        RemoteProtocolError: if a chunk's index is outside its item, or its bytes are missing.
    """
    indices = (message.index, *message.others)
    is_inside = num_chunks is None or max(indices) < num_chunks
    if len(payload) != len(indices) or not is_inside:
        raise RemoteProtocolError(
            f"a Chunk of {message.version} with a bad index or without its bytes"
        )


def _damage_note(version: PolicyVersion, fault: str) -> Note:
    return Note(
        "warning",
        f"{fault} of {version} in memory is not what the learner signed: fetching the newest "
        "version whole; if this comes again, check this machine's memory and disk",
    )
