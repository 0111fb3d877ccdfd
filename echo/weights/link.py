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

**Rate.** Bytes over *busy* time: time in which more was wanted than had come. Between the arrivals
of two chunks of one burst a link is busy; before the first of them, and while the other side has
nothing to give (`pause`), it is not. So the first chunk after a pause only starts the clock, and a
burst of one chunk says nothing.

* A receiver measures each link and sizes its window by it: chunks as they arrive, `pause` when all
  that was asked for has come or the parent says Waiting.
* A sender measures its **uplink**, all children together: bytes as they are acknowledged, `pause`
  when no child fetches anything. Children that have been sent all that is here, or one alone, may
  be the limit themselves: a sample in which most of the time passed like that only shows that the
  uplink is *at least* that good. One in which the uplink was the limit may still be low, as where
  TCP lost time: only so many of them in a row lower the estimate, to the best of them. A plan that
  forgets what an uplink has shown wanders for ever.
* A receiver's **downlink** cannot be read from what it receives: as a rule its parents are slower.
  `topology/sites.py` tells when it is a limit.

**Credit and backpressure.** The window is what may be under way or wait to be written: 1.5 x rate x
round trip + 2 chunks for each connection (a long link has several, `echo/net/zmq.py`), of the rate
that this link has shown: it grows by half with every round trip until the link is full, and shrinks
with it.

**Timeout.** The parent is silent when something is awaited and neither a chunk nor a Waiting has
come for `patience_s`: four round trips, or the time of four chunks at the rate that the link has
shown, or three times the longest gap between two recent chunks (where many children share an
uplink, each of them starves at times). With a spare the parent is left at its first silence,
without one it is asked once more and left at the second. The bounds of `patience_s`:

* At least MIN_PATIENCE_S where a spare parent stands by.
* At least the configured time where no spare does, and for the first chunk, for which everybody
  asks at once.
* The configured time while the link has not shown its rate, with a backoff: twice as long with each
  parent that was left for its silence. On a slow link nothing would ever come otherwise.
* A parent that waits itself says within how long it will say so again, and has PROMISE_GRACE_S
  more.
* No limit while a chunk of the link is being written: where the disk is slower than the link, no
  credit is left with which the parent could send more.

**Probe.** One message shows the uplink of a node that has not served anybody yet.
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
"""Busy time that makes one sample, at least."""

SAMPLE_CHUNKS = 4
"""Chunks that make one sample, at least: coarser than that, a rate is a matter of rounding."""

UPLINK_SAMPLE_S = (2.0, 5.0)
"""Busy time that makes one sample of an uplink with many acknowledgements, and with few."""

UPLINK_SAMPLE_ACKS = 128
"""So many are many. Each child acknowledges several chunks at once, at a time of its own: over
fewer a rate is a matter of chance, and the highest of them far too high."""

IDLE_SHARE = 0.25
"""Share of its time that children may wait in a sample whose limit was the uplink."""

LOWER_SAMPLES = 4
"""So many samples in a row, each lower though the uplink was the limit, show that it is lower."""

RISE_S = 4.0
"""Busy time after which a lower estimate of an uplink weighs 1/e of what it did."""

LOOP_S = 0.001
"""What a busy node takes to answer, beside the round trip of the network."""

RATE_WINDOW_S = 1.0
"""Busy time after which an old sample weighs 1/e of what it did."""

MOST_BYTES_PER_S = 1e12
"""Bound of an estimate: no clock is fine enough to prove more."""


class RateEstimate:
    """Bytes per second over busy time, averaged with exponential weights; of constant size."""

    def __init__(self) -> None:
        """Know nothing."""
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
        """Whether the next chunk only starts the clock."""
        return self._last_at is None

    def add(self, num_bytes: float, *, now: float, since: float = math.inf) -> None:
        """Count bytes that have come through; the first after a pause only start the clock.

        Args:
            num_bytes: how many.
            now: when the last of them came.
            since: when the first of them came, if not all at once.
        """
        if self._last_at is None:
            self._last_at = self._began_at = now
            return
        if since < self._began_at <= now:
            # Of many children's lumps all but one would count whole, as if sent since then.
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
        """Note that nothing is under way: the time until the next chunk does not count."""
        self._last_at = None

    def _least_s(self, num_chunks: int) -> float:
        """Return the busy time that makes a sample of so many chunks."""
        return SAMPLE_S

    def _learn(self, rate: float | None, sample: float, busy_s: float) -> float:
        """Return the estimate after a sample."""
        return sample if rate is None else _towards(sample, rate, busy_s / RATE_WINDOW_S)


