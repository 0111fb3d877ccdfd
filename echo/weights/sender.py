"""The sender: announces a node's items, and sends children the chunks that they request.

This is the parent's half of the weights plane, whose rules are in `broadcast.py`. A child gets its
chunks in ascending order, within its credit, as soon as this node holds them.

* **Siblings.** Children that fetch the same item are siblings. TCP divides an uplink unevenly, and
  the child with the smallest share would delay all nodes below that child. So no child may be more
  than MAX_LEAD_CHUNKS ahead of its slowest sibling. Siblings do not wait for a child whose next
  chunk this node does not hold. If a child has no credit and is silent, siblings stop waiting for
  this child after the time in which it usually takes SILENT_CHUNKS chunks. Some children have less
  than half of the median rate, for example because of a slow disk. After SLOW_AFTER_S, siblings do
  not wait for such a child. The rate of a child excludes the time in which the child waits for a
  sibling. Otherwise all siblings would seem as slow as the slowest sibling.
* **Together.** Chunks that a child receives within TOGETHER_S are sent in one message, each in its
  own frame, because most of the Python time is spent once per message. On a slow link each chunk is
  a message, so that the child can forward each chunk on arrival.
* **Waiting.** While a child waits for a sibling, or for a chunk that this node does not hold, this
  node sends the message Waiting repeatedly. Otherwise a single stall would make all nodes below
  leave their parents. Each Waiting announces the time until the next Waiting. For a missing chunk
  this time doubles with each Waiting, up to MAX_WAITING_S. For a sibling, or for an item that this
  node does not know, the time is WAITING_PERIOD_S.
* **Pinned.** An item that a child fetches is not evicted. So the store grows at most with the
  number of children. A child that does not react to an announcement is forgotten after
  FORGET_STALLS, because the end of an inbound link may go unnoticed. If the child is alive, the
  learner's next Pulse makes the child subscribe again.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from echo.core.bounds import MAX_CHUNKS
from echo.core.errors import RemoteProtocolError, StorageError
from echo.core.rollout import PolicyVersion
from echo.core.timers import earliest
from echo.weights.link import BUSY_S, MAX_WAITING_S, MAX_WINDOW_BYTES
from echo.weights.rates import SAMPLE_S, UplinkEstimate
from echo.weights.store.encoded import EncodedVersion
from echo.weights.store.items import Chunked, Transfer
from echo.weights.store.store import ItemStore
from echo.wire.actions import Action, Send
from echo.wire.codec import Frame, encode
from echo.wire.messages import (
    FULL,
    OPEN_END,
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

# --- child: its requests, and its pace ------------------------------------------------------------
#
# A Fetch names chunks. Chunks of an encoded version may lie beyond the segments that this node
# knows: they are remembered, and become wanted when the next segment arrives.

PACE_S = 10.0
"""Length of one period, in seconds. A child's pace is measured over the present and the previous
period. In a much shorter period, the pace would depend on single pauses.
"""
TOGETHER_S = 0.005
"""Chunks that a child receives within this many seconds are sent in one message.

Two chunks of 1 MiB share a message if the child takes more than 3 Gbit/s. At each hop, sharing a
message delays its first chunk by at most this time.
"""
TOGETHER_BYTES = 4 << 20
"""Largest size of a message with several chunks, in bytes. Larger messages are not sent faster than
messages of this size, because they exceed the CPU's caches.
"""


class Pace:
    """Measures how many chunks per second a child takes.

    The time in which the child waits for a sibling is excluded. Only recent periods count, so that
    the pace follows a disk or link that stalls or recovers. The pace is kept from one item to the
    next.
    """

    def __init__(self) -> None:
        """Start with a child that has requested no chunk."""
        self.began_at: float | None = None
        """Time of the child's first request; None before the first request."""
        self._runs_since: float | None = None
        self._num_sent, self._busy_s = 0, 0.0
        self._before = 0, 0.0
        """Number of chunks sent in the previous period, and the length of that period in seconds.
        """

    def _count(self, now: float) -> None:
        if self._runs_since is not None:
            self._busy_s += now - self._runs_since
            self._runs_since = now
        if self._busy_s >= PACE_S:
            self._before = self._num_sent, self._busy_s
            self._num_sent, self._busy_s = 0, 0.0

    def run(self, now: float) -> None:
        """Start to count time, because the child wants chunks and may receive chunks."""
        self._count(now)
        self._runs_since = now
        if self.began_at is None:
            self.began_at = now

    def rest(self, now: float) -> None:
        """Stop counting time, because the child wants no chunk or waits for a sibling."""
        self._count(now)
        self._runs_since = None

    def sent(self, num_chunks: int, now: float) -> None:
        """Record that chunks were sent to the child."""
        self.run(now)
        self._num_sent += num_chunks

    def rate(self, now: float) -> float:
        """Return how many chunks per second the child has recently taken."""
        self._count(now)
        return self._rate(1e-3)

    def at_once(self, now: float) -> int:
        """Return the number of chunks to send in one message, at least 1.

        The child takes this number of chunks in TOGETHER_S.
        """
        self._count(now)
        return min(MAX_CHUNKS, max(1, int(self._rate(SAMPLE_S) * TOGETHER_S)))

    def _rate(self, least_s: float) -> float:
        num_sent, busy_s = self._before
        return (num_sent + self._num_sent) / max(busy_s + self._busy_s, least_s)


