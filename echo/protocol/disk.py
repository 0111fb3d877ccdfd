"""Whether the disk under the arenas is what a node waits for.

It is while chunks are being written and no lane has credit left that would bring more (`writing.py`
says why). That time counts neither for the links' rates nor against the parents. Where it is half
of a fetch, the operator reads of it, once: a disk does not become faster by being told of.
"""

from __future__ import annotations

from echo.protocol.actions import Note
from echo.protocol.lanes import Lane, Lanes
from echo.protocol.rates import RateEstimate
from echo.units import format_bytes

LIMIT_S = 2.0
"""Waiting for the disk that is not worth a word, in one fetch."""
LIMIT_SHARE = 0.5
"""Of the time of a fetch, above which the disk is its limit."""


class Disk:
    """What one node writes of what it fetches."""

    def __init__(self, lanes: Lanes, link: RateEstimate) -> None:
        """Write nothing yet.

        Args:
            lanes: the node's.
            link: what they bring together; paused while the disk is waited for.
        """
        self._lanes = lanes
        self._link = link
        self._num_writing = 0
        self._began_at = self._waited_s = 0.0
        self._waited_bytes = 0
        """Written in that time: before that, the disk may have hidden behind memory."""
        self._waits_since: float | None = None
        self._has_noted = False

    def restart(self, *, now: float) -> None:
        """Note that a fetch begins."""
        self._began_at, self._waited_s, self._waited_bytes = now, 0.0, 0
        if self._waits_since is not None:
            self._waits_since = now

    def begin(self, lane: Lane, *, now: float) -> None:
        """Note that a chunk has come over a lane, and waits to be written."""
        self._num_writing += 1
        if not lane.can_bring:
            lane.rate.pause()
        if self._waits_since is None and not any(lane.can_bring for lane in self._lanes):
            self._waits_since = now
            self._link.pause()

    def end(self, num_bytes: int) -> None:
        """Note that so many bytes of a chunk were written."""
        self._num_writing -= 1
        if self._waits_since is not None:
            self._waited_bytes += num_bytes

    def look(self, *, now: float) -> list[Note]:
        """Return what the operator should read, after the credit for a chunk was given."""
        if self._waits_since is not None:
            self._waited_s += now - self._waits_since
            is_over = not self._num_writing or any(lane.can_bring for lane in self._lanes)
            self._waits_since = None if is_over else now
        least_s = max(LIMIT_S, LIMIT_SHARE * (now - self._began_at))
        if self._has_noted or self._waited_s < least_s:
            return []
        disk, link = self._waited_bytes / self._waited_s, self._link.bytes_per_s
        more = "more" if link is None or link < disk else f"{format_bytes(link)}/s"
        self._has_noted = True
        return [
            Note(
                "warning",
                "the disk under network.store_dir is slower than the network: it takes "
                f"{format_bytes(disk)}/s, the links bring {more}; versions arrive at its pace. "
                "Point network.store_dir to a tmpfs such as /dev/shm/echo or to a faster disk, or "
                "raise vm.dirty_ratio",
            )
        ]
