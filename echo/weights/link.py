"""The link to the parent: its states, rate, credit window and patience; and the uplink probe.

**States** (`TABLE`; `disconnect` leads from each to alone, an event that is not named changes
nothing):

    alone             --connect--> idle
    idle              --subscribe--> subscribed        --fetch--> requested
    subscribed        --heard--> idle                  --fetch--> requested
                      --silence--> subscribed_again    --silence_with_spare--> alone
    subscribed_again  --heard--> idle                  --fetch--> requested
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

**Rate.** Bytes over *busy* time: the time in which requested bytes were under way. A link is busy
between the arrivals of two chunks of one burst. It is not busy before the first chunk, and while
the other side has nothing to send (`pause`). So the first chunk after a pause only starts the
clock, and a burst of one chunk is no measurement.

* A receiver measures each link, and sizes its window by the rate. It adds chunks as they arrive,
  and pauses when all requested chunks have arrived or the parent sends Waiting.
* A sender measures its **uplink**, all children together. It adds bytes as they are acknowledged,
  and pauses when no child fetches. Children that have been sent all held chunks, or a child alone,
  may be the limit themselves. A sample that consists mostly of such time shows only a lower bound
  of the uplink. A sample in which the uplink was the limit may still be low, because TCP lost time.
  So the estimate falls only after LOWER_SAMPLES low samples in a row, and then to the highest of
  them. Otherwise the plan would oscillate.
* A receiver's **downlink** does not follow from the rate at which it receives, because its parents
  are usually slower. `topology/sites.py` decides when the downlink is a limit.

**Credit and backpressure.** The window bounds the bytes that are under way or wait to be written:
1.5 x rate x round trip + 2 chunks for each connection (a long link has several,
`echo/net/zmq.py`). The rate is the measured rate of this link, so the window grows by half with
each round trip until the link is full, and shrinks with the rate.

**Timeout.** The parent is silent when the node awaits a message and neither a chunk nor a Waiting
has arrived for `patience_s`. That is the longest of four round trips, the time of four chunks at
the measured rate, and three times the longest gap between two recent chunks (many children that
share an uplink each have such gaps). With a spare the parent is left at its first silence. Without
one it is asked once more, and left at the second. The bounds of `patience_s`:

* At least MIN_PATIENCE_S with a spare parent.
* At least the configured time without a spare, and for the first chunk, which all children request
  at the same time.
* The configured time while the rate of the link is unknown, doubled for each parent that was left
  for its silence. Otherwise a slow link would never deliver a chunk.
* A parent that waits announces when its next Waiting follows, and has PROMISE_GRACE_S more.
* No limit while a chunk of the link is being written: if the disk is slower than the link, the
  parent has no credit and cannot send.

**Probe.** One message measures the uplink of a node that has not served a child yet.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum

from echo.core.bounds import num_connections
from echo.core.errors import LocalProtocolError
from echo.wire.actions import Action, Send
from echo.wire.codec import encode
from echo.wire.messages import Probe, ProbeAck

# --- rate and window ------------------------------------------------------------------------------

SAMPLE_S = 0.1
"""Least busy time of a sample."""

SAMPLE_CHUNKS = 4
"""Least number of chunks of a sample: with fewer, rounding dominates the rate."""

UPLINK_SAMPLE_S = (2.0, 5.0)
"""Least busy time of a sample of an uplink: with many acknowledgements (UPLINK_SAMPLE_ACKS or
more), and with few."""

UPLINK_SAMPLE_ACKS = 128
"""Number of acknowledgements in a sample from which they count as many. Each child acknowledges
several chunks at once, at a time of its own, so over fewer acknowledgements chance dominates the
rate, and the highest sample is far too high."""

IDLE_SHARE = 0.25
"""A sample counts as limited by the uplink if the share of children that the uplink did not limit
(`UplinkEstimate.wait`), averaged over the sample's time, was at most this."""

LOWER_SAMPLES = 4
"""Lower samples in a row, each with the uplink as its limit, after which the estimate falls."""

