"""The link to the parent: its states, credit window and patience.

**States** (`TABLE`). `disconnect` leads from every state to alone. An event that is not named for a
state leaves the state unchanged.

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

**Credit and backpressure.** The window limits how many bytes may be under way or wait to be
written. Its size is 1.5 x rate x round trip + 2 chunks for each connection. A long link has several
connections (`echo/net/zmq.py`). The rate is the measured rate of this link. So the window grows by
half with each round trip until the link is full, and shrinks with the rate.

**Timeout.** The node may await a message of the parent. The parent counts as silent if neither a
chunk nor a Waiting arrives for `patience_s`. `patience_s` is the longest of three times: four round
trips, four chunks at the measured rate, and three times the longest gap between two recent chunks.
Such gaps occur if many children share an uplink. If there is a spare parent, the node leaves its
parent at the first silence. Without a spare parent the node repeats its request once, and leaves
the parent at the second silence. These rules change or bound `patience_s`:

* At least MIN_PATIENCE_S with a spare parent.
* At least the configured time without a spare parent. The same limit holds for the first chunk
  after a request, because all children request this chunk at the same time.
* The configured time while the rate of the link is unknown. This time doubles with each parent that
  the node leaves because of a silence. Otherwise a slow link would never deliver a chunk.
* A parent that itself waits for the item announces when it will send its next Waiting. This Waiting
  may arrive up to PROMISE_GRACE_S later.
* No limit while a chunk of the link is being written. If the disk is slower than the link, the
  parent has no credit and cannot send.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from echo.core.bounds import num_connections
from echo.weights.rates import RateEstimate

# --- window ---------------------------------------------------------------------------------------

LOOP_S = 0.001
"""Seconds that a busy node takes to answer, in addition to the round trip of the network."""


def window_bytes(rate: float | None, rtt_s: float | None, chunk_bytes: int, *, first: int) -> int:
    """Return how many bytes a receiver should have requested at any time.

    One bandwidth-delay product keeps the link full. Half a product more lets the estimated rate
    grow if the window itself is the limit. The window has two more chunks for each connection,
    because a chunk is being handled at each end. A long link has several connections. A larger
    window would fill the queue of a slow uplink and delay later messages.

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
    """The state of a link: what the node awaits from its parent."""

    ALONE = "alone"
    """The node has no parent."""
    IDLE = "idle"
    """The node awaits no message."""
    SUBSCRIBED = "subscribed"
    """The node awaits the answer to Subscribe."""
    SUBSCRIBED_AGAIN = "subscribed_again"
    """The node awaits the answer to Subscribe, after it has repeated the message because of a
    silence."""
    REQUESTED = "requested"
    """The node awaits chunks, and none has arrived since the request."""
    REQUESTED_AGAIN = "requested_again"
    """The node awaits chunks, after it has repeated the request because of a silence."""
    FETCHING = "fetching"
    """The node awaits further chunks."""
    WAITING = "waiting"
    """The node awaits chunks which the parent itself awaits."""


class LinkEvent(StrEnum):
    """What can happen on the link to a parent."""

    CONNECT = "connect"
    """The node has a new parent, which has answered."""
    DISCONNECT = "disconnect"
    """The parent is lost, or the node leaves it."""
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


def _row(state: LinkState, moves: dict[LinkEvent, LinkState]) -> dict[LinkEvent, LinkState]:
    """Return the next state for each event; other events leave the state unchanged."""
    return {event: moves.get(event, state) for event in LinkEvent}


