"""The weights plane: each node fetches weights from a parent and forwards them to children.

Every node fetches weights, chunk by chunk, from one parent, and serves any number of children. The
learner has no parent; `publish` adds the learner's versions to the store. A node has a **store** of
items (`store/store.py`). An item is one version in one form: the whole image, or an encoded version
(a delta or a keyframe). The word "item" is that of the messages (`ItemId`). "Artifact", the word of
experiment trackers, would be less exact: it stands for any file of a run.

    child                         parent
      Subscribe(newest held)  ->            once per link, and when an Announce may be lost
                              <-  Announce  the parent's items; repeated when they change
      Fetch(missing, credit)  ->            chunks of one item at a time
                              <-  Segment   each table of an encoded version, once it is signed
                              <-  Chunk     one or more chunks, ascending, once held
      Credit(bytes)           ->            when a quarter of the window (`link.py`) is written
                              <-  Waiting   the parent is alive, but lacks the chunk or version
                              <-  Gone      the parent no longer has that item

Rules

* A parent announces an item as soon as the parent begins to fetch the item. Chains are pipelined: a
  node forwards each chunk as soon as the chunk's hash has matched.
* A node never stores or forwards a chunk that does not match the hash that the learner signed.
* A chunk is held (counted as present) once it is written. Then the node forwards the chunk and
  gives new credit. A write that may take long runs in a thread (`receiver.py`). So a slow disk
  delays only its own node.
* A path to a version is the series of items to fetch for it, such as a keyframe and two deltas. A
  child chooses the path to the newest version that has the fewest bytes, and fetches the first item
  on this path. This item is the whole image, a keyframe, or a delta from a version that the child
  holds completely.
* A newer version preempts the present fetch under two conditions: less than half of the present
  item has arrived, and the path to the newer version without the present item has no more bytes
  than the path with it. The fetch after a preemption is not preempted. Otherwise a link slower than
  the pace of publication would never complete a version.
* Lost messages are requested again. A child leaves a parent that is silent for too long
  (`link.py`), and turns to the spare parent. Without a spare parent the child repeats its request,
  and leaves the parent at the second silence. A child also leaves a parent that sends chunks with
  wrong hashes, or that does not deliver an announced item (`watchdog.py`). On `ParentFailed`,
  `parents.py` chooses another parent. The next Fetch names only the missing chunks.
* If there is no space for an item, the node drops all images except the newest complete one, and
  retries the item with a backoff (`receiver.py`).
* If the parent sends Gone for an item, the child abandons the item. If a child leaves a parent, the
  child forgets the offers of this parent.

`Broadcast` owns the two halves, `receiver.py` (the child's) and `sender.py` (the parent's). The
halves share the store and do not call each other. The receiver reports what has changed in the
store (`store/changes.py`), and `Broadcast` informs the sender.
"""

from __future__ import annotations

from collections.abc import Iterable

from echo.core.errors import LocalProtocolError, RemoteProtocolError
from echo.core.rollout import KEEP_VERSIONS, PolicyVersion
from echo.core.timers import earliest
from echo.weights.link import ParentFailed
from echo.weights.manifest import Manifest, SegmentTable, SignedManifest
from echo.weights.offers import form_of
from echo.weights.receiver import Receiver
from echo.weights.sender import Sender
from echo.weights.store import eviction
from echo.weights.store.changes import (
    ChunksHeld,
    EvictionDue,
    ItemDropped,
    ItemsChanged,
    SegmentKnown,
    StoreChange,
)
from echo.weights.store.encoded import DecodeBlock, EncodedVersion, OpenBlock
from echo.weights.store.in_place import ApplyPatch
from echo.weights.store.items import AuditChunks, Chunked, Transfer
from echo.weights.store.memory import VersionStore
from echo.weights.store.patches import PatchMode
from echo.weights.store.store import ItemStore
from echo.weights.store.writing import WriteChunk
from echo.wire.actions import Action, Work
from echo.wire.codec import Frame
from echo.wire.messages import (
    FULL,
    Announce,
    Chunk,
    Credit,
    Fetch,
    Gone,
    Message,
    Segment,
    Subscribe,
    Waiting,
)

GIVE_UP_STALLS = 4
"""How long a parent may lack the learner's newest version, as a multiple of stall_s. A healthy
parent announces a version after one or two heartbeats, and stall_s is about a heartbeat."""


