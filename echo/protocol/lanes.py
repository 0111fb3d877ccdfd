"""The lanes of a pull: in each a link to a parent, the credit given over it, and its watchdog.

An item's chunks are divided among `num_lanes` lanes by index % num_lanes, and each lane is a link
of its own: lanes with different parents are the stripes of several trees, lanes with the same
parent are parallel connections (a single one is slow where TCP's buffers are small). Where a parent
has not the item, it is divided among the other lanes.

Credit. The window is what may be under way or wait to be written: 1.5 x rate x round trip + 2
chunks, of the rate that this link has shown, so that it grows by half with every round trip until
the link is full, and shrinks with it.

Watchdog. A lane is silent when something is awaited and neither a chunk nor a Waiting has come for
`patience_s`: four round trips, or the time of four chunks at the rate that the link has shown, or
three times the longest gap between two chunks of late: where many connections share an uplink, each
of them starves at times. It is at least MIN_PATIENCE_S for each stripe where a spare parent stands
by (the less comes over a lane, the less its silence costs, and leaving an honest parent costs as
much as ever), and at least the configured time where none does, and for the first chunk, for which
everybody asks at once. A parent that waits itself says within how long it will say so again, and
has PROMISE_GRACE_S more.
Nor is a lane silent while a chunk of it is being written: where the disk is slower than the link,
no credit is left with which the parent could send more (`writing.py`).
While the link has not shown its rate it is the configured time, and twice as long with each parent
that was left for its silence: on a slow link nothing would ever come otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from echo.core.timers import earliest
from echo.protocol.rates import RateEstimate, window_bytes

MIN_PATIENCE_S = 0.5
MAX_PATIENCE_S = 60.0
PROMISE_GRACE_S = 0.5
"""Beyond the time within which a parent that waits has promised to be heard from."""
MAX_PROMISE_S = 2.0
"""Longest such time that is believed."""
GAP_MEMORY = 0.98
"""What is left of the longest gap with every chunk that comes sooner."""
MAX_WINDOW_BYTES = 64 << 20
MAX_WRITING_WINDOWS = 4
"""Largest windows of a link that may wait to be written: what was under way when chunks were asked
for anew comes besides."""
MAX_DOUBLINGS = 4
"""Of the patience with parents that have not shown a rate: 16 times the configured time."""
MAX_BAD_CHUNKS = 3
"""Chunks with a wrong hash after which a parent is given up; one can be a memory error."""
ONE_SOCKET_RTT_S = 0.045
"""Round trip up to which one connection with 4 MiB of buffer carries 500 Mbit/s; several would
divide the link unequally, and the slowest of them would be waited for."""
RTT_PER_SOCKET_S = 0.012
"""One connection more for each so much beyond: 6 at 100 ms, which fill 1 Gbit/s. Fewer leave some
of it, and 8 push so much more than the link takes that it drops packets."""


def num_sockets(rtt_s: float, *, most: int) -> int:
    """Return how many connections to a parent at this round trip to open, at most `most`."""
    more = math.ceil((rtt_s - ONE_SOCKET_RTT_S) / RTT_PER_SOCKET_S)
    return min(most, max(1, 1 + more))


def count_lanes(num_stripes: int, num_sockets: int) -> int:
    """Return how many lanes to open over so many stripes, for at least `num_sockets` in all.

    Stripes come over connections of their own, which fill a long link together. More than that
    would only give this node a larger part of its parents' uplinks than its siblings get.
    """
    return num_stripes * math.ceil(num_sockets / num_stripes)


@dataclass(frozen=True, slots=True)
class ParentFailed:
    """The parent of a lane does not deliver; the session must choose another."""

    peer: str
    reason: str
    is_corrupt: bool = False
    """Whether it sent chunks that are not what the learner signed."""


@dataclass(slots=True)
class Lane:
    """The child's half of one link of the weights plane."""

    index: int
    first_window_bytes: int
    stall_s: float
    """Patience while the link has not shown its rate."""
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
    """Between two chunks of late."""
    num_stripes: int = 1
    """Over how many different parents the item is divided."""
    is_pulling: bool = False
    """Whether chunks are awaited."""
    is_fresh: bool = False
    """Whether nothing has been heard since they were asked for."""
    is_asking: bool = False
    """Whether an answer to Subscribe is awaited."""
    is_waiting: bool = False
    """Whether the parent has said that it waits itself."""
    promised_s: float = 0.0
    """Within how long it will say so again."""
    is_silent: bool = False
    """Whether a first silence has passed."""
    num_failures: int = 0
    """Parents left for their silence before they had shown a rate."""
    is_denied: bool = False
    """Whether the parent has said that it has not the item; the others share its chunks."""
    num_bad_chunks: int = 0

    def connect(self, peer: str | None, *, rtt_s: float | None) -> None:
        """Take another parent, or none."""
        if peer is None or rtt_s is not None:
            self.rtt_s = rtt_s
        self.peer, self.num_bad_chunks = peer, 0
        # What the former link could carry may be far too much for this one.
        self.rate, self.window = RateEstimate(), 0
        self.unspent_bytes = self.writing_bytes = 0
        self.longest_gap_s = 0.0
        self.is_silent = self.is_asking = self.is_pulling = self.is_waiting = False
        self.is_denied, self.promised_s = False, 0.0

    def begin(self, *, now: float) -> int:
        """Note that chunks are asked for; return the credit to give with it.

        What is still being written takes its part of the window, of whatever item it is.
        """
        self.window = self.window or self.first_window_bytes
        self.unspent_bytes = 0
        self.is_pulling, self.is_fresh, self.is_waiting = True, True, False
        self.progress_at, self.promised_s = now, 0.0
        self.rate.pause()
        return max(0, self.window - self.writing_bytes)

    def has_room(self, num_bytes: int) -> bool:
        """Return whether so much more may wait to be written; an honest parent heeds its credit."""
        most = max(MAX_WINDOW_BYTES, self.first_window_bytes)
        return self.writing_bytes + num_bytes <= MAX_WRITING_WINDOWS * most

    @property
    def can_bring(self) -> bool:
        """Whether something is awaited, and the parent has credit left for it."""
        return self.is_pulling and self.window > self.unspent_bytes + self.writing_bytes

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
        wanted = window_bytes(
            self.rate.bytes_per_s,
            self.rtt_s,
            chunk_bytes,
            first=self.window,
            most=max(MAX_WINDOW_BYTES, self.first_window_bytes),
        )
        taken, self.unspent_bytes = self.unspent_bytes, 0
        credit = max(0, taken + wanted - self.window)
        self.window += credit - taken
        return taken, credit

    def lives(self, *, now: float) -> None:
        """Note that the parent has sent something of what is awaited, or says that it waits."""
        self.progress_at, self.promised_s = now, 0.0
        self.is_silent = self.is_fresh = self.is_waiting = False

    def waits(self, *, again_s: float) -> None:
        """Note that it says that it waits, and within how long it will say so again."""
        self.is_waiting = True
        # What it says is not believed beyond reason; NaN is no promise.
        self.promised_s = min(max(0.0, again_s), MAX_PROMISE_S)

    def finish(self) -> None:
        """Note that nothing more is awaited of the item."""
        self.is_pulling = self.is_silent = self.is_waiting = False
        self.rate.pause()

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
        is_quick = self.has_spare and not self.is_fresh
        least = MIN_PATIENCE_S * self.num_stripes if is_quick else self.stall_s
        chunks_s = 4 * chunk_bytes / rate if rate > 1.0 else 4.0 * chunk_bytes
        longest = max(least, 4 * self.rtt_s, chunks_s, 3 * self.longest_gap_s)
        most = self.stall_s if self.stall_s > MAX_PATIENCE_S else MAX_PATIENCE_S
        return longest if longest < most else most

    def silence_s(self, chunk_bytes: int, *, now: float) -> float:
        """Return how long nothing has come of what is awaited."""
        return now - self.progress_at + self.patience_s(chunk_bytes) * self.is_silent

    def deadline(self, chunk_bytes: int) -> float | None:
        """Return when the lane counts as silent; None while nothing is awaited of it."""
        if self.peer is None or not (self.is_pulling or self.is_asking) or self.writing_bytes:
            return None
        return self.progress_at + self.patience_s(chunk_bytes)