RISE_S = 4.0
"""Busy time in which the weight of a lower estimate of an uplink falls to 1/e."""

LOOP_S = 0.001
"""Time that a busy node takes to answer, in addition to the round trip of the network."""

RATE_WINDOW_S = 1.0
"""Busy time in which the weight of an old sample falls to 1/e."""

MOST_BYTES_PER_S = 1e12
"""Bound of an estimate: clocks are too coarse to measure more."""


class RateEstimate:
    """Bytes per second over busy time, averaged with exponential weights; of constant size."""

    def __init__(self) -> None:
        """Start without an estimate."""
        self._rate: float | None = None
        self._last_at: float | None = None
        self._began_at = 0.0
        self._busy_s = 0.0
        self._num_bytes = 0.0
        self._num_chunks = 0

    @property
    def bytes_per_s(self) -> float | None:
        """The estimate; None before the first sample is complete."""
        return self._rate

    @property
    def is_paused(self) -> bool:
        """Whether the clock of busy time is stopped; the next chunk only starts it."""
        return self._last_at is None

    def add(self, num_bytes: float, *, now: float, since: float = math.inf) -> None:
        """Add bytes that have arrived; after a pause the first ones only start the clock.

        Args:
            num_bytes: number of bytes.
            now: arrival of the last byte.
            since: arrival of the first byte, if not all arrived at once.
        """
        if self._last_at is None:
            self._last_at = self._began_at = now
            return
        if since < self._began_at <= now:
            # Count only the share of these bytes that was sent after the sample began.
            num_bytes *= (now - self._began_at) / (now - since)
        self._busy_s += max(0.0, now - self._last_at)
        self._last_at = now
        self._num_bytes += num_bytes
        self._num_chunks += 1
        if self._num_chunks >= SAMPLE_CHUNKS and self._busy_s >= self._least_s(self._num_chunks):
            sample = min(self._num_bytes / self._busy_s, MOST_BYTES_PER_S)
            self._rate = self._learn(self._rate, sample, self._busy_s)
            self._busy_s, self._num_bytes, self._num_chunks = 0.0, 0.0, 0

    def pause(self) -> None:
        """Stop the clock: no bytes are under way until the next chunk."""
        self._last_at = None

    def _least_s(self, num_chunks: int) -> float:
        """Return the least busy time of a sample of `num_chunks`."""
        return SAMPLE_S

    def _learn(self, rate: float | None, sample: float, busy_s: float) -> float:
        """Return the new estimate after a sample."""
        return sample if rate is None else _towards(sample, rate, busy_s / RATE_WINDOW_S)


class UplinkEstimate(RateEstimate):
    """Rate at which a node can send to all its children together, by their acknowledgements."""

    def __init__(self) -> None:
        """Start without an estimate."""
        super().__init__()
        self._share = self._shared_at = self._waited_s = 0.0
        self._lower: list[float] = []
        self.is_measured = False
        """Whether the uplink was the limit of a sample; otherwise the estimate is a lower bound."""

    def wait(self, share: float, *, now: float) -> None:
        """Note which share of the children, 0 to 1, the uplink does not limit from now on."""
        if not self.is_paused:
            since = max(self._shared_at, self._began_at)
            self._waited_s += self._share * max(0.0, now - since)
        self._share, self._shared_at = share, now

    def show(self, bytes_per_s: float) -> None:
        """Raise the estimate to a rate that is known from another source, such as a probe."""
        self._rate = bytes_per_s if self._rate is None else max(self._rate, bytes_per_s)

    def _least_s(self, num_chunks: int) -> float:
        """Return the least busy time of a sample of acknowledgements."""
        return UPLINK_SAMPLE_S[num_chunks < UPLINK_SAMPLE_ACKS]

    def _learn(self, rate: float | None, sample: float, busy_s: float) -> float:
        """Return the new estimate after a sample."""
        idle_share, self._waited_s = self._waited_s / busy_s, 0.0
        was_limit = idle_share <= IDLE_SHARE
        self.is_measured |= was_limit
        if rate is None:
            return sample
        if sample >= rate:
            self._lower.clear()
            return _towards(sample, rate, busy_s / RISE_S)
        if was_limit:
            self._lower.append(sample)
        if len(self._lower) < LOWER_SAMPLES:
            return rate
        rate = max(self._lower)
        self._lower.clear()
        return rate


