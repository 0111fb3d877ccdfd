"""The audit: hashes, in the background, the chunks of images that were built from deltas.

The learner signs the old and new words of each delta, so patched words are correct. The other words
of the image may have been damaged in memory. If an image was built from deltas, its manifest (the
seal) arrives later. Then this node hashes the chunks of the image, in pieces of AUDIT_BYTES, during
at most AUDIT_SHARE of the time.
"""

from __future__ import annotations

from echo.core.rollout import PolicyVersion
from echo.weights.store.items import AuditChunks, Transfer
from echo.weights.store.store import ItemStore
from echo.wire.actions import Action

AUDIT_BYTES = 32 << 20
"""Number of bytes hashed in one piece of work: about 4 ms of a core."""
AUDIT_SHARE = 0.05
"""Largest share of the time that hashing may take. Damage is rare, so an audit may take long, and
the core has other work."""


class Audit:
    """Hashes sealed images in the background, one image at a time."""

    def __init__(self, store: ItemStore) -> None:
        """Start with no image to hash."""
        self._store = store
        self._image: Transfer | None = None
        self._next = 0
        """Index of the next chunk to hash."""
        self._work: AuditChunks | None = None
        self._began_at = self._due_at = 0.0

    def begin(self, image: Transfer, *, now: float) -> None:
        """Start to hash an image, if no other image is being hashed."""
        if self._image is None or self._store.images.get(self._image.manifest.version) is None:
            self._image, self._next, self._due_at = image, 0, now

    @property
    def deadline(self) -> float | None:
        """Time at which the next piece is due; None if no piece is due."""
        return None if self._image is None or self._work is not None else self._due_at

    def expire(self, *, now: float) -> list[Action]:
        """Return the next piece of work if a piece is due, otherwise an empty list."""
        image = self._image
        if image is None or self._work is not None or now < self._due_at:
            return []
        if self._store.images.get(image.manifest.version) is not image:
            self._image = None
            return []
        number = max(1, AUDIT_BYTES // image.manifest.chunk_bytes)
        stop = min(self._next + number, image.num_chunks)
        self._work, self._began_at = AuditChunks(image, self._next, stop), now
        return [self._work]

    def worked(self, work: AuditChunks, fault: str, *, now: float) -> bool:
        """Handle the result of hashing a piece; return whether the image's audit is finished.

        An audit finishes with a fault or with the last piece. For a dropped image, the audit stops
        and the result is False.
        """
        self._work = None
        image = work.image
        is_held = self._store.images.get(image.manifest.version) is image
        if is_held and not fault and work.stop < image.num_chunks:
            self._next, self._due_at = work.stop, self._due_after(now)
            return False
        if self._image is image:
            self._image = None
        if is_held and not fault:
            self._begin_newest(image.manifest.version, now)
        return is_held

    def _due_after(self, now: float) -> float:
        """Return when the next piece is due after a piece that has ended at `now`.

        The pause between the two pieces makes hashing take AUDIT_SHARE of the time.
        """
        return now + (now - self._began_at) * (1 / AUDIT_SHARE - 1)

    def _begin_newest(self, audited: PolicyVersion, now: float) -> None:
        """Begin to hash the newest sealed image if it was built from deltas.

        The image must be newer than the version `audited`.
        """
        newest = self._store.newest_sealed
        if newest is not None and newest > audited:
            image = self._store.images[newest]
            if image.is_complete and not image.is_hashed:
                self.begin(image, now=self._due_after(now))
