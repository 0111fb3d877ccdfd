"""How long a lease waits for the version that it asks for.

The learner counts on the version that a worker has told of. A worker that holds an older one by
now, as after a restart, has the newer one soon, or never: its uplink may be cut off, or the version
refused by its engine. So it waits, and then gives the lease back, for somebody else.
"""

from __future__ import annotations

from collections.abc import Sequence

from echo.wire.messages import Lease

MAX_S = 30.0


class VersionWait:
    """Since when leases have been waiting."""

    def __init__(self, max_s: float = MAX_S) -> None:
        """Take the seconds that one may wait."""
        self.max_s = max_s
        self._since: dict[tuple[int, int], float] = {}

    def late(self, waiting: Sequence[Lease], *, now: float) -> list[Lease]:
        """Note which leases wait, and return those that have waited too long."""
        keys = {(lease.group_id, lease.attempt): lease for lease in waiting}
        self._since = {key: self._since.get(key, now) for key in keys}
        return [keys[key] for key, since in self._since.items() if now >= since + self.max_s]