class UplinkEstimate(RateEstimate):
    """What a node can send to all its children together, as they acknowledge it."""

    def __init__(self) -> None:
        """Know nothing."""
        super().__init__()
        self._share = self._shared_at = self._waited_s = 0.0
        self._lower: list[float] = []
        self.is_measured = False
        """Whether it has been the limit, so that the estimate is more than a lower bound."""

    def wait(self, share: float, *, now: float) -> None:
        """Note which share of the children, 0 to 1, waits from now on for other than the uplink."""
        if not self.is_paused:
            since = max(self._shared_at, self._began_at)
            self._waited_s += self._share * max(0.0, now - since)
        self._share, self._shared_at = share, now

    def show(self, bytes_per_s: float) -> None:
        """Note that so much has been sent, by whatever way."""
        self._rate = bytes_per_s if self._rate is None else max(self._rate, bytes_per_s)

    def _least_s(self, num_chunks: int) -> float:
        """Return the busy time that makes a sample of so many acknowledgements."""
        return UPLINK_SAMPLE_S[num_chunks < UPLINK_SAMPLE_ACKS]

    def _learn(self, rate: float | None, sample: float, busy_s: float) -> float:
        """Return the estimate after a sample."""
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
    """Return a rate that forgets: its past weighs 1/e of what it did after an age of 1."""
    return rate + (1 - math.exp(-age)) * (sample - rate)


def window_bytes(rate: float | None, rtt_s: float | None, chunk_bytes: int, *, first: int) -> int:
    """Return how many bytes a receiver should have asked for at a time.

    One bandwidth-delay product keeps the link full; half of one more lets the estimate grow where
    the window itself was the limit; two chunks are under way at the ends of each connection, of
    which a long link has several. More would lie in the queue of a slow uplink, before all that
    comes later.

    Args:
        rate: bytes per second of this link; None if not known yet.
        rtt_s: its round trip; None if not known yet.
        chunk_bytes: unit of transfer.
        first: what to ask for while nothing is known.
    """
    least = 2 * chunk_bytes * (1 if rtt_s is None else num_connections(rtt_s))
    if rate is None or rtt_s is None:
        return min(max(first, least), MAX_WINDOW_BYTES)
    return int(min(1.5 * rate * (rtt_s + LOOP_S) + least, MAX_WINDOW_BYTES))


# --- states ---------------------------------------------------------------------------------------


class LinkState(StrEnum):
    """What a node awaits of its parent."""

    ALONE = "alone"
    """There is no parent."""
    IDLE = "idle"
    """Nothing is awaited."""
    SUBSCRIBED = "subscribed"
    """An answer to Subscribe."""
    SUBSCRIBED_AGAIN = "subscribed_again"
    """The same, after a silence."""
    REQUESTED = "requested"
    """Chunks of which none has come since they were asked for."""
    REQUESTED_AGAIN = "requested_again"
    """The same, after a silence."""
    FETCHING = "fetching"
    """More chunks."""
    WAITING = "waiting"
    """Chunks for which the parent says that it waits itself."""


class LinkEvent(StrEnum):
    """What can happen to a link."""

    CONNECT = "connect"
    """A parent has been reached."""
    DISCONNECT = "disconnect"
    """The parent is lost or left."""
    SUBSCRIBE = "subscribe"
    """Subscribe is sent."""
    FETCH = "fetch"
    """Fetch is sent."""
    HEARD = "heard"
    """The parent has sent a message that is not of the item."""
    LIVES = "lives"
    """It has sent something of the item."""
    WAITS = "waits"
    """It says that it waits for the item itself."""
    COMPLETE = "complete"
    """No more chunks are awaited."""
    SILENCE = "silence"
    """Nothing has come for `patience_s`, and no spare parent stands by."""
    SILENCE_WITH_SPARE = "silence_with_spare"
    """The same, and one stands by."""