@dataclass(slots=True)
class Child:
    """A parent's record of one child."""

    is_subscribed: bool = False
    newest: PolicyVersion | None = None
    """The newest complete version that the child has reported; None before a report."""
    announced: object = None
    """The content of the last announcement to the child; None if a new announcement is due."""
    newest_announced: PolicyVersion | None = None
    """The newest version that was announced to the child."""
    fetching: ItemId | None = None
    awaiting: ItemId | None = None
    """The item that the child has requested, if this node does not know the item yet; otherwise
    None.
    """
    ranges: tuple[tuple[int, int], ...] = ()
    """The ranges of chunks that the child has requested, including chunks that this node does not
    know.
    """
    num_known: int = 0
    """Number of the item's known chunks when `wanted` was last extended."""
    wanted: deque[int] = field(default_factory=deque)
    is_open: bool = False
    """Whether the child wants chunks that will be added to the encoded version later."""
    num_segments: int = 0
    credit_bytes: int = 0
    lead: int = 0
    """Number of chunks sent to the child, plus the smallest lead of its siblings when the child
    began to fetch.
    """
    pace: Pace = field(default_factory=Pace)
    acked_at: float = 0.0
    """Time at which the child last acknowledged chunks, or began to fetch."""
    held_at: float | None = None
    """Time since which the child waits for a sibling; None if the child does not wait."""
    last_seen_at: float = 0.0
    waiting_sent_at: float = 0.0
    waiting_s: float = 0.0
    """Seconds until the next Waiting, as the last Waiting to the child announced."""
    unanswered_since: float | None = None
    """Time of an announcement to which the child has not reacted; None if no reaction is awaited.
    """

    def stop(self, now: float) -> None:
        """Forget what the child has requested."""
        self.pace.rest(now)
        self.fetching = self.awaiting = self.held_at = None
        self.ranges, self.num_known, self.is_open = (), 0, False
        self.wanted.clear()

    def begin(self, message: Fetch, *, now: float) -> None:
        """Record the child's request.

        This node must have the requested item, complete or partial.
        """
        self.fetching = (message.version, message.form)
        self.ranges = message.ranges
        self.num_segments, self.credit_bytes = message.num_segments, 0
        self.give(message.credit_bytes)
        self.acked_at = self.waiting_sent_at = now
        self.waiting_s = 0.0
        self.lead = 0
        self.pace.run(now)

    def give(self, credit_bytes: int) -> None:
        """Add credit in bytes, up to a total of MAX_WINDOW_BYTES.

        An honest child never exceeds this total.
        """
        self.credit_bytes = min(self.credit_bytes + credit_bytes, MAX_WINDOW_BYTES)

    def grow(self, item: Chunked) -> None:
        """Add to `wanted` the requested chunks whose hashes have arrived since the last call."""
        num_chunks = item.num_chunks
        for start, stop in self.ranges:
            self.wanted.extend(range(max(start, self.num_known), min(stop, num_chunks)))
        self.num_known = num_chunks
        self.is_open = item.is_open and bool(self.ranges) and self.ranges[-1][1] > num_chunks

    def hold_back(self, now: float) -> None:
        """Record that the child must wait for a sibling."""
        if self.held_at is None:
            self.held_at, self.waiting_s = now, 0.0
            self.pace.rest(now)

    def can_take(self, item: Chunked) -> bool:
        """Return whether the child has credit, and this node holds the child's next chunk."""
        return bool(self.wanted) and self.credit_bytes > 0 and bool(item.has_chunk[self.wanted[0]])

    def take_next(self, num_bytes: int) -> None:
        """Record that the next wanted chunk, of `num_bytes` bytes, is being sent to the child."""
        self.wanted.popleft()
        self.credit_bytes -= num_bytes
        self.lead += 1

    def sent(self, num_chunks: int, now: float) -> None:
        """Record that chunks were sent to the child."""
        self.pace.sent(num_chunks, now)
        self.waiting_sent_at, self.waiting_s = now, 0.0
        self.held_at = None