def _towards(sample: float, rate: float, age: float) -> float:
    """Return an average of both rates; `age` 1 lowers the weight of `rate` to 1/e."""
    return rate + (1 - math.exp(-age)) * (sample - rate)


def window_bytes(rate: float | None, rtt_s: float | None, chunk_bytes: int, *, first: int) -> int:
    """Return the bytes that a receiver should have requested at any time.

    One bandwidth-delay product keeps the link full. Half of one more lets the estimate grow if the
    window itself is the limit. Two chunks are at the ends of each connection, and a long link has
    several. A larger window would fill the queue of a slow uplink and delay later messages.

    Args:
        rate: bytes per second of this link; None if not known yet.
        rtt_s: its round trip; None if not known yet.
        chunk_bytes: unit of transfer.
        first: window while rate or round trip is unknown.
    """
    least = 2 * chunk_bytes * (1 if rtt_s is None else num_connections(rtt_s))
    if rate is None or rtt_s is None:
        return min(max(first, least), MAX_WINDOW_BYTES)
    return int(min(1.5 * rate * (rtt_s + LOOP_S) + least, MAX_WINDOW_BYTES))


# --- states ---------------------------------------------------------------------------------------


class LinkState(StrEnum):
    """The messages that a node awaits of its parent."""

    ALONE = "alone"
    """The node has no parent."""
    IDLE = "idle"
    """The node awaits no message."""
    SUBSCRIBED = "subscribed"
    """The node awaits the answer to Subscribe."""
    SUBSCRIBED_AGAIN = "subscribed_again"
    """The same, after a silence."""
    REQUESTED = "requested"
    """The node awaits chunks, and none has arrived since the request."""
    REQUESTED_AGAIN = "requested_again"
    """The same, after a silence."""
    FETCHING = "fetching"
    """The node awaits further chunks."""
    WAITING = "waiting"
    """The node awaits chunks for which the parent itself waits."""


class LinkEvent(StrEnum):
    """The events of a link."""

    CONNECT = "connect"
    """A parent has answered."""
    DISCONNECT = "disconnect"
    """The parent is lost or left."""
    SUBSCRIBE = "subscribe"
    """Subscribe is sent."""
    FETCH = "fetch"
    """Fetch is sent."""
    HEARD = "heard"
    """The parent has sent any message."""
    LIVES = "lives"
    """The parent has sent a chunk or table of the item."""
    WAITS = "waits"
    """The parent has sent Waiting for the item."""
    COMPLETE = "complete"
    """No further chunks are awaited."""
    SILENCE = "silence"
    """The parent was silent for `patience_s`, and there is no spare parent."""
    SILENCE_WITH_SPARE = "silence_with_spare"
    """The same, with a spare parent."""


def _row(state: LinkState, moves: dict[LinkEvent, LinkState]) -> dict[LinkEvent, LinkState]:
    """Return the next state of each event; events that `moves` does not name keep the state."""
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
            **first, e.HEARD: s.IDLE, e.FETCH: s.REQUESTED, e.SILENCE: s.SUBSCRIBED_AGAIN
        },
        s.SUBSCRIBED_AGAIN: {**second, e.HEARD: s.IDLE, e.FETCH: s.REQUESTED},
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
"""State -> event -> state; total."""

_AWAITS_ANSWER = frozenset({LinkState.SUBSCRIBED, LinkState.SUBSCRIBED_AGAIN})
_AWAITS_CHUNKS = frozenset(
    {LinkState.REQUESTED, LinkState.REQUESTED_AGAIN, LinkState.FETCHING, LinkState.WAITING}
)
_ASKED_AGAIN = frozenset({LinkState.SUBSCRIBED_AGAIN, LinkState.REQUESTED_AGAIN})

