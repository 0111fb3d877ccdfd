"""Swarm: neighbours with spare uplink offer turns, receivers name the chunks.

A candidate that no role uses: bench_swarm.py measures it beside the planned plane
(`echo/weights/broadcast.py`), which it replaces once it is ahead in every fleet, first version and
warm.

A node exchanges the chunks of items (`store.py`) with a given set of neighbours. There is no plan,
no tree and no estimate of anybody's link: an uplink that is free again sooner gives more turns.

    server                      receiver
      Have(chunks)       <->              what is new here, to all neighbours, now and then
      Turn(number, count) ->              "I can send you so many chunks of this item"
                         <-  Want         the rarest that it lacks and nobody is bringing, or none
      Chunk, Chunk, ...   ->              in the order of the answers, few in the socket at a time
                         <-  Cancel       they have come from others meanwhile; near the end only
                         <-  Tables       asks for the manifest, or for tables that it lacks

("Most deprived neighbour, random useful packet" is optimal where uplinks are the limit: Massoulie,
Twigg, Gkantsidis and Rodriguez 2007.)

**Serve.** A turn goes to the neighbour that lacks most of what is held here. As many chunks are out
on turns, answered or in the socket as the uplink can take while an answer is on its way (`ahead`),
one more whenever the socket ran dry although turns were out. The source names chunks in its turns,
those that it has sent least: each leaves it once before any leaves it twice, and first to those
neighbours that pass on most (their last known uplinks are weights, which may be wrong).

**Receive.** Chunks that are under way from anybody are not asked for again. One that is late by
far counts as lost and may be asked of others. A neighbour from which a chunk would come after all
else brings only what nobody else holds. Near the end, when neighbours have turns for which there is
nothing left, they are asked for what somebody slow is bringing, and the later of the two is
cancelled.

**Fill the uplink, not its queue.** The chunks in the socket (`slots`) are what matters to TCP: too
few, and connections that are used now and then never reach their rate; too many, and everybody's
turns and acknowledgements wait behind them. Both are seen without the kernel's help. Turns pass
through the queue of the uplink and are answered at once, so the least of the last answer times,
beyond the least ever, is the wait in that queue; and a chunk that is long in the socket shares the
uplink with too many. So slots grow while neither shows, and shrink when one does. What is promised
beyond the socket is bounded by time, too: what waits here might come from others meanwhile.

**Leaves.** A node whose uplink is a small part of what it takes gives no turns while it takes: its
acknowledgements share that uplink, and would slow what comes by more than it gives. (Over the
emulated WAN this is worth more than all else where four of five uplinks are slow.)

**Hints.** Who may be a neighbour is given (`meet`), by plan, region, price or NAT: who cannot be
reached or may not be charged is no neighbour, or is not served. What is known of uplinks is kept
from item to item.

**Trust.** A chunk is verified by `WriteChunk` before it is held, told, forwarded or credited. A
neighbour that sends wrong ones is left. Nothing that a neighbour says is held against anybody else,
and everything that it says is bounded: runs by MAX_CHUNKS, what waits for it by MAX_WAITING.

**Failure is nothing special.** Who is gone, mute or late is not waited for; what it was to bring is
missing again.

The plane around decides which items are fetched (`want`), and what becomes of a whole one. Chunks
of an item that is still being coded are spread as its tables become known (`extend`).
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from echo.core.bounds import clamped_rate
from echo.core.errors import RemoteProtocolError
from echo.weights.link import MAX_BAD_CHUNKS
from echo.weights.manifest import encode_signed
from echo.weights.receiver import WRONG_HASH, WriteChunk
from echo.weights.store import Chunked, EncodedVersion, ItemStore, Transfer
from echo.wire.actions import Action, Note, Send
from echo.wire.codec import Frame, encode
from echo.wire.messages import (
    Announce,
    Cancel,
    Chunk,
    Gone,
    ItemId,
    Message,
    Segment,
)
from swarm.chunk_sets import Rarity, indices, runs_of, set_of
from swarm.messages import MAX_CHUNKS, Have, Tables, Turn, Want

TELL_S = 0.3
"""Between two times that a node tells what is new here."""
LOOK_S = 0.1
"""Between two looks for what is late."""
BACKLOG_S = 0.25
"""What is promised or on turns beyond the socket, in time of the uplink."""
TURN_S = 2.0
"""After which a turn that was not answered is taken back."""
LATE_TURN_S = 0.15
"""After which a turn that was not answered holds up nobody else's."""
LOST_S = 1.0
"""After which a chunk that was asked for counts as lost, at least; four times the usual time."""
FIRST_SLOTS, LEAST_SLOTS, MAX_SLOTS = 2, 4, 16
MAX_AHEAD = 64
MAX_TURN = 8
"""Chunks of one turn."""
MAX_WAITING = 256
"""Chunks that one neighbour may have asked for and not yet been sent."""
MAX_HEARD = 16
"""Items that a neighbour may speak of before this node knows them."""
ADJUST_S = 0.05
QUEUED_S = (0.03, 0.09)
"""Wait in the queue of the uplink below which slots grow, and above which they shrink."""
SOCKET_S = (0.22, 0.45)
"""The same for the time of a chunk in the socket."""
STUCK_S = 2.0
"""After which a chunk in the socket of one neighbour takes no slot of the others."""
LEAF_SHARE = 0.25
"""Of what a node takes; with a smaller uplink it serves nobody meanwhile."""
LEAF_AFTER_S = 1.0
"""Busy time of the uplink before which it is not judged."""
SAMPLE_S = 0.5
"""Busy time from which a rate is told."""