def check_fetch(message: Fetch, item: Chunked) -> None:
    """Check that each chunk that a Fetch requests is a chunk of the item.

    While an encoded version is open, the number of its chunks is unknown, and each chunk may be
    requested.

    Raises:
        RemoteProtocolError: if a requested chunk lies outside the item.
    """
    is_encoded = message.form != FULL
    previous = 0
    for start, stop in message.ranges:
        # The child may know more tables of an encoded version than this node, or fewer.
        is_known = stop <= item.num_chunks or (is_encoded and (item.is_open or stop == OPEN_END))
        if not (previous <= start < stop and is_known):
            raise RemoteProtocolError(
                f"a Fetch of {message.version} with bad ranges {message.ranges!r:.80}"
            )
        previous = stop


# --- sender ---------------------------------------------------------------------------------------

PIN_STALLS = 10
"""Time, as a multiple of stall_s, for which a child may be silent before its item may be evicted. A
child that is silent for longer has probably gone, and its item takes the memory of a version.
"""
FORGET_STALLS = 60
"""A child is forgotten if it has not reacted to an announcement within this time, a multiple of
stall_s. The time is long, because a child that was forgotten by mistake gets no chunks until it
subscribes again.
"""
MAX_LEAD_CHUNKS = 4
"""Largest number of chunks by which a child may be ahead of its slowest sibling. Without a lead,
each child would wait for every acknowledgement of its siblings."""
MAX_SIBLINGS = 64
"""Largest number of siblings for which a child waits. A node has more children only in a star,
where all nodes share the learner's uplink.
"""
SLOW_AFTER_S = 5.0
"""Seconds of a transfer after which a child's rate is compared with its siblings' rates. It is also
the longest time for which siblings wait for a silent child. In a much shorter time, the rate would
depend on single pauses. In a longer time, a slow child would delay its siblings for longer.
"""
SILENT_CHUNKS = 8
"""Length of a silence after which siblings do not wait for a child. It is given as the number of
chunks that the child would usually take in this time. The silence lasts at least BUSY_S.
"""
WAITING_PERIOD_S = 0.2
"""Seconds from the first to the second Waiting; far less than BUSY_S of a link."""


