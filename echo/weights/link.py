"""The link to the parent: the states, the credit window and the timeout.

**States** (`TABLE`). `disconnect` leads from every other state to alone. `connect` cannot happen
while there is a parent, `subscribe` and `fetch` cannot happen without a parent; they raise an
error. In each state, all other events that the drawing does not name are ignored.

    alone             --connect--> idle
    idle              --subscribe--> subscribed        --fetch--> requested
    subscribed        --message--> idle                --fetch--> requested
                      --silence--> subscribed_again    --silence_with_spare--> alone
    subscribed_again  --message--> idle                --fetch--> requested
                      --silence--> alone               --silence_with_spare--> alone
    requested         --lives--> fetching              --waits--> waiting
                      --silence--> requested_again     --silence_with_spare--> alone
                      --complete--> idle
    requested_again   --lives--> fetching              --waits--> waiting
                      --silence--> alone               --silence_with_spare--> alone
                      --complete--> idle
    fetching          --fetch--> requested             --waits--> waiting
                      --silence--> requested_again     --silence_with_spare--> alone
                      --complete--> idle
    waiting           --fetch--> requested             --lives--> fetching
                      --silence--> requested_again     --silence_with_spare--> alone
                      --complete--> idle

Events are members of an enum, not dataclasses, because no state depends on a value of an event. The
values (times, bytes) change only the window and the timeout, so each method takes its own. The link
sends no messages, so its methods return no actions.

**Credit and backpressure.** The window limits the bytes that are under way or wait to be written.
The size of the window is 1.5 x rate x round trip + 2 chunks for each connection, at the measured
rate of this link. A long link has several connections (`echo/net/zmq.py`). The window grows by half
with each round trip until the link is full, and shrinks with the rate.

**Timeout.** While the node awaits a message, the parent counts as silent after `patience_s` without
a chunk or a Waiting. `patience_s` is the longest of three times: four round trips, four chunks at
the measured rate, and three times the longest gap between two recent chunks. Gaps occur if many
children share an uplink. If there is a spare parent, the node leaves its parent at the first
silence. Without a spare parent the node repeats its request once, and leaves the parent at the
second silence. These rules change or bound `patience_s`:

* With a spare parent, `patience_s` is at least BUSY_S.
* Without a spare parent, `patience_s` is at least the configured time. The same holds for the first
  chunk after a request, because all children request this chunk at the same time.
* While the rate of the link is unknown, `patience_s` is the configured time. This time doubles with
  each parent that the node leaves because of a silence, up to MAX_PATIENCE_S. Otherwise a slow link
  would never deliver a chunk.
* Each Waiting announces the time of the next Waiting. The next Waiting may arrive up to
  BUSY_S after that time.
* There is no limit while a chunk is being written. If the disk is slower than the link, the parent
  has no credit and cannot send.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from echo.core.bounds import num_connections
from echo.core.errors import LocalProtocolError
from echo.core.tables import IGNORED, IMPOSSIBLE, Move
from echo.weights.rates import RateEstimate

# --- window ---------------------------------------------------------------------------------------

LOOP_S = 0.001
"""Seconds that a busy node needs to answer, added to the round trip of the network."""


def window_bytes(rate: float | None, rtt_s: float | None, chunk_bytes: int, *, first: int) -> int:
    """Return the size of the credit window: how many requested bytes should be under way.

    One bandwidth-delay product keeps the link full. The window has half a product more, so that
    the estimated rate can grow when the window itself is the limit. Each connection adds two
    chunks, because a chunk is being handled at each end. A larger window would fill the queue of a
    slow uplink and delay later messages.

    Args:
        rate: bytes per second of this link; None if not measured yet.
        rtt_s: round-trip time of this link; None if not measured yet.
        chunk_bytes: size of a chunk, in bytes.
        first: the window while the rate or the round-trip time is unknown.
    """
    least = 2 * chunk_bytes * (1 if rtt_s is None else num_connections(rtt_s))
    if rate is None or rtt_s is None:
        return min(max(first, least), MAX_WINDOW_BYTES)
    return int(min(1.5 * rate * (rtt_s + LOOP_S) + least, MAX_WINDOW_BYTES))


# --- states ---------------------------------------------------------------------------------------


class LinkState(StrEnum):
    """The state of a link: the message that the node awaits from its parent."""

    ALONE = "alone"
    """The node has no parent."""
    IDLE = "idle"
    """The node awaits no message."""
    SUBSCRIBED = "subscribed"
    """The node awaits the answer to Subscribe."""
    SUBSCRIBED_AGAIN = "subscribed_again"
    """The node has repeated Subscribe because of a silence, and awaits the answer."""
    REQUESTED = "requested"
    """The node awaits the first chunk after a Fetch."""
    REQUESTED_AGAIN = "requested_again"
    """The node has repeated Fetch because of a silence, and awaits chunks."""
    FETCHING = "fetching"
    """The node awaits further chunks."""
    WAITING = "waiting"
    """The node awaits chunks that the parent has not received yet."""


class LinkEvent(StrEnum):
    """An event on the link to a parent."""

    CONNECT = "connect"
    """The node has a new parent."""
    DISCONNECT = "disconnect"
    """The connection to the parent has ended, or the node leaves the parent."""
    SUBSCRIBE = "subscribe"
    """The node has sent Subscribe."""
    FETCH = "fetch"
    """The node has sent Fetch."""
    MESSAGE = "message"
    """The parent has sent a message of any kind."""
    LIVES = "lives"
    """The parent has sent a chunk or table of the requested item."""
    WAITS = "waits"
    """The parent has sent Waiting for the requested item."""
    COMPLETE = "complete"
    """The node awaits no further chunks."""
    SILENCE = "silence"
    """The parent was silent for `patience_s`, and there is no spare parent."""
    SILENCE_WITH_SPARE = "silence_with_spare"
    """The parent was silent for `patience_s`, and there is a spare parent."""


_Steps = dict[LinkEvent, Move[LinkState]]
"""For each event, what it does in one state."""


def _row(moves: dict[LinkEvent, LinkState], *impossible: LinkEvent) -> _Steps:
    """Return what each event does in a state, from the next states and the impossible events."""
    row: _Steps = dict.fromkeys(LinkEvent, IGNORED) | dict.fromkeys(impossible, IMPOSSIBLE)
    return row | {event: Move(then) for event, then in moves.items()}


def _table() -> dict[LinkState, _Steps]:
    s, e = LinkState, LinkEvent
    over = {e.DISCONNECT: s.ALONE}
    first = {**over, e.SILENCE_WITH_SPARE: s.ALONE}
    second = {**first, e.SILENCE: s.ALONE}
    moves = {
        s.IDLE: {**over, e.SUBSCRIBE: s.SUBSCRIBED, e.FETCH: s.REQUESTED},
        s.SUBSCRIBED: {
            **first, e.MESSAGE: s.IDLE, e.FETCH: s.REQUESTED, e.SILENCE: s.SUBSCRIBED_AGAIN
        },
        s.SUBSCRIBED_AGAIN: {**second, e.MESSAGE: s.IDLE, e.FETCH: s.REQUESTED},
        s.REQUESTED: {
            **first,
            e.LIVES: s.FETCHING,
            e.WAITS: s.WAITING,
            e.COMPLETE: s.IDLE,
            e.SILENCE: s.REQUESTED_AGAIN,
        },
        s.REQUESTED_AGAIN: {
            **second, e.LIVES: s.FETCHING, e.WAITS: s.WAITING, e.COMPLETE: s.IDLE
        },
        s.FETCHING: {
            **first,
            e.FETCH: s.REQUESTED,
            e.WAITS: s.WAITING,
            e.COMPLETE: s.IDLE,
            e.SILENCE: s.REQUESTED_AGAIN,
        },
        s.WAITING: {
            **first,
            e.FETCH: s.REQUESTED,
            e.LIVES: s.FETCHING,
            e.COMPLETE: s.IDLE,
            e.SILENCE: s.REQUESTED_AGAIN,
        },
    }  # fmt: skip
    alone = _row({e.CONNECT: s.IDLE}, e.SUBSCRIBE, e.FETCH)
    return {s.ALONE: alone} | {state: _row(row, e.CONNECT) for state, row in moves.items()}


TABLE = _table()
"""For each state and each event, what the event does in this state."""

_AWAITS_ANSWER = frozenset({LinkState.SUBSCRIBED, LinkState.SUBSCRIBED_AGAIN})
_AWAITS_CHUNKS = frozenset(
    {LinkState.REQUESTED, LinkState.REQUESTED_AGAIN, LinkState.FETCHING, LinkState.WAITING}
)
_ASKED_AGAIN = frozenset({LinkState.SUBSCRIBED_AGAIN, LinkState.REQUESTED_AGAIN})

# --- link: credit and patience --------------------------------------------------------------------

BUSY_S = 0.5
"""Seconds for which a healthy node may be silent, because its event loop is busy. With a spare
parent, `patience_s` is at least this time. A promised Waiting may be late by this time. With a much
shorter time, a node would leave each parent that is busy for a moment. With a longer time, all
nodes below a dead parent would wait longer.
"""
MAX_PATIENCE_S = 60.0
"""Longest `patience_s` in seconds, unless the configured time is longer. Without this limit, a node
whose link was slow for a while could wait hours for a dead parent.
"""
MAX_WAITING_S = 1.6
"""Longest time between two Waitings of a parent, in seconds. A waiting child detects the death of
its parent only after this time. If a Waiting announces a longer time, this time is assumed instead.
"""
GAP_MEMORY = 0.98
"""With each chunk, the recorded longest gap is multiplied by this factor, so that old gaps are
forgotten. After 35 chunks, a gap counts half.
"""
MAX_WINDOW_BYTES = 64 << 20
"""Largest credit window in bytes: a parent may have to queue this number of bytes for one child."""
MAX_WRITING_WINDOWS = 4
"""Largest number of bytes that have arrived on a link and still wait to be written, as a multiple
of MAX_WINDOW_BYTES. The factor exceeds 1, because the chunks of a repeated request may arrive
twice.
"""
MAX_BAD_CHUNKS = 3
"""Number of chunks with a wrong hash after which the node leaves the parent. A single wrong chunk
may come from a memory error.
"""


@dataclass(frozen=True, slots=True)
class ParentFailed:
    """The parent does not deliver, so the role must choose another parent."""

    peer: str
    reason: str
    is_corrupt: bool = False
    """Whether the parent sent chunks that do not match the hashes that the learner signed."""


@dataclass(slots=True, eq=False)
class ParentLink:
    """The child's end of the link to its parent, with state, credit and patience."""

    first_window_bytes: int
    stall_s: float
    """Seconds for which the parent may be silent while the rate of the link is unknown."""
    state: LinkState = LinkState.ALONE
    peer: str | None = None
    has_spare: bool = False
    """Whether there is a spare parent. If there is, the node leaves the parent at the first
    silence.
    """
    rtt_s: float | None = None
    rate: RateEstimate = field(default_factory=RateEstimate)
    window: int = 0
    unspent_bytes: int = 0
    """Number of bytes that were written since this node last gave credit to the parent."""
    writing_bytes: int = 0
    """Number of bytes that have arrived and are not written yet."""
    progress_at: float = 0.0
    longest_gap_s: float = 0.0
    """Longest gap between two recent chunks, in seconds."""
    promised_s: float = 0.0
    """Seconds until the next Waiting, as the last Waiting announced; 0 if the parent is sending
    chunks.
    """
    unmeasured_patience_s: float = field(init=False)
    """`patience_s` while the rate of the link is unknown. It doubles with each silent parent that
    this node leaves, and a measured rate resets it.
    """
    num_bad_chunks: int = 0

    def __post_init__(self) -> None:
        self.unmeasured_patience_s = self.stall_s

    def _move(self, event: LinkEvent) -> None:
        step = TABLE[self.state][event]
        if step is IMPOSSIBLE:
            raise LocalProtocolError(f"{event} of a link that is {self.state}")
        if step.then is not None:
            self.state = step.then

    @property
    def awaits_answer(self) -> bool:
        """Whether the node awaits the answer to its Subscribe."""
        return self.state in _AWAITS_ANSWER

    @property
    def awaits_chunks(self) -> bool:
        """Whether the node awaits chunks of an item."""
        return self.state in _AWAITS_CHUNKS

    def connect(self, peer: str | None, *, rtt_s: float | None) -> None:
        """Set the parent; None for no parent. The peer must have answered."""
        self._move(LinkEvent.DISCONNECT)
        if peer is not None:
            self._move(LinkEvent.CONNECT)
        if peer is None or rtt_s is not None:
            self.rtt_s = rtt_s
        self.peer, self.num_bad_chunks = peer, 0
        # The former link's window may be far too large for this one.
        self.rate, self.window = RateEstimate(), 0
        self.unspent_bytes = self.writing_bytes = 0
        self.longest_gap_s = self.promised_s = 0.0

    def subscribe(self, *, now: float) -> None:
        """Record that this node has sent Subscribe."""
        if self.state is LinkState.IDLE:
            self.progress_at = now
        self._move(LinkEvent.SUBSCRIBE)

    def on_message(self) -> None:
        """Record that the parent has sent a message of any kind."""
        self._move(LinkEvent.MESSAGE)

    def fetch(self, *, now: float) -> int:
        """Record that this node sends Fetch; return the credit to put into the Fetch.

        The credit is the window minus all bytes that are still being written.
        """
        self._move(LinkEvent.FETCH)
        self.window = self.window or self.first_window_bytes
        self.unspent_bytes = 0
        self.progress_at, self.promised_s = now, 0.0
        self.rate.pause()
        return max(0, self.window - self.writing_bytes)

    def has_space(self, num_bytes: int) -> bool:
        """Return whether `num_bytes` more bytes may wait to be written.

        The limit is far above the credit that this node gives to a parent.
        """
        return self.writing_bytes + num_bytes <= MAX_WRITING_WINDOWS * MAX_WINDOW_BYTES

    @property
    def can_bring(self) -> bool:
        """Whether the node awaits chunks, and the parent has enough credit to send them."""
        return self.awaits_chunks and self.window > self.unspent_bytes + self.writing_bytes

    def received(self, num_bytes: int, *, now: float) -> None:
        """Record that a chunk has arrived. The caller then verifies and writes the chunk."""
        gap_s = 0.0 if self.rate.is_paused else now - self.progress_at
        self.longest_gap_s = max(gap_s, GAP_MEMORY * self.longest_gap_s)
        self.lives(now=now)
        self.rate.add(num_bytes, now=now)
        self.writing_bytes += num_bytes
        if self.rate.bytes_per_s is not None:
            self.unmeasured_patience_s = self.stall_s

    def released(self, num_bytes: int, *, now: float) -> None:
        """Record that a chunk was written or discarded.

        From now on, the parent's silence is counted again.
        """
        self.writing_bytes -= num_bytes
        self.progress_at = now

    def took(self, num_bytes: int, *, chunk_bytes: int) -> tuple[int, int]:
        """Record that this node holds a chunk; return (bytes to acknowledge, credit to give).

        Both numbers are 0 until the bytes to acknowledge are a quarter of the window.
        """
        self.unspent_bytes += num_bytes
        if self.unspent_bytes < self.window // 4:
            return 0, 0
        wanted = window_bytes(self.rate.bytes_per_s, self.rtt_s, chunk_bytes, first=self.window)
        taken, self.unspent_bytes = self.unspent_bytes, 0
        credit = max(0, taken + wanted - self.window)
        self.window += credit - taken
        return taken, credit

    def lives(self, *, now: float) -> None:
        """Record that the parent has sent a part of the requested item."""
        self._move(LinkEvent.LIVES)
        self.progress_at, self.promised_s = now, 0.0

    def waits(self, *, again_s: float, now: float) -> None:
        """Record that the parent has sent Waiting and will repeat it within `again_s`."""
        self._move(LinkEvent.WAITS)
        self.progress_at = now
        self.promised_s = min(again_s, MAX_WAITING_S)  # a longer time is not accepted
        self.rate.pause()

    def complete(self) -> None:
        """Record that all parts of the item have arrived, or that the fetch was stopped."""
        self._move(LinkEvent.COMPLETE)
        self.rate.pause()

    def silence(self, *, now: float) -> bool:
        """Record that the parent was silent for too long; return whether to leave the parent."""
        event = LinkEvent.SILENCE_WITH_SPARE if self.has_spare else LinkEvent.SILENCE
        is_left = TABLE[self.state][event].then is LinkState.ALONE
        if is_left:  # the caller leaves the parent, by `connect`
            self.unmeasured_patience_s = min(2 * self.unmeasured_patience_s, self._most_patience_s)
        else:
            self._move(event)
            self.progress_at = now
        return is_left

    def patience_s(self, chunk_bytes: int) -> float:
        """Return for how many seconds the parent may be silent."""
        usual = self._usual_patience_s(chunk_bytes)
        promised = self.promised_s + BUSY_S if self.promised_s else 0.0
        return usual if usual > promised else promised

    def _usual_patience_s(self, chunk_bytes: int) -> float:
        rate = self.rate.bytes_per_s
        if rate is None or self.rtt_s is None:
            return self.unmeasured_patience_s
        is_first = self.state in (LinkState.REQUESTED, LinkState.REQUESTED_AGAIN)
        least = BUSY_S if self.has_spare and not is_first else self.stall_s
        chunks_s = 4 * chunk_bytes / rate if rate > 1.0 else 4.0 * chunk_bytes
        longest = max(least, 4 * self.rtt_s, chunks_s, 3 * self.longest_gap_s)
        most = self._most_patience_s
        return longest if longest < most else most

    @property
    def _most_patience_s(self) -> float:
        return self.stall_s if self.stall_s > MAX_PATIENCE_S else MAX_PATIENCE_S

    def silence_s(self, chunk_bytes: int, *, now: float) -> float:
        """Return how long the parent has been silent, in seconds.

        If the request was repeated, the silence after the first request is counted, too.
        """
        was_asked_again = self.state in _ASKED_AGAIN
        return now - self.progress_at + self.patience_s(chunk_bytes) * was_asked_again

    def deadline(self, chunk_bytes: int) -> float | None:
        """Return the time at which the silence of the parent becomes too long.

        None while the node awaits no message, and while a chunk is being written.
        """
        if self.writing_bytes or not (self.awaits_chunks or self.awaits_answer):
            return None
        return self.progress_at + self.patience_s(chunk_bytes)

    def validate(self) -> None:
        """Check that state, peer, window and unwritten bytes agree with each other; for tests.

        Raises:
            AssertionError: if they disagree.
        """
        has_parent = self.state is not LinkState.ALONE
        assert has_parent == (self.peer is not None), f"{self.state} with the parent {self.peer}"
        assert min(self.window, self.unspent_bytes, self.writing_bytes) >= 0, "negative bytes"
        assert self.window > 0 or not self.awaits_chunks, "chunks are awaited without credit"
        assert has_parent or not self.writing_bytes, "bytes of no parent are being written"