def _row(state: LinkState, moves: dict[LinkEvent, LinkState]) -> dict[LinkEvent, LinkState]:
    """Return what each event leads to: where `moves` does not name it, it changes nothing."""
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
"""Beyond the time within which a parent that waits has promised to be heard from."""
MAX_PROMISE_S = 2.0
"""Longest such time that is believed."""
GAP_MEMORY = 0.98
"""What is left of the longest gap with every chunk that comes sooner."""
MAX_WINDOW_BYTES = 64 << 20
"""What a parent may have to hold for one child, at most."""
MAX_WRITING_WINDOWS = 4
"""Largest windows of a link that may wait to be written: what was under way when chunks were asked
for anew comes besides."""
MAX_DOUBLINGS = 4
"""Of the patience with parents that have not shown a rate: 16 times the configured time."""
MAX_BAD_CHUNKS = 3
"""Chunks with a wrong hash after which a parent is given up; one can be a memory error."""


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
    """Patience while the link has not shown its rate."""
    state: LinkState = LinkState.ALONE
    peer: str | None = None
    has_spare: bool = False
    """Whether another parent stands by, so that this one is left at its first silence."""
    rtt_s: float | None = None
    rate: RateEstimate = field(default_factory=RateEstimate)
    window: int = 0
    unspent_bytes: int = 0
    """Bytes that have come and been written since credit was given last."""
    writing_bytes: int = 0
    """Bytes that have come and are being written: no credit was given for them yet."""
    progress_at: float = 0.0
    longest_gap_s: float = 0.0
    """Between two recent chunks."""
    promised_s: float = 0.0
    """Within how long a parent that waits will say so again."""
    num_failures: int = 0
    """Parents left for their silence before they had shown a rate."""
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
        """Take another parent, or none."""
        self._move(LinkEvent.DISCONNECT)
        if peer is not None:
            self._move(LinkEvent.CONNECT)
        if peer is None or rtt_s is not None:
            self.rtt_s = rtt_s
        self.peer, self.num_bad_chunks = peer, 0
        # What the former link could carry may be far too much for this one.
        self.rate, self.window = RateEstimate(), 0
        self.unspent_bytes = self.writing_bytes = 0
        self.longest_gap_s = self.promised_s = 0.0

    def subscribe(self, *, now: float) -> None:
        """Note that the parent is asked what can be had."""
        if self.state is LinkState.IDLE:
            self.progress_at = now
        self._move(LinkEvent.SUBSCRIBE)

    def heard(self) -> None:
        """Note that the parent has sent any message."""
        self._move(LinkEvent.HEARD)

    def fetch(self, *, now: float) -> int:
        """Note that chunks are asked for; return the credit to give with it.

        What is still being written takes its part of the window, of whatever item it is.
        """
        self._move(LinkEvent.FETCH)
        self.window = self.window or self.first_window_bytes
        self.unspent_bytes = 0
        self.progress_at, self.promised_s = now, 0.0
        self.rate.pause()
        return max(0, self.window - self.writing_bytes)

    def has_space(self, num_bytes: int) -> bool:
        """Return whether so much more may wait to be written; an honest parent heeds its credit."""
        return self.writing_bytes + num_bytes <= MAX_WRITING_WINDOWS * MAX_WINDOW_BYTES

    @property
    def can_bring(self) -> bool:
        """Whether something is awaited, and the parent has credit left for it."""
        return self.awaits_chunks and self.window > self.unspent_bytes + self.writing_bytes

    def came(self, num_bytes: int, *, now: float) -> None:
        """Note that a chunk has come, and is to be verified and written."""
        gap_s = 0.0 if self.rate.is_paused else now - self.progress_at
        self.longest_gap_s = max(gap_s, GAP_MEMORY * self.longest_gap_s)
        self.lives(now=now)
        self.rate.add(num_bytes, now=now)
        self.writing_bytes += num_bytes
        if self.rate.bytes_per_s is not None:
            self.num_failures = 0

    def settle(self, num_bytes: int, *, now: float) -> None:
        """Note that a chunk was written, or is of no use; its parent has patience from now on."""
        self.writing_bytes -= num_bytes
        self.progress_at = now

    def took(self, num_bytes: int, *, chunk_bytes: int) -> tuple[int, int]:
        """Note that a chunk is held; return (bytes to acknowledge, credit), mostly (0, 0)."""
        self.unspent_bytes += num_bytes
        if self.unspent_bytes < self.window // 4:
            return 0, 0
        wanted = window_bytes(self.rate.bytes_per_s, self.rtt_s, chunk_bytes, first=self.window)
        taken, self.unspent_bytes = self.unspent_bytes, 0
        credit = max(0, taken + wanted - self.window)
        self.window += credit - taken
        return taken, credit

    def lives(self, *, now: float) -> None:
        """Note that the parent has sent something of what is awaited."""
        self._move(LinkEvent.LIVES)
        self.progress_at, self.promised_s = now, 0.0

    def waits(self, *, again_s: float, now: float) -> None:
        """Note that the parent waits itself, and within how long it will say so again."""
        self._move(LinkEvent.WAITS)
        self.progress_at = now
        self.promised_s = min(again_s, MAX_PROMISE_S)  # it is not believed beyond reason
        self.rate.pause()

    def complete(self) -> None:
        """Note that nothing more is awaited of the item."""
        self._move(LinkEvent.COMPLETE)
        self.rate.pause()

    def silence(self, *, now: float) -> bool:
        """Note that the parent has been silent for too long; return whether it is to be left."""
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
            # Over a link too slow for the configured time nothing would ever come.
            doubled = math.ldexp(self.stall_s, min(self.num_failures, MAX_DOUBLINGS))
            return min(doubled, max(MAX_PATIENCE_S, self.stall_s))
        is_first = self.state in (LinkState.REQUESTED, LinkState.REQUESTED_AGAIN)
        least = MIN_PATIENCE_S if self.has_spare and not is_first else self.stall_s
        chunks_s = 4 * chunk_bytes / rate if rate > 1.0 else 4.0 * chunk_bytes
        longest = max(least, 4 * self.rtt_s, chunks_s, 3 * self.longest_gap_s)
        most = self.stall_s if self.stall_s > MAX_PATIENCE_S else MAX_PATIENCE_S
        return longest if longest < most else most

    def silence_s(self, chunk_bytes: int, *, now: float) -> float:
        """Return how long nothing has come of what is awaited."""
        was_asked_again = self.state in _ASKED_AGAIN
        return now - self.progress_at + self.patience_s(chunk_bytes) * was_asked_again

    def deadline(self, chunk_bytes: int) -> float | None:
        """Return when the parent counts as silent; None while nothing is awaited of it."""
        if self.writing_bytes or not (self.awaits_chunks or self.awaits_answer):
            return None
        return self.progress_at + self.patience_s(chunk_bytes)

    def validate(self) -> None:
        """Check what holds after every event.

        Raises:
            LocalProtocolError: if it does not.
        """
        is_sound = (
            (self.peer is None) == (self.state is LinkState.ALONE)
            and min(self.window, self.unspent_bytes, self.writing_bytes) >= 0
            and (self.window > 0 or not self.awaits_chunks)
            and (self.peer is not None or not self.writing_bytes)
        )
        if not is_sound:
            raise LocalProtocolError(f"the link to the parent is in disorder: {self}")