# --- link: credit and patience --------------------------------------------------------------------

MIN_PATIENCE_S = 0.5
MAX_PATIENCE_S = 60.0
PROMISE_GRACE_S = 0.5
"""Time by which a waiting parent may be late with the message that it announced."""
MAX_PROMISE_S = 2.0
"""Longest time to its next message that a waiting parent may announce; longer ones are cut."""
GAP_MEMORY = 0.98
"""The longest gap is multiplied by this at each chunk that arrives sooner."""
MAX_WINDOW_BYTES = 64 << 20
"""Most bytes that a parent may have to hold for one child."""
MAX_WRITING_WINDOWS = 4
"""Most unwritten bytes of a link, as a multiple of MAX_WINDOW_BYTES: after a repeated request, the
chunks of the first request may still arrive."""
MAX_DOUBLINGS = 4
"""Most doublings of the patience while no rate was measured: up to 16 times the configured time."""
MAX_BAD_CHUNKS = 3
"""Chunks with a wrong hash after which a parent is left; a single one can be a memory error."""


@dataclass(frozen=True, slots=True)
class ParentFailed:
    """The parent does not deliver; the role must choose another."""

    peer: str
    reason: str
    is_corrupt: bool = False
    """Whether it sent chunks that are not what the learner signed."""


@dataclass(slots=True, eq=False)
class ParentLink:
    """The child's half of the connection to its parent."""

    first_window_bytes: int
    stall_s: float
    """Patience while the rate of the link is unknown."""
    state: LinkState = LinkState.ALONE
    peer: str | None = None
    has_spare: bool = False
    """Whether there is a spare parent, so that this one is left at its first silence."""
    rtt_s: float | None = None
    rate: RateEstimate = field(default_factory=RateEstimate)
    window: int = 0
    unspent_bytes: int = 0
    """Bytes written since credit was last given."""
    writing_bytes: int = 0
    """Bytes that are being written; no credit was given for them yet."""
    progress_at: float = 0.0
    longest_gap_s: float = 0.0
    """Longest gap between two recent chunks."""
    promised_s: float = 0.0
    """Time to the next Waiting that a waiting parent announced."""
    num_failures: int = 0
    """Parents that were left for their silence before a rate was measured."""
    num_bad_chunks: int = 0

    def _move(self, event: LinkEvent) -> None:
        self.state = TABLE[self.state][event]

    @property
    def awaits_answer(self) -> bool:
        """Whether an answer to Subscribe is awaited."""
        return self.state in _AWAITS_ANSWER

    @property
    def awaits_chunks(self) -> bool:
        """Whether chunks are awaited."""
        return self.state in _AWAITS_CHUNKS

    def connect(self, peer: str | None, *, rtt_s: float | None) -> None:
        """Change to another parent, or to none."""
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
        """Note that Subscribe is sent."""
        if self.state is LinkState.IDLE:
            self.progress_at = now
        self._move(LinkEvent.SUBSCRIBE)

    def heard(self) -> None:
        """Note a message of the parent."""
        self._move(LinkEvent.HEARD)

    def fetch(self, *, now: float) -> int:
        """Note that Fetch is sent; return its credit.

        The bytes of any item that are still being written are subtracted from the window.
        """
        self._move(LinkEvent.FETCH)
        self.window = self.window or self.first_window_bytes
        self.unspent_bytes = 0
        self.progress_at, self.promised_s = now, 0.0
        self.rate.pause()
        return max(0, self.window - self.writing_bytes)

    def has_space(self, num_bytes: int) -> bool:
        """Return whether `num_bytes` more may wait to be written; credit allows far fewer."""
        return self.writing_bytes + num_bytes <= MAX_WRITING_WINDOWS * MAX_WINDOW_BYTES

    @property
    def can_bring(self) -> bool:
        """Whether chunks are awaited and the parent has credit for them."""
        return self.awaits_chunks and self.window > self.unspent_bytes + self.writing_bytes

    def received(self, num_bytes: int, *, now: float) -> None:
        """Note that a chunk has arrived, to be verified and written."""
        gap_s = 0.0 if self.rate.is_paused else now - self.progress_at
        self.longest_gap_s = max(gap_s, GAP_MEMORY * self.longest_gap_s)
        self.lives(now=now)
        self.rate.add(num_bytes, now=now)
        self.writing_bytes += num_bytes
        if self.rate.bytes_per_s is not None:
            self.num_failures = 0

    def settle(self, num_bytes: int, *, now: float) -> None:
        """Note that a chunk was written or discarded; a silence of the parent begins now."""
        self.writing_bytes -= num_bytes
        self.progress_at = now

    def took(self, num_bytes: int, *, chunk_bytes: int) -> tuple[int, int]:
        """Note that a chunk is held; return (bytes to acknowledge, credit), usually (0, 0)."""
        self.unspent_bytes += num_bytes
        if self.unspent_bytes < self.window // 4:
            return 0, 0
        wanted = window_bytes(self.rate.bytes_per_s, self.rtt_s, chunk_bytes, first=self.window)
        taken, self.unspent_bytes = self.unspent_bytes, 0
        credit = max(0, taken + wanted - self.window)
        self.window += credit - taken
        return taken, credit

    def lives(self, *, now: float) -> None:
        """Note that the parent has sent a part of the item."""
        self._move(LinkEvent.LIVES)
        self.progress_at, self.promised_s = now, 0.0

    def waits(self, *, again_s: float, now: float) -> None:
        """Note that the parent itself waits, and sends its next Waiting within `again_s`."""
        self._move(LinkEvent.WAITS)
        self.progress_at = now
        self.promised_s = min(again_s, MAX_PROMISE_S)  # a longer time is not accepted
        self.rate.pause()

    def complete(self) -> None:
        """Note that no further part of the item is awaited."""
        self._move(LinkEvent.COMPLETE)
        self.rate.pause()

    def silence(self, *, now: float) -> bool:
        """Note that the parent was silent for too long; return whether to leave it."""
        event = LinkEvent.SILENCE_WITH_SPARE if self.has_spare else LinkEvent.SILENCE
        is_left = TABLE[self.state][event] is LinkState.ALONE
        if is_left:
            self.num_failures += 1  # `connect` moves on
        else:
            self._move(event)
            self.progress_at = now
        return is_left

    def patience_s(self, chunk_bytes: int) -> float:
        """Return how long a silence may last."""
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
        """Return how long the parent has been silent."""
        was_asked_again = self.state in _ASKED_AGAIN
        return now - self.progress_at + self.patience_s(chunk_bytes) * was_asked_again

    def deadline(self, chunk_bytes: int) -> float | None:
        """Return when the parent counts as silent; None while no message from it is awaited."""
        if self.writing_bytes or not (self.awaits_chunks or self.awaits_answer):
            return None
        return self.progress_at + self.patience_s(chunk_bytes)

    def validate(self) -> None:
        """Check the invariants of the state, which hold after every event.

        Raises:
            LocalProtocolError: if one does not hold.
        """
        is_sound = (
            (self.peer is None) == (self.state is LinkState.ALONE)
            and min(self.window, self.unspent_bytes, self.writing_bytes) >= 0
            and (self.window > 0 or not self.awaits_chunks)
            and (self.peer is not None or not self.writing_bytes)
        )
        if not is_sound:
            raise LocalProtocolError(f"the link to the parent is in disorder: {self}")