class Lanes:
    """All lanes of a node; there is always one."""

    def __init__(self, *, first_window_bytes: int, stall_s: float) -> None:
        """Start with one lane without a parent."""
        self._first_window_bytes = first_window_bytes
        self._stall_s = stall_s
        self.all: list[Lane] = []
        self._num_stripes = 1
        self.resize(1)

    def __len__(self) -> int:
        """Return the number of lanes."""
        return len(self.all)

    def __iter__(self) -> Iterator[Lane]:
        """Go through the lanes in order."""
        return iter(self.all)

    def __getitem__(self, index: int) -> Lane:
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
            self.all.append(Lane(index, first_window_bytes=first, stall_s=self._stall_s))
        for lane in self.all:
            lane.first_window_bytes, lane.num_stripes = first, self._num_stripes
        return [lane.peer for lane in gone if lane.peer is not None]

    def of(self, peer: str) -> Lane | None:
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

    def share(self, lane: Lane) -> tuple[int, int] | None:
        """Return (number, of how many) of a lane among those whose parents may have the item."""
        able = [each for each in self.all if not each.is_denied]
        return None if lane.is_denied else (able.index(lane), len(able))

    def _deadline(self, lane: Lane, chunk_bytes: int) -> float | None:
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

    def silent(self, chunk_bytes: int, *, now: float) -> list[Lane]:
        """Return the lanes that have been silent for too long."""
        deadlines = [(lane, self._deadline(lane, chunk_bytes)) for lane in self.all]
        return [lane for lane, at in deadlines if at is not None and now >= at]