# --- uplink probe: one message, and how soon it has come ------------------------------------------
#
#     node  -> parent    Probe, with bytes that mean nothing
#     parent -> node     ProbeAck
#
# Transfers show the rate of whoever serves others, and only as much of it as its children could
# take. A fleet that has just joined is planned as if all were equal, so the slow hold up the fast,
# which then never show what they have: on paper (bench/bench_uplink_errors.py) three such fleets
# ended at 0.72, 0.46 and 0.89 of the rate that their uplinks allow, and at 0.83, 0.89 and 0.89 with
# probes.
#
# So a node that can serve, and has not been the limit of a transfer yet, sends a message up its
# control link when the learner welcomes it, and when it holds a version; and the learner sends one
# down a heartbeat after a node has told what came of that, so that they never meet. If one comes
# within QUICK_S, one four times as long follows, up to MAX_PROBE_BYTES: on a slow link the first
# says enough, and what the node has to say besides waits for a second at most. The time counts
# whole, with the round trip and the start of a connection, so a probe never shows too much; of a
# fast link it shows less than all, and transfers raise it. It is repeated after the next versions,
# MAX_PROBES times in all: what others sent at the same time makes the first one tell less than the
# truth.

FIRST_BYTES, MAX_PROBE_BYTES = 256 << 10, 4 << 20
GROWTH = 4
QUICK_S = 0.25
PAYLOAD_SHARE = 1 / 8
"""What a message may have at most, in relation to the version that it is to speed up."""
MAX_PROBES = 3
UNANSWERED_S = 3.0
"""After which another may be asked, whatever the first was waiting for."""


class UplinkProbe:
    """A node's own probes."""

    def __init__(self, uplink: UplinkEstimate, *, node_id: str) -> None:
        """Show what probes tell to `uplink`."""
        self._uplink = uplink
        self._node_id = node_id
        self._num_probes = 0
        self._awaited: tuple[str, int, float] | None = None
        """(who is to acknowledge, bytes, when they were sent)."""
        self._most_bytes = 0

    def begin(self, peer: str, *, payload_bytes: int, now: float) -> list[Action]:
        """Send a probe to `peer`, if one is needed.

        Args:
            peer: who acknowledges it.
            payload_bytes: of a version; where those are small, a wrong place costs less than this.
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
        """Learn from a probe that has come; an answer that is not awaited is ignored."""
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
    """One connection that a node has dialled: to the learner's side, or to a parent."""

    address: str
    peer: str = ""
    node_id: str = ""
    """Who answered; empty until Greeted."""
    dialled_at: float = 0.0
    greeted_at: float = 0.0
    """When Greet was sent."""
    rtt_s: float | None = None
    """From Greet to Greeted; None until then."""