class Broadcast:
    """One node's part in the weights plane, as a child and as a parent.

    A role calls `set_parent` with the parent, `receive` with messages, `expire` when time passes,
    `worked` with results of work, and `expect` with the learner's newest version. A learner's role
    also passes in its own versions (`publish`, `publish_segment`). Each of these methods returns
    actions. Before a node can fetch, its role passes the learner's key to `trust`.
    """

    def __init__(
        self,
        *,
        node_id: str,
        window_bytes: int,
        stall_s: float,
        keep_versions: int = KEEP_VERSIONS,
        version_store: VersionStore | None = None,
    ) -> None:
        """Start with an empty store, no parent and no children.

        Args:
            node_id: the name of this node.
            window_bytes: number of bytes to request ahead while the rate of the link to the parent
                is unknown.
            stall_s: seconds for which a parent may be silent while the rate of the link is unknown.
            keep_versions: number of complete versions to keep; at least 1. Children may fetch these
                versions, and this node may fall back to an older version.
            version_store: provides the memory of images; None for memory without a limit.
        """
        if window_bytes < 1 or keep_versions < 1 or stall_s <= 0:
            raise ValueError("window_bytes, keep_versions and stall_s must be positive")
        self._stall_s = stall_s
        self._expected_since: float | None = None
        self._evicted_at = 0.0
        self._store = ItemStore(keep_versions=keep_versions, version_store=version_store)
        self._sender = Sender(self._store, node_id=node_id, stall_s=stall_s)
        self.receiver = Receiver(
            self._store,
            node_id=node_id,
            window_bytes=window_bytes,
            stall_s=stall_s,
        )
        """The half of this node that fetches weights from its parent."""
        self.trust = self.receiver.trust
        """Verifies manifests and tables with the learner's key. The role sets the key."""
        self.store = self._store.images
        """Version -> image of the version on this node, complete or partial."""
        self.encoded_versions = self._store.encoded_versions
        """Item -> delta or keyframe on this node, complete or partial."""
        self.children = self._sender.children
        """Link -> record of the child at the other end of the link."""
        self.uplink = self._sender.rate
        """Rate of this node's uplink to all its children together."""

    def validate(self) -> None:
        """Check that the records of store, parent and children agree with each other; for tests.

        Raises:
            AssertionError: if they disagree.
        """
        self.receiver.link.validate()
        fetched = [self.receiver.item, *(child.fetching for child in self.children.values())]
        for item in filter(None, fetched):
            assert self._store.get(item) is not None, f"{item} is fetched and not in the store"

    # --- state that others read ------------------------------------------------------------------

    @property
    def newest_complete(self) -> PolicyVersion | None:
        """The newest version that this node holds completely; None if there is none."""
        return self._store.newest_complete

    @property
    def is_serving(self) -> bool:
        """Whether a child is fetching an item from this node."""
        return any(child.fetching is not None for child in self.children.values())

    @property
    def bytes_sent(self) -> int:
        """Number of weight bytes sent to children since the start."""
        return self._sender.bytes_sent

    @property
    def bytes_received(self) -> int:
        """Number of weight bytes received since the start."""
        return self.receiver.bytes_received

    @property
    def payload(self) -> Chunked | None:
        """The smallest form in which this node has its newest version. The form may be partial.

        None if the node has no version.
        """
        newest = self._store.newest_known
        forms: list[Chunked] = [
            *(
                encoded
                for (version, _), encoded in self._store.encoded_versions.items()
                if version == newest
            ),
            *(image for version, image in self.store.items() if version == newest),
        ]
        return min(forms, key=lambda item: item.num_bytes, default=None)

    @property
    def deadline(self) -> float | None:
        """Time of the next call of `expire`; None if no call is due."""
        return earliest(self.receiver.deadline, self._sender.deadline)

    def progress(self) -> tuple[PolicyVersion | None, int, int]:
        """Return (version that is being fetched, number of held chunks, number of known chunks).

        A chunk of an encoded version is known once its table has arrived. If no version is being
        fetched, the result is (None, 0, 0).
        """
        item_id = self.receiver.item
        item = None if item_id is None else self._store.get(item_id)
        if item_id is None or item is None:
            return None, 0, 0
        return item_id[0], item.num_held, item.num_chunks

    @property
    def patch_mode(self) -> PatchMode:
        """The rule for when this node writes a delta over the image of the delta's base."""
        return self._store.in_place.mode

    @patch_mode.setter
    def patch_mode(self, mode: PatchMode) -> None:
        self._store.in_place.mode = mode

    def patch_of(self, version: PolicyVersion) -> ApplyPatch | None:
        """Return the work that turns the image of a delta's base into `version`.

        None if no delta to this version is ready. The caller does the work, and passes the result
        to `worked`.
        """
        ready = self._store.in_place.ready
        if ready is None or ready.version != version:
            return None
        return self._store.in_place.begin(ready)

    def offer(self, image: bytearray, image_hash: bytes) -> None:
        """Let this node use an image that its machine has, such as the model's own weights.

        If the first announced version has the same hash, the node uses this image instead of
        fetching the version. Otherwise the node drops the image.

        Args:
            image: the bytes, in the layout of a version's image; the caller must not change them
                afterwards.
            image_hash: the hash of the image (`hash_image`), computed on this machine.
        """
        self.trust.local_image = (image, image_hash)

    def recover(
        self,
        version: PolicyVersion,
        frame: Frame,
        storage: memoryview,
        has_chunk: bytearray,
        *,
        now: float,
    ) -> list[Action]:
        """Take over a complete or partial image that an earlier process left on this machine.

        `frame` is the signed manifest, `storage` has the bytes, and `has_chunk` marks the correct
        chunks. The signature of the manifest is verified again.
        """
        manifest = self.trust.manifest(version, frame)
        signed, _ = self.trust.manifests[version]
        if len(storage) != manifest.num_bytes or len(has_chunk) != manifest.num_chunks:
            raise LocalProtocolError(f"{version}: {len(storage)} bytes are not its image")
        transfer = Transfer(signed, manifest, storage, has_chunk, sum(has_chunk))
        found = self._pass_on(self.receiver.adopt(transfer, now=now), now)
        return [each for each in found if isinstance(each, Action)]

    # --- the learner's side ----------------------------------------------------------------------

    def publish(
        self,
        signed: SignedManifest,
        manifest: Manifest,
        image: bytearray | memoryview,
        *,
        now: float,
    ) -> list[Action]:
        """Add and announce a complete version that this learner has made."""
        if len(image) != manifest.num_bytes:
            raise LocalProtocolError(
                f"{manifest.version}: image of {len(image)} bytes, unlike its manifest"
            )
        has_chunk = bytearray(b"\1") * manifest.num_chunks
        self._store.add(Transfer(signed, manifest, image, has_chunk, manifest.num_chunks))
        return [*self._sender.announce(now=now), *self.evict(now=now)]

    def publish_segment(
        self,
        table: SegmentTable,
        frame: bytes,
        payload: memoryview,
        *,
        expected_bytes: int,
        now: float,
    ) -> list[Action]:
        """Add and forward the next segment of an encoded version that this learner makes.

        Args:
            table: the table of the segment.
            frame: the table, signed and encoded.
            payload: the coded blocks of the segment, one after the other; the caller must not
                change them afterwards.
            expected_bytes: estimated size of the whole encoded version, in bytes.
            now: the present time.
        """
        item = (table.version, form_of(table.base))
        encoded = self._store.encoded_versions.setdefault(item, EncodedVersion(*item))
        encoded.expected_bytes = expected_bytes
        encoded.add(table, frame, payload)
        return [*self._sender.announce(now=now), *self._sender.extend(item, now)]

    # --- links -----------------------------------------------------------------------------------

    def set_parent(
        self, peer: str | None, *, rtt_s: float | None = None, now: float
    ) -> list[Action]:
        """Make `peer` the parent to fetch from; None stops fetching. Held chunks are kept."""
        found = self._pass_on(self.receiver.set_parent(peer, rtt_s=rtt_s, now=now), now)
        return [each for each in found if isinstance(each, Action)]

    def remove_child(self, peer: str, *, now: float) -> list[Action]:
        """Forget a child whose link has ended."""
        self.children.pop(peer, None)
        return self.evict(now=now)

    def expect(self, newest: PolicyVersion | None, *, now: float) -> list[Action | ParentFailed]:
        """Ask the parent for the learner's newest version, if that version was not offered yet.

        The Announce of this version may be under way, or may have been lost. The parent may also
        have no space for the version, or have broken links of its own. So if the parent announces
        no newer version within GIVE_UP_STALLS * stall_s, the node leaves the parent.
        """
        held = self.newest_complete
        known = (self._store.newest_known, self.receiver.offers.newest)
        is_news = newest is not None and all(each is None or each < newest for each in known)
        is_behind = newest is not None and (held is None or held < newest)
        if not is_behind or self.progress()[1]:
            self._expected_since = None
        elif self._expected_since is None:
            self._expected_since = now
        elif self.receiver.item is None and not self.receiver.space.is_lacking and (
            now - self._expected_since > GIVE_UP_STALLS * self._stall_s
        ):  # fmt: skip
            self._expected_since = None
            reason = f"it does not have {newest}"
            has_parent = self.receiver.link.peer is not None
            return [ParentFailed(self.receiver.disconnect(), reason)] if has_parent else []
        return [*self.receiver.requests.subscribe(now=now)] if is_news else []

    # --- messages and time -----------------------------------------------------------------------

    def receive(
        self, peer: str, message: Message, payload: list[Frame], *, now: float
    ) -> list[Action | ParentFailed]:
        """Handle one message of the weights plane.

        Raises:
            RemoteProtocolError: if the peer broke a rule of the protocol; the state is then
                unchanged.
        """
        match message:
            case Subscribe() | Fetch() | Credit():
                return [*self._sender.receive(peer, message, now)]
            case Chunk():
                return self._pass_on(self.receiver.take(peer, message, payload, now=now), now)
            case Announce() | Segment() | Waiting() | Gone():
                return self._pass_on(self.receiver.receive(peer, message, payload, now=now), now)
        raise RemoteProtocolError(f"{type(message).__name__} does not belong to the weights plane")

    def worked(self, work: Work, fault: str, *, now: float) -> list[Action | ParentFailed]:
        """Handle the result of work done in a thread; `fault` is "" if the work succeeded.

        Raises:
            LocalProtocolError: if `work` does not belong to the weights plane.
        """
        match work:
            case WriteChunk():
                found = self.receiver.written(work, fault, now=now)
            case DecodeBlock() | OpenBlock():
                found = self.receiver.decoded(work, fault, now=now)
            case ApplyPatch():
                found = self.receiver.applied(work, fault, now=now)
            case AuditChunks():
                found = [*self.receiver.audited(work, fault, now=now)]
            case _:
                name = type(work).__name__
                raise LocalProtocolError(f"{name} does not belong to the weights plane")
        return self._pass_on(found, now)

    def tend(self, *, now: float) -> list[Action]:
        """Serve the children.

        A node without a parent may call this method instead of `expire`.
        """
        return self._sender.expire(now)

    def expire(self, *, now: float) -> list[Action | ParentFailed]:
        """Repeat requests that got no answer, leave a silent parent, and serve the children."""
        actions = [*self.tend(now=now), *self._pass_on(self.receiver.expire(now=now), now)]
        # The items that silent children have pinned may be dropped after a while.
        if now >= self._evicted_at + self._stall_s:
            actions += self.evict(now=now)
        return actions

    # --- between the halves ----------------------------------------------------------------------

    def _pass_on(
        self, found: Iterable[Action | ParentFailed], now: float
    ) -> list[Action | ParentFailed]:
        """Replace each store change in the receiver's result by the sender's actions."""
        actions: list[Action | ParentFailed] = []
        for each in found:
            if not isinstance(each, StoreChange):
                actions.append(each)
                continue
            match each:
                case ChunksHeld():
                    actions += self._sender.forward(each.item, each.chunks, now)
                case SegmentKnown():
                    actions += self._sender.extend(each.item, now)
                case ItemsChanged():
                    actions += self._sender.announce(now=now)
                case ItemDropped():
                    actions += self._sender.dropped(each.item, now=now)
                case EvictionDue():
                    actions += self.evict(now=now)
        return actions

    def evict(self, *, now: float) -> list[Action]:
        """Drop the items that are needed neither by this node nor by a child."""
        self._evicted_at = now
        self._sender.forget_silent(now)
        offered, encoded = self.receiver.offers.items(), self._store.encoded_versions
        self.trust.retire(self.newest_complete, [*offered, *encoded])
        lacks_space = self.receiver.space.is_lacking
        if eviction.is_lean(self._store) and not lacks_space:
            return []
        needed = self._sender.pinned(now) | eviction.with_base(self.receiver.item)
        dropped = eviction.expendable(self._store, needed, lacks_space=lacks_space)
        for item in dropped:
            self._store.drop(item)
        if any(form == FULL for _, form in dropped):
            self.receiver.space.released(now=now)
        return [action for item in dropped for action in self._sender.dropped(item, now=now)]