# --- uplink probe: one message, and the time in which it arrives ----------------------------------
#
#     node  -> parent    Probe, with meaningless bytes
#     parent -> node     ProbeAck
#
# Transfers measure the uplinks of nodes that serve children, up to the rate at which the children
# receive. A fleet that has just joined is planned as if all uplinks were equal. Then slow nodes
# delay fast ones, whose uplinks are never measured in full. In the simulation of
# bench/bench_uplink_errors.py three such fleets ended at 0.72, 0.46 and 0.89 of the rate that their
# uplinks allow, and at 0.83, 0.89 and 0.89 with probes.
#
# So a node that can serve, and whose uplink has not been the limit of a transfer, sends a probe up
# its control link when the learner welcomes it, and when it holds a version. The learner sends its
# own probe a heartbeat after a node has reported a result, so the two probes are never under way
# together. After a probe that is acknowledged within QUICK_S, a probe four times as large follows,
# up to MAX_PROBE_BYTES. On a slow link the first probe is enough, and other messages of the node
# wait for one second at most. The measured time includes the round trip and the start of a
# connection, so a probe never overestimates. It underestimates a fast link, and transfers raise the
# estimate. Other traffic lowers the result of a probe, so it is repeated after the next versions,
# MAX_PROBES times in all.

FIRST_BYTES, MAX_PROBE_BYTES = 256 << 10, 4 << 20
GROWTH = 4
QUICK_S = 0.25
PAYLOAD_SHARE = 1 / 8
"""Largest size of a probe, as a share of the version that is sent next."""
MAX_PROBES = 3
UNANSWERED_S = 3.0
"""Seconds after which a probe without an answer is ignored, and another peer may be probed."""