@dataclass(frozen=True, slots=True)
class ItemArrived(Action):
    """Every chunk of an item is held and verified."""

    item_id: ItemId


@dataclass(frozen=True, slots=True)
class NeighbourFailed(Action):
    """A neighbour broke a rule of the swarm; the role must leave it."""

    peer: str
    reason: str


@dataclass(slots=True, eq=False)
class _Neighbour:
    """What is known of one neighbour, whatever the item."""

    name: str
    peer: str
    """The link for messages."""
    bulk: str | None
    """The link for chunks to it; None if it is not served."""
    uplink: float = 0.0
    """Bytes/s that it was seen to send, by its own account; 0 where it has said nothing."""
    pace_s: float | None = None
    """Smoothed seconds from asking it to arrival."""
    base_s: float | None = None
    """Least time in which it answered a turn."""
    is_mute: bool = False
    """It let a turn expire: none for it until it is heard."""
    is_idle: bool = False
    """I passed its last turn."""
    in_socket: deque[tuple[int, float]] = field(default_factory=deque)
    """(bytes, since when) of the chunks handed over for it."""
    heard: dict[ItemId, Have] = field(default_factory=dict)
    """Of items that are not known here yet."""
    num_bad_chunks: int = 0
    fresh_bytes: int = 0
    """Of chunks that left the source for the first time."""


@dataclass(frozen=True, slots=True)
class _Turn:
    to: _Neighbour
    item_id: ItemId
    num_chunks: int
    named: tuple[int, ...]
    at: float


@dataclass(slots=True, eq=False)
class _Spread:
    """One item on its way through the neighbours."""

    item_id: ItemId
    item: Chunked
    is_source: bool
    held: int = 0
    full: int = 0
    theirs: dict[str, int] = field(default_factory=dict)
    wanting: dict[str, None] = field(default_factory=dict)
    """Neighbours that lack any of it, in the order in which they said so."""
    tables: dict[str, int] = field(default_factory=dict)
    rarity: Rarity = field(default_factory=Rarity)
    # Receiving
    under_way: dict[int, dict[str, float]] = field(default_factory=dict)
    """Chunk -> neighbours asked for it, and since when."""
    flight: int = 0
    """The same as a set."""
    untold: int = 0
    asked_tables_at: float = -1e9
    # Serving
    allotted: dict[str, int] = field(default_factory=dict)
    """Chunks on turns that were not answered."""
    promised: dict[str, int] = field(default_factory=dict)
    """Sets: asked for, and not known to have come."""
    passed: dict[str, int] = field(default_factory=dict)
    """Sets: what was held here when the neighbour passed."""
    sent: dict[int, int] = field(default_factory=dict)
    """How often the source has named or sent a chunk."""
    fresh: list[int] = field(default_factory=list)
    """What has not left the source, the last first."""

    @property
    def is_wanting(self) -> bool:
        return self.held != self.full or self.item.is_open

    def lacking(self, name: str) -> int:
        """Return what of this a neighbour lacks, has not asked for and did not pass on."""
        beyond = self.theirs.get(name, 0) | self.promised.get(name, 0) | self.passed.get(name, 0)
        return self.held & ~beyond


