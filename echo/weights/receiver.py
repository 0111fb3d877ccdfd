"""The child's half of the weights plane: fetch the chosen item over the lanes, verify and write it.

`weights/broadcast.py` has the rules, `Offers` chooses the item. It is begun on every
lane that has a parent; each lane asks for what is missing of its own chunks. What becomes of a
chunk:

    take -> WriteChunk -> here and now, or in a thread -> written: held, credited
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from blake3 import blake3

from echo.core.bounds import MAX_RANGES
from echo.core.errors import RemoteProtocolError, StorageError
from echo.core.rollout import PolicyVersion
from echo.core.timers import earliest
from echo.weights.link import MAX_BAD_CHUNKS, ParentFailed, RateEstimate, StripeLink
from echo.weights.manifest import Manifest
from echo.weights.schedule import EncodedOffer, cheapest_path
from echo.weights.sender import Sender
from echo.weights.store import (
    Chunked,
    DecodeBlock,
    EncodedVersion,
    ItemStore,
    Transfer,
    TrustedManifests,
)
from echo.wire.actions import Action, Note, Send, Work
from echo.wire.codec import Frame, encode
from echo.wire.messages import (
    FULL,
    Announce,
    Chunk,
    Credit,
    Fetch,
    Form,
    Gone,
    ItemId,
    Message,
    Segment,
    Subscribe,
    Waiting,
)

# --- What a node's parents have announced, and what of it to fetch next ---
#
# The way to the newest version with the fewest bytes is taken step by step; what is held already of
# an item need not be fetched again and counts for nothing. A newer version pre-empts the one that
# is being fetched if less than half of that has come, and going to the newer one directly costs no
# more than finishing and going on from there; and not twice in a row, or a link slower than the
# pace of publication would never complete any.

MAX_OFFERS = 1000
"""Items that one Announce may name."""
MAX_REFUSED = 64
"""Encoded versions that did not decode, which are remembered so as not to be tried again."""


class Offers:
    """Sizes of what can be had, by parent."""

    def __init__(self, store: ItemStore) -> None:
        """Start with nothing; `store` tells what is held."""
        self._store = store
        self._by_peer: dict[str, dict[ItemId, int]] = {}
        self._refused: dict[ItemId, None] = {}
        self.has_preempted = False
        """Whether a fetch was given up since a version was last completed."""

    def hear(self, peer: str, message: Announce, manifest: Manifest | None) -> None:
        """Take an Announce; it replaces what the same parent said before.

        Raises:
            RemoteProtocolError: if it names too much.
        """
        if len(message.offers) > MAX_OFFERS:
            raise RemoteProtocolError(f"an Announce of {len(message.offers)} encoded versions")
        offers = {
            (offer.version, form_of(offer.base)): max(0, offer.num_bytes)
            for offer in message.offers
        }
        if manifest is not None:
            offers[manifest.version, FULL] = manifest.num_bytes
        self._by_peer[peer] = offers

    def forget(self, peer: str) -> None:
        """Forget a parent."""
        self._by_peer.pop(peer, None)

    def withdraw(self, peer: str, item: ItemId) -> None:
        """Note that a parent has an item no more."""
        self._by_peer.get(peer, {}).pop(item, None)

    def has(self, peer: str, item: ItemId | None) -> bool:
        """Return whether a parent has announced an item."""
        return item in self._by_peer.get(peer, {})

    def is_offered(self, item: ItemId) -> bool:
        """Return whether any parent has announced an item."""
        return any(item in offers for offers in self._by_peer.values())

    def num_bytes(self, item: ItemId) -> int:
        """Return how large an item is said to be."""
        return max((offers.get(item, 0) for offers in self._by_peer.values()), default=0)

    def refuse(self, item: ItemId) -> None:
        """Never fetch an item again: what came out of it was wrong."""
        self._refused[item] = None
        while len(self._refused) > MAX_REFUSED:
            del self._refused[next(iter(self._refused))]

    @property
    def newest(self) -> PolicyVersion | None:
        """Newest version that a parent has announced."""
        return max((version for version, _ in self._items()), default=None)

    def _items(self) -> Iterable[ItemId]:
        return (item for offers in self._by_peer.values() for item in offers)

    def next_step(self, current: ItemId | None) -> ItemId | None:
        """Return what to fetch now: `current` to go on with it, None for nothing.

        Args:
            current: what is being fetched.
        """
        held = {version for version, image in self._store.images.items() if image.is_complete}
        target = self._newest_within_reach(held)
        found = None if target is None else self._path(target, held)
        if target is None or found is None:
            return current
        path, num_bytes = found
        step = (path[0].version, Form(path[0].kind, path[0].base))
        if current is None or step == current:
            return step
        if not self._may_preempt(current, target, held, direct_bytes=num_bytes):
            return current
        self.has_preempted = True
        return step

    def _path(
        self, target: PolicyVersion, held: set[PolicyVersion]
    ) -> tuple[list[EncodedOffer], int] | None:
        """Return the cheapest way to a version from those held, and its bytes."""
        offers = []
        for item_id in self._useful():
            version, form = item_id
            if version > target:
                continue
            num_bytes, item = self.num_bytes(item_id), self._store.get(item_id)
            if item is not None and item.num_chunks:
                num_bytes -= num_bytes * item.num_held // item.num_chunks
            offers.append(EncodedOffer(version, form.base, form.kind, num_bytes))
        path = cheapest_path(held, offers, target)
        return None if path is None else (path, sum(step.num_bytes for step in path))

    def _useful(self) -> list[ItemId]:
        """Return what leads on from what is held, by version.

        A way back over versions that were passed already would be walked again and again.
        """
        newest = self._store.newest_complete
        items = dict.fromkeys(self._items())
        return sorted(
            (
                (version, form)
                for version, form in items
                if (newest is None or version > newest)
                and (form.base is None or form.base < version)
                and (version, form) not in self._refused
            ),
            key=lambda item: item[0],
        )

    def _newest_within_reach(self, held: set[PolicyVersion]) -> PolicyVersion | None:
        """Return the newest version to which there is a way; not each that is announced has one."""
        reached: set[PolicyVersion | None] = {None, *held}
        target = None
        for version, form in self._useful():
            if form.base in reached:
                reached.add(version)
                target = version
        return target

    def _may_preempt(
        self,
        current: ItemId,
        target: PolicyVersion,
        held: set[PolicyVersion],
        *,
        direct_bytes: int,
    ) -> bool:
        """Return whether the present fetch is to be given up for the newest version."""
        item = self._store.get(current)
        if item is None:
            return True
        if self.has_preempted or 2 * item.num_held >= max(1, item.num_chunks):
            return False
        onward = self._path(target, held | {current[0]})
        remaining = item.num_bytes - item.num_bytes * item.num_held // max(1, item.num_chunks)
        return onward is None or direct_bytes <= remaining + onward[1]


def form_of(base: PolicyVersion | None) -> Form:
    """Return the form of an encoded version."""
    return Form("keyframe") if base is None else Form("delta", base)


class StripeLinks:
    """All lanes of a node; there is always one."""

    def __init__(self, *, first_window_bytes: int, stall_s: float) -> None:
        """Start with one lane without a parent."""
        self._first_window_bytes = first_window_bytes
        self._stall_s = stall_s
        self.all: list[StripeLink] = []
        self._num_stripes = 1
        self.resize(1)

    def __len__(self) -> int:
        """Return the number of lanes."""
        return len(self.all)

    def __iter__(self) -> Iterator[StripeLink]:
        """Go through the lanes in order."""
        return iter(self.all)

    def __getitem__(self, index: int) -> StripeLink:
        """Return a lane by number."""
        return self.all[index]

    def resize(self, num_lanes: int, num_stripes: int | None = None) -> list[str]:
        """Change the number of lanes; return the parents of those that are gone.

        Args:
            num_lanes: how many there are to be.
            num_stripes: lanes that are equal modulo this have the same parent; None if all differ.
        """
        gone, self.all = self.all[num_lanes:], self.all[:num_lanes]
        self._num_stripes = num_stripes or num_lanes
        # Lanes to one parent share its link, and what waits in its queue delays them all.
        first = max(1, self._first_window_bytes * self._num_stripes // num_lanes)
        for index in range(len(self.all), num_lanes):
            self.all.append(StripeLink(index, first_window_bytes=first, stall_s=self._stall_s))
        for lane in self.all:
            lane.first_window_bytes, lane.num_stripes = first, self._num_stripes
        return [lane.peer for lane in gone if lane.peer is not None]

    def of(self, peer: str) -> StripeLink | None:
        """Return the lane whose parent is `peer`."""
        return next((lane for lane in self.all if lane.peer == peer), None)

    def leave(self) -> list[str]:
        """Leave every parent; return them."""
        left = [lane.peer for lane in self.all if lane.peer is not None]
        for lane in self.all:
            lane.connect(None, rtt_s=None)
        return left

    def finish(self) -> None:
        """Note that nothing more is awaited of the item, in any lane; another may follow."""
        for lane in self.all:
            lane.finish()
            lane.is_denied = False

    def share(self, lane: StripeLink) -> tuple[int, int] | None:
        """Return (number, of how many) of a lane among those whose parents may have the item."""
        able = [each for each in self.all if not each.is_denied]
        return None if lane.is_denied else (able.index(lane), len(able))

    def _deadline(self, lane: StripeLink, chunk_bytes: int) -> float | None:
        """Return when a lane counts as silent.

        Parallel connections to one parent starve each other at times; while one of them brings
        something the parent lives.
        """
        own = lane.deadline(chunk_bytes)
        if own is None or len(self.all) <= self._num_stripes:
            return own
        family = self.all[lane.index % self._num_stripes :: self._num_stripes]
        latest = max(each.progress_at for each in family if each.peer is not None)
        return own + latest - lane.progress_at

    def deadline(self, chunk_bytes: int) -> float | None:
        """Return when the next lane counts as silent."""
        awaited = [lane for lane in self.all if lane.is_pulling or lane.is_asking]
        return earliest(*[self._deadline(lane, chunk_bytes) for lane in awaited])

    def silent(self, chunk_bytes: int, *, now: float) -> list[StripeLink]:
        """Return the lanes that have been silent for too long."""
        deadlines = [(lane, self._deadline(lane, chunk_bytes)) for lane in self.all]
        return [lane for lane, at in deadlines if at is not None and now >= at]


# What is done where a version has no space: the ones that are here are kept, and it is tried again
#
# Room may become free here, as soon as an image is dropped, or by others' doing (a disk that was
# full), of which nobody tells: so it is also tried after a pause that grows. The operator reads of
# it once, however often it is tried.


FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 60.0
RELEASE_PAUSE_S = 0.2
"""After an image was dropped: what is still being sent of it is not free at once."""


class SpaceRetry:
    """When to try again."""

    def __init__(self) -> None:
        """Start with room."""
        self.retry_at: float | None = None
        """When to try again; None while nothing lacks room."""
        self._pause_s = FIRST_PAUSE_S
        self._has_noted = False

    def lacks(self, error: StorageError, *, now: float) -> list[Note]:
        """Note that there was none, and return what the operator should read."""
        self.retry_at = now + self._pause_s
        self._pause_s = min(MAX_PAUSE_S, 2 * self._pause_s)
        if self._has_noted:
            return []
        self._has_noted = True
        text = f"keeping the versions that are here, and trying again later: {error}"
        return [Note("warning", text)]

    def released(self, *, now: float) -> None:
        """Note that an image was dropped."""
        if self.retry_at is not None:
            self.retry_at = min(self.retry_at, now + RELEASE_PAUSE_S)

    def found(self) -> None:
        """Note that there was some."""
        self.retry_at, self._pause_s, self._has_noted = None, FIRST_PAUSE_S, False

    def is_due(self, *, now: float) -> bool:
        """Return whether to try again now; said once."""
        if self.retry_at is None or now < self.retry_at:
            return False
        self.retry_at = None
        return True


# --- Chunks between their arrival and the version store: verified, written, and only then held ---
#
#     Chunk -> WriteChunk -> [a thread, or here and now] -> `Receiver.written`: held, served,
#     credited
#
# Where a version store may make its writer wait (a mapped file, whose pages the kernel holds back
# when the disk is behind), the work goes to a thread and the loop goes on. In memory it is done at
# once, since a thread costs more than the copy; so are chunks of encoded versions, which lie in
# memory everywhere.
#
# * **Backpressure.** Credit is given for what has been written: what waits in memory is bounded by
#   the windows of the lanes, and a slow disk slows the parent. One that sends far more than its
#   credit is left.
# * **Order.** Writes end in any order; nothing depends on it. A chunk that is being written is not
#   missing (it is not asked for, of whatever parent; a second copy is thrown away), and not held
#   (it is not served).
# * **What becomes of the version store meanwhile** does not matter. Bytes are verified before they
#   are
# written, so what is written late is right. The work keeps the version store lent, so that it is
# not
#   recycled for another version. The result of a write into an item that was dropped is ignored,
#   but for the credit that it frees.
# * **Silence.** While a chunk of a lane is being written its parent is not to blame
#   (`weights/link.py`), and where no credit is left meanwhile, the time does not count for the rate
#   of the link.
# * **A disk that refuses** is as good as full: the item is dropped, and tried again
#   (`weights/receiver.py`).


WRONG_HASH = "its hash is wrong"
"""What `run` returns of a chunk that is not what the learner signed; else the disk is at fault."""


@dataclass(frozen=True, slots=True)
class VersionArrived(Action):
    """A version is complete and verified in the store; a worker may install it."""

    version: PolicyVersion


@dataclass(frozen=True, slots=True, eq=False)
class WriteChunk(Work):
    """Work for a thread: verify one chunk and write it; then call `worked`."""

    item_id: ItemId
    item: Chunked
    index: int
    peer: str
    """The parent that has sent it."""
    data: Frame
    write: Callable[[memoryview, Frame], None]

    def run(self) -> str:
        """Return what is wrong, or nothing."""
        if blake3(self.data).digest() != self.item.chunk_hash(self.index):
            return WRONG_HASH
        try:
            self.write(self.item.place(self.index), self.data)
        except OSError as error:
            return error.strerror or str(error) or "unknown error"
        return ""


# --- Parents that do not deliver: those that are silent, and those that only say that they wait ---
#
# * A lane that is silent for too long (`weights/link.py` says how long) is left for its spare;
#   without one its parent is asked once more, and left at the second silence.
# * A parent that waits itself says so again and again, and is not silent: the fault may lie far
#   above
# it. But offers are not signed, so one that has announced an item and never gets anything of it may
#   be lying. It is left after WAIT_STALLS silences in which nothing has come, or four times the
#   longest pause after which something did come from it: behind a slow link the pauses are long.

WAIT_STALLS = 20
"""Silences (of stall_s) that a parent may wait itself; more than SLOW_AFTER_S in
`weights/sender.py`."""


class Watchdog:
    """Watches the lanes of a node."""

    def __init__(
        self, lanes: StripeLinks, offers: Offers, store: ItemStore, *, stall_s: float
    ) -> None:
        """Start with nothing awaited; everything is shared with the node's `Receiver`."""
        self._lanes = lanes
        self._offers = offers
        self._store = store
        self._stall_s = stall_s
        self._waits: dict[str, float] = {}
        """Parent -> since when it has lived, and nothing new has come from it."""
        self._pauses: dict[str, float] = {}
        """Parent -> the longest such pause that has ended."""

    # --- what is heard ---------------------------------------------------------------------------

    def waits(self, lane: StripeLink, *, again_s: float, now: float) -> None:
        """Note that a parent lives and waits itself, and within how long it says so again."""
        lane.rate.pause()
        self.lives(lane, now=now)
        lane.waits(again_s=again_s)

    def lives(self, lane: StripeLink, *, now: float) -> None:
        """Note that a parent lives, though it may have brought nothing new."""
        lane.lives(now=now)
        if lane.peer is not None:
            self._waits.setdefault(lane.peer, now)

    def came(self, lane: StripeLink, *, now: float) -> None:
        """Note that something of the item has come from a parent."""
        since = self._waits.pop(lane.peer or "", None)
        if since is not None and lane.peer is not None:
            self._pauses[lane.peer] = max(self._pauses.get(lane.peer, 0.0), now - since)

    def forget(self, peer: str) -> None:
        """Forget a parent."""
        self._waits.pop(peer, None)
        self._pauses.pop(peer, None)

    # --- time ------------------------------------------------------------------------------------

    def _may_wait_s(self, peer: str) -> float:
        return max(WAIT_STALLS * self._stall_s, 4 * self._pauses.get(peer, 0.0))

    def _waiting(self, item: ItemId | None) -> list[tuple[StripeLink, str, float]]:
        """Return the lanes whose parents wait for what they have announced, and since when."""
        if not self._waits:
            return []
        return [
            (lane, lane.peer, self._waits[lane.peer])
            for lane in self._lanes
            if lane.peer in self._waits
            and lane.is_pulling
            and not lane.writing_bytes
            and self._offers.has(lane.peer, item)
        ]

    def deadline(self, item: ItemId | None) -> float | None:
        """Return when a parent should be given up, or asked again."""
        silent_at = self._lanes.deadline(self._store.chunk_bytes(item))
        if silent_at is None or not self._waits:
            return silent_at
        waiting = self._waiting(item)
        return earliest(silent_at, *[since + self._may_wait_s(peer) for _, peer, since in waiting])

    def look(
        self, item: ItemId | None, *, now: float
    ) -> tuple[list[tuple[StripeLink, str]], list[StripeLink]]:  # fmt: skip
        """Return the lanes whose parents are to be left, with the reason, and those to ask again.

        Args:
            item: what is being fetched.
            now: the present.
        """
        if item is None:
            self._waits.clear()
        chunk_bytes = self._store.chunk_bytes(item)
        leave = [
            (lane, f"it only says that it waits for {item[0]}, for {now - since:.1f} s")
            for lane, peer, since in self._waiting(item)
            if item is not None and now - since >= self._may_wait_s(peer)
        ]
        left = [lane for lane, _ in leave]
        again = []
        for lane in self._lanes.silent(chunk_bytes, now=now):
            if lane in left:
                continue
            if not lane.is_silent and not lane.has_spare:
                lane.is_silent, lane.progress_at = True, now
                again.append(lane)
                continue
            silence_s = lane.silence_s(chunk_bytes, now=now)
            lane.num_failures += 1
            what = f"no chunk of {item[0]}" if lane.is_pulling and item else "no answer"
            leave.append((lane, f"{what} for {silence_s:.1f} s"))
        return leave, again