class UplinkProbe:
    """A node's own probes."""

    def __init__(self, uplink: UplinkEstimate, *, node_id: str) -> None:
        """Start without a probe; results raise `uplink`."""
        self._uplink = uplink
        self._node_id = node_id
        self._num_probes = 0
        self._awaited: tuple[str, int, float] | None = None
        """(peer that acknowledges it, bytes, time of sending) of the probe under way."""
        self._most_bytes = 0

    def begin(self, peer: str, *, payload_bytes: int, now: float) -> list[Action]:
        """Send a probe to `peer`, if one is needed.

        Args:
            peer: the node that acknowledges it.
            payload_bytes: of a version; if it is small, a probe costs more than a bad plan.
            now: the present.
        """
        self._most_bytes = min(MAX_PROBE_BYTES, int(PAYLOAD_SHARE * payload_bytes))
        is_under_way = self._awaited is not None and (
            self._awaited[0] == peer or now < self._awaited[2] + UNANSWERED_S
        )
        is_known = self._uplink.is_measured or self._num_probes >= MAX_PROBES
        if is_under_way or is_known or self._most_bytes < FIRST_BYTES:
            return []
        self._num_probes += 1
        return self._send(peer, FIRST_BYTES, now)

    def _send(self, peer: str, num_bytes: int, now: float) -> list[Action]:
        self._awaited = peer, num_bytes, now
        return [Send(peer, encode(Probe(), [bytes(num_bytes)], source=self._node_id))]

    def acknowledged(self, peer: str, *, now: float) -> list[Action]:
        """Learn from the acknowledgement of a probe; one that is not awaited is ignored."""
        if self._awaited is None or self._awaited[0] != peer:
            return []
        _, num_bytes, sent_at = self._awaited
        self._awaited = None
        took_s = now - sent_at
        self._uplink.show(num_bytes / max(took_s, 1e-3))
        if took_s > QUICK_S or num_bytes >= self._most_bytes:
            return []
        return self._send(peer, min(GROWTH * num_bytes, self._most_bytes), now)


def acknowledge(peer: str, *, source: str) -> list[Action]:
    """Answer another node's probe."""
    return [Send(peer, encode(ProbeAck(), source=source))]


# --- connection -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Connection:
    """One connection that a node has dialled, to its control peer or to a parent."""

    address: str
    peer: str = ""
    node_id: str = ""
    """Node that answered; empty until Greeted."""
    dialled_at: float = 0.0
    greeted_at: float = 0.0
    """Time at which Greet was sent."""
    rtt_s: float | None = None
    """From Greet to Greeted; None until then."""