class Swarm:
    """One node's part in the exchange of chunks."""

    def __init__(
        self, store: ItemStore, *, node_id: str, can_serve: bool = True, seed: int = 0
    ) -> None:
        """Start without neighbours and items.

        Args:
            store: where the items are; the caller makes room for them and drops them.
            node_id: name of this node.
            can_serve: whether it may send chunks at all.
            seed: of what is left to chance.
        """
        self.num_duplicate_chunks = self.num_bad_chunks = self.num_expired_turns = 0
        self.bytes_received = self.bytes_sent = 0
        self.uplink = Rate()
        self.slots = FIRST_SLOTS
        self._store, self._node_id, self._can_serve = store, node_id, can_serve
        self._chance = random.Random(seed)
        self._neighbours: dict[str, _Neighbour] = {}
        self._names: dict[str, str] = {}
        """Link -> neighbour."""
        self._spreads: dict[ItemId, _Spread] = {}
        self._turns: dict[int, _Turn] = {}
        self._num_turns = 0
        self._ready: deque[tuple[_Neighbour, _Spread, int]] = deque()
        self._num_in_socket = 0
        self._chunk_bytes = 0
        self._ahead = FIRST_SLOTS
        self._answers: deque[float] = deque(maxlen=16)
        """How much longer than ever before the last turns took to be answered."""
        self._adjusted_at = 0.0
        self._was_full = False
        self._socket_s = 0.0
        self._taken = Rate()
        self._every_s: float | None = None
        """Smoothed seconds between two chunks that were new."""
        self._last_at: float | None = None
        self._told_at = self._looked_at = -1e9

    # --- neighbours ------------------------------------------------------------------------------

    def meet(self, name: str, peer: str, bulk: str | None, *, now: float) -> list[Action]:
        """Exchange chunks with a neighbour from now on.

        Args:
            name: its node id.
            peer: the link over which messages go to it.
            bulk: the link over which chunks go to it; None if it is not to be served.
            now: the present.
        """
        self.leave(name, now=now)
        neighbour = self._neighbours[name] = _Neighbour(name, peer, bulk)
        self._names[peer] = name
        if bulk is not None:
            self._names[bulk] = name
        actions: list[Action] = []
        for spread in self._spreads.values():
            actions += self._introduce(spread, neighbour)
        return actions

    def leave(self, name: str, *, now: float) -> list[Action]:
        """Forget a neighbour; what it was to bring is missing again."""
        gone = self._neighbours.pop(name, None)
        if gone is None:
            return []
        self._names = {peer: other for peer, other in self._names.items() if other != name}
        self._num_in_socket -= len(gone.in_socket)
        self._turns = {n: turn for n, turn in self._turns.items() if turn.to is not gone}
        self._ready = deque(one for one in self._ready if one[0] is not gone)
        for spread in self._spreads.values():
            spread.rarity.remove(spread.theirs.pop(name, 0))
            spread.wanting.pop(name, None)
            for by_name in (spread.tables, spread.allotted, spread.promised, spread.passed):
                by_name.pop(name, None)
            for index in [i for i, asked in spread.under_way.items() if name in asked]:
                self._not_from(spread, index, name)
        return [*self._steal(now), *self._go_on(now)]

    # --- items -----------------------------------------------------------------------------------

    def publish(self, item_id: ItemId, *, now: float) -> list[Action]:
        """Spread an item of which this node is the source; it may still be open."""
        return self._begin(item_id, is_source=True, now=now)

    def want(self, item_id: ItemId, *, now: float) -> list[Action]:
        """Fetch what is missing of an item in the store, and serve what is there."""
        return self._begin(item_id, is_source=False, now=now)

    def extend(self, item_id: ItemId, *, now: float) -> list[Action]:
        """Go on with an item whose table has grown."""
        spread = self._spreads.get(item_id)
        if spread is None:
            return []
        before, tables = spread.full, getattr(spread.item, "num_segments", 0)
        self._count(spread)
        actions: list[Action] = []
        if spread.is_source and isinstance(spread.item, EncodedVersion):
            for neighbour in self._neighbours.values():
                had = spread.tables.get(neighbour.name, 0)
                actions += self._tables(spread, neighbour, had)
                spread.tables[neighbour.name] = tables
        if spread.full == before:
            return actions
        return [*actions, *self._tell(now), *self._go_on(now)]

    def drop(self, item_id: ItemId, *, now: float) -> list[Action]:
        """Neither fetch nor serve an item any more."""
        spread = self._spreads.pop(item_id, None)
        if spread is None:
            return []
        self._ready = deque(one for one in self._ready if one[1] is not spread)
        self._turns = {n: turn for n, turn in self._turns.items() if turn.item_id != item_id}
        gone = encode(Gone(version=item_id[0], form=item_id[1]), source=self._node_id)
        actions: list[Action] = [Send(each.peer, gone) for each in self._neighbours.values()]
        return [*actions, *self._go_on(now)]

    def _begin(self, item_id: ItemId, *, is_source: bool, now: float) -> list[Action]:
        item = self._store.get(item_id)
        if item is None or item_id in self._spreads:
            return []
        spread = self._spreads[item_id] = _Spread(item_id, item, is_source)
        self._count(spread)
        self._last_at = None
        self._ahead = max(self.slots, self._ahead // 2)
        actions: list[Action] = []
        for neighbour in self._neighbours.values():
            if is_source:
                actions += self._tables(spread, neighbour, 0)
                spread.tables[neighbour.name] = getattr(item, "num_segments", 0)
            actions += self._introduce(spread, neighbour)
            heard = neighbour.heard.pop(item_id, None)
            if heard is not None:
                self._hear(spread, neighbour, heard)
        spread.untold = 0
        return [*actions, *self._go_on(now)]

    def _count(self, spread: _Spread) -> None:
        """Read what is held from the item; chunks may have been added to it."""
        has_chunk = spread.item.has_chunk
        if len(has_chunk) > MAX_CHUNKS:
            raise ValueError(f"an item of {len(has_chunk)} chunks; at most {MAX_CHUNKS} may spread")
        known = spread.full.bit_length()
        added = 0
        for index in range(known, len(has_chunk)):
            if has_chunk[index]:
                added |= 1 << index
        spread.full = (1 << len(has_chunk)) - 1
        spread.held |= added
        spread.untold |= added
        if spread.is_source:
            fresh = list(range(known, len(has_chunk)))
            self._chance.shuffle(fresh)
            spread.fresh[:0] = fresh

    def _introduce(self, spread: _Spread, neighbour: _Neighbour) -> list[Action]:
        """Tell a neighbour all that is held of an item."""
        return [Send(neighbour.peer, self._have(spread, spread.held))]

    def _have(self, spread: _Spread, bits: int) -> list[Frame]:
        version, form = spread.item_id
        rate = self.uplink.bytes_per_s if self._can_serve else None
        have = Have(
            version=version,
            form=form,
            runs=runs_of(bits),
            is_wanting=spread.is_wanting,
            num_segments=getattr(spread.item, "num_segments", 0),
            uplink_bytes_per_s=clamped_rate(rate),
        )
        return encode(have, source=self._node_id)

    def _tables(self, spread: _Spread, to: _Neighbour, first: int) -> list[Action]:
        """Send the manifest of an image, or the tables of an encoded version from one on."""
        (version, form), item = spread.item_id, spread.item
        if isinstance(item, Transfer):
            if item.signed is None:
                return []
            signed = encode_signed(item.signed)
            return [
                Send(to.peer, encode(Announce(version=version), [signed], source=self._node_id))
            ]
        assert isinstance(item, EncodedVersion)
        return [
            Send(
                to.peer,
                encode(
                    Segment(version=version, form=form, index=index),
                    [item.frames[index]],
                    source=self._node_id,
                ),
            )
            for index in range(first, item.num_segments)
        ]

    # --- messages --------------------------------------------------------------------------------

    def receive(
        self, peer: str, message: Message, payload: list[Frame], *, now: float
    ) -> list[Action]:
        """Handle a message of a neighbour; others are ignored, and so are those of the plane.

        Raises:
            RemoteProtocolError: if it broke a rule.
        """
        neighbour = self._neighbours.get(self._names.get(peer, ""))
        if neighbour is None:
            return []
        neighbour.is_mute = False
        match message:
            case Chunk():
                return self._on_chunk(neighbour, message, payload, now)
            case Turn():
                return self._on_turn(neighbour, message, now)
            case Want():
                return self._on_want(neighbour, message, now)
            case Have():
                return self._on_have(neighbour, message, now)
            case Cancel():
                return self._on_cancel(neighbour, message, now)
            case Tables():
                spread = self._spreads.get((message.version, message.form))
                return (
                    [] if spread is None else self._tables(spread, neighbour, message.num_segments)
                )
            case Gone():
                return self._on_gone(neighbour, (message.version, message.form), now)
        return []

    def _on_have(self, neighbour: _Neighbour, message: Have, now: float) -> list[Action]:
        item_id = (message.version, message.form)
        if message.uplink_bytes_per_s is not None:
            neighbour.uplink = message.uplink_bytes_per_s
        spread = self._spreads.get(item_id)
        if spread is None:
            bits = set_of(message.runs)
            before = neighbour.heard.pop(item_id, None)
            if before is not None:
                bits |= set_of(before.runs)
            neighbour.heard[item_id] = Have(
                version=message.version,
                form=message.form,
                runs=runs_of(bits),
                is_wanting=message.is_wanting,
                num_segments=message.num_segments,
            )
            if len(neighbour.heard) > MAX_HEARD:
                del neighbour.heard[next(iter(neighbour.heard))]
            return []
        self._hear(spread, neighbour, message)
        return [*self._ask_tables(spread, now), *self._go_on(now)]

    def _hear(self, spread: _Spread, neighbour: _Neighbour, message: Have) -> None:
        name = neighbour.name
        told = set_of(message.runs)
        new = told & ~spread.theirs.get(name, 0)
        spread.theirs[name] = spread.theirs.get(name, 0) | new
        spread.rarity.add(new)
        if name in spread.promised:
            spread.promised[name] &= ~told
        spread.tables[name] = max(spread.tables.get(name, 0), message.num_segments)
        if message.is_wanting:
            spread.wanting[name] = None
        else:
            spread.wanting.pop(name, None)

    def _ask_tables(self, spread: _Spread, now: float) -> list[Action]:
        """Ask a neighbour for tables that it has; the source sends its own unasked."""
        item = spread.item
        if not isinstance(item, EncodedVersion) or spread.is_source or not item.is_open:
            return []
        able = [n for n, count in spread.tables.items() if count > item.num_segments]
        if not able or now - spread.asked_tables_at < TURN_S / 4:
            return []
        spread.asked_tables_at = now
        name = self._chance.choice(able)
        version, form = spread.item_id
        wanted = Tables(version=version, form=form, num_segments=item.num_segments)
        return [self._send(self._neighbours[name].peer, wanted)]

    def _on_gone(self, neighbour: _Neighbour, item_id: ItemId, now: float) -> list[Action]:
        neighbour.heard.pop(item_id, None)
        spread, name = self._spreads.get(item_id), neighbour.name
        if spread is None:
            return []
        spread.rarity.remove(spread.theirs.pop(name, 0))
        spread.wanting.pop(name, None)
        spread.tables.pop(name, None)
        for index in [i for i, asked in spread.under_way.items() if name in asked]:
            self._not_from(spread, index, name)
        return self._go_on(now)

    # --- serving ---------------------------------------------------------------------------------

    def left(self, peer: str, unsent_bytes: int, *, now: float) -> list[Action]:
        """Note how much of what was handed over for a link still waits for its socket."""
        neighbour = self._neighbours.get(self._names.get(peer, ""))
        if neighbour is None or not neighbour.in_socket:
            return []
        waiting = neighbour.in_socket
        total = sum(size for size, _ in waiting)
        did_leave = False
        while waiting and total - waiting[0][0] >= unsent_bytes:
            size, since = waiting.popleft()
            total -= size
            did_leave = True
            self._num_in_socket -= 1
            self.uplink.add(size)
            took = now - since
            self._socket_s = 0.7 * (self._socket_s or took) + 0.3 * took
        if not did_leave:
            return []
        self.uplink.look(now)
        self._adjust(now)
        if not self._num_in_socket:
            self.uplink.pause(now)
        actions = self._fill(now)
        if self._num_in_socket < self.slots and not self._ready and self._turns:
            self._ahead = min(self._most_ahead, self._ahead + 1)
        return [*actions, *self._go_on(now)]

    @property
    def _most_ahead(self) -> int:
        """The bound of `ahead`: what waits longer than an answer takes might come from others."""
        rate = self.uplink.bytes_per_s
        chunk_bytes = self._chunk_bytes
        if rate is None or not chunk_bytes:
            return MAX_AHEAD // 4
        return min(MAX_AHEAD, self.slots + 1 + int(BACKLOG_S * rate / chunk_bytes))

    @property
    def _most_slots(self) -> int:
        """The bound of `slots`: on a slow uplink several chunks at a time would all come late."""
        rate = self.uplink.bytes_per_s
        if rate is None or not self._chunk_bytes:
            return MAX_SLOTS
        return min(MAX_SLOTS, 1 + int(BACKLOG_S * rate / self._chunk_bytes))

    @property
    def links_in_use(self) -> list[str]:
        """Links for chunks that something was handed over for; `left` is to be told of them."""
        return [each.bulk for each in self._neighbours.values() if each.in_socket and each.bulk]

    @property
    def is_leaf(self) -> bool:
        """Whether this node serves nobody, as its uplink is a small part of what it takes."""
        up, down = self.uplink.bytes_per_s, self._taken.bytes_per_s
        is_taking = any(spread.is_wanting for spread in self._spreads.values())
        if not is_taking or up is None or down is None or self.slots > 1:
            return False
        return self.uplink.total_s > LEAF_AFTER_S and up < LEAF_SHARE * down

    def _go_on(self, now: float) -> list[Action]:
        """Keep some turns out, so that the uplink never waits for an answer."""
        if not self._can_serve or self.is_leaf:
            return []
        actions: list[Action] = []
        busy = len(self._ready) + self._num_in_socket
        busy += sum(t.num_chunks for t in self._turns.values() if now - t.at < LATE_TURN_S)
        while busy < self._ahead:
            size = max(1, min(MAX_TURN, self.slots // 2, self._ahead - busy))
            turn = self._next_turn(size, now)
            if turn is None:
                break
            busy += turn.num_chunks
            self._num_turns += 1
            self._turns[self._num_turns] = turn
            spread = self._spreads[turn.item_id]
            name = turn.to.name
            spread.allotted[name] = spread.allotted.get(name, 0) + turn.num_chunks
            version, form = turn.item_id
            actions.append(
                self._send(
                    turn.to.peer,
                    Turn(
                        version=version,
                        form=form,
                        number=self._num_turns,
                        num_chunks=turn.num_chunks,
                        named=turn.named,
                    ),
                )
            )
        return actions

    def _next_turn(self, size: int, now: float) -> _Turn | None:
        best: tuple[float, _Spread, _Neighbour] | None = None
        for spread in self._spreads.values():
            if spread.is_source and spread.fresh:
                turn = self._fresh_turn(spread, size, now)
                if turn is not None:
                    return turn
            for name in spread.wanting:
                neighbour = self._neighbours[name]
                if neighbour.bulk is None or neighbour.is_mute:
                    continue
                count = spread.lacking(name).bit_count() - spread.allotted.get(name, 0)
                useful = count + self._chance.random()
                if count >= 1 and (best is None or useful > best[0]):
                    best = useful, spread, neighbour
        if best is None:
            return None
        useful, spread, neighbour = best
        size = min(size, int(useful))
        named: tuple[int, ...] = ()
        if spread.is_source:
            least = sorted(
                indices(spread.lacking(neighbour.name)),
                key=lambda index: (spread.sent.get(index, 0), self._chance.random()),
            )
            named = tuple(least[:size])
            self._note_sent(spread, named, 1)
        return _Turn(neighbour, spread.item_id, size, named, now)

    def _fresh_turn(self, spread: _Spread, size: int, now: float) -> _Turn | None:
        """Return a turn for chunks that have not left yet, shared out by uplinks."""
        able = [
            each
            for name in spread.wanting
            if (each := self._neighbours[name]).bulk is not None
            and not each.is_mute
            and spread.allotted.get(name, 0) < 2 * size
        ]
        if not able:
            return None
        known = [each.uplink for each in able if each.uplink]
        usual = sum(known) / len(known) if known else 1.0
        neighbour = min(
            able,
            key=lambda each: ((each.fresh_bytes + 1) / (each.uplink or usual), each.name),
        )
        named = tuple(spread.fresh[-size:])
        del spread.fresh[-size:]
        neighbour.fresh_bytes += len(named)
        self._note_sent(spread, named, 1)
        return _Turn(neighbour, spread.item_id, len(named), named, now)

    def _note_sent(self, spread: _Spread, chunks: Iterable[int], by: int) -> None:
        """Count what leaves the source; what is not wanted after all is fresh again."""
        for index in chunks:
            spread.sent[index] = spread.sent.get(index, 0) + by
            if not spread.sent[index]:
                spread.fresh.append(index)

    def _on_want(self, neighbour: _Neighbour, message: Want, now: float) -> list[Action]:
        spread = self._spreads.get((message.version, message.form))
        turn = self._turns.get(message.number)
        if turn is not None and turn.to is neighbour:
            self._answered(message, turn, now)
        if spread is None:
            return self._go_on(now)
        name = neighbour.name
        if not message.chunks:
            spread.passed[name] = spread.held
            return self._go_on(now)
        spread.passed.pop(name, None)
        num_waiting = sum(each is neighbour for each, _, _ in self._ready)
        if num_waiting + len(message.chunks) > MAX_WAITING:
            raise RemoteProtocolError(f"it asks for more than {MAX_WAITING} chunks at a time")
        for index in message.chunks:
            if not spread.held >> index & 1:
                raise RemoteProtocolError(f"it asks for chunk {index}, which was not offered")
            spread.promised[name] = spread.promised.get(name, 0) | 1 << index
            self._ready.append((neighbour, spread, index))
        return [*self._fill(now), *self._go_on(now)]

    def _answered(self, message: Want, turn: _Turn, now: float) -> None:
        """Learn from the answer to a turn how long the queue of the uplink is."""
        del self._turns[message.number]
        neighbour, took = turn.to, now - turn.at
        if neighbour.base_s is None or took < neighbour.base_s:
            neighbour.base_s = took
        self._answers.append(took - neighbour.base_s)
        spread = self._spreads.get(turn.item_id)
        if spread is not None:
            spread.allotted[neighbour.name] -= turn.num_chunks
            if turn.named:
                self._note_sent(spread, set(turn.named) - set(message.chunks), -1)
                self._note_sent(spread, set(message.chunks) - set(turn.named), 1)
        self._adjust(now)

    def _adjust(self, now: float) -> None:
        """Set the number of chunks in the socket by what they are seen to do to the uplink."""
        if now - self._adjusted_at < ADJUST_S or not self._answers:
            return
        self._adjusted_at = now
        queued_s = min(self._answers)
        if self._socket_s > SOCKET_S[1]:
            self.slots = max(1, self.slots - 1)
        elif queued_s > QUEUED_S[1]:
            self.slots = max(min(self.slots, LEAST_SLOTS), self.slots - 1)
        elif self._was_full and queued_s < QUEUED_S[0] and self._socket_s < SOCKET_S[0]:
            self.slots = min(self._most_slots, self.slots + 1)
            self._ahead = max(self._ahead, self.slots + 1)
        self.slots = min(self.slots, self._most_slots)
        self._was_full = False
        if len(self._ready) > self.slots or self._ahead > self._most_ahead:
            self._ahead = max(self.slots + 1, self._ahead - 1)

    def _on_cancel(self, neighbour: _Neighbour, message: Cancel, now: float) -> list[Action]:
        item_id, chunks = (message.version, message.form), set(message.chunks)
        self._ready = deque(
            one
            for one in self._ready
            if one[0] is not neighbour or one[1].item_id != item_id or one[2] not in chunks
        )
        return self._go_on(now)

    def _fill(self, now: float) -> list[Action]:
        """Hand chunks over while there are slots."""
        actions: list[Action] = []
        num_stuck = sum(
            len(each.in_socket)
            for each in self._neighbours.values()
            if each.in_socket and now - each.in_socket[0][1] > STUCK_S
        )
        most = max(1, (self.slots + 1) // 2)
        waiting = self._ready
        while waiting and self._num_in_socket - min(num_stuck, MAX_SLOTS) < self.slots:
            place = next((i for i, one in enumerate(waiting) if len(one[0].in_socket) < most), None)
            if place is None:
                break
            neighbour, spread, index = waiting[place]
            del waiting[place]
            if neighbour.bulk is None:
                continue
            data = spread.item.chunk(index)
            if not self._num_in_socket:
                self.uplink.go(now)
            neighbour.in_socket.append((len(data), now))
            self._chunk_bytes = max(self._chunk_bytes, len(data))
            self._num_in_socket += 1
            self.bytes_sent += len(data)
            version, form = spread.item_id
            chunk = Chunk(version=version, form=form, index=index)
            actions.append(Send(neighbour.bulk, encode(chunk, [data], source=self._node_id)))
        self._was_full |= bool(waiting) or self._num_in_socket >= self.slots
        return actions

    # --- receiving -------------------------------------------------------------------------------

    def _on_turn(self, neighbour: _Neighbour, message: Turn, now: float) -> list[Action]:
        spread = self._spreads.get((message.version, message.form))
        chunks = () if spread is None else self._choose(spread, neighbour, message, now)
        neighbour.is_idle = not chunks
        answer = Want(
            version=message.version, form=message.form, number=message.number, chunks=chunks
        )
        return [self._send(neighbour.peer, answer)]

    def _choose(
        self, spread: _Spread, neighbour: _Neighbour, message: Turn, now: float
    ) -> tuple[int, ...]:
        """Return what a neighbour is to bring now."""
        name = neighbour.name
        missing = spread.full & ~spread.held & ~self._being_written(spread)
        named = 0
        for index in message.named:
            named |= 1 << index
        new = (spread.theirs.get(name, 0) | named) & missing & ~spread.flight
        if self._is_too_slow(spread, neighbour):
            for other, held in spread.theirs.items():
                if other != name:
                    new &= ~held
        chosen: list[int] = []
        while new and len(chosen) < message.num_chunks:
            preferred = new & named
            index = self._pick(preferred or spread.rarity.rarest(new), spread.full.bit_length())
            new &= ~(1 << index)
            chosen.append(index)
        for index in chosen:
            self._ask(spread, index, name, now)
        if not chosen and (late := self._latest(spread, neighbour, now)) is not None:
            self._ask(spread, late, name, now)
            chosen = [late]
        return tuple(chosen)

    def _being_written(self, spread: _Spread) -> int:
        bits = 0
        for index in spread.item.writing:
            bits |= 1 << index
        return bits

    def _pick(self, among: int, num_chunks: int) -> int:
        """Return one of a set, by chance."""
        at = self._chance.randrange(num_chunks)
        rest = among >> at
        return at + (rest & -rest).bit_length() - 1 if rest else (among & -among).bit_length() - 1

    def _is_too_slow(self, spread: _Spread, neighbour: _Neighbour) -> bool:
        """Return whether a chunk from this neighbour would come after everything else."""
        if self._every_s is None or neighbour.pace_s is None or spread.item.is_open:
            return False
        num_left = spread.item.num_chunks - spread.item.num_held
        least = min(each.pace_s for each in self._neighbours.values() if each.pace_s is not None)
        return neighbour.pace_s > max(0.5 * self._every_s * num_left, 2 * least)

    def _ask(self, spread: _Spread, index: int, name: str, now: float) -> None:
        spread.under_way.setdefault(index, {})[name] = now
        spread.flight |= 1 << index

    def _not_from(self, spread: _Spread, index: int, name: str) -> None:
        """Note that a neighbour does not bring a chunk any more."""
        asked = spread.under_way.get(index, {})
        asked.pop(name, None)
        if not asked:
            spread.under_way.pop(index, None)
            spread.flight &= ~(1 << index)

    def _on_chunk(
        self, neighbour: _Neighbour, message: Chunk, payload: list[Frame], now: float
    ) -> list[Action]:
        item_id, index, name = (message.version, message.form), message.index, neighbour.name
        spread = self._spreads.get(item_id)
        if len(payload) != 1:
            raise RemoteProtocolError(f"a Chunk of {message.version} without its bytes")
        data = payload[0]
        self.bytes_received += len(data)
        if spread is None:
            return []
        since = spread.under_way.get(index, {}).get(name)
        if since is not None:
            took = now - since
            pace_s = neighbour.pace_s
            neighbour.pace_s = took if pace_s is None else 0.5 * (pace_s + took)
            self._not_from(spread, index, name)
        item = spread.item
        if index >= item.num_chunks:
            raise RemoteProtocolError(f"chunk {index} of {message.version}, which has no such")
        if item.has_chunk[index] or index in item.writing:
            self.num_duplicate_chunks += 1
            return []
        write = self._store.version_store.write if self._store.may_block(item_id) else None
        work = WriteChunk(item_id, item, index, name, data, write)
        if len(data) != item.chunk_size(index):
            return self._refuse(work, now)
        item.writing.add(index)
        if not self._store.may_block(item_id):
            return self.written(work, work.run(), now=now)
        return [work]

    def written(self, work: WriteChunk, fault: str, *, now: float) -> list[Action]:
        """Take the result of a WriteChunk."""
        item, index, item_id = work.item, work.index, work.item_id
        item.writing.discard(index)
        spread = self._spreads.get(item_id)
        if spread is None or spread.item is not item:
            return []
        if fault == WRONG_HASH:
            return self._refuse(work, now)
        if fault:
            text = f"chunk {index} of {item_id[0]} cannot be written: {fault}"
            return [Note("warning", text), *self.drop(item_id, now=now)]
        item.mark(index)
        spread.held |= 1 << index
        spread.untold |= 1 << index
        self._note_new(len(work.data), now)
        actions: list[Action] = []
        for other in spread.under_way.pop(index, {}):
            version, form = item_id
            cancel = Cancel(version=version, form=form, chunks=(index,))
            actions.append(self._send(self._neighbours[other].peer, cancel))
        spread.flight &= ~(1 << index)
        if isinstance(item, EncodedVersion):
            actions += self._store.decodable(item, index)
        if item.is_complete:
            self._taken.pause(now)
            return [*actions, *self._tell(now), ItemArrived(item_id), *self._go_on(now)]
        if now - self._told_at >= TELL_S:
            actions += self._tell(now)
        return [*actions, *self._go_on(now)]

    def _note_new(self, num_bytes: int, now: float) -> None:
        if self._last_at is None:
            self._taken.go(now)
        else:
            gap = now - self._last_at
            every_s = self._every_s
            self._every_s = gap if every_s is None else every_s + 0.05 * (gap - every_s)
        self._last_at = now
        self._taken.add(num_bytes)
        self._taken.look(now)

    def _refuse(self, work: WriteChunk, now: float) -> list[Action]:
        """Ask somebody for a chunk again that was wrong, and leave who sends such."""
        self.num_bad_chunks += 1
        version, _ = work.item_id
        text = f"chunk {work.index} of {version} from {work.peer} does not match its hash"
        actions: list[Action] = [Note("warning", text)]
        neighbour = self._neighbours.get(work.peer)
        if neighbour is not None:
            neighbour.num_bad_chunks += 1
            if neighbour.num_bad_chunks >= MAX_BAD_CHUNKS:
                actions += [*self.leave(work.peer, now=now), NeighbourFailed(neighbour.peer, text)]
        return actions

    # --- the end, and what is late ---------------------------------------------------------------

    def _left_s(self, asked: dict[str, float], now: float) -> float:
        """Return in how long a chunk that is under way may be expected: the later it is, longer."""
        live = [
            (name, now - since) for name, since in asked.items() if now - since < self._lost_s(name)
        ]
        if len(live) > 1:
            return 0.0  # two are enough
        if not live:
            return 1e9
        [(name, so_far)] = live
        pace_s = self._neighbours[name].pace_s
        return max((0.5 if pace_s is None else pace_s) - so_far, 0.3 * so_far, 0.05)

    def _lost_s(self, name: str) -> float:
        pace_s = self._neighbours[name].pace_s
        return max(LOST_S, 4 * (0.25 if pace_s is None else pace_s))

    def _latest(self, spread: _Spread, neighbour: _Neighbour, now: float) -> int | None:
        """Return what takes longest to come, if this neighbour brings it clearly sooner."""
        mine = 0.05 if neighbour.pace_s is None else neighbour.pace_s
        best, longest = None, 1.3 * mine
        offered = spread.theirs.get(neighbour.name, 0)
        for index, asked in spread.under_way.items():
            if offered >> index & 1 and neighbour.name not in asked:
                left_s = self._left_s(asked, now)
                if left_s > longest:
                    best, longest = index, left_s
        return best

    def _steal(self, now: float) -> list[Action]:
        """Ask idle neighbours for what is missing, or what somebody slow is bringing."""
        idle = [each for each in self._neighbours.values() if each.is_idle and not each.is_mute]
        actions: list[Action] = []
        for spread in self._spreads.values():
            if not idle or not spread.full & ~spread.held:
                continue
            for left_s, index in self._late(spread, now):
                asked = spread.under_way.get(index, {})
                able = [
                    each
                    for each in idle
                    if each.name not in asked and spread.theirs.get(each.name, 0) >> index & 1
                ]
                if not able:
                    continue
                quickest = min(able, key=lambda each: each.pace_s or 0.05)
                if left_s <= 1.3 * (quickest.pace_s or 0.05):
                    continue
                idle.remove(quickest)
                quickest.is_idle = False
                self._ask(spread, index, quickest.name, now)
                version, form = spread.item_id
                want = Want(version=version, form=form, number=0, chunks=(index,))
                actions.append(self._send(quickest.peer, want))
        return actions

    def _late(self, spread: _Spread, now: float) -> list[tuple[float, int]]:
        """Return (seconds until it may come, chunk) of all that is missing, the latest first."""
        alone = spread.full & ~spread.held & ~spread.flight & ~self._being_written(spread)
        late = [(1e9, index) for index in indices(alone)]
        late += [(self._left_s(asked, now), i) for i, asked in spread.under_way.items()]
        return sorted(late, reverse=True)

    @property
    def deadline(self) -> float | None:
        """When `expire` should be called next; None while nothing is under way."""
        is_busy = self._turns or any(
            spread.is_wanting or spread.untold for spread in self._spreads.values()
        )
        return self._looked_at + LOOK_S if is_busy else None

    def expire(self, *, now: float) -> list[Action]:
        """Tell what is new, take back turns that were not answered, look for what is late."""
        self._looked_at = now
        for number in [n for n, turn in self._turns.items() if now - turn.at > TURN_S]:
            turn = self._turns.pop(number)
            turn.to.is_mute = True
            self.num_expired_turns += 1
            spread = self._spreads.get(turn.item_id)
            if spread is not None:
                spread.allotted[turn.to.name] -= turn.num_chunks
                self._note_sent(spread, turn.named, -1)
        actions = self._tell(now) if now - self._told_at >= TELL_S else []
        for spread in self._spreads.values():
            for index, asked in list(spread.under_way.items()):
                for name in [n for n, since in asked.items() if now - since > self._lost_s(n)]:
                    self._not_from(spread, index, name)
            actions += self._ask_tables(spread, now)
        return [*actions, *self._steal(now), *self._fill(now), *self._go_on(now)]

    def _tell(self, now: float) -> list[Action]:
        """Tell all neighbours what is new here."""
        actions: list[Action] = []
        for spread in self._spreads.values():
            if spread.untold:
                frames = self._have(spread, spread.untold)
                spread.untold = 0
                self._told_at = now
                actions += [Send(each.peer, frames) for each in self._neighbours.values()]
        return actions

    def _send(self, peer: str, message: Message) -> Send:
        return Send(peer, encode(message, source=self._node_id))


class Rate:
    """Bytes per second of the time in which there was something to carry."""

    def __init__(self) -> None:
        """Start without a sample."""
        self.bytes_per_s: float | None = None
        self.total_s = 0.0
        """Busy time so far."""
        self._num_bytes = 0
        self._busy_s = 0.0
        self._since: float | None = None

    def go(self, now: float) -> None:
        """Count time from now on."""
        if self._since is None:
            self._since = now

    def add(self, num_bytes: int) -> None:
        """Count bytes."""
        self._num_bytes += num_bytes

    def pause(self, now: float) -> None:
        """Count no time from now on."""
        self.look(now)
        self._since = None

    def look(self, now: float) -> None:
        """Make a sample of the busy time so far, if it was long enough."""
        if self._since is not None:
            self._busy_s += now - self._since
            self.total_s += now - self._since
            self._since = now
        if self._busy_s < SAMPLE_S or not self._num_bytes:
            return
        sample = self._num_bytes / self._busy_s
        # What was sent shows what can be sent at least; there may have been too little to send.
        self.bytes_per_s = max(sample, 0.8 * (self.bytes_per_s or 0.0))
        self._num_bytes, self._busy_s = 0, 0.0
