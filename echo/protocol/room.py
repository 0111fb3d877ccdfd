"""What is done where a version has no room: the ones that are here are kept, and it is tried again.

Room may become free here, as soon as an image is dropped, or by others' doing (a disk that was
full), of which nobody tells: so it is also tried after a pause that grows. The operator reads of it
once, however often it is tried.
"""

from __future__ import annotations

from echo.core.errors import StorageError
from echo.wire.actions import Note

FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 60.0
RELEASE_PAUSE_S = 0.2
"""After an image was dropped: what is still being sent of it is not free at once."""


class Room:
    """When to try again."""

    def __init__(self) -> None:
        """Start with room."""
        self.retry_at: float | None = None
        """When to try again; None while nothing lacks room."""
        self._pause_s = FIRST_PAUSE_S
        self._has_noted = False

    def lacks(self, error: StorageError, *, now: float) -> list[Note]:
        """Note that there was none, and return what the operator should read."""
        self.retry_at = now + self._pause_s
        self._pause_s = min(MAX_PAUSE_S, 2 * self._pause_s)
        if self._has_noted:
            return []
        self._has_noted = True
        text = f"keeping the versions that are here, and trying again later: {error}"
        return [Note("warning", text)]

    def released(self, *, now: float) -> None:
        """Note that an image was dropped."""
        if self.retry_at is not None:
            self.retry_at = min(self.retry_at, now + RELEASE_PAUSE_S)

    def found(self) -> None:
        """Note that there was some."""
        self.retry_at, self._pause_s, self._has_noted = None, FIRST_PAUSE_S, False

    def is_due(self, *, now: float) -> bool:
        """Return whether to try again now; said once."""
        if self.retry_at is None or now < self.retry_at:
            return False
        self.retry_at = None
        return True
