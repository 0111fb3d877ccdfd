"""What a parent remembers of one child, and of what that child has asked for.

A Fetch names places of a lane. Those of a parcel may lie beyond what this node knows of it so far:
they are kept, and wanted as soon as its next segment is here.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from echo.core.errors import RemoteProtocolError
from echo.core.rollout import PolicyVersion
from echo.protocol.transfer import Chunked
from echo.wire.messages import FULL, OPEN_END, Fetch, ItemId

MAX_LANES = 1024
PACE_S = 10.0
"""How far back the pace of a child goes: once to twice so long."""


class Pace:
    """The chunks per second that a child takes of late, while nothing but itself holds it back.

    Of late, so that one whose disk or link has just stalled is not taken for a fast one, nor one
    that has recovered for a slow one; and from one item to the next, so that this needs not be
    learned anew with every version.
    """

    def __init__(self) -> None:
        """Start at rest."""
        self.began_at: float | None = None
        """Since when it is known; None before it has asked for anything."""
        self._runs_since: float | None = None
        self._num_sent, self._busy_s = 0, 0.0
        self._before = 0, 0.0
        """What was sent in the period before, and how long that was."""

    def _look(self, now: float) -> None:
        if self._runs_since is not None:
            self._busy_s += now - self._runs_since
            self._runs_since = now
        if self._busy_s >= PACE_S:
            self._before = self._num_sent, self._busy_s
            self._num_sent, self._busy_s = 0, 0.0

    def run(self, now: float) -> None:
        """Note that it could be sent chunks from now on, as far as this node is concerned."""
        self._look(now)
        self._runs_since = now
        if self.began_at is None:
            self.began_at = now

    def rest(self, now: float) -> None:
        """Note that it wants nothing, or is held back for a sibling."""
        self._look(now)
        self._runs_since = None

    def sent(self, now: float) -> None:
        """Note that it was sent a chunk."""
        self.run(now)
        self._num_sent += 1

    def rate(self, now: float) -> float:
        """Return the chunks per second."""
        self._look(now)
        num_sent, busy_s = self._before
        return (num_sent + self._num_sent) / max(busy_s + self._busy_s, 1e-3)


@dataclass(slots=True)
class Child:
    """What a parent remembers of one child."""

    is_subscribed: bool = False
    newest: PolicyVersion | None = None
    """What it said it holds."""
    announced: object = None
    """What it was told last."""
    told_of: PolicyVersion | None = None
    """Newest version that it was told of."""
    fetching: ItemId | None = None
    awaiting: ItemId | None = None
    """What it asked for before it was known here."""
    lane: int = 0
    num_lanes: int = 1
    ranges: tuple[tuple[int, int], ...] = ()
    """Places of its lane that it asked for, known here or not."""
    num_places: int = 0
    """Places of its lane that were known when `wanted` was last added to."""
    wanted: deque[int] = field(default_factory=deque)
    is_open: bool = False
    """Whether it wants chunks that will be added to the parcel."""
    num_segments: int = 0
    credit_bytes: int = 0
    lead: int = 0
    """How far into the item it is, in chunks of all lanes, from where its siblings were then."""
    pace: Pace = field(default_factory=Pace)
    acked_at: float = 0.0
    """When it acknowledged chunks last, or began."""
    held_at: float | None = None
    """Since when it is held back for a sibling."""
    heard_at: float = 0.0
    told_waiting_at: float = 0.0
    waiting_s: float = 0.0
    """Within how long it was told that it will be told again."""
    unanswered_since: float | None = None
    """When it was told of an item, if nothing was heard of it since."""

    def stop(self, now: float) -> None:
        """Forget what it fetches."""
        self.pace.rest(now)
        self.fetching = self.awaiting = self.held_at = None
        self.ranges, self.num_places, self.is_open = (), 0, False
        self.wanted.clear()

    def takes_as(self, other: Child) -> bool:
        """Return whether it fetches chunks of an item that another child fetches as well."""
        common = math.gcd(self.num_lanes, other.num_lanes)
        is_same_item = self.fetching is not None and self.fetching == other.fetching
        return is_same_item and (self.lane - other.lane) % common == 0

    def begin(self, message: Fetch, *, now: float) -> None:
        """Take down what it asks for, which is here or on its way."""
        self.fetching = (message.version, message.form)
        self.lane, self.num_lanes, self.ranges = message.lane, message.num_lanes, message.ranges
        self.num_segments = max(0, message.num_segments)
        self.credit_bytes = max(0, message.credit_bytes)
        self.acked_at = self.told_waiting_at = now
        self.waiting_s = 0.0
        self.lead = 0
        self.pace.run(now)

    def grow(self, item: Chunked) -> None:
        """Want what has become known of what it asked for."""
        num_places = len(range(self.lane, item.num_chunks, self.num_lanes))
        for start, stop in self.ranges:
            places = range(max(start, self.num_places), min(stop, num_places))
            self.wanted.extend(self.lane + place * self.num_lanes for place in places)
        self.num_places = num_places
        self.is_open = item.is_open and bool(self.ranges) and self.ranges[-1][1] > num_places

    def hold_back(self, now: float) -> None:
        """Note that it could be sent a chunk, and is not."""
        if self.held_at is None:
            self.held_at, self.waiting_s = now, 0.0
            self.pace.rest(now)

    def sent(self, num_bytes: int, now: float) -> None:
        """Note that it was sent a chunk."""
        self.credit_bytes -= num_bytes
        self.lead += self.num_lanes
        self.pace.sent(now)
        self.told_waiting_at, self.waiting_s = now, 0.0
        self.held_at = None


def check_fetch(message: Fetch, item: Chunked) -> None:
    """Refuse a Fetch of what an item does not consist of.

    Raises:
        RemoteProtocolError: if its lane or its ranges are impossible.
    """
    lane, num_lanes = message.lane, message.num_lanes
    if not 0 <= lane < num_lanes <= MAX_LANES:
        raise RemoteProtocolError(f"a Fetch of lane {lane} of {num_lanes}")
    num_places = len(range(lane, item.num_chunks, num_lanes))
    is_parcel = message.form != FULL
    previous = 0
    for start, stop in message.ranges:
        # A parcel may be longer at the child than here, or its end be known only here.
        is_known = stop <= num_places or (is_parcel and (item.is_open or stop == OPEN_END))
        if not (previous <= start < stop and is_known):
            raise RemoteProtocolError(
                f"a Fetch of {message.version} with bad ranges {message.ranges!r:.80}"
            )
        previous = stop