class Sender:
    """The parent's half of the weights plane: serves a node's children from its store."""

    def __init__(self, store: ItemStore, *, node_id: str, stall_s: float) -> None:
        """Start with no children; `store` is shared with the child's half of this node."""
        self.store = store
        self.node_id = node_id
        self.stall_s = stall_s
        self.children: dict[str, Child] = {}
        self.bytes_sent = 0
        self.rate = UplinkEstimate()
        """The rate of this node's uplink, measured by the bytes that all children acknowledge."""

    # --- messages --------------------------------------------------------------------------------

    def receive(self, peer: str, message: Subscribe | Fetch | Credit, now: float) -> list[Action]:
        """Handle one message of a child.

        Raises:
            RemoteProtocolError: if the child broke a rule of the protocol.
        """
        child = self.children.get(peer)
        if isinstance(message, Credit):
            return self._on_credit(peer, child, message, now)
        child = self.children.setdefault(peer, Child()) if child is None else child
        child.last_seen_at, child.unanswered_since = now, None
        if isinstance(message, Fetch):
            return self._on_fetch(peer, child, message, now)
        child.is_subscribed, child.newest = True, message.newest
        child.announced = child.newest_announced = None
        waiting = self._send(peer, Waiting(version=None))
        return self.announce(peer, now=now) or [waiting]

    def announce(self, *peers: str, now: float) -> list[Action]:
        """Announce the items of the store to `peers`, or to all children.

        A child that knows these items already gets no message.
        """
        announced = self.store.announcement()
        newest = self.store.newest_known
        if announced is None or newest is None:
            return []
        version, offers, manifest = announced
        forms = tuple((offer.version, offer.base) for offer in offers)
        content = version, forms, manifest is None
        actions: list[Action] = []
        for peer in peers or tuple(self.children):
            child = self.children[peer]
            is_news = child.newest is None or child.newest < newest
            if not child.is_subscribed or child.announced == content or not is_news:
                continue
            child.announced = content
            # Another form of a version that it knows needs no reaction.
            if child.unanswered_since is None and (
                child.newest_announced is None or child.newest_announced < newest
            ):
                child.unanswered_since = now
            child.newest_announced = newest
            payload = () if manifest is None else (manifest,)
            actions.append(self._send(peer, Announce(version=version, offers=offers), *payload))
        return actions

    def _on_fetch(self, peer: str, child: Child, message: Fetch, now: float) -> list[Action]:
        item_id = (message.version, message.form)
        item = self.store.get(item_id)
        if item is None or not item.can_be_sent:
            child.stop(now)
            return self._lacks(peer, child, item_id, now)
        check_fetch(message, item)
        child.stop(now)
        child.begin(message, now=now)
        child.lead = min((other.lead for _, other in self._siblings(peer, child)), default=0)
        child.grow(item)
        actions = self._segments(peer, child, item) if isinstance(item, EncodedVersion) else []
        if sent := self._serve(peer, child, now):
            return actions + sent
        return [*actions, self._send(peer, Waiting(version=message.version, form=message.form))]

    def _lacks(self, peer: str, child: Child, item_id: ItemId, now: float) -> list[Action]:
        """Answer a child that requests an item that this node lacks.

        The answer is Waiting if the item may still arrive, and otherwise Gone.
        """
        newest = self.store.newest_known
        version, form = item_id
        if newest is None or newest < version:
            # Unknown here, as after a restart: the child keeps its chunks and asks again.
            child.awaiting = item_id
            return [self._send_waiting(peer, child, item_id, now)]
        # Announce again, so that the child can pick another item.
        child.awaiting = child.announced = None
        gone = self._send(peer, Gone(version=version, form=form))
        return [gone, *self.announce(peer, now=now)]

    def _on_credit(
        self, peer: str, child: Child | None, message: Credit, now: float
    ) -> list[Action]:
        if child is None or child.fetching != (message.version, message.form):
            return []
        child.last_seen_at, child.unanswered_since = now, None
        child.give(message.credit_bytes)
        self.rate.add(message.taken_bytes, now=now, since=child.acked_at)
        child.acked_at = now
        sent = self._serve(peer, child, now)
        self._note_load(now)
        return sent

    def _note_load(self, now: float) -> None:
        """Report the share of the fetching children that the uplink does not limit.

        The uplink does not limit a child that fetches alone, or whose next chunk this node lacks.
        The uplink limits a child that waits for a sibling.
        """
        if not self.children and self.rate.is_paused:
            return
        fetching = [child for child in self.children.values() if child.fetching is not None]
        num_waiting = sum(map(self._lacks_next, fetching))
        share = num_waiting / len(fetching) if len(fetching) > 1 else 1.0
        self.rate.wait(share, now=now)

    # --- chunks ----------------------------------------------------------------------------------

    def _siblings(self, peer: str, child: Child) -> list[tuple[str, Child]]:
        return [
            (name, other)
            for name, other in self.children.items()
            if name != peer and other.fetching is not None and other.fetching == child.fetching
        ]

    def _serve(self, peer: str, child: Child, now: float) -> list[Action]:
        """Send chunks to a child, and then to the siblings that waited for this child."""
        actions: list[Action] = []
        if child.fetching is None:
            return actions
        siblings = self._siblings(peer, child)
        if not siblings or len(siblings) > MAX_SIBLINGS:
            return self._send_chunks(peer, child, None, now)
        everyone = [(peer, child), *siblings]
        has_moved = True
        while has_moved:
            has_moved, limit = False, self._limit(everyone, now)
            for name, other in everyone:
                sent = self._send_chunks(name, other, limit, now)
                has_moved = has_moved or bool(sent)
                actions += sent
        return actions

    def _patience_s(self, child: Child, now: float) -> float:
        """Return how long siblings wait for a silent child without credit, in seconds."""
        return min(max(SILENT_CHUNKS / max(child.pace.rate(now), 1e-3), BUSY_S), SLOW_AFTER_S)

    def _limit(self, family: list[tuple[str, Child]], now: float) -> int | None:
        """Return the largest `lead` that a child in `family` may reach; None for no limit.

        `family` has a child and its siblings, which all fetch the same item. The limit is
        MAX_LEAD_CHUNKS above the smallest lead of the children for which siblings wait.
        """
        members = [
            child
            for _, child in family
            if child.wanted
            and not self._lacks_next(child)
            and (child.credit_bytes > 0 or now - child.last_seen_at < self._patience_s(child, now))
        ]
        rates = {
            id(child): child.pace.rate(now)
            for child in members
            if child.pace.began_at is not None and now - child.pace.began_at >= SLOW_AFTER_S
        }
        median = statistics.median_high(rates.values()) if rates else 0.0
        leads = [child.lead for child in members if rates.get(id(child), median) >= 0.5 * median]
        return min(leads) + MAX_LEAD_CHUNKS if leads else None

    def _send_chunks(self, peer: str, child: Child, limit: int | None, now: float) -> list[Action]:
        """Send a child its wanted chunks in order, within the child's credit and `limit`.

        `limit` is the largest `lead` that the child may reach; None for no limit. Sending stops at
        the first chunk that this node does not hold.
        """
        actions: list[Action] = []
        if child.fetching is None:
            return actions
        version, form = child.fetching
        item = self.store.get(child.fetching)
        assert item is not None
        most = max(1, TOGETHER_BYTES // self.store.chunk_bytes(child.fetching))
        most = min(most, child.pace.at_once(now))
        try:
            while found := self._next_chunks(child, item, limit, most):
                first, *others = found
                message = Chunk(version=version, index=first, form=form, others=tuple(others))
                frames = encode(message, list(found.values()), source=self.node_id)
                actions.append(Send(peer, frames, is_public=item.is_encrypted))
                child.sent(len(found), now)
        except StorageError:
            child.stop(now)
            return [*actions, *self._lacks(peer, child, (version, form), now)]
        if child.can_take(item):
            child.hold_back(now)
        if not child.wanted and not child.is_open:
            child.stop(now)
        if all(other.fetching is None for other in self.children.values()):
            self.rate.pause()
        return actions

    def _next_chunks(
        self, child: Child, item: Chunked, limit: int | None, most: int
    ) -> dict[int, Frame]:
        """Return up to `most` chunks for the child's next message, by index.

        Raises:
            StorageError: if a chunk no longer matches its hash.
        """
        found: dict[int, Frame] = {}
        while len(found) < most and child.can_take(item) and (limit is None or child.lead < limit):
            index = child.wanted[0]
            found[index] = item.chunk(index)
            child.take_next(len(found[index]))
            self.bytes_sent += len(found[index])
        return found

    def forward(self, item: ItemId, chunks: Mapping[int, Frame], now: float) -> list[Action]:
        """Send newly written chunks to the children that wait for these chunks.

        Args:
            item: the item of the chunks.
            chunks: the chunks by index, in the form in which they are sent.
            now: the present time.
        """
        image = self.store.get(item) if self.children else None
        if isinstance(image, Transfer):
            for index, data in chunks.items():
                image.passed_on(index, data)
        actions = [
            action
            for peer, child in tuple(self.children.items())
            if child.fetching == item and child.wanted and child.wanted[0] in chunks
            for action in self._serve(peer, child, now)
        ]
        self._note_load(now)
        return actions

    def extend(self, item: ItemId, now: float) -> list[Action]:
        """Send children the table of a new segment, and the segment's chunks that are held here."""
        encoded = self.store.encoded_versions.get(item)
        actions: list[Action] = []
        for peer, child in tuple(self.children.items()):
            if encoded is not None and child.fetching == item:
                child.grow(encoded)
                actions += self._segments(peer, child, encoded)
                actions += self._serve(peer, child, now)
        return actions

    def _segments(self, peer: str, child: Child, encoded: EncodedVersion) -> list[Action]:
        first = child.num_segments
        child.num_segments = max(first, encoded.num_segments)
        return [
            self._send(
                peer,
                Segment(version=encoded.version, form=encoded.form, index=index),
                encoded.frames[index],
            )
            for index in range(first, encoded.num_segments)
        ]

    # --- keeping and dropping --------------------------------------------------------------------

    def pinned(self, now: float) -> set[ItemId]:
        """The complete items that children are fetching. These items must not be evicted.

        A partial item may be evicted: if this node now fetches a newer version, it never completes
        the partial item.
        """
        return {
            child.fetching
            for child in self.children.values()
            if child.fetching is not None
            and now - child.last_seen_at <= PIN_STALLS * self.stall_s
            and (item := self.store.get(child.fetching)) is not None
            and item.is_complete
        }

    def dropped(self, item: ItemId, *, now: float) -> list[Action]:
        """Send Gone for a dropped item to the children that were fetching it."""
        version, form = item
        actions: list[Action] = []
        for peer, child in self.children.items():
            if child.fetching == item:
                child.stop(now)
                child.announced = None
                actions.append(self._send(peer, Gone(version=version, form=form)))
                actions += self.announce(peer, now=now)
        return actions

    def forget_silent(self, now: float) -> None:
        """Forget each child that has not reacted to an announcement within FORGET_STALLS."""
        for peer, child in list(self.children.items()):
            since = child.unanswered_since
            if since is not None and now - since > FORGET_STALLS * self.stall_s:
                del self.children[peer]

    # --- time ------------------------------------------------------------------------------------

    def _lacks_next(self, child: Child) -> bool:
        item = None if child.fetching is None else self.store.get(child.fetching)
        if item is None:  # dropped; the child gets its Gone next
            return False
        return child.is_open if not child.wanted else not item.has_chunk[child.wanted[0]]

    def _waits(self, child: Child) -> bool:
        is_held = child.held_at is not None or child.awaiting is not None
        return is_held or (child.credit_bytes > 0 and self._lacks_next(child))

    @property
    def deadline(self) -> float | None:
        """The time at which the next Waiting is due; None if no child waits."""
        return earliest(
            *[
                _waiting_due_at(child)
                for child in self.children.values()
                if (child.fetching is not None or child.awaiting is not None) and self._waits(child)
            ]
        )

    def expire(self, now: float) -> list[Action]:
        """Send each waiting child its available chunks; send Waiting if no chunk is available."""
        actions: list[Action] = []
        for peer, child in tuple(self.children.items()):
            if not self._waits(child) or now < _waiting_due_at(child):
                continue
            if child.awaiting is not None:
                actions += self._await(peer, child, child.awaiting, now)
                continue
            sent = self._serve(peer, child, now) if child.held_at is not None else []
            actions += sent
            if not sent and child.fetching is not None:
                actions.append(self._send_waiting(peer, child, child.fetching, now))
        return actions

    def _await(self, peer: str, child: Child, item: ItemId, now: float) -> list[Action]:
        """Answer a child whose requested item this node did not know.

        The answer is again Waiting or Gone. If this node knows the item by now, there is no answer,
        because an Announce of the item was sent to the child.
        """
        if self.store.get(item) is None:
            return self._lacks(peer, child, item, now)
        child.awaiting = None  # The item was announced; the child asks again if that was lost.
        return []

    def _send_waiting(self, peer: str, child: Child, item: ItemId, now: float) -> Send:
        is_awaited = child.held_at is not None or child.awaiting is not None
        doubled = WAITING_PERIOD_S if is_awaited else 2 * child.waiting_s
        child.waiting_s = min(max(doubled, WAITING_PERIOD_S), MAX_WAITING_S)
        child.waiting_sent_at = now
        version, form = item
        return self._send(peer, Waiting(version=version, form=form, again_s=child.waiting_s))

    def _send(self, peer: str, message: Message, *payload: Frame) -> Send:
        return Send(peer, encode(message, payload, source=self.node_id))


def _waiting_due_at(child: Child) -> float:
    return child.waiting_sent_at + max(child.waiting_s, WAITING_PERIOD_S)