# --- The receiver ---


class Receiver:
    """What one node fetches."""

    def __init__(
        self, store: ItemStore, serving: Sender, *, node_id: str, window_bytes: int, stall_s: float
    ) -> None:
        """Start without parents; store and serving are shared with the parent's half."""
        self.store = store
        self.serving = serving
        self.lanes = StripeLinks(first_window_bytes=window_bytes, stall_s=stall_s)
        self.item: ItemId | None = None
        self.bytes_received = 0
        self.rate = RateEstimate()
        """Of all lanes together."""
        self.num_bad_chunks = 0
        self.num_duplicate_chunks = 0
        self.offers = Offers(store)
        self.trust = TrustedManifests()
        self.space = SpaceRetry()
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

    def disconnect(self, lane: StripeLink) -> str:
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
        encoded = None if item is None else self.store.encoded_versions.get(item)
        if item is None or encoded is None or encoded.num_segments or self.offers.is_offered(item):
            return []
        self.end()
        return [*self.serving.drop(item, now=now), *self._consider(now)]

    def resubscribe(self, *, now: float) -> list[Action]:
        """Ask every parent what can be had."""
        return [action for lane in self.lanes for action in self._subscribe(lane, now=now)]

    # --- messages --------------------------------------------------------------------------------

    def heard(self, peer: str) -> StripeLink | None:
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
        self, lane: StripeLink, peer: str, message: Announce, payload: list[Frame], now: float
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

    def resume(self, encoded: EncodedVersion, *, now: float) -> list[Action]:
        """Take what was rebuilt: to serve it if it is whole and done, else to go on fetching it.

        Newer ones must come first, and images before keyframes. What is of no use is removed.
        """
        store, item = self.store, (encoded.version, encoded.form)
        newest = store.newest_complete
        is_past = newest is not None and encoded.version <= newest
        if is_past and encoded.is_complete:
            store.encoded_versions[item] = encoded
            return self.serving.announce(now=now)
        fault = ""
        if is_past or not encoded.num_segments or encoded.version in store.images or self.item:
            fault = "it is of no use any more"
        else:
            try:
                store.resume(encoded)
            except StorageError as error:
                fault = str(error)
        if fault:
            if encoded.journal is not None:
                encoded.journal.remove()
            text = f"dropped what was left here of {encoded.version} as {encoded.form}: {fault}"
            return [Note("info", text)]
        held = [index for index in range(encoded.num_chunks) if encoded.has_chunk[index]]
        decoding = [work for index in held for work in store.decodable(encoded, index)]
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
                self.space.found()
            elif form != FULL and item_id not in self.store.encoded_versions:
                self.store.begin_encoded(item_id, expected_bytes=self.offers.num_bytes(item_id))
        except StorageError as error:
            self.end()
            return [*actions, *self.space.lacks(error, now=now)]
        return [*actions, *self.serving.announce(now=now), *self._request_all(self.item, now)]

    def end(self) -> None:
        """Fetch nothing for now."""
        self.item = None
        self.lanes.finish()

    # --- what comes ------------------------------------------------------------------------------

    def _on_segment(
        self, lane: StripeLink, message: Segment, payload: list[Frame], now: float
    ) -> list[Action]:
        item_id = (message.version, message.form)
        encoded = self.store.encoded_versions.get(item_id)
        if encoded is None or item_id != self.item:
            return []
        if message.index != encoded.num_segments or not encoded.is_open:
            self.watchdog.lives(lane, now=now)
            return []
        if len(payload) != 1:
            raise RemoteProtocolError(f"a Segment of {message.version} without its table")
        table = self.trust.segment(encoded, payload[0])
        self.watchdog.lives(lane, now=now)
        self.watchdog.came(lane, now=now)
        try:
            fault = self.store.add_segment(encoded, table, bytes(payload[0]))
        except StorageError as error:
            self.end()
            dropped = self.serving.drop(item_id, now=now)
            return [*self.space.lacks(error, now=now), *dropped]
        if fault:
            return self._refuse(item_id, fault, now)
        self.space.found()
        return self.serving.extend(item_id, now)

    def decoded(self, work: DecodeBlock, fault: str, *, now: float) -> list[Action | ParentFailed]:
        """Take the result of a block; that of a version that was dropped meanwhile is ignored."""
        item_id = (work.version, work.form)
        if self.store.encoded_versions.get(item_id) is not work.encoded:
            return []
        if fault:
            return [*self._refuse(item_id, f"block {work.block} is wrong: {fault}", now)]
        image = work.encoded.decoded(work)
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

    def _on_gone(self, lane: StripeLink, message: Gone, now: float) -> list[Action | ParentFailed]:
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
        if not lane.has_space(len(data)):
            reason = "it sends far more than it was given credit for"
            return [ParentFailed(self.disconnect(lane), reason)]
        write = self.store.version_store.write
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
        if isinstance(item, EncodedVersion):
            return [*actions, *self.store.decodable(item, index)]
        if item.is_complete:
            return [*actions, *self.arrived(work.item_id, now)]
        return actions

    def _give_credit(self, lane: StripeLink | None, size: int) -> list[Action]:
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
        """Leave an item that the disk refuses, as one for which there is no space."""
        version, _ = work.item_id
        error = StorageError(f"chunk {work.index} of {version} cannot be written: {fault}")
        if self.item == work.item_id:
            self.end()
        return [*self.space.lacks(error, now=now), *self.serving.drop(work.item_id, now=now)]

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
            self.space.released(now=now)
        return [action for item in dropped for action in self.serving.drop(item, now=now)]

    @property
    def deadline(self) -> float | None:
        """When a lane counts as silent, or room is looked for again."""
        return earliest(self.watchdog.deadline(self.item), self.space.retry_at)

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
        if self.space.is_due(now=now):
            actions += self._consider(now)
        # Time alone lets go of little: of what those hold who have been silent for long.
        if now >= self._retired_at + self._stall_s:
            actions += self.retire(now)
        return actions

    # --- what parents are told -------------------------------------------------------------------

    def _subscribe(self, lane: StripeLink, *, now: float) -> list[Action]:
        """Ask a lane's parent what can be had."""
        if lane.peer is None:
            return []
        if not lane.is_asking and not lane.is_pulling:
            lane.progress_at = now
        lane.is_asking = True
        return [self._send(lane.peer, Subscribe(newest=self.store.newest_complete))]

    def _request_all(
        self, item_id: ItemId | None, now: float, lanes: Iterable[StripeLink] | None = None
    ) -> list[Action]:
        """Ask these lanes, or all, for an item."""
        asked = self.lanes if lanes is None else lanes
        return [action for lane in asked for action in self.request(item_id, lane, now)]

    def request(self, item_id: ItemId | None, lane: StripeLink, now: float) -> list[Action]:
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
            num_segments=item.num_segments if isinstance(item, EncodedVersion) else 0,
        )
        return [self._send(lane.peer, fetch)]

    def _is_missing(self, lane: StripeLink, item: Chunked) -> bool:
        """Return whether a lane lacks something of the item, or may be given more of it."""
        share = self.lanes.share(lane)
        return share is not None and item.is_missing(*share)

    def _send_credit(
        self, item_id: ItemId, lane: StripeLink, taken_bytes: int, credit_bytes: int
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