def _table() -> dict[LinkState, dict[LinkEvent, LinkState]]:
    s, e = LinkState, LinkEvent
    over = {e.DISCONNECT: s.ALONE}
    first = {**over, e.SILENCE_WITH_SPARE: s.ALONE}
    second = {**first, e.SILENCE: s.ALONE}
    moves = {
        s.ALONE: {e.CONNECT: s.IDLE},
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
    return {state: _row(state, moves[state]) for state in LinkState}


TABLE = _table()
"""State -> event -> next state; every pair of state and event has an entry."""

_AWAITS_ANSWER = frozenset({LinkState.SUBSCRIBED, LinkState.SUBSCRIBED_AGAIN})
_AWAITS_CHUNKS = frozenset(
    {LinkState.REQUESTED, LinkState.REQUESTED_AGAIN, LinkState.FETCHING, LinkState.WAITING}
)
_ASKED_AGAIN = frozenset({LinkState.SUBSCRIBED_AGAIN, LinkState.REQUESTED_AGAIN})

# --- link: credit and patience --------------------------------------------------------------------

MIN_PATIENCE_S = 0.5
MAX_PATIENCE_S = 60.0
PROMISE_GRACE_S = 0.5
"""A parent that waits for the item may send its next Waiting this many seconds late."""
MAX_PROMISE_S = 2.0
"""Longest time, in seconds, that a parent may announce until its next Waiting. If a parent
announces a longer time, the node counts only this time."""
GAP_MEMORY = 0.98
"""If a chunk arrives after a shorter gap than the longest, the longest gap is multiplied by this
factor. So old gaps are forgotten."""
MAX_WINDOW_BYTES = 64 << 20
"""Largest number of bytes that a parent may have to queue for one child."""
MAX_WRITING_WINDOWS = 4
"""Largest number of a link's bytes that wait to be written, as a multiple of MAX_WINDOW_BYTES. The
factor exceeds 1, because the chunks of a first request may still arrive after the request was
repeated."""
MAX_DOUBLINGS = 4
"""Largest number of times that the patience is doubled while the rate of the link is unknown. The
longest patience is then 16 times the configured time."""
MAX_BAD_CHUNKS = 3
"""After this many chunks with a wrong hash the node leaves the parent. A single wrong chunk may
come from a memory error."""


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
    """Whether the node has a spare parent, and so leaves this one at its first silence."""
    rtt_s: float | None = None
    rate: RateEstimate = field(default_factory=RateEstimate)
    window: int = 0
    unspent_bytes: int = 0
    """Number of bytes written since this node last gave credit."""
    writing_bytes: int = 0
    """Number of bytes that are being written, for which no credit was given yet."""
    progress_at: float = 0.0
    longest_gap_s: float = 0.0
    """Longest gap between two recent chunks, seconds."""
    promised_s: float = 0.0
    """Seconds to the next Waiting, as the parent announced in its last Waiting; 0 if the parent
    does not wait itself."""
    num_failures: int = 0
    """Number of silent parents that this node has left since it last measured a rate."""
    num_bad_chunks: int = 0

    def _move(self, event: LinkEvent) -> None:
        self.state = TABLE[self.state][event]

    @property
    def awaits_answer(self) -> bool:
        """Whether the node awaits the answer to its Subscribe."""
        return self.state in _AWAITS_ANSWER

    @property
    def awaits_chunks(self) -> bool:
        """Whether the node awaits chunks of an item."""
        return self.state in _AWAITS_CHUNKS

    def connect(self, peer: str | None, *, rtt_s: float | None) -> None:
        """Make `peer`, which has answered, the parent; None for no parent."""
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
        """Note that this node has sent Subscribe."""
        if self.state is LinkState.IDLE:
            self.progress_at = now
        self._move(LinkEvent.SUBSCRIBE)

    def on_message(self) -> None:
        """Note that the parent has sent a message of any kind."""
        self._move(LinkEvent.MESSAGE)

    def fetch(self, *, now: float) -> int:
        """Note that this node sends Fetch; return the credit that it gives.

        The credit is the window minus the bytes of any item that are still being written.
        """
        self._move(LinkEvent.FETCH)
        self.window = self.window or self.first_window_bytes
        self.unspent_bytes = 0
        self.progress_at, self.promised_s = now, 0.0
        self.rate.pause()
        return max(0, self.window - self.writing_bytes)

    def has_space(self, num_bytes: int) -> bool:
        """Return whether `num_bytes` more may wait to be written.

        The limit is far above the bytes that a parent may send within its credit.
        """
        return self.writing_bytes + num_bytes <= MAX_WRITING_WINDOWS * MAX_WINDOW_BYTES

    @property
    def can_bring(self) -> bool:
        """Whether the node awaits chunks, and the parent has enough credit to send them."""
        return self.awaits_chunks and self.window > self.unspent_bytes + self.writing_bytes

    def received(self, num_bytes: int, *, now: float) -> None:
        """Note that a chunk has arrived, which will be verified and written."""
        gap_s = 0.0 if self.rate.is_paused else now - self.progress_at
        self.longest_gap_s = max(gap_s, GAP_MEMORY * self.longest_gap_s)
        self.lives(now=now)
        self.rate.add(num_bytes, now=now)
        self.writing_bytes += num_bytes
        if self.rate.bytes_per_s is not None:
            self.num_failures = 0

    def released(self, num_bytes: int, *, now: float) -> None:
        """Note that a chunk was written or discarded.

        The silence of the parent is counted from now.
        """
        self.writing_bytes -= num_bytes
        self.progress_at = now

    def took(self, num_bytes: int, *, chunk_bytes: int) -> tuple[int, int]:
        """Note that a chunk of `num_bytes` is held; return (bytes to acknowledge, credit to give).

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
        """Note that the parent has sent a part of the requested item."""
        self._move(LinkEvent.LIVES)
        self.progress_at, self.promised_s = now, 0.0

    def waits(self, *, again_s: float, now: float) -> None:
        """Note that the parent waits for the item, and sends the next Waiting within `again_s`."""
        self._move(LinkEvent.WAITS)
        self.progress_at = now
        self.promised_s = min(again_s, MAX_PROMISE_S)  # a longer time is not accepted
        self.rate.pause()

    def complete(self) -> None:
        """Note that the node awaits no further part of the item."""
        self._move(LinkEvent.COMPLETE)
        self.rate.pause()

    def silence(self, *, now: float) -> bool:
        """Note that the parent was silent for too long; return whether to leave it."""
        event = LinkEvent.SILENCE_WITH_SPARE if self.has_spare else LinkEvent.SILENCE
        is_left = TABLE[self.state][event] is LinkState.ALONE
        if is_left:
            self.num_failures += 1  # the caller leaves the parent, by `connect`
        else:
            self._move(event)
            self.progress_at = now
        return is_left

    def patience_s(self, chunk_bytes: int) -> float:
        """Return how many seconds the parent may be silent before the node reacts."""
        usual = self._usual_patience_s(chunk_bytes)
        promised = self.promised_s + PROMISE_GRACE_S if self.promised_s else 0.0
        return usual if usual > promised else promised

    def _usual_patience_s(self, chunk_bytes: int) -> float:
        rate = self.rate.bytes_per_s
        if rate is None or self.rtt_s is None:
            # Otherwise a link too slow for the configured time would never deliver a chunk.
            doubled = math.ldexp(self.stall_s, min(self.num_failures, MAX_DOUBLINGS))
            return min(doubled, max(MAX_PATIENCE_S, self.stall_s))
        is_first = self.state in (LinkState.REQUESTED, LinkState.REQUESTED_AGAIN)
        least = MIN_PATIENCE_S if self.has_spare and not is_first else self.stall_s
        chunks_s = 4 * chunk_bytes / rate if rate > 1.0 else 4.0 * chunk_bytes
        longest = max(least, 4 * self.rtt_s, chunks_s, 3 * self.longest_gap_s)
        most = self.stall_s if self.stall_s > MAX_PATIENCE_S else MAX_PATIENCE_S
        return longest if longest < most else most

    def silence_s(self, chunk_bytes: int, *, now: float) -> float:
        """Return for how many seconds the parent has been silent.

        If the node has repeated its request because of a silence, that silence is included.
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
        """Check that state, peer, window and unwritten bytes agree; for tests.

        Raises:
            AssertionError: if they do not.
        """
        has_parent = self.state is not LinkState.ALONE
        assert has_parent == (self.peer is not None), f"{self.state} with the parent {self.peer}"
        assert min(self.window, self.unspent_bytes, self.writing_bytes) >= 0, "negative bytes"
        assert self.window > 0 or not self.awaits_chunks, "chunks are awaited without credit"
        assert has_parent or not self.writing_bytes, "bytes of no parent are being written"
